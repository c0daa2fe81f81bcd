//! Coordination with the rest of the cluster beyond the desired state: the ledger, the lease, this node's acknowledgements,
//! and fresh reads of policies.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tracing::{info, warn};

use crate::debug::Question;
use egress_core::model::ledger::{Acknowledgements, Ledger};
use egress_core::model::node::{Given, Mac, Node, Readiness};
use egress_core::model::policy::{PolicyKey, parse_egress_ip};
use egress_core::model::state::{AddressByPolicy, KernelState};
use egress_core::model::view::ClusterView;
use egress_core::ownership::kernel_handovers;
use egress_core::ownership::lease::{LeaseDemand, LeaseState, LeaseTerms};
use egress_core::ownership::node_ownership::NodeOwnership;
use egress_core::plan::executor::Expected;

/// How long the old owner keeps serving an address while the new owner prepares. A slower one takes over unprepared.
const NEW_OWNER_TIMEOUT: Duration = Duration::from_secs(1);

/// Reads policies afresh, by name, and returns the addresses that belong to this node.
pub type FreshRead = Box<dyn Fn(BTreeSet<(PolicyKey, IpAddr)>) -> BoxFuture<'static, BTreeSet<IpAddr>> + Send + Sync>;

/// What ends a wait of [`Coordination::next`].
pub(super) enum CoordinationEvent {
    /// The lease state or the orders have changed.
    Changed,
    Question(Question),
}

pub struct Coordination {
    pub(super) ownership: NodeOwnership,
    lease_state: watch::Receiver<LeaseState>,
    orders: watch::Receiver<Acknowledgements>,
    demand: watch::Sender<LeaseDemand>,
    released: watch::Sender<Acknowledgements>,
    ready: watch::Sender<Readiness>,
    fresh_read: FreshRead,
    questions: Option<mpsc::Receiver<Question>>,
    /// Since when each open hand-over from this node is known, by number.
    known: BTreeMap<u64, Instant>,
    /// The hand-over's number and the new owner of each address that this node has handed over.
    handed_over: BTreeMap<IpAddr, (u64, String)>,
    /// The lease has expired, and this node has released addresses.
    pub(super) has_released: bool,
}

impl Coordination {
    pub fn new(
        node_name: &str,
        (lease_state, orders): (watch::Receiver<LeaseState>, watch::Receiver<Acknowledgements>),
        (demand, released): (watch::Sender<LeaseDemand>, watch::Sender<Acknowledgements>),
        fresh_read: FreshRead,
    ) -> Self {
        let (ownership, known) = (NodeOwnership::new(node_name.to_owned()), BTreeMap::new());
        let ready = watch::channel(Readiness::default()).0;
        Self {
            ownership,
            lease_state,
            orders,
            demand,
            released,
            ready,
            fresh_read,
            questions: None,
            known,
            handed_over: BTreeMap::new(),
            has_released: false,
        }
    }

    /// Publishes in `ready` what this node is ready to take over.
    #[must_use]
    pub fn with_readiness(self, ready: watch::Sender<Readiness>) -> Self {
        Self { ready, ..self }
    }

    /// An endless lease and no reader of policies.
    pub(super) fn none(node_name: &str) -> Self {
        let (lease_state, demand) = (watch::channel(LeaseState::Holds).1, watch::channel(LeaseDemand::default()).0);
        let no_reader: FreshRead = Box::new(|_| Box::pin(std::future::ready(BTreeSet::new())));
        let (orders, released) = (watch::channel(Acknowledgements::new()).1, watch::channel(Acknowledgements::new()).0);
        Self::new(node_name, (lease_state, orders), (demand, released), no_reader)
    }

    pub(super) fn follow(&mut self, ledger: &Arc<Ledger>) {
        self.ownership.observe_ledger(Arc::clone(ledger));
        let terms = LeaseTerms::of(ledger, self.ownership.node_name());
        self.demand.send_if_modified(|demand| std::mem::replace(&mut demand.terms, terms) != terms);
    }

    /// Whether this node wants a lease. It does also for an address that it is to take over: the node may have had none for
    /// a while, so no lease, or one that is about to expire.
    pub(super) fn set_demand(&self, desired: &KernelState) {
        let wants = !desired.owned.is_empty() || self.ownership.arriving().next().is_some();
        self.demand.send_if_modified(|demand| std::mem::replace(&mut demand.has_addresses, wants) != wants);
    }

