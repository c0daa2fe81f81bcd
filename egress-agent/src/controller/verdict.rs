//! What is said about an object: the conditions in its status and the events that users see. Pure.

use std::collections::{BTreeMap, BTreeSet};

use egress_common::abi::MAX_SLOTS;

use super::assignment::{Fate, Outcome};
use crate::kube::keys;
use crate::model::view::{EgressObject, Part, Unreadable};

/// Reasons of the condition `Assigned`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// Every address has a node.
    Assigned,
    PartiallyAssigned,
    /// A node has not let go yet of what another is to have.
    Moving,
    /// No node can host any address: pods leave with their node's address where that is not turned off.
    NoEligibleNode,
    /// A node could host an address, and is not ready, does not answer, has not said its networks or is drained.
    NoReadyNode,
    /// Nodes that could take an address have as many as their cloud allows.
    NoCapacity,
    /// No entry is an address.
    InvalidEgressIP,
    InvalidSelector,
    /// The list of addresses cannot be read.
    InvalidSpec,
    EgressIPConflict,
    UnsupportedRequest,
}

impl Reason {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Assigned => "Assigned",
            Self::PartiallyAssigned => "PartiallyAssigned",
            Self::Moving => "Moving",
            Self::NoEligibleNode => "NoEligibleNode",
            Self::NoReadyNode => "NoReadyNode",
            Self::NoCapacity => "NoCapacity",
            Self::InvalidEgressIP => "InvalidEgressIP",
            Self::InvalidSelector => "InvalidSelector",
            Self::InvalidSpec => "InvalidSpec",
            Self::EgressIPConflict => "EgressIPConflict",
            Self::UnsupportedRequest => "UnsupportedRequest",
        }
    }
}

/// Causes that a condition names.
const MOST_NAMED: usize = 64;
/// Entries of one object with one trouble that have an event each.
const MOST_EVENTS: usize = 8;

/// The types of our conditions.
pub const ASSIGNED: &str = "Assigned";
pub const DEGRADED: &str = "Degraded";

/// A condition as it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Statement {
    pub kind: &'static str,
    pub status: bool,
    pub reason: &'static str,
    pub message: String,
}

impl Statement {
    /// Does the object say so, of the generation that it has?
    pub fn is_said(&self, object: &EgressObject) -> bool {
        object.conditions.get(self.kind).is_some_and(|(_, found)| {
            found.status == self.status
                && found.reason == self.reason
                && found.message == self.message
                && found.observed_generation == object.generation
        })
    }
}

/// An event: what users of the original look for, by its reason.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Notice {
    pub reason: &'static str,
    pub message: String,
}

/// All conditions of ours, in the order in which they are listed.
pub fn conditions(object: &EgressObject, outcome: &Outcome) -> Vec<Statement> {
    vec![assigned(object, outcome), degraded(object, outcome)]
}

fn assigned(object: &EgressObject, outcome: &Outcome) -> Statement {
    let fates = || outcome.entries.iter().map(|(_, fate)| fate);
    let assigned = |fate: &Fate| matches!(fate, Fate::Assigned { .. });
    let reason = match () {
        () if unreadable(object, Part::Selectors) => Reason::InvalidSelector,
        () if unreadable(object, Part::Addresses) => Reason::InvalidSpec,
        () if fates().count() > 0 && fates().all(assigned) => Reason::Assigned,
        () if fates().any(assigned) => Reason::PartiallyAssigned,
        () if fates().any(|fate| matches!(fate, Fate::Moving { .. })) => Reason::Moving,
        () if outcome.no_eligible_node() => Reason::NoEligibleNode,
        () if fates().any(|fate| matches!(fate, Fate::NotReady { .. } | Fate::Drained { .. })) => Reason::NoReadyNode,
        () if fates().any(|fate| matches!(fate, Fate::NoCapacity)) => Reason::NoCapacity,
        () if fates().any(|fate| matches!(fate, Fate::Taken { .. })) => Reason::UnsupportedRequest,
        () if fates().any(|fate| matches!(fate, Fate::Conflict { .. })) => Reason::EgressIPConflict,
        () => Reason::InvalidEgressIP,
    };
    let mut causes: Vec<String> = complaints(object).map(|(_, message)| message).collect();
    causes.extend(outcome.entries.iter().filter_map(|(entry, fate)| cause(entry, fate)));
    if outcome.entries.is_empty() {
        causes.push("spec.egressIPs is empty".to_owned());
    }
    shorten(&mut causes);
    let message = if causes.is_empty() { "every egress IP has a node".to_owned() } else { causes.join("; ") };
    Statement { kind: ASSIGNED, status: reason == Reason::Assigned, reason: reason.as_str(), message }
}

