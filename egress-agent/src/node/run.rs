//! An agent, from start to clean stop: the list of its parts. For the controller see `controller::run`.
//!
//! ```text
//! API watches ──> reconciler: compiler -> plan -> executor ──> ready ──> health server <── probes of the controller
//! ```
//!
//! Each part is its own task, so that a busy part does not delay the lease. Parts share only [`AgentTopics`]. The executor
//! is generic, so that everything but the kernel runs in tests.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::FutureExt;
use kube::Client;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::change_queue;
use crate::debug::{self, Question, Questions, Sources};
use crate::health;
use crate::metrics::health_page::{AgentSources, Running};
use crate::metrics::{HealthPage, Meters, node_watch};
use crate::nat_log;
use crate::node::fan_out::{Listeners, fan_out};
use crate::node::reconciler::Reconciler;
use crate::node::reconciler::ownership::{Coordination, FreshRead};
use crate::node::{lease_keeper, probe_orders};
use egress_core::model::ledger::{Acknowledgements, Ledger};
use egress_core::model::node::{Node, Readiness};
use egress_core::model::policy::NamingPolicies;
use egress_core::model::settings::NodeSettings;
use egress_core::model::state::SelectedPods;
use egress_core::node_health::fitness::{Ready, UplinkState};
use egress_core::ownership::lease::{LeaseDemand, LeaseState};
use egress_core::plan::executor::Executor;
use egress_datapath::announce::next_hop::{watch_further, watch_uplink};
use egress_datapath::devices::host::Host;
use egress_datapath::overlay::endpoints::Endpoints;
use egress_datapath::overlay::probe;
use egress_kube::api_outage::ApiOutages;
use egress_kube::fresh_read::still_assigned;
use egress_kube::health_key::{self, IfAbsent, SharedKey};
use egress_kube::ledger::LedgerStore;
use egress_kube::watches::for_agent;
use egress_kube::{acknowledgements, events, node_facts, restored_backup};
use egress_supervise::{Heartbeat, Task, Tasks};

pub struct AgentSettings {
    pub model: NodeSettings,
    /// Namespace of the ledger and of the agents' key.
    pub namespace: String,
    /// Port zero: no health server.
    pub health: health::HealthSettings,
    /// The UDP port of the overlay, where probes through the overlay are to be answered.
    pub overlay: Option<u16>,
    /// Reads this node's networks, which the agent publishes if no CNI does.
    pub host: Option<Host>,
    /// Of the client's API server.
    pub outages: ApiOutages,
    /// Serves `egress-agent status` and the like; `None` for no socket.
    pub questions: Option<Questions>,
    /// Serves metrics and health pages; `None` for none.
    pub health_page: Option<Arc<HealthPage>>,
}

/// Queue length of questions of `egress-agent status`.
const QUESTIONS: usize = 16;

/// What the parts of an agent publish to each other. A topic has one writer; a reader sees its latest value.
#[derive(Default)]
struct AgentTopics {
    // Of the API watches.
    own_node: watch::Sender<Option<Arc<Node>>>,
    is_egress_node: watch::Sender<bool>,
    ledger: watch::Sender<Arc<Ledger>>,

    // Of the reconciler.
    ready: watch::Sender<Ready>,
    selected_pods: watch::Sender<SelectedPods>,
    lease_demand: watch::Sender<LeaseDemand>,
    /// The hand-overs for which this node has released its address.
    released: watch::Sender<Acknowledgements>,
    /// What this node is ready to take over.
    readiness: watch::Sender<Readiness>,

    // Of the lease keeper.
    lease_state: watch::Sender<LeaseState>,
    /// The number of the latest end of an endless lease that the programs obey.
    bounded: watch::Sender<Option<u64>>,

    // Of the health server, by the controller's probes.
    /// The time as of which the controller has received an answer of this agent.
    confirmed: watch::Sender<Option<Instant>>,
    total_timeout: watch::Sender<Option<Duration>>,
    orders: watch::Sender<Acknowledgements>,
    leader: watch::Sender<Option<String>>,

