//! Checks of each packet that leaves a node. Pure: captured packets in, violations out.
//!
//! - A packet to a pod's address bears an address that is right for that pod.
//! - No address is emitted from two nodes at once. An address may go from one node to another, and then the former is
//!   silent: nothing moves back by itself, so one that speaks again within [`AT_ONCE`] has never stopped.

use std::time::SystemTime;

use crate::prelude::*;
use egress_lab::capture::{ARP, CapturedPacket, IN_FLIGHT};

/// No address comes back to a node sooner by right: rounds are longer than this.
const AT_ONCE: Duration = Duration::from_secs(4);

/// One thing that must not be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Violation {
    /// What it is, without figures, so that each kind is reported once.
    pub(crate) kind: String,
    pub(crate) message: String,
    pub(crate) at: SystemTime,
}

/// All that has been seen, as far as it matters for what comes.
#[derive(Debug, Default)]
pub(crate) struct Wire {
    /// What may be seen at each address.
    right: BTreeMap<IpAddr, BTreeSet<IpAddr>>,
    senders: BTreeMap<IpAddr, Vec<Emitter>>,
    /// Addresses of hosts: what a host sends by itself is no pod's.
    hosts: BTreeSet<IpAddr>,
}

/// A node that emitted an address: since when without another in between, and until when.
#[derive(Debug, Clone, Copy)]
struct Emitter {
    node: NodeNumber,
    since: SystemTime,
    last: SystemTime,
}

impl Wire {
    pub(crate) fn new(hosts: BTreeSet<IpAddr>) -> Self {
        Self { hosts, ..Self::default() }
    }

    /// From now on these addresses are right at a address.
    pub(crate) fn set_right(&mut self, server_address: IpAddr, right: BTreeSet<IpAddr>) {
        self.right.insert(server_address, right);
    }

    /// Judges what was seen; `egress` says which sources are egress IPs.
    pub(crate) fn judge(&mut self, captured: &[CapturedPacket], egress: impl Fn(IpAddr) -> bool) -> Vec<Violation> {
        let mut found = Vec::new();
        for packet in captured {
            found.extend(self.wrong_source(packet));
            if egress(packet.source) {
                found.extend(self.second_emitter(packet));
            }
        }
        found
    }

    /// Whether a packet to a address has a source that is not right there.
    pub(crate) fn wrong_source(&self, packet: &CapturedPacket) -> Option<Violation> {
        let right = self.right.get(&packet.destination)?;
        let own_words = packet.is_a_routers() && self.hosts.contains(&packet.source);
        if packet.protocol == ARP || own_words || right.contains(&packet.source) {
            return None;
        }
        let CapturedPacket { node, source, destination, protocol, ports, .. } = packet;
        let message = format!(
            "{} sent a packet with the wrong source {source} to {destination}, protocol {protocol}, ports {ports:?}",
            node.name()
        );
        Some(Violation { kind: format!("wrong source {source} at {destination}"), message, at: packet.at })
    }

    fn second_emitter(&mut self, packet: &CapturedPacket) -> Option<Violation> {
        let CapturedPacket { at, node, source, .. } = *packet;
        let senders = self.senders.entry(source).or_default();
        if let Some(current) = senders.last_mut().filter(|current| current.node == node) {
            current.last = current.last.max(at);
            return None;
        }
        let current = senders.last().copied();
        let before = senders.iter().rev().find(|before| before.node == node).copied();
        if let (Some(current), Some(before)) = (current, before) {
            let late = at.duration_since(current.since).unwrap_or_default();
            let silent = at.duration_since(before.last).unwrap_or_default();
            if late <= IN_FLIGHT {
                return None;
            }
            if silent < AT_ONCE {
                let how = if packet.protocol == ARP { "claimed" } else { "sent from" };
                let message = format!(
                    "{} {how} {source} {} ms after {} had begun to (to {}, protocol {}, {} ms after its last)",
                    node.name(),
                    late.as_millis(),
                    current.node.name(),
                    packet.destination,
                    packet.protocol,
                    silent.as_millis()
                );
                let kind = format!("{source} from {} and {}", current.node.name(), node.name());
                return Some(Violation { kind, message, at });
            }
        }
        senders.push(Emitter { node, since: at, last: at });
        // The present one and its forerunner are all that is asked for; a node in between counts too.
        let surplus = senders.len().saturating_sub(4);
        senders.drain(..surplus);
        None
    }

