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
    Election, ElectionStep, FormerLeader, LeaderTerm, Record, SilentHolder, Timing, identity, is_identity,
};
use egress_supervise::Heartbeat;

/// For so long an attempt at the Lease that has shown no leader counts: until behind the next.
const UNKNOWN: Duration = Duration::from_millis(2500);

/// Since and until when this controller leads, if nothing else happens. The leader asks right before each write.
#[derive(Clone, Debug)]
pub struct Leadership(watch::Receiver<Option<LeaderTerm>>);

impl Leadership {
    pub fn leads(&self) -> bool {
        self.since().is_some()
    }

    /// Since when this controller leads without a gap, where it does at this moment.
    pub fn since(&self) -> Option<Instant> {
        self.0.borrow().as_ref().filter(|reign| Instant::now() < reign.until).map(|reign| reign.since)
    }

    /// When the latest renewal was asked for, where this controller leads.
    pub fn renewed(&self) -> Option<Instant> {
        self.0.borrow().as_ref().map(|reign| reign.renewed)
    }

    /// The leader that this controller has replaced early, where it leads.
    pub fn former(&self) -> Option<FormerLeader> {
        self.0.borrow().as_ref().and_then(|reign| reign.former.clone())
    }

    /// Waits for the next renewal or loss. False when there will be none.
    pub async fn changed(&mut self) -> bool {
        self.0.changed().await.is_ok()
    }
}

/// Whether this controller is to keep in touch with all others. That begins with leading, and does not end with the Lease but
/// when another leads.
#[derive(Clone, Debug)]
pub struct ProbeDuty {
    term: watch::Receiver<Option<u64>>,
    leadership: Leadership,
    /// When the latest attempt at the Lease showed no leader, if it did: the API server is away, or no controller holds it.
    unknown: watch::Receiver<Option<Instant>>,
    /// When the latest renewal was asked for.
    renewed: watch::Receiver<Option<Instant>>,
}

impl ProbeDuty {
    /// Of the leadership that it comes from: greater for each that takes over. `None` where it is not this controller's duty.
    pub fn term(&self) -> Option<u64> {
        *self.term.borrow()
    }

    /// Whether the Lease says so at this moment.
    pub fn leads(&self) -> bool {
        self.leadership.leads()
    }

    /// The leader that this controller has replaced early, where it leads.
    pub fn former(&self) -> Option<FormerLeader> {
        self.leadership.former()
    }

    /// Whether it says so and nobody can have taken it over yet, not even early: then there is no other leader, whatever anybody
    /// has heard.
    pub fn leads_alone(&self) -> bool {
        self.leads() && self.has_renewed_within(Timing::default().stale)
    }

    /// Whether agents may be told that they were heard. They hold addresses by that, so who does not lead any more tells them
    /// only while its Lease lasts, or while it has just tried in vain to know who leads: else another may lead by now, and this
    /// controller has only not run, or not looked yet. Who takes the Lease over before it has run out counts with that.
    pub fn vouches(&self) -> bool {
        let is_lasting = || self.has_renewed_within(Timing::default().duration);
        self.leads() || is_lasting() || self.unknown.borrow().is_some_and(|at| at.elapsed() < UNKNOWN)
    }

    fn has_renewed_within(&self, time: Duration) -> bool {
        self.renewed.borrow().is_some_and(|renewed| Instant::now() < renewed + time)
    }

    /// Waits until it may be another. False when it will not.
    pub async fn changed(&mut self) -> bool {
        self.term.changed().await.is_ok()
    }
}

/// What [`campaign`] publishes.
pub struct Published {
    reign: watch::Sender<Option<LeaderTerm>>,
    term: watch::Sender<Option<u64>>,
    unknown: watch::Sender<Option<Instant>>,
    renewed: watch::Sender<Option<Instant>>,
}

/// What the campaign is told, and where it says who else holds the Lease.
pub struct ElectionInputs {
    pub holder: watch::Sender<Option<String>>,
    /// The node of that one does not answer.
    pub silence: watch::Receiver<Option<SilentHolder>>,
    /// This controller leads, asks several other nodes, and hears none of them.
    pub isolated: watch::Receiver<bool>,
}

