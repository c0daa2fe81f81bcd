//! The leader's decision: from policies, nodes, their current status, open hand-overs and the time to the desired status
//! of every policy, its events, and the changes of the records. Pure, except for the memory of [`HandoverPlanner`].
//!
//! [`assign`] says where addresses should be, [`HandoverPlanner::plan`] what of that may be written now, and
//! [`conditions`] what the status reports.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use crate::allocation::{Facts, Fate, Nodes, Outcome, assign};
use crate::model::node::UnservedAddresses;
use crate::model::policy::{EgressPolicy, Item, Part, Policies, parse_egress_ip};
use crate::model::reserved::ClusterNetworks;
use crate::model::services::Services;
use crate::ownership::handover::{Evidence, HandoverPlanner, Plan, RecordChange, Records};
use crate::status::conditions::{self, Notice, Statement};
use crate::status::pod_counts::PodCounts;

/// Input of a decision. The current status is part of the policies.
#[derive(Clone, Copy, Debug)]
pub struct Known<'a> {
    pub policies: &'a Policies,
    pub nodes: &'a Nodes,
    /// Nodes that do not answer.
    pub unreachable: &'a BTreeSet<String>,
    /// Nodes that keep their addresses and get no new ones.
    pub absent: &'a BTreeSet<String>,
    /// Assigned addresses that nodes report as not served.
    pub unserved: &'a BTreeMap<String, UnservedAddresses>,
    /// How many pods each policy serves, and the nodes whose agents are away.
    pub census: &'a PodCounts,
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
pub struct Decision {
    pub policy: Arc<EgressPolicy>,
    pub items: Vec<Item>,
    pub conditions: Vec<Statement>,
    /// The addresses of the policy, if no node can host any of them.
    pub no_eligible_node: Option<Vec<IpAddr>>,
    /// `None` while it is unknown.
    pub selected_pods: Option<u32>,
    pub notices: BTreeSet<Notice>,
}

impl Decision {
    /// Whether the published status differs.
    pub fn is_new(&self) -> bool {
        let published: Option<BTreeSet<IpAddr>> =
            self.no_eligible_node.as_ref().map(|all| all.iter().copied().collect());
        self.policy.published.items != self.items
            || self.policy.published.no_eligible_node != published
            || self.selected_pods.is_some_and(|count| self.policy.published.selected_pods != Some(count))
            || !self.conditions.iter().all(|statement| statement.is_published(&self.policy))
    }
}

/// One decision about the cluster.
#[derive(Clone, Debug)]
pub struct Decisions {
    /// Of every policy, by name.
    pub all: Vec<Decision>,
    /// Changes of the records, in order.
    pub steps: Vec<RecordChange>,
    /// When to decide again without another change.
    pub look_again: Option<Instant>,
}

pub fn decide(watch: &mut HandoverPlanner, known: &Known<'_>) -> Decisions {
    let Known { policies, nodes, unreachable, absent, networks, services, records, evidence, now, .. } = *known;
    let cluster = conditions::Cluster::new(nodes, known.node_address_serves);
    let hand_overs = &records.open;
    let assignment = assign(&Facts { policies, nodes, unreachable, absent, networks, services, hand_overs });
    let mut plan = watch.plan(policies, &assignment, records, &evidence, now);
    let mut all = Vec::with_capacity(policies.len());
    // Both are in the order of names.
    let mut outcomes = assignment.outcomes.into_iter().peekable();
    for (name, policy) in policies {
        while outcomes.next_if(|(other, _)| other < name).is_some() {}
        let outcome = outcomes.next_if(|(other, _)| other == name);
        let mut outcome = outcome.map(|(_, outcome)| outcome).unwrap_or_default();
        let new = plan.items.remove(name);
        name_what_moves(&mut outcome, new.as_ref().unwrap_or(&policy.published.items), (&plan, known.endless));
        name_what_is_not_served(&mut outcome, known.unserved);
        all.push(decision(policy, outcome, new, (assignment.eligible, &cluster, known.census)));
    }
    Decisions { all, steps: plan.steps, look_again: plan.look_again }
}

