//! A planned move, while pods of three nodes open a connection every 10 ms and keep others: the old node serves until the new
//! one is ready, and passes on late packets.

use std::process::{Command, Stdio};
use std::thread::sleep;

use crate::prelude::*;
use crate::soak::echo::{self, EchoServer};
use crate::soak::sampler::{PATIENCE, Sampler};
use crate::soak::streams::{COUNT, Streams};
use egress_lab::capture::turns;

const ADDRESSES: [&str; 2] = ["172.18.0.110", "fd00:172:18::110"];
const NAMES: [&str; 2] = ["four", "six"];
const NODES: usize = 3;
/// Before a move, and behind it: longer than late packets are passed on.
const QUIET: Duration = Duration::from_millis(2_500);

/// A pod's new connections, and those that it keeps.
struct MoveCaller {
    pod: String,
    expected: &'static str,
    sampler: Sampler,
    streams: Streams,
}

/// A lab with an object for each family, whose addresses node1 has, and on each node a pod of each.
fn start(context: &LabContext) -> Result<(TestCluster, EchoServer)> {
    let of_node = |node: usize| NAMES.map(|name| pod(&format!("{name}{node}"), "red", node, &[("object", name)]));
    let cluster = TestCluster::start(context, (1..=NODES).flat_map(of_node).collect())?;
    let echo = EchoServer::start(cluster.lab.outside(), &plan::SERVER.both())?;
    cluster.assignable(1, true)?;
    for (name, address) in NAMES.into_iter().zip(ADDRESSES) {
        cluster.assign(&egress_ip(name, &[address], &all(), &labels("object", name)))?;
    }
    for node in 1..=NODES {
        cluster.is_seen_as(&format!("four{node}"), Some(ADDRESSES[0]), None)?;
        cluster.is_seen_as(&format!("six{node}"), None, Some(ADDRESSES[1]))?;
    }
    Ok((cluster, echo))
}

fn call(cluster: &TestCluster) -> Result<Vec<MoveCaller>> {
    let mut callers = Vec::new();
    for node in 1..=NODES {
        for (name, (server, expected)) in NAMES.iter().zip(plan::SERVER.both().into_iter().zip(ADDRESSES)) {
            let pod = format!("{name}{node}");
            let netns = &cluster.pod(&pod)?.netns;
            let sampler = Sampler::start(netns, SocketAddr::new(server, echo::PORT))?;
            let streams = Streams::start(netns, SocketAddr::new(server, ECHO_PORT))?;
            callers.push(MoveCaller { pod, expected, sampler, streams });
        }
    }
    sleep(QUIET);
    Ok(callers)
}

/// Waits until a node has both addresses.
fn are_on(cluster: &TestCluster, node: usize) -> Result<()> {
    let name = format!("node{node}");
    until_true(&format!("{name} has both addresses"), EFFECT, || {
        let mut holders = Vec::new();
        for object in NAMES {
            let object = cluster.api.get(&format!("{EGRESS_IPS}/{object}"))?.unwrap_or_default();
            holders.extend(assigned(&object).into_iter().map(|(_, node)| node));
        }
        Ok(holders == [name.as_str(); 2])
    })
}

/// Plays `go` while the pods call; nothing may be lost, no connection end, and nothing bear another address.
fn loses_nothing(
    cluster: &TestCluster,
    callers: &[MoveCaller],
    what: &str,
    go: impl FnOnce(&TestCluster) -> Result<()>,
) -> Result<()> {
    callers.iter().for_each(|caller| drop(caller.sampler.take()));
    let begin = Instant::now();
    let snapshot: Vec<_> = callers.iter().map(|caller| caller.streams.snapshot()).collect();
    go(cluster)?;
    sleep(QUIET);
    let since = Instant::now();
    sleep(PATIENCE);
    let (mut asked, mut lost, mut strange, mut lives) = (0, Vec::new(), Vec::new(), 0);
    for (caller, snapshot) in callers.iter().zip(&snapshot) {
        for sample in caller.sampler.take() {
            asked += 1;
            match sample.answered {
                None => lost.push((&caller.pod, sample.sent.duration_since(begin))),
                Some((_, seen)) if seen.to_string() != caller.expected => strange.push((&caller.pod, seen)),
                Some(_) => {}
            }
        }
        let (well, live) = caller.streams.survivors(snapshot, since);
        ensure!(well == COUNT as u64, "{} keeps {well} connections", caller.pod);
        lives += live;
        ensure!(live == well, "{what}: {} of {well} connections of {} ended", well - live, caller.pod);
    }
    println!("{what}: {} of {asked} lost, {lives} connections lived on", lost.len());
    ensure!(strange.is_empty(), "{what}: seen with another address: {strange:?}");
    ensure!(lost.is_empty(), "{what}: {} of {asked} lost: {:?}", lost.len(), &lost[..lost.len().min(8)]);
    ensure!(asked > 500, "{asked} samples are too few to say anything");
    Ok(())
}

