//! All probed nodes, and which of them count as gone. Pure: every time is an argument. [`NodeSigns`] of one node are
//! not enough; docs/operations/handover-and-failover.md has the table of cases.
//!
//! - If no other node answers, this controller may be the one that is cut off ([`PeerAnswers`]): nothing moves.
//! - A node that reports its next hop as silent is gone only if another node of its network still reports otherwise.
//! - A serving node that does not answer through the overlay is gone if at least as many others answer there as do not.
//! - If no node of a network serves and may host, nothing moves: no node could take the addresses.
//! - A node that was gone must serve for a while before it counts as reachable, longer each time, unless no other is
//!   left.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use ipnet::IpNet;

use crate::node_health::liveness::{AgentAnswer, Liveness, NodeSigns, ProbeTiming, Signal};

/// How long other nodes of a network may take to report its next hop too: each agent probes it, and is probed, four
/// times a second.
const NEXT_HOP_REPORT_SPREAD: Duration = Duration::from_millis(700);
/// How often an agent probes its next hops.
const NEXT_HOP_PROBE_INTERVAL: Duration = Duration::from_millis(250);
/// How long a recovered node must serve before it counts again; doubled with each failure.
const FIRST_HOLD_DOWN: Duration = Duration::from_secs(2);
const MAX_HOLD_DOWN: Duration = Duration::from_secs(300);
/// A failure expires after this time without another.
const FAILURE_EXPIRES_AFTER: Duration = Duration::from_secs(300);
/// A node that was reached at its own address at most that long before its last sign counts as reachable there.
const DIRECT_MAX_AGE: Duration = Duration::from_secs(90);

/// Properties of a node that matter here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Traits {
    /// The controller's own node. Its answers say nothing about the paths to others.
    pub own: bool,
    /// The network of its egress IPs: nodes of one network can replace each other.
    pub network: Option<IpNet>,
}

/// How a node counts for the assignment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CountsAs {
    Reachable,
    /// As gone, since then.
    Gone,
    /// As gone although it serves, until then.
    Recovering(Instant),
}

/// A change to be logged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateChange {
    pub node: String,
    pub liveness: Liveness,
    pub counts_as: CountsAs,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeHealthReport {
    pub unreachable: BTreeSet<String>,
    /// When these last reported that they serve.
    pub last_serving: BTreeMap<String, Instant>,
    pub suspects: BTreeSet<String>,
    /// Nodes without any sign whose agents answered until then: each agent has ended its node's lease.
    pub silent: BTreeSet<String>,
    /// Nodes that are not gone, and would not take new addresses.
    pub absent: BTreeSet<String>,
    pub changes: Vec<StateChange>,
    /// No node answers: this controller is cut off, or all nodes are gone.
    pub cut_off: bool,
    /// No other node answers, whatever the own node's next hop does.
    pub no_node_answers: bool,
}

#[derive(Debug)]
struct ObservedNode {
    traits: Traits,
    /// It may get addresses.
    may_host: bool,
    signs: NodeSigns,
    /// When it was last reached at its own address.
    reached_directly_at: Option<Instant>,
    /// It reports that it answers through the overlay.
    has_overlay: bool,
    /// When it last did.
    last_echo: Option<Instant>,
    /// Since when its agent has reported without a pause that it serves. The agent answers through the overlay, so
    /// answers during its restart are not missed.
    serving_since: Option<Instant>,
    is_gone: bool,
    /// When a node that is gone last reported that it serves.
    last_serving: Instant,
    /// Since when a node that is gone serves without interruption.
    recovering_since: Option<Instant>,
    failures: u32,
    /// The latest failure, or when one expired.
    failure_free_since: Instant,
    logged: (Liveness, bool, bool),
}

impl ObservedNode {
    /// Whether its own address is silent too.
    fn is_reached_directly(&self) -> bool {
        self.reached_directly_at.is_some_and(|direct| self.signs.last_sign() <= direct + DIRECT_MAX_AGE)
    }

    fn liveness(&self, rules: &ProbeTiming, now: Instant) -> Liveness {
        match self.signs.liveness(rules, now) {
            Liveness::Answers(AgentAnswer::Serving) if self.has_lost_overlay(rules, now) => {
                Liveness::Answers(AgentAnswer::OverlayLost)
            }
            liveness => liveness,
        }
    }

    /// A new agent gets the usual time.
    fn has_lost_overlay(&self, rules: &ProbeTiming, now: Instant) -> bool {
        self.has_missed_echoes(rules.total * 2, now)
    }

