//! `from_pod`: packets of this node's pods.

use egress_common::abi::{NODE_MARK, OnUnknownPod, Origin, PolicyEntry, PolicyEntryKey, Verdict, WhenEmpty};

use crate::cast::{FamilyAddresses, addr};
use crate::devices::batch;
use crate::frames::{ACK, Body, FrameSpec, SYN, packet};
use crate::stage::{FROM_POD, NEXT, REDIRECT, ROUTER_MAC, Ran, SHOT, TO_NETDEV, UPLINK_MAC, both};

const PROTOCOLS: [Body; 4] = [Body::Udp, Body::UdpUnsummed, Body::Tcp(SYN), Body::EchoRequest];

fn to_world(cast: &FamilyAddresses) -> FrameSpec {
    packet(cast.pod, cast.world, 4000, 80)
}

#[test]
fn a_packet_gets_its_egress_ip_here() {
    both(|stage, cast| {
        for (port, body) in (4000..).zip(PROTOCOLS) {
            let sent = to_world(cast).body(body).with(|packet| packet.sport = port);
            let expected = sent.snat(cast.egress, port).hop();
            // The kernel resolves the neighbour for the first one, and later ones have its link address.
            stage.redirects(&FROM_POD, &sent, Verdict::SnatHere, &expected);
            let direct = expected.clone().macs(ROUTER_MAC, UPLINK_MAC);
            for _ in 0..2 {
                stage.redirects(&FROM_POD, &sent, Verdict::SnatHere, &direct);
            }
        }
        // UDP uses two ports, the other protocols one flow each.
        assert!(stage.mappings().values().all(|(_, mapping)| mapping.origin() == Some(Origin::Here)));
        let count = stage.eip_counters.get(&cast.here, 0).expect("a counter");
        let packets: u64 = count.iter().map(|count| count.egress_packets).sum();
        assert_eq!(packets, 12);
    });
}

#[test]
fn a_taken_source_port_is_replaced() {
    both(|stage, cast| {
        for body in [Body::Udp, Body::Tcp(SYN), Body::EchoRequest] {
            let first = packet(cast.pod, cast.world, 5000, 80).body(body);
            stage.redirects(&FROM_POD, &first, Verdict::SnatHere, &first.snat(cast.egress, 5000).hop());
            stage.select_as(cast.known_pod, cast.pod);
            let second = packet(cast.known_pod, cast.world, 5000, 80).body(body);
            let ran = stage.run_frame(&FROM_POD, &second.frame(), Verdict::SnatHere);
            let (_, made) = stage
                .mappings()
                .into_values()
                .find(|(key, _)| key.saddr == addr(cast.known_pod) && key.protocol == protocol(&second))
                .expect("a mapping");
            assert!(made.other.dport() >= 1024 && made.other.dport() != 5000);
            assert_eq!(ran.frame, second.snat(cast.egress, made.other.dport()).hop().frame());
        }
    });
}

fn protocol(packet: &FrameSpec) -> u8 {
    let at = if packet.from.is_ipv4() { 23 } else { 20 };
    packet.frame()[at]
}

#[test]
fn options_and_odd_lengths_are_translated() {
    both(|stage, cast| {
        for (port, options) in (6000..).zip([1, 2, 4]) {
            for body in PROTOCOLS {
                for data in [0, 1, 2, 999] {
                    let sent = to_world(cast).body(body).with(|packet| {
                        (packet.sport, packet.options, packet.data) = (port, options, data);
                    });
                    let ran = stage.run_frame(&FROM_POD, &sent.frame(), Verdict::SnatHere);
                    let expected = sent.snat(cast.egress, port).hop();
                    assert_eq!(ran.frame[14..], expected.frame()[14..], "{sent:?}");
                }
            }
        }
    });
}

#[test]
fn a_remote_gateway_gets_the_packet_unchanged() {
    both(|stage, cast| {
        for body in PROTOCOLS {
            let sent = packet(cast.away_pod, cast.world, 4000, 80).body(body);
            stage.redirects(&FROM_POD, &sent, Verdict::ToGateway, &sent.clone().hop());
        }
        assert_eq!(stage.nat.iter().count(), 0, "the gateway translates");
    });
}

