//! The loop around [`Election`]: read the Lease, decide, write.

pub mod gaps;
pub mod lease;

use std::time::{Duration, Instant};

use kube::Client;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::api_outage::ApiOutages;
use crate::leader_election::gaps::Gaps;
use crate::leader_election::lease::{LEASE_NAME, LeaderLease};
use egress_core::leader_election::{
    Election, ElectionRecord, ElectionStep, FormerLeader, LeaderTerm, SilentHolder, Timing, identity, is_identity,
};
use egress_supervise::Heartbeat;

/// How long an attempt at the Lease that has shown no leader counts: until after the next attempt.
const UNKNOWN_LEADER_FOR: Duration = Duration::from_millis(2500);

/// Since and until when this controller leads. The reconciler checks it right before each write.
#[derive(Clone, Debug)]
pub struct Leadership(watch::Receiver<Option<LeaderTerm>>);

impl Leadership {
    pub fn leads(&self) -> bool {
        self.since().is_some()
    }

    /// Since when this controller leads without a gap, if it leads now.
    pub fn since(&self) -> Option<Instant> {
        self.0.borrow().as_ref().filter(|term| Instant::now() < term.until).map(|term| term.since)
    }

    /// When the latest renewal was sent, if this controller leads.
    pub fn renewed(&self) -> Option<Instant> {
        self.0.borrow().as_ref().map(|term| term.renewed)
    }

    /// The leader that this controller has replaced early, if it leads.
    pub fn former(&self) -> Option<FormerLeader> {
        self.0.borrow().as_ref().and_then(|term| term.former.clone())
    }

    /// Waits for the next renewal or loss. False when there will be none.
    pub async fn changed(&mut self) -> bool {
        self.0.changed().await.is_ok()
    }
}

impl From<watch::Receiver<Option<LeaderTerm>>> for Leadership {
    fn from(term: watch::Receiver<Option<LeaderTerm>>) -> Self {
        Self(term)
    }
}

/// Whether this controller has to probe the agents. The duty begins with leading. It ends when another controller leads, and not
/// with the Lease.
#[derive(Clone, Debug)]
pub struct ProbeDuty {
    term: watch::Receiver<Option<u64>>,
    leadership: Leadership,
    /// When the latest attempt at the Lease showed no leader: the API server is away, or no controller holds the Lease.
    leader_unknown_at: watch::Receiver<Option<Instant>>,
    /// When the latest renewal was sent.
    renewed: watch::Receiver<Option<Instant>>,
}

impl ProbeDuty {
    /// The number of the term, greater with each take-over. `None` without the duty.
    pub fn term(&self) -> Option<u64> {
        *self.term.borrow()
    }

    /// Whether this controller leads now, by the Lease.
    pub fn leads(&self) -> bool {
        self.leadership.leads()
    }

    /// The leader that this controller has replaced early, if it leads.
    pub fn former(&self) -> Option<FormerLeader> {
        self.leadership.former()
    }

    /// Whether this controller leads and no other can have taken over yet, not even early. Then there is no other leader, whatever
    /// agents report.
    pub fn leads_alone(&self) -> bool {
        self.leads() && self.has_renewed_within(Timing::default().stale_renewal)
    }

    /// Whether answers of agents may be confirmed, by which they hold addresses. A former leader confirms only while its Lease
    /// lasts, or after a recent failed attempt to learn who leads. Otherwise another may lead already, and this controller has
    /// only not run or not looked. A controller that takes over early accounts for this.
    pub fn may_confirm(&self) -> bool {
        let is_lasting = || self.has_renewed_within(Timing::default().lease_duration);
        self.leads()
            || is_lasting()
            || self.leader_unknown_at.borrow().is_some_and(|at| at.elapsed() < UNKNOWN_LEADER_FOR)
    }

    fn has_renewed_within(&self, time: Duration) -> bool {
        self.renewed.borrow().is_some_and(|renewed| Instant::now() < renewed + time)
    }

