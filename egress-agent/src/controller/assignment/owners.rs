//! Whose an address is where several objects list it.
//!
//! One that has it in its status keeps it, also while its node is away: connections go on with it. Where several have,
//! one whose node can serve it comes first; then the oldest. A node's own address is nobody's.

use std::collections::HashMap;
use std::net::IpAddr;

use super::hosts::Hosts;
use super::{Claim, Nodes};

/// What is settled about addresses before any is placed.
#[derive(Debug)]
pub(super) struct Owners<'a> {
    /// Addresses of nodes themselves.
    nodes: HashMap<IpAddr, &'a str>,
    /// The place of the object in rank.
    objects: HashMap<IpAddr, usize>,
}

impl<'a> Owners<'a> {
    pub(super) fn new(nodes: &'a Nodes, claims: &[Claim<'_>], hosts: &Hosts<'_>) -> Self {
        // Later ones win, and the first by name shall.
        let addresses = nodes
            .iter()
            .rev()
            .flat_map(|(name, node)| node.addresses().into_iter().map(move |address| (address, name.as_str())));
        let nodes: HashMap<IpAddr, &str> = addresses.collect();
        let (mut serving, mut away) = (HashMap::with_capacity(claims.len()), Vec::new());
        for (rank, claim) in claims.iter().enumerate() {
            for (address, node) in claim.items.iter().filter(|(address, _)| claim.lists(address)) {
                if hosts.index(node).is_some_and(|node| hosts.can(node, *address)) {
                    serving.entry(*address).or_insert(rank);
                } else {
                    away.push((*address, rank));
                }
            }
        }
        let listing =
            claims.iter().enumerate().flat_map(|(rank, claim)| claim.addresses.iter().map(move |a| (*a, rank)));
        let mut objects = serving;
        for (address, rank) in away.into_iter().chain(listing) {
            objects.entry(address).or_insert(rank);
        }
        objects.retain(|address, _| !nodes.contains_key(address));
        Self { nodes, objects }
    }

    /// The object that the address belongs to, by its place in rank.
    pub(super) fn object(&self, address: IpAddr) -> Option<usize> {
        self.objects.get(&address).copied()
    }

    /// The node whose own address it is; the first by name of several.
    pub(super) fn node(&self, address: IpAddr) -> Option<&'a str> {
        self.nodes.get(&address).copied()
    }
}
