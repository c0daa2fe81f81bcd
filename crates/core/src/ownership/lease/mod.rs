//! Whether this node may hold addresses: its lease. Pure; `egress_agent::node::lease_keeper` is the loop around it.
//!
//! A gateway that is cut off cannot learn that its addresses move to another node, so it gives them up by itself before
//! the leader may move them. It may hold addresses while
//!
//! - **a leader has confirmed it** within the total timeout T: the leader has the answer to a probe that arrived here
//!   then (`egress_agent::health::leader_contact`); or
//! - **it has read the ledger**, with a request less than 0.6 T ago, and is not suspected there.
//!
//! Otherwise the lease expires: the deadline in its programs is set to zero, and its addresses are disowned. A dead or
//! stopped agent cannot do that, so the programs have their own **deadline**, renewed with each confirmation: T and the
//! grace after the last confirmation, or 1.6 T after the last read. A new agent keeps the deadline until it is
//! confirmed itself; before that, no other bound is needed.
//!
//! - A passed deadline is not renewed before the reconciler has disowned everything ([`LeaseState::Expired`] has a
//!   number that it acknowledges): the addresses may be other nodes' by now, and return only after a fresh read
//!   (`crate::ownership::holdings`).
//! - If the ledger states that this node's lease has no end, it does not expire. Only a read counts for that: a watch
//!   may be late, and the end already announced and acknowledged.
//! - Durations are the leader's, from the ledger and its probes; the shorter one if they differ, since it has just
//!   changed. This node's own flags count only without either, and never for the grace.
//! - A node whose agent was stopped expires as soon as the agent runs again. If the whole machine stood still, its
//!   programs have ended the lease, because they missed their heartbeat for longer than 3/4 T
//!   ([`egress_common::abi::Lease`]).
//!
//! The leader's side, and why it is later, is in `crate::ownership::suspicion` and docs/adr/0012-ledger-and-leases.md.
//! Only nodes that want to hold something read the ledger, and only when a confirmation is about to expire.

use std::time::{Duration, Instant};

use crate::model::ledger::Ledger;

/// Whether this node may hold addresses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LeaseState {
    /// By the lease, or after a start: the deadline in the programs limits what they may emit.
    #[default]
    Holds,
    /// Nothing may be held. The number counts expiries: this one lasts until the reconciler has acknowledged it.
    Expired(u64),
}

/// What the lease depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseDemand {
    /// There are addresses to hold.
    pub wants: bool,
    /// The terms of its lease in the ledger.
    pub terms: LeaseTerms,
    /// The number of the latest [`LeaseState::Expired`] after which the kernel was seen to hold nothing.
    pub obeyed: u64,
}

impl Default for LeaseDemand {
    /// Before anything is known.
    fn default() -> Self {
        Self { wants: true, terms: LeaseTerms::default(), obeyed: 0 }
    }
}

/// The terms of this node's lease in the ledger.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeaseTerms {
    /// How long a lease lasts.
    pub total: Option<Duration>,
    /// How long programs may emit without their agent.
    pub programs: Option<Duration>,
    /// The number by which the lease has no end.
    pub endless: Option<u64>,
    /// The number by which it gets an end again.
    pub ending: Option<u64>,
}

impl LeaseTerms {
    pub fn of(ledger: &Ledger, node: &str) -> Self {
        let Ledger { total, programs, endless, ending, .. } = ledger;
        let of = |all: &std::collections::BTreeMap<String, u64>| all.get(node).copied();
        Self { total: *total, programs: *programs, endless: of(endless), ending: of(ending) }
    }
}

/// Until when the programs may emit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deadline {
    /// Unchanged in the kernel, from the former agent.
    AsItIs,
    At(Instant),
    Never,
    Passed,
}

