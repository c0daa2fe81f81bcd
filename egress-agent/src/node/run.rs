//! The agent of one node: watches, reconciler, lease and health server, from start to clean stop. What the cluster's controller
//! does is in `controller::run`.
//!
//! ```text
//! kube::watch ──> reconcile: compiler -> plan -> executor ──> ready ──> health <── probes of the controller
//! ```
//!
//! Generic over the executor, so that everything but the kernel runs in a test.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use futures::{FutureExt, Stream, StreamExt};
use kube::Client;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::change_queue::{self, ChangeSender};
use crate::debug::{self, Questions, Sources};
use crate::health;
use crate::metrics::HealthPage;
use crate::metrics::health_page::{AgentSources, Running};
use crate::metrics::watchdog;
use crate::node::reconciler::ownership::{Ask, Coordination};
use crate::node::reconciler::{Ready, Reconciler};
use crate::node::{lease_keeper, probe_orders};
use egress_core::model::ledger::{Acknowledgements, Ledger};
use egress_core::model::node::{Prepared, Readiness};
use egress_core::model::state::SelectedPods;
use egress_core::model::view::{Change, Node, Update};
use egress_core::node_health::fitness::Uplink;
use egress_core::ownership::lease::{LeaseDemand, LeaseState};
use egress_core::plan::desired::Settings;
use egress_core::plan::executor::Executor;
use egress_datapath::devices::host::Host;
use egress_datapath::devices::next_hop::watch_uplink;
use egress_datapath::overlay::endpoints::Endpoints;
use egress_datapath::overlay::probe;
use egress_kube::acknowledgements;
use egress_kube::api_outage::ApiOutages;
use egress_kube::events;
use egress_kube::fresh_read::still_given;
use egress_kube::health_key::SharedKey;
use egress_kube::health_key::{self, IfAbsent};
use egress_kube::ledger::LedgerStore;
use egress_kube::node_facts;
use egress_kube::restored_backup;
use egress_kube::watches::for_agent;
use egress_supervise::Heartbeat;
use egress_supervise::{self, Task, Tasks};

pub struct AgentSettings {
    pub model: Settings,
    /// Where the ledger and the agents' key are.
    pub namespace: String,
    /// A port of zero for no health server.
    pub health: health::Settings,
    /// The UDP port of the overlay, where questions that come through it are to be answered.
    pub overlay: Option<u16>,
    /// Where to ask for this node's networks, to publish them where no CNI does.
    pub host: Option<Host>,
    /// Of the client's API server.
    pub outages: ApiOutages,
    /// Where `egress-agent status` and others ask, and what they are told beside all else; `None` for nowhere.
    pub questions: Option<Questions>,
    /// What is counted, and where scrapes and health pages ask; `None` for nowhere.
    pub station: Option<Arc<HealthPage>>,
}

/// Questions of `egress-agent status` that may wait.
const QUESTIONS: usize = 16;

