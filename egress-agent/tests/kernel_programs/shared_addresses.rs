//! An egress IP that is also an address of a Service: the pods' flows are translated and come back, and everything else is
//! left to the stack.

use std::collections::BTreeSet;

use egress_common::abi::{HandoverStage, Tuple, Verdict};

use crate::cast::{FamilyAddresses, addr};
use crate::clean_maps::ClearableMap as _;
use crate::frames::{ACK, Body, FrameSpec, RST, SYN, packet};
use crate::icmp_errors::arriving;
use crate::stage::{FROM_NETDEV, FROM_POD, Stage, UPLINK_MAC, both};

fn to_address(cast: &FamilyAddresses, sport: u16, dport: u16) -> FrameSpec {
    packet(cast.world, cast.egress, sport, dport).with(|packet| packet.dmac = UPLINK_MAC)
}

/// Flows of the pod from these ports, at the shared address.
fn begin(stage: &mut Stage, cast: &FamilyAddresses) {
    stage.share(cast.here, cast.egress);
    let bodies = [(4000, Body::Udp), (4001, Body::Tcp(SYN)), (4002, Body::EchoRequest), (4003, Body::Sctp(1))];
    for (port, body) in bodies {
        let sent = packet(cast.pod, cast.world, port, 80).body(body);
        stage.redirects(&FROM_POD, &sent, Verdict::SnatHere, &sent.snat(cast.egress, port).hop());
    }
}

#[test]
fn the_pods_flows_come_back() {
    both(|stage, cast| {
        begin(stage, cast);
        for answer in [
            to_address(cast, 80, 4000),
            to_address(cast, 80, 4001).tcp(SYN | ACK),
            to_address(cast, 80, 4003).body(Body::Sctp(2)),
            to_address(cast, 4002, 0).body(Body::EchoReply),
        ] {
            let port = if answer.body == Body::EchoReply { 4002 } else { answer.dport };
            stage.redirects(&FROM_NETDEV, &answer, Verdict::ReplyHere, &answer.dnat(cast.pod, port).hop());
        }
        let kind = if cast.egress.contains(':') { [1, 4] } else { [3, 3] };
        let sent = packet(cast.egress, cast.world, 4000, 80);
        let error = arriving(cast.router, cast.egress, Body::Icmp(kind, [0; 4]), &sent, 8);
        stage.run_frame(&FROM_NETDEV, &error.frame(), Verdict::ReplyHere);
    });
}

#[test]
fn packets_without_a_nat_entry_are_left_alone() {
    both(|stage, cast| {
        begin(stage, cast);
        let fragment = |whole: FrameSpec, fragment| {
            whole.with(|packet| (packet.fragment, packet.dont_fragment) = (fragment, false))
        };
        let kind = if cast.egress.contains(':') { [1, 4] } else { [3, 3] };
        let sent = packet(cast.egress, cast.world, 443, 5000);
        let client = to_address(cast, 5000, 443);
        for packet in [
            client.clone(),
            client.clone().tcp(SYN),
            client.clone().tcp(ACK),
            client.clone().tcp(RST),
            client.clone().body(Body::Sctp(1)),
            client.clone().body(Body::Other(47)),
            to_address(cast, 4002, 0).body(Body::EchoRequest),
            to_address(cast, 4003, 0).body(Body::EchoReply),
            to_address(cast, 0, 0).body(Body::Unreachable),
            arriving(cast.router, cast.egress, Body::Icmp(kind, [0; 4]), &sent, 8),
            fragment(client.clone(), (0, true)),
            fragment(client.clone(), (16, false)),
            // Its first one has not been seen: it is not held.
            fragment(client.clone(), (16, false)).with(|packet| packet.number = 9),
        ] {
            stage.passes(&FROM_NETDEV, &packet, Verdict::NotOurs);
        }
        assert_eq!(stage.awaited.keys().count(), 0, "nothing waits");
        // As soon as it is this node's alone, they are dropped.
        stage.own(cast.here, cast.egress);
        stage.drops(&FROM_NETDEV, &client, Verdict::NoNatEntry);
        stage.drops(&FROM_NETDEV, &to_address(cast, 4002, 0).body(Body::EchoRequest), Verdict::NoNatEntry);
    });
}

/// The fragments of a reply, in order, with an identification that a client uses afterwards.
#[test]
fn fragments_follow_their_first_one() {
    both(|stage, cast| {
        begin(stage, cast);
        let pieces = |whole: FrameSpec| {
            [(0, true), (16, false)].map(|fragment| {
                let whole = whole.clone();
                whole.with(|packet| (packet.fragment, packet.data, packet.dont_fragment) = (fragment, 120, false))
            })
        };
        for reply in pieces(to_address(cast, 80, 4000)) {
            stage.run_frame(&FROM_NETDEV, &reply.frame(), Verdict::ReplyHere);
        }
        for client in pieces(to_address(cast, 5000, 443)) {
            stage.passes(&FROM_NETDEV, &client, Verdict::NotOurs);
        }
    });
}

