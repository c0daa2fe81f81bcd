//! Noting that an entry is alive, by several CPUs at once and against a sweep.
//!
//! Fields that packets change are integers; what is raced for is settled by compare-and-swap (see `decide::expiry`).
#![expect(unsafe_code, reason = "map access is one of the three places for it")]

use core::intrinsics::AtomicOrdering::{Relaxed, SeqCst};
use core::{intrinsics, ptr};

use egress_common::decide::expiry::GONE;

use crate::hidden::hidden;

/// An entry is noted as alive at most this often, so that CPUs do not fight over its cache line.
const SEEN_STEP_NS: u64 = 1 << 28;
/// What noting that an entry is alive came to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Touched {
    /// It has been judged and is about to be removed: as good as not there.
    Gone,
    /// It was seen a moment ago.
    Fresh,
    Noted,
}

/// Notes that an entry is alive, unless a sweep has won; see `decide::expiry`.
#[inline(always)]
pub fn touch(last_seen_ns: *mut u64, now: u64) -> Touched {
    // SAFETY: the caller's pointer is one from a lookup; see `maps`.
    let seen = unsafe { ptr::read_volatile(last_seen_ns) };
    if seen == GONE {
        return Touched::Gone;
    }
    if now.wrapping_sub(seen) <= SEEN_STEP_NS {
        return Touched::Fresh;
    }
    // Whoever has written meanwhile, but for a sweep, has noted the same.
    if swap(last_seen_ns, seen, now) == GONE { Touched::Gone } else { Touched::Noted }
}

/// Compare-and-swap of a whole number of 32 or 64 bits; returns what was there.
#[inline(always)]
pub fn swap<T: Copy>(at: *mut T, old: T, new: T) -> T {
    // SAFETY: the caller's pointer is one from a lookup, to an aligned field; see `maps`.
    unsafe { intrinsics::atomic_cxchg::<T, { SeqCst }, { SeqCst }>(at, old, new).0 }
}

/// Writes only what changes, so that CPUs do not fight over the cache line. Whether it did.
#[inline(always)]
pub fn change(state: &mut u32, next: impl Fn(u32) -> u32) -> bool {
    let new = next(*state);
    let differs = *state != new;
    if differs {
        *state = new;
    }
    differs
}

/// Nothing behind this is read before all that stands before it is written. An atomic addition whose old value is asked for
/// orders both, on every processor (LKMM, "value-returning atomics are fully ordered").
#[inline(always)]
pub fn fence() {
    let mut number = 0u32;
    // SAFETY: a number on this frame.
    let _ordered = hidden(unsafe { intrinsics::atomic_xadd::<u32, u32, { SeqCst }>(&raw mut number, 1) }.into());
}

#[inline(always)]
pub fn count_up(number: *mut u32) {
    // SAFETY: the caller's pointer is one from a lookup; the old value is not asked for.
    unsafe { intrinsics::atomic_xadd::<u32, u32, { Relaxed }>(number, 1) };
}
