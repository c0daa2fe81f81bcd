//! Probing all egress nodes while it is this controller's duty: a task for each node, one [`NodeStates`] over all that they find.
//!
//! A leader probes, and goes on when it cannot renew its Lease any more, until another leads: the agents' right to hold
//! addresses hangs on it, and an API server that is away is no reason to end it. Where an agent has heard of a newer leader
//! it says so, and that ends it too, unless nobody can have taken the Lease over yet: terms begin anew where the Lease was
//! deleted.

pub mod asked;
pub mod news;
pub mod through;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use futures::future::join_all;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::change_queue::ChangeReceiver;
use crate::controller::node_health::confirmation::{Confirmation, Others};
use crate::controller::node_health::prober::asked::{Asked, Teller, UnexpectedResponders, network, roads};
pub use crate::controller::node_health::prober::through::Overlay;
use crate::controller::node_health::prober::through::echo;
use crate::controller::node_health::session::{Asker, Finding, Manner, Road, ask};
use egress_core::model::ledger::{Acknowledgements, Ledger};
use egress_core::model::view::{Change, Node, Update};
use egress_core::node_health::NodeHealth;
use egress_core::node_health::liveness::{AgentAnswer, Liveness};
use egress_core::node_health::state::{News, NodeHealthReport, NodeStates, Traits, Treated};
use egress_datapath::overlay::endpoints::endpoint;
use egress_kube::leader_election::ProbeDuty;
use egress_supervise::{self, Task};

/// How often is looked who is gone.
const LOOK: Duration = Duration::from_millis(50);
/// A node that is no egress node any more, or whose Node is deleted, is asked on for so long: it may not have let go of its
/// addresses yet.
const LINGER: Duration = Duration::from_secs(60);
/// When a node that does not exist any more was heard is forgotten then.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(600);
/// Findings that wait.
const QUEUE: usize = 4096;
/// How soon a leader that has stopped probing looks whether it should.
const AGAIN: Duration = Duration::from_secs(1);
/// For so long at most a slow API server keeps a controller from leading, again and again.
const LONGEST_GAP: Duration = Duration::from_secs(3);

/// Probes while it is this controller's duty, until told to stop.
pub async fn run(
    manner: Manner,
    own_node: &str,
    mut nodes: ChangeReceiver,
    mut duty: ProbeDuty,
    (reach, isolated, mut overlay): (watch::Sender<NodeHealth>, watch::Sender<bool>, Option<Overlay>),
    stop: CancellationToken,
) {
    let (mut known, mut ledger) = (BTreeMap::new(), Arc::<Ledger>::default());
    let mut round: Option<Round> = None;
    let mut look = tokio::time::interval(LOOK);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut again = tokio::time::interval(AGAIN);
    again.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            changes = nodes.take() => {
                let Some(changes) = changes else { return };
                changes.into_iter().for_each(|change| apply(&mut known, &mut ledger, change));
                if let Some(round) = &mut round {
                    round.follow(&known);
                    round.order(&ledger);
                }
            }
            alive = duty.changed() => {
                if !alive {
                    return;
                }
                let term = duty.term();
                if term == round.as_ref().map(|round| round.term) {
                    continue;
                }
                round = term.map(|term| begin(&manner, own_node, (term, &duty), &reach, (&known, &ledger)));
                isolated.send_replace(false);
                if round.is_none() {
                    end(&reach);
                }
            }
            finding = next(&mut round) => {
                let Some(current) = &mut round else { continue };
                if current.is_of_newer_leader(&finding) && !duty.leads_alone() {
                    info!("another leads by now: probing ends here");
                    round = None;
                    end(&reach);
                } else {
                    current.note(finding);
                }
            }
            Some((node, at)) = echo(&mut overlay) => {
                round.iter_mut().for_each(|round| round.judge.note_echo(&node, at));
            }
            // What another's term has ended is this controller's duty all the same where the Lease says so.
            _ = again.tick(), if round.is_none() && duty.leads_alone() => {
                round = duty.term().map(|term| begin(&manner, own_node, (term, &duty), &reach, (&known, &ledger)));
            }
            _ = look.tick(), if round.is_some() => {
                if let Some(round) = &mut round {
                    let is_isolated = round.look();
                    isolated.send_if_modified(|known| std::mem::replace(known, is_isolated) != is_isolated);
                    overlay.iter().for_each(|overlay| round.ask_through(overlay));
                }
            }
        }
    }
}

