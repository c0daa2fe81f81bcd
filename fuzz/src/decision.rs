//! The target `decision`: any packets and any state, through all hooks; [`crate::node`] asserts the invariants.

use egress_common::abi::{
    Addr, Direction, Family, HandoverEntry, HandoverStage, OnUnknownPod, PodEntry, PolicyEntry, PolicySlot, WhenEmpty,
};
use egress_common::decide::Tables as _;
use egress_common::decide::from_overlay::Outer;
use egress_common::decide::memory_maps::MemoryMaps;
use egress_common::decide::to_netdev::Meta;
use egress_common::wire::{Headers, PROTO_ICMP, PROTO_ICMPV6, PROTO_TCP, PROTO_UDP};

use crate::addresses::{self, FAMILIES, policy_key};
use crate::frame::{self, FuzzPacket};
use crate::input::Input;
use crate::node::{MARKS, ModelNode, PacketHook, PacketOutcome, Skb};

/// Steps of one story.
const STEPS: usize = 48;
pub(crate) const IDS: [u32; 3] = [1, 2, 3];
/// The policy of a Service, whose address it shares.
const OF_SERVICE: u32 = 3;
pub(crate) const PORTS: [u16; 6] = [4000, 80, 4001, 443, 4794, 61_001];

pub fn decision(data: &[u8]) {
    let (mut input, mut node, mut seen) = (Input::new(data), addresses::node_of_stories(), Vec::new());
    for _ in 0..STEPS {
        if input.is_empty() {
            return;
        }
        match input.below(8) {
            0 | 1 => change(&mut input, &mut node),
            hook => pass(&mut input, &mut node, hook, &mut seen),
        }
    }
}

fn change(input: &mut Input<'_>, node: &mut ModelNode) {
    let (family, id) = (input.pick(&FAMILIES), input.pick(&IDS));
    let pod = addresses::pod(family, u8::try_from(input.below(addresses::PODS)).unwrap_or_default());
    let (maps, pods) = (&node.maps, &node.maps.pods);
    match input.below(8) {
        0 => drop(pods.borrow_mut().insert(pod, PodEntry::selected(id, 0))),
        // A class has the policy's number, so that each has its own.
        1 => drop(pods.borrow_mut().insert(pod, PodEntry::by_destination(id, 0))),
        2 => drop(pods.borrow_mut().insert(pod, PodEntry::known())),
        3 => drop(pods.borrow_mut().remove(&pod)),
        4 => own(maps, id, addresses::egress(family, u8::from(input.flag()))),
        5 if input.flag() => hand_over(input, maps, id, family),
        5 => maps.disown(id),
        6 => {
            let when_empty = input.pick(&[WhenEmpty::Drop, WhenEmpty::NodeAddress, WhenEmpty::NotListed]);
            let slots: Vec<PolicySlot> = (0..input.below(3))
                .map(|_| {
                    let address = addresses::egress(family, u8::from(input.flag()));
                    if input.flag() { PolicySlot::remote(address, addresses::OTHER) } else { PolicySlot::here(address) }
                })
                .collect();
            if let Some(policy) = PolicyEntry::with_slots(when_empty, &slots) {
                maps.put_policy(policy_key(id, family), policy);
            }
        }
        _ => {
            let on = input.pick(&[OnUnknownPod::Pass, OnUnknownPod::Drop, OnUnknownPod::PassWhileFollowed]);
            maps.configure(|config| *config = config.with_on_unknown_pod(on));
            maps.now.set(maps.now.get() + u64::from(input.byte()) * 10_000_000_000);
            maps.sweep(input.flag());
        }
    }
    node.renew_decision_number();
}

fn own(maps: &MemoryMaps, id: u32, address: Addr) {
    addresses::own(maps, id, address);
    if id == OF_SERVICE
        && let Some(owned) = maps.owned(id).copied()
    {
        maps.put_owned(id, owned.shared(id));
    }
}

/// A hand-over of the policy's address, in any state of the node's agent.
fn hand_over(input: &mut Input<'_>, maps: &MemoryMaps, id: u32, family: Family) {
    let address = addresses::egress(family, u8::from(input.flag()));
    let stage =
        input.pick(&[Some(HandoverStage::Leaving), Some(HandoverStage::Arriving), Some(HandoverStage::Open), None]);
    own(maps, id, address);
    let owned = *maps.owned(id).expect("just now");
    match stage {
        Some(stage) => {
            let since = maps.now.get() - u64::from(input.byte()) * 10_000_000;
            let handover = HandoverEntry::new(id, stage, since, addresses::OTHER, owned);
            maps.handovers.borrow_mut().insert(id, handover);
        }
        None => drop(maps.handovers.borrow_mut().remove(&id)),
    }
    if !input.flag() {
        maps.owned.borrow_mut().remove(&id);
    }
}

