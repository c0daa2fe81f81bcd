//! What ties this node's half to the rest of the cluster beside what is desired: the ledger, the fence, this node's word,
//! and a way to read objects anew.

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
use egress_core::model::state::{EgressId, KernelState};
use egress_core::model::view::{ClusterView, parse_egress_ip};
use egress_core::ownership::holdings::Ownership;
use egress_core::ownership::kernel_handovers;
use egress_core::ownership::lease::{LeaseDemand, LeaseState, LeaseTerms};
use egress_core::plan::executor::Expected;

type Owned = BTreeMap<EgressId, IpAddr>;

/// How long an address is served on while its new node gets ready. One that takes longer does without.
const HEIRS_TIME: Duration = Duration::from_secs(1);

/// Reads objects anew, by name, and says which of the addresses are this node's then.
pub type Ask = Box<dyn Fn(BTreeSet<(String, IpAddr)>) -> BoxFuture<'static, BTreeSet<IpAddr>> + Send + Sync>;

/// What comes by the ties.
pub(super) enum Turn {
    /// The fence goes up or down, or there is another order.
    Changed,
    Asked(Question),
}

pub struct Coordination {
    pub(super) tenure: Ownership,
    standing: watch::Receiver<LeaseState>,
    orders: watch::Receiver<Acknowledgements>,
    stake: watch::Sender<LeaseDemand>,
    released: watch::Sender<Acknowledgements>,
    ready: watch::Sender<Readiness>,
    ask: Ask,
    asks: Option<mpsc::Receiver<Question>>,
    /// Since when the hand-overs from here, by number, are known.
    known: BTreeMap<u64, Instant>,
    /// What this node has handed over under a number, and to whom.
    gave: BTreeMap<IpAddr, (u64, String)>,
    /// Out of touch. It is said only where there was something to lose.
    pub(super) has_given_up: bool,
}

impl Coordination {
    pub fn new(
        node_name: &str,
        (standing, orders): (watch::Receiver<LeaseState>, watch::Receiver<Acknowledgements>),
        (stake, released): (watch::Sender<LeaseDemand>, watch::Sender<Acknowledgements>),
        ask: Ask,
    ) -> Self {
        let (tenure, known) = (Ownership::new(node_name.to_owned()), BTreeMap::new());
        let ready = watch::channel(Readiness::default()).0;
        Self {
            tenure,
            standing,
            orders,
            stake,
            released,
            ready,
            ask,
            asks: None,
            known,
            gave: BTreeMap::new(),
            has_given_up: false,
        }
    }

    /// Says there what this node is ready to take over.
    #[must_use]
    pub fn preparing(self, ready: watch::Sender<Readiness>) -> Self {
        Self { ready, ..self }
    }

    /// No fence, and nobody who could be asked.
    pub(super) fn none(node_name: &str) -> Self {
        let (standing, stake) = (watch::channel(LeaseState::Holds).1, watch::channel(LeaseDemand::default()).0);
        let nobody: Ask = Box::new(|_| Box::pin(std::future::ready(BTreeSet::new())));
        let (orders, released) = (watch::channel(Acknowledgements::new()).1, watch::channel(Acknowledgements::new()).0);
        Self::new(node_name, (standing, orders), (stake, released), nobody)
    }

    pub(super) fn follow(&mut self, ledger: &Arc<Ledger>) {
        self.tenure.follow(Arc::clone(ledger));
        let terms = LeaseTerms::of(ledger, self.tenure.node_name());
        self.stake.send_if_modified(|stake| std::mem::replace(&mut stake.terms, terms) != terms);
    }

    pub(super) fn wants(&self, wants: bool) {
        self.stake.send_if_modified(|stake| std::mem::replace(&mut stake.wants, wants) != wants);
    }

