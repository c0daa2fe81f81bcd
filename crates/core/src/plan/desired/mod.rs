//! The desired state of the maps of this node, for a view of the cluster.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use crate::model::selector::Selector;
use egress_common::abi::MAX_SLOTS;
use ipnet::IpNet;

use crate::model::exposed;
use crate::model::node::Node;
use crate::model::policy::{
    AddressUse, EgressPolicy, PolicyKey, PolicyPart, PolicyRule, listed_family, parse_egress_ip,
};
use crate::model::settings::{NodeSettings, OnUnassigned, UnknownPods};
use crate::model::state::{
    AddressByPolicy, EgressId, Family, KernelState, NOT_NUMBERED, NodeAddress, OnUnknownPod, Place, PodOwner, PodState,
    Policy, Prefix, PrefixKind, SharedWith, Slot, WhenEmpty, family_of,
};
use crate::model::view::ClusterView;
use crate::plan::capacity::{MOST_EGRESS_IPS, ServiceRoom};
use crate::selection::pod_addresses::Refusal;
use crate::selection::{Selection, by_rank};

/// Computes the desired state. `None` while this node's own Node object is unknown: without its addresses, traffic to
/// the node itself would count as outside traffic.
pub fn desired(view: &ClusterView, settings: &NodeSettings) -> Option<Desired> {
    let own = view.nodes.get(&settings.node_name)?;
    // Other nodes know this node by this address, so it counts only once it is published.
    if own.primary.is_empty() {
        return None;
    }
    let mut selection = Selection::new(view, own, &settings.service_cidrs);
    let nodes = node_addresses(view, settings);
    let (egress_ips, beyond) = egress_ips(view, &nodes, MOST_EGRESS_IPS);
    let mut cluster = prefixes(view, settings, egress_ips);
    let mut room = ServiceRoom::default();
    room.follow(&view.services, &nodes, &mut cluster);
    let (entries, owned, shared) = entries(view, (settings, own), &selection, &nodes);
    let on_unknown_pod = Some(on_unknown_pod(view, settings, own, &mut selection));
    let (pods, owners, exposed, classes, handovers) = Default::default();
    let mut state = KernelState {
        pods,
        owners,
        exposed,
        classes,
        policy: entries,
        owned,
        shared,
        handovers,
        cluster,
        nodes,
        on_unknown_pod,
    };
    put_service_ports(view, &mut state);
    let mut refused = Refusals::new();
    let claimed = view.pods.values().flat_map(|pod| selection.network().claimed_by(pod));
    let addresses: BTreeSet<IpAddr> = claimed.chain(view.departed.iter().copied()).collect();
    for address in addresses {
        put_pod(view, &mut selection, &mut state, &mut refused, address);
    }
    Some(Desired { state, selection, refused, room, beyond })
}

/// The desired state, the selection that it follows from, refused claims of pods, admitted addresses of Services, and
/// the number of egress IPs without an entry, by policy.
pub struct Desired {
    pub state: KernelState,
    pub selection: Selection,
    pub refused: Refusals,
    pub room: ServiceRoom,
    pub beyond: BTreeMap<PolicyKey, usize>,
}

/// By the refused address.
pub type Refusals = BTreeMap<IpAddr, Vec<Refusal>>;

