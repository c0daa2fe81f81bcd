//! OpenShift's kind EgressRouter (`network.operator.openshift.io/v1`), and the objects that the controller makes of each: what is read
//! and written. Which objects those are, the crate `egress-router` says.
//!
//! An object is taken for the router's own if its controller is that EgressRouter. One of another owner with the same name is left
//! alone, and the EgressRouter says so.

use std::collections::{BTreeMap, BTreeSet};

use futures::{Stream, StreamExt, stream};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, ApiResource, DeleteParams, DynamicObject, GroupVersionKind, Patch, Preconditions};
use kube::core::ObjectMeta;
use kube::{Client, CustomResource, CustomResourceExt, ResourceExt};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::api_outage::ApiOutages;
use crate::assignments::{ignored, patch_params, put};
use crate::crd::{date_time, generated};
use crate::policy::status::{WriteError, condition_values};
use crate::post_params;
use crate::watches::{config, updates};
use egress_core::model::services::ServiceKey;
use egress_core::model::view::Update;
use egress_core::status::conditions::DesiredCondition;

/// The label of the objects of a router, with its name.
pub const OF_ROUTER: &str = "egress-agent.io/egress-router";
/// The annotation of its pods: the configuration that they were attached with.
pub const CONFIGURATION: &str = "egress-agent.io/egress-router-config";

/// A pod with an address of its own on an external network, by which other pods reach that network.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "network.operator.openshift.io",
    version = "v1",
    kind = "EgressRouter",
    plural = "egressrouters",
    shortname = "egr",
    namespaced,
    status = "EgressRouterStatus",
    doc = "EgressRouter is a pod with an address of its own on an external network, by which other pods reach that network.",
    printcolumn = r#"{"name":"Condition","type":"string","description":"What it is.","jsonPath":".status.conditions[?(@.status==\"True\")].type"}"#,
    printcolumn = r#"{"name":"Status","type":"string","description":"Why.","jsonPath":".status.conditions[?(@.status==\"True\")].reason"}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct EgressRouterSpec {
    /// `Redirect`, the only one.
    #[schemars(schema_with = "mode")]
    pub mode: String,
    /// What clients of the pod reach.
    #[serde(default)]
    pub redirect: RouterRedirect,
    /// The pod's interface on the external network.
    #[serde(default)]
    pub network_interface: RouterInterface,
    /// The addresses of the router; what leaves has the first of its family.
    #[schemars(schema_with = "router_addresses")]
    pub addresses: Vec<RouterAddresses>,
}

/// What clients of the pod reach.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RouterRedirect {
    /// Ports of the pod, and where they lead.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "redirect_rules")]
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

/// The pod's interface on the external network.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RouterInterface {
    #[serde(default)]
    pub macvlan: RouterMacvlan,
}

/// A macvlan above an interface of the node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RouterMacvlan {
    /// `Bridge` if there is none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(schema_with = "macvlan_mode")]
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

/// What has become of the router.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct EgressRouterStatus {
    #[serde(default)]
    #[schemars(schema_with = "router_conditions")]
    pub conditions: Vec<Value>,
}

fn mode(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "string", "enum": ["Redirect"]})
}

fn macvlan_mode(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "string", "enum": ["Bridge", "Private", "VEPA", "Passthru"]})
}

fn router_addresses(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array", "minItems": 1, "maxItems": 64, "x-kubernetes-list-type": "atomic",
        "items": {
            "type": "object",
            "required": ["ip"],
            "properties": {
                "ip": {"type": "string", "description": "With prefix length.", "minLength": 1},
                "gateway": {"type": "string", "description": "That of the node's default route if there is none."},
            },
        },
    })
}

fn redirect_rules(_: &mut SchemaGenerator) -> Schema {
    let port = json!({"type": "integer", "format": "int64", "minimum": 1, "maximum": 65535});
    json_schema!({
        "type": "array", "maxItems": 1024, "x-kubernetes-list-type": "atomic",
        "items": {
            "type": "object",
            "required": ["destinationIP", "port", "protocol"],
            "properties": {
                "destinationIP": {"type": "string", "minLength": 1},
                "port": port,
                "protocol": {"type": "string", "enum": ["TCP", "UDP", "SCTP"]},
                "targetPort": port,
            },
        },
    })
}