    /// Waits for a change of the term. False when there will be none.
    pub async fn changed(&mut self) -> bool {
        self.term.changed().await.is_ok()
    }
}

/// What [`campaign`] publishes.
pub struct ElectionOutputs {
    leader_term: watch::Sender<Option<LeaderTerm>>,
    term: watch::Sender<Option<u64>>,
    leader_unknown_at: watch::Sender<Option<Instant>>,
    renewed: watch::Sender<Option<Instant>>,
}

/// Inputs of the campaign, and where it publishes which other controller holds the Lease.
pub struct ElectionInputs {
    pub holder: watch::Sender<Option<String>>,
    /// Set while the node of that holder does not answer.
    pub silent_holder: watch::Receiver<Option<SilentHolder>>,
    /// This controller leads, probes several other nodes, and none of them answers.
    pub isolated: watch::Receiver<bool>,
}

/// A channel for [`campaign`].
pub fn leadership() -> (ElectionOutputs, Leadership, ProbeDuty) {
    let ((leader_term, leads), (term, duty)) = (watch::channel(None), watch::channel(None));
    let ((unknown, is_unknown), leadership) = (watch::channel(None), Leadership(leads));
    let (renewed, is_renewed) = watch::channel(None);
    let duty =
        ProbeDuty { term: duty, leadership: leadership.clone(), leader_unknown_at: is_unknown, renewed: is_renewed };
    (ElectionOutputs { leader_term, term, leader_unknown_at: unknown, renewed }, leadership, duty)
}

impl ElectionOutputs {
    /// Sets the term of the duty.
    #[cfg(any(test, feature = "testing"))]
    pub fn set_term(&self, term: Option<u64>) {
        self.term.send_replace(term);
    }

    /// Sets the end of the leadership.
    #[cfg(any(test, feature = "testing"))]
    pub fn set_leads_until(&self, until: Option<Instant>) {
        let now = Instant::now();
        self.leader_term.send_replace(until.map(|until| LeaderTerm { since: now, renewed: now, until, former: None }));
    }

    /// Sets the time of the latest renewal.
    #[cfg(any(test, feature = "testing"))]
    pub fn set_renewed(&self, at: Option<Instant>) {
        self.renewed.send_replace(at);
        self.leader_term.send_modify(|term| term.iter_mut().zip(at).for_each(|(term, at)| term.renewed = at));
    }

    /// Sets the time of an attempt that showed no leader.
    #[cfg(any(test, feature = "testing"))]
    pub fn set_leader_unknown_at(&self, at: Option<Instant>) {
        self.leader_unknown_at.send_replace(at);
    }

    /// Whether this controller leads and no former leader may still lead. A released Lease is taken at once, by a controller that
    /// knows of no former leader.
    fn leads_without_former(&self, now: Instant) -> bool {
        let is_over = |term: &LeaderTerm| term.former.as_ref().is_none_or(|former| former.until <= now);
        self.leader_term.borrow().as_ref().is_some_and(is_over)
    }

    /// This controller no longer leads, and another may take the Lease from now on.
    fn publish_end(&self) {
        self.renewed.send_replace(None);
        self.leader_term.send_replace(None);
    }

    /// Publishes the holder of the Lease, as it was just read or written.
    fn publish_holder(&self, record: &ElectionRecord, identity: &str) {
        let term = match record.holder.as_str() {
            holder if holder == identity => u64::try_from(record.transitions).ok().or(Some(0)),
            // A released Lease has no new holder yet, and a foreign program probes no agents.
            holder if holder.is_empty() || !is_identity(holder) => return,
            _ => None,
        };
        self.term.send_if_modified(|known| {
            // A Lease that is created again counts from zero; the term must not decrease.
            let term = term.map(|term| known.map_or(term, |known| known.max(term)));
            std::mem::replace(known, term) != term
        });
    }
}

