//! Which nodes emitted an egress IP and when none did, by what a capture saw. Pure.
//!
//! A node's packets without a pause of [`QUIET`] are a stretch. Two nodes emit the address where their stretches overlap: from
//! the new node's first packet and IN_FLIGHT on, or for the whole stretch, if another node's stretch encloses it.
//!
//! ```text
//! former  |----------------|            owner   |-----------------------|
//! new           |..========|------|     other           |====|
//! ```

use std::time::SystemTime;

use crate::prelude::*;
use egress_lab::capture::{ARP, CapturedPacket, IN_FLIGHT};

/// A node that is silent for so long has stopped: fifty times what lies between two packets of a pod.
const QUIET: Duration = Duration::from_millis(250);
/// One packet has no extent, and counts all the same.
const SHORTEST: Duration = Duration::from_millis(1);

/// Packets of one node without a pause.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stretch {
    pub(super) node: NodeNumber,
    pub(super) first: SystemTime,
    pub(super) last: SystemTime,
    pub(super) packets: usize,
}

/// Two nodes that emitted the address at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Double {
    /// The one that should not have, as far as the wire tells: the former node, or the one that comes between.
    pub(super) stray: NodeNumber,
    pub(super) other: NodeNumber,
    pub(super) from: SystemTime,
    pub(super) until: SystemTime,
    /// Of the stray in that time, and how many of them are claims by ARP.
    pub(super) packets: usize,
    pub(super) claims: usize,
}

impl Double {
    pub(super) fn lasts(&self) -> Duration {
        self.until.duration_since(self.from).unwrap_or_default().max(SHORTEST)
    }
}

/// The longest time in which no packet of a pod bore the address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Gap {
    pub(super) from: SystemTime,
    pub(super) lasts: Duration,
}

/// The stretches of an address in the order in which they begin.
pub(super) fn stretches(seen: &[CapturedPacket], address: IpAddr) -> Vec<Stretch> {
    let mut all: Vec<Stretch> = Vec::new();
    for CapturedPacket { at, node, .. } in seen.iter().filter(|one| one.source == address) {
        let present = all.iter_mut().rev().find(|stretch| stretch.node == *node);
        match present.filter(|stretch| at.duration_since(stretch.last).unwrap_or_default() < QUIET) {
            Some(stretch) => {
                stretch.last = stretch.last.max(*at);
                stretch.packets += 1;
            }
            None => all.push(Stretch { node: *node, first: *at, last: *at, packets: 1 }),
        }
    }
    all
}

/// Every pair of nodes that emitted the address at once.
pub(super) fn doubles(seen: &[CapturedPacket], address: IpAddr) -> Vec<Double> {
    let all = stretches(seen, address);
    let pairs = all.iter().enumerate().flat_map(|(place, before)| {
        let later = all[place + 1..].iter().take_while(|after| after.first <= before.last);
        later.filter(|after| after.node != before.node).map(move |after| (before, after))
    });
    let found = pairs.filter_map(|(before, after)| {
        let (stray, other, from, until) = if after.last <= before.last {
            (after.node, before.node, after.first, after.last)
        } else {
            (before.node, after.node, after.first + IN_FLIGHT, before.last)
        };
        let of_stray =
            |one: &&CapturedPacket| one.source == address && one.node == stray && (from..=until).contains(&one.at);
        let packets = seen.iter().filter(of_stray).count();
        let claims = seen.iter().filter(of_stray).filter(|one| one.protocol == ARP).count();
        (from <= until).then_some(Double { stray, other, from, until, packets, claims })
    });
    found.collect()
}

/// The longest gap of an address between two times, by what pods sent to these addresses.
pub(super) fn longest_gap(
    seen: &[CapturedPacket],
    address: IpAddr,
    server_addresses: &BTreeSet<IpAddr>,
    (begin, end): (SystemTime, SystemTime),
) -> Gap {
    let of_pods = seen.iter().filter(|one| one.source == address && server_addresses.contains(&one.destination));
    let times = of_pods.map(|one| one.at).filter(|at| (begin..end).contains(at));
    let (mut before, mut longest) = (begin, Gap { from: begin, lasts: Duration::ZERO });
    for at in times.chain([end]) {
        let lasts = at.duration_since(before).unwrap_or_default();
        if lasts > longest.lasts {
            longest = Gap { from: before, lasts };
        }
        before = before.max(at);
    }
    longest
}

