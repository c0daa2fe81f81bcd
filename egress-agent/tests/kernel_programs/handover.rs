//! Hand-over of an address between this node and another one.

use aya::programs::TcAttachType;
use egress_common::abi::{HandoverEntry, HandoverStage, Verdict};

use crate::cast::{FamilyAddresses, V4, addr};
use crate::frames::{ACK, Body, FrameSpec, ip, octets, packet};
use crate::from_overlay::{FarEnd, arrives, is, on_devices, wrapped};
use crate::icmp_errors::arriving;
use crate::stage::{FROM_NETDEV, FROM_POD, REDIRECT, Stage, UPLINK_MAC, both, now_ns};

/// As the agent does it: before or after, this node does not own the address.
fn hand_over(stage: &mut Stage, cast: &FamilyAddresses, course: HandoverStage) {
    stage.hand_over(cast, course);
    stage.owned.remove(&cast.here).expect("it is owned");
}

fn answer(cast: &FamilyAddresses, port: u16) -> FrameSpec {
    packet(cast.world, cast.egress, 80, port).with(|packet| packet.dmac = UPLINK_MAC)
}

/// The node of a third pod subnet, and a pod there.
const THIRD: &str = "172.18.0.4";

#[test]
fn packets_of_a_pod_on_the_old_owner_go_to_the_new_owner() {
    both(|stage, cast| {
        let sent = packet(cast.pod, cast.world, 4000, 80);
        stage.run_frame(&FROM_POD, &sent.frame(), Verdict::SnatHere);
        hand_over(stage, cast, HandoverStage::Leaving);
        let ran = stage.run_frame(&FROM_POD, &sent.frame(), Verdict::HandedOver);
        assert_eq!(ran.action, REDIRECT);
        hand_over_again(stage, cast, HandoverStage::Arriving);
        stage.drops(&FROM_POD, &sent, Verdict::NotGateway);
        stage.handovers.remove(&cast.here).expect("it is there");
        stage.drops(&FROM_POD, &sent, Verdict::NotGateway);
    });
}

fn hand_over_again(stage: &mut Stage, cast: &FamilyAddresses, course: HandoverStage) {
    stage.own(cast.here, cast.egress);
    hand_over(stage, cast, course);
}

/// Both nodes may have NAT entries with the same port.
#[test]
fn answers_go_to_the_new_owner_first() {
    both(|stage, cast| {
        let sent = packet(cast.pod, cast.world, 4000, 80);
        stage.run_frame(&FROM_POD, &sent.frame(), Verdict::SnatHere);
        hand_over(stage, cast, HandoverStage::Leaving);
        stage.run_frame(&FROM_NETDEV, &answer(cast, 4000).frame(), Verdict::HandedOver);
        let ran = stage.run_frame(&FROM_NETDEV, &answer(cast, 4001).frame(), Verdict::HandedOver);
        assert_eq!(ran.action, REDIRECT);
        let pong = answer(cast, 4001).body(Body::EchoReply);
        stage.run_frame(&FROM_NETDEV, &pong.frame(), Verdict::HandedOver);
        stage.handovers.remove(&cast.here).expect("it is there");
        stage.run_frame(&FROM_NETDEV, &answer(cast, 4000).frame(), Verdict::ReplyHere);
        stage.drops(&FROM_NETDEV, &answer(cast, 4001), Verdict::NoNatEntry);
    });
}

/// The writes of the step, one by one: the agent may be killed after each of them.
#[test]
fn an_agent_killed_during_the_step_still_owns_the_address() {
    both(|stage, cast| {
        let sent = packet(cast.pod, cast.world, 4000, 80);
        stage.run_frame(&FROM_POD, &sent.frame(), Verdict::SnatHere);
        let decisions = stage.config.get(&0, 0).expect("the configuration").decisions;
        let number = |stage: &mut Stage, decisions| stage.configure(|config| config.decisions = decisions);
        let writes: [&dyn Fn(&mut Stage); 4] = [
            &|stage| stage.hand_over(cast, HandoverStage::Leaving),
            &|stage| number(stage, 0),
            &|stage| stage.owned.remove(&cast.here).expect("it is owned"),
            &|stage| number(stage, decisions + 1),
        ];
        for (done, write) in writes.iter().enumerate() {
            write(stage);
            let (out, back) = match done {
                0 | 1 => (Verdict::SnatHere, Verdict::ReplyHere),
                _ => (Verdict::HandedOver, Verdict::HandedOver),
            };
            stage.run_frame(&FROM_POD, &sent.frame(), out);
            stage.run_frame(&FROM_NETDEV, &answer(cast, 4000).frame(), back);
            for late in all_kinds(cast, 4000) {
                stage.run_frame(&FROM_NETDEV, &late.frame(), back);
            }
        }
    });
}

