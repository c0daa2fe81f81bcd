//! What a user of the API fills affects this user only: Services with thousands of addresses, entries of kilobytes that are no
//! addresses. Selected pods, and pods that become selected, notice nothing.

use std::io::ErrorKind;
use std::net::{Ipv6Addr, TcpStream, UdpSocket};

use anyhow::anyhow;

use super::bad_objects::anything;
use crate::prelude::*;
use egress_lab::api_objects::condition;
use egress_lab::traffic::flows::FlowReport;

const V4: &str = "172.18.0.110";
const V6: &str = "fd00:172:18::110";
const TICK: Duration = Duration::from_millis(10);
/// Unreplied datagrams live 30 s, and near a quota a sweep takes five; the rest is the machine's.
const FORGOTTEN: Duration = Duration::from_secs(50);

/// Two selected pods, one of them on the gateway, and one that is to be.
fn cluster(context: &LabContext) -> Result<TestCluster> {
    let pods = vec![pod("well", "red", 1, &[]), pod("far", "red", 3, &[]), pod("late", "blue", 3, &[])];
    let cluster = TestCluster::start(context, pods)?;
    cluster.assignable(1, true)?;
    cluster.assignable(2, true)?;
    cluster.assign(&egress_ip("good", &[V4, V6], &labels("house", "red"), &all()))?;
    cluster.is_seen_as("well", Some(V4), Some(V6))?;
    cluster.is_seen_as("far", Some(V4), Some(V6))?;
    Ok(cluster)
}

fn flows(cluster: &TestCluster) -> Result<Vec<TrafficFlow>> {
    let mut flows = Vec::new();
    for (name, to) in ["well", "far"].into_iter().flat_map(|name| plan::SERVER.both().map(|to| (name, to))) {
        let (from, echo) = (&cluster.pod(name)?.netns, SocketAddr::new(to, ECHO_PORT));
        flows.push(TrafficFlow::udp(from, echo, TICK)?);
        flows.push(TrafficFlow::tcp(from, echo, TICK, client::PATIENCE)?);
    }
    Ok(flows)
}

/// No packet was lost, the gateways are the same, a pod that is selected now is served, and no agent has a word of refusal.
fn others_are_unaffected(cluster: &TestCluster, flows: Vec<TrafficFlow>) -> Result<()> {
    cluster.label_namespace("blue", "house", Some("red"))?;
    cluster.is_seen_as("late", Some(V4), Some(V6))?;
    let reports = flows.into_iter().map(TrafficFlow::finish).collect::<Result<Vec<FlowReport>>>()?;
    let harmed: Vec<_> = reports.iter().filter(|report| report.lost() > 0 || report.broken.is_some()).collect();
    ensure!(harmed.is_empty(), "traffic was harmed: {harmed:?}");
    println!("{} packets sent, none lost", reports.iter().map(|report| report.sent).sum::<u64>());
    for agent in &cluster.agents {
        let log = std::fs::read_to_string(agent.log())?;
        let bad =
            log.lines().find(|line| ["is full", "refuses", "cannot bring"].iter().any(|word| line.contains(word)));
        ensure!(bad.is_none(), "{}: {bad:?}", agent.node().name());
    }
    Ok(())
}

/// How many entries of a map a node's kernel has.
fn entries(cluster: &TestCluster, number: usize, map: &str) -> Result<usize> {
    let node = cluster.lab.node(egress_lab::test_cluster::node(number)?);
    Ok(AgentPins::of(node).keys(map)?.len())
}

pub(super) fn services_with_many_addresses_affect_no_others(context: &LabContext) -> Result<()> {
    const SERVICES: u32 = 70;
    const EACH: u32 = 1_000;
    let cluster = cluster(context)?;
    let (flows, before) = (flows(&cluster)?, entries(&cluster, 3, "cluster")?);
    for number in 0..SERVICES {
        let first = u32::from(Ipv4Addr::new(203, 0, 0, 0)) + number * EACH;
        let addresses: Vec<String> = (first..first + EACH).map(|address| Ipv4Addr::from(address).to_string()).collect();
        let service = json!({
            "apiVersion": "v1", "kind": "Service", "metadata": {"name": format!("s{number}"), "namespace": "blue"},
            "spec": {"clusterIP": format!("10.96.9.{number}"), "ports": [{"port": 80}], "externalIPs": addresses},
        });
        cluster.api.create("/api/v1/namespaces/blue/services", &service)?;
    }
    let expected = before + usize::try_from(SERVICES)? * 64;
    until_true("each Service has its entries", EFFECT, || Ok(entries(&cluster, 3, "cluster")? == expected))?;
    println!("{} addresses, {} entries", SERVICES * EACH, expected - before);
    let event = cluster.event("s0", "ServiceAddressesLeftOut")?;
    ensure!(event.starts_with("936 of its addresses"), "{event}");
    others_are_unaffected(&cluster, flows)
}

