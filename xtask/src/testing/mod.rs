//! `cargo xtask test`: sets up what is missing, then runs every test, in the order from cheap to expensive.
//!
//! Parts: `pure` needs nothing; `program` (test files `kernel_*` of egress-agent) needs root and BPF; `lab` (listed in `lab.rs`)
//! needs namespaces too; `cluster` needs a kubelet and more (docs/testing.md); `codegen` compares generated files. With
//! `--kernel`, `program` and `lab` run on another kernel (`kernels`).
//!
//! A part that this machine cannot run is skipped with the reason, and the run fails unless `--allow-skips` is given. The last
//! line of the output is always `N passed, N failed, N skipped`.

mod alerts;
mod api;
mod cargo_tests;
mod fuzz;
mod kernels;
pub(crate) mod lab;
mod mutate;
mod part;
mod silence;
mod skips;
mod summary;
mod verifier;

use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Result, bail};
use clap::Args;

use crate::checks::{check_generated, generated_paths};
pub(crate) use alerts::alerts;
use egress_lab::test::{LabTest, Skip};
use egress_lab::topology::builder::Ground;
use egress_scenarios::nodes;
use egress_toolchain::packages::{self, Purpose};
use egress_toolchain::{Arch, BuildArgs, Built, Paths, Progress, ensure_built, ensure_plugin, helm, kubectl, ovn};
pub(crate) use fuzz::{FuzzArgs, fuzz};
use kernels::SuiteRequest;
pub(crate) use kernels::run_guest;
pub(crate) use mutate::{MutateArgs, mutate};
use part::Part;
use summary::{PartOutcome, Summary};
pub(crate) use verifier::{VerifierArgs, verifier};

#[derive(Args, Debug)]
pub(crate) struct TestArgs {
    /// Run only this part; may be given several times
    #[arg(long, value_enum)]
    only: Vec<Part>,
    /// Run only tests whose name contains this
    #[arg(long)]
    filter: Option<String>,
    /// Run the part `program` on this kernel instead, in a virtual machine, like 6.1 or 6.12, or `lab` with `--only lab`;
    /// may be given several times
    #[arg(long, value_name = "VERSION", conflicts_with = "list")]
    kernel: Vec<String>,
    /// What is in the place of OVN-Kubernetes in tests on the lab
    #[arg(long, value_enum, default_value_t)]
    ground: Ground,
    /// Architecture of these kernels, if not this machine's: agent and tests are cross-compiled
    #[arg(long, value_enum, requires = "kernel")]
    arch: Option<Arch>,
    /// Print the names of the tests, run none
    #[arg(long)]
    list: bool,
    /// A part that this machine cannot run is no failure
    #[arg(long)]
    allow_skips: bool,
    /// Never install a distribution package or a toolchain component: name what is missing and stop
    #[arg(long)]
    no_install: bool,
    /// Run one test of the lab in this process; how the test run starts each of them
    #[arg(long, hide = true, value_name = "NAME")]
    lab_one: Option<String>,
}

impl TestArgs {
    fn parts(&self) -> Vec<Part> {
        let chosen = |part: &Part| self.only.is_empty() || self.only.contains(part);
        Part::ALL.into_iter().filter(chosen).collect()
    }

    fn filter(&self) -> &str {
        self.filter.as_deref().unwrap_or_default()
    }
}

pub(crate) fn test(args: &TestArgs) -> Result<ExitCode> {
    if let Some(name) = &args.lab_one {
        return lab::run_here(name);
    }
    if args.list {
        return list(args).map(|()| ExitCode::SUCCESS);
    }
    let mut summary = Summary::default();
    let ran = if args.kernel.is_empty() { run_parts(args, &mut summary) } else { run_on_kernels(args, &mut summary) };
    if let Err(error) = ran {
        println!("error: {error:#}");
        summary.set_up_failed();
    }
    Ok(summary.conclude(args.filter(), args.allow_skips))
}

