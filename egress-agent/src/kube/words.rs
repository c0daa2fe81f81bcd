//! A node's words about hand-overs, annotations of its Node object: that it has let go of an address, which the leader
//! waits for, and that it is ready to take one over, which the node that has it waits for.
//!
//! They name hand-overs by number, so that they are never taken for words about a later one, and only those that are open:
//! they go with the last of them.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node as KubeNode;
use kube::api::{Api, Patch, PatchParams};
use kube::{Client, Error};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::info;

use super::keys;
use super::outage::Outages;
use crate::model::ledger::Words;
use crate::model::node::{Given, Readiness};
use crate::model::view::Node;
use crate::reconcile::Ready;

/// How long one write may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// After a failed write.
const RETRY: Duration = Duration::from_millis(500);

/// A node's word that it has let go of an address: the number of the hand-over, and the node that it has handed it over to,
/// if it has.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub(super) enum Released {
    Alone(u64),
    To(u64, String),
}

impl Released {
    fn all(released: &Words, given: &Given) -> BTreeMap<IpAddr, Self> {
        let word = |(address, number): (&IpAddr, &u64)| match given.get(address) {
            Some(to) => (*address, Self::To(*number, to.clone())),
            None => (*address, Self::Alone(*number)),
        };
        released.iter().map(word).collect()
    }

    /// As it stands on a Node.
    pub(super) fn apart(all: BTreeMap<IpAddr, Self>) -> (Words, Given) {
        let (mut released, mut given) = (Words::new(), Given::new());
        for (address, word) in all {
            let number = match word {
                Self::Alone(number) => number,
                Self::To(number, to) => {
                    given.insert(address, to);
                    number
                }
            };
            released.insert(address, number);
        }
        (released, given)
    }
}

/// Keeps the annotations as they should be, until told to stop. `own` is this node's own Node object. Until the node's half has
/// looked at the kernel it says nothing, and what an earlier run has said stays: a word that is taken back for the time of a
/// start is one that others wait for again.
pub async fn publish(
    (client, node_name): (Client, &str),
    (mut released, mut ready): (watch::Receiver<Words>, watch::Receiver<Readiness>),
    (mut own, mut serves): (watch::Receiver<Option<Arc<Node>>>, watch::Receiver<Ready>),
    outages: &Outages,
    stop: CancellationToken,
) {
    const WHAT: &str = "what this node has let go of or is ready for, on its Node object";
    let api: Api<KubeNode> = Api::all(client);
    let mut has_looked = false;
    loop {
        let wanted = (released.borrow_and_update().clone(), ready.borrow_and_update().clone());
        let said = own.borrow_and_update().as_ref().map(|node| {
            let Node { given, prepared, released, .. } = &**node;
            (released.clone(), Readiness { given: given.clone(), prepared: prepared.clone() })
        });
        has_looked |= serves.borrow_and_update().serving || wanted != Default::default();
        let mut failed = false;
        if has_looked && said.is_some_and(|said| said != wanted) {
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
            alive = serves.changed(), if !has_looked => if alive.is_err() { return },
        }
    }
}

/// Nobody else writes these keys, so there is nothing to be careful of.
async fn write(api: &Api<KubeNode>, node_name: &str, (released, ready): &(Words, Readiness)) -> Result<(), Error> {
    let text = |value: Value| if value == json!({}) { Value::Null } else { value.to_string().into() };
    let (released, ready) = (text(json!(Released::all(released, &ready.given))), text(json!(ready.prepared)));
    let patch = json!({"metadata": {"annotations": {keys::RELEASED: released, keys::PREPARED: ready}}});
    api.patch(node_name, &PatchParams::default(), &Patch::Merge(patch)).await.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kube::stub::Server;
    use crate::model::samples::ip;

    #[tokio::test]
    async fn what_an_earlier_run_has_said_stays_until_this_one_has_looked() {
        let server = Server::start().await;
        let (client, outages) = server.client();
        let released = Words::from([(ip("172.18.0.100"), 7)]);
        let node = Node { name: "a".into(), released, ..Node::default() };
        let (_own, is_own) = watch::channel(Some(Arc::new(node)));
        let (_released, words) = watch::channel(Words::new());
        let (_ready, readiness) = watch::channel(Readiness::default());
        let (serves, is_serving) = watch::channel(Ready::default());
        let stop = CancellationToken::new();
        let (its, until) = (stop.clone(), Duration::from_millis(300));
        let publishing = tokio::spawn(async move {
            publish((client, "a"), (words, readiness), (is_own, is_serving), &outages, its).await;
        });
        tokio::time::sleep(until).await;
        assert_eq!(server.asked("PATCH"), 0, "nobody has looked yet");
        serves.send_replace(Ready { serving: true, ..Ready::default() });
        tokio::time::sleep(until).await;
        assert!(server.asked("PATCH") > 0, "it is over, and goes");
        stop.cancel();
        publishing.await.expect("it ends");
    }

    #[test]
    fn a_word_says_whom_an_address_has_been_handed_over_to() {
        let (one, other) = (ip("172.18.0.100"), ip("fd00::1"));
        let (released, given) = (Words::from([(one, 7), (other, 8)]), Given::from([(other, "node2".to_owned())]));
        let all = Released::all(&released, &given);
        let text = serde_json::to_string(&all).expect("text");
        assert_eq!(text, r#"{"172.18.0.100":7,"fd00::1":[8,"node2"]}"#);
        assert_eq!(Released::apart(serde_json::from_str(&text).expect("the same")), (released, given));
    }
}
