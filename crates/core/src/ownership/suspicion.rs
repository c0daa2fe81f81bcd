//! Which nodes are suspected in the ledger, and when their leases expire. Pure, except for its memory.
//!
//! Before the leader moves an address from a silent node, it suspects the node in the ledger and waits until every
//! earlier confirmation and every earlier read has expired (docs/adr/0012, 0017). The agent's side is
//! `crate::ownership::lease`:
//!
//! | | after the last answer | after the suspicion was written |
//! |---|---|---|
//! | the whole node is silent: its agent ends the lease | T + MARGIN | 0.75 T |
//! | its agent may be gone: its programs stop by themselves | T + grace + MARGIN | 1.75 T |

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::leader_election::FormerLeader;
use crate::model::ledger::Ledger;
use crate::node_health::NodeHealth;

/// How long an agent may take to stop after its lease has expired.
const MARGIN: Duration = Duration::from_millis(250);

/// How long a node may emit after its last answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeaseDurations {
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
    pub fn former_term_end(&self) -> Instant {
        self.former.map_or(self.since, |former| self.since.max(former.until))
    }
}

/// When the suspicions of the ledger were first read.
#[derive(Debug, Default)]
pub struct Suspicions {
    first_seen: BTreeMap<(String, u64), Instant>,
}

impl Suspicions {
    /// Records the ledger; also called on standbys.
    pub fn observe(&mut self, ledger: &Ledger, now: Instant) {
        self.first_seen.retain(|(node, number), _| ledger.suspects.get(node) == Some(number));
        for (node, number) in &ledger.suspects {
            self.first_seen.entry((node.clone(), *number)).or_insert(now);
        }
    }

    /// When suspected nodes stop emitting everything that they had. Other nodes are not included.
    pub fn lease_expiries(
        &self,
        node_health: &NodeHealth,
        LeaseDurations { lease, programs }: LeaseDurations,
        term_start: TermStart<'_>,
    ) -> BTreeMap<String, Instant> {
        let end = |((node, _), first_seen): (&(String, u64), &Instant)| {
            let since = match term_start.former {
                Some(former) if former.node == *node => self.own_confirmations_end(former, node_health, term_start),
                _ => term_start.former_term_end(),
            };
            let last_confirmed =
                node_health.last_confirmed.get(node).map_or(since, |last_confirmed| since.max(*last_confirmed));
            let (after_answer, after_suspicion) = match node_health.silent.contains(node) {
                true => (lease, lease * 3 / 4),
                false => (programs.max(lease), lease * 7 / 4),
            };
            (node.clone(), (last_confirmed + after_answer + MARGIN).max(*first_seen + after_suspicion))
        };
        self.first_seen.iter().map(end).collect()
    }

    /// Until when a leader that was replaced early may have confirmed the agent on its own node. It does so only while
    /// the agent of another node answers (`egress_agent::controller::node_health::confirmation`). Such an agent that
    /// has answered the new leader reports the newer term, which ends that. A node that was already suspected does
    /// not answer the former leader either.
    fn own_confirmations_end(
        &self,
        former: &FormerLeader,
        node_health: &NodeHealth,
        term_start: TermStart<'_>,
    ) -> Instant {
        let since = term_start.since;
        let was_suspected =
            |node: &str| self.first_seen.iter().any(|((name, _), first_seen)| name == node && *first_seen < since);
        let others = term_start.others.iter().filter(|node| **node != former.node && !was_suspected(node));
        let expiries = others.map(|node| node_health.first_confirmed.get(*node).copied());
        expiries
            .map(|end| end.unwrap_or(term_start.former_term_end()))
            .fold(since, Instant::max)
            .min(term_start.former_term_end())
    }
}

/// The longest duration of a kind (see [`LeaseDurations`]) that an agent may still use. Agents use the one in the
/// ledger. If a former leader had a longer one, an agent that has not seen the change uses that until it expires, so
/// it stays in the ledger: another leader may follow in between.
#[derive(Debug, Default)]
pub struct LongestDuration {
    former: Option<Duration>,
    /// When it has expired; `None` while it is in use.
    until: Option<Instant>,
}

impl LongestDuration {
    /// Records the durations of the ledger's leader and of former ones, and this controller's own; also called on
    /// standbys. `over` is until when a former leader may grant leases with its own duration.
    pub fn observe(
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
        Some(self.effective(own, now)).filter(|longest| *longest > own)
    }

    /// When that changes.
    pub fn expires_at(&self, now: Instant) -> Option<Instant> {
        self.until.filter(|until| *until > now)
    }

    pub fn effective(&self, own: Duration, now: Instant) -> Duration {
        let former = self.former.filter(|_| self.until.is_none_or(|until| now < until));
        former.map_or(own, |former| former.max(own))
    }
}

