//! Which node serves which egress IP. Pure. The order of the input does not matter: policies are ranked by age and name,
//! and ties between nodes are broken by a hash of address and node.
//!
//! 1. [`claimants`]: every address belongs to the policy that has it in its status, else to the oldest that lists it.
//! 2. Assigned addresses that are still valid stay where they are.
//! 3. [`hosts`]: which nodes could take each of the others; [`matching`], with [`search`]: as many as possible are
//!    placed, older policies first, as evenly as possible. A node never holds two addresses of one policy.
//!    Where a policy's addresses share one node ([`crate::model::policy::EligibleNodes::One`]), the first stands for all of them.
//! 4. Addresses of drained nodes move to others, as far as these can take them after that.
//! 5. [`object_assignment`]: the status of each entry, and the desired items of the status.

pub mod claimants;
pub mod draining;
pub mod egress_ids;
pub mod hosts;
pub mod matching;
pub mod object_assignment;
#[cfg(test)]
mod properties;
#[cfg(any(test, feature = "testing"))]
pub mod samples;
pub mod search;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use crate::allocation::claimants::{Claimants, ReservedAddresses};
use crate::allocation::hosts::{Hosts, NodeIndex};
use crate::allocation::matching::{Matching, NodeLoad};
pub use crate::allocation::object_assignment::{EntryStatus, HostObstacle, ObjectAssignment};
use egress_common::abi::MAX_SLOTS;

use crate::model::ledger::HandOver;
use crate::model::node::Node;
use crate::model::policy::{AddressUse, EgressPolicy, Item, Policies, PolicyKey, parse_egress_ip};
use crate::model::reserved::{ClusterNetworks, Reservations};
use crate::model::services::Services;
use crate::selection::by_rank;

pub type Nodes = BTreeMap<String, Arc<Node>>;

/// The nodes that are known by these addresses in the cluster. Of several the first by name, as for reserved addresses.
pub(crate) fn known_by(nodes: &Nodes) -> HashMap<IpAddr, &str> {
    let addresses =
        nodes.iter().rev().flat_map(|(name, node)| node.primary.iter().map(|own| (own.addr(), name.as_str())));
    addresses.collect()
}

/// Input of an assignment. The current status is part of the policies.
#[derive(Clone, Copy, Debug)]
pub struct AssignmentInputs<'a> {
    pub policies: &'a Policies,
    pub nodes: &'a Nodes,
    /// Nodes that do not answer.
    pub unreachable: &'a BTreeSet<String>,
    /// Nodes that keep their addresses and get no new ones: their agents are away.
    pub absent: &'a BTreeSet<String>,
    /// The cluster's own networks.
    pub networks: &'a ClusterNetworks,
    /// Services with addresses outside these networks.
    pub services: &'a Services,
    /// Open hand-overs: such an address continues to the new node.
    pub hand_overs: &'a BTreeMap<IpAddr, HandOver>,
}

/// Which node serves which address.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Assignment {
    /// By the policy's name.
    pub policies: BTreeMap<PolicyKey, ObjectAssignment>,
    /// How many nodes could take an address at all.
    pub eligible: usize,
}

impl Assignment {
    /// The policies with their outcomes. Both are in the order of names, so one walk suffices.
    pub fn with_policies<'a>(
        &'a self,
        policies: &'a Policies,
    ) -> impl Iterator<Item = (&'a Arc<EgressPolicy>, &'a ObjectAssignment)> {
        let mut outcomes = self.policies.iter().peekable();
        policies.iter().filter_map(move |(name, policy)| {
            while outcomes.next_if(|(other, _)| *other < name).is_some() {}
            outcomes.next_if(|(other, _)| *other == name).map(|(_, outcome)| (policy, outcome))
        })
    }

    /// The policies whose items differ from the desired ones.
    pub fn changed<'a>(
        &'a self,
        policies: &'a Policies,
    ) -> impl Iterator<Item = (&'a PolicyKey, &'a ObjectAssignment)> {
        let changed = self.with_policies(policies).filter(|(policy, outcome)| policy.published.items != outcome.items);
        changed.map(|(policy, outcome)| (policy.key(), outcome))
    }
}

