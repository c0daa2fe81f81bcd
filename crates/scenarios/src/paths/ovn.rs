//! What a real OVN alone can show: network policy, its load balancers, its daemons under traffic, and what its own EgressIP
//! leaves in the logical network.

use std::time::SystemTime;

use super::findings::Findings;
use crate::prelude::*;
use egress_lab::capture::CapturedPacket;
use egress_lab::capture::devices::{DeviceCapture, DeviceDirection, DeviceKey, DevicesSeen};
use egress_lab::test_cluster::placement::{FIRST_V4, FIRST_V6, PATIENCE, seen_as};
use egress_lab::topology::builder::Ground;
use egress_lab::topology::ovn::{NIC, NODE_PORT_V4, NODE_PORT_V6, NodeDaemon, router_link_address};
use egress_lab::traffic::flows::FlowReport;
use egress_lab::traffic::packet;
use egress_lab::{LabService, MANAGEMENT, UPLINK};
use egress_toolchain::Paths;
use egress_toolchain::ovn::OvnPrograms;

pub(super) fn tests() -> Vec<LabTest> {
    let test = |name, run| LabTest::new(name, Duration::from_secs(120), run).only_on_ovn();
    vec![
        test("ovn_both_paths_fragments_and_geneve", both_paths).smoke_on_ovn(),
        test("ovn_network_policies_hold_for_selected_pods", policies),
        test("ovn_node_ports_of_selected_pods_keep_their_addresses", node_ports),
        test("ovn_services_with_backends_outside_see_the_egress_ip", backends_outside),
        test("ovn_daemons_that_restart_change_no_source", restarts),
        test("ovn_offloads_left_to_devices_are_finished", offloads),
        test("ovn_shared_gateway_mode_bypasses_the_host", shared_gateway),
        test("ovn_programs_on_pods_ports_bypass_network_policies", on_pods_ports),
        test("ovn_own_egress_ip_left_on_bypasses_the_host", own_egress_ip),
    ]
}

const TICK: Duration = Duration::from_millis(10);

fn served(context: &LabContext, config: fn(usize) -> HostConfig) -> Result<TestCluster> {
    let cluster = TestCluster::for_placement(context, config)?;
    cluster.place(&[(FIRST_V4, 1), (FIRST_V6, 2)])?;
    cluster.settle(&[FIRST_V4, FIRST_V6])?;
    Ok(cluster)
}

/// The addresses of both families by which the world sees a selected pod.
fn egress_ips() -> impl Iterator<Item = (IpAddr, IpAddr)> {
    plan::SERVER.both().into_iter().zip([FIRST_V4, FIRST_V6])
}

/// Each chosen pod has a TCP and a UDP flow to each of the servers.
fn flows(cluster: &TestCluster, nodes: impl IntoIterator<Item = usize>) -> Result<Vec<(String, TrafficFlow)>> {
    let mut flows = Vec::new();
    for node in nodes {
        let pod = cluster.chosen(node)?;
        for to in plan::SERVER.both() {
            let echo = SocketAddr::new(to, ECHO_PORT);
            flows.push((format!("{} TCP {to}", pod.name), TrafficFlow::tcp(&pod.netns, echo, TICK, PATIENCE)?));
            flows.push((format!("{} UDP {to}", pod.name), TrafficFlow::udp(&pod.netns, echo, TICK)?));
        }
    }
    Ok(flows)
}

/// Longer than the pods' MTU, so that it leaves in fragments.
const LONG: u32 = 3000;

/// Few packets, so that it runs in an emulated guest too: both paths, whole packets and fragments, and the CNI's own overlay, which
/// passes `breth0` with the kernel's datapath alone.
fn both_paths(context: &LabContext) -> Result<()> {
    if OvnPrograms::expected(&Paths::find()?).is_err() {
        return Err(Skip("Open vSwitch and OVN of Debian 13 are not to be had here").into());
    }
    let cluster = served(context, HostConfig::mixed)?;
    let capture = Capture::start(&cluster.lab)?;
    let mut findings = Findings::default();
    for number in 1..=3 {
        let pod = cluster.chosen(number)?;
        for (to, egress) in egress_ips() {
            let seen =
                time_until("the world sees the egress IP", PATIENCE, || Ok(seen_as(&pod.netns, to)? == Some(egress)));
            findings.right(&format!("{} is seen at {to} as {egress}", pod.name), &seen);
            for size in [Ping::default().size, LONG] {
                let answered = time_until("a ping is answered", PATIENCE, || {
                    Ok(client::ping(&pod.netns, to, Ping { size, ..Ping::default() })?.received == 1)
                });
                findings.right(&format!("{} pings {to} with {size} bytes", pod.name), &answered);
            }
        }
    }
    let node = cluster.node(1)?;
    node.host.feed("nft", &["-f", "-"], GENEVE_COUNTER)?;
    let (from, to) = (cluster.plain(1)?, cluster.plain(2)?);
    for to in to.addresses.both() {
        let answered = time_until("a ping is answered", PATIENCE, || {
            Ok(client::ping(&from.netns, to, Ping::default())?.received == 1)
        });
        findings.right(&format!("{} pings {to} by OVN's overlay", from.name), &answered);
    }
    let by_uplink: u64 = counted(node, "geneve")?.iter().sum();
    let expected = cluster.lab.ground() == Ground::OvnKernel;
    findings.note((by_uplink > 0) == expected, &format!("{by_uplink} packets of Geneve by breth0"));
    if cluster.lab.ground() == Ground::OvnKernel {
        // The kernel's datapath leaves checksums unfinished without a mark that a capture could see.
        let pods = capture.finish()?.to_the_world(AddressKind::Pod);
        findings.equal("packets outside with a pod's address", &0, &pods);
        return findings.conclude();
    }
    findings.conclude_with(capture)
}

