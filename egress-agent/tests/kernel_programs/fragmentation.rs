//! Replies that exceed the path MTU to their pod and may be fragmented: IPv4 only. A test run shows the second
//! fragment; the first has left by the device, and is checked by lab tests.

use egress_common::abi::{PodEntry, Verdict};

use crate::cast::V4;
use crate::frames::{FrameSpec, L3, checksum, ip, octets, packet};
use crate::stage::{FROM_NETDEV, FROM_POD, MGMT_MAC, POD_MAC, REDIRECT, Stage, UPLINK_MAC, batch, on_stage};

/// MTU to a pod; an IPv4 header and this many bytes fit.
const FIRST: usize = (1400 - 20) & !7;

/// Begins a flow of `pod`, and returns an answer of 1468 bytes.
fn begin(stage: &mut Stage, pod: &str, port: u16) -> FrameSpec {
    stage.run_frame(&FROM_POD, &packet(pod, V4.world, port, 80).frame(), Verdict::SnatHere);
    packet(V4.world, V4.egress, 80, port).with(|packet| {
        (packet.dmac, packet.dont_fragment, packet.data) = (UPLINK_MAC, false, 1440);
    })
}

#[test]
fn the_second_fragment_follows_the_first() {
    on_stage(|stage| {
        let answer = begin(stage, V4.pod, 4000);
        let whole = answer.dnat(V4.pod, 4000).hop().frame();
        let ran = stage.run_frame(&FROM_NETDEV, &answer.frame(), Verdict::ReplyHere);
        let rest = &whole[L3 + 20 + FIRST..];
        let mut header = whole[L3..L3 + 20].to_vec();
        header[2..4].copy_from_slice(&u16::try_from(20 + rest.len()).expect("a length").to_be_bytes());
        header[6..8].copy_from_slice(&u16::try_from(FIRST / 8).expect("an offset").to_be_bytes());
        header[10..12].copy_from_slice(&[0, 0]);
        let sum = checksum(&header).to_be_bytes();
        header[10..12].copy_from_slice(&sum);
        let expected = [POD_MAC.as_slice(), &MGMT_MAC, &[8, 0], &header, rest].concat();
        assert_eq!((ran.action, ran.frame), (REDIRECT, expected));
    });
}

/// The first fragment would be lost without a resolved neighbour.
#[test]
fn a_pod_without_a_resolved_neighbour_gets_no_fragment() {
    on_stage(|stage| {
        stage.put_pod(V4.early_pod, PodEntry::selected(V4.here, 0));
        let answer = begin(stage, V4.early_pod, 4000);
        stage.drops(&FROM_NETDEV, &answer, Verdict::NoNeighbour);
        batch(&format!("neigh replace {} lladdr 02:00:00:00:02:10 dev ovn-k8s-mp0 nud permanent\n", V4.early_pod));
        assert_eq!(stage.run_frame(&FROM_NETDEV, &answer.frame(), Verdict::ReplyHere).action, REDIRECT);
    });
}

/// Some datapaths drop the short middle fragment that would result.
#[test]
fn a_fragment_is_not_fragmented_again() {
    on_stage(|stage| {
        let answer = begin(stage, V4.pod, 4000).frame();
        for (bits, verdict) in [(0x2000_u16, Verdict::MtuAnswered), (0x2010, Verdict::MtuExceeded)] {
            let mut fragment = answer.clone();
            fragment[L3 + 6..L3 + 8].copy_from_slice(&bits.to_be_bytes());
            stage.run_frame(&FROM_NETDEV, &fragment, verdict);
        }
    });
}

/// The length field is smaller than the frame, which cannot be fragmented.
#[test]
fn a_packet_with_a_wrong_length_is_not_fragmented() {
    on_stage(|stage| {
        let mut frame = begin(stage, V4.pod, 4000).frame();
        frame[L3 + 2..L3 + 4].copy_from_slice(&200_u16.to_be_bytes());
        let ran = stage.run_frame(&FROM_NETDEV, &frame, Verdict::RewriteFailed);
        assert_ne!(ran.action, REDIRECT);
        let ends: [Vec<u8>; 2] = [octets(ip(V4.world)), octets(ip(V4.pod))];
        assert_eq!(ran.frame[L3 + 12..L3 + 20], ends.concat(), "half written, and so dropped");
    });
}