    fn has_missed_echoes(&self, long: Duration, now: Instant) -> bool {
        let Some(serving_since) = self.serving_since else { return false };
        self.has_overlay && now >= self.last_echo.unwrap_or(serving_since).max(serving_since) + long
    }

    fn hold_down(&self) -> Duration {
        let times = 1_u32 << self.failures.saturating_sub(1).min(16);
        FIRST_HOLD_DOWN.saturating_mul(times).min(MAX_HOLD_DOWN)
    }

    fn mark_gone(&mut self, now: Instant) {
        self.is_gone = true;
        self.last_serving = self.signs.last_serving();
        self.recovering_since = None;
        self.failures = self.failures.saturating_add(1);
        self.failure_free_since = now;
    }

    fn mark_reachable(&mut self, now: Instant) {
        self.is_gone = false;
        self.recovering_since = None;
        self.failure_free_since = now;
    }

    fn expire_failures(&mut self, now: Instant) {
        while !self.is_gone && self.failures > 0 && now >= self.failure_free_since + FAILURE_EXPIRES_AFTER {
            self.failures -= 1;
            self.failure_free_since += FAILURE_EXPIRES_AFTER;
        }
    }

    /// Records whether a node that is gone serves, and returns whether it has for long enough.
    fn has_recovered(&mut self, liveness: Liveness, now: Instant) -> bool {
        if liveness != Liveness::Answers(AgentAnswer::Serving) {
            self.recovering_since = None;
            return false;
        }
        let since = *self.recovering_since.get_or_insert(now);
        now >= since + self.hold_down()
    }
}

/// All probed nodes.
#[derive(Debug)]
pub struct NodeStates {
    rules: ProbeTiming,
    nodes: BTreeMap<String, ObservedNode>,
    cut_off: bool,
    /// When the own node's next hop last answered.
    next_hop: Option<Instant>,
    /// Since when some nodes of a network do not report its next hop.
    next_hops: BTreeMap<Option<IpNet>, Instant>,
}

impl NodeStates {
    pub fn new(rules: ProbeTiming) -> Self {
        Self { rules, nodes: BTreeMap::new(), cut_off: false, next_hop: None, next_hops: BTreeMap::new() }
    }

    /// Adds a node, or changes its traits.
    pub fn add(&mut self, node: &str, traits: Traits, now: Instant) {
        if let Some(observed) = self.nodes.get_mut(node) {
            observed.traits = traits;
            return;
        }
        let observed = ObservedNode {
            traits,
            may_host: true,
            signs: NodeSigns::new(now),
            reached_directly_at: None,
            has_overlay: false,
            last_echo: None,
            serving_since: None,
            is_gone: false,
            last_serving: now,
            recovering_since: None,
            failures: 0,
            failure_free_since: now,
            logged: (Liveness::Unknown, false, false),
        };
        self.nodes.insert(node.to_owned(), observed);
    }

    /// Whether it may get addresses.
    pub fn set_may_host(&mut self, node: &str, may_host: bool) {
        if let Some(observed) = self.nodes.get_mut(node) {
            observed.may_host = may_host;
        }
    }

    /// Forgets the nodes for which this is false.
    pub fn retain(&mut self, keep: impl Fn(&str) -> bool) {
        self.nodes.retain(|name, _| keep(name));
    }

    pub fn remove(&mut self, node: &str) {
        self.nodes.remove(node);
    }

    pub fn note(&mut self, node: &str, signal: Signal, at: Instant) {
        if let Some(observed) = self.nodes.get_mut(node) {
            observed.signs.note(signal, at);
        }
    }

    /// It was reached at its own address, whatever its management address does.
    pub fn note_reached_directly(&mut self, node: &str, at: Instant) {
        if let Some(observed) = self.nodes.get_mut(node) {
            observed.reached_directly_at = observed.reached_directly_at.max(Some(at));
        }
    }

    /// Whether it reports that it answers through the overlay. The own node is not probed by that path.
    pub fn set_has_overlay(&mut self, node: &str, answers: bool) {
        if let Some(observed) = self.nodes.get_mut(node) {
            observed.has_overlay = answers && !observed.traits.own;
        }
    }

    /// It has answered through the overlay.
    pub fn note_echo(&mut self, node: &str, at: Instant) {
        if let Some(observed) = self.nodes.get_mut(node) {
            observed.last_echo = observed.last_echo.max(Some(at));
        }
    }

    /// The own node's next hop has answered.
    pub fn note_next_hop(&mut self, at: Instant) {
        self.next_hop = self.next_hop.max(Some(at));
    }