/// The lease on this node's own monotonic clock.
#[derive(Debug)]
pub struct LeaseHolder {
    /// This node's own total timeout.
    own: Duration,
    /// The leader's, by its probes.
    probed: Option<Duration>,
    /// The latest terms read, before the watch delivers them.
    read_terms: LeaseTerms,
    /// The effective total timeout.
    total: Duration,
    demand: LeaseDemand,
    /// As of when a leader has confirmed this node.
    heard: Option<Instant>,
    /// Start of the latest ledger read that does not suspect this node.
    read: Option<Instant>,
    /// Start of the latest read, whatever its result.
    asked: Option<Instant>,
    /// Start of the first of consecutive reads without a longer pause.
    asks_since: Option<Instant>,
    /// Since when this process runs, or runs again.
    began: Instant,
    /// The first read found it suspected, or the machine was suspended.
    denied: bool,
    /// The lease has no end, by this number of the ledger.
    endless: Option<u64>,
    /// Endless leases up to this number have ended.
    ended: u64,
    /// How often the lease has expired, and whether it still is.
    falls: u64,
    is_down: bool,
}

impl LeaseHolder {
    /// `own` is the total timeout of this node's flag, `now` the start of the process. An endless lease of the former
    /// agent stays endless until the ledger ends it: this node has not acknowledged an end.
    pub fn new(own: Duration, now: Instant, is_endless: bool) -> Self {
        Self {
            own,
            probed: None,
            read_terms: LeaseTerms::default(),
            total: own,
            demand: LeaseDemand::default(),
            heard: None,
            read: None,
            asked: None,
            asks_since: None,
            began: now,
            denied: false,
            // Any number of the ledger that ends it is greater.
            endless: is_endless.then_some(1),
            ended: 0,
            falls: 0,
            is_down: false,
        }
    }

    pub fn set_demand(&mut self, demand: LeaseDemand) {
        let known = std::mem::replace(&mut self.demand, demand).terms;
        if (known.total, known.programs) != (demand.terms.total, demand.terms.programs) {
            (self.read_terms.total, self.read_terms.programs) = (None, None);
        }
        self.note_ending(demand.terms.ending);
        self.set_total();
    }

    /// Records the leader's total timeout from a probe.
    pub fn note_probed(&mut self, total: Option<Duration>) {
        self.probed = total;
        self.set_total();
    }

    fn set_total(&mut self) {
        let leaders = [self.demand.terms.total, self.read_terms.total, self.probed].into_iter().flatten();
        self.total = leaders.min().unwrap_or(self.own);
    }

    /// How long after a confirmation programs may emit without their agent. A leader that does not state it grants no
    /// grace.
    fn programs(&self) -> Duration {
        let leaders = [self.demand.terms.programs, self.read_terms.programs].into_iter().flatten();
        leaders.min().map_or(self.total, |programs| programs.max(self.total))
    }

    pub fn note_heard(&mut self, as_of: Instant) {
        // Confirmations from before a pause do not count.
        if as_of >= self.began {
            self.heard = self.heard.max(Some(as_of));
        }
    }

    /// Records the result of a read that began then.
    pub fn note_read(&mut self, began: Instant, suspected: bool, terms: LeaseTerms) {
        self.read_terms = terms;
        self.set_total();
        self.note_ending(terms.ending);
        self.endless = terms.endless.filter(|number| *number > self.ended);
        if !suspected {
            self.read = self.read.max(Some(began));
        } else if began >= self.began {
            self.denied = true;
        }
    }

    fn note_ending(&mut self, ending: Option<u64>) {
        self.ended = self.ended.max(ending.unwrap_or_default());
        self.endless = self.endless.filter(|number| *number > self.ended);
    }

    /// The number of the latest end of an endless lease that is in force.
    pub fn bounded(&self) -> Option<u64> {
        Some(self.ended).filter(|ended| *ended > 0 && self.endless.is_none())
    }

    /// The machine was suspended, during which this clock stands still: earlier times are invalid, and the lease has
    /// expired, unless it has no end.
    pub fn note_suspended(&mut self, now: Instant) {
        (self.heard, self.read, self.asked, self.denied) = (None, None, None, true);
        self.began = now;
    }

