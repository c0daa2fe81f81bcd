//! The tasks that turn objects of other kinds into assignments, while this controller leads: one loop for all kinds.

use std::sync::Arc;
use std::time::Duration;

use futures::{FutureExt, Stream, StreamExt};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::change_queue::ChangeReceiver;
use egress_core::model::policy::{EgressPolicy, Policies, PolicyKey, PolicyKind};
use egress_core::model::view::{Change, Update};
use egress_kube::leader_election::Leadership;
use egress_kube::policy::status::{WriteError, WriteErrorLog};

/// Changes that are taken together.
const AT_ONCE: usize = 1024;
/// Pause after a failed write without any change.
const RETRY: Duration = Duration::from_secs(1);
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
    async fn pass(&mut self, assignments: &AssignedPolicies, leadership: &Leadership) -> Vec<WriteError>;
}

/// Runs until stopped. `what` is what becomes of which objects, for the log.
pub(super) async fn run<C: Conversion>(
    mut conversion: C,
    what: &str,
    watches: impl Stream<Item = C::Change>,
    (mut policies, mut leadership): (ChangeReceiver, Leadership),
    stop: CancellationToken,
) {
    let mut changes = std::pin::pin!(watches.ready_chunks(AT_ONCE));
    let (mut assignments, mut write_errors, mut led) = (AssignedPolicies(None), WriteErrorLog::default(), false);
    // Renewals of the Lease come more often than a pause is long, so it is a point in time.
    let mut retry_at: Option<Instant> = None;
    loop {
        let retry = tokio::time::sleep_until(retry_at.unwrap_or_else(Instant::now));
        tokio::select! {
            () = stop.cancelled() => return,
            Some(changes) = changes.next() => changes.into_iter().for_each(|change| conversion.apply(change)),
            changes = policies.take() => match changes {
                Some(changes) => changes.into_iter().for_each(|change| assignments.apply(change)),
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
        }
        // A pass writes much, and each write is a change. Half of them would look as if the other half had been lost.
        while let Some(Some(changes)) = changes.next().now_or_never() {
            changes.into_iter().for_each(|change| conversion.apply(change));
        }
        led = leadership.leads();
        if !led {
            retry_at = None;
            conversion.forget_reported();
            continue;
        }
        if !conversion.is_whole() || assignments.0.is_none() {
            continue;
        }
        let errors = tokio::select! {
            () = stop.cancelled() => return,
            errors = conversion.pass(&assignments, &leadership) => errors,
        };
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

/// The assignments as policies: what the leader has written to them. `None` before they are known.
pub(super) struct AssignedPolicies(Option<Policies>);

impl AssignedPolicies {
    fn apply(&mut self, change: Change) {
        let Change::Policies(update) = change else { return };
        match update {
            Update::Replaced(all) => {
                self.0 = Some(all.into_iter().filter(|(key, _)| key.kind == PolicyKind::Assignment).collect());
            }
            Update::Changed(key, policy) if key.kind == PolicyKind::Assignment => {
                self.0.iter_mut().for_each(|all| drop(all.insert(key.clone(), Arc::clone(&policy))));
            }
            Update::Removed(key) => self.0.iter_mut().for_each(|all| drop(all.remove(&key))),
            Update::Changed(..) => {}
        }
    }

    /// The policy of the assignment with this name.
    pub(super) fn get(&self, name: String) -> Option<&EgressPolicy> {
        let key = PolicyKey { kind: PolicyKind::Assignment, name };
        self.0.as_ref()?.get(&key).map(|policy| &**policy)
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
