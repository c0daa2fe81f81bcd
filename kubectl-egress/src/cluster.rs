//! Requests to the API server, each with a timeout.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use egress_core::allocation::Nodes;
use egress_core::model::policy::Policies;
use egress_core::model::view::Labels;
use egress_kube::admin::{AdminClient, RequestError, RequestTimeouts};
use egress_kube::client::{connect_as_user, connect_by_context};
use k8s_openapi::api::core::v1::{Namespace, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ListMeta;
use kube::Client;
use kube::api::{Api, ListParams, LogParams, Request};
use serde::Deserialize;
use serde_json::Value;

use crate::agents::{AgentPod, LABELS, NoAgent, of_one_namespace};
use crate::arguments::{ConnectionArgs, PlaceArgs, PodRef};
use crate::error::PluginError;

/// Of one request.
pub(crate) const PATIENCE: RequestTimeouts = RequestTimeouts { each: Duration::from_secs(10), until: None };

/// Objects per list request.
const PAGE: u32 = 500;
/// Of each log.
const LOG_LINES: i64 = 20_000;
const LOG_BYTES: i64 = 8 << 20;

/// A list, read as it is.
#[derive(Deserialize)]
struct RawList {
    #[serde(default)]
    metadata: ListMeta,
    #[serde(default)]
    items: Vec<Value>,
}

pub(crate) struct ClusterApi {
    pub(crate) client: Client,
    namespace: Option<String>,
    agent_namespace: Option<String>,
}

/// The newest lines of a log.
pub(crate) struct LogEnd {
    pub(crate) text: String,
    /// Older lines were left out for the size of the log.
    pub(crate) is_cut: bool,
}

/// A pod with the facts that commands need.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PlacedPod {
    /// `namespace/name`
    pub(crate) full_name: String,
    pub(crate) node: String,
    pub(crate) addresses: BTreeSet<IpAddr>,
    pub(crate) uses_host_network: bool,
    pub(crate) namespace: String,
    pub(crate) labels: Labels,
    /// Its containers have ended, and its addresses may be another pod's.
    has_ended: bool,
}

impl PlacedPod {
    fn of(pod: &Pod) -> Option<Self> {
        let spec = pod.spec.as_ref()?;
        let ips = pod.status.iter().flat_map(|status| status.pod_ips.iter().flatten());
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
        Some(Self {
            full_name: format!(
                "{}/{}",
                pod.metadata.namespace.as_deref().unwrap_or_default(),
                pod.metadata.name.as_deref().unwrap_or_default()
            ),
            node: spec.node_name.clone()?,
            addresses: ips.filter_map(|one| one.ip.parse().ok()).collect(),
            uses_host_network: spec.host_network == Some(true),
            namespace: pod.metadata.namespace.clone().unwrap_or_default(),
            labels: pod.metadata.labels.clone().unwrap_or_default(),
            has_ended: matches!(phase, Some("Succeeded" | "Failed")),
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

    /// The agents' pods that are on a node, all of one namespace.
    pub(crate) async fn agents(&self) -> Result<Vec<AgentPod>, PluginError> {
        let pods: Api<Pod> = match &self.agent_namespace {
            Some(namespace) => Api::namespaced(self.client.clone(), namespace),
            None => Api::all(self.client.clone()),
        };
        let found = PATIENCE.wait("list the agents' pods", pods.list(&ListParams::default().labels(LABELS))).await?;
        let agents = of_one_namespace(found.items.iter().filter_map(AgentPod::of).collect())?;
        if agents.is_empty() { Err(NoAgent::Nowhere(self.agent_namespace.clone()).into()) } else { Ok(agents) }
    }

    pub(crate) async fn pod(&self, pod: &PodRef) -> Result<PlacedPod, PluginError> {
        let namespace = pod.namespace.as_deref().unwrap_or_else(|| self.namespace());
        let full_name = format!("{namespace}/{}", pod.name);
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        let found = PATIENCE.wait("get the pod", pods.get_opt(&pod.name)).await?;
        let found = found.ok_or_else(|| PluginError::UnknownPod(full_name.clone()))?;
        PlacedPod::of(&found).ok_or(PluginError::Unscheduled(full_name))
    }

    /// The pods on a node that have addresses of their own now.
    pub(crate) async fn pods_on(&self, node: &str) -> Result<Vec<PlacedPod>, PluginError> {
        let pods: Api<Pod> = Api::all(self.client.clone());
        let there = ListParams::default().fields(&format!("spec.nodeName={node}"));
        let found = PATIENCE.wait("list the pods of a node", pods.list(&there)).await?;
        let pods = found.items.iter().filter_map(PlacedPod::of);
        Ok(pods.filter(|pod| !pod.uses_host_network && !pod.has_ended).collect())
    }

    /// The node that a command is for.
    pub(crate) async fn node_of(&self, place: &PlaceArgs) -> Result<String, PluginError> {
        match place {
            PlaceArgs { pod: Some(pod), .. } => Ok(self.pod(pod).await?.node),
            // The command line has one of the two.
            PlaceArgs { node, pod: None } => Ok(node.clone().unwrap_or_default()),
        }
    }

    /// Empty if there is no such namespace.
    pub(crate) async fn namespace_labels(&self, name: &str) -> Result<Labels, PluginError> {
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        let found = PATIENCE.wait("get the namespace", namespaces.get_opt(name)).await?;
        Ok(found.and_then(|namespace| namespace.metadata.labels).unwrap_or_default())
    }

    /// The namespace of pods that are named without one.
    pub(crate) fn namespace(&self) -> &str {
        self.namespace.as_deref().unwrap_or_else(|| self.client.default_namespace())
    }

    /// The items of a list, page by page, as the server has them; `None` if the server does not know the path. At most `limit`.
    pub(crate) async fn raw_list(&self, path: &str, limit: usize) -> Result<Option<Vec<Value>>, PluginError> {
        let (mut found, mut token) = (Vec::new(), String::new());
        loop {
            let mut page = ListParams::default().limit(PAGE);
            if !token.is_empty() {
                page = page.continue_token(&token);
            }
            let request = Request::new(path).list(&page).map_err(kube::Error::BuildRequest);
            let answer = async { self.client.request::<RawList>(request?).await };
            let list = match PATIENCE.wait("list objects", answer).await {
                Err(RequestError::Answered { source: kube::Error::Api(status), .. }) if status.code == 404 => {
                    return Ok(None);
                }
                list => list?,
            };
            found.extend(list.items);
            token = list.metadata.continue_.unwrap_or_default();
            if token.is_empty() || found.len() >= limit {
                found.truncate(limit);
                return Ok(Some(found));
            }
        }
    }

    /// The end of a container's log.
    pub(crate) async fn log(&self, pod: (&str, &str), container: &str, previous: bool) -> Result<LogEnd, PluginError> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), pod.0);
        let (mut lines, mut is_cut) = (LOG_LINES, false);
        loop {
            let how = LogParams {
                container: Some(container.to_owned()),
                previous,
                tail_lines: Some(lines),
                limit_bytes: Some(LOG_BYTES),
                timestamps: true,
                ..LogParams::default()
            };
            let text = PATIENCE.wait("read a log", pods.logs(pod.1, &how)).await?;
            // The bytes count from the first of the lines, so the newest lines are the ones that are missing.
            let lacks_newest = i64::try_from(text.len()).is_ok_and(|length| length >= LOG_BYTES);
            is_cut |= lacks_newest;
            if !lacks_newest || lines == 1 {
                return Ok(LogEnd { text, is_cut });
            }
            lines = (lines / 4).max(1);
        }
    }

