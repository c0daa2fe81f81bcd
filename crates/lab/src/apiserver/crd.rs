//! Custom resource definitions: checked when written, served when established.
//!
//! A definition that passes [`validate`] is established in the same write: a real server does it a moment later, in a
//! controller, which is why clients wait for the `Established` condition; they may do so here too.
//! Not done: conversion between versions (a version shows the stored object under its own name), CEL rules,
//! admission of changed names while objects exist.

use serde_json::{Value, json};

use super::clock;
use super::kind::{Kind, KindTraits};
use super::meta::{self, text};
use super::registry::compile;
use super::status::StatusCause;
use super::structural;
use super::table::PrinterColumn;

/// The kinds that a stored definition serves.
pub(super) fn kinds(definition: &Value) -> Vec<Kind> {
    let versions = definition.pointer("/spec/versions").and_then(Value::as_array);
    let served = versions.into_iter().flatten().filter(|version| version["served"] == json!(true));
    served.map(|version| kind(definition, version)).collect()
}

fn kind(definition: &Value, version: &Value) -> Kind {
    let names = |field: &str| text(definition, &format!("/spec/names/{field}")).to_owned();
    let or = |value: String, fallback: String| if value.is_empty() { fallback } else { value };
    let kind_name = names("kind");
    let has_status = version.pointer("/subresources/status").is_some();
    Kind {
        group: text(definition, "/spec/group").to_owned(),
        version: text(version, "/name").to_owned(),
        list_kind: or(names("listKind"), format!("{kind_name}List")),
        plural: names("plural"),
        singular: or(names("singular"), kind_name.to_lowercase()),
        short_names: strings(definition.pointer("/spec/names/shortNames")),
        categories: strings(definition.pointer("/spec/names/categories")),
        namespaced: text(definition, "/spec/scope") == "Namespaced",
        storage: meta::name(definition).into(),
        traits: KindTraits {
            custom: true,
            status_subresource: has_status,
            tracks_generation: true,
            ..KindTraits::default()
        },
        schema: version.pointer("/schema/openAPIV3Schema").map(compile),
        columns: columns(version),
        kind: kind_name,
    }
}

fn strings(list: Option<&Value>) -> Vec<String> {
    let all = list.and_then(Value::as_array).into_iter().flatten();
    all.filter_map(Value::as_str).map(str::to_owned).collect()
}

/// The printer columns of a version; without any, the age.
fn columns(version: &Value) -> Vec<PrinterColumn> {
    let given = version.get("additionalPrinterColumns").and_then(Value::as_array);
    let Some(given) = given.filter(|all| !all.is_empty()) else {
        return vec![PrinterColumn::age()];
    };
    given.iter().map(PrinterColumn::from_definition).collect()
}

/// Fields of the definition's schemas that a real server drops, or refuses under strict validation.
pub(super) fn unknown_fields(definition: &Value) -> Vec<String> {
    let versions = definition.pointer("/spec/versions").and_then(Value::as_array).into_iter().flatten();
    let schemas = versions.enumerate().filter_map(|(index, version)| {
        let field = format!("spec.versions[{index}].schema.openAPIV3Schema");
        Some(structural::unknown_fields(version.pointer("/schema/openAPIV3Schema")?, &field))
    });
    schemas.flatten().collect()
}

/// What a real server refuses in a definition.
pub(super) fn validate(definition: &Value) -> Vec<StatusCause> {
    let mut causes = Vec::new();
    for field in ["/spec/group", "/spec/scope", "/spec/names/plural", "/spec/names/kind"] {
        if text(definition, field).is_empty() {
            causes.push(StatusCause::required(field[1..].replace('/', "."), ""));
        }
    }
    let expected = format!("{}.{}", text(definition, "/spec/names/plural"), text(definition, "/spec/group"));
    if causes.is_empty() && meta::name(definition) != expected {
        causes.push(StatusCause::invalid(
            "metadata.name",
            &json!(meta::name(definition)),
            "must be spec.names.plural+\".\"+spec.group",
        ));
    }
    if !matches!(text(definition, "/spec/scope"), "" | "Namespaced" | "Cluster") {
        causes.push(StatusCause {
            field: "spec.scope".into(),
            reason: "FieldValueNotSupported",
            message: "Unsupported value: supported values: \"Cluster\", \"Namespaced\"".into(),
        });
    }
    let versions = definition.pointer("/spec/versions").and_then(Value::as_array).cloned().unwrap_or_default();
    if versions.iter().filter(|version| version["storage"] == json!(true)).count() != 1 {
        let why = "must have exactly one version marked as storage version";
        causes.push(StatusCause::invalid("spec.versions", &json!(versions.len()), why));
    }
    for (index, version) in versions.iter().enumerate() {
        let field = format!("spec.versions[{index}].schema.openAPIV3Schema");
        match version.pointer("/schema/openAPIV3Schema") {
            Some(schema) => causes.extend(structural::check(schema, &field)),
            None => causes.push(StatusCause::required(field, "schemas are required")),
        }
    }
    causes
}

