//! SCTP with a taken port: another port, and an updated checksum over the whole message.

use egress_common::abi::{Family, NODE_MARK, Verdict};

use crate::cast::FamilyAddresses;
use crate::frames::{Body, FrameSpec, L3, packet};
use crate::stage::{FROM_NETDEV, FROM_POD, NEXT, Stage, TO_NETDEV, TestRun, UPLINK_MAC, both};

const DATA: Body = Body::Sctp(0);
const INIT: Body = Body::Sctp(1);
const PORT: u16 = 4000;
/// A port that NAT does not assign.
const SYSTEM_PORT: u16 = 700;

/// The source port of a frame with simple network headers.
fn sport(cast: &FamilyAddresses, frame: &[u8]) -> u16 {
    let at = L3 + if cast.family == Family::V4 { 20 } else { 40 };
    u16::from_be_bytes([frame[at], frame[at + 1]])
}

/// Two pods begin an association from one port; the one that the second of them got.
fn begin(stage: &mut Stage, cast: &FamilyAddresses) -> u16 {
    stage.select_as(cast.known_pod, cast.pod);
    let first = packet(cast.pod, cast.world, PORT, 80).body(INIT);
    stage.forwards(&FROM_POD, &first, Verdict::SnatHere, &first.snat(cast.egress, PORT).hop());
    let ran = stage.run_frame(&FROM_POD, &sent(cast, INIT).frame(), Verdict::SnatHere);
    let shown = sport(cast, &ran.frame);
    assert!(shown >= 1024 && shown != PORT);
    shown
}

fn sent(cast: &FamilyAddresses, body: Body) -> FrameSpec {
    packet(cast.known_pod, cast.world, PORT, 80).body(body)
}

fn answered(cast: &FamilyAddresses, port: u16, body: Body) -> FrameSpec {
    packet(cast.world, cast.egress, 80, port).body(body).with(|packet| packet.dmac = UPLINK_MAC)
}

#[test]
fn the_checksum_follows_the_port_both_ways() {
    both(|stage, cast| {
        let shown = begin(stage, cast);
        for body in [DATA, Body::Sctp(10), Body::SctpUnsummed(0)] {
            for data in (0..20).chain([255, 256, 257, 511, 512, 513, 1000, 1300]) {
                for options in [0, 1, 3] {
                    let with =
                        |packet: FrameSpec| packet.with(|packet| (packet.data, packet.options) = (data, options));
                    let out = with(sent(cast, body));
                    stage.forwards(&FROM_POD, &out, Verdict::SnatHere, &out.snat(cast.egress, shown).hop());
                    let back = with(answered(cast, shown, body));
                    stage.forwards(&FROM_NETDEV, &back, Verdict::ReplyHere, &back.dnat(cast.known_pod, PORT).hop());
                }
            }
        }
    });
}

#[test]
fn link_padding_is_not_part_of_the_checksum() {
    both(|stage, cast| {
        let shown = begin(stage, cast);
        let padded = |packet: &FrameSpec| [packet.frame(), vec![0xa5; 10]].concat();
        let out = sent(cast, DATA).with(|packet| packet.data = 3);
        let ran = stage.run_frame(&FROM_POD, &padded(&out), Verdict::SnatHere);
        assert_eq!(ran.frame[L3..], padded(&out.snat(cast.egress, shown).hop())[L3..]);
        let back = answered(cast, shown, DATA).with(|packet| packet.data = 3);
        let ran = stage.run_frame(&FROM_NETDEV, &padded(&back), Verdict::ReplyHere);
        assert_eq!(ran.frame[L3..], padded(&back.dnat(cast.known_pod, PORT).hop())[L3..]);
    });
}

#[test]
fn a_wrong_checksum_stays_wrong() {
    both(|stage, cast| {
        let shown = begin(stage, cast);
        let at = L3 + if cast.family == Family::V4 { 20 } else { 40 } + 8;
        let spoilt = |packet: &FrameSpec| {
            let mut frame = packet.frame();
            frame[at] ^= 0x40;
            frame
        };
        let out = sent(cast, DATA);
        let ran = stage.run_frame(&FROM_POD, &spoilt(&out), Verdict::SnatHere);
        assert_eq!(ran.frame[L3..], spoilt(&out.snat(cast.egress, shown).hop())[L3..]);
    });
}

