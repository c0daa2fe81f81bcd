//! Cached decisions of flows, and what invalidates them.

use super::super::*;
use crate::abi::{Addr, Config, Direction, PodEntry, WhenEmpty};
use crate::decide::cast::{Cast, ID, OTHER_NODE, both};
use crate::decide::memory_maps::{MemoryMaps, addr};
use crate::decide::packets::{FrameFields, packet};

fn decided(maps: &MemoryMaps, decisions: u32) -> Config {
    let mut config = maps.config.get();
    config.decisions = decisions;
    maps.config.set(config);
    config
}

fn asked<'t>(maps: &'t MemoryMaps, packet: &FrameFields) -> FromPod<'t> {
    decide(&mut packet.headers(), &Quote::NONE, maps, &maps.config.get())
}

fn address(answer: &FromPod<'_>) -> Option<Addr> {
    match answer {
        FromPod::Send { slot, .. } => Some(slot.address),
        _ => None,
    }
}

fn out(cast: &Cast) -> FrameFields {
    packet(cast.pod, cast.world, 4000, 80).tcp(tcp::ACK)
}

#[test]
fn a_settled_flow_needs_no_lookup_until_a_decision_changes() {
    both(|cast, maps| {
        decided(maps, 1);
        let syn = packet(cast.pod, cast.world, 4000, 80).tcp(tcp::SYN);
        let first = address(&asked(maps, &syn));
        assert!(first.is_some());
        // A change without a new decision number.
        maps.set_policy(ID, WhenEmpty::Drop, &[]);
        assert_eq!(address(&asked(maps, &out(cast))), first, "as it was decided");
        decided(maps, 2);
        assert_eq!(asked(maps, &out(cast)), FromPod::Reset(Verdict::AddressGone));
    });
}

#[test]
fn a_settled_flow_follows_its_address_after_the_decision_number_changes() {
    both(|cast, maps| {
        decided(maps, 1);
        asked(maps, &packet(cast.pod, cast.world, 4000, 80).tcp(tcp::SYN));
        let moved = PolicySlot::remote(addr(cast.egress), addr(OTHER_NODE));
        maps.set_policy(ID, WhenEmpty::Drop, &[moved]);
        decided(maps, 2);
        for _ in 0..2 {
            let FromPod::Send { slot, .. } = asked(maps, &out(cast)) else { panic!("not sent") };
            assert_eq!(*slot, moved, "also when it is kept");
        }
    });
}

#[test]
fn deselection_counts_without_a_new_decision_number() {
    both(|cast, maps| {
        decided(maps, 1);
        asked(maps, &packet(cast.pod, cast.world, 4000, 80).tcp(tcp::SYN));
        maps.add_pod(cast.pod, PodEntry::known());
        assert_eq!(asked(maps, &out(cast)), FromPod::Done(Verdict::NotSelected));
        maps.add_pod(cast.pod, PodEntry::selected(ID + 5, 0));
        assert_eq!(asked(maps, &out(cast)), FromPod::Done(Verdict::NoPolicy), "another object's");
    });
}

#[test]
fn packets_with_another_verdict_do_not_use_the_settled_decision() {
    both(|cast, maps| {
        decided(maps, 1);
        let udp = packet(cast.pod, cast.world, 4000, 80);
        assert!(address(&asked(maps, &udp)).is_some());
        assert_eq!(asked(maps, &udp.clone().ttl(1)), FromPod::Done(Verdict::TtlExpired));
        let answer = packet(cast.pod, cast.world, 4000, 80).tcp(tcp::SYN | tcp::ACK);
        assert_eq!(asked(maps, &answer), FromPod::Done(Verdict::InboundReply));
        let tunnel = maps.config.get().tunnel_port as u16;
        let forged = packet(cast.pod, cast.other_node, 4000, tunnel);
        for _ in 0..2 {
            assert_eq!(asked(maps, &forged), FromPod::Done(Verdict::ForgedTunnel));
        }
    });
}

#[test]
fn without_a_decision_number_nothing_is_settled() {
    both(|cast, maps| {
        asked(maps, &packet(cast.pod, cast.world, 4000, 80).tcp(tcp::SYN));
        maps.set_policy(ID, WhenEmpty::Drop, &[]);
        assert_eq!(asked(maps, &out(cast)), FromPod::Reset(Verdict::AddressGone));
    });
}

#[test]
fn an_icmp_error_does_not_use_the_settled_decision_of_an_echo_request() {
    both(|cast, maps| {
        decided(maps, 1);
        // The ports of an error are zero, as those of an echo request with identifier zero.
        let echo = packet(cast.pod, cast.world, 0, 0).echo(0);
        maps.set_policy(ID, WhenEmpty::Drop, &[PolicySlot::here(addr(cast.egress))]);
        let own = address(&asked(maps, &echo));
        assert_eq!(own, Some(addr(cast.egress)));
        let both =
            [PolicySlot::here(addr(cast.egress)), PolicySlot::remote(addr(cast.foreign_egress), addr(OTHER_NODE))];
        maps.set_policy(ID, WhenEmpty::Drop, &both);
        decided(maps, 2);
        let port = (4000..4100)
            .find(|port| address(&asked(maps, &packet(cast.pod, cast.world, *port, 80))) != own)
            .expect("a flow of the other address");
        let quote = packet(cast.world, cast.pod, 80, port).quoted(Direction::Ingress);
        let error = packet(cast.pod, cast.world, 0, 0).unreachable();
        let decided_error = decide(&mut error.headers(), &quote, maps, &maps.config.get());
        assert_eq!(address(&decided_error), Some(addr(cast.foreign_egress)));
        assert_eq!(address(&asked(maps, &echo)), own);
    });
}
