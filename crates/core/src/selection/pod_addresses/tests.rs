//! Single claims first, then random attackers who may create pods and Services in their own namespace only.

use std::sync::Arc;

use egress_common::abi::OnUnknownPod;
use egress_common::random::Random;

use super::*;
use crate::model::exposed::{Exposes, TargetPort};
use crate::model::samples::{ip, net, policy, settings};
use crate::model::services::{Service, ServiceKey};
use crate::model::state::{EgressId, KernelState, PodState};
use crate::model::view::{Change, Labels, Update};
use crate::plan::compile::Compiler;
use crate::plan::desired::{Desired, desired};

/// Node `n1`, with or without OVN-Kubernetes, and another one.
fn nodes(announces_pods: bool) -> BTreeMap<String, Arc<Node>> {
    let node = |i: u8| Node {
        name: format!("n{i}"),
        primary: vec![net(&format!("172.18.0.{i}/16"))],
        host_cidrs: vec![net(&format!("10.10.10.{i}/24"))],
        pod_subnets: vec![net(&format!("10.244.{i}.0/24")), net(&format!("fd00:10:244:{i}::/64"))],
        announces_pods,
        ..Node::default()
    };
    [1, 2].map(|i| (format!("n{i}"), Arc::new(node(i)))).into()
}

fn key(namespace: &str, name: &str) -> PodKey {
    PodKey { namespace: namespace.into(), name: name.into() }
}

fn pod(uid: &str, reported: &[&str], announced: &[&str]) -> Pod {
    Pod {
        uid: uid.into(),
        created: 5,
        labels: Labels::new(),
        reported: reported.iter().map(|address| ip(address)).collect(),
        announced: announced.iter().map(|address| ip(address)).collect(),
        surplus: 0,
        terminating: false,
        host_network: false,
        attached: BTreeSet::new(),
        starting: false,
        completed: false,
        ports: Vec::new(),
    }
}

/// A policy selects namespace `prod`, and node `n1` serves its first address; nothing selects `dev`.
fn view(announces_pods: bool, pods: Vec<(PodKey, Pod)>) -> ClusterView {
    let listed = ["172.18.0.100", "172.18.0.101", "10.244.1.200"];
    let policy = policy("a", &listed, &[("n1", "172.18.0.100"), ("n2", "10.244.1.200")]);
    ClusterView {
        policies: [("a".into(), Arc::new(policy))].into(),
        namespaces: [("prod", "prod"), ("dev", "dev")]
            .map(|(name, env)| (name.to_owned(), Labels::from([("env".into(), env.into())])))
            .into(),
        pods: pods.into_iter().collect(),
        nodes: nodes(announces_pods),
        ..ClusterView::default()
    }
}

fn compiled(view: &ClusterView) -> (KernelState, BTreeSet<Refusal>) {
    let Desired { state, selection, refused, .. } = desired(view, &settings()).expect("the own node is known");
    let surplus = selection.network().surplus(view);
    (state, refused.into_values().flatten().chain(surplus).collect())
}

fn refused(view: &ClusterView) -> Vec<(String, Refused)> {
    compiled(view).1.into_iter().map(|one| (one.pod.name, one.why)).collect()
}

const SELECTED: PodState = PodState::Selected(EgressId(1));

#[test]
fn an_announcement_counts_where_ovn_kubernetes_manages_the_node_until_the_kubelet_reports() {
    let address = ip("10.244.1.10");
    for (is_managed, reported, expected) in [
        (true, &[][..], Some(address)),
        (false, &[][..], None),
        (true, &["10.244.1.11"][..], Some(ip("10.244.1.11"))),
        (false, &["10.244.1.11"][..], Some(ip("10.244.1.11"))),
    ] {
        let view = view(is_managed, vec![(key("prod", "web"), pod("web", reported, &["10.244.1.10"]))]);
        let (state, refused) = compiled(&view);
        assert_eq!(
            state.pods.keys().copied().collect::<Vec<_>>(),
            Vec::from_iter(expected),
            "{is_managed} {reported:?}"
        );
        assert!(refused.is_empty());
    }
}

