//! The node's half: changes of the cluster -> compiled state -> plan -> executor.
//!
//! Nothing is written before every watch has synced: a half-known cluster would look like one without pods or objects.
//! The kernel is observed once, then again after an error; in between the agent remembers what it did. An address that
//! cannot be claimed keeps nothing else from being done: it is left out, with its slot, and tried again, soon at first,
//! since the usual cause is that its former node has not let go yet. Likewise an entry that the kernel refuses
//! ([`rejected_entries`], [`egress_core::plan::refusal`]): a node that cannot write one entry serves all others.
//!
//! What this node may not hold, because it is on its way to another or because this node is out of touch, goes first,
//! before anything that takes time ([`ownership`], [`egress_core::ownership::holdings`]). Cuts of pods' flows take time too, and go on beside the
//! rounds ([`background_flush`]).

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
pub mod synced;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use crate::node::reconciler::attached_pods::Attaching;
use crate::node::reconciler::background_flush::BackgroundFlush;
use crate::node::reconciler::failed_claims::Failing;
use crate::node::reconciler::last_known::Last;
use crate::node::reconciler::ownership::{Coordination, Turn};
use crate::node::reconciler::refused_pods::ReportedConflicts;
use crate::node::reconciler::rejected_entries::LeftOut;
use crate::node::reconciler::synced::Synced;

use crate::change_queue::ChangeReceiver;
use crate::metrics::Meters;
use egress_core::model::node::{Node, mac_text};
use egress_core::model::policy::{EgressPolicy, PolicyKey, Unreadable, parse_egress_ip};
use egress_core::model::services::ServiceKey;
use egress_core::model::settings::Settings;
use egress_core::model::state::{Action, EgressId, KernelState, PodState, PrefixKind, SelectedPods};
use egress_core::model::view::{Change, PodKey, Touched, Update};
pub use egress_core::node_health::fitness::Ready;
use egress_core::ownership::holdings::{Barred, withhold};
use egress_core::ownership::kernel_handovers::handovers;
use egress_core::plan::capacity::{MOST_EGRESS_IPS, MOST_OF_SERVICE, spare_policies};
use egress_core::plan::compile::Compiler;
use egress_core::plan::executor::{Claimant, Conflict, DataplaneError, Executor};
use egress_core::plan::refusal::Entry;
use egress_core::plan::{Disconnected, plan, plan_addresses};
use egress_core::selection::Standby;
use egress_kube::events::{About, Events};
use egress_supervise::Heartbeat;

/// After a failed action, then doubled up to the longest.
const FIRST_RETRY: Duration = Duration::from_millis(200);
const LONGEST_RETRY: Duration = Duration::from_secs(30);
/// Likewise where an address only waits for the object to be read anew.
const LONGEST_DOUBT: Duration = Duration::from_secs(1);

/// An executor that has failed for so long is one that cannot.
const OUT_OF_STEP_AFTER: Duration = Duration::from_secs(5);

/// Objects that are told in one round of entries that were refused, and entries that each of these events names.
const MOST_TOLD: usize = 16;
const MOST_NAMED: usize = 4;

/// It turns this often also where nothing happens.
const TURN: Duration = Duration::from_secs(5);
/// How often the programs are told that pods are followed.
const FOLLOWS: Duration = Duration::from_secs(1);

/// Reasons of events about an address that this node does not claim, or that another host claims too.
const CONFLICT: &str = "EgressIPConflict";
const RESERVED: &str = "ReservedAddress";
const REFUSED: &str = "EntryRefused";

/// What brings this node's kernel to what the cluster wants.
pub struct Reconciler<E> {
    executor: E,
    compiler: Compiler,
    synced: Synced,
    /// What the kernel holds; `None` when it must be observed.
    actual: Option<KernelState>,
    /// What it held then, for whoever asks meanwhile.
    last: Last,
    /// Something that was desired has been left out: the next plan is a whole one.
    incomplete: bool,
    /// Addresses wait for their objects to be read anew.
    doubtful: bool,
    /// Claims that failed in this round.
    refused: BTreeMap<EgressId, IpAddr>,
    /// A hand-over of this round was done without.
    unprepared: bool,
    background: BackgroundFlush,
    attaching: Attaching,
    failing: Failing,
    left_out: LeftOut,
    /// Services that have been told of addresses without room.
    told_services: BTreeSet<ServiceKey>,
    /// Likewise EgressIP objects, by name.
    told_objects: BTreeSet<PolicyKey>,
    standby: BTreeSet<Standby>,
    /// What pods do not get, as far as it has been told.
    refused_pods: ReportedConflicts,
    /// Since when every try has failed.
    out_of_step: Option<Instant>,
    events: Option<Events>,
    ready: watch::Sender<Ready>,
    selected: watch::Sender<SelectedPods>,
    ties: Coordination,
    meters: Meters,
    heartbeat: Heartbeat,
    turn: Duration,
    /// When the first of the changes arrived that are not in the kernel yet.
    waiting_since: Option<Instant>,
}

