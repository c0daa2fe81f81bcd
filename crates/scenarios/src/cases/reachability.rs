//! What the leader makes of nodes and agents that do not answer: a node that is cut off, or that has lost its uplink, loses
//! its addresses within moments; one whose agent alone is silent, or that only the CNI's network has lost, keeps them.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::emitters::Emitters;
use super::leader::{LEASE, leader};
use egress_lab::agents::Agent;
use egress_lab::api_objects::{EGRESS_IPS, all, assigned, egress_ip, labels};
use egress_lab::cut::Cut;
use egress_lab::test::{LabContext, Skip};
use egress_lab::test_cluster::{Ground, node, pod};
use egress_lab::topology::addresses as plan;
use egress_lab::traffic::client;
use egress_lab::traffic::server::HTTP_PORT;
use egress_lab::wait::{EFFECT, FAIL_OVER, until};

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
struct Stage {
    ground: Ground,
    leader: usize,
    gateway: usize,
    heir: usize,
    /// The pod on the leader's node.
    source: &'static str,
}

/// One and a half times what docs/operations/measured-faults.md publishes. An election that waits for the Lease takes as long.
const SOON: Duration = Duration::from_millis(3_300);

/// The leading controller's node, which is a gateway too: power and network gone.
pub(super) fn leader_loses_its_node(context: &LabContext) -> Result<()> {
    let pods = NAMES.iter().zip(1..).map(|(name, number)| pod(name, "red", number, &[])).collect();
    let ground = Ground::start(context, pods)?;
    let gateway = leader(&ground)?;
    let (heir, source) = (gateway % 3 + 1, NAMES[(gateway + 1) % 3]);
    ground.assignable(gateway, true)?;
    ground.assign(&egress_ip("held", &[ADDRESS], &labels("house", "red"), &all()))?;
    ground.assignable(heir, true)?;
    ground.is_seen_as(source, Some(ADDRESS), None)?;
    // A node whose lease has had no end says so first that it has one now.
    std::thread::sleep(PROOF);
    let emitters = Emitters::watch(&ground, ADDRESS, &[source])?;
    emitters.begins(gateway, EFFECT)?;
    println!("node{gateway} leads, has the address and loses power");
    let cut = Instant::now();
    ground.lab.set_power(ground.lab.node(node(gateway)?), false)?;
    moves_within(SOON, &ground, source, (gateway, cut))?;
    ensure!(leader(&ground)? != gateway, "node{gateway} leads still");
    println!("it is back, and nothing moves");
    ground.lab.set_power(ground.lab.node(node(gateway)?), true)?;
    stays(&ground, heir, source)?;
    emitters.were(&[gateway, heir])
}

fn start(context: &LabContext) -> Result<Stage> {
    let pods = NAMES.iter().zip(1..).map(|(name, number)| pod(name, "red", number, &[])).collect();
    let ground = Ground::start(context, pods)?;
    let leader = leader(&ground)?;
    let (gateway, heir) = (leader % 3 + 1, (leader + 1) % 3 + 1);
    ground.assignable(gateway, true)?;
    ground.assign(&egress_ip("held", &[ADDRESS], &labels("house", "red"), &all()))?;
    ground.assignable(heir, true)?;
    for name in NAMES {
        ground.is_seen_as(name, Some(ADDRESS), None)?;
    }
    println!("node{leader} leads, node{gateway} has the address");
    Ok(Stage { ground, leader, gateway, heir, source: NAMES[leader - 1] })
}

fn holder(ground: &Ground) -> Result<String> {
    let object = ground.cluster.get(&format!("{EGRESS_IPS}/held"))?.context("the object is gone")?;
    let pairs = assigned(&object);
    Ok(pairs.first().map(|(_, node)| node.clone()).unwrap_or_default())
}

fn is_seen(ground: &Ground, name: &str, patience: Duration) -> Result<bool> {
    let to = SocketAddr::new(plan::SERVER.v4.into(), HTTP_PORT);
    let reply = client::get_within(&ground.pod(name)?.netns, to, "/", "reachability", patience)?;
    let address: IpAddr = ADDRESS.parse()?;
    Ok(match reply {
        Ok(reply) => reply.seen_as()? == address,
        Err(_) => false,
    })
}

/// Until requests of this pod are answered again, from the moment of the cut.
fn moves(ground: &Ground, name: &str, (gateway, cut): (usize, Instant)) -> Result<()> {
    moves_within(FAIL_OVER, ground, name, (gateway, cut))
}

