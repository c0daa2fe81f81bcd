mod drained;
mod one_node;
mod selected;

use super::samples::{key, node, policy};
use super::*;
use crate::model::interface::{EgressInterface, InterfaceReason, InterfaceState};
use crate::model::reserved::Reserved;
use crate::model::samples::interface;

type Outcomes = BTreeMap<PolicyKey, ObjectAssignment>;

fn assign(policies: &Policies, nodes: &Nodes) -> Outcomes {
    assign_without(policies, nodes, &BTreeSet::new()).policies
}

fn assign_without(policies: &Policies, nodes: &Nodes, unreachable: &BTreeSet<String>) -> Assignment {
    let (networks, services) = (&ClusterNetworks::default(), &Services::default());
    let (absent, hand_overs) = (&BTreeSet::new(), &BTreeMap::new());
    crate::allocation::assign(&AssignmentInputs {
        policies,
        nodes,
        unreachable,
        absent,
        networks,
        services,
        hand_overs,
    })
}

fn nodes(n: u8) -> Nodes {
    (1..=n).map(|i| node(&format!("n{i}"), &format!("172.18.0.{i}/16"))).collect()
}

fn node_of<'a>(outcomes: &'a Outcomes, policy: &str, address: &str) -> Option<&'a str> {
    outcomes[&key(policy)].entries.iter().find(|(text, _)| text == address).and_then(|(_, status)| match status {
        EntryStatus::Assigned { node } => Some(node.as_str()),
        _ => None,
    })
}

fn status<'a>(outcomes: &'a Outcomes, policy: &str) -> &'a EntryStatus {
    &outcomes[&key(policy)].entries[0].1
}

#[test]
fn addresses_of_one_object_go_to_different_nodes_and_the_surplus_waits() {
    let policies = Policies::from([policy("a", 1, &["172.18.0.101", "172.18.0.102", "172.18.0.103"], &[])]);
    let outcomes = assign(&policies, &nodes(2));
    let items = outcomes[&key("a")].items.clone();
    assert_eq!(items.len(), 2);
    assert_ne!(items[0].node, items[1].node);
    assert!(outcomes[&key("a")].entries.iter().any(|(_, status)| *status == EntryStatus::NodesInUse));
    assert!(!outcomes[&key("a")].no_eligible_node());
}

/// Nodes with another interface in this state, in 10.10.10.0/24.
fn with_another_interface(n: u8, state: &InterfaceState) -> Nodes {
    let add = |(name, node): (String, Arc<Node>)| {
        let uplink = EgressInterface { is_uplink: true, ..interface("eth0", &["172.18.0.0/16"]) };
        let eth1 = EgressInterface { state: state.clone(), ..interface("eth1", &["10.10.10.0/24"]) };
        (name, Arc::new(Node { interfaces: vec![uplink, eth1], ..(*node).clone() }))
    };
    nodes(n).into_iter().map(add).collect()
}

#[test]
fn an_interface_without_programs_gets_no_address_and_keeps_none() {
    let absent = InterfaceState::Absent(InterfaceReason::NotAttached);
    for assigned in [&[][..], &[("n1", "10.10.10.100")]] {
        let policies = Policies::from([policy("a", 1, &["10.10.10.100"], assigned)]);
        let outcomes = assign(&policies, &with_another_interface(2, &absent));
        assert_eq!((status(&outcomes, "a"), outcomes[&key("a")].items.len()), (&EntryStatus::NoNode, 0));
        for state in [InterfaceState::Usable, InterfaceState::Attached(InterfaceReason::NoCarrier)] {
            let outcomes = assign(&policies, &with_another_interface(2, &state));
            let node = node_of(&outcomes, "a", "10.10.10.100");
            let expected: &[_] = match (&state, assigned) {
                (_, [_, ..]) => &[Some("n1")],
                (InterfaceState::Usable, []) => &[Some("n1"), Some("n2")],
                (_, []) => &[None],
            };
            assert!(expected.contains(&node), "{state:?}: {node:?}");
        }
    }
}

