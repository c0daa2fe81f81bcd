//! The decisions: values in, verdict and rewrite out.
//!
//! One file per hook: [`from_pod`] and [`to_pod`] on the management port, [`from_overlay`] on the overlay device,
//! [`from_netdev`] and [`to_netdev`] on the uplink. They share [`snat`] (NAT entries and ports), [`slots`] (the address of
//! a flow), [`fragments`], [`limit`], [`mtu`], [`phase`] and [`expiry`].
//!
//! No decision touches a packet. It reads [`Tables`], which the programs implement with maps and the tests with
//! [`memory_maps`], and returns a value; the caller rewrites the packet. An untouched packet always has a verdict of
//! class pass. A selected pod's packet that reaches the end of a decision without an egress IP is dropped with its own
//! reason.

pub mod expiry;
pub mod fragments;
pub mod from_netdev;
pub mod from_overlay;
pub mod from_pod;
pub mod limit;
pub mod mtu;
pub mod pace;
pub mod phase;
pub mod routes;
pub mod slots;
pub mod snat;
pub mod to_netdev;
pub mod to_pod;

#[cfg(test)]
pub(crate) mod cast;
#[cfg(test)]
mod handover_tests;
#[cfg(any(test, feature = "model"))]
pub mod memory_maps;
#[cfg(test)]
pub(crate) mod packets;

use crate::abi::{
    Addr, BlockHolder, Candidates, ClassPolicy, ClusterPrefix, ExposedPort, Flow, FragKey, FragPorts, HandoverEntry,
    HeldBlocks, InterfaceAddresses, NatEntry, NodeEntry, Origin, Owned, OwnedAddr, PodEntry, PolicyEntry,
    PolicyEntryKey, PolicySlot, PortBlock, Share, Tuple, Verdict,
};
use crate::wire::{Fragment, Headers, L4, Segment};
use snat::PortSearch;
use snat::blocks::BlockRequest;

/// Outcome of an insert-if-absent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimOutcome {
    Claimed,
    /// The key exists. For `nat`, its value names the owner.
    Taken,
    /// The map takes no more.
    Full,
}

/// Outcome of a port search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortClaim {
    Claimed(u16),
    NoneFree,
    /// The map takes no more.
    Full,
}

/// The map that a share counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuotaKind {
    Flows,
    NatEntries,
}

impl QuotaKind {
    /// Whether the holder of this share may have one more entry.
    #[inline(always)]
    pub const fn may_grow(self, share: &Share, quota: u32) -> bool {
        match self {
            Self::Flows => is_below(share.flows, quota),
            Self::NatEntries => is_below(share.nat_entries, quota),
        }
    }
}

/// Whether a signed count is below a limit.
#[inline(always)]
const fn is_below(count: i32, limit: u32) -> bool {
    count < 0 || (count as u32) < limit
}

/// The common part of a NAT entry's two values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NatOwner {
    pub origin: Origin,
    pub source_node: Addr,
    pub egress_id: u32,
}

/// The maps as decisions see them. A lookup lends the value while the packet is processed. Fields that the data path
/// changes later (times, TCP flags, the next hop) are not read through it.
///
/// Methods named `..._seen` also refresh the entry: its time and TCP state. An idle entry ([`expiry`]) is absent, except
/// for `nat_peek`, which cannot tell by one key.
pub trait Tables {
    /// CLOCK_MONOTONIC (ns), a few milliseconds coarse.
    fn now_ns(&self) -> u64;
    fn random(&self) -> u32;

