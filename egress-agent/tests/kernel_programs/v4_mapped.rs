//! IPv6 packets with IPv4-mapped addresses. The maps store IPv4 addresses v4-mapped, and such a packet must not match
//! the IPv4 host.

use egress_common::abi::Verdict;

use crate::cast::{V4, V6};
use crate::encapsulation::setup::{arrived, configure, settle, takes_out_other_families};
use crate::frames::{Body, SYN, packet};
use crate::icmp_errors::arriving;
use crate::stage::{FROM_NETDEV, FROM_POD, TO_NETDEV, TO_POD, UPLINK_MAC, on_stage};

fn mapped(address: &str) -> String {
    format!("::ffff:{address}")
}

#[test]
fn a_v4_mapped_source_is_not_the_ipv4_pod() {
    on_stage(|stage| {
        let world = mapped(V4.world);
        for pod in [V4.pod, V4.known_pod, V4.remote_pod] {
            let pod = mapped(pod);
            for body in [Body::Udp, Body::Tcp(SYN), Body::EchoRequest] {
                for to in [world.as_str(), V6.world] {
                    let sent = packet(&pod, to, 4000, 80).body(body);
                    stage.drops(&FROM_POD, &sent, Verdict::V4Mapped);
                    stage.drops(&TO_NETDEV, &sent, Verdict::V4Mapped);
                }
                let asked = packet(&world, &pod, 80, 4000).body(body);
                stage.drops(&TO_POD, &asked, Verdict::V4Mapped);
            }
        }
        // A pod's IPv6 address does not lead to an IPv4 host either.
        let sent = packet(V6.pod, &world, 4000, 80);
        stage.drops(&FROM_POD, &sent, Verdict::V4Mapped);
        stage.drops(&TO_NETDEV, &sent, Verdict::V4Mapped);
        assert!(stage.flows.keys().next().is_none() && stage.inbound.keys().next().is_none());
        assert!(stage.mappings().is_empty());
    });
}

#[test]
fn a_v4_mapped_packet_is_no_answer_to_an_ipv4_flow() {
    on_stage(|stage| {
        let sent = packet(V4.pod, V4.world, 4000, 80);
        stage.run_frame(&FROM_POD, &sent.frame(), Verdict::SnatHere);
        let (world, egress) = (mapped(V4.world), mapped(V4.egress));
        let answer = packet(&world, &egress, 80, 4000).with(|packet| packet.dmac = UPLINK_MAC);
        stage.drops(&FROM_NETDEV, &answer, Verdict::V4Mapped);
        // An error to an IPv6 egress IP that quotes an IPv4 flow.
        let quoted = packet(&egress, &world, 4000, 80);
        let error = arriving(V6.router, V6.egress, Body::Icmp([1, 4], [0; 4]), &quoted, 8);
        stage.drops(&FROM_NETDEV, &error, Verdict::IcmpUnmatched);
    });
}

#[test]
fn a_v4_mapped_packet_in_the_overlay_is_not_the_ipv4_pods() {
    on_stage(|stage| {
        settle(stage, &V4);
        configure(stage, &V4);
        let (pod, remote, world) = (mapped(V4.pod), mapped(V4.remote_pod), mapped(V4.world));
        // On older kernels the device decapsulates it, and the same check follows.
        let verdict = if takes_out_other_families() { Verdict::V4Mapped } else { Verdict::NotOurs };
        for inner in [packet(&remote, &world, 4000, 80), packet(&world, &pod, 80, 4000)] {
            let frame = arrived(&V4, V4.here).frame(&inner);
            stage.run_frame(&FROM_NETDEV, &frame, verdict);
        }
        assert!(stage.mappings().is_empty());
    });
}
