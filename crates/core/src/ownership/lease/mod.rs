//! Whether this node may hold addresses: its lease. Pure; `egress_agent::node::lease_keeper` is the loop around it. T
//! is the leader's total timeout. docs/adr/0012 and 0017 have the proof.
//!
//! - The node may hold addresses for T after a probe whose answer a leader has confirmed, and for 0.6 T after the
//!   request of a ledger that does not suspect it. Otherwise the lease expires, unless a read ledger states that it
//!   has no end.
//! - The programs have their own deadline, since a dead agent disowns nothing: T and the grace after the last
//!   confirmation, 1.6 T after the last read. A new agent keeps it until it is confirmed itself.
//! - A passed deadline is not renewed before the reconciler has disowned everything ([`LeaseState::Expired`]).
//! - The ledger is read only if there are addresses to hold or to take over, and only when a confirmation is about to expire.

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
    pub has_addresses: bool,
    /// The terms of its lease in the ledger.
    pub terms: LeaseTerms,
    /// The number of the latest [`LeaseState::Expired`] after which the kernel held nothing.
    pub acknowledged_expiry: u64,
}

impl Default for LeaseDemand {
    /// Before anything is known.
    fn default() -> Self {
        Self { has_addresses: true, terms: LeaseTerms::default(), acknowledged_expiry: 0 }
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
        let for_node = |all: &std::collections::BTreeMap<String, u64>| all.get(node).copied();
        Self { total: *total, programs: *programs, endless: for_node(endless), ending: for_node(ending) }
    }
}

/// Until when the programs may emit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deadline {
    /// As the former agent has set it in the kernel.
    Unchanged,
    At(Instant),
    Never,
    Passed,
}

/// The lease on this node's own monotonic clock.
#[derive(Debug)]
pub struct LeaseHolder {
    /// This node's own total timeout.
    own_total: Duration,
    /// The leader's, by its probes.
    probed: Option<Duration>,
    /// The latest terms read, before the watch delivers them.
    read_terms: LeaseTerms,
    /// The effective total timeout.
    total: Duration,
    demand: LeaseDemand,
    /// As of when a leader has confirmed this node.
    confirmed: Option<Instant>,
    /// Start of the latest ledger read that does not suspect this node.
    read: Option<Instant>,
    /// Start of the latest read, whatever its result.
    last_read_started: Option<Instant>,
    /// Start of the first of consecutive reads without a longer pause.
    reading_since: Option<Instant>,
    /// Since when this process runs, or runs again.
    started: Instant,
    /// The first read found it suspected, or the machine was suspended.
    is_denied: bool,
    /// The lease has no end, by this number of the ledger.
    endless: Option<u64>,
    /// Endless leases up to this number have ended.
    ended_up_to: u64,
    /// How often the lease has expired, and whether it still is.
    expiries: u64,
    is_expired: bool,
}