fn begin(
    manner: &Manner,
    own_node: &str,
    (term, duty): (u64, &ProbeDuty),
    reach: &watch::Sender<NodeHealth>,
    (known, ledger): (&BTreeMap<String, Arc<Node>>, &Arc<Ledger>),
) -> Round {
    let mut round = Round::new(manner.clone(), own_node, (term, duty.clone()), reach.clone());
    round.follow(known);
    round.order(ledger);
    round
}

/// Nobody is known to be gone any more. When agents were heard stays known: it is no less true.
fn end(reach: &watch::Sender<NodeHealth>) {
    reach.send_modify(|reach| {
        reach.unreachable.clear();
        reach.lost.clear();
        reach.suspects.clear();
        reach.silent.clear();
        reach.absent.clear();
        reach.strange.clear();
        reach.released.clear();
        reach.unserved.clear();
    });
}

fn apply(known: &mut BTreeMap<String, Arc<Node>>, ledger: &mut Arc<Ledger>, change: Change) {
    match change {
        Change::Ledger(new) => *ledger = new,
        Change::Nodes(Update::Replaced(nodes)) => *known = nodes,
        Change::Nodes(Update::Changed(name, node)) => drop(known.insert(name, node)),
        Change::Nodes(Update::Removed(name)) => drop(known.remove(&name)),
        Change::Objects(_) | Change::Namespaces(_) | Change::Pods(_) | Change::Services(_) => {}
    }
}

type Found = (Arc<str>, Finding);

/// Never, where nobody is asked.
async fn next(round: &mut Option<Round>) -> Found {
    match round {
        Some(Round { findings, .. }) => match findings.recv().await {
            Some(found) => found,
            None => std::future::pending().await,
        },
        None => std::future::pending().await,
    }
}

/// Probing from the beginning of a duty to its end, which ends the tasks too.
struct Round {
    manner: Manner,
    own_node: String,
    term: u64,
    duty: ProbeDuty,
    reach: watch::Sender<NodeHealth>,
    judge: NodeStates,
    others: Arc<Others>,
    asked: BTreeMap<String, Asked>,
    tasks: JoinSet<()>,
    found: mpsc::Sender<Found>,
    findings: mpsc::Receiver<Found>,
    /// When nodes were asked through the overlay last.
    asked_through: Option<Instant>,
    cut_off: bool,
    /// No other node answered at the latest look.
    heard_none: bool,
    /// When this controller was seen to lead last.
    led: Instant,
    strangers: UnexpectedResponders,
}

impl Round {
    fn new(manner: Manner, own_node: &str, (term, duty): (u64, ProbeDuty), reach: watch::Sender<NodeHealth>) -> Self {
        let (found, findings) = mpsc::channel(QUEUE);
        let judge = NodeStates::new(manner.rules);
        let (own_node, tasks) = (own_node.to_owned(), JoinSet::new());
        let (asked, others) = (BTreeMap::new(), Arc::new(Others::new(Instant::now())));
        reach.send_if_modified(|reach| {
            reach.followed.clear();
            false
        });
        Self {
            manner,
            own_node,
            term,
            duty,
            reach,
            judge,
            others,
            asked,
            tasks,
            found,
            findings,
            asked_through: None,
            cut_off: false,
            heard_none: false,
            led: Instant::now(),
            strangers: UnexpectedResponders::default(),
        }
    }

