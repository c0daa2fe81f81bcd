//! Strategic merge patch for built-in kinds: as a merge patch, but keyed lists merge by key.
//!
//! Directives: `$patch: replace|delete|merge` in maps and items, `$retainKeys`, `$deleteFromPrimitiveList/<list>` and
//! `$setElementOrder/<list>` (listed items come first, in that order; a real server interleaves more finely).

use serde_json::{Map, Value};

use crate::apiserver::fields::ListType;
use crate::apiserver::kind::Kind;
use crate::apiserver::meta;

const ORDER: &str = "$setElementOrder/";
const DELETE: &str = "$deleteFromPrimitiveList/";

pub(crate) fn merge(kind: &Kind, target: &mut Value, patch: &Value) {
    if let Value::Object(fields) = patch {
        merge_map(kind, &mut Vec::new(), target, fields);
    }
}

fn merge_map(kind: &Kind, path: &mut Vec<String>, target: &mut Value, patch: &Map<String, Value>) {
    let map = meta::as_map(target);
    if let Some("replace" | "delete") = patch.get("$patch").and_then(Value::as_str) {
        map.clear();
    }
    if let Some(retained) = patch.get("$retainKeys").and_then(Value::as_array) {
        map.retain(|name, _| retained.iter().any(|kept| kept == name));
    }
    for (name, value) in patch.iter().filter(|(name, _)| !name.starts_with('$')) {
        path.push(name.clone());
        match value {
            Value::Null => drop(map.remove(name)),
            Value::Object(fields) => {
                merge_map(kind, path, map.entry(name.clone()).or_insert(Value::Null), fields);
            }
            Value::Array(items) => merge_list(kind, path, map.entry(name.clone()).or_insert(Value::Null), items),
            scalar => drop(map.insert(name.clone(), scalar.clone())),
        }
        path.pop();
    }
    for (name, value) in patch {
        if let (Some(list), Value::Array(gone)) = (name.strip_prefix(DELETE), value)
            && let Some(items) = map.get_mut(list).and_then(Value::as_array_mut)
        {
            items.retain(|item| !gone.contains(item));
        }
        if let (Some(list), Value::Array(order)) = (name.strip_prefix(ORDER), value)
            && let Some(items) = map.get_mut(list).and_then(Value::as_array_mut)
        {
            path.push(list.to_owned());
            reorder(&kind.list_type(path), items, order);
            path.pop();
        }
    }
}

fn merge_list(kind: &Kind, path: &mut Vec<String>, target: &mut Value, patch: &[Value]) {
    let mut items = target.as_array().cloned().unwrap_or_default();
    if patch.iter().any(|item| item["$patch"] == "replace") {
        items.clear();
    }
    let patch_order = patch;
    let patch = patch.iter().filter(|item| item["$patch"] != "replace");
    match kind.list_type(path) {
        ListType::Atomic => items = patch.cloned().collect(),
        ListType::Set => {
            for member in patch {
                if !items.contains(member) {
                    items.push(member.clone());
                }
            }
        }
        ListType::Map(keys) => {
            let key = keys.first().map_or("name", String::as_str);
            for change in patch {
                let found = items.iter().position(|item| item.get(key) == change.get(key));
                match (found, change.as_object()) {
                    (Some(at), _) if change["$patch"] == "delete" => drop(items.remove(at)),
                    (None, _) if change["$patch"] == "delete" => {}
                    (Some(at), Some(fields)) => merge_map(kind, path, &mut items[at], fields),
                    (None, Some(fields)) => {
                        let mut item = Value::Null;
                        merge_map(kind, path, &mut item, fields);
                        items.push(item);
                    }
                    (_, None) => items.push(change.clone()),
                }
            }
        }
    }
    if let ListType::Map(keys) = kind.list_type(path) {
        let key = keys.first().map_or("name", String::as_str);
        items = interleave(key, target.as_array().map_or(&[], Vec::as_slice), patch_order, items);
    }
    *target = Value::Array(items);
}

