//! When an address that changes its node may go to the new one. Pure, except for the times that it remembers.
//!
//! The assignment says where addresses should be; the planner ensures that no address ever has two holders. Whatever
//! takes an address from a node (a failure, an edit, a deletion, a move between policies), the old node releases it
//! before another gets it: by an acknowledgement, or by the expiry of its lease.
//!
//! Until then the address is in a record, which outlives the leader. The status keeps showing the old node, which keeps
//! serving until it sees the record. One pass of [`HandoverPlanner::plan`] is one round of writes in this order:
//! records, items, removals of records. A leader that fails in between leaves more records than needed, never fewer,
//! and the next leader continues from them.
//!
//! Time is this leader's own, monotonic. Records have none: a new leader counts from its first look.
//! [`crate::ownership::suspicion`] computes when leases expire.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use crate::allocation::Assignment;
pub use crate::model::ledger::{HandOver, Records};
use crate::model::policy::{Item, Policies, PolicyKey, parse_egress_ip};
use crate::selection::by_rank;

/// Hand-overs open at once: with the longest names the ledger stays far below the API server's limit, a mebibyte. The
/// others wait.
pub const MOST_OPEN: usize = 1_000;

/// Evidence of released addresses.
#[derive(Clone, Copy, Debug)]
pub struct Evidence<'a> {
    /// Addresses that nodes acknowledge as released, with the numbers of the hand-overs.
    pub released: &'a BTreeSet<(IpAddr, u64)>,
    /// The nodes that have received these, or `None`; it may not be known yet.
    pub given: &'a BTreeMap<(IpAddr, u64), Option<String>>,
    /// The nodes that are ready for them. The old node hands over to one of these, and acknowledges which.
    pub prepared: &'a BTreeMap<(IpAddr, u64), BTreeSet<String>>,
    /// When everything that a node holds has expired. The leases of other nodes do not expire.
    pub ends: &'a BTreeMap<String, Instant>,
    /// The holders of addresses of deleted policies, which no status shows any more.
    pub departed: &'a BTreeMap<IpAddr, String>,
}

/// A change of the records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecordChange {
    /// Begins a hand-over, or changes its new node. Written before items.
    Record(IpAddr, HandOver),
    /// The hand-over is done or cancelled. Written after items.
    Forget(IpAddr),
}

impl RecordChange {
    /// Whether it begins a hand-over of an address that has none.
    pub fn is_new_to(&self, records: &Records) -> bool {
        matches!(self, Self::Record(address, _) if !records.open.contains_key(address))
    }
}

/// One round of writes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    pub steps: Vec<RecordChange>,
    /// The items that the status of a policy may have now, where they differ.
    pub items: BTreeMap<PolicyKey, Vec<Item>>,
    /// The nodes that have not released yet what should be elsewhere.
    pub holders: BTreeMap<IpAddr, String>,
    /// When the next lease expires, without another change.
    pub look_again: Option<Instant>,
}

/// When each open hand-over was done.
#[derive(Debug, Default)]
pub struct HandoverPlanner {
    done: BTreeMap<u64, Instant>,
    linger: Duration,
}

/// The next step for an address.
enum Progress {
    /// No other node holds it.
    Clear,
    /// Its hand-over is cancelled, or no policy wants the address any more.
    Forget,
    /// The hand-over with this number is done.
    Done(u64),
    /// This node has to release it.
    Begin(String),
    Continue(HandOver),
    /// As recorded, whichever node is wanted by now.
    Finish(HandOver),
}

/// What is known of an open hand-over.
struct OpenHandOver<'a> {
    record: &'a HandOver,
    is_free: bool,
    /// The node that received the address, if the old node has acknowledged a release.
    given: Option<Option<&'a String>>,
    prepared: Option<&'a BTreeSet<String>>,
}

