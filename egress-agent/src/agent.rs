//! One agent: watches, the node's half and the controller's half, from start to clean stop.
//!
//! ```text
//! kube::watch ─┬─> reconcile: compiler -> plan -> executor ──> ready ──> health
//!              ├─> controller::leader (writes while controller::leadership says so)
//!              └─> controller::reach (probes other nodes' health while it is its duty) ──> leader
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
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::controller::census::{self, Census};
use crate::controller::deputies::Deputies;
use crate::controller::leader::Leader;
use crate::controller::leadership::{campaign, leadership, own_identity};
use crate::controller::reach::Reach;
use crate::controller::reach::endpoints::Endpoints;
use crate::controller::reach::prober::{self, Overlay};
use crate::controller::reach::session::Manner;
use crate::dataplane::echo;
use crate::dataplane::host::Host;
use crate::dataplane::next_hop::watch_uplink;
use crate::fence;
use crate::health::{self, fitness::Uplink, signature::SharedKey};
use crate::inspect::{self, Questions, Sources};
use crate::kube::anew::still_given;
use crate::kube::events;
use crate::kube::ledger::LedgerStore;
use crate::kube::outage::Outages;
use crate::kube::own_node;
use crate::kube::secret;
use crate::kube::status::StatusWriter;
use crate::kube::watch::changes;
use crate::kube::words;
use crate::metrics::Station;
use crate::metrics::life::Beat;
use crate::metrics::station::Running;
use crate::metrics::watchman;
use crate::model::desired::Settings;
use crate::model::executor::Executor;
use crate::model::inbox::{self, Giver};
use crate::model::ledger::{Ledger, Words};
use crate::model::node::{Prepared, Readiness};
use crate::model::state::SelectedPods;
use crate::model::view::{Change, Node, Update};
use crate::reconcile::ties::{Ask, Stake, Standing, Ties};
use crate::reconcile::{Ready, Reconciler};
use crate::supervise::{self, Task};

pub struct AgentSettings {
    pub model: Settings,
    /// Where the leader's Lease is.
    pub namespace: String,
    /// A port of zero for no health server.
    pub health: health::Settings,
    /// How other nodes are probed when it is this agent's duty; `None` for never.
    pub probing: Option<Manner>,
    /// The UDP port of the overlay, where questions that come through it are to be answered.
    pub overlay: Option<u16>,
    /// Where to ask for this node's networks, to publish them where no CNI does.
    pub host: Option<Host>,
    /// Of the client's API server.
    pub outages: Outages,
    /// Where `egress-agent status` and others ask, and what they are told beside all else; `None` for nowhere.
    pub questions: Option<Questions>,
    /// What is counted, and where scrapes and health pages ask; `None` for nowhere.
    pub station: Option<Arc<Station>>,
}

/// Questions and answers through the overlay that may wait.
const ECHOES: usize = 4096;
/// Questions of `egress-agent status` that may wait.
const QUESTIONS: usize = 16;

