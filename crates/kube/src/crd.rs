//! The API types: EgressIP and EgressService (`k8s.ovn.org/v1`), and EgressNode (`egress-agent.io/v1alpha1`), which holds the
//! facts of a node.
//!
//! `deploy/crd` and `deploy/base/egressnodes.yaml` are generated from these types (`cargo xtask codegen`). The schema
//! refuses what no reader could interpret: a text that is no address, a selector without an operator. Objects are watched in
//! untyped form and converted one by one, so that an object of another version of the schema does not hide the others; the
//! controller reports what is wrong with such an object in its conditions.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, Time};
use kube::api::ApiResource;
use kube::{CustomResource, CustomResourceExt};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use egress_core::model::policy::SourceKind;

/// EgressIP gives the pods that it selects stable source addresses towards the world outside the cluster.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "k8s.ovn.org",
    version = "v1",
    kind = "EgressIP",
    plural = "egressips",
    singular = "egressip",
    shortname = "eip",
    status = "EgressIPStatus",
    doc = "EgressIP gives the pods that it selects stable source addresses towards the world outside the cluster.",
    printcolumn = r#"{"name":"EgressIPs","type":"string","jsonPath":".spec.egressIPs[*]"}"#,
    printcolumn = r#"{"name":"Assigned Node","type":"string","jsonPath":".status.items[*].node"}"#,
    printcolumn = r#"{"name":"Assigned EgressIPs","type":"string","jsonPath":".status.items[*].egressIP"}"#,
    printcolumn = r#"{"name":"Selected Pods","type":"integer","jsonPath":".status.selectedPods"}"#,
    printcolumn = r#"{"name":"Reason","type":"string","description":"Of the condition Assigned.","jsonPath":".status.conditions[?(@.type==\"Assigned\")].reason"}"#,
    printcolumn = r#"{"name":"Degraded","type":"string","description":"True if something is wrong although the object serves; the condition has the reason.","jsonPath":".status.conditions[?(@.type==\"Degraded\")].status"}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct EgressIPSpec {
    /// The source addresses, IPv4 or IPv6. Each is assigned to another node, and all that are assigned serve every
    /// selected pod.
    // An API server validates only what an update changes (KEP-4008, on since Kubernetes 1.30): objects that are older than
    // these rules stay as they are, and their status can be written.
    #[serde(rename = "egressIPs")]
    #[schemars(schema_with = "addresses")]
    pub egress_ips: Vec<String>,
    /// Selects the namespaces of the pods. An empty selector selects all namespaces.
    #[schemars(schema_with = "label_selector")]
    pub namespace_selector: LabelSelector,
    /// Selects pods of those namespaces. Without it, or where it is empty, all of them are selected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "label_selector")]
    pub pod_selector: Option<LabelSelector>,
}

/// What the controller has decided.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct EgressIPStatus {
    /// The assigned addresses and their nodes.
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub items: Vec<EgressIPStatusItem>,
    /// Pods whose packets leave by this object, on all nodes; those that an older object serves are that one's. Counted every
    /// few seconds.
    // An API server of 1.36 warns at each apply of a format that it does not know, and it knows no unsigned ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("format" = "int64"))]
    pub selected_pods: Option<u32>,
    /// Assigned: True when every address has a node. Degraded: True when it serves, but with some of its addresses only,
    /// or with a spec that cannot be read.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<EgressIPCondition>,
    /// The generation of the spec that this status is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
}

/// One assigned address.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct EgressIPStatusItem {
    /// The node that answers for the address.
    pub node: String,
    /// The address in its canonical form.
    #[serde(rename = "egressIP")]
    pub egress_ip: String,
}

/// One condition.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct EgressIPCondition {
    #[serde(rename = "type")]
    pub type_: String,
    /// True, False or Unknown.
    #[schemars(extend("enum" = ["True", "False", "Unknown"]))]
    pub status: String,
    /// One word for the cause.
    pub reason: String,
    /// The cause for a person.
    pub message: String,
    /// When the status last changed.
    #[schemars(schema_with = "date_time")]
    pub last_transition_time: Time,
    /// The generation that the condition is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
}

