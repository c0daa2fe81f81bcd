//! Where a scrape and the two health pages get their facts from, from the first moment of the process on: what is not there
//! yet is put in when it is.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures::future::BoxFuture;
use tokio::sync::{oneshot, watch};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, timeout};
use tracing::debug;

use crate::metrics::awaited::Awaited;
use crate::metrics::catalogue::Who;
use crate::metrics::facts::{AgentFacts, Facts, Held, NodeFacts};
use crate::metrics::life::{self, LIMITS, Limits};
use crate::metrics::meters::Meters;
use egress_core::model::state::EgressId;
use egress_core::node_health::fitness::{Ready, ServingObstacle, UplinkState};
use egress_core::ownership::lease::{LeaseDemand, LeaseState};
use egress_datapath::maps::facts::HookFacts;
use egress_datapath::meter::Meter;
use egress_kube::api_outage::ApiOutages;
use egress_kube::leader_election::Leadership;
use egress_supervise::Heartbeat;

/// How long an answer of the node's half is waited for; then what it said before serves.
const PATIENCE: Duration = Duration::from_millis(500);

/// What a process that runs is asked.
pub enum Running {
    Agent(AgentSources),
    Controller(RunningController),
}

/// Asks the reconciler for its part of a scrape. False where it has ended.
pub type AskFacts = Arc<dyn Fn(oneshot::Sender<NodeFacts>) -> BoxFuture<'static, bool> + Send + Sync>;

pub struct AgentSources {
    pub node: AskFacts,
    pub ready: watch::Receiver<Ready>,
    pub uplink: watch::Receiver<UplinkState>,
    pub lease_state: watch::Receiver<LeaseState>,
    pub demand: watch::Receiver<LeaseDemand>,
    /// Of the reconciler, and of the lease keeper.
    pub beats: (Heartbeat, Heartbeat),
}

pub struct RunningController {
    pub leadership: Leadership,
    /// Objects and nodes have been listed.
    pub synced: watch::Receiver<bool>,
    /// Of the leader election.
    pub beat: Heartbeat,
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
    who: Who,
    began: Instant,
    started: Duration,
    outages: ApiOutages,
    meters: Meters,
    running: OnceLock<Running>,
    awaited: Awaited,
    kernel: OnceLock<Meter>,
    /// What the node's half said last.
    known: Arc<watch::Sender<Option<NodeFacts>>>,
    /// It has not answered yet: whoever comes meanwhile waits for the same answer.
    is_asked: Arc<AtomicBool>,
    limits: Limits,
}

impl HealthPage {
    pub fn new(who: Who, outages: ApiOutages) -> Self {
        Self {
            who,
            began: Instant::now(),
            // A clock before 1970 counts from the beginning.
            started: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default(),
            outages,
            meters: Meters::default(),
            running: OnceLock::new(),
            awaited: Awaited::default(),
            kernel: OnceLock::new(),
            known: Arc::new(watch::channel(None).0),
            is_asked: Arc::default(),
            limits: LIMITS,
        }
    }

    /// What the agent counts.
    pub fn meters(&self) -> Meters {
        self.meters.clone()
    }

    /// Where a start says what it waits for.
    pub fn awaited(&self) -> &Awaited {
        &self.awaited
    }

    /// The programs are loaded. Once.
    pub fn has_kernel(&self, meter: Meter) {
        let _twice = self.kernel.set(meter);
    }

    /// Whether they are.
    pub fn is_attached(&self) -> bool {
        self.kernel.get().is_some()
    }

    /// The agent runs. Once.
    pub fn runs(&self, running: Running) {
        let _twice = self.running.set(running);
    }

