//! `cargo xtask faults`: the faults of ownership, each on a cluster of its own under load; which nodes sent from an egress IP
//! during each, by captured packets.
//!
//! Goals: no two nodes send from one address, and no packet has a wrong source. The time in which no node sends from an address
//! is a figure, not a goal. A row that misses a goal fails the command, after all rows were run and the report was written.

mod cases;
mod fault_test;
mod judge;
mod probes;
mod report;

use clap::Args;

use crate::prelude::*;
use cases::{CASES, FaultCase, FaultOptions};
use egress_lab::yield_to_signal;
use egress_toolchain::packages::{self, Purpose};
use egress_toolchain::{BuildArgs, Built, Paths, Progress, ensure_built};
use fault_test::FaultTest;
use report::FaultRow;

#[derive(Args)]
pub struct FaultsArgs {
    /// Only this row; may be given several times
    #[arg(long, value_name = "NAME", value_parser = clap::builder::PossibleValuesParser::new(CASES.iter().map(|case| case.name)))]
    only: Vec<String>,
    /// Print the names of the rows, and what they do
    #[arg(long)]
    list: bool,
    /// Seconds that the API server is away in the row about that
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(20..=3600))]
    outage: u64,
    /// Seconds before which the backup was made that is put back in the row about that
    #[arg(long, value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=3600))]
    backup_age: u64,
    /// What the namespaces' names begin with
    #[arg(long, default_value = "faults")]
    prefix: String,
    #[command(flatten)]
    build: BuildArgs,
}

pub fn run(args: &FaultsArgs) -> Result<()> {
    let chosen = CASES.iter().filter(|case| args.only.is_empty() || args.only.iter().any(|name| name == case.name));
    if args.list {
        chosen.for_each(|case| println!("{:24} {}", case.name, case.what));
        return Ok(());
    }
    let progress = Progress::start();
    let paths = Paths::find()?;
    for purpose in [Purpose::Lab, Purpose::Programs] {
        packages::ensure(purpose, !args.build.no_install)?;
    }
    let built = ensure_built(&args.build, &progress)?;
    let folder = paths.target.join("faults");
    let logs = folder.join("logs");
    if logs.exists() {
        std::fs::remove_dir_all(&logs).with_context(|| format!("remove {}", logs.display()))?;
    }
    let options =
        FaultOptions { outage: Duration::from_secs(args.outage), backup_age: Duration::from_secs(args.backup_age) };
    let mut rows = Vec::new();
    for case in chosen {
        let cluster = (&built, logs.join(case.name), Some(args.prefix.as_str()));
        let played = play(case, &options, cluster, &progress);
        // A lab that is being taken down shows nothing.
        yield_to_signal();
        let row = FaultRow::of(case, played);
        progress.step(&row.line());
        rows.push(row);
        report::write(&rows, &folder).with_context(|| format!("write to {}", folder.display()))?;
    }
    print!("{}", report::text(&rows));
    progress.step(&format!("{0}/report.md, {0}/results.json, {0}/logs", folder.display()));
    let broken: Vec<&str> = rows.iter().filter(|row| !row.broken.is_empty()).map(|row| row.name).collect();
    ensure!(broken.is_empty(), "goals were missed in {}", broken.join(", "));
    Ok(())
}

fn play(
    case: &FaultCase,
    options: &FaultOptions,
    cluster: (&Built, PathBuf, Option<&str>),
    progress: &Progress,
) -> Result<fault_test::FaultOutcome> {
    progress.step(&format!("{}: {}", case.name, case.what));
    let mut test = FaultTest::start(case.name, case.arguments, cluster, progress)?;
    (case.play)(&mut test, options)?;
    test.finish()
}

/// The rows that a test run has time for.
pub fn tests() -> Vec<LabTest> {
    let timeout = Duration::from_secs(120);
    vec![
        LabTest::new("faults_node_deleted_and_created_again", timeout, |context| one(context, "node-deleted"))
            .not_on_ovn("its faults and its judge are those of the lab's own network"),
        LabTest::new("faults_machine_stopped", timeout, |context| one(context, "machine-stopped"))
            .not_on_ovn("its faults and its judge are those of the lab's own network"),
    ]
}

fn one(context: &LabContext, name: &str) -> Result<()> {
    let case = CASES.iter().find(|case| case.name == name).context("no such row")?;
    let options = FaultOptions { outage: Duration::from_secs(20), backup_age: Duration::from_secs(20) };
    let played = play(case, &options, (&context.built, context.logs.clone(), None), &Progress::start())?;
    let row = FaultRow::of(case, Ok(played));
    println!("{}", row.line());
    ensure!(row.broken.is_empty(), "{}", row.broken.join("\n"));
    Ok(())
}
