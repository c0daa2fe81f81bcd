//! A node's words about hand-overs, annotations of its Node object: that it has let go of an address, which the leader
//! waits for, and that it is ready to take one over, which the node that has it waits for.
//!
//! They name hand-overs by number, so that they are never taken for words about a later one, and only those that are open:
//! they go with the last of them.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node as KubeNode;
use kube::api::{Api, Patch, PatchParams};
use kube::{Client, Error};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::info;

use super::keys;
use super::outage::Outages;
use crate::model::ledger::Words;
use crate::model::node::Readiness;
use crate::model::view::Node;

/// How long one write may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// After a failed write.
const RETRY: Duration = Duration::from_millis(500);

/// Keeps the annotations as they should be, until told to stop. `own` is this node's own Node object.
pub async fn publish(
    (client, node_name): (Client, &str),
    (mut released, mut ready): (watch::Receiver<Words>, watch::Receiver<Readiness>),
    mut own: watch::Receiver<Option<Arc<Node>>>,
    outages: &Outages,
    stop: CancellationToken,
) {
    const WHAT: &str = "what this node has let go of or is ready for, on its Node object";
    let api: Api<KubeNode> = Api::all(client);
    loop {
        let wanted = (released.borrow_and_update().clone(), ready.borrow_and_update().clone());
        let said = own.borrow_and_update().as_ref().map(|node| (node.released.clone(), node.prepared.clone()));
        let mut failed = false;
        if said.is_some_and(|said| said != wanted) {
            let write = tokio::time::timeout(PATIENCE, write(&api, node_name, &wanted));
            let written = tokio::select! {
                () = stop.cancelled() => return,
                written = write => written,
            };
            failed = !matches!(written, Ok(Ok(())));
            match written {
                Ok(Ok(())) => {
                    outages.works(WHAT);
                    let (released, ready) = &wanted;
                    if wanted != Default::default() {
                        info!(?released, ?ready, "said what this node has let go of, and is ready for");
                    }
                }
                Ok(Err(error)) => outages.failed(WHAT, &error),
                Err(_) => outages.unanswered(WHAT, "a request took too long"),
            }
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(RETRY), if failed => {}
            alive = released.changed() => if alive.is_err() { return },
            alive = ready.changed() => if alive.is_err() { return },
            alive = own.changed() => if alive.is_err() { return },
        }
    }
}

/// Nobody else writes these keys, so there is nothing to be careful of.
async fn write(api: &Api<KubeNode>, node_name: &str, (released, ready): &(Words, Readiness)) -> Result<(), Error> {
    let text = |value: Value| if value == json!({}) { Value::Null } else { value.to_string().into() };
    let (released, ready) = (text(json!(released)), text(json!(ready)));
    let patch = json!({"metadata": {"annotations": {keys::RELEASED: released, keys::PREPARED: ready}}});
    api.patch(node_name, &PatchParams::default(), &Patch::Merge(patch)).await.map(drop)
}
