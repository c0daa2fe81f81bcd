use std::sync::Arc;

use egress_common::random::Random;

use super::*;
use crate::model::exposed::{Exposes, TargetPort};
use crate::model::policy::{
    DestinationPrefixes, Destinations, PodShare, PolicyKind, PolicyNetwork, PolicyRule, RuleSource, Selects,
    SourceKind, Unreadable,
};
use crate::model::samples::{equals, interface, ip, net, policy, settings};
use crate::model::selector::Selector;
use crate::model::services::{Service, ServiceKey};
use crate::model::state::{EgressIds, PodClass, PodOwner, PodState, TunnelEndpoint};
use crate::model::view::{Attach, Change, Labels, Pod, PodKey, Update};
use crate::networks::{MOST_ADDRESSES, MOST_TABLES, NetworkUse, RoutedNetworks, RoutingTables};
use crate::plan::compile::Compiler;
use crate::selection::MOST_STANDBY;
use crate::selection::pod_addresses::PodAddressSpace;

fn node(i: u8) -> Node {
    Node {
        name: format!("n{i}"),
        primary: vec![net(&format!("172.18.0.{i}/16"))],
        host_cidrs: vec![net(&format!("172.18.0.{i}/16")), net(&format!("10.10.10.{i}/24"))],
        pod_subnets: vec![net(&format!("10.244.{i}.0/24"))],
        health: Some(vec![ip(&format!("10.244.{i}.2"))]),
        ..Node::default()
    }
}

fn pod(address: &str) -> Pod {
    Pod {
        uid: address.into(),
        created: 1,
        labels: Labels::new(),
        reported: BTreeSet::from([ip(address)]),
        announced: BTreeSet::new(),
        surplus: 0,
        terminating: false,
        host_network: false,
        attached: BTreeSet::new(),
        starting: false,
        completed: false,
        ports: Vec::new(),
    }
}

fn key(name: &str) -> PodKey {
    PodKey { namespace: "prod".into(), name: name.into() }
}

fn view(policies: Vec<EgressPolicy>, pods: Vec<(&str, Pod)>) -> ClusterView {
    ClusterView {
        policies: policies.into_iter().map(|policy| (policy.key().clone(), Arc::new(policy))).collect(),
        namespaces: BTreeMap::from([("prod".to_owned(), Labels::from([("env".into(), "prod".into())]))]),
        pods: pods.into_iter().map(|(name, pod)| (key(name), pod)).collect(),
        nodes: [1, 2].map(|i| (format!("n{i}"), Arc::new(node(i)))).into(),
        ..ClusterView::default()
    }
}

fn compiled(view: &ClusterView) -> KernelState {
    compiled_with(view, &settings())
}

fn compiled_with(view: &ClusterView, settings: &NodeSettings) -> KernelState {
    desired(view, settings).expect("the own node is known").state
}

fn v4_policy(state: &KernelState) -> &Policy {
    &state.policy[&(EgressId(1), Family::V4)]
}

#[test]
fn a_thousand_addresses_of_an_object_and_a_hundred_of_a_node_fit() {
    let listed: Vec<String> = (0..1000).map(|i| format!("172.18.{}.{}", 4 + i / 250, 1 + i % 250)).collect();
    let listed: Vec<&str> = listed.iter().map(String::as_str).collect();
    let mut view = view(vec![policy("a", &listed, &[("n1", listed[999]), ("n2", listed[0])])], vec![]);
    let own = (0..100).map(|i| net(&format!("172.18.9.{i}/16"))).chain([net(&format!("{}/16", listed[1]))]);
    let second = Node { host_cidrs: own.collect(), ..node(2) };
    view.nodes.insert("n2".to_owned(), Arc::new(second));
    let state = compiled(&view);
    let policy = v4_policy(&state);
    assert_eq!((policy.slots.len(), policy.pending.len()), (2, MAX_SLOTS - 2));
    assert_eq!(state.owned, BTreeMap::from([(EgressId(1), ip(listed[999]))]));
    let of_second = state.nodes.values().filter(|entry| entry.node == node(2).endpoint().expect("it has one"));
    assert_eq!(of_second.count(), 102, "its hundred, the one that is listed, and its endpoint");
    assert!(!policy.pending.contains(&ip(listed[1])), "a node's own address is no egress IP");
}

#[test]
fn slots_are_here_or_at_the_nodes_endpoint_and_this_nodes_are_owned() {
    let listed = ["172.18.0.100", "172.18.0.101", "172.18.0.102"];
    let items = [("n1", listed[0]), ("n2", listed[1]), ("unknown", listed[2])];
    let state = compiled(&view(vec![policy("a", &listed, &items)], vec![]));
    let remote = Place::Remote(TunnelEndpoint(ip("172.18.0.2")));
    let slots =
        [Slot { address: ip("172.18.0.100"), place: Place::Here }, Slot { address: ip("172.18.0.101"), place: remote }];
    assert_eq!(v4_policy(&state).slots, slots);
    assert_eq!(v4_policy(&state).when_empty, WhenEmpty::Drop);
    assert_eq!(state.policy[&(EgressId(1), Family::V6)].when_empty, WhenEmpty::NotListed);
    assert_eq!(state.owned, BTreeMap::from([(EgressId(1), ip("172.18.0.100"))]));
}

/// By the interfaces of the nodes that serve the addresses; one that no node serves keeps the flows to its network.
#[test]
fn destinations_follow_the_nodes_of_the_addresses() {
    let (first, further) = ("172.18.0.100", "10.10.10.100");
    let with = |items: &[(&str, &str)]| {
        let mut view = view(vec![policy("a", &[first, further], items)], vec![]);
        let interfaces = vec![interface("eth1", &["10.10.10.0/24"])];
        view.nodes.insert("n2".to_owned(), Arc::new(Node { interfaces, ..node(2) }));
        v4_policy(&compiled(&view)).destinations.clone()
    };
    let expected = BTreeMap::from([
        (net("0.0.0.0/0"), BTreeSet::from([ip(first)])),
        (net("10.10.10.0/24"), BTreeSet::from([ip(further)])),
    ]);
    assert_eq!(with(&[("n1", first), ("n2", further)]), expected);
    assert_eq!(with(&[("n1", first)]), expected);
    assert_eq!(with(&[("n2", further)]), expected);
    assert_eq!(with(&[("n2", first), ("n2", further)]), expected, "it serves one of them");
}

/// A node that has an address of each family owns two, each of its own egress ID.
#[test]
fn a_policy_with_an_id_of_each_family_may_have_both_addresses_on_one_node() {
    let (v4, v6) = (EgressId(5), EgressId(6));
    let addresses = ["172.18.0.100", "fd00:172:18::100"];
    let of = |ids| policy("a", &addresses, &addresses.map(|address| ("n1", address))).published_as(|p| p.ids = ids);
    let dual = Pod { reported: [ip("10.244.1.10"), ip("fd00:10:244:1::10")].into(), ..pod("10.244.1.10") };
    let seen = |ids| {
        let mut view = view(vec![of(ids)], vec![("web", dual.clone())]);
        let mut own = node(1);
        own.pod_subnets.push(net("fd00:10:244:1::/64"));
        view.nodes.insert("n1".to_owned(), Arc::new(own));
        compiled(&view)
    };
    let both = seen(EgressIds::new(Some(v4), Some(v6)));
    let selected = [("10.244.1.10", v4), ("fd00:10:244:1::10", v6)].map(|(pod, id)| (ip(pod), PodState::Selected(id)));
    assert_eq!(both.pods, selected.into());
    assert_eq!(both.owned, [(v4, ip(addresses[0])), (v6, ip(addresses[1]))].into());
    assert_eq!(both.policy.keys().copied().collect::<Vec<_>>(), [(v4, Family::V4), (v6, Family::V6)]);
    assert!(both.policy.values().all(|policy| policy.slots.len() == 1));
    // With one ID for both families, a node holds one address of the policy.
    let one = seen(EgressIds::both(v4));
    assert_eq!(one.owned, [(v4, ip(addresses[0]))].into());
    assert_eq!((one.policy[&(v4, Family::V4)].slots.len(), one.policy[&(v4, Family::V6)].slots.len()), (1, 0));
}

