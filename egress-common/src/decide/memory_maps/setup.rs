//! Setup and inspection of the maps by textual addresses, for the tests of the decisions.

use std::net::IpAddr;
use std::vec;

use super::MemoryMaps;
use crate::abi::*;
use crate::decide::cast::{self, NODE, UPLINK, V4, V6};
use crate::decide::fragments;
use crate::wire::Headers;

pub(crate) fn addr(text: &str) -> Addr {
    Addr::from(text.parse::<IpAddr>().expect("an address"))
}

pub(crate) fn with_node_ports(mut config: Config, first: u16, last: u16) -> Config {
    config.node_ports = PortRange { first, last };
    config
}

impl MemoryMaps {
    /// Two nodes with their pod subnets, as in [`cast`]; no pod, no policy.
    pub(crate) fn new() -> Self {
        let mut config = Config::EMPTY;
        config.generation = 1;
        config.tunnel_port = 6179;
        config.self_node = addr(NODE);
        config.uplink_ifindex = cast::UPLINK;
        config.node_v4 = addr(V4.node);
        config.node_v6 = addr(V6.node);
        config.node_ports = PortRange { first: 61000, last: 65535 };
        config.direct_routing = 1;
        let maps = Self::empty(config);
        cast::settle(&maps);
        maps
    }

    pub(crate) fn put_node(&self, at: &str, entry: NodeEntry) {
        self.nodes.borrow_mut().insert(addr(at), entry);
    }

    /// Changes the value of a key of `nat`.
    pub(crate) fn change_nat(&self, key: &Tuple, change: impl Fn(NatEntry) -> NatEntry) {
        self.nat.change(key, |nat_entry| *nat_entry = change(*nat_entry)).expect("a mapping");
    }

    pub(crate) fn add_node(&self, at: &str, place: NodePlace, node: &str) {
        self.put_node(at, NodeEntry::new(place, addr(node)));
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

    /// The policy of the class for the destinations in this prefix.
    pub(crate) fn put_class(&self, class: u32, to: &str, length: u32, policy: ClassPolicy) {
        let length = if to.contains(':') { length } else { length + 96 };
        self.classes.borrow_mut().push((PolicyDestination { set: class, to: addr(to) }, length, policy));
    }

    /// As if a later fragment of the datagram were held.
    pub(crate) fn await_first(&self, first: &Headers) {
        self.awaited.borrow_mut().insert(fragments::key(first), (self.now.get(), 1));
    }

    pub(crate) fn own(&self, egress_id: u32, address: &str) {
        let owned = Owned::new(egress_id, addr(address), UPLINK, [2, 0, 0, 0, 0, 1], 1500);
        self.put_owned(egress_id, owned);
    }

    /// For the slots' family; for both families without slots.
    pub(crate) fn set_policy(&self, egress_id: u32, when_empty: WhenEmpty, slots: &[PolicySlot]) {
        let policy = PolicyEntry::with_slots(when_empty, slots).expect("few slots");
        let families = slots.first().map_or(vec![Family::V4, Family::V6], |slot| vec![slot.address.family()]);
        for family in families {
            self.put_policy(PolicyEntryKey::new(egress_id, family), policy);
        }
    }

    /// Adds addresses that no node serves now.
    pub(crate) fn set_pending(&self, egress_id: u32, addresses: &[Addr]) {
        let key = PolicyEntryKey::new(egress_id, addresses[0].family());
        let policy = *self.policies.borrow().get(&key).expect("a policy");
        self.put_policy(key, policy.with_pending(addresses).expect("few addresses"));
    }

    pub(crate) fn remember_flow(&self, tuple: &Tuple, address: Addr, egress_id: u32) {
        self.flows.put(*tuple, Flow::new(address, egress_id, 0, 0, self.now.get()));
    }

    pub(crate) fn flows_len(&self) -> usize {
        self.flows.len()
    }

    pub(crate) fn nat_len(&self) -> usize {
        self.nat.len()
    }

    pub(crate) fn cut_flows(&self) {
        self.flows.clear();
    }

    pub(crate) fn inbound_at(&self, tuple: &Tuple) -> Option<Inbound> {
        self.inbound.get(tuple)
    }

    pub(crate) fn flow_at(&self, tuple: &Tuple) -> Option<Flow> {
        self.flows.get(tuple)
    }

    pub(crate) fn inbound_len(&self) -> usize {
        self.inbound.len()
    }

    pub(crate) fn limit_flows(&self, limit: usize) {
        self.flows.limit(limit);
    }

    pub(crate) fn limit_inbound(&self, limit: usize) {
        self.inbound.limit(limit);
    }

    pub(crate) fn limit_nat(&self, limit: usize) {
        self.nat.limit(limit);
    }
}
