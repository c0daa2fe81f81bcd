//! Ports in use towards the busiest destination, by a walk of `nat` in the background.
//!
//! A million NAT entries may have a million destinations, so there is no table of destinations. A count-min sketch of two rows
//! takes half a megabyte whatever their number. It never counts too few; of a million entries to different destinations it
//! counts some twenty too many, little beside the 64,512 ports of a destination. Its hash is seeded, so that no pod can provoke
//! collisions.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, RandomState};

use egress_common::abi::{Addr, BlockOwner, Direction, NatEntry, Origin, PortRange, Tuple};
use egress_common::decide::snat::EGRESS_PORTS;

use crate::maps::facts::{PortUse, Use};
use egress_core::model::state::EgressId;

const ROW: usize = 1 << 16;

const ICMP: u8 = 1;
const ICMP_V6: u8 = 58;
/// Protocols whose NAT entries use a port: TCP, UDP, SCTP, and ICMP with the query's identifier.
const WITH_PORTS: [u8; 7] = [ICMP, 6, 17, 33, ICMP_V6, 132, 136];

/// Counts one walk.
pub struct PortCounter {
    found: PortUse,
    /// The policies whose addresses here are the node's own.
    of_hosts: BTreeSet<u32>,
    /// Ports of a block; zero without blocks.
    block_size: u16,
    sketch: Sketch,
}

impl PortCounter {
    /// `node_ports`: the NAT ports of the node's own addresses; `of_hosts`: the policies that have such an address here;
    /// `block_size`: ports of a block, zero without blocks.
    pub fn new(node_ports: PortRange, of_hosts: BTreeSet<u32>, block_size: u16) -> Self {
        let node = Use { ports: size(node_ports), ..Use::default() };
        let found = PortUse { egress_ips: BTreeMap::new(), node };
        Self { found, of_hosts, block_size, sketch: Sketch::new(RandomState::new()) }
    }

    /// Each NAT entry has two keys; it is counted at the forward one.
    pub fn see(&mut self, key: &Tuple, mapping: &NatEntry) {
        if key.direction() != Direction::Egress {
            return;
        }
        let of = match mapping.origin() {
            Some(Origin::Stack) => &mut self.found.node,
            _ => of_egress_ip(&mut self.found, &self.of_hosts, self.block_size, mapping.egress_id),
        };
        of.mappings += 1;
        if !WITH_PORTS.contains(&key.protocol) {
            return;
        }
        // A query has its identifier in the field of the destination port.
        let dport = if matches!(key.protocol, ICMP | ICMP_V6) { 0 } else { key.dport() };
        let destination: (u32, Addr, u16, u8) = (mapping.egress_id, key.daddr, dport, key.protocol);
        of.busiest = of.busiest.max(self.sketch.raise(&destination));
    }

    /// A port block of a pod.
    pub fn see_block(&mut self, owner: &BlockOwner) {
        let Self { found, of_hosts, block_size, .. } = self;
        of_egress_ip(found, of_hosts, *block_size, owner.egress_id).blocks += 1;
    }

    pub fn done(self) -> PortUse {
        self.found
    }
}

fn of_egress_ip<'f>(found: &'f mut PortUse, of_hosts: &BTreeSet<u32>, block_size: u16, id: u32) -> &'f mut Use {
    let ports = if of_hosts.contains(&id) { found.node.ports } else { size(EGRESS_PORTS) };
    let most_blocks = ports.checked_div(block_size.into());
    found.egress_ips.entry(EgressId(id)).or_insert(Use { ports, most_blocks, ..Use::default() })
}

fn size(ports: PortRange) -> u32 {
    if ports.last == 0 { 0 } else { u32::from(ports.last.saturating_sub(ports.first)) + 1 }
}

struct Sketch {
    hash: RandomState,
    rows: [Vec<u32>; 2],
}

impl Sketch {
    fn new(hash: RandomState) -> Self {
        Self { hash, rows: [vec![0; ROW], vec![0; ROW]] }
    }

