//! `cargo xtask soak`: randomised fault injection (seeded), one fault per round, under load from pods on all nodes.
//!
//! Checked at all times, by a capture of each packet that leaves a node:
//! - no packet has a wrong source, and no two nodes send from one address at the same time;
//! - after five seconds of quiet the status says what the nodes do;
//! - a fault that leaves the path whole moves nothing and loses nothing;
//! - an API server outage fills neither logs nor memory.
//!
//! A violation is reported with the command that repeats its round. Times are figures, not promises.

mod chart;
pub(crate) mod echo;
mod fault;
mod figures;
mod inject;
pub(crate) mod loaded_cluster;
mod outage_cost;
mod report;
mod round;
pub(crate) mod sampler;
pub(crate) mod streams;
pub(crate) mod wire;

use std::os::unix::fs::PermissionsExt;

use clap::Args;

use crate::prelude::*;
use egress_lab::process::last_lines;
use egress_toolchain::packages::{self, Purpose};
use egress_toolchain::{BuildArgs, Built, Paths, Progress, ensure_built};
use fault::{Extent, Fault, RoundPlan};
use loaded_cluster::{ClusterShape, LoadedCluster};
use report::SoakReport;
use round::Soak;

#[derive(Args)]
pub struct SoakArgs {
    /// How many rounds
    #[arg(long, default_value_t = 200)]
    rounds: usize,
    /// The number that all chance comes from
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Only this fault; may be given several times
    #[arg(long, value_enum)]
    only: Vec<Fault>,
    /// Only this round of all
    #[arg(long, value_name = "NUMBER")]
    round: Option<usize>,
    /// Seconds that the API server may be gone; rounds then take up to as long
    #[arg(long, value_name = "SECONDS", default_value_t = 12, value_parser = clap::value_parser!(u64).range(3..=600))]
    longest_outage: u64,
    /// The total timeout of agents and controllers, as their flag takes it, like 300ms
    #[arg(long, value_name = "TIME")]
    total_timeout: Option<String>,
    /// What the namespaces' names begin with
    #[arg(long, default_value = "soak")]
    prefix: String,
    #[command(flatten)]
    build: BuildArgs,
}

impl SoakArgs {
    fn plans(&self) -> Vec<RoundPlan> {
        let rounds = match self.round {
            Some(round) => round..=round,
            None => 1..=self.rounds,
        };
        let extent = Extent::Whole { longest_outage: self.longest_outage };
        rounds.map(|round| RoundPlan::of(self.seed, round, &self.only, extent)).collect()
    }

    fn again(&self, round: usize) -> String {
        let only: Vec<String> = self.only.iter().map(|fault| format!(" --only {}", fault.name())).collect();
        let (seed, outage) = (self.seed, self.longest_outage);
        let timeout = self.total_timeout.as_ref().map(|time| format!(" --total-timeout {time}")).unwrap_or_default();
        format!("cargo xtask soak --seed {seed} --round {round} --longest-outage {outage}{timeout}{}", only.concat())
    }
}

pub fn run(args: &SoakArgs) -> Result<()> {
    let progress = Progress::start();
    let paths = Paths::find()?;
    for purpose in [Purpose::Lab, Purpose::Programs] {
        packages::ensure(purpose, !args.build.no_install)?;
    }
    let built = ensure_built(&args.build, &progress)?;
    let folder = paths.target.join("soak");
    let plans = args.plans();
    let first = plans.first().copied().context("no rounds")?;
    progress.step(&format!("lab: {} nodes; seed {}, {} rounds", ClusterShape::SOAK.nodes, args.seed, plans.len()));
    let logs = folder.join("logs");
    if logs.exists() {
        std::fs::remove_dir_all(&logs).with_context(|| format!("remove {}", logs.display()))?;
    }
    let timeout = args.total_timeout.as_ref().map(|time| format!("--egressip-reachability-total-timeout={time}"));
    let shape =
        ClusterShape { arguments: &timeout.iter().map(String::as_str).collect::<Vec<_>>(), ..ClusterShape::SOAK };
    let mut soak = Soak::new(LoadedCluster::start(&shape, &built, Some(&args.prefix), logs)?)?;
    let again = |round: usize| args.again(round);
    let mut played = 0;
    let mut outcome = soak.begin(&first);
    for plan in &plans {
        if outcome.is_err() {
            break;
        }
        outcome = soak.play(plan).map(|line| progress.step(&line)).with_context(|| {
            format!("round {} ({}); again: {}", plan.round, plan.fault.name(), args.again(plan.round))
        });
        played += usize::from(outcome.is_ok());
        // What was seen before something goes wrong is worth having.
        let written = SoakReport::of(&soak, args.seed, played, &again).write(&folder);
        written.with_context(|| format!("write to {}", folder.display()))?;
    }
    let report = SoakReport::of(&soak, args.seed, played, &again);
    print!("{}", report.text());
    progress.step(&format!("{0}/results.json, {0}/results.svg, {0}/logs", folder.display()));
    let violations = soak.violations.len();
    outcome?;
    soak.cluster.finish()?;
    ensure!(violations == 0, "{violations} promises were broken");
    Ok(())
}

