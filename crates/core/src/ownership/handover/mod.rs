//! When an address that changes its node may go to the new one. Pure, except for the times that it remembers.
//!
//! The assignment says where addresses should be; the planner ensures that no address ever has two gateway nodes. The
//! old node releases it before another gets it, by an acknowledgement or by the expiry of its lease
//! ([`crate::ownership::suspicion`]), whatever the cause. Until then the address is in a record, which outlives the
//! leader, and the status shows the old node, which serves until it reads the record.
//!
//! One pass of [`HandoverPlanner::plan`] is one round of writes: records, items, removals of records. A leader that
//! fails in between leaves more records than needed, never fewer. Times are this leader's own, from when it first
//! read a record.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use crate::allocation::Assignment;
pub use crate::model::ledger::{HandOver, Records};
use crate::model::policy::{Item, Policies, PolicyKey, parse_egress_ip};
use crate::selection::by_rank;

/// Hand-overs open at once: with the longest names the ledger stays far below the API server's limit, a mebibyte. The
/// others wait.
pub const MAX_OPEN: usize = 1_000;

/// Evidence of released addresses.
#[derive(Clone, Copy, Debug)]
pub struct Evidence<'a> {
    /// Addresses that nodes acknowledge as released, with the numbers of the hand-overs.
    pub released: &'a BTreeSet<(IpAddr, u64)>,
    /// The nodes that have received these, or `None`; it may not be known yet.
    pub new_owners: &'a BTreeMap<(IpAddr, u64), Option<String>>,
    /// The nodes that are ready for them. The old node hands over to one of these, and acknowledges which.
    pub prepared: &'a BTreeMap<(IpAddr, u64), BTreeSet<String>>,
    /// When the lease of a node, and with it everything that the node emits, expires. Other leases do not expire.
    pub lease_expiries: &'a BTreeMap<String, Instant>,
    /// The gateway nodes of addresses of deleted policies, which no status shows any more.
    pub deleted_objects_gateways: &'a BTreeMap<IpAddr, String>,
}

/// A change of the records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecordChange {
    /// Begins a hand-over, or changes its new node. Written before items.
    Record(IpAddr, HandOver),
    /// The hand-over is done or cancelled. Written after items.
    Remove(IpAddr),
}

impl RecordChange {
    /// Whether it begins a hand-over of an address that has none.
    pub fn is_new_to(&self, records: &Records) -> bool {
        matches!(self, Self::Record(address, _) if !records.open.contains_key(address))
    }
}

/// One round of writes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HandoverPlan {
    pub record_changes: Vec<RecordChange>,
    /// The items that the status of a policy may have now, where they differ.
    pub items: BTreeMap<PolicyKey, Vec<Item>>,
    /// The nodes that have not released yet what should be elsewhere.
    pub unreleased: BTreeMap<IpAddr, String>,
    /// When the next lease expires, without another change.
    pub requeue_at: Option<Instant>,
}

/// When each open hand-over was done.
#[derive(Debug, Default)]
pub struct HandoverPlanner {
    finished_at: BTreeMap<u64, Instant>,
    linger: Duration,
}

/// The next step for an address.
enum HandOverStep {
    /// No other node has it.
    Clear,
    /// Its hand-over is cancelled, or no policy wants the address any more.
    Remove,
    /// The hand-over with this number is done.
    Done(u64),
    /// This node has to release it.
    Begin(String),
    Continue(HandOver),
    /// As recorded, whichever node is wanted by now.
    Finish(HandOver),
}

/// The node that the assignment gives an address to.
#[derive(Clone, Copy)]
struct TargetNode<'a> {
    node: &'a str,
    /// The status of the address's new policy names it. That of the policy which the address leaves does not count.
    is_published: bool,
}

/// What is known of an open hand-over.
struct HandOverFacts<'a> {
    record: &'a HandOver,
    is_released: bool,
    /// The node that received the address, if the old node has acknowledged a release.
    new_owner: Option<Option<&'a String>>,
    prepared: Option<&'a BTreeSet<String>>,
}

impl HandOverFacts<'_> {
    /// A node that has received the address and is not wanted. Without an acknowledgement of the old node, one that may
    /// have received it.
    fn unwanted_new_owner(&self, target: Option<&str>) -> Option<&String> {
        let is_another = |node: &&String| target != Some(node.as_str());
        match self.new_owner {
            Some(new_owner) => new_owner.filter(is_another),
            // Of several it is the recorded one.
            None => {
                let all = || self.prepared.iter().flat_map(|all| all.iter()).filter(is_another);
                all().find(|node| self.record.to.as_ref() == Some(*node)).or_else(|| all().next())
            }
        }
    }
}

