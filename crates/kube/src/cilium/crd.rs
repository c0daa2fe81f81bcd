//! Cilium's kind CiliumEgressGatewayPolicy (`cilium.io/v2`), for clusters in which Cilium does not serve it, and the kind that says
//! what has become of each, since Cilium's has no status.
//!
//! The schema and its rules refuse what Cilium's agents refuse. `deploy/cilium` is generated from these types.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, Time};
use kube::{CustomResource, CustomResourceExt};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use crate::crd::{date_time, generated, label_selector};

const SOURCE: &str = "crates/kube/src/cilium/crd.rs";

/// CiliumEgressGatewayPolicy lets pods leave towards some destinations by a gateway node, with an address of that node.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "cilium.io",
    version = "v2",
    kind = "CiliumEgressGatewayPolicy",
    plural = "ciliumegressgatewaypolicies",
    singular = "ciliumegressgatewaypolicy",
    shortname = "cegp",
    doc = "CiliumEgressGatewayPolicy lets pods leave towards some destinations by a gateway node, with an address of that node.",
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [{
    "rule": "has(self.egressGateway) || has(self.egressGateways) && size(self.egressGateways) > 0",
    "message": "either egressGateway or egressGateways",
}]))]
pub struct CiliumEgressGatewayPolicySpec {
    /// Pods that match any of these.
    #[schemars(extend("maxItems" = 64, "x-kubernetes-list-type" = "atomic"))]
    pub selectors: Vec<EgressRule>,
    /// The destinations that it applies to; with an empty list none.
    #[serde(rename = "destinationCIDRs")]
    #[schemars(schema_with = "networks")]
    pub destination_cidrs: Vec<String>,
    /// Parts of these that it does not apply to.
    #[serde(default, rename = "excludedCIDRs", skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "networks")]
    pub excluded_cidrs: Option<Vec<String>>,
    /// Where the packets leave, if `egressGateways` has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress_gateway: Option<EgressGateway>,
    /// Several, among which the pods are divided.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("maxItems" = 64, "x-kubernetes-list-type" = "atomic"))]
    pub egress_gateways: Option<Vec<EgressGateway>>,
}

/// Pods that match all of these.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [{
    "rule": "has(self.namespaceSelector) || has(self.podSelector)",
    "message": "a namespaceSelector or a podSelector",
}]))]
pub struct EgressRule {
    /// By the labels of their namespace; without one of all namespaces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "label_selector")]
    pub namespace_selector: Option<LabelSelector>,
    /// By their own labels. The label `io.kubernetes.pod.namespace` stands for the name of the namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "label_selector")]
    pub pod_selector: Option<LabelSelector>,
    /// By the labels of the node that they run on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "label_selector")]
    pub node_selector: Option<LabelSelector>,
}

/// A node and its address. Without an interface and an address: the first address of the interface of its default route.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [{
    "rule": "!(has(self.interface) && has(self.egressIP))",
    "message": "an interface or an egressIP, not both",
}]))]
pub struct EgressGateway {
    /// The first by name of these nodes that is ready.
    #[schemars(schema_with = "label_selector")]
    pub node_selector: LabelSelector,
    /// The first address of this interface.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "interface")]
    pub interface: Option<String>,
    /// An address that the node has on an interface.
    #[serde(default, rename = "egressIP", skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "address")]
    pub egress_ip: Option<String>,
}

/// EgressGatewayPolicyStatus says what has become of the CiliumEgressGatewayPolicy of its name.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "egress-agent.io",
    version = "v1alpha1",
    kind = "EgressGatewayPolicyStatus",
    plural = "egressgatewaypolicystatuses",
    singular = "egressgatewaypolicystatus",
    shortname = "egps",
    status = "GatewayPolicyStatus",
    doc = "EgressGatewayPolicyStatus says what has become of the CiliumEgressGatewayPolicy of its name. The controller alone writes it.",
    printcolumn = r#"{"name":"Gateways","type":"string","jsonPath":".status.nodes"}"#,
    printcolumn = r#"{"name":"Ready","type":"string","jsonPath":".status.conditions[?(@.type==\"Ready\")].status"}"#,
    printcolumn = r#"{"name":"Reason","type":"string","jsonPath":".status.conditions[?(@.type==\"Ready\")].reason"}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
pub struct EgressGatewayPolicyStatusSpec {}

/// What the controller has decided.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GatewayPolicyStatus {
    /// Of the policy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("format" = "int64"))]
    pub observed_generation: Option<i64>,
    /// The nodes of the gateways in use, as a table shows them.
    #[serde(default)]
    pub nodes: String,
    /// The gateways in use.
    #[serde(default)]
    #[schemars(extend("maxItems" = 64, "x-kubernetes-list-type" = "atomic"))]
    pub gateways: Vec<UsedGateway>,
    /// Accepted: the spec can be read. Ready: every packet of its pods to its destinations has a gateway.
    #[serde(default)]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<GatewayPolicyCondition>,
}

/// A node and the addresses that packets leave with.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct UsedGateway {
    pub node: String,
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub addresses: Vec<String>,
}

/// One condition.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GatewayPolicyCondition {
    #[serde(rename = "type")]
    pub type_: String,
    pub status: String,
    #[schemars(schema_with = "date_time")]
    pub last_transition_time: Time,
    pub reason: String,
    pub message: String,
}

/// The manifest, as committed in `deploy/cilium/ciliumegressgatewaypolicies.yaml`.
pub fn policy_manifest() -> Result<String, serde_yaml::Error> {
    generated(&CiliumEgressGatewayPolicy::crd(), SOURCE)
}

/// The manifest, as committed in `deploy/cilium/egressgatewaypolicystatuses.yaml`.
pub fn status_manifest() -> Result<String, serde_yaml::Error> {
    generated(&EgressGatewayPolicyStatus::crd(), SOURCE)
}

fn networks(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "maxItems": 1024,
        "x-kubernetes-list-type": "atomic",
        // As long as an IPv6 address with a length can be. What is none, the controller says.
        "items": {"type": "string", "maxLength": 49, "format": "cidr"},
    })
}

fn address(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "string", "maxLength": 45, "anyOf": [{"format": "ipv4"}, {"format": "ipv6"}]})
}

/// The kernel's limit (`IFNAMSIZ`).
fn interface(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "string", "minLength": 1, "maxLength": 15})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_are_those_of_cilium() {
        let crd = CiliumEgressGatewayPolicy::crd();
        assert_eq!(crd.metadata.name.as_deref(), Some("ciliumegressgatewaypolicies.cilium.io"));
        let schema = serde_json::to_value(&crd.spec.versions[0].schema).expect("a schema");
        let spec = &schema["openAPIV3Schema"]["properties"]["spec"];
        for field in ["selectors", "destinationCIDRs", "excludedCIDRs", "egressGateway", "egressGateways"] {
            assert!(spec["properties"][field].is_object(), "{field}");
        }
        assert_eq!(spec["required"], serde_json::json!(["destinationCIDRs", "selectors"]));
        let gateway = &spec["properties"]["egressGateway"]["properties"];
        for field in ["nodeSelector", "interface", "egressIP"] {
            assert!(gateway[field].is_object(), "{field}");
        }
        assert!(crd.spec.versions[0].subresources.is_none(), "it has no status");
    }
}
