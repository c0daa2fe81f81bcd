//! Acknowledgements of open hand-overs: which old nodes have released their addresses, and which nodes are ready for
//! them. Pure, except for the times that [`AcknowledgementReader`] remembers.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use crate::allocation::Nodes;
use crate::model::ledger::{Acknowledgements, Ledger};
use crate::model::node::Prepared;
use crate::node_health::NodeHealth;

/// How long the status waits for a ready new node to see the old node's acknowledgement, which the leader has received.
const NEW_OWNER_PATIENCE: Duration = Duration::from_secs(1);

/// How much earlier an acknowledgement may arrive by a probe than by the API server.
const PROBE_LEAD: Duration = Duration::from_millis(150);

/// Since when acknowledgements of old nodes, by number, wait for the new node.
#[derive(Debug, Default)]
pub struct AcknowledgementReader {
    since: BTreeMap<u64, Instant>,
}

/// The acknowledgements at one time, by address and number of the hand-over.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReceivedAcknowledgements {
    /// Released hand-overs that need not wait any longer.
    pub released: BTreeSet<(IpAddr, u64)>,
    /// The nodes that old nodes have handed these over to, by their EgressNode objects.
    pub new_owners: BTreeMap<(IpAddr, u64), Option<String>>,
    /// The nodes that are ready for these, among the present and former new nodes of the hand-over: no other can have
    /// received the address, whatever its agent's token writes.
    pub prepared: BTreeMap<(IpAddr, u64), BTreeSet<String>>,
    /// When the wait for the next new node ends.
    pub requeue_at: Option<Instant>,
}