#[test]
fn two_addresses_of_one_object_share_no_node_whatever_their_interfaces() {
    let policies = Policies::from([policy("a", 1, &["172.18.0.101", "10.10.10.100"], &[])]);
    let outcomes = assign(&policies, &with_another_interface(1, &InterfaceState::Usable));
    assert_eq!(outcomes[&key("a")].items.len(), 1);
    assert!(outcomes[&key("a")].entries.iter().any(|(_, status)| *status == EntryStatus::NodesInUse));
    let outcomes = assign(&policies, &with_another_interface(2, &InterfaceState::Usable));
    assert_eq!(outcomes[&key("a")].items.len(), 2);
}

#[test]
fn assigned_addresses_stay_and_those_of_a_lost_node_move() {
    let listed = ["172.18.0.101", "172.18.0.102"];
    let policies = Policies::from([policy("a", 1, &listed, &[("n1", "172.18.0.101"), ("n2", "172.18.0.102")])]);
    let outcomes = assign(&policies, &nodes(3));
    assert_eq!(node_of(&outcomes, "a", "172.18.0.101"), Some("n1"));
    assert_eq!(node_of(&outcomes, "a", "172.18.0.102"), Some("n2"));

    let mut fewer = nodes(3);
    let gone = Node { ready: false, ..(*fewer["n2"]).clone() };
    fewer.insert("n2".into(), Arc::new(gone));
    let outcomes = assign(&policies, &fewer);
    assert_eq!(node_of(&outcomes, "a", "172.18.0.101"), Some("n1"));
    assert_eq!(node_of(&outcomes, "a", "172.18.0.102"), Some("n3"));
}

#[test]
fn a_matching_finds_what_first_fit_misses() {
    // The first address fits both nodes, the second only one of them: whatever the order, both are placed.
    let nodes = Nodes::from([node("n1", "172.18.0.1/16"), node("n2", "172.18.1.2/24")]);
    for first in ["172.18.1.100", "172.18.1.101", "172.18.1.102", "172.18.1.103"] {
        let policies = Policies::from([policy("a", 1, &[first, "172.18.2.1"], &[])]);
        assert_eq!(assign(&policies, &nodes)[&key("a")].items.len(), 2, "{first}");
    }
}

#[test]
fn loads_become_as_even_as_they_can() {
    // Three nodes; those of x fit only n1 and n2, and come first.
    let nodes = Nodes::from([node("n1", "172.18.0.1/16"), node("n2", "172.18.0.2/16"), node("n3", "10.0.0.3/8")]);
    let wide = Arc::new(Node {
        primary: vec!["10.0.0.2/8".parse().expect("net"), "172.18.0.2/16".parse().expect("net")],
        ..(*nodes["n2"]).clone()
    });
    let mut nodes = nodes;
    nodes.insert("n2".into(), wide);
    let policies: Policies = (0..6_u8)
        .map(|i| {
            let address = if i < 3 { format!("10.0.1.{i}") } else { format!("172.18.1.{i}") };
            policy(&format!("o{i}"), i64::from(i), &[&address], &[])
        })
        .collect();
    let outcomes = assign(&policies, &nodes);
    let mut load = BTreeMap::new();
    for outcome in outcomes.values() {
        for item in outcome.items.clone() {
            *load.entry(item.node).or_insert(0) += 1;
        }
    }
    assert_eq!(load.values().copied().collect::<Vec<i32>>(), [2, 2, 2]);
}

#[test]
fn a_duplicate_goes_to_the_object_that_has_it_then_to_the_oldest() {
    let one = ["172.18.0.101"];
    let waiting = Policies::from([policy("old", 1, &one, &[]), policy("young", 2, &one, &[("n1", one[0])])]);
    let outcomes = assign(&waiting, &nodes(2));
    assert_eq!(node_of(&outcomes, "young", one[0]), Some("n1"));
    assert_eq!(*status(&outcomes, "old"), EntryStatus::Taken { policy: "young".into(), node: Some("n1".into()) });
    assert!(!outcomes[&key("old")].no_eligible_node());
    let fresh = Policies::from([policy("b-old", 1, &one, &[]), policy("a-young", 2, &one, &[])]);
    assert!(node_of(&assign(&fresh, &nodes(2)), "b-old", one[0]).is_some());
}

