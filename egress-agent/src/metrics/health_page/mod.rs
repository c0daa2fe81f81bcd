//! The source of scrapes and of the two health pages. It exists before the programs are loaded and before the process runs;
//! both are set once they do.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures::future::BoxFuture;
use tokio::sync::{oneshot, watch};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, timeout};
use tracing::debug;

use crate::metrics::catalogue::Process;
use crate::metrics::liveness::{self, HeartbeatLimits, LIMITS};
use crate::metrics::meters::Meters;
use crate::metrics::snapshot::{AgentSnapshot, InKernel, ReconcilerSnapshot, Snapshot};
use crate::metrics::startup_wait::StartupWait;
use egress_core::model::state::EgressId;
use egress_core::node_health::fitness::{Ready, ServingObstacle, UplinkState};
use egress_core::ownership::lease::{LeaseDemand, LeaseState};
use egress_datapath::maps::facts::HookFacts;
use egress_datapath::meter::Meter;
use egress_kube::api_outage::ApiOutages;
use egress_kube::leader_election::Leadership;
use egress_supervise::Heartbeat;

/// How long to wait for the reconciler's answer; then its previous one serves.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(500);

/// The sources of a running process.
pub enum Running {
    Agent(AgentSources),
    Controller(RunningController),
}

/// Asks the reconciler for its part of a scrape. False if it has ended.
pub type RequestSnapshot = Arc<dyn Fn(oneshot::Sender<ReconcilerSnapshot>) -> BoxFuture<'static, bool> + Send + Sync>;

pub struct AgentSources {
    pub reconciler: RequestSnapshot,
    pub ready: watch::Receiver<Ready>,
    pub uplink: watch::Receiver<UplinkState>,
    pub lease_state: watch::Receiver<LeaseState>,
    pub demand: watch::Receiver<LeaseDemand>,
    /// Of the reconciler, and of the lease keeper.
    pub heartbeats: (Heartbeat, Heartbeat),
}

pub struct RunningController {
    pub leadership: Leadership,
    /// Objects and nodes have been listed.
    pub synced: watch::Receiver<bool>,
    /// Of the leader election.
    pub heartbeat: Heartbeat,
}

impl Running {
    fn agent(&self) -> Option<&AgentSources> {
        match self {
            Self::Agent(agent) => Some(agent),
            Self::Controller(_) => None,
        }
    }
}

pub struct HealthPage {
    process: Process,
    created: Instant,
    started: Duration,
    outages: ApiOutages,
    meters: Meters,
    running: OnceLock<Running>,
    startup_wait: StartupWait,
    kernel: OnceLock<Meter>,
    /// The reconciler's latest answer.
    last_known: Arc<watch::Sender<Option<ReconcilerSnapshot>>>,
    /// A request is pending: further requests wait for the same answer.
    is_pending: Arc<AtomicBool>,
    limits: HeartbeatLimits,
}

impl HealthPage {
    pub fn new(process: Process, outages: ApiOutages) -> Self {
        Self {
            process,
            created: Instant::now(),
            // A clock before 1970 counts as 1970.
            started: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default(),
            outages,
            meters: Meters::default(),
            running: OnceLock::new(),
            startup_wait: StartupWait::default(),
            kernel: OnceLock::new(),
            last_known: Arc::new(watch::channel(None).0),
            is_pending: Arc::default(),
            limits: LIMITS,
        }
    }

    /// The counters of this process.
    pub fn meters(&self) -> Meters {
        self.meters.clone()
    }

    /// What the start waits for.
    pub fn startup_wait(&self) -> &StartupWait {
        &self.startup_wait
    }

    /// Called once, when the programs are loaded.
    pub fn set_meter(&self, meter: Meter) {
        let _twice = self.kernel.set(meter);
    }

    /// Whether the programs are loaded.
    pub fn is_attached(&self) -> bool {
        self.kernel.get().is_some()
    }

    /// Called once, when the agent or controller runs.
    pub fn set_running(&self, running: Running) {
        let _twice = self.running.set(running);
    }

    /// Reads everything, with the programs' counters of `most` egress IPs at most.
    pub async fn snapshot(&self, most: usize) -> Snapshot {
        let reconciler = self.ask_reconciler().await;
        let in_kernel = reconciler.as_ref().and_then(|of| of.in_kernel.as_ref());
        let served: Vec<_> = in_kernel.map(|in_kernel| shown_ids(in_kernel, most)).unwrap_or_default();
        let kernel = match self.kernel.get().cloned() {
            Some(meter) => {
                let read = spawn_blocking(move || meter.read(served.into_iter())).await;
                read.map_err(std::io::Error::other)
                    .flatten()
                    .inspect_err(|error| debug!(%error, "cannot read the maps"))
                    .ok()
            }
            None => None,
        };
        let seen = self.outages.summary();
        let (mut agent, mut leads) = (None, None);
        match self.running.get() {
            Some(Running::Agent(running)) => agent = Some(agent_snapshot(running)),
            Some(Running::Controller(running)) => leads = Some(running.leadership.leads()),
            None => {}
        }
        Snapshot {
            process: self.process,
            version: env!("CARGO_PKG_VERSION"),
            started: self.started,
            ready: self.is_ready(kernel.as_ref().map(|kernel| &kernel.hooks), reconciler.as_ref()).is_ok(),
            agent,
            leads,
            reconciler,
            kernel,
            outages: seen.outages,
            unanswered: seen.away.unwrap_or_default(),
            meters: self.meters.clone(),
        }
    }

