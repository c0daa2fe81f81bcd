//! Malformed objects that a laxer API server admits: what is readable is served, the rest is named in a condition and an event,
//! and other objects are served as before.

use crate::prelude::*;
use egress_lab::api_objects::{condition, expression};

const V4: &str = "172.18.0.110";
const V6: &str = "fd00:172:18::110";
const TICK: Duration = Duration::from_millis(10);

/// As the definition of a product that checks nothing, or of a version before the rules for addresses.
pub(super) fn anything(crd: &mut Value) {
    crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"] =
        json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
}

pub(super) fn are_reported_and_isolated(context: &LabContext) -> Result<()> {
    let pods = vec![pod("well", "red", 1, &[]), pod("ill", "blue", 1, &[]), pod("third", "red", 3, &[])];
    let mut cluster = TestCluster::with_crd(context, pods, 0, anything)?;
    cluster.assignable(1, true)?;
    cluster.assignable(2, true)?;
    cluster.assign(&egress_ip("good", &[V4, V6], &labels("house", "red"), &all()))?;
    cluster.is_seen_as("well", Some(V4), Some(V6))?;
    let mut flows = Vec::new();
    for to in plan::SERVER.both() {
        let (from, echo) = (&cluster.pod("well")?.netns, SocketAddr::new(to, ECHO_PORT));
        flows.push(TrafficFlow::udp(from, echo, TICK)?);
        flows.push(TrafficFlow::tcp(from, echo, TICK, client::PATIENCE)?);
    }
    bad_addresses(&cluster)?;
    bad_selector(&cluster)?;
    no_object_at_all(&cluster)?;
    bad_node(&mut cluster)?;
    for flow in flows {
        let report = flow.finish()?;
        ensure!(report.lost() == 0 && report.broken.is_none(), "a good object's traffic was harmed: {report:?}");
        println!("the good object's pod: {} sent, none lost", report.sent);
    }
    Ok(())
}

/// The object's condition, once it has this reason.
fn has_reason(cluster: &TestCluster, name: &str, reason: &str) -> Result<String> {
    until(&format!("{name} has the reason {reason}"), EFFECT, || {
        let object = cluster.api.egress_ip(name)?.unwrap_or_default();
        Ok(condition(&object).filter(|(is, _)| is == reason).map(|(_, message)| message))
    })
}

fn bad_addresses(cluster: &TestCluster) -> Result<()> {
    let listed = ["172.18.0.300", "172.18.0.0/24", "172.18.0.120", "eip"];
    cluster.put(&egress_ip("mixed", &listed, &labels("house", "blue"), &all()))?;
    let message = has_reason(cluster, "mixed", "PartiallyAssigned")?;
    println!("{message}");
    let object = cluster.api.egress_ip("mixed")?.context("no object")?;
    let served: Vec<String> = assigned(&object).into_iter().map(|(address, _)| address).collect();
    ensure!(served == ["172.18.0.120"], "served: {served:?}");
    for bad in ["172.18.0.300", "172.18.0.0/24", "eip"] {
        ensure!(message.contains(bad), "the condition does not name {bad}");
    }
    println!("{}", cluster.event("mixed", "InvalidEgressIP")?);
    cluster.is_seen_as("ill", Some("172.18.0.120"), None)?;

    cluster.put(&egress_ip("mixed", &["172.18.0.0/24"], &labels("house", "blue"), &all()))?;
    println!("{}", has_reason(cluster, "mixed", "InvalidEgressIP")?);
    // An address was meant, and none can be given: not the node's instead.
    cluster.becomes(&cluster.pod("ill")?.netns, plan::SERVER.v4.into(), egress_lab::test_cluster::Observed::Nothing)?;
    cluster.remove("mixed")?;
    cluster.is_seen_as("ill", None, None)
}

fn bad_selector(cluster: &TestCluster) -> Result<()> {
    for (key, operator, values) in
        [("house", "Like", &["blue"][..]), ("house", "In", &[]), ("house", "Exists", &["blue"])]
    {
        cluster.put(&egress_ip("unclear", &["172.18.0.121"], &expression(key, operator, values), &all()))?;
        let message = has_reason(cluster, "unclear", "InvalidSelector")?;
        println!("{message}");
        ensure!(message.contains(key) && message.contains(operator), "{message} does not say what is wrong");
        cluster.is_seen_as("ill", None, None)?;
        cluster.remove("unclear")?;
    }
    Ok(())
}

fn no_object_at_all(cluster: &TestCluster) -> Result<()> {
    let nonsense = json!({
        "apiVersion": "k8s.ovn.org/v1", "kind": "EgressIP", "metadata": {"name": "nonsense"},
        "spec": {"egressIPs": "172.18.0.122", "namespaceSelector": []},
    });
    cluster.api.create(EGRESS_IPS, &nonsense)?;
    for agent in &cluster.agents {
        until_logged(agent.log(), &["nonsense", "cannot be read"], 1, EFFECT)?;
    }
    cluster.assign(&egress_ip("later", &["172.18.0.123"], &labels("house", "blue"), &all()))?;
    cluster.is_seen_as("ill", Some("172.18.0.123"), None)?;
    cluster.remove("nonsense")?;
    cluster.remove("later")
}

/// A node with unreadable annotations blocks no other node, and is still served by what else is known of it.
fn bad_node(cluster: &mut TestCluster) -> Result<()> {
    let path = "/api/v1/nodes/node3";
    let annotations = |value: &Value| json!({"metadata": {"annotations": {"k8s.ovn.org/node-primary-ifaddr": value, "k8s.ovn.org/host-cidrs": value}}});
    let before = cluster.api.get(path)?.context("no node")?["metadata"]["annotations"].clone();
    cluster.api.merge(path, &annotations(&json!("{nonsense")))?;
    for agent in &cluster.agents {
        until_logged(agent.log(), &["node3", "annotation"], 1, EFFECT)?;
    }
    cluster.assign(&egress_ip("later", &["172.18.0.123"], &labels("house", "blue"), &all()))?;
    cluster.is_seen_as("ill", Some("172.18.0.123"), None)?;
    cluster.is_seen_as("third", Some(V4), Some(V6))?;
    cluster.api.merge(path, &json!({"metadata": {"annotations": before}}))?;
    cluster.serves(3)
}