    /// Counts one more; returns an upper bound of the count.
    fn raise(&mut self, what: &impl std::hash::Hash) -> u32 {
        let hash = self.hash.hash_one(what);
        let at = |shift: u32| usize::from(u16::try_from((hash >> shift) & 0xffff).unwrap_or_default());
        let [first, second] = &mut self.rows;
        let (Some(first), Some(second)) = (first.get_mut(at(0)), second.get_mut(at(32))) else { return 0 };
        let count = (*first).min(*second).saturating_add(1);
        (*first, *second) = (count.max(*first), count.max(*second));
        count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapping(origin: Origin, id: u32) -> NatEntry {
        NatEntry::new(tuple(Direction::Ingress, 1, 2, 6), origin, Addr::UNSPECIFIED, id, 1)
    }

    fn tuple(direction: Direction, sport: u16, daddr: u32, protocol: u8) -> Tuple {
        let to = Addr::v4(daddr.to_be_bytes());
        Tuple::new(direction, Addr::v4([10, 244, 1, 10]), to, sport, 443, protocol)
    }

    fn count() -> PortCounter {
        PortCounter::new(PortRange { first: 61_000, last: 61_999 }, [5].into(), 64)
    }

    #[test]
    fn the_destination_with_most_counts_for_each_address() {
        let mut count = count();
        let (here, remote) = (mapping(Origin::Here, 7), mapping(Origin::Remote, 9));
        for sport in 0..100 {
            count.see(&tuple(Direction::Egress, sport, 1, 6), &here);
            // The other key of the same NAT entry.
            count.see(&tuple(Direction::Ingress, sport, 1, 6), &here);
        }
        for sport in 0..30 {
            count.see(&tuple(Direction::Egress, sport, 2, 6), &here);
            count.see(&tuple(Direction::Egress, sport, 1, 17), &here);
            count.see(&tuple(Direction::Egress, sport, 1, 6), &remote);
            // A NAT entry without a port.
            count.see(&tuple(Direction::Egress, 0, u32::from(sport), 47), &remote);
        }
        count.see(&tuple(Direction::Egress, 1, 1, 6), &mapping(Origin::Stack, 0));
        count.see(&tuple(Direction::Egress, 1, 1, 6), &mapping(Origin::Here, 5));
        for pod in [10, 11] {
            count.see_block(&BlockOwner::new(Addr::v4([10, 244, 1, pod]), Addr::UNSPECIFIED, 7, 64, 1));
        }
        let found = count.done();
        let ports = 64_512;
        let expected = [
            (EgressId(5), Use { mappings: 1, busiest: 1, ports: 1_000, blocks: 0, most_blocks: Some(15) }),
            (EgressId(7), Use { mappings: 160, busiest: 100, ports, blocks: 2, most_blocks: Some(1_008) }),
            (EgressId(9), Use { mappings: 60, busiest: 30, ports, blocks: 0, most_blocks: Some(1_008) }),
        ];
        assert_eq!(found.egress_ips, BTreeMap::from(expected));
        assert_eq!(found.node, Use { mappings: 1, busiest: 1, ports: 1_000, ..Use::default() });
        assert!((found.node.ratio() - 0.001).abs() < 1e-9);
    }

    #[test]
    fn identifiers_of_queries_are_ports_of_one_destination() {
        let mut count = count();
        for id in 1..=50 {
            let to = Addr::v4([198, 51, 100, 10]);
            let query = Tuple::new(Direction::Egress, Addr::v4([10, 244, 1, 10]), to, id, id, ICMP);
            count.see(&query, &mapping(Origin::Here, 7));
        }
        assert_eq!(count.done().egress_ips[&EgressId(7)].busiest, 50);
    }

    /// Never too low, and only slightly too high for very many destinations.
    #[test]
    fn a_million_destinations_use_bounded_memory_and_count_approximately() {
        let mut count = count();
        let here = mapping(Origin::Here, 7);
        for destination in 0..1_000_000 {
            count.see(&tuple(Direction::Egress, 1024, 0x0b00_0000 + destination, 6), &here);
        }
        let spread = count.found.egress_ips[&EgressId(7)].busiest;
        assert!(spread < 65, "{spread}: a thousandth of the range");
        for sport in 0..60_000 {
            count.see(&tuple(Direction::Egress, sport, 1, 6), &here);
        }
        let busy = count.done().egress_ips[&EgressId(7)];
        assert!((60_000..60_065).contains(&busy.busiest), "{busy:?}");
        assert_eq!(busy.mappings, 1_060_000);
    }
}
