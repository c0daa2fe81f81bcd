//! Which node serves which egress IP. Pure.
//!
//! 1. [`owners`]: every address belongs to one object: to the one that has it in its status, else to the oldest that lists
//!    it.
//! 2. What is assigned and still right stays where it is.
//! 3. [`hosts`]: which nodes could take each of the others; [`matching`], with [`search`]: as many as possible are
//!    placed, older objects first, as evenly as possible. A node never holds two addresses of one object.
//! 4. What drained nodes have goes to others, as far as these can take it behind all that.
//! 5. [`outcome`]: what became of each entry, and what the status should say.
//!
//! The order of the input does not matter: objects are taken by age and name, ties between nodes are broken by a hash of
//! address and node.

pub mod draining;
pub mod egress_ids;
pub mod hosts;
pub mod matching;
pub mod outcome;
pub mod owners;
#[cfg(test)]
mod properties;
#[cfg(any(test, feature = "testing"))]
pub mod samples;
pub mod search;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use crate::allocation::hosts::{Hosts, NodeIndex};
use crate::allocation::matching::{Holding, Matching};
pub use crate::allocation::outcome::{Fate, Obstacle, Outcome};
use crate::allocation::owners::Owners;
use egress_common::abi::MAX_SLOTS;

use crate::model::ledger::HandOver;
use crate::model::reserved::{ClusterNetworks, Reservations};
use crate::model::services::Services;
use crate::model::view::{EgressObject, Item, Node, parse_egress_ip};
use crate::selection::by_rank;

pub type Objects = BTreeMap<String, Arc<EgressObject>>;
pub type Nodes = BTreeMap<String, Arc<Node>>;

/// What an assignment is made from. The status that holds now is part of the objects.
#[derive(Clone, Copy, Debug)]
pub struct Facts<'a> {
    pub objects: &'a Objects,
    pub nodes: &'a Nodes,
    /// Nodes that do not answer.
    pub unreachable: &'a BTreeSet<String>,
    /// Nodes that keep what they have, and get nothing more: nobody there would take it.
    pub absent: &'a BTreeSet<String>,
    /// The cluster's own networks.
    pub networks: &'a ClusterNetworks,
    /// Addresses of Services outside these.
    pub services: &'a Services,
    /// Addresses on their way to another node: that is where they stay.
    pub hand_overs: &'a BTreeMap<IpAddr, HandOver>,
}

/// Who serves what.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Assignment {
    /// By the object's name.
    pub outcomes: BTreeMap<String, Outcome>,
    /// How many nodes could take an address at all.
    pub eligible: usize,
}

impl Assignment {
    /// The objects with what becomes of each. Both are in the order of names: one walk, no look for each.
    pub fn beside<'a>(&'a self, objects: &'a Objects) -> impl Iterator<Item = (&'a Arc<EgressObject>, &'a Outcome)> {
        let mut outcomes = self.outcomes.iter().peekable();
        objects.iter().filter_map(move |(name, object)| {
            while outcomes.next_if(|(other, _)| *other < name).is_some() {}
            outcomes.next_if(|(other, _)| *other == name).map(|(_, outcome)| (object, outcome))
        })
    }

    /// The objects whose status should say something else than it does.
    pub fn changed<'a>(&'a self, objects: &'a Objects) -> impl Iterator<Item = (&'a str, &'a Outcome)> {
        let changed = self.beside(objects).filter(|(object, outcome)| object.items != outcome.items);
        changed.map(|(object, outcome)| (object.name.as_str(), outcome))
    }
}

/// An object as it is read here, by its place in rank.
struct Claim<'a> {
    object: &'a EgressObject,
    /// What it lists: canonical where it can be read, each once.
    entries: Vec<(String, Option<IpAddr>)>,
    /// The addresses among them that it may have, sorted.
    addresses: Vec<IpAddr>,
    /// What its status says, as far as it can be read, sorted.
    items: Vec<(IpAddr, &'a str)>,
}

