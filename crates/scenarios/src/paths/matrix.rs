//! Every protocol, family and gateway, with nothing but software to make checksums: on nodes whose checksum offload is
//! off each packet on the wire must be right as it stands, and the server must have seen the egress IP.

use super::findings::Findings;
use super::{maps, other_tc_program, stateful};
use crate::prelude::*;
use egress_lab::test_cluster::placement::{FIRST_V4, FIRST_V6};

pub(super) fn tests() -> Vec<LabTest> {
    let timeout = Duration::from_secs(90);
    vec![
        LabTest::new("paths_protocols_and_families_have_right_checksums", timeout, matrix),
        LabTest::new("", timeout, matrix).on_a_bridge("bridge_protocols_and_families_have_right_checksums"),
        LabTest::new("paths_by_clsact_filters", 2 * timeout, by_filters),
    ]
}

const TICK: Duration = Duration::from_millis(5);
/// Odd, so that a sum ends in half a word.
const BYTES: usize = 100_001;
/// ICMP payloads: nothing, odd, and a whole packet.
const PINGS: [u32; 3] = [0, 57, 1300];

fn builder(context: &LabContext) -> LabBuilder {
    let cni = context.cni;
    let config = move |index| HostConfig {
        cni,
        checksum_offload: false,
        segmentation_offload: index != 1,
        ..HostConfig::default()
    };
    LabBuilder::default().host_config(config).server_without_checksum_offload()
}

fn matrix(context: &LabContext) -> Result<()> {
    let cluster = TestCluster::for_placement_on(context, builder(context), &[], |_| Ok(()))?;
    let mut findings = Findings::default();
    walk(&cluster, &mut findings)?;
    findings.conclude()
}

/// The same by filters, as on a kernel without links; and a foreign program after ours.
fn by_filters(context: &LabContext) -> Result<()> {
    let cluster = TestCluster::for_placement_on(context, builder(context), &["--attach=clsact"], |_| Ok(()))?;
    let mut findings = Findings::default();
    walk(&cluster, &mut findings)?;
    for node in cluster.lab.nodes() {
        findings.equal(&format!("{}: pinned links", node.name()), &0, &maps::pinned_links(node)?);
        let mut ours = 0;
        for (device, direction) in other_tc_program::HOOKS {
            let shown = node.host.exec("tc", &["filter", "show", "dev", device, direction])?;
            ours += shown.matches("direct-action").count();
        }
        findings.equal(&format!("{}: filters on {} hooks", node.name(), other_tc_program::HOOKS.len()), &4, &ours);
    }
    stateful::second_programs(&cluster, &mut findings)?;
    findings.conclude()
}

fn walk(cluster: &TestCluster, findings: &mut Findings) -> Result<()> {
    cluster.place(&[(FIRST_V4, 1), (FIRST_V6, 2)])?;
    let capture = Capture::start(&cluster.lab)?;
    for node in 1..=3 {
        for (to, egress) in plan::SERVER.both().into_iter().zip([FIRST_V4, FIRST_V6]) {
            let gateway = if to.is_ipv4() { 1 } else { 2 };
            let path = if node == gateway { "local" } else { "remote" };
            cell(cluster, cluster.chosen(node)?, to, egress, path, findings)?;
        }
    }
    let seen = capture.finish()?;
    for class in [AddressKind::Egress, AddressKind::Node, AddressKind::Pod] {
        println!("       packets to the world with a {class:?} address: {}", seen.to_the_world(class));
    }
    findings.equal("packets outside with a pod's or a node's address", &0, &{
        seen.to_the_world(AddressKind::Pod) + seen.to_the_world(AddressKind::Node)
    });
    let complete: u64 = seen.tallies.values().map(|tally| tally.complete).sum();
    findings.right(&format!("{complete} checksums, all complete, in {} frames", seen.frames), &seen.check());
    Ok(())
}

/// TCP in both directions, UDP and echo of one pod over one family.
fn cell(
    cluster: &TestCluster,
    pod: &LabPod,
    to: IpAddr,
    egress: IpAddr,
    path: &str,
    findings: &mut Findings,
) -> Result<()> {
    let mark = cluster.access_log()?.mark();
    let udp = TrafficFlow::udp(&pod.netns, SocketAddr::new(to, ECHO_PORT), TICK)?;
    let http = SocketAddr::new(to, HTTP_PORT);
    let down = client::get(&pod.netns, http, &format!("/bytes/{BYTES}"), &pod.name)??.body.len();
    let up = client::post(&pod.netns, http, &vec![b'.'; BYTES], &pod.name)??.body;
    let mut pongs = 0;
    for size in PINGS {
        pongs += client::ping(&pod.netns, to, Ping { size, ..Ping::default() })?.received;
    }
    let report = udp.finish()?;
    let entries = cluster.access_log()?.since(mark);
    let callers = entries.iter().filter(|entry| entry.client.ip() == egress).count();
    let whole = down == BYTES && up == format!("{BYTES}\n").into_bytes() && report.lost() == 0 && report.sent > 0;
    let what = format!(
        "{} -> {to}, {path} gateway: TCP {down} bytes in, {BYTES} out; UDP {} of {}; {pongs} of {} pings; \
         {callers} of {} callers seen as {egress}",
        pod.name,
        report.echoed,
        report.sent,
        PINGS.len(),
        entries.len()
    );
    findings.note(whole && usize::try_from(pongs)? == PINGS.len() && callers == entries.len() && callers == 3, &what);
    Ok(())
}
