//! Detects an API server with older data than before, after a restore of etcd from a backup.
//!
//! A watch that is resumed at a version from before the restore gets no events until the server's versions have caught up. So an
//! agent reads the leader's Lease now and then, which is renewed several times a second, and compares versions. A smaller
//! version makes all watches list again (`crate::api_outage`). Controllers do the same with each renewal.
//!
//! The same request detects the end of an outage for tasks that retry rarely.

use std::time::Duration;

use kube::Client;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::api_outage::ApiOutages;
use crate::backoff::random_delay;
use crate::leader_election::lease::LeaderLease;

const WHAT: &str = "the Lease";
/// Interval of the reads: seventeen a second with a thousand agents.
const INTERVAL: Duration = Duration::from_secs(60);
/// Pause before a read after any request has failed.
const AFTER_FAILURE: Duration = Duration::from_secs(1);
/// Timeout of one read.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Runs until stopped.
pub async fn watch(client: Client, namespace: &str, outages: &ApiOutages, stop: CancellationToken) {
    let mut lease = LeaderLease::new(client, namespace);
    let mut failures = outages.failures();
    loop {
        failures.mark_unchanged();
        let is_answered = outages.answer(WHAT, TIMEOUT, lease.read()).await.is_some();
        if let Some((latest, before)) = lease.take_rollback() {
            outages.rolled_back(latest, before);
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = sleep(INTERVAL + random_delay() * 10) => {}
            () = ApiOutages::until_check_due(&mut failures, is_answered, AFTER_FAILURE + random_delay() / 5) => {}
        }
    }
}
