//! Leader election as in client-go, as a pure state machine.
//!
//! - A Lease names its holder and how long candidates wait. Wall clocks are never compared: a candidate records on
//!   its own monotonic clock when it *observed* a change of the record, and takes over when the record has not
//!   changed for the lease's duration.
//! - The holder counts from *before* it sent the renewal and stops leading at the renew deadline, which is shorter than
//!   the duration. So it stops before another candidate may begin, whatever the network does to its requests.
//! - If no address of the holder's node answers, a candidate takes over earlier. The holder may be alive, cut off from
//!   this candidate only, and may still confirm agents. So the candidate records it as [`FormerLeader`] with the end of
//!   its Lease; `crate::ownership::suspicion` counts with it.

use std::time::{Duration, Instant};

/// Durations. Those that are written to the Lease are whole seconds.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// How long candidates wait without seeing a renewal.
    pub lease_duration: Duration,
    /// How long the holder leads without a successful renewal.
    pub renew_deadline: Duration,
    /// Between two renewals.
    pub retry_period: Duration,
    /// Between two reads of a standby. A later observation of a renewal prolongs the wait.
    pub read_period: Duration,
    /// A node is silent when it has not answered for that long.
    pub node_silence: Duration,
    /// The holder on a silent node is replaced when its latest renewal was observed that long ago.
    pub stale_renewal: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            lease_duration: Duration::from_secs(2),
            renew_deadline: Duration::from_millis(1500),
            retry_period: Duration::from_millis(250),
            read_period: Duration::from_millis(100),
            node_silence: Duration::from_millis(500),
            stale_renewal: Duration::from_millis(600),
        }
    }
}

impl Timing {
    /// The shortest gap between two leaders, except after an early take-over.
    pub fn leaderless_gap(&self) -> Duration {
        self.lease_duration - self.renew_deadline
    }
}

/// The longest wait after a renewal, whatever duration a Lease states.
const MAX_WAIT: Duration = Duration::from_secs(60);

/// How long a leader that no other node answers leaves the Lease to others. A standby reads it ten times a second.
const STEP_DOWN_PAUSE: Duration = Duration::from_millis(500);

/// More leaders than there ever are: one per second for thirty years.
const MAX_TRANSITIONS: i32 = 1 << 30;

/// Identity of a candidate: the process, not only the node, since a restarted controller is another candidate.
pub fn identity(node_name: &str, process: u32, started_ns: u128) -> String {
    format!("{node_name}_{process}_{started_ns:x}")
}

/// Whether this is the identity of a controller.
pub fn is_identity(text: &str) -> bool {
    let mut parts = text.rsplitn(3, '_');
    let is_time = parts.next().is_some_and(|time| u128::from_str_radix(time, 16).is_ok());
    let is_process = parts.next().is_some_and(|process| process.parse::<u32>().is_ok());
    is_time && is_process && parts.next().is_some_and(|node| !node.is_empty())
}

/// The node of this identity.
pub fn node_of(identity: &str) -> Option<&str> {
    is_identity(identity).then(|| identity.rsplitn(3, '_').nth(2)).flatten()
}

/// The holder's node stopped answering at all of its addresses at this time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SilentHolder {
    pub holder: String,
    pub since: Instant,
}

/// A leader that was replaced before its Lease expired.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FormerLeader {
    pub node: String,
    /// Since when no address of its node answers.
    pub silent_since: Instant,
    /// Until when it may confirm agents: the end of its Lease.
    pub until: Instant,
}

/// The part of a Lease that the election reads and writes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ElectionRecord {
    /// Empty after a release.
    pub holder: String,
    pub duration: Duration,
    /// As text: only a change matters.
    pub renewed: String,
    pub acquired: String,
    pub transitions: i32,
}

/// What to do about the Lease now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ElectionStep {
    /// Another candidate holds it.
    Wait,
    /// There is none: create it with a number of transitions that no leader has had.
    Create { transitions: i32 },
    /// Take it over, with one more transition.
    TakeOver { transitions: i32 },
    /// Renew it.
    Renew,
}

