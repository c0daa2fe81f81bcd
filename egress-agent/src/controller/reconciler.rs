//! Takes the changes of objects and nodes, and where this controller leads: decides, and writes what differs.
//!
//! Writes go in two rounds: first objects that lose an address, then the others, so that an address which moves between
//! objects is free before it is given. Before them the hand-overs that begin are recorded, behind them those that are over
//! are forgotten ([`egress_core::ownership::handover`]). A write that somebody else's made stale is not an error: the newer object is on its
//! way by the watch, and is decided on then.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::change_queue::ChangeReceiver;
use crate::controller::ledger::{Extract, LedgerWriter};
use crate::controller::pod_counts::PodCounts;
use crate::controller::summary;
use crate::controller::write_errors::WriteErrorLog;
use crate::metrics::Meters;
use egress_core::allocation::egress_ids::EgressIdAllocator;
use egress_core::allocation::{Nodes, Objects};
use egress_core::decision::{Decision, Decisions, Known, decide};
use egress_core::model::reserved::ClusterNetworks;
use egress_core::model::services::Services;
use egress_core::model::settings::OnUnassigned;
use egress_core::model::view::{Change, Condition, EgressObject, Item, Node, Update, filled};
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
use egress_kube::status::{StatusWriter, Wanted, WriteError};

/// Writes at a time.
const PARALLEL: usize = 16;
/// How long a failed or stale write waits when no change comes.
const RETRY: Duration = Duration::from_secs(1);
/// How long the record of a hand-over that is done stays: the new node sees it then, however its watches lag.
const LINGER: Duration = Duration::from_secs(2);
/// How long one write may take.
const PATIENCE: Duration = Duration::from_secs(10);
const FOREIGN_STATUS: &str = "somebody else than egress-agent writes status.items; if OVN-Kubernetes' own EgressIP is enabled \
                              turn it off (--enable-egress-ip=false): two would answer for the addresses";

const WENT_BACK: &str = "the API server knows less than it did: if a backup has been restored, look whether each egress IP is \
                         where its object's status says";

/// What is known of the cluster, and what has been said so far.
pub struct Leader {
    /// Shared with the thread that decides, while it does.
    objects: Option<Arc<Objects>>,
    nodes: Option<Arc<Nodes>>,
    networks: Arc<ClusterNetworks>,
    /// Where no node can host any address of an object, the node's address serves.
    node_address_serves: bool,
    services: Arc<Services>,
    /// Which nodes answer.
    reach: watch::Receiver<NodeHealth>,
    /// Whose agents are to be asked, while this controller leads, and what they say.
    asked: watch::Sender<Option<Arc<Nodes>>>,
    census: watch::Receiver<PodCounts>,
    books: LedgerWriter,
    watch: HandoverPlanner,
    /// Since when this controller leads without a gap, as of the pass that it is in.
    since: Option<std::time::Instant>,
    numbering: EgressIdAllocator,
    /// Objects have changed since their numbers were noted.
    unobserved: bool,
    told: BTreeMap<String, BTreeSet<Notice>>,
    strangers: ForeignWriters,
    complaint: WriteErrorLog,
    problems: Problems,
    writer: StatusWriter,
    events: Events,
    leadership: Leadership,
    meters: Meters,
    moves: Moves,
    /// Changes when the API server has gone back.
    returns: watch::Receiver<()>,
}

/// One object and what is to be written to it.
struct Wish {
    object: Arc<EgressObject>,
    wanted: Wanted,
    notices: BTreeSet<Notice>,
}

impl Leader {
    pub fn new(
        (writer, ledger): (StatusWriter, LedgerStore),
        events: Events,
        leadership: Leadership,
        (reach, terms, returns): (watch::Receiver<NodeHealth>, Terms, watch::Receiver<()>),
        signature: String,
        networks: ClusterNetworks,
    ) -> Self {
        Self {
            objects: None,
            nodes: None,
            networks: Arc::new(networks),
            node_address_serves: true,
            services: Arc::default(),
            reach,
            asked: watch::Sender::default(),
            census: watch::channel(PodCounts::default()).1,
            books: LedgerWriter::new(ledger, leadership.clone(), signature, terms),
            watch: HandoverPlanner::lingering(LINGER),
            since: None,
            numbering: EgressIdAllocator::default(),
            unobserved: false,
            told: BTreeMap::new(),
            strangers: ForeignWriters::default(),
            complaint: WriteErrorLog::default(),
            problems: Problems::default(),
            writer,
            events,
            leadership,
            meters: Meters::default(),
            moves: Moves::default(),
            returns,
        }
    }

