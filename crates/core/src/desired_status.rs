//! The desired status of every policy, its events, and the changes of the ledger's records, computed by the leader from
//! policies, nodes, their current status, open hand-overs and the time. Pure, except for the memory of
//! [`HandoverPlanner`].
//!
//! [`assign`] computes where addresses should be, [`HandoverPlanner::plan`] what of that may be written now, and
//! [`conditions`] what the status reports.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use crate::allocation::{AssignmentInputs, EntryStatus, Nodes, ObjectAssignment, assign};
use crate::model::node::{Unserved, UnservedAddresses};
use crate::model::policy::{EgressPolicy, Item, Policies, PolicyPart, parse_egress_ip};
use crate::model::reserved::ClusterNetworks;
use crate::model::services::Services;
use crate::ownership::handover::{Evidence, HandoverPlan, HandoverPlanner, RecordChange, Records};
use crate::status::conditions::{self, DesiredCondition, ObjectEvent};
use crate::status::pod_counts::{PodCounts, WithoutPods};

/// What the desired status depends on. The current status is part of the policies.
#[derive(Clone, Copy, Debug)]
pub struct StatusInputs<'a> {
    pub policies: &'a Policies,
    pub nodes: &'a Nodes,
    /// Nodes that do not answer.
    pub unreachable: &'a BTreeSet<String>,
    /// Nodes that keep their addresses and get no new ones.
    pub absent: &'a BTreeSet<String>,
    /// Assigned addresses that nodes report as not served.
    pub unserved: &'a BTreeMap<String, UnservedAddresses>,
    /// How many pods each policy serves, and the nodes whose agents are away.
    pub pod_counts: &'a PodCounts,
    pub without_pods: &'a WithoutPods,
    /// Whether the node's address serves where no node can host any address of a policy.
    pub node_address_serves: bool,
    pub networks: &'a ClusterNetworks,
    pub services: &'a Services,
    pub records: &'a Records,
    pub evidence: Evidence<'a>,
    /// Nodes whose leases have no end.
    pub endless: &'a BTreeSet<String>,
    pub now: Instant,
}

/// Desired status and events of one policy.
#[derive(Clone, Debug)]
pub struct ObjectStatus {
    pub policy: Arc<EgressPolicy>,
    pub items: Vec<Item>,
    pub conditions: Vec<DesiredCondition>,
    /// The addresses of the policy, if no node can host any of them.
    pub no_eligible_node: Option<Vec<IpAddr>>,
    /// `None` while it is unknown.
    pub selected_pods: Option<u32>,
    pub events: BTreeSet<ObjectEvent>,
}

impl ObjectStatus {
    /// Whether the published status differs.
    pub fn is_new(&self) -> bool {
        let published: Option<BTreeSet<IpAddr>> =
            self.no_eligible_node.as_ref().map(|all| all.iter().copied().collect());
        self.policy.published.items != self.items
            || self.policy.published.no_eligible_node != published
            || self.selected_pods.is_some_and(|count| self.policy.published.selected_pods != Some(count))
            || !self.conditions.iter().all(|condition| condition.is_published(&self.policy))
    }
}

/// The desired state of the cluster's policies.
#[derive(Clone, Debug)]
pub struct DesiredStatuses {
    /// Of every policy, by name.
    pub policies: Vec<ObjectStatus>,
    /// Changes of the records, in order.
    pub record_changes: Vec<RecordChange>,
    /// When to compute it again without another change.
    pub requeue_at: Option<Instant>,
}