#[test]
fn an_announcement_takes_no_address_from_a_pod() {
    let address = ip("10.244.1.10");
    let victim = (key("prod", "web"), pod("web", &["10.244.1.10"], &["10.244.1.10"]));
    let older = Pod { created: 1, ..pod("evil", &[], &["10.244.1.10"]) };
    for is_managed in [true, false] {
        let view = view(is_managed, vec![victim.clone(), (key("dev", "evil"), older.clone())]);
        assert_eq!(compiled(&view).0.pods, BTreeMap::from([(address, SELECTED)]));
        let taken = is_managed.then(|| ("evil".to_owned(), Refused::Taken(address)));
        assert_eq!(refused(&view), Vec::from_iter(taken));
    }
}

#[test]
fn two_that_announce_one_address_get_none_before_the_kubelet_reports_it() {
    let address = ip("10.244.1.10");
    let mut view = view(
        true,
        vec![
            (key("prod", "web"), pod("web", &[], &["10.244.1.10"])),
            (key("dev", "evil"), Pod { created: 1, ..pod("evil", &[], &["10.244.1.10"]) }),
        ],
    );
    let (state, _) = compiled(&view);
    assert!(state.pods.is_empty() && state.owners.is_empty());
    assert_eq!(state.on_unknown_pod, Some(OnUnknownPod::Drop), "what has no entry is dropped");
    let contested = Refused::Contested(address);
    assert_eq!(refused(&view), [("evil".to_owned(), contested.clone()), ("web".to_owned(), contested)]);
    view.pods.insert(key("prod", "web"), pod("web", &["10.244.1.10"], &["10.244.1.10"]));
    assert_eq!(compiled(&view).0.pods, BTreeMap::from([(address, SELECTED)]));
}

#[test]
fn of_two_reported_pods_one_that_stays_wins_then_the_older_then_the_first_by_name() {
    let address = ip("10.244.1.10");
    let named = |name: &'static str, created, terminating| {
        (key("prod", name), Pod { created, terminating, ..pod(name, &["10.244.1.10"], &[]) })
    };
    for (pods, expected, loser) in [
        (vec![named("a", 1, true), named("b", 2, false)], "b", None),
        (vec![named("a", 2, false), named("b", 1, false)], "b", Some("a")),
        (vec![named("a", 1, false), named("b", 1, false)], "a", Some("b")),
        (vec![named("a", 1, true), named("b", 2, true)], "a", None),
    ] {
        let view = view(false, pods);
        let network = PodAddressSpace::new(&view.nodes["n1"], &[]);
        let (holder, _) = network.holder(&view, address).expect("one has it");
        assert_eq!(holder.name, expected);
        let losers: Vec<_> = loser.into_iter().map(|name| (name.to_owned(), Refused::Taken(address))).collect();
        assert_eq!(refused(&view), losers, "one that is terminating has lost its address in the usual way");
    }
}

