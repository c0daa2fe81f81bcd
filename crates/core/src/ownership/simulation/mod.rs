//! Agents, leaders and an API server that cannot always reach each other: at no moment do two nodes hold one address.
//!
//! - The rules are the real ones. Messages are late or lost, watches lag, nodes act late, leaders follow each other as
//!   the Lease permits, labels change, and the API server fails for a while.
//! - Many leaders are replaced early, and write and confirm as before until their Lease expires or an agent reports the
//!   successor. Then their nodes do not reach each other, and other nodes often reach only one of them.
//! - Agents die and are replaced: their programs emit what the kernel holds until the deadline.
//! - One documented case is excluded: an agent that dies within a total timeout of the isolation of its whole node.

pub mod leaders;
pub mod messages;
pub mod nodes;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use egress_common::random::Random;

use crate::ownership::simulation::messages::{SimulatedMessage, delay, milliseconds};
use crate::ownership::simulation::nodes::{given, objects_of};

use super::lease::*;
use crate::allocation::samples::{node, policy};
use crate::allocation::{AssignmentInputs, Nodes, assign};
use crate::leader_election::{FormerLeader, Timing};
use crate::model::ledger::{Acknowledgements, Ledger};
use crate::model::policy::{EgressPolicy, Policies, parse_egress_ip};
use crate::model::state::{AddressByPolicy, EgressId};
use crate::node_health::NodeHealth;
use crate::ownership::handover::{Evidence, HandoverPlanner, RecordChange};
use crate::ownership::node_ownership::NodeOwnership;
use crate::ownership::suspicion::{LeaseDurations, LongestDuration, Suspicions, TermStart, suspects};

/// The leaders' flags, which differ. Nodes use the ledger's value.
const TOTALS: [Duration; 2] = [Duration::from_millis(1000), Duration::from_millis(4000)];
/// How long after that programs continue without their agent.
const GRACES: [Duration; 2] = [Duration::from_millis(5000), Duration::from_millis(9000)];
/// Paths of a node whose agent has just died do not change for so long.
const APART: Duration = Duration::from_secs(5);
const TICK: Duration = Duration::from_millis(10);
const PROBE: Duration = Duration::from_millis(250);
/// Messages of the API server from before its outage have arrived by then.
const LATEST: Duration = Duration::from_secs(1);
const NODES: [&str; 3] = ["n1", "n2", "n3"];
/// On the first nodes.
const LEADERS: [&str; 2] = ["l1", "l2"];
const API: &str = "api";

/// Contents of the API server, and everything it ever held.
struct Api {
    ledgers: Vec<Arc<Ledger>>,
    policies: Vec<Arc<Policies>>,
    acknowledgements: BTreeMap<&'static str, Acknowledgements>,
}

struct SimulatedNode {
    lease: LeaseHolder,
    /// Until when its programs emit what the kernel holds.
    deadline: Instant,
    /// Its agent is dead from the first time until the second.
    dead: (Instant, Instant),
    /// Another process is about to begin.
    is_new: bool,
    /// Ledger and policies: a new process knows nothing of what its predecessor received.
    has_listed: bool,
    /// The latest time that its lease was expired and it obeyed.
    obeyed: u64,
    /// The greatest term that it knows of.
    term: u64,
    ownership: NodeOwnership,
    ledger_seen: usize,
    objects_seen: usize,
    /// When each probe of one leader's term arrived.
    probes: BTreeMap<(usize, u64, u64), Instant>,
    held: AddressByPolicy,
    sent: Acknowledgements,
    /// The release requests of the latest probe.
    orders: Acknowledgements,
    acts_at: Instant,
    /// Waits for a fresh read of policies, and nothing else is processed until then.
    asking: Option<(u64, Instant)>,
}

/// A leader's next steps, one request at a time.
enum LeaderStep {
    Ledger(Ledger),
    Object(Arc<EgressPolicy>, EgressPolicy),
}

