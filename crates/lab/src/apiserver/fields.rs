//! Which manager owns which field: the bookkeeping of `metadata.managedFields`.
//!
//! A path is a list of steps in the notation of FieldsV1: `f:name` for a field, `k:{"type":"Ready"}` for an item of a keyed
//! list, `v:"x"` for a member of a set. Every leaf has one path; so has every item of a keyed list, so that it can be owned
//! and removed as a whole. Lists without keys are leaves, and so are
//! maps that the schema calls atomic.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use super::kind::Kind;
use super::{clock, meta};

/// How a list merges: as a whole, as a set of scalars, or by the keys of its items.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListType {
    Atomic,
    Set,
    Map(Vec<String>),
}

pub(super) type Path = Vec<String>;
pub(super) type Leaves = BTreeMap<Path, Value>;

/// The fields that the server owns; no manager does.
const SYSTEM: [&str; 10] = [
    "name",
    "namespace",
    "uid",
    "creationTimestamp",
    "resourceVersion",
    "generation",
    "managedFields",
    "selfLink",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
];

/// The key of an item in a keyed list, as its step shows it. A missing protocol is TCP, as everywhere in Kubernetes.
pub(super) fn item_key(item: &Value, keys: &[String]) -> String {
    let fallback = |key: &str| {
        if key == "protocol" { json!("TCP") } else { Value::Null }
    };
    let pairs = keys.iter().map(|key| (key.clone(), item.get(key).cloned().unwrap_or_else(|| fallback(key))));
    Value::Object(pairs.collect()).to_string()
}

/// Every owned path of an object with its value (null for an item itself).
pub(super) fn leaves(kind: &Kind, object: &Value) -> Leaves {
    let mut found = Leaves::new();
    for (field, value) in object.as_object().into_iter().flatten() {
        match field.as_str() {
            "apiVersion" | "kind" => {}
            "metadata" => {
                for (name, value) in value.as_object().into_iter().flatten() {
                    if !SYSTEM.contains(&name.as_str()) {
                        let mut walk = FieldWalk { kind, names: vec![field.clone(), name.clone()], found: &mut found };
                        walk.visit(value, &vec![format!("f:{field}"), format!("f:{name}")]);
                    }
                }
            }
            _ => {
                let mut walk = FieldWalk { kind, names: vec![field.clone()], found: &mut found };
                walk.visit(value, &vec![format!("f:{field}")]);
            }
        }
    }
    found
}

struct FieldWalk<'a> {
    kind: &'a Kind,
    names: Vec<String>,
    found: &'a mut Leaves,
}

impl FieldWalk<'_> {
    fn visit(&mut self, value: &Value, path: &Path) {
        match value {
            Value::Object(map) if !map.is_empty() && !self.kind.is_atomic_map(&self.names) => {
                self.visit_map(map, path);
            }
            Value::Array(items) if !items.is_empty() => match self.kind.list_type(&self.names) {
                ListType::Atomic => drop(self.found.insert(path.clone(), value.clone())),
                ListType::Set => {
                    for item in items {
                        self.found.insert(extended(path, format!("v:{item}")), item.clone());
                    }
                }
                ListType::Map(keys) => {
                    for item in items {
                        let path = extended(path, format!("k:{}", item_key(item, &keys)));
                        self.visit_map(item.as_object().unwrap_or(&Map::new()), &path);
                        self.found.insert(path, Value::Null);
                    }
                }
            },
            _ => drop(self.found.insert(path.clone(), value.clone())),
        }
    }

    fn visit_map(&mut self, map: &Map<String, Value>, path: &Path) {
        for (name, child) in map {
            self.names.push(name.clone());
            self.visit(child, &extended(path, format!("f:{name}")));
            self.names.pop();
        }
    }
}

fn extended(path: &Path, step: String) -> Path {
    let mut longer = path.clone();
    longer.push(step);
    longer
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Operation {
    Apply,
    Update,
}

/// One entry of `managedFields`.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Manager {
    pub name: String,
    pub operation: Operation,
    pub subresource: String,
    pub api_version: String,
    pub time: String,
    pub fields: BTreeSet<Path>,
}

impl Manager {
    pub(super) fn new(name: &str, operation: Operation, subresource: &str, kind: &Kind) -> Self {
        Self {
            name: name.to_owned(),
            operation,
            subresource: subresource.to_owned(),
            api_version: kind.api_version(),
            time: clock::now(),
            fields: BTreeSet::new(),
        }
    }

    pub(super) fn is_same(&self, other: &Self) -> bool {
        self.name == other.name && self.operation == other.operation && self.subresource == other.subresource
    }

    fn from_json(entry: &Value) -> Option<Self> {
        let mut fields = BTreeSet::new();
        collect_paths(entry.get("fieldsV1")?, &Path::new(), &mut fields);
        Some(Self {
            name: meta::text(entry, "/manager").to_owned(),
            operation: if entry["operation"] == "Apply" { Operation::Apply } else { Operation::Update },
            subresource: meta::text(entry, "/subresource").to_owned(),
            api_version: meta::text(entry, "/apiVersion").to_owned(),
            time: meta::text(entry, "/time").to_owned(),
            fields,
        })
    }

    fn to_json(&self) -> Value {
        let mut entry = json!({
            "manager": self.name,
            "operation": format!("{:?}", self.operation),
            "apiVersion": self.api_version,
            "time": self.time,
            "fieldsType": "FieldsV1",
            "fieldsV1": to_fields_v1(&self.fields),
        });
        if !self.subresource.is_empty() {
            entry["subresource"] = json!(self.subresource);
        }
        entry
    }
}