fn router_conditions(generator: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"],
        "items": {
            "type": "object",
            "required": ["type", "status"],
            "properties": {
                "type": {"type": "string"},
                "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
                "reason": {"type": "string"},
                "message": {"type": "string"},
                "lastTransitionTime": date_time(generator),
            },
        },
    })
}

/// The manifest, as committed in `deploy/egress-router/controller/egressrouters.yaml`.
pub fn manifest() -> Result<String, serde_yaml::Error> {
    generated(&definition(), "crates/kube/src/egress_router.rs")
}

fn definition() -> CustomResourceDefinition {
    EgressRouter::crd()
}

/// One change of what becomes of EgressRouters.
#[derive(Clone, Debug)]
pub enum RouterChange {
    Routers(Update<ServiceKey, StoredRouter>),
    Deployments(Update<ServiceKey, RouterDeployment>),
}

/// An EgressRouter as the API server has it.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredRouter {
    pub uid: String,
    /// Changes with every write of the object.
    pub version: String,
    /// What cannot be read is said in its status.
    pub spec: Result<EgressRouterSpec, String>,
    pub status: Value,
}

/// The Deployment of a router, as far as it says how the router is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RouterDeployment {
    /// The UID of its controller.
    pub owner: Option<String>,
    /// The deployment controller has seen the spec, and a pod of it is available.
    pub is_available: bool,
    /// Why it does not get on.
    pub failure: Option<String>,
}

/// EgressRouters of all namespaces, and the Deployments that were made of them.
pub fn watches(client: &Client, outages: &ApiOutages) -> impl Stream<Item = RouterChange> + Send + use<> {
    let routers = Api::all_with(client.clone(), &ApiResource::erase::<EgressRouter>(&()));
    let deployments: Api<Deployment> = Api::all(client.clone());
    let of = |what| (what, outages.clone());
    let of_router = config().labels(OF_ROUTER);
    stream::select_all([
        updates(of("EgressRouter objects"), routers, config(), |object: &DynamicObject| key(&object.metadata), router)
            .map(RouterChange::Routers)
            .boxed(),
        updates(of("deployments of EgressRouters"), deployments, of_router, |one| key(&one.metadata), deployment)
            .map(RouterChange::Deployments)
            .boxed(),
    ])
}

fn key(meta: &ObjectMeta) -> ServiceKey {
    ServiceKey { namespace: meta.namespace.clone().unwrap_or_default(), name: meta.name.clone().unwrap_or_default() }
}

fn router(object: &DynamicObject) -> StoredRouter {
    let spec = EgressRouterSpec::deserialize(&object.data["spec"]).map_err(|error| format!("spec: {error}"));
    let (uid, version) = (object.metadata.uid.clone(), object.metadata.resource_version.clone());
    let status = object.data["status"].clone();
    StoredRouter { uid: uid.unwrap_or_default(), version: version.unwrap_or_default(), spec, status }
}

fn controller(meta: &ObjectMeta) -> Option<String> {
    let owners = meta.owner_references.iter().flatten();
    owners.into_iter().find(|owner| owner.controller == Some(true)).map(|owner| owner.uid.clone())
}

fn deployment(object: &Deployment) -> RouterDeployment {
    let status = object.status.clone().unwrap_or_default();
    let is_seen = status.observed_generation >= object.metadata.generation;
    let failing = [("Progressing", "False"), ("ReplicaFailure", "True")];
    let is_failing =
        |kind: Option<&str>, status: Option<&str>| kind.zip(status).is_some_and(|one| failing.contains(&one));
    let mut conditions = status.conditions.into_iter().flatten();
    let failed = conditions.find(|one| is_failing(one.type_.as_deref(), one.status.as_deref()));
    RouterDeployment {
        owner: controller(&object.metadata),
        is_available: is_seen && status.available_replicas.is_some_and(|count| count > 0),
        failure: failed.filter(|_| is_seen).map(|one| one.message.or(one.reason).unwrap_or_default()),
    }
}

/// What the watches have brought so far.
#[derive(Default)]
pub struct RouterView {
    pub routers: BTreeMap<ServiceKey, StoredRouter>,
    pub deployments: BTreeMap<ServiceKey, RouterDeployment>,
    listed: BTreeSet<u8>,
}

