//! How an answer looks: the objects themselves, their metadata only, or a table; decided by the Accept header.
//!
//! Everything is JSON. A client that would rather have protobuf gets JSON if it lists it, and 406 if not.

use std::sync::Arc;

use jiff::Timestamp;
use serde_json::{Map, Value, json};

use super::convert;
use super::kind::Kind;
use super::status::ApiError;
use super::table;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Representation {
    Full,
    Metadata,
    Table(RowObject),
}

/// What a row of a table carries besides its cells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RowObject {
    None,
    Metadata,
    Object,
}

impl Representation {
    /// The first form in the Accept header that this server has.
    pub(super) fn negotiate(accept: &str, include_object: &str) -> Result<Self, ApiError> {
        if accept.trim().is_empty() {
            return Ok(Self::Full);
        }
        let row = match include_object {
            "None" => RowObject::None,
            "Object" => RowObject::Object,
            _ => RowObject::Metadata,
        };
        accept.split(',').find_map(|clause| Self::of_clause(clause, row)).ok_or_else(ApiError::not_acceptable)
    }

    fn of_clause(clause: &str, row: RowObject) -> Option<Self> {
        let mut parts = clause.split(';').map(str::trim);
        if !matches!(parts.next()?, "application/json" | "application/*" | "*/*") {
            return None;
        }
        let parameters: Vec<(&str, &str)> = parts.filter_map(|part| part.split_once('=')).collect();
        let parameter = |name: &str| parameters.iter().find(|(key, _)| *key == name).map(|(_, value)| *value);
        match (parameter("as"), parameter("g"), parameter("v")) {
            (None, _, _) => Some(Self::Full),
            (Some("PartialObjectMetadata" | "PartialObjectMetadataList"), Some("meta.k8s.io"), Some("v1")) => {
                Some(Self::Metadata)
            }
            (Some("Table"), Some("meta.k8s.io"), Some("v1")) => Some(Self::Table(row)),
            _ => None,
        }
    }

    /// A stored object in this shape.
    pub(super) fn object(self, kind: &Kind, object: &Value) -> Value {
        match self {
            Self::Full => served(kind, object),
            Self::Metadata => metadata_of(object),
            Self::Table(row) => {
                let list = json!({"resourceVersion": object["metadata"]["resourceVersion"]});
                table_of(kind, std::iter::once(object), list, row, true)
            }
        }
    }

    /// An object in a watch event; a table names its columns only in the first.
    pub(super) fn watched(self, kind: &Kind, object: &Value, is_first: bool) -> Value {
        match self {
            Self::Table(row) => {
                let list = json!({"resourceVersion": object["metadata"]["resourceVersion"]});
                table_of(kind, std::iter::once(object), list, row, is_first)
            }
            _ => self.object(kind, object),
        }
    }

    pub(super) fn list(self, kind: &Kind, items: &[Arc<Value>], metadata: Value) -> Value {
        match self {
            Self::Full => {
                let items: Vec<Value> = items.iter().map(|item| listed(kind, item)).collect();
                json!({"kind": kind.list_kind, "apiVersion": kind.api_version(), "metadata": metadata, "items": items})
            }
            Self::Metadata => {
                let items: Vec<Value> = items.iter().map(|item| metadata_of(item)).collect();
                json!({
                    "kind": "PartialObjectMetadataList",
                    "apiVersion": "meta.k8s.io/v1",
                    "metadata": metadata,
                    "items": items,
                })
            }
            Self::Table(row) => table_of(kind, items.iter().map(|item| &**item), metadata, row, true),
        }
    }

    /// A bookmark: an object with nothing but a version.
    pub(super) fn bookmark(self, kind: &Kind, version: u64, annotations: Option<Value>) -> Value {
        let mut metadata = json!({"resourceVersion": version.to_string(), "creationTimestamp": null});
        if let Some(annotations) = annotations {
            metadata["annotations"] = annotations;
        }
        let object = json!({"metadata": metadata});
        match self {
            Self::Full => {
                json!({"kind": kind.kind, "apiVersion": kind.api_version(), "metadata": object["metadata"]})
            }
            Self::Metadata => metadata_of(&object),
            Self::Table(row) => {
                let list = json!({"resourceVersion": version.to_string()});
                table_of(kind, std::iter::once(&object), list, row, false)
            }
        }
    }
}

fn served(kind: &Kind, object: &Value) -> Value {
    let mut object = object.clone();
    convert::to_served(kind, &mut object);
    object
}

/// In lists the items of built-in kinds do not repeat their kind, as on a real server.
fn listed(kind: &Kind, object: &Value) -> Value {
    let mut object = served(kind, object);
    if let (false, Some(map)) = (kind.traits.custom, object.as_object_mut()) {
        map.remove("apiVersion");
        map.remove("kind");
    }
    object
}

fn metadata_of(object: &Value) -> Value {
    json!({"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": object["metadata"]})
}

fn table_of<'a>(
    kind: &Kind,
    objects: impl Iterator<Item = &'a Value>,
    metadata: Value,
    row: RowObject,
    with_columns: bool,
) -> Value {
    let now = Timestamp::now();
    let rows: Vec<Value> = objects
        .map(|object| {
            let mut fields = Map::new();
            fields.insert("cells".into(), table::cells(&kind.columns, object, now));
            match row {
                RowObject::None => {}
                RowObject::Metadata => drop(fields.insert("object".into(), metadata_of(object))),
                RowObject::Object => drop(fields.insert("object".into(), served(kind, object))),
            }
            Value::Object(fields)
        })
        .collect();
    let columns = if with_columns { table::definitions(&kind.columns) } else { Value::Null };
    json!({
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": metadata,
        "columnDefinitions": columns,
        "rows": rows,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_known_form_wins() {
        let shape = |accept: &str| Representation::negotiate(accept, "").map_err(|refusal| refusal.code());
        let table = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json;as=Table;v=v1beta1;g=meta.k8s.io,application/json";
        assert_eq!(shape(table), Ok(Representation::Table(RowObject::Metadata)));
        let partial = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1";
        assert_eq!(shape(partial), Ok(Representation::Metadata));
        assert_eq!(shape("application/vnd.kubernetes.protobuf,application/json"), Ok(Representation::Full));
        assert_eq!(shape("application/vnd.kubernetes.protobuf"), Err(406));
        assert_eq!(shape("*/*"), Ok(Representation::Full));
        assert_eq!(shape(""), Ok(Representation::Full));
    }
}
