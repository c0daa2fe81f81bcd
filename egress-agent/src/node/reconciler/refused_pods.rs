//! Reports refused pod addresses: an event on the pod, a line of the log.
//!
//! Users control the number of pods, so each namespace has a budget. Refusals beyond it are reported later if they last;
//! `egress-agent status` lists them at once.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;
use tracing::warn;

use crate::node::reconciler::Reconciler;
use egress_core::plan::executor::Executor;
use egress_core::selection::pod_addresses::Refusal;

/// The budget of a namespace, and the time after which it grows by one.
const BUDGET: u32 = 5;
const REFILL_INTERVAL: Duration = Duration::from_secs(60);

/// Reported refusals, and the budgets of the namespaces.
#[derive(Debug, Default)]
pub(super) struct ReportedConflicts {
    refusals: BTreeSet<Refusal>,
    budgets: BTreeMap<String, Budget>,
}

#[derive(Debug)]
struct Budget {
    left: u32,
    since: Instant,
}

impl ReportedConflicts {
    /// The refusals to report now.
    fn next(&mut self, refused: BTreeSet<Refusal>, now: Instant) -> Vec<Refusal> {
        self.refusals.retain(|one| refused.contains(one));
        self.budgets.values_mut().for_each(|budget| budget.fill(now));
        self.budgets.retain(|_, budget| budget.left < BUDGET);
        let mut next = Vec::new();
        for refusal in refused {
            if self.refusals.contains(&refusal) {
                continue;
            }
            let namespace = refusal.pod.namespace.clone();
            let budget = self.budgets.entry(namespace).or_insert(Budget { left: BUDGET, since: now });
            if budget.left > 0 {
                budget.left -= 1;
                self.refusals.insert(refusal.clone());
                next.push(refusal);
            }
        }
        next
    }
}

impl Budget {
    fn fill(&mut self, now: Instant) {
        while self.left < BUDGET && now.duration_since(self.since) >= REFILL_INTERVAL {
            self.left += 1;
            self.since += REFILL_INTERVAL;
        }
    }
}

impl<E: Executor> Reconciler<E> {
    pub(super) fn report_refused_pods(&mut self) {
        let refused = self.compiler.refused();
        for Refusal { pod, uid, why } in self.refused_pods.next(refused, Instant::now()) {
            warn!(namespace = pod.namespace, pod = pod.name, %why, "a pod address is refused");
            let reason = if why.is_conflict() { "PodAddressConflict" } else { "PodAddressRefused" };
            if let Some(events) = &self.events {
                events.warn_of_pod((&pod, &uid), reason, &format!("the pod gets no egress IP by this address: {why}"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use egress_core::model::samples::ip;
    use egress_core::model::view::PodKey;
    use egress_core::selection::pod_addresses::Refused;

    fn refusal(namespace: &str, name: u32) -> Refusal {
        let pod = PodKey { namespace: namespace.into(), name: format!("p{name:05}") };
        Refusal { pod, uid: String::new(), why: Refused::OwnNode(ip("172.18.0.1")) }
    }

    #[test]
    fn a_namespace_with_many_refusals_gets_few_events_and_does_not_affect_others() {
        let (mut conflicts, start) = (ReportedConflicts::default(), Instant::now());
        let mut refused: BTreeSet<_> = (0..1000).map(|name| refusal("noisy", name)).collect();
        assert_eq!(conflicts.next(refused.clone(), start).len(), 5);
        assert!(conflicts.next(refused.clone(), start).is_empty());
        refused.insert(refusal("quiet", 0));
        assert_eq!(conflicts.next(refused.clone(), start), [refusal("quiet", 0)]);
        assert!(conflicts.next(refused.clone(), start + REFILL_INTERVAL / 2).is_empty());
        assert_eq!(conflicts.next(refused.clone(), start + 2 * REFILL_INTERVAL).len(), 2, "the rest is reported later");
        // New pods, over and over.
        let changed = (1000..2000).map(|name| refusal("noisy", name)).collect();
        assert!(conflicts.next(changed, start + 2 * REFILL_INTERVAL).is_empty());
        assert!(conflicts.next(BTreeSet::new(), start + 9 * REFILL_INTERVAL).is_empty());
        assert!(conflicts.refusals.is_empty() && conflicts.budgets.is_empty(), "no state is left");
    }
}
