//! Claims of addresses that another host has: refused each time, whatever was served before.

use crate::prelude::*;
use egress_lab::api_objects::{condition, path_of};
use egress_lab::topology::EXT_LAN;
use egress_lab::topology::addresses::SERVER;

/// A host of the nodes' network that is no node.
const NEIGHBOUR: &str = "172.18.0.177";
/// Free at first, taken by that host later.
const TAKEN_LATER: &str = "172.18.0.178";
/// The next hop of all nodes.
const ROUTER: &str = "172.18.0.1";
/// Longer than all that follows the deletion of an object.
const FORGOTTEN: Duration = Duration::from_secs(4);

/// Addresses that no egress IP can be, each with a part of its refusal.
const RESERVED: [(&str, &str); 6] = [
    ("172.18.255.255", "broadcast"),
    ("172.18.0.0", "network address"),
    (ROUTER, "next hop"),
    ("fd00:172:18::", "anycast"),
    ("10.244.1.77", "pod"),
    ("0.1.2.3", "this network"),
];

fn held(cluster: &TestCluster) -> Result<usize> {
    let nodes = (1..=3).map(|number| AgentPins::of(cluster.lab.node(node(number)?)).keys("owned_addr"));
    nodes.map(|keys| Ok(keys?.len())).sum()
}

/// No node claims the object's addresses, and an event says so.
fn is_refused(cluster: &TestCluster, name: &str, address: &str) -> Result<()> {
    cluster.put(&egress_ip(name, &[address], &labels("house", "red"), &all()))?;
    let event = cluster.event(name, "EgressIPConflict")?;
    println!("event: {event}");
    ensure!(held(cluster)? == 0, "{address} is served by {name} although another host has it");
    Ok(())
}

/// An earlier assignment proves nothing about the present owner of the address.
pub(super) fn are_probed_for_each_time(context: &LabContext) -> Result<()> {
    let pods = vec![pod("one", "red", 1, &[]), pod("two", "red", 2, &[])];
    let cluster = TestCluster::start(context, pods)?;
    let host = |line: &str| cluster.lab.ext().exec("ip", &line.split(' ').collect::<Vec<_>>()).map(drop);
    host(&format!("addr add {NEIGHBOUR}/16 dev {EXT_LAN}"))?;
    for number in 1..=2 {
        cluster.assignable(number, true)?;
    }
    is_refused(&cluster, "first", NEIGHBOUR)?;
    cluster.remove("first")?;
    thread::sleep(FORGOTTEN);
    is_refused(&cluster, "second", NEIGHBOUR)?;
    cluster.remove("second")?;

    println!("{TAKEN_LATER} is served, released, and taken by a host");
    cluster.assign(&egress_ip("served", &[TAKEN_LATER], &labels("house", "red"), &all()))?;
    cluster.is_seen_as("one", Some(TAKEN_LATER), None)?;
    cluster.remove("served")?;
    until_true("it is released", EFFECT, || Ok(held(&cluster)? == 0))?;
    host(&format!("addr add {TAKEN_LATER}/16 dev {EXT_LAN}"))?;
    thread::sleep(FORGOTTEN);
    is_refused(&cluster, "later", TAKEN_LATER)
}

/// Nodes, networks and next hops keep their addresses.
pub(super) fn are_refused_with_a_reason(context: &LabContext) -> Result<()> {
    let cluster = TestCluster::start(context, vec![pod("one", "red", 1, &[])])?;
    cluster.assignable(1, true)?;
    for (number, (address, reason)) in (1..).zip(RESERVED) {
        let name = format!("reserved{number}");
        let object = egress_ip(&name, &[address], &labels("house", "red"), &all());
        cluster.put(&object)?;
        let reported = until(&format!("{address} is refused"), EFFECT, || {
            let object = cluster.api.get(&path_of(&object))?;
            Ok(object.as_ref().and_then(condition).filter(|(reason, _)| reason == "ReservedAddress"))
        })?;
        ensure!(reported.1.contains(reason), "{address}: the condition does not say {reason}: {}", reported.1);
        let event = cluster.event(&name, "ReservedAddress")?;
        ensure!(event.contains(reason), "{address}: the event does not say {reason}: {event}");
        ensure!(held(&cluster)? == 0, "{address} is served");
        cluster.remove(&name)?;
    }
    let pod = cluster.pod("one")?;
    cluster.becomes(&pod.netns, SERVER.v4.into(), Observed::Source(pod.node.address().v4.into()))
}
