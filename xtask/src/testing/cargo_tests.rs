//! The parts that are plain `cargo test`: which targets belong to them, and counting what cargo reports.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use super::api::{self, ApiServers};
use super::part::Part;
use super::silence;
use super::skips::{self, SkipNotes};
use super::summary::PartOutcome;
use egress_toolchain::{Paths, cargo, helm, output};

/// Integration tests of egress-agent in files with this prefix need root and BPF.
const KERNEL: &str = "kernel_";

/// Arguments of cargo that choose what is tested.
type Targets = Vec<String>;

/// Unit tests of all crates, and the integration tests that need no kernel.
pub(super) fn pure(paths: &Paths) -> Result<Targets> {
    let packages = [
        ("egress-cni", "crates/cni"),
        ("egress-common", "egress-common"),
        ("egress-core", "crates/core"),
        ("egress-datapath", "crates/datapath"),
        ("egress-kube", "crates/kube"),
        ("egress-lab", "crates/lab"),
        ("egress-scenarios", "crates/scenarios"),
        ("egress-supervise", "crates/supervise"),
        ("egress-terminal", "crates/terminal"),
        ("egress-toolchain", "crates/toolchain"),
        ("egress-agent", "egress-agent"),
        ("egress-router", "egress-router"),
        ("egress-fuzz", "fuzz"),
        ("kubectl-egress", "kubectl-egress"),
        ("xtask", "xtask"),
    ];
    let mut targets: Targets = ["--lib", "--bins"].map(str::to_owned).to_vec();
    for (package, folder) in packages {
        targets.extend(["--package".to_owned(), package.to_owned()]);
        let names = integration_tests(&paths.root.join(folder))?;
        targets.extend(as_arguments(names.into_iter().filter(|name| !name.starts_with(KERNEL))));
    }
    Ok(targets)
}

/// The integration tests on the kernel; empty where there are none.
pub(super) fn program(paths: &Paths) -> Result<Targets> {
    let mut targets = Targets::new();
    for package in ["egress-agent", "egress-router"] {
        let names = integration_tests(&paths.root.join(package))?;
        let names: Targets = as_arguments(names.into_iter().filter(|name| name.starts_with(KERNEL))).collect();
        targets.extend(std::iter::once(format!("--package={package}")).filter(|_| !names.is_empty()));
        targets.extend(names);
    }
    Ok(targets)
}

fn as_arguments(names: impl Iterator<Item = String>) -> impl Iterator<Item = String> {
    names.map(|name| format!("--test={name}"))
}

/// What cargo finds by itself: `tests/NAME.rs` and `tests/NAME/main.rs`.
fn integration_tests(package: &Path) -> Result<Vec<String>> {
    let folder = package.join("tests");
    if !folder.exists() {
        return Ok(Vec::new());
    }
    let mut names = Vec::new();
    for entry in fs::read_dir(&folder).with_context(|| format!("read {}", folder.display()))? {
        let path = entry.with_context(|| format!("read {}", folder.display()))?.path();
        let is_test = path.extension().is_some_and(|extension| extension == "rs") || path.join("main.rs").exists();
        if let (true, Some(stem)) = (is_test, path.file_stem()) {
            names.push(stem.to_string_lossy().into_owned());
        }
    }
    names.sort();
    Ok(names)
}

fn cargo_test(targets: &[String], paths: &Paths) -> Command {
    let mut command = cargo();
    command.args(["test", "--no-fail-fast"]).args(targets).current_dir(&paths.root);
    command
}

/// The tests of this one binary.
pub(super) fn named(binary: &str) -> Targets {
    vec!["--package=egress-agent".to_owned(), format!("--test={binary}")]
}

/// Arguments of the test binaries.
pub(super) fn filtered(filter: &str) -> Vec<String> {
    if filter.is_empty() { Vec::new() } else { vec![filter.to_owned()] }
}

/// Runs the tests, passes their output through and counts.
pub(super) fn run(part: Part, targets: &[String], filter: &str, paths: &Paths) -> Result<PartOutcome> {
    let mut outcome = PartOutcome::new(part);
    run_with(targets, &filtered(filter), paths, &mut outcome, |_| ())?;
    Ok(outcome)
}

/// The tests that look at devices, links and pins, by the name of their binary.
pub(super) const DATAPLANE: &str = "kernel_dataplane";

/// Makes them put programs on clsact filters, whatever the kernel offers (kernel_dataplane/node.rs).
pub(super) const FILTERS: (&str, &str) = ("EGRESS_TEST_ATTACHMENT", "clsact");

/// What is the same by links and by filters, and takes long: what an agent announces, cuts and tells. Beside these, what asks
/// for filters itself.
pub(super) const SAME_BY_FILTERS: [&str; 4] = ["announce::", "killed::", "idle_reset::", "clsact::"];

/// The datapath's tests once more, by filters.
pub(super) fn run_by_filters(filter: &str, paths: &Paths, outcome: &mut PartOutcome) -> Result<()> {
    println!("the data plane by clsact filters:");
    let skipped = SAME_BY_FILTERS.iter().flat_map(|name| ["--skip", *name]).map(str::to_owned);
    let arguments: Vec<_> = filtered(filter).into_iter().chain(skipped).collect();
    let mut command = cargo_test(&named(DATAPLANE), paths);
    let notes = SkipNotes::begin(paths)?;
    let (variable, file) = notes.variable();
    command.env(FILTERS.0, FILTERS.1).env(variable, file).arg("--").args(arguments);
    follow(command, outcome, |_| ())?;
    notes.count(outcome)
}

