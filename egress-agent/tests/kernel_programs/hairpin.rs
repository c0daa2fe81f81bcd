//! A pod that calls an egress IP of the cluster, its own or another object's, served here or elsewhere: refused by name, and
//! the pod is told so by ICMP, whatever the protocol. Nothing is remembered of it, and no packet leaves.

use egress_common::abi::{PolicyEntry, PolicyKey, PolicySlot, Verdict, WhenEmpty};

use crate::cast::{Cast, addr};
use crate::frames::{ACK, Body, Packet, RST, SYN, packet};
use crate::generated_errors::{is_answered, prohibited};
use crate::stage::{FROM_POD, NEXT, Stage, TO_NETDEV, TO_POD, both};

/// All that has an answer of its own: TCP, UDP with and without a checksum, queries, GRE, ESP, IP in IP.
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

/// From whom to which egress IP: its own or another object's, of which the one is served here and the other elsewhere.
fn calls(cast: &Cast) -> [(&'static str, &'static str); 4] {
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

/// Errors and later fragments are answered by nobody (RFC 1122 section 3.2.2), and SCTP not by us: a device might still write
/// its checksum into the quote. They are dropped all the same.
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

/// A packet that came to the uplink past `from_pod`, in whatever way, does not leave either.
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

/// Every protocol that may not be translated at all is refused as what it is: an egress IP is no destination, before it is
/// asked what could be done with the packet.
#[test]
fn the_destination_is_judged_before_the_protocol() {
    both(|stage, cast| {
        for protocol in [51, 135] {
            let call = packet(cast.pod, cast.egress, 4000, 80).body(Body::Other(protocol));
            is_answered(stage, cast, &FROM_POD, &call, cast.node, prohibited(cast));
        }
    });
}

/// Where several objects or nodes serve addresses, each of them is an egress IP of the cluster; and an answer to whoever
/// came in from outside is none of this.
#[test]
fn answers_and_unselected_pods_are_not_refused() {
    both(|stage, cast| {
        let both =
            [PolicySlot::here(addr(cast.egress)), PolicySlot::remote(addr(cast.away_egress), addr(cast.other_node))];
        let policy = PolicyEntry::with_slots(WhenEmpty::Drop, &both).expect("few slots");
        stage.policy.insert(PolicyKey::new(cast.here, cast.family), policy, 0).expect("a policy");
        for to in [cast.egress, cast.away_egress] {
            let call = packet(cast.pod, to, 4000, 80).tcp(SYN);
            is_answered(stage, cast, &FROM_POD, &call, cast.node, prohibited(cast));
            // What nothing selects goes as the host's routes say.
            let other: Packet = packet(cast.known_pod, to, 4000, 80);
            assert_eq!(stage.run_frame(&FROM_POD, &other.frame(), Verdict::NotSelected).action, NEXT);
        }
        // Another selected pod calls by a load balancer outside that keeps the client's address: the answer is none of the
        // pod's own traffic, though what the pod begins itself towards that address is refused.
        stage.passes(&TO_POD, &packet(cast.egress, cast.pod, 80, 4001).tcp(SYN), Verdict::InboundRemembered);
        let answer = packet(cast.pod, cast.egress, 4001, 80).tcp(SYN | ACK);
        assert_eq!(stage.run_frame(&FROM_POD, &answer.frame(), Verdict::InboundReply).action, NEXT);
    });
}