    /// Who emits an address since `since`.
    pub(crate) fn senders(&self, address: IpAddr, since: SystemTime) -> BTreeSet<NodeNumber> {
        let all = self.senders.get(&address).map(Vec::as_slice).unwrap_or_default();
        all.iter().filter(|one| one.last >= since).map(|one| one.node).collect()
    }

    /// Who has emitted an address, and how long ago for the last time, for people.
    pub(crate) fn history(&self, address: IpAddr, now: SystemTime) -> String {
        let all = self.senders.get(&address).map(Vec::as_slice).unwrap_or_default();
        let listed = all.iter().map(|one| {
            let ago = now.duration_since(one.last).unwrap_or_default();
            format!("{} {} ms ago", one.node.name(), ago.as_millis())
        });
        listed.collect::<Vec<_>>().join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use egress_lab::traffic::packet::UDP;

    const EGRESS: &str = "172.18.0.110";
    const SERVER_ADDRESS: &str = "198.51.100.100";

    fn address(text: &str) -> IpAddr {
        text.parse().expect("a literal")
    }

    fn packet(millis: u64, node: usize, source: &str) -> CapturedPacket {
        CapturedPacket {
            at: SystemTime::UNIX_EPOCH + Duration::from_millis(millis),
            node: NodeNumber::new(node).expect("a node"),
            source: address(source),
            destination: address(SERVER_ADDRESS),
            protocol: UDP,
            ports: (1, 2),
            segment: None,
        }
    }

    fn violations(seen: &[(u64, usize, &str)]) -> usize {
        let mut wire = Wire::new(BTreeSet::new());
        wire.set_right(address(SERVER_ADDRESS), [address(EGRESS)].into());
        let captured: Vec<CapturedPacket> = seen.iter().map(|(at, node, source)| packet(*at, *node, source)).collect();
        wire.judge(&captured, |source| source == address(EGRESS)).len()
    }

    #[test]
    fn a_source_that_is_not_right_is_a_violation() {
        assert_eq!(violations(&[(0, 1, EGRESS), (1, 1, "172.18.0.2"), (2, 1, "10.244.1.10")]), 2);
    }

    #[test]
    fn an_address_may_move_and_come_back_later() {
        assert_eq!(violations(&[(0, 1, EGRESS), (900, 2, EGRESS), (1000, 2, EGRESS), (9000, 1, EGRESS)]), 0);
    }

    #[test]
    fn two_nodes_at_once_are_a_violation() {
        let seen = [(0, 1, EGRESS), (100, 2, EGRESS), (150, 1, EGRESS), (160, 2, EGRESS), (170, 1, EGRESS)];
        assert_eq!(violations(&seen), 2);
        // What was in flight is none.
        assert_eq!(violations(&[(0, 1, EGRESS), (100, 2, EGRESS), (110, 1, EGRESS), (120, 2, EGRESS)]), 0);
    }

    #[test]
    fn who_speaks_on_after_a_long_silence_of_the_other_is_found_by_the_other() {
        let seen = [(0, 1, EGRESS), (5000, 2, EGRESS), (9450, 2, EGRESS), (9500, 1, EGRESS), (9600, 2, EGRESS)];
        assert_eq!(violations(&seen), 1);
    }

    #[test]
    fn emitters_are_those_of_late() {
        let mut wire = Wire::new(BTreeSet::new());
        wire.judge(&[packet(0, 1, EGRESS), packet(900, 2, EGRESS)], |_| true);
        let since = SystemTime::UNIX_EPOCH + Duration::from_millis(500);
        let names: Vec<String> = wire.senders(address(EGRESS), since).into_iter().map(NodeNumber::name).collect();
        assert_eq!(names, ["node2"]);
    }
}
