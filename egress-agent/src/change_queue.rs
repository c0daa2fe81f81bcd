//! The queue between API watches and the reconciler: at most one pending change per object, the latest.
//!
//! A busy reconciler must not delay the watches, and an unbounded queue would grow without limit. Here a newer state of an
//! object replaces the older one, so the queue is bounded by the number of objects. Nothing is lost: the reconciler decides
//! by the current state, and watches do not order changes of different kinds. Only the last readable values of objects and
//! nodes depend on earlier changes ([`egress_core::model::policy`]); they are carried over.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;
use tokio::time::Instant;

use egress_core::model::ledger::Ledger;
use egress_core::model::node::Node;
use egress_core::model::policy::{EgressPolicy, PolicyKey};
use egress_core::model::services::{Service, ServiceKey};
use egress_core::model::view::{Change, Labels, Pod, PodKey, Update, filled};

/// Pending changes of one kind.
#[derive(Debug)]
struct PendingChanges<K, V> {
    /// A full list, with later changes applied.
    list: Option<BTreeMap<K, V>>,
    /// Without a pending list, the latest state of each object; `None` for a deleted one.
    changes: BTreeMap<K, Option<V>>,
}

impl<K, V> Default for PendingChanges<K, V> {
    fn default() -> Self {
        Self { list: None, changes: BTreeMap::new() }
    }
}

impl<K: Ord, V> PendingChanges<K, V> {
    fn put(&mut self, update: Update<K, V>) {
        match update {
            Update::Replaced(list) => {
                self.changes.clear();
                self.list = Some(list);
            }
            Update::Changed(key, value) => match &mut self.list {
                Some(list) => drop(list.insert(key, value)),
                None => drop(self.changes.insert(key, Some(value))),
            },
            Update::Removed(key) => match &mut self.list {
                Some(list) => drop(list.remove(&key)),
                None => drop(self.changes.insert(key, None)),
            },
        }
    }

    fn latest(&self, key: &K) -> Option<&V> {
        self.list.as_ref().and_then(|list| list.get(key)).or_else(|| self.changes.get(key)?.as_ref())
    }

    fn take(&mut self, into: &mut Vec<Change>, kind: impl Fn(Update<K, V>) -> Change) {
        into.extend(self.list.take().map(Update::Replaced).map(&kind));
        let changes = std::mem::take(&mut self.changes).into_iter().map(|(key, value)| match value {
            Some(value) => Update::Changed(key, value),
            None => Update::Removed(key),
        });
        into.extend(changes.map(&kind));
    }
}

#[derive(Debug, Default)]
struct Inbox {
    policies: PendingChanges<PolicyKey, Arc<EgressPolicy>>,
    namespaces: PendingChanges<String, Labels>,
    pods: PendingChanges<PodKey, Pod>,
    nodes: PendingChanges<String, Arc<Node>>,
    services: PendingChanges<ServiceKey, Service>,
    ledger: Option<Arc<Ledger>>,
    /// When the first pending change arrived.
    since: Option<Instant>,
    closed: bool,
}

impl Inbox {
    fn put(&mut self, change: Change) {
        self.since.get_or_insert_with(Instant::now);
        match change {
            Change::Policies(update) => {
                let update = filled(update, |name| self.policies.latest(name).cloned());
                self.policies.put(update);
            }
            Change::Namespaces(update) => self.namespaces.put(update),
            Change::Pods(update) => self.pods.put(update),
            Change::Nodes(update) => {
                let update = filled(update, |name| self.nodes.latest(name).cloned());
                self.nodes.put(update);
            }
            Change::Services(update) => self.services.put(update),
            Change::Ledger(ledger) => self.ledger = Some(ledger),
        }
    }

    fn take(&mut self) -> Vec<Change> {
        let mut changes: Vec<Change> = self.ledger.take().map(Change::Ledger).into_iter().collect();
        self.nodes.take(&mut changes, Change::Nodes);
        self.namespaces.take(&mut changes, Change::Namespaces);
        self.policies.take(&mut changes, Change::Policies);
        self.services.take(&mut changes, Change::Services);
        self.pods.take(&mut changes, Change::Pods);
        changes
    }
}

#[derive(Debug, Default)]
struct SharedInbox {
    inbox: Mutex<Inbox>,
    changed: Notify,
}

