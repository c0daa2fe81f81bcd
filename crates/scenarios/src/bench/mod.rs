//! `cargo xtask bench`: how fast the datapath is, beside plain forwarding and netfilter's SNAT.
//!
//! One lab holds all peers, each on a pair of nodes of its own. A round measures every cell once, and the order of the peers
//! rotates, so that other load on the machine meets all of them. All traffic runs on one core: the threads that send and
//! answer are pinned to it, and the kernel forwards on the core that sends. Agents and API server are kept off that core.
//!
//! No figure is a pass criterion: a benchmark reports.

mod bench_cluster;
mod cache_use;
mod chart;
mod closes;
mod control_plane;
mod cpu;
pub(crate) mod drops;
mod flood;
mod forwarding;
mod isolation;
mod limits;
mod machine;
mod nat_entries;
mod nat_log;
mod peers;
mod plan;
mod prog_addresses;
mod prog_run;
mod programs;
mod report;
mod requests;
mod router;
mod samples;
mod stalls;

use clap::Args;

use crate::prelude::*;
use bench_cluster::BenchCluster;
use cpu::Cores;
pub(crate) use cpu::pin;
use egress_toolchain::packages::{self, Purpose};
use egress_toolchain::{BuildArgs, Built, Paths, Progress, ensure_built, ensure_built_static};
use machine::MeasuredOn;
use plan::{Peer, Work};
use samples::Results;

pub use report::{chart_of, churn_table_of, cores_table_of, load_table_of, machine_of, programs_table_of, table_of};

#[derive(Args)]
pub struct BenchArgs {
    /// Measure one agent and the leader in a large cluster instead, with an optimised agent
    #[arg(long, conflicts_with_all = ["only", "all", "rounds", "seconds"])]
    control_plane: bool,
    /// With --control-plane: two fifths of the policies are EgressIPs, two Egresses of a pool, one EgressServices
    #[arg(long, requires = "control_plane")]
    mixed: bool,
    /// With --control-plane: the agent as the image has it, linked with musl
    #[arg(long, requires = "control_plane")]
    of_image: bool,
    /// Every work once, as shortly as it goes: to see that it works, not to compare
    #[arg(long)]
    quick: bool,
    /// Measure only this; may be given several times. Without it: all but those that say so
    #[arg(long, value_enum)]
    only: Vec<Work>,
    /// Measure also what takes minutes and is left out otherwise
    #[arg(long, conflicts_with = "only")]
    all: bool,
    /// How often each cell is measured [default: 5]
    #[arg(long)]
    rounds: Option<usize>,
    /// Seconds per cell [default: 0.5]; with --only isolation, --only stalls and --only limits those of each part, with --only nat-log of all
    #[arg(long)]
    seconds: Option<f64>,
    /// What the namespaces' names begin with
    #[arg(long, default_value = "bench")]
    prefix: String,
    #[command(flatten)]
    build: BuildArgs,
}

/// How much of it.
#[derive(Clone, Debug)]
struct Effort {
    quick: bool,
    works: Vec<Work>,
    rounds: usize,
    cell: Duration,
    /// `--seconds`, or what is enough to see that it works; works under load have times of their own otherwise.
    under_load: Option<Duration>,
}

impl BenchArgs {
    fn effort(&self) -> Effort {
        let is_wanted = |work: &Work| match self.only.as_slice() {
            [] => self.quick || self.all || work.is_default(),
            only => only.contains(work),
        };
        let works = Work::ALL.into_iter().filter(is_wanted).collect();
        let rounds = self.rounds.unwrap_or(if self.quick { 1 } else { 5 }).max(1);
        let cell = self.seconds.unwrap_or(if self.quick { 0.1 } else { 0.5 }).clamp(0.01, 60.0);
        let under_load = self.seconds.or(self.quick.then_some(2.0)).map(|seconds| seconds.clamp(1.0, 3_600.0));
        Effort {
            quick: self.quick,
            works,
            rounds,
            cell: Duration::from_secs_f64(cell),
            under_load: under_load.map(Duration::from_secs_f64),
        }
    }
}

