//! Which nodes are suspected in the ledger, and when their leases expire. Pure, except for its memory.
//!
//! An agent holds addresses while it knows that a leader has heard it within the total timeout T, or while a ledger
//! that it has just read does not suspect it (`crate::ownership::lease`). So before the leader moves an address away
//! from a silent node, it suspects the node in the ledger, and waits until every earlier confirmation and every earlier
//! read has expired:
//!
//! ```text
//! last answer --- T + MARGIN -----------------------> |   the whole node is silent: its agent ends the lease
//!              suspicion written --- 0.75 T --------> | address moves
//!
//! last answer --- T + grace + MARGIN ---------------> |   its agent may be gone: its programs stop by themselves
//!              suspicion written --- 1.75 T --------> | address moves
//! ```
//!
//! The agent counts from earlier times, and for shorter: T from when it received the probe whose answer the leader has,
//! and 0.6 T from before it requested the ledger. The deadline of its programs is the grace after the former, and T
//! after the latter. A leader counts what it did not see itself from the first possible time: answers from the
//! beginning of its term, suspicions from when it first saw them. After an early take-over it counts answers from when
//! the former leader's Lease would have expired ([`TermStart`]).

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::leader_election::FormerLeader;
use crate::model::ledger::Ledger;
use crate::node_health::NodeHealth;

/// How long an agent may take to stop after its lease has expired.
const MARGIN: Duration = Duration::from_millis(250);

/// How long a node may emit after its last answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    /// With an agent, which then ends the lease: the total timeout.
    pub lease: Duration,
    /// Without an agent, until the programs stop: the total timeout and the grace.
    pub programs: Duration,
}

/// From when a leader counts answers that it did not receive itself.
#[derive(Clone, Copy, Debug)]
pub struct TermStart<'a> {
    /// The beginning of its term.
    pub since: Instant,
    /// The leader that it replaced early, which may still confirm agents that this leader does not reach.
    pub former: Option<&'a FormerLeader>,
    /// The probed nodes other than the leader's own.
    pub others: &'a BTreeSet<&'a str>,
}

impl TermStart<'_> {
    /// When everything that a former leader does has ended.
    pub fn over(&self) -> Instant {
        self.former.map_or(self.since, |former| self.since.max(former.until))
    }
}

/// When the suspicions of the ledger were first seen.
#[derive(Debug, Default)]
pub struct Suspicions {
    seen: BTreeMap<(String, u64), Instant>,
}

impl Suspicions {
    /// Records the ledger; also called on standbys.
    pub fn note(&mut self, ledger: &Ledger, now: Instant) {
        self.seen.retain(|(node, number), _| ledger.suspects.get(node) == Some(number));
        for (node, number) in &ledger.suspects {
            self.seen.entry((node.clone(), *number)).or_insert(now);
        }
    }

    /// When suspected nodes stop emitting everything that they had. Other nodes are not included.
    pub fn ends(
        &self,
        reach: &NodeHealth,
        Terms { lease, programs }: Terms,
        beginning: TermStart<'_>,
    ) -> BTreeMap<String, Instant> {
        let end = |((node, _), seen): (&(String, u64), &Instant)| {
            let since = match beginning.former {
                Some(former) if former.node == *node => self.confirmed_itself(former, reach, beginning),
                _ => beginning.over(),
            };
            let heard = reach.heard.get(node).map_or(since, |heard| since.max(*heard));
            let (of_heard, of_read) = match reach.silent.contains(node) {
                true => (lease, lease * 3 / 4),
                false => (programs.max(lease), lease * 7 / 4),
            };
            (node.clone(), (heard + of_heard + MARGIN).max(*seen + of_read))
        };
        self.seen.iter().map(end).collect()
    }