fn younger(policy: EgressPolicy) -> EgressPolicy {
    policy
        .from_origin(|origin| origin.created = 2)
        .published_as(|published| published.ids = EgressIds::both(EgressId(2)))
}

/// An older policy with a typing error in its address serves nothing; one that was serving keeps its pods.
#[test]
fn an_object_without_an_address_takes_no_pod_from_another_unless_it_was_serving_it() {
    let old = |items: &[(&str, &str)]| policy("a", &["172.18.0.100"], items);
    let young = |items: &[(&str, &str)]| younger(policy("b", &["172.18.0.101"], items));
    let (here, there) = ([("n1", "172.18.0.100")], [("n2", "172.18.0.101")]);
    let begun = || {
        let mut compiler = Compiler::new(settings());
        let ClusterView { namespaces, pods, nodes, .. } = view(vec![], vec![("web", pod("10.244.1.10"))]);
        compiler.apply(Change::Namespaces(Update::Replaced(namespaces)));
        compiler.apply(Change::Nodes(Update::Replaced(nodes)));
        compiler.apply(Change::Pods(Update::Replaced(pods)));
        compiler
    };
    let served_by = |compiler: &mut Compiler, policies: [EgressPolicy; 2]| {
        for policy in policies {
            compiler.apply(Change::Policies(Update::Changed(policy.key().clone(), Arc::new(policy))));
        }
        let state = compiler.compile().expect("the own node is known").0;
        let served = state.pods[&ip("10.244.1.10")];
        let standby: Vec<_> = compiler.standby().iter().map(|standby| standby.rule.name.clone()).collect();
        match served {
            PodState::Selected(id) => (id.0, standby.join(" ")),
            PodState::Known | PodState::ByDestination(_) => (0, standby.join(" ")),
        }
    };
    let mut compiler = begun();
    assert_eq!(
        served_by(&mut compiler, [old(&[]), young(&[])]),
        (1, "b".into()),
        "neither has one: dropped by the older"
    );
    let served = served_by(&mut compiler, [old(&[]), young(&there)]);
    assert_eq!(served, (2, "a".into()), "which has not served it");
    assert_eq!(served_by(&mut compiler, [old(&here), young(&there)]), (1, "b".into()), "the older can serve by now");
    for labels in ["x", "y"] {
        assert_eq!(served_by(&mut compiler, [old(&[]), young(&there)]), (1, "b".into()), "it keeps what it had");
        // A full compilation.
        let labels = Labels::from([("env".into(), "prod".into()), (labels.into(), String::new())]);
        compiler.apply(Change::Namespaces(Update::Changed("prod".into(), labels)));
    }
    assert_eq!(served_by(&mut compiler, [old(&[]), young(&[])]), (1, "b".into()));
    // A starting agent knows it from the kernel.
    let mut again = begun();
    for policy in [old(&[]), young(&there)] {
        again.apply(Change::Policies(Update::Changed(policy.key().clone(), Arc::new(policy))));
    }
    again.remember(&in_kernel(&[("10.244.1.10", PodState::Selected(EgressId(1)))]));
    assert_eq!(served_by(&mut again, [old(&[]), young(&there)]), (1, "b".into()));
}

/// Policies with destinations, of the IDs 1, 2 and so on: each has an address here or on the other node.
fn to_destinations(all: &[(&str, Option<&str>)]) -> Vec<EgressPolicy> {
    let of = |(index, (name, to)): (usize, &(&str, Option<&str>))| {
        let id = u32::try_from(index + 1).expect("few");
        let address = format!("172.18.0.{}", 100 + index);
        let one = policy(name, &[&address], &[(if index == 0 { "n1" } else { "n2" }, &address)]);
        let one = one.published_as(|published| published.ids = EgressIds::both(EgressId(id)));
        one.with_rules(|rule| {
            if let Some(to) = to {
                let prefixes = DestinationPrefixes::new([net(to)], []);
                rule.destinations = Destinations::Prefixes(Arc::new(prefixes));
            }
        })
    };
    all.iter().enumerate().map(of).collect()
}

#[test]
fn pods_with_the_same_policies_have_one_class_and_others_none() {
    let policies = to_destinations(&[("a", None), ("b", Some("198.51.100.0/24"))]);
    let web = |address: &str| pod(address);
    let mut compiler = Compiler::new(settings());
    let view = view(policies, vec![("one", web("10.244.1.10")), ("two", web("10.244.1.11"))]);
    for change in [
        Change::Policies(Update::Replaced(view.policies.clone())),
        Change::Namespaces(Update::Replaced(view.namespaces.clone())),
        Change::Nodes(Update::Replaced(view.nodes.clone())),
        Change::Pods(Update::Replaced(view.pods.clone())),
    ] {
        compiler.apply(change);
    }
    let state = compiler.compile().expect("the own node is known").0.clone();
    let class = PodClass(1);
    assert_eq!(state.pods.values().collect::<BTreeSet<_>>(), [&PodState::ByDestination(class)].into());
    let to = |text: &str| state.policies_of(ip("10.244.1.10")).of(ip(text));
    assert_eq!((to("192.0.2.1"), to("198.51.100.9")), (Some(EgressId(1)), Some(EgressId(2))));
    assert!(compiler.standby().is_empty(), "each has its destinations");
    // An event of a pod, and a whole compilation, leave its number.
    let elsewhere = Pod { terminating: true, ..pod("10.244.1.12") };
    compiler.apply(Change::Pods(Update::Changed(key("three"), elsewhere)));
    let again = compiler.compile().expect("known").0.clone();
    assert_eq!((&again.classes, again.pods[&ip("10.244.1.12")]), (&state.classes, PodState::ByDestination(class)));
    let labels = Labels::from([("env".into(), "prod".into()), ("x".into(), String::new())]);
    compiler.apply(Change::Namespaces(Update::Changed("prod".into(), labels)));
    assert_eq!(compiler.compile().expect("known").0.classes, state.classes);
    // A changed set of destinations is another class; the old number does not return.
    let wider = to_destinations(&[("a", None), ("b", Some("198.51.100.0/23"))]).remove(1);
    compiler.apply(Change::Policies(Update::Changed(wider.key().clone(), Arc::new(wider))));
    let changed = compiler.compile().expect("known").0;
    assert_eq!(changed.classes.keys().collect::<Vec<_>>(), [&PodClass(2)]);
    compiler.apply(Change::Policies(Update::Removed("b".into())));
    let without = compiler.compile().expect("known").0;
    assert!(without.classes.is_empty() && without.pods.values().all(|pod| *pod == PodState::Selected(EgressId(1))));
    // By the pods' own events too.
    compiler.apply(Change::Policies(Update::Replaced(view.policies)));
    assert_eq!(compiler.compile().expect("known").0.classes.len(), 1);
    for name in ["one", "two", "three"] {
        compiler.apply(Change::Pods(Update::Removed(key(name))));
    }
    let gone = compiler.compile().expect("known").0;
    assert!(gone.pods.values().all(|pod| *pod == PodState::Selected(NOT_NUMBERED)) && gone.classes.is_empty());
}

/// A starting agent keeps the numbers that the kernel has.
#[test]
fn classes_of_the_kernel_keep_their_numbers() {
    let policies = to_destinations(&[("a", Some("198.51.100.0/24"))]);
    let view = view(policies, vec![("one", pod("10.244.1.10"))]);
    let first = compiled(&view);
    let policies_of_class = first.classes[&PodClass(1)].clone();
    let mut compiler = Compiler::new(settings());
    for change in [
        Change::Policies(Update::Replaced(view.policies)),
        Change::Namespaces(Update::Replaced(view.namespaces)),
        Change::Nodes(Update::Replaced(view.nodes)),
        Change::Pods(Update::Replaced(view.pods)),
    ] {
        compiler.apply(change);
    }
    let pods = [(ip("10.244.1.10"), PodState::ByDestination(PodClass(7)))].into();
    let classes = [(PodClass(7), policies_of_class), (PodClass(9), Arc::default())].into();
    compiler.remember(&KernelState { pods, classes, ..KernelState::default() });
    let state = compiler.compile().expect("known").0;
    assert_eq!(state.pods[&ip("10.244.1.10")], PodState::ByDestination(PodClass(7)));
    assert_eq!(state.classes.keys().collect::<Vec<_>>(), [&PodClass(7)]);
}

