//! Fragments that come before their first one: kept until that shows the ports, and then sent through the same hook again.
//!
//! ```text
//! later one, ports unknown    a place of `held` gets the frame, `awaited` the number of that place; the packet ends here
//! first one                   its ports go into `frags` (the decision); if others wait, it begins anew as a copy, each of
//!                             them takes its place in the packet and begins anew behind it; what is left is dropped
//! ```
//!
//! "Begins anew" is the device's own input queue, which keeps the order: whoever comes behind (the guard of the uplink, a
//! gateway on another node) sees the first fragment first.
//!
//! Two CPUs may meet. Who keeps a fragment writes it, and then looks for the ports again; who has the ports writes them,
//! and then looks for fragments. So one of them sees the other, and if both do, the state of the place says whose the
//! fragment is: it is taken by compare-and-swap, for writing and for reading.
//!
//! What is kept goes on in the packet of the first fragment, and with what the kernel knows of that one. A checksum that is
//! left to a device would be completed in each of them, over bytes that have nothing to do with it. But no stack leaves one
//! in a fragment, since no device could sum up a datagram that it sees a piece of: Linux completes it before it cuts
//! (`ip_do_fragment`, `ip6_fragment`). Who makes such a first fragment by hand has sent a datagram whose checksum is wrong
//! in whatever order its pieces arrive.
//!
//! Nothing here is for sure: places are taken in turns, whatever they held, so that no stranger's fragments stay in the way
//! of others, and a datagram of which a piece is lost is sent again by its sender.
#![expect(unsafe_code, reason = "map access is one of the three places for it")]

use core::ffi::c_void;
use core::intrinsics;
use core::intrinsics::AtomicOrdering::SeqCst;
use core::ptr;

use aya_ebpf::bindings::BPF_NOEXIST;
use aya_ebpf::btf_maps::{Array, LruHashMap};
use aya_ebpf::helpers::generated::{bpf_get_smp_processor_id, bpf_loop};
use aya_ebpf::macros::btf_map;
use egress_common::abi::{Config, FragKey, Verdict};
use egress_common::decide::expiry::FRAGMENT_NS;
use egress_common::decide::{Tables, fragments};
use egress_common::wire::Frame;

use crate::alive::{self, swap};
use crate::hidden::hidden;
use crate::maps::Maps;
use crate::packet::Packet;
use crate::workspace::Workspace;
use crate::{Outcome, apart};

/// Fragments of one datagram that are kept: 64 KB in pieces of 1,280 bytes, as IPv6 senders may cut them, are 54.
const MOST: u32 = 64;
/// Places for fragments: 2 MB. At a time, twenty datagrams of 64 KB that come reversed find room.
const PLACES: u32 = 1024;
/// Longest frame that is kept: what a link of 1500 takes, with room for tags. One of larger frames cuts hardly anything.
const FRAME: usize = 1992;
/// CPUs begin so far from one another.
const STRIDE: u32 = 64;

#[btf_map(name = "held")]
static HELD: Array<Held, { PLACES as usize }> = Array::new();
/// Datagrams whose first fragment is waited for; what has been used longest ago is forgotten first.
#[btf_map(name = "awaited")]
static AWAITED: LruHashMap<FragKey, Awaited, 1024> = LruHashMap::new();

/// Value of `held`.
#[repr(C)]
pub struct Held {
    /// [`FREE`], [`BUSY`], or when it was kept (CLOCK_MONOTONIC, ns).
    state: u64,
    key: FragKey,
    length: u32,
    reserved: u32,
    frame: [u8; FRAME],
}

const FREE: u64 = 0;
/// A CPU reads or writes it.
const BUSY: u64 = 1;

/// Value of `awaited`: the places of its fragments, in the order in which they came.
#[repr(C)]
pub struct Awaited {
    since_ns: u64,
    count: u32,
    reserved: u32,
    /// One more than the number of each place; zero: not written yet.
    places: [u16; MOST as usize],
}

/// What would crowd the stack; of this CPU.
#[repr(C)]
pub struct Space {
    key: FragKey,
    /// A new entry; all but its time stays zero.
    fresh: Awaited,
    /// Fragments that this CPU has kept.
    kept: u32,
    reserved: u32,
}

/// Whether later fragments of the datagram wait for its first one, whose ports the caller has just written.
#[inline(always)]
pub fn is_awaited(key: &FragKey) -> bool {
    // Each side writes and then reads what the other one writes: without this the read may be done before the write is
    // seen, on either side. `keep` swaps a state in between.
    alive::fence();
    AWAITED.get_ptr(key).is_some()
}

/// What becomes of a fragment that has met this end of a decision. Behind the decision and not inside of it: one frame upon
/// the other they are too large for Linux 6.1.
#[inline(always)]
pub fn judge(outcome: Outcome, packet: Packet) -> Outcome {
    match outcome.verdict() {
        Verdict::FragmentUnknown => apart::hold(packet),
        Verdict::FragmentsReleased => apart::release(packet),
        _ => outcome,
    }
}

/// Keeps a later fragment whose ports are not known.
#[inline(always)]
pub fn hold(packet: Packet, _: &Config, workspace: &mut Workspace) -> Outcome {
    let Workspace { heads, hold: space, .. } = workspace;
    space.key = fragments::key(heads);
    let Some(awaited) = keep(packet, space) else {
        return Outcome::done(Verdict::FragmentUnknown);
    };
    // The first one may have come meanwhile, and not have seen this one.
    if fragments::known(&space.key, &Maps).is_some() {
        give_back(packet, &space.key, awaited);
    }
    Outcome::done(Verdict::FragmentHeld)
}

