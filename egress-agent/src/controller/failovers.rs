//! How long a failover takes: from the last good sign of a node that counts as gone to the status that gives its address to
//! another. Pure. An address may be without a node in between, while its lease runs out.
//!
//! A leader that has not seen the beginning says nothing of the end.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::model::view::Item;

#[derive(Debug, Default)]
pub(super) struct Failovers {
    /// Addresses that have left a node that is gone, with when that was well last.
    open: BTreeMap<String, (String, Instant)>,
}

impl Failovers {
    /// An object's status has been written. `lost`: nodes that are gone. How long what has ended took.
    pub(super) fn note(
        &mut self,
        (before, after): (&[Item], &[Item]),
        lost: &BTreeMap<String, Instant>,
        now: Instant,
    ) -> Vec<Duration> {
        for Item { node, egress_ip } in before.iter().filter(|item| !after.contains(item)) {
            if let Some(well) = lost.get(node) {
                self.open.insert(egress_ip.clone(), (node.clone(), *well));
            }
        }
        let mut took = Vec::new();
        for Item { node, egress_ip } in after.iter().filter(|item| !before.contains(item)) {
            let Some((former, well)) = self.open.remove(egress_ip) else { continue };
            // Back where it was: it never moved.
            if former != *node {
                took.push(now.saturating_duration_since(well));
            }
        }
        took
    }

    /// The object is gone, or this agent leads no more.
    pub(super) fn forget(&mut self, is_gone: impl Fn(&str) -> bool) {
        self.open.retain(|address, _| !is_gone(address));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn items(pairs: &[(&str, &str)]) -> Vec<Item> {
        pairs.iter().map(|(ip, node)| Item { node: (*node).into(), egress_ip: (*ip).into() }).collect()
    }

    #[test]
    fn it_begins_with_the_last_good_sign_and_ends_with_another_node() {
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        let lost = BTreeMap::from([("n1".to_owned(), start)]);
        let mut failovers = Failovers::default();
        let (both, none) = (items(&[("a", "n1"), ("b", "n1"), ("c", "n2")]), items(&[("c", "n2")]));
        assert!(failovers.note((&both, &none), &lost, at(1_000)).is_empty(), "not given to another yet");
        let one = items(&[("a", "n3"), ("c", "n2")]);
        assert_eq!(failovers.note((&none, &one), &lost, at(1_700)), [Duration::from_millis(1_700)]);
        let back = items(&[("a", "n3"), ("b", "n1"), ("c", "n2")]);
        assert!(failovers.note((&one, &back), &lost, at(5_000)).is_empty(), "it is back where it was");
        // At once, and by an edit.
        let edited = items(&[("a", "n2"), ("b", "n3"), ("c", "n2")]);
        assert_eq!(failovers.note((&back, &edited), &lost, at(6_000)), [Duration::from_secs(6)]);
        failovers.note((&items(&[("b", "n1")]), &none), &lost, at(7_000));
        failovers.forget(|address| address == "b");
        assert!(failovers.note((&none, &items(&[("b", "n3")])), &lost, at(8_000)).is_empty());
    }
}
