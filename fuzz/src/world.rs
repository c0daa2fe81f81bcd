//! The maps as hash maps that lend values as the kernel's do: what was lent stays as it was until the packet is through.

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::{HashMap, HashSet};

use egress_common::abi::{
    Addr, ClusterPrefix, Direction, Family, Flow, FragKey, FragPorts, Inbound, Mapping, NodeEntry, NodePlace, Owned,
    OwnedAddr, PodEntry, Policy, PolicyKey, PrefixKind, Slot, Timeouts, Tuple,
};
use egress_common::decide::snat::{self, PortSearch};
use egress_common::decide::{Claim, Owner, PortClaim, Tables, expiry, phase};
use egress_common::wire::PROTO_TCP;

use crate::places;

/// More than any packet asks for.
const LENT: usize = 64;

/// Values lent for one packet.
struct Lent<V>(Vec<OnceCell<V>>, Cell<usize>);

impl<V> Lent<V> {
    fn new() -> Self {
        Self((0..LENT).map(|_| OnceCell::new()).collect(), Cell::new(0))
    }

    fn lend(&self, value: V) -> &V {
        let index = self.1.replace(self.1.get() + 1);
        self.0[index].get_or_init(|| value)
    }

    fn take_back(&mut self) {
        for cell in &mut self.0[..self.1.replace(0)] {
            cell.take();
        }
    }
}

pub struct World {
    pub now: u64,
    random: Cell<u32>,
    pub pods: HashMap<Addr, PodEntry>,
    nodes: HashMap<Addr, NodeEntry>,
    prefixes: Vec<(Addr, u32, ClusterPrefix)>,
    pub policies: HashMap<PolicyKey, Policy>,
    /// By egress ID; one per family is kept in `owned_addr` too.
    pub owned: HashMap<u32, Owned>,
    pub owned_addr: HashMap<Addr, OwnedAddr>,
    pub inbound: RefCell<HashMap<Tuple, Inbound>>,
    pub datagrams: RefCell<HashSet<Tuple>>,
    pub flows: RefCell<HashMap<Tuple, Flow>>,
    pub nat: RefCell<HashMap<Tuple, Mapping>>,
    pub nat_limit: usize,
    /// `Config::decisions`.
    pub decisions: u32,
    exhausted: RefCell<HashMap<Tuple, u64>>,
    frags: RefCell<HashMap<FragKey, FragPorts>>,
    lent_flows: Lent<Flow>,
    lent_mappings: Lent<Mapping>,
    lent_frags: Lent<FragPorts>,
}

impl World {
    /// A node and another one with their networks; no pod is known, no object is there.
    #[must_use]
    pub fn new() -> Self {
        let (mut nodes, mut prefixes) = (HashMap::new(), Vec::new());
        for family in places::FAMILIES {
            nodes.insert(places::node(family), NodeEntry::new(NodePlace::Own, places::SELF));
            nodes.insert(places::other_node(family), NodeEntry::new(NodePlace::Other, places::OTHER));
            let (wide, narrow, host) = (places::bits(family, 16, 24), places::bits(family, 24, 64), 128);
            let none = Addr::UNSPECIFIED;
            prefixes.extend([
                (places::pod(family, 0), wide, ClusterPrefix::new(PrefixKind::PodNetwork, none)),
                (places::pod(family, 0), narrow, ClusterPrefix::new(PrefixKind::PodSubnet, places::SELF)),
                (places::remote_pod(family, 0), narrow, ClusterPrefix::new(PrefixKind::PodSubnet, places::OTHER)),
                (places::service(family), narrow, ClusterPrefix::new(PrefixKind::Service, none)),
                (places::egress(family, 0), host, ClusterPrefix::new(PrefixKind::EgressIp, none)),
                (places::egress(family, 1), host, ClusterPrefix::new(PrefixKind::EgressIp, none)),
            ]);
        }
        Self {
            now: 1_000_000_000_000,
            random: Cell::new(1),
            pods: HashMap::new(),
            nodes,
            prefixes,
            policies: HashMap::new(),
            owned: HashMap::new(),
            owned_addr: HashMap::new(),
            inbound: RefCell::default(),
            datagrams: RefCell::default(),
            flows: RefCell::default(),
            nat: RefCell::default(),
            nat_limit: 4096,
            decisions: 1,
            exhausted: RefCell::default(),
            frags: RefCell::default(),
            lent_flows: Lent::new(),
            lent_mappings: Lent::new(),
            lent_frags: Lent::new(),
        }
    }

    /// The next packet: what was lent for the last one is taken back.
    pub fn next_packet(&mut self) {
        self.lent_flows.take_back();
        self.lent_mappings.take_back();
        self.lent_frags.take_back();
    }

