//! Takes the changes of policies and nodes. While this controller leads it computes the desired status, and writes what
//! differs.
//!
//! The order of writes: hand-overs that begin are recorded first; then the status of policies that lose an address, then
//! that of the others, so that an address which moves between policies is free before it is given; finished hand-overs
//! are removed last ([`egress_core::ownership::handover`]). A write that fails because of another writer is no error:
//! the watch brings the newer policy, which starts the next pass.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::change_queue::ChangeReceiver;
use crate::controller::cluster_metrics;
use crate::controller::ledger::{LedgerInputs, LedgerWriter};
use crate::controller::pod_counts::{PodCounts, WithoutPods};
use crate::metrics::Meters;
use egress_core::allocation::Nodes;
use egress_core::allocation::egress_ids::EgressIdAllocator;
use egress_core::desired_status::{DesiredStatuses, ObjectStatus, StatusInputs, desired_statuses};
use egress_core::model::node::Node;
use egress_core::model::policy::{Condition, EgressPolicy, Item, Policies, PolicyKey};
use egress_core::model::reserved::ClusterNetworks;
use egress_core::model::services::Services;
use egress_core::model::settings::OnUnassigned;
use egress_core::model::view::{Change, Update, filled};
use egress_core::node_health::NodeHealth;
use egress_core::ownership::handover::HandoverPlanner;
use egress_core::ownership::suspicion::LeaseDurations;
use egress_core::status::conditions::{self, ObjectEvent};
use egress_core::status::foreign_writers::ForeignWriters;
use egress_core::status::moves::{MoveReason, Moves};
use egress_core::status::node_problems::NodeProblems;
use egress_kube::events::Events;
use egress_kube::leader_election::Leadership;
use egress_kube::ledger::LedgerStore;
use egress_kube::policy::StatusWriters;
use egress_kube::policy::status::{DesiredStatus, WriteError, WriteErrorLog};

/// Concurrent writes.
const PARALLEL: usize = 16;
/// Pause after a failed or stale write without any change.
const RETRY: Duration = Duration::from_secs(1);
/// How long the record of a finished hand-over stays, so that the new owner sees it even if its watches lag.
const LINGER: Duration = Duration::from_secs(2);
/// Timeout of one write.
const TIMEOUT: Duration = Duration::from_secs(10);
const FOREIGN_STATUS: &str = "another program than egress-agent writes status.items; if OVN-Kubernetes' own EgressIP is enabled \
                              turn it off (--enable-egress-ip=false): two would answer for the addresses";

const ROLLED_BACK: &str = "the API server has older data than before: if a backup has been restored, check whether each egress IP is \
                         where its object's status says";

/// The known state of the cluster, and what has been published.
pub struct ControllerReconciler {
    /// Shared with the thread that computes the desired status.
    policies: Option<Arc<Policies>>,
    nodes: Option<Arc<Nodes>>,
    networks: Arc<ClusterNetworks>,
    /// If no node can host any address of a policy, its pods leave with the node's address.
    node_address_serves: bool,
    services: Arc<Services>,
    /// Which egress nodes answer.
    node_health: watch::Receiver<NodeHealth>,
    /// The nodes to ask for pod counts while this controller leads, and the counts.
    nodes_to_ask: watch::Sender<Option<Arc<Nodes>>>,
    pod_counts: watch::Receiver<PodCounts>,
    without_pods: WithoutPods,
    ledger: LedgerWriter,
    handovers: HandoverPlanner,
    /// Since when this controller leads without a gap, as of the current pass.
    leading_since: Option<std::time::Instant>,
    egress_ids: EgressIdAllocator,
    /// Policies have changed since their IDs were observed.
    ids_unobserved: bool,
    published_events: BTreeMap<PolicyKey, BTreeSet<ObjectEvent>>,
    foreign_writers: ForeignWriters,
    write_errors: WriteErrorLog,
    problems: NodeProblems,
    writers: StatusWriters,
    events: Events,
    leadership: Leadership,
    meters: Meters,
    moves: Moves,
    /// Changes after a rollback of the API server.
    rollbacks: watch::Receiver<()>,
}

/// A policy and its desired status.
struct StatusUpdate {
    policy: Arc<EgressPolicy>,
    desired: DesiredStatus,
    events: BTreeSet<ObjectEvent>,
}

