//! The structural schema of a custom resource at work: prune what it does not know, fill its defaults, refuse what it forbids.
//!
//! Checked: types (with `nullable` and int-or-string), `required`, `enum`, lengths, counts and bounds, `allOf`/`anyOf`/
//! `oneOf`/`not`, `pattern`, the formats `ipv4` and `ipv6`, and the uniqueness of `set` and `map` lists. Not checked: other
//! formats, CEL rules. An update is not refused for what it leaves as it was (KEP-4008, on since Kubernetes 1.30).
//! `apiVersion`, `kind` and `metadata` at the root belong to the server, whatever the schema has for them.

use regex::Regex;
use serde_json::{Value, json};

use super::fields::{ListType, item_key};
use super::status::StatusCause;

pub struct Schema {
    root: Value,
}

const SERVER_FIELDS: [&str; 3] = ["apiVersion", "kind", "metadata"];

impl Schema {
    pub fn new(root: Value) -> Self {
        Self { root }
    }

    pub fn as_value(&self) -> &Value {
        &self.root
    }

    /// Take away what the schema does not know; the answer names it.
    pub fn prune(&self, object: &mut Value) -> Vec<String> {
        let mut unknown = Vec::new();
        prune(&self.root, object, "", true, &mut unknown);
        unknown
    }

    pub fn fill_defaults(&self, object: &mut Value) {
        fill_defaults(&self.root, object);
    }

    pub fn validate(&self, object: &Value, before: Option<&Value>) -> Vec<StatusCause> {
        let mut causes = Vec::new();
        let body_of = |object: &Value| {
            let mut body = object.clone();
            if let Some(map) = body.as_object_mut() {
                SERVER_FIELDS.iter().for_each(|&field| drop(map.remove(field)));
            }
            body
        };
        let (body, before) = (body_of(object), before.map(body_of));
        let mut root = self.root.clone();
        if let Some(required) = root.get_mut("required").and_then(Value::as_array_mut) {
            required.retain(|name| !SERVER_FIELDS.iter().any(|field| name == field));
        }
        validate(&root, &body, before.as_ref(), "", &mut causes);
        causes
    }

    pub fn is_atomic_map(&self, path: &[String]) -> bool {
        self.at(path).is_some_and(|node| node["x-kubernetes-map-type"] == json!("atomic"))
    }

    pub fn list_type(&self, path: &[String]) -> ListType {
        let Some(node) = self.at(path) else { return ListType::Atomic };
        match node.get("x-kubernetes-list-type").and_then(Value::as_str) {
            Some("set") => ListType::Set,
            Some("map") => {
                let keys = node.get("x-kubernetes-list-map-keys").and_then(Value::as_array);
                let keys = keys.into_iter().flatten().filter_map(Value::as_str);
                ListType::Map(keys.map(str::to_owned).collect())
            }
            _ => ListType::Atomic,
        }
    }

    /// The node at a path of field names.
    fn at(&self, path: &[String]) -> Option<&Value> {
        path.iter().try_fold(&self.root, |node, field| {
            let below = node.get("items").unwrap_or(node);
            below["properties"].get(field).or_else(|| below.get("additionalProperties"))
        })
    }
}

fn join(path: &str, field: &str) -> String {
    if path.is_empty() { field.to_owned() } else { format!("{path}.{field}") }
}

fn prune(schema: &Value, value: &mut Value, path: &str, is_root: bool, unknown: &mut Vec<String>) {
    match value {
        Value::Object(map) => {
            let keeps = schema["x-kubernetes-preserve-unknown-fields"] == json!(true);
            let fields: Vec<String> = map.keys().cloned().collect();
            for field in fields {
                let is_server_field = (is_root || schema["x-kubernetes-embedded-resource"] == json!(true))
                    && SERVER_FIELDS.contains(&field.as_str());
                if is_server_field {
                    continue;
                }
                let rule = schema["properties"]
                    .get(&field)
                    .or_else(|| schema.get("additionalProperties").filter(|rule| rule.is_object()));
                match (rule, map.get_mut(&field)) {
                    (Some(rule), Some(child)) => prune(rule, child, &join(path, &field), false, unknown),
                    _ if keeps || schema["additionalProperties"] == json!(true) => {}
                    _ => {
                        map.remove(&field);
                        unknown.push(join(path, &field));
                    }
                }
            }
        }
        Value::Array(items) => {
            if let Some(rule) = schema.get("items") {
                for (index, item) in items.iter_mut().enumerate() {
                    prune(rule, item, &format!("{path}[{index}]"), false, unknown);
                }
            }
        }
        _ => {}
    }
}

