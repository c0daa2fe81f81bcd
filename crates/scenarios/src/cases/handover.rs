//! An address changes its node: the old one has let go before the new one answers, whatever the cause and whoever leads.
//!
//! Who answers when is seen on the wire ([`Emitters`]). A stopped agent alone leaves a node that goes on, and is not asked there.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};

use super::emitters::Emitters;
use super::leader::leader;
use egress_lab::api_objects::{EGRESS_IPS, EGRESS_NODES, all, assigned, egress_ip, labels};
use egress_lab::cluster::API_PORT;
use egress_lab::pins::Pins;
use egress_lab::test::{LabContext, Skip};
use egress_lab::test_cluster::{Ground, Sight, look, node, pod};
use egress_lab::topology::addresses as plan;
use egress_lab::wait::{EFFECT, LEADERS_FAIL_OVER, until};

const ADDRESS: &str = "172.18.0.110";
const NAMES: [&str; 3] = ["one", "two", "three"];
pub(crate) const LEDGER: &str = "/api/v1/namespaces/kube-system/configmaps/egress-agent-hand-overs";
/// The Lease runs out, another leads and goes on.
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
struct Stage {
    ground: Ground,
    leader: usize,
    old: usize,
    heir: usize,
}

fn start(context: &LabContext) -> Result<Stage> {
    start_with(context, &[])
}

fn start_with(context: &LabContext, extra: &[&str]) -> Result<Stage> {
    let pods = NAMES.iter().zip(1..).map(|(name, number)| pod(name, "red", number, &[])).collect();
    let ground = Ground::start_with(context, pods, extra)?;
    ground.lag(SEED);
    let leader = leader(&ground)?;
    let (old, heir) = (leader % 3 + 1, (leader + 1) % 3 + 1);
    ground.assignable(old, true)?;
    ground.assign(&egress_ip("held", &[ADDRESS], &labels("house", "red"), &all()))?;
    // Each agent hears of it at another time.
    for name in NAMES {
        ground.is_seen_as(name, Some(ADDRESS), None)?;
    }
    ground.assignable(heir, true)?;
    println!("node{leader} leads, node{old} has the address, node{heir} could have it");
    Ok(Stage { ground, leader, old, heir })
}

/// The open hand-overs as they are written.
fn records(ground: &Ground) -> Result<String> {
    let ledger = ground.cluster.get(LEDGER)?.context("there is no ledger")?;
    Ok(ledger["data"]["records"].as_str().unwrap_or_default().to_owned())
}

fn holder(ground: &Ground, object: &str) -> Result<String> {
    let object = ground.cluster.get(&format!("{EGRESS_IPS}/{object}"))?.unwrap_or_default();
    Ok(assigned(&object).first().map(|(_, node)| node.clone()).unwrap_or_default())
}

/// When the agent of a node said this of the address.
fn times(ground: &mut Ground, number: usize, what: &str) -> Result<Vec<String>> {
    let log = std::fs::read_to_string(ground.agent(number)?.log())?;
    let lines = log.lines().filter(|line| line.contains(what) && line.contains(&format!("address={ADDRESS} ")));
    Ok(lines.filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect())
}

fn owns(ground: &Ground, number: usize) -> Result<bool> {
    Ok(!Pins::of(ground.lab.node(node(number)?)).keys("owned_addr")?.is_empty())
}

