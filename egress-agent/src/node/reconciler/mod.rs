//! The node reconciler: cluster changes -> desired state -> plan -> executor.
//!
//! Nothing is written before every watch has synced, since an incomplete cluster looks like one without pods or objects. The
//! kernel's state is read once, and again after an error; in between, the reconciler tracks what it wrote. An address that
//! cannot be claimed, or an entry that the kernel refuses, is left out and retried ([`failed_claims`],
//! [`rejected_entries`]); everything else is served. Addresses that this node may no longer hold are released first
//! ([`release`], [`ownership`]). Cuts of flows run in the background ([`background_flush`]).

pub mod action_log;
pub mod attached_pods;
pub mod background_flush;
pub mod execute;
pub mod failed_claims;
pub mod last_known;
pub mod ownership;
pub mod refused_pods;
pub mod rejected_entries;
pub mod release;
pub mod report;
pub mod routing;
pub mod synced;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::node::reconciler::attached_pods::PendingAttachments;
use crate::node::reconciler::background_flush::BackgroundFlush;
use crate::node::reconciler::failed_claims::FailedClaims;
use crate::node::reconciler::last_known::LastKnown;
use crate::node::reconciler::ownership::{Coordination, CoordinationEvent};
use crate::node::reconciler::refused_pods::ReportedConflicts;
use crate::node::reconciler::rejected_entries::LeftOut;
use crate::node::reconciler::routing::Routing;
use crate::node::reconciler::synced::Synced;

use crate::change_queue::ChangeReceiver;
use crate::metrics::Meters;
use egress_core::model::node::{Node, mac_text};
use egress_core::model::policy::{EgressPolicy, PolicyKey, RuleSource, SourceKind, Unreadable, parse_egress_ip};
use egress_core::model::reserved::Reserved;
use egress_core::model::services::ServiceKey;
use egress_core::model::settings::NodeSettings;
use egress_core::model::state::{
    Action, AddressByPolicy, EgressId, KernelState, PodState, PrefixKind, SelectedPods, SharedWith,
};
use egress_core::model::view::{Change, PodKey, Touched, Update};
pub use egress_core::node_health::fitness::Ready;
use egress_core::ownership::kernel_handovers::handovers;
use egress_core::ownership::node_ownership::{Withheld, withhold};
use egress_core::plan::capacity::{MOST_EGRESS_IPS, MOST_OF_SERVICE, spare_policies};
use egress_core::plan::compile::Compiler;
use egress_core::plan::desired::put_service_ports;
use egress_core::plan::executor::{AddressClaim, Conflict, DataplaneError, Executor, claim_condition};
use egress_core::plan::refusal::KernelEntry;
use egress_core::plan::{Disconnected, plan, plan_addresses};
use egress_core::selection::Standby;
use egress_kube::events::{Events, Regarding};
use egress_supervise::Heartbeat;

/// Delay after a failed action; it doubles up to the longest.
const FIRST_RETRY: Duration = Duration::from_millis(200);
const LONGEST_RETRY: Duration = Duration::from_secs(30);
/// The longest delay while an address only waits for a fresh read of its object.
const LONGEST_READ_RETRY: Duration = Duration::from_secs(1);

/// After failures for this long the node is not ready.
const NOT_READY_AFTER: Duration = Duration::from_secs(5);

/// Limits of events about refused entries in one reconcile, and of the entries that one event names.
const MAX_EVENTS: usize = 16;
const MAX_NAMED: usize = 4;

/// The loop runs at least this often, even without changes, so that its heartbeat shows progress.
const IDLE_INTERVAL: Duration = Duration::from_secs(5);
/// How often the programs learn that the agent follows the pods.
const FOLLOW_INTERVAL: Duration = Duration::from_secs(1);

/// The condition of the log's lines about the kernel.
const DESIRED_STATE: &str = "desired-state";

/// Reasons of events about an address that this node does not claim, or that another host claims too.
const CONFLICT: &str = "EgressIPConflict";
const RESERVED: &str = "ReservedAddress";
const REFUSED: &str = "EntryRefused";
const NO_NETWORK: &str = "NoNetwork";