    /// Records the start of a read. After a pause that is longer than any between two reads, the series starts again.
    pub fn note_asked(&mut self, now: Instant) {
        if self.asked.is_none_or(|asked| now > asked + self.total * 2) {
            self.asks_since = Some(now);
        }
        self.asked = Some(now);
    }

    /// The state of the lease. `has_passed` is whether the deadline in the programs has passed.
    pub fn state(&mut self, now: Instant, has_passed: bool) -> LeaseState {
        let is_confirmed = self.is_confirmed(now);
        if !self.is_down && (has_passed || !(is_confirmed || self.is_starting(now))) {
            self.is_down = true;
            self.falls += 1;
        }
        self.is_down &= !is_confirmed || self.demand.obeyed != self.falls;
        if self.is_down { LeaseState::Expired(self.falls) } else { LeaseState::Holds }
    }

    fn is_confirmed(&self, now: Instant) -> bool {
        self.endless.is_some() || self.until().is_some_and(|until| now < until)
    }

    /// Whether there was no time yet for a confirmation or a read: the deadline of the former agent is in force.
    fn is_starting(&self, now: Instant) -> bool {
        self.until().is_none() && now < self.began + self.total && !self.denied
    }

    /// When the lease expires. `None` without any confirmation or read.
    fn until(&self) -> Option<Instant> {
        let heard = self.heard.map(|heard| heard + self.total);
        heard.max(self.read.map(|read| read + self.total * 6 / 10))
    }

    /// Until when the programs may emit in this state.
    pub fn deadline(&self, state: LeaseState) -> Deadline {
        match state {
            LeaseState::Expired(_) => Deadline::Passed,
            LeaseState::Holds if self.endless.is_some() => Deadline::Never,
            LeaseState::Holds => {
                let heard = self.heard.map(|heard| heard + self.programs());
                let read = self.read.map(|read| read + self.total * 16 / 10);
                // Without either, this process has just begun.
                heard.max(read).map_or(Deadline::AsItIs, Deadline::At)
            }
        }
    }

    /// How long this node may stand still and keep its lease. A leader counts from the last answer that it has
    /// received, which may have been sent a quarter of the total timeout before the machine stood still.
    pub fn stall(&self) -> Duration {
        self.total * 3 / 4
    }

    /// When to read the ledger next. `None` while there is no need.
    pub fn ask_at(&self) -> Option<Instant> {
        if !self.demand.wants {
            return None;
        }
        let began = self.began;
        let is_told_otherwise = self.demand.terms.endless.is_some() != self.endless.is_some();
        let due = match self.heard {
            _ if is_told_otherwise => began,
            _ if self.endless.is_some() => return None,
            // Early enough for two answers before the end.
            Some(heard) => heard + self.total * 6 / 10,
            None => began,
        };
        let in_vain_since = self.until().max(self.asks_since);
        let in_vain = self.asked.zip(in_vain_since).map(|(asked, since)| asked.saturating_duration_since(since));
        // After a long isolation, frequent reads do not help.
        let pause = if in_vain.is_some_and(|time| time > self.total * 5) { self.total } else { self.total / 5 };
        Some(self.asked.map_or(due, |asked| due.max(asked + pause)))
    }

    /// When the state next changes by itself.
    pub fn next(&self, now: Instant) -> Option<Instant> {
        let ends = Some(self.until().unwrap_or(self.began + self.total)).filter(|end| *end > now);
        ends.into_iter().chain(self.ask_at()).min()
    }

    /// How long to wait for a read.
    pub fn patience(&self) -> Duration {
        self.total * 6 / 10
    }

    /// How soon reads must be answered so that one is valid until the next.
    pub fn in_time(&self) -> Duration {
        self.total * 4 / 10
    }

    /// Whether a leader has ever confirmed this node, as far as it knows.
    pub fn was_heard(&self) -> bool {
        self.heard.is_some()
    }
}

#[cfg(test)]
mod tests;
