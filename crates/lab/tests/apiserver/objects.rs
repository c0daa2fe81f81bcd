//! The objects that the tests use.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{ApiResource, DynamicObject, GroupVersionKind, ListParams, PostParams};
use kube::runtime::wait::{await_condition, conditions::is_crd_established};
use kube::{Api, Client};
use serde_json::{Value, json};

pub(crate) const DEFINITION: &str = r#"
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata:
  name: egressips.k8s.ovn.org
spec:
  group: k8s.ovn.org
  scope: Cluster
  names: {kind: EgressIP, plural: egressips, singular: egressip, shortNames: [eip]}
  versions:
  - name: v1
    served: true
    storage: true
    subresources: {status: {}}
    additionalPrinterColumns:
    - {name: EgressIPs, type: string, jsonPath: ".spec.egressIPs[*]"}
    - {name: Assigned Node, type: string, jsonPath: ".status.items[*].node"}
    - {name: Assigned EgressIPs, type: string, jsonPath: ".status.items[*].egressIP"}
    schema:
      openAPIV3Schema:
        type: object
        required: [spec]
        properties:
          spec:
            type: object
            description: What is wished for.
            required: [egressIPs, namespaceSelector]
            properties:
              egressIPs: {type: array, minItems: 1, maxItems: 4, items: {type: string}, description: Addresses.}
              namespaceSelector: {type: object, properties: {matchLabels: {type: object, additionalProperties: {type: string}}}}
              podSelector: {type: object, properties: {matchLabels: {type: object, additionalProperties: {type: string}}}}
          status:
            type: object
            properties:
              items:
                type: array
                items:
                  type: object
                  required: [node, egressIP]
                  properties: {node: {type: string}, egressIP: {type: string}}
"#;

pub(crate) const EGRESS_IP: &str = r#"
apiVersion: k8s.ovn.org/v1
kind: EgressIP
metadata:
  name: eip-prod
spec:
  egressIPs: ["172.18.0.100", "172.18.0.101"]
  namespaceSelector: {matchLabels: {env: prod}}
  podSelector: {matchLabels: {app: web}}
"#;

pub(crate) fn from_json<T: serde::de::DeserializeOwned>(value: Value) -> Result<T> {
    serde_json::from_value(value).context("a test object is not readable")
}

/// How long a real server may take to serve a new kind.
const SERVED: Duration = Duration::from_secs(30);
const PAUSE: Duration = Duration::from_millis(25);

/// Applies a definition of EgressIP, and waits until the kind is served.
pub(crate) async fn establish(client: Client, definition: &str) -> Result<()> {
    let definition: CustomResourceDefinition = serde_yaml::from_str(definition)?;
    Api::all(client.clone()).create(&PostParams::default(), &definition).await?;
    are_served(client).await
}

/// A real server serves a new kind some moments after its definition is established.
pub(crate) async fn are_served(client: Client) -> Result<()> {
    let (definitions, objects) = (Api::<CustomResourceDefinition>::all(client.clone()), egress_ips(client));
    let is_served = async {
        await_condition(definitions, "egressips.k8s.ovn.org", is_crd_established()).await?;
        while let Err(error) = objects.list(&ListParams::default()).await {
            ensure!(matches!(&error, kube::Error::Api(status) if status.code == 404), error);
            tokio::time::sleep(PAUSE).await;
        }
        Ok(())
    };
    tokio::time::timeout(SERVED, is_served).await.context("EgressIPs are not served")?
}

pub(crate) fn egress_ips(client: Client) -> Api<DynamicObject> {
    let kind = GroupVersionKind::gvk("k8s.ovn.org", "v1", "EgressIP");
    Api::all_with(client, &ApiResource::from_gvk_with_plural(&kind, "egressips"))
}

pub(crate) fn egress_ip() -> Result<DynamicObject> {
    Ok(serde_yaml::from_str(EGRESS_IP)?)
}

pub(crate) fn pod(name: &str, node: &str, labels: Value) -> Result<Pod> {
    from_json(json!({
        "metadata": {"name": name, "labels": labels},
        "spec": {"nodeName": node, "containers": [{"name": "c", "image": "i"}]},
    }))
}

pub(crate) fn node(name: &str) -> Result<Node> {
    from_json(json!({
        "metadata": {"name": name},
        "status": {
            "addresses": [{"type": "InternalIP", "address": "172.18.0.2"}],
            "conditions": [{"type": "Ready", "status": "True"}],
            "nodeInfo": {
                "architecture": "", "bootID": "", "containerRuntimeVersion": "", "kernelVersion": "",
                "kubeProxyVersion": "", "kubeletVersion": "v1.32.0", "machineID": "", "operatingSystem": "linux",
                "osImage": "", "systemUUID": "",
            },
        },
    }))
}
