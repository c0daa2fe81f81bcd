//! The loop around the fence: what was heard, readings of the ledger, and time.

use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use super::regain::Given;
use super::{Addresses, Fence};
use crate::kube::ledger::{self, LedgerStore};
use crate::metrics::life::Beat;
use crate::reconcile::ties::{Stake, Standing};

/// Between two looks at least.
const IDLE: Duration = Duration::from_secs(1);

/// What the loop goes by.
pub struct Heard {
    /// As of when a leader has surely heard this node.
    pub heard: watch::Receiver<Option<Instant>>,
    /// The leader's total timeout.
    pub probed: watch::Receiver<Option<Duration>>,
    pub given: watch::Receiver<Given>,
    pub stake: watch::Receiver<Stake>,
}

/// Publishes whether this node may hold addresses, and what it may hold even if not, until told to stop.
pub async fn keep(
    (node_name, total): (String, Duration),
    store: LedgerStore,
    Heard { mut heard, probed, mut given, mut stake }: Heard,
    (standing, regained, beat): (watch::Sender<Standing>, watch::Sender<Addresses>, Beat),
    stop: CancellationToken,
) {
    let mut fence = Fence::new(total);
    let mut readings = FuturesUnordered::new();
    let (mut is_probed, mut is_given, mut has_stake) = (true, true, true);
    let mut due = Instant::now();
    loop {
        let now = Instant::now();
        beat.note();
        // Its programs went on meanwhile, and a moment more does no harm; to end them for nothing would.
        if now > due + fence.longest_pause() {
            readings.clear();
            fence.wake(now);
        }
        fence.set_stake(*stake.borrow_and_update(), now);
        // Before what such a probe has confirmed counts.
        fence.note_probed(*probed.borrow());
        if let Some(as_of) = *heard.borrow_and_update() {
            fence.note_heard(as_of);
        }
        fence.note_given(given.borrow_and_update().clone());
        let is = fence.standing(now);
        standing.send_if_modified(|said| std::mem::replace(said, is) != is);
        let back = fence.regained(now).map(|(addresses, _)| addresses.clone()).unwrap_or_default();
        regained.send_if_modified(|said| {
            let is_news = *said != back;
            *said = back;
            is_news
        });
        if fence.ask_at().is_some_and(|time| time <= now) {
            fence.note_asked(now);
            readings.push(read(&store, &node_name, now, fence.patience()));
        }
        let next = fence.next(now);
        // Looked at now and then even where nothing is to be done, to know that it runs.
        due = next.unwrap_or(now + IDLE).min(now + IDLE);
        tokio::select! {
            () = stop.cancelled() => return,
            outcome = heard.changed(), if is_probed => is_probed = outcome.is_ok(),
            outcome = given.changed(), if is_given => is_given = outcome.is_ok(),
            outcome = stake.changed(), if has_stake => has_stake = outcome.is_ok(),
            Some(answer) = readings.next(), if !readings.is_empty() => {
                if let Some((began, suspected, total)) = answer {
                    fence.note_read(began, suspected, total);
                }
            }
            () = tokio::time::sleep_until(due.into()) => {}
        }
    }
}

/// When a reading began, whether this node is suspected, and the leader's total timeout.
type Reading = (Instant, bool, Option<Duration>);

/// One reading. A ledger that is not there, or cannot be read, is no reason to hold.
async fn read(store: &LedgerStore, node_name: &str, began: Instant, patience: Duration) -> Option<Reading> {
    match tokio::time::timeout(patience, store.read()).await {
        Ok(Ok(Some(object))) => Some(match ledger::read(&object) {
            Ok(ledger) => (began, ledger.suspects.contains_key(node_name), ledger.total),
            Err(_) => (began, true, None),
        }),
        // Before anybody is suspected there is a ledger. One that is gone may have suspected this node, until the leader has
        // written it anew.
        Ok(Ok(None)) => None,
        Ok(Err(error)) => {
            debug!(%error, "cannot read the ledger");
            None
        }
        Err(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kube::stub::Server;

    #[tokio::test]
    async fn a_ledger_that_is_not_there_is_no_reason_to_hold() {
        let server = Server::start().await;
        let store = |namespace| LedgerStore::new(server.client().0, namespace);
        let (began, patience) = (Instant::now(), Duration::from_secs(5));
        assert_eq!(read(&store("there"), "a", began, patience).await, Some((began, false, None)), "it suspects nobody");
        for namespace in ["absent", "busy"] {
            assert_eq!(read(&store(namespace), "a", began, patience).await, None, "{namespace}");
        }
    }
}