/// Runs until told to stop. What the executor did stays done.
pub async fn run<E: Executor + Send + 'static>(
    client: Client,
    settings: AgentSettings,
    executor: E,
    stop: CancellationToken,
) {
    let AgentSettings { model, namespace, health, overlay, host, outages, questions, station } = settings;
    let meters = station.as_ref().map(|station| station.meters()).unwrap_or_default();
    let node_name = model.node_name.clone();
    let (key, key_holder) = SharedKey::new();
    let (has_health, total_timeout) = (health.port != 0, health.total_timeout);
    let own_networks: Vec<_> = model.cluster_subnets.iter().chain(&model.service_cidrs).copied().collect();
    let (events, delivery) = events::queue(client.clone(), &node_name, &outages);
    let (ready, is_ready) = watch::channel(Ready::default());
    let (counts, selected) = watch::channel(SelectedPods::new());
    let (to_node, for_node) = change_queue::inbox();
    let (own_node, is_own_node) = watch::channel(None);
    let (road, uplink) = watch::channel(Uplink::Works);
    let (answers, next_hop) = watch::channel(None);
    // As of when the controller has surely heard this agent.
    let ((heard, surely_heard), (total, is_total)) = (watch::channel(None), watch::channel(None));
    let (leader, is_leader) = watch::channel(None);
    let (released, words) = watch::channel(Acknowledgements::new());
    let (ready_for, readiness) = watch::channel(Readiness::default());
    // What the controller's probes ask to be given up, and what of that is obeyed.
    let ((orders, ordered), (obeyed, to_obey)) =
        (watch::channel(Acknowledgements::new()), watch::channel(Acknowledgements::new()));
    let (ledger, is_ledger) = watch::channel(Arc::<Ledger>::default());
    let (endpoints, (own_endpoint, node_endpoints, node_addresses)) = Endpoints::new(&node_name);
    let (answers_through, overlay_port) = watch::channel(None);

    let incoming = for_agent(&client, (&namespace, &node_name), &model.service_cidrs, &outages);
    let listeners = Listeners {
        node: to_node,
        own_node,
        readiness: readiness.clone(),
        node_name: node_name.clone(),
        speakers: BTreeMap::new(),
        ledger,
        endpoints,
    };
    let store = LedgerStore::new(client.clone(), &namespace);
    let (stake, is_stake) = watch::channel(LeaseDemand::default());
    let (standing, stands) = watch::channel(LeaseState::default());
    let (programs, (bounded, is_bounded)) = (executor.lease(), watch::channel(None));
    let (to_reconciler, asks) = mpsc::channel(QUESTIONS);
    let told = (is_ready.clone(), uplink.clone(), stands.clone());
    let ties = ties((&client, &store), &node_name, (stands, to_obey), (stake, released));
    let ties = ties.preparing(ready_for).asked(asks);
    let (moves, beat) = (Heartbeat::default(), Heartbeat::default());
    let reconciler = Reconciler::new(model, executor, Some(events.clone()), ready).tied(ties);
    let reconciler = reconciler.metered(meters.clone()).beating(moves.clone()).counting(counts);
    let of_own_node = (is_own_node.clone(), is_ready.clone());
    let obey = probe_orders::obey((node_name.clone(), store.clone()), ordered, is_ledger, obeyed, stop.clone());
    let healthy = async {
        if has_health {
            let facts = health::Facts {
                ready: is_ready,
                selected,
                uplink,
                released: words.clone(),
                overlay: overlay_port,
                bounded: is_bounded.clone(),
                next_hop,
                nodes: node_addresses,
                key,
                node_name: node_name.clone(),
            };
            let told = health::Reports { heard, total, orders, outages: outages.clone(), leader, meters };
            let serve = health::serve(health, facts, told, stop.clone());
            let serve = egress_supervise::until(stop.clone(), Task::HealthServer, serve);
            tokio::join!(serve, egress_supervise::until(stop.clone(), Task::Orders, obey));
        }
    };
    let mut tasks = Tasks::new(&stop);
    let is_own = is_own_node.clone();
    let look = async {
        if let Some(host) = &host {
            let watch = watch_uplink(host, is_own, (road, answers), stop.clone());
            egress_supervise::until(stop.clone(), Task::NextHop, watch).await;
        }
    };
    if let Some(port) = overlay {
        let answerer = probe::Answerer { port, own: own_endpoint, nodes: node_endpoints, answers: answers_through };
        // Whatever reaches the tunnel's port can keep it busy.
        tasks.spawn(Task::OverlayEcho, probe::answer(answerer, stop.clone()));
    }
    let of_this_node = is_own_node.clone();
    let publish = async {
        if let Some(host) = &host {
            let place = node_facts::Place { client: client.clone(), node_name: &node_name, leave_out: &own_networks };
            let publish = node_facts::publish(place, host, is_own_node, &outages, stop.clone());
            egress_supervise::until(stop.clone(), Task::NodePublisher, publish).await;
        }
    };
    if let Some(station) = &station {
        let (ready, uplink, standing) = told.clone();
        let (node, beats) = (to_reconciler.clone(), (moves, beat.clone()));
        let running = AgentSources { node, ready, uplink, standing, stake: is_stake.clone(), beats };
        station.runs(Running::Agent(running));
    }
    let notes = questions.as_ref().map(|questions| questions.notes.clone());
    let key_notes = notes.clone();
    let keep_key = async {
        // Without health checks there is nothing to verify.
        if has_health {
            let (place, with) = ((client.clone(), namespace.as_str()), (&outages, key_notes));
            let keep = health_key::keep(place, key_holder, with, IfAbsent::Wait, stop.clone());
            egress_supervise::until(stop.clone(), Task::KeyReader, keep).await;
        }
    };
    let watchman = async {
        if let Some(station) = &station {
            let follow = watchdog::follow(station, of_this_node, (events, notes), stop.clone());
            egress_supervise::until(stop.clone(), Task::NodeTroubles, follow).await;
        }
    };
    let since = Instant::now();
    let answer = async {
        if let Some(questions) = questions {
            let (ready, uplink, standing) = told;
            let (node, outages, leader) = (to_reconciler, outages.clone(), is_leader);
            let sources = Sources { node, ready, uplink, standing, leader, outages, questions, since };
            let serve = debug::socket::serve(sources, stop.clone());
            egress_supervise::until(stop.clone(), Task::StatusSocket, serve).await;
        }
    };
    // A task of its own: leases run out while others are at work.
    let heard = lease_keeper::Confirmations { heard: surely_heard, probed: is_total, stake: is_stake };
    let lease = lease_keeper::Lease { standing, programs, bounded };
    let fence = lease_keeper::keep((node_name.clone(), total_timeout), store, heard, lease, beat, stop.clone());
    tasks.spawn(Task::LeaseKeeper, fence);
    let until = stop.clone();
    tasks.spawn(Task::NodeReconciler, async move { drop(reconciler.run(for_node, until).await) });
    let words = (words.clone(), readiness, is_bounded.clone());
    let acknowledge =
        acknowledgements::publish((client.clone(), &node_name), words, of_own_node, &outages, stop.clone());
    let rollback = restored_backup::watch(client.clone(), &namespace, &outages, stop.clone());
    tokio::join!(
        egress_supervise::until(stop.clone(), Task::ApiWatches, fan_out(incoming, listeners, stop.clone())),
        publish,
        egress_supervise::until(stop.clone(), Task::EventWriter, delivery.run(stop.clone())),
        tasks.ended(),
        egress_supervise::until(stop.clone(), Task::Acknowledgements, acknowledge),
        egress_supervise::until(stop.clone(), Task::Rollback, rollback),
        healthy,
        look,
        answer,
        watchman,
        keep_key,
    );
}