impl LeaseHolder {
    /// `own` is the total timeout of this node's flag, `now` the start of the process. An endless lease of the former
    /// agent stays endless until the ledger ends it: this node has not acknowledged an end.
    pub fn new(own: Duration, now: Instant, is_endless: bool) -> Self {
        Self {
            own_total: own,
            probed: None,
            read_terms: LeaseTerms::default(),
            total: own,
            demand: LeaseDemand::default(),
            confirmed: None,
            read: None,
            last_read_started: None,
            reading_since: None,
            started: now,
            is_denied: false,
            // Any number of the ledger that ends it is greater.
            endless: is_endless.then_some(1),
            ended_up_to: 0,
            expiries: 0,
            is_expired: false,
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
        self.total = leaders.min().unwrap_or(self.own_total);
    }

    /// How long after a confirmation programs may emit without their agent. A leader that does not state it grants no
    /// grace.
    fn programs(&self) -> Duration {
        let leaders = [self.demand.terms.programs, self.read_terms.programs].into_iter().flatten();
        leaders.min().map_or(self.total, |programs| programs.max(self.total))
    }

    pub fn note_confirmed(&mut self, as_of: Instant) {
        // Confirmations from before a pause do not count.
        if as_of >= self.started {
            self.confirmed = self.confirmed.max(Some(as_of));
        }
    }

    /// Records the result of a read that began then.
    pub fn note_read(&mut self, began: Instant, suspected: bool, terms: LeaseTerms) {
        self.read_terms = terms;
        self.set_total();
        self.note_ending(terms.ending);
        self.endless = terms.endless.filter(|number| *number > self.ended_up_to);
        if !suspected {
            self.read = self.read.max(Some(began));
        } else if began >= self.started {
            self.is_denied = true;
        }
    }

    fn note_ending(&mut self, ending: Option<u64>) {
        self.ended_up_to = self.ended_up_to.max(ending.unwrap_or_default());
        self.endless = self.endless.filter(|number| *number > self.ended_up_to);
    }

    /// The number of the latest end of an endless lease that is in force.
    pub fn bounded(&self) -> Option<u64> {
        Some(self.ended_up_to).filter(|ended| *ended > 0 && self.endless.is_none())
    }

    /// The machine was suspended, during which this clock stands still: earlier times are invalid, and the lease has
    /// expired, unless it has no end.
    pub fn note_suspended(&mut self, now: Instant) {
        (self.confirmed, self.read, self.last_read_started, self.is_denied) = (None, None, None, true);
        self.started = now;
    }

    /// Records the start of a read. After a pause that is longer than any between two reads, the series starts again.
    pub fn note_read_started(&mut self, now: Instant) {
        if self.last_read_started.is_none_or(|asked| now > asked + self.total * 2) {
            self.reading_since = Some(now);
        }
        self.last_read_started = Some(now);
    }

    /// The state of the lease. `has_passed` is whether the deadline in the programs has passed.
    pub fn state(&mut self, now: Instant, has_passed: bool) -> LeaseState {
        let is_confirmed = self.is_confirmed(now);
        if !self.is_expired && (has_passed || !(is_confirmed || self.is_starting(now))) {
            self.is_expired = true;
            self.expiries += 1;
        }
        self.is_expired &= !is_confirmed || self.demand.acknowledged_expiry != self.expiries;
        if self.is_expired { LeaseState::Expired(self.expiries) } else { LeaseState::Holds }
    }

    fn is_confirmed(&self, now: Instant) -> bool {
        self.endless.is_some() || self.until().is_some_and(|until| now < until)
    }

    /// Whether there was no time yet for a confirmation or a read: the deadline of the former agent is in force.
    fn is_starting(&self, now: Instant) -> bool {
        self.until().is_none() && now < self.started + self.total && !self.is_denied
    }

    /// When the lease expires. `None` without any confirmation or read.
    fn until(&self) -> Option<Instant> {
        let confirmed = self.confirmed.map(|confirmed| confirmed + self.total);
        confirmed.max(self.read.map(|read| read + self.total * 6 / 10))
    }

    /// Until when the programs may emit in this state.
    pub fn deadline(&self, state: LeaseState) -> Deadline {
        match state {
            LeaseState::Expired(_) => Deadline::Passed,
            LeaseState::Holds if self.endless.is_some() => Deadline::Never,
            LeaseState::Holds => {
                let confirmed = self.confirmed.map(|confirmed| confirmed + self.programs());
                let read = self.read.map(|read| read + self.total * 16 / 10);
                // Without either, this process has just begun.
                confirmed.max(read).map_or(Deadline::Unchanged, Deadline::At)
            }
        }
    }

    /// How long this node may be suspended and keep its lease. A leader counts from the last answer that it has
    /// received, which may have been sent a quarter of the total timeout before the suspension.
    pub fn longest_stall(&self) -> Duration {
        self.total * 3 / 4
    }

    /// When to read the ledger next. `None` while there is no need.
    pub fn next_read_at(&self) -> Option<Instant> {
        if !self.demand.has_addresses {
            return None;
        }
        let began = self.started;
        let terms_differ = self.demand.terms.endless.is_some() != self.endless.is_some();
        let due = match self.confirmed {
            _ if terms_differ => began,
            _ if self.endless.is_some() => return None,
            // Early enough for two answers before the end.
            Some(confirmed) => confirmed + self.total * 6 / 10,
            None => began,
        };
        let unanswered_since = self.until().max(self.reading_since);
        let unanswered =
            self.last_read_started.zip(unanswered_since).map(|(asked, since)| asked.saturating_duration_since(since));
        // After a long isolation, frequent reads do not help.
        let pause = if unanswered.is_some_and(|time| time > self.total * 5) { self.total } else { self.total / 5 };
        Some(self.last_read_started.map_or(due, |asked| due.max(asked + pause)))
    }

    /// When the state next changes by itself.
    pub fn next_change_at(&self, now: Instant) -> Option<Instant> {
        let end = Some(self.until().unwrap_or(self.started + self.total)).filter(|end| *end > now);
        end.into_iter().chain(self.next_read_at()).min()
    }

    /// How long to wait for a read.
    pub fn read_timeout(&self) -> Duration {
        self.total * 6 / 10
    }

    /// How soon reads must be answered so that one is valid until the next.
    pub fn read_deadline(&self) -> Duration {
        self.total * 4 / 10
    }

    /// Whether a leader has ever confirmed this node, as far as it knows.
    pub fn was_confirmed(&self) -> bool {
        self.confirmed.is_some()
    }
}

#[cfg(test)]
mod tests;