pub fn desired_statuses(planner: &mut HandoverPlanner, inputs: &StatusInputs<'_>) -> DesiredStatuses {
    let StatusInputs { policies, nodes, unreachable, absent, networks, services, records, evidence, now, .. } = *inputs;
    let cluster = conditions::ClusterContext::new(nodes, inputs.node_address_serves);
    let hand_overs = &records.open;
    let assignment = assign(&AssignmentInputs { policies, nodes, unreachable, absent, networks, services, hand_overs });
    let mut handover_plan = planner.plan(policies, &assignment, records, &evidence, now);
    let mut statuses = Vec::with_capacity(policies.len());
    // Both are in the order of names.
    let mut assignments = assignment.policies.into_iter().peekable();
    for (name, policy) in policies {
        while assignments.next_if(|(other, _)| other < name).is_some() {}
        let assigned = assignments.next_if(|(other, _)| other == name);
        let mut assigned = assigned.map(|(_, assigned)| assigned).unwrap_or_default();
        let new_items = handover_plan.items.remove(name);
        mark_moving(
            &mut assigned,
            new_items.as_ref().unwrap_or(&policy.published.items),
            (&handover_plan, inputs.endless),
        );
        mark_not_served(&mut assigned, inputs.unserved);
        mark_impaired(&mut assigned, nodes);
        let pods = conditions::PolicyPods {
            without_agent: inputs.pod_counts.pods_without_agent(policy.published.ids),
            has_none: inputs.without_pods.has(name, now),
        };
        let selected_pods = inputs.pod_counts.selected(policy.published.ids);
        let (eligible, cluster) = (assignment.eligible, &cluster);
        statuses.push(object_status(policy, assigned, new_items, (eligible, cluster), (&pods, selected_pods)));
    }
    DesiredStatuses {
        policies: statuses,
        record_changes: handover_plan.record_changes,
        requeue_at: handover_plan.requeue_at,
    }
}

