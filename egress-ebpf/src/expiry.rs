//! Expiry: removes idle entries of `nat`, `flows` and `inbound`, one at a time.
//!
//! A packet removes the idle entry that it finds, and continues without. The sweep of the agent reads the maps in batches
//! and passes the keys of possibly idle entries in the map `candidates`; the program checks each of them again.
//!
//! A packet may use an entry during its check. Compare-and-swap on the last-seen time settles the race (see
//! `decide::expiry`): an entry refreshed after the check stays; an entry marked first is missing for that packet. Only
//! who has marked an element removes it, so the element stays at its key until then, and is counted once. The reverse
//! key of a NAT entry comes first.
//!
//! Before Linux 6.3 a test run does not disable bottom halves: packets interrupt `sweep` on its CPU. So it has scratch
//! space of its own.
#![expect(unsafe_code, reason = "map and packet access; see `maps` and `packet`")]

use core::ffi::c_void;

use aya_ebpf::btf_maps::Array;
use aya_ebpf::helpers::generated::bpf_loop;
use aya_ebpf::macros::btf_map;
use egress_common::abi::{
    CANDIDATES, Config, Direction, Flow, Holder, Inbound, NatEntry, SweepMode, SweepRequest, SweptMap, Timeouts, Tuple,
};
use egress_common::decide::expiry;

use crate::maps::{self, FLOWS, INBOUND, NAT, clock_ns};
use crate::workspace;

/// Keys for a run of `sweep`; the agent runs one at a time.
#[btf_map(name = "candidates")]
static CANDIDATE_KEYS: Array<Tuple, { CANDIDATES as usize }> = Array::new();

/// Scratch space of `sweep`.
#[btf_map(name = "sweep_scratch")]
static SWEEP_SCRATCH: Array<ExpiryCheck, 1> = Array::new();

/// Scratch space of a check: copies of the two values of a NAT entry.
#[repr(C)]
pub struct ExpiryCheck {
    here: NatEntry,
    other: NatEntry,
    key: Tuple,
    /// The holder of the removed entry.
    pub holder: Holder,
}

/// State of a sweep.
struct Sweep {
    request: SweepRequest,
    timeouts: Timeouts,
    removed: i32,
}

/// Removes candidates; returns the number of removed keys.
pub fn sweep(request: SweepRequest) -> i32 {
    let timeouts = timeouts();
    let timeouts = if request.mode == SweepMode::Pressed { expiry::pressed(timeouts) } else { timeouts };
    let mut sweep = Sweep { request, timeouts, removed: 0 };
    let count = u32::from(request.count).min(CANDIDATES);
    // SAFETY: the callback has the signature that the helper asks for, and `sweep` lives on this frame until the helper
    // returns.
    unsafe { bpf_loop(count, candidate as *mut c_void, (&raw mut sweep).cast(), 0) };
    sweep.removed
}

/// Body of the loop; zero continues.
unsafe extern "C" fn candidate(index: u64, sweep: *mut Sweep) -> u64 {
    // SAFETY: `bpf_loop` hands back the pointer that it was given, to a live frame.
    let sweep = unsafe { &mut *sweep };
    // SAFETY: a pointer from a lookup; only the agent writes the map, and not while this program runs.
    let Some(key) = CANDIDATE_KEYS.get_ptr(index as u32).map(|key| unsafe { &*key }) else { return 1 };
    // SAFETY: a pointer from a lookup; only this program uses the map, and it does not run twice at a time.
    let Some(check) = SWEEP_SCRATCH.get_ptr_mut(0).map(|check| unsafe { &mut *check }) else { return 1 };
    let is_any = sweep.request.mode == SweepMode::All;
    let is_marked = sweep.request.mode == SweepMode::Marked;
    let is_pressed = sweep.request.mode == SweepMode::Pressed;
    sweep.removed += match sweep.request.map {
        SweptMap::Nat if is_any => remove_nat(key, check),
        SweptMap::Nat if is_marked => remove_stuck_nat(key, check),
        SweptMap::Nat => expire_nat(key, &sweep.timeouts, check),
        SweptMap::Flows if is_any => i32::from(maps::forget_flow(key, &mut check.holder)),
        SweptMap::Flows => expire_flow(key, &sweep.timeouts, is_marked, check),
        SweptMap::Inbound if is_any => i32::from(maps::forget_inbound(key)),
        SweptMap::Inbound => expire_inbound(key, &sweep.timeouts, is_pressed, is_marked),
    };
    0
}