impl ControllerReconciler {
    pub fn new(
        (writers, ledger): (StatusWriters, LedgerStore),
        events: Events,
        leadership: Leadership,
        (node_health, terms, rollbacks): (watch::Receiver<NodeHealth>, LeaseDurations, watch::Receiver<()>),
        signature: String,
        networks: ClusterNetworks,
    ) -> Self {
        Self {
            policies: None,
            nodes: None,
            networks: Arc::new(networks),
            node_address_serves: true,
            services: Arc::default(),
            node_health,
            nodes_to_ask: watch::Sender::default(),
            pod_counts: watch::channel(PodCounts::default()).1,
            without_pods: WithoutPods::default(),
            ledger: LedgerWriter::new(ledger, leadership.clone(), signature, terms),
            handovers: HandoverPlanner::lingering(LINGER),
            leading_since: None,
            egress_ids: EgressIdAllocator::default(),
            ids_unobserved: false,
            published_events: BTreeMap::new(),
            foreign_writers: ForeignWriters::default(),
            write_errors: WriteErrorLog::default(),
            problems: NodeProblems::default(),
            writers,
            events,
            leadership,
            meters: Meters::default(),
            moves: Moves::default(),
            rollbacks,
        }
    }

    /// Sets what happens to packets of policies whose addresses no node can host.
    #[must_use]
    pub fn with_unassigned(self, on_unassigned: OnUnassigned) -> Self {
        Self { node_address_serves: on_unassigned == OnUnassigned::NodeAddress, ..self }
    }

    /// Adds pod counts to the status.
    #[must_use]
    pub fn counting(self, to_ask: watch::Sender<Option<Arc<Nodes>>>, pod_counts: watch::Receiver<PodCounts>) -> Self {
        Self { nodes_to_ask: to_ask, pod_counts, ..self }
    }

    /// Sets the metrics.
    #[must_use]
    pub fn metered(self, meters: Meters) -> Self {
        Self { meters, ..self }
    }

    /// Runs until stopped, or until the changes end.
    pub async fn run(mut self, mut changes: ChangeReceiver, stop: CancellationToken) {
        let mut retry_at: Option<Instant> = None;
        loop {
            let retry = tokio::time::sleep_until(retry_at.unwrap_or_else(|| Instant::now() + RETRY));
            tokio::select! {
                () = stop.cancelled() => return,
                changes = changes.take() => match changes {
                    Some(changes) => {
                        let relevant = changes.into_iter().map(|change| self.apply(change)).filter(|needs_reconcile| *needs_reconcile);
                        if relevant.count() == 0 {
                            continue;
                        }
                    }
                    None => return,
                },
                alive = self.leadership.changed() => {
                    if !alive {
                        return;
                    }
                    // A renewal alone changes nothing.
                    if self.leadership.since() == self.leading_since {
                        continue;
                    }
                }
                Ok(()) = self.node_health.changed() => {}
                Ok(()) = self.pod_counts.changed() => {}
                Ok(()) = self.rollbacks.changed() => self.report_rollback(),
                () = retry, if retry_at.is_some() => {}
            }
            self.leading_since = self.leadership.since();
            if let (true, Some(policies)) = (std::mem::take(&mut self.ids_unobserved), &self.policies) {
                self.egress_ids.observe(policies);
            }
            retry_at = None;
            let Some(since) = self.leading_since else {
                self.foreign_writers.retain(|_| false);
                self.problems = NodeProblems::default();
                self.nodes_to_ask.send_if_modified(|to_ask| to_ask.take().is_some());
                self.without_pods = WithoutPods::default();
                self.moves.forget(|_| true);
                self.meters.set_cluster(None);
                continue;
            };
            tokio::select! {
                // The next leader finds unfinished writes as after a crash.
                () = stop.cancelled() => return,
                requeue_at = self.reconcile(since) => retry_at = requeue_at,
            }
        }
    }

    /// Reports a rollback of the API server as an event, in addition to the logs. It concerns all policies; an event on one is enough.
    fn report_rollback(&self) {
        let oldest = self.policies.iter().flat_map(|all| all.values()).min_by_key(|one| one.rank());
        if let (true, Some(policy)) = (self.leadership.leads(), oldest) {
            self.events.warn(&**policy, "APIServerWentBack", ROLLED_BACK);
        }
    }