#[derive(Debug)]
pub struct Election {
    identity: String,
    timing: Timing,
    observed: Option<(ElectionRecord, Instant)>,
    /// Start of the last request that renewed our Lease.
    renewed: Option<Instant>,
    /// Since when we lead without a gap.
    since: Option<Instant>,
    /// Since when the Lease is missing, if a controller held it at the last observation.
    missing_since: Option<Instant>,
    /// The greatest observed number of transitions.
    max_transitions: Option<i32>,
    /// The leader that the latest take-over replaced early.
    former: Option<FormerLeader>,
    /// Until then the Lease is left to other candidates.
    stepped_down_until: Option<Instant>,
}

/// One term: leading without a gap since `since`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaderTerm {
    pub since: Instant,
    /// Start of the latest renewal.
    pub renewed: Instant,
    /// When the term ends without another renewal.
    pub until: Instant,
    /// The former leader, which may not have noticed yet that it was replaced.
    pub former: Option<FormerLeader>,
}

impl Election {
    pub fn new(identity: String, timing: Timing) -> Self {
        Self {
            identity,
            timing,
            observed: None,
            renewed: None,
            since: None,
            missing_since: None,
            max_transitions: None,
            former: None,
            stepped_down_until: None,
        }
    }

    pub fn identity(&self) -> &str {
        &self.identity
    }

    pub fn timing(&self) -> Timing {
        self.timing
    }

    /// `None` while we do not lead.
    pub fn term(&self, now: Instant) -> Option<LeaderTerm> {
        let renewed = self.renewed?;
        let until = renewed + self.timing.renew_deadline;
        (now < until).then_some(LeaderTerm { since: self.since?, renewed, until, former: self.former.clone() })
    }

    /// Start of the latest renewal. Others saw it later, and wait from then on.
    pub fn renewed(&self) -> Option<Instant> {
        self.renewed
    }

    /// Whether the Lease was ours at the last observation: then it is renewed without being read first.
    pub fn holds(&self) -> bool {
        self.renewed.is_some()
    }

    /// When to read the Lease next, after a read at `now`.
    pub fn next_attempt_at(&self, now: Instant) -> Instant {
        let Timing { retry_period: retry, read_period: next_read, .. } = self.timing;
        if self.holds() {
            return now + retry;
        }
        // A standby takes over as soon as it may.
        let expiry = self.observed.as_ref().map(|(record, since)| *since + self.expiry_wait(record));
        expiry.filter(|expiry| *expiry > now).map_or(now + next_read, |expiry| expiry.min(now + next_read))
    }

    /// Foreign writers may write any duration. A shorter one than ours is not valid among controllers.
    fn expiry_wait(&self, record: &ElectionRecord) -> Duration {
        record.duration.clamp(self.timing.lease_duration, MAX_WAIT)
    }

    /// Decides on the Lease as it was just read, and on what is known of its holder's node.
    pub fn step(
        &mut self,
        lease: Option<ElectionRecord>,
        silent_holder: Option<&SilentHolder>,
        now: Instant,
    ) -> ElectionStep {
        let Some(lease) = lease else {
            self.renewed = None;
            return self.step_without_lease(now);
        };
        self.missing_since = None;
        self.note_transitions(lease.transitions);
        let (mine, free) = (lease.holder == self.identity, lease.holder.is_empty());
        if !mine {
            self.renewed = None;
        }
        let duration = self.expiry_wait(&lease);
        let silent = silent_holder.filter(|silent_holder| {
            silent_holder.holder == lease.holder && now >= silent_holder.since + self.timing.node_silence
        });
        if self.observed.as_ref().is_none_or(|(record, _)| *record != lease) {
            self.observed = Some((lease, now));
        }
        let since = self.observed.as_ref().map_or(now, |(_, since)| *since);
        if (mine || free) && self.has_stepped_down(now) {
            return ElectionStep::Wait;
        }
        if mine {
            return ElectionStep::Renew;
        }
        self.former = None;
        if !free && now < since + duration {
            let silent = silent.filter(|_| now >= since + self.timing.stale_renewal);
            let Some((silent, node)) = silent.and_then(|silent| Some((silent, node_of(&silent.holder)?))) else {
                return ElectionStep::Wait;
            };
            let (node, silent_since) = (node.to_owned(), silent.since);
            self.former = Some(FormerLeader { node, silent_since, until: since + duration });
        }
        ElectionStep::TakeOver { transitions: self.next_transitions() }
    }

