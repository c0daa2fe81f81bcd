//! The maps as hash maps, and packets by hand: what the tests of the decisions stand on.
//!
//! Each behaviour that decisions rely on (insert-if-absent, refusal when full, copies) is proved on the real maps by the
//! program tests of egress-agent.

use std::boxed::Box;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::net::IpAddr;
use std::vec::Vec;

use super::{Claim, Owner, Tables, snat};
use crate::abi::*;
use crate::wire::{Heads, PROTO_ICMP, PROTO_TCP, PROTO_UDP};

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
    flows: RefCell<HashMap<Tuple, Flow>>,
    nat: RefCell<HashMap<Tuple, Mapping>>,
    nat_limit: Cell<usize>,
    frags: RefCell<HashMap<FragKey, FragPorts>>,
}

pub(crate) fn addr(text: &str) -> Addr {
    Addr::from(text.parse::<IpAddr>().expect("an address"))
}

impl World {
    /// A node 172.18.0.2 with pods in 10.244.1.0/24, and another node 172.18.0.3 with 10.244.2.0/24.
    pub(crate) fn new() -> Self {
        let mut config = Config::EMPTY;
        config.generation = 1;
        config.tunnel_port = 6179;
        config.self_node = addr("172.18.0.2");
        config.node_v4 = addr("172.18.0.2");
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
            flows: RefCell::default(),
            nat: RefCell::default(),
            nat_limit: Cell::new(usize::MAX),
            frags: RefCell::default(),
        };
        world.add_node("172.18.0.2", NodePlace::Own, "172.18.0.2");
        world.add_node("10.244.1.2", NodePlace::Own, "172.18.0.2");
        world.add_node("172.18.0.3", NodePlace::Other, "172.18.0.3");
        world.add_prefix("10.244.0.0", 16, PrefixKind::PodNetwork, None);
        world.add_prefix("10.244.1.0", 24, PrefixKind::PodSubnet, Some("172.18.0.2"));
        world.add_prefix("10.244.2.0", 24, PrefixKind::PodSubnet, Some("172.18.0.3"));
        world.add_prefix("10.96.0.0", 16, PrefixKind::Service, None);
        world
    }

    pub(crate) fn add_node(&self, at: &str, place: NodePlace, node: &str) {
        self.nodes.borrow_mut().insert(addr(at), NodeEntry::new(place, addr(node)));
    }

    pub(crate) fn add_prefix(&self, net: &str, len: u32, kind: PrefixKind, node: Option<&str>) {
        let node = node.map_or(Addr::UNSPECIFIED, addr);
        let len = if net.contains(':') { len } else { len + 96 };
        self.prefixes.borrow_mut().push((addr(net), len, ClusterPrefix::new(kind, node)));
    }

    pub(crate) fn add_pod(&self, at: &str, entry: PodEntry) {
        self.pods.borrow_mut().insert(addr(at), entry);
    }

    pub(crate) fn own(&self, egress_id: u32, address: &str) {
        let owned = Owned { address: addr(address), ifindex: 2, mac: [2, 0, 0, 0, 0, 1], reserved: [0; 2] };
        self.owned.borrow_mut().insert(egress_id, owned);
    }

    pub(crate) fn set_policy(&self, egress_id: u32, when_empty: WhenEmpty, slots: &[Slot]) {
        let policy = Policy::with_slots(when_empty, slots).expect("few slots");
        self.policies.borrow_mut().insert(PolicyKey::new(egress_id, Family::V4), Box::leak(Box::new(policy)));
    }

    pub(crate) fn remember_flow(&self, tuple: &Tuple, address: Addr, egress_id: u32) {
        let flow = Flow { address, egress_id, slot: 0, last_seen_ns: 0, tcp_flags: 0, reserved: 0 };
        self.flows.borrow_mut().insert(*tuple, flow);
    }

    pub(crate) fn nat_len(&self) -> usize {
        self.nat.borrow().len()
    }

    pub(crate) fn inbound_len(&self) -> usize {
        self.inbound.borrow().len()
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
    fn inbound_seen(&self, tuple: &Tuple) -> bool {
        self.inbound.borrow().contains_key(tuple)
    }
    fn claim_inbound(&self, tuple: &Tuple) -> Claim {
        let new = self.inbound.borrow_mut().insert(*tuple, Inbound { last_seen_ns: self.now.get() }).is_none();
        if new { Claim::Claimed } else { Claim::Taken }
    }
    fn flow_seen(&self, tuple: &Tuple, tcp_flags: u8) -> Option<&Flow> {
        let mut flows = self.flows.borrow_mut();
        let flow = flows.get_mut(tuple)?;
        flow.tcp_flags |= tcp_flags as u32;
        lend(Some(*flow))
    }
    fn claim_flow(&self, tuple: &Tuple, flow: &Flow) -> Claim {
        if self.flows.borrow().contains_key(tuple) {
            return Claim::Taken;
        }
        self.flows.borrow_mut().insert(*tuple, *flow);
        Claim::Claimed
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
        mapping.tcp_flags |= tcp_flags as u32;
        lend(Some(*mapping))
    }
    fn claim_nat(&self, key: &Tuple, other: &Tuple, owner: &Owner) -> Claim {
        let mut nat = self.nat.borrow_mut();
        if nat.contains_key(key) {
            return Claim::Taken;
        }
        if nat.len() >= self.nat_limit.get() {
            return Claim::Full;
        }
        let mapping = Mapping::new(*other, owner.origin, owner.source_node, owner.egress_id, self.now.get());
        nat.insert(*key, mapping);
        Claim::Claimed
    }
    fn claim_any_port(&self, forward: &Tuple, address: &Addr, owner: &Owner, search: &snat::PortSearch) -> Option<u16> {
        (0..search.span)
            .map(|index| search.at(index))
            .find(|port| self.claim_nat(&snat::reverse_key(forward, address, *port), forward, owner) == Claim::Claimed)
    }
    fn forget_nat(&self, key: &Tuple) {
        self.nat.borrow_mut().remove(key);
    }
    fn fragment(&self, key: &FragKey) -> Option<&FragPorts> {
        lend(self.frags.borrow().get(key).copied())
    }
    fn put_fragment(&self, key: &FragKey, ports: &FragPorts) {
        self.frags.borrow_mut().insert(*key, *ports);
    }
}