#[test]
fn no_pod_gets_an_address_of_a_node_a_service_an_egress_ip_or_outside_its_subnets() {
    type Why = fn(IpAddr) -> Refused;
    let bad: [(&str, Why); 13] = [
        ("172.18.0.1", Refused::OwnNode),
        ("10.10.10.1", Refused::OwnNode),
        ("172.18.0.2", Refused::Outside),
        ("10.244.2.10", Refused::Outside),
        ("203.0.113.10", Refused::Outside),
        ("fd00:10:244:2::10", Refused::Outside),
        ("10.244.1.0", Refused::Subnet),
        ("10.244.1.1", Refused::Subnet),
        ("10.244.1.255", Refused::Subnet),
        ("fd00:10:244:1::", Refused::Subnet),
        ("fd00:10:244:1::1", Refused::Subnet),
        ("10.96.0.10", Refused::Service),
        ("10.244.1.200", Refused::EgressIp),
    ];
    for (address, why) in bad {
        for (reported, announced) in [(&[address][..], &[][..]), (&[][..], &[address][..])] {
            let view = view(true, vec![(key("prod", "web"), pod("web", reported, announced))]);
            assert!(compiled(&view).0.pods.is_empty(), "{address}");
            assert_eq!(refused(&view), [("web".to_owned(), why(ip(address)))], "{address}");
        }
    }
    // The second address of the subnet is OVN-Kubernetes' management port; a bridge has the first, publishes it, and
    // gives the second to a pod.
    for (is_managed, published, address, count) in [
        (true, None, "10.244.1.2", 0),
        (false, None, "10.244.1.2", 1),
        (false, Some("10.244.1.1"), "10.244.1.2", 1),
        (false, Some("10.244.1.1"), "10.244.1.1", 0),
    ] {
        let mut view = view(is_managed, vec![(key("prod", "web"), pod("web", &[address], &[]))]);
        let health = published.map(|address| vec![ip(address)]);
        view.nodes.insert("n1".into(), Arc::new(Node { health, ..Node::clone(&view.nodes["n1"]) }));
        assert_eq!(compiled(&view).0.pods.len(), count, "{address}");
    }
    // Without a subnet of the family, no address is known to be outside.
    let mut bare = view(
        true,
        vec![
            (key("prod", "web"), pod("web", &["10.244.1.10"], &[])),
            (key("prod", "early"), pod("early", &[], &["10.244.1.11"])),
            (key("prod", "node"), pod("node", &["172.18.0.2"], &[])),
        ],
    );
    bare.nodes.insert("n1".into(), Arc::new(Node { pod_subnets: Vec::new(), ..Node::clone(&bare.nodes["n1"]) }));
    assert_eq!(compiled(&bare).0.pods, BTreeMap::from([(ip("10.244.1.10"), SELECTED)]));
    assert_eq!(
        refused(&bare),
        [
            ("early".to_owned(), Refused::Outside(ip("10.244.1.11"))),
            ("node".to_owned(), Refused::Node(ip("172.18.0.2"))),
        ]
    );
}

#[test]
fn the_judgement_follows_nodes_and_objects() {
    let address = ip("10.244.1.10");
    let mut compiler = Compiler::new(settings());
    let start = view(false, vec![(key("prod", "web"), pod("web", &["10.244.1.10"], &[]))]);
    let has = |compiler: &mut Compiler| compiler.compile().expect("compiled").0.pods.contains_key(&address);
    compiler.apply(Change::Nodes(Update::Replaced(start.nodes.clone())));
    compiler.apply(Change::Namespaces(Update::Replaced(start.namespaces.clone())));
    compiler.apply(Change::Policies(Update::Replaced(start.policies.clone())));
    compiler.apply(Change::Pods(Update::Replaced(start.pods.clone())));
    assert!(has(&mut compiler));
    let mut own = Node::clone(&start.nodes["n1"]);
    own.host_cidrs.push(net("10.244.1.10/24"));
    compiler.apply(Change::Nodes(Update::Changed("n1".into(), Arc::new(own))));
    assert!(!has(&mut compiler) && !compiler.refused().is_empty());
    compiler.apply(Change::Nodes(Update::Replaced(start.nodes.clone())));
    assert!(has(&mut compiler) && compiler.refused().is_empty());
    let taken = policy("b", &["10.244.1.10"], &[("n2", "10.244.1.10")]);
    compiler.apply(Change::Policies(Update::Changed("b".into(), Arc::new(taken))));
    assert!(!has(&mut compiler));
    compiler.apply(Change::Policies(Update::Removed("b".into())));
    assert!(has(&mut compiler));
}

/// Addresses of victims, of other pods, and unused ones.
const ADDRESSES: [&str; 16] = [
    "10.244.1.10",
    "10.244.1.11",
    "10.244.1.12",
    "fd00:10:244:1::10",
    "fd00:10:244:1::11",
    "10.244.1.2",
    "10.244.1.200",
    "10.244.2.10",
    "172.18.0.1",
    "172.18.0.2",
    "10.10.10.1",
    "172.18.0.100",
    "172.18.0.101",
    "10.96.0.10",
    "203.0.113.10",
    "fd00:10:244:2::10",
];

