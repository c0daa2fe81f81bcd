//! Attacks by a neighbour and by pods: what counts as an answer to a host outside, and which source a packet may have.
//!
//! - A host of the LAN sprays every UDP port of a selected pod; then the pod sends to that host from each of them.
//! - A host of the world begins and resets as many connections at a NodePort of a selected pod as `inbound` has entries.
//! - A pod that nothing selects calls a selected one in another node's name; then that one calls the node.
//! - A pod that nothing selects sends with an egress IP of this node, and of another one, by a raw socket: whole packets,
//!   and fragments that the host puts together and cuts again.
//! - It sends overlay packets to its own node's tunnel port by a Service, with another node's tunnel endpoint as the source.

use std::net::{Ipv6Addr, TcpStream, UdpSocket};
use std::ops::Range;

use crate::prelude::*;
use egress_common::abi::Verdict;

use super::findings::Findings;
use super::maps::{self, VerdictCounts};
use super::stateful;
use egress_lab::LabService;
use egress_lab::test_cluster::placement::{FIRST_V4, FIRST_V6, OBJECT, PATIENCE};
use egress_lab::traffic::fragments;
use egress_lab::traffic::packet;

pub(super) fn tests() -> Vec<LabTest> {
    let timeout = Duration::from_secs(180);
    vec![
        LabTest::new("paths_sprayed_ports_change_no_source", timeout, sprayed)
            .not_on_ovn("Open vSwitch tracks each datagram as a connection, and drops what it falls behind with"),
        LabTest::new("paths_flooded_node_port_costs_its_clients_seconds", timeout, flooded)
            .alone()
            .not_on_ovn("the host never sees the pod of a NodePort, so nothing is remembered of its clients"),
        LabTest::new("paths_spoofed_sources_leave_nowhere", timeout, spoofed)
            .not_on_ovn("OVN drops a pod's forged sources before the programs can count them"),
    ]
}

/// Datagrams are taken for connections from outside only this long after the programs first ran.
const SETTLE: Duration = Duration::from_secs(31);
/// The port outside that the attacks are from, and the pod's own packets for.
const MARKER: u16 = 4243;
const COUNT: u64 = 10;
const TICK: Duration = Duration::from_millis(10);
/// Ports of an egress IP, which the pod shares among its own 65,535.
const PORTS: u64 = 64_512;

fn sprayed(context: &LabContext) -> Result<()> {
    let cluster = TestCluster::for_placement(context, |_| HostConfig::default())?;
    let started = Instant::now();
    cluster.place(&[(FIRST_V4, 1), (FIRST_V6, 2)])?;
    let (node, pod) = (cluster.node(1)?.number, cluster.chosen(1)?);
    for (subnet, via) in [
        (node.pod_subnet_v4().to_string(), node.address().both()[0]),
        (node.pod_subnet_v6().to_string(), node.address().both()[1]),
    ] {
        cluster.lab.ext().exec("ip", &["route", "add", &subnet, "via", &via.to_string()])?;
    }
    thread::sleep(SETTLE.saturating_sub(started.elapsed()));
    let mut findings = Findings::default();
    let capture = Capture::start(&cluster.lab)?;
    for to in plan::SERVER.both() {
        // Open while the pod sends, so that no ICMP error says that the port is closed.
        let neighbour = cluster.lab.outside().run(|| Ok(UdpSocket::bind((to, MARKER))?))?;
        let victim = pod.addresses.towards(to);
        let before = VerdictCounts::of(cluster.node(1)?)?;
        for port in 1..=u16::MAX {
            neighbour.send_to(b"?", (victim, port))?;
        }
        let arrived =
            || Ok(VerdictCounts::of(cluster.node(1)?)?.since(&before).get(Verdict::NotOurs.label()) > Some(&60_000));
        findings.right(&format!("{victim} has been sprayed, in"), &time_until("the spray arrives", PATIENCE, arrived));
        let inbound = maps::dump(cluster.node(1)?, "inbound")?.len();
        findings.equal("connections from outside that are remembered", &0, &inbound);
        let sent = from_every_port(pod, SocketAddr::new(to, MARKER))?;
        let outside = |wanted: bool| -> Result<u64> {
            let seen = capture.seen()?;
            Ok(seen.packets(|key| {
                let is_egress = seen.class(key.source) == AddressKind::Egress;
                key.to_port == MARKER && key.destination == to && is_egress == wanted
            }))
        };
        let left = time_until("the pod's own packets leave", PATIENCE, || Ok(outside(true)? >= PORTS));
        findings.note(left.is_ok(), &format!("{} of {sent} left with the egress IP", outside(true)?));
        findings.equal(&format!("of {sent} packets to {to}, those with another source"), &0, &outside(false)?);
    }
    as_another_node(&cluster, &capture, &mut findings)?;
    findings.conclude()
}

