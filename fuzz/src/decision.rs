//! The target `decision`: any packets, any state, through all hooks; what must hold is asserted by [`crate::node`].

use egress_common::abi::{Family, OnUnknownPod, PodEntry, Policy, Slot, WhenEmpty};
use egress_common::decide::accept::Outer;
use egress_common::decide::leave::Meta;
use egress_common::wire::{PROTO_ICMP, PROTO_ICMPV6, PROTO_TCP, PROTO_UDP};

use crate::frame::Packet;
use crate::input::Input;
use crate::node::{MARKS, Node};
use crate::places::{self, FAMILIES};
use crate::world::policy_key;

/// Steps of one story.
const STEPS: usize = 48;
pub(crate) const IDS: [u32; 3] = [1, 2, 3];
pub(crate) const PORTS: [u16; 6] = [4000, 80, 4001, 443, 4794, 61_001];

pub fn decision(data: &[u8]) {
    let (mut input, mut node) = (Input::new(data), Node::new());
    for _ in 0..STEPS {
        if input.is_empty() {
            return;
        }
        match input.below(8) {
            0 | 1 => change(&mut input, &mut node),
            hook => pass(&mut input, &mut node, hook),
        }
    }
}

fn change(input: &mut Input<'_>, node: &mut Node) {
    let (family, id) = (input.pick(&FAMILIES), input.pick(&IDS));
    let pod = places::pod(family, u8::try_from(input.below(places::PODS)).unwrap_or_default());
    match input.below(8) {
        0 | 1 => drop(node.world.pods.insert(pod, PodEntry::selected(id, 0))),
        2 => drop(node.world.pods.insert(pod, PodEntry::known())),
        3 => drop(node.world.pods.remove(&pod)),
        4 => node.world.own(id, places::egress(family, u8::from(input.flag()))),
        5 => node.world.disown(id),
        6 => {
            let when_empty = input.pick(&[WhenEmpty::Drop, WhenEmpty::NodeAddress, WhenEmpty::NotListed]);
            let slots: Vec<Slot> = (0..input.below(3))
                .map(|_| {
                    let address = places::egress(family, u8::from(input.flag()));
                    if input.flag() { Slot::remote(address, places::OTHER) } else { Slot::here(address) }
                })
                .collect();
            if let Some(policy) = Policy::with_slots(when_empty, &slots) {
                node.world.policies.insert(policy_key(id, family), policy);
            }
        }
        _ => {
            let on = input.pick(&[OnUnknownPod::Pass, OnUnknownPod::Drop]);
            node.config = node.config.with_on_unknown_pod(on);
            node.world.now += u64::from(input.byte()) * 10_000_000_000;
            node.world.sweep(&node.config.timeouts.clone());
        }
    }
    node.decide_anew();
}

fn pass(input: &mut Input<'_>, node: &mut Node, hook: usize) {
    let frame = if input.below(8) == 0 { bent(input) } else { packet(input).frame() };
    match hook {
        2 | 3 => drop(node.steer(&frame)),
        4 => {
            let source = input.pick(&[places::OTHER, places::SELF, places::remote_pod(Family::V4, 0)]);
            node.accept(&Outer { source, egress_id: input.pick(&IDS) }, &frame);
        }
        5 => drop(node.enter(&frame)),
        6 => {
            let mark = input.pick(&MARKS);
            node.leave(&frame, &Meta { mark, forwarded: input.flag(), returning: input.flag() });
        }
        _ => drop(node.notice(&frame)),
    }
}

/// A packet from anybody to anybody.
fn packet(input: &mut Input<'_>) -> Packet {
    let family = input.pick(&FAMILIES);
    let everybody = places::everybody(family);
    let (icmp, echo, reply, error) = match family {
        Family::V4 => (PROTO_ICMP, 8, 0, 3),
        Family::V6 => (PROTO_ICMPV6, 128, 129, 1),
    };
    let protocol = input.pick(&[PROTO_TCP, PROTO_UDP, icmp, 132]);
    let kind = if protocol == icmp { input.pick(&[echo, reply, error]) } else { input.byte() };
    let fragment = match input.below(8) {
        0 => (0, true, 1),
        1 => (8, false, 1),
        _ => (0, false, 0),
    };
    Packet {
        saddr: input.pick(&everybody),
        daddr: input.pick(&everybody),
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

/// A packet with bytes changed and its end cut off.
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
