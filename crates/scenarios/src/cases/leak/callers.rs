//! The callers, and what the API server has reported of each so far.

use std::time::SystemTime;

use super::judge::{self, CallerState, Judgement, judge};
use crate::prelude::*;
use egress_lab::capture::{CapturedPacket, Seen};
use egress_lab::topology::addresses::Dual;

/// What becomes of a caller in the course of the test, and hence what it may show.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum CallerKind {
    /// Selected from first to last by an object that always has nodes: its egress IP or nothing.
    Always,
    /// Never selected: its node's address only, and not a packet of it lost.
    Never,
    /// Its label changes.
    Toggled,
    /// Its namespace's label changes.
    Townie,
    /// Always selected; deleted and made again: its egress IP or nothing.
    Reborn,
    /// Its object is deleted and made again.
    Brief,
    /// No node can host its object's addresses, which the controller says: its node's address.
    Hopeless,
    /// The same, and its object wants a drop: nothing at all.
    Silent,
}

/// Name, node, namespace and fate.
const CALLERS: [(&str, usize, &str, CallerKind); 11] = [
    ("always1", 1, "red", CallerKind::Always),
    ("always2", 2, "red", CallerKind::Always),
    ("always3", 3, "red", CallerKind::Always),
    ("never1", 1, "red", CallerKind::Never),
    ("never2", 2, "red", CallerKind::Never),
    ("toggled1", 1, "red", CallerKind::Toggled),
    ("townie3", 3, "town", CallerKind::Townie),
    ("reborn2", 2, "red", CallerKind::Reborn),
    ("brief2", 2, "red", CallerKind::Brief),
    ("hopeless3", 3, "red", CallerKind::Hopeless),
    ("silent1", 1, "red", CallerKind::Silent),
];

pub(super) const SERVER_ADDRESSES: u8 = 11;

/// The pods, each with its group's label as its object selects it.
pub(super) fn pods() -> Vec<PodSpec> {
    let group = |kind| match kind {
        CallerKind::Always | CallerKind::Reborn => "always",
        CallerKind::Brief => "brief",
        CallerKind::Hopeless => "hopeless",
        CallerKind::Silent => "silent",
        CallerKind::Never | CallerKind::Toggled | CallerKind::Townie => "none",
    };
    CALLERS
        .iter()
        .map(|(name, node, namespace, kind)| pod(name, namespace, *node, &[("group", group(*kind))]))
        .collect()
}

/// One caller.
#[derive(Debug, Clone)]
pub(super) struct LeakCaller {
    pub(super) name: &'static str,
    pub(super) kind: CallerKind,
    pub(super) server_address: Dual,
    pub(super) node: Dual,
    pub(super) pod: Dual,
    pub(super) history: Vec<CallerState>,
}

impl LeakCaller {
    pub(super) fn all(lab: &Lab) -> Result<Vec<Self>> {
        let callers = CALLERS.iter().zip(0..).map(|((name, _, _, kind), number)| {
            let pod = lab.pod(name)?;
            let (node, pod) = (pod.node.address(), pod.addresses);
            Ok(Self { name, kind: *kind, server_address: plan::server_address(number), node, pod, history: Vec::new() })
        });
        callers.collect()
    }

    /// From now on these are right.
    pub(super) fn is_now(&mut self, asked: SystemTime, allowed: &[IpAddr]) {
        let allowed: BTreeSet<IpAddr> = allowed.iter().copied().collect();
        self.history.push(CallerState { asked, answered: SystemTime::now(), allowed });
    }

    /// From now on it is like any unselected pod. Of a pod that was selected before, the host's connection
    /// tracking does not know the old connections: what it takes for invalid (the end of a connection without its
    /// beginning) it does not masquerade, so those packets may bear the pod's own address.
    pub(super) fn is_not_selected(&mut self, asked: SystemTime) {
        let mut allowed = self.node.both().to_vec();
        if !matches!(self.kind, CallerKind::Never | CallerKind::Hopeless) && !self.history.is_empty() {
            allowed.extend(self.pod.both());
        }
        self.is_now(asked, &allowed);
    }

    /// How the world sees a new connection of it now.
    pub(super) fn seen_as(&self, to: IpAddr) -> Result<Observed> {
        let state = self.history.last().with_context(|| format!("{} has no history", self.name))?;
        let right = |address: &&IpAddr| address.is_ipv4() == to.is_ipv4() && !self.pod.is(**address);
        Ok(state.allowed.iter().find(right).copied().into())
    }

    /// Judges what was seen at its address.
    pub(super) fn judge(&self, seen: &Seen) -> Judgement {
        judge_as(&self.history, self.server_address, seen)
    }
}

/// Judges the packets to a address by anybody's history.
pub(super) fn judge_as(history: &[CallerState], server_address: Dual, seen: &Seen) -> Judgement {
    let mut judgement = Judgement::default();
    for destination in server_address.both() {
        // Once no object lists an address, it is any address to a node, which says "unreachable" to late answers: as
        // itself and of its own accord.
        let own = |packet: &CapturedPacket| packet.is_a_routers() && seen.class(packet.source) == AddressKind::Node;
        let packets = seen.captured.iter().filter(|packet| packet.destination == destination && !own(packet));
        judgement.add(judge(history, packets.copied()));
    }
    judgement
}

/// The rulings by fate, for people.
pub(super) fn table(judgements: &BTreeMap<CallerKind, Judgement>, seen: &Seen) -> String {
    let mut lines = format!(
        "{:<10} {:>8} {:>8} {:>8} {:>6} {:>6} {:>9} {:>6}\n",
        "callers", "packets", "egress", "node", "pod", "late", "longest", "wrong"
    );
    for (kind, judgement) in judgements {
        let of = |class: AddressKind| -> u64 {
            judgement.sources.iter().filter(|(source, _)| seen.class(**source) == class).map(|(_, count)| count).sum()
        };
        lines += &format!(
            "{:<10} {:>8} {:>8} {:>8} {:>6} {:>6} {:>6} ms {:>6}\n",
            format!("{kind:?}"),
            judgement.packets(),
            of(AddressKind::Egress),
            of(AddressKind::Node),
            of(AddressKind::Pod),
            judgement.late,
            judgement.longest.as_millis(),
            judgement.wrong.len()
        );
    }
    let routers = seen.captured.iter().filter(|packet| packet.is_a_routers()).count();
    lines + &format!("{routers} times a node said \"unreachable\" to late answers for an unused address\n")
}

/// What was wrong with a caller's packets, with the states around them: for who looks for the cause.
pub(super) fn show_wrong(caller: &LeakCaller, judgement: &Judgement) {
    const SHOWN: usize = 12;
    let clock = |at: SystemTime| at.duration_since(SystemTime::UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
    let Some(first) = judgement.wrong.first() else { return };
    println!("{}: {} wrong", caller.name, judgement.wrong.len());
    for state in caller.history.iter().filter(|state| state.asked + judge::LIMIT > first.at) {
        println!("  {:.3} to {:.3}: {:?}", clock(state.asked), clock(state.answered), state.allowed);
    }
    for packet in judgement.wrong.iter().take(SHOWN) {
        println!("  {:.3} {packet}", clock(packet.at));
    }
}
