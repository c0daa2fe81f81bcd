//! Hosts with firewalls that see both directions of a flow or call it invalid: kube-proxy's rule, and a stateful FORWARD
//! chain. One lab, four promises, in this order:
//!
//! 1. A second TC program behind ours sees every packet that we leave alone, and none that we redirect.
//! 2. Selected pods reach other nodes (mark 1008) for long, whether the CNI's masquerade spares the mark or not, and are
//!    seen with their node's address.
//! 3. The replies that we redirect to mp0 are not taken for connections from outside, also not after the time in which
//!    datagrams are not remembered at all.
//! 4. Connections from outside by a NodePort (no SNAT) live on while their pod is selected, deselected, selected again.

use super::findings::Findings;
use super::{maps, other_tc_program};
use crate::prelude::*;
use egress_lab::LabService;
use egress_lab::test_cluster::placement::{FIRST_V4, FIRST_V6, NAMESPACE, PATIENCE, seen_as};

pub(super) fn tests() -> Vec<LabTest> {
    let timeout = Duration::from_secs(180);
    vec![LabTest::new("paths_stateful_hosts_keep_long_flows", timeout, stateful)]
}

const TICK: Duration = Duration::from_millis(10);
/// Datagrams are taken for connections from outside only this long after the programs first ran.
const SETTLE: Duration = Duration::from_secs(30);
/// The NodePort of these tests.
pub(super) const NODE_PORT: u16 = 30081;

/// Nodes 1 and 2 have both firewalls; on node 2 (and 3) the CNI's masquerade spares the mark.
fn host_config(index: usize) -> HostConfig {
    HostConfig {
        drop_invalid: true,
        stateful_forward: index < 2,
        masquerade_spares_mark: index > 0,
        macvlan_uplink: index == 2,
        checksum_offload: index == 1,
        ..HostConfig::default()
    }
}

fn stateful(context: &LabContext) -> Result<()> {
    let cluster = TestCluster::for_placement(context, host_config)?;
    cluster.place(&[(FIRST_V4, 1), (FIRST_V6, 2)])?;
    let selected = Instant::now();
    let mut findings = Findings::default();
    let capture = Capture::start(&cluster.lab)?;
    second_programs(&cluster, &mut findings)?;
    let world = to_the_world(&cluster)?;
    to_nodes(&cluster, selected, &mut findings)?;
    not_inbound(&cluster, world, &mut findings)?;
    from_outside(&cluster, &mut findings)?;
    findings.conclude_with(capture)
}

/// Exactly what was sent is counted where we leave it alone.
pub(super) fn second_programs(cluster: &TestCluster, findings: &mut Findings) -> Result<()> {
    for node in cluster.lab.nodes() {
        other_tc_program::attach(&node.host, ECHO_PORT)?;
        let number = node.number.index() + 1;
        let other = cluster.node(number % 3 + 1)?;
        let _server = Server::on_node(&cluster.lab, other)?;
        let (chosen, plain) = (cluster.chosen(number)?, cluster.plain(number)?);
        let to_node = other.number.address().both();
        second(cluster, plain, plan::SERVER.both(), [Some(true); 4], findings)?;
        second(cluster, chosen, to_node, [Some(true); 4], findings)?;
        second(cluster, plain, to_node, [Some(true); 4], findings)?;
        // What passes the uplink depends on where the gateway is; mp0 is redirected from, and replies are left alone there.
        let redirected = [Some(false), None, None, Some(true)];
        second(cluster, chosen, plan::SERVER.both(), redirected, findings)?;
    }
    Ok(())
}

