//! Packets and bytes: by verdict, and for each egress IP. Each CPU counts for itself.
#![expect(unsafe_code, reason = "map access is one of the three places for it")]

use aya_ebpf::bindings::{BPF_F_NO_PREALLOC, BPF_NOEXIST};
use aya_ebpf::btf_maps::{PerCpuArray, PerCpuHashMap};
use aya_ebpf::macros::btf_map;
use egress_common::abi::{Count, EipCount, Verdict};

use crate::Outcome;

#[btf_map(name = "counters")]
static COUNTERS: PerCpuArray<Count, { Verdict::SLOTS }> = PerCpuArray::new();
#[btf_map(name = "eip_counters")]
static EIP_COUNTERS: PerCpuHashMap<u32, EipCount, 16384, { BPF_F_NO_PREALLOC as usize }> = PerCpuHashMap::new();

/// What became of a packet.
#[inline(always)]
pub fn verdict(verdict: Verdict, bytes: u32) {
    if let Some(count) = COUNTERS.get_ptr_mut(verdict.index()) {
        // SAFETY: see `maps`; the element is this CPU's own.
        unsafe {
            (*count).packets += 1;
            (*count).bytes += u64::from(bytes);
        }
    }
}

/// Changes the counters of an egress IP, which begin with the first packet.
#[inline(always)]
pub fn egress_ip(egress_id: u32, change: impl Fn(&mut EipCount)) {
    if let Some(count) = EIP_COUNTERS.get_ptr_mut(egress_id) {
        // SAFETY: as in `verdict`.
        change(unsafe { &mut *count });
        return;
    }
    let mut first = EipCount::default();
    change(&mut first);
    // A full map loses a count, never a packet.
    let _full = EIP_COUNTERS.insert(egress_id, first, BPF_NOEXIST.into());
}

/// A new flow that gets no mapping is counted for its egress IP too.
#[inline(always)]
pub fn refused(egress_id: u32, verdict: Verdict) -> Outcome {
    egress_ip(egress_id, |count| count.refusals += 1);
    Outcome::done(verdict)
}

/// A packet to the world.
#[inline(always)]
pub fn out(egress_id: u32, bytes: u32) {
    egress_ip(egress_id, |count| {
        count.egress_packets += 1;
        count.egress_bytes += u64::from(bytes);
    });
}

/// An answer.
#[inline(always)]
pub fn back(egress_id: u32, bytes: u32) {
    egress_ip(egress_id, |count| {
        count.ingress_packets += 1;
        count.ingress_bytes += u64::from(bytes);
    });
}
