//! What the maps of this node should hold, for a view of the cluster.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use egress_common::abi::MAX_SLOTS;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use kube::core::{Selector, SelectorExt};

use super::selection::{Selection, by_rank};
use super::state::{
    EgressId, Family, KernelState, NodeAddress, OnUnknownPod, Place, Policy, Prefix, PrefixKind, Slot, WhenEmpty,
};
use super::view::{ClusterView, EgressObject, Node, Part, parse_egress_ip};

/// What happens to packets of pods that this node does not know (yet).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnknownPods {
    /// Drop where the CNI announces addresses before the pod starts; elsewhere pass while no object could select a pod
    /// here.
    Auto,
    Drop,
    Pass,
}

/// What happens where the controller has published that no node can host any address of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnUnassigned {
    NodeAddress,
    Drop,
}

/// What the model is told by flags.
#[derive(Clone, Debug)]
pub struct Settings {
    pub node_name: String,
    pub cluster_subnets: Vec<IpNet>,
    pub service_cidrs: Vec<IpNet>,
    pub excluded_cidrs: Vec<IpNet>,
    pub unknown_pods: UnknownPods,
    pub on_unassigned: OnUnassigned,
}

/// The whole desired state. `None` while this node's own Node object is not known: without its addresses, traffic to
/// the node itself would be taken for traffic to the world.
pub fn desired(view: &ClusterView, settings: &Settings, selection: &mut Selection) -> Option<KernelState> {
    let own = view.nodes.get(&settings.node_name)?;
    // The address that others know this node by must not change under them: it counts from when it is published.
    if own.primary.is_empty() {
        return None;
    }
    let addresses: BTreeSet<IpAddr> = view.pods.values().flat_map(|pod| pod.addresses.iter().copied()).collect();
    let pods: BTreeMap<_, _> =
        addresses.into_iter().filter_map(|a| selection.pod_state(view, a).map(|state| (a, state))).collect();
    let owners = pods.keys().filter_map(|a| Selection::pod_owner(view, *a).map(|owner| (*a, owner))).collect();
    let nodes = node_addresses(view, settings);
    let mut cluster = prefixes(view, settings, &nodes);
    view.services.all().for_each(|address| put_service(view, settings, &nodes, &mut cluster, address));
    let (policy, owned) = policies(view, settings, selection, &nodes);
    let on_unknown_pod = Some(on_unknown_pod(view, settings, own));
    let moving = BTreeMap::new();
    Some(KernelState { pods, owners, policy, owned, moving, cluster, nodes, on_unknown_pod })
}

fn on_unknown_pod(view: &ClusterView, settings: &Settings, own: &Node) -> OnUnknownPod {
    match settings.unknown_pods {
        UnknownPods::Drop => OnUnknownPod::Drop,
        UnknownPods::Pass => OnUnknownPod::Pass,
        UnknownPods::Auto if own.announces_pods || could_select(view) => OnUnknownPod::Drop,
        UnknownPods::Auto => OnUnknownPod::Pass,
    }
}

/// Could an object select a pod that begins here now? One that selects a namespace could: pods go anywhere. So could one
/// whose selectors nobody can read.
fn could_select(view: &ClusterView) -> bool {
    let selects_one = |namespaces: &Selector| view.namespaces.values().any(|labels| namespaces.matches(labels));
    view.objects.values().any(|object| object.selects.as_ref().is_none_or(|selects| selects_one(&selects.namespaces)))
}

type Policies = BTreeMap<(EgressId, Family), Policy>;
type Owned = BTreeMap<EgressId, IpAddr>;

