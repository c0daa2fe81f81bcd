//! A controller, from start to clean stop: the list of its parts. What an agent does is in `node::run`.
//!
//! ```text
//! API watches ─┬─> reconciler (writes while this controller leads) ──> status, ledger, events
//!              └─> prober (probes the agents of egress nodes while that is its duty) ──> reconciler
//! ```
//!
//! Each part is a task of its own: a pass of the reconciler in a large cluster takes longer than the timeouts of the
//! Lease and of probes. Parts meet in [`ControllerTopics`] and in what leader election publishes ([`leadership`]). A
//! controller runs on a node, in the host network, because agents answer on addresses of the management network.

use std::sync::Arc;
use std::time::Duration;

use kube::Client;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::change_queue::{self, ChangeReceiver};
use crate::controller::antrea::AntreaTask;
use crate::controller::cilium::CiliumTask;
use crate::controller::egress_routers::EgressRouterTask;
use crate::controller::egress_services::EgressServiceTask;
use crate::controller::fan_out::{Receivers, SyncedLists, fan_out};
use crate::controller::node_health::leader_probe;
use crate::controller::node_health::prober::{self, Overlay};
use crate::controller::node_health::session::ProbeSettings;
use crate::controller::pod_counts::{self, PodCounts};
use crate::controller::reconciler::ControllerReconciler;
use crate::metrics::HealthPage;
use crate::metrics::health_page::{Running, RunningController};
use egress_core::allocation::Nodes;
use egress_core::leader_election::SilentHolder;
use egress_core::model::policy::SourceKind;
use egress_core::model::reserved::ClusterNetworks;
use egress_core::model::settings::OnUnassigned;
use egress_core::node_health::NodeHealth;
use egress_datapath::overlay::endpoints::Endpoints;
use egress_datapath::overlay::probe;
use egress_kube::api_outage::ApiOutages;
use egress_kube::events::{self, Events};
use egress_kube::health_key::{self, IfAbsent, KeyPublisher, SharedKey};
use egress_kube::leader_election::{
    ElectionInputs, ElectionOutputs, Leadership, ProbeDuty, campaign, leadership, own_identity,
};
use egress_kube::ledger::LedgerStore;
use egress_kube::metrics_token;
use egress_kube::policy::StatusWriters;
use egress_kube::watches::for_controller;
use egress_supervise::{Heartbeat, Task, Tasks};

pub struct ControllerSettings {
    /// The node that the controller runs on.
    pub node_name: String,
    /// The namespace of the Lease, the ledger and the agents' key.
    pub namespace: String,
    pub networks: ClusterNetworks,
    pub on_unassigned: OnUnassigned,
    /// Whether Antrea's Egresses and ExternalIPPools are served.
    pub serves_antrea: bool,
    /// Whether Cilium's CiliumEgressGatewayPolicies are served.
    pub serves_cilium: bool,
    /// How often to look for the Secret with the token for the metrics, and to create it if there is none. `None`: never.
    pub metrics_token_interval: Option<Duration>,
    /// The image of the pods of EgressRouters, if they are served.
    pub router_image: Option<String>,
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

/// What the parts of a controller publish to each other. A topic has one writer; a reader sees its latest value.
struct ControllerTopics {
    // Of the API watches.
    /// Objects and nodes have been listed: this controller could lead.
    synced: watch::Sender<bool>,

    // Of the reconciler.
    /// The nodes to ask for pod counts, while this controller leads.
    nodes_to_ask: watch::Sender<Option<Arc<Nodes>>>,

    // Of the requests for pod counts.
    pod_counts: watch::Sender<PodCounts>,

    // Of the prober.
    node_health: watch::Sender<NodeHealth>,
    /// This controller leads, probes several other nodes, and none of them answers.
    isolated: watch::Sender<bool>,

    // Of leader election.
    /// The other controller that holds the Lease.
    holder: watch::Sender<Option<String>>,

