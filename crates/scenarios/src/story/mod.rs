//! The walkthrough that `cargo xtask run` plays: real agents on a real kernel, and a server outside that says whose
//! address it saw.
//!
//! `cast` says who plays, `stage` is the lab with everything on it, `acts` is the story, `report` compares what was
//! expected with what was seen.

mod acts;
mod cast;
mod holding;
mod report;
mod stage;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;

use egress_lab::agents::{Agent, AgentOptions, last_lines};
use egress_lab::capture::Capture;
use egress_lab::cluster::{ApiChoice, Cluster};
use egress_lab::traffic::server::Server;
use egress_lab::{Lab, LabBuilder, yield_to_signal};
use egress_toolchain::packages::{self, Purpose};
use egress_toolchain::{BuildArgs, Paths, Progress, ensure_built};
use report::Report;
use stage::Stage;

#[derive(Args)]
pub struct RunArgs {
    /// How many nodes
    #[arg(long, default_value_t = 3)]
    nodes: usize,
    /// How many pods on each node
    #[arg(long, default_value_t = 2)]
    pods: usize,
    /// Stay up after the story, until Ctrl-C
    #[arg(long)]
    hold: bool,
    /// Keep the logs of agents and servers in the target folder
    #[arg(long)]
    keep_logs: bool,
    /// Use this API server instead of the in-memory one
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// What the namespaces' names begin with
    #[arg(long, default_value = "lab")]
    prefix: String,
    /// How many seconds an assignment may take
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    patience: u64,
    /// Use this egress-agent instead of building one
    #[arg(long, value_name = "FILE", hide = true)]
    agent: Option<PathBuf>,
    #[command(flatten)]
    build: BuildArgs,
}

pub fn run(args: &RunArgs) -> Result<()> {
    ensure!(args.nodes >= 2, "the story moves an address from node to node and needs at least two");
    ensure!(args.pods >= 1, "the story needs pods");
    let progress = Progress::start();
    let paths = Paths::find()?;
    for purpose in [Purpose::Lab, Purpose::Traffic, Purpose::Programs] {
        packages::ensure(purpose, !args.build.no_install)?;
    }
    let agent = match &args.agent {
        Some(agent) => agent.clone(),
        None => ensure_built(&args.build, &progress)?.agent,
    };
    progress.step(&format!("lab: {} nodes with {} pods each", args.nodes, args.pods));
    let mut stage = set(args, agent, &paths, &progress)?;
    let played = acts::play(&mut stage).context("the story broke off");
    if played.is_err() {
        yield_to_signal();
    }
    let concluded = played.and_then(|()| conclude(&stage));
    if concluded.is_err() {
        show_agents(&stage);
    }
    if args.hold {
        if let Err(error) = &concluded {
            println!("\nerror: {error:#}");
        }
        holding::hold(&stage);
    }
    let taken_down = take_down(stage, args);
    progress.step("the lab is down");
    concluded.and(taken_down)
}

/// Brings up everything that the story needs.
fn set(args: &RunArgs, agent: PathBuf, paths: &Paths, progress: &Progress) -> Result<Stage> {
    let lab = start_lab(args, paths)?;
    progress.step(&format!("lab {}: network up", lab.prefix()));
    let server = Server::outside(&lab)?;
    let cluster = Cluster::start(&lab, &ApiChoice::new(args.kubeconfig.clone()))?;
    cluster.install_crd(&paths.root.join("deploy/crd/crd.yaml"))?;
    // Of a story that was broken off on the same server.
    acts::withdraw(&cluster)?;
    cluster.publish(&lab)?;
    progress.step(&format!("Kubernetes: {}", cluster.description()));
    if !Cluster::has_kubectl() {
        progress.step("kubectl is not installed: the lab's own client makes the same requests in its place");
    }
    let options = AgentOptions::new(&agent, &cluster).with(log_options(args));
    let capture = Some(Capture::start(&lab)?);
    let agents = Agent::start_all(&lab, &options)?;
    progress.step(&format!("{} agents started", agents.len()));
    let examples = paths.root.join("deploy/examples");
    let patience = Duration::from_secs(args.patience);
    Ok(Stage { capture, agents, server, cluster, lab, report: Report::default(), examples, patience })
}

/// Packets are logged under the name of the programs' crate.
fn log_options(args: &RunArgs) -> Vec<String> {
    let level = args.build.log_packets.then_some("--log-level=info,egress_ebpf=trace");
    level.into_iter().map(str::to_owned).collect()
}

fn start_lab(args: &RunArgs, paths: &Paths) -> Result<Lab> {
    let mut builder = LabBuilder::default().readable_prefix(&args.prefix).nodes(args.nodes);
    for pod in cast::cast(args.nodes, args.pods) {
        builder = builder.pod(pod);
    }
    if args.keep_logs {
        builder = builder.keep_logs(paths.target.join("run-logs"));
    }
    builder.start().context("cannot bring up the lab")
}

/// Prints the table; an error when something was not as expected.
fn conclude(stage: &Stage) -> Result<()> {
    println!("\n{}", stage.report);
    let (failed, count) = (stage.report.failed(), stage.report.count());
    println!("{} of {count} checks as expected", count - failed);
    ensure!(failed == 0, "{failed} of {count} checks differ from what was expected");
    Ok(())
}

/// The agents' last words, which tell more than the checks do.
fn show_agents(stage: &Stage) {
    for agent in &stage.agents {
        println!("\n-- {} ({})", agent.log().display(), agent.node().name());
        println!("{}", last_lines(agent.log(), 10));
    }
}

fn take_down(stage: Stage, args: &RunArgs) -> Result<()> {
    let Stage { capture, agents, server, cluster, lab, .. } = stage;
    drop((capture, agents));
    let removed =
        if args.kubeconfig.is_some() { acts::withdraw(&cluster).and(cluster.remove_objects()) } else { Ok(()) };
    drop((cluster, server));
    if args.keep_logs {
        println!("logs: {}", lab.logs().display());
    }
    removed.and(lab.tear_down())
}