pub fn run(args: &BenchArgs) -> Result<()> {
    let progress = Progress::start();
    let paths = Paths::find()?;
    for purpose in [Purpose::Lab, Purpose::Programs] {
        packages::ensure(purpose, !args.build.no_install)?;
    }
    let folder = paths.target.join("bench");
    let say = |line: &str| progress.step(line);
    if args.control_plane {
        // Time and memory of a debug build are of no use.
        let build = BuildArgs { release: true, ..args.build.clone() };
        let built = match args.of_image {
            true => ensure_built_static(&build, &progress)?,
            false => ensure_built(&build, &progress)?,
        };
        let effort = control_plane::ControlPlaneEffort::new(args.quick, args.mixed);
        let figures = control_plane::measure(&built, &args.prefix, &effort, &say)?;
        control_plane::write(&figures, &folder).with_context(|| format!("write to {}", folder.display()))?;
        print!("{}", control_plane::table(&figures));
        progress.step(&format!("{}/control-plane.json", folder.display()));
        return Ok(());
    }
    let built = ensure_built(&args.build, &progress)?;
    let measured_on = MeasuredOn::this(&paths)?;
    progress.step(&measured_on.sentence());
    let mut results = Results::default();
    let measured = measure(&built, &paths, &args.prefix, &args.effort(), &say, &mut results);
    // What was measured before something went wrong is worth having.
    report::write(&results, &measured_on, &folder).with_context(|| format!("write to {}", folder.display()))?;
    print!("{}", report::table(&results));
    progress.step(&format!("{0}/results.json, {0}/results.svg", folder.display()));
    measured
}

/// The machinery runs: every program gets the intended packet and ends as intended. Figures are not checked.
pub fn tests() -> Vec<LabTest> {
    vec![
        LabTest::new("bench_programs_run_as_named", Duration::from_secs(120), try_programs)
            .alone()
            .not_on_ovn("a benchmark compares with the lab's own network"),
        LabTest::new("bench_egress_router_forwards", Duration::from_secs(120), try_router)
            .alone()
            .not_on_ovn("an egress router has a network of its own"),
    ]
}

fn try_programs(_context: &LabContext) -> Result<()> {
    let effort = Effort { quick: true, works: vec![Work::Programs], rounds: 1, cell: Duration::ZERO, under_load: None };
    let mut results = Results::default();
    programs::measure(&Paths::find()?, cpu::reserve()?.first, &effort, &|line| println!("{line}"), &mut results)?;
    for path in ["path out, hot", "path out, IPv6, hot"] {
        ensure!(results.cells.iter().any(|cell| cell.work.starts_with(path)), "{path}: not summed up");
    }
    print!("{}", report::table(&results));
    Ok(())
}

/// Each peer's pod forwards, and the plugins set up and take down. In a guest this is the measurement.
fn try_router(context: &LabContext) -> Result<()> {
    let effort = Effort {
        quick: true,
        works: vec![Work::EgressRouter],
        rounds: 3,
        cell: Duration::from_millis(200),
        under_load: None,
    };
    let mut results = Results::default();
    let prefix = format!("er{}", std::process::id());
    router::measure(&context.built, &prefix, cpu::reserve()?, &effort, &|line| println!("{line}"), &mut results)?;
    print!("{}", report::table(&results));
    Ok(())
}

/// Brings up the cluster, measures round by round, and takes it down.
fn measure(
    built: &Built,
    paths: &Paths,
    prefix: &str,
    effort: &Effort,
    say: &dyn Fn(&str),
    results: &mut Results,
) -> Result<()> {
    let cores = cpu::reserve()?;
    let works: Vec<Work> = effort.works.iter().copied().filter(|work| work.is_traffic()).collect();
    if !works.is_empty() {
        traffic(built, prefix, cores, effort, &works, say, results)?;
    }
    if effort.works.contains(&Work::Programs) {
        programs::measure(paths, cores.first, effort, say, results)?;
    }
    if effort.works.contains(&Work::Isolation) {
        let time = effort.under_load.unwrap_or(isolation::USUAL);
        isolation::measure(built, prefix, cores, time, say, results)?;
    }
    if effort.works.contains(&Work::Limits) {
        limits::measure(built, prefix, cores, effort.under_load.unwrap_or(limits::USUAL), say, results)?;
    }
    if effort.works.contains(&Work::EgressRouter) {
        router::measure(built, prefix, cores, effort, say, results)?;
    }
    if effort.works.contains(&Work::NatLog) {
        nat_log::measure(built, prefix, effort.under_load.unwrap_or(nat_log::USUAL), say, results)?;
    }
    // The last one, since it takes all of this process to the agent's CPU.
    if effort.works.contains(&Work::Stalls) {
        stalls::measure(built, prefix, cores, effort.quick, effort.under_load, say, results)?;
    }
    Ok(())
}

fn traffic(
    built: &Built,
    prefix: &str,
    cores: Cores,
    effort: &Effort,
    works: &[Work],
    say: &dyn Fn(&str),
    results: &mut Results,
) -> Result<()> {
    say(&format!("lab: {} pairs of nodes, traffic on CPU {}", Peer::ALL.len(), cores.first));
    let cluster = BenchCluster::start(built, prefix, cores)?;
    for round in 0..effort.rounds {
        for work in works {
            say(&format!("round {} of {}: {}", round + 1, effort.rounds, work.name()));
            cluster.round(*work, round, effort, results)?;
        }
    }
    cluster.tear_down()
}
