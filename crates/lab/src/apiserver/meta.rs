//! Reading and writing the parts of an object that every kind has.
//!
//! Objects are plain JSON values. These functions are total: a part of the wrong type reads as absent (validation names it
//! elsewhere), and writing makes the maps on the way.

use serde_json::{Map, Value};

pub(super) fn text<'a>(object: &'a Value, pointer: &str) -> &'a str {
    object.pointer(pointer).and_then(Value::as_str).unwrap_or_default()
}

pub(super) fn name(object: &Value) -> &str {
    text(object, "/metadata/name")
}

pub(super) fn namespace(object: &Value) -> &str {
    text(object, "/metadata/namespace")
}

pub(super) fn uid(object: &Value) -> &str {
    text(object, "/metadata/uid")
}

pub(super) fn resource_version(object: &Value) -> &str {
    text(object, "/metadata/resourceVersion")
}

pub(super) fn is_terminating(object: &Value) -> bool {
    object.pointer("/metadata/deletionTimestamp").is_some()
}

pub(super) fn finalizers(object: &Value) -> Vec<&str> {
    let listed = object.pointer("/metadata/finalizers").and_then(Value::as_array);
    listed.map(|all| all.iter().filter_map(Value::as_str).collect()).unwrap_or_default()
}

/// The metadata map, made where it is missing.
pub(super) fn metadata_mut(object: &mut Value) -> &mut Map<String, Value> {
    map_mut(object, "metadata")
}

/// A map member of an object, made where it is missing or of another type.
pub(super) fn map_mut<'a>(object: &'a mut Value, field: &str) -> &'a mut Map<String, Value> {
    as_map(as_map(object).entry(field).or_insert_with(|| Value::Object(Map::new())))
}

pub(super) fn as_map(value: &mut Value) -> &mut Map<String, Value> {
    if !value.is_object() {
        *value = Value::Object(Map::new());
    }
    match value {
        Value::Object(map) => map,
        _ => unreachable!("it was made an object above"),
    }
}

/// Put `value` under `field` of `map`, or take the field away where there is none.
pub(super) fn set_or_remove(map: &mut Map<String, Value>, field: &str, value: Option<Value>) {
    match value {
        Some(value) => map.insert(field.to_owned(), value),
        None => map.remove(field),
    };
}
