//! Tables: what `kubectl get` prints. The server makes the cells; kubectl only aligns them.
//!
//! Custom resources have the columns of their definition, after the name. As on a real server a JSONPath with `[*]` shows its
//! first match only. Built-in kinds have the columns that people know from `kubectl`.

mod builtin;
mod jsonpath;

use jiff::Timestamp;
use serde_json::{Value, json};

use super::clock;
use super::meta;
use jsonpath::JsonPath;

#[derive(Clone)]
pub enum Columns {
    Builtin(&'static str),
    Custom(Vec<PrinterColumn>),
}

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
            ("integer", Value::Number(number)) => {
                number.as_i64().or_else(|| number.to_string().parse().ok()).map_or(Value::Null, |whole| json!(whole))
            }
            ("number", Value::Number(_)) | ("boolean", Value::Bool(_)) => found.clone(),
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

impl Columns {
    pub fn definitions(&self) -> Value {
        let name = column("Name", "string", "name", "Name of the object, unique in its scope", 0);
        match self {
            Self::Builtin(kind) => builtin::columns(kind)
                .iter()
                .map(|&(header, priority)| match header {
                    "Name" => column(header, "string", "name", "Name of the object, unique in its scope", priority),
                    _ => column(header, "string", "", "", priority),
                })
                .collect(),
            Self::Custom(columns) => {
                std::iter::once(name).chain(columns.iter().map(PrinterColumn::definition)).collect()
            }
        }
    }

    pub fn cells(&self, object: &Value, now: Timestamp) -> Value {
        match self {
            Self::Builtin(kind) => builtin::cells(kind, object, now),
            Self::Custom(columns) => std::iter::once(json!(meta::name(object)))
                .chain(columns.iter().map(|column| column.cell(object, now)))
                .collect(),
        }
    }
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
            columns.definitions().as_array().into_iter().flatten().map(|column| column["name"].clone()).collect();
        assert_eq!(headers, ["Name", "EgressIPs", "Assigned Node", "Assigned EgressIPs"]);
        let now = Timestamp::UNIX_EPOCH;
        let mut object = json!({"metadata": {"name": "e"}, "spec": {"egressIPs": ["1.1.1.1", "2.2.2.2"]}});
        assert_eq!(columns.cells(&object, now), json!(["e", "1.1.1.1", null, null]));
        object["status"] =
            json!({"items": [{"node": "n1", "egressIP": "1.1.1.1"}, {"node": "n2", "egressIP": "2.2.2.2"}]});
        assert_eq!(columns.cells(&object, now), json!(["e", "1.1.1.1", "n1", "1.1.1.1"]));
    }

    #[test]
    fn every_built_in_row_is_as_wide_as_its_header() {
        for kind in crate::apiserver::kind::builtins() {
            let width = kind.columns.definitions().as_array().map(Vec::len);
            let cells = kind.columns.cells(&json!({"metadata": {"name": "x"}}), Timestamp::UNIX_EPOCH);
            assert_eq!(cells.as_array().map(Vec::len), width, "{}", kind.kind);
        }
    }
}
