//! All probed nodes, and which of them count as gone. Pure: every time is an argument.
//!
//! The [`NodeSigns`] of a node alone are not enough:
//!
//! - **Isolation.** If no node has been heard since a node fell silent, this controller may be the one that is cut off.
//!   Nothing moves then, unless the own node's next hop has answered since. It is on the path of packets, not on the
//!   CNI's, so it counts only if all silent nodes were recently reached by that path. Nodes that fail together are
//!   otherwise found by their condition Ready.
//! - **Next hop.** Nodes of one network notice at nearly the same time that it is gone. So a node that reports it is
//!   gone only if another one of its network still reports otherwise a little later.
//! - **Overlay.** A serving node that does not answer through the overlay for twice the total timeout while its agent
//!   is up has lost the path between nodes. It is gone if at least as many nodes answer by that path as do not:
//!   otherwise the fault is on this controller's side, or a firewall blocks all.
//! - **Target.** If no node of a network serves, nothing moves: no node could take the addresses. Drained nodes, and
//!   nodes without the label, are no targets.
//! - **Recovery.** A node that was gone must serve for a while before it counts again, longer each time, unless no
//!   other is left. Each failure expires after a while.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use ipnet::IpNet;

use crate::node_health::liveness::{AgentAnswer, Liveness, NodeSigns, Rules, Signal};

/// How long other nodes of a network may take to report its next hop too: each looks and is probed four times a second.
const TOGETHER: Duration = Duration::from_millis(700);
/// How often an agent probes its next hops.
const NEXT_HOP_LOOK: Duration = Duration::from_millis(250);
/// How long a recovered node must serve before it counts again; doubled with each failure.
const FIRST_HOLD_DOWN: Duration = Duration::from_secs(2);
const LONGEST_HOLD_DOWN: Duration = Duration::from_secs(300);
/// A failure expires after this time without another.
const FORGIVEN_AFTER: Duration = Duration::from_secs(300);
/// A node that was reached at its own address at most that long before its last sign counts as reachable there.
const DIRECT: Duration = Duration::from_secs(90);

/// Properties of a node that matter here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Traits {
    /// The controller's own node. Its answers say nothing about the paths to others.
    pub own: bool,
    /// The network of its egress IPs: nodes of one network can replace each other.
    pub network: Option<IpNet>,
}

/// How a node counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Treated {
    AsReachable,
    /// As gone, since then.
    AsGone,
    /// As gone although it serves, until then.
    UntilProven(Instant),
}

/// A change to be logged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct News {
    pub node: String,
    pub liveness: Liveness,
    pub treated: Treated,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeHealthReport {
    pub unreachable: BTreeSet<String>,
    /// When these were last well.
    pub lost: BTreeMap<String, Instant>,
    pub suspects: BTreeSet<String>,
    /// Nodes without any sign whose agents answered until then: each agent has ended its node's lease.
    pub silent: BTreeSet<String>,
    /// Nodes that are not gone, and would not take new addresses.
    pub absent: BTreeSet<String>,
    pub news: Vec<News>,
    /// No node answers: this controller is cut off, or all nodes are gone.
    pub cut_off: bool,
    /// No other node answers, whatever the own node's next hop does.
    pub hears_none: bool,
}

#[derive(Debug)]
struct Member {
    traits: Traits,
    /// It may get addresses.
    may_host: bool,
    pulse: NodeSigns,
    /// When it was last reached at its own address.
    direct: Option<Instant>,
    /// It reports that it answers through the overlay.
    has_overlay: bool,
    /// When it last did.
    echoed: Option<Instant>,
    /// Since when its agent has reported without a pause that it serves. The agent answers through the overlay, so
    /// answers during its restart are not missed.
    serving_since: Option<Instant>,
    gone: bool,
    /// When a node that is gone was last well.
    lost: Instant,
    /// Since when a node that is gone serves without interruption.
    serves_since: Option<Instant>,
    failures: u32,
    /// The latest failure, or when one expired.
    calm_since: Instant,
    logged: (Liveness, bool, bool),
}

impl Member {
    /// Whether its own address is silent too.
    fn is_direct(&self) -> bool {
        self.direct.is_some_and(|direct| self.pulse.alive() <= direct + DIRECT)
    }

