//! What the leader has recorded for everybody, outside of the objects: addresses on their way, and nodes that are suspected.
//!
//! One value, written as a whole by the leader, followed by every agent. It outlives the leader, so a new one goes on from
//! it (`controller::handover`); what an agent makes of it is [`super::tenure`]'s.

use std::collections::BTreeMap;
use std::net::IpAddr;

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
    /// Whether nodes are probed, so that agents hold leases: an address may leave a node that says nothing.
    pub leases: bool,
    pub records: Records,
    /// Nodes that have not been heard for a while, with a number for each time that this began.
    pub suspects: BTreeMap<String, u64>,
}

impl Ledger {
    /// While a hand-over of an address is open nobody but its new node may hold it.
    pub fn lets_hold(&self, node: &str, address: &IpAddr) -> bool {
        self.records.open.get(address).is_none_or(|record| record.to.as_deref() == Some(node))
    }

    /// A number that nothing in the ledger has had.
    pub fn next_number(&self) -> u64 {
        self.suspects.values().copied().max().unwrap_or_default().max(self.records.last) + 1
    }
}
