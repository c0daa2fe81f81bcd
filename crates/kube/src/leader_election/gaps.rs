//! Reigns of one controller that follow one another with gaps, because an API server is slow. Pure.
//!
//! A renewal that is answered later than the renew deadline ends a reign, and begins another where nobody else has led in
//! between. Once is nothing; again and again, nothing that takes longer is ever decided or written.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// So many within [`SPAN`] are worth a line, and not more than one in [`AGAIN`].
const MANY: usize = 3;
const SPAN: Duration = Duration::from_secs(60);
const AGAIN: Duration = Duration::from_secs(600);

#[derive(Debug, Default)]
pub struct Gaps {
    /// When the latest reign began.
    since: Option<Instant>,
    ends: VecDeque<Instant>,
    said: Option<Instant>,
}

impl Gaps {
    /// After each attempt: since when this controller leads, where it does, and whether the Lease is its own, as far as it has seen.
    /// How many gaps there have been, where that is to be said.
    pub fn note(&mut self, since: Option<Instant>, holds: bool, now: Instant) -> Option<usize> {
        if !holds {
            // Another leads, or may: that has causes of its own.
            (self.since, self.ends) = (None, VecDeque::new());
            return None;
        }
        let since = since?;
        let former = self.since.replace(since);
        if former.is_none_or(|former| former == since) {
            return None;
        }
        self.ends.push_back(now);
        self.ends.retain(|end| now < *end + SPAN);
        let is_due = self.said.is_none_or(|said| now >= said + AGAIN);
        (self.ends.len() >= MANY && is_due).then(|| {
            self.said = Some(now);
            self.ends.len()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_that_follow_one_another_are_said_once() {
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
        assert_eq!(note(Some(76), true, 76), None, "said");
        assert_eq!([680, 682, 684].map(|second| note(Some(second), true, second)), [None, None, Some(3)]);
        // Others lead in between.
        for second in [2000, 2004, 2008, 2012] {
            assert_eq!(note(None, false, second), None);
            assert_eq!(note(Some(second + 2), true, second + 2), None);
        }
    }
}