/// The labels of nodes go, one after the other.
pub(super) fn moves_lose_nothing(context: &LabContext) -> Result<()> {
    let (cluster, _echo) = start(context)?;
    let callers = call(&cluster)?;
    let capture = Capture::watching_owners(&cluster.lab, BTreeSet::new())?;
    for (old, new_owner) in [(1, 2), (2, 3), (3, 1)] {
        cluster.assignable(new_owner, true)?;
        loses_nothing(&cluster, &callers, &format!("node{old} loses its label"), |cluster| {
            cluster.assignable(old, false)?;
            are_on(cluster, new_owner)
        })?;
    }
    let seen = capture.finish()?;
    for address in ADDRESSES {
        let turns = turns(&seen.captured, address.parse()?);
        ensure!(turns == [1, 2, 3, 1].map(node).into_iter().collect::<Result<Vec<_>>>()?, "{address}: {turns:?}");
    }
    callers.into_iter().try_for_each(|caller| caller.sampler.finish().and_then(|()| caller.streams.finish()))
}

/// The output of `egress-agent drain`, and whether it succeeded.
struct DrainOutput {
    well: bool,
    text: String,
}

impl DrainOutput {
    fn has(&self, texts: &[&str]) -> Result<()> {
        texts.iter().try_for_each(|text| {
            ensure!(self.text.contains(text), "{text:?} is not in its output:\n{}", self.text);
            Ok(())
        })
    }
}

/// With an administrator's rights, outside the nodes.
fn drain(context: &LabContext, cluster: &TestCluster, arguments: &[&str]) -> Result<DrainOutput> {
    let kubeconfig = cluster.api.kubeconfig().display().to_string();
    let arguments: Vec<&str> = [&["drain", "--kubeconfig", &kubeconfig], arguments].concat();
    let output = Command::new(&context.built.agent).args(&arguments).stdin(Stdio::null()).output()?;
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    println!("drain {}: {}\n{text}", arguments[3..].join(" "), output.status);
    Ok(DrainOutput { well: output.status.success(), text })
}

/// `egress-agent drain`: an address that no other node can host stays and is served; an address that moves loses nothing. A dead
/// agent does not confirm the release.
pub(super) fn drain_moves_what_can_go(context: &LabContext) -> Result<()> {
    let (mut cluster, _echo) = start(context)?;
    let callers = call(&cluster)?;
    let refused = |arguments: &[&str], words: &[&str]| {
        let printed = drain(context, &cluster, arguments)?;
        ensure!(!printed.well, "it ended well");
        printed.has(words)
    };
    refused(&["node9"], &["there is no node node9"])?;
    loses_nothing(&cluster, &callers, "no other node can host node1's addresses", |_| {
        let cause = "no other node with the label k8s.ovn.org/egress-assignable has a network for it";
        refused(&["node1"], &[ADDRESSES[0], ADDRESSES[1], cause, "2 egress IPs stay and are served"])
    })?;
    cluster.assignable(2, true)?;
    are_on(&cluster, 2)?;
    sleep(QUIET);
    let printed = drain(context, &cluster, &["node1", "--undo"])?;
    ensure!(printed.well, "it is taken back");
    for (old, new_owner) in [(2, 1), (1, 2)] {
        let (old_name, new_owner_name) = (format!("node{old}"), format!("moved to node{new_owner}"));
        loses_nothing(&cluster, &callers, &format!("node{old} is drained"), |cluster| {
            let printed = drain(context, cluster, &[&old_name])?;
            ensure!(printed.well, "it is drained");
            printed.has(&[ADDRESSES[0], ADDRESSES[1], &new_owner_name, "is drained"])?;
            are_on(cluster, new_owner)
        })?;
        if new_owner == 1 {
            refused(&["node1"], &["node2 is drained too"])?;
            // In this order: node1 would give what it has to a node that may have it.
            for node in ["node1", "node2"] {
                ensure!(drain(context, &cluster, &[node, "--undo"])?.well, "it is taken back");
            }
            // Nothing comes back by itself.
            sleep(QUIET);
            are_on(&cluster, 1)?;
        }
    }
    callers.into_iter().try_for_each(|caller| caller.sampler.finish().and_then(|()| caller.streams.finish()))?;
    ensure!(drain(context, &cluster, &["node1", "--undo"])?.well, "it is taken back");
    cluster.agent(2)?.kill()?;
    let printed = drain(context, &cluster, &["node2"])?;
    ensure!(!printed.well, "it ended well");
    printed.has(&["moved to node1", "has not confirmed the release of 172.18.0.110, fd00:172:18::110"])
}
