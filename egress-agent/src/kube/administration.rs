//! What commands of an administrator ask of the API server: once each, with an error that says what was refused.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Node as KubeNode;
use kube::api::{Api, DynamicObject, ListParams, Patch, PatchParams};
use kube::{Client, Error, ResourceExt};
use serde_json::{Value, json};

use super::causes::Causes;
use super::{convert, keys, watch};
use crate::model::view::{EgressObject, Node};

/// A request that was not answered as hoped.
#[derive(Debug, thiserror::Error)]
#[error("cannot {what}: {}", Causes(source))]
pub struct Refused {
    what: &'static str,
    source: Error,
}

fn refused(what: &'static str) -> impl Fn(Error) -> Refused {
    move |source| Refused { what, source }
}

/// All nodes and objects.
#[derive(Debug)]
pub struct Cluster {
    pub nodes: BTreeMap<String, Arc<Node>>,
    pub objects: BTreeMap<String, Arc<EgressObject>>,
}

pub struct Administration {
    nodes: Api<KubeNode>,
    objects: Api<DynamicObject>,
}

impl Administration {
    pub fn new(client: Client) -> Self {
        let objects = Api::all_with(client.clone(), &watch::egressip_resource());
        Self { nodes: Api::all(client), objects }
    }

    /// Whether there is such a node.
    pub async fn set_drained(&self, node: &str, drained: bool) -> Result<bool, Refused> {
        let value = if drained { Value::from("true") } else { Value::Null };
        let patch = json!({"metadata": {"annotations": {keys::DRAIN: value}}});
        match self.nodes.patch(node, &PatchParams::default(), &Patch::Merge(patch)).await {
            Ok(_) => Ok(true),
            Err(Error::Api(status)) if status.code == 404 => Ok(false),
            Err(error) => Err(refused("annotate the node")(error)),
        }
    }

    pub async fn look(&self) -> Result<Cluster, Refused> {
        let everything = ListParams::default();
        let nodes = self.nodes.list(&everything).await.map_err(refused("list nodes"))?;
        let objects = self.objects.list(&everything).await.map_err(refused("list EgressIP objects"))?;
        Ok(Cluster {
            nodes: nodes.iter().map(|node| (node.name_any(), Arc::new(convert::node(node)))).collect(),
            objects: objects.iter().map(|object| (object.name_any(), Arc::new(convert::object(object)))).collect(),
        })
    }
}
