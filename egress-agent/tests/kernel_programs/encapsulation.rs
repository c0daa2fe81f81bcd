//! Encapsulation and decapsulation by the programs, over both underlays.
//!
//! The first packet to a node goes by the device, whose stack resolves the neighbour; the next hop is cached per CPU,
//! so these tests stay on one.

pub(crate) mod setup;

use std::net::IpAddr;

use egress_common::abi::{ClassPolicy, Holder, PodEntry, Verdict};

use self::setup::{
    Around, ECT0, EXPERIENCED, PORT, SECRET, arrived, configure, everywhere, everywhere_taken_out, from_remote, put,
    seal, sent, takes_out_other_families,
};
use crate::cast::{FamilyAddresses, addr};
use crate::frames::{Body, FrameSpec, L3, SYN, ip, packet};
use crate::stage::{
    FROM_NETDEV, FROM_POD, FURTHER, MGMT_MAC, NEXT, POD_MAC, REDIRECT, REDIRECTED, ROUTER_MAC, Ran, SHOT, TO_NETDEV,
    TestRun, UPLINK_MAC, batch,
};

/// What the stage's management port takes.
const POD_MTU: usize = 1400;

#[test]
fn simple_packets_are_encapsulated_by_the_program() {
    everywhere(|stage, cast, underlay| {
        let mut ports = std::collections::BTreeSet::new();
        configure(stage, underlay);
        for (port, body) in
            (4000..4020).zip([Body::Udp, Body::UdpUnsummed, Body::Tcp(SYN), Body::EchoRequest].iter().cycle())
        {
            let out = packet(cast.away_pod, cast.world, port, 80).body(*body);
            let first = stage.run_frame(&FROM_POD, &out.frame(), Verdict::ToGateway);
            let ran = put(stage, &FROM_POD, &out.frame(), Verdict::ToGateway);
            let expected = sent(underlay, cast.away, &out.clone().hop(), &ran.frame);
            assert!(ran.frame == expected && ran.action == REDIRECT, "{ran:02x?}\n{expected:02x?}");
            let by_device = out.clone().hop().frame();
            assert!(
                first.frame == by_device || first.frame == ran.frame,
                "the first may go by the device: {first:02x?}"
            );
            ports.insert(ran.frame[ran.frame.len() - out.frame().len() - 16..][..2].to_vec());
            // `to_netdev` recognises it.
            let signed = TestRun { priority: ran.priority, ..TO_NETDEV };
            let passed = stage.run_frame(&signed, &ran.frame, Verdict::NotOurs);
            assert_eq!((passed.action, passed.frame), (-1, ran.frame));
        }
        assert!(ports.len() > 10, "flows differ by their source ports: {ports:?}");
    });
}

#[test]
fn replies_to_other_nodes_are_encapsulated_by_the_program() {
    everywhere_taken_out(|stage, cast, underlay| {
        configure(stage, underlay);
        let inner = from_remote(cast);
        let around = arrived(underlay, cast.here);
        stage.run_frame(&FROM_NETDEV, &around.frame(&inner), Verdict::SnatForNode);
        let reply = packet(cast.world, cast.egress, 80, 4000).macs(UPLINK_MAC, ROUTER_MAC);
        let ran = put(stage, &FROM_NETDEV, &reply.frame(), Verdict::ReplyToNode);
        let expected = sent(underlay, cast.here, &reply.dnat(cast.remote_pod, 4000).hop(), &ran.frame);
        assert!(ran.frame == expected && ran.action == REDIRECT, "{ran:02x?}\n{expected:02x?}");
    });
}

#[test]
fn congestion_bits_are_copied_outside() {
    everywhere(|stage, cast, underlay| {
        configure(stage, underlay);
        let out = packet(cast.away_pod, cast.world, 4100, 80);
        let mut frame = out.frame();
        if ip(cast.away_pod).is_ipv4() {
            frame[L3 + 1] = ECT0;
            seal(&mut frame);
        } else {
            frame[L3 + 1] = ECT0 << 4;
        }
        let ran = put(stage, &FROM_POD, &frame, Verdict::ToGateway);
        let outside = if ip(underlay.node).is_ipv4() { ran.frame[L3 + 1] } else { ran.frame[L3 + 1] >> 4 };
        assert_eq!(outside, ECT0);
    });
}