#[test]
fn of_equal_destinations_the_older_applies_and_an_event_says_so() {
    let mut policies = to_destinations(&[("b", Some("198.51.100.0/24")), ("a", Some("198.51.100.0/24"))]);
    policies[1] = policies[1].from_origin(|origin| origin.created = 9);
    let view = view(policies, vec![("one", pod("10.244.1.10"))]);
    let state = compiled(&view);
    let to = |text: &str| state.policies_of(ip("10.244.1.10")).of(ip(text));
    assert_eq!((to("198.51.100.9"), to("192.0.2.1")), (Some(EgressId(1)), None));
    let own = &view.nodes["n1"];
    let mut selection = Selection::new(&view, own, &[]);
    let standby = selection.standby(&view, view.pods.keys());
    let pairs: Vec<_> = standby.iter().map(|one| (one.rule.to_string(), one.served_by.to_string())).collect();
    assert_eq!(pairs, [("EgressIP a".to_owned(), "EgressIP b".to_owned())]);
}

/// Several objects that share an address are rules of one policy: they compete with others, not with each other.
#[test]
fn rules_of_one_policy_share_its_addresses() {
    let shared = policy("a", &["172.18.0.100"], &[("n1", "172.18.0.100")]);
    let rules = |policy: &EgressPolicy| {
        let rule = |name: &str, created, app: Option<&str>| {
            let mut rule = policy.rules.as_ref().expect("rules")[0].clone();
            (rule.source.name, rule.source.created) = (name.into(), created);
            rule.selects[0].pods = app.map_or_else(Selector::default, |app| equals("app", app));
            rule
        };
        vec![rule("first", 1, Some("web")), rule("second", 2, None)]
    };
    let shared = EgressPolicy { rules: Some(rules(&shared)), ..shared };
    let between = policy("c", &["172.18.0.101"], &[("n2", "172.18.0.101")]);
    let between = between.from_origin(|origin| (origin.key, origin.created) = ("c".into(), 1));
    let between = between.published_as(|published| published.ids = EgressIds::both(EgressId(2)));
    let web = Pod { labels: Labels::from([("app".into(), "web".into())]), ..pod("10.244.1.10") };
    let view = view(vec![shared, between], vec![("web", web), ("db", pod("10.244.1.11"))]);
    let state = compiled(&view);
    assert_eq!(state.pods[&ip("10.244.1.10")], PodState::Selected(EgressId(2)), "c comes before both by its name");
    assert_eq!(state.pods[&ip("10.244.1.11")], PodState::Selected(EgressId(2)));
    let mut selection = Selection::new(&view, &view.nodes["n1"], &[]);
    let standby = selection.standby(&view, [&key("web")]);
    assert!(standby.iter().all(|one| one.served_by.name == "c"), "{standby:?}");
}

/// A pod may be deleted before its processes end. Its address stays blocked until another pod has it, or until many
/// others have departed since.
#[test]
fn late_packets_of_a_departed_selected_pod_are_dropped() {
    let mut compiler = Compiler::new(settings());
    let web = |last: u8| (format!("web{last}"), pod(&format!("10.244.1.{last}")));
    let pods: Vec<(String, Pod)> = (10..90).map(web).collect();
    let all = pods.iter().map(|(name, pod)| (name.as_str(), pod.clone())).collect();
    let ClusterView { policies, namespaces, pods, nodes, .. } =
        view(vec![policy("a", &["172.18.0.100"], &[("n1", "172.18.0.100")])], all);
    compiler.apply(Change::Policies(Update::Replaced(policies)));
    compiler.apply(Change::Namespaces(Update::Replaced(namespaces)));
    compiler.apply(Change::Nodes(Update::Replaced(nodes)));
    compiler.apply(Change::Pods(Update::Replaced(pods)));
    let at = |compiler: &mut Compiler, last: u8| {
        let state = compiler.compile().expect("the own node is known").0;
        state.pods.get(&ip(&format!("10.244.1.{last}"))).copied()
    };
    let (served, parked) = (Some(PodState::Selected(EgressId(1))), Some(PodState::Selected(NOT_NUMBERED)));
    assert_eq!(at(&mut compiler, 10), served);
    compiler.apply(Change::Pods(Update::Removed(key("web10"))));
    assert_eq!(at(&mut compiler, 10), parked);
    // Also after a full compilation.
    compiler.apply(Change::Namespaces(Update::Changed("dev".into(), Labels::new())));
    assert_eq!(at(&mut compiler, 10), parked);
    compiler.apply(Change::Pods(Update::Changed(key("next"), Pod { uid: "next".into(), ..pod("10.244.1.10") })));
    assert_eq!(at(&mut compiler, 10), served);
    compiler.apply(Change::Pods(Update::Removed(key("web11"))));
    assert_eq!(at(&mut compiler, 11), parked);
    for last in 12..76 {
        compiler.apply(Change::Pods(Update::Removed(key(&format!("web{last}")))));
    }
    assert_eq!((at(&mut compiler, 11), at(&mut compiler, 12)), (None, parked), "sixty-four are kept");
    // A pod that has ended, while its policy exists and after that.
    let over = Pod { completed: true, ..pod("10.244.1.78") };
    compiler.apply(Change::Pods(Update::Changed(key("web78"), over.clone())));
    assert_eq!(at(&mut compiler, 78), parked);
    compiler.apply(Change::Pods(Update::Changed(key("web78"), Pod { terminating: true, ..over })));
    assert_eq!(at(&mut compiler, 78), parked);
    compiler.apply(Change::Pods(Update::Removed(key("web78"))));
    assert_eq!(at(&mut compiler, 78), parked);
    // A pod that came by an event.
    compiler.apply(Change::Pods(Update::Changed(key("late"), pod("10.244.1.99"))));
    assert_eq!(at(&mut compiler, 99), served);
    compiler.apply(Change::Pods(Update::Removed(key("late"))));
    assert_eq!(at(&mut compiler, 99), parked);
    // No policy selects it: other pods may pass from there.
    compiler.apply(Change::Policies(Update::Removed("a".into())));
    assert_eq!(at(&mut compiler, 80), Some(PodState::Known));
    compiler.apply(Change::Pods(Update::Removed(key("web80"))));
    assert_eq!(at(&mut compiler, 80), None);
}

fn in_kernel(pods: &[(&str, PodState)]) -> KernelState {
    let pods = pods.iter().map(|(address, state)| (ip(address), *state)).collect();
    KernelState { pods, ..KernelState::default() }
}

/// Nor does a restart of the agent open it: the kernel has the addresses of pods that were deleted before and meanwhile.
#[test]
fn a_starting_agent_learns_departed_pods_from_the_kernel() {
    let view = view(vec![policy("a", &["172.18.0.100"], &[("n1", "172.18.0.100")])], vec![("web", pod("10.244.1.10"))]);
    let mut compiler = Compiler::new(settings());
    compiler.apply(Change::Policies(Update::Replaced(view.policies)));
    compiler.apply(Change::Namespaces(Update::Replaced(view.namespaces)));
    compiler.apply(Change::Nodes(Update::Replaced(view.nodes)));
    compiler.apply(Change::Pods(Update::Replaced(view.pods)));
    let (served, parked) = (PodState::Selected(EgressId(1)), PodState::Selected(NOT_NUMBERED));
    let kernel =
        [("10.244.1.10", served), ("10.244.1.11", served), ("10.244.1.12", parked), ("10.244.1.13", PodState::Known)];
    compiler.remember(&in_kernel(&kernel));
    let state = |compiler: &mut Compiler| compiler.compile().expect("the own node is known").0.pods.clone();
    let expected = [("10.244.1.10", served), ("10.244.1.11", parked), ("10.244.1.12", parked)];
    assert_eq!(state(&mut compiler), expected.into_iter().map(|(address, state)| (ip(address), state)).collect());
    compiler.apply(Change::Pods(Update::Changed(key("next"), Pod { uid: "next".into(), ..pod("10.244.1.11") })));
    assert_eq!(state(&mut compiler)[&ip("10.244.1.11")], served, "until another pod has the address");
}

