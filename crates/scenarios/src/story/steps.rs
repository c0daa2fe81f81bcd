//! The story, step by step: an egress IP's life from the label on a node to the object's end.

use std::net::Ipv6Addr;

use super::pods::{BOUVIER, SIMPSON, TWIN};
use super::walkthrough::Walkthrough;
use crate::prelude::*;
use egress_lab::agents;
use egress_lab::kube_api::KubeApi;

/// The addresses of the manifests in `deploy/examples/`.
const FIRST: IpAddr = IpAddr::V4(Ipv4Addr::new(172, 18, 0, 100));
const SECOND: IpAddr = IpAddr::V4(Ipv4Addr::new(172, 18, 0, 101));
const SIXTH: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfd00, 0x172, 0x18, 0, 0, 0, 0, 0x200));

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

/// Takes the story's objects out of an API server.
pub(super) fn withdraw(api: &KubeApi) -> Result<()> {
    for object in [OBJECT, SIXTH_OBJECT] {
        api.delete(&format!("/apis/k8s.ovn.org/v1/egressips/{object}"))?;
    }
    Ok(())
}

fn only(address: IpAddr) -> Option<BTreeSet<IpAddr>> {
    Some(BTreeSet::from([address]))
}

/// How the world sees a pod without an egress IP.
fn as_node(pod: &LabPod, to: IpAddr) -> Option<BTreeSet<IpAddr>> {
    only(pod.node.address().towards(to))
}

/// How the world sees the pods while the first object has these addresses.
fn with_egress(pod: &LabPod, to: IpAddr, addresses: &[IpAddr]) -> Option<BTreeSet<IpAddr>> {
    if pod.namespace == SIMPSON && to.is_ipv4() { Some(addresses.iter().copied().collect()) } else { as_node(pod, to) }
}

fn before(walkthrough: &mut Walkthrough) -> Result<()> {
    walkthrough.report.begin("Before: the world sees the node that a pod runs on");
    walkthrough.expect_outside(as_node)
}

fn assign(walkthrough: &mut Walkthrough, node: NodeNumber) -> Result<()> {
    walkthrough.report.begin("A node is made assignable, and an EgressIP is applied");
    walkthrough.label(node, true)?;
    walkthrough.apply("egressip-simpson.yaml")?;
    expect_on(walkthrough, OBJECT, FIRST, node)
}

fn expect_on(walkthrough: &mut Walkthrough, object: &str, address: IpAddr, node: NodeNumber) -> Result<()> {
    let (node, address) = (node.name(), address.to_string());
    let expected = format!("{address} on {node}");
    walkthrough.expect_assigned(object, &expected, |pairs| pairs == [(node.clone(), address.clone())])
}

fn selected(walkthrough: &mut Walkthrough) -> Result<()> {
    walkthrough.report.begin("After: selected pods of every node have the egress IP, the others their node's address");
    walkthrough.expect_outside(|pod, to| with_egress(pod, to, &[FIRST]))
}

/// Pod to pod, pod to another node, pod to its own node: as without us.
fn inside(walkthrough: &mut Walkthrough) -> Result<()> {
    walkthrough.report.begin("Inside the cluster nothing changes");
    let caller = walkthrough
        .cluster
        .lab
        .pods()
        .iter()
        .find(|pod| pod.namespace == SIMPSON)
        .context("no pod to call from")?
        .clone();
    let target =
        walkthrough.cluster.lab.pods().iter().find(|pod| pod.node != caller.node).context("no pod to call")?.clone();
    let _in_pod = Server::in_pod(&walkthrough.cluster.lab, &target)?;
    for to in target.addresses.both() {
        let what = format!("{} -> pod {} on {}", caller.name, target.name, target.node.name());
        let expected = caller.addresses.towards(to);
        walkthrough.expect_inside(&what, &caller.netns, SocketAddr::new(to, HTTP_PORT), expected)?;
    }
    let nodes = walkthrough.cluster.lab.nodes().to_vec();
    for node in nodes.iter().take(2) {
        let _on_node = Server::on_node(&walkthrough.cluster.lab, node)?;
        let own = node.number == caller.node;
        let expected = if own { caller.addresses } else { caller.node.address() };
        for to in node.number.address().both() {
            let what = format!("{} -> {} {}", caller.name, if own { "its own node" } else { "node" }, node.name());
            walkthrough.expect_inside(&what, &caller.netns, SocketAddr::new(to, HTTP_PORT), expected.towards(to))?;
        }
    }
    Ok(())
}

fn ipv6(walkthrough: &mut Walkthrough) -> Result<()> {
    walkthrough.report.begin("IPv6, and a pod selector");
    walkthrough.apply("egressip-bouvier-ipv6.yaml")?;
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
    walkthrough.show("delete egressip egressip-bouvier", |api| api.delete_egress_ip(SIXTH_OBJECT))
}

fn two_addresses(walkthrough: &mut Walkthrough, first: NodeNumber, second: NodeNumber) -> Result<()> {
    walkthrough.report.begin("Two addresses: each on another node, connections spread over both");
    walkthrough.label(second, true)?;
    walkthrough.apply("egressip-simpson-two.yaml")?;
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
    walkthrough.apply("egressip-simpson.yaml")?;
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
    walkthrough.leases_end()?;
    println!("   {}: cables cut, agent killed, the node is no longer Ready", gateway.name());
    let off = gateway.index();
    let mut agent = walkthrough.cluster.agents.remove(off);
    agents::power(&walkthrough.cluster.lab, &mut agent, false)?;
    walkthrough.cluster.api.set_ready(gateway, false)?;
    expect_on(walkthrough, OBJECT, FIRST, new_owner)?;
    // Its pods went dark with it.
    walkthrough.expect_outside(|pod, to| if pod.node == gateway { None } else { with_egress(pod, to, &[FIRST]) })?;
    println!("   {} is switched on again", gateway.name());
    agents::power(&walkthrough.cluster.lab, &mut agent, true)?;
    walkthrough.cluster.agents.insert(off, agent);
    walkthrough.cluster.api.set_ready(gateway, true)?;
    walkthrough.expect_outside(|pod, to| with_egress(pod, to, &[FIRST]))
}

fn deleted(walkthrough: &mut Walkthrough, labelled: NodeNumber) -> Result<()> {
    walkthrough.report.begin("The object is deleted: back to the nodes' addresses");
    walkthrough.show("delete egressip egressip-simpson", |api| api.delete_egress_ip(OBJECT))?;
    walkthrough.expect_outside(as_node)?;
    walkthrough.label(labelled, false)
}

/// The capture has watched the nodes' network all the while.
fn nothing_leaked(walkthrough: &mut Walkthrough) -> Result<()> {
    walkthrough.report.begin("What left the nodes in all this time");
    let seen = walkthrough.capture.take().context("nothing was captured")?.finish()?;
    for (class, name) in [(AddressKind::Egress, "an egress IP"), (AddressKind::Node, "a node's address")] {
        println!("   {:>6} packets to the world with {name}", seen.to_the_world(class));
    }
    println!("   {:>6} frames captured, {} missed", seen.frames, seen.missed);
    walkthrough.report.check("packets with a pod's address", &0, &seen.to_the_world(AddressKind::Pod));
    let checksums = seen.check().err().map_or("right".to_owned(), |error| format!("{error:#}"));
    walkthrough.report.check("checksums", &"right", &checksums);
    Ok(())
}
