//! Lists the objects of a system in a cluster, and writes what they become, with the rights of the user.

use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::api::{Api, ApiResource, DynamicObject, ListParams, Patch, PatchParams, TypeMeta};
use kube::core::GroupVersionKind;
use kube::{Client, Error, ResourceExt};
use serde_json::Value;
use tokio::time::timeout;

use super::EgressSystem;
use crate::admin::RequestError;
use crate::{antrea, crd};

/// Objects per list request.
const PAGE: u32 = 500;
/// Of each request.
const TIMEOUT: Duration = Duration::from_secs(10);
/// In `managedFields`.
const MANAGER: &str = "egress-agent-migrate";

/// The kinds of each system.
fn resources(system: EgressSystem) -> Vec<ApiResource> {
    let of_sdn = |kind: &str, plural: &str| {
        ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk("network.openshift.io", "v1", kind), plural)
    };
    match system {
        EgressSystem::Antrea => vec![antrea::pool_resource(), crd::egress_resource()],
        EgressSystem::Cilium => vec![crd::gateway_policy_resource()],
        EgressSystem::OpenShiftSdn => {
            vec![of_sdn("HostSubnet", "hostsubnets"), of_sdn("NetNamespace", "netnamespaces")]
        }
        EgressSystem::OvnKubernetes => vec![crd::egressip_resource(), crd::egress_service_resource()],
    }
}

/// Of the kinds that are written.
fn resource(kind: &str) -> ApiResource {
    let systems = [EgressSystem::Antrea, EgressSystem::Cilium, EgressSystem::OvnKubernetes];
    let found = systems.into_iter().flat_map(resources).find(|resource| resource.kind == kind);
    found.unwrap_or_else(|| ApiResource::erase::<Node>(&()))
}

/// All objects of a system. Kinds that the cluster does not have are none.
pub async fn objects(client: &Client, system: EgressSystem) -> Result<Vec<DynamicObject>, RequestError> {
    let what = "list the objects to migrate";
    let mut found = Vec::new();
    for resource in resources(system) {
        let api: Api<DynamicObject> = Api::all_with(client.clone(), &resource);
        let mut page = ListParams::default().limit(PAGE);
        loop {
            let list = match timeout(TIMEOUT, api.list(&page)).await {
                Ok(Ok(list)) => list,
                Ok(Err(Error::Api(status))) if status.code == 404 => break,
                Ok(Err(source)) => return Err(RequestError::Answered { what, source }),
                Err(_) => return Err(RequestError::Unanswered { what }),
            };
            // Items of a list have no kind of their own.
            let types = TypeMeta { api_version: resource.api_version.clone(), kind: resource.kind.clone() };
            let typed = |object: DynamicObject| DynamicObject { types: Some(types.clone()), ..object };
            found.extend(list.items.into_iter().map(typed));
            page.continue_token = list.metadata.continue_.filter(|token| !token.is_empty());
            if page.continue_token.is_none() {
                break;
            }
        }
    }
    Ok(found)
}

/// Writes an object by a server-side apply, which refuses to change what another manager has written.
pub async fn apply(client: &Client, object: &Value) -> Result<(), RequestError> {
    let what = "apply an object";
    let object: DynamicObject = serde_json::from_value(object.clone())
        .map_err(|error| RequestError::Answered { what, source: Error::SerdeError(error) })?;
    let types = object.types.clone().unwrap_or_default();
    let resource = resource(&types.kind);
    let api: Api<DynamicObject> = match object.namespace() {
        Some(namespace) => Api::namespaced_with(client.clone(), &namespace, &resource),
        None => Api::all_with(client.clone(), &resource),
    };
    let params = PatchParams::apply(MANAGER);
    match timeout(TIMEOUT, api.patch(&object.name_any(), &params, &Patch::Apply(&object))).await {
        Ok(answer) => answer.map(drop).map_err(|source| RequestError::Answered { what, source }),
        Err(_) => Err(RequestError::Unanswered { what }),
    }
}
