//! Packets larger than the path's MTU. Redirects check no MTU, so the programs do: the sender gets an ICMP error, or the packet
//! is fragmented and arrives whole. Nothing is dropped silently. Three causes outbound:
//!
//! - a gateway here: its uplink takes 1300;
//! - a gateway elsewhere: the overlay on the source node's uplink takes 1300 - 50, or the gateway's uplink takes less.
//!
//! 1250 is less than IPv6 asks of every link: there the overlay takes 1280 all the same, and is fragmented outside. Inbound, the
//! server's 1500 meet pods that take 1400; pods announce a larger segment size (`advmss`), so that TCP meets the limit too.

use super::datagrams::{self, Answers, Exchange};
use super::findings::Findings;
use super::maps::{self, VerdictCounts};
use crate::prelude::*;
use egress_lab::test_cluster::placement::{FIRST_V4, FIRST_V6, PATIENCE};
use egress_lab::{EXT_LAN, UPLINK};

pub(super) fn tests() -> Vec<LabTest> {
    vec![LabTest::new("paths_oversize_packets_are_answered_or_arrive", Duration::from_secs(170), sizes)]
}

/// Where the outside answers with datagrams of the size that it is asked for.
const ANSWERS: u16 = 8090;
/// What uplinks take in the second half.
const NARROW: u32 = 1300;
/// Too long for pods. The overlay takes the first one in one piece, and fragments the second.
const ANSWER_SIZES: [u32; 2] = [1395, 1460];
/// Bytes of a TCP transfer, per direction.
const TRANSFER: usize = 3_000_000;

/// Node 1: no checksum offload. Node 2: as it comes. Node 3: neither checksum nor segmentation offload.
fn config(index: usize) -> HostConfig {
    HostConfig { checksum_offload: index == 1, segmentation_offload: index != 2, ..HostConfig::default() }
}

fn sizes(context: &LabContext) -> Result<()> {
    // The server leaves its checksums to a device: what is fragmented inbound must be complete before.
    let cluster = TestCluster::for_placement_on(context, LabBuilder::default().host_config(config), &[], |_| Ok(()))?;
    cluster.place(&[(FIRST_V4, 1), (FIRST_V6, 2)])?;
    let answers: Vec<Answers> = [true, false]
        .into_iter()
        .zip([ANSWERS, ANSWERS + 1])
        .flat_map(|(forbid, port)| plan::SERVER.both().map(|at| (forbid, SocketAddr::new(at, port))))
        .map(|(forbid, at)| {
            datagrams::forbid_fragments(cluster.lab.outside(), forbid)?;
            Answers::start(cluster.lab.outside(), at)
        })
        .collect::<Result<_>>()?;
    datagrams::forbid_fragments(cluster.lab.outside(), true)?;
    let capture = Capture::start(&cluster.lab)?;
    let mut findings = Findings::default();
    for node in 1..=3 {
        way_in(&cluster, cluster.chosen(node)?, &mut findings)?;
    }
    narrow(&cluster, NARROW)?;
    for node in 1..=3 {
        way_out(&cluster, cluster.chosen(node)?, &mut findings)?;
    }
    drop(answers);
    findings.conclude_with(capture)
}

/// Where the gateway of a family is, for people.
fn path(pod: &LabPod, to: IpAddr) -> &'static str {
    let gateway = if to.is_ipv4() { 0 } else { 1 };
    if pod.node.index() == gateway { "local" } else { "remote" }
}

/// Answers of 1423 and 1488 bytes, by IPv4, to a pod that takes 1400.
fn way_in(cluster: &TestCluster, pod: &LabPod, findings: &mut Findings) -> Result<()> {
    for (via, family) in [(pod.node.router().v4.to_string(), "-4"), (pod.node.router().v6.to_string(), "-6")] {
        pod.netns.exec("ip", &[family, "route", "change", "default", "via", &via, "advmss", "1460"])?;
    }
    for to in plan::SERVER.both() {
        let senders = [(ANSWERS, "DF"), (ANSWERS + 1, "no DF")];
        for (size, (port, sender)) in ANSWER_SIZES.into_iter().flat_map(|size| senders.map(|one| (size, one))) {
            datagrams::forget_paths(cluster.lab.outside())?;
            let before = counts(cluster)?;
            let talk = datagrams::ask(&pod.netns, SocketAddr::new(to, port), 100, size)?;
            let reported = datagrams::path_mtu(cluster.lab.outside(), egress(to))?;
            let name = format!("{} <- {to} ({} gateway), datagram of {size} bytes, {sender}", pod.name, path(pod, to));
            let what =
                format!("{name}: {talk:?}, server's path MTU {reported:?}, counted {:?}", grown(cluster, &before)?);
            findings.note(talk.answered_at.is_some_and(|number| number <= 2) && talk.errors.is_empty(), &what);
        }
        datagrams::forget_paths(cluster.lab.outside())?;
        transfers(cluster, pod, to, "in", findings)?;
    }
    Ok(())
}

