//! Outages of the API server: logged once when one begins and once when it ends, and published to every task that
//! retries. kube has no such state: it reports each failed request to its caller alone.
//!
//! Watches, the Lease and publishing tasks all fail while the server is away, and retry. Together they log one line, with the
//! server's address and the cause. A refusal (a missing right) concerns one of them and is logged for that one. A 5xx answer,
//! from the server or from a load balancer in front of it, counts as an outage.
//!
//! The first failed request that is answered ends the outage for all ([`ApiOutages::ends`]), and they retry at once. A
//! request that had not failed ends nothing: it does not show that the failed ones would be answered.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kube::Error;
use tokio::sync::watch;
use tracing::{debug, info, warn};

use crate::error_text::ErrorText;

/// An outage that begins sooner after the last one is not logged, unless it lasts until then.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Reports of one rollback arrive within this time: it is longer than the age of the oldest probe that counts.
const SAME_ROLLBACK: Duration = Duration::from_secs(30);

/// A server that is late once or twice is no outage.
const SHORTEST_OUTAGE: Duration = Duration::from_secs(2);

/// Shared by all users of one API server.
#[derive(Clone, Debug)]
pub struct ApiOutages {
    server: Arc<str>,
    state: Arc<Mutex<OutageState>>,
    ends: watch::Sender<Option<Instant>>,
    failures: watch::Sender<()>,
    rollbacks: watch::Sender<()>,
    /// When the server was found to have older data than before.
    rolled_back_at: Arc<Mutex<Option<Instant>>>,
    /// Start of this process: its watches list later, so an earlier rollback does not concern them.
    started: Instant,
}

/// Failing tasks, by name.
#[derive(Debug, Default)]
struct OutageState {
    unanswered: BTreeMap<&'static str, Instant>,
    refused: BTreeSet<&'static str>,
    /// When the outage began; until a failed request is answered.
    since: Option<Instant>,
    /// When this outage began, once it has been logged.
    logged: Option<Instant>,
    /// When an outage was last logged.
    last_logged: Option<Instant>,
    /// Number of outages.
    outages: u64,
    /// Names of the watches, by the path of the request.
    watches: BTreeMap<String, &'static str>,
}

/// Outages in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OutageSummary {
    /// Number of outages, a current one included.
    pub outages: u64,
    /// Duration of the current outage.
    pub away: Option<Duration>,
}

/// What an answer has ended.
#[derive(Debug, Default, PartialEq, Eq)]
struct EndedFailures {
    /// An outage, with its beginning.
    outage: Option<Instant>,
    /// A logged outage, with its beginning.
    logged: Option<Instant>,
    refusal: bool,
}

impl OutageState {
    /// Whether to log that the server does not answer.
    fn unanswered(&mut self, what: &'static str, now: Instant) -> bool {
        self.unanswered.entry(what).or_insert(now);
        self.outages += u64::from(self.since.is_none());
        let since = *self.since.get_or_insert(now);
        let is_due = self.last_logged.is_none_or(|last| now.duration_since(last) >= LOG_INTERVAL);
        if self.logged.is_some() || !is_due {
            return false;
        }
        (self.logged, self.last_logged) = (Some(since), Some(now));
        true
    }

    /// Whether to log that the server refuses this, and what the refusal ends: it is an answer.
    fn refused(&mut self, what: &'static str, now: Instant) -> (bool, EndedFailures) {
        let ended = self.answered(what, now);
        (self.refused.insert(what) && !ended.refusal, EndedFailures { refusal: false, ..ended })
    }

    fn answered(&mut self, what: &'static str, now: Instant) -> EndedFailures {
        let mut ended = EndedFailures { refusal: self.refused.remove(what), ..EndedFailures::default() };
        if let Some(begun) = self.unanswered.remove(what) {
            // The outage as this task saw it: another task may have failed for longer, for a reason of its own.
            ended.outage = self.since.take().map(|_| begun);
            ended.logged = self.logged.take();
            if ended.logged.is_some() {
                self.last_logged = Some(now);
            }
        }
        ended
    }
}

/// Whether the error says that the server is unreachable or cannot answer now.
pub(super) fn is_outage(error: &Error) -> bool {
    match error {
        Error::Api(status) => is_outage_code(status.code),
        _ => true,
    }
}

pub(super) fn is_outage_code(code: u16) -> bool {
    code >= 500
}

impl ApiOutages {
    pub fn new(server: &str) -> Self {
        let (ends, failures, rollbacks) = (watch::Sender::new(None), watch::Sender::new(()), watch::Sender::new(()));
        Self {
            server: server.into(),
            state: Arc::default(),
            ends,
            failures,
            rollbacks,
            rolled_back_at: Arc::default(),
            started: Instant::now(),
        }
    }

    /// The URL of the server.
    pub fn server(&self) -> &str {
        &self.server
    }

