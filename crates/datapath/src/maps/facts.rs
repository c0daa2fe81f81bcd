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
    /// Port blocks that pods have, and their possible number; `None` if ports are not given in blocks.
    pub blocks: u32,
    pub most_blocks: Option<u32>,
}

impl Use {
    /// At least 1 if no port is free.
    pub fn ratio(&self) -> f64 {
        if self.ports == 0 { 0.0 } else { f64::from(self.busiest) / f64::from(self.ports) }
    }

    /// 1 if no block is free, and where there are too few ports for one. `None` without port blocks.
    pub fn block_ratio(&self) -> Option<f64> {
        let most = self.most_blocks?;
        Some(if most == 0 { 1.0 } else { f64::from(self.blocks) / f64::from(most) })
    }
}
