//! Connections that a policy change resets, and those that it must not.

use super::super::*;
use crate::abi::{PodEntry, WhenEmpty};
use crate::decide::cast::{Cast, ID, OTHER_NODE, UPLINK, both};
use crate::decide::memory_maps::{MemoryMaps, addr};
use crate::decide::packets::{FrameFields, packet};
use crate::decide::{to_netdev, to_pod};
use crate::wire::Segment;

const DATA: u8 = tcp::ACK;
/// How long a deselected pod of a test gets resets.
const RESET_NS: u64 = 240_000_000_000;

fn asked<'t>(maps: &'t MemoryMaps, packet: &FrameFields) -> FromPod<'t> {
    decide(&mut packet.headers(), &Quote::NONE, maps, &maps.config.get())
}

fn out(cast: &Cast, flags: u8) -> FrameFields {
    packet(cast.pod, cast.world, 4000, 80).tcp(flags)
}

fn is_sent(maps: &MemoryMaps, packet: &FrameFields) -> bool {
    matches!(asked(maps, packet), FromPod::Send { .. })
}

/// A connection and a datagram of the pod, both under way.
fn begun(cast: &Cast, maps: &MemoryMaps) {
    for flags in [tcp::SYN, DATA] {
        assert!(is_sent(maps, &out(cast, flags)));
    }
    assert!(is_sent(maps, &packet(cast.pod, cast.world, 4000, 53)));
}

fn deselect(cast: &Cast, maps: &MemoryMaps) {
    maps.add_pod(cast.pod, PodEntry::known().with_cut_until(maps.now.get() + RESET_NS));
}

#[test]
fn a_connection_whose_address_was_removed_is_reset() {
    both(|cast, maps| {
        begun(cast, maps);
        for (slots, when_empty) in [
            (std::vec![PolicySlot::here(addr(cast.foreign_egress))], WhenEmpty::Drop),
            (std::vec![], WhenEmpty::Drop),
            (std::vec![], WhenEmpty::NodeAddress),
            (std::vec![], WhenEmpty::NotListed),
        ] {
            maps.set_policy(ID, when_empty, &slots);
            assert_eq!(asked(maps, &out(cast, DATA)), FromPod::Reset(Verdict::AddressGone), "{slots:?} {when_empty:?}");
        }
        // A new connection uses the current policy.
        maps.set_policy(ID, WhenEmpty::NodeAddress, &[]);
        assert_eq!(asked(maps, &out(cast, tcp::SYN)), FromPod::Done(Verdict::NodeAddress));
        maps.set_policy(ID, WhenEmpty::Drop, &[PolicySlot::here(addr(cast.foreign_egress))]);
        assert!(is_sent(maps, &packet(cast.pod, cast.world, 4000, 53)));
        assert!(is_sent(maps, &out(cast, tcp::SYN)));
        assert!(is_sent(maps, &out(cast, DATA)));
    });
}

#[test]
fn a_connection_waits_for_its_pending_address() {
    both(|cast, maps| {
        begun(cast, maps);
        for slots in [std::vec![], std::vec![PolicySlot::here(addr(cast.foreign_egress))]] {
            maps.set_policy(ID, WhenEmpty::Drop, &slots);
            maps.set_pending(ID, &[addr(cast.egress)]);
            assert_eq!(asked(maps, &out(cast, DATA)), FromPod::Done(Verdict::NoGateway), "{slots:?}");
        }
        let back = PolicySlot::remote(addr(cast.egress), addr(OTHER_NODE));
        maps.set_policy(ID, WhenEmpty::Drop, &[back]);
        assert_eq!(asked(maps, &out(cast, DATA)), FromPod::Send { egress_id: ID, slot: &back });
    });
}

#[test]
fn no_flow_begins_with_a_pending_address() {
    both(|cast, maps| {
        maps.set_policy(ID, WhenEmpty::Drop, &[PolicySlot::here(addr(cast.egress))]);
        maps.set_pending(ID, &[addr(cast.foreign_egress)]);
        for port in 1..200 {
            let FromPod::Send { slot, .. } = asked(maps, &packet(cast.pod, cast.world, port, 80)) else {
                panic!("not sent")
            };
            assert_eq!(slot.address, addr(cast.egress));
        }
    });
}

