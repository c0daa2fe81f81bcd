//! How much slower a guest is than the host, measured and not supposed: a translated one by a factor between five and a
//! hundred, depending on what the host has to do beside. Every limit on time in a guest is made from it.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

/// How often the program is started.
const STARTS: u32 = 16;
/// Beyond this something is broken, and waiting is useless.
const MOST: u32 = 100;

/// How long it takes to start a small program and to wait for its end: what tests do most, and what a translated guest is
/// worst at. The shortest time, which is the machine's own, and the mean, in which there is what else it has to do.
pub(super) fn measure(program: &str) -> Result<(Duration, Duration)> {
    let (mut shortest, mut sum) = (Duration::MAX, Duration::ZERO);
    for _ in 0..STARTS {
        let start = Instant::now();
        let status = Command::new(program).arg("-V").stdout(Stdio::null()).status();
        let status = status.with_context(|| format!("start {program}"))?;
        ensure!(status.success(), "{program} -V: {status}");
        let took = start.elapsed();
        (shortest, sum) = (shortest.min(took), sum + took);
    }
    Ok((shortest, sum / STARTS))
}

/// By what a time limit is multiplied in a guest: its mean over the host's shortest, and twice that, since the host may
/// become busier.
pub(super) fn patience(host: Duration, guest: Duration) -> u32 {
    let host = host.as_micros().max(1);
    let factor = (2 * guest.as_micros()).div_ceil(host);
    u32::try_from(factor).unwrap_or(MOST).clamp(2, MOST)
}

/// After which time a test is ended. On a machine of their own most take seconds, and the longest three quarters of a
/// minute, most of which is waiting; so this much is not multiplied.
pub(super) fn test_limit(patience: u32) -> Duration {
    Duration::from_secs(120) + Duration::from_secs(10) * patience
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patience_grows_with_what_was_measured_and_has_an_end() {
        let host = Duration::from_millis(2);
        for (guest_ms, expected) in [(1, 2), (2, 2), (20, 20), (60, 60), (100_000, MOST)] {
            assert_eq!(patience(host, Duration::from_millis(guest_ms)), expected, "{guest_ms} ms");
        }
        assert_eq!(patience(Duration::ZERO, host), MOST);
        assert_eq!(test_limit(60), Duration::from_secs(720));
    }
}