const GENEVE_COUNTER: &str =
    "table netdev seen { chain breth0 { type filter hook egress device breth0 priority 500; policy accept;
udp dport 6081 counter comment \"geneve\"
}; }
";

/// Priorities of OVN-Kubernetes: a policy's default drop, and what it allows.
const DROP: &str = "1000";
const ALLOW: &str = "1001";

/// A namespace whose NetworkPolicy selects these pods: a group of ports with a default drop in both directions.
struct DefaultDeny<'a> {
    cluster: &'a TestCluster,
}

const GROUP: &str = "policy";

/// Of a NetworkPolicy: `policyTypes`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PolicyType {
    Ingress,
    Egress,
}

impl<'a> DefaultDeny<'a> {
    fn select(cluster: &'a TestCluster, pods: &[&LabPod]) -> Result<Self> {
        let policy = Self { cluster };
        let ports = pods.iter().map(|pod| format!("{}_{}", pod.namespace, pod.name)).collect::<Vec<_>>();
        let ports: Vec<&str> = ports.iter().map(String::as_str).collect();
        cluster.lab.ovn()?.nb_line(&[&["pg-add", GROUP], ports.as_slice()].concat())?;
        policy.deny(PolicyType::Egress, true)?;
        policy.deny(PolicyType::Ingress, true)?;
        Ok(policy)
    }

    /// The default drop of a direction.
    fn deny(&self, direction: PolicyType, on: bool) -> Result<()> {
        let ovn = self.cluster.lab.ovn()?;
        let (direction, port) = match direction {
            PolicyType::Egress => ("from-lport", "inport"),
            PolicyType::Ingress => ("to-lport", "outport"),
        };
        let matched = format!("{port} == @{GROUP}");
        let acl = ["--type=port-group", if on { "acl-add" } else { "acl-del" }, GROUP, direction, DROP, &matched];
        let verdict: &[&str] = if on { &["drop"] } else { &[] };
        ovn.nb_line(&[&acl, verdict].concat())?;
        ovn.settle()
    }

    /// Connections that the pods open are allowed, or no longer.
    fn egress(&self, on: bool) -> Result<()> {
        let ovn = self.cluster.lab.ovn()?;
        let matched = format!("inport == @{GROUP} && ip");
        let acl = ["--type=port-group", if on { "acl-add" } else { "acl-del" }, GROUP, "from-lport", ALLOW, &matched];
        let verdict: &[&str] = if on { &["allow-related"] } else { &[] };
        ovn.nb_line(&[&acl, verdict].concat())?;
        ovn.settle()
    }
}