struct SimulatedLeader {
    planner: HandoverPlanner,
    suspicions: Suspicions,
    longest_lease: LongestDuration,
    longest_programs: LongestDuration,
    last_confirmed: BTreeMap<String, Instant>,
    /// The first answer of each in this term.
    followed: BTreeMap<String, Instant>,
    /// Unconfirmed answers of the own node's agent: the number of the probe, and when it arrived.
    own: Vec<(u64, Instant)>,
    /// When any other node last gave a sign.
    others: Instant,
    /// When the kernels of nodes last answered.
    alive: BTreeMap<String, Instant>,
    confirmed_probe: BTreeMap<usize, u64>,
    /// Acknowledgements in the nodes' answers.
    released: BTreeMap<usize, Acknowledgements>,
    /// A process that no longer leads still probes, and confirms no answers.
    term: u64,
    since: Instant,
    /// As far as it knows.
    leads_until: Instant,
    confirms_until: Instant,
    /// It cannot have been replaced before then, whatever agents report.
    alone_until: Instant,
    /// It has read its successor's signature.
    is_replaced: bool,
    /// The leader that it has replaced early.
    former: Option<FormerLeader>,
    number: u64,
    ledger_seen: usize,
    queue: Vec<LeaderStep>,
    waits_until: Option<Instant>,
    probes_at: Option<Instant>,
    pass: u64,
}

impl SimulatedLeader {
    /// It has just started, and does not lead.
    fn new(term: u64, now: Instant) -> Self {
        Self {
            planner: HandoverPlanner::default(),
            suspicions: Suspicions::default(),
            longest_lease: LongestDuration::default(),
            longest_programs: LongestDuration::default(),
            last_confirmed: BTreeMap::new(),
            followed: BTreeMap::new(),
            own: Vec::new(),
            others: now,
            alive: BTreeMap::new(),
            confirmed_probe: BTreeMap::new(),
            released: BTreeMap::new(),
            term,
            since: now,
            leads_until: now,
            confirms_until: now,
            alone_until: now,
            is_replaced: false,
            former: None,
            number: 0,
            ledger_seen: 0,
            queue: Vec::new(),
            waits_until: None,
            probes_at: None,
            pass: 0,
        }
    }

    /// It leads by the Lease from now on.
    fn leading(self, former: Option<FormerLeader>) -> Self {
        let until = self.since + Duration::from_secs(3600);
        Self { leads_until: until, confirms_until: until, alone_until: until, former, ..self }
    }

    fn note_terms(&mut self, ledger: &Ledger, index: usize, now: Instant) {
        let (own, over) = (terms(index), self.former.as_ref().map_or(now, |former| former.until));
        self.longest_lease.observe((ledger.total, ledger.former_total), own.lease, (now, over));
        self.longest_programs.observe((ledger.programs, ledger.former_programs), own.programs, (now, over));
    }

    /// An answer of another node's agent, which a later probe confirms.
    fn note_answer(&mut self, node: usize, number: u64, at: Instant) {
        if at < self.confirms_until {
            self.last_confirmed.insert(NODES[node].to_owned(), at);
            self.followed.entry(NODES[node].to_owned()).or_insert(at);
            let confirmed = self.confirmed_probe.entry(node).or_default();
            *confirmed = number.max(*confirmed);
        }
    }

    /// Answers of the own node's agent count no more than the signs of the others.
    fn confirm_own(&mut self, index: usize) {
        let others = self.others;
        let counting: Vec<_> = self.own.extract_if(.., |(_, at)| *at <= others).collect();
        counting.into_iter().for_each(|(number, at)| self.note_answer(index, number, at));
    }
}

/// The node that something is on; the API server is on none of them.
fn place(name: &str) -> Option<usize> {
    NODES.iter().position(|node| *node == name).or_else(|| LEADERS.iter().position(|leader| *leader == name))
}

/// All paths that may be cut, in one direction each.
fn paths() -> Vec<(&'static str, &'static str)> {
    let to_leaders = NODES.into_iter().flat_map(|node| LEADERS.map(|leader| (node, leader)));
    let to_api = NODES.into_iter().chain(LEADERS).map(|end| (end, API));
    let one_direction = to_leaders.filter(|(node, leader)| place(node) != place(leader)).chain(to_api);
    one_direction.flat_map(|(from, to)| [(from, to), (to, from)]).collect()
}

/// Whether it is a path of this end, or of anything on its node. A leader's own paths are those to the API server.
fn is_of((from, to): (&'static str, &'static str), one: &str, whole: bool) -> bool {
    match whole {
        true => place(from) == place(one) || place(to) == place(one),
        false => [from, to].contains(&one) && (NODES.contains(&one) || [from, to].contains(&API)),
    }
}

fn terms(index: usize) -> LeaseDurations {
    LeaseDurations { lease: TOTALS[index], programs: TOTALS[index] + GRACES[index] }
}

