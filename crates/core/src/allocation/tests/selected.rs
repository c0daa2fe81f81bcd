//! Policies that select nodes by their labels, as an ExternalIPPool does, or by the addresses that nodes have.

use super::*;
use crate::model::interface::{EgressInterface, VlanNetwork};
use crate::model::policy::{EgressNodes, EligibleNodes, NodeSelectors, SelectedNodes};
use crate::model::samples::{equals, interface, net};
use crate::model::view::Labels;

const ADDRESS: &str = "172.18.0.100";

/// Three nodes: `n1` and `n2` in rack 1, none of them with the label of egress nodes.
fn racks() -> Nodes {
    let place = |(name, node): (String, Arc<Node>)| {
        let rack = if name == "n3" { "2" } else { "1" };
        let labels = Arc::new(Labels::from([("rack".to_owned(), rack.to_owned()), (name.clone(), "is".to_owned())]));
        (name, Arc::new(Node { labels, assignable: false, ..(*node).clone() }))
    };
    nodes(3).into_iter().map(place).collect()
}

fn on(selectors: NodeSelectors, assigned: &[(&str, &str)]) -> Policies {
    let (key, policy) = policy("a", 1, &[ADDRESS], assigned);
    let policy = EgressPolicy { eligible_nodes: EligibleNodes::Selected(selectors.into()), ..(*policy).clone() };
    [(key, Arc::new(policy))].into()
}

#[test]
fn an_address_is_on_a_node_that_all_selectors_match() {
    let node = |selectors: &[_], assigned: &[_]| {
        let outcomes = assign(&on(selectors.iter().cloned().collect(), assigned), &racks());
        node_of(&outcomes, "a", ADDRESS).map(str::to_owned)
    };
    let (rack1, rack2, n2) = (equals("rack", "1"), equals("rack", "2"), equals("n2", "is"));
    assert!(node(&[], &[]).is_some(), "without a selector all nodes");
    assert_eq!(node(std::slice::from_ref(&rack2), &[]).as_deref(), Some("n3"));
    assert_eq!(node(&[rack1.clone(), n2], &[]).as_deref(), Some("n2"));
    assert_eq!(node(&[rack1.clone(), rack2.clone()], &[]), None);
    assert_eq!(node(&[rack1], &[("n2", ADDRESS)]).as_deref(), Some("n2"), "it stays where it may be");
    assert_eq!(node(&[rack2], &[("n2", ADDRESS)]).as_deref(), Some("n3"), "and leaves a node that it may not");
}

/// `n2` and `n3` have the address on an interface, `n1` is known by its first one.
const OWN: &str = "172.18.0.50";

fn having() -> Nodes {
    let mut all = racks();
    for name in ["n2", "n3"] {
        let node = Arc::make_mut(all.get_mut(name).expect("a node"));
        node.host_cidrs.push(net("172.18.0.50/16"));
    }
    all
}

/// An older policy that uses addresses of the host, and a younger one that does not, list the address.
fn of_host(address: &str, assigned: &[(&str, &str)]) -> Policies {
    let (key, policy) = policy("a", 2, &[address], assigned);
    let (eligible_nodes, address_use) = (EligibleNodes::Having { candidates: BTreeSet::new() }, AddressUse::OfHost);
    let policy = EgressPolicy { eligible_nodes, address_use, ..(*policy).clone() };
    [(key, Arc::new(policy)), self::policy("plain", 1, &[address], &[])].into()
}

