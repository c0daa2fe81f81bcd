//! This node's EgressNode object, which only its agent writes: facts of the node ([`crate::node_facts`]) and acknowledgements of
//! hand-overs ([`crate::acknowledgements`]), each in their own fields of the status.
//!
//! The Node owns it. Its status names the Node's UID, so that facts of a former Node of the same name do not count.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{Api, ObjectMeta, Patch, PatchParams};
use kube::{Client, Error};
use serde_json::{Value, json};

use crate::crd::{EgressNode, EgressNodeSpec};
use crate::post_params;

#[derive(Clone)]
pub(super) struct NodeObject {
    api: Api<EgressNode>,
    name: String,
}

impl NodeObject {
    pub(super) fn new(client: Client, node_name: &str) -> Self {
        Self { api: Api::all(client), name: node_name.to_owned() }
    }

    /// `None` if there is no object.
    pub(super) async fn read(&self) -> Result<Option<EgressNode>, Error> {
        self.api.get_opt(&self.name).await
    }

    /// Merges these fields into the status. Creates the object if there is none.
    pub(super) async fn publish(&self, node_uid: &str, mut status: Value) -> Result<(), Error> {
        status["nodeUID"] = json!(node_uid);
        let patch = Patch::Merge(json!({"status": status}));
        match self.patch(&patch).await {
            Err(Error::Api(refused)) if refused.code == 404 => {}
            done => return done,
        }
        match self.api.create(&post_params(), &self.new_object(node_uid)).await {
            // The other of the two tasks that write here was faster.
            Err(Error::Api(refused)) if refused.code == 409 => {}
            created => drop(created?),
        }
        self.patch(&patch).await
    }

    async fn patch(&self, patch: &Patch<Value>) -> Result<(), Error> {
        self.api.patch_status(&self.name, &PatchParams::default(), patch).await.map(drop)
    }

    fn new_object(&self, node_uid: &str) -> EgressNode {
        let owner = OwnerReference {
            api_version: "v1".to_owned(),
            kind: "Node".to_owned(),
            name: self.name.clone(),
            uid: node_uid.to_owned(),
            ..OwnerReference::default()
        };
        let metadata =
            ObjectMeta { name: Some(self.name.clone()), owner_references: Some(vec![owner]), ..ObjectMeta::default() };
        EgressNode { metadata, spec: EgressNodeSpec {}, status: None }
    }
}
