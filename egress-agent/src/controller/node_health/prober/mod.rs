//! Probes the agents of all egress nodes while that is this controller's duty: one task per node, and one
//! [`NodeStates`] that evaluates their findings.
//!
//! A leader probes, and continues after it can no longer renew its Lease, until another controller leads: agents hold addresses by
//! the confirmations in probes, and an outage of the API server must not end that. If an agent reports a newer leader, probing
//! ends too, unless no other controller can have taken the Lease yet: terms start again at zero after the Lease is deleted.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use futures::future::join_all;
use ipnet::IpNet;
use tokio::sync::{mpsc, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::change_queue::ChangeReceiver;
use crate::controller::node_health::confirmation::{Confirmation, OtherNodes};
use crate::controller::node_health::session::{Finding, ProbePath, ProbeSettings, SessionInputs, probe_node};
use egress_core::model::ledger::{Acknowledgements, Ledger};
use egress_core::model::node::Node;
use egress_core::model::policy::NamingPolicies;
use egress_core::model::view::{Change, Update};
use egress_core::node_health::NodeHealth;
use egress_core::node_health::liveness::{AgentAnswer, Liveness, Signal};
use egress_core::node_health::state::{CountsAs, NodeHealthReport, NodeStates, StateChange, Traits};
use egress_datapath::overlay::endpoints::endpoint;
use egress_datapath::overlay::probe::{Echo, ProbeQuestion};
use egress_kube::leader_election::ProbeDuty;
use egress_supervise::{self, Task};

/// Interval of evaluating all nodes.
const EVALUATION_INTERVAL: Duration = Duration::from_millis(50);
/// How long a node is still probed after it ceases to be an egress node or its Node is deleted: it may not have released its
/// addresses yet.
const LINGER: Duration = Duration::from_secs(60);
/// How long the last answer of a deleted node is remembered.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(600);
/// Capacity of the queue of findings.
const QUEUE: usize = 4096;
/// Interval of checking whether a leader that has stopped probing should probe again.
const RESTART_INTERVAL: Duration = Duration::from_secs(1);
/// The longest gap between terms that a slow API server causes.
const MAX_TERM_GAP: Duration = Duration::from_secs(3);

/// How long answers may be unsigned before they are reported: an agent that has just started, or has another key already, is no
/// unexpected responder yet.
const UNEXPECTED_AFTER: Duration = Duration::from_secs(2);
/// Interval of reports about one node: an unexpected responder can come and go.
const REPORT_INTERVAL: Duration = Duration::from_secs(600);
/// Reason of the event on the Node.
const NOT_SIGNED: &str = "HealthAnswerNotSigned";

/// Probes through the overlay, in addition to health checks.
pub struct Overlay {
    /// The UDP port of overlay packets.
    pub port: u16,
    pub questions: mpsc::Sender<ProbeQuestion>,
    pub echoes: mpsc::Receiver<Echo>,
}

/// Probes while it is this controller's duty, until stopped.
pub async fn run(
    settings: ProbeSettings,
    own_node: &str,
    mut nodes: ChangeReceiver,
    mut duty: ProbeDuty,
    (node_health, isolated, mut overlay): (watch::Sender<NodeHealth>, watch::Sender<bool>, Option<Overlay>),
    stop: CancellationToken,
) {
    let (mut known, mut ledger) = (KnownNodes::default(), Arc::<Ledger>::default());
    let mut probing: Option<Probing> = None;
    let mut evaluation_tick = tokio::time::interval(EVALUATION_INTERVAL);
    evaluation_tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut restart = tokio::time::interval(RESTART_INTERVAL);
    restart.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            changes = nodes.take() => {
                let Some(changes) = changes else { return };
                let mut has_other_nodes = false;
                for change in changes {
                    has_other_nodes |= apply(&mut known, &mut ledger, change);
                }
                if let Some(probing) = &mut probing {
                    if has_other_nodes {
                        probing.update_nodes(&known);
                    }
                    probing.send_orders(&ledger);
                }
            }
            alive = duty.changed() => {
                if !alive {
                    return;
                }
                let term = duty.term();
                if term == probing.as_ref().map(|probing| probing.term) {
                    continue;
                }
                // No other controller has led in between: what this one has observed is still true.
                let states = probing.take().filter(|former| term == Some(former.term + 1)).map(|former| former.states);
                probing =
                    term.map(|term| start_probing(&settings, own_node, (term, &duty), &node_health, (&known, &ledger), states));
                isolated.send_replace(false);
                if probing.is_none() {
                    stop_probing(&node_health);
                }
            }
            finding = next_finding(&mut probing) => {
                let Some(current) = &mut probing else { continue };
                if current.is_of_newer_leader(&finding) && !duty.leads_alone() {
                    info!("another controller leads: probing ends here");
                    probing = None;
                    stop_probing(&node_health);
                } else {
                    current.record(finding);
                }
            }
            Some((node, at)) = next_echo(&mut overlay) => {
                probing.iter_mut().for_each(|probing| probing.states.note_echo(&node, at));
            }
            // Probing that ended by the report of an agent starts again if the Lease says that this controller leads.
            _ = restart.tick(), if probing.is_none() && duty.leads_alone() => {
                probing =
                    duty.term().map(|term| start_probing(&settings, own_node, (term, &duty), &node_health, (&known, &ledger), None));
            }
            _ = evaluation_tick.tick(), if probing.is_some() => {
                if let Some(probing) = &mut probing {
                    let is_isolated = probing.evaluate();
                    isolated.send_if_modified(|known| std::mem::replace(known, is_isolated) != is_isolated);
                    overlay.iter().for_each(|overlay| probing.probe_overlay(overlay));
                }
            }
        }
    }
}

