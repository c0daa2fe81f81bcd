//! `from_netdev` and `to_pod`: packets from outside.

use egress_common::abi::{NODE_MARK, NatEntry, Origin, Tuple, Verdict};

use crate::aging::now_ns;
use crate::cast::{FamilyAddresses, addr};
use crate::frames::{ACK, Body, FrameSpec, SYN, packet};
use crate::stage::{
    FROM_NETDEV, FROM_POD, MGMT_MAC, NEXT, POD_MAC, Stage, TO_NETDEV, TO_POD, TestRun, UPLINK_MAC, both,
};

/// As the router sends it to this node.
fn arriving(from: &str, to: &str, sport: u16, dport: u16) -> FrameSpec {
    packet(from, to, sport, dport).with(|packet| packet.dmac = UPLINK_MAC)
}

/// Begins a flow of the pod, and returns its answer.
fn begin(stage: &mut Stage, cast: &FamilyAddresses, port: u16, body: Body) -> FrameSpec {
    let sent = packet(cast.pod, cast.world, port, 80).body(body);
    stage.run_frame(&FROM_POD, &sent.frame(), Verdict::SnatHere);
    answer(cast, port, body)
}

fn answer(cast: &FamilyAddresses, port: u16, body: Body) -> FrameSpec {
    match body {
        Body::EchoRequest => arriving(cast.world, cast.egress, port, 0).body(Body::EchoReply),
        Body::Tcp(_) => arriving(cast.world, cast.egress, 80, port).tcp(SYN | ACK),
        body => arriving(cast.world, cast.egress, 80, port).body(body),
    }
}

#[test]
fn an_answer_goes_to_its_pod() {
    both(|stage, cast| {
        for (port, body) in (4000..).zip([Body::Udp, Body::UdpUnsummed, Body::Tcp(SYN), Body::EchoRequest]) {
            let answer = begin(stage, cast, port, body);
            let expected = answer.dnat(cast.pod, port).hop();
            stage.redirects(&FROM_NETDEV, &answer, Verdict::ReplyHere, &expected);
            stage.redirects(&FROM_NETDEV, &answer, Verdict::ReplyHere, &expected.macs(POD_MAC, MGMT_MAC));
        }
        let count = stage.eip_counters.get(&cast.here, 0).expect("a counter");
        assert_eq!(count.iter().map(|count| count.ingress_packets).sum::<u64>(), 8);
    });
}

#[test]
fn a_changed_port_is_changed_back() {
    both(|stage, cast| {
        for (port, body) in (22..).zip([Body::Udp, Body::Tcp(SYN), Body::EchoRequest]) {
            begin(stage, cast, port, body);
            let (_, made) = stage
                .mappings()
                .into_values()
                .find(|(key, _)| key.saddr == addr(cast.pod) && key.sport() == port)
                .expect("a mapping");
            let shown = made.other.dport();
            assert!(shown >= 1024, "no system port");
            let answer = answer(cast, shown, body).with(|packet| packet.options = 1);
            stage.redirects(&FROM_NETDEV, &answer, Verdict::ReplyHere, &answer.dnat(cast.pod, port).hop());
        }
    });
}

/// Moves the pod of every mapping to another node.
fn move_away(stage: &mut Stage, cast: &FamilyAddresses) {
    for (key, (tuple, mapping)) in stage.mappings() {
        let made = NatEntry::new(mapping.other, Origin::Remote, addr(cast.other_node), mapping.egress_id, now_ns());
        stage.nat.insert(tuple, made.sealed(&tuple), 0).unwrap_or_else(|error| panic!("{key}: {error}"));
    }
}

#[test]
fn an_answer_for_another_nodes_pod_goes_back_through_the_overlay() {
    both(|stage, cast| {
        for (port, body) in (4000..).zip([Body::Udp, Body::Tcp(SYN), Body::EchoRequest]) {
            let answer = begin(stage, cast, port, body);
            move_away(stage, cast);
            stage.redirects(&FROM_NETDEV, &answer, Verdict::ReplyToNode, &answer.dnat(cast.pod, port).hop());
        }
    });
}

#[test]
fn unsolicited_packets_reach_no_pod() {
    both(|stage, cast| {
        let asked = begin(stage, cast, 4000, Body::Udp);
        for (sent, verdict) in [
            (asked.clone().with(|packet| packet.dport = 4001), Verdict::NoNatEntry),
            (asked.clone().with(|packet| packet.sport = 81), Verdict::NoNatEntry),
            (asked.clone().tcp(SYN), Verdict::NoNatEntry),
            (asked.clone().body(Body::EchoRequest), Verdict::NoNatEntry),
            (asked.clone().body(Body::Unreachable), Verdict::IcmpUnmatched),
            (asked.clone().body(Body::Other(51)), Verdict::UnsupportedProtocol),
            (asked.clone().body(Body::Other(17)).with(|packet| packet.data = 1), Verdict::Malformed),
        ] {
            stage.drops(&FROM_NETDEV, &sent, verdict);
        }
        if cast.egress.contains('.') {
            let later = asked.clone().with(|packet| packet.fragment = (9, false));
            stage.drops(&FROM_NETDEV, &later, Verdict::FragmentHeld);
        }
        for (key, (tuple, mapping)) in stage.mappings() {
            let made = NatEntry::new(mapping.other, Origin::Stack, mapping.source_node, 0, now_ns());
            stage.nat.insert(tuple, made.sealed(&tuple), 0).unwrap_or_else(|error| panic!("{key}: {error}"));
        }
        stage.drops(&FROM_NETDEV, &asked, Verdict::BadState);
    });
}

