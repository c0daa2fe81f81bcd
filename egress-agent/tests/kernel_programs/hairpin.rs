//! A pod that sends to an egress IP of the cluster, of its own or another policy, served here or elsewhere: refused
//! with a reason and an ICMP error, for every protocol. No state is created, and no packet leaves.

use egress_common::abi::{PolicyEntry, PolicyEntryKey, PolicySlot, Verdict, WhenEmpty};

use crate::cast::{FamilyAddresses, addr};
use crate::frames::{ACK, Body, FrameSpec, RST, SYN, packet};
use crate::generated_errors::{is_answered, prohibited};
use crate::stage::{FROM_POD, NEXT, Stage, TO_NETDEV, TO_POD, both};

/// Protocols with different answers: TCP, UDP with and without a checksum, queries, GRE, ESP, IP in IP.
const ANSWERED: [Body; 9] = [
    Body::Udp,
    Body::UdpUnsummed,
    Body::Tcp(SYN),
    Body::Tcp(ACK),
    Body::Tcp(RST),
    Body::EchoRequest,
    Body::Other(47),
    Body::Other(50),
    Body::Other(4),
];

/// Senders and egress IPs: of its own or another policy, served here or elsewhere.
fn calls(cast: &FamilyAddresses) -> [(&'static str, &'static str); 4] {
    [
        (cast.pod, cast.egress),
        (cast.pod, cast.away_egress),
        (cast.away_pod, cast.egress),
        (cast.away_pod, cast.away_egress),
    ]
}

fn nothing_is_remembered(stage: &Stage) {
    assert_eq!(stage.entries(), [0; 3], "a mapping, a flow or a connection");
    assert_eq!(stage.datagrams.keys().count(), 0);
}

#[test]
fn a_pod_that_sends_to_an_egress_ip_gets_an_icmp_error() {
    both(|stage, cast| {
        for body in ANSWERED {
            for (pod, to) in calls(cast) {
                let call = packet(pod, to, 4000, 80).body(body);
                is_answered(stage, cast, &FROM_POD, &call, cast.node, prohibited(cast));
            }
        }
        nothing_is_remembered(stage);
    });
}

#[test]
fn packets_with_options_get_an_icmp_error() {
    both(|stage, cast| {
        for body in [Body::Udp, Body::Tcp(SYN), Body::EchoRequest] {
            let call = packet(cast.pod, cast.egress, 4000, 80).body(body).with(|packet| packet.options = 2);
            is_answered(stage, cast, &FROM_POD, &call, cast.node, prohibited(cast));
        }
        nothing_is_remembered(stage);
    });
}

/// Errors and later fragments must not be answered (RFC 1122 section 3.2.2), and SCTP is not answered, because a device
/// might write its checksum into the quote. They are dropped too.
#[test]
fn packets_that_must_not_be_answered_are_dropped() {
    both(|stage, cast| {
        for (pod, to) in calls(cast) {
            let call = packet(pod, to, 4000, 80);
            for quiet in
                [call.clone().body(Body::Unreachable), call.clone().with(|packet| packet.fragment = (20, false))]
            {
                stage.drops(&FROM_POD, &quiet, Verdict::Hairpin);
            }
        }
        nothing_is_remembered(stage);
    });
}

/// A packet that reached the uplink without `from_pod` does not leave either.
#[test]
fn no_packet_to_an_egress_ip_leaves_by_the_uplink() {
    both(|stage, cast| {
        for body in ANSWERED {
            for (pod, to) in calls(cast) {
                stage.drops(&TO_NETDEV, &packet(pod, to, 4000, 80).body(body), Verdict::Hairpin);
            }
        }
        nothing_is_remembered(stage);
    });
}

/// The destination is checked first, so that untranslatable protocols get the same reason.
#[test]
fn the_destination_is_judged_before_the_protocol() {
    both(|stage, cast| {
        for protocol in [51, 135] {
            let call = packet(cast.pod, cast.egress, 4000, 80).body(Body::Other(protocol));
            is_answered(stage, cast, &FROM_POD, &call, cast.node, prohibited(cast));
        }
    });
}

/// Addresses of all policies and nodes are egress IPs of the cluster; answers to inbound connections are not affected.
#[test]
fn answers_and_unselected_pods_are_not_refused() {
    both(|stage, cast| {
        let both =
            [PolicySlot::here(addr(cast.egress)), PolicySlot::remote(addr(cast.away_egress), addr(cast.other_node))];
        let policy = PolicyEntry::with_slots(WhenEmpty::Drop, &both).expect("few slots");
        stage.policy.insert(PolicyEntryKey::new(cast.here, cast.family), policy, 0).expect("a policy");
        for to in [cast.egress, cast.away_egress] {
            let call = packet(cast.pod, to, 4000, 80).tcp(SYN);
            is_answered(stage, cast, &FROM_POD, &call, cast.node, prohibited(cast));
            // An unselected pod's packet follows the host's routes.
            let other: FrameSpec = packet(cast.known_pod, to, 4000, 80);
            assert_eq!(stage.run_frame(&FROM_POD, &other.frame(), Verdict::NotSelected).action, NEXT);
        }
        // Another selected pod connects by an external load balancer that keeps the client's address: the answer
        // passes, although new connections of the pod to that address are refused.
        stage.passes(&TO_POD, &packet(cast.egress, cast.pod, 80, 4001).tcp(SYN), Verdict::InboundRemembered);
        let answer = packet(cast.pod, cast.egress, 4001, 80).tcp(SYN | ACK);
        assert_eq!(stage.run_frame(&FROM_POD, &answer.frame(), Verdict::InboundReply).action, NEXT);
    });
}
