//! Which of the addresses that a status assigns to this node it may hold. Pure.
//!
//! Nothing orders status, [`Ledger`] and lease (`crate::ownership::lease`), so the status alone does not suffice:
//!
//! - During a hand-over only the new node may hold the address. With an expired lease, this node holds nothing.
//! - An address that was released for one of these reasons is held again only after a fresh read of ledger and policy.
//!   So is every new address after the lease has expired once, since watches may still deliver older state.
//! - Without the ledger, the leader's probes report single hand-overs ([`NodeOwnership::set_orders`]), which can only
//!   take addresses away.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use egress_common::abi::MAX_SLOTS;

use crate::model::ledger::{Acknowledgements, HandOver, Ledger};
use crate::model::state::family_of;
use crate::model::state::{AddressByPolicy, EgressId, HandoverState, KernelState, Place, WhenEmpty};

#[derive(Debug)]
pub struct NodeOwnership {
    node: String,
    ledger: Arc<Ledger>,
    /// Hand-overs from this node that the ledger has not shown yet.
    orders: Acknowledgements,
    lease_expired: bool,
    /// Never reset, because the node cannot know when its watch has delivered all older events. It costs two reads for
    /// each later address.
    has_expired_before: bool,
    /// The ledger's last number when the lease expired while addresses were being taken over. Those hand-overs do not
    /// start again: the lease of a node without addresses may expire at any time, and later numbers are new.
    expired_up_to: u64,
    /// Addresses being handed over from here, held until their new node is ready.
    awaiting_new_owner: BTreeSet<IpAddr>,
    /// Released, without a fresh read since.
    needs_fresh_read: BTreeSet<IpAddr>,
    /// Just read.
    confirmed: BTreeSet<IpAddr>,
}

/// Desired addresses that this node may not hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Withheld {
    pub all: AddressByPolicy,
    /// Those of them that only wait for a fresh read of ledger and policy.
    pub unconfirmed: AddressByPolicy,
}

impl NodeOwnership {
    pub fn new(node: String) -> Self {
        Self {
            node,
            ledger: Arc::default(),
            orders: Acknowledgements::new(),
            lease_expired: false,
            has_expired_before: false,
            expired_up_to: 0,
            awaiting_new_owner: BTreeSet::new(),
            needs_fresh_read: BTreeSet::new(),
            confirmed: BTreeSet::new(),
        }
    }

    pub fn node_name(&self) -> &str {
        &self.node
    }

    pub fn observe_ledger(&mut self, ledger: Arc<Ledger>) {
        self.ledger = ledger;
        let leaving = self.ledger.leaving(&self.node);
        self.release(&leaving);
    }

    /// All hand-overs from this node that probes report.
    pub fn set_orders(&mut self, orders: &Acknowledgements) {
        if self.orders != *orders {
            self.orders.clone_from(orders);
            self.release(orders);
        }
    }

    fn release(&mut self, leaving: &Acknowledgements) {
        self.needs_fresh_read.extend(leaving.keys());
        // Older reads are outdated.
        self.confirmed.retain(|address| !leaving.contains_key(address));
    }

    /// Whether the lease has expired; `held` is what the kernel holds.
    pub fn set_lease_expired(&mut self, lease_expired: bool, held: &AddressByPolicy) {
        self.lease_expired = lease_expired;
        if lease_expired {
            self.has_expired_before = true;
            self.confirmed.clear();
            self.needs_fresh_read.extend(held.values());
        }
    }

    /// The hand-overs from here whose new node is not ready yet. These addresses stay held.
    pub fn set_awaiting_new_owner(&mut self, waiting: BTreeSet<IpAddr>) {
        self.awaiting_new_owner = waiting;
    }

    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    pub fn is_lease_expired(&self) -> bool {
        self.lease_expired
    }

    /// Whether this node may continue the hand-over of this number to it.
    pub fn may_take(&self, address: &IpAddr, number: u64) -> bool {
        // Requests by probes are newer than the known ledger.
        let is_ordered_elsewhere = self.orders.get(address).is_some_and(|order| *order > number);
        !self.lease_expired && !is_ordered_elsewhere && number > self.expired_up_to
    }

