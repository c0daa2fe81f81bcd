//! An address that is moved by plan, while pods of three nodes open a connection every 10 ms and keep others: the old node serves
//! until the new one is ready, and passes on what comes late.

use std::net::SocketAddr;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use super::ground::{Ground, pod};
use super::objects::{EGRESS_IPS, all, assigned, egress_ip, labels};
use super::wait::{EFFECT, until};
use crate::lab::addresses as plan;
use crate::lab::server::ECHO_PORT;
use crate::soak::echo::{self, Echo};
use crate::soak::sampler::{PATIENCE, Sampler};
use crate::soak::streams::{COUNT, Streams};
use crate::testing::lab::LabContext;

const ADDRESSES: [&str; 2] = ["172.18.0.110", "fd00:172:18::110"];
const NAMES: [&str; 2] = ["four", "six"];
const NODES: usize = 3;
/// Before a move, and behind it: longer than late packets are passed on.
const QUIET: Duration = Duration::from_millis(2_500);

/// A pod's new connections, and those that it keeps.
struct Caller {
    pod: String,
    expected: &'static str,
    sampler: Sampler,
    streams: Streams,
}

/// A lab with an object for each family, whose addresses node1 has, and on each node a pod of each.
fn start(context: &LabContext) -> Result<(Ground, Echo)> {
    let of_node = |node: usize| NAMES.map(|name| pod(&format!("{name}{node}"), "red", node, &[("object", name)]));
    let ground = Ground::start(context, (1..=NODES).flat_map(of_node).collect())?;
    let echo = Echo::start(ground.lab.outside(), &plan::SERVER.both())?;
    ground.assignable(1, true)?;
    for (name, address) in NAMES.into_iter().zip(ADDRESSES) {
        ground.assign(&egress_ip(name, &[address], &all(), &labels("object", name)))?;
    }
    for node in 1..=NODES {
        ground.is_seen_as(&format!("four{node}"), Some(ADDRESSES[0]), None)?;
        ground.is_seen_as(&format!("six{node}"), None, Some(ADDRESSES[1]))?;
    }
    Ok((ground, echo))
}

fn call(ground: &Ground) -> Result<Vec<Caller>> {
    let mut callers = Vec::new();
    for node in 1..=NODES {
        for (name, (server, expected)) in NAMES.iter().zip(plan::SERVER.both().into_iter().zip(ADDRESSES)) {
            let pod = format!("{name}{node}");
            let netns = &ground.pod(&pod)?.netns;
            let sampler = Sampler::start(netns, SocketAddr::new(server, echo::PORT))?;
            let streams = Streams::start(netns, SocketAddr::new(server, ECHO_PORT))?;
            callers.push(Caller { pod, expected, sampler, streams });
        }
    }
    sleep(QUIET);
    Ok(callers)
}

/// Waits until a node has both addresses.
fn are_on(ground: &Ground, node: usize) -> Result<()> {
    let name = format!("node{node}");
    until(&format!("{name} has both addresses"), EFFECT, || {
        let mut holders = Vec::new();
        for object in NAMES {
            let object = ground.cluster.get(&format!("{EGRESS_IPS}/{object}"))?.unwrap_or_default();
            holders.extend(assigned(&object).into_iter().map(|(_, node)| node));
        }
        Ok((holders == [name.as_str(); 2]).then_some(()))
    })
}

/// Plays `go` while the pods call; nothing may be lost, no connection end, and nothing bear another address.
fn loses_nothing(
    ground: &Ground,
    callers: &[Caller],
    what: &str,
    go: impl FnOnce(&Ground) -> Result<()>,
) -> Result<()> {
    callers.iter().for_each(|caller| drop(caller.sampler.take()));
    let begin = Instant::now();
    let census: Vec<_> = callers.iter().map(|caller| caller.streams.census()).collect();
    go(ground)?;
    sleep(QUIET);
    let since = Instant::now();
    sleep(PATIENCE);
    let (mut asked, mut lost, mut strange, mut lives) = (0, Vec::new(), Vec::new(), 0);
    for (caller, census) in callers.iter().zip(&census) {
        for sample in caller.sampler.take() {
            asked += 1;
            match sample.answered {
                None => lost.push((&caller.pod, sample.sent.duration_since(begin))),
                Some((_, seen)) if seen.to_string() != caller.expected => strange.push((&caller.pod, seen)),
                Some(_) => {}
            }
        }
        let (well, live) = caller.streams.survivors(census, since);
        ensure!(well == COUNT as u64, "{} keeps {well} connections", caller.pod);
        lives += live;
        ensure!(live == well, "{what}: {} of {well} connections of {} ended", well - live, caller.pod);
    }
    println!("{what}: {} of {asked} lost, {lives} connections went on", lost.len());
    ensure!(strange.is_empty(), "{what}: seen with another address: {strange:?}");
    ensure!(lost.is_empty(), "{what}: {} of {asked} lost: {:?}", lost.len(), &lost[..lost.len().min(8)]);
    ensure!(asked > 500, "{asked} samples are too few to say anything");
    Ok(())
}

/// The labels of nodes go, one after the other.
pub(super) fn moves_lose_nothing(context: &LabContext) -> Result<()> {
    let (ground, _echo) = start(context)?;
    let callers = call(&ground)?;
    for (old, heir) in [(1, 2), (2, 3), (3, 1)] {
        ground.assignable(heir, true)?;
        loses_nothing(&ground, &callers, &format!("node{old} loses its label"), |ground| {
            ground.assignable(old, false)?;
            are_on(ground, heir)
        })?;
    }
    callers.into_iter().try_for_each(|caller| caller.sampler.finish().and_then(|()| caller.streams.finish()))
}