    /// Until when a leader that was replaced early may have confirmed the agent on its own node. It does so only while
    /// it hears the agent of another node (`egress_agent::controller::node_health::confirmation`). Such an agent that
    /// has answered the new leader reports the newer term, which ends that. A node that was already suspected is not
    /// heard by the former leader either.
    fn confirmed_itself(&self, former: &FormerLeader, reach: &NodeHealth, beginning: TermStart<'_>) -> Instant {
        let since = beginning.since;
        let was_suspected = |node: &str| self.seen.iter().any(|((name, _), seen)| name == node && *seen < since);
        let others = beginning.others.iter().filter(|node| **node != former.node && !was_suspected(node));
        let ends = others.map(|node| reach.followed.get(*node).copied());
        ends.map(|end| end.unwrap_or(beginning.over())).fold(since, Instant::max).min(beginning.over())
    }
}

/// The longest duration of a kind (see [`Terms`]) that an agent may still use. Agents use the one in the ledger. If a
/// former leader had a longer one, an agent that has not seen the change uses that until it expires, so it stays in the
/// ledger: another leader may follow in between.
#[derive(Debug, Default)]
pub struct Longest {
    former: Option<Duration>,
    /// When it has expired; `None` while it is in use.
    until: Option<Instant>,
}

impl Longest {
    /// Records the durations of the ledger's leader and of former ones, and this controller's own; also called on
    /// standbys. `over` is until when a former leader may grant leases with its own duration.
    pub fn note(
        &mut self,
        (total, read): (Option<Duration>, Option<Duration>),
        own: Duration,
        (now, over): (Instant, Instant),
    ) {
        if self.until.is_some_and(|until| now >= until) && read.is_none_or(|read| Some(read) > self.former) {
            *self = Self::default();
        }
        match total {
            Some(total) if total != own => {
                (self.former, self.until) = (self.former.max(Some(total)).max(read), None);
            }
            Some(_) if self.until.is_none() || read > self.former => {
                self.former = self.former.max(read);
                self.until = self.former.map(|former| now.max(over) + former + MARGIN);
            }
            _ => {}
        }
    }

    /// The longer duration that the leader has to write.
    pub fn to_write(&self, own: Duration, now: Instant) -> Option<Duration> {
        Some(self.of(own, now)).filter(|longest| *longest > own)
    }

    /// When that changes.
    pub fn next(&self, now: Instant) -> Option<Instant> {
        self.until.filter(|until| *until > now)
    }

    pub fn of(&self, own: Duration, now: Instant) -> Duration {
        let former = self.former.filter(|_| self.until.is_none_or(|until| now < until));
        former.map_or(own, |former| former.max(own))
    }
}

