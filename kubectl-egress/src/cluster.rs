//! Requests to the API server, each with a timeout.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use egress_core::allocation::Nodes;
use egress_core::model::policy::Policies;
use egress_kube::admin::{AdminClient, RequestTimeouts};
use egress_kube::client::{connect_as_user, connect_by_context};
use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use kube::api::{Api, ListParams};

use crate::agents::{AgentPod, LABELS, NoAgent};
use crate::arguments::{ConnectionArgs, PodRef};
use crate::error::PluginError;

/// Of one request.
const PATIENCE: RequestTimeouts = RequestTimeouts { each: Duration::from_secs(10), until: None };

pub(crate) struct ClusterApi {
    pub(crate) client: Client,
    namespace: Option<String>,
    agent_namespace: Option<String>,
}

/// A pod with the facts that commands need.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PlacedPod {
    /// `namespace/name`
    pub(crate) full_name: String,
    pub(crate) node: String,
    pub(crate) addresses: BTreeSet<IpAddr>,
    pub(crate) uses_host_network: bool,
}

impl PlacedPod {
    fn of(pod: &Pod) -> Option<Self> {
        let spec = pod.spec.as_ref()?;
        let ips = pod.status.iter().flat_map(|status| status.pod_ips.iter().flatten());
        Some(Self {
            full_name: format!(
                "{}/{}",
                pod.metadata.namespace.as_deref().unwrap_or_default(),
                pod.metadata.name.as_deref().unwrap_or_default()
            ),
            node: spec.node_name.clone()?,
            addresses: ips.filter_map(|one| one.ip.parse().ok()).collect(),
            uses_host_network: spec.host_network == Some(true),
        })
    }
}

impl ClusterApi {
    pub(crate) async fn connect(args: &ConnectionArgs) -> Result<Self, PluginError> {
        let client = match &args.context {
            Some(context) => connect_by_context(args.kubeconfig.as_deref(), context).await?,
            None => connect_as_user(args.kubeconfig.as_deref()).await?,
        };
        Ok(Self { client, namespace: args.namespace.clone(), agent_namespace: args.agent_namespace.clone() })
    }

    #[cfg(test)]
    pub(crate) fn of(client: Client) -> Self {
        Self { client, namespace: None, agent_namespace: None }
    }

    /// The agents' pods that are on a node.
    pub(crate) async fn agents(&self) -> Result<Vec<AgentPod>, PluginError> {
        let pods: Api<Pod> = match &self.agent_namespace {
            Some(namespace) => Api::namespaced(self.client.clone(), namespace),
            None => Api::all(self.client.clone()),
        };
        let found = PATIENCE.wait("list the agents' pods", pods.list(&ListParams::default().labels(LABELS))).await?;
        let agents: Vec<_> = found.items.iter().filter_map(AgentPod::of).collect();
        if agents.is_empty() { Err(NoAgent::Nowhere(self.agent_namespace.clone()).into()) } else { Ok(agents) }
    }

    pub(crate) async fn pod(&self, pod: &PodRef) -> Result<PlacedPod, PluginError> {
        let namespace = pod.namespace.as_deref().or(self.namespace.as_deref());
        let namespace = namespace.unwrap_or_else(|| self.client.default_namespace());
        let full_name = format!("{namespace}/{}", pod.name);
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        let found = PATIENCE.wait("get the pod", pods.get_opt(&pod.name)).await?;
        let found = found.ok_or_else(|| PluginError::UnknownPod(full_name.clone()))?;
        PlacedPod::of(&found).ok_or(PluginError::Unscheduled(full_name))
    }

    /// The pods on a node that have addresses of their own.
    pub(crate) async fn pods_on(&self, node: &str) -> Result<Vec<PlacedPod>, PluginError> {
        let pods: Api<Pod> = Api::all(self.client.clone());
        let there = ListParams::default().fields(&format!("spec.nodeName={node}"));
        let found = PATIENCE.wait("list the pods of a node", pods.list(&there)).await?;
        Ok(found.items.iter().filter_map(PlacedPod::of).filter(|pod| !pod.uses_host_network).collect())
    }

