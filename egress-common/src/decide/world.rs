//! The maps as hash maps: what the tests of the decisions stand on.
//!
//! Each behaviour that decisions rely on (insert-if-absent, refusal when full, copies) is proved on the real maps by the
//! program tests of egress-agent.

use std::boxed::Box;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::net::IpAddr;
use std::vec::Vec;

use super::cast::{self, NODE, V4, V6};
use super::{Claim, Owner, PortClaim, Tables, phase, snat};
use crate::abi::*;
use crate::wire::PROTO_TCP;

type Meanwhile = Box<dyn FnOnce(&World)>;

pub(crate) struct World {
    pub(crate) config: Cell<Config>,
    pub(crate) now: Cell<u64>,
    random: Cell<u32>,
    pods: RefCell<HashMap<Addr, PodEntry>>,
    nodes: RefCell<HashMap<Addr, NodeEntry>>,
    prefixes: RefCell<Vec<(Addr, u32, ClusterPrefix)>>,
    policies: RefCell<HashMap<PolicyKey, &'static Policy>>,
    owned: RefCell<HashMap<u32, Owned>>,
    inbound: RefCell<HashMap<Tuple, Inbound>>,
    inbound_limit: Cell<usize>,
    datagrams: RefCell<std::collections::HashSet<Tuple>>,
    flows: RefCell<HashMap<Tuple, Flow>>,
    flows_limit: Cell<usize>,
    nat: RefCell<HashMap<Tuple, Mapping>>,
    nat_limit: Cell<usize>,
    meanwhile: RefCell<Option<Meanwhile>>,
    mappings: Cell<u32>,
    exhausted: RefCell<HashMap<Tuple, u64>>,
    frags: RefCell<HashMap<FragKey, FragPorts>>,
}

pub(crate) fn addr(text: &str) -> Addr {
    Addr::from(text.parse::<IpAddr>().expect("an address"))
}

pub(crate) fn with_node_ports(mut config: Config, first: u16, last: u16) -> Config {
    config.node_ports = PortRange { first, last };
    config
}

impl World {
    /// A node and another one, with their pod subnets, as [`cast`] names them; no pod, no object.
    pub(crate) fn new() -> Self {
        let mut config = Config::EMPTY;
        config.generation = 1;
        config.tunnel_port = 6179;
        config.self_node = addr(NODE);
        config.node_v4 = addr(V4.node);
        config.node_v6 = addr(V6.node);
        config.node_ports = PortRange { first: 61000, last: 65535 };
        let world = Self {
            config: Cell::new(config),
            now: Cell::new(1_000_000_000_000),
            random: Cell::new(1),
            pods: RefCell::default(),
            nodes: RefCell::default(),
            prefixes: RefCell::default(),
            policies: RefCell::default(),
            owned: RefCell::default(),
            inbound: RefCell::default(),
            inbound_limit: Cell::new(usize::MAX),
            datagrams: RefCell::default(),
            flows: RefCell::default(),
            flows_limit: Cell::new(usize::MAX),
            nat: RefCell::default(),
            nat_limit: Cell::new(usize::MAX),
            meanwhile: RefCell::default(),
            mappings: Cell::new(0),
            exhausted: RefCell::default(),
            frags: RefCell::default(),
        };
        cast::settle(&world);
        world
    }

    pub(crate) fn put_node(&self, at: &str, entry: NodeEntry) {
        self.nodes.borrow_mut().insert(addr(at), entry);
    }

    /// Changes the value of a key of `nat`.
    pub(crate) fn change_nat(&self, key: &Tuple, change: impl Fn(Mapping) -> Mapping) {
        let mut nat = self.nat.borrow_mut();
        let mapping = nat.get_mut(key).expect("a mapping");
        *mapping = change(*mapping);
    }

    pub(crate) fn add_node(&self, at: &str, place: NodePlace, node: &str) {
        self.nodes.borrow_mut().insert(addr(at), NodeEntry::new(place, addr(node)));
    }

    pub(crate) fn add_prefix(&self, net: &str, len: u32, kind: PrefixKind, node: Option<&str>) {
        self.put_prefix(net, len, ClusterPrefix::new(kind, node.map_or(Addr::UNSPECIFIED, addr)));
    }

    pub(crate) fn put_prefix(&self, net: &str, len: u32, prefix: ClusterPrefix) {
        let len = if net.contains(':') { len } else { len + 96 };
        self.prefixes.borrow_mut().push((addr(net), len, prefix));
    }

    pub(crate) fn add_pod(&self, at: &str, entry: PodEntry) {
        self.pods.borrow_mut().insert(addr(at), entry);
    }

