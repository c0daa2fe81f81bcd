//! The controller's process: watches, leader election, probes and decisions, from start to clean stop.
//!
//! ```text
//! watches ─┬─> reconciler (decides; writes while this controller leads) ──> status, ledger, events
//!          └─> prober (probes the agents of egress nodes while that is its duty) ──> reconciler
//! ```
//!
//! It runs on a node, in the host network, because agents answer on addresses of the management network.

use std::sync::Arc;

use futures::{Stream, StreamExt};
use ipnet::IpNet;
use kube::Client;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::change_queue::{self, ChangeSender};
use crate::controller::node_health::leader_probe;
use crate::controller::node_health::prober::{self, Overlay};
use crate::controller::node_health::session::ProbeSettings;
use crate::controller::pod_counts::{self, PodCounts};
use crate::controller::reconciler::ControllerReconciler;
use crate::metrics::HealthPage;
use crate::metrics::health_page::{Running, RunningController};
use egress_core::model::reserved::ClusterNetworks;
use egress_core::model::settings::OnUnassigned;
use egress_core::model::view::{Change, Update};
use egress_core::node_health::NodeHealth;
use egress_datapath::overlay::endpoints::Endpoints;
use egress_datapath::overlay::probe;
use egress_kube::api_outage::ApiOutages;
use egress_kube::events;
use egress_kube::health_key::SharedKey;
use egress_kube::health_key::{self, IfAbsent};
use egress_kube::leader_election::{ElectionInputs, campaign, leadership, own_identity};
use egress_kube::ledger::LedgerStore;
use egress_kube::policy::StatusWriters;
use egress_kube::watches::for_controller;
use egress_supervise::Heartbeat;
use egress_supervise::{self, Task, Tasks};

pub struct ControllerSettings {
    /// The node that the controller runs on.
    pub node_name: String,
    /// The namespace of the Lease, the ledger and the agents' key.
    pub namespace: String,
    pub networks: ClusterNetworks,
    pub on_unassigned: OnUnassigned,
    /// How nodes are probed.
    pub probing: ProbeSettings,
    /// The UDP port of the overlay, through which nodes are probed too.
    pub overlay: Option<u16>,
    /// Of the client's API server.
    pub outages: ApiOutages,
    /// Metrics and health pages; `None` for neither.
    pub health_page: Option<Arc<HealthPage>>,
}

/// Capacity of the queues of probes and answers through the overlay.
const ECHOES: usize = 4096;

