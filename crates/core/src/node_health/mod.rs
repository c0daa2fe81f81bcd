//! Which nodes answer: what the leader knows by probing them.
//!
//! Whoever probes publishes a [`NodeHealth`] and goes on changing it. Receivers are told when the other sets change;
//! `heard` moves on silently, several times a second for each node, and is right whenever it is looked at.
//!
//! - [`pulse`]: one node's signs of life, pure. [`judge`]: which nodes are gone by them, and which only seem so, pure.
//! - [`knock`]: whether the node of another controller that leads is there at all.
//! - [`session`]: asking one node by one address. [`prober`]: all nodes, while it is this controller's duty.
//!   `vouch`: which answers agents are told of.

pub mod fitness;
pub mod liveness;
pub mod state;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::model::ledger::Acknowledgements;
use crate::model::node::UnservedAddresses;

/// What is known of nodes that are probed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeHealth {
    /// To be treated as gone.
    pub unreachable: BTreeSet<String>,
    /// When those were well last.
    pub lost: BTreeMap<String, Instant>,
    /// Their agents are away: they keep what they have, and nothing more is given to them.
    pub absent: BTreeSet<String>,
    /// At an address of these something answers that is not their agent, or an agent with another key.
    pub strange: BTreeSet<String>,
    /// Without any sign of life for half the total timeout. Not those whose agent alone is silent.
    pub suspects: BTreeSet<String>,
    /// Without any sign of life for the total timeout, and not because their agents ended before: these have fenced their nodes
    /// themselves. What the programs of all others that do not answer may still emit lasts longer.
    pub silent: BTreeSet<String>,
    /// When the latest answer of each node's agent was received that the agent is told of, or will be. No answer of a node
    /// that counts as gone is. Also of nodes that are not probed any more.
    pub heard: BTreeMap<String, Instant>,
    /// When each node's agent answered first since this controller probes, if it did: it has heard of this one's term by then.
    pub followed: BTreeMap<String, Instant>,
    /// What nodes have let go of, by their answers.
    pub released: BTreeMap<String, Acknowledgements>,
    /// What nodes have been assigned and do not serve, by their answers.
    pub unserved: BTreeMap<String, UnservedAddresses>,
    /// The latest end of an endless lease that each node's programs have obeyed, by its number.
    pub bounded: BTreeMap<String, u64>,
    /// How long after its latest answer an agent may still hold addresses; it never changes.
    pub lease: Duration,
}

impl NodeHealth {
    /// Before anybody was probed.
    pub fn by(lease: Duration) -> Self {
        Self { lease, ..Self::default() }
    }
}
