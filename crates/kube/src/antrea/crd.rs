//! Antrea's kinds Egress and ExternalIPPool (`crd.antrea.io/v1beta1`), for clusters in which Antrea does not serve them.
//!
//! Their former version `v1alpha2` is served beside it.
//!
//! The schema and its rules refuse what Antrea's webhooks refuse, as far as one object shows it; what takes other objects, a
//! condition of the Egress or an event of the pool says. `deploy/antrea` is generated from these types.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, CustomResourceDefinitionVersion,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, Time};
use kube::CustomResource;
use kube::CustomResourceExt;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use crate::crd::{date_time, generated, label_selector};

/// Egress gives the pods that it selects a stable source address towards the world outside the cluster.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "crd.antrea.io",
    version = "v1beta1",
    kind = "Egress",
    plural = "egresses",
    singular = "egress",
    shortname = "eg",
    status = "AntreaEgressStatus",
    doc = "Egress gives the pods that it selects a stable source address towards the world outside the cluster.",
    printcolumn = r#"{"name":"EgressIP","type":"string","description":"The address in use.","jsonPath":".status.egressIP"}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#,
    printcolumn = r#"{"name":"Node","type":"string","description":"The node that has the address.","jsonPath":".status.egressNode"}"#,
    printcolumn = r#"{"name":"Assigned","type":"string","description":"Of an Egress with a pool: the condition IPAssigned.","jsonPath":".status.conditions[?(@.type==\"IPAssigned\")].status"}"#
)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [
    {
        "rule": "(has(self.egressIP) || has(self.externalIPPool)) != (has(self.egressIPs) || has(self.externalIPPools))",
        "message": "either egressIP and externalIPPool, or egressIPs and externalIPPools",
    },
    {
        "rule": "!has(self.egressIPs) || !has(self.externalIPPools) || size(self.egressIPs) == size(self.externalIPPools)",
        "message": "egressIPs and externalIPPools are of one length: each address is of the pool in its place",
    },
]))]
pub struct EgressSpec {
    /// Selects pods; without any selector none.
    #[schemars(schema_with = "applied_to")]
    pub applied_to: AppliedTo,
    /// The source address. Chosen from the pool if it is missing.
    #[serde(default, rename = "egressIP", skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "address")]
    pub egress_ip: Option<String>,
    /// Several source addresses.
    #[serde(default, rename = "egressIPs", skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "addresses")]
    pub egress_ips: Option<Vec<String>>,
    /// The pool that the address is of, which says what nodes may have it.
    #[serde(default, rename = "externalIPPool", skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "pool_name")]
    pub external_ip_pool: Option<String>,
    /// The pools of the addresses.
    #[serde(default, rename = "externalIPPools", skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "pool_names")]
    pub external_ip_pools: Option<Vec<String>>,
    /// What all of its pods together may send by each of its nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<EgressBandwidth>,
}

/// A bandwidth limit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct EgressBandwidth {
    /// Bits per second, as 300k, 10M or 2G.
    #[schemars(schema_with = "quantity")]
    pub rate: String,
    /// Bits that are sent at once after a pause, likewise.
    #[schemars(schema_with = "quantity")]
    pub burst: String,
}

/// A selector of namespaces, one of pods, or both.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AppliedTo {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "label_selector")]
    pub pod_selector: Option<LabelSelector>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "label_selector")]
    pub namespace_selector: Option<LabelSelector>,
}

/// What the controller has decided.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct AntreaEgressStatus {
    /// The node that has the address; empty while none has it.
    #[serde(default, rename = "egressNode")]
    pub egress_node: String,
    /// The address in use.
    #[serde(default, rename = "egressIP")]
    pub egress_ip: String,
    /// IPAllocated and IPAssigned, of an Egress with a pool.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<AntreaEgressCondition>,
}

/// One condition.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AntreaEgressCondition {
    #[serde(rename = "type")]
    pub type_: String,
    pub status: String,
    #[schemars(schema_with = "date_time")]
    pub last_transition_time: Time,
    #[serde(default)]
    pub reason: String,
    #[serde(default)]
    pub message: String,
}

/// ExternalIPPool is a set of addresses that Egresses get theirs from.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "crd.antrea.io",
    version = "v1beta1",
    kind = "ExternalIPPool",
    plural = "externalippools",
    singular = "externalippool",
    shortname = "eip",
    status = "ExternalIPPoolStatus",
    doc = "ExternalIPPool is a set of addresses that Egresses get theirs from.",
    printcolumn = r#"{"name":"Total","type":"integer","description":"How many addresses it has.","jsonPath":".status.usage.total"}"#,
    printcolumn = r#"{"name":"Used","type":"integer","description":"How many of them are allocated.","jsonPath":".status.usage.used"}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct ExternalIPPoolSpec {
    /// The addresses, in the order in which they are allocated. Ranges can be added, and not changed or removed.
    #[serde(rename = "ipRanges")]
    #[schemars(schema_with = "ranges")]
    pub ip_ranges: Vec<ExternalIPRange>,
    /// The network of the addresses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subnet_info: Option<ExternalSubnetInfo>,
    /// Selects the nodes that may have the addresses. An empty selector selects all nodes.
    #[schemars(schema_with = "label_selector")]
    pub node_selector: LabelSelector,
}

