//! Steps of every story.

use super::pods::SIMPSON;
use super::walkthrough::Walkthrough;
use crate::prelude::*;
use egress_lab::agents;

pub(super) fn only(address: IpAddr) -> Option<BTreeSet<IpAddr>> {
    Some(BTreeSet::from([address]))
}

/// How the world sees a pod without an egress IP.
pub(super) fn as_node(pod: &LabPod, to: IpAddr) -> Option<BTreeSet<IpAddr>> {
    only(pod.node.address().towards(to))
}

pub(super) fn before(walkthrough: &mut Walkthrough) -> Result<()> {
    walkthrough.report.begin("Before: the world sees the node that a pod runs on");
    walkthrough.expect_outside(as_node)
}

/// Pod to pod, pod to another node, pod to its own node: as without us.
pub(super) fn inside(walkthrough: &mut Walkthrough) -> Result<()> {
    walkthrough.report.begin("Inside the cluster nothing changes");
    let caller = walkthrough
        .cluster
        .lab
        .pods()
        .iter()
        .find(|pod| pod.namespace == SIMPSON)
        .context("no pod to call from")?
        .clone();
    let target =
        walkthrough.cluster.lab.pods().iter().find(|pod| pod.node != caller.node).context("no pod to call")?.clone();
    let _in_pod = Server::in_pod(&walkthrough.cluster.lab, &target)?;
    for to in target.addresses.both() {
        let what = format!("{} -> pod {} on {}", caller.name, target.name, target.node.name());
        let expected = caller.addresses.towards(to);
        walkthrough.expect_inside(&what, &caller.netns, SocketAddr::new(to, HTTP_PORT), expected)?;
    }
    let nodes = walkthrough.cluster.lab.nodes().to_vec();
    for node in nodes.iter().take(2) {
        let _on_node = Server::on_node(&walkthrough.cluster.lab, node)?;
        let own = node.number == caller.node;
        let expected = if own { caller.addresses } else { caller.node.address() };
        for to in node.number.address().both() {
            let what = format!("{} -> {} {}", caller.name, if own { "its own node" } else { "node" }, node.name());
            walkthrough.expect_inside(&what, &caller.netns, SocketAddr::new(to, HTTP_PORT), expected.towards(to))?;
        }
    }
    Ok(())
}

/// The capture has watched the nodes' network all the while.
pub(super) fn nothing_leaked(walkthrough: &mut Walkthrough) -> Result<()> {
    walkthrough.report.begin("What left the nodes in all this time");
    let seen = walkthrough.capture.take().context("nothing was captured")?.finish()?;
    for (class, name) in [(AddressKind::Egress, "an egress IP"), (AddressKind::Node, "a node's address")] {
        println!("   {:>6} packets to the world with {name}", seen.to_the_world(class));
    }
    println!("   {:>6} frames captured, {} missed", seen.frames, seen.missed);
    walkthrough.report.check("packets with a pod's address", &0, &seen.to_the_world(AddressKind::Pod));
    let checksums = seen.check().err().map_or("right".to_owned(), |error| format!("{error:#}"));
    walkthrough.report.check("checksums", &"right", &checksums);
    Ok(())
}

/// Returns the node's agent, which is dead.
pub(super) fn power_off(walkthrough: &mut Walkthrough, node: NodeNumber) -> Result<Agent> {
    walkthrough.leases_end()?;
    println!("   {}: cables cut, agent killed, the node is no longer Ready", node.name());
    let mut agent = walkthrough.cluster.agents.remove(node.index());
    agents::power(&walkthrough.cluster.lab, &mut agent, false)?;
    walkthrough.cluster.api.set_ready(node, false)?;
    Ok(agent)
}

pub(super) fn power_on(walkthrough: &mut Walkthrough, node: NodeNumber, mut agent: Agent) -> Result<()> {
    println!("   {} is switched on again", node.name());
    agents::power(&walkthrough.cluster.lab, &mut agent, true)?;
    walkthrough.cluster.agents.insert(node.index(), agent);
    walkthrough.cluster.api.set_ready(node, true)
}