#[test]
fn a_foreign_status_makes_no_two_nodes_disagree() {
    // Two addresses of one policy on a node, an address of an older policy, and a node's own address.
    let listed = ["172.18.0.100", "172.18.0.101", "172.18.0.2"];
    let older = policy("a", &listed, &[("n1", "172.18.0.101"), ("n1", "172.18.0.100"), ("n2", "172.18.0.2")]);
    let younger = younger(policy("b", &["172.18.0.100", "172.18.0.105"], &[("n2", "172.18.0.100")]));
    let state = compiled(&view(vec![younger, older], vec![]));
    assert_eq!(v4_policy(&state).slots, [Slot { address: ip("172.18.0.100"), place: Place::Here }]);
    let of_younger = &state.policy[&(EgressId(2), Family::V4)];
    assert_eq!((&of_younger.slots, &of_younger.pending), (&vec![], &vec![ip("172.18.0.105")]), "it waits for its own");
}

#[test]
fn limited_room_for_egress_ips_goes_to_the_oldest_objects() {
    let of = |name: &str, created, addresses: &[&str]| {
        let items: Vec<_> = addresses.iter().map(|address| ("n1", *address)).collect();
        policy(name, addresses, &items).from_origin(|origin| origin.created = created)
    };
    let policies = vec![
        of("youngest", 3, &["172.18.0.101", "172.18.0.104", "172.18.0.105"]),
        of("older", 2, &["172.18.0.102", "172.18.0.103"]),
        of("oldest", 1, &["172.18.0.101"]),
    ];
    let (view, nodes) = (view(policies, vec![]), BTreeMap::new());
    let (admitted, beyond) = egress_ips(&view, &nodes, 2);
    assert_eq!(admitted, ["172.18.0.101", "172.18.0.102"].map(|address| (ip(address), PrefixKind::EgressIp)).into());
    assert_eq!(beyond, BTreeMap::from([("older".into(), 1), ("youngest".into(), 2)]));
    assert_eq!(egress_ips(&view, &nodes, 5).1, BTreeMap::new());
}

/// An EgressService and an EgressIP object select one pod. The address is the Service's too: clients are answered with it.
#[test]
fn an_egress_service_precedes_an_egress_ip_and_shares_its_address() {
    let ids = |policy: EgressPolicy, v4, v6| {
        policy.published_as(|published| published.ids = EgressIds::new(Some(EgressId(v4)), Some(EgressId(v6))))
    };
    let both = [("n1", "172.18.0.200"), ("n1", "fd00:172:18::200")];
    let service = ids(policy("s", &["172.18.0.200", "fd00:172:18::200"], &both), 5, 6).of_service(9);
    let other = policy("a", &["172.18.0.100"], &[("n1", "172.18.0.100")]);
    let state = compiled(&view(vec![other, service], vec![("web", pod("10.244.1.10"))]));
    assert_eq!(state.pods[&ip("10.244.1.10")], PodState::Selected(EgressId(5)));
    let both = [EgressId(5), EgressId(6)].map(|id| (id, SharedWith::Service));
    assert_eq!(state.shared, BTreeMap::from(both), "one address of each family on one node");
    assert_eq!(state.owned[&EgressId(6)], ip("fd00:172:18::200"));
    let kind = |address: &str| state.cluster.get(&net(address)).map(|prefix| prefix.kind);
    assert_eq!(kind("172.18.0.200/32"), Some(PrefixKind::Service));
    assert_eq!(kind("172.18.0.100/32"), Some(PrefixKind::EgressIp));
}

/// `n1` has 10.10.10.1 on an interface, `n2` 10.10.10.2.
#[test]
fn an_address_of_the_host_is_served_by_the_node_that_has_it() {
    let of_host = |address: &str, node: &str| EgressPolicy {
        address_use: AddressUse::OfHost,
        ..policy("a", &[address], &[(node, address)])
    };
    let compiled = |address: &str, node: &str| compiled(&view(vec![of_host(address, node)], vec![]));
    let here = compiled("10.10.10.1", "n1");
    assert_eq!(here.owned, BTreeMap::from([(EgressId(1), ip("10.10.10.1"))]));
    assert_eq!(here.shared, BTreeMap::from([(EgressId(1), SharedWith::Host)]));
    assert_eq!(v4_policy(&here).slots, [Slot { address: ip("10.10.10.1"), place: Place::Here }]);
    let is_own = NodeAddress { own: true, node: TunnelEndpoint(ip("172.18.0.1")) };
    assert_eq!(here.nodes.get(&ip("10.10.10.1")), Some(&is_own), "pods reach the node by it");
    assert!(!here.cluster.contains_key(&net("10.10.10.1/32")), "the host may send with it");

    let there = compiled("10.10.10.2", "n2");
    assert_eq!(v4_policy(&there).slots[0].place, Place::Remote(TunnelEndpoint(ip("172.18.0.2"))));
    assert!(there.owned.is_empty());
    // The assignment is older than the loss of the address.
    let lost = compiled("10.10.10.77", "n1");
    assert!(lost.owned.is_empty() && v4_policy(&lost).slots.is_empty());
    assert_eq!((&v4_policy(&lost).pending, v4_policy(&lost).when_empty), (&vec![ip("10.10.10.77")], WhenEmpty::Drop));
    let plain = compiled_with(&view(vec![policy("a", &["10.10.10.1"], &[("n1", "10.10.10.1")])], vec![]), &settings());
    assert!(plain.owned.is_empty(), "as before of a policy that does not say so");
}

/// With one table by name and number, addresses of both families, and pods of both modes.
#[test]
fn networks_have_the_addresses_and_pods_that_follow_them() {
    let with = |name: &str, table: &str, created: i64, addresses: &[&str], app: Option<&str>| {
        let selects = |app: &str| Selects { pods: equals("app", app), ..Selects::default() };
        let network = PolicyNetwork {
            table: table.into(),
            addresses: addresses.iter().map(|address| ip(address)).collect(),
            pods: app.map(selects),
        };
        let policy = EgressPolicy { network: Some(network), ..policy(name, &[], &[]) };
        policy.of_service(created)
    };
    let web = |address: &str| Pod { labels: Labels::from([("app".into(), "web".into())]), ..pod(address) };
    let networks_of = |policies: Vec<EgressPolicy>, pods: Vec<(&str, Pod)>| {
        let mut compiler = Compiler::new(settings());
        let view = view(policies, pods);
        let namespaces = view.namespaces;
        for change in [
            Change::Policies(Update::Replaced(view.policies)),
            Change::Namespaces(Update::Replaced(namespaces)),
            Change::Nodes(Update::Replaced(view.nodes)),
            Change::Pods(Update::Replaced(view.pods)),
        ] {
            compiler.apply(change);
        }
        compiler.compile().expect("the own node is known");
        compiler.networks()
    };
    let pods = || vec![("web", web("10.244.1.10")), ("other", pod("10.244.1.11")), ("away", web("10.244.2.10"))];
    assert_eq!(networks_of(vec![policy("a", &[], &[])], pods()), RoutedNetworks::default());

    let by_host = with("s", "100", 1, &["192.0.2.1", "2001:db8::1"], None);
    let found = networks_of(vec![by_host.clone()], pods());
    let used = |addresses: &[&str], pods: &[&str]| NetworkUse {
        addresses: addresses.iter().map(|address| ip(address)).collect(),
        pods: pods.iter().map(|address| ip(address)).collect(),
    };
    assert_eq!(found.tables, RoutingTables::from([("100".into(), used(&["192.0.2.1", "2001:db8::1"], &[]))]));
    assert!(found.cluster.iter().any(|net| net.contains(&ip("10.244.2.10"))), "answers to pods follow no table");

    let by_nodes = with("t", "blue", 2, &["192.0.2.1", "192.0.2.2"], Some("web"));
    let younger = with("u", "red", 3, &["192.0.2.2"], Some("web"));
    let found = networks_of(vec![younger, by_nodes, by_host], pods());
    let expected = [
        ("100", used(&["192.0.2.1", "2001:db8::1"], &[])),
        ("blue", used(&["192.0.2.2"], &["10.244.1.10"])),
        ("red", used(&[], &[])),
    ];
    assert_eq!(found.tables, expected.map(|(table, used)| (table.to_owned(), used)).into());
    // An older policy without a network keeps its address from younger ones.
    let plain = policy("v", &["192.0.2.2"], &[]);
    let plain = plain.of_service(0);
    let shared = networks_of(vec![with("t", "blue", 2, &["192.0.2.1", "192.0.2.2"], None), plain], pods());
    assert_eq!(shared.tables, RoutingTables::from([("blue".into(), used(&["192.0.2.1"], &[]))]));
    for (address, is_in) in
        [("10.244.1.11", true), ("10.244.2.10", true), ("172.18.0.1", true), ("172.18.0.2", true), ("192.0.2.1", false)]
    {
        assert_eq!(found.cluster.iter().any(|net| net.contains(&ip(address))), is_in, "{address}");
    }
}