fn fill_defaults(schema: &Value, value: &mut Value) {
    match value {
        Value::Object(map) => {
            for (field, rule) in schema["properties"].as_object().into_iter().flatten() {
                if let Some(default) = rule.get("default")
                    && map.get(field).is_none_or(|set| set.is_null() && rule["nullable"] != json!(true))
                {
                    map.insert(field.clone(), default.clone());
                }
                if let Some(child) = map.get_mut(field) {
                    fill_defaults(rule, child);
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| fill_defaults(&schema["items"], item)),
        _ => {}
    }
}

/// `before` is what stood at this path: what equals it is let through. It is known along fields; lists are
/// compared as a whole.
fn validate(schema: &Value, value: &Value, before: Option<&Value>, path: &str, causes: &mut Vec<StatusCause>) {
    if before == Some(value) || (value.is_null() && schema["nullable"] == json!(true)) {
        return;
    }
    if let Some(expected) = wrong_type(schema, value) {
        let shown = json!(type_name(value));
        causes.push(StatusCause::invalid(path, &shown, &format!("{path} in body must be of type {expected}: {shown}")));
        return;
    }
    validate_combinators(schema, value, path, causes);
    if let Some(allowed) = schema["enum"].as_array()
        && !allowed.contains(value)
    {
        let listed: Vec<String> = allowed.iter().map(Value::to_string).collect();
        let message = format!("Unsupported value: {value}: supported values: {}", listed.join(", "));
        causes.push(StatusCause { field: path.to_owned(), reason: "FieldValueNotSupported", message });
    }
    match value {
        Value::Object(map) => {
            for name in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
                if !map.contains_key(name) {
                    causes.push(StatusCause::required(join(path, name), ""));
                }
            }
            validate_count(schema, "Properties", map.len(), path, causes);
            for (field, child) in map {
                let rule = schema["properties"].get(field).or_else(|| schema.get("additionalProperties"));
                if let Some(rule) = rule.filter(|rule| rule.is_object()) {
                    validate(rule, child, before.and_then(|before| before.get(field)), &join(path, field), causes);
                }
            }
        }
        Value::Array(items) => {
            validate_count(schema, "Items", items.len(), path, causes);
            validate_unique(schema, items, path, causes);
            if let Some(rule) = schema.get("items") {
                for (index, item) in items.iter().enumerate() {
                    validate(rule, item, None, &format!("{path}[{index}]"), causes);
                }
            }
        }
        Value::String(text) => {
            validate_count(schema, "Length", text.chars().count(), path, causes);
            validate_pattern(schema, text, path, causes);
            validate_format(schema, text, path, causes);
        }
        Value::Number(number) => validate_bounds(schema, number.as_f64().unwrap_or_default(), path, causes),
        _ => {}
    }
}

fn type_name(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_f64() => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

fn wrong_type<'a>(schema: &'a Value, value: &Value) -> Option<&'a str> {
    let actual = type_name(value);
    if schema["x-kubernetes-int-or-string"] == json!(true) {
        return (!matches!(actual, "integer" | "string")).then_some("integer,string");
    }
    let expected = schema["type"].as_str()?;
    (actual != expected && !(expected == "number" && actual == "integer")).then_some(expected)
}

