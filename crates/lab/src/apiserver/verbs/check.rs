//! What a server refuses, beyond the schema: names, labels, and per kind the rules that clients of the lab can run into.

use std::sync::LazyLock;

use regex::Regex;
use serde_json::{Value, json};

use super::super::kind::{self, Kind};
use super::super::meta::{self, text};
use super::super::status::StatusCause;
use super::super::{clock, crd};

const SUBDOMAIN_RULE: &str = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character";
const LABEL_RULE: &str = "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character";
const KEY_RULE: &str = "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character";

const METADATA: [&str; 15] = [
    "annotations",
    "creationTimestamp",
    "deletionGracePeriodSeconds",
    "deletionTimestamp",
    "finalizers",
    "generateName",
    "generation",
    "labels",
    "managedFields",
    "name",
    "namespace",
    "ownerReferences",
    "resourceVersion",
    "selfLink",
    "uid",
];

/// Take away what metadata cannot have, and nulls, which are as good as absent; the answer names the unknown.
pub(crate) fn prune_metadata(object: &mut Value) -> Vec<String> {
    let mut unknown = Vec::new();
    meta::metadata_mut(object).retain(|field, value| {
        let is_known = METADATA.contains(&field.as_str());
        if !is_known {
            unknown.push(format!("metadata.{field}"));
        }
        is_known && !value.is_null()
    });
    unknown
}

pub(crate) fn metadata(kind: &Kind, object: &Value) -> Vec<StatusCause> {
    let mut causes = Vec::new();
    let name = meta::name(object);
    if name.is_empty() {
        causes.push(StatusCause::required("metadata.name", "name or generateName is required"));
    } else if !is_subdomain(name, if &*kind.storage == kind::NAMESPACES { 63 } else { 253 }) {
        causes.push(StatusCause::invalid("metadata.name", &json!(name), SUBDOMAIN_RULE));
    }
    for (field, has_label_values) in [("labels", true), ("annotations", false)] {
        let path = format!("metadata.{field}");
        let map = object.pointer(&format!("/metadata/{field}"));
        if map.is_some_and(|map| !map.is_object() && !map.is_null()) {
            causes.push(StatusCause::invalid(path.as_str(), map.unwrap_or(&Value::Null), "must be a map of strings"));
        }
        for (key, value) in map.and_then(Value::as_object).into_iter().flatten() {
            if !is_qualified(key) {
                causes.push(StatusCause::invalid(path.as_str(), &json!(key), KEY_RULE));
            }
            match value.as_str() {
                None => causes.push(StatusCause::invalid(format!("{path}.{key}"), value, "must be a string")),
                Some(value) if has_label_values && !is_label_value(value) => {
                    causes.push(StatusCause::invalid(path.as_str(), &json!(value), LABEL_RULE));
                }
                Some(_) => {}
            }
        }
    }
    causes
}

fn is_subdomain(name: &str, most: usize) -> bool {
    const LABELS: &str = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$";
    static SUBDOMAIN: LazyLock<Regex> = LazyLock::new(|| Regex::new(LABELS).expect("a valid expression"));
    name.len() <= most && SUBDOMAIN.is_match(name)
}

fn is_name_part(text: &str) -> bool {
    const CHARACTERS: &str = "^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$";
    static NAME_PART: LazyLock<Regex> = LazyLock::new(|| Regex::new(CHARACTERS).expect("a valid expression"));
    text.len() <= 63 && NAME_PART.is_match(text)
}

fn is_label_value(value: &str) -> bool {
    value.is_empty() || is_name_part(value)
}

fn is_qualified(key: &str) -> bool {
    match key.split_once('/') {
        Some((prefix, name)) => is_subdomain(&prefix.to_lowercase(), 253) && is_name_part(name),
        None => is_name_part(key),
    }
}

/// The rules of single kinds.
pub(crate) fn specific(kind: &Kind, object: &Value, before: Option<&Value>) -> Vec<StatusCause> {
    match &*kind.storage {
        kind::CRDS => crd::validate(object),
        "events" => event(kind, object, before),
        "leases.coordination.k8s.io" => lease(object),
        "pods" => pod(object),
        _ => Vec::new(),
    }
}

