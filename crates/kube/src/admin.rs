//! What commands of an administrator ask of the API server: once each and for a limited time, with an error that says what
//! was refused.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Node as KubeNode;
use kube::api::{Api, DynamicObject, ListParams, Patch, PatchParams};
use kube::{Client, Error, ResourceExt};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::convert::AgentFacts;
use crate::error_text::ErrorText;
use crate::{convert, watches};
use egress_core::allocation::{Nodes, Objects};
use egress_core::keys;
use egress_core::model::view::Node;

/// So many things are listed with one request.
const PAGE: u32 = 500;

/// A request that was not answered as hoped.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    #[error("cannot {what}: {}", ErrorText(source))]
    Answered { what: &'static str, source: Error },
    /// A write may have been done all the same.
    #[error("cannot {what}: the API server does not answer in time")]
    Unanswered { what: &'static str },
}

/// How long an answer is waited for.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// For each request.
    pub each: Duration,
    /// For all of them.
    pub until: Option<Instant>,
}

impl Patience {
    async fn wait<T>(self, what: &'static str, request: impl Future<Output = kube::Result<T>>) -> Result<T, Refused> {
        let left = self.until.map(|until| until.saturating_duration_since(Instant::now()));
        let limit = left.map_or(self.each, |left| left.min(self.each));
        match tokio::time::timeout(limit, request).await {
            Ok(answer) => answer.map_err(|source| Refused::Answered { what, source }),
            Err(_) => Err(Refused::Unanswered { what }),
        }
    }
}

pub struct AdminClient {
    nodes: Api<KubeNode>,
    egress_nodes: Api<DynamicObject>,
    objects: Api<DynamicObject>,
}

impl AdminClient {
    pub fn new(client: Client) -> Self {
        let objects = Api::all_with(client.clone(), &watches::egressip_resource());
        let egress_nodes = Api::all_with(client.clone(), &watches::egress_node_resource());
        Self { nodes: Api::all(client), egress_nodes, objects }
    }

    /// Whether there is such a node.
    pub async fn set_drained(&self, node: &str, drained: bool, patience: Patience) -> Result<bool, Refused> {
        let value = if drained { Value::from("true") } else { Value::Null };
        let patch = json!({"metadata": {"annotations": {keys::DRAIN: value}}});
        let (how, patch) = (PatchParams::default(), Patch::Merge(patch));
        match patience.wait("annotate the node", self.nodes.patch(node, &how, &patch)).await {
            Ok(_) => Ok(true),
            Err(Refused::Answered { source: Error::Api(status), .. }) if status.code == 404 => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The node of that name, if there is one.
    pub async fn node(&self, name: &str, patience: Patience) -> Result<Option<Node>, Refused> {
        let Some(found) = patience.wait("get the node", self.nodes.get_opt(name)).await? else { return Ok(None) };
        let said = patience.wait("get the EgressNode object", self.egress_nodes.get_opt(name)).await?;
        let said = said.as_ref().map(convert::agent_facts);
        Ok(Some(convert::joined(&convert::node(&found), said.as_ref())))
    }

    pub async fn nodes(&self, patience: Patience) -> Result<Nodes, Refused> {
        let nodes = all("list nodes", &self.nodes, patience).await?;
        let said = all("list EgressNode objects", &self.egress_nodes, patience).await?;
        let said: BTreeMap<String, AgentFacts> =
            said.iter().map(|object| (object.name_any(), convert::agent_facts(object))).collect();
        let join = |node: &KubeNode| {
            let name = node.name_any();
            let joined = convert::joined(&convert::node(node), said.get(&name));
            (name, Arc::new(joined))
        };
        Ok(nodes.iter().map(join).collect())
    }

    pub async fn objects(&self, patience: Patience) -> Result<Objects, Refused> {
        let objects = all("list EgressIP objects", &self.objects, patience).await?;
        Ok(objects.iter().map(|object| (object.name_any(), Arc::new(convert::object(object)))).collect())
    }
}

/// Page by page: one with all of a large cluster might not come in time.
async fn all<K>(what: &'static str, api: &Api<K>, patience: Patience) -> Result<Vec<K>, Refused>
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_request_that_hangs_ends_with_its_own_time_or_with_that_of_all() {
        let (short, long) = (Duration::from_millis(20), Duration::from_secs(600));
        let begin = Instant::now();
        for patience in [
            Patience { each: short, until: None },
            Patience { each: short, until: begin.checked_add(long) },
            Patience { each: long, until: Some(begin + short) },
            Patience { each: long, until: Some(begin) },
        ] {
            let answer = patience.wait("do it", std::future::pending::<kube::Result<()>>()).await;
            assert!(matches!(answer, Err(Refused::Unanswered { .. })), "{answer:?}");
        }
        assert!(begin.elapsed() < long / 2, "{:?}", begin.elapsed());
        let answer = Patience { each: long, until: Some(begin) }.wait("do it", std::future::ready(Ok(7))).await;
        assert_eq!(answer.expect("what is there is taken"), 7);
    }
}