/// Runs until told to stop. What the executor did stays done.
pub async fn run<E: Executor + Send + 'static>(
    client: Client,
    settings: AgentSettings,
    executor: E,
    stop: CancellationToken,
) {
    let AgentSettings { model, namespace, health, mut probing, overlay, host, outages, questions, station } = settings;
    let meters = station.as_ref().map(|station| station.meters()).unwrap_or_default();
    let node_name = model.node_name.clone();
    let (networks, on_unassigned) = (model.networks(), model.on_unassigned);
    let (key, key_holder) = SharedKey::new();
    let has_health = health.port != 0;
    let own_networks: Vec<_> = model.cluster_subnets.iter().chain(&model.service_cidrs).copied().collect();
    let (events, delivery) = events::queue(client.clone(), &node_name, &outages);
    if let Some(manner) = &mut probing {
        (manner.meters, manner.key, manner.events) = (meters.clone(), key.clone(), Some(events.clone()));
    }
    let (ready, is_ready) = watch::channel(Ready::default());
    let (counts, selected) = watch::channel(SelectedPods::new());
    let ((asked, to_ask), (census, is_census)) = (watch::channel(None), watch::channel(Census::default()));
    let (published, leads, duty) = leadership();
    let (to_node, for_node) = inbox::inbox();
    let (to_leader, for_leader) = inbox::inbox();
    let (to_prober, for_prober) = inbox::inbox();
    let terms = probing.as_ref().map(Manner::terms).unwrap_or_default();
    let (found, reach) = watch::channel(Reach::by(terms.lease));
    let (own_node, is_own_node) = watch::channel(None);
    let (deputy, is_deputy) = watch::channel(false);
    let (road, uplink) = watch::channel(Uplink::Works);
    let (answers, next_hop) = watch::channel(None);
    // As of when the leader has surely heard this agent.
    let ((heard, surely_heard), (total, is_total)) = (watch::channel(None), watch::channel(None));
    let (released, words) = watch::channel(Words::new());
    let (ready_for, readiness) = watch::channel(Readiness::default());
    // What the leader's probes tell it to let go of, and what of that is obeyed.
    let ((orders, ordered), (obeyed, to_obey)) = (watch::channel(Words::new()), watch::channel(Words::new()));
    let (ledger, is_ledger) = watch::channel(Arc::<Ledger>::default());

    let (endpoints, (own, nodes, node_addresses)) = Endpoints::new(&node_name);
    let ((ask, questions_through), (echoed, echoes)) = (mpsc::channel(ECHOES), mpsc::channel(ECHOES));
    let (answers_through, overlay_port) = watch::channel(None);
    let through = overlay.map(|port| Overlay { port, ask, echoes });
    let echo = overlay.map(|port| echo::Ends {
        port,
        own,
        nodes,
        questions: questions_through,
        echoes: echoed,
        answers: answers_through,
    });

    let incoming = changes(&client, (&namespace, &node_name), &model.service_cidrs, &outages);
    let (name, deputies) = (node_name.clone(), Deputies::default());
    let halves = Halves {
        node: to_node,
        leader: to_leader,
        own_node,
        readiness: readiness.clone(),
        prober: to_prober,
        node_name: name,
        deputies,
        speakers: BTreeMap::new(),
        deputy,
        ledger,
        endpoints,
    };
    let store = LedgerStore::new(client.clone(), &namespace);
    let (stake, is_stake) = watch::channel(Stake::default());
    let (standing, stands) = watch::channel(Standing::Undecided);
    let (word, (bounded, is_bounded)) = (executor.lease(), watch::channel(None));
    let (to_node_half, asks) = mpsc::channel(QUESTIONS);
    let told = (is_ready.clone(), uplink.clone(), stands.clone(), leads.clone(), outages.clone());
    let reached = reach.clone();
    let ties = ties((&client, &store), &node_name, (stands, to_obey), (stake, released));
    let ties = ties.preparing(ready_for).asked(asks);
    let (told_events, of_this_node) = (events.clone(), is_own_node.clone());
    let (moves, beat) = (Beat::default(), Beat::default());
    let reconciler = Reconciler::new(model, executor, Some(events.clone()), ready).tied(ties);
    let reconciler = reconciler.metered(meters.clone()).beating(moves.clone()).counting(counts);
    let counted = meters.clone();
    let identity = own_identity(&node_name);
    let writers = (StatusWriter::new(client.clone()), store.clone());
    let returns = outages.returns();
    let leader = Leader::new(writers, events, leads, (reach, terms, returns), identity.clone(), networks)
        .metered(meters)
        .counting(asked, is_census)
        .with_unassigned(on_unassigned);
    let (of_own_node, serves) = (is_own_node.clone(), is_ready.clone());
    let obey = fence::obey((node_name.clone(), store.clone()), ordered, is_ledger, obeyed, stop.clone());
    let healthy = async {
        if health.port != 0 {
            let (overlay, bounded, released) = (overlay_port, is_bounded, words.clone());
            let (nodes, node_name) = (node_addresses, node_name.clone());
            let facts =
                health::Facts { ready: is_ready, selected, uplink, released, overlay, bounded, nodes, key, node_name };
            let told = health::Told { heard, total, orders, meters: counted };
            let serve = health::serve(health, facts, told, stop.clone());
            let serve = supervise::until(stop.clone(), Task::HealthServer, serve);
            tokio::join!(serve, supervise::until(stop.clone(), Task::Orders, obey));
        }
    };
    let mut tasks = Tasks::new(&stop);
    if let Some(manner) = probing.clone().filter(|manner| manner.port != 0) {
        tasks.spawn(Task::Census, census::run(manner, node_name.clone(), to_ask, census, stop.clone()));
    }
    if let Some(manner) = probing {
        let (own_node, stop) = (node_name.clone(), stop.clone());
        tasks.spawn(Task::Prober, async move {
            prober::run(manner, &own_node, for_prober, (duty, next_hop), (found, through), stop).await;
        });
    }
    let is_own = is_own_node.clone();
    let look = async {
        if let Some(host) = &host {
            let watch = watch_uplink(host, is_own, (road, answers), stop.clone());
            supervise::until(stop.clone(), Task::NextHop, watch).await;
        }
    };
    if let Some(ends) = echo {
        // Whoever reaches the tunnel's port can have it busy.
        tasks.spawn(Task::OverlayEcho, echo::serve(ends, stop.clone()));
    }
    let publish = async {
        if let Some(host) = &host {
            let place = own_node::Place { client: client.clone(), node_name: &node_name, leave_out: &own_networks };
            let publish = own_node::publish(place, host, is_own_node, &outages, stop.clone());
            supervise::until(stop.clone(), Task::NodePublisher, publish).await;
        }
    };
    if let Some(station) = &station {
        let (ready, uplink, standing, leadership, _) = told.clone();
        let (node, beats) = (to_node_half.clone(), (moves, beat.clone()));
        station.runs(Running { node, ready, uplink, standing, stake: is_stake.clone(), leadership, beats });
    }
    let notes = questions.as_ref().map(|questions| questions.notes.clone());
    let key_notes = notes.clone();
    let keep_key = async {
        // Neither asks nor answers: there is nobody to sign for.
        if has_health {
            let keep = secret::keep((client.clone(), &namespace), key_holder, (&outages, key_notes), stop.clone());
            supervise::until(stop.clone(), Task::KeyReader, keep).await;
        }
    };
    let watchman = async {
        if let Some(station) = &station {
            let follow = watchman::follow(station, of_this_node, (told_events, notes), stop.clone());
            supervise::until(stop.clone(), Task::NodeTroubles, follow).await;
        }
    };
    let answer = async {
        if let Some(questions) = questions {
            let (ready, uplink, standing, leadership, outages) = told;
            let (node, reach, since) = (to_node_half, reached, Instant::now());
            let sources = Sources { node, ready, uplink, standing, leadership, outages, reach, questions, since };
            let serve = inspect::socket::serve(sources, stop.clone());
            supervise::until(stop.clone(), Task::StatusSocket, serve).await;
        }
    };
    // A task of its own: leases run out while others are at work.
    let heard = fence::Heard { heard: surely_heard, probed: is_total, stake: is_stake };
    let lease = fence::Lease { standing, word, bounded };
    let fence = fence::keep((node_name.clone(), terms.lease), store, heard, lease, beat, stop.clone());
    tasks.spawn(Task::LeaseKeeper, fence);
    let (for_reconciler, for_controller) = (stop.clone(), stop.clone());
    tasks.spawn(Task::NodeReconciler, async move { drop(reconciler.run(for_node, for_reconciler).await) });
    tasks.spawn(Task::Controller, leader.run(for_leader, for_controller));
    let (candidate, of, until, place) = (client.clone(), outages.clone(), stop.clone(), namespace.clone());
    tasks.spawn(Task::LeaderElection, async move {
        campaign(candidate, (&place, identity), published, is_deputy, &of, until).await;
    });
    let words = (words.clone(), readiness);
    let of_this_node = (of_own_node, serves);
    let acknowledge = words::publish((client.clone(), &node_name), words, of_this_node, &outages, stop.clone());
    tokio::join!(
        supervise::until(stop.clone(), Task::ApiWatches, fan_out(incoming, halves, stop.clone())),
        publish,
        supervise::until(stop.clone(), Task::EventWriter, delivery.run(stop.clone())),
        tasks.ended(),
        supervise::until(stop.clone(), Task::Acknowledgements, acknowledge),
        healthy,
        look,
        answer,
        watchman,
        keep_key,
    );
}