/// `status_nodes` are the nodes in statuses, the serving one first.
fn progress(known: Option<&HandOverFacts<'_>>, status_nodes: &[&str], target: Option<TargetNode<'_>>) -> HandOverStep {
    let is_published = target.is_some_and(|target| target.is_published);
    let target = target.map(|target| target.node);
    let Some(open) = known else {
        // Also if the address only changes its policy: between the two writes no status names its node.
        let gateway = status_nodes.first().filter(|_| !is_published);
        return gateway.map_or(HandOverStep::Clear, |gateway| HandOverStep::Begin((*gateway).to_owned()));
    };
    let HandOverFacts { record, is_released, .. } = open;
    // Only the recorded new node can have received it. Other nodes in a status are written by foreign writers.
    let receiver = record.to.as_ref().filter(|to| **to != record.from && status_nodes.contains(&to.as_str()));
    match receiver {
        Some(_) if is_published => HandOverStep::Done(record.number),
        Some(receiver) => HandOverStep::Begin(receiver.clone()),
        // A node that was the new one and no longer is continues with forwarded packets until it sees the change, so it
        // releases the address first, before any other node gets it, even the old one. If the old node has not yet
        // named the new owner, it is about to hand over to the node that is ready, and it is too late to cancel.
        None => match open.unwanted_new_owner(target) {
            Some(new_owner) if *is_released => HandOverStep::Begin(new_owner.clone()),
            Some(new_owner) if record.to.as_ref() == Some(new_owner) => HandOverStep::Finish((*record).clone()),
            _ if is_published && target == Some(record.from.as_str()) => HandOverStep::Remove,
            _ if target.is_none() && *is_released => HandOverStep::Remove,
            _ => HandOverStep::Continue((*record).clone()),
        },
    }
}

impl Evidence<'_> {
    /// The old node's own acknowledgement of the node that received the address.
    fn new_owner(&self, address: IpAddr, record: &HandOver) -> Option<Option<&String>> {
        self.new_owners.get(&(address, record.number)).map(Option::as_ref)
    }
}

impl HandoverPlanner {
    /// Keeps finished records for a while: the new node should see them beside its status.
    pub fn lingering(linger: Duration) -> Self {
        Self { linger, ..Self::default() }
    }

    pub fn plan(
        &mut self,
        policies: &Policies,
        assignment: &Assignment,
        records: &Records,
        evidence: &Evidence<'_>,
        now: Instant,
    ) -> HandoverPlan {
        let mut changing = changing_addresses(policies, assignment, records);
        // Recorded even if no policy wants them yet: a later policy, and a later leader, must know the gateway node.
        changing.extend(evidence.deleted_objects_gateways.keys());
        let (mut nodes, targets) = (status_nodes(policies, &changing), targets(policies, assignment, &changing));
        for (address, node) in evidence.deleted_objects_gateways {
            nodes.entry(*address).or_insert_with(|| vec![node]);
        }
        let (mut plan, mut last) = (HandoverPlan::default(), records.last);
        let mut room = MAX_OPEN.saturating_sub(records.open.len());
        for address in changing {
            let nodes = nodes.get(&address).map(Vec::as_slice).unwrap_or_default();
            let target = targets.get(&address).copied();
            let known = records.open.get(&address);
            let open = known.map(|record| HandOverFacts {
                record,
                is_released: may_move(address, record, evidence, now),
                new_owner: evidence.new_owner(address, record),
                prepared: evidence.prepared.get(&(address, record.number)),
            });
            // A node that is already in the status would use the address before it is released.
            let is_released = open.as_ref().is_some_and(|open| open.is_released);
            let step = progress(open.as_ref(), nodes, target);
            let target = target.map(|target| target.node);
            let to = target.map(str::to_owned);
            let waits = target.filter(|target| nodes.contains(target));
            let record = match step {
                HandOverStep::Clear => continue,
                HandOverStep::Remove => {
                    plan.record_changes.push(RecordChange::Remove(address));
                    continue;
                }
                HandOverStep::Done(number) => {
                    let end = *self.finished_at.entry(number).or_insert(now) + self.linger;
                    if now >= end {
                        plan.record_changes.push(RecordChange::Remove(address));
                    } else {
                        plan.requeue_no_later_than(end);
                    }
                    continue;
                }
                HandOverStep::Begin(from) if known.is_none() && room == 0 => {
                    plan.unreleased.insert(address, from);
                    continue;
                }
                HandOverStep::Begin(from) => {
                    room -= usize::from(known.is_none());
                    last += 1;
                    HandOver { number: last, from, to: to.filter(|_| waits.is_none()) }
                }
                HandOverStep::Continue(record) => {
                    let to = to.filter(|to| *to != record.from && (is_released || waits.is_none()));
                    HandOver { to, ..record }
                }
                HandOverStep::Finish(record) => record,
            };
            if known != Some(&record) {
                plan.record_changes.push(RecordChange::Record(address, record.clone()));
            }
            // The node keeps the address for another policy: only the status moves, and then the record is removed.
            let stays = record.to.is_none() && target == Some(record.from.as_str());
            if !stays && !may_move(address, &record, evidence, now) {
                if let Some(end) = evidence.lease_expiries.get(&record.from) {
                    plan.requeue_no_later_than(*end);
                }
                plan.unreleased.insert(address, record.from);
            }
        }
        plan.items = items(policies, assignment, &plan.unreleased);
        plan.record_changes.sort_by_key(|change| matches!(change, RecordChange::Remove(_)));
        let open: BTreeSet<u64> = records.open.values().map(|record| record.number).collect();
        self.finished_at.retain(|number, _| open.contains(number));
        plan
    }
}

