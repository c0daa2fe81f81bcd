//! Rate limits of events, and of the log lines that replace them: repeated edits of an object fill neither the API server nor the log.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

/// Events of one reason about one object at once, and the time until one more is allowed: as client-go's.
const BURST: u32 = 25;
const REFILL_INTERVAL: Duration = Duration::from_secs(300);
/// Maximum kinds of events (reason and object) that are counted.
const MAX_KINDS: usize = 4096;
/// Interval between two log lines about events that are not written.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

#[derive(Default)]
pub(super) struct Limit {
    spent: HashMap<u64, Spent>,
    /// The time of the last log line, and the number of events without one since.
    lines: Option<(Instant, u64)>,
}

struct Spent {
    count: u32,
    since: Instant,
}

impl Spent {
    fn refill(&mut self, now: Instant) {
        while self.count > 0 && now.duration_since(self.since) >= REFILL_INTERVAL {
            self.count -= 1;
            self.since += REFILL_INTERVAL;
        }
        if self.count == 0 {
            self.since = now;
        }
    }
}

impl Limit {
    /// Whether one more event of this kind is allowed.
    pub(super) fn try_take(&mut self, kind: u64, now: Instant) -> bool {
        if self.spent.len() >= MAX_KINDS && !self.spent.contains_key(&kind) {
            self.spent.retain(|_, spent| {
                spent.refill(now);
                spent.count > 0
            });
            // A few events too many are better than unbounded memory.
            if self.spent.len() >= MAX_KINDS {
                self.spent.clear();
            }
        }
        let spent = self.spent.entry(kind).or_insert(Spent { count: 0, since: now });
        spent.refill(now);
        let has_room = spent.count < BURST;
        spent.count += u32::from(has_room);
        has_room
    }

    /// The number of events without a log line since the last one, if a line is due.
    pub(super) fn log_due(&mut self, now: Instant) -> Option<u64> {
        match &mut self.lines {
            Some((last, left_out)) if now.duration_since(*last) < LOG_INTERVAL => {
                *left_out += 1;
                None
            }
            lines => Some(lines.replace((now, 0)).map_or(0, |(_, left_out)| left_out)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_of_one_kind_are_a_burst_and_then_one_at_a_time() {
        let (mut limit, begin) = (Limit::default(), Instant::now());
        assert_eq!((0..100).filter(|_| limit.try_take(1, begin)).count(), 25);
        assert!(limit.try_take(2, begin), "another object");
        let later = begin + REFILL_INTERVAL;
        assert!(!limit.try_take(1, later - Duration::from_secs(1)));
        assert_eq!((0..100).filter(|_| limit.try_take(1, later)).count(), 1);
        assert_eq!((0..100).filter(|_| limit.try_take(1, begin + REFILL_INTERVAL * 100)).count(), 25);
    }

    #[test]
    fn many_kinds_take_bounded_memory() {
        let (mut limit, begin) = (Limit::default(), Instant::now());
        assert!((0..100_000).all(|kind| limit.try_take(kind, begin)));
        assert!(limit.spent.len() <= MAX_KINDS);
    }

    #[test]
    fn log_lines_are_few_and_count_the_others() {
        let (mut limit, begin) = (Limit::default(), Instant::now());
        assert_eq!(limit.log_due(begin), Some(0));
        assert!((0..100).all(|_| limit.log_due(begin).is_none()));
        assert_eq!(limit.log_due(begin + LOG_INTERVAL), Some(100));
        assert_eq!(limit.log_due(begin + LOG_INTERVAL * 2), Some(0));
    }
}
