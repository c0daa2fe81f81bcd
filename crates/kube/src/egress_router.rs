//! OpenShift's kind EgressRouter (`network.operator.openshift.io/v1`), as its operator reads it.

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A pod with an address of its own on an external network, by which other pods reach that network.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(group = "network.operator.openshift.io", version = "v1", kind = "EgressRouter", namespaced)]
#[serde(rename_all = "camelCase")]
pub struct EgressRouterSpec {
    /// `Redirect`, the only one.
    pub mode: String,
    #[serde(default)]
    pub redirect: RouterRedirect,
    #[serde(default)]
    pub network_interface: RouterInterface,
    pub addresses: Vec<RouterAddresses>,
}

/// What clients of the pod reach.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RouterRedirect {
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub redirect_rules: Vec<RouterRedirectRule>,
    /// Takes what no rule takes.
    #[serde(default, rename = "fallbackIP", skip_serializing_if = "Option::is_none")]
    pub fallback_ip: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RouterRedirectRule {
    #[serde(rename = "destinationIP")]
    pub destination_ip: String,
    pub port: u16,
    /// `TCP`, `UDP` or `SCTP`.
    pub protocol: String,
    /// That of the pod if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target_port: Option<u16>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RouterInterface {
    #[serde(default)]
    pub macvlan: RouterMacvlan,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RouterMacvlan {
    /// `Bridge`, `Private`, `VEPA` or `Passthru`; `Bridge` if there is none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub mode: String,
    /// The node's interface below; found by the addresses if there is none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub master: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RouterAddresses {
    /// With prefix length.
    pub ip: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<String>,
}