/// `new` are the items to write, if any. Otherwise the current ones are right or have to wait.
fn decision(
    policy: &Arc<EgressPolicy>,
    outcome: Outcome,
    new: Option<Vec<Item>>,
    (eligible, cluster, census): (usize, &conditions::Cluster, &PodCounts),
) -> Decision {
    // While the selectors of a policy are unknown, nothing is published: its pods must not leave with node addresses.
    let publish = outcome.no_eligible_node() && !policy.is_unknown(Part::Selectors);
    let alone: Vec<(&str, u32)> = policy.published.id.into_iter().flat_map(|id| census.left_alone(id)).collect();
    let conditions = conditions::conditions(policy, &outcome, &alone, cluster);
    let selected_pods = policy.published.id.and_then(|id| census.selected(id));
    let notices = conditions::notices(policy, &outcome, eligible);
    let items = match new {
        Some(items) => items,
        None if outcome.items == policy.published.items => outcome.items,
        None => policy.published.items.clone(),
    };
    let no_eligible_node = publish.then(|| policy.addresses().into_iter().collect());
    Decision { policy: policy.clone(), items, conditions, no_eligible_node, selected_pods, notices }
}

/// Marks entries that have a node and are not served there yet.
fn name_what_moves(outcome: &mut Outcome, items: &[Item], (plan, endless): (&Plan, &BTreeSet<String>)) {
    if *items == *outcome.items {
        return;
    }
    for (entry, fate) in &mut outcome.entries {
        let Fate::Assigned { node } = fate else { continue };
        if !items.iter().any(|item| item.egress_ip == *entry && item.node == *node) {
            let holder = parse_egress_ip(entry).and_then(|address| plan.holders.get(&address));
            let from = holder.unwrap_or(node).clone();
            *fate = Fate::Moving { is_endless: endless.contains(&from), from };
        }
    }
}

/// Marks entries that their nodes report as not served.
fn name_what_is_not_served(outcome: &mut Outcome, unserved: &BTreeMap<String, UnservedAddresses>) {
    for (entry, fate) in outcome.entries.iter_mut().filter(|_| !unserved.is_empty()) {
        let Fate::Assigned { node } = fate else { continue };
        let of_node = unserved.get(node).zip(parse_egress_ip(entry));
        if let Some(why) = of_node.and_then(|(unserved, address)| unserved.get(&address)) {
            *fate = Fate::NotServed { node: std::mem::take(node), why: why.clone() };
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
    census: PodCounts,
    networks: ClusterNetworks,
    services: Services,
}

impl NoRecords {
    pub fn known<'a>(
        &'a mut self,
        policies: &'a Policies,
        nodes: &'a Nodes,
        unreachable: &'a BTreeSet<String>,
        now: Instant,
    ) -> Known<'a> {
        let holders = policies.values().flat_map(|policy| &policy.published.items).map(|item| item.node.clone());
        self.ends = holders.map(|node| (node, now)).collect();
        let Self { released, given, prepared, departed, ends, .. } = &*self;
        let evidence = Evidence { released, given, prepared, ends, departed };
        let Self { absent, unserved, endless, census, records, networks, services, .. } = &*self;
        let node_address_serves = true;
        Known {
            policies,
            nodes,
            unreachable,
            absent,
            unserved,
            census,
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
    use crate::allocation::samples::policy;
    use crate::model::policy::Unreadable;

    /// The policy's pods are unknown, so the decision must not let them leave with their nodes' addresses.
    #[test]
    fn unreadable_selectors_never_publish_that_no_node_can_host_the_object() {
        let (name, readable) = policy("a", 1, &["172.18.0.100"], &[]);
        let why = Unreadable { part: Part::Selectors, why: "podSelector: x".into(), is_known: false };
        let unreadable = EgressPolicy { unreadable: vec![why], ..(*readable).clone() };
        let published = |policy: EgressPolicy| {
            let policies = Policies::from([(name.clone(), Arc::new(policy))]);
            let (nodes, none, mut no_records) = (Nodes::new(), BTreeSet::new(), NoRecords::default());
            let known = no_records.known(&policies, &nodes, &none, Instant::now());
            decide(&mut HandoverPlanner::default(), &known).all.remove(0).no_eligible_node
        };
        assert_eq!(published((*readable).clone()), Some(vec!["172.18.0.100".parse().expect("a literal")]));
        assert_eq!(published(unreadable), None);
    }
}