    // Of the leader probe.
    /// Set while the node of that holder does not answer.
    silent_holder: watch::Sender<Option<SilentHolder>>,
}

impl ControllerTopics {
    fn new(lease: Duration) -> Self {
        Self {
            synced: watch::Sender::default(),
            nodes_to_ask: watch::Sender::default(),
            pod_counts: watch::Sender::default(),
            node_health: watch::Sender::new(NodeHealth::with_lease(lease)),
            isolated: watch::Sender::default(),
            holder: watch::Sender::default(),
            silent_holder: watch::Sender::default(),
        }
    }
}

/// Runs until stopped. The Lease is released then, so that the other controller leads at once.
pub async fn run(client: Client, settings: ControllerSettings, stop: CancellationToken) {
    let ControllerSettings { node_name, namespace, networks, probing, outages, .. } = settings;
    let ControllerSettings { on_unassigned, serves_antrea, serves_cilium, router_image, .. } = settings;
    let ControllerSettings { overlay, health_page, metrics_token_interval, .. } = settings;
    let (events, delivery) = events::queue(client.clone(), &node_name, &outages);
    let meters = health_page.as_ref().map(|health_page| health_page.meters()).unwrap_or_default();
    let (key, key_publisher) = SharedKey::new();
    let probing =
        ProbeSettings { key, meters, events: Some(events.clone()), outages: Some(outages.clone()), ..probing };
    let (identity, topics) = (own_identity(&node_name), ControllerTopics::new(probing.lease_durations().lease));
    let controller =
        ControllerInputs { client, node_name, namespace, identity, networks, probing, outages, topics, stop };
    let (outputs, leadership, duty) = leadership();
    let (to_reconciler, changes) = change_queue::inbox();
    let (to_prober, prober_changes) = change_queue::inbox();
    let (to_leader_probe, leader_probe_changes) = change_queue::inbox();
    let (to_egress_services, egress_service_changes) = change_queue::inbox();
    let (to_antrea, antrea_changes) = serves_antrea.then(change_queue::inbox).unzip();
    let (to_cilium, cilium_changes) = serves_cilium.then(change_queue::inbox).unzip();
    let (to_routers, router_changes) = router_image.is_some().then(change_queue::inbox).unzip();
    let (endpoints, (own_endpoint, ..)) = Endpoints::new(&controller.node_name);
    let heartbeat = Heartbeat::default();

    let mut parts = Tasks::new(&controller.stop);
    let synced = controller.topics.synced.clone();
    let receivers = Receivers {
        reconciler: to_reconciler,
        prober: to_prober,
        leader_probe: to_leader_probe,
        egress_services: to_egress_services,
        antrea: to_antrea,
        cilium: to_cilium,
        egress_routers: to_routers,
        endpoints,
        synced_lists: SyncedLists::default(),
        synced,
    };
    parts.spawn(Task::ApiWatches, controller.api_watches(receivers));
    parts.spawn(Task::EventWriter, delivery.run(controller.stop.clone()));
    parts.spawn(Task::LeaderElection, controller.leader_election(outputs, heartbeat.clone()));
    parts.spawn(Task::LeaderKnocks, controller.leader_probe(leader_probe_changes));
    if controller.probing.asks_agents() {
        parts.spawn(Task::KeyReader, controller.key_reader(key_publisher));
        parts.spawn(Task::PodCounts, controller.pod_counts());
    }
    if let Some(interval) = metrics_token_interval {
        parts.spawn(Task::MetricsToken, controller.metrics_token(interval));
    }
    let overlay = overlay.map(|port| {
        let ((ask, questions), (echoed, echoes)) = (mpsc::channel(ECHOES), mpsc::channel(ECHOES));
        let asker = probe::Asker { port, own: own_endpoint, questions, echoes: echoed };
        // A separate task: any traffic to the tunnel's port can keep it busy.
        parts.spawn(Task::OverlayEcho, probe::ask(asker, controller.stop.clone()));
        Overlay { port, questions: ask, echoes }
    });
    parts.spawn(Task::Prober, controller.prober(prober_changes, duty, overlay));
    if let Some(health_page) = health_page {
        health_page.set_running(Running::Controller(controller.sources(&leadership, heartbeat)));
    }
    let others = [(serves_antrea, SourceKind::Egress), (serves_cilium, SourceKind::CiliumEgressGatewayPolicy)];
    let others = others.into_iter().filter_map(|(served, kind)| served.then_some(kind)).collect();
    let egress_services = controller.egress_services(events.clone(), leadership.clone(), others);
    parts.spawn(Task::EgressServices, egress_services.run(egress_service_changes, controller.stop.clone()));
    if let Some(changes) = antrea_changes {
        let antrea = controller.antrea(events.clone(), leadership.clone());
        parts.spawn(Task::Antrea, antrea.run(changes, controller.stop.clone()));
    }
    if let Some(changes) = cilium_changes {
        let cilium = controller.cilium(events.clone(), leadership.clone());
        parts.spawn(Task::Cilium, cilium.run(changes, controller.stop.clone()));
    }
    if let (Some(image), Some(changes)) = (router_image, router_changes) {
        let routers = controller.egress_routers(leadership.clone(), image);
        parts.spawn(Task::EgressRouters, routers.run(changes, controller.stop.clone()));
    }
    let reconciler = controller.reconciler(events, leadership, on_unassigned);
    parts.spawn(Task::Controller, reconciler.run(changes, controller.stop.clone()));
    parts.ended().await;
}

/// What the parts are made from.
struct ControllerInputs {
    client: Client,
    node_name: String,
    namespace: String,
    /// Of this controller, in the Lease and in the ledger.
    identity: String,
    networks: ClusterNetworks,
    probing: ProbeSettings,
    outages: ApiOutages,
    topics: ControllerTopics,
    stop: CancellationToken,
}

impl ControllerInputs {
    fn api_watches(&self, receivers: Receivers) -> impl Future<Output = ()> + use<> {
        let watches = for_controller(&self.client, &self.namespace, &self.networks.services, &self.outages);
        fan_out(watches, receivers, self.stop.clone())
    }

