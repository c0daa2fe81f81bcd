//! The tests on the lab: a list of names, and a runner that no test can hang or take down with it.
//!
//! Each test runs in a process of its own, so that namespaces entered and signals caught by one are no matter to the
//! next, and one for each processor runs at a time: they wait more than they compute. It writes to
//! `<target>/test-logs/lab/NAME/`; when it fails, the end of its output and that folder are shown.
//! A test that takes too long gets SIGTERM first, which is the lab's sign to tear down, and SIGKILL when that does not
//! help.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::part::Part;
use super::skips;
use super::summary::PartOutcome;
use egress_lab::kube_api::ApiChoice;
use egress_lab::test::{LabContext, LabTest, OnOvn, Skip};
use egress_lab::topology::builder::{GROUND, Ground};
use egress_toolchain::{Built, Paths};

/// How the process of a skipped test ends, as automake's do.
pub(super) const SKIPPED: u8 = 77;

/// Every test on the lab, in the order in which they run.
pub(super) fn lab_tests() -> Vec<LabTest> {
    let mut tests = egress_scenarios::tests();
    tests.extend(crate::documents::tests());
    tests
}

/// How long a test may take to tear its lab down once it was stopped.
const GRACE: Duration = Duration::from_secs(20);

/// What a real API server takes to start, in each test again, and to answer more slowly than the in-memory one.
const REAL_SERVER: Duration = Duration::from_secs(120);

/// Each is a cluster of up to eight processes and some hundred threads.
const MOST_AT_A_TIME: usize = 4;

/// How many lines of a failed test's output are shown.
const SHOWN_LINES: usize = 40;

/// Runs the tests whose name contains the filter, as many at a time as there are processors; then, one after the other, those
/// that want the machine for themselves.
pub(super) fn run_all(filter: &str, ground: Ground, paths: &Paths) -> Result<PartOutcome> {
    let (tests, mut outcome) = (lab_tests(), PartOutcome::new(Part::Lab));
    for test in tests.iter().filter(|test| test.name.contains(filter)) {
        if let (OnOvn::Never(reason), None) = (test.on_ovn, test.ground(ground)) {
            println!("not on OVN: {}: {reason}", test.name);
            outcome.skipped += 1;
        }
    }
    let outcome = Mutex::new(outcome);
    let program = own_copy(paths)?;
    let api = ApiChoice::new(None);
    let at_a_time = thread::available_parallelism().map_or(1, usize::from).min(MOST_AT_A_TIME);
    println!("Kubernetes of these tests: {api}; {at_a_time} of them at a time");
    let (alone, beside): (Vec<&LabTest>, Vec<&LabTest>) = chosen(&tests, filter, ground).partition(|test| test.alone);
    let one = |test: &LabTest| {
        let logs = logs_of(test.name, paths);
        println!("test {} ...", test.name);
        let start = Instant::now();
        let ended = run_apart(&program, test, ground, &logs, api.is_real());
        let mut outcome = outcome.lock().unwrap_or_else(PoisonError::into_inner);
        match ended {
            Ok(ended) => note(&mut outcome, test, &ended, &logs, start.elapsed()),
            Err(error) => outcome.fail(&format!("{}: {error:#}", test.name)),
        }
    };
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..at_a_time {
            scope.spawn(|| {
                while let Some(test) = beside.get(next.fetch_add(1, Ordering::Relaxed)) {
                    one(test);
                }
            });
        }
    });
    alone.into_iter().for_each(one);
    Ok(outcome.into_inner().unwrap_or_else(PoisonError::into_inner))
}

/// The tests that run on a ground.
pub(super) fn chosen<'a>(tests: &'a [LabTest], filter: &str, ground: Ground) -> impl Iterator<Item = &'a LabTest> {
    tests.iter().filter(move |test| test.name.contains(filter) && test.ground(ground).is_some())
}

fn note(outcome: &mut PartOutcome, test: &LabTest, ended: &ProcessEnd, logs: &Path, took: Duration) {
    let seconds = took.as_secs_f64();
    match ended {
        ProcessEnd::With(status) if status.success() => {
            println!("test {} ... ok ({seconds:.1} s)", test.name);
            outcome.passed += 1;
        }
        ProcessEnd::With(status) if status.code() == Some(SKIPPED.into()) => {
            let reason = last_line(&logs.join(OUTPUT));
            println!("test {} ... {reason}", test.name);
            skips::note(outcome, test.name, &reason);
        }
        ended => {
            println!("test {} ... FAILED ({seconds:.1} s, {ended})", test.name);
            show_end(&logs.join(OUTPUT));
            println!("logs: {}", logs.display());
            outcome.fail(&format!("{} ({ended}), logs in {}", test.name, logs.display()));
        }
    }
}