impl ElectionInputs {
    /// Publishes another holder of the Lease, as it was just read or written.
    fn note(&self, record: &ElectionRecord, identity: &str) {
        let holder = Some(&record.holder).filter(|holder| *holder != identity && is_identity(holder));
        self.holder.send_if_modified(|known| {
            let is_new = known.as_ref() != holder;
            *known = holder.cloned();
            is_new
        });
    }
}

/// A failed attempt is repeated after this time at most, and so is one after a failure of another task.
const RETRY_AFTER_FAILURE: Duration = Duration::from_secs(1);

/// How often an isolated leader releases the Lease. If no other controller has taken it, this one has to decide; if all controllers
/// are isolated, they must not alternate endlessly.
const STEP_DOWN_PAUSE: Duration = Duration::from_secs(60);
const STEP_DOWN_PAUSE_AFTER_ANOTHER: Duration = Duration::from_secs(10);

/// Takes part in the election until stopped, and releases the Lease then.
pub async fn campaign(
    client: Client,
    (namespace, identity): (&str, String),
    (outputs, mut inputs): (ElectionOutputs, ElectionInputs),
    outages: &ApiOutages,
    heartbeat: Heartbeat,
    stop: CancellationToken,
) {
    let mut lease = LeaderLease::new(client, namespace);
    let mut election = Election::new(identity, Timing::default());
    let (mut holder, mut gaps) = (String::new(), Gaps::default());
    let mut failures = outages.failures();
    // When the Lease was last released because of isolation, and whether another has held it since.
    let (mut stepped_down, mut another_led) = (None::<Instant>, false);
    loop {
        failures.mark_unchanged();
        heartbeat.note();
        let led = outputs.leader_term.borrow().is_some();
        let started = Instant::now();
        let silent_holder = inputs.silent_holder.borrow_and_update().clone();
        let outcome = attempt(&mut lease, &mut election, silent_holder.as_ref()).await;
        if let Some((latest, before)) = lease.take_rollback() {
            outages.rolled_back(latest, before);
        }
        let is_answered = outcome.is_ok();
        let record_read = outcome.as_ref().ok().cloned();
        // A Lease that this controller has just released will be taken by another.
        let is_known =
            matches!(&outcome, Ok(record) if is_identity(&record.holder)) || election.has_stepped_down(started);
        match outcome {
            Ok(record) => {
                outages.answered("the Lease");
                inputs.note(&record, election.identity());
                another_led |= is_identity(&record.holder) && record.holder != election.identity();
                if record.holder != holder {
                    log_holder(&record.holder, namespace);
                    holder = record.holder;
                }
            }
            Err(LeaseAttemptError::Refused(error)) => outages.failed("the Lease", &error),
            Err(LeaseAttemptError::Timeout) => outages.unanswered("the Lease", "a request took too long"),
        }
        let now = Instant::now();
        let leader_term = election.term(now);
        if led && leader_term.is_none() {
            warn!("this controller does not lead any more");
        }
        if let Some(former) = leader_term.as_ref().filter(|_| !led).and_then(|term| term.former.as_ref()) {
            warn!(node = former.node, "no address of the former leader's node answers: its Lease was not waited for");
        }
        if let Some(gaps) = gaps.note(leader_term.as_ref().map(|term| term.since), election.holds(), now) {
            let deadline_ms = election.timing().renew_deadline.as_millis();
            warn!(
                gaps,
                deadline_ms,
                "the API server is too slow to lead by: this controller has led with gaps for a minute, and what it decides takes long"
            );
        }
        outputs.leader_unknown_at.send_replace((!is_known).then_some(now));
        outputs.leader_term.send_replace(leader_term);
        outputs.renewed.send_replace(election.renewed());
        // After the others: the prober then reads which leader was replaced.
        record_read.into_iter().for_each(|record| outputs.publish_holder(&record, election.identity()));
        let pause = if another_led { STEP_DOWN_PAUSE_AFTER_ANOTHER } else { STEP_DOWN_PAUSE };
        let may_step_down = stepped_down.is_none_or(|at| now >= at + pause);
        if *inputs.isolated.borrow_and_update() && may_step_down && outputs.leads_without_former(now) {
            warn!("no other egress node answers this controller: the Lease is released, so that another can lead");
            (stepped_down, another_led) = (Some(now), false);
            outputs.publish_end();
            // Lets writes in flight finish, as between any two leaders.
            tokio::time::sleep(election.timing().leaderless_gap()).await;
            release(&mut lease, &election).await;
            election.step_down(Instant::now());
            continue;
        }
        // A holder counts from the beginning of a renewal, as the Lease does, so that a slow answer leaves no gap.
        let latest = if election.holds() { started } else { now };
        tokio::select! {
            () = stop.cancelled() => break,
            () = until_next_attempt(&election, latest) => {}
            Ok(()) = inputs.silent_holder.changed() => {}
            Ok(()) = inputs.isolated.changed() => {}
            // This request shows all tasks whether the server answers again (`api_outage`).
            () = ApiOutages::until_check_due(&mut failures, is_answered, with_jitter(RETRY_AFTER_FAILURE, election.identity())) => {}
        }
    }
    let may_release = outputs.leads_without_former(Instant::now());
    outputs.publish_end();
    if may_release {
        release(&mut lease, &election).await;
    }
}

