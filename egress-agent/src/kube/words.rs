//! A node's word that it has let go of an address: an annotation of its Node object, which the leader waits for.
//!
//! It names hand-overs by number, so that it is never taken for a word about a later one, and only those that are open:
//! it goes with the last of them.

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
use crate::model::view::Node;

/// How long one write may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// After a failed write.
const RETRY: Duration = Duration::from_millis(500);

/// Keeps the annotation as it should be, until told to stop. `own` is this node's own Node object.
pub async fn publish(
    (client, node_name): (Client, &str),
    mut words: watch::Receiver<Words>,
    mut own: watch::Receiver<Option<Arc<Node>>>,
    outages: &Outages,
    stop: CancellationToken,
) {
    const WHAT: &str = "what this node has let go of, on its Node object";
    let api: Api<KubeNode> = Api::all(client);
    loop {
        let wanted = words.borrow_and_update().clone();
        let said = own.borrow_and_update().as_ref().map(|node| node.released.clone());
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
                    if !wanted.is_empty() {
                        info!(?wanted, "said what this node has let go of");
                    }
                }
                Ok(Err(error)) => outages.failed(WHAT, &error),
                Err(_) => outages.unanswered(WHAT, "a request took too long"),
            }
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(RETRY), if failed => {}
            alive = words.changed() => if alive.is_err() { return },
            alive = own.changed() => if alive.is_err() { return },
        }
    }
}

/// Nobody else writes this key, so there is nothing to be careful of.
async fn write(api: &Api<KubeNode>, node_name: &str, words: &Words) -> Result<(), Error> {
    let value = if words.is_empty() { Value::Null } else { json!(words).to_string().into() };
    let patch = json!({"metadata": {"annotations": {keys::RELEASED: value}}});
    api.patch(node_name, &PatchParams::default(), &Patch::Merge(patch)).await.map(drop)
}