    /// Changes when a request is not answered, so that tasks with rare requests check whether the server answers.
    pub fn failures(&self) -> watch::Receiver<()> {
        self.failures.subscribe()
    }

    /// Changes at the end of each outage, to its beginning.
    pub fn ends(&self) -> watch::Receiver<Option<Instant>> {
        self.ends.subscribe()
    }

    /// Waits until the next check is due because the last one, or a request of another task since, failed. `failures` is from
    /// before the last check.
    pub async fn until_check_due(failures: &mut watch::Receiver<()>, is_answered: bool, pause: Duration) {
        if is_answered && failures.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
        tokio::time::sleep(pause).await;
    }

    pub fn summary(&self) -> OutageSummary {
        let state = self.state();
        OutageSummary { outages: state.outages, away: state.since.map(|since| since.elapsed()) }
    }

    /// Changes when the server is found to have older data than before. A watch that is resumed then gets no events until the
    /// server's versions have caught up.
    pub fn rollbacks(&self) -> watch::Receiver<()> {
        self.rollbacks.subscribe()
    }

    /// The server's version of an object is `latest`, and was `before`.
    pub fn rolled_back(&self, latest: u64, before: u64) {
        warn!(
            server = %self.server, latest, before,
            "the API server has older data than before: has a backup been restored? All objects are listed again; check whether \
             egress IPs are where they should be"
        );
        // Every time: a backup may be restored twice.
        self.note_rollback(Instant::now());
    }

    /// A controller has found at this time that the server has older data than before. Ignored if this process has listed all
    /// objects since.
    pub fn note_reported_rollback(&self, at: Instant) {
        let is_known = self.rolled_back_at().map_or(at < self.started, |known| at < known + SAME_ROLLBACK);
        if !is_known {
            warn!(
                server = %self.server,
                "a controller reports that the API server has older data than before: has a backup been restored? All objects are \
                 listed again"
            );
            self.note_rollback(at);
        }
    }

    /// When the server was last found to have older data than before.
    pub fn rolled_back_at(&self) -> Option<Instant> {
        *self.rolled_back_at.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note_rollback(&self, at: Instant) {
        *self.rolled_back_at.lock().unwrap_or_else(PoisonError::into_inner) = Some(at);
        self.rollbacks.send_replace(());
    }

    /// Duration of the current outage, if it is longer than one late answer.
    pub fn away(&self) -> Option<Duration> {
        self.summary().away.filter(|away| *away >= SHORTEST_OUTAGE)
    }

    /// The answer to a request that is retried if it fails or takes longer than this. `None` then.
    pub async fn answer<T>(
        &self,
        what: &'static str,
        limit: Duration,
        request: impl Future<Output = Result<T, Error>>,
    ) -> Option<T> {
        match tokio::time::timeout(limit, request).await {
            Ok(Ok(answer)) => {
                self.answered(what);
                return Some(answer);
            }
            Ok(Err(error)) => self.failed(what, &error),
            Err(_) => self.unanswered(what, "a request took too long"),
        }
        None
    }

    /// A request failed and will be retried.
    pub fn failed(&self, what: &'static str, error: &Error) {
        match is_outage(error) {
            false => self.refused(what, &ErrorText(error).to_string()),
            true => self.unanswered(what, &ErrorText(error).to_string()),
        }
    }

    pub fn unanswered(&self, what: &'static str, cause: &str) {
        if self.state().unanswered(what, Instant::now()) {
            warn!(server = %self.server, cause, condition = "api-server", "the API server does not answer; trying again");
        } else {
            debug!(what, cause, "the API server does not answer");
        }
        self.failures.send_replace(());
    }

    /// A request that may be given up was not answered. It makes other tasks check, and only requests that are retried
    /// decide whether this is an outage.
    pub(super) fn suspected(&self, what: &'static str, cause: &str) {
        debug!(what, cause, "a request is not answered");
        self.failures.send_replace(());
    }

    pub fn refused(&self, what: &'static str, cause: &str) {
        let (is_new, ended) = self.state().refused(what, Instant::now());
        self.publish_end(what, &ended);
        if is_new {
            let condition = format!("api-server/{what}");
            warn!(server = %self.server, what, cause, condition, "the API server refuses a request; trying again");
        }
    }

    /// A request was answered with success.
    pub fn answered(&self, what: &'static str) {
        let ended = self.state().answered(what, Instant::now());
        self.publish_end(what, &ended);
    }

    /// Registers the name of watches on this path.
    pub(super) fn register_watch(&self, path: &str, what: &'static str) {
        self.state().watches.insert(path.to_owned(), what);
    }

    /// A watch has begun on this path, which is an answer. Its first event may be far away.
    pub(super) fn watch_established(&self, path: &str) {
        let what = self.state().watches.get(path).copied();
        if let Some(what) = what {
            self.answered(what);
        }
    }

    fn publish_end(&self, what: &'static str, ended: &EndedFailures) {
        if let Some(began) = ended.logged {
            info!(
                server = %self.server, away_s = began.elapsed().as_secs(), condition = "api-server",
                "the API server answers again"
            );
        }
        if ended.outage.is_some() {
            self.ends.send_replace(ended.outage);
        }
        if ended.refusal {
            info!(what, condition = format!("api-server/{what}"), "the API server does not refuse it any more");
        }
    }

    /// A poisoned lock is used: every update is complete in itself.
    fn state(&self) -> MutexGuard<'_, OutageState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rollback_that_a_controller_reports_is_handled_once() {
        let outages = ApiOutages::new("http://nowhere");
        let rollbacks = outages.rollbacks();
        let mut received = rollbacks.clone();
        let mut is_new = move || {
            let is_new = received.has_changed().expect("it lives");
            received.mark_unchanged();
            is_new
        };
        let now = Instant::now();
        outages.note_reported_rollback(now.checked_sub(Duration::from_secs(60)).expect("a time"));
        assert!(!is_new(), "before this process began to watch");
        outages.note_reported_rollback(now + Duration::from_secs(1));
        assert!(is_new());
        outages.note_reported_rollback(now + Duration::from_secs(2));
        assert!(!is_new(), "the same rollback, by another probe");
        outages.rolled_back(7, 9);
        assert!(is_new());
        outages.rolled_back(5, 7);
        assert!(is_new(), "a second restore, however soon");
        outages.note_reported_rollback(now + Duration::from_secs(120));
        assert!(is_new(), "another");
    }

