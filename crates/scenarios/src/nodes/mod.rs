//! `cargo xtask test --only cluster`: the product on two real Kubernetes nodes with a bridge CNI, installed and removed as
//! docs/install.md has it.
//!
//! One cluster (`cluster`, of `node`s) serves all tests (`steps`), since it takes most of a minute to come up. Each test says in
//! what state it leaves the cluster; the others run even if one fails. What the documents show is typed in the `shell`. `programs`
//! names what is missing on this machine.

mod cluster;
mod node;
mod pki;
mod processes;
mod programs;
mod shell;
mod steps;

use crate::prelude::*;
use egress_lab::test::Skip;
use egress_lab::yield_to_signal;
use egress_toolchain::{Paths, Progress};
use programs::NodePrograms;
pub use programs::assets;
use steps::{NodeTest, STEPS, TestStep};

/// The names of the tests.
pub fn names() -> impl Iterator<Item = &'static str> {
    STEPS.iter().map(|step| step.name)
}

/// What came of one test: its name, and the error, which may be a [`Skip`].
pub type TestResult = (&'static str, Result<()>);

/// Runs the tests whose name contains the filter, after the tests that they depend on.
pub fn run(filter: &str, paths: &Paths) -> Result<Vec<TestResult>> {
    let is_chosen = |step: &&TestStep| step.name.contains(filter);
    if !STEPS.iter().any(|step| is_chosen(&step)) {
        return Ok(Vec::new());
    }
    let progress = Progress::start();
    let programs = NodePrograms::find(paths)?;
    let logs = logs(paths)?;
    println!("logs: {}", logs.display());
    let mut test = NodeTest::start(&programs, &logs, &progress)?;
    let mut ended = Vec::new();
    let chosen: Vec<&TestStep> = STEPS.iter().filter(|step| step.is_shared || is_chosen(step)).collect();
    for (number, step) in chosen.iter().enumerate() {
        let begin = Instant::now();
        progress.step(&format!("test {} of {}: {} ...", number + 1, chosen.len(), step.name));
        let outcome = (step.run)(&mut test);
        let seconds = begin.elapsed().as_secs_f64();
        match &outcome {
            Ok(()) => println!("test {} ... ok ({seconds:.1} s)", step.name),
            Err(error) if error.is::<Skip>() => println!("test {} ... {error}", step.name),
            Err(error) => {
                yield_to_signal();
                println!("test {} ... FAILED ({seconds:.1} s): {error:#}", step.name);
                test.keep_agents_logs(&logs.join(step.name));
            }
        }
        ended.push((step.name, outcome));
    }
    progress.step("nodes: tearing down");
    test.tear_down()?;
    progress.step("nodes: gone");
    Ok(ended)
}

fn logs(paths: &Paths) -> Result<PathBuf> {
    let logs: PathBuf = Path::new(&paths.test_logs()).join("nodes");
    if logs.exists() {
        std::fs::remove_dir_all(&logs)?;
    }
    std::fs::create_dir_all(&logs)?;
    Ok(logs)
}