    /// Waits for the fence to go up or down, for another order, or for a question; for ever where nobody is left to tell.
    pub(super) async fn next(&mut self) -> Turn {
        let Self { standing, orders, asks, .. } = self;
        let asked = async {
            match asks {
                Some(asks) => asks.recv().await,
                None => None,
            }
        };
        tokio::select! {
            Ok(()) = standing.changed() => Turn::Changed,
            Ok(()) = orders.changed() => Turn::Changed,
            Some(part) = asked => Turn::Asked(part),
            else => std::future::pending().await,
        }
    }

    /// Answers for `egress-agent status` what is asked there.
    #[must_use]
    pub fn asked(self, asks: mpsc::Receiver<Question>) -> Self {
        Self { asks: Some(asks), ..self }
    }

    pub(super) fn is_lease_expired(&self) -> bool {
        self.fall().is_some()
    }

    /// Which time this is, where this node is fenced.
    pub(super) fn fall(&self) -> Option<u64> {
        match *self.standing.borrow() {
            LeaseState::Expired(number) => Some(number),
            LeaseState::Holds => None,
        }
    }

    /// Says that the kernel, which was looked at since this was [`fall`](Self::fall), holds nothing.
    pub(super) fn obey(&self, fall: Option<u64>) {
        let Some(number) = fall else { return };
        self.stake.send_if_modified(|stake| std::mem::replace(&mut stake.obeyed, number) != number);
    }

    /// Whether this node is behind the fence, or was when the kernel was looked at last: it may hold what the fence takes.
    pub(super) fn is_or_was_fenced(&self) -> bool {
        self.is_lease_expired() || self.tenure.is_lease_expired()
    }

    /// Waits until this node is fenced, if it is not now.
    pub(super) fn fenced(&self) -> impl Future<Output = ()> + use<> {
        let mut standing = self.standing.clone();
        async move {
            let is_down = |standing: &LeaseState| matches!(standing, LeaseState::Expired(_));
            let is_lease_expired = is_down(&standing.borrow_and_update());
            if is_lease_expired || standing.wait_for(is_down).await.is_err() {
                std::future::pending().await
            }
        }
    }

    /// Which hand-overs from here wait for their new node to be ready; whether there are any. As long as the fence is
    /// down and the new node may still come, it is waited for: meanwhile the address is served here.
    pub(super) fn wait_for_heirs(&mut self, view: &ClusterView, held: &Owned) -> bool {
        let now = Instant::now();
        let Self { tenure, known, .. } = self;
        let open: BTreeSet<u64> = kernel_handovers::leaving(tenure).map(|(_, record)| record.number).collect();
        known.retain(|number, _| open.contains(number));
        let waiting = kernel_handovers::leaving(tenure).filter(|(address, record)| {
            let since = *known.entry(record.number).or_insert(now);
            let is_held = held.values().any(|held| held == *address);
            is_held && now < since + HEIRS_TIME && !kernel_handovers::is_ready(view, address, record)
        });
        let waiting: BTreeSet<IpAddr> = waiting.map(|(address, _)| *address).collect();
        let waits = !waiting.is_empty();
        self.tenure.set_waiting(waiting);
        waits
    }

    /// What of this the kernel must give up now.
    pub(super) fn barred(&mut self, held: &Owned) -> Owned {
        // Not taken for seen: who waits for it plans the whole anew.
        let fenced = self.is_lease_expired();
        self.tenure.set_lease_expired(fenced, held);
        self.tenure.order(&self.orders.borrow());
        if fenced && !held.is_empty() && !self.has_given_up {
            warn!(
                addresses = held.len(),
                "this node was out of touch with leader and API server, or its agent away: egress IPs are not served here"
            );
            self.has_given_up = true;
        }
        self.tenure.barred(held, held).all
    }

    /// Says that this node serves again what it has given up. Not before it is so: where the API server is out of reach for
    /// this node alone, the leader hears it, and nothing has been read again.
    pub(super) fn say_in_touch(&mut self, desired: &Owned, held: &Owned) {
        if !self.has_given_up || self.is_or_was_fenced() || !self.tenure.barred(desired, held).doubtful.is_empty() {
            return;
        }
        info!("in touch again: egress IPs that are still this node's are served again");
        self.has_given_up = false;
    }

