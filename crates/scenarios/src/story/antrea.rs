//! Antrea's kinds: an address from a pool, two that share one, a lost node, and what is released in the end.

use super::pods::{BOUVIER, SIMPSON, TWIN};
use super::steps::{as_node, before, inside, nothing_leaked, only, power_off, power_on};
use super::walkthrough::Walkthrough;
use crate::prelude::*;
use egress_lab::kube_api::{EGRESS, EXTERNAL_IP_POOL, TypedKind};

/// The first two addresses of the pool in `deploy/examples/`.
const FIRST: IpAddr = IpAddr::V4(Ipv4Addr::new(172, 18, 0, 110));
const SECOND: IpAddr = IpAddr::V4(Ipv4Addr::new(172, 18, 0, 111));
const POOL: &str = "external";
const POOL_SIZE: u64 = 10;
const OF_SIMPSON: &str = "simpson";
const OF_TWINS: &str = "bouvier-twins";
const SHARED: &str = "bouvier-others";

/// What it applies.
pub(super) const OBJECTS: [(TypedKind, &str); 4] =
    [(EGRESS, OF_SIMPSON), (EGRESS, OF_TWINS), (EGRESS, SHARED), (EXTERNAL_IP_POOL, POOL)];

pub(super) fn play(walkthrough: &mut Walkthrough) -> Result<()> {
    before(walkthrough)?;
    allocated(walkthrough)?;
    selected(walkthrough)?;
    inside(walkthrough)?;
    shared(walkthrough)?;
    powered_off(walkthrough)?;
    released(walkthrough)?;
    nothing_leaked(walkthrough)
}

/// How the world sees the pods of the first Egress, and the others by their nodes.
fn with_first(pod: &LabPod, to: IpAddr) -> Option<BTreeSet<IpAddr>> {
    if pod.namespace == SIMPSON && to.is_ipv4() { only(FIRST) } else { as_node(pod, to) }
}

/// How the world sees the pods of all three.
fn with_all(pod: &LabPod, to: IpAddr) -> Option<BTreeSet<IpAddr>> {
    match (pod.namespace.as_str(), pod.labels.contains_key(TWIN)) {
        _ if !to.is_ipv4() => as_node(pod, to),
        (BOUVIER, true) => only(SECOND),
        _ => only(FIRST),
    }
}

fn allocated(walkthrough: &mut Walkthrough) -> Result<()> {
    walkthrough
        .report
        .begin("A pool and an Egress are applied: the Egress gets the first address, and a node hosts it");
    walkthrough.apply(&EXTERNAL_IP_POOL, "externalippool.yaml")?;
    walkthrough.apply(&EGRESS, "egress-simpson.yaml")?;
    expect_served(walkthrough, OF_SIMPSON, FIRST)?;
    walkthrough.list(&EGRESS)?;
    expect_used(walkthrough, 1)
}

fn selected(walkthrough: &mut Walkthrough) -> Result<()> {
    walkthrough.report.begin("After: its pods on every node have the address, the others their node's");
    walkthrough.expect_outside(with_first)
}

fn shared(walkthrough: &mut Walkthrough) -> Result<()> {
    walkthrough.report.begin("Another Egress gets the next address, and one without a pool shares the first");
    walkthrough.apply(&EGRESS, "egress-bouvier-twins.yaml")?;
    walkthrough.apply(&EGRESS, "egress-bouvier-others.yaml")?;
    let first = expect_served(walkthrough, OF_SIMPSON, FIRST)?;
    expect_served(walkthrough, OF_TWINS, SECOND)?;
    let others = expect_served(walkthrough, SHARED, FIRST)?;
    walkthrough.report.check("node of the shared address", &first, &others);
    walkthrough.list(&EGRESS)?;
    expect_used(walkthrough, 2)?;
    walkthrough.expect_outside(with_all)
}

fn powered_off(walkthrough: &mut Walkthrough) -> Result<()> {
    walkthrough.report.begin("The node of the shared address is powered off, another one takes over and keeps it");
    let host = expect_served(walkthrough, OF_SIMPSON, FIRST)?;
    let nodes: Vec<NodeNumber> = walkthrough.cluster.lab.nodes().iter().map(|node| node.number).collect();
    let off = nodes.into_iter().find(|node| node.name() == host).context("no node has the address")?;
    let agent = power_off(walkthrough, off)?;
    let moved = walkthrough.wait_for(&EGRESS, OF_SIMPSON, |object| node_of(object).is_some_and(|node| node != host))?;
    let new_host = node_of(&moved).unwrap_or_default();
    walkthrough.report.check("the address has moved", &true, &(new_host != host && !new_host.is_empty()));
    expect_served(walkthrough, OF_TWINS, SECOND)?;
    walkthrough.list(&EGRESS)?;
    // Its pods went dark with it.
    walkthrough.expect_outside(|pod, to| if pod.node == off { None } else { with_all(pod, to) })?;
    power_on(walkthrough, off, agent)?;
    walkthrough.expect_outside(with_all)?;
    let kept = expect_served(walkthrough, OF_SIMPSON, FIRST)?;
    walkthrough.report.check("node after the return", &new_host, &kept);
    Ok(())
}

fn released(walkthrough: &mut Walkthrough) -> Result<()> {
    walkthrough.report.begin("The Egresses are deleted: back to the nodes' addresses, and the pool is free");
    for name in [SHARED, OF_TWINS, OF_SIMPSON] {
        walkthrough.delete(&EGRESS, name)?;
    }
    walkthrough.expect_outside(as_node)?;
    expect_used(walkthrough, 0)?;
    walkthrough.delete(&EXTERNAL_IP_POOL, POOL)
}

/// The node in the status of an Egress.
fn node_of(object: &Value) -> Option<String> {
    object.pointer("/status/egressNode").and_then(Value::as_str).filter(|node| !node.is_empty()).map(str::to_owned)
}

/// Waits until the Egress has the address and a node, and returns the node.
fn expect_served(walkthrough: &mut Walkthrough, name: &str, address: IpAddr) -> Result<String> {
    let address = address.to_string();
    let address_of = |object: &Value| object.pointer("/status/egressIP").and_then(Value::as_str).map(str::to_owned);
    let is_served = |object: &Value| address_of(object).as_ref() == Some(&address) && node_of(object).is_some();
    let object = walkthrough.wait_for(&EGRESS, name, is_served)?;
    let seen = if is_served(&object) { address.clone() } else { format!("{}", object["status"]) };
    walkthrough.report.check(&format!("Egress {name}"), &address, &seen);
    Ok(node_of(&object).unwrap_or_default())
}

fn expect_used(walkthrough: &mut Walkthrough, used: u64) -> Result<()> {
    let expected = json!({"total": POOL_SIZE, "used": used});
    let object = walkthrough.wait_for(&EXTERNAL_IP_POOL, POOL, |object| object["status"]["usage"] == expected)?;
    walkthrough.report.check("usage of the pool", &expected, &object["status"]["usage"]);
    walkthrough.list(&EXTERNAL_IP_POOL)
}
