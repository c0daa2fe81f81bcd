//! Allocation of egress IDs. Pure, except for its memory.
//!
//! IDs are allocated in cyclic order, so that a freed one is reused only after all others. The standby observes too, so
//! that the next leader continues where the last one stopped, and knows the ID of a policy whose annotation was
//! removed.

use std::collections::{BTreeMap, BTreeSet};

use egress_common::abi::MAX_EGRESS_ID;

use crate::model::policy::{Policies, PolicyKey};
use crate::model::state::{EgressId, EgressIds};
use crate::selection::{by_rank, egress_ids};

#[derive(Debug, Default)]
pub struct EgressIdAllocator {
    /// By the policy's UID: a new policy of an old name is another policy.
    remembered: BTreeMap<String, EgressIds>,
    last: u32,
}

impl EgressIdAllocator {
    /// Records the IDs in use.
    pub fn observe(&mut self, policies: &Policies) {
        let ids = egress_ids(policies);
        let alive: BTreeSet<&str> = policies.values().map(|policy| policy.origin.uid.as_str()).collect();
        self.remembered.retain(|uid, _| alive.contains(uid.as_str()));
        let first = self.last == 0;
        for (name, ids) in ids {
            let Some(policy) = policies.get(&name) else { continue };
            let known = self.remembered.insert(policy.origin.uid.clone(), ids).unwrap_or_default();
            for id in ids.all().filter(|id| !known.contains(*id)) {
                if first || self.is_ahead(id) {
                    self.last = if first { self.last.max(id.0) } else { id.0 };
                }
            }
        }
    }

    /// The current or new IDs of each policy. A new one is for both families.
    pub fn allocate(&mut self, policies: &Policies) -> BTreeMap<PolicyKey, EgressIds> {
        self.observe(policies);
        let mut numbers = egress_ids(policies);
        let mut given: BTreeSet<EgressId> = numbers.values().flat_map(EgressIds::all).collect();
        let mut used = given.clone();
        used.extend(self.remembered.values().flat_map(EgressIds::all));
        for policy in by_rank(policies.values()) {
            if numbers.contains_key(policy.key()) {
                continue;
            }
            let own = self.remembered.get(&policy.origin.uid).copied();
            let own = own.filter(|ids| ids.all().all(|id| !given.contains(&id)));
            let Some(ids) = own.or_else(|| self.next(&used).map(EgressIds::both)) else {
                continue;
            };
            used.extend(ids.all());
            given.extend(ids.all());
            self.remembered.insert(policy.origin.uid.clone(), ids);
            numbers.insert(policy.key().clone(), ids);
        }
        numbers
    }

    fn next(&mut self, used: &BTreeSet<EgressId>) -> Option<EgressId> {
        let after = |last: u32| last % MAX_EGRESS_ID + 1;
        let (mut id, end) = (after(self.last), self.last);
        while used.contains(&EgressId(id)) {
            if id == end {
                return None;
            }
            id = after(id);
        }
        self.last = id;
        Some(EgressId(id))
    }

    /// Less than half a cycle ahead of the last one: another leader allocated it.
    fn is_ahead(&self, id: EgressId) -> bool {
        (id.0 + MAX_EGRESS_ID - self.last) % MAX_EGRESS_ID < MAX_EGRESS_ID / 2
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::model::policy::{EgressPolicy, Published};
    use crate::model::samples::{key, origin};

    const fn both(id: u32) -> EgressIds {
        EgressIds::both(EgressId(id))
    }

    fn policy(name: &str, created: i64, id: Option<u32>) -> (PolicyKey, Arc<EgressPolicy>) {
        let ids = id.map_or(EgressIds::NONE, both);
        let published = Published { ids, ..Published::default() };
        (key(name), Arc::new(EgressPolicy { published, ..EgressPolicy::new(origin(name, created)) }))
    }

    #[test]
    fn ids_are_cyclic_and_a_freed_one_is_not_the_next() {
        let mut numbering = EgressIdAllocator::default();
        let two = Policies::from([policy("a", 1, None), policy("b", 2, None)]);
        let numbers = numbering.allocate(&two);
        assert_eq!((numbers[&key("a")], numbers[&key("b")]), (both(1), both(2)));
        let another = Policies::from([policy("a", 1, Some(1)), policy("c", 3, None)]);
        assert_eq!(numbering.allocate(&another)[&key("c")], both(3));
    }

    #[test]
    fn the_older_object_keeps_a_duplicate_and_a_removed_id_is_restored() {
        let mut numbering = EgressIdAllocator::default();
        let same = Policies::from([policy("young", 2, Some(5)), policy("old", 1, Some(5))]);
        let numbers = numbering.allocate(&same);
        assert_eq!((numbers[&key("old")], numbers[&key("young")]), (both(5), both(6)));
        let wiped = Policies::from([policy("young", 2, Some(6)), policy("old", 1, None)]);
        assert_eq!(numbering.allocate(&wiped)[&key("old")], both(5));
    }

    #[test]
    fn a_standby_continues_after_the_ids_that_it_saw_and_wraps_around() {
        let mut standby = EgressIdAllocator::default();
        standby.observe(&Policies::from([policy("a", 1, Some(7))]));
        standby.observe(&Policies::from([policy("a", 1, Some(7)), policy("b", 2, Some(9))]));
        assert_eq!(standby.allocate(&Policies::from([policy("c", 3, None)]))[&key("c")], both(10));
        let mut at_end = EgressIdAllocator::default();
        let policies = Policies::from([policy("a", 1, Some(MAX_EGRESS_ID)), policy("b", 2, None)]);
        assert_eq!(at_end.allocate(&policies)[&key("b")], both(1));
    }
}
