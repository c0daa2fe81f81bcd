//! Whose an address is where several objects list it.
//!
//! One that has it in its status keeps it, also while its node is away: connections go on with it. Where several have,
//! one whose node can serve it comes first; then the oldest. What can be no egress IP ([`crate::model::reserved`]) is no
//! object's.

use std::collections::HashMap;
use std::net::IpAddr;

use crate::allocation::Claim;
use crate::allocation::hosts::Hosts;
use crate::model::reserved::{Reservations, Reserved};

/// What is settled about addresses before any is placed.
#[derive(Debug)]
pub(super) struct Owners<'a> {
    reserved: &'a Reservations,
    /// The place of the object in rank.
    objects: HashMap<IpAddr, usize>,
}

impl<'a> Owners<'a> {
    pub(super) fn new(reserved: &'a Reservations, claims: &[Claim<'_>], hosts: &Hosts<'_>) -> Self {
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
        objects.retain(|address, _| reserved.of(*address).is_none());
        Self { reserved, objects }
    }

    /// The object that the address belongs to, by its place in rank.
    pub(super) fn object(&self, address: IpAddr) -> Option<usize> {
        self.objects.get(&address).copied()
    }

    /// Why it is nobody's.
    pub(super) fn reserved(&self, address: IpAddr) -> Option<&'a Reserved> {
        self.reserved.of(address)
    }
}