/// A policy with its parsed addresses, by rank.
struct Claim<'a> {
    policy: &'a EgressPolicy,
    /// Its entries: canonical if valid, unique.
    entries: Vec<(String, Option<IpAddr>)>,
    /// The addresses among them that it may have, sorted.
    addresses: Vec<IpAddr>,
    /// The valid items of its status, sorted.
    items: Vec<(IpAddr, &'a str)>,
}

impl<'a> Claim<'a> {
    fn of(policy: &'a EgressPolicy) -> Self {
        let mut entries = Vec::with_capacity(policy.listed.len());
        for text in &policy.listed {
            let address = parse_egress_ip(text);
            entries.push((address.map_or_else(|| text.clone(), |address| address.to_string()), address));
        }
        if entries.len() > 1 {
            let mut seen = BTreeSet::new();
            let first: Vec<bool> = entries.iter().map(|(entry, _)| seen.insert(entry.as_str())).collect();
            let mut first = first.into_iter();
            entries.retain(|_| first.next() == Some(true));
        }
        let mut addresses: Vec<IpAddr> = entries.iter().filter_map(|(_, address)| *address).collect();
        let readable = |item: &'a Item| Some((parse_egress_ip(&item.egress_ip)?, item.node.as_str()));
        let mut items: Vec<_> = policy.published.items.iter().filter_map(readable).collect();
        items.sort_unstable();
        if addresses.len() > MAX_SLOTS {
            drop_surplus(&mut addresses, &items);
        }
        addresses.sort_unstable();
        Self { policy, entries, addresses, items }
    }

    fn lists(&self, address: &IpAddr) -> bool {
        self.addresses.binary_search(address).is_ok()
    }

    /// Whether all its addresses share one node.
    fn is_one(&self) -> bool {
        self.policy.eligible_nodes.is_one()
    }
}

/// Keeps as many addresses of each family as programs can choose from: those in the status, then in the order of the
/// spec.
fn drop_surplus(addresses: &mut Vec<IpAddr>, items: &[(IpAddr, &str)]) {
    addresses.sort_by_key(|address| !items.iter().any(|(assigned, _)| assigned == address));
    let (mut v4, mut v6) = (0, 0);
    addresses.retain(|address| {
        let count = if address.is_ipv4() { &mut v4 } else { &mut v6 };
        *count += 1;
        *count <= MAX_SLOTS
    });
}

pub fn assign(inputs: &AssignmentInputs<'_>) -> Assignment {
    let ranked = by_rank(inputs.policies.values());
    let mut claims: Vec<Claim<'_>> = ranked.into_iter().map(|policy| Claim::of(policy)).collect();
    let mut hosts = Hosts::new(inputs);
    let reserved = reservations(inputs, &claims);
    loop {
        let claimants = Claimants::new(&reserved, &claims, &hosts);
        let kept = |(rank, claim)| kept((rank, claim), inputs.hand_overs, &hosts, &claimants);
        let mut places: Vec<Placement> = claims.iter().enumerate().map(kept).collect();
        place_others(inputs, &claims, (&mut hosts, &claimants), &mut places);
        if hosts.any_leaving() {
            move_off(inputs, &claims, (&mut hosts, &claimants), &mut places);
        }
        if release_unplaced(&mut claims, &claimants, &places) {
            continue;
        }
        let outcomes = object_assignment::object_assignments(inputs, claims, &mut hosts, &claimants, &places);
        return Assignment { policies: outcomes, eligible: hosts.labelled() };
    }
}

