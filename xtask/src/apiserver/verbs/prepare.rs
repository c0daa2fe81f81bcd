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
    if &*kind.storage == kind::CRDS {
        crd::establish(object);
    }
}
