use std::sync::Arc;

use kube::core::Selector;

use super::*;
use crate::model::compile::Compiler;
use crate::model::samples::{ip, net, settings};
use crate::model::selection::NOT_NUMBERED;
use crate::model::state::{PodState, TunnelEndpoint};
use crate::model::view::{Change, Conditions, Item, Labels, Pod, PodKey, Selects, ServiceKey, Unreadable, Update};

fn node(i: u8) -> Node {
    Node {
        name: format!("n{i}"),
        primary: vec![net(&format!("172.18.0.{i}/16"))],
        host_cidrs: vec![net(&format!("172.18.0.{i}/16")), net(&format!("10.10.10.{i}/24"))],
        pod_subnets: vec![net(&format!("10.244.{i}.0/24"))],
        ..Node::default()
    }
}

fn object(name: &str, listed: &[&str], items: &[(&str, &str)]) -> EgressObject {
    EgressObject {
        name: name.into(),
        uid: name.into(),
        resource_version: "1".into(),
        generation: None,
        created: 1,
        listed: listed.iter().map(|text| (*text).to_owned()).collect(),
        selects: Some(Selects {
            namespaces: [("env".to_owned(), "prod".to_owned())].into_iter().collect(),
            pods: Selector::default(),
        }),
        id: Some(EgressId(1)),
        no_eligible_node: None,
        drop_unassigned: false,
        has_annotations: false,
        has_status: false,
        has_items: false,
        items: items.iter().map(|(n, a)| Item { node: (*n).into(), egress_ip: (*a).into() }).collect(),
        conditions: Conditions::default(),
        unreadable: Vec::new(),
    }
}

fn pod(address: &str) -> Pod {
    Pod {
        uid: address.into(),
        created: 1,
        labels: Labels::new(),
        addresses: BTreeSet::from([ip(address)]),
        host_network: false,
        completed: false,
    }
}

fn key(name: &str) -> PodKey {
    PodKey { namespace: "prod".into(), name: name.into() }
}

fn view(objects: Vec<EgressObject>, pods: Vec<(&str, Pod)>) -> ClusterView {
    ClusterView {
        objects: objects.into_iter().map(|object| (object.name.clone(), Arc::new(object))).collect(),
        namespaces: BTreeMap::from([("prod".to_owned(), Labels::from([("env".into(), "prod".into())]))]),
        pods: pods.into_iter().map(|(name, pod)| (key(name), pod)).collect(),
        nodes: [1, 2].map(|i| (format!("n{i}"), Arc::new(node(i)))).into(),
        ..ClusterView::default()
    }
}

fn compiled(view: &ClusterView) -> KernelState {
    compiled_with(view, &settings())
}

fn compiled_with(view: &ClusterView, settings: &Settings) -> KernelState {
    desired(view, settings, &mut Selection::new(view)).expect("the own node is known")
}

fn v4_policy(state: &KernelState) -> &Policy {
    &state.policy[&(EgressId(1), Family::V4)]
}

#[test]
fn a_thousand_addresses_of_an_object_and_a_hundred_of_a_node_fit() {
    let listed: Vec<String> = (0..1000).map(|i| format!("172.18.{}.{}", 4 + i / 250, 1 + i % 250)).collect();
    let listed: Vec<&str> = listed.iter().map(String::as_str).collect();
    let mut view = view(vec![object("a", &listed, &[("n1", listed[999]), ("n2", listed[0])])], vec![]);
    let own = (0..100).map(|i| net(&format!("172.18.9.{i}/16"))).chain([net(&format!("{}/16", listed[1]))]);
    let second = Node { host_cidrs: own.collect(), ..node(2) };
    view.nodes.insert("n2".to_owned(), Arc::new(second));
    let state = compiled(&view);
    let policy = v4_policy(&state);
    assert_eq!((policy.slots.len(), policy.pending.len()), (2, MAX_SLOTS - 2));
    assert_eq!(state.owned, BTreeMap::from([(EgressId(1), ip(listed[999]))]));
    let of_second = state.nodes.values().filter(|entry| entry.node == node(2).endpoint().expect("it has one"));
    assert_eq!(of_second.count(), 102, "its hundred, the one that is listed, and its endpoint");
    assert!(!policy.pending.contains(&ip(listed[1])), "a node's own address is nobody's egress IP");
}

