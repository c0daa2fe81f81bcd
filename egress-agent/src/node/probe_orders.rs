//! Obeys hand-overs that arrive only in the leader's probes, because this agent has lost the API server.
//!
//! The sender may be a former leader that does not know it, and agents and controllers share the key that signs probes. So
//! each order is compared with a quorum read of the ledger: the agent obeys it if the ledger contains it or cannot be read.
//! An address released by mistake is served again after the next fresh read of ledger and object.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::info;

use egress_core::model::ledger::{Acknowledgements, Ledger};
use egress_kube::ledger::{self, LedgerStore};

/// Timeout of a ledger read. A reachable API server has answered by then; a failover of this node waits for it.
const READ_TIMEOUT: Duration = Duration::from_millis(150);
/// Least time between two reads of the ledger.
const PAUSE: Duration = Duration::from_millis(100);

/// Publishes the orders to obey, until `stop` is cancelled. `known` is the latest ledger of the watch.
pub async fn obey(
    (node_name, store): (String, LedgerStore),
    mut orders: watch::Receiver<Acknowledgements>,
    mut known: watch::Receiver<Arc<Ledger>>,
    obeyed: watch::Sender<Acknowledgements>,
    stop: CancellationToken,
) {
    let mut checked = Acknowledgements::new();
    loop {
        let open = not_in_watch(&orders.borrow_and_update(), &known.borrow_and_update());
        if open != checked {
            checked.clone_from(&open);
            let real =
                if open.is_empty() { open } else { confirmed_by_ledger(&store, &node_name, open, &mut known).await };
            obeyed.send_if_modified(|obeyed| {
                let has_changed = *obeyed != real;
                if has_changed && !real.is_empty() {
                    info!(addresses = ?real.keys(), "the leader's probes order hand-overs from this node");
                }
                *obeyed = real;
                has_changed
            });
            tokio::time::sleep(PAUSE).await;
        }
        let is_open = tokio::select! {
            () = stop.cancelled() => return,
            changed = orders.changed() => changed.is_ok(),
            changed = known.changed() => changed.is_ok(),
        };
        if !is_open {
            return;
        }
    }
}

/// The orders that are newer than the ledger of the watch.
fn not_in_watch(orders: &Acknowledgements, known: &Ledger) -> Acknowledgements {
    orders
        .iter()
        .filter(|(_, number)| **number > known.records.last)
        .map(|(address, number)| (*address, *number))
        .collect()
}

async fn confirmed_by_ledger(
    store: &LedgerStore,
    node_name: &str,
    mut orders: Acknowledgements,
    known: &mut watch::Receiver<Arc<Ledger>>,
) -> Acknowledgements {
    // An absent or unreadable ledger refutes no order.
    let Ok(Ok(Some(read))) = tokio::time::timeout(READ_TIMEOUT, store.read()).await else { return orders };
    if let Ok(ledger) = ledger::read(&read) {
        let open = ledger.leaving(node_name);
        orders.retain(|address, number| open.get(address) == Some(number));
    }
    still_unknown(orders, known).await
}

/// The orders that the watch has not delivered a moment later. The API server is reachable, so the probe may only have been
/// faster; a hand-over that arrives by the ledger loses no packet.
async fn still_unknown(orders: Acknowledgements, known: &mut watch::Receiver<Arc<Ledger>>) -> Acknowledgements {
    let has_arrived =
        tokio::time::timeout(READ_TIMEOUT, known.wait_for(|known| not_in_watch(&orders, known).is_empty()))
            .await
            .is_ok();
    if has_arrived { Acknowledgements::new() } else { not_in_watch(&orders, &known.borrow()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use egress_core::model::ledger::Records;

    #[test]
    fn an_order_that_the_ledger_contains_is_ignored() {
        let orders = Acknowledgements::from([([10, 0, 0, 1].into(), 7), ([10, 0, 0, 2].into(), 9)]);
        let ledger = |last| Ledger { records: Records { last, ..Records::default() }, ..Ledger::default() };
        assert_eq!(not_in_watch(&orders, &ledger(6)), orders);
        assert_eq!(not_in_watch(&orders, &ledger(7)), Acknowledgements::from([([10, 0, 0, 2].into(), 9)]));
        assert_eq!(not_in_watch(&orders, &ledger(9)), Acknowledgements::new());
    }

    #[tokio::test]
    async fn a_probe_that_is_faster_than_the_watch_is_no_order() {
        let orders = Acknowledgements::from([([10, 0, 0, 1].into(), 7)]);
        let (ledger, mut known) = watch::channel(Arc::<Ledger>::default());
        assert_eq!(still_unknown(orders.clone(), &mut known).await, orders, "the watch delivers nothing");
        let update = async {
            tokio::time::sleep(READ_TIMEOUT / 10).await;
            ledger.send_modify(|ledger| Arc::make_mut(ledger).records.last = 7);
        };
        assert_eq!(tokio::join!(still_unknown(orders, &mut known), update).0, Acknowledgements::new());
    }
}
