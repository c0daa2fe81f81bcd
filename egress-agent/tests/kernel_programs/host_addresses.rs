//! An egress IP that the node has itself: flows of pods get the ports that the host leaves to NAT, they come back, so do those
//! of packets with the mark, and everything else is the host's.

use egress_common::abi::{NODE_MARK, PolicySlot, PortRange, Tuple, Verdict};

use crate::cast::{FamilyAddresses, addr};
use crate::frames::{ACK, Body, FrameSpec, RST, SYN, packet};
use crate::icmp_errors::arriving;
use crate::resets::put_slots;
use crate::stage::{FROM_NETDEV, FROM_POD, Stage, TO_NETDEV, UPLINK_MAC, both};
use crate::test_run::TestRun;

fn to_node(cast: &FamilyAddresses, sport: u16, dport: u16) -> FrameSpec {
    packet(cast.world, cast.node, sport, dport).with(|packet| packet.dmac = UPLINK_MAC)
}

/// The pod's policy has the node's own address.
fn use_own(stage: &mut Stage, cast: &FamilyAddresses) {
    stage.use_own(cast.here, cast.node);
    put_slots(stage, cast, &[PolicySlot::here(addr(cast.node))]);
}

/// The port of a flow at the node's address.
fn shown(stage: &Stage, pod: &str, sport: u16) -> u16 {
    let is_flow = |key: &Tuple| key.saddr == addr(pod) && key.sport() == sport;
    let (_, made) = stage.mappings().into_values().find(|(key, _)| is_flow(key)).expect("a NAT entry");
    assert!((61000..=65535).contains(&made.other.dport()), "{made:?}");
    made.other.dport()
}

#[test]
fn flows_of_pods_and_marked_packets_come_back_to_their_pods() {
    both(|stage, cast| {
        use_own(stage, cast);
        for (port, body) in (4000..).zip([Body::Udp, Body::Tcp(SYN), Body::EchoRequest, Body::Sctp(1)]) {
            let sent = packet(cast.pod, cast.world, port, 80).body(body);
            let ran = stage.run_frame(&FROM_POD, &sent.frame(), Verdict::SnatHere);
            let port_there = shown(stage, cast.pod, port);
            assert_eq!(ran.frame, sent.snat(cast.node, port_there).hop().frame());
            let answer = match body {
                Body::EchoRequest => to_node(cast, port_there, 0).body(Body::EchoReply),
                Body::Tcp(_) => to_node(cast, 80, port_there).tcp(SYN | ACK),
                Body::Sctp(_) => to_node(cast, 80, port_there).body(Body::Sctp(2)),
                _ => to_node(cast, 80, port_there),
            };
            stage.redirects(&FROM_NETDEV, &answer, Verdict::ReplyHere, &answer.dnat(cast.pod, port).hop());
        }
        let kind = if cast.node.contains(':') { [1, 4] } else { [3, 3] };
        let sent = packet(cast.node, cast.world, shown(stage, cast.pod, 4000), 80);
        let error = arriving(cast.router, cast.node, Body::Icmp(kind, [0; 4]), &sent, 8);
        stage.run_frame(&FROM_NETDEV, &error.frame(), Verdict::ReplyHere);

        // The same destination and port: one range serves both.
        let marked = TestRun { mark: NODE_MARK, ..TO_NETDEV };
        let sent = packet(cast.pod, cast.other_node, 4000, 80);
        stage.run_frame(&marked, &sent.frame(), Verdict::NodeSnat);
        let is_marked = |key: &Tuple| key.saddr == addr(cast.pod) && key.daddr == addr(cast.other_node);
        let (_, made) = stage.mappings().into_values().find(|(key, _)| is_marked(key)).expect("a NAT entry");
        let answer = packet(cast.other_node, cast.node, 80, made.other.dport());
        let answer = answer.with(|packet| (packet.dmac, packet.ttl) = (UPLINK_MAC, 1));
        let ran = stage.run_frame(&FROM_NETDEV, &answer.frame(), Verdict::NodeReply);
        assert_eq!(ran.frame, answer.dnat(cast.pod, 4000).frame());
    });
}

#[test]
fn all_else_is_the_hosts() {
    both(|stage, cast| {
        use_own(stage, cast);
        stage.run_frame(&FROM_POD, &packet(cast.pod, cast.world, 4000, 80).frame(), Verdict::SnatHere);
        let fragment = |whole: FrameSpec, fragment| {
            whole.with(|packet| (packet.fragment, packet.dont_fragment) = (fragment, false))
        };
        let kind = if cast.node.contains(':') { [1, 4] } else { [3, 3] };
        let client = to_node(cast, 5000, 22);
        for packet in [
            client.clone(),
            client.clone().tcp(SYN),
            client.clone().tcp(ACK),
            client.clone().tcp(RST),
            to_node(cast, 5000, 61_000).tcp(SYN),
            client.clone().body(Body::Sctp(1)),
            client.clone().body(Body::Other(47)),
            to_node(cast, 4002, 0).body(Body::EchoRequest),
            to_node(cast, 4003, 0).body(Body::EchoReply),
            arriving(cast.router, cast.node, Body::Icmp(kind, [0; 4]), &packet(cast.node, cast.world, 22, 80), 8),
            fragment(client.clone(), (0, true)),
            fragment(client.clone(), (16, false)),
            fragment(client.clone(), (16, false)).with(|packet| packet.number = 9),
        ] {
            stage.passes(&FROM_NETDEV, &packet, Verdict::NotOurs);
        }
        assert_eq!(stage.awaited.keys().count(), 0, "nothing waits");
        // What the host sends with it is its own too.
        stage.passes(&TO_NETDEV, &packet(cast.node, cast.world, 22, 5000).tcp(ACK), Verdict::NotOurs);
        // A tunnel of the node may end there.
        let gre = packet(cast.pod, cast.world, 0, 0).body(Body::Other(47));
        stage.drops(&FROM_POD, &gre, Verdict::ProtocolTaken);
    });
}

#[test]
fn a_host_that_leaves_no_port_to_nat_serves_none_of_it() {
    both(|stage, cast| {
        use_own(stage, cast);
        stage.configure(|config| config.node_ports = PortRange { first: 0, last: 0 });
        stage.drops(&FROM_POD, &packet(cast.pod, cast.world, 4000, 80), Verdict::NoNodeAddress);
    });
}

/// The node has lost the address: another host may have it.
#[test]
fn nothing_is_translated_to_an_address_that_the_node_lacks() {
    both(|stage, cast| {
        use_own(stage, cast);
        stage.run_frame(&FROM_POD, &packet(cast.pod, cast.world, 4000, 80).frame(), Verdict::SnatHere);
        let port = shown(stage, cast.pod, 4000);
        stage.use_own_on(0, cast.here, cast.node);
        for port in [4000, 4001] {
            stage.drops(&FROM_POD, &packet(cast.pod, cast.world, port, 80), Verdict::NotGateway);
        }
        let answer = to_node(cast, 80, port);
        stage.redirects(&FROM_NETDEV, &answer, Verdict::ReplyHere, &answer.dnat(cast.pod, 4000).hop());
        stage.use_own(cast.here, cast.node);
        stage.run_frame(&FROM_POD, &packet(cast.pod, cast.world, 4000, 80).frame(), Verdict::SnatHere);
        assert_eq!(shown(stage, cast.pod, 4000), port, "the flow continues");
    });
}