const TAKEN: &str = "egress IP is served here";
/// By plan, then because the object is deleted and another waits for the address.
pub(super) fn old_node_lets_go_first(context: &LabContext) -> Result<()> {
    let Stage { ground, leader, old, heir } = start(context)?;
    let source = NAMES[leader - 1];
    let emitters = Emitters::watch(&ground, ADDRESS, &NAMES)?;
    emitters.begins(old, EFFECT)?;
    println!("the label is taken from node{old}");
    ground.assignable(old, false)?;
    until("the hand-over is recorded", EFFECT, || {
        let text = records(&ground)?;
        Ok((text.contains(ADDRESS) && text.contains(&format!("node{old}"))).then_some(()))
    })?;
    emitters.begins(heir, EFFECT)?;
    emitters.were(&[old, heir])?;
    ground.is_seen_as(source, Some(ADDRESS), None)?;
    until("the record is gone", EFFECT, || Ok((records(&ground)? == "{}").then_some(())))?;
    until("the acknowledgement is gone", EFFECT, || {
        let node = ground.cluster.get(&format!("{EGRESS_NODES}/node{old}"))?.context("its object")?;
        Ok(node["status"]["released"].is_null().then_some(()))
    })?;
    ensure!(!owns(&ground, old)?, "node{old} has it still");

    // Its other address is where the duplicate could go already: the shared one has to come to the other node.
    println!("the object is deleted; another has waited for its address");
    ground.assignable(old, true)?;
    ground.put(&egress_ip("waits", &[ADDRESS, "172.18.0.111"], &labels("house", "red"), &all()))?;
    until("the duplicate has its own address", EFFECT, || Ok((!holder(&ground, "waits")?.is_empty()).then_some(())))?;
    let emitters = Emitters::watch(&ground, ADDRESS, &NAMES)?;
    emitters.begins(heir, EFFECT)?;
    ground.remove("held")?;
    let holder = until("the duplicate has the address", EFFECT, || {
        let object = ground.cluster.get(&format!("{EGRESS_IPS}/waits"))?.unwrap_or_default();
        let pairs = assigned(&object);
        Ok(pairs.into_iter().find(|(address, _)| address == ADDRESS).map(|(_, node)| node))
    })?;
    ground
        .is_seen_as(source, Some(ADDRESS), None)
        .or_else(|_| ground.is_seen_as(source, Some("172.18.0.111"), None))?;
    match holder == format!("node{old}") {
        true => emitters.were(&[heir, old]),
        false => emitters.were(&[heir]),
    }
}

/// The old node's agent does not answer, and the leading controller dies before the hand-over is done.
pub(super) fn next_leader_goes_on(context: &LabContext) -> Result<()> {
    let grace = GRACE.as_secs().to_string();
    let stage = start_with(context, &["--egressip-reachability-grace", &grace])?;
    let Stage { mut ground, leader: first, old, heir } = stage;
    let emitters = Emitters::watch(&ground, ADDRESS, &[NAMES[old - 1], NAMES[heir - 1]])?;
    emitters.begins(old, EFFECT)?;
    let begin = times(&mut ground, old, TAKEN)?.len();
    ground.agent(old)?.pause()?;
    ground.assignable(old, false)?;
    until("the hand-over is recorded", EFFECT, || Ok(records(&ground)?.contains(ADDRESS).then_some(())))?;
    println!("the controller of node{first} leads and is killed");
    ground.controller(first)?.kill()?;
    // The new leader has not heard the agent, which may have ended just before.
    emitters.begins(heir, NEXT_LEADER + GRACE * 3)?;
    until("the status says so", EFFECT, || Ok((holder(&ground, "held")? == format!("node{heir}")).then_some(())))?;
    println!("the agent of node{old} goes on");
    ground.agent(old)?.resume()?;
    until(&format!("node{old} has given it up"), EFFECT, || Ok((!owns(&ground, old)?).then_some(())))?;
    ensure!(times(&mut ground, old, TAKEN)?.len() == begin, "node{old} has taken it up again");
    emitters.were(&[old, heir])?;
    ground.is_seen_as(NAMES[heir - 1], Some(ADDRESS), None)
}

/// It hears nothing and is not heard, and goes on forwarding: nobody tells it, so it gives the address up by itself, before it is
/// given away.
pub(super) fn cut_off_node_gives_up_first(context: &LabContext) -> Result<()> {
    let Stage { mut ground, leader, old, heir } = start(context)?;
    ground.is_seen_as(NAMES[heir - 1], Some(ADDRESS), None)?;
    let begin = times(&mut ground, old, TAKEN)?.len();
    let emitters = Emitters::watch(&ground, ADDRESS, &NAMES)?;
    emitters.begins(old, EFFECT)?;
    println!("node{old} is cut off, and its pods are not");
    let host = ground.lab.node(node(old)?).host.clone();
    let chain = |hook: &str| {
        format!("chain {hook} {{ type filter hook {hook} priority filter; policy drop; oif lo accept; }}; ")
    };
    let rules = format!("table inet cut-off {{ {}{} }}", chain("output"), chain("input").replace("oif", "iif"));
    host.feed("nft", &["-f", "-"], &rules)?;
    emitters.begins(heir, EFFECT)?;
    emitters.were(&[old, heir])?;
    ground.is_seen_as(NAMES[leader - 1], Some(ADDRESS), None)?;
    println!("it is back");
    host.exec("nft", &["delete", "table", "inet", "cut-off"])?;
    let log = ground.agent(old)?.log().to_owned();
    until(&format!("node{old} is in touch again"), NEXT_LEADER, || {
        Ok(std::fs::read_to_string(&log)?.contains("in touch again").then_some(()))
    })?;
    ground.serves(old)?;
    ensure!(!owns(&ground, old)?, "node{old} has the address again");
    ensure!(times(&mut ground, old, TAKEN)?.len() == begin, "node{old} has announced what it has lost");
    ground.is_seen_as(NAMES[leader - 1], Some(ADDRESS), None)
}