#[test]
fn the_hosts_traffic_is_untouched() {
    both(|stage, cast| {
        let for_host = arriving(cast.world, cast.node, 80, 22).tcp(SYN);
        stage.passes(&FROM_NETDEV, &for_host, Verdict::NotOurs);
        stage.passes(&FROM_NETDEV, &arriving(cast.world, cast.node, 80, 61000), Verdict::NotOurs);
        stage.passes(&FROM_NETDEV, &arriving(cast.world, cast.pod, 80, 61000), Verdict::NotOurs);
        let asked = begin(stage, cast, 4000, Body::Udp);
        let elsewhere = asked.clone().with(|packet| packet.dmac = [2, 9, 9, 9, 9, 9]);
        stage.passes(&FROM_NETDEV, &elsewhere, Verdict::NotOurs);
        stage.passes(&FROM_NETDEV, &asked.with(|packet| packet.ttl = 1), Verdict::TtlExpired);
    });
}

#[test]
fn marked_packets_get_the_node_address_and_answers_are_reversed() {
    both(|stage, cast| {
        for (port, body) in (4000..).zip([Body::Udp, Body::Tcp(SYN), Body::EchoRequest]) {
            let marked = TestRun { mark: NODE_MARK, ..TO_NETDEV };
            let sent = packet(cast.pod, cast.other_node, port, 80).body(body);
            let ran = stage.run_frame(&marked, &sent.frame(), Verdict::NodeSnat);
            let is_ours = |key: &Tuple| key.saddr == addr(cast.pod) && key.sport() == port;
            let (_, made) = stage.mappings().into_values().find(|(key, _)| is_ours(key)).expect("a mapping");
            let shown = made.other.dport();
            assert!((61000..=65535).contains(&shown));
            assert_eq!((ran.action, ran.mark), (NEXT, 0));
            assert_eq!(ran.frame, sent.snat(cast.node, shown).frame(), "the stack has counted the hop");

            let answer = match body {
                Body::EchoRequest => arriving(cast.other_node, cast.node, shown, 0).body(Body::EchoReply),
                body => arriving(cast.other_node, cast.node, 80, shown).body(body),
            };
            let ran = stage.run_frame(&FROM_NETDEV, &answer.frame(), Verdict::NodeReply);
            assert_eq!(ran.action, NEXT);
            assert_eq!(ran.frame, answer.dnat(cast.pod, port).frame());
        }
    });
}

/// An unsolicited datagram to any port changes no source address; only exposed ports count.
#[test]
fn a_datagram_counts_only_where_its_port_is_exposed() {
    both(|stage, cast| {
        stage.configure(|config| config.direct_routing = 0);
        let sprayed = |port| packet(cast.world, cast.pod, 9999, port);
        for port in [1053, 5560, 65535] {
            stage.passes(&TO_POD, &sprayed(port), Verdict::NotOurs);
            let own = packet(cast.pod, cast.world, port, 9999);
            stage.redirects(&FROM_POD, &own, Verdict::SnatHere, &own.snat(cast.egress, port).hop());
        }
        stage.passes(&TO_POD, &packet(cast.world, cast.pod, 9, 9).body(Body::EchoRequest), Verdict::NotOurs);
        stage.expose(cast.pod, 17, 5060);
        stage.passes(&TO_POD, &sprayed(5060), Verdict::InboundRemembered);
        let answer = packet(cast.pod, cast.world, 5060, 9999);
        stage.passes(&FROM_POD, &answer, Verdict::InboundReply);
        stage.passes(&TO_NETDEV, &answer, Verdict::InboundReply);
        // The connection is recorded for a proxy; the pod does not answer it with its own address.
        stage.passes(&TO_POD, &packet(cast.world, cast.pod, 80, 4000).tcp(SYN), Verdict::InboundRemembered);
        let answer = packet(cast.pod, cast.world, 4000, 80).tcp(ACK);
        stage.passes(&FROM_POD, &answer, Verdict::InboundReply);
        stage.drops(&TO_NETDEV, &answer, Verdict::ProgramBypassed);
        stage.configure(|_| ());
    });
}

#[test]
fn connections_from_outside_are_remembered() {
    both(|stage, cast| {
        let syn = packet(cast.world, cast.pod, 80, 4000).tcp(SYN);
        stage.passes(&TO_POD, &syn, Verdict::InboundRemembered);
        stage.passes(&TO_POD, &syn, Verdict::NotOurs);
        stage.passes(&TO_POD, &packet(cast.world, cast.unknown_pod, 80, 4000), Verdict::NotPod);
        stage.passes(&TO_POD, &packet(cast.node, cast.pod, 80, 4000).tcp(SYN), Verdict::NotOurs);
        // Another node's answer must not be marked 1008.
        stage.passes(&TO_POD, &packet(cast.other_node, cast.pod, 80, 4000).tcp(SYN), Verdict::InboundRemembered);
        let answer = packet(cast.pod, cast.world, 4000, 80).tcp(ACK);
        stage.passes(&FROM_POD, &answer, Verdict::InboundReply);

        begin(stage, cast, 5000, Body::Udp);
        stage.passes(&TO_POD, &packet(cast.world, cast.pod, 80, 5000), Verdict::NotOurs);
        stage.passes(&TO_POD, &packet(cast.world, cast.pod, 80, 5001), Verdict::InboundRemembered);
        stage.passes(&FROM_POD, &packet(cast.pod, cast.world, 5001, 80), Verdict::InboundReply);
    });
}
