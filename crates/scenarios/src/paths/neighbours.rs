//! Who answers for an egress IP on the nodes' network, and who learns of a move.
//!
//! A neighbour with an empty cache asks by broadcast (ARP) or by the solicited-node group (NS); a macvlan uplink filters
//! that group unless the agent has joined it. Answers come from the programs, so they do not need a living agent. After
//! a move, a neighbour that knew the old node must hear of the new one by itself: gratuitous ARP, unsolicited NA.

use super::findings::Findings;
use crate::prelude::*;
use egress_lab::test_cluster::placement::{FIRST_V4, FIRST_V6, OBJECT, PATIENCE, SECOND_V4, seen_as};
use egress_lab::{EXT_LAN, UPLINK};

pub(super) fn tests() -> Vec<LabTest> {
    let timeout = Duration::from_secs(120);
    vec![LabTest::new("paths_neighbours_find_and_follow_addresses", timeout, neighbours)]
}

/// A neighbour asks for so long (three times, a second apart) before it gives up.
const ASKS: Duration = Duration::from_secs(5);
/// How soon a neighbour must know the new node once the address is assigned there.
const SOON: Duration = Duration::from_secs(3);

fn neighbours(context: &LabContext) -> Result<()> {
    // All uplinks filter multicast.
    let mut cluster =
        TestCluster::for_placement(context, |_| HostConfig { macvlan_uplink: true, ..HostConfig::default() })?;
    cluster.place(&[(FIRST_V4, 1), (FIRST_V6, 2)])?;
    let capture = Capture::start(&cluster.lab)?;
    let mut findings = Findings::default();
    for (address, node) in [(FIRST_V4, 1), (FIRST_V6, 2)] {
        found(&cluster, address, node, "with its agent", &mut findings)?;
    }
    for agent in &mut cluster.agents {
        agent.kill()?;
    }
    for (address, node) in [(FIRST_V4, 1), (FIRST_V6, 2)] {
        found(&cluster, address, node, "with its agent killed", &mut findings)?;
    }
    for agent in &mut cluster.agents {
        agent.restart()?;
    }
    for (address, node) in [(FIRST_V4, 1), (FIRST_V6, 2)] {
        found(&cluster, address, node, "with its agent restarted", &mut findings)?;
    }
    moved(&cluster, &capture, &mut findings)?;
    findings.conclude()
}

/// The link address that a neighbour knows for an address.
fn known(neighbour: &Netns, address: IpAddr) -> Result<Option<String>> {
    let text = neighbour.exec("ip", &["neigh", "show", &address.to_string()])?;
    let mut words = text.split_whitespace().skip_while(|word| *word != "lladdr");
    Ok(words.nth(1).map(str::to_owned))
}

fn link_address(host: &Netns) -> Result<String> {
    let text = host.exec("ip", &["-o", "link", "show", UPLINK])?;
    let mut words = text.split_whitespace().skip_while(|word| *word != "link/ether");
    words.nth(1).map(str::to_owned).context("the uplink has no link address")
}

/// `ext` forgets its neighbours and finds the address again, asked for by a pod's reply.
fn found(cluster: &TestCluster, address: IpAddr, node: usize, when: &str, findings: &mut Findings) -> Result<()> {
    let ext = cluster.lab.ext();
    let expected = link_address(&cluster.node(node)?.host)?;
    let to = plan::SERVER.both().into_iter().find(|to| to.is_ipv4() == address.is_ipv4()).context("no server")?;
    ext.exec("ip", &["neigh", "flush", "all"])?;
    ext.output("ip", &["neigh", "del", &address.to_string(), "dev", EXT_LAN])?;
    let forgotten = known(ext, address)?.is_none();
    let pod = cluster.chosen(3)?;
    let mut seen = None;
    let after = time_until("the address is found", ASKS, || {
        seen = client::get(&pod.netns, SocketAddr::new(to, 8080), "/", "paths")?.ok();
        Ok(seen.is_some())
    });
    let seen = seen.map(|reply| reply.seen_as()).transpose()?;
    let mac = known(ext, address)?;
    let what =
        format!("{address} {when}: forgotten {forgotten}, pod seen as {seen:?} after {after:?}, found at {mac:?}");
    findings.note(forgotten && seen == Some(address) && mac == Some(expected), &what);
    Ok(())
}

/// Both addresses go to node 3, while pods talk; `ext` had cached the old nodes.
fn moved(cluster: &TestCluster, capture: &Capture, findings: &mut Findings) -> Result<()> {
    let ext = cluster.lab.ext();
    // Node 3 takes the one that is moved first, node 1 the other.
    for (address, from, to) in [(FIRST_V6, 2, 3), (FIRST_V4, 1, 2)] {
        let server = plan::SERVER.towards(address);
        seen_as(&cluster.chosen(3)?.netns, server)?;
        let old = known(ext, address)?;
        findings.equal(&format!("{address} before the move"), &Some(link_address(&cluster.node(from)?.host)?), &old);
        let flow = TrafficFlow::tcp(
            &cluster.chosen(3)?.netns,
            SocketAddr::new(server, ECHO_PORT),
            TICK,
            3 * client::PATIENCE,
        )?;
        thread::sleep(20 * TICK);
        cluster.assignable(to, true)?;
        cluster.assignable(from, false)?;
        cluster.await_assignment(OBJECT, address, to)?;
        let expected = link_address(&cluster.node(to)?.host)?;
        let after = time_until("the neighbour knows the new node", SOON, || {
            Ok(known(ext, address)?.as_ref() == Some(&expected))
        });
        findings.right(&format!("{address} at node{to}: ext learned it after the status said so, by"), &after);
        thread::sleep(50 * TICK);
        let report = flow.finish()?;
        let what = format!(
            "TCP flow over the move of {address}: {} of {} came back, longest gap {:?}, {:?}",
            report.echoed, report.sent, report.longest_gap, report.broken
        );
        findings.note(report.lost() == 0 && report.broken.is_none(), &what);
    }
    let claims = capture.seen()?.claims;
    for node in 1..=3 {
        let count = claims.get(&(format!("node{node}"), FIRST_V4)).copied().unwrap_or(0);
        println!("       node{node} claimed {FIRST_V4} {count} times by ARP");
    }
    // A new address is announced too: no host asked for it before.
    cluster.assignable(1, true)?;
    cluster.list(OBJECT, "chosen", &[FIRST_V4, FIRST_V6, SECOND_V4])?;
    cluster.await_assignment(OBJECT, SECOND_V4, 1)?;
    let claimed =
        || -> Result<u64> { Ok(capture.seen()?.claims.get(&("node1".to_owned(), SECOND_V4)).copied().unwrap_or(0)) };
    let announced = time_until("the new address is announced", PATIENCE, || Ok(claimed()? > 0));
    findings.note(announced.is_ok(), &format!("{SECOND_V4} is new on node1: announced {} times by ARP", claimed()?));
    Ok(())
}

const TICK: Duration = Duration::from_millis(10);