/// Services take no address from a policy that has it, and their authors (`spec.externalIPs`) take none from any
/// policy: otherwise a policy would lose its address whenever it has no node for a moment. Only addresses that the
/// cluster assigned to Services are reserved.
fn reservations(inputs: &AssignmentInputs<'_>, claims: &[Claim<'_>]) -> ReservedAddresses {
    let mut services: BTreeSet<IpAddr> = inputs.services.given().collect();
    if !services.is_empty() {
        let shown: BTreeSet<IpAddr> =
            claims.iter().flat_map(|claim| &claim.items).map(|(address, _)| *address).collect();
        let shares = |claim: &&Claim<'_>| claim.policy.address_use == AddressUse::OfService;
        let shared: BTreeSet<IpAddr> = claims.iter().filter(shares).flat_map(|claim| claim.addresses.clone()).collect();
        services.retain(|address| !shown.contains(address) && !shared.contains(address));
    }
    let nodes = inputs.nodes.iter().map(|(name, node)| (name.as_str(), node.as_ref()));
    let reserved = Reservations::new(nodes, inputs.networks, services, None);
    let uses_them = claims.iter().any(|claim| claim.policy.address_use == AddressUse::OfHost);
    let of_nodes = inputs.nodes.values().filter(|_| uses_them).flat_map(|node| node.own_addresses()).collect();
    ReservedAddresses { reserved, of_nodes }
}