#[test]
fn slots_are_here_or_at_the_nodes_endpoint_and_this_nodes_are_owned() {
    let listed = ["172.18.0.100", "172.18.0.101", "172.18.0.102"];
    let items = [("n1", listed[0]), ("n2", listed[1]), ("unknown", listed[2])];
    let state = compiled(&view(vec![object("a", &listed, &items)], vec![]));
    let remote = Place::Remote(TunnelEndpoint(ip("172.18.0.2")));
    let slots =
        [Slot { address: ip("172.18.0.100"), place: Place::Here }, Slot { address: ip("172.18.0.101"), place: remote }];
    assert_eq!(v4_policy(&state).slots, slots);
    assert_eq!(v4_policy(&state).when_empty, WhenEmpty::Drop);
    assert_eq!(state.policy[&(EgressId(1), Family::V6)].when_empty, WhenEmpty::NotListed);
    assert_eq!(state.owned, BTreeMap::from([(EgressId(1), ip("172.18.0.100"))]));
}

#[test]
fn a_strangers_status_makes_no_two_nodes_disagree() {
    // Two addresses of one object on a node; an address that an older object has.
    let older = object("a", &["172.18.0.100"], &[("n1", "172.18.0.101"), ("n1", "172.18.0.100")]);
    let younger =
        EgressObject { created: 2, id: Some(EgressId(2)), ..object("b", &["172.18.0.100"], &[("n2", "172.18.0.100")]) };
    let state = compiled(&view(vec![younger, older], vec![]));
    assert_eq!(v4_policy(&state).slots, [Slot { address: ip("172.18.0.100"), place: Place::Here }]);
    assert_eq!(state.policy[&(EgressId(2), Family::V4)].slots, []);
}

#[test]
fn an_address_that_the_object_does_not_list_is_not_served_whatever_the_status_says() {
    let odd = object("a", &["172.18.0.100"], &[("n1", "172.18.0.101"), ("n2", "172.18.0.102")]);
    let state = compiled(&view(vec![odd], vec![]));
    assert_eq!((v4_policy(&state).slots.len(), state.owned.len()), (0, 0));
    assert_eq!(v4_policy(&state).when_empty, WhenEmpty::Drop);
}

#[test]
fn the_node_address_serves_only_where_the_leader_says_so_of_these_addresses() {
    let judged = |addresses: &[&str]| Some(addresses.iter().map(|a| ip(a)).collect());
    let listed = ["172.18.0.100", "fd00::1"];
    let published = EgressObject { no_eligible_node: judged(&listed), ..object("a", &listed, &[]) };
    let of = |object: &EgressObject| v4_policy(&compiled(&view(vec![object.clone()], vec![]))).when_empty;
    assert_eq!(of(&published), WhenEmpty::NodeAddress);
    assert_eq!(of(&object("a", &listed, &[])), WhenEmpty::Drop, "never evaluated");
    let edited = EgressObject { no_eligible_node: judged(&["172.18.0.99"]), ..published.clone() };
    assert_eq!(of(&edited), WhenEmpty::Drop, "judged before an edit");
    assert_eq!(of(&EgressObject { drop_unassigned: true, ..published.clone() }), WhenEmpty::Drop);
    let strict = Settings { on_unassigned: OnUnassigned::Drop, ..settings() };
    assert_eq!(v4_policy(&compiled_with(&view(vec![published], vec![]), &strict)).when_empty, WhenEmpty::Drop);
    assert_eq!(of(&object("a", &["172.18.0.1000"], &[])), WhenEmpty::Drop, "a typing error is no exemption");
    assert_eq!(of(&object("a", &["fd00::1"], &[])), WhenEmpty::NotListed);
}

fn unreadable(part: Part, object: EgressObject) -> EgressObject {
    let unreadable = vec![Unreadable { part, why: "nonsense".into(), is_known: false }];
    match part {
        Part::Addresses => EgressObject { listed: Vec::new(), unreadable, ..object },
        Part::Selectors => EgressObject { selects: None, unreadable, ..object },
        Part::Items => EgressObject { items: Vec::new(), unreadable, ..object },
    }
}