    fn liveness(&self, rules: &Rules, now: Instant) -> Liveness {
        match self.pulse.liveness(rules, now) {
            Liveness::Answers(AgentAnswer::Serving) if self.has_lost_overlay(rules, now) => {
                Liveness::Answers(AgentAnswer::OverlayLost)
            }
            liveness => liveness,
        }
    }

    /// A new agent gets the usual time.
    fn has_lost_overlay(&self, rules: &Rules, now: Instant) -> bool {
        self.has_missed_echoes(rules.total * 2, now)
    }

    fn has_missed_echoes(&self, long: Duration, now: Instant) -> bool {
        let Some(serving_since) = self.serving_since else { return false };
        self.has_overlay && now >= self.echoed.unwrap_or(serving_since).max(serving_since) + long
    }

    fn hold_down(&self) -> Duration {
        let times = 1_u32 << self.failures.saturating_sub(1).min(16);
        FIRST_HOLD_DOWN.saturating_mul(times).min(LONGEST_HOLD_DOWN)
    }

    fn declare(&mut self, now: Instant) {
        self.gone = true;
        self.lost = self.pulse.well();
        self.serves_since = None;
        self.failures = self.failures.saturating_add(1);
        self.calm_since = now;
    }

    fn take_back(&mut self, now: Instant) {
        self.gone = false;
        self.serves_since = None;
        self.calm_since = now;
    }

    fn forgive(&mut self, now: Instant) {
        while !self.gone && self.failures > 0 && now >= self.calm_since + FORGIVEN_AFTER {
            self.failures -= 1;
            self.calm_since += FORGIVEN_AFTER;
        }
    }

    /// Records whether a node that is gone serves, and returns whether it has for long enough.
    fn has_proven(&mut self, liveness: Liveness, now: Instant) -> bool {
        if liveness != Liveness::Answers(AgentAnswer::Serving) {
            self.serves_since = None;
            return false;
        }
        let since = *self.serves_since.get_or_insert(now);
        now >= since + self.hold_down()
    }
}

/// All probed nodes.
#[derive(Debug)]
pub struct NodeStates {
    rules: Rules,
    members: BTreeMap<String, Member>,
    cut_off: bool,
    /// When the own node's next hop last answered.
    next_hop: Option<Instant>,
    /// Since when some nodes of a network do not report its next hop.
    next_hops: BTreeMap<Option<IpNet>, Instant>,
}

impl NodeStates {
    pub fn new(rules: Rules) -> Self {
        Self { rules, members: BTreeMap::new(), cut_off: false, next_hop: None, next_hops: BTreeMap::new() }
    }

    /// Adds a node, or changes its traits.
    pub fn enter(&mut self, node: &str, traits: Traits, now: Instant) {
        if let Some(member) = self.members.get_mut(node) {
            member.traits = traits;
            return;
        }
        let member = Member {
            traits,
            may_host: true,
            pulse: NodeSigns::begin(now),
            direct: None,
            has_overlay: false,
            echoed: None,
            serving_since: None,
            gone: false,
            lost: now,
            serves_since: None,
            failures: 0,
            calm_since: now,
            logged: (Liveness::Unknown, false, false),
        };
        self.members.insert(node.to_owned(), member);
    }

    /// Whether it may get addresses.
    pub fn note_host(&mut self, node: &str, may_host: bool) {
        if let Some(member) = self.members.get_mut(node) {
            member.may_host = may_host;
        }
    }

    /// Forgets the nodes for which this is false.
    pub fn retain(&mut self, keep: impl Fn(&str) -> bool) {
        self.members.retain(|name, _| keep(name));
    }

    pub fn leave(&mut self, node: &str) {
        self.members.remove(node);
    }

    pub fn note(&mut self, node: &str, sign: Signal, at: Instant) {
        if let Some(member) = self.members.get_mut(node) {
            member.pulse.note(sign, at);
        }
    }

    /// It was reached at its own address, whatever its management address does.
    pub fn note_direct(&mut self, node: &str, at: Instant) {
        if let Some(member) = self.members.get_mut(node) {
            member.direct = member.direct.max(Some(at));
        }
    }

    /// Whether it reports that it answers through the overlay. The own node is not probed by that path.
    pub fn note_overlay(&mut self, node: &str, answers: bool) {
        if let Some(member) = self.members.get_mut(node) {
            member.has_overlay = answers && !member.traits.own;
        }
    }

    /// It has answered through the overlay.
    pub fn note_echo(&mut self, node: &str, at: Instant) {
        if let Some(member) = self.members.get_mut(node) {
            member.echoed = member.echoed.max(Some(at));
        }
    }