/// A selected pod under a default-deny policy sends nothing; with an egress rule it has the egress IP, on both paths, and nothing
/// from outside reaches it; edits of the policy cost running flows of other pods nothing.
fn policies(context: &LabContext) -> Result<()> {
    let cluster = served(context, HostConfig::mixed)?;
    let capture = Capture::start(&cluster.lab)?;
    let mut findings = Findings::default();
    let unaffected = flows(&cluster, [3])?;
    let chosen = [cluster.chosen(1)?, cluster.chosen(2)?];
    let client = cluster.plain(3)?;
    let servers = chosen.map(|pod| Server::in_pod(&cluster.lab, pod));
    let servers = servers.into_iter().collect::<Result<Vec<_>>>()?;
    let answers = |to| client::get_within(&client.netns, SocketAddr::new(to, HTTP_PORT), "/", "paths", TICK * 50);
    for pod in chosen {
        for to in pod.addresses.both() {
            let answer = answers(to)?;
            findings
                .note(answer.is_ok(), &format!("without a policy, {} is reached at {to} by {}", pod.name, client.name));
        }
    }
    let policy = DefaultDeny::select(&cluster, &chosen)?;
    let reach = |expected: bool, when: &str, findings: &mut Findings| -> Result<()> {
        for pod in chosen {
            for (to, egress) in egress_ips() {
                let wanted = expected.then_some(egress);
                let seen = time_until("as the policy says", PATIENCE, || Ok(seen_as(&pod.netns, to)? == wanted));
                findings.right(&format!("{when}: {} is seen at {to} as {wanted:?}", pod.name), &seen);
            }
        }
        Ok(())
    };
    reach(false, "default deny", &mut findings)?;
    policy.egress(true)?;
    reach(true, "egress is allowed", &mut findings)?;
    // What the policy allows is egress: other pods open no connection.
    for pod in chosen {
        for to in pod.addresses.both() {
            let answer = answers(to)?;
            findings.note(answer.is_err(), &format!("{} is not reached at {to} by {}", pod.name, client.name));
        }
    }
    drop(servers);
    // Edits under load.
    let running = flows(&cluster, [1, 2])?;
    for _ in 0..5 {
        policy.egress(false)?;
        policy.egress(true)?;
    }
    reach(true, "after ten edits", &mut findings)?;
    for (name, flow) in running {
        let report = flow.finish()?;
        findings.note(report.broken.is_none(), &format!("{name} under edits of its policy: {report:?}"));
    }
    for (name, flow) in unaffected {
        let report = flow.finish()?;
        let whole = report.lost() == 0 && report.broken.is_none();
        findings.note(whole, &format!("{name} under edits of another policy: {report:?}"));
    }
    findings.conclude_with_selected(capture)
}

/// The NodePorts of this file.
const LOCAL_PORT: u16 = 30090;
const CLUSTER_PORT: u16 = 30091;
const CLUSTER_IP: plan::Dual = plan::Dual::new([10, 96, 0, 90], [0xfd00, 0x10, 0x96, 0, 0, 0, 0, 0x90]);

fn counted(node: &LabNode, comment: &str) -> Result<Vec<u64>> {
    let shown = node.host.exec("nft", &["-j", "list", "table", "netdev", "seen"])?;
    let shown: Value = serde_json::from_str(&shown)?;
    let rules = shown["nftables"].as_array().into_iter().flatten().filter_map(|one| one.get("rule"));
    let ours = rules.filter(|rule| rule["comment"] == comment);
    let packets = ours.map(|rule| {
        let counters = rule["expr"].as_array().into_iter().flatten().filter_map(|one| one.get("counter"));
        counters.filter_map(|counter| counter["packets"].as_u64()).sum()
    });
    Ok(packets.collect())
}

/// Clients outside reach a selected pod by NodePorts of both traffic policies, are answered by the address that they called, and
/// are seen with their own one where the policy is `Local`.
fn node_ports(context: &LabContext) -> Result<()> {
    let cluster = served(context, HostConfig::mixed)?;
    let capture = Capture::start(&cluster.lab)?;
    let mut findings = Findings::default();
    for number in [1, 3] {
        let (node, pod) = (cluster.node(number)?, cluster.chosen(number)?);
        let server = Server::in_pod(&cluster.lab, pod)?;
        let devices = DeviceCapture::start(&cluster.lab)?;
        for (own, virtual_ip) in node.number.address().both().into_iter().zip(CLUSTER_IP.both()) {
            let backend = SocketAddr::new(pod.addresses.towards(own), HTTP_PORT);
            let (local, by_cluster) = (SocketAddr::new(own, LOCAL_PORT), SocketAddr::new(own, CLUSTER_PORT));
            let virtual_ip = SocketAddr::new(virtual_ip, 80);
            let service = |front| LabService { front, protocol: "tcp", backend };
            cluster.lab.add_services(node, &[service(local), service(virtual_ip)])?;
            cluster.lab.ovn()?.expose(node, by_cluster, "tcp", virtual_ip)?;
            let client = plan::SERVER.towards(own);
            for (front, policy, keeps) in [(local, "Local", true), (by_cluster, "Cluster", false)] {
                let reply = client::get(cluster.lab.outside(), front, "/", policy)?;
                let seen = reply.map_err(anyhow::Error::from).and_then(|reply| reply.seen_as());
                let right = seen.as_ref().is_ok_and(|seen| !keeps || *seen == client);
                findings.note(right, &format!("{} by {front}, policy {policy}: seen as {seen:?}", pod.name));
            }
        }
        println!("       {} requests reached {}", server.log().since(0).len(), pod.name);
        let seen = devices.finish()?;
        let by_management = |source: IpAddr, port: Option<u16>| {
            let is_asked = |key: &DeviceKey| {
                let enters =
                    key.device == MANAGEMENT && key.direction == DeviceDirection::In && key.node == node.name();
                enters
                    && key.source == source
                    && port.is_none_or(|port| (key.protocol, key.ports.0) == (packet::TCP, port))
            };
            seen.sightings(is_asked).values().map(|tally| tally.packets).sum::<u64>()
        };
        let of_pod = pod.addresses.both().map(|source| by_management(source, Some(HTTP_PORT)));
        findings.equal("packets of the pod's port by the management port", &[0, 0], &of_pod);
        let translated = [NODE_PORT_V4.into(), NODE_PORT_V6.into()].map(|source| by_management(source, None));
        findings.note(
            translated.iter().all(|count| *count > 0),
            &format!("packets with OVN's translated address by the management port: {translated:?}"),
        );
        for (to, egress) in egress_ips() {
            findings.equal(&format!("{} is seen at {to}", pod.name), &Some(egress), &seen_as(&pod.netns, to)?);
        }
    }
    findings.conclude_with(capture)
}

