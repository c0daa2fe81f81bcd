//! Nodes whose primary network is IPv6 only: the overlay's outer packets are IPv6.
//!
//! Questions and answers by both roads, a forged outer source, and packets that are too large once the uplinks are narrow:
//! the pod or the server is told. Such nodes host IPv6 addresses only. Not asked here, since it fails: uplinks of less than
//! 1350, where the 1280 that IPv6 asks of every link and the overlay's 70 do not fit; what is that large is lost there.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::Result;
use egress_common::abi::Verdict;
use serde_json::json;

use super::findings::Findings;
use super::forgery::{COUNT, MARKER, send};
use super::ground::{FIRST_V6, Ground, OBJECT, PATIENCE, until};
use super::kernel::Counts;
use super::overlay::{self, TUNNEL_PORT};
use super::sizes;
use crate::lab::addresses as plan;
use crate::lab::capture::{Capture, Class};
use crate::lab::cluster::Cluster;
use crate::lab::{Lab, LabBuilder};
use crate::testing::lab::{LabContext, LabTest};

/// What uplinks take in the second half: less than pods' packets and the overlay, more than IPv6 asks of it.
const NARROW: u32 = 1380;

pub(super) fn tests() -> Vec<LabTest> {
    let timeout = Duration::from_secs(120);
    vec![LabTest { name: "roads_between_nodes_of_ipv6_only", timeout, run: by_ipv6 }]
}

fn by_ipv6(context: &LabContext) -> Result<()> {
    let ground = Ground::build_after(context, LabBuilder::new(), known_by_ipv6)?;
    ground.place(&[(FIRST_V6, 2)])?;
    let mut findings = Findings::default();
    let capture = Capture::start(&ground.lab)?;
    for node in 1..=3 {
        sizes::transfers(&ground, ground.chosen(node)?, plan::SERVER.v6.into(), "nowhere", &mut findings)?;
    }
    forged(&ground, &mut findings)?;
    sizes::narrow(&ground, NARROW)?;
    for node in 1..=3 {
        sizes::transfers(&ground, ground.chosen(node)?, plan::SERVER.v6.into(), "out", &mut findings)?;
    }
    let seen = capture.finish()?;
    findings.equal("packets outside with a pod's address", &0, &seen.to_the_world(Class::Pod));
    findings.conclude()
}

fn known_by_ipv6(lab: &Lab, cluster: &Cluster) -> Result<()> {
    lab.nodes().iter().try_for_each(|node| {
        let primary = json!({"ipv6": format!("{}/64", node.number.address().v6)}).to_string();
        let annotations = json!({"k8s.ovn.org/node-primary-ifaddr": primary});
        cluster.merge(&format!("/api/v1/nodes/{}", node.name()), &json!({"metadata": {"annotations": annotations}}))
    })
}

/// Overlay packets from a neighbour on the nodes' network that is no node.
fn forged(ground: &Ground, findings: &mut Findings) -> Result<()> {
    let gateway = ground.node(2)?;
    let before = Counts::of(gateway)?;
    let source = SocketAddr::new(ground.chosen(1)?.addresses.v6.into(), 5555);
    let inner = SocketAddr::new(plan::SERVER.v6.into(), MARKER);
    let payload = overlay::packet(ground.egress_id(OBJECT)?, source, inner)?;
    let to = SocketAddr::new(IpAddr::V6(gateway.number.address().v6), TUNNEL_PORT);
    send(ground.lab.ext(), to, &payload)?;
    let refused =
        || Ok::<_, anyhow::Error>(Counts::of(gateway)?.get(Verdict::ForgedOuter) - before.get(Verdict::ForgedOuter));
    let all = until("forged packets are counted", PATIENCE / 10, || Ok(refused()? == COUNT));
    findings.note(all.is_ok(), &format!("{COUNT} packets with a forged outer source: {} refused", refused()?));
    Ok(())
}
