//! Which nodes answer: what the leader knows by probing them.
//!
//! Whoever probes publishes a [`Reach`] and goes on changing it. Receivers are told when `unreachable` or `suspects` change;
//! `heard` moves on silently, several times a second for each node, and is right whenever it is looked at.
//!
//! [`pulse`]: one node's signs of life. [`judge`]: which nodes are gone by them, and which only seem so.

pub mod judge;
pub mod pulse;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use tokio::sync::watch;

/// What is known of nodes that are probed. Where nobody probes, it is empty: all nodes count as reachable.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reach {
    /// To be treated as gone.
    pub unreachable: BTreeSet<String>,
    /// Without any sign of life for half the total timeout. Not those whose agent alone is silent.
    pub suspects: BTreeSet<String>,
    /// When the latest answer of each node's agent was received, whatever it said. Also of nodes that are not probed any
    /// more.
    pub heard: BTreeMap<String, Instant>,
    /// How long after its latest answer an agent may still hold addresses. Zero where agents hold no leases: nobody probes,
    /// or only asks whether the node is there.
    pub lease: Duration,
}

impl Reach {
    /// For a leader that nobody tells anything.
    pub fn nobody_probes() -> watch::Receiver<Self> {
        watch::channel(Self::default()).1
    }
}