/// OVN translates a cluster IP to a server outside; that sees the egress IP.
fn backends_outside(context: &LabContext) -> Result<()> {
    let cluster = served(context, HostConfig::mixed)?;
    let capture = Capture::start(&cluster.lab)?;
    let mut findings = Findings::default();
    for number in 1..=3 {
        let node = cluster.node(number)?;
        for (virtual_ip, server) in CLUSTER_IP.both().into_iter().zip(plan::SERVER.both()) {
            let (front, backend) = (SocketAddr::new(virtual_ip, 80), SocketAddr::new(server, HTTP_PORT));
            cluster.lab.add_services(node, &[LabService { front, protocol: "tcp", backend }])?;
            let (chosen, plain) = (cluster.chosen(number)?, cluster.plain(number)?);
            let egress = if server.is_ipv4() { FIRST_V4 } else { FIRST_V6 };
            for (pod, expected) in [(chosen, egress), (plain, node.number.address().towards(server))] {
                let reply = client::get(&pod.netns, front, "/", "paths")?;
                let seen = reply.map_err(anyhow::Error::from).and_then(|reply| reply.seen_as());
                let right = seen.as_ref().is_ok_and(|seen| *seen == expected);
                findings.note(right, &format!("{} by {front}: seen as {seen:?}, expected {expected}", pod.name));
            }
        }
    }
    findings.conclude_with(capture)
}

/// How long Open vSwitch may take from its start until it forwards again.
const BACK: Duration = Duration::from_secs(10);

/// Open vSwitch and ovn-controller of a source node and of a gateway are killed and started again under traffic.
fn restarts(context: &LabContext) -> Result<()> {
    let cluster = served(context, HostConfig::mixed)?;
    let capture = Capture::start(&cluster.lab)?;
    let mut findings = Findings::default();
    for (number, what) in [(3, "the source"), (1, "a gateway")] {
        for which in [NodeDaemon::Controller, NodeDaemon::Vswitchd] {
            let node = cluster.node(number)?;
            let running = flows(&cluster, 1..=3)?;
            thread::sleep(50 * TICK);
            cluster.lab.restart_daemon(node, which)?;
            let back = time_until("pods reach the world", BACK, || {
                for pod in 1..=3 {
                    for (to, egress) in egress_ips() {
                        if seen_as(&cluster.chosen(pod)?.netns, to)? != Some(egress) {
                            return Ok(false);
                        }
                    }
                }
                Ok(true)
            });
            findings.right(&format!("{which:?} of {what} restarted"), &back);
            thread::sleep(100 * TICK);
            for (name, flow) in running {
                let report = flow.finish()?;
                let lost = (report.lost(), report.longest_gap);
                findings.note(
                    report.broken.is_none(),
                    &format!("{which:?} of {what}: {name}: {lost:?} {:?}", report.broken),
                );
            }
        }
    }
    findings.conclude_with_selected(capture)
}

/// Of pods and of the management port, and of the nodes' network.
const POD_MTU: usize = 1400;
const LAN_MTU: usize = 1500;