async fn release(lease: &mut LeaderLease, election: &Election) {
    let released = tokio::time::timeout(election.timing().renew_deadline, lease.release()).await;
    info!(released = matches!(released, Ok(Ok(()))), "stopped leading");
}

/// Waits until the next attempt is due.
async fn until_next_attempt(election: &Election, latest: Instant) {
    let pause = with_jitter(election.next_attempt_at(latest).saturating_duration_since(latest), election.identity());
    tokio::time::sleep_until((latest + pause).into()).await;
}

/// Logs each new holder of the Lease.
fn log_holder(holder: &str, namespace: &str) {
    if is_identity(holder) || holder.is_empty() {
        info!(leader = holder, "there is a new leader");
    } else {
        warn!(
            holder,
            "the Lease {namespace}/{LEASE_NAME} is held by another program: while it is renewed no controller \
             assigns egress IPs; find what writes it"
        );
    }
}

/// Why an attempt at the Lease failed.
enum LeaseAttemptError {
    Refused(kube::Error),
    Timeout,
}

/// Each request has its own timeout. With one for all, a slow server would let the renewal succeed and cut off the read after it,
/// again and again, and no controller would lead.
async fn with_timeout<T>(
    patience: Duration,
    request: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, LeaseAttemptError> {
    tokio::time::timeout(patience, request)
        .await
        .map_err(|_| LeaseAttemptError::Timeout)?
        .map_err(LeaseAttemptError::Refused)
}

/// One attempt: renew, or read and take over. Returns the content of the Lease.
async fn attempt(
    lease: &mut LeaderLease,
    election: &mut Election,
    silent_holder: Option<&SilentHolder>,
) -> Result<ElectionRecord, LeaseAttemptError> {
    let timing = election.timing();
    // A read that takes longer is repeated.
    let patience = timing.renew_deadline - timing.retry_period;
    if election.holds() {
        let sent = Instant::now();
        // A renewal that is answered after the renew deadline costs a gap, but keeps the Lease. One that is given up before the
        // Lease ends costs the Lease.
        let renewal = timing.lease_duration - timing.retry_period;
        if let Some(record) =
            with_timeout(renewal, lease.write(&ElectionStep::Renew, election.identity(), timing)).await?
        {
            election.note_written(record.clone(), sent, Instant::now());
            return Ok(record);
        }
        // Another program wrote it, or an answer to this controller was lost.
    }
    let read = with_timeout(patience, lease.read()).await?;
    let found = read.clone().unwrap_or_default();
    let sent = Instant::now();
    let step = election.step(read, silent_holder, sent);
    if step == ElectionStep::Wait {
        return Ok(found);
    }
    match with_timeout(patience, lease.write(&step, election.identity(), timing)).await? {
        Some(record) => {
            election.note_written(record.clone(), sent, Instant::now());
            Ok(record)
        }
        // Another controller was faster. The next attempt reads what it wrote.
        None => Ok(found),
    }
}

/// Identifies this process, not only its node: a restarted controller is another candidate.
pub fn own_identity(node_name: &str) -> String {
    let started = std::time::SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_nanos());
    identity(node_name, std::process::id(), started)
}