    // Of the probe orders.
    obeyed: watch::Sender<Acknowledgements>,

    // Of the uplink watch.
    uplink: watch::Sender<UplinkState>,
    /// When a next hop answered last.
    next_hop: watch::Sender<Option<Instant>>,

    // Of the overlay probes.
    overlay_port: watch::Sender<Option<u16>>,
}

/// Runs until `stop`. The executor's changes stay.
pub async fn run<E: Executor + Send + 'static>(
    client: Client,
    settings: AgentSettings,
    executor: E,
    stop: CancellationToken,
) {
    let AgentSettings { model, namespace, health, overlay, host, outages, questions, health_page } = settings;
    let (node_name, topics) = (model.node_name.clone(), AgentTopics::default());
    let store = LedgerStore::new(client.clone(), &namespace);
    let agent = AgentInputs { client, store, node_name, namespace, outages, topics, stop };
    let (events, delivery) = events::queue(agent.client.clone(), &agent.node_name, &agent.outages);
    let meters = health_page.as_ref().map(|health_page| health_page.meters()).unwrap_or_default();
    let notes = questions.as_ref().map(|questions| questions.notes.clone());
    let ((to_reconciler, questions_in), (to_changes, changes)) = (mpsc::channel(QUESTIONS), change_queue::inbox());
    let (endpoints, (own_endpoint, node_endpoints, node_addresses)) = Endpoints::new(&agent.node_name);
    let (reconciler_heartbeat, lease_heartbeat) = (Heartbeat::default(), Heartbeat::default());

    let mut parts = Tasks::new(&agent.stop);
    let listeners = agent.listeners(to_changes, endpoints);
    let watches = for_agent(&agent.client, (&agent.namespace, &agent.node_name), &model.service_cidrs, &agent.outages);
    parts.spawn(Task::ApiWatches, fan_out(watches, listeners, agent.stop.clone()));
    parts.spawn(Task::EventWriter, delivery.run(agent.stop.clone()));
    parts.spawn(Task::Rollback, agent.restored_backup());
    parts.spawn(Task::LeaseKeeper, agent.lease_keeper(health.total_timeout, &executor, lease_heartbeat.clone()));
    parts.spawn(Task::Acknowledgements, agent.acknowledgements());
    if let Some(host) = host {
        let (host, pods) =
            (Arc::new(host), model.cluster_subnets.iter().chain(&model.service_cidrs).copied().collect());
        parts.spawn(Task::NodePublisher, agent.node_facts(host.clone(), pods));
        parts.spawn(Task::NextHop, agent.uplink_watch(host));
    }
    if let Some(port) = overlay {
        let answers = agent.topics.overlay_port.clone();
        let answerer = probe::Answerer { port, own: own_endpoint, nodes: node_endpoints, answers };
        parts.spawn(Task::OverlayEcho, probe::answer(answerer, agent.stop.clone()));
    }
    if health.port != 0 {
        let (key, holder) = SharedKey::new();
        parts.spawn(Task::KeyReader, agent.key_reader(holder, notes.clone()));
        parts.spawn(Task::Orders, agent.probe_orders());
        parts.spawn(Task::HealthServer, agent.health_server(health, (key, node_addresses), meters.clone()));
    }
    if let Some(health_page) = health_page {
        health_page.set_running(Running::Agent(
            agent.sources(to_reconciler.clone(), (reconciler_heartbeat.clone(), lease_heartbeat)),
        ));
        parts.spawn(Task::NodeTroubles, agent.node_watch(health_page, (events.clone(), notes)));
    }
    if let Some(questions) = questions {
        if let Some(settings) = questions.nat_log.clone() {
            let log = nat_log::run(settings, questions.bpffs.clone(), to_reconciler.clone());
            let stop = agent.stop.clone();
            parts.spawn(Task::NatLog, async move { stop.run_until_cancelled(log).await.unwrap_or_default() });
        }
        parts.spawn(Task::StatusSocket, agent.status_socket(to_reconciler, questions));
    }
    let reconciler = Reconciler::new(model, executor, Some(events), agent.topics.ready.clone())
        .with_coordination(agent.coordination().with_questions(questions_in))
        .with_meters(meters)
        .with_heartbeat(reconciler_heartbeat)
        .with_selected_pods(agent.topics.selected_pods.clone());
    let stop = agent.stop.clone();
    parts.spawn(Task::NodeReconciler, async move { drop(reconciler.run(changes, stop).await) });
    parts.ended().await;
}

