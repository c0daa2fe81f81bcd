//! Cilium's kind: a gateway for one network, two that divide the pods, a lost gateway, and what is deleted in the end.

use super::pods::{BOUVIER, SIMPSON};
use super::steps::{as_node, before, inside, nothing_leaked, only, power_off, power_on};
use super::walkthrough::Walkthrough;
use crate::prelude::*;
use egress_lab::kube_api::{GATEWAY_POLICY, GATEWAY_POLICY_STATUS, TypedKind};

/// The label of gateways in the manifests in `deploy/examples/`.
const GATEWAY: &str = "egress-gateway";
const OF_SIMPSON: &str = "simpson";
const OF_BOUVIER: &str = "bouvier";

/// What it applies.
pub(super) const OBJECTS: [(TypedKind, &str); 2] = [(GATEWAY_POLICY, OF_SIMPSON), (GATEWAY_POLICY, OF_BOUVIER)];

pub(super) fn play(walkthrough: &mut Walkthrough) -> Result<()> {
    let nodes: Vec<NodeNumber> = walkthrough.cluster.lab.nodes().iter().map(|node| node.number).collect();
    let (one, two) = (nodes[0], nodes[1]);
    before(walkthrough)?;
    without_gateway(walkthrough)?;
    with_gateway(walkthrough, one)?;
    inside(walkthrough)?;
    divided(walkthrough, (one, two))?;
    powered_off(walkthrough, (one, two))?;
    deleted(walkthrough, (one, two))?;
    nothing_leaked(walkthrough)
}

/// How the world sees the pods of the first policy; of the second, nothing is said.
fn by_gateway(pod: &LabPod, to: IpAddr, gateway: NodeNumber) -> Option<BTreeSet<IpAddr>> {
    match pod.namespace.as_str() {
        _ if !to.is_ipv4() => as_node(pod, to),
        SIMPSON => only(gateway.address().towards(to)),
        BOUVIER => None,
        _ => as_node(pod, to),
    }
}

fn without_gateway(walkthrough: &mut Walkthrough) -> Result<()> {
    walkthrough
        .report
        .begin("A policy is applied and no node is its gateway: its packets are dropped, and it says why");
    walkthrough.apply(&GATEWAY_POLICY, "cegp-simpson.yaml")?;
    expect_gateways(walkthrough, OF_SIMPSON, "NoGateway", &[])?;
    let pod = walkthrough.cluster.lab.pods().iter().find(|pod| pod.namespace == SIMPSON).context("no pod")?.clone();
    let to = IpAddr::V4(plan::SERVER.v4);
    walkthrough.cluster.becomes(&pod.netns, to, Observed::Nothing)?;
    let seen = observe(&pod.netns, to)?;
    walkthrough.report.check(&format!("{} -> IPv4", pod.name), &Observed::Nothing, &seen);
    Ok(())
}

fn with_gateway(walkthrough: &mut Walkthrough, gateway: NodeNumber) -> Result<()> {
    walkthrough.report.begin("A node is labelled: the pods leave by it, for this network and with its address");
    label(walkthrough, gateway, Some("one"))?;
    expect_gateways(walkthrough, OF_SIMPSON, "Ready", &[gateway])?;
    walkthrough.expect_outside(|pod, to| match pod.namespace.as_str() {
        SIMPSON => by_gateway(pod, to, gateway),
        _ => as_node(pod, to),
    })
}

fn divided(walkthrough: &mut Walkthrough, (one, two): (NodeNumber, NodeNumber)) -> Result<()> {
    walkthrough.report.begin("Two gateways divide the pods of another policy, each pod has one of them");
    label(walkthrough, two, Some("two"))?;
    walkthrough.apply(&GATEWAY_POLICY, "cegp-bouvier.yaml")?;
    expect_gateways(walkthrough, OF_BOUVIER, "Ready", &[one, two])?;
    expect_gateways(walkthrough, OF_SIMPSON, "Ready", &[one])?;
    expect_one_of(walkthrough, None, &[one, two])?;
    walkthrough.expect_outside(|pod, to| by_gateway(pod, to, one))
}