    pub fn own(&mut self, egress_id: u32, address: Addr) {
        let mac = [2, 0, 0, 0, 1, 0x64];
        self.owned.insert(egress_id, Owned { address, ifindex: 11, mac, reserved: [0; 2] });
        self.owned_addr.insert(address, OwnedAddr { egress_id, ifindex: 11, mac, reserved: [0; 2] });
    }

    pub fn disown(&mut self, egress_id: u32) {
        self.owned.remove(&egress_id);
        self.owned_addr.retain(|_, owned| owned.egress_id != egress_id);
    }

    /// As the program `sweep`, where no packet comes between.
    pub fn sweep(&mut self, timeouts: &Timeouts) {
        let (now, nat) = (self.now, self.nat.get_mut());
        let keys: Vec<Tuple> = nat.keys().copied().filter(|key| key.direction() == Direction::Egress).collect();
        for key in keys {
            let Some(forward) = nat.get(&key).copied() else { continue };
            let reverse = nat.get(&forward.other).copied().filter(|reverse| reverse.other == key);
            if reverse.is_none() || expiry::is_mapping_idle(timeouts, &forward, reverse.as_ref(), now) {
                nat.remove(&key);
                if reverse.is_some() {
                    nat.remove(&forward.other);
                }
            }
        }
        self.flows.get_mut().retain(|key, flow| !expiry::is_flow_idle(timeouts, flow, key.protocol, now));
        self.inbound.get_mut().retain(|key, entry| !expiry::is_inbound_idle(timeouts, entry, key.protocol, now));
    }

    /// Every key of `nat` has its other one, of the other direction, and they name each other.
    pub fn assert_paired(&self) {
        let nat = self.nat.borrow();
        for (key, mapping) in nat.iter() {
            let other = nat.get(&mapping.other).unwrap_or_else(|| panic!("{key:?} is alone: {mapping:?}"));
            assert_eq!(other.other, *key, "they name each other");
            assert_ne!(key.direction(), mapping.other.direction());
        }
    }
}

impl Default for World {
    fn default() -> Self {
        Self::new()
    }
}

