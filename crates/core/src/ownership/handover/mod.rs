//! When an address that changes its node may be given to the new one. Pure, but for what it remembers of time.
//!
//! The assignment says where addresses should be. Here is seen to it that no address ever has two holders: whatever takes
//! it from a node, a failure, an edit, a deletion or a move between objects, the node that had it has let go before
//! another gets it. It has when it says so, or when its lease on the address has run out: a node that has not been in
//! touch for that long serves no egress IP.
//!
//! Until then the address stands in a record, which outlives the leader, and where somebody is to have it again the status
//! goes on to show the old node, which goes on to serve: the record is what tells it to let go. A pass of [`HandoverPlanner::plan`]
//! is one round of writes, in this order: records, then items, then records that are to be forgotten. A leader that fails
//! in between leaves more records than needed, never fewer; whoever follows goes on from them.
//!
//! Time is this leader's own, monotonic. A record has none: a new leader counts from its first look. When leases run out
//! is worked out in [`crate::ownership::suspicion`].

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use crate::allocation::{Assignment, Objects};
pub use crate::model::ledger::{HandOver, Records};
use crate::model::view::{Item, parse_egress_ip};
use crate::selection::by_rank;

/// So many hand-overs are open at once that the ledger stays far below what an API server takes, a mebibyte, with the
/// longest names. The others wait.
pub const MOST_OPEN: usize = 1_000;

/// What is known of letting go.
#[derive(Clone, Copy, Debug)]
pub struct Evidence<'a> {
    /// The addresses that nodes say they have let go of, with the number of the hand-over.
    pub released: &'a BTreeSet<(IpAddr, u64)>,
    /// The nodes that these say they have handed them over to, or nobody; they may not have said it yet.
    pub given: &'a BTreeMap<(IpAddr, u64), Option<String>>,
    /// The nodes that say they are ready for them. The old node hands over to one of these, and says so then.
    pub prepared: &'a BTreeMap<(IpAddr, u64), BTreeSet<String>>,
    /// When all that a node holds has run out. Of one that is not listed it does not.
    pub ends: &'a BTreeMap<String, Instant>,
    /// Who held the addresses of objects that are gone: no status says it any more.
    pub departed: &'a BTreeMap<IpAddr, String>,
}

/// A change of the records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Begins, or has another new node. Before items are written.
    Record(IpAddr, HandOver),
    /// Is done, or is called off. After items are written.
    Forget(IpAddr),
}

impl Step {
    /// It begins a hand-over of an address that has none.
    pub fn is_new_to(&self, records: &Records) -> bool {
        matches!(self, Self::Record(address, _) if !records.open.contains_key(address))
    }
}

/// One round of writes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    pub steps: Vec<Step>,
    /// What the status of an object may say now, where that is not what it says.
    pub items: BTreeMap<String, Vec<Item>>,
    /// The nodes that have not let go yet of what should be elsewhere.
    pub holders: BTreeMap<IpAddr, String>,
    /// When the next lease runs out, if nothing else happens.
    pub look_again: Option<Instant>,
}

/// When each open hand-over was done.
#[derive(Debug, Default)]
pub struct HandoverPlanner {
    done: BTreeMap<u64, Instant>,
    linger: Duration,
}

/// How it goes on with an address.
enum Course {
    /// Nobody else holds it.
    Clear,
    /// Its hand-over is called off, or nobody wants it any more.
    Forget,
    /// The hand-over with this number is done.
    Done(u64),
    /// That node is to let go of it.
    Begin(String),
    GoOn(HandOver),
    /// As it is recorded, whatever is wanted by now.
    Finish(HandOver),
}

/// What is known of an open hand-over.
struct Judged<'a> {
    record: &'a HandOver,
    is_free: bool,
    /// The old node has said that it has let go, and which node it has handed it over to.
    said: Option<Option<&'a String>>,
    prepared: Option<&'a BTreeSet<String>>,
}

