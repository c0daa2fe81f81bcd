//! An address changes its node: the old node releases it before the new one answers, whatever the cause and whichever controller
//! leads.
//!
//! Who answers when is seen on the wire ([`Senders`]). A stopped agent alone leaves a node that continues, and is not asked there.

use anyhow::anyhow;

use super::leader::leader;
use super::senders::Senders;
use crate::prelude::*;
use egress_lab::api_objects::{EGRESS_NODES, LEDGER};
use egress_lab::kube_api::API_PORT;
use egress_lab::wait::LEADERS_FAIL_OVER;

const ADDRESS: &str = "172.18.0.110";
const NAMES: [&str; 3] = ["one", "two", "three"];
/// The Lease runs out, another leads and continues.
const NEXT_LEADER: Duration = LEADERS_FAIL_OVER;
/// Instead of the default of thirty.
const GRACE: Duration = Duration::from_secs(3);
/// Longer than a leader leads without the API server, and than any lease lasts; and long enough that a watch which goes by
/// its own ever longer pauses is late.
const OUTAGE: Duration = Duration::from_secs(11);
/// Agents notice within a second and a half that it is back, and their watches follow within another; the rest is for the
/// machine.
const BACK: Duration = Duration::from_secs(5);

/// Of the watches' lags.
const SEED: u64 = 1;

/// A lab with one object, and its nodes: one leads, one has the address, one could have it.
struct HandoverTest {
    cluster: TestCluster,
    leader: usize,
    old: usize,
    new_owner: usize,
}

fn start(context: &LabContext) -> Result<HandoverTest> {
    start_with(context, &[])
}

fn start_with(context: &LabContext, extra: &[&str]) -> Result<HandoverTest> {
    let pods = NAMES.iter().zip(1..).map(|(name, number)| pod(name, "red", number, &[])).collect();
    let cluster = TestCluster::start_with(context, pods, extra)?;
    cluster.lag(SEED);
    let leader = leader(&cluster)?;
    let (old, new_owner) = (leader % 3 + 1, (leader + 1) % 3 + 1);
    cluster.assignable(old, true)?;
    cluster.assign(&egress_ip("held", &[ADDRESS], &labels("house", "red"), &all()))?;
    // Each agent learns it at another time.
    for name in NAMES {
        cluster.is_seen_as(name, Some(ADDRESS), None)?;
    }
    cluster.assignable(new_owner, true)?;
    println!("node{leader} leads, node{old} has the address, node{new_owner} could have it");
    Ok(HandoverTest { cluster, leader, old, new_owner })
}

/// The open hand-overs as they are written.
fn records(cluster: &TestCluster) -> Result<String> {
    let ledger = cluster.api.get(LEDGER)?.context("there is no ledger")?;
    Ok(ledger["data"]["records"].as_str().unwrap_or_default().to_owned())
}

/// When the agent of a node logged this about the address.
fn times(cluster: &mut TestCluster, number: usize, what: &str) -> Result<Vec<String>> {
    let log = std::fs::read_to_string(cluster.agent(number)?.log())?;
    let lines = log.lines().filter(|line| line.contains(what) && line.contains(&format!("address={ADDRESS} ")));
    Ok(lines.filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect())
}