/// An author of pods and Services in namespace `dev`: everything that such a user may write, and no status.
fn attack(random: &mut Random, changes: &mut Vec<Change>) {
    for _ in 0..1 + random.below(6) {
        let name = format!("evil{}", random.below(4));
        changes.push(match random.below(8) {
            0 => Change::Pods(Update::Removed(key("dev", &name))),
            1..=4 => {
                let announced = (0..random.below(3)).map(|_| ip(random.one_of(&ADDRESSES))).collect();
                let labels = Labels::from([("env".into(), random.one_of(&["prod", "dev"]).into())]);
                let terminating = random.below(3) == 0;
                // The kubelet reports an address that the CNI has given, once.
                let own = ip(&format!("10.244.1.{}", 50 + random.below(4)));
                let reported = (random.below(2) == 0).then_some(own).into_iter().collect();
                let created = i64::try_from(random.below(10)).expect("small");
                let pod = Pod { announced, labels, terminating, reported, created, ..pod(&name, &[], &[]) };
                Change::Pods(Update::Changed(key("dev", &name), pod))
            }
            _ => {
                let addresses = (0..random.below(4)).map(|_| ip(random.one_of(&ADDRESSES))).collect();
                let ports = (0..random.below(3)).map(|_| (17, TargetPort::Number(53))).collect();
                let service =
                    Service { addresses, exposes: Exposes { selector: Labels::new(), ports }, ..Service::default() };
                Change::Services(Update::Changed(ServiceKey { namespace: "dev".into(), name }, service))
            }
        });
    }
}

#[test]
fn an_author_of_pods_and_services_affects_no_pod_of_another_namespace() {
    let (mut attacked, mut contested) = (0, 0);
    for seed in 1..=800_u64 {
        let mut random = Random::new(seed);
        let mut pods = Vec::new();
        for (name, addresses) in [
            ("a", &["10.244.1.10", "fd00:10:244:1::10"][..]),
            ("b", &["10.244.1.11", "fd00:10:244:1::11"][..]),
            ("c", &["10.244.1.12"][..]),
        ] {
            let is_reported = random.below(3) > 0;
            let reported = if is_reported { addresses } else { &[] };
            let created = i64::try_from(random.below(10)).expect("small");
            let namespace = random.one_of(&["prod", "idle"]);
            pods.push((key(namespace, name), Pod { created, ..pod(name, reported, addresses) }));
        }
        let mut alone = view(random.below(2) == 0, pods);
        alone.namespaces.insert("idle".into(), Labels::new());
        let (before, _) = compiled(&alone);

        let mut compiler = Compiler::new(settings());
        let mut changes = vec![
            Change::Nodes(Update::Replaced(alone.nodes.clone())),
            Change::Namespaces(Update::Replaced(alone.namespaces.clone())),
            Change::Policies(Update::Replaced(alone.policies.clone())),
        ];
        changes.extend(alone.pods.iter().map(|(key, pod)| Change::Pods(Update::Changed(key.clone(), pod.clone()))));
        attack(&mut random, &mut changes);
        for change in changes {
            compiler.apply(change);
            if random.below(3) == 0 {
                compiler.compile();
            }
        }
        let (after, _) = compiler.compile().expect("the own node is known");
        for pod in alone.pods.values() {
            for address in pod.listed() {
                let was = (before.pods.get(&address), before.owners.get(&address));
                let is = (after.pods.get(&address), after.owners.get(&address));
                // An announced address may be contested until the kubelet reports it: then it is dropped, and no pod
                // has it.
                let is_contested = pod.reported.is_empty() && is == (None, None);
                assert!(is == was || is_contested, "seed {seed}: {address} of {}: {was:?}, then {is:?}", pod.uid);
                contested += usize::from(is != was);
            }
        }
        let places = |state: &KernelState| {
            (state.policy.clone(), state.owned.clone(), state.nodes.clone(), state.on_unknown_pod)
        };
        assert_eq!(places(after), places(&before), "seed {seed}");
        for (prefix, value) in &before.cluster {
            assert_eq!(after.cluster.get(prefix), Some(value), "seed {seed}: {prefix}");
        }
        let own = &alone.nodes["n1"];
        for (address, state) in &after.pods {
            assert!(own.pod_subnets.iter().any(|subnet| subnet.contains(address)), "seed {seed}: {address}");
            assert!(!own.listed_addresses().contains(address) && !after.cluster.contains_key(&IpNet::from(*address)));
            attacked += usize::from(!before.pods.contains_key(address) && *state == PodState::Known);
        }
    }
    assert!(attacked > 100 && contested > 20, "attackers have had pods: {attacked}, {contested}");
}