/// What must not wait for each other's computing: in a large cluster a decision, or a new plan, takes longer than a Lease or
/// a node's silence may. They end with whoever holds them.
struct Tasks {
    all: JoinSet<()>,
    stop: CancellationToken,
}

impl Tasks {
    fn new(stop: &CancellationToken) -> Self {
        Self { all: JoinSet::new(), stop: stop.clone() }
    }

    fn spawn(&mut self, task: Task, run: impl Future<Output = ()> + Send + 'static) {
        self.all.spawn(supervise::until(self.stop.clone(), task, run));
    }

    /// Waits for all, which end when they are told to stop.
    async fn ended(mut self) {
        while self.all.join_next().await.is_some() {}
    }
}

/// What the node's half obeys and says beside what is desired.
fn ties(
    (client, store): (&Client, &LedgerStore),
    node_name: &str,
    told: (watch::Receiver<Standing>, watch::Receiver<Words>),
    tells: (watch::Sender<Stake>, watch::Sender<Words>),
) -> Ties {
    let (askers, name) = ((client.clone(), store.clone()), node_name.to_owned());
    let ask: Ask = Box::new(move |questions| still_given(askers.clone(), name.clone(), questions).boxed());
    Ties::new(node_name, told, tells, ask)
}

/// Who is told of changes.
struct Halves {
    node: Giver,
    leader: Giver,
    prober: Giver,
    /// This node's own Node object, for the one who publishes on it.
    own_node: watch::Sender<Option<Arc<Node>>>,
    /// What it is ready for.
    readiness: watch::Receiver<Readiness>,
    node_name: String,
    deputies: Deputies,
    /// Nodes with words, as they were heard last: what is left out of them may be for this node later.
    speakers: BTreeMap<String, Arc<Node>>,
    /// Whether this node's agent is one of them.
    deputy: watch::Sender<bool>,
    endpoints: Endpoints,
    /// The ledger as it was last heard of.
    ledger: watch::Sender<Arc<Ledger>>,
}

