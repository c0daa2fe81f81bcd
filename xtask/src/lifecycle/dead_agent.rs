//! A gateway whose agent is dead while its programs live: the address moves all the same, and not before the old programs have
//! stopped emitting it.
//!
//! Where agents hold leases, the deadline in the programs passes, and the controller waits for it. Where they hold none, the
//! new node finds out by itself who still answers, and waits for it to let go.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::emitters::Emitters;
use super::ground::{Ground, node, pod};
use super::leader::leader;
use super::objects::{all, egress_ip, labels};
use super::pins::Pins;
use super::wait::{EFFECT, until};
use crate::testing::lab::LabContext;

const ADDRESS: &str = "172.18.0.110";
const NAMES: [&str; 3] = ["one", "two", "three"];
/// Instead of the default of thirty.
const GRACE: Duration = Duration::from_secs(4);
/// The total timeout before the grace and behind it, the suspicion, and the claim; three times that.
const MOVES: Duration = Duration::from_secs(3 * (4 + 2 + 2 + 1));
/// The agent on the old gateway is not restarted at once: announcements of the claim are over by then, and one that
/// defends the address has been sent.
const CONTESTED: Duration = Duration::from_secs(12);

/// The nodes by what they do.
struct Stage {
    ground: Ground,
    leader: usize,
    old: usize,
    heir: usize,
}

fn start(context: &LabContext, extra: [&str; 2]) -> Result<Stage> {
    let pods = NAMES.iter().zip(1..).map(|(name, number)| pod(name, "red", number, &[])).collect();
    let mut ground = Ground::start_with(context, pods, &extra)?;
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
    let Stage { mut ground, leader, old, heir } = start(context, ["--egressip-reachability-grace", &grace])?;
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

pub(super) fn is_given_time_where_nobody_is_probed(context: &LabContext) -> Result<()> {
    let Stage { mut ground, leader, old, heir } = start(context, ["--egressip-reachability-total-timeout", "0"])?;
    println!("the agent of node{old} is killed, the address goes to node{heir}");
    ground.agent(old)?.kill()?;
    ground.assignable(old, false)?;
    let told = ground.event("held", "EgressIPConflict")?;
    let holder = node(old)?.address().v4.to_string();
    ensure!(told.contains(&format!("node {holder}")), "the event does not name the holder {holder}: {told}");
    println!("event: {told}");
    until(&format!("node{heir} has taken it over"), EFFECT, || Ok((owned(&ground, heir)? == 1).then_some(())))?;
    ensure!(owned(&ground, old)? == 1, "node{old} has given up the address without an agent");
    let sources = [NAMES[leader - 1], NAMES[heir - 1]];
    for name in sources {
        ground.is_seen_as(name, Some(ADDRESS), None)?;
    }
    std::thread::sleep(CONTESTED);
    for name in sources {
        ground.is_seen_as(name, Some(ADDRESS), None)?;
    }
    println!("the agent of node{old} starts again");
    ground.agent(old)?.restart().context("the old gateway's agent")?;
    ground.serves(old)?;
    until(&format!("node{old} has given it up"), EFFECT, || Ok((owned(&ground, old)? == 0).then_some(())))?;
    for name in NAMES {
        ground.is_seen_as(name, Some(ADDRESS), None)?;
    }
    Ok(())
}
