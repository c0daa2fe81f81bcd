//! The tasks that turn objects of other kinds into assignments, while this controller leads: one loop for all kinds.

use std::collections::BTreeMap;
use std::time::Duration;

use futures::{FutureExt, Stream, StreamExt};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::change_queue::ChangeReceiver;
use egress_core::allocation::Nodes;
use egress_core::model::policy::{EgressPolicy, Policies, PolicyKey, PolicyKind};
use egress_core::model::view::{Change, Update, filled};
use egress_kube::leader_election::Leadership;
use egress_kube::policy::status::{WriteError, WriteErrorLog};

/// Changes that are taken together.
const AT_ONCE: usize = 1024;
/// Pause after a failed write without any change.
const RETRY: Duration = Duration::from_secs(1);
/// Pauses after a pass, in which changes are collected.
const PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
/// Timeout of one write.
const TIMEOUT: Duration = Duration::from_secs(10);
/// How many writes are under way at once.
const PARALLEL: usize = 16;

/// What a task knows of its kind.
pub(super) trait Conversion {
    type Change;

    /// Takes a change of the watches. Returns whether it says anything new.
    fn apply(&mut self, change: Self::Change) -> bool;

    /// Whether an assignment of the task has this name.
    fn has_assignment(&self, name: &str) -> bool;

    /// Whether every watch has listed.
    fn is_whole(&self) -> bool;

    /// This controller leads no more: the next leader reports everything, and so does this one when it leads again.
    fn forget_reported(&mut self);

    /// Writes what differs. Returns what could not be written.
    async fn pass(&mut self, cluster: &KnownCluster, leadership: &Leadership) -> Vec<WriteError>;
}

/// Runs until stopped. `what` is what becomes of which objects, for the log.
pub(super) async fn run<C: Conversion>(
    mut conversion: C,
    what: &str,
    watches: impl Stream<Item = C::Change>,
    (mut cluster_changes, mut leadership): (ChangeReceiver, Leadership),
    stop: CancellationToken,
) {
    let mut changes = std::pin::pin!(watches.ready_chunks(AT_ONCE));
    let (mut cluster, mut write_errors, mut led) = (KnownCluster::default(), WriteErrorLog::default(), false);
    // Renewals of the Lease come more often than a pause is long, so it is a point in time.
    let mut retry_at: Option<Instant> = None;
    // Changes have come since the last pass began.
    let mut has_news = false;
    loop {
        let retry = tokio::time::sleep_until(retry_at.unwrap_or_else(Instant::now));
        tokio::select! {
            () = stop.cancelled() => return,
            Some(changes) = changes.next() => has_news |= apply(&mut conversion, changes),
            changes = cluster_changes.take() => match changes {
                Some(changes) => {
                    let is_own = |name: &str| conversion.has_assignment(name);
                    changes.into_iter().for_each(|change| has_news |= cluster.apply(change, is_own));
                }
                None => return,
            },
            alive = leadership.changed() => {
                if !alive {
                    return;
                }
                // A renewal alone changes nothing.
                has_news |= led != leadership.leads();
            }
            () = retry, if retry_at.is_some() => has_news = true,
            () = std::future::ready(()), if has_news => {}
        }
        // A pass writes much, and each write is a change. Half of them would look as if the other half had been lost.
        while let Some(Some(changes)) = changes.next().now_or_never() {
            has_news |= apply(&mut conversion, changes);
        }
        // Most events are the answers to writes of other tasks, and a pass looks at everything.
        if !std::mem::take(&mut has_news) {
            continue;
        }
        led = leadership.leads();
        if !led {
            retry_at = None;
            conversion.forget_reported();
            continue;
        }
        if !conversion.is_whole() || cluster.policies.is_none() {
            continue;
        }
        // The watches are read meanwhile. A pass takes seconds in a large cluster, and would find next what the watches had
        // brought before it, however long they were read then: it would write the same again, for ever.
        let (mut arrived, began) = (Vec::new(), Instant::now());
        let errors = {
            let mut pass = std::pin::pin!(conversion.pass(&cluster, &leadership));
            loop {
                tokio::select! {
                    () = stop.cancelled() => return,
                    errors = &mut pass => break errors,
                    Some(changes) = changes.next() => arrived.extend(changes),
                }
            }
        };
        has_news |= apply(&mut conversion, arrived);
        // A pass looks at everything, and what it has written comes back change by change: a pause as long as the pass, within
        // bounds, collects it.
        let until = Instant::now() + began.elapsed().clamp(PAUSE, LONGEST_PAUSE);
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep_until(until) => break,
                Some(changes) = changes.next() => has_news |= apply(&mut conversion, changes),
            }
        }
        retry_at = (!errors.is_empty()).then(|| Instant::now() + RETRY);
        log(what, &errors, &mut write_errors);
    }
}

