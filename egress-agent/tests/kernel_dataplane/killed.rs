//! An agent may be killed between any two actions of a plan: the next agent completes it.

use std::collections::BTreeMap;
use std::net::IpAddr;

use egress_common::abi::{Addr, Direction, Flow, NatEntry, NodeEntry, NodePlace, Origin, Tuple};
use egress_common::wire::{PROTO_TCP, PROTO_UDP};
use egress_core::model::state::{
    Action, EgressId, Family, KernelState, NodeAddress, Place, PodOwner, PodState, Policy, WhenEmpty,
};
use egress_core::plan::executor::Executor;
use egress_core::plan::plan;
use egress_datapath::Dataplane;

use crate::actions::{addr, endpoint, left, make_flow, make_flow_of, make_mapping, policy};
use crate::node::{TestNode, is_slow, on_node};

/// Policies by number, with their addresses, and pods by the last byte of their address.
fn state(policies: &[(u32, &[&str])], pods: &[(u8, PodState, &str)]) -> KernelState {
    let place = Place::Remote(endpoint("172.18.0.3"));
    let value = |addresses: &[&str]| {
        let slots: Vec<_> = addresses.iter().map(|address| (*address, place)).collect();
        policy(&slots, WhenEmpty::Drop)
    };
    let policies = policies.iter().map(|(id, addresses)| ((EgressId(*id), Family::V4), value(addresses)));
    KernelState {
        policy: policies.collect(),
        pods: pods.iter().map(|(last, state, _)| (pod(*last), *state)).collect(),
        owners: pods.iter().map(|(last, _, owner)| (pod(*last), PodOwner::of(owner))).collect(),
        ..KernelState::default()
    }
}

fn pod(last: u8) -> IpAddr {
    [10, 244, 1, last].into()
}

const fn by(id: u32) -> PodState {
    PodState::Selected(EgressId(id))
}

fn old() -> KernelState {
    state(
        &[
            (1, &["172.18.0.100", "172.18.0.101"]),
            (2, &["172.18.0.102"]),
            (3, &[]),
            (4, &["172.18.0.104"]),
            (5, &["172.18.0.105", "172.18.0.106"]),
        ],
        &[
            (10, by(1), "a"),
            (11, by(1), "b"),
            (12, by(2), "c"),
            (13, by(2), "d"),
            (14, by(3), "e"),
            (15, by(4), "f"),
            (16, by(5), "g"),
            (17, by(5), "h"),
        ],
    )
}

/// Addresses move between objects, an object is deleted, an address waits for a node; pods change their object, are
/// deselected, are deleted, and another pod gets an address.
fn new() -> KernelState {
    let policies: &[(u32, &[&str])] =
        &[(1, &["172.18.0.100"]), (2, &["172.18.0.102"]), (3, &["172.18.0.101"]), (5, &["172.18.0.105"])];
    let pods = [
        (10, by(1), "a"),
        (11, PodState::Known, "b"),
        (12, by(1), "c"),
        (14, by(3), "e"),
        (15, PodState::Known, "f"),
        (16, by(5), "another"),
        (17, by(5), "h"),
    ];
    let mut new = state(policies, &pods);
    let waits = |policy: &mut Policy| policy.pending.push(addr("172.18.0.106"));
    new.policy.entry((EgressId(5), Family::V4)).and_modify(waits);
    new
}

/// A flow for each case, by port: those from 1000 continue, those from 2000 are cut.
fn make_flows(node: &TestNode) {
    clear::<Flow>(node, "flows");
    clear::<NatEntry>(node, "nat");
    make_flow(node, "10.244.1.10", 1, "172.18.0.100", 1000);
    make_flow(node, "10.244.1.17", 5, "172.18.0.105", 1001);
    make_flow(node, "10.244.1.17", 5, "172.18.0.106", 1002);
    make_flow(node, "10.244.1.10", 1, "172.18.0.101", 2000);
    make_flow(node, "10.244.1.11", 1, "172.18.0.100", 2001);
    make_flow(node, "10.244.1.12", 2, "172.18.0.102", 2002);
    make_flow(node, "10.244.1.13", 2, "172.18.0.102", 2003);
    make_flow(node, "10.244.1.15", 4, "172.18.0.104", 2004);
    make_flow(node, "10.244.1.16", 5, "172.18.0.105", 2005);
    make_flow_of(node, PROTO_TCP, "10.244.1.11", 1, "172.18.0.100", 2006);
    // This node is the gateway of another node's pod, and a pod of this node talks to another node.
    let out = |pod: [u8; 4], port| {
        Tuple::new(Direction::Egress, Addr::v4(pod), Addr::v4([198, 51, 100, 10]), port, 80, PROTO_UDP)
    };
    let remote = |port, address: &str| {
        make_mapping(node, Origin::Remote, out([10, 244, 2, 10], port), 1, addr(address).into());
    };
    remote(1003, "172.18.0.100");
    remote(2007, "172.18.0.101");
    make_mapping(node, Origin::Stack, out([10, 244, 1, 11], 1004), 0, Addr::v4([172, 18, 0, 2]));
}

fn clear<V: aya::Pod>(node: &TestNode, name: &str) {
    let mut map = node.map::<Tuple, V>(name);
    let keys: Vec<_> = map.keys().map(|key| key.expect("a key")).collect();
    keys.iter().for_each(|key| map.remove(key).expect("remove an entry"));
}