fn moves_within(patience: Duration, ground: &Ground, name: &str, (gateway, cut): (usize, Instant)) -> Result<()> {
    let old = format!("node{gateway}");
    let mut lost = false;
    let back = loop {
        let begin = Instant::now();
        let seen = is_seen(ground, name, MOMENT)?;
        lost |= !seen;
        if seen && lost {
            break begin;
        }
        ensure!(cut.elapsed() < patience, "{name} has not come back within {patience:?}");
        std::thread::sleep(Duration::from_millis(10));
    };
    println!("{name} is served again {} ms after the cut", back.duration_since(cut).as_millis());
    ensure!(holder(ground)? != old, "the address is still on {old}");
    Ok(())
}

fn stays(ground: &Ground, gateway: usize, name: &str) -> Result<()> {
    let end = Instant::now() + PROOF;
    let (mut asked, mut failed) = (0, 0);
    while Instant::now() < end {
        asked += 1;
        failed += u32::from(!is_seen(ground, name, WHILE)?);
        std::thread::sleep(Duration::from_millis(10));
    }
    println!("{name}: {asked} requests, {failed} failed");
    ensure!(failed == 0, "{failed} of {asked} requests of {name} have failed");
    let holder = holder(ground)?;
    ensure!(holder == format!("node{gateway}"), "the address has gone to {holder}");
    Ok(())
}

/// A node without any cable, then one whose uplink alone is cut.
pub(super) fn cut_off_nodes_lose_their_addresses(context: &LabContext) -> Result<()> {
    let Stage { ground, gateway, heir, source, .. } = start(context)?;
    println!("node{gateway} is cut off");
    let cut = Instant::now();
    ground.lab.set_power(ground.lab.node(node(gateway)?), false)?;
    moves(&ground, source, (gateway, cut))?;
    ground.lab.set_power(ground.lab.node(node(gateway)?), true)?;
    println!("it is back, and nothing moves");
    stays(&ground, heir, source)?;

    println!("the uplink of node{heir} is cut");
    let cut = Instant::now();
    ground.lab.lan().exec("ip", &["link", "set", &format!("node{heir}"), "down"])?;
    moves(&ground, source, (heir, cut))
}

/// The uplink is back the moment that another node serves: what has waited there for its next hop bears an address that is
/// not this node's any more.
pub(super) fn links_that_are_back_send_nothing_by_an_address_that_has_moved(context: &LabContext) -> Result<()> {
    let Stage { ground, gateway, heir, .. } = start(context)?;
    let port = format!("node{gateway}");
    let emitters = Emitters::watch(&ground, ADDRESS, &NAMES)?;
    emitters.begins(gateway, EFFECT)?;
    println!("the uplink of node{gateway} is cut");
    ground.lab.lan().exec("ip", &["link", "set", &port, "down"])?;
    emitters.begins(heir, FAIL_OVER)?;
    ground.lab.lan().exec("ip", &["link", "set", &port, "up"])?;
    println!("it is back");
    emitters.were(&[gateway, heir])
}

/// Both others at once, seen by a leader that could be what is cut off, and is not.
pub(super) fn nodes_that_die_together_lose_their_addresses(context: &LabContext) -> Result<()> {
    let Stage { mut ground, leader, gateway, heir, source } = start(context)?;
    ground.assignable(leader, true)?;
    ground.serves(leader)?;
    // The leader has to know the road on which it would miss them.
    std::thread::sleep(PROOF);
    println!("node{gateway} and node{heir} lose power");
    let cut = Instant::now();
    for number in [gateway, heir] {
        ground.lab.set_power(ground.lab.node(node(number)?), false)?;
    }
    moves(&ground, source, (gateway, cut))?;
    ensure!(holder(&ground)? == format!("node{leader}"), "the address is on {}", holder(&ground)?);
    println!("they are back, and nothing moves");
    for number in [gateway, heir] {
        ground.lab.set_power(ground.lab.node(node(number)?), true)?;
    }
    stays(&ground, leader, source)
}

