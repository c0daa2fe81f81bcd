//! Routing tables of EgressServices (`spec.network`): what follows which table on this node. Pure.
//!
//! - What leaves with an address of the policy, by the node that hosts it.
//! - Answers to clients of the Service's load balancer, on every node: connections may arrive at any.
//! - With `sourceIPBy: Network`, what pods of this node send.
//!
//! All of it to destinations outside the cluster. An address or a pod follows one table, that of the oldest policy. What
//! has no room is dropped: a rule of routing is looked at for every packet of the host, and users decide how many
//! EgressServices there are.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;

use crate::model::policy::{AddressUse, PolicyKey, Selects, parse_egress_ip};
use crate::model::state::{KernelState, PodOwner, PrefixKind};
use crate::model::view::{ClusterView, Pod, PodKey};
use crate::selection::by_rank;
use crate::selection::pod_addresses::PodAddressSpace;

/// Most tables that a node routes by, and most addresses of load balancers that follow them.
pub const MOST_TABLES: usize = 64;
pub const MOST_ADDRESSES: usize = 256;

/// The tables in use, by number or name.
pub type RoutingTables = BTreeMap<String, NetworkUse>;

/// What follows a table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NetworkUse {
    /// Addresses of load balancers.
    pub addresses: BTreeSet<IpAddr>,
    /// Addresses of pods of this node.
    pub pods: BTreeSet<IpAddr>,
}

impl NetworkUse {
    pub fn extend(&mut self, other: &Self) {
        self.addresses.extend(&other.addresses);
        self.pods.extend(&other.pods);
    }
}

/// What this node routes by tables of its own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RoutedNetworks {
    pub tables: RoutingTables,
    /// What is dropped, since there are [`MOST_TABLES`] or [`MOST_ADDRESSES`] without it.
    pub dropped: NetworkUse,
    /// The policies that it is of.
    pub left_out: BTreeSet<PolicyKey>,
    /// The destinations that follow no table, disjoint. Empty without tables.
    pub cluster: Vec<IpNet>,
}

/// The tables of the view, for a desired state that follows from the same view.
pub fn networks(view: &ClusterView, space: &PodAddressSpace, desired: &KernelState) -> RoutedNetworks {
    let mut routed = RoutedNetworks::default();
    let (mut addresses, mut pods, mut followed) = (BTreeSet::new(), BTreeSet::new(), 0);
    for policy in by_rank(view.policies.values().filter(|policy| policy.address_use == AddressUse::OfService)) {
        let Some(network) = &policy.network else {
            // Its addresses follow no table, whichever younger policies have them too.
            addresses.extend(policy.listed.iter().filter_map(|text| parse_egress_ip(text)));
            continue;
        };
        let mut used = NetworkUse::default();
        used.addresses.extend(network.addresses.iter().filter(|address| addresses.insert(**address)));
        for pod in network.pods.iter().flat_map(|selects| selected(view, selects)) {
            let owner = PodOwner::of(&pod.uid);
            let own = space.claimed_by(pod).filter(|address| desired.owners.get(address) == Some(&owner));
            used.pods.extend(own.filter(|address| pods.insert(*address)));
        }
        let has_table = routed.tables.contains_key(&network.table) || routed.tables.len() < MOST_TABLES;
        match has_table && followed + used.addresses.len() <= MOST_ADDRESSES {
            true => {
                followed += used.addresses.len();
                routed.tables.entry(network.table.clone()).or_default().extend(&used);
            }
            false => {
                routed.left_out.insert(policy.key().clone());
                routed.dropped.extend(&used);
            }
        }
    }
    if !routed.tables.is_empty() {
        routed.cluster = cluster(desired);
    }
    routed
}

fn selected<'a>(view: &'a ClusterView, selects: &'a Selects) -> impl Iterator<Item = &'a Pod> {
    let is_selected = |(key, pod): &(&PodKey, &Pod)| {
        let namespace = view.namespaces.get(&key.namespace);
        namespace.is_some_and(|labels| selects.namespaces.matches(labels)) && selects.pods.matches(&pod.labels)
    };
    view.pods.iter().filter(is_selected).map(|(_, pod)| pod)
}

/// Without single addresses of Services, which are translated before, and of policies. They change often.
fn cluster(desired: &KernelState) -> Vec<IpNet> {
    let is_single = |net: &IpNet| net.prefix_len() == net.max_prefix_len();
    let changes = |kind| matches!(kind, PrefixKind::Service | PrefixKind::EgressIp);
    let lasting = desired.cluster.iter().filter(|(net, prefix)| !(is_single(net) && changes(prefix.kind)));
    let nodes = desired.nodes.keys().map(|address| IpNet::from(*address));
    IpNet::aggregate(&lasting.map(|(net, _)| *net).chain(nodes).collect())
}
