//! Actions, and the state that is read after them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use aya::maps::lpm_trie::Key;
use aya::maps::{LpmTrie, Map, MapData};
use egress_common::abi::{
    Addr, Candidates, ClassPolicy, Datagram, Direction, Flow, Inbound, MAX_SLOTS, NatEntry, Origin, PodEntry,
    PolicyDestination, Timeouts, Tuple,
};
use egress_common::wire::{PROTO_TCP, PROTO_UDP};
use egress_core::model::state::{
    Action, ClassPolicies, EgressId, Family, KernelState, LostFlows, NodeAddress, OnUnknownPod, Place, PodClass,
    PodOwner, PodState, Policy, Prefix, PrefixKind, Slot, TunnelEndpoint, WhenEmpty,
};
use egress_core::plan::executor::{DataplaneError, Executor};
use egress_datapath::Dataplane;
use ipnet::IpNet;

use crate::node::{TestNode, on_node};

pub(crate) fn addr(text: &str) -> IpAddr {
    text.parse().expect("a literal")
}

fn net(text: &str) -> IpNet {
    text.parse().expect("a literal")
}

pub(crate) fn endpoint(text: &str) -> TunnelEndpoint {
    TunnelEndpoint(addr(text))
}

pub(crate) fn policy(slots: &[(&str, Place)], when_empty: WhenEmpty) -> Policy {
    let slots = slots.iter().map(|(text, place)| Slot { address: addr(text), place: *place });
    Policy::new(slots.collect(), Vec::new(), when_empty)
}

/// The data plane, and the expected state of its maps.
struct CheckedDataplane {
    dataplane: Dataplane,
    wanted: KernelState,
}

impl CheckedDataplane {
    async fn step(&mut self, action: Action, change: impl FnOnce(&mut KernelState)) {
        self.dataplane.apply(&action).await.unwrap_or_else(|error| panic!("{action:?}: {error}"));
        change(&mut self.wanted);
        assert_eq!(self.dataplane.observe().await.expect("observe"), self.wanted, "after {action:?}");
        assert_eq!(self.dataplane.held().await.expect("observe").owned, self.wanted.owned, "after {action:?}");
    }
}

#[test]
fn applied_actions_are_read_back() {
    on_node(|node| async move {
        let mut dataplane = node.start().await;
        assert_eq!(dataplane.observe().await.expect("observe"), KernelState::default());
        let id = EgressId(42);
        let here = policy(
            &[("172.18.0.100", Place::Here), ("172.18.0.101", Place::Remote(endpoint("172.18.0.3")))],
            WhenEmpty::Drop,
        );
        let pending = policy(&[], WhenEmpty::NodeAddress);
        let node_of = |own, text| NodeAddress { own, node: endpoint(text) };
        let subnet = Prefix { kind: PrefixKind::PodSubnet, node: Some(endpoint("172.18.0.3")) };
        let service = Prefix { kind: PrefixKind::Service, node: None };

        let mut ledger = CheckedDataplane { dataplane, wanted: KernelState::default() };
        ledger.step(Action::SetUnknownPods(OnUnknownPod::Pass), |w| w.on_unknown_pod = Some(OnUnknownPod::Pass)).await;
        ledger.step(Action::SetUnknownPods(OnUnknownPod::Drop), |w| w.on_unknown_pod = Some(OnUnknownPod::Drop)).await;
        for (own, text) in [(true, "172.18.0.2"), (false, "fd00:172:18::3")] {
            ledger
                .step(Action::PutNode(addr(text), node_of(own, text)), |w| {
                    w.nodes.insert(addr(text), node_of(own, text));
                })
                .await;
        }
        for (text, prefix) in [("10.244.2.0/24", subnet), ("fd00:10:244:2::/64", subnet), ("10.96.0.0/16", service)] {
            ledger
                .step(Action::PutPrefix(net(text), prefix), |w| {
                    w.cluster.insert(net(text), prefix);
                })
                .await;
        }
        ledger
            .step(Action::Own(id, addr("172.18.0.100")), |w| {
                w.owned.insert(id, addr("172.18.0.100"));
            })
            .await;
        for (family, value) in [(Family::V4, &here), (Family::V6, &pending)] {
            ledger
                .step(Action::PutPolicy(id, family, value.clone()), |w| {
                    w.policy.insert((id, family), value.clone());
                })
                .await;
        }
        for state in [PodState::Known, PodState::Selected(id), PodState::Selected(EgressId(43))] {
            for text in ["10.244.1.10", "fd00:10:244:1::10"] {
                ledger
                    .step(Action::PutPod(addr(text), state), |w| {
                        w.pods.insert(addr(text), state);
                    })
                    .await;
            }
        }
        ledger.step(Action::CutFlows(id, BTreeSet::from([addr("172.18.0.100")])), |_| {}).await;
        ledger.step(Action::CutPodFlows(addr("10.244.1.10"), LostFlows::of_policy(id)), |_| {}).await;

        // Removal twice: removing a missing entry succeeds.
        for _ in 0..2 {
            ledger
                .step(Action::RemovePod(addr("10.244.1.10")), |w| {
                    w.pods.remove(&addr("10.244.1.10"));
                })
                .await;
            ledger
                .step(Action::RemovePolicy(id, Family::V6), |w| {
                    w.policy.remove(&(id, Family::V6));
                })
                .await;
            ledger
                .step(Action::Disown(id, addr("172.18.0.100")), |w| {
                    w.owned.remove(&id);
                })
                .await;
            ledger
                .step(Action::RemovePrefix(net("10.96.0.0/16")), |w| {
                    w.cluster.remove(&net("10.96.0.0/16"));
                })
                .await;
            ledger
                .step(Action::RemoveNode(addr("172.18.0.2")), |w| {
                    w.nodes.remove(&addr("172.18.0.2"));
                })
                .await;
        }
        let CheckedDataplane { dataplane, wanted } = ledger;
        drop(dataplane);
        let mut next = node.start().await;
        assert_eq!(next.observe().await.expect("observe"), wanted, "by the next agent");
    });
}

