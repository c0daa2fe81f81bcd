//! Agents end and start again while packets flow: the programs continue alone, and the next agent adopts them.
//!
//! Constant flows of every kind run all the while from a pod whose gateway is another node, from pods on gateways, and
//! from a pod that is not selected. They count: nothing may be lost, reset or delayed for long, and what the maps hold
//! must stay. New connections are made without a running agent, too.

use super::leader::TAKE_OVER;
use crate::prelude::*;
use egress_lab::pins::Link;

const V4: &str = "172.18.0.110";
const V6: &str = "fd00:172:18::110";
/// Of datagrams and pings: what can be lost shows at this resolution.
const TICK: Duration = Duration::from_millis(10);
/// More than a busy machine takes to end a process, and less than the programs take.
const AT_ONCE: Duration = Duration::from_millis(500);
const SELECTED: [&str; 3] = ["source", "gateway4", "gateway6"];

/// Of the watches' lags.
const SEED: u64 = 2;

pub(super) fn under_traffic(context: &LabContext) -> Result<()> {
    let pods = vec![
        pod("source", "red", 1, &[]),
        pod("gateway4", "red", 2, &[]),
        pod("gateway6", "red", 3, &[]),
        pod("bystander", "blue", 1, &[]),
    ];
    let mut cluster = TestCluster::start(context, pods)?;
    cluster.lag(SEED);
    cluster.assignable(2, true)?;
    cluster.assignable(3, true)?;
    let pairs = cluster.assign(&egress_ip("restarts", &[V4, V6], &labels("house", "red"), &all()))?;
    println!("assigned: {pairs:?}");
    for name in SELECTED {
        cluster.is_seen_as(name, Some(V4), Some(V6))?;
    }
    let capture = Capture::start(&cluster.lab)?;
    let flows = start_flows(&cluster)?;
    let ended = endings(&mut cluster);
    if ended.is_err() {
        println!("{}", cluster.log_tails());
    }
    ended?;
    let (mut sent, mut gap) = (0, Duration::ZERO);
    for (name, flow) in flows {
        let report = flow.finish()?;
        sent += report.sent;
        gap = gap.max(report.longest_gap);
        let whole = report.lost() == 0 && report.duplicated == 0 && report.broken.is_none() && report.sent > 100;
        ensure!(whole, "{name}: {} of {} lost: {report:?}", report.lost(), report.sent);
    }
    println!("{sent} datagrams, pings and messages, none lost, no connection reset, longest gap {gap:?}");
    capture.finish_clean().map(drop)
}

fn start_flows(cluster: &TestCluster) -> Result<Vec<(String, TrafficFlow)>> {
    let mut flows = Vec::new();
    for pod in cluster.lab.pods() {
        for to in plan::SERVER.both() {
            let echo = SocketAddr::new(to, ECHO_PORT);
            flows.push((format!("{} UDP {to}", pod.name), TrafficFlow::udp(&pod.netns, echo, TICK)?));
            flows.push((format!("{} ping {to}", pod.name), TrafficFlow::ping(&pod.netns, to, TICK)?));
            flows.push((format!("{} TCP {to}", pod.name), TrafficFlow::tcp(&pod.netns, echo, TICK, client::PATIENCE)?));
        }
    }
    Ok(flows)
}

/// More than a reading of the ledger gives programs, and less than a leader's probe does.
const CONFIRMED: Duration = Duration::from_secs(10);

/// Each way to end, on the source node, on the gateways and everywhere at once. Each time the controller has confirmed the
/// gateways first: a reading of the ledger gives programs less (docs/adr/0017-lease-in-the-programs.md).
fn endings(cluster: &mut TestCluster) -> Result<()> {
    for nodes in [&[1][..], &[2], &[3], &[1, 2, 3]] {
        for kill in [true, false] {
            for gateway in [2, 3] {
                let pins = pins(cluster, gateway)?;
                until_true(&format!("the controller has confirmed node{gateway}"), TAKE_OVER, || {
                    Ok(pins.lease_left()? > CONFIRMED)
                })?;
            }
            restart(cluster, nodes, kill).with_context(|| format!("restart of {nodes:?}, killed: {kill}"))?;
        }
    }
    Ok(())
}