    /// All that can be had now, with what the programs count of so many egress IPs.
    pub async fn facts(&self, most: usize) -> Facts {
        let node = self.ask().await;
        let held = node.as_ref().and_then(|node| node.held.as_ref());
        let served: Vec<_> = held.map(|held| asked_of(held, most)).unwrap_or_default();
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
            Some(Running::Agent(running)) => agent = Some(facts_of(running)),
            Some(Running::Controller(running)) => leads = Some(running.leadership.leads()),
            None => {}
        }
        Facts {
            who: self.who,
            version: env!("CARGO_PKG_VERSION"),
            started: self.started,
            ready: self.is_ready(kernel.as_ref().map(|kernel| &kernel.hooks), node.as_ref()).is_ok(),
            agent,
            leads,
            node,
            kernel,
            outages: seen.outages,
            unanswered: seen.away.unwrap_or_default(),
            meters: self.meters.clone(),
        }
    }

    /// Whether the process does its work; if not, what does not live.
    pub fn live(&self) -> Result<(), String> {
        match self.running.get() {
            Some(Running::Agent(running)) => {
                let (node, lease) = &running.beats;
                life::judge(&self.limits, node.age(), lease.age())
            }
            Some(Running::Controller(running)) => life::judge_election(&self.limits, running.beat.age()),
            None => self.starts(),
        }
    }

    /// What is awaited would not come any sooner by a new start; the time that loading may take begins behind it.
    fn starts(&self) -> Result<(), String> {
        let loading = self.awaited.ended().unwrap_or(self.began).elapsed();
        if self.awaited.what().is_some() || loading < self.limits.starts {
            return Ok(());
        }
        Err(format!("the programs are not loaded after {} s", loading.as_secs()))
    }

    /// Whether this node does what the cluster wants, or this controller could lead; if not, what is missing.
    pub async fn ready(&self) -> Result<(), String> {
        // What is missing is asked for only where there is something: probes come often.
        let agent = self.running.get().and_then(Running::agent);
        let serves = agent.is_some_and(|agent| agent.ready.borrow().serving);
        let node = if serves { None } else { self.ask().await };
        let hooks = match self.kernel.get().cloned() {
            Some(meter) => spawn_blocking(move || meter.hooks()).await.ok(),
            None => None,
        };
        self.is_ready(hooks.as_ref(), node.as_ref())
    }

    fn is_ready(
        &self,
        hooks: Option<&BTreeMap<&'static str, HookFacts>>,
        node: Option<&NodeFacts>,
    ) -> Result<(), String> {
        let running = match self.running.get() {
            Some(Running::Agent(running)) => running,
            Some(Running::Controller(running)) if *running.synced.borrow() => return Ok(()),
            Some(Running::Controller(_)) => {
                return Err("waiting for the lists of EgressIP objects and nodes".to_owned());
            }
            None => return Err(self.awaited.what().unwrap_or_else(|| "the programs are being loaded".to_owned())),
        };
        if !running.ready.borrow().serving {
            let missing = node.and_then(|node| node.missing.clone());
            return Err(missing.unwrap_or_else(|| "the kernel does not do what the cluster wants yet".to_owned()));
        }
        let off: BTreeMap<_, _> = hooks.into_iter().flatten().filter(|(_, hook)| !hook.attached).collect();
        let awaits: BTreeSet<&str> = off.values().filter_map(|hook| hook.awaits.as_deref()).collect();
        match (off.is_empty(), awaits.is_empty()) {
            (true, _) => Ok(()),
            (false, true) => Err(format!("not attached: {}", off.into_keys().copied().collect::<Vec<_>>().join(", "))),
            (false, false) => Err(awaits.into_iter().collect::<Vec<_>>().join("; ")),
        }
    }

    /// What the node's half says now, or has said last. An answer that nobody waits for any more serves the next.
    async fn ask(&self) -> Option<NodeFacts> {
        let node = self.running.get()?.agent()?.node.clone();
        let mut news = self.known.subscribe();
        if !self.is_asked.swap(true, Ordering::AcqRel) {
            let (known, is_asked) = (Arc::clone(&self.known), Arc::clone(&self.is_asked));
            // Short-lived: one question.
            tokio::spawn(async move {
                let (answer, question) = oneshot::channel();
                let asked = node(answer).await;
                let fresh = if asked { question.await.ok() } else { None };
                is_asked.store(false, Ordering::Release);
                if fresh.is_some() {
                    known.send_replace(fresh);
                }
            });
        }
        // No news in time: what is known serves.
        let _late = timeout(PATIENCE, news.changed()).await;
        self.known.borrow().clone()
    }
}

/// The first, as a page shows them: each costs a system call.
fn asked_of(held: &Held, most: usize) -> Vec<EgressId> {
    held.served.keys().take(most).copied().collect()
}

fn facts_of(running: &AgentSources) -> AgentFacts {
    AgentFacts {
        serving: ServingObstacle::of(running.ready.borrow().serving, &running.uplink.borrow()).is_none(),
        // A node without egress IPs is never confirmed, and misses nothing.
        fenced: matches!(*running.lease_state.borrow(), LeaseState::Expired(_)) && running.demand.borrow().wants,
    }
}

#[cfg(test)]
mod tests;