    pub(crate) async fn version(&self) -> Result<String, PluginError> {
        let version = PATIENCE.wait("ask for the server's version", self.client.apiserver_version()).await?;
        Ok(version.git_version)
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
            // A log is no JSON.
            let text = body.as_str().map_or_else(|| body.to_string(), str::to_owned);
            async move { Response::builder().status(status).body(Body::from(text.into_bytes())) }
        });
        ClusterApi::of(Client::new(service, "default"))
    }

    fn answer(lists: &[(&'static str, Value)], path: &str, query: &str) -> (u16, Value) {
        let all = |kind: &str| {
            let items = lists.iter().find(|(name, _)| *name == kind).and_then(|(_, items)| items.as_array().cloned());
            items.unwrap_or_default()
        };
        if path == "/version" {
            let fields =
                ["major", "minor", "gitCommit", "gitTreeState", "buildDate", "goVersion", "compiler", "platform"];
            let mut version: Value = fields.map(|field| (field, "")).into_iter().collect();
            version["gitVersion"] = "v1.32.0".into();
            return (200, version);
        }
        if path.ends_with("/log") {
            let log = lists.iter().find(|(name, _)| *name == "log").map(|(_, log)| log.clone());
            return (200, log.map_or_else(|| "".into(), |log| end_of(log.as_str().unwrap_or_default(), query).into()));
        }
        if let Some((namespace, name)) = path.split_once("/namespaces/").and_then(|(_, rest)| rest.split_once("/pods/"))
        {
            let named = |pod: &Value| pod["metadata"]["namespace"] == namespace && pod["metadata"]["name"] == name;
            let missing =
                json!({"kind": "Status", "status": "Failure", "code": 404, "reason": "NotFound", "message": ""});
            return all("pods").into_iter().find(named).map_or((404, missing), |pod| (200, pod));
        }
        if let Some(name) = path.strip_prefix("/api/v1/namespaces/").filter(|name| !name.contains('/')) {
            let found = all("namespaces").into_iter().find(|one| one["metadata"]["name"] == name);
            let missing =
                json!({"kind": "Status", "status": "Failure", "code": 404, "reason": "NotFound", "message": ""});
            return found.map_or((404, missing), |one| (200, one));
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

    /// As a kubelet: the last lines, and of these the first bytes.
    fn end_of(log: &str, query: &str) -> String {
        let parameter = |name: &str| {
            let found = query.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='));
            found.and_then(|value| value.parse().ok()).unwrap_or(usize::MAX)
        };
        let lines: Vec<&str> = log.split_inclusive('\n').collect();
        let last = lines.get(lines.len().saturating_sub(parameter("tailLines"))..).unwrap_or_default().concat();
        last.chars().take(parameter("limitBytes")).collect()
    }

    pub(crate) fn agent(node: &str) -> Value {
        let labels = json!({"app.kubernetes.io/name": "egress-agent", "app.kubernetes.io/component": "agent"});
        let owner = json!({"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "egress-agent", "uid": "1", "controller": true});
        let name = format!("agent-{node}");
        json!({
            "metadata": {"namespace": "egress-agent", "name": name, "labels": labels, "ownerReferences": [owner]},
            "spec": {"nodeName": node, "containers": [{"name": "agent"}], "hostNetwork": true},
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