impl SharedInbox {
    /// A change is applied as a whole, so a panic cannot leave the queue inconsistent.
    fn inbox(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sends changes; dropping it ends them.
#[derive(Debug)]
pub struct ChangeSender(Arc<SharedInbox>);

/// Receives them.
#[derive(Debug)]
pub struct ChangeReceiver {
    shared: Arc<SharedInbox>,
    /// When the first change of the latest batch arrived.
    since: Option<Instant>,
}

pub fn inbox() -> (ChangeSender, ChangeReceiver) {
    let shared = Arc::new(SharedInbox::default());
    (ChangeSender(shared.clone()), ChangeReceiver { shared, since: None })
}

impl ChangeSender {
    pub fn put(&self, change: Change) {
        self.0.inbox().put(change);
        self.0.changed.notify_one();
    }
}

impl Drop for ChangeSender {
    fn drop(&mut self) {
        self.0.inbox().closed = true;
        self.0.changed.notify_one();
    }
}

impl ChangeReceiver {
    /// Waits for changes and takes all of them; `None` once the sender is dropped. Cancel-safe.
    pub async fn take(&mut self) -> Option<Vec<Change>> {
        loop {
            let (changes, since, closed) = {
                let mut inbox = self.shared.inbox();
                (inbox.take(), inbox.since.take(), inbox.closed)
            };
            if !changes.is_empty() {
                self.since = since;
                return Some(changes);
            }
            if closed {
                return None;
            }
            self.shared.changed.notified().await;
        }
    }

    /// When the first change of the latest batch arrived.
    pub fn since(&self) -> Option<Instant> {
        self.since
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use egress_core::model::node::NodePart;
    use egress_core::model::view::ClusterView;

    fn namespace(i: u64) -> String {
        format!("n{i}")
    }

    /// A receiver that lags reaches the same state as one that takes every change.
    #[tokio::test]
    async fn a_lagging_receiver_sees_the_same_state_through_a_bounded_queue() {
        let mut seed = 0x9E37_79B9_7F4A_7C15_u64;
        let mut below = |n: u64| {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            seed % n
        };
        let (sender, mut receiver) = inbox();
        let (mut all, mut lagging) = (ClusterView::default(), ClusterView::default());
        for round in 0..2_000 {
            let labels = |v: u64| Labels::from([("v".to_owned(), v.to_string())]);
            let change = match below(20) {
                0 => {
                    let list = (0..below(4)).map(|i| (namespace(i), labels(below(5))));
                    Change::Namespaces(Update::Replaced(list.collect()))
                }
                1..=6 => Change::Namespaces(Update::Removed(namespace(below(4)))),
                _ => Change::Namespaces(Update::Changed(namespace(below(4)), labels(below(5)))),
            };
            all.apply(change.clone());
            sender.put(change);
            if below(10) == 0 {
                let changes = receiver.take().await.expect("the sender exists");
                assert!(changes.len() <= 5, "{changes:?}");
                for change in changes {
                    lagging.apply(change);
                }
                assert_eq!(lagging, all, "round {round}");
            }
        }
        sender.put(Change::Namespaces(Update::Replaced(BTreeMap::new())));
        drop(sender);
        assert_eq!(receiver.take().await.map(|changes| changes.len()), Some(1));
        assert!(receiver.take().await.is_none());
    }

    #[tokio::test]
    async fn the_last_readable_values_of_a_node_are_carried_over() {
        let read = Node { primary: vec!["172.18.0.2/16".parse().expect("a literal")], ..Node::default() };
        let unreadable = Node { unreadable: [NodePart::Primary].into(), ..Node::default() };
        let changed = |node: &Node| Change::Nodes(Update::Changed("n1".into(), Arc::new(node.clone())));
        for is_taken in [false, true] {
            let (sender, mut receiver) = inbox();
            let mut view = ClusterView::default();
            sender.put(changed(&read));
            if is_taken {
                receiver.take().await.into_iter().flatten().for_each(|change| drop(view.apply(change)));
            }
            sender.put(changed(&unreadable));
            receiver.take().await.into_iter().flatten().for_each(|change| drop(view.apply(change)));
            assert_eq!(view.nodes["n1"].primary, read.primary, "taken in between: {is_taken}");
        }
    }
}