/// A channel for [`campaign`].
pub fn leadership() -> (Published, Leadership, ProbeDuty) {
    let ((reign, leads), (term, duty)) = (watch::channel(None), watch::channel(None));
    let ((unknown, is_unknown), leadership) = (watch::channel(None), Leadership(leads));
    let (renewed, is_renewed) = watch::channel(None);
    let duty = ProbeDuty { term: duty, leadership: leadership.clone(), unknown: is_unknown, renewed: is_renewed };
    (Published { reign, term, unknown, renewed }, leadership, duty)
}

impl Published {
    /// Of the duty.
    #[cfg(any(test, feature = "testing"))]
    pub fn set_term(&self, term: Option<u64>) {
        self.term.send_replace(term);
    }

    /// Of the Lease.
    #[cfg(any(test, feature = "testing"))]
    pub fn set_leads_until(&self, until: Option<Instant>) {
        let now = Instant::now();
        self.reign.send_replace(until.map(|until| LeaderTerm { since: now, renewed: now, until, former: None }));
    }

    /// Of the latest renewal.
    #[cfg(any(test, feature = "testing"))]
    pub fn set_renewed(&self, at: Option<Instant>) {
        self.renewed.send_replace(at);
        self.reign.send_modify(|reign| reign.iter_mut().zip(at).for_each(|(reign, at)| reign.renewed = at));
    }

    /// Of an attempt at the Lease that showed no leader.
    #[cfg(any(test, feature = "testing"))]
    pub fn set_unknown(&self, at: Option<Instant>) {
        self.unknown.send_replace(at);
    }

    /// Whether this controller leads and no former leader may go on to: a free Lease is taken at once, by a controller that
    /// knows nothing of one.
    fn leads_without_former(&self, now: Instant) -> bool {
        let is_over = |reign: &LeaderTerm| reign.former.as_ref().is_none_or(|former| former.until <= now);
        self.reign.borrow().as_ref().is_some_and(is_over)
    }

