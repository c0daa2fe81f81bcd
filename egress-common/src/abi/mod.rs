//! The kernel ABI: one file per group of maps.
//!
//! Rules that hold for every type here, because user space, the programs and `bpftool` all read the same bytes:
//! - `repr(C)`, no padding the compiler chose, size asserted; a key with padding would miss at random.
//! - Addresses and ports are wire-order bytes behind typed getters. IPv4 addresses are stored v4-mapped
//!   (RFC 4291 section 2.5.5.2), so that one key shape serves both families.
//! - Enums are stored as `u8` or `u32` and read back through `from_*`, since a map may hold what another version wrote.
//!
//! A change of any layout raises [`ABI_VERSION`], which is part of the pin path.

mod addr;
mod answers;
mod blocks;
mod cluster;
mod config;
mod counters;
mod destinations;
mod flows;
mod handover;
mod lease;
mod nat;
mod pods;
mod rate;
mod rig;
mod routes;
mod seal;
mod verdict;

pub use addr::{Addr, Family};
pub use answers::{AnswerKey, AnswerKind};
pub use blocks::{BlockHolder, BlockOwner, HeldBlocks, MOST_BLOCKS, PortBlock};
pub use cluster::{ClusterKey, ClusterPrefix, NodeEntry, NodePlace, PrefixKind};
pub use config::{
    BloomFilter, Config, Cover, DEFAULT_INBOUND, InterfaceAddresses, OnUnknownPod, PacketLayout, PortRange, Timeouts,
};
pub use counters::{ConflictEvent, Count, DropEvent, EipCount};
pub use destinations::{Candidates, PolicyDestination};
pub use flows::{
    CANDIDATES, Datagram, EPOCHS, ExposedPort, Exposure, Flow, FlowCacheUse, FragKey, FragPorts, Holder, Inbound,
    Share, SweepMode, SweepRequest, SweptMap, Usage,
};
pub use handover::{HandoverEntry, HandoverStage};
pub use lease::Lease;
pub use nat::{Direction, NatEntry, NextHop, Origin, Tuple};
pub use pods::{
    ClassPolicy, MAX_SLOTS, Owned, OwnedAddr, PodEntry, PodSelection, PolicyEntry, PolicyEntryKey, PolicySlot,
    SlotPlace, WhenEmpty,
};
pub use rate::{BandwidthLimit, Pacing};
pub use rig::{RIG_FRAME, Rig};
pub use routes::{MAX_NEXT_HOPS, NeighbourEntry, NeighbourKey, RouteDestination, RouteEntry, RouteKind};
pub use verdict::{Class, Verdict};

/// Version of the layout of all pinned maps; the pin directory is named after it.
pub const ABI_VERSION: u32 = 13;

/// The only mark: a selected pod's packet to another node's address (OVN-Kubernetes' 1008). Only these bits are
/// compared and written. Other bits belong to the host's rules (kube-proxy 0x4000 and 0x8000, Calico the upper half)
/// and are preserved.
pub const NODE_MARK: u32 = 0x3f0;

/// Whether a packet has [`NODE_MARK`], whatever its other bits are.
#[inline(always)]
pub const fn has_node_mark(mark: u32) -> bool {
    mark & NODE_MARK == NODE_MARK
}

/// Largest egress ID: it is sent as a 24-bit VXLAN network identifier (RFC 7348 section 5).
pub const MAX_EGRESS_ID: u32 = (1 << 24) - 1;

/// `aya::Pod` for types made of integers and byte arrays only, with their size written down.
macro_rules! abi {
    ($type:ty, $size:expr) => {
        const _: () = assert!(core::mem::size_of::<$type>() == $size);
        const _: () = assert!(core::mem::align_of::<$type>() <= 8);
        #[cfg(feature = "user")]
        #[expect(unsafe_code, reason = "aya::Pod is an unsafe marker trait")]
        // SAFETY: the type is `repr(C)`, Copy, 'static, holds only integers and arrays of integers (every bit pattern
        // is a value), and the size asserted above equals the sum of its fields, so there is no padding to read.
        unsafe impl aya::Pod for $type {}
    };
}
pub(crate) use abi;