fn collect_paths(node: &Value, path: &Path, found: &mut BTreeSet<Path>) {
    let Some(map) = node.as_object() else { return };
    if map.is_empty() {
        found.insert(path.clone());
    }
    for (step, child) in map {
        if step == "." {
            found.insert(path.clone());
        } else {
            collect_paths(child, &extended(path, step.clone()), found);
        }
    }
}

fn to_fields_v1(fields: &BTreeSet<Path>) -> Value {
    let mut root = json!({});
    for path in fields {
        let mut node = &mut root;
        for step in path {
            node = meta::as_map(node).entry(step.clone()).or_insert_with(|| json!({}));
        }
    }
    // A path that others lead through is owned itself, which a dot says.
    for path in fields {
        let mut node = &mut root;
        for step in path {
            node = meta::as_map(node).entry(step.clone()).or_insert_with(|| json!({}));
        }
        let map = meta::as_map(node);
        if !map.is_empty() {
            map.insert(".".into(), json!({}));
        }
    }
    root
}

pub(super) fn managers(object: &Value) -> Vec<Manager> {
    let entries = object.pointer("/metadata/managedFields").and_then(Value::as_array);
    entries.into_iter().flatten().filter_map(Manager::from_json).collect()
}

pub(super) fn set_managers(object: &mut Value, managers: &[Manager]) {
    let mut managers: Vec<&Manager> = managers.iter().filter(|manager| !manager.fields.is_empty()).collect();
    // So that who applies what he has applied before changes nothing.
    managers.sort_by_key(|manager| (manager.operation, &manager.time, &manager.name));
    let entries: Vec<Value> = managers.into_iter().map(Manager::to_json).collect();
    let entries = (!entries.is_empty()).then_some(Value::Array(entries));
    meta::set_or_remove(meta::metadata_mut(object), "managedFields", entries);
}

/// Record that `updater` wrote `after` over `before`: it owns what it changed, and what is gone has no owner.
pub(super) fn track_update(kind: &Kind, before: Option<&Value>, after: &mut Value, updater: Manager) {
    let old = before.map(|before| leaves(kind, before)).unwrap_or_default();
    let new = leaves(kind, after);
    let changed: BTreeSet<Path> =
        new.iter().filter(|(path, value)| old.get(*path) != Some(value)).map(|(path, _)| path.clone()).collect();
    // A write may bring the managers along (kubectl does so when it migrates them); without any, the known ones stay.
    let mut known = managers(after);
    if known.is_empty() {
        known = before.map(managers).unwrap_or_default();
    }
    for manager in &mut known {
        let own = manager.is_same(&updater);
        manager.fields.retain(|path| new.contains_key(path) && (own || !changed.contains(path)));
    }
    if !changed.is_empty() {
        match known.iter_mut().find(|manager| manager.is_same(&updater)) {
            Some(entry) => {
                entry.fields.extend(changed);
                entry.time = updater.time;
            }
            None => known.push(Manager { fields: changed, ..updater }),
        }
    }
    set_managers(after, &known);
}

/// Equal but for the times at which managers wrote?
pub(super) fn is_same_object(one: &Value, other: &Value) -> bool {
    let stripped = |object: &Value| {
        let mut object = object.clone();
        let known = managers(&object);
        let owned: Vec<(String, Operation, String, BTreeSet<Path>)> = known
            .into_iter()
            .map(|manager| (manager.name, manager.operation, manager.subresource, manager.fields))
            .collect();
        let metadata = meta::metadata_mut(&mut object);
        metadata.remove("managedFields");
        metadata.remove("resourceVersion");
        (object, owned)
    };
    stripped(one) == stripped(other)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::apiserver::kind;

    #[test]
    fn paths_survive_the_round_trip() {
        let nodes = kind::builtin("", "nodes").expect("nodes are built in");
        let object = json!({
            "metadata": {"name": "n", "labels": {"a": "b"}, "finalizers": ["x/y"]},
            "status": {"conditions": [{"type": "Ready", "status": "True"}], "empty": {}},
        });
        let paths: BTreeSet<Path> = leaves(&nodes, &object).into_keys().collect();
        let encoded = to_fields_v1(&paths);
        assert_eq!(encoded["f:metadata"]["f:finalizers"]["v:\"x/y\""], json!({}));
        assert_eq!(encoded["f:status"]["f:conditions"]["k:{\"type\":\"Ready\"}"]["."], json!({}));
        let mut decoded = BTreeSet::new();
        collect_paths(&encoded, &Path::new(), &mut decoded);
        assert_eq!(decoded, paths);
    }

    #[test]
    fn an_update_takes_what_it_changes() {
        let nodes = kind::builtin("", "nodes").expect("nodes are built in");
        let updater = |name: &str| Manager::new(name, Operation::Update, "", &nodes);
        let mut first = json!({"metadata": {"labels": {"a": "1", "b": "1"}}});
        track_update(&nodes, None, &mut first, updater("one"));
        let mut second = json!({"metadata": {"labels": {"a": "2", "b": "1"}}});
        track_update(&nodes, Some(&first), &mut second, updater("two"));
        let label = |name: &str| vec!["f:metadata".to_owned(), "f:labels".to_owned(), format!("f:{name}")];
        let owned: Vec<(String, BTreeSet<Path>)> =
            managers(&second).into_iter().map(|manager| (manager.name, manager.fields)).collect();
        assert_eq!(owned, [("one".into(), BTreeSet::from([label("b")])), ("two".into(), BTreeSet::from([label("a")]))]);
        assert!(is_same_object(&second, &second.clone()));
    }
}
