//! `cargo xtask`: everything that one does with this project from a clone.
//!
//! - `checks`: generated files, manual pages, lints, dependencies.
//! - `documents`: that commands and links of the documents hold.
//! - `release`: the artefacts of a release.
//! - `testing`: `cargo xtask test` and its parts.
//!
//! All else is in crates: `egress-toolchain` builds, `egress-lab` is the test cluster, `egress-scenarios` is what is played on it.

mod checks;
mod documents;
mod release;
mod testing;

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
    /// Set up the eBPF toolchain and build the eBPF object, the agent, the egress router and the kubectl plugin
    Build(egress_toolchain::BuildArgs),
    /// Make a container image of egress-agent and egress-router: two static binaries on an empty base
    Image(egress_toolchain::ImageArgs),
    /// Make what a release has: images and the kubectl plugin of all architectures, manifests, chart, manual pages, SBOM, notes
    Release(release::ReleaseArgs),
    /// Bring up the lab with real agents and play the story of an egress IP on it
    Run(egress_scenarios::story::StoryArgs),
    /// Bring up the lab's network alone, without agents and without an API server
    Lab(egress_lab::hold::LabArgs),
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
    /// Measure the datapath beside plain forwarding and netfilter
    Bench(egress_scenarios::bench::BenchArgs),
    /// Inject random faults into nodes, agents and the API server of a lab (seeded), and measure what that does to traffic
    Soak(egress_scenarios::soak::SoakArgs),
    /// Play the faults of ownership on a lab, and judge by captured packets which node sent from an egress IP
    Faults(egress_scenarios::faults::FaultsArgs),
    /// Serve the lab's in-memory Kubernetes API
    Apiserver(egress_lab::apiserver::ApiserverArgs),
    /// Write the files that are generated from code (CRD, tables in docs), or check them with --check
    Codegen(checks::CodegenArgs),
    /// Write the manual pages of egress-agent, egress-router and the kubectl plugin
    Man(checks::ManArgs),
    /// Check format, names of types and clippy of all workspaces
    Lint(checks::LintArgs),
    /// Play made series to the alert rules, with Prometheus' promtool
    Alerts,
    /// Check the dependencies: lock files, sources, licences
    Deps,
}

fn main() -> ExitCode {
    // Warnings of the lab's servers; progress is printed.
    let filter = tracing_subscriber::EnvFilter::new("xtask=warn,egress_lab=warn,egress_scenarios=warn");
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).without_time().init();
    let cli = Cli::parse();
    let outcome = match cli.command {
        Command::Build(args) => done(egress_toolchain::build(&args)),
        Command::Image(args) => done(egress_toolchain::image(&args)),
        Command::Release(args) => done(release::release(&args)),
        Command::Run(args) => done(egress_scenarios::story::run(&args)),
        Command::Lab(args) => done(egress_lab::hold::run(&args)),
        Command::Bench(args) => done(egress_scenarios::bench::run(&args)),
        Command::Test(args) => testing::test(&args),
        Command::Verifier(args) => testing::verifier(&args),
        Command::Mutate(args) => testing::mutate(&args),
        Command::Fuzz(args) => done(testing::fuzz(&args)),
        Command::Guest => done(testing::run_guest()),
        Command::Soak(args) => done(egress_scenarios::soak::run(&args)),
        Command::Faults(args) => done(egress_scenarios::faults::run(&args)),
        Command::Apiserver(args) => done(egress_lab::apiserver::run(&args)),
        Command::Codegen(args) => done(checks::codegen(&args)),
        Command::Man(args) => done(checks::man(&args)),
        Command::Lint(args) => done(checks::lint(&args)),
        Command::Alerts => testing::alerts(),
        Command::Deps => done(checks::deps()),
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
