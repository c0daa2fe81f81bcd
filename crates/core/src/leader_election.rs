//! Who leads: the rule of client-go's leader election as a pure state machine.
//!
//! A Lease names its holder and how long others wait. Wall clocks are never compared: a candidate notes on its own
//! monotonic clock when it *saw* the record change, and takes over when it has not changed for the lease's duration. The
//! holder counts from *before* it asked for the renewal and stops leading at the renew deadline, which is shorter than
//! the duration: it has stopped before anybody else may begin, whatever the network did to its requests.
//!
//! One exception: where no address of the holder's node answers, a candidate need not wait for that long. The holder may
//! live on, cut off from this candidate alone, and lead and confirm agents as if it had not been replaced. So the candidate
//! notes whom it has replaced, and until when that one may go on ([`FormerLeader`]); `crate::ownership::suspicion` counts with it.

use std::time::{Duration, Instant};

/// Durations of the rule. Whole seconds where they are written to the Lease.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// How long others wait without seeing a renewal.
    pub duration: Duration,
    /// How long the holder leads without a successful renewal.
    pub renew_deadline: Duration,
    /// Between two renewals.
    pub retry: Duration,
    /// Between two looks of a standby. The later a renewal is seen the longer it is waited for.
    pub look: Duration,
    /// The node of a holder that has not answered for that long is silent.
    pub silence: Duration,
    /// The holder on a silent node may be replaced when its latest renewal was seen that long ago.
    pub stale: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            duration: Duration::from_secs(2),
            renew_deadline: Duration::from_millis(1500),
            retry: Duration::from_millis(250),
            look: Duration::from_millis(100),
            silence: Duration::from_millis(500),
            stale: Duration::from_millis(600),
        }
    }
}

impl Timing {
    /// Between the end of one leader and the beginning of the next, at least, unless the next takes over early.
    pub fn nobody_leads(&self) -> Duration {
        self.duration - self.renew_deadline
    }
}

/// However long a Lease says that others wait: nobody can be kept from leading by a number, after its last renewal.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// For so long a leader that hears no other node leaves the Lease to others. A standby looks ten times a second.
const ASIDE: Duration = Duration::from_millis(500);

/// More leaders than there ever are, a new one each second for thirty years.
const MOST_TRANSITIONS: i32 = 1 << 30;

/// Who a controller is as a candidate: this process, not only its node, since a restarted controller is another one.
pub fn identity(node_name: &str, process: u32, started_ns: u128) -> String {
    format!("{node_name}_{process}_{started_ns:x}")
}

/// Is this the name of a controller?
pub fn is_identity(text: &str) -> bool {
    let mut parts = text.rsplitn(3, '_');
    let is_time = parts.next().is_some_and(|time| u128::from_str_radix(time, 16).is_ok());
    let is_process = parts.next().is_some_and(|process| process.parse::<u32>().is_ok());
    is_time && is_process && parts.next().is_some_and(|node| !node.is_empty())
}

/// The node of an agent that has this name.
pub fn node_of(identity: &str) -> Option<&str> {
    is_identity(identity).then(|| identity.rsplitn(3, '_').nth(2)).flatten()
}

/// No address of this holder's node has answered since then, although one did before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SilentHolder {
    pub holder: String,
    pub since: Instant,
}

/// A leader that was replaced before its Lease had run out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FormerLeader {
    pub node: String,
    /// Since when no address of its node has answered.
    pub silent_since: Instant,
    /// Until when it may confirm agents: for the duration of its Lease.
    pub until: Instant,
}

/// What the rule reads and writes of a Lease.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// Empty when the holder has let go.
    pub holder: String,
    pub duration: Duration,
    /// As text: only whether it changed matters.
    pub renewed: String,
    pub acquired: String,
    pub transitions: i32,
}

/// What to do about the Lease now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Somebody else holds it.
    Wait,
    /// There is none: create it with us as its holder, and with a number that no leader has had.
    Create { transitions: i32 },
    /// Take it over: one more transition.
    TakeOver { transitions: i32 },
    /// It is ours: renew.
    Renew,
}

#[derive(Debug)]
pub struct Election {
    identity: String,
    timing: Timing,
    observed: Option<(Record, Instant)>,
    /// Start of the last request that renewed the Lease for us.
    renewed: Option<Instant>,
    /// Since when we lead without a gap.
    since: Option<Instant>,
    /// Since when there is no Lease, although a controller held it when it was seen last.
    gone: Option<Instant>,
    /// The greatest number of transitions seen.
    greatest: Option<i32>,
    /// The leader that the latest take-over replaced early.
    former: Option<FormerLeader>,
    /// Until then the Lease is left to other candidates.
    aside: Option<Instant>,
}

