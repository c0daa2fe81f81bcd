//! The controller's process: watches, leader election, probes and decisions, from start to clean stop.
//!
//! ```text
//! kube::watch ─┬─> leader (decides, and writes while leadership says so) ──> status, ledger, events
//!              └─> reach (probes egress nodes' agents while it is its duty) ──> leader
//! ```
//!
//! It runs on a node, in the node's network: agents answer on addresses of the management network. Of that node it knows the
//! name, and where overlay packets are sent from.

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
use crate::controller::node_health::session::Manner;
use crate::controller::pod_counts::{self, PodCounts};
use crate::controller::reconciler::Leader;
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
use egress_kube::status::StatusWriter;
use egress_kube::watches::for_controller;
use egress_supervise::Heartbeat;
use egress_supervise::{self, Task, Tasks};

pub struct ControllerSettings {
    /// The node that it runs on.
    pub node_name: String,
    /// Where the Lease, the ledger and the agents' key are.
    pub namespace: String,
    pub networks: ClusterNetworks,
    pub on_unassigned: OnUnassigned,
    /// How nodes are probed.
    pub probing: Manner,
    /// The UDP port of the overlay, through which nodes are asked too.
    pub overlay: Option<u16>,
    /// Of the client's API server.
    pub outages: ApiOutages,
    /// What is counted, and where scrapes and health pages ask; `None` for nowhere.
    pub station: Option<Arc<HealthPage>>,
}

/// Questions and answers through the overlay that may wait.
const ECHOES: usize = 4096;

/// Runs until told to stop. It gives up the Lease then, so that the other controller leads at once.
pub async fn run(client: Client, settings: ControllerSettings, stop: CancellationToken) {
    let ControllerSettings { node_name, namespace, networks, on_unassigned, mut probing, overlay, outages, station } =
        settings;
    let meters = station.as_ref().map(|station| station.meters()).unwrap_or_default();
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
    let (to_leader, for_leader) = change_queue::inbox();
    let (to_prober, for_prober) = change_queue::inbox();
    let (to_knocker, for_knocker) = change_queue::inbox();
    let ((rival, is_rival), (silent, silence)) = (watch::channel(None), watch::channel(None));
    let ((found, reach), (asked, to_ask)) = (watch::channel(NodeHealth::by(terms.lease)), watch::channel(None));
    let (isolated, is_isolated) = watch::channel(false);
    let (census, is_census) = watch::channel(PodCounts::default());
    let (endpoints, (own_endpoint, ..)) = Endpoints::new(&node_name);
    let (synced, is_synced) = watch::channel(false);

    let identity = own_identity(&node_name);
    let writers = (StatusWriter::new(client.clone()), LedgerStore::new(client.clone(), &namespace));
    let of_reach = (reach, terms, outages.returns());
    let leader = Leader::new(writers, events, leads.clone(), of_reach, identity.clone(), networks.clone())
        .metered(meters)
        .counting(asked, is_census)
        .with_unassigned(on_unassigned);
    let beat = Heartbeat::default();
    if let Some(station) = &station {
        let running = RunningController { leadership: leads, synced: is_synced, beat: beat.clone() };
        station.runs(Running::Controller(running));
    }

    // Tasks of their own: in a large cluster a decision takes longer than a Lease or a node's silence may.
    let mut tasks = Tasks::new(&stop);
    tasks.spawn(Task::Controller, leader.run(for_leader, stop.clone()));
    let (candidate, place, of, until) = (client.clone(), namespace.clone(), outages.clone(), stop.clone());
    let rival = ElectionInputs { holder: rival, silence, isolated: is_isolated };
    tasks.spawn(Task::LeaderElection, async move {
        campaign(candidate, (&place, identity), (published, rival), &of, beat, until).await;
    });
    tasks.spawn(Task::LeaderKnocks, leader_probe::run(probing.port, for_knocker, is_rival, silent, stop.clone()));
    if asks_agents {
        tasks.spawn(Task::PodCounts, pod_counts::run(probing.clone(), node_name.clone(), to_ask, census, stop.clone()));
    }
    let through = overlay.map(|port| {
        let ((ask, questions), (echoed, echoes)) = (mpsc::channel(ECHOES), mpsc::channel(ECHOES));
        let asker = probe::Asker { port, own: own_endpoint, questions, echoes: echoed };
        // Whatever reaches the tunnel's port can keep it busy.
        tasks.spawn(Task::OverlayEcho, probe::ask(asker, stop.clone()));
        Overlay { port, ask, echoes }
    });
    let (own_node, until) = (node_name.clone(), stop.clone());
    tasks.spawn(Task::Prober, async move {
        prober::run(probing, &own_node, for_prober, duty, (found, isolated, through), until).await;
    });
    let keep_key = async {
        if asks_agents {
            let keep = health_key::keep(
                (client.clone(), &namespace),
                key_holder,
                (&outages, None),
                IfAbsent::Make,
                stop.clone(),
            );
            egress_supervise::until(stop.clone(), Task::KeyReader, keep).await;
        }
    };
    let services: &[IpNet] = &networks.services;
    let incoming = for_controller(&client, &namespace, services, &outages);
    let (leader, prober, knocker) = (to_leader, to_prober, to_knocker);
    let listeners = Listeners { leader, prober, knocker, endpoints, heard: SyncedLists::default(), synced };
    tokio::join!(
        egress_supervise::until(stop.clone(), Task::ApiWatches, fan_out(incoming, listeners, stop.clone())),
        egress_supervise::until(stop.clone(), Task::EventWriter, delivery.run(stop.clone())),
        keep_key,
        tasks.ended(),
    );
}

/// Which lists have been heard.
#[derive(Default)]
struct SyncedLists {
    objects: bool,
    nodes: bool,
}

/// Those that changes are for.
struct Listeners {
    leader: ChangeSender,
    prober: ChangeSender,
    knocker: ChangeSender,
    endpoints: Endpoints,
    heard: SyncedLists,
    /// Objects and nodes have been listed: this controller could lead.
    synced: watch::Sender<bool>,
}

impl Listeners {
    fn tell(&mut self, change: Change) {
        match &change {
            Change::Nodes(update) => {
                self.heard.nodes |= matches!(update, Update::Replaced(_));
                self.endpoints.apply(update);
                self.prober.put(change.clone());
                self.knocker.put(change.clone());
            }
            Change::Ledger(_) => self.prober.put(change.clone()),
            Change::Objects(update) => self.heard.objects |= matches!(update, Update::Replaced(_)),
            Change::Services(_) | Change::Namespaces(_) | Change::Pods(_) => {}
        }
        self.leader.put(change);
        let is_synced = self.heard.objects && self.heard.nodes;
        self.synced.send_if_modified(|known| std::mem::replace(known, is_synced) != is_synced);
    }
}

/// Every change goes to all who listen; none waits for another.
async fn fan_out(changes: impl Stream<Item = Change>, mut listeners: Listeners, stop: CancellationToken) {
    let mut changes = std::pin::pin!(changes.take_until(stop.cancelled_owned()));
    while let Some(change) = changes.next().await {
        listeners.tell(change);
    }
}