impl Judged<'_> {
    /// A node that has been handed the address over to, and is not to have it; where the old node has said nothing, one that
    /// may have been.
    fn taken_by(&self, target: Option<&str>) -> Option<&String> {
        let is_another = |node: &&String| target != Some(node.as_str());
        match self.said {
            Some(given) => given.filter(is_another),
            // Of several it is the one that is recorded now.
            None => {
                let all = || self.prepared.iter().flat_map(|all| all.iter()).filter(is_another);
                all().find(|node| self.record.to.as_ref() == Some(*node)).or_else(|| all().next())
            }
        }
    }
}

/// `holders` are the nodes that a status names, the one that serves first.
fn course(known: Option<&Judged<'_>>, holders: &[&str], target: Option<&str>) -> Course {
    let is_there = target.is_some_and(|target| holders.contains(&target));
    let Some(judged) = known else {
        let holder = holders.first().filter(|_| !is_there);
        return holder.map_or(Course::Clear, |holder| Course::Begin((*holder).to_owned()));
    };
    let Judged { record, is_free, .. } = judged;
    // Only the node of the record was ever given it: what else stands in a status is a stranger's word.
    let given = record.to.as_ref().filter(|to| **to != record.from && holders.contains(&to.as_str()));
    match given {
        Some(_) if is_there => Course::Done(record.number),
        Some(holder) => Course::Begin(holder.clone()),
        // A node that was to have it, and is not any more, goes on with what has been passed on to it until it hears of that:
        // it lets go first, of whoever is to have it now, the old node too. Where that one has not said yet who has it, it is
        // about to hand over to the node that is ready, and there is nothing to be called off any more.
        None => match judged.taken_by(target) {
            Some(heir) if *is_free => Course::Begin(heir.clone()),
            Some(heir) if record.to.as_ref() == Some(heir) => Course::Finish((*record).clone()),
            _ if target == Some(record.from.as_str()) => Course::Forget,
            _ if target.is_none() && *is_free => Course::Forget,
            _ => Course::GoOn((*record).clone()),
        },
    }
}

impl Evidence<'_> {
    /// The old node's own word about whom it has handed the address over to.
    fn said(&self, address: IpAddr, record: &HandOver) -> Option<Option<&String>> {
        self.given.get(&(address, record.number)).map(Option::as_ref)
    }
}

impl HandoverPlanner {
    /// Leaves the records of what is done for a while: the new node is to see them beside its status.
    pub fn lingering(linger: Duration) -> Self {
        Self { linger, ..Self::default() }
    }

    pub fn plan(
        &mut self,
        objects: &Objects,
        wanted: &Assignment,
        records: &Records,
        evidence: &Evidence<'_>,
        now: Instant,
    ) -> Plan {
        let mut concerned = concerned(objects, wanted, records);
        // Recorded though nobody may want them yet: whoever wants one later, and whoever leads then, is to know who had it.
        concerned.extend(evidence.departed.keys());
        let (mut holders, targets) = (holders(objects, &concerned), targets(wanted, &concerned));
        for (address, node) in evidence.departed {
            holders.entry(*address).or_insert_with(|| vec![node]);
        }
        let (mut plan, mut last) = (Plan::default(), records.last);
        let mut room = MOST_OPEN.saturating_sub(records.open.len());
        for address in concerned {
            let holders = holders.get(&address).map(Vec::as_slice).unwrap_or_default();
            let target = targets.get(&address).copied();
            let known = records.open.get(&address);
            let judged = known.map(|record| Judged {
                record,
                is_free: is_free_of(address, record, evidence, now),
                said: evidence.said(address, record),
                prepared: evidence.prepared.get(&(address, record.number)),
            });
            // Who stands in the status already would take it for given, before it is let go of.
            let is_free = judged.as_ref().is_some_and(|judged| judged.is_free);
            let to = target.map(str::to_owned);
            let waits = target.filter(|target| holders.contains(target));
            let record = match course(judged.as_ref(), holders, target) {
                Course::Clear => continue,
                Course::Forget => {
                    plan.steps.push(Step::Forget(address));
                    continue;
                }
                Course::Done(number) => {
                    let end = *self.done.entry(number).or_insert(now) + self.linger;
                    if now >= end {
                        plan.steps.push(Step::Forget(address));
                    } else {
                        plan.look_again_at(end);
                    }
                    continue;
                }
                Course::Begin(from) if known.is_none() && room == 0 => {
                    plan.holders.insert(address, from);
                    continue;
                }
                Course::Begin(from) => {
                    room -= usize::from(known.is_none());
                    last += 1;
                    HandOver { number: last, from, to: to.filter(|_| waits.is_none()) }
                }
                Course::GoOn(record) => HandOver { to: to.filter(|_| is_free || waits.is_none()), ..record },
                Course::Finish(record) => record,
            };
            if known != Some(&record) {
                plan.steps.push(Step::Record(address, record.clone()));
            }
            if !is_free_of(address, &record, evidence, now) {
                if let Some(end) = evidence.ends.get(&record.from) {
                    plan.look_again_at(*end);
                }
                plan.holders.insert(address, record.from);
            }
        }
        plan.items = items(objects, wanted, &plan.holders);
        plan.steps.sort_by_key(|step| matches!(step, Step::Forget(_)));
        let open: BTreeSet<u64> = records.open.values().map(|record| record.number).collect();
        self.done.retain(|number, _| open.contains(number));
        plan
    }
}

