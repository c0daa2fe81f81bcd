//! Allocation of egress IDs. Pure, except for its memory.
//!
//! IDs are allocated in cyclic order, so that a freed one is reused only after all others. The standby observes too, so
//! that the next leader continues where the last one stopped, and knows the ID of a policy whose annotation was
//! removed.

use std::collections::{BTreeMap, BTreeSet};

use egress_common::abi::MAX_EGRESS_ID;

use crate::model::policy::{EgressPolicy, Policies, PolicyKey};
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

    /// The current or new IDs of each policy. A new one is for both families, except where both have addresses on one
    /// node, which owns one address of an ID.
    pub fn allocate(&mut self, policies: &Policies) -> BTreeMap<PolicyKey, EgressIds> {
        self.observe(policies);
        let mut numbers = egress_ids(policies);
        let mut given: BTreeSet<EgressId> = numbers.values().flat_map(EgressIds::all).collect();
        let mut used = given.clone();
        used.extend(self.remembered.values().flat_map(EgressIds::all));
        for policy in by_rank(policies.values()) {
            if numbers.get(policy.key()).is_some_and(|ids| is_complete(policy, ids)) {
                continue;
            }
            let own = self.remembered.get(&policy.origin.uid).copied();
            let own = own.filter(|ids| is_complete(policy, ids) && ids.all().all(|id| !given.contains(&id)));
            let Some(ids) = own.or_else(|| self.new_ids(policy, &used)) else { continue };
            used.extend(ids.all());
            given.extend(ids.all());
            self.remembered.insert(policy.origin.uid.clone(), ids);
            numbers.insert(policy.key().clone(), ids);
        }
        numbers
    }

    fn new_ids(&mut self, policy: &EgressPolicy, used: &BTreeSet<EgressId>) -> Option<EgressIds> {
        let first = self.next(used)?;
        if !policy.eligible_nodes.is_one() {
            return Some(EgressIds::both(first));
        }
        let second = self.next(&used.iter().copied().chain([first]).collect())?;
        Some(EgressIds::new(Some(first), Some(second)))
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

/// Whether the IDs are as many as the policy needs.
fn is_complete(policy: &EgressPolicy, ids: &EgressIds) -> bool {
    !policy.eligible_nodes.is_one() || ids.all().count() == 2
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::model::policy::{EligibleNodes, Published};
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
    fn addresses_of_both_families_on_one_node_have_two_ids() {
        let mut numbering = EgressIdAllocator::default();
        let (key, mut shared) = policy("s", 1, None);
        Arc::make_mut(&mut shared).eligible_nodes = EligibleNodes::One(None);
        let ids = |first, second| EgressIds::new(Some(EgressId(first)), Some(EgressId(second)));
        let policies = Policies::from([(key.clone(), shared.clone()), policy("a", 2, None)]);
        let numbers = numbering.allocate(&policies);
        assert_eq!((numbers[&key], numbers[&PolicyKey::egress_ip("a")]), (ids(1, 2), both(3)));
        Arc::make_mut(&mut shared).published.ids = both(1);
        let policies = Policies::from([(key.clone(), shared.clone())]);
        assert_eq!(EgressIdAllocator::default().allocate(&policies)[&key].all().count(), 2, "one is too few");
        Arc::make_mut(&mut shared).published.ids = ids(7, 8);
        assert_eq!(numbering.allocate(&Policies::from([(key.clone(), shared)]))[&key], ids(7, 8));
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
