//! Mappings: which port a flow has on its egress IP.
//!
//! The rules (RFC 4787, RFC 5382, RFC 6056): the pod's own port is kept when it is free and not a system port, otherwise
//! a free one of 1024..=65535 is found with full coverage of the range, per egress IP, destination address, destination
//! port and protocol. Two keys cannot be claimed at once, so:
//!
//! 1. The reverse key is claimed by insert-if-absent. If it is there with *our* forward tuple, it is adopted.
//! 2. The forward key likewise. Who loses it takes back the reverse key that it claimed itself and reads the winner's.
//!
//! So two CPUs that see the first two packets of one flow end with one mapping, whichever is first at either key.

use super::{Claim, Owner, Tables, slots};
use crate::abi::{Addr, Direction, Mapping, NatKey, PortRange, Tuple, Verdict};
use crate::wire::{Heads, PROTO_ICMP, PROTO_ICMPV6, tcp};

/// System ports stay out of NAT's range.
pub const EGRESS_PORTS: PortRange = PortRange { first: 1024, last: u16::MAX };

/// Walks a port range in an order that begins anywhere and misses nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortSearch {
    first: u16,
    /// Number of ports, not zero.
    pub span: u32,
    start: u32,
    stride: u32,
}

impl PortSearch {
    #[inline(always)]
    pub fn new(range: PortRange, random: u32) -> Self {
        let span = (range.last as u32).saturating_sub(range.first as u32) + 1;
        // A prime that does not divide the span visits every residue once.
        let mut stride = 1;
        for prime in [32_771u32, 16_411, 8_209, 4_099, 1_031] {
            if stride == 1 && !span.is_multiple_of(prime) {
                stride = prime;
            }
        }
        Self { first: range.first, span, start: random % span, stride }
    }

    /// The `index`-th port of the walk, for indices below `span`.
    #[inline(always)]
    pub const fn at(&self, index: u32) -> u16 {
        // start + index * stride stays below 2^16 + 2^16 * 2^15.1, far from 2^32 only for 16-bit spans: use 64 bits.
        let offset = (self.start as u64 + index as u64 * self.stride as u64) % self.span as u64;
        self.first + offset as u16
    }
}

/// Key of the answer to `forward` once its source is `address` and `port`.
#[inline(always)]
pub fn reverse_key(forward: &NatKey, address: &Addr, port: u16) -> NatKey {
    let tuple = forward.tuple();
    // The identifier of an echo message stands in both ports, so both change.
    let sport = if is_echo(&tuple) { port } else { tuple.dport() };
    NatKey::new(Direction::Ingress, Tuple::new(tuple.daddr, *address, sport, port, tuple.protocol))
}

#[inline(always)]
const fn is_echo(tuple: &Tuple) -> bool {
    matches!(tuple.protocol, PROTO_ICMP | PROTO_ICMPV6)
}

/// The mapping of a packet from a pod, made if it is not there.
#[inline(always)]
pub fn translate<T: Tables>(
    heads: &Heads,
    tables: &T,
    address: &Addr,
    owner: &Owner,
    range: PortRange,
) -> Result<Mapping, Verdict> {
    let forward = NatKey::new(Direction::Egress, heads.tuple);
    if let Some(mapping) = tables.nat_seen(&forward, heads.tcp_flags) {
        if mapping.other.tuple().daddr == *address && mapping.egress_id == owner.egress_id {
            return Ok(mapping);
        }
        // The flow had another address; its answers to that one find nothing from now on.
        tables.forget_nat(&mapping.other);
        tables.forget_nat(&forward);
    }
    create(tables, &forward, address, owner, range, heads.tcp_flags, slots::is_mid_stream(heads))
}

/// Claims both keys. Kept out of line in the programs, where its frame would crowd the hot path's.
#[inline(always)]
pub fn create<T: Tables>(
    tables: &T,
    forward: &NatKey,
    address: &Addr,
    owner: &Owner,
    range: PortRange,
    tcp_flags: u8,
    mid_stream: bool,
) -> Result<Mapping, Verdict> {
    let own_port = forward.tuple().sport();
    let mut claimed = None;
    if own_port >= range.first && own_port <= range.last {
        let reverse = reverse_key(forward, address, own_port);
        claimed = match tables.claim_nat(&reverse, forward, owner) {
            Claim::Claimed => Some((own_port, true)),
            Claim::Full => return Err(Verdict::MapFull),
            Claim::Taken => {
                tables.nat_seen(&reverse, 0).is_some_and(|there| there.other == *forward).then_some((own_port, false))
            }
        };
    }
    let (port, ours) = match claimed {
        Some(claimed) => claimed,
        // The answerer knows this flow by its own port only.
        None if mid_stream => return Err(Verdict::PortTaken),
        None => {
            let search = PortSearch::new(range, tables.random());
            let port = tables.claim_any_port(forward, address, owner, &search).ok_or(Verdict::PortsExhausted)?;
            (port, true)
        }
    };
    let reverse = reverse_key(forward, address, port);
    match tables.claim_nat(forward, &reverse, owner) {
        Claim::Claimed => {}
        Claim::Full => {
            if ours {
                tables.forget_nat(&reverse);
            }
            return Err(Verdict::MapFull);
        }
        Claim::Taken => {
            // The winner may have adopted the very key that we claimed: then it is not ours to take back.
            let winner = tables.nat_seen(forward, tcp_flags).ok_or(Verdict::ClaimLost)?;
            if ours && winner.other != reverse {
                tables.forget_nat(&reverse);
            }
            return if winner.other.tuple().daddr == *address { Ok(winner) } else { Err(Verdict::ClaimLost) };
        }
    }
    tables.nat_seen(forward, tcp_flags).ok_or(Verdict::ClaimLost)
}