/// Takes all changes. Returns whether any says something new.
fn apply<C: Conversion>(conversion: &mut C, changes: Vec<C::Change>) -> bool {
    let mut is_news = false;
    for change in changes {
        is_news |= conversion.apply(change);
    }
    is_news
}

fn log(what: &str, errors: &[WriteError], write_errors: &mut WriteErrorLog) {
    match errors.first() {
        Some(error) if write_errors.is_due(error.code(), std::time::Instant::now()) => {
            warn!(others = errors.len() - 1, %error, "cannot write {what}; trying again");
        }
        Some(_) => {}
        None if write_errors.ends() => info!("{what} is written again"),
        None => {}
    }
}

/// What the watches of the controller itself have brought.
#[derive(Default)]
pub(super) struct KnownCluster {
    /// The assignments as policies: what the leader has written to them. `None` before they are known.
    policies: Option<Policies>,
    /// For the tasks that get them; `None` before they are known.
    nodes: Option<Nodes>,
}

impl KnownCluster {
    /// Takes a change. Returns whether it says anything new that concerns the assignments of the task.
    fn apply(&mut self, change: Change, is_own: impl Fn(&str) -> bool) -> bool {
        match change {
            Change::Policies(Update::Replaced(all)) => {
                let all = all.into_iter().filter(|(key, _)| key.kind == PolicyKind::Assignment).collect();
                put(&mut self.policies, Update::Replaced(all))
            }
            Change::Policies(Update::Changed(key, _)) if key.kind != PolicyKind::Assignment => false,
            Change::Policies(update) => {
                // One that the watch of the task has not shown yet is news when it does; of one that is gone it knows no more.
                let concerns = match &update {
                    Update::Changed(key, _) => is_own(&key.name),
                    Update::Replaced(_) | Update::Removed(_) => true,
                };
                put(&mut self.policies, update) && concerns
            }
            Change::Nodes(update) => {
                let update = filled(update, |name| self.nodes.as_ref()?.get(name).cloned());
                put(&mut self.nodes, update)
            }
            Change::Namespaces(_) | Change::Pods(_) | Change::Services(_) | Change::Ledger(_) => false,
        }
    }

    /// The policy of the assignment with this name.
    pub(super) fn policy(&self, name: String) -> Option<&EgressPolicy> {
        let key = PolicyKey { kind: PolicyKind::Assignment, name };
        self.policies.as_ref()?.get(&key).map(|policy| &**policy)
    }

    pub(super) fn nodes(&self) -> Option<&Nodes> {
        self.nodes.as_ref()
    }
}

fn put<K: Ord, V: PartialEq>(known: &mut Option<BTreeMap<K, V>>, update: Update<K, V>) -> bool {
    match (update, known) {
        (Update::Replaced(all), known) => known.replace(all) != *known,
        (Update::Changed(key, value), Some(all)) => {
            let is_news = all.get(&key) != Some(&value);
            all.insert(key, value);
            is_news
        }
        (Update::Removed(key), Some(all)) => all.remove(&key).is_some(),
        // There is always a list first.
        (Update::Changed(..) | Update::Removed(_), None) => false,
    }
}

/// A write, unless this controller leads no more.
pub(super) async fn timed<T>(
    leadership: &Leadership,
    write: impl Future<Output = Result<T, WriteError>>,
) -> Result<T, WriteError> {
    if !leadership.leads() {
        return Err(WriteError::Stale);
    }
    tokio::time::timeout(TIMEOUT, write).await.unwrap_or(Err(WriteError::Timeout))
}