/// Whether the old node has released the address, or its lease has expired.
fn may_move(address: IpAddr, record: &HandOver, evidence: &Evidence<'_>, now: Instant) -> bool {
    let is_lease_expired = evidence.lease_expiries.get(&record.from).is_some_and(|end| now >= *end);
    is_lease_expired || evidence.released.contains(&(address, record.number))
}

impl HandoverPlan {
    fn requeue_no_later_than(&mut self, time: Instant) {
        self.requeue_at = Some(self.requeue_at.map_or(time, |other| other.min(time)));
    }
}

/// The addresses with a pending change: all others are where they should be.
fn changing_addresses(policies: &Policies, assignment: &Assignment, records: &Records) -> BTreeSet<IpAddr> {
    let mut changing: BTreeSet<IpAddr> = records.open.keys().copied().collect();
    for (policy, outcome) in
        assignment.with_policies(policies).filter(|(policy, outcome)| policy.published.items != outcome.items)
    {
        let shown = policy.published.items.iter();
        changing.extend(shown.chain(&outcome.items).filter_map(|item| parse_egress_ip(&item.egress_ip)));
    }
    changing
}

/// The nodes that statuses name for an address, those of older policies first: the first one serves it.
fn status_nodes<'a>(policies: &'a Policies, changing: &BTreeSet<IpAddr>) -> BTreeMap<IpAddr, Vec<&'a str>> {
    let mut nodes: BTreeMap<IpAddr, Vec<&str>> = BTreeMap::new();
    let is_changing = |item: &Item| parse_egress_ip(&item.egress_ip).filter(|address| changing.contains(address));
    let naming =
        policies.values().filter(|policy| policy.published.items.iter().any(|item| is_changing(item).is_some()));
    for policy in by_rank(naming) {
        let items = policy.published.items.iter().filter_map(|item| Some((is_changing(item)?, item)));
        items.for_each(|(address, item)| nodes.entry(address).or_default().push(&item.node));
    }
    nodes
}

fn targets<'a>(
    policies: &'a Policies,
    assignment: &'a Assignment,
    changing: &BTreeSet<IpAddr>,
) -> BTreeMap<IpAddr, TargetNode<'a>> {
    let mut targets = BTreeMap::new();
    for (policy, outcome) in assignment.with_policies(policies) {
        let address_of = |item: &Item| parse_egress_ip(&item.egress_ip).filter(|address| changing.contains(address));
        let items = outcome.items.iter().filter_map(|item| Some((address_of(item)?, item.node.as_str())));
        targets.extend(items.map(|(address, node)| {
            let mut published = policy.published.items.iter().filter(|shown| shown.node == node);
            let is_published = published.any(|shown| address_of(shown) == Some(address));
            (address, TargetNode { node, is_published })
        }));
    }
    targets
}

/// The items of the assignment. While another node has not released the address, the old item stays, if the status has it.
fn items(
    policies: &Policies,
    assignment: &Assignment,
    unreleased: &BTreeMap<IpAddr, String>,
) -> BTreeMap<PolicyKey, Vec<Item>> {
    let unreleased_by = |item: &Item| parse_egress_ip(&item.egress_ip).and_then(|address| unreleased.get(&address));
    let mut all = BTreeMap::new();
    for (policy, outcome) in assignment.with_policies(policies) {
        let shown = policy.published.items.as_slice();
        // A foreign writer may have put the current item there.
        if *shown == *outcome.items
            && (unreleased.is_empty() || outcome.items.iter().all(|item| unreleased_by(item).is_none()))
        {
            continue;
        }
        let (mut items, mut new) = (Vec::new(), Vec::new());
        for item in &outcome.items {
            if let Some(from) = unreleased_by(item) {
                let old = Item { node: from.clone(), egress_ip: item.egress_ip.clone() };
                items.extend(shown.contains(&old).then_some(old));
            } else if shown.contains(item) {
                items.push(item.clone());
            } else {
                new.push(item.clone());
            }
        }
        // A node that still has one of the policy's addresses cannot get the next.
        new.retain(|item| items.iter().all(|stays| stays.node != item.node));
        items.extend(new);
        if *items != *shown {
            all.insert(policy.key().clone(), items);
        }
    }
    all
}

#[cfg(test)]
mod tests;