fn lease(lease: &Value) -> Vec<StatusCause> {
    let mut causes = Vec::new();
    if let Some(duration) = lease.pointer("/spec/leaseDurationSeconds").and_then(Value::as_i64).filter(|&d| d <= 0) {
        causes.push(StatusCause::invalid("spec.leaseDurationSeconds", &json!(duration), "must be greater than 0"));
    }
    if let Some(count) = lease.pointer("/spec/leaseTransitions").and_then(Value::as_i64).filter(|&count| count < 0) {
        causes.push(StatusCause::invalid("spec.leaseTransitions", &json!(count), "must be greater than or equal to 0"));
    }
    for field in ["acquireTime", "renewTime"] {
        causes.extend(unreadable_time(lease, &format!("/spec/{field}")));
    }
    causes
}

fn unreadable_time(object: &Value, pointer: &str) -> Option<StatusCause> {
    let value = object.pointer(pointer).filter(|value| !value.is_null())?;
    let is_readable = value.as_str().is_some_and(|stamp| clock::age_secs(stamp, jiff::Timestamp::UNIX_EPOCH).is_some());
    let field = pointer[1..].replace('/', ".");
    (!is_readable).then(|| StatusCause::invalid(field, value, "must be a time in RFC 3339"))
}

/// Events about cluster-scoped objects live in `default` (or `kube-system`); the new API wants more fields than the old.
fn event(kind: &Kind, event: &Value, before: Option<&Value>) -> Vec<StatusCause> {
    let mut causes = Vec::new();
    let (own, about) = (meta::namespace(event), text(event, "/involvedObject/namespace"));
    let is_home = if about.is_empty() { matches!(own, "default" | "kube-system") } else { own == about };
    if !is_home {
        causes.push(StatusCause::invalid("involvedObject.namespace", &json!(about), "does not match event.namespace"));
    }
    if kind.group != "events.k8s.io" {
        return causes;
    }
    if before.is_none() {
        if text(event, "/eventTime").is_empty() {
            causes.push(StatusCause::required("eventTime", ""));
        }
        for (pointer, field) in [
            ("/reportingComponent", "reportingController"),
            ("/reportingInstance", "reportingInstance"),
            ("/action", "action"),
            ("/reason", "reason"),
        ] {
            match text(event, pointer) {
                "" => causes.push(StatusCause::required(field, "")),
                long if long.len() > 128 => {
                    causes.push(StatusCause::invalid(field, &json!(""), "can have at most 128 characters"));
                }
                _ => {}
            }
        }
    }
    if text(event, "/message").len() > 1024 {
        causes.push(StatusCause::invalid("note", &json!(""), "can have at most 1024 characters"));
    }
    let severity = text(event, "/type");
    if !matches!(severity, "Normal" | "Warning") {
        causes.push(StatusCause::invalid("type", &json!(severity), "has invalid value"));
    }
    causes
}

/// Containers must be named.
fn pod(pod: &Value) -> Vec<StatusCause> {
    let mut causes = Vec::new();
    let containers = pod.pointer("/spec/containers").and_then(Value::as_array);
    if containers.is_none_or(Vec::is_empty) {
        causes.push(StatusCause::required("spec.containers", ""));
    }
    for (index, container) in containers.into_iter().flatten().enumerate() {
        for field in ["name", "image"] {
            if text(container, &format!("/{field}")).is_empty() {
                causes.push(StatusCause::required(format!("spec.containers[{index}].{field}"), ""));
            }
        }
    }
    causes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_labels() {
        let nodes = kind::builtin("", "nodes").expect("nodes are built in");
        let fields = |metadata_of: Value| {
            let causes = metadata(&nodes, &json!({"metadata": metadata_of}));
            causes.into_iter().map(|cause| cause.field).collect::<Vec<_>>()
        };
        assert_eq!(
            fields(json!({"name": "node-1.example", "labels": {"k8s.ovn.org/egress-assignable": ""}})),
            Vec::<String>::new()
        );
        assert_eq!(fields(json!({"name": "Node_1"})), ["metadata.name"]);
        assert_eq!(fields(json!({"name": "n", "labels": {"a": "not valid"}})), ["metadata.labels"]);
        assert_eq!(fields(json!({"name": "n", "labels": {"a b": ""}})), ["metadata.labels"]);
        assert_eq!(fields(json!({"name": "n", "annotations": {"a": 1}})), ["metadata.annotations.a"]);
    }

    #[test]
    fn events_live_with_their_object() {
        let events = kind::builtin("", "events").expect("events are built in");
        let about = |namespace: &str, object: Value| {
            event(&events, &json!({"metadata": {"namespace": namespace}, "involvedObject": object}), None).len()
        };
        assert_eq!(about("default", json!({"kind": "Node"})), 0);
        assert_eq!(about("prod", json!({"kind": "Node"})), 1);
        assert_eq!(about("prod", json!({"kind": "Pod", "namespace": "prod"})), 0);
    }
}
