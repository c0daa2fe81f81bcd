//! Which answers may be confirmed to agents: they hold addresses by that.
//!
//! Answers of other nodes that are not gone count while this controller may confirm
//! ([`may_confirm`](egress_kube::leader_election::ProbeDuty::may_confirm)). Answers of its own node count only if they
//! came before the last answer of another node: the own agent still answers a leader that is cut off, and must not hold
//! addresses longer than the others.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// When any other node last answered.
#[derive(Debug)]
pub(super) struct OtherNodes(Mutex<ConfirmationState>);

#[derive(Debug)]
struct ConfirmationState {
    /// The last answer, or the beginning of probing.
    latest: Instant,
    exist: bool,
}

impl OtherNodes {
    pub(super) fn new(now: Instant) -> Self {
        Self(Mutex::new(ConfirmationState { latest: now, exist: false }))
    }

    pub(super) fn note_answer(&self, at: Instant) {
        let mut state = self.state();
        state.latest = state.latest.max(at);
    }

    /// Sets whether any other node is probed.
    pub(super) fn set_exist(&self, exist: bool) {
        self.state().exist = exist;
    }

    /// The time up to which answers of the leader's own node count.
    fn limit(&self, now: Instant) -> Instant {
        let state = self.state();
        // Without other egress nodes no address can move.
        if state.exist { state.latest } else { now }
    }

    /// A poisoned lock is used: every update is complete in itself.
    fn state(&self) -> MutexGuard<'_, ConfirmationState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether and which answers of one node may be confirmed.
#[derive(Clone, Debug)]
pub(super) struct Confirmation {
    /// Set for the leader's own node.
    own: Option<Arc<OtherNodes>>,
    is_enabled: Arc<std::sync::atomic::AtomicBool>,
}

impl Confirmation {
    pub(super) fn for_other() -> Self {
        Self { own: None, is_enabled: Arc::new(true.into()) }
    }

    pub(super) fn for_own(others: Arc<OtherNodes>) -> Self {
        Self { own: Some(others), is_enabled: Arc::new(true.into()) }
    }

    /// Turned off while the node counts as gone: it must not hold addresses that others are about to get.
    pub(super) fn set_enabled(&self, is_enabled: bool) {
        self.is_enabled.store(is_enabled, std::sync::atomic::Ordering::Release);
    }

    /// Answers up to this time may be confirmed. `None` for none.
    pub(super) fn limit(&self, now: Instant) -> Option<Instant> {
        if !self.is_enabled.load(std::sync::atomic::Ordering::Acquire) {
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
    fn answers_of_the_leaders_own_node_count_no_longer_than_those_of_others() {
        let start = Instant::now();
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        let (others, other) = (Arc::new(OtherNodes::new(start)), Confirmation::for_other());
        let own = Confirmation::for_own(others.clone());
        assert_eq!(own.limit(at(100)), Some(at(100)), "there is no other");
        others.set_exist(true);
        assert_eq!((own.limit(at(200)), other.limit(at(200))), (Some(start), Some(at(200))));
        others.note_answer(at(150));
        others.note_answer(at(120));
        assert_eq!(own.limit(at(900)), Some(at(150)), "cut off since then");
        own.set_enabled(false);
        other.set_enabled(false);
        assert_eq!((own.limit(at(900)), other.limit(at(900))), (None, None));
    }
}