fn egress(to: IpAddr) -> IpAddr {
    if to.is_ipv4() { FIRST_V4 } else { FIRST_V6 }
}

/// Some megabytes in each direction by TCP.
pub(super) fn transfers(
    cluster: &TestCluster,
    pod: &LabPod,
    to: IpAddr,
    when: &str,
    findings: &mut Findings,
) -> Result<()> {
    let server = SocketAddr::new(to, HTTP_PORT);
    let before = counts(cluster)?;
    let down = client::get(&pod.netns, server, &format!("/bytes/{TRANSFER}"), "sizes")?;
    let down = down.map(|reply| reply.body.len()).map_err(|error| error.kind());
    let up = client::post(&pod.netns, server, &vec![b'.'; TRANSFER], "sizes")?;
    let up = up.map(|reply| String::from_utf8_lossy(&reply.body).trim().to_owned()).map_err(|error| error.kind());
    let whole = down == Ok(TRANSFER) && up == Ok(TRANSFER.to_string());
    let name = format!("{} <-> {to} ({} gateway), TCP, narrow path {when}", pod.name, path(pod, to));
    findings.note(whole, &format!("{name}: {down:?} bytes in, {up:?} out, counted {:?}", grown(cluster, &before)?));
    Ok(())
}

/// The nodes' network becomes narrow; waits until the programs know.
pub(super) fn narrow(cluster: &TestCluster, mtu: u32) -> Result<()> {
    cluster.lab.ext().exec("ip", &["link", "set", EXT_LAN, "mtu", &mtu.to_string()])?;
    for node in cluster.lab.nodes() {
        node.host.exec("ip", &["link", "set", UPLINK, "mtu", &mtu.to_string()])?;
    }
    for node in cluster.lab.nodes() {
        time_until("the programs know the uplink's MTU", PATIENCE, || {
            let text = format!("{:?}", maps::dump(node, "config")?);
            Ok(text.contains(&format!("\"uplink_mtu\": Number({mtu})")))
        })?;
    }
    Ok(())
}

/// Pods' packets of 1400 bytes on uplinks that take 1300.
fn way_out(cluster: &TestCluster, pod: &LabPod, findings: &mut Findings) -> Result<()> {
    for to in plan::SERVER.both() {
        for (forbid, sender) in [(true, "DF"), (false, "no DF")] {
            datagrams::forbid_fragments(&pod.netns, forbid)?;
            datagrams::forget_paths(&pod.netns)?;
            let before = counts(cluster)?;
            let talk = datagrams::ask(&pod.netns, SocketAddr::new(to, ANSWERS), 1350, 100)?;
            let reported = datagrams::path_mtu(&pod.netns, to)?;
            let name = format!("{} -> {to} ({} gateway), datagram of 1350 bytes, {sender}", pod.name, path(pod, to));
            let what = format!("{name}: {talk:?}, pod's path MTU {reported:?}, counted {:?}", grown(cluster, &before)?);
            findings.note(arrives(&talk), &what);
        }
        datagrams::forbid_fragments(&pod.netns, true)?;
        datagrams::forget_paths(&pod.netns)?;
        let pong = client::ping(&pod.netns, to, Ping { size: 1340, whole: true, count: 2, ..Ping::default() })?;
        let reported = datagrams::path_mtu(&pod.netns, to)?;
        let name = format!("{} -> {to} ({} gateway), ping that may not be cut", pod.name, path(pod, to));
        ensure!(pong.received == 0, "{name} arrived: {}", pong.text);
        let least = if path(pod, to) == "local" { NARROW } else { NARROW - 70 };
        let right = reported.is_some_and(|mtu| (least..=NARROW).contains(&mtu));
        findings.note(right, &format!("{name}: the pod knows a path MTU of {reported:?}"));
        datagrams::forget_paths(&pod.netns)?;
        transfers(cluster, pod, to, "out", findings)?;
    }
    Ok(())
}

/// The first datagram may be the one that teaches the sender.
fn arrives(talk: &Exchange) -> bool {
    talk.answered_at.is_some_and(|number| number <= 3) && talk.errors.is_empty()
}

fn counts(cluster: &TestCluster) -> Result<Vec<VerdictCounts>> {
    cluster.lab.nodes().iter().map(VerdictCounts::of).collect()
}

/// What the nodes counted of sizes and drops since, all together, without the common verdicts.
fn grown(cluster: &TestCluster, before: &[VerdictCounts]) -> Result<std::collections::BTreeMap<&'static str, u64>> {
    const COMMON: [&str; 6] = ["not_ours", "not_ip", "not_pod", "to_cluster", "not_selected", "to_own_node"];
    let mut all = std::collections::BTreeMap::new();
    for (node, before) in cluster.lab.nodes().iter().zip(before) {
        for (label, packets) in VerdictCounts::of(node)?.since(before) {
            if !COMMON.contains(&label) {
                *all.entry(label).or_insert(0) += packets;
            }
        }
    }
    Ok(all)
}