#[test]
fn a_nodes_own_address_and_nonsense_are_refused_and_named() {
    let listed = ["172.18.0.2", "172.18.0.1000", "::ffff:172.18.0.9", "172.18.0.9"];
    let outcomes = assign(&Policies::from([policy("a", 1, &listed, &[])]), &nodes(2));
    let entries = &outcomes[&key("a")].entries;
    assert_eq!(entries[0].1, EntryStatus::Conflict { node: "n2".into() });
    assert_eq!(entries[1].1, EntryStatus::Invalid);
    assert!(matches!(entries[2], (ref text, EntryStatus::Assigned { .. }) if text == "172.18.0.9"));
    assert_eq!(entries.len(), 3, "two spellings are one address");
}

#[test]
fn no_node_differs_from_a_node_that_is_taken() {
    let outcomes = assign(&Policies::from([policy("a", 1, &["192.0.2.1", "bad"], &[])]), &nodes(2));
    assert_eq!(*status(&outcomes, "a"), EntryStatus::NoNode);
    assert!(!outcomes[&key("a")].no_eligible_node(), "the meant address is unknown");
    for hopeless in ["192.0.2.1", "fd00::1"] {
        let outcomes = assign(&Policies::from([policy("a", 1, &[hopeless], &[])]), &nodes(2));
        assert!(outcomes[&key("a")].no_eligible_node());
    }
    let outcomes = assign(&Policies::from([policy("a", 1, &["172.18.0.101"], &[])]), &Nodes::new());
    assert!(outcomes[&key("a")].no_eligible_node());
    for listed in [&["bad"][..], &[], &["172.18.0.1"], &["192.0.2.1", "172.18.0.1"]] {
        let outcomes = assign(&Policies::from([policy("a", 1, listed, &[])]), &nodes(2));
        assert!(!outcomes[&key("a")].no_eligible_node(), "{listed:?} must not let pods out by the node's address");
    }
}

#[test]
fn a_node_that_is_away_or_has_unknown_networks_might_host_an_address() {
    let policy = Policies::from([policy("a", 1, &["172.18.0.101"], &[("n1", "172.18.0.101")])]);
    let fate_with = |change: fn(&mut Node)| {
        let mut node = (*nodes(1)["n1"]).clone();
        change(&mut node);
        let outcomes = assign(&policy, &Nodes::from([("n1".to_owned(), Arc::new(node))]));
        (status(&outcomes, "a").clone(), outcomes[&key("a")].no_eligible_node())
    };
    let away = |why| (EntryStatus::NotReady { node: "n1".into(), why }, false);
    assert_eq!(fate_with(|node| node.ready = false), away(HostObstacle::NotReady));
    let stale_standby = fate_with(|node| (node.primary, node.networks_known) = (Vec::new(), false));
    assert_eq!(stale_standby, away(HostObstacle::NetworksUnknown));
    assert_eq!(fate_with(|node| (node.ready, node.networks_known) = (false, false)), away(HostObstacle::NotReady));
    assert_eq!(fate_with(|node| (node.ready, node.assignable) = (false, false)), (EntryStatus::NoNode, true));
}

#[test]
fn an_object_keeps_its_address_while_its_node_is_away() {
    let one = ["172.18.0.101"];
    let policies = Policies::from([policy("old", 1, &one, &[]), policy("young", 2, &one, &[("n9", one[0])])]);
    let outcomes = assign(&policies, &nodes(2));
    assert!(node_of(&outcomes, "young", one[0]).is_some());
    assert!(matches!(status(&outcomes, "old"), EntryStatus::Taken { policy, .. } if *policy == "young".into()));
}

#[test]
fn what_has_become_a_nodes_own_address_is_not_kept() {
    let policies = Policies::from([policy("a", 1, &["172.18.0.2"], &[("n1", "172.18.0.2")])]);
    assert_eq!(*status(&assign(&policies, &nodes(2)), "a"), EntryStatus::Conflict { node: "n2".into() });
}