const TAKEN: &str = "egress IP is served here";
/// By plan, then because the object is deleted and another waits for the address.
pub(super) fn old_node_releases_first(context: &LabContext) -> Result<()> {
    let HandoverTest { cluster, leader, old, new_owner } = start(context)?;
    let source = NAMES[leader - 1];
    let senders = Senders::watch(&cluster, ADDRESS, &NAMES)?;
    senders.begins(old, EFFECT)?;
    println!("the label is taken from node{old}");
    cluster.assignable(old, false)?;
    until_true("the hand-over is recorded", EFFECT, || {
        let text = records(&cluster)?;
        Ok(text.contains(ADDRESS) && text.contains(&format!("node{old}")))
    })?;
    senders.begins(new_owner, EFFECT)?;
    senders.were(&[old, new_owner])?;
    cluster.is_seen_as(source, Some(ADDRESS), None)?;
    until_true("the record is gone", EFFECT, || Ok(records(&cluster)? == "{}"))?;
    until_true("the acknowledgement is gone", EFFECT, || {
        let node = cluster.api.get(&format!("{EGRESS_NODES}/node{old}"))?.context("its object")?;
        Ok(node["status"]["released"].is_null())
    })?;
    ensure!(!cluster.owns(old)?, "node{old} has it still");

    // Its other address can be on the node that the duplicate could use: the shared one must move to the other node.
    println!("the object is deleted; another has waited for its address");
    cluster.assignable(old, true)?;
    cluster.put(&egress_ip("waits", &[ADDRESS, "172.18.0.111"], &labels("house", "red"), &all()))?;
    until_true("the duplicate has its own address", EFFECT, || Ok(!cluster.holder("waits")?.is_empty()))?;
    let senders = Senders::watch(&cluster, ADDRESS, &NAMES)?;
    senders.begins(new_owner, EFFECT)?;
    cluster.remove("held")?;
    let holder = until("the duplicate has the address", EFFECT, || {
        let object = cluster.api.get(&format!("{EGRESS_IPS}/waits"))?.unwrap_or_default();
        let pairs = assigned(&object);
        Ok(pairs.into_iter().find(|(address, _)| address == ADDRESS).map(|(_, node)| node))
    })?;
    cluster
        .is_seen_as(source, Some(ADDRESS), None)
        .or_else(|_| cluster.is_seen_as(source, Some("172.18.0.111"), None))?;
    match holder == format!("node{old}") {
        true => senders.were(&[new_owner, old]),
        false => senders.were(&[new_owner]),
    }
}

/// The old node's agent does not answer, and the leading controller dies before the hand-over is done.
pub(super) fn next_leader_continues(context: &LabContext) -> Result<()> {
    let grace = GRACE.as_secs().to_string();
    let test = start_with(context, &["--egressip-reachability-grace", &grace])?;
    let HandoverTest { mut cluster, leader: first, old, new_owner } = test;
    let senders = Senders::watch(&cluster, ADDRESS, &[NAMES[old - 1], NAMES[new_owner - 1]])?;
    senders.begins(old, EFFECT)?;
    let begin = times(&mut cluster, old, TAKEN)?.len();
    cluster.agent(old)?.pause()?;
    cluster.assignable(old, false)?;
    until_true("the hand-over is recorded", EFFECT, || Ok(records(&cluster)?.contains(ADDRESS)))?;
    println!("the controller of node{first} leads and is killed");
    cluster.controller(first)?.kill()?;
    // The new leader has not heard the agent, which may have ended just before.
    senders.begins(new_owner, NEXT_LEADER + GRACE * 3)?;
    until_true("the status says so", EFFECT, || Ok(cluster.holder("held")? == format!("node{new_owner}")))?;
    println!("the agent of node{old} continues");
    cluster.agent(old)?.resume()?;
    until_true(&format!("node{old} has given it up"), EFFECT, || Ok(!cluster.owns(old)?))?;
    ensure!(times(&mut cluster, old, TAKEN)?.len() == begin, "node{old} has taken it up again");
    senders.were(&[old, new_owner])?;
    cluster.is_seen_as(NAMES[new_owner - 1], Some(ADDRESS), None)
}

/// A node without any contact that still forwards gives the address up by itself, before another node gets it.
pub(super) fn cut_off_node_gives_up_first(context: &LabContext) -> Result<()> {
    let HandoverTest { mut cluster, leader, old, new_owner } = start(context)?;
    cluster.is_seen_as(NAMES[new_owner - 1], Some(ADDRESS), None)?;
    let begin = times(&mut cluster, old, TAKEN)?.len();
    let senders = Senders::watch(&cluster, ADDRESS, &NAMES)?;
    senders.begins(old, EFFECT)?;
    println!("node{old} is cut off, and its pods are not");
    let host = cluster.lab.node(node(old)?).host.clone();
    let chain = |hook: &str| {
        format!("chain {hook} {{ type filter hook {hook} priority filter; policy drop; oif lo accept; }}; ")
    };
    let rules = format!("table inet cut-off {{ {}{} }}", chain("output"), chain("input").replace("oif", "iif"));
    host.feed("nft", &["-f", "-"], &rules)?;
    senders.begins(new_owner, EFFECT)?;
    senders.were(&[old, new_owner])?;
    cluster.is_seen_as(NAMES[leader - 1], Some(ADDRESS), None)?;
    println!("it is back");
    host.exec("nft", &["delete", "table", "inet", "cut-off"])?;
    until_logged(cluster.agent(old)?.log(), &["the lease is renewed"], 1, NEXT_LEADER)?;
    cluster.serves(old)?;
    ensure!(!cluster.owns(old)?, "node{old} has the address again");
    ensure!(times(&mut cluster, old, TAKEN)?.len() == begin, "node{old} has announced what it has lost");
    cluster.is_seen_as(NAMES[leader - 1], Some(ADDRESS), None)
}

