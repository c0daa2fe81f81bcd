//! Ledger reads whose answers come too late to hold addresses. Pure.
//!
//! A node that no controller probes holds its addresses by these reads alone. Each is valid for 0.6 T from its start,
//! and the next starts T/5 later. So if answers take longer than 0.4 T the lease has gaps, and a gap keeps a node from
//! ever taking an address: it must read ledger and policy within one lease. A short outage of the API server has the
//! same effect, and is reported elsewhere.

use std::time::{Duration, Instant};

/// The majority of the latest 32 reads.
const MAJORITY: u32 = 17;
/// Between two log lines.
const LOG_INTERVAL: Duration = Duration::from_secs(600);

#[derive(Debug, Default)]
pub struct SlowReads {
    /// One bit per read, the latest last.
    late: u32,
    logged: Option<Instant>,
}

impl SlowReads {
    /// Records the end of a read. Returns whether to log that most are late.
    pub fn note(&mut self, is_late: bool, now: Instant) -> bool {
        self.late = self.late << 1 | u32::from(is_late);
        let is_due = self.logged.is_none_or(|logged| now >= logged + LOG_INTERVAL);
        let is_logged = is_due && self.late.count_ones() >= MAJORITY;
        if is_logged {
            self.logged = Some(now);
        }
        is_logged
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_majority_of_late_answers_is_logged_once() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut reads = SlowReads::default();
        let mut note = |late: &[bool], second| late.iter().filter(|late| reads.note(**late, at(second))).count();
        assert_eq!(note(&[true; 16], 0), 0, "a moment without an answer");
        assert_eq!(note(&[false; 32], 10), 0);
        assert_eq!(note(&[true, false].repeat(50), 20), 0, "half of them");
        assert_eq!(note(&[true, true, false].repeat(50), 30), 1);
        assert_eq!(note(&[true; 50], 629), 0, "logged");
        assert_eq!(note(&[true; 50], 630), 1);
    }
}
