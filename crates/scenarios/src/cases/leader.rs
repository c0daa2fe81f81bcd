//! One controller leads. When it is killed, the other takes over the Lease; when it is stopped, it gives the Lease up first.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use egress_lab::api_objects::{all, egress_ip, labels};
use egress_lab::test::LabContext;
use egress_lab::test_cluster::{Ground, pod};
use egress_lab::wait::until;

pub(super) const LEASE: &str = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/egress-agent-leader";
/// Three times the lease's duration: what docs/operations/handover-and-failover.md says of an election.
pub(super) const TAKE_OVER: Duration = Duration::from_secs(3 * 2);
/// A leader that gives the Lease up saves the other the waiting.
const HAND_OVER: Duration = Duration::from_secs(3);

pub(super) fn goes_and_another_comes(context: &LabContext) -> Result<()> {
    let mut ground = Ground::start(context, vec![pod("caller", "red", 1, &[])])?;
    for node in 1..=3 {
        ground.assignable(node, true)?;
    }
    let object = |name: &str, address: &str| egress_ip(name, &[address], &labels("house", "red"), &all());
    ground.assign(&object("first", "172.18.0.110"))?;
    ground.is_seen_as("caller", Some("172.18.0.110"), None)?;

    let killed = leader(&ground)?;
    println!("the controller of node{killed} leads and is killed");
    ground.controller(killed)?.kill()?;
    // Nobody leads: what is assigned stays as it is.
    ground.is_seen_as("caller", Some("172.18.0.110"), None)?;
    let second = another(&ground, killed, TAKE_OVER)?;
    ground.assign(&object("second", "172.18.0.111"))?;

    println!("the controller of node{second} leads and is stopped, the other runs again");
    ground.controller(killed)?.restart()?;
    // It has seen who leads.
    std::thread::sleep(HAND_OVER);
    ground.controller(second)?.terminate(Duration::from_secs(5))?;
    ensure!(another(&ground, second, HAND_OVER)? == killed, "a third leads");
    ground.assign(&object("third", "172.18.0.112"))?;
    ground.is_seen_as("caller", Some("172.18.0.110"), None)
}

/// The node whose controller holds the Lease.
pub(super) fn leader(ground: &Ground) -> Result<usize> {
    until("a controller leads", TAKE_OVER, || holder(ground))
}

fn another(ground: &Ground, than: usize, patience: Duration) -> Result<usize> {
    until(&format!("another than node{than} leads"), patience, || Ok(holder(ground)?.filter(|holder| *holder != than)))
}

fn holder(ground: &Ground) -> Result<Option<usize>> {
    let Some(lease) = ground.cluster.get(LEASE)? else { return Ok(None) };
    let holder = lease["spec"]["holderIdentity"].as_str().unwrap_or_default();
    let Some((node, _)) = holder.split_once('_') else { return Ok(None) };
    let number = node.strip_prefix("node").and_then(|number| number.parse().ok());
    number.map(Some).with_context(|| format!("the lease is held by {holder}"))
}
