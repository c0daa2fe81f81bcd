//! Foreign writers of `status.items`: detected, reported once, not fought. Pure, except for its memory.
//!
//! The leader is the only writer of the status. If another value replaces what it wrote, there is a foreign writer:
//! OVN-Kubernetes' own EgressIP, which would also answer for the addresses, or a person. The assignment keeps valid
//! foreign items like any others. Invalid ones are corrected, each time later, up to a minute: two controllers that
//! correct each other at once would move addresses as fast as the API server permits.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::model::policy::{EgressPolicy, Item};

const FIRST_PAUSE: Duration = Duration::from_secs(1);
const MAX_PAUSE: Duration = Duration::from_secs(60);

/// What this controller wrote, by the policy's UID.
#[derive(Debug, Default)]
pub struct ForeignWriters {
    written: BTreeMap<String, Written>,
}

#[derive(Debug)]
struct Written {
    version: u64,
    items: Vec<Item>,
    /// How long the next correction waits after a foreign write.
    pause: Option<Duration>,
    not_before: Option<Instant>,
}

impl ForeignWriters {
    /// The policy as the server returned it after our write.
    pub fn note_written(&mut self, answer: &EgressPolicy) {
        let Some(version) = version(answer) else { return };
        let pause = self.written.get(&answer.origin.uid).and_then(|written| written.pause);
        let written = Written { version, items: answer.published.items.clone(), pause, not_before: None };
        self.written.insert(answer.origin.uid.clone(), written);
    }

    /// The result of our write is unknown.
    pub fn forget(&mut self, policy: &EgressPolicy) {
        self.written.remove(&policy.origin.uid);
    }

    /// Another controller leads, or the policy is gone: later changes are legitimate.
    pub fn retain(&mut self, alive: impl Fn(&str) -> bool) {
        self.written.retain(|uid, _| alive(uid));
    }

    /// Checks the current policy; true when a foreign writer is detected for the first time.
    pub fn check(&mut self, policy: &EgressPolicy, now: Instant) -> bool {
        let Some(written) = self.written.get_mut(&policy.origin.uid) else { return false };
        let is_newer = version(policy).is_some_and(|version| version > written.version);
        if !is_newer || policy.published.items == written.items {
            return false;
        }
        written.items.clone_from(&policy.published.items);
        let first = written.pause.is_none();
        let pause = written.pause.map_or(FIRST_PAUSE, |pause| (pause * 2).min(MAX_PAUSE));
        (written.pause, written.not_before) = (Some(pause), Some(now + pause));
        first
    }

    /// Whether the status may be corrected now.
    pub fn may_write(&self, policy: &EgressPolicy, now: Instant) -> bool {
        self.written.get(&policy.origin.uid).and_then(|written| written.not_before).is_none_or(|then| now >= then)
    }
}

fn version(policy: &EgressPolicy) -> Option<u64> {
    policy.origin.resource_version.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::policy::{PolicyOrigin, Published};
    use crate::model::samples::{items, origin};

    fn policy(version: u64, node: &str) -> EgressPolicy {
        let origin = PolicyOrigin { uid: "u".into(), resource_version: version.to_string(), ..origin("a", 1) };
        let items = items(&[(node, "172.18.0.100")]);
        EgressPolicy {
            published: Published { has_status: true, has_items: true, items, ..Published::default() },
            ..EgressPolicy::new(origin)
        }
    }

    #[test]
    fn a_foreign_writer_is_reported_once_and_corrected_ever_later() {
        let (mut writers, start) = (ForeignWriters::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        assert!(!writers.check(&policy(9, "n2"), at(0)), "what an earlier leader wrote");
        writers.note_written(&policy(10, "n1"));
        assert!(!writers.check(&policy(9, "n2"), at(0)), "an echo from before our write");
        assert!(!writers.check(&policy(11, "n1"), at(0)), "something else has changed");
        assert!(writers.may_write(&policy(11, "n1"), at(0)));
        assert!(writers.check(&policy(12, "n2"), at(0)));
        assert!(!writers.may_write(&policy(12, "n2"), at(0)) && writers.may_write(&policy(12, "n2"), at(1)));
        writers.note_written(&policy(13, "n1"));
        assert!(writers.may_write(&policy(13, "n1"), at(1)));
        assert!(!writers.check(&policy(14, "n2"), at(1)), "reported before");
        assert!(!writers.may_write(&policy(14, "n2"), at(2)) && writers.may_write(&policy(14, "n2"), at(3)));
    }

    #[test]
    fn an_unknown_write_accuses_no_foreign_writer() {
        let (mut writers, now) = (ForeignWriters::default(), Instant::now());
        writers.note_written(&policy(10, "n1"));
        writers.forget(&policy(10, "n1"));
        assert!(!writers.check(&policy(12, "n2"), now));
        writers.note_written(&policy(13, "n1"));
        writers.retain(|_| false);
        assert!(!writers.check(&policy(14, "n2"), now) && writers.may_write(&policy(14, "n2"), now));
    }
}