/// The leader hears it, so its leases continue, and its watches deliver nothing.
pub(super) fn node_without_api_server_learns_by_probes(context: &LabContext) -> Result<()> {
    let HandoverTest { mut cluster, leader, old, new_owner } = start(context)?;
    let senders = Senders::watch(&cluster, ADDRESS, &NAMES)?;
    senders.begins(old, EFFECT)?;
    println!("node{old} does not reach the API server any more, and its object is deleted");
    let host = cluster.lab.node(node(old)?).host.clone();
    // What the API server sends would still be heard otherwise.
    let chain = |hook: &str, end: &str| {
        format!("chain {hook} {{ type filter hook {hook} priority filter; tcp {end} {API_PORT} drop; }}; ")
    };
    let rules = format!("table inet no-api {{ {}{}}}", chain("output", "dport"), chain("input", "sport"));
    host.feed("nft", &["-f", "-"], &rules)?;
    cluster.remove("held")?;
    until_true(&format!("node{old} has released it"), EFFECT, || Ok(!cluster.owns(old)?))?;
    until_true("the record is gone", EFFECT, || Ok(records(&cluster)? == "{}"))?;
    let log = std::fs::read_to_string(cluster.agent(old)?.log())?;
    ensure!(log.contains("the leader's probes order hand-overs from this node"), "it learned otherwise");
    ensure!(!log.contains("lease of this node has expired"), "its leases have run out");

    println!("another has the address, and the node is back");
    cluster.assignable(old, false)?;
    cluster.assign(&egress_ip("next", &[ADDRESS], &labels("house", "red"), &all()))?;
    cluster.is_seen_as(NAMES[leader - 1], Some(ADDRESS), None)?;
    senders.were(&[old, new_owner])?;
    ensure!(cluster.owns(new_owner)? && !cluster.owns(old)?, "node{new_owner} has not the address alone");
    host.exec("nft", &["delete", "table", "inet", "no-api"])?;
    cluster.is_seen_as(NAMES[old - 1], Some(ADDRESS), None)?;
    ensure!(!cluster.owns(old)?, "node{old} has it again");
    Ok(())
}