/// Classes of both families: one with `entries` prefixes besides the default one.
fn class(v6: bool, entries: u16) -> Arc<ClassPolicies> {
    let prefix = |number: u16| {
        let [high, low] = number.to_be_bytes();
        let text = if v6 { format!("2001:db8:{number:x}::/48") } else { format!("10.{high}.{low}.0/24") };
        (net(&text), Some(EgressId(1 + u32::from(number % 3))))
    };
    let default = (net(if v6 { "::/0" } else { "0.0.0.0/0" }), None);
    Arc::new(ClassPolicies::new((0..entries).map(prefix).chain([default]).collect()))
}

#[test]
fn classes_of_pods_round_trip_and_end_with_nothing_left() {
    on_node(|node| async move {
        let mut checked = CheckedDataplane { dataplane: node.start().await, wanted: KernelState::default() };
        for (number, policies) in [(1, class(false, 3)), (2, class(true, 3)), (7, class(false, 0))] {
            let number = PodClass(number);
            checked
                .step(Action::PutClass(number, Arc::clone(&policies)), |wanted| {
                    wanted.classes.insert(number, policies);
                })
                .await;
        }
        for (pod, number) in [("10.244.1.10", 1), ("fd00:10:244:1::10", 2), ("10.244.1.10", 7)] {
            let state = PodState::ByDestination(PodClass(number));
            checked
                .step(Action::PutPod(addr(pod), state), |wanted| {
                    wanted.pods.insert(addr(pod), state);
                })
                .await;
        }
        // Twice: a class that is not there counts as removed.
        for _ in 0..2 {
            checked
                .step(Action::RemoveClass(PodClass(1)), |wanted| {
                    wanted.classes.remove(&PodClass(1));
                })
                .await;
        }
        let CheckedDataplane { dataplane, wanted } = checked;
        drop(dataplane);
        let mut next = node.start().await;
        assert_eq!(next.observe().await.expect("observe"), wanted, "by the next agent");
        for number in [2, 7] {
            next.apply(&Action::RemoveClass(PodClass(number))).await.expect("apply");
        }
        assert_eq!(classes(&node).iter().count(), 0);
    });
}

fn classes(node: &TestNode) -> LpmTrie<MapData, PolicyDestination, ClassPolicy> {
    let data = MapData::from_pin(node.pin("maps/classes")).expect("the pinned map");
    LpmTrie::try_from(Map::LpmTrie(data)).expect("a trie")
}

