//! Next hops of further egress interfaces: the maps `routes` and `neighbours`.

use egress_common::abi::{Addr, Family, NeighbourEntry, NeighbourKey, RouteEntry, RouteKind, Verdict};

use crate::cast::{FamilyAddresses, addr};
use crate::frames::{FrameSpec, packet};
use crate::stage::{FROM_POD, FURTHER, OWNED_MAC, Stage, UPLINK, both};

const GATEWAYS: [[u8; 6]; 2] = [[2, 0, 0, 0, 9, 1], [2, 0, 0, 0, 9, 2]];

/// Two gateways of this family.
fn gateways(family: Family) -> [Addr; 2] {
    match family {
        Family::V4 => ["10.10.10.1", "10.10.10.2"].map(addr),
        Family::V6 => ["fe80::1", "fe80::2"].map(addr),
    }
}

impl Stage {
    pub(crate) fn neighbour(&mut self, ifindex: u32, address: Addr, mac: [u8; 6]) {
        let key = NeighbourKey { ifindex, address };
        self.neighbours.insert(key, NeighbourEntry::new(&key, mac), 0).expect("a neighbour");
    }

    /// A prefix of this length, or of the whole address, that contains it.
    pub(crate) fn put_route(&mut self, ifindex: u32, to: &str, length: Option<u32>, entry: RouteEntry) {
        self.routes.insert(&Self::route_key(ifindex, to, length), entry, 0).expect("a route");
    }

    /// The link address that the second packet of a flow is sent to.
    fn sent_to(&mut self, packet: &FrameSpec) -> [u8; 6] {
        self.run_frame(&FROM_POD, &packet.frame(), Verdict::SnatHere);
        let frame = self.run_frame(&FROM_POD, &packet.frame(), Verdict::SnatHere).frame;
        assert_eq!(frame[6..12], OWNED_MAC);
        frame[..6].try_into().expect("a link address")
    }

    fn further(&mut self, cast: &FamilyAddresses) {
        self.own_on(FURTHER, cast.here, cast.egress);
        for (gateway, mac) in gateways(cast.family).into_iter().zip(GATEWAYS) {
            self.neighbour(FURTHER, gateway, mac);
        }
    }
}

fn flow(cast: &FamilyAddresses, port: u16) -> FrameSpec {
    packet(cast.pod, cast.world, port, 80)
}

#[test]
fn the_longest_prefix_of_the_interface_alone_decides() {
    both(|stage, cast| {
        stage.further(cast);
        // The kernel has a route by the uplink.
        stage.drops(&FROM_POD, &flow(cast, 4000), Verdict::NoRoute);
        let [one, two] = gateways(cast.family);
        stage.put_route(UPLINK, cast.world, None, RouteEntry::via(&[one], 0));
        stage.drops(&FROM_POD, &flow(cast, 4001), Verdict::NoRoute);
        stage.put_route(FURTHER, cast.world, Some(0), RouteEntry::via(&[one], 0));
        assert_eq!(stage.sent_to(&flow(cast, 4002)), GATEWAYS[0]);
        stage.put_route(FURTHER, cast.world, Some(24), RouteEntry::via(&[two], 0));
        assert_eq!(stage.sent_to(&flow(cast, 4003)), GATEWAYS[1]);
        stage.put_route(FURTHER, cast.world, None, RouteEntry::new(RouteKind::Refused, 0));
        stage.drops(&FROM_POD, &flow(cast, 4004), Verdict::NoRoute);
        // A destination on the link has no gateway.
        stage.put_route(FURTHER, cast.world, None, RouteEntry::new(RouteKind::OnLink, 0));
        stage.neighbour(FURTHER, addr(cast.world), [2, 0, 0, 0, 9, 9]);
        assert_eq!(stage.sent_to(&flow(cast, 4005)), [2, 0, 0, 0, 9, 9]);
    });
}

#[test]
fn flows_are_shared_out_among_the_next_hops_and_keep_theirs() {
    both(|stage, cast| {
        stage.further(cast);
        stage.put_route(FURTHER, cast.world, Some(0), RouteEntry::via(&gateways(cast.family), 0));
        let mut counts = [0; 2];
        for port in 4000..4040 {
            let first = stage.sent_to(&flow(cast, port));
            // Looked up again.
            stage.configure(|config| config.route_generation += 1);
            assert_eq!(stage.sent_to(&flow(cast, port)), first);
            counts[GATEWAYS.iter().position(|mac| *mac == first).expect("one of them")] += 1;
        }
        assert!(counts.iter().all(|count| *count >= 8), "{counts:?}");
    });
}

/// The kernel resolves it for each packet, which prog runs do not show.
#[test]
fn an_unknown_neighbour_is_not_cached() {
    both(|stage, cast| {
        stage.further(cast);
        let [one, two] = gateways(cast.family);
        stage.put_route(FURTHER, cast.world, Some(0), RouteEntry::via(&[one], 0));
        stage.neighbours.remove(&NeighbourKey { ifindex: FURTHER, address: one }).expect("it is there");
        let sent = flow(cast, 4000);
        for _ in 0..3 {
            stage.redirects(&FROM_POD, &sent, Verdict::SnatHere, &sent.clone().snat(cast.egress, 4000).hop());
        }
        // An entry of another key, as a program may find it while an element is used again.
        let (key, other) =
            (NeighbourKey { ifindex: FURTHER, address: one }, NeighbourKey { ifindex: FURTHER, address: two });
        stage.neighbours.insert(key, NeighbourEntry::new(&other, GATEWAYS[1]), 0).expect("a neighbour");
        for _ in 0..2 {
            stage.redirects(&FROM_POD, &sent, Verdict::SnatHere, &sent.clone().snat(cast.egress, 4000).hop());
        }
        stage.neighbour(FURTHER, one, GATEWAYS[0]);
        assert_eq!(stage.sent_to(&sent), GATEWAYS[0]);
    });
}

#[test]
fn the_mtu_of_a_route_is_the_longest_packet() {
    both(|stage, cast| {
        stage.further(cast);
        let via = |mtu| RouteEntry::via(&[gateways(cast.family)[0]], mtu);
        let large = |port| flow(cast, port).with(|packet| packet.data = 1300);
        stage.put_route(FURTHER, cast.world, Some(0), via(0));
        stage.sent_to(&large(4000));
        stage.put_route(FURTHER, cast.world, Some(0), via(9000));
        stage.sent_to(&large(4001));
        stage.put_route(FURTHER, cast.world, Some(0), via(1300));
        stage.run_frame(&FROM_POD, &large(4002).frame(), Verdict::MtuAnswered);
        stage.refill_answers();
    });
}