#[test]
fn what_cannot_be_read_stays_as_it_was_alone_or_in_a_list() {
    let readable = || object("a", &["172.18.0.100"], &[("n1", "172.18.0.100")]);
    let before = compiled(&view(vec![readable()], vec![("web", pod("10.244.1.10"))]));
    for part in [Part::Addresses, Part::Selectors, Part::Items] {
        for in_a_list in [false, true] {
            let mut view = view(vec![readable()], vec![("web", pod("10.244.1.10"))]);
            // Twice: what is kept is kept again.
            for _ in 0..2 {
                let (name, value) = ("a".to_owned(), Arc::new(unreadable(part, readable())));
                view.apply(Change::Objects(match in_a_list {
                    true => Update::Replaced([(name, value)].into()),
                    false => Update::Changed(name, value),
                }));
            }
            assert_eq!(compiled(&view), before, "{part:?} {in_a_list}");
        }
    }
    let mut view = view(vec![readable()], vec![("web", pod("10.244.1.10"))]);
    let other = EgressObject { uid: "other".into(), ..unreadable(Part::Selectors, readable()) };
    view.apply(Change::Objects(Update::Changed("a".into(), Arc::new(other))));
    assert_eq!(compiled(&view).pods[&ip("10.244.1.10")], PodState::Known, "another object of the same name");
}

#[test]
fn without_an_earlier_reading_only_the_kernels_pods_are_selected_and_nothing_gets_a_node_address() {
    let published =
        |object: EgressObject| EgressObject { no_eligible_node: Some(BTreeSet::from([ip("172.18.0.100")])), ..object };
    let lost = unreadable(Part::Selectors, object("a", &["172.18.0.100"], &[("n1", "172.18.0.100")]));
    let mut view = view(vec![lost], vec![("old", pod("10.244.1.10")), ("plain", pod("10.244.1.11"))]);
    assert_eq!(compiled(&view).pods[&ip("10.244.1.10")], PodState::Known);
    let kernel = [("10.244.1.10", PodState::Selected(EgressId(1))), ("10.244.1.11", PodState::Known)];
    view.remember(&kernel.into_iter().map(|(address, state)| (ip(address), state)).collect());
    view.pods.insert(key("new"), pod("10.244.1.12"));
    let state = compiled(&view);
    assert_eq!(state.pods[&ip("10.244.1.10")], PodState::Selected(EgressId(1)));
    assert_eq!((state.pods[&ip("10.244.1.11")], state.pods[&ip("10.244.1.12")]), (PodState::Known, PodState::Known));
    view.pods.insert(key("old"), Pod { uid: "heir".into(), ..pod("10.244.1.10") });
    assert_eq!(compiled(&view).pods[&ip("10.244.1.10")], PodState::Known, "an heir of the address is another pod");

    let lost = published(unreadable(Part::Addresses, object("a", &[], &[])));
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
        ("pending", Pod { addresses: BTreeSet::new(), ..pod("10.244.1.12") }),
    ];
    let state = compiled(&view(vec![object("a", &["172.18.0.100"], &[])], pods));
    assert_eq!(state.pods, BTreeMap::from([(ip("10.244.1.10"), PodState::Selected(EgressId(1)))]));
}

#[test]
fn an_address_that_went_to_a_new_pod_is_the_new_pods() {
    let mut dev = view(vec![object("a", &["172.18.0.100"], &[])], vec![("old", pod("10.244.1.10"))]);
    dev.namespaces.insert("dev".into(), Labels::new());
    let new = Pod { created: 2, ..pod("10.244.1.10") };
    dev.pods.insert(PodKey { namespace: "dev".into(), name: "new".into() }, new);
    assert_eq!(compiled(&dev).pods[&ip("10.244.1.10")], PodState::Known);
}

#[test]
fn a_pod_of_an_unknown_namespace_is_unknown_and_one_of_an_unnumbered_object_dropped() {
    let mut unnumbered = view(
        vec![EgressObject { id: None, ..object("a", &["172.18.0.100"], &[("n1", "172.18.0.100")]) }],
        vec![("web", pod("10.244.1.10"))],
    );
    let state = compiled(&unnumbered);
    assert_eq!(state.pods[&ip("10.244.1.10")], PodState::Selected(NOT_NUMBERED));
    assert!(state.policy.is_empty() && state.owned.is_empty());
    unnumbered.namespaces.clear();
    assert!(compiled(&unnumbered).pods.is_empty());
}

