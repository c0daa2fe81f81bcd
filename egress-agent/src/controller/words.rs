//! What nodes' words say of open hand-overs: which are over for the old node, and who is ready for them. Pure, but for what
//! [`Heard`] remembers of time.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::assignment::Nodes;
use super::reach::Reach;
use crate::model::ledger::{HandOver, Ledger, Words};
use crate::model::node::Prepared;

/// How long the status waits for a new node that is ready to hear the old node's word, which the leader has heard.
const HEIRS_TIME: Duration = Duration::from_secs(1);

/// Since when old nodes' words about hand-overs, by number, wait for the new node.
#[derive(Debug, Default)]
pub(super) struct Heard(BTreeMap<u64, Instant>);

/// The words at one time, about hand-overs by address and number.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Said {
    /// Old nodes that have let go, and need not be waited for.
    pub(super) released: BTreeSet<(IpAddr, u64)>,
    /// The nodes that are ready for them.
    pub(super) prepared: BTreeMap<(IpAddr, u64), BTreeSet<String>>,
    /// When the next new node is waited for no longer.
    pub(super) look_again: Option<Instant>,
}

impl Heard {
    pub(super) fn listen(&mut self, ledger: &Ledger, nodes: &Nodes, reach: &Reach, now: Instant) -> Said {
        let mut said = Said::default();
        for (name, node) in nodes {
            for (address, Prepared(number, ..)) in &node.prepared {
                said.prepared.entry((*address, *number)).or_default().insert(name.clone());
            }
        }
        let mut waiting = BTreeMap::new();
        for (address, record) in &ledger.records.open {
            // By the way of the API server, or by that of probes.
            let says = |words: Option<&Words>| words.is_some_and(|words| words.get(address) == Some(&record.number));
            if !says(nodes.get(&record.from).map(|node| &node.released)) {
                // Who speaks by probes alone has heard of no other node, and passes nothing on.
                if says(reach.released.get(&record.from)) {
                    said.released.insert((*address, record.number));
                }
                continue;
            }
            // What comes before a new node that is getting ready is there goes by the old one, so that one is waited for; not
            // without end, since it may never hear it.
            let since = self.0.get(&record.number).copied().unwrap_or(now);
            // Also once it is over, or it would be waited for anew.
            waiting.insert(record.number, since);
            let end = since + HEIRS_TIME;
            if awaits(nodes, address, record) && now < end {
                said.look_again = Some(said.look_again.map_or(end, |other| other.min(end)));
            } else {
                said.released.insert((*address, record.number));
            }
        }
        self.0 = waiting;
        said
    }
}

/// Whether the new node is ready and does not take other nodes' packets yet.
fn awaits(nodes: &Nodes, address: &IpAddr, record: &HandOver) -> bool {
    let heir = record.to.as_ref().and_then(|to| nodes.get(to)?.prepared.get(address));
    heir.is_some_and(|Prepared(number, _, is_open)| *number == record.number && !is_open)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::model::samples::ip;
    use crate::model::view::Node;

    const A: &str = "172.18.0.100";

    fn nodes(released: u64, prepared: Option<Prepared>) -> Nodes {
        let old = Node { released: BTreeMap::from([(ip(A), released)]), ..Node::default() };
        let new = Node { prepared: prepared.map(|word| (ip(A), word)).into_iter().collect(), ..Node::default() };
        [("n1".to_owned(), Arc::new(old)), ("n2".to_owned(), Arc::new(new))].into()
    }

    fn ledger() -> Ledger {
        let mut ledger = Ledger { leases: true, ..Ledger::default() };
        ledger.records.open.insert(ip(A), HandOver { number: 7, from: "n1".into(), to: Some("n2".into()) });
        ledger
    }

    #[test]
    fn a_new_node_that_is_ready_is_waited_for_until_it_has_heard_and_not_for_ever() {
        let (ledger, reach, start) = (ledger(), Reach::default(), Instant::now());
        let ready = |is_open| Some(Prepared(7, "n1".into(), is_open));
        let over = BTreeSet::from([(ip(A), 7)]);
        let mut heard = Heard::default();
        let mut at = |nodes: Nodes, ms| {
            let said = heard.listen(&ledger, &nodes, &reach, start + Duration::from_millis(ms));
            (said.released == over, said.look_again)
        };
        let end = Some(start + Duration::from_millis(1_100));
        assert_eq!(at(nodes(6, ready(false)), 0), (false, None), "a word about another hand-over");
        assert_eq!(at(nodes(7, ready(false)), 100), (false, end));
        assert_eq!(at(nodes(7, ready(false)), 1_099), (false, end), "since the word was heard");
        assert_eq!(at(nodes(7, ready(false)), 1_100), (true, None));
        assert_eq!(at(nodes(7, ready(false)), 1_200), (true, None), "nor is it begun anew");
        for prepared in [None, ready(true), Some(Prepared(6, "n1".into(), false))] {
            let mut heard = Heard::default();
            let said = heard.listen(&ledger, &nodes(7, prepared), &reach, start);
            assert_eq!((said.released, said.look_again), (over.clone(), None));
        }
    }

    #[test]
    fn a_word_by_probes_waits_for_nobody_and_who_is_ready_is_known_by_name() {
        let reach =
            Reach { released: BTreeMap::from([("n1".to_owned(), BTreeMap::from([(ip(A), 7)]))]), ..Reach::default() };
        let all = nodes(6, Some(Prepared(7, "n1".into(), false)));
        let said = Heard::default().listen(&ledger(), &all, &reach, Instant::now());
        assert_eq!(said.released, BTreeSet::from([(ip(A), 7)]));
        assert_eq!(said.prepared, BTreeMap::from([((ip(A), 7), BTreeSet::from(["n2".to_owned()]))]));
    }
}