    fn reconciler(&self, events: Events, leadership: Leadership, on_unassigned: OnUnassigned) -> ControllerReconciler {
        let (client, topics) = (self.client.clone(), &self.topics);
        let writers = (StatusWriters::new(&client), LedgerStore::new(client, &self.namespace));
        let nodes = (topics.node_health.subscribe(), self.probing.lease_durations(), self.outages.rollbacks());
        let (identity, networks) = (self.identity.clone(), self.networks.clone());
        ControllerReconciler::new(writers, events, leadership, nodes, identity, networks)
            .metered(self.probing.meters.clone())
            .counting(topics.nodes_to_ask.clone(), topics.pod_counts.subscribe())
            .with_unassigned(on_unassigned)
    }

    fn egress_services(&self, events: Events, leadership: Leadership, others: Vec<SourceKind>) -> EgressServiceTask {
        let (client, outages) = (self.client.clone(), self.outages.clone());
        EgressServiceTask { client, outages, events, leadership, others }
    }

    fn antrea(&self, events: Events, leadership: Leadership) -> AntreaTask {
        AntreaTask { client: self.client.clone(), outages: self.outages.clone(), events, leadership }
    }

    fn cilium(&self, events: Events, leadership: Leadership) -> CiliumTask {
        let (client, outages) = (self.client.clone(), self.outages.clone());
        CiliumTask { client, outages, events, leadership, node_health: self.topics.node_health.subscribe() }
    }

    fn egress_routers(&self, leadership: Leadership, image: String) -> EgressRouterTask {
        EgressRouterTask { client: self.client.clone(), outages: self.outages.clone(), leadership, image }
    }

    fn leader_election(&self, outputs: ElectionOutputs, heartbeat: Heartbeat) -> impl Future<Output = ()> + use<> {
        let topics = &self.topics;
        let inputs = ElectionInputs {
            holder: topics.holder.clone(),
            silent_holder: topics.silent_holder.subscribe(),
            isolated: topics.isolated.subscribe(),
        };
        let (client, namespace, identity) = (self.client.clone(), self.namespace.clone(), self.identity.clone());
        let (outages, stop) = (self.outages.clone(), self.stop.clone());
        async move { campaign(client, (&namespace, identity), (outputs, inputs), &outages, heartbeat, stop).await }
    }

    fn leader_probe(&self, nodes: ChangeReceiver) -> impl Future<Output = ()> + use<> {
        let (holder, silent_holder) = (self.topics.holder.subscribe(), self.topics.silent_holder.clone());
        leader_probe::run(self.probing.port, nodes, holder, silent_holder, self.stop.clone())
    }

    fn key_reader(&self, publisher: KeyPublisher) -> impl Future<Output = ()> + use<> {
        let (client, namespace, outages) = (self.client.clone(), self.namespace.clone(), self.outages.clone());
        let stop = self.stop.clone();
        async move { health_key::keep((client, &namespace), publisher, (&outages, None), IfAbsent::Create, stop).await }
    }

    fn metrics_token(&self, interval: Duration) -> impl Future<Output = ()> + use<> {
        let (client, namespace, outages) = (self.client.clone(), self.namespace.clone(), self.outages.clone());
        let stop = self.stop.clone();
        async move { metrics_token::provide((client, &namespace), interval, &outages, stop).await }
    }

    fn pod_counts(&self) -> impl Future<Output = ()> + use<> {
        let (nodes, counts) = (self.topics.nodes_to_ask.subscribe(), self.topics.pod_counts.clone());
        pod_counts::run(self.probing.clone(), self.node_name.clone(), nodes, counts, self.stop.clone())
    }

    fn prober(
        &self,
        changes: ChangeReceiver,
        duty: ProbeDuty,
        overlay: Option<Overlay>,
    ) -> impl Future<Output = ()> + use<> {
        let outputs = (self.topics.node_health.clone(), self.topics.isolated.clone(), overlay);
        let (settings, own_node, stop) = (self.probing.clone(), self.node_name.clone(), self.stop.clone());
        async move { prober::run(settings, &own_node, changes, duty, outputs, stop).await }
    }

    fn sources(&self, leadership: &Leadership, heartbeat: Heartbeat) -> RunningController {
        RunningController { leadership: leadership.clone(), synced: self.topics.synced.subscribe(), heartbeat }
    }
}
