//! Keeps this node's lease: feeds the lease state with probes, reads of the ledger and time, and writes the deadline that
//! the programs check.

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

/// The longest pause of the loop.
const IDLE: Duration = Duration::from_secs(1);
/// Tolerance for reading the two clocks one after the other.
const SUSPENDED: Duration = Duration::from_millis(50);

/// What the lease depends on.
pub struct Confirmations {
    /// The latest time as of which a leader has certainly reached this node.
    pub confirmed: watch::Receiver<Option<Instant>>,
    /// The leader's total timeout.
    pub total_timeout: watch::Receiver<Option<Duration>>,
    pub demand: watch::Receiver<LeaseDemand>,
}

/// What the loop publishes.
pub struct PublishedLease {
    /// Whether this node may hold addresses.
    pub lease_state: watch::Sender<LeaseState>,
    /// Until when its programs may emit them.
    pub programs: SharedLease,
    /// The number of the latest order to bound an endless lease that the programs have obeyed.
    pub bounded: watch::Sender<Option<u64>>,
}

/// The lease's clock and the programs' clock. They differ by the time that the machine was suspended.
struct Clocks {
    now: Instant,
    boot_ns: u64,
}

impl Clocks {
    /// Reads the programs' clock first, so that the remaining time is never longer in the programs than here. A clock that
    /// cannot be read counts as past every deadline.
    fn read() -> Self {
        let boot_ns = boot_ns().unwrap_or(u64::MAX);
        Self { now: Instant::now(), boot_ns }
    }

    /// A lease until `until`, with the heartbeat of now.
    fn lease(&self, until: Instant, stall: Duration) -> abi::Lease {
        let stall_ns = u64::try_from(stall.as_nanos()).unwrap_or(u64::MAX);
        abi::Lease::bounded(self.of_programs(until), self.boot_ns, stall_ns)
    }

