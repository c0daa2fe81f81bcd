//! Which policy gets an address that several policies list.
//!
//! A policy that has the address in its status keeps it, also while its node is away, so that connections continue
//! with it. Of several, one whose node can serve it comes first, then the oldest. A reserved address
//! ([`crate::model::reserved`]) has no claimant.

use std::collections::HashMap;
use std::net::IpAddr;

use crate::allocation::Claim;
use crate::allocation::hosts::Hosts;
use crate::model::reserved::{Reservations, Reserved};

/// The policy that each address belongs to, determined before any address is placed.
#[derive(Debug)]
pub(super) struct Claimants<'a> {
    reserved: &'a Reservations,
    /// The rank of the policy.
    policies: HashMap<IpAddr, usize>,
}

impl<'a> Claimants<'a> {
    pub(super) fn new(reserved: &'a Reservations, claims: &[Claim<'_>], hosts: &Hosts<'_>) -> Self {
        let (mut serving, mut away) = (HashMap::with_capacity(claims.len()), Vec::new());
        for (rank, claim) in claims.iter().enumerate() {
            for (address, node) in claim.items.iter().filter(|(address, _)| claim.lists(address)) {
                if hosts.index(node).is_some_and(|node| hosts.can_host(node, claim.policy, *address)) {
                    serving.entry(*address).or_insert(rank);
                } else {
                    away.push((*address, rank));
                }
            }
        }
        let listing =
            claims.iter().enumerate().flat_map(|(rank, claim)| claim.addresses.iter().map(move |a| (*a, rank)));
        let mut policies = serving;
        for (address, rank) in away.into_iter().chain(listing) {
            policies.entry(address).or_insert(rank);
        }
        policies.retain(|address, _| reserved.of(*address).is_none());
        Self { reserved, policies }
    }

    /// The rank of the policy that the address belongs to.
    pub(super) fn policy_of(&self, address: IpAddr) -> Option<usize> {
        self.policies.get(&address).copied()
    }

    /// Why the address has no claimant.
    pub(super) fn reserved(&self, address: IpAddr) -> Option<&'a Reserved> {
        self.reserved.of(address)
    }
}
