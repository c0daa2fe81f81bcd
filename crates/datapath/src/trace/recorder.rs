//! Implements the decision's maps and records every lookup.
//!
//! It works on a copy of the relevant entries (`egress_common::decide::memory_maps`), so that the decision changes no real
//! map.

use std::cell::RefCell;
use std::net::IpAddr;

use egress_common::abi::{
    Addr, BlockHolder, Candidates, ClassPolicy, ClusterPrefix, ExposedPort, Flow, FragKey, FragPorts, HandoverEntry,
    HeldBlocks, InterfaceAddresses, NatEntry, NodeEntry, Owned, OwnedAddr, PodEntry, PolicyEntry, PolicyEntryKey,
    PolicySlot, PortBlock, Tuple,
};
use egress_common::decide::memory_maps::MemoryMaps;
use egress_common::decide::snat::PortSearch;
use egress_common::decide::snat::blocks::BlockRequest;
use egress_common::decide::{ClaimOutcome, NatOwner, PortClaim, QuotaKind, Tables};
use egress_common::wire::Segment;
use ipnet::IpNet;

/// A lookup and its result.
#[derive(Clone, Debug, PartialEq)]
pub enum RecordedLookup {
    Pod(Addr, Option<PodEntry>),
    Node(Addr, Option<NodeEntry>),
    /// With the matching prefix.
    Prefix(Addr, Option<(IpNet, ClusterPrefix)>),
    /// Whether an inbound connection has this tuple.
    Inbound(Tuple, bool),
    /// The policy of a class of pods for this destination.
    ClassPolicy(u32, Addr, Option<ClassPolicy>),
    Policy(PolicyEntryKey, Option<Box<PolicyEntry>>),
    /// Addresses with a route to this destination.
    Candidates(Addr, Option<Candidates>),
    Flow(Tuple, Option<Flow>),
    /// A new flow, and the outcome of its claim.
    Begun(Flow, ClaimOutcome),
    Owned(u32, Option<Owned>),
    Handover(u32, Option<HandoverEntry>),
    /// Whether this node may emit its egress IPs.
    Lease(bool),
    NatEntry(Tuple, Option<Box<NatEntry>>),
    /// A key of a NAT entry, and its other key.
    Key(Tuple, Tuple, ClaimOutcome),
    AnyPort(PortClaim),
    /// The pod's list of port blocks of an egress IP.
    HeldBlocks(BlockHolder, HeldBlocks),
    /// A new port block for the pod.
    Block(PortClaim),
    /// The pod, or its egress policy, is at its quota.
    NoQuota(QuotaKind),
}

/// The maps of one packet.
pub struct MapRecorder<'w> {
    maps: &'w MemoryMaps,
    asked: RefCell<Vec<RecordedLookup>>,
}

impl<'w> MapRecorder<'w> {
    pub fn new(maps: &'w MemoryMaps) -> Self {
        Self { maps, asked: RefCell::default() }
    }

    /// The lookups, each once: the decision may repeat one.
    pub fn asked(self) -> Vec<RecordedLookup> {
        let mut asked: Vec<RecordedLookup> = Vec::new();
        for one in self.asked.into_inner() {
            if !asked.contains(&one) {
                asked.push(one);
            }
        }
        asked
    }

    fn note(&self, asked: RecordedLookup) {
        self.asked.borrow_mut().push(asked);
    }
}

/// A prefix as it stands in the map.
fn network(addr: &Addr, bits: u32) -> Option<IpNet> {
    let ip = addr.to_ip();
    let shift = if ip.is_ipv4() { 96 } else { 0 };
    IpNet::new(ip, u8::try_from(bits.checked_sub(shift)?).ok()?).ok()
}

/// The longest prefix that holds the address.
fn longest(maps: &MemoryMaps, addr: &Addr) -> Option<IpNet> {
    let ip: IpAddr = addr.to_ip();
    let prefixes = maps.prefixes.borrow();
    let nets = prefixes.iter().filter_map(|(net, bits, _)| network(net, *bits));
    nets.filter(|net| net.contains(&ip)).max_by_key(IpNet::prefix_len)
}

