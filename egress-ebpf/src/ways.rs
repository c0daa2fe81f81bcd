//! The map `next_hops`: next hops that no mapping keeps.
#![expect(unsafe_code, reason = "map access is one of the three places for it")]

use aya_ebpf::btf_maps::PerCpuArray;
use aya_ebpf::macros::btf_map;
use egress_common::abi::{Addr, NextHop};

/// Next hops that no mapping keeps, towards other nodes and pods, by the end of their address: two that fall on one place
/// take turns. This CPU's own; not pinned.
#[btf_map(name = "next_hops")]
static WAYS: PerCpuArray<KeptWay, WAY_PLACES> = PerCpuArray::new();
const WAY_PLACES: usize = 512;

/// Value of `next_hops`.
#[repr(C)]
pub struct KeptWay {
    to: Addr,
    hop: NextHop,
}

#[inline(always)]
fn kept_way(to: &Addr) -> Option<*mut KeptWay> {
    let end = u32::from_be(to.words()[3]);
    WAYS.get_ptr_mut((end ^ end >> 9) & (WAY_PLACES as u32 - 1))
}

/// The next hop on the way to an address; one that is never valid where none is known.
#[inline(always)]
pub fn kept_hop(to: &Addr) -> &'static NextHop {
    static NONE: NextHop = NextHop::NONE;
    let Some(kept) = kept_way(to) else { return &NONE };
    // SAFETY: the element is this CPU's own, and TC programs do not interrupt one another.
    let kept = unsafe { &mut *kept };
    if kept.to != *to {
        kept.to = *to;
        kept.hop.valid_until_ns = 0;
    }
    &kept.hop
}

/// Keeps it, where [`kept_hop`] has been asked for this address right before.
#[inline(always)]
pub fn keep_hop(to: &Addr, hop: &NextHop) {
    if let Some(kept) = kept_way(to) {
        // SAFETY: as in `kept_hop`.
        unsafe { (*kept).hop = *hop };
    }
}