/// A pod that nothing selects sends to the selected one in another node's name, past the pod network's router.
fn as_another_node(cluster: &TestCluster, capture: &Capture, findings: &mut Findings) -> Result<()> {
    let (node, pod, sender) = (cluster.node(1)?, cluster.chosen(1)?, cluster.plain(1)?);
    for to in cluster.node(2)?.number.address().both() {
        let (victim, via) = (pod.addresses.towards(to), node.management().towards(to));
        sender.netns.exec("ip", &["route", "add", &victim.to_string(), "via", &via.to_string()])?;
        let (from, other) = (SocketAddr::new(victim, 5556), SocketAddr::new(to, MARKER));
        let udp = packet::udp(other, from, b"not what it seems")?;
        let spoofed = packet::ip(to, victim, packet::UDP, &udp)?;
        let before = VerdictCounts::of(node)?;
        send_raw(&sender.netns, victim, &[&spoofed[2..]])?;
        let seen = || Ok(VerdictCounts::of(node)?.since(&before).get(Verdict::NotPod.label()) >= Some(&COUNT));
        findings.right(&format!("{victim} is called as {to}, in"), &time_until("the datagrams arrive", PATIENCE, seen));
        pod.netns.run(|| Ok(UdpSocket::bind(from)?.send_to(b"!", other)?))?;
        let left = |class: AddressKind| -> Result<u64> {
            let seen = capture.seen()?;
            Ok(seen.packets(|key| key.to_port == MARKER && key.destination == to && seen.class(key.source) == class))
        };
        let arrived = time_until("the pod's own datagram leaves", PATIENCE / 10, || Ok(left(AddressKind::Node)? == 1));
        findings.note(arrived.is_ok(), &format!("{victim} calls {to} with the node's address"));
        findings.equal(&format!("datagrams to {to} with the pod's own address"), &0, &left(AddressKind::Pod)?);
    }
    Ok(())
}

/// A datagram from each unused port; how many.
fn from_every_port(pod: &LabPod, to: SocketAddr) -> Result<u64> {
    pod.netns.run(|| {
        let any: IpAddr = if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let mut sent = 0;
        for port in 1..=u16::MAX {
            let Ok(socket) = UdpSocket::bind((any, port)) else { continue };
            socket.send_to(b"!", to)?;
            sent += 1;
            // No faster than the path takes them.
            if sent % 256 == 0 {
                thread::sleep(Duration::from_millis(2));
            }
        }
        Ok(sent)
    })
}

/// Ports of the flood: none that a client's stack chooses.
const FLOOD: Range<u16> = 1024..32_768;
/// Unanswered and ended entries are idle after ten seconds, and a sweep takes five while there are many.
const OVER: Duration = Duration::from_secs(20);