impl AcknowledgementReader {
    pub fn read(
        &mut self,
        ledger: &Ledger,
        nodes: &Nodes,
        node_health: &NodeHealth,
        now: Instant,
    ) -> ReceivedAcknowledgements {
        let mut received = ReceivedAcknowledgements::default();
        for (name, node) in nodes {
            for (address, Prepared(number, ..)) in &node.prepared {
                let record = ledger.records.open.get(address).filter(|record| record.number == *number);
                if record.is_some_and(|record| ledger.has_named(record, name)) {
                    received.prepared.entry((*address, *number)).or_default().insert(name.clone());
                }
            }
        }
        let mut waiting_since = BTreeMap::new();
        for (address, record) in &ledger.records.open {
            let target_has_changed = ledger.former_targets.contains_key(&record.number);
            let acknowledges =
                |all: Option<&Acknowledgements>| all.is_some_and(|all| all.get(address) == Some(&record.number));
            let old = nodes.get(&record.from).filter(|old| acknowledges(Some(&old.released)));
            if old.is_none() && !acknowledges(node_health.released.get(&record.from)) {
                continue;
            }
            let since = self.since.get(&record.number).copied().unwrap_or(now);
            // Also after the wait, or it would begin again.
            waiting_since.insert(record.number, since);
            let new_owner = record.to.as_ref().and_then(|to| nodes.get(to)?.prepared.get(address));
            let new_owner = new_owner.filter(|Prepared(number, ..)| *number == record.number);
            let (waits, end) = match old.map(|old| old.given.get(address)) {
                // Until the new node is fully ready, packets reach it through the old one, so it is waited for, but not
                // forever: it may never see the acknowledgement.
                Some(given) => {
                    received.new_owners.insert((*address, record.number), given.cloned());
                    let is_given = given.is_some() && given == record.to.as_ref();
                    (is_given && new_owner.is_some_and(|Prepared(.., is_open)| !is_open), since + NEW_OWNER_PATIENCE)
                }
                // Only probes report it, which may just have been faster. Either the full acknowledgement follows, or
                // the old node knows of no other node and forwards nothing. It may also have handed over to a former
                // new node.
                None => (new_owner.is_some() || target_has_changed, since + PROBE_LEAD),
            };
            if waits && now < end {
                received.requeue_at = Some(received.requeue_at.map_or(end, |other| other.min(end)));
            } else {
                received.released.insert((*address, record.number));
            }
        }
        self.since = waiting_since;
        received
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::model::ledger::HandOver;
    use crate::model::node::Node;
    use crate::model::samples::ip;

    const A: &str = "172.18.0.100";

    fn nodes(released: u64, prepared: Option<Prepared>) -> Nodes {
        given_to(released, Some("n2"), prepared)
    }

    fn given_to(released: u64, to: Option<&str>, prepared: Option<Prepared>) -> Nodes {
        let given = to.map(|to| (ip(A), to.to_owned())).into_iter().collect();
        let old = Node { released: BTreeMap::from([(ip(A), released)]), given, ..Node::default() };
        let new =
            Node { prepared: prepared.map(|prepared| (ip(A), prepared)).into_iter().collect(), ..Node::default() };
        [("n1".to_owned(), Arc::new(old)), ("n2".to_owned(), Arc::new(new))].into()
    }

    fn ledger() -> Ledger {
        let mut ledger = Ledger::default();
        ledger.records.open.insert(ip(A), HandOver { number: 7, from: "n1".into(), to: Some("n2".into()) });
        ledger
    }

    #[test]
    fn a_ready_new_node_is_waited_for_until_it_is_open_but_not_forever() {
        let (ledger, node_health, start) = (ledger(), NodeHealth::default(), Instant::now());
        let ready = |is_open| Some(Prepared(7, "n1".into(), is_open));
        let over = BTreeSet::from([(ip(A), 7)]);
        let mut reader = AcknowledgementReader::default();
        let mut at = |nodes: Nodes, ms| {
            let received = reader.read(&ledger, &nodes, &node_health, start + Duration::from_millis(ms));
            (received.released == over, received.requeue_at)
        };
        let end = Some(start + Duration::from_millis(1_100));
        assert_eq!(at(nodes(6, ready(false)), 0), (false, None), "an acknowledgement of another hand-over");
        assert_eq!(at(nodes(7, ready(false)), 100), (false, end));
        assert_eq!(at(nodes(7, ready(false)), 1_099), (false, end), "since the acknowledgement was received");
        assert_eq!(at(nodes(7, ready(false)), 1_100), (true, None));
        assert_eq!(at(nodes(7, ready(false)), 1_200), (true, None), "nor does it start again");
        for prepared in [None, ready(true), Some(Prepared(6, "n1".into(), false))] {
            let mut reader = AcknowledgementReader::default();
            let received = reader.read(&ledger, &nodes(7, prepared), &node_health, start);
            assert_eq!((received.released, received.requeue_at), (over.clone(), None));
        }
    }

    #[test]
    fn a_node_that_has_not_received_the_address_is_not_waited_for() {
        let ready = Some(Prepared(7, "n1".into(), false));
        for to in [None, Some("n3")] {
            let nodes = given_to(7, to, ready.clone());
            let received =
                AcknowledgementReader::default().read(&ledger(), &nodes, &NodeHealth::default(), Instant::now());
            assert_eq!((received.released, received.requeue_at), (BTreeSet::from([(ip(A), 7)]), None));
            assert_eq!(received.new_owners, BTreeMap::from([((ip(A), 7), to.map(str::to_owned))]));
        }
    }

    /// Any agent's token can write this, and the address would wait for that node.
    #[test]
    fn a_node_that_was_never_named_is_not_ready() {
        let ready =
            |number| Node { prepared: [(ip(A), Prepared(number, "n1".into(), true))].into(), ..Node::default() };
        let nodes = |number| ["n2", "n3", "n4"].map(|name| (name.to_owned(), Arc::new(ready(number)))).into();
        let mut ledger = ledger();
        let read_from = |ledger: &Ledger, number| {
            AcknowledgementReader::default().read(ledger, &nodes(number), &NodeHealth::default(), Instant::now())
        };
        let of = |names: &[&str]| BTreeMap::from([((ip(A), 7), names.iter().map(|&name| name.to_owned()).collect())]);
        assert_eq!(read_from(&ledger, 7).prepared, of(&["n2"]));
        ledger.record(ip(A), HandOver { number: 7, from: "n1".into(), to: None });
        ledger.record(ip(A), HandOver { number: 7, from: "n1".into(), to: Some("n3".into()) });
        assert_eq!(read_from(&ledger, 7).prepared, of(&["n2", "n3"]));
        assert_eq!(read_from(&ledger, 8).prepared, BTreeMap::new());
        ledger.record(ip(A), HandOver { number: 9, from: "n3".into(), to: None });
        assert!(ledger.former_targets.is_empty(), "another hand-over");
    }

    /// Otherwise the status would be written before the new node takes other nodes' packets.
    #[test]
    fn an_early_acknowledgement_by_probes_waits_for_the_full_one() {
        let node_health = NodeHealth {
            released: BTreeMap::from([("n1".to_owned(), BTreeMap::from([(ip(A), 7)]))]),
            ..NodeHealth::default()
        };
        let (ledger, start, mut reader) = (ledger(), Instant::now(), AcknowledgementReader::default());
        let ready = Some(Prepared(7, "n1".into(), false));
        let mut at = |nodes: Nodes, ms| {
            let received = reader.read(&ledger, &nodes, &node_health, start + Duration::from_millis(ms));
            assert_eq!(received.prepared, BTreeMap::from([((ip(A), 7), BTreeSet::from(["n2".to_owned()]))]));
            (received.released.len(), received.new_owners.len(), received.requeue_at)
        };
        let until = |ms| Some(start + Duration::from_millis(ms));
        assert_eq!(at(given_to(6, None, ready.clone()), 0), (0, 0, until(150)));
        assert_eq!(
            at(nodes(7, ready.clone()), 20),
            (0, 1, until(1_000)),
            "it has come, and the new node is not there yet"
        );
        assert_eq!(at(given_to(6, None, ready.clone()), 149), (0, 0, until(150)));
        assert_eq!(at(given_to(6, None, ready), 150), (1, 0, None), "acknowledges by probes alone");
        // Another new node was named before, and may have received the address.
        let mut reader = AcknowledgementReader::default();
        let mut changed = ledger.clone();
        changed.record(ip(A), HandOver { number: 7, from: "n1".into(), to: Some("n3".into()) });
        assert_eq!(changed.former_targets, BTreeMap::from([(7, ["n2".to_owned()].into())]));
        let received = reader.read(&changed, &given_to(6, None, None), &node_health, start);
        assert_eq!((received.released.len(), received.requeue_at), (0, until(150)));
        // Without a ready node there is none to wait for.
        let received = AcknowledgementReader::default().read(&ledger, &given_to(6, None, None), &node_health, start);
        assert_eq!((received.released.len(), received.requeue_at), (1, None));
    }
}