fn start_probing(
    settings: &ProbeSettings,
    own_node: &str,
    (term, duty): (u64, &ProbeDuty),
    node_health: &watch::Sender<NodeHealth>,
    (known, ledger): (&KnownNodes, &Arc<Ledger>),
    states: Option<NodeStates>,
) -> Probing {
    let mut probing = Probing::new(settings.clone(), own_node, (term, duty.clone()), node_health.clone());
    if let Some(states) = states {
        probing.states = states;
    }
    probing.update_nodes(known);
    probing.states.retain(|name| probing.probed.contains_key(name));
    probing.send_orders(ledger);
    probing
}

/// No node counts as gone any more. The times of the last answers stay: they are still true.
fn stop_probing(node_health: &watch::Sender<NodeHealth>) {
    node_health.send_modify(|node_health| {
        node_health.unreachable.clear();
        node_health.last_serving.clear();
        node_health.suspects.clear();
        node_health.silent.clear();
        node_health.absent.clear();
        node_health.unexpected_responders.clear();
        node_health.released.clear();
        node_health.unserved.clear();
    });
}

/// All nodes, and the policies that say which of them are probed beside those with the label.
#[derive(Default)]
struct KnownNodes {
    nodes: BTreeMap<String, Arc<Node>>,
    naming: NamingPolicies,
}

/// Returns whether other nodes may have to be probed.
fn apply(known: &mut KnownNodes, ledger: &mut Arc<Ledger>, change: Change) -> bool {
    let KnownNodes { nodes: known, naming } = known;
    match change {
        Change::Ledger(new) => *ledger = new,
        Change::Nodes(Update::Replaced(nodes)) => *known = nodes,
        Change::Nodes(Update::Changed(name, node)) => drop(known.insert(name, node)),
        Change::Nodes(Update::Removed(name)) => drop(known.remove(&name)),
        Change::Policies(update) => return naming.apply(update),
        Change::Namespaces(_) | Change::Pods(_) | Change::Services(_) => return false,
    }
    true
}

type NodeFinding = (Arc<str>, Finding);

/// The next finding; pending for ever without probing.
async fn next_finding(probing: &mut Option<Probing>) -> NodeFinding {
    match probing {
        Some(Probing { findings, .. }) => match findings.recv().await {
            Some(found) => found,
            None => std::future::pending().await,
        },
        None => std::future::pending().await,
    }
}

