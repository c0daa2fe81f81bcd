//! Takes the changes of policies and nodes. While this controller leads it decides, and writes what differs.
//!
//! The order of writes: hand-overs that begin are recorded first; then the status of policies that lose an address, then that of the
//! others, so that an address which moves between policies is free before it is given; finished hand-overs are removed last
//! ([`egress_core::ownership::handover`]). A write that fails because of another writer is no error: the watch brings the newer
//! policy, and it is decided on then.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::change_queue::ChangeReceiver;
use crate::controller::ledger::{LedgerExtract, LedgerWriter};
use crate::controller::pod_counts::PodCounts;
use crate::controller::summary;
use crate::metrics::Meters;
use egress_core::allocation::Nodes;
use egress_core::allocation::egress_ids::EgressIdAllocator;
use egress_core::decision::{Decision, Decisions, Known, decide};
use egress_core::model::node::Node;
use egress_core::model::policy::{Condition, EgressPolicy, Item, Policies, PolicyKey};
use egress_core::model::reserved::ClusterNetworks;
use egress_core::model::services::Services;
use egress_core::model::settings::OnUnassigned;
use egress_core::model::view::{Change, Update, filled};
use egress_core::node_health::NodeHealth;
use egress_core::ownership::handover::HandoverPlanner;
use egress_core::ownership::suspicion::Terms;
use egress_core::status::conditions::{self, Notice};
use egress_core::status::foreign_writers::ForeignWriters;
use egress_core::status::moves::{Moves, Why};
use egress_core::status::node_problems::Problems;
use egress_kube::events::{About, Events};
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

const ROLLED_BACK: &str = "the API server knows less than it did: if a backup has been restored, look whether each egress IP is \
                         where its object's status says";

/// The known state of the cluster, and what has been published.
pub struct ControllerReconciler {
    /// Shared with the thread that decides.
    policies: Option<Arc<Policies>>,
    nodes: Option<Arc<Nodes>>,
    networks: Arc<ClusterNetworks>,
    /// If no node can host any address of a policy, its pods leave with the node's address.
    node_address_serves: bool,
    services: Arc<Services>,
    /// Which egress nodes answer.
    node_health: watch::Receiver<NodeHealth>,
    /// The nodes to ask for pod counts while this controller leads, and the counts.
    to_ask: watch::Sender<Option<Arc<Nodes>>>,
    pod_counts: watch::Receiver<PodCounts>,
    ledger: LedgerWriter,
    handovers: HandoverPlanner,
    /// Since when this controller leads without a gap, as of the current pass.
    since: Option<std::time::Instant>,
    egress_ids: EgressIdAllocator,
    /// Policies have changed since their IDs were observed.
    ids_unobserved: bool,
    published: BTreeMap<PolicyKey, BTreeSet<Notice>>,
    foreign_writers: ForeignWriters,
    write_errors: WriteErrorLog,
    problems: Problems,
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
    notices: BTreeSet<Notice>,
}

