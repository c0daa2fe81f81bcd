//! `cargo xtask bench --control-plane`: what one agent costs in a large cluster, and how fast it follows.
//!
//! One node is real; all others are objects in the in-memory API server, whose health addresses the real node's kernel answers.
//! 1. The controller leads: all objects are assigned, then a node is lost (time, writes).
//! 2. An agent starts: time and bytes until it is synchronised (it answers health checks), memory, CPU at rest, pod events.
//! 3. The same with a million entries in `nat`, and a scrape.
//!
//! A pod event is a change of labels in the API server's store. It ends when the pinned map `pods` has it.

mod events;
mod figures;
mod full_nat_map;
mod large_cluster;
mod leading;
mod process;

use std::net::TcpStream;

use crate::prelude::*;
use egress_lab::MANAGEMENT;
use egress_lab::api_objects::HEALTH_PORT;
use egress_lab::apiserver::ApiServer;
use egress_lab::kube_api::ApiChoice;
use egress_toolchain::Built;
use figures::{ControlPlaneFigure, Figures};
use large_cluster::Scale;
use process::MeasuredProcess;

pub(super) use figures::{table, write};

/// Seconds: each node is asked once a second.
const TOTAL_TIMEOUT: u32 = 4;
/// How often an agent is asked whether it is synchronised.
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// How long a phase may take before it is given up.
const PATIENCE: Duration = Duration::from_secs(600);

/// How much of it.
pub(super) struct ControlPlaneEffort {
    scale: Scale,
    /// How often the agent is started and synchronises.
    starts: usize,
    rest: Duration,
    events: usize,
    /// Of the last phase.
    mappings: u32,
}

impl ControlPlaneEffort {
    /// `is_mixed`: policies of all kinds instead of EgressIPs alone.
    pub(super) fn new(quick: bool, is_mixed: bool) -> Self {
        match quick {
            true => {
                let scale = Scale { nodes: 20, pods: 500, own_pods: 50, objects: 50, is_mixed };
                Self { scale, starts: 2, rest: Duration::from_secs(2), events: 100, mappings: 5_000 }
            }
            false => {
                let scale = Scale { nodes: 1_000, pods: 100_000, own_pods: 500, objects: 10_000, is_mixed };
                Self { scale, starts: 5, rest: Duration::from_secs(30), events: 3_000, mappings: 500_000 }
            }
        }
    }
}

/// The cluster with its one real node and its agent.
struct ScaleCluster {
    base: TestCluster,
    options: AgentOptions,
}

pub(super) fn measure(built: &Built, prefix: &str, effort: &ControlPlaneEffort, say: &dyn Fn(&str)) -> Result<Figures> {
    let scale = &effort.scale;
    say(&format!(
        "{} nodes, {} pods, {} of them on the real node, {} objects",
        scale.nodes, scale.pods, scale.own_pods, scale.objects
    ));
    let mut cluster = ScaleCluster::start(built, prefix, scale)?;
    let mut figures = Figures::default();
    cluster.lead(scale, say, &mut figures)?;
    cluster.follow(effort, say, &mut figures)?;
    cluster.bear(effort, say, &mut figures)?;
    cluster.finish()?;
    Ok(figures)
}

impl ScaleCluster {
    fn start(built: &Built, prefix: &str, scale: &Scale) -> Result<Self> {
        let bare = |_| HostConfig::default();
        let lab = LabBuilder::default().readable_prefix(prefix).nodes(1).host_config(bare);
        let base = TestCluster::bring_up(lab, None, &ApiChoice::InMemory)?;
        // More pods than the lab's usual subnet of a node holds.
        for node in base.lab.nodes() {
            let management = format!("{}/22", large_cluster::management()?);
            node.host.exec("ip", &["address", "add", &management, "dev", MANAGEMENT])?;
        }
        for net in [large_cluster::NODE_NETWORK, large_cluster::PODS] {
            for node in base.lab.nodes() {
                node.host.exec("ip", &["route", "add", "local", net, "dev", "lo"])?;
            }
        }
        let extra = [
            format!("--egressip-reachability-total-timeout={TOTAL_TIMEOUT}"),
            // Nodes that are objects acknowledge nothing, and there is no agent whose end is to be waited for.
            "--egressip-reachability-grace=0".to_owned(),
            format!("--cluster-subnets={}", large_cluster::PODS),
            format!("--metrics-bind-address={}", full_nat_map::METRICS),
            format!("--nat-entries={}", full_nat_map::ROOM),
        ];
        let mut options = AgentOptions::new(&built.agent, &base.api).with(extra);
        options.controller_extra.extend(["--egressip-node-healthcheck-port", "0"].map(str::to_owned));
        if scale.is_mixed {
            options.controller_extra.extend(["--antrea", "--cilium"].map(str::to_owned));
        }
        let cluster = Self { base, options };
        large_cluster::fill(cluster.server()?, scale)?;
        Ok(cluster)
    }

