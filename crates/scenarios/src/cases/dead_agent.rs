//! A gateway whose agent is dead while its programs live: the address moves all the same, and not before the old programs have
//! stopped emitting it.
//!
//! The deadline in the programs passes, and the controller waits for it.

use super::leader::leader;
use super::senders::Senders;
use crate::prelude::*;

const ADDRESS: &str = "172.18.0.110";
const NAMES: [&str; 3] = ["one", "two", "three"];
/// Instead of the default of thirty.
const GRACE: Duration = Duration::from_secs(4);
/// The total timeout before and after the grace, the suspicion, and the claim; three times that.
const MOVES: Duration = Duration::from_secs(3 * (4 + 2 + 2 + 1));

/// The nodes by what they do.
struct DeadAgentTest {
    cluster: TestCluster,
    leader: usize,
    old: usize,
    new_owner: usize,
}

fn start(context: &LabContext, extra: &[&str]) -> Result<DeadAgentTest> {
    let pods = NAMES.iter().zip(1..).map(|(name, number)| pod(name, "red", number, &[])).collect();
    let mut cluster = TestCluster::start_with(context, pods, extra)?;
    // The leader lives, and so does the agent of the source node.
    let leader = leader(&cluster)?;
    let (old, new_owner) = (leader % 3 + 1, (leader + 1) % 3 + 1);
    cluster.assignable(old, true)?;
    cluster.assign(&egress_ip("held", &[ADDRESS], &labels("house", "red"), &all()))?;
    for name in NAMES {
        cluster.is_seen_as(name, Some(ADDRESS), None)?;
    }
    cluster.assignable(new_owner, true)?;
    cluster.serves(new_owner)?;
    Ok(DeadAgentTest { cluster, leader, old, new_owner })
}

/// Killed and kept from starting: the address has one emitter at a time, and none but the new node's programs in the end.
pub(super) fn does_not_keep_its_addresses(context: &LabContext) -> Result<()> {
    let grace = GRACE.as_secs().to_string();
    let DeadAgentTest { mut cluster, leader, old, new_owner } =
        start(context, &["--egressip-reachability-grace", &grace])?;
    let sources = [NAMES[leader - 1], NAMES[new_owner - 1]];
    let senders = Senders::watch(&cluster, ADDRESS, &sources)?;
    senders.begins(old, EFFECT)?;
    println!("the agent of node{old} is killed");
    cluster.agent(old)?.kill()?;
    senders.begins(new_owner, MOVES)?;
    ensure!(cluster.owns(old)?, "node{old} has given up the address without an agent");
    let printed = cluster.agent(old)?.status(&[])?;
    let printed = String::from_utf8_lossy(&printed.stdout).into_owned();
    ensure!(printed.contains("expired"), "status does not say that the lease has expired:\n{printed}");
    for name in sources {
        cluster.is_seen_as(name, Some(ADDRESS), None)?;
    }
    println!("the agent of node{old} starts again");
    cluster.agent(old)?.restart().context("the old gateway's agent")?;
    cluster.serves(old)?;
    until_true(&format!("node{old} has given it up"), EFFECT, || Ok(!cluster.owns(old)?))?;
    senders.were(&[old, new_owner])?;
    for name in NAMES {
        cluster.is_seen_as(name, Some(ADDRESS), None)?;
    }
    Ok(())
}

/// Without a health port (OVN-Kubernetes' discard port) agents hold addresses by reading the ledger: also then no address
/// has two emitters, and who cannot read it stops.
pub(super) fn is_waited_for_without_a_health_port(context: &LabContext) -> Result<()> {
    let grace = GRACE.as_secs().to_string();
    let (port, timeout) = (["--egressip-node-healthcheck-port", "0"], ["--egressip-reachability-total-timeout", "2"]);
    let options = [port, timeout, ["--egressip-reachability-grace", &grace]].concat();
    let DeadAgentTest { mut cluster, leader, old, new_owner } = start(context, &options)?;
    let sources = [NAMES[leader - 1], NAMES[new_owner - 1]];
    let senders = Senders::watch(&cluster, ADDRESS, &sources)?;
    senders.begins(old, EFFECT)?;
    println!("the agent of node{old} is killed, and the node is no egress node any more");
    cluster.agent(old)?.kill()?;
    cluster.assignable(old, false)?;
    senders.begins(new_owner, MOVES)?;
    senders.were(&[old, new_owner])?;
    println!("the agent of node{old} starts again, and the node is an egress node");
    // With one egress node for more than ten seconds the lease has no end, and an outage of the API server ends nothing.
    cluster.assignable(old, true)?;
    cluster.agent(old)?.restart().context("the old gateway's agent")?;
    cluster.serves(old)?;
    until_true(&format!("node{old} has given it up"), EFFECT, || Ok(!cluster.owns(old)?))?;
    until_true(&format!("the lease of node{new_owner} has an end"), EFFECT, || cluster.leases_have_an_end())?;
    println!("the API server is away");
    cluster.set_outage(true)?;
    let stopped = until_true(&format!("node{new_owner} does not emit it"), EFFECT, || {
        let printed = cluster.agents[new_owner - 1].status(&[])?;
        Ok(String::from_utf8_lossy(&printed.stdout).contains("lease        expired"))
    });
    cluster.set_outage(false)?;
    stopped?;
    for name in NAMES {
        cluster.is_seen_as(name, Some(ADDRESS), None)?;
    }
    Ok(())
}
