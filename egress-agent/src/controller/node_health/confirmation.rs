//! Which answers agents may be told of: each holds addresses by that.
//!
//! Of the other nodes all that are not gone, while this controller [vouches](egress_kube::leader_election::ProbeDuty::vouches). Of its
//! own node only those that came in before another node was heard: a leader that is cut off hears itself for ever, and its
//! word must be worth no more than that of the others.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// When any other node gave a sign last.
#[derive(Debug)]
pub(super) struct Others(Mutex<State>);

#[derive(Debug)]
struct State {
    /// Since when they are asked, where none has given one yet.
    latest: Instant,
    are_there: bool,
}

impl Others {
    pub(super) fn new(now: Instant) -> Self {
        Self(Mutex::new(State { latest: now, are_there: false }))
    }

    pub(super) fn note(&self, at: Instant) {
        let mut state = self.state();
        state.latest = state.latest.max(at);
    }

    /// Whether there is any other node that is asked.
    pub(super) fn set(&self, are_there: bool) {
        self.state().are_there = are_there;
    }

    /// Up to when this node's own answers count.
    fn limit(&self, now: Instant) -> Instant {
        let state = self.state();
        // Where nobody could take anything nobody needs to fear for it.
        if state.are_there { state.latest } else { now }
    }

    /// No step leaves the state half changed.
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Of one node that is asked.
#[derive(Clone, Debug)]
pub(super) struct Confirmation {
    /// Of the leader's own node.
    own: Option<Arc<Others>>,
    is_on: Arc<std::sync::atomic::AtomicBool>,
}

impl Confirmation {
    pub(super) fn for_other() -> Self {
        Self { own: None, is_on: Arc::new(true.into()) }
    }

    pub(super) fn for_own(others: Arc<Others>) -> Self {
        Self { own: Some(others), is_on: Arc::new(true.into()) }
    }

    /// One whose node counts as gone must not take it for the right to hold addresses which others are about to get.
    pub(super) fn set(&self, is_on: bool) {
        self.is_on.store(is_on, std::sync::atomic::Ordering::Release);
    }

    /// The agent may be told of answers that came in up to then; `None` for none.
    pub(super) fn limit(&self, now: Instant) -> Option<Instant> {
        if !self.is_on.load(std::sync::atomic::Ordering::Acquire) {
            return None;
        }
        Some(self.own.as_ref().map_or(now, |others| others.limit(now)))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_leaders_own_word_is_worth_no_more_than_that_of_others() {
        let start = Instant::now();
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        let (others, other) = (Arc::new(Others::new(start)), Confirmation::for_other());
        let own = Confirmation::for_own(others.clone());
        assert_eq!(own.limit(at(100)), Some(at(100)), "there is no other");
        others.set(true);
        assert_eq!((own.limit(at(200)), other.limit(at(200))), (Some(start), Some(at(200))));
        others.note(at(150));
        others.note(at(120));
        assert_eq!(own.limit(at(900)), Some(at(150)), "cut off since then");
        own.set(false);
        other.set(false);
        assert_eq!((own.limit(at(900)), other.limit(at(900))), (None, None));
    }
}