/// The leader hears it, so its leases go on, and its watches tell it nothing.
pub(super) fn node_without_api_server_is_told_by_probes(context: &LabContext) -> Result<()> {
    let Stage { mut ground, leader, old, heir } = start(context)?;
    let emitters = Emitters::watch(&ground, ADDRESS, &NAMES)?;
    emitters.begins(old, EFFECT)?;
    println!("node{old} does not reach the API server any more, and its object is deleted");
    let host = ground.lab.node(node(old)?).host.clone();
    // What the API server sends would still be heard otherwise.
    let chain = |hook: &str, end: &str| {
        format!("chain {hook} {{ type filter hook {hook} priority filter; tcp {end} {API_PORT} drop; }}; ")
    };
    let rules = format!("table inet no-api {{ {}{}}}", chain("output", "dport"), chain("input", "sport"));
    host.feed("nft", &["-f", "-"], &rules)?;
    ground.remove("held")?;
    until(&format!("node{old} has let go of it"), EFFECT, || Ok((!owns(&ground, old)?).then_some(())))?;
    until("the record is gone", EFFECT, || Ok((records(&ground)? == "{}").then_some(())))?;
    let log = ground.agent(old)?.log().to_owned();
    let log = std::fs::read_to_string(log)?;
    ensure!(log.contains("the leader's probes tell of hand-overs from this node"), "it was told otherwise");
    ensure!(!log.contains("out of touch"), "its leases have run out");

    println!("another has the address, and the node is back");
    ground.assignable(old, false)?;
    ground.assign(&egress_ip("next", &[ADDRESS], &labels("house", "red"), &all()))?;
    ground.is_seen_as(NAMES[leader - 1], Some(ADDRESS), None)?;
    emitters.were(&[old, heir])?;
    ensure!(owns(&ground, heir)? && !owns(&ground, old)?, "node{heir} has not the address alone");
    host.exec("nft", &["delete", "table", "inet", "no-api"])?;
    ground.is_seen_as(NAMES[old - 1], Some(ADDRESS), None)?;
    ensure!(!owns(&ground, old)?, "node{old} has it again");
    Ok(())
}