impl RouterView {
    /// Takes a change. Returns whether it says anything new.
    pub fn apply(&mut self, change: RouterChange) -> bool {
        match change {
            RouterChange::Routers(update) => put(&mut self.routers, update, (&mut self.listed, 0)),
            RouterChange::Deployments(update) => put(&mut self.deployments, update, (&mut self.listed, 1)),
        }
    }

    /// Whether both kinds have been listed.
    pub fn is_whole(&self) -> bool {
        self.listed.len() == 2
    }
}

/// Writes the objects of routers and their statuses.
#[derive(Clone)]
pub struct RouterWriter {
    client: Client,
}

/// What became of an object that was to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RouterWritten {
    Done,
    /// There is one of this name that is not the router's.
    Taken,
}

impl RouterWriter {
    pub fn new(client: &Client) -> Self {
        Self { client: client.clone() }
    }

    /// Creates an object of a router, or makes it what it should be.
    ///
    /// # Errors
    /// The API server refuses it, or does not answer.
    pub async fn write(&self, object: &DynamicObject, router_uid: &str) -> Result<RouterWritten, WriteError> {
        let api =
            self.api(&object.types.as_ref().map(|types| types.kind.clone()).unwrap_or_default(), object.namespace());
        match api.create(&post_params(), object).await {
            Ok(_) => return Ok(RouterWritten::Done),
            Err(kube::Error::Api(status)) if status.code == 409 => {}
            Err(error) => return Err(error.into()),
        }
        let name = object.name_any();
        let Some(found) = api.get_opt(&name).await? else { return Err(WriteError::Stale) };
        if controller(&found.metadata).as_deref() != Some(router_uid) {
            return Ok(RouterWritten::Taken);
        }
        api.patch(&name, &patch_params(), &Patch::Merge(object)).await?;
        Ok(RouterWritten::Done)
    }

    /// Removes the Service of a router that has no ports any more.
    ///
    /// # Errors
    /// The API server refuses it, or does not answer.
    pub async fn remove_service(&self, key: &ServiceKey, router_uid: &str) -> Result<(), WriteError> {
        let api = self.api("Service", Some(key.namespace.clone()));
        let found = api.get_opt(&key.name).await?;
        let Some(own) = found.filter(|found| controller(&found.metadata).as_deref() == Some(router_uid)) else {
            return Ok(());
        };
        let of_this = Preconditions { uid: own.uid(), resource_version: None };
        let params = DeleteParams { preconditions: Some(of_this), ..DeleteParams::default() };
        ignored(api.delete(&key.name, &params).await, 404)
    }

    /// Writes the status of an EgressRouter.
    ///
    /// # Errors
    /// The API server refuses it, or does not answer.
    pub async fn set_status(&self, key: &ServiceKey, status: &Value) -> Result<(), WriteError> {
        let api: Api<DynamicObject> =
            Api::namespaced_with(self.client.clone(), &key.namespace, &ApiResource::erase::<EgressRouter>(&()));
        let patch = Patch::Merge(json!({"status": status}));
        ignored(api.patch_status(&key.name, &patch_params(), &patch).await, 404)
    }

    fn api(&self, kind: &str, namespace: Option<String>) -> Api<DynamicObject> {
        let resource = match kind {
            "Deployment" => ApiResource::erase::<Deployment>(&()),
            "Service" => ApiResource::erase::<Service>(&()),
            _ => attachment_resource(),
        };
        Api::namespaced_with(self.client.clone(), &namespace.unwrap_or_default(), &resource)
    }
}

/// Multus' kind NetworkAttachmentDefinition, whose plural has hyphens.
fn attachment_resource() -> ApiResource {
    let kind = GroupVersionKind::gvk("k8s.cni.cncf.io", "v1", "NetworkAttachmentDefinition");
    ApiResource::from_gvk_with_plural(&kind, "network-attachment-definitions")
}

/// A status as it is written, with the times of conditions that have not changed.
pub fn status_value(conditions: &[DesiredCondition], stored: &Value) -> Value {
    json!({"conditions": condition_values(conditions, stored)})
}
