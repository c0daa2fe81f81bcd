//! Cached flows from and to the overlay.

use egress_common::abi::{Direction, NodeEntry, NodePlace, Tuple, Verdict};
use egress_common::decide::phase;

use crate::cast::addr;
use crate::devices::ROUTER_MAC;
use crate::encapsulation::setup::{arrived, configure, everywhere_taken_out, from_remote, put, sent};
use crate::frames::{ACK, RST, SYN, packet};
use crate::stage::{FROM_NETDEV, FROM_POD, REDIRECT, Stage, UPLINK_MAC};

#[test]
fn a_cached_flow_of_another_node_serves_that_node_only() {
    everywhere_taken_out(|stage, cast, underlay| {
        configure(stage, underlay);
        let inner = from_remote(cast);
        let around = arrived(underlay, cast.here);
        for _ in 0..3 {
            let ran = stage.run_frame(&FROM_NETDEV, &around.frame(&inner), Verdict::SnatForNode);
            assert_eq!(ran.action, REDIRECT);
        }
        // A sender that is no node; a node without this pod; and another egress ID of the same pod.
        let mut foreign = around;
        foreign.from = underlay.router;
        stage.run_frame(&FROM_NETDEV, &foreign.frame(&inner), Verdict::ForgedOuter);
        stage
            .nodes
            .insert(addr(underlay.router), NodeEntry::new(NodePlace::Other, addr(underlay.router)), 0)
            .expect("a node");
        stage.run_frame(&FROM_NETDEV, &around.frame(&inner), Verdict::SnatForNode);
        stage.run_frame(&FROM_NETDEV, &foreign.frame(&inner), Verdict::ForgedInner);
        stage.run_frame(&FROM_NETDEV, &arrived(underlay, cast.away).frame(&inner), Verdict::NotGateway);
        stage.nodes.remove(&addr(underlay.router)).expect("no node");
    });
}

#[test]
fn an_entry_is_for_its_own_hook() {
    everywhere_taken_out(|stage, cast, underlay| {
        configure(stage, underlay);
        // A pod of another node, and then its flow from this node's management port.
        for _ in 0..3 {
            stage.run_frame(
                &FROM_NETDEV,
                &arrived(underlay, cast.here).frame(&from_remote(cast)),
                Verdict::SnatForNode,
            );
        }
        stage.passes(&FROM_POD, &from_remote(cast), Verdict::NotPod);
    });
}

#[test]
fn packets_into_the_overlay_are_served_from_the_cache() {
    everywhere_taken_out(|stage, cast, underlay| {
        configure(stage, underlay);
        let out = packet(cast.away_pod, cast.world, 4000, 80);
        for _ in 0..4 {
            let ran = put(stage, &FROM_POD, &out.frame(), Verdict::ToGateway);
            let expected = sent(underlay, cast.away, &out.clone().hop(), &ran.frame);
            assert!(ran.frame == expected && ran.action == REDIRECT, "{ran:02x?}\n{expected:02x?}");
        }
        stage.run_frame(&FROM_NETDEV, &arrived(underlay, cast.here).frame(&from_remote(cast)), Verdict::SnatForNode);
        let reply = packet(cast.world, cast.egress, 80, 4000).macs(UPLINK_MAC, ROUTER_MAC);
        for _ in 0..4 {
            let ran = put(stage, &FROM_NETDEV, &reply.frame(), Verdict::ReplyToNode);
            let expected = sent(underlay, cast.here, &reply.dnat(cast.remote_pod, 4000).hop(), &ran.frame);
            assert!(ran.frame == expected && ran.action == REDIRECT, "{ran:02x?}\n{expected:02x?}");
        }
    });
}

#[test]
fn a_cached_answer_serves_one_egress_id_only() {
    everywhere_taken_out(|stage, cast, underlay| {
        configure(stage, underlay);
        let inner = packet(cast.world, cast.away_pod, 80, 4000);
        let around = arrived(underlay, cast.away);
        for _ in 0..4 {
            let ran = stage.run_frame(&FROM_NETDEV, &around.frame(&inner), Verdict::ReplyDelivered);
            assert_eq!((ran.action, &ran.frame[12..]), (REDIRECT, &inner.frame()[12..]));
        }
        let mut foreign = around;
        foreign.from = underlay.router;
        stage.run_frame(&FROM_NETDEV, &foreign.frame(&inner), Verdict::ForgedOuter);
        stage.run_frame(&FROM_NETDEV, &arrived(underlay, cast.here).frame(&inner), Verdict::NotItsPod);
    });
}

/// As for a NAT entry, where the opposite direction is updated.
#[test]
fn a_reopened_or_reset_connection_is_tracked_with_a_remote_gateway() {
    everywhere_taken_out(|stage, cast, underlay| {
        configure(stage, underlay);
        let out = |flags| packet(cast.away_pod, cast.world, 4001, 80).tcp(flags);
        let key = Tuple::new(Direction::Egress, addr(cast.away_pod), addr(cast.world), 4001, 80, 6);
        let state = |stage: &Stage| stage.flows.get(&key, 0).expect("a flow").state;
        for flags in [SYN, ACK, ACK, ACK] {
            stage.run_frame(&FROM_POD, &out(flags).frame(), Verdict::ToGateway);
        }
        let resets = phase::SPOKE | phase::RESET;
        for (flags, expected) in
            [(SYN, 0), (ACK, phase::SPOKE), (ACK, phase::SPOKE), (RST, resets), (ACK, phase::SPOKE)]
        {
            stage.run_frame(&FROM_POD, &out(flags).frame(), Verdict::ToGateway);
            assert_eq!(state(stage), expected);
        }
    });
}

/// Its flow is on another node: only its NAT entry is updated.
#[test]
fn a_reset_is_tracked_for_a_remote_pod() {
    everywhere_taken_out(|stage, cast, underlay| {
        configure(stage, underlay);
        let around = arrived(underlay, cast.here);
        let goes_on = around.frame(&from_remote(cast).tcp(ACK));
        let back = |flags| packet(cast.world, cast.egress, 80, 4000).tcp(flags).macs(UPLINK_MAC, ROUTER_MAC);
        let key = Tuple::new(Direction::Egress, addr(cast.remote_pod), addr(cast.world), 4000, 80, 6);
        let phase = |stage: &Stage| {
            let forward = stage.nat.get(&key, 0).expect("a mapping");
            let reverse = stage.nat.get(&forward.other, 0).expect("its other key");
            phase::nat_entry(&forward, Some(&reverse))
        };
        for _ in 0..3 {
            stage.run_frame(&FROM_NETDEV, &goes_on, Verdict::SnatForNode);
            stage.run_frame(&FROM_NETDEV, &back(ACK).frame(), Verdict::ReplyToNode);
        }
        assert_eq!(phase(stage), phase::Phase::Established);
        stage.run_frame(&FROM_NETDEV, &back(RST | ACK).frame(), Verdict::ReplyToNode);
        assert_eq!(phase(stage), phase::Phase::Closing);
        stage.run_frame(&FROM_NETDEV, &goes_on, Verdict::SnatForNode);
        assert_eq!(phase(stage), phase::Phase::Established, "a forged reset, and the connection continues");
    });
}