/// The node of the leader is cut from the other nodes alone: the API server and its next hop answer, and it could take all
/// others for lost. The other controller hears them.
pub(super) fn leader_that_hears_no_node_lets_another_lead(context: &LabContext) -> Result<()> {
    let Stage { mut ground, leader: former, gateway, .. } = start(context)?;
    ground.assignable(former, true)?;
    ground.serves(former)?;
    // The leader has to know the road on which it would miss them.
    std::thread::sleep(PROOF);
    let (well, emitters) = (NAMES[gateway - 1], Emitters::watch(&ground, ADDRESS, &NAMES)?);
    println!("node{former} leads and is cut from the other nodes");
    let cut = Instant::now();
    ground.lab.cut(&Cut::Nodes(node(former)?))?;
    let mut last_failure = cut;
    while last_failure.elapsed() < PROOF {
        if !is_seen(&ground, well, MOMENT)? {
            last_failure = Instant::now();
        }
        ensure!(cut.elapsed() < STEPS_DOWN + PROOF, "{well} is not served while node{former} is cut");
    }
    println!("{well} was not served for up to {} ms", last_failure.duration_since(cut).as_millis());
    ensure!(leader(&ground)? != former, "node{former} leads still");
    ensure!(holder(&ground)? == format!("node{gateway}"), "the address is on {}", holder(&ground)?);
    ground.lab.mend(&Cut::Nodes(node(former)?))?;
    stays(&ground, gateway, NAMES[former - 1])?;
    emitters.were(&[gateway])
}

/// The silence of half the total timeout, half a second for writes, a look of the other controller, and its first answers: 1.3 s.
/// Three times that.
const STEPS_DOWN: Duration = Duration::from_secs(4);

/// An agent that runs again has given up by then what it was not confirmed for.
const RESUMES: Duration = Duration::from_millis(100);

/// The agent killed, stopped; the CNI's network cut; the next hop of all silent.
pub(super) fn what_leaves_the_road_whole_moves_nothing(context: &LabContext) -> Result<()> {
    let Stage { mut ground, leader, gateway, source, .. } = start(context)?;
    println!("its agent is stopped");
    ground.agent(gateway)?.pause()?;
    stays(&ground, gateway, source)?;
    ground.agent(gateway)?.resume()?;
    // It cannot know that its machine has run on, and asks before it serves.
    std::thread::sleep(RESUMES);
    until("it serves again", PATIENCE, || Ok(is_seen(&ground, source, WHILE)?.then_some(())))?;
    println!("it is killed");
    ground.agent(gateway)?.kill()?;
    stays(&ground, gateway, source)?;
    ground.agent(gateway)?.restart()?;
    ground.serves(gateway)?;
    let log = ground.controller(leader)?.log().to_owned();
    until("the leader hears it again", PATIENCE, || {
        let text = std::fs::read_to_string(&log)?;
        let line = |line: &&str| line.contains("the node serves") && line.contains(&format!("node{gateway}"));
        Ok((text.lines().filter(line).count() > 1).then_some(()))
    })?;
    println!("the CNI's network is cut on it");
    let router = &ground.lab.node(node(gateway)?).router;
    router.exec("ip", &["link", "set", "ovl0", "down"])?;
    stays(&ground, gateway, source)
}

/// Every answer takes 300 to 900 ms. Nothing moves for that; what has to move does.
pub(super) fn slow_api_server_moves_nothing(context: &LabContext) -> Result<()> {
    let Stage { mut ground, leader, gateway, source, .. } = start(context)?;
    let server = ground.cluster.in_memory().ok_or(Skip("a server that can be made slow is the lab's own"))?;
    server.answer_late(300..=900);
    let led = lease(&ground)?;
    let mut logs: Vec<_> = ground.agents.iter().map(|agent| agent.log().to_owned()).collect();
    logs.extend(Agent::controllers(&mut ground.agents).map(|controller| controller.log().to_owned()));
    let said = || -> Result<usize> {
        let texts = logs.iter().map(std::fs::read_to_string).collect::<std::io::Result<Vec<_>>>()?;
        let lines = texts.iter().flat_map(|text| text.lines());
        Ok(lines.filter(|line| TROUBLES.iter().any(|trouble| line.contains(trouble))).count())
    };
    let (before, begin) = (said()?, Instant::now());
    let (mut requests, mut gaps) = (0, 0);
    while begin.elapsed() < SLOW_FOR {
        for name in NAMES {
            ensure!(is_seen(&ground, name, WHILE)?, "{name} got no answer {:?} after it was slow", begin.elapsed());
            requests += 1;
        }
        let now = lease(&ground)?;
        ensure!(now == led, "the Lease was {led:?} and is {now:?}");
        gaps = logs.iter().map(|log| gaps_in(log)).sum::<Result<usize>>()?;
    }
    ensure!(holder(&ground)? == format!("node{gateway}"), "the address is on {}", holder(&ground)?);
    ensure!(said()? == before, "an agent was not well:\n{}", ground.last_words());
    println!("{requests} requests answered in {SLOW_FOR:?}, node{leader} leads on, with {gaps} gaps");
    println!("node{gateway} loses power");
    let cut = Instant::now();
    ground.lab.set_power(ground.lab.node(node(gateway)?), false)?;
    moves_within(SLOW_FAIL_OVER, &ground, source, (gateway, cut))?;
    Ok(())
}