impl<'a> Claim<'a> {
    fn of(object: &'a EgressObject) -> Self {
        let mut entries = Vec::with_capacity(object.listed.len());
        for text in &object.listed {
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
        let mut items: Vec<_> = object.items.iter().filter_map(readable).collect();
        items.sort_unstable();
        if addresses.len() > MAX_SLOTS {
            leave_out_surplus(&mut addresses, &items);
        }
        addresses.sort_unstable();
        Self { object, entries, addresses, items }
    }

    fn lists(&self, address: &IpAddr) -> bool {
        self.addresses.binary_search(address).is_ok()
    }
}

/// As many of each family as programs can choose from: those that are in the status, then in the order of the spec.
fn leave_out_surplus(addresses: &mut Vec<IpAddr>, items: &[(IpAddr, &str)]) {
    addresses.sort_by_key(|address| !items.iter().any(|(assigned, _)| assigned == address));
    let (mut v4, mut v6) = (0, 0);
    addresses.retain(|address| {
        let count = if address.is_ipv4() { &mut v4 } else { &mut v6 };
        *count += 1;
        *count <= MAX_SLOTS
    });
}

pub fn assign(facts: &Facts<'_>) -> Assignment {
    let ranked = by_rank(facts.objects.values());
    let mut claims: Vec<Claim<'_>> = ranked.into_iter().map(|object| Claim::of(object)).collect();
    let mut hosts = Hosts::new(facts);
    let reserved = reservations(facts, &claims);
    loop {
        let owners = Owners::new(&reserved, &claims, &hosts);
        let kept = |(rank, claim)| kept((rank, claim), facts.hand_overs, &hosts, &owners);
        let mut places: Vec<Places> = claims.iter().enumerate().map(kept).collect();
        place_others(facts, &claims, (&mut hosts, &owners), &mut places);
        if hosts.any_drained() {
            empty_drained(facts, &claims, (&mut hosts, &owners), &mut places);
        }
        if give_up(&mut claims, &owners, &places) {
            continue;
        }
        let outcomes = outcome::outcomes(facts, claims, &mut hosts, &owners, &places);
        return Assignment { outcomes, eligible: hosts.nodes.len() };
    }
}

/// A Service takes no address from an object that has it, and none from any by what its author lists (`spec.externalIPs`):
/// an object would lose its address as soon as it has no node for a moment. Only what the cluster gave to it is reserved.
fn reservations(facts: &Facts<'_>, claims: &[Claim<'_>]) -> Reservations {
    let mut services: BTreeSet<IpAddr> = facts.services.given().collect();
    if !services.is_empty() {
        let shown: BTreeSet<IpAddr> =
            claims.iter().flat_map(|claim| &claim.items).map(|(address, _)| *address).collect();
        services.retain(|address| !shown.contains(address));
    }
    let nodes = facts.nodes.iter().map(|(name, node)| (name.as_str(), node.as_ref()));
    Reservations::new(nodes, facts.networks, services, None)
}

