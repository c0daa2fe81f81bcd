//! `to_netdev`: the guard of the uplink.

use aya::programs::TcAttachType;
use egress_common::abi::{NODE_MARK, Verdict};

use crate::frames::{ACK, Body, FrameSpec, RST, SYN, packet};
use crate::from_overlay::{FarEnd, HookPoint, on_devices};
use crate::resets::reset_of;
use crate::stage::{
    FROM_POD, MGMT_MAC, NEXT, POD_MAC, REDIRECT, REDIRECTED, Ran, SHOT, TO_NETDEV, TO_POD, TestRun, UPLINK, WAITING,
    batch, both, now_ns,
};

const MARKED: TestRun = TestRun { mark: NODE_MARK, ..TO_NETDEV };
const OWN: TestRun = TestRun { ingress_ifindex: 0, ..TO_NETDEV };

#[test]
fn no_pod_leaves_with_its_own_address() {
    both(|stage, cast| {
        for (sent, verdict) in [
            (packet(cast.pod, cast.world, 1, 2), Verdict::ProgramBypassed),
            (packet(cast.pod, cast.world, 1, 2).with(|packet| packet.ttl = 1), Verdict::ProgramBypassed),
            (packet(cast.pod, cast.other_node, 1, 2), Verdict::ProgramBypassed),
            (packet(cast.pod, cast.away_egress, 1, 2), Verdict::Hairpin),
            (packet(cast.pending_pod, cast.world, 1, 2), Verdict::NoGateway),
            (packet(cast.unknown_pod, cast.world, 1, 2), Verdict::UnknownPod),
            (packet(cast.remote_pod, cast.world, 1, 2), Verdict::ForeignPod),
            (packet(cast.node, cast.other_node, 1, 4794), Verdict::ForgedTunnel),
        ] {
            stage.drops(&TO_NETDEV, &sent, verdict);
        }
    });
}

/// The agent of such a node could never learn to remove the entry.
#[test]
fn no_entry_of_a_pod_judges_what_the_node_sends() {
    both(|stage, cast| {
        for wrong in [cast.node, cast.egress] {
            stage.select_as(wrong, cast.pod);
            for sent in [packet(wrong, cast.world, 1, 2), packet(wrong, cast.other_node, 1, 6443).tcp(SYN)] {
                stage.passes(&OWN, &sent, Verdict::NotOurs);
            }
        }
        let masqueraded = packet(cast.node, cast.other_node, 4000, 80);
        stage.passes(&TO_NETDEV, &masqueraded, Verdict::NotOurs);
        let ran = stage.run_frame(&MARKED, &masqueraded.frame(), Verdict::NodeSnatDone);
        assert_eq!(ran, Ran::plain(NEXT, masqueraded.frame(), 0));
        stage.drops(&OWN, &packet(cast.pod, cast.world, 1, 2), Verdict::ProgramBypassed);
    });
}

#[test]
fn other_traffic_leaves_untouched() {
    both(|stage, cast| {
        let question = packet(cast.world, cast.pod, 2, 1).tcp(SYN);
        stage.drops(&TO_NETDEV, &packet(cast.pod, cast.world, 1, 2).tcp(SYN | ACK), Verdict::ProgramBypassed);
        stage.drops(&TO_NETDEV, &packet(cast.pod, cast.world, 3, 3).body(Body::EchoReply), Verdict::ProgramBypassed);
        stage.passes(&TO_POD, &question, Verdict::InboundRemembered);
        for (sent, verdict) in [
            (packet(cast.known_pod, cast.world, 1, 2), Verdict::NotSelected),
            (packet(cast.pod, cast.world, 1, 2).tcp(SYN | ACK), Verdict::InboundReply),
            (packet(cast.pod, cast.remote_pod, 1, 2), Verdict::ToCluster),
            (packet(cast.remote_pod, cast.other_node, 1, 2), Verdict::NotOurs),
            (packet(cast.node, cast.world, 1, 2), Verdict::NotOurs),
        ] {
            stage.passes(&TO_NETDEV, &sent, verdict);
        }
        stage.passes(&OWN, &packet(cast.node, cast.other_node, 1, 4794), Verdict::NotOurs);
    });
}