/// What the node's half obeys and says beside what is desired.
fn ties(
    (client, store): (&Client, &LedgerStore),
    node_name: &str,
    told: (watch::Receiver<LeaseState>, watch::Receiver<Acknowledgements>),
    tells: (watch::Sender<LeaseDemand>, watch::Sender<Acknowledgements>),
) -> Coordination {
    let (askers, name) = ((client.clone(), store.clone()), node_name.to_owned());
    let ask: Ask = Box::new(move |questions| still_given(askers.clone(), name.clone(), questions).boxed());
    Coordination::new(node_name, told, tells, ask)
}

/// Those that changes are for.
struct Listeners {
    node: ChangeSender,
    /// This node's own Node object, for the one who publishes on it.
    own_node: watch::Sender<Option<Arc<Node>>>,
    /// What it is ready for.
    readiness: watch::Receiver<Readiness>,
    node_name: String,
    /// Nodes with words, as they were heard last: what is left out of them may be for this node later.
    speakers: BTreeMap<String, Arc<Node>>,
    endpoints: Endpoints,
    /// The ledger as it was last heard of.
    ledger: watch::Sender<Arc<Ledger>>,
}

impl Listeners {
    fn tell(&mut self, change: Change) {
        let own = match &change {
            Change::Nodes(Update::Changed(name, node)) if *name == self.node_name => Some(node),
            Change::Nodes(Update::Replaced(nodes)) => nodes.get(&self.node_name),
            _ => None,
        };
        if let Some(own) = own {
            self.own_node.send_if_modified(|known| known.replace(own.clone()).as_ref() != Some(own));
        }
        if let Change::Nodes(update) = &change {
            self.endpoints.apply(update);
            self.note_speakers(update);
        }
        if let Change::Ledger(ledger) = &change {
            self.ledger.send_replace(ledger.clone());
        }
        self.put(change.clone());
        // A record may name this node when its old node has spoken already.
        if let Change::Ledger(ledger) = change {
            let records = ledger.records.open.values().filter(|record| record.to.as_ref() == Some(&self.node_name));
            let from: BTreeSet<&String> = records.map(|record| &record.from).collect();
            for (name, node) in from.into_iter().filter_map(|from| self.speakers.get_key_value(from)) {
                self.put(Change::Nodes(Update::Changed(name.clone(), node.clone())));
            }
        }
    }

    fn note_speakers(&mut self, update: &Update<String, Arc<Node>>) {
        let speaks = |node: &Node| !node.released.is_empty();
        match update {
            Update::Replaced(nodes) => {
                let speakers = nodes.iter().filter(|(_, node)| speaks(node));
                self.speakers = speakers.map(|(name, node)| (name.clone(), node.clone())).collect();
            }
            Update::Changed(name, node) if speaks(node) => drop(self.speakers.insert(name.clone(), node.clone())),
            Update::Changed(name, _) | Update::Removed(name) => drop(self.speakers.remove(name)),
        }
    }

