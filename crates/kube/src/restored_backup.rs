//! Whether the API server knows less than it did: after a restore of etcd from a backup.
//!
//! A watch that is resumed at a version of before the restore hears nothing until as much has happened again. So an agent
//! reads the leader's Lease now and then, which is renewed several times a second, and compares versions; a smaller one
//! makes all watches list again (`crate::api_outage`). The controllers do the same with each renewal.
//!
//! The same request tells whether the server answers at all, for all that have failed and look seldom.

use std::time::Duration;

use kube::Client;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::api_outage::ApiOutages;
use crate::backoff::spread;
use crate::leader_election::lease::LeaderLease;

const WHAT: &str = "the Lease";
/// Between two readings: of a thousand agents there are seventeen a second.
const LOOK: Duration = Duration::from_secs(60);
/// The same after a request of any kind was not answered.
const DOUBT: Duration = Duration::from_secs(1);
/// How long one reading may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// Looks until told to stop.
pub async fn watch(client: Client, namespace: &str, outages: &ApiOutages, stop: CancellationToken) {
    let mut lease = LeaderLease::new(client, namespace);
    let mut failures = outages.failures();
    loop {
        failures.mark_unchanged();
        let is_answered = match timeout(PATIENCE, lease.read()).await {
            Ok(Ok(_)) => {
                outages.works(WHAT);
                true
            }
            Ok(Err(error)) => {
                outages.failed(WHAT, &error);
                false
            }
            Err(_) => {
                outages.unanswered(WHAT, "a request took too long");
                false
            }
        };
        if let Some((latest, before)) = lease.went_back() {
            outages.went_back(latest, before);
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = sleep(LOOK + spread() * 10) => {}
            () = ApiOutages::doubt(&mut failures, is_answered, DOUBT + spread() / 5) => {}
        }
    }
}
