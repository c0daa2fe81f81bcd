//! Flags of how the controller finds out which nodes are there, and of what agents answer it.

use std::time::Duration;

use clap::Args;

use crate::controller::reach::pulse::Rules;
use crate::controller::reach::session::{Dial, Manner};
use crate::health::signature::SharedKey;
use crate::health::tls::Tls;
use crate::metrics::Meters;

/// Between two probes of a node. A longer total timeout needs no more probes than this.
const INTERVALS: std::ops::RangeInclusive<Duration> = Duration::from_millis(50)..=Duration::from_secs(1);
/// Beside zero. With less, a machine that is busy for a moment loses its addresses.
const TIMEOUTS: std::ops::RangeInclusive<Duration> = Duration::from_millis(200)..=Duration::from_secs(3600);

/// Seconds, as OVN-Kubernetes has it, or milliseconds.
fn total_timeout(text: &str) -> Result<Duration, String> {
    let time = match text.strip_suffix("ms") {
        Some(text) => text.parse().map(Duration::from_millis),
        None => text.parse().map(Duration::from_secs),
    };
    let time = time.ok().filter(|time| time.is_zero() || TIMEOUTS.contains(time));
    time.ok_or_else(|| "give seconds (0 to 3600), or milliseconds (200ms or more)".to_owned())
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Reachability of nodes")]
pub(super) struct HealthArgs {
    /// Seconds (0 to 3600), or milliseconds (`300ms`, not below 200), without a sign of life after which an egress node is
    /// unreachable and its egress IPs move, the same for agents and controllers; 0: nodes are not probed, and count as gone
    /// when Kubernetes says that they are not Ready
    #[arg(long, env = "EGRESS_AGENT_EGRESSIP_REACHABILITY_TOTAL_TIMEOUT", value_name = "SECONDS", default_value = "1",
          value_parser = total_timeout)]
    egressip_reachability_total_timeout: Duration,
    /// TCP port of the gRPC health server on the nodes' management addresses, the same on all nodes (0 to 65535); 0: there is
    /// none, whether a node is there is told by its TCP port 9, and its uplink is not looked at
    #[arg(long, env = "OVN_EGRESSIP_HEALTHCHECK_PORT", value_name = "PORT", default_value_t = 0)]
    egressip_node_healthcheck_port: u16,
}

impl HealthArgs {
    pub(super) fn port(&self) -> u16 {
        self.egressip_node_healthcheck_port
    }

    pub(super) fn total_timeout(&self) -> Duration {
        self.egressip_reachability_total_timeout
    }
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Reachability of nodes")]
pub(super) struct ReachabilityArgs {
    #[command(flatten)]
    health: HealthArgs,
    /// Seconds that an egress node keeps its egress IPs while it is there and its agent does not answer (0 to 86400): as long
    /// as an update or a restart of the agent may take
    #[arg(long, env = "EGRESS_AGENT_EGRESSIP_REACHABILITY_GRACE", value_name = "SECONDS", default_value_t = 30,
          value_parser = clap::value_parser!(u32).range(..=86400))]
    egressip_reachability_grace: u32,
}

impl ReachabilityArgs {
    /// `None` where nobody is to be probed. In plaintext without TLS.
    pub(super) fn manner(&self, tls: Option<Tls>) -> Option<Manner> {
        let total = self.health.total_timeout();
        let interval = (total / 4).clamp(*INTERVALS.start(), *INTERVALS.end());
        let grace = Duration::from_secs(self.egressip_reachability_grace.into());
        let rules = Rules { total, interval, grace };
        (!total.is_zero()).then(|| Manner {
            rules,
            port: self.health.port(),
            dial: tls.map_or(Dial::Plaintext, Dial::Tls),
            key: SharedKey::default(),
            meters: Meters::default(),
            events: None,
            outages: None,
        })
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        reachability: ReachabilityArgs,
    }

    fn manner(arguments: &[&str]) -> Option<Manner> {
        Line::try_parse_from([&["agent"], arguments].concat()).expect("flags").reachability.manner(None)
    }

    #[test]
    fn the_interval_goes_with_the_timeout_and_zero_is_never() {
        let interval = |seconds: &str| {
            manner(&["--egressip-reachability-total-timeout", seconds]).map(|manner| manner.rules.interval.as_millis())
        };
        let given = ["0", "200ms", "300ms", "1", "2", "4", "60"].map(interval);
        assert_eq!(given, [None, Some(50), Some(75), Some(250), Some(500), Some(1000), Some(1000)]);
        for refused in ["199ms", "0.5", "3601", "1s", "-1", "", "ms"] {
            assert!(total_timeout(refused).is_err(), "{refused}");
        }
        let rules = manner(&[]).expect("on by default").rules;
        assert_eq!((rules.total, rules.grace), (Duration::from_secs(1), Duration::from_secs(30)));
    }
}