    pub(crate) async fn nodes(&self) -> Result<Nodes, PluginError> {
        Ok(AdminClient::new(self.client.clone()).nodes(PATIENCE).await?)
    }

    pub(crate) async fn policies(&self) -> Result<Policies, PluginError> {
        Ok(AdminClient::new(self.client.clone()).policies(PATIENCE).await?)
    }
}

/// The node with this tunnel endpoint.
pub(crate) fn node_at(nodes: &Nodes, endpoint: IpAddr) -> Option<&str> {
    let found = nodes.iter().find(|(_, node)| node.endpoint().is_some_and(|own| own.0 == endpoint));
    found.map(|(name, _)| name.as_str())
}

#[cfg(test)]
pub(crate) mod testing {
    //! An API server of fixed lists.

    use http::{Request, Response};
    use kube::Client;
    use kube::client::Body;
    use serde_json::{Value, json};

    use super::ClusterApi;

    /// Lists by the last segment of their path, as `pods`; any other list is empty. A pod is found by its path.
    pub(crate) fn cluster(lists: &[(&'static str, Value)]) -> ClusterApi {
        let lists = lists.to_vec();
        let service = tower::service_fn(move |request: Request<Body>| {
            let (status, body) = answer(&lists, request.uri().path(), request.uri().query().unwrap_or_default());
            async move { Response::builder().status(status).body(Body::from(body.to_string().into_bytes())) }
        });
        ClusterApi::of(Client::new(service, "default"))
    }

    fn answer(lists: &[(&'static str, Value)], path: &str, query: &str) -> (u16, Value) {
        let all = |kind: &str| {
            let items = lists.iter().find(|(name, _)| *name == kind).and_then(|(_, items)| items.as_array().cloned());
            items.unwrap_or_default()
        };
        if let Some((namespace, name)) = path.split_once("/namespaces/").and_then(|(_, rest)| rest.split_once("/pods/"))
        {
            let named = |pod: &Value| pod["metadata"]["namespace"] == namespace && pod["metadata"]["name"] == name;
            let missing =
                json!({"kind": "Status", "status": "Failure", "code": 404, "reason": "NotFound", "message": ""});
            return all("pods").into_iter().find(named).map_or((404, missing), |pod| (200, pod));
        }
        let mut items = all(path.rsplit('/').next().unwrap_or_default());
        if query.contains("labelSelector") {
            items.retain(|item| item["metadata"]["labels"]["app.kubernetes.io/component"] == "agent");
        }
        if let Some((_, node)) = query.split_once("spec.nodeName%3D") {
            items.retain(|item| item["spec"]["nodeName"] == node);
        }
        (200, json!({"metadata": {}, "items": items}))
    }

    pub(crate) fn agent(node: &str) -> Value {
        let labels = json!({"app.kubernetes.io/name": "egress-agent", "app.kubernetes.io/component": "agent"});
        json!({
            "metadata": {"namespace": "egress-agent", "name": format!("agent-{node}"), "labels": labels},
            "spec": {"nodeName": node, "containers": [], "hostNetwork": true},
            "status": {"phase": "Running"},
        })
    }

    pub(crate) fn pod(name: &str, node: &str, address: &str) -> Value {
        json!({
            "metadata": {"namespace": "red", "name": name},
            "spec": {"nodeName": node, "containers": []},
            "status": {"phase": "Running", "podIPs": [{"ip": address}]},
        })
    }

    /// An EgressIP object whose address a node serves.
    pub(crate) fn egress_ip(name: &str, address: &str, node: &str) -> Value {
        json!({
            "apiVersion": "k8s.ovn.org/v1",
            "kind": "EgressIP",
            "metadata": {"name": name, "uid": name, "annotations": {"k8s.ovn.org/egressip-tunnel-id": "7"}},
            "spec": {"egressIPs": [address], "namespaceSelector": {"matchLabels": {"a": "b"}}},
            "status": {"items": [{"egressIP": address, "node": node}]},
        })
    }
}
