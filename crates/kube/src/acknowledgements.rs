//! Publishes this node's acknowledgements in its EgressNode object: released addresses (the controller waits for these),
//! addresses that the node is ready to take over (the old owner waits for these), and the latest endless lease that has ended.
//!
//! An acknowledgement carries the number of its hand-over, so it never counts for a later one. Only acknowledgements of open
//! hand-overs are kept.

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
use egress_core::model::node::{Node, Prepared, Readiness};
use egress_core::node_health::fitness::Ready;

/// Released addresses, readiness, and the number of the latest end of an endless lease.
type DesiredNodeStatus = (Acknowledgements, Readiness, Option<u64>);

/// Timeout of one write.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Pause after a failed write.
const RETRY: Duration = Duration::from_millis(500);

/// Keeps the published acknowledgements current until stopped. `own` is this node's Node object. It writes nothing before the
/// node reconciler has read the kernel: acknowledgements of an earlier run stay, or others would wait for them again.
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
    const WHAT: &str = "the acknowledgements in this node's EgressNode object";
    let object = NodeObject::new(client, node_name);
    let mut has_read_kernel = false;
    loop {
        let desired =
            (released.borrow_and_update().clone(), ready.borrow_and_update().clone(), *bounded.borrow_and_update());
        let known = own.borrow_and_update().as_ref().map(|node| {
            let Node { uid, given, prepared, released, bounded, .. } = &**node;
            let published =
                (released.clone(), Readiness { given: given.clone(), prepared: prepared.clone() }, *bounded);
            (uid.clone(), published)
        });
        has_read_kernel |= serves.borrow_and_update().serving || desired != Default::default();
        let mut failed = false;
        if let Some((uid, _)) = known.filter(|(_, published)| has_read_kernel && *published != desired) {
            let write = outages.answer(WHAT, TIMEOUT, write(&object, &uid, &desired));
            let Some(written) = stop.run_until_cancelled(write).await else { return };
            failed = written.is_none();
            if !failed && desired != Default::default() {
                let (released, ready, bounded) = &desired;
                info!(?released, ?ready, ?bounded, "acknowledgements published");
            }
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(RETRY), if failed => {}
            alive = released.changed() => if alive.is_err() { return },
            alive = ready.changed() => if alive.is_err() { return },
            alive = bounded.changed() => if alive.is_err() { return },
            alive = own.changed() => if alive.is_err() { return },
            alive = serves.changed(), if !has_read_kernel => if alive.is_err() { return },
        }
    }
}

async fn write(object: &NodeObject, node_uid: &str, desired: &DesiredNodeStatus) -> Result<(), Error> {
    object.publish(node_uid, status(desired)).await
}

/// Empty lists are left out of the object.
fn status((released, ready, bounded): &DesiredNodeStatus) -> Value {
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
    use crate::stub::StubServer;
    use egress_core::model::samples::ip;

    #[tokio::test]
    async fn acknowledgements_of_an_earlier_run_stay_until_the_kernel_is_read() {
        let server = StubServer::start().await;
        let (client, outages) = server.client();
        let released = Acknowledgements::from([(ip("172.18.0.100"), 7)]);
        let node = Node { name: "a".into(), released, ..Node::default() };
        let (_own, is_own) = watch::channel(Some(Arc::new(node)));
        let (_released, is_released) = watch::channel(Acknowledgements::new());
        let (_ready, readiness) = watch::channel(Readiness::default());
        let (_bounded, is_bounded) = watch::channel(None);
        let (serves, is_serving) = watch::channel(Ready::default());
        let stop = CancellationToken::new();
        let (its_stop, pause) = (stop.clone(), Duration::from_millis(300));
        let publishing = tokio::spawn(async move {
            publish((client, "a"), (is_released, readiness, is_bounded), (is_own, is_serving), &outages, its_stop)
                .await;
        });
        tokio::time::sleep(pause).await;
        assert_eq!(server.requests("PATCH"), 0, "the kernel has not been read yet");
        serves.send_replace(Ready { serving: true, ..Ready::default() });
        tokio::time::sleep(pause).await;
        assert!(server.requests("PATCH") > 0, "the hand-over is over, its acknowledgement is removed");
        stop.cancel();
        publishing.await.expect("it ends");
    }

    #[test]
    fn an_acknowledgement_is_read_as_it_was_written() {
        let (one, other) = (ip("172.18.0.100"), ip("fd00::1"));
        let released = Acknowledgements::from([(one, 7), (other, 8)]);
        let given = [(other, "node2".to_owned())].into();
        let prepared = [(ip("172.18.0.101"), Prepared(9, "node3".into(), false))].into();
        let published = (released, Readiness { given, prepared }, Some(12));
        let text = status(&published);
        assert_eq!(
            text["released"],
            json!([{"address": "172.18.0.100", "handOver": 7}, {"address": "fd00::1", "handOver": 8, "to": "node2"}])
        );
        let mut object = DynamicObject::new("a", &crate::crd::egress_node_resource());
        object.data["status"] = text;
        object.data["status"]["nodeUID"] = json!("u");
        let node = Node { uid: "u".into(), ..Node::default() };
        let read = convert::joined(&node, Some(&convert::agent_facts(&object)));
        assert_eq!((read.released, Readiness { given: read.given, prepared: read.prepared }, read.bounded), published);
        let nothing = json!({"released": null, "prepared": null, "boundedLease": null});
        assert_eq!(status(&Default::default()), nothing);
    }
}