/// EgressService makes the pods behind a Service of type LoadBalancer leave the cluster with the Service's own address, or
/// by another network. It has the Service's name and namespace.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "k8s.ovn.org",
    version = "v1",
    kind = "EgressService",
    plural = "egressservices",
    singular = "egressservice",
    namespaced,
    status = "EgressServiceStatus",
    doc = "EgressService makes the pods behind a Service of type LoadBalancer leave the cluster with the Service's own address, or by another network. It has the Service's name and namespace.",
    printcolumn = r#"{"name":"Assigned Host","type":"string","jsonPath":".status.host"}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct EgressServiceSpec {
    /// What the source address of the pods' packets follows from. LoadBalancerIP, also if it is omitted: the address that
    /// the Service's load balancer gave it; all of the pods leave by one node. Network: the node of each pod, and its routes.
    #[serde(default, rename = "sourceIPBy", skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "source_ip_by")]
    pub source_ip_by: Option<SourceIpBy>,
    /// Selects the nodes by one of which the pods may leave. Without it, all nodes are selected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "label_selector")]
    pub node_selector: Option<LabelSelector>,
    /// The routing table that the pods' packets follow where they leave: its number, or its name on the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "text")]
    pub network: Option<String>,
}

/// What the source address follows from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SourceIpBy {
    #[serde(rename = "LoadBalancerIP")]
    LoadBalancerIp,
    Network,
}

/// What the controller has decided.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct EgressServiceStatus {
    /// The node by which the pods leave; ALL if each leaves by its own; empty while none is assigned.
    pub host: String,
}

/// EgressAssignment is what the controller has made of objects of other kinds: an EgressService, after which it is named
/// `<namespace>.<name>`, or all Egresses with the same addresses. The controller alone writes it.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "egress-agent.io",
    version = "v1alpha1",
    kind = "EgressAssignment",
    plural = "egressassignments",
    singular = "egressassignment",
    shortname = "ega",
    status = "EgressIPStatus",
    doc = "EgressAssignment is what the controller has made of objects of other kinds: EgressServices, Egresses and CiliumEgressGatewayPolicies. The controller alone writes it.",
    printcolumn = r#"{"name":"Addresses","type":"string","jsonPath":".spec.egressIPs[*]"}"#,
    printcolumn = r#"{"name":"Kind","type":"string","jsonPath":".spec.rules[0].from.kind"}"#,
    printcolumn = r#"{"name":"Name","type":"string","jsonPath":".spec.rules[*].from.name"}"#,
    printcolumn = r#"{"name":"Assigned Node","type":"string","jsonPath":".status.items[*].node"}"#,
    printcolumn = r#"{"name":"Selected Pods","type":"integer","jsonPath":".status.selectedPods"}"#,
    printcolumn = r#"{"name":"Reason","type":"string","description":"Of the condition Assigned.","jsonPath":".status.conditions[?(@.type==\"Assigned\")].reason"}"#,
    printcolumn = r#"{"name":"Degraded","type":"string","description":"True if something is wrong although the object serves; the condition has the reason.","jsonPath":".status.conditions[?(@.type==\"Degraded\")].status"}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct EgressAssignmentSpec {
    /// The source addresses.
    #[serde(rename = "egressIPs")]
    #[schemars(schema_with = "addresses")]
    pub egress_ips: Vec<String>,
    /// Service: they are addresses of a Service's load balancer, and one node serves all of them. Host: nodes have them on
    /// interfaces, and a node that has one serves it.
    #[serde(default, rename = "addressesOf", skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "addresses_of")]
    pub addresses_of: Option<AddressesOf>,
    /// Whose pods leave with them, one for each object that has these addresses.
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub rules: Vec<AssignmentRule>,
    /// The nodes that may host them; without a list all nodes. Of a Service's addresses only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub nodes: Option<Vec<String>>,
    /// Addresses of no other use may be on nodes that match all of these; without a list on all nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "plain_selectors")]
    pub node_selectors: Option<Vec<LabelSelector>>,
    /// Networks in VLANs of the nodes' uplinks: an address in one of them is hosted there alone, on a VLAN device that each
    /// selected node makes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub vlan_networks: Option<Vec<AssignedVlanNetwork>>,
    /// Of hosts' addresses: nodes that could serve the pods with other ones match one of these. The controller probes them too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "plain_selectors")]
    pub candidates: Option<Vec<LabelSelector>>,
    /// What the pods together may send by each gateway.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<AssignedBandwidth>,
    /// The routing table that the pods' packets and answers to the Service's clients follow, on the node where they leave.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "text")]
    pub network: Option<String>,
    /// Network: each pod leaves by its own node and by the routing table, and no address is assigned.
    #[serde(default, rename = "sourceIPBy", skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "source_ip_by")]
    pub source_ip_by: Option<SourceIpBy>,
}

