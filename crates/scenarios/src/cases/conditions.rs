//! An object's conditions say what its pods' packets show.

use super::bad_objects::anything;
use crate::prelude::*;
use egress_lab::api_objects::{condition, path_of};
use egress_lab::topology::EXT_LAN;
use egress_lab::topology::addresses::SERVER;
use egress_lab::wait::REPORTED as COUNTED;

const V4: &str = "172.18.0.110";
/// An address of a host of the nodes' network that is no node.
const TAKEN: &str = "172.18.0.177";
/// From when the address has a node: a claim that fails for half a second, a probe, and the status.
const REPORTED: Duration = Duration::from_millis(3 * 1000);

/// And count as away when they have not answered for so long.
const AWAY: Duration = Duration::from_secs(30);

/// Three times the ten seconds after which a status says that no pod is selected.
const NO_POD: Duration = Duration::from_secs(3 * 10);

const DROPPED: &str = "packets of pods that no other object serves are dropped";
const LEAVE: &str = "packets of pods that no other object serves leave with their nodes' addresses";

/// The condition `Assigned` once it has this reason, and whether `Degraded` is true, and why.
fn reported(cluster: &TestCluster, object: &Value, wanted: &str) -> Result<(String, (bool, String))> {
    until(&format!("{} is {wanted}", path_of(object)), EFFECT, || {
        let Some(found) = cluster.api.get(&path_of(object))? else { return Ok(None) };
        let conditions = found.pointer("/status/conditions").and_then(Value::as_array).cloned().unwrap_or_default();
        let degraded = conditions.iter().find(|condition| condition["type"] == "Degraded");
        let degraded = degraded.map(|condition| {
            (condition["status"] == "True", condition["reason"].as_str().unwrap_or_default().to_owned())
        });
        let assigned = condition(&found).filter(|(reason, _)| reason == wanted);
        Ok(assigned.map(|(_, message)| message).zip(degraded))
    })
}

/// Each time an address gets no node or is not served, the object says why, what becomes of packets, and so it is.
pub(super) fn of_what_is_not_served(context: &LabContext) -> Result<()> {
    let cluster = TestCluster::with_crd(context, vec![pod("one", "red", 1, &[])], 0, anything)?;
    let one = cluster.pod("one")?;
    let becomes = |expected| cluster.becomes(&one.netns, SERVER.v4.into(), expected);
    let node = Observed::Source(one.node.address().v4.into());
    let object = |address: &str| egress_ip("eip", &[address], &labels("house", "red"), &all());

    println!("no node has the label");
    cluster.put(&object(V4))?;
    let (message, _) = reported(&cluster, &object(V4), "NoEligibleNode")?;
    ensure!(
        message.contains("no node has the label k8s.ovn.org/egress-assignable") && message.ends_with(LEAVE),
        "{message}"
    );
    becomes(node)?;

    println!("no node is in its network");
    cluster.assignable(1, true)?;
    cluster.put(&object("192.0.2.100"))?;
    until_true("the networks are named", EFFECT, || {
        let (message, _) = reported(&cluster, &object(V4), "NoEligibleNode")?;
        Ok(message.contains("they are in 172.18.0.0/16, ") && message.ends_with(LEAVE))
    })?;
    becomes(node)?;

    println!("it is no address");
    cluster.put(&object("172.18.0.300"))?;
    let (message, _) = reported(&cluster, &object(V4), "InvalidEgressIP")?;
    ensure!(message.ends_with(DROPPED), "{message}");
    becomes(Observed::Nothing)?;

    println!("another host has it");
    let host = |line: &str| cluster.lab.ext().exec("ip", &line.split(' ').collect::<Vec<_>>()).map(drop);
    host(&format!("addr add {TAKEN}/16 dev {EXT_LAN}"))?;
    cluster.assign(&object(TAKEN))?;
    let begun = Instant::now();
    let (message, degraded) = reported(&cluster, &object(TAKEN), "NotServed")?;
    println!("said after {} ms: {message}", begun.elapsed().as_millis());
    ensure!(begun.elapsed() < REPORTED, "said after {:?}", begun.elapsed());
    ensure!(message.contains("assigned to node node1, which does not serve it: another host ("), "{message}");
    ensure!(message.ends_with("packets that would leave with it are dropped"), "{message}");
    ensure!(degraded == (true, "AddressInUse".to_owned()), "{degraded:?}");
    becomes(Observed::Nothing)?;
    host(&format!("addr del {TAKEN}/16 dev {EXT_LAN}"))?;
    becomes(Observed::Source(TAKEN.parse()?))?;
    let (message, degraded) = reported(&cluster, &object(TAKEN), "Assigned")?;
    ensure!(message == "every egress IP has a node" && !degraded.0, "{message} {degraded:?}");
    Ok(())
}