/// Policies of all objects of the cluster and what this node owns. An item is served when nothing older contradicts
/// it: of two objects with one address the older has it, and a node holds one address of an object. The controller
/// writes no such status; a stranger's must not make nodes disagree.
fn policies(
    view: &ClusterView,
    settings: &Settings,
    selection: &Selection,
    nodes_own: &BTreeMap<IpAddr, NodeAddress>,
) -> (Policies, Owned) {
    let (mut policies, mut owned) = (Policies::new(), Owned::new());
    let mut claimed: BTreeMap<IpAddr, Option<EgressId>> = BTreeMap::new();
    for object in by_rank(view.objects.values()) {
        let listed = object.addresses();
        let mut items: Vec<(IpAddr, &str)> = object
            .items
            .iter()
            .filter_map(|item| parse_egress_ip(&item.egress_ip).map(|address| (address, item.node.as_str())))
            // A node that owned its own address would drop all that is for itself. What the object does not list (any
            // more) is not its address, whatever the status says.
            .filter(|(address, _)| !nodes_own.contains_key(address) && listed.contains(address))
            .collect();
        items.sort_unstable();
        let mut nodes = BTreeSet::new();
        let id = selection.id(&object.name);
        items.retain(|(address, node)| {
            let is_free = !claimed.contains_key(address) && nodes.insert(*node);
            is_free && claimed.insert(*address, id).is_none()
        });
        let Some(id) = id else { continue };

        let mut slots: Vec<Slot> = Vec::with_capacity(items.len());
        for (address, node) in items {
            if node == settings.node_name {
                owned.insert(id, address);
                slots.push(Slot { address, place: Place::Here });
            } else if let Some(endpoint) = view.nodes.get(node).and_then(|node| node.endpoint()) {
                slots.push(Slot { address, place: Place::Remote(endpoint) });
            }
        }
        let is_served = |address: &IpAddr| slots.iter().any(|slot| slot.address == *address);
        let is_pending = |address: &&IpAddr| !is_served(address) && !nodes_own.contains_key(*address);
        let pending: Vec<IpAddr> = listed.iter().filter(is_pending).copied().collect();
        for family in [Family::V4, Family::V6] {
            let slots = slots.iter().filter(|slot| family_of(slot.address) == family).take(MAX_SLOTS).copied();
            let slots: Vec<Slot> = slots.collect();
            let pending = pending.iter().filter(|address| family_of(**address) == family);
            let pending = pending.take(MAX_SLOTS - slots.len()).copied().collect();
            let when_empty = when_empty(object, family, settings);
            policies.insert((id, family), Policy { slots, pending, when_empty });
        }
    }
    // What another object has by now is not waited for.
    for ((id, _), policy) in &mut policies {
        policy.pending.retain(|address| claimed.get(address).is_none_or(|holder| *holder == Some(*id)));
    }
    (policies, owned)
}

fn when_empty(object: &EgressObject, family: Family, settings: &Settings) -> WhenEmpty {
    if !object.is_unknown(Part::Addresses) && !object.listed.iter().any(|text| listed_family(text) == family) {
        return WhenEmpty::NotListed;
    }
    let exception_is_on = settings.on_unassigned == OnUnassigned::NodeAddress && !object.drop_unassigned;
    // What was published holds for the addresses that it was judged for.
    let published = object.no_eligible_node.as_ref().is_some_and(|judged| *judged == object.addresses());
    if exception_is_on && published { WhenEmpty::NodeAddress } else { WhenEmpty::Drop }
}

/// The family that an entry means, also where it cannot be read: a typing error must not turn a drop into a leak.
fn listed_family(text: &str) -> Family {
    match parse_egress_ip(text) {
        Some(address) => family_of(address),
        None if text.contains(':') => Family::V6,
        None => Family::V4,
    }
}

pub(crate) fn family_of(address: IpAddr) -> Family {
    if address.is_ipv4() { Family::V4 } else { Family::V6 }
}

fn node_addresses(view: &ClusterView, settings: &Settings) -> BTreeMap<IpAddr, NodeAddress> {
    let mut addresses = BTreeMap::new();
    for (name, node) in &view.nodes {
        let Some(endpoint) = node.endpoint() else { continue };
        let own = *name == settings.node_name;
        // Packets to another node's management address are pod network traffic: left alone by its subnet's prefix.
        let management = if own { Vec::new() } else { node.management() };
        for address in node.addresses().into_iter().filter(|a| !management.contains(a)) {
            let entry = NodeAddress { own, node: endpoint };
            // Where two nodes claim one address, our own knowledge of ourselves wins, then the first by name.
            let known = addresses.entry(address).or_insert(entry);
            if own {
                *known = entry;
            }
        }
    }
    addresses
}

