//! Maps `counters`, `eip_counters` and `events`.

use super::{Addr, Tuple, abi};

/// Value of `counters`, per CPU; the index is the [`super::Verdict`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Count {
    pub packets: u64,
    pub bytes: u64,
}
abi!(Count, 16);

/// Value of `eip_counters`, per CPU; the key is the egress ID. On the gateway.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct EipCount {
    pub egress_packets: u64,
    pub egress_bytes: u64,
    pub ingress_packets: u64,
    pub ingress_bytes: u64,
    /// NAT entries made.
    pub nat_entries: u64,
    /// New flows refused.
    pub refusals: u64,
    /// Packets beyond the bandwidth limit.
    pub limited: u64,
}
abi!(EipCount, 56);

/// A sampled drop in the ring buffer `events`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct DropEvent {
    /// CLOCK_MONOTONIC (ns).
    pub time_ns: u64,
    pub verdict: u32,
    pub ifindex: u32,
    pub egress_id: u32,
    pub length: u32,
    pub tuple: Tuple,
}
abi!(DropEvent, 64);

/// Another host's claim on an egress IP that this node owns, in the ring buffer `events`. Its length distinguishes it
/// from a [`DropEvent`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct ConflictEvent {
    /// CLOCK_MONOTONIC (ns).
    pub time_ns: u64,
    pub address: Addr,
    /// Link address that the other host claims.
    pub mac: [u8; 6],
    pub reserved: [u8; 2],
}
abi!(ConflictEvent, 32);
