//! The next hop of a packet that leaves by a further egress interface.

use super::slots;
use crate::abi::{Addr, RouteEntry, RouteKind, Tuple};

/// Another choice by the same hash: otherwise each of two addresses would always have the same one of two next hops.
const HOPS: u32 = 0x6e68_6f70;

/// The neighbour that the packets of this flow are sent to; `None` if the route refuses them.
#[inline(always)]
pub fn next_hop<'a>(entry: &'a RouteEntry, flow: &'a Tuple) -> Option<&'a Addr> {
    match entry.kind()? {
        RouteKind::OnLink => Some(&flow.daddr),
        RouteKind::Via => entry.hop(slots::pick(flow, HOPS, entry.count())),
        RouteKind::Refused => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::MAX_NEXT_HOPS;
    use crate::decide::cast::both;
    use crate::decide::memory_maps::addr;
    use crate::decide::packets::packet;

    #[test]
    fn a_flow_keeps_its_hop_and_flows_are_shared_out() {
        both(|cast, _| {
            let hops = [cast.node, cast.other_node, cast.world].map(addr);
            let entry = RouteEntry::via(&hops, 0);
            let flow = |port| packet(cast.pod, cast.world, port, 80).headers().tuple;
            let mut counts = [0; 3];
            for port in 1000..1300 {
                let hop = *next_hop(&entry, &flow(port)).expect("a hop");
                assert_eq!(next_hop(&entry, &flow(port)), Some(&hop));
                counts[hops.iter().position(|one| *one == hop).expect("one of them")] += 1;
            }
            assert!(counts.iter().all(|count| (60..140).contains(count)), "{counts:?}");
        });
    }

    /// Addresses and next hops are chosen by the same hash, and independently.
    #[test]
    fn each_address_of_an_object_uses_each_hop() {
        both(|cast, _| {
            let hops = [cast.node, cast.other_node].map(addr);
            let entry = RouteEntry::via(&hops, 0);
            let mut counts = [[0; 2]; 2];
            for port in 1000..1400 {
                let flow = packet(cast.pod, cast.world, port, 80).headers().tuple;
                let hop = next_hop(&entry, &flow).expect("a hop");
                counts[slots::pick(&flow, 0, 2) as usize][usize::from(*hop == hops[1])] += 1;
            }
            assert!(counts.iter().flatten().all(|count| (60..140).contains(count)), "{counts:?}");
        });
    }

    #[test]
    fn a_route_without_a_hop_sends_nothing() {
        both(|cast, _| {
            let flow = packet(cast.pod, cast.world, 4000, 80).headers().tuple;
            let on_link = RouteEntry::new(RouteKind::OnLink, 0);
            assert_eq!(next_hop(&on_link, &flow), Some(&flow.daddr));
            assert_eq!(next_hop(&RouteEntry::new(RouteKind::Refused, 0), &flow), None);
            assert_eq!(RouteEntry::via(&[addr(cast.node); MAX_NEXT_HOPS + 1], 0).count(), 8);
        });
    }
}