/// Number of recent frames that errors can quote.
const QUOTABLE: usize = 8;

fn pass(input: &mut Input<'_>, node: &mut ModelNode, hook: usize, seen: &mut Vec<Vec<u8>>) {
    let frame = match input.below(8) {
        0 => bent(input),
        1 if !seen.is_empty() => complaint(input, seen),
        _ => packet(input).frame(),
    };
    let mut hook = match hook {
        2 | 3 => PacketHook::FromPod,
        4 => {
            let source = input.pick(&[addresses::OTHER, addresses::SELF, addresses::remote_pod(Family::V4, 0)]);
            PacketHook::FromOverlay(Outer { source, egress_id: input.pick(&IDS) })
        }
        5 => PacketHook::FromNetdev(addresses::UPLINK),
        6 => {
            let mark = input.pick(&MARKS);
            let ifindex = addresses::UPLINK;
            PacketHook::ToNetdev(Meta { mark, ifindex, forwarded: input.flag(), returning: input.flag() })
        }
        _ => PacketHook::ToPod,
    };
    // One byte, so that the corpus keeps its meaning.
    let chances = input.byte();
    let gso_size = if chances % 16 == 1 { 1000 } else { 0 };
    if chances / 16 == 1
        && let PacketHook::FromNetdev(ifindex) | PacketHook::ToNetdev(Meta { ifindex, .. }) = &mut hook
    {
        *ifindex = addresses::FURTHER;
    }
    let outcome = node.run(&hook, &Skb { frame: &frame, gso_size, foreign: false });
    seen.push(frame);
    if let PacketOutcome::Sent(_, out) = outcome {
        seen.push(out);
    }
    seen.drain(..seen.len().saturating_sub(QUOTABLE));
}

/// An ICMP error about a recent packet, with any source and destination, perhaps truncated.
fn complaint(input: &mut Input<'_>, seen: &[Vec<u8>]) -> Vec<u8> {
    let about = &seen[input.below(seen.len())];
    let Some(headers) = Headers::parse(about.as_slice(), Direction::Egress) else { return about.clone() };
    let any_address = addresses::any_address(headers.family);
    let ends = [headers.tuple.saddr, headers.tuple.daddr];
    let from = if input.flag() { input.pick(&any_address) } else { input.pick(&ends) };
    let to = if input.below(4) == 0 { input.pick(&any_address) } else { input.pick(&ends) };
    if from.family() != headers.family || to.family() != headers.family {
        return about.clone();
    }
    let kind = input.pick(&frame::error_kinds(headers.family));
    frame::error_about(about, from, to, kind, input.pick(&[1500, 28, 48, 20, 60]))
}

/// A packet with any source and destination.
fn packet(input: &mut Input<'_>) -> FuzzPacket {
    let family = input.pick(&FAMILIES);
    let any_address = addresses::any_address(family);
    let (icmp, echo, reply, error) = match family {
        Family::V4 => (PROTO_ICMP, 8, 0, 3),
        Family::V6 => (PROTO_ICMPV6, 128, 129, 1),
    };
    let protocol = input.pick(&[PROTO_TCP, PROTO_UDP, icmp, 132, 136, 33, 47, 51]);
    let kind = if protocol == icmp { input.pick(&[echo, reply, error]) } else { input.byte() };
    let fragment = match input.below(8) {
        0 => (0, true, 1),
        1 => (8, false, 1),
        _ => (0, false, 0),
    };
    FuzzPacket {
        saddr: input.pick(&any_address),
        daddr: input.pick(&any_address),
        protocol,
        sport: input.pick(&PORTS),
        dport: input.pick(&PORTS),
        kind,
        ttl: input.pick(&[64, 1, 2]),
        fragment,
        data: input.below(64),
        unsummed: input.below(8) == 0,
    }
}

/// A packet with changed bytes and a truncated end.
fn bent(input: &mut Input<'_>) -> Vec<u8> {
    let mut frame = packet(input).frame();
    for _ in 0..=input.below(4) {
        let at = 12 + usize::from(input.byte()) % (frame.len() - 12);
        frame[at] = input.byte();
    }
    let cut = usize::from(input.byte());
    frame.truncate(frame.len() - cut.min(frame.len()));
    frame.extend(input.bytes(8));
    frame
}
