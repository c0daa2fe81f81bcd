//! Drained nodes.

use super::*;
use crate::model::node::{Capacity, CloudConfig};

fn drained(nodes: &mut Nodes, names: &[&str]) {
    for name in names {
        let node = nodes.get_mut(*name).expect("a node");
        *node = Arc::new(Node { drained: true, ..Node::clone(node) });
    }
}

#[test]
fn a_drained_node_releases_what_others_can_take_and_gets_nothing() {
    let mut nodes = nodes(2);
    drained(&mut nodes, &["n1"]);
    let policies: Policies = [
        policy("a", 1, &["172.18.0.100"], &[("n1", "172.18.0.100")]),
        // The other node has its second address already.
        policy("b", 2, &["172.18.0.101", "172.18.0.102"], &[("n1", "172.18.0.101"), ("n2", "172.18.0.102")]),
        policy("c", 3, &["172.18.0.103"], &[]),
        policy("d", 4, &["172.18.0.104", "172.18.0.105"], &[]),
    ]
    .into();
    let outcomes = assign(&policies, &nodes);
    assert_eq!(node_of(&outcomes, "a", "172.18.0.100"), Some("n2"));
    assert_eq!(node_of(&outcomes, "b", "172.18.0.101"), Some("n1"), "no other node can take it");
    assert_eq!(node_of(&outcomes, "b", "172.18.0.102"), Some("n2"));
    assert_eq!(node_of(&outcomes, "c", "172.18.0.103"), Some("n2"));
    let placed = ["172.18.0.104", "172.18.0.105"].map(|address| node_of(&outcomes, "d", address));
    assert_eq!(placed.iter().flatten().collect::<Vec<_>>(), [&"n2"], "one of them waits");
}

#[test]
fn where_all_are_drained_all_stays_and_nothing_comes() {
    let mut nodes = nodes(2);
    drained(&mut nodes, &["n1", "n2"]);
    let items = [("n1", "172.18.0.100")];
    let policies: Policies = [policy("a", 1, &["172.18.0.100"], &items), policy("b", 2, &["172.18.0.101"], &[])].into();
    let outcomes = assign(&policies, &nodes);
    assert_eq!(node_of(&outcomes, "a", "172.18.0.100"), Some("n1"));
    assert_eq!(status(&outcomes, "b"), &EntryStatus::Drained { node: "n1".into() });
    assert!(!outcomes[&"b".into()].no_eligible_node(), "the pods' own addresses are no way out");
    let (name, mut other) = node("n3", "172.18.0.3/16");
    Arc::make_mut(&mut other).ready = false;
    nodes.insert(name, other);
    let outcomes = assign(&policies, &nodes);
    assert_eq!(
        status(&outcomes, "b"),
        &EntryStatus::NotReady { node: "n3".into(), why: HostObstacle::NotReady },
        "what comes back by itself is named first"
    );
}

/// A waiting address takes its node before an address of a drained node does.
#[test]
fn waiting_addresses_come_before_those_of_a_drained_node() {
    let mut nodes = nodes(2);
    drained(&mut nodes, &["n1"]);
    let limited = nodes.get_mut("n2").expect("a node");
    let cloud =
        CloudConfig { networks: limited.primary.clone(), capacity: Capacity { total: Some(1), ..Default::default() } };
    *limited = Arc::new(Node { cloud: Some(cloud), ..Node::clone(limited) });
    let policies: Policies =
        [policy("a", 1, &["172.18.0.100"], &[("n1", "172.18.0.100")]), policy("b", 2, &["172.18.0.101"], &[])].into();
    let outcomes = assign(&policies, &nodes);
    assert_eq!(node_of(&outcomes, "b", "172.18.0.101"), Some("n2"));
    assert_eq!(node_of(&outcomes, "a", "172.18.0.100"), Some("n1"));
}

#[test]
fn a_hand_over_from_a_drained_node_keeps_its_new_node() {
    let mut nodes = nodes(9);
    drained(&mut nodes, &["n1"]);
    let items = [("n1", "172.18.0.100")];
    let policies: Policies = [policy("a", 1, &["172.18.0.100"], &items)].into();
    for new in ["n2", "n5", "n9"] {
        let record = HandOver { number: 1, from: "n1".into(), to: Some(new.into()) };
        let hand_overs = BTreeMap::from([("172.18.0.100".parse().expect("a literal"), record)]);
        let (none, policies, nodes) = (BTreeSet::new(), &policies, &nodes);
        let (unreachable, absent, hand_overs) = (&none, &none, &hand_overs);
        let (networks, services) = (&ClusterNetworks::default(), &Services::default());
        let facts = AssignmentInputs { policies, nodes, unreachable, absent, networks, services, hand_overs };
        assert_eq!(node_of(&crate::allocation::assign(&facts).policies, "a", "172.18.0.100"), Some(new));
    }
}

/// Only addresses of that interface move.
#[test]
fn an_interface_that_cannot_send_releases_what_others_can_take() {
    let mut nodes = with_another_interface(2, &InterfaceState::Usable);
    for reason in [InterfaceReason::Down, InterfaceReason::NoCarrier, InterfaceReason::Other("Unheard".into())] {
        impaired(&mut nodes, "n1", &reason);
        let items = [("n1", "172.18.0.100"), ("n2", "172.18.0.101")];
        let policies: Policies = [
            policy("a", 1, &["10.10.10.100"], &[("n1", "10.10.10.100")]),
            policy("b", 2, &["172.18.0.100", "172.18.0.101"], &items),
            policy("c", 3, &["10.10.10.101"], &[]),
        ]
        .into();
        let outcomes = assign(&policies, &nodes);
        assert_eq!(node_of(&outcomes, "a", "10.10.10.100"), Some("n2"));
        assert_eq!(outcomes[&"b".into()].items, policies[&"b".into()].published.items, "the uplink works");
        assert_eq!(node_of(&outcomes, "c", "10.10.10.101"), Some("n2"));

        let mut all = nodes.clone();
        impaired(&mut all, "n2", &reason);
        let outcomes = assign(&policies, &all);
        assert_eq!(node_of(&outcomes, "a", "10.10.10.100"), Some("n1"), "no other node can take it");
        let why = HostObstacle::Interface { name: "eth1".into(), reason: reason.clone() };
        assert_eq!(status(&outcomes, "c"), &EntryStatus::NotReady { node: "n1".into(), why });
        assert!(!outcomes[&"c".into()].no_eligible_node(), "the pods' own addresses are no way out");
    }
}

fn impaired(nodes: &mut Nodes, name: &str, reason: &InterfaceReason) {
    let node = Arc::make_mut(nodes.get_mut(name).expect("a node"));
    let eth1 = node.interfaces.iter_mut().find(|one| !one.is_uplink).expect("a further interface");
    eth1.state = InterfaceState::Attached(reason.clone());
}