/// Also an address of another node. Packets of the node itself and packets that came in by the uplink are no pods'
/// packets.
#[test]
fn no_egress_ip_leaves_that_nat_has_not_written() {
    both(|stage, cast| {
        for source in [cast.egress, cast.away_egress] {
            for spoofed in [packet(source, cast.world, 1, 2), packet(source, cast.world, 1, 2).tcp(SYN)] {
                stage.drops(&TO_NETDEV, &spoofed, Verdict::SpoofedEgressIp);
                stage.drops(&MARKED, &spoofed, Verdict::SpoofedEgressIp);
                stage.passes(&OWN, &spoofed, Verdict::NotOurs);
                stage.passes(&TestRun { ingress_ifindex: UPLINK, ..TO_NETDEV }, &spoofed, Verdict::NotOurs);
            }
        }
        // Redirected packets pass the guard by their priority, which is reset; a wrong one does not count.
        let sent = packet(cast.pod, cast.world, 1, 2);
        let ran = stage.run_frame(&FROM_POD, &sent.frame(), Verdict::SnatHere);
        let signed = TestRun { priority: ran.priority, mark: ran.mark, ..TO_NETDEV };
        let left = stage.run_frame(&signed, &ran.frame, Verdict::NotOurs);
        assert_eq!(left, Ran::plain(NEXT, ran.frame.clone(), 0));
        stage.configure(|config| config.redirected = 0x1234);
        assert_eq!(stage.run_frame(&signed, &ran.frame, Verdict::SpoofedEgressIp).action, SHOT);
        stage.configure(|_| ());
    });
}

/// A masquerade keeps the pod's source port; answers would go to the flow that NAT has given this port.
#[test]
fn a_masqueraded_packet_does_not_match_a_nat_flow() {
    both(|stage, cast| {
        for body in [Body::Udp, Body::EchoRequest] {
            let sent = packet(cast.pod, cast.other_node, 9, 9).body(body);
            let known = stage.run_frame(&MARKED, &sent.frame(), Verdict::NodeSnat).frame;
            for run in [TO_NETDEV, MARKED] {
                assert_eq!(stage.run_frame(&run, &known, Verdict::PortTaken).action, SHOT);
            }
            assert_eq!(stage.run_frame(&OWN, &known, Verdict::NotOurs).action, NEXT);
        }
        stage.passes(&TO_NETDEV, &packet(cast.node, cast.other_node, 61_000, 10), Verdict::NotOurs);
    });
}

/// Also during the startup period.
#[test]
fn a_ping_from_outside_and_a_ping_of_the_pod_are_distinct() {
    both(|stage, cast| {
        let now_secs = u32::try_from(now_ns() / 1_000_000_000).expect("years");
        stage.configure(|config| config.following_since_secs = now_secs);
        let ping = |from, to, body| packet(from, to, 9, 9).body(body);
        stage.passes(&TO_POD, &ping(cast.world, cast.pod, Body::EchoRequest), Verdict::InboundRemembered);
        let answer = ping(cast.pod, cast.world, Body::EchoReply);
        stage.passes(&FROM_POD, &answer, Verdict::InboundReply);
        stage.passes(&TO_NETDEV, &answer, Verdict::InboundReply);
        // It has the same identifier as a query from outside.
        let own = ping(cast.pod, cast.world, Body::EchoRequest);
        stage.run_frame(&FROM_POD, &own.frame(), Verdict::SnatHere);
        stage.drops(&TO_NETDEV, &own, Verdict::ProgramBypassed);
        stage.configure(|_| ());
    });
}

