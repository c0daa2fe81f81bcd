//! Protocols other than TCP, UDP and ICMP echo; long headers.

use egress_common::abi::{Family, NODE_MARK, Verdict};

use crate::cast::FamilyAddresses;
use crate::frames::{Body, FrameSpec, L3, packet};
use crate::stage::{FROM_NETDEV, FROM_POD, NEXT, TO_NETDEV, TestRun, UPLINK_MAC, both};

/// The chunk that begins an association.
const SCTP: Body = Body::Sctp(1);
const GRE: Body = Body::Other(47);
const AH: Body = Body::Other(51);
const DCCP: Body = Body::Other(33);
const UDP_LITE: Body = Body::Other(136);

fn arriving(cast: &FamilyAddresses, sport: u16, dport: u16, body: Body) -> FrameSpec {
    packet(cast.world, cast.egress, sport, dport).body(body).with(|packet| packet.dmac = UPLINK_MAC)
}

#[test]
fn protocols_with_ports_are_translated_both_ways_with_right_checksums() {
    both(|stage, cast| {
        let sent = packet(cast.pod, cast.world, 4000, 80).body(SCTP);
        stage.forwards(&FROM_POD, &sent, Verdict::SnatHere, &sent.snat(cast.egress, 4000).hop());
        let answer = arriving(cast, 80, 4000, SCTP);
        stage.forwards(&FROM_NETDEV, &answer, Verdict::ReplyHere, &answer.dnat(cast.pod, 4000).hop());
    });
}

#[test]
fn gso_packets_larger_than_the_mtu_pass() {
    both(|stage, cast| {
        let ready = TestRun { gso_size: 0xffff, ..FROM_POD };
        let sent = packet(cast.pod, cast.world, 4000, 80).body(SCTP).with(|packet| packet.data = 3000);
        stage.drops(&FROM_POD, &sent, Verdict::MtuExceeded);
        stage.forwards(&ready, &sent, Verdict::SnatHere, &sent.snat(cast.egress, 4000).hop());
        let away = packet(cast.away_pod, cast.world, 4000, 80).body(SCTP).with(|packet| packet.data = 3000);
        stage.run_frame(&ready, &away.frame(), Verdict::ToGateway);
    });
}

#[test]
fn a_port_that_is_taken_is_changed() {
    both(|stage, cast| {
        stage.select_as(cast.known_pod, cast.pod);
        stage.run_frame(&FROM_POD, &packet(cast.pod, cast.world, 4000, 80).body(SCTP).frame(), Verdict::SnatHere);
        let second = packet(cast.known_pod, cast.world, 4000, 80).body(SCTP);
        let ran = stage.run_frame(&FROM_POD, &second.frame(), Verdict::SnatHere);
        let at = L3 + if cast.family == Family::V4 { 20 } else { 40 };
        let shown = u16::from_be_bytes([ran.frame[at], ran.frame[at + 1]]);
        assert!(shown >= 1024 && shown != 4000);
        assert_eq!(ran.frame[L3..], second.snat(cast.egress, shown).hop().frame()[L3..]);
    });
}

#[test]
fn a_protocol_without_ports_serves_one_pod() {
    both(|stage, cast| {
        stage.select_as(cast.known_pod, cast.pod);
        // Including the other family's ICMP.
        let strange = Body::Other(if cast.family == Family::V4 { 58 } else { 1 });
        for body in [GRE, Body::Other(50), Body::Other(4), Body::Other(254), strange] {
            for data in [0, 33] {
                let sent = packet(cast.pod, cast.world, 7, 9).body(body).with(|packet| packet.data = data);
                stage.forwards(&FROM_POD, &sent, Verdict::SnatHere, &sent.snat(cast.egress, 7).hop());
                let answer = arriving(cast, 9, 7, body).with(|packet| packet.data = data);
                stage.forwards(&FROM_NETDEV, &answer, Verdict::ReplyHere, &answer.dnat(cast.pod, 7).hop());
            }
            stage.drops(&FROM_POD, &packet(cast.known_pod, cast.world, 7, 9).body(body), Verdict::ProtocolTaken);
        }
        stage.drops(&FROM_NETDEV, &arriving(cast, 9, 7, Body::Other(253)), Verdict::NoNatEntry);
        for body in [AH, DCCP, UDP_LITE] {
            stage.drops(&FROM_POD, &packet(cast.pod, cast.world, 7, 9).body(body), Verdict::UnsupportedProtocol);
            stage.drops(&FROM_NETDEV, &arriving(cast, 7, 9, body), Verdict::UnsupportedProtocol);
        }
    });
}

