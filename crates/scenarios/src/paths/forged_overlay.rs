//! A pod makes overlay packets by hand: VXLAN with the egress ID of an object that does not select it, and the address of a
//! selected pod inside. Nothing leaves the cluster with an egress IP, on each path to a tunnel port:
//!
//! - straight to a node's address: `from_pod` sees the port and the node;
//! - to a service address that the host translates: the uplink's `to_netdev` sees a forwarded packet to that port;
//! - by the pod network to a node's mp0, or by a service to a node's address on a second network: `from_overlay` finds an outer
//!   source that is not a node's tunnel endpoint.
//!
//! The same bytes sent by a node itself do leave with the egress IP (nodes are trusted): that proves them well made.

use std::net::{Ipv6Addr, UdpSocket};

use crate::prelude::*;
use egress_common::abi::Verdict;

use super::findings::Findings;
use super::maps::{self, VerdictCounts};
use egress_lab::capture::Seen;
use egress_lab::test_cluster::placement::{FIRST_V4, FIRST_V6, OBJECT, PATIENCE};
use egress_lab::topology::addresses::Dual;
use egress_lab::traffic::packet::{self, TUNNEL_PORT};
use egress_lab::{Cni, LabService, SecondNic};

pub(super) fn tests() -> Vec<LabTest> {
    let timeout = Duration::from_secs(120);
    vec![LabTest::new("paths_forged_overlay_packets_leave_nowhere", timeout, forged)]
}

/// How many packets each question sends.
pub(super) const COUNT: u64 = 10;
/// The port outside that only forged packets are for.
pub(super) const MARKER: u16 = 4242;
/// The object that owns the IPv6 address and selects no pod.
const SIXTH: &str = "paths-sixth";
/// Ports of the service whose backends are tunnel ports: one for each backend.
const FRONT_PORTS: std::ops::Range<u16> = 7001..7006;

/// Where the service proxy of all nodes leads, besides the gateway.
fn fronts() -> [IpAddr; 2] {
    [IpAddr::V4(Ipv4Addr::new(10, 96, 0, 99)), IpAddr::V6(Ipv6Addr::new(0xfd00, 0x10, 0x96, 0, 0, 0, 0, 0x99))]
}

/// One path to a tunnel port.
struct ForgedPath {
    what: String,
    to: SocketAddr,
    /// The sender's node must have counted it as a forged packet to a tunnel port; else some node as forged.
    as_tunnel: bool,
}

fn forged(context: &LabContext) -> Result<()> {
    let builder = LabBuilder::default().host_config(|index| HostConfig {
        stateful_forward: index == 2,
        second: Some(SecondNic::default()),
        ..HostConfig::default()
    });
    let cluster = TestCluster::for_placement_on(context, builder, &[], |_| Ok(()))?;
    cluster.assignable(2, true)?;
    cluster.list(SIXTH, "empty", &[FIRST_V6])?;
    cluster.await_assignment(SIXTH, FIRST_V6, 2)?;
    cluster.place(&[(FIRST_V4, 2)])?;
    second_network(&cluster)?;
    // Node 3 is one whose CNI does not masquerade on the uplink.
    cluster.node(3)?.host.exec("nft", &["delete", "table", "inet", "cni"])?;
    let mut findings = Findings::default();
    let capture = Capture::start(&cluster.lab)?;
    for sender in [1, 3] {
        let node = cluster.node(sender)?;
        let attacks = attacks(node, cluster.node(2)?);
        cluster.lab.add_services(node, &services(&attacks))?;
        for attack in &attacks {
            launch(&cluster, sender, attack, &mut findings)?;
        }
    }
    let leaked = capture.seen()?.packets(|key| key.to_port == MARKER);
    findings.equal("forged packets outside", &0, &leaked);
    control(&cluster, &capture, &mut findings)?;
    findings.conclude()
}

/// Makes the second network known, as a CNI does.
fn second_network(cluster: &TestCluster) -> Result<()> {
    for node in cluster.lab.nodes() {
        let [first, second] = [node.number.address(), node.number.second_address()];
        let all = [format!("{}/16", first.v4), format!("{}/64", first.v6)];
        let all: Vec<String> =
            all.into_iter().chain([format!("{}/24", second.v4), format!("{}/64", second.v6)]).collect();
        let annotations = json!({"k8s.ovn.org/host-cidrs": json!(all).to_string()});
        cluster
            .api
            .merge(&format!("/api/v1/nodes/{}", node.name()), &json!({"metadata": {"annotations": annotations}}))?;
    }
    for node in cluster.lab.nodes() {
        time_until("the second network is known", PATIENCE, || {
            Ok(maps::dump(node, "nodes")?.len() >= 4 * cluster.lab.nodes().len())
        })?;
    }
    Ok(())
}