/// The inputs of the parts.
struct AgentInputs {
    client: Client,
    store: LedgerStore,
    node_name: String,
    namespace: String,
    outages: ApiOutages,
    topics: AgentTopics,
    stop: CancellationToken,
}

impl AgentInputs {
    fn listeners(&self, reconciler: change_queue::ChangeSender, endpoints: Endpoints) -> Listeners {
        Listeners {
            reconciler,
            own_node: self.topics.own_node.clone(),
            is_egress_node: self.topics.is_egress_node.clone(),
            naming: NamingPolicies::default(),
            readiness: self.topics.readiness.subscribe(),
            node_name: self.node_name.clone(),
            acknowledging: BTreeMap::new(),
            ledger: self.topics.ledger.clone(),
            endpoints,
        }
    }

    /// What the reconciler follows and reports in addition to the desired state.
    fn coordination(&self) -> Coordination {
        let (topics, name) = (&self.topics, self.node_name.clone());
        let readers = (self.client.clone(), self.store.clone());
        let fresh_read: FreshRead =
            Box::new(move |questions| still_assigned(readers.clone(), name.clone(), questions).boxed());
        let obeys = (topics.lease_state.subscribe(), topics.obeyed.subscribe());
        let reports = (topics.lease_demand.clone(), topics.released.clone());
        Coordination::new(&self.node_name, obeys, reports, fresh_read).with_readiness(topics.readiness.clone())
    }

    fn lease_keeper<E: Executor>(
        &self,
        total: Duration,
        executor: &E,
        heartbeat: Heartbeat,
    ) -> impl Future<Output = ()> + use<E> {
        let topics = &self.topics;
        let confirmations = lease_keeper::Confirmations {
            confirmed: topics.confirmed.subscribe(),
            total_timeout: topics.total_timeout.subscribe(),
            demand: topics.lease_demand.subscribe(),
        };
        let lease = lease_keeper::PublishedLease {
            lease_state: topics.lease_state.clone(),
            programs: executor.lease(),
            bounded: topics.bounded.clone(),
        };
        let (node, store) = ((self.node_name.clone(), total), self.store.clone());
        lease_keeper::keep(node, store, confirmations, lease, heartbeat, self.stop.clone())
    }

    fn probe_orders(&self) -> impl Future<Output = ()> + use<> {
        let (node, topics) = ((self.node_name.clone(), self.store.clone()), &self.topics);
        let (orders, ledger) = (topics.orders.subscribe(), topics.ledger.subscribe());
        probe_orders::obey(node, orders, ledger, topics.obeyed.clone(), self.stop.clone())
    }

    fn health_server(
        &self,
        settings: health::HealthSettings,
        (key, nodes): (SharedKey, watch::Receiver<Arc<std::collections::BTreeSet<std::net::IpAddr>>>),
        meters: Meters,
    ) -> impl Future<Output = ()> + use<> {
        let topics = &self.topics;
        let inputs = health::Inputs {
            ready: topics.ready.subscribe(),
            selected: topics.selected_pods.subscribe(),
            uplink: topics.uplink.subscribe(),
            released: topics.released.subscribe(),
            overlay: topics.overlay_port.subscribe(),
            bounded: topics.bounded.subscribe(),
            next_hop: topics.next_hop.subscribe(),
            nodes,
            key,
            node_name: self.node_name.clone(),
        };
        let reports = health::Reports {
            confirmed: topics.confirmed.clone(),
            total: topics.total_timeout.clone(),
            orders: topics.orders.clone(),
            outages: self.outages.clone(),
            leader: topics.leader.clone(),
            meters,
        };
        health::serve(settings, inputs, reports, self.stop.clone())
    }

