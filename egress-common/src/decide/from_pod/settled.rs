//! Flows whose questions are not asked again, and when they are.

use super::*;
use crate::abi::{Addr, Config, Direction, PodEntry, WhenEmpty};
use crate::decide::cast::{Cast, ID, OTHER_NODE, both};
use crate::decide::packets::{Packet, packet};
use crate::decide::world::{World, addr};

fn decided(world: &World, decisions: u32) -> Config {
    let mut config = world.config.get();
    config.decisions = decisions;
    world.config.set(config);
    config
}

fn asked<'t>(world: &'t World, packet: &Packet) -> FromPod<'t> {
    decide(&mut packet.headers(), &Quote::NONE, world, &world.config.get())
}

fn address(answer: &FromPod<'_>) -> Option<Addr> {
    match answer {
        FromPod::Send { slot, .. } => Some(slot.address),
        _ => None,
    }
}

fn out(cast: &Cast) -> Packet {
    packet(cast.pod, cast.world, 4000, 80).tcp(tcp::ACK)
}

#[test]
fn nothing_is_asked_until_a_decision_changes() {
    both(|cast, world| {
        decided(world, 1);
        let syn = packet(cast.pod, cast.world, 4000, 80).tcp(tcp::SYN);
        let first = address(&asked(world, &syn));
        assert!(first.is_some());
        // A change that nobody has announced.
        world.set_policy(ID, WhenEmpty::Drop, &[]);
        assert_eq!(address(&asked(world, &out(cast))), first, "as it was decided");
        decided(world, 2);
        assert_eq!(asked(world, &out(cast)), FromPod::Reset(Verdict::AddressGone));
    });
}

#[test]
fn a_flow_follows_its_address_once_that_is_announced() {
    both(|cast, world| {
        decided(world, 1);
        asked(world, &packet(cast.pod, cast.world, 4000, 80).tcp(tcp::SYN));
        let moved = Slot::remote(addr(cast.egress), addr(OTHER_NODE));
        world.set_policy(ID, WhenEmpty::Drop, &[moved]);
        decided(world, 2);
        for _ in 0..2 {
            let FromPod::Send { slot, .. } = asked(world, &out(cast)) else { panic!("not sent") };
            assert_eq!(*slot, moved, "also when it is kept");
        }
    });
}

#[test]
fn a_pod_that_is_no_longer_selected_is_seen_without_announcement() {
    both(|cast, world| {
        decided(world, 1);
        asked(world, &packet(cast.pod, cast.world, 4000, 80).tcp(tcp::SYN));
        world.add_pod(cast.pod, PodEntry::known());
        assert_eq!(asked(world, &out(cast)), FromPod::Done(Verdict::NotSelected));
        world.add_pod(cast.pod, PodEntry::selected(ID + 5, 0));
        assert_eq!(asked(world, &out(cast)), FromPod::Done(Verdict::NoPolicy), "another object's");
    });
}

#[test]
fn what_may_be_answered_otherwise_is_asked_every_time() {
    both(|cast, world| {
        decided(world, 1);
        let udp = packet(cast.pod, cast.world, 4000, 80);
        assert!(address(&asked(world, &udp)).is_some());
        assert_eq!(asked(world, &udp.clone().ttl(1)), FromPod::Done(Verdict::TtlExpired));
        let answer = packet(cast.pod, cast.world, 4000, 80).tcp(tcp::SYN | tcp::ACK);
        assert_eq!(asked(world, &answer), FromPod::Done(Verdict::InboundReply));
        let tunnel = world.config.get().tunnel_port as u16;
        let forged = packet(cast.pod, cast.other_node, 4000, tunnel);
        for _ in 0..2 {
            assert_eq!(asked(world, &forged), FromPod::Done(Verdict::ForgedTunnel));
        }
    });
}

#[test]
fn without_a_number_nothing_is_kept() {
    both(|cast, world| {
        asked(world, &packet(cast.pod, cast.world, 4000, 80).tcp(tcp::SYN));
        world.set_policy(ID, WhenEmpty::Drop, &[]);
        assert_eq!(asked(world, &out(cast)), FromPod::Reset(Verdict::AddressGone));
    });
}

#[test]
fn an_error_settles_nothing_but_its_own_answer() {
    both(|cast, world| {
        decided(world, 1);
        // An error has no ports, nor has an echo request of the number zero.
        let echo = packet(cast.pod, cast.world, 0, 0).echo(0);
        world.set_policy(ID, WhenEmpty::Drop, &[Slot::here(addr(cast.egress))]);
        let own = address(&asked(world, &echo));
        assert_eq!(own, Some(addr(cast.egress)));
        let both = [Slot::here(addr(cast.egress)), Slot::remote(addr(cast.foreign_egress), addr(OTHER_NODE))];
        world.set_policy(ID, WhenEmpty::Drop, &both);
        decided(world, 2);
        let port = (4000..4100)
            .find(|port| address(&asked(world, &packet(cast.pod, cast.world, *port, 80))) != own)
            .expect("a flow of the other address");
        let quote = packet(cast.world, cast.pod, 80, port).quoted(Direction::Ingress);
        let error = packet(cast.pod, cast.world, 0, 0).unreachable();
        let told = decide(&mut error.headers(), &quote, world, &world.config.get());
        assert_eq!(address(&told), Some(addr(cast.foreign_egress)));
        assert_eq!(address(&asked(world, &echo)), own);
    });
}
