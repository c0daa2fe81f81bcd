//! The ledger: what the leader records outside of the objects, that is open hand-overs and suspected nodes.
//!
//! It is one value, written as a whole by the leader and followed by every agent. It outlives the leader, so that a new
//! one continues from it (`crate::ownership::handover`). [`crate::ownership::node_ownership`] is the agent's use of it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

/// An address that changes its node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HandOver {
    /// Unique among all hand-overs, so that an acknowledgement refers to exactly one.
    pub number: u64,
    /// The old node: it holds the address until it releases it.
    pub from: String,
    /// The new node. `None` while no node can take the address, or no object lists it.
    pub to: Option<String>,
}

/// The greatest valid number, with room above for all numbers that will ever be used.
const GREATEST: u64 = 1 << 60;
/// How far an acknowledgement's number may be ahead of the ledger's last, or of the time in milliseconds.
const MOST_AHEAD: u64 = 1_000_000;

/// Addresses with the numbers of their hand-overs: to be released, or acknowledged as released.
pub type Acknowledgements = BTreeMap<IpAddr, u64>;

/// The open hand-overs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Records {
    /// The greatest number so far.
    pub last: u64,
    pub open: BTreeMap<IpAddr, HandOver>,
}

/// The whole ledger.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ledger {
    /// The API server's resource version; empty if there is no ledger.
    pub version: String,
    /// The leader that wrote last. A new leader writes this first, so that later writes of the former one fail.
    pub leader: String,
    /// The leader's total timeout: leases last that long, whatever an agent's own flag says. `None` if a leader of an
    /// older version wrote the ledger.
    pub total: Option<Duration>,
    /// A longer total timeout of former leaders, while agents that have not seen the change may use it.
    pub former_total: Option<Duration>,
    /// How long programs may emit after their agent was last confirmed, if the agent cannot end the lease itself: the
    /// total timeout and the leader's grace. `None` as above: then as long as the lease.
    pub programs: Option<Duration>,
    /// A longer one of former leaders, likewise.
    pub former_programs: Option<Duration>,
    pub records: Records,
    /// Former new nodes of an open hand-over, by its number: the old node may have handed the address over to one of
    /// them.
    pub former_targets: BTreeMap<u64, BTreeSet<String>>,
    /// Nodes that have not answered for a while, with a unique number for each suspicion.
    pub suspects: BTreeMap<String, u64>,
    /// Nodes whose leases have no end because no other node could host their addresses, numbered likewise.
    pub endless: BTreeMap<String, u64>,
    /// Nodes whose leases get an end again, numbered likewise, until their agents acknowledge it.
    pub ending: BTreeMap<String, u64>,
}

impl Ledger {
    /// While a hand-over is open, only its new node may hold the address.
    pub fn lets_hold(&self, node: &str, address: &IpAddr) -> bool {
        self.records.open.get(address).is_none_or(|record| record.to.as_deref() == Some(node))
    }

    /// Records a new hand-over, or another new node for an open one.
    pub fn record(&mut self, address: IpAddr, hand_over: HandOver) {
        self.records.last = self.records.last.max(hand_over.number);
        let former = self.records.open.insert(address, hand_over.clone());
        match former {
            Some(HandOver { number, to: Some(target), .. })
                if number == hand_over.number && hand_over.to.as_ref() != Some(&target) =>
            {
                self.former_targets.entry(number).or_default().insert(target);
            }
            Some(HandOver { number, .. }) if number != hand_over.number => drop(self.former_targets.remove(&number)),
            Some(_) | None => {}
        }
    }

    /// Removes a finished hand-over.
    pub fn forget(&mut self, address: &IpAddr) {
        if let Some(record) = self.records.open.remove(address) {
            self.former_targets.remove(&record.number);
        }
    }

    /// Whether this node is, or was, the new node of the hand-over.
    pub fn has_named(&self, record: &HandOver, node: &str) -> bool {
        let former = self.former_targets.get(&record.number);
        record.to.as_deref() == Some(node) || former.is_some_and(|former| former.contains(node))
    }

    /// The addresses that this node has to release.
    pub fn leaving(&self, node: &str) -> Acknowledgements {
        let records = self.records.open.iter().filter(|(_, record)| record.from == node);
        records.map(|(address, record)| (*address, record.number)).collect()
    }

    /// A number that the ledger has not used.
    pub fn next_number(&self) -> u64 {
        let numbers = self.suspects.values().chain(self.endless.values()).chain(self.ending.values());
        numbers.copied().max().unwrap_or_default().max(self.records.last) + 1
    }

    /// Continues after all numbers that may still be in use, if this ledger knows none because the previous one was
    /// lost. `numbers` are those of acknowledgements. Other parties remember numbers, too, so counting starts at the
    /// time in milliseconds: no cluster has a thousand hand-overs a second.
    pub fn continue_after(&mut self, numbers: impl Iterator<Item = u64>, unix_ms: u64) {
        let is_sane = |number: &u64| *number <= GREATEST;
        let last = Some(self.records.last).filter(|last| *last > 0 && is_sane(last)).unwrap_or(unix_ms);
        // Any agent can write any number. A number ahead of the ledger's counts only as far as a lost ledger could have
        // issued it, so that numbers never run out.
        let limit = last.max(unix_ms).saturating_add(MOST_AHEAD);
        self.records.last = numbers.filter(|number| *number <= limit).fold(last, u64::max);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_ledger_repeats_no_number() {
        let counted = |last, numbers: &[u64], unix_ms| {
            let records = Records { last, ..Records::default() };
            let mut ledger = Ledger { records, ..Ledger::default() };
            ledger.continue_after(numbers.iter().copied(), unix_ms);
            ledger.next_number()
        };
        assert_eq!(counted(0, &[], 5_000), 5_001);
        assert_eq!(counted(0, &[7_000], 5_000), 7_001, "a wall clock that has gone back");
        assert_eq!(counted(9, &[3], 5_000), 10, "it was not lost");
        assert_eq!(counted(9, &[12], 5_000), 13, "an older copy of it was put back");
        for never in [u64::MAX, GREATEST, 5_001 + MOST_AHEAD] {
            assert_eq!(counted(9, &[never], 5_000), 10, "no agent has written that");
        }
        assert_eq!(counted(9, &[5_000 + MOST_AHEAD], 5_000), 5_001 + MOST_AHEAD);
        assert_eq!(counted(u64::MAX, &[], 5_000), 5_001);
    }
}
