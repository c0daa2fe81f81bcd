//! Columns and cells of the built-in kinds.

use jiff::Timestamp;
use serde_json::{Value, json};

use super::super::clock;
use super::super::meta::{name, text};

/// Headers with their priority; what is not 0 shows with `-o wide`.
pub(super) fn columns(kind: &str) -> &'static [(&'static str, i64)] {
    match kind {
        "ConfigMap" => &[("Name", 0), ("Data", 0), ("Age", 0)],
        "CustomResourceDefinition" => &[("Name", 0), ("Created At", 0)],
        "Event" => &[
            ("Last Seen", 0),
            ("Type", 0),
            ("Reason", 0),
            ("Object", 0),
            ("Subobject", 1),
            ("Source", 1),
            ("Message", 0),
            ("First Seen", 1),
            ("Count", 1),
            ("Name", 1),
        ],
        "Lease" => &[("Name", 0), ("Holder", 0), ("Age", 0)],
        "Namespace" => &[("Name", 0), ("Status", 0), ("Age", 0)],
        "Node" => &[
            ("Name", 0),
            ("Status", 0),
            ("Roles", 0),
            ("Age", 0),
            ("Version", 0),
            ("Internal-IP", 1),
            ("External-IP", 1),
            ("OS-Image", 1),
            ("Kernel-Version", 1),
            ("Container-Runtime", 1),
        ],
        "Pod" => &[
            ("Name", 0),
            ("Ready", 0),
            ("Status", 0),
            ("Restarts", 0),
            ("Age", 0),
            ("IP", 1),
            ("Node", 1),
            ("Nominated Node", 1),
            ("Readiness Gates", 1),
        ],
        "Secret" => &[("Name", 0), ("Type", 0), ("Data", 0), ("Age", 0)],
        "Service" => &[
            ("Name", 0),
            ("Type", 0),
            ("Cluster-IP", 0),
            ("External-IP", 0),
            ("Port(s)", 0),
            ("Age", 0),
            ("Selector", 1),
        ],
        "ServiceAccount" => &[("Name", 0), ("Secrets", 0), ("Age", 0)],
        _ => &[("Name", 0), ("Age", 0)],
    }
}

pub(super) fn cells(kind: &str, object: &Value, now: Timestamp) -> Value {
    let age = clock::age(text(object, "/metadata/creationTimestamp"), now);
    let count = |pointer: &str| object.pointer(pointer).map_or(0, length);
    match kind {
        "ConfigMap" => json!([name(object), count("/data") + count("/binaryData"), age]),
        "Secret" => json!([name(object), text(object, "/type"), count("/data"), age]),
        "CustomResourceDefinition" => {
            json!([name(object), text(object, "/metadata/creationTimestamp")])
        }
        "Event" => event(object, now),
        "Lease" => json!([name(object), text(object, "/spec/holderIdentity"), age]),
        "Namespace" => json!([name(object), text(object, "/status/phase"), age]),
        "Node" => node(object, age),
        "Pod" => pod(object, age),
        "Service" => service(object, age),
        "ServiceAccount" => json!([name(object), count("/secrets"), age]),
        _ => json!([name(object), age]),
    }
}

fn length(value: &Value) -> usize {
    value.as_array().map(Vec::len).or_else(|| value.as_object().map(serde_json::Map::len)).unwrap_or_default()
}

fn or_none(value: &str) -> &str {
    if value.is_empty() { "<none>" } else { value }
}

fn items<'a>(object: &'a Value, pointer: &str) -> impl Iterator<Item = &'a Value> {
    object.pointer(pointer).and_then(Value::as_array).into_iter().flatten()
}

