//! Gaps between the terms of one controller, which a slow API server causes. Pure.
//!
//! A renewal that is answered after the renew deadline ends a term, and another begins unless another controller has led in
//! between. One gap is harmless; with gap after gap, nothing that takes longer is ever decided or written.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// This many gaps within [`SPAN`] are logged, at most once in [`LOG_INTERVAL`].
const MIN_GAPS: usize = 3;
const WINDOW: Duration = Duration::from_secs(60);
const LOG_INTERVAL: Duration = Duration::from_secs(600);

#[derive(Debug, Default)]
pub struct Gaps {
    /// When the latest term began.
    since: Option<Instant>,
    ends: VecDeque<Instant>,
    logged: Option<Instant>,
}

impl Gaps {
    /// Called after each attempt: since when this controller leads, if it does, and whether it holds the Lease as far as it knows.
    /// Returns the number of gaps if they are to be logged.
    pub fn note(&mut self, since: Option<Instant>, holds: bool, now: Instant) -> Option<usize> {
        if !holds {
            // Another controller leads or may lead, which has other causes.
            (self.since, self.ends) = (None, VecDeque::new());
            return None;
        }
        let since = since?;
        let former = self.since.replace(since);
        if former.is_none_or(|former| former == since) {
            return None;
        }
        self.ends.push_back(now);
        self.ends.retain(|end| now < *end + WINDOW);
        let is_due = self.logged.is_none_or(|logged| now >= logged + LOG_INTERVAL);
        (self.ends.len() >= MIN_GAPS && is_due).then(|| {
            self.logged = Some(now);
            self.ends.len()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_gaps_are_logged_once() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut gaps = Gaps::default();
        let mut note = |since: Option<u64>, holds, now| gaps.note(since.map(at), holds, at(now));
        assert_eq!(note(Some(1), true, 1), None);
        assert_eq!(note(Some(1), true, 5), None, "a renewal");
        assert_eq!((note(None, true, 6), note(Some(7), true, 7)), (None, None), "one");
        assert_eq!((note(Some(9), true, 9), note(Some(70), true, 70)), (None, None), "the first is long ago");
        assert_eq!(note(Some(72), true, 72), None);
        assert_eq!(note(Some(74), true, 74), Some(3));
        assert_eq!(note(Some(76), true, 76), None, "logged");
        assert_eq!([680, 682, 684].map(|second| note(Some(second), true, second)), [None, None, Some(3)]);
        // Others lead in between.
        for second in [2000, 2004, 2008, 2012] {
            assert_eq!(note(None, false, second), None);
            assert_eq!(note(Some(second + 2), true, second + 2), None);
        }
    }
}