/// The next answer through the overlay; pending for ever without an overlay.
async fn next_echo(overlay: &mut Option<Overlay>) -> Option<Echo> {
    match overlay {
        Some(overlay) => overlay.echoes.recv().await,
        None => std::future::pending().await,
    }
}

/// Probing from the beginning of a duty to its end. Dropping it ends the tasks.
struct Probing {
    settings: ProbeSettings,
    own_node: String,
    term: u64,
    duty: ProbeDuty,
    node_health: watch::Sender<NodeHealth>,
    states: NodeStates,
    others: Arc<OtherNodes>,
    probed: BTreeMap<String, ProbedNode>,
    tasks: JoinSet<()>,
    sender: mpsc::Sender<NodeFinding>,
    findings: mpsc::Receiver<NodeFinding>,
    /// When nodes were last probed through the overlay.
    overlay_probed: Option<Instant>,
    is_cut_off: bool,
    /// No other node answered at the last evaluation.
    no_node_answered: bool,
    /// When this controller was last known to lead.
    last_led: Instant,
    reported: UnexpectedResponders,
}

impl Probing {
    fn new(
        settings: ProbeSettings,
        own_node: &str,
        (term, duty): (u64, ProbeDuty),
        node_health: watch::Sender<NodeHealth>,
    ) -> Self {
        let (sender, findings) = mpsc::channel(QUEUE);
        let states = NodeStates::new(settings.rules);
        let (own_node, tasks) = (own_node.to_owned(), JoinSet::new());
        let (probed, others) = (BTreeMap::new(), Arc::new(OtherNodes::new(Instant::now())));
        node_health.send_if_modified(|node_health| {
            node_health.first_confirmed.clear();
            false
        });
        Self {
            settings,
            own_node,
            term,
            duty,
            node_health,
            states,
            others,
            probed,
            tasks,
            sender,
            findings,
            overlay_probed: None,
            is_cut_off: false,
            no_node_answered: false,
            last_led: Instant::now(),
            reported: UnexpectedResponders::default(),
        }
    }

    /// Starts and ends probes so that exactly the egress nodes are probed.
    fn update_nodes(&mut self, known: &KnownNodes) {
        let (nodes, egress_nodes, now) = (&known.nodes, known.naming.egress_nodes(), Instant::now());
        for (_, probed) in self.probed.iter_mut().filter(|(name, _)| !nodes.contains_key(*name)) {
            probed.until.get_or_insert(now + LINGER);
        }
        self.node_health.send_if_modified(|node_health| {
            node_health
                .last_confirmed
                .retain(|name, last_confirmed| nodes.contains_key(name) || now < *last_confirmed + FORGOTTEN_AFTER);
            false
        });
        for (name, node) in nodes {
            let known = self.probed.get_mut(name);
            if !egress_nodes.has(node) {
                if let Some(probed) = known {
                    probed.until.get_or_insert(now + LINGER);
                }
                continue;
            }
            let paths = paths(node);
            if let Some(probed) = known {
                probed.until = None;
                probed.endpoint = endpoint(node).or(probed.endpoint);
                // If its addresses cannot be read now, it is probed where it was before.
                if paths.is_empty() || probed.paths == paths {
                    continue;
                }
            }
            if !paths.is_empty() {
                self.start_node(name, paths, node, now);
            }
        }
        for (name, probed) in &self.probed {
            probed.is_egress_node.store(probed.until.is_none(), Relaxed);
            self.states.set_may_host(name, nodes.get(name).is_some_and(|node| egress_nodes.has(node) && !node.drained));
        }
        self.count_others();
    }

    /// Passes to each node the hand-overs of its addresses to others.
    fn send_orders(&self, ledger: &Ledger) {
        let mut leaving: BTreeMap<&str, Acknowledgements> = BTreeMap::new();
        for (address, record) in &ledger.records.open {
            leaving.entry(&record.from).or_default().insert(*address, record.number);
        }
        for (name, probed) in &self.probed {
            let orders = leaving.remove(name.as_str()).unwrap_or_default();
            probed.orders.send_if_modified(|known| {
                let is_new = *known != orders;
                *known = orders;
                is_new
            });
        }
    }

