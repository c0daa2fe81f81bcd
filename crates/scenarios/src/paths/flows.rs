//! Which address a flow has. New flows spread over the object's addresses; a flow keeps the address that it got when
//! others come and go; and it goes with its address to another node, while the pod sends.

use super::findings::Findings;
use crate::prelude::*;
use egress_lab::capture::{CaptureKey, Seen};
use egress_lab::test_cluster::placement::{FIRST_V4, OBJECT, PATIENCE, SECOND_V4, seen_as};

pub(super) fn tests() -> Vec<LabTest> {
    vec![LabTest::new("paths_flows_keep_and_follow_their_address", Duration::from_secs(150), flows)]
}

const TICK: Duration = Duration::from_millis(5);
const THIRD_V4: IpAddr = IpAddr::V4(Ipv4Addr::new(172, 18, 0, 102));
/// Requests of each pod when the spread is counted, and the least share of an address: of 90 fair choices between two,
/// fewer than 22 are less likely than one in a million.
const REQUESTS: usize = 90;
const LEAST: usize = 22;

fn flows(context: &LabContext) -> Result<()> {
    let cluster = TestCluster::for_placement(context, HostConfig::mixed)?;
    cluster.place(&[(FIRST_V4, 1)])?;
    let capture = Capture::start(&cluster.lab)?;
    let mut findings = Findings::default();
    let old = start(&cluster.lab, 4)?;
    // Another address comes: the old flows stay, new ones spread.
    let before = capture.seen()?;
    cluster.place(&[(FIRST_V4, 1), (SECOND_V4, 2)])?;
    spread(&cluster, &[FIRST_V4, SECOND_V4], &mut findings)?;
    let elsewhere = echo_packets(&capture.seen()?, SECOND_V4) - echo_packets(&before, SECOND_V4);
    findings.equal("packets of old flows with the new address", &0, &elsewhere);
    // Flows over both addresses, then the first one moves to node 3.
    let both = start(&cluster.lab, 8)?;
    follow(&cluster, &capture, &mut findings)?;
    // The second address goes back and the third one comes: flows of the first are unaffected.
    cluster.list(OBJECT, "chosen", &[FIRST_V4, THIRD_V4])?;
    cluster.await_assignment(OBJECT, THIRD_V4, 2)?;
    let gone = || Ok(answered_as(&cluster)? == BTreeSet::from([FIRST_V4, THIRD_V4]));
    time_until("new flows have the first and the third address", PATIENCE, gone)?;
    thread::sleep(100 * TICK);
    for (name, flow) in old {
        let report = flow.finish()?;
        let what = format!(
            "{name}, begun with {FIRST_V4} alone: {} of {} came back, longest gap {:?}, {:?}",
            report.echoed, report.sent, report.longest_gap, report.broken
        );
        findings.note(report.broken.is_none() && report.lost() == 0, &what);
    }
    cut(both, &mut findings)?;
    findings.conclude_with(capture)
}

/// So many TCP flows of each chosen pod.
fn start(lab: &Lab, count: usize) -> Result<Vec<(String, TrafficFlow)>> {
    let mut flows = Vec::new();
    for pod in lab.pods().iter().filter(|pod| pod.name.starts_with("chosen")) {
        for number in 0..count {
            let to = SocketAddr::new(plan::SERVER.v4.into(), ECHO_PORT);
            let flow = TrafficFlow::tcp(&pod.netns, to, TICK, 3 * client::PATIENCE)?;
            flows.push((format!("{} TCP flow {number}", pod.name), flow));
        }
    }
    thread::sleep(20 * TICK);
    Ok(flows)
}

/// Packets of echo flows to the world with this source.
fn echo_packets(seen: &Seen, source: IpAddr) -> u64 {
    seen.packets(|key| key.source == source && key.to_port == ECHO_PORT && plan::SERVER.is(key.destination))
}

fn spread(cluster: &TestCluster, addresses: &[IpAddr], findings: &mut Findings) -> Result<()> {
    let mut counts: BTreeMap<(String, IpAddr), usize> = BTreeMap::new();
    for node in 1..=3 {
        let pod = cluster.chosen(node)?;
        let mark = cluster.access_log()?.mark();
        for _ in 0..REQUESTS {
            client::get(&pod.netns, SocketAddr::new(plan::SERVER.v4.into(), HTTP_PORT), "/", &pod.name)??;
        }
        for entry in cluster.access_log()?.since(mark).iter().filter(|entry| entry.user_agent == pod.name) {
            *counts.entry((pod.name.clone(), entry.client.ip())).or_default() += 1;
        }
        let share = |address: &IpAddr| counts.get(&(pod.name.clone(), *address)).copied().unwrap_or(0);
        let shares: Vec<usize> = addresses.iter().map(share).collect();
        let even = shares.iter().sum::<usize>() == REQUESTS && shares.iter().all(|share| *share >= LEAST);
        findings.note(even, &format!("{REQUESTS} requests of {} over {addresses:?}: {shares:?}", pod.name));
    }
    Ok(())
}

/// The first address moves from node 1 to node 3; its packets continue from there.
fn follow(cluster: &TestCluster, capture: &Capture, findings: &mut Findings) -> Result<()> {
    cluster.assignable(3, true)?;
    cluster.assignable(1, false)?;
    cluster.await_assignment(OBJECT, FIRST_V4, 3)?;
    let from = |node: &str| -> Result<u64> {
        let is_of = |key: &CaptureKey| key.port == node && key.source == FIRST_V4 && key.to_port == ECHO_PORT;
        Ok(capture.seen()?.packets(is_of))
    };
    let (begun, at_old) = (Instant::now(), from("node1")?);
    let moved = time_until("flows leave by the new node", PATIENCE, || Ok(from("node3")? > 100));
    let what = format!("{FIRST_V4} moved: {} packets by node3 within {:?}", from("node3")?, begun.elapsed());
    findings.note(moved.is_ok(), &what);
    println!("       in that time {} more by node1", from("node1")? - at_old);
    let settled = from("node1")?;
    thread::sleep(100 * TICK);
    findings.equal("packets that still leave by the old node half a second later", &0, &(from("node1")? - settled));
    Ok(())
}

/// How new flows of all chosen pods are seen.
fn answered_as(cluster: &TestCluster) -> Result<BTreeSet<IpAddr>> {
    let mut seen = BTreeSet::new();
    for node in 1..=3 {
        for _ in 0..8 {
            seen.extend(seen_as(&cluster.chosen(node)?.netns, plan::SERVER.v4.into())?);
        }
    }
    Ok(seen)
}

/// Flows that had the address which was taken from the object are cut at once; the others live.
fn cut(flows: Vec<(String, TrafficFlow)>, findings: &mut Findings) -> Result<()> {
    let mut broken = BTreeMap::new();
    let mut whole = 0;
    for (name, flow) in flows {
        let report = flow.finish()?;
        match report.broken {
            None if report.lost() == 0 => whole += 1,
            other => broken.entry(format!("{other:?}")).or_insert_with(Vec::new).push(name),
        }
    }
    let kinds: Vec<&String> = broken.keys().collect();
    let what = format!("flows over both addresses when one was taken away: {whole} live on, cut: {broken:?}");
    findings.note(whole > 0 && kinds == ["Some(ConnectionReset)"], &what);
    Ok(())
}