    /// Acknowledgements are for the controller, and for the other node of a hand-over: others would compute everything anew for each.
    fn put(&self, change: Change) {
        let (ready_for, ledger) = (self.ready_for(), self.ledger.borrow().clone());
        let is_awaited = |address: &IpAddr, from: &str| {
            let record = ledger.records.open.get(address);
            record.is_some_and(|record| record.from == from && record.to.as_ref() == Some(&self.node_name))
        };
        self.node.put(hearing(change, &|node| {
            let Node { name, released, given, .. } = node;
            released.retain(|address, _| ready_for.contains(address) || is_awaited(address, name));
            given.retain(|address, _| released.contains_key(address));
            node.prepared.retain(|_, Prepared(_, from, _)| *from == self.node_name);
        }));
    }

    /// What this node has said that it is ready for, in this run or before.
    fn ready_for(&self) -> BTreeSet<IpAddr> {
        let mut ready: BTreeSet<IpAddr> = self.readiness.borrow().prepared.keys().copied().collect();
        ready.extend(self.own_node.borrow().iter().flat_map(|own| own.prepared.keys()));
        ready
    }
}

/// The change where somebody listens to some of the nodes' words only.
fn hearing(change: Change, cut: &dyn Fn(&mut Node)) -> Change {
    let without = |node: Arc<Node>| match node.released.is_empty() && node.prepared.is_empty() {
        true => node,
        false => {
            let mut node = Arc::unwrap_or_clone(node);
            cut(&mut node);
            Arc::new(node)
        }
    };
    match change {
        Change::Nodes(Update::Changed(name, node)) => Change::Nodes(Update::Changed(name, without(node))),
        Change::Nodes(Update::Replaced(nodes)) => {
            Change::Nodes(Update::Replaced(nodes.into_iter().map(|(name, node)| (name, without(node))).collect()))
        }
        other => other,
    }
}

/// Every change goes to all who listen.
async fn fan_out(changes: impl Stream<Item = Change>, mut listeners: Listeners, stop: CancellationToken) {
    let mut changes = std::pin::pin!(changes.take_until(stop.cancelled_owned()));
    while let Some(change) = changes.next().await {
        listeners.tell(change);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use egress_core::model::ledger::HandOver;
    use egress_core::model::samples::ip;

    #[tokio::test]
    async fn a_node_hears_the_words_of_whoever_hands_over_to_it_and_no_others() {
        let (node, mut taker) = change_queue::inbox();
        let mut listeners = Listeners {
            node,
            own_node: watch::channel(None).0,
            readiness: watch::channel(Readiness::default()).1,
            node_name: "n1".into(),
            speakers: BTreeMap::new(),
            ledger: watch::channel(Arc::<Ledger>::default()).0,
            endpoints: Endpoints::new("n1").0,
        };
        let (ours, others) = (ip("172.18.0.100"), ip("172.18.0.101"));
        let word = |name: &str| {
            let released = Acknowledgements::from([(ours, 7), (others, 8)]);
            let node = Node { name: name.into(), released, ..Node::default() };
            Change::Nodes(Update::Changed(name.into(), Arc::new(node)))
        };
        let mut ledger = Ledger::default();
        for (address, to) in [(ours, "n1"), (others, "n3")] {
            let record = HandOver { number: 7, from: "n2".into(), to: Some(to.into()) };
            ledger.records.open.insert(address, record);
        }
        listeners.tell(Change::Ledger(Arc::new(ledger.clone())));
        listeners.tell(word("n2"));
        listeners.tell(word("n3"));
        let mut heard = async || -> Vec<_> {
            let changes = taker.take().await.expect("changes").into_iter();
            let words = changes.filter_map(|change| match change {
                Change::Nodes(Update::Changed(name, node)) => Some((name, node.released.clone())),
                _ => None,
            });
            words.collect()
        };
        assert_eq!(
            heard().await,
            [("n2".to_owned(), Acknowledgements::from([(ours, 7)])), ("n3".to_owned(), Acknowledgements::new())]
        );
        // The other is for this node by now, and its old node has spoken before.
        ledger.records.open.insert(others, HandOver { number: 8, from: "n2".into(), to: Some("n1".into()) });
        listeners.tell(Change::Ledger(Arc::new(ledger)));
        assert_eq!(heard().await, [("n2".to_owned(), Acknowledgements::from([(ours, 7), (others, 8)]))]);
    }
}