/// What an object's status shows, and what could not be placed for it, is free for others from now on, as it will be once
/// the status is written. False when nothing is to be given up, or nobody else wants it.
fn give_up(claims: &mut [Claim<'_>], owners: &Owners<'_>, places: &[Places]) -> bool {
    let mut given_up = BTreeSet::new();
    for (rank, claim) in claims.iter_mut().enumerate() {
        let lost = |address: &IpAddr| owners.object(*address) == Some(rank) && !places[rank].contains_key(address);
        given_up.extend(claim.items.iter().map(|(address, _)| *address).filter(lost));
        claim.items.retain(|(address, _)| !lost(address));
    }
    claims.iter().enumerate().any(|(rank, claim)| {
        claim.addresses.iter().any(|address| given_up.contains(address) && owners.object(*address) != Some(rank))
    })
}

/// The nodes of an object's addresses.
type Places = BTreeMap<IpAddr, NodeIndex>;

/// What stays. Of two addresses on one node the first does, which is the one that agents serve. Then what is on its way.
fn kept(
    (rank, claim): (usize, &Claim<'_>),
    hand_overs: &BTreeMap<IpAddr, HandOver>,
    hosts: &Hosts<'_>,
    owners: &Owners<'_>,
) -> Places {
    let (mut places, mut used) = (Places::new(), BTreeSet::new());
    let to = |address: &IpAddr| Some((*address, hand_overs.get(address)?.to.as_deref()?));
    let on_the_way = claim.addresses.iter().filter_map(to);
    // What a drained node is giving away stays given.
    let is_given_away = |(address, node): &(IpAddr, &str)| {
        let to = hand_overs.get(address).and_then(|hand_over| hosts.index(hand_over.to.as_deref()?));
        let is_drained = |node| hosts.is_drained(node);
        hosts.index(node).is_some_and(is_drained) && to.is_some_and(|to| !is_drained(to) && hosts.can(to, *address))
    };
    let shown = claim.items.iter().copied().filter(|item| !is_given_away(item));
    for (address, node) in shown.chain(on_the_way) {
        let is_its = claim.lists(&address) && owners.object(address) == Some(rank);
        let node = hosts.index(node).filter(|node| is_its && hosts.can(*node, address));
        if let Some(node) = node.filter(|node| !places.contains_key(&address) && !used.contains(node)) {
            places.insert(address, node);
            used.insert(node);
        }
    }
    places
}

fn place_others(
    facts: &Facts<'_>,
    claims: &[Claim<'_>],
    (hosts, owners): (&mut Hosts<'_>, &Owners<'_>),
    places: &mut [Places],
) {
    let mut pending = Vec::new();
    for (rank, claim) in claims.iter().enumerate() {
        let is_pending = |a: &&IpAddr| owners.object(**a) == Some(rank) && !places[rank].contains_key(*a);
        pending.extend(claim.addresses.iter().filter(is_pending).map(|address| (rank, *address)));
    }
    let last = last_nodes(claims, facts.hand_overs, hosts, &pending);
    let classes: Vec<_> = pending.iter().map(|(_, address)| hosts.class(*address)).collect();
    let capacity = |node: &Node| node.cloud.as_ref().map(|cloud| cloud.capacity).unwrap_or_default();
    let holdings = hosts.nodes.iter().map(|(name, node)| Holding::new(name, capacity(node))).collect();
    let mut matching = Matching::new(holdings, claims.len(), &hosts.classes);
    for (rank, kept) in places.iter().enumerate() {
        kept.iter().for_each(|(address, node)| matching.keep(rank, *node, address.is_ipv4()));
    }
    for ((rank, address), class) in pending.into_iter().zip(classes) {
        matching.add(rank, address, class, last.get(&address).copied());
    }
    matching.solve();
    for unit in &matching.units {
        if let Some(node) = unit.node {
            places[unit.object].insert(unit.address, node);
        }
    }
}

/// What no other node can take stays: a node that is drained serves better than none.
fn empty_drained(
    facts: &Facts<'_>,
    claims: &[Claim<'_>],
    (hosts, owners): (&mut Hosts<'_>, &Owners<'_>),
    places: &mut [Places],
) {
    let mut leaving: Vec<Places> = Vec::with_capacity(places.len());
    for kept in &mut *places {
        leaving.push(kept.extract_if(.., |_, node| hosts.is_drained(*node)).collect());
    }
    place_others(facts, claims, (hosts, owners), places);
    for (kept, leaving) in places.iter_mut().zip(leaving) {
        for (address, node) in leaving {
            kept.entry(address).or_insert(node);
        }
    }
}

/// Where pending addresses were, whichever object had them.
fn last_nodes(
    claims: &[Claim<'_>],
    hand_overs: &BTreeMap<IpAddr, HandOver>,
    hosts: &Hosts<'_>,
    pending: &[(usize, IpAddr)],
) -> Places {
    let pending: BTreeSet<IpAddr> = pending.iter().map(|(_, address)| *address).collect();
    let recorded = hand_overs.iter().map(|(address, hand_over)| (*address, hand_over.from.as_str()));
    let items = recorded.chain(claims.iter().rev().flat_map(|claim| claim.items.iter().copied()));
    let concerned = items.filter(|(address, _)| pending.contains(address));
    concerned.filter_map(|(address, node)| Some((address, hosts.index(node)?))).collect()
}

#[cfg(test)]
mod tests;
