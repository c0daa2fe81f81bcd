//! What a scrape is made from: values, read before anything is written.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use egress_common::abi::{Count, EipCount, Verdict};

use super::catalogue::Who;
use super::meters::Meters;
use crate::model::state::EgressId;

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

/// An egress IP of this node, and its object where that is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Served {
    pub address: IpAddr,
    pub object: String,
    pub uid: String,
}

/// What the kernel keeps.
#[derive(Clone, Debug, Default)]
pub struct KernelFacts {
    /// For how long the programs may go on emitting egress IPs; infinite where the lease has no end.
    pub lease_seconds: f64,
    pub verdicts: BTreeMap<Verdict, Count>,
    pub egress_ips: BTreeMap<EgressId, EipCount>,
    /// Of the maps that fill with traffic, as last counted.
    pub entries: BTreeMap<&'static str, u32>,
    /// Of all maps.
    pub limits: BTreeMap<&'static str, u32>,
    pub hooks: BTreeMap<&'static str, HookFacts>,
    /// `None` before the first count, and where `nat` cannot be read.
    pub ports: Option<PortUse>,
}

#[derive(Clone, Debug, Default)]
pub struct HookFacts {
    pub attached: bool,
    /// That its device is missing, in one line.
    pub awaits: Option<String>,
    /// How often it has run and for how long; `None` where the kernel keeps no statistics.
    pub runs: Option<(u64, Duration)>,
}

/// NAT mappings and ports, as one walk of `nat` has counted them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PortUse {
    pub egress_ips: BTreeMap<EgressId, Use>,
    /// Of the node's own address, towards other nodes.
    pub node: Use,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Use {
    pub mappings: u32,
    /// Towards the destination that has most.
    pub busiest: u32,
    /// Ports that there are towards one destination.
    pub ports: u32,
}

impl Use {
    /// 1 and more where no port is free.
    pub fn ratio(&self) -> f64 {
        if self.ports == 0 { 0.0 } else { f64::from(self.busiest) / f64::from(self.ports) }
    }
}
