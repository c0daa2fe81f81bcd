//! The loop around the fence: what was heard, readings of the ledger, time, and the deadline in the programs.

use std::time::{Duration, Instant};

use egress_common::abi;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use egress_core::model::lease::SharedLease;
use egress_core::ownership::lease::{Deadline, LeaseHolder, LeaseTerms};
use egress_core::ownership::lease::{LeaseDemand, LeaseState};
use egress_core::ownership::slow_reads::SlowReads;
use egress_datapath::boot_ns;
use egress_kube::ledger::{self, LedgerStore};
use egress_supervise::Heartbeat;

/// Between two looks at least.
const IDLE: Duration = Duration::from_secs(1);
/// The two clocks are read one after the other.
const SUSPENDED: Duration = Duration::from_millis(50);

/// What the loop goes by.
pub struct Confirmations {
    /// As of when a leader has surely heard this node.
    pub heard: watch::Receiver<Option<Instant>>,
    /// The leader's total timeout.
    pub probed: watch::Receiver<Option<Duration>>,
    pub stake: watch::Receiver<LeaseDemand>,
}

/// What it says.
pub struct Lease {
    /// Whether this node may hold addresses.
    pub standing: watch::Sender<LeaseState>,
    /// Until when its programs may emit them.
    pub programs: SharedLease,
    /// The number of the latest end of a lease without one that the programs have obeyed.
    pub bounded: watch::Sender<Option<u64>>,
}

/// The clock that the lease counts by, and the one of the programs. They part where the machine is suspended.
struct Clocks {
    now: Instant,
    boot_ns: u64,
}

impl Clocks {
    /// In this order, so that what is left of a time is never more in the programs than here. A clock that cannot be read has
    /// passed every deadline.
    fn read() -> Self {
        let boot_ns = boot_ns().unwrap_or(u64::MAX);
        Self { now: Instant::now(), boot_ns }
    }

    /// Until then, with a heartbeat of now.
    fn lease(&self, until: Instant, stall: Duration) -> abi::Lease {
        let stall_ns = u64::try_from(stall.as_nanos()).unwrap_or(u64::MAX);
        abi::Lease::bounded(self.of_programs(until), self.boot_ns, stall_ns)
    }

    /// As the programs know this time.
    fn of_programs(&self, time: Instant) -> u64 {
        let left = u64::try_from(time.saturating_duration_since(self.now).as_nanos()).unwrap_or(u64::MAX);
        self.boot_ns.saturating_add(left)
    }

    fn was_suspended_since(&self, former: &Self) -> bool {
        let awake = self.now.saturating_duration_since(former.now) + SUSPENDED;
        self.boot_ns > former.of_programs(former.now + awake)
    }
}

fn is_endless(programs: &SharedLease) -> bool {
    programs.read().until_ns == abi::Lease::ENDLESS.until_ns
}

/// Publishes whether this node may hold addresses, and renews the deadline in its programs, until told to stop.
pub async fn keep(
    (node_name, total): (String, Duration),
    store: LedgerStore,
    Confirmations { mut heard, probed, mut stake }: Confirmations,
    Lease { standing, programs, bounded }: Lease,
    beat: Heartbeat,
    stop: CancellationToken,
) {
    let mut clocks = Clocks::read();
    let mut fence = LeaseHolder::new(total, clocks.now, is_endless(&programs));
    let (mut readings, mut late) = (FuturesUnordered::new(), SlowReads::default());
    let (mut is_probed, mut has_stake) = (true, true);
    loop {
        // Before the clocks: if the machine stands still in between, a program ends this lease, and it is not renewed.
        let found = programs.read();
        let former = std::mem::replace(&mut clocks, Clocks::read());
        let now = clocks.now;
        beat.note();
        if clocks.was_suspended_since(&former) {
            readings.clear();
            fence.note_suspended(now);
        }
        fence.set_demand(*stake.borrow_and_update());
        // Before what such a probe has confirmed counts.
        fence.note_probed(*probed.borrow());
        if let Some(as_of) = *heard.borrow_and_update() {
            fence.note_heard(as_of);
        }
        let is = fence.state(now, found.left_ns(clocks.boot_ns) == 0);
        let is_written = match fence.deadline(is) {
            Deadline::AsItIs => true,
            Deadline::At(time) => programs.renew(found, clocks.lease(time, fence.stall())),
            Deadline::Never => programs.renew(found, abi::Lease::ENDLESS),
            Deadline::Passed => {
                programs.expire();
                true
            }
        };
        if !is_written {
            continue;
        }
        // Behind the deadline: what is claimed upon it is announced.
        standing.send_if_modified(|said| std::mem::replace(said, is) != is);
        let has_end = fence.bounded().filter(|_| !is_endless(&programs));
        bounded.send_if_modified(|said| std::mem::replace(said, has_end) != has_end);
        if fence.ask_at().is_some_and(|time| time <= now) {
            fence.note_asked(now);
            readings.push(read(&store, &node_name, now, fence.patience()));
        }
        let next = fence.next(now);
        // Looked at now and then even where nothing is to be done, to know that it runs.
        let due = next.unwrap_or(now + IDLE).min(now + IDLE);
        tokio::select! {
            () = stop.cancelled() => return,
            outcome = heard.changed(), if is_probed => is_probed = outcome.is_ok(),
            outcome = stake.changed(), if has_stake => has_stake = outcome.is_ok(),
            Some((began, answer)) = readings.next(), if !readings.is_empty() => {
                let (now, limit) = (Instant::now(), fence.in_time());
                if !fence.was_heard() && late.note(now > began + limit, now) {
                    warn!(
                        limit_ms = limit.as_millis(),
                        "the API server is too slow to hold egress IPs by: no controller probes this agent, and most answers come \
                         later than 0.4 of the total timeout; set --egressip-node-healthcheck-port, or a longer \
                         --egressip-reachability-total-timeout, for agents and controllers"
                    );
                }
                if let Some((suspected, terms)) = answer {
                    fence.note_read(began, suspected, terms);
                }
            }
            () = tokio::time::sleep_until(due.into()) => {}
        }
    }
}