/// A class that does not fit leaves nothing, and others stay.
#[test]
fn a_class_is_written_whole_or_not_at_all() {
    on_node(|node| async move {
        let mut dataplane = node.start().await;
        let mut number = 0;
        let refused = loop {
            number += 1;
            if let Err(error) = dataplane.apply(&Action::PutClass(PodClass(number), class(false, 9_999))).await {
                break error;
            }
        };
        assert!(matches!(refused, DataplaneError::Full { map: "classes", limit: 131_072 }), "{refused:?}");
        assert_eq!(classes(&node).iter().count(), (number as usize - 1) * 10_000);
        dataplane.apply(&Action::PutClass(PodClass(number), class(false, 9))).await.expect("a small one fits");
        assert_eq!(dataplane.observe().await.expect("observe").classes.len(), number as usize);
    });
}

/// The sets and prefixes of the map `destinations`.
fn destinations(node: &TestNode) -> LpmTrie<MapData, PolicyDestination, Candidates> {
    let data = MapData::from_pin(node.pin("maps/destinations")).expect("the pinned map");
    LpmTrie::try_from(Map::LpmTrie(data)).expect("a trie")
}

/// An address here, one elsewhere, and one that no node serves; each number is another prefix of the last two.
fn mixed(numbers: std::ops::Range<u16>) -> Policy {
    let remote = Place::Remote(endpoint("172.18.0.3"));
    let [here, there, nowhere] = ["172.18.0.100", "10.10.10.100", "10.10.10.101"].map(addr);
    let slots = [("172.18.0.100", Place::Here), ("10.10.10.100", remote)];
    let further = |number: u16| {
        let [high, low] = number.to_be_bytes();
        (net(&format!("10.{high}.{low}.0/24")), [there, nowhere].into())
    };
    let default = (net("0.0.0.0/0"), [here].into());
    let destinations = numbers.map(further).chain([default]).collect();
    Policy { pending: vec![nowhere], destinations, ..policy(&slots, WhenEmpty::Drop) }
}

#[test]
fn mixed_policies_have_their_destinations() {
    on_node(|node| async move {
        let mut dataplane = node.start().await;
        let (key, other) = ((EgressId(1), Family::V4), (EgressId(2), Family::V4));
        let sets = |node: &TestNode| -> BTreeSet<u32> {
            destinations(node).iter().map(|entry| entry.expect("an entry").0.data().set).collect()
        };
        let put = |(id, family), policy: &Policy| Action::PutPolicy(id, family, policy.clone());
        for (policy, entries) in [(mixed(0..3), 4), (mixed(2..9), 8), (mixed(0..0), 1)] {
            dataplane.apply(&put(key, &policy)).await.expect("apply");
            assert_eq!(dataplane.observe().await.expect("observe").policy, [(key, policy)].into());
            assert_eq!((destinations(&node).iter().count(), sets(&node).len()), (entries, 1), "the former set is gone");
        }
        dataplane.apply(&put(other, &mixed(0..3))).await.expect("apply");
        assert_eq!(sets(&node).len(), 2);
        let plain = Policy { destinations: BTreeMap::new(), ..mixed(0..0) };
        dataplane.apply(&put(key, &plain)).await.expect("apply");
        assert_eq!(destinations(&node).iter().count(), 4);
        let wanted = BTreeMap::from([(key, plain), (other, mixed(0..3))]);
        drop(dataplane);
        // An agent that was killed before the entry named it.
        let orphan = Key::new(160, PolicyDestination { set: 77, to: addr("10.1.2.3").into() });
        destinations(&node).insert(&orphan, Candidates::new(&[0], &[]).expect("one"), 0).expect("a set");
        let mut dataplane = node.start().await;
        assert_eq!(dataplane.observe().await.expect("observe").policy, wanted);
        assert_eq!(destinations(&node).iter().count(), 4);
        let former = sets(&node);
        dataplane.apply(&Action::RemovePolicy(other.0, other.1)).await.expect("apply");
        assert_eq!(destinations(&node).iter().count(), 0);
        dataplane.apply(&put(other, &mixed(0..3))).await.expect("apply");
        assert!(sets(&node).is_disjoint(&former), "a program may still have the former entry");
    });
}