impl OpenHandOver<'_> {
    /// A node that has received the address and is not wanted. Without an acknowledgement of the old node, one that may
    /// have received it.
    fn taken_by(&self, target: Option<&str>) -> Option<&String> {
        let is_another = |node: &&String| target != Some(node.as_str());
        match self.given {
            Some(given) => given.filter(is_another),
            // Of several it is the recorded one.
            None => {
                let all = || self.prepared.iter().flat_map(|all| all.iter()).filter(is_another);
                all().find(|node| self.record.to.as_ref() == Some(*node)).or_else(|| all().next())
            }
        }
    }
}

/// `holders` are the nodes in statuses, the serving one first.
fn progress(known: Option<&OpenHandOver<'_>>, holders: &[&str], target: Option<&str>) -> Progress {
    let is_there = target.is_some_and(|target| holders.contains(&target));
    let Some(open) = known else {
        let holder = holders.first().filter(|_| !is_there);
        return holder.map_or(Progress::Clear, |holder| Progress::Begin((*holder).to_owned()));
    };
    let OpenHandOver { record, is_free, .. } = open;
    // Only the recorded new node can have received it. Other nodes in a status are written by foreign writers.
    let given = record.to.as_ref().filter(|to| **to != record.from && holders.contains(&to.as_str()));
    match given {
        Some(_) if is_there => Progress::Done(record.number),
        Some(holder) => Progress::Begin(holder.clone()),
        // A node that was the new one and no longer is continues with forwarded packets until it sees the change, so it
        // releases the address first, before any other node gets it, even the old one. If the old node has not yet
        // named the new owner, it is about to hand over to the node that is ready, and it is too late to cancel.
        None => match open.taken_by(target) {
            Some(new_owner) if *is_free => Progress::Begin(new_owner.clone()),
            Some(new_owner) if record.to.as_ref() == Some(new_owner) => Progress::Finish((*record).clone()),
            _ if target == Some(record.from.as_str()) => Progress::Forget,
            _ if target.is_none() && *is_free => Progress::Forget,
            _ => Progress::Continue((*record).clone()),
        },
    }
}

impl Evidence<'_> {
    /// The old node's own acknowledgement of the node that received the address.
    fn new_owner(&self, address: IpAddr, record: &HandOver) -> Option<Option<&String>> {
        self.given.get(&(address, record.number)).map(Option::as_ref)
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
        wanted: &Assignment,
        records: &Records,
        evidence: &Evidence<'_>,
        now: Instant,
    ) -> Plan {
        let mut concerned = concerned(policies, wanted, records);
        // Recorded even if no policy wants them yet: a later policy, and a later leader, must know the holder.
        concerned.extend(evidence.departed.keys());
        let (mut holders, targets) = (holders(policies, &concerned), targets(wanted, &concerned));
        for (address, node) in evidence.departed {
            holders.entry(*address).or_insert_with(|| vec![node]);
        }
        let (mut plan, mut last) = (Plan::default(), records.last);
        let mut room = MOST_OPEN.saturating_sub(records.open.len());
        for address in concerned {
            let holders = holders.get(&address).map(Vec::as_slice).unwrap_or_default();
            let target = targets.get(&address).copied();
            let known = records.open.get(&address);
            let open = known.map(|record| OpenHandOver {
                record,
                is_free: is_free_of(address, record, evidence, now),
                given: evidence.new_owner(address, record),
                prepared: evidence.prepared.get(&(address, record.number)),
            });
            // A node that is already in the status would use the address before it is released.
            let is_free = open.as_ref().is_some_and(|open| open.is_free);
            let to = target.map(str::to_owned);
            let waits = target.filter(|target| holders.contains(target));
            let record = match progress(open.as_ref(), holders, target) {
                Progress::Clear => continue,
                Progress::Forget => {
                    plan.steps.push(RecordChange::Forget(address));
                    continue;
                }
                Progress::Done(number) => {
                    let end = *self.done.entry(number).or_insert(now) + self.linger;
                    if now >= end {
                        plan.steps.push(RecordChange::Forget(address));
                    } else {
                        plan.look_again_at(end);
                    }
                    continue;
                }
                Progress::Begin(from) if known.is_none() && room == 0 => {
                    plan.holders.insert(address, from);
                    continue;
                }
                Progress::Begin(from) => {
                    room -= usize::from(known.is_none());
                    last += 1;
                    HandOver { number: last, from, to: to.filter(|_| waits.is_none()) }
                }
                Progress::Continue(record) => HandOver { to: to.filter(|_| is_free || waits.is_none()), ..record },
                Progress::Finish(record) => record,
            };
            if known != Some(&record) {
                plan.steps.push(RecordChange::Record(address, record.clone()));
            }
            if !is_free_of(address, &record, evidence, now) {
                if let Some(end) = evidence.ends.get(&record.from) {
                    plan.look_again_at(*end);
                }
                plan.holders.insert(address, record.from);
            }
        }
        plan.items = items(policies, wanted, &plan.holders);
        plan.steps.sort_by_key(|step| matches!(step, RecordChange::Forget(_)));
        let open: BTreeSet<u64> = records.open.values().map(|record| record.number).collect();
        self.done.retain(|number, _| open.contains(number));
        plan
    }
}

