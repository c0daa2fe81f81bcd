//! Detection of the uplink without `--uplink` ([`detect_uplink`]).
//!
//! A CNI that still sets the node up changes the result: OVN-Kubernetes moves the node's address and default route to a
//! bridge. So a guess from before the management port exists is repeated until a minute after the port appears. If the
//! result changes, the agent ends with one line, and its next start uses the new uplink.

use std::path::Path;
use std::time::Duration;

use tokio::time::{Instant, sleep};
use tracing::{info, warn};

use crate::cmd::interfaces::detect_uplink;
use crate::metrics::startup_wait::StartupWait;

const INTERVAL: Duration = Duration::from_secs(1);
/// The CNI has finished its setup this long after its management port appeared.
const SETTLED: Duration = Duration::from_secs(60);
const NONE: &str = "waiting for an uplink: there is neither breth0 nor br-ex nor a default route; if there will be none, set \
                    the external interface with --uplink";

/// Waits until an uplink is found.
pub(super) async fn guess(startup_wait: &StartupWait) -> String {
    let mut is_reported = false;
    loop {
        if let Some(found) = detect_uplink() {
            if is_reported {
                info!(uplink = found, "found an uplink");
                startup_wait.set(None);
            }
            return found;
        }
        if !std::mem::replace(&mut is_reported, true) {
            warn!("{NONE}");
            startup_wait.set(Some(NONE.to_owned()));
        }
        sleep(INTERVAL).await;
    }
}

/// Whether the CNI may still be setting the node up.
pub(super) fn is_early(mgmt_port: &str) -> bool {
    !Path::new("/sys/class/net").join(mgmt_port).exists()
}

/// Waits for another result than this early guess; forever if the guess is right.
pub(super) async fn another_than(guess: &str, mgmt_port: &str) -> String {
    match changed(guess, (INTERVAL, SETTLED), || !is_early(mgmt_port), detect_uplink).await {
        Some(other) => other,
        None => std::future::pending().await,
    }
}

/// Another result, until the port has existed for long enough. No result is not another one.
async fn changed(
    guess: &str,
    (pause, settled): (Duration, Duration),
    mut has_port: impl FnMut() -> bool,
    mut detect: impl FnMut() -> Option<String>,
) -> Option<String> {
    let mut since = None;
    loop {
        since = since.or_else(|| has_port().then(Instant::now));
        if let Some(other) = detect().filter(|found| found != guess) {
            return Some(other);
        }
        if since.is_some_and(|since: Instant| since.elapsed() >= settled) {
            return None;
        }
        sleep(pause).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUICK: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(20));

    #[tokio::test]
    async fn a_bridge_that_the_cni_creates_is_another_result() {
        let (mut looks, mut guesses) = (0, [Some("eth0"), None, Some("eth0"), Some("breth0")].into_iter());
        let detect = || guesses.next().expect("a guess ends it").map(str::to_owned);
        let has_port = || {
            looks += 1;
            looks > 2
        };
        assert_eq!(changed("eth0", QUICK, has_port, detect).await.as_deref(), Some("breth0"));
    }

    #[tokio::test]
    async fn an_unchanged_guess_is_settled_some_time_after_the_port_appears() {
        let mut looks = 0;
        let start = Instant::now();
        let has_port = || {
            looks += 1;
            looks > 5
        };
        assert_eq!(changed("eth0", QUICK, has_port, || Some("eth0".to_owned())).await, None);
        assert!(start.elapsed() >= QUICK.1);
    }
}