    pub(crate) fn own(&self, egress_id: u32, address: &str) {
        let owned = Owned { address: addr(address), ifindex: 2, mac: [2, 0, 0, 0, 0, 1], reserved: [0; 2] };
        self.owned.borrow_mut().insert(egress_id, owned);
    }

    /// For the slots' family; for both where there is none.
    pub(crate) fn set_policy(&self, egress_id: u32, when_empty: WhenEmpty, slots: &[Slot]) {
        let policy = Policy::with_slots(when_empty, slots).expect("few slots");
        let families = slots.first().map_or(std::vec![Family::V4, Family::V6], |slot| std::vec![slot.address.family()]);
        for family in families {
            self.put_policy(PolicyKey::new(egress_id, family), policy);
        }
    }

    pub(crate) fn put_policy(&self, key: PolicyKey, policy: Policy) {
        self.policies.borrow_mut().insert(key, Box::leak(Box::new(policy)));
    }

    pub(crate) fn remember_flow(&self, tuple: &Tuple, address: Addr, egress_id: u32) {
        let flow = Flow::new(address, egress_id, 0, 0, 0);
        self.flows.borrow_mut().insert(*tuple, flow);
    }

    pub(crate) fn flows_len(&self) -> usize {
        self.flows.borrow().len()
    }

    pub(crate) fn nat_len(&self) -> usize {
        self.nat.borrow().len()
    }

    pub(crate) fn cut_flows(&self) {
        self.flows.borrow_mut().clear();
    }

    pub(crate) fn mappings_made(&self) -> u32 {
        self.mappings.get()
    }

    pub(crate) fn inbound_at(&self, tuple: &Tuple) -> Option<Inbound> {
        self.inbound.borrow().get(tuple).copied()
    }

    pub(crate) fn flow_at(&self, tuple: &Tuple) -> Option<Flow> {
        self.flows.borrow().get(tuple).copied()
    }

    pub(crate) fn inbound_len(&self) -> usize {
        self.inbound.borrow().len()
    }

    pub(crate) fn limit_flows(&self, limit: usize) {
        self.flows_limit.set(limit);
    }

    pub(crate) fn limit_inbound(&self, limit: usize) {
        self.inbound_limit.set(limit);
    }

    /// Every key of `nat` has its counterpart, and they name each other.
    pub(crate) fn assert_paired(&self) {
        let nat = self.nat.borrow();
        for (key, mapping) in nat.iter() {
            let other = nat.get(&mapping.other).expect("the other key");
            assert_eq!(other.other, *key);
            assert_ne!(key.direction(), mapping.other.direction());
        }
    }

    /// What another CPU does right after a key of `nat` was refused for the first time.
    pub(crate) fn when_nat_is_full(&self, meanwhile: impl FnOnce(&World) + 'static) {
        self.meanwhile.replace(Some(Box::new(meanwhile)));
    }

    pub(crate) fn limit_nat(&self, limit: usize) {
        self.nat_limit.set(limit);
    }
}

/// Leaked, so that lookups can lend as the kernel's maps do; a test's worth of bytes.
fn lend<V: Copy>(value: Option<V>) -> Option<&'static V> {
    value.map(|value| &*Box::leak(Box::new(value)))
}

