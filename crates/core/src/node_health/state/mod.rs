//! All nodes that are probed, and which of them are to be treated as gone. Pure: every time is an argument.
//!
//! What one node's [`NodeSigns`] says is not enough:
//!
//! - **Who is cut off?** Where nobody has been heard since a node fell silent, it is not the node that is alone but whoever
//!   asks. Nothing moves then, unless there is another witness: the next hop of the own node, which has answered since. It
//!   stands on the road that packets take, not on the CNI's; so it counts only where all that are silent have been reached
//!   by that road of late. Otherwise nodes that really fail together are found by their condition Ready.
//! - **Next hop.** Nodes of one network notice within moments of each other that it is gone. So a node that reports it is
//!   gone only when another of its network still says otherwise a little later.
//! - **Overlay.** A node that serves and says that it answers questions through the overlay, and does not for twice the
//!   total timeout in which its agent was there, has lost the road between nodes. It is gone if at least as many nodes have answered by that road just
//!   now as have not: else it is whoever asks, with some others perhaps, or a firewall everywhere.
//! - **Somewhere to go.** Where no node of a network serves, nothing moves: no node could take the addresses. A node that is
//!   drained, or has lost its label and is asked on for a while, is given none.
//! - **Coming back.** A node that was gone serves for a while before it counts again, longer each time, unless no other is
//!   left. A node that stays up is forgiven one failure after the other.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use ipnet::IpNet;

use crate::node_health::liveness::{AgentAnswer, Liveness, NodeSigns, Rules, Signal};

/// How long the others of a network have to report its next hop too: each looks and is asked four times a second.
const TOGETHER: Duration = Duration::from_millis(700);
/// How often an agent asks its next hops.
const NEXT_HOP_LOOK: Duration = Duration::from_millis(250);
/// How long a node that was gone once must serve before it counts again; twice as long each further time.
const FIRST_HOLD_DOWN: Duration = Duration::from_secs(2);
const LONGEST_HOLD_DOWN: Duration = Duration::from_secs(300);
/// After so long without a failure one is forgiven.
const FORGIVEN_AFTER: Duration = Duration::from_secs(300);
/// A node that was reached at its own address no longer ago than that, before its last sign, could have been reached there.
const DIRECT: Duration = Duration::from_secs(90);

/// What matters of a node here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Traits {
    /// The node of the controller. That it answers says nothing of the roads to the others.
    pub own: bool,
    /// The network of its egress IPs: nodes of one can stand in for each other.
    pub network: Option<IpNet>,
}

/// How a node is treated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Treated {
    AsReachable,
    /// Like gone, since then.
    AsGone,
    /// Like gone, though it serves: when that ends.
    UntilProven(Instant),
}

/// Something about a node that a person wants to know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct News {
    pub node: String,
    pub standing: Liveness,
    pub treated: Treated,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeHealthReport {
    pub unreachable: BTreeSet<String>,
    /// When these were well last.
    pub lost: BTreeMap<String, Instant>,
    pub suspects: BTreeSet<String>,
    /// Those that give no sign, and whose agents answered until then: each has fenced its node itself.
    pub silent: BTreeSet<String>,
    /// Those that are not gone, and would not take what is given to them.
    pub absent: BTreeSet<String>,
    pub news: Vec<News>,
    /// Nobody answers: whoever asks is cut off, or all nodes are gone.
    pub cut_off: bool,
    /// No other node answers, whatever the own node's next hop does.
    pub hears_none: bool,
}

#[derive(Debug)]
struct Member {
    traits: Traits,
    /// It may be given addresses.
    may_host: bool,
    pulse: NodeSigns,
    /// When it was reached at its own address last.
    direct: Option<Instant>,
    /// It says that it answers through the overlay.
    has_overlay: bool,
    /// When it did last.
    echoed: Option<Instant>,
    /// Since when its agent says without a pause that it serves. It is the agent that answers through the overlay: while it is
    /// started again nothing is missed.
    says_since: Option<Instant>,
    gone: bool,
    /// When one that is gone was well last.
    lost: Instant,
    /// Since when one that is gone serves without interruption.
    serves_since: Option<Instant>,
    failures: u32,
    /// The latest failure, or when one was forgiven.
    calm_since: Instant,
    said: (Liveness, bool, bool),
}

impl Member {
    /// Its silence is that of the node's own address too.
    fn is_direct(&self) -> bool {
        self.direct.is_some_and(|direct| self.pulse.alive() <= direct + DIRECT)
    }

    fn standing(&self, rules: &Rules, now: Instant) -> Liveness {
        match self.pulse.standing(rules, now) {
            Liveness::Answers(AgentAnswer::Serving) if self.has_lost_overlay(rules, now) => {
                Liveness::Answers(AgentAnswer::OverlayLost)
            }
            standing => standing,
        }
    }