#[test]
fn other_traffic_is_untouched() {
    both(|stage, cast| {
        let pod = cast.pod;
        for (sent, verdict) in [
            (packet(cast.world, cast.world, 1, 2), Verdict::NotPod),
            (packet(cast.remote_pod, cast.world, 1, 2), Verdict::NotPod),
            (packet(pod, cast.node, 1, 2), Verdict::ToOwnNode),
            (packet(pod, cast.mgmt, 1, 2), Verdict::ToOwnNode),
            (packet(pod, cast.service, 1, 2), Verdict::ToCluster),
            (packet(pod, cast.remote_pod, 1, 2), Verdict::ToCluster),
            (packet(pod, cast.world, 1, 2).tcp(SYN | ACK), Verdict::InboundReply),
            (packet(pod, cast.world, 1, 2).body(Body::EchoReply), Verdict::InboundReply),
            (packet(cast.known_pod, cast.world, 1, 2), Verdict::NotSelected),
            (packet(cast.known_pod, cast.other_node, 1, 2), Verdict::NotSelected),
            (packet(pod, cast.world, 1, 2).with(|packet| packet.ttl = 1), Verdict::TtlExpired),
        ] {
            stage.passes(&FROM_POD, &sent, verdict);
        }
        stage.redirects(
            &FROM_POD,
            &to_world(cast).with(|packet| packet.ttl = 2),
            Verdict::SnatHere,
            &to_world(cast).snat(cast.egress, 4000).with(|packet| packet.ttl = 1),
        );
    });
}

#[test]
fn packets_without_an_egress_ip_are_dropped_with_their_reason() {
    both(|stage, cast| {
        let udp = to_world(cast);
        for (sent, verdict) in [
            (packet(cast.unknown_pod, cast.world, 1, 2), Verdict::UnknownPod),
            (packet(cast.early_pod, cast.world, 1, 2), Verdict::NoPolicy),
            (packet(cast.pending_pod, cast.world, 1, 2), Verdict::NoGateway),
            (packet(cast.pod, cast.other_node, 1, 4794), Verdict::ForgedTunnel),
            (packet(cast.known_pod, cast.node, 1, 4794), Verdict::ForgedTunnel),
            (packet(cast.pod, cast.nowhere, 1, 2), Verdict::NoRoute),
            (udp.clone().body(Body::Other(51)), Verdict::UnsupportedProtocol),
            (udp.clone().body(Body::Other(17)).with(|packet| packet.data = 0), Verdict::Malformed),
            (udp.clone().body(Body::Unreachable), Verdict::IcmpUnmatched),
        ] {
            stage.drops(&FROM_POD, &sent, verdict);
        }
        stage.owned.remove(&cast.here).expect("not owned any more");
        stage.drops(&FROM_POD, &udp, Verdict::NotGateway);
    });
}

#[test]
fn unknown_pods_pass_where_the_configuration_allows() {
    both(|stage, cast| {
        let unknown = packet(cast.unknown_pod, cast.world, 1, 2);
        stage.drops(&FROM_POD, &unknown, Verdict::UnknownPod);
        stage.configure(|config| *config = config.with_on_unknown_pod(OnUnknownPod::Pass));
        stage.passes(&FROM_POD, &unknown, Verdict::UnknownPodPassed);
        stage.configure(|_| ());
    });
}

#[test]
fn a_packet_to_another_node_is_marked() {
    both(|stage, cast| {
        let sent = packet(cast.pod, cast.other_node, 4000, 80);
        let ran = stage.run_frame(&FROM_POD, &sent.frame(), Verdict::MarkedNode);
        assert_eq!(ran, Ran::plain(NEXT, sent.frame(), NODE_MARK));
    });
}

#[test]
fn a_flow_that_lost_its_address_is_reset() {
    both(|stage, cast| {
        let sent = to_world(cast).tcp(ACK);
        stage.run_frame(&FROM_POD, &sent.frame(), Verdict::SnatHere);
        let (key, mut flow) = stage
            .flows
            .iter()
            .map(|entry| entry.expect("a flow"))
            .find(|(key, _)| key.saddr == addr(cast.pod))
            .expect("a flow");
        flow.address = addr(cast.away_egress);
        stage.flows.insert(key, flow.sealed(&key), 0).expect("a flow");
        stage.run_frame(&FROM_POD, &sent.frame(), Verdict::CutAnswered);
        let second = to_world(cast).tcp(SYN);
        assert_eq!(stage.run_frame(&FROM_POD, &second.frame(), Verdict::SnatHere).action, REDIRECT);
    });
}