/// Serves, but not as it should: with some of its addresses only, or as it was last read. Where it serves with none,
/// `Assigned` says so.
fn degraded(object: &EgressObject, outcome: &Outcome) -> Statement {
    let statement = |status, reason, message| Statement { kind: DEGRADED, status, reason, message };
    if outcome.items.is_empty() {
        return statement(false, "NothingAssigned", "no egress IP has a node".to_owned());
    }
    let spec = complaints(object).map(|(reason, _)| ("spec", reason.as_str()));
    let entries = outcome.entries.iter().filter_map(|(entry, fate)| Some((entry.as_str(), reason_of(fate)?)));
    let causes: Vec<(&str, &'static str)> = spec.chain(entries).collect();
    let reason = match causes.first() {
        None => return statement(false, "AllAssigned", "every egress IP has a node".to_owned()),
        Some((_, first)) if causes.iter().all(|(_, reason)| reason == first) => *first,
        Some(_) => "SeveralReasons",
    };
    let mut causes = causes.iter().map(|(what, reason)| format!("{what}: {reason}")).collect();
    shorten(&mut causes);
    statement(true, reason, causes.join("; "))
}

/// As many as an object may list where our own CRD is installed. Others let through any number, and the API server
/// refuses a message of more than 32 kilobytes.
fn shorten(causes: &mut Vec<String>) {
    let more = causes.len().saturating_sub(MOST_NAMED);
    if more > 0 {
        causes.truncate(MOST_NAMED);
        causes.push(format!("and {more} more"));
    }
}

/// Why an entry has no node, in a word.
fn reason_of(fate: &Fate) -> Option<&'static str> {
    Some(match fate {
        Fate::Assigned { .. } => return None,
        Fate::Moving { .. } => "Moving",
        Fate::Invalid => "InvalidEgressIP",
        Fate::Conflict { .. } => "EgressIPConflict",
        Fate::Taken { .. } => "UnsupportedRequest",
        Fate::NoNode => "NoEligibleNode",
        Fate::NotReady { .. } | Fate::Drained { .. } => "NoReadyNode",
        Fate::NoRoom => "NoRoom",
        Fate::NoCapacity => "NoCapacity",
        Fate::Surplus => "TooManyAddresses",
    })
}

fn unreadable(object: &EgressObject, part: Part) -> bool {
    object.unreadable.iter().any(|unreadable| unreadable.part == part)
}

/// What is wrong with the spec as a whole. A status that cannot be read is written anew and needs no word.
fn complaints(object: &EgressObject) -> impl Iterator<Item = (Reason, String)> {
    object.unreadable.iter().filter_map(|Unreadable { part, why, .. }| {
        Some(match part {
            Part::Selectors => {
                (Reason::InvalidSelector, format!("{why}; pods that were selected stay so, no others are"))
            }
            Part::Addresses => (Reason::InvalidSpec, format!("{why}; the addresses that were read last hold")),
            Part::Items => return None,
        })
    })
}

fn cause(entry: &str, fate: &Fate) -> Option<String> {
    Some(match fate {
        Fate::Assigned { .. } => return None,
        Fate::Moving { from } => format!("{entry}: node {from} has not let go of it yet"),
        Fate::Invalid => format!("{entry:?} is not an IP address"),
        Fate::Conflict { node } => format!("{entry} is an address of node {node}"),
        Fate::Taken { object, .. } => format!("{entry} belongs to EgressIP {object}"),
        Fate::NoNode => format!("{entry}: no node with label {} has a network for it", keys::ASSIGNABLE),
        Fate::NotReady { node } => format!("{entry}: node {node}, which could host it, is not ready"),
        Fate::Drained { node } => format!("{entry}: node {node}, which could host it, is drained"),
        Fate::NoCapacity => format!("{entry}: nodes for it have as many egress IPs as their cloud allows"),
        Fate::NoRoom => format!("{entry}: every node for it has another address of this object"),
        Fate::Surplus => format!("{entry}: this object has {MAX_SLOTS} others of the family, and may have no more"),
    })
}