/// A start takes seconds, nearly all of them the verifier's. A stop does not wait for it, and leaves nothing.
pub(super) fn stopped_while_it_starts(context: &LabContext) -> Result<()> {
    let mut cluster = TestCluster::without_agents(context, Vec::new())?;
    let options = cluster.options(context);
    let node = cluster.lab.node(egress_lab::test_cluster::node(1)?).clone();
    let pins = AgentPins::of(&node);
    let pinned = || pins.layout().map_or(0, |folder| std::fs::read_dir(folder.join("maps")).map_or(0, Iterator::count));
    cluster.agents = vec![Agent::start(&cluster.lab, &node, &options)?];
    until_true("the maps are there, and the programs are loading", EFFECT, || Ok(pinned() > 0))?;
    let begin = Instant::now();
    let agent = cluster.agent(1)?;
    agent.terminate(AT_ONCE)?;
    println!("it ended after {} ms", begin.elapsed().as_millis());
    let log = std::fs::read_to_string(agent.log())?;
    ensure!(log.contains("stopped before the programs were loaded"), "it had started: {log}");
    ensure!(pinned() == 0, "{} maps are still pinned", pinned());
    agent.restart()?;
    cluster.serves(1)
}

/// What must outlive an agent.
struct PinnedState {
    links: Vec<Link>,
    maps: BTreeSet<u64>,
    entries: Vec<(&'static str, BTreeSet<String>)>,
}

impl PinnedState {
    fn read(cluster: &TestCluster, node: usize) -> Result<Self> {
        let pins = pins(cluster, node)?;
        let entries = ["flows", "nat", "pods", "policy", "owned", "cluster", "nodes"];
        let entries = entries.map(|map| Ok((map, pins.keys(map)?))).into_iter().collect::<Result<_>>()?;
        Ok(Self { links: pins.links()?, maps: pins.map_ids()?, entries })
    }
}

fn pins(cluster: &TestCluster, node: usize) -> Result<AgentPins> {
    Ok(AgentPins::of(cluster.lab.node(egress_lab::test_cluster::node(node)?)))
}

fn restart(cluster: &mut TestCluster, nodes: &[usize], kill: bool) -> Result<()> {
    let before = nodes.iter().map(|node| PinnedState::read(cluster, *node)).collect::<Result<Vec<_>>>()?;
    for node in nodes {
        let agent = cluster.agent(*node)?;
        if kill { agent.kill()? } else { agent.terminate(Duration::from_secs(5))? }
    }
    // No agent runs on these nodes now. New connections work all the same.
    for name in SELECTED {
        for (to, egress) in plan::SERVER.both().into_iter().zip([V4, V6]) {
            let seen = observe(&cluster.pod(name)?.netns, to)?;
            ensure!(seen == Observed::Source(egress.parse()?), "without an agent {name} is {seen}");
        }
    }
    for node in nodes {
        cluster.agent(*node)?.restart()?;
    }
    for (node, before) in nodes.iter().zip(before) {
        adopted(cluster, *node, &before)?;
    }
    Ok(())
}

/// Waits until the new agent's programs run on the old links, and compares what was kept.
fn adopted(cluster: &mut TestCluster, node: usize, before: &PinnedState) -> Result<()> {
    cluster.loaded(node)?;
    let pins = pins(cluster, node)?;
    let links = until(&format!("the new programs of node{node} run"), EFFECT, || {
        let links = pins.links()?;
        let all = links.iter().zip(&before.links).all(|(new, old)| new.program != old.program);
        Ok(all.then_some(links))
    })?;
    let same = links.iter().zip(&before.links).all(|(new, old)| new.id == old.id);
    ensure!(same, "links were recreated instead of adopted: {:?}, {links:?}", before.links);
    cluster.serves(node)?;
    let now = PinnedState::read(cluster, node)?;
    ensure!(now.maps == before.maps, "maps were recreated: {:?}, {:?}", before.maps, now.maps);
    for ((map, old), (_, new)) in before.entries.iter().zip(&now.entries) {
        let gone = old.difference(new).count();
        ensure!(gone == 0, "{gone} of {} entries of {map} are gone on node{node}", old.len());
        println!("node{node} {map}: {} entries before, {} after, none gone", old.len(), new.len());
    }
    Ok(())
}
