//! Addresses that move between nodes: the events, and the duration of a failover from the last good sign of a gone node
//! to the status that assigns its address to another. Pure. An address may be without a node in between, while its
//! lease expires.
//!
//! A leader that did not observe the beginning does not report the end.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

use crate::model::node::Node;
use crate::model::policy::{EligibleNodes, Item};

#[derive(Debug, Default)]
pub struct Moves {
    /// Addresses that have left a node.
    open: BTreeMap<String, Departure>,
}

#[derive(Clone, Debug)]
struct Departure {
    node: String,
    reason: MoveReason,
    /// When the node was last well, if it counts as gone.
    last_serving: Option<Instant>,
}

/// Why an address leaves a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MoveReason {
    Deleted,
    Unreachable,
    NotReady,
    NotLabelled,
    /// The object does not allow it any more.
    NotNamed,
    Drained,
    /// The policy was edited, or other policies or nodes changed.
    Other,
}

impl MoveReason {
    /// `is_unreachable`: it counts as gone.
    pub fn of(node: Option<&Node>, eligible: &EligibleNodes, is_unreachable: bool) -> Self {
        match node {
            None => Self::Deleted,
            Some(_) if is_unreachable => Self::Unreachable,
            Some(node) if !node.ready => Self::NotReady,
            Some(node) if !eligible.has(node) && *eligible != EligibleNodes::Labelled => Self::NotNamed,
            Some(node) if !eligible.has(node) => Self::NotLabelled,
            Some(node) if node.drained => Self::Drained,
            Some(_) => Self::Other,
        }
    }
}

/// An address that has another node now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    address: String,
    from: String,
    to: String,
    reason: MoveReason,
    /// Only of a failover.
    pub failover_duration: Option<Duration>,
}

impl fmt::Display for Move {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, from, to, reason, .. } = self;
        let which = match reason {
            MoveReason::Deleted => ", which is deleted,",
            MoveReason::Unreachable => ", which does not answer,",
            MoveReason::NotReady => ", which is not Ready,",
            MoveReason::NotLabelled => ", which has the label no more,",
            MoveReason::NotNamed => ", which the object does not allow any more,",
            MoveReason::Drained => ", which is drained,",
            MoveReason::Other => "",
        };
        write!(f, "egress IP {address} has moved from node {from}{which} to node {to}")
    }
}

impl Moves {
    /// Records a written status. `why` gives the reason for a node, and when it was last well if it counts as gone.
    pub fn record(
        &mut self,
        (before, after): (&[Item], &[Item]),
        reason: impl Fn(&str) -> (MoveReason, Option<Instant>),
        now: Instant,
    ) -> Vec<Move> {
        for Item { node, egress_ip } in before.iter().filter(|item| !after.contains(item)) {
            let (reason, last_serving) = reason(node);
            self.open.insert(egress_ip.clone(), Departure { node: node.clone(), reason, last_serving });
        }
        let mut moves = Vec::new();
        for Item { node, egress_ip } in after.iter().filter(|item| !before.contains(item)) {
            let Some(Departure { node: from, reason, last_serving }) = self.open.remove(egress_ip) else { continue };
            // Back at the same node: it never moved.
            if from != *node {
                let took = last_serving.map(|last_serving| now.saturating_duration_since(last_serving));
                moves.push(Move {
                    address: egress_ip.clone(),
                    from,
                    to: node.clone(),
                    reason,
                    failover_duration: took,
                });
            }
        }
        moves
    }

    /// The policy is gone, or this controller no longer leads.
    pub fn forget(&mut self, is_gone: impl Fn(&str) -> bool) {
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
    fn a_failover_begins_with_the_last_good_sign_and_ends_with_another_node() {
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        let reason =
            |node: &str| if node == "n1" { (MoveReason::Unreachable, Some(start)) } else { (MoveReason::Other, None) };
        let mut moves = Moves::default();
        let texts =
            |moves: Vec<Move>| moves.iter().map(|one| (one.to_string(), one.failover_duration)).collect::<Vec<_>>();
        let (both, none) = (items(&[("a", "n1"), ("b", "n1"), ("c", "n2")]), items(&[("c", "n2")]));
        assert!(moves.record((&both, &none), reason, at(1_000)).is_empty(), "not given to another yet");
        let one = items(&[("a", "n3"), ("c", "n2")]);
        let moved = "egress IP a has moved from node n1, which does not answer, to node n3".to_owned();
        let expected = (moved, Some(Duration::from_millis(1_700)));
        assert_eq!(texts(moves.record((&none, &one), reason, at(1_700))), [expected]);
        let back = items(&[("a", "n3"), ("b", "n1"), ("c", "n2")]);
        assert!(moves.record((&one, &back), reason, at(5_000)).is_empty(), "it is back where it was");
        // At once, and by an edit.
        let edited = items(&[("a", "n2"), ("b", "n3"), ("c", "n2")]);
        let texts = texts(moves.record((&back, &edited), reason, at(6_000)));
        assert_eq!(texts[0], ("egress IP a has moved from node n3 to node n2".to_owned(), None));
        assert_eq!((texts.len(), texts[1].1), (2, Some(Duration::from_secs(6))));
        moves.record((&items(&[("b", "n1")]), &none), reason, at(7_000));
        moves.forget(|address| address == "b");
        assert!(moves.record((&none, &items(&[("b", "n3")])), reason, at(8_000)).is_empty());
    }

    #[test]
    fn the_reason_of_a_move_is_that_of_the_old_node() {
        let last_serving = Node { ready: true, assignable: true, ..Node::default() };
        for (node, is_unreachable, reason) in [
            (None, true, MoveReason::Deleted),
            (Some(last_serving.clone()), true, MoveReason::Unreachable),
            (Some(Node { ready: false, ..last_serving.clone() }), false, MoveReason::NotReady),
            (Some(Node { assignable: false, ..last_serving.clone() }), false, MoveReason::NotLabelled),
            (Some(Node { drained: true, ..last_serving.clone() }), false, MoveReason::Drained),
            (Some(last_serving), false, MoveReason::Other),
        ] {
            assert_eq!(MoveReason::of(node.as_ref(), &EligibleNodes::Labelled, is_unreachable), reason);
        }
    }
}
