//! A rolling update, as the DaemonSet does it: node by node, the next when the agent of the last one is ready. A thousand
//! connections of pods on all nodes are kept in the meantime, through gateways here and elsewhere, and a hundred new ones are made a
//! second.

use std::io::ErrorKind;

use crate::connections::Callers;
use crate::prelude::*;
use egress_lab::test_cluster::LOADED;
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
/// The bounds of docs/operations/drain-and-upgrade.md for an update to another layout.
const GAP: Duration = Duration::from_secs(3);
/// A layout that there never was.
const OTHER: &str = "v0";

pub(super) fn lose_no_more_than_documented(context: &LabContext) -> Result<()> {
    rolls_one_by_one()?;
    let pods = NAMES.into_iter().zip(1..).map(|(name, node)| pod(name, "red", node, &[])).collect();
    let mut cluster = TestCluster::without_agents(context, pods)?;
    let mut options = cluster.options(context);
    options.extra = vec![format!("--metrics-bind-address={PAGES}")];
    cluster.agents = Agent::start_all(&cluster.lab, &options)?;
    cluster.agents_serve()?;
    cluster.assignable(2, true)?;
    cluster.assignable(3, true)?;
    let pairs = cluster.assign(&egress_ip("rolls", &[V4, V6], &labels("house", "red"), &all()))?;
    println!("assigned: {pairs:?}");
    // Node 3 begins while the API server is away. With two egress nodes, the other one would lose its lease if the leader ran on it
    // (docs/adr/0012-ledger-and-leases.md, the leader's own node); nothing moves to a third one.
    cluster.assignable(1, true)?;
    for name in NAMES {
        cluster.is_seen_as(name, Some(V4), Some(V6))?;
    }
    let capture = Capture::start(&cluster.lab)?;
    let callers = NAMES.iter().map(|name| Ok(cluster.pod(name)?.netns.clone())).collect::<Result<Vec<_>>>()?;
    let egress = [V4.parse()?, V6.parse()?];
    let connections = Callers::gather(callers, KEPT, EVERY, &plan::SERVER.both(), &egress)?;
    same_layout(&mut cluster, &connections)?;
    other_layout(&mut cluster, &connections)?;
    connections.finish()?;
    capture.finish_clean().map(drop)
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

fn same_layout(cluster: &mut TestCluster, connections: &Callers) -> Result<()> {
    let sent_again = connections.sent_again()?;
    connections.begin();
    for number in 1..=NAMES.len() {
        replace(cluster, number, |_| Ok(()))?;
    }
    let report = connections.settled();
    let sent_again = connections.sent_again()? - sent_again;
    println!("the same layout: {report:?}, {sent_again} segments sent again");
    report.ensure_nothing_lost(sent_again)
}

/// Each node as an agent of another version has left it: the same programs on the same hooks, by a directory of another name.
fn other_layout(cluster: &mut TestCluster, connections: &Callers) -> Result<()> {
    // One begins while the API server is away.
    (1..=NAMES.len()).try_for_each(|number| other_layout_on(cluster, number, connections, number == NAMES.len()))
}

fn other_layout_on(cluster: &mut TestCluster, number: usize, connections: &Callers, waits: bool) -> Result<()> {
    connections.begin();
    replace(cluster, number, |cluster| {
        let former = AgentPins::of(cluster.lab.node(node(number)?)).layout()?;
        std::fs::rename(&former, former.with_file_name(OTHER))
            .with_context(|| format!("rename {}", former.display()))?;
        if waits { waits_for_the_api_server(cluster, number, connections) } else { Ok(()) }
    })?;
    let layout = AgentPins::of(cluster.lab.node(node(number)?)).layout()?;
    ensure!(!layout.ends_with(OTHER), "the pins of before are still there");
    let report = connections.settled();
    println!("another layout on node{number}: {report:?}");
    ensure!(report.strange == 0, "{} new connections had another address", report.strange);
    ensure!(report.ended_alone == 0, "{} connections ended without a cause", report.ended_alone);
    ensure!(report.failing_for < GAP, "new connections failed for {:?}", report.failing_for);
    Ok(())
}

/// The former programs continue in the meantime.
fn waits_for_the_api_server(cluster: &mut TestCluster, number: usize, connections: &Callers) -> Result<()> {
    if cluster.api.in_memory().is_none() {
        println!("only the lab's own API server can be made to go away");
        return Ok(());
    }
    cluster.set_outage(true)?;
    cluster.agent(number)?.restart()?;
    until_logged(cluster.agent(number)?.log(), &["waiting for the API server"], 1, LOADED)?;
    let report = connections.settled();
    println!("while it waits: {report:?}");
    ensure!(report.calls > 50 && report.failed_alone == 0, "something is lost: {report:?}");
    let layout = AgentPins::of(cluster.lab.node(node(number)?)).layout()?;
    ensure!(layout.ends_with(OTHER), "it has begun");
    cluster.set_outage(false)
}

/// Ends the agent and starts the next one, which is waited for.
fn replace(
    cluster: &mut TestCluster,
    number: usize,
    in_between: impl FnOnce(&mut TestCluster) -> Result<()>,
) -> Result<()> {
    let begin = Instant::now();
    cluster.agent(number)?.terminate(Duration::from_secs(10))?;
    in_between(cluster)?;
    if cluster.agent(number)?.pid()?.is_none() {
        cluster.agent(number)?.restart()?;
    }
    is_ready(cluster, number)?;
    println!("node{number} has a new agent after {} ms", begin.elapsed().as_millis());
    Ok(())
}

fn is_ready(cluster: &mut TestCluster, number: usize) -> Result<()> {
    let host = cluster.lab.node(node(number)?).host.clone();
    until(&format!("node{number} is ready"), LOADED, || {
        cluster.agent(number)?.ensure_alive()?;
        match client::get(&host, PAGES, "/readyz", "kubelet")? {
            Ok(reply) => Ok((reply.status == 200).then_some(())),
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => Ok(None),
            Err(error) => Err(error).context("the page of an agent"),
        }
    })
}