/// The oldest are followed, and the others are dropped: nothing of them leaves by another network.
#[test]
fn a_node_follows_a_limited_number_of_networks() {
    let with = |number: usize, table: usize, addresses: usize| {
        let address = |index| format!("192.0.{}.{index}", 2 + number).parse().expect("an address");
        let network =
            PolicyNetwork { table: table.to_string(), addresses: (0..addresses).map(address).collect(), pods: None };
        let policy = EgressPolicy { network: Some(network), ..policy(&format!("s{number:03}"), &[], &[]) };
        policy.of_service(i64::try_from(number).expect("small"))
    };
    let networks_of = |policies: Vec<EgressPolicy>| {
        let mut compiler = Compiler::new(settings());
        let view = view(policies, vec![]);
        compiler.apply(Change::Policies(Update::Replaced(view.policies)));
        compiler.apply(Change::Nodes(Update::Replaced(view.nodes)));
        compiler.compile().expect("the own node is known");
        compiler.networks()
    };
    let tables = networks_of((0..MOST_TABLES + 2).map(|number| with(number, 1000 + number, 1)).collect());
    assert_eq!((tables.tables.len(), tables.left_out.len(), tables.dropped.addresses.len()), (MOST_TABLES, 2, 2));
    assert!(!tables.tables.contains_key(&(1000 + MOST_TABLES).to_string()), "the youngest");
    let addresses = networks_of(vec![with(0, 100, 200), with(1, 100, 100), with(2, 100, 56)]);
    assert_eq!(addresses.tables["100"].addresses.len(), MOST_ADDRESSES, "others still have room");
    assert_eq!((addresses.left_out.len(), addresses.dropped.addresses.len()), (1, 100));
}

#[test]
fn an_address_that_the_object_does_not_list_is_not_served_whatever_the_status_says() {
    let odd = policy("a", &["172.18.0.100"], &[("n1", "172.18.0.101"), ("n2", "172.18.0.102")]);
    let state = compiled(&view(vec![odd], vec![]));
    assert_eq!((v4_policy(&state).slots.len(), state.owned.len()), (0, 0));
    assert_eq!(v4_policy(&state).when_empty, WhenEmpty::Drop);
}

#[test]
fn the_node_address_serves_only_if_the_leader_published_it_for_these_addresses() {
    let judged = |addresses: &[&str]| Some(addresses.iter().map(|a| ip(a)).collect());
    let listed = ["172.18.0.100", "fd00::1"];
    let judged_for = |policy: &EgressPolicy, addresses: &[&str]| {
        policy.published_as(|published| published.no_eligible_node = judged(addresses))
    };
    let published = judged_for(&policy("a", &listed, &[]), &listed);
    let of = |policy: &EgressPolicy| v4_policy(&compiled(&view(vec![policy.clone()], vec![]))).when_empty;
    assert_eq!(of(&published), WhenEmpty::NodeAddress);
    assert_eq!(of(&policy("a", &listed, &[])), WhenEmpty::Drop, "never evaluated");
    let edited = judged_for(&published, &["172.18.0.99"]);
    assert_eq!(of(&edited), WhenEmpty::Drop, "judged before an edit");
    assert_eq!(of(&EgressPolicy { drop_unassigned: true, ..published.clone() }), WhenEmpty::Drop);
    let strict = NodeSettings { on_unassigned: OnUnassigned::Drop, ..settings() };
    assert_eq!(v4_policy(&compiled_with(&view(vec![published], vec![]), &strict)).when_empty, WhenEmpty::Drop);
    assert_eq!(of(&policy("a", &["172.18.0.1000"], &[])), WhenEmpty::Drop, "a typing error is no exemption");
    assert_eq!(of(&policy("a", &["fd00::1"], &[])), WhenEmpty::NotListed);
}

fn unreadable(part: PolicyPart, policy: EgressPolicy) -> EgressPolicy {
    let unreadable = vec![Unreadable { part, why: "nonsense".into(), is_known: false }];
    match part {
        PolicyPart::Addresses => EgressPolicy { listed: Vec::new(), unreadable, ..policy },
        PolicyPart::Selectors => EgressPolicy { rules: None, unreadable, ..policy },
        PolicyPart::Items => EgressPolicy { unreadable, ..policy.published_as(|published| published.items.clear()) },
    }
}

#[test]
fn unreadable_parts_keep_their_value_alone_or_in_a_list() {
    let readable = || policy("a", &["172.18.0.100"], &[("n1", "172.18.0.100")]);
    let before = compiled(&view(vec![readable()], vec![("web", pod("10.244.1.10"))]));
    for part in [PolicyPart::Addresses, PolicyPart::Selectors, PolicyPart::Items] {
        for in_a_list in [false, true] {
            let mut view = view(vec![readable()], vec![("web", pod("10.244.1.10"))]);
            // Twice: the kept value is kept again.
            for _ in 0..2 {
                let (name, value) = ("a".into(), Arc::new(unreadable(part, readable())));
                view.apply(Change::Policies(match in_a_list {
                    true => Update::Replaced([(name, value)].into()),
                    false => Update::Changed(name, value),
                }));
            }
            assert_eq!(compiled(&view), before, "{part:?} {in_a_list}");
        }
    }
    let mut view = view(vec![readable()], vec![("web", pod("10.244.1.10"))]);
    let other = unreadable(PolicyPart::Selectors, readable()).from_origin(|origin| origin.uid = "other".into());
    view.apply(Change::Policies(Update::Changed("a".into(), Arc::new(other))));
    assert_eq!(compiled(&view).pods[&ip("10.244.1.10")], PodState::Known, "another object of the same name");
}

#[test]
fn without_an_earlier_reading_only_the_kernels_pods_are_selected_and_nothing_gets_a_node_address() {
    let published = |policy: EgressPolicy| {
        policy.published_as(|published| published.no_eligible_node = Some([ip("172.18.0.100")].into()))
    };
    let lost = unreadable(PolicyPart::Selectors, policy("a", &["172.18.0.100"], &[("n1", "172.18.0.100")]));
    let mut view = view(vec![lost], vec![("old", pod("10.244.1.10")), ("plain", pod("10.244.1.11"))]);
    assert_eq!(compiled(&view).pods[&ip("10.244.1.10")], PodState::Known);
    let kernel = [("10.244.1.10", PodState::Selected(EgressId(1))), ("10.244.1.11", PodState::Known)];
    let network = PodAddressSpace::new(&node(1), &[]);
    view.remember(&network, &in_kernel(&kernel));
    view.pods.insert(key("new"), pod("10.244.1.12"));
    let state = compiled(&view);
    assert_eq!(state.pods[&ip("10.244.1.10")], PodState::Selected(EgressId(1)));
    assert_eq!((state.pods[&ip("10.244.1.11")], state.pods[&ip("10.244.1.12")]), (PodState::Known, PodState::Known));
    view.pods.insert(key("old"), Pod { uid: "other".into(), ..pod("10.244.1.10") });
    assert_eq!(
        compiled(&view).pods[&ip("10.244.1.10")],
        PodState::Known,
        "the next pod with the address is another pod"
    );

    let lost = published(unreadable(PolicyPart::Addresses, policy("a", &[], &[])));
    let state = compiled(&self::view(vec![lost], vec![]));
    for family in [Family::V4, Family::V6] {
        assert_eq!(state.policy[&(EgressId(1), family)].when_empty, WhenEmpty::Drop);
    }
}