#[test]
fn a_node_that_does_not_answer_gets_nothing() {
    let (policies, nodes) = (Policies::from([policy("a", 1, &["172.18.0.101"], &[("n1", "172.18.0.101")])]), nodes(2));
    let unreachable = BTreeSet::from(["n1".to_owned()]);
    let assignment = assign_without(&policies, &nodes, &unreachable);
    assert_eq!(node_of(&assignment.policies, "a", "172.18.0.101"), Some("n2"));
    assert_eq!(assignment.eligible, 1);
    let all = BTreeSet::from(["n1".to_owned(), "n2".to_owned()]);
    let assignment = assign_without(&policies, &nodes, &all);
    assert_eq!(
        *status(&assignment.policies, "a"),
        EntryStatus::NotReady { node: "n1".into(), why: HostObstacle::HealthAddressUnknown }
    );
    let at: Vec<IpAddr> = vec!["172.18.0.1".parse().expect("a literal")];
    let published = Node { health: Some(at.clone()), ..(*nodes["n1"]).clone() };
    let nodes = Nodes::from([("n1".to_owned(), Arc::new(published))]);
    let why = match status(&assign_without(&policies, &nodes, &all).policies, "a") {
        EntryStatus::NotReady { why, .. } => why.clone(),
        other => panic!("{other:?}"),
    };
    assert_eq!(why, HostObstacle::Unhealthy { at });
    assert_eq!(why.to_string(), "does not answer health checks at 172.18.0.1, or says that it cannot serve");
}

#[test]
fn a_node_whose_agent_is_away_keeps_what_it_has_and_gets_nothing_more() {
    let (kept, new) = ("172.18.0.101", "172.18.0.102");
    let policies = Policies::from([policy("a", 1, &[kept], &[("n1", kept)]), policy("b", 2, &[new], &[])]);
    let with = |n: u8| {
        let (unreachable, absent) = (BTreeSet::new(), BTreeSet::from(["n1".to_owned()]));
        let hand_overs = BTreeMap::new();
        crate::allocation::assign(&AssignmentInputs {
            policies: &policies,
            nodes: &nodes(n),
            unreachable: &unreachable,
            absent: &absent,
            networks: &ClusterNetworks::default(),
            services: &Services::default(),
            hand_overs: &hand_overs,
        })
        .policies
    };
    let outcomes = with(2);
    assert_eq!((node_of(&outcomes, "a", kept), node_of(&outcomes, "b", new)), (Some("n1"), Some("n2")));
    let outcomes = with(1);
    assert_eq!(node_of(&outcomes, "a", kept), Some("n1"));
    assert_eq!(*status(&outcomes, "b"), EntryStatus::NotReady { node: "n1".into(), why: HostObstacle::AgentAway });
}

#[test]
fn an_address_prefers_its_last_node_among_equals() {
    let nodes = nodes(5);
    for last in nodes.keys() {
        // It moves between policies: the policy that has it in its status no longer lists it.
        let before = policy("before", 1, &["172.18.0.200"], &[(last, "172.18.0.101")]);
        let policies = Policies::from([before, policy("now", 2, &["172.18.0.101"], &[])]);
        let moved = assign(&policies, &nodes);
        let other = node_of(&moved, "before", "172.18.0.200");
        assert!(node_of(&moved, "now", "172.18.0.101") == Some(last) || other == Some(last), "{last}");
        let alone = Policies::from([
            policy("before", 1, &[], &[(last, "172.18.0.101")]),
            policy("now", 2, &["172.18.0.101"], &[]),
        ]);
        assert_eq!(node_of(&assign(&alone, &nodes), "now", "172.18.0.101"), Some(last.as_str()));
    }
}

#[test]
fn a_cloud_allows_so_many_and_the_older_object_comes_first() {
    use crate::model::node::{Capacity, CloudConfig};

    let limited = |capacity: Capacity| {
        let networks = vec!["172.18.0.0/16".parse().expect("a network"), "fd00::/64".parse().expect("a network")];
        let mut nodes = nodes(1);
        let node = Node { cloud: Some(CloudConfig { networks, capacity }), ..(*nodes["n1"]).clone() };
        nodes.insert("n1".into(), Arc::new(node));
        nodes
    };
    let policies = Policies::from([
        policy("b", 1, &["172.18.0.101"], &[]),
        policy("c", 2, &["172.18.0.102"], &[]),
        policy("a", 3, &["fd00::a"], &[]),
    ]);
    let placed = |capacity: Capacity| -> Vec<String> {
        let outcomes = assign(&policies, &limited(capacity));
        outcomes.iter().filter(|(_, outcome)| !outcome.items.is_empty()).map(|(key, _)| key.name.clone()).collect()
    };
    let none = Capacity::default();
    assert_eq!(placed(none), ["a", "b", "c"]);
    assert_eq!(placed(Capacity { total: Some(1), ..none }), ["b"]);
    assert_eq!(placed(Capacity { total: Some(2), ..none }), ["b", "c"]);
    assert_eq!(placed(Capacity { v4: Some(1), ..none }), ["a", "b"]);
    assert_eq!(placed(Capacity { v6: Some(0), total: Some(9), v4: None }), ["b", "c"]);
    let outcomes = assign(&policies, &limited(Capacity { total: Some(1), ..none }));
    assert_eq!(*status(&outcomes, "c"), EntryStatus::NoCapacity);
    assert!(!outcomes[&key("c")].no_eligible_node());
}