impl ControllerReconciler {
    pub fn new(
        (writers, ledger): (StatusWriters, LedgerStore),
        events: Events,
        leadership: Leadership,
        (node_health, terms, rollbacks): (watch::Receiver<NodeHealth>, Terms, watch::Receiver<()>),
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
            to_ask: watch::Sender::default(),
            pod_counts: watch::channel(PodCounts::default()).1,
            ledger: LedgerWriter::new(ledger, leadership.clone(), signature, terms),
            handovers: HandoverPlanner::lingering(LINGER),
            since: None,
            egress_ids: EgressIdAllocator::default(),
            ids_unobserved: false,
            published: BTreeMap::new(),
            foreign_writers: ForeignWriters::default(),
            write_errors: WriteErrorLog::default(),
            problems: Problems::default(),
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
        Self { to_ask, pod_counts, ..self }
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
                        let news = changes.into_iter().map(|change| self.apply(change)).filter(|calls_for_decision| *calls_for_decision);
                        if news.count() == 0 {
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
                    if self.leadership.since() == self.since {
                        continue;
                    }
                }
                Ok(()) = self.node_health.changed() => {}
                Ok(()) = self.pod_counts.changed() => {}
                Ok(()) = self.rollbacks.changed() => self.report_rollback(),
                () = retry, if retry_at.is_some() => {}
            }
            self.since = self.leadership.since();
            if let (true, Some(policies)) = (std::mem::take(&mut self.ids_unobserved), &self.policies) {
                self.egress_ids.observe(policies);
            }
            retry_at = None;
            let Some(since) = self.since else {
                self.foreign_writers.retain(|_| false);
                self.problems = Problems::default();
                self.to_ask.send_if_modified(|to_ask| to_ask.take().is_some());
                self.moves.forget(|_| true);
                self.meters.set_cluster(None);
                continue;
            };
            tokio::select! {
                // The next leader finds unfinished writes as after a crash.
                () = stop.cancelled() => return,
                again = self.decide_and_write(since) => retry_at = again,
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

    /// Whether the change calls for a decision.
    fn apply(&mut self, change: Change) -> bool {
        match change {
            Change::Policies(update) => {
                self.ids_unobserved = true;
                self.apply_objects(update);
            }
            Change::Nodes(update) => self.apply_nodes(update),
            Change::Ledger(ledger) => self.ledger.follow(ledger, Instant::now().into_std()),
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
                gone.for_each(|policy| self.ledger.depart(policy, now));
                self.policies = Some(Arc::new(policies));
            }
            Update::Changed(_, policy) => self.insert_object(policy),
            Update::Removed(name) => {
                self.published.remove(&name);
                if let Some(policy) = self.policies.as_mut().and_then(|policies| Arc::make_mut(policies).remove(&name))
                {
                    self.moves.forget(|address| policy.listed.iter().any(|listed| listed == address));
                    self.ledger.depart(&policy, now);
                }
            }
        }
    }

