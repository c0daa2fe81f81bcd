//! A rolling update, as the DaemonSet does it: node by node, the next when the agent of the last one is ready. A thousand
//! connections of pods on all nodes are kept meanwhile, through gateways here and elsewhere, and a hundred new ones are made a
//! second.

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::crowd::{Crowd, PATIENCE, Report};
use egress_lab::agents::Agent;
use egress_lab::api_objects::{all, egress_ip, labels};
use egress_lab::capture::{Capture, Class};
use egress_lab::pins::Pins;
use egress_lab::test::LabContext;
use egress_lab::test_cluster::{Ground, LOADED, node, pod};
use egress_lab::traffic::client;
use egress_lab::wait::until;
use egress_toolchain::Paths;

const V4: &str = "172.18.0.110";
const V6: &str = "fd00:172:18::110";
const NAMES: [&str; 3] = ["source", "gateway4", "gateway6"];
/// Of each pod; more than a thousand of all.
const KEPT: usize = 334;
/// Of each pod; a hundred a second of all.
const EVERY: Duration = Duration::from_millis(30);
/// Where the agents serve their pages, each on its own node.
const PAGES: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 9477);
/// A connection whose echo has taken longer has stalled. A segment that is lost is sent again after a fifth of it.
const STALLED: Duration = Duration::from_secs(1);
/// What docs/operations/drain-and-upgrade.md says of an update to another layout.
const GAP: Duration = Duration::from_secs(3);
/// A layout that there never was.
const OTHER: &str = "v0";

pub(super) fn lose_no_more_than_is_said(context: &LabContext) -> Result<()> {
    rolls_one_by_one()?;
    let pods = NAMES.into_iter().zip(1..).map(|(name, node)| pod(name, "red", node, &[])).collect();
    let mut ground = Ground::without_agents(context, pods, 0, |_| {})?;
    let mut options = ground.options(context);
    options.extra = vec![format!("--metrics-bind-address={PAGES}")];
    ground.agents = Agent::start_all(&ground.lab, &options)?;
    ground.agents_serve()?;
    ground.assignable(2, true)?;
    ground.assignable(3, true)?;
    let pairs = ground.assign(&egress_ip("rolls", &[V4, V6], &labels("house", "red"), &all()))?;
    println!("assigned: {pairs:?}");
    for name in NAMES {
        ground.is_seen_as(name, Some(V4), Some(V6))?;
    }
    let capture = Capture::start(&ground.lab)?;
    let callers = NAMES.iter().map(|name| ground.pod(name)).collect::<Result<Vec<_>>>()?;
    let crowd = Crowd::gather(&callers, KEPT, EVERY, [V4.parse()?, V6.parse()?])?;
    same_layout(&mut ground, &crowd)?;
    other_layout(&mut ground, &crowd)?;
    crowd.disperse()?;
    let seen = capture.finish()?;
    seen.check()?;
    ensure!(seen.to_the_world(Class::Pod) == 0, "a pod's address went out");
    Ok(())
}

/// What is played here is what the DaemonSet asks for, but that it waits still longer between two nodes.
fn rolls_one_by_one() -> Result<()> {
    let text = std::fs::read_to_string(Paths::find()?.root.join("deploy/base/daemonset.yaml"))?;
    let object: Value = serde_yaml::from_str(&text)?;
    let update = &object["spec"]["updateStrategy"]["rollingUpdate"];
    ensure!(update["maxUnavailable"] == 1 && update["maxSurge"] == 0, "nodes are not updated one by one: {update}");
    let probe = &object["spec"]["template"]["spec"]["containers"][0]["readinessProbe"]["httpGet"];
    ensure!(probe["path"] == "/readyz" && probe["port"] == PAGES.port(), "readiness is asked elsewhere: {probe}");
    Ok(())
}

