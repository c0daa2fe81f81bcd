//! `cargo xtask fuzz TARGET`: looks for inputs that break what a target of egress-fuzz asserts, for as long as one wants.
//!
//! The targets are built with coverage counters and libFuzzer from fuzz/libfuzzer, a workspace of its own; the stable
//! compiler has what that needs, libFuzzer itself wants a C++ compiler. It begins with the committed corpus and keeps what
//! it finds below the target folder; `--keep` adds to the committed corpus what reaches something new. An input that breaks
//! an assertion is written to `<target>/fuzz/found` and ends the run: `tests/corpus.rs` replays it once it is in the corpus.
//!
//! `kernel` is another kind: the programs on the kernel beside the model (egress-agent/tests/kernel_programs/oracle).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};

use super::cargo_tests;
use super::part::Part;
use egress_toolchain::packages::{self, Purpose};
use egress_toolchain::{BuildArgs, Paths, Progress, cargo, ensure_built, output, run};

/// Counters of edges and traces of comparisons, as libFuzzer reads them; assertions as in tests.
const FLAGS: &str = "--cfg fuzzing -Cdebug-assertions -Coverflow-checks -Ccodegen-units=1 -Cpasses=sancov-module \
    -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares";

/// A story of this many bytes is long enough for every target.
const LONGEST: u32 = 1024;

#[derive(Clone, Copy, Debug, ValueEnum)]
enum FuzzTarget {
    /// Reading heads and quotes of any bytes
    Parsing,
    /// Any packets through all hooks in any state
    Decision,
    /// Stories of flows, answers, errors, sweeps and changes
    Nat,
    /// Configurations of an egress router, and entries of their lists
    Router,
    /// Stories of random packets through the programs on the kernel, compared with the model (root; no libFuzzer, no corpus)
    Kernel,
}

impl FuzzTarget {
    const fn name(self) -> &'static str {
        match self {
            Self::Parsing => "parsing",
            Self::Decision => "decision",
            Self::Nat => "nat",
            Self::Router => "router",
            Self::Kernel => "kernel",
        }
    }
}

#[derive(Args, Debug)]
pub(crate) struct FuzzArgs {
    target: FuzzTarget,
    /// How long to look
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u32).range(1..))]
    seconds: u32,
    /// Add to the committed corpus what reaches something new
    #[arg(long)]
    keep: bool,
    /// Never install a distribution package or a toolchain component: name what is missing and stop
    #[arg(long)]
    no_install: bool,
}

pub(crate) fn fuzz(args: &FuzzArgs) -> Result<()> {
    let paths = Paths::find()?;
    if matches!(args.target, FuzzTarget::Kernel) {
        return kernel(args, &paths);
    }
    packages::ensure(Purpose::Fuzz, !args.no_install)?;
    let (name, folder) = (args.target.name(), paths.target.join("fuzz"));
    let binary = build(&paths, &folder, name)?;
    let (found, own) = (folder.join("found"), folder.join("corpus").join(name));
    let committed = paths.root.join("fuzz/corpus").join(name);
    for folder in [&found, &own, &committed] {
        fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
    }
    let mut command = Command::new(&binary);
    command.arg(format!("-max_total_time={}", args.seconds)).arg(format!("-max_len={LONGEST}"));
    command.arg("-timeout=30").arg(format!("-artifact_prefix={}/{name}-", found.display()));
    // It writes to the first folder only.
    run(command.arg(&own).arg(&committed)).with_context(|| format!("see the input in {}", found.display()))?;
    if args.keep {
        // Inputs that take a path that no other takes, however often.
        run(Command::new(&binary).args(["-merge=1", "-use_counters=0"]).arg(&committed).arg(&own))
            .context("add to the corpus")?;
    }
    Ok(())
}

/// The stories of the program tests, for as long as one wants; the test prints how far it is, and what fails made short.
fn kernel(args: &FuzzArgs, paths: &Paths) -> Result<()> {
    if args.keep {
        bail!("--keep is about a corpus, and stories on the kernel have none: they follow from their numbers");
    }
    if let Some(reason) = Part::Program.hindrance() {
        bail!("programs cannot run here: {reason}");
    }
    packages::ensure(Purpose::Programs, !args.no_install)?;
    ensure_built(&BuildArgs { no_install: args.no_install, ..BuildArgs::default() }, &Progress::start())?;
    let binaries = cargo_tests::binaries(&cargo_tests::named("kernel_programs"), paths)?;
    let [binary] = binaries.as_slice() else { bail!("cargo built {} test programs, not one", binaries.len()) };
    let mut command = Command::new(binary);
    command.args(["oracle::", "--nocapture", "--test-threads=2"]).current_dir(paths.root.join("egress-agent"));
    command.env("EGRESS_ORACLE_SECONDS", args.seconds.to_string());
    run(&mut command).context("see the story above; EGRESS_ORACLE_SEED tells it alone")
}

fn build(paths: &Paths, folder: &Path, name: &str) -> Result<PathBuf> {
    let version = output(Command::new("rustc").arg("-vV"))?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: ")).context("rustc -vV names no host")?;
    let mut command = cargo();
    command.args(["build", "--locked", "--release", "--bin", name]);
    // With a target named, the flags are not for build scripts and procedural macros.
    command.args(["--target", host, "--target-dir"]).arg(folder.join("build"));
    command.arg("--manifest-path").arg(paths.fuzz_manifest()).env("RUSTFLAGS", FLAGS);
    run(&mut command).context("build the fuzz target; libFuzzer needs a C++ compiler")?;
    let binary = folder.join("build").join(host).join("release").join(name);
    if binary.exists() { Ok(binary) } else { bail!("cargo built no {}", binary.display()) }
}
