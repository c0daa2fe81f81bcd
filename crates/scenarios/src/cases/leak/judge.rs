//! Who may have which source address, and when. Pure: histories and captured packets in, a ruling out.
//!
//! The destination names the caller, since each caller has its own. Its history is a list of states by the API server, each
//! with the addresses that are right in it. A packet is right if its source is right in the state of its time, or in an earlier
//! state whose end its node may not know yet: for [`LIMIT`] at most, and only until a newer state has shown on the wire (with
//! what may still be [`IN_FLIGHT`] then). So a change that has taken effect may never be reverted.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use egress_lab::capture::CapturedPacket;

/// What a change may take: a new leader, a started agent, a busy machine.
pub(super) const LIMIT: Duration = Duration::from_secs(12);
/// What may still be in flight between nodes after the source node has applied a change.
pub(super) const IN_FLIGHT: Duration = Duration::from_millis(100);

/// One state of a caller.
#[derive(Debug, Clone)]
pub(super) struct CallerState {
    /// When the API server was asked for it: no node can know it before.
    pub(super) asked: SystemTime,
    /// When the API server had answered: from then on the state before is over.
    pub(super) answered: SystemTime,
    pub(super) allowed: BTreeSet<IpAddr>,
}

/// What the packets of one caller were like.
#[derive(Debug, Default)]
pub(super) struct Judgement {
    pub(super) sources: BTreeMap<IpAddr, u64>,
    /// Right in a state that was over, and the longest time by which.
    pub(super) late: u64,
    pub(super) longest: Duration,
    pub(super) wrong: Vec<CapturedPacket>,
}

impl Judgement {
    pub(super) fn packets(&self) -> u64 {
        self.sources.values().sum()
    }

    pub(super) fn add(&mut self, other: Self) {
        for (source, count) in other.sources {
            *self.sources.entry(source).or_default() += count;
        }
        self.late += other.late;
        self.longest = self.longest.max(other.longest);
        self.wrong.extend(other.wrong);
    }
}

/// Judges the packets to one destination, in their order.
pub(super) fn judge(history: &[CallerState], captured: impl Iterator<Item = CapturedPacket>) -> Judgement {
    let ends = history.iter().skip(1).map(|next| Some(next.answered)).chain([None]);
    let mut open: Vec<OpenState<'_>> = history
        .iter()
        .zip(ends)
        .map(|(state, end)| OpenState { state, end, until: end.map(|end| end + LIMIT) })
        .collect();
    let mut judgement = Judgement::default();
    for packet in captured {
        *judgement.sources.entry(packet.source).or_default() += 1;
        // The newest state that fits: what it shows ends those before it that do not allow it.
        let fits = |open: &OpenState<'_>| open.holds(packet.at) && open.state.allowed.contains(&packet.source);
        let Some(place) = open.iter().rposition(fits) else {
            judgement.wrong.push(packet);
            continue;
        };
        if let Some(late) = open[place].end.and_then(|end| packet.at.duration_since(end).ok()) {
            judgement.late += 1;
            judgement.longest = judgement.longest.max(late);
        }
        if open[..place].iter().any(|open| open.holds(packet.at) && open.state.allowed.contains(&packet.source)) {
            // An older state explains it as well: nothing new has shown.
            continue;
        }
        for older in &mut open[..place] {
            let over = packet.at + IN_FLIGHT;
            older.until = Some(older.until.map_or(over, |until| until.min(over)));
        }
    }
    judgement
}

/// A state, and how long it explains packets.
struct OpenState<'a> {
    state: &'a CallerState,
    /// When the next state was known to hold.
    end: Option<SystemTime>,
    until: Option<SystemTime>,
}

impl OpenState<'_> {
    fn holds(&self, at: SystemTime) -> bool {
        self.state.asked <= at && self.until.is_none_or(|until| at <= until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use egress_lab::topology::addresses::NodeNumber;

    const NODE: &str = "172.18.0.2";
    const EGRESS: &str = "172.18.0.110";
    const OTHER: &str = "172.18.0.111";

    fn at(millis: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_millis(millis)
    }

    fn state(millis: u64, allowed: &[&str]) -> CallerState {
        let allowed = allowed.iter().map(|text| text.parse().expect("address")).collect();
        CallerState { asked: at(millis), answered: at(millis + 10), allowed }
    }

    fn wrong(history: &[CallerState], packets: &[(u64, &str)]) -> Vec<usize> {
        let packet = |(millis, source): &(u64, &str)| CapturedPacket {
            at: at(*millis),
            node: NodeNumber::new(1).expect("one is a node"),
            source: source.parse().expect("address"),
            destination: "198.51.100.100".parse().expect("address"),
            protocol: 17,
            ports: (1, 2),
            segment: None,
        };
        let captured: Vec<CapturedPacket> = packets.iter().map(packet).collect();
        let judgement = judge(history, captured.iter().copied());
        captured.iter().enumerate().filter(|(_, s)| judgement.wrong.contains(s)).map(|(place, _)| place).collect()
    }

    #[test]
    fn a_selected_caller_never_shows_its_node_or_pod() {
        let history = [state(0, &[EGRESS]), state(1000, &[OTHER])];
        let packets = [(500, EGRESS), (900, NODE), (1005, NODE), (1100, EGRESS), (1200, OTHER), (1201, "10.244.1.10")];
        assert_eq!(wrong(&history, &packets), [1, 2, 5]);
    }

    #[test]
    fn a_caller_that_is_not_selected_never_shows_an_egress_ip() {
        assert_eq!(wrong(&[state(0, &[NODE])], &[(1, NODE), (2, EGRESS)]), [1]);
    }

    #[test]
    fn a_change_may_take_time_but_not_be_taken_back() {
        let history = [state(0, &[NODE]), state(1000, &[EGRESS])];
        let packets = [(999, EGRESS), (1500, NODE), (2000, EGRESS), (2050, NODE), (2200, NODE), (2300, EGRESS)];
        assert_eq!(wrong(&history, &packets), [0, 4]);
        assert_eq!(wrong(&history, &[(14_000, NODE)]), [0]);
    }

    #[test]
    fn a_state_that_comes_back_is_a_new_state() {
        let history = [state(0, &[NODE]), state(1000, &[EGRESS]), state(2000, &[NODE]), state(3000, &[EGRESS])];
        let packets = [(1100, EGRESS), (1300, NODE), (2100, NODE), (2250, EGRESS), (3100, EGRESS)];
        assert_eq!(wrong(&history, &packets), [1, 3]);
    }
}
