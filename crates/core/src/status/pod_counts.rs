//! How many pods each egress policy serves on each node, as the agents report it.

use std::collections::{BTreeMap, BTreeSet};

use crate::model::state::{EgressId, SelectedPods};

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
    /// The pods that the object serves. `None` while reports of too many nodes are missing.
    pub fn selected(&self, id: EgressId) -> Option<u32> {
        self.is_complete.then(|| self.pods.values().filter_map(|pods| pods.get(&id)).sum())
    }

    /// Nodes without an agent that have pods of the object, by the last report, and how many.
    pub fn pods_without_agent(&self, id: EgressId) -> impl Iterator<Item = (&str, u32)> {
        self.without_agent.iter().filter_map(move |node| Some((node.as_str(), *self.pods.get(node)?.get(&id)?)))
    }
}
