//! A hand-over between two nodes, write by write: in every state, also after a kill, at most one node emits the
//! address, and no packet is lost that one of the two could serve.
//!
//! A node writes in its agent's order (`egress_core::plan`, `egress_datapath::executor`). [`can_be`] tells how far one
//! node may be ahead of the other: a node never acts before the acknowledgement that it needs.

use std::vec::Vec;

use super::cast::{Cast, ID, NODE, OTHER_NODE, UPLINK, V4, V6, staged};
use super::from_netdev::{self, FromNetdev};
use super::from_overlay::{self, FromOverlay, Outer};
use super::from_pod::{self, FromPod};
use super::memory_maps::{MemoryMaps, addr};
use super::packets::{FrameFields, packet};
use super::snat::{self, SnatSource};
use super::{NatOwner, Tables};
use crate::abi::*;
use crate::wire::Quote;

/// A third node.
const THIRD: &str = "172.18.0.4";
/// Source ports of flows that began at the old owner and at the new owner.
const OLD_PORT: u16 = 4000;
const NEW_PORT: u16 = 4001;

/// The writes of the old owner, in order: the decision number, its entry, the removal from `owned`, its policy; at the
/// end of the hand-over the removal of the entry and from `owned_addr`.
const LEAVING: usize = 2;
const GIVEN_UP: usize = 3;
const POINTED_AWAY: usize = 4;
const OLD_WRITES: usize = 6;
/// Those of the new owner: its entry, twice, `owned_addr`, `owned`, its policy; at the end the removal of the entry.
const READY: usize = 1;
const OPEN: usize = 2;
const OWNED: usize = 4;
const POINTED_HERE: usize = 5;
const NEW_WRITES: usize = 6;

struct Pair {
    cast: Cast,
    /// The address is a Service's too.
    is_shared: bool,
    old: MemoryMaps,
    new: MemoryMaps,
}

/// What became of a packet of a pod.
#[derive(Debug, PartialEq, Eq)]
enum PacketEnd {
    Emitted(&'static str),
    Dropped(Verdict),
}

/// Whether both nodes can be in these states at once. Each node acts on the other's acknowledgements and on the status,
/// which the leader writes after both acknowledgements. The hand-over ends seconds later.
fn can_be(old: usize, new: usize) -> bool {
    let new_is_ready = old < LEAVING || new >= READY;
    let old_has_released = new < OPEN || old >= GIVEN_UP;
    let has_status = old < POINTED_AWAY || new >= OPEN;
    let is_forgotten = (old <= POINTED_AWAY || new >= POINTED_HERE) && (new < NEW_WRITES || old >= POINTED_AWAY);
    new_is_ready && old_has_released && has_status && is_forgotten
}

impl Pair {
    /// Begins with the address on the old owner.
    fn new(cast: Cast, is_shared: bool) -> Self {
        let pair = Self { cast, is_shared, old: staged(&cast), new: staged(&cast) };
        pair.old.put_owned(ID, pair.owned());
        pair.settle(&pair.old, NODE);
        pair.settle(&pair.new, OTHER_NODE);
        pair.new.disown(ID);
        pair.new.pods.borrow_mut().clear();
        pair.new.add_pod(cast.remote_pod, PodEntry::selected(ID, 0));
        pair.point(&pair.new, PolicySlot::remote(addr(cast.egress), addr(NODE)));
        pair
    }

    /// Nodes and prefixes of the cluster, as this node sees them.
    fn settle(&self, maps: &MemoryMaps, own: &str) {
        maps.configure(|config| config.self_node = addr(own));
        for node in [NODE, OTHER_NODE, THIRD] {
            let place = if node == own { NodePlace::Own } else { NodePlace::Other };
            maps.add_node(node, place, node);
        }
        let narrow = if self.cast.family == Family::V4 { 24 } else { 64 };
        maps.add_prefix(self.third_pod(), narrow, PrefixKind::PodSubnet, Some(THIRD));
    }

    fn third_pod(&self) -> &'static str {
        if self.cast.family == Family::V4 { "10.244.3.10" } else { "fd00:10:244:3::10" }
    }

