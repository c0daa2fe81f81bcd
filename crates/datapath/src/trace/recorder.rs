//! The maps as the decision sees them, with every question that it asks.
//!
//! Over a copy of what the maps hold that concerns one packet (`egress_common::decide::world`), so that what the decision
//! writes is written nowhere else.

use std::cell::RefCell;
use std::net::IpAddr;

use egress_common::abi::{
    Addr, ClusterPrefix, ExposedPort, Flow, FragKey, FragPorts, HandoverEntry, NatEntry, NodeEntry, Owned, OwnedAddr,
    PodEntry, Policy, PolicyKey, Slot, Tuple,
};
use egress_common::decide::snat::PortSearch;
use egress_common::decide::world::World;
use egress_common::decide::{ClaimOutcome, NatOwner, PortClaim, QuotaKind, Tables};
use egress_common::wire::Segment;
use ipnet::IpNet;

/// A question to a map, and its answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Asked {
    Pod(Addr, Option<PodEntry>),
    Node(Addr, Option<NodeEntry>),
    /// With the prefix that was found.
    Prefix(Addr, Option<(IpNet, ClusterPrefix)>),
    /// Whether a connection from outside has this tuple.
    Inbound(Tuple, bool),
    Policy(PolicyKey, Option<Box<Policy>>),
    Flow(Tuple, Option<Flow>),
    /// A new flow, and what the map made of it.
    Begun(Flow, ClaimOutcome),
    Owned(u32, Option<Owned>),
    Handover(u32, Option<HandoverEntry>),
    /// Whether this node may emit its egress IPs.
    Lease(bool),
    NatEntry(Tuple, Option<Box<NatEntry>>),
    /// A key of a mapping: this one, for that one.
    Key(Tuple, Tuple, ClaimOutcome),
    AnyPort(PortClaim),
    /// The pod, or its egress policy, holds its quota.
    NoQuota(QuotaKind),
}

/// The maps of one packet.
pub struct MapRecorder<'w> {
    world: &'w World,
    asked: RefCell<Vec<Asked>>,
}

impl<'w> MapRecorder<'w> {
    pub fn new(world: &'w World) -> Self {
        Self { world, asked: RefCell::default() }
    }

    /// What was asked, each question once: the decision may come back to an entry.
    pub fn asked(self) -> Vec<Asked> {
        let mut asked: Vec<Asked> = Vec::new();
        for one in self.asked.into_inner() {
            if !asked.contains(&one) {
                asked.push(one);
            }
        }
        asked
    }

    fn note(&self, asked: Asked) {
        self.asked.borrow_mut().push(asked);
    }
}

/// A prefix as it stands in the map.
fn network(addr: &Addr, bits: u32) -> Option<IpNet> {
    let ip = addr.to_ip();
    let shift = if ip.is_ipv4() { 96 } else { 0 };
    IpNet::new(ip, u8::try_from(bits.checked_sub(shift)?).ok()?).ok()
}

/// The longest prefix of the world that holds the address.
fn longest(world: &World, addr: &Addr) -> Option<IpNet> {
    let ip: IpAddr = addr.to_ip();
    let prefixes = world.prefixes.borrow();
    let nets = prefixes.iter().filter_map(|(net, bits, _)| network(net, *bits));
    nets.filter(|net| net.contains(&ip)).max_by_key(IpNet::prefix_len)
}

