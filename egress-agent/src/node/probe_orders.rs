//! Obeying hand-overs that only the leader's probes tell of, because this agent cannot hear the API server.
//!
//! A leader may be a former one that does not know it, and the key that its probes are signed with is shared by agents and
//! controllers. So an order is held against the ledger, read past every cache; it is obeyed where the ledger has it, or cannot
//! be read. What is obeyed for nothing is taken up again as soon as ledger and object have been read anew.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::info;

use egress_core::model::ledger::{Acknowledgements, Ledger};
use egress_kube::ledger::{self, LedgerStore};

/// How long the ledger may take to be read. An API server that is there has answered by then; what moves for the failure of
/// its node waits for it.
const PATIENCE: Duration = Duration::from_millis(150);
/// Between two readings, whatever is ordered.
const PAUSE: Duration = Duration::from_millis(100);

/// Publishes what of the orders is to be obeyed, until told to stop. `known` is the ledger as it was last heard of.
pub async fn obey(
    (node_name, store): (String, LedgerStore),
    mut orders: watch::Receiver<Acknowledgements>,
    mut known: watch::Receiver<Arc<Ledger>>,
    obeyed: watch::Sender<Acknowledgements>,
    stop: CancellationToken,
) {
    let mut judged = Acknowledgements::new();
    loop {
        let open = unheard(&orders.borrow_and_update(), &known.borrow_and_update());
        if open != judged {
            judged.clone_from(&open);
            let real = if open.is_empty() { open } else { held_against(&store, &node_name, open, &mut known).await };
            obeyed.send_if_modified(|obeyed| {
                let is_news = *obeyed != real;
                if is_news && !real.is_empty() {
                    info!(addresses = ?real.keys(), "the leader's probes tell of hand-overs from this node");
                }
                *obeyed = real;
                is_news
            });
            tokio::time::sleep(PAUSE).await;
        }
        let is_there = tokio::select! {
            () = stop.cancelled() => return,
            changed = orders.changed() => changed.is_ok(),
            changed = known.changed() => changed.is_ok(),
        };
        if !is_there {
            return;
        }
    }
}

/// Those that this agent cannot know of: the ledger that it has heard of is older.
fn unheard(orders: &Acknowledgements, known: &Ledger) -> Acknowledgements {
    orders
        .iter()
        .filter(|(_, number)| **number > known.records.last)
        .map(|(address, number)| (*address, *number))
        .collect()
}

async fn held_against(
    store: &LedgerStore,
    node_name: &str,
    mut orders: Acknowledgements,
    known: &mut watch::Receiver<Arc<Ledger>>,
) -> Acknowledgements {
    // One that is gone, or broken, says nothing.
    let Ok(Ok(Some(read))) = tokio::time::timeout(PATIENCE, store.read()).await else { return orders };
    if let Ok(ledger) = ledger::read(&read) {
        let open = ledger.leaving(node_name);
        orders.retain(|address, number| open.get(address) == Some(number));
    }
    still_unheard(orders, known).await
}

/// Those of which the watch does not tell a moment later. The API server is there, and a probe may only have been faster; a
/// hand-over that the ledger tells of is obeyed without a loss.
async fn still_unheard(orders: Acknowledgements, known: &mut watch::Receiver<Arc<Ledger>>) -> Acknowledgements {
    let is_told =
        tokio::time::timeout(PATIENCE, known.wait_for(|known| unheard(&orders, known).is_empty())).await.is_ok();
    if is_told { Acknowledgements::new() } else { unheard(&orders, &known.borrow()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use egress_core::model::ledger::Records;

    #[test]
    fn what_the_ledger_has_told_needs_no_order() {
        let orders = Acknowledgements::from([([10, 0, 0, 1].into(), 7), ([10, 0, 0, 2].into(), 9)]);
        let ledger = |last| Ledger { records: Records { last, ..Records::default() }, ..Ledger::default() };
        assert_eq!(unheard(&orders, &ledger(6)), orders);
        assert_eq!(unheard(&orders, &ledger(7)), Acknowledgements::from([([10, 0, 0, 2].into(), 9)]));
        assert_eq!(unheard(&orders, &ledger(9)), Acknowledgements::new());
    }

    #[tokio::test]
    async fn a_probe_that_was_faster_than_the_watch_is_no_order() {
        let orders = Acknowledgements::from([([10, 0, 0, 1].into(), 7)]);
        let (tell, mut known) = watch::channel(Arc::<Ledger>::default());
        assert_eq!(still_unheard(orders.clone(), &mut known).await, orders, "the watch tells nothing");
        let told = async {
            tokio::time::sleep(PATIENCE / 10).await;
            tell.send_modify(|ledger| Arc::make_mut(ledger).records.last = 7);
        };
        assert_eq!(tokio::join!(still_unheard(orders, &mut known), told).0, Acknowledgements::new());
    }
}