/// A policy without room keeps what it has, and others are not affected.
#[test]
fn mixed_policies_fill_their_map() {
    on_node(|node| async move {
        let mut dataplane = node.start().await;
        let all = mixed(0..255);
        let mut last = None;
        for id in 1..400 {
            if let Err(error) = dataplane.apply(&Action::PutPolicy(EgressId(id), Family::V4, all.clone())).await {
                last = Some((id, error));
                break;
            }
        }
        let full = |error: &DataplaneError| matches!(error, DataplaneError::Full { map: "destinations", limit: 65536 });
        assert!(matches!(&last, Some((257, error)) if full(error)), "{last:?}");
        assert_eq!(dataplane.observe().await.expect("observe").policy.len(), 256);
        let seen = dataplane.observe().await.expect("observe").policy;
        assert!(seen.values().all(|policy| *policy == all));
        // In place of its own former set.
        dataplane.apply(&Action::PutPolicy(EgressId(1), Family::V4, mixed(300..555))).await.expect("there is room");
        let larger = dataplane.apply(&Action::PutPolicy(EgressId(1), Family::V4, mixed(0..256))).await;
        assert!(matches!(&larger, Err(error) if full(error)), "{larger:?}");
        let seen = dataplane.observe().await.expect("observe").policy;
        assert!(seen.iter().all(|((id, _), policy)| *id == EgressId(1) || *policy == all));
        dataplane.apply(&Action::PutPolicy(EgressId(1), Family::V4, mixed(0..9))).await.expect("there is room");
    });
}

#[test]
fn many_entries_are_read_completely() {
    on_node(|node| async move {
        let mut dataplane = node.start().await;
        let mut wanted = std::collections::BTreeMap::new();
        for number in 0..3000_u32 {
            let pod = IpAddr::from((0x0af4_0000 + number).to_be_bytes());
            let state = PodState::Selected(EgressId(number + 1));
            dataplane.apply(&Action::PutPod(pod, state)).await.expect("apply");
            wanted.insert(pod, state);
        }
        assert_eq!(dataplane.observe().await.expect("observe").pods, wanted);
    });
}

#[test]
fn the_error_names_a_full_map() {
    on_node(|node| async move {
        let mut dataplane = node.start().await;
        let slot = Slot { address: addr("172.18.0.100"), place: Place::Here };
        let too_many = Policy::new(vec![slot; MAX_SLOTS + 1], Vec::new(), WhenEmpty::Drop);
        let refused = dataplane.apply(&Action::PutPolicy(EgressId(1), Family::V4, too_many)).await;
        assert!(matches!(refused, Err(DataplaneError::Full { limit: 64, .. })), "{refused:?}");
        let mut refused = None;
        for number in 0..100_000_u32 {
            let pod = IpAddr::from((0x0a00_0000 + number).to_be_bytes());
            if let Err(error) = dataplane.apply(&Action::PutPod(pod, PodState::Known)).await {
                refused = Some(error);
                break;
            }
        }
        assert!(matches!(refused, Some(DataplaneError::Full { map: "pods", .. })), "{refused:?}");
    });
}

#[test]
fn a_full_map_of_prefixes_refuses_only_the_entry() {
    on_node(|node| async move {
        let mut dataplane = node.start().await;
        let service = Prefix { kind: PrefixKind::Service, node: None };
        let put = |number: u32| {
            let address = IpAddr::from((0x0a00_0000 + number).to_be_bytes());
            Action::PutPrefix(ipnet::IpNet::from(address), service)
        };
        let mut taken = 0;
        let refused = loop {
            match dataplane.apply(&put(taken)).await {
                Ok(()) => taken += 1,
                Err(error) => break error,
            }
        };
        assert!(matches!(refused, DataplaneError::Full { map: "cluster", .. }) && refused.is_of_entry(), "{refused:?}");
        let Action::PutPrefix(first, _) = put(0) else { unreachable!("as made above") };
        dataplane.apply(&Action::RemovePrefix(first)).await.expect("an entry of a full map can be removed");
        dataplane.apply(&put(taken)).await.expect("another entry fits then");
    });
}

#[test]
fn a_selected_pod_keeps_the_time_of_its_selection() {
    on_node(|node| async move {
        let mut dataplane = node.start().await;
        let pod = addr("10.244.1.10");
        let since = || node.map::<Addr, PodEntry>("pods").get(&pod.into(), 0).expect("its entry").selected_since_ns;
        dataplane.apply(&Action::PutPod(pod, PodState::Selected(EgressId(1)))).await.expect("apply");
        let first = since();
        assert_ne!(first, 0);
        dataplane.apply(&Action::PutPod(pod, PodState::Selected(EgressId(1)))).await.expect("apply");
        assert_eq!(since(), first);
        // The clock is coarse.
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        dataplane.apply(&Action::PutPod(pod, PodState::Selected(EgressId(2)))).await.expect("apply");
        assert!(since() > first, "another object, another time");
    });
}

