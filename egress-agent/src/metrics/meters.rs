//! What the process counts between two scrapes: durations, failures, and the cluster's state as the leader knows it.
//!
//! Clones are cheap and share their values. A default is not exposed.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};

use egress_core::plan::refusal::MAPS;

/// The result of a probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Probed {
    Serving,
    NotServing,
    NextHopLost,
    /// No answer within the total timeout.
    Late,
    /// The other end answers, but not as an agent.
    Refused,
    /// The other end answers, but not with the agents' key.
    Unsigned,
    /// No connection, or one that broke.
    Unreachable,
}

impl Probed {
    pub const ALL: [Self; 7] = [
        Self::Serving,
        Self::NotServing,
        Self::NextHopLost,
        Self::Late,
        Self::Refused,
        Self::Unsigned,
        Self::Unreachable,
    ];

    pub const fn label(self) -> &'static str {
        match self {
            Self::Serving => "serving",
            Self::NotServing => "not_serving",
            Self::NextHopLost => "next_hop_lost",
            Self::Late => "late",
            Self::Refused => "refused",
            Self::Unsigned => "unsigned",
            Self::Unreachable => "unreachable",
        }
    }
}

/// How the leader treats an egress node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeState {
    Answers,
    AgentAway,
    Unreachable,
}

impl NodeState {
    pub const fn label(self) -> &'static str {
        match self {
            Self::Answers => "answers",
            Self::AgentAway => "agent_away",
            Self::Unreachable => "unreachable",
        }
    }
}

/// The cluster by the leader's latest decision.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterMetrics {
    pub assigned: usize,
    pub unassigned: usize,
    /// Objects by the reason of their condition.
    pub objects: BTreeMap<&'static str, usize>,
    pub nodes: BTreeMap<String, NodeState>,
}

#[derive(Clone, Default)]
pub struct Meters(Arc<Inner>);

struct Inner {
    reconcile: Histogram,
    failures: AtomicU64,
    refused: AtomicU64,
    refusals: [AtomicU64; MAPS.len()],
    conflicts: AtomicU64,
    probes: [AtomicU64; Probed::ALL.len()],
    probe: Histogram,
    failover: Histogram,
    cluster: Mutex<Option<ClusterMetrics>>,
}

impl Default for Inner {
    fn default() -> Self {
        Self {
            // 0.5 ms to 16 s.
            reconcile: Histogram::new(exponential_buckets(0.0005, 2.0, 16)),
            failures: AtomicU64::default(),
            refused: AtomicU64::default(),
            refusals: Default::default(),
            conflicts: AtomicU64::default(),
            probes: Default::default(),
            // 0.1 ms to 3.3 s.
            probe: Histogram::new(exponential_buckets(0.0001, 2.0, 16)),
            failover: Histogram::new([0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.5, 10.0, 15.0, 30.0, 60.0, 120.0]),
            cluster: Mutex::new(None),
        }
    }
}

impl fmt::Debug for Meters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Meters")
    }
}

impl Meters {
    /// A batch of changes is in the kernel.
    pub fn reconciled(&self, took: Duration) {
        self.0.reconcile.observe(took.as_secs_f64());
    }

    pub fn reconcile_failed(&self) {
        self.0.failures.fetch_add(1, Ordering::Relaxed);
    }

    /// Another host claims an egress IP of this node.
    pub fn conflict(&self) {
        self.0.conflicts.fetch_add(1, Ordering::Relaxed);
    }

    /// A connection to the health port was closed because no slot was free.
    pub fn refused_connection(&self) {
        self.0.refused.fetch_add(1, Ordering::Relaxed);
    }

    /// The kernel has refused an entry of this map, one of [`MAPS`].
    pub fn entry_refused(&self, map: &'static str) {
        let count = MAPS.iter().position(|known| *known == map).and_then(|index| self.0.refusals.get(index));
        if let Some(count) = count {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// `took` if there was an answer.
    pub fn probed(&self, what: Probed, took: Option<Duration>) {
        if let Some(count) = self.0.probes.get(what as usize) {
            count.fetch_add(1, Ordering::Relaxed);
        }
        if let Some(took) = took {
            self.0.probe.observe(took.as_secs_f64());
        }
    }

    /// An egress IP has left an unreachable node for another one.
    pub fn failed_over(&self, took: Duration) {
        self.0.failover.observe(took.as_secs_f64());
    }

    /// As the leader sees it; `None` once the controller no longer leads.
    pub fn set_cluster(&self, cluster: Option<ClusterMetrics>) {
        *self.cluster_mut() = cluster;
    }

    pub fn cluster(&self) -> Option<ClusterMetrics> {
        self.cluster_mut().clone()
    }

    pub(crate) fn reconcile(&self) -> Histogram {
        self.0.reconcile.clone()
    }

    pub fn conflicts(&self) -> u64 {
        self.0.conflicts.load(Ordering::Relaxed)
    }

    pub(crate) fn refused(&self) -> u64 {
        self.0.refused.load(Ordering::Relaxed)
    }

    pub(crate) fn failures(&self) -> u64 {
        self.0.failures.load(Ordering::Relaxed)
    }

    /// In the order of [`MAPS`].
    pub(crate) fn refusals(&self) -> [u64; MAPS.len()] {
        self.0.refusals.each_ref().map(|count| count.load(Ordering::Relaxed))
    }

    pub(crate) fn probes(&self) -> [u64; Probed::ALL.len()] {
        Probed::ALL.map(|what| self.0.probes.get(what as usize).map_or(0, |count| count.load(Ordering::Relaxed)))
    }

    pub(crate) fn probe(&self) -> Histogram {
        self.0.probe.clone()
    }

    pub(crate) fn failover(&self) -> Histogram {
        self.0.failover.clone()
    }

    /// The value is replaced as a whole, so a panic cannot leave it inconsistent.
    fn cluster_mut(&self) -> MutexGuard<'_, Option<ClusterMetrics>> {
        self.0.cluster.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The number of a histogram's values and their sum, as exposed.
#[cfg(test)]
pub(crate) fn count_and_sum(histogram: &Histogram) -> (u64, f64) {
    let (mut registry, mut text) = (prometheus_client::registry::Registry::default(), String::new());
    registry.register("h", "a histogram", histogram.clone());
    prometheus_client::encoding::text::encode(&mut text, &registry).expect("text");
    let value = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).map(str::to_owned);
    let (count, sum) = (value("h_count ").expect("a count"), value("h_sum ").expect("a sum"));
    (count.parse().expect("a number"), sum.parse().expect("a number"))
}
