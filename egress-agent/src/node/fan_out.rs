//! Distributes the changes of the cluster to the parts of an agent.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use futures::{Stream, StreamExt};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::change_queue::ChangeSender;
use egress_core::model::ledger::Ledger;
use egress_core::model::node::{Node, Prepared, Readiness};
use egress_core::model::policy::NamingPolicies;
use egress_core::model::view::{Change, Update};
use egress_datapath::overlay::endpoints::Endpoints;

/// Where changes go.
pub(super) struct Listeners {
    pub(super) reconciler: ChangeSender,
    /// The Node of this agent's node.
    pub(super) own_node: watch::Sender<Option<Arc<Node>>>,
    /// Whether this node may host egress IPs.
    pub(super) is_egress_node: watch::Sender<bool>,
    pub(super) naming: NamingPolicies,
    /// What this node is ready to take over.
    pub(super) readiness: watch::Receiver<Readiness>,
    pub(super) node_name: String,
    /// Nodes with all their acknowledgements: one that is filtered out now may concern this node later.
    pub(super) acknowledging: BTreeMap<String, Arc<Node>>,
    pub(super) endpoints: Endpoints,
    /// The latest version of the ledger.
    pub(super) ledger: watch::Sender<Arc<Ledger>>,
}

impl Listeners {
    fn distribute(&mut self, change: Change) {
        let own = match &change {
            Change::Nodes(Update::Changed(name, node)) if *name == self.node_name => Some(node),
            Change::Nodes(Update::Replaced(nodes)) => nodes.get(&self.node_name),
            _ => None,
        };
        if let Some(own) = own {
            self.own_node.send_if_modified(|known| known.replace(own.clone()).as_ref() != Some(own));
        }
        let has_other_nodes = match &change {
            Change::Policies(update) => self.naming.apply(update.clone()),
            _ => own.is_some(),
        };
        if has_other_nodes {
            let is = self.own_node.borrow().as_ref().is_some_and(|own| self.naming.egress_nodes().has(own));
            self.is_egress_node.send_if_modified(|known| std::mem::replace(known, is) != is);
        }
        if let Change::Nodes(update) = &change {
            self.endpoints.apply(update);
            self.note_acknowledging(update);
        }
        if let Change::Ledger(ledger) = &change {
            self.ledger.send_replace(ledger.clone());
        }
        self.put(change.clone());
        // A new record may name this node after the old owner has already acknowledged.
        if let Change::Ledger(ledger) = change {
            let records = ledger.records.open.values().filter(|record| record.to.as_ref() == Some(&self.node_name));
            let from: BTreeSet<&String> = records.map(|record| &record.from).collect();
            for (name, node) in from.into_iter().filter_map(|from| self.acknowledging.get_key_value(from)) {
                self.put(Change::Nodes(Update::Changed(name.clone(), node.clone())));
            }
        }
    }

    fn note_acknowledging(&mut self, update: &Update<String, Arc<Node>>) {
        let acknowledges = |node: &Node| !node.released.is_empty();
        match update {
            Update::Replaced(nodes) => {
                let acknowledging = nodes.iter().filter(|(_, node)| acknowledges(node));
                self.acknowledging = acknowledging.map(|(name, node)| (name.clone(), node.clone())).collect();
            }
            Update::Changed(name, node) if acknowledges(node) => {
                drop(self.acknowledging.insert(name.clone(), node.clone()))
            }
            Update::Changed(name, _) | Update::Removed(name) => drop(self.acknowledging.remove(name)),
        }
    }

    /// Removes acknowledgements of hand-overs that do not concern this node; each would cause a full computation.
    fn put(&self, change: Change) {
        let (ready_for, ledger) = (self.ready_for(), self.ledger.borrow().clone());
        let is_expected = |address: &IpAddr, from: &str| {
            let record = ledger.records.open.get(address);
            record.is_some_and(|record| record.from == from && record.to.as_ref() == Some(&self.node_name))
        };
        self.reconciler.put(without_foreign_acknowledgements(change, &|node| {
            let Node { name, released, given, .. } = node;
            released.retain(|address, _| ready_for.contains(address) || is_expected(address, name));
            given.retain(|address, _| released.contains_key(address));
            node.prepared.retain(|_, Prepared(_, from, _)| *from == self.node_name);
        }));
    }

    /// What this node has published that it is ready for, in this run or before.
    fn ready_for(&self) -> BTreeSet<IpAddr> {
        let mut ready: BTreeSet<IpAddr> = self.readiness.borrow().prepared.keys().copied().collect();
        ready.extend(self.own_node.borrow().iter().flat_map(|own| own.prepared.keys()));
        ready
    }
}