/// A network without its first address, and, of IPv4, its last one; or all addresses between two, which are included.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ExternalIPRange {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cidr: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end: Option<String>,
}

/// The network of a pool.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ExternalSubnetInfo {
    /// Its router, which is never allocated.
    #[schemars(schema_with = "address")]
    pub gateway: String,
    #[schemars(schema_with = "prefix_length")]
    pub prefix_length: i32,
    /// Zero, as without the field, for untagged packets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "vlan")]
    pub vlan: Option<i32>,
}

/// What the controller has counted.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ExternalIPPoolStatus {
    pub usage: ExternalIPPoolUsage,
}

/// Numbers of addresses.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ExternalIPPoolUsage {
    #[schemars(extend("format" = "int64"))]
    pub total: i64,
    #[schemars(extend("format" = "int64"))]
    pub used: i64,
}

/// The manifest, as committed in `deploy/antrea/egresses.yaml`.
pub fn egress_manifest() -> Result<String, serde_yaml::Error> {
    generated(&with_old_version(Egress::crd()), SOURCE)
}

/// The manifest, as committed in `deploy/antrea/externalippools.yaml`.
pub fn pool_manifest() -> Result<String, serde_yaml::Error> {
    generated(&with_old_version(ExternalIPPool::crd()), SOURCE)
}

/// Serves `v1alpha2` too, of which Antrea's older manifests are. Its fields are among those of `v1beta1`, so that an API server
/// converts by the version's name alone.
fn with_old_version(mut definition: CustomResourceDefinition) -> CustomResourceDefinition {
    let kind = definition.spec.names.kind.clone();
    let old = definition.spec.versions.first().map(|version| CustomResourceDefinitionVersion {
        name: "v1alpha2".to_owned(),
        storage: false,
        deprecated: Some(true),
        deprecation_warning: Some(format!("crd.antrea.io/v1alpha2 {kind} is deprecated: use crd.antrea.io/v1beta1")),
        ..version.clone()
    });
    definition.spec.versions.extend(old);
    definition
}

const SOURCE: &str = "crates/kube/src/antrea/crd.rs";

fn address(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "string", "maxLength": 45, "anyOf": [{"format": "ipv4"}, {"format": "ipv6"}]})
}

fn addresses(generator: &mut SchemaGenerator) -> Schema {
    let items = address(generator);
    json_schema!({"type": "array", "minItems": 1, "maxItems": 8, "x-kubernetes-list-type": "atomic", "items": items})
}

fn pool_name(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "string", "minLength": 1, "maxLength": 253})
}

fn pool_names(generator: &mut SchemaGenerator) -> Schema {
    let items = pool_name(generator);
    json_schema!({"type": "array", "minItems": 1, "maxItems": 8, "x-kubernetes-list-type": "atomic", "items": items})
}

fn quantity(_generator: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "string",
        "maxLength": 32,
        "pattern": "^([0-9]+\\.?[0-9]*|\\.[0-9]+)([kMGTPE]|[KMGTPE]i|[eE][0-9]{1,2})?$",
    })
}

fn applied_to(generator: &mut SchemaGenerator) -> Schema {
    let (pods, namespaces) = (label_selector(generator), label_selector(generator));
    json_schema!({"type": "object", "properties": {"podSelector": pods, "namespaceSelector": namespaces}})
}

fn ranges(generator: &mut SchemaGenerator) -> Schema {
    let (start, end) = (address(generator), address(generator));
    json_schema!({
        "type": "array",
        "minItems": 1,
        "maxItems": 64,
        "x-kubernetes-list-type": "atomic",
        "items": {
            "type": "object",
            "properties": {"cidr": {"type": "string", "maxLength": 49, "format": "cidr"}, "start": start, "end": end},
            "x-kubernetes-validations": [{
                "rule": "has(self.cidr) ? !has(self.start) && !has(self.end) : has(self.start) && has(self.end)",
                "message": "either cidr, or start and end",
            }],
        },
        "x-kubernetes-validations": [{
            "rule": "oldSelf.all(range, range in self)",
            "message": "existing IPRanges cannot be updated or deleted",
        }],
    })
}

fn prefix_length(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "integer", "format": "int32", "minimum": 1, "maximum": 127})
}

fn vlan(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "integer", "format": "int32", "minimum": 0, "maximum": 4094})
}