#[test]
fn packets_that_need_fragmentation_leave_by_the_device() {
    everywhere(|stage, cast, underlay| {
        configure(stage, underlay);
        let out = packet(cast.away_pod, cast.world, 4200, 80).with(|packet| packet.data = 1300);
        for _ in 0..2 {
            stage.run_frame(&FROM_POD, &out.frame(), Verdict::ToGateway);
        }
        stage.configure(|config| {
            config.self_node = addr(underlay.node);
            config.overlay_secret = SECRET;
            config.uplink_mtu = 1300;
            config.route_generation = 2;
        });
        for _ in 0..2 {
            let ran = stage.run_frame(&FROM_POD, &out.frame(), Verdict::ToGateway);
            assert_eq!(ran.frame, out.clone().hop().frame());
        }
    });
}

/// Below the minimum MTU of IPv6: an outer IPv6 packet is never fragmented, so packets that their sender cannot make
/// smaller are dropped with a reason.
#[test]
fn packets_too_big_for_the_overlay_get_an_error_or_a_drop_reason() {
    const NARROW: u32 = 1250;
    everywhere(|stage, cast, underlay| {
        stage.configure(|config| {
            config.self_node = addr(underlay.node);
            config.overlay_mtu = NARROW;
        });
        let (over_v6, is_v6) = (underlay.node.contains(':'), cast.egress.contains(':'));
        let network = if is_v6 { 40 } else { 20 };
        let of = |length: u32, bound: bool| {
            packet(cast.away_pod, cast.world, 4300, 80).with(|packet| {
                packet.data = usize::try_from(length).expect("a length") - network - 8;
                packet.dont_fragment = bound;
            })
        };
        stage.run_frame(&FROM_POD, &of(NARROW, true).frame(), Verdict::ToGateway);
        let cut = if over_v6 { Verdict::MtuAnswered } else { Verdict::ToGateway };
        let cases = if is_v6 {
            let least = if over_v6 { Verdict::OverlayTooNarrow } else { Verdict::ToGateway };
            [(of(1280, true), least), (of(1281, true), Verdict::MtuAnswered)]
        } else {
            [(of(NARROW + 1, true), Verdict::MtuAnswered), (of(NARROW + 1, false), cut)]
        };
        for (sent, verdict) in cases {
            stage.run_frame(&FROM_POD, &sent.frame(), verdict);
        }
    });
}

#[test]
fn only_frames_with_the_overlay_seal_pass_the_uplink() {
    everywhere(|stage, cast, underlay| {
        configure(stage, underlay);
        let (from, to) = (underlay.node, underlay.other_node);
        let own = Around { from, to, sport: 50_000, egress_id: 1, ecn: 0, link_source: SECRET };
        let signed = TestRun { priority: REDIRECTED, ..TO_NETDEV };
        stage.run_frame(&signed, &own.frame(&from_remote(cast)), Verdict::NotOurs);
        let forged = [own, Around { link_source: [0; 6], ..own }, Around { from: underlay.mgmt, ..own }];
        for around in forged {
            stage.run_frame(&TO_NETDEV, &around.frame(&from_remote(cast)), Verdict::ForgedTunnel);
        }
        let short = packet(from, to, 50_000, PORT).with(|packet| packet.data = 12);
        stage.run_frame(&TO_NETDEV, &short.frame(), Verdict::ForgedTunnel);
    });
}

/// A gateway applies quotas to pods of other nodes too.
#[test]
fn pods_of_other_nodes_have_a_quota() {
    everywhere_taken_out(|stage, cast, underlay| {
        configure(stage, underlay);
        let mut config = stage.config.get(&0, 0).expect("the configuration");
        config.pod_quota = 4;
        stage.config.set(0, config, 0).expect("the configuration");
        let frame = |port| {
            let inner = from_remote(cast).with(|packet| packet.sport = port);
            arrived(underlay, cast.here).frame(&inner)
        };
        for port in 4001..=4004 {
            stage.run_frame(&FROM_NETDEV, &frame(port), Verdict::SnatForNode);
        }
        assert_eq!(stage.run_frame(&FROM_NETDEV, &frame(4005), Verdict::QuotaExceeded).action, SHOT);
        stage.run_frame(&FROM_NETDEV, &frame(4004), Verdict::SnatForNode);
        let share = stage.shares.get(&Holder::pod(addr(cast.remote_pod)), 0).expect("counted");
        assert_eq!((share.flows, share.nat_entries), (0, 4));
    });
}

