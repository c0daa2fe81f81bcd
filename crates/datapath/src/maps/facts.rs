//! Values read from the maps and hooks for a scrape.

use std::collections::BTreeMap;
use std::time::Duration;

use egress_common::abi::{Count, EipCount, Verdict};
use egress_core::model::state::EgressId;

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