fn flooded(context: &LabContext) -> Result<()> {
    let cluster = TestCluster::for_placement(context, |_| HostConfig::default())?;
    cluster.place(&[(FIRST_V4, 1), (FIRST_V6, 2)])?;
    let mut findings = Findings::default();
    stateful::expose(&cluster)?;
    let (node, pod) = (cluster.node(1)?, cluster.chosen(1)?);
    let _server = Server::in_pod(&cluster.lab, pod)?;
    let mut before = Vec::new();
    for front in node.number.address().both() {
        let backend = SocketAddr::new(pod.addresses.towards(front), ECHO_PORT);
        let front = SocketAddr::new(front, stateful::NODE_PORT);
        cluster.lab.add_services(node, &[LabService { front, protocol: "tcp", backend }])?;
        before.push(TrafficFlow::tcp(cluster.lab.outside(), front, TICK, client::PATIENCE)?);
    }
    thread::sleep(20 * TICK);
    let capture = Capture::watching(&cluster.lab, plan::SERVER.both().into_iter().collect())?;
    let counts = VerdictCounts::of(node)?;
    let begun = Instant::now();
    for (front, from) in node.number.address().both().into_iter().zip(plan::SERVER.both()) {
        cluster.lab.outside().run(|| flood(from, SocketAddr::new(front, stateful::NODE_PORT)))?;
    }
    println!("       {} connections begun and reset in {} ms", 2 * (FLOOD.len() - 1), begun.elapsed().as_millis());
    let grown = VerdictCounts::of(node)?.since(&counts);
    let remembered = grown.get(Verdict::InboundRemembered.label()).copied().unwrap_or(0);
    findings.note(remembered > 16_384, &format!("{remembered} of them were remembered"));
    for front in node.number.address().both() {
        let front = SocketAddr::new(front, stateful::NODE_PORT);
        let served =
            || cluster.lab.outside().run(|| Ok(TcpStream::connect_timeout(&front, Duration::from_secs(1)).is_ok()));
        findings.right(&format!("{front} takes connections again, after"), &time_until("one is taken", OVER, served));
    }
    let seen = capture.finish()?;
    seen.check()?;
    // The test cluster's own requests go to this port, and the last of them may end late.
    let shown = seen.captured.iter().filter(|seen_at| {
        seen.class(seen_at.source) == AddressKind::Egress
            && seen_at.protocol == packet::TCP
            && seen_at.ports.1 != HTTP_PORT
    });
    findings.equal("answers with the egress IP", &Vec::new(), &shown.take(8).collect());
    for flow in before {
        let report = flow.finish()?;
        findings.note(report.lost() == 0 && report.broken.is_none(), &format!("a flow of before: {report:?}"));
    }
    findings.conclude()
}

/// A SYN and the reset of its connection from every port.
fn flood(from: IpAddr, front: SocketAddr) -> Result<()> {
    const SYN: u8 = 2;
    const RST: u8 = 4;
    let socket = fragments::raw(front.ip())?;
    for port in FLOOD.filter(|port| *port != HTTP_PORT) {
        for (number, flags) in [(1_u32, SYN), (2, RST)] {
            let ports = [port.to_be_bytes(), front.port().to_be_bytes()].concat();
            let rest = [0, 0, 0, 0, 0x50, flags, 0x20, 0, 0, 0, 0, 0];
            let segment = [ports.as_slice(), &number.to_be_bytes(), &rest].concat();
            let segment = packet::summed(from, front.ip(), packet::TCP, segment, 16);
            let bytes = packet::ip(from, front.ip(), packet::TCP, &segment)?;
            socket.send_to(&bytes[2..], SocketAddr::new(front.ip(), 0))?;
        }
        // No faster than the path takes them.
        if port % 128 == 0 {
            thread::sleep(Duration::from_millis(2));
        }
    }
    Ok(())
}

fn spoofed(context: &LabContext) -> Result<()> {
    let cluster = TestCluster::for_placement(context, |_| HostConfig::default())?;
    cluster.place(&[(FIRST_V4, 1), (FIRST_V6, 2)])?;
    let mut findings = Findings::default();
    let capture = Capture::start(&cluster.lab)?;
    for sender in [1, 2] {
        for (source, to) in [FIRST_V4, FIRST_V6].into_iter().zip(plan::SERVER.both()) {
            let to = SocketAddr::new(to, MARKER);
            let udp = packet::udp(SocketAddr::new(source, 5555), to, b"not what it seems")?;
            let spoofed = packet::ip(source, to.ip(), packet::UDP, &udp)?;
            refused(&cluster, sender, &[&spoofed[2..]], to.ip(), Verdict::SpoofedEgressIp, &mut findings)?;
        }
    }
    for sender in [1, 2] {
        refragmented(&cluster, sender, &mut findings)?;
    }
    own_tunnel_port(&cluster, &mut findings)?;
    findings.equal("spoofed packets outside", &0, &capture.seen()?.packets(|key| key.to_port == MARKER));
    findings.conclude()
}