fn validate_combinators(schema: &Value, value: &Value, path: &str, causes: &mut Vec<StatusCause>) {
    let holds = |branch: &Value| {
        let mut found = Vec::new();
        validate(branch, value, None, path, &mut found);
        found.is_empty()
    };
    let refuse = |causes: &mut Vec<StatusCause>, what: &str| {
        causes.push(StatusCause::invalid(path, value, &format!("{path} in body must validate {what}")));
    };
    for branch in schema["allOf"].as_array().into_iter().flatten() {
        validate(branch, value, None, path, causes);
    }
    if schema["anyOf"].as_array().is_some_and(|all| !all.iter().any(holds)) {
        refuse(causes, "at least one schema (anyOf)");
    }
    if schema["oneOf"].as_array().is_some_and(|all| all.iter().filter(|branch| holds(branch)).count() != 1) {
        refuse(causes, "one and only one schema (oneOf)");
    }
    if schema.get("not").is_some_and(holds) {
        refuse(causes, "no schema of not");
    }
}

fn validate_count(schema: &Value, what: &str, count: usize, path: &str, causes: &mut Vec<StatusCause>) {
    let bound = |side: &str| schema[format!("{side}{what}")].as_u64().and_then(|bound| usize::try_from(bound).ok());
    let noun = if what == "Length" { "chars" } else { "items" };
    if let Some(most) = bound("max").filter(|&most| count > most) {
        causes.push(match what {
            "Length" => StatusCause {
                field: path.to_owned(),
                reason: "FieldValueTooLong",
                message: format!("Too long: may not be more than {most} bytes"),
            },
            _ => StatusCause {
                field: path.to_owned(),
                reason: "FieldValueTooMany",
                message: format!("Too many: {count}: must have at most {most} items"),
            },
        });
    }
    if let Some(least) = bound("min").filter(|&least| count < least) {
        let why = format!("{path} in body should be at least {least} {noun} long");
        causes.push(StatusCause::invalid(path, &json!(count), &why));
    }
}

fn validate_pattern(schema: &Value, text: &str, path: &str, causes: &mut Vec<StatusCause>) {
    // A pattern that cannot be read is refused with its definition.
    if let Some(pattern) = schema["pattern"].as_str()
        && Regex::new(pattern).is_ok_and(|pattern| !pattern.is_match(text))
    {
        let why = format!("{path} in body should match '{pattern}'");
        causes.push(StatusCause::invalid(path, &json!(text), &why));
    }
}

/// The formats of addresses, as Go's `net.ParseIP` reads them: it takes `::ffff:1.2.3.4` for both.
fn validate_format(schema: &Value, text: &str, path: &str, causes: &mut Vec<StatusCause>) {
    let Some(format) = schema["format"].as_str() else { return };
    let is_address = text.parse::<std::net::IpAddr>().is_ok();
    let holds = match format {
        "ipv4" => is_address && text.contains('.'),
        "ipv6" => is_address && text.contains(':'),
        _ => true,
    };
    if !holds {
        let text = json!(text);
        causes.push(StatusCause::invalid(path, &text, &format!("{path} in body must be of type {format}: {text}")));
    }
}

fn validate_bounds(schema: &Value, number: f64, path: &str, causes: &mut Vec<StatusCause>) {
    if let Some(least) = schema["minimum"].as_f64().filter(|&least| number < least) {
        causes.push(StatusCause::invalid(
            path,
            &json!(number),
            &format!("{path} in body should be greater than or equal to {least}"),
        ));
    }
    if let Some(most) = schema["maximum"].as_f64().filter(|&most| number > most) {
        causes.push(StatusCause::invalid(
            path,
            &json!(number),
            &format!("{path} in body should be less than or equal to {most}"),
        ));
    }
}

