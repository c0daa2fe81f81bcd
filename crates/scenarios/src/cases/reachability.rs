//! What the leader makes of nodes and agents that do not answer: a node that is cut off, or that has lost its uplink, loses
//! its addresses within moments; one whose agent alone is silent, or that only the CNI's network has lost, keeps them.

use super::leader::leader;
use super::senders::Senders;
use crate::prelude::*;
use egress_lab::api_objects::LEASE;
use egress_lab::cut::NetworkCut;
use egress_lab::wait::FAIL_OVER;

const ADDRESS: &str = "172.18.0.110";
const TUNNEL_PORT: u16 = 4794;
const NAMES: [&str; 3] = ["one", "two", "three"];
/// Several times what a silent node has.
const PROOF: Duration = Duration::from_secs(4);
/// For what an agent says some time after it has started, on a slow machine.
const PATIENCE: Duration = Duration::from_secs(20);
/// A request that takes longer has failed: where the moment counts in which the next one is answered, and where none may.
const MOMENT: Duration = Duration::from_millis(100);
const WHILE: Duration = Duration::from_millis(900);

/// The lab, and its nodes by what they do: one that leads and hosts nothing, one with the address, one that could take it.
struct ReachabilityTest {
    cluster: TestCluster,
    leader: usize,
    gateway: usize,
    new_owner: usize,
    /// The pod on the leader's node.
    source: &'static str,
}

/// One and a half times what docs/operations/measured-faults.md publishes. An election that waits for the Lease takes as long.
const SOON: Duration = Duration::from_millis(3_000);

/// The leading controller's node, which is a gateway too: power and network gone.
pub(super) fn leader_loses_its_node(context: &LabContext) -> Result<()> {
    let pods = NAMES.iter().zip(1..).map(|(name, number)| pod(name, "red", number, &[])).collect();
    let cluster = TestCluster::start(context, pods)?;
    let gateway = leader(&cluster)?;
    let (new_owner, source) = (gateway % 3 + 1, NAMES[(gateway + 1) % 3]);
    cluster.assignable(gateway, true)?;
    cluster.assign(&egress_ip("held", &[ADDRESS], &labels("house", "red"), &all()))?;
    cluster.assignable(new_owner, true)?;
    cluster.is_seen_as(source, Some(ADDRESS), None)?;
    // A node whose lease has had no end says so first that it has one now.
    std::thread::sleep(PROOF);
    let senders = Senders::watch(&cluster, ADDRESS, &[source])?;
    senders.begins(gateway, EFFECT)?;
    println!("node{gateway} leads, has the address and loses power");
    let cut = Instant::now();
    cluster.lab.set_power(cluster.lab.node(node(gateway)?), false)?;
    moves_within(SOON, &cluster, source, (gateway, cut))?;
    ensure!(leader(&cluster)? != gateway, "node{gateway} leads still");
    println!("it is back, and nothing moves");
    cluster.lab.set_power(cluster.lab.node(node(gateway)?), true)?;
    stays(&cluster, new_owner, source)?;
    senders.were(&[gateway, new_owner])
}

fn start(context: &LabContext) -> Result<ReachabilityTest> {
    let pods = NAMES.iter().zip(1..).map(|(name, number)| pod(name, "red", number, &[])).collect();
    let cluster = TestCluster::start(context, pods)?;
    let leader = leader(&cluster)?;
    let (gateway, new_owner) = (leader % 3 + 1, (leader + 1) % 3 + 1);
    cluster.assignable(gateway, true)?;
    cluster.assign(&egress_ip("held", &[ADDRESS], &labels("house", "red"), &all()))?;
    cluster.assignable(new_owner, true)?;
    for name in NAMES {
        cluster.is_seen_as(name, Some(ADDRESS), None)?;
    }
    println!("node{leader} leads, node{gateway} has the address");
    Ok(ReachabilityTest { cluster, leader, gateway, new_owner, source: NAMES[leader - 1] })
}

fn is_seen(cluster: &TestCluster, name: &str, patience: Duration) -> Result<bool> {
    let to = SocketAddr::new(plan::SERVER.v4.into(), HTTP_PORT);
    let reply = client::get_within(&cluster.pod(name)?.netns, to, "/", "reachability", patience)?;
    let address: IpAddr = ADDRESS.parse()?;
    Ok(match reply {
        Ok(reply) => reply.seen_as()? == address,
        Err(_) => false,
    })
}

/// Until requests of this pod are answered again, from the moment of the cut.
fn moves(cluster: &TestCluster, name: &str, (gateway, cut): (usize, Instant)) -> Result<()> {
    moves_within(FAIL_OVER, cluster, name, (gateway, cut))
}