#[test]
fn only_endpoints_are_selected() {
    let pods = vec![
        ("web", pod("10.244.1.10")),
        ("host", Pod { host_network: true, ..pod("172.18.0.1") }),
        ("done", Pod { completed: true, ..pod("10.244.1.11") }),
        ("pending", Pod { reported: BTreeSet::new(), ..pod("10.244.1.12") }),
    ];
    let state = compiled(&view(vec![policy("a", &["172.18.0.100"], &[])], pods));
    assert_eq!(state.pods, BTreeMap::from([(ip("10.244.1.10"), PodState::Selected(EgressId(1)))]));
}

#[test]
fn an_address_that_a_new_pod_got_is_the_new_pods() {
    for old in [Pod { terminating: true, ..pod("10.244.1.10") }, Pod { completed: true, ..pod("10.244.1.10") }] {
        let mut dev = view(vec![policy("a", &["172.18.0.100"], &[])], vec![("old", old)]);
        dev.namespaces.insert("dev".into(), Labels::new());
        let new = Pod { created: 2, ..pod("10.244.1.10") };
        dev.pods.insert(PodKey { namespace: "dev".into(), name: "new".into() }, new);
        assert_eq!(compiled(&dev).pods[&ip("10.244.1.10")], PodState::Known);
    }
}

#[test]
fn a_pod_of_an_unknown_namespace_is_unknown_and_one_of_an_unnumbered_object_dropped() {
    let mut unnumbered = view(
        vec![
            policy("a", &["172.18.0.100"], &[("n1", "172.18.0.100")])
                .published_as(|published| published.ids = EgressIds::NONE),
        ],
        vec![("web", pod("10.244.1.10"))],
    );
    let state = compiled(&unnumbered);
    assert_eq!(state.pods[&ip("10.244.1.10")], PodState::Selected(NOT_NUMBERED));
    assert!(state.policy.is_empty() && state.owned.is_empty());
    unnumbered.namespaces.clear();
    assert!(compiled(&unnumbered).pods.is_empty());
}

#[test]
fn unknown_pods_are_dropped_while_one_that_is_selected_starts_or_where_the_cni_announces_them() {
    let on = |view: &ClusterView, unknown_pods| {
        compiled_with(view, &NodeSettings { unknown_pods, ..settings() }).on_unknown_pod.expect("it is set")
    };
    let auto = |view: &ClusterView| on(view, UnknownPods::Auto);
    let starting = || Pod { starting: true, reported: BTreeSet::new(), ..pod("10.244.1.10") };
    let one = || policy("a", &["172.18.0.100"], &[]);
    let mut announced = view(vec![], vec![]);
    announced.nodes.insert("n1".into(), Arc::new(Node { announces_pods: true, ..node(1) }));
    assert_eq!(auto(&announced), OnUnknownPod::Drop);
    let none = view(vec![one()], vec![("web", pod("10.244.1.10"))]);
    assert_eq!((auto(&none), on(&none, UnknownPods::Drop)), (OnUnknownPod::PassWhileFollowed, OnUnknownPod::Drop));
    assert_eq!(auto(&view(vec![], vec![("web", starting())])), OnUnknownPod::Pass, "no object is there");
    for (pod, on) in [
        (starting(), OnUnknownPod::Drop),
        (Pod { starting: true, ..pod("10.244.1.10") }, OnUnknownPod::Drop),
        (Pod { host_network: true, ..starting() }, OnUnknownPod::PassWhileFollowed),
        (Pod { completed: true, ..starting() }, OnUnknownPod::PassWhileFollowed),
        (Pod { terminating: true, ..starting() }, OnUnknownPod::PassWhileFollowed),
    ] {
        assert_eq!(auto(&view(vec![one()], vec![("web", pod.clone())])), on, "{pod:?}");
    }
    let one_starts = view(vec![one()], vec![("web", starting())]);
    assert_eq!(on(&one_starts, UnknownPods::Pass), OnUnknownPod::Pass);
    let mut elsewhere = one_starts.clone();
    elsewhere.namespaces = BTreeMap::from([("prod".to_owned(), Labels::new())]);
    assert_eq!(auto(&elsewhere), OnUnknownPod::Pass, "no object selects it");
    let unread = unreadable(PolicyPart::Selectors, policy("b", &["172.18.0.100"], &[]));
    elsewhere.policies.insert("b".into(), Arc::new(unread));
    assert_eq!(auto(&elsewhere), OnUnknownPod::Drop, "its selectors are unreadable");
    let mut early = one_starts;
    early.namespaces = BTreeMap::new();
    assert_eq!(auto(&early), OnUnknownPod::Drop, "its namespace is not known yet");
}

#[test]
fn prefixes_and_addresses_cover_the_cluster() {
    // The second address is not assigned, the third is a node's own, and the policy does not list the last.
    let items = [("n1", "172.18.0.100"), ("n2", "172.18.0.2"), ("n2", "172.18.0.55")];
    let policy = policy("a", &["172.18.0.100", "172.18.0.101", "172.18.0.2"], &items);
    let state = compiled(&view(vec![policy], vec![]));
    let kind = |prefix: &str| state.cluster.get(&net(prefix)).map(|prefix| prefix.kind);
    assert_eq!(kind("10.244.0.0/16"), Some(PrefixKind::PodNetwork));
    assert_eq!(state.cluster[&net("10.244.2.0/24")].node, Some(TunnelEndpoint(ip("172.18.0.2"))));
    assert_eq!(kind("10.96.0.0/16"), Some(PrefixKind::Service));
    assert_eq!(kind("198.51.100.0/24"), Some(PrefixKind::Excluded));
    assert_eq!(kind("100.64.0.0/16"), Some(PrefixKind::Join));
    for prefix in ["fe80::/10", "::1/128", "0.0.0.0/8", "127.0.0.0/8", "255.255.255.255/32"] {
        assert_eq!(kind(prefix), Some(PrefixKind::LinkLocal));
    }
    assert_eq!(kind("ff00::/8"), Some(PrefixKind::Multicast));
    assert_eq!(kind("172.18.0.100/32"), Some(PrefixKind::EgressIp));
    assert_eq!(["172.18.0.101/32", "172.18.0.2/32", "172.18.0.55/32"].map(kind), [None; 3]);

    let own = |address: &str| state.nodes.get(&ip(address)).map(|node| node.own);
    assert_eq!((own("172.18.0.1"), own("10.10.10.1"), own("10.244.1.2")), (Some(true), Some(true), Some(true)));
    assert_eq!((own("172.18.0.2"), own("10.10.10.2")), (Some(false), Some(false)));
    assert_eq!((own("10.244.2.2"), own("10.244.1.1")), (None, None), "pod network, by its prefix");
}

#[test]
fn a_node_takes_no_endpoint_from_another_by_listing_it() {
    let mut view = view(vec![], vec![]);
    let listed = ["172.18.0.9/16", "172.18.0.1/16", "172.18.0.2/16", "10.10.10.2/24"];
    let first = Node {
        name: "a".into(),
        host_cidrs: listed.map(net).to_vec(),
        internal: vec![ip("172.18.0.2")],
        external: vec![ip("172.18.0.2")],
        ..node(9)
    };
    view.nodes.insert("a".into(), Arc::new(first));
    let state = compiled(&view);
    let of = |address: &str| state.nodes[&ip(address)].node.0;
    assert_eq!(of("172.18.0.2"), ip("172.18.0.2"), "else all that it sends by the overlay is forged");
    assert_eq!((of("172.18.0.1"), of("172.18.0.9")), (ip("172.18.0.1"), ip("172.18.0.9")));
    assert_eq!(of("10.10.10.2"), ip("172.18.0.9"), "of others the first by name");
}

