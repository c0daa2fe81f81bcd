//! How many events, and lines in the log in the place of events, others can cause: whoever edits an object again and again
//! fills neither the API server nor the log.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

/// Events of one reason about one object at once, and how long it takes until there may be one more: as client-go's.
const BURST: u32 = 25;
const REGAINED: Duration = Duration::from_secs(300);
/// Objects that are kept in mind.
const MOST: usize = 4096;
/// Between two lines about events that are not written.
const QUIET: Duration = Duration::from_secs(10);

#[derive(Default)]
pub(super) struct Limit {
    spent: HashMap<u64, Spent>,
    /// When the last line was written, and events without one since.
    lines: Option<(Instant, u64)>,
}

struct Spent {
    count: u32,
    since: Instant,
}

impl Spent {
    fn regain(&mut self, now: Instant) {
        while self.count > 0 && now.duration_since(self.since) >= REGAINED {
            self.count -= 1;
            self.since += REGAINED;
        }
        if self.count == 0 {
            self.since = now;
        }
    }
}

impl Limit {
    /// Whether there may be one more of this kind.
    pub(super) fn take(&mut self, kind: u64, now: Instant) -> bool {
        if self.spent.len() >= MOST && !self.spent.contains_key(&kind) {
            self.spent.retain(|_, spent| {
                spent.regain(now);
                spent.count > 0
            });
            // Rather a few events too many than memory without bound.
            if self.spent.len() >= MOST {
                self.spent.clear();
            }
        }
        let spent = self.spent.entry(kind).or_insert(Spent { count: 0, since: now });
        spent.regain(now);
        let has_room = spent.count < BURST;
        spent.count += u32::from(has_room);
        has_room
    }

    /// Whether it is time for a line, and how many events have had none since the last one.
    pub(super) fn line(&mut self, now: Instant) -> Option<u64> {
        match &mut self.lines {
            Some((last, left_out)) if now.duration_since(*last) < QUIET => {
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
    fn of_one_kind_there_are_so_many_and_then_one_more_at_a_time() {
        let (mut limit, begin) = (Limit::default(), Instant::now());
        assert_eq!((0..100).filter(|_| limit.take(1, begin)).count(), 25);
        assert!(limit.take(2, begin), "another object");
        let later = begin + REGAINED;
        assert!(!limit.take(1, later - Duration::from_secs(1)));
        assert_eq!((0..100).filter(|_| limit.take(1, later)).count(), 1);
        assert_eq!((0..100).filter(|_| limit.take(1, begin + REGAINED * 100)).count(), 25);
    }

    #[test]
    fn many_kinds_take_no_more_memory_than_some_do() {
        let (mut limit, begin) = (Limit::default(), Instant::now());
        assert!((0..100_000).all(|kind| limit.take(kind, begin)));
        assert!(limit.spent.len() <= MOST);
    }

    #[test]
    fn lines_are_few_and_say_how_many_there_would_be() {
        let (mut limit, begin) = (Limit::default(), Instant::now());
        assert_eq!(limit.line(begin), Some(0));
        assert!((0..100).all(|_| limit.line(begin).is_none()));
        assert_eq!(limit.line(begin + QUIET), Some(100));
        assert_eq!(limit.line(begin + QUIET * 2), Some(0));
    }
}