/// The nodes to suspect: those that the prober suspects, and those that have an address to release and have not
/// answered for half the total timeout. And when to check again.
pub fn suspects(
    node_health: &NodeHealth,
    ledger: &Ledger,
    since: Instant,
    now: Instant,
) -> (BTreeSet<String>, Option<Instant>) {
    let (mut suspects, mut next) = (node_health.suspects.clone(), None::<Instant>);
    for record in ledger.records.open.values() {
        let last_confirmed =
            node_health.last_confirmed.get(&record.from).map_or(since, |last_confirmed| since.max(*last_confirmed));
        let time = last_confirmed + node_health.lease / 2;
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
        let mut node_health = NodeHealth { lease: TOTAL, ..NodeHealth::default() };
        for node in ["a", "b"] {
            node_health.last_confirmed.insert(node.into(), at(10));
        }
        let mut suspicions = Suspicions::default();
        suspicions.observe(&ledger(&[]), at(11));
        let terms = LeaseDurations { lease: TOTAL, programs: TOTAL * 3 };
        assert!(suspicions.lease_expiries(&node_health, terms, began(at(0))).is_empty());
        node_health.silent = BTreeSet::from(["a".to_owned(), "b".to_owned()]);
        suspicions.observe(&ledger(&[("a", 1)]), at(11));
        assert_eq!(
            suspicions.lease_expiries(&node_health, terms, began(at(0))),
            BTreeMap::from([("a".to_owned(), at(14) + MARGIN)])
        );
        let mut suspicions = Suspicions::default();
        suspicions.observe(&ledger(&[("a", 1)]), at(12));
        assert_eq!(
            suspicions.lease_expiries(&node_health, terms, began(at(0))),
            BTreeMap::from([("a".to_owned(), at(15))]),
            "written late"
        );
        assert_eq!(
            suspicions.lease_expiries(&node_health, terms, began(at(20)))["a"],
            at(24) + MARGIN,
            "leads only since then"
        );
        // A suspicion that is withdrawn and written again is another one.
        suspicions.observe(&ledger(&[("a", 1), ("b", 2)]), at(13));
        assert_eq!(suspicions.lease_expiries(&node_health, terms, began(at(0)))["b"], at(16));
        suspicions.observe(&ledger(&[("a", 3), ("b", 2)]), at(15));
        assert_eq!(
            suspicions.lease_expiries(&node_health, terms, began(at(0))),
            BTreeMap::from([("a".to_owned(), at(18)), ("b".to_owned(), at(16))])
        );
    }

    #[test]
    fn confirmations_by_a_leader_that_was_replaced_early_are_waited_for() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let terms = LeaseDurations { lease: TOTAL, programs: TOTAL };
        let mut suspicions = Suspicions::default();
        suspicions.observe(&ledger(&[("old", 1)]), at(9));
        suspicions.observe(&ledger(&[("old", 1), ("its", 2), ("cut", 3)]), at(10));
        let former = FormerLeader { node: "its".into(), silent_since: at(9), until: at(12) };
        let expiries = |others: &[&'static str], last_confirmed: &[(&str, u64)]| {
            let last_confirmed: BTreeMap<_, _> =
                last_confirmed.iter().map(|(node, time)| ((*node).to_owned(), at(*time))).collect();
            let silent = BTreeSet::from(["its".to_owned(), "cut".to_owned()]);
            let node_health = NodeHealth {
                lease: TOTAL,
                silent,
                first_confirmed: last_confirmed.clone(),
                last_confirmed,
                ..NodeHealth::default()
            };
            let others = others.iter().copied().collect();
            let expiries = suspicions.lease_expiries(
                &node_health,
                terms,
                TermStart { since: at(10), former: Some(&former), others: &others },
            );
            (expiries["its"], expiries["cut"])
        };
        let (soon, late) = (at(14) + MARGIN, at(16) + MARGIN);
        assert_eq!(expiries(&["its"], &[]), (soon, late), "no other could answer the former");
        assert_eq!(expiries(&["its", "well"], &[("well", 10)]), (soon, late), "it knows of the newer term");
        let first = at(11) + TOTAL + MARGIN;
        assert_eq!(expiries(&["its", "well"], &[("well", 11)]), (first, late), "until then it could answer the former");
        assert_eq!(expiries(&["its", "well"], &[("well", 13)]), (late, late), "later than any confirmation");
        assert_eq!(expiries(&["its", "well"], &[]), (late, late), "it has not answered");
        assert_eq!(
            expiries(&["its", "well", "cut"], &[("well", 10)]),
            (late, late),
            "one may answer the former and not this one"
        );
        assert_eq!(
            expiries(&["its", "well", "old"], &[("well", 10)]),
            (soon, late),
            "it did not answer the former either"
        );
        assert_eq!(expiries(&["its"], &[("its", 13)]).0, at(17) + MARGIN, "it has answered");
    }

    /// If the agent may have ended before its node fell silent, its programs continue.
    #[test]
    fn programs_without_an_agent_are_waited_for_longer() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let terms = LeaseDurations { lease: TOTAL, programs: TOTAL * 3 };
        let mut node_health = NodeHealth { lease: TOTAL, ..NodeHealth::default() };
        node_health.last_confirmed.insert("a".into(), at(10));
        let mut suspicions = Suspicions::default();
        suspicions.observe(&ledger(&[("a", 1)]), at(11));
        assert_eq!(suspicions.lease_expiries(&node_health, terms, began(at(0)))["a"], at(22) + MARGIN);
        let mut late = Suspicions::default();
        late.observe(&ledger(&[("a", 1)]), at(20));
        assert_eq!(
            late.lease_expiries(&node_health, terms, began(at(0)))["a"],
            at(27),
            "it may have read the ledger just before"
        );
        node_health.silent.insert("a".into());
        assert_eq!(suspicions.lease_expiries(&node_health, terms, began(at(0)))["a"], at(14) + MARGIN);
        node_health.silent.clear();
        let shorter = LeaseDurations { programs: Duration::ZERO, ..terms };
        assert_eq!(suspicions.lease_expiries(&node_health, shorter, began(at(0)))["a"], at(18), "no grace");
    }

    #[test]
    fn a_longer_timeout_of_a_former_leader_counts_until_it_has_expired() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let ledger = |total| (total, None);
        let (ten, own) = (Duration::from_secs(10), TOTAL);
        let mut longest = LongestDuration::default();
        longest.observe(ledger(None), own, (at(0), at(0)));
        assert_eq!(longest.effective(own, at(0)), own, "a former version has none");
        longest.observe(ledger(Some(ten)), own, (at(0), at(0)));
        assert_eq!(longest.effective(own, at(100)), ten, "it is still in the ledger");
        longest.observe(ledger(Some(own)), own, (at(100), at(100)));
        longest.observe(ledger(Some(own)), own, (at(105), at(105)));
        assert_eq!((longest.effective(own, at(110)), longest.effective(own, at(110) + MARGIN)), (ten, own));
        longest.observe(ledger(Some(TOTAL / 2)), own, (at(120), at(120)));
        assert_eq!(longest.effective(own, at(120)), own, "a shorter one is no matter");
        // The former leader uses its own until it knows of this one.
        let mut early = LongestDuration::default();
        early.observe(ledger(Some(ten)), own, (at(0), at(0)));
        early.observe(ledger(Some(own)), own, (at(1), at(3)));
        assert_eq!((early.effective(own, at(13)), early.effective(own, at(13) + MARGIN)), (ten, own));
        // A later leader reads it.
        let after = |read| (Some(own), read);
        let mut fresh = LongestDuration::default();
        fresh.observe(after(Some(ten)), own, (at(200), at(200)));
        assert_eq!((fresh.to_write(own, at(200)), fresh.expires_at(at(200))), (Some(ten), Some(at(210) + MARGIN)));
        fresh.observe(after(Some(ten)), own, (at(205), at(205)));
        let end = at(210) + MARGIN;
        assert_eq!(
            (fresh.effective(own, at(210)), fresh.effective(own, end), fresh.to_write(own, end)),
            (ten, own, None)
        );
        // It stays until the next write, and does not start again.
        fresh.observe(after(Some(ten)), own, (at(220), at(220)));
        assert_eq!((fresh.effective(own, at(220)), fresh.expires_at(at(220))), (own, None));
        fresh.observe(after(None), own, (at(230), at(230)));
        fresh.observe(after(Some(ten)), own, (at(240), at(240)));
        assert_eq!(fresh.effective(own, at(240)), ten, "another change");
    }

    #[test]
    fn a_node_with_an_address_to_release_is_suspected_when_it_does_not_answer() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut ledger = ledger(&[]);
        for (number, node) in (1..).zip(["answers", "silent", "never"]) {
            let record = HandOver { number, from: node.into(), to: None };
            ledger
                .records
                .open
                .insert(std::net::IpAddr::from([172, 18, 0, u8::try_from(number).expect("few")]), record);
        }
        let last_confirmed = BTreeMap::from([("answers".to_owned(), at(9)), ("silent".to_owned(), at(7))]);
        let node_health = NodeHealth {
            lease: TOTAL,
            last_confirmed,
            suspects: BTreeSet::from(["other".to_owned()]),
            ..NodeHealth::default()
        };
        let set = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>();
        assert_eq!(
            suspects(&node_health, &ledger, at(9), at(10)),
            (set(&["other"]), Some(at(11))),
            "it leads since a second"
        );
        assert_eq!(suspects(&node_health, &ledger, at(0), at(10)), (set(&["never", "other", "silent"]), Some(at(11))));
    }
}