fn powered_off(walkthrough: &mut Walkthrough, (one, two): (NodeNumber, NodeNumber)) -> Result<()> {
    walkthrough.report.begin("The first gateway is powered off, the second takes over and stays the gateway");
    let agent = power_off(walkthrough, one)?;
    expect_gateways(walkthrough, OF_SIMPSON, "Ready", &[two])?;
    expect_gateways(walkthrough, OF_BOUVIER, "FewerGateways", &[two])?;
    // Its pods went dark with it.
    expect_one_of(walkthrough, Some(one), &[two])?;
    walkthrough.expect_outside(|pod, to| if pod.node == one { None } else { by_gateway(pod, to, two) })?;
    power_on(walkthrough, one, agent)?;
    expect_gateways(walkthrough, OF_BOUVIER, "Ready", &[one, two])?;
    expect_gateways(walkthrough, OF_SIMPSON, "Ready", &[two])?;
    walkthrough.expect_outside(|pod, to| by_gateway(pod, to, two))
}

fn deleted(walkthrough: &mut Walkthrough, (one, two): (NodeNumber, NodeNumber)) -> Result<()> {
    walkthrough.report.begin("The policies are deleted: back to the nodes' addresses");
    for name in [OF_SIMPSON, OF_BOUVIER] {
        walkthrough.delete(&GATEWAY_POLICY, name)?;
    }
    walkthrough.expect_outside(as_node)?;
    for node in [one, two] {
        label(walkthrough, node, None)?;
    }
    Ok(())
}

fn label(walkthrough: &Walkthrough, node: NodeNumber, value: Option<&str>) -> Result<()> {
    walkthrough.label_with(node, GATEWAY, value)
}

/// Waits until the policy has these gateways, notes it, and shows the table.
fn expect_gateways(walkthrough: &mut Walkthrough, name: &str, reason: &str, nodes: &[NodeNumber]) -> Result<()> {
    let expected: Vec<String> = nodes.iter().map(|node| node.name()).collect();
    let expected = format!("{reason} [{}]", expected.join(", "));
    let shown = |object: &Value| {
        let conditions = object["status"]["conditions"].as_array().into_iter().flatten();
        let ready = conditions.into_iter().find(|one| one["type"] == "Ready").map(|one| one["reason"].clone());
        let gateways = object["status"]["gateways"].as_array().into_iter().flatten();
        let gateways: Vec<&str> = gateways.filter_map(|one| one["node"].as_str()).collect();
        format!("{} [{}]", ready.unwrap_or_default().as_str().unwrap_or_default(), gateways.join(", "))
    };
    let object = walkthrough.wait_for(&GATEWAY_POLICY_STATUS, name, |object| shown(object) == expected)?;
    walkthrough.report.check(&format!("policy {name}"), &expected, &shown(&object));
    walkthrough.list(&GATEWAY_POLICY_STATUS)
}

/// Each pod of the second policy is seen by one of these gateways, and always by the same.
fn expect_one_of(walkthrough: &mut Walkthrough, dark: Option<NodeNumber>, gateways: &[NodeNumber]) -> Result<()> {
    let to = IpAddr::V4(plan::SERVER.v4);
    let addresses: BTreeSet<IpAddr> = gateways.iter().map(|node| node.address().towards(to)).collect();
    let pods = walkthrough.cluster.lab.pods().iter();
    let pods: Vec<LabPod> = pods.filter(|pod| pod.namespace == BOUVIER && Some(pod.node) != dark).cloned().collect();
    for pod in pods {
        let is_expected = |seen: &Observed| matches!(seen, Observed::Source(source) if addresses.contains(source));
        let first = until(&format!("{} leaves by a gateway", pod.name), walkthrough.patience / 4, || {
            let seen = observe(&pod.netns, to)?;
            Ok(is_expected(&seen).then_some(seen))
        })?;
        let again = (0..3).map(|_| observe(&pod.netns, to)).collect::<Result<Vec<_>>>()?;
        let other = again.into_iter().find(|seen| *seen != first);
        walkthrough.report.check(&format!("{} -> IPv4", pod.name), &first, other.as_ref().unwrap_or(&first));
    }
    Ok(())
}