/// Whether this node is suspected, and what else the ledger says.
type Reading = (bool, LeaseTerms);

/// One reading, and when it began. A ledger that is not there, or cannot be read, is no reason to hold.
async fn read(store: &LedgerStore, node_name: &str, began: Instant, patience: Duration) -> (Instant, Option<Reading>) {
    let answer = match tokio::time::timeout(patience, store.read()).await {
        Ok(Ok(Some(object))) => Some(match ledger::read(&object) {
            Ok(ledger) => (ledger.suspects.contains_key(node_name), LeaseTerms::of(&ledger, node_name)),
            Err(_) => (true, LeaseTerms::default()),
        }),
        // Before anybody is suspected there is a ledger. One that is gone may have suspected this node, until the leader has
        // written it anew.
        Ok(Ok(None)) => None,
        Ok(Err(error)) => {
            debug!(%error, "cannot read the ledger");
            None
        }
        Err(_) => None,
    };
    (began, answer)
}

#[cfg(test)]
mod tests {
    use tracing_subscriber::layer::SubscriberExt;

    use super::*;
    use crate::debug::log::Troubles;
    use egress_kube::stub::Server;

    #[tokio::test]
    async fn a_ledger_that_is_not_there_is_no_reason_to_hold() {
        let server = Server::start().await;
        let store = |namespace| LedgerStore::new(server.client().0, namespace);
        let (began, patience) = (Instant::now(), Duration::from_secs(5));
        assert_eq!(
            read(&store("there"), "a", began, patience).await,
            (began, Some((false, LeaseTerms::default()))),
            "it suspects no node"
        );
        for namespace in ["absent", "busy"] {
            assert_eq!(read(&store(namespace), "a", began, patience).await, (began, None), "{namespace}");
        }
    }

    /// The warnings of a second and a half of a node that wants to hold something.
    async fn warnings(server: &Server, namespace: &str, heard: Option<Instant>) -> Vec<String> {
        let troubles = Troubles::default();
        let _subscriber = tracing::subscriber::set_default(tracing_subscriber::registry().with(troubles.clone()));
        let (heard, probed) = (watch::channel(heard).1, watch::channel(None).1);
        let heard = Confirmations { heard, probed, stake: watch::channel(LeaseDemand::default()).1 };
        let (standing, bounded) = (watch::Sender::default(), watch::Sender::default());
        let lease = Lease { standing, programs: SharedLease::default(), bounded };
        let (node, store) =
            (("a".to_owned(), Duration::from_millis(200)), LedgerStore::new(server.client().0, namespace));
        let keep = keep(node, store, heard, lease, Heartbeat::default(), CancellationToken::new());
        assert!(tokio::time::timeout(Duration::from_millis(1500), keep).await.is_err());
        troubles.list().into_iter().map(|one| one.line).collect()
    }

    #[tokio::test]
    async fn a_server_that_is_too_slow_to_hold_addresses_by_is_named_in_one_line() {
        let server = Server::start().await;
        let lines = warnings(&server, "slow", None).await;
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert!(lines[0].starts_with("the API server is too slow to hold egress IPs by: "), "{lines:?}");
        assert!(lines[0].ends_with(" limit_ms=80"), "{lines:?}");
        assert_eq!(warnings(&server, "there", None).await, [""; 0]);
        let heard = Instant::now() + Duration::from_millis(100);
        assert_eq!(warnings(&server, "slow", Some(heard)).await, [""; 0], "it holds by probes");
    }
}