    /// Says so of packets of objects whose addresses no node can host.
    #[must_use]
    pub fn with_unassigned(self, on_unassigned: OnUnassigned) -> Self {
        Self { node_address_serves: on_unassigned == OnUnassigned::NodeAddress, ..self }
    }

    /// Says what agents say of their pods.
    #[must_use]
    pub fn counting(self, asked: watch::Sender<Option<Arc<Nodes>>>, census: watch::Receiver<PodCounts>) -> Self {
        Self { asked, census, ..self }
    }

    /// Counts there.
    #[must_use]
    pub fn metered(self, meters: Meters) -> Self {
        Self { meters, ..self }
    }

    /// Runs until told to stop, or until the changes end.
    pub async fn run(mut self, mut changes: ChangeReceiver, stop: CancellationToken) {
        let mut retry_at: Option<Instant> = None;
        loop {
            let retry = tokio::time::sleep_until(retry_at.unwrap_or_else(|| Instant::now() + RETRY));
            tokio::select! {
                () = stop.cancelled() => return,
                changes = changes.take() => match changes {
                    Some(changes) => {
                        let news = changes.into_iter().map(|change| self.apply(change)).filter(|is_news| *is_news);
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
                    // A renewal is no news.
                    if self.leadership.since() == self.since {
                        continue;
                    }
                }
                Ok(()) = self.reach.changed() => {}
                Ok(()) = self.census.changed() => {}
                Ok(()) = self.returns.changed() => self.tell_of_return(),
                () = retry, if retry_at.is_some() => {}
            }
            self.since = self.leadership.since();
            if let (true, Some(objects)) = (std::mem::take(&mut self.unobserved), &self.objects) {
                self.numbering.observe(objects);
            }
            retry_at = None;
            let Some(since) = self.since else {
                self.strangers.retain(|_| false);
                self.problems = Problems::default();
                self.asked.send_if_modified(|asked| asked.take().is_some());
                self.moves.forget(|_| true);
                self.meters.set_cluster(None);
                continue;
            };
            tokio::select! {
                // Whatever was under way is the next leader's to find, as after a crash.
                () = stop.cancelled() => return,
                again = self.decide_and_write(since) => retry_at = again,
            }
        }
    }

    /// The log of each process has it; here it is for people who look at objects. It concerns all of them, and one event is enough.
    fn tell_of_return(&self) {
        let oldest = self.objects.iter().flat_map(|all| all.values()).min_by_key(|one| (one.created, &one.name));
        if let (true, Some(object)) = (self.leadership.leads(), oldest) {
            let about = About { name: &object.name, uid: &object.uid, pod: None };
            self.events.warn(about, "APIServerWentBack", WENT_BACK);
        }
    }

    /// False where nothing is to be decided because of it.
    fn apply(&mut self, change: Change) -> bool {
        match change {
            Change::Objects(update) => {
                self.unobserved = true;
                self.apply_objects(update);
            }
            Change::Nodes(update) => self.apply_nodes(update),
            Change::Ledger(ledger) => self.books.follow(ledger, Instant::now().into_std()),
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

    fn apply_objects(&mut self, update: Update<String, Arc<EgressObject>>) {
        let update = filled(update, |name| self.objects.as_ref()?.get(name).cloned());
        let now = Instant::now().into_std();
        match update {
            Update::Replaced(objects) => {
                let known = self.objects.iter().flat_map(|known| known.values());
                let gone = known.filter(|known| objects.get(&known.name).is_none_or(|new| new.uid != known.uid));
                gone.for_each(|object| self.books.depart(object, now));
                self.objects = Some(Arc::new(objects));
            }
            Update::Changed(_, object) => self.enter(object),
            Update::Removed(name) => {
                self.told.remove(&name);
                if let Some(object) = self.objects.as_mut().and_then(|objects| Arc::make_mut(objects).remove(&name)) {
                    self.moves.forget(|address| object.listed.iter().any(|listed| listed == address));
                    self.books.depart(&object, now);
                }
            }
        }
    }

    /// The answer to a write is known before the watch brings older versions of the object.
    fn enter(&mut self, object: Arc<EgressObject>) {
        let Some(objects) = &mut self.objects else { return };
        // Deleted and made anew between two looks.
        if let Some(former) = objects.get(&object.name).filter(|known| known.uid != object.uid) {
            self.books.depart(former, Instant::now().into_std());
        }
        let version = |object: &EgressObject| object.resource_version.parse::<u64>().ok();
        let older = objects.get(&object.name).is_some_and(|known| {
            known.uid == object.uid && version(known).zip(version(&object)).is_some_and(|(known, new)| new < known)
        });
        if !older {
            Arc::make_mut(objects).insert(object.name.clone(), object);
        }
    }

    /// When to do so again, if nothing else happens.
    async fn decide_and_write(&mut self, since: std::time::Instant) -> Option<Instant> {
        let (Some(objects), Some(nodes)) = (self.objects.clone(), self.nodes.clone()) else { return None };
        self.asked.send_if_modified(|asked| {
            let is_known = asked.as_ref().is_some_and(|known| Arc::ptr_eq(known, &nodes));
            *asked = Some(nodes.clone());
            !is_known
        });
        for (node, problem) in self.problems.news(&nodes) {
            warn!(node, problem, "what cannot be read of a node is as it was last read");
        }
        let numbers = self.numbering.number(&objects);
        let now = Instant::now().into_std();
        // A copy: whoever probes must not wait for a decision.
        let reach = self.reach.borrow_and_update().clone();
        let census = self.census.borrow_and_update().clone();
        let extract = self.books.extract(&objects, &nodes, &reach, (since, now))?;
        let (draft, again) = (extract.draft.clone(), extract.look_again);
        let nodes_seen = summary::nodes(&nodes, &reach);
        let decided = self.decide((objects, nodes), (reach, census), extract, now).await?;
        let Decisions { all, mut steps, look_again } = decided;
        // One that was replaced early may have statuses to write still, by records that must not be called off meanwhile. Those
        // of other addresses begin: their new nodes prepare in that time.
        if let Some(until) = self.leadership.former().map(|former| former.until).filter(|until| now < *until) {
            steps.retain(|step| step.is_new_to(&draft.records));
            let retry = (!self.books.open(draft, &steps).await).then(|| Instant::now() + RETRY);
            return again.into_iter().chain(look_again).chain([until]).map(Instant::from_std).chain(retry).min();
        }
        self.meters.set_cluster(Some(summary::cluster(&all, nodes_seen)));
        let again = again.into_iter().chain(look_again).min().map(Instant::from_std);
        let wishes: Vec<Wish> = all
            .into_iter()
            .filter_map(|decision| {
                let Decision { object, items, conditions, no_eligible_node, selected_pods, notices } = decision;
                let id = *numbers.get(&object.name)?;
                Some(Wish {
                    object,
                    wanted: Wanted { id, no_eligible_node, items, selected_pods, conditions },
                    notices,
                })
            })
            .collect();
        self.tell(&wishes);
        self.look_for_strangers();
        let settled =
            self.books.open(draft, &steps).await && self.write_all(wishes, now).await && self.books.close(&steps).await;
        let retry = (!settled).then(|| Instant::now() + RETRY);
        retry.into_iter().chain(again).min()
    }

    /// False when something is left to do.
    async fn write_all(&mut self, wishes: Vec<Wish>, now: std::time::Instant) -> bool {
        let differs = |wish: &Wish| !self.writer.is_right(&wish.object, &wish.wanted);
        let (wishes, held): (Vec<_>, Vec<_>) =
            wishes.into_iter().filter(differs).partition(|wish| self.strangers.may_write(&wish.object, now));
        let (losing, others): (Vec<_>, Vec<_>) = wishes.into_iter().partition(loses_an_address);
        let settled = self.write(losing).await;
        // What could not be taken must not be given.
        settled && self.write(others).await && held.is_empty()
    }

    /// On a thread that may be busy for a while: other tasks on this one, the renewal of the Lease
    /// among them, need not wait.
    async fn decide(
        &mut self,
        (objects, nodes): (Arc<Objects>, Arc<Nodes>),
        (reach, census): (NodeHealth, PodCounts),
        extract: Extract,
        now: std::time::Instant,
    ) -> Option<Decisions> {
        let mut watch = std::mem::take(&mut self.watch);
        let (networks, services) = (Arc::clone(&self.networks), Arc::clone(&self.services));
        let node_address_serves = self.node_address_serves;
        let deciding = tokio::task::spawn_blocking(move || {
            let (records, evidence, endless) = (&extract.draft.records, extract.evidence(), &extract.endless);
            let (unreachable, absent) = (&reach.unreachable, &reach.absent);
            let (objects, nodes, networks, services) = (&objects, &nodes, &networks, &services);
            let known = Known {
                objects,
                nodes,
                unreachable,
                absent,
                unserved: &reach.unserved,
                census: &census,
                node_address_serves,
                networks,
                services,
                records,
                evidence,
                endless,
                now,
            };
            let decisions = decide(&mut watch, &known);
            (watch, decisions)
        });
        match deciding.await {
            Ok((watch, decisions)) => {
                self.watch = watch;
                Some(decisions)
            }
            Err(error) => match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                // The process is about to end.
                Err(_) => None,
            },
        }
    }

    fn look_for_strangers(&mut self) {
        let Some(objects) = &self.objects else { return };
        let uids: BTreeSet<&str> = objects.values().map(|object| object.uid.as_str()).collect();
        self.strangers.retain(|uid| uids.contains(uid));
        let now = Instant::now().into_std();
        for object in objects.values() {
            if self.strangers.look(object, now) {
                warn!(egressip = object.name, "{FOREIGN_STATUS}");
                let about = About { name: &object.name, uid: &object.uid, pod: None };
                self.events.warn(about, "ForeignStatus", FOREIGN_STATUS);
            }
        }
    }

    async fn write(&mut self, decisions: Vec<Wish>) -> bool {
        let (writer, leadership, since) = (&self.writer, &self.leadership, self.since);
        let written: Vec<_> = futures::stream::iter(decisions)
            .map(|decision| async move {
                // Another may have led in between: then this decision is of its time.
                let outcome = match leadership.since() == since {
                    true => tokio::time::timeout(PATIENCE, writer.write(&decision.object, &decision.wanted))
                        .await
                        .unwrap_or(Err(WriteError::SilentHolder)),
                    false => Err(WriteError::Stale),
                };
                (decision, outcome)
            })
            .buffer_unordered(PARALLEL)
            .collect()
            .await;
        let (mut settled, mut has_written, mut failed) = (true, false, Vec::new());
        for (Wish { object, wanted, .. }, outcome) in written {
            match outcome {
                Ok(answer) => {
                    has_written = true;
                    let reason = wanted.conditions.first().map_or("", |condition| condition.reason);
                    // A count alone is news for whoever asks.
                    if object.items != wanted.items || !wanted.conditions.iter().all(|one| one.is_published(&object)) {
                        info!(egressip = object.name, id = wanted.id.0, items = %shown(&wanted), reason, "status written");
                    }
                    self.strangers.wrote(&answer);
                    self.note_moves(&object, &wanted.items);
                    self.apply_objects(Update::Changed(object.name.clone(), Arc::new(answer)));
                }
                Err(WriteError::Stale) => settled = false,
                Err(error) => {
                    self.strangers.forget(&object);
                    failed.push((object, error));
                }
            }
        }
        match failed.first() {
            Some((object, error)) => {
                settled = false;
                if self.complaint.is_due(error.code(), Instant::now().into_std()) {
                    let others = failed.len() - 1;
                    warn!(egressip = object.name, others, %error, "cannot write the status; trying again");
                }
            }
            None if has_written && self.complaint.ends() => info!("the status is written again"),
            None => {}
        }
        settled
    }

    /// Tells the object of each address that has another node now.
    fn note_moves(&mut self, object: &EgressObject, items: &[Item]) {
        let (nodes, reach) = (&self.nodes, self.reach.borrow());
        let why = |name: &str| {
            let node = nodes.as_ref().and_then(|nodes| nodes.get(name));
            let well = reach.lost.get(name).copied();
            (Why::of(node.map(Arc::as_ref), well.is_some()), well)
        };
        for moved in self.moves.note((&object.items, items), why, Instant::now().into_std()) {
            moved.took.into_iter().for_each(|took| self.meters.failed_over(took));
            let about = About { name: &object.name, uid: &object.uid, pod: None };
            self.events.note(about, "EgressIPMoved", &moved.to_string());
        }
    }

    /// Publishes what has not been said yet. A new leader takes what the condition says as said.
    fn tell(&mut self, decisions: &[Wish]) {
        for Wish { object, wanted, notices } in decisions {
            let found = &object.conditions;
            let said_by_another =
                wanted.conditions.iter().filter(|wanted| wanted.kind == conditions::ASSIGNED).all(|wanted| {
                    let is_same = |found: &Condition| found.reason == wanted.reason && found.message == wanted.message;
                    found.get(wanted.kind).is_some_and(|(_, found)| is_same(found))
                });
            let told = match self.told.insert(object.name.clone(), notices.clone()) {
                Some(told) => told,
                None if said_by_another => continue,
                None => BTreeSet::new(),
            };
            for notice in notices.difference(&told) {
                let about = About { name: &object.name, uid: &object.uid, pod: None };
                self.events.warn(about, notice.reason, &notice.message);
            }
        }
    }
}

fn loses_an_address(decision: &Wish) -> bool {
    let kept: BTreeSet<&str> = decision.wanted.items.iter().map(|item| item.egress_ip.as_str()).collect();
    decision.object.items.iter().any(|item| !kept.contains(item.egress_ip.as_str()))
}

fn shown(wanted: &Wanted) -> String {
    let items: Vec<String> = wanted.items.iter().map(|item| format!("{}={}", item.egress_ip, item.node)).collect();
    items.join(" ")
}
