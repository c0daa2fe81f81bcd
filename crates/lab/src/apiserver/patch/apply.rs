//! Server-side apply: merge what the manager applies, remove what it no longer applies, refuse what others own.
//!
//! Per leaf path: a value that differs from the live one and has another owner is a conflict (or taken, with force); an equal
//! value is shared. What this manager applied before, does not apply now and no other owns is removed.
//! Not done: moving ownership between API versions, unsetting defaults of the schema, unions.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::apiserver::fields::{self, ListType, Manager, Path, item_key};
use crate::apiserver::kind::Kind;
use crate::apiserver::meta;
use crate::apiserver::status::{ApiError, StatusCause};

/// The live object with the patch applied and its `managedFields` brought up to date.
pub(crate) fn apply(
    kind: &Kind,
    live: &Value,
    patch: &Value,
    applier: Manager,
    force: bool,
) -> Result<Value, ApiError> {
    let wanted = fields::leaves(kind, patch);
    let present = fields::leaves(kind, live);
    let mut managers = fields::managers(live);
    let mut causes = Vec::new();
    for (path, _) in wanted.iter().filter(|(path, value)| present.get(*path) != Some(value)) {
        for owner in managers.iter_mut().filter(|owner| !owner.is_same(&applier) && owner.fields.contains(path)) {
            if force {
                owner.fields.remove(path);
            } else {
                causes.push(conflict(owner, path));
            }
        }
    }
    if !causes.is_empty() {
        return Err(ApiError::apply_conflict(&causes));
    }

    let mut merged = live.clone();
    merge(kind, &mut Vec::new(), &mut merged, patch);
    let wanted: BTreeSet<Path> = wanted.into_keys().collect();
    let before = managers.iter().find(|manager| manager.is_same(&applier)).cloned();
    managers.retain(|manager| !manager.is_same(&applier));
    // Items follow their fields, so that an emptied item differs from a shared one.
    for path in before.iter().flat_map(|manager| manager.fields.iter().rev()) {
        let is_others = managers.iter().any(|manager| manager.fields.iter().any(|owned| owned.starts_with(path)));
        if !wanted.contains(path) && !is_others {
            remove(kind, &mut Vec::new(), &mut merged, path);
        }
    }

    let applier = match before {
        Some(before) if before.fields == wanted => before,
        _ => Manager { fields: wanted, ..applier },
    };
    managers.push(applier);
    let left = fields::leaves(kind, &merged);
    for manager in &mut managers {
        manager.fields.retain(|path| left.contains_key(path));
    }
    fields::set_managers(&mut merged, &managers);
    Ok(merged)
}

fn conflict(owner: &Manager, path: &Path) -> StatusCause {
    let field: String = path.iter().map(|step| shown(step)).collect();
    let through =
        if owner.subresource.is_empty() { String::new() } else { format!(" with subresource {:?}", owner.subresource) };
    let message = format!("conflict with {:?}{through} using {}", owner.name, owner.api_version);
    StatusCause { field, reason: "FieldManagerConflict", message }
}

/// A step of a path for people: `.name`, `[type="Ready"]`, `["x"]`.
fn shown(step: &str) -> String {
    match step.split_once(':') {
        Some(("f", name)) => format!(".{name}"),
        Some(("k", keys)) => {
            let keys: Value = serde_json::from_str(keys).unwrap_or_default();
            let pairs: Vec<String> =
                keys.as_object().into_iter().flatten().map(|(key, value)| format!("{key}={value}")).collect();
            format!("[{}]", pairs.join(","))
        }
        Some((_, member)) => format!("[={member}]"),
        None => step.to_owned(),
    }
}

fn merge(kind: &Kind, names: &mut Vec<String>, target: &mut Value, patch: &Value) {
    match patch {
        Value::Object(fields) if !kind.is_atomic_map(names) => {
            let map = meta::as_map(target);
            for (name, value) in fields {
                names.push(name.clone());
                merge(kind, names, map.entry(name.clone()).or_insert(Value::Null), value);
                names.pop();
            }
        }
        Value::Array(items) => {
            let mut merged = target.as_array().cloned().unwrap_or_default();
            match kind.list_type(names) {
                ListType::Atomic => merged.clone_from(items),
                ListType::Set => items.iter().for_each(|item| {
                    if !merged.contains(item) {
                        merged.push(item.clone());
                    }
                }),
                ListType::Map(keys) => {
                    for item in items {
                        let wanted = item_key(item, &keys);
                        match merged.iter_mut().find(|known| item_key(known, &keys) == wanted) {
                            Some(known) => merge(kind, names, known, item),
                            None => merged.push(item.clone()),
                        }
                    }
                }
            }
            *target = Value::Array(merged);
        }
        whole => *target = whole.clone(),
    }
}

