//! How often the programs answer by themselves (RFC 1812 section 4.3.2.8, RFC 4443 section 2.4 f): so many in a row, and
//! from then on so many a second, for each CPU. What is beyond that is dropped under the name of its cause.
//!
//! One number is the whole state: when the bucket would be full again. Answers of all kinds share it: a limit for each
//! destination would give a sender with forged sources as many as it likes.

/// Between two answers in the long run: 1,000 a second.
pub const ANSWER_STEP_NS: u64 = 1_000_000;
/// So many may follow one another at once.
pub const ANSWERS_AT_ONCE: u64 = 100;

/// Whether there is an answer left; takes it.
#[inline(always)]
pub fn take(full_at_ns: &mut u64, now_ns: u64) -> bool {
    let due = if *full_at_ns > now_ns { *full_at_ns } else { now_ns };
    if due - now_ns > (ANSWERS_AT_ONCE - 1) * ANSWER_STEP_NS {
        return false;
    }
    *full_at_ns = due + ANSWER_STEP_NS;
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answers(full_at_ns: &mut u64, now_ns: u64, asked: u64) -> u64 {
        (0..asked).filter(|_| take(full_at_ns, now_ns)).count() as u64
    }

    #[test]
    fn a_burst_then_a_rate_per_second() {
        let mut state = 0;
        let start = 7_000_000_000;
        assert_eq!(answers(&mut state, start, 10_000), ANSWERS_AT_ONCE);
        assert_eq!(answers(&mut state, start, 10_000), 0);
        let later: u64 = (1..=2_000).map(|ms| answers(&mut state, start + ms * 1_000_000, 10)).sum();
        assert_eq!(later, 2_000);
        assert_eq!(answers(&mut state, start + 60_000_000_000, 10_000), ANSWERS_AT_ONCE, "a pause saves no more");
    }
}