    fn count_others(&self) {
        self.others
            .set_exist(self.probed.iter().any(|(name, probed)| probed.until.is_none() && *name != self.own_node));
    }

    fn start_node(&mut self, name: &str, paths: Vec<ProbePath>, node: &Node, now: Instant) {
        let traits = Traits { own: *name == self.own_node, network: network(node) };
        // A leader that took over early has found the node of the former leader silent before.
        let former = self.duty.former().filter(|former| former.node == name);
        self.states.add(name, traits, former.map_or(now, |former| former.silent_since));
        let former = self.probed.remove(name);
        if let Some(former) = &former {
            former.task.abort();
        }
        // Spreads the nodes over the interval.
        let place = u32::try_from(self.probed.len() % 64).unwrap_or_default();
        let offset = self.settings.rules.interval * place / 64;
        let others = (*name != self.own_node).then(|| self.others.clone());
        let new_confirmation = || {
            others.as_ref().map_or_else(|| Confirmation::for_own(self.others.clone()), |_| Confirmation::for_other())
        };
        let confirmation = former.map_or_else(new_confirmation, |former| former.confirmation);
        let orders = watch::Sender::new(Acknowledgements::new());
        let (orders_of, own_node) = (orders.subscribe(), self.own_node.as_str().into());
        let inputs = SessionInputs {
            term: self.term,
            offset,
            confirmation: confirmation.clone(),
            orders: orders_of,
            node: name.into(),
            own_node,
        };
        let (settings, all) = (self.settings.clone(), paths.clone());
        let (node_health, sender, is_egress_node) =
            (self.node_health.clone(), self.sender.clone(), Arc::new(AtomicBool::new(true)));
        let sender =
            FindingSender { node: name.into(), node_health, sender, others, is_egress_node: is_egress_node.clone() };
        let probing_node = async move {
            join_all(all.iter().map(|path| probe_node(&settings, path, &inputs, |finding| sender.send(finding)))).await;
        };
        let task = self.tasks.spawn(egress_supervise::forever(Task::Prober, probing_node));
        let (endpoint, overlay) = (endpoint(node), None);
        let probed = ProbedNode {
            paths,
            endpoint,
            overlay,
            task,
            confirmation,
            orders,
            is_egress_node,
            until: None,
            last_failure: None,
            unexpected: BTreeMap::new(),
            timeout_differs: false,
        };
        self.probed.insert(name.to_owned(), probed);
    }

    fn stop_node(&mut self, name: &str) {
        self.states.remove(name);
        self.node_health.send_if_modified(|node_health| {
            node_health.released.remove(name);
            node_health.unserved.remove(name);
            node_health.unexpected_responders.remove(name);
            false
        });
        if let Some(probed) = self.probed.remove(name) {
            probed.task.abort();
        }
    }

    /// Whether an agent reports a newer leader.
    fn is_of_newer_leader(&self, (node, finding): &NodeFinding) -> bool {
        let Finding::AgentReport { term: Some(term), .. } = finding else { return false };
        *term > self.term && self.probed.contains_key(&**node)
    }