/// Brings the entry of one pod address up to the view.
pub(super) fn put_pod(
    view: &ClusterView,
    selection: &mut Selection,
    state: &mut KernelState,
    refused: &mut Refusals,
    address: IpAddr,
) {
    let (holder, refusals) = selection.network().judge(view, (&state.nodes, &state.cluster), address);
    match refusals.is_empty() {
        true => drop(refused.remove(&address)),
        false => drop(refused.insert(address, refusals)),
    }
    state.exposed.remove(&address);
    let ports = holder.map(|(key, pod)| exposed::ports(view, key, pod)).unwrap_or_default();
    match holder
        .and_then(|holder| Some((selection.pod_state(view, holder, family_of(address))?, PodOwner::of(&holder.1.uid))))
    {
        Some(((pod, policies), owner)) => {
            state.pods.insert(address, pod);
            if let (PodState::ByDestination(class), Some(policies)) = (pod, policies) {
                state.classes.insert(class, policies);
            }
            state.owners.insert(address, owner);
            state.exposed.extend((!ports.is_empty()).then_some((address, ports)));
        }
        None if view.departed.contains(&address) => {
            state.pods.insert(address, PodState::Selected(NOT_NUMBERED));
            state.owners.remove(&address);
        }
        None => {
            state.pods.remove(&address);
            state.owners.remove(&address);
        }
    }
}

/// Brings the ports of Services at shared addresses up to the view: addresses of this node, and those that it hands over
/// or takes over. Returns the changed addresses.
pub fn put_service_ports(view: &ClusterView, state: &mut KernelState) -> BTreeSet<IpAddr> {
    let of_service = |with: SharedWith| with == SharedWith::Service;
    let owned =
        state.shared.iter().filter(|(_, with)| of_service(**with)).filter_map(|(id, _)| state.owned.get(id).copied());
    let moving = state.handovers.values().filter(|handover| handover.shared_with.is_some_and(of_service));
    let moving = moving.map(|handover| handover.address);
    let shared: BTreeSet<IpAddr> = owned.chain(moving).collect();
    let mut put = |address: &IpAddr| {
        let ports = view.services.ports_at(*address);
        match ports.is_empty() {
            true => state.exposed.remove(address).is_some(),
            false => state.exposed.insert(*address, ports.clone()) != Some(ports),
        }
    };
    shared.into_iter().filter(|address| put(address)).collect()
}

/// The treatment of unknown pods. If the CNI announces addresses before a pod starts, no pod sends from an unknown one.
/// Otherwise every pod does until the kubelet reports its address, which matters only while a selected pod may be among
/// them. Without an agent the programs let none pass, unless no policy selects anything.
pub(super) fn on_unknown_pod(
    view: &ClusterView,
    settings: &NodeSettings,
    own: &Node,
    selection: &mut Selection,
) -> OnUnknownPod {
    match settings.unknown_pods {
        UnknownPods::Drop => OnUnknownPod::Drop,
        UnknownPods::Pass => OnUnknownPod::Pass,
        UnknownPods::Auto if own.announces_pods || selection.awaits_addresses(view) => OnUnknownPod::Drop,
        UnknownPods::Auto if could_select(view) => OnUnknownPod::PassWhileFollowed,
        UnknownPods::Auto => OnUnknownPod::Pass,
    }
}

/// Whether a policy could select a pod that starts here now: one that selects a namespace can, since pods are
/// scheduled anywhere, and so can one with unreadable selectors.
fn could_select(view: &ClusterView) -> bool {
    let selects_one = |namespaces: &Selector| view.namespaces.values().any(|labels| namespaces.matches(labels));
    let selects_any =
        |rules: &Vec<PolicyRule>| rules.iter().flat_map(|rule| &rule.selects).any(|one| selects_one(&one.namespaces));
    view.policies.values().any(|policy| policy.rules.as_ref().is_none_or(selects_any))
}

type Entries = BTreeMap<(EgressId, Family), Policy>;