#[test]
fn fragments_of_a_ping_reply_leave_as_their_first_fragment() {
    both(|stage, cast| {
        let ping = |from, to, body| packet(from, to, 4000, 4000).body(body);
        let pieces = |packet: FrameSpec| {
            let whole = packet.with(|packet| (packet.data, packet.dont_fragment) = (1000, false));
            [(0, true), (100, false)].map(|piece| whole.clone().with(|packet| packet.fragment = piece))
        };
        stage.passes(&TO_POD, &ping(cast.world, cast.pod, Body::EchoRequest), Verdict::InboundRemembered);
        for answer in pieces(ping(cast.pod, cast.world, Body::EchoReply)) {
            stage.passes(&FROM_POD, &answer, Verdict::InboundReply);
            stage.passes(&TO_NETDEV, &answer, Verdict::InboundReply);
        }
        for own in pieces(ping(cast.pod, cast.world, Body::EchoRequest)) {
            let ran = stage.run_frame(&FROM_POD, &own.frame(), Verdict::SnatHere);
            assert_eq!(ran.frame[14..], own.snat(cast.egress, 4000).hop().frame()[14..]);
        }
    });
}

#[test]
fn a_marked_packet_without_address_or_port_is_dropped() {
    both(|stage, cast| {
        let udp = packet(cast.pod, cast.other_node, 4000, 80);
        stage.drops(&MARKED, &udp.clone().body(Body::Other(51)), Verdict::UnsupportedProtocol);
        stage.configure(|config| (config.node_ports.first, config.node_ports.last) = (0, 0));
        stage.drops(&MARKED, &udp, Verdict::NoNodeAddress);
        stage.configure(|_| ());
    });
}

/// The flow is picked up in mid-stream and its former port is unknown. The reset leaves by the management port.
#[test]
fn a_connection_that_lost_its_port_on_the_node_address_is_reset() {
    both(|stage, cast| {
        let running = packet(cast.pod, cast.other_node, 4000, 80).tcp(ACK);
        for _ in 0..2 {
            let ran = stage.run_frame(&MARKED, &running.frame(), Verdict::CutAnswered);
            assert_eq!((ran.action, ran.mark), (REDIRECT, 0));
            assert_eq!(ran.frame[14..], reset_of(&running)[14..]);
        }
        let piece =
            running.with(|packet| (packet.fragment, packet.data, packet.dont_fragment) = ((0, true), 800, false));
        for unanswered in [packet(cast.pod, cast.other_node, 4000, 80).tcp(RST), piece] {
            stage.drops(&MARKED, &unanswered, Verdict::PortTaken);
        }
    });
}

/// The same with real packets through the host's stack: the answer leaves by another device than the packet.
#[test]
fn the_reset_from_the_uplink_reaches_the_pod() {
    const PLACES: &[HookPoint] =
        &[("from_pod", "ovn-k8s-mp0", TcAttachType::Ingress), ("to_netdev", "breth0", TcAttachType::Egress)];
    on_devices(PLACES, |_, cast| {
        batch(&format!("neigh replace {} lladdr 02:00:00:00:01:03 dev breth0 nud permanent\n", cast.other_node));
        let pods = FarEnd::of("pods0");
        let running = packet(cast.pod, cast.other_node, 4000, 80).tcp(ACK).macs(MGMT_MAC, POD_MAC);
        // The kernel resolves the next hop of the first one; the next one uses the cache.
        for _ in 0..2 {
            pods.send(&running.frame());
            let reset = pods.next_from(cast.other_node).expect("a reset");
            assert_eq!(reset[..12], [POD_MAC, MGMT_MAC].concat());
            assert_eq!(reset[14..], reset_of(&running)[14..]);
        }
    });
}

#[test]
fn a_packet_that_the_stack_translated_loses_the_mark() {
    both(|stage, cast| {
        let sent = packet(cast.node, cast.other_node, 4000, 80);
        let ran = stage.run_frame(&MARKED, &sent.frame(), Verdict::NodeSnatDone);
        assert_eq!(ran, Ran::plain(NEXT, sent.frame(), 0));
    });
}