#[test]
fn a_flow_whose_port_is_taken_is_reset() {
    both(|stage, cast| {
        stage.select_as(cast.known_pod, cast.pod);
        stage.run_frame(&FROM_POD, &to_world(cast).tcp(SYN).frame(), Verdict::SnatHere);
        let running = packet(cast.known_pod, cast.world, 4000, 80).tcp(ACK);
        stage.run_frame(&FROM_POD, &running.frame(), Verdict::CutAnswered);
    });
}

#[test]
fn fragments_follow_the_first_fragment() {
    both(|stage, cast| {
        let whole = to_world(cast).with(|packet| (packet.data, packet.dont_fragment) = (1000, false));
        let later = whole.clone().with(|packet| packet.fragment = (100, false));
        let first = whole.with(|packet| packet.fragment = (0, true));
        for sent in [first, later] {
            let ran = stage.run_frame(&FROM_POD, &sent.frame(), Verdict::SnatHere);
            assert_eq!(ran.frame[14..], sent.snat(cast.egress, 4000).hop().frame()[14..]);
        }
        assert_eq!(stage.flows.iter().count(), if cast.egress.contains(':') { 2 } else { 1 }, "one flow each");
    });
}

#[test]
fn without_an_assigned_address_the_policy_decides() {
    both(|stage, cast| {
        let sent = packet(cast.pending_pod, cast.world, 1, 2);
        for (when, verdict) in
            [(WhenEmpty::NodeAddress, Verdict::NodeAddress), (WhenEmpty::NotListed, Verdict::FamilyNotListed)]
        {
            let key = PolicyEntryKey::new(cast.pending, cast.family);
            stage.policy.insert(key, PolicyEntry::empty(when), 0).expect("a policy");
            stage.passes(&FROM_POD, &sent, verdict);
            if verdict == Verdict::FamilyNotListed {
                stage.passes(&TO_NETDEV, &sent, verdict);
            } else {
                // No stack has translated it.
                let ran = stage.run_frame(&TO_NETDEV, &sent.frame(), Verdict::NodeSnat);
                assert_eq!(ran.action, NEXT);
                let source = if cast.node.contains(':') { 22..38 } else { 26..30 };
                assert_eq!(ran.frame[source.clone()], packet(cast.node, cast.world, 1, 2).frame()[source]);
            }
        }
    });
}

#[test]
fn a_tunnel_port_after_many_extension_headers_is_found() {
    both(|stage, cast| {
        if cast.egress.contains('.') {
            return;
        }
        let forged = packet(cast.known_pod, cast.other_node, 1, 4794);
        for count in [1, 6, 7, 20] {
            let mut frame = forged.frame();
            // Destination options, each with nothing but padding; the last says that UDP follows.
            let mut chain = [60, 0, 1, 4, 0, 0, 0, 0].repeat(count);
            let last = chain.len() - 8;
            chain[last] = 17;
            frame[20] = 60;
            let length = u16::try_from(frame.len() - 54 + chain.len()).expect("a length");
            frame[18..20].copy_from_slice(&length.to_be_bytes());
            frame.splice(54..54, chain);
            for run in [FROM_POD, TO_NETDEV] {
                assert_eq!(stage.run_frame(&run, &frame, Verdict::ForgedTunnel).action, SHOT, "{count} headers");
            }
        }
    });
}

#[test]
fn other_protocols_pass() {
    both(|stage, cast| {
        let frame = to_world(cast).frame();
        let frame = [&frame[..12], &[0x88, 0xb5], &frame[14..]].concat();
        let ran = stage.run_frame(&FROM_POD, &frame, Verdict::NotIp);
        assert_eq!(ran, Ran::plain(NEXT, frame, 0));
    });
}

/// The kernel's lookup returns a route's MTU only if it is locked.
#[test]
fn a_locked_route_mtu_counts() {
    both(|stage, cast| {
        let to = if cast.egress.contains(':') { "2001:db8::/64" } else { "198.51.100.0/24" };
        let sent = to_world(cast).with(|packet| packet.data = 1300);
        for (generation, size, verdict) in
            [(2, "", Verdict::SnatHere), (3, "mtu lock 1300", Verdict::MtuAnswered), (4, "mtu 1300", Verdict::SnatHere)]
        {
            batch(&format!("route replace {to} via {} {size}\n", cast.router));
            stage.configure(|config| config.route_generation = generation);
            stage.run_frame(&FROM_POD, &sent.frame(), verdict);
        }
    });
}
