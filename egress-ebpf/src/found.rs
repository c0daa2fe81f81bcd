//! Looking into the maps that say what a packet becomes: `pods`, `nat`, `flows`, `owned` and `handovers`.
//!
//! An element that is removed may be another key's at once, while a program still reads it. So each is copied into this
//! CPU's workspace first, and what is lent is the copy, where its seal says that it was written for this key as a whole
//! (`abi::seal`); otherwise the element is not there any more. A copy is good until the next look into the same map.
//!
//! The looks are out of line: they are taken in many places, and their frames would crowd each of these.
#![expect(unsafe_code, reason = "map access is one of the three places for it")]

use core::arch::asm;
use core::ptr;

use egress_common::abi::{Addr, Direction, Flow, HandoverEntry, NatEntry, Owned, PodEntry, Tuple};
use egress_common::decide::{Tables, phase};
use egress_common::wire::{PROTO_TCP, Segment, tcp};

use crate::alive::{Touched, change, touch};
use crate::maps::{FLOWS, HANDOVERS, Maps, NAT, OWNED, PODS, run_ns};
use crate::numbers::count_turn;
use crate::workspace::found;

/// The datagrams of a flow are noted once in each step of this length, half a minute: that map is a costly one, and what
/// it forgets is what has been silent longest. A power of two.
const DATAGRAM_STEP_NS: u64 = 1 << 35;

/// Copies an element, so that what is checked is what is used.
#[inline(always)]
fn copied<V: Copy>(element: *const V, copy: &mut V) -> &V {
    // SAFETY: a pointer from a lookup into a map, which the workspace is not part of; any bytes are a value of these types.
    unsafe { ptr::copy_nonoverlapping(element, copy, 1) };
    changed();
    copy
}

/// A copy on the stack, where there is room.
#[inline(always)]
pub fn copy_of<V: Copy>(element: &V) -> V {
    let copy = *element;
    changed();
    copy
}

/// Says that memory has changed: else the compiler might read an element once more instead of its copy.
#[inline(always)]
fn changed() {
    // SAFETY: nothing is done.
    unsafe { asm!("", options(nostack, preserves_flags)) };
}

/// A pod whose entry is written anew just now is looked up once more. One that is not there may be let pass, so whoever is
/// met in between a second time is taken for a pod of an object that has nothing, which drops its packet.
#[inline(never)]
pub fn pod(addr: &Addr) -> Option<&'static PodEntry> {
    let space = &mut found()?.pod;
    for _ in 0..2 {
        let pod = PODS.get_ptr_mut(addr)?;
        if copied(pod, space).is_of(addr) {
            return Some(space);
        }
    }
    *space = PodEntry::selected(0, 0);
    Some(space)
}

#[inline(never)]
pub fn owned(egress_id: u32) -> Option<&'static Owned> {
    let owned = OWNED.get_ptr_mut(egress_id)?;
    let copy = copied(owned, &mut found()?.owned);
    copy.is_of(egress_id).then_some(copy)
}

/// Whoever translates for the address finds it where that of `owned` lies.
#[inline(never)]
pub fn handover(egress_id: u32) -> Option<&'static HandoverEntry> {
    let handover = HANDOVERS.get_ptr_mut(egress_id)?;
    let found = found()?;
    let copy = copied(handover, &mut found.handover);
    if !copy.is_of(egress_id) {
        return None;
    }
    found.owned = copy.owned;
    Some(copy)
}

/// A flow, without noting anything.
#[inline(never)]
pub fn flow_only(tuple: &Tuple) -> Option<&'static Flow> {
    let flow = FLOWS.get_ptr_mut(tuple)?;
    let copy = copied(flow, &mut found()?.flow);
    copy.is_of(tuple).then_some(copy)
}