/// kube-proxy and network policies use other bits of the mark.
#[test]
fn the_mark_is_recognised_among_foreign_bits() {
    both(|stage, cast| {
        let sent = packet(cast.pod, cast.other_node, 4000, 80);
        for others in [0x4000, 0x8000, 0x0001_0000, 0xffff_0000] {
            let run = TestRun { mark: others, ..FROM_POD };
            let ran = stage.run_frame(&run, &sent.frame(), Verdict::MarkedNode);
            assert_eq!((ran.action, ran.mark), (NEXT, others | NODE_MARK));
            let run = TestRun { mark: ran.mark, ..TO_NETDEV };
            let ran = stage.run_frame(&run, &sent.frame(), Verdict::NodeSnat);
            assert_eq!((ran.action, ran.mark), (NEXT, others));
            let translated = packet(cast.node, cast.other_node, 4000, 80);
            let ran = stage.run_frame(&run, &translated.frame(), Verdict::NodeSnatDone);
            assert_eq!(ran, Ran::plain(NEXT, translated.frame(), others));
            stage.drops(&TestRun { mark: others | 0x80, ..TO_NETDEV }, &sent, Verdict::ProgramBypassed);
        }
    });
}

/// Programs redirect only what a device has received, so a socket's priority is not theirs.
#[test]
fn the_redirected_priority_of_a_socket_lets_nothing_pass() {
    both(|stage, cast| {
        let signed = TestRun { priority: REDIRECTED, ..OWN };
        for sent in [packet(cast.pod, cast.world, 1, 2), packet(cast.remote_pod, cast.world, 1, 2)] {
            let received = TestRun { priority: REDIRECTED, ..TO_NETDEV };
            assert_eq!(stage.run_frame(&received, &sent.frame(), Verdict::NotOurs).action, NEXT);
        }
        stage.drops(&signed, &packet(cast.pod, cast.world, 1, 2), Verdict::ProgramBypassed);
        // As the overlay device's packets, which have it from the inner one.
        let ran = stage.run_frame(&signed, &packet(cast.node, cast.other_node, 50_000, 4794).frame(), Verdict::NotOurs);
        assert_eq!((ran.action, ran.priority), (NEXT, 0));
    });
}

#[test]
fn no_priority_of_a_pod_passes_the_management_port() {
    both(|stage, cast| {
        for priority in [7, REDIRECTED, WAITING] {
            let sent = TestRun { priority, ..FROM_POD };
            let ran = stage.run_frame(&sent, &packet(cast.known_pod, cast.world, 1, 2).frame(), Verdict::NotSelected);
            assert_eq!((ran.action, ran.priority), (NEXT, 0));
        }
    });
}

/// The leak guard requires the priority, so exactly the packets left to the stack have it.
#[test]
fn packets_left_to_the_stack_carry_the_seen_priority() {
    both(|stage, cast| {
        let to_world = |from| packet(from, cast.world, 1, 2);
        stage.configure(|config| config.seen = 0x1234);
        for (sent, verdict) in [
            (to_world(cast.known_pod), Verdict::NotSelected),
            (packet(cast.pod, cast.remote_pod, 1, 2), Verdict::ToCluster),
            (packet(cast.pod, cast.other_node, 1, 2), Verdict::MarkedNode),
            (to_world(cast.pod).with(|packet| packet.ttl = 1), Verdict::TtlExpired),
        ] {
            // Decided once, and cached.
            for _ in 0..2 {
                let ran = stage.run_frame(&FROM_POD, &sent.frame(), verdict);
                assert_eq!((ran.action, ran.priority), (NEXT, 0xe67e_1234), "{verdict:?}");
            }
        }
        let snat = stage.run_frame(&FROM_POD, &to_world(cast.pod).frame(), Verdict::SnatHere);
        assert_eq!((snat.action, snat.priority), (REDIRECT, WAITING));
        stage.passes(&TO_NETDEV, &to_world(cast.known_pod), Verdict::NotSelected);
        stage.configure(|config| config.seen = 0);
        stage.passes(&FROM_POD, &to_world(cast.known_pod), Verdict::NotSelected);
        stage.configure(|_| ());
    });
}
