//! The values that a scrape shows, all read before anything is written.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use crate::metrics::catalogue::Process;
use crate::metrics::meters::Meters;
use egress_core::model::policy::PolicyKey;
use egress_core::model::state::EgressId;
use egress_datapath::maps::facts::KernelFacts;

/// The scrape leaves out what could not be read in time.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    pub process: Process,
    pub version: &'static str,
    /// Since 1970.
    pub started: Duration,
    pub ready: bool,
    /// Of an agent; `None` before it runs.
    pub agent: Option<AgentSnapshot>,
    /// Of a controller, whether it leads; `None` before it runs.
    pub leads: Option<bool>,
    /// `None` until the reconciler has answered once.
    pub reconciler: Option<ReconcilerSnapshot>,
    /// `None` until the programs are loaded.
    pub kernel: Option<KernelFacts>,
    pub outages: u64,
    pub unanswered: Duration,
    pub meters: Meters,
}

impl Snapshot {
    pub fn in_kernel(&self) -> Option<&InKernel> {
        self.reconciler.as_ref()?.in_kernel.as_ref()
    }
}

#[derive(Clone, Copy, Debug, Default)]
pub struct AgentSnapshot {
    pub serving: bool,
    pub lease_expired: bool,
}

/// What the reconciler knows without a system call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReconcilerSnapshot {
    /// The last known state; `None` before the first read of the kernel's state, while pinned programs may already serve.
    pub in_kernel: Option<InKernel>,
    pub standby: usize,
    /// Which lists the API server has not delivered yet, as one line.
    pub missing: Option<String>,
    /// Hand-overs from this node, and to it.
    pub from: usize,
    pub to: usize,
}

/// What the reconciler has written into the kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InKernel {
    /// Number of entries of the maps that only the reconciler writes.
    pub entries: BTreeMap<&'static str, usize>,
    pub served: BTreeMap<EgressId, ServedAddress>,
    /// Number of entries that the kernel has refused, by map.
    pub left_out: BTreeMap<&'static str, usize>,
    /// Number of egress IPs that are assigned to this node and not served yet.
    pub unclaimed: usize,
}

/// An egress IP of this node, and its object if that is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServedAddress {
    pub address: IpAddr,
    /// Its policy, with the UID of the object, where they are known.
    pub policy: Option<(PolicyKey, String)>,
}