/// Messages of a GSO packet get their checksums during segmentation.
#[test]
fn gso_segments_get_the_port_and_no_checksum() {
    both(|stage, cast| {
        let shown = begin(stage, cast);
        let out = sent(cast, Body::SctpUnsummed(0)).with(|packet| packet.data = 3000);
        let ready = TestRun { gso_size: 0xffff, ..FROM_POD };
        stage.forwards(&ready, &out, Verdict::SnatHere, &out.snat(cast.egress, shown).hop());
        let back = answered(cast, shown, Body::SctpUnsummed(0)).with(|packet| packet.data = 3000);
        let ready = TestRun { gso_size: 0xffff, ..FROM_NETDEV };
        stage.forwards(&ready, &back, Verdict::ReplyHere, &back.dnat(cast.known_pod, PORT).hop());
    });
}

#[test]
fn a_fragmented_message_keeps_its_port_or_is_dropped() {
    both(|stage, cast| {
        let shown = begin(stage, cast);
        let cut = |packet: FrameSpec, at: u16, more| {
            packet.with(|packet| (packet.dont_fragment, packet.fragment) = (false, (at, more)))
        };
        let kept = cut(packet(cast.pod, cast.world, PORT, 80).body(DATA), 0, true);
        stage.forwards(&FROM_POD, &kept, Verdict::SnatHere, &kept.snat(cast.egress, PORT).hop());
        stage.drops(&FROM_POD, &cut(sent(cast, DATA), 0, true), Verdict::SctpFragment);
        stage.drops(&FROM_NETDEV, &cut(answered(cast, shown, DATA), 0, true), Verdict::SctpFragment);
        // Later fragments may pass: they are useless without the first one.
        let later = cut(sent(cast, DATA), 5, false);
        stage.forwards(&FROM_POD, &later, Verdict::SnatHere, &later.snat(cast.egress, PORT).hop());
    });
}

#[test]
fn an_established_association_keeps_its_port_or_is_dropped() {
    both(|stage, cast| {
        begin(stage, cast);
        let by = |port, body| packet(cast.known_pod, cast.world, port, 81).body(body);
        let mine = |port, body| packet(cast.pod, cast.world, port, 81).body(body);
        let first = mine(PORT, DATA);
        stage.forwards(&FROM_POD, &first, Verdict::SnatHere, &first.snat(cast.egress, PORT).hop());
        for chunk in [0, 3, 4, 10, 14] {
            stage.drops(&FROM_POD, &by(PORT, Body::Sctp(chunk)), Verdict::PortTaken);
        }
        stage.drops(&FROM_POD, &by(SYSTEM_PORT, DATA), Verdict::PortTaken);
        stage.run_frame(&FROM_POD, &by(PORT, INIT).frame(), Verdict::SnatHere);
        let ran = stage.run_frame(&FROM_POD, &by(SYSTEM_PORT, INIT).frame(), Verdict::SnatHere);
        let shown = sport(cast, &ran.frame);
        assert!(shown >= 1024);
        assert_eq!(ran.frame[L3..], by(SYSTEM_PORT, INIT).snat(cast.egress, shown).hop().frame()[L3..]);
    });
}

#[test]
fn a_header_without_a_chunk_is_truncated() {
    both(|stage, cast| {
        let mut frame = sent(cast, INIT).with(|packet| packet.data = 0).frame();
        stage.select_as(cast.known_pod, cast.pod);
        for left in (1..=16).rev() {
            frame.pop();
            assert_eq!(stage.run_frame(&FROM_POD, &frame, Verdict::Malformed).frame, frame, "{left}");
        }
    });
}

#[test]
fn on_the_node_address_it_gets_a_port_of_the_nat_range() {
    both(|stage, cast| {
        let marked = TestRun { mark: NODE_MARK, ..TO_NETDEV };
        let out = packet(cast.pod, cast.other_node, PORT, 80).body(INIT);
        let ran = stage.run_frame(&marked, &out.frame(), Verdict::NodeSnat);
        let shown = sport(cast, &ran.frame);
        assert!(shown >= 61000, "{shown}");
        assert_eq!((ran.action, ran.frame), (NEXT, out.snat(cast.node, shown).frame()));
        let back = packet(cast.other_node, cast.node, 80, shown).body(DATA).with(|packet| packet.dmac = UPLINK_MAC);
        let ran = stage.run_frame(&FROM_NETDEV, &back.frame(), Verdict::NodeReply);
        assert_eq!((ran.action, ran.frame), (NEXT, back.dnat(cast.pod, PORT).frame()));
    });
}