/// Brings this node's kernel to the desired state.
pub struct Reconciler<E> {
    executor: E,
    compiler: Compiler,
    synced: Synced,
    /// The kernel's state; `None` if it must be read.
    actual: Option<KernelState>,
    /// Its last known state, for answers while it is read.
    last: LastKnown,
    /// Part of the desired state was left out: the next plan is a full one.
    incomplete: bool,
    /// Addresses wait for a fresh read of their objects.
    doubtful: bool,
    /// Claims that failed in this reconcile.
    refused: AddressByPolicy,
    /// A hand-over of this reconcile could not be prepared.
    unprepared: bool,
    background: BackgroundFlush,
    pending_attachments: PendingAttachments,
    failed_claims: FailedClaims,
    routing: Routing,
    left_out: LeftOut,
    /// Services with a reported event about addresses beyond the limit.
    reported_services: BTreeSet<ServiceKey>,
    /// The same for egress policies.
    reported_objects: BTreeSet<PolicyKey>,
    standby: BTreeSet<Standby>,
    /// Reported refusals of pod addresses.
    refused_pods: ReportedConflicts,
    /// Since when every attempt has failed.
    failing_since: Option<Instant>,
    events: Option<Events>,
    ready: watch::Sender<Ready>,
    selected: watch::Sender<SelectedPods>,
    coordination: Coordination,
    meters: Meters,
    heartbeat: Heartbeat,
    idle_interval: Duration,
    /// When the first change arrived that is not in the kernel yet.
    waiting_since: Option<Instant>,
}

impl<E: Executor> Reconciler<E> {
    pub fn new(settings: NodeSettings, executor: E, events: Option<Events>, ready: watch::Sender<Ready>) -> Self {
        let coordination = Coordination::none(&settings.node_name);
        Self {
            executor,
            compiler: Compiler::new(settings),
            synced: Synced::default(),
            actual: None,
            last: LastKnown::default(),
            incomplete: false,
            doubtful: false,
            refused: BTreeMap::new(),
            unprepared: false,
            background: BackgroundFlush::default(),
            pending_attachments: PendingAttachments::default(),
            failed_claims: FailedClaims::default(),
            routing: Routing::default(),
            left_out: LeftOut::default(),
            reported_services: BTreeSet::new(),
            reported_objects: BTreeSet::new(),
            standby: BTreeSet::new(),
            refused_pods: ReportedConflicts::default(),
            failing_since: None,
            events,
            ready,
            selected: watch::Sender::default(),
            coordination,
            meters: Meters::default(),
            heartbeat: Heartbeat::default(),
            idle_interval: IDLE_INTERVAL,
            waiting_since: None,
        }
    }

    /// Counts in `meters`.
    #[must_use]
    pub fn with_meters(self, meters: Meters) -> Self {
        Self { meters, ..self }
    }

    /// Publishes in `selected` how many pods each object serves.
    #[must_use]
    pub fn with_selected_pods(self, selected: watch::Sender<SelectedPods>) -> Self {
        Self { selected, ..self }
    }

    /// Notes its progress in `heartbeat`.
    #[must_use]
    pub fn with_heartbeat(self, heartbeat: Heartbeat) -> Self {
        Self { heartbeat, ..self }
    }

    /// Follows leases and hand-overs.
    #[must_use]
    pub fn with_coordination(self, coordination: Coordination) -> Self {
        Self { coordination, ..self }
    }