    /// An agent that has just started has as much time as any.
    fn has_lost_overlay(&self, rules: &Rules, now: Instant) -> bool {
        self.has_missed_echoes(rules.total * 2, now)
    }

    fn has_missed_echoes(&self, long: Duration, now: Instant) -> bool {
        let Some(says_since) = self.says_since else { return false };
        self.has_overlay && now >= self.echoed.unwrap_or(says_since).max(says_since) + long
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

    /// Of one that is gone: notes whether it serves, and says whether it has for long enough.
    fn has_proven(&mut self, standing: Liveness, now: Instant) -> bool {
        if standing != Liveness::Answers(AgentAnswer::Serving) {
            self.serves_since = None;
            return false;
        }
        let since = *self.serves_since.get_or_insert(now);
        now >= since + self.hold_down()
    }
}

/// Everybody who is probed.
#[derive(Debug)]
pub struct NodeStates {
    rules: Rules,
    members: BTreeMap<String, Member>,
    cut_off: bool,
    /// When the next hop of the own node answered last.
    next_hop: Option<Instant>,
    /// Since when not all nodes of a network report its next hop.
    next_hops: BTreeMap<Option<IpNet>, Instant>,
}

impl NodeStates {
    pub fn new(rules: Rules) -> Self {
        Self { rules, members: BTreeMap::new(), cut_off: false, next_hop: None, next_hops: BTreeMap::new() }
    }