impl Tables for MapRecorder<'_> {
    fn now_ns(&self) -> u64 {
        self.world.now_ns()
    }
    fn random(&self) -> u32 {
        self.world.random()
    }
    fn pod(&self, addr: &Addr) -> Option<&PodEntry> {
        let found = self.world.pod(addr);
        self.note(Asked::Pod(*addr, found.copied()));
        found
    }
    fn node(&self, addr: &Addr) -> Option<&NodeEntry> {
        let found = self.world.node(addr);
        self.note(Asked::Node(*addr, found.copied()));
        found
    }
    fn prefix(&self, addr: &Addr) -> Option<&ClusterPrefix> {
        let found = self.world.prefix(addr);
        let net = longest(self.world, addr).or_else(|| Some(IpNet::from(addr.to_ip())));
        self.note(Asked::Prefix(*addr, net.zip(found.copied())));
        found
    }
    fn policy(&self, key: &PolicyKey) -> Option<&Policy> {
        let found = self.world.policy(key);
        self.note(Asked::Policy(*key, found.copied().map(Box::new)));
        found
    }
    fn owned(&self, egress_id: u32) -> Option<&Owned> {
        let found = self.world.owned(egress_id);
        self.note(Asked::Owned(egress_id, found.copied()));
        found
    }
    fn owned_addr(&self, addr: &Addr) -> Option<&OwnedAddr> {
        self.world.owned_addr(addr)
    }
    fn has_lease(&self) -> bool {
        let has = self.world.has_lease();
        self.note(Asked::Lease(has));
        has
    }
    fn handover(&self, egress_id: u32) -> Option<&HandoverEntry> {
        let found = self.world.handover(egress_id);
        self.note(Asked::Handover(egress_id, found.copied()));
        found
    }
    fn inbound_answered(&self, tuple: &Tuple, segment: Segment) -> bool {
        let known = self.world.inbound_answered(tuple, segment);
        self.note(Asked::Inbound(*tuple, known));
        known
    }
    fn inbound_heard(&self, tuple: &Tuple, segment: Segment) -> bool {
        self.world.inbound_heard(tuple, segment)
    }
    fn inbound_known(&self, tuple: &Tuple) -> bool {
        let known = self.world.inbound_known(tuple);
        self.note(Asked::Inbound(*tuple, known));
        known
    }
    fn inbound_in_use(&self) -> u32 {
        self.world.inbound_in_use()
    }
    fn claim_inbound(&self, tuple: &Tuple) -> ClaimOutcome {
        self.world.claim_inbound(tuple)
    }
    fn exposure(&self, port: &ExposedPort) -> Option<u32> {
        self.world.exposure(port)
    }
    fn forget_inbound(&self, tuple: &Tuple) {
        self.world.forget_inbound(tuple);
    }
    fn datagram_seen(&self, tuple: &Tuple) -> bool {
        self.world.datagram_seen(tuple)
    }
    fn note_datagram(&self, tuple: &Tuple) {
        self.world.note_datagram(tuple);
    }
    fn flow_seen(&self, tuple: &Tuple, segment: Segment) -> Option<&Flow> {
        // As it was before this packet.
        self.note(Asked::Flow(*tuple, self.world.flow_peek(tuple).copied()));
        self.world.flow_seen(tuple, segment)
    }
    fn flow_peek(&self, tuple: &Tuple) -> Option<&Flow> {
        self.world.flow_peek(tuple)
    }
    fn flow_answered(&self, tuple: &Tuple, segment: Segment) {
        self.world.flow_answered(tuple, segment);
    }
    fn claim_flow(&self, tuple: &Tuple, flow: &Flow) -> ClaimOutcome {
        let claim = self.world.claim_flow(tuple, flow);
        self.note(Asked::Begun(*flow, claim));
        claim
    }
    fn decisions(&self) -> u32 {
        self.world.decisions()
    }
    fn settle_flow(&self, tuple: &Tuple, egress_id: u32, slot: &Slot, decisions: u32) {
        self.world.settle_flow(tuple, egress_id, slot, decisions);
    }
    fn set_flow_slot(&self, tuple: &Tuple, slot: u32) {
        self.world.set_flow_slot(tuple, slot);
    }
    fn forget_flow(&self, tuple: &Tuple) {
        self.world.forget_flow(tuple);
    }
    fn put_flow(&self, tuple: &Tuple, flow: &Flow) -> bool {
        self.note(Asked::Begun(*flow, ClaimOutcome::Claimed));
        self.world.put_flow(tuple, flow)
    }
    fn nat_seen(&self, key: &Tuple, segment: Segment) -> Option<&NatEntry> {
        self.note(Asked::NatEntry(*key, self.world.nat_peek(key).copied().map(Box::new)));
        self.world.nat_seen(key, segment)
    }
    fn nat_peek(&self, key: &Tuple) -> Option<&NatEntry> {
        self.world.nat_peek(key)
    }
    fn claim_nat(&self, key: &Tuple, other: &Tuple, owner: &NatOwner) -> ClaimOutcome {
        let claim = self.world.claim_nat(key, other, owner);
        self.note(Asked::Key(*key, *other, claim));
        claim
    }
    fn has_quota(&self, pod: &Addr, egress_id: u32, held: QuotaKind) -> bool {
        let has = self.world.has_quota(pod, egress_id, held);
        if !has {
            self.note(Asked::NoQuota(held));
        }
        has
    }
    fn count_nat_entry(&self, pod: &Addr, egress_id: u32) {
        self.world.count_nat_entry(pod, egress_id);
    }
    fn claim_any_port(&self, forward: &Tuple, address: &Addr, owner: &NatOwner, search: &PortSearch) -> PortClaim {
        let claim = self.world.claim_any_port(forward, address, owner, search);
        self.note(Asked::AnyPort(claim));
        claim
    }
    fn is_exhausted(&self, destination: &Tuple) -> bool {
        self.world.is_exhausted(destination)
    }
    fn note_exhausted(&self, destination: &Tuple) {
        self.world.note_exhausted(destination);
    }
    fn forget_nat(&self, key: &Tuple) -> bool {
        self.world.forget_nat(key)
    }
    fn fragment(&self, key: &FragKey) -> Option<&FragPorts> {
        self.world.fragment(key)
    }
    fn put_fragment(&self, key: &FragKey, ports: &FragPorts) {
        self.world.put_fragment(key, ports);
    }
    fn is_awaited(&self, key: &FragKey) -> bool {
        self.world.is_awaited(key)
    }
}
