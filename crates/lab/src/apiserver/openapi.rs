//! OpenAPI, as much as `kubectl apply`, `create` and `explain` read.
//!
//! - They look for the `fieldValidation` parameter of an operation on the kind, and then leave validation to the server.
//! - `explain` follows the list operation to the schema of the kind. Custom resources show theirs; built-in kinds have
//!   an open schema here, as this server does not know their fields.

use serde_json::{Map, Value, json};

use super::kind::Kind;
use super::registry::Registry;
use super::status::ApiError;

pub(super) fn v2() -> Value {
    json!({"swagger": "2.0", "info": {"title": "Kubernetes", "version": "v1.32.0"}, "paths": {}, "definitions": {}})
}

pub(super) fn v3_index(registry: &Registry) -> Value {
    let mut paths = Map::new();
    for (group, version) in registry.group_versions() {
        let path = prefix(&group, &version);
        // The version of the content is part of its address, for the client's cache.
        let body = document(registry, &group, &version).to_string();
        let hash = body
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
        paths.insert(path.clone(), json!({"serverRelativeURL": format!("/openapi/v3/{path}?hash={hash:016X}")}));
    }
    json!({"paths": paths})
}

pub(super) fn v3(registry: &Registry, group: &str, version: &str) -> Result<Value, ApiError> {
    if registry.in_group_version(group, version).is_empty() {
        return Err(ApiError::no_such_path());
    }
    Ok(document(registry, group, version))
}

fn prefix(group: &str, version: &str) -> String {
    if group.is_empty() { format!("api/{version}") } else { format!("apis/{group}/{version}") }
}

fn document(registry: &Registry, group: &str, version: &str) -> Value {
    let (mut paths, mut schemas) = (Map::new(), Map::new());
    for kind in registry.in_group_version(group, version) {
        let scope = if kind.namespaced { "namespaces/{namespace}/" } else { "" };
        let collection = format!("/{}/{scope}{}", prefix(group, version), kind.plural);
        paths.insert(
            collection.clone(),
            json!({
                "get": operation(&kind, "list"),
                "post": operation(&kind, "post"),
            }),
        );
        paths.insert(
            format!("{collection}/{{name}}"),
            json!({
                "get": operation(&kind, "get"),
                "put": operation(&kind, "put"),
                "patch": operation(&kind, "patch"),
                "delete": operation(&kind, "delete"),
            }),
        );
        schemas.insert(schema_name(&kind), schema(&kind));
    }
    json!({
        "openapi": "3.0.0",
        "info": {"title": "Kubernetes", "version": "v1.32.0"},
        "paths": paths,
        "components": {"schemas": schemas},
    })
}

fn schema_name(kind: &Kind) -> String {
    let mut labels: Vec<&str> = kind.group.split('.').filter(|label| !label.is_empty()).rev().collect();
    labels.extend([kind.version.as_str(), kind.kind.as_str()]);
    labels.join(".")
}

fn identity(kind: &Kind) -> Value {
    json!({"group": kind.group, "version": kind.version, "kind": kind.kind})
}

fn operation(kind: &Kind, action: &str) -> Value {
    let body = json!({"schema": {"$ref": format!("#/components/schemas/{}", schema_name(kind))}});
    let mut operation = json!({
        "responses": {"200": {"description": "OK", "content": {"application/json": body}}},
        "x-kubernetes-action": action,
        "x-kubernetes-group-version-kind": identity(kind),
    });
    if matches!(action, "post" | "put" | "patch") {
        let parameter = |name: &str| json!({"name": name, "in": "query", "schema": {"type": "string"}});
        operation["parameters"] = json!([parameter("dryRun"), parameter("fieldManager"), parameter("fieldValidation")]);
    }
    operation
}

fn schema(kind: &Kind) -> Value {
    let mut schema = match &kind.schema {
        Some(schema) => schema.as_value().clone(),
        None => json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true}),
    };
    let properties = &mut schema["properties"];
    properties["apiVersion"] = json!({"type": "string", "description": "Version of the schema of this object."});
    properties["kind"] = json!({"type": "string", "description": "Kind of this object."});
    properties["metadata"] = json!({"type": "object", "description": "Standard metadata of an object."});
    schema["x-kubernetes-group-version-kind"] = json!([identity(kind)]);
    schema
}