/// Later insertions win over earlier ones with the same prefix: from what is general to what is certain.
fn prefixes(view: &ClusterView, settings: &Settings, nodes: &BTreeMap<IpAddr, NodeAddress>) -> BTreeMap<IpNet, Prefix> {
    let mut cluster = BTreeMap::new();
    let mut put = |prefixes: &[IpNet], kind, node| {
        cluster.extend(prefixes.iter().map(|prefix| (prefix.trunc(), Prefix { kind, node })));
    };
    put(&egress_ips(view, nodes), PrefixKind::EgressIp, None);
    put(&settings.excluded_cidrs, PrefixKind::Excluded, None);
    put(&MULTICAST, PrefixKind::Multicast, None);
    put(&LINK_LOCAL, PrefixKind::LinkLocal, None);
    put(&JOIN, PrefixKind::Join, None);
    put(&settings.service_cidrs, PrefixKind::Service, None);
    put(&settings.cluster_subnets, PrefixKind::PodNetwork, None);
    for node in view.nodes.values() {
        put(&node.pod_subnets, PrefixKind::PodSubnet, node.endpoint());
    }
    cluster
}

/// Brings the entry of one service address up to the view. Other knowledge of an address wins: a node's address, an
/// egress IP, one in a prefix that is the cluster's anyway. (An entry of its own would hide whose pod it is.)
pub(super) fn put_service(
    view: &ClusterView,
    settings: &Settings,
    nodes: &BTreeMap<IpAddr, NodeAddress>,
    cluster: &mut BTreeMap<IpNet, Prefix>,
    address: IpAddr,
) {
    let host = IpNet::from(address);
    let is_entry = |prefix: &Prefix| prefix.kind == PrefixKind::Service && !settings.service_cidrs.contains(&host);
    if cluster.get(&host).is_some_and(is_entry) {
        cluster.remove(&host);
    }
    let shorter = (0..=host.prefix_len()).filter_map(|len| IpNet::new(address, len).ok());
    let is_clusters = shorter.into_iter().any(|prefix| cluster.contains_key(&prefix.trunc()));
    if view.services.has(address) && !is_clusters && !nodes.contains_key(&address) {
        cluster.insert(host, Prefix { kind: PrefixKind::Service, node: None });
    }
}

/// The cluster's egress IPs: all assigned ones, and listed ones where some node's network could hold them (a typed-in
/// address of the world stays an address of the world). A node's own address is not one.
fn egress_ips(view: &ClusterView, nodes: &BTreeMap<IpAddr, NodeAddress>) -> Vec<IpNet> {
    let networks: BTreeSet<IpNet> = view.nodes.values().flat_map(|n| n.primary.iter().map(IpNet::trunc)).collect();
    let mut addresses = BTreeSet::new();
    for object in view.objects.values() {
        addresses.extend(object.items.iter().filter_map(|item| parse_egress_ip(&item.egress_ip)));
        addresses.extend(object.addresses().into_iter().filter(|a| networks.iter().any(|n| n.contains(a))));
    }
    addresses.into_iter().filter(|address| !nodes.contains_key(address)).map(IpNet::from).collect()
}

const fn v4(a: u8, b: u8, len: u8) -> IpNet {
    IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::new(a, b, 0, 0), len))
}

const fn v6(first: u16, len: u8) -> IpNet {
    IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::new(first, 0, 0, 0, 0, 0, 0, 0), len))
}

/// OVN-Kubernetes' join subnets.
const JOIN: [IpNet; 2] = [v4(100, 64, 16), v6(0xfd98, 64)];
/// What no router forwards (RFC 6890): link-local, "this host", loopback and the limited broadcast.
pub const LINK_LOCAL: [IpNet; 6] = [
    v4(169, 254, 16),
    v4(0, 0, 8),
    v4(127, 0, 8),
    IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::BROADCAST, 32)),
    v6(0xfe80, 10),
    IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::LOCALHOST, 128)),
];
pub const MULTICAST: [IpNet; 2] = [v4(224, 0, 4), v6(0xff00, 8)];

#[cfg(test)]
mod tests;