impl<E: Executor> Reconciler<E> {
    pub fn new(settings: Settings, executor: E, events: Option<Events>, ready: watch::Sender<Ready>) -> Self {
        let ties = Coordination::none(&settings.node_name);
        Self {
            executor,
            compiler: Compiler::new(settings),
            synced: Synced::default(),
            actual: None,
            last: Last::default(),
            incomplete: false,
            doubtful: false,
            refused: BTreeMap::new(),
            unprepared: false,
            background: BackgroundFlush::default(),
            attaching: Attaching::default(),
            failing: Failing::default(),
            left_out: LeftOut::default(),
            told_services: BTreeSet::new(),
            told_objects: BTreeSet::new(),
            standby: BTreeSet::new(),
            refused_pods: ReportedConflicts::default(),
            out_of_step: None,
            events,
            ready,
            selected: watch::Sender::default(),
            ties,
            meters: Meters::default(),
            heartbeat: Heartbeat::default(),
            turn: TURN,
            waiting_since: None,
        }
    }

    /// Counts there.
    #[must_use]
    pub fn metered(self, meters: Meters) -> Self {
        Self { meters, ..self }
    }

    /// Tells there how many pods each object serves.
    #[must_use]
    pub fn counting(self, selected: watch::Sender<SelectedPods>) -> Self {
        Self { selected, ..self }
    }

    /// Notes its progress in `heartbeat`.
    #[must_use]
    pub fn with_heartbeat(self, heartbeat: Heartbeat) -> Self {
        Self { heartbeat, ..self }
    }

    /// Obeys leases and hand-overs.
    #[must_use]
    pub fn tied(self, ties: Coordination) -> Self {
        Self { ties, ..self }
    }