/// What the patch names, in its order, and what it does not name, in the order that was: the first goes before the second,
/// unless both were there and stood the other way round.
fn interleave(key: &str, before: &[Value], patch: &[Value], items: Vec<Value>) -> Vec<Value> {
    let place = |list: &[Value], item: &Value| list.iter().position(|other| other.get(key) == item.get(key));
    let (mut named, others): (Vec<_>, Vec<_>) = items.into_iter().partition(|item| place(patch, item).is_some());
    named.sort_by_key(|item| place(patch, item));
    let mut others = others.into_iter().peekable();
    let mut order = Vec::new();
    for item in named {
        let stands_behind =
            |other: &Value| place(before, other).zip(place(before, &item)).is_some_and(|(other, item)| other < item);
        while let Some(other) = others.next_if(stands_behind) {
            order.push(other);
        }
        order.push(item);
    }
    order.extend(others);
    order
}

/// Items that the order lists come first, in its order; the others keep theirs.
fn reorder(list_type: &ListType, items: &mut [Value], order: &[Value]) {
    let rank = |item: &Value| {
        let is_it = |listed: &Value| match list_type {
            ListType::Map(keys) => keys.first().is_some_and(|key| listed.get(key) == item.get(key)),
            _ => listed == item,
        };
        order.iter().position(is_it).unwrap_or(order.len())
    };
    items.sort_by_key(rank);
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::apiserver::kind;

    fn merged(plural: &str, target: Value, patch: Value) -> Value {
        let kind = kind::builtin("", plural).expect("a built-in kind");
        let mut target = target;
        merge(&kind, &mut target, &patch);
        target
    }

    #[test]
    fn conditions_merge_by_type() {
        let node = json!({"status": {"conditions": [{"type": "Ready", "status": "True", "reason": "Ok"}, {"type": "Disk", "status": "False"}]}});
        let patch = json!({"status": {"$setElementOrder/conditions": [{"type": "Disk"}, {"type": "Ready"}],
                                      "conditions": [{"type": "Ready", "status": "Unknown"}]}});
        assert_eq!(
            merged("nodes", node, patch),
            json!({"status": {"conditions": [{"type": "Disk", "status": "False"}, {"type": "Ready", "status": "Unknown", "reason": "Ok"}]}})
        );
    }

    #[test]
    fn new_items_go_before_those_that_a_patch_does_not_name() {
        let types = |types: &[&str]| -> Value { types.iter().map(|one| json!({"type": one})).collect() };
        let ordered = |before: &[&str], patch: &[&str]| {
            let node = |list| json!({"status": {"conditions": list}});
            merged("nodes", node(types(before)), node(types(patch)))["status"]["conditions"].clone()
        };
        assert_eq!(ordered(&["Ready"], &["Disk"]), types(&["Disk", "Ready"]));
        assert_eq!(ordered(&["Ready", "X"], &["Ready", "Disk"]), types(&["Ready", "Disk", "X"]));
        assert_eq!(ordered(&["X", "Ready"], &["Ready"]), types(&["X", "Ready"]));
    }

    #[test]
    fn items_are_deleted_by_key() {
        let pod = json!({"spec": {"containers": [{"name": "a", "env": [{"name": "X", "value": "1"}]}, {"name": "b"}]}});
        let patch = json!({"spec": {"containers": [{"name": "b", "$patch": "delete"}, {"name": "a", "env": [{"name": "Y", "value": "2"}]}]}});
        assert_eq!(
            merged("pods", pod, patch),
            json!({"spec": {"containers": [{"name": "a", "env": [{"name": "Y", "value": "2"}, {"name": "X", "value": "1"}]}]}})
        );
    }

    #[test]
    fn directives() {
        let node =
            json!({"metadata": {"labels": {"a": "1"}, "finalizers": ["x", "y"]}, "spec": {"taints": [{"key": "k"}]}});
        let patch = json!({"metadata": {"labels": {"$patch": "replace", "b": "2"}, "$deleteFromPrimitiveList/finalizers": ["x"]},
                           "spec": {"taints": [{"key": "l"}]}});
        assert_eq!(
            merged("nodes", node, patch),
            json!({"metadata": {"labels": {"b": "2"}, "finalizers": ["y"]}, "spec": {"taints": [{"key": "l"}]}})
        );
        let list = merged(
            "nodes",
            json!({"status": {"addresses": [{"type": "InternalIP", "address": "1"}]}}),
            json!({"status": {"addresses": [{"$patch": "replace"}, {"type": "Hostname", "address": "h"}]}}),
        );
        assert_eq!(list, json!({"status": {"addresses": [{"type": "Hostname", "address": "h"}]}}));
    }
}