/// Of each object two addresses find a node: each gateway claims as many as there are objects.
pub(super) fn objects_without_pods_affect_no_others(context: &LabContext) -> Result<()> {
    const OBJECTS: u16 = 1_100;
    const EACH: u16 = 64;
    let cluster = cluster(context)?;
    let (flows, policies) = (flows(&cluster)?, entries(&cluster, 3, "policy")?);
    for object in 0..OBJECTS {
        let address = |number: u16| Ipv6Addr::new(0xfd00, 0x172, 0x18, 0, 0, 1, object, number).to_string();
        let addresses: Vec<String> = (0..EACH).map(address).collect();
        let addresses: Vec<&str> = addresses.iter().map(String::as_str).collect();
        cluster
            .api
            .create(EGRESS_IPS, &egress_ip(&format!("o{object}"), &addresses, &labels("house", "empty"), &all()))?;
    }
    println!("{} addresses", u32::from(OBJECTS) * u32::from(EACH));
    let is_assigned = |object: u16| -> Result<bool> {
        let found = cluster.api.get(&format!("{EGRESS_IPS}/o{object}"))?;
        Ok(found.is_some_and(|object| object["status"]["items"].as_array().is_some_and(|items| items.len() == 2)))
    };
    // Also while the gateways claim the addresses, a second and a probe each.
    cluster.label_namespace("blue", "house", Some("red"))?;
    cluster.is_seen_as("late", Some(V4), Some(V6))?;
    until_true("the last object has its nodes", Duration::from_secs(60), || is_assigned(OBJECTS - 1))?;
    ensure!(entries(&cluster, 3, "policy")? == policies, "objects that select no pod have entries of `policy`");
    others_are_unaffected(&cluster, flows)
}

pub(super) fn long_invalid_input_is_quoted_in_part(context: &LabContext) -> Result<()> {
    let junk: Vec<String> = (0..64).map(|number| format!("{number}{}", "x".repeat(12_000))).collect();
    let junk: Vec<&str> = junk.iter().map(String::as_str).collect();
    let object = egress_ip("junk", &junk, &labels("house", "empty"), &all());
    let pods = vec![pod("well", "red", 1, &[])];
    let cluster = TestCluster::with_crd(context, pods, 0, anything)?;
    cluster.assignable(1, true)?;
    cluster.api.create(EGRESS_IPS, &object)?;
    let path = format!("{EGRESS_IPS}/junk");
    let (reason, message) =
        until("the condition", EFFECT, || Ok(cluster.api.get(&path)?.as_ref().and_then(condition)))?;
    ensure!(reason == "InvalidEgressIP", "{reason}");
    let status = cluster.api.get(&path)?.context("no object")?["status"].to_string().len();
    println!("a condition of {} bytes, a status of {status}", message.len());
    ensure!(message.len() < 9_000 && status < 18_000 && message.contains("(12001 bytes)"), "{message}");
    let event = cluster.event("junk", "InvalidEgressIP")?;
    ensure!(event.len() <= 1_024, "an event of {} bytes", event.len());
    Ok(())
}

/// Datagrams of one pod from and to so many ports; `--nat-entries` is 262,144 and a pod's quota a quarter of it.
const TUPLES: (u16, u16) = (310, 1_000);
const QUOTA: u64 = 65_536;

/// Datagrams of the flood between two pauses: a tenth of what a CPU's backlog holds (`net.core.netdev_max_backlog`), which all
/// veth pairs of the machine share; what is lost there, no table has refused.
const BURST: u16 = 100;
/// A connection's patience: one SYN may be sent again after a second, where the machine lost it. A full table refuses all of them.
const CONNECTS: Duration = Duration::from_millis(2_500);

