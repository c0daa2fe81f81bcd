//! Allocation of egress IDs. Pure, except for its memory.
//!
//! IDs are allocated in cyclic order, so that a freed one is reused only after all others. The standby observes too, so
//! that the next leader continues where the last one stopped, and knows the ID of an object whose annotation was
//! removed.

use std::collections::{BTreeMap, BTreeSet};

use egress_common::abi::MAX_EGRESS_ID;

use crate::allocation::Objects;
use crate::model::state::EgressId;
use crate::selection::{by_rank, egress_ids};

#[derive(Debug, Default)]
pub struct EgressIdAllocator {
    /// By the object's UID: a new object of an old name is another object.
    remembered: BTreeMap<String, EgressId>,
    last: u32,
}

impl EgressIdAllocator {
    /// Records the IDs in use.
    pub fn observe(&mut self, objects: &Objects) {
        let ids = egress_ids(objects);
        let alive: BTreeSet<&str> = objects.values().map(|object| object.uid.as_str()).collect();
        self.remembered.retain(|uid, _| alive.contains(uid.as_str()));
        let first = self.last == 0;
        for (name, id) in ids {
            let Some(object) = objects.get(&name) else { continue };
            if self.remembered.insert(object.uid.clone(), id) != Some(id) && (first || self.is_ahead(id)) {
                self.last = if first { self.last.max(id.0) } else { id.0 };
            }
        }
    }

    /// The current or new ID of each object.
    pub fn number(&mut self, objects: &Objects) -> BTreeMap<String, EgressId> {
        self.observe(objects);
        let mut numbers = egress_ids(objects);
        let mut given: BTreeSet<EgressId> = numbers.values().copied().collect();
        let mut used = given.clone();
        used.extend(self.remembered.values());
        for object in by_rank(objects.values()) {
            if numbers.contains_key(&object.name) {
                continue;
            }
            let own = self.remembered.get(&object.uid).copied();
            let Some(id) = own.filter(|id| !given.contains(id)).or_else(|| self.next(&used)) else {
                continue;
            };
            used.insert(id);
            given.insert(id);
            self.remembered.insert(object.uid.clone(), id);
            numbers.insert(object.name.clone(), id);
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
    use crate::model::view::{Conditions, EgressObject};

    fn object(name: &str, created: i64, id: Option<u32>) -> (String, Arc<EgressObject>) {
        let object = EgressObject {
            name: name.into(),
            uid: format!("uid-{name}"),
            resource_version: "1".into(),
            generation: None,
            created,
            listed: Vec::new(),
            selects: None,
            id: id.map(EgressId),
            no_eligible_node: None,
            drop_unassigned: false,
            has_annotations: false,
            has_status: false,
            has_items: false,
            selected_pods: None,
            items: Vec::new(),
            conditions: Conditions::default(),
            unreadable: Vec::new(),
        };
        (name.to_owned(), Arc::new(object))
    }

    #[test]
    fn ids_are_cyclic_and_a_freed_one_is_not_the_next() {
        let mut numbering = EgressIdAllocator::default();
        let two = Objects::from([object("a", 1, None), object("b", 2, None)]);
        let numbers = numbering.number(&two);
        assert_eq!((numbers["a"], numbers["b"]), (EgressId(1), EgressId(2)));
        let another = Objects::from([object("a", 1, Some(1)), object("c", 3, None)]);
        assert_eq!(numbering.number(&another)["c"], EgressId(3));
    }

    #[test]
    fn the_older_object_keeps_a_duplicate_and_a_removed_id_is_restored() {
        let mut numbering = EgressIdAllocator::default();
        let same = Objects::from([object("young", 2, Some(5)), object("old", 1, Some(5))]);
        let numbers = numbering.number(&same);
        assert_eq!((numbers["old"], numbers["young"]), (EgressId(5), EgressId(6)));
        let wiped = Objects::from([object("young", 2, Some(6)), object("old", 1, None)]);
        assert_eq!(numbering.number(&wiped)["old"], EgressId(5));
    }

    #[test]
    fn a_standby_continues_after_the_ids_that_it_saw_and_wraps_around() {
        let mut standby = EgressIdAllocator::default();
        standby.observe(&Objects::from([object("a", 1, Some(7))]));
        standby.observe(&Objects::from([object("a", 1, Some(7)), object("b", 2, Some(9))]));
        assert_eq!(standby.number(&Objects::from([object("c", 3, None)]))["c"], EgressId(10));
        let mut at_end = EgressIdAllocator::default();
        let objects = Objects::from([object("a", 1, Some(MAX_EGRESS_ID)), object("b", 2, None)]);
        assert_eq!(at_end.number(&objects)["b"], EgressId(1));
    }
}