/// The original's events with the original's texts; `eligible` is the number of eligible nodes in the cluster.
pub fn notices(object: &EgressObject, outcome: &Outcome, eligible: usize) -> BTreeSet<Notice> {
    let name = &object.name;
    let mut notices = entry_notices(name, outcome);
    notices.extend(complaints(object).map(|(reason, message)| Notice { reason: reason.as_str(), message }));
    let items = &outcome.items;
    // As in the original, whatever the cause; only an entry that is no address is no request.
    let is_waiting =
        |fate: &Fate| !matches!(fate, Fate::Assigned { .. } | Fate::Moving { .. } | Fate::Invalid | Fate::Surplus);
    let waiting = outcome.entries.iter().any(|(_, fate)| is_waiting(fate));
    if items.is_empty() && eligible == 0 {
        let label = keys::ASSIGNABLE;
        let message =
            format!("no assignable nodes for EgressIP: {name}, please tag at least one node with label: {label}");
        notices.insert(Notice { reason: "NoMatchingNodeFound", message });
    } else if items.is_empty() && !outcome.entries.is_empty() {
        let addresses = object.listed.join(" ");
        let message = format!(
            "No matching nodes found, which can host any of the egress IPs: [{addresses}] for object EgressIP: {name}"
        );
        notices.insert(Notice { reason: "NoMatchingNodeFound", message });
    } else if waiting {
        let message = format!("Not all egress IPs for EgressIP: {name} could be assigned, please tag more nodes");
        notices.insert(Notice { reason: "UnassignedRequest", message });
    }
    notices
}

/// One for each entry with a trouble of its own; where they are many, for the first ones, and one for all others.
fn entry_notices(name: &str, outcome: &Outcome) -> BTreeSet<Notice> {
    let mut by_reason: BTreeMap<&'static str, Vec<Notice>> = BTreeMap::new();
    for notice in outcome.entries.iter().filter_map(|(entry, fate)| entry_notice(name, entry, fate)) {
        by_reason.entry(notice.reason).or_default().push(notice);
    }
    let mut notices = BTreeSet::new();
    for (reason, mut of_reason) in by_reason {
        let more = of_reason.len().saturating_sub(MOST_EVENTS);
        of_reason.truncate(MOST_EVENTS);
        notices.extend(of_reason);
        if more > 0 {
            let message = format!("EgressIP: {name} has {more} more entries of which the same is to be said");
            notices.insert(Notice { reason, message });
        }
    }
    let surplus = outcome.entries.iter().filter(|(_, fate)| *fate == Fate::Surplus).count();
    if surplus > 0 {
        let message = format!(
            "EgressIP: {name} may have {MAX_SLOTS} addresses of a family; {surplus} that it lists beyond are not served, \
             another object could have them"
        );
        notices.insert(Notice { reason: "TooManyAddresses", message });
    }
    notices
}

fn entry_notice(name: &str, entry: &str, fate: &Fate) -> Option<Notice> {
    let (reason, message) = match fate {
        Fate::Invalid => {
            ("InvalidEgressIP", format!("egress IP: {entry} for object EgressIP: {name} is not a valid IP address"))
        }
        Fate::Conflict { node } => (
            "EgressIPConflict",
            format!(
                "Egress IP {name} with IP {entry} is conflicting with a host ({node}) IP address and will not be assigned"
            ),
        ),
        Fate::Taken { object, node } => (
            "UnsupportedRequest",
            format!(
                "IP: {entry:?} for EgressIP: {name} is already allocated for EgressIP: {object} on {}",
                node.as_deref().unwrap_or("no node yet")
            ),
        ),
        Fate::Assigned { .. } | Fate::Moving { .. } => return None,
        Fate::NoNode | Fate::NotReady { .. } | Fate::Drained { .. } => return None,
        Fate::NoRoom | Fate::NoCapacity | Fate::Surplus => return None,
    };
    Some(Notice { reason, message })
}

#[cfg(test)]
mod tests {
    use super::super::assignment::tests::object;
    use super::*;
    use crate::model::view::Item;

    fn outcome(fates: &[(&str, Fate)]) -> Outcome {
        let entries: Vec<(String, Fate)> =
            fates.iter().map(|(entry, fate)| ((*entry).to_owned(), fate.clone())).collect();
        let item = |(entry, fate): &(String, Fate)| match fate {
            Fate::Assigned { node } => Some(Item { node: node.clone(), egress_ip: entry.clone() }),
            _ => None,
        };
        let items = entries.iter().filter_map(item).collect();
        Outcome { entries, items }
    }

    fn said(fates: &[(&str, Fate)]) -> Vec<(bool, &'static str)> {
        let (_, object) = object("a", 1, &[], &[]);
        conditions(&object, &outcome(fates)).into_iter().map(|one| (one.status, one.reason)).collect()
    }

