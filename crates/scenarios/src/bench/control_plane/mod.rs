//! `cargo xtask bench --control-plane`: what one agent costs in a large cluster, and how fast it follows.
//!
//! The lab's in-memory API server holds the cluster; one node of it is real, with a real agent and real maps, all others
//! are objects and nothing else. The controller asks whether they are there at the discard port (`--egressip-node-healthcheck-port=0`)
//! of addresses that the real node's kernel answers for.
//!
//! | phase | what is measured |
//! |---|---|
//! | the controller leads | all objects assigned: time, writes; then a node's loss: time, writes |
//! | the controller has ended | start to synchronised, bytes received; memory; CPU at rest; pod events, each until it is in the map |
//! | the same, a million entries in `nat` | a scrape, CPU at rest, pod events again |
//!
//! - **Synchronised** is the moment when the agent answers health checks: it does so when every watch has been read and the
//!   kernel's maps are as they shall be. It is asked every few milliseconds.
//! - **An event** is a change of a pod's labels in the API server's store. It has arrived when the pinned map `pods` says
//!   so; the map is read every fifth of a millisecond, in a process that is not the agent.
//! - **Bytes** are those that the node's uplink has received, headers included.
//!
//! | file | what |
//! |---|---|
//! | `world` | the cluster's objects |
//! | `process` | what the kernel says of the agent's process |
//! | `events` | pod events, and when they are in the map |
//! | `leading` | what the leader does |
//! | `full` | a million entries in `nat` |
//! | `figures` | names, goals, the table and `control-plane.json` |

mod events;
mod figures;
mod full;
mod leading;
mod process;
mod world;

use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use egress_lab::agents::{Agent, AgentOptions};
use egress_lab::apiserver::ApiServer;
use egress_lab::cluster::{ApiChoice, Cluster};
use egress_lab::{Lab, LabBuilder, MANAGEMENT, Node, Quirks};
use egress_toolchain::{Built, Paths};
use figures::{Figure, Figures};
use process::Process;
use world::Scale;

pub(super) use figures::{table, write};

const HEALTH_PORT: u16 = 9107;
/// Seconds: each node is asked once a second.
const TOTAL_TIMEOUT: u32 = 4;
/// How often an agent is asked whether it is synchronised.
const LOOK: Duration = Duration::from_millis(5);
/// How long a phase may take before it is given up.
const PATIENCE: Duration = Duration::from_secs(600);

/// How much of it.
pub(super) struct Effort {
    scale: Scale,
    /// How often the agent is started and synchronises.
    starts: usize,
    rest: Duration,
    events: usize,
    /// Of the last phase.
    mappings: u32,
}

impl Effort {
    pub(super) fn new(quick: bool) -> Self {
        match quick {
            true => {
                let scale = Scale { nodes: 20, pods: 500, own_pods: 50, objects: 50 };
                Self { scale, starts: 2, rest: Duration::from_secs(2), events: 100, mappings: 5_000 }
            }
            false => {
                let scale = Scale { nodes: 1_000, pods: 100_000, own_pods: 500, objects: 10_000 };
                Self { scale, starts: 5, rest: Duration::from_secs(30), events: 3_000, mappings: 500_000 }
            }
        }
    }
}

/// The lab with its one real node. Fields are dropped in this order.
struct Ground {
    agent: Option<Agent>,
    cluster: Cluster,
    lab: Lab,
    options: AgentOptions,
}

pub(super) fn measure(built: &Built, prefix: &str, effort: &Effort, say: &dyn Fn(&str)) -> Result<Figures> {
    let scale = &effort.scale;
    say(&format!(
        "{} nodes, {} pods, {} of them on the real node, {} objects",
        scale.nodes, scale.pods, scale.own_pods, scale.objects
    ));
    let mut ground = Ground::start(built, prefix, scale)?;
    let mut figures = Figures::default();
    ground.lead(scale, say, &mut figures)?;
    ground.follow(effort, say, &mut figures)?;
    ground.bear(effort, say, &mut figures)?;
    ground.finish()?;
    Ok(figures)
}