struct SimulatedCluster {
    random: Random,
    start: Instant,
    now: Instant,
    api: Api,
    nodes: Vec<SimulatedNode>,
    labels: Nodes,
    leaders: Vec<SimulatedLeader>,
    /// By the Lease.
    leads: Option<usize>,
    term: u64,
    changes_at: Instant,
    cut: BTreeSet<(&'static str, &'static str)>,
    mail: BTreeMap<(Instant, u64), SimulatedMessage>,
    sent: u64,
    quiet: bool,
    /// The outage of the API server, from and until.
    away: (Instant, Instant),
    /// The node that is cut off from the leaders during the outage, and until when.
    mute: (&'static str, Instant),
    moves: u64,
    /// How many addresses expired leases have taken during outages of the API server.
    lost: u64,
    /// How many addresses have left a node whose agent was dead.
    left: u64,
    /// How many leaders were replaced early.
    early: u64,
}

#[test]
fn no_two_nodes_hold_one_address_whatever_is_cut_and_lost() {
    let (mut moves, mut lost, mut left, mut early) = (0, 0, 0, 0);
    for seed in 0..48 {
        let world = SimulatedCluster::new(seed).play(seed);
        (moves, lost, left, early) = (moves + world.moves, lost + world.lost, left + world.left, early + world.early);
    }
    assert!(early > 50, "few leaders were replaced early: {early}");
    assert!(moves > 100, "little happened: {moves} changes of nodes");
    assert!(left > 20, "few addresses have left a node whose agent was dead: {left}");
    assert!(lost > 50, "little was lost while the API server was away: {lost} addresses");
}

impl SimulatedCluster {
    fn new(seed: u64) -> Self {
        let start = Instant::now();
        let policies = Policies::from([
            policy("a", 1, &["172.18.0.101"], &[]),
            policy("b", 2, &["172.18.0.102", "172.18.0.101"], &[]),
            policy("c", 3, &["172.18.0.103"], &[]),
        ]);
        let named = |name: &&'static str| SimulatedNode {
            lease: LeaseHolder::new(Duration::from_secs(5), start, false),
            deadline: start,
            dead: (start, start),
            is_new: false,
            has_listed: true,
            obeyed: 0,
            term: 0,
            ownership: NodeOwnership::new((*name).to_owned()),
            ledger_seen: 0,
            objects_seen: 0,
            probes: BTreeMap::new(),
            held: AddressByPolicy::new(),
            sent: Acknowledgements::new(),
            orders: Acknowledgements::new(),
            acts_at: start,
            asking: None,
        };
        Self {
            random: Random::new(seed),
            start,
            now: start,
            api: Api {
                ledgers: vec![Arc::new(Ledger {
                    total: Some(TOTALS[0]),
                    programs: Some(terms(0).programs),
                    ..Ledger::default()
                })],
                policies: vec![Arc::new(policies)],
                acknowledgements: BTreeMap::new(),
            },
            nodes: NODES.iter().map(named).collect(),
            labels: (1..=3).map(|i| node(&format!("n{i}"), &format!("172.18.0.{i}/16"))).collect(),
            leaders: vec![SimulatedLeader::new(1, start).leading(None), SimulatedLeader::new(0, start)],
            leads: Some(0),
            term: 1,
            changes_at: start + Duration::from_secs(5),
            cut: BTreeSet::new(),
            mail: BTreeMap::new(),
            sent: 0,
            quiet: false,
            away: (start, start),
            mute: (NODES[0], start),
            moves: 0,
            lost: 0,
            left: 0,
            early: 0,
        }
    }

    fn play(mut self, seed: u64) -> Self {
        while self.now < self.start + Duration::from_secs(90) {
            self.quiet = self.now > self.start + Duration::from_secs(60);
            self.now += TICK;
            let before: Vec<AddressByPolicy> = self.nodes.iter().map(|node| node.held.clone()).collect();
            self.disturb();
            while let Some(entry) = self.mail.first_entry().filter(|entry| entry.key().0 <= self.now) {
                let message = entry.remove();
                self.receive(message);
            }
            self.lead();
            (0..self.nodes.len()).for_each(|node| self.act(node));
            self.check(seed, &before);
        }
        let held: usize = self.nodes.iter().map(|node| node.held.len()).sum();
        assert_eq!(held, 3, "seed {seed}: all is served when all is quiet");
        let ledger = self.ledger();
        assert!(ledger.records.open.is_empty() && ledger.suspects.is_empty(), "seed {seed}: {ledger:?}");
        self
    }

