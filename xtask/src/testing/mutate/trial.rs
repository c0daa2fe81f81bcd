//! Tests against an object, until the first one fails.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use egress_toolchain::{Paths, cargo};

/// Read by egress-agent/tests/kernel_programs/object.rs.
const VARIABLE: &str = "EGRESS_TEST_OBJECT";

/// The tests' output.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum TrialEnd {
    /// All passed, so many.
    Green(usize),
    /// This one failed.
    Red(String),
    /// This one failed because the verifier did not take a program.
    Refused(String),
    /// The tests did not end in time.
    Stuck,
}

/// The tests of the programs on the kernel that have one of these texts in their names, or all of them, with this object.
/// Figures of the verifier are no test of behaviour.
pub(super) fn on_kernel(
    binary: &Path,
    object: &Path,
    named: &[&str],
    paths: &Paths,
    limit: Duration,
) -> Result<TrialEnd> {
    let mut command = Command::new(binary);
    command.args(["--test-threads=2", "--nocapture", "--skip=verifier::"]);
    command.args(named);
    command.env(VARIABLE, object).current_dir(paths.root.join("egress-agent"));
    let errors = paths.target.join("mutate/errors");
    let end = until_red(&mut command, &errors, limit)?;
    let text = std::fs::read(&errors).with_context(|| format!("read {}", errors.display()))?;
    let refused = String::from_utf8_lossy(&text).contains("BPF_PROG_LOAD");
    Ok(match end {
        TrialEnd::Red(test) if refused => TrialEnd::Refused(test),
        end => end,
    })
}

/// The tests of the decisions on the host, of the copy.
pub(super) fn on_host(copy: &Paths, limit: Duration) -> Result<TrialEnd> {
    let mut command = cargo();
    command
        .args(["test", "--offline", "--package=egress-common", "--lib", "--target-dir"])
        .arg(copy.target.join("host"));
    command.current_dir(&copy.root);
    until_red(&mut command, &copy.target.join("errors"), limit)
}

/// The agent's own tests that have one of these texts in their names, or all of them, of the copy.
pub(super) fn of_agent(copy: &Paths, named: &[&str], limit: Duration) -> Result<TrialEnd> {
    let mut command = cargo();
    // They are not debugged, and are linked once for each mutation.
    command.args([
        "test",
        "--offline",
        "--package=egress-core",
        "--package=egress-kube",
        "--package=egress-datapath",
        "--package=egress-agent",
        "--lib",
        "--config=profile.dev.debug=0",
        "--target-dir",
    ]);
    command.arg(copy.target.join("host")).arg("--").args(named);
    command.current_dir(&copy.root);
    until_red(&mut command, &copy.target.join("errors"), limit)
}

fn until_red(command: &mut Command, errors: &Path, limit: Duration) -> Result<TrialEnd> {
    let folder = errors.parent().context("a file has a folder")?;
    std::fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
    let file = File::create(errors).with_context(|| format!("create {}", errors.display()))?;
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(file).spawn().context("start the tests")?;
    let end = read(&mut child, Instant::now() + limit);
    if !matches!(end, Ok(TrialEnd::Green(_))) {
        // It may have ended by itself.
        let _ended = child.kill();
    }
    let status = child.wait().context("wait for the tests")?;
    match end? {
        TrialEnd::Green(passed) if !status.success() || passed == 0 => {
            bail!("the tests ended with {status} and named no failure: see {}", errors.display())
        }
        end => Ok(end),
    }
}

/// Reads what the tests print, on a thread of its own: a broken program may keep a test waiting.
fn read(child: &mut Child, until: Instant) -> Result<TrialEnd> {
    let output = child.stdout.take().context("the tests have no output")?;
    let (to, lines) = mpsc::channel();
    std::thread::spawn(move || {
        // Ends with the output, or with the receiver.
        BufReader::new(output).lines().map_while(Result::ok).try_for_each(|line| to.send(line))
    });
    let mut passed = 0;
    loop {
        match lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(line) => match result(&line) {
                Some((test, false)) => return Ok(TrialEnd::Red(test.to_owned())),
                Some((_, true)) => passed += 1,
                None => {}
            },
            Err(mpsc::RecvTimeoutError::Timeout) => return Ok(TrialEnd::Stuck),
            Err(mpsc::RecvTimeoutError::Disconnected) => return Ok(TrialEnd::Green(passed)),
        }
    }
}

/// A line about a test that has ended: its name, and whether it passed.
fn result(line: &str) -> Option<(&str, bool)> {
    let rest = line.strip_prefix("test ")?;
    let (name, end) = rest.split_once(" ... ")?;
    match end {
        "ok" => Some((name, true)),
        "FAILED" => Some((name, false)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trial(script: &str, limit: Duration) -> Result<TrialEnd> {
        // Tests of one process share its number.
        let errors = std::env::temp_dir().join(format!("xtask-trial-{}-{}", std::process::id(), script.len()));
        let end = until_red(Command::new("sh").args(["-c", script]), &errors, limit);
        std::fs::remove_file(&errors).expect("remove");
        end
    }

    #[test]
    fn the_first_failure_ends_it() {
        let minute = Duration::from_secs(60);
        let end = trial("echo 'test a ... ok'; echo 'test b::c ... FAILED'; sleep 600", minute);
        assert_eq!(end.expect("an end"), TrialEnd::Red("b::c".to_owned()));
        assert_eq!(trial("echo 'test a ... ok'; echo noise", minute).expect("an end"), TrialEnd::Green(1));
        assert_eq!(trial("sleep 599", Duration::ZERO).expect("an end"), TrialEnd::Stuck);
    }

    #[test]
    fn tests_that_end_without_a_word_are_no_result() {
        let minute = Duration::from_secs(60);
        assert!(trial("echo 'test a ... ok'; exit 9", minute).is_err());
        assert!(trial("true", minute).is_err(), "nothing ran");
    }
}