/// The change, with `cut` applied to nodes that carry acknowledgements.
fn without_foreign_acknowledgements(change: Change, cut: &dyn Fn(&mut Node)) -> Change {
    let without = |node: Arc<Node>| match node.released.is_empty() && node.prepared.is_empty() {
        true => node,
        false => {
            let mut node = Arc::unwrap_or_clone(node);
            cut(&mut node);
            Arc::new(node)
        }
    };
    match change {
        Change::Nodes(Update::Changed(name, node)) => Change::Nodes(Update::Changed(name, without(node))),
        Change::Nodes(Update::Replaced(nodes)) => {
            Change::Nodes(Update::Replaced(nodes.into_iter().map(|(name, node)| (name, without(node))).collect()))
        }
        other => other,
    }
}

/// Hands every change to all listeners.
pub(super) async fn fan_out(changes: impl Stream<Item = Change>, mut listeners: Listeners, stop: CancellationToken) {
    let mut changes = std::pin::pin!(changes.take_until(stop.cancelled_owned()));
    while let Some(change) = changes.next().await {
        listeners.distribute(change);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::change_queue;
    use egress_core::model::ledger::{Acknowledgements, HandOver};
    use egress_core::model::policy::{EgressPolicy, EligibleNodes, NodeSelectors, PolicyKey, PolicyKind};
    use egress_core::model::samples::{equals, ip, origin};
    use egress_core::model::view::Labels;

    fn listeners(reconciler: ChangeSender) -> Listeners {
        Listeners {
            reconciler,
            own_node: watch::channel(None).0,
            is_egress_node: watch::channel(false).0,
            naming: NamingPolicies::default(),
            readiness: watch::channel(Readiness::default()).1,
            node_name: "n1".into(),
            acknowledging: BTreeMap::new(),
            ledger: watch::channel(Arc::<Ledger>::default()).0,
            endpoints: Endpoints::new("n1").0,
        }
    }

    #[test]
    fn a_node_without_the_label_takes_part_while_a_policy_allows_it() {
        let mut listeners = listeners(change_queue::inbox().0);
        let is = |listeners: &Listeners| *listeners.is_egress_node.borrow();
        listeners.distribute(Change::Nodes(Update::Changed(
            "n1".into(),
            Arc::new(Node { name: "n1".into(), ..Node::default() }),
        )));
        assert!(!is(&listeners));
        let key = PolicyKey { kind: PolicyKind::Assignment, name: "s".into() };
        let mut policy = EgressPolicy::new(origin("s", 1));
        for (name, expected) in [("n1", true), ("n2", false)] {
            policy.eligible_nodes = EligibleNodes::One(Some([name.to_owned()].into()));
            listeners.distribute(Change::Policies(Update::Changed(key.clone(), Arc::new(policy.clone()))));
            assert_eq!(is(&listeners), expected, "{name}");
        }
        let labels = Labels::from([("rack".to_owned(), "1".to_owned())]);
        let own = Node { name: "n1".into(), labels: labels.into(), ..Node::default() };
        listeners.distribute(Change::Nodes(Update::Changed("n1".into(), Arc::new(own))));
        for (rack, expected) in [("1", true), ("2", false)] {
            policy.eligible_nodes = EligibleNodes::Selected(NodeSelectors::from([equals("rack", rack)]).into());
            listeners.distribute(Change::Policies(Update::Changed(key.clone(), Arc::new(policy.clone()))));
            assert_eq!(is(&listeners), expected, "rack {rack}");
        }
    }

    #[tokio::test]
    async fn a_node_receives_only_acknowledgements_of_hand_overs_to_it() {
        let (reconciler, mut changes) = change_queue::inbox();
        let mut listeners = listeners(reconciler);
        let (ours, others) = (ip("172.18.0.100"), ip("172.18.0.101"));
        let acknowledgement = |name: &str| {
            let released = Acknowledgements::from([(ours, 7), (others, 8)]);
            let node = Node { name: name.into(), released, ..Node::default() };
            Change::Nodes(Update::Changed(name.into(), Arc::new(node)))
        };
        let mut ledger = Ledger::default();
        for (address, to) in [(ours, "n1"), (others, "n3")] {
            let record = HandOver { number: 7, from: "n2".into(), to: Some(to.into()) };
            ledger.records.open.insert(address, record);
        }
        listeners.distribute(Change::Ledger(Arc::new(ledger.clone())));
        listeners.distribute(acknowledgement("n2"));
        listeners.distribute(acknowledgement("n3"));
        let mut received = async || -> Vec<_> {
            let changes = changes.take().await.expect("changes").into_iter();
            let nodes = changes.filter_map(|change| match change {
                Change::Nodes(Update::Changed(name, node)) => Some((name, node.released.clone())),
                _ => None,
            });
            nodes.collect()
        };
        assert_eq!(
            received().await,
            [("n2".to_owned(), Acknowledgements::from([(ours, 7)])), ("n3".to_owned(), Acknowledgements::new())]
        );
        // The other record now names this node, and its old owner has already acknowledged.
        ledger.records.open.insert(others, HandOver { number: 8, from: "n2".into(), to: Some("n1".into()) });
        listeners.distribute(Change::Ledger(Arc::new(ledger)));
        assert_eq!(received().await, [("n2".to_owned(), Acknowledgements::from([(ours, 7), (others, 8)]))]);
    }
}
