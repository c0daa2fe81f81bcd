//! Whether this node may hold addresses: its lease. [`LeaseHolder`] is pure, [`keep`] is the loop around it. [`obey`]: single
//! addresses that it is told to let go of by the way of probes.
//!
//! A gateway that is cut off cannot be told that its addresses are given to another. So it gives them up by itself, before
//! the leader may give them away. It may hold addresses while
//!
//! - **it has surely been heard** within the total timeout T: a leader has the answer to a probe that came in here then
//!   (`egress_agent::health::leader_contact`); or
//! - **it has read the ledger** of late, asked for less than 0.6 T ago, and is not suspected there.
//!
//! When neither is so the node is fenced: the deadline in its programs is set to zero, and its addresses are disowned. An
//! agent that is dead or stopped fences nothing. So its programs have a **deadline** of their own, renewed with each
//! confirmation: T and the grace behind the last one, or 1.6 T behind the last reading. A new agent leaves it as it is until
//! it is confirmed itself.
//!
//! A deadline that has passed, or was set to zero, is not renewed before the node's half has disowned all that the kernel
//! had ([`LeaseState::Fenced`] bears a number that it answers with): the addresses may be other nodes' by now, and are taken
//! up again only when ledger and objects have been read again past every cache (`crate::ownership::holdings`).
//!
//! Where the ledger says that this node's lease has no end, since no other node could host its addresses, it has none, and the
//! node is not fenced. That is believed of a reading alone: a watch may be late, and the end announced and obeyed by then.
//!
//! The leader's side, and why this is before, is in `controller::suspicion` and docs/adr/0012-ledger-and-leases.md. The
//! ledger is read only by nodes that want to hold something, and only while what was heard is about to run out: between two
//! leaders, or where only the management network is cut.
//!
//! The times are the leader's, as the ledger and its probes say; the shorter one where they differ, for it has just changed.
//! This node's own flags count where neither says anything, and for the grace not even then.
//!
//! A node whose agent was stopped is fenced as soon as the agent runs again, when the lease has run out: the deadline of its
//! programs, made for agents that die, is later. Where the whole machine stood still, its programs have ended the lease by then:
//! they miss their heartbeat for longer than 3/4 T ([`egress_common::abi::Lease`]).
//!
//! Before the first confirmation, after a start, the deadline of the former agent is the bound, and nothing else is needed:
//! the kernel keeps what it holds. A deadline that has passed by then is one that was lost.

use std::time::{Duration, Instant};

use crate::model::ledger::Ledger;

/// Whether this node may hold addresses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LeaseState {
    /// By the lease, or after a start: the deadline in the programs bounds what they may emit.
    #[default]
    Holds,
    /// Nothing may be held. With a number for each time that this comes about: it lasts until the node's half has said that it
    /// has obeyed this one.
    Fenced(u64),
}

/// What the fence must know of this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseDemand {
    /// There are addresses to hold.
    pub wants: bool,
    /// What the ledger says of its lease.
    pub terms: LeaseTerms,
    /// The number of the latest [`LeaseState::Fenced`] upon which the kernel was seen to hold nothing.
    pub obeyed: u64,
}

impl Default for LeaseDemand {
    /// Before anything is known.
    fn default() -> Self {
        Self { wants: true, terms: LeaseTerms::default(), obeyed: 0 }
    }
}

/// What the ledger says of this node's lease.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeaseTerms {
    /// How long a lease lasts.
    pub total: Option<Duration>,
    /// How long programs may emit without their agent.
    pub programs: Option<Duration>,
    /// The lease has no end, by this number.
    pub endless: Option<u64>,
    /// It is to have one again.
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
    /// As it stands in the kernel, as the former agent left it.
    AsItIs,
    At(Instant),
    Never,
    Passed,
}

/// The pure rule, on this node's own monotonic clock.
#[derive(Debug)]
pub struct LeaseHolder {
    /// This node's own total timeout.
    own: Duration,
    /// The leader's, as its probes say.
    probed: Option<Duration>,
    /// What was read of late, before the watch has told it.
    read_terms: LeaseTerms,
    /// That by which leases last.
    total: Duration,
    stake: LeaseDemand,
    /// As of when a leader has surely heard this node.
    heard: Option<Instant>,
    /// When the latest reading of the ledger that does not suspect this node began.
    read: Option<Instant>,
    /// When the latest reading began, whatever came of it.
    asked: Option<Instant>,
    /// When the first reading began of those that have followed each other without a longer pause.
    asks_since: Option<Instant>,
    /// Since when this process runs, or runs again.
    began: Instant,
    /// It was suspected when it asked, before anything else was known; or the machine was suspended.
    denied: bool,
    /// The lease has no end, by this number of the ledger.
    endless: Option<u64>,
    /// What came before this number has ended.
    ended: u64,
    /// How often the lease has been lost, and whether it still is.
    falls: u64,
    is_down: bool,
}

