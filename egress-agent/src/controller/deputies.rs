//! Who looks at the Lease often enough to lead at once when the leader is lost. Pure.
//!
//! Every agent may lead, but in a large cluster not all of them need to watch for it: a few do, the same ones by everybody's
//! reckoning, chosen among nodes that are ready, and have had an agent. The others look now and then, so that somebody leads even where leader and
//! deputies are lost together.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::assignment::hash;
use crate::model::view::{Node, Update};

/// With four looks a second each: twenty requests a second, whatever the size of the cluster.
const DEPUTIES: usize = 5;

/// Nodes in the order in which they are deputies.
#[derive(Debug, Default)]
pub struct Deputies {
    order: BTreeSet<(Place, String)>,
    places: BTreeMap<String, Place>,
}

/// Those that are not ready come last, and before them those whose networks nobody has published: no agent may run there.
/// The others in an order that has nothing to do with their names.
type Place = (bool, bool, u64);

impl Deputies {
    pub fn apply(&mut self, update: &Update<String, Arc<Node>>) {
        match update {
            Update::Replaced(nodes) => {
                *self = Self::default();
                nodes.iter().for_each(|(name, node)| self.enter(name, node));
            }
            Update::Changed(name, node) => self.enter(name, node),
            Update::Removed(name) => self.leave(name),
        }
    }

    pub fn has(&self, name: &str) -> bool {
        self.order.iter().take(DEPUTIES).any(|(_, deputy)| deputy == name)
    }

    fn enter(&mut self, name: &str, node: &Node) {
        let place = (!node.ready, !node.networks_known, hash(name.as_bytes()));
        if self.places.get(name) != Some(&place) {
            self.leave(name);
            self.places.insert(name.to_owned(), place);
            self.order.insert((place, name.to_owned()));
        }
    }

    fn leave(&mut self, name: &str) {
        if let Some(place) = self.places.remove(name) {
            self.order.remove(&(place, name.to_owned()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str, ready: bool) -> (String, Arc<Node>) {
        (name.to_owned(), Arc::new(Node { name: name.to_owned(), ready, networks_known: true, ..Node::default() }))
    }

    #[test]
    fn a_few_that_are_ready_are_deputies_and_others_take_their_places() {
        let mut deputies = Deputies::default();
        let names: Vec<String> = (0..1000).map(|i| format!("node{i}")).collect();
        deputies.apply(&Update::Replaced(names.iter().map(|name| node(name, true)).collect()));
        let chosen = |deputies: &Deputies| names.iter().filter(|name| deputies.has(name)).cloned().collect::<Vec<_>>();
        let first = chosen(&deputies);
        assert_eq!(first.len(), DEPUTIES);
        let (lost, gone) = (&first[0], &first[1]);
        let (name, not_ready) = node(lost, false);
        deputies.apply(&Update::Changed(name, not_ready));
        deputies.apply(&Update::Removed(gone.clone()));
        let second = chosen(&deputies);
        assert_eq!(second.len(), DEPUTIES);
        assert!(!second.contains(lost) && !second.contains(gone));
        assert!(first[2..].iter().all(|name| second.contains(name)));
        let (name, ready) = node(lost, true);
        deputies.apply(&Update::Changed(name, ready));
        assert!(deputies.has(lost));
    }

    #[test]
    fn nodes_where_no_agent_has_run_are_no_deputies_while_there_are_others() {
        let mut deputies = Deputies::default();
        let without = |name: &str| {
            let (name, node) = node(name, true);
            (name, Arc::new(Node { networks_known: false, ..Arc::unwrap_or_clone(node) }))
        };
        let all = (0..20).map(|i| without(&format!("new{i}"))).chain((0..3).map(|i| node(&format!("old{i}"), true)));
        deputies.apply(&Update::Replaced(all.chain([node("gone", false)]).collect()));
        assert!((0..3).all(|i| deputies.has(&format!("old{i}"))));
        assert_eq!(
            (0..20).filter(|i| deputies.has(&format!("new{i}"))).count(),
            DEPUTIES - 3,
            "they come before nobody"
        );
        assert!(!deputies.has("gone"));
    }

    #[test]
    fn all_of_a_small_cluster_are_deputies_ready_or_not() {
        let mut deputies = Deputies::default();
        for (name, ready) in [("a", true), ("b", false), ("c", true)] {
            let (name, node) = node(name, ready);
            deputies.apply(&Update::Changed(name, node));
        }
        assert!(["a", "b", "c"].iter().all(|name| deputies.has(name)));
        assert!(!deputies.has("unknown"));
    }
}