#[test]
fn an_address_of_the_host_is_where_a_node_has_it() {
    let node = |address: &str, assigned: &[_], nodes: &Nodes| {
        let outcomes = assign(&of_host(address, assigned), nodes);
        assert!(outcomes[&key("plain")].items.is_empty(), "another policy never has it");
        node_of(&outcomes, "a", address).map(str::to_owned)
    };
    let nodes = having();
    let found = node(OWN, &[], &nodes).expect("a node");
    assert!(["n2", "n3"].contains(&found.as_str()), "{found}");
    for held in ["n2", "n3"] {
        assert_eq!(node(OWN, &[(held, OWN)], &nodes).as_deref(), Some(held), "it stays");
    }
    assert_eq!(node(OWN, &[("n1", OWN)], &nodes), Some(found), "n1 does not have it");
    let mut moved = nodes.clone();
    Arc::make_mut(moved.get_mut("n2").expect("a node")).host_cidrs.clear();
    assert_eq!(node(OWN, &[("n2", OWN)], &moved).as_deref(), Some("n3"), "it moves with the address");
    // A kubelet may list any address on its own Node.
    let mut claimed = nodes.clone();
    Arc::make_mut(claimed.get_mut("n3").expect("a node")).host_cidrs.push(net("172.18.0.1/16"));
    assert_eq!(node("172.18.0.1", &[], &claimed).as_deref(), Some("n1"), "by which it is known");
    assert_eq!(node("172.18.0.1", &[("n3", "172.18.0.1")], &claimed).as_deref(), Some("n1"), "and leaves others");
    Arc::make_mut(claimed.get_mut("n1").expect("a node")).ready = false;
    for assigned in [&[][..], &[("n3", "172.18.0.1")]] {
        assert_eq!(node("172.18.0.1", assigned, &claimed), None, "also while its node is away");
    }
    for other in ["172.18.0.77", "10.244.2.2"] {
        let outcomes = assign(&of_host(other, &[]), &nodes);
        assert_eq!(node_of(&outcomes, "a", other), None, "{other}");
    }
    let outcomes = assign(&of_host("172.18.0.77", &[]), &labelled());
    assert!(node_of(&outcomes, "plain", "172.18.0.77").is_some(), "and it keeps no other policy from an address");
}

fn labelled() -> Nodes {
    having().into_iter().map(|(name, node)| (name, Arc::new(Node { assignable: true, ..(*node).clone() }))).collect()
}

#[test]
fn nodes_that_could_serve_the_pods_take_part() {
    let candidates = [equals("rack", "2")].into();
    let (key, policy) = self::policy("a", 1, &["172.18.0.1"], &[]);
    let eligible_nodes = EligibleNodes::Having { candidates };
    let policy = EgressPolicy { eligible_nodes, address_use: AddressUse::OfHost, ..(*policy).clone() };
    let egress_nodes = EgressNodes::of([&policy]);
    let nodes = racks();
    let found: Vec<bool> = nodes.values().map(|node| egress_nodes.has(node)).collect();
    assert_eq!(found, [true, false, true], "one has the address, another is a candidate");
    let outcomes = assign(&[(key, Arc::new(policy))].into(), &nodes);
    assert_eq!(node_of(&outcomes, "a", "172.18.0.1"), Some("n1"), "the address is where it is");
}

/// `n1` has the network on its uplink alone, `n2` in VLAN 7 and `n3` in VLAN 8.
#[test]
fn an_address_in_a_vlan_is_hosted_there_alone() {
    let (inside, outside) = ("10.10.10.100", "172.18.0.100");
    let mut all = racks();
    for (name, interfaces) in [("n1", vec![]), ("n2", vec![("egress.7", 7)]), ("n3", vec![("egress.8", 8)])] {
        let node = Arc::make_mut(all.get_mut(name).expect("a node"));
        if name == "n1" {
            node.primary.push(net("10.10.10.1/24"));
        }
        let of = |(name, vlan)| EgressInterface { vlan: Some(vlan), ..interface(name, &["10.10.10.0/24"]) };
        node.interfaces = interfaces.into_iter().map(of).collect();
    }
    let on = |address: &str, vlans: &[u16]| {
        let vlans = vlans.iter().map(|vlan| VlanNetwork { vlan: *vlan, gateway: net("10.10.10.1/24") }).collect();
        let (key, policy) = policy("a", 1, &[address], &[]);
        let nodes = SelectedNodes { selectors: NodeSelectors::new(), vlans };
        let policy = EgressPolicy { eligible_nodes: EligibleNodes::Selected(Box::new(nodes)), ..(*policy).clone() };
        let outcomes = assign(&[(key, Arc::new(policy))].into(), &all);
        node_of(&outcomes, "a", address).map(str::to_owned)
    };
    assert_eq!(on(inside, &[7]).as_deref(), Some("n2"));
    assert_eq!(on(inside, &[8]).as_deref(), Some("n3"));
    assert_eq!(on(inside, &[9]), None, "on no other interface");
    assert!(on(outside, &[9]).is_some(), "not of the VLAN's network");
    assert_eq!(on(inside, &[]).as_deref(), Some("n2"), "any further interface");
}