    fn record(&mut self, (node, finding): NodeFinding) {
        let Some(probed) = self.probed.get_mut(&*node) else { return };
        match finding {
            Finding::Signal(signal, at) => self.states.note(&node, signal, at),
            Finding::ReachedDirectly(at) => self.states.note_reached_directly(&node, at),
            // `FindingSender` has handled it.
            Finding::Confirmed(_) => {}
            Finding::Released(released) => {
                self.node_health
                    .send_modify(|node_health| drop(node_health.released.insert(node.to_string(), released)));
            }
            Finding::Unserved(unserved) => {
                self.node_health.send_if_modified(|node_health| {
                    let known = node_health.unserved.remove(&*node).unwrap_or_default();
                    let is_new = known != unserved;
                    if !unserved.is_empty() {
                        node_health.unserved.insert(node.to_string(), unserved);
                    }
                    is_new
                });
            }
            Finding::UnexpectedResponder(address, is_unexpected) => match is_unexpected {
                true => drop(probed.unexpected.insert(address, Instant::now())),
                false => drop(probed.unexpected.remove(&address)),
            },
            Finding::NoAnswer(why) => probed.last_failure = Some(why),
            Finding::AgentReport { timeout, overlay, bounded, next_hop, .. } => {
                probed.overlay = overlay;
                // Next hops of other nodes are no evidence about this controller's network.
                if *node == *self.own_node {
                    next_hop.into_iter().for_each(|at| self.states.note_next_hop(at));
                }
                if let Some(number) = bounded {
                    self.node_health.send_if_modified(|node_health| {
                        node_health.bounded.insert(node.to_string(), number) != Some(number)
                    });
                }
                self.states.set_has_overlay(&node, overlay.is_some());
                let total = self.settings.rules.total;
                let timeout_differs = timeout.is_some_and(|timeout| timeout != total);
                if timeout_differs && !probed.timeout_differs {
                    warn!(
                        %node, there = ?timeout.unwrap_or_default(), here = ?total,
                        "a node has another --egressip-reachability-total-timeout than the leader: set the same on all"
                    );
                }
                probed.timeout_differs = timeout_differs;
            }
        }
    }

    /// Evaluates all nodes. Returns whether no other node answers, of several, at two evaluations in a row: after a
    /// pause of this task answers may still be in the queue.
    fn evaluate(&mut self) -> bool {
        let now = Instant::now();
        let is_over = |probed: &ProbedNode| probed.until.is_some_and(|until| now >= until);
        let expired: Vec<String> =
            self.probed.iter().filter(|(_, a)| is_over(a)).map(|(name, _)| name.clone()).collect();
        expired.iter().for_each(|name| self.stop_node(name));
        self.count_others();
        if self.duty.leads() {
            // Gaps between terms that a slow API server causes are shorter.
            if now >= self.last_led + self.settings.rules.total.max(MAX_TERM_GAP) {
                info!("this controller leads again: lost nodes are detected again");
                self.states.reset(now);
            }
            self.last_led = now;
        }
        let evaluation = self.states.evaluate(now);
        for change in &evaluation.changes {
            self.log_change(change, now);
        }
        if std::mem::replace(&mut self.is_cut_off, evaluation.cut_off) != evaluation.cut_off {
            match evaluation.cut_off {
                true => {
                    warn!("no other egress node answers any more: this node may be cut off, so no address is moved")
                }
                false => info!("egress nodes answer again"),
            }
        }
        self.report_unexpected_responders(now);
        let may_confirm = self.duty.may_confirm();
        for (name, probed) in &self.probed {
            probed.confirmation.set_enabled(may_confirm && !evaluation.unreachable.contains(name));
        }
        let NodeHealthReport { unreachable, last_serving, suspects, mut silent, absent, no_node_answers, .. } =
            evaluation;
        if !self.settings.asks_agents() {
            // Without health checks an agent may have exited long before its node falls silent, with its lease in force.
            silent.clear();
        }
        self.node_health.send_if_modified(|node_health| {
            let known = (&node_health.unreachable, &node_health.suspects, &node_health.silent, &node_health.absent);
            let is_new = known != (&unreachable, &suspects, &silent, &absent);
            (node_health.unreachable, node_health.suspects, node_health.silent, node_health.absent) =
                (unreachable, suspects, silent, absent);
            node_health.last_serving = last_serving;
            is_new
        });
        std::mem::replace(&mut self.no_node_answered, no_node_answers) && no_node_answers
    }

