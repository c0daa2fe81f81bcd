//! What ordinary users of the API write costs EgressIP objects of others nothing.

use crate::prelude::*;

const V4: &str = "172.18.0.100";

/// A Service lists an egress IP before its only gateway is away.
pub(super) fn a_service_keeps_no_egress_ip_from_coming_back(context: &LabContext) -> Result<()> {
    let cluster = TestCluster::start(context, vec![pod("homer", "simpson", 1, &[]), pod("patty", "bouvier", 1, &[])])?;
    cluster.assignable(2, true)?;
    cluster.assign(&egress_ip("simpsons", &[V4], &labels("house", "simpson"), &all()))?;
    let front = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": "front", "namespace": "bouvier"},
        "spec": {"clusterIP": "10.96.9.9", "ports": [{"port": 80}], "externalIPs": [V4]},
    });
    cluster.api.create("/api/v1/namespaces/bouvier/services", &front)?;
    cluster.is_seen_as("homer", Some(V4), None)?;
    for (is_there, what) in [(false, "no node"), (true, "a node again")] {
        cluster.assignable(2, is_there)?;
        until_true(&format!("the egress IP has {what}"), EFFECT, || {
            let object = cluster.api.get(&format!("{EGRESS_IPS}/simpsons"))?;
            Ok(object.as_ref().map(assigned).unwrap_or_default().is_empty() != is_there)
        })?;
    }
    cluster.is_seen_as("homer", Some(V4), None)
}

/// More than the map of pods takes.
const MANY: u32 = 4_500;

/// Whoever may create pods names a node for them, and in an annotation that OVN-Kubernetes writes any address there.
pub(super) fn unscheduled_pods_reserve_no_address(context: &LabContext) -> Result<()> {
    let mut cluster =
        TestCluster::start(context, vec![pod("homer", "simpson", 1, &[]), pod("patty", "bouvier", 2, &[])])?;
    let sign = json!({"metadata": {"annotations": {"k8s.ovn.org/node-chassis-id": "chassis1"}}});
    cluster.api.merge("/api/v1/nodes/node1", &sign)?;
    for number in 0..MANY {
        let networks = json!({"default": {"ip_addresses": [format!("fd00:10:244:1::1:{number:x}/64")]}}).to_string();
        let claimer = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": format!("claimer{number}"), "namespace": "bouvier",
                         "annotations": {"k8s.ovn.org/pod-networks": networks}},
            "spec": {"nodeName": "node1", "containers": [{"name": "shell", "image": "lab/none"}]},
        });
        cluster.api.create("/api/v1/namespaces/bouvier/pods", &claimer)?;
    }
    // The agent has heard of a later pod, so of these.
    cluster.serves(1)?;
    let known = AgentPins::of(&cluster.lab.nodes()[0]).keys("pods")?.len();
    ensure!(known == 2, "node1 knows {known} addresses of pods, and homer has two");
    Ok(())
}