    /// Asks who is to be asked, and nobody else.
    fn follow(&mut self, nodes: &BTreeMap<String, Arc<Node>>) {
        let now = Instant::now();
        for (_, asked) in self.asked.iter_mut().filter(|(name, _)| !nodes.contains_key(*name)) {
            asked.until.get_or_insert(now + LINGER);
        }
        self.reach.send_if_modified(|reach| {
            reach.heard.retain(|name, heard| nodes.contains_key(name) || now < *heard + FORGOTTEN_AFTER);
            false
        });
        for (name, node) in nodes {
            let known = self.asked.get_mut(name);
            if !node.assignable {
                if let Some(asked) = known {
                    asked.until.get_or_insert(now + LINGER);
                }
                continue;
            }
            let roads = roads(node);
            if let Some(asked) = known {
                asked.until = None;
                asked.endpoint = endpoint(node).or(asked.endpoint);
                // Where its addresses cannot be read just now, it is asked where it was before.
                if roads.is_empty() || asked.roads == roads {
                    continue;
                }
            }
            if !roads.is_empty() {
                self.enter(name, roads, node, now);
            }
        }
        for (name, asked) in &self.asked {
            asked.is_host.store(asked.until.is_none(), Relaxed);
            self.judge.note_host(name, nodes.get(name).is_some_and(|node| node.assignable && !node.drained));
        }
        self.count_others();
    }

    /// Tells each node of the hand-overs from it.
    fn order(&self, ledger: &Ledger) {
        let mut leaving: BTreeMap<&str, Acknowledgements> = BTreeMap::new();
        for (address, record) in &ledger.records.open {
            leaving.entry(&record.from).or_default().insert(*address, record.number);
        }
        for (name, asked) in &self.asked {
            let orders = leaving.remove(name.as_str()).unwrap_or_default();
            asked.orders.send_if_modified(|known| {
                let is_news = *known != orders;
                *known = orders;
                is_news
            });
        }
    }

    fn count_others(&self) {
        self.others.set(self.asked.iter().any(|(name, asked)| asked.until.is_none() && *name != self.own_node));
    }

    fn enter(&mut self, name: &str, roads: Vec<Road>, node: &Node, now: Instant) {
        let traits = Traits { own: *name == self.own_node, network: network(node) };
        // Who took over early has found that one silent before.
        let former = self.duty.former().filter(|former| former.node == name);
        self.judge.enter(name, traits, former.map_or(now, |former| former.silent_since));
        let former = self.asked.remove(name);
        if let Some(former) = &former {
            former.task.abort();
        }
        // Spread over the interval.
        let place = u32::try_from(self.asked.len() % 64).unwrap_or_default();
        let offset = self.manner.rules.interval * place / 64;
        let others = (*name != self.own_node).then(|| self.others.clone());
        let anew = || {
            others.as_ref().map_or_else(|| Confirmation::for_own(self.others.clone()), |_| Confirmation::for_other())
        };
        let vouch = former.map_or_else(anew, |former| former.vouch);
        let orders = watch::Sender::new(Acknowledgements::new());
        let (orders_of, own_node) = (orders.subscribe(), self.own_node.as_str().into());
        let asker =
            Asker { term: self.term, offset, vouch: vouch.clone(), orders: orders_of, node: name.into(), own_node };
        let (manner, all) = (self.manner.clone(), roads.clone());
        let (reach, found, is_host) = (self.reach.clone(), self.found.clone(), Arc::new(AtomicBool::new(true)));
        let teller = Teller { node: name.into(), reach, found, others, is_host: is_host.clone() };
        let asking = async move {
            join_all(all.iter().map(|road| ask(&manner, road, &asker, |finding| teller.tell(finding)))).await;
        };
        let task = self.tasks.spawn(egress_supervise::forever(Task::Prober, asking));
        let (endpoint, overlay) = (endpoint(node), None);
        let asked = Asked {
            roads,
            endpoint,
            overlay,
            task,
            vouch,
            orders,
            is_host,
            until: None,
            trouble: None,
            strange: BTreeMap::new(),
            differs: false,
        };
        self.asked.insert(name.to_owned(), asked);
    }

    fn leave(&mut self, name: &str) {
        self.judge.leave(name);
        self.reach.send_if_modified(|reach| {
            reach.released.remove(name);
            reach.unserved.remove(name);
            reach.strange.remove(name);
            false
        });
        if let Some(asked) = self.asked.remove(name) {
            asked.task.abort();
        }
    }

    /// An agent has heard of one.
    fn is_of_newer_leader(&self, (node, finding): &Found) -> bool {
        let Finding::Said { term: Some(term), .. } = finding else { return false };
        *term > self.term && self.asked.contains_key(&**node)
    }

