//! A node is lost in a large cluster: what changes, and how long it takes to know.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use egress_agent::controller::assignment::{Nodes, Objects};
use egress_agent::controller::decision::{Decision, NoRecords, decide};
use egress_agent::controller::handover::Watch;
use egress_agent::controller::verdict::Statement;
use egress_agent::kube::{convert, keys};
use egress_agent::model::view::{Condition, Conditions, EgressObject};
use serde_json::{Value, json};

const NODES: usize = 1_000;
const OBJECTS: usize = 10_000;

fn node(i: usize) -> Value {
    let address = format!("172.16.{}.{}/12", i / 250, 1 + i % 250);
    json!({
        "metadata": {"name": format!("node-{i}"), "labels": {keys::ASSIGNABLE: ""}, "annotations": {
            keys::PRIMARY_IFADDR: json!({"ipv4": address}).to_string(),
            keys::HOST_CIDRS: json!([address]).to_string(),
            keys::NODE_SUBNETS: json!({"default": [format!("10.{}.{}.0/24", i / 250, i % 250)]}).to_string(),
        }},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    })
}

/// Two addresses each.
fn object(i: usize) -> Value {
    let address = |i: usize| format!("172.{}.{}.{}", 20 + i / 62_500, i / 250 % 250, 1 + i % 250);
    json!({
        "apiVersion": "k8s.ovn.org/v1", "kind": "EgressIP",
        "metadata": {"name": format!("eip-{i}"), "uid": format!("uid-{i}")},
        "spec": {"egressIPs": [address(2 * i), address(2 * i + 1)], "namespaceSelector": {}},
    })
}

#[test]
fn only_what_a_lost_node_had_is_written_anew() {
    let read_node = |i| convert::node(&serde_json::from_value(node(i)).expect("a Node"));
    let read_object = |i| convert::object(&serde_json::from_value(object(i)).expect("an object"));
    let nodes: Nodes = (0..NODES).map(read_node).map(|node| (node.name.clone(), Arc::new(node))).collect();
    let mut objects: Objects =
        (0..OBJECTS).map(read_object).map(|object| (object.name.clone(), Arc::new(object))).collect();
    let (nobody, no_records, mut watch) = (BTreeSet::new(), NoRecords::default(), Watch::default());

    let start = Instant::now();
    let begun = processor_time();
    let fresh = decide(&mut watch, &no_records.known(&objects, &nodes, &nobody, start));
    let all = (start.elapsed(), processor_time() - begun);
    for decision in fresh.all {
        let written = written(&decision);
        objects.insert(written.name.clone(), Arc::new(written));
    }
    let on_lost = |object: &EgressObject| object.items.iter().any(|item| item.node == "node-7");
    let concerned: BTreeSet<&str> = objects.values().filter(|o| on_lost(o)).map(|o| o.name.as_str()).collect();
    assert_eq!(concerned.len(), 2 * OBJECTS / NODES, "the loads are even");

    let lost = BTreeSet::from(["node-7".to_owned()]);
    let start = Instant::now();
    let begun = processor_time();
    let after = decide(&mut watch, &no_records.known(&objects, &nodes, &lost, start));
    let changed: Vec<&Decision> = after.all.iter().filter(|decision| decision.is_new()).collect();
    let one = (start.elapsed(), processor_time() - begun);
    println!(
        "{NODES} nodes, {OBJECTS} objects: {:?} until all addresses have a node, {:?} of it on a processor; \
         {:?} for the loss of one node, {:?} of it on a processor; {} objects change",
        all.0,
        all.1,
        one.0,
        one.1,
        changed.len()
    );
    assert_eq!(changed.iter().map(|decision| decision.object.name.as_str()).collect::<BTreeSet<_>>(), concerned);
    for Decision { object, items, .. } in changed {
        let moved = items.iter().filter(|item| !object.items.contains(item));
        assert_eq!((items.len(), moved.count()), (2, 1), "{}", object.name);
    }
}

/// What this thread has used: other work on the machine does not count.
fn processor_time() -> Duration {
    nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID.now().expect("every kernel has this clock").into()
}

/// The object as it is once all of it is written.
fn written(decision: &Decision) -> EgressObject {
    let found = |(index, one): (usize, &Statement)| {
        let read = Condition {
            status: one.status,
            reason: one.reason.to_owned(),
            message: one.message.clone(),
            observed_generation: decision.object.generation,
            last_transition: String::new(),
        };
        (one.kind.to_owned(), (index, read))
    };
    let found = decision.conditions.iter().enumerate().map(found).collect();
    let conditions = Conditions { listed: true, found };
    EgressObject { items: decision.items.clone(), has_items: true, conditions, ..(*decision.object).clone() }
}