/// All packets from a pod that nothing selects end there, by this name.
fn refused(
    cluster: &TestCluster,
    sender: usize,
    packets: &[&[u8]],
    to: IpAddr,
    verdict: Verdict,
    findings: &mut Findings,
) -> Result<()> {
    let node = cluster.node(sender)?;
    let before = VerdictCounts::of(node)?;
    send_raw(&cluster.plain(sender)?.netns, to, packets)?;
    let counted = || VerdictCounts::of(node).map(|now| now.since(&before).get(verdict.label()).copied().unwrap_or(0));
    let all = time_until("the packets are counted", PATIENCE / 10, || Ok(counted()? == COUNT));
    let what = format!("{COUNT} packets of node{sender} to {to}: {} counted as {}", counted()?, verdict.label());
    findings.note(all.is_ok(), &what);
    Ok(())
}

fn send_raw(from: &Netns, to: IpAddr, packets: &[&[u8]]) -> Result<()> {
    from.run(|| {
        let socket = fragments::raw(to)?;
        for _ in 0..COUNT {
            for bytes in packets {
                socket.send_to(bytes, SocketAddr::new(to, 0))?;
            }
        }
        Ok(())
    })
}

/// By a service that leads to the own node, whose uplink sees nothing of it.
fn own_tunnel_port(cluster: &TestCluster, findings: &mut Findings) -> Result<()> {
    let (node, other) = (cluster.node(1)?, cluster.node(2)?);
    let front = SocketAddr::new(Ipv4Addr::new(10, 96, 0, 98).into(), 7001);
    let endpoint = |node: &egress_lab::LabNode| node.number.address().both()[0];
    let backend = SocketAddr::new(endpoint(node), packet::TUNNEL_PORT);
    cluster.lab.add_services(node, &[LabService { front, protocol: "udp", backend }])?;
    let to = plan::SERVER.both()[0];
    let inner = SocketAddr::new(cluster.chosen(2)?.addresses.towards(to), 5555);
    let payload = packet::overlay(cluster.egress_id(OBJECT)?, inner, SocketAddr::new(to, MARKER))?;
    let source = SocketAddr::new(endpoint(other), 50_000);
    let udp = packet::udp(source, front, &payload)?;
    let forged = packet::ip(source.ip(), front.ip(), packet::UDP, &udp)?;
    refused(cluster, 1, &[&forged[2..]], front.ip(), Verdict::ForgedOuter, findings)
}

/// Fragments of which the first has a header that the second lacks. Connection tracking puts them together, and the kernel
/// cuts the whole again, for the second does not fit as it came. The new pieces do not say by which device they came in.
fn refragmented(cluster: &TestCluster, sender: usize, findings: &mut Findings) -> Result<()> {
    const HOP_BY_HOP: u8 = 0;
    const FRAGMENT: u8 = 44;
    /// An option that is skipped by who does not know it (RFC 4727), and its length.
    const EXPERIMENT: [u8; 2] = [0x1e, 68];
    const FIRST: usize = 800;
    let to = SocketAddr::new(plan::SERVER.both()[1], MARKER);
    let udp = packet::udp(SocketAddr::new(FIRST_V6, 5555), to, &[0; 1792])?;
    let fragment = |bits: usize| -> Result<Vec<u8>> {
        Ok([&[packet::UDP, 0], u16::try_from(bits)?.to_be_bytes().as_slice(), &[0, 0, 0x6e, 0x66]].concat())
    };
    let options = [&[FRAGMENT, 8], EXPERIMENT.as_slice(), &[0; 68]].concat();
    let first = [options.as_slice(), &fragment(1)?, &udp[..FIRST]].concat();
    let second = [fragment(FIRST)?.as_slice(), &udp[FIRST..]].concat();
    let first = packet::ip(FIRST_V6, to.ip(), HOP_BY_HOP, &first)?;
    let second = packet::ip(FIRST_V6, to.ip(), FRAGMENT, &second)?;
    refused(cluster, sender, &[&first[2..], &second[2..]], to.ip(), Verdict::SpoofedEgressIp, findings)
}
