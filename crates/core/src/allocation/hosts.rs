//! Which nodes could take an address.
//!
//! - A node takes part if it has the label, or a policy names its nodes otherwise and this one is among them; if it is
//!   ready, answers, and has published its networks. An address goes to a node whose primary network contains it. If
//!   it belongs to another interface of some node that hosts it there, only such nodes can take it, as in
//!   OVN-Kubernetes.
//! - A node whose agent is away keeps its addresses and takes no new ones. Neither does a drained node, whose addresses
//!   move to others as far as these can take them. The same holds for the addresses of one interface that cannot send.
//! - Addresses with the same candidates share an [`AddressClass`]: there are few of them, however many addresses and
//!   nodes.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;

use ipnet::IpNet;

use crate::allocation::AssignmentInputs;
use crate::model::node::Node;
use crate::model::policy::{EgressNodes, EgressPolicy, EligibleNodes, SelectedNodes};

/// Index of a node among those that take part.
pub(super) type NodeIndex = usize;
/// Index of a class.
pub(super) type ClassIndex = usize;

/// Addresses with the same candidate nodes.
#[derive(Debug)]
pub(super) struct AddressClass {
    /// Ascending.
    pub(super) nodes: Vec<NodeIndex>,
}

/// The selected nodes, if a policy has them instead of the label, and the networks that contain the address.
type NetworkClass<'a> = (Option<&'a SelectedNodes>, Vec<IpNet>);

#[derive(Debug)]
pub(super) struct Hosts<'a> {
    /// The nodes that take part, by name.
    pub(super) nodes: Vec<(&'a str, &'a Node)>,
    /// Their indices, looked up for every assigned address.
    index_by_name: HashMap<&'a str, NodeIndex>,
    /// Nodes that take no new addresses.
    takes_no_new: BTreeSet<NodeIndex>,
    /// Drained nodes.
    drained: BTreeSet<NodeIndex>,
    /// Nodes with an interface, other than the uplink, that cannot send.
    impaired: BTreeSet<NodeIndex>,
    /// All networks that decide about hosting.
    networks: Networks,
    pub(super) classes: Vec<AddressClass>,
    class_by_networks: BTreeMap<NetworkClass<'a>, ClassIndex>,
    /// By the named nodes.
    class_by_names: BTreeMap<Option<&'a BTreeSet<String>>, ClassIndex>,
    /// Of addresses that nodes have themselves.
    class_by_address: BTreeMap<IpAddr, ClassIndex>,
    /// The nodes that have these addresses, if a policy uses such ones.
    having: BTreeMap<IpAddr, Vec<NodeIndex>>,
    /// The nodes that are known by these addresses in the cluster, those that take no part included: such an address is of no
    /// other node, whichever lists it.
    known_by: HashMap<IpAddr, &'a str>,
}

impl<'a> Hosts<'a> {
    pub(super) fn new(inputs: &AssignmentInputs<'a>) -> Self {
        let egress_nodes = EgressNodes::of(inputs.policies.values().map(|policy| &**policy));
        let is_eligible = |(name, node): &(&'a str, &'a Node)| {
            egress_nodes.has(node) && node.ready && node.has_published_networks() && !inputs.unreachable.contains(*name)
        };
        let all = inputs.nodes.iter().map(|(name, node)| (name.as_str(), node.as_ref()));
        let nodes: Vec<_> = all.filter(is_eligible).collect();
        let mut networks = Networks::default();
        for (index, (_, node)) in nodes.iter().enumerate() {
            node.networks().for_each(|network| networks.add(network, index));
        }
        let indices = |is: &dyn Fn(&str, &Node) -> bool| -> BTreeSet<NodeIndex> {
            let found = nodes.iter().enumerate().filter(|(_, (name, node))| is(name, node));
            found.map(|(index, _)| index).collect()
        };
        let drained = indices(&|_, node| node.drained);
        let impaired = indices(&|_, node| node.is_impaired());
        let takes_no_new = indices(&|name, node| node.drained || inputs.absent.contains(name));
        let uses_own = |policy: &EgressPolicy| matches!(policy.eligible_nodes, EligibleNodes::Having { .. });
        let (mut having, mut known_by) = (BTreeMap::<IpAddr, Vec<NodeIndex>>::new(), HashMap::new());
        if inputs.policies.values().any(|policy| uses_own(policy)) {
            for (index, (_, node)) in nodes.iter().enumerate() {
                node.own_addresses().for_each(|own| having.entry(own).or_default().push(index));
            }
            known_by = super::known_by(inputs.nodes);
        }
        let places = nodes.iter().enumerate().map(|(index, (name, _))| (*name, index)).collect();
        Self {
            nodes,
            index_by_name: places,
            takes_no_new,
            drained,
            impaired,
            networks,
            classes: Vec::new(),
            class_by_networks: BTreeMap::new(),
            class_by_names: BTreeMap::new(),
            class_by_address: BTreeMap::new(),
            having,
            known_by,
        }
    }

