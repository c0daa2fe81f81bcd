//! Counters by verdict and by egress IP, and events: drops and address conflicts. Counters are per CPU.
#![expect(unsafe_code, reason = "map and packet access; see `maps` and `packet`")]

use aya_ebpf::bindings::{BPF_F_NO_PREALLOC, BPF_NOEXIST};
use aya_ebpf::btf_maps::{PerCpuArray, PerCpuHashMap};
use aya_ebpf::macros::btf_map;
use egress_common::abi::{Count, DropEvent, EipCount, Verdict};
use egress_common::decide::{Tables, policy_of};

use crate::Outcome;
use crate::maps::{EVENTS, Maps};
use crate::packet::Packet;
use crate::workspace::{WORKSPACE, Workspace, workspace};

#[btf_map(name = "counters")]
static COUNTERS: PerCpuArray<Count, { Verdict::SLOTS }> = PerCpuArray::new();

#[btf_map(name = "eip_counters")]
static EIP_COUNTERS: PerCpuHashMap<u32, EipCount, 16384, { BPF_F_NO_PREALLOC as usize }> = PerCpuHashMap::new();

/// Counts a verdict.
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

/// Changes the counters of an egress IP; the first packet creates them.
#[inline(always)]
pub fn egress_ip(egress_id: u32, change: impl Fn(&mut EipCount)) {
    // A full map loses a count, never a packet.
    if let Some(count) = EIP_COUNTERS.get_ptr_mut(egress_id).or_else(|| begun(egress_id)) {
        // SAFETY: as in `verdict`.
        change(unsafe { &mut *count });
    }
}

/// New counters. The insertion is out of line, because its value would be in the frames of all callers.
#[inline(always)]
fn begun(egress_id: u32) -> Option<*mut EipCount> {
    begin(egress_id);
    EIP_COUNTERS.get_ptr_mut(egress_id)
}

#[inline(never)]
fn begin(egress_id: u32) {
    // Another CPU may have created them first.
    let _taken = EIP_COUNTERS.insert(egress_id, EipCount::default(), BPF_NOEXIST.into());
}

/// Counts a new flow without a NAT entry for its egress IP too.
#[inline(always)]
pub fn refused(egress_id: u32, verdict: Verdict) -> Outcome {
    egress_ip(egress_id, |count| count.refusals += 1);
    Outcome::done(verdict)
}

/// Counts an outbound packet.
#[inline(always)]
pub fn out(egress_id: u32, bytes: u32) {
    egress_ip(egress_id, |count| {
        count.egress_packets += 1;
        count.egress_bytes += u64::from(bytes);
    });
}

/// Counts a reply.
#[inline(always)]
pub fn count_reply(egress_id: u32, bytes: u32) {
    egress_ip(egress_id, |count| {
        count.ingress_packets += 1;
        count.ingress_bytes += u64::from(bytes);
    });
}

/// Rate limit of events: one of each kind per CPU and interval.
const REPORT_STEP_NS: u64 = 10_000_000;

/// Kinds of events.
const DROPS: usize = 0;

pub const CONFLICTS: usize = 1;

/// Whether this CPU may report an event of this kind now; starts the next interval.
#[inline(always)]
#[expect(unsafe_code, reason = "map access is one of the three places for it")]
pub fn may_report<const KIND: usize>(now: u64) -> bool {
    let Some(workspace) = WORKSPACE.get_ptr_mut(0) else { return false };
    // SAFETY: the element is this CPU's own, and nothing else refers to this field.
    let next = unsafe { &mut (*workspace).next_report_ns[KIND] };
    if now < *next {
        return false;
    }
    *next = now + REPORT_STEP_NS;
    true
}

/// Reports a drop to user space, at most every few milliseconds per CPU.
#[inline(never)]
pub fn report(packet: Packet, verdict: Verdict, length: u32) {
    let now = Maps.now_ns();
    if may_report::<DROPS>(now)
        && let Some(Workspace { headers, .. }) = workspace()
    {
        let event = DropEvent {
            time_ns: now,
            verdict: verdict.index(),
            ifindex: packet.ifindex(),
            // Zero where no policy applies.
            egress_id: Maps
                .pod(&headers.tuple.saddr)
                .and_then(|pod| policy_of(pod, &headers.tuple.daddr, &Maps))
                .unwrap_or(0),
            length,
            tuple: headers.tuple,
        };
        // A full ring buffer loses the event; the counter has it.
        let _full = EVENTS.output(event, 0);
    }
}
