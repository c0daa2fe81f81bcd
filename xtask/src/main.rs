//! `cargo xtask`: everything that one does with this project from a clone.
//!
//! - `toolchain`: what the eBPF build needs and how the object and the agent are built.
//! - `bench`: how fast the data plane is beside its peers, on a lab.
//! - `apiserver`: the lab's in-memory Kubernetes API server, a test double.
//! - `documents`: that commands and links of the documents hold.
//! - `faults`: the faults of ownership on the lab, and who emitted an egress IP meanwhile.
//! - `lab`: a cluster of network namespaces with real agents, started and torn down.
//! - `lifecycle`: the product's life on the lab: restarts, selection, leaks, kubectl, bad input, cleanup.
//! - `nodes`: the product on two real Kubernetes nodes.
//! - `roads`: what must hold on the lab with real agents, as tests.
//! - `soak`: faults by the dice on the lab, what they cost, and that they break no promise.
//! - `story`: the walkthrough that `cargo xtask run` plays on the lab.
//! - `testing`: `cargo xtask test` and its parts.

mod apiserver;
mod bench;
mod documents;
mod faults;
mod lab;
mod lifecycle;
mod nodes;
mod roads;
mod soak;
mod story;
mod testing;
mod toolchain;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Build, run and test egress-agent")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Set up the eBPF toolchain and build the eBPF object and the agent
    Build(toolchain::BuildArgs),
    /// Make a container image of egress-agent: one static binary on an empty base
    Image(toolchain::ImageArgs),
    /// Bring up the lab with real agents and play the story of an egress IP on it
    Run(story::RunArgs),
    /// Bring up the lab's network alone, without agents and without an API server
    Lab(lab::LabArgs),
    /// Run every test: pure, on the kernel, in the lab
    Test(testing::TestArgs),
    /// Compare what the verifier had to do for each program with what is on record, or record it
    Verifier(testing::VerifierArgs),
    /// Break the programs on purpose, in a copy, and see whether the tests notice
    Mutate(testing::MutateArgs),
    /// Look for inputs that break what the fuzz targets assert
    Fuzz(testing::FuzzArgs),
    /// The first process of a guest of `test --kernel`
    #[command(hide = true)]
    Guest,
    /// Measure the data plane beside plain forwarding and netfilter
    Bench(bench::BenchArgs),
    /// Break nodes, agents and the API server of a lab by the dice, and measure what that does to traffic
    Soak(soak::SoakArgs),
    /// Play the faults of ownership on a lab, and judge who emitted an egress IP by what was on the wire
    Faults(faults::FaultsArgs),
    /// Serve the lab's in-memory Kubernetes API
    Apiserver(apiserver::ApiserverArgs),
    /// Write the files that are generated from code (CRD, tables in docs), or check them with --check
    Codegen(toolchain::CodegenArgs),
    /// Check format and clippy of all workspaces
    Lint(toolchain::LintArgs),
    /// Play made series to the alert rules, with Prometheus' promtool
    Alerts,
    /// Check the dependencies: lock files, sources, licences
    Deps,
}

fn main() -> ExitCode {
    // What the lab's servers complain of; what one is told while something runs is printed.
    let filter = tracing_subscriber::EnvFilter::new("xtask=warn");
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).without_time().init();
    let cli = Cli::parse();
    let outcome = match cli.command {
        Command::Build(args) => done(toolchain::build(&args)),
        Command::Image(args) => done(toolchain::image(&args)),
        Command::Run(args) => done(story::run(&args)),
        Command::Lab(args) => done(lab::run(&args)),
        Command::Bench(args) => done(bench::run(&args)),
        Command::Test(args) => testing::test(&args),
        Command::Verifier(args) => testing::verifier(&args),
        Command::Mutate(args) => testing::mutate(&args),
        Command::Fuzz(args) => done(testing::fuzz(&args)),
        Command::Guest => done(testing::run_guest()),
        Command::Soak(args) => done(soak::run(&args)),
        Command::Faults(args) => done(faults::run(&args)),
        Command::Apiserver(args) => done(apiserver::run(&args)),
        Command::Codegen(args) => done(toolchain::codegen(&args)),
        Command::Lint(args) => done(toolchain::lint(&args)),
        Command::Alerts => testing::alerts(),
        Command::Deps => done(toolchain::deps()),
    };
    match outcome {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn done(outcome: anyhow::Result<()>) -> anyhow::Result<ExitCode> {
    outcome.map(|()| ExitCode::SUCCESS)
}