/// Entries of all egress policies of the cluster, the addresses that this node owns, and which are shared. An item is served unless an older one
/// contradicts it: of two policies with one address the older has it, and a node holds one address of a policy. The
/// controller writes no contradictions; a status by a foreign writer must not make nodes disagree.
fn entries(
    view: &ClusterView,
    (settings, own): (&NodeSettings, &Node),
    selection: &Selection,
    nodes_own: &BTreeMap<IpAddr, NodeAddress>,
) -> (Entries, AddressByPolicy, BTreeMap<EgressId, SharedWith>) {
    let (mut entries, mut owned, mut shared) = (Entries::new(), AddressByPolicy::new(), BTreeMap::new());
    let mut claimed: BTreeMap<IpAddr, Option<EgressId>> = BTreeMap::new();
    let mut node_of: BTreeMap<IpAddr, &str> = BTreeMap::new();
    for policy in by_rank(view.policies.values()) {
        let listed = policy.addresses();
        let is_of_host = policy.address_use == AddressUse::OfHost;
        // A node that owned its own address as others would drop its own traffic. One that does not have an address that it
        // should have would send with an address of another host.
        let is_right = |address: &IpAddr, node: &str| match is_of_host {
            true => node != settings.node_name || own.has(*address),
            false => !nodes_own.contains_key(address),
        };
        let mut items: Vec<(IpAddr, &str)> = policy
            .published
            .items
            .iter()
            .filter_map(|item| parse_egress_ip(&item.egress_ip).map(|address| (address, item.node.as_str())))
            // An address that the policy does not list is not served, whatever the status contains.
            .filter(|(address, node)| is_right(address, node) && listed.contains(address))
            .collect();
        items.sort_unstable();
        let mut nodes = BTreeSet::new();
        let ids = selection.ids(policy.key());
        items.retain(|(address, node)| {
            let id = ids.of(family_of(*address));
            let is_free = !claimed.contains_key(address) && nodes.insert((*node, id));
            is_free && claimed.insert(*address, id).is_none()
        });

        node_of.extend(items.iter().copied());
        let mut slots: Vec<Slot> = Vec::with_capacity(items.len());
        for (address, node) in items {
            let Some(id) = ids.of(family_of(address)) else { continue };
            if node == settings.node_name {
                owned.insert(id, address);
                shared.extend(policy.address_use.shared_with().map(|with| (id, with)));
                slots.push(Slot { address, place: Place::Here });
            } else if let Some(endpoint) = view.nodes.get(node).and_then(|node| node.endpoint()) {
                slots.push(Slot { address, place: Place::Remote(endpoint) });
            }
        }
        let is_served = |address: &IpAddr| slots.iter().any(|slot| slot.address == *address);
        let is_pending = |address: &&IpAddr| !is_served(address) && (is_of_host || !nodes_own.contains_key(*address));
        let pending: Vec<IpAddr> = listed.iter().filter(is_pending).copied().collect();
        for family in [Family::V4, Family::V6] {
            let Some(id) = ids.of(family) else { continue };
            let slots = slots.iter().filter(|slot| family_of(slot.address) == family).take(MAX_SLOTS).copied();
            let slots: Vec<Slot> = slots.collect();
            let pending = pending.iter().filter(|address| family_of(**address) == family);
            let pending: Vec<IpAddr> = pending.take(MAX_SLOTS - slots.len()).copied().collect();
            let when_empty = when_empty(policy, family, settings);
            let entry = Policy { limit: policy.limit, ..Policy::new(slots, pending, when_empty) };
            entries.insert((id, family), entry);
        }
    }
    // An address that another policy has by now is not pending.
    for ((id, _), entry) in &mut entries {
        entry.pending.retain(|address| claimed.get(address).is_none_or(|holder| *holder == Some(*id)));
        let served = entry.slots.iter().map(|slot| (slot.address, node_of.get(&slot.address).copied()));
        let waiting = entry.pending.iter().map(|address| (*address, None));
        entry.destinations = destinations::of_policy(view, served.chain(waiting));
    }
    (entries, owned, shared)
}

fn when_empty(policy: &EgressPolicy, family: Family, settings: &NodeSettings) -> WhenEmpty {
    if policy.has_no_gateway() {
        return WhenEmpty::Drop;
    }
    if !policy.is_unknown(PolicyPart::Addresses) && !policy.listed.iter().any(|text| listed_family(text) == family) {
        return WhenEmpty::NotListed;
    }
    let exception_is_on = settings.on_unassigned == OnUnassigned::NodeAddress && !policy.drop_unassigned;
    // The published judgement applies to the addresses that it was made for.
    let published = policy.published.no_eligible_node.as_ref().is_some_and(|judged| *judged == policy.addresses());
    if exception_is_on && published { WhenEmpty::NodeAddress } else { WhenEmpty::Drop }
}