/// Sends datagrams of both families and compares the count of each hook: mp0 in, uplink out, uplink in, mp0 out.
fn second(
    cluster: &TestCluster,
    pod: &LabPod,
    to: [IpAddr; 2],
    sees: [Option<bool>; 4],
    findings: &mut Findings,
) -> Result<()> {
    let host = &cluster.lab.node(pod.node).host;
    let before = other_tc_program::counted(host)?;
    let flows = to.map(|to| TrafficFlow::udp(&pod.netns, SocketAddr::new(to, ECHO_PORT), TICK));
    thread::sleep(20 * TICK);
    let mut sent = 0;
    let mut echoed = 0;
    for flow in flows {
        let report = flow?.finish()?;
        sent += report.sent;
        echoed += report.echoed;
    }
    let after = other_tc_program::counted(host)?;
    for ((((device, direction), before), after), sees) in
        other_tc_program::HOOKS.into_iter().zip(before).zip(after).zip(sees)
    {
        let what =
            format!("{} -> {}: {sent} sent, {echoed} echoed, second program at {device} {direction}", pod.name, to[0]);
        if let Some(sees) = sees {
            findings.equal(&what, &if sees { sent } else { 0 }, &(after - before));
        }
    }
    Ok(())
}

/// Selected pods talk to the world for as long as the rest takes.
fn to_the_world(cluster: &TestCluster) -> Result<Vec<(String, TrafficFlow)>> {
    let mut flows = Vec::new();
    for node in 1..=3 {
        let pod = cluster.chosen(node)?;
        for to in plan::SERVER.both() {
            let echo = SocketAddr::new(to, ECHO_PORT);
            flows.push((format!("{} TCP {to}", pod.name), TrafficFlow::tcp(&pod.netns, echo, TICK, client::PATIENCE)?));
            flows.push((format!("{} UDP {to}", pod.name), TrafficFlow::udp(&pod.netns, echo, TICK)?));
        }
    }
    Ok(flows)
}

fn to_nodes(cluster: &TestCluster, selected: Instant, findings: &mut Findings) -> Result<()> {
    let nodes = cluster.lab.nodes();
    let servers = nodes.iter().map(|node| Server::on_node(&cluster.lab, node)).collect::<Result<Vec<_>>>()?;
    let mut flows = Vec::new();
    let mut paths = Vec::new();
    for pod in (1..=3).map(|node| cluster.chosen(node)) {
        let pod = pod?;
        for node in nodes.iter().filter(|node| node.number != pod.node) {
            for to in node.number.address().both() {
                let echo = SocketAddr::new(to, ECHO_PORT);
                let name = format!("{} -> {} {to}", pod.name, node.name());
                flows.push((format!("{name} TCP"), TrafficFlow::tcp(&pod.netns, echo, TICK, client::PATIENCE)?));
                flows.push((format!("{name} UDP"), TrafficFlow::udp(&pod.netns, echo, TICK)?));
                paths.push((pod, to));
            }
        }
    }
    let (mut pings, mut pongs) = (0, 0);
    while selected.elapsed() < SETTLE + Duration::from_secs(1) {
        for (pod, to) in &paths {
            pings += 1;
            pongs += client::ping(&pod.netns, *to, Ping::default())?.received;
        }
    }
    findings.equal("pings answered, of selected pods to other nodes", &pings, &pongs);
    expect_whole(flows, findings)?;
    for (node, server) in nodes.iter().zip(&servers) {
        let entries = server.log().since(0);
        let wrong = entries.iter().filter(|entry| {
            !nodes.iter().any(|other| other.number != node.number && other.number.address().is(entry.client.ip()))
        });
        let what = format!("of {} callers at {}, those without another node's address", entries.len(), node.name());
        findings.equal(&what, &0, &wrong.count());
    }
    Ok(())
}

fn expect_whole(flows: Vec<(String, TrafficFlow)>, findings: &mut Findings) -> Result<()> {
    for (name, flow) in flows {
        let report = flow.finish()?;
        let whole = report.lost() == 0 && report.broken.is_none() && report.sent > 10;
        let gap = report.longest_gap.as_millis();
        let what = format!(
            "{name}: {} of {} came back, longest gap {gap} ms, {:?}",
            report.echoed, report.sent, report.broken
        );
        findings.note(whole, &what);
    }
    Ok(())
}