#[test]
fn a_deselected_pod_gets_resets_for_the_timeout_of_established_connections() {
    on_node(|node| async move {
        let mut dataplane = node.start().await;
        let (pod, before) = (addr("10.244.1.10"), now_ns());
        for state in [PodState::Selected(EgressId(1)), PodState::Known] {
            dataplane.apply(&Action::PutPod(pod, state)).await.expect("apply");
        }
        let until = node.map::<Addr, PodEntry>("pods").get(&pod.into(), 0).expect("its entry").cut_until_ns;
        let timeout = u64::from(Timeouts::DEFAULT.tcp_established) * 1_000_000_000;
        // Whole seconds.
        let after = now_ns() + 1_000_000_000;
        assert!((before + timeout..after + timeout).contains(&until), "{until}");
    });
}

/// The present time, so that the sweep keeps the entry.
pub(crate) fn now_ns() -> u64 {
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC_COARSE).expect("the time");
    u64::try_from(now.tv_sec()).expect("a time") * 1_000_000_000
}

/// A flow of a pod, and its mapping as if this node were the gateway too.
pub(crate) fn make_flow(node: &TestNode, pod: &str, id: u32, address: &str, port: u16) {
    make_flow_of(node, PROTO_UDP, pod, id, address, port);
}

pub(crate) fn make_flow_of(node: &TestNode, protocol: u8, pod: &str, id: u32, address: &str, port: u16) {
    let (pod, address, server) = (Addr::from(addr(pod)), Addr::from(addr(address)), Addr::v4([198, 51, 100, 10]));
    let out = Tuple::new(Direction::Egress, pod, server, port, 80, protocol);
    let flow = Flow::new(address, id, 0, 0, now_ns()).sealed(&out);
    node.map::<Tuple, Flow>("flows").insert(out, flow, 0).expect("a flow");
    make_mapping(node, Origin::Here, out, id, address);
}

/// The mapping of a packet that leaves with this address and its own port.
pub(crate) fn make_mapping(node: &TestNode, origin: Origin, out: Tuple, id: u32, address: Addr) {
    let reverse = Tuple::new(Direction::Ingress, out.daddr, address, out.dport(), out.sport(), out.protocol);
    let now_ns = now_ns();
    let mapping = |key, other| NatEntry::new(other, origin, Addr::UNSPECIFIED, id, now_ns).sealed(key);
    let mut nat = node.map::<Tuple, NatEntry>("nat");
    nat.insert(out, mapping(&out, reverse), 0).expect("a forward key");
    nat.insert(reverse, mapping(&reverse, out), 0).expect("a reverse key");
}

/// Ports of the remaining flows and mappings.
pub(crate) fn left(node: &TestNode) -> (Vec<u16>, Vec<u16>) {
    let sorted = |mut ports: Vec<u16>| {
        ports.sort_unstable();
        ports
    };
    let flows = node.map::<Tuple, Flow>("flows").keys().map(|key| key.expect("a key").sport()).collect();
    let port = |key: Tuple| match key.direction() {
        Direction::Egress => key.sport(),
        Direction::Ingress => key.dport(),
    };
    let mappings = node.map::<Tuple, NatEntry>("nat").keys().map(|key| port(key.expect("a key"))).collect();
    (sorted(flows), sorted(mappings))
}

#[test]
fn cuts_remove_only_the_named_flows() {
    on_node(|node| async move {
        let mut dataplane = node.start().await;
        make_flow(&node, "10.244.1.10", 1, "172.18.0.100", 1001);
        make_flow(&node, "10.244.1.10", 1, "172.18.0.101", 1002);
        make_flow(&node, "10.244.1.11", 1, "172.18.0.100", 1003);
        make_flow(&node, "10.244.1.11", 2, "172.18.0.102", 1004);
        make_flow(&node, "10.244.1.10", 2, "172.18.0.102", 1005);
        let addresses = BTreeSet::from([addr("172.18.0.101"), addr("172.18.0.102")]);
        dataplane.apply(&Action::CutFlows(EgressId(1), addresses)).await.expect("cut");
        assert_eq!(left(&node), (vec![1001, 1003, 1004, 1005], vec![1001, 1001, 1003, 1003, 1004, 1004, 1005, 1005]));
        dataplane
            .apply(&Action::CutPodFlows(addr("10.244.1.10"), LostFlows::of_policy(EgressId(1))))
            .await
            .expect("cut");
        assert_eq!(left(&node), (vec![1003, 1004, 1005], vec![1003, 1003, 1004, 1004, 1005, 1005]));
        dataplane
            .apply(&Action::CutPodFlows(addr("10.244.1.11"), LostFlows::of_policy(EgressId(2))))
            .await
            .expect("cut");
        assert_eq!(left(&node), (vec![1003, 1005], vec![1003, 1003, 1005, 1005]));
    });
}

