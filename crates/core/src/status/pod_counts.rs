//! How many pods each egress policy serves on each node, as the agents report it.

use std::collections::{BTreeMap, BTreeSet};

use crate::model::state::{EgressIds, SelectedPods};

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