impl Tables for MapRecorder<'_> {
    fn now_ns(&self) -> u64 {
        self.maps.now_ns()
    }
    fn random(&self) -> u32 {
        self.maps.random()
    }
    fn pod(&self, addr: &Addr) -> Option<&PodEntry> {
        let found = self.maps.pod(addr);
        self.note(RecordedLookup::Pod(*addr, found.copied()));
        found
    }
    fn node(&self, addr: &Addr) -> Option<&NodeEntry> {
        let found = self.maps.node(addr);
        self.note(RecordedLookup::Node(*addr, found.copied()));
        found
    }
    fn prefix(&self, addr: &Addr) -> Option<&ClusterPrefix> {
        let found = self.maps.prefix(addr);
        let net = longest(self.maps, addr).or_else(|| Some(IpNet::from(addr.to_ip())));
        self.note(RecordedLookup::Prefix(*addr, net.zip(found.copied())));
        found
    }
    fn class_policy(&self, class: u32, to: &Addr) -> Option<&ClassPolicy> {
        let found = self.maps.class_policy(class, to);
        self.note(RecordedLookup::ClassPolicy(class, *to, found.copied()));
        found
    }
    fn policy(&self, key: &PolicyEntryKey) -> Option<&PolicyEntry> {
        let found = self.maps.policy(key);
        self.note(RecordedLookup::Policy(*key, found.copied().map(Box::new)));
        found
    }
    fn candidates(&self, set: u32, to: &Addr) -> Option<&Candidates> {
        let found = self.maps.candidates(set, to);
        self.note(RecordedLookup::Candidates(*to, found.copied()));
        found
    }
    fn owned(&self, egress_id: u32) -> Option<&Owned> {
        let found = self.maps.owned(egress_id);
        self.note(RecordedLookup::Owned(egress_id, found.copied()));
        found
    }
    fn owned_addr(&self, addr: &Addr) -> Option<&OwnedAddr> {
        self.maps.owned_addr(addr)
    }
    fn interface(&self, ifindex: u32) -> Option<&InterfaceAddresses> {
        self.maps.interface(ifindex)
    }
    fn has_lease(&self) -> bool {
        let has = self.maps.has_lease();
        self.note(RecordedLookup::Lease(has));
        has
    }
    fn handover(&self, egress_id: u32) -> Option<&HandoverEntry> {
        let found = self.maps.handover(egress_id);
        self.note(RecordedLookup::Handover(egress_id, found.copied()));
        found
    }
    fn inbound_answered(&self, tuple: &Tuple, segment: Segment) -> bool {
        let known = self.maps.inbound_answered(tuple, segment);
        self.note(RecordedLookup::Inbound(*tuple, known));
        known
    }
    fn inbound_seen(&self, tuple: &Tuple, segment: Segment) -> bool {
        self.maps.inbound_seen(tuple, segment)
    }
    fn inbound_known(&self, tuple: &Tuple) -> bool {
        let known = self.maps.inbound_known(tuple);
        self.note(RecordedLookup::Inbound(*tuple, known));
        known
    }
    fn inbound_in_use(&self) -> u32 {
        self.maps.inbound_in_use()
    }
    fn claim_inbound(&self, tuple: &Tuple) -> ClaimOutcome {
        self.maps.claim_inbound(tuple)
    }
    fn is_service_port(&self, address: &Addr, protocol: u8, port: u16) -> bool {
        self.maps.is_service_port(address, protocol, port)
    }

    fn exposure(&self, port: &ExposedPort) -> Option<u32> {
        self.maps.exposure(port)
    }
    fn forget_inbound(&self, tuple: &Tuple) {
        self.maps.forget_inbound(tuple);
    }
    fn datagram_seen(&self, tuple: &Tuple) -> bool {
        self.maps.datagram_seen(tuple)
    }
    fn note_datagram(&self, tuple: &Tuple) {
        self.maps.note_datagram(tuple);
    }
    fn flow_seen(&self, tuple: &Tuple, segment: Segment) -> Option<&Flow> {
        // The state before this packet.
        self.note(RecordedLookup::Flow(*tuple, self.maps.flow_peek(tuple).copied()));
        self.maps.flow_seen(tuple, segment)
    }
    fn flow_peek(&self, tuple: &Tuple) -> Option<&Flow> {
        self.maps.flow_peek(tuple)
    }
    fn keep_flow(&self, tuple: &Tuple) {
        self.maps.keep_flow(tuple);
    }
    fn flow_answered(&self, tuple: &Tuple, segment: Segment) {
        self.maps.flow_answered(tuple, segment);
    }
    fn claim_flow(&self, tuple: &Tuple, flow: &Flow) -> ClaimOutcome {
        let claim = self.maps.claim_flow(tuple, flow);
        self.note(RecordedLookup::Begun(*flow, claim));
        claim
    }
    fn decisions(&self) -> u32 {
        self.maps.decisions()
    }
    fn settle_flow(&self, tuple: &Tuple, egress_id: u32, slot: &PolicySlot, decisions: u32) {
        self.maps.settle_flow(tuple, egress_id, slot, decisions);
    }
    fn set_flow_slot(&self, tuple: &Tuple, slot: u32) {
        self.maps.set_flow_slot(tuple, slot);
    }
    fn forget_flow(&self, tuple: &Tuple) {
        self.maps.forget_flow(tuple);
    }
    fn put_flow(&self, tuple: &Tuple, flow: &Flow) -> bool {
        self.note(RecordedLookup::Begun(*flow, ClaimOutcome::Claimed));
        self.maps.put_flow(tuple, flow)
    }
    fn nat_seen(&self, key: &Tuple, segment: Segment) -> Option<&NatEntry> {
        self.note(RecordedLookup::NatEntry(*key, self.maps.nat_peek(key).copied().map(Box::new)));
        self.maps.nat_seen(key, segment)
    }
    fn nat_peek(&self, key: &Tuple) -> Option<&NatEntry> {
        self.maps.nat_peek(key)
    }
    fn claim_nat(&self, key: &Tuple, other: &Tuple, owner: &NatOwner) -> ClaimOutcome {
        let claim = self.maps.claim_nat(key, other, owner);
        self.note(RecordedLookup::Key(*key, *other, claim));
        claim
    }
    fn has_random_ports(&self) -> bool {
        self.maps.has_random_ports()
    }
    fn has_quota(&self, pod: &Addr, egress_id: u32, held: QuotaKind) -> bool {
        let has = self.maps.has_quota(pod, egress_id, held);
        if !has {
            self.note(RecordedLookup::NoQuota(held));
        }
        has
    }
    fn count_nat_entry(&self, pod: &Addr, egress_id: u32) {
        self.maps.count_nat_entry(pod, egress_id);
    }
    fn claim_any_port(&self, forward: &Tuple, address: &Addr, owner: &NatOwner, search: &PortSearch) -> PortClaim {
        let claim = self.maps.claim_any_port(forward, address, owner, search);
        self.note(RecordedLookup::AnyPort(claim));
        claim
    }
    fn port_block(&self) -> u16 {
        self.maps.port_block()
    }
    fn held_blocks(&self, holder: &BlockHolder) -> HeldBlocks {
        let held = self.maps.held_blocks(holder);
        self.note(RecordedLookup::HeldBlocks(*holder, held));
        held
    }
    fn hold_block(&self, holder: &BlockHolder, old: HeldBlocks, new: HeldBlocks) -> bool {
        self.maps.hold_block(holder, old, new)
    }
    fn is_block_of(&self, holder: &BlockHolder, first: u16, size: u16) -> bool {
        self.maps.is_block_of(holder, first, size)
    }
    fn claim_any_block(&self, request: &BlockRequest<'_>, walk: &PortSearch) -> PortClaim {
        let claim = self.maps.claim_any_block(request, walk);
        self.note(RecordedLookup::Block(claim));
        claim
    }
    fn close_block(&self, block: &PortBlock) {
        self.maps.close_block(block);
    }
    fn expire_nat(&self, key: &Tuple) -> bool {
        self.maps.expire_nat(key)
    }
    fn is_exhausted(&self, destination: &Tuple) -> bool {
        self.maps.is_exhausted(destination)
    }
    fn note_exhausted(&self, destination: &Tuple) {
        self.maps.note_exhausted(destination);
    }
    fn forget_nat(&self, key: &Tuple) -> bool {
        self.maps.forget_nat(key)
    }
    fn fragment(&self, key: &FragKey) -> Option<&FragPorts> {
        self.maps.fragment(key)
    }
    fn put_fragment(&self, key: &FragKey, ports: &FragPorts) {
        self.maps.put_fragment(key, ports);
    }
    fn is_awaited(&self, key: &FragKey) -> bool {
        self.maps.is_awaited(key)
    }
}