fn node_addresses(view: &ClusterView, settings: &NodeSettings) -> BTreeMap<IpAddr, NodeAddress> {
    let mut addresses = BTreeMap::new();
    let endpoints: BTreeSet<IpAddr> = view.nodes.values().filter_map(|node| node.endpoint()).map(|at| at.0).collect();
    for (name, node) in &view.nodes {
        let Some(endpoint) = node.endpoint() else { continue };
        let own = *name == settings.node_name;
        // Packets to another node's management address are pod network traffic: its subnet's prefix leaves them alone.
        let management = if own { Vec::new() } else { node.management() };
        for address in node.addresses().into_iter().filter(|a| !management.contains(a)) {
            // A tunnel endpoint belongs to its node, even if another node lists it: a kubelet can write any address onto its
            // own Node.
            if !own && address != endpoint.0 && endpoints.contains(&address) {
                continue;
            }
            let entry = NodeAddress { own, node: endpoint };
            // If two nodes list one address, this node's own knowledge of itself wins, then the first by name.
            let known = addresses.entry(address).or_insert(entry);
            if own {
                *known = entry;
            }
        }
    }
    addresses
}

/// Later insertions replace earlier ones with the same prefix, from general to certain.
fn prefixes(
    view: &ClusterView,
    settings: &NodeSettings,
    egress_ips: BTreeMap<IpAddr, PrefixKind>,
) -> BTreeMap<IpNet, Prefix> {
    let of_egress = |(address, kind): (IpAddr, _)| (IpNet::from(address), Prefix { kind, node: None });
    let mut cluster: BTreeMap<IpNet, Prefix> = egress_ips.into_iter().map(of_egress).collect();
    let mut put = |prefixes: &[IpNet], kind, node| {
        cluster.extend(prefixes.iter().map(|prefix| (prefix.trunc(), Prefix { kind, node })));
    };
    for (nets, kind) in settings.prefixes() {
        put(nets, kind, None);
    }
    for node in view.nodes.values() {
        put(&node.pod_subnets, PrefixKind::PodSubnet, node.endpoint());
    }
    cluster
}

/// The cluster's egress IPs: the assigned ones, up to `most` of the oldest policies, and the number of the others by
/// policy. Listed addresses without a node are outside addresses. A node's own address is no egress IP, and neither is
/// one that the policy does not list. One that is shared with a Service counts as the Service's: its clients are
/// answered with it, by any node, and pods reach the Service by it.
fn egress_ips(
    view: &ClusterView,
    nodes: &BTreeMap<IpAddr, NodeAddress>,
    most: usize,
) -> (BTreeMap<IpAddr, PrefixKind>, BTreeMap<PolicyKey, usize>) {
    let (mut addresses, mut beyond) = (BTreeMap::new(), BTreeMap::new());
    for policy in by_rank(view.policies.values()) {
        let kind = match policy.address_use {
            AddressUse::OfService => PrefixKind::Service,
            AddressUse::EgressOnly => PrefixKind::EgressIp,
            // The entries of nodes have them.
            AddressUse::OfHost => continue,
        };
        let listed = policy.addresses();
        let items = policy.published.items.iter().filter_map(|item| parse_egress_ip(&item.egress_ip));
        for address in items.filter(|address| listed.contains(address) && !nodes.contains_key(address)) {
            if addresses.len() < most {
                addresses.entry(address).or_insert(kind);
            } else if !addresses.contains_key(&address) {
                *beyond.entry(policy.key().clone()).or_default() += 1;
            }
        }
    }
    (addresses, beyond)
}

mod destinations;
#[cfg(test)]
mod tests;
