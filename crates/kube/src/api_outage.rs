//! The API server's absence: said once when it goes and once when it is back, and told to all who wait for it.
//!
//! The watches, the Lease and what is published all fail when the server is away, and go on trying. Each on its own would
//! say so; together they say it once, with the server's address and the cause. A request that the server answers with a
//! refusal (a right that is missing) is another matter, which concerns one of them: it is said for that one. That it
//! cannot answer at the moment (5xx, from itself or from a load balancer before it) is an absence.
//!
//! The first of those who have failed that is answered ends the absence for all ([`ApiOutages::ends`]): they look again at once
//! instead of waiting for their own turn. Whoever has not failed himself proves nothing: a list that is too large to be
//! answered is no reason to ask for it each second.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kube::Error;
use tokio::sync::watch;
use tracing::{debug, info, warn};

use crate::error_text::ErrorText;

/// An outage that begins sooner behind the last is not said, unless it lasts until then.
const AGAIN: Duration = Duration::from_secs(60);

/// Messages take their time: longer than the oldest probe that counts.
const SAME_RETURN: Duration = Duration::from_secs(30);

/// One that is late once or twice is there.
const WORTH_A_WORD: Duration = Duration::from_secs(2);

/// Shared by all who use one API server.
#[derive(Clone, Debug)]
pub struct ApiOutages {
    server: Arc<str>,
    state: Arc<Mutex<State>>,
    ends: watch::Sender<Option<Instant>>,
    failures: watch::Sender<()>,
    returns: watch::Sender<()>,
    /// When the server was found to know less than it did.
    returned: Arc<Mutex<Option<Instant>>>,
    /// What was before is known to no watch of this process.
    began: Instant,
}

/// Who cannot do what it does, by its name.
#[derive(Debug, Default)]
struct State {
    unanswered: BTreeMap<&'static str, Instant>,
    refused: BTreeSet<&'static str>,
    /// Since when the server has been away; until one who has failed is answered.
    since: Option<Instant>,
    /// When the line about this outage was written, with its begin.
    said: Option<Instant>,
    /// When the last line about any was.
    last_said: Option<Instant>,
    /// How many there have been.
    outages: u64,
    /// Who watches where, by the path of the request.
    watches: BTreeMap<String, &'static str>,
}

/// What there is to know of outages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// How many there have been, with one that lasts.
    pub outages: u64,
    /// For how long the server has not answered, where it does not.
    pub away: Option<Duration>,
}

/// What an answer ends.
#[derive(Debug, Default, PartialEq, Eq)]
struct Ended {
    /// An outage that began then.
    outage: Option<Instant>,
    /// One that was said, which began then.
    said: Option<Instant>,
    refusal: bool,
}

impl State {
    /// Is it to be said that the server does not answer?
    fn unanswered(&mut self, what: &'static str, now: Instant) -> bool {
        self.unanswered.entry(what).or_insert(now);
        self.outages += u64::from(self.since.is_none());
        let since = *self.since.get_or_insert(now);
        let is_due = self.last_said.is_none_or(|last| now.duration_since(last) >= AGAIN);
        if self.said.is_some() || !is_due {
            return false;
        }
        (self.said, self.last_said) = (Some(since), Some(now));
        true
    }

    /// Is it news that the server refuses this? It answers, at least.
    fn refused(&mut self, what: &'static str, now: Instant) -> (bool, Ended) {
        let ended = self.works(what, now);
        (self.refused.insert(what) && !ended.refusal, Ended { refusal: false, ..ended })
    }

    fn works(&mut self, what: &'static str, now: Instant) -> Ended {
        let mut ended = Ended { refusal: self.refused.remove(what), ..Ended::default() };
        if let Some(begun) = self.unanswered.remove(what) {
            // Its own: what somebody else has failed at for long, for reasons of its own, was no outage.
            ended.outage = self.since.take().map(|_| begun);
            ended.said = self.said.take();
            if ended.said.is_some() {
                self.last_said = Some(now);
            }
        }
        ended
    }
}

/// Whether an error says that the server is not there, or cannot answer anybody now.
pub(super) fn is_absence(error: &Error) -> bool {
    match error {
        Error::Api(status) => is_absence_code(status.code),
        _ => true,
    }
}

pub(super) fn is_absence_code(code: u16) -> bool {
    code >= 500
}