    /// Waits for a change of lease state or orders, or for a question; forever once all senders are dropped.
    pub(super) async fn next(&mut self) -> CoordinationEvent {
        let Self { lease_state, orders, questions, .. } = self;
        let question = async {
            match questions {
                Some(questions) => questions.recv().await,
                None => None,
            }
        };
        tokio::select! {
            Ok(()) = lease_state.changed() => CoordinationEvent::Changed,
            Ok(()) = orders.changed() => CoordinationEvent::Changed,
            Some(question) = question => CoordinationEvent::Question(question),
            else => std::future::pending().await,
        }
    }

    /// Answers the questions of `egress-agent status`.
    #[must_use]
    pub fn with_questions(self, questions: mpsc::Receiver<Question>) -> Self {
        Self { questions: Some(questions), ..self }
    }

    pub(super) fn is_lease_expired(&self) -> bool {
        self.expiry().is_some()
    }

    /// The number of this expiry, if the lease has expired.
    pub(super) fn expiry(&self) -> Option<u64> {
        match *self.lease_state.borrow() {
            LeaseState::Expired(number) => Some(number),
            LeaseState::Holds => None,
        }
    }

    /// Reports that the kernel, observed after [`expiry`](Self::expiry) returned this, holds no address.
    pub(super) fn acknowledge_expiry(&self, expiry: Option<u64>) {
        let Some(number) = expiry else { return };
        self.demand.send_if_modified(|demand| std::mem::replace(&mut demand.acknowledged_expiry, number) != number);
    }

    /// Whether the lease has expired, or had when the kernel was last observed: the kernel may hold addresses to release.
    pub(super) fn is_or_was_lease_expired(&self) -> bool {
        self.is_lease_expired() || self.ownership.is_lease_expired()
    }

    /// Waits until the lease expires, if it has not.
    pub(super) fn lease_expired(&self) -> impl Future<Output = ()> + use<> {
        let mut lease_state = self.lease_state.clone();
        async move {
            let is_expired = |lease_state: &LeaseState| matches!(lease_state, LeaseState::Expired(_));
            let is_lease_expired = is_expired(&lease_state.borrow_and_update());
            if is_lease_expired || lease_state.wait_for(is_expired).await.is_err() {
                std::future::pending().await
            }
        }
    }

    /// Notes which hand-overs from this node wait for a new owner to be ready, and returns whether there are any. Until then
    /// this node serves the address.
    pub(super) fn wait_for_new_owners(&mut self, view: &ClusterView, held: &AddressByPolicy) -> bool {
        let now = Instant::now();
        let Self { ownership, known, .. } = self;
        let open: BTreeSet<u64> = kernel_handovers::leaving(ownership).map(|(_, record)| record.number).collect();
        known.retain(|number, _| open.contains(number));
        let waiting = kernel_handovers::leaving(ownership).filter(|(address, record)| {
            let since = *known.entry(record.number).or_insert(now);
            let is_held = held.values().any(|held| held == *address);
            is_held && now < since + NEW_OWNER_TIMEOUT && !kernel_handovers::is_ready(view, address, record)
        });
        let waiting: BTreeSet<IpAddr> = waiting.map(|(address, _)| *address).collect();
        let waits = !waiting.is_empty();
        self.ownership.set_awaiting_new_owner(waiting);
        waits
    }

    /// The held addresses that the kernel must release now.
    pub(super) fn barred(&mut self, held: &AddressByPolicy) -> AddressByPolicy {
        // Read without marking as seen: the waiter plans the whole state again.
        let is_expired = self.is_lease_expired();
        self.ownership.set_lease_expired(is_expired, held);
        self.ownership.set_orders(&self.orders.borrow());
        if is_expired && !held.is_empty() && !self.has_released {
            warn!(
                addresses = held.len(),
                condition = "lease",
                "the lease of this node has expired, its egress IPs are not served: it reached neither leader nor API server, or its agent was down"
            );
            self.has_released = true;
        }
        self.ownership.withheld(held, held).all
    }

    /// Logs that this node serves addresses again that it had released, once no address is doubtful: if only this node has
    /// lost the API server, the leader reaches it while no policy can be read.
    pub(super) fn log_served_again(&mut self, desired: &AddressByPolicy, held: &AddressByPolicy) {
        if !self.has_released
            || self.is_or_was_lease_expired()
            || !self.ownership.withheld(desired, held).unconfirmed.is_empty()
        {
            return;
        }
        info!(
            condition = "lease",
            "the lease is renewed: egress IPs that are still assigned to this node are served again"
        );
        self.has_released = false;
    }

