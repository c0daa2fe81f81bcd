//! What a real OVN alone can show: network policy, its load balancers, its daemons under traffic, and what its own EgressIP
//! leaves in the logical network.

use super::findings::Findings;
use crate::prelude::*;
use egress_lab::LabService;
use egress_lab::test_cluster::placement::{FIRST_V4, FIRST_V6, PATIENCE, seen_as};
use egress_lab::topology::builder::Ground;
use egress_lab::topology::ovn::{NODE_PORT_V4, NODE_PORT_V6, NodeDaemon};
use egress_lab::traffic::flows::FlowReport;
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

impl<'a> DefaultDeny<'a> {
    fn select(cluster: &'a TestCluster, pods: &[&LabPod]) -> Result<Self> {
        let policy = Self { cluster };
        let ports = pods.iter().map(|pod| format!("{}_{}", pod.namespace, pod.name)).collect::<Vec<_>>();
        let ports: Vec<&str> = ports.iter().map(String::as_str).collect();
        let ovn = cluster.lab.ovn()?;
        ovn.nb_line(&[&["pg-add", GROUP], ports.as_slice()].concat())?;
        for (direction, port) in [("from-lport", "inport"), ("to-lport", "outport")] {
            let matched = format!("{port} == @{GROUP}");
            ovn.nb_line(&["--type=port-group", "acl-add", GROUP, direction, DROP, &matched, "drop"])?;
        }
        ovn.settle()?;
        Ok(policy)
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

/// Packets that a device has received, or sent. A count of nftables is no use for packets that a program takes before it.
fn device_packets(node: &LabNode, device: &str, direction: &str) -> Result<u64> {
    let shown = node.host.exec("ip", &["-s", "-j", "link", "show", "dev", device])?;
    let shown: Value = serde_json::from_str(&shown)?;
    shown[0]["stats64"][direction]["packets"].as_u64().context("no statistics")
}

/// Pings for a second, and says whether the management port has received and `breth0` has sent at least as many packets. Other
/// packets of the cluster, such as health checks, are fewer.
fn host_sees(node: &LabNode, pod: &LabPod, to: IpAddr) -> Result<[bool; 2]> {
    let counters = || -> Result<[u64; 2]> {
        Ok([device_packets(node, "ovn-k8s-mp0", "rx")?, device_packets(node, "breth0", "tx")?])
    };
    let before = counters()?;
    let flow = TrafficFlow::ping(&pod.netns, to, TICK / 4)?;
    thread::sleep(100 * TICK);
    let sent = flow.finish()?.sent;
    ensure!(sent >= 50, "{sent} pings only were sent");
    let after = counters()?;
    let seen: Vec<u64> = after.iter().zip(before).map(|(after, before)| after - before).collect();
    println!("       {} sends {sent} pings to {to}: {seen:?} packets by mp0 and breth0", pod.name);
    Ok([seen[0] >= sent, seen[1] >= sent])
}

/// Counts what enters the host by the management port with the pod's address and with that of OVN's translation.
fn count_management(node: &LabNode, pod: &LabPod) -> Result<()> {
    let rules = format!(
        "table netdev seen {{ chain mp0 {{ type filter hook ingress device ovn-k8s-mp0 priority -500; policy accept;
ip saddr {} tcp sport {HTTP_PORT} counter comment \"pod\"
ip6 saddr {} tcp sport {HTTP_PORT} counter comment \"pod\"
ip saddr {NODE_PORT_V4} counter comment \"translated\"
ip6 saddr {NODE_PORT_V6} counter comment \"translated\"
}}; }}
",
        pod.addresses.v4, pod.addresses.v6
    );
    node.host.feed("nft", &["-f", "-"], &rules)
}

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
        count_management(node, pod)?;
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
        let (by_pod, translated) = (counted(node, "pod")?, counted(node, "translated")?);
        findings.equal("packets of the pod's port by the management port", &vec![0, 0], &by_pod);
        findings.note(
            translated.len() == 2 && translated.iter().all(|count| *count > 0),
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
                let server = SocketAddr::new(to, HTTP_PORT);
                let received = client::get(&pod.netns, server, "/bytes/500000", "paths")?.map(|reply| reply.body.len());
                findings
                    .note(matches!(received, Ok(500_000)), &format!("{} receives from {to}: {received:?}", pod.name));
                let sent = client::post(&pod.netns, server, &vec![b'.'; 500_000], "paths")?.map(|reply| reply.body);
                let whole = sent.as_ref().is_ok_and(|body| body == b"500000\n");
                findings.note(whole, &format!("{} sends to {to}: {:?}", pod.name, sent.as_ref().map(Vec::len)));
                if !spoilt.contains(&to) {
                    let report = datagrams(pod, to)?;
                    findings.note(report.lost() == 0, &format!("{} UDP {to}: {report:?}", pod.name));
                }
            }
        }
    }
    findings.conclude_with(capture)
}

