//! How much of `flows` and `nat` each pod and each egress policy holds, so that none of them takes the room of others.
//!
//! Claims count up, and each sweep counts anew: nothing counts down, so what is removed in between counts until the next
//! sweep. A count that is too low for a moment, or that finds no room in its map, lets a few flows through that the maps'
//! own limits still hold.
//!
//! All of it is out of line, because in the decisions its frames would crowd theirs.
#![expect(unsafe_code, reason = "map access is one of the three places for it; see `maps`")]

use aya_ebpf::bindings::BPF_NOEXIST;
use egress_common::abi::{Addr, Holder, Share};
use egress_common::decide::Held;

use crate::alive::count_up;
use crate::maps::SHARES;
use crate::numbers;

/// Whether the pod and its egress policy may have one more.
#[inline(never)]
pub fn has_quota(pod: &Addr, egress_id: u32, held: Held) -> bool {
    let Some(config) = numbers::config() else { return true };
    if !may_grow(&Holder::pod(*pod), held, config.pod_quota) {
        return false;
    }
    egress_id == 0 || may_grow(&Holder::policy(egress_id), held, config.policy_quota)
}

#[inline(always)]
fn may_grow(holder: &Holder, held: Held, quota: u32) -> bool {
    // SAFETY: see `maps`.
    SHARES.get_ptr(holder).is_none_or(|share| held.may_grow(unsafe { &*share }, quota))
}

/// Counts one more of the pod and of the egress policy.
#[inline(never)]
pub fn count(pod: &Addr, egress_id: u32, held: Held) {
    raise(&Holder::pod(*pod), held, false);
    if egress_id != 0 {
        raise(&Holder::policy(egress_id), held, false);
    }
}

/// The same, of the sweep that counts just now.
#[inline(never)]
pub fn recount(pod: &Addr, egress_id: u32, held: Held) {
    raise(&Holder::pod(*pod), held, true);
    if egress_id != 0 {
        raise(&Holder::policy(egress_id), held, true);
    }
}

#[inline(always)]
fn raise(holder: &Holder, held: Held, sweeps: bool) {
    if SHARES.get_ptr(holder).is_none() {
        // Another CPU may have been first, and a full map loses a count, never a packet.
        let _taken = SHARES.insert(holder, Share::default(), BPF_NOEXIST.into());
    }
    let Some(share) = SHARES.get_ptr_mut(holder) else { return };
    // SAFETY: see `maps`.
    count_up(unsafe {
        match (held, sweeps) {
            (Held::Flows, false) => &raw mut (*share).flows,
            (Held::Mappings, false) => &raw mut (*share).mappings,
            (Held::Flows, true) => &raw mut (*share).counting_flows,
            (Held::Mappings, true) => &raw mut (*share).counting_mappings,
        }
    });
}
