//! A vector's cluster: Kubernetes objects, their conversion, the decisions, and the written status.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use egress_common::random::Random;
use egress_core::allocation::Nodes;
use egress_core::desired_status::{NoRecords, ObjectStatus, desired_statuses};
use egress_core::keys;
use egress_core::model::interface::EgressInterface;
use egress_core::model::policy::{Policies, PolicyKey, PolicyKind};
use egress_core::model::samples::interface;
use egress_core::ownership::handover::HandoverPlanner;
use egress_kube::convert;
use egress_kube::policy::api_of;
use ipnet::IpNet;
use serde_json::{Value, json};

use crate::Result;
use crate::vector::{Vector, VectorNode, VectorObject, VectorStatusItem};

pub(crate) struct VectorCluster<'v> {
    nodes: Nodes,
    unreachable: BTreeSet<String>,
    /// In the order of their creation.
    objects: Vec<(&'v VectorObject, Vec<VectorStatusItem>)>,
    /// Reasons of all events so far.
    pub(crate) events: BTreeSet<&'static str>,
    no_records: NoRecords,
    planner: HandoverPlanner,
}

impl<'v> VectorCluster<'v> {
    pub(crate) fn new(vector: &'v Vector, numbers: &mut Random) -> Self {
        let unreachable = vector.nodes.iter().filter(|node| !node.reachable).map(|node| node.name.clone()).collect();
        let mut nodes: Vec<(usize, &VectorNode)> = vector.nodes.iter().enumerate().collect();
        nodes = numbers.shuffled(nodes);
        let nodes = nodes.into_iter().map(|(number, node)| {
            let value = serde_json::from_value(node_object(number, node, numbers)).expect("a Node");
            let published = serde_json::from_value(egress_node(node, numbers)).expect("an EgressNode");
            let joined = convert::joined(&convert::node(&value), Some(&convert::agent_facts(&published)));
            (node.name.clone(), Arc::new(joined))
        });
        Self {
            nodes: nodes.collect(),
            unreachable,
            objects: Vec::new(),
            events: BTreeSet::new(),
            no_records: NoRecords::default(),
            planner: HandoverPlanner::default(),
        }
    }

    pub(crate) fn create(&mut self, objects: impl Iterator<Item = &'v VectorObject>, numbers: &mut Random) {
        let new: Vec<_> = objects.map(|object| (object, object.existing_status.clone())).collect();
        self.objects.extend(numbers.shuffled(new));
    }

    /// Decides, and writes the status.
    pub(crate) fn settle(&mut self, numbers: &mut Random) {
        let order = numbers.shuffled(self.objects.iter());
        let as_read = |(object, items): &(&VectorObject, Vec<VectorStatusItem>), numbers: &mut Random| {
            let value = serde_json::from_value(egressip_object(object, items, numbers)).expect("an object");
            (PolicyKey::egress_ip(&object.name), Arc::new(api_of(PolicyKind::EgressIp).read(&value)))
        };
        let policies: Policies = order.into_iter().map(|object| as_read(object, numbers)).collect();
        let known = self.no_records.inputs(&policies, &self.nodes, &self.unreachable, Instant::now());
        let statuses = desired_statuses(&mut self.planner, &known).policies;
        let statuses: BTreeMap<&str, &ObjectStatus> = statuses.iter().map(|one| (one.policy.name(), one)).collect();
        let events = statuses.values().flat_map(|status| &status.events);
        self.events.extend(events.map(|event| event.reason));
        for (object, items) in &mut self.objects {
            let wanted = statuses[object.name.as_str()].items.iter();
            *items = wanted
                .map(|item| VectorStatusItem { node: item.node.clone(), egress_ip: item.egress_ip.clone() })
                .collect();
        }
    }

    pub(crate) fn items(&self) -> Result {
        let sorted = |items: &Vec<VectorStatusItem>| {
            let mut items = items.clone();
            items.sort();
            items
        };
        self.objects.iter().map(|(object, items)| (object.name.clone(), sorted(items))).collect()
    }
}

fn node_object(number: usize, node: &VectorNode, numbers: &mut Random) -> Value {
    let mut annotations = BTreeMap::new();
    let mut annotate = |key: &str, value: Value| {
        let text = match value {
            Value::Null => return,
            Value::String(text) => text,
            value => value.to_string(),
        };
        annotations.insert(key.to_owned(), text);
    };
    annotate(keys::PRIMARY_IFADDR, node.primary_ifaddr.clone());
    annotate(
        keys::HOST_CIDRS,
        match &node.host_cidrs {
            Value::Array(cidrs) => Value::Array(numbers.shuffled(cidrs.clone())),
            other => other.clone(),
        },
    );
    annotate(
        keys::CLOUD_CONFIG,
        match &node.egress_ipconfig {
            Value::Object(first) => json!([first]),
            other => other.clone(),
        },
    );
    if !node.no_host_subnet {
        annotate(keys::NODE_SUBNETS, json!({"default": [format!("10.244.{number}.0/24")]}));
    }
    let ready = if node.ready { "True" } else { "False" };
    json!({
        "metadata": {"name": node.name, "uid": node.name, "labels": node.labels, "annotations": annotations},
        "status": {"conditions": [{"type": "Ready", "status": ready}]},
    })
}

/// What the node's agent publishes: the uplink, and an interface for each other network.
fn egress_node(node: &VectorNode, numbers: &mut Random) -> Value {
    let networks = |value: &Value| -> Vec<IpNet> {
        let values =
            value.as_array().into_iter().flatten().chain(value.as_object().into_iter().flat_map(|o| o.values()));
        values.filter_map(|text| text.as_str()?.parse().ok()).collect()
    };
    let primary = networks(&node.primary_ifaddr);
    let mut others = networks(&node.host_cidrs);
    others.retain(|network| !primary.contains(network));
    let uplink = primary.iter().map(|network| (network.trunc(), None)).collect();
    let mut records = vec![EgressInterface { is_uplink: true, networks: uplink, ..interface("eth0", &[]) }];
    records.extend(others.iter().zip(1..).map(|(network, i)| EgressInterface {
        networks: [(network.trunc(), None)].into(),
        ..interface(&format!("eth{i}"), &[])
    }));
    let interfaces: Vec<_> = numbers.shuffled(records).iter().map(convert::interface::published).collect();
    json!({
        "apiVersion": "egress-agent.io/v1alpha1", "kind": "EgressNode", "metadata": {"name": node.name}, "spec": {},
        "status": {"nodeUID": node.name, "interfaces": interfaces},
    })
}

fn egressip_object(object: &VectorObject, items: &[VectorStatusItem], numbers: &mut Random) -> Value {
    let items = numbers.shuffled(items.iter().map(|item| json!({"node": item.node, "egressIP": item.egress_ip})));
    json!({
        "apiVersion": "k8s.ovn.org/v1", "kind": "EgressIP",
        "metadata": {"name": object.name, "uid": object.name, "creationTimestamp": object.created},
        "spec": {"egressIPs": numbers.shuffled(object.egress_ips.clone()), "namespaceSelector": {}},
        "status": {"items": items},
    })
}
