//! Who leads: the rule of client-go's leader election as a pure state machine.
//!
//! A Lease names its holder and how long others wait. Wall clocks are never compared: a candidate notes on its own
//! monotonic clock when it *saw* the record change, and takes over when it has not changed for the lease's duration. The
//! holder counts from *before* it asked for the renewal and stops leading at the renew deadline, which is shorter than
//! the duration: it has stopped before anybody else may begin, whatever the network did to its requests.

use std::time::{Duration, Instant};

/// Durations of the rule. Whole seconds where they are written to the Lease.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// How long others wait without seeing a renewal.
    pub duration: Duration,
    /// How long the holder leads without a successful renewal.
    pub renew_deadline: Duration,
    /// Between two attempts.
    pub retry: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self { duration: Duration::from_secs(5), renew_deadline: Duration::from_secs(3), retry: Duration::from_secs(1) }
    }
}

/// However long a Lease says that others wait: nobody can be kept from leading by a number, after its last renewal.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// Who an agent is as a candidate: this process, not only its node, since a restarted agent is another one.
pub fn identity(node_name: &str, process: u32, started_ns: u128) -> String {
    format!("{node_name}_{process}_{started_ns:x}")
}

/// Is this the name of an agent?
pub fn is_identity(text: &str) -> bool {
    let mut parts = text.rsplitn(3, '_');
    let is_time = parts.next().is_some_and(|time| u128::from_str_radix(time, 16).is_ok());
    let is_process = parts.next().is_some_and(|process| process.parse::<u32>().is_ok());
    is_time && is_process && parts.next().is_some_and(|node| !node.is_empty())
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
    /// There is none: create it with us as its holder.
    Create,
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
}

impl Election {
    pub fn new(identity: String, timing: Timing) -> Self {
        Self { identity, timing, observed: None, renewed: None }
    }

    pub fn identity(&self) -> &str {
        &self.identity
    }

    pub fn timing(&self) -> Timing {
        self.timing
    }

    /// Do we lead at this moment?
    pub fn leads(&self, now: Instant) -> bool {
        self.leads_until().is_some_and(|until| now < until)
    }

    /// When leading ends without another renewal.
    pub fn leads_until(&self) -> Option<Instant> {
        self.renewed.map(|renewed| renewed + self.timing.renew_deadline)
    }

    /// Decides on the Lease as it was just read.
    pub fn step(&mut self, lease: Option<Record>, now: Instant) -> Step {
        let Some(lease) = lease else {
            self.renewed = None;
            return Step::Create;
        };
        let (mine, free) = (lease.holder == self.identity, lease.holder.is_empty());
        if !mine {
            self.renewed = None;
        }
        // A stranger may have written anything; less than ours would be no rule among agents.
        let duration = lease.duration.clamp(self.timing.duration, LONGEST_WAIT);
        let transitions = lease.transitions;
        if self.observed.as_ref().is_none_or(|(record, _)| *record != lease) {
            self.observed = Some((lease, now));
        }
        let since = self.observed.as_ref().map_or(now, |(_, since)| *since);
        if mine {
            Step::Renew
        } else if free || now >= since + duration {
            Step::TakeOver { transitions: transitions.saturating_add(1) }
        } else {
            Step::Wait
        }
    }

    /// The Lease was written with us as its holder by a request that began then.
    pub fn written(&mut self, record: Record, asked: Instant) {
        self.observed = Some((record, asked));
        self.renewed = Some(asked);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(holder: &str, renewed: &str) -> Record {
        let duration = Timing::default().duration;
        Record { holder: holder.into(), duration, renewed: renewed.into(), ..Record::default() }
    }

    #[test]
    fn a_silent_holder_is_replaced_only_after_the_duration_on_our_own_clock() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut me = Election::new("me".into(), Timing::default());
        // However old the renewal claims to be, the wait begins when it is first seen.
        assert_eq!(me.step(Some(record("other", "1970")), at(0)), Step::Wait);
        assert_eq!(me.step(Some(record("other", "1970")), at(4)), Step::Wait);
        assert_eq!(me.step(Some(record("other", "2099")), at(4)), Step::Wait);
        assert_eq!(me.step(Some(record("other", "2099")), at(8)), Step::Wait);
        assert_eq!(me.step(Some(record("other", "2099")), at(9)), Step::TakeOver { transitions: 1 });
    }

    #[test]
    fn a_holder_stops_before_another_may_begin() {
        let timing = Timing::default();
        let start = Instant::now();
        let (mut me, mut other) = (Election::new("me".into(), timing), Election::new("other".into(), timing));
        assert_eq!(me.step(None, start), Step::Create);
        let lease = record("me", "1");
        me.written(lease.clone(), start);
        // The answer to the renewal was slow; the other saw it at once.
        assert_eq!(other.step(Some(lease.clone()), start), Step::Wait);
        let mut now = start;
        while other.step(Some(lease.clone()), now) == Step::Wait {
            now += Duration::from_millis(10);
        }
        assert!(!me.leads(now) && !me.leads(start + timing.renew_deadline));
        assert!(me.leads(start + timing.renew_deadline - Duration::from_millis(1)));
    }

    #[test]
    fn a_wall_clock_that_jumps_changes_nothing() {
        let start = Instant::now();
        let mut me = Election::new("me".into(), Timing::default());
        // The holder renews each second; its wall clock goes to and fro, and once says what it said before.
        let times = ["2026", "1970", "2099", "2026", "0001", "9999"];
        for (second, renewed) in (0..).zip(times.iter().cycle().take(60)) {
            assert_eq!(me.step(Some(record("other", renewed)), start + Duration::from_secs(second)), Step::Wait);
        }
        let end = |seconds: u64| start + Duration::from_secs(59 + seconds);
        assert_eq!(me.step(Some(record("other", "9999")), end(4)), Step::Wait);
        assert_eq!(me.step(Some(record("other", "9999")), end(5)), Step::TakeOver { transitions: 1 });
    }

    #[test]
    fn a_strangers_lease_is_waited_for_as_one_of_ours_and_a_minute_at_most() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let with = |seconds| Record { duration: Duration::from_secs(seconds), ..record("thief", "1") };
        for (said, waits) in [(0, 5), (5, 5), (30, 30), (u64::MAX, 60)] {
            let mut me = Election::new("me".into(), Timing::default());
            assert_eq!(me.step(Some(with(said)), at(0)), Step::Wait, "{said}");
            assert_eq!(me.step(Some(with(said)), at(waits - 1)), Step::Wait, "{said}");
            assert_eq!(me.step(Some(with(said)), at(waits)), Step::TakeOver { transitions: 1 }, "{said}");
        }
    }

    #[test]
    fn agents_are_told_from_strangers_by_their_names() {
        assert!(is_identity(&identity("node-1.example", 4711, 0x18f3)) && is_identity(&identity("a_b", 1, 0)));
        for stranger in ["", "thief", "ovnkube-control-plane-7d8f", "node_x_1f", "node_1_", "_1_1", "node_1_xyz"] {
            assert!(!is_identity(stranger), "{stranger}");
        }
    }

    #[test]
    fn a_released_lease_is_taken_at_once_and_a_stolen_one_is_noticed() {
        let now = Instant::now();
        let mut me = Election::new("me".into(), Timing::default());
        assert_eq!(me.step(Some(record("", "1")), now), Step::TakeOver { transitions: 1 });
        me.written(record("me", "2"), now);
        assert_eq!(me.step(Some(record("me", "2")), now), Step::Renew);
        assert_eq!(me.step(Some(record("thief", "3")), now), Step::Wait);
        assert!(!me.leads(now));
    }
}