    /// Whether the change needs a pass.
    fn apply(&mut self, change: Change) -> bool {
        match change {
            Change::Policies(update) => {
                self.ids_unobserved = true;
                self.apply_objects(update);
            }
            Change::Nodes(update) => self.apply_nodes(update),
            Change::Ledger(ledger) => self.ledger.observe(ledger, Instant::now().into_std()),
            // Most Services have no address that could be an egress IP.
            Change::Services(update) => return !Arc::make_mut(&mut self.services).apply(update).addresses.is_empty(),
            Change::Namespaces(_) | Change::Pods(_) => return false,
        }
        true
    }

    fn apply_nodes(&mut self, update: Update<String, Arc<Node>>) {
        let update = filled(update, |name| self.nodes.as_ref()?.get(name).cloned());
        match (update, &mut self.nodes) {
            (Update::Replaced(new), nodes) => *nodes = Some(Arc::new(new)),
            (Update::Changed(name, node), Some(nodes)) => drop(Arc::make_mut(nodes).insert(name, node)),
            (Update::Removed(name), Some(nodes)) => drop(Arc::make_mut(nodes).remove(&name)),
            (Update::Changed(..) | Update::Removed(_), None) => {}
        }
    }

    fn apply_objects(&mut self, update: Update<PolicyKey, Arc<EgressPolicy>>) {
        let update = filled(update, |name| self.policies.as_ref()?.get(name).cloned());
        let now = Instant::now().into_std();
        match update {
            Update::Replaced(policies) => {
                let known = self.policies.iter().flat_map(|known| known.values());
                let gone = known
                    .filter(|known| policies.get(known.key()).is_none_or(|new| new.origin.uid != known.origin.uid));
                gone.for_each(|policy| self.ledger.note_deleted(policy, now));
                self.policies = Some(Arc::new(policies));
            }
            Update::Changed(_, policy) => self.insert_object(policy),
            Update::Removed(name) => {
                self.published_events.remove(&name);
                if let Some(policy) = self.policies.as_mut().and_then(|policies| Arc::make_mut(policies).remove(&name))
                {
                    self.moves.forget(|address| policy.listed.iter().any(|listed| listed == address));
                    self.ledger.note_deleted(&policy, now);
                }
            }
        }
    }

    /// Takes a version of a policy. Older ones, which the watch brings after the answer to a write, are ignored.
    fn insert_object(&mut self, policy: Arc<EgressPolicy>) {
        let Some(policies) = &mut self.policies else { return };
        // Deleted and created again between two updates.
        if let Some(former) = policies.get(policy.key()).filter(|known| known.origin.uid != policy.origin.uid) {
            self.ledger.note_deleted(former, Instant::now().into_std());
        }
        let version = |policy: &EgressPolicy| policy.origin.resource_version.parse::<u64>().ok();
        let older = policies.get(policy.key()).is_some_and(|known| {
            known.origin.uid == policy.origin.uid
                && version(known).zip(version(&policy)).is_some_and(|(known, new)| new < known)
        });
        if !older {
            Arc::make_mut(policies).insert(policy.key().clone(), policy);
        }
    }