fn not_inbound(cluster: &TestCluster, world: Vec<(String, TrafficFlow)>, findings: &mut Findings) -> Result<()> {
    // Old flows have crossed the time of settling; these are new after it.
    let more = to_the_world(cluster)?;
    for node in 1..=3 {
        let pod = cluster.chosen(node)?;
        for to in plan::SERVER.both() {
            let pong = client::ping(&pod.netns, to, Ping { count: 3, ..Ping::default() })?;
            findings.equal(&format!("pings to {to} answered"), &3, &pong.received);
        }
    }
    expect_whole(world, findings)?;
    expect_whole(more, findings)?;
    for node in cluster.lab.nodes() {
        let inbound = maps::dump(node, "inbound")?;
        findings.equal(&format!("connections from outside that {} remembers", node.name()), &0, &inbound.len());
    }
    Ok(())
}

/// The Service whose translation `add_services` stands for: datagrams count at ports that it exposes.
pub(super) fn expose(cluster: &TestCluster) -> Result<()> {
    for role in ["chosen", "plain"] {
        let port = |protocol| json!({"name": protocol, "protocol": protocol, "port": 80, "targetPort": ECHO_PORT});
        let spec = json!({"type": "NodePort", "selector": {"role": role}, "ports": [port("TCP"), port("UDP")]});
        let service = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": role}, "spec": spec});
        cluster.api.create(&format!("/api/v1/namespaces/{NAMESPACE}/services"), &service)?;
    }
    for node in cluster.lab.nodes() {
        // Two pods with two addresses and two ports each.
        time_until("ports are exposed", PATIENCE, || Ok(maps::dump(node, "exposed")?.len() == 8))?;
    }
    Ok(())
}

/// Flows from outside by a NodePort, begun while the pod is selected and while it is not.
fn from_outside(cluster: &TestCluster, findings: &mut Findings) -> Result<()> {
    expose(cluster)?;
    for node in 1..=3 {
        let (host, pod) = (cluster.node(node)?, cluster.chosen(node)?);
        let _server = Server::in_pod(&cluster.lab, pod)?;
        for front in host.number.address().both() {
            let backend = SocketAddr::new(pod.addresses.towards(front), ECHO_PORT);
            let front = SocketAddr::new(front, NODE_PORT);
            cluster.lab.add_services(host, &["tcp", "udp"].map(|protocol| LabService { front, protocol, backend }))?;
        }
        let begun_selected = node_port_flows(cluster, pod, "begun selected")?;
        select(cluster, pod, false)?;
        let begun_plain = node_port_flows(cluster, pod, "begun deselected")?;
        thread::sleep(50 * TICK);
        select(cluster, pod, true)?;
        let begun_again = node_port_flows(cluster, pod, "begun selected again")?;
        thread::sleep(100 * TICK);
        for flows in [begun_selected, begun_plain, begun_again] {
            expect_whole(flows, findings)?;
        }
        let remembered = maps::dump(host, "inbound")?.len();
        println!("       node{node} remembers {remembered} connections from outside");
    }
    Ok(())
}

fn node_port_flows(cluster: &TestCluster, pod: &LabPod, when: &str) -> Result<Vec<(String, TrafficFlow)>> {
    let mut flows = Vec::new();
    for front in pod.node.address().both() {
        let front = SocketAddr::new(front, NODE_PORT);
        let from = cluster.lab.outside();
        let tcp = TrafficFlow::tcp(from, front, TICK, client::PATIENCE)?;
        flows.push((format!("outside -> {} by {front}, TCP, {when}", pod.name), tcp));
        flows.push((format!("outside -> {} by {front}, UDP, {when}", pod.name), TrafficFlow::udp(from, front, TICK)?));
    }
    thread::sleep(20 * TICK);
    Ok(flows)
}

/// Changes the selection and waits until the world sees it.
fn select(cluster: &TestCluster, pod: &LabPod, on: bool) -> Result<()> {
    cluster.set_role(pod, if on { "chosen" } else { "plain" })?;
    for (to, egress) in plan::SERVER.both().into_iter().zip([FIRST_V4, FIRST_V6]) {
        let expected = if on { egress } else { pod.node.address().towards(to) };
        let what = format!("{} is seen as {expected}", pod.name);
        time_until(&what, PATIENCE, || Ok(seen_as(&pod.netns, to)? == Some(expected)))?;
    }
    Ok(())
}