    /// Publishes and reports nodes at whose health addresses something else answers.
    fn report_unexpected_responders(&mut self, now: Instant) {
        let unexpected =
            self.probed.iter().filter_map(|(node, probed)| Some((node.clone(), probed.unexpected_responder(now)?)));
        let unexpected: BTreeMap<String, IpAddr> = unexpected.collect();
        for (node, address) in &unexpected {
            if !self.reported.is_new(node, now) {
                continue;
            }
            let message = format!(
                "something else than its agent answers at {address}, the health address of node {node}, or an agent with \
                 another key: its answers are ignored"
            );
            warn!("{message}");
            self.settings.events.iter().for_each(|events| events.warn_of_other_node(node, NOT_SIGNED, &message));
        }
        self.node_health.send_if_modified(|node_health| {
            let unexpected = unexpected.into_keys().collect();
            let is_new = node_health.unexpected_responders != unexpected;
            node_health.unexpected_responders = unexpected;
            is_new
        });
    }

    /// Logs each change of a node.
    fn log_change(&self, StateChange { node, liveness, counts_as }: &StateChange, now: Instant) {
        let grace = self.settings.rules.grace.as_secs();
        let probed = self.probed.get(node);
        let why = probed.and_then(|probed| probed.last_failure.as_deref()).unwrap_or("no answer");
        let seconds = |until: Instant| until.saturating_duration_since(now).as_secs_f32().ceil();
        match (liveness, counts_as) {
            (Liveness::Unknown, _) => {}
            (_, CountsAs::Recovering(until)) => {
                info!(
                    node,
                    "the node serves again; it counts as reachable in {} s if it keeps serving",
                    seconds(*until)
                );
            }
            (Liveness::Answers(AgentAnswer::Serving), _) => info!(node, "the node serves"),
            (Liveness::Answers(AgentAnswer::NextHopLost), CountsAs::Reachable) => {
                debug!(node, "the node's next hop does not answer");
            }
            (Liveness::Answers(AgentAnswer::OverlayLost), CountsAs::Reachable) => warn!(
                node,
                port = probed.and_then(|probed| probed.overlay),
                "the node answers health checks, but nothing through the overlay, and nothing can be moved from it: is that UDP port open between nodes?"
            ),
            (Liveness::Answers(AgentAnswer::OverlayLost), CountsAs::Gone) => warn!(
                node,
                port = probed.and_then(|probed| probed.overlay),
                "the node answers health checks, but nothing through the overlay, by which others answer: unreachable"
            ),
            (Liveness::Answers(_), CountsAs::Reachable) => {
                warn!(
                    node,
                    "the node reports that it cannot carry egress traffic, but no other node could take its addresses"
                );
            }
            (Liveness::Answers(_), CountsAs::Gone) => {
                warn!(node, "the node reports that it cannot carry egress traffic; its log has the reason");
            }
            (Liveness::AgentSilent | Liveness::AgentGone, CountsAs::Reachable) => warn!(
                node,
                port = self.settings.port,
                why,
                "the node answers, but its agent does not answer health checks: does it run, with this port? It keeps its addresses for {grace} s"
            ),
            (Liveness::AgentSilent | Liveness::AgentGone, CountsAs::Gone) => {
                warn!(
                    node,
                    port = self.settings.port,
                    why,
                    "the node's agent does not answer health checks: unreachable"
                );
            }
            (Liveness::Silent, CountsAs::Reachable) => {
                warn!(node, "the node is silent, but nothing can be moved from it");
            }
            (Liveness::Silent, CountsAs::Gone) => warn!(node, "the node is silent: unreachable"),
        }
    }

    /// Probes every node that answers through the overlay, once in each interval.
    fn probe_overlay(&mut self, overlay: &Overlay) {
        let now = Instant::now();
        if self.overlay_probed.is_some_and(|probed| now < probed + self.settings.rules.interval) {
            return;
        }
        self.overlay_probed = Some(now);
        for (name, probed) in &self.probed {
            if let (Some(to), Some(_)) = (probed.endpoint, probed.overlay)
                && *name != self.own_node
            {
                // If the queue is full, this one is skipped and the next follows soon.
                let _left_out = overlay.questions.try_send(ProbeQuestion { node: name.as_str().into(), to });
            }
        }
    }
}