    fn point(&self, maps: &MemoryMaps, slot: PolicySlot) {
        maps.set_policy(ID, WhenEmpty::Drop, &[slot]);
        maps.configure(|config| config.decisions += 1);
    }

    fn owned(&self) -> Owned {
        let owned = Owned::new(ID, addr(self.cast.egress), UPLINK, [2, 0, 0, 0, 0, 1], 1500);
        if self.is_shared { owned.shared(ID) } else { owned }
    }

    fn move_entry(&self, maps: &MemoryMaps, stage: HandoverStage, peer: &str) {
        let entry = HandoverEntry::new(ID, stage, maps.now.get(), addr(peer), self.owned());
        maps.handovers.borrow_mut().insert(ID, entry);
    }

    fn write_old(&self, number: usize) {
        let (maps, egress) = (&self.old, addr(self.cast.egress));
        match number {
            0 => {}
            1 => maps.configure(|config| config.decisions += 1),
            LEAVING => self.move_entry(maps, HandoverStage::Leaving, OTHER_NODE),
            GIVEN_UP => drop(maps.owned.borrow_mut().remove(&ID)),
            POINTED_AWAY => self.point(maps, PolicySlot::remote(egress, addr(OTHER_NODE))),
            5 => drop(maps.handovers.borrow_mut().remove(&ID)),
            OLD_WRITES => drop(maps.owned_addr.borrow_mut().remove(&egress)),
            other => panic!("there is no write {other}"),
        }
    }

    fn write_new(&self, number: usize) {
        let (maps, egress) = (&self.new, addr(self.cast.egress));
        let owned = self.owned();
        match number {
            0 => {}
            READY => self.move_entry(maps, HandoverStage::Arriving, NODE),
            OPEN => self.move_entry(maps, HandoverStage::Open, NODE),
            3 => {
                let entry = owned.by_address(ID);
                maps.owned_addr.borrow_mut().insert(egress, entry);
            }
            OWNED => drop(maps.owned.borrow_mut().insert(ID, owned)),
            POINTED_HERE => self.point(maps, PolicySlot::here(egress)),
            NEW_WRITES => drop(maps.handovers.borrow_mut().remove(&ID)),
            other => panic!("there is no write {other}"),
        }
    }

    fn maps(&self, node: &str) -> &MemoryMaps {
        if node == NODE { &self.old } else { &self.new }
    }