    /// Runs until `stop`, or until the changes end. The kernel keeps its state.
    pub async fn run(mut self, mut changes: ChangeReceiver, stop: CancellationToken) -> E {
        let mut retry_at: Option<Instant> = None;
        let mut delay = FIRST_RETRY;
        let mut follows = tokio::time::interval(FOLLOW_INTERVAL);
        follows.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let (mut is_retry, is_known) = (false, self.actual.is_some());
            self.heartbeat.note();
            tokio::select! {
                () = stop.cancelled() => return self.end().await,
                taken = changes.take() => match taken {
                    Some(taken) => {
                        self.waiting_since = self.waiting_since.or(changes.since());
                        taken.into_iter().for_each(|change| self.apply(change));
                    }
                    None => return self.executor,
                },
                () = tokio::time::sleep_until(retry_at.unwrap_or_else(Instant::now)), if retry_at.is_some() => {
                    is_retry = true;
                }
                event = self.coordination.next() => match event {
                    CoordinationEvent::Changed => self.incomplete = true,
                    CoordinationEvent::Question(question) => if !self.answer(question) { continue; },
                },
                () = self.background.next(), if is_known => {}
                _ = follows.tick() => {
                    // If the kernel is not in the desired state, a pod may be missing.
                    if is_known && !self.incomplete {
                        self.executor.follows(true);
                    }
                    continue;
                }
                () = tokio::time::sleep(self.idle_interval) => continue,
                claimant = self.executor.conflict() => { self.note_conflict(claimant); continue; }
            }
            if !self.synced.all() {
                // A change ends this. Leases still expire.
                (retry_at, self.waiting_since) = (None, None);
                if let Err(error) = self.release_unsynced().await {
                    warn!(%error, "cannot release addresses that this node may not hold; trying again");
                    retry_at = Some(Instant::now() + FIRST_RETRY);
                }
                continue;
            }
            let expired = self.coordination.lease_expired();
            let outcome = tokio::select! {
                biased;
                // Slow work can be repeated; the release cannot wait for it.
                () = expired => {
                    self.actual = None;
                    retry_at = Some(Instant::now());
                    continue;
                }
                outcome = self.reconcile() => outcome,
            };
            if let Err(error) = &outcome {
                warn!(%error, condition = DESIRED_STATE, "cannot bring the kernel to the desired state; trying again");
                self.actual = None;
                self.meters.reconcile_failed();
            } else if !self.background.puts_off()
                && let Some(since) = self.waiting_since.take()
            {
                self.meters.reconciled(since.elapsed());
            }
            self.settle_attached();
            self.note_outcome(outcome.is_ok());
            retry_at = if outcome.is_ok() && !self.incomplete {
                delay = FIRST_RETRY;
                None
            } else {
                let now = Instant::now();
                // Events that are due later have their own time.
                let at = self.failed_claims.due(now).into_iter().chain([now + delay]).min();
                // An attempt due to a change is not a retry.
                let longer = if is_retry { delay * 2 } else { delay };
                delay = longer.min(if self.doubtful { LONGEST_READ_RETRY } else { LONGEST_RETRY });
                at
            };
            let due = [self.left_out.retry_at(), self.routing.retry_at];
            retry_at = retry_at.into_iter().chain(due.into_iter().flatten()).min();
        }
    }

    /// Finishes the queued cuts before the process ends, and begins nothing else.
    async fn end(mut self) -> E {
        if let Some(mut actual) = self.actual.take()
            && let Err(error) = self.finish_cuts(&mut actual).await
        {
            warn!(%error, "cannot cut flows; the next agent does");
        }
        self.executor.follows(false);
        self.executor
    }

    fn apply(&mut self, change: Change) {
        self.synced.note(&change);
        self.log_unreadable(&change);
        if let Change::Ledger(ledger) = &change {
            self.coordination.follow(ledger);
            self.incomplete = true;
        }
        self.compiler.apply(change);
    }

    /// A node that keeps failing is not ready. Single failures are tolerated, since the next attempt may succeed.
    fn note_outcome(&mut self, succeeded: bool) {
        if succeeded {
            if self.failing_since.take().is_some() {
                info!(condition = DESIRED_STATE, "the kernel is in the desired state again");
            }
            return;
        }
        let since = *self.failing_since.get_or_insert_with(Instant::now);
        if since.elapsed() >= NOT_READY_AFTER {
            self.ready.send_if_modified(|ready| std::mem::replace(&mut ready.serving, false));
        }
    }

    /// Logs each new problem of a node or object once.
    fn log_unreadable(&self, change: &Change) {
        let view = self.compiler.view();
        let is_new_of_node =
            |name: &str, node: &Node| view.nodes.get(name).is_none_or(|old| old.problems != node.problems);
        let is_known = |object: &EgressPolicy, one: &Unreadable| {
            view.policies.get(object.key()).is_some_and(|old| old.unreadable.iter().any(|old| old.why == one.why))
        };
        let node = |name: &str, node: &Node| {
            for problem in node.problems.iter().filter(|_| is_new_of_node(name, node)) {
                warn!(node = name, problem, "data of a node cannot be read; the last readable value is used");
            }
        };
        let object = |object: &EgressPolicy| {
            for one in object.unreadable.iter().filter(|one| !is_known(object, one)) {
                warn!(
                    egressip = object.name(),
                    problem = one.why,
                    "parts of an object cannot be read; the last readable values are used"
                );
            }
        };
        match change {
            Change::Nodes(Update::Changed(name, value)) => node(name, value),
            Change::Nodes(Update::Replaced(nodes)) => nodes.iter().for_each(|(name, value)| node(name, value)),
            Change::Policies(Update::Changed(_, value)) => object(value),
            Change::Policies(Update::Replaced(objects)) => objects.values().for_each(|value| object(value)),
            Change::Nodes(_)
            | Change::Policies(_)
            | Change::Namespaces(_)
            | Change::Pods(_)
            | Change::Services(_)
            | Change::Ledger(_) => {}
        }
    }

    async fn reconcile(&mut self) -> Result<(), DataplaneError> {
        self.refused.clear();
        self.unprepared = false;
        let observed = self.actual.is_none();
        let mut whole = std::mem::take(&mut self.incomplete) || observed || self.left_out.is_due(Instant::now());
        let actual = match self.actual.take() {
            Some(actual) => actual,
            None => {
                self.release().await?;
                self.background.forget().await;
                self.executor.observe().await?
            }
        };
        let mut actual = self.last.hold(actual);
        self.heartbeat.note();
        let waits = self.coordination.wait_for_new_owners(self.compiler.view(), &actual.owned);
        self.release_barred(&mut actual).await?;
        if observed {
            // The cuts of the last change before an error, or before the former agent was killed, may be missing.
            self.act(&Action::CutOrphans).await?;
        }
        self.end_cuts(&mut actual).await?;
        self.compiler.remember(&actual);
        let mut has_read = false;
        loop {
            let touched = self.compiler.compile().map(|(_, touched)| touched);
            // Before anything leaves with an address that must follow a table.
            if touched.is_some() {
                whole |= self.routing.follow(&mut self.executor, self.compiler.networks()).await;
            }
            if whole || touched == Some(Touched::Everything) {
                self.finish_cuts(&mut actual).await?;
            }
            let (Some(desired), Some(touched)) = (self.compiler.desired(), touched) else {
                debug!("waiting for this node's own Node object, and for its networks there");
                self.actual = Some(actual.done());
                self.incomplete = whole;
                return Ok(());
            };
            if touched == Touched::Everything
                && let Some(vlans) = self.compiler.vlans()
            {
                self.executor.follow_vlans(&vlans);
            }
            let mut barred = Withheld::default();
            let mut disconnected = Disconnected::default();
            // Set by a full plan.
            let mut planned = None;
            let plan = match touched {
                Touched::Addresses(mut addresses) if !whole => {
                    self.background.admit(&mut addresses, desired);
                    disconnected = plan_addresses(&actual, desired, &addresses);
                    std::mem::take(&mut disconnected.at_once)
                }
                Touched::Addresses(_) | Touched::Everything => {
                    self.coordination.set_demand(desired);
                    barred = self.coordination.ownership.withheld(&desired.owned, &actual.owned);
                    let mut desired = desired.clone();
                    desired.handovers =
                        handovers(&self.coordination.ownership, self.compiler.view(), &desired, &actual);
                    put_service_ports(self.compiler.view(), &mut desired);
                    spare_policies(&mut desired, &actual);
                    self.refuse_reserved(&mut desired);
                    self.refuse_unrouted(&mut desired);
                    withhold(&mut desired, &barred.all);
                    withhold(&mut desired, &self.refused);
                    let plan = plan(&actual, &desired);
                    planned = Some(desired);
                    plan
                }
            };
            let failed = self.perform(&mut actual, &plan).await?;
            if !failed.is_empty() {
                for (id, address, error) in failed {
                    self.refused.insert(id, address);
                    self.note_failure(id, address, &error);
                }
                whole = true;
                continue;
            }
            if let Some(desired) = planned.as_ref().or(self.compiler.desired()) {
                self.left_out.settle(&actual, desired, planned.is_some(), Instant::now());
            }
            self.background.queue(disconnected);
            self.begin_cuts();
            self.coordination.publish(self.compiler.view(), &actual);
            self.doubtful = !barred.unconfirmed.is_empty();
            // Everything else is done before this read.
            if self.doubtful && !std::mem::replace(&mut has_read, true) {
                whole = self.coordination.read_fresh(self.compiler.view(), &barred.unconfirmed).await;
                if whole {
                    continue;
                }
            }
            break;
        }
        self.coordination.ownership.note_settled(&actual.owned);
        if let Some(desired) = self.compiler.desired() {
            self.coordination.log_served_again(&desired.owned, &actual.owned);
        }
        for (id, message) in self.failed_claims.settle(&self.refused, &actual, Instant::now()) {
            self.send_event(id, CONFLICT, &message);
        }
        self.report_left_out(Instant::now());
        self.actual = Some(actual.done());
        self.incomplete = self.doubtful || waits || self.unprepared || !self.refused.is_empty();
        if observed {
            self.executor.confirm();
        }
        self.publish();
        self.report_standby();
        self.report_capacity();
        self.report_unrouted();
        self.report_refused_pods();
        Ok(())
    }

    /// Logs a claim that begins to fail, and sends an event if it keeps failing.
    fn note_failure(&mut self, id: EgressId, address: IpAddr, error: &DataplaneError) {
        let (is_new, message) = self.failed_claims.note((id, address), error, Instant::now());
        if is_new {
            let condition = claim_condition(address);
            warn!(id = id.0, %address, %error, condition, "cannot claim an egress IP yet; trying again");
        }
        if let Some(message) = message {
            let reason = match error {
                DataplaneError::Reserved { .. } => RESERVED,
                DataplaneError::AddressInUse { .. } | DataplaneError::HeldByNode { .. } => CONFLICT,
                DataplaneError::NoNetwork { .. } => NO_NETWORK,
                DataplaneError::Kernel { .. } | DataplaneError::Full { .. } | DataplaneError::Refused { .. } => REFUSED,
            };
            self.send_event(id, reason, &message);
        }
    }

    /// Reports another host that answers for an address of this node.
    fn note_conflict(&mut self, AddressClaim { address, mac }: AddressClaim) {
        let mut held = self.actual.iter().flat_map(|actual| &actual.owned);
        let Some((&id, _)) = held.find(|(_, held)| **held == address) else { return };
        let node = self.coordination.node_with(self.compiler.view(), mac);
        // The other node of a hand-over may answer too.
        if node.is_some_and(|node| self.coordination.is_handing(address, &node.name)) {
            return;
        }
        self.meters.conflict();
        if self.failed_claims.note_contested(address) {
            let node = node.and_then(Node::endpoint).map(|endpoint| endpoint.0);
            let conflict = Conflict { address, node, mac: mac_text(mac) };
            warn!(%conflict, "another host answers for an egress IP of this node");
            self.send_event(id, CONFLICT, &conflict.to_string());
        }
    }

    /// Removes addresses that must not be egress IPs from the desired state, even if they are assigned.
    fn refuse_reserved(&mut self, desired: &mut KernelState) {
        if desired.owned.is_empty() && desired.handovers.is_empty() {
            return;
        }
        let table = self.compiler.reservations();
        // An address that the node has itself is reserved for policies that use it as such.
        let reason = |address: IpAddr, with: Option<SharedWith>| {
            let is_exempt = |reason: &&Reserved| with == Some(SharedWith::Host) && matches!(reason, Reserved::Node(_));
            table.of(address).filter(|reason| !is_exempt(reason)).cloned()
        };
        desired
            .handovers
            .retain(|_, moving| !moving.is_taken() || reason(moving.address, moving.shared_with).is_none());
        for (id, address) in &desired.owned {
            if let Some(reason) = reason(*address, desired.shared.get(id).copied()) {
                self.refused.insert(*id, *address);
                self.note_failure(*id, *address, &DataplaneError::Reserved { address: *address, reason });
            }
        }
    }

    fn send_event(&self, id: EgressId, reason: &str, message: &str) {
        let object = self.compiler.view().policies.values().find(|object| object.published.ids.contains(id));
        if let (Some(events), Some(object)) = (&self.events, object) {
            events.warn(&**object, reason, message);
        }
    }

    /// Sends events about entries that stay refused, on their objects or on the Node.
    fn report_left_out(&mut self, now: Instant) {
        let mut by_object: BTreeMap<Option<PolicyKey>, Vec<String>> = BTreeMap::new();
        for (action, why) in self.left_out.take_unreported(now) {
            let Some(entry) = KernelEntry::of(&action) else { continue };
            by_object.entry(self.object_of(&action)).or_default().push(format!("{entry}: {why}"));
        }
        let Some(events) = &self.events else { return };
        let (node, view) = (self.coordination.ownership.node_name(), self.compiler.view());
        for (object, entries) in by_object.into_iter().take(MAX_EVENTS) {
            let named = entries.iter().take(MAX_NAMED).cloned().collect::<Vec<_>>().join("; ");
            let message = format!(
                "the kernel of node {node} refuses {} entries, which are left out and retried: {named}",
                entries.len()
            );
            match object.and_then(|name| view.policies.get(&name)) {
                Some(object) => {
                    events.warn(&**object, REFUSED, &message);
                }
                None => events.warn_of_node(REFUSED, &message),
            }
        }
    }

    /// The object that an entry belongs to.
    fn object_of(&self, action: &Action) -> Option<PolicyKey> {
        let mut objects = self.compiler.view().policies.values();
        let found = match action {
            Action::PutPod(_, PodState::Selected(id)) | Action::PutPolicy(id, ..) | Action::PutHandover(id, _) => {
                objects.find(|object| object.published.ids.contains(*id))
            }
            Action::PutClass(_, policies) => {
                let ids = policies.ids();
                objects.find(|object| object.published.ids.all().any(|id| ids.contains(&id)))
            }
            Action::PutPrefix(prefix, value) if value.kind == PrefixKind::EgressIp => {
                let has = |object: &&Arc<EgressPolicy>| {
                    let mut items = object.published.items.iter().filter_map(|item| parse_egress_ip(&item.egress_ip));
                    items.any(|address| IpNet::from(address) == *prefix)
                };
                objects.find(has)
            }
            _ => None,
        };
        found.map(|object| object.key().clone())
    }

    /// Sends events about Services and EgressIP objects with addresses beyond the limits. All nodes have the same limits, so
    /// only the agent on the leading controller's node reports. Events are rate-limited; log lines are not, and users control
    /// how often these objects change.
    fn report_capacity(&mut self) {
        let left_out = self.compiler.left_out();
        self.reported_services.retain(|service| left_out.contains_key(service));
        let beyond = self.compiler.beyond();
        self.reported_objects.retain(|object| beyond.contains_key(object));
        // The leader's identity is `NODE_PROCESS_START`.
        if self.coordination.ownership.ledger().leader.rsplitn(3, '_').last()
            != Some(self.coordination.ownership.node_name())
        {
            return;
        }
        let new = left_out.iter().filter(|(service, _)| !self.reported_services.contains(service));
        let new: Vec<_> = new.take(MAX_EVENTS).map(|(service, count)| (service.clone(), *count)).collect();
        for (service, count) in new {
            debug!(
                namespace = service.namespace,
                service = service.name,
                count,
                "addresses of a Service are beyond the limit"
            );
            let message = format!(
                "{count} of its addresses have no entry on the nodes: one Service may have {MOST_OF_SERVICE}, and all Services \
                 of a namespace share a limit; pods with an egress IP use it towards these addresses"
            );
            let uid = self.compiler.view().services.get(&service).map(|known| known.uid.clone()).unwrap_or_default();
            if let Some(events) = &self.events {
                events.warn_of_service((&service, &uid), "ServiceAddressesLeftOut", &message);
            }
            self.reported_services.insert(service);
        }
        let new = beyond.iter().filter(|(object, _)| !self.reported_objects.contains(*object));
        let new: Vec<_> = new.take(MAX_EVENTS).map(|(object, count)| (object.clone(), *count)).collect();
        for (object, count) in new {
            let message = format!(
                "{count} of its addresses have no entry on the nodes, which have those of the oldest objects, \
                 {MOST_EGRESS_IPS} at most: its pods leave with them, and pods of other objects that call them are not refused"
            );
            if let (Some(events), Some(known)) = (&self.events, self.compiler.view().policies.get(&object)) {
                events.warn(&**known, "EgressIPsLeftOut", &message);
            }
            self.reported_objects.insert(object);
        }
    }

    fn publish(&mut self) {
        let addresses = self.compiler.own_node().map(|node| node.health_addresses()).unwrap_or_default();
        let ready = Ready { serving: true, addresses, unserved: self.failed_claims.unserved(Instant::now()) };
        self.ready.send_if_modified(|known| std::mem::replace(known, ready.clone()) != ready);
        let selected = self.count_selected();
        self.selected.send_if_modified(|known| std::mem::replace(known, selected.clone()) != selected);
    }

    /// Counts pods, not addresses: a dual-stack pod has two.
    fn count_selected(&self) -> SelectedPods {
        let pods = self.actual.iter().flat_map(|actual| {
            let owner = |address| actual.owners.get(address).copied();
            let owned = actual.pods.keys().filter_map(move |address| Some((address, owner(address)?)));
            owned.flat_map(|(address, owner)| actual.policies_of(*address).ids().into_iter().map(move |id| (id, owner)))
        });
        let mut counts = SelectedPods::new();
        for (id, _) in pods.collect::<BTreeSet<_>>() {
            *counts.entry(id).or_default() += 1;
        }
        counts
    }

    /// Sends events about objects that do not serve pods that they select, once for each pair of objects, with one of the
    /// pods. Events are rate-limited.
    fn report_standby(&mut self) {
        let standby = self.compiler.standby();
        if *standby == self.standby {
            return;
        }
        let pairs = |all: &BTreeSet<Standby>| -> BTreeMap<(RuleSource, RuleSource), PodKey> {
            let pair = |one: &Standby| ((one.rule.clone(), one.served_by.clone()), one.pod.clone());
            // The event names the first pod.
            all.iter().rev().map(pair).collect()
        };
        let (old, new) = (pairs(&self.standby), pairs(standby));
        self.standby = standby.clone();
        for ((object, served_by), pod) in new.into_iter().filter(|(pair, _)| !old.contains_key(pair)) {
            let message = format!(
                "{} object {} will not be configured for pods of node {} that it selects, {}/{} among them, since \
                 another {} object {} is serving them, this is undefined",
                object.kind.as_str(),
                object.full_name(),
                self.coordination.ownership.node_name(),
                pod.namespace,
                pod.name,
                // As OVN-Kubernetes writes it.
                if served_by.kind == SourceKind::EgressIp { "egressIP" } else { served_by.kind.as_str() },
                served_by.full_name(),
            );
            debug!(policy = %object, pod = pod.name, namespace = pod.namespace, %served_by, "standby");
            if let Some(events) = &self.events {
                events.warn(Regarding::source(&object).with_pod(&pod), "UndefinedRequest", &message);
            }
        }
    }
}

#[cfg(test)]
mod tests;