impl Tables for World {
    fn now_ns(&self) -> u64 {
        self.now
    }
    fn random(&self) -> u32 {
        self.random.set(self.random.get().wrapping_mul(1_664_525).wrapping_add(1_013_904_223));
        self.random.get()
    }
    fn pod(&self, addr: &Addr) -> Option<&PodEntry> {
        self.pods.get(addr)
    }
    fn node(&self, addr: &Addr) -> Option<&NodeEntry> {
        self.nodes.get(addr)
    }
    fn prefix(&self, addr: &Addr) -> Option<&ClusterPrefix> {
        let number = |addr: &Addr| u128::from_be_bytes(addr.octets());
        let matching = |(net, length, _): &&(Addr, u32, ClusterPrefix)| {
            (number(net) ^ number(addr)).leading_zeros() >= *length && net.family() == addr.family()
        };
        self.prefixes.iter().filter(matching).max_by_key(|(_, length, _)| *length).map(|(_, _, prefix)| prefix)
    }
    fn policy(&self, key: &PolicyKey) -> Option<&Policy> {
        self.policies.get(key)
    }
    fn owned(&self, egress_id: u32) -> Option<&Owned> {
        self.owned.get(&egress_id)
    }
    fn owned_addr(&self, addr: &Addr) -> Option<&OwnedAddr> {
        self.owned_addr.get(addr)
    }
    fn inbound_answered(&self, tuple: &Tuple, tcp_flags: u8) -> bool {
        let mut inbound = self.inbound.borrow_mut();
        let Some(inbound) = inbound.get_mut(tuple) else { return false };
        if tuple.protocol == PROTO_TCP {
            inbound.last_seen_ns = self.now;
            inbound.state = phase::replied(inbound.state, tcp_flags);
        }
        true
    }
    fn inbound_heard(&self, tuple: &Tuple, tcp_flags: u8) -> bool {
        let mut inbound = self.inbound.borrow_mut();
        let Some(inbound) = inbound.get_mut(tuple) else { return false };
        inbound.last_seen_ns = self.now;
        inbound.state = phase::heard(inbound.state, tcp_flags);
        true
    }
    fn inbound_known(&self, tuple: &Tuple) -> bool {
        self.inbound.borrow().contains_key(tuple)
    }
    fn inbound_in_use(&self) -> u32 {
        u32::try_from(self.inbound.borrow().len()).unwrap_or(u32::MAX)
    }
    fn claim_inbound(&self, tuple: &Tuple) -> Claim {
        let mut inbound = self.inbound.borrow_mut();
        if inbound.contains_key(tuple) {
            return Claim::Taken;
        }
        inbound.insert(*tuple, Inbound::new(self.now));
        Claim::Claimed
    }
    fn forget_inbound(&self, tuple: &Tuple) {
        self.inbound.borrow_mut().remove(tuple);
    }
    fn datagram_seen(&self, tuple: &Tuple) -> bool {
        self.datagrams.borrow().contains(tuple)
    }
    fn note_datagram(&self, tuple: &Tuple) {
        self.datagrams.borrow_mut().insert(*tuple);
    }
    fn flow_seen(&self, tuple: &Tuple, tcp_flags: u8) -> Option<&Flow> {
        let mut flows = self.flows.borrow_mut();
        let flow = flows.get_mut(tuple)?;
        flow.last_seen_ns = self.now;
        flow.state = phase::own(flow.state, tcp_flags, Direction::Egress);
        Some(self.lent_flows.lend(*flow))
    }
    fn flow_peek(&self, tuple: &Tuple) -> Option<&Flow> {
        self.flows.borrow().get(tuple).map(|flow| self.lent_flows.lend(*flow))
    }
    fn flow_answered(&self, tuple: &Tuple, tcp_flags: u8) -> bool {
        let mut flows = self.flows.borrow_mut();
        let Some(flow) = flows.get_mut(tuple) else { return false };
        flow.state = phase::answered(flow.state, tcp_flags);
        true
    }
    fn claim_flow(&self, tuple: &Tuple, flow: &Flow) -> Claim {
        let mut flows = self.flows.borrow_mut();
        if flows.contains_key(tuple) {
            return Claim::Taken;
        }
        flows.insert(*tuple, *flow);
        Claim::Claimed
    }
    fn decisions(&self) -> u32 {
        self.decisions
    }
    fn settle_flow(&self, tuple: &Tuple, slot: &Slot, decisions: u32) {
        if let Some(flow) = self.flows.borrow_mut().get_mut(tuple) {
            (flow.settled, flow.decided) = (*slot, decisions);
        }
    }
    fn set_flow_slot(&self, tuple: &Tuple, slot: u32) {
        if let Some(flow) = self.flows.borrow_mut().get_mut(tuple) {
            flow.slot = slot;
        }
    }
    fn put_flow(&self, tuple: &Tuple, flow: &Flow) -> bool {
        self.flows.borrow_mut().insert(*tuple, *flow);
        true
    }
    fn nat_seen(&self, key: &Tuple, tcp_flags: u8) -> Option<&Mapping> {
        let mut nat = self.nat.borrow_mut();
        let mapping = nat.get_mut(key)?;
        let (before, other) = (mapping.state, mapping.other);
        mapping.last_seen_ns = self.now;
        mapping.state = phase::own(before, tcp_flags, key.direction());
        let seen = *mapping;
        if let Some(other) = nat.get_mut(&other) {
            other.state = phase::told(before, tcp_flags, key.direction(), other.state).unwrap_or(other.state);
        }
        Some(self.lent_mappings.lend(seen))
    }
    fn nat_peek(&self, key: &Tuple) -> Option<&Mapping> {
        self.nat.borrow().get(key).map(|mapping| self.lent_mappings.lend(*mapping))
    }
    fn claim_nat(&self, key: &Tuple, other: &Tuple, owner: &Owner) -> Claim {
        let mut nat = self.nat.borrow_mut();
        if nat.contains_key(key) {
            return Claim::Taken;
        }
        if nat.len() >= self.nat_limit {
            return Claim::Full;
        }
        nat.insert(*key, Mapping::new(*other, owner.origin, owner.source_node, owner.egress_id, self.now));
        Claim::Claimed
    }
    fn count_mapping(&self, _egress_id: u32) {}
    fn claim_any_port(&self, forward: &Tuple, address: &Addr, owner: &Owner, search: &PortSearch) -> PortClaim {
        for port in (0..search.span).map(|index| search.at(index)) {
            match self.claim_nat(&snat::reverse_key(forward, address, port), forward, owner) {
                Claim::Claimed => return PortClaim::Claimed(port),
                Claim::Taken => {}
                Claim::Full => return PortClaim::Full,
            }
        }
        PortClaim::NoneFree
    }
    fn is_exhausted(&self, destination: &Tuple) -> bool {
        let noted = self.exhausted.borrow().get(destination).copied();
        noted.is_some_and(|noted| self.now - noted <= snat::EXHAUSTED_NS)
    }
    fn note_exhausted(&self, destination: &Tuple) {
        self.exhausted.borrow_mut().insert(*destination, self.now);
    }
    fn forget_nat(&self, key: &Tuple) -> bool {
        self.nat.borrow_mut().remove(key).is_some()
    }
    fn fragment(&self, key: &FragKey) -> Option<&FragPorts> {
        self.frags.borrow().get(key).map(|ports| self.lent_frags.lend(*ports))
    }
    fn put_fragment(&self, key: &FragKey, ports: &FragPorts) {
        self.frags.borrow_mut().insert(*key, *ports);
    }
}

/// The key of an object's policy.
#[must_use]
pub const fn policy_key(egress_id: u32, family: Family) -> PolicyKey {
    PolicyKey::new(egress_id, family)
}