/// Sends the findings about one node to the prober.
struct FindingSender {
    node: Arc<str>,
    node_health: watch::Sender<NodeHealth>,
    sender: mpsc::Sender<NodeFinding>,
    /// For other nodes than the leader's own.
    others: Option<Arc<OtherNodes>>,
    /// It is still an egress node.
    is_egress_node: Arc<AtomicBool>,
}

impl FindingSender {
    /// Whether the finding was accepted.
    fn send(&self, finding: Finding) -> bool {
        // Only signals that end with a newer term count: a kernel knows of no term, and the next leader does not probe a node that
        // is no longer an egress node.
        if let (Finding::Signal(Signal::AgentAnswer(_), at), Some(others)) = (&finding, &self.others)
            && self.is_egress_node.load(Relaxed)
        {
            others.note_answer(*at);
        }
        // Not through the queue: the agent relies on it that the controller knows this answer.
        if let Finding::Confirmed(at) = finding {
            self.node_health.send_if_modified(|node_health| {
                match node_health.last_confirmed.get_mut(&*self.node) {
                    Some(last_confirmed) => *last_confirmed = at.max(*last_confirmed),
                    None => drop(node_health.last_confirmed.insert(self.node.to_string(), at)),
                }
                if !node_health.first_confirmed.contains_key(&*self.node) {
                    node_health.first_confirmed.insert(self.node.to_string(), at);
                }
                false
            });
            return true;
        }
        // If the queue is full, the finding is lost and comes again with one of the next answers.
        self.sender.try_send((self.node.clone(), finding)).is_ok()
    }
}

struct ProbedNode {
    paths: Vec<ProbePath>,
    /// The tunnel endpoint of the node.
    endpoint: Option<IpAddr>,
    /// The port of its overlay, if it answers there.
    overlay: Option<u16>,
    task: AbortHandle,
    confirmation: Confirmation,
    orders: watch::Sender<Acknowledgements>,
    is_egress_node: Arc<AtomicBool>,
    /// When probing ends, for a node that is no longer an egress node.
    until: Option<Instant>,
    last_failure: Option<String>,
    /// Addresses where something else answers, and since when.
    unexpected: BTreeMap<IpAddr, Instant>,
    /// It has another total timeout, which has been logged.
    timeout_differs: bool,
}

impl ProbedNode {
    /// An address where something else has answered for long enough.
    fn unexpected_responder(&self, now: Instant) -> Option<IpAddr> {
        self.unexpected.iter().find(|(_, since)| now >= **since + UNEXPECTED_AFTER).map(|(address, _)| *address)
    }
}

/// When each node was last reported.
#[derive(Default)]
struct UnexpectedResponders(BTreeMap<String, Instant>);

impl UnexpectedResponders {
    fn is_new(&mut self, node: &str, now: Instant) -> bool {
        self.0.retain(|_, reported| now < *reported + REPORT_INTERVAL);
        let is_new = !self.0.contains_key(node);
        if is_new {
            self.0.insert(node.to_owned(), now);
        }
        is_new
    }
}

/// The paths by which a node is probed.
fn paths(node: &Node) -> Vec<ProbePath> {
    let own: BTreeSet<IpAddr> = node.primary.iter().map(IpNet::addr).chain(node.internal.iter().copied()).collect();
    let path = |address: IpAddr| {
        let knock_at = own.iter().copied().filter(|own| own.is_ipv4() == address.is_ipv4()).collect();
        ProbePath { address, tcp_probe_addresses: knock_at }
    };
    node.health_addresses().into_iter().map(path).collect()
}

/// The network by which nodes are compared with each other: IPv4 first, as for tunnel endpoints.
fn network(node: &Node) -> Option<IpNet> {
    let networks = node.primary_networks();
    let first = networks.iter().find(|network| network.addr().is_ipv4()).or(networks.first());
    first.map(IpNet::trunc)
}

#[cfg(test)]
mod tests;
