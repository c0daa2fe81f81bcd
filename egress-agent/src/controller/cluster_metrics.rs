//! The cluster in numbers, for metrics. Pure.

use std::collections::BTreeMap;

use crate::metrics::meters::{ClusterMetrics, NodeState};
use egress_core::allocation::Nodes;
use egress_core::desired_status::ObjectStatus;
use egress_core::model::policy::{EgressNodes, Policies};
use egress_core::node_health::NodeHealth;
use egress_core::status::conditions::ASSIGNED;

/// The state of each egress node.
pub(super) fn nodes(policies: &Policies, nodes: &Nodes, node_health: &NodeHealth) -> BTreeMap<String, NodeState> {
    let state = |name: &String| match () {
        () if node_health.unreachable.contains(name) => NodeState::Unreachable,
        () if node_health.absent.contains(name) => NodeState::AgentAway,
        () => NodeState::Answers,
    };
    let egress_nodes = EgressNodes::of(policies.values().map(|policy| &**policy));
    nodes.values().filter(|node| egress_nodes.has(node)).map(|node| (node.name.clone(), state(&node.name))).collect()
}

/// Counts over the desired status of all policies.
pub(super) fn cluster(statuses: &[ObjectStatus], nodes: BTreeMap<String, NodeState>) -> ClusterMetrics {
    let mut cluster = ClusterMetrics { nodes, ..ClusterMetrics::default() };
    for ObjectStatus { policy, items, conditions, .. } in statuses {
        cluster.assigned += items.len();
        cluster.unassigned += policy.listed.len().saturating_sub(items.len());
        let reasons = conditions.iter().filter(|condition| condition.kind == ASSIGNED);
        reasons.for_each(|condition| *cluster.objects.entry(condition.reason).or_default() += 1);
    }
    cluster
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Arc;

    use super::*;
    use egress_core::allocation::samples::policy;
    use egress_core::model::node::Node;
    use egress_core::model::policy::{EgressPolicy, Item};
    use egress_core::status::conditions::DesiredCondition;

    fn status_of(listed: &[&str], given: usize, reason: &'static str) -> ObjectStatus {
        let listed: Vec<String> = listed.iter().map(|one| (*one).to_owned()).collect();
        let items = listed.iter().take(given).map(|one| Item { node: "n1".into(), egress_ip: one.clone() }).collect();
        let condition = |kind, reason| DesiredCondition { kind, status: true, reason, message: String::new() };
        ObjectStatus {
            selected_pods: None,
            policy: Arc::new(EgressPolicy { listed, ..(*policy("a", 1, &[], &[]).1).clone() }),
            items,
            conditions: vec![condition(ASSIGNED, reason), condition("Degraded", "AllAssigned")],
            no_eligible_node: None,
            events: BTreeSet::new(),
        }
    }

    #[test]
    fn addresses_objects_and_nodes_are_counted_by_what_was_decided() {
        let statuses = [
            status_of(&["1", "2"], 2, "Assigned"),
            status_of(&["3", "nonsense"], 1, "PartiallyAssigned"),
            status_of(&["4"], 0, "NoCapacity"),
        ];
        let node = |name: &str, assignable| {
            let node = Node { name: name.into(), assignable, ..Node::default() };
            (name.to_owned(), Arc::new(node))
        };
        let known: Nodes = [node("n1", true), node("n2", true), node("n3", true), node("n4", false)].into();
        let set = |name: &str| BTreeSet::from([name.to_owned()]);
        let node_health = NodeHealth { unreachable: set("n2"), absent: set("n3"), ..NodeHealth::default() };
        let cluster = cluster(&statuses, nodes(&Policies::new(), &known, &node_health));
        assert_eq!((cluster.assigned, cluster.unassigned), (3, 2));
        assert_eq!(cluster.objects, BTreeMap::from([("Assigned", 1), ("NoCapacity", 1), ("PartiallyAssigned", 1)]));
        let states = [("n1", NodeState::Answers), ("n2", NodeState::Unreachable), ("n3", NodeState::AgentAway)];
        assert_eq!(cluster.nodes, states.map(|(name, state)| (name.to_owned(), state)).into());
    }
}
