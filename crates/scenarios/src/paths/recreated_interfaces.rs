//! mp0 and `breth0` are deleted and created again under traffic, as a restart of Open vSwitch does. The programs are attached
//! again at once, traffic continues, and a capture counts what left in between: not one packet of a selected pod with the address
//! of a pod or of a node. Only selected pods send in this lab, on every node, to both families.

use std::io::Write;
use std::net::TcpStream;
use std::time::SystemTime;

use super::findings::Findings;
use super::maps::VerdictCounts;
use crate::prelude::*;
use egress_lab::capture::dissect;
use egress_lab::capture::{CaptureKey, CapturedPacket};
use egress_lab::test_cluster::placement::{FIRST_V4, FIRST_V6, PATIENCE, seen_as};

pub(super) fn tests() -> Vec<LabTest> {
    let timeout = Duration::from_secs(150);
    vec![LabTest::new("paths_recreated_interfaces_leak_nothing", timeout, remade)]
}

const TICK: Duration = Duration::from_millis(2);
const ROUNDS: usize = 3;
/// A connection may be silent for twice as long as its address is not served, since TCP doubles the time to the next try. A node
/// that has lost its uplink three times serves again after some ten seconds.
const SILENCE: Duration = Duration::from_secs(40);

fn remade(context: &LabContext) -> Result<()> {
    let cluster = TestCluster::for_placement(context, HostConfig::mixed)?;
    let _earlier = earlier_connections(&cluster)?;
    cluster.place(&[(FIRST_V4, 1), (FIRST_V6, 2)])?;
    end_earlier_connections(&cluster)?;
    let mut findings = Findings::default();
    let capture = Capture::watching(&cluster.lab, BTreeSet::from(plan::SERVER.both()))?;
    let begun: Vec<VerdictCounts> = cluster.lab.nodes().iter().map(VerdictCounts::of).collect::<Result<_>>()?;
    let mut flows = Vec::new();
    for node in 1..=3 {
        let pod = cluster.chosen(node)?;
        for to in plan::SERVER.both() {
            let echo = SocketAddr::new(to, ECHO_PORT);
            flows.push((format!("{} UDP {to}", pod.name), TrafficFlow::udp(&pod.netns, echo, TICK)?));
            flows.push((format!("{} TCP {to}", pod.name), TrafficFlow::tcp(&pod.netns, echo, TICK, SILENCE)?));
        }
    }
    let mut steps = Steps::begin();
    for round in 1..=ROUNDS {
        for node in cluster.lab.nodes() {
            steps.take(format!("mp0 of {} recreated ({round})", node.name()));
            cluster.lab.remake_management(node)?;
            back(&cluster, node, "mp0", round, &mut findings)?;
            steps.take(format!("breth0 of {} recreated ({round})", node.name()));
            cluster.lab.remake_uplink(node)?;
            back(&cluster, node, "breth0", round, &mut findings)?;
        }
    }
    steps.take("traffic ended".to_owned());
    for (name, flow) in flows {
        let report = flow.finish()?;
        let (sent, gap) = (report.sent, report.longest_gap);
        let what = format!("{name}: {} of {sent} came back, longest gap {gap:?}, {:?}", report.echoed, report.broken);
        findings.note(report.broken.is_none() && report.echoed > 0, &what);
    }
    let seen = capture.finish()?;
    println!("       packets to the world with an egress IP: {}", seen.to_the_world(AddressKind::Egress));
    for class in [AddressKind::Pod, AddressKind::Node] {
        let is_leaked = |key: &CaptureKey| seen.is_to_the_world(key, class) && !is_the_hosts_own(key);
        for packet in seen.captured.iter().filter(|packet| is_leaked(&packet.key())) {
            println!("       {}", steps.place(packet));
        }
        let leaked: BTreeMap<_, _> = seen
            .tallies
            .iter()
            .filter(|(key, _)| is_leaked(key))
            .map(|(key, tally)| (key.to_string(), tally.packets))
            .collect();
        findings.equal(&format!("packets to the world with a {class:?}'s address"), &BTreeMap::new(), &leaked);
    }
    for (node, begun) in cluster.lab.nodes().iter().zip(&begun) {
        println!("       {} counted {:?}", node.name(), VerdictCounts::of(node)?.since(begun));
    }
    let checksums = seen.check();
    findings.right(&format!("checksums of {} frames", seen.frames), &checksums);
    findings.conclude()
}