    /// Takes a version of a policy. Older ones, which the watch brings after the answer to a write, are ignored.
    fn insert_object(&mut self, policy: Arc<EgressPolicy>) {
        let Some(policies) = &mut self.policies else { return };
        // Deleted and created again between two updates.
        if let Some(former) = policies.get(policy.key()).filter(|known| known.origin.uid != policy.origin.uid) {
            self.ledger.depart(former, Instant::now().into_std());
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

    /// Returns when to decide again without any change.
    async fn decide_and_write(&mut self, since: std::time::Instant) -> Option<Instant> {
        let (Some(policies), Some(nodes)) = (self.policies.clone(), self.nodes.clone()) else { return None };
        self.to_ask.send_if_modified(|to_ask| {
            let is_known = to_ask.as_ref().is_some_and(|known| Arc::ptr_eq(known, &nodes));
            *to_ask = Some(nodes.clone());
            !is_known
        });
        for (node, problem) in self.problems.news(&nodes) {
            warn!(node, problem, "what cannot be read of a node is as it was last read");
        }
        let ids = self.egress_ids.number(&policies);
        let now = Instant::now().into_std();
        // A copy: the prober must not wait for a decision.
        let node_health = self.node_health.borrow_and_update().clone();
        let pod_counts = self.pod_counts.borrow_and_update().clone();
        let extract = self.ledger.extract(&policies, &nodes, &node_health, (since, now))?;
        let (draft, again) = (extract.draft.clone(), extract.look_again);
        let nodes_seen = summary::nodes(&nodes, &node_health);
        let decided = self.decide((policies, nodes), (node_health, pod_counts), extract, now).await?;
        let Decisions { all, mut steps, look_again } = decided;
        // A leader that was replaced early may still write statuses by open records, which must stay until it no longer can. Records of
        // other addresses begin, so that their new owners prepare in that time.
        if let Some(until) = self.leadership.former().map(|former| former.until).filter(|until| now < *until) {
            steps.retain(|step| step.is_new_to(&draft.records));
            let retry = (!self.ledger.open(draft, &steps).await).then(|| Instant::now() + RETRY);
            return again.into_iter().chain(look_again).chain([until]).map(Instant::from_std).chain(retry).min();
        }
        self.meters.set_cluster(Some(summary::cluster(&all, nodes_seen)));
        let again = again.into_iter().chain(look_again).min().map(Instant::from_std);
        let updates: Vec<StatusUpdate> = all
            .into_iter()
            .filter_map(|decision| {
                let Decision { policy, items, conditions, no_eligible_node, selected_pods, notices } = decision;
                let id = *ids.get(policy.key())?;
                Some(StatusUpdate {
                    policy,
                    desired: DesiredStatus { id, no_eligible_node, items, selected_pods, conditions },
                    notices,
                })
            })
            .collect();
        self.publish_notices(&updates);
        self.check_foreign_writers();
        let settled = self.ledger.open(draft, &steps).await
            && self.write_all(updates, now).await
            && self.ledger.close(&steps).await;
        let retry = (!settled).then(|| Instant::now() + RETRY);
        retry.into_iter().chain(again).min()
    }

    /// False when something is left to do.
    async fn write_all(&mut self, updates: Vec<StatusUpdate>, now: std::time::Instant) -> bool {
        let differs =
            |update: &StatusUpdate| !self.writers.of(&update.policy).is_current(&update.policy, &update.desired);
        let (updates, held): (Vec<_>, Vec<_>) =
            updates.into_iter().filter(differs).partition(|update| self.foreign_writers.may_write(&update.policy, now));
        let (losing, others): (Vec<_>, Vec<_>) = updates.into_iter().partition(loses_an_address);
        let settled = self.write(losing).await;
        // An address that was not taken from one policy must not be given to another.
        settled && self.write(others).await && held.is_empty()
    }

    /// Decides on a blocking thread, so that other tasks, such as the renewal of the Lease, need not wait.
    async fn decide(
        &mut self,
        (policies, nodes): (Arc<Policies>, Arc<Nodes>),
        (node_health, pod_counts): (NodeHealth, PodCounts),
        extract: LedgerExtract,
        now: std::time::Instant,
    ) -> Option<Decisions> {
        let mut handovers = std::mem::take(&mut self.handovers);
        let (networks, services) = (Arc::clone(&self.networks), Arc::clone(&self.services));
        let node_address_serves = self.node_address_serves;
        let deciding = tokio::task::spawn_blocking(move || {
            let (records, evidence, endless) = (&extract.draft.records, extract.evidence(), &extract.endless);
            let (unreachable, absent) = (&node_health.unreachable, &node_health.absent);
            let (policies, nodes, networks, services) = (&policies, &nodes, &networks, &services);
            let known = Known {
                policies,
                nodes,
                unreachable,
                absent,
                unserved: &node_health.unserved,
                census: &pod_counts,
                node_address_serves,
                networks,
                services,
                records,
                evidence,
                endless,
                now,
            };
            let decisions = decide(&mut handovers, &known);
            (handovers, decisions)
        });
        match deciding.await {
            Ok((handovers, decisions)) => {
                self.handovers = handovers;
                Some(decisions)
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
            if self.foreign_writers.look(policy, now) {
                warn!(egressip = policy.name(), "{FOREIGN_STATUS}");
                self.events.warn(&**policy, "ForeignStatus", FOREIGN_STATUS);
            }
        }
    }

    async fn write(&mut self, decisions: Vec<StatusUpdate>) -> bool {
        let (writers, leadership, since) = (&self.writers, &self.leadership, self.since);
        let written: Vec<_> = futures::stream::iter(decisions)
            .map(|decision| async move {
                // If another may have led in between, this decision is out of date.
                let outcome = match leadership.since() == since {
                    true => tokio::time::timeout(
                        TIMEOUT,
                        writers.of(&decision.policy).write(&decision.policy, &decision.desired),
                    )
                    .await
                    .unwrap_or(Err(WriteError::Timeout)),
                    false => Err(WriteError::Stale),
                };
                (decision, outcome)
            })
            .buffer_unordered(PARALLEL)
            .collect()
            .await;
        let (mut settled, mut has_written, mut failed) = (true, false, Vec::new());
        for (StatusUpdate { policy, desired, .. }, outcome) in written {
            match outcome {
                Ok(answer) => {
                    has_written = true;
                    let reason = desired.conditions.first().map_or("", |condition| condition.reason);
                    // A change of the pod count alone is not logged.
                    if policy.published.items != desired.items
                        || !desired.conditions.iter().all(|one| one.is_published(&policy))
                    {
                        info!(egressip = policy.name(), id = desired.id.0, items = %shown(&desired), reason, "status written");
                    }
                    self.foreign_writers.wrote(&answer);
                    self.note_moves(&policy, &desired.items);
                    self.apply_objects(Update::Changed(policy.key().clone(), Arc::new(answer)));
                }
                Err(WriteError::Stale) => settled = false,
                Err(error) => {
                    self.foreign_writers.forget(&policy);
                    failed.push((policy, error));
                }
            }
        }
        match failed.first() {
            Some((policy, error)) => {
                settled = false;
                if self.write_errors.is_due(error.code(), Instant::now().into_std()) {
                    let others = failed.len() - 1;
                    warn!(egressip = policy.name(), others, %error, "cannot write the status; trying again");
                }
            }
            None if has_written && self.write_errors.ends() => info!("the status is written again"),
            None => {}
        }
        settled
    }

    /// Publishes an event for each address that has another node now.
    fn note_moves(&mut self, policy: &EgressPolicy, items: &[Item]) {
        let (nodes, node_health) = (&self.nodes, self.node_health.borrow());
        let why = |name: &str| {
            let node = nodes.as_ref().and_then(|nodes| nodes.get(name));
            let well = node_health.lost.get(name).copied();
            (Why::of(node.map(Arc::as_ref), well.is_some()), well)
        };
        for moved in self.moves.note((&policy.published.items, items), why, Instant::now().into_std()) {
            moved.took.into_iter().for_each(|took| self.meters.failed_over(took));
            let about = About::from(policy);
            self.events.note(about, "EgressIPMoved", &moved.to_string());
        }
    }

    /// Publishes new notices. A new leader takes a notice as published if the condition says the same.
    fn publish_notices(&mut self, decisions: &[StatusUpdate]) {
        for StatusUpdate { policy, desired, notices } in decisions {
            let found = &policy.published.conditions;
            let published_by_former =
                desired.conditions.iter().filter(|desired| desired.kind == conditions::ASSIGNED).all(|desired| {
                    let is_same =
                        |found: &Condition| found.reason == desired.reason && found.message == desired.message;
                    found.get(desired.kind).is_some_and(|(_, found)| is_same(found))
                });
            let published = match self.published.insert(policy.key().clone(), notices.clone()) {
                Some(published) => published,
                None if published_by_former => continue,
                None => BTreeSet::new(),
            };
            for notice in notices.difference(&published) {
                self.events.warn(&**policy, notice.reason, &notice.message);
            }
        }
    }
}

fn loses_an_address(decision: &StatusUpdate) -> bool {
    let kept: BTreeSet<&str> = decision.desired.items.iter().map(|item| item.egress_ip.as_str()).collect();
    decision.policy.published.items.iter().any(|item| !kept.contains(item.egress_ip.as_str()))
}

fn shown(desired: &DesiredStatus) -> String {
    let items: Vec<String> = desired.items.iter().map(|item| format!("{}={}", item.egress_ip, item.node)).collect();
    items.join(" ")
}