    /// Called when no other node answers this leader: another candidate should lead. Without another one, this
    /// controller takes the Lease again after a pause.
    pub fn step_down(&mut self, now: Instant) {
        (self.renewed, self.since) = (None, None);
        self.stepped_down_until = Some(now + STEP_DOWN_PAUSE);
    }

    pub fn has_stepped_down(&self, now: Instant) -> bool {
        self.stepped_down_until.is_some_and(|until| now < until)
    }

    /// The Lease was deleted. Its holder leads until the next renewal and creates it again then, so others wait as for
    /// any holder. A candidate that never saw a Lease does not wait: this is how the first leader begins.
    fn step_without_lease(&mut self, now: Instant) -> ElectionStep {
        let holder = self.observed.as_ref().map(|(record, _)| record.holder.as_str());
        if holder.is_some_and(|holder| holder != self.identity && is_identity(holder)) {
            let since = *self.missing_since.get_or_insert(now);
            if now < since + self.timing.lease_duration {
                return ElectionStep::Wait;
            }
        }
        ElectionStep::Create { transitions: self.next_transitions() }
    }

    /// The number of transitions tells terms apart (`egress_agent::health::leader_contact`), so it only grows. A number
    /// written by a foreign writer is ignored if it would exhaust the range.
    fn note_transitions(&mut self, transitions: i32) {
        if (0..=MAX_TRANSITIONS).contains(&transitions) {
            self.max_transitions = self.max_transitions.max(Some(transitions));
        }
    }

    fn next_transitions(&self) -> i32 {
        self.max_transitions.map_or(0, |greatest| greatest.saturating_add(1))
    }