#[test]
fn of_many_objects_that_select_a_pod_only_a_few_are_standby() {
    let policies = (0..2_000).map(|number| policy(&format!("o{number:04}"), &[], &[])).collect();
    let pods: Vec<(String, Pod)> = (1..=100).map(|i| (format!("p{i}"), pod(&format!("10.244.1.{i}")))).collect();
    let view = view(policies, pods.iter().map(|(name, pod)| (name.as_str(), pod.clone())).collect());
    let mut selection = desired(&view, &settings()).expect("the own node is known").selection;
    let begun = std::time::Instant::now();
    let standby = selection.standby(&view, view.pods.keys());
    println!("{} in {:?}", standby.len(), begun.elapsed());
    assert_eq!(standby.len(), 100 * MOST_STANDBY);
    assert!(standby.iter().all(|one| one.served_by.name == "o0000" && one.rule.name <= format!("o{MOST_STANDBY:04}")));
}

#[test]
fn a_node_waits_until_its_own_address_is_published() {
    let mut view = view(vec![], vec![]);
    let unpublished =
        |i| Arc::new(Node { primary: Vec::new(), internal: vec![ip(&format!("172.18.0.{i}"))], ..node(i) });
    view.nodes.insert("n2".into(), unpublished(2));
    assert!(!compiled(&view).nodes[&ip("172.18.0.2")].own, "another's address is known all the same");
    view.nodes.insert("n1".into(), unpublished(1));
    assert!(desired(&view, &settings()).is_none());
}

/// Any grouping of events gives the compiled state of the final view.
#[test]
fn incremental_compilation_equals_a_full_one() {
    let mut seed = 0x9E37_79B9_7F4A_7C15_u64;
    let mut below = |n: u64| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        u8::try_from(seed % n).expect("a small number")
    };
    let (mut compiler, mut standby_seen, mut refused) = (Compiler::new(settings()), 0, 0);
    compiler.apply(Change::Nodes(Update::Changed("n1".into(), Arc::new(node(1)))));
    for round in 0..2_000 {
        let name = format!("p{}", below(4));
        let change = match below(14) {
            0 => Change::Policies(Update::Removed(format!("o{}", below(3)).as_str().into())),
            1 | 2 => {
                let name = format!("o{}", below(3));
                let id = Some(EgressId(below(3).into())).filter(|id| id.0 > 0);
                let ids = id.map_or(EgressIds::NONE, EgressIds::both);
                let policy = policy(&name, &["172.18.0.100"], &[]).published_as(|published| published.ids = ids);
                let policy = policy.from_origin(|origin| origin.created = below(3).into());
                Change::Policies(Update::Changed(policy.key().clone(), Arc::new(policy)))
            }
            3 => {
                let env = if below(2) > 0 { "prod" } else { "dev" };
                Change::Namespaces(Update::Changed("prod".into(), Labels::from([("env".into(), env.into())])))
            }
            4 => Change::Namespaces(Update::Removed("prod".into())),
            5 => Change::Nodes(Update::Changed("n2".into(), Arc::new(node(2 + below(2))))),
            6 => Change::Pods(Update::Removed(key(&name))),
            7 | 8 => {
                let front = ServiceKey { namespace: "prod".into(), name: format!("s{}", below(3)) };
                let pool = ["192.0.2.1", "192.0.2.2", "172.18.0.100", "172.18.0.3", "10.244.1.9"];
                let addresses = pool.iter().filter(|_| below(2) > 0).map(|address| ip(address)).collect();
                let ports = (0..below(3)).map(|number| (6, TargetPort::Number(number.into()))).collect();
                let exposes = Exposes { selector: Labels::new(), ports };
                Change::Services(Update::Changed(front, Service { addresses, exposes, ..Service::default() }))
            }
            9 => {
                // Its subnets, its own addresses and whether the CNI announces pods: each affects addresses of pods.
                let mut own = Node { announces_pods: below(2) > 0, ..node(1) };
                own.pod_subnets = vec![net(if below(4) > 0 { "10.244.1.0/24" } else { "10.244.1.0/31" })];
                own.host_cidrs.extend((below(3) == 0).then(|| net("10.244.1.1/24")));
                Change::Nodes(Update::Changed("n1".into(), Arc::new(own)))
            }
            _ => {
                let address = ip(&format!("10.244.1.{}", below(3)));
                let claimed = |claims: bool| claims.then_some(address).into_iter().collect();
                let pod = Pod {
                    created: below(3).into(),
                    starting: below(3) == 0,
                    completed: below(5) == 0,
                    terminating: below(4) == 0,
                    reported: claimed(below(3) > 0),
                    announced: claimed(below(2) > 0),
                    surplus: below(2).into(),
                    ..pod("10.244.1.1")
                };
                Change::Pods(Update::Changed(key(&name), pod))
            }
        };
        compiler.apply(change);
        if below(3) > 0 {
            let view = compiler.view().clone();
            let (state, _) = compiler.compile().expect("the own node is known");
            let Desired { state: expected, mut selection, refused: all, .. } =
                desired(&view, &settings()).expect("likewise");
            assert_eq!(*state, expected, "round {round}");
            refused += all.len();
            let all = all.into_values().flatten().chain(selection.network().surplus(&view));
            assert_eq!(compiler.refused(), all.collect(), "round {round}");
            let whole = selection.standby(&view, view.pods.keys());
            standby_seen += whole.len();
            assert_eq!(*compiler.standby(), whole, "round {round}");
        }
    }
    assert!(standby_seen > 100, "pods of several objects have been played");
    assert!(refused > 100, "and addresses that no pod gets: {refused}");
}

/// The CNI's report takes precedence over the kubelet's, whichever comes first, until the pod is gone.
#[test]
fn an_address_from_the_cni_counts_before_the_kubelet_reports_it() {
    let mut compiler = Compiler::new(settings());
    let ClusterView { policies, namespaces, nodes, .. } =
        view(vec![policy("a", &["172.18.0.100"], &[("n1", "172.18.0.100")])], Vec::new());
    compiler.apply(Change::Policies(Update::Replaced(policies)));
    compiler.apply(Change::Namespaces(Update::Replaced(namespaces)));
    compiler.apply(Change::Nodes(Update::Replaced(nodes)));
    let bare = |uid: &str| {
        let nothing = BTreeSet::new();
        Pod { uid: uid.into(), reported: nothing.clone(), announced: nothing, starting: true, ..pod("10.244.1.10") }
    };
    let of = |last: u8| BTreeSet::from([ip(&format!("10.244.1.{last}"))]);
    let given = |name: &str, last: u8| Attach { pod: key(name), uid: name.into(), addresses: of(last) };
    let put = |name: &str, pod: Pod| Change::Pods(Update::Changed(key(name), pod));
    let owner = |compiler: &mut Compiler, last: u8| {
        let state = compiler.compile().expect("the own node is known").0;
        state.owners.get(&ip(&format!("10.244.1.{last}"))).copied()
    };
    let is = |uid: &str| Some(PodOwner::of(uid));
    // The plugin reports before the watch.
    compiler.attach(&given("one", 10));
    assert_eq!(owner(&mut compiler, 10), None);
    assert_eq!(compiler.desired().map(|state| state.on_unknown_pod), Some(Some(OnUnknownPod::PassWhileFollowed)));
    compiler.apply(put("one", bare("one")));
    assert_eq!(owner(&mut compiler, 10), is("one"));
    let on_unknown = |compiler: &Compiler| compiler.desired().and_then(|state| state.on_unknown_pod);
    assert_eq!(on_unknown(&compiler), Some(OnUnknownPod::PassWhileFollowed), "its address is known");
    // The plugin reports after the watch.
    compiler.apply(put("two", bare("two")));
    assert_eq!(owner(&mut compiler, 11), None);
    assert_eq!(on_unknown(&compiler), Some(OnUnknownPod::Drop));
    compiler.attach(&given("two", 11));
    assert_eq!(owner(&mut compiler, 11), is("two"));
    assert_eq!(on_unknown(&compiler), Some(OnUnknownPod::PassWhileFollowed));
    // A sandbox is created again: the kubelet still reports the former address, which another pod gets.
    compiler.apply(put("one", Pod { starting: false, reported: of(10), ..bare("one") }));
    compiler.attach(&given("one", 12));
    assert_eq!((owner(&mut compiler, 10), owner(&mut compiler, 12)), (None, is("one")));
    compiler.attach(&given("three", 12));
    compiler.apply(put("three", bare("three")));
    assert_eq!((owner(&mut compiler, 10), owner(&mut compiler, 12)), (is("one"), is("three")), "the latest report");
    // Whole lists change nothing of it, and a pod keeps what was reported of it.
    let listed = [("one", Pod { reported: of(10), ..bare("one") }), ("two", bare("two")), ("three", bare("three"))];
    let listed = listed.into_iter().map(|(name, pod)| (key(name), pod)).collect();
    compiler.apply(Change::Pods(Update::Replaced(listed)));
    assert_eq!((owner(&mut compiler, 11), owner(&mut compiler, 12)), (is("two"), is("three")));
    compiler.apply(Change::Pods(Update::Removed(key("two"))));
    compiler.apply(put("two", bare("two")));
    assert_eq!(owner(&mut compiler, 11), None);
}