/// Lets the first fragment begin anew, and those that wait for it behind it.
#[inline(always)]
pub fn release(packet: Packet, _: &Config, workspace: &mut Workspace) -> Outcome {
    let Workspace { heads, hold: space, .. } = workspace;
    space.key = fragments::key(heads);
    let awaited = AWAITED.get_ptr_mut(&space.key);
    if packet.begin_anew().is_none() {
        return Outcome::done(Verdict::RewriteFailed);
    }
    // Of several first ones, one releases. The entry stays readable until this program ends.
    if let Some(awaited) = awaited
        && AWAITED.remove(&space.key).is_ok()
    {
        give_back(packet, &space.key, awaited);
    }
    Outcome::done(Verdict::FragmentsReleased)
}

/// Writes the fragment into a place, and where that is.
#[inline(never)]
fn keep(packet: Packet, space: &mut Space) -> Option<*mut Awaited> {
    let length = packet.len() as u32;
    if packet.gso_size() != 0 || length as usize > FRAME {
        return None;
    }
    let now = Maps.now_ns();
    let awaited = awaited(space, now)?;
    // SAFETY: a pointer from a lookup; see `maps`.
    let number = unsafe { intrinsics::atomic_xadd::<u32, u32, { SeqCst }>(&raw mut (*awaited).count, 1) };
    if number >= MOST {
        return None;
    }
    // SAFETY: the helper takes nothing.
    let place = unsafe { bpf_get_smp_processor_id() }.wrapping_mul(STRIDE).wrapping_add(space.kept) & (PLACES - 1);
    space.kept = space.kept.wrapping_add(1);
    let held = HELD.get_ptr_mut(place)?;
    // SAFETY (both): pointers from lookups; see `maps`.
    let state = unsafe { &raw mut (*held).state };
    let before = unsafe { ptr::read_volatile(state) };
    if before == BUSY || swap(state, before, BUSY) != before {
        return None;
    }
    // SAFETY: from here to the next swap the place is this CPU's own.
    let stored = unsafe {
        (*held).key = space.key;
        (*held).length = length;
        packet.load_tail(0, length, &mut (*held).frame)
    };
    // Behind the comparison the compiler would leave out the mask.
    let at = hidden(number.into()) as usize & (MOST as usize - 1);
    // SAFETY: see `maps`; the mask keeps the number within the array.
    unsafe { ptr::write_volatile(&raw mut (*awaited).places[at], place as u16 + 1) };
    swap(state, BUSY, if stored.is_some() { now } else { FREE });
    stored.map(|()| awaited)
}

/// The datagram's entry, new where there is none or an old one: a number is used again some day.
#[inline(always)]
fn awaited(space: &mut Space, now: u64) -> Option<*mut Awaited> {
    let known = AWAITED.get_ptr_mut(&space.key);
    let flags = match known {
        // SAFETY: a pointer from a lookup; see `maps`.
        Some(known) if now.wrapping_sub(unsafe { (*known).since_ns }) <= FRAGMENT_NS => return Some(known),
        Some(_) => 0,
        None => BPF_NOEXIST.into(),
    };
    space.fresh.since_ns = now;
    // Another CPU may have been first.
    let _taken = AWAITED.insert(&space.key, &space.fresh, flags);
    AWAITED.get_ptr_mut(&space.key)
}

struct Walk<'a> {
    packet: Packet,
    key: &'a FragKey,
    awaited: *mut Awaited,
    now: u64,
}

/// Lets all that is kept of a datagram begin anew, by way of this packet, whose content is lost.
#[inline(never)]
fn give_back(packet: Packet, key: &FragKey, awaited: *mut Awaited) {
    let mut walk = Walk { packet, key, awaited, now: Maps.now_ns() };
    // SAFETY: the callback has the signature that the helper asks for, and `walk` lives on this frame until the helper
    // returns.
    unsafe { bpf_loop(MOST, give_back_one as *mut c_void, (&raw mut walk).cast(), 0) };
}

/// One step: 0 goes on, 1 ends it.
unsafe extern "C" fn give_back_one(number: u64, walk: *mut Walk<'_>) -> u64 {
    // SAFETY: `bpf_loop` hands back the pointer that it was given, to a live frame.
    let walk = unsafe { &mut *walk };
    // SAFETY: a pointer from a lookup; see `maps`.
    let count = unsafe { ptr::read_volatile(&raw const (*walk.awaited).count) };
    if number as u32 >= count {
        return 1;
    }
    // SAFETY: as above; the mask keeps the number within the array.
    let place = unsafe { ptr::read_volatile(&raw const (*walk.awaited).places[number as usize & (MOST as usize - 1)]) };
    // Not written yet: its CPU finds the ports itself. To look at some place meanwhile would keep another one from it.
    if place == 0 {
        return 0;
    }
    let Some(held) = HELD.get_ptr_mut(u32::from(place).wrapping_sub(1) & (PLACES - 1)) else { return 0 };
    // SAFETY (both): as above.
    let state = unsafe { &raw mut (*held).state };
    let since = unsafe { ptr::read_volatile(state) };
    if since <= BUSY || swap(state, since, BUSY) != since {
        return 0;
    }
    // SAFETY: from here to the next swap the place is this CPU's own.
    let held = unsafe { &mut *held };
    if held.key != *walk.key {
        swap(state, BUSY, since);
        return 0;
    }
    if walk.now.saturating_sub(since) <= FRAGMENT_NS {
        // A fragment that cannot be sent is lost, as on any way. A change of length, which there is in any case this way,
        // ends a complete checksum, which is that of another fragment.
        let length = held.length;
        let _lost = walk
            .packet
            .resize(length.wrapping_sub(1))
            .and_then(|()| walk.packet.resize(length))
            .and_then(|()| walk.packet.store_tail(0, length, &held.frame))
            .and_then(|()| walk.packet.begin_anew());
    }
    swap(state, BUSY, FREE);
    0
}