/// More is no limit. Exact as a floating point number, as JSON schemas have their bounds: an API server refuses every object
/// with a field whose bound it cannot read as a number of 64 bits.
pub const MOST_BITS: u64 = 1_000_000_000_000_000;

/// A bandwidth limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AssignedBandwidth {
    /// Bits per second.
    #[schemars(extend("format" = "int64", "minimum" = 1, "maximum" = MOST_BITS))]
    pub rate: u64,
    /// Bits that are sent at once after a pause.
    #[schemars(extend("format" = "int64", "minimum" = 0, "maximum" = MOST_BITS))]
    pub burst: u64,
}

/// A network in a VLAN.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AssignedVlanNetwork {
    #[schemars(extend("format" = "int64", "minimum" = 1, "maximum" = 4094))]
    pub vlan: u16,
    /// The router's address.
    pub gateway: String,
    #[schemars(extend("format" = "int64", "minimum" = 1, "maximum" = 128))]
    pub prefix_length: u8,
}

/// What else the addresses are used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AddressesOf {
    Service,
    Host,
}

/// The pods of one object.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AssignmentRule {
    pub from: AssignmentSource,
    /// A pod is selected by any of them.
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub selectors: Vec<AssignmentSelector>,
    /// The destinations that it applies to; without a list all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub destinations: Option<Vec<String>>,
    /// Prefixes that it does not apply to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub excluded: Option<Vec<String>>,
    /// The addresses among which the pods are divided, by rendezvous hashing of their UIDs: the rule is for those that have the
    /// only address of this assignment. Without a list it is for all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "addresses")]
    pub among: Option<Vec<String>>,
}

/// An object that a user wrote.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AssignmentSource {
    #[schemars(schema_with = "source_kind")]
    pub kind: SourceKind,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    pub name: String,
    pub uid: String,
    /// When it was created, in seconds since 1970: of objects of one kind the oldest comes first.
    #[schemars(extend("format" = "int64"))]
    pub created: i64,
}

/// Pods by the labels of their namespace, their own, and their node's.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AssignmentSelector {
    #[schemars(schema_with = "plain_selector")]
    pub namespaces: LabelSelector,
    #[schemars(schema_with = "plain_selector")]
    pub pods: LabelSelector,
    /// Without one all nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "plain_selector")]
    pub nodes: Option<LabelSelector>,
}

/// EgressNode holds the facts that a node's agent publishes. It has the node's name, and only that node's agent writes it.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "egress-agent.io",
    version = "v1alpha1",
    kind = "EgressNode",
    plural = "egressnodes",
    singular = "egressnode",
    shortname = "egn",
    status = "EgressNodeStatus",
    doc = "EgressNode holds the facts that a node's agent publishes. It has the node's name, and only that node's agent writes it.",
    printcolumn = r#"{"name":"Health Addresses","type":"string","jsonPath":".status.healthAddresses"}"#,
    printcolumn = r#"{"name":"Uplink","type":"string","jsonPath":".status.uplink.mac"}"#,
    printcolumn = r#"{"name":"State","type":"string","description":"Of the uplink: Usable if the node can host egress IPs on it.","jsonPath":".status.interfaces[0].state"}"#,
    printcolumn = r#"{"name":"Reason","type":"string","description":"Why the uplink is not Usable.","jsonPath":".status.interfaces[0].reason"}"#,
    printcolumn = r#"{"name":"Released","type":"string","jsonPath":".status.released[*].address"}"#,
    printcolumn = r#"{"name":"Prepared","type":"string","jsonPath":".status.prepared[*].address"}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
pub struct EgressNodeSpec {}

/// Facts of a node, and its acknowledgements of hand-overs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct EgressNodeStatus {
    /// The UID of the Node that these facts are about.
    #[serde(default, rename = "nodeUID")]
    pub node_uid: String,
    /// The node's networks, where no CNI annotates its Node with them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub networks: Option<NodeNetworks>,
    /// The interface by which its pods' packets leave.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uplink: Option<NodeUplink>,
    /// The interfaces that can host egress IPs, the uplink first. An agent of an older version has no such list.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("maxItems" = 32, "x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub interfaces: Option<Vec<NodeInterface>>,
    /// Where the agent answers health checks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("maxItems" = 4, "x-kubernetes-list-type" = "atomic"))]
    pub health_addresses: Option<Vec<String>>,
    /// Egress IPs of open hand-overs that the node's kernel no longer holds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("maxItems" = 4096, "x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["address"]))]
    pub released: Option<Vec<ReleasedAddress>>,
    /// Egress IPs of open hand-overs that the node is ready to take over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("maxItems" = 4096, "x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["address"]))]
    pub prepared: Option<Vec<PreparedAddress>>,
    /// The number of the latest endless lease that has ended and whose end the node's programs obey.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("format" = "int64"))]
    pub bounded_lease: Option<u64>,
}