/// Remove what a path leads to, and the maps and lists that become empty by it.
fn remove(kind: &Kind, names: &mut Vec<String>, target: &mut Value, path: &[String]) {
    let Some((step, rest)) = path.split_first() else {
        return;
    };
    match (step.split_once(':'), target) {
        (Some(("f", name)), Value::Object(map)) => {
            let Some(child) = map.get_mut(name) else {
                return;
            };
            if !rest.is_empty() {
                names.push(name.to_owned());
                remove(kind, names, child, rest);
                names.pop();
                let is_empty =
                    child.as_object().is_some_and(|map| map.is_empty()) || child.as_array().is_some_and(Vec::is_empty);
                if !is_empty {
                    return;
                }
            }
            map.remove(name);
        }
        (Some(("k", wanted)), Value::Array(items)) => {
            let ListType::Map(keys) = kind.list_type(names) else {
                return;
            };
            let Some(at) = items.iter().position(|item| item_key(item, &keys) == wanted) else {
                return;
            };
            if rest.is_empty() {
                items.remove(at);
            } else if !rest.first().is_some_and(|step| keys.iter().any(|key| step.strip_prefix("f:") == Some(key))) {
                remove(kind, names, &mut items[at], rest);
            }
        }
        (Some(("v", member)), Value::Array(items)) => {
            let member: Value = serde_json::from_str(member).unwrap_or_default();
            items.retain(|item| *item != member);
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::apiserver::fields::Operation;
    use crate::apiserver::kind;

    fn applied(live: &Value, patch: &Value, manager: &str, force: bool) -> Result<Value, ApiError> {
        let nodes = kind::builtin("", "nodes").expect("nodes are built in");
        apply(&nodes, live, patch, Manager::new(manager, Operation::Apply, "", &nodes), force)
    }

    fn labels(labels: Value) -> Value {
        json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n", "labels": labels}})
    }

    #[test]
    fn what_a_manager_drops_goes() {
        let one =
            applied(&json!({}), &labels(json!({"a": "1", "b": "1"})), "one", false).expect("nothing to conflict with");
        let two = applied(&one, &labels(json!({"b": "1"})), "two", false).expect("equal values are shared");
        let one = applied(&two, &labels(json!({})), "one", false).expect("nothing to conflict with");
        assert_eq!(one["metadata"]["labels"], json!({"b": "1"}));
        let gone = applied(&one, &labels(json!({"c": "1"})), "two", false).expect("nothing to conflict with");
        assert_eq!(gone["metadata"]["labels"], json!({"c": "1"}));
    }

    #[test]
    fn a_conflict_names_the_owner_and_force_takes() {
        let one = applied(&json!({}), &labels(json!({"a": "1"})), "one", false).expect("nothing to conflict with");
        let refusal = applied(&one, &labels(json!({"a": "2"})), "two", false).expect_err("owned by one");
        assert_eq!(refusal.code(), 409);
        assert_eq!(refusal.message, "Apply failed with 1 conflict: conflict with \"one\" using v1: .metadata.labels.a");
        let taken = applied(&one, &labels(json!({"a": "2"})), "two", true).expect("force");
        let owners: Vec<String> =
            fields::managers(&taken).into_iter().filter(|m| !m.fields.is_empty()).map(|m| m.name).collect();
        assert_eq!(owners, ["two"]);
    }

    #[test]
    fn items_of_keyed_lists_have_owners() {
        let status = |conditions: Value| json!({"status": {"conditions": conditions}});
        let one = applied(&json!({}), &status(json!([{"type": "A", "status": "True"}])), "one", false).expect("free");
        let two = applied(&one, &status(json!([{"type": "B", "status": "True"}])), "two", false).expect("free");
        assert_eq!(two["status"]["conditions"].as_array().map(Vec::len), Some(2));
        let left = applied(&two, &json!({}), "one", false).expect("free");
        assert_eq!(left["status"]["conditions"], json!([{"type": "B", "status": "True"}]));
    }
}