impl Halves {
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
            self.deputies.apply(update);
            self.endpoints.apply(update);
            self.note_speakers(update);
            let is_deputy = self.deputies.has(&self.node_name);
            self.deputy.send_if_modified(|known| std::mem::replace(known, is_deputy) != is_deputy);
            self.prober.put(change.clone());
        }
        if let Change::Ledger(ledger) = &change {
            self.ledger.send_replace(ledger.clone());
            self.prober.put(change.clone());
        }
        // Whose pods come and go is nothing to who assigns addresses.
        if matches!(change, Change::Objects(_) | Change::Nodes(_) | Change::Services(_) | Change::Ledger(_)) {
            self.leader.put(change.clone());
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

    /// Words are for the leader, and for the other node of a hand-over: others would compute everything anew for each.
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

/// Every change goes to both halves. Neither waits for the other: a slow API server must not hold up the kernel.
async fn fan_out(changes: impl Stream<Item = Change>, mut halves: Halves, stop: CancellationToken) {
    let mut changes = std::pin::pin!(changes.take_until(stop.cancelled_owned()));
    while let Some(change) = changes.next().await {
        halves.tell(change);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ledger::HandOver;
    use crate::model::samples::ip;

    #[tokio::test]
    async fn a_node_hears_the_words_of_whoever_hands_over_to_it_and_no_others() {
        let ((node, mut taker), (leader, _leads)) = (inbox::inbox(), inbox::inbox());
        let (prober, _probes) = inbox::inbox();
        let mut halves = Halves {
            node,
            leader,
            prober,
            own_node: watch::channel(None).0,
            readiness: watch::channel(Readiness::default()).1,
            node_name: "n1".into(),
            deputies: Deputies::default(),
            speakers: BTreeMap::new(),
            deputy: watch::channel(false).0,
            ledger: watch::channel(Arc::<Ledger>::default()).0,
            endpoints: Endpoints::new("n1").0,
        };
        let (ours, others) = (ip("172.18.0.100"), ip("172.18.0.101"));
        let word = |name: &str| {
            let released = Words::from([(ours, 7), (others, 8)]);
            let node = Node { name: name.into(), released, ..Node::default() };
            Change::Nodes(Update::Changed(name.into(), Arc::new(node)))
        };
        let mut ledger = Ledger::default();
        for (address, to) in [(ours, "n1"), (others, "n3")] {
            let record = HandOver { number: 7, from: "n2".into(), to: Some(to.into()) };
            ledger.records.open.insert(address, record);
        }
        halves.tell(Change::Ledger(Arc::new(ledger.clone())));
        halves.tell(word("n2"));
        halves.tell(word("n3"));
        let mut heard = async || -> Vec<_> {
            let changes = taker.take().await.expect("changes").into_iter();
            let words = changes.filter_map(|change| match change {
                Change::Nodes(Update::Changed(name, node)) => Some((name, node.released.clone())),
                _ => None,
            });
            words.collect()
        };
        assert_eq!(heard().await, [("n2".to_owned(), Words::from([(ours, 7)])), ("n3".to_owned(), Words::new())]);
        // The other is for this node by now, and its old node has spoken before.
        ledger.records.open.insert(others, HandOver { number: 8, from: "n2".into(), to: Some("n1".into()) });
        halves.tell(Change::Ledger(Arc::new(ledger)));
        assert_eq!(heard().await, [("n2".to_owned(), Words::from([(ours, 7), (others, 8)]))]);
    }
}