fn run_parts(args: &TestArgs, summary: &mut Summary) -> Result<()> {
    let progress = Progress::start();
    let paths = Paths::find()?;
    let parts = args.parts();
    let runnable: Vec<Part> = parts.iter().copied().filter(|part| part.hindrance().is_none()).collect();
    if runnable.contains(&Part::Lab) {
        set_up_ovn(args, &paths, &progress)?;
    }
    let built = set_up(&runnable, args.no_install, &progress)?;
    for part in parts {
        let start = Instant::now();
        let mut outcome = match part.hindrance() {
            Some(reason) => {
                progress.step(&format!("{part}: skipped, {reason}"));
                PartOutcome::skipped(part, part.count(&paths)?, reason)
            }
            None => {
                progress.step(&format!("{part}: running"));
                // A part that breaks down is one failure, and the other parts still have their say.
                run_part(part, args, &paths, built.as_ref()).unwrap_or_else(|error| {
                    let mut outcome = PartOutcome::new(part);
                    outcome.fail(&format!("{error:#}"));
                    outcome
                })
            }
        };
        outcome.elapsed = start.elapsed();
        summary.add(outcome);
    }
    Ok(())
}

fn run_on_kernels(args: &TestArgs, summary: &mut Summary) -> Result<()> {
    if let Some(part) = args.only.iter().find(|part| !matches!(part, Part::Program | Part::Lab)) {
        bail!("{part} does not run on another kernel: program and lab do");
    }
    let mut targets = Vec::new();
    if args.only.is_empty() || args.only.contains(&Part::Program) {
        targets = cargo_tests::program(&Paths::find()?)?;
        // What netfilter does, and so the list of differences from it, is this kernel's.
        targets.retain(|target| target != "--test=kernel_differential");
    }
    let mut on_lab = Vec::new();
    if args.only.contains(&Part::Lab) {
        let tests = lab::lab_tests();
        // A smoke test of OVN is one of the kernel that runs here.
        let there = |test: &&LabTest| test.ground(args.ground) == Some(args.ground);
        on_lab.extend(lab::chosen(&tests, args.filter(), args.ground).filter(there).map(|test| test.name.to_owned()));
    }
    let arguments = cargo_tests::filtered(args.filter());
    let arch = args.arch.unwrap_or(Arch::own());
    let request = SuiteRequest { arch, targets, arguments, on_lab, ground: args.ground, no_install: args.no_install };
    kernels::run(&args.kernel, &request, summary).map(drop)
}

/// Without Open vSwitch and OVN, tests of an ordinary run say that they need them.
fn set_up_ovn(args: &TestArgs, paths: &Paths, progress: &Progress) -> Result<()> {
    let tests = lab::lab_tests();
    let needs_it = |test: &&LabTest| test.ground(args.ground).is_some_and(Ground::is_ovn);
    if !lab::chosen(&tests, args.filter(), args.ground).any(|test| needs_it(&test)) {
        return Ok(());
    }
    match ovn::ensure(paths, progress) {
        Err(error) if args.ground == Ground::Routed => progress.step(&format!("no OVN: {error:#}")),
        ensured => drop(ensured?),
    }
    Ok(())
}