    fn key_reader(
        &self,
        holder: health_key::KeyPublisher,
        notes: Option<egress_core::notes::Notes>,
    ) -> impl Future<Output = ()> + use<> {
        let (client, namespace, outages) = (self.client.clone(), self.namespace.clone(), self.outages.clone());
        let stop = self.stop.clone();
        async move { health_key::keep((client, &namespace), holder, (&outages, notes), IfAbsent::Wait, stop).await }
    }

    fn acknowledgements(&self) -> impl Future<Output = ()> + use<> {
        let topics = &self.topics;
        let reports = (topics.released.subscribe(), topics.readiness.subscribe(), topics.bounded.subscribe());
        let own = (topics.own_node.subscribe(), topics.ready.subscribe());
        let (client, name, outages) = (self.client.clone(), self.node_name.clone(), self.outages.clone());
        let stop = self.stop.clone();
        async move { acknowledgements::publish((client, &name), reports, own, &outages, stop).await }
    }

    fn node_facts(&self, host: Arc<Host>, leave_out: Vec<ipnet::IpNet>) -> impl Future<Output = ()> + use<> {
        let (client, name, outages) = (self.client.clone(), self.node_name.clone(), self.outages.clone());
        let (changes, stop) = ((self.topics.own_node.subscribe(), host.interfaces.clone()), self.stop.clone());
        async move {
            let place = node_facts::NodeFactsTarget { client, node_name: &name, leave_out: &leave_out };
            node_facts::publish(place, &*host, changes, &outages, stop).await;
        }
    }

    fn uplink_watch(&self, host: Arc<Host>) -> impl Future<Output = ()> + use<> {
        let (topics, stop) = (&self.topics, self.stop.clone());
        let (may_host, seen) = (topics.is_egress_node.subscribe(), (topics.uplink.clone(), topics.next_hop.clone()));
        let further = (may_host.clone(), stop.clone());
        async move {
            let further = watch_further(&host.further, further.0, further.1);
            tokio::join!(watch_uplink(&host, may_host, seen, stop), further);
        }
    }

    fn restored_backup(&self) -> impl Future<Output = ()> + use<> {
        let (client, namespace, outages) = (self.client.clone(), self.namespace.clone(), self.outages.clone());
        let stop = self.stop.clone();
        async move { restored_backup::watch(client, &namespace, &outages, stop).await }
    }

    fn sources(&self, reconciler: mpsc::Sender<Question>, heartbeats: (Heartbeat, Heartbeat)) -> AgentSources {
        let topics = &self.topics;
        let request = move |answer| {
            let reconciler = reconciler.clone();
            async move { reconciler.send(Question::Snapshot(answer)).await.is_ok() }.boxed()
        };
        AgentSources {
            reconciler: Arc::new(request),
            ready: topics.ready.subscribe(),
            uplink: topics.uplink.subscribe(),
            lease_state: topics.lease_state.subscribe(),
            demand: topics.lease_demand.subscribe(),
            heartbeats,
        }
    }

    fn node_watch(
        &self,
        health_page: Arc<HealthPage>,
        reports: (events::Events, Option<egress_core::notes::Notes>),
    ) -> impl Future<Output = ()> + use<> {
        let (own_node, stop) = (self.topics.own_node.subscribe(), self.stop.clone());
        async move { node_watch::run(&health_page, own_node, reports, stop).await }
    }

    fn status_socket(
        &self,
        reconciler: mpsc::Sender<Question>,
        questions: Questions,
    ) -> impl Future<Output = ()> + use<> {
        let topics = &self.topics;
        let sources = Sources {
            reconciler,
            ready: topics.ready.subscribe(),
            uplink: topics.uplink.subscribe(),
            lease_state: topics.lease_state.subscribe(),
            leader: topics.leader.subscribe(),
            outages: self.outages.clone(),
            questions,
            since: Instant::now(),
        };
        debug::socket::serve(sources, self.stop.clone())
    }
}
