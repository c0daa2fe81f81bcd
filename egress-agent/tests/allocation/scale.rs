//! The loss of a node in a large cluster: what changes, and how long the decision takes.
//!
//! The figures need optimized code, so they are a separate command:
//! `cargo test --release -p egress-agent --test allocation -- --ignored --nocapture figures`.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use egress_core::allocation::Nodes;
use egress_core::desired_status::{NoRecords, ObjectStatus, desired_statuses};
use egress_core::keys;
use egress_core::model::policy::{Condition, Conditions, EgressPolicy, Policies, PolicyKind};
use egress_core::ownership::handover::HandoverPlanner;
use egress_core::status::conditions::{ASSIGNED, DEGRADED, DesiredCondition};
use egress_kube::convert;
use egress_kube::policy::api_of;
use serde_json::{Value, json};

const NODES: usize = 1_000;
const OBJECTS: usize = 10_000;

/// Number of losses for the median.
const LOSSES: usize = 11;

/// The addresses of the objects, and the networks of the nodes.
#[derive(Clone, Copy, Debug)]
enum AddressShape {
    /// Two IPv4 addresses each, which every node can host.
    TwoOfOneFamily,
    /// One address of each family; three of ten nodes have IPv6.
    DualStack,
}

fn node(shape: AddressShape, i: usize) -> Value {
    let v4 = format!("172.16.{}.{}/12", i / 250, 1 + i % 250);
    let v6 =
        matches!(shape, AddressShape::DualStack).then(|| format!("fd00:172::{:x}/64", i + 1)).filter(|_| i % 10 < 3);
    let all: Vec<&String> = [&v4].into_iter().chain(&v6).collect();
    json!({
        "metadata": {"name": format!("node-{i}"), "labels": {keys::ASSIGNABLE: ""}, "annotations": {
            keys::PRIMARY_IFADDR: json!({"ipv4": v4, "ipv6": v6.as_deref().unwrap_or_default()}).to_string(),
            keys::HOST_CIDRS: json!(all).to_string(),
            keys::NODE_SUBNETS: json!({"default": [format!("10.{}.{}.0/24", i / 250, i % 250)]}).to_string(),
        }},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    })
}

fn object(shape: AddressShape, i: usize) -> Value {
    let v4 = |i: usize| format!("172.{}.{}.{}", 20 + i / 62_500, i / 250 % 250, 1 + i % 250);
    let second = match shape {
        AddressShape::TwoOfOneFamily => v4(2 * i + 1),
        AddressShape::DualStack => format!("fd00:172::1:{i:x}"),
    };
    json!({
        "apiVersion": "k8s.ovn.org/v1", "kind": "EgressIP",
        "metadata": {"name": format!("eip-{i}"), "uid": format!("uid-{i}")},
        "spec": {"egressIPs": [v4(2 * i), second], "namespaceSelector": {}},
    })
}

/// A cluster, with its current status.
struct Large {
    nodes: Nodes,
    policies: Policies,
    planner: HandoverPlanner,
}

/// The elapsed time, and the CPU time of this thread.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Took {
    processor: Duration,
    passed: Duration,
}

impl Took {
    fn shown(self) -> String {
        format!("{:?}, {:?} of it on a processor", self.passed, self.processor)
    }
}

impl Large {
    fn new(shape: AddressShape) -> Self {
        let read_node = |i| convert::node(&serde_json::from_value(node(shape, i)).expect("a Node"));
        let read_object =
            |i| api_of(PolicyKind::EgressIp).read(&serde_json::from_value(object(shape, i)).expect("an object"));
        let nodes = (0..NODES).map(read_node).map(|node| (node.name.clone(), Arc::new(node))).collect();
        let policies = (0..OBJECTS).map(read_object).map(|policy| (policy.key().clone(), Arc::new(policy))).collect();
        Self { nodes, policies, planner: HandoverPlanner::default() }
    }

    /// The statuses while these nodes are unreachable.
    fn decide(&mut self, lost: &BTreeSet<String>) -> (Vec<ObjectStatus>, Took) {
        let mut no_records = NoRecords::default();
        let known = no_records.inputs(&self.policies, &self.nodes, lost, Instant::now());
        let (start, begun) = (Instant::now(), processor_time());
        let statuses = desired_statuses(&mut self.planner, &known);
        (statuses.policies, Took { processor: processor_time() - begun, passed: start.elapsed() })
    }

    /// Assigns all addresses.
    fn settle(&mut self) -> Took {
        let (statuses, took) = self.decide(&BTreeSet::new());
        for status in statuses {
            let written = written(&status);
            self.policies.insert(written.key().clone(), Arc::new(written));
        }
        took
    }

    /// The objects with an address on the node.
    fn on(&self, node: &str) -> BTreeSet<&str> {
        let is_there = |policy: &&Arc<EgressPolicy>| policy.published.items.iter().any(|item| item.node == node);
        self.policies.values().filter(is_there).map(|policy| policy.name()).collect()
    }
}

#[test]
fn the_loss_of_a_node_changes_only_objects_with_its_addresses() {
    let mut large = Large::new(AddressShape::TwoOfOneFamily);
    large.settle();
    assert_eq!(large.on("node-7").len(), 2 * OBJECTS / NODES, "the loads are even");
    let (statuses, _) = large.decide(&BTreeSet::from(["node-7".to_owned()]));
    let changed: Vec<&ObjectStatus> = statuses.iter().filter(|status| status.is_new()).collect();
    let names: BTreeSet<&str> = changed.iter().map(|status| status.policy.name()).collect();
    assert_eq!(names, large.on("node-7"));
    for ObjectStatus { policy, items, .. } in changed {
        let moved = items.iter().filter(|item| !policy.published.items.contains(item));
        assert_eq!((items.len(), moved.count()), (2, 1), "{}", policy.name());
    }
}

#[test]
#[ignore = "figures of optimized code, a separate command: see above"]
fn figures() {
    println!("{NODES} nodes, {OBJECTS} objects with two addresses each, medians of {LOSSES} losses");
    for shape in [AddressShape::TwoOfOneFamily, AddressShape::DualStack] {
        let mut large = Large::new(shape);
        println!("{shape:?}: all addresses get a node: {}", large.settle().shown());
        let mut losses = Vec::new();
        for loss in 0..LOSSES {
            let lost = format!("node-{}", loss * 7);
            let (statuses, took) = large.decide(&BTreeSet::from([lost.clone()]));
            let changed = statuses.iter().filter(|status| status.is_new()).count();
            assert_eq!(changed, large.on(&lost).len(), "{lost}");
            losses.push(took);
        }
        losses.sort_unstable();
        println!(
            "{shape:?}: one node is lost: {} (least {:?}, most {:?} on a processor)",
            losses[LOSSES / 2].shown(),
            losses[0].processor,
            losses[LOSSES - 1].processor
        );
    }
}

/// CPU time of this thread, without other work on the machine.
fn processor_time() -> Duration {
    nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID.now().expect("every kernel has this clock").into()
}

/// The object after the status is written.
fn written(status: &ObjectStatus) -> EgressPolicy {
    let found = |one: &DesiredCondition| {
        let read = Condition {
            status: one.status,
            reason: one.reason.to_owned(),
            message: one.message.clone(),
            observed_generation: status.policy.origin.generation,
            last_transition: String::new(),
        };
        (one.kind.to_owned(), read)
    };
    let conditions = Conditions::of(&[ASSIGNED, DEGRADED], status.conditions.iter().map(found));
    status.policy.published_as(|published| {
        (published.items, published.has_items, published.conditions) = (status.items.clone(), true, conditions);
    })
}
