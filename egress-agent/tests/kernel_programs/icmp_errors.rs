//! Translated ICMP errors: about packets of flows, from any router on the path, and from pods about received packets.

use egress_common::abi::{Family, NODE_MARK, NatEntry, Origin, Tuple, Verdict};

use crate::aging::now_ns;
use crate::cast::{FamilyAddresses, addr};
use crate::frames::{ACK, Body, FrameSpec, L3, SYN, ip, packet};
use crate::stage::{FROM_NETDEV, FROM_POD, NEXT, Stage, TO_NETDEV, TestRun, UPLINK_MAC, both};

/// Every error that is translated: the first two bytes and the last four of its header.
fn kinds(family: Family) -> Vec<Body> {
    let kinds: &[([u8; 2], [u8; 4])] = match family {
        Family::V4 => &[
            ([3, 1], [0; 4]),
            ([3, 3], [0; 4]),
            ([3, 4], [0, 0, 5, 0x78]),
            ([3, 13], [0; 4]),
            ([4, 0], [0; 4]),
            ([11, 0], [0; 4]),
            ([11, 1], [0; 4]),
            ([12, 0], [20, 0, 0, 0]),
        ],
        Family::V6 => &[
            ([1, 0], [0; 4]),
            ([1, 4], [0; 4]),
            ([2, 0], [0, 0, 5, 0x78]),
            ([3, 0], [0; 4]),
            ([3, 1], [0; 4]),
            ([4, 1], [0, 0, 0, 40]),
        ],
    };
    kinds.iter().map(|(head, rest)| Body::Icmp(*head, *rest)).collect()
}

/// An error that quotes so many bytes after the network header.
fn error(from: &str, to: &str, kind: Body, quoted: &FrameSpec, l4: usize) -> FrameSpec {
    let whole = quoted.frame();
    let header = if quoted.from.is_ipv4() { 20 } else { 40 } + 8 * usize::from(quoted.options);
    let content = whole[L3..whole.len().min(L3 + header + l4)].to_vec();
    packet(from, to, 0, 0).body(kind).with(|packet| packet.content = Some(content))
}

/// The same, as the router sends it to this node.
pub(crate) fn arriving(from: &str, to: &str, kind: Body, quoted: &FrameSpec, l4: usize) -> FrameSpec {
    error(from, to, kind, quoted, l4).with(|packet| packet.dmac = UPLINK_MAC)
}

const BODIES: [Body; 6] =
    [Body::Udp, Body::UdpUnsummed, Body::Tcp(SYN), Body::EchoRequest, Body::Sctp(1), Body::SctpUnsummed(1)];

/// The port that the flow has outside.
fn shown(stage: &Stage, from: &str, port: u16) -> u16 {
    let ours = |key: &Tuple| key.saddr == addr(from) && key.sport() == port;
    let (_, mapping) = stage.mappings().into_values().find(|(key, _)| ours(key)).expect("a mapping");
    mapping.other.dport()
}

/// The pod's packet, and its translated form: with a system port, which is always changed.
fn sent(stage: &mut Stage, cast: &FamilyAddresses, port: u16, body: Body) -> (FrameSpec, FrameSpec) {
    let sent = packet(cast.pod, cast.world, port, 80).body(body);
    stage.run_frame(&FROM_POD, &sent.frame(), Verdict::SnatHere);
    let outside = sent.snat(cast.egress, shown(stage, cast.pod, port)).hop();
    (sent.hop(), outside)
}

#[test]
fn errors_from_any_router_reach_the_pod_whose_packet_they_quote() {
    both(|stage, cast| {
        for (port, body) in (22..).zip(BODIES) {
            let (inside, outside) = sent(stage, cast, port, body);
            for (kind, router) in kinds(cast.family).into_iter().zip([cast.router, cast.world].into_iter().cycle()) {
                for options in [0, 1] {
                    let with = |packet: &FrameSpec| packet.clone().with(|packet| packet.options = options);
                    for l4 in [8, 20, 100] {
                        let icmp_error = arriving(router, cast.egress, kind, &with(&outside), l4);
                        let expected = arriving(router, cast.pod, kind, &with(&inside), l4).hop();
                        stage.forwards(&FROM_NETDEV, &icmp_error, Verdict::ReplyHere, &expected);
                    }
                }
            }
        }
    });
}