#[test]
fn a_node_takes_as_many_as_its_annotation_allows_and_keeps_those_it_has() {
    let limited = |limit: usize| {
        let mut nodes = nodes(2);
        let node = Node { max_egress_ips: Some(limit), ..(*nodes["n1"]).clone() };
        nodes.insert("n1".into(), Arc::new(node));
        nodes
    };
    let named = |number: u8| format!("172.18.0.{}", 100 + number);
    let all: Vec<String> = (0..4).map(named).collect();
    let each = |published: &[(&str, &str)]| -> Policies {
        let of = |(at, address): (usize, &String)| {
            let own: Vec<_> = published.iter().copied().filter(|(_, one)| one == address).collect();
            let created = i64::try_from(at).expect("few");
            policy(address, created, &[address], &own)
        };
        all.iter().enumerate().map(of).collect()
    };
    let on_first = |policies: &Policies, limit| {
        let outcomes = assign(policies, &limited(limit));
        all.iter().filter(|address| node_of(&outcomes, address, address) == Some("n1")).count()
    };
    assert_eq!([0, 1, 2].map(|limit| on_first(&each(&[]), limit)), [0, 1, 2]);
    let there: Vec<_> = all.iter().map(|address| ("n1", address.as_str())).collect();
    assert_eq!(on_first(&each(&there), 1), 4, "a limit that falls moves nothing");
}

#[test]
fn what_stays_keeps_its_place_in_the_status() {
    let listed = ["172.18.0.101", "172.18.0.102", "172.18.0.103"];
    let policies =
        Policies::from([policy("a", 1, &listed, &[("n1", listed[2]), ("n9", listed[1]), ("n2", listed[0])])]);
    let outcomes = assign(&policies, &nodes(3));
    let order: Vec<&str> = outcomes[&key("a")].items.iter().map(|item| item.egress_ip.as_str()).collect();
    assert_eq!(order, [listed[2], listed[0], listed[1]]);
}

#[test]
fn an_object_may_list_a_thousand_and_a_node_have_a_hundred() {
    let listed: Vec<String> = (0..1000).map(|i| format!("172.18.{}.{}", 4 + i / 250, 1 + i % 250)).collect();
    let listed: Vec<&str> = listed.iter().map(String::as_str).collect();
    let policies = Policies::from([policy("a", 1, &listed, &[])]);
    let outcomes = assign(&policies, &nodes(7));
    assert_eq!(outcomes[&key("a")].items.len(), 7);
    let single: Policies =
        (0..100_u8).map(|i| policy(&format!("o{i}"), i64::from(i), &[listed[usize::from(i)]], &[])).collect();
    assert!(assign(&single, &nodes(1)).values().all(|outcome| outcome.items.len() == 1));
}

#[test]
fn an_object_has_no_more_addresses_of_a_family_than_programs_can_choose_from() {
    let listed: Vec<String> = (0..70).map(|i| format!("172.18.4.{i}")).collect();
    let listed: Vec<&str> = listed.iter().map(String::as_str).collect();
    // The last one is served already, and stays.
    let policies =
        Policies::from([policy("a", 1, &listed, &[("n1", listed[69])]), policy("b", 2, &listed[64..66], &[])]);
    let outcomes = assign(&policies, &nodes(80));
    assert_eq!(outcomes[&key("a")].items.len(), 64);
    assert!(outcomes[&key("a")].items.iter().any(|item| item.egress_ip == listed[69]));
    let surplus = outcomes[&key("a")].entries.iter().filter(|(_, status)| *status == EntryStatus::Surplus);
    let surplus: Vec<&str> = surplus.map(|(entry, _)| entry.as_str()).collect();
    assert_eq!(surplus, ["172.18.4.63", "172.18.4.66", "172.18.4.67", "172.18.4.68"]);
    assert_eq!(outcomes[&key("b")].items.len(), 2, "what it may not have is free for others");
}