    /// Discards findings from a time without decisions: all nodes get the total timeout again. A node that only this
    /// controller could not reach keeps its addresses; one that is gone is detected again after the total timeout.
    pub fn reset(&mut self, now: Instant) {
        for observed in self.nodes.values_mut().filter(|observed| observed.is_gone) {
            observed.signs = NodeSigns::restart(now);
            observed.mark_reachable(now);
        }
    }

    pub fn evaluate(&mut self, now: Instant) -> NodeHealthReport {
        for observed in self.nodes.values_mut() {
            let is_serving = observed.signs.liveness(&self.rules, now) == Liveness::Answers(AgentAnswer::Serving)
                && !observed.signs.has_paused(&self.rules, now);
            observed.serving_since = is_serving.then(|| observed.serving_since.unwrap_or(now));
        }
        let (peers, no_node_answers) = (self.latest_peer_answer(now), self.no_node_answers(now));
        let networks: BTreeSet<_> = self.nodes.values().map(|observed| observed.traits.network).collect();
        self.next_hops.retain(|network, _| networks.contains(network));
        let mut report =
            NodeHealthReport { cut_off: peers == PeerAnswers::Missing, no_node_answers, ..NodeHealthReport::default() };
        for network in networks {
            self.evaluate_network(network, peers, now, &mut report.suspects);
        }
        for (name, observed) in &mut self.nodes {
            observed.expire_failures(now);
            if observed.is_gone {
                report.unreachable.insert(name.clone());
                report.last_serving.insert(name.clone(), observed.last_serving);
            }
            let liveness = observed.liveness(&self.rules, now);
            let is_absent = match liveness {
                Liveness::AgentSilent | Liveness::AgentGone | Liveness::Answers(AgentAnswer::NotServing) => true,
                Liveness::Silent => !self.cut_off,
                Liveness::Unknown
                | Liveness::Answers(AgentAnswer::Serving | AgentAnswer::NextHopLost | AgentAnswer::OverlayLost) => {
                    false
                }
            };
            if liveness == Liveness::Silent && !observed.signs.agent_stopped_first(&self.rules) {
                report.silent.insert(name.clone());
            }
            if is_absent && !observed.is_gone {
                report.absent.insert(name.clone());
            }
            let current = (liveness, observed.is_gone, observed.recovering_since.is_some());
            if std::mem::replace(&mut observed.logged, current) == current {
                continue;
            }
            let counts_as = match observed.recovering_since {
                Some(since) => CountsAs::Recovering(since + observed.hold_down()),
                None if observed.is_gone => CountsAs::Gone,
                None => CountsAs::Reachable,
            };
            report.changes.push(StateChange { node: name.clone(), liveness, counts_as });
        }
        report
    }

    /// Before any of them counts as gone, since then there is nothing to compare with.
    fn no_node_answers(&self, now: Instant) -> bool {
        let others = || self.nodes.values().filter(|observed| !observed.traits.own && !observed.is_gone);
        others().count() > 1 && others().all(|observed| observed.signs.is_suspect(&self.rules, now))
    }

    /// Which other nodes answer. When one answers again after none did, the silence of all nodes is excused up to now.
    fn latest_peer_answer(&mut self, now: Instant) -> PeerAnswers {
        let others = || self.nodes.values().filter(|observed| !observed.traits.own && !observed.is_gone);
        let latest = others().map(|observed| observed.signs.last_sign()).max();
        let half = self.rules.total / 2;
        // A next hop that has fallen silent as well was on the same path. This node's agent records an answer at the
        // end of a probe of the next hop, and reports it with its next answer.
        let fresh = half.max(NEXT_HOP_PROBE_INTERVAL * 2 + self.rules.interval) + self.rules.interval / 2;
        let next_hop =
            self.next_hop.filter(|hop| now < *hop + fresh && others().all(ObservedNode::is_reached_directly));
        let peers = match latest {
            Some(latest) if others().count() > 1 && now >= latest + half => match next_hop {
                Some(hop) if hop >= latest + half => PeerAnswers::NextHop(hop),
                Some(_) => PeerAnswers::Latest(latest),
                None => PeerAnswers::Missing,
            },
            Some(latest) if others().count() > 1 => PeerAnswers::Latest(latest),
            _ => PeerAnswers::NoPeers,
        };
        let was_cut_off = std::mem::replace(&mut self.cut_off, peers == PeerAnswers::Missing);
        if was_cut_off && peers != PeerAnswers::Missing {
            self.nodes
                .values_mut()
                .filter(|observed| !observed.is_gone)
                .for_each(|observed| observed.signs.excuse_silence(now));
        }
        peers
    }

