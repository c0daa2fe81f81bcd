//! Routing tables of EgressServices (`spec.network`): what follows which table on this node. Pure.
//!
//! - What leaves with an address of the policy, by the node that hosts it.
//! - Answers to clients of the Service's load balancer, on every node: connections may arrive at any.
//! - With `sourceIPBy: Network`, what pods of this node send to destinations outside the cluster.
//!
//! An address or a pod follows one table, that of the oldest policy.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;

use crate::model::policy::Selects;
use crate::model::state::{KernelState, PodOwner};
use crate::model::view::{ClusterView, Pod, PodKey};
use crate::selection::by_rank;
use crate::selection::pod_addresses::PodAddressSpace;

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

/// What this node routes by tables of its own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RoutedNetworks {
    pub tables: RoutingTables,
    /// The destinations that are in the cluster for the programs, disjoint. Empty if no pod follows a table.
    pub cluster: Vec<IpNet>,
}

/// The tables of the view, for a desired state that follows from the same view.
pub fn networks(view: &ClusterView, space: &PodAddressSpace, desired: &KernelState) -> RoutedNetworks {
    let (mut tables, mut addresses, mut pods) = (RoutingTables::new(), BTreeSet::new(), BTreeSet::new());
    for policy in by_rank(view.policies.values().filter(|policy| policy.network.is_some())) {
        let Some(network) = &policy.network else { continue };
        let used = tables.entry(network.table.clone()).or_default();
        used.addresses.extend(network.addresses.iter().filter(|address| addresses.insert(**address)));
        let selecting = network.pods.iter().flat_map(|selects| selected(view, selects));
        for (_, pod) in selecting {
            let owner = PodOwner::of(&pod.uid);
            let own = space.claimed_by(pod).filter(|address| desired.owners.get(address) == Some(&owner));
            used.pods.extend(own.filter(|address| pods.insert(*address)));
        }
    }
    let cluster = if pods.is_empty() { Vec::new() } else { cluster(desired) };
    RoutedNetworks { tables, cluster }
}

fn selected<'a>(view: &'a ClusterView, selects: &'a Selects) -> impl Iterator<Item = (&'a PodKey, &'a Pod)> {
    let is_selected = |(key, pod): &(&PodKey, &Pod)| {
        let namespace = view.namespaces.get(&key.namespace);
        namespace.is_some_and(|labels| selects.namespaces.matches(labels)) && selects.pods.matches(&pod.labels)
    };
    view.pods.iter().filter(is_selected)
}

fn cluster(desired: &KernelState) -> Vec<IpNet> {
    let nodes = desired.nodes.keys().map(|address| IpNet::from(*address));
    IpNet::aggregate(&desired.cluster.keys().copied().chain(nodes).collect())
}
