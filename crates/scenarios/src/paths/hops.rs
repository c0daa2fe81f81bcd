//! TTL and hop limit: our paths count as the node's router does, once, whether the gateway is here or elsewhere.
//!
//! ```text
//! pod (ttl n) -> pod network's router (n-1) -> mp0 -> node (n-2) -> ext (n-3) -> server
//! ```
//!
//! So of a pod's packet with TTL 1, 2 and 3 the router, the node and `ext` say Time Exceeded, and 4 arrives. What `ext`
//! says is an ICMP error that must return to the pod. An unselected pod sees the same: that is the yardstick.

use super::findings::Findings;
use crate::prelude::*;
use egress_lab::test_cluster::placement::{FIRST_V4, FIRST_V6};

pub(super) fn tests() -> Vec<LabTest> {
    vec![LabTest::new("paths_count_hops_as_a_router_does", Duration::from_secs(90), hops)]
}

fn hops(context: &LabContext) -> Result<()> {
    let cluster = TestCluster::for_placement(context, HostConfig::mixed)?;
    cluster.place(&[(FIRST_V4, 1), (FIRST_V6, 2)])?;
    let capture = Capture::start(&cluster.lab)?;
    let mut findings = Findings::default();
    for node in 1..=3 {
        for to in plan::SERVER.both() {
            let plain = ladder(cluster.plain(node)?, to)?;
            let chosen = ladder(cluster.chosen(node)?, to)?;
            let gateway = if to.is_ipv4() { 1 } else { 2 };
            let path = if node == gateway { "local" } else { "remote" };
            findings.equal(&format!("chosen{node} -> {to}, {path} gateway"), &plain, &chosen);
        }
    }
    findings.conclude_with(capture)
}

/// Who answers a ping of each TTL, and the TTL of the echo reply in the end.
#[derive(Debug, PartialEq, Eq)]
struct Ladder {
    exceeded_at: Vec<Option<IpAddr>>,
    arrives_with: Option<u8>,
    reply_ttl: Option<u8>,
}

fn ladder(pod: &LabPod, to: IpAddr) -> Result<Ladder> {
    let mut exceeded_at = Vec::new();
    for ttl in 1..=8 {
        let pong = client::ping(&pod.netns, to, Ping { ttl: Some(ttl), ..Ping::default() })?;
        if pong.received > 0 {
            let reply_ttl = pong.text.split("ttl=").nth(1).and_then(|rest| rest.split(' ').next()?.parse().ok());
            return Ok(Ladder { exceeded_at, arrives_with: Some(ttl), reply_ttl });
        }
        exceeded_at.push(exceeded(&pong.text).with_context(|| format!("cannot read what ping said: {}", pong.text))?);
    }
    Ok(Ladder { exceeded_at, arrives_with: None, reply_ttl: None })
}

/// The sender in `From 10.244.1.1 icmp_seq=1 Time to live exceeded` or `... Time exceeded: Hop limit`; `None` inside when
/// no host answered.
fn exceeded(text: &str) -> Option<Option<IpAddr>> {
    let Some(line) = text.lines().find(|line| line.starts_with("From ")) else { return Some(None) };
    if !line.contains("xceeded") {
        return None;
    }
    line.split(' ').nth(1)?.trim_end_matches(':').parse().ok().map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_router_is_read_from_pings_words() {
        let v4 = "PING 198.51.100.10\nFrom 10.244.1.1 icmp_seq=1 Time to live exceeded\n";
        assert_eq!(exceeded(v4), Some("10.244.1.1".parse().ok()));
        let v6 = "From fd00:10:244:1::1 icmp_seq=1 Time exceeded: Hop limit\n";
        assert_eq!(exceeded(v6), Some("fd00:10:244:1::1".parse().ok()));
        assert_eq!(exceeded("1 packets transmitted, 0 received"), Some(None));
        assert_eq!(exceeded("From 10.0.0.1 icmp_seq=1 Destination Host Unreachable"), None);
    }
}