    fn check(&mut self, seed: u64, before: &[AddressByPolicy]) {
        let (mut gateways, at) = (BTreeMap::new(), self.now - self.start);
        let is_settled = self.is_away() && self.now > self.away.0 + LATEST;
        for ((node, name), before) in self.nodes.iter().zip(NODES).zip(before) {
            let had = |address: &IpAddr| before.values().any(|had| had == address);
            for address in node.held.values().filter(|_| self.now < node.deadline) {
                if let Some(other) = gateways.insert(address, name) {
                    panic!("seed {seed}, {at:?}: {address} is emitted by {name} and {other}");
                }
                assert!(
                    !is_settled || had(address),
                    "seed {seed}, {at:?}: {name} takes {address} while the API server is away"
                );
            }
            if self.now < node.dead.1 && self.now >= node.deadline && self.now < node.deadline + TICK {
                self.left += u64::try_from(node.held.len()).expect("few");
            }
            if self.is_away() && self.now >= node.deadline {
                let gone = before.values().filter(|had| !node.held.values().any(|held| held == *had)).count();
                self.lost += u64::try_from(gone).expect("few");
            }
        }
    }

    /// An outage of the API server for all.
    fn is_away(&self) -> bool {
        !self.quiet && self.now < self.away.1
    }

    fn ledger(&self) -> Arc<Ledger> {
        Arc::clone(&self.api.ledgers[self.api.ledgers.len() - 1])
    }

    fn policies(&self) -> Arc<Policies> {
        Arc::clone(&self.api.policies[self.api.policies.len() - 1])
    }

    /// Cuts and restores paths, changes labels, changes the leader.
    fn disturb(&mut self) {
        if self.quiet {
            self.cut.clear();
            for name in NODES {
                self.label(name, true);
            }
        } else if self.random.below(500) == 0 {
            self.kill();
        } else if self.random.below(60) == 0 {
            let ends = [NODES[0], NODES[1], NODES[2], LEADERS[0], LEADERS[1]];
            let one = ends[self.random.below(5)];
            // Often a whole node is cut off, with its leader, sometimes one path, in one direction.
            let whole = self.random.below(2) == 0;
            let paths: Vec<_> = paths().into_iter().filter(|path| is_of(*path, one, whole)).collect();
            if paths.iter().any(|(from, to)| self.has_just_died(from) || self.has_just_died(to)) {
                return;
            }
            // Or an outage of the API server, and one node is cut off for some of that time.
            if self.random.below(15) == 0 {
                self.cut.clear();
                let since = if self.is_away() { self.away.0 } else { self.now };
                self.away = (since, self.now + milliseconds(&mut self.random, 8_000));
                let node = NODES[self.random.below(3)];
                if !self.has_just_died(node) {
                    self.mute = (node, self.now + milliseconds(&mut self.random, 4_000));
                }
            }
            let paths = if whole { paths } else { vec![paths[self.random.below(paths.len())]] };
            let mend = self.random.below(2) == 0;
            for path in paths {
                self.cut.insert(path);
                if mend {
                    self.cut.remove(&path);
                }
            }
        } else if self.random.below(400) == 0 {
            let name = NODES[self.random.below(3)];
            let on = self.random.below(2) == 0;
            self.label(name, on);
        }
        if self.now >= self.changes_at {
            self.change_leader();
        }
    }

    /// The leader has not renewed its Lease. It stops before another may begin, or is replaced early without knowing
    /// it.
    fn change_leader(&mut self) {
        let (now, timing) = (self.now, Timing::default());
        let Some(old) = self.leads.take() else {
            let next = self.random.below(2);
            return self.begin_to_lead(next, None);
        };
        let next = 1 - old;
        let reaches = !self.is_away() && !self.cut.iter().any(|(from, to)| [*from, *to] == [API, LEADERS[next]]);
        if reaches && self.random.below(3) > 0 {
            let until = now + timing.lease_duration - timing.stale_renewal;
            let leads = now + milliseconds(&mut self.random, 900).min(timing.renew_deadline - timing.stale_renewal);
            let leader = &mut self.leaders[old];
            (leader.leads_until, leader.confirms_until, leader.alone_until) = (leads, until, now);
            self.early += 1;
            self.part(next, old);
            let silent_since = now - timing.node_silence - milliseconds(&mut self.random, 300);
            return self.begin_to_lead(next, Some(FormerLeader { node: NODES[old].to_owned(), silent_since, until }));
        }
        let leader = &mut self.leaders[old];
        let until = now + timing.leaderless_gap();
        (leader.leads_until, leader.confirms_until, leader.alone_until) = (now, until, now);
        self.changes_at = until;
    }