/// A router that fragmented the packet quotes its first fragment: the checksum covers the whole packet, whose length is
/// unknown.
#[test]
fn a_quoted_checksum_that_covers_other_fragments_is_left() {
    both(|stage, cast| {
        let (inside, outside) = sent(stage, cast, 22, Body::Sctp(1));
        let at = if cast.family == Family::V4 { 20 } else { 48 } + 8;
        let first = |packet: &FrameSpec| {
            packet.clone().with(|packet| (packet.dont_fragment, packet.fragment) = (false, (0, true))).frame()[L3..]
                .to_vec()
        };
        let (mut inner, outer) = (first(&inside), first(&outside));
        inner[at..at + 4].copy_from_slice(&outer[at..at + 4]);
        let icmp_error = |to, content: Vec<u8>| {
            let packet = packet(cast.router, to, 0, 0).body(kinds(cast.family)[0]);
            packet.with(|packet| (packet.content, packet.dmac) = (Some(content), UPLINK_MAC))
        };
        stage.forwards(
            &FROM_NETDEV,
            &icmp_error(cast.egress, outer),
            Verdict::ReplyHere,
            &icmp_error(cast.pod, inner).hop(),
        );
    });
}

#[test]
fn errors_for_a_pod_of_another_node_go_through_the_overlay() {
    both(|stage, cast| {
        let (inside, outside) = sent(stage, cast, 53, Body::Tcp(SYN));
        for (key, (tuple, mapping)) in stage.mappings() {
            let made = NatEntry::new(mapping.other, Origin::Remote, addr(cast.other_node), mapping.egress_id, now_ns());
            stage.nat.insert(tuple, made.sealed(&tuple), 0).unwrap_or_else(|error| panic!("{key}: {error}"));
        }
        for kind in kinds(cast.family) {
            let icmp_error = arriving(cast.router, cast.egress, kind, &outside, 20);
            let expected = arriving(cast.router, cast.pod, kind, &inside, 20).hop();
            let ran = stage.run_frame(&FROM_NETDEV, &icmp_error.frame(), Verdict::ReplyToNode);
            assert!(ran.frame.ends_with(&expected.frame()[L3..]), "{kind:?}: {:02x?}", ran.frame);
        }
    });
}

#[test]
fn errors_that_quote_no_flow_are_dropped() {
    both(|stage, cast| {
        let (_, outside) = sent(stage, cast, 4000, Body::Udp);
        let kind = kinds(cast.family)[0];
        for quoted in [
            outside.clone().with(|packet| packet.sport = 4001),
            outside.clone().with(|packet| packet.dport = 81),
            outside.clone().tcp(ACK),
            outside.snat(cast.away_egress, 4000),
            outside.snat(cast.pod, 4000),
            outside.dnat(cast.router, 80),
            outside.clone().with(|packet| (packet.dont_fragment, packet.fragment) = (false, (9, false))),
            outside.clone().body(kind),
        ] {
            let icmp_error = arriving(cast.router, cast.egress, kind, &quoted, 20);
            stage.drops(&FROM_NETDEV, &icmp_error, Verdict::IcmpUnmatched);
        }
        for l4 in [0, 3] {
            stage.drops(&FROM_NETDEV, &arriving(cast.router, cast.egress, kind, &outside, l4), Verdict::IcmpUnmatched);
        }
        let redirect = if cast.family == Family::V4 { [5, 1] } else { [137, 0] };
        let bent = arriving(cast.router, cast.egress, Body::Icmp(redirect, [10, 1, 2, 3]), &outside, 20);
        stage.drops(&FROM_NETDEV, &bent, Verdict::UnsupportedProtocol);
    });
}

#[test]
fn an_error_of_a_pod_about_its_flow_is_translated() {
    both(|stage, cast| {
        for (port, body) in (22..).zip(BODIES) {
            sent(stage, cast, port, body);
            let shown = shown(stage, cast.pod, port);
            let (outside, inside) = match body {
                Body::EchoRequest => {
                    let reply = |to, id| packet(cast.world, to, id, 0).body(Body::EchoReply);
                    (reply(cast.egress, shown), reply(cast.pod, port))
                }
                body => {
                    let reply = |to, port| packet(cast.world, to, 80, port).body(body);
                    (reply(cast.egress, shown), reply(cast.pod, port))
                }
            };
            for kind in kinds(cast.family) {
                for l4 in [8, 20, 100] {
                    let icmp_error = error(cast.pod, cast.world, kind, &inside, l4);
                    let expected = error(cast.egress, cast.world, kind, &outside, l4).hop();
                    stage.forwards(&FROM_POD, &icmp_error, Verdict::SnatHere, &expected);
                }
            }
        }
    });
}