/// The old node has said that it has given the address up, or its lease has run out.
fn is_free_of(address: IpAddr, record: &HandOver, evidence: &Evidence<'_>, now: Instant) -> bool {
    let has_run_out = evidence.ends.get(&record.from).is_some_and(|end| now >= *end);
    has_run_out || evidence.released.contains(&(address, record.number))
}

impl Plan {
    fn look_again_at(&mut self, time: Instant) {
        self.look_again = Some(self.look_again.map_or(time, |other| other.min(time)));
    }
}

/// The addresses of which something changes: all others are where they should be.
fn concerned(objects: &Objects, wanted: &Assignment, records: &Records) -> BTreeSet<IpAddr> {
    let mut concerned: BTreeSet<IpAddr> = records.open.keys().copied().collect();
    for (object, outcome) in wanted.beside(objects).filter(|(object, outcome)| object.items != outcome.items) {
        let shown = object.items.iter();
        concerned.extend(shown.chain(&outcome.items).filter_map(|item| parse_egress_ip(&item.egress_ip)));
    }
    concerned
}

/// The nodes that a status names for an address, those of older objects first: the first is who serves it.
fn holders<'a>(objects: &'a Objects, concerned: &BTreeSet<IpAddr>) -> BTreeMap<IpAddr, Vec<&'a str>> {
    let mut holders: BTreeMap<IpAddr, Vec<&str>> = BTreeMap::new();
    let is_concerned = |item: &Item| parse_egress_ip(&item.egress_ip).filter(|address| concerned.contains(address));
    let naming = objects.values().filter(|object| object.items.iter().any(|item| is_concerned(item).is_some()));
    for object in by_rank(naming) {
        let items = object.items.iter().filter_map(|item| Some((is_concerned(item)?, item)));
        items.for_each(|(address, item)| holders.entry(address).or_default().push(&item.node));
    }
    holders
}

fn targets<'a>(wanted: &'a Assignment, concerned: &BTreeSet<IpAddr>) -> BTreeMap<IpAddr, &'a str> {
    let items = wanted.outcomes.values().flat_map(|outcome| &outcome.items);
    let items = items.filter_map(|item| Some((parse_egress_ip(&item.egress_ip)?, item.node.as_str())));
    items.filter(|(address, _)| concerned.contains(address)).collect()
}

/// What is wanted, but of addresses that another node holds: the old item, where it stands in the object's status.
fn items(objects: &Objects, wanted: &Assignment, holders: &BTreeMap<IpAddr, String>) -> BTreeMap<String, Vec<Item>> {
    let held = |item: &Item| parse_egress_ip(&item.egress_ip).and_then(|address| holders.get(&address));
    let mut all = BTreeMap::new();
    for (object, outcome) in wanted.beside(objects) {
        let shown = object.items.as_slice();
        // What stands there already may have been put there by a stranger.
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
        // A node that one of the object's addresses has not left yet waits for the next.
        new.retain(|item| items.iter().all(|stays| stays.node != item.node));
        items.extend(new);
        if *items != *shown {
            all.insert(object.name.clone(), items);
        }
    }
    all
}

#[cfg(test)]
mod tests;
