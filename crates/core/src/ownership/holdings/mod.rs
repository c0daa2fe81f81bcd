//! Which addresses this node may hold of those that a status gives it. Pure.
//!
//! The status says who serves an address, and it comes by another watch than the [`Ledger`] and than what the fence says
//! (`crate::ownership::lease`); nothing orders them. So the status alone is believed only by a node that has nothing to unlearn:
//!
//! - While a hand-over of an address is open nobody but its new node may hold it.
//! - Behind the fence, out of touch for as long as the lease lasts, this node holds nothing.
//! - What it has given up in one of these ways it takes up again only when ledger and object have been read anew since: what
//!   it knows of them may be from before. The same is true of whatever is new to a node that has been behind the
//!   fence, whose watches may still tell it of the time before.
//!
//! Where the ledger cannot be heard, the leader's probes tell of single hand-overs ([`Ownership::order`]): to give up is all that
//! follows from that.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use egress_common::abi::MAX_SLOTS;

use crate::model::ledger::{Acknowledgements, HandOver, Ledger};
use crate::model::state::family_of;
use crate::model::state::{EgressId, HandoverState, KernelState, Place, WhenEmpty};

/// Addresses by the object that they serve, as in [`KernelState::owned`].
type Owned = BTreeMap<EgressId, IpAddr>;

#[derive(Debug)]
pub struct Ownership {
    node: String,
    ledger: Arc<Ledger>,
    /// Hand-overs from this node that the ledger has not told of yet.
    orders: Acknowledgements,
    fenced: bool,
    /// For good: there is no time from which a watch is known to have told all of what was before. It costs two reads for
    /// each address that comes later.
    was_fenced: bool,
    /// The last number that the ledger had when the fence ended what was taken by hand-overs. Those up to it begin nothing
    /// anew: a node that has nothing may be behind the fence at any time, and what it hears of then is new.
    outlived: u64,
    /// On their way from here, and held until their new node is ready.
    waiting: BTreeSet<IpAddr>,
    /// Given up, and not read anew since.
    given_up: BTreeSet<IpAddr>,
    /// Read anew just now.
    confirmed: BTreeSet<IpAddr>,
}

/// What this node may not hold, of what it is to hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Barred {
    pub all: Owned,
    /// Those of them that only wait until ledger and object have been read again.
    pub doubtful: Owned,
}

