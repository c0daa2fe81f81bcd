//! What clients ask first: versions, groups and resources. Made from the registry at every request.

use serde_json::{Value, json};

use super::registry::Registry;
use super::status::ApiError;

pub(super) fn version() -> Value {
    json!({
        "major": "1",
        "minor": "32",
        "gitVersion": "v1.32.0",
        "gitCommit": "0000000000000000000000000000000000000000",
        "gitTreeState": "clean",
        "buildDate": "2024-12-11T00:00:00Z",
        "goVersion": "none",
        "compiler": "none",
        "platform": "linux/amd64",
    })
}

pub(super) fn core_versions() -> Value {
    json!({"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []})
}

pub(super) fn groups(registry: &Registry) -> Value {
    let mut names: Vec<String> = registry.group_versions().into_iter().map(|(group, _)| group).collect();
    names.dedup();
    let groups: Vec<Value> =
        names.iter().filter(|group| !group.is_empty()).map(|group| group_body(registry, group)).collect();
    json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})
}

pub(super) fn group(registry: &Registry, name: &str) -> Result<Value, ApiError> {
    let mut body = group_body(registry, name);
    if name.is_empty() || body["versions"].as_array().is_none_or(Vec::is_empty) {
        return Err(ApiError::no_such_path());
    }
    body["kind"] = json!("APIGroup");
    body["apiVersion"] = json!("v1");
    Ok(body)
}

/// Stable versions come before beta and alpha ones, the newer before the older.
fn group_body(registry: &Registry, name: &str) -> Value {
    let all = registry.group_versions();
    let mut versions: Vec<&String> =
        all.iter().filter(|(group, _)| group == name).map(|(_, version)| version).collect();
    versions.sort_by_key(|version| {
        let rank = if version.contains("alpha") { 2 } else { u8::from(version.contains("beta")) };
        (rank, std::cmp::Reverse((*version).clone()))
    });
    let versions: Vec<Value> = versions
        .into_iter()
        .map(|version| json!({"groupVersion": format!("{name}/{version}"), "version": version}))
        .collect();
    json!({"name": name, "preferredVersion": versions.first(), "versions": versions})
}

pub(super) fn resources(registry: &Registry, group: &str, version: &str) -> Result<Value, ApiError> {
    let kinds = registry.in_group_version(group, version);
    let Some(first) = kinds.first() else {
        return Err(ApiError::no_such_path());
    };
    let resources: Vec<Value> = kinds.iter().flat_map(|kind| kind.discovery()).collect();
    json_list(&first.api_version(), resources)
}

fn json_list(group_version: &str, resources: Vec<Value>) -> Result<Value, ApiError> {
    Ok(json!({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version, "resources": resources}))
}
