//! The node's half: changes of the cluster -> compiled state -> plan -> executor.
//!
//! Nothing is written before every watch has synced: a half-known cluster would look like one without pods or objects.
//! The kernel is observed once, then again after an error; in between the agent remembers what it did. An address that
//! cannot be claimed keeps nothing else from being done: it is left out, with its slot, and tried again, soon at first,
//! since the usual cause is that its former node has not let go yet.
//!
//! What this node may not hold, because it is on its way to another or because this node is out of touch, goes first,
//! before anything that takes time ([`ties`], [`crate::model::tenure`]). Cuts of pods' flows take time too, and go on beside the
//! turns ([`behind`]).

mod behind;
mod failing;
mod give_up;
mod last;
mod log;
mod perform;
mod report;
mod synced;
#[cfg(test)]
mod tests;
pub mod ties;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use behind::Behind;
use failing::Failing;
use last::Last;
use synced::Synced;
use ties::{Ties, Turn};

use crate::kube::events::{About, Events};
use crate::metrics::Meters;
use crate::metrics::life::Beat;
use crate::model::compile::Compiler;
use crate::model::desired::Settings;
use crate::model::executor::{Conflict, DataplaneError, Executor};
use crate::model::inbox::Taker;
use crate::model::moving::moving;
use crate::model::plan::{Parted, plan, plan_addresses};
use crate::model::selection::Standby;
use crate::model::state::{Action, EgressId, KernelState};
use crate::model::tenure::{Barred, withhold};
use crate::model::view::{Change, EgressObject, Node, Touched, Unreadable, Update};

/// After a failed action, then doubled up to the longest.
const FIRST_RETRY: Duration = Duration::from_millis(200);
const LONGEST_RETRY: Duration = Duration::from_secs(30);
/// Likewise where an address only waits for the object to be read anew.
const LONGEST_DOUBT: Duration = Duration::from_secs(1);

/// An executor that has failed for so long is one that cannot.
const OUT_OF_STEP_AFTER: Duration = Duration::from_secs(5);

/// It turns this often also where nothing happens.
const TURN: Duration = Duration::from_secs(5);

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
    /// Something must wait for what this node has promised to others.
    promised: bool,
    behind: Behind,
    failing: Failing,
    standby: BTreeSet<Standby>,
    /// Since when every try has failed.
    out_of_step: Option<Instant>,
    events: Option<Events>,
    ready: watch::Sender<Ready>,
    ties: Ties,
    meters: Meters,
    beat: Beat,
    turn: Duration,
    /// When the first of the changes arrived that are not in the kernel yet.
    waiting_since: Option<Instant>,
}

/// Whether this node does what the cluster wants, and where it can be asked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ready {
    pub serving: bool,
    /// The management port's addresses.
    pub management: Vec<IpAddr>,
}