    /// Runs until told to stop, or until the changes end. What the kernel does then goes on.
    pub async fn run(mut self, mut changes: ChangeReceiver, stop: CancellationToken) -> E {
        let mut retry_at: Option<Instant> = None;
        let mut patience = FIRST_RETRY;
        let mut follows = tokio::time::interval(FOLLOWS);
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
                turn = self.ties.next() => match turn {
                    Turn::Changed => self.incomplete = true,
                    Turn::Asked(question) => if !self.answer(question) { continue; },
                },
                () = self.background.next(), if is_known => {}
                _ = follows.tick() => {
                    // Where the kernel is not as it should be a pod may be missing there.
                    if is_known && !self.incomplete {
                        self.executor.follows(true);
                    }
                    continue;
                }
                () = tokio::time::sleep(self.turn) => continue,
                claimant = self.executor.conflict() => { self.note_conflict(claimant); continue; }
            }
            if !self.synced.all() {
                // What ends it is a change. Leases run out all the same.
                (retry_at, self.waiting_since) = (None, None);
                if let Err(error) = self.let_go_unsynced().await {
                    warn!(%error, "cannot give up what this node may not hold; trying again");
                    retry_at = Some(Instant::now() + FIRST_RETRY);
                }
                continue;
            }
            let fenced = self.ties.lease_expired();
            let outcome = tokio::select! {
                biased;
                // Whatever takes its time can be begun anew; leases cannot.
                () = fenced => {
                    self.actual = None;
                    retry_at = Some(Instant::now());
                    continue;
                }
                outcome = self.reconcile() => outcome,
            };
            if let Err(error) = &outcome {
                warn!(%error, "cannot bring the kernel to what the cluster wants; trying again");
                self.actual = None;
                self.meters.reconcile_failed();
            } else if !self.background.puts_off()
                && let Some(since) = self.waiting_since.take()
            {
                self.meters.reconciled(since.elapsed());
            }
            self.settle_attached();
            self.note_step(outcome.is_ok());
            retry_at = if outcome.is_ok() && !self.incomplete {
                patience = FIRST_RETRY;
                None
            } else {
                let now = Instant::now();
                // What is to be told is not left to a chance that comes later.
                let at = self.failing.due(now).into_iter().chain([now + patience]).min();
                // What was tried because of a change says nothing of how long it will take.
                let longer = if is_retry { patience * 2 } else { patience };
                patience = longer.min(if self.doubtful { LONGEST_DOUBT } else { LONGEST_RETRY });
                at
            };
            retry_at = retry_at.into_iter().chain(self.left_out.retry_at()).min();
        }
    }

    /// What is due is cut before the process ends, and nothing else is begun.
    async fn end(mut self) -> E {
        if let Some(mut actual) = self.actual.take()
            && let Err(error) = self.finish_cuts(&mut actual).await
        {
            warn!(%error, "flows that were to be cut are left to the next agent");
        }
        self.executor.follows(false);
        self.executor
    }

    fn apply(&mut self, change: Change) {
        self.synced.note(&change);
        self.complain(&change);
        if let Change::Ledger(ledger) = &change {
            self.ties.follow(ledger);
            self.incomplete = true;
        }
        self.compiler.apply(change);
    }

    /// A node that fails for long at what the cluster wants of it does not serve. One failure is none: the next try may do.
    fn note_step(&mut self, in_step: bool) {
        if in_step {
            self.out_of_step = None;
            return;
        }
        let since = *self.out_of_step.get_or_insert_with(Instant::now);
        if since.elapsed() >= OUT_OF_STEP_AFTER {
            self.ready.send_if_modified(|ready| std::mem::replace(&mut ready.serving, false));
        }
    }

    /// One line for each thing that cannot be read, when it is new.
    fn complain(&self, change: &Change) {
        let view = self.compiler.view();
        let node_is_news =
            |name: &str, node: &Node| view.nodes.get(name).is_none_or(|old| old.problems != node.problems);
        let said = |object: &EgressPolicy, one: &Unreadable| {
            view.policies.get(object.key()).is_some_and(|old| old.unreadable.iter().any(|old| old.why == one.why))
        };
        let node = |name: &str, node: &Node| {
            for problem in node.problems.iter().filter(|_| node_is_news(name, node)) {
                warn!(node = name, problem, "what is said of a node cannot be read; what was read last holds");
            }
        };
        let object = |object: &EgressPolicy| {
            for one in object.unreadable.iter().filter(|one| !said(object, one)) {
                warn!(
                    egressip = object.name(),
                    problem = one.why,
                    "an object cannot be read; what was read last holds"
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
                self.let_go().await?;
                self.background.forget().await;
                self.executor.observe().await?
            }
        };
        let mut actual = self.last.hold(actual);
        self.heartbeat.note();
        let waits = self.ties.wait_for_new_owners(self.compiler.view(), &actual.owned);
        self.give_up(&mut actual).await?;
        if observed {
            // Whoever brought the kernel to this state, we ourselves before an error or an agent that was killed, may not
            // have come to the cuts that belong to it.
            self.act(&Action::CutOrphans).await?;
        }
        self.end_cuts(&mut actual).await?;
        self.compiler.remember(&actual.pods);
        let mut asked = false;
        loop {
            let touched = self.compiler.compile().map(|(_, touched)| touched);
            if whole || touched == Some(Touched::Everything) {
                self.finish_cuts(&mut actual).await?;
            }
            let (Some(desired), Some(touched)) = (self.compiler.desired(), touched) else {
                debug!("waiting for this node's own Node object, and for its networks on it");
                self.actual = Some(actual.done());
                self.incomplete = whole;
                return Ok(());
            };
            let mut barred = Barred::default();
            let mut parted = Disconnected::default();
            // Where the round is a whole one.
            let mut planned = None;
            let plan = match touched {
                Touched::Addresses(mut addresses) if !whole => {
                    self.background.admit(&mut addresses, desired);
                    parted = plan_addresses(&actual, desired, &addresses);
                    std::mem::take(&mut parted.at_once)
                }
                Touched::Addresses(_) | Touched::Everything => {
                    self.ties.wants(!desired.owned.is_empty());
                    barred = self.ties.ownership.barred(&desired.owned, &actual.owned);
                    let mut desired = desired.clone();
                    desired.handovers = handovers(&self.ties.ownership, self.compiler.view(), &desired, &actual);
                    spare_policies(&mut desired, &actual);
                    self.refuse_reserved(&mut desired);
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
            self.background.queue(parted);
            self.begin_cuts();
            self.ties.say(self.compiler.view(), &actual);
            self.doubtful = !barred.doubtful.is_empty();
            // Others do not wait for the answer.
            if self.doubtful && !std::mem::replace(&mut asked, true) {
                whole = self.ties.ask(self.compiler.view(), &barred.doubtful).await;
                if whole {
                    continue;
                }
            }
            break;
        }
        self.ties.ownership.settle(&actual.owned);
        if let Some(desired) = self.compiler.desired() {
            self.ties.say_in_touch(&desired.owned, &actual.owned);
        }
        for (id, message) in self.failing.settle(&self.refused, &actual, Instant::now()) {
            self.tell(id, CONFLICT, &message);
        }
        self.tell_left_out(Instant::now());
        self.actual = Some(actual.done());
        self.incomplete = self.doubtful || waits || self.unprepared || !self.refused.is_empty();
        if observed {
            self.executor.confirm();
        }
        self.publish();
        self.announce_standby();
        self.announce_room();
        self.announce_refused();
        Ok(())
    }

    /// One line when a claim begins to fail, one event when it goes on.
    fn note_failure(&mut self, id: EgressId, address: IpAddr, error: &DataplaneError) {
        let (is_new, told) = self.failing.note((id, address), error, Instant::now());
        if is_new {
            warn!(id = id.0, %address, %error, "cannot claim an egress IP yet; trying again");
        }
        if let Some(message) = told {
            let reason = match error {
                DataplaneError::Reserved { .. } => RESERVED,
                DataplaneError::AddressInUse { .. } | DataplaneError::HeldByNode { .. } => CONFLICT,
                DataplaneError::Kernel { .. } | DataplaneError::Full { .. } | DataplaneError::Refused { .. } => REFUSED,
            };
            self.tell(id, reason, &message);
        }
    }

    /// Likewise for another host that answers for what this node holds.
    fn note_conflict(&mut self, Claimant { address, mac }: Claimant) {
        let mut held = self.actual.iter().flat_map(|actual| &actual.owned);
        let Some((&id, _)) = held.find(|(_, held)| **held == address) else { return };
        let node = self.ties.node_with(self.compiler.view(), mac);
        // The other node of a hand-over is on its way to let go, or has the address next.
        if node.is_some_and(|node| self.ties.is_handing(address, &node.name)) {
            return;
        }
        self.meters.conflict();
        if self.failing.hear(address) {
            let node = node.and_then(Node::endpoint).map(|endpoint| endpoint.0);
            let conflict = Conflict { address, node, mac: mac_text(mac) };
            warn!(%conflict, "another host answers for an egress IP of this node");
            self.tell(id, CONFLICT, &conflict.to_string());
        }
    }

    /// Leaves out of what is desired what can be no egress IP, whoever has assigned it.
    fn refuse_reserved(&mut self, desired: &mut KernelState) {
        if desired.owned.is_empty() && desired.handovers.is_empty() {
            return;
        }
        let table = self.compiler.reservations();
        desired.handovers.retain(|_, moving| !moving.is_taken() || table.of(moving.address).is_none());
        for (id, address) in &desired.owned {
            if let Some(reason) = table.of(*address).cloned() {
                self.refused.insert(*id, *address);
                self.note_failure(*id, *address, &DataplaneError::Reserved { address: *address, reason });
            }
        }
    }

    fn tell(&self, id: EgressId, reason: &str, message: &str) {
        let object = self.compiler.view().policies.values().find(|object| object.published.id == Some(id));
        if let (Some(events), Some(object)) = (&self.events, object) {
            events.warn(&**object, reason, message);
        }
    }

    /// Tells the objects, of what their entries have been left out of the maps for some time, and of the rest this node.
    fn tell_left_out(&mut self, now: Instant) {
        let mut by_object: BTreeMap<Option<PolicyKey>, Vec<String>> = BTreeMap::new();
        for (action, why) in self.left_out.take_untold(now) {
            let Some(entry) = Entry::of(&action) else { continue };
            by_object.entry(self.object_of(&action)).or_default().push(format!("{entry}: {why}"));
        }
        let Some(events) = &self.events else { return };
        let (node, view) = (self.ties.ownership.node_name(), self.compiler.view());
        for (object, entries) in by_object.into_iter().take(MOST_TOLD) {
            let named = entries.iter().take(MOST_NAMED).cloned().collect::<Vec<_>>().join("; ");
            let message = format!(
                "the kernel of node {node} refuses {} entries, which are left out and tried again: {named}",
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

    /// The object that an entry is there for.
    fn object_of(&self, action: &Action) -> Option<PolicyKey> {
        let mut objects = self.compiler.view().policies.values();
        let found = match action {
            Action::PutPod(_, PodState::Selected(id)) | Action::PutPolicy(id, ..) | Action::PutHandover(id, _) => {
                objects.find(|object| object.published.id == Some(*id))
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

    /// Tells Services and EgressIP objects that have addresses for which there is no room. Every node knows the same
    /// of them: that of the leading controller tells. By events, whose number is limited: users decide how often what they write changes, and lines of the log are not.
    fn announce_room(&mut self) {
        let left_out = self.compiler.left_out();
        self.told_services.retain(|service| left_out.contains_key(service));
        let beyond = self.compiler.beyond();
        self.told_objects.retain(|object| beyond.contains_key(object));
        // As `election::identity` makes it: the node, the process, its start.
        if self.ties.ownership.ledger().leader.rsplitn(3, '_').last() != Some(self.ties.ownership.node_name()) {
            return;
        }
        let new = left_out.iter().filter(|(service, _)| !self.told_services.contains(service));
        let new: Vec<_> = new.take(MOST_TOLD).map(|(service, count)| (service.clone(), *count)).collect();
        for (service, count) in new {
            debug!(namespace = service.namespace, service = service.name, count, "no room for addresses of a Service");
            let message = format!(
                "{count} of its addresses have no entry on the nodes: one Service may have {MOST_OF_SERVICE}, and all of a \
                 namespace have an equal share with others; pods with an egress IP call these by it, as any address of the \
                 world"
            );
            let uid = self.compiler.view().services.get(&service).map(|known| known.uid.clone()).unwrap_or_default();
            if let Some(events) = &self.events {
                events.warn_of_service((&service, &uid), "ServiceAddressesLeftOut", &message);
            }
            self.told_services.insert(service);
        }
        let new = beyond.iter().filter(|(object, _)| !self.told_objects.contains(*object));
        let new: Vec<_> = new.take(MOST_TOLD).map(|(object, count)| (object.clone(), *count)).collect();
        for (object, count) in new {
            let message = format!(
                "{count} of its addresses have no entry on the nodes, which have {MOST_EGRESS_IPS} of the oldest objects: its \
                 pods leave with them, and pods of other objects that call them are not refused"
            );
            if let (Some(events), Some(known)) = (&self.events, self.compiler.view().policies.get(&object)) {
                events.warn(&**known, "EgressIPsLeftOut", &message);
            }
            self.told_objects.insert(object);
        }
    }

    fn publish(&mut self) {
        let addresses = self.compiler.own_node().map(|node| node.health_addresses()).unwrap_or_default();
        let ready = Ready { serving: true, addresses, unserved: self.failing.unserved(Instant::now()) };
        self.ready.send_if_modified(|known| std::mem::replace(known, ready.clone()) != ready);
        let selected = self.count_selected();
        self.selected.send_if_modified(|known| std::mem::replace(known, selected.clone()) != selected);
    }

    /// Pods, not addresses: of both families one has two.
    fn count_selected(&self) -> SelectedPods {
        let pods = self.actual.iter().flat_map(|actual| {
            actual.pods.iter().filter_map(|(address, state)| match state {
                PodState::Selected(id) => Some((*id, *actual.owners.get(address)?)),
                PodState::Known => None,
            })
        });
        let mut counts = SelectedPods::new();
        for (id, _) in pods.collect::<BTreeSet<_>>() {
            *counts.entry(id).or_default() += 1;
        }
        counts
    }

    /// Tells the owners of objects that do not serve pods although they select them: once of each pair of objects, with one of
    /// the pods. By events alone, whose number is limited.
    fn announce_standby(&mut self) {
        let standby = self.compiler.standby();
        if *standby == self.standby {
            return;
        }
        let pairs = |all: &BTreeSet<Standby>| -> BTreeMap<(PolicyKey, PolicyKey), PodKey> {
            let pair = |one: &Standby| ((one.policy.clone(), one.served_by.clone()), one.pod.clone());
            // Of several pods the first one is named.
            all.iter().rev().map(pair).collect()
        };
        let (old, new) = (pairs(&self.standby), pairs(standby));
        self.standby = standby.clone();
        for ((object, served_by), pod) in new.into_iter().filter(|(pair, _)| !old.contains_key(pair)) {
            let message = format!(
                "{} object {} will not be configured for pods of node {} that it selects, {}/{} among them, since \
                 another egressIP object {} is serving them, this is undefined",
                object.kind.as_str(),
                object.name,
                self.ties.ownership.node_name(),
                pod.namespace,
                pod.name,
                served_by.name,
            );
            debug!(policy = %object, pod = pod.name, namespace = pod.namespace, %served_by, "standby");
            let uid =
                self.compiler.view().policies.get(&object).map(|object| object.origin.uid.clone()).unwrap_or_default();
            if let Some(events) = &self.events {
                let about = About { policy: &object, uid: &uid, pod: Some(&pod) };
                events.warn(about, "UndefinedRequest", &message);
            }
        }
    }
}

#[cfg(test)]
mod tests;