    fn name(node: &Addr) -> &'static str {
        if *node == addr(NODE) { NODE } else { OTHER_NODE }
    }

    /// A pod of one of the two sends.
    fn sends(&self, node: &'static str, sent: &FrameFields) -> PacketEnd {
        let maps = self.maps(node);
        let headers = &mut sent.headers();
        match from_pod::decide(headers, &Quote::NONE, maps, &maps.config.get()) {
            FromPod::Send { slot, .. } if slot.place() == SlotPlace::Here => match maps.owned(ID) {
                Some(owned) if owned.address == slot.address => {
                    let owner = NatOwner { origin: Origin::Here, source_node: Addr::UNSPECIFIED, egress_id: ID };
                    self.emitted(maps, node, sent, &owner)
                }
                _ => match maps.handover(ID).filter(|handover| handover.stage() == Some(HandoverStage::Leaving)) {
                    Some(handover) => self.arrives(Self::name(&handover.peer), node, sent),
                    None => PacketEnd::Dropped(Verdict::NotGateway),
                },
            },
            FromPod::Send { slot, .. } => self.arrives(Self::name(&slot.endpoint), node, sent),
            other => panic!("not steered: {other:?}"),
        }
    }

    fn emitted(&self, maps: &MemoryMaps, node: &'static str, sent: &FrameFields, owner: &NatOwner) -> PacketEnd {
        let pool = SnatSource::egress_only(addr(self.cast.egress));
        match snat::translate(&sent.headers(), &Quote::NONE, maps, &pool, owner) {
            Ok(_) => PacketEnd::Emitted(node),
            Err(verdict) => PacketEnd::Dropped(verdict),
        }
    }

    /// A pod's packet by the overlay.
    fn arrives(&self, node: &'static str, from: &str, sent: &FrameFields) -> PacketEnd {
        let maps = self.maps(node);
        let outer = Outer { source: addr(from), egress_id: ID };
        match from_overlay::decide(&mut sent.headers(), &Quote::NONE, &outer, maps, &maps.config.get()) {
            FromOverlay::Translate { source_node, .. } => {
                let owner = NatOwner { origin: Origin::Remote, source_node: *source_node, egress_id: ID };
                self.emitted(maps, node, sent, &owner)
            }
            FromOverlay::PassOn => self.arrives(Self::name(&maps.handover(ID).expect("a hand-over").peer), node, sent),
            FromOverlay::Done(verdict) => PacketEnd::Dropped(verdict),
            other => panic!("no packet of a pod: {other:?}"),
        }
    }

    /// A packet from outside for the egress IP: the node that delivers it to the pod.
    fn answered(&self, node: &'static str, answer: &(FrameFields, Quote)) -> PacketEnd {
        let maps = self.maps(node);
        let entered = from_netdev::decide(&mut answer.0.arriving(), &answer.1, UPLINK, maps, &maps.config.get());
        self.goes(node, &entered, answer)
    }

    fn goes(&self, node: &'static str, entered: &FromNetdev<'_>, answer: &(FrameFields, Quote)) -> PacketEnd {
        match entered {
            FromNetdev::ReplyHere { .. } | FromNetdev::ReplyRemote { .. } => PacketEnd::Emitted(node),
            FromNetdev::PassOn { .. } => {
                let peer = Self::name(&self.maps(node).handover(ID).expect("a hand-over").peer);
                let (maps, outer) = (self.maps(peer), Outer { source: addr(node), egress_id: ID });
                match from_overlay::decide(&mut answer.0.headers(), &Quote::NONE, &outer, maps, &maps.config.get()) {
                    FromOverlay::Answer => {
                        let passed = from_netdev::passed(&mut answer.0.arriving(), &answer.1, maps, ID);
                        self.goes(peer, &passed, answer)
                    }
                    FromOverlay::Done(verdict) => PacketEnd::Dropped(verdict),
                    other => panic!("no answer: {other:?}"),
                }
            }
            FromNetdev::Done(verdict) => PacketEnd::Dropped(*verdict),
            FromNetdev::NodeReply { .. } => panic!("not the node's"),
        }
    }

    /// Both flows have sent, each by the node that owned the address then.
    fn begin_flows(&self) {
        for (maps, port) in [(&self.old, OLD_PORT), (&self.new, NEW_PORT)] {
            let owner = NatOwner { origin: Origin::Remote, source_node: addr(THIRD), egress_id: ID };
            let pool = SnatSource::egress_only(addr(self.cast.egress));
            let sent = packet(self.third_pod(), self.cast.world, port, 80).headers();
            snat::translate(&sent, &Quote::NONE, maps, &pool, &owner).expect("a free port");
        }
    }

    /// Packets of the flow with this port: whole, a datagram in two fragments, and an error about a sent packet.
    fn answers(&self, port: u16) -> Vec<(FrameFields, Quote)> {
        // Another datagram with the same identification.
        [&self.old, &self.new].iter().for_each(|maps| maps.frags.borrow_mut().clear());
        let whole = packet(self.cast.world, self.cast.egress, 80, port);
        let error = packet(self.cast.world, self.cast.egress, 0, 0).unreachable();
        let sent = packet(self.cast.egress, self.cast.world, port, 80).quoted(Direction::Egress);
        let fragments = [whole.clone().fragment(0, true), whole.clone().fragment(100, false)];
        let plain = [whole].into_iter().chain(fragments).map(|packet| (packet, Quote::NONE));
        plain.chain([(error, sent)]).collect()
    }
}