#[test]
fn simple_packets_are_decapsulated_by_the_program() {
    everywhere_taken_out(|stage, cast, underlay| {
        configure(stage, underlay);
        for (port, body) in (4300..).zip([Body::Udp, Body::Tcp(SYN), Body::EchoRequest]) {
            let inner = from_remote(cast).body(body).with(|packet| packet.sport = port);
            let frame = arrived(underlay, cast.here).frame(&inner);
            // From another network it is left to the device.
            let left = stage.run_frame(&TestRun { ifindex: FURTHER, ..FROM_NETDEV }, &frame, Verdict::NotOurs);
            assert_eq!(left, Ran::plain(NEXT, frame.clone(), 0));
            stage.run_frame(&FROM_NETDEV, &frame, Verdict::SnatForNode);
            let mut ran = stage.run_frame(&FROM_NETDEV, &frame, Verdict::SnatForNode);
            if ran.frame[..6] != ROUTER_MAC {
                ran = stage.run_frame(&FROM_NETDEV, &frame, Verdict::SnatForNode);
            }
            let expected = inner.snat(cast.egress, port).macs(ROUTER_MAC, UPLINK_MAC);
            assert_eq!(ran.frame, expected.frame(), "{inner:?}");
            assert_eq!(ran.action, REDIRECT);
        }
        let reply = packet(cast.world, cast.pod, 80, 4000).tcp(SYN);
        let frame = arrived(underlay, cast.here).frame(&reply);
        stage.run_frame(&FROM_NETDEV, &frame, Verdict::ReplyDelivered);
        let mut ran = stage.run_frame(&FROM_NETDEV, &frame, Verdict::ReplyDelivered);
        if ran.frame[..12] != [POD_MAC, MGMT_MAC].concat() {
            // The cached next hop has just expired.
            ran = stage.run_frame(&FROM_NETDEV, &frame, Verdict::ReplyDelivered);
        }
        assert_eq!(ran.frame[L3..], reply.frame()[L3..]);
        assert_eq!(ran.frame[..12], [POD_MAC, MGMT_MAC].concat());
    });
}

/// The pod's policy depends on the destination.
#[test]
fn class_replies_belong_to_the_policy_of_their_source() {
    everywhere_taken_out(|stage, cast, underlay| {
        configure(stage, underlay);
        stage.put_class(3, cast.world, None, ClassPolicy::new(cast.here));
        stage.put_class(3, cast.nowhere, None, ClassPolicy::NONE);
        stage.put_pod(cast.pod, PodEntry::by_destination(3, 0));
        for (from, is_of) in [(cast.world, cast.here), (cast.nowhere, 0)] {
            for egress_id in [cast.here, cast.away] {
                let reply = packet(from, cast.pod, 80, 4000).tcp(SYN);
                let verdict = if egress_id == is_of { Verdict::ReplyDelivered } else { Verdict::NotItsPod };
                stage.run_frame(&FROM_NETDEV, &arrived(underlay, egress_id).frame(&reply), verdict);
            }
        }
    });
}

#[test]
fn forged_packets_are_dropped_with_their_reason() {
    everywhere_taken_out(|stage, cast, underlay| {
        configure(stage, underlay);
        let inner = from_remote(cast);
        let foreign = if ip(underlay.node).is_ipv4() { "172.18.0.77" } else { "fd00:172:18::77" };
        let from = underlay.other_node;
        for (from, id, inner, verdict) in [
            (foreign, cast.here, inner.clone(), Verdict::ForgedOuter),
            (underlay.node, cast.here, inner.clone(), Verdict::ForgedOuter),
            (foreign, cast.here, packet(cast.world, cast.pod, 80, 4000), Verdict::ForgedOuter),
            (from, cast.here, packet(cast.pod, cast.world, 1, 2), Verdict::ForgedInner),
            (from, cast.here, packet(cast.world, cast.world, 1, 2), Verdict::ForgedInner),
            (from, cast.away, packet(cast.world, cast.pod, 80, 4000), Verdict::NotItsPod),
            (from, cast.here, packet(cast.world, cast.known_pod, 80, 4000), Verdict::NotItsPod),
            (from, cast.here, packet(cast.world, cast.unknown_pod, 80, 4000), Verdict::NotItsPod),
            (from, cast.away, inner.clone(), Verdict::NotGateway),
            (from, 0, inner.clone(), Verdict::NotGateway),
            (from, cast.here, packet(cast.remote_pod, cast.nowhere, 1, 2), Verdict::NoRoute),
        ] {
            let frame = Around { from, ..arrived(underlay, id) }.frame(&inner);
            let ran = stage.run_frame(&FROM_NETDEV, &frame, verdict);
            assert_eq!(ran.action, 2, "{from} {id} {inner:?}");
        }
    });
}

/// An IP packet of this length from a pod of the other node.
fn of_length(cast: &FamilyAddresses, length: usize) -> FrameSpec {
    let empty = from_remote(cast).with(|packet| packet.data = 0);
    let headers = empty.frame().len() - L3;
    empty.with(|packet| packet.data = length - headers)
}