/// Nodes whose checksums and segments are left to devices, as with the datapath of the kernel: packets at the hooks are larger
/// than the MTU, and their checksums unfinished. What Open vSwitch itself spoils, it spoils without agents too.
fn offloads(context: &LabContext) -> Result<()> {
    let builder = LabBuilder::default().host_config(|_| HostConfig::default());
    let mut spoilt = Vec::new();
    let cluster = TestCluster::for_placement_on(context, builder, &[], |cluster| {
        for to in plan::SERVER.both() {
            let report = datagrams(cluster.plain(1)?, to)?;
            println!("       without agents: UDP {to}: {report:?}");
            if report.echoed == 0 {
                spoilt.push(to);
            }
        }
        Ok(())
    })?;
    cluster.place(&[(FIRST_V4, 1), (FIRST_V6, 2)])?;
    cluster.settle(&[FIRST_V4, FIRST_V6])?;
    let capture = Capture::start(&cluster.lab)?;
    let mut findings = Findings::default();
    for number in 1..=3 {
        for pod in [cluster.chosen(number)?, cluster.plain(number)?] {
            for to in plan::SERVER.both() {
                let devices = DeviceCapture::start(&cluster.lab)?;
                let server = SocketAddr::new(to, HTTP_PORT);
                let received = client::get(&pod.netns, server, "/bytes/500000", "paths")?.map(|reply| reply.body.len());
                findings
                    .note(matches!(received, Ok(500_000)), &format!("{} receives from {to}: {received:?}", pod.name));
                let sent = client::post(&pod.netns, server, &vec![b'.'; 500_000], "paths")?.map(|reply| reply.body);
                let whole = sent.as_ref().is_ok_and(|body| body == b"500000\n");
                findings.note(whole, &format!("{} sends to {to}: {:?}", pod.name, sent.as_ref().map(Vec::len)));
                long_packets(pod, to, &devices.finish()?, &mut findings);
                if !spoilt.contains(&to) {
                    let report = datagrams(pod, to)?;
                    findings.note(report.lost() == 0, &format!("{} UDP {to}: {report:?}", pod.name));
                }
            }
        }
    }
    findings.conclude_with(capture)
}

/// What a pod exchanged with a server: packets longer than the MTU enter the host at both hooks, none leaves the node, and the
/// source outside is right.
fn long_packets(pod: &LabPod, to: IpAddr, seen: &DevicesSeen, findings: &mut Findings) {
    let carried = |device, direction| {
        let is_asked = move |key: &DeviceKey| {
            let is_of_server = key.protocol == packet::TCP && [key.source, key.destination].contains(&to);
            is_of_server && key.device == device && key.direction == direction
        };
        seen.tallies.iter().filter(move |(key, _)| is_asked(key))
    };
    let longest = |device, direction| carried(device, direction).map(|(_, tally)| tally.longest).max().unwrap_or(0);
    let egress = if to.is_ipv4() { FIRST_V4 } else { FIRST_V6 };
    let is_chosen = pod.labels.get("role").is_some_and(|role| role == "chosen");
    let expected = if is_chosen { egress } else { pod.node.address().towards(to) };
    let sources: BTreeSet<IpAddr> = carried(NIC, DeviceDirection::Out).map(|(key, _)| key.source).collect();
    findings.equal(&format!("{} leaves to {to} as", pod.name), &[expected].into(), &sources);
    for (device, mtu) in [(MANAGEMENT, POD_MTU), (UPLINK, LAN_MTU)] {
        let bytes = longest(device, DeviceDirection::In);
        let what = format!("{} and {to}: up to {bytes} bytes into {device}, whose MTU is {mtu}", pod.name);
        findings.note(bytes > mtu, &what);
    }
    let bytes = longest(NIC, DeviceDirection::Out);
    findings.note(bytes <= LAN_MTU, &format!("{} and {to}: up to {bytes} bytes out of {NIC}", pod.name));
}

fn datagrams(pod: &LabPod, to: IpAddr) -> Result<FlowReport> {
    let flow = TrafficFlow::udp(&pod.netns, SocketAddr::new(to, ECHO_PORT), TICK)?;
    thread::sleep(20 * TICK);
    flow.finish()
}

/// How the server outside sees a request, and each place where a node's device carried its packets, with their source.
type Followed = (Option<IpAddr>, BTreeSet<String>);

/// The programs' overlay. Of a flow's packets it carries some: programs encapsulate and decapsulate the others themselves.
const OVERLAY_DEVICE: &str = "egress0";

fn follow(cluster: &TestCluster, pod: &LabPod, to: IpAddr) -> Result<Followed> {
    let capture = DeviceCapture::start(&cluster.lab)?;
    let seen = seen_as(&pod.netns, to)?;
    let is_request = |key: &DeviceKey| {
        (key.destination, key.protocol, key.ports.1) == (to, packet::TCP, HTTP_PORT) && key.device != OVERLAY_DEVICE
    };
    Ok((seen, capture.finish()?.sightings(is_request).into_keys().collect()))
}

