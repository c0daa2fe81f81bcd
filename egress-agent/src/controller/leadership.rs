//! The loop around [`Election`]: read the Lease, decide, write.

use std::time::{Duration, Instant};

use kube::Client;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::election::{Election, Record, Step, Timing, identity, is_identity};
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

/// Whether this agent is to keep in touch with all others. That begins with leading, and does not end with the Lease but
/// when another leads.
#[derive(Clone, Debug)]
pub struct Duty(watch::Receiver<Option<u64>>, Leadership);

impl Duty {
    /// Of the leadership that it comes from: greater for each that takes over. `None` where it is not this agent's duty.
    pub fn term(&self) -> Option<u64> {
        *self.0.borrow()
    }

    /// Whether the Lease says so at this moment: then there is no other leader, whatever anybody has heard.
    pub fn leads(&self) -> bool {
        self.1.leads()
    }

    /// Waits until it may be another. False when it will not.
    pub async fn changed(&mut self) -> bool {
        self.0.changed().await.is_ok()
    }
}

/// What [`campaign`] publishes.
pub struct Published {
    until: watch::Sender<Option<Instant>>,
    term: watch::Sender<Option<u64>>,
}

/// A channel for [`campaign`].
pub fn leadership() -> (Published, Leadership, Duty) {
    let ((until, leads), (term, duty)) = (watch::channel(None), watch::channel(None));
    let leads = Leadership(leads);
    (Published { until, term }, leads.clone(), Duty(duty, leads))
}

impl Published {
    /// Of the duty.
    #[cfg(test)]
    pub(super) fn set_term(&self, term: Option<u64>) {
        self.term.send_replace(term);
    }

    /// Of the Lease.
    #[cfg(test)]
    pub(super) fn set_leads_until(&self, until: Option<Instant>) {
        self.until.send_replace(until);
    }

    /// Who holds the Lease, as it was just read or written.
    fn held(&self, record: &Record, identity: &str) {
        let term = match record.holder.as_str() {
            holder if holder == identity => u64::try_from(record.transitions).ok().or(Some(0)),
            // Whoever has let go has no follower yet, and a stranger asks nobody.
            holder if holder.is_empty() || !is_identity(holder) => return,
            _ => None,
        };
        self.term.send_if_modified(|known| {
            // A Lease that is made anew counts from zero, its holder does not.
            let term = term.map(|term| known.map_or(term, |known| known.max(term)));
            std::mem::replace(known, term) != term
        });
    }
}

/// Stands for leader until told to stop, and lets go then.
pub async fn campaign(
    client: Client,
    (namespace, identity): (&str, String),
    published: Published,
    outages: &Outages,
    stop: CancellationToken,
) {
    let mut lease = LeaderLease::new(client, namespace);
    let mut election = Election::new(identity, Timing::default());
    let mut holder = String::new();
    loop {
        let led = published.until.borrow().is_some();
        let patience = election.timing().renew_deadline / 2;
        let outcome = tokio::time::timeout(patience, attempt(&mut lease, &mut election)).await;
        match outcome {
            Ok(Ok(record)) => {
                outages.works("the Lease");
                published.held(&record, election.identity());
                let seen = record.holder;
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
        published.until.send_replace(until);
        tokio::select! {
            () = stop.cancelled() => break,
            () = tokio::time::sleep(spread(election.timing().retry, election.identity())) => {}
        }
    }
    let led = published.until.send_replace(None).is_some();
    if led {
        let released = tokio::time::timeout(election.timing().renew_deadline, lease.release()).await;
        info!(released = matches!(released, Ok(Ok(()))), "stopped leading");
    }
}

/// One round; returns what the Lease says.
async fn attempt(lease: &mut LeaderLease, election: &mut Election) -> Result<Record, kube::Error> {
    let read = lease.read().await?;
    let found = read.clone().unwrap_or_default();
    let asked = Instant::now();
    let step = election.step(read, asked);
    if step == Step::Wait {
        return Ok(found);
    }
    match lease.write(&step, election.identity(), election.timing()).await? {
        Some(record) => {
            election.written(record.clone(), asked);
            Ok(record)
        }
        // Somebody else was faster: whatever they wrote is read in the next round.
        None => Ok(found),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_duty_ends_when_another_leads_and_not_before() {
        let (published, _leads, duty) = leadership();
        let held = |holder: &str, transitions| {
            published.held(&Record { holder: holder.into(), transitions, ..Record::default() }, "me");
            duty.term()
        };
        assert_eq!(held("node2_77_1f", 4), None);
        assert_eq!(held("me", 5), Some(5));
        assert_eq!(held("", 5), Some(5), "nobody leads");
        assert_eq!(held("me", 0), Some(5), "the Lease was deleted");
        assert_eq!(held("somebody", 6), Some(5), "no agent has that name");
        assert_eq!(held("node2_77_1f", 6), None);
    }
}