    /// One pass: computes the desired status of all policies and writes what differs. Returns when to requeue without
    /// any change.
    async fn reconcile(&mut self, since: std::time::Instant) -> Option<Instant> {
        let (Some(policies), Some(nodes)) = (self.policies.clone(), self.nodes.clone()) else { return None };
        self.nodes_to_ask.send_if_modified(|to_ask| {
            let is_known = to_ask.as_ref().is_some_and(|known| Arc::ptr_eq(known, &nodes));
            *to_ask = Some(nodes.clone());
            !is_known
        });
        for (node, problem) in self.problems.new_problems(&nodes) {
            warn!(node, problem, "an unreadable value of a node keeps its last readable value");
        }
        let ids = self.egress_ids.allocate(&policies);
        let now = Instant::now().into_std();
        // A copy: the prober must not wait for the computation.
        let node_health = self.node_health.borrow_and_update().clone();
        let pod_counts = self.pod_counts.borrow_and_update().clone();
        let no_pod_at = self.without_pods.update(&policies, &pod_counts, now);
        let ledger_inputs = self.ledger.inputs(&policies, &nodes, &node_health, (since, now))?;
        let (draft, ledger_requeue_at) = (ledger_inputs.draft.clone(), ledger_inputs.requeue_at);
        let node_states = cluster_metrics::nodes(&policies, &nodes, &node_health);
        let desired = self.compute_desired((policies, nodes), (node_health, pod_counts), ledger_inputs, now).await?;
        let DesiredStatuses { policies: statuses, mut record_changes, requeue_at } = desired;
        // A leader that was replaced early may still write statuses by open records, which must stay until it no longer can. Records of
        // other addresses begin, so that their new owners prepare in that time.
        if let Some(until) = self.leadership.former().map(|former| former.until).filter(|until| now < *until) {
            record_changes.retain(|change| change.is_new_to(&draft.records));
            let retry = (!self.ledger.write_begun(draft, &record_changes).await).then(|| Instant::now() + RETRY);
            return ledger_requeue_at
                .into_iter()
                .chain(requeue_at)
                .chain([until])
                .map(Instant::from_std)
                .chain(retry)
                .min();
        }
        self.meters.set_cluster(Some(cluster_metrics::cluster(&statuses, node_states)));
        let requeue_at = [ledger_requeue_at, requeue_at, no_pod_at].into_iter().flatten().min().map(Instant::from_std);
        let updates: Vec<StatusUpdate> = statuses
            .into_iter()
            .filter_map(|status| {
                let ObjectStatus { policy, items, conditions, no_eligible_node, selected_pods, events } = status;
                let ids = *ids.get(policy.key())?;
                Some(StatusUpdate {
                    policy,
                    desired: DesiredStatus { ids, no_eligible_node, items, selected_pods, conditions },
                    events,
                })
            })
            .collect();
        self.publish_events(&updates);
        self.check_foreign_writers();
        let is_complete = self.ledger.write_begun(draft, &record_changes).await
            && self.write_all(updates, now).await
            && self.ledger.write_finished(&record_changes).await;
        let retry = (!is_complete).then(|| Instant::now() + RETRY);
        retry.into_iter().chain(requeue_at).min()
    }

    /// False when the pass has to be repeated.
    async fn write_all(&mut self, updates: Vec<StatusUpdate>, now: std::time::Instant) -> bool {
        let differs =
            |update: &StatusUpdate| !self.writers.of(&update.policy).is_current(&update.policy, &update.desired);
        let (updates, held): (Vec<_>, Vec<_>) =
            updates.into_iter().filter(differs).partition(|update| self.foreign_writers.may_write(&update.policy, now));
        let (losing, others): (Vec<_>, Vec<_>) = updates.into_iter().partition(releases_an_address);
        let is_complete = self.write(losing).await;
        // An address that was not taken from one policy must not be given to another.
        is_complete && self.write(others).await && held.is_empty()
    }