impl Ground {
    fn start(built: &Built, prefix: &str, scale: &Scale) -> Result<Self> {
        let bare = |_| Quirks::default();
        let lab =
            LabBuilder::default().readable_prefix(prefix).nodes(1).quirks(bare).start().context("bring up the lab")?;
        let cluster = Cluster::start(&lab, &ApiChoice::InMemory)?;
        cluster.install_crd(&Paths::find()?.root.join("deploy/crd/crd.yaml"))?;
        cluster.publish(&lab)?;
        // More pods than the lab's usual subnet of a node holds.
        for node in lab.nodes() {
            let management = format!("{}/22", world::management()?);
            node.host.exec("ip", &["address", "add", &management, "dev", MANAGEMENT])?;
        }
        for net in [world::NODE_NETWORK, world::PODS] {
            for node in lab.nodes() {
                node.host.exec("ip", &["route", "add", "local", net, "dev", "lo"])?;
            }
        }
        let extra = [
            format!("--egressip-reachability-total-timeout={TOTAL_TIMEOUT}"),
            // Nodes that are objects acknowledge nothing, and there is no agent whose end is to be waited for.
            "--egressip-reachability-grace=0".to_owned(),
            format!("--cluster-subnets={}", world::PODS),
            format!("--metrics-bind-address={}", full::METRICS),
            format!("--nat-entries={}", full::ROOM),
        ];
        let mut options = AgentOptions::new(&built.agent, &cluster).with(extra);
        options.controller_extra.extend(["--egressip-node-healthcheck-port", "0"].map(str::to_owned));
        let ground = Self { agent: None, cluster, lab, options };
        world::fill(ground.server()?, scale)?;
        Ok(ground)
    }

    fn server(&self) -> Result<&ApiServer> {
        self.cluster.in_memory().context("the in-memory API server is not there")
    }

    fn node(&self) -> Result<&Node> {
        self.lab.nodes().first().context("a lab without nodes")
    }

    /// Starts the agent, after ending the one that runs; returns how long it took until it was synchronised.
    fn start_agent(&mut self) -> Result<Duration> {
        let start = Instant::now();
        match &mut self.agent {
            Some(agent) => agent.restart()?,
            None => self.agent = Some(Agent::start(&self.lab, self.node()?, &self.options)?),
        }
        while !self.is_synchronised()? {
            self.agent()?.ensure_alive()?;
            ensure!(start.elapsed() < PATIENCE, "the agent is not synchronised after {} s", PATIENCE.as_secs());
            std::thread::sleep(LOOK);
        }
        Ok(start.elapsed())
    }

    fn agent(&mut self) -> Result<&mut Agent> {
        self.agent.as_mut().context("no agent runs")
    }

    fn controller(&mut self) -> Result<Process> {
        let pid = self.agent()?.controller()?.pid()?.context("the controller does not run")?;
        Ok(Process::of(pid))
    }

    fn process(&mut self) -> Result<Process> {
        let pid = self.agent()?.pid()?.context("the agent does not run")?;
        Ok(Process::of(pid))
    }

    fn is_synchronised(&self) -> Result<bool> {
        let node = self.node()?;
        let to = SocketAddr::new(world::management()?.into(), HEALTH_PORT);
        node.host.run(|| Ok(TcpStream::connect_timeout(&to, Duration::from_millis(200)).is_ok()))
    }

    /// One agent of many; the controller is elsewhere.
    fn follow(&mut self, effort: &Effort, say: &dyn Fn(&str), figures: &mut Figures) -> Result<()> {
        say("the agent: start to synchronised");
        self.agent()?.controller()?.kill()?;
        let (mut starts, mut bytes) = (Vec::new(), Vec::new());
        for _ in 0..effort.starts {
            // Of the one that has the programs loaded already: so it is after each but the first start on a node.
            let before = process::received(self.node()?)?;
            starts.push(self.start_agent()?.as_secs_f64());
            bytes.push((process::received(self.node()?)? - before) as f64 / 1e6);
        }
        figures.add(Figure::Synchronised, &starts);
        figures.add(Figure::BytesToSynchronise, &bytes);
        let process = self.process()?;
        figures.add(Figure::PeakMemory, &[process.memory()?.peak_mib]);
        say("the agent: at rest");
        let cost = process.cost_of(|| {
            std::thread::sleep(effort.rest);
            Ok(())
        })?;
        figures.add(Figure::CpuAtRest, &[cost.percent_of_a_core]);
        figures.add(Figure::Memory, &[process.memory()?.resident_mib]);
        say(&format!("the agent: {} pod events", effort.events));
        let before = process::received(self.node()?)?;
        let mut arrivals = Vec::new();
        let cost = process.cost_of(|| {
            arrivals = events::play(self, effort, effort.events)?;
            Ok(())
        })?;
        let received = process::received(self.node()?)? - before;
        figures.add(Figure::CpuAtEvents, &[cost.percent_of_a_core]);
        figures.add(Figure::BytesPerEvent, &[received as f64 / arrivals.len() as f64]);
        figures.add_percentiles([Figure::EventMedian, Figure::EventTail, Figure::EventWorst], &arrivals);
        figures.add(Figure::MemoryAtEnd, &[process.memory()?.resident_mib]);
        Ok(())
    }

    fn finish(self) -> Result<()> {
        let Self { agent, cluster, lab, .. } = self;
        drop((agent, cluster));
        lab.tear_down()
    }
}

/// What an object of the API server says at a path within it.
fn text<'a>(object: &'a Value, path: &str) -> &'a str {
    object.pointer(path).and_then(Value::as_str).unwrap_or_default()
}
