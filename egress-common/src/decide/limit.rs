//! Rate limit of packets that the programs generate (RFC 1812 section 4.3.2.8, RFC 4443 section 2.4 f): a burst, then a
//! rate per second, for each CPU. Beyond it, packets are dropped with the reason of their cause.
//!
//! One number is the whole state: the time at which the bucket is full again. All kinds of answers share it, because a
//! sender with forged sources would evade a limit per destination.

/// Average interval: 1,000 answers per second.
pub const ANSWER_STEP_NS: u64 = 1_000_000;
/// Burst size.
pub const ANSWERS_AT_ONCE: u64 = 100;

/// Takes one answer from the bucket; false if it is empty.
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