impl Tables for World {
    fn now_ns(&self) -> u64 {
        self.now.get()
    }
    fn random(&self) -> u32 {
        self.random.set(self.random.get().wrapping_mul(1_664_525).wrapping_add(1_013_904_223));
        self.random.get()
    }
    fn pod(&self, addr: &Addr) -> Option<&PodEntry> {
        lend(self.pods.borrow().get(addr).copied())
    }
    fn node(&self, addr: &Addr) -> Option<&NodeEntry> {
        lend(self.nodes.borrow().get(addr).copied())
    }
    fn prefix(&self, addr: &Addr) -> Option<&ClusterPrefix> {
        let bits = u128::from_be_bytes(addr.octets());
        let prefixes = self.prefixes.borrow();
        let matching = prefixes.iter().filter(|(net, len, _)| {
            let diff = bits ^ u128::from_be_bytes(net.octets());
            diff.leading_zeros() >= *len
        });
        lend(matching.max_by_key(|(_, len, _)| *len).map(|(_, _, prefix)| *prefix))
    }
    fn policy(&self, key: &PolicyKey) -> Option<&Policy> {
        self.policies.borrow().get(key).copied()
    }
    fn owned(&self, egress_id: u32) -> Option<&Owned> {
        lend(self.owned.borrow().get(&egress_id).copied())
    }
    fn owned_addr(&self, addr: &Addr) -> Option<&OwnedAddr> {
        let owned = self.owned.borrow();
        let (egress_id, owned) = owned.iter().find(|(_, owned)| owned.address == *addr)?;
        lend(Some(OwnedAddr { egress_id: *egress_id, ifindex: owned.ifindex, mac: owned.mac, reserved: [0; 2] }))
    }
    fn inbound_answered(&self, tuple: &Tuple, tcp_flags: u8) -> bool {
        let mut inbound = self.inbound.borrow_mut();
        let Some(inbound) = inbound.get_mut(tuple) else { return false };
        if tuple.protocol == PROTO_TCP {
            inbound.last_seen_ns = self.now.get();
            inbound.state = phase::replied(inbound.state, tcp_flags);
        }
        true
    }
    fn inbound_heard(&self, tuple: &Tuple, tcp_flags: u8) -> bool {
        let mut inbound = self.inbound.borrow_mut();
        let Some(inbound) = inbound.get_mut(tuple) else { return false };
        inbound.last_seen_ns = self.now.get();
        inbound.state = phase::heard(inbound.state, tcp_flags);
        true
    }
    fn inbound_known(&self, tuple: &Tuple) -> bool {
        self.inbound.borrow().contains_key(tuple)
    }
    fn inbound_in_use(&self) -> u32 {
        self.inbound.borrow().len() as u32
    }
    fn claim_inbound(&self, tuple: &Tuple) -> Claim {
        let mut inbound = self.inbound.borrow_mut();
        if inbound.contains_key(tuple) {
            return Claim::Taken;
        }
        if inbound.len() >= self.inbound_limit.get() {
            return Claim::Full;
        }
        inbound.insert(*tuple, Inbound::new(self.now.get()));
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
        flow.last_seen_ns = self.now.get();
        flow.state = phase::own(flow.state, tcp_flags, Direction::Egress);
        lend(Some(*flow))
    }
    fn flow_peek(&self, tuple: &Tuple) -> Option<&Flow> {
        lend(self.flows.borrow().get(tuple).copied())
    }
    fn flow_answered(&self, tuple: &Tuple, tcp_flags: u8) -> bool {
        let mut flows = self.flows.borrow_mut();
        let Some(flow) = flows.get_mut(tuple) else { return false };
        flow.state = phase::answered(flow.state, tcp_flags);
        true
    }
    fn claim_flow(&self, tuple: &Tuple, flow: &Flow) -> Claim {
        if self.flows.borrow().contains_key(tuple) {
            return Claim::Taken;
        }
        if self.flows.borrow().len() >= self.flows_limit.get() {
            return Claim::Full;
        }
        self.flows.borrow_mut().insert(*tuple, *flow);
        Claim::Claimed
    }
    fn decisions(&self) -> u32 {
        self.config.get().decisions
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
        mapping.last_seen_ns = self.now.get();
        mapping.state = phase::own(before, tcp_flags, key.direction());
        let seen = *mapping;
        if let Some(other) = nat.get_mut(&other) {
            other.state = phase::told(before, tcp_flags, key.direction(), other.state).unwrap_or(other.state);
        }
        lend(Some(seen))
    }
    fn nat_peek(&self, key: &Tuple) -> Option<&Mapping> {
        lend(self.nat.borrow().get(key).copied())
    }
    fn claim_nat(&self, key: &Tuple, other: &Tuple, owner: &Owner) -> Claim {
        let mut nat = self.nat.borrow_mut();
        if nat.contains_key(key) {
            return Claim::Taken;
        }
        if nat.len() >= self.nat_limit.get() {
            drop(nat);
            if let Some(meanwhile) = self.meanwhile.take() {
                meanwhile(self);
            }
            return Claim::Full;
        }
        let mapping = Mapping::new(*other, owner.origin, owner.source_node, owner.egress_id, self.now.get());
        nat.insert(*key, mapping);
        Claim::Claimed
    }
    fn count_mapping(&self, _egress_id: u32) {
        self.mappings.set(self.mappings.get() + 1);
    }
    fn claim_any_port(&self, forward: &Tuple, address: &Addr, owner: &Owner, search: &snat::PortSearch) -> PortClaim {
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
        noted.is_some_and(|noted| self.now.get() - noted <= snat::EXHAUSTED_NS)
    }
    fn note_exhausted(&self, destination: &Tuple) {
        self.exhausted.borrow_mut().insert(*destination, self.now.get());
    }
    fn forget_nat(&self, key: &Tuple) -> bool {
        self.nat.borrow_mut().remove(key).is_some()
    }
    fn fragment(&self, key: &FragKey) -> Option<&FragPorts> {
        lend(self.frags.borrow().get(key).copied())
    }
    fn put_fragment(&self, key: &FragKey, ports: &FragPorts) {
        self.frags.borrow_mut().insert(*key, *ports);
    }
}