/// The nodes that have emitted the address since a time.
pub(super) fn senders(seen: &[CapturedPacket], address: IpAddr, since: SystemTime) -> BTreeSet<NodeNumber> {
    let late = seen.iter().rev().take_while(|one| one.at >= since);
    late.filter(|one| one.source == address).map(|one| one.node).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use egress_lab::traffic::packet::UDP;

    const EGRESS: [u8; 4] = [172, 18, 0, 110];
    const SERVER_ADDRESS: [u8; 4] = [198, 51, 100, 100];

    fn at(millis: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_millis(millis)
    }

    fn packet(millis: u64, node: usize) -> CapturedPacket {
        CapturedPacket {
            at: at(millis),
            node: NodeNumber::new(node).expect("a node"),
            source: EGRESS.into(),
            destination: SERVER_ADDRESS.into(),
            protocol: UDP,
            ports: (1, 2),
            segment: None,
        }
    }

    /// Packets of a node, one each ten milliseconds.
    fn emits(node: usize, from: u64, until: u64) -> impl Iterator<Item = CapturedPacket> {
        (from..=until).step_by(10).map(move |millis| packet(millis, node))
    }

    fn in_order(captured: impl Iterator<Item = CapturedPacket>) -> Vec<CapturedPacket> {
        let mut all: Vec<CapturedPacket> = captured.collect();
        all.sort_by_key(|one| one.at);
        all
    }

    fn found(seen: &[CapturedPacket]) -> Vec<(String, u128, usize)> {
        let all = doubles(seen, EGRESS.into());
        all.iter().map(|one| (one.stray.name(), one.lasts().as_millis(), one.packets)).collect()
    }

    #[test]
    fn an_address_that_moves_has_one_emitter() {
        let seen = in_order(emits(1, 0, 1000).chain(emits(2, 2000, 3000)).chain(emits(1, 4000, 5000)));
        assert_eq!(found(&seen), []);
        assert_eq!(stretches(&seen, EGRESS.into()).len(), 3);
    }

    #[test]
    fn what_was_in_flight_is_not_counted() {
        assert_eq!(found(&in_order(emits(1, 0, 1015).chain(emits(2, 1000, 2000)))), []);
        let seen = in_order(emits(1, 0, 1060).chain(emits(2, 1000, 2000)));
        assert_eq!(found(&seen), [("node1".to_owned(), 40, 5)]);
    }

    #[test]
    fn nodes_that_take_turns_emit_it_at_once() {
        let seen = in_order(emits(1, 0, 3000).chain(emits(2, 1005, 2005)));
        assert_eq!(found(&seen), [("node2".to_owned(), 1000, 101)]);
        let seen = in_order(emits(1, 0, 2000).chain(emits(2, 1005, 3005)));
        assert_eq!(found(&seen), [("node1".to_owned(), 975, 98)]);
    }

    #[test]
    fn a_late_packet_counts_and_not_the_silence_before_it() {
        let seen = in_order(emits(1, 0, 1000).chain(emits(2, 1500, 5000)).chain([packet(4002, 1)]));
        assert_eq!(found(&seen), [("node1".to_owned(), 1, 1)]);
        let seen = in_order(emits(1, 0, 1000).chain(emits(2, 1500, 5000)).chain(emits(1, 4002, 4052)));
        assert_eq!(found(&seen), [("node1".to_owned(), 50, 6)]);
    }

    #[test]
    fn claims_count_and_are_distinguished() {
        let claim = CapturedPacket { protocol: ARP, ..packet(2005, 1) };
        let seen = in_order(emits(1, 0, 1000).chain(emits(2, 1500, 3000)).chain([claim]));
        let all = doubles(&seen, EGRESS.into());
        assert_eq!(all.iter().map(|one| (one.packets, one.claims)).collect::<Vec<_>>(), [(1, 1)]);
    }

    #[test]
    fn three_nodes_are_pairs() {
        let seen = in_order(emits(1, 0, 3000).chain(emits(2, 1000, 2000)).chain(emits(3, 1500, 1800)));
        assert_eq!(found(&seen).len(), 3);
    }

    #[test]
    fn a_gap_begins_with_the_period_and_ends_with_it() {
        let server_addresses: BTreeSet<IpAddr> = [SERVER_ADDRESS.into()].into();
        let gap =
            |seen: &[CapturedPacket], end| longest_gap(seen, EGRESS.into(), &server_addresses, (at(1000), at(end)));
        let seen = in_order(emits(1, 0, 2000).chain(emits(2, 3500, 5000)));
        assert_eq!(gap(&seen, 5005), Gap { from: at(2000), lasts: Duration::from_millis(1500) });
        assert_eq!(gap(&seen, 9000), Gap { from: at(5000), lasts: Duration::from_secs(4) });
        assert_eq!(gap(&[], 9000), Gap { from: at(1000), lasts: Duration::from_secs(8) });
        // Answers to ARP are no pod's packets.
        let claims: Vec<CapturedPacket> =
            seen.iter().map(|one| CapturedPacket { protocol: ARP, destination: EGRESS.into(), ..*one }).collect();
        assert_eq!(gap(&claims, 9000).lasts, Duration::from_secs(8));
    }

    #[test]
    fn emitters_are_those_of_late() {
        let seen = in_order(emits(1, 0, 1000).chain(emits(2, 1500, 3000)));
        let names =
            |since| senders(&seen, EGRESS.into(), at(since)).into_iter().map(NodeNumber::name).collect::<Vec<_>>();
        assert_eq!(names(2000), ["node2"]);
        assert_eq!(names(500), ["node1", "node2"]);
    }
}