impl<E: Executor> Reconciler<E> {
    pub fn new(settings: Settings, executor: E, events: Option<Events>, ready: watch::Sender<Ready>) -> Self {
        let ties = Ties::none(&settings.node_name);
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
            promised: false,
            behind: Behind::default(),
            failing: Failing::default(),
            standby: BTreeSet::new(),
            out_of_step: None,
            events,
            ready,
            ties,
            meters: Meters::default(),
            beat: Beat::default(),
            turn: TURN,
            waiting_since: None,
        }
    }

    /// Counts there.
    #[must_use]
    pub fn metered(self, meters: Meters) -> Self {
        Self { meters, ..self }
    }

    /// Notes there that it moves.
    #[must_use]
    pub fn beating(self, beat: Beat) -> Self {
        Self { beat, ..self }
    }

    /// Obeys leases and hand-overs.
    #[must_use]
    pub fn tied(self, ties: Ties) -> Self {
        Self { ties, ..self }
    }

    /// Runs until told to stop, or until the changes end. What the kernel does then goes on.
    pub async fn run(mut self, mut changes: Taker, stop: CancellationToken) -> E {
        let mut retry_at: Option<Instant> = None;
        let mut patience = FIRST_RETRY;
        loop {
            let (mut is_retry, is_known) = (false, self.actual.is_some());
            self.beat.note();
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
                    Turn::Asked(question) => { self.answer(question); continue; }
                },
                () = self.behind.next(), if is_known => {}
                () = tokio::time::sleep(self.turn) => continue,
                conflict = self.executor.conflict() => { self.note_conflict(&conflict); continue; }
            }
            if !self.synced.all() || self.ties.undecided() {
                // What ends it is a change. Leases run out all the same.
                (retry_at, self.waiting_since) = (None, None);
                if let Err(error) = self.let_go_unsynced().await {
                    warn!(%error, "cannot give up what this node may not hold; trying again");
                    retry_at = Some(Instant::now() + FIRST_RETRY);
                }
                continue;
            }
            let fenced = self.ties.fenced();
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
            } else if !self.behind.puts_off()
                && let Some(since) = self.waiting_since.take()
            {
                self.meters.reconciled(since.elapsed());
            }
            self.note_step(outcome.is_ok());
            retry_at = if outcome.is_ok() && !self.incomplete {
                patience = FIRST_RETRY;
                None
            } else {
                let now = Instant::now();
                // What is to be told is not left to a chance that comes later.
                let due = self.failing.due().filter(|due| *due > now);
                let at = due.into_iter().chain([now + patience]).min();
                // What was tried because of a change says nothing of how long it will take.
                let longer = if is_retry { patience * 2 } else { patience };
                patience = longer.min(if self.doubtful || self.promised { LONGEST_DOUBT } else { LONGEST_RETRY });
                at
            };
        }
    }

    /// What is due is cut before the process ends, and nothing else is begun.
    async fn end(mut self) -> E {
        if let Some(mut actual) = self.actual.take()
            && let Err(error) = self.finish_cuts(&mut actual).await
        {
            warn!(%error, "flows that were to be cut are left to the next agent");
        }
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
        let said = |object: &EgressObject, one: &Unreadable| {
            view.objects.get(&object.name).is_some_and(|old| old.unreadable.iter().any(|old| old.why == one.why))
        };
        let node = |name: &str, node: &Node| {
            for problem in node.problems.iter().filter(|_| node_is_news(name, node)) {
                warn!(node = name, problem, "a node's annotation cannot be read; what was read last holds");
            }
        };
        let object = |object: &EgressObject| {
            for one in object.unreadable.iter().filter(|one| !said(object, one)) {
                warn!(egressip = object.name, problem = one.why, "an object cannot be read; what was read last holds");
            }
        };
        match change {
            Change::Nodes(Update::Changed(name, value)) => node(name, value),
            Change::Nodes(Update::Replaced(nodes)) => nodes.iter().for_each(|(name, value)| node(name, value)),
            Change::Objects(Update::Changed(_, value)) => object(value),
            Change::Objects(Update::Replaced(objects)) => objects.values().for_each(|value| object(value)),
            Change::Nodes(_)
            | Change::Objects(_)
            | Change::Namespaces(_)
            | Change::Pods(_)
            | Change::Services(_)
            | Change::Ledger(_) => {}
        }
    }

    async fn reconcile(&mut self) -> Result<(), DataplaneError> {
        self.refused.clear();
        (self.unprepared, self.promised) = (false, false);
        let observed = self.actual.is_none();
        let mut whole = std::mem::take(&mut self.incomplete) || observed;
        let actual = match self.actual.take() {
            Some(actual) => actual,
            None => {
                self.let_go().await?;
                self.behind.forget().await;
                self.executor.observe().await?
            }
        };
        let mut actual = self.last.hold(actual);
        self.beat.note();
        let waits = self.ties.wait_for_heirs(self.compiler.view(), &actual.owned);
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
            let mut parted = Parted::default();
            let plan = match touched {
                Touched::Addresses(mut addresses) if !whole => {
                    self.behind.admit(&mut addresses, desired);
                    parted = plan_addresses(&actual, desired, &addresses);
                    std::mem::take(&mut parted.at_once)
                }
                Touched::Addresses(_) | Touched::Everything => {
                    self.ties.wants(!desired.owned.is_empty());
                    barred = self.ties.tenure.barred(&desired.owned, &actual.owned);
                    self.ties.ask_back(&desired.owned);
                    let mut desired = desired.clone();
                    desired.moving = moving(&self.ties.tenure, self.compiler.view(), &desired, &actual);
                    withhold(&mut desired, &barred.all);
                    withhold(&mut desired, &self.refused);
                    self.promised = self.ties.keep_promises(&mut desired, &actual);
                    plan(&actual, &desired)
                }
            };
            if let Some((id, address, error)) = self.perform(&mut actual, &plan).await? {
                self.refused.insert(id, address);
                self.note_failure(id, address, &error);
                whole = true;
                continue;
            }
            self.behind.leave(parted);
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
        self.ties.tenure.settle(&actual.owned);
        for (id, message) in self.failing.settle(&self.refused, &actual, Instant::now()) {
            self.tell(id, &message);
        }
        self.actual = Some(actual.done());
        if let Some(desired) = self.compiler.desired() {
            self.ties.ask_back(&desired.owned);
        }
        self.incomplete = self.doubtful || self.promised || waits || self.unprepared || !self.refused.is_empty();
        if observed {
            self.executor.confirm();
        }
        self.publish();
        self.announce_standby();
        Ok(())
    }

    /// One line when a claim begins to fail, one event when it goes on.
    fn note_failure(&mut self, id: EgressId, address: IpAddr, error: &DataplaneError) {
        let (is_new, told) = self.failing.note((id, address), error, Instant::now());
        if is_new {
            warn!(id = id.0, %address, %error, "cannot claim an egress IP yet; trying again");
        }
        if let Some(message) = told {
            self.tell(id, &message);
        }
    }

    /// Likewise for somebody who answers for what this node holds.
    fn note_conflict(&mut self, conflict: &Conflict) {
        let mut held = self.actual.iter().flat_map(|actual| &actual.owned);
        let Some((&id, _)) = held.find(|(_, address)| **address == conflict.address) else { return };
        if self.failing.hear(conflict.address) {
            warn!(%conflict, "somebody else answers for an egress IP of this node");
            self.tell(id, &conflict.to_string());
        }
    }

    fn tell(&self, id: EgressId, message: &str) {
        let object = self.compiler.view().objects.values().find(|object| object.id == Some(id));
        if let (Some(events), Some(object)) = (&self.events, object) {
            let about = About { name: &object.name, uid: &object.uid, pod: None };
            events.warn(about, "EgressIPConflict", message);
        }
    }

    fn publish(&mut self) {
        let management = self.compiler.own_node().map(|node| node.management()).unwrap_or_default();
        let ready = Ready { serving: true, management };
        self.ready.send_if_modified(|known| std::mem::replace(known, ready.clone()) != ready);
    }

    /// Tells the owners of objects that do not serve a pod although they select it.
    fn announce_standby(&mut self) {
        let standby = self.compiler.standby();
        if *standby == self.standby {
            return;
        }
        let standby = standby.clone();
        for Standby { object, pod, served_by } in standby.difference(&self.standby) {
            let message = format!(
                "EgressIP object {object} will not be configured for pod {}/{} since another egressIP object {served_by} \
                 is serving it, this is undefined",
                pod.namespace, pod.name
            );
            info!(egressip = object, pod = pod.name, namespace = pod.namespace, served_by, "standby");
            let uid = self.compiler.view().objects.get(object).map(|object| object.uid.clone()).unwrap_or_default();
            if let Some(events) = &self.events {
                let about = About { name: object, uid: &uid, pod: Some(pod) };
                events.warn(about, "UndefinedRequest", &message);
            }
        }
        self.standby = standby;
    }
}