/// Packets of the flow with this port: a datagram in two fragments, and an error about a sent packet.
fn all_kinds(cast: &FamilyAddresses, port: u16) -> [FrameSpec; 3] {
    let piece =
        |fragment| answer(cast, port).with(|packet| (packet.fragment, packet.dont_fragment) = (fragment, false));
    let kind = if cast.egress.contains(':') { [1, 4] } else { [3, 3] };
    let sent = packet(cast.egress, cast.world, port, 80);
    [piece((0, true)), piece((16, false)), arriving(cast.router, cast.egress, Body::Icmp(kind, [0; 4]), &sent, 8)]
}

/// A fragment follows its first one, and an error follows the quoted flow.
#[test]
fn fragments_and_errors_follow_their_flow() {
    both(|stage, cast| {
        stage.run_frame(&FROM_POD, &packet(cast.pod, cast.world, 4000, 80).frame(), Verdict::SnatHere);
        hand_over(stage, cast, HandoverStage::Leaving);
        for late in all_kinds(cast, 4000).iter().chain(&all_kinds(cast, 4001)) {
            stage.run_frame(&FROM_NETDEV, &late.frame(), Verdict::HandedOver);
        }
        // The new owner has sent one of the two flows.
        hand_over_again(stage, cast, HandoverStage::Open);
        for late in all_kinds(cast, 4000) {
            stage.run_frame(&FROM_NETDEV, &late.frame(), Verdict::ReplyHere);
        }
        for late in all_kinds(cast, 4001).map(|late| late.with(|packet| packet.number = 9)) {
            stage.run_frame(&FROM_NETDEV, &late.frame(), Verdict::HandedOver);
        }
    });
}

/// A NAT entry from an earlier ownership of the address does not belong to the current flow.
#[test]
fn the_new_owner_passes_answers_to_other_flows_back() {
    both(|stage, cast| {
        // A slow machine may load the next program slowly.
        let begun = now_ns();
        let sent = packet(cast.pod, cast.world, 4000, 80);
        stage.run_frame(&FROM_POD, &sent.frame(), Verdict::SnatHere);
        let since = |stage: &mut Stage, since_ns| {
            let owned = stage.owned.get(&cast.here, 0).expect("owned");
            let moving = HandoverEntry::new(cast.here, HandoverStage::Open, since_ns, addr(V4.other_node), owned);
            stage.handovers.insert(cast.here, moving, 0).expect("a hand-over");
        };
        since(stage, now_ns() + 1_000_000_000);
        stage.run_frame(&FROM_NETDEV, &answer(cast, 4000).frame(), Verdict::HandedOver);
        since(stage, begun - 1_000_000_000);
        stage.run_frame(&FROM_NETDEV, &answer(cast, 4000).frame(), Verdict::ReplyHere);
        stage.run_frame(&FROM_NETDEV, &answer(cast, 4001).frame(), Verdict::HandedOver);
    });
}

/// Two nodes may each take the other for the old owner for a while, and packets must not loop forever.
#[test]
fn a_passed_on_packet_has_one_hop_less() {
    on_the_device(|stage, cast| {
        let wire = FarEnd::of("out0");
        hand_over(stage, cast, HandoverStage::Arriving);
        let mut back = packet(cast.world, cast.egress, 80, 4000).with(|packet| packet.ttl = 3);
        for _ in 0..2 {
            let arrived = arrives(stage, &wire, &wrapped(V4.other_node, cast.here, &back));
            assert_eq!(arrived, is(Verdict::HandedOver));
            back = back.hop();
            assert_eq!(wire.next_from(V4.node).expect("it left by the overlay")[50 + 14..], back.frame()[14..]);
        }
        let arrived = arrives(stage, &wire, &wrapped(V4.other_node, cast.here, &back));
        assert_eq!(arrived, is(Verdict::NotGateway));
    });
}

/// Answers to flows that the new owner has not sent come back to the old owner, which does not pass them on again.
#[test]
fn the_old_owner_accepts_what_the_new_owner_passes_back() {
    on_the_device(|stage, cast| {
        let (wire, pods) = (FarEnd::of("out0"), FarEnd::of("pods0"));
        stage.run_frame(&FROM_POD, &packet(cast.pod, cast.world, 4000, 80).frame(), Verdict::SnatHere);
        hand_over(stage, cast, HandoverStage::Leaving);
        let back = |port| packet(cast.world, cast.egress, 80, port);
        let arrived = arrives(stage, &wire, &wrapped(V4.other_node, cast.here, &back(4000)));
        assert_eq!(arrived, is(Verdict::ReplyHere));
        pods.next_from(cast.world).expect("it went to the pod");
        let arrived = arrives(stage, &wire, &wrapped(V4.other_node, cast.here, &back(4001)));
        assert_eq!(arrived, is(Verdict::NoNatEntry));
    });
}