    /// The nodes of the two do not reach each other, and often the third reaches only the former. Isolated nodes often
    /// do not reach the API server either.
    fn part(&mut self, next: usize, old: usize) {
        let third = self.random.below(3) > 0;
        let mut paths = vec![(LEADERS[next], NODES[old]), (LEADERS[old], NODES[next])];
        paths.extend(third.then_some((LEADERS[next], NODES[2])));
        let away = [NODES[old], NODES[2]].into_iter().take(1 + usize::from(third));
        paths.extend(away.filter(|_| self.random.below(3) > 0).map(|node| (API, node)));
        if !self.quiet && !NODES.into_iter().any(|node| self.has_just_died(node)) {
            self.cut.extend(paths.into_iter().flat_map(|(from, to)| [(from, to), (to, from)]));
        }
    }

    fn begin_to_lead(&mut self, next: usize, former: Option<FormerLeader>) {
        self.term += 1;
        self.leads = Some(next);
        let new = SimulatedLeader::new(self.term, self.now).leading(former);
        let old = std::mem::replace(&mut self.leaders[next], SimulatedLeader::new(0, self.now));
        // It may have led before, or have been the standby; or it has just started.
        self.leaders[next] = if self.random.below(3) == 0 {
            let ledger = &self.api.ledgers[old.ledger_seen];
            let mut new = SimulatedLeader { ledger_seen: old.ledger_seen, ..new };
            new.suspicions.observe(ledger, self.now);
            new.note_terms(ledger, next, self.now);
            new
        } else {
            SimulatedLeader {
                last_confirmed: old.last_confirmed,
                suspicions: old.suspicions,
                longest_lease: old.longest_lease,
                longest_programs: old.longest_programs,
                alive: old.alive,
                ledger_seen: old.ledger_seen,
                ..new
            }
        };
        self.changes_at = self.now + Duration::from_millis(500) + milliseconds(&mut self.random, 8_000);
    }

    /// The agent of a node whose paths are intact.
    fn kill(&mut self) {
        let index = self.random.below(3);
        let (name, lasts) = (NODES[index], milliseconds(&mut self.random, 25_000));
        let is_cut = self.cut.iter().any(|(from, to)| [*from, *to].contains(&name));
        let was_mute = self.mute.0 == name && self.now < self.mute.1 + APART;
        if !is_cut && !was_mute && self.now >= self.nodes[index].dead.1 {
            self.nodes[index].dead = (self.now, self.now + lasts);
        }
    }

    fn has_just_died(&self, name: &str) -> bool {
        let dies = |node: &SimulatedNode| node.dead.0 != self.start && self.now < node.dead.0 + APART;
        self.nodes.iter().zip(NODES).any(|(node, of)| of == name && dies(node))
    }

    fn label(&mut self, name: &str, on: bool) {
        let node = self.labels.get_mut(name).expect("a node");
        Arc::make_mut(node).assignable = on;
    }

    fn send(&mut self, from: &'static str, to: &'static str, message: SimulatedMessage) {
        let is_away = self.is_away() && [from, to].contains(&API);
        let is_mute = self.now < self.mute.1 && [from, to].contains(&self.mute.0) && place(from) != place(to);
        if is_away || is_mute || self.cut.contains(&(from, to)) {
            return;
        }
        self.sent += 1;
        let delay = match &message {
            // Much may happen between a pass and the write of its status.
            SimulatedMessage::WriteObject { .. } if !self.quiet => milliseconds(&mut self.random, 900),
            _ => delay(&mut self.random, self.quiet),
        };
        let at = self.now + delay + TICK / 10;
        self.mail.insert((at, self.sent), message);
    }