fn moves_within(patience: Duration, cluster: &TestCluster, name: &str, (gateway, cut): (usize, Instant)) -> Result<()> {
    let old = format!("node{gateway}");
    let mut lost = false;
    let back = loop {
        let begin = Instant::now();
        let seen = is_seen(cluster, name, MOMENT)?;
        lost |= !seen;
        if seen && lost {
            break begin;
        }
        ensure!(cut.elapsed() < patience, "{name} has not come back within {patience:?}");
        std::thread::sleep(Duration::from_millis(10));
    };
    println!("{name} is served again {} ms after the cut", back.duration_since(cut).as_millis());
    ensure!(cluster.holder("held")? != old, "the address is still on {old}");
    Ok(())
}

fn stays(cluster: &TestCluster, gateway: usize, name: &str) -> Result<()> {
    let end = Instant::now() + PROOF;
    let (mut asked, mut failed) = (0, 0);
    while Instant::now() < end {
        asked += 1;
        failed += u32::from(!is_seen(cluster, name, WHILE)?);
        std::thread::sleep(Duration::from_millis(10));
    }
    println!("{name}: {asked} requests, {failed} failed");
    ensure!(failed == 0, "{failed} of {asked} requests of {name} have failed");
    let holder = cluster.holder("held")?;
    ensure!(holder == format!("node{gateway}"), "the address has gone to {holder}");
    Ok(())
}

/// A node without any cable, then one whose uplink alone is cut.
pub(super) fn cut_off_nodes_lose_their_addresses(context: &LabContext) -> Result<()> {
    let ReachabilityTest { cluster, gateway, new_owner, source, .. } = start(context)?;
    println!("node{gateway} is cut off");
    let cut = Instant::now();
    cluster.lab.set_power(cluster.lab.node(node(gateway)?), false)?;
    moves(&cluster, source, (gateway, cut))?;
    cluster.lab.set_power(cluster.lab.node(node(gateway)?), true)?;
    println!("it is back, and nothing moves");
    stays(&cluster, new_owner, source)?;

    println!("the uplink of node{new_owner} is cut");
    let cut = Instant::now();
    cluster.lab.lan().exec("ip", &["link", "set", &format!("node{new_owner}"), "down"])?;
    moves(&cluster, source, (new_owner, cut))
}

/// The uplink is back the moment that another node serves: what has waited there for its next hop bears an address that is
/// not this node's any more.
pub(super) fn links_that_are_back_send_nothing_by_an_address_that_has_moved(context: &LabContext) -> Result<()> {
    let ReachabilityTest { cluster, gateway, new_owner, .. } = start(context)?;
    let port = format!("node{gateway}");
    let senders = Senders::watch(&cluster, ADDRESS, &NAMES)?;
    senders.begins(gateway, EFFECT)?;
    println!("the uplink of node{gateway} is cut");
    cluster.lab.lan().exec("ip", &["link", "set", &port, "down"])?;
    senders.begins(new_owner, FAIL_OVER)?;
    cluster.lab.lan().exec("ip", &["link", "set", &port, "up"])?;
    println!("it is back");
    senders.were(&[gateway, new_owner])
}

/// Both others at once, seen by a leader that could be what is cut off, and is not.
pub(super) fn nodes_that_die_together_lose_their_addresses(context: &LabContext) -> Result<()> {
    let ReachabilityTest { mut cluster, leader, gateway, new_owner, source } = start(context)?;
    cluster.assignable(leader, true)?;
    cluster.serves(leader)?;
    // The leader has to know the path on which it would miss them.
    std::thread::sleep(PROOF);
    println!("node{gateway} and node{new_owner} lose power");
    let cut = Instant::now();
    for number in [gateway, new_owner] {
        cluster.lab.set_power(cluster.lab.node(node(number)?), false)?;
    }
    moves(&cluster, source, (gateway, cut))?;
    ensure!(cluster.holder("held")? == format!("node{leader}"), "the address is on {}", cluster.holder("held")?);
    println!("they are back, and nothing moves");
    for number in [gateway, new_owner] {
        cluster.lab.set_power(cluster.lab.node(node(number)?), true)?;
    }
    stays(&cluster, leader, source)
}