    fn pod(&self, addr: &Addr) -> Option<&PodEntry>;
    fn node(&self, addr: &Addr) -> Option<&NodeEntry>;
    fn prefix(&self, addr: &Addr) -> Option<&ClusterPrefix>;
    /// The policy of pods of this class for the destination.
    fn class_policy(&self, class: u32, to: &Addr) -> Option<&ClassPolicy>;
    fn policy(&self, key: &PolicyEntryKey) -> Option<&PolicyEntry>;
    /// The candidates of this set for the destination, by the longest prefix.
    fn candidates(&self, set: u32, to: &Addr) -> Option<&Candidates>;
    fn owned(&self, egress_id: u32) -> Option<&Owned>;
    fn owned_addr(&self, addr: &Addr) -> Option<&OwnedAddr>;
    /// The node's own addresses on a further egress interface.
    fn interface(&self, ifindex: u32) -> Option<&InterfaceAddresses>;
    /// Whether this node may emit its egress IPs now ([`crate::abi::Lease`]).
    fn has_lease(&self) -> bool;
    /// The hand-over of the policy's address to or from this node.
    fn handover(&self, egress_id: u32) -> Option<&HandoverEntry>;

    /// Whether a packet of the pod answers an inbound connection. For datagrams this does not refresh the entry, since
    /// a pod may send without being asked.
    fn inbound_answered(&self, tuple: &Tuple, segment: Segment) -> bool;
    /// Whether a packet from outside belongs to an inbound connection; refreshes it.
    fn inbound_seen(&self, tuple: &Tuple, segment: Segment) -> bool;
    /// As `inbound_seen`, without a refresh.
    fn inbound_known(&self, tuple: &Tuple) -> bool;
    /// Number of entries.
    fn inbound_in_use(&self) -> u32;
    fn claim_inbound(&self, tuple: &Tuple) -> ClaimOutcome;
    /// The same for this port; `None` if it is not exposed.
    fn exposure(&self, port: &ExposedPort) -> Option<u32>;
    /// Whether this address is shared with a Service, by the last result of `owned` or `handover`, and this is a port of the
    /// Service.
    fn is_service_port(&self, address: &Addr, protocol: u8, port: u16) -> bool;
    fn forget_inbound(&self, tuple: &Tuple);

    /// Whether the pod sent this datagram's flow first, selected or not.
    fn datagram_seen(&self, tuple: &Tuple) -> bool;
    fn note_datagram(&self, tuple: &Tuple);

    fn flow_seen(&self, tuple: &Tuple, segment: Segment) -> Option<&Flow>;
    /// As `flow_seen`, without a refresh.
    fn flow_peek(&self, tuple: &Tuple) -> Option<&Flow>;
    /// Refreshes the time of a flow alone.
    fn keep_flow(&self, tuple: &Tuple);
    /// An answer to the flow, found by its NAT entry: refreshes time and TCP state of the flow.
    fn flow_answered(&self, tuple: &Tuple, segment: Segment);
    /// Claims the key, and counts it for the pod and the egress policy.
    fn claim_flow(&self, tuple: &Tuple, flow: &Flow) -> ClaimOutcome;
    /// Whether the pod and its egress policy (zero: of none) may have one more flow or NAT entry. Concurrent CPUs may
    /// all get `true`.
    fn has_quota(&self, pod: &Addr, egress_id: u32, held: QuotaKind) -> bool;
    /// [`crate::abi::Config::random_ports`].
    fn has_random_ports(&self) -> bool;
    /// [`crate::abi::Config::decisions`], read once and before the maps that it covers.
    fn decisions(&self) -> u32;
    /// Caches the decision of a flow, made under this number.
    fn settle_flow(&self, tuple: &Tuple, egress_id: u32, slot: &PolicySlot, decisions: u32);
    /// Stores the index of the flow's address among the slots.
    fn set_flow_slot(&self, tuple: &Tuple, slot: u32);
    fn forget_flow(&self, tuple: &Tuple);
    /// Overwrites; false when the map takes no more.
    fn put_flow(&self, tuple: &Tuple, flow: &Flow) -> bool;