/// Policies of all kinds at once, against the order that the documentation states: the longest prefix of the destination, then
/// a policy that has an address, then by kind, age and name.
#[test]
fn policies_of_all_kinds_follow_the_documented_order() {
    const TARGETS: [&str; 6] =
        ["0.0.0.0/0", "192.0.2.0/24", "192.0.2.0/28", "192.0.2.1/32", "203.0.0.0/8", "2001:db8::/32"];
    const TO: [&str; 4] = ["192.0.2.1", "192.0.2.2", "192.0.2.200", "203.0.113.1"];
    let mut classes = 0;
    for seed in 0..400 {
        let mut random = Random::new(seed);
        let policies = of_all_kinds(&mut random, &TARGETS);
        let mut view = view(policies, vec![]);
        view.namespaces.insert("test".to_owned(), Labels::from([("env".into(), "test".into())]));
        let node = Arc::make_mut(view.nodes.get_mut("n1").expect("a node"));
        node.labels = Labels::from([("zone".into(), "a".into())]).into();
        for (index, (namespace, app)) in [("prod", "a"), ("prod", "b"), ("test", "a"), ("test", "b")].iter().enumerate()
        {
            let labels = Labels::from([("app".into(), (*app).into())]);
            let of = PodKey { namespace: (*namespace).into(), name: (*app).into() };
            let uid = format!("pod-{seed}-{index}");
            view.pods.insert(of, Pod { labels, uid, ..pod(&format!("10.244.1.{}", 10 + index)) });
        }
        let state = compiled(&view);
        classes += state.classes.len();
        for (key, pod) in &view.pods {
            let address = *pod.reported.first().expect("it has one");
            for to in TO.map(ip) {
                let expected = documented(&view, key, to);
                assert_eq!(state.policies_of(address).of(to), expected, "seed {seed}, {key:?} to {to}");
            }
        }
    }
    assert!(classes > 400, "{classes} classes are too few to show anything");
}

/// The egress ID of each is its own, and so is the name of each rule.
fn of_all_kinds(random: &mut Random, targets: &[&str]) -> Vec<EgressPolicy> {
    use SourceKind::{CiliumEgressGatewayPolicy, Egress, EgressIp, EgressService};
    let count = random.below(7);
    let of = |index: usize| {
        let id = u32::try_from(index + 1).expect("few");
        let address = format!("172.18.0.{}", 100 + index);
        let there = [("n2", address.as_str())];
        let items = if random.below(4) > 0 { &there[..] } else { &[] };
        let kind = random.one_of(&[
            EgressService,
            EgressIp,
            Egress,
            Egress,
            CiliumEgressGatewayPolicy,
            CiliumEgressGatewayPolicy,
        ]);
        let is_of_cilium = kind == CiliumEgressGatewayPolicy;
        let name = format!("{}{index}", random.one_of(&["a", "b", "c"]));
        let mut one = policy(&name, &[&address], items).published_as(|it| it.ids = EgressIds::both(EgressId(id)));
        if kind != EgressIp {
            one = one.from_origin(|origin| origin.key.kind = PolicyKind::Assignment);
        }
        let rule = one.rules.iter().flatten().next().expect("it has one").clone();
        let count = if kind == Egress || is_of_cilium { 1 + random.below(3) } else { 1 };
        let rules = (0..count).map(|number| {
            let created = i64::try_from(random.below(3)).expect("few");
            let source = RuleSource { kind, created, name: format!("{name}-{number}"), ..rule.source.clone() };
            let selects = (0..=random.below(2)).map(|_| Selects {
                namespaces: random
                    .one_of(&[&Selector::default(), &equals("env", "prod"), &equals("env", "test")])
                    .clone(),
                pods: random.one_of(&[&Selector::default(), &equals("app", "a"), &equals("app", "b")]).clone(),
                nodes: match is_of_cilium {
                    true => random.one_of(&[&Selector::default(), &equals("zone", "a"), &equals("zone", "b")]).clone(),
                    false => Selector::default(),
                },
            });
            let selects = selects.collect();
            let destinations = match random.below(3) {
                0 => Destinations::All,
                _ => {
                    let mut some = |one_in| -> Vec<IpNet> {
                        targets.iter().filter(|_| random.below(one_in) == 0).map(|text| net(text)).collect()
                    };
                    let (included, excluded) = (some(2), some(4));
                    Destinations::Prefixes(Arc::new(DestinationPrefixes::new(included, excluded)))
                }
            };
            let others = (0..random.below(3)).map(|number| ip(&format!("172.18.0.{}", 200 + number)));
            let (address, others) = (ip(&address), others.collect::<BTreeSet<_>>());
            let share = PodShare { address, among: others.into_iter().chain([address]).collect() };
            PolicyRule { source, selects, destinations, share: is_of_cilium.then_some(share) }
        });
        let rules = Some(rules.collect());
        EgressPolicy { rules, ..one }
    };
    (0..count).map(of).collect()
}

/// What the documentation says, as plainly as possible.
fn documented(view: &ClusterView, key: &PodKey, to: IpAddr) -> Option<EgressId> {
    let (namespace, pod, node) = (&view.namespaces[&key.namespace], &view.pods[key], &view.nodes["n1"].labels);
    let mut applying = Vec::new();
    for policy in view.policies.values() {
        for rule in policy.rules.iter().flatten() {
            let selected = rule.selects.iter().any(|one| {
                one.nodes.matches(node) && one.namespaces.matches(namespace) && one.pods.matches(&pod.labels)
            });
            let selected = selected && rule.share.as_ref().is_none_or(|share| share.has(&pod.uid));
            let length = match &rule.destinations {
                Destinations::All => Some(0),
                Destinations::Prefixes(prefixes) => {
                    let around = prefixes.entries().filter(|(net, _)| net.contains(&to));
                    let longest = around.max_by_key(|(net, _)| net.prefix_len());
                    longest.filter(|(_, included)| **included).map(|(net, _)| net.prefix_len())
                }
            };
            if let Some(length) = length.filter(|_| selected) {
                let RuleSource { kind, created, name, .. } = &rule.source;
                let has_none = policy.published.items.is_empty();
                let id = policy.published.ids.of(Family::V4);
                applying.push((std::cmp::Reverse(length), has_none, *kind, *created, name, id));
            }
        }
    }
    applying.iter().min().and_then(|(.., id)| *id)
}
