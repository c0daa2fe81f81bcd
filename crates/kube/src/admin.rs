//! Requests of commands (`drain`, `trace`): each is sent once, with a timeout, and an error says what the API server refused.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{Node as KubeNode, Pod};
use kube::api::{Api, DynamicObject, ListParams, Patch, PatchParams};
use kube::{Client, Error, ResourceExt};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::convert::AgentFacts;
use crate::error_text::ErrorText;
use crate::{convert, crd, policy};
use egress_core::allocation::Nodes;
use egress_core::keys;
use egress_core::model::node::Node;
use egress_core::model::policy::{Policies, PolicyKind};

/// Objects per list request.
const PAGE: u32 = 500;

/// A failed request.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    #[error("cannot {what}: {}", ErrorText(source))]
    Answered { what: &'static str, source: Error },
    /// A write may have succeeded all the same.
    #[error("cannot {what}: the API server does not answer in time")]
    Unanswered { what: &'static str },
}

impl RequestError {
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Answered { source: Error::Api(status), .. } if status.code == 404)
    }
}

/// How long to wait for answers.
#[derive(Clone, Copy, Debug)]
pub struct RequestTimeouts {
    /// Per request.
    pub each: Duration,
    /// For all requests together.
    pub until: Option<Instant>,
}

impl RequestTimeouts {
    /// The answer to one request.
    pub async fn wait<T>(
        self,
        what: &'static str,
        request: impl Future<Output = kube::Result<T>>,
    ) -> Result<T, RequestError> {
        let left = self.until.map(|until| until.saturating_duration_since(Instant::now()));
        let limit = left.map_or(self.each, |left| left.min(self.each));
        match timeout(limit, request).await {
            Ok(answer) => answer.map_err(|source| RequestError::Answered { what, source }),
            Err(_) => Err(RequestError::Unanswered { what }),
        }
    }
}

pub struct AdminClient {
    nodes: Api<KubeNode>,
    egress_nodes: Api<DynamicObject>,
    policies: [Api<DynamicObject>; PolicyKind::ALL.len()],
}

impl AdminClient {
    pub fn new(client: Client) -> Self {
        let policies = PolicyKind::ALL.map(|kind| policy::requests(&client, kind));
        let egress_nodes = Api::all_with(client.clone(), &crd::egress_node_resource());
        Self { nodes: Api::all(client), egress_nodes, policies }
    }

