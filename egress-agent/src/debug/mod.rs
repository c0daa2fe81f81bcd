//! What an agent does and why, for whoever asks on its node: `egress-agent status`, `drops`, `log-level`; and the names that
//! other commands give to what they find in the pins.
//!
//! A running agent answers on a socket of its own ([`socket`]), one request and one answer in JSON for each connection, or a
//! line for each of many. Where none answers, what its programs do can still be read
//! from the pins ([`pins`]), and nothing else is known. The answer is made when it is asked for: nobody pays for it else.
//!
//! A socket in the file system, mode 0600: whoever may open it is root on the node, or in the agent's container. An answer
//! in a file would be as old as the last write, and would outlive the agent.

pub mod log;
pub mod pins;
pub mod socket;

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::spawn_blocking;

use crate::debug::log::{LogLevel, Trouble, Troubles};
use crate::metrics::snapshot::ReconcilerSnapshot;
use egress_core::display_names::Names;
use egress_core::model::view::Attach;
use egress_core::node_health::fitness::{Ready, ServingObstacle, UplinkState};
pub use egress_core::notes::Notes;
use egress_core::ownership::lease::LeaseState;
use egress_datapath::events::drops::Drops;
use egress_datapath::loader::pinned;
use egress_datapath::survey::report::{Gateway, Kernel, Object};
use egress_kube::api_outage::ApiOutages;

/// What can be asked.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "want", rename_all = "snake_case")]
pub enum Request {
    Status,
    /// What pods, objects and nodes are called.
    Names,
    /// Sampled drops, one line each (`drops::Line`): the recent ones, and with `follow` those to come; of one reason alone where
    /// that is named.
    Drops {
        follow: bool,
        #[serde(default)]
        reason: Option<String>,
    },
    /// How much is logged, after a change to `set` where that is there.
    LogLevel {
        set: Option<String>,
    },
    /// To know what the CNI has given a pod, and to say when the maps do. The question of `egress-agent cni`.
    Attach(Attach),
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    Status(Box<Status>),
    Names(Box<Names>),
    LogLevel(String),
    /// The maps know it, or never will for a reason.
    Attached {
        refused: Option<String>,
    },
    /// The question was not understood, or cannot be answered now.
    Error(String),
}

/// What one agent does. Of an agent that does not answer only what the pins say is there.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    pub agent: AgentState,
    /// What is known of the cluster; `None` where no agent answers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cluster: Option<ClusterState>,
    pub addresses: Vec<Address>,
    /// Objects that select pods of this node, or have an address here.
    #[serde(default)]
    pub objects: Vec<Object>,
    /// Nodes that pods of this one are sent to.
    #[serde(default)]
    pub gateways: Vec<Gateway>,
    /// Addresses of pods of this node that the programs know, and how many of them an object selects.
    pub pod_addresses: usize,
    pub selected_pod_addresses: usize,
    /// Devices, programs and maps; nothing where they cannot be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel: Option<Kernel>,
    /// What somebody should look at, one line each.
    pub problems: Vec<String>,
    /// The last warnings and errors of the agent's log.
    #[serde(default)]
    pub troubles: Vec<Trouble>,
}

