//! Runs a suite in the guest: every test in a process of its own with a limit of its own, some at once, so that one that
//! fails, dies or hangs takes none along. Each result is printed as the test ends, and a long test is named while it runs.
//! What a test has loaded and given back in order it may leave to the next one of its row: see [`KEPT`].

use std::collections::VecDeque;
use std::fs::{self, File};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

use super::super::lab;
use super::guest::BPFFS;
use super::line::SerialLine;
use super::pace;
use super::plan::{PROGRAMS, Suite, TARGET};

/// Read by the tests (kernel_dataplane/node.rs, kernel_programs/slow_guest.rs, the lab's wait.rs): by what they multiply
/// their own limits.
const PATIENCE: &str = "EGRESS_TEST_PATIENCE";

/// Read by the tests (kernel_programs/object_pool.rs): where an object is pinned for the next test, each row of tests its own. The
/// verifier is what takes the time in a guest.
const KEPT: &str = "EGRESS_TEST_KEPT";

/// How often a running test is named.
const SIGN_OF_LIFE: Duration = Duration::from_secs(60);

/// The end of the output of a failed test.
const SHOWN_LINES: usize = 120;

/// Of each log.
const SHOWN_WARNINGS: usize = 20;

/// How the slowest tests are known: the ones to look at when a guest takes too long.
const SLOWEST: usize = 5;

/// Lines of a test that has passed which someone must see: that it looked at less than elsewhere, or at nothing.
const REMARKS: [&str; 2] = ["skipped: ", "reduced: "];

/// What came of a test.
struct FinishedTest {
    name: String,
    end: TestEnd,
    took: Duration,
}

#[derive(Debug, PartialEq, Eq)]
enum TestEnd {
    Passed,
    Skipped,
    /// And how.
    Failed(String),
}

/// Runs all tests of the suite.
pub(super) fn run(suite: &Suite, patience: u32, line: &SerialLine) -> Result<()> {
    line.tell(&format!("begins {} {}", suite.name, suite.tests.len()))?;
    let start = Instant::now();
    let queue: Mutex<VecDeque<&String>> = Mutex::new(suite.tests.iter().collect());
    let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
    let worker = |number: usize| -> Result<Vec<FinishedTest>> {
        let mut ended = Vec::new();
        while let Some(name) = next() {
            ended.push(one(suite, name, number, patience, line)?);
        }
        Ok(ended)
    };
    let mut ended = Vec::new();
    std::thread::scope(|scope| -> Result<()> {
        let worker = &worker;
        let workers: Vec<_> = (0..suite.at_once).map(|number| scope.spawn(move || worker(number))).collect();
        for worker in workers {
            ended.extend(worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?);
        }
        Ok(())
    })?;
    line.tell(&format!("ended {} {}", suite.name, summary(ended, start.elapsed())))
}

fn summary(mut ended: Vec<FinishedTest>, took: Duration) -> String {
    let passed = ended.iter().filter(|test| test.end == TestEnd::Passed).count();
    let failed = ended.iter().filter(|test| matches!(test.end, TestEnd::Failed(_))).count();
    ended.sort_by_key(|test| std::cmp::Reverse(test.took));
    let slowest: Vec<_> =
        ended.iter().take(SLOWEST).map(|test| format!("{} {:.0} s", test.name, test.took.as_secs_f64())).collect();
    let slowest = slowest.join(", ");
    format!("{passed} passed, {failed} failed in {:.1} minutes; slowest: {slowest}", took.as_secs_f64() / 60.0)
}

/// Runs one test and prints its result.
fn one(suite: &Suite, name: &str, worker: usize, patience: u32, line: &SerialLine) -> Result<FinishedTest> {
    let path = format!("/tmp/said-{worker}");
    let log = File::create(&path).with_context(|| format!("create {path}"))?;
    let also = log.try_clone().with_context(|| format!("share {path}"))?;
    let start = Instant::now();
    let mut command = Command::new(&suite.program);
    command
        .args(&suite.before)
        .arg(name)
        .args(&suite.after)
        .envs(suite.environment.iter().map(|(name, value)| (name, value)))
        .env(PATIENCE, patience.to_string())
        .env(KEPT, format!("{BPFFS}/kept-{worker}"))
        .env("PATH", PROGRAMS)
        .stdin(Stdio::null())
        .stdout(log)
        .stderr(also)
        .process_group(0);
    let limit = pace::test_limit(patience);
    let end = wait(&mut command, limit, |elapsed| {
        line.tell(&format!("running {} {name}, {:.0} s by now", suite.name, elapsed.as_secs_f64()))
    })?;
    let took = start.elapsed();
    let text = fs::read(&path).with_context(|| format!("read {path}"))?;
    let text = String::from_utf8_lossy(&text);
    let about = format!("{} {name} {:.1}", suite.name, took.as_secs_f64());
    let has_failed = matches!(end, TestEnd::Failed(_));
    let logs = if has_failed { warnings(&Path::new(TARGET).join("test-logs/lab").join(name)) } else { Vec::new() };
    let mut shown = worth_showing(&text, !has_failed, suite.is_shown);
    shown.extend(logs.iter().map(String::as_str));
    line.show(
        &shown,
        &match &end {
            TestEnd::Passed => format!("passed {about}"),
            TestEnd::Skipped => format!("skipped {about}"),
            TestEnd::Failed(how) => format!("failed {about} {how}"),
        },
    )?;
    Ok(FinishedTest { name: name.to_owned(), end, took })
}