/// Write the status that makes the definition served.
pub(super) fn establish(definition: &mut Value) {
    let mut names = definition.pointer("/spec/names").cloned().unwrap_or_default();
    let kind = text(&names, "/kind").to_owned();
    let names_map = meta::as_map(&mut names);
    names_map.entry("listKind").or_insert_with(|| json!(format!("{kind}List")));
    names_map.entry("singular").or_insert_with(|| json!(kind.to_lowercase()));
    if let Some(spec) = definition.get_mut("spec") {
        spec["names"] = names.clone();
        meta::as_map(spec).entry("conversion").or_insert_with(|| json!({"strategy": "None"}));
    }
    let versions = definition.pointer("/spec/versions").and_then(Value::as_array);
    let stored = versions.into_iter().flatten().find(|version| version["storage"] == json!(true));
    let stored = stored.map(|version| version["name"].clone()).unwrap_or_default();
    let since = definition.pointer("/status/conditions/0/lastTransitionTime").and_then(Value::as_str);
    let since = since.map_or_else(clock::now, str::to_owned);
    let condition = |kind: &str, reason: &str, message: &str| json!({"type": kind, "status": "True", "reason": reason, "message": message, "lastTransitionTime": since});
    definition["status"] = json!({
        "acceptedNames": names,
        "storedVersions": [stored],
        "conditions": [
            condition("NamesAccepted", "NoConflicts", "no conflicts found"),
            condition("Established", "InitialNamesAccepted", "the initial names have been accepted"),
        ],
    });
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A definition in the shape of the product's.
    pub(crate) fn egress_ips() -> Value {
        json!({
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {"name": "egressips.k8s.ovn.org"},
            "spec": {
                "group": "k8s.ovn.org",
                "scope": "Cluster",
                "names": {"kind": "EgressIP", "plural": "egressips", "singular": "egressip", "shortNames": ["eip"]},
                "versions": [{
                    "name": "v1", "served": true, "storage": true,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": [
                        {"name": "EgressIPs", "type": "string", "jsonPath": ".spec.egressIPs[*]"},
                        {"name": "Assigned Node", "type": "string", "jsonPath": ".status.items[*].node"},
                        {"name": "Assigned EgressIPs", "type": "string", "jsonPath": ".status.items[*].egressIP"},
                    ],
                    "schema": {"openAPIV3Schema": {
                        "type": "object",
                        "description": "A stable source address for pods.",
                        "required": ["spec"],
                        "properties": {
                            "spec": {
                                "type": "object",
                                "required": ["egressIPs", "namespaceSelector"],
                                "properties": {
                                    "egressIPs": {"type": "array", "maxItems": 4, "minItems": 1, "items": {"type": "string"}},
                                    "namespaceSelector": {"type": "object", "properties": {
                                        "matchLabels": {"type": "object", "additionalProperties": {"type": "string"}},
                                    }},
                                    "podSelector": {"type": "object", "x-kubernetes-preserve-unknown-fields": true},
                                },
                            },
                            "status": {"type": "object", "properties": {"items": {
                                "type": "array",
                                "items": {"type": "object", "required": ["node", "egressIP"], "properties": {
                                    "node": {"type": "string"}, "egressIP": {"type": "string"},
                                }},
                            }}},
                        },
                    }},
                }],
            },
        })
    }

    #[test]
    fn a_definition_serves_its_kind() {
        let mut definition = egress_ips();
        assert_eq!(validate(&definition), []);
        establish(&mut definition);
        assert_eq!(definition["status"]["conditions"][1]["type"], "Established");
        let kinds = kinds(&definition);
        assert_eq!(kinds.len(), 1);
        assert_eq!(kinds[0].group_resource(), "egressips.k8s.ovn.org");
        assert!(!kinds[0].namespaced && kinds[0].traits.status_subresource);
        assert_eq!(kinds[0].short_names, ["eip"]);
    }

    #[test]
    fn a_wrong_definition_is_named() {
        let mut definition = egress_ips();
        definition["metadata"]["name"] = json!("eips.k8s.ovn.org");
        definition["spec"]["versions"][0]["storage"] = json!(false);
        let fields: Vec<String> = validate(&definition).into_iter().map(|cause| cause.field).collect();
        assert_eq!(fields, ["metadata.name", "spec.versions"]);
    }
}