/// An address that a policy's status shows and that could not be placed is free for others, as it will be once the
/// status is written. Returns false if there is none, or no other policy wants it.
fn release_unplaced(claims: &mut [Claim<'_>], claimants: &Claimants<'_>, places: &[Placement]) -> bool {
    let mut released = BTreeSet::new();
    for (rank, claim) in claims.iter_mut().enumerate() {
        let is_unplaced =
            |address: &IpAddr| claimants.policy_of(*address) == Some(rank) && !places[rank].contains_key(address);
        released.extend(claim.items.iter().map(|(address, _)| *address).filter(is_unplaced));
        claim.items.retain(|(address, _)| !is_unplaced(address));
    }
    claims.iter().enumerate().any(|(rank, claim)| {
        claim.addresses.iter().any(|address| released.contains(address) && claimants.policy_of(*address) != Some(rank))
    })
}

/// The nodes of a policy's addresses.
type Placement = BTreeMap<IpAddr, NodeIndex>;

/// Assigned addresses that stay. Of two addresses on one node the first stays, which is the one that agents serve; of
/// addresses that share a node those on the node of the first. Addresses being handed over come after these.
fn kept(
    (rank, claim): (usize, &Claim<'_>),
    hand_overs: &BTreeMap<IpAddr, HandOver>,
    hosts: &Hosts<'_>,
    claimants: &Claimants<'_>,
) -> Placement {
    let (mut places, mut used) = (Placement::new(), BTreeSet::new());
    let to = |address: &IpAddr| Some((*address, hand_overs.get(address)?.to.as_deref()?));
    let being_handed_over = claim.addresses.iter().filter_map(to);
    // An address that a node is handing over because it must does not stay.
    let is_given_away = |(address, node): &(IpAddr, &str)| {
        let to = hand_overs.get(address).and_then(|hand_over| hosts.index(hand_over.to.as_deref()?));
        let is_leaving = |node| hosts.is_leaving(node, *address);
        hosts.index(node).is_some_and(is_leaving)
            && to.is_some_and(|to| !is_leaving(to) && hosts.can_host(to, claim.policy, *address))
    };
    let shown = claim.items.iter().copied().filter(|item| !is_given_away(item));
    for (address, node) in shown.chain(being_handed_over) {
        let is_own = claim.lists(&address) && claimants.policy_of(address) == Some(rank);
        let node = hosts.index(node).filter(|node| is_own && hosts.can_host(*node, claim.policy, address));
        let is_free =
            |node: &NodeIndex| if claim.is_one() { used.iter().all(|used| used == node) } else { !used.contains(node) };
        if let Some(node) = node.filter(|node| !places.contains_key(&address) && is_free(node)) {
            places.insert(address, node);
            used.insert(node);
        }
    }
    places
}

fn place_others<'a>(
    inputs: &AssignmentInputs<'_>,
    claims: &[Claim<'a>],
    (hosts, claimants): (&mut Hosts<'a>, &Claimants<'_>),
    places: &mut [Placement],
) {
    let mut pending = Vec::new();
    for (rank, claim) in claims.iter().enumerate() {
        let is_pending = |a: &&IpAddr| claimants.policy_of(**a) == Some(rank) && !places[rank].contains_key(*a);
        let all: Vec<IpAddr> = claim.addresses.iter().filter(is_pending).copied().collect();
        let together = places[rank].values().next().copied().filter(|_| claim.is_one());
        match together {
            Some(node) => places[rank].extend(all.into_iter().map(|address| (address, node))),
            None => {
                pending.extend(all.into_iter().take(if claim.is_one() { 1 } else { usize::MAX }).map(|a| (rank, a)))
            }
        }
    }
    let last = former_nodes(claims, inputs.hand_overs, hosts, &pending);
    let classes: Vec<_> = pending.iter().map(|(rank, address)| hosts.class(claims[*rank].policy, *address)).collect();
    let loads = hosts.nodes.iter().map(|(name, node)| NodeLoad::new(name, node.capacity())).collect();
    let mut matching = Matching::new(loads, claims.len(), &hosts.classes);
    for (rank, kept) in places.iter().enumerate() {
        kept.iter().for_each(|(address, node)| matching.keep(rank, *node, address.is_ipv4()));
    }
    for ((rank, address), class) in pending.into_iter().zip(classes) {
        matching.add(rank, address, class, last.get(&address).copied());
    }
    matching.solve();
    for unit in &matching.units {
        if let Some(node) = unit.node {
            places[unit.policy].insert(unit.address, node);
            let claim = &claims[unit.policy];
            let others =
                claim.addresses.iter().filter(|a| claim.is_one() && claimants.policy_of(**a) == Some(unit.policy));
            places[unit.policy].extend(others.map(|address| (*address, node)));
        }
    }
}

/// Moves addresses from drained nodes and from interfaces that cannot send. An address that no other node can take stays: a
/// drained node serves better than none, and an interface may work again.
fn move_off<'a>(
    inputs: &AssignmentInputs<'_>,
    claims: &[Claim<'a>],
    (hosts, claimants): (&mut Hosts<'a>, &Claimants<'_>),
    places: &mut [Placement],
) {
    let mut leaving: Vec<Placement> = Vec::with_capacity(places.len());
    for kept in &mut *places {
        leaving.push(kept.extract_if(.., |address, node| hosts.is_leaving(*node, *address)).collect());
    }
    place_others(inputs, claims, (hosts, claimants), places);
    for (kept, leaving) in places.iter_mut().zip(leaving) {
        for (address, node) in leaving {
            kept.entry(address).or_insert(node);
        }
    }
}

/// The former nodes of pending addresses, whichever policy had them.
fn former_nodes(
    claims: &[Claim<'_>],
    hand_overs: &BTreeMap<IpAddr, HandOver>,
    hosts: &Hosts<'_>,
    pending: &[(usize, IpAddr)],
) -> Placement {
    let pending: BTreeSet<IpAddr> = pending.iter().map(|(_, address)| *address).collect();
    let recorded = hand_overs.iter().map(|(address, hand_over)| (*address, hand_over.from.as_str()));
    let items = recorded.chain(claims.iter().rev().flat_map(|claim| claim.items.iter().copied()));
    let concerned = items.filter(|(address, _)| pending.contains(address));
    concerned.filter_map(|(address, node)| Some((address, hosts.index(node)?))).collect()
}

#[cfg(test)]
mod tests;
