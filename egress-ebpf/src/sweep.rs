//! Expiry: removes idle entries of the flow maps, and counts the others.
//!
//! A packet may use an entry during its check. Compare-and-swap on the last-seen time settles the race (see
//! `decide::expiry`): an entry refreshed after the check stays; an entry marked first is missing for that packet. A NAT
//! entry is removed if both keys could be marked; the reverse key is removed first, and its remover also removes the
//! forward key.
//!
//! Another CPU may remove the visited element, and its memory may be reused for another key (`abi::seal`). So the key
//! is copied before the compare-and-swap: reused memory has another time, so that the swap fails.
//!
//! Mark 1 on the test packet means that a map is nearly full: unanswered connections expire sooner.
#![expect(unsafe_code, reason = "map and packet access; see `maps` and `packet`")]

use core::ffi::c_void;

use aya_ebpf::btf_maps::HashMap;
use aya_ebpf::helpers::generated::bpf_for_each_map_elem;
use egress_common::abi::{Direction, ExposedPort, Exposure, Flow, Holder, Inbound, NatEntry, Share, Timeouts, Tuple};
use egress_common::decide::{QuotaKind, Tables, expiry};

use crate::maps::{self, EXPOSED, FLOWS, INBOUND, Maps, NAT, SHARES, USAGE, clock_ns};
use crate::nat;

/// State of the callbacks.
struct Sweep {
    now_ns: u64,
    is_pressed: bool,
    timeouts: Timeouts,
    removed: i32,
    /// Counters of the current map.
    kept: u32,
}

/// Signature of a callback of `bpf_for_each_map_elem`; zero continues.
type Callback<K, V> = unsafe extern "C" fn(*mut c_void, *const K, *mut V, *mut Sweep) -> i64;

pub fn sweep(is_pressed: bool) -> i32 {
    let timeouts = maps::config().map_or(Timeouts::DEFAULT, |config| config.timeouts);
    let timeouts = if is_pressed { expiry::pressed(timeouts) } else { timeouts };
    let mut sweep = Sweep { now_ns: clock_ns(), is_pressed, timeouts, removed: 0, kept: 0 };
    // New counts of each pod, egress policy and exposed port; the former ones are in use until the walk ends.
    walk(&SHARES, begin_shares, &mut sweep);
    let (nat, flows) = (walk(&NAT, nat_entry, &mut sweep), walk(&FLOWS, flow, &mut sweep));
    walk(&SHARES, end_shares, &mut sweep);
    walk(&EXPOSED, begin_count, &mut sweep);
    let inbound = walk(&INBOUND, inbound, &mut sweep);
    walk(&EXPOSED, end_count, &mut sweep);
    if let Some(known) = USAGE.get_ptr_mut(0) {
        // Claims during the walk may be missing until the next one.
        // SAFETY: a pointer from a lookup, valid until the program ends; all fields are integers.
        unsafe { ((*known).nat, (*known).flows, (*known).inbound) = (nat, flows, inbound) };
    }
    sweep.removed
}

/// Returns the number of remaining entries.
#[inline(always)]
fn walk<K, V, const N: usize, const F: usize>(
    map: &HashMap<K, V, N, F>,
    each: Callback<K, V>,
    sweep: &mut Sweep,
) -> u32 {
    sweep.kept = 0;
    // SAFETY: the map is one of ours, the callback has the signature that the helper asks for with this map's key and
    // value, and `sweep` lives on the caller's frame until the helper returns.
    unsafe {
        bpf_for_each_map_elem(
            core::ptr::from_ref(map).cast_mut().cast(),
            each as *mut c_void,
            (&raw mut *sweep).cast(),
            0,
        )
    };
    sweep.kept
}

/// Marks an entry that was last seen at `seen`; false if a packet was faster.
#[inline(always)]
fn take(last_seen_ns: *mut u64, seen: u64) -> bool {
    maps::swap(last_seen_ns, seen, expiry::GONE) == seen
}

unsafe extern "C" fn nat_entry(_map: *mut c_void, key: *const Tuple, value: *mut NatEntry, sweep: *mut Sweep) -> i64 {
    // SAFETY: the helper hands in an element of the map and the pointer that it was given.
    let (key, entry, sweep) = unsafe { (&*key, &mut *value, &mut *sweep) };
    // The element may be removed, and its memory another key's, at any time: see `abi::seal`.
    let (key, copy) = (&maps::copy_of(key), &maps::copy_of(entry));
    let seen = copy.last_seen_ns;
    if !copy.is_of(key) {
        // Packets ignore an entry with a broken seal, and cannot replace it: if it is more than a transient mix, it
        // expires like any other entry. Reused memory is not idle.
        if expiry::is_nat_entry_idle(&sweep.timeouts, copy, None, sweep.now_ns)
            && take(&raw mut entry.last_seen_ns, seen)
        {
            Maps.forget_nat(key);
            sweep.removed += 1;
        } else {
            sweep.kept += 1;
        }
        return 0;
    }
    // The walk visits both keys of a NAT entry, and checks and counts it at the forward one. A key without its
    // counterpart is left from an incomplete claim. A forward key is removed at once, since it would lose all answers;
    // a reverse key may belong to a claim in progress, so it expires normally.
    let other = NAT.get_ptr_mut(&copy.other);
    // SAFETY: a pointer from a lookup; see `maps`.
    let other = other.map(|other| unsafe { &mut *other }).filter(|other| names(other, &copy.other, key));
    match (key.direction(), other) {
        (Direction::Ingress, Some(_)) => {}
        (Direction::Ingress, None) => {
            let idle = expiry::is_nat_entry_idle(&sweep.timeouts, copy, None, sweep.now_ns);
            if idle && take(&raw mut entry.last_seen_ns, seen) {
                Maps.forget_nat(key);
                sweep.removed += 1;
            } else {
                sweep.kept += 1;
            }
        }
        (Direction::Egress, None) => {
            Maps.forget_nat(key);
            sweep.removed += 1;
        }
        (Direction::Egress, Some(other)) => {
            let answered = other.last_seen_ns;
            let idle = expiry::is_nat_entry_idle(&sweep.timeouts, copy, Some(other), sweep.now_ns);
            if idle && take_both(entry, seen, other, answered) {
                Maps.forget_nat(&copy.other);
                Maps.forget_nat(key);
                sweep.removed += 2;
            } else {
                sweep.kept += 2;
                nat::recount(&key.saddr, copy.egress_id, QuotaKind::NatEntries);
            }
        }
    }
    0
}

