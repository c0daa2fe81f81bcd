//! The loop around [`Election`]: read the Lease, decide, write.

use std::time::{Duration, Instant};

use kube::Client;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::election::{Election, Step, Timing, identity, is_identity};
use crate::kube::lease::{LEASE_NAME, LeaderLease};
use crate::kube::outage::Outages;

/// Until when this agent leads, if nothing else happens. Whoever acts as the leader asks right before each write.
#[derive(Clone, Debug)]
pub struct Leadership(watch::Receiver<Option<Instant>>);

impl Leadership {
    pub fn leads(&self) -> bool {
        self.0.borrow().is_some_and(|until| Instant::now() < until)
    }

    /// Waits for the next renewal or loss. False when there will be none.
    pub async fn changed(&mut self) -> bool {
        self.0.changed().await.is_ok()
    }
}

/// A channel for [`campaign`].
pub fn leadership() -> (watch::Sender<Option<Instant>>, Leadership) {
    let (sender, receiver) = watch::channel(None);
    (sender, Leadership(receiver))
}

/// Stands for leader until told to stop, and lets go then.
pub async fn campaign(
    client: Client,
    (namespace, identity): (&str, String),
    published: watch::Sender<Option<Instant>>,
    outages: &Outages,
    stop: CancellationToken,
) {
    let mut lease = LeaderLease::new(client, namespace);
    let mut election = Election::new(identity, Timing::default());
    let mut holder = String::new();
    loop {
        let led = published.borrow().is_some();
        let patience = election.timing().renew_deadline / 2;
        let outcome = tokio::time::timeout(patience, attempt(&mut lease, &mut election)).await;
        match outcome {
            Ok(Ok(seen)) => {
                outages.works("the Lease");
                if seen != holder {
                    match is_identity(&seen) || seen.is_empty() {
                        true => info!(leader = seen, "there is a new leader"),
                        false => warn!(
                            holder = seen,
                            "the Lease {namespace}/{LEASE_NAME} is held by somebody who is no egress-agent: while it is \
                             renewed nobody assigns egress IPs; find who writes it"
                        ),
                    }
                    holder = seen;
                }
            }
            Ok(Err(error)) => outages.failed("the Lease", &error),
            Err(_) => outages.unanswered("the Lease", "a request took too long"),
        }
        let until = election.leads_until().filter(|until| Instant::now() < *until);
        if led && until.is_none() {
            warn!("this agent does not lead any more");
        }
        published.send_replace(until);
        tokio::select! {
            () = stop.cancelled() => break,
            () = tokio::time::sleep(spread(election.timing().retry, election.identity())) => {}
        }
    }
    let led = published.send_replace(None).is_some();
    if led {
        let released = tokio::time::timeout(election.timing().renew_deadline, lease.release()).await;
        info!(released = matches!(released, Ok(Ok(()))), "stopped leading");
    }
}

/// One round; returns who holds the Lease.
async fn attempt(lease: &mut LeaderLease, election: &mut Election) -> Result<String, kube::Error> {
    let read = lease.read().await?;
    let holder = read.as_ref().map(|record| record.holder.clone()).unwrap_or_default();
    let asked = Instant::now();
    let step = election.step(read, asked);
    if step == Step::Wait {
        return Ok(holder);
    }
    match lease.write(&step, election.identity(), election.timing()).await? {
        Some(record) => {
            election.written(record, asked);
            Ok(election.identity().to_owned())
        }
        // Somebody else was faster: whatever they wrote is read in the next round.
        None => Ok(holder),
    }
}

/// Names this process, not only its node: a restarted agent is another candidate.
pub fn own_identity(node_name: &str) -> String {
    let started = std::time::SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_nanos());
    identity(node_name, std::process::id(), started)
}

/// The interval, up to a fifth longer by the name: agents that started together need not ask together.
fn spread(interval: Duration, identity: &str) -> Duration {
    let hash = identity.bytes().fold(0_u32, |hash, byte| hash.wrapping_mul(31).wrapping_add(byte.into()));
    interval + interval / 5 * (hash % 100) / 100
}
