//! Tells of addresses that pods claim and do not get: an event on the pod, a line in the log.
//!
//! Who may create pods chooses how many there are, so each namespace has a budget. What does not fit is told later, if it is
//! still so; `egress-agent status` lists it at once.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;
use tracing::warn;

use crate::node::reconciler::Reconciler;
use egress_core::plan::executor::Executor;
use egress_core::selection::pod_addresses::Refusal;

/// So many at once for one namespace, then one in so long.
const AT_ONCE: u32 = 5;
const EVERY: Duration = Duration::from_secs(60);

/// What has been told, and what each namespace may still be told.
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
    /// What is to be told now of all that is refused.
    fn next(&mut self, refused: BTreeSet<Refusal>, now: Instant) -> Vec<Refusal> {
        self.refusals.retain(|one| refused.contains(one));
        self.budgets.values_mut().for_each(|budget| budget.fill(now));
        self.budgets.retain(|_, budget| budget.left < AT_ONCE);
        let mut next = Vec::new();
        for refusal in refused {
            if self.refusals.contains(&refusal) {
                continue;
            }
            let namespace = refusal.pod.namespace.clone();
            let budget = self.budgets.entry(namespace).or_insert(Budget { left: AT_ONCE, since: now });
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
        while self.left < AT_ONCE && now.duration_since(self.since) >= EVERY {
            self.left += 1;
            self.since += EVERY;
        }
    }
}

impl<E: Executor> Reconciler<E> {
    pub(super) fn announce_refused(&mut self) {
        let refused = self.compiler.refused();
        for Refusal { pod, uid, why } in self.refused_pods.next(refused, Instant::now()) {
            warn!(namespace = pod.namespace, pod = pod.name, %why, "a pod does not get an address");
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
    fn a_namespace_that_is_refused_much_is_told_little_and_keeps_nothing_from_others() {
        let (mut told, begun) = (ReportedConflicts::default(), Instant::now());
        let mut refused: BTreeSet<_> = (0..1000).map(|name| refusal("noisy", name)).collect();
        assert_eq!(told.next(refused.clone(), begun).len(), 5);
        assert!(told.next(refused.clone(), begun).is_empty());
        refused.insert(refusal("quiet", 0));
        assert_eq!(told.next(refused.clone(), begun), [refusal("quiet", 0)]);
        assert!(told.next(refused.clone(), begun + EVERY / 2).is_empty());
        assert_eq!(told.next(refused.clone(), begun + 2 * EVERY).len(), 2, "what was left out comes later");
        // New pods, over and over.
        let changed = (1000..2000).map(|name| refusal("noisy", name)).collect();
        assert!(told.next(changed, begun + 2 * EVERY).is_empty());
        assert!(told.next(BTreeSet::new(), begun + 9 * EVERY).is_empty());
        assert!(told.refusals.is_empty() && told.budgets.is_empty(), "nothing is kept of what is over");
    }
}
