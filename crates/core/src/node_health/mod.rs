//! Which nodes answer: the leader's knowledge from probes.
//!
//! The prober (`egress_agent::controller::node_health::prober`) publishes a [`NodeHealth`] and keeps changing it.
//! Receivers are notified when the other sets change; `last_confirmed` changes without notification, several times a
//! second for each node, and is always current.
//!
//! [`liveness`] is that of one node by its signs of life, [`state`] decides which nodes count as gone, and [`fitness`] is
//! what a node reports of itself.

pub mod fitness;
pub mod liveness;
pub mod state;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::model::ledger::Acknowledgements;
use crate::model::node::UnservedAddresses;

/// The health of the probed nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeHealth {
    /// Nodes that count as gone.
    pub unreachable: BTreeSet<String>,
    /// When those last reported that they serve.
    pub last_serving: BTreeMap<String, Instant>,
    /// Nodes whose agents are away: they keep their addresses and get no new ones.
    pub absent: BTreeSet<String>,
    /// Nodes at whose address something else answers, or an agent with another key.
    pub unexpected_responders: BTreeSet<String>,
    /// Without any sign of life for half the total timeout. Nodes where only the agent is silent do not count.
    pub suspects: BTreeSet<String>,
    /// Without any sign of life for the total timeout, where the agent did not end before: the agents have ended these
    /// leases themselves. The programs of all other silent nodes may emit longer.
    pub silent: BTreeSet<String>,
    /// When the latest answer was received that the node's agent gets a confirmation for. Answers of nodes that count
    /// as gone get none. Includes nodes that are no longer probed.
    pub last_confirmed: BTreeMap<String, Instant>,
    /// When each node's agent first answered this controller's probes, and so knows of this term.
    pub first_confirmed: BTreeMap<String, Instant>,
    /// Released addresses, by the nodes' answers.
    pub released: BTreeMap<String, Acknowledgements>,
    /// Assigned addresses that nodes report as not served.
    pub unserved: BTreeMap<String, UnservedAddresses>,
    /// The latest ending of an endless lease that each node's programs obey, by its number.
    pub bounded: BTreeMap<String, u64>,
    /// How long after its latest answer an agent may hold addresses; constant.
    pub lease: Duration,
}

impl NodeHealth {
    /// Before the first probe.
    pub fn with_lease(lease: Duration) -> Self {
        Self { lease, ..Self::default() }
    }
}
