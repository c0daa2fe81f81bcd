//! The VLANs that a node needs devices for: those of the pools whose addresses it may host. Pure.

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;

use crate::model::interface::{MOST_VLANS, VlanNetwork};
use crate::model::node::Node;
use crate::model::policy::EligibleNodes;
use crate::model::view::ClusterView;
use crate::selection::by_rank;

/// The gateways of each VLAN, one of a family, with the length of their networks.
pub type Vlans = BTreeMap<u16, BTreeSet<IpNet>>;

/// What the policies need of this node. Older ones come first: a network that contradicts one of theirs, and what is beyond
/// [`MOST_VLANS`], is left out.
pub fn vlans(view: &ClusterView, own: &Node) -> Vlans {
    let networks = by_rank(view.policies.values().filter(|policy| has_vlans(&policy.eligible_nodes)));
    let networks = networks.into_iter().filter(|policy| policy.eligible_nodes.has(own));
    let mut taken = BTreeSet::<VlanNetwork>::new();
    let mut vlans = Vlans::new();
    for network in networks.flat_map(|policy| of_nodes(&policy.eligible_nodes)) {
        let has_room = vlans.contains_key(&network.vlan) || vlans.len() < MOST_VLANS;
        if has_room && !taken.iter().any(|other| other.contradicts(network)) {
            taken.insert(*network);
            vlans.entry(network.vlan).or_default().insert(network.gateway);
        }
    }
    vlans
}

fn has_vlans(eligible: &EligibleNodes) -> bool {
    of_nodes(eligible).next().is_some()
}

fn of_nodes(eligible: &EligibleNodes) -> impl Iterator<Item = &VlanNetwork> {
    let selected = match eligible {
        EligibleNodes::Selected(selected) => Some(selected),
        EligibleNodes::Labelled | EligibleNodes::One(_) | EligibleNodes::Having { .. } => None,
    };
    selected.into_iter().flat_map(|selected| &selected.vlans)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::model::policy::{EgressPolicy, PolicyKey, SelectedNodes};
    use crate::model::samples::{equals, net, origin};
    use crate::model::view::Labels;

    fn aged(name: &str, created: i64, nodes: SelectedNodes) -> (PolicyKey, Arc<EgressPolicy>) {
        let eligible_nodes = EligibleNodes::Selected(Box::new(nodes));
        let policy = EgressPolicy { eligible_nodes, ..EgressPolicy::new(origin(name, created)) };
        (policy.key().clone(), Arc::new(policy))
    }

    #[test]
    fn a_node_has_the_vlans_of_pools_that_select_it() {
        let of = |vlan, gateway: &str| VlanNetwork { vlan, gateway: net(gateway) };
        let rack = |number: &str| [equals("rack", number)].into();
        let all = [
            ("new", 9, rack("1"), vec![of(8, "10.10.0.2/24"), of(7, "fd00:10::1/64")]),
            ("old", 1, rack("1"), vec![of(7, "10.10.0.1/24")]),
            ("other", 2, rack("2"), vec![of(9, "10.30.0.1/24")]),
        ];
        let policies = all.map(|(name, created, selectors, vlans)| {
            aged(name, created, SelectedNodes { selectors, vlans: vlans.into_iter().collect() })
        });
        let view = ClusterView { policies: policies.into(), ..ClusterView::default() };
        let node =
            |rack: &str| Node { labels: Arc::new(Labels::from([("rack".into(), rack.into())])), ..Node::default() };
        let expected = Vlans::from([(7, [net("10.10.0.1/24"), net("fd00:10::1/64")].into())]);
        assert_eq!(vlans(&view, &node("1")), expected, "VLAN 8 has the network of an older one");
        assert_eq!(vlans(&view, &node("2")), Vlans::from([(9, [net("10.30.0.1/24")].into())]));
        assert_eq!(vlans(&view, &node("3")), Vlans::new());
    }

    #[test]
    fn a_node_has_a_bounded_number_of_vlans_those_of_the_oldest() {
        let policies = (1..=20u16).map(|vlan| {
            let network = VlanNetwork { vlan, gateway: net(&format!("10.{vlan}.0.1/24")) };
            let nodes = SelectedNodes { vlans: [network].into(), ..SelectedNodes::default() };
            aged(&format!("p{vlan}"), 100 - i64::from(vlan), nodes)
        });
        let view = ClusterView { policies: policies.collect(), ..ClusterView::default() };
        let taken: Vec<u16> = vlans(&view, &Node::default()).into_keys().collect();
        assert_eq!(taken, (5..=20).collect::<Vec<_>>());
    }
}