/// The last warnings in the logs of a test on the lab, which end with the guest.
fn warnings(logs: &Path) -> Vec<String> {
    let mut shown = Vec::new();
    for entry in fs::read_dir(logs).into_iter().flatten().flatten() {
        let text = fs::read_to_string(entry.path()).unwrap_or_default();
        let found: Vec<&str> = text.lines().filter(|line| line.contains("WARN") || line.contains("ERROR")).collect();
        let last = &found[found.len().saturating_sub(SHOWN_WARNINGS)..];
        shown.extend(last.iter().map(|line| format!("{}: {line}", entry.file_name().to_string_lossy())));
    }
    shown
}

fn worth_showing(text: &str, is_good: bool, is_shown: bool) -> Vec<&str> {
    let lines: Vec<&str> = text.lines().collect();
    if is_shown {
        return lines;
    }
    if is_good {
        return lines.into_iter().filter(|line| REMARKS.iter().any(|remark| line.starts_with(remark))).collect();
    }
    lines[lines.len().saturating_sub(SHOWN_LINES)..].to_vec()
}

/// Runs it to its end. What it has started and left is ended with it.
fn wait(
    command: &mut Command,
    limit: Duration,
    mut sign_of_life: impl FnMut(Duration) -> Result<()>,
) -> Result<TestEnd> {
    let mut child = command.spawn().context("start a test")?;
    let group = Pid::from_raw(i32::try_from(child.id()).context("a process number")?);
    let (start, mut reported) = (Instant::now(), Duration::ZERO);
    let end = loop {
        if let Some(status) = child.try_wait().context("wait for a test")? {
            break match status.code() {
                Some(0) => TestEnd::Passed,
                Some(code) if code == i32::from(lab::SKIPPED) => TestEnd::Skipped,
                _ => TestEnd::Failed(status.to_string()),
            };
        }
        let elapsed = start.elapsed();
        if elapsed > limit {
            break TestEnd::Failed(format!("not within {} s", limit.as_secs()));
        }
        if elapsed > reported + SIGN_OF_LIFE {
            reported = elapsed;
            sign_of_life(elapsed)?;
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    match killpg(group, Signal::SIGKILL) {
        // Nothing is left of it.
        Ok(()) | Err(nix::errno::Errno::ESRCH) => {}
        Err(error) => return Err(error).context("end what a test has left"),
    }
    child.wait().context("wait for a test")?;
    Ok(end)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(how: &str) -> TestEnd {
        TestEnd::Failed(how.to_owned())
    }

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]).process_group(0);
        command
    }

    #[test]
    fn a_test_that_hangs_is_ended_with_what_it_has_started() {
        let long = Duration::from_secs(60);
        let quiet = |_| Ok(());
        for (code, end) in [(0, TestEnd::Passed), (77, TestEnd::Skipped), (3, failed("exit status: 3"))] {
            assert_eq!(wait(&mut shell(&format!("exit {code}")), long, quiet).expect("run"), end);
        }
        let start = Instant::now();
        let hung = wait(&mut shell("sleep 60 & sleep 60"), Duration::from_millis(300), quiet).expect("run");
        assert_eq!(hung, failed("not within 0 s"));
        assert!(start.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn remarks_are_shown_of_those_that_pass_and_the_end_of_those_that_fail() {
        let text = "one\nskipped: needs root\nlast";
        assert_eq!(worth_showing(text, true, false), ["skipped: needs root"]);
        assert_eq!(worth_showing(text, true, true), ["one", "skipped: needs root", "last"]);
        assert_eq!(worth_showing(text, false, false).len(), 3);
        let long = "line\n".repeat(SHOWN_LINES + 5);
        assert_eq!(worth_showing(&long, false, false).len(), SHOWN_LINES);
    }

    #[test]
    fn a_suite_names_its_slowest() {
        let ended =
            |name: &str, seconds, end| FinishedTest { name: name.to_owned(), end, took: Duration::from_secs(seconds) };
        let tests = vec![ended("a", 1, TestEnd::Passed), ended("b", 9, failed("")), ended("c", 0, TestEnd::Skipped)];
        let text = summary(tests, Duration::from_secs(90));
        assert_eq!(text, "1 passed, 1 failed in 1.5 minutes; slowest: b 9 s, a 1 s, c 0 s");
    }
}
