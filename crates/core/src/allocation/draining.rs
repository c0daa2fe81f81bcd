//! The addresses that stay on a drained node, and why. Pure: the leader's assignment, applied to what the API server
//! has.
//!
//! Only the leader knows which nodes answer, so an address that is reported to move may stay for that reason.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use crate::allocation::{AssignmentInputs, EntryStatus, Nodes, assign};
use crate::keys;
use crate::model::node::Node;
use crate::model::policy::{EgressPolicy, Policies, PolicyKey, parse_egress_ip};
use crate::model::reserved::ClusterNetworks;
use crate::model::services::Services;

/// The addresses of the node by the status, with the names of their policies.
pub fn hosted(policies: &Policies, node: &str) -> BTreeMap<IpAddr, PolicyKey> {
    let of = |policy: &EgressPolicy| {
        let items = policy.published.items.iter().filter(|item| item.node == node);
        let addresses = items.filter_map(|item| parse_egress_ip(&item.egress_ip));
        addresses.map(|address| (address, policy.key().clone())).collect::<Vec<_>>()
    };
    policies.values().flat_map(|policy| of(policy)).collect()
}

/// The addresses that no other node can take, with the reason for each other node.
pub fn stays(policies: &Policies, nodes: &Nodes, node: &str) -> BTreeMap<IpAddr, String> {
    let (none, no_hand_overs) = (BTreeSet::new(), BTreeMap::new());
    let (unreachable, absent, hand_overs) = (&none, &none, &no_hand_overs);
    let (networks, services) = (&ClusterNetworks::default(), &Services::default());
    let inputs = AssignmentInputs { policies, nodes, unreachable, absent, networks, services, hand_overs };
    let assignment = assign(&inputs);
    let mut stays = BTreeMap::new();
    for (policy, outcome) in assignment.with_policies(policies) {
        for (entry, status) in &outcome.entries {
            let is_here = matches!(status, EntryStatus::Assigned { node: at } if at == node);
            if let Some(address) = parse_egress_ip(entry).filter(|_| is_here) {
                stays.insert(address, why(address, policy, nodes, node));
            }
        }
    }
    stays
}

fn why(address: IpAddr, policy: &EgressPolicy, nodes: &Nodes, node: &str) -> String {
    let might_host = |other: &Node| policy.eligible_nodes.might_host(other, address);
    let others = nodes.iter().filter(|(name, other)| *name != node && might_host(other));
    let obstacles: Vec<String> = others.map(|(name, other)| obstacle(name, other, policy, address)).collect();
    match obstacles.is_empty() {
        true if policy.eligible_nodes.is_one() => "the object allows no other node".to_owned(),
        true => format!("no other node with the label {} has a network for it", keys::ASSIGNABLE),
        false => obstacles.join(", "),
    }
}

fn obstacle(name: &str, node: &Node, policy: &EgressPolicy, address: IpAddr) -> String {
    let has_another = policy.published.items.iter().any(|item| item.node == name);
    match () {
        () if node.drained => format!("{name} is drained too"),
        () if !node.ready => format!("{name} is not ready"),
        () if !node.has_published_networks() || !node.networks_known => {
            format!("{name} has not published its networks")
        }
        () if node.impairment(address).is_some() => format!("{name} cannot send by the interface for it"),
        () if has_another => format!("{name} has another address of the object"),
        () => format!("{name} has as many egress IPs as its cloud allows"),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::allocation::samples::{node, policy};

    fn changed(pair: (String, Arc<Node>), change: impl FnOnce(&mut Node)) -> (String, Arc<Node>) {
        let mut node = Arc::unwrap_or_clone(pair.1);
        change(&mut node);
        (pair.0, Arc::new(node))
    }

    #[test]
    fn addresses_that_stay_are_listed_with_a_reason_for_each_other_node() {
        let drained = |name, network| changed(node(name, network), |node| node.drained = true);
        let mut nodes: Nodes = [drained("n1", "172.18.0.1/16"), node("far", "10.0.0.1/24")].into();
        let items = [("n1", "172.18.0.100"), ("n2", "172.18.0.101")];
        let policies: Policies = [policy("a", 1, &["172.18.0.100", "172.18.0.101"], &items)].into();
        let ip = |text: &str| -> IpAddr { text.parse().expect("a literal") };
        assert_eq!(hosted(&policies, "n1"), BTreeMap::from([(ip("172.18.0.100"), "a".into())]));
        let reason = |nodes: &Nodes| stays(&policies, nodes, "n1").get(&ip("172.18.0.100")).cloned();
        let none = "no other node with the label k8s.ovn.org/egress-assignable has a network for it";
        assert_eq!(reason(&nodes).as_deref(), Some(none));
        nodes.extend([node("n2", "172.18.0.2/16"), drained("n3", "172.18.0.3/16")]);
        nodes.extend([changed(node("n4", "172.18.0.4/16"), |node| node.ready = false)]);
        let all = "n2 has another address of the object, n3 is drained too, n4 is not ready";
        assert_eq!(reason(&nodes).as_deref(), Some(all));
        nodes.extend([node("n5", "172.18.0.5/16")]);
        assert_eq!(reason(&nodes), None, "it can go");
    }
}