/// Notes how a request is seen and which path it takes, once that is as expected or the time is over.
fn takes(
    cluster: &TestCluster,
    pod: &LabPod,
    to: IpAddr,
    expected: &Followed,
    when: &str,
    findings: &mut Findings,
) -> Result<()> {
    let begin = Instant::now();
    let mut followed = follow(cluster, pod, to)?;
    while followed != *expected && begin.elapsed() < PATIENCE {
        println!("       {} {when} to {to}, so far: {followed:?}", pod.name);
        followed = follow(cluster, pod, to)?;
    }
    findings.equal(&format!("{} {when} to {to}", pod.name), expected, &followed);
    Ok(())
}

/// By OVN's gateway router: the pod's port and the NIC alone.
fn by_gateway_router(cluster: &TestCluster, pod: &LabPod, to: IpAddr, source: IpAddr) -> Result<Followed> {
    let node = pod.node.name();
    let places = [
        format!("{node} {} in from {}", cluster.lab.port_of_pod(pod)?, pod.addresses.towards(to)),
        format!("{node} {NIC} out from {source}"),
    ];
    Ok((Some(source), places.into()))
}

/// By the programs: the management port, and the uplink of the gateway.
fn by_programs(cluster: &TestCluster, pod: &LabPod, to: IpAddr) -> Result<Followed> {
    let (egress, gateway) = if to.is_ipv4() { (FIRST_V4, node(1)?) } else { (FIRST_V6, node(2)?) };
    let (source, own, gateway) = (pod.addresses.towards(to), pod.node.name(), gateway.name());
    let places = [
        format!("{own} {} in from {source}", cluster.lab.port_of_pod(pod)?),
        format!("{own} {MANAGEMENT} in from {source}"),
        format!("{gateway} {UPLINK} out from {egress}"),
        format!("{gateway} {NIC} out from {egress}"),
    ];
    Ok((Some(egress), places.into()))
}

/// In shared gateway mode pods' packets pass neither the management port nor `breth0`, so the programs see nothing of them: a
/// selected pod keeps its node's address. A policy of the cluster's router for a pod brings it to the management port, and all
/// holds as in local gateway mode, until the policy is removed: docs/adr/0024.
fn shared_gateway(context: &LabContext) -> Result<()> {
    let cluster = served(context, HostConfig::mixed)?;
    let capture = Capture::start(&cluster.lab)?;
    let mut findings = Findings::default();
    for number in 1..=3 {
        let (node, chosen) = (cluster.node(number)?, cluster.chosen(number)?);
        cluster.lab.ovn()?.share_gateway(node.number)?;
        for pod in [chosen, cluster.plain(number)?] {
            for to in plan::SERVER.both() {
                let expected = by_gateway_router(&cluster, pod, to, node.number.address().towards(to))?;
                takes(&cluster, pod, to, &expected, "in shared gateway mode", &mut findings)?;
            }
        }
    }
    for number in 1..=3 {
        let (node, chosen, plain) = (cluster.node(number)?, cluster.chosen(number)?, cluster.plain(number)?);
        cluster.lab.ovn()?.reroute_to_host(chosen)?;
        for to in plan::SERVER.both() {
            let expected = by_programs(&cluster, chosen, to)?;
            takes(&cluster, chosen, to, &expected, "by policy", &mut findings)?;
            let expected = by_gateway_router(&cluster, plain, to, node.number.address().towards(to))?;
            takes(&cluster, plain, to, &expected, "without a policy", &mut findings)?;
        }
    }
    let running = flows(&cluster, 1..=3)?;
    thread::sleep(100 * TICK);
    for (name, flow) in running {
        let report = flow.finish()?;
        findings.note(report.lost() == 0 && report.broken.is_none(), &format!("{name} by policy: {report:?}"));
    }
    for number in 1..=3 {
        leaks_without_policy(&cluster, number, &mut findings)?;
    }
    findings.conclude_with(capture)
}

