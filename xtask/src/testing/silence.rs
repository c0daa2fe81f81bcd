//! Test binaries that hang: none may be silent for long while it runs tests, or a run would wait for ever.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::process::Child;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// No single test takes as long, translated guests apart, which have a watch of their own.
pub(super) const LIMIT: Duration = Duration::from_secs(300);

/// Hands over each line that the runner prints. A test binary of the runner's that prints nothing for `limit` is ended;
/// what it was at is handed to `hung`.
pub(super) fn watch(
    runner: &mut Child,
    limit: Duration,
    mut line: impl FnMut(&str),
    mut hung: impl FnMut(&str),
) -> Result<()> {
    let output = runner.stdout.take().context("the test runner has no output")?;
    let lines = follow(output);
    let mut running = RunningTests::default();
    loop {
        // Between two binaries the runner may build as long as it likes.
        let next = match running.tests {
            true => lines.recv_timeout(limit),
            false => lines.recv().map_err(RecvTimeoutError::from),
        };
        match next {
            Ok(text) => {
                let text = text.context("read the output of the test runner")?;
                running.see(&text);
                line(&text);
            }
            Err(RecvTimeoutError::Timeout) => {
                hung(&running.at());
                running.tests = false;
                for pid in children(runner.id())? {
                    // It may have ended just now.
                    let _gone = kill(pid, Signal::SIGKILL);
                }
            }
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
        }
    }
}

fn follow(output: impl Read + Send + 'static) -> mpsc::Receiver<std::io::Result<String>> {
    let (tell, lines) = mpsc::channel();
    thread::spawn(move || {
        for line in BufReader::new(output).lines() {
            let failed = line.is_err();
            if tell.send(line).is_err() || failed {
                return;
            }
        }
    });
    lines
}

/// The running tests, by the output.
#[derive(Default)]
struct RunningTests {
    tests: bool,
    /// Named by the harness after a minute.
    slow: Vec<String>,
}

impl RunningTests {
    fn see(&mut self, line: &str) {
        let Some(rest) = line.strip_prefix("test ") else {
            if line.starts_with("running ") {
                *self = Self { tests: true, slow: Vec::new() };
            }
            return;
        };
        if rest.starts_with("result:") {
            self.tests = false;
        } else if let Some(name) = rest.strip_suffix(" has been running for over 60 seconds") {
            self.slow.push(name.to_owned());
        } else if let Some((name, _)) = rest.split_once(" ... ") {
            self.slow.retain(|slow| slow != name);
        }
    }

    fn at(&self) -> String {
        if self.slow.is_empty() { "a test that it has not named".to_owned() } else { self.slow.join(", ") }
    }
}

/// The processes that this one has started and that have not ended.
fn children(parent: u32) -> Result<Vec<Pid>> {
    let mut children = Vec::new();
    for entry in fs::read_dir("/proc").context("read /proc")? {
        let Some(pid) = entry.ok().and_then(|entry| entry.file_name().to_string_lossy().parse().ok()) else { continue };
        // A process may end while it is looked at. The name in brackets may hold anything; the parent is the second
        // field after it.
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let behind = stat.rsplit_once(") ").map(|(_, fields)| fields);
        if behind.and_then(|fields| fields.split(' ').nth(1)) == Some(parent.to_string().as_str()) {
            children.push(Pid::from_raw(pid));
        }
    }
    Ok(children)
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_silent_binary_is_ended_and_named_and_the_rest_continues() {
        let script = "echo running 2 tests; echo 'test quick ... ok'; \
                      echo 'test slow has been running for over 60 seconds'; sleep 100; \
                      echo running 1 test; echo 'test last ... ok'; echo test result: ok.; sleep 0.5; echo built";
        let mut runner = Command::new("sh").args(["-c", script]).stdout(Stdio::piped()).spawn().expect("start a shell");
        let (mut lines, mut hung) = (0, Vec::new());
        let watched = watch(&mut runner, Duration::from_millis(300), |_| lines += 1, |what| hung.push(what.to_owned()));
        watched.expect("the shell continues");
        assert!(runner.wait().expect("wait for it").success());
        assert_eq!((lines, hung), (7, vec!["slow".to_owned()]));
    }

    #[test]
    fn only_what_runs_is_named() {
        let mut running = RunningTests::default();
        running.see("running 3 tests");
        running.see("test a has been running for over 60 seconds");
        running.see("test b has been running for over 60 seconds");
        running.see("test a ... ok");
        assert_eq!((running.tests, running.at()), (true, "b".to_owned()));
        running.see("test result: ok. 3 passed; 0 failed");
        assert!(!running.tests);
    }
}