/// The node of the leader is cut from the other nodes alone: the API server and its next hop answer, and it could take all
/// others for lost. The other controller hears them.
pub(super) fn leader_that_hears_no_node_lets_another_lead(context: &LabContext) -> Result<()> {
    let ReachabilityTest { mut cluster, leader: former, gateway, .. } = start(context)?;
    cluster.assignable(former, true)?;
    cluster.serves(former)?;
    // The leader has to know the path on which it would miss them.
    std::thread::sleep(PROOF);
    let (well, senders) = (NAMES[gateway - 1], Senders::watch(&cluster, ADDRESS, &NAMES)?);
    println!("node{former} leads and is cut from the other nodes");
    let cut = Instant::now();
    cluster.lab.cut(&NetworkCut::Nodes(node(former)?))?;
    let mut last_failure = cut;
    while last_failure.elapsed() < PROOF {
        if !is_seen(&cluster, well, MOMENT)? {
            last_failure = Instant::now();
        }
        ensure!(cut.elapsed() < STEPS_DOWN + PROOF, "{well} is not served while node{former} is cut");
    }
    println!("{well} was not served for up to {} ms", last_failure.duration_since(cut).as_millis());
    ensure!(leader(&cluster)? != former, "node{former} leads still");
    ensure!(cluster.holder("held")? == format!("node{gateway}"), "the address is on {}", cluster.holder("held")?);
    cluster.lab.mend(&NetworkCut::Nodes(node(former)?))?;
    stays(&cluster, gateway, NAMES[former - 1])?;
    senders.were(&[gateway])
}

/// The silence of half the total timeout, half a second for writes, a look of the other controller, and its first answers: 1.3 s.
/// Three times that.
const STEPS_DOWN: Duration = Duration::from_secs(4);

/// An agent that runs again has given up by then what it was not confirmed for.
const RESUMES: Duration = Duration::from_millis(100);

/// The agent killed, stopped; the CNI's network cut; the next hop of all silent.
pub(super) fn what_leaves_the_path_whole_moves_nothing(context: &LabContext) -> Result<()> {
    let ReachabilityTest { mut cluster, leader, gateway, source, .. } = start(context)?;
    println!("its agent is stopped");
    cluster.agent(gateway)?.pause()?;
    stays(&cluster, gateway, source)?;
    cluster.agent(gateway)?.resume()?;
    // It cannot know that its machine has run on, and asks before it serves.
    std::thread::sleep(RESUMES);
    until_true("it serves again", PATIENCE, || is_seen(&cluster, source, WHILE))?;
    println!("it is killed");
    cluster.agent(gateway)?.kill()?;
    stays(&cluster, gateway, source)?;
    cluster.agent(gateway)?.restart()?;
    cluster.serves(gateway)?;
    let name = format!("node{gateway}");
    until_logged(cluster.controller(leader)?.log(), &["the node serves", &name], 2, PATIENCE)?;
    println!("the CNI's network is cut on it");
    cluster.lab.set_overlay(cluster.lab.node(node(gateway)?), false)?;
    stays(&cluster, gateway, source)
}

/// Every answer takes 300 to 900 ms. Nothing moves for that; what has to move does.
pub(super) fn slow_api_server_moves_nothing(context: &LabContext) -> Result<()> {
    let ReachabilityTest { mut cluster, leader, gateway, source, .. } = start(context)?;
    let server = cluster.api.in_memory().ok_or(Skip("a server that can be made slow is the lab's own"))?;
    server.answer_late(300..=900);
    let led = lease(&cluster)?;
    let mut logs: Vec<_> = cluster.agents.iter().map(|agent| agent.log().to_owned()).collect();
    logs.extend(Agent::controllers(&mut cluster.agents).map(|controller| controller.log().to_owned()));
    let logged = || -> Result<usize> {
        let texts = logs.iter().map(std::fs::read_to_string).collect::<std::io::Result<Vec<_>>>()?;
        let lines = texts.iter().flat_map(|text| text.lines());
        Ok(lines.filter(|line| TROUBLES.iter().any(|trouble| line.contains(trouble))).count())
    };
    let (before, begin) = (logged()?, Instant::now());
    let (mut requests, mut gaps) = (0, 0);
    while begin.elapsed() < SLOW_FOR {
        for name in NAMES {
            ensure!(is_seen(&cluster, name, WHILE)?, "{name} got no answer {:?} after it was slow", begin.elapsed());
            requests += 1;
        }
        let now = lease(&cluster)?;
        ensure!(now == led, "the Lease was {led:?} and is {now:?}");
        gaps = logs.iter().map(|log| gaps_in(log)).sum::<Result<usize>>()?;
    }
    ensure!(cluster.holder("held")? == format!("node{gateway}"), "the address is on {}", cluster.holder("held")?);
    ensure!(logged()? == before, "an agent was not well:\n{}", cluster.log_tails());
    println!("{requests} requests answered in {SLOW_FOR:?}, node{leader} leads on, with {gaps} gaps");
    println!("node{gateway} loses power");
    let cut = Instant::now();
    cluster.lab.set_power(cluster.lab.node(node(gateway)?), false)?;
    moves_within(SLOW_FAIL_OVER, &cluster, source, (gateway, cut))?;
    Ok(())
}