/// Performs all writes, a few at a time.
pub(super) async fn all<F: Future>(writes: Vec<F>) -> Vec<F::Output> {
    futures::stream::iter(writes).buffer_unordered(PARALLEL).collect().await
}

#[cfg(test)]
mod tests {
    use egress_core::leader_election::LeaderTerm;
    use std::sync::Arc;

    use futures::channel::mpsc::{UnboundedReceiver, UnboundedSender, unbounded};
    use tokio::sync::{Notify, watch};
    use tokio::task::JoinHandle;
    use tokio::time::timeout;

    use super::*;
    use crate::change_queue::{ChangeSender, inbox};

    /// Says how many changes each pass knows, and ends a pass when it may.
    struct Passes {
        known: usize,
        begun: UnboundedSender<usize>,
        may_end: Arc<Notify>,
    }

    impl Conversion for Passes {
        /// Whether it is news.
        type Change = bool;

        fn apply(&mut self, is_news: bool) -> bool {
            self.known += 1;
            is_news
        }

        fn has_assignment(&self, _: &str) -> bool {
            true
        }

        fn is_whole(&self) -> bool {
            true
        }

        fn forget_reported(&mut self) {}

        async fn pass(&mut self, _: &KnownCluster, _: &Leadership) -> Vec<WriteError> {
            self.begun.unbounded_send(self.known).expect("the test listens");
            self.may_end.notified().await;
            Vec::new()
        }
    }

    /// A task, the changes of its watches, its passes, and what ends a pass.
    struct RunningTask {
        changes: UnboundedSender<bool>,
        passes: UnboundedReceiver<usize>,
        may_end: Arc<Notify>,
        stop: CancellationToken,
        task: JoinHandle<()>,
        _term: watch::Sender<Option<LeaderTerm>>,
        _cluster: ChangeSender,
    }

    /// A task of a controller that leads, in a cluster without assignments.
    fn running() -> RunningTask {
        let (changes, watches) = unbounded();
        let (begun, passes) = unbounded();
        let (may_end, stop) = (Arc::new(Notify::new()), CancellationToken::new());
        let now = std::time::Instant::now();
        let until = now + Duration::from_secs(600);
        let (term, leadership) = watch::channel(Some(LeaderTerm { since: now, renewed: now, until, former: None }));
        let (cluster, cluster_changes) = inbox();
        let conversion = Passes { known: 0, begun, may_end: Arc::clone(&may_end) };
        let inputs = (cluster_changes, leadership.into());
        let task = tokio::spawn({
            let stop = stop.clone();
            async move { run(conversion, "a test", watches, inputs, stop).await }
        });
        cluster.put(Change::Policies(Update::Replaced(Policies::new())));
        RunningTask { changes, passes, may_end, stop, task, _term: term, _cluster: cluster }
    }

    impl RunningTask {
        async fn next_pass(&mut self) -> usize {
            let pass = timeout(Duration::from_secs(10), self.passes.next()).await;
            pass.expect("another pass").expect("it is running")
        }

        async fn stop(self) {
            self.stop.cancel();
            self.task.await.expect("it stops");
        }
    }

    #[tokio::test]
    async fn what_comes_during_a_pass_is_passed_over_next_without_another_event() {
        let mut running = running();
        assert_eq!(running.next_pass().await, 0);
        for known in 1..=3 {
            running.changes.unbounded_send(true).expect("it is running");
            // It is read while the pass has not ended.
            tokio::time::sleep(Duration::from_millis(1)).await;
            running.may_end.notify_one();
            assert_eq!(running.next_pass().await, known);
        }
        running.stop().await;
    }

    #[tokio::test]
    async fn what_says_nothing_new_is_taken_without_a_pass() {
        let mut running = running();
        assert_eq!(running.next_pass().await, 0);
        running.may_end.notify_one();
        for _ in 0..3 {
            running.changes.unbounded_send(false).expect("it is running");
            tokio::time::sleep(2 * PAUSE).await;
        }
        running.changes.unbounded_send(true).expect("it is running");
        assert_eq!(running.next_pass().await, 4);
        running.stop().await;
    }
}