/// Every possible state of the two nodes, each with fresh maps.
fn every_state(test: impl Fn(&Pair, usize, usize)) {
    for (cast, is_shared) in [(V4, false), (V4, true), (V6, false), (V6, true)] {
        for (old, new) in (0..=OLD_WRITES).flat_map(|old| (0..=NEW_WRITES).map(move |new| (old, new))) {
            if can_be(old, new) {
                let pair = Pair::new(cast, is_shared);
                (0..=old).for_each(|number| pair.write_old(number));
                (0..=new).for_each(|number| pair.write_new(number));
                test(&pair, old, new);
            }
        }
    }
}

#[test]
fn the_address_leaves_from_one_node_and_no_packet_of_a_pod_is_lost() {
    every_state(|pair, old, new| {
        let expected = PacketEnd::Emitted(if old < GIVEN_UP { NODE } else { OTHER_NODE });
        let Cast { pod, remote_pod, world, .. } = pair.cast;
        let at = std::format!("the old node at {old}, the new owner at {new}");
        assert_eq!(pair.sends(NODE, &packet(pod, world, 5000, 80)), expected, "{at}: a pod of the old node");
        // The pod's own node is the last to learn that it owns the address.
        assert_eq!(
            pair.sends(OTHER_NODE, &packet(remote_pod, world, 5001, 80)),
            expected,
            "{at}: a pod of the new owner"
        );
        let third = packet(pair.third_pod(), world, 5002, 80);
        // Other nodes follow the status, with delay. It names the old owner until the new owner has acknowledged that
        // it is open.
        let late = pair.arrives(NODE, THIRD, &third);
        match old <= POINTED_AWAY && new < NEW_WRITES {
            true => assert_eq!(late, expected, "{at}: a pod of a third node"),
            false => assert!(matches!(late, PacketEnd::Dropped(_)), "{at}: seconds late, {late:?}"),
        }
        let by_status = pair.arrives(OTHER_NODE, THIRD, &third);
        match new >= OPEN {
            true => assert_eq!(by_status, expected, "{at}: a pod of a third node"),
            false => assert_eq!(by_status, PacketEnd::Dropped(Verdict::NotGateway), "{at}: by an older hand-over"),
        }
    });
}

#[test]
fn answers_reach_the_node_that_sent() {
    every_state(|pair, old, new| {
        pair.begin_flows();
        let at = std::format!("the old node at {old}, the new owner at {new}");
        // Neighbours send to the old owner until the new owner announces the address.
        let hears = [(NODE, old < OLD_WRITES), (OTHER_NODE, new > OPEN)];
        for (node, _) in hears.into_iter().filter(|(_, hears)| *hears) {
            // The old owner's NAT entries serve while both nodes have an entry of the hand-over, and before it on the
            // old owner alone.
            let knows_both = old < OLD_WRITES - 1 && (READY..NEW_WRITES).contains(&new);
            if node == NODE && old < GIVEN_UP || knows_both {
                for answer in pair.answers(OLD_PORT) {
                    assert_eq!(pair.answered(node, &answer), PacketEnd::Emitted(NODE), "{at}, at {node}: {answer:?}");
                }
            }
            if node == OTHER_NODE || (knows_both && old >= GIVEN_UP) {
                for answer in pair.answers(NEW_PORT) {
                    assert_eq!(
                        pair.answered(node, &answer),
                        PacketEnd::Emitted(OTHER_NODE),
                        "{at}, at {node}: {answer:?}"
                    );
                }
            }
        }
    });
}

/// The old owner is killed between two writes and the hand-over is cancelled: its programs continue to serve without an
/// agent.
#[test]
fn an_old_owner_killed_before_the_release_continues_alone() {
    for (cast, is_shared) in [(V4, false), (V4, true), (V6, false), (V6, true)] {
        for old in 0..GIVEN_UP {
            let pair = Pair::new(cast, is_shared);
            (0..=old).for_each(|number| pair.write_old(number));
            pair.begin_flows();
            for answer in pair.answers(OLD_PORT) {
                assert_eq!(pair.answered(NODE, &answer), PacketEnd::Emitted(NODE), "at {old}: {answer:?}");
            }
            let sent = packet(cast.pod, cast.world, 5000, 80);
            assert_eq!(pair.sends(NODE, &sent), PacketEnd::Emitted(NODE), "at {old}");
        }
    }
}
