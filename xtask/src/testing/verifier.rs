//! `cargo xtask verifier`: what the kernel's verifier had to do for each program, compared with what is on record, or
//! put on record with `--bless`.
//!
//! The test `figures` of `kernel_programs` measures and compares, here and in guests with other kernels; it is also part
//! of `cargo xtask test`. This command runs that test alone, and reads the lines that it prints.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::Args;

use super::cargo_tests;
use super::kernels::{self, SuiteRequest};
use super::part::Part;
use super::summary::{PartOutcome, Summary};
use egress_lab::topology::builder::Ground;
use egress_toolchain::packages::{self, Purpose};
use egress_toolchain::{BuildArgs, Paths, Progress, ensure_built};

/// The binary and the test in it.
const BINARY: &str = "kernel_programs";
const TEST: &str = "verifier::every_program_is_as_cheap_as_on_record";

/// What stands before each line of figures.
const MARK: &str = "verifier: ";

const RECORD: &str = "egress-ebpf/verifier.yaml";
const HEADER: &str = "\
# What the verifier had to do for each program, by kernel: instructions that it went through, bytes of stack of the
# program and of each function that is called, the number of those functions, bytes of machine code.
# Written by `cargo xtask verifier --bless`, read by egress-agent/tests/kernel_programs/verifier.rs.
";

#[derive(Args, Debug)]
pub(crate) struct VerifierArgs {
    /// Ask this kernel in a virtual machine, like 6.1 or 6.12, and not the running one; may be given several times
    #[arg(long, value_name = "VERSION")]
    kernel: Vec<String>,
    /// Put the figures on record instead of comparing them
    #[arg(long)]
    bless: bool,
    /// Never install a distribution package or a toolchain component: name what is missing and stop
    #[arg(long)]
    no_install: bool,
}

/// Figures by program, as the record has them.
type ProgramFigures = BTreeMap<String, serde_yaml::Value>;

pub(crate) fn verifier(args: &VerifierArgs) -> Result<ExitCode> {
    let paths = Paths::find()?;
    let mut summary = Summary::default();
    let lines = if args.kernel.is_empty() { here(args, &paths, &mut summary)? } else { guests(args, &mut summary)? };
    if !args.bless {
        return Ok(summary.conclude("", false));
    }
    let figures = read(&lines)?;
    if figures.is_empty() {
        bail!("no figures came out: see the output above");
    }
    record(&paths.root.join(RECORD), &figures)?;
    for (kernel, programs) in figures {
        println!("on record: {} programs on Linux {kernel}", programs.len());
    }
    Ok(ExitCode::SUCCESS)
}

fn arguments() -> Vec<String> {
    [TEST, "--exact", "--nocapture"].map(str::to_owned).to_vec()
}

fn here(args: &VerifierArgs, paths: &Paths, summary: &mut Summary) -> Result<Vec<String>> {
    if let Some(reason) = Part::Program.hindrance() {
        bail!("the running kernel cannot be asked: {reason}; other kernels can, with --kernel");
    }
    packages::ensure(Purpose::Programs, !args.no_install)?;
    ensure_built(&BuildArgs { no_install: args.no_install, ..BuildArgs::default() }, &Progress::start())?;
    let targets = cargo_tests::named(BINARY);
    let mut lines = Vec::new();
    let mut outcome = PartOutcome::new("here");
    cargo_tests::run_with(&targets, &arguments(), paths, &mut outcome, |line| lines.push(line.to_owned()))?;
    summary.add(outcome);
    Ok(lines)
}

fn guests(args: &VerifierArgs, summary: &mut Summary) -> Result<Vec<String>> {
    let request = SuiteRequest {
        arch: egress_toolchain::Arch::own(),
        targets: cargo_tests::named(BINARY),
        arguments: arguments(),
        on_lab: Vec::new(),
        ground: Ground::default(),
        no_install: args.no_install,
    };
    kernels::run(&args.kernel, &request, summary)
}

/// Lines like `verifier: 6.1 from_pod {instructions: 71000, ...}`.
fn read(lines: &[String]) -> Result<BTreeMap<String, ProgramFigures>> {
    let mut figures: BTreeMap<String, ProgramFigures> = BTreeMap::new();
    for line in lines.iter().filter_map(|line| line.strip_prefix(MARK)) {
        let mut words = line.splitn(3, ' ');
        let (Some(kernel), Some(program), Some(values)) = (words.next(), words.next(), words.next()) else {
            bail!("not a line of figures: {line}");
        };
        let values = serde_yaml::from_str(values).with_context(|| format!("figures in {line}"))?;
        figures.entry(kernel.to_owned()).or_default().insert(program.to_owned(), values);
    }
    Ok(figures)
}

/// Replaces these kernels' figures and leaves others'.
fn record(path: &Path, figures: &BTreeMap<String, ProgramFigures>) -> Result<()> {
    let text = fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
    let mut all: BTreeMap<String, ProgramFigures> =
        serde_yaml::from_str(&text).with_context(|| format!("read {}", path.display()))?;
    all.extend(figures.clone());
    let text = serde_yaml::to_string(&all).context("write the figures")?;
    fs::write(path, format!("{HEADER}{text}")).with_context(|| format!("write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_read_and_put_on_record() {
        let line = |kernel: &str, count: u32| {
            format!("{MARK}{kernel} steer {{instructions: {count}, stack: \"8\", subprograms: 0, jited: 1}}")
        };
        let lines = ["noise".to_owned(), line("6.1", 10), line("6.12", 11)];
        let figures = read(&lines).expect("figures");
        assert_eq!(figures.keys().collect::<Vec<_>>(), ["6.1", "6.12"]);

        let path = std::env::temp_dir().join(format!("xtask-verifier-{}.yaml", std::process::id()));
        fs::write(&path, "{}\n").expect("an empty record");
        record(&path, &figures).expect("record");
        record(&path, &read(&[line("6.12", 12)]).expect("figures")).expect("record");
        let text = fs::read_to_string(&path).expect("read");
        fs::remove_file(&path).expect("remove");
        assert!(text.starts_with(HEADER), "{text}");
        assert!(text.contains("'6.1':\n  steer:\n    instructions: 10\n    stack: '8'"), "{text}");
        assert!(text.contains("'6.12':\n  steer:\n    instructions: 12\n"), "{text}");
    }
}