/// Likewise, with arguments for the test binaries, and a look at each line.
pub(super) fn run_with(
    targets: &[String],
    arguments: &[String],
    paths: &Paths,
    outcome: &mut PartOutcome,
    seen: impl FnMut(&str),
) -> Result<()> {
    let cluster = ApiServers::start(paths)?;
    let mut command = cargo_test(targets, paths);
    let notes = SkipNotes::begin(paths)?;
    let (variable, file) = notes.variable();
    command.env(api::VARIABLE, &cluster.kubeconfig).env(api::SLOW, &cluster.slow).env(variable, file);
    if let Some(program) = helm::find(paths) {
        command.env(helm::VARIABLE, program);
    }
    command.arg("--").args(arguments);
    follow(command, outcome, seen)?;
    notes.count(outcome)
}

/// Runs cargo to its end and counts what it reports.
fn follow(mut command: Command, outcome: &mut PartOutcome, mut seen: impl FnMut(&str)) -> Result<()> {
    let failed_before = outcome.failed;
    let mut child = command.stdout(Stdio::piped()).spawn().context("start cargo test")?;
    let mut hung = Vec::new();
    silence::watch(
        &mut child,
        silence::LIMIT,
        |line| {
            println!("{line}");
            seen(line);
            count(line, outcome);
        },
        |what| hung.push(what.to_owned()),
    )?;
    for what in hung {
        outcome.fail(&format!("nothing was heard for {} s: ended at {what}", silence::LIMIT.as_secs()));
    }
    let status = child.wait().context("wait for cargo test")?;
    if !status.success() && outcome.failed == failed_before {
        outcome.fail(&format!("cargo test ended with {status} and no failed test: see its output above"));
    }
    Ok(())
}

/// Builds the tests and returns their programs.
pub(super) fn binaries(targets: &[String], paths: &Paths) -> Result<Vec<PathBuf>> {
    made(cargo_test(targets, paths))
}

/// The same for another target of the compiler, with a cargo that can build for it.
pub(super) fn binaries_for(
    mut cargo: Command,
    target: &str,
    targets: &[String],
    paths: &Paths,
) -> Result<Vec<PathBuf>> {
    cargo.args(["test", "--target", target]).args(targets).current_dir(&paths.root);
    made(cargo)
}

fn made(mut command: Command) -> Result<Vec<PathBuf>> {
    let text = output(command.args(["--no-run", "--message-format=json-render-diagnostics"]).stderr(Stdio::inherit()))?;
    let messages = text.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let tests = messages.filter(|message| message["profile"]["test"] == true);
    Ok(tests.filter_map(|message| message["executable"].as_str().map(PathBuf::from)).collect())
}

/// How a function that tests start in another process is marked.
const HELPER: &str = ", helper process";

/// Reads one line of a test binary's output.
fn count(line: &str, outcome: &mut PartOutcome) {
    if let Some(name) = line.strip_prefix("test ").and_then(|rest| rest.strip_suffix(" ... FAILED")) {
        outcome.explain(name);
    }
    match line.strip_prefix("test ").and_then(|rest| rest.split_once(" ... ignored")) {
        // What tests run as another process is none.
        Some((_, HELPER)) | None => {}
        Some((name, _)) => skips::note(outcome, name, "ignored"),
    }
    let Some(numbers) = line.strip_prefix("test result: ") else { return };
    outcome.passed += number_before(numbers, " passed");
    outcome.failed += number_before(numbers, " failed");
}

/// The number in `...; 12 passed; ...`.
fn number_before(text: &str, word: &str) -> usize {
    text.split(word)
        .next()
        .filter(|before| before.len() < text.len())
        .and_then(|before| before.rsplit(' ').next())
        .and_then(|number| number.parse().ok())
        .unwrap_or(0)
}

/// The names of the tests.
pub(super) fn list(targets: &[String], paths: &Paths) -> Result<Vec<String>> {
    let mut command = cargo_test(targets, paths);
    let output =
        command.args(["--quiet", "--", "--list"]).stderr(Stdio::inherit()).output().context("start cargo test")?;
    if !output.status.success() {
        bail!("cargo test --list failed ({})", output.status);
    }
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_counted_and_failures_named() {
        let mut outcome = PartOutcome::new(Part::Pure);
        for line in [
            "running 3 tests",
            "test snat::ports_are_kept ... ok",
            "test snat::races ... FAILED",
            "test scale::figures ... ignored, a command of its own",
            "test scale::for_no_reason ... ignored",
            "test lifecycle::agent_process ... ignored, helper process",
            "test result: FAILED. 12 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s",
            "test result: ok. 5 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s",
        ] {
            count(line, &mut outcome);
        }
        // One that may not be skipped has failed.
        assert_eq!((outcome.passed, outcome.failed, outcome.skipped), (17, 2, 2));
    }

    #[test]
    fn a_text_without_the_word_counts_nothing() {
        assert_eq!(number_before("ok. 5 passed", " failed"), 0);
        assert_eq!(number_before("12", " passed"), 0);
    }
}
