//! The bandwidth limit of an egress policy: `egress_common::decide::pace` judges, this file keeps the state in `pacing`.
//!
//! CPUs share the state without a lock. Each adds the time of its packet after it has judged it, so that as many packets pass
//! together at most as there are CPUs; they are counted, and the next ones wait for them.
#![expect(unsafe_code, reason = "map and packet access; see `maps` and `packet`")]

use core::intrinsics::AtomicOrdering::Relaxed;
use core::{intrinsics, ptr};

use aya_ebpf::bindings::BPF_NOEXIST;
use aya_ebpf::btf_maps::LruHashMap;
use aya_ebpf::helpers::generated::{bpf_ktime_get_ns, bpf_skb_set_tstamp};
use aya_ebpf::macros::btf_map;
use egress_common::abi::{Pacing, PolicyEntryKey, Verdict};
use egress_common::decide::pace::{self, HORIZON_NS, PacketDeparture};
use egress_common::decide::{Tables, mtu};
use egress_common::wire::Frame;

use crate::counters;
use crate::lease;
use crate::maps::{Maps, swap};
use crate::workspace::Run;

/// Of the policies that have sent last: with more limited policies in use on a node, some begin again with a whole burst.
/// Not pinned.
#[btf_map(name = "pacing")]
static PACING: LruHashMap<u32, Pacing, 4096> = LruHashMap::new();

/// Of `bpf_skb_set_tstamp`: the time is a departure time by CLOCK_MONOTONIC, which a redirect keeps (Linux 5.18).
const DELIVERY_MONO: u32 = 1;

/// Whether the egress policy has a limit in this family.
#[inline(always)]
pub fn is_limited(run: &Run<'_>, egress_id: u32) -> bool {
    let key = PolicyEntryKey::new(egress_id, run.headers.family);
    Maps.policy(&key).is_some_and(|policy| !policy.limit.is_none())
}

/// Counts the packet towards the limit of its policy, and gives it its departure time. Out of line for its frame.
#[inline(never)]
pub fn admit(run: &Run<'_>, egress_id: u32, ifindex: u32) -> Result<(), Verdict> {
    let admitted = judge(run, egress_id, ifindex);
    if admitted.is_err() {
        note_limited(egress_id);
    }
    admitted
}

#[inline(never)]
fn note_limited(egress_id: u32) {
    counters::egress_ip(egress_id, |count| count.limited += 1);
}

/// Out of line for its frame, and without a call, because it is at the end of long call chains.
#[inline(never)]
fn judge(run: &Run<'_>, egress_id: u32, ifindex: u32) -> Result<(), Verdict> {
    let key = PolicyEntryKey::new(egress_id, run.headers.family);
    let Some(policy) = Maps.policy(&key) else { return Ok(()) };
    let limit = policy.limit;
    if limit.is_none() {
        return Ok(());
    }
    let Some(pacing) = pacing(egress_id) else { return Err(Verdict::RateLimited) };
    // SAFETY: the helper takes nothing. The coarse clock of the other decisions has steps of milliseconds.
    let now = unsafe { bpf_ktime_get_ns() };
    // SAFETY: a field of what the lookup has found; see `maps`.
    let state = unsafe { &raw mut (*pacing).sent_ns };
    // SAFETY: likewise; other CPUs write it at the same time, by whole words.
    let sent = unsafe { ptr::read_volatile(state) };
    let is_shaped = run.config.paced_uplink != 0 && ifindex == run.config.uplink_ifindex;
    // While a packet waits, no program sees it again.
    let longest_wait = if is_shaped { lease::left_ns_inline().min(HORIZON_NS) } else { 0 };
    match pace::departure(&limit, sent, now, longest_wait) {
        PacketDeparture::Now => {}
        PacketDeparture::At(time) => {
            // SAFETY: the context is the program's own.
            let set = unsafe { bpf_skb_set_tstamp(run.packet.skb(), time, DELIVERY_MONO) };
            if set != 0 {
                return Err(Verdict::RateLimited);
            }
        }
        PacketDeparture::Never => return Err(Verdict::RateLimited),
    }
    let bytes = mtu::wire_bytes(run.packet.len() as u32, run.packet.gso_size(), run.headers);
    let time = limit.time_ns(bytes);
    // After a pause, the time begins now. Where another CPU was first, it has begun.
    if sent >= now || swap(state, sent, now + time) != sent {
        // SAFETY: as above; the old value is not asked for.
        unsafe { intrinsics::atomic_xadd::<u64, u64, { Relaxed }>(state, time) };
    }
    Ok(())
}

#[inline(always)]
fn pacing(egress_id: u32) -> Option<*mut Pacing> {
    if let Some(found) = PACING.get_ptr_mut(egress_id) {
        return Some(found);
    }
    // Another CPU may have created it first.
    let _taken = PACING.insert(egress_id, Pacing::default(), BPF_NOEXIST.into());
    PACING.get_ptr_mut(egress_id)
}