/// Without an API server nothing is assigned or released: the leases continue, and so does what is served. Afterwards all agents
/// continue at once.
pub(super) fn api_server_outage_ends_no_lease(context: &LabContext) -> Result<()> {
    let HandoverTest { mut cluster, old, new_owner, .. } = start(context)?;
    let pods = NAMES.map(|name| cluster.pod(name).map(|pod| pod.netns.clone()));
    cluster.api.in_memory().ok_or(Skip("only the lab's own API server can be made to go away"))?;
    let before = logs(&mut cluster)?;
    println!("the API server goes away");
    cluster.set_outage(true)?;
    let address = Observed::Source(ADDRESS.parse()?);
    let end = Instant::now() + OUTAGE;
    let mut asked = 0;
    while Instant::now() < end {
        for pod in &pods {
            let pod = pod.as_ref().map_err(|error| anyhow!("{error:#}"))?;
            let seen = observe(pod, plan::SERVER.v4.into())?;
            asked += 1;
            ensure!(seen == address, "request {asked} of {} is {seen}", pod.name());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let away = logs(&mut cluster)?;
    cluster.set_outage(false)?;
    println!("it is back; {asked} requests, none failed");
    let begin = Instant::now();
    cluster.agents_serve()?;
    let took = begin.elapsed();
    ensure!(took < BACK, "agents serve again only after {} ms", took.as_millis());
    cluster.assign(&egress_ip("later", &["172.18.0.111"], &labels("house", "blue"), &all()))?;
    let took = begin.elapsed();
    ensure!(took < BACK, "what is new is assigned only after {} ms", took.as_millis());
    for (number, (before, after)) in (1..).zip(before.iter().zip(logs(&mut cluster)?)) {
        let new = &after[before.len()..];
        ensure!(!after.contains("lease of this node has expired"), "node{number} has given up its addresses");
        for line in ["the API server does not answer", "the API server answers again"] {
            ensure!(new.matches(line).count() == 1, "node{number} does not say once that {line}: {new}");
        }
    }
    for (number, (before, away)) in (1..).zip(before.iter().zip(&away)) {
        let warnings = away[before.len()..].lines().filter(|line| line.contains(" WARN ")).count();
        ensure!(warnings <= WARNINGS_OF_AN_OUTAGE, "node{number} warns {warnings} times: {}", &away[before.len()..]);
    }
    ensure!(cluster.holder("held")? == format!("node{old}"), "the address has moved");
    paused_in_between(&mut cluster, old, new_owner)
}

/// A node that does not run for longer than its leases last serves nothing until the API server is back. The other continues.
fn paused_in_between(cluster: &mut TestCluster, old: usize, other: usize) -> Result<()> {
    until_true("both have an address", EFFECT, || Ok(cluster.owns(old)? && cluster.owns(other)?))?;
    let is_of_pods = cluster.holder("held")? == format!("node{old}");
    println!("it goes away again, and the agent of node{old} does not run for a while");
    cluster.set_outage(true)?;
    std::thread::sleep(REIGN);
    let log = cluster.agent(old)?.log().to_owned();
    let before = std::fs::read_to_string(&log)?.len();
    let logged = |what: &str| Ok::<_, anyhow::Error>(std::fs::read_to_string(&log)?[before..].matches(what).count());
    cluster.agent(old)?.pause()?;
    std::thread::sleep(PAUSE);
    cluster.agent(old)?.resume()?;
    until_true("it gives up what it had", EFFECT, || {
        Ok(logged("lease of this node has expired")? == 1 && !cluster.owns(old)?)
    })?;
    std::thread::sleep(HEARD);
    for name in NAMES {
        let seen = observe(&cluster.pod(name)?.netns, plan::SERVER.v4.into())?;
        let expected = if is_of_pods { Observed::Nothing } else { Observed::Source(ADDRESS.parse()?) };
        ensure!(seen == expected, "{name} is {seen}");
    }
    ensure!(!cluster.owns(old)? && cluster.owns(other)?, "node{other} is not the only one that serves");
    ensure!(logged("the lease is renewed")? == 0, "it says that it serves what it does not");

    cluster.set_outage(false)?;
    let begin = Instant::now();
    until_true("it has it back", EFFECT, || Ok(logged("the lease is renewed")? == 1 && cluster.owns(old)?))?;
    println!("back after {} ms", begin.elapsed().as_millis());
    for name in NAMES {
        cluster.is_seen_as(name, Some(ADDRESS), None)?;
    }
    cluster.agents_serve()?;
    ensure!(logged("lease of this node has expired")? == 1, "its leases have run out again");
    ensure!(cluster.owns(old)?, "it has given the address up again");
    Ok(())
}

/// After that no controller leads.
const REIGN: Duration = Duration::from_secs(3);
/// Longer than the total timeout, and shorter than twice that: who was away for longer is as one that starts.
const PAUSE: Duration = Duration::from_millis(1500);

/// The leader hears it again by then, and it has asked in vain whose the address is.
const HEARD: Duration = Duration::from_secs(3);

/// That it is gone.
const WARNINGS_OF_AN_OUTAGE: usize = 1;

/// The agents' logs so far.
fn logs(cluster: &mut TestCluster) -> Result<Vec<String>> {
    (1..=NAMES.len()).map(|number| Ok(std::fs::read_to_string(cluster.agent(number)?.log())?)).collect()
}
