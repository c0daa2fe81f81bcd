//! The agent's answers to `egress-agent status`, `drops` and `log-level`, and the names that other commands show for
//! addresses and IDs.
//!
//! A running agent answers on a Unix socket ([`socket`]): one JSON request and one JSON answer for each connection, or one
//! line for each drop. Without a running agent, the pins ([`pins`]) still show what the programs do.
//!
//! The socket has mode 0600, so only root on the node or in the agent's container can use it. A status file would be as old
//! as its last write, and would outlive the agent.

pub mod log;
pub mod pins;
pub mod socket;

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::{Instant, SystemTime};

use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::spawn_blocking;

use crate::debug::log::{LogEntry, LogLevel, RecentWarnings};
use crate::metrics::snapshot::ReconcilerSnapshot;
use crate::nat_log::NatLogSettings;
use egress_core::display_names::Names;
use egress_core::model::view::Attach;
use egress_core::node_health::fitness::{Ready, ServingObstacle, UplinkState};
pub use egress_core::notes::Notes;
use egress_core::ownership::lease::LeaseState;
use egress_datapath::events::drops::{DropFilter, Drops};
use egress_datapath::loader::pinned;
use egress_datapath::survey::report::{Gateway, Kernel, PolicyReport};
use egress_kube::api_outage::ApiOutages;

/// A request on the socket.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "want", rename_all = "snake_case")]
pub enum Request {
    Status,
    /// The names of pods, objects and nodes.
    Names,
    /// Sampled drops, one line each (`drops::DropLine`): the recent ones, and with `follow` new ones; with a filter only
    /// those that it takes.
    Drops {
        follow: bool,
        #[serde(flatten)]
        filter: DropFilter,
    },
    /// The log's filter, after a change to `set` if that is given.
    LogLevel {
        set: Option<String>,
    },
    /// `egress-agent cni` reports a pod's addresses; the answer comes when the maps have them.
    Attach(Attach),
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    Status(Box<Status>),
    Names(Box<Names>),
    LogLevel(String),
    /// The maps have the pod's addresses, or `refused` says why they will not.
    Attached {
        refused: Option<String>,
    },
    /// The request was not understood, or cannot be answered now.
    Error(String),
}

/// The state of one agent. Without a running agent, only the contents of the pins.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    pub agent: AgentState,
    /// The cluster as the agent sees it; `None` without a running agent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cluster: Option<ClusterState>,
    pub addresses: Vec<Address>,
    /// Objects that select pods of this node, or have an address here.
    #[serde(default)]
    pub objects: Vec<PolicyReport>,
    /// Nodes that serve pods of this node.
    #[serde(default)]
    pub gateways: Vec<Gateway>,
    /// Addresses of pods of this node that the programs know, and how many of them an object selects.
    pub pod_addresses: usize,
    pub selected_pod_addresses: usize,
    /// The pods that have these addresses; unknown without a running agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pods: Option<PodCount>,
    /// Devices, programs and maps; `None` if they cannot be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel: Option<Kernel>,
    /// What needs attention, one line each.
    pub problems: Vec<String>,
    /// The last warnings and errors of the agent's log that are not known to be over.
    #[serde(default)]
    pub last_warnings: Vec<LogEntry>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodCount {
    pub known: usize,
    pub selected: usize,
}

