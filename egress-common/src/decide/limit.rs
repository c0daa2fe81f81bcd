//! Rate limit of packets that the programs generate (RFC 1812 section 4.3.2.8, RFC 4443 section 2.4 f): a burst, then a
//! rate per second. Beyond it, packets are dropped with the reason of their cause.
//!
//! An answer needs room in two budgets of its kind: the one of its pod, and the total of this CPU. The total is a
//! hundred times the pod's, so that no pod takes it from others. It bounds what many pods do together, and senders for
//! whose budgets the map `answers` has no room.
//!
//! The state of a budget is one number: the time at which it is full again. Zero is a full budget.

#[derive(Clone, Copy, Debug)]
pub struct AnswerBudget {
    /// Average interval between answers.
    pub step_ns: u64,
    /// Answers at once.
    pub burst: u64,
}

/// Of each pod and kind: 1,000 answers per second.
pub const POD: AnswerBudget = AnswerBudget { step_ns: 1_000_000, burst: 100 };
/// Of each CPU and kind.
pub const TOTAL: AnswerBudget = AnswerBudget { step_ns: POD.step_ns / 100, burst: POD.burst * 100 };

impl AnswerBudget {
    /// The state after another answer; `None` if the budget is empty.
    #[inline(always)]
    pub const fn take(self, full_at_ns: u64, now_ns: u64) -> Option<u64> {
        let due = if full_at_ns > now_ns { full_at_ns } else { now_ns };
        if due - now_ns > (self.burst - 1) * self.step_ns {
            return None;
        }
        Some(due + self.step_ns)
    }
}

/// The states of both budgets after another answer; `None` if one of them is empty, and nothing is taken.
#[inline(always)]
pub fn take(pod: u64, total: u64, now_ns: u64) -> Option<(u64, u64)> {
    Some((POD.take(pod, now_ns)?, TOTAL.take(total, now_ns)?))
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::abi::{Addr, AnswerKey, AnswerKind};

    const START_NS: u64 = 7_000_000_000;

    /// Budgets as a CPU has them.
    #[derive(Default)]
    struct Budgets {
        pods: HashMap<AnswerKey, u64>,
        totals: [u64; AnswerKind::ALL.len()],
    }

    impl Budgets {
        fn take(&mut self, pod: u16, kind: AnswerKind, now_ns: u64) -> bool {
            let [high, low] = pod.to_be_bytes();
            let pod = self.pods.entry(AnswerKey::new(Addr::v4([10, 244, high, low]), kind)).or_default();
            let total = &mut self.totals[kind as usize];
            match take(*pod, *total, now_ns) {
                Some(taken) => (*pod, *total) = taken,
                None => return false,
            }
            true
        }

        fn answers(&mut self, pod: u16, kind: AnswerKind, now_ns: u64, asked: u64) -> u64 {
            (0..asked).filter(|_| self.take(pod, kind, now_ns)).count() as u64
        }
    }

    #[test]
    fn a_burst_then_a_rate_per_second() {
        for kind in AnswerKind::ALL {
            let mut budgets = Budgets::default();
            let mut answers = |after_ns, asked| budgets.answers(1, kind, START_NS + after_ns, asked);
            assert_eq!(answers(0, 10_000), POD.burst);
            assert_eq!(answers(0, 10_000), 0);
            assert_eq!((1..=2_000).map(|ms| answers(ms * 1_000_000, 10)).sum::<u64>(), 2_000);
            assert_eq!(answers(60_000_000_000, 10_000), POD.burst, "a pause saves no more");
        }
    }

    #[test]
    fn kinds_and_pods_have_their_own_budgets() {
        let mut budgets = Budgets::default();
        for pod in [1, 2] {
            for kind in AnswerKind::ALL {
                assert_eq!(budgets.answers(pod, kind, START_NS, 10_000), POD.burst, "{pod}, {kind:?}");
            }
        }
    }

    #[test]
    fn ninety_floods_take_nothing_from_a_pod_that_sends_little() {
        let mut budgets = Budgets::default();
        for ms in 0..1_000 {
            let now_ns = START_NS + ms * 1_000_000;
            for flooder in 0..90 {
                budgets.answers(flooder, AnswerKind::TooBigToPod, now_ns, 5);
            }
            if ms % 10 == 0 {
                assert!(budgets.take(100, AnswerKind::TooBigToPod, now_ns), "after {ms} ms");
            }
        }
    }

    #[test]
    fn the_total_bounds_pods_without_a_known_budget() {
        let mut budgets = Budgets::default();
        let mut answers = |after_ns| {
            // None has asked before, or its entry has been evicted.
            budgets.pods.clear();
            (0..200).map(|pod| budgets.answers(pod, AnswerKind::Reset, START_NS + after_ns, 100)).sum::<u64>()
        };
        assert_eq!(answers(0), TOTAL.burst);
        assert_eq!((1..=10).map(|ms| answers(ms * 1_000_000)).sum::<u64>(), 1_000);
    }

    #[test]
    fn an_empty_total_takes_nothing_from_a_pod() {
        let full = START_NS + TOTAL.burst * TOTAL.step_ns;
        assert_eq!(take(0, full, START_NS), None);
        assert_eq!(take(0, full - TOTAL.step_ns, START_NS), Some((START_NS + POD.step_ns, full)));
    }
}
