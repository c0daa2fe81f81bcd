//! Pods whose policy depends on the destination.

use super::super::*;
use crate::abi::{ClassPolicy, PodEntry, WhenEmpty};
use crate::decide::cast::{Cast, ID, OTHER_NODE, both};
use crate::decide::from_overlay::{self, FromOverlay, Outer};
use crate::decide::memory_maps::{MemoryMaps, addr};
use crate::decide::packets::{FrameFields, packet};
use crate::decide::to_pod;

const CLASS: u32 = 3;
/// Another policy of the class, whose address the other node has.
const OTHER_ID: u32 = ID + 1;

/// Within [`Cast::world`]'s network: the whole network has [`OTHER_ID`], this host [`ID`], and this one none. Destinations
/// outside of the network have no policy either.
struct DestinationHosts {
    own: &'static str,
    other: &'static str,
    none: &'static str,
    outside: &'static str,
}

fn hosts(cast: &Cast) -> DestinationHosts {
    match cast.world.contains(':') {
        true => DestinationHosts {
            own: cast.world,
            other: "2001:db8::20",
            none: "2001:db8::30",
            outside: "2001:db8:ffff::1",
        },
        false => {
            DestinationHosts { own: cast.world, other: "198.51.100.20", none: "198.51.100.30", outside: "192.0.2.1" }
        }
    }
}

fn classed(body: impl Fn(&Cast, &MemoryMaps, &DestinationHosts)) {
    both(|cast, maps| {
        let hosts = hosts(cast);
        let (all, network, host) = if cast.world.contains(':') { ("::", 48, 128) } else { ("0.0.0.0", 24, 32) };
        maps.put_class(CLASS, all, 0, ClassPolicy::NONE);
        maps.put_class(CLASS, cast.world, network, ClassPolicy::new(OTHER_ID));
        maps.put_class(CLASS, hosts.own, host, ClassPolicy::new(ID));
        maps.put_class(CLASS, hosts.none, host, ClassPolicy::NONE);
        // Of other pods.
        maps.put_class(CLASS + 1, hosts.outside, host, ClassPolicy::new(ID));
        maps.add_pod(cast.pod, PodEntry::by_destination(CLASS, 0));
        maps.set_policy(OTHER_ID, WhenEmpty::Drop, &[away(cast)]);
        body(cast, maps, &hosts);
    });
}

fn away(cast: &Cast) -> PolicySlot {
    PolicySlot::remote(addr(cast.foreign_egress), addr(OTHER_NODE))
}

fn asked<'t>(maps: &'t MemoryMaps, packet: &FrameFields) -> FromPod<'t> {
    decide(&mut packet.headers(), &Quote::NONE, maps, &maps.config.get())
}

#[test]
fn the_destination_decides_on_the_policy() {
    classed(|cast, maps, hosts| {
        let to = |host| packet(cast.pod, host, 4000, 80);
        let here = PolicySlot::here(addr(cast.egress));
        // Also by the cached decision of the second packet.
        for _ in 0..2 {
            assert_eq!(asked(maps, &to(hosts.own)), FromPod::Send { egress_id: ID, slot: &here });
            assert_eq!(asked(maps, &to(hosts.other)), FromPod::Send { egress_id: OTHER_ID, slot: &away(cast) });
            for none in [hosts.none, hosts.outside] {
                assert_eq!(asked(maps, &to(none)), FromPod::Done(Verdict::NotSelected), "{none}");
            }
        }
        assert_eq!(maps.flows_len(), 2);
    });
}

/// What concerns selected pods only concerns a pod of a class where its policy applies.
#[test]
fn nodes_and_egress_ips_are_judged_by_the_policy_too() {
    classed(|cast, maps, _| {
        for to in [cast.other_node, cast.foreign_egress] {
            assert_eq!(asked(maps, &packet(cast.pod, to, 4000, 80)), FromPod::Done(Verdict::NotSelected), "{to}");
        }
        let all = if cast.world.contains(':') { "::" } else { "0.0.0.0" };
        maps.classes.borrow_mut().clear();
        maps.put_class(CLASS, all, 0, ClassPolicy::new(ID));
        assert_eq!(asked(maps, &packet(cast.pod, cast.other_node, 4000, 80)), FromPod::Mark);
        assert_eq!(asked(maps, &packet(cast.pod, cast.foreign_egress, 4000, 80)), FromPod::Hairpin);
        assert_eq!(asked(maps, &packet(cast.pod, cast.service, 4000, 80)), FromPod::Done(Verdict::ToCluster));
    });
}