/// The interval, up to a fifth longer by a hash of the identity, so that controllers do not send requests at the same
/// moment.
fn with_jitter(interval: Duration, identity: &str) -> Duration {
    let hash = identity.bytes().fold(0_u32, |hash, byte| hash.wrapping_mul(31).wrapping_add(byte.into()));
    interval + interval / 5 * (hash % 100) / 100
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_failed_attempt_and_a_failure_of_others_bring_the_next_attempt_forward() {
        let outages = ApiOutages::new("here");
        let mut failures = outages.failures();
        let pause = Duration::from_millis(20);
        let soon = Duration::from_millis(500);
        assert!(tokio::time::timeout(soon, ApiOutages::until_check_due(&mut failures, false, pause)).await.is_ok());
        assert!(
            tokio::time::timeout(soon, ApiOutages::until_check_due(&mut failures, true, pause)).await.is_err(),
            "no failure"
        );
        outages.unanswered("nodes", "refused");
        assert!(tokio::time::timeout(soon, ApiOutages::until_check_due(&mut failures, true, pause)).await.is_ok());
        failures.mark_unchanged();
        assert!(
            tokio::time::timeout(soon, ApiOutages::until_check_due(&mut failures, true, pause)).await.is_err(),
            "one attempt for each failure"
        );
    }

    #[test]
    fn the_duty_ends_when_another_leads_and_not_before() {
        let (published, _leads, duty) = leadership();
        let publish = |holder: &str, transitions| {
            published.publish_holder(
                &ElectionRecord { holder: holder.into(), transitions, ..ElectionRecord::default() },
                "me",
            );
            duty.term()
        };
        assert_eq!(publish("node2_77_1f", 4), None);
        assert_eq!(publish("me", 5), Some(5));
        assert_eq!(publish("", 5), Some(5), "no controller leads");
        assert_eq!(publish("me", 0), Some(5), "the Lease was deleted");
        assert_eq!(publish("foreign", 6), Some(5), "no controller has that name");
        assert_eq!(publish("node2_77_1f", 6), None);
    }

    #[test]
    fn a_former_leader_confirms_nothing_unless_it_cannot_know_who_leads() {
        let (published, leads, duty) = leadership();
        let now = Instant::now();
        assert!(!duty.may_confirm());
        published.set_leads_until(Some(now + Duration::from_secs(60)));
        assert!(duty.may_confirm() && leads.leads());
        // It has not run, or not looked, until after the end of its leadership.
        published.set_leads_until(Some(now));
        assert!(!duty.may_confirm() && leads.since().is_none());
        published.set_leader_unknown_at(Some(Instant::now()));
        assert!(duty.may_confirm());
        published.set_leader_unknown_at(now.checked_sub(UNKNOWN_LEADER_FOR));
        assert!(!duty.may_confirm(), "long ago");
        // A renewal was answered late: it still holds the Lease.
        published.set_renewed(Some(Instant::now()));
        assert!(duty.may_confirm() && !duty.leads());
        published.set_renewed(now.checked_sub(Timing::default().lease_duration));
        assert!(!duty.may_confirm(), "another may lead");
    }

    #[test]
    fn a_leader_is_the_only_one_until_another_may_have_taken_over_early() {
        let (published, _leads, duty) = leadership();
        let now = Instant::now();
        published.set_leads_until(Some(now + Duration::from_secs(60)));
        published.set_renewed(Some(now));
        assert!(duty.leads_alone());
        published.set_renewed(now.checked_sub(Timing::default().stale_renewal));
        assert!(!duty.leads_alone() && duty.leads());
    }
}