    /// The own node's next hop has answered.
    pub fn note_next_hop(&mut self, at: Instant) {
        self.next_hop = self.next_hop.max(Some(at));
    }

    /// Discards findings from a time without decisions: all nodes have their time again. A node that only this
    /// controller could not hear keeps its addresses; a lost one is detected again after the total timeout.
    pub fn begin_again(&mut self, now: Instant) {
        for member in self.members.values_mut().filter(|member| member.gone) {
            member.pulse = NodeSigns::begin_again(now);
            member.take_back(now);
        }
    }

    pub fn judge(&mut self, now: Instant) -> NodeHealthReport {
        for member in self.members.values_mut() {
            let is_serving = member.pulse.liveness(&self.rules, now) == Liveness::Answers(AgentAnswer::Serving)
                && !member.pulse.has_paused(&self.rules, now);
            member.serving_since = is_serving.then(|| member.serving_since.unwrap_or(now));
        }
        let (heard, hears_none) = (self.look_around(now), self.hears_none(now));
        let networks: BTreeSet<_> = self.members.values().map(|member| member.traits.network).collect();
        self.next_hops.retain(|network, _| networks.contains(network));
        let mut judgement =
            NodeHealthReport { cut_off: heard == Audience::NoNode, hears_none, ..NodeHealthReport::default() };
        for network in networks {
            self.judge_network(network, heard, now, &mut judgement.suspects);
        }
        for (name, member) in &mut self.members {
            member.forgive(now);
            if member.gone {
                judgement.unreachable.insert(name.clone());
                judgement.lost.insert(name.clone(), member.lost);
            }
            let liveness = member.liveness(&self.rules, now);
            let is_absent = match liveness {
                Liveness::AgentSilent | Liveness::AgentGone | Liveness::Answers(AgentAnswer::NotServing) => true,
                Liveness::Silent => !self.cut_off,
                Liveness::Unknown
                | Liveness::Answers(AgentAnswer::Serving | AgentAnswer::NextHopLost | AgentAnswer::OverlayLost) => {
                    false
                }
            };
            if liveness == Liveness::Silent && !member.pulse.agent_went_first(&self.rules) {
                judgement.silent.insert(name.clone());
            }
            if is_absent && !member.gone {
                judgement.absent.insert(name.clone());
            }
            let current = (liveness, member.gone, member.serves_since.is_some());
            if std::mem::replace(&mut member.logged, current) == current {
                continue;
            }
            let treated = match member.serves_since {
                Some(since) => Treated::UntilProven(since + member.hold_down()),
                None if member.gone => Treated::AsGone,
                None => Treated::AsReachable,
            };
            judgement.news.push(News { node: name.clone(), liveness, treated });
        }
        judgement
    }

    /// Before any of them counts as gone, since then there is nothing to compare with.
    fn hears_none(&self, now: Instant) -> bool {
        let others = || self.members.values().filter(|member| !member.traits.own && !member.gone);
        others().count() > 1 && others().all(|member| member.pulse.is_suspect(&self.rules, now))
    }

    /// Which other nodes are heard. When one is heard again after none was, all nodes have their time again.
    fn look_around(&mut self, now: Instant) -> Audience {
        let others = || self.members.values().filter(|member| !member.traits.own && !member.gone);
        let latest = others().map(|member| member.pulse.alive()).max();
        let half = self.rules.total / 2;
        // A next hop that has fallen silent as well was on the same path.
        // This node's agent notes an answer at the end of a look and reports it with its next probe answer.
        let fresh = half.max(NEXT_HOP_LOOK * 2 + self.rules.interval) + self.rules.interval / 2;
        let next_hop = self.next_hop.filter(|hop| now < *hop + fresh && others().all(Member::is_direct));
        let heard = match latest {
            Some(latest) if others().count() > 1 && now >= latest + half => match next_hop {
                Some(hop) if hop >= latest + half => Audience::NextHop(hop),
                Some(_) => Audience::Some(latest),
                None => Audience::NoNode,
            },
            Some(latest) if others().count() > 1 => Audience::Some(latest),
            _ => Audience::NothingToCompare,
        };
        let was_cut_off = std::mem::replace(&mut self.cut_off, heard == Audience::NoNode);
        if was_cut_off && heard != Audience::NoNode {
            self.members.values_mut().filter(|member| !member.gone).for_each(|member| member.pulse.excuse(now));
        }
        heard
    }