/// A SYN begins a connection; everything else belongs to one.
#[inline(always)]
pub fn begins(tcp_flags: u8) -> bool {
    tcp_flags & (tcp::SYN | tcp::ACK) == tcp::SYN
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::abi::Origin;
    use crate::decide::world::{World, packet_v4};

    const EGRESS: Addr = Addr::v4([172, 18, 0, 100]);
    const OWNER: Owner = Owner { origin: Origin::Here, source_node: Addr::UNSPECIFIED, egress_id: 7 };

    #[test]
    fn the_walk_covers_every_port_once() {
        for (first, last) in [(1024u16, 65535u16), (61000, 65535), (1024, 1024), (1024, 1025), (30000, 62770)] {
            for random in [0, 1, 77_777, u32::MAX] {
                let search = PortSearch::new(PortRange { first, last }, random);
                let seen: HashSet<u16> = (0..search.span).map(|i| search.at(i)).collect();
                assert_eq!(seen.len() as u32, search.span);
                assert!(seen.iter().all(|p| (first..=last).contains(p)));
            }
        }
    }

    #[test]
    fn keeps_the_own_port_when_it_is_free() {
        let world = World::new();
        let one = packet_v4("10.244.1.10", "198.51.100.10", 4000, 80).heads();
        let mapping = translate(&one, &world, &EGRESS, &OWNER, EGRESS_PORTS).expect("a free port");
        assert_eq!(mapping.other.tuple().dport(), 4000);
        let two = packet_v4("10.244.1.11", "198.51.100.10", 4000, 80).heads();
        let other = translate(&two, &world, &EGRESS, &OWNER, EGRESS_PORTS).expect("a free port");
        assert_ne!(other.other.tuple().dport(), 4000);
        assert_eq!(translate(&one, &world, &EGRESS, &OWNER, EGRESS_PORTS).map(|m| m.other), Ok(mapping.other));
        assert_eq!(world.nat_len(), 4);
        let low = packet_v4("10.244.1.10", "198.51.100.10", 53, 53).heads();
        let low = translate(&low, &world, &EGRESS, &OWNER, EGRESS_PORTS).expect("a free port");
        assert!(low.other.tuple().dport() >= 1024);
    }

    #[test]
    fn refuses_only_when_no_port_is_free() {
        let world = World::new();
        let range = PortRange { first: 61000, last: 61009 };
        for pod in 0..10u8 {
            let heads = packet_v4(&std::format!("10.244.1.{}", 10 + pod), "198.51.100.10", 4000, 80).heads();
            assert!(translate(&heads, &world, &EGRESS, &OWNER, range).is_ok());
        }
        let heads = packet_v4("10.244.1.30", "198.51.100.10", 4000, 80).heads();
        assert_eq!(translate(&heads, &world, &EGRESS, &OWNER, range), Err(Verdict::PortsExhausted));
        let elsewhere = packet_v4("10.244.1.30", "198.51.100.11", 4000, 80).heads();
        assert!(translate(&elsewhere, &world, &EGRESS, &OWNER, range).is_ok(), "another destination is another range");
        assert_eq!(world.nat_len(), 22, "a refusal leaves no half mapping");
    }

    #[test]
    fn a_full_map_leaves_no_half_mapping() {
        let world = World::new();
        world.limit_nat(3);
        let one = packet_v4("10.244.1.10", "198.51.100.10", 4000, 80).heads();
        assert!(translate(&one, &world, &EGRESS, &OWNER, EGRESS_PORTS).is_ok());
        let two = packet_v4("10.244.1.11", "198.51.100.10", 4001, 80).heads();
        assert_eq!(translate(&two, &world, &EGRESS, &OWNER, EGRESS_PORTS), Err(Verdict::MapFull));
        assert_eq!(world.nat_len(), 2);
    }

    #[test]
    fn a_moved_flow_is_picked_up_with_its_own_port_or_not_at_all() {
        let world = World::new();
        let mut heads = packet_v4("10.244.1.10", "198.51.100.10", 4000, 80).tcp(tcp::ACK).heads();
        let mapping = translate(&heads, &world, &EGRESS, &OWNER, EGRESS_PORTS).expect("its own port is free");
        assert_eq!(mapping.other.tuple().dport(), 4000);
        heads.tuple = Tuple::new(Addr::v4([10, 244, 1, 11]), heads.tuple.daddr, 4000, 80, heads.tuple.protocol);
        assert_eq!(translate(&heads, &world, &EGRESS, &OWNER, EGRESS_PORTS), Err(Verdict::PortTaken));
    }

    #[test]
    fn another_address_makes_another_mapping() {
        let world = World::new();
        let heads = packet_v4("10.244.1.10", "198.51.100.10", 4000, 80).heads();
        translate(&heads, &world, &EGRESS, &OWNER, EGRESS_PORTS).expect("a free port");
        let other = Addr::v4([172, 18, 0, 101]);
        let mapping = translate(&heads, &world, &other, &OWNER, EGRESS_PORTS).expect("a free port");
        assert_eq!(mapping.other.tuple().daddr, other);
        assert_eq!(world.nat_len(), 2, "the old keys are gone together");
    }

    #[test]
    fn echo_changes_its_identifier_in_both_places() {
        let world = World::new();
        let one = packet_v4("10.244.1.10", "198.51.100.10", 0, 0).echo(500).heads();
        let mapping = translate(&one, &world, &EGRESS, &OWNER, EGRESS_PORTS).expect("a free id");
        let reverse = mapping.other.tuple();
        assert_eq!(reverse.sport(), reverse.dport());
        assert!(reverse.dport() >= 1024);
    }
}