#[inline(always)]
fn timeouts() -> Timeouts {
    maps::config().map_or(Timeouts::DEFAULT, |config: &Config| config.timeouts)
}

/// Marks an entry that was last seen at `seen`; false if a packet was faster.
#[inline(always)]
fn take(last_seen_ns: *mut u64, seen: u64) -> bool {
    maps::swap(last_seen_ns, seen, expiry::GONE) == seen
}

/// Marks an entry whenever it was last seen; false if another CPU has. A packet may refresh it in between, which it
/// does once in a quarter of a second.
#[inline(always)]
pub fn mark(last_seen_ns: *mut u64) -> bool {
    for _ in 0..3 {
        let seen = maps::last_seen(last_seen_ns);
        if seen == expiry::GONE {
            return false;
        }
        if take(last_seen_ns, seen) {
            return true;
        }
    }
    false
}

/// Removes the NAT entry with this reverse key.
#[inline(never)]
fn remove_nat(reverse: &Tuple, check: &mut ExpiryCheck) -> i32 {
    let Some(element) = NAT.get_ptr_mut(reverse) else { return 0 };
    maps::copied(element, &mut check.here);
    check.key = check.here.other;
    let is_whole = check.here.is_of(reverse) && has_counterpart(reverse, check);
    if !maps::forget_nat(reverse, &mut check.holder) {
        return 0;
    }
    // Only the remover of the reverse key removes the forward key: it may belong to a new NAT entry by then.
    1 + i32::from(is_whole && maps::forget_nat(&check.key, &mut check.holder))
}

/// Removes a key that is marked ([`SweepMode::Marked`]).
#[inline(never)]
fn remove_stuck_nat(key: &Tuple, check: &mut ExpiryCheck) -> i32 {
    let Some(element) = NAT.get_ptr_mut(key) else { return 0 };
    // SAFETY: a pointer from a lookup; see `maps`.
    if maps::last_seen(unsafe { &raw mut (*element).last_seen_ns }) != expiry::GONE {
        return 0;
    }
    i32::from(maps::remove_marked_nat(key, &mut check.holder))
}

/// Removes the NAT entry of this key, either one, if it is idle; returns the number of removed keys. It is at the end of
/// the longest call chains, so its steps are out of line and leave what they find in the scratch space.
#[inline(never)]
pub fn expire_nat(key: &Tuple, timeouts: &Timeouts, check: &mut ExpiryCheck) -> i32 {
    let found = idle_nat(key, timeouts, check);
    if found == LONE {
        return i32::from(take_nat(key, check.here.last_seen_ns) && maps::remove_marked_nat(key, &mut check.holder));
    }
    if found != WHOLE {
        return 0;
    }
    // Both keys or neither, the reverse one first.
    if key.direction() == Direction::Egress {
        if !take_nat(&check.key, check.other.last_seen_ns) {
            return 0;
        }
        if !take_nat(key, check.here.last_seen_ns) {
            give_back(&check.key, check.other.last_seen_ns);
            return 0;
        }
        i32::from(maps::remove_marked_nat(&check.key, &mut check.holder))
            + i32::from(maps::remove_marked_nat(key, &mut check.holder))
    } else {
        if !take_nat(key, check.here.last_seen_ns) {
            return 0;
        }
        if !take_nat(&check.key, check.other.last_seen_ns) {
            give_back(key, check.here.last_seen_ns);
            return 0;
        }
        i32::from(maps::remove_marked_nat(key, &mut check.holder))
            + i32::from(maps::remove_marked_nat(&check.key, &mut check.holder))
    }
}

/// No idle NAT entry.
const NONE: u32 = 0;
/// An idle key without its counterpart.
const LONE: u32 = 1;
/// An idle NAT entry with both keys.
const WHOLE: u32 = 2;

