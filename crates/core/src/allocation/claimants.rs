//! Which policy gets an address that several policies list.
//!
//! A policy that has the address in its status keeps it, also while its node is away, so that connections continue
//! with it. Of several, one whose node can serve it comes first, then the oldest. A reserved address
//! ([`crate::model::reserved`]) has no claimant.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;

use crate::allocation::Claim;
use crate::allocation::hosts::Hosts;
use crate::model::policy::AddressUse;
use crate::model::reserved::{Reservations, Reserved};

/// The policy that each address belongs to, determined before any address is placed.
#[derive(Debug)]
pub(super) struct Claimants<'a> {
    reserved: &'a ReservedAddresses,
    /// The rank of the policy.
    policies: HashMap<IpAddr, usize>,
}

impl<'a> Claimants<'a> {
    pub(super) fn new(reserved: &'a ReservedAddresses, claims: &[Claim<'_>], hosts: &Hosts<'_>) -> Self {
        let (mut serving, mut away) = (HashMap::with_capacity(claims.len()), Vec::new());
        let may_have = |claim: &Claim<'_>, address: &IpAddr| reserved.may_have(claim.policy.address_use, *address);
        for (rank, claim) in claims.iter().enumerate() {
            let items = claim.items.iter().filter(|(address, _)| claim.lists(address) && may_have(claim, address));
            for (address, node) in items {
                if hosts.index(node).is_some_and(|node| hosts.can_host(node, claim.policy, *address)) {
                    serving.entry(*address).or_insert(rank);
                } else {
                    away.push((*address, rank));
                }
            }
        }
        let listing = claims.iter().enumerate().flat_map(|(rank, claim)| {
            let addresses = claim.addresses.iter().filter(|address| may_have(claim, address));
            addresses.map(move |address| (*address, rank))
        });
        let mut policies = serving;
        for (address, rank) in away.into_iter().chain(listing) {
            policies.entry(address).or_insert(rank);
        }
        Self { reserved, policies }
    }

    /// The rank of the policy that the address belongs to.
    pub(super) fn policy_of(&self, address: IpAddr) -> Option<usize> {
        self.policies.get(&address).copied()
    }

    /// Why no policy of this kind may have the address.
    pub(super) fn reserved(&self, address_use: AddressUse, address: IpAddr) -> Option<&'a Reserved> {
        self.reserved.reason(address_use, address)
    }
}

/// Which addresses policies may have. Those that nodes have themselves are for the policies that use them as such, and
/// such policies have no others.
#[derive(Debug)]
pub(super) struct ReservedAddresses {
    pub(super) reserved: Reservations,
    pub(super) of_nodes: HashSet<IpAddr>,
}

impl ReservedAddresses {
    fn reason(&self, address_use: AddressUse, address: IpAddr) -> Option<&Reserved> {
        let is_exempt = |reason: &&Reserved| address_use == AddressUse::OfHost && matches!(reason, Reserved::Node(_));
        self.reserved.of(address).filter(|reason| !is_exempt(reason))
    }

    fn may_have(&self, address_use: AddressUse, address: IpAddr) -> bool {
        self.reason(address_use, address).is_none()
            && (address_use != AddressUse::OfHost || self.of_nodes.contains(&address))
    }
}
