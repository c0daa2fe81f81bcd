//! A user who may create pods can give them any annotation: the address of another pod, of the node, of an egress IP, of the
//! world, or thousands. No other pod's traffic changes, on nodes of OVN-Kubernetes and of other CNIs.

use crate::prelude::*;

const V4: &str = "172.18.0.100";
const V6: &str = "fd00:172:18::100";
const ROUNDS: usize = 5;
/// More than any map holds of pods.
const MANY: u32 = 6000;

/// A pod of a user: its namespace, the addresses that it claims, the event that it gets where its node reads the annotation.
type ClaimCase = (&'static str, Vec<String>, &'static str);

pub(super) fn annotations_change_no_source(context: &LabContext) -> Result<()> {
    let pods = vec![
        pod("homer", "simpson", 1, &[]),
        pod("lisa", "simpson", 2, &[]),
        pod("patty", "bouvier", 1, &[]),
        pod("carl", "bouvier", 2, &[]),
    ];
    let mut cluster = TestCluster::start(context, pods)?;
    // One of the two addresses is served where users make their pods.
    cluster.assignable(1, true)?;
    cluster.assignable(2, true)?;
    cluster.assign(&egress_ip("simpsons", &[V4, V6], &labels("house", "simpson"), &all()))?;
    for (name, ..) in WITNESSES {
        cluster.is_seen_as(name, egress(name, V4), egress(name, V6))?;
    }
    let homer = cluster.pod("homer")?.addresses;
    let node = cluster.pod("homer")?.node.address();
    let text = |addresses: plan::Dual| vec![addresses.v4.to_string(), addresses.v6.to_string()];
    let many = (0..MANY).map(|i| format!("fd00:10:244:1::1:{i:x}")).collect();
    let claims: [ClaimCase; 5] = [
        ("bouvier", text(homer), "PodAddressConflict"),
        ("bouvier", vec![V4.to_owned(), V6.to_owned()], "PodAddressRefused"),
        ("bouvier", text(plan::SERVER), "PodAddressRefused"),
        ("bouvier", many, "PodAddressRefused"),
        // Its own object selects it: what the node sends would have to have the egress IP.
        ("simpson", text(node), "PodAddressRefused"),
    ];
    for is_managed in [false, true] {
        if is_managed {
            for number in 1..=3 {
                let sign =
                    json!({"metadata": {"annotations": {"k8s.ovn.org/node-chassis-id": format!("chassis{number}")}}});
                cluster.api.merge(&format!("/api/v1/nodes/node{number}"), &sign)?;
            }
        }
        for claim in &claims {
            claimed(&mut cluster, claim, is_managed)?;
        }
    }
    Ok(())
}

/// Name, and whether the object selects it.
const WITNESSES: [(&str, bool); 4] = [("homer", true), ("lisa", true), ("patty", false), ("carl", false)];

fn egress(name: &str, address: &'static str) -> Option<&'static str> {
    WITNESSES.contains(&(name, true)).then_some(address)
}

fn claimed(cluster: &mut TestCluster, (namespace, addresses, reason): &ClaimCase, is_managed: bool) -> Result<()> {
    println!(
        "{namespace}: {} addresses, {} first, managed by OVN-Kubernetes: {is_managed}",
        addresses.len(),
        addresses[0]
    );
    let known = || -> Result<usize> { Ok(AgentPins::of(&cluster.lab.nodes()[0]).keys("pods")?.len()) };
    let before = known()?;
    let listed: Vec<String> =
        addresses.iter().map(|address| format!("{address}/{}", if address.contains(':') { 64 } else { 24 })).collect();
    let networks = json!({"default": {"ip_addresses": listed}}).to_string();
    let collection = format!("/api/v1/namespaces/{namespace}/pods");
    let path = format!("{collection}/claimer");
    let claimer = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "claimer", "namespace": namespace, "annotations": {"k8s.ovn.org/pod-networks": networks}},
        "spec": {"nodeName": "node1", "containers": [{"name": "shell", "image": "lab/none"}]},
    });
    cluster.api.create(&collection, &claimer)?;
    let scheduled = json!([{"type": "PodScheduled", "status": "True"}]);
    cluster.api.patch_status(&path, &json!({"status": {"conditions": scheduled}}))?;
    // The agent has heard of a later pod, so of this one, and its node can still talk to the API server.
    cluster.serves(1)?;
    let more = AgentPins::of(&cluster.lab.nodes()[0]).keys("pods")?.len().saturating_sub(before);
    // Of the many it may have one that is unused.
    let allowed = usize::from(is_managed && addresses.len() > 2);
    ensure!(more <= allowed, "the pods of node1 have {more} addresses more");
    undisturbed(cluster)?;
    if is_managed {
        let reported = until(&format!("event {reason} about the pod"), EFFECT, || {
            let list = cluster.api.get(&format!("/api/v1/namespaces/{namespace}/events"))?.unwrap_or_default();
            let events = list["items"].as_array().cloned().unwrap_or_default();
            let is_ours = |event: &&Value| event["involvedObject"]["name"] == "claimer" && event["reason"] == *reason;
            Ok(events.iter().rfind(is_ours).and_then(|event| event["message"].as_str()).map(str::to_owned))
        })?;
        println!("{reported}");
    }
    cluster.api.delete(&path)?;
    cluster.serves(1)?;
    undisturbed(cluster)
}

/// No pod, and not the node either, is seen as anybody else, nor is any not seen.
fn undisturbed(cluster: &TestCluster) -> Result<()> {
    let node = &cluster.lab.nodes()[0];
    for _ in 0..ROUNDS {
        for to in plan::SERVER.both() {
            for (name, is_selected) in WITNESSES {
                let pod = cluster.pod(name)?;
                let egress = if to.is_ipv4() { V4 } else { V6 };
                let expected = match is_selected {
                    true => egress.parse().context("an address")?,
                    false => pod.node.address().towards(to),
                };
                let seen = observe(&pod.netns, to)?;
                ensure!(seen == Observed::Source(expected), "{name} is {seen}, not {expected}");
            }
            let seen = observe(&node.host, to)?;
            ensure!(seen == Observed::Source(node.number.address().towards(to)), "the node is {seen}");
        }
    }
    Ok(())
}
