//! Which of the addresses that a status assigns to this node it may hold. Pure.
//!
//! Status, [`Ledger`] and lease (`crate::ownership::lease`) arrive by different ways without an order. So the status
//! alone suffices only for a node that cannot have outdated knowledge:
//!
//! - While a hand-over of an address is open, only its new node may hold it.
//! - With an expired lease, this node holds nothing.
//! - An address that it has given up for one of these reasons is taken up again only after a fresh read of ledger and
//!   policy. The same applies to every new address after the lease has expired once, since watches may still deliver
//!   older state.
//!
//! Without the ledger, the leader's probes report single hand-overs ([`Ownership::order`]), which can only take
//! addresses away.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use egress_common::abi::MAX_SLOTS;

use crate::model::ledger::{Acknowledgements, HandOver, Ledger};
use crate::model::state::family_of;
use crate::model::state::{EgressId, HandoverState, KernelState, Place, WhenEmpty};

/// Addresses by the policy that they serve, as in [`KernelState::owned`].
type Owned = BTreeMap<EgressId, IpAddr>;

#[derive(Debug)]
pub struct Ownership {
    node: String,
    ledger: Arc<Ledger>,
    /// Hand-overs from this node that the ledger has not shown yet.
    orders: Acknowledgements,
    lease_expired: bool,
    /// Never reset: no time is known from which a watch has delivered everything older. It costs two reads for each
    /// later address.
    has_expired_before: bool,
    /// The ledger's last number when the lease expired while addresses were being taken over. Those hand-overs do not
    /// start again: the lease of a node without addresses may expire at any time, and later numbers are new.
    outlived: u64,
    /// Addresses being handed over from here, held until their new node is ready.
    waiting: BTreeSet<IpAddr>,
    /// Given up, without a fresh read since.
    given_up: BTreeSet<IpAddr>,
    /// Just read.
    confirmed: BTreeSet<IpAddr>,
}

/// Desired addresses that this node may not hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Barred {
    pub all: Owned,
    /// Those of them that only wait for a fresh read of ledger and policy.
    pub doubtful: Owned,
}

impl Ownership {
    pub fn new(node: String) -> Self {
        Self {
            node,
            ledger: Arc::default(),
            orders: Acknowledgements::new(),
            lease_expired: false,
            has_expired_before: false,
            outlived: 0,
            waiting: BTreeSet::new(),
            given_up: BTreeSet::new(),
            confirmed: BTreeSet::new(),
        }
    }

    pub fn node_name(&self) -> &str {
        &self.node
    }

    pub fn follow(&mut self, ledger: Arc<Ledger>) {
        self.ledger = ledger;
        let leaving = self.ledger.leaving(&self.node);
        self.give_up(&leaving);
    }

    /// All hand-overs from this node that probes report.
    pub fn order(&mut self, orders: &Acknowledgements) {
        if self.orders != *orders {
            self.orders.clone_from(orders);
            self.give_up(orders);
        }
    }

    fn give_up(&mut self, leaving: &Acknowledgements) {
        self.given_up.extend(leaving.keys());
        // Older reads are outdated.
        self.confirmed.retain(|address| !leaving.contains_key(address));
    }

    /// Whether the lease has expired; `held` is what the kernel holds.
    pub fn set_lease_expired(&mut self, lease_expired: bool, held: &Owned) {
        self.lease_expired = lease_expired;
        if lease_expired {
            self.has_expired_before = true;
            self.confirmed.clear();
            self.given_up.extend(held.values());
        }
    }

    /// The hand-overs from here whose new node is not ready yet. These addresses stay held.
    pub fn set_waiting(&mut self, waiting: BTreeSet<IpAddr>) {
        self.waiting = waiting;
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
        let is_ordered_away = self.orders.get(address).is_some_and(|order| *order > number);
        !self.lease_expired && !is_ordered_away && number > self.outlived
    }

    /// Addresses that this node is taking over and may not take any more.
    pub fn overtaken(&mut self, actual: &KernelState) -> Owned {
        let may_take = |address: &IpAddr| {
            let record = self.ledger.records.open.get(address);
            record.map_or(!self.lease_expired && !self.orders.contains_key(address), |record| {
                record.to.as_ref() == Some(&self.node) && self.may_take(address, record.number)
            })
        };
        let taken = actual.handovers.iter().filter(|(_, handover)| handover.is_taken() && !may_take(&handover.address));
        let overtaken: Owned = taken.map(|(id, handover)| (*id, handover.address)).collect();
        if self.lease_expired && !overtaken.is_empty() {
            self.outlived = self.ledger.records.last;
        }
        overtaken
    }

    /// Desired addresses that must not be held, given those that the kernel holds.
    pub fn barred(&self, owned: &Owned, held: &Owned) -> Barred {
        let mut barred = Barred::default();
        for (id, address) in owned {
            let is_new = held.get(id) != Some(address);
            let waits = self.waiting.contains(address) && !is_new;
            let is_anothers = !waits && !self.ledger.lets_hold(&self.node, address);
            let is_doubtful = (!waits && self.given_up.contains(address)) || (self.has_expired_before && is_new);
            if self.lease_expired || is_anothers {
                barred.all.insert(*id, *address);
            } else if is_doubtful && !self.confirmed.contains(address) {
                barred.all.insert(*id, *address);
                barred.doubtful.insert(*id, *address);
            }
        }
        barred
    }

    /// Records that a fresh read confirms these addresses.
    pub fn confirm(&mut self, addresses: &BTreeSet<IpAddr>) {
        self.confirmed.extend(addresses);
    }

    /// The kernel has reached the desired state, or as near as possible. Earlier reads are outdated from now on.
    pub fn settle(&mut self, held: &Owned) {
        for address in std::mem::take(&mut self.confirmed) {
            if held.values().any(|other| *other == address) {
                self.given_up.remove(&address);
            }
        }
    }

    /// The open hand-overs to this node, from nodes that have released the address, or whose leases have expired.
    pub fn arriving(&self) -> impl Iterator<Item = (&IpAddr, &HandOver)> {
        let records = self.ledger.records.open.iter();
        records.filter(|(_, record)| record.to.as_ref() == Some(&self.node) && record.from != self.node)
    }

    /// This node's acknowledgements of open hand-overs from it: the kernel neither holds the address nor takes it over.
    pub fn released(&self, held: &Owned, handovers: &BTreeMap<EgressId, HandoverState>) -> Acknowledgements {
        let mut acknowledgements = self.orders.clone();
        acknowledgements.extend(self.ledger.leaving(&self.node));
        let taken = handovers.values().filter(|handover| handover.is_taken()).map(|handover| handover.address);
        let all: BTreeSet<IpAddr> = held.values().copied().chain(taken).collect();
        acknowledgements.retain(|address, _| !all.contains(address));
        acknowledgements
    }
}

/// Removes these addresses from the state: not owned here, and pending for their flows. Those in a hand-over continue
/// on the other node, which has them or forwards their packets.
pub fn withhold(state: &mut KernelState, barred: &Owned) {
    for (id, address) in barred {
        if state.owned.get(id) != Some(address) {
            continue;
        }
        state.owned.remove(id);
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