impl ApiOutages {
    pub fn new(server: &str) -> Self {
        let (ends, failures, returns) = (watch::Sender::new(None), watch::Sender::new(()), watch::Sender::new(()));
        Self {
            server: server.into(),
            state: Arc::default(),
            ends,
            failures,
            returns,
            returned: Arc::default(),
            began: Instant::now(),
        }
    }

    /// The URL of the server.
    pub fn server(&self) -> &str {
        &self.server
    }

    /// Changes when a request was not answered: whoever looks seldom is to find out whether the server is there.
    pub fn failures(&self) -> watch::Receiver<()> {
        self.failures.subscribe()
    }

    /// Changes at the end of each outage, to when it began.
    pub fn ends(&self) -> watch::Receiver<Option<Instant>> {
        self.ends.subscribe()
    }

    /// Waits for the time of a look that is due because the latest, or a request of another since, was in vain. `failures` is
    /// from before the latest.
    pub async fn doubt(failures: &mut watch::Receiver<()>, is_answered: bool, pause: Duration) {
        if is_answered && failures.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
        tokio::time::sleep(pause).await;
    }

    pub fn seen(&self) -> Seen {
        let state = self.state();
        Seen { outages: state.outages, away: state.since.map(|since| since.elapsed()) }
    }

    /// Changes when the server is found to know less than it did: a watch that goes on where it was hears nothing then, until
    /// as much has happened again.
    pub fn returns(&self) -> watch::Receiver<()> {
        self.returns.subscribe()
    }

    /// The server's latest version of something is this, and was that before.
    pub fn went_back(&self, latest: u64, before: u64) {
        warn!(
            server = %self.server, latest, before,
            "the API server knows less than it did: has a backup been restored? All is listed anew; look whether egress IPs are \
             where they should be"
        );
        // Each time: a backup may be restored twice.
        self.return_now(Instant::now());
    }

    /// A controller has found, at that time, that the server knows less than it did. News where this process has not just listed
    /// all again.
    pub fn learn_of_return(&self, at: Instant) {
        let is_known = self.returned().map_or(at < self.began, |known| at < known + SAME_RETURN);
        if !is_known {
            warn!(
                server = %self.server,
                "a controller says that the API server knows less than it did: has a backup been restored? All is listed again"
            );
            self.return_now(at);
        }
    }

    /// When the server was last found to know less than it did.
    pub fn returned(&self) -> Option<Instant> {
        *self.returned.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn return_now(&self, at: Instant) {
        *self.returned.lock().unwrap_or_else(PoisonError::into_inner) = Some(at);
        self.returns.send_replace(());
    }

    /// For how long the server has not answered, where that is longer than a request may take.
    pub fn away(&self) -> Option<Duration> {
        self.seen().away.filter(|away| *away >= WORTH_A_WORD)
    }

    /// A request failed; it will be tried again.
    pub fn failed(&self, what: &'static str, error: &Error) {
        match is_absence(error) {
            false => self.refused(what, &ErrorText(error).to_string()),
            true => self.unanswered(what, &ErrorText(error).to_string()),
        }
    }

    pub fn unanswered(&self, what: &'static str, cause: &str) {
        if self.state().unanswered(what, Instant::now()) {
            warn!(server = %self.server, cause, "the API server does not answer; trying again");
        } else {
            debug!(what, cause, "the API server does not answer");
        }
        self.failures.send_replace(());
    }

    /// A request that may be given up was not answered. Whether the server is away is for those to say who go on asking, and
    /// who are told to look.
    pub(super) fn suspected(&self, what: &'static str, cause: &str) {
        debug!(what, cause, "a request is not answered");
        self.failures.send_replace(());
    }

    pub fn refused(&self, what: &'static str, cause: &str) {
        let (is_news, ended) = self.state().refused(what, Instant::now());
        self.tell(what, &ended);
        if is_news {
            warn!(server = %self.server, what, cause, "the API server refuses a request; trying again");
        }
    }

    /// A request was answered as it should be.
    pub fn works(&self, what: &'static str) {
        let ended = self.state().works(what, Instant::now());
        self.tell(what, &ended);
    }

    /// From now on a watch that begins on this path is one of these.
    pub(super) fn watches(&self, path: &str, what: &'static str) {
        self.state().watches.insert(path.to_owned(), what);
    }

    /// A watch has begun on this path. It may be long until it tells of something.
    pub(super) fn watch_begins(&self, path: &str) {
        let what = self.state().watches.get(path).copied();
        if let Some(what) = what {
            self.works(what);
        }
    }

    fn tell(&self, what: &'static str, ended: &Ended) {
        if let Some(began) = ended.said {
            info!(server = %self.server, away_s = began.elapsed().as_secs(), "the API server answers again");
        }
        if ended.outage.is_some() {
            self.ends.send_replace(ended.outage);
        }
        if ended.refusal {
            info!(what, "the API server does not refuse it any more");
        }
    }

    /// No step leaves the state half changed.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_return_that_a_controller_tells_of_is_news_once() {
        let outages = ApiOutages::new("http://nowhere");
        let returns = outages.returns();
        let mut seen = returns.clone();
        let mut is_news = move || {
            let is_news = seen.has_changed().expect("it lives");
            seen.mark_unchanged();
            is_news
        };
        let now = Instant::now();
        outages.learn_of_return(now.checked_sub(Duration::from_secs(60)).expect("a time"));
        assert!(!is_news(), "before this process began to watch");
        outages.learn_of_return(now + Duration::from_secs(1));
        assert!(is_news());
        outages.learn_of_return(now + Duration::from_secs(2));
        assert!(!is_news(), "the same, by another probe");
        outages.went_back(7, 9);
        assert!(is_news());
        outages.went_back(5, 7);
        assert!(is_news(), "a second restore, however soon");
        outages.learn_of_return(now + Duration::from_secs(120));
        assert!(is_news(), "another");
    }