    #[test]
    fn an_object_is_whole_degraded_or_without_a_node() {
        let here = Fate::Assigned { node: "n1".into() };
        let taken = Fate::Taken { object: "b".into(), node: None };
        assert_eq!(said(&[("1", here.clone())]), [(true, "Assigned"), (false, "AllAssigned")]);
        let degraded = said(&[("1", here.clone()), ("2", Fate::NoRoom), ("3", Fate::NoRoom)]);
        assert_eq!(degraded, [(false, "PartiallyAssigned"), (true, "NoRoom")]);
        let several = said(&[("1", here.clone()), ("2", taken.clone()), ("x", Fate::Invalid)]);
        assert_eq!(several, [(false, "PartiallyAssigned"), (true, "SeveralReasons")]);
        assert_eq!(said(&[("2", taken)]), [(false, "UnsupportedRequest"), (false, "NothingAssigned")]);
        assert_eq!(said(&[("2", Fate::NoCapacity)]), [(false, "NoCapacity"), (false, "NothingAssigned")]);

        let (_, a) = object("a", 1, &[], &[]);
        let messages = conditions(&a, &outcome(&[("1", here), ("2", Fate::NoRoom), ("x", Fate::Invalid)]));
        assert_eq!(messages[1].message, "2: NoRoom; x: InvalidEgressIP");
    }

    #[test]
    fn a_thousand_entries_are_a_few_lines() {
        let (_, a) = object("a", 1, &[], &[]);
        let mut fates: Vec<(String, Fate)> = (0..500).map(|i| (format!("10.0.0.{i}"), Fate::Invalid)).collect();
        fates.extend((0..500).map(|i| (format!("10.0.1.{i}"), Fate::Surplus)));
        let fates: Vec<(&str, Fate)> = fates.iter().map(|(entry, fate)| (entry.as_str(), fate.clone())).collect();
        let here = [("10.0.2.1", Fate::Assigned { node: "n1".into() })];
        let outcome = outcome(&[&fates[..], &here].concat());
        for statement in conditions(&a, &outcome) {
            assert!(statement.message.len() < 8192 && statement.message.ends_with("; and 936 more"), "{statement:?}");
        }
        let notices: Vec<String> = notices(&a, &outcome, 1).into_iter().map(|notice| notice.message).collect();
        assert_eq!(notices.len(), MOST_EVENTS + 2, "{notices:?}");
        assert!(notices.contains(&"EgressIP: a has 492 more entries of which the same is to be said".to_owned()));
        assert!(notices.iter().any(|message| message.contains("500 that it lists beyond are not served")));
    }

    #[test]
    fn what_cannot_be_read_degrades_what_serves() {
        let (_, a) = object("a", 1, &[], &[]);
        let unreadable = Unreadable { part: Part::Selectors, why: "podSelector: x".into(), is_known: true };
        let a = EgressObject { unreadable: vec![unreadable], ..(*a).clone() };
        let said = conditions(&a, &outcome(&[("1", Fate::Assigned { node: "n1".into() })]));
        assert_eq!((said[0].reason, said[1].reason), ("InvalidSelector", "InvalidSelector"));
        assert!(!said[0].status && said[1].status);
    }

    #[test]
    fn the_originals_events_have_the_originals_words() {
        let (_, a) = object("a", 1, &["1", "2"], &[]);
        let texts = |fates: &[(&str, Fate)], eligible| -> Vec<String> {
            let notices = notices(&a, &outcome(fates), eligible);
            notices.into_iter().map(|notice| format!("{}: {}", notice.reason, notice.message)).collect()
        };
        let here = Fate::Assigned { node: "n1".into() };
        assert!(texts(&[("1", here.clone())], 1).is_empty());
        assert_eq!(
            texts(&[("1", here), ("2", Fate::NoRoom)], 1),
            ["UnassignedRequest: Not all egress IPs for EgressIP: a could be assigned, please tag more nodes"]
        );
        assert_eq!(
            texts(&[("1", Fate::Conflict { node: "n1".into() })], 1),
            [
                "EgressIPConflict: Egress IP a with IP 1 is conflicting with a host (n1) IP address and will not be assigned",
                "NoMatchingNodeFound: No matching nodes found, which can host any of the egress IPs: [1 2] for object EgressIP: a"
            ]
        );
        assert_eq!(
            texts(&[("1", Fate::NoNode)], 0),
            [
                "NoMatchingNodeFound: no assignable nodes for EgressIP: a, please tag at least one node with label: k8s.ovn.org/egress-assignable"
            ]
        );
    }
}
