//! The walkthrough that `cargo xtask run` plays: real agents on a real kernel, and a server outside that reports the source
//! address of each request.
//!
//! `pods` lists the pods, `walkthrough` is the cluster and what the steps do on it, `egress_ip`, `antrea`, `cilium` and
//! `egress_router` are the stories, `steps` has what both do, `report` compares what was expected with what was seen.

mod antrea;
mod cilium;
mod egress_ip;
mod egress_router;
mod hold;
mod pods;
mod report;
mod steps;
mod walkthrough;

use clap::{Args, ValueEnum};

use crate::prelude::*;
use egress_lab::kube_api::{ApiChoice, KubeApi};
use egress_lab::process::last_lines;
use egress_lab::topology::builder::Ground;
use egress_lab::yield_to_signal;
use egress_toolchain::packages::{self, Purpose};
use egress_toolchain::{BuildArgs, Paths, Progress, ensure_built, ovn};
use report::StoryReport;
use walkthrough::Walkthrough;

#[derive(Args)]
pub struct StoryArgs {
    /// Which API's story, or the router's
    #[arg(long, value_enum, default_value_t = StoryApi::EgressIp)]
    story: StoryApi,
    /// What is in the place of OVN-Kubernetes
    #[arg(long, value_enum, default_value_t)]
    ground: Ground,
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

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum StoryApi {
    /// EgressIP of OVN-Kubernetes
    EgressIp,
    /// Egress and ExternalIPPool of Antrea
    Antrea,
    /// CiliumEgressGatewayPolicy of Cilium
    Cilium,
    /// The CNI plugin that makes a pod a router
    EgressRouter,
}

impl StoryApi {
    fn play(self, walkthrough: &mut Walkthrough) -> Result<()> {
        match self {
            Self::EgressIp => egress_ip::play(walkthrough),
            Self::Antrea => antrea::play(walkthrough),
            Self::Cilium => cilium::play(walkthrough),
            Self::EgressRouter => egress_router::play(walkthrough),
        }
    }

    /// Arguments of the controllers.
    fn arguments(self) -> &'static [&'static str] {
        match self {
            Self::EgressIp | Self::EgressRouter => &[],
            Self::Antrea => &["--antrea"],
            Self::Cilium => &["--cilium"],
        }
    }
}

/// Takes the objects of all stories out of an API server.
fn withdraw(api: &KubeApi) -> Result<()> {
    let mut objects = egress_ip::OBJECTS.iter().chain(&antrea::OBJECTS).chain(&cilium::OBJECTS);
    objects.try_for_each(|(kind, name)| api.delete(&kind.path(name)))
}

pub fn run(args: &StoryArgs) -> Result<()> {
    ensure!(args.nodes >= 2, "the story moves an address from node to node and needs at least two");
    ensure!(args.pods >= 1, "the story needs pods");
    let progress = Progress::start();
    let paths = Paths::find()?;
    for purpose in [Purpose::Lab, Purpose::Traffic, Purpose::Programs] {
        packages::ensure(purpose, !args.build.no_install)?;
    }
    if args.ground.is_ovn() {
        ovn::ensure(&paths, &progress)?;
    }
    let (agent, router) = match &args.agent {
        Some(agent) => (agent.clone(), agent.with_file_name("egress-router")),
        None => {
            let built = ensure_built(&args.build, &progress)?;
            (built.agent, built.router)
        }
    };
    progress.step(&format!("lab: {} nodes with {} pods each", args.nodes, args.pods));
    let mut walkthrough = set(args, agent, router, &paths, &progress)?;
    let played = args.story.play(&mut walkthrough).context("the story broke off");
    if played.is_err() {
        yield_to_signal();
    }
    let concluded = played.and_then(|()| conclude(&walkthrough));
    if concluded.is_err() {
        show_agents(&walkthrough);
    }
    if args.hold {
        if let Err(error) = &concluded {
            println!("\nerror: {error:#}");
        }
        hold::hold(&mut walkthrough);
    }
    let taken_down = take_down(walkthrough, args);
    progress.step("the lab is down");
    concluded.and(taken_down)
}

/// Brings up everything that the story needs.
fn set(args: &StoryArgs, agent: PathBuf, router: PathBuf, paths: &Paths, progress: &Progress) -> Result<Walkthrough> {
    // Objects of a story that was broken off on the same server are removed first.
    let api = ApiChoice::new(args.kubeconfig.clone());
    let mut cluster = TestCluster::bring_up_on(lab_of(args, paths), &api, withdraw)?;
    progress.step(&format!("lab {}: network up", cluster.lab.prefix()));
    progress.step(&format!("Kubernetes: {}", cluster.api.description()));
    if !KubeApi::has_kubectl() {
        progress.step("kubectl is not installed: the lab's own client makes the same requests in its place");
    }
    let capture = Some(Capture::start(&cluster.lab)?);
    cluster.start_agents(&AgentOptions::new(&agent, &cluster.api).with(options(args)))?;
    progress.step(&format!("{} agents started", cluster.agents.len()));
    let examples = paths.root.join("deploy/examples");
    let patience = Duration::from_secs(args.patience);
    Ok(Walkthrough { capture, cluster, router, report: StoryReport::default(), examples, patience })
}

/// Packets are logged under the name of the programs' crate.
fn options(args: &StoryArgs) -> Vec<String> {
    let level = args.build.log_packets.then_some("--log-level=info,egress_ebpf=trace");
    let pages = format!("--metrics-bind-address={}", hold::METRICS);
    args.story.arguments().iter().copied().chain(level).map(str::to_owned).chain([pages]).collect()
}

fn lab_of(args: &StoryArgs, paths: &Paths) -> LabBuilder {
    let mut builder = LabBuilder::default().ground(args.ground).readable_prefix(&args.prefix).nodes(args.nodes);
    for pod in pods::pods(args.nodes, args.pods) {
        builder = builder.pod(pod);
    }
    if args.keep_logs {
        builder = builder.keep_logs(paths.target.join("run-logs"));
    }
    builder
}

/// Prints the table; an error when something was not as expected.
fn conclude(walkthrough: &Walkthrough) -> Result<()> {
    println!("\n{}", walkthrough.report);
    let (failed, count) = (walkthrough.report.failed(), walkthrough.report.count());
    println!("{} of {count} checks as expected", count - failed);
    ensure!(failed == 0, "{failed} of {count} checks differ from what was expected");
    Ok(())
}

/// The end of the agents' logs, which say more than the checks do.
fn show_agents(walkthrough: &Walkthrough) {
    for agent in &walkthrough.cluster.agents {
        println!("\n-- {} ({})", agent.log().display(), agent.node().name());
        println!("{}", last_lines(agent.log(), 10));
    }
}

fn take_down(walkthrough: Walkthrough, args: &StoryArgs) -> Result<()> {
    let Walkthrough { capture, mut cluster, .. } = walkthrough;
    cluster.agents.clear();
    drop(capture);
    let removed = match args.kubeconfig.is_some() {
        true => withdraw(&cluster.api).and(cluster.api.remove_objects()),
        false => Ok(()),
    };
    if args.keep_logs {
        println!("logs: {}", cluster.lab.logs().display());
    }
    removed.and(cluster.tear_down())
}