impl LeaseHolder {
    /// `own` is the total timeout of this node's flag, `now` when the process began. A lease that the former agent has left
    /// without an end has none before the ledger says so: this node has not said that it has one.
    pub fn new(own: Duration, now: Instant, is_endless: bool) -> Self {
        Self {
            own,
            probed: None,
            read_terms: LeaseTerms::default(),
            total: own,
            stake: LeaseDemand::default(),
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

    pub fn set_stake(&mut self, stake: LeaseDemand) {
        let known = std::mem::replace(&mut self.stake, stake).terms;
        if (known.total, known.programs) != (stake.terms.total, stake.terms.programs) {
            (self.read_terms.total, self.read_terms.programs) = (None, None);
        }
        self.note_ending(stake.terms.ending);
        self.set_total();
    }

    /// What a probe says of the leader's total timeout.
    pub fn note_probed(&mut self, total: Option<Duration>) {
        self.probed = total;
        self.set_total();
    }

    fn set_total(&mut self) {
        let leaders = [self.stake.terms.total, self.read_terms.total, self.probed].into_iter().flatten();
        self.total = leaders.min().unwrap_or(self.own);
    }

    /// How long after a confirmation programs may emit without their agent. Of a leader that has not said it, not longer.
    fn programs(&self) -> Duration {
        let leaders = [self.stake.terms.programs, self.read_terms.programs].into_iter().flatten();
        leaders.min().map_or(self.total, |programs| programs.max(self.total))
    }

    pub fn note_heard(&mut self, as_of: Instant) {
        // What was before a pause is nothing any more.
        if as_of >= self.began {
            self.heard = self.heard.max(Some(as_of));
        }
    }

    /// A reading that began then has been answered.
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

    /// The number of the latest end that a lease without one was to have, where it has one.
    pub fn bounded(&self) -> Option<u64> {
        Some(self.ended).filter(|ended| *ended > 0 && self.endless.is_none())
    }

    /// The machine was suspended, in which this clock stands still: all that was known is of another time, and the lease is
    /// lost, but for one without an end.
    pub fn note_suspended(&mut self, now: Instant) {
        (self.heard, self.read, self.asked, self.denied) = (None, None, None, true);
        self.began = now;
    }

    /// A reading begins. After a pause that is longer than any between two readings there was nothing to hold, or it was held
    /// without them.
    pub fn note_asked(&mut self, now: Instant) {
        if self.asked.is_none_or(|asked| now > asked + self.total * 2) {
            self.asks_since = Some(now);
        }
        self.asked = Some(now);
    }

    /// Where this node stands. `has_passed` says whether the deadline in the programs has.
    pub fn stand(&mut self, now: Instant, has_passed: bool) -> LeaseState {
        let is_confirmed = self.is_confirmed(now);
        if !self.is_down && (has_passed || !(is_confirmed || self.is_starting(now))) {
            self.is_down = true;
            self.falls += 1;
        }
        self.is_down &= !is_confirmed || self.stake.obeyed != self.falls;
        if self.is_down { LeaseState::Fenced(self.falls) } else { LeaseState::Holds }
    }

    fn is_confirmed(&self, now: Instant) -> bool {
        self.endless.is_some() || self.until().is_some_and(|until| now < until)
    }

    /// There was no time yet to be heard, or to read: the deadline of the former agent runs on.
    fn is_starting(&self, now: Instant) -> bool {
        self.until().is_none() && now < self.began + self.total && !self.denied
    }

    /// When the lease runs out. `None` where nothing was ever heard or read.
    fn until(&self) -> Option<Instant> {
        let heard = self.heard.map(|heard| heard + self.total);
        heard.max(self.read.map(|read| read + self.total * 6 / 10))
    }

    /// Until when the programs of a node that stands so may emit.
    pub fn deadline(&self, standing: LeaseState) -> Deadline {
        match standing {
            LeaseState::Fenced(_) => Deadline::Passed,
            LeaseState::Holds if self.endless.is_some() => Deadline::Never,
            LeaseState::Holds => {
                let heard = self.heard.map(|heard| heard + self.programs());
                let read = self.read.map(|read| read + self.total * 16 / 10);
                // None of either: this process has just begun.
                heard.max(read).map_or(Deadline::AsItIs, Deadline::At)
            }
        }
    }

    /// For how long this node may stand still and keep its lease. A leader counts from the last answer that it has received, which
    /// may have left a quarter of the total timeout before the machine stood still.
    pub fn stall(&self) -> Duration {
        self.total * 3 / 4
    }

    /// When to read the ledger next. `None` while there is no need.
    pub fn ask_at(&self) -> Option<Instant> {
        if !self.stake.wants {
            return None;
        }
        let began = self.began;
        let is_told_otherwise = self.stake.terms.endless.is_some() != self.endless.is_some();
        let due = match self.heard {
            _ if is_told_otherwise => began,
            _ if self.endless.is_some() => return None,
            // As long before the end as an answer may take, and twice.
            Some(heard) => heard + self.total * 6 / 10,
            None => began,
        };
        let in_vain_since = self.until().max(self.asks_since);
        let in_vain = self.asked.zip(in_vain_since).map(|(asked, since)| asked.saturating_duration_since(since));
        // A node that has been cut off for long is no better off by asking often.
        let pause = if in_vain.is_some_and(|time| time > self.total * 5) { self.total } else { self.total / 5 };
        Some(self.asked.map_or(due, |asked| due.max(asked + pause)))
    }

    /// When something changes by itself next.
    pub fn next(&self, now: Instant) -> Option<Instant> {
        let ends = Some(self.until().unwrap_or(self.began + self.total)).filter(|end| *end > now);
        ends.into_iter().chain(self.ask_at()).min()
    }

    /// How long a reading is worth waiting for.
    pub fn patience(&self) -> Duration {
        self.total * 6 / 10
    }

    /// How soon readings must be answered so that one lasts until the next is.
    pub fn in_time(&self) -> Duration {
        self.total * 4 / 10
    }

    /// Whether a leader has ever heard this node, as far as it knows.
    pub fn was_heard(&self) -> bool {
        self.heard.is_some()
    }
}

#[cfg(test)]
mod tests;