/// An older object that lists what is no address has nothing to serve with, so it takes no pod from a younger one.
pub(super) fn of_an_older_object_that_can_serve_nothing(context: &LabContext) -> Result<()> {
    let cluster = TestCluster::with_crd(context, vec![pod("one", "red", 1, &[])], 0, anything)?;
    cluster.assignable(1, true)?;
    let old = egress_ip("old", &["172.18.0.300"], &labels("house", "red"), &all());
    cluster.put(&old)?;
    reported(&cluster, &old, "InvalidEgressIP")?;
    // Ages are whole seconds.
    std::thread::sleep(Duration::from_millis(1_100));
    cluster.assign(&egress_ip("young", &[V4], &labels("house", "red"), &all()))?;
    cluster.is_seen_as("one", Some(V4), None)?;
    let event = cluster.event("old", "UndefinedRequest")?;
    ensure!(event.contains("another egressIP object young is serving them"), "{event}");
    println!("the older one can serve: it has its pods");
    let good = egress_ip("old", &["172.18.0.111"], &labels("house", "red"), &all());
    cluster.assign(&good)?;
    cluster.is_seen_as("one", Some("172.18.0.111"), None)?;
    println!("and keeps them when it loses its address");
    cluster.put(&old)?;
    reported(&cluster, &old, "InvalidEgressIP")?;
    let from = &cluster.pod("one").context("the pod")?.netns;
    cluster.becomes(from, SERVER.v4.into(), Observed::Nothing)
}

/// The number of selected pods shows a wrong label, and a condition names the node whose agent is away, also where it can host
/// no address.
pub(super) fn of_selected_pods_and_absent_agents(context: &LabContext) -> Result<()> {
    let pods = [("one", "red", 1), ("two", "red", 3), ("other", "blue", 3)];
    let pods = pods.map(|(name, house, node)| pod(name, house, node, &[])).to_vec();
    let mut cluster = TestCluster::start(context, pods)?;
    cluster.assignable(2, true)?;
    let object = egress_ip("eip", &[V4], &labels("house", "red"), &all());
    cluster.assign(&object)?;
    let count = |cluster: &TestCluster| -> Result<Option<u64>> {
        let found = cluster.api.get(&path_of(&object))?;
        Ok(found.and_then(|found| found.pointer("/status/selectedPods").and_then(Value::as_u64)))
    };
    let counts = |cluster: &TestCluster, wanted: u64| {
        until_true(&format!("{wanted} pods are counted"), COUNTED, || Ok(count(cluster)? == Some(wanted)))
    };
    counts(&cluster, 2)?;
    cluster.label_namespace("blue", "house", Some("red"))?;
    counts(&cluster, 3)?;
    println!("a label that no namespace has");
    cluster.put(&egress_ip("eip", &[V4], &labels("house", "rad"), &all()))?;
    counts(&cluster, 0)?;
    let (_, message) = until("the reason says so", NO_POD, || {
        let found = cluster.api.get(&path_of(&object))?.context("the object")?;
        Ok(condition(&found).filter(|(reason, _)| reason == "NoPodServed"))
    })?;
    println!("{message}");
    ensure!(message.contains("its selectors match none"), "{message}");
    cluster.put(&object)?;
    cluster.label_namespace("blue", "house", Some("blue"))?;
    counts(&cluster, 2)?;
    let (_, degraded) = reported(&cluster, &object, "Assigned")?;
    ensure!(!degraded.0, "{degraded:?}");

    let away = 3;
    println!("the agent of node{away}, which hosts nothing, is away");
    cluster.agent(away)?.kill()?;
    let killed = Instant::now();
    let degraded = |cluster: &TestCluster| -> Result<(bool, String)> {
        let found = cluster.api.get(&path_of(&object))?.context("the object")?;
        let conditions = found.pointer("/status/conditions").and_then(Value::as_array).cloned().unwrap_or_default();
        let found = conditions.iter().find(|condition| condition["type"] == "Degraded").context("the condition")?;
        Ok((found["status"] == "True", format!("{} {}", found["reason"], found["message"])))
    };
    until_true("the condition names it", AWAY + COUNTED, || Ok(degraded(&cluster)?.0))?;
    let (_, message) = degraded(&cluster)?;
    println!("said after {} s: {message}", killed.elapsed().as_secs());
    ensure!(
        message.contains("AgentAway") && message.contains(&format!("node node{away}")) && message.contains("; 1 of"),
        "{message}"
    );
    ensure!(killed.elapsed() >= AWAY - COUNTED, "said after {:?}", killed.elapsed());
    ensure!(count(&cluster)? == Some(2), "what it said last is forgotten");
    cluster.agent(away)?.restart()?;
    until_true("and takes it back", COUNTED + EFFECT, || Ok(!degraded(&cluster)?.0))
}