    /// A node that is probed from now on, or has other traits than before.
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
            says_since: None,
            gone: false,
            lost: now,
            serves_since: None,
            failures: 0,
            calm_since: now,
            said: (Liveness::Unknown, false, false),
        };
        self.members.insert(node.to_owned(), member);
    }

    /// Whether it may be given addresses.
    pub fn note_host(&mut self, node: &str, may_host: bool) {
        if let Some(member) = self.members.get_mut(node) {
            member.may_host = may_host;
        }
    }

    pub fn leave(&mut self, node: &str) {
        self.members.remove(node);
    }

    pub fn note(&mut self, node: &str, sign: Signal, at: Instant) {
        if let Some(member) = self.members.get_mut(node) {
            member.pulse.note(sign, at);
        }
    }

    /// It was reached at its own address, whatever its management address says.
    pub fn note_direct(&mut self, node: &str, at: Instant) {
        if let Some(member) = self.members.get_mut(node) {
            member.direct = member.direct.max(Some(at));
        }
    }

    /// Whether it says that it answers through the overlay. One's own node is not asked by that road.
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

    /// The next hop of the own node has answered.
    pub fn note_next_hop(&mut self, at: Instant) {
        self.next_hop = self.next_hop.max(Some(at));
    }

    /// What was found while nothing could be decided upon it is old: all nodes have their time again. A node that this
    /// controller alone could not hear keeps its addresses; one that is lost is found out again after the total timeout.
    pub fn begin_again(&mut self, now: Instant) {
        for member in self.members.values_mut().filter(|member| member.gone) {
            member.pulse = NodeSigns::begin_again(now);
            member.take_back(now);
        }
    }

    pub fn judge(&mut self, now: Instant) -> NodeHealthReport {
        for member in self.members.values_mut() {
            let says = member.pulse.standing(&self.rules, now) == Liveness::Answers(AgentAnswer::Serving)
                && !member.pulse.has_paused(&self.rules, now);
            member.says_since = says.then(|| member.says_since.unwrap_or(now));
        }
        let (heard, hears_none) = (self.look_around(now), self.hears_none(now));
        let networks: BTreeSet<_> = self.members.values().map(|member| member.traits.network).collect();
        self.next_hops.retain(|network, _| networks.contains(network));
        let mut judgement =
            NodeHealthReport { cut_off: heard == Audience::Nobody, hears_none, ..NodeHealthReport::default() };
        for network in networks {
            self.judge_network(network, heard, now, &mut judgement.suspects);
        }
        for (name, member) in &mut self.members {
            member.forgive(now);
            if member.gone {
                judgement.unreachable.insert(name.clone());
                judgement.lost.insert(name.clone(), member.lost);
            }
            let standing = member.standing(&self.rules, now);
            let is_absent = match standing {
                Liveness::AgentSilent | Liveness::AgentGone | Liveness::Answers(AgentAnswer::NotServing) => true,
                Liveness::Silent => !self.cut_off,
                Liveness::Unknown
                | Liveness::Answers(AgentAnswer::Serving | AgentAnswer::NextHopLost | AgentAnswer::OverlayLost) => {
                    false
                }
            };
            if standing == Liveness::Silent && !member.pulse.agent_went_first(&self.rules) {
                judgement.silent.insert(name.clone());
            }
            if is_absent && !member.gone {
                judgement.absent.insert(name.clone());
            }
            let saying = (standing, member.gone, member.serves_since.is_some());
            if std::mem::replace(&mut member.said, saying) == saying {
                continue;
            }
            let treated = match member.serves_since {
                Some(since) => Treated::UntilProven(since + member.hold_down()),
                None if member.gone => Treated::AsGone,
                None => Treated::AsReachable,
            };
            judgement.news.push(News { node: name.clone(), standing, treated });
        }
        judgement
    }

    /// Before any of them counts as gone: then there is nothing to compare any more.
    fn hears_none(&self, now: Instant) -> bool {
        let others = || self.members.values().filter(|member| !member.traits.own && !member.gone);
        others().count() > 1 && others().all(|member| member.pulse.is_suspect(&self.rules, now))
    }

    /// Whom one hears. When somebody is heard again after nobody was, all have their time anew.
    fn look_around(&mut self, now: Instant) -> Audience {
        let others = || self.members.values().filter(|member| !member.traits.own && !member.gone);
        let latest = others().map(|member| member.pulse.alive()).max();
        let half = self.rules.total / 2;
        // One that has fallen silent as well was on the same road.
        // The agent of this node knows of an answer at the end of the look after which it came, and says so with its next answer to
        // a probe.
        let fresh = half.max(NEXT_HOP_LOOK * 2 + self.rules.interval) + self.rules.interval / 2;
        let next_hop = self.next_hop.filter(|hop| now < *hop + fresh && others().all(Member::is_direct));
        let heard = match latest {
            Some(latest) if others().count() > 1 && now >= latest + half => match next_hop {
                Some(hop) if hop >= latest + half => Audience::NextHop(hop),
                Some(_) => Audience::Some(latest),
                None => Audience::Nobody,
            },
            Some(latest) if others().count() > 1 => Audience::Some(latest),
            _ => Audience::NothingToCompare,
        };
        let was_cut_off = std::mem::replace(&mut self.cut_off, heard == Audience::Nobody);
        if was_cut_off && heard != Audience::Nobody {
            self.members.values_mut().filter(|member| !member.gone).for_each(|member| member.pulse.excuse(now));
        }
        heard
    }

    /// The smaller part of a cluster is the one that is cut off, and whoever asks may be in it. Those that have been cut off
    /// together are not found lost in the same moment: who has just missed echoes counts with those that have lost them.
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
                let standing = member.standing(&rules, now);
                (name, member, standing)
            })
            .collect();
        for (_, member, standing) in &mut members {
            if member.gone && member.has_proven(*standing, now) {
                member.take_back(now);
            }
        }

        let is_otherwise =
            |standing: Liveness| matches!(standing, Liveness::Answers(answer) if answer != AgentAnswer::NextHopLost);
        let next_hop_since = if members.iter().any(|(_, _, standing)| is_otherwise(*standing)) {
            Some(*self.next_hops.entry(network).or_insert(now))
        } else {
            self.next_hops.remove(&network);
            None
        };
        let is_alone = |member: &Member| member.traits.own || heard.since(member.pulse.alive(), &rules);
        let fails = |member: &Member, standing: Liveness| match standing {
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
        let serves = |member: &Member, standing: Liveness| {
            standing == Liveness::Answers(AgentAnswer::Serving) && !is_suspect(member)
        };

        let takes = |member: &Member, standing: Liveness| member.may_host && !member.gone && serves(member, standing);
        if !members.iter().any(|(_, member, standing)| takes(member, *standing)) {
            for (_, member, _) in members.iter_mut().filter(|(_, member, standing)| serves(member, *standing)) {
                member.take_back(now);
            }
        }
        let somewhere_to_go = members.iter().any(|(_, member, standing)| takes(member, *standing));
        for (name, member, standing) in members {
            let may_be_alive = matches!(standing, Liveness::Answers(_));
            if (member.gone && !may_be_alive) || (!member.gone && somewhere_to_go && is_suspect(member)) {
                suspects.insert(name.clone());
            }
            if !member.gone && somewhere_to_go && fails(member, standing) {
                member.declare(now);
            }
        }
    }
}

/// Whom one hears of the other nodes that do not count as gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Audience {
    Nobody,
    /// There is at most one.
    NothingToCompare,
    /// Somebody, last then.
    Some(Instant),
    /// None of them, but the next hop of the own node, last then.
    NextHop(Instant),
}

impl Audience {
    /// Was anybody heard after a node whose latest sign is this old? Those that answer take turns within one interval.
    fn since(self, alive: Instant, rules: &Rules) -> bool {
        match self {
            Self::Nobody => false,
            Self::NothingToCompare => true,
            Self::Some(latest) | Self::NextHop(latest) => latest >= alive + rules.interval * 3 / 2,
        }
    }
}

#[cfg(test)]
mod tests;