/// What no agent logs about a slow API server.
const TROUBLES: [&str; 4] = [
    "cannot carry egress traffic",
    "lease of this node has expired",
    "is no longer served here",
    "there is a new leader",
];
/// That the overlay alone is lost is judged after two total timeouts, two seconds; then it is a failover as any other. Three times
/// that.
const OVERLAY_FAIL_OVER: Duration = Duration::from_secs(3 * 3);
const SLOW_FOR: Duration = Duration::from_secs(25);
/// Silence for the total timeout, the record of it, the status, and the new node's claim: some answers one after the other.
const SLOW_FAIL_OVER: Duration = Duration::from_secs(12);

fn gaps_in(log: &std::path::Path) -> Result<usize> {
    let text = std::fs::read_to_string(log)?;
    Ok(text.lines().filter(|line| line.contains("does not lead any more")).count())
}

/// Who holds the Lease, and how often it has changed hands.
fn lease(cluster: &TestCluster) -> Result<(String, String)> {
    let lease = cluster.api.get(LEASE)?.context("there is no Lease")?;
    Ok((lease["spec"]["holderIdentity"].to_string(), lease["spec"]["leaseTransitions"].to_string()))
}

/// A firewall between nodes closes the overlay's port to one of them; all else continues.
pub(super) fn nodes_that_the_overlay_does_not_reach_lose_their_addresses(context: &LabContext) -> Result<()> {
    let ReachabilityTest { mut cluster, leader, gateway, new_owner, source } = start(context)?;
    let closed = |node: &str, to: usize| -> Result<String> {
        let address = cluster.lab.node(egress_lab::test_cluster::node(to)?).number.address().v4;
        Ok(format!(
            "add table bridge {node}
             add chain bridge {node} forward {{ type filter hook forward priority 0; }}
             add rule bridge {node} forward ip daddr {address} udp dport {TUNNEL_PORT} counter drop
"
        ))
    };
    let (first, second) = (closed("first", gateway)?, closed("second", new_owner)?);
    println!("the overlay does not reach node{gateway} any more");
    let cut = Instant::now();
    cluster.lab.lan().feed("nft", &["-f", "-"], &first)?;
    moves_within(OVERLAY_FAIL_OVER, &cluster, source, (gateway, cut))?;
    println!("nor does it reach node{new_owner}: nowhere to go");
    cluster.lab.lan().feed("nft", &["-f", "-"], &second)?;
    let texts = ["is that UDP port open between nodes?", &format!("node{new_owner}")];
    until_logged(cluster.controller(leader)?.log(), &texts, 1, PATIENCE)?;
    ensure!(
        cluster.holder("held")? == format!("node{new_owner}"),
        "the address has gone to {}",
        cluster.holder("held")?
    );
    cluster.lab.lan().exec("nft", &["delete", "table", "bridge", "second"])?;
    cluster.is_seen_as(source, Some(ADDRESS), None)
}

/// The next hop is lost by one node, then by all.
pub(super) fn next_hops_count_where_one_node_alone_has_lost_its_own(context: &LabContext) -> Result<()> {
    let ReachabilityTest { cluster, gateway, new_owner, source, .. } = start(context)?;
    // Ports that are isolated do not reach each other.
    let isolate = |port: &str, on: &str| {
        cluster.lab.lan().exec("ip", &["link", "set", port, "type", "bridge_slave", "isolated", on]).map(drop)
    };
    isolate("ext", "on")?;
    println!("node{gateway} loses its next hop");
    let cut = Instant::now();
    isolate(&format!("node{gateway}"), "on")?;
    moves(&cluster, source, (gateway, cut))?;
    println!("so does node{new_owner}: nowhere to go");
    isolate(&format!("node{new_owner}"), "on")?;
    std::thread::sleep(PROOF);
    ensure!(
        cluster.holder("held")? == format!("node{new_owner}"),
        "the address has gone to {}",
        cluster.holder("held")?
    );
    isolate(&format!("node{new_owner}"), "off")?;
    cluster.is_seen_as(source, Some(ADDRESS), None)
}