    /// The smaller part of a cluster is cut off, and this controller may be in it. Nodes that are cut off together are
    /// not detected at the same moment, so one that has just missed answers counts with those that have lost the
    /// overlay.
    fn overlay_works(&self, now: Instant) -> bool {
        let total = self.rules.total;
        let echoes_now = |observed: &&ObservedNode| {
            observed.has_overlay && observed.last_echo.is_some_and(|echoed| now < echoed + total)
        };
        let echoing = self.nodes.values().filter(echoes_now).count();
        echoing > 0 && echoing >= self.nodes.values().filter(|observed| observed.has_missed_echoes(total, now)).count()
    }

    fn evaluate_network(
        &mut self,
        network: Option<IpNet>,
        peers: PeerAnswers,
        now: Instant,
        suspects: &mut BTreeSet<String>,
    ) {
        let rules = self.rules;
        let overlay_works = self.overlay_works(now);
        let mut observed_nodes: Vec<(&String, &mut ObservedNode, Liveness)> = (self.nodes.iter_mut())
            .filter(|(_, observed)| observed.traits.network == network)
            .map(|(name, observed)| {
                let liveness = observed.liveness(&rules, now);
                (name, observed, liveness)
            })
            .collect();
        for (_, observed, liveness) in &mut observed_nodes {
            if observed.is_gone && observed.has_recovered(*liveness, now) {
                observed.mark_reachable(now);
            }
        }

        let is_otherwise =
            |liveness: Liveness| matches!(liveness, Liveness::Answers(answer) if answer != AgentAnswer::NextHopLost);
        let next_hop_since = if observed_nodes.iter().any(|(_, _, liveness)| is_otherwise(*liveness)) {
            Some(*self.next_hops.entry(network).or_insert(now))
        } else {
            self.next_hops.remove(&network);
            None
        };
        let others_answer =
            |observed: &ObservedNode| observed.traits.own || peers.is_newer_than(observed.signs.last_sign(), &rules);
        let fails = |observed: &ObservedNode, liveness: Liveness| match liveness {
            Liveness::Silent => others_answer(observed),
            Liveness::AgentGone | Liveness::Answers(AgentAnswer::NotServing) => true,
            Liveness::Answers(AgentAnswer::NextHopLost) => {
                next_hop_since.is_some_and(|since| now >= since.max(observed.signs.since()) + NEXT_HOP_REPORT_SPREAD)
            }
            Liveness::Answers(AgentAnswer::OverlayLost) => overlay_works,
            Liveness::Unknown | Liveness::AgentSilent | Liveness::Answers(AgentAnswer::Serving) => false,
        };
        let is_suspect = |observed: &ObservedNode| {
            observed.signs.is_agent_overdue(&rules, now)
                || (observed.signs.is_suspect(&rules, now) && others_answer(observed))
        };
        let serves = |observed: &ObservedNode, liveness: Liveness| {
            liveness == Liveness::Answers(AgentAnswer::Serving) && !is_suspect(observed)
        };

        let is_target = |observed: &ObservedNode, liveness: Liveness| {
            observed.may_host && !observed.is_gone && serves(observed, liveness)
        };
        if !observed_nodes.iter().any(|(_, observed, liveness)| is_target(observed, *liveness)) {
            for (_, observed, _) in
                observed_nodes.iter_mut().filter(|(_, observed, liveness)| serves(observed, *liveness))
            {
                observed.mark_reachable(now);
            }
        }
        let has_target = observed_nodes.iter().any(|(_, observed, liveness)| is_target(observed, *liveness));
        for (name, observed, liveness) in observed_nodes {
            let may_be_alive = matches!(liveness, Liveness::Answers(_));
            if (observed.is_gone && !may_be_alive) || (!observed.is_gone && has_target && is_suspect(observed)) {
                suspects.insert(name.clone());
            }
            if !observed.is_gone && has_target && fails(observed, liveness) {
                observed.mark_gone(now);
            }
        }
    }
}

/// Which other nodes that do not count as gone answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PeerAnswers {
    Missing,
    /// There is at most one.
    NoPeers,
    /// Some node, last at this time.
    Latest(Instant),
    /// No node, but the own node's next hop, last at this time.
    NextHop(Instant),
}

impl PeerAnswers {
    /// Whether another node has answered after one whose latest sign is this old. Nodes answer in turn within one
    /// interval.
    fn is_newer_than(self, last_sign: Instant, rules: &ProbeTiming) -> bool {
        match self {
            Self::Missing => false,
            Self::NoPeers => true,
            Self::Latest(latest) | Self::NextHop(latest) => latest >= last_sign + rules.interval * 3 / 2,
        }
    }
}

#[cfg(test)]
mod tests;