#[test]
fn a_connection_of_a_deselected_pod_is_reset() {
    both(|cast, maps| {
        begun(cast, maps);
        deselect(cast, maps);
        for flags in [DATA, tcp::FIN | tcp::ACK, tcp::RST] {
            assert_eq!(asked(maps, &out(cast, flags)), FromPod::Reset(Verdict::FlowCut));
        }
        let config = maps.config.get();
        let meta = to_netdev::Meta { mark: 0, ifindex: UPLINK, forwarded: true, returning: false };
        let left = to_netdev::decide(&mut out(cast, DATA).headers(), &Quote::NONE, &meta, maps, &config);
        assert_eq!(left, to_netdev::ToNetdev::Done(Verdict::FlowCut), "nor by the uplink");
        // Other connections are untouched.
        let other = packet(cast.pod, cast.world, 4001, 80);
        for packet in [other.clone().tcp(DATA), other.tcp(tcp::SYN), packet(cast.pod, cast.world, 4000, 53)] {
            assert_eq!(asked(maps, &packet), FromPod::Done(Verdict::NotSelected), "{packet:?}");
        }
        maps.now.set(maps.now.get() + RESET_NS);
        assert_eq!(asked(maps, &out(cast, DATA)), FromPod::Done(Verdict::NotSelected), "some day it is over");
    });
}

#[test]
fn a_deselected_pod_reopens_on_the_same_tuple() {
    both(|cast, maps| {
        begun(cast, maps);
        deselect(cast, maps);
        for flags in [tcp::SYN, DATA, tcp::FIN | tcp::ACK] {
            assert_eq!(asked(maps, &out(cast, flags)), FromPod::Done(Verdict::NotSelected));
        }
    });
}

#[test]
fn no_packet_of_a_reset_connection_leaves() {
    both(|cast, maps| {
        begun(cast, maps);
        let (first, later) = (out(cast, DATA).fragment(0, true), out(cast, DATA).fragment(100, false));
        assert_eq!(asked(maps, &later), FromPod::Done(Verdict::FragmentUnknown), "so it is kept");
        maps.await_first(&first.headers());
        deselect(cast, maps);
        assert_eq!(asked(maps, &first), FromPod::Done(Verdict::FragmentsReleased));
        maps.awaited.borrow_mut().clear();
        for piece in [first, later] {
            assert_eq!(asked(maps, &piece), FromPod::Reset(Verdict::FlowCut), "{piece:?}");
        }
    });
}

#[test]
fn a_fragment_before_its_first_fragment_waits_while_connections_are_reset() {
    both(|cast, maps| {
        deselect(cast, maps);
        let (first, later) = (out(cast, DATA).fragment(0, true), out(cast, DATA).fragment(100, false));
        assert_eq!(asked(maps, &later), FromPod::Done(Verdict::FragmentUnknown));
        let datagram = packet(cast.pod, cast.world, 4000, 53).fragment(100, false);
        assert_eq!(asked(maps, &datagram), FromPod::Done(Verdict::NotSelected), "datagrams get no reset");
        for piece in [first, later.clone()] {
            assert_eq!(asked(maps, &piece), FromPod::Done(Verdict::NotSelected), "of no connection of ours: {piece:?}");
        }
        maps.now.set(maps.now.get() + RESET_NS);
        assert_eq!(asked(maps, &later), FromPod::Done(Verdict::NotSelected));
    });
}

#[test]
fn an_inbound_connection_on_the_tuple_of_a_reset_one_is_new() {
    both(|cast, maps| {
        begun(cast, maps);
        deselect(cast, maps);
        let syn = packet(cast.world, cast.pod, 80, 4000).tcp(tcp::SYN).arriving();
        to_pod::decide(&syn, maps, &maps.config.get());
        assert_eq!(asked(maps, &out(cast, DATA)), FromPod::Reset(Verdict::FlowCut), "the pod has not answered it");
        for flags in [tcp::SYN | tcp::ACK, DATA, tcp::FIN | tcp::ACK] {
            assert_eq!(asked(maps, &out(cast, flags)), FromPod::Done(Verdict::NotSelected));
        }
    });
}