/// The leak for which the mode is not served: once the policy of a selected pod is gone, its running and its new connections
/// leave with the node's address.
fn leaks_without_policy(cluster: &TestCluster, number: usize, findings: &mut Findings) -> Result<()> {
    let (node, pod) = (cluster.node(number)?, cluster.chosen(number)?);
    let capture = Capture::watching(&cluster.lab, plan::SERVER.both().into())?;
    let running = flows(cluster, [number])?;
    thread::sleep(50 * TICK);
    let removed = SystemTime::now();
    cluster.lab.ovn()?.remove_reroute(pod)?;
    for to in plan::SERVER.both() {
        let expected = by_gateway_router(cluster, pod, to, node.number.address().towards(to))?;
        takes(cluster, pod, to, &expected, "policy removed", findings)?;
    }
    thread::sleep(50 * TICK);
    let reports = running.into_iter().map(|(name, flow)| Ok((name, flow.finish()?))).collect::<Result<Vec<_>>>()?;
    let captured = capture.finish()?.captured;
    for (name, report) in reports {
        let local = report.local.with_context(|| format!("{name} was never connected"))?;
        let own = node.number.address().towards(local.ip());
        let is_of_flow = |packet: &&CapturedPacket| {
            packet.source.is_ipv4() == own.is_ipv4() && packet.ports == (local.port(), ECHO_PORT)
        };
        let of_flow: Vec<_> = captured.iter().filter(is_of_flow).collect();
        let count = |is_after: bool, is_own: bool| {
            let of_time = of_flow.iter().filter(|packet| (packet.at >= removed) == is_after);
            of_time.filter(|packet| (packet.source == own) == is_own).count()
        };
        let [leaked, right] = [true, false].map(|is_own| count(false, is_own));
        let what = format!("{name} by policy: {leaked} packets with the node's address, {right} with the egress IP");
        findings.note(leaked == 0 && right > 0, &what);
        let [leaked, right] = [true, false].map(|is_own| count(true, is_own));
        let what = format!("{name}, policy removed: {leaked} with the node's address, {right} with the egress IP");
        findings.note(leaked > 0, &format!("{what}, {report:?}"));
    }
    cluster.lab.ovn()?.reroute_to_host(pod)?;
    for to in plan::SERVER.both() {
        let expected = by_programs(cluster, pod, to)?;
        takes(cluster, pod, to, &expected, "by policy again", findings)?;
    }
    Ok(())
}

/// Sends what a pod sends to the servers outside to the ingress of the management port, and so to the program there, before OVN
/// judges it: as a program on the pod's port would.
fn take_before_ovn(cluster: &TestCluster, pod: &LabPod) -> Result<()> {
    let (host, port) = (&cluster.lab.node(pod.node).host, cluster.lab.port_of_pod(pod)?);
    // The program leaves frames for another host alone, so they are to be for this one: pods send to their router.
    host.exec("ip", &["link", "set", &port, "address", &router_link_address(pod.node)])?;
    host.exec("tc", &["qdisc", "add", "dev", &port, "clsact"])?;
    for (protocol, matched, to) in
        [("ip", "ip", format!("{}/32", plan::SERVER.v4)), ("ipv6", "ip6", format!("{}/128", plan::SERVER.v6))]
    {
        let words = format!(
            "filter add dev {port} ingress protocol {protocol} u32 match {matched} dst {to} \
             action mirred ingress redirect dev {MANAGEMENT}"
        );
        host.exec("tc", &words.split_whitespace().collect::<Vec<_>>())?;
    }
    Ok(())
}

/// What became of one kind of traffic.
#[derive(Debug, PartialEq, Eq)]
struct DenialTrial {
    /// The sources with which it left a node.
    left_as: BTreeSet<IpAddr>,
    /// The devices of the pod's node that sent answers to it.
    answers_at: BTreeSet<String>,
}