    fn nat_seen(&self, key: &Tuple, segment: Segment) -> Option<&NatEntry>;
    /// As `nat_seen`, without a refresh. An entry under removal is absent.
    fn nat_peek(&self, key: &Tuple) -> Option<&NatEntry>;
    fn claim_nat(&self, key: &Tuple, other: &Tuple, owner: &NatOwner) -> ClaimOutcome;
    /// Counts a NAT entry for the pod and the egress policy (zero: of none).
    fn count_nat_entry(&self, pod: &Addr, egress_id: u32);
    /// Claims the first free port of the search, other than ports of a Service, for the reverse key made from `forward`
    /// and `address`.
    fn claim_any_port(&self, forward: &Tuple, address: &Addr, owner: &NatOwner, search: &PortSearch) -> PortClaim;
    /// [`crate::abi::Config::port_block`].
    fn port_block(&self) -> u16;
    /// What the pod's list of blocks says; nothing without one.
    fn held_blocks(&self, holder: &BlockHolder) -> HeldBlocks;
    /// Replaces the list, made if there is none; false if it is not `old` any more, or the map takes no more.
    fn hold_block(&self, holder: &BlockHolder, old: HeldBlocks, new: HeldBlocks) -> bool;
    /// Whether the block that begins with this port is open, of this size, and this pod's.
    fn is_block_of(&self, holder: &BlockHolder, first: u16, size: u16) -> bool;
    /// Claims the first free block of the search; its first port.
    fn claim_any_block(&self, request: &BlockRequest<'_>, walk: &PortSearch) -> PortClaim;
    /// Closes the block that this packet has just claimed.
    fn close_block(&self, block: &PortBlock);
    /// Removes the NAT entry of this key if it is idle; whether it was.
    fn expire_nat(&self, key: &Tuple) -> bool;
    /// Whether a search found every port towards this destination taken, at most [`snat::EXHAUSTED_NS`] ago.
    fn is_exhausted(&self, destination: &Tuple) -> bool;
    fn note_exhausted(&self, destination: &Tuple);
    /// Whether it existed: of concurrent callers, one gets `true`.
    fn forget_nat(&self, key: &Tuple) -> bool;

    fn fragment(&self, key: &FragKey) -> Option<&FragPorts>;
    fn put_fragment(&self, key: &FragKey, ports: &FragPorts);
    /// Whether this node holds later fragments of this datagram.
    fn is_awaited(&self, key: &FragKey) -> bool;
}

/// The egress ID of the policy that applies to packets between the pod and this outside address; `None` if none does.
/// Without an entry of its class, a policy without an ID applies, which is a drop.
#[inline(always)]
pub fn policy_of<T: Tables>(pod: &PodEntry, to: &Addr, tables: &T) -> Option<u32> {
    match pod.class() {
        None => pod.egress_id(),
        Some(class) => match tables.class_policy(class, to) {
            Some(policy) => policy.egress_id(),
            None => Some(0),
        },
    }
}

/// The rewritten end of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Source,
    Destination,
}

/// What to write into a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rewrite {
    pub end: End,
    pub addr: Addr,
    pub port: u16,
}

impl Rewrite {
    /// The rewrite of the forward direction of a NAT entry: egress IP and port as the source.
    #[inline(always)]
    pub fn snat(nat_entry: &NatEntry) -> Self {
        let reverse = &nat_entry.other;
        Self { end: End::Source, addr: reverse.daddr, port: reverse.dport() }
    }

    /// The rewrite of the reverse direction: the pod's address and port as the destination.
    #[inline(always)]
    pub fn reverse(nat_entry: &NatEntry) -> Self {
        let forward = &nat_entry.other;
        Self { end: End::Destination, addr: forward.saddr, port: forward.sport() }
    }

    /// The port before the rewrite.
    #[inline(always)]
    pub fn old_port(&self, headers: &Headers) -> u16 {
        match self.end {
            End::Source => headers.tuple.sport(),
            End::Destination => headers.tuple.dport(),
        }
    }

    /// Whether the packet can be rewritten. A fragment of SCTP cannot get another port: the change of the checksum
    /// depends on the length of the whole message, which the first fragment does not have.
    #[inline(always)]
    pub fn check(&self, headers: &Headers) -> Result<(), Verdict> {
        let is_first = headers.l4 == L4::Sctp && headers.fragment == Fragment::First;
        if is_first && self.old_port(headers) != self.port { Err(Verdict::SctpFragment) } else { Ok(()) }
    }
}