    /// The smaller part of a cluster is cut off, and this controller may be in it. Nodes that are cut off together are
    /// not detected at the same moment, so one that has just missed answers counts with those that have lost the
    /// overlay.
    fn overlay_works(&self, now: Instant) -> bool {
        let total = self.rules.total;
        let echoes = |member: &&Member| member.has_overlay && member.echoed.is_some_and(|echoed| now < echoed + total);
        let echoing = self.members.values().filter(echoes).count();
        echoing > 0 && echoing >= self.members.values().filter(|member| member.has_missed_echoes(total, now)).count()
    }

    fn judge_network(
        &mut self,
        network: Option<IpNet>,
        heard: Audience,
        now: Instant,
        suspects: &mut BTreeSet<String>,
    ) {
        let rules = self.rules;
        let overlay_works = self.overlay_works(now);
        let mut members: Vec<(&String, &mut Member, Liveness)> = (self.members.iter_mut())
            .filter(|(_, member)| member.traits.network == network)
            .map(|(name, member)| {
                let liveness = member.liveness(&rules, now);
                (name, member, liveness)
            })
            .collect();
        for (_, member, liveness) in &mut members {
            if member.gone && member.has_proven(*liveness, now) {
                member.take_back(now);
            }
        }

        let is_otherwise =
            |liveness: Liveness| matches!(liveness, Liveness::Answers(answer) if answer != AgentAnswer::NextHopLost);
        let next_hop_since = if members.iter().any(|(_, _, liveness)| is_otherwise(*liveness)) {
            Some(*self.next_hops.entry(network).or_insert(now))
        } else {
            self.next_hops.remove(&network);
            None
        };
        let is_alone = |member: &Member| member.traits.own || heard.since(member.pulse.alive(), &rules);
        let fails = |member: &Member, liveness: Liveness| match liveness {
            Liveness::Silent => is_alone(member),
            Liveness::AgentGone | Liveness::Answers(AgentAnswer::NotServing) => true,
            Liveness::Answers(AgentAnswer::NextHopLost) => {
                next_hop_since.is_some_and(|since| now >= since.max(member.pulse.since()) + TOGETHER)
            }
            Liveness::Answers(AgentAnswer::OverlayLost) => overlay_works,
            Liveness::Unknown | Liveness::AgentSilent | Liveness::Answers(AgentAnswer::Serving) => false,
        };
        let is_suspect = |member: &Member| {
            member.pulse.is_agent_overdue(&rules, now) || (member.pulse.is_suspect(&rules, now) && is_alone(member))
        };
        let serves = |member: &Member, liveness: Liveness| {
            liveness == Liveness::Answers(AgentAnswer::Serving) && !is_suspect(member)
        };

        let takes = |member: &Member, liveness: Liveness| member.may_host && !member.gone && serves(member, liveness);
        if !members.iter().any(|(_, member, liveness)| takes(member, *liveness)) {
            for (_, member, _) in members.iter_mut().filter(|(_, member, liveness)| serves(member, *liveness)) {
                member.take_back(now);
            }
        }
        let somewhere_to_go = members.iter().any(|(_, member, liveness)| takes(member, *liveness));
        for (name, member, liveness) in members {
            let may_be_alive = matches!(liveness, Liveness::Answers(_));
            if (member.gone && !may_be_alive) || (!member.gone && somewhere_to_go && is_suspect(member)) {
                suspects.insert(name.clone());
            }
            if !member.gone && somewhere_to_go && fails(member, liveness) {
                member.declare(now);
            }
        }
    }
}

/// Which other nodes that do not count as gone are heard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Audience {
    NoNode,
    /// There is at most one.
    NothingToCompare,
    /// Some node, last at this time.
    Some(Instant),
    /// No node, but the own node's next hop, last at this time.
    NextHop(Instant),
}

impl Audience {
    /// Whether another node was heard after one whose latest sign is this old. Nodes answer in turn within one
    /// interval.
    fn since(self, alive: Instant, rules: &Rules) -> bool {
        match self {
            Self::NoNode => false,
            Self::NothingToCompare => true,
            Self::Some(latest) | Self::NextHop(latest) => latest >= alive + rules.interval * 3 / 2,
        }
    }
}

#[cfg(test)]
mod tests;