/// Networks with their prefix lengths.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct NodeNetworks {
    /// The node's own address on its uplink, of each family.
    #[schemars(extend("maxItems" = 2, "x-kubernetes-list-type" = "atomic"))]
    pub primary: Vec<String>,
    /// Every address of the node.
    #[schemars(extend("maxItems" = 1024, "x-kubernetes-list-type" = "atomic"))]
    pub all: Vec<String>,
}

/// What other nodes need of a node's uplink.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeUplink {
    /// Its link address, by which others recognise its answers.
    pub mac: String,
    /// The gateways of its routes there.
    #[schemars(extend("maxItems" = 64, "x-kubernetes-list-type" = "atomic"))]
    pub next_hops: Vec<String>,
}

/// An Ethernet device with an address of the node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct NodeInterface {
    pub name: String,
    /// The kernel's number of the device.
    #[schemars(extend("format" = "int64"))]
    pub index: u32,
    /// Its link address.
    pub mac: String,
    /// The largest packet in bytes, from the IP header on.
    #[schemars(extend("format" = "int64"))]
    pub mtu: u32,
    /// Pods' packets without an egress IP leave by it. An address in any of its networks belongs to it.
    pub uplink: bool,
    /// The number of a VLAN device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("format" = "int64"))]
    pub vlan: Option<u16>,
    /// Its first address of each family.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("maxItems" = 2, "x-kubernetes-list-type" = "atomic"))]
    pub addresses: Vec<String>,
    /// The networks of its addresses.
    #[schemars(extend("maxItems" = 64, "x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["network"]))]
    pub networks: Vec<InterfaceNetwork>,
    /// Prefixes beyond its networks that it has routes to, the shortest ones. Where the addresses of an object lie in several
    /// networks, a flow leaves by one whose interface has the most specific route to its destination.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("maxItems" = 64, "x-kubernetes-list-type" = "set"))]
    pub destinations: Vec<String>,
    /// Absent: it hosts no egress IP. Attached: it keeps its egress IPs, and cannot send. Usable: it can.
    #[schemars(extend("enum" = ["Absent", "Attached", "Usable"]))]
    pub state: String,
    /// One word for why it is not Usable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// A network of an interface.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct InterfaceNetwork {
    pub network: String,
    /// One word for why it hosts no egress IP; absent if it can host some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub excluded: Option<String>,
}

/// One acknowledgement of the old owner.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ReleasedAddress {
    pub address: String,
    /// The number of the hand-over.
    #[schemars(extend("format" = "int64"))]
    pub hand_over: u64,
    /// The node that it forwards packets for the address to, if it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
}

/// One acknowledgement of the new owner.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PreparedAddress {
    pub address: String,
    /// The number of the hand-over.
    #[schemars(extend("format" = "int64"))]
    pub hand_over: u64,
    /// The node that has or had the address.
    pub from: String,
    /// Every node may send packets for the address here.
    pub open: bool,
}

/// The kind EgressIP, untyped.
pub fn egressip_resource() -> ApiResource {
    ApiResource::erase::<EgressIP>(&())
}

/// The kind EgressService, untyped.
pub fn egress_service_resource() -> ApiResource {
    ApiResource::erase::<EgressService>(&())
}

/// The kind EgressAssignment, untyped.
pub fn egress_assignment_resource() -> ApiResource {
    ApiResource::erase::<EgressAssignment>(&())
}

/// The kind of an object that users write, untyped.
pub fn source_resource(kind: SourceKind) -> ApiResource {
    match kind {
        SourceKind::EgressService => egress_service_resource(),
        SourceKind::EgressIp => egressip_resource(),
        SourceKind::Egress => egress_resource(),
        SourceKind::CiliumEgressGatewayPolicy => gateway_policy_resource(),
    }
}

