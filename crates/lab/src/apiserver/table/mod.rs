//! Tables: what `kubectl get` prints. The server makes the cells; kubectl only aligns them.
//!
//! Custom resources have the columns of their definition, after the name. As on a real server a JSONPath with `[*]` shows its
//! first match only. Built-in kinds have the few columns of [`BUILTIN`].

mod jsonpath;

use jiff::Timestamp;
use serde_json::{Value, json};

use super::clock;
use super::meta;
use jsonpath::JsonPath;

/// One entry of `additionalPrinterColumns`.
#[derive(Clone)]
pub struct PrinterColumn {
    name: String,
    kind: String,
    format: String,
    description: String,
    priority: i64,
    path: JsonPath,
}

/// Kind, header, type, path, priority: what is not 0 shows with `-o wide`.
const BUILTIN: &[(&str, &str, &str, &str, i64)] = &[
    ("Event", "Last Seen", "date", ".metadata.creationTimestamp", 0),
    ("Event", "Type", "string", ".type", 0),
    ("Event", "Reason", "string", ".reason", 0),
    ("Event", "Object", "string", ".involvedObject.name", 0),
    ("Event", "Message", "string", ".message", 0),
    ("Lease", "Holder", "string", ".spec.holderIdentity", 0),
    ("Namespace", "Status", "string", ".status.phase", 0),
    ("Node", "Status", "string", r#".status.conditions[?(@.status=="True")].type"#, 0),
    ("Node", "Internal-IP", "string", ".status.addresses[*].address", 1),
    ("Pod", "Status", "string", ".status.phase", 0),
    ("Pod", "IP", "string", ".status.podIP", 1),
    ("Pod", "Node", "string", ".spec.nodeName", 1),
];

/// The columns of a built-in kind, and its age.
pub(super) fn builtin(kind: &str) -> Vec<PrinterColumn> {
    let own = BUILTIN.iter().filter(|line| line.0 == kind);
    let entry = |&(_, name, kind, path, priority): &(_, &str, &str, &str, _)| {
        PrinterColumn::from_definition(&json!({"name": name, "type": kind, "jsonPath": path, "priority": priority}))
    };
    own.map(entry).chain([PrinterColumn::age()]).collect()
}

impl PrinterColumn {
    pub fn from_definition(entry: &Value) -> Self {
        Self {
            name: meta::text(entry, "/name").to_owned(),
            kind: meta::text(entry, "/type").to_owned(),
            format: meta::text(entry, "/format").to_owned(),
            description: meta::text(entry, "/description").to_owned(),
            priority: entry["priority"].as_i64().unwrap_or_default(),
            path: JsonPath::parse(meta::text(entry, "/jsonPath")),
        }
    }

    pub fn age() -> Self {
        Self::from_definition(&json!({"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}))
    }

    fn cell(&self, object: &Value, now: Timestamp) -> Value {
        let Some(found) = self.path.first(object).filter(|value| !value.is_null()) else {
            return Value::Null;
        };
        match (self.kind.as_str(), found) {
            ("date", Value::String(stamp)) => json!(clock::age(stamp, now)),
            ("string", Value::String(_)) => found.clone(),
            ("string", other) => json!(other.to_string()),
            ("integer" | "number", Value::Number(_)) | ("boolean", Value::Bool(_)) => found.clone(),
            _ => Value::Null,
        }
    }

    fn definition(&self) -> Value {
        column(&self.name, &self.kind, &self.format, &self.description, self.priority)
    }
}

fn column(name: &str, kind: &str, format: &str, description: &str, priority: i64) -> Value {
    json!({"name": name, "type": kind, "format": format, "description": description, "priority": priority})
}

pub(super) fn definitions(columns: &[PrinterColumn]) -> Value {
    let name = column("Name", "string", "name", "Name of the object, unique in its scope", 0);
    std::iter::once(name).chain(columns.iter().map(PrinterColumn::definition)).collect()
}

pub(super) fn cells(columns: &[PrinterColumn], object: &Value, now: Timestamp) -> Value {
    let name = json!(meta::name(object));
    std::iter::once(name).chain(columns.iter().map(|column| column.cell(object, now))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::apiserver::crd;

    #[test]
    fn egress_ip_columns() {
        let kinds = crd::kinds(&crd::tests::egress_ips());
        let columns = &kinds[0].columns;
        let headers: Vec<Value> =
            definitions(columns).as_array().into_iter().flatten().map(|column| column["name"].clone()).collect();
        assert_eq!(headers, ["Name", "EgressIPs", "Assigned Node", "Assigned EgressIPs"]);
        let now = Timestamp::UNIX_EPOCH;
        let mut object = json!({"metadata": {"name": "e"}, "spec": {"egressIPs": ["1.1.1.1", "2.2.2.2"]}});
        assert_eq!(cells(columns, &object, now), json!(["e", "1.1.1.1", null, null]));
        object["status"] =
            json!({"items": [{"node": "n1", "egressIP": "1.1.1.1"}, {"node": "n2", "egressIP": "2.2.2.2"}]});
        assert_eq!(cells(columns, &object, now), json!(["e", "1.1.1.1", "n1", "1.1.1.1"]));
    }
}
