//! A node's acknowledgements of hand-overs, in its EgressNode object: that it has given an address up, which the controller
//! waits for, and that it is ready to take one over, which the node that has it waits for. And of its lease: that it has an
//! end again.
//!
//! They name hand-overs by number, so that they are never taken for acknowledgements of a later one, and only those that are
//! open: they go with the last of them.

use std::sync::Arc;
use std::time::Duration;

use kube::{Client, Error};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::info;

use crate::api_outage::ApiOutages;
use crate::crd::{PreparedAddress, ReleasedAddress};
use crate::node_object::NodeObject;
use egress_core::model::ledger::Acknowledgements;
use egress_core::model::node::{Prepared, Readiness};
use egress_core::model::view::Node;
use egress_core::node_health::fitness::Ready;

/// What has been given up, what the node is ready for, and the latest end of a lease without one.
type Wanted = (Acknowledgements, Readiness, Option<u64>);

/// How long one write may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// After a failed write.
const RETRY: Duration = Duration::from_millis(500);

/// Keeps them as they should be, until told to stop. `own` is this node's own Node object. Until the node's half has
/// looked at the kernel it says nothing, and what an earlier run has said stays: a word that is taken back for the time of a
/// start is one that others wait for again.
pub async fn publish(
    (client, node_name): (Client, &str),
    (mut released, mut ready, mut bounded): (
        watch::Receiver<Acknowledgements>,
        watch::Receiver<Readiness>,
        watch::Receiver<Option<u64>>,
    ),
    (mut own, mut serves): (watch::Receiver<Option<Arc<Node>>>, watch::Receiver<Ready>),
    outages: &ApiOutages,
    stop: CancellationToken,
) {
    const WHAT: &str = "what this node has let go of or is ready for, in its EgressNode object";
    let object = NodeObject::new(client, node_name);
    let mut has_looked = false;
    loop {
        let wanted =
            (released.borrow_and_update().clone(), ready.borrow_and_update().clone(), *bounded.borrow_and_update());
        let known = own.borrow_and_update().as_ref().map(|node| {
            let Node { uid, given, prepared, released, bounded, .. } = &**node;
            let said = (released.clone(), Readiness { given: given.clone(), prepared: prepared.clone() }, *bounded);
            (uid.clone(), said)
        });
        has_looked |= serves.borrow_and_update().serving || wanted != Default::default();
        let mut failed = false;
        if let Some((uid, _)) = known.filter(|(_, said)| has_looked && *said != wanted) {
            let write = tokio::time::timeout(PATIENCE, write(&object, &uid, &wanted));
            let written = tokio::select! {
                () = stop.cancelled() => return,
                written = write => written,
            };
            failed = !matches!(written, Ok(Ok(())));
            match written {
                Ok(Ok(())) => {
                    outages.works(WHAT);
                    let (released, ready, bounded) = &wanted;
                    if wanted != Default::default() {
                        info!(?released, ?ready, ?bounded, "said what this node has let go of, and is ready for");
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
            alive = bounded.changed() => if alive.is_err() { return },
            alive = own.changed() => if alive.is_err() { return },
            alive = serves.changed(), if !has_looked => if alive.is_err() { return },
        }
    }
}

async fn write(object: &NodeObject, node_uid: &str, wanted: &Wanted) -> Result<(), Error> {
    object.say(node_uid, status(wanted)).await
}

/// Lists that are empty are left out of the object.
fn status((released, ready, bounded): &Wanted) -> Value {
    let released: Vec<_> = released
        .iter()
        .map(|(address, number)| ReleasedAddress {
            address: address.to_string(),
            hand_over: *number,
            to: ready.given.get(address).cloned(),
        })
        .collect();
    let prepared: Vec<_> = ready
        .prepared
        .iter()
        .map(|(address, Prepared(number, from, open))| PreparedAddress {
            address: address.to_string(),
            hand_over: *number,
            from: from.clone(),
            open: *open,
        })
        .collect();
    json!({
        "released": Some(released).filter(|all| !all.is_empty()),
        "prepared": Some(prepared).filter(|all| !all.is_empty()),
        "boundedLease": bounded,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use kube::api::DynamicObject;

    use crate::convert;
    use crate::stub::Server;
    use egress_core::model::samples::ip;

    #[tokio::test]
    async fn what_an_earlier_run_has_said_stays_until_this_one_has_looked() {
        let server = Server::start().await;
        let (client, outages) = server.client();
        let released = Acknowledgements::from([(ip("172.18.0.100"), 7)]);
        let node = Node { name: "a".into(), released, ..Node::default() };
        let (_own, is_own) = watch::channel(Some(Arc::new(node)));
        let (_released, words) = watch::channel(Acknowledgements::new());
        let (_ready, readiness) = watch::channel(Readiness::default());
        let (_bounded, is_bounded) = watch::channel(None);
        let (serves, is_serving) = watch::channel(Ready::default());
        let stop = CancellationToken::new();
        let (its, until) = (stop.clone(), Duration::from_millis(300));
        let publishing = tokio::spawn(async move {
            publish((client, "a"), (words, readiness, is_bounded), (is_own, is_serving), &outages, its).await;
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
    fn an_acknowledgement_is_read_as_it_was_written() {
        let (one, other) = (ip("172.18.0.100"), ip("fd00::1"));
        let released = Acknowledgements::from([(one, 7), (other, 8)]);
        let given = [(other, "node2".to_owned())].into();
        let prepared = [(ip("172.18.0.101"), Prepared(9, "node3".into(), false))].into();
        let said = (released, Readiness { given, prepared }, Some(12));
        let text = status(&said);
        assert_eq!(
            text["released"],
            json!([{"address": "172.18.0.100", "handOver": 7}, {"address": "fd00::1", "handOver": 8, "to": "node2"}])
        );
        let mut object = DynamicObject::new("a", &crate::watches::egress_node_resource());
        object.data["status"] = text;
        object.data["status"]["nodeUID"] = json!("u");
        let node = Node { uid: "u".into(), ..Node::default() };
        let read = convert::joined(&node, Some(&convert::agent_facts(&object)));
        assert_eq!((read.released, Readiness { given: read.given, prepared: read.prepared }, read.bounded), said);
        let nothing = json!({"released": null, "prepared": null, "boundedLease": null});
        assert_eq!(status(&Default::default()), nothing);
    }
}