    #[test]
    fn an_outage_is_said_once_and_ends_with_the_first_who_is_answered() {
        let (mut state, start) = (State::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        let tries = [("pods", 0), ("nodes", 0), ("pods", 30), ("nodes", 59), ("nodes", 60), ("pods", 600)];
        let said = tries.map(|(what, second)| state.unanswered(what, at(second)));
        assert_eq!(said, [true, false, false, false, false, false], "ten minutes, one line");
        assert_eq!(state.outages, 1);
        assert_eq!(state.works("objects", at(601)), Ended::default(), "it never failed");
        let ended = Ended { outage: Some(at(0)), said: Some(at(0)), refusal: false };
        assert_eq!(state.works("pods", at(602)), ended);
        assert_eq!(state.works("nodes", at(602)), Ended::default(), "the others are told of it");
    }

    #[test]
    fn what_one_has_failed_at_for_long_is_no_outage_of_others() {
        let (mut state, start) = (State::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        state.unanswered("nodes", at(0));
        state.unanswered("the Lease", at(7_200));
        assert_eq!(state.works("the Lease", at(7_215)).outage, Some(at(7_200)));
        state.unanswered("the Lease", at(7_300));
        assert_eq!(state.works("the Lease", at(7_310)).outage, Some(at(7_300)), "and the next one");
        assert_eq!(state.outages, 2);
    }

    #[test]
    fn who_was_late_to_fail_says_nothing_and_ends_it_again() {
        let (mut state, start) = (State::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        assert!(state.unanswered("pods", at(0)));
        state.works("pods", at(100));
        assert!(!state.unanswered("nodes", at(101)), "a request from before");
        assert_eq!(state.works("nodes", at(102)), Ended { outage: Some(at(101)), ..Ended::default() });
        assert!(!state.unanswered("nodes", at(110)), "another, soon behind the first");
        assert!(state.unanswered("nodes", at(160)), "and it lasts");
        assert_eq!(state.works("nodes", at(161)).said, Some(at(110)));
    }

    #[test]
    fn a_refusal_is_said_for_each_and_ends_for_each() {
        let (mut state, now) = (State::default(), Instant::now());
        let refused = |state: &mut State, what| state.refused(what, now).0;
        assert_eq!(["services", "services", "pods"].map(|what| refused(&mut state, what)), [true, false, true]);
        assert!(state.works("services", now).refusal);
        assert_eq!(state.works("services", now), Ended::default());
        assert!(state.unanswered("pods", now));
        let (is_news, ended) = state.refused("pods", now);
        assert!(!is_news, "said before");
        assert_eq!(ended.said, Some(now), "a refusal is an answer");
        assert_eq!(state.works("pods", now), Ended { refusal: true, ..Ended::default() });
    }

    #[test]
    fn what_a_server_or_a_balancer_cannot_answer_is_an_absence() {
        let error = |code| Error::Api(kube::core::Status::failure("no", "No").with_code(code).boxed());
        assert_eq!([403, 404, 409, 410, 429].map(|code| is_absence(&error(code))), [false; 5]);
        assert_eq!([500, 502, 503, 504].map(|code| is_absence(&error(code))), [true; 4]);
    }
}
