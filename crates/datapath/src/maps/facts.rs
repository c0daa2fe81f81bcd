//! Values read from the maps and hooks for a scrape.

use std::collections::BTreeMap;
use std::time::Duration;

use egress_common::abi::{Count, EipCount, Verdict};
use egress_core::model::state::EgressId;

/// State of the kernel.
#[derive(Clone, Debug, Default)]
pub struct KernelFacts {
    /// Remaining time of the lease; infinite for a lease without an end.
    pub lease_seconds: f64,
    pub verdicts: BTreeMap<Verdict, Count>,
    pub egress_ips: BTreeMap<EgressId, EipCount>,
    /// The interface that each address is on.
    pub interfaces: BTreeMap<EgressId, String>,
    /// Entries of the maps that fill with traffic.
    pub entries: BTreeMap<&'static str, u32>,
    /// Sizes of all maps.
    pub limits: BTreeMap<&'static str, u32>,
    pub hooks: BTreeMap<&'static str, HookFacts>,
    /// `None` before the first count, and if `nat` cannot be read.
    pub ports: Option<PortUse>,
}

#[derive(Clone, Debug, Default)]
pub struct HookFacts {
    pub attached: bool,
    /// One line about a missing device.
    pub awaits: Option<String>,
    /// Run count and run time; `None` if the kernel keeps no statistics.
    pub runs: Option<(u64, Duration)>,
}

/// NAT entries and ports, from one walk of `nat`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PortUse {
    pub egress_ips: BTreeMap<EgressId, Use>,
    /// On the node's own address, to other nodes.
    pub node: Use,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Use {
    pub mappings: u32,
    /// To the destination with the most.
    pub busiest: u32,
    /// Available ports per destination.
    pub ports: u32,
    /// Port blocks that pods have, and their possible number; zero without blocks.
    pub blocks: u32,
    pub most_blocks: u32,
}

impl Use {
    /// At least 1 if no port is free.
    pub fn ratio(&self) -> f64 {
        ratio(self.busiest, self.ports)
    }

    /// `None` without port blocks.
    pub fn block_ratio(&self) -> Option<f64> {
        (self.most_blocks != 0).then(|| ratio(self.blocks, self.most_blocks))
    }
}

fn ratio(used: u32, of: u32) -> f64 {
    if of == 0 { 0.0 } else { f64::from(used) / f64::from(of) }
}