/// Leading without a gap: whoever led, or could have, before `since` is another matter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaderTerm {
    pub since: Instant,
    /// When the latest renewal was asked for.
    pub renewed: Instant,
    /// When it ends without another renewal.
    pub until: Instant,
    /// Whoever led before `since` and may not know yet that it does not.
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
            gone: None,
            greatest: None,
            former: None,
            aside: None,
        }
    }

    pub fn identity(&self) -> &str {
        &self.identity
    }

    pub fn timing(&self) -> Timing {
        self.timing
    }

    /// `None` where we do not lead at this moment.
    pub fn reign(&self, now: Instant) -> Option<LeaderTerm> {
        let renewed = self.renewed?;
        let until = renewed + self.timing.renew_deadline;
        (now < until).then_some(LeaderTerm { since: self.since?, renewed, until, former: self.former.clone() })
    }

    /// When the latest renewal was asked for. Others saw it later, and wait from then.
    pub fn renewed(&self) -> Option<Instant> {
        self.renewed
    }

    /// The Lease was ours when we saw it last: there is nothing to read before it is renewed.
    pub fn holds(&self) -> bool {
        self.renewed.is_some()
    }

    /// When to look at the Lease next, where the latest look was at `now`.
    pub fn look_again(&self, now: Instant) -> Instant {
        let Timing { retry, look, .. } = self.timing;
        if self.holds() {
            return now + retry;
        }
        // It takes over as soon as it may.
        let expiry = self.observed.as_ref().map(|(record, since)| *since + self.patience_with(record));
        expiry.filter(|expiry| *expiry > now).map_or(now + look, |expiry| expiry.min(now + look))
    }

    /// A stranger may have written anything; less than ours would be no rule among controllers.
    fn patience_with(&self, record: &Record) -> Duration {
        record.duration.clamp(self.timing.duration, LONGEST_WAIT)
    }

    /// Decides on the Lease as it was just read, and by what is known of its holder's node.
    pub fn step(&mut self, lease: Option<Record>, silence: Option<&SilentHolder>, now: Instant) -> Step {
        let Some(lease) = lease else {
            self.renewed = None;
            return self.step_without(now);
        };
        self.gone = None;
        self.note(lease.transitions);
        let (mine, free) = (lease.holder == self.identity, lease.holder.is_empty());
        if !mine {
            self.renewed = None;
        }
        let duration = self.patience_with(&lease);
        let silent =
            silence.filter(|silence| silence.holder == lease.holder && now >= silence.since + self.timing.silence);
        if self.observed.as_ref().is_none_or(|(record, _)| *record != lease) {
            self.observed = Some((lease, now));
        }
        let since = self.observed.as_ref().map_or(now, |(_, since)| *since);
        if (mine || free) && self.stands_aside(now) {
            return Step::Wait;
        }
        if mine {
            return Step::Renew;
        }
        self.former = None;
        if !free && now < since + duration {
            let silent = silent.filter(|_| now >= since + self.timing.stale);
            let Some((silent, node)) = silent.and_then(|silent| Some((silent, node_of(&silent.holder)?))) else {
                return Step::Wait;
            };
            let (node, silent_since) = (node.to_owned(), silent.since);
            self.former = Some(FormerLeader { node, silent_since, until: since + duration });
        }
        Step::TakeOver { transitions: self.next_transitions() }
    }

    /// This leader hears no other node: another candidate is to lead, if there is one. Where there is none by then, this one
    /// takes the Lease again.
    pub fn stand_aside(&mut self, now: Instant) {
        (self.renewed, self.since) = (None, None);
        self.aside = Some(now + ASIDE);
    }

    pub fn stands_aside(&self, now: Instant) -> bool {
        self.aside.is_some_and(|until| now < until)
    }

    /// Somebody has deleted it. Who held it leads until it has tried to renew it, and makes it anew then: others wait as for
    /// any holder. Whoever never saw one does not: that is how the first comes to be.
    fn step_without(&mut self, now: Instant) -> Step {
        let holder = self.observed.as_ref().map(|(record, _)| record.holder.as_str());
        if holder.is_some_and(|holder| holder != self.identity && is_identity(holder)) {
            let since = *self.gone.get_or_insert(now);
            if now < since + self.timing.duration {
                return Step::Wait;
            }
        }
        Step::Create { transitions: self.next_transitions() }
    }

    /// Terms of leaders are told apart by it (`egress_agent::health::leader_contact`), so it only grows. What a stranger wrote there is no
    /// reason to run out of numbers.
    fn note(&mut self, transitions: i32) {
        if (0..=MOST_TRANSITIONS).contains(&transitions) {
            self.greatest = self.greatest.max(Some(transitions));
        }
    }

    fn next_transitions(&self) -> i32 {
        self.greatest.map_or(0, |greatest| greatest.saturating_add(1))
    }

    /// The Lease was written with us as its holder by a request that began at `asked`, and was answered just now.
    pub fn written(&mut self, record: Record, asked: Instant, now: Instant) {
        // Whoever takes it over begins anew, and so does whoever has not led for a moment.
        if self.reign(now).is_none() {
            self.since = Some(now);
        }
        self.note(record.transitions);
        self.observed = Some((record, asked));
        self.renewed = Some(asked);
        self.gone = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(holder: &str, renewed: &str) -> Record {
        let duration = Timing::default().duration;
        Record { holder: holder.into(), duration, renewed: renewed.into(), ..Record::default() }
    }

    /// When this controller takes over whom it sees like that first at `start`, looking every ten milliseconds.
    fn waits(me: &mut Election, lease: &Record, start: Instant) -> Instant {
        let mut now = start;
        while me.step(Some(lease.clone()), None, now) == Step::Wait {
            now += Duration::from_millis(10);
        }
        now
    }

    #[test]
    fn a_silent_holder_is_replaced_only_after_the_duration_on_our_own_clock() {
        let (start, timing) = (Instant::now(), Timing::default());
        let mut me = Election::new("me".into(), timing);
        // However old the renewal claims to be, the wait begins when it is first seen.
        assert_eq!(waits(&mut me, &record("other", "1970"), start), start + timing.duration);
        let seen = start + timing.duration / 2;
        let mut me = Election::new("me".into(), timing);
        assert_eq!(me.step(Some(record("other", "1970")), None, start), Step::Wait);
        assert_eq!(waits(&mut me, &record("other", "2099"), seen), seen + timing.duration);
        assert_eq!(
            me.step(Some(record("other", "2099")), None, seen + timing.duration),
            Step::TakeOver { transitions: 1 }
        );
    }

    #[test]
    fn a_holder_stops_before_another_may_begin() {
        let timing = Timing::default();
        let start = Instant::now();
        let (mut me, mut other) = (Election::new("me".into(), timing), Election::new("other".into(), timing));
        assert_eq!(me.step(None, None, start), Step::Create { transitions: 0 });
        let lease = record("me", "1");
        // The answer to the renewal was slow; the other saw it at once.
        me.written(lease.clone(), start, start + timing.renew_deadline / 2);
        let now = waits(&mut other, &lease, start);
        assert_eq!((me.reign(now), me.reign(start + timing.renew_deadline)), (None, None));
        assert!(me.reign(start + timing.renew_deadline - Duration::from_millis(1)).is_some());
        assert!(now >= start + timing.renew_deadline + timing.nobody_leads());
        assert!(timing.nobody_leads() >= Duration::from_millis(500), "for what is on its way");
    }

    #[test]
    fn a_leader_that_stands_aside_leaves_the_lease_to_others_for_a_while() {
        let start = Instant::now();
        let mut me = Election::new("me".into(), Timing::default());
        me.written(record("me", "1"), start, start);
        me.stand_aside(start);
        assert_eq!((me.reign(start), me.holds()), (None, false));
        // Whether or not it could be released.
        assert_eq!(me.step(Some(record("", "2")), None, start), Step::Wait);
        assert_eq!(me.step(Some(record("me", "1")), None, start), Step::Wait);
        let others = &mut Election::new("other".into(), Timing::default());
        assert_eq!(others.step(Some(record("", "2")), None, start), Step::TakeOver { transitions: 1 });
        assert_eq!(me.step(Some(record("", "2")), None, start + ASIDE), Step::TakeOver { transitions: 1 });
        let mut me = Election::new("me".into(), Timing::default());
        me.stand_aside(start);
        assert_eq!(me.step(Some(record("me", "1")), None, start + ASIDE), Step::Renew, "it could not be released");
    }

    #[test]
    fn a_reign_has_no_gap() {
        let (start, timing) = (Instant::now(), Timing::default());
        let at = |tenths: u32| start + timing.renew_deadline * tenths / 10;
        let mut me = Election::new("me".into(), timing);
        me.written(record("me", "1"), at(0), at(1));
        me.written(record("me", "2"), at(9), at(9));
        assert_eq!(me.reign(at(10)).map(|reign| reign.since), Some(at(1)));
        // Too late: somebody else could have led.
        me.written(record("me", "3"), at(30), at(31));
        assert_eq!(me.reign(at(32)).map(|reign| reign.since), Some(at(31)));
        // Somebody else has, and all of it within a moment.
        assert_eq!(me.step(Some(record("other", "4")), None, at(33)), Step::Wait);
        assert_eq!(me.reign(at(33)), None);
        assert_eq!(me.step(Some(record("", "5")), None, at(34)), Step::TakeOver { transitions: 1 });
        me.written(record("me", "6"), at(34), at(35));
        assert_eq!(me.reign(at(35)).map(|reign| reign.since), Some(at(35)));
    }

    #[test]
    fn a_holder_whose_node_is_silent_is_replaced_early_and_noted() {
        let (start, timing) = (Instant::now(), Timing::default());
        let at = |millis| start + Duration::from_millis(millis);
        let (holder, another) = (identity("node_a", 7, 1), identity("node_a", 8, 2));
        let lease = record(&holder, "1");
        let silence = |since| Some(SilentHolder { holder: holder.clone(), since: at(since) });
        let mut me = Election::new("me".into(), timing);
        let mut step = |lease: &Record, silence: Option<SilentHolder>, now| {
            me.step(Some(lease.clone()), silence.as_ref(), at(now))
        };
        assert_eq!(step(&lease, None, 0), Step::Wait);
        assert_eq!(step(&lease, None, 1999), Step::Wait, "it answers, or nobody knows");
        let renewed = record(&holder, "2");
        assert_eq!(step(&renewed, silence(1500), 2000), Step::Wait, "it has just renewed");
        assert_eq!(step(&renewed, silence(1500), 2599), Step::Wait);
        assert_eq!(step(&renewed, silence(2101), 2600), Step::Wait, "it has not been silent for long");
        let of_another = SilentHolder { holder: another, since: at(0) };
        assert_eq!(step(&renewed, Some(of_another), 2600), Step::Wait);
        assert_eq!(step(&renewed, silence(2100), 2600), Step::TakeOver { transitions: 1 });
        me.written(record("me", "3"), at(2600), at(2650));
        let former = FormerLeader { node: "node_a".into(), silent_since: at(2100), until: at(2000) + timing.duration };
        assert_eq!(me.reign(at(2650)).and_then(|reign| reign.former), Some(former), "it may go on until then");
        // Renewals change nothing of that, and the next take-over is another.
        me.written(record("me", "4"), at(2900), at(2900));
        assert!(me.reign(at(2900)).is_some_and(|reign| reign.former.is_some()));
        assert_eq!(me.step(Some(lease.clone()), None, at(3000)), Step::Wait);
        assert_eq!(me.step(Some(lease), None, at(5000)), Step::TakeOver { transitions: 1 });
        me.written(record("me", "5"), at(5000), at(5000));
        assert_eq!(me.reign(at(5000)).map(|reign| reign.former), Some(None));
    }

    #[test]
    fn a_stranger_and_the_leader_of_a_longer_lease_are_given_their_time() {
        let (start, timing) = (Instant::now(), Timing::default());
        let since = start.checked_sub(timing.duration).unwrap_or(start);
        let thief = SilentHolder { holder: "thief".into(), since };
        let mut me = Election::new("me".into(), timing);
        me.step(Some(record("thief", "1")), None, start);
        assert_eq!(
            me.step(Some(record("thief", "1")), Some(&thief), start + timing.stale * 2),
            Step::Wait,
            "it has no node"
        );
        let silence = SilentHolder { holder: identity("a", 1, 1), since };
        let lease = Record { duration: timing.duration * 5, ..record(&silence.holder, "2") };
        assert_eq!(me.step(Some(lease.clone()), Some(&silence), start), Step::Wait);
        assert_eq!(me.step(Some(lease), Some(&silence), start + timing.stale), Step::TakeOver { transitions: 1 });
        me.written(record("me", "3"), start, start);
        let until = me.reign(start).and_then(|reign| reign.former).map(|former| former.until);
        assert_eq!(until, Some(start + timing.duration * 5));
    }

    #[test]
    fn a_standby_looks_when_it_may_take_over() {
        let (start, timing) = (Instant::now(), Timing::default());
        let mut me = Election::new("me".into(), timing);
        assert_eq!(me.look_again(start), start + timing.look, "nothing is known");
        me.step(Some(record("other", "1")), None, start);
        assert_eq!(me.look_again(start), start + timing.look);
        let late = start + timing.duration - timing.look / 5;
        assert_eq!(me.look_again(late), start + timing.duration);
        let over = start + timing.duration;
        assert_eq!(me.look_again(over), over + timing.look, "another was faster: it is not asked without end");
        me.written(record("me", "2"), over, over);
        assert_eq!((me.holds(), me.look_again(over)), (true, over + timing.retry));
    }

    #[test]
    fn a_wall_clock_that_jumps_changes_nothing() {
        let start = Instant::now();
        let mut me = Election::new("me".into(), Timing::default());
        // The holder renews each second; its wall clock goes to and fro, and once says what it said before.
        let times = ["2026", "1970", "2099", "2026", "0001", "9999"];
        for (second, renewed) in (0..).zip(times.iter().cycle().take(60)) {
            assert_eq!(me.step(Some(record("other", renewed)), None, start + Duration::from_secs(second)), Step::Wait);
        }
        let latest = start + Duration::from_secs(59);
        let next = waits(&mut me, &record("other", "9999"), latest + Duration::from_millis(10));
        assert_eq!(next, latest + Timing::default().duration);
    }

    #[test]
    fn a_strangers_lease_is_waited_for_as_one_of_ours_and_a_minute_at_most() {
        let (start, ours) = (Instant::now(), Timing::default().duration.as_secs());
        let at = |seconds| start + Duration::from_secs(seconds);
        let with = |seconds| Record { duration: Duration::from_secs(seconds), ..record("thief", "1") };
        // A former version's lease lasts longer than ours.
        for (said, waits) in [(0, ours), (ours, ours), (5, 5), (30, 30), (u64::MAX, 60)] {
            let mut me = Election::new("me".into(), Timing::default());
            assert_eq!(me.step(Some(with(said)), None, at(0)), Step::Wait, "{said}");
            assert_eq!(me.step(Some(with(said)), None, at(waits - 1)), Step::Wait, "{said}");
            assert_eq!(me.step(Some(with(said)), None, at(waits)), Step::TakeOver { transitions: 1 }, "{said}");
        }
    }

    #[test]
    fn agents_are_told_from_strangers_by_their_names() {
        assert!(is_identity(&identity("node-1.example", 4711, 0x18f3)) && is_identity(&identity("a_b", 1, 0)));
        assert_eq!((node_of(&identity("a_b", 1, 0)), node_of("thief")), (Some("a_b"), None));
        for stranger in ["", "thief", "ovnkube-control-plane-7d8f", "node_x_1f", "node_1_", "_1_1", "node_1_xyz"] {
            assert!(!is_identity(stranger), "{stranger}");
        }
    }

    #[test]
    fn a_released_lease_is_taken_at_once_and_a_stolen_one_is_noticed() {
        let now = Instant::now();
        let mut me = Election::new("me".into(), Timing::default());
        assert_eq!(me.step(Some(record("", "1")), None, now), Step::TakeOver { transitions: 1 });
        me.written(record("me", "2"), now, now);
        assert_eq!(me.step(Some(record("me", "2")), None, now), Step::Renew);
        assert!(me.reign(now).is_some());
        assert_eq!(me.step(Some(record("thief", "3")), None, now), Step::Wait);
        assert_eq!((me.reign(now), me.holds()), (None, false));
    }

    #[test]
    fn a_lease_that_was_deleted_is_made_anew_by_its_holder_first_and_counts_on() {
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        let holder = identity("a", 1, 1);
        let lease = Record { transitions: 7, ..record(&holder, "1") };
        let (mut it, mut other) =
            (Election::new(holder.clone(), Timing::default()), Election::new("b".into(), Timing::default()));
        assert_eq!(other.step(Some(lease.clone()), None, at(0)), Step::Wait);
        it.written(lease, at(0), at(0));
        assert_eq!(it.step(None, None, at(9000)), Step::Create { transitions: 8 });
        // However long ago it was seen last: who held it may have renewed it just before.
        assert_eq!(other.step(None, None, at(9000)), Step::Wait);
        assert_eq!(other.step(None, None, at(10_999)), Step::Wait);
        assert_eq!(other.step(None, None, at(11_000)), Step::Create { transitions: 8 });
    }

    #[test]
    fn numbers_of_strangers_are_not_counted_on_from_and_their_leases_not_missed() {
        let start = Instant::now();
        let mut me = Election::new("me".into(), Timing::default());
        me.step(Some(Record { transitions: 5, ..record(&identity("a", 1, 1), "1") }), None, start);
        for transitions in [0, -3, i32::MAX] {
            let thief = Record { transitions, ..record("thief", "1") };
            assert_eq!(me.step(Some(thief), None, start), Step::Wait);
        }
        assert_eq!(me.step(None, None, start), Step::Create { transitions: 6 });
        let free = Record { transitions: 2, ..record("", "2") };
        assert_eq!(me.step(Some(free), None, start), Step::TakeOver { transitions: 6 });
    }
}
