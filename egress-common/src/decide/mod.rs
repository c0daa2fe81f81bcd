//! The decisions: values in, verdict and rewrite out.
//!
//! One file per hook: [`from_pod`] and [`to_pod`] on the management port, [`from_overlay`] on the overlay device,
//! [`from_netdev`] and [`to_netdev`] on the uplink. They share [`snat`] (NAT entries and ports), [`slots`] (the address of
//! a flow), [`fragments`], [`limit`], [`mtu`], [`phase`] and [`expiry`].
//!
//! No decision touches a packet. It asks [`Tables`], which the programs implement over maps and the tests over hash maps,
//! and returns what is to be done; the edge does it. A packet that is left alone always has a verdict of class pass. A
//! packet of a selected pod that reaches the end of a decision without an egress IP is dropped with its own reason.

pub mod expiry;
pub mod fragments;
pub mod from_netdev;
pub mod from_overlay;
pub mod from_pod;
pub mod limit;
pub mod mtu;
pub mod phase;
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
    Addr, ClusterPrefix, ExposedPort, Flow, FragKey, FragPorts, HandoverEntry, NatEntry, NodeEntry, Origin, Owned,
    OwnedAddr, PodEntry, PolicyEntry, PolicyKey, PolicySlot, Share, Tuple, Verdict,
};
use crate::wire::{Fragment, Headers, L4, Segment};
use snat::PortSearch;

/// What an insert-if-absent came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimOutcome {
    Claimed,
    /// The key exists. For `nat`, its value names the owner.
    Taken,
    /// The map takes no more.
    Full,
}

/// What a search for a port came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortClaim {
    Claimed(u16),
    NoneFree,
    /// The map takes no more.
    Full,
}

/// Which of the two large maps a share is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuotaKind {
    Flows,
    NatEntries,
}

impl QuotaKind {
    /// Whether the holder of this share may have one more.
    #[inline(always)]
    pub const fn may_grow(self, share: &Share, quota: u32) -> bool {
        match self {
            Self::Flows => share.flows < quota,
            Self::NatEntries => share.nat_entries < quota,
        }
    }
}

/// What a NAT entry's two values have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NatOwner {
    pub origin: Origin,
    pub source_node: Addr,
    pub egress_id: u32,
}

/// The maps as decisions see them. A lookup lends the value for as long as the packet is in hand; fields that the data
/// path changes later (times, TCP flags, the next hop) are not read through it.
///
/// Methods named `..._seen` also note that the entry is alive: the time, and what the segment says of a TCP connection.
pub trait Tables {
    /// CLOCK_MONOTONIC (ns), a few milliseconds coarse.
    fn now_ns(&self) -> u64;
    fn random(&self) -> u32;

    fn pod(&self, addr: &Addr) -> Option<&PodEntry>;
    fn node(&self, addr: &Addr) -> Option<&NodeEntry>;
    fn prefix(&self, addr: &Addr) -> Option<&ClusterPrefix>;
    fn policy(&self, key: &PolicyKey) -> Option<&PolicyEntry>;
    fn owned(&self, egress_id: u32) -> Option<&Owned>;
    fn owned_addr(&self, addr: &Addr) -> Option<&OwnedAddr>;
    /// Whether this node may emit its egress IPs now ([`crate::abi::Lease`]).
    fn has_lease(&self) -> bool;
    /// The hand-over of the object's address that concerns this node.
    fn handover(&self, egress_id: u32) -> Option<&HandoverEntry>;

    /// A packet of the pod: does it answer a connection that came in from outside? Of datagrams this does not keep the
    /// entry alive, since a pod may continue to send without answering.
    fn inbound_answered(&self, tuple: &Tuple, segment: Segment) -> bool;
    /// A packet from outside: does it belong to such a connection, which it then keeps alive?
    fn inbound_heard(&self, tuple: &Tuple, segment: Segment) -> bool;
    /// Whether it is remembered, without noting anything.
    fn inbound_known(&self, tuple: &Tuple) -> bool;
    /// How many entries the map has, as last counted and claimed since.
    fn inbound_in_use(&self) -> u32;
    fn claim_inbound(&self, tuple: &Tuple) -> ClaimOutcome;
    /// How many of them are at this port, likewise; `None` where it is not exposed.
    fn exposure(&self, port: &ExposedPort) -> Option<u32>;
    fn forget_inbound(&self, tuple: &Tuple);