    /// This time on the programs' clock.
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

/// Publishes whether this node may hold addresses, and renews the deadline in its programs, until `stop` is cancelled.
pub async fn keep(
    (node_name, total): (String, Duration),
    store: LedgerStore,
    Confirmations { mut confirmed, total_timeout, mut demand }: Confirmations,
    PublishedLease { lease_state, programs, bounded }: PublishedLease,
    heartbeat: Heartbeat,
    stop: CancellationToken,
) {
    let mut clocks = Clocks::read();
    let mut holder = LeaseHolder::new(total, clocks.now, is_endless(&programs));
    let (mut readings, mut slow_reads) = (FuturesUnordered::new(), SlowReads::default());
    let (mut is_probed, mut has_demand) = (true, true);
    loop {
        // Read before the clocks: if the machine stalls in between, a program ends this lease, and the renewal fails.
        let found = programs.read();
        let former = std::mem::replace(&mut clocks, Clocks::read());
        let now = clocks.now;
        heartbeat.note();
        if clocks.was_suspended_since(&former) {
            readings.clear();
            holder.note_suspended(now);
        }
        holder.set_demand(*demand.borrow_and_update());
        // Set the timeout before counting what a probe with it has confirmed.
        holder.note_probed(*total_timeout.borrow());
        if let Some(as_of) = *confirmed.borrow_and_update() {
            holder.note_confirmed(as_of);
        }
        let is = holder.state(now, found.left_ns(clocks.boot_ns) == 0);
        let is_written = match holder.deadline(is) {
            Deadline::Unchanged => true,
            Deadline::At(time) => programs.renew(found, clocks.lease(time, holder.longest_stall())),
            Deadline::Never => programs.renew(found, abi::Lease::ENDLESS),
            Deadline::Passed => {
                programs.expire();
                true
            }
        };
        if !is_written {
            continue;
        }
        // After the deadline is written, because addresses claimed on this state are announced.
        lease_state.send_if_modified(|published| std::mem::replace(published, is) != is);
        let has_end = holder.bounded().filter(|_| !is_endless(&programs));
        bounded.send_if_modified(|published| std::mem::replace(published, has_end) != has_end);
        if holder.next_read_at().is_some_and(|time| time <= now) {
            holder.note_read_started(now);
            readings.push(read(&store, &node_name, now, holder.read_timeout()));
        }
        let next = holder.next_change_at(now);
        // Wake regularly even without work, so that the heartbeat shows that the loop runs.
        let due = next.unwrap_or(now + IDLE).min(now + IDLE);
        tokio::select! {
            () = stop.cancelled() => return,
            outcome = confirmed.changed(), if is_probed => is_probed = outcome.is_ok(),
            outcome = demand.changed(), if has_demand => has_demand = outcome.is_ok(),
            Some((began, answer)) = readings.next(), if !readings.is_empty() => {
                let (now, limit) = (Instant::now(), holder.read_deadline());
                if !holder.was_confirmed() && slow_reads.note(now > began + limit, now) {
                    warn!(
                        limit_ms = limit.as_millis(),
                        "the API server is too slow to hold egress IPs by: no controller probes this agent, and most answers arrive \
                         later than 0.4 of the total timeout; set --egressip-node-healthcheck-port, or a longer \
                         --egressip-reachability-total-timeout, for agents and controllers"
                    );
                }
                if let Some((suspected, terms)) = answer {
                    holder.note_read(began, suspected, terms);
                }
            }
            () = tokio::time::sleep_until(due.into()) => {}
        }
    }
}

/// Whether this node is suspected, and the ledger's lease terms.
type LeaseInputs = (bool, LeaseTerms);

/// One read, and its start. An absent or unreachable ledger does not confirm the lease.
async fn read(
    store: &LedgerStore,
    node_name: &str,
    began: Instant,
    timeout: Duration,
) -> (Instant, Option<LeaseInputs>) {
    let answer = match tokio::time::timeout(timeout, store.read()).await {
        Ok(Ok(Some(object))) => Some(match ledger::read(&object) {
            Ok(ledger) => (ledger.suspects.contains_key(node_name), LeaseTerms::of(&ledger, node_name)),
            Err(_) => (true, LeaseTerms::default()),
        }),
        // The ledger exists before a node is suspected. A deleted one may have suspected this node, until the leader has
        // written it again.
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
    use crate::debug::log::RecentWarnings;
    use egress_kube::stub::StubServer;

    #[tokio::test]
    async fn an_absent_ledger_does_not_confirm_the_lease() {
        let server = StubServer::start().await;
        let store = |namespace| LedgerStore::new(server.client().0, namespace);
        let (began, timeout) = (Instant::now(), Duration::from_secs(5));
        assert_eq!(
            read(&store("there"), "a", began, timeout).await,
            (began, Some((false, LeaseTerms::default()))),
            "it suspects no node"
        );
        for namespace in ["absent", "busy"] {
            assert_eq!(read(&store(namespace), "a", began, timeout).await, (began, None), "{namespace}");
        }
    }

    /// The warnings of a node without a confirmed lease within 1.5 s.
    async fn warnings(server: &StubServer, namespace: &str, confirmed: Option<Instant>) -> Vec<String> {
        let recent = RecentWarnings::default();
        let _subscriber = tracing::subscriber::set_default(tracing_subscriber::registry().with(recent.clone()));
        let (confirmed, total_timeout) = (watch::channel(confirmed).1, watch::channel(None).1);
        let confirmations =
            Confirmations { confirmed, total_timeout, demand: watch::channel(LeaseDemand::default()).1 };
        let (lease_state, bounded) = (watch::Sender::default(), watch::Sender::default());
        let lease = PublishedLease { lease_state, programs: SharedLease::default(), bounded };
        let (node, store) =
            (("a".to_owned(), Duration::from_millis(200)), LedgerStore::new(server.client().0, namespace));
        let keep = keep(node, store, confirmations, lease, Heartbeat::default(), CancellationToken::new());
        assert!(tokio::time::timeout(Duration::from_millis(1500), keep).await.is_err());
        recent.list(std::time::SystemTime::now()).into_iter().map(|one| one.line).collect()
    }

    #[tokio::test]
    async fn a_server_too_slow_for_the_lease_causes_one_warning() {
        let server = StubServer::start().await;
        let lines = warnings(&server, "slow", None).await;
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert!(lines[0].starts_with("the API server is too slow to hold egress IPs by: "), "{lines:?}");
        assert!(lines[0].ends_with(" limit_ms=80"), "{lines:?}");
        assert_eq!(warnings(&server, "there", None).await, [""; 0]);
        let confirmed = Instant::now() + Duration::from_millis(100);
        assert_eq!(warnings(&server, "slow", Some(confirmed)).await, [""; 0], "probes renew the lease");
    }
}
