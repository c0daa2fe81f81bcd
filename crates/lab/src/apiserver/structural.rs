//! Is a schema structural? A real server refuses definitions whose schema is not, so this one does too.
//!
//! The rules that matter for generated schemas: every node names its type (or preserves unknown fields, or is
//! int-or-string), `properties` and `additionalProperties` exclude each other, there are no `$ref`s, and what stands
//! inside `allOf`/`anyOf`/`oneOf`/`not` only constrains: no types, defaults or descriptions there.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::JSONSchemaProps;
use regex::Regex;
use serde_json::{Map, Value, json};

use super::status::StatusCause;

const COMBINATORS: [&str; 3] = ["allOf", "anyOf", "oneOf"];
const TYPES: [&str; 6] = ["array", "boolean", "integer", "number", "object", "string"];
const LOGICAL_BANS: [&str; 5] = ["type", "default", "additionalProperties", "nullable", "description"];

pub(super) fn check(schema: &Value, field: &str) -> Vec<StatusCause> {
    let mut causes = Vec::new();
    let Some(root) = schema.as_object() else {
        causes.push(StatusCause::required(field, "must be an object"));
        return causes;
    };
    if root.get("type") != Some(&json!("object")) {
        causes.push(StatusCause::invalid(
            format!("{field}.type"),
            &root.get("type").cloned().unwrap_or_default(),
            "must be object at the root",
        ));
    }
    check_node(root, field, &mut causes);
    causes
}

/// The fields of a schema that a real server does not know, `const` and `$defs` for example: those that its type drops.
pub(super) fn unknown_fields(schema: &Value, field: &str) -> Vec<String> {
    fn dropped(given: &Value, known: &Value, field: &str, found: &mut Vec<String>) {
        for (name, child) in given.as_object().into_iter().flatten() {
            match known.get(name) {
                Some(known) => dropped(child, known, &format!("{field}.{name}"), found),
                None => found.push(format!("{field}.{name}")),
            }
        }
        for (index, child) in given.as_array().into_iter().flatten().enumerate() {
            dropped(child, &known[index], &format!("{field}[{index}]"), found);
        }
    }
    let mut found = Vec::new();
    // A schema of another shape is refused elsewhere.
    if let Ok(known) = serde_json::from_value::<JSONSchemaProps>(schema.clone()).and_then(serde_json::to_value) {
        dropped(schema, &known, field, &mut found);
    }
    found
}

fn check_node(node: &Map<String, Value>, field: &str, causes: &mut Vec<StatusCause>) {
    let has = |name: &str| node.contains_key(name);
    let is_on = |name: &str| node.get(name) == Some(&json!(true));
    if !has("type") && !is_on("x-kubernetes-preserve-unknown-fields") && !is_on("x-kubernetes-int-or-string") {
        causes.push(StatusCause::required(format!("{field}.type"), "must not be empty for specified object fields"));
    }
    if let Some(other) = node.get("type").filter(|named| !TYPES.iter().any(|known| named == known)) {
        let why = "must be one of \"array\", \"boolean\", \"integer\", \"number\", \"object\", \"string\"";
        causes.push(StatusCause::invalid(format!("{field}.type"), other, why));
    }
    if let Some(pattern) = node.get("pattern").filter(|pattern| Regex::new(pattern.as_str().unwrap_or("(")).is_err()) {
        causes.push(StatusCause::invalid(format!("{field}.pattern"), pattern, "must be a valid regular expression"));
    }
    for banned in ["$ref", "definitions", "dependencies", "patternProperties", "id", "deprecated"] {
        if has(banned) {
            causes.push(StatusCause::forbidden(format!("{field}.{banned}"), "is not supported"));
        }
    }
    if has("properties") && has("additionalProperties") {
        causes
            .push(StatusCause::forbidden(format!("{field}.additionalProperties"), "must not be used with properties"));
    }
    if node.get("uniqueItems") == Some(&json!(true)) {
        causes.push(StatusCause::forbidden(
            format!("{field}.uniqueItems"),
            "uniqueItems cannot be set to true since the runtime complexity becomes quadratic",
        ));
    }
    check_list_type(node, field, causes);
    for combinator in COMBINATORS {
        for (index, branch) in node.get(combinator).and_then(Value::as_array).into_iter().flatten().enumerate() {
            check_logical(
                branch,
                &format!("{field}.{combinator}[{index}]"),
                is_on("x-kubernetes-int-or-string"),
                causes,
            );
        }
    }
    if let Some(branch) = node.get("not") {
        check_logical(branch, &format!("{field}.not"), false, causes);
    }
    for (name, child) in children(node) {
        check_node(child, &format!("{field}.{name}"), causes);
    }
}

