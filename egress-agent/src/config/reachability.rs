//! Flags of the controller's probes, and of the agents' health server.

use std::time::Duration;

use clap::Args;

use crate::controller::node_health::session::{Dial, ProbeSettings};
use crate::health::tls::Tls;
use crate::metrics::Meters;
use egress_core::node_health::liveness::ProbeTiming;
use egress_kube::health_key::SharedKey;

/// Between two probes of a node.
const INTERVALS: std::ops::RangeInclusive<Duration> = Duration::from_millis(50)..=Duration::from_secs(1);
/// With a shorter one, a briefly busy machine loses its addresses.
const TIMEOUTS: std::ops::RangeInclusive<Duration> = Duration::from_millis(200)..=Duration::from_secs(3600);

/// Seconds, as OVN-Kubernetes has it, or milliseconds.
fn total_timeout(text: &str) -> Result<Duration, String> {
    let time = match text.strip_suffix("ms") {
        Some(text) => text.parse().map(Duration::from_millis),
        None => text.parse().map(Duration::from_secs),
    };
    let time = time.map_err(|_not_a_number| ());
    time.ok().filter(|time| TIMEOUTS.contains(time)).ok_or_else(|| match time {
        Ok(Duration::ZERO) => {
            "health checks cannot be turned off: without them two nodes could hold one egress IP. Give \
                               seconds (1 to 3600): a long time moves addresses late"
                .to_owned()
        }
        _ => "give seconds (1 to 3600), or milliseconds (200ms or more)".to_owned(),
    })
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Reachability of nodes")]
pub struct HealthArgs {
    /// Seconds (1 to 3600), or milliseconds (`300ms`, not below 200), without an answer after which an egress node is
    /// unreachable and its egress IPs move, the same for agents and controllers
    #[arg(long, env = "EGRESS_AGENT_EGRESSIP_REACHABILITY_TOTAL_TIMEOUT", value_name = "SECONDS", default_value = "1",
          value_parser = total_timeout)]
    egressip_reachability_total_timeout: Duration,
    /// TCP port of the gRPC health server on the nodes' management addresses, the same on all nodes (0 to 65535); 0: none. The
    /// controller then probes TCP port 9 of a node and does not check its uplink, and agents of egress nodes renew their
    /// leases by reading the API server, within the total timeout
    #[arg(long, env = "OVN_EGRESSIP_HEALTHCHECK_PORT", value_name = "PORT", default_value_t = 0)]
    egressip_node_healthcheck_port: u16,
}

impl HealthArgs {
    pub fn port(&self) -> u16 {
        self.egressip_node_healthcheck_port
    }

    pub fn total_timeout(&self) -> Duration {
        self.egressip_reachability_total_timeout
    }
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Reachability of nodes")]
pub struct ReachabilityArgs {
    #[command(flatten)]
    health: HealthArgs,
    /// Seconds that a reachable egress node keeps its egress IPs while its agent does not answer (0 to 86400): longer than an
    /// update or a restart of the agent takes
    #[arg(long, env = "EGRESS_AGENT_EGRESSIP_REACHABILITY_GRACE", value_name = "SECONDS", default_value_t = 30,
          value_parser = clap::value_parser!(u32).range(..=86400))]
    egressip_reachability_grace: u32,
}

impl ReachabilityArgs {
    /// Of the agents' health server.
    pub fn port(&self) -> u16 {
        self.health.port()
    }

    /// In plaintext without TLS.
    pub fn manner(&self, tls: Option<Tls>) -> ProbeSettings {
        let total = self.health.total_timeout();
        let interval = (total / 4).clamp(*INTERVALS.start(), *INTERVALS.end());
        let grace = Duration::from_secs(self.egressip_reachability_grace.into());
        let rules = ProbeTiming { total, interval, grace };
        ProbeSettings {
            rules,
            port: self.health.port(),
            dial: tls.map_or(Dial::Plaintext, Dial::Tls),
            key: SharedKey::default(),
            meters: Meters::default(),
            events: None,
            outages: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::parse_flags;

    fn manner(arguments: &[&str]) -> ProbeSettings {
        parse_flags::<ReachabilityArgs>(arguments.iter().copied()).expect("flags").manner(None)
    }

    #[test]
    fn the_interval_follows_the_timeout_and_zero_is_refused() {
        let interval =
            |seconds: &str| manner(&["--egressip-reachability-total-timeout", seconds]).rules.interval.as_millis();
        assert_eq!(["200ms", "300ms", "1", "2", "4", "60"].map(interval), [50, 75, 250, 500, 1000, 1000]);
        assert!(total_timeout("0").is_err_and(|why| why.contains("cannot be turned off")));
        for refused in ["0ms", "199ms", "0.5", "3601", "1s", "-1", "", "ms"] {
            assert!(total_timeout(refused).is_err(), "{refused}");
        }
        let rules = manner(&[]).rules;
        assert_eq!((rules.total, rules.grace), (Duration::from_secs(1), Duration::from_secs(30)));
    }
}