    /// A datagram that a pod sent first, whatever selected it then.
    fn datagram_seen(&self, tuple: &Tuple) -> bool;
    fn note_datagram(&self, tuple: &Tuple);

    fn flow_seen(&self, tuple: &Tuple, segment: Segment) -> Option<&Flow>;
    /// As `flow_seen`, without noting anything.
    fn flow_peek(&self, tuple: &Tuple) -> Option<&Flow>;
    /// An answer to the flow, by its NAT entry: keeps the flow alive, as it does the NAT entry, and notes what it says of
    /// the connection.
    fn flow_answered(&self, tuple: &Tuple, segment: Segment);
    /// Claims the key, and counts it for the pod and the policy.
    fn claim_flow(&self, tuple: &Tuple, flow: &Flow) -> ClaimOutcome;
    /// Whether the pod and its egress policy (zero: of none) may have one more flow or NAT entry. Several CPUs that ask at
    /// once may all hear yes.
    fn has_quota(&self, pod: &Addr, egress_id: u32, held: QuotaKind) -> bool;
    /// [`crate::abi::Config::decisions`], read once and before anything that it stands for.
    fn decisions(&self) -> u32;
    /// Notes what the questions about a flow came to under these decisions.
    fn settle_flow(&self, tuple: &Tuple, egress_id: u32, slot: &PolicySlot, decisions: u32);
    /// Notes where the flow's address is among the slots now.
    fn set_flow_slot(&self, tuple: &Tuple, slot: u32);
    fn forget_flow(&self, tuple: &Tuple);
    /// Overwrites; false when the map takes no more.
    fn put_flow(&self, tuple: &Tuple, flow: &Flow) -> bool;

    fn nat_seen(&self, key: &Tuple, segment: Segment) -> Option<&NatEntry>;
    /// As `nat_seen`, without noting anything.
    fn nat_peek(&self, key: &Tuple) -> Option<&NatEntry>;
    fn claim_nat(&self, key: &Tuple, other: &Tuple, owner: &NatOwner) -> ClaimOutcome;
    /// Counts a NAT entry for the pod and the egress policy (zero: of none).
    fn count_nat_entry(&self, pod: &Addr, egress_id: u32);
    /// Claims the first free port of the search for the reverse key made from `forward` and `address`.
    fn claim_any_port(&self, forward: &Tuple, address: &Addr, owner: &NatOwner, search: &PortSearch) -> PortClaim;
    /// Whether every port towards this destination was found taken, at most [`snat::EXHAUSTED_NS`] ago.
    fn is_exhausted(&self, destination: &Tuple) -> bool;
    fn note_exhausted(&self, destination: &Tuple);
    /// Whether it was there: of several that ask at once, one hears yes.
    fn forget_nat(&self, key: &Tuple) -> bool;

    fn fragment(&self, key: &FragKey) -> Option<&FragPorts>;
    fn put_fragment(&self, key: &FragKey, ports: &FragPorts);
    /// Whether later fragments of this datagram wait for its first one here.
    fn is_awaited(&self, key: &FragKey) -> bool;
}

/// Which end of a packet is rewritten.
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
    /// What the forward direction of a NAT entry writes: the egress IP and its port as the source.
    #[inline(always)]
    pub fn snat(nat_entry: &NatEntry) -> Self {
        let reverse = &nat_entry.other;
        Self { end: End::Source, addr: reverse.daddr, port: reverse.dport() }
    }

    /// What the reverse direction restores: the pod's address and port as the destination.
    #[inline(always)]
    pub fn reverse(nat_entry: &NatEntry) -> Self {
        let forward = &nat_entry.other;
        Self { end: End::Destination, addr: forward.saddr, port: forward.sport() }
    }

    /// The port that the packet has now.
    #[inline(always)]
    pub fn old_port(&self, headers: &Headers) -> u16 {
        match self.end {
            End::Source => headers.tuple.sport(),
            End::Destination => headers.tuple.dport(),
        }
    }

    /// Whether it can be written into the packet. A fragment of SCTP cannot get another port: the checksum is over the
    /// whole message, whose length the first fragment does not know, and by how much the checksum changes depends on it.
    #[inline(always)]
    pub fn check(&self, headers: &Headers) -> Result<(), Verdict> {
        let is_first = headers.l4 == L4::Sctp && headers.fragment == Fragment::First;
        if is_first && self.old_port(headers) != self.port { Err(Verdict::SctpFragment) } else { Ok(()) }
    }
}
