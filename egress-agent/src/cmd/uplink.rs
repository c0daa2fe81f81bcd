//! Which interface is the uplink where nobody has named it.
//!
//! It is guessed ([`detect_uplink`]), and a CNI that is still at work changes what is guessed: OVN-Kubernetes moves a node's
//! address and default route to a bridge when it sets the node up. So a guess that was made before the management port was
//! there is made again and again, until a minute behind the port's arrival. Another outcome ends the agent with one line:
//! whoever starts it again has the right one from the beginning.

use std::path::Path;
use std::time::Duration;

use tokio::time::{Instant, sleep};
use tracing::{info, warn};

use crate::cmd::interfaces::detect_uplink;
use crate::metrics::startup_wait::StartupWait;

const LOOK: Duration = Duration::from_secs(1);
/// The CNI has set the node up so long after its management port has come.
const SETTLED: Duration = Duration::from_secs(60);
const NONE: &str = "waiting for an uplink: there is neither breth0 nor br-ex nor a default route; if there will be none, name \
                    the interface towards the outside with --uplink";

/// Waits until there is something to guess.
pub(super) async fn guess(startup_wait: &StartupWait) -> String {
    let mut is_said = false;
    loop {
        if let Some(found) = detect_uplink() {
            if is_said {
                info!(uplink = found, "there is an uplink");
                startup_wait.set(None);
            }
            return found;
        }
        if !std::mem::replace(&mut is_said, true) {
            warn!("{NONE}");
            startup_wait.set(Some(NONE.to_owned()));
        }
        sleep(LOOK).await;
    }
}

/// Whether the CNI has not set the node up yet.
pub(super) fn is_early(mgmt_port: &str) -> bool {
    !Path::new("/sys/class/net").join(mgmt_port).exists()
}

/// Waits for another guess than this one, which was early; for ever where it is right.
pub(super) async fn another_than(guess: &str, mgmt_port: &str) -> String {
    match changed(guess, (LOOK, SETTLED), || !is_early(mgmt_port), detect_uplink).await {
        Some(other) => other,
        None => std::future::pending().await,
    }
}

/// Another guess, before the port has been there for long enough. That there is nothing to guess for a moment is none.
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
    async fn a_bridge_that_comes_with_the_cni_is_another_guess() {
        let (mut looks, mut guesses) = (0, [Some("eth0"), None, Some("eth0"), Some("breth0")].into_iter());
        let detect = || guesses.next().expect("a guess ends it").map(str::to_owned);
        let has_port = || {
            looks += 1;
            looks > 2
        };
        assert_eq!(changed("eth0", QUICK, has_port, detect).await.as_deref(), Some("breth0"));
    }

    #[tokio::test]
    async fn a_guess_that_stays_is_settled_some_time_behind_the_port() {
        let mut looks = 0;
        let begun = Instant::now();
        let has_port = || {
            looks += 1;
            looks > 5
        };
        assert_eq!(changed("eth0", QUICK, has_port, || Some("eth0".to_owned())).await, None);
        assert!(begun.elapsed() >= QUICK.1);
    }
}