    /// Whether the main loops make progress; if not, which one does not.
    pub fn check_live(&self) -> Result<(), String> {
        match self.running.get() {
            Some(Running::Agent(running)) => {
                let (reconciler, lease_keeper) = &running.heartbeats;
                liveness::check_agent(&self.limits, reconciler.age(), lease_keeper.age())
            }
            Some(Running::Controller(running)) => liveness::check_controller(&self.limits, running.heartbeat.age()),
            None => self.check_startup(),
        }
    }

    /// A restart would not end a wait, so the limit of loading counts from the end of the last wait.
    fn check_startup(&self) -> Result<(), String> {
        let loading = self.startup_wait.ended().unwrap_or(self.created).elapsed();
        if self.startup_wait.reason().is_some() || loading < self.limits.startup {
            return Ok(());
        }
        Err(format!("the programs are not loaded after {} s", loading.as_secs()))
    }

    /// Whether this node is in the desired state, or this controller could lead; if not, what is missing.
    pub async fn check_ready(&self) -> Result<(), String> {
        // Probes are frequent, so the reconciler is asked only if something is missing.
        let agent = self.running.get().and_then(Running::agent);
        let serves = agent.is_some_and(|agent| agent.ready.borrow().serving);
        let reconciler = if serves { None } else { self.ask_reconciler().await };
        let hooks = match self.kernel.get().cloned() {
            Some(meter) => spawn_blocking(move || meter.hooks()).await.ok(),
            None => None,
        };
        self.is_ready(hooks.as_ref(), reconciler.as_ref())
    }

    fn is_ready(
        &self,
        hooks: Option<&BTreeMap<&'static str, HookFacts>>,
        reconciler: Option<&ReconcilerSnapshot>,
    ) -> Result<(), String> {
        let running = match self.running.get() {
            Some(Running::Agent(running)) => running,
            Some(Running::Controller(running)) if *running.synced.borrow() => return Ok(()),
            Some(Running::Controller(_)) => {
                return Err("waiting for the lists of EgressIP objects and nodes".to_owned());
            }
            None => {
                return Err(self.startup_wait.reason().unwrap_or_else(|| "the programs are being loaded".to_owned()));
            }
        };
        if !running.ready.borrow().serving {
            let missing = reconciler.and_then(|of| of.missing.clone());
            return Err(missing.unwrap_or_else(|| "the kernel is not in the desired state yet".to_owned()));
        }
        let off: BTreeMap<_, _> = hooks.into_iter().flatten().filter(|(_, hook)| !hook.attached).collect();
        let awaits: BTreeSet<&str> = off.values().filter_map(|hook| hook.awaits.as_deref()).collect();
        match (off.is_empty(), awaits.is_empty()) {
            (true, _) => Ok(()),
            (false, true) => Err(format!("not attached: {}", off.into_keys().copied().collect::<Vec<_>>().join(", "))),
            (false, false) => Err(awaits.into_iter().collect::<Vec<_>>().join("; ")),
        }
    }

    /// The reconciler's answer, or its previous one if it takes too long. A late answer serves the next call.
    async fn ask_reconciler(&self) -> Option<ReconcilerSnapshot> {
        let request = self.running.get()?.agent()?.reconciler.clone();
        let mut answers = self.last_known.subscribe();
        if !self.is_pending.swap(true, Ordering::AcqRel) {
            let (last_known, is_pending) = (Arc::clone(&self.last_known), Arc::clone(&self.is_pending));
            // Short-lived: one request.
            tokio::spawn(async move {
                let (sender, answer) = oneshot::channel();
                let fresh = if request(sender).await { answer.await.ok() } else { None };
                is_pending.store(false, Ordering::Release);
                if fresh.is_some() {
                    last_known.send_replace(fresh);
                }
            });
        }
        // After the timeout the previous answer serves.
        let _late = timeout(ANSWER_TIMEOUT, answers.changed()).await;
        self.last_known.borrow().clone()
    }
}

/// The first `most`, as a page shows them: each costs a system call.
fn shown_ids(in_kernel: &InKernel, most: usize) -> Vec<EgressId> {
    in_kernel.served.keys().take(most).copied().collect()
}

fn agent_snapshot(running: &AgentSources) -> AgentSnapshot {
    AgentSnapshot {
        serving: ServingObstacle::of(running.ready.borrow().serving, &running.uplink.borrow()).is_none(),
        // The lease of a node without egress IPs is not renewed, and its expiry has no effect.
        lease_expired: matches!(*running.lease_state.borrow(), LeaseState::Expired(_))
            && running.demand.borrow().has_addresses,
    }
}

#[cfg(test)]
mod tests;