impl Status {
    /// Says of addresses that the programs have that they are not emitted, where the lease has expired.
    fn note_expired(&mut self) {
        let has_expired = self.kernel.as_ref().is_some_and(|kernel| kernel.lease_seconds == Some(0));
        if !has_expired || !self.addresses.iter().any(|one| one.owned) {
            return;
        }
        for one in self.addresses.iter_mut().filter(|one| one.owned) {
            one.state = format!("not emitted, the lease has expired ({})", one.state);
        }
        self.problems.push(
            "the lease of this node has expired: its programs drop what they would give an egress IP (lease_expired)"
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
    /// Whether this node can carry egress traffic, as its health server says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub serves: Option<bool>,
    /// Why not: the reason of health checks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// `holds` or `fenced`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub leases: Option<String>,
    /// The node of the controller that has asked this agent last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub controller: Option<String>,
    /// For how long the API server has not answered, where it does not.
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
    /// Nodes that the leader has not heard for a while.
    pub suspects: Vec<String>,
    /// Objects that select a pod of this node which an older object serves.
    pub standby: Vec<StandbyPod>,
}

/// An egress IP that this node has, or is to have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Address {
    pub address: IpAddr,
    pub egress_id: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub object: Option<String>,
    /// The programs translate for it.
    pub owned: bool,
    /// The cluster wants it here; unknown where no agent answers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wanted: Option<bool>,
    /// One word or two for people: `served`, `not claimed yet`, `goes to NODE`, ...
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

/// The part of a status that the node's half knows.
#[derive(Debug)]
pub struct Report {
    pub status: Status,
    /// It has not looked at the kernel yet, where programs of a former run may serve: that is read from the pins then, with
    /// these names.
    pub blind: Option<Names>,
}

/// What the node's half is asked for.
#[derive(Debug)]
pub enum Question {
    /// Its part of a status.
    Status(oneshot::Sender<Report>),
    /// Its part of a scrape.
    Snapshot(oneshot::Sender<ReconcilerSnapshot>),
    /// What it calls pods, objects and nodes.
    Names(oneshot::Sender<Names>),
    /// To take note of a pod's addresses; it answers when the maps have them, or why they get none.
    Attach(Attach, oneshot::Sender<Option<String>>),
}

/// What is asked of an agent, and where, beside what its parts know of one another.
#[derive(Clone)]
pub struct Questions {
    pub socket: PathBuf,
    pub notes: Notes,
    pub drops: Drops,
    pub log: LogLevel,
    pub troubles: Troubles,
    /// Where the pins are.
    pub bpffs: PathBuf,
}

/// Where the parts of a status come from.
#[derive(Clone)]
pub struct Sources {
    pub node: mpsc::Sender<Question>,
    pub ready: watch::Receiver<Ready>,
    pub uplink: watch::Receiver<UplinkState>,
    pub lease_state: watch::Receiver<LeaseState>,
    /// The node of the controller that asks this agent.
    pub leader: watch::Receiver<Option<String>>,
    pub outages: ApiOutages,
    pub questions: Questions,
    pub since: Instant,
}

impl Sources {
    /// `None` where the node's half is going.
    pub async fn names(&self) -> Option<Names> {
        let (answer, names) = oneshot::channel();
        self.node.send(Question::Names(answer)).await.ok()?;
        names.await.ok()
    }

    /// Likewise. Waits until the maps know the pod.
    pub async fn attach(&self, attach: Attach) -> Option<Option<String>> {
        let (answer, attached) = oneshot::channel();
        self.node.send(Question::Attach(attach, answer)).await.ok()?;
        attached.await.ok()
    }

    /// Likewise.
    pub async fn status(&self) -> Option<Status> {
        let (answer, node) = oneshot::channel();
        self.node.send(Question::Status(answer)).await.ok()?;
        let Report { mut status, blind } = node.await.ok()?;
        if let Some(names) = blind {
            let bpffs = self.questions.bpffs.clone();
            let read = spawn_blocking(move || pinned::read(&bpffs)).await.map_err(std::io::Error::other).flatten();
            match read {
                Ok(pinned) => pins::fill(&mut status, pinned.unwrap_or_default(), &names),
                Err(error) => status.problems.push(format!("what the programs serve cannot be read: {error}")),
            }
        }
        let ready = self.ready.borrow().clone();
        let obstacle = ServingObstacle::of(ready.serving, &self.uplink.borrow());
        let leases = match *self.lease_state.borrow() {
            LeaseState::Holds => "holds",
            LeaseState::Expired(_) => "fenced",
        };
        status.agent = AgentState {
            running: true,
            version: Some(env!("CARGO_PKG_VERSION").to_owned()),
            uptime_seconds: Some(self.since.elapsed().as_secs()),
            serves: Some(obstacle.is_none()),
            reason: obstacle.as_ref().map(|obstacle| obstacle.code().to_owned()),
            leases: Some(leases.to_owned()),
            controller: self.leader.borrow().clone(),
            api_server_away_seconds: self.outages.away().map(|away| away.as_secs()),
        };
        status.problems.extend(obstacle.map(|obstacle| format!("this node cannot carry egress traffic: {obstacle}")));
        status.problems.extend(self.questions.notes.lines());
        let bpffs = self.questions.bpffs.clone();
        let (mut gateways, mut problems) = (std::mem::take(&mut status.gateways), std::mem::take(&mut status.problems));
        // Walks of maps.
        let looked = spawn_blocking(move || {
            let kernel = pins::look(&bpffs, true, &mut gateways, &mut problems);
            (kernel, gateways, problems)
        });
        (status.kernel, status.gateways, status.problems) = looked.await.ok()?;
        status.note_expired();
        status.troubles = self.questions.troubles.list();
        Some(status)
    }
}