/// A connection, datagrams and pings from a pod to a server outside.
fn attempt(cluster: &TestCluster, pod: &LabPod, to: IpAddr) -> Result<[(&'static str, DenialTrial); 3]> {
    let capture = DeviceCapture::start(&cluster.lab)?;
    let echo = SocketAddr::new(to, ECHO_PORT);
    let flows = [
        TrafficFlow::tcp(&pod.netns, echo, TICK, 50 * TICK)?,
        TrafficFlow::udp(&pod.netns, echo, TICK)?,
        TrafficFlow::ping(&pod.netns, to, TICK)?,
    ];
    thread::sleep(30 * TICK);
    for flow in flows {
        flow.finish()?;
    }
    let seen = capture.finish()?;
    let (icmp, request, reply) = if to.is_ipv4() { (packet::ICMP, 8, 0) } else { (packet::ICMPV6, 128, 129) };
    let (own, source) = (pod.node.name(), pod.addresses.towards(to));
    let of = |protocol: u8| {
        let keys =
            || seen.tallies.keys().filter(move |key| key.protocol == protocol && key.direction == DeviceDirection::Out);
        let is_request = |key: &&DeviceKey| {
            let is_kind = if protocol == icmp { key.ports.0 == request } else { key.ports.1 == ECHO_PORT };
            is_kind && key.device == NIC && key.destination == to
        };
        let is_answer = |key: &&DeviceKey| {
            let is_kind = key.ports.0 == if protocol == icmp { reply } else { ECHO_PORT };
            is_kind && key.node == own && key.device != OVERLAY_DEVICE && (key.source, key.destination) == (to, source)
        };
        DenialTrial {
            left_as: keys().filter(is_request).map(|key| key.source).collect(),
            answers_at: keys().filter(is_answer).map(|key| key.device.clone()).collect(),
        }
    };
    Ok([("TCP", of(packet::TCP)), ("UDP", of(packet::UDP)), ("ping", of(icmp))])
}

/// Notes what becomes of a pod's traffic, once that is right or the time is over.
fn attempts(
    cluster: &TestCluster,
    pod: &LabPod,
    when: &str,
    findings: &mut Findings,
    is_right: impl Fn(IpAddr, &str, &DenialTrial) -> bool,
) -> Result<()> {
    for (to, egress) in egress_ips() {
        let begin = Instant::now();
        let mut seen = attempt(cluster, pod, to)?;
        while !seen.iter().all(|(kind, seen)| is_right(egress, kind, seen)) && begin.elapsed() < PATIENCE {
            println!("       {when}: {} to {to}, so far: {seen:?}", pod.name);
            seen = attempt(cluster, pod, to)?;
        }
        for (kind, seen) in seen {
            let what = format!("{when}: {} by {kind} to {to}: {seen:?}", pod.name);
            findings.note(is_right(egress, kind, &seen), &what);
        }
    }
    Ok(())
}

/// Why no program of ours is on pods' own ports: it sees packets before OVN's network policies. A pod that may send nothing
/// leaves with the egress IP. OVN, which has not seen the request, drops answers by TCP and ICMP, and lets those by UDP pass:
/// docs/adr/0024.
fn on_pods_ports(context: &LabContext) -> Result<()> {
    let cluster = served(context, HostConfig::mixed)?;
    let mut findings = Findings::default();
    for number in 1..=3 {
        cluster.lab.ovn()?.share_gateway(node(number)?)?;
    }
    let pods = [cluster.chosen(1)?, cluster.chosen(3)?];
    let policy = DefaultDeny::select(&cluster, &pods)?;
    for pod in pods {
        attempts(&cluster, pod, "default deny", &mut findings, |_, _, seen| {
            seen.left_as.is_empty() && seen.answers_at.is_empty()
        })?;
    }
    for pod in pods {
        take_before_ovn(&cluster, pod)?;
        attempts(&cluster, pod, "default deny, program on the port", &mut findings, |egress, _, seen| {
            seen.left_as == [egress].into() && seen.answers_at == [MANAGEMENT.to_owned()].into()
        })?;
    }
    policy.deny(PolicyType::Ingress, false)?;
    for pod in pods {
        let port = cluster.lab.port_of_pod(pod)?;
        attempts(&cluster, pod, "default deny of egress, program on the port", &mut findings, |egress, kind, seen| {
            seen.left_as.contains(&egress) && seen.answers_at.contains(&port) == (kind == "UDP")
        })?;
    }
    policy.deny(PolicyType::Egress, false)?;
    if cluster.lab.ground() == Ground::Ovn {
        // Open vSwitch in user space reads the port by a packet socket, before the program: it has all packets too.
        for pod in pods {
            attempts(&cluster, pod, "no policy, program on the port", &mut findings, |egress, _, seen| {
                seen.left_as == [egress, pod.node.address().towards(egress)].into()
            })?;
        }
    }
    findings.conclude()
}

fn own_address(number: u8) -> plan::Dual {
    plan::Dual::new([172, 18, 0, 150 + number], [0xfd00, 0x172, 0x18, 0, 0, 0, 0, 0x150 + u16::from(number)])
}

/// OVN-Kubernetes' own EgressIP for a pod that an object of ours selects too: OVN translates, and the host sees nothing. This is
/// why it must be off (docs/migration.md). Once it is removed, the programs serve the pod.
fn own_egress_ip(context: &LabContext) -> Result<()> {
    let cluster = served(context, HostConfig::mixed)?;
    let capture = Capture::start(&cluster.lab)?;
    let mut findings = Findings::default();
    let is_served = |pod: &LabPod, when: &str, findings: &mut Findings| -> Result<()> {
        for to in plan::SERVER.both() {
            takes(&cluster, pod, to, &by_programs(&cluster, pod, to)?, when, findings)?;
        }
        Ok(())
    };
    for number in 1..=3 {
        let pod = cluster.chosen(number.into())?;
        is_served(pod, "before", &mut findings)?;
        // One for each node: neighbours remember whose it was.
        let address = own_address(number);
        cluster.lab.ovn()?.own_egress_ip(pod, address)?;
        for to in plan::SERVER.both() {
            let expected = by_gateway_router(&cluster, pod, to, address.towards(to))?;
            takes(&cluster, pod, to, &expected, "with OVN's own", &mut findings)?;
        }
        cluster.lab.ovn()?.remove_own_egress_ip(pod)?;
        is_served(pod, "after", &mut findings)?;
    }
    findings.conclude_with(capture)
}