/// What pods of `node` try. The service's ports lead to the same targets that are tried directly.
fn attacks(node: &LabNode, gateway: &LabNode) -> Vec<ForgedPath> {
    let mut attacks = Vec::new();
    let (own, other) = (node.number, gateway.number);
    // How both paths are counted: straight, and by a service.
    let targets: [(&str, Dual, bool, bool); 5] = [
        ("the gateway", other.address(), true, true),
        ("the gateway's mp0", other.management(Cni::Routed), false, false),
        ("the gateway's second network", other.second_address(), true, false),
        ("its own node", own.address(), true, false),
        ("its own node's mp0", own.management(Cni::Routed), true, false),
    ];
    let [front_v4, front_v6] = fronts();
    for ((name, address, direct, by_service), port) in targets.into_iter().zip(FRONT_PORTS) {
        for (to, front) in address.both().into_iter().zip([front_v4, front_v6]) {
            let family = if to.is_ipv4() { "IPv4" } else { "IPv6" };
            let what = format!("{family} to {name}");
            attacks.push(ForgedPath { what, to: SocketAddr::new(to, TUNNEL_PORT), as_tunnel: direct });
            let what = format!("{family} to a service that leads to {name}");
            attacks.push(ForgedPath { what, to: SocketAddr::new(front, port), as_tunnel: by_service });
        }
    }
    attacks
}

/// Attacks come in pairs: the target, then the service that leads to it.
fn services(attacks: &[ForgedPath]) -> Vec<LabService> {
    let pairs = attacks.chunks(2).map(|pair| (pair[1].to, pair[0].to));
    pairs.map(|(front, backend)| LabService { front, protocol: "udp", backend }).collect()
}

/// Sends one attack from the selected and from the other pod of a node, with both objects' egress IDs.
fn launch(cluster: &TestCluster, sender: usize, attack: &ForgedPath, findings: &mut Findings) -> Result<()> {
    let (node, gateway) = (cluster.node(sender)?, cluster.node(2)?);
    let before = [VerdictCounts::of(node)?, VerdictCounts::of(gateway)?];
    let mut sent = 0;
    for pod in [cluster.chosen(sender)?, cluster.plain(sender)?] {
        // A pod that is selected lends its address to both.
        let inner = cluster.chosen(sender)?.addresses;
        for (object, to) in [OBJECT, SIXTH].into_iter().zip(plan::SERVER.both()) {
            let source = SocketAddr::new(inner.towards(to), 5555);
            let payload = packet::overlay(cluster.egress_id(object)?, source, SocketAddr::new(to, MARKER))?;
            sent += send(&pod.netns, attack.to, &payload)?;
        }
    }
    let mut grown: [BTreeMap<&str, u64>; 2] = Default::default();
    let arrived = time_until("the packets are counted", Duration::from_millis(1500), || {
        grown = [VerdictCounts::of(node)?.since(&before[0]), VerdictCounts::of(gateway)?.since(&before[1])];
        let refused = |counts: &BTreeMap<&str, u64>| -> u64 {
            ["forged_tunnel", "forged_outer", "forged_inner"].iter().filter_map(|one| counts.get(one)).sum()
        };
        let tunnel = grown[0].get(Verdict::ForgedTunnel.label()) == Some(&sent);
        Ok(if attack.as_tunnel { tunnel } else { refused(&grown[0]) + refused(&grown[1]) == sent })
    });
    let what = format!(
        "{sent} packets of node{sender}, {}: counted there {:?}, at the gateway {:?}",
        attack.what, grown[0], grown[1]
    );
    findings.note(arrived.is_ok(), &what);
    Ok(())
}

pub(super) fn send(from: &Netns, to: SocketAddr, payload: &[u8]) -> Result<u64> {
    from.run(|| {
        let any: IpAddr = if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let socket = UdpSocket::bind((any, 0))?;
        for _ in 0..COUNT {
            socket.send_to(payload, to)?;
        }
        Ok(COUNT)
    })
}

/// What a node sends is believed: the same bytes, from node 1 to the gateway, go out with the egress IPs.
fn control(cluster: &TestCluster, capture: &Capture, findings: &mut Findings) -> Result<()> {
    let begun = capture.seen()?;
    let inner = cluster.chosen(1)?.addresses;
    for (object, to) in [OBJECT, SIXTH].into_iter().zip(plan::SERVER.both()) {
        let source = SocketAddr::new(inner.towards(to), 5555);
        let payload = packet::overlay(cluster.egress_id(object)?, source, SocketAddr::new(to, MARKER))?;
        let gateway = cluster.node(2)?.number.address().towards(FIRST_V4);
        send(&cluster.node(1)?.host, SocketAddr::new(gateway, TUNNEL_PORT), &payload)?;
        let count = |seen: &Seen| {
            seen.packets(|key| {
                key.to_port == MARKER && key.destination == to && seen.class(key.source) == AddressKind::Egress
            })
        };
        let outside = || -> Result<u64> { Ok(count(&capture.seen()?) - count(&begun)) };
        let left = time_until("the node's own packets are outside", PATIENCE / 10, || Ok(outside()? == COUNT));
        let what = format!("control: {COUNT} packets of a node itself, {} outside with an egress IP", outside()?);
        findings.note(left.is_ok(), &what);
    }
    Ok(())
}