    fn note(&mut self, (node, finding): Found) {
        let Some(asked) = self.asked.get_mut(&*node) else { return };
        match finding {
            Finding::Signal(sign, at) => self.judge.note(&node, sign, at),
            Finding::Direct(at) => self.judge.note_direct(&node, at),
            // That is entered already.
            Finding::Heard(_) => {}
            Finding::Released(words) => {
                self.reach.send_modify(|reach| drop(reach.released.insert(node.to_string(), words)));
            }
            Finding::Unserved(unserved) => {
                self.reach.send_if_modified(|reach| {
                    let known = reach.unserved.remove(&*node).unwrap_or_default();
                    let is_news = known != unserved;
                    if !unserved.is_empty() {
                        reach.unserved.insert(node.to_string(), unserved);
                    }
                    is_news
                });
            }
            Finding::Strange(address, is_strange) => match is_strange {
                true => drop(asked.strange.insert(address, Instant::now())),
                false => drop(asked.strange.remove(&address)),
            },
            Finding::Trouble(why) => asked.trouble = Some(why),
            Finding::Said { timeout, overlay, bounded, next_hop, .. } => {
                asked.overlay = overlay;
                // Of the others it says nothing of this controller's road.
                if *node == *self.own_node {
                    next_hop.into_iter().for_each(|at| self.judge.note_next_hop(at));
                }
                if let Some(number) = bounded {
                    self.reach.send_if_modified(|reach| reach.bounded.insert(node.to_string(), number) != Some(number));
                }
                self.judge.note_overlay(&node, overlay.is_some());
                let total = self.manner.rules.total;
                let differs = timeout.is_some_and(|timeout| timeout != total);
                if differs && !asked.differs {
                    warn!(
                        %node, there = ?timeout.unwrap_or_default(), here = ?total,
                        "a node goes by another --egressip-reachability-total-timeout than the leader: set the same on all"
                    );
                }
                asked.differs = differs;
            }
        }
    }

    /// Whether no other node answers, of several. One look is not enough: where this task has stood still, answers wait.
    fn look(&mut self) -> bool {
        let now = Instant::now();
        let over = |asked: &Asked| asked.until.is_some_and(|until| now >= until);
        let leave: Vec<String> = self.asked.iter().filter(|(_, a)| over(a)).map(|(name, _)| name.clone()).collect();
        leave.iter().for_each(|name| self.leave(name));
        self.count_others();
        if self.duty.leads() {
            // A slow API server has it lead with gaps, which are shorter.
            if now >= self.led + self.manner.rules.total.max(LONGEST_GAP) {
                info!("this controller leads again: which nodes are lost is found out again");
                self.judge.begin_again(now);
            }
            self.led = now;
        }
        let judgement = self.judge.judge(now);
        for news in &judgement.news {
            self.say(news, now);
        }
        if std::mem::replace(&mut self.cut_off, judgement.cut_off) != judgement.cut_off {
            match judgement.cut_off {
                true => {
                    warn!("no other egress node answers any more: this node may be cut off, so no address is moved")
                }
                false => info!("egress nodes answer again"),
            }
        }
        self.look_for_strangers(now);
        let vouches = self.duty.vouches();
        for (name, asked) in &self.asked {
            asked.vouch.set(vouches && !judgement.unreachable.contains(name));
        }
        let NodeHealthReport { unreachable, lost, suspects, mut silent, absent, hears_none, .. } = judgement;
        if !self.manner.asks_agents() {
            // An agent may have ended long before its node, and has fenced nothing then.
            silent.clear();
        }
        self.reach.send_if_modified(|reach| {
            let known = (&reach.unreachable, &reach.suspects, &reach.silent, &reach.absent);
            let is_news = known != (&unreachable, &suspects, &silent, &absent);
            (reach.unreachable, reach.suspects, reach.silent, reach.absent) = (unreachable, suspects, silent, absent);
            reach.lost = lost;
            is_news
        });
        std::mem::replace(&mut self.heard_none, hears_none) && hears_none
    }
}

#[cfg(test)]
mod tests;