/// Brings in everything before the first test, so that what is missing shows at once and not after minutes.
fn set_up(parts: &[Part], no_install: bool, progress: &Progress) -> Result<Option<Built>> {
    let on_nodes = parts.contains(&Part::Cluster) && nodes::assets().is_some();
    if parts.contains(&Part::Program) || parts.contains(&Part::Lab) || on_nodes {
        packages::ensure(Purpose::Programs, !no_install)?;
    }
    if parts.contains(&Part::Program) || parts.contains(&Part::Lab) {
        packages::ensure(Purpose::Cni, !no_install)?;
    }
    if parts.contains(&Part::Lab) || on_nodes {
        packages::ensure(Purpose::Lab, !no_install)?;
        packages::ensure(Purpose::Traffic, !no_install)?;
    }
    if parts.contains(&Part::Pure) || parts.contains(&Part::Lab) {
        kubectl::offer(!no_install);
    }
    if parts.contains(&Part::Pure) || parts.contains(&Part::Lab) || on_nodes {
        helm::offer(&Paths::find()?, !no_install);
    }
    // Real nodes run the image, and commands of an administrator are typed outside.
    let needs_none = |part: &Part| *part == Part::Pure || *part == Part::Cluster && nodes::assets().is_none();
    if parts.iter().all(needs_none) {
        return Ok(None);
    }
    progress.step("set-up: the eBPF object and the agent");
    let how = BuildArgs { no_install, ..BuildArgs::default() };
    if on_nodes {
        ensure_plugin(&how)?;
    }
    ensure_built(&how, progress).map(Some)
}

fn run_part(part: Part, args: &TestArgs, paths: &Paths, built: Option<&Built>) -> Result<PartOutcome> {
    let filter = args.filter();
    match part {
        Part::Pure => cargo_tests::run(part, &cargo_tests::pure(paths)?, filter, paths),
        Part::Program => {
            let tests = cargo_tests::program(paths)?;
            if tests.is_empty() {
                return Ok(PartOutcome::new(part));
            }
            let mut outcome = cargo_tests::run(part, &tests, filter, paths)?;
            // On a kernel without links that is what has just run.
            cargo_tests::run_by_filters(filter, paths, &mut outcome)?;
            Ok(outcome)
        }
        Part::Lab => lab::run_all(args.filter(), args.ground, paths),
        Part::Cluster => on_nodes(filter, paths),
        Part::Codegen => codegen(filter, built),
    }
}

fn on_nodes(filter: &str, paths: &Paths) -> Result<PartOutcome> {
    let mut outcome = PartOutcome::new(Part::Cluster);
    if nodes::assets().is_none() {
        for name in nodes::names().filter(|name| name.contains(filter)) {
            skips::note(&mut outcome, name, "KUBEBUILDER_ASSETS names no folder with a kubelet");
        }
        return Ok(outcome);
    }
    for (name, ended) in nodes::run(filter, paths)? {
        match ended {
            Ok(()) => outcome.passed += 1,
            Err(error) => match error.downcast_ref::<Skip>() {
                Some(Skip(reason)) => skips::note(&mut outcome, name, reason),
                None => outcome.fail(&format!("{name}: {error:#}")),
            },
        }
    }
    Ok(outcome)
}

/// Each generated file counts as one test.
fn codegen(filter: &str, built: Option<&Built>) -> Result<PartOutcome> {
    let mut outcome = PartOutcome::new(Part::Codegen);
    let Some(built) = built else { return Ok(outcome) };
    for file in check_generated(built)? {
        if !file.path.contains(filter) {
            continue;
        }
        println!("test {} ... {}", file.path, if file.fresh { "ok" } else { "FAILED" });
        if file.fresh {
            outcome.passed += 1;
        } else {
            outcome.fail(&format!("{} differs from the code; run `cargo xtask codegen`", file.path));
        }
    }
    Ok(outcome)
}

fn list(args: &TestArgs) -> Result<()> {
    let paths = Paths::find()?;
    for part in args.parts() {
        let names = match part {
            Part::Pure => cargo_tests::list(&cargo_tests::pure(&paths)?, &paths)?,
            Part::Program => match cargo_tests::program(&paths)? {
                tests if tests.is_empty() => Vec::new(),
                tests => cargo_tests::list(&tests, &paths)?,
            },
            Part::Lab => lab::lab_tests().iter().map(|test| test.name.to_owned()).collect(),
            Part::Cluster => nodes::names().map(str::to_owned).collect(),
            Part::Codegen => generated_paths().into_iter().map(str::to_owned).collect(),
        };
        for name in names.iter().filter(|name| name.contains(args.filter())) {
            println!("{part}: {name}");
        }
    }
    Ok(())
}
