//! Maps `flows`, `inbound`, `datagrams` and `frags`: what the source node remembers of its pods' traffic.

use super::{Addr, Slot, abi};

/// Value of `flows`; the key is the tuple as the pod sends it. A flow keeps its address, not its node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Flow {
    /// The egress IP that this flow shows to the world.
    pub address: Addr,
    pub egress_id: u32,
    /// Index into the policy's slots where the address was last found.
    pub slot: u32,
    /// CLOCK_MONOTONIC (ns).
    pub last_seen_ns: u64,
    /// Of a TCP connection, as the pod's node sees it: bits of `decide::phase`.
    pub state: u32,
    /// Value of [`super::Config::decisions`] when `settled` was written; another value there means: ask again.
    /// [`Flow::SETTLING`] while a CPU writes it.
    pub decided: u32,
    /// The slot that the flow was sent to when all questions were last asked.
    pub settled: Slot,
    pub reserved: u32,
}
abi!(Flow, 40 + 36 + 4);

impl Flow {
    /// No number of the decisions: there are not that many.
    pub const SETTLING: u32 = u32::MAX;

    #[inline(always)]
    pub const fn new(address: Addr, egress_id: u32, slot: u32, state: u32, now_ns: u64) -> Self {
        Self { address, egress_id, slot, last_seen_ns: now_ns, state, decided: 0, settled: Slot::EMPTY, reserved: 0 }
    }
}

/// Value of `inbound`; the key is the tuple as the pod's answer will look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Inbound {
    /// CLOCK_MONOTONIC (ns) of the last packet that keeps it: of either side for TCP, from outside for datagrams.
    pub last_seen_ns: u64,
    /// Of a TCP connection: bits of `decide::phase`.
    pub state: u32,
    pub reserved: u32,
}
abi!(Inbound, 16);

impl Inbound {
    #[inline(always)]
    pub const fn new(now_ns: u64) -> Self {
        Self { last_seen_ns: now_ns, state: 0, reserved: 0 }
    }
}

/// Value of `datagrams`, whose key is the tuple as the pod sends it, and of `exhausted`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Datagram {
    /// CLOCK_MONOTONIC (ns).
    pub last_seen_ns: u64,
}
abi!(Datagram, 8);

/// The value of `usage`: entries in use as last counted, and claimed since.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Usage {
    /// Two for each mapping.
    pub nat: u32,
    pub flows: u32,
    pub inbound: u32,
    pub reserved: u32,
}
abi!(Usage, 16);

/// Key of `frags`: what the fragments of one datagram share (RFC 791, RFC 8200 section 4.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct FragKey {
    pub saddr: Addr,
    pub daddr: Addr,
    /// Identification, wire order; the 16 bits of IPv4 in the last two bytes.
    pub id: [u8; 4],
    /// Zero for IPv6, where it does not tell datagrams apart.
    pub protocol: u8,
    pub reserved: [u8; 3],
}
abi!(FragKey, 40);

/// Value of `frags`: the ports, which only the first fragment carries, and the protocol, which for IPv6 may stand behind
/// more headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct FragPorts {
    pub sport: [u8; 2],
    pub dport: [u8; 2],
    pub protocol: u8,
    pub reserved: [u8; 3],
    pub seen_ns: u64,
}
abi!(FragPorts, 16);