    /// Addresses that this node is taking over and may not take any more.
    pub fn cancelled_takeovers(&mut self, actual: &KernelState) -> AddressByPolicy {
        let may_take = |address: &IpAddr| {
            let record = self.ledger.records.open.get(address);
            record.map_or(!self.lease_expired && !self.orders.contains_key(address), |record| {
                record.to.as_ref() == Some(&self.node) && self.may_take(address, record.number)
            })
        };
        let taking_over =
            actual.handovers.iter().filter(|(_, handover)| handover.is_taken() && !may_take(&handover.address));
        let cancelled: AddressByPolicy = taking_over.map(|(id, handover)| (*id, handover.address)).collect();
        if self.lease_expired && !cancelled.is_empty() {
            self.expired_up_to = self.ledger.records.last;
        }
        cancelled
    }

    /// Desired addresses that must not be held, given those that the kernel holds.
    pub fn withheld(&self, owned: &AddressByPolicy, held: &AddressByPolicy) -> Withheld {
        let mut barred = Withheld::default();
        for (id, address) in owned {
            let is_new = held.get(id) != Some(address);
            let is_waiting = self.awaiting_new_owner.contains(address) && !is_new;
            let is_for_another = !is_waiting && !self.ledger.lets_hold(&self.node, address);
            let is_unconfirmed =
                (!is_waiting && self.needs_fresh_read.contains(address)) || (self.has_expired_before && is_new);
            if self.lease_expired || is_for_another {
                barred.all.insert(*id, *address);
            } else if is_unconfirmed && !self.confirmed.contains(address) {
                barred.all.insert(*id, *address);
                barred.unconfirmed.insert(*id, *address);
            }
        }
        barred
    }

    /// Records that a fresh read confirms these addresses.
    pub fn confirm(&mut self, addresses: &BTreeSet<IpAddr>) {
        self.confirmed.extend(addresses);
    }

    /// The kernel has reached the desired state, or as near as possible. Earlier reads are outdated from now on.
    pub fn note_settled(&mut self, held: &AddressByPolicy) {
        for address in std::mem::take(&mut self.confirmed) {
            if held.values().any(|other| *other == address) {
                self.needs_fresh_read.remove(&address);
            }
        }
    }

    /// The open hand-overs to this node, from nodes that have released the address, or whose leases have expired.
    pub fn arriving(&self) -> impl Iterator<Item = (&IpAddr, &HandOver)> {
        let records = self.ledger.records.open.iter();
        records.filter(|(_, record)| record.to.as_ref() == Some(&self.node) && record.from != self.node)
    }

    /// This node's acknowledgements of open hand-overs from it: the kernel neither holds the address nor takes it over.
    pub fn released(&self, held: &AddressByPolicy, handovers: &BTreeMap<EgressId, HandoverState>) -> Acknowledgements {
        let mut acknowledgements = self.orders.clone();
        acknowledgements.extend(self.ledger.leaving(&self.node));
        let taking_over = handovers.values().filter(|handover| handover.is_taken()).map(|handover| handover.address);
        let all: BTreeSet<IpAddr> = held.values().copied().chain(taking_over).collect();
        acknowledgements.retain(|address, _| !all.contains(address));
        acknowledgements
    }
}

/// Removes these addresses from the state: not owned here, and pending for their flows. Those in a hand-over continue
/// on the other node, which has them or forwards their packets.
pub fn withhold(state: &mut KernelState, withheld: &AddressByPolicy) {
    for (id, address) in withheld {
        if state.owned.get(id) != Some(address) {
            continue;
        }
        state.give_up(*id);
        let other = state.handovers.get(id).filter(|handover| handover.address == *address);
        if let Some(policy) = state.policy.get_mut(&(*id, family_of(*address))) {
            if let Some(HandoverState { peer, .. }) = other {
                let slots = policy.slots.iter_mut().filter(|slot| slot.place == Place::Here);
                slots.for_each(|slot| slot.place = Place::Remote(*peer));
                continue;
            }
            policy.slots.retain(|slot| slot.place != Place::Here);
            // The address still belongs to the policy: without it the policy has none, and not the node's.
            policy.when_empty = WhenEmpty::Drop;
            if policy.slots.len() + policy.pending.len() < MAX_SLOTS {
                policy.pending.push(*address);
                policy.pending.sort_unstable();
                policy.pending.dedup();
            }
        }
    }
}

#[cfg(test)]
mod tests;