fn same_layout(ground: &mut Ground, crowd: &Crowd) -> Result<()> {
    let sent_again = crowd.sent_again()?;
    crowd.begin();
    for number in 1..=NAMES.len() {
        replace(ground, number, |_| Ok(()))?;
    }
    let report = settled(crowd);
    let sent_again = crowd.sent_again()? - sent_again;
    println!("the same layout: {report:?}, {sent_again} segments sent again");
    ensure!(report.kept > 1_000 && report.echoes > report.kept as u64, "too few to say anything: {report:?}");
    ensure!(report.ended == 0, "{} of {} connections ended", report.ended, report.kept);
    ensure!(report.slowest < STALLED, "a connection stalled for {:?}", report.slowest);
    ensure!(report.calls > 100 && report.failed == 0, "{} of {} new connections failed", report.failed, report.calls);
    ensure!(report.strange == 0, "{} new connections had another address", report.strange);
    // A machine that is late makes a kernel send again what is not lost. A gap of a hundredth of a second would be more.
    ensure!(sent_again < 10, "{sent_again} segments were sent again");
    Ok(())
}

/// Each node as an agent of another version has left it: the same programs on the same hooks, by a directory of another name.
fn other_layout(ground: &mut Ground, crowd: &Crowd) -> Result<()> {
    // One begins while the API server is away.
    (1..=NAMES.len()).try_for_each(|number| other_layout_on(ground, number, crowd, number == NAMES.len()))
}

fn other_layout_on(ground: &mut Ground, number: usize, crowd: &Crowd, waits: bool) -> Result<()> {
    crowd.begin();
    replace(ground, number, |ground| {
        let former = Pins::of(ground.lab.node(node(number)?)).layout()?;
        std::fs::rename(&former, former.with_file_name(OTHER))
            .with_context(|| format!("rename {}", former.display()))?;
        if waits { waits_for_the_api_server(ground, number, crowd) } else { Ok(()) }
    })?;
    let layout = Pins::of(ground.lab.node(node(number)?)).layout()?;
    ensure!(!layout.ends_with(OTHER), "the pins of before are still there");
    let report = settled(crowd);
    println!("another layout on node{number}: {report:?}");
    ensure!(report.strange == 0, "{} new connections had another address", report.strange);
    ensure!(report.ended_alone == 0, "{} connections ended without a cause", report.ended_alone);
    ensure!(report.failing_for < GAP, "new connections failed for {:?}", report.failing_for);
    Ok(())
}

/// The former programs go on meanwhile.
fn waits_for_the_api_server(ground: &mut Ground, number: usize, crowd: &Crowd) -> Result<()> {
    if ground.cluster.in_memory().is_none() {
        println!("only the lab's own API server can be made to go away");
        return Ok(());
    }
    let set_outage =
        |ground: &Ground, is_out| ground.cluster.in_memory().into_iter().for_each(|server| server.set_outage(is_out));
    set_outage(ground, true);
    ground.agent(number)?.restart()?;
    let log = ground.agent(number)?.log().to_owned();
    until("it waits for the API server", LOADED, || {
        Ok(std::fs::read_to_string(&log)?.contains("waiting for the API server").then_some(()))
    })?;
    let report = settled(crowd);
    println!("while it waits: {report:?}");
    ensure!(report.calls > 50 && report.failed == 0, "something is lost: {report:?}");
    let layout = Pins::of(ground.lab.node(node(number)?)).layout()?;
    ensure!(layout.ends_with(OTHER), "it has begun");
    set_outage(ground, false);
    Ok(())
}

/// When all new connections have been answered, or have failed.
fn settled(crowd: &Crowd) -> Report {
    sleep(PATIENCE);
    crowd.report()
}

/// Ends the agent and starts the next one, which is waited for.
fn replace(ground: &mut Ground, number: usize, meanwhile: impl FnOnce(&mut Ground) -> Result<()>) -> Result<()> {
    let begin = Instant::now();
    ground.agent(number)?.terminate(Duration::from_secs(10))?;
    meanwhile(ground)?;
    if ground.agent(number)?.pid()?.is_none() {
        ground.agent(number)?.restart()?;
    }
    is_ready(ground, number)?;
    println!("node{number} has a new agent after {} ms", begin.elapsed().as_millis());
    Ok(())
}

fn is_ready(ground: &mut Ground, number: usize) -> Result<()> {
    let host = ground.lab.node(node(number)?).host.clone();
    until(&format!("node{number} is ready"), LOADED, || {
        ground.agent(number)?.ensure_alive()?;
        match client::get(&host, PAGES, "/readyz", "kubelet")? {
            Ok(reply) => Ok((reply.status == 200).then_some(())),
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => Ok(None),
            Err(error) => Err(error).context("the page of an agent"),
        }
    })
}
