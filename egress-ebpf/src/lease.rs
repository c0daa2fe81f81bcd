//! The lease: until when this node may emit egress IPs.
//!
//! The agent renews it while the controller reaches the node. Programs continue without their agent, and the controller
//! reassigns an address when the lease of its node has expired. So every path that emits or claims an egress IP checks
//! it: NAT (`decide::snat`), answers to ARP and neighbour discovery, ICMP errors to the world, and packets that waited
//! for their neighbour (`to_netdev`). Entries of the flow cache expire with it.
//!
//! Each frame that the uplink receives is a [`heartbeat`]. After a pause of three quarters of the total timeout there
//! is a gap, and the first program that sees it ends the lease, before the agent runs.
#![expect(unsafe_code, reason = "map and packet access; see `maps` and `packet`")]

use core::ptr;

use aya_ebpf::bindings::BPF_F_MMAPABLE;
use aya_ebpf::btf_maps::Array;
use aya_ebpf::helpers::generated::{bpf_jiffies64, bpf_ktime_get_boot_ns};
use aya_ebpf::macros::btf_map;
use egress_common::abi::Lease;

use crate::maps::swap;

#[btf_map(name = "lease")]
static LEASE: Array<Lease, 1, { BPF_F_MMAPABLE as usize }> = Array::new();

/// Interval of heartbeat checks: 8 to 80 ms, by the kernel's HZ. CPUs share the cache line.
const LOOK_JIFFIES: u64 = 8;

/// Remaining time of the lease (ns). Out of line, because many callers have little stack.
#[inline(never)]
pub fn left_ns() -> u64 {
    LEASE.get_ptr_mut(0).map_or(0, |lease| left(lease, now_ns()))
}

/// [`left_ns`] for a caller at the end of a long call chain.
#[inline(always)]
pub fn left_ns_inline() -> u64 {
    LEASE.get_ptr_mut(0).map_or(0, |lease| read(lease).1.left_ns(now_ns()))
}

/// Records that the uplink has received a frame.
#[inline(always)]
pub fn heartbeat() {
    // SAFETY: the helper takes nothing and is there since Linux 5.6; the JIT makes it one load.
    let jiffies = unsafe { bpf_jiffies64() };
    let Some(lease) = LEASE.get_ptr_mut(0) else { return };
    // SAFETY: see `maps`; programs of other CPUs write it at the same time, by whole words.
    let looked = unsafe { ptr::read_volatile(&raw const (*lease).looked_jiffies) };
    if jiffies.wrapping_sub(looked) >= LOOK_JIFFIES {
        note_heartbeat(jiffies);
    }
}

#[inline(never)]
fn note_heartbeat(jiffies: u64) {
    let Some(lease) = LEASE.get_ptr_mut(0) else { return };
    let now = now_ns();
    // SAFETY: a field of what the lookup has found; see `maps`.
    let heartbeat = unsafe { &raw mut (*lease).heartbeat_ns };
    // SAFETY: likewise. Read before the lease, so that a later write of another CPU stays.
    let seen = unsafe { ptr::read_volatile(heartbeat) };
    // Not after a gap, which this heartbeat would hide from other CPUs.
    if left(lease, now) > 0 {
        swap(heartbeat, seen, now);
    }
    // SAFETY: likewise; one store of the whole word.
    unsafe { ptr::write_volatile(&raw mut (*lease).looked_jiffies, jiffies) };
}

#[inline(always)]
fn left(lease: *mut Lease, now_ns: u64) -> u64 {
    let (until_ns, found) = read(lease);
    if found.has_stalled(now_ns) {
        // SAFETY: a field of what the lookup has found; see `maps`.
        let deadline = unsafe { &raw mut (*lease).until_ns };
        // Unless the agent has renewed it meanwhile.
        swap(deadline, until_ns, Lease::EXPIRED.until_ns);
        return 0;
    }
    found.left_ns(now_ns)
}

/// The deadline, and the whole lease.
#[inline(always)]
fn read(lease: *mut Lease) -> (u64, Lease) {
    // Volatile: the agent writes at the same time, each word by one store. The deadline first, since the agent writes it
    // last. SAFETY: see `maps`.
    let until_ns = unsafe { ptr::read_volatile(&raw const (*lease).until_ns) };
    // SAFETY: likewise.
    let heartbeat_ns = unsafe { ptr::read_volatile(&raw const (*lease).heartbeat_ns) };
    // SAFETY: likewise.
    let stall_ns = unsafe { ptr::read_volatile(&raw const (*lease).stall_ns) };
    (until_ns, Lease::bounded(until_ns, heartbeat_ns, stall_ns))
}

#[inline(always)]
fn now_ns() -> u64 {
    // SAFETY: the helper takes nothing and is there since Linux 5.8.
    unsafe { bpf_ktime_get_boot_ns() }
}
