//! Expiry: removes idle entries of `nat`, `flows` and `inbound`, one at a time.
//!
//! A packet removes the idle entry that it finds, and continues without. The sweep of the agent reads the maps in batches
//! and passes the keys of possibly idle entries in the map `candidates`; the program checks each of them again.
//!
//! A packet may use an entry during its check. Compare-and-swap on the last-seen time settles the race (see
//! `decide::expiry`): an entry refreshed after the check stays; an entry marked first is missing for that packet. A NAT
//! entry is removed if both keys could be marked; the reverse key is removed first, and its remover also removes the
//! forward key.
//!
//! Another CPU may remove the checked element, and its memory may be reused for another key (`abi::seal`). Reused memory
//! has another time, so that the swap fails.
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

/// Copies of the two values of the checked NAT entry, in the workspace.
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
    let is_any = sweep.request.mode == SweepMode::All;
    let is_pressed = sweep.request.mode == SweepMode::Pressed;
    sweep.removed += match sweep.request.map {
        SweptMap::Nat if is_any => remove_nat(key),
        SweptMap::Nat => expire_nat(key, &sweep.timeouts),
        SweptMap::Flows if is_any => i32::from(maps::forget_flow(key)),
        SweptMap::Flows => expire_flow(key, &sweep.timeouts),
        SweptMap::Inbound if is_any => i32::from(maps::forget_inbound(key)),
        SweptMap::Inbound => expire_inbound(key, &sweep.timeouts, is_pressed),
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

/// Removes the NAT entry with this reverse key.
#[inline(never)]
fn remove_nat(reverse: &Tuple) -> i32 {
    let Some(checked) = workspace::checked() else { return 0 };
    let Some(element) = NAT.get_ptr_mut(reverse) else { return 0 };
    let copy = maps::copied(element, &mut checked.here);
    let is_whole = copy.is_of(reverse);
    checked.key = copy.other;
    if !maps::forget_nat(reverse) {
        return 0;
    }
    // Only the remover of the reverse key removes the forward key: it may belong to a new NAT entry by then.
    1 + i32::from(is_whole && maps::forget_nat(&checked.key))
}

/// Removes the NAT entry of this key, either one, if it is idle; returns the number of removed keys. It is at the end of
/// the longest call chains, so its steps are out of line and leave what they find in the workspace.
#[inline(never)]
pub fn expire_nat(key: &Tuple, timeouts: &Timeouts) -> i32 {
    let found = idle_nat(key, timeouts);
    let Some(checked) = workspace::checked() else { return 0 };
    if found == NONE || !take_nat(key, checked.here.last_seen_ns) {
        return 0;
    }
    if found == LONE {
        return i32::from(maps::forget_nat(key));
    }
    // Both keys or neither.
    if !take_nat(&checked.key, checked.other.last_seen_ns) {
        // A packet came the other way: packets that met the marked key were dropped, which a flow survives.
        give_back(key, checked.here.last_seen_ns);
        return 0;
    }
    let is_forward = key.direction() == Direction::Egress;
    let (forward, reverse) = if is_forward { (key, &checked.key) } else { (&checked.key, key) };
    i32::from(maps::forget_nat(reverse)) + i32::from(maps::forget_nat(forward))
}

/// No idle NAT entry.
const NONE: u32 = 0;
/// An idle key without its counterpart.
const LONE: u32 = 1;
/// An idle NAT entry with both keys.
const WHOLE: u32 = 2;

/// Whether this key's NAT entry is idle. Copies both values and the other key to the workspace.
#[inline(never)]
fn idle_nat(key: &Tuple, timeouts: &Timeouts) -> u32 {
    let Some(checked) = workspace::checked() else { return NONE };
    let Some(element) = NAT.get_ptr_mut(key) else { return NONE };
    let now = clock_ns();
    maps::copied(element, &mut checked.here);
    if !expiry::may_nat_entry_be_idle(timeouts, key.protocol, checked.here.last_seen_ns, now) {
        return NONE;
    }
    checked.key = checked.here.other;
    let is_sealed = checked.here.is_of(key);
    if !is_sealed || !has_counterpart(key, checked) {
        // A broken seal: packets ignore the entry, and cannot replace it. Or a key without its counterpart: a forward
        // key is removed at once, since it would lose all answers; a reverse key may belong to a claim in progress.
        let is_lost = is_sealed && key.direction() == Direction::Egress;
        let is_idle = is_lost || expiry::is_nat_entry_idle(timeouts, &checked.here, None, now);
        return if is_idle { LONE } else { NONE };
    }
    let (here, other) = (&checked.here, &checked.other);
    let (forward, reverse) = if key.direction() == Direction::Egress { (here, other) } else { (other, here) };
    if expiry::is_nat_entry_idle(timeouts, forward, Some(reverse), now) { WHOLE } else { NONE }
}

/// Copies the value of the checked entry's other key: whether it is complete, with `key` as its counterpart.
#[inline(always)]
fn has_counterpart(key: &Tuple, checked: &mut ExpiryCheck) -> bool {
    let Some(element) = NAT.get_ptr_mut(&checked.key) else { return false };
    let copy = maps::copied(element, &mut checked.other);
    copy.is_of(&checked.key) && copy.other == *key
}

/// Marks the value of this key, last seen at `seen`; false if a packet was faster. An element that has replaced the checked
/// one was seen later.
#[inline(always)]
fn take_nat(key: &Tuple, seen: u64) -> bool {
    // SAFETY: a pointer from a lookup; see `maps`.
    NAT.get_ptr_mut(key).is_some_and(|element| take(unsafe { &raw mut (*element).last_seen_ns }, seen))
}

/// Removes the mark of [`take_nat`].
#[inline(always)]
fn give_back(key: &Tuple, seen: u64) {
    if let Some(element) = NAT.get_ptr_mut(key) {
        // SAFETY: as in `take_nat`.
        maps::swap(unsafe { &raw mut (*element).last_seen_ns }, expiry::GONE, seen);
    }
}

/// Removes a flow if it is idle.
#[inline(always)]
pub fn expire_flow(key: &Tuple, timeouts: &Timeouts) -> i32 {
    let Some(element) = FLOWS.get_ptr_mut(key) else { return 0 };
    // SAFETY: a pointer from a lookup; see `maps`.
    let flow: &mut Flow = unsafe { &mut *element };
    let seen = flow.last_seen_ns;
    let idle = expiry::is_flow_idle(timeouts, flow, key.protocol, clock_ns());
    i32::from(idle && take(&raw mut flow.last_seen_ns, seen) && maps::forget_flow(key))
}

/// Removes an inbound connection if it is idle.
#[inline(always)]
pub fn expire_inbound(key: &Tuple, timeouts: &Timeouts, is_pressed: bool) -> i32 {
    let Some(element) = INBOUND.get_ptr_mut(key) else { return 0 };
    // SAFETY: a pointer from a lookup; see `maps`.
    let inbound: &mut Inbound = unsafe { &mut *element };
    let seen = inbound.last_seen_ns;
    let idle = expiry::is_inbound_idle(timeouts, is_pressed, inbound, key.protocol, clock_ns());
    i32::from(idle && take(&raw mut inbound.last_seen_ns, seen) && maps::forget_inbound(key))
}

/// A packet has found this NAT entry, last seen then: whether it is idle, and removed.
#[inline(always)]
pub fn is_nat_gone(key: &Tuple, last_seen_ns: u64, now_ns: u64) -> bool {
    let Some(config) = maps::config() else { return false };
    expiry::may_nat_entry_be_idle(&config.timeouts, key.protocol, last_seen_ns, now_ns)
        && expire_nat(key, &config.timeouts) > 0
}