    /// Marks the node as drained, or not. False if there is no such node.
    pub async fn set_drained(
        &self,
        node: &str,
        drained: bool,
        patience: RequestTimeouts,
    ) -> Result<bool, RequestError> {
        let value = if drained { Value::from("true") } else { Value::Null };
        let patch = json!({"metadata": {"annotations": {keys::DRAIN: value}}});
        let (how, patch) = (PatchParams::default(), Patch::Merge(patch));
        match patience.wait("annotate the node", self.nodes.patch(node, &how, &patch)).await {
            Ok(_) => Ok(true),
            Err(RequestError::Answered { source: Error::Api(status), .. }) if status.code == 404 => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// `None` if there is no such node.
    pub async fn node(&self, name: &str, patience: RequestTimeouts) -> Result<Option<Node>, RequestError> {
        let Some(found) = patience.wait("get the node", self.nodes.get_opt(name)).await? else { return Ok(None) };
        let facts = patience.wait("get the EgressNode object", self.egress_nodes.get_opt(name)).await?;
        let facts = facts.as_ref().map(convert::agent_facts);
        Ok(Some(convert::joined(&convert::node(&found), facts.as_ref())))
    }

    pub async fn nodes(&self, patience: RequestTimeouts) -> Result<Nodes, RequestError> {
        let nodes = all("list nodes", &self.nodes, patience).await?;
        let facts = all("list EgressNode objects", &self.egress_nodes, patience).await?;
        let facts: BTreeMap<String, AgentFacts> =
            facts.iter().map(|object| (object.name_any(), convert::agent_facts(object))).collect();
        let join = |node: &KubeNode| {
            let name = node.name_any();
            let joined = convert::joined(&convert::node(node), facts.get(&name));
            (name, Arc::new(joined))
        };
        Ok(nodes.iter().map(join).collect())
    }

    pub async fn policies(&self, patience: RequestTimeouts) -> Result<Policies, RequestError> {
        let mut policies = Policies::new();
        for (kind, requests) in PolicyKind::ALL.into_iter().zip(&self.policies) {
            let objects = match all("list egress policies", requests, patience).await {
                // Before the first upgrade to a version with this kind.
                Err(error) if kind == PolicyKind::Assignment && error.is_not_found() => continue,
                objects => objects?,
            };
            let read = objects.iter().map(|object| policy::api_of(kind).read(object));
            policies.extend(read.map(|policy| (policy.key().clone(), Arc::new(policy))));
        }
        Ok(policies)
    }
}

/// Lists page by page: a list of a large cluster in one answer might exceed the timeout.
async fn all<K>(what: &'static str, api: &Api<K>, patience: RequestTimeouts) -> Result<Vec<K>, RequestError>
where
    K: Clone + std::fmt::Debug + DeserializeOwned,
{
    let (mut found, mut page) = (Vec::new(), ListParams::default().limit(PAGE));
    loop {
        let list = patience.wait(what, api.list(&page)).await?;
        found.extend(list.items);
        match list.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => page = page.continue_token(&token),
            None => return Ok(found),
        }
    }
}

const POD_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub enum PodError {
    #[error("there is no such pod")]
    NotFound,
    #[error("{0}")]
    Refused(Box<Error>),
    #[error("the API server does not answer within {} s", POD_TIMEOUT.as_secs())]
    Timeout,
}

/// A pod as the API server has it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodFacts {
    /// Absent until it is scheduled.
    pub node: Option<String>,
    /// It has the node's addresses.
    pub host_network: bool,
    /// Succeeded or failed.
    pub completed: bool,
    /// Those that the kubelet reports, else those that a CNI announces.
    pub addresses: Vec<IpAddr>,
}

/// It lists one pod by name, because agents have the right to list pods and no right to get one.
pub async fn pod(client: Client, namespace: &str, name: &str) -> Result<PodFacts, PodError> {
    let api: Api<Pod> = Api::namespaced(client, namespace);
    let one = ListParams::default().fields(&format!("metadata.name={name}"));
    let found = timeout(POD_TIMEOUT, api.list(&one)).await.map_err(|_| PodError::Timeout)?;
    let found = found.map_err(|error| PodError::Refused(Box::new(error)))?;
    let found = found.items.first().ok_or(PodError::NotFound)?;
    let pod = convert::pod(found);
    let addresses = if pod.reported.is_empty() { pod.announced } else { pod.reported };
    Ok(PodFacts {
        node: found.spec.as_ref().and_then(|spec| spec.node_name.clone()).filter(|node| !node.is_empty()),
        host_network: pod.host_network,
        completed: pod.completed,
        addresses: addresses.into_iter().collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_request_ends_with_its_own_timeout_or_that_of_all() {
        let (short, long) = (Duration::from_millis(20), Duration::from_secs(600));
        let begin = Instant::now();
        for patience in [
            RequestTimeouts { each: short, until: None },
            RequestTimeouts { each: short, until: begin.checked_add(long) },
            RequestTimeouts { each: long, until: Some(begin + short) },
            RequestTimeouts { each: long, until: Some(begin) },
        ] {
            let answer = patience.wait("do it", std::future::pending::<kube::Result<()>>()).await;
            assert!(matches!(answer, Err(RequestError::Unanswered { .. })), "{answer:?}");
        }
        assert!(begin.elapsed() < long / 2, "{:?}", begin.elapsed());
        let answer = RequestTimeouts { each: long, until: Some(begin) }.wait("do it", std::future::ready(Ok(7))).await;
        assert_eq!(answer.expect("an answer that is there is used"), 7);
    }
}
