//! How many pods each egress policy serves on each node, as the agents report it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::model::policy::{Policies, PolicyKey};
use crate::model::state::{EgressIds, SelectedPods};

/// For how long no pod must have been reported for a policy before its status says so. Agents count the pods of a new
/// policy within two seconds, and are asked every five.
const NO_POD_AFTER: Duration = Duration::from_secs(10);

/// Of two egress IDs the larger number: a pod with addresses of both families counts for both.
fn of_node(pods: &SelectedPods, ids: EgressIds) -> Option<u32> {
    ids.all().filter_map(|id| pods.get(&id)).max().copied()
}

/// The latest reports of agents.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodCounts {
    /// By node.
    pub pods: BTreeMap<String, SelectedPods>,
    /// Nodes that are Ready and whose agent has not answered for some time.
    pub without_agent: BTreeSet<String>,
    /// Every agent has answered, or has had time to.
    pub is_complete: bool,
}

impl PodCounts {
    /// The pods that the object serves. `None` while reports of too many nodes are missing, or without an egress ID.
    pub fn selected(&self, ids: EgressIds) -> Option<u32> {
        let is_known = self.is_complete && ids != EgressIds::NONE;
        is_known.then(|| self.pods.values().filter_map(|pods| of_node(pods, ids)).sum())
    }

    /// Nodes without an agent that have pods of the object, by the last report, and how many.
    pub fn pods_without_agent(&self, ids: EgressIds) -> Vec<(&str, u32)> {
        let count = |node: &String| of_node(self.pods.get(node)?, ids);
        self.without_agent.iter().filter_map(|node| Some((node.as_str(), count(node)?))).collect()
    }
}

/// Policies for which no pod has been reported for some time.
#[derive(Clone, Debug, Default)]
pub struct WithoutPods {
    /// The generation of each policy whose number is zero, and since when.
    since: BTreeMap<PolicyKey, (Option<i64>, Instant)>,
}

impl WithoutPods {
    /// Takes the present numbers. Returns when a policy will have had none for long enough, if that is later than now.
    pub fn update(&mut self, policies: &Policies, counts: &PodCounts, now: Instant) -> Option<Instant> {
        let is_zero =
            |key: &PolicyKey| policies.get(key).is_some_and(|one| counts.selected(one.published.ids) == Some(0));
        self.since.retain(|key, _| is_zero(key));
        for (key, policy) in policies.iter().filter(|(key, _)| is_zero(key)) {
            let generation = policy.origin.generation;
            let known = self.since.entry(key.clone()).or_insert((generation, now));
            // Another selector has to be counted first.
            if known.0 != generation {
                *known = (generation, now);
            }
        }
        self.since.values().map(|(_, since)| *since + NO_POD_AFTER).filter(|at| *at > now).min()
    }

    pub fn has(&self, policy: &PolicyKey, now: Instant) -> bool {
        self.since.get(policy).is_some_and(|(_, since)| now >= *since + NO_POD_AFTER)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::allocation::samples::policy;
    use crate::model::policy::EgressPolicy;
    use crate::model::state::EgressId;

    fn counts(pods: u32) -> PodCounts {
        let of_node = SelectedPods::from([(EgressId(1), pods)]).into_iter().filter(|(_, pods)| *pods > 0).collect();
        PodCounts { pods: BTreeMap::from([("n1".to_owned(), of_node)]), is_complete: true, ..PodCounts::default() }
    }

    #[test]
    fn a_policy_has_no_pods_after_some_time_without_any() {
        let (key, with_id) = policy("a", 1, &[], &[]);
        let generation = |number| {
            let mut one = EgressPolicy { ..(*with_id).clone() };
            one.published.ids = EgressIds::both(EgressId(1));
            one.origin.generation = Some(number);
            Policies::from([(key.clone(), Arc::new(one))])
        };
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let mut without_pods = WithoutPods::default();
        assert_eq!(without_pods.update(&generation(1), &PodCounts::default(), start), None, "nothing is known");
        assert_eq!(without_pods.update(&generation(1), &counts(0), start), Some(start + NO_POD_AFTER));
        assert!(!without_pods.has(&key, start + NO_POD_AFTER - second));
        assert!(without_pods.has(&key, start + NO_POD_AFTER));
        assert_eq!(without_pods.update(&generation(1), &counts(0), start + NO_POD_AFTER), None, "nothing to wait for");

        let edited = start + NO_POD_AFTER + second;
        without_pods.update(&generation(2), &counts(0), edited);
        assert!(!without_pods.has(&key, edited), "another selector has its own time");
        without_pods.update(&generation(2), &counts(1), edited + second);
        assert!(!without_pods.has(&key, edited + NO_POD_AFTER), "a pod has come");
        without_pods.update(&generation(2), &counts(0), edited + second);
        without_pods.update(&Policies::new(), &counts(0), edited + second);
        assert!(!without_pods.has(&key, edited + NO_POD_AFTER * 2), "the policy is gone");
    }
}
