//! A gateway whose agent is dead while its programs live: the address moves all the same, and not before the old programs have
//! stopped emitting it.
//!
//! The deadline in the programs passes, and the controller waits for it.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::emitters::Emitters;
use super::leader::leader;
use egress_lab::api_objects::{all, egress_ip, labels};
use egress_lab::pins::Pins;
use egress_lab::test::LabContext;
use egress_lab::test_cluster::{Ground, node, pod};
use egress_lab::wait::{EFFECT, until};

const ADDRESS: &str = "172.18.0.110";
const NAMES: [&str; 3] = ["one", "two", "three"];
/// Instead of the default of thirty.
const GRACE: Duration = Duration::from_secs(4);
/// The total timeout before the grace and behind it, the suspicion, and the claim; three times that.
const MOVES: Duration = Duration::from_secs(3 * (4 + 2 + 2 + 1));

/// The nodes by what they do.
struct Stage {
    ground: Ground,
    leader: usize,
    old: usize,
    heir: usize,
}

fn start(context: &LabContext, extra: &[&str]) -> Result<Stage> {
    let pods = NAMES.iter().zip(1..).map(|(name, number)| pod(name, "red", number, &[])).collect();
    let mut ground = Ground::start_with(context, pods, extra)?;
    // The leader lives, and so does the agent of the source node.
    let leader = leader(&ground)?;
    let (old, heir) = (leader % 3 + 1, (leader + 1) % 3 + 1);
    ground.assignable(old, true)?;
    ground.assign(&egress_ip("held", &[ADDRESS], &labels("house", "red"), &all()))?;
    for name in NAMES {
        ground.is_seen_as(name, Some(ADDRESS), None)?;
    }
    ground.assignable(heir, true)?;
    ground.serves(heir)?;
    Ok(Stage { ground, leader, old, heir })
}

fn owned(ground: &Ground, number: usize) -> Result<usize> {
    Ok(Pins::of(ground.lab.node(node(number)?)).keys("owned_addr")?.len())
}

/// Killed and kept from starting: the address has one emitter at a time, and none but the new node's programs in the end.
pub(super) fn does_not_keep_its_addresses(context: &LabContext) -> Result<()> {
    let grace = GRACE.as_secs().to_string();
    let Stage { mut ground, leader, old, heir } = start(context, &["--egressip-reachability-grace", &grace])?;
    let sources = [NAMES[leader - 1], NAMES[heir - 1]];
    let emitters = Emitters::watch(&ground, ADDRESS, &sources)?;
    emitters.begins(old, EFFECT)?;
    println!("the agent of node{old} is killed");
    ground.agent(old)?.kill()?;
    emitters.begins(heir, MOVES)?;
    ensure!(owned(&ground, old)? == 1, "node{old} has given up the address without an agent");
    let said = ground.agent(old)?.status(&[])?;
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    ensure!(said.contains("expired"), "status does not say that the lease has expired:\n{said}");
    for name in sources {
        ground.is_seen_as(name, Some(ADDRESS), None)?;
    }
    println!("the agent of node{old} starts again");
    ground.agent(old)?.restart().context("the old gateway's agent")?;
    ground.serves(old)?;
    until(&format!("node{old} has given it up"), EFFECT, || Ok((owned(&ground, old)? == 0).then_some(())))?;
    emitters.were(&[old, heir])?;
    for name in NAMES {
        ground.is_seen_as(name, Some(ADDRESS), None)?;
    }
    Ok(())
}

/// Without a health port (OVN-Kubernetes' discard port) agents hold addresses by reading the ledger: also then no address
/// has two emitters, and who cannot read it stops.
pub(super) fn is_waited_for_without_a_health_port(context: &LabContext) -> Result<()> {
    let grace = GRACE.as_secs().to_string();
    let (port, timeout) = (["--egressip-node-healthcheck-port", "0"], ["--egressip-reachability-total-timeout", "2"]);
    let options = [port, timeout, ["--egressip-reachability-grace", &grace]].concat();
    let Stage { mut ground, leader, old, heir } = start(context, &options)?;
    let sources = [NAMES[leader - 1], NAMES[heir - 1]];
    let emitters = Emitters::watch(&ground, ADDRESS, &sources)?;
    emitters.begins(old, EFFECT)?;
    println!("the agent of node{old} is killed, and the node is no egress node any more");
    ground.agent(old)?.kill()?;
    ground.assignable(old, false)?;
    emitters.begins(heir, MOVES)?;
    emitters.were(&[old, heir])?;
    println!("the agent of node{old} starts again");
    ground.agent(old)?.restart().context("the old gateway's agent")?;
    ground.serves(old)?;
    until(&format!("node{old} has given it up"), EFFECT, || Ok((owned(&ground, old)? == 0).then_some(())))?;
    println!("the API server is away");
    let server = ground.cluster.in_memory().context("only the lab's own API server can be stopped")?;
    server.set_outage(true);
    let stopped = until(&format!("node{heir} does not emit it"), EFFECT, || {
        let said = ground.agents[heir - 1].status(&[])?;
        Ok(String::from_utf8_lossy(&said.stdout).contains("fenced").then_some(()))
    });
    ground.cluster.in_memory().into_iter().for_each(|server| server.set_outage(false));
    stopped?;
    for name in NAMES {
        ground.is_seen_as(name, Some(ADDRESS), None)?;
    }
    Ok(())
}
