//! What a scrape is made from: values, read before anything is written.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use crate::metrics::catalogue::Who;
use crate::metrics::meters::Meters;
use egress_core::model::policy::PolicyKey;
use egress_core::model::state::EgressId;
use egress_datapath::maps::facts::KernelFacts;

/// All of it. What could not be had in time is left out of the scrape.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    pub who: Who,
    pub version: &'static str,
    /// Since 1970.
    pub started: Duration,
    pub ready: bool,
    /// Of an agent; `None` before it runs.
    pub agent: Option<AgentFacts>,
    /// Of a controller, whether it leads; `None` before it runs.
    pub leads: Option<bool>,
    /// `None` until the node's half has answered once.
    pub node: Option<NodeFacts>,
    /// `None` until the programs are loaded.
    pub kernel: Option<KernelFacts>,
    pub outages: u64,
    pub unanswered: Duration,
    pub meters: Meters,
}

impl Facts {
    pub fn held(&self) -> Option<&Held> {
        self.node.as_ref()?.held.as_ref()
    }
}

#[derive(Clone, Copy, Debug, Default)]
pub struct AgentFacts {
    pub serving: bool,
    pub fenced: bool,
}

/// What the node's half knows without asking the kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeFacts {
    /// As it was known last; `None` before the first look at the kernel, where its programs may serve all the same.
    pub held: Option<Held>,
    pub standby: usize,
    /// What the API server has not said yet, in words.
    pub missing: Option<String>,
    /// Hand-overs from this node, and to it.
    pub from: usize,
    pub to: usize,
}

/// What the kernel holds by the node's half.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Entries of the maps that it alone writes.
    pub entries: BTreeMap<&'static str, usize>,
    /// What it serves.
    pub served: BTreeMap<EgressId, Served>,
    /// Entries that the kernel has refused, by map.
    pub left_out: BTreeMap<&'static str, usize>,
    /// What is to be served here and is not.
    pub unclaimed: usize,
}

/// An egress IP of this node, and its policy with the UID of its object where those are known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Served {
    pub address: IpAddr,
    pub policy: Option<(PolicyKey, String)>,
}
