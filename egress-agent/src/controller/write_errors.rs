//! What is said when writing the status fails: a right that is missing fails for every object and with every attempt, one a
//! second, and one line tells all of it.

use std::time::{Duration, Instant};

/// Between two lines about one trouble.
const AGAIN: Duration = Duration::from_secs(10 * 60);

/// Remembers what was said last.
#[derive(Debug, Default)]
pub(super) struct WriteErrorLog {
    said: Option<(u16, Instant)>,
}

impl WriteErrorLog {
    /// Is it to be said that writing fails with this code? At once when it is another one than before, else rarely.
    pub(super) fn is_due(&mut self, code: u16, now: Instant) -> bool {
        let due = self.said.is_none_or(|(said, at)| said != code || now.duration_since(at) >= AGAIN);
        if due {
            self.said = Some((code, now));
        }
        due
    }

    /// Writing works. Is that news?
    pub(super) fn ends(&mut self) -> bool {
        self.said.take().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lasting_trouble_is_said_rarely_and_its_end_once() {
        let (mut complaint, start) = (WriteErrorLog::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        assert!(!complaint.ends(), "nothing was wrong");
        let said = [(403, 0), (403, 1), (403, 599), (403, 600), (403, 601), (500, 602), (403, 603)];
        let due = said.map(|(code, second)| complaint.is_due(code, at(second)));
        assert_eq!(due, [true, false, false, true, false, true, true]);
        assert_eq!([complaint.ends(), complaint.ends()], [true, false]);
        assert!(complaint.is_due(403, at(604)));
    }
}