fn node(node: &Value, age: String) -> Value {
    let ready = items(node, "/status/conditions").find(|condition| condition["type"] == "Ready");
    let mut status = match ready.map(|condition| condition["status"] == "True") {
        Some(true) => "Ready".to_owned(),
        Some(false) => "NotReady".to_owned(),
        None => "Unknown".to_owned(),
    };
    if node.pointer("/spec/unschedulable") == Some(&json!(true)) {
        status.push_str(",SchedulingDisabled");
    }
    let labels = node.pointer("/metadata/labels").and_then(Value::as_object);
    let role = |key: &String| key.strip_prefix("node-role.kubernetes.io/").map(str::to_owned);
    let roles: Vec<String> = labels.into_iter().flatten().filter_map(|(key, _)| role(key)).collect();
    let address = |kind: &str| {
        items(node, "/status/addresses")
            .find(|address| address["type"] == kind)
            .map_or("<none>", |a| text(a, "/address"))
    };
    let info = |field: &str| match text(node, &format!("/status/nodeInfo/{field}")) {
        "" => "<unknown>".to_owned(),
        known => known.to_owned(),
    };
    json!([
        name(node),
        status,
        or_none(&roles.join(",")),
        age,
        text(node, "/status/nodeInfo/kubeletVersion"),
        address("InternalIP"),
        address("ExternalIP"),
        info("osImage"),
        info("kernelVersion"),
        info("containerRuntimeVersion"),
    ])
}

fn pod(pod: &Value, age: String) -> Value {
    let containers = pod.pointer("/spec/containers").map_or(0, length);
    let ready = items(pod, "/status/containerStatuses").filter(|status| status["ready"] == json!(true)).count();
    let restarts: i64 =
        items(pod, "/status/containerStatuses").filter_map(|status| status["restartCount"].as_i64()).sum();
    let waiting = items(pod, "/status/containerStatuses")
        .map(|status| match text(status, "/state/waiting/reason") {
            "" => text(status, "/state/terminated/reason"),
            reason => reason,
        })
        .find(|reason| !reason.is_empty());
    let status = if pod.pointer("/metadata/deletionTimestamp").is_some() {
        "Terminating"
    } else {
        waiting.unwrap_or(match text(pod, "/status/reason") {
            "" => text(pod, "/status/phase"),
            reason => reason,
        })
    };
    json!([
        name(pod),
        format!("{ready}/{containers}"),
        status,
        restarts.to_string(),
        age,
        or_none(text(pod, "/status/podIP")),
        or_none(text(pod, "/spec/nodeName")),
        or_none(text(pod, "/status/nominatedNodeName")),
        "<none>",
    ])
}

fn service(service: &Value, age: String) -> Value {
    let ports: Vec<String> = items(service, "/spec/ports")
        .map(|port| {
            let protocol = if text(port, "/protocol").is_empty() { "TCP" } else { text(port, "/protocol") };
            format!("{}/{protocol}", port["port"])
        })
        .collect();
    let selector = service.pointer("/spec/selector").and_then(Value::as_object);
    let selector: Vec<String> = selector
        .into_iter()
        .flatten()
        .map(|(key, value)| format!("{key}={}", value.as_str().unwrap_or_default()))
        .collect();
    let kind = text(service, "/spec/type");
    json!([
        name(service),
        if kind.is_empty() { "ClusterIP" } else { kind },
        or_none(text(service, "/spec/clusterIP")),
        "<none>",
        or_none(&ports.join(",")),
        age,
        or_none(&selector.join(",")),
    ])
}

fn event(event: &Value, now: Timestamp) -> Value {
    let first_of = |pointers: &[&str]| {
        pointers.iter().map(|pointer| text(event, pointer)).find(|found| !found.is_empty()).unwrap_or_default()
    };
    let last = first_of(&["/series/lastObservedTime", "/lastTimestamp", "/eventTime", "/metadata/creationTimestamp"]);
    let first = first_of(&["/firstTimestamp", "/eventTime", "/metadata/creationTimestamp"]);
    let count = event.pointer("/series/count").or_else(|| event.get("count")).and_then(Value::as_i64).unwrap_or(1);
    let about =
        format!("{}/{}", text(event, "/involvedObject/kind").to_lowercase(), text(event, "/involvedObject/name"));
    let source = match (first_of(&["/source/component", "/reportingComponent"]), text(event, "/source/host")) {
        (component, "") => component.to_owned(),
        (component, host) => format!("{component}, {host}"),
    };
    json!([
        clock::age(last, now),
        text(event, "/type"),
        text(event, "/reason"),
        about,
        text(event, "/involvedObject/fieldPath"),
        source,
        text(event, "/message").trim(),
        clock::age(first, now),
        count.to_string(),
        name(event),
    ])
}