/// Cilium's kind CiliumEgressGatewayPolicy, untyped.
pub fn gateway_policy_resource() -> ApiResource {
    ApiResource::erase::<crate::cilium::crd::CiliumEgressGatewayPolicy>(&())
}

/// Antrea's kind Egress, untyped.
pub fn egress_resource() -> ApiResource {
    ApiResource::erase::<crate::antrea::crd::Egress>(&())
}

/// The kind EgressNode, untyped: one object that another version of the schema let through does not hide all others.
pub fn egress_node_resource() -> ApiResource {
    ApiResource::erase::<EgressNode>(&())
}

const SOURCE: &str = "crates/kube/src/crd.rs";

/// The manifest, as committed in `deploy/crd/crd.yaml`.
pub fn manifest() -> Result<String, serde_yaml::Error> {
    generated(&EgressIP::crd(), SOURCE)
}

/// The manifest, as committed in `deploy/crd/egressservices.yaml`.
pub fn service_manifest() -> Result<String, serde_yaml::Error> {
    generated(&egress_service_definition(), SOURCE)
}

/// An object needs no spec, as in OVN-Kubernetes' definition.
fn egress_service_definition() -> CustomResourceDefinition {
    let mut definition = EgressService::crd();
    let schemas = definition.spec.versions.iter_mut().filter_map(|version| version.schema.as_mut());
    for schema in schemas.filter_map(|schema| schema.open_api_v3_schema.as_mut()) {
        schema.required = None;
    }
    definition
}

/// The manifest, as committed in `deploy/base/egressassignments.yaml`.
pub fn assignment_manifest() -> Result<String, serde_yaml::Error> {
    generated(&EgressAssignment::crd(), SOURCE)
}

/// The manifest, as committed in `deploy/base/egressnodes.yaml`.
pub fn node_manifest() -> Result<String, serde_yaml::Error> {
    generated(&EgressNode::crd(), SOURCE)
}

pub(crate) fn generated(crd: &CustomResourceDefinition, source: &str) -> Result<String, serde_yaml::Error> {
    let header = format!("# Generated by `cargo xtask codegen` from {source}.\n");
    Ok(format!("{header}{}", serde_yaml::to_string(crd)?))
}

fn text(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "string"})
}

fn source_ip_by(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "string", "enum": ["LoadBalancerIP", "Network"]})
}

fn addresses_of(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "string", "enum": ["Service", "Host"]})
}

fn source_kind(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "string", "enum": ["EgressService", "Egress", "CiliumEgressGatewayPolicy"]})
}

fn plain_selectors(generator: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "array", "x-kubernetes-list-type": "atomic", "items": plain_selector(generator)})
}

/// A label selector that the controller has checked.
fn plain_selector(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "x-kubernetes-map-type": "atomic",
        "properties": {
            "matchLabels": {"type": "object", "additionalProperties": {"type": "string"}},
            "matchExpressions": {
                "type": "array",
                "x-kubernetes-list-type": "atomic",
                "items": {
                    "type": "object",
                    "required": ["key", "operator"],
                    "properties": {
                        "key": {"type": "string"},
                        "operator": {"type": "string"},
                        "values": {"type": "array", "items": {"type": "string"}, "x-kubernetes-list-type": "atomic"},
                    },
                },
            },
        },
    })
}

pub(crate) fn date_time(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "string", "format": "date-time"})
}

/// At most 64 addresses. Every Kubernetes with `apiextensions.k8s.io/v1` knows these formats, unlike CEL's `isIP` (1.31). An API
/// server parses them with Go's `net.ParseIP`, which accepts no prefix length, no zone, no number above 255 and no leading zero.
fn addresses(_: &mut SchemaGenerator) -> Schema {
    // The longest form of an IPv6 address: eight groups, of which the last two are an IPv4 address.
    const LONGEST: usize = 45;
    json_schema!({
        "type": "array",
        "maxItems": 64,
        "x-kubernetes-list-type": "atomic",
        "items": {
            "type": "string",
            "maxLength": LONGEST,
            "anyOf": [{"format": "ipv4"}, {"format": "ipv6"}],
        },
    })
}