#[test]
fn protocols_without_ports_get_no_node_address() {
    both(|stage, cast| {
        let marked = TestRun { mark: NODE_MARK, ..TO_NETDEV };
        let sent = |port, body| packet(cast.pod, cast.other_node, port, 80).body(body);
        stage.drops(&marked, &sent(4000, GRE), Verdict::ProtocolTaken);
        let ran = stage.run_frame(&marked, &sent(61234, SCTP).frame(), Verdict::NodeSnat);
        assert_eq!((ran.action, ran.frame), (NEXT, sent(61234, SCTP).snat(cast.node, 61234).frame()));
    });
}

#[test]
fn icmp_echo_and_timestamp_queries_are_translated() {
    both(|stage, cast| {
        if cast.family == Family::V6 {
            return;
        }
        let query = |from, to, kind, id: u16| {
            let [high, low] = id.to_be_bytes();
            packet(from, to, 0, 0).body(Body::Icmp([kind, 0], [high, low, 0, 1]))
        };
        let sent = query(cast.pod, cast.world, 13, 4000);
        let expected = query(cast.egress, cast.world, 13, 4000).hop();
        stage.forwards(&FROM_POD, &sent, Verdict::SnatHere, &expected);
        let answer = query(cast.world, cast.egress, 14, 4000).with(|packet| packet.dmac = UPLINK_MAC);
        let expected = query(cast.world, cast.pod, 14, 4000).with(|packet| packet.dmac = UPLINK_MAC).hop();
        stage.forwards(&FROM_NETDEV, &answer, Verdict::ReplyHere, &expected);
        let asked = query(cast.world, cast.egress, 13, 4000).with(|packet| packet.dmac = UPLINK_MAC);
        stage.drops(&FROM_NETDEV, &asked, Verdict::NoNatEntry);
        // Information and address mask, requests and replies: historic (RFC 6918).
        for kind in 15..=18 {
            stage.drops(&FROM_POD, &query(cast.pod, cast.world, kind, 4000), Verdict::UnsupportedProtocol);
        }
    });
}

#[test]
fn source_routed_packets_are_dropped() {
    both(|stage, cast| {
        let sent = packet(cast.pod, cast.world, 4000, 80).with(|packet| packet.options = 1);
        stage.run_frame(&FROM_POD, &sent.frame(), Verdict::SnatHere);
        let mut frame = sent.frame();
        match cast.family {
            Family::V4 => {
                frame[34..42].copy_from_slice(&[1, 131, 7, 4, 10, 1, 2, 3]);
                stage.run_frame(&FROM_POD, &frame, Verdict::SourceRouted);
                frame[34..42].copy_from_slice(&[137, 7, 4, 10, 1, 2, 3, 0]);
            }
            Family::V6 => {
                // Destination options become a routing header with one segment left.
                frame[20] = 43;
                frame[54 + 3] = 1;
            }
        }
        stage.run_frame(&FROM_POD, &frame, Verdict::SourceRouted);
        let marked = TestRun { mark: NODE_MARK, ..TO_NETDEV };
        let mut frame = packet(cast.pod, cast.other_node, 4000, 80).with(|packet| packet.options = 1).frame();
        if cast.family == Family::V6 {
            frame[20] = 43;
            frame[54 + 3] = 1;
            stage.run_frame(&marked, &frame, Verdict::SourceRouted);
        }
    });
}