/// A flow, which a packet of the pod keeps alive.
#[inline(never)]
pub fn flow(tuple: &Tuple, segment: Segment) -> Option<&'static Flow> {
    let flow = FLOWS.get_ptr_mut(tuple)?;
    let copy = copied(flow, &mut found()?.flow);
    if !copy.is_of(tuple) {
        return None;
    }
    // SAFETY: see `maps`.
    let flow = unsafe { &mut *flow };
    let now = run_ns();
    match touch(&raw mut flow.last_seen_ns, now) {
        Touched::Gone => return None,
        // Keeps the datagrams of a flow from being forgotten before the flow is.
        Touched::Noted if tuple.protocol != PROTO_TCP && (copy.last_seen_ns ^ now) / DATAGRAM_STEP_NS != 0 => {
            Maps.note_datagram(tuple);
        }
        Touched::Noted | Touched::Fresh => {}
    }
    if change(&mut flow.state, |state| phase::own(state, segment.flags, Direction::Egress)) {
        opened(segment.flags);
    }
    change(&mut flow.acknowledged, |known| phase::number(known, segment, Direction::Egress));
    Some(copy)
}

/// A flow that an answer keeps alive. What has just been judged goes, and its mapping a little later.
#[inline(never)]
pub fn answered(tuple: &Tuple, segment: Segment) {
    let Some(flow) = FLOWS.get_ptr_mut(tuple) else { return };
    // SAFETY: see `maps`.
    let flow = unsafe { &mut *flow };
    let _noted = touch(&raw mut flow.last_seen_ns, run_ns());
    if change(&mut flow.state, |state| phase::answered(state, segment.flags, tuple.protocol)) {
        count_turn();
    }
    change(&mut flow.end, |known| phase::number(known, segment, Direction::Ingress));
}

/// A mapping, without noting anything.
#[inline(never)]
pub fn mapping_only(key: &Tuple) -> Option<&'static NatEntry> {
    let mapping = NAT.get_ptr_mut(key)?;
    let copy = copied(mapping, &mut found()?.mapping);
    copy.is_of(key).then_some(copy)
}

/// A mapping, which a packet of its direction keeps alive.
#[inline(never)]
pub fn mapping(key: &Tuple, segment: Segment) -> Option<&'static NatEntry> {
    let mapping = NAT.get_ptr_mut(key)?;
    let copy = copied(mapping, &mut found()?.mapping);
    if !copy.is_of(key) || !keep(mapping, key.direction(), segment) {
        return None;
    }
    if phase::tells(copy.state, segment.flags, key.direction()) {
        tell(copy, segment.flags, key.direction());
    }
    Some(copy)
}

/// Notes that a mapping is alive, and what the packet says of its connection; false where it is about to be removed. Out of
/// line, as [`tell`] is, since their frames lie upon those of a search for a port.
#[inline(never)]
fn keep(mapping: *mut NatEntry, direction: Direction, segment: Segment) -> bool {
    // SAFETY: see `maps`.
    let mapping = unsafe { &mut *mapping };
    if touch(&raw mut mapping.last_seen_ns, run_ns()) == Touched::Gone {
        return false;
    }
    if change(&mut mapping.state, |state| phase::own(state, segment.flags, direction)) {
        opened(segment.flags);
    }
    change(&mut mapping.number, |known| phase::number(known, segment, direction));
    true
}

/// A connection that begins anew on a known tuple has to be seen to be answered, and to go on: what is kept of the former
/// one must not hide it.
#[inline(always)]
fn opened(tcp_flags: u8) {
    if tcp_flags & tcp::SYN != 0 {
        count_turn();
    }
}

/// Tells the other direction of a reset, or of an opening.
#[inline(never)]
fn tell(copy: &NatEntry, tcp_flags: u8, direction: Direction) {
    let Some(other) = NAT.get_ptr_mut(&copy.other) else { return };
    // SAFETY: see `maps`.
    let state = unsafe { &mut (*other).state };
    if change(state, |state| phase::told(copy.state, tcp_flags, direction, state).unwrap_or(state)) {
        count_turn();
    }
}