/// A label selector as the API conventions define it. The rule has a bounded cost, since the list is bounded.
pub(crate) fn label_selector(_: &mut SchemaGenerator) -> Schema {
    let operators = ["In", "NotIn", "Exists", "DoesNotExist"];
    let values_fit = "self.operator in ['In', 'NotIn'] ? has(self.values) && size(self.values) > 0 \
                      : !has(self.values) || size(self.values) == 0";
    json_schema!({
        "type": "object",
        "x-kubernetes-map-type": "atomic",
        "properties": {
            "matchLabels": {
                "description": "Labels that must be there with these values.",
                "type": "object",
                "additionalProperties": {"type": "string"},
            },
            "matchExpressions": {
                "description": "Conditions on labels, all of which must hold.",
                "type": "array",
                "maxItems": 64,
                "x-kubernetes-list-type": "atomic",
                "items": {
                    "type": "object",
                    "required": ["key", "operator"],
                    "properties": {
                        "key": {"description": "The label.", "type": "string", "minLength": 1},
                        "operator": {"description": "How values are compared.", "type": "string", "enum": operators},
                        "values": {
                            "description": "For In and NotIn.",
                            "type": "array",
                            "items": {"type": "string"},
                            "x-kubernetes-list-type": "atomic",
                        },
                    },
                    "x-kubernetes-validations": [{
                        "rule": values_fit,
                        "message": "In and NotIn need values, Exists and DoesNotExist take none",
                    }],
                },
            },
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::antrea::crd::{Egress, ExternalIPPool};
    use crate::cilium::crd::{CiliumEgressGatewayPolicy, EgressGatewayPolicyStatus};
    use crate::egress_router::EgressRouter;

    #[test]
    fn the_manifest_has_the_names_and_columns_that_users_know() {
        let crd = EgressIP::crd();
        let names = crd.spec.names;
        assert_eq!((names.plural.as_str(), names.kind.as_str()), ("egressips", "EgressIP"));
        assert_eq!(names.short_names.as_deref(), Some(&["eip".to_owned()][..]));
        assert_eq!(crd.spec.scope, "Cluster");
        let version = &crd.spec.versions[0];
        let columns = version.additional_printer_columns.iter().flatten().map(|c| c.name.as_str());
        let expected =
            ["EgressIPs", "Assigned Node", "Assigned EgressIPs", "Selected Pods", "Reason", "Degraded", "Age"];
        assert_eq!(columns.collect::<Vec<_>>(), expected);
        assert!(version.subresources.as_ref().is_some_and(|s| s.status.is_some()));
    }

    /// Short names of one API group, and of ours against all, name one kind. `eip` is also that of Antrea's pools, in Antrea's group.
    #[test]
    fn kinds_have_names_of_their_own_and_are_in_no_category() {
        let own = [EgressAssignment::crd(), EgressNode::crd(), EgressGatewayPolicyStatus::crd()];
        let others = [
            EgressIP::crd(),
            egress_service_definition(),
            Egress::crd(),
            ExternalIPPool::crd(),
            CiliumEgressGatewayPolicy::crd(),
            EgressRouter::crd(),
        ];
        let names = |crd: &CustomResourceDefinition| crd.spec.names.short_names.clone().unwrap_or_default();
        let mut taken: Vec<String> = others.iter().flat_map(names).collect();
        for crd in &own {
            let short = names(crd);
            assert!(!short.is_empty() && short.iter().all(|name| !taken.contains(name)), "{short:?} beside {taken:?}");
            taken.extend(short);
        }
        for crd in own.iter().chain(&others) {
            assert_eq!(crd.spec.names.categories, None, "{:?}: `kubectl get all` lists it", crd.metadata.name);
            let columns = crd.spec.versions[0].additional_printer_columns.iter().flatten();
            let ages = columns.filter(|column| column.name == "Age" && column.type_ == "date").count();
            assert_eq!(ages, 1, "{:?}", crd.metadata.name);
        }
    }

    #[test]
    fn an_egress_service_has_the_names_and_fields_of_ovn_kubernetes() {
        let definition = egress_service_definition();
        let names = &definition.spec.names;
        assert_eq!((names.plural.as_str(), names.kind.as_str()), ("egressservices", "EgressService"));
        assert_eq!((names.short_names.as_deref(), definition.spec.scope.as_str()), (None, "Namespaced"));
        let version = &definition.spec.versions[0];
        let columns = version.additional_printer_columns.iter().flatten();
        let columns: Vec<_> = columns.map(|column| (column.name.as_str(), column.json_path.as_str())).collect();
        assert_eq!(columns, [("Assigned Host", ".status.host"), ("Age", ".metadata.creationTimestamp")]);
        assert!(version.served && version.storage && version.name == "v1");
        assert!(version.subresources.as_ref().is_some_and(|subresources| subresources.status.is_some()));
        let definition = serde_json::to_value(&definition).expect("serializable");
        let schema = &definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
        assert_eq!(schema["required"], serde_json::Value::Null);
        let spec = &schema["properties"]["spec"];
        let fields: Vec<_> = spec["properties"].as_object().expect("fields").keys().map(String::as_str).collect();
        assert_eq!(
            (fields, &spec["required"]),
            (vec!["network", "nodeSelector", "sourceIPBy"], &serde_json::Value::Null)
        );
        assert_eq!(spec["properties"]["sourceIPBy"]["enum"], serde_json::json!(["LoadBalancerIP", "Network"]));
        assert_eq!(spec["properties"]["nodeSelector"]["x-kubernetes-map-type"], "atomic");
        let status = &schema["properties"]["status"];
        assert_eq!(
            (&status["required"], &status["properties"]["host"]["type"]),
            (&serde_json::json!(["host"]), &"string".into())
        );
    }

    #[test]
    fn egress_services_are_read_and_written_without_loss() {
        let whole = "{apiVersion: k8s.ovn.org/v1, kind: EgressService, metadata: {namespace: shop, name: front}, \
                     spec: {sourceIPBy: LoadBalancerIP, nodeSelector: {matchLabels: {rack: a}}, network: \"100\"}, \
                     status: {host: worker-2}}";
        let of_network = "{apiVersion: k8s.ovn.org/v1, kind: EgressService, metadata: {namespace: shop, name: front}, \
                          spec: {sourceIPBy: Network, network: storage}, status: {host: ALL}}";
        let empty = "{apiVersion: k8s.ovn.org/v1, kind: EgressService, metadata: {namespace: shop, name: front}, \
                     spec: {}, status: {host: \"\"}}";
        for text in [whole, of_network, empty] {
            let value: serde_json::Value = serde_yaml::from_str(text).expect("YAML");
            let object: EgressService = serde_json::from_value(value.clone()).expect("an EgressService");
            assert_eq!(serde_json::to_value(&object).expect("serializable"), value);
        }
        let object: EgressService = serde_yaml::from_str(whole).expect("an EgressService");
        assert_eq!(object.spec.source_ip_by, Some(SourceIpBy::LoadBalancerIp));
        let typo = whole.replace("LoadBalancerIP", "LoadBalancerIp");
        assert!(serde_yaml::from_str::<EgressService>(&typo).is_err());
    }

    #[test]
    fn the_longest_address_fits() {
        let crd = serde_json::to_value(EgressIP::crd()).expect("serializable");
        let schema = &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
        let most = &schema["properties"]["spec"]["properties"]["egressIPs"]["items"]["maxLength"];
        let longest = "abcd:abcd:abcd:abcd:abcd:abcd:255.255.255.255";
        assert!(longest.parse::<std::net::IpAddr>().is_ok());
        assert_eq!(most.as_u64(), u64::try_from(longest.len()).ok());
    }

    #[test]
    fn the_schema_is_structural() {
        fn check(schema: &serde_json::Value, path: &str) {
            let Some(schema) = schema.as_object() else { return };
            assert!(schema.contains_key("type"), "{path} has no type");
            for word in ["$ref", "allOf", "oneOf", "not"] {
                assert!(!schema.contains_key(word), "{path} has {word}");
            }
            // A structural schema may not have these in a branch: they would change what is pruned.
            for branch in schema.get("anyOf").and_then(|any| any.as_array()).into_iter().flatten() {
                let words = branch.as_object().into_iter().flat_map(|branch| branch.keys());
                assert_eq!(words.collect::<Vec<_>>(), ["format"], "{path}");
            }
            if let Some(format) = schema.get("format").and_then(|format| format.as_str()) {
                assert!(
                    ["int64", "date-time"].contains(&format),
                    "{path} has a format that Kubernetes does not know: {format}"
                );
            }
            for (name, property) in schema.get("properties").and_then(|p| p.as_object()).into_iter().flatten() {
                check(property, &format!("{path}.{name}"));
            }
            if let Some(items) = schema.get("items") {
                check(items, &format!("{path}[]"));
            }
        }
        for crd in [EgressIP::crd(), egress_service_definition(), EgressNode::crd()] {
            let crd = serde_json::to_value(crd).expect("serializable");
            check(&crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"], "");
        }
    }
}
