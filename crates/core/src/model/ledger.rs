//! What the leader has recorded for everybody, outside of the objects: addresses on their way, and nodes that are suspected.
//!
//! One value, written as a whole by the leader, followed by every agent. It outlives the leader, so a new one goes on from
//! it (`controller::handover`); what an agent makes of it is [`crate::ownership::holdings`]'s.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

/// An address on its way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HandOver {
    /// No other hand-over ever had it, so that a node's word is known to be about this one.
    pub number: u64,
    /// The node that holds the address until it has let go.
    pub from: String,
    /// The node that gets it then. `None` while no node can take it, or nobody lists it.
    pub to: Option<String>,
}

/// No number is greater, whatever somebody writes into an annotation: there is room behind it for all that ever come.
const GREATEST: u64 = 1 << 60;
/// How far an acknowledgement's number may be ahead of the ledger's last, or of the time in milliseconds.
const MOST_AHEAD: u64 = 1_000_000;

/// Addresses with the numbers of their hand-overs: what a node is to let go of, or says that it has.
pub type Acknowledgements = BTreeMap<IpAddr, u64>;

/// The hand-overs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Records {
    /// The greatest number so far.
    pub last: u64,
    pub open: BTreeMap<IpAddr, HandOver>,
}

/// All that is recorded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ledger {
    /// The API server's; empty where it has no ledger.
    pub version: String,
    /// The leader that wrote last. A new one writes this before anything else, so that a former one writes in vain.
    pub leader: String,
    /// The total timeout that the leader goes by: leases last that long, whatever an agent's own flag says. `None` where a
    /// leader of a former version wrote it.
    pub total: Option<Duration>,
    /// A longer one of former leaders, while agents may hold by it that have not heard of the change.
    pub former_total: Option<Duration>,
    /// How long after it was heard last an agent's programs may emit, where it cannot fence them itself: the total timeout and
    /// the grace of the leader. `None` as above: as long as the lease then.
    pub programs: Option<Duration>,
    /// A longer one of former leaders, likewise.
    pub former_programs: Option<Duration>,
    pub records: Records,
    /// The nodes that an open hand-over, by its number, has named before as its new node: the old one may have handed the
    /// address over to one of them.
    pub former_targets: BTreeMap<u64, BTreeSet<String>>,
    /// Nodes that have not been heard for a while, with a number for each time that this began.
    pub suspects: BTreeMap<String, u64>,
    /// Nodes whose leases have no end, since no other node could host any of their addresses, likewise.
    pub endless: BTreeMap<String, u64>,
    /// Nodes whose leases are to have an end again, likewise: until their agents say that they have.
    pub ending: BTreeMap<String, u64>,
}

impl Ledger {
    /// While a hand-over of an address is open nobody but its new node may hold it.
    pub fn lets_hold(&self, node: &str, address: &IpAddr) -> bool {
        self.records.open.get(address).is_none_or(|record| record.to.as_deref() == Some(node))
    }

    /// Records a hand-over that begins, or has another new node.
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

    /// A hand-over is over.
    pub fn forget(&mut self, address: &IpAddr) {
        if let Some(record) = self.records.open.remove(address) {
            self.former_targets.remove(&record.number);
        }
    }

    /// Whether the hand-over names this node as its new one, or has named it.
    pub fn has_named(&self, record: &HandOver, node: &str) -> bool {
        let former = self.former_targets.get(&record.number);
        record.to.as_deref() == Some(node) || former.is_some_and(|former| former.contains(node))
    }

    /// What this node is to let go of.
    pub fn leaving(&self, node: &str) -> Acknowledgements {
        let records = self.records.open.iter().filter(|(_, record)| record.from == node);
        records.map(|(address, record)| (*address, record.number)).collect()
    }

    /// A number that nothing in the ledger has had.
    pub fn next_number(&self) -> u64 {
        let numbers = self.suspects.values().chain(self.endless.values()).chain(self.ending.values());
        numbers.copied().max().unwrap_or_default().max(self.records.last) + 1
    }

    /// Goes on behind all numbers that may be about still, where this ledger knows of none: what stood there before was lost.
    /// `words` are those of nodes' words. Others remember numbers, too, so it begins at the time in milliseconds: no cluster
    /// has a thousand hand-overs a second.
    pub fn count_on(&mut self, words: impl Iterator<Item = u64>, unix_ms: u64) {
        let is_sane = |number: &u64| *number <= GREATEST;
        let last = Some(self.records.last).filter(|last| *last > 0 && is_sane(last)).unwrap_or(unix_ms);
        // Any agent's token can write any number: one may be ahead of the ledger's by what a ledger that was lost could have given
        // out, and by no more, so that numbers never run out.
        let limit = last.max(unix_ms).saturating_add(MOST_AHEAD);
        self.records.last = words.filter(|number| *number <= limit).fold(last, u64::max);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_ledger_repeats_no_number() {
        let counted = |last, words: &[u64], unix_ms| {
            let records = Records { last, ..Records::default() };
            let mut ledger = Ledger { records, ..Ledger::default() };
            ledger.count_on(words.iter().copied(), unix_ms);
            ledger.next_number()
        };
        assert_eq!(counted(0, &[], 5_000), 5_001);
        assert_eq!(counted(0, &[7_000], 5_000), 7_001, "a wall clock that has gone back");
        assert_eq!(counted(9, &[3], 5_000), 10, "it was not lost");
        assert_eq!(counted(9, &[12], 5_000), 13, "an older copy of it was put back");
        for never in [u64::MAX, GREATEST, 5_001 + MOST_AHEAD] {
            assert_eq!(counted(9, &[never], 5_000), 10, "no agent has said that");
        }
        assert_eq!(counted(9, &[5_000 + MOST_AHEAD], 5_000), 5_001 + MOST_AHEAD);
        assert_eq!(counted(u64::MAX, &[], 5_000), 5_001);
    }
}