/// The nodes to suspect: those that the prober suspects, and those that have an address to release and have not been
/// heard for half the total timeout. And when to look again.
pub fn suspects(
    reach: &NodeHealth,
    ledger: &Ledger,
    since: Instant,
    now: Instant,
) -> (BTreeSet<String>, Option<Instant>) {
    let (mut suspects, mut next) = (reach.suspects.clone(), None::<Instant>);
    for record in ledger.records.open.values() {
        let heard = reach.heard.get(&record.from).map_or(since, |heard| since.max(*heard));
        let time = heard + reach.lease / 2;
        if now >= time {
            suspects.insert(record.from.clone());
        } else {
            next = Some(next.map_or(time, |next| next.min(time)));
        }
    }
    (suspects, next)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ledger::HandOver;

    const TOTAL: Duration = Duration::from_secs(4);

    fn ledger(suspects: &[(&str, u64)]) -> Ledger {
        let suspects = suspects.iter().map(|(node, number)| ((*node).to_owned(), *number)).collect();
        Ledger { suspects, ..Ledger::default() }
    }

    fn began(since: Instant) -> TermStart<'static> {
        static NO_NODES: BTreeSet<&str> = BTreeSet::new();
        TermStart { since, former: None, others: &NO_NODES }
    }

    #[test]
    fn only_leases_of_suspected_nodes_expire() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut reach = NodeHealth { lease: TOTAL, ..NodeHealth::default() };
        for node in ["a", "b"] {
            reach.heard.insert(node.into(), at(10));
        }
        let mut suspicions = Suspicions::default();
        suspicions.note(&ledger(&[]), at(11));
        let terms = Terms { lease: TOTAL, programs: TOTAL * 3 };
        assert!(suspicions.ends(&reach, terms, began(at(0))).is_empty());
        reach.silent = BTreeSet::from(["a".to_owned(), "b".to_owned()]);
        suspicions.note(&ledger(&[("a", 1)]), at(11));
        assert_eq!(suspicions.ends(&reach, terms, began(at(0))), BTreeMap::from([("a".to_owned(), at(14) + MARGIN)]));
        let mut suspicions = Suspicions::default();
        suspicions.note(&ledger(&[("a", 1)]), at(12));
        assert_eq!(
            suspicions.ends(&reach, terms, began(at(0))),
            BTreeMap::from([("a".to_owned(), at(15))]),
            "written late"
        );
        assert_eq!(suspicions.ends(&reach, terms, began(at(20)))["a"], at(24) + MARGIN, "who leads since then only");
        // A suspicion that is withdrawn and written again is another one.
        suspicions.note(&ledger(&[("a", 1), ("b", 2)]), at(13));
        assert_eq!(suspicions.ends(&reach, terms, began(at(0)))["b"], at(16));
        suspicions.note(&ledger(&[("a", 3), ("b", 2)]), at(15));
        assert_eq!(
            suspicions.ends(&reach, terms, began(at(0))),
            BTreeMap::from([("a".to_owned(), at(18)), ("b".to_owned(), at(16))])
        );
    }

    #[test]
    fn confirmations_by_a_leader_that_was_replaced_early_are_waited_for() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let terms = Terms { lease: TOTAL, programs: TOTAL };
        let mut suspicions = Suspicions::default();
        suspicions.note(&ledger(&[("old", 1)]), at(9));
        suspicions.note(&ledger(&[("old", 1), ("its", 2), ("cut", 3)]), at(10));
        let former = FormerLeader { node: "its".into(), silent_since: at(9), until: at(12) };
        let ends = |others: &[&'static str], heard: &[(&str, u64)]| {
            let heard: BTreeMap<_, _> = heard.iter().map(|(node, time)| ((*node).to_owned(), at(*time))).collect();
            let silent = BTreeSet::from(["its".to_owned(), "cut".to_owned()]);
            let reach = NodeHealth { lease: TOTAL, silent, followed: heard.clone(), heard, ..NodeHealth::default() };
            let others = others.iter().copied().collect();
            let ends =
                suspicions.ends(&reach, terms, TermStart { since: at(10), former: Some(&former), others: &others });
            (ends["its"], ends["cut"])
        };
        let (soon, late) = (at(14) + MARGIN, at(16) + MARGIN);
        assert_eq!(ends(&["its"], &[]), (soon, late), "there is no other that the former could hear");
        assert_eq!(ends(&["its", "well"], &[("well", 10)]), (soon, late), "it has heard of the newer term");
        let first = at(11) + TOTAL + MARGIN;
        assert_eq!(ends(&["its", "well"], &[("well", 11)]), (first, late), "until then the former could hear it");
        assert_eq!(ends(&["its", "well"], &[("well", 13)]), (late, late), "later than any confirmation");
        assert_eq!(ends(&["its", "well"], &[]), (late, late), "it has not answered");
        assert_eq!(
            ends(&["its", "well", "cut"], &[("well", 10)]),
            (late, late),
            "the former may hear one that this one does not"
        );
        assert_eq!(ends(&["its", "well", "old"], &[("well", 10)]), (soon, late), "the former did not hear it either");
        assert_eq!(ends(&["its"], &[("its", 13)]).0, at(17) + MARGIN, "it was heard");
    }

    /// If the agent may have ended before its node fell silent, its programs continue.
    #[test]
    fn programs_without_an_agent_are_waited_for_longer() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let terms = Terms { lease: TOTAL, programs: TOTAL * 3 };
        let mut reach = NodeHealth { lease: TOTAL, ..NodeHealth::default() };
        reach.heard.insert("a".into(), at(10));
        let mut suspicions = Suspicions::default();
        suspicions.note(&ledger(&[("a", 1)]), at(11));
        assert_eq!(suspicions.ends(&reach, terms, began(at(0)))["a"], at(22) + MARGIN);
        let mut late = Suspicions::default();
        late.note(&ledger(&[("a", 1)]), at(20));
        assert_eq!(late.ends(&reach, terms, began(at(0)))["a"], at(27), "it may have read the ledger just before");
        reach.silent.insert("a".into());
        assert_eq!(suspicions.ends(&reach, terms, began(at(0)))["a"], at(14) + MARGIN);
        reach.silent.clear();
        let shorter = Terms { programs: Duration::ZERO, ..terms };
        assert_eq!(suspicions.ends(&reach, shorter, began(at(0)))["a"], at(18), "no grace");
    }

    #[test]
    fn a_longer_timeout_of_a_former_leader_counts_until_it_has_expired() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let ledger = |total| (total, None);
        let (ten, own) = (Duration::from_secs(10), TOTAL);
        let mut longest = Longest::default();
        longest.note(ledger(None), own, (at(0), at(0)));
        assert_eq!(longest.of(own, at(0)), own, "a former version says nothing");
        longest.note(ledger(Some(ten)), own, (at(0), at(0)));
        assert_eq!(longest.of(own, at(100)), ten, "it stands there still");
        longest.note(ledger(Some(own)), own, (at(100), at(100)));
        longest.note(ledger(Some(own)), own, (at(105), at(105)));
        assert_eq!((longest.of(own, at(110)), longest.of(own, at(110) + MARGIN)), (ten, own));
        longest.note(ledger(Some(TOTAL / 2)), own, (at(120), at(120)));
        assert_eq!(longest.of(own, at(120)), own, "a shorter one is no matter");
        // The former leader uses its own until it has heard of this one.
        let mut early = Longest::default();
        early.note(ledger(Some(ten)), own, (at(0), at(0)));
        early.note(ledger(Some(own)), own, (at(1), at(3)));
        assert_eq!((early.of(own, at(13)), early.of(own, at(13) + MARGIN)), (ten, own));
        // A later leader reads of it.
        let after = |read| (Some(own), read);
        let mut fresh = Longest::default();
        fresh.note(after(Some(ten)), own, (at(200), at(200)));
        assert_eq!((fresh.to_write(own, at(200)), fresh.next(at(200))), (Some(ten), Some(at(210) + MARGIN)));
        fresh.note(after(Some(ten)), own, (at(205), at(205)));
        let end = at(210) + MARGIN;
        assert_eq!((fresh.of(own, at(210)), fresh.of(own, end), fresh.to_write(own, end)), (ten, own, None));
        // It stays until the next write, and does not start again.
        fresh.note(after(Some(ten)), own, (at(220), at(220)));
        assert_eq!((fresh.of(own, at(220)), fresh.next(at(220))), (own, None));
        fresh.note(after(None), own, (at(230), at(230)));
        fresh.note(after(Some(ten)), own, (at(240), at(240)));
        assert_eq!(fresh.of(own, at(240)), ten, "another change");
    }

    #[test]
    fn a_node_with_an_address_to_release_is_suspected_when_it_is_not_heard() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut ledger = ledger(&[]);
        for (number, node) in (1..).zip(["heard", "silent", "never"]) {
            let record = HandOver { number, from: node.into(), to: None };
            ledger
                .records
                .open
                .insert(std::net::IpAddr::from([172, 18, 0, u8::try_from(number).expect("few")]), record);
        }
        let heard = BTreeMap::from([("heard".to_owned(), at(9)), ("silent".to_owned(), at(7))]);
        let reach =
            NodeHealth { lease: TOTAL, heard, suspects: BTreeSet::from(["other".to_owned()]), ..NodeHealth::default() };
        let set = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>();
        assert_eq!(
            suspects(&reach, &ledger, at(9), at(10)),
            (set(&["other"]), Some(at(11))),
            "it leads since a second"
        );
        assert_eq!(suspects(&reach, &ledger, at(0), at(10)), (set(&["never", "other", "silent"]), Some(at(11))));
    }
}
