//! VLAN tags, by real packets: the kernel strips the first one before a program runs, and a VLAN device leaves its own
//! to the lower device; a test run supports neither.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use aya::programs::TcAttachType;
use egress_common::abi::Verdict;

use crate::cast::{FamilyAddresses, V4};
use crate::encapsulation::setup::seal;
use crate::frames::{FrameSpec, SYN, packet};
use crate::from_overlay::{FarEnd, HookPoint, arrives, is, on_devices, wrapped};
use crate::slow_guest::patience;
use crate::stage::{MGMT_MAC, POD_MAC, ROUTER_MAC, UPLINK_MAC, batch};

const PLACES: &[HookPoint] = &[
    ("from_pod", "ovn-k8s-mp0", TcAttachType::Ingress),
    ("to_pod", "ovn-k8s-mp0", TcAttachType::Egress),
    ("from_overlay", "egress0", TcAttachType::Ingress),
    ("from_netdev", "breth0", TcAttachType::Ingress),
    ("to_netdev", "breth0", TcAttachType::Egress),
];

const STEERING: &[HookPoint] = &[("from_pod", "ovn-k8s-mp0", TcAttachType::Ingress)];

/// The frame with these tags, outermost first.
fn tagged(packet: &FrameSpec, tags: &[u16]) -> Vec<u8> {
    let mut frame = packet.frame();
    let tags: Vec<u8> = tags.iter().flat_map(|tag| [[0x81, 0], tag.to_be_bytes()].concat()).collect();
    frame.splice(12..12, tags);
    frame
}

/// Ignores the devices' own neighbour discovery.
fn labels(moved: BTreeMap<&'static str, u64>) -> Vec<&'static str> {
    moved.into_keys().collect()
}

fn from_pod(cast: &FamilyAddresses) -> FrameSpec {
    packet(cast.pod, cast.world, 4000, 80).tcp(SYN).macs(MGMT_MAC, POD_MAC)
}

#[test]
fn tagged_packets_pass_ingress_untouched() {
    on_devices(PLACES, |stage, cast| {
        let to_egress = packet(cast.world, cast.egress, 80, 4000).macs(UPLINK_MAC, ROUTER_MAC);
        for (wire, packet) in [("pods0", from_pod(cast)), ("out0", to_egress)] {
            let arrived = arrives(stage, &FarEnd::of(wire), &tagged(&packet, &[7]));
            assert_eq!(labels(arrived), [Verdict::NotOurs.label()], "{wire} {packet:?}");
        }
    });
}

/// A bridge forwards between devices, with the tag beside the frame as VLAN devices leave it.
#[test]
fn tagged_packets_pass_egress_untouched() {
    on_devices(PLACES, |stage, cast| {
        batch("link add br7 type bridge\nlink add in7 type veth peer name far7\nlink set in7 master br7\n");
        batch("link set br7 up\nlink set in7 up\nlink set far7 up\n");
        let to_pod = packet(cast.world, cast.pod, 81, 4000).tcp(SYN).macs([2, 7, 7, 7, 7, 1], ROUTER_MAC);
        let leaving = from_pod(cast).macs([2, 7, 7, 7, 7, 1], POD_MAC);
        for (device, packet, untagged) in
            [("breth0", leaving, Verdict::ProgramBypassed), ("ovn-k8s-mp0", to_pod, Verdict::InboundRemembered)]
        {
            batch(&format!("link set {device} master br7\n"));
            let (far, before, start) = (FarEnd::of("far7"), stage.counts(), Instant::now());
            let other = packet.clone().with(|packet| (packet.dport, packet.data) = (4001, 99));
            far.send(&tagged(&other, &[7]));
            far.send(&packet.frame());
            // They arrive in order: the second one shows that the first one was processed.
            let mut moved = stage.moved(&before);
            while !moved.contains_key(untagged.label()) && start.elapsed() < patience(Duration::from_secs(2)) {
                std::thread::sleep(Duration::from_millis(1));
                moved = stage.moved(&before);
            }
            let length = u64::try_from(packet.frame().len()).expect("a length");
            assert_eq!(moved.get(untagged.label()), Some(&(1, length)), "{device} {moved:?}");
            batch(&format!("link set {device} nomaster\n"));
        }
        batch("link del br7\nlink del in7\n");
    });
}

#[test]
fn a_tagged_inner_packet_is_malformed() {
    on_devices(PLACES, |stage, cast| {
        let mut frame = wrapped(V4.other_node, cast.here, &packet(cast.remote_pod, cast.world, 4000, 80));
        let inner = frame.len() - packet(cast.remote_pod, cast.world, 4000, 80).frame().len();
        frame.splice(inner + 12..inner + 12, [0x81, 0, 0, 7]);
        for (at, more) in [(16, 4), (38, 4)] {
            let length = u16::from_be_bytes([frame[at], frame[at + 1]]) + more;
            frame[at..at + 2].copy_from_slice(&length.to_be_bytes());
        }
        seal(&mut frame);
        // The outer packet is left to the stack.
        let arrived = arrives(stage, &FarEnd::of("out0"), &frame);
        assert!(arrived.contains_key(Verdict::Malformed.label()), "{arrived:?}");
    });
}

/// The stack strips any number of priority tags, and forwards the inner packet.
#[test]
fn a_pod_packet_with_two_priority_tags_does_not_bypass_the_program() {
    on_devices(STEERING, |stage, cast| {
        let (pods, out) = (FarEnd::of("pods0"), FarEnd::of("out0"));
        for tags in [&[0, 0][..], &[0, 0, 0], &[0x6000, 0]] {
            assert_eq!(arrives(stage, &pods, &tagged(&from_pod(cast), tags)), is(Verdict::Malformed), "{tags:?}");
        }
        assert_eq!(arrives(stage, &pods, &tagged(&from_pod(cast), &[0x6000])), is(Verdict::SnatHere));
        let left = out.next_from(cast.egress).expect("it left by the uplink");
        assert_eq!(left[12..14], from_pod(cast).frame()[12..14], "without the tag");
        assert_eq!(out.next_from(cast.pod), None, "nothing leaves with the pod's address");
    });
}
