//! The story, step by step: an egress IP's life from the label on a node to the object's end.

use std::net::Ipv6Addr;

use super::pods::{BOUVIER, SIMPSON, TWIN};
use super::steps::{as_node, before, inside, nothing_leaked, only, power_off, power_on};
use super::walkthrough::Walkthrough;
use crate::prelude::*;
use egress_lab::kube_api::{EGRESS_IP, TypedKind};

/// The addresses of the manifests in `deploy/examples/`.
const FIRST: IpAddr = IpAddr::V4(Ipv4Addr::new(172, 18, 0, 100));
const SECOND: IpAddr = IpAddr::V4(Ipv4Addr::new(172, 18, 0, 101));
const SIXTH: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfd00, 0x172, 0x18, 0, 0, 0, 0, 0x200));

/// What it applies.
pub(super) const OBJECTS: [(TypedKind, &str); 2] = [(EGRESS_IP, OBJECT), (EGRESS_IP, SIXTH_OBJECT)];

const OBJECT: &str = "egressip-simpson";
const SIXTH_OBJECT: &str = "egressip-bouvier";

pub(super) fn play(walkthrough: &mut Walkthrough) -> Result<()> {
    let nodes: Vec<NodeNumber> = walkthrough.cluster.lab.nodes().iter().map(|node| node.number).collect();
    let (first, second) = (nodes[0], nodes[1]);
    // With two nodes, the first one is also where the address goes in the end.
    let last = nodes.get(2).copied().unwrap_or(first);
    before(walkthrough)?;
    assign(walkthrough, first)?;
    selected(walkthrough)?;
    inside(walkthrough)?;
    ipv6(walkthrough)?;
    two_addresses(walkthrough, first, second)?;
    moved(walkthrough, first, second)?;
    powered_off(walkthrough, second, last)?;
    deleted(walkthrough, second)?;
    nothing_leaked(walkthrough)
}

/// How the world sees the pods while the first object has these addresses.
fn with_egress(pod: &LabPod, to: IpAddr, addresses: &[IpAddr]) -> Option<BTreeSet<IpAddr>> {
    if pod.namespace == SIMPSON && to.is_ipv4() { Some(addresses.iter().copied().collect()) } else { as_node(pod, to) }
}

pub(super) fn assign(walkthrough: &mut Walkthrough, node: NodeNumber) -> Result<()> {
    walkthrough.report.begin("A node is made assignable, and an EgressIP is applied");
    walkthrough.label(node, true)?;
    walkthrough.apply(&EGRESS_IP, "egressip-simpson.yaml")?;
    expect_on(walkthrough, OBJECT, FIRST, node)
}

/// How the world sees the pods then.
pub(super) fn with_first(pod: &LabPod, to: IpAddr) -> Option<BTreeSet<IpAddr>> {
    with_egress(pod, to, &[FIRST])
}

/// Takes both back.
pub(super) fn withdraw(walkthrough: &mut Walkthrough, labelled: NodeNumber) -> Result<()> {
    walkthrough.delete(&EGRESS_IP, OBJECT)?;
    walkthrough.label(labelled, false)
}

fn expect_on(walkthrough: &mut Walkthrough, object: &str, address: IpAddr, node: NodeNumber) -> Result<()> {
    let (node, address) = (node.name(), address.to_string());
    let expected = format!("{address} on {node}");
    walkthrough.expect_assigned(object, &expected, |pairs| pairs == [(node.clone(), address.clone())])
}

fn selected(walkthrough: &mut Walkthrough) -> Result<()> {
    walkthrough.report.begin("After: selected pods of every node have the egress IP, the others their node's address");
    walkthrough.expect_outside(with_first)
}

fn ipv6(walkthrough: &mut Walkthrough) -> Result<()> {
    walkthrough.report.begin("IPv6, and a pod selector");
    walkthrough.apply(&EGRESS_IP, "egressip-bouvier-ipv6.yaml")?;
    let address = SIXTH.to_string();
    let expected = format!("{address} on a node");
    walkthrough.expect_assigned(
        SIXTH_OBJECT,
        &expected,
        |pairs| matches!(pairs, [(_, assigned)] if *assigned == address),
    )?;
    walkthrough.expect_outside(|pod, to| {
        let twin = pod.namespace == BOUVIER && pod.labels.contains_key(TWIN);
        if twin && to.is_ipv6() { only(SIXTH) } else { with_egress(pod, to, &[FIRST]) }
    })?;
    walkthrough.delete(&EGRESS_IP, SIXTH_OBJECT)
}

fn two_addresses(walkthrough: &mut Walkthrough, first: NodeNumber, second: NodeNumber) -> Result<()> {
    walkthrough.report.begin("Two addresses: each on another node, connections spread over both");
    walkthrough.label(second, true)?;
    walkthrough.apply(&EGRESS_IP, "egressip-simpson-two.yaml")?;
    let (nodes, addresses) = ([first.name(), second.name()], [FIRST.to_string(), SECOND.to_string()]);
    let expected = format!("both, on {} and {}", nodes[0], nodes[1]);
    walkthrough.expect_assigned(OBJECT, &expected, |pairs| {
        let is_one_of_each = |of: &dyn Fn(&(String, String)) -> String, all: &[String; 2]| {
            let found: BTreeSet<String> = pairs.iter().map(of).collect();
            pairs.len() == 2 && all.iter().all(|one| found.contains(one))
        };
        is_one_of_each(&|pair| pair.0.clone(), &nodes) && is_one_of_each(&|pair| pair.1.clone(), &addresses)
    })?;
    walkthrough.expect_outside(|pod, to| with_egress(pod, to, &[FIRST, SECOND]))?;
    println!("   back to one address:");
    walkthrough.apply(&EGRESS_IP, "egressip-simpson.yaml")?;
    expect_on(walkthrough, OBJECT, FIRST, first)
}

fn moved(walkthrough: &mut Walkthrough, from: NodeNumber, to: NodeNumber) -> Result<()> {
    walkthrough.report.begin("The label goes, the address moves to the other node");
    walkthrough.label(from, false)?;
    expect_on(walkthrough, OBJECT, FIRST, to)?;
    walkthrough.expect_outside(|pod, to| with_egress(pod, to, &[FIRST]))
}

fn powered_off(walkthrough: &mut Walkthrough, gateway: NodeNumber, new_owner: NodeNumber) -> Result<()> {
    walkthrough.report.begin("The gateway is powered off, another node takes over");
    walkthrough.label(new_owner, true)?;
    let agent = power_off(walkthrough, gateway)?;
    expect_on(walkthrough, OBJECT, FIRST, new_owner)?;
    // Its pods went dark with it.
    walkthrough.expect_outside(|pod, to| if pod.node == gateway { None } else { with_egress(pod, to, &[FIRST]) })?;
    power_on(walkthrough, gateway, agent)?;
    walkthrough.expect_outside(|pod, to| with_egress(pod, to, &[FIRST]))
}

fn deleted(walkthrough: &mut Walkthrough, labelled: NodeNumber) -> Result<()> {
    walkthrough.report.begin("The object is deleted: back to the nodes' addresses");
    walkthrough.delete(&EGRESS_IP, OBJECT)?;
    walkthrough.expect_outside(as_node)?;
    walkthrough.label(labelled, false)
}