/// Runs until stopped. It releases the Lease then, so that the other controller leads at once.
pub async fn run(client: Client, settings: ControllerSettings, stop: CancellationToken) {
    let ControllerSettings {
        node_name,
        namespace,
        networks,
        on_unassigned,
        mut probing,
        overlay,
        outages,
        health_page,
    } = settings;
    let meters = health_page.as_ref().map(|health_page| health_page.meters()).unwrap_or_default();
    let (key, key_holder) = SharedKey::new();
    let (events, delivery) = events::queue(client.clone(), &node_name, &outages);
    (probing.meters, probing.key, probing.events) = (meters.clone(), key, Some(events.clone()));
    probing.outages = Some(outages.clone());
    let (asks_agents, terms) = (probing.asks_agents(), probing.terms());
    if !asks_agents {
        warn!(
            "--egressip-node-healthcheck-port is 0: egress nodes stop serving egress IPs when the API server is away for \
             longer than the total timeout; set a port, the same for agents and controllers"
        );
    }
    let (published, leads, duty) = leadership();
    let (to_reconciler, for_reconciler) = change_queue::inbox();
    let (to_prober, for_prober) = change_queue::inbox();
    let (to_leader_probe, for_leader_probe) = change_queue::inbox();
    let ((holder, is_holder), (silent, silence)) = (watch::channel(None), watch::channel(None));
    let ((found, node_health), (to_count, to_ask)) =
        (watch::channel(NodeHealth::by(terms.lease)), watch::channel(None));
    let (isolated, is_isolated) = watch::channel(false);
    let (counts, is_counts) = watch::channel(PodCounts::default());
    let (endpoints, (own_endpoint, ..)) = Endpoints::new(&node_name);
    let (synced, is_synced) = watch::channel(false);

    let identity = own_identity(&node_name);
    let writers = (StatusWriters::new(&client), LedgerStore::new(client.clone(), &namespace));
    let of_nodes = (node_health, terms, outages.rollbacks());
    let reconciler =
        ControllerReconciler::new(writers, events, leads.clone(), of_nodes, identity.clone(), networks.clone())
            .metered(meters)
            .counting(to_count, is_counts)
            .with_unassigned(on_unassigned);
    let heartbeat = Heartbeat::default();
    if let Some(health_page) = &health_page {
        let running = RunningController { leadership: leads, synced: is_synced, beat: heartbeat.clone() };
        health_page.runs(Running::Controller(running));
    }

    // Separate tasks: in a large cluster a decision takes longer than the timeouts of the Lease and of probes.
    let mut tasks = Tasks::new(&stop);
    tasks.spawn(Task::Controller, reconciler.run(for_reconciler, stop.clone()));
    let (candidate, place, of, until) = (client.clone(), namespace.clone(), outages.clone(), stop.clone());
    let inputs = ElectionInputs { holder, silence, isolated: is_isolated };
    tasks.spawn(Task::LeaderElection, async move {
        campaign(candidate, (&place, identity), (published, inputs), &of, heartbeat, until).await;
    });
    tasks.spawn(Task::LeaderKnocks, leader_probe::run(probing.port, for_leader_probe, is_holder, silent, stop.clone()));
    if asks_agents {
        tasks.spawn(Task::PodCounts, pod_counts::run(probing.clone(), node_name.clone(), to_ask, counts, stop.clone()));
    }
    let overlay_probes = overlay.map(|port| {
        let ((ask, questions), (echoed, echoes)) = (mpsc::channel(ECHOES), mpsc::channel(ECHOES));
        let asker = probe::Asker { port, own: own_endpoint, questions, echoes: echoed };
        // A separate task: any traffic to the tunnel's port can keep it busy.
        tasks.spawn(Task::OverlayEcho, probe::ask(asker, stop.clone()));
        Overlay { port, ask, echoes }
    });
    let (own_node, until) = (node_name.clone(), stop.clone());
    tasks.spawn(Task::Prober, async move {
        prober::run(probing, &own_node, for_prober, duty, (found, isolated, overlay_probes), until).await;
    });
    let keep_key = async {
        if asks_agents {
            let keep = health_key::keep(
                (client.clone(), &namespace),
                key_holder,
                (&outages, None),
                IfAbsent::Create,
                stop.clone(),
            );
            egress_supervise::until(stop.clone(), Task::KeyReader, keep).await;
        }
    };
    let services: &[IpNet] = &networks.services;
    let incoming = for_controller(&client, &namespace, services, &outages);
    let (reconciler, prober, leader_probe_nodes) = (to_reconciler, to_prober, to_leader_probe);
    let receivers =
        Receivers { reconciler, prober, leader_probe_nodes, endpoints, synced_lists: SyncedLists::default(), synced };
    tokio::join!(
        egress_supervise::until(stop.clone(), Task::ApiWatches, fan_out(incoming, receivers, stop.clone())),
        egress_supervise::until(stop.clone(), Task::EventWriter, delivery.run(stop.clone())),
        keep_key,
        tasks.ended(),
    );
}

/// Which lists have arrived.
#[derive(Default)]
struct SyncedLists {
    objects: bool,
    nodes: bool,
}

/// The receivers of changes.
struct Receivers {
    reconciler: ChangeSender,
    prober: ChangeSender,
    leader_probe_nodes: ChangeSender,
    endpoints: Endpoints,
    synced_lists: SyncedLists,
    /// Objects and nodes have been listed: this controller could lead.
    synced: watch::Sender<bool>,
}

impl Receivers {
    fn send(&mut self, change: Change) {
        match &change {
            Change::Nodes(update) => {
                self.synced_lists.nodes |= matches!(update, Update::Replaced(_));
                self.endpoints.apply(update);
                self.prober.put(change.clone());
                self.leader_probe_nodes.put(change.clone());
            }
            Change::Ledger(_) => self.prober.put(change.clone()),
            Change::Policies(update) => self.synced_lists.objects |= matches!(update, Update::Replaced(_)),
            Change::Services(_) | Change::Namespaces(_) | Change::Pods(_) => {}
        }
        self.reconciler.put(change);
        let is_synced = self.synced_lists.objects && self.synced_lists.nodes;
        self.synced.send_if_modified(|known| std::mem::replace(known, is_synced) != is_synced);
    }
}

/// Sends every change to all receivers; none waits for another.
async fn fan_out(changes: impl Stream<Item = Change>, mut receivers: Receivers, stop: CancellationToken) {
    let mut changes = std::pin::pin!(changes.take_until(stop.cancelled_owned()));
    while let Some(change) = changes.next().await {
        receivers.send(change);
    }
}