    /// What the network may answer to this node's probes. That an address was assigned, recorded or held here before proves
    /// nothing of who has it now: only the word of the node that has handed it over does.
    pub(super) fn expected(&self, view: &ClusterView) -> Expected {
        let own = self.tenure.node_name();
        let mut expected = Expected::default();
        for node in view.nodes.values().filter(|node| node.name != own) {
            if let (Some(link), Some(endpoint)) = (node.uplink.mac, node.endpoint()) {
                expected.links.entry(link).or_insert(endpoint.0);
            }
        }
        for (address, record) in self.tenure.arriving() {
            let Some(from) = view.nodes.get(&record.from) else { continue };
            let has_let_go = from.released.get(address) == Some(&record.number);
            if has_let_go && from.given.get(address).is_some_and(|to| to == own) {
                expected.handed_over.insert(*address);
            }
            expected.holders.extend(from.endpoint().map(|holder| (*address, holder.0)));
        }
        expected
    }

    /// The other node that publishes this link address.
    pub(super) fn node_with<'a>(&self, view: &'a ClusterView, mac: Mac) -> Option<&'a Node> {
        let is_it = |node: &&Node| node.uplink.mac == Some(mac) && node.name != self.tenure.node_name();
        view.nodes.values().map(Arc::as_ref).find(is_it)
    }

    /// Whether the node is part of an open hand-over of the address.
    pub(super) fn is_handing(&self, address: IpAddr, node: &str) -> bool {
        let record = self.tenure.ledger().records.open.get(&address);
        record.is_some_and(|record| record.from == node || record.to.as_deref() == Some(node))
    }

    /// Says what the kernel holds and what not, when nothing is under way, and what it is ready for. Whom it has been handed
    /// over to first: without that it would be said to have gone to nobody.
    pub(super) fn say(&mut self, view: &ClusterView, actual: &KernelState) {
        let (given, prepared) = (self.given(view, actual), kernel_handovers::prepared(&self.tenure, actual));
        say(&self.ready, Readiness { given, prepared });
        say(&self.released, self.tenure.released(&actual.owned, &actual.handovers));
    }

    /// Whom this node has handed over to, as long as the record is open: that does not become untrue where the fence ends the
    /// passing on.
    fn given(&mut self, view: &ClusterView, actual: &KernelState) -> Given {
        let leaving = self.tenure.ledger().leaving(self.tenure.node_name());
        self.gave.retain(|address, (number, _)| leaving.get(address) == Some(number));
        for (address, to) in kernel_handovers::given(&self.tenure, view, actual) {
            if let Some(number) = leaving.get(&address) {
                self.gave.insert(address, (*number, to));
            }
        }
        self.gave.iter().map(|(address, (_, to))| (*address, to.clone())).collect()
    }

    /// Reads the objects of these addresses anew; whether any of them may be held by that.
    pub(super) async fn ask(&mut self, view: &ClusterView, doubtful: &Owned) -> bool {
        let mut questions = BTreeSet::new();
        for object in view.objects.values() {
            let items = object.items.iter().filter_map(|item| parse_egress_ip(&item.egress_ip));
            let doubted = items.filter(|address| doubtful.values().any(|other| other == address));
            questions.extend(doubted.map(|address| (object.name.clone(), address)));
        }
        // An order does not wait for the answer, which may be long in coming. It is not taken for seen here.
        let mut orders = self.orders.clone();
        let confirmed = tokio::select! {
            confirmed = (self.ask)(questions) => confirmed,
            Ok(()) = orders.changed() => return false,
        };
        self.tenure.confirm(&confirmed);
        !confirmed.is_empty()
    }
}

fn say<T: PartialEq>(to: &watch::Sender<T>, words: T) {
    to.send_if_modified(|said| {
        let is_news = *said != words;
        *said = words;
        is_news
    });
}
