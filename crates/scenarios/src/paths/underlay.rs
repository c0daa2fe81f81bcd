//! Nodes whose primary network is IPv6 only: the overlay's outer packets are IPv6.
//!
//! Questions and answers by both paths, a forged outer source, and packets that are too large once the uplinks are narrow:
//! the pod or the server gets an ICMP error. Such nodes host IPv6 addresses only. On uplinks of less than
//! 1350 the 1280 that IPv6 asks of every link and the overlay's 70 do not fit, and no router fragments an IPv6 packet:
//! what is that large is lost there, by name; what is smaller, arrives.

use crate::prelude::*;
use egress_common::abi::Verdict;

use super::findings::Findings;
use super::forged_overlay::{COUNT, MARKER, send};
use super::maps::VerdictCounts;
use super::oversize;
use egress_lab::test_cluster::placement::{FIRST_V6, OBJECT, PATIENCE};
use egress_lab::traffic::packet::{self, TUNNEL_PORT};

/// What uplinks take in the second half: less than pods' packets and the overlay, more than IPv6 asks of it.
const NARROW: u32 = 1380;
/// What they take at last.
const TOO_NARROW: u32 = 1320;

pub(super) fn tests() -> Vec<LabTest> {
    let timeout = Duration::from_secs(120);
    vec![LabTest::new("paths_between_nodes_of_ipv6_only", timeout, by_ipv6)]
}

fn by_ipv6(context: &LabContext) -> Result<()> {
    let cluster = TestCluster::for_placement_on(context, LabBuilder::default(), &[], known_by_ipv6)?;
    cluster.place(&[(FIRST_V6, 2)])?;
    let mut findings = Findings::default();
    let capture = Capture::start(&cluster.lab)?;
    for node in 1..=3 {
        oversize::transfers(&cluster, cluster.chosen(node)?, plan::SERVER.v6.into(), "nowhere", &mut findings)?;
    }
    forged(&cluster, &mut findings)?;
    oversize::narrow(&cluster, NARROW)?;
    for node in 1..=3 {
        oversize::transfers(&cluster, cluster.chosen(node)?, plan::SERVER.v6.into(), "out", &mut findings)?;
    }
    oversize::narrow(&cluster, TOO_NARROW)?;
    too_narrow(&cluster, &mut findings)?;
    let seen = capture.finish()?;
    findings.equal("packets outside with a pod's address", &0, &seen.to_the_world(AddressKind::Pod));
    findings.conclude()
}

/// Pods elsewhere than the gateway send packets of 1280 bytes, and smaller ones.
fn too_narrow(cluster: &TestCluster, findings: &mut Findings) -> Result<()> {
    const HEADERS: u32 = 40 + 8;
    let (node, to) = (cluster.node(1)?, plan::SERVER.v6.into());
    for (length, arrives) in [(TOO_NARROW - 70, true), (1280, false)] {
        let before = VerdictCounts::of(node)?;
        let ping = Ping { size: length - HEADERS, whole: true, count: 3, ..Ping::default() };
        let pong = client::ping(&cluster.chosen(1)?.netns, to, ping)?;
        let lost = VerdictCounts::of(node)?.get(Verdict::OverlayTooNarrow) - before.get(Verdict::OverlayTooNarrow);
        let right = if arrives { (pong.received, lost) == (3, 0) } else { (pong.received, lost) == (0, 3) };
        let what = format!(
            "uplinks of {TOO_NARROW}, {length} bytes: {} of 3 answered, {lost} too large by name",
            pong.received
        );
        findings.note(right, &what);
    }
    Ok(())
}

pub(super) fn known_by_ipv6(cluster: &TestCluster) -> Result<()> {
    cluster.lab.nodes().iter().try_for_each(|node| {
        let primary = json!({"ipv6": format!("{}/64", node.number.address().v6)}).to_string();
        let annotations = json!({"k8s.ovn.org/node-primary-ifaddr": primary});
        cluster.api.merge(&format!("/api/v1/nodes/{}", node.name()), &json!({"metadata": {"annotations": annotations}}))
    })
}

/// Overlay packets from a neighbour on the nodes' network that is no node.
fn forged(cluster: &TestCluster, findings: &mut Findings) -> Result<()> {
    let gateway = cluster.node(2)?;
    let before = VerdictCounts::of(gateway)?;
    let source = SocketAddr::new(cluster.chosen(1)?.addresses.v6.into(), 5555);
    let inner = SocketAddr::new(plan::SERVER.v6.into(), MARKER);
    let payload = packet::overlay(cluster.egress_id(OBJECT)?, source, inner)?;
    let to = SocketAddr::new(IpAddr::V6(gateway.number.address().v6), TUNNEL_PORT);
    send(cluster.lab.ext(), to, &payload)?;
    let refused = || {
        Ok::<_, anyhow::Error>(VerdictCounts::of(gateway)?.get(Verdict::ForgedOuter) - before.get(Verdict::ForgedOuter))
    };
    let all = time_until("forged packets are counted", PATIENCE / 10, || Ok(refused()? == COUNT));
    findings.note(all.is_ok(), &format!("{COUNT} packets with a forged outer source: {} refused", refused()?));
    Ok(())
}