    #[test]
    fn an_outage_is_logged_once_and_ends_with_the_first_answer() {
        let (mut state, start) = (OutageState::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        let tries = [("pods", 0), ("nodes", 0), ("pods", 30), ("nodes", 59), ("nodes", 60), ("pods", 600)];
        let logged = tries.map(|(what, second)| state.unanswered(what, at(second)));
        assert_eq!(logged, [true, false, false, false, false, false], "ten minutes, one line");
        assert_eq!(state.outages, 1);
        assert_eq!(state.answered("objects", at(601)), EndedFailures::default(), "it never failed");
        let ended = EndedFailures { outage: Some(at(0)), logged: Some(at(0)), refusal: false };
        assert_eq!(state.answered("pods", at(602)), ended);
        assert_eq!(state.answered("nodes", at(602)), EndedFailures::default(), "it ends for the others too");
    }

    #[test]
    fn a_task_that_fails_for_long_is_no_outage_of_others() {
        let (mut state, start) = (OutageState::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        state.unanswered("nodes", at(0));
        state.unanswered("the Lease", at(7_200));
        assert_eq!(state.answered("the Lease", at(7_215)).outage, Some(at(7_200)));
        state.unanswered("the Lease", at(7_300));
        assert_eq!(state.answered("the Lease", at(7_310)).outage, Some(at(7_300)), "and the next one");
        assert_eq!(state.outages, 2);
    }

    #[test]
    fn a_late_failure_logs_nothing_and_ends_the_outage_again() {
        let (mut state, start) = (OutageState::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        assert!(state.unanswered("pods", at(0)));
        state.answered("pods", at(100));
        assert!(!state.unanswered("nodes", at(101)), "soon after the first");
        assert_eq!(
            state.answered("nodes", at(102)),
            EndedFailures { outage: Some(at(101)), ..EndedFailures::default() }
        );
        assert!(!state.unanswered("nodes", at(110)), "another, soon after the first");
        assert!(state.unanswered("nodes", at(160)), "and it lasts");
        assert_eq!(state.answered("nodes", at(161)).logged, Some(at(110)));
    }

    #[test]
    fn a_refusal_is_logged_for_each_task_and_ends_for_each() {
        let (mut state, now) = (OutageState::default(), Instant::now());
        let refused = |state: &mut OutageState, what| state.refused(what, now).0;
        assert_eq!(["services", "services", "pods"].map(|what| refused(&mut state, what)), [true, false, true]);
        assert!(state.answered("services", now).refusal);
        assert_eq!(state.answered("services", now), EndedFailures::default());
        assert!(state.unanswered("pods", now));
        let (is_new, ended) = state.refused("pods", now);
        assert!(!is_new, "logged before");
        assert_eq!(ended.logged, Some(now), "a refusal is an answer");
        assert_eq!(state.answered("pods", now), EndedFailures { refusal: true, ..EndedFailures::default() });
    }

    #[test]
    fn a_5xx_of_a_server_or_load_balancer_is_an_outage() {
        let error = |code| Error::Api(kube::core::Status::failure("no", "No").with_code(code).boxed());
        assert_eq!([403, 404, 409, 410, 429].map(|code| is_outage(&error(code))), [false; 5]);
        assert_eq!([500, 502, 503, 504].map(|code| is_outage(&error(code))), [true; 4]);
    }
}