/// An IPv4 frame by hand; UDP unless said otherwise.
pub(crate) struct PacketV4 {
    frame: Vec<u8>,
}

pub(crate) fn packet_v4(saddr: &str, daddr: &str, sport: u16, dport: u16) -> PacketV4 {
    let mut frame = std::vec![0u8; 12];
    frame.extend([0x08, 0x00, 0x45, 0, 0, 48, 0, 7, 0, 0, 64, PROTO_UDP, 0, 0]);
    frame.extend(addr(saddr).v4_octets());
    frame.extend(addr(daddr).v4_octets());
    frame.extend(sport.to_be_bytes());
    frame.extend(dport.to_be_bytes());
    frame.resize(14 + 48, 0);
    PacketV4 { frame }
}

impl PacketV4 {
    pub(crate) fn tcp(mut self, flags: u8) -> Self {
        self.frame[14 + 9] = PROTO_TCP;
        self.frame[34 + 12] = 0x50;
        self.frame[34 + 13] = flags;
        self
    }

    pub(crate) fn echo(mut self, id: u16) -> Self {
        self.frame[14 + 9] = PROTO_ICMP;
        self.frame[34..38].copy_from_slice(&[8, 0, 0, 0]);
        self.frame[38..40].copy_from_slice(&id.to_be_bytes());
        self
    }

    pub(crate) fn ttl(mut self, ttl: u8) -> Self {
        self.frame[14 + 8] = ttl;
        self
    }

    /// Offset in units of eight bytes.
    pub(crate) fn fragment(mut self, offset: u16, more: bool) -> Self {
        let bits = offset | if more { 0x2000 } else { 0 };
        self.frame[14 + 6..14 + 8].copy_from_slice(&bits.to_be_bytes());
        self
    }

    pub(crate) fn heads(&self) -> Heads {
        Heads::parse(self.frame.as_slice(), Direction::Egress).expect("an IPv4 frame")
    }
}
