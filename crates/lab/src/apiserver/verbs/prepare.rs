//! What a server (or one of its controllers) fills into built-in objects.

use serde_json::{Value, json};

use super::super::kind::{self, Kind};
use super::super::{crd, meta};

/// A new object, before validation.
pub(crate) fn for_create(kind: &Kind, object: &mut Value) {
    let traits = kind.traits;
    if traits.status_subresource && !traits.create_keeps_status {
        meta::as_map(object).remove("status");
    }
    match &*kind.storage {
        kind::NAMESPACES => {
            let name = json!(meta::name(object));
            object["spec"] = json!({"finalizers": ["kubernetes"]});
            object["status"] = json!({"phase": "Active"});
            let labels = meta::metadata_mut(object).entry("labels").or_insert_with(|| json!({}));
            meta::as_map(labels).insert("kubernetes.io/metadata.name".into(), name);
        }
        "pods" => {
            let spec = meta::map_mut(object, "spec");
            for (field, default) in [
                ("restartPolicy", json!("Always")),
                ("dnsPolicy", json!("ClusterFirst")),
                ("schedulerName", json!("default-scheduler")),
                ("terminationGracePeriodSeconds", json!(30)),
            ] {
                spec.entry(field).or_insert(default);
            }
            object["status"] = json!({"phase": "Pending", "qosClass": "BestEffort"});
        }
        _ => {}
    }
}

/// Any object, before it is stored.
pub(crate) fn for_store(kind: &Kind, object: &mut Value) {
    match &*kind.storage {
        kind::CRDS => crd::establish(object),
        "nodes" => pair(object, "spec", "podCIDR", "podCIDRs", |one| one.clone(), |first| Some(first.clone())),
        "pods" => pair(object, "status", "podIP", "podIPs", |one| json!({"ip": one}), |first| first.get("ip").cloned()),
        _ => {}
    }
}

/// Fields that once held one value and now have a list beside them say the same: the single one is the first of the list.
fn pair(
    object: &mut Value,
    part: &str,
    single: &str,
    list: &str,
    to_item: impl Fn(&Value) -> Value,
    of_item: impl Fn(&Value) -> Option<Value>,
) {
    let Some(map) = object.get_mut(part).and_then(Value::as_object_mut) else { return };
    let first = map.get(list).and_then(|items| items.get(0)).and_then(of_item);
    match (map.get(single).cloned(), first) {
        (None, Some(first)) => drop(map.insert(single.to_owned(), first)),
        (Some(one), first) if first.as_ref() != Some(&one) => drop(map.insert(list.to_owned(), json!([to_item(&one)]))),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn single_and_listed_addresses_agree() {
        let pods = kind::builtin("", "pods").expect("pods are built in");
        let stored = |status: Value| {
            let mut pod = json!({"status": status});
            for_store(&pods, &mut pod);
            pod["status"].clone()
        };
        let both = json!({"podIP": "10.0.0.1", "podIPs": [{"ip": "10.0.0.1"}, {"ip": "fd00::1"}]});
        assert_eq!(stored(json!({"podIPs": both["podIPs"]})), both);
        assert_eq!(stored(both.clone()), both);
        assert_eq!(stored(json!({"podIP": "10.0.0.1"})), json!({"podIP": "10.0.0.1", "podIPs": [{"ip": "10.0.0.1"}]}));
        assert_eq!(stored(json!({"phase": "Pending"})), json!({"phase": "Pending"}));
    }
}