impl Status {
    /// Marks owned addresses as not emitted if the lease has expired.
    fn note_expired(&mut self) {
        let has_expired = self.kernel.as_ref().is_some_and(|kernel| kernel.lease_seconds == Some(0));
        if !has_expired || !self.addresses.iter().any(|one| one.owned) {
            return;
        }
        for one in self.addresses.iter_mut().filter(|one| one.owned) {
            one.state = format!("not emitted, the lease has expired ({})", one.state);
        }
        self.problems.push(
            "the lease of this node has expired: its programs drop packets that need an egress IP (lease_expired)"
                .to_owned(),
        );
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentState {
    pub running: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uptime_seconds: Option<u64>,
    /// Whether this node can carry egress traffic, as its health server answers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub serves: Option<bool>,
    /// Why not, as health checks see it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// `held` or `expired`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lease: Option<String>,
    /// The node of the controller that probed this agent last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub controller: Option<String>,
    /// Duration of the current API outage.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub api_server_away_seconds: Option<u64>,
}

/// The cluster as this node's agent sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterState {
    pub node: String,
    /// Label and annotation of this node.
    pub egress_node: bool,
    pub drained: bool,
    pub hand_overs: Vec<OpenHandOver>,
    /// Nodes that have not answered the leader for a while.
    pub suspects: Vec<String>,
    /// Objects that select a pod of this node that an older object serves.
    pub standby: Vec<StandbyPod>,
}

/// An egress IP that this node has, or is to have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Address {
    pub address: IpAddr,
    pub egress_id: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub object: Option<String>,
    /// The interface that the programs serve it on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interface: Option<String>,
    /// Whether the programs serve it.
    pub owned: bool,
    /// Whether it is assigned to this node; unknown without a running agent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wanted: Option<bool>,
    /// For people: `served`, `not claimed yet`, `handed over to NODE`, ...
    pub state: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenHandOver {
    pub address: IpAddr,
    pub number: u64,
    pub from: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StandbyPod {
    pub object: String,
    pub pod: String,
    pub served_by: String,
}

/// The reconciler's part of a status.
#[derive(Debug)]
pub struct ReconcilerReport {
    pub status: Status,
    /// Names, if the reconciler has not read the kernel's state yet. Programs of a former run may serve then, so the status
    /// is completed from the pins.
    pub unobserved: Option<Names>,
}

/// A request to the reconciler.
#[derive(Debug)]
pub enum Question {
    /// Its part of a status.
    Status(oneshot::Sender<ReconcilerReport>),
    /// Its part of a scrape.
    Snapshot(oneshot::Sender<ReconcilerSnapshot>),
    /// Its names of pods, objects and nodes.
    Names(oneshot::Sender<Names>),
    /// A pod's addresses. It answers when the maps have them, or with the reason why they will not.
    Attach(Attach, oneshot::Sender<Option<String>>),
}

/// The socket, and sources of answers that are not parts of the agent.
#[derive(Clone)]
pub struct Questions {
    pub socket: PathBuf,
    pub notes: Notes,
    pub drops: Drops,
    pub log: LogLevel,
    pub warnings: RecentWarnings,
    /// Directory of the pins.
    pub bpffs: PathBuf,
    /// The log of NAT, if it is to be written.
    pub nat_log: Option<NatLogSettings>,
}

/// The sources of a status.
#[derive(Clone)]
pub struct Sources {
    pub reconciler: mpsc::Sender<Question>,
    pub ready: watch::Receiver<Ready>,
    pub uplink: watch::Receiver<UplinkState>,
    pub lease_state: watch::Receiver<LeaseState>,
    /// The node of the controller that probes this agent.
    pub leader: watch::Receiver<Option<String>>,
    pub outages: ApiOutages,
    pub questions: Questions,
    pub since: Instant,
}

impl Sources {
    /// `None` if the reconciler has ended.
    pub async fn names(&self) -> Option<Names> {
        let (answer, names) = oneshot::channel();
        self.reconciler.send(Question::Names(answer)).await.ok()?;
        names.await.ok()
    }

    /// Waits until the maps have the pod's addresses. `None` if the reconciler has ended.
    pub async fn attach(&self, attach: Attach) -> Option<Option<String>> {
        let (answer, attached) = oneshot::channel();
        self.reconciler.send(Question::Attach(attach, answer)).await.ok()?;
        attached.await.ok()
    }

    /// `None` if the reconciler has ended.
    pub async fn status(&self) -> Option<Status> {
        let (answer, report) = oneshot::channel();
        self.reconciler.send(Question::Status(answer)).await.ok()?;
        let ReconcilerReport { mut status, unobserved } = report.await.ok()?;
        if let Some(names) = unobserved {
            let bpffs = self.questions.bpffs.clone();
            let read = spawn_blocking(move || pinned::read(&bpffs)).await.map_err(std::io::Error::other).flatten();
            match read {
                Ok(pinned) => pins::fill(&mut status, pinned.unwrap_or_default(), &names),
                Err(error) => status.problems.push(format!("what the programs serve cannot be read: {error}")),
            }
        }
        let ready = self.ready.borrow().clone();
        let obstacle = ServingObstacle::of(ready.serving, &self.uplink.borrow());
        let lease = match *self.lease_state.borrow() {
            LeaseState::Holds => "held",
            LeaseState::Expired(_) => "expired",
        };
        status.agent = AgentState {
            running: true,
            version: Some(env!("CARGO_PKG_VERSION").to_owned()),
            uptime_seconds: Some(self.since.elapsed().as_secs()),
            serves: Some(obstacle.is_none()),
            reason: obstacle.as_ref().map(|obstacle| obstacle.code().to_owned()),
            lease: Some(lease.to_owned()),
            controller: self.leader.borrow().clone(),
            api_server_away_seconds: self.outages.away().map(|away| away.as_secs()),
        };
        status.problems.extend(obstacle.map(|obstacle| format!("this node cannot carry egress traffic: {obstacle}")));
        status.problems.extend(self.questions.notes.lines());
        let bpffs = self.questions.bpffs.clone();
        // It walks maps, so it blocks.
        let read = spawn_blocking(move || {
            pins::read_kernel(&bpffs, true, &mut status);
            status
        });
        let mut status = read.await.ok()?;
        status.note_expired();
        status.last_warnings = self.questions.warnings.list(SystemTime::now());
        Some(status)
    }
}
