//! A GitOps tool: it applies objects by server-side apply, as a field manager of its own, again and again, and deletes what its
//! repository no longer has. What the agents write does not conflict with the tool.

use crate::prelude::*;
use egress_lab::api_objects::path_of;

const MANAGER: &str = "repository";
const AGENT: &str = "egress-agent";
const ADDRESSES: [&str; 2] = ["172.18.0.107", "172.18.0.108"];
/// What the leader writes beside the status.
const NUMBER: &str = "k8s.ovn.org/egressip-tunnel-id";
const NO_NODE: &str = "k8s.ovn.org/egressip-no-eligible-node";
/// What the repository wrote once.
const REVISION: &str = "repository.example/revision";

/// On nodes 2 and 3, for a pod that nothing else selects, by its namespace.
pub(super) fn and_agents_do_not_fight(cluster: &TestCluster, pod: &str) -> Result<()> {
    println!("an object that is kept by a repository");
    let namespace = labels("kubernetes.io/metadata.name", &cluster.pod(pod)?.namespace);
    let mut kept = egress_ip("kept", &ADDRESSES[..1], &namespace, &all());
    kept["metadata"]["labels"] = json!({"team": "a"});
    kept["metadata"]["annotations"] = json!({REVISION: "1"});
    apply(cluster, &kept)?;
    in_step(cluster, 1)?;
    cluster.is_seen_as(pod, Some(ADDRESSES[0]), None)?;
    changes_nothing(cluster, &kept)?;

    println!("the repository writes less, and more");
    kept["metadata"] = json!({"name": "kept", "labels": {"team": "b"}});
    kept["spec"]["egressIPs"] = json!(ADDRESSES);
    let now = apply(cluster, &kept)?;
    let annotations = now.pointer("/metadata/annotations").and_then(Value::as_object).context("no annotations")?;
    ensure!(!annotations.contains_key(REVISION) && annotations.contains_key(NUMBER), "{annotations:?}");
    ensure!(assigned(&now).len() == 1 && now["metadata"]["labels"] == json!({"team": "b"}), "{now:#}");
    in_step(cluster, 2)?;
    changes_nothing(cluster, &kept)?;

    println!("status and annotations go and come");
    let labelled = [2, 3];
    labelled.into_iter().try_for_each(|node| cluster.assignable(node, false))?;
    let without = in_step(cluster, 0)?;
    ensure!(!without["metadata"]["annotations"][NO_NODE].is_null(), "no node is eligible: {without:#}");
    changes_nothing(cluster, &kept)?;
    labelled.into_iter().try_for_each(|node| cluster.assignable(node, true))?;
    let with = in_step(cluster, 2)?;
    ensure!(with["metadata"]["annotations"][NO_NODE].is_null(), "{ASSIGNABLE} is back: {with:#}");
    changes_nothing(cluster, &kept)?;
    each_has_its_own(&with)?;

    println!("it is pruned, and created again");
    let path = path_of(&kept);
    cluster.api.delete(&path)?;
    cluster.is_seen_as(pod, None, None)?;
    ensure!(cluster.api.get(&path)?.is_none(), "it is written again, or its deletion is blocked");
    kept["spec"]["egressIPs"] = json!(ADDRESSES[1..]);
    apply(cluster, &kept)?;
    let created = in_step(cluster, 1)?;
    ensure!(created["metadata"]["uid"] != with["metadata"]["uid"], "it is the same");
    cluster.is_seen_as(pod, Some(ADDRESSES[1]), None)?;
    changes_nothing(cluster, &kept)?;
    cluster.api.delete(&path)
}

fn apply(cluster: &TestCluster, object: &Value) -> Result<Value> {
    cluster.api.apply(&path_of(object), MANAGER, object)
}

/// When the leader has written the whole status of the object as it is, with so many addresses assigned.
fn in_step(cluster: &TestCluster, addresses: usize) -> Result<Value> {
    until(&format!("{addresses} addresses are assigned"), EFFECT, || {
        let object = cluster.api.get("/apis/k8s.ovn.org/v1/egressips/kept")?.context("it is gone")?;
        let has_number = !object["metadata"]["annotations"][NUMBER].is_null();
        let is_seen = object.pointer("/status/observedGeneration") == object.pointer("/metadata/generation");
        // Said with the status, by another request.
        let has_node = object["metadata"]["annotations"][NO_NODE].is_null() == (addresses > 0);
        Ok((has_number && is_seen && has_node && assigned(&object).len() == addresses).then_some(object))
    })
}

/// Applied again it stays byte for byte the same, and is not written afterwards.
fn changes_nothing(cluster: &TestCluster, object: &Value) -> Result<()> {
    let read = || cluster.api.get(&path_of(object))?.context("it is gone");
    let before = read()?;
    for _ in 0..3 {
        let now = apply(cluster, object)?;
        ensure!(now == before, "applied again it is\n{now:#}, and was\n{before:#}");
    }
    let now = read()?;
    ensure!(now == before, "it was written\n{now:#}, it was\n{before:#}");
    Ok(())
}

/// No field has two managers, and none has the other's.
fn each_has_its_own(object: &Value) -> Result<()> {
    let managers = object.pointer("/metadata/managedFields").and_then(Value::as_array).context("no managers")?;
    for manager in managers {
        let (name, fields) = (manager["manager"].as_str().unwrap_or_default(), manager["fieldsV1"].to_string());
        let ours = fields.contains(NUMBER) || fields.contains("f:status") || fields.contains("f:items");
        let theirs = fields.contains("f:spec") || fields.contains("f:team");
        ensure!((name == AGENT && !theirs) || (name == MANAGER && !ours), "{name} has {fields}");
    }
    ensure!(
        managers.iter().any(|manager| manager["manager"] == AGENT),
        "the agents have written nothing: {managers:?}"
    );
    Ok(())
}
