//! What is said when the API server cannot be used: one line for all who ask it, and one when it is back.
//!
//! Five watches, the Lease and what is published all fail when the server is away, and go on trying. Each on its own
//! would say so; together they say it once, with the server's address and the cause, and again every minute while it
//! lasts. A request that the server answers with a refusal (a right that is missing) is another matter, which concerns
//! one of them: it is said for that one.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kube::Error;
use tracing::{debug, info, warn};

use super::causes::Causes;

/// Between two lines about one outage.
const AGAIN: Duration = Duration::from_secs(60);

/// Shared by all who use one API server.
#[derive(Clone, Debug)]
pub struct Outages {
    server: Arc<str>,
    state: Arc<Mutex<State>>,
}

/// Who cannot do what it does, by its name.
#[derive(Debug, Default)]
struct State {
    unanswered: BTreeSet<&'static str>,
    refused: BTreeSet<&'static str>,
    said: Option<Instant>,
}

impl State {
    /// Is it to be said that the server does not answer?
    fn unanswered(&mut self, what: &'static str, now: Instant) -> bool {
        self.unanswered.insert(what);
        let due = self.said.is_none_or(|said| now.duration_since(said) >= AGAIN);
        if due {
            self.said = Some(now);
        }
        due
    }

    /// Is it news that the server refuses this? It answers, at least.
    fn refused(&mut self, what: &'static str) -> bool {
        self.unanswered.remove(what);
        self.refused.insert(what)
    }

    /// Does the server answer everybody again, and does it refuse this no longer?
    fn works(&mut self, what: &'static str) -> (bool, bool) {
        let was_away = self.unanswered.remove(what) && self.unanswered.is_empty();
        if was_away {
            self.said = None;
        }
        (was_away, self.refused.remove(what))
    }
}

impl Outages {
    pub fn new(server: &str) -> Self {
        Self { server: server.into(), state: Arc::default() }
    }

    /// A request failed; it will be tried again.
    pub fn failed(&self, what: &'static str, error: &Error) {
        match error {
            Error::Api(_) => self.refused(what, &Causes(error).to_string()),
            _ => self.unanswered(what, &Causes(error).to_string()),
        }
    }

    pub fn unanswered(&self, what: &'static str, cause: &str) {
        if self.state().unanswered(what, Instant::now()) {
            warn!(server = %self.server, cause, "the API server does not answer; trying again");
        } else {
            debug!(what, cause, "the API server does not answer");
        }
    }

    pub fn refused(&self, what: &'static str, cause: &str) {
        if self.state().refused(what) {
            warn!(server = %self.server, what, cause, "the API server refuses a request; trying again");
        }
    }

    /// A request was answered as it should be.
    pub fn works(&self, what: &'static str) {
        let (was_away, was_refused) = self.state().works(what);
        if was_away {
            info!(server = %self.server, "the API server answers again");
        }
        if was_refused {
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
    fn an_outage_is_said_once_a_minute_and_its_end_once() {
        let (mut state, start) = (State::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        let said = [("pods", 0), ("nodes", 0), ("pods", 30), ("nodes", 59), ("nodes", 60), ("pods", 61)];
        assert_eq!(
            said.map(|(what, second)| state.unanswered(what, at(second))),
            [true, false, false, false, true, false]
        );
        assert_eq!(state.works("objects"), (false, false), "it never failed");
        assert_eq!(state.works("pods"), (false, false), "one is still waiting");
        assert_eq!(state.works("nodes"), (true, false));
        assert!(state.unanswered("pods", at(62)), "another outage");
    }

    #[test]
    fn a_refusal_is_said_for_each_and_ends_for_each() {
        let mut state = State::default();
        assert_eq!(["services", "services", "pods"].map(|what| state.refused(what)), [true, false, true]);
        assert_eq!(state.works("services"), (false, true));
        assert_eq!(state.works("services"), (false, false));
        assert!(state.unanswered("pods", Instant::now()));
        assert!(!state.refused("pods"), "said before");
        assert_eq!(state.works("pods"), (false, true), "a refusal was an answer already");
    }
}