#[test]
fn an_open_hand_over_continues_and_returns_only_to_the_last_node() {
    let address = "172.18.0.101";
    for to in ["n2", "n3", "n4"] {
        let hand_over = HandOver { number: 1, from: "n1".into(), to: Some(to.into()) };
        let hand_overs = BTreeMap::from([(address.parse().expect("a literal"), hand_over)]);
        let with = |items: &[(&str, &str)], unreachable: &[&str]| {
            let policies = Policies::from([policy("a", 1, &[address], items)]);
            let unreachable = unreachable.iter().map(|name| (*name).to_owned()).collect();
            let facts = AssignmentInputs {
                policies: &policies,
                nodes: &nodes(5),
                unreachable: &unreachable,
                absent: &BTreeSet::new(),
                networks: &ClusterNetworks::default(),
                services: &Services::default(),
                hand_overs: &hand_overs,
            };
            node_of(&crate::allocation::assign(&facts).policies, "a", address).map(str::to_owned)
        };
        assert_eq!(with(&[("n1", address)], &["n1"]).as_deref(), Some(to));
        assert_eq!(with(&[], &[]).as_deref(), Some(to));
        assert_eq!(with(&[], &[to]).as_deref(), Some("n1"));
        assert_eq!(with(&[("n1", address)], &[]).as_deref(), Some("n1"), "it is back before the release");
    }
}

#[test]
fn reserved_addresses_are_refused_with_their_reason() {
    let (reserved, free) = ("172.18.255.255", "172.18.0.100");
    // Also if a former leader has assigned it.
    for items in [&[][..], &[("n1", reserved)]] {
        let policies = Policies::from([policy("a", 1, &[reserved, free], items)]);
        let outcomes = assign(&policies, &nodes(2));
        let network = "172.18.0.0/16".parse().expect("a network");
        assert_eq!(*status(&outcomes, "a"), EntryStatus::Reserved(Reserved::Broadcast(network)));
        assert!(node_of(&outcomes, "a", free).is_some(), "others of the object are served");
    }
    let alone = assign(&Policies::from([policy("a", 1, &[reserved], &[])]), &nodes(2));
    assert!(!alone[&key("a")].no_eligible_node(), "pods do not leave by the node's address");
}

#[test]
fn an_address_of_a_service_is_refused_but_not_taken_from_an_object() {
    let address = "172.18.0.100";
    let services = |is_given: bool| {
        let mut services = Services::default();
        let key = crate::model::services::ServiceKey { namespace: "bouvier".into(), name: "web".into() };
        let addresses: BTreeSet<IpAddr> = [address.parse().expect("a literal")].into();
        let given = if is_given { addresses.clone() } else { BTreeSet::new() };
        let service = crate::model::services::Service { addresses, given, ..Default::default() };
        services.apply(crate::model::view::Update::Changed(key, service));
        services
    };
    let with = |is_given: bool, items: &[(&str, &str)]| {
        let services = services(is_given);
        let (policies, nodes) = (Policies::from([policy("a", 1, &[address], items)]), nodes(2));
        let (networks, none) = (ClusterNetworks::default(), BTreeSet::new());
        let (unreachable, absent, hand_overs) = (&none, &none, &BTreeMap::new());
        let (policies, nodes, networks, services) = (&policies, &nodes, &networks, &services);
        let facts = AssignmentInputs { policies, nodes, unreachable, absent, networks, services, hand_overs };
        status(&crate::allocation::assign(&facts).policies, "a").clone()
    };
    assert_eq!(with(true, &[]), EntryStatus::Reserved(Reserved::Service));
    assert_eq!(with(true, &[("n2", address)]), EntryStatus::Assigned { node: "n2".into() });
    assert!(matches!(with(false, &[]), EntryStatus::Assigned { .. }), "what its author lists reserves nothing");
}
