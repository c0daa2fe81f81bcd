//! Watching a guest from outside: its tests are counted as they end. A guest that dies or falls silent is one failure
//! more, which shows the end of the kernel's console.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::super::summary::PartOutcome;

/// What the guest's own lines begin with.
pub(super) const OURS: &str = "guest: ";

/// How many lines of the console are shown.
const SHOWN_LINES: usize = 60;

/// How long a guest may be silent. How long its tests may take, it knows itself (`pace`), and names every minute those that
/// are running; so the whole has no limit.
#[derive(Clone, Copy, Debug)]
pub(super) struct SilenceLimits {
    /// Until it reports that it is up.
    pub(super) boot: Duration,
    /// From one line to the next.
    pub(super) silence: Duration,
}

/// What is known of a guest from its lines.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Progressing {
    /// The kernel's version, by itself.
    pub(super) release: Option<String>,
    suite: Option<String>,
    /// Tests of the suite that have not ended, and of how many.
    left: usize,
    of: usize,
    done: bool,
}

/// Why watching ended.
#[derive(Debug, PartialEq, Eq)]
enum WatchEnd {
    Closed,
    TooLong(Duration),
}

/// Runs the machine to its end and counts its tests. Whether it came up is returned, since not every accelerator works
/// everywhere.
pub(super) fn watch(
    mut machine: Command,
    console: &Path,
    limits: SilenceLimits,
    outcome: &mut PartOutcome,
    mut shown: impl FnMut(&str, &Option<String>),
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
        let during = state.suite.as_deref().unwrap_or("no suite");
        let left = state.left;
        let how = match end {
            WatchEnd::Closed => "the guest died".to_owned(),
            WatchEnd::TooLong(limit) => format!("the guest printed nothing for {} s", limit.as_secs()),
        };
        show_end(console);
        outcome.fail(&format!(
            "{how}, during {during}, {left} tests of it to go and those of later suites; its console is {}",
            console.display()
        ));
    }
    Ok(state)
}

fn follow(
    lines: &Receiver<String>,
    limits: SilenceLimits,
    state: &mut Progressing,
    outcome: &mut PartOutcome,
    shown: &mut impl FnMut(&str, &Option<String>),
) -> WatchEnd {
    let start = Instant::now();
    loop {
        let limit = match state.release {
            Some(_) => limits.silence,
            None => limits.boot.saturating_sub(start.elapsed()),
        };
        match lines.recv_timeout(limit) {
            Ok(line) => {
                let about = state.read(&line, outcome);
                shown(&line, &about);
            }
            Err(RecvTimeoutError::Disconnected) => return WatchEnd::Closed,
            Err(RecvTimeoutError::Timeout) => return WatchEnd::TooLong(limit),
        }
    }
}

impl Progressing {
    /// How far the suite is comes back, where the line is about a test that has ended.
    fn read(&mut self, line: &str, outcome: &mut PartOutcome) -> Option<String> {
        let (word, rest) = line.strip_prefix(OURS).map(|text| text.split_once(' ').unwrap_or((text, "")))?;
        match word {
            "up" => self.release = rest.split(' ').next().map(str::to_owned),
            "begins" => {
                let (name, count) = rest.rsplit_once(' ').unwrap_or((rest, ""));
                self.suite = Some(name.to_owned());
                self.of = count.parse().unwrap_or(0);
                self.left = self.of;
            }
            "passed" => {
                outcome.passed += 1;
                return Some(self.ended());
            }
            "skipped" => {
                outcome.skipped += 1;
                return Some(self.ended());
            }
            "failed" => {
                outcome.fail(rest);
                return Some(self.ended());
            }
            "ended" => {
                if self.left > 0 {
                    outcome.fail(&format!("{rest}: {} tests did not end", self.left));
                }
                (self.suite, self.left) = (None, 0);
            }
            "broke" => {
                outcome.fail(rest);
                self.done = true;
            }
            "done" => self.done = true,
            _ => {}
        }
        None
    }

    fn ended(&mut self) -> String {
        self.left = self.left.saturating_sub(1);
        format!("{}/{}", self.of - self.left, self.of)
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

/// The end of the kernel's output.
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

    fn limits(millis: u64) -> SilenceLimits {
        SilenceLimits { boot: Duration::from_millis(millis), silence: Duration::from_millis(millis) }
    }

    /// A guest that prints this and ends.
    fn say(script: &str, limits: SilenceLimits) -> (Progressing, PartOutcome) {
        let mut machine = Command::new("sh");
        machine.args(["-c", script]).stdout(std::process::Stdio::piped());
        let mut outcome = PartOutcome::new("6.1");
        let state = watch(machine, Path::new("/nonexistent"), limits, &mut outcome, |_, _| ()).expect("watch");
        (state, outcome)
    }

    const LONG: u64 = 60_000;

    #[test]
    fn results_are_counted_up_to_the_last_word() {
        let (state, outcome) = say(
            "echo 'guest: up 6.1.0 (9 modules)'; echo 'guest: begins a 4'; echo 'guest: passed a x 0.1'; \
             echo 'guest: failed a y 0.1 exit status: 101'; echo 'guest: passed a z 2.0'; echo 'guest: skipped a w 0.1'; \
             echo 'guest: ended a 2 passed, 1 failed'; echo 'guest: done'",
            limits(LONG),
        );
        assert_eq!(state.release.as_deref(), Some("6.1.0"));
        assert_eq!((outcome.passed, outcome.failed, outcome.skipped), (2, 1, 1));
    }

    #[test]
    fn a_guest_that_dies_has_failed() {
        let (state, outcome) =
            say("echo 'guest: up 6.1.0'; echo 'guest: begins a 3'; echo 'guest: passed a x 1.0'", limits(LONG));
        assert_eq!((outcome.passed, outcome.failed, state.left), (1, 1, 2));
    }

    #[test]
    fn a_guest_that_hangs_is_ended_and_has_failed() {
        let start = Instant::now();
        let (_, outcome) = say("echo 'guest: up 6.1.0'; exec sleep 60", limits(500));
        assert_eq!(outcome.failed, 1);
        assert!(start.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn tests_that_were_lost_have_failed() {
        let begin = "echo 'guest: up 6.1.0'; echo 'guest: begins a 2'; echo 'guest: passed a x 1.0'";
        let (_, lost) = say(&format!("{begin}; echo 'guest: ended a well'; echo 'guest: done'"), limits(LONG));
        assert_eq!((lost.passed, lost.failed), (1, 1));
        let (_, broken) = say(&format!("{begin}; echo 'guest: broke no memory'; echo 'guest: done'"), limits(LONG));
        assert_eq!((broken.passed, broken.failed), (1, 1));
    }

    #[test]
    fn a_machine_that_never_came_up_is_not_judged_here() {
        let (state, outcome) = say("exit 1", limits(LONG));
        assert_eq!(state, Progressing::default());
        assert_eq!(outcome.failed, 0);
    }
}