    /// It leads no more, and the Lease may be another's from now on.
    fn ends(&self) {
        self.renewed.send_replace(None);
        self.reign.send_replace(None);
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

impl ElectionInputs {
    /// Who holds the Lease, as it was just read or written.
    fn note(&self, record: &Record, identity: &str) {
        let holder = Some(&record.holder).filter(|holder| *holder != identity && is_identity(holder));
        self.holder.send_if_modified(|known| {
            let is_news = known.as_ref() != holder;
            *known = holder.cloned();
            is_news
        });
    }
}

/// A look in vain is repeated after this time at most, and so is one that others' failures put in doubt.
const DOUBT: Duration = Duration::from_secs(1);

/// A leader that hears no other node releases the Lease no more often than that: where no other controller has taken it, this one
/// has to decide; where each of them hears no node, they do not take turns without end.
const ASIDE_AGAIN: Duration = Duration::from_secs(60);
const ASIDE_FOR_ANOTHER: Duration = Duration::from_secs(10);

/// Stands for leader until told to stop, and lets go then.
pub async fn campaign(
    client: Client,
    (namespace, identity): (&str, String),
    (published, mut rival): (Published, ElectionInputs),
    outages: &ApiOutages,
    heartbeat: Heartbeat,
    stop: CancellationToken,
) {
    let mut lease = LeaderLease::new(client, namespace);
    let mut election = Election::new(identity, Timing::default());
    let (mut holder, mut gaps) = (String::new(), Gaps::default());
    let mut failures = outages.failures();
    // When the Lease was released last for that, and whether another has held it since.
    let (mut stood_aside, mut another_led) = (None::<Instant>, false);
    loop {
        failures.mark_unchanged();
        heartbeat.note();
        let led = published.reign.borrow().is_some();
        let begun = Instant::now();
        let silence = rival.silence.borrow_and_update().clone();
        let outcome = attempt(&mut lease, &mut election, silence.as_ref()).await;
        if let Some((latest, before)) = lease.went_back() {
            outages.went_back(latest, before);
        }
        let is_answered = outcome.is_ok();
        let held = outcome.as_ref().ok().cloned();
        // A Lease that it has released itself will be another's.
        let is_known =
            matches!(&outcome, Ok(record) if is_identity(&record.holder)) || election.has_stepped_down(begun);
        match outcome {
            Ok(record) => {
                outages.works("the Lease");
                rival.note(&record, election.identity());
                another_led |= is_identity(&record.holder) && record.holder != election.identity();
                if record.holder != holder {
                    say(&record.holder, namespace);
                    holder = record.holder;
                }
            }
            Err(Failed::Refused(error)) => outages.failed("the Lease", &error),
            Err(Failed::Late) => outages.unanswered("the Lease", "a request took too long"),
        }
        let now = Instant::now();
        let reign = election.term(now);
        if led && reign.is_none() {
            warn!("this controller does not lead any more");
        }
        if let Some(former) = reign.as_ref().filter(|_| !led).and_then(|reign| reign.former.as_ref()) {
            warn!(node = former.node, "no address of the former leader's node answers: its Lease was not waited for");
        }
        if let Some(gaps) = gaps.note(reign.as_ref().map(|reign| reign.since), election.holds(), now) {
            let deadline_ms = election.timing().renew_deadline.as_millis();
            warn!(
                gaps,
                deadline_ms,
                "the API server is too slow to lead by: this controller has led with gaps for a minute, and what it decides takes long"
            );
        }
        published.unknown.send_replace((!is_known).then_some(now));
        published.reign.send_replace(reign);
        published.renewed.send_replace(election.renewed());
        // Behind them: who probes by it looks whom this leader has replaced.
        held.into_iter().for_each(|record| published.held(&record, election.identity()));
        let pause = if another_led { ASIDE_FOR_ANOTHER } else { ASIDE_AGAIN };
        let may_stand_aside = stood_aside.is_none_or(|at| now >= at + pause);
        if *rival.isolated.borrow_and_update() && may_stand_aside && published.leads_without_former(now) {
            warn!("no other egress node answers this controller: the Lease is released, so that another can lead");
            (stood_aside, another_led) = (Some(now), false);
            published.ends();
            // For writes that are on their way, as between any two leaders.
            tokio::time::sleep(election.timing().leaderless_gap()).await;
            release(&mut lease, &election).await;
            election.step_down(Instant::now());
            continue;
        }
        // A holder counts from the beginning of a renewal, as the Lease does: a slow answer leaves no gap.
        let latest = if election.holds() { begun } else { now };
        tokio::select! {
            () = stop.cancelled() => break,
            () = next_look(&election, latest) => {}
            Ok(()) = rival.silence.changed() => {}
            Ok(()) = rival.isolated.changed() => {}
            // Whether the server is there is found out here for all who ask it (`kube::outage`).
            () = ApiOutages::doubt(&mut failures, is_answered, spread(DOUBT, election.identity())) => {}
        }
    }
    let may_release = published.leads_without_former(Instant::now());
    published.ends();
    if may_release {
        release(&mut lease, &election).await;
    }
}

async fn release(lease: &mut LeaderLease, election: &Election) {
    let released = tokio::time::timeout(election.timing().renew_deadline, lease.release()).await;
    info!(released = matches!(released, Ok(Ok(()))), "stopped leading");
}

/// Waits for the time of the next look.
async fn next_look(election: &Election, latest: Instant) {
    let pause = spread(election.look_again(latest).saturating_duration_since(latest), election.identity());
    tokio::time::sleep_until((latest + pause).into()).await;
}

/// One line for each that holds the Lease.
fn say(holder: &str, namespace: &str) {
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

/// Why an attempt at the Lease came to nothing.
enum Failed {
    Refused(kube::Error),
    Late,
}

/// Each request has its time, not all of them together: a slow server would let a renewal through and cut off the look behind
/// it, again and again, and nobody would lead.
async fn within<T>(patience: Duration, request: impl Future<Output = Result<T, kube::Error>>) -> Result<T, Failed> {
    tokio::time::timeout(patience, request).await.map_err(|_| Failed::Late)?.map_err(Failed::Refused)
}

/// One round; returns what the Lease says.
async fn attempt(
    lease: &mut LeaderLease,
    election: &mut Election,
    silence: Option<&SilentHolder>,
) -> Result<Record, Failed> {
    let timing = election.timing();
    // A holder asks this long before the end of what it has: one answer that takes longer costs a gap, however long it is
    // waited for.
    let patience = timing.renew_deadline - timing.retry;
    if election.holds() {
        let asked = Instant::now();
        if let Some(record) = within(patience, lease.write(&ElectionStep::Renew, election.identity(), timing)).await? {
            election.written(record.clone(), asked, Instant::now());
            return Ok(record);
        }
        // Somebody else wrote it, or an answer to this controller was lost.
    }
    let read = within(patience, lease.read()).await?;
    let found = read.clone().unwrap_or_default();
    let asked = Instant::now();
    let step = election.step(read, silence, asked);
    if step == ElectionStep::Wait {
        return Ok(found);
    }
    match within(patience, lease.write(&step, election.identity(), timing)).await? {
        Some(record) => {
            election.written(record.clone(), asked, Instant::now());
            Ok(record)
        }
        // Somebody else was faster: whatever they wrote is read in the next round.
        None => Ok(found),
    }
}

/// Names this process, not only its node: a restarted controller is another candidate.
pub fn own_identity(node_name: &str) -> String {
    let started = std::time::SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_nanos());
    identity(node_name, std::process::id(), started)
}

/// The interval, up to a fifth longer by the name: controllers that started together need not ask together.
fn spread(interval: Duration, identity: &str) -> Duration {
    let hash = identity.bytes().fold(0_u32, |hash, byte| hash.wrapping_mul(31).wrapping_add(byte.into()));
    interval + interval / 5 * (hash % 100) / 100
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_look_in_vain_and_a_failure_of_others_bring_the_next_look_forward() {
        let outages = ApiOutages::new("here");
        let mut failures = outages.failures();
        let pause = Duration::from_millis(20);
        let soon = Duration::from_millis(500);
        assert!(tokio::time::timeout(soon, ApiOutages::doubt(&mut failures, false, pause)).await.is_ok());
        assert!(
            tokio::time::timeout(soon, ApiOutages::doubt(&mut failures, true, pause)).await.is_err(),
            "all is well"
        );
        outages.unanswered("nodes", "refused");
        assert!(tokio::time::timeout(soon, ApiOutages::doubt(&mut failures, true, pause)).await.is_ok());
        failures.mark_unchanged();
        assert!(
            tokio::time::timeout(soon, ApiOutages::doubt(&mut failures, true, pause)).await.is_err(),
            "one look for each"
        );
    }

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
        assert_eq!(held("somebody", 6), Some(5), "no controller has that name");
        assert_eq!(held("node2_77_1f", 6), None);
    }

    #[test]
    fn a_former_leader_vouches_for_nobody_unless_it_cannot_know_who_leads() {
        let (published, leads, duty) = leadership();
        let now = Instant::now();
        assert!(!duty.vouches());
        published.set_leads_until(Some(now + Duration::from_secs(60)));
        assert!(duty.vouches() && leads.leads());
        // It has not run, or not looked, for longer than it leads.
        published.set_leads_until(Some(now));
        assert!(!duty.vouches() && leads.since().is_none());
        published.set_unknown(Some(Instant::now()));
        assert!(duty.vouches());
        published.set_unknown(now.checked_sub(UNKNOWN));
        assert!(!duty.vouches(), "long ago");
        // A renewal was answered late: the Lease is its own still.
        published.set_renewed(Some(Instant::now()));
        assert!(duty.vouches() && !duty.leads());
        published.set_renewed(now.checked_sub(Timing::default().duration));
        assert!(!duty.vouches(), "another may lead");
    }

    #[test]
    fn a_leader_is_the_only_one_until_another_may_have_taken_over_early() {
        let (published, _leads, duty) = leadership();
        let now = Instant::now();
        published.set_leads_until(Some(now + Duration::from_secs(60)));
        published.set_renewed(Some(now));
        assert!(duty.leads_alone());
        published.set_renewed(now.checked_sub(Timing::default().stale));
        assert!(!duty.leads_alone() && duty.leads());
    }
}
