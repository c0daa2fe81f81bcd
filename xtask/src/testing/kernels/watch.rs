//! Watching a guest from outside: its tests are counted as they end, and one that dies or hangs is a failure that shows
//! the end of the kernel's console.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::super::cargo_tests::count;
use super::super::summary::Outcome;

/// How many lines of the console are shown.
const SHOWN_LINES: usize = 60;

/// How long a guest may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Until it says that it is up.
    pub(super) boot: Duration,
    /// Altogether.
    pub(super) whole: Duration,
}

/// What is known of a guest from its lines.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Progressing {
    /// The kernel's own word for its version.
    pub(super) release: Option<String>,
    step: Option<String>,
    failed_before: usize,
    done: bool,
}

/// Why watching ended.
#[derive(Debug, PartialEq, Eq)]
enum End {
    Closed,
    TooLong(Duration),
}

/// Runs the machine to its end and counts its tests. Whether it came up is told, since not every way to run it works
/// everywhere.
pub(super) fn watch(
    mut machine: Command,
    console: &Path,
    limits: Limits,
    outcome: &mut Outcome,
    mut shown: impl FnMut(&str),
) -> Result<Progressing> {
    let mut child = machine.spawn().context("start qemu")?;
    let output = child.stdout.take().context("qemu has no output")?;
    let (sender, lines) = channel();
    let reader = std::thread::spawn(move || {
        for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
            let line = String::from_utf8_lossy(&line).trim_end_matches('\r').to_owned();
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    let mut state = Progressing::default();
    let end = follow(&lines, limits, &mut state, outcome, &mut shown);
    stop(&mut child)?;
    // The pipe ends with the process.
    drop(reader.join());
    if state.release.is_some() && !state.done {
        let during = state.step.as_deref().unwrap_or("no step");
        let how = match end {
            End::Closed => format!("the guest died during {during}"),
            End::TooLong(limit) => format!("the guest was not done within {} s, during {during}", limit.as_secs()),
        };
        show_end(console);
        outcome.fail(&format!("{how}; its console is {}", console.display()));
    }
    Ok(state)
}

fn follow(
    lines: &Receiver<String>,
    limits: Limits,
    state: &mut Progressing,
    outcome: &mut Outcome,
    shown: &mut impl FnMut(&str),
) -> End {
    let start = Instant::now();
    loop {
        let limit = if state.release.is_some() { limits.whole } else { limits.boot };
        match lines.recv_timeout(limit.saturating_sub(start.elapsed())) {
            Ok(line) => {
                shown(&line);
                state.read(&line, outcome);
            }
            Err(RecvTimeoutError::Disconnected) => return End::Closed,
            Err(RecvTimeoutError::Timeout) => return End::TooLong(limit),
        }
    }
}

impl Progressing {
    fn read(&mut self, line: &str, outcome: &mut Outcome) {
        count(line, outcome);
        let Some((word, rest)) = line.strip_prefix("guest: ").map(|text| text.split_once(' ').unwrap_or((text, "")))
        else {
            return;
        };
        match word {
            "up" => self.release = rest.split(' ').next().map(str::to_owned),
            "begins" => (self.step, self.failed_before) = (Some(rest.to_owned()), outcome.failed),
            "ended" => {
                let (name, how) = rest.split_once(' ').unwrap_or((rest, "without a word"));
                if how != "ok" && outcome.failed == self.failed_before {
                    outcome.fail(&format!("{name}: {how}, and no failed test: see the output above"));
                }
                self.step = None;
            }
            "failed" => {
                outcome.fail(rest);
                self.done = true;
            }
            "done" => self.done = true,
            _ => {}
        }
    }
}

/// Ends the machine, which may have ended already.
fn stop(child: &mut Child) -> Result<()> {
    if child.try_wait().context("wait for qemu")?.is_none() {
        // A guest that is done takes a moment to end; nothing of it matters any more.
        child.kill().context("kill qemu")?;
    }
    child.wait().context("wait for qemu")?;
    Ok(())
}

/// The end of what the kernel said.
pub(super) fn show_end(console: &Path) {
    let Ok(bytes) = fs::read(console) else { return };
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text.lines().collect();
    println!("the last lines of the console:");
    for line in lines.iter().skip(lines.len().saturating_sub(SHOWN_LINES)) {
        println!("    {}", line.trim_end());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(whole: u64) -> Limits {
        Limits { boot: Duration::from_millis(whole), whole: Duration::from_millis(whole) }
    }

    /// A guest that says this and ends.
    fn say(script: &str, limits: Limits) -> (Progressing, Outcome) {
        let mut machine = Command::new("sh");
        machine.args(["-c", script]).stdout(std::process::Stdio::piped());
        let mut outcome = Outcome::new("6.1");
        let state = watch(machine, Path::new("/nonexistent"), limits, &mut outcome, |_| ()).expect("watch");
        (state, outcome)
    }

    const LONG: u64 = 60_000;

    #[test]
    fn results_are_counted_up_to_the_last_word() {
        let (state, outcome) = say(
            "echo 'guest: up 6.1.0 (9 modules)'; echo 'guest: begins a'; echo 'test result: ok. 5 passed; 0 failed'; \
             echo 'guest: ended a ok'; echo 'guest: done'",
            limits(LONG),
        );
        assert_eq!(state.release.as_deref(), Some("6.1.0"));
        assert_eq!((outcome.passed, outcome.failed), (5, 0));
    }

    #[test]
    fn a_guest_that_dies_has_failed() {
        let (_, outcome) = say("echo 'guest: up 6.1.0'; echo 'guest: begins a'", limits(LONG));
        assert_eq!(outcome.failed, 1);
    }

    #[test]
    fn a_guest_that_hangs_is_ended_and_has_failed() {
        let start = Instant::now();
        let (_, outcome) = say("echo 'guest: up 6.1.0'; exec sleep 60", limits(500));
        assert_eq!(outcome.failed, 1);
        assert!(start.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn a_step_that_breaks_down_has_failed_once() {
        let up = "echo 'guest: up 6.1.0'; echo 'guest: begins a'";
        let end = "echo 'guest: ended a signal: 11 (SIGSEGV)'; echo 'guest: done'";
        let (_, broken) = say(&format!("{up}; {end}"), limits(LONG));
        assert_eq!(broken.failed, 1);
        let result = "echo 'test result: FAILED. 5 passed; 1 failed'";
        let (_, counted) = say(&format!("{up}; {result}; {end}"), limits(LONG));
        assert_eq!(counted.failed, 1);
    }

    #[test]
    fn a_machine_that_never_came_up_is_not_judged_here() {
        let (state, outcome) = say("exit 1", limits(LONG));
        assert_eq!(state, Progressing::default());
        assert_eq!(outcome.failed, 0);
    }
}