#[test]
fn other_packets_are_left_to_the_device_unchanged() {
    everywhere(|stage, cast, underlay| {
        configure(stage, underlay);
        let around = arrived(underlay, cast.here);
        let good = around.frame(&from_remote(cast));
        let v4 = ip(underlay.node).is_ipv4();
        let udp = if v4 { 34 } else { 54 };
        let changed = |change: &dyn Fn(&mut Vec<u8>)| {
            let mut frame = good.clone();
            change(&mut frame);
            if v4 {
                seal(&mut frame);
            }
            frame
        };
        let mut frames = vec![
            ("marked by congestion", Around { ecn: EXPERIENCED, ..around }.frame(&from_remote(cast))),
            ("for another address", Around { to: underlay.mgmt, ..around }.frame(&from_remote(cast))),
            ("with a checksum", changed(&|frame| frame[udp + 7] = 1)),
            ("to another port", changed(&|frame| frame[udp + 3] ^= 1)),
            ("with another flag", changed(&|frame| frame[udp + 8] = 0x0c)),
            ("without the flag", changed(&|frame| frame[udp + 8] = 0)),
            ("with a reserved byte", changed(&|frame| frame[udp + 15] = 1)),
            ("with bytes behind it", changed(&|frame| frame.extend([0; 4]))),
            ("UDP-Lite", changed(&|frame| frame[if v4 { 23 } else { 20 }] = 136)),
            ("DCCP", changed(&|frame| frame[if v4 { 23 } else { 20 }] = 33)),
            ("with something else inside", changed(&|frame| frame[udp + 28] = 0x88)),
            ("too long for a pod", around.frame(&of_length(cast, POD_MTU + 1))),
        ];
        if v4 {
            frames.push(("a fragment", changed(&|frame| frame[L3 + 6] = 0x20)));
            let mut broken = good.clone();
            broken[L3 + 10] ^= 1;
            frames.push(("with a broken header", broken));
        }
        for (what, frame) in frames {
            let ran = stage.run_frame(&FROM_NETDEV, &frame, Verdict::NotOurs);
            assert_eq!((ran.action, ran.frame), (-1, frame), "{what}");
        }
        if cast.family == underlay.family || takes_out_other_families() {
            let longest = around.frame(&of_length(cast, POD_MTU));
            stage.run_frame(&FROM_NETDEV, &longest, Verdict::SnatForNode);
        }
        stage.configure(|config| config.self_node = addr(underlay.node));
        let ran = stage.run_frame(&FROM_NETDEV, &good, Verdict::NotOurs);
        assert_eq!(ran.frame, good, "the programs are told to leave the overlay alone");
    });
}

#[test]
fn a_remote_pod_gets_packet_too_big_for_the_uplink() {
    everywhere_taken_out(|stage, cast, underlay| {
        stage.configure(|config| {
            config.self_node = addr(underlay.node);
            config.overlay_secret = SECRET;
            config.route_generation = 3;
        });
        stage.set_mtu(cast.here, 1200);
        let large = from_remote(cast).with(|packet| packet.data = 1250);
        let ran = stage.run_frame(&FROM_NETDEV, &arrived(underlay, cast.here).frame(&large), Verdict::MtuAnswered);
        assert_eq!(ran.action, REDIRECT);
        let is_v4 = matches!(ip(cast.pod), IpAddr::V4(_));
        assert_eq!(
            ran.frame[if is_v4 { 23 } else { 20 }],
            if is_v4 { 1 } else { 58 },
            "an ICMP message, for the device"
        );
    });
}

#[test]
fn packets_that_the_host_routes_elsewhere_leave_by_the_device() {
    everywhere(|stage, cast, underlay| {
        configure(stage, underlay);
        // As with encryption between nodes: the host routes the other node's address by another device, although it is
        // on the uplink's link too.
        batch(&format!("route replace {} dev ovn-k8s-mp0\n", underlay.other_node));
        let out = packet(cast.away_pod, cast.world, 4400, 80);
        stage.configure(|config| {
            config.self_node = addr(underlay.node);
            config.overlay_secret = SECRET;
            config.route_generation = 4;
        });
        for _ in 0..3 {
            let ran = stage.run_frame(&FROM_POD, &out.frame(), Verdict::ToGateway);
            assert_eq!(ran.frame, out.clone().hop().frame());
        }
        batch(&format!("route del {} dev ovn-k8s-mp0\n", underlay.other_node));
    });
}