/// Answers of every kind to flows that the new owner has not sent; if no node has, each is dropped with its reason.
#[test]
fn the_old_owner_accepts_fragments_and_errors_back() {
    on_the_device(|stage, cast| {
        let (wire, pods) = (FarEnd::of("out0"), FarEnd::of("pods0"));
        stage.run_frame(&FROM_POD, &packet(cast.pod, cast.world, 4000, 80).frame(), Verdict::SnatHere);
        hand_over(stage, cast, HandoverStage::Leaving);
        for back in all_kinds(cast, 4000) {
            let arrived = arrives(stage, &wire, &wrapped(V4.other_node, cast.here, &back));
            assert_eq!(arrived, is(Verdict::ReplyHere), "{back:?}");
            pods.next_from(&back.from.to_string()).expect("it went to the pod");
        }
        let verdicts = [Verdict::NoNatEntry, Verdict::FragmentUnknown, Verdict::IcmpUnmatched];
        for (back, verdict) in all_kinds(cast, 4001).into_iter().zip(verdicts) {
            let back = back.with(|packet| packet.number = 9);
            let arrived = arrives(stage, &wire, &wrapped(V4.other_node, cast.here, &back));
            assert_eq!(arrived, is(verdict), "{back:?}");
        }
    });
}

fn on_the_device(test: impl Fn(&mut Stage, &FamilyAddresses) + Send + 'static) {
    on_devices(&[("from_overlay", "egress0", TcAttachType::Ingress)], test);
}

#[test]
fn late_packets_are_forwarded_as_by_a_router() {
    on_the_device(|stage, cast| {
        let wire = FarEnd::of("out0");
        hand_over(stage, cast, HandoverStage::Leaving);
        stage.add_node(THIRD);
        let inner = packet(cast.remote_pod, cast.world, 4000, 80);
        stage.move_subnets(cast, addr(V4.node), addr(THIRD));
        let arrived = arrives(stage, &wire, &wrapped(THIRD, cast.here, &inner));
        assert_eq!(arrived, is(Verdict::HandedOver));
        let passed = wire.next_from(V4.node).expect("it left by the overlay");
        assert_eq!(passed[30..34], octets(ip(V4.other_node)));
        assert_eq!(passed[46..49], cast.here.to_be_bytes()[1..]);
        // After the outer headers and the link header.
        assert_eq!(passed[50 + 14..], inner.clone().hop().frame()[14..]);
        // The new owner sends nothing back.
        let arrived = arrives(stage, &wire, &wrapped(V4.other_node, cast.here, &inner));
        assert_eq!(arrived, is(Verdict::ForgedInner));
    });
}

#[test]
fn the_new_owner_translates_what_the_old_owner_passes_on() {
    on_the_device(|stage, cast| {
        let (wire, pods) = (FarEnd::of("out0"), FarEnd::of("pods0"));
        hand_over(stage, cast, HandoverStage::Arriving);
        stage.add_node(THIRD);
        stage.move_subnets(cast, addr(V4.node), addr(THIRD));
        let own = packet(cast.pod, cast.world, 4001, 80);
        let late = packet(cast.remote_pod, cast.world, 4000, 80);
        for (inner, verdict) in [(&late, Verdict::SnatForNode), (&own, Verdict::SnatHere)] {
            let arrived = arrives(stage, &wire, &wrapped(V4.other_node, cast.here, inner));
            assert_eq!(arrived, is(verdict));
            wire.next_from(cast.egress).expect("it left by the uplink");
        }
        let direct = arrives(stage, &wire, &wrapped(THIRD, cast.here, &late));
        assert_eq!(direct, is(Verdict::NotGateway), "before its time");
        stage.own(cast.here, cast.egress);
        hand_over(stage, cast, HandoverStage::Open);
        let direct = arrives(stage, &wire, &wrapped(THIRD, cast.here, &late));
        assert_eq!(direct, is(Verdict::SnatForNode), "the old node emits nothing any more");
        // Answers that the old owner got: for a remote pod, a local pod, and none.
        let back = |port| packet(cast.world, cast.egress, 80, port);
        let arrived = arrives(stage, &wire, &wrapped(V4.other_node, cast.here, &back(4000)));
        assert_eq!(arrived, is(Verdict::ReplyToNode));
        assert_eq!(wire.next_from(V4.node).expect("it left by the overlay")[30..34], octets(ip(THIRD)));
        let arrived = arrives(stage, &wire, &wrapped(V4.other_node, cast.here, &back(4001)));
        assert_eq!(arrived, is(Verdict::ReplyHere));
        pods.next_from(cast.world).expect("it went to the pod");
        let arrived = arrives(stage, &wire, &wrapped(V4.other_node, cast.here, &back(4002).tcp(ACK)));
        assert_eq!(arrived, is(Verdict::HandedOver), "the old node may have sent it");
        let arrived = arrives(stage, &wire, &wrapped(THIRD, cast.here, &back(4001)));
        assert_eq!(arrived, is(Verdict::ForgedInner), "from the old node alone");
    });
}