fn datagrams(pod: &LabPod, to: IpAddr) -> Result<FlowReport> {
    let flow = TrafficFlow::udp(&pod.netns, SocketAddr::new(to, ECHO_PORT), TICK)?;
    thread::sleep(20 * TICK);
    flow.finish()
}

/// In shared gateway mode pods' packets pass neither the management port nor `breth0`, so the programs see nothing of them: a
/// selected pod keeps its node's address. A policy of the cluster's router for a pod brings it to the management port, and all
/// holds as in local gateway mode: docs/adr/0024.
fn shared_gateway(context: &LabContext) -> Result<()> {
    let cluster = served(context, HostConfig::mixed)?;
    let capture = Capture::start(&cluster.lab)?;
    let mut findings = Findings::default();
    for number in 1..=3 {
        let (node, pod) = (cluster.node(number)?, cluster.chosen(number)?);
        cluster.lab.ovn()?.share_gateway(node.number)?;
        for to in plan::SERVER.both() {
            let own = Some(node.number.address().towards(to));
            for pod in [pod, cluster.plain(number)?] {
                findings.equal(&format!("{} is seen at {to}", pod.name), &own, &seen_as(&pod.netns, to)?);
            }
        }
        for to in plan::SERVER.both() {
            let seen = host_sees(node, pod, to)?;
            findings.equal(&format!("the host has {}'s packets to {to}", pod.name), &[false; 2], &seen);
        }
    }
    for number in 1..=3 {
        let (node, pod) = (cluster.node(number)?, cluster.chosen(number)?);
        cluster.lab.ovn()?.reroute_to_host(pod)?;
        for (to, egress) in egress_ips() {
            findings.equal(
                &format!("{} with a policy is seen at {to}", pod.name),
                &Some(egress),
                &seen_as(&pod.netns, to)?,
            );
            let own = Some(node.number.address().towards(to));
            let plain = cluster.plain(number)?;
            findings.equal(&format!("{} without is seen at {to}", plain.name), &own, &seen_as(&plain.netns, to)?);
        }
        for to in plan::SERVER.both() {
            let [by_mp0, _] = host_sees(node, pod, to)?;
            findings.note(by_mp0, &format!("the host has {}'s packets to {to}", pod.name));
        }
    }
    let running = flows(&cluster, 1..=3)?;
    thread::sleep(100 * TICK);
    for (name, flow) in running {
        let report = flow.finish()?;
        findings.note(report.lost() == 0 && report.broken.is_none(), &format!("{name} by policy: {report:?}"));
    }
    findings.conclude_with(capture)
}

/// OVN-Kubernetes' own EgressIP for a pod that an object of ours selects too: OVN translates, and the host sees nothing. This is
/// why it must be off (docs/migration.md).
fn own_egress_ip(context: &LabContext) -> Result<()> {
    const OWN: Ipv4Addr = Ipv4Addr::new(172, 18, 0, 150);
    let cluster = served(context, HostConfig::mixed)?;
    let mut findings = Findings::default();
    let (node, pod, to) = (cluster.node(3)?, cluster.chosen(3)?, IpAddr::from(plan::SERVER.v4));
    findings.equal(&format!("{} is seen", pod.name), &Some(FIRST_V4), &seen_as(&pod.netns, to)?);
    findings.equal("the host has its packets", &[true; 2], &host_sees(node, pod, to)?);
    cluster.lab.ovn()?.own_egress_ip(pod, OWN)?;
    let seen = time_until("OVN translates", PATIENCE, || Ok(seen_as(&pod.netns, to)? == Some(OWN.into())));
    findings.right(&format!("{} is seen as {OWN}", pod.name), &seen);
    findings.equal("the host has its packets", &[false; 2], &host_sees(node, pod, to)?);
    findings.conclude()
}
