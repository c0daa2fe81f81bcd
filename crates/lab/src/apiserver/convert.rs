//! Events live under two API groups with different field names; they are stored in the form of the core group.

use serde_json::Value;

use super::kind::Kind;
use super::meta;

/// Core name and `events.k8s.io/v1` name of each field that differs.
const EVENT_FIELDS: [(&str, &str); 6] = [
    ("involvedObject", "regarding"),
    ("message", "note"),
    ("source", "deprecatedSource"),
    ("firstTimestamp", "deprecatedFirstTimestamp"),
    ("lastTimestamp", "deprecatedLastTimestamp"),
    ("count", "deprecatedCount"),
];

fn is_new_event(kind: &Kind) -> bool {
    kind.group == "events.k8s.io"
}

/// From the form that clients of this kind send to the stored one.
pub(super) fn to_stored(kind: &Kind, object: &mut Value) {
    if is_new_event(kind) {
        rename(object, EVENT_FIELDS.iter().map(|&(core, new)| (new, core)));
        rename(object, [("reportingController", "reportingComponent")].into_iter());
    }
}

/// From the stored form to the one that clients of this kind read.
pub(super) fn to_served(kind: &Kind, object: &mut Value) {
    if is_new_event(kind) {
        rename(object, EVENT_FIELDS.into_iter());
        rename(object, [("reportingComponent", "reportingController")].into_iter());
    }
    let map = meta::as_map(object);
    map.insert("apiVersion".into(), Value::String(kind.api_version()));
    map.insert("kind".into(), Value::String(kind.kind.clone()));
}

fn rename<'a>(object: &mut Value, pairs: impl Iterator<Item = (&'a str, &'a str)>) {
    let map = meta::as_map(object);
    for (from, to) in pairs {
        if let Some(value) = map.remove(from) {
            map.insert(to.to_owned(), value);
        }
    }
}