    /// What the network may answer to this node's probes. An earlier assignment, record or holding does not prove who owns an
    /// address now; only the acknowledgement of the old owner does.
    pub(super) fn expected(&self, view: &ClusterView) -> Expected {
        let own = self.ownership.node_name();
        let mut expected = Expected::default();
        let is_own = |node: &&Arc<Node>| node.name == own;
        for node in view.nodes.values().filter(|node| !is_own(node)) {
            let Some(endpoint) = node.endpoint() else { continue };
            for link in links(node) {
                expected.links.entry(link).or_insert(endpoint.0);
            }
        }
        let primary_networks = view.nodes.values().find(is_own).map(|node| node.primary_networks().to_vec());
        expected.primary_networks = primary_networks.unwrap_or_default();
        for (address, record) in self.ownership.arriving() {
            let Some(from) = view.nodes.get(&record.from) else { continue };
            let has_released = from.released.get(address) == Some(&record.number);
            if has_released && from.given.get(address).is_some_and(|to| to == own) {
                expected.handed_over.insert(*address);
            }
            expected.holders.extend(from.endpoint().map(|holder| (*address, holder.0)));
        }
        expected
    }

    /// The other node that publishes this link address.
    pub(super) fn node_with<'a>(&self, view: &'a ClusterView, mac: Mac) -> Option<&'a Node> {
        let is_it = |node: &&Node| links(node).any(|link| link == mac) && node.name != self.ownership.node_name();
        view.nodes.values().map(Arc::as_ref).find(is_it)
    }

    /// Whether the node is part of an open hand-over of the address.
    pub(super) fn is_handing(&self, address: IpAddr, node: &str) -> bool {
        let record = self.ownership.ledger().records.open.get(&address);
        record.is_some_and(|record| record.from == node || record.to.as_deref() == Some(node))
    }

    /// Publishes what the kernel holds, what it has released, and what it is ready for; call it with no action in progress.
    /// New owners come first, since a release without one means that the address has no new owner.
    pub(super) fn publish(&mut self, view: &ClusterView, actual: &KernelState) {
        let (given, prepared) = (self.given(view, actual), kernel_handovers::prepared(&self.ownership, actual));
        set(&self.ready, Readiness { given, prepared });
        set(&self.released, self.ownership.released(&actual.owned, &actual.handovers));
    }

    /// The new owner of each address that this node has handed over, while the record is open. It stays true when an expired
    /// lease ends the forwarding.
    fn given(&mut self, view: &ClusterView, actual: &KernelState) -> Given {
        let leaving = self.ownership.ledger().leaving(self.ownership.node_name());
        self.handed_over.retain(|address, (number, _)| leaving.get(address) == Some(number));
        for (address, to) in kernel_handovers::new_owners(&self.ownership, view, actual) {
            if let Some(number) = leaving.get(&address) {
                self.handed_over.insert(address, (*number, to));
            }
        }
        self.handed_over.iter().map(|(address, (_, to))| (*address, to.clone())).collect()
    }

    /// Reads the policies of these addresses afresh, and returns whether any may be held.
    pub(super) async fn read_fresh(&mut self, view: &ClusterView, doubtful: &AddressByPolicy) -> bool {
        let mut reads = BTreeSet::new();
        for object in view.policies.values() {
            let items = object.published.items.iter().filter_map(|item| parse_egress_ip(&item.egress_ip));
            let doubted = items.filter(|address| doubtful.values().any(|other| other == address));
            reads.extend(doubted.map(|address| (object.key().clone(), address)));
        }
        // An order does not wait for a slow answer. It is not marked as seen here.
        let mut orders = self.orders.clone();
        let confirmed = tokio::select! {
            confirmed = (self.fresh_read)(reads) => confirmed,
            Ok(()) = orders.changed() => return false,
        };
        self.ownership.confirm(&confirmed);
        !confirmed.is_empty()
    }
}

fn set<T: PartialEq>(to: &watch::Sender<T>, value: T) {
    to.send_if_modified(|published| {
        let has_changed = *published != value;
        *published = value;
        has_changed
    });
}

/// The link addresses of a node's egress interfaces.
fn links(node: &Node) -> impl Iterator<Item = Mac> {
    let of_interfaces = node.interfaces.iter().map(|interface| interface.mac);
    node.uplink.mac.into_iter().chain(of_interfaces)
}