/// What no agent says of a slow API server.
const TROUBLES: [&str; 4] =
    ["cannot carry egress traffic", "out of touch with leader", "is no longer served here", "there is a new leader"];
/// That the overlay alone is lost is judged after two total timeouts, two seconds; then it is a failover as any other. Three times
/// that.
const OVERLAY_FAIL_OVER: Duration = Duration::from_secs(3 * 3);
const SLOW_FOR: Duration = Duration::from_secs(25);
/// Silence for the total timeout, the record of it, the status, and the new node's claim: some answers one behind the other.
const SLOW_FAIL_OVER: Duration = Duration::from_secs(12);

fn gaps_in(log: &std::path::Path) -> Result<usize> {
    let text = std::fs::read_to_string(log)?;
    Ok(text.lines().filter(|line| line.contains("does not lead any more")).count())
}

/// Who holds the Lease, and how often it has changed hands.
fn lease(ground: &Ground) -> Result<(String, String)> {
    let lease = ground.cluster.get(LEASE)?.context("there is no Lease")?;
    Ok((lease["spec"]["holderIdentity"].to_string(), lease["spec"]["leaseTransitions"].to_string()))
}

/// A firewall between nodes closes the overlay's port to one of them; all else goes on.
pub(super) fn nodes_that_the_overlay_does_not_reach_lose_their_addresses(context: &LabContext) -> Result<()> {
    let Stage { mut ground, leader, gateway, heir, source } = start(context)?;
    let closed = |node: &str, to: usize| -> Result<String> {
        let address = ground.lab.node(egress_lab::test_cluster::node(to)?).number.address().v4;
        Ok(format!(
            "add table bridge {node}
             add chain bridge {node} forward {{ type filter hook forward priority 0; }}
             add rule bridge {node} forward ip daddr {address} udp dport {TUNNEL_PORT} counter drop
"
        ))
    };
    let (first, second) = (closed("first", gateway)?, closed("second", heir)?);
    println!("the overlay does not reach node{gateway} any more");
    let cut = Instant::now();
    ground.lab.lan().feed("nft", &["-f", "-"], &first)?;
    moves_within(OVERLAY_FAIL_OVER, &ground, source, (gateway, cut))?;
    println!("nor does it reach node{heir}: nowhere to go");
    ground.lab.lan().feed("nft", &["-f", "-"], &second)?;
    let log = ground.controller(leader)?.log().to_owned();
    until("the leader says why", PATIENCE, || {
        let text = std::fs::read_to_string(&log)?;
        let line =
            |line: &str| line.contains("is that UDP port open between nodes?") && line.contains(&format!("node{heir}"));
        Ok(text.lines().any(line).then_some(()))
    })?;
    ensure!(holder(&ground)? == format!("node{heir}"), "the address has gone to {}", holder(&ground)?);
    ground.lab.lan().exec("nft", &["delete", "table", "bridge", "second"])?;
    ground.is_seen_as(source, Some(ADDRESS), None)
}

/// The next hop is lost by one node, then by all.
pub(super) fn next_hops_count_where_one_node_alone_has_lost_its_own(context: &LabContext) -> Result<()> {
    let Stage { ground, gateway, heir, source, .. } = start(context)?;
    // Ports that are isolated do not reach each other.
    let isolate = |port: &str, on: &str| {
        ground.lab.lan().exec("ip", &["link", "set", port, "type", "bridge_slave", "isolated", on]).map(drop)
    };
    isolate("ext", "on")?;
    println!("node{gateway} loses its next hop");
    let cut = Instant::now();
    isolate(&format!("node{gateway}"), "on")?;
    moves(&ground, source, (gateway, cut))?;
    println!("so does node{heir}: nowhere to go");
    isolate(&format!("node{heir}"), "on")?;
    std::thread::sleep(PROOF);
    ensure!(holder(&ground)? == format!("node{heir}"), "the address has gone to {}", holder(&ground)?);
    isolate(&format!("node{heir}"), "off")?;
    ground.is_seen_as(source, Some(ADDRESS), None)
}