/// A share of the rounds that a test run has time for.
pub fn tests() -> Vec<LabTest> {
    vec![
        LabTest::new("soak_breaks_no_promise", Duration::from_secs(180), short)
            .not_on_ovn("its faults and its judge are those of the lab's own network"),
        LabTest::new("an_agent_that_ends_is_named_at_once", Duration::from_secs(60), ends)
            .not_on_ovn("its faults and its judge are those of the lab's own network"),
    ]
}

/// A program that prints an error and ends, in place of the agent.
fn ends(context: &LabContext) -> Result<()> {
    let agent = context.logs.join("agent-that-ends");
    std::fs::write(&agent, "#!/bin/sh\necho 'error: nothing to load'\nexit 1\n")?;
    std::fs::set_permissions(&agent, PermissionsExt::from_mode(0o700))?;
    let built = Built { agent, ..context.built.clone() };
    let begin = Instant::now();
    let Err(error) = LoadedCluster::start(&ClusterShape::SOAK, &built, None, context.logs.clone()) else {
        bail!("it starts without agents")
    };
    let (text, took) = (format!("{error:#}"), begin.elapsed());
    let is_named = text.contains("the agent of node1 has ended") && text.contains("error: nothing to load");
    ensure!(is_named, "it is not named: {text}");
    ensure!(took < Duration::from_secs(30), "it took {} s", took.as_secs());
    Ok(())
}

const SEED: u64 = 7;
const SEED_VARIABLE: &str = "EGRESS_SOAK_SEED";
/// No round begins later than this after the first.
const SHARE: Duration = Duration::from_secs(28);
/// What the share is of.
const SHARED: [Fault; 14] = [
    Fault::Cut,
    Fault::PowerOff,
    Fault::Uplink,
    Fault::Management,
    Fault::Kill,
    Fault::Stop,
    Fault::ApiServer,
    Fault::Label,
    Fault::Edit,
    Fault::Recreate,
    Fault::Leader,
    Fault::Restart,
    Fault::Pause,
    Fault::Nic,
];

fn short(context: &LabContext) -> Result<()> {
    let seed = std::env::var(SEED_VARIABLE).ok().and_then(|text| text.parse().ok()).unwrap_or(SEED);
    println!("seed {seed} ({SEED_VARIABLE} names another)");
    let mut soak = Soak::new(LoadedCluster::start(&ClusterShape::SOAK, &context.built, None, context.logs.clone())?)?;
    let played = play_share(&mut soak, seed);
    let again =
        |round: usize| format!("round {round} of {SEED_VARIABLE}={seed} cargo xtask test --only lab --filter soak");
    let report = SoakReport::of(&soak, seed, *played.as_ref().unwrap_or(&0), &again);
    print!("{}", report.text());
    let violations = soak.violations.len();
    if played.is_err() || violations > 0 {
        for agent in &soak.cluster.base.agents {
            println!("-- {}\n{}", agent.node().name(), last_lines(agent.log(), 12));
        }
    }
    played?;
    soak.cluster.finish()?;
    ensure!(violations == 0, "{violations} promises were broken");
    Ok(())
}

fn play_share(soak: &mut Soak, seed: u64) -> Result<usize> {
    soak.begin(&RoundPlan::of(seed, 1, &SHARED, Extent::Share))?;
    let begin = Instant::now();
    let mut played = 0;
    while begin.elapsed() < SHARE {
        println!("{}", soak.play(&RoundPlan::of(seed, played + 1, &SHARED, Extent::Share))?);
        played += 1;
    }
    Ok(played)
}