/// A copy of this program for the tests to run, and to find by its path. The `pure` part builds integration tests of
/// xtask, and cargo replaces the file that we were started from; what still runs is at /proc/self/exe.
fn own_copy(paths: &Paths) -> Result<PathBuf> {
    let folder = paths.test_logs().join("bin");
    fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
    let copy = folder.join("xtask");
    let parts = folder.join("xtask.new");
    fs::copy("/proc/self/exe", &parts).with_context(|| format!("copy this program to {}", parts.display()))?;
    fs::rename(&parts, &copy).with_context(|| format!("rename {}", parts.display()))?;
    Ok(copy)
}

/// The file with everything that a test printed.
const OUTPUT: &str = "output.log";

fn logs_of(name: &str, paths: &Paths) -> PathBuf {
    paths.test_logs().join("lab").join(name)
}

/// How a test's process ended.
enum ProcessEnd {
    With(ExitStatus),
    TimedOut(Duration),
}

impl std::fmt::Display for ProcessEnd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            ProcessEnd::With(status) => write!(f, "{status}"),
            ProcessEnd::TimedOut(after) => write!(f, "timed out after {} s", after.as_secs()),
        }
    }
}

fn run_apart(program: &Path, test: &LabTest, ground: Ground, logs: &Path, real_server: bool) -> Result<ProcessEnd> {
    if logs.exists() {
        fs::remove_dir_all(logs).with_context(|| format!("remove {}", logs.display()))?;
    }
    fs::create_dir_all(logs).with_context(|| format!("create {}", logs.display()))?;
    let output = File::create(logs.join(OUTPUT)).context("create the test's output file")?;
    let mut child = Command::new(program)
        .args(["test", "--lab-one", test.name])
        .env(GROUND, test.ground(ground).unwrap_or(ground).to_string())
        .stdout(output.try_clone().context("share the test's output file")?)
        .stderr(output)
        .spawn()
        .with_context(|| format!("start the test {}", test.name))?;
    let timeout = if real_server { test.timeout + REAL_SERVER } else { test.timeout };
    match wait(&mut child, timeout)? {
        Some(status) => Ok(ProcessEnd::With(status)),
        None => {
            stop(&mut child)?;
            Ok(ProcessEnd::TimedOut(timeout))
        }
    }
}

/// Waits for the process to end, but not longer than this.
fn wait(child: &mut Child, limit: Duration) -> Result<Option<ExitStatus>> {
    let start = Instant::now();
    while start.elapsed() < limit {
        if let Some(status) = child.try_wait().context("wait for a test")? {
            return Ok(Some(status));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(None)
}

fn stop(child: &mut Child) -> Result<()> {
    let pid = Pid::from_raw(i32::try_from(child.id()).context("process id")?);
    // The process is ours and not yet waited for, so the number is still its own.
    kill(pid, Signal::SIGTERM).context("stop a test")?;
    if wait(child, GRACE)?.is_none() {
        child.kill().context("kill a test")?;
        child.wait().context("wait for a killed test")?;
    }
    Ok(())
}

fn show_end(file: &Path) {
    let Ok(bytes) = fs::read(file) else { return };
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text.lines().collect();
    for line in lines.iter().skip(lines.len().saturating_sub(SHOWN_LINES)) {
        println!("    {line}");
    }
}

fn last_line(file: &Path) -> String {
    let text = fs::read_to_string(file).unwrap_or_default();
    text.lines().last().unwrap_or("skipped").to_owned()
}

/// Runs one test in this process.
pub(super) fn run_here(name: &str) -> Result<ExitCode> {
    let test = lab_tests()
        .into_iter()
        .find(|test| test.name == name)
        .with_context(|| format!("there is no lab test {name}"))?;
    let paths = Paths::find()?;
    let logs = logs_of(name, &paths);
    match (test.run)(&LabContext { built: Built::expected(&paths, false), logs, cni: test.cni }) {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error) => match error.downcast_ref::<Skip>() {
            Some(skip) => {
                println!("{skip}");
                Ok(SKIPPED.into())
            }
            None => Err(error),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_fit_for_a_folder() {
        let mut names: Vec<&str> = lab_tests().iter().map(|test| test.name).collect();
        assert!(
            names.iter().all(|name| name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_'))
        );
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }

    #[test]
    fn a_process_that_hangs_is_stopped() {
        let mut child = Command::new("sleep").arg("60").spawn().expect("sleep");
        assert!(wait(&mut child, Duration::from_millis(100)).expect("wait").is_none());
        let start = Instant::now();
        stop(&mut child).expect("stop");
        assert!(start.elapsed() < GRACE);
    }
}