    fn server(&self) -> Result<&ApiServer> {
        self.base.api.in_memory().context("the in-memory API server is not there")
    }

    fn node(&self) -> Result<&LabNode> {
        self.base.lab.nodes().first().context("a lab without nodes")
    }

    /// Starts the agent, after ending the one that runs; returns how long it took until it was synchronised.
    fn start_agent(&mut self) -> Result<Duration> {
        let start = Instant::now();
        match self.base.agents.first_mut() {
            Some(agent) => agent.restart()?,
            None => self.base.start_agents(&self.options)?,
        }
        while !self.is_synchronised()? {
            self.agent()?.ensure_alive()?;
            ensure!(start.elapsed() < PATIENCE, "the agent is not synchronised after {} s", PATIENCE.as_secs());
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(start.elapsed())
    }

    fn agent(&mut self) -> Result<&mut Agent> {
        self.base.agents.first_mut().context("no agent runs")
    }

    fn controller(&mut self) -> Result<MeasuredProcess> {
        let pid = self.agent()?.controller()?.pid()?.context("the controller does not run")?;
        Ok(MeasuredProcess::of(pid))
    }

    fn process(&mut self) -> Result<MeasuredProcess> {
        let pid = self.agent()?.pid()?.context("the agent does not run")?;
        Ok(MeasuredProcess::of(pid))
    }

    fn is_synchronised(&self) -> Result<bool> {
        let node = self.node()?;
        let to = SocketAddr::new(large_cluster::management()?.into(), HEALTH_PORT);
        node.host.run(|| Ok(TcpStream::connect_timeout(&to, Duration::from_millis(200)).is_ok()))
    }

    /// One agent of many; the controller is elsewhere.
    fn follow(&mut self, effort: &ControlPlaneEffort, say: &dyn Fn(&str), figures: &mut Figures) -> Result<()> {
        say("the agent: start to synchronised");
        self.agent()?.controller()?.kill()?;
        let (mut starts, mut bytes) = (Vec::new(), Vec::new());
        for _ in 0..effort.starts {
            // Of the one that has the programs loaded already: so it is after each but the first start on a node.
            let before = process::received(self.node()?)?;
            starts.push(self.start_agent()?.as_secs_f64());
            bytes.push((process::received(self.node()?)? - before) as f64 / 1e6);
        }
        figures.add(ControlPlaneFigure::Synchronised, &starts);
        figures.add(ControlPlaneFigure::BytesToSynchronise, &bytes);
        let process = self.process()?;
        figures.add(ControlPlaneFigure::PeakMemory, &[process.memory()?.peak_mib]);
        say("the agent: at rest");
        let cost = process.cost_of(|| {
            std::thread::sleep(effort.rest);
            Ok(())
        })?;
        figures.add(ControlPlaneFigure::CpuAtRest, &[cost.percent_of_a_core]);
        figures.add(ControlPlaneFigure::Memory, &[process.memory()?.resident_mib]);
        say(&format!("the agent: {} pod events", effort.events));
        let before = process::received(self.node()?)?;
        let mut arrivals = Vec::new();
        let cost = process.cost_of(|| {
            arrivals = events::play(self, effort, effort.events)?;
            Ok(())
        })?;
        let received = process::received(self.node()?)? - before;
        figures.add(ControlPlaneFigure::CpuAtEvents, &[cost.percent_of_a_core]);
        figures.add(ControlPlaneFigure::BytesPerEvent, &[received as f64 / arrivals.len() as f64]);
        figures.add_percentiles(
            [ControlPlaneFigure::EventMedian, ControlPlaneFigure::EventTail, ControlPlaneFigure::EventWorst],
            &arrivals,
        );
        figures.add(ControlPlaneFigure::MemoryAtEnd, &[process.memory()?.resident_mib]);
        Ok(())
    }

    fn finish(self) -> Result<()> {
        self.base.tear_down()
    }
}

/// A value of an object in the API server's store, by its path.
fn text<'a>(object: &'a Value, path: &str) -> &'a str {
    object.pointer(path).and_then(Value::as_str).unwrap_or_default()
}
