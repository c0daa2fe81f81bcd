//! The lease: until when this node may emit egress IPs.
//!
//! The agent renews it while the controller hears it. Nothing else here ends with the agent: programs go on without it, and the
//! controller gives an address away when the lease of the node that had it has expired. So each path that emits or claims an
//! egress IP asks: NAT (`decide::snat`), answers to ARP and neighbour discovery, ICMP errors to the world (`answer`), and
//! packets that have waited for their neighbour (`roads::leave`). Entries of the flow cache end with it (`recent`).
#![expect(unsafe_code, reason = "map access is one of the three places for it; see `maps`")]

use core::ptr;

use aya_ebpf::bindings::BPF_F_MMAPABLE;
use aya_ebpf::btf_maps::Array;
use aya_ebpf::helpers::generated::bpf_ktime_get_boot_ns;
use aya_ebpf::macros::btf_map;
use egress_common::abi::Lease;

#[btf_map(name = "lease")]
static LEASE: Array<Lease, 1, { BPF_F_MMAPABLE as usize }> = Array::new();

/// How long it lasts from now on (ns). Out of line: asked in many places, none of which has stack to spare.
#[inline(never)]
pub fn left_ns() -> u64 {
    let Some(lease) = LEASE.get_ptr(0) else { return 0 };
    // Volatile: the agent writes it meanwhile, by one store of the whole word.
    // SAFETY: see `maps`.
    let lease = unsafe { ptr::read_volatile(lease) };
    // SAFETY: the helper takes nothing and is there since Linux 5.8.
    lease.left_ns(unsafe { bpf_ktime_get_boot_ns() })
}