/// What was done when, for people who look for the cause of a packet.
struct Steps(Vec<(SystemTime, String)>);

impl Steps {
    fn begin() -> Self {
        Self(vec![(SystemTime::now(), "traffic began".to_owned())])
    }

    fn take(&mut self, what: String) {
        self.0.push((SystemTime::now(), what));
    }

    fn place(&self, packet: &CapturedPacket) -> String {
        let since = |begun: SystemTime| packet.at.duration_since(begun).unwrap_or_default().as_secs_f64();
        let under_way = self.0.iter().rev().find(|(begun, _)| *begun <= packet.at).or(self.0.first());
        let Some(((first, _), (begun, what))) = self.0.first().zip(under_way) else { return packet.to_string() };
        format!("{:.3} s, {:.3} s after {what}: {packet}", since(*first), since(*begun))
    }
}

/// A connection of each chosen pod to the server, in both families. The server has more to send than the pod reads, so it sends
/// again and again. Without these a run has such a connection only where the object selects a pod at the right moment.
fn earlier_connections(cluster: &TestCluster) -> Result<Vec<TcpStream>> {
    let mut connections = Vec::new();
    for node in 1..=3 {
        for to in plan::SERVER.both() {
            let connect = || {
                let mut stream = TcpStream::connect_timeout(&SocketAddr::new(to, HTTP_PORT), PATIENCE)?;
                stream.set_read_timeout(Some(PATIENCE))?;
                stream.write_all(b"GET /bytes/1000000 HTTP/1.1\r\nHost: earlier\r\n\r\n")?;
                stream.peek(&mut [0])?;
                Ok(stream)
            };
            connections.push(cluster.chosen(node)?.netns.run(connect)?);
        }
    }
    Ok(connections)
}

/// Connections that a pod opened before it was selected bear the node's address. When the node's masquerade has forgotten them
/// with the uplink, the node answers the server's packets by resets that look like a pod's. So the server must send nothing
/// more: its own sockets are closed, in every state.
fn end_earlier_connections(cluster: &TestCluster) -> Result<()> {
    let (server, port) = (cluster.lab.outside(), format!(":{HTTP_PORT}"));
    for address in nodes().flat_map(|node| node.address().both()) {
        let address = if address.is_ipv6() { format!("[{address}]") } else { address.to_string() };
        let with_it = ["state", "connected", "dst", address.as_str(), "sport", "=", port.as_str()];
        let list = || server.exec("ss", &[&["-Htn"][..], &with_it].concat());
        ensure!(!list()?.is_empty(), "no connection of the server with {address} is there to be ended");
        server.exec("ss", &[&["-tnK"][..], &with_it].concat())?;
        let left = list()?;
        ensure!(left.is_empty(), "the server still has connections with {address}: {left}");
    }
    Ok(())
}

/// A node without an uplink does not serve, and its addresses move: its stack redirects senders that still use it. And where mp0 is gone, what the node has under way with another node's address there, or from its own
/// (the leader asks all nodes), takes the default route.
fn is_the_hosts_own(key: &CaptureKey) -> bool {
    // Unreachable, and redirect.
    let tells = matches!((key.protocol, key.to_port), (dissect::ICMP, 3 | 5) | (dissect::ICMPV6, 1 | 137));
    (tells && !plan::is_pod_network(key.source))
        || [key.source, key.destination].into_iter().any(plan::is_management_port)
}

fn nodes() -> impl Iterator<Item = plan::NodeNumber> {
    (1..=3).filter_map(|number| plan::NodeNumber::new(number).ok())
}

/// The node's pod reaches the world with its egress IPs again; says how long that took after the interface was back.
fn back(cluster: &TestCluster, node: &LabNode, device: &str, round: usize, findings: &mut Findings) -> Result<()> {
    let pod = cluster.chosen(node.number.index() + 1)?;
    for (to, address) in plan::SERVER.both().into_iter().zip([FIRST_V4, FIRST_V6]) {
        let took = time_until("the pod is seen again", PATIENCE, || Ok(seen_as(&pod.netns, to)? == Some(address)));
        let what = format!("{device} of {} recreated ({round}): {} is seen as {address} after", node.name(), pod.name);
        findings.right(&what, &took);
    }
    thread::sleep(50 * TICK);
    Ok(())
}