#[test]
fn a_reset_connection_is_remembered_while_the_pod_continues_it() {
    both(|cast, maps| {
        begun(cast, maps);
        deselect(cast, maps);
        let closing_secs = maps.config.get().timeouts.tcp_closing;
        let tuple = out(cast, DATA).headers().tuple;
        maps.flow_answered(&tuple, Segment { flags: tcp::RST, number: 0 });
        let begun_ns = maps.now.get();
        // The pod ignores the reset and sends now and then.
        for step in 1..4 {
            maps.now.set(begun_ns + step * RESET_NS / 4);
            maps.add_pod(cast.pod, PodEntry::known().with_cut_until(begun_ns + 4 * RESET_NS));
            assert_eq!(asked(maps, &out(cast, DATA)), FromPod::Reset(Verdict::FlowCut));
            assert_eq!(maps.flow_peek(&tuple).map(|flow| flow.last_seen_ns), Some(maps.now.get()));
        }
        assert!(RESET_NS / 4 < u64::from(closing_secs) * 1_000_000_000, "before it would be forgotten");
        maps.now.set(begun_ns + 3 * RESET_NS);
        maps.sweep(false);
        assert!(maps.flow_peek(&tuple).is_none(), "a pod that has heeded it costs no room");
    });
}

#[test]
fn a_reselected_pod_continues() {
    both(|cast, maps| {
        begun(cast, maps);
        deselect(cast, maps);
        maps.add_pod(cast.pod, PodEntry::selected(ID, maps.now.get()));
        assert!(is_sent(maps, &out(cast, DATA)));
        maps.add_pod(cast.pod, PodEntry::selected(ID + 1, maps.now.get()));
        maps.set_policy(ID + 1, WhenEmpty::Drop, &[PolicySlot::here(addr(cast.foreign_egress))]);
        assert_eq!(asked(maps, &out(cast, DATA)), FromPod::Reset(Verdict::AddressGone), "by another object");
    });
}

#[test]
fn a_reset_connection_is_not_inbound() {
    both(|cast, maps| {
        begun(cast, maps);
        deselect(cast, maps);
        let syn = packet(cast.world, cast.pod, 80, 4000).tcp(tcp::SYN).arriving();
        assert_eq!(to_pod::decide(&syn, maps, &maps.config.get()), Verdict::NotOurs, "forged or not");
        assert_eq!(asked(maps, &out(cast, DATA)), FromPod::Reset(Verdict::FlowCut));
    });
}

#[test]
fn a_flow_to_another_node_continues_with_the_node_address() {
    both(|cast, maps| {
        let config = maps.config.get();
        let tcp = |flags| packet(cast.pod, cast.other_node, 4000, 80).tcp(flags);
        let datagram = packet(cast.pod, cast.other_node, 4000, 53);
        for packet in [tcp(tcp::SYN), datagram.clone()] {
            assert_eq!(asked(maps, &packet), FromPod::Mark);
            to_netdev::translate(&packet.headers(), &Quote::NONE, UPLINK, maps, &config).expect("a free port");
        }
        deselect(cast, maps);
        // It never ends: its NAT entry belongs to no policy.
        for now in [maps.now.get(), maps.now.get() + 2 * RESET_NS] {
            maps.now.set(now);
            for packet in [tcp(DATA), tcp(tcp::FIN | tcp::ACK), datagram.clone()] {
                assert_eq!(asked(maps, &packet), FromPod::Mark, "{packet:?}");
            }
        }
        let others = [tcp(tcp::SYN), packet(cast.pod, cast.other_node, 4001, 80).tcp(DATA)];
        for packet in others {
            assert_eq!(asked(maps, &packet), FromPod::Done(Verdict::NotSelected), "{packet:?}");
        }
    });
}