/// The packet with so many destination options headers of eight bytes each.
fn chained(packet: &FrameSpec, count: usize) -> Vec<u8> {
    let mut frame = packet.frame();
    let last = frame[20];
    let mut chain = [60, 0, 1, 4, 0, 0, 0, 0].repeat(count);
    if let Some(at) = chain.len().checked_sub(8) {
        chain[at] = last;
        frame[20] = 60;
    }
    let length = u16::try_from(frame.len() - 54 + chain.len()).expect("a length");
    frame[18..20].copy_from_slice(&length.to_be_bytes());
    frame.splice(54..54, chain);
    frame
}

#[test]
fn extension_headers_are_walked_up_to_a_bound() {
    both(|stage, cast| {
        if cast.family == Family::V4 {
            return;
        }
        for count in 0..=7 {
            let sent = packet(cast.pod, cast.world, 4000, 80);
            if count == 7 {
                stage.run_frame(&FROM_POD, &chained(&sent, count), Verdict::ChainTooLong);
                continue;
            }
            let ran = stage.run_frame(&FROM_POD, &chained(&sent, count), Verdict::SnatHere);
            assert_eq!(ran.frame[L3..], chained(&sent.snat(cast.egress, 4000).hop(), count)[L3..], "{count} headers");
            let answer = arriving(cast, 80, 4000, Body::Udp);
            let ran = stage.run_frame(&FROM_NETDEV, &chained(&answer, count), Verdict::ReplyHere);
            assert_eq!(ran.frame[L3..], chained(&answer.dnat(cast.pod, 4000).hop(), count)[L3..]);
        }
    });
}

#[test]
fn untranslated_protocols_do_not_affect_other_pods() {
    both(|stage, cast| {
        let redirect = if cast.family == Family::V4 { [5, 1] } else { [137, 0] };
        for body in [AH, GRE, SCTP, Body::Icmp(redirect, [10, 1, 2, 3]), Body::Unreachable] {
            let by = |from, to| packet(from, to, 61500, 9).body(body);
            stage.passes(&FROM_POD, &by(cast.known_pod, cast.world), Verdict::NotSelected);
            stage.passes(&TO_NETDEV, &by(cast.known_pod, cast.world), Verdict::NotSelected);
            stage.passes(&FROM_POD, &by(cast.pod, cast.remote_pod), Verdict::ToCluster);
            stage.passes(&TO_NETDEV, &by(cast.node, cast.world), Verdict::NotOurs);
            let arrives = by(cast.world, cast.node).with(|packet| packet.dmac = UPLINK_MAC);
            stage.passes(&FROM_NETDEV, &arrives, Verdict::NotOurs);
        }
        let listed = |from, to| {
            let mut frame = packet(from, to, 4000, 80).with(|packet| packet.options = 1).frame();
            match cast.family {
                Family::V4 => frame[34..42].copy_from_slice(&[1, 131, 7, 4, 10, 1, 2, 3]),
                Family::V6 => (frame[20], frame[54 + 3]) = (43, 1),
            }
            frame
        };
        for (run, frame, verdict) in [
            (FROM_POD, listed(cast.known_pod, cast.world), Verdict::NotSelected),
            (TO_NETDEV, listed(cast.known_pod, cast.world), Verdict::NotSelected),
            (TO_NETDEV, listed(cast.node, cast.world), Verdict::NotOurs),
        ] {
            let ran = stage.run_frame(&run, &frame, verdict);
            assert_eq!((ran.action, ran.frame), (NEXT, frame));
        }
        if cast.family == Family::V6 {
            let long = chained(&packet(cast.known_pod, cast.world, 4000, 80), 7);
            let ran = stage.run_frame(&FROM_POD, &long, Verdict::NotSelected);
            assert_eq!((ran.action, ran.frame), (NEXT, long));
        }
    });
}