/// Whether the old node has released the address, or its lease has expired.
fn is_free_of(address: IpAddr, record: &HandOver, evidence: &Evidence<'_>, now: Instant) -> bool {
    let has_run_out = evidence.ends.get(&record.from).is_some_and(|end| now >= *end);
    has_run_out || evidence.released.contains(&(address, record.number))
}

impl Plan {
    fn look_again_at(&mut self, time: Instant) {
        self.look_again = Some(self.look_again.map_or(time, |other| other.min(time)));
    }
}

/// The addresses with a pending change: all others are where they should be.
fn concerned(policies: &Policies, wanted: &Assignment, records: &Records) -> BTreeSet<IpAddr> {
    let mut concerned: BTreeSet<IpAddr> = records.open.keys().copied().collect();
    for (policy, outcome) in wanted.beside(policies).filter(|(policy, outcome)| policy.published.items != outcome.items)
    {
        let shown = policy.published.items.iter();
        concerned.extend(shown.chain(&outcome.items).filter_map(|item| parse_egress_ip(&item.egress_ip)));
    }
    concerned
}

/// The nodes that statuses name for an address, those of older policies first: the first one serves it.
fn holders<'a>(policies: &'a Policies, concerned: &BTreeSet<IpAddr>) -> BTreeMap<IpAddr, Vec<&'a str>> {
    let mut holders: BTreeMap<IpAddr, Vec<&str>> = BTreeMap::new();
    let is_concerned = |item: &Item| parse_egress_ip(&item.egress_ip).filter(|address| concerned.contains(address));
    let naming =
        policies.values().filter(|policy| policy.published.items.iter().any(|item| is_concerned(item).is_some()));
    for policy in by_rank(naming) {
        let items = policy.published.items.iter().filter_map(|item| Some((is_concerned(item)?, item)));
        items.for_each(|(address, item)| holders.entry(address).or_default().push(&item.node));
    }
    holders
}

fn targets<'a>(wanted: &'a Assignment, concerned: &BTreeSet<IpAddr>) -> BTreeMap<IpAddr, &'a str> {
    let items = wanted.outcomes.values().flat_map(|outcome| &outcome.items);
    let items = items.filter_map(|item| Some((parse_egress_ip(&item.egress_ip)?, item.node.as_str())));
    items.filter(|(address, _)| concerned.contains(address)).collect()
}

/// The wanted items. If another node holds the address, the old item stays, if the policy's status has it.
fn items(
    policies: &Policies,
    wanted: &Assignment,
    holders: &BTreeMap<IpAddr, String>,
) -> BTreeMap<PolicyKey, Vec<Item>> {
    let held = |item: &Item| parse_egress_ip(&item.egress_ip).and_then(|address| holders.get(&address));
    let mut all = BTreeMap::new();
    for (policy, outcome) in wanted.beside(policies) {
        let shown = policy.published.items.as_slice();
        // A foreign writer may have put the current item there.
        if *shown == *outcome.items && (holders.is_empty() || outcome.items.iter().all(|item| held(item).is_none())) {
            continue;
        }
        let (mut items, mut new) = (Vec::new(), Vec::new());
        for item in &outcome.items {
            if let Some(from) = held(item) {
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
