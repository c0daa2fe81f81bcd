//! Whether this node may hold addresses: its leases. [`Fence`] is pure, [`keep`] is the loop around it. [`obey`]: single
//! addresses that it is told to let go of by the way of probes. [`regain`]: what it may have back by them.
//!
//! A gateway that is cut off cannot be told that its addresses are given to another. So it gives them up by itself, before
//! the leader may give them away. It may hold addresses while
//!
//! - **it has surely been heard** within the total timeout: a leader has the answer to a probe that came in here then
//!   (`crate::health::touch`); or
//! - **it has read the ledger** of late, asked for less than 6/10 of the timeout ago, and is not suspected there.
//!
//! The leader's side, and why this is before, is in `controller::suspicion` and docs/adr/0012-ledger-and-leases.md. The
//! ledger is read only by nodes that want to hold something, and only while what was heard is about to run out: between two
//! leaders, or where only the management network is cut.
//!
//! The timeout is the leader's, as the ledger and its probes say; the shorter one where they differ, for it has just changed.
//! This node's own flag counts where neither says anything.
//!
//! A node whose leader gives nothing away for silence holds no lease, and nor does one that was never probed while the
//! ledger speaks of none.

mod keep;
mod orders;
pub mod regain;

use std::time::{Duration, Instant};

pub use keep::{Heard, keep};
pub use orders::obey;

use regain::{Addresses, Given};

use crate::reconcile::ties::{Stake, Standing};

/// The pure rule, on this node's own monotonic clock.
#[derive(Debug)]
pub struct Fence {
    /// This node's own total timeout.
    own: Duration,
    /// The leader's, as its probes say.
    probed: Option<Duration>,
    /// The same as it was read of late, before the watch has told it.
    read_total: Option<Duration>,
    /// That by which leases last.
    total: Duration,
    stake: Stake,
    /// As of when a leader has surely heard this node.
    heard: Option<Instant>,
    /// When the latest reading of the ledger that does not suspect this node began.
    read: Option<Instant>,
    /// When the latest reading began, whatever came of it.
    asked: Option<Instant>,
    /// Since when this node holds leases, or has run again.
    began: Option<Instant>,
    /// It was suspected when it asked, before anything else was known.
    denied: bool,
    /// What it holds whatever its leases are.
    given: Given,
}

impl Fence {
    /// `own` is the total timeout of this node's flag; zero where it would not probe anybody.
    pub fn new(own: Duration) -> Self {
        Self {
            own,
            probed: None,
            read_total: None,
            total: own,
            stake: Stake::default(),
            heard: None,
            read: None,
            asked: None,
            began: None,
            denied: false,
            given: Given::default(),
        }
    }

    pub fn set_stake(&mut self, stake: Stake, now: Instant) {
        if std::mem::replace(&mut self.stake, stake).total != stake.total {
            self.read_total = None;
        }
        self.set_total();
        self.begin(now);
    }

    /// What a probe says of the leader's total timeout.
    pub fn note_probed(&mut self, total: Option<Duration>) {
        self.probed = total;
        self.set_total();
    }

    fn set_total(&mut self) {
        let leaders = [self.stake.total, self.read_total, self.probed].into_iter().flatten();
        self.total = leaders.filter(|total| !total.is_zero()).min().unwrap_or(self.own);
    }

    pub fn note_heard(&mut self, as_of: Instant) {
        // What was before a pause is nothing any more.
        if self.began.is_none_or(|began| as_of >= began) {
            self.heard = self.heard.max(Some(as_of));
            self.begin(as_of);
        }
    }

    /// A reading that began then has been answered. `total` is the leader's timeout as it stands there.
    pub fn note_read(&mut self, began: Instant, suspected: bool, total: Option<Duration>) {
        self.read_total = total;
        self.set_total();
        if !suspected {
            self.read = self.read.max(Some(began));
        } else if self.began.is_some_and(|since| began >= since) {
            self.denied = true;
        }
    }

    pub fn note_given(&mut self, given: Given) {
        self.given = given;
    }

    /// What this node may hold for having been given it back, and until when.
    pub fn regained(&self, now: Instant) -> Option<(&Addresses, Instant)> {
        let until = self.given.until?;
        (now < until).then_some((&self.given.addresses, until))
    }

    /// This process has not run for long, and has just begun to: all is as after a start.
    pub fn wake(&mut self, now: Instant) {
        (self.heard, self.read, self.asked, self.denied) = (None, None, None, false);
        self.began = self.began.and(Some(now));
    }

    /// For how long a process that lives may be kept from running. Beyond that it was stopped.
    pub fn longest_pause(&self) -> Duration {
        self.total * 2
    }

    /// A reading begins.
    pub fn note_asked(&mut self, now: Instant) {
        self.asked = Some(now);
    }

    fn begin(&mut self, now: Instant) {
        let is_probed = self.heard.is_some() || self.began.is_some();
        let holds_leases = !self.total.is_zero() && (is_probed || self.stake.leases == Some(true));
        self.began = if holds_leases { self.began.or(Some(now)) } else { None };
    }

    pub fn standing(&self, now: Instant) -> Standing {
        let Some(began) = self.began else {
            let unknown = self.stake.leases.is_none() && !self.total.is_zero();
            return if unknown { Standing::Undecided } else { Standing::Holds };
        };
        match self.until() {
            Some(until) if now < until => Standing::Holds,
            // The programs run on, whoever ran before: a restart is no reason to stop them.
            None if now < began + self.total && !self.denied => Standing::Undecided,
            _ => Standing::Fenced,
        }
    }

    /// When the leases run out. `None` where nothing was ever heard or read.
    fn until(&self) -> Option<Instant> {
        let heard = self.heard.map(|heard| heard + self.total);
        heard.max(self.read.map(|read| read + self.total * 6 / 10))
    }

    /// When to read the ledger next. `None` while there is no need.
    pub fn ask_at(&self) -> Option<Instant> {
        let began = self.began.filter(|_| self.stake.wants)?;
        // As long before the end as an answer may take, and twice.
        let due = self.heard.map_or(began, |heard| heard + self.total * 6 / 10);
        let since_end = self.asked.zip(self.until()).map(|(asked, until)| asked.saturating_duration_since(until));
        // Whoever has been cut off for long is no better off by asking often.
        let pause = if since_end.is_some_and(|since| since > self.total * 5) { self.total } else { self.total / 5 };
        Some(self.asked.map_or(due, |asked| due.max(asked + pause)))
    }

    /// When something changes by itself next.
    pub fn next(&self, now: Instant) -> Option<Instant> {
        let ends = self.until().or(self.began.map(|began| began + self.total)).filter(|end| *end > now);
        let regained = self.regained(now).map(|(_, until)| until);
        ends.into_iter().chain(self.ask_at()).chain(regained).min()
    }

    /// How long a reading is worth waiting for.
    pub fn patience(&self) -> Duration {
        self.total * 6 / 10
    }
}

#[cfg(test)]
mod schedule;
#[cfg(test)]
mod tests;