#[test]
fn a_missing_class_is_a_drop() {
    classed(|cast, maps, hosts| {
        maps.classes.borrow_mut().clear();
        for to in [hosts.own, hosts.other, hosts.none, hosts.outside] {
            assert_eq!(asked(maps, &packet(cast.pod, to, 4000, 80)), FromPod::Done(Verdict::NoPolicy), "{to}");
        }
        assert_eq!(asked(maps, &packet(cast.pod, cast.service, 4000, 80)), FromPod::Done(Verdict::ToCluster));
    });
}

/// A connection whose destination another policy, or none, has by now keeps no address, and gets no other one.
#[test]
fn a_connection_to_a_destination_that_changes_its_policy_is_reset() {
    classed(|cast, maps, hosts| {
        let out = |flags| packet(cast.pod, hosts.own, 4000, 80).tcp(flags);
        assert!(matches!(asked(maps, &out(tcp::SYN)), FromPod::Send { egress_id: ID, .. }));
        let host = if cast.world.contains(':') { 128 } else { 32 };
        for (policy, verdict) in
            [(ClassPolicy::new(OTHER_ID), Verdict::AddressGone), (ClassPolicy::NONE, Verdict::FlowCut)]
        {
            maps.classes.borrow_mut().retain(|(key, ..)| key.to != addr(hosts.own));
            maps.put_class(CLASS, hosts.own, host, policy);
            assert_eq!(asked(maps, &out(tcp::ACK)), FromPod::Reset(verdict), "{policy:?}");
        }
        // A new one on its tuple has no policy.
        assert_eq!(asked(maps, &out(tcp::SYN)), FromPod::Done(Verdict::NotSelected));
        assert_eq!(asked(maps, &out(tcp::ACK)), FromPod::Done(Verdict::NotSelected));
    });
}

#[test]
fn an_inbound_connection_is_answered_whatever_the_destinations() {
    classed(|cast, maps, hosts| {
        for (from, verdict) in [(hosts.own, Verdict::InboundReply), (hosts.none, Verdict::NotSelected)] {
            let syn = packet(from, cast.pod, 80, 4000).tcp(tcp::SYN).arriving();
            assert_eq!(to_pod::decide(&syn, maps, &maps.config.get()), Verdict::InboundRemembered);
            let answer = packet(cast.pod, from, 4000, 80).tcp(tcp::ACK);
            assert_eq!(asked(maps, &answer), FromPod::Done(verdict), "{from}");
        }
    });
}

/// The gateway's reply, or a router's error about the pod's packet, belongs to the policy of the destination.
#[test]
fn replies_belong_to_the_policy_of_their_source() {
    classed(|cast, maps, hosts| {
        let taken = |egress_id, packet: &FrameFields, quote: &Quote| {
            let outer = Outer { source: addr(OTHER_NODE), egress_id };
            from_overlay::decide(&mut packet.headers(), quote, &outer, maps, &maps.config.get())
        };
        let refused = FromOverlay::Done(Verdict::NotItsPod);
        for (from, of) in [(hosts.own, Some(ID)), (hosts.other, Some(OTHER_ID)), (hosts.none, None)] {
            let reply = packet(from, cast.pod, 80, 4000).tcp(tcp::ACK);
            let error = packet(hosts.outside, cast.pod, 0, 0).unreachable();
            let quote = Quote::of(packet(cast.pod, from, 4000, 80).headers());
            for egress_id in [ID, OTHER_ID] {
                let expected = if of == Some(egress_id) { FromOverlay::Deliver } else { refused };
                assert_eq!(taken(egress_id, &reply, &Quote::NONE), expected, "{from} {egress_id}");
                assert_eq!(taken(egress_id, &error, &quote), expected, "{from} {egress_id}");
            }
        }
    });
}