/// A client's connection could have the same tuple.
#[test]
fn ports_of_the_service_are_not_given() {
    both(|stage, cast| {
        stage.share(cast.here, cast.egress);
        for (protocol, body) in [(6, Body::Tcp(SYN)), (17, Body::Udp)] {
            for port in 2000..2100 {
                stage.expose(cast.egress, protocol, port);
            }
            let sent = |port| packet(cast.pod, cast.world, port, 80).body(body).frame();
            stage.run_frame(&FROM_POD, &sent(1999), Verdict::SnatHere);
            for port in 2000..2010 {
                stage.run_frame(&FROM_POD, &sent(port), Verdict::SnatHere);
            }
            let outside = |key: &Tuple| key.protocol == protocol && key.daddr == addr(cast.egress);
            let given: BTreeSet<u16> =
                stage.mappings().into_values().filter(|(key, _)| outside(key)).map(|(key, _)| key.dport()).collect();
            assert_eq!(given.len(), 11);
            assert!(given.contains(&1999) && !given.iter().any(|port| (2000..2100).contains(port)), "{given:?}");
            // At an address that is not shared, they are its pods'.
            stage.own(cast.here, cast.egress);
            stage.redirects(
                &FROM_POD,
                &packet(cast.pod, cast.world, 2050, 81).body(body),
                Verdict::SnatHere,
                &packet(cast.egress, cast.world, 2050, 81).body(body).hop(),
            );
            stage.share(cast.here, cast.egress);
        }
        let running = packet(cast.pod, cast.world, 2050, 82).tcp(ACK);
        stage.run_frame(&FROM_POD, &running.frame(), Verdict::CutAnswered);
        let ping = packet(cast.pod, cast.world, 2050, 0).body(Body::EchoRequest);
        stage.redirects(&FROM_POD, &ping, Verdict::SnatHere, &ping.snat(cast.egress, 2050).hop());
    });
}

/// A search among few free ports, by the loop in the kernel.
#[test]
fn a_search_finds_the_last_port_beside_a_service() {
    both(|stage, cast| {
        stage.share(cast.here, cast.egress);
        for port in (1024..=u16::MAX).filter(|port| ![1024, 40_000].contains(port)) {
            stage.expose(cast.egress, 17, port);
        }
        let sent = |port| packet(cast.pod, cast.world, port, 80);
        for port in [53, 54] {
            stage.run_frame(&FROM_POD, &sent(port).frame(), Verdict::SnatHere);
        }
        stage.drops(&FROM_POD, &sent(55), Verdict::PortsExhausted);
        stage.exposed.empty();
    });
}

/// Each of the two nodes serves the clients that arrive there; all else may be for a flow of the other node.
#[test]
fn a_hand_over_passes_on_all_but_the_services_ports() {
    both(|stage, cast| {
        begin(stage, cast);
        for protocol in [6, 17] {
            stage.expose(cast.egress, protocol, 443);
        }
        stage.hand_over(cast, HandoverStage::Leaving);
        stage.owned.remove(&cast.here).expect("it is owned");
        let kind = if cast.egress.contains(':') { [1, 4] } else { [3, 3] };
        let about = |port| {
            arriving(cast.router, cast.egress, Body::Icmp(kind, [0; 4]), &packet(cast.egress, cast.world, port, 80), 8)
        };
        // 4009: a flow that the new node alone knows.
        for answer in [to_address(cast, 80, 4000), to_address(cast, 80, 4009), about(4000), about(4009)] {
            stage.run_frame(&FROM_NETDEV, &answer.frame(), Verdict::HandedOver);
        }
        for client in [to_address(cast, 5000, 443).tcp(SYN), to_address(cast, 5000, 443), about(443)] {
            stage.passes(&FROM_NETDEV, &client, Verdict::NotOurs);
        }
        assert!(stage.owned_addr.get(&addr(cast.egress), 0).expect("it stays").is_shared());
        stage.share(cast.here, cast.egress);
        stage.hand_over(cast, HandoverStage::Open);
        stage.run_frame(&FROM_NETDEV, &to_address(cast, 80, 4000).frame(), Verdict::ReplyHere);
        stage.run_frame(&FROM_NETDEV, &to_address(cast, 80, 4009).frame(), Verdict::HandedOver);
        stage.passes(&FROM_NETDEV, &to_address(cast, 5000, 443).tcp(SYN), Verdict::NotOurs);
    });
}