impl Ownership {
    pub fn new(node: String) -> Self {
        Self {
            node,
            ledger: Arc::default(),
            orders: Acknowledgements::new(),
            fenced: false,
            was_fenced: false,
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

    /// Hand-overs from this node that it has heard of by another way than the ledger: all that there are.
    pub fn order(&mut self, orders: &Acknowledgements) {
        if self.orders != *orders {
            self.orders.clone_from(orders);
            self.give_up(orders);
        }
    }

    fn give_up(&mut self, leaving: &Acknowledgements) {
        self.given_up.extend(leaving.keys());
        // What was read anew before is old.
        self.confirmed.retain(|address| !leaving.contains_key(address));
    }

    /// Whether this node is behind the fence; `held` is what the kernel holds.
    pub fn set_fenced(&mut self, fenced: bool, held: &Owned) {
        self.fenced = fenced;
        if fenced {
            self.was_fenced = true;
            self.confirmed.clear();
            self.given_up.extend(held.values());
        }
    }

    /// The hand-overs from here whose new node is not ready yet. These addresses are held on.
    pub fn set_waiting(&mut self, waiting: BTreeSet<IpAddr>) {
        self.waiting = waiting;
    }

    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    pub fn is_fenced(&self) -> bool {
        self.fenced
    }

    /// Whether this node may go on with the hand-over of this number that gives it the address.
    pub fn may_take(&self, address: &IpAddr, number: u64) -> bool {
        // What it was told by another way is newer than the ledger that it knows.
        let is_ordered_away = self.orders.get(address).is_some_and(|order| *order > number);
        !self.fenced && !is_ordered_away && number > self.outlived
    }

    /// What of this, which the node takes by hand-overs, it may take no more.
    pub fn overtaken(&mut self, actual: &KernelState) -> Owned {
        let may_take = |address: &IpAddr| {
            let record = self.ledger.records.open.get(address);
            record.map_or(!self.fenced && !self.orders.contains_key(address), |record| {
                record.to.as_ref() == Some(&self.node) && self.may_take(address, record.number)
            })
        };
        let taken = actual.moving.iter().filter(|(_, moving)| moving.is_taken() && !may_take(&moving.address));
        let overtaken: Owned = taken.map(|(id, moving)| (*id, moving.address)).collect();
        if self.fenced && !overtaken.is_empty() {
            self.outlived = self.ledger.records.last;
        }
        overtaken
    }

    /// What of this must not be held, where the kernel holds these.
    pub fn barred(&self, owned: &Owned, held: &Owned) -> Barred {
        let mut barred = Barred::default();
        for (id, address) in owned {
            let is_new = held.get(id) != Some(address);
            let waits = self.waiting.contains(address) && !is_new;
            let is_anothers = !waits && !self.ledger.lets_hold(&self.node, address);
            let is_doubtful = (!waits && self.given_up.contains(address)) || (self.was_fenced && is_new);
            if self.fenced || is_anothers {
                barred.all.insert(*id, *address);
            } else if is_doubtful && !self.confirmed.contains(address) {
                barred.all.insert(*id, *address);
                barred.doubtful.insert(*id, *address);
            }
        }
        barred
    }

    /// These were read anew just now, and they are this node's.
    pub fn confirm(&mut self, addresses: &BTreeSet<IpAddr>) {
        self.confirmed.extend(addresses);
    }

    /// The kernel has been brought to what is desired, or as near as could be. What was read anew is old from now on.
    pub fn settle(&mut self, held: &Owned) {
        for address in std::mem::take(&mut self.confirmed) {
            if held.values().any(|other| *other == address) {
                self.given_up.remove(&address);
            }
        }
    }

    /// The open hand-overs to this node, from nodes that have given the address up, or whose leases have run out.
    pub fn arriving(&self) -> impl Iterator<Item = (&IpAddr, &HandOver)> {
        let records = self.ledger.records.open.iter();
        records.filter(|(_, record)| record.to.as_ref() == Some(&self.node) && record.from != self.node)
    }

    /// This node's word for each open hand-over from it: the kernel holds the address no more, nor takes it by another.
    pub fn released(&self, held: &Owned, moving: &BTreeMap<EgressId, HandoverState>) -> Acknowledgements {
        let mut words = self.orders.clone();
        words.extend(self.ledger.leaving(&self.node));
        let taken = moving.values().filter(|moving| moving.is_taken()).map(|moving| moving.address);
        let all: BTreeSet<IpAddr> = held.values().copied().chain(taken).collect();
        words.retain(|address, _| !all.contains(address));
        words
    }
}

/// The state without these: not owned here, and waited for by their flows. Those that are being handed over go on by the
/// other node, which has them or passes them on.
pub fn withhold(state: &mut KernelState, barred: &Owned) {
    for (id, address) in barred {
        if state.owned.get(id) != Some(address) {
            continue;
        }
        state.owned.remove(id);
        let other = state.moving.get(id).filter(|moving| moving.address == *address);
        if let Some(policy) = state.policy.get_mut(&(*id, family_of(*address))) {
            if let Some(HandoverState { peer, .. }) = other {
                let slots = policy.slots.iter_mut().filter(|slot| slot.place == Place::Here);
                slots.for_each(|slot| slot.place = Place::Remote(*peer));
                continue;
            }
            policy.slots.retain(|slot| slot.place != Place::Here);
            // The address is the object's all the same: without it there is none, and not the node's.
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