/// A pod on its gateway, and one elsewhere, open 310,000 flows each. In the meantime other pods of the same object, and one of
/// another object with the same gateway, open a connection every few milliseconds.
pub(super) fn flows_of_one_pod_affect_no_others(context: &LabContext) -> Result<()> {
    let others = [pod("well", "red", 1, &[]), pod("far", "red", 3, &[]), pod("other", "blue", 1, &[])];
    let floods = [pod("greedy", "red", 1, &[]), pod("greedy-far", "red", 3, &[])];
    let mut cluster = TestCluster::start(context, others.into_iter().chain(floods).collect())?;
    cluster.assignable(1, true)?;
    cluster.assign(&egress_ip("good", &[V4], &labels("house", "red"), &all()))?;
    cluster.assign(&egress_ip("second", &["172.18.0.111"], &labels("house", "blue"), &all()))?;
    for (name, address) in [("well", V4), ("far", V4), ("other", "172.18.0.111"), ("greedy", V4), ("greedy-far", V4)] {
        cluster.is_seen_as(name, Some(address), None)?;
    }
    let to = IpAddr::V4(plan::SERVER.v4);
    let (mut flows, before) = (Vec::new(), lost_by_the_machine()?);
    for name in ["well", "far", "other"] {
        flows.push(TrafficFlow::udp(&cluster.pod(name)?.netns, SocketAddr::new(to, ECHO_PORT), TICK)?);
    }
    for (name, number, counted) in [("greedy-far", 3, "flows"), ("greedy", 1, "mappings")] {
        let flooding = cluster.pod(name)?.netns.clone();
        let flood = thread::spawn(move || flooding.run(|| open_flows(to)));
        let mut connections = 0;
        while !flood.is_finished() {
            for name in ["well", "far", "other"] {
                let from = &cluster.pod(name)?.netns;
                from.run(|| Ok(TcpStream::connect_timeout(&SocketAddr::new(to, ECHO_PORT), CONNECTS).map(drop)?))
                    .with_context(|| format!("connection {connections} of {name} failed"))?;
                connections += 1;
            }
        }
        let took = flood.join().map_err(|_panic| anyhow!("the flood panicked"))??;
        println!("{name}: 310000 flows in {} ms; {connections} connections of others, none failed", took.as_millis());
        ensure!(connections > 100, "too few to say anything");
        let event = cluster.event(&format!("node{number}"), "QuotaReached")?;
        ensure!(event.contains("quota_exceeded"), "{event}");
        let count: Value =
            serde_json::from_slice(&cluster.agent(number)?.ask(&["nat", "count", "-o", "json"])?.stdout)?;
        let first = &count["holders"]["pods"][0];
        println!("nat count on node{number}: {first}");
        ensure!(first["name"] == format!("red/{name}") && count["holders"]["pod_quota"] == QUOTA, "{count:#}");
        // Each CPU may have looked before the other one has counted.
        let most = QUOTA..=QUOTA + 2;
        ensure!(first[counted].as_u64().is_some_and(|held| most.contains(&held)), "{first}");
    }
    println!("{}", String::from_utf8_lossy(&cluster.agent(1)?.ask(&["nat", "count"])?.stdout));
    let reports = flows.into_iter().map(TrafficFlow::finish).collect::<Result<Vec<FlowReport>>>()?;
    let (lost, by_the_machine) = (reports.iter().map(FlowReport::lost).sum::<u64>(), lost_by_the_machine()? - before);
    println!("{lost} datagrams of others lost; the CPUs' backlogs were full for {by_the_machine} packets of all");
    let is_whole = lost <= by_the_machine && reports.iter().all(|report| report.broken.is_none());
    ensure!(is_whole, "traffic was harmed: {reports:?}");
    for name in ["greedy", "greedy-far"] {
        let from = &cluster.pod(name)?.netns;
        let served = || Ok((observe(from, to)? == Observed::Source(V4.parse()?)).then_some(()));
        until(&format!("{name} has free entries again"), FORGOTTEN, served)?;
    }
    Ok(())
}

/// Packets that did not fit into the CPUs' backlogs: the second column of `/proc/net/softnet_stat`, in hexadecimal.
fn lost_by_the_machine() -> Result<u64> {
    let counted = std::fs::read_to_string("/proc/net/softnet_stat")?;
    let dropped = counted.lines().map(|cpu| {
        let column = cpu.split_whitespace().nth(1).context("no second column in /proc/net/softnet_stat")?;
        Ok(u64::from_str_radix(column, 16)?)
    });
    dropped.sum()
}

/// Sends a datagram by each tuple; how long it took.
fn open_flows(to: IpAddr) -> Result<Duration> {
    const FIRST: u16 = 40_000;
    let begun = Instant::now();
    for _ in 0..TUPLES.0 {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
        for port in FIRST..FIRST + TUPLES.1 {
            // Refused is for an earlier one, without a listener there.
            if let Err(error) = socket.send_to(b"one more", (to, port)) {
                ensure!(error.kind() == ErrorKind::ConnectionRefused, "{error}");
            }
            if port % BURST == 0 {
                thread::sleep(Duration::from_millis(1));
            }
        }
    }
    Ok(begun.elapsed())
}