/// Whether this is a complete value of `at` with `key` as its counterpart, as packets check it.
#[inline(never)]
fn names(element: &NatEntry, at: &Tuple, key: &Tuple) -> bool {
    let copy = maps::copy_of(element);
    copy.is_of(at) && copy.other == *key
}

/// Both keys or neither.
#[inline(always)]
fn take_both(forward: &mut NatEntry, seen: u64, reverse: &mut NatEntry, answered: u64) -> bool {
    if !take(&raw mut forward.last_seen_ns, seen) {
        return false;
    }
    if take(&raw mut reverse.last_seen_ns, answered) {
        return true;
    }
    // An answer came: packets that met the marked forward key were dropped, which a flow survives.
    maps::swap(&raw mut forward.last_seen_ns, expiry::GONE, seen);
    false
}

unsafe extern "C" fn flow(_map: *mut c_void, key: *const Tuple, value: *mut Flow, sweep: *mut Sweep) -> i64 {
    // SAFETY: as in `nat_entry`.
    let (key, flow, sweep) = unsafe { (&maps::copy_of(&*key), &mut *value, &mut *sweep) };
    let seen = flow.last_seen_ns;
    let idle = expiry::is_flow_idle(&sweep.timeouts, flow, key.protocol, sweep.now_ns);
    if idle && take(&raw mut flow.last_seen_ns, seen) {
        Maps.forget_flow(key);
        sweep.removed += 1;
    } else {
        sweep.kept += 1;
        nat::recount(&key.saddr, flow.egress_id, QuotaKind::Flows);
    }
    0
}

unsafe extern "C" fn inbound(_map: *mut c_void, key: *const Tuple, value: *mut Inbound, sweep: *mut Sweep) -> i64 {
    // SAFETY: as in `nat_entry`.
    let (key, inbound, sweep) = unsafe { (&maps::copy_of(&*key), &mut *value, &mut *sweep) };
    let seen = inbound.last_seen_ns;
    let idle = expiry::is_inbound_idle(&sweep.timeouts, sweep.is_pressed, inbound, key.protocol, sweep.now_ns);
    if idle && take(&raw mut inbound.last_seen_ns, seen) {
        Maps.forget_inbound(key);
        sweep.removed += 1;
    } else {
        sweep.kept += 1;
        if let Some(exposure) = EXPOSED.get_ptr_mut(&ExposedPort::of(key)) {
            // SAFETY: a pointer from a lookup; see `maps`.
            maps::count_up(unsafe { &raw mut (*exposure).counting });
        }
    }
    0
}

unsafe extern "C" fn begin_shares(_: *mut c_void, _: *const Holder, share: *mut Share, _: *mut Sweep) -> i64 {
    // SAFETY: as in `nat_entry`.
    unsafe { ((*share).counting_flows, (*share).counting_nat_entries) = (0, 0) };
    0
}

/// Claims during the walk may be missing until the next one. A holder without entries is removed.
unsafe extern "C" fn end_shares(_: *mut c_void, key: *const Holder, share: *mut Share, _: *mut Sweep) -> i64 {
    // SAFETY: as in `nat_entry`.
    let (key, share) = unsafe { (maps::copy_of(&*key), &mut *share) };
    (share.flows, share.nat_entries) = (share.counting_flows, share.counting_nat_entries);
    if share.flows == 0 && share.nat_entries == 0 {
        let _gone = SHARES.remove(&key);
    }
    0
}

unsafe extern "C" fn begin_count(_: *mut c_void, _: *const ExposedPort, value: *mut Exposure, _: *mut Sweep) -> i64 {
    // SAFETY: as in `nat_entry`.
    unsafe { (*value).counting = 0 };
    0
}

/// Claims during the walk may be missing until the next one.
unsafe extern "C" fn end_count(_: *mut c_void, _: *const ExposedPort, value: *mut Exposure, _: *mut Sweep) -> i64 {
    // SAFETY: as in `nat_entry`.
    unsafe { (*value).inbound = (*value).counting };
    0
}