    pub(super) fn index(&self, name: &str) -> Option<NodeIndex> {
        self.index_by_name.get(name).copied()
    }

    /// Whether this node can carry the address, even if others are preferred.
    pub(super) fn can_host(&self, node: NodeIndex, policy: &EgressPolicy, address: IpAddr) -> bool {
        let is_anothers =
            || matches!(policy.eligible_nodes, EligibleNodes::Having { .. }) && self.is_anothers(node, address);
        policy.eligible_nodes.can_host(self.nodes[node].1, address) && !is_anothers()
    }

    /// Whether another node is known by the address.
    fn is_anothers(&self, node: NodeIndex, address: IpAddr) -> bool {
        self.known_by.get(&address).is_some_and(|known| *known != self.nodes[node].0)
    }

    /// How many nodes have the label.
    pub(super) fn labelled(&self) -> usize {
        self.nodes.iter().filter(|(_, node)| node.assignable).count()
    }

    /// Whether the address is to move to another node if one can take it.
    pub(super) fn is_leaving(&self, node: NodeIndex, address: IpAddr) -> bool {
        self.drained.contains(&node) || !self.can_send(node, address)
    }

    pub(super) fn any_leaving(&self) -> bool {
        !self.drained.is_empty() || !self.impaired.is_empty()
    }

    /// Whether the interface of the address can send, as far as the node's health does not tell.
    fn can_send(&self, node: NodeIndex, address: IpAddr) -> bool {
        !self.impaired.contains(&node) || self.nodes[node].1.impairment(address).is_none()
    }

    /// The class of an address of the policy.
    pub(super) fn class(&mut self, policy: &'a EgressPolicy, address: IpAddr) -> ClassIndex {
        match &policy.eligible_nodes {
            EligibleNodes::One(names) => self.class_of_named(names.as_ref()),
            EligibleNodes::Having { .. } => self.class_of_own(address),
            eligible => self.class_by_network(eligible, address),
        }
    }

    fn class_of_own(&mut self, address: IpAddr) -> ClassIndex {
        if let Some(class) = self.class_by_address.get(&address) {
            return *class;
        }
        let mut nodes = self.having.get(&address).cloned().unwrap_or_default();
        nodes.retain(|node| !self.is_anothers(*node, address));
        nodes.retain(|node| !self.takes_no_new.contains(node) && self.can_send(*node, address));
        nodes.dedup();
        self.classes.push(AddressClass { nodes });
        let class = self.classes.len() - 1;
        self.class_by_address.insert(address, class);
        class
    }

    fn class_of_named(&mut self, names: Option<&'a BTreeSet<String>>) -> ClassIndex {
        if let Some(class) = self.class_by_names.get(&names) {
            return *class;
        }
        let is_named = |name: &str| names.is_none_or(|names| names.contains(name));
        let all = self.nodes.iter().enumerate().filter(|(_, (name, _))| is_named(name)).map(|(index, _)| index);
        let nodes = all.filter(|node| !self.takes_no_new.contains(node)).collect();
        self.classes.push(AddressClass { nodes });
        let class = self.classes.len() - 1;
        self.class_by_names.insert(names, class);
        class
    }

    fn class_by_network(&mut self, eligible: &'a EligibleNodes, address: IpAddr) -> ClassIndex {
        let selected = match eligible {
            EligibleNodes::Selected(selected) => Some(&**selected),
            EligibleNodes::Labelled | EligibleNodes::One(_) | EligibleNodes::Having { .. } => None,
        };
        let networks = self.networks.containing(address);
        let mut nodes = self.networks.nodes(&networks);
        let key = (selected, networks);
        if let Some(class) = self.class_by_networks.get(&key) {
            return *class;
        }
        nodes.retain(|node| eligible.can_host(self.nodes[*node].1, address));
        let is_other = |node: &NodeIndex| self.nodes[*node].1.other_interface(address).is_some();
        if nodes.iter().any(is_other) {
            nodes.retain(is_other);
        }
        nodes.retain(|node| !self.takes_no_new.contains(node) && self.can_send(*node, address));
        self.classes.push(AddressClass { nodes: nodes.into_iter().collect() });
        let class = self.classes.len() - 1;
        self.class_by_networks.insert(key, class);
        class
    }
}

/// Networks with their nodes.
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

    fn containing(&self, address: IpAddr) -> Vec<IpNet> {
        let lengths = if address.is_ipv4() { &self.v4 } else { &self.v6 };
        let prefixes = lengths.iter().filter_map(|length| IpNet::new(address, *length).ok());
        prefixes.map(|prefix| prefix.trunc()).filter(|prefix| self.nodes.contains_key(prefix)).collect()
    }

    fn nodes(&self, networks: &[IpNet]) -> BTreeSet<NodeIndex> {
        networks.iter().filter_map(|network| self.nodes.get(network)).flatten().copied().collect()
    }
}