#[test]
fn unknown_pods_are_dropped_where_one_could_be_selected_or_the_cni_announces_them() {
    let on = |view: &ClusterView, unknown_pods| {
        compiled_with(view, &Settings { unknown_pods, ..settings() }).on_unknown_pod.expect("it is set")
    };
    let mut empty = view(vec![], vec![]);
    assert_eq!(on(&empty, UnknownPods::Auto), OnUnknownPod::Pass);
    assert_eq!(on(&empty, UnknownPods::Drop), OnUnknownPod::Drop);
    empty.nodes.insert("n1".into(), Arc::new(Node { announces_pods: true, ..node(1) }));
    assert_eq!(on(&empty, UnknownPods::Auto), OnUnknownPod::Drop);
    let one = view(vec![object("a", &["172.18.0.100"], &[])], vec![]);
    assert_eq!(on(&one, UnknownPods::Auto), OnUnknownPod::Drop);
    assert_eq!(on(&one, UnknownPods::Pass), OnUnknownPod::Pass);
    let mut nobody = one.clone();
    nobody.namespaces = BTreeMap::from([("dev".to_owned(), Labels::new())]);
    assert_eq!(on(&nobody, UnknownPods::Auto), OnUnknownPod::Pass, "it selects no namespace");
    let unread = unreadable(Part::Selectors, object("a", &["172.18.0.100"], &[]));
    nobody.objects.insert("b".into(), Arc::new(unread));
    assert_eq!(on(&nobody, UnknownPods::Auto), OnUnknownPod::Drop, "nobody knows whom it selects");
}

#[test]
fn prefixes_and_addresses_say_what_is_the_clusters() {
    // The second address could be no node's, the third is a node's own.
    let object = object("a", &["172.18.0.100", "8.8.8.8", "172.18.0.2"], &[]);
    let state = compiled(&view(vec![object], vec![]));
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
    assert_eq!((kind("8.8.8.8/32"), kind("172.18.0.2/32")), (None, None));

    let own = |address: &str| state.nodes.get(&ip(address)).map(|node| node.own);
    assert_eq!((own("172.18.0.1"), own("10.10.10.1"), own("10.244.1.2")), (Some(true), Some(true), Some(true)));
    assert_eq!((own("172.18.0.2"), own("10.10.10.2")), (Some(false), Some(false)));
    assert_eq!((own("10.244.2.2"), own("10.244.1.1")), (None, None), "pod network, by its prefix");
}

#[test]
fn a_node_waits_until_it_has_said_which_address_others_know_it_by() {
    let mut view = view(vec![], vec![]);
    let unsaid = |i| Arc::new(Node { primary: Vec::new(), internal: vec![ip(&format!("172.18.0.{i}"))], ..node(i) });
    view.nodes.insert("n2".into(), unsaid(2));
    assert!(!compiled(&view).nodes[&ip("172.18.0.2")].own, "another's address is known all the same");
    view.nodes.insert("n1".into(), unsaid(1));
    assert!(desired(&view, &settings(), &mut Selection::new(&view)).is_none());
}

/// Whatever the events and however they are grouped, the compiled state is that of the view.
#[test]
fn compiling_by_and_by_equals_compiling_at_once() {
    let mut seed = 0x9E37_79B9_7F4A_7C15_u64;
    let mut below = |n: u64| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        u8::try_from(seed % n).expect("a small number")
    };
    let (mut compiler, mut told) = (Compiler::new(settings()), 0);
    compiler.apply(Change::Nodes(Update::Changed("n1".into(), Arc::new(node(1)))));
    for round in 0..2_000 {
        let name = format!("p{}", below(4));
        let change = match below(14) {
            0 => Change::Objects(Update::Removed(format!("o{}", below(3)))),
            1 | 2 => {
                let name = format!("o{}", below(3));
                let id = Some(EgressId(below(3).into())).filter(|id| id.0 > 0);
                let object = EgressObject { id, created: below(3).into(), ..object(&name, &["172.18.0.100"], &[]) };
                Change::Objects(Update::Changed(name, Arc::new(object)))
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
                let addresses = pool.iter().filter(|_| below(2) > 0).map(|address| ip(address));
                Change::Services(Update::Changed(front, addresses.collect()))
            }
            _ => {
                let pod = Pod {
                    created: below(3).into(),
                    completed: below(5) == 0,
                    ..pod(&format!("10.244.1.{}", below(3)))
                };
                Change::Pods(Update::Changed(key(&name), pod))
            }
        };
        compiler.apply(change);
        if below(3) > 0 {
            let view = compiler.view().clone();
            let (state, _) = compiler.compile().expect("the own node is known");
            assert_eq!(*state, compiled(&view), "round {round}");
            let whole = Selection::new(&view).standby(&view, view.pods.keys());
            told += whole.len();
            assert_eq!(*compiler.standby(), whole, "round {round}");
        }
    }
    assert!(told > 100, "pods of several objects have been played");
}