fn check_list_type(node: &Map<String, Value>, field: &str, causes: &mut Vec<StatusCause>) {
    let is_array = node.get("type") == Some(&json!("array"));
    if is_array && !node.contains_key("items") {
        causes.push(StatusCause::required(format!("{field}.items"), "must be specified"));
    }
    let is_map = node.get("x-kubernetes-list-type") == Some(&json!("map"));
    if is_map && node.get("x-kubernetes-list-map-keys").and_then(Value::as_array).is_none_or(Vec::is_empty) {
        let why = "must not be empty if x-kubernetes-list-type is map";
        causes.push(StatusCause::required(format!("{field}.x-kubernetes-list-map-keys"), why));
    }
}

fn children(node: &Map<String, Value>) -> Vec<(String, &Map<String, Value>)> {
    let mut found = Vec::new();
    for (name, child) in node.get("properties").and_then(Value::as_object).into_iter().flatten() {
        found.extend(child.as_object().map(|child| (format!("properties[{name}]"), child)));
    }
    for name in ["items", "additionalProperties"] {
        found.extend(node.get(name).and_then(Value::as_object).map(|child| (name.to_owned(), child)));
    }
    found
}

fn check_logical(branch: &Value, field: &str, int_or_string: bool, causes: &mut Vec<StatusCause>) {
    let Some(branch) = branch.as_object() else {
        return;
    };
    for banned in LOGICAL_BANS {
        if branch.contains_key(banned) && !(int_or_string && banned == "type") {
            causes.push(StatusCause::forbidden(format!("{field}.{banned}"), "must be empty to be structural"));
        }
    }
    for (name, child) in children(branch) {
        check_logical(&Value::Object(child.clone()), &format!("{field}.{name}"), false, causes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rule_has_a_name() {
        let schema = json!({
            "type": "object",
            "properties": {
                "untyped": {"description": "no type"},
                "both": {"type": "object", "properties": {}, "additionalProperties": {"type": "string"}},
                "list": {"type": "array"},
                "choice": {"type": "object", "anyOf": [{"type": "object"}, {"required": ["a"]}]},
                "either": {"x-kubernetes-int-or-string": true, "anyOf": [{"type": "integer"}, {"type": "string"}]},
                "optional": {"type": ["string", "null"]},
                "keyed": {"type": "array", "x-kubernetes-list-type": "map", "items": {"type": "object"}},
            },
        });
        let mut fields: Vec<String> = check(&schema, "s").into_iter().map(|cause| cause.field).collect();
        fields.sort();
        assert_eq!(
            fields,
            [
                "s.properties[both].additionalProperties",
                "s.properties[choice].anyOf[0].type",
                "s.properties[keyed].x-kubernetes-list-map-keys",
                "s.properties[list].items",
                "s.properties[optional].type",
                "s.properties[untyped].type",
            ]
        );
    }

    #[test]
    fn what_only_newer_json_schema_knows_is_unknown() {
        let schema = json!({
            "type": "object",
            "$defs": {},
            "properties": {"a": {"const": 1, "title": "A"}},
            "anyOf": [{"if": {}}],
        });
        let mut unknown = unknown_fields(&schema, "s");
        unknown.sort();
        assert_eq!(unknown, ["s.$defs", "s.anyOf[0].if", "s.properties.a.const"]);
    }
}
