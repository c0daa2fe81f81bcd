//! One controller leads. When it is killed, the other takes over the Lease; when it is stopped, it gives the Lease up first.

use crate::prelude::*;

/// Three times the lease's duration: what docs/operations/handover-and-failover.md says of an election.
pub(super) const TAKE_OVER: Duration = Duration::from_secs(3 * 2);
/// A leader that gives the Lease up saves the other the waiting.
const HAND_OVER: Duration = Duration::from_secs(3);

pub(super) fn goes_and_another_comes(context: &LabContext) -> Result<()> {
    let mut cluster = TestCluster::start(context, vec![pod("caller", "red", 1, &[])])?;
    for node in 1..=3 {
        cluster.assignable(node, true)?;
    }
    let object = |name: &str, address: &str| egress_ip(name, &[address], &labels("house", "red"), &all());
    cluster.assign(&object("first", "172.18.0.110"))?;
    cluster.is_seen_as("caller", Some("172.18.0.110"), None)?;

    let killed = leader(&cluster)?;
    println!("the controller of node{killed} leads and is killed");
    cluster.controller(killed)?.kill()?;
    // No controller leads: assignments stay as they are.
    cluster.is_seen_as("caller", Some("172.18.0.110"), None)?;
    let second = another(&cluster, killed, TAKE_OVER)?;
    cluster.assign(&object("second", "172.18.0.111"))?;

    println!("the controller of node{second} leads and is stopped, the other runs again");
    cluster.controller(killed)?.restart()?;
    // It has seen who leads.
    std::thread::sleep(HAND_OVER);
    cluster.controller(second)?.terminate(Duration::from_secs(5))?;
    ensure!(another(&cluster, second, HAND_OVER)? == killed, "a third leads");
    cluster.assign(&object("third", "172.18.0.112"))?;
    cluster.is_seen_as("caller", Some("172.18.0.110"), None)
}

/// The node whose controller holds the Lease.
pub(super) fn leader(cluster: &TestCluster) -> Result<usize> {
    until("a controller leads", TAKE_OVER, || holder(cluster))
}

fn another(cluster: &TestCluster, than: usize, patience: Duration) -> Result<usize> {
    until(&format!("another than node{than} leads"), patience, || Ok(holder(cluster)?.filter(|holder| *holder != than)))
}

fn holder(cluster: &TestCluster) -> Result<Option<usize>> {
    Ok(cluster.leader()?.map(|(node, _)| node.index() + 1))
}
