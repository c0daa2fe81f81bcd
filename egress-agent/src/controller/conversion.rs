//! The tasks that turn objects of other kinds into assignments, while this controller leads: one loop for all kinds.

use std::sync::Arc;
use std::time::Duration;

use futures::{FutureExt, Stream, StreamExt};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::change_queue::ChangeReceiver;
use egress_core::allocation::Nodes;
use egress_core::model::node::Node;
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

    /// Takes a change of the watches.
    fn apply(&mut self, change: Self::Change);

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
            Some(changes) = changes.next() => changes.into_iter().for_each(|change| conversion.apply(change)),
            changes = cluster_changes.take() => match changes {
                Some(changes) => changes.into_iter().for_each(|change| cluster.apply(change)),
                None => return,
            },
            alive = leadership.changed() => {
                if !alive {
                    return;
                }
                // A renewal alone changes nothing.
                if led == leadership.leads() {
                    continue;
                }
            }
            () = retry, if retry_at.is_some() => {}
            () = std::future::ready(()), if has_news => {}
        }
        // A pass writes much, and each write is a change. Half of them would look as if the other half had been lost.
        while let Some(Some(changes)) = changes.next().now_or_never() {
            changes.into_iter().for_each(|change| conversion.apply(change));
        }
        led = leadership.leads();
        has_news = false;
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
        has_news = !arrived.is_empty();
        arrived.into_iter().for_each(|change| conversion.apply(change));
        // A pass looks at everything, and what it has written comes back change by change: a pause as long as the pass, within
        // bounds, collects it.
        let until = Instant::now() + began.elapsed().clamp(PAUSE, LONGEST_PAUSE);
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep_until(until) => break,
                Some(changes) = changes.next() => {
                    has_news = true;
                    changes.into_iter().for_each(|change| conversion.apply(change));
                }
            }
        }
        retry_at = (!errors.is_empty()).then(|| Instant::now() + RETRY);
        log(what, &errors, &mut write_errors);
    }
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
    fn apply(&mut self, change: Change) {
        match change {
            Change::Policies(update) => self.apply_policies(update),
            Change::Nodes(update) => self.apply_nodes(update),
            Change::Namespaces(_) | Change::Pods(_) | Change::Services(_) | Change::Ledger(_) => {}
        }
    }

    fn apply_policies(&mut self, update: Update<PolicyKey, Arc<EgressPolicy>>) {
        match update {
            Update::Replaced(all) => {
                self.policies = Some(all.into_iter().filter(|(key, _)| key.kind == PolicyKind::Assignment).collect());
            }
            Update::Changed(key, policy) if key.kind == PolicyKind::Assignment => {
                self.policies.iter_mut().for_each(|all| drop(all.insert(key.clone(), Arc::clone(&policy))));
            }
            Update::Removed(key) => self.policies.iter_mut().for_each(|all| drop(all.remove(&key))),
            Update::Changed(..) => {}
        }
    }

    fn apply_nodes(&mut self, update: Update<String, Arc<Node>>) {
        let update = filled(update, |name| self.nodes.as_ref()?.get(name).cloned());
        match update {
            Update::Replaced(all) => self.nodes = Some(all),
            Update::Changed(name, node) => {
                self.nodes.iter_mut().for_each(|all| drop(all.insert(name.clone(), Arc::clone(&node))));
            }
            Update::Removed(name) => self.nodes.iter_mut().for_each(|all| drop(all.remove(&name))),
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
    use futures::channel::mpsc::{UnboundedSender, unbounded};
    use tokio::sync::{Notify, watch};
    use tokio::time::timeout;

    use super::*;
    use crate::change_queue::inbox;

    /// Says how many changes each pass knows, and ends a pass when it may.
    struct Passes {
        known: usize,
        begun: UnboundedSender<usize>,
        may_end: Arc<Notify>,
    }

    impl Conversion for Passes {
        type Change = ();

        fn apply(&mut self, (): ()) {
            self.known += 1;
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

    #[tokio::test]
    async fn what_comes_during_a_pass_is_passed_over_next_without_another_event() {
        let (changes, watches) = unbounded();
        let (begun, mut passes) = unbounded();
        let may_end = Arc::new(Notify::new());
        let now = std::time::Instant::now();
        let until = now + Duration::from_secs(600);
        let (_term, leadership) = watch::channel(Some(LeaderTerm { since: now, renewed: now, until, former: None }));
        let (cluster, cluster_changes) = inbox();
        let conversion = Passes { known: 0, begun, may_end: Arc::clone(&may_end) };
        let stop = CancellationToken::new();
        let running = tokio::spawn({
            let stop = stop.clone();
            async move { run(conversion, "a test", watches, (cluster_changes, leadership.into()), stop).await }
        });
        cluster.put(Change::Policies(Update::Replaced(Policies::new())));
        let patience = Duration::from_secs(10);
        assert_eq!(timeout(patience, passes.next()).await.expect("a first pass"), Some(0));
        for known in 1..=3 {
            changes.unbounded_send(()).expect("it is running");
            // It is read while the pass has not ended.
            tokio::time::sleep(Duration::from_millis(1)).await;
            may_end.notify_one();
            assert_eq!(timeout(patience, passes.next()).await.expect("another pass"), Some(known));
        }
        stop.cancel();
        running.await.expect("it stops");
    }
}