/// `new_items` are the items to write, if any. Otherwise the current ones are right or have to wait.
fn object_status(
    policy: &Arc<EgressPolicy>,
    assigned: ObjectAssignment,
    new_items: Option<Vec<Item>>,
    (eligible, cluster): (usize, &conditions::ClusterContext),
    (pods, selected_pods): (&conditions::PolicyPods<'_>, Option<u32>),
) -> ObjectStatus {
    // While the selectors of a policy are unknown, nothing is published: its pods must not leave with node addresses.
    let is_published = assigned.no_eligible_node() && !policy.is_unknown(PolicyPart::Selectors);
    let conditions = conditions::conditions(policy, &assigned, pods, cluster);
    let events = conditions::events(policy, &assigned, eligible);
    let items = match new_items {
        Some(items) => items,
        None if assigned.items == policy.published.items => assigned.items,
        None => policy.published.items.clone(),
    };
    let no_eligible_node = is_published.then(|| policy.addresses().into_iter().collect());
    ObjectStatus { policy: policy.clone(), items, conditions, no_eligible_node, selected_pods, events }
}

/// Marks entries that have a node and are not served there yet.
fn mark_moving(
    assigned: &mut ObjectAssignment,
    items: &[Item],
    (handover_plan, endless): (&HandoverPlan, &BTreeSet<String>),
) {
    if *items == *assigned.items {
        return;
    }
    for (entry, status) in &mut assigned.entries {
        let EntryStatus::Assigned { node } = status else { continue };
        if !items.iter().any(|item| item.egress_ip == *entry && item.node == *node) {
            let holder = parse_egress_ip(entry).and_then(|address| handover_plan.unreleased.get(&address));
            let from = holder.unwrap_or(node).clone();
            *status = EntryStatus::Moving { is_endless: endless.contains(&from), from };
        }
    }
}

/// Marks entries that their nodes report as not served.
fn mark_not_served(assigned: &mut ObjectAssignment, unserved: &BTreeMap<String, UnservedAddresses>) {
    for (entry, status) in assigned.entries.iter_mut().filter(|_| !unserved.is_empty()) {
        let EntryStatus::Assigned { node } = status else { continue };
        let unserved_there = unserved.get(node).zip(parse_egress_ip(entry));
        if let Some(why) = unserved_there.and_then(|(unserved, address)| unserved.get(&address)) {
            *status = EntryStatus::NotServed { node: std::mem::take(node), why: why.clone() };
        }
    }
}

/// Marks entries that have stayed on a node whose interface for them cannot send.
fn mark_impaired(assigned: &mut ObjectAssignment, nodes: &Nodes) {
    for (entry, status) in &mut assigned.entries {
        let EntryStatus::Assigned { node } = status else { continue };
        let there = nodes.get(node).zip(parse_egress_ip(entry));
        let impairment = there.and_then(|(node, address)| node.impairment(address));
        if let Some((interface, reason)) = impairment {
            let why = Unserved::Interface { name: interface.name.clone(), reason: reason.clone() };
            *status = EntryStatus::NotServed { node: std::mem::take(node), why };
        }
    }
}

/// For tests: no hand-over is open, and the lease of each node that holds an address has expired.
#[derive(Debug, Default)]
pub struct NoRecords {
    records: Records,
    released: BTreeSet<(IpAddr, u64)>,
    given: BTreeMap<(IpAddr, u64), Option<String>>,
    prepared: BTreeMap<(IpAddr, u64), BTreeSet<String>>,
    departed: BTreeMap<IpAddr, String>,
    ends: BTreeMap<String, Instant>,
    absent: BTreeSet<String>,
    unserved: BTreeMap<String, UnservedAddresses>,
    endless: BTreeSet<String>,
    pod_counts: PodCounts,
    without_pods: WithoutPods,
    networks: ClusterNetworks,
    services: Services,
}

impl NoRecords {
    pub fn inputs<'a>(
        &'a mut self,
        policies: &'a Policies,
        nodes: &'a Nodes,
        unreachable: &'a BTreeSet<String>,
        now: Instant,
    ) -> StatusInputs<'a> {
        let holders = policies.values().flat_map(|policy| &policy.published.items).map(|item| item.node.clone());
        self.ends = holders.map(|node| (node, now)).collect();
        let Self { released, given, prepared, departed, ends, .. } = &*self;
        let evidence = Evidence {
            released,
            new_owners: given,
            prepared,
            lease_expiries: ends,
            deleted_objects_gateways: departed,
        };
        let Self { absent, unserved, endless, pod_counts, without_pods, records, networks, services, .. } = &*self;
        let node_address_serves = true;
        StatusInputs {
            policies,
            nodes,
            unreachable,
            absent,
            unserved,
            pod_counts,
            without_pods,
            node_address_serves,
            networks,
            services,
            records,
            evidence,
            endless,
            now,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::allocation::samples::{node, policy};
    use crate::model::interface::{EgressInterface, InterfaceReason, InterfaceState};
    use crate::model::policy::Unreadable;
    use crate::model::samples::interface;

    /// The policy's pods are unknown, so the decision must not let them leave with their nodes' addresses.
    #[test]
    fn unreadable_selectors_never_publish_that_no_node_can_host_the_object() {
        let (name, readable) = policy("a", 1, &["172.18.0.100"], &[]);
        let why = Unreadable { part: PolicyPart::Selectors, why: "podSelector: x".into(), is_known: false };
        let unreadable = EgressPolicy { unreadable: vec![why], ..(*readable).clone() };
        let published = |policy: EgressPolicy| {
            let policies = Policies::from([(name.clone(), Arc::new(policy))]);
            let (nodes, none, mut no_records) = (Nodes::new(), BTreeSet::new(), NoRecords::default());
            let inputs = no_records.inputs(&policies, &nodes, &none, Instant::now());
            desired_statuses(&mut HandoverPlanner::default(), &inputs).policies.remove(0).no_eligible_node
        };
        assert_eq!(published((*readable).clone()), Some(vec!["172.18.0.100".parse().expect("a literal")]));
        assert_eq!(published(unreadable), None);
    }

    #[test]
    fn an_address_that_stays_on_a_dead_interface_is_said_not_to_be_served() {
        let uplink = EgressInterface { is_uplink: true, ..interface("eth0", &["172.18.0.0/16"]) };
        let state = InterfaceState::Attached(InterfaceReason::NextHopLost);
        let dead = EgressInterface { state, ..interface("eth1", &["10.10.10.0/24"]) };
        let (name, mut node) = node("n1", "172.18.0.1/16");
        Arc::make_mut(&mut node).interfaces = vec![uplink, dead];
        let nodes = Nodes::from([(name, node)]);
        let policies = Policies::from([policy("a", 1, &["10.10.10.100"], &[("n1", "10.10.10.100")])]);
        let (none, mut no_records) = (BTreeSet::new(), NoRecords::default());
        let inputs = no_records.inputs(&policies, &nodes, &none, Instant::now());
        let status = desired_statuses(&mut HandoverPlanner::default(), &inputs).policies.remove(0);
        assert_eq!(status.items.len(), 1, "it stays");
        let said = status.conditions.iter().map(|one| (one.status, one.reason)).collect::<Vec<_>>();
        assert_eq!(said, [(false, "NotServed"), (true, "InterfaceCannotSend")]);
        assert!(status.conditions[0].message.contains("eth1 cannot send (NextHopLost)"), "{:?}", status.conditions[0]);
    }
}