    fn receive(&mut self, message: SimulatedMessage) {
        match message {
            SimulatedMessage::Probe { leader, node, number, confirmed, term, orders } => {
                let (name, at) = (NODES[node], self.now);
                let node_of = &mut self.nodes[node];
                if at < node_of.dead.1 {
                    self.send(name, LEADERS[leader], SimulatedMessage::Alive { leader, node });
                    return;
                }
                if term >= node_of.term {
                    node_of.term = term;
                    node_of.orders = orders;
                    node_of.lease.note_probed(Some(TOTALS[leader]));
                    node_of.probes.insert((leader, term, number), at);
                    if let Some(as_of) = node_of.probes.get(&(leader, term, confirmed)).copied() {
                        node_of.lease.note_confirmed(as_of);
                    }
                }
                let (released, greatest) = (node_of.sent.clone(), node_of.term);
                self.send(
                    name,
                    LEADERS[leader],
                    SimulatedMessage::Answer { leader, node, number, term, greatest, released },
                );
            }
            SimulatedMessage::Answer { leader: index, node, number, term, greatest, released } => {
                let (now, leader) = (self.now, &mut self.leaders[index]);
                if term != leader.term {
                    return;
                }
                if greatest > term && now >= leader.alone_until {
                    leader.confirms_until = leader.confirms_until.min(now);
                }
                if node == index {
                    leader.alive.insert(NODES[node].to_owned(), now);
                    leader.own.push((number, now));
                } else {
                    leader.others = now;
                    leader.note_answer(node, number, now);
                }
                leader.released.insert(node, released);
            }
            SimulatedMessage::Alive { leader: index, node } => {
                let leader = &mut self.leaders[index];
                leader.alive.insert(NODES[node].to_owned(), self.now);
                if node != index {
                    leader.others = self.now;
                }
            }
            SimulatedMessage::ReadLedger { node, began } => {
                let (ledger, name) = (self.ledger(), NODES[node]);
                let (suspected, terms) = (ledger.suspects.contains_key(name), LeaseTerms::of(&ledger, name));
                self.send(API, name, SimulatedMessage::HasRead { node, began, suspected, terms });
            }
            SimulatedMessage::HasRead { node, began, suspected, terms } => {
                // An answer to a process that has died since is lost.
                if began >= self.nodes[node].dead.1 {
                    self.nodes[node].lease.note_read(began, suspected, terms);
                }
            }
            SimulatedMessage::ReadObjects { node, ask } => {
                let (ledger, policies) = (self.ledger(), self.policies());
                self.send(API, NODES[node], SimulatedMessage::HasObjects { node, ask, ledger, policies });
            }
            SimulatedMessage::HasObjects { node, ask, ledger, policies } => {
                let now = self.now;
                let node = &mut self.nodes[node];
                if now >= node.dead.1 && node.asking.is_some_and(|(open, _)| open == ask) {
                    node.asking = None;
                    let name = node.ownership_name();
                    let given = given(&policies, name).into_values();
                    node.ownership.confirm(&given.filter(|address| ledger.lets_hold(name, address)).collect());
                    node.apply(&objects_of(&self.api, node.objects_seen));
                }
            }
            SimulatedMessage::Acknowledge { node, acknowledgements } => {
                drop(self.api.acknowledgements.insert(NODES[node], acknowledgements))
            }
            SimulatedMessage::WriteLedger { leader, base, ledger } => {
                let done = base + 1 == self.api.ledgers.len();
                if done {
                    self.api.ledgers.push(Arc::new(ledger));
                }
                self.send(API, LEADERS[leader], SimulatedMessage::Written { leader, done });
            }
            SimulatedMessage::WriteObject { leader, base, policy } => {
                let policies = self.policies();
                let done = policies.get(policy.key()) == Some(&base);
                if done {
                    let nodes = |policy: &EgressPolicy| {
                        policy.published.items.iter().map(|item| item.node.clone()).collect::<Vec<_>>()
                    };
                    self.moves += u64::from(!nodes(&base).is_empty() && nodes(&base) != nodes(&policy));
                    let mut policies = Policies::clone(&policies);
                    policies.insert(policy.key().clone(), Arc::new(policy));
                    self.api.policies.push(Arc::new(policies));
                }
                self.send(API, LEADERS[leader], SimulatedMessage::Written { leader, done });
            }
            SimulatedMessage::Written { leader, done } => {
                let (index, leader) = (leader, &mut self.leaders[leader]);
                leader.waits_until = None;
                if done {
                    // The answer has the current value.
                    leader.ledger_seen = leader.ledger_seen.max(self.api.ledgers.len() - 1);
                    leader.suspicions.observe(&self.api.ledgers[leader.ledger_seen], self.now);
                    leader.note_terms(&self.api.ledgers[leader.ledger_seen], index, self.now);
                } else {
                    leader.queue.clear();
                }
            }
        }
    }
}