#[test]
fn the_flow_of_a_cut_connection_stays_for_its_reset() {
    on_node(|node| async move {
        let mut dataplane = node.start().await;
        make_flow_of(&node, PROTO_TCP, "10.244.1.10", 1, "172.18.0.100", 1001);
        make_flow_of(&node, PROTO_TCP, "10.244.1.10", 1, "172.18.0.101", 1002);
        make_flow_of(&node, PROTO_TCP, "10.244.1.11", 2, "172.18.0.102", 1003);
        let lost = BTreeSet::from([addr("172.18.0.101")]);
        dataplane.apply(&Action::CutFlows(EgressId(1), lost)).await.expect("cut");
        assert_eq!(left(&node), (vec![1001, 1002, 1003], vec![1001, 1001, 1003, 1003]));
        dataplane
            .apply(&Action::CutPodFlows(addr("10.244.1.10"), LostFlows::of_policy(EgressId(1))))
            .await
            .expect("cut");
        assert_eq!(left(&node), (vec![1001, 1002, 1003], vec![1003, 1003]));
        // Nothing stays of a deleted pod, which needs no reset.
        dataplane.apply(&Action::CutPod(addr("10.244.1.10"))).await.expect("cut");
        assert_eq!(left(&node), (vec![1003], vec![1003, 1003]));
    });
}

#[test]
fn the_next_pod_with_an_address_inherits_nothing() {
    on_node(|node| async move {
        let mut dataplane = node.start().await;
        let (old, other) = (addr("10.244.1.10"), addr("10.244.1.11"));
        let mut inbound = node.map::<Tuple, Inbound>("inbound");
        let mut datagrams = node.map::<Tuple, Datagram>("datagrams");
        for (port, pod) in [(1001, "10.244.1.10"), (1002, "10.244.1.11")] {
            make_flow(&node, pod, 1, "172.18.0.100", port);
            let tuple = Tuple::new(Direction::Egress, addr(pod).into(), Addr::v4([198, 51, 100, 10]), port, 80, 17);
            inbound.insert(tuple, Inbound::new(now_ns()), 0).expect("a connection from outside");
            datagrams.insert(tuple, Datagram { last_seen_ns: now_ns() }, 0).expect("a datagram");
        }
        dataplane.apply(&Action::PutPod(old, PodState::Selected(EgressId(1)))).await.expect("apply");
        dataplane.apply(&Action::PutOwner(old, PodOwner::of("first"))).await.expect("apply");
        // A change of the selection keeps the owner.
        dataplane.apply(&Action::PutPod(old, PodState::Known)).await.expect("apply");
        let mut desired = dataplane.observe().await.expect("observe");
        assert_eq!(desired.owners.get(&old), Some(&PodOwner::of("first")));
        let actual = desired.clone();
        desired.owners.insert(old, PodOwner::of("second"));
        let plan = egress_core::plan::plan(&actual, &desired);
        assert_eq!(plan, [Action::CutPod(old), Action::PutOwner(old, PodOwner::of("second"))]);
        for action in &plan {
            dataplane.apply(action).await.expect("apply");
        }
        assert_eq!(left(&node), (vec![1002], vec![1002, 1002]));
        let whose = |key: Result<Tuple, _>| key.map(|key: Tuple| key.saddr).ok();
        assert_eq!(inbound.keys().map(whose).collect::<Vec<_>>(), [Some(other.into())]);
        assert_eq!(datagrams.keys().map(whose).collect::<Vec<_>>(), [Some(other.into())]);
        assert_eq!(dataplane.observe().await.expect("observe"), desired);
    });
}