    /// Computes on a blocking thread, so that other tasks, such as the renewal of the Lease, need not wait.
    async fn compute_desired(
        &mut self,
        (policies, nodes): (Arc<Policies>, Arc<Nodes>),
        (node_health, pod_counts): (NodeHealth, PodCounts),
        ledger_inputs: LedgerInputs,
        now: std::time::Instant,
    ) -> Option<DesiredStatuses> {
        let mut handovers = std::mem::take(&mut self.handovers);
        let (networks, services) = (Arc::clone(&self.networks), Arc::clone(&self.services));
        let node_address_serves = self.node_address_serves;
        let without_pods = self.without_pods.clone();
        let computing = tokio::task::spawn_blocking(move || {
            let (records, evidence, endless) =
                (&ledger_inputs.draft.records, ledger_inputs.evidence(), &ledger_inputs.endless);
            let (unreachable, absent) = (&node_health.unreachable, &node_health.absent);
            let (policies, nodes, networks, services) = (&policies, &nodes, &networks, &services);
            let inputs = StatusInputs {
                policies,
                nodes,
                unreachable,
                absent,
                unserved: &node_health.unserved,
                pod_counts: &pod_counts,
                without_pods: &without_pods,
                node_address_serves,
                networks,
                services,
                records,
                evidence,
                endless,
                now,
            };
            let desired = desired_statuses(&mut handovers, &inputs);
            (handovers, desired)
        });
        match computing.await {
            Ok((handovers, desired)) => {
                self.handovers = handovers;
                Some(desired)
            }
            Err(error) => match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                // The process is about to end.
                Err(_) => None,
            },
        }
    }

    fn check_foreign_writers(&mut self) {
        let Some(policies) = &self.policies else { return };
        let uids: BTreeSet<&str> = policies.values().map(|policy| policy.origin.uid.as_str()).collect();
        self.foreign_writers.retain(|uid| uids.contains(uid));
        let now = Instant::now().into_std();
        for policy in policies.values() {
            if self.foreign_writers.check(policy, now) {
                warn!(egressip = policy.name(), "{FOREIGN_STATUS}");
                self.events.warn(&**policy, "ForeignStatus", FOREIGN_STATUS);
            }
        }
    }

    async fn write(&mut self, updates: Vec<StatusUpdate>) -> bool {
        let (writers, leadership, since) = (&self.writers, &self.leadership, self.leading_since);
        let written: Vec<_> = futures::stream::iter(updates)
            .map(|update| async move {
                // If another may have led in between, this status is out of date.
                let outcome = match leadership.since() == since {
                    true => {
                        let write = writers.of(&update.policy).write(&update.policy, &update.desired);
                        tokio::time::timeout(TIMEOUT, write).await.unwrap_or(Err(WriteError::Timeout))
                    }
                    false => Err(WriteError::Stale),
                };
                (update, outcome)
            })
            .buffer_unordered(PARALLEL)
            .collect()
            .await;
        let (mut is_complete, mut has_written, mut failed) = (true, false, Vec::new());
        for (StatusUpdate { policy, desired, .. }, outcome) in written {
            match outcome {
                Ok(answer) => {
                    has_written = true;
                    let reason = desired.conditions.first().map_or("", |condition| condition.reason);
                    // A change of the pod count alone is not logged.
                    if policy.published.items != desired.items
                        || !desired.conditions.iter().all(|one| one.is_published(&policy))
                    {
                        info!(egressip = policy.name(), id = %desired.ids, items = %items_text(&desired), reason, "status written");
                    }
                    self.foreign_writers.note_written(&answer);
                    self.report_moves(&policy, &desired.items);
                    self.apply_objects(Update::Changed(policy.key().clone(), Arc::new(answer)));
                }
                Err(WriteError::Stale) => is_complete = false,
                Err(error) => {
                    self.foreign_writers.forget(&policy);
                    failed.push((policy, error));
                }
            }
        }
        match failed.first() {
            Some((policy, error)) => {
                is_complete = false;
                if self.write_errors.is_due(error.code(), Instant::now().into_std()) {
                    let others = failed.len() - 1;
                    warn!(egressip = policy.name(), others, %error, "cannot write the status; trying again");
                }
            }
            None if has_written && self.write_errors.ends() => info!("the status is written again"),
            None => {}
        }
        is_complete
    }

    /// Publishes an event for each address that has another node now.
    fn report_moves(&mut self, policy: &EgressPolicy, items: &[Item]) {
        let (nodes, node_health) = (&self.nodes, self.node_health.borrow());
        let why = |name: &str| {
            let node = nodes.as_ref().and_then(|nodes| nodes.get(name));
            let last_serving = node_health.last_serving.get(name).copied();
            (MoveReason::of(node.map(Arc::as_ref), &policy.eligible_nodes, last_serving.is_some()), last_serving)
        };
        for moved in self.moves.record((&policy.published.items, items), why, Instant::now().into_std()) {
            moved.failover_duration.into_iter().for_each(|took| self.meters.failed_over(took));
            self.events.note(policy, "EgressIPMoved", &moved.to_string());
        }
    }

    /// Publishes new events. A new leader counts an event as published if the condition has the same message.
    fn publish_events(&mut self, updates: &[StatusUpdate]) {
        for StatusUpdate { policy, desired, events } in updates {
            let found = &policy.published.conditions;
            let published_by_former =
                desired.conditions.iter().filter(|desired| desired.kind == conditions::ASSIGNED).all(|desired| {
                    let is_same =
                        |found: &Condition| found.reason == desired.reason && found.message == desired.message;
                    found.get(desired.kind).is_some_and(|(_, found)| is_same(found))
                });
            let published = match self.published_events.insert(policy.key().clone(), events.clone()) {
                Some(published) => published,
                None if published_by_former => continue,
                None => BTreeSet::new(),
            };
            for event in events.difference(&published) {
                self.events.warn(&**policy, event.reason, &event.message);
            }
        }
    }
}

fn releases_an_address(update: &StatusUpdate) -> bool {
    let kept: BTreeSet<&str> = update.desired.items.iter().map(|item| item.egress_ip.as_str()).collect();
    update.policy.published.items.iter().any(|item| !kept.contains(item.egress_ip.as_str()))
}

fn items_text(desired: &DesiredStatus) -> String {
    let items: Vec<String> = desired.items.iter().map(|item| format!("{}={}", item.egress_ip, item.node)).collect();
    items.join(" ")
}