/// Nobody can be told anything, and nobody is given anything: the leases go on, and so does what is served. When it is back
/// all go on at once.
pub(super) fn away_api_server_ends_nothing(context: &LabContext) -> Result<()> {
    let Stage { mut ground, old, heir, .. } = start(context)?;
    let pods = NAMES.map(|name| ground.pod(name).map(|pod| pod.netns.clone()));
    ground.cluster.in_memory().ok_or(Skip("only the lab's own API server can be made to go away"))?;
    let before = logs(&mut ground)?;
    println!("the API server goes away");
    set_outage(&ground, true);
    let address = Sight::As(ADDRESS.parse()?);
    let end = Instant::now() + OUTAGE;
    let mut asked = 0;
    while Instant::now() < end {
        for pod in &pods {
            let pod = pod.as_ref().map_err(|error| anyhow!("{error:#}"))?;
            let seen = look(pod, plan::SERVER.v4.into())?;
            asked += 1;
            ensure!(seen == address, "request {asked} of {} is {seen}", pod.name());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let away = logs(&mut ground)?;
    set_outage(&ground, false);
    println!("it is back; {asked} requests, none failed");
    let begin = Instant::now();
    ground.agents_serve()?;
    let took = begin.elapsed();
    ensure!(took < BACK, "agents serve again only after {} ms", took.as_millis());
    ground.assign(&egress_ip("later", &["172.18.0.111"], &labels("house", "blue"), &all()))?;
    let took = begin.elapsed();
    ensure!(took < BACK, "what is new is assigned only after {} ms", took.as_millis());
    for (number, (before, after)) in (1..).zip(before.iter().zip(logs(&mut ground)?)) {
        let new = &after[before.len()..];
        ensure!(!after.contains("out of touch"), "node{number} has given up its addresses");
        for line in ["the API server does not answer", "the API server answers again"] {
            ensure!(new.matches(line).count() == 1, "node{number} does not say once that {line}: {new}");
        }
    }
    for (number, (before, away)) in (1..).zip(before.iter().zip(&away)) {
        let warnings = away[before.len()..].lines().filter(|line| line.contains(" WARN ")).count();
        ensure!(warnings <= WARNINGS_OF_AN_OUTAGE, "node{number} warns {warnings} times: {}", &away[before.len()..]);
    }
    ensure!(holder(&ground, "held")? == format!("node{old}"), "the address has moved");
    paused_meanwhile(&mut ground, old, heir)
}

/// A node that does not run for longer than its leases last serves nothing until the API server is back. The other goes on.
fn paused_meanwhile(ground: &mut Ground, old: usize, other: usize) -> Result<()> {
    until("both have an address", EFFECT, || Ok((owns(ground, old)? && owns(ground, other)?).then_some(())))?;
    let is_of_pods = holder(ground, "held")? == format!("node{old}");
    println!("it goes away again, and the agent of node{old} does not run for a while");
    set_outage(ground, true);
    std::thread::sleep(REIGN);
    let log = ground.agent(old)?.log().to_owned();
    let before = std::fs::read_to_string(&log)?.len();
    let said = |what: &str| Ok::<_, anyhow::Error>(std::fs::read_to_string(&log)?[before..].matches(what).count());
    ground.agent(old)?.pause()?;
    std::thread::sleep(PAUSE);
    ground.agent(old)?.resume()?;
    until("it gives up what it had", EFFECT, || {
        Ok((said("out of touch with leader")? == 1 && !owns(ground, old)?).then_some(()))
    })?;
    std::thread::sleep(HEARD);
    for name in NAMES {
        let seen = look(&ground.pod(name)?.netns, plan::SERVER.v4.into())?;
        let expected = if is_of_pods { Sight::Nothing } else { Sight::As(ADDRESS.parse()?) };
        ensure!(seen == expected, "{name} is {seen}");
    }
    ensure!(!owns(ground, old)? && owns(ground, other)?, "who goes on is not node{other} alone");
    ensure!(said("in touch again")? == 0, "it says that it serves what it does not");

    set_outage(ground, false);
    let begin = Instant::now();
    until("it has it back", EFFECT, || Ok((said("in touch again")? == 1 && owns(ground, old)?).then_some(())))?;
    println!("back after {} ms", begin.elapsed().as_millis());
    for name in NAMES {
        ground.is_seen_as(name, Some(ADDRESS), None)?;
    }
    ground.agents_serve()?;
    ensure!(said("out of touch with leader")? == 1, "its leases have run out again");
    ensure!(owns(ground, old)?, "it has given the address up again");
    Ok(())
}

/// Behind that nobody leads any more.
const REIGN: Duration = Duration::from_secs(3);
/// Longer than the total timeout, and shorter than twice that: who was away for longer is as one that starts.
const PAUSE: Duration = Duration::from_millis(1500);

/// The leader hears it again by then, and it has asked in vain whose the address is.
const HEARD: Duration = Duration::from_secs(3);

/// That it is gone.
const WARNINGS_OF_AN_OUTAGE: usize = 1;

fn set_outage(ground: &Ground, is_out: bool) {
    ground.cluster.in_memory().into_iter().for_each(|server| server.set_outage(is_out));
}

/// What the agents have said so far.
fn logs(ground: &mut Ground) -> Result<Vec<String>> {
    (1..=NAMES.len()).map(|number| Ok(std::fs::read_to_string(ground.agent(number)?.log())?)).collect()
}