fn validate_unique(schema: &Value, items: &[Value], path: &str, causes: &mut Vec<StatusCause>) {
    let keys: Vec<String> = match schema["x-kubernetes-list-type"].as_str() {
        Some("set") => items.iter().map(Value::to_string).collect(),
        Some("map") => {
            let named = schema["x-kubernetes-list-map-keys"].as_array().into_iter().flatten();
            let named: Vec<String> = named.filter_map(Value::as_str).map(str::to_owned).collect();
            items.iter().map(|item| item_key(item, &named)).collect()
        }
        _ => return,
    };
    for (index, key) in keys.iter().enumerate() {
        if keys[..index].contains(key) {
            causes.push(StatusCause {
                field: format!("{path}[{index}]"),
                reason: "FieldValueDuplicate",
                message: format!("Duplicate value: {key}"),
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::apiserver::crd::tests::egress_ips;

    fn schema() -> Schema {
        Schema::new(egress_ips()["spec"]["versions"][0]["schema"]["openAPIV3Schema"].clone())
    }

    #[test]
    fn unknown_fields_go_and_are_named() {
        let mut object = json!({
            "apiVersion": "k8s.ovn.org/v1", "kind": "EgressIP", "metadata": {"name": "e", "labels": {"a": "b"}},
            "spec": {"egressIPs": ["1.2.3.4"], "namespaceSelector": {"matchLabels": {"env": "qa"}, "odd": 1},
                     "podSelector": {"anything": {"goes": true}}, "extra": {}},
            "other": 1,
        });
        let mut unknown = schema().prune(&mut object);
        unknown.sort();
        assert_eq!(unknown, ["other", "spec.extra", "spec.namespaceSelector.odd"]);
        assert_eq!(object["metadata"]["labels"]["a"], "b");
        assert_eq!(object["spec"]["podSelector"]["anything"]["goes"], true);
        assert!(object.get("other").is_none());
    }

    #[test]
    fn refusals_read_as_those_of_a_real_server() {
        let message = |spec: Value| {
            let causes = schema().validate(&json!({"spec": spec}), None);
            causes.iter().map(|cause| format!("{}: {}", cause.field, cause.message)).collect::<Vec<_>>()
        };
        assert_eq!(message(json!({"namespaceSelector": {}})), ["spec.egressIPs: Required value"]);
        assert_eq!(
            message(json!({"egressIPs": "1.2.3.4", "namespaceSelector": {}})),
            ["spec.egressIPs: Invalid value: \"string\": spec.egressIPs in body must be of type array: \"string\""]
        );
        assert_eq!(
            message(json!({"egressIPs": ["1", "2", "3", "4", "5"], "namespaceSelector": {}})),
            ["spec.egressIPs: Too many: 5: must have at most 4 items"]
        );
        assert_eq!(message(json!({"egressIPs": ["1"], "namespaceSelector": {}})), Vec::<String>::new());
    }

    #[test]
    fn an_update_is_judged_by_what_it_changes() {
        let address = json!({"type": "string", "anyOf": [{"format": "ipv4"}, {"format": "ipv6"}]});
        let schema = Schema::new(json!({"type": "object", "properties": {
            "list": {"type": "array", "items": address}, "other": {"type": "integer"},
        }}));
        for address in ["192.0.2.1", "2001:db8::1", "::ffff:192.0.2.1"] {
            assert_eq!(schema.validate(&json!({"list": [address]}), None).len(), 0, "{address}");
        }
        for junk in ["172.18.0.300", "192.0.2.1/24", "fe80::1%eth0", "192.0.2.01", " 192.0.2.1", ""] {
            let causes = schema.validate(&json!({"list": [junk]}), None);
            assert_eq!(causes.iter().map(|cause| cause.field.as_str()).collect::<Vec<_>>(), ["list[0]"], "{junk}");
        }
        let old = json!({"list": ["junk"], "other": 1});
        assert_eq!(schema.validate(&json!({"list": ["junk"], "other": 2}), Some(&old)).len(), 0);
        assert_eq!(schema.validate(&json!({"list": ["junk", "192.0.2.1"], "other": 1}), Some(&old)).len(), 1);
    }

    #[test]
    fn defaults_and_list_types_come_from_the_schema() {
        let schema = Schema::new(json!({"type": "object", "properties": {
            "mode": {"type": "string", "default": "auto"},
            "list": {"type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["k"],
                     "items": {"type": "object", "properties": {"tags": {"type": "array", "x-kubernetes-list-type": "set"}}}},
        }}));
        let mut object = json!({});
        schema.fill_defaults(&mut object);
        assert_eq!(object, json!({"mode": "auto"}));
        assert_eq!(schema.list_type(&["list".into()]), ListType::Map(vec!["k".into()]));
        assert_eq!(schema.list_type(&["list".into(), "tags".into()]), ListType::Set);
        assert!(!schema.is_atomic_map(&["list".into()]));
        let twice = json!({"list": [{"k": 1}, {"k": 1}]});
        assert_eq!(schema.validate(&twice, None)[0].reason, "FieldValueDuplicate");
    }
}
