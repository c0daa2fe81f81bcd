//! Which nodes could take an address.
//!
//! A node takes part when it has the label, is ready, answers, and has said its networks. Of those, the ones whose
//! primary network holds the address could take it; but where the address lies in a network of another interface of some
//! node, only such nodes do, as users of the original know it.
//!
//! One whose agent is away keeps what it has, and could take nothing more. Nor could one that is drained, and what that has
//! goes to others as far as they can take it.
//!
//! Addresses with the same answer share a [`Class`]: there are few of them, however many addresses and nodes.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;

use ipnet::IpNet;

use crate::allocation::Facts;
use crate::model::view::Node;

/// The place of a node in the list of those that take part.
pub(super) type NodeIndex = usize;
/// The place of a class in the list of classes.
pub(super) type ClassIndex = usize;

/// Addresses that the same nodes could take.
#[derive(Debug)]
pub(super) struct Class {
    /// Ascending.
    pub(super) nodes: Vec<NodeIndex>,
}

#[derive(Debug)]
pub(super) struct Hosts<'a> {
    /// The nodes that take part, by name.
    pub(super) nodes: Vec<(&'a str, &'a Node)>,
    /// Their places: asked for every address that has one.
    places: HashMap<&'a str, NodeIndex>,
    /// Those of them that take nothing more.
    absent: BTreeSet<NodeIndex>,
    /// Those that others are to take over from.
    drained: BTreeSet<NodeIndex>,
    primary: Networks,
    secondary: Networks,
    pub(super) classes: Vec<Class>,
    known: BTreeMap<Key, ClassIndex>,
}

/// The networks that hold an address: of primary interfaces, and of others.
type Key = (Vec<IpNet>, Vec<IpNet>);

impl<'a> Hosts<'a> {
    pub(super) fn new(facts: &Facts<'a>) -> Self {
        let takes_part = |(name, node): &(&'a str, &'a Node)| {
            node.assignable && node.ready && node.is_part() && !facts.unreachable.contains(*name)
        };
        let all = facts.nodes.iter().map(|(name, node)| (name.as_str(), node.as_ref()));
        let nodes: Vec<_> = all.filter(takes_part).collect();
        let (mut primary, mut secondary) = (Networks::default(), Networks::default());
        for (index, (_, node)) in nodes.iter().enumerate() {
            node.primary_networks().iter().for_each(|network| primary.add(*network, index));
            node.secondary_networks().for_each(|network| secondary.add(network, index));
        }
        let those = |is: &dyn Fn(&str, &Node) -> bool| -> BTreeSet<NodeIndex> {
            let found = nodes.iter().enumerate().filter(|(_, (name, node))| is(name, node));
            found.map(|(index, _)| index).collect()
        };
        let drained = those(&|_, node| node.drained);
        let absent = those(&|name, node| node.drained || facts.absent.contains(name));
        let places = nodes.iter().enumerate().map(|(index, (name, _))| (*name, index)).collect();
        Self { nodes, places, absent, drained, primary, secondary, classes: Vec::new(), known: BTreeMap::new() }
    }

    pub(super) fn index(&self, name: &str) -> Option<NodeIndex> {
        self.places.get(name).copied()
    }

    /// Can this node carry the address? Whether others would be preferred is another question.
    pub(super) fn can(&self, node: NodeIndex, address: IpAddr) -> bool {
        self.nodes[node].1.hosts(address)
    }

    pub(super) fn is_drained(&self, node: NodeIndex) -> bool {
        self.drained.contains(&node)
    }

    pub(super) fn any_drained(&self) -> bool {
        !self.drained.is_empty()
    }

    /// The class of an address.
    pub(super) fn class(&mut self, address: IpAddr) -> ClassIndex {
        let key = (self.primary.holding(address), self.secondary.holding(address));
        if let Some(class) = self.known.get(&key) {
            return *class;
        }
        let primary = self.primary.nodes(&key.0);
        let secondary: BTreeSet<NodeIndex> = &self.secondary.nodes(&key.1) - &primary;
        let nodes = if secondary.is_empty() { primary } else { secondary };
        self.classes.push(Class { nodes: nodes.difference(&self.absent).copied().collect() });
        let class = self.classes.len() - 1;
        self.known.insert(key, class);
        class
    }
}

/// Networks and the nodes that are in them.
#[derive(Debug, Default)]
struct Networks {
    nodes: BTreeMap<IpNet, Vec<NodeIndex>>,
    /// The prefix lengths in use.
    v4: BTreeSet<u8>,
    v6: BTreeSet<u8>,
}

impl Networks {
    fn add(&mut self, network: IpNet, node: NodeIndex) {
        let lengths = if network.addr().is_ipv4() { &mut self.v4 } else { &mut self.v6 };
        lengths.insert(network.prefix_len());
        self.nodes.entry(network.trunc()).or_default().push(node);
    }

    fn holding(&self, address: IpAddr) -> Vec<IpNet> {
        let lengths = if address.is_ipv4() { &self.v4 } else { &self.v6 };
        let prefixes = lengths.iter().filter_map(|length| IpNet::new(address, *length).ok());
        prefixes.map(|prefix| prefix.trunc()).filter(|prefix| self.nodes.contains_key(prefix)).collect()
    }

    fn nodes(&self, networks: &[IpNet]) -> BTreeSet<NodeIndex> {
        networks.iter().filter_map(|network| self.nodes.get(network)).flatten().copied().collect()
    }
}
