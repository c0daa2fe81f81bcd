//! ICMP errors that the programs generate, byte by byte.

use egress_common::abi::{Addr, Family, Verdict};

use crate::cast::FamilyAddresses;
use crate::frames::{ACK, Body, FrameSpec, L3, SYN, checksum, ip, octets, packet};
use crate::stage::{FROM_NETDEV, FROM_POD, REDIRECT, Ran, Stage, TestRun, UPLINK_MAC, both};

/// The error to `packet`'s sender: its link addresses swapped, the quote's transport checksum left to `quoted`.
fn error(cast: &FamilyAddresses, packet: &FrameSpec, from: &str, head: [u8; 8], quote: &[u8]) -> Vec<u8> {
    let (from, to) = (octets(ip(from)), octets(packet.from));
    let mut icmp = [head.as_slice(), quote].concat();
    let length = u16::try_from(icmp.len()).expect("a length");
    let mut frame = [packet.smac, packet.dmac].concat();
    let mut covered = Vec::new();
    match cast.family {
        Family::V4 => {
            let mut header = vec![0x45, 0xc0];
            header.extend((20 + length).to_be_bytes());
            header.extend([0, 0, 0, 0, 64, 1, 0, 0]);
            header.extend([from, to].concat());
            let sum = checksum(&header).to_be_bytes();
            header[10..12].copy_from_slice(&sum);
            frame.extend([0x08, 0x00]);
            frame.extend(header);
        }
        Family::V6 => {
            frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
            frame.extend(length.to_be_bytes());
            frame.extend([58, 64]);
            let addresses = [from, to].concat();
            frame.extend(&addresses);
            covered.extend(addresses);
            covered.extend([0, 58]);
            covered.extend(length.to_be_bytes());
        }
    }
    covered.extend(&icmp);
    let sum = checksum(&covered).to_be_bytes();
    icmp[2..4].copy_from_slice(&sum);
    frame.extend(icmp);
    frame
}

fn too_big(cast: &FamilyAddresses, mtu: u16) -> [u8; 8] {
    let [high, low] = mtu.to_be_bytes();
    match cast.family {
        Family::V4 => [3, 4, 0, 0, 0, 0, high, low],
        Family::V6 => [2, 0, 0, 0, 0, 0, high, low],
    }
}

pub(crate) fn prohibited(cast: &FamilyAddresses) -> [u8; 8] {
    match cast.family {
        Family::V4 => [3, 13, 0, 0, 0, 0, 0, 0],
        Family::V6 => [1, 1, 0, 0, 0, 0, 0, 0],
    }
}

/// Runs the packet and compares the answer. The quote is the original packet, except the transport checksum of TCP and
/// UDP, which is taken from the answer.
pub(crate) fn is_answered(
    stage: &mut Stage,
    cast: &FamilyAddresses,
    run: &TestRun,
    packet: &FrameSpec,
    from: &str,
    head: [u8; 8],
) {
    let verdict = if head == prohibited(cast) { Verdict::HairpinAnswered } else { Verdict::MtuAnswered };
    let ran = stage.run_frame(run, &packet.frame(), verdict);
    let header = if cast.family == Family::V4 { 20 } else { 40 };
    let quoted = header + 8 * usize::from(packet.options) + 20;
    let mut quote = packet.frame()[L3..L3 + quoted].to_vec();
    let quote_at = L3 + header + 8;
    let sum_at = match packet.body {
        Body::Tcp(_) => Some(quoted - 20 + 16),
        Body::Udp | Body::UdpUnsummed => Some(quoted - 20 + 6),
        _ => None,
    };
    if let (Some(at), true) = (sum_at, ran.frame.len() >= quote_at + quoted) {
        quote[at..at + 2].copy_from_slice(&ran.frame[quote_at + at..quote_at + at + 2]);
    }
    let expected = error(cast, packet, from, head, &quote);
    assert_eq!(ran, Ran::plain(REDIRECT, expected, 0), "{packet:?}");
}

const BODIES: [Body; 4] = [Body::Udp, Body::UdpUnsummed, Body::Tcp(ACK), Body::EchoRequest];

fn large(from: &str, to: &str, body: Body) -> FrameSpec {
    packet(from, to, 4000, 80).body(body).with(|packet| packet.data = 1600)
}

#[test]
fn a_pod_gets_packet_too_big_for_the_uplink_and_the_overlay() {
    both(|stage, cast| {
        for body in BODIES {
            for options in [0, 1] {
                let sized = |packet: FrameSpec| packet.with(|packet| packet.options = options);
                let here = sized(large(cast.pod, cast.world, body));
                is_answered(stage, cast, &FROM_POD, &here, cast.node, too_big(cast, 1500));
                let away = sized(large(cast.away_pod, cast.world, body));
                is_answered(stage, cast, &FROM_POD, &away, cast.node, too_big(cast, 1450));
            }
        }
    });
}

#[test]
fn the_largest_packet_that_fits_goes() {
    both(|stage, cast| {
        let header = if cast.family == Family::V4 { 20 } else { 40 };
        for (pod, mtu, verdict) in [(cast.pod, 1500, Verdict::SnatHere), (cast.away_pod, 1450, Verdict::ToGateway)] {
            let sized =
                |length: usize| packet(pod, cast.world, 4000, 80).with(|packet| packet.data = length - header - 8);
            stage.run_frame(&FROM_POD, &sized(mtu).frame(), verdict);
            stage.run_frame(&FROM_POD, &sized(mtu + 1).frame(), Verdict::MtuAnswered);
            // A GSO packet counts by its segments.
            let many = sized(3000).tcp(ACK);
            let segments = u32::try_from(mtu - header - 20).expect("a size");
            stage.run_frame(&TestRun { gso_size: segments, ..FROM_POD }, &many.frame(), verdict);
            stage.run_frame(&TestRun { gso_size: segments + 1, ..FROM_POD }, &many.frame(), Verdict::MtuAnswered);
        }
    });
}

#[test]
fn the_peer_gets_packet_too_big_for_the_pod() {
    both(|stage, cast| {
        for (port, body) in (4000..).zip([Body::Udp, Body::Tcp(SYN), Body::EchoRequest]) {
            let sent = packet(cast.pod, cast.world, port, 80).body(body);
            stage.run_frame(&FROM_POD, &sent.frame(), Verdict::SnatHere);
            let answer = match body {
                Body::EchoRequest => packet(cast.world, cast.egress, port, 0).body(Body::EchoReply),
                body => packet(cast.world, cast.egress, 80, port).body(body),
            };
            let answer = answer.with(|packet| (packet.data, packet.dmac) = (1450, UPLINK_MAC));
            is_answered(stage, cast, &FROM_NETDEV, &answer, cast.egress, too_big(cast, 1400));
        }
    });
}

#[test]
fn errors_and_nodes_without_an_address_get_no_answer() {
    both(|stage, cast| {
        let quiet = packet(cast.pod, cast.egress, 4000, 80).body(Body::Unreachable);
        stage.drops(&FROM_POD, &quiet, Verdict::Hairpin);
        stage.configure(|config| (config.node_v4, config.node_v6) = (Addr::UNSPECIFIED, Addr::UNSPECIFIED));
        stage.drops(&FROM_POD, &packet(cast.pod, cast.egress, 4000, 80), Verdict::Hairpin);
        stage.drops(&FROM_POD, &large(cast.pod, cast.world, Body::Udp), Verdict::MtuExceeded);
        stage.drops(&FROM_POD, &large(cast.away_pod, cast.world, Body::Udp), Verdict::MtuExceeded);
        stage.configure(|_| ());
    });
}