#[test]
fn an_error_of_a_pod_about_a_remote_flow_goes_to_its_gateway() {
    both(|stage, cast| {
        let sent = packet(cast.away_pod, cast.world, 4000, 80);
        let got = packet(cast.world, cast.away_pod, 80, 4000);
        let icmp_error = error(cast.away_pod, cast.world, kinds(cast.family)[0], &got, 20);
        stage.drops(&FROM_POD, &icmp_error, Verdict::IcmpUnmatched);
        stage.run_frame(&FROM_POD, &sent.frame(), Verdict::ToGateway);
        let before = stage.flows.iter().count();
        let ran = stage.run_frame(&FROM_POD, &icmp_error.frame(), Verdict::ToGateway);
        assert!(ran.frame.ends_with(&icmp_error.clone().hop().frame()[L3..]), "as the pod sent it: {:02x?}", ran.frame);
        assert_eq!(stage.flows.iter().count(), before, "it begins no flow");
    });
}

#[test]
fn an_error_of_a_pod_about_no_flow_is_dropped() {
    both(|stage, cast| {
        sent(stage, cast, 4000, Body::Udp);
        let kind = kinds(cast.family)[0];
        let got = packet(cast.world, cast.pod, 80, 4000);
        for quoted in [
            got.clone().with(|packet| packet.dport = 4001),
            got.clone().tcp(ACK),
            got.clone().with(|packet| packet.to = ip(cast.known_pod)),
            got.clone().with(|packet| packet.from = ip(cast.router)),
            packet(cast.pod, cast.world, 4000, 80),
        ] {
            stage.drops(&FROM_POD, &error(cast.pod, cast.world, kind, &quoted, 20), Verdict::IcmpUnmatched);
        }
        let to_another = error(cast.pod, cast.router, kind, &got, 20);
        stage.drops(&FROM_POD, &to_another, Verdict::IcmpUnmatched);
        assert_eq!(stage.mappings().values().filter(|(key, _)| key.saddr == addr(cast.pod)).count(), 1);
    });
}

#[test]
fn errors_about_marked_packets_are_translated_both_ways() {
    both(|stage, cast| {
        let marked = TestRun { mark: NODE_MARK, ..TO_NETDEV };
        for (port, body) in (4000..).zip([Body::Udp, Body::Tcp(SYN), Body::EchoRequest]) {
            let sent = packet(cast.pod, cast.other_node, port, 80).body(body);
            stage.run_frame(&marked, &sent.frame(), Verdict::NodeSnat);
            let shown = shown(stage, cast.pod, port);
            for kind in kinds(cast.family) {
                let icmp_error = arriving(cast.router, cast.node, kind, &sent.snat(cast.node, shown), 20);
                let expected = arriving(cast.router, cast.pod, kind, &sent, 20);
                let ran = stage.run_frame(&FROM_NETDEV, &icmp_error.frame(), Verdict::NodeReply);
                assert_eq!((ran.action, ran.frame), (NEXT, expected.frame()), "{kind:?}");
                if body == Body::EchoRequest {
                    continue;
                }
                let got = |to, port| packet(cast.other_node, to, 80, port).body(body);
                let icmp_error = error(cast.pod, cast.other_node, kind, &got(cast.pod, port), 20);
                let marks = stage.run_frame(&FROM_POD, &icmp_error.frame(), Verdict::MarkedNode);
                assert_eq!((marks.action, marks.mark, &marks.frame), (NEXT, NODE_MARK, &icmp_error.frame()));
                let expected = error(cast.node, cast.other_node, kind, &got(cast.node, shown), 20);
                let ran = stage.run_frame(&marked, &icmp_error.frame(), Verdict::NodeSnat);
                assert_eq!((ran.action, ran.frame), (NEXT, expected.frame()), "{kind:?}");
            }
        }
        let kind = kinds(cast.family)[0];
        let hosts = packet(cast.node, cast.other_node, 22, 80).tcp(ACK);
        stage.passes(&FROM_NETDEV, &arriving(cast.router, cast.node, kind, &hosts, 20), Verdict::NotOurs);
        let nothing = packet(cast.other_node, cast.pod, 81, 4000);
        stage.drops(&marked, &error(cast.pod, cast.other_node, kind, &nothing, 20), Verdict::IcmpUnmatched);
    });
}