/// Whether this key's NAT entry is idle. Copies both values and the other key to the scratch space.
#[inline(never)]
fn idle_nat(key: &Tuple, timeouts: &Timeouts, check: &mut ExpiryCheck) -> u32 {
    let Some(element) = NAT.get_ptr_mut(key) else { return NONE };
    let now = clock_ns();
    maps::copied(element, &mut check.here);
    if !expiry::may_nat_entry_be_idle(timeouts, key.protocol, check.here.last_seen_ns, now) {
        return NONE;
    }
    check.key = check.here.other;
    let is_sealed = check.here.is_of(key);
    if !is_sealed || !has_counterpart(key, check) {
        // A broken seal: packets ignore the entry, and cannot replace it. Or a key without its counterpart: a forward
        // key is removed at once, since it would lose all answers; a reverse key may belong to a claim in progress.
        let is_lost = is_sealed && key.direction() == Direction::Egress;
        let is_idle = is_lost || expiry::is_nat_entry_idle(timeouts, &check.here, None, now);
        return if is_idle { LONE } else { NONE };
    }
    let (here, other) = (&check.here, &check.other);
    let (forward, reverse) = if key.direction() == Direction::Egress { (here, other) } else { (other, here) };
    if expiry::is_nat_entry_idle(timeouts, forward, Some(reverse), now) { WHOLE } else { NONE }
}

/// Copies the value of the checked entry's other key: whether it is complete, with `key` as its counterpart.
#[inline(always)]
fn has_counterpart(key: &Tuple, check: &mut ExpiryCheck) -> bool {
    let Some(element) = NAT.get_ptr_mut(&check.key) else { return false };
    let copy = maps::copied(element, &mut check.other);
    copy.is_of(&check.key) && copy.other == *key
}

/// Marks the value of this key, last seen at `seen`; false if a packet was faster. An element that has replaced the checked
/// one was seen later.
#[inline(always)]
fn take_nat(key: &Tuple, seen: u64) -> bool {
    // SAFETY: a pointer from a lookup; see `maps`.
    NAT.get_ptr_mut(key).is_some_and(|element| take(unsafe { &raw mut (*element).last_seen_ns }, seen))
}

/// Removes the mark of [`take_nat`]: a packet came the other way. Packets that met the marked key were dropped, which a
/// flow survives.
#[inline(always)]
fn give_back(key: &Tuple, seen: u64) {
    if let Some(element) = NAT.get_ptr_mut(key) {
        // SAFETY: as in `take_nat`.
        maps::swap(unsafe { &raw mut (*element).last_seen_ns }, expiry::GONE, seen);
    }
}

/// Removes a flow if it is idle, or, on demand, if it is marked ([`SweepMode::Marked`]).
#[inline(always)]
pub fn expire_flow(key: &Tuple, timeouts: &Timeouts, if_marked: bool, check: &mut ExpiryCheck) -> i32 {
    let Some(element) = FLOWS.get_ptr_mut(key) else { return 0 };
    // SAFETY: a pointer from a lookup; see `maps`.
    let flow: &mut Flow = unsafe { &mut *element };
    let seen = maps::last_seen(&raw mut flow.last_seen_ns);
    let is_stuck = if_marked && seen == expiry::GONE;
    let idle = expiry::is_flow_idle(timeouts, flow, seen, key.protocol, clock_ns());
    let is_marked = is_stuck || idle && take(&raw mut flow.last_seen_ns, seen);
    i32::from(is_marked && maps::remove_marked_flow(key, &mut check.holder))
}

/// Removes an inbound connection if it is idle, or, on demand, if it is marked ([`SweepMode::Marked`]).
#[inline(always)]
pub fn expire_inbound(key: &Tuple, timeouts: &Timeouts, is_pressed: bool, if_marked: bool) -> i32 {
    let Some(element) = INBOUND.get_ptr_mut(key) else { return 0 };
    // SAFETY: a pointer from a lookup; see `maps`.
    let inbound: &mut Inbound = unsafe { &mut *element };
    let seen = maps::last_seen(&raw mut inbound.last_seen_ns);
    let is_stuck = if_marked && seen == expiry::GONE;
    let idle = expiry::is_inbound_idle(timeouts, is_pressed, inbound, seen, key.protocol, clock_ns());
    let is_marked = is_stuck || idle && take(&raw mut inbound.last_seen_ns, seen);
    i32::from(is_marked && maps::remove_marked_inbound(key))
}

/// A packet has found this NAT entry, last seen then: whether it is idle, and removed.
#[inline(always)]
pub fn is_nat_gone(key: &Tuple, last_seen_ns: u64, now_ns: u64) -> bool {
    let (Some(config), Some(check)) = (maps::config(), workspace::checked()) else { return false };
    expiry::may_nat_entry_be_idle(&config.timeouts, key.protocol, last_seen_ns, now_ns)
        && expire_nat(key, &config.timeouts, check) > 0
}