    /// The Lease was written with us as holder. The request began at `asked` and was just answered.
    pub fn note_written(&mut self, record: ElectionRecord, asked: Instant, now: Instant) {
        // A take-over begins a new term, and so does a gap in leading.
        if self.term(now).is_none() {
            self.since = Some(now);
        }
        self.note_transitions(record.transitions);
        self.observed = Some((record, asked));
        self.renewed = Some(asked);
        self.missing_since = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(holder: &str, renewed: &str) -> ElectionRecord {
        let duration = Timing::default().lease_duration;
        ElectionRecord { holder: holder.into(), duration, renewed: renewed.into(), ..ElectionRecord::default() }
    }

    /// When this controller takes over a Lease that it first sees at `start` and reads every ten milliseconds.
    fn waits(me: &mut Election, lease: &ElectionRecord, start: Instant) -> Instant {
        let mut now = start;
        while me.step(Some(lease.clone()), None, now) == ElectionStep::Wait {
            now += Duration::from_millis(10);
        }
        now
    }

    #[test]
    fn a_silent_holder_is_replaced_only_after_the_duration_on_our_own_clock() {
        let (start, timing) = (Instant::now(), Timing::default());
        let mut me = Election::new("me".into(), timing);
        // However old the renewal claims to be, the wait begins when it is first observed.
        assert_eq!(waits(&mut me, &record("other", "1970"), start), start + timing.lease_duration);
        let seen = start + timing.lease_duration / 2;
        let mut me = Election::new("me".into(), timing);
        assert_eq!(me.step(Some(record("other", "1970")), None, start), ElectionStep::Wait);
        assert_eq!(waits(&mut me, &record("other", "2099"), seen), seen + timing.lease_duration);
        assert_eq!(
            me.step(Some(record("other", "2099")), None, seen + timing.lease_duration),
            ElectionStep::TakeOver { transitions: 1 }
        );
    }

    #[test]
    fn a_holder_stops_before_another_may_begin() {
        let timing = Timing::default();
        let start = Instant::now();
        let (mut me, mut other) = (Election::new("me".into(), timing), Election::new("other".into(), timing));
        assert_eq!(me.step(None, None, start), ElectionStep::Create { transitions: 0 });
        let lease = record("me", "1");
        // The answer to the renewal was slow; the other candidate saw it at once.
        me.note_written(lease.clone(), start, start + timing.renew_deadline / 2);
        let now = waits(&mut other, &lease, start);
        assert_eq!((me.term(now), me.term(start + timing.renew_deadline)), (None, None));
        assert!(me.term(start + timing.renew_deadline - Duration::from_millis(1)).is_some());
        assert!(now >= start + timing.renew_deadline + timing.leaderless_gap());
        assert!(timing.leaderless_gap() >= Duration::from_millis(500), "for requests in flight");
    }

    #[test]
    fn a_leader_that_steps_down_leaves_the_lease_to_others_for_a_while() {
        let start = Instant::now();
        let mut me = Election::new("me".into(), Timing::default());
        me.note_written(record("me", "1"), start, start);
        me.step_down(start);
        assert_eq!((me.term(start), me.holds()), (None, false));
        // Whether or not it could be released.
        assert_eq!(me.step(Some(record("", "2")), None, start), ElectionStep::Wait);
        assert_eq!(me.step(Some(record("me", "1")), None, start), ElectionStep::Wait);
        let other = &mut Election::new("other".into(), Timing::default());
        assert_eq!(other.step(Some(record("", "2")), None, start), ElectionStep::TakeOver { transitions: 1 });
        assert_eq!(
            me.step(Some(record("", "2")), None, start + STEP_DOWN_PAUSE),
            ElectionStep::TakeOver { transitions: 1 }
        );
        let mut me = Election::new("me".into(), Timing::default());
        me.step_down(start);
        assert_eq!(
            me.step(Some(record("me", "1")), None, start + STEP_DOWN_PAUSE),
            ElectionStep::Renew,
            "it could not be released"
        );
    }

    #[test]
    fn a_term_has_no_gap() {
        let (start, timing) = (Instant::now(), Timing::default());
        let at = |tenths: u32| start + timing.renew_deadline * tenths / 10;
        let mut me = Election::new("me".into(), timing);
        me.note_written(record("me", "1"), at(0), at(1));
        me.note_written(record("me", "2"), at(9), at(9));
        assert_eq!(me.term(at(10)).map(|term| term.since), Some(at(1)));
        // Too late: another candidate could have led.
        me.note_written(record("me", "3"), at(30), at(31));
        assert_eq!(me.term(at(32)).map(|term| term.since), Some(at(31)));
        // Another candidate leads for a moment.
        assert_eq!(me.step(Some(record("other", "4")), None, at(33)), ElectionStep::Wait);
        assert_eq!(me.term(at(33)), None);
        assert_eq!(me.step(Some(record("", "5")), None, at(34)), ElectionStep::TakeOver { transitions: 1 });
        me.note_written(record("me", "6"), at(34), at(35));
        assert_eq!(me.term(at(35)).map(|term| term.since), Some(at(35)));
    }

    #[test]
    fn a_holder_whose_node_is_silent_is_replaced_early_and_noted() {
        let (start, timing) = (Instant::now(), Timing::default());
        let at = |millis| start + Duration::from_millis(millis);
        let (holder, another) = (identity("node_a", 7, 1), identity("node_a", 8, 2));
        let lease = record(&holder, "1");
        let silent_holder = |since| Some(SilentHolder { holder: holder.clone(), since: at(since) });
        let mut me = Election::new("me".into(), timing);
        let mut step = |lease: &ElectionRecord, silent_holder: Option<SilentHolder>, now| {
            me.step(Some(lease.clone()), silent_holder.as_ref(), at(now))
        };
        assert_eq!(step(&lease, None, 0), ElectionStep::Wait);
        assert_eq!(step(&lease, None, 1999), ElectionStep::Wait, "it answers, or nothing is known");
        let renewed = record(&holder, "2");
        assert_eq!(step(&renewed, silent_holder(1500), 2000), ElectionStep::Wait, "it has just renewed");
        assert_eq!(step(&renewed, silent_holder(1500), 2599), ElectionStep::Wait);
        assert_eq!(step(&renewed, silent_holder(2101), 2600), ElectionStep::Wait, "it has not been silent for long");
        let of_another = SilentHolder { holder: another, since: at(0) };
        assert_eq!(step(&renewed, Some(of_another), 2600), ElectionStep::Wait);
        assert_eq!(step(&renewed, silent_holder(2100), 2600), ElectionStep::TakeOver { transitions: 1 });
        me.note_written(record("me", "3"), at(2600), at(2650));
        let former =
            FormerLeader { node: "node_a".into(), silent_since: at(2100), until: at(2000) + timing.lease_duration };
        assert_eq!(me.term(at(2650)).and_then(|term| term.former), Some(former), "it may go on until then");
        // Renewals keep the former leader. The next take-over replaces it.
        me.note_written(record("me", "4"), at(2900), at(2900));
        assert!(me.term(at(2900)).is_some_and(|term| term.former.is_some()));
        assert_eq!(me.step(Some(lease.clone()), None, at(3000)), ElectionStep::Wait);
        assert_eq!(me.step(Some(lease), None, at(5000)), ElectionStep::TakeOver { transitions: 1 });
        me.note_written(record("me", "5"), at(5000), at(5000));
        assert_eq!(me.term(at(5000)).map(|term| term.former), Some(None));
    }

    #[test]
    fn a_foreign_holder_and_the_leader_of_a_longer_lease_keep_their_full_time() {
        let (start, timing) = (Instant::now(), Timing::default());
        let since = start.checked_sub(timing.lease_duration).unwrap_or(start);
        let thief = SilentHolder { holder: "thief".into(), since };
        let mut me = Election::new("me".into(), timing);
        me.step(Some(record("thief", "1")), None, start);
        assert_eq!(
            me.step(Some(record("thief", "1")), Some(&thief), start + timing.stale_renewal * 2),
            ElectionStep::Wait,
            "it has no node"
        );
        let silent_holder = SilentHolder { holder: identity("a", 1, 1), since };
        let lease = ElectionRecord { duration: timing.lease_duration * 5, ..record(&silent_holder.holder, "2") };
        assert_eq!(me.step(Some(lease.clone()), Some(&silent_holder), start), ElectionStep::Wait);
        assert_eq!(
            me.step(Some(lease), Some(&silent_holder), start + timing.stale_renewal),
            ElectionStep::TakeOver { transitions: 1 }
        );
        me.note_written(record("me", "3"), start, start);
        let until = me.term(start).and_then(|term| term.former).map(|former| former.until);
        assert_eq!(until, Some(start + timing.lease_duration * 5));
    }

    #[test]
    fn a_standby_reads_when_it_may_take_over() {
        let (start, timing) = (Instant::now(), Timing::default());
        let mut me = Election::new("me".into(), timing);
        assert_eq!(me.next_attempt_at(start), start + timing.read_period, "nothing is known");
        me.step(Some(record("other", "1")), None, start);
        assert_eq!(me.next_attempt_at(start), start + timing.read_period);
        let late = start + timing.lease_duration - timing.read_period / 5;
        assert_eq!(me.next_attempt_at(late), start + timing.lease_duration);
        let over = start + timing.lease_duration;
        assert_eq!(
            me.next_attempt_at(over),
            over + timing.read_period,
            "another was faster: it is not asked without end"
        );
        me.note_written(record("me", "2"), over, over);
        assert_eq!((me.holds(), me.next_attempt_at(over)), (true, over + timing.retry_period));
    }

    #[test]
    fn a_wall_clock_that_jumps_changes_nothing() {
        let start = Instant::now();
        let mut me = Election::new("me".into(), Timing::default());
        // The holder renews each second. Its wall clock jumps, and repeats a time once.
        let times = ["2026", "1970", "2099", "2026", "0001", "9999"];
        for (second, renewed) in (0..).zip(times.iter().cycle().take(60)) {
            assert_eq!(
                me.step(Some(record("other", renewed)), None, start + Duration::from_secs(second)),
                ElectionStep::Wait
            );
        }
        let latest = start + Duration::from_secs(59);
        let next = waits(&mut me, &record("other", "9999"), latest + Duration::from_millis(10));
        assert_eq!(next, latest + Timing::default().lease_duration);
    }

    #[test]
    fn a_foreign_lease_is_waited_for_as_long_as_ours_and_a_minute_at_most() {
        let (start, ours) = (Instant::now(), Timing::default().lease_duration.as_secs());
        let at = |seconds| start + Duration::from_secs(seconds);
        let with = |seconds| ElectionRecord { duration: Duration::from_secs(seconds), ..record("thief", "1") };
        // The lease of an older version lasts longer than ours.
        for (stated, waits) in [(0, ours), (ours, ours), (5, 5), (30, 30), (u64::MAX, 60)] {
            let mut me = Election::new("me".into(), Timing::default());
            assert_eq!(me.step(Some(with(stated)), None, at(0)), ElectionStep::Wait, "{stated}");
            assert_eq!(me.step(Some(with(stated)), None, at(waits - 1)), ElectionStep::Wait, "{stated}");
            assert_eq!(
                me.step(Some(with(stated)), None, at(waits)),
                ElectionStep::TakeOver { transitions: 1 },
                "{stated}"
            );
        }
    }

    #[test]
    fn agents_are_recognised_by_their_identities() {
        assert!(is_identity(&identity("node-1.example", 4711, 0x18f3)) && is_identity(&identity("a_b", 1, 0)));
        assert_eq!((node_of(&identity("a_b", 1, 0)), node_of("thief")), (Some("a_b"), None));
        for other in ["", "thief", "ovnkube-control-plane-7d8f", "node_x_1f", "node_1_", "_1_1", "node_1_xyz"] {
            assert!(!is_identity(other), "{other}");
        }
    }

    #[test]
    fn a_released_lease_is_taken_at_once_and_a_stolen_one_is_detected() {
        let now = Instant::now();
        let mut me = Election::new("me".into(), Timing::default());
        assert_eq!(me.step(Some(record("", "1")), None, now), ElectionStep::TakeOver { transitions: 1 });
        me.note_written(record("me", "2"), now, now);
        assert_eq!(me.step(Some(record("me", "2")), None, now), ElectionStep::Renew);
        assert!(me.term(now).is_some());
        assert_eq!(me.step(Some(record("thief", "3")), None, now), ElectionStep::Wait);
        assert_eq!((me.term(now), me.holds()), (None, false));
    }

    #[test]
    fn a_deleted_lease_is_created_again_by_its_holder_first_and_keeps_counting() {
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        let holder = identity("a", 1, 1);
        let lease = ElectionRecord { transitions: 7, ..record(&holder, "1") };
        let (mut it, mut other) =
            (Election::new(holder.clone(), Timing::default()), Election::new("b".into(), Timing::default()));
        assert_eq!(other.step(Some(lease.clone()), None, at(0)), ElectionStep::Wait);
        it.note_written(lease, at(0), at(0));
        assert_eq!(it.step(None, None, at(9000)), ElectionStep::Create { transitions: 8 });
        // The wait does not depend on when the Lease was last read: its holder may have renewed it just before the
        // deletion.
        assert_eq!(other.step(None, None, at(9000)), ElectionStep::Wait);
        assert_eq!(other.step(None, None, at(10_999)), ElectionStep::Wait);
        assert_eq!(other.step(None, None, at(11_000)), ElectionStep::Create { transitions: 8 });
    }

    #[test]
    fn foreign_numbers_are_ignored_and_a_deleted_foreign_lease_is_not_waited_for() {
        let start = Instant::now();
        let mut me = Election::new("me".into(), Timing::default());
        me.step(Some(ElectionRecord { transitions: 5, ..record(&identity("a", 1, 1), "1") }), None, start);
        for transitions in [0, -3, i32::MAX] {
            let thief = ElectionRecord { transitions, ..record("thief", "1") };
            assert_eq!(me.step(Some(thief), None, start), ElectionStep::Wait);
        }
        assert_eq!(me.step(None, None, start), ElectionStep::Create { transitions: 6 });
        let free = ElectionRecord { transitions: 2, ..record("", "2") };
        assert_eq!(me.step(Some(free), None, start), ElectionStep::TakeOver { transitions: 6 });
    }
}
