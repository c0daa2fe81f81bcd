//! A gateway whose agent is dead while its programs live: it answers for its egress IP, and the address moves all the same.
//!
//! Where agents hold leases, the dead one's run out and its address is given away. Where they hold none, the heir finds
//! out by itself who still answers, and waits for it to let go.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::ground::{Ground, node, pod};
use super::leader::leader;
use super::objects::{all, egress_ip, labels};
use super::pins::Pins;
use super::wait::{EFFECT, until};
use crate::lab::agents::Agent;
use crate::testing::lab::LabContext;

const ADDRESS: &str = "172.18.0.110";
/// The agent on the old gateway is not restarted at once: announcements of the claim are over by then, and one that
/// defends the address has been sent.
const CONTESTED: Duration = Duration::from_secs(12);

pub(super) fn does_not_keep_its_addresses(context: &LabContext) -> Result<()> {
    play(context, true)
}

pub(super) fn is_given_time_where_nobody_is_probed(context: &LabContext) -> Result<()> {
    play(context, false)
}

fn play(context: &LabContext, leases: bool) -> Result<()> {
    let names = ["one", "two", "three"];
    let pods = names.iter().zip(1..).map(|(name, number)| pod(name, "red", number, &[])).collect();
    let mut ground = Ground::without_agents(context, pods, 0, |_| {})?;
    let mut options = ground.options(context);
    if !leases {
        options.extra.extend(["--egressip-reachability-total-timeout", "0"].map(str::to_owned));
    }
    ground.agents = Agent::start_all(&ground.lab, &options)?;
    ground.agents_serve()?;
    // The leader lives, and so does the agent of the source node.
    let leader = leader(&ground)?;
    let old = leader % 3 + 1;
    let heir = old % 3 + 1;
    ground.assignable(old, true)?;
    ground.assign(&egress_ip("held", &[ADDRESS], &labels("house", "red"), &all()))?;
    let [source, other] = [leader, heir].map(|number| names[number - 1]);
    for name in [source, other] {
        ground.is_seen_as(name, Some(ADDRESS), None)?;
    }

    println!("the agent of node{old} is killed, the address goes to node{heir}");
    ground.agent(old)?.kill()?;
    ground.assignable(heir, true)?;
    ground.assignable(old, false)?;
    if !leases {
        let told = ground.event("held", "EgressIPConflict")?;
        let holder = node(old)?.address().v4.to_string();
        ensure!(told.contains(&format!("node {holder}")), "the event does not name the holder {holder}: {told}");
        println!("event: {told}");
    }
    let owned =
        |number: usize| Ok::<_, anyhow::Error>(Pins::of(ground.lab.node(node(number)?)).keys("owned_addr")?.len());
    until(&format!("node{heir} has taken it over"), EFFECT, || Ok((owned(heir)? == 1).then_some(())))?;
    ensure!(owned(old)? == 1, "node{old} has given up the address without an agent");
    for name in [source, other] {
        ground.is_seen_as(name, Some(ADDRESS), None)?;
    }
    std::thread::sleep(CONTESTED);
    if leases {
        // Nobody has probed before the claim: who answers is heard when it has been announced.
        let told = ground.event("held", "EgressIPConflict")?;
        let holder = node(old)?.address().v4.to_string();
        ensure!(told.contains(&format!("node {holder}")), "the event does not name the holder {holder}: {told}");
        println!("event: {told}");
    }
    for name in [source, other] {
        ground.is_seen_as(name, Some(ADDRESS), None)?;
    }

    println!("the agent of node{old} starts again");
    ground.agent(old)?.restart().context("the old gateway's agent")?;
    ground.serves(old)?;
    let owned =
        |number: usize| Ok::<_, anyhow::Error>(Pins::of(ground.lab.node(node(number)?)).keys("owned_addr")?.len());
    until(&format!("node{old} has given it up"), EFFECT, || Ok((owned(old)? == 0).then_some(())))?;
    for name in names {
        ground.is_seen_as(name, Some(ADDRESS), None)?;
    }
    Ok(())
}
