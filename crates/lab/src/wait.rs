//! Waiting for a condition. The time is printed: a number that grows is a warning before the test fails.

use std::fmt::Display;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// How long a change of an object may take until packets show it: three times what docs/operations/assignments.md publishes.
pub const EFFECT: Duration = Duration::from_secs(3 * 2);
/// Likewise until an event reports it (six seconds), and until the pods of an object are counted (five).
pub const REPORTED: Duration = Duration::from_secs(3 * 5);

/// How long packets may be lost when a gateway dies that does not lead: three times what docs/operations/measured-faults.md
/// publishes.
pub const FAIL_OVER: Duration = Duration::from_millis(3 * 1_500);
/// The same of the leader's own node, which the other controller has to find silent first.
pub const LEADERS_FAIL_OVER: Duration = Duration::from_millis(3 * 2_000);

const PAUSE: Duration = Duration::from_millis(25);

/// By what every time limit is multiplied, in a guest that `cargo xtask test --kernel` has found to be slow.
fn factor() -> u32 {
    std::env::var("EGRESS_TEST_PATIENCE").ok().and_then(|factor| factor.parse().ok()).unwrap_or(1)
}

/// Looks until there is something to see; `None` when the time is over.
pub fn poll<T>(patience: Duration, mut check: impl FnMut() -> Result<Option<T>>) -> Result<Option<T>> {
    let begin = Instant::now();
    let patience = patience * factor();
    loop {
        let seen = check()?;
        if seen.is_some() || begin.elapsed() > patience {
            return Ok(seen);
        }
        thread::sleep(PAUSE);
    }
}

/// The same with its time printed, and an error when the time is over.
pub fn until<T>(what: &str, patience: Duration, check: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let begin = Instant::now();
    let Some(seen) = poll(patience, check)? else { bail!("{what}: not within {} s", begin.elapsed().as_secs()) };
    println!("{what}: after {} ms", begin.elapsed().as_millis());
    Ok(seen)
}

/// Waits until the answer is yes.
pub fn until_true(what: &str, patience: Duration, mut holds: impl FnMut() -> Result<bool>) -> Result<()> {
    until(what, patience, || Ok(holds()?.then_some(())))
}

/// The same; returns how long that took.
pub fn time_until(what: &str, patience: Duration, holds: impl FnMut() -> Result<bool>) -> Result<Duration> {
    let begin = Instant::now();
    until_true(what, patience, holds)?;
    Ok(begin.elapsed())
}

/// Waits until so many lines of a log contain all of these texts.
pub fn until_logged(log: &Path, texts: &[&str], count: usize, patience: Duration) -> Result<()> {
    until_true(&format!("{} has {texts:?}", log.display()), patience, || {
        let log = std::fs::read_to_string(log)?;
        let lines = log.lines().filter(|line| texts.iter().all(|text| line.contains(text)));
        Ok(lines.count() >= count)
    })
}

/// Looks until what is seen is what is expected.
pub fn until_equal<T: PartialEq + Display>(
    what: &str,
    expected: &T,
    mut check: impl FnMut() -> Result<T>,
) -> Result<()> {
    let mut last = None;
    let outcome = until(&format!("{what}: {expected}"), EFFECT, || {
        let seen = check()?;
        let equal = seen == *expected;
        last = Some(seen);
        Ok(equal.then_some(()))
    });
    match (outcome, last) {
        (Err(error), Some(last)) => bail!("{error:#}; it is {last}"),
        (outcome, _) => outcome,
    }
}
