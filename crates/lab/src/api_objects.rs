//! Paths of the API, labels and annotations, and EgressIP objects as people write them. Pure.

use serde_json::{Value, json};

pub const ASSIGNABLE: &str = "k8s.ovn.org/egress-assignable";
pub const EGRESS_IPS: &str = "/apis/k8s.ovn.org/v1/egressips";
pub const EGRESS_NODES: &str = "/apis/egress-agent.io/v1alpha1/egressnodes";
pub const EVENTS: &str = "/api/v1/events";
pub const NODES: &str = "/api/v1/nodes";
/// The Lease of the controllers' leader.
pub const LEASE: &str = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/egress-agent-leader";
/// The controllers' hand-over ledger.
pub const LEDGER: &str = "/api/v1/namespaces/kube-system/configmaps/egress-agent-hand-overs";
/// The annotation with an object's egress ID.
pub const TUNNEL_ID: &str = "k8s.ovn.org/egressip-tunnel-id";
/// Where agents answer health checks.
pub const HEALTH_PORT: u16 = 9107;

/// The label of the node that serves an EgressService, and the load balancer's address of its Service.
pub fn egress_service_label(namespace: &str, service: &str) -> String {
    format!("egress-service.k8s.ovn.org/{namespace}-{service}")
}

/// Selects every namespace, or every pod.
pub fn all() -> Value {
    json!({})
}

pub fn labels(key: &str, value: &str) -> Value {
    json!({"matchLabels": {key: value}})
}

/// One expression; no values for the operators that take none.
pub fn expression(key: &str, operator: &str, values: &[&str]) -> Value {
    let mut expression = json!({"key": key, "operator": operator});
    if !values.is_empty() {
        expression["values"] = json!(values);
    }
    json!({"matchExpressions": [expression]})
}

pub fn egress_ip(name: &str, addresses: &[&str], namespaces: &Value, pods: &Value) -> Value {
    json!({
        "apiVersion": "k8s.ovn.org/v1",
        "kind": "EgressIP",
        "metadata": {"name": name},
        "spec": {"egressIPs": addresses, "namespaceSelector": namespaces, "podSelector": pods},
    })
}

pub fn path_of(object: &Value) -> String {
    format!("{EGRESS_IPS}/{}", object.pointer("/metadata/name").and_then(Value::as_str).unwrap_or_default())
}

/// The (address, node) pairs of an object's status, by address.
pub fn assigned(object: &Value) -> Vec<(String, String)> {
    let items = object.pointer("/status/items").and_then(Value::as_array).cloned().unwrap_or_default();
    let text = |item: &Value, key: &str| item.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
    let mut pairs: Vec<_> = items.iter().map(|item| (text(item, "egressIP"), text(item, "node"))).collect();
    pairs.sort();
    pairs
}

/// Reason and message of the condition `Assigned`.
pub fn condition(object: &Value) -> Option<(String, String)> {
    let conditions = object.pointer("/status/conditions").and_then(Value::as_array)?;
    let assigned = conditions.iter().find(|condition| condition["type"] == "Assigned")?;
    let text = |key: &str| assigned[key].as_str().unwrap_or_default().to_owned();
    Some((text("reason"), text("message")))
}