/// The first reconcile of a new agent.
async fn first_reconcile(dataplane: &mut Dataplane, desired: &KernelState) {
    let actual = dataplane.observe().await.expect("observe");
    for action in [Action::CutOrphans].into_iter().chain(plan(&actual, desired)) {
        dataplane.apply(&action).await.unwrap_or_else(|error| panic!("{action:?}: {error}"));
    }
}

#[test]
fn a_kill_at_any_step_leaves_no_cut_undone() {
    on_node(|node| async move {
        let (old, new) = (old(), new());
        let actions = plan(&old, &new);
        let mut dataplane = node.start().await;
        // In a guest the verifier makes each start slow.
        let every = if is_slow() { 4 } else { 1 };
        for steps in (0..=actions.len()).step_by(every) {
            first_reconcile(&mut dataplane, &old).await;
            make_flows(&node);
            for action in &actions[..steps] {
                dataplane.apply(action).await.expect("apply");
            }
            drop(dataplane);
            dataplane = node.start().await;
            first_reconcile(&mut dataplane, &new).await;
            assert_eq!(dataplane.observe().await.expect("observe"), new, "killed after {:?}", &actions[..steps]);
            // The flow of a connection that needs a reset stays, without its mapping.
            let both = |port| [port; 2];
            let expected = (vec![1000, 1001, 1002, 2006], [1000, 1001, 1002, 1003, 1004].map(both).concat());
            assert_eq!(left(&node), expected, "killed after {:?}", &actions[..steps]);
        }
        if every > 1 {
            println!("reduced: killed at one of {every} steps in a guest, at each step otherwise");
        }
    });
}

#[test]
fn a_kill_between_a_claim_and_its_policy_cuts_no_flows_of_other_nodes() {
    on_node(|node| async move {
        let (id, address) = (EgressId(1), addr("172.18.0.100"));
        let (pod, server) = (Addr::v4([10, 244, 2, 10]), Addr::v4([198, 51, 100, 10]));
        let out = Tuple::new(Direction::Egress, pod, server, 1000, 80, PROTO_UDP);
        let mut dataplane = node.start().await;
        dataplane.apply(&Action::Own(id, address)).await.expect("own");
        make_mapping(&node, Origin::Remote, out, id.0, address.into());
        drop(dataplane);
        let mut dataplane = node.start().await;
        let mut desired = state(&[(1, &[])], &[]);
        desired.policy.insert((id, Family::V4), policy(&[("172.18.0.100", Place::Here)], WhenEmpty::Drop));
        desired.owned.insert(id, address);
        first_reconcile(&mut dataplane, &desired).await;
        assert_eq!(left(&node).1, [1000; 2], "the other node already had the policy");

        // The same on removal: the policy is removed, the claim is not.
        dataplane.apply(&Action::RemovePolicy(id, Family::V4)).await.expect("apply");
        drop(dataplane);
        let mut dataplane = node.start().await;
        dataplane.apply(&Action::CutOrphans).await.expect("cut");
        assert_eq!(left(&node).1, [1000; 2], "it is still served here");
        first_reconcile(&mut dataplane, &KernelState::default()).await;
        assert_eq!(left(&node), (vec![], vec![]), "nothing permits it now");
    });
}

#[test]
fn a_partly_written_node_is_completed_at_start() {
    on_node(|node| async move {
        drop(node.start().await);
        // The entry exists; the agent was killed before it wrote the programs' configuration.
        let own = Addr::v4([172, 18, 0, 2]);
        let entry = NodeEntry::new(NodePlace::Own, own);
        node.map::<Addr, NodeEntry>("nodes").insert(own, entry, 0).expect("half a node");
        assert_eq!(node.config().self_node, Addr::UNSPECIFIED);
        let mut next = node.start().await;
        assert_eq!(node.config().self_node, own);
        let known = NodeAddress { own: true, node: endpoint("172.18.0.2") };
        let nodes = next.observe().await.expect("observe").nodes;
        assert_eq!(nodes, BTreeMap::from([(addr("172.18.0.2"), known)]), "nothing is left to do");
    });
}

#[test]
fn a_node_with_two_addresses_after_a_kill_uses_the_new_one() {
    on_node(|node| async move {
        let (old, new) = (endpoint("172.18.0.2"), endpoint("172.18.0.9"));
        let own = |name| NodeAddress { own: true, node: name };
        let more: Vec<IpAddr> = (1..=30).map(|last| [192, 168, 7, last].into()).collect();
        let mut dataplane = node.start().await;
        let put = |address, name| Action::PutNode(address, own(name));
        let before = more.iter().map(|address| put(*address, old)).chain([put(old.0, old), put(new.0, new)]);
        for action in before {
            dataplane.apply(&action).await.expect("apply");
        }
        drop(dataplane);
        // Killed before the old addresses were removed; the order of the entries does not matter.
        let mut dataplane = node.start().await;
        assert_eq!(node.config().self_node, Addr::from(new.0));
        for address in more.iter().copied().chain([old.0]) {
            dataplane.apply(&Action::RemoveNode(address)).await.expect("apply");
        }
        assert_eq!(node.config().self_node, Addr::from(new.0));

        // A partly written node, as above: when the used address is removed, the other one is used.
        let entry = NodeEntry::new(NodePlace::Own, Addr::from(old.0));
        node.map::<Addr, NodeEntry>("nodes").insert(Addr::from(old.0), entry, 0).expect("half a node");
        dataplane.apply(&Action::RemoveNode(new.0)).await.expect("apply");
        assert_eq!(node.config().self_node, Addr::from(old.0));
    });
}
