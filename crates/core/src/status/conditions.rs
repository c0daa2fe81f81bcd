//! The conditions in the status of a policy and the events that users see. Pure.

use std::collections::{BTreeMap, BTreeSet};

use egress_common::abi::MAX_SLOTS;
use ipnet::IpNet;

use crate::allocation::{Fate, Nodes, Outcome};
use crate::keys;
use crate::model::policy::{EgressPolicy, Part, PolicyKey, Unreadable, listed_family, parse_egress_ip};
use crate::model::state::Family;
use crate::model::state::family_of;
use crate::text::{listed, quoted};

/// Reasons of the condition `Assigned`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// Every address has a node.
    Assigned,
    PartiallyAssigned,
    /// The nodes of assigned addresses do not serve them.
    NotServed,
    /// The old node has not released an address yet.
    Moving,
    /// No node can host any address: pods leave with their node's address unless that is turned off.
    NoEligibleNode,
    /// A node could host an address, and is not ready, does not answer, has not published its networks, or is drained.
    NoReadyNode,
    /// Nodes that could take an address have as many as their cloud allows.
    NoCapacity,
    /// No entry is an address.
    InvalidEgressIP,
    InvalidSelector,
    /// The list of addresses is unreadable.
    InvalidSpec,
    EgressIPConflict,
    /// An entry is reserved, such as a network's or a router's own address.
    ReservedAddress,
    UnsupportedRequest,
}

impl Reason {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Assigned => "Assigned",
            Self::PartiallyAssigned => "PartiallyAssigned",
            Self::NotServed => "NotServed",
            Self::Moving => "Moving",
            Self::NoEligibleNode => "NoEligibleNode",
            Self::NoReadyNode => "NoReadyNode",
            Self::NoCapacity => "NoCapacity",
            Self::InvalidEgressIP => "InvalidEgressIP",
            Self::InvalidSelector => "InvalidSelector",
            Self::InvalidSpec => "InvalidSpec",
            Self::EgressIPConflict => "EgressIPConflict",
            Self::ReservedAddress => "ReservedAddress",
            Self::UnsupportedRequest => "UnsupportedRequest",
        }
    }
}

/// Causes that a condition names, as many as a policy may list with our own CRD, and the bytes of its message, of
/// which the API server refuses more than 32,768.
const MOST_NAMED: usize = 64;
const MOST_MESSAGE_BYTES: usize = 8_192;
/// Bytes of an entry that messages quote: an address has 45 at most.
const MOST_OF_ENTRY: usize = 64;
/// Bytes of all entries together in an event, whose note has 1024.
const MOST_OF_ENTRIES: usize = 640;
/// Entries of one policy with the same problem that have an event each.
const MOST_EVENTS: usize = 8;

/// The agent's own condition types.
pub const ASSIGNED: &str = "Assigned";
pub const DEGRADED: &str = "Degraded";

/// A desired condition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Statement {
    pub kind: &'static str,
    pub status: bool,
    pub reason: &'static str,
    pub message: String,
}

impl Statement {
    /// Whether the policy has this condition for its current generation.
    pub fn is_published(&self, policy: &EgressPolicy) -> bool {
        policy.published.conditions.get(self.kind).is_some_and(|(_, found)| {
            found.status == self.status
                && found.reason == self.reason
                && found.message == self.message
                && found.observed_generation == policy.origin.generation
        })
    }
}

/// An event, with the reason that OVN-Kubernetes uses.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Notice {
    pub reason: &'static str,
    pub message: String,
}

/// All own conditions, in the order of the list. `alone` are nodes whose agent is away, with the number of the policy's
/// pods there.
pub fn conditions(
    policy: &EgressPolicy,
    outcome: &Outcome,
    alone: &[(&str, u32)],
    cluster: &Cluster,
) -> Vec<Statement> {
    vec![assigned(policy, outcome, cluster), degraded(policy, outcome, alone)]
}

/// Facts about the cluster for messages.
#[derive(Clone, Debug, Default)]
pub struct Cluster {
    /// The networks in which nodes with the label can host addresses; `None` if no node has the label.
    pub networks: Option<BTreeSet<IpNet>>,
    /// The node's address serves if no node can host any address of a policy.
    pub node_address_serves: bool,
}

/// Networks that a message names.
const MOST_NETWORKS: usize = 8;

impl Cluster {
    pub fn new(nodes: &Nodes, node_address_serves: bool) -> Self {
        let mut networks = None;
        for node in nodes.values().filter(|node| node.assignable) {
            let all = networks.get_or_insert_with(BTreeSet::new);
            all.extend(node.primary_networks().iter().map(IpNet::trunc));
            all.extend(node.secondary_networks().map(|network| network.trunc()));
        }
        Self { networks, node_address_serves }
    }

    fn no_network(&self) -> String {
        let label = keys::ASSIGNABLE;
        match &self.networks {
            None => format!("no node has the label {label}"),
            Some(networks) if networks.is_empty() => {
                format!("no node with the label {label} has published its networks: does egress-agent run there?")
            }
            Some(networks) => {
                let networks: Vec<String> = networks.iter().map(ToString::to_string).collect();
                let named = listed(&networks, ", ", (MOST_NETWORKS, MOST_OF_ENTRIES));
                format!("no node with the label {label} has a network for it, they are in {named}")
            }
        }
    }

    /// What happens to packets that get no address of the policy; `None` if all its families have one.
    fn consequence(&self, policy: &EgressPolicy, outcome: &Outcome) -> Option<String> {
        let has = |family: Family| {
            let mut items = outcome.items.iter().filter_map(|item| parse_egress_ip(&item.egress_ip));
            items.any(|address| family_of(address) == family)
        };
        let families: BTreeSet<Family> = policy.listed.iter().map(|text| listed_family(text)).collect();
        let without: Vec<Family> = families.iter().copied().filter(|family| !has(*family)).collect();
        let leaves = "leave with their nodes' addresses";
        if policy.listed.is_empty() {
            return (!policy.is_unknown(Part::Addresses))
                .then(|| format!("packets of pods that no other object serves {leaves}"));
        }
        let of_family = match without.as_slice() {
            [] => return None,
            [Family::V4] if families.len() > 1 => "IPv4 ",
            [Family::V6] if families.len() > 1 => "IPv6 ",
            _ => "",
        };
        let serves = self.node_address_serves && !policy.drop_unassigned && outcome.no_eligible_node();
        let becomes = if serves { leaves } else { "are dropped" };
        Some(format!("{of_family}packets of pods that no other object serves {becomes}"))
    }
}

fn assigned(policy: &EgressPolicy, outcome: &Outcome, cluster: &Cluster) -> Statement {
    let fates = || outcome.entries.iter().map(|(_, fate)| fate);
    let assigned = |fate: &Fate| matches!(fate, Fate::Assigned { .. });
    let reason = match () {
        () if unreadable(policy, Part::Selectors) => Reason::InvalidSelector,
        () if unreadable(policy, Part::Addresses) => Reason::InvalidSpec,
        () if fates().count() > 0 && fates().all(assigned) => Reason::Assigned,
        () if fates().any(assigned) => Reason::PartiallyAssigned,
        () if fates().any(|fate| matches!(fate, Fate::NotServed { .. })) => Reason::NotServed,
        () if fates().any(|fate| matches!(fate, Fate::Moving { .. })) => Reason::Moving,
        () if outcome.no_eligible_node() => Reason::NoEligibleNode,
        () if fates().any(|fate| matches!(fate, Fate::NotReady { .. } | Fate::Drained { .. })) => Reason::NoReadyNode,
        () if fates().any(|fate| matches!(fate, Fate::NoCapacity)) => Reason::NoCapacity,
        () if fates().any(|fate| matches!(fate, Fate::Taken { .. })) => Reason::UnsupportedRequest,
        () if fates().any(|fate| matches!(fate, Fate::Conflict { .. })) => Reason::EgressIPConflict,
        () if fates().any(|fate| matches!(fate, Fate::Reserved(_))) => Reason::ReservedAddress,
        () => Reason::InvalidEgressIP,
    };
    let mut causes: Vec<String> = spec_problems(policy).map(|(_, message)| message).collect();
    causes.extend(outcome.entries.iter().filter_map(|(entry, fate)| cause(entry, fate, cluster)));
    if outcome.entries.is_empty() {
        causes.push(format!("{} is empty", policy.key().kind.addresses_field()));
    }
    let message = match cluster.consequence(policy, outcome) {
        _ if causes.is_empty() => "every egress IP has a node".to_owned(),
        None => joined(&causes),
        // After the causes, which may be many.
        Some(consequence) => format!("{}; {consequence}", joined(&causes)),
    };
    Statement { kind: ASSIGNED, status: reason == Reason::Assigned, reason: reason.as_str(), message }
}

/// The agent of a node that has pods of the policy does not answer.
const AGENT_AWAY: &str = "AgentAway";

/// The policy is degraded if it serves with some of its addresses only, or as last read. If it serves with none,
/// `Assigned` reports it.
fn degraded(policy: &EgressPolicy, outcome: &Outcome, alone: &[(&str, u32)]) -> Statement {
    let statement = |status, reason, message| Statement { kind: DEGRADED, status, reason, message };
    if outcome.items.is_empty() {
        return statement(false, "NothingAssigned", "no egress IP has a node".to_owned());
    }
    let spec = spec_problems(policy).map(|(reason, _)| ("spec", reason.as_str()));
    let entries = outcome.entries.iter().filter_map(|(entry, fate)| Some((entry.as_str(), reason_of(fate)?)));
    let not_serving = |entry: &str| {
        outcome.entries.iter().find_map(|(other, fate)| match fate {
            Fate::NotServed { node, .. } if other == entry => Some(format!(" on node {node}")),
            _ => None,
        })
    };
    let mut causes: Vec<(&str, &'static str)> = spec.chain(entries).collect();
    causes.extend(alone.iter().map(|(node, _)| (*node, AGENT_AWAY)));
    let reason = match causes.first() {
        None => return statement(false, "AllAssigned", "every egress IP has a node".to_owned()),
        Some((_, first)) if causes.iter().all(|(_, reason)| reason == first) => *first,
        Some(_) => "SeveralReasons",
    };
    let pods_of = |node: &str| alone.iter().find(|(other, _)| *other == node).map_or(0, |(_, pods)| *pods);
    let of_entry = |(what, reason): &(&str, &str)| match *reason {
        AGENT_AWAY => format!(
            "node {what}: {AGENT_AWAY}, its agent does not answer; {} of the object's pods are there, which follow no \
             change: where their egress IP moves their packets are dropped",
            pods_of(what)
        ),
        reason => {
            format!("{}: {reason}{}", quoted(what, MOST_OF_ENTRY), not_serving(what).unwrap_or_default())
        }
    };
    let causes: Vec<String> = causes.iter().map(of_entry).collect();
    statement(true, reason, joined(&causes))
}

/// A bounded message, whatever users write and other CRDs accept.
fn joined(causes: &[String]) -> String {
    listed(causes, "; ", (MOST_NAMED, MOST_MESSAGE_BYTES))
}

/// Why an entry has no node, in a word.
fn reason_of(fate: &Fate) -> Option<&'static str> {
    Some(match fate {
        Fate::Assigned { .. } => return None,
        Fate::NotServed { why, .. } => why.reason(),
        Fate::Moving { .. } => "Moving",
        Fate::Invalid => "InvalidEgressIP",
        Fate::Conflict { .. } => "EgressIPConflict",
        Fate::Reserved(_) => "ReservedAddress",
        Fate::Taken { .. } => "UnsupportedRequest",
        Fate::NoNode => "NoEligibleNode",
        Fate::NotReady { .. } | Fate::Drained { .. } => "NoReadyNode",
        Fate::NoRoom => "NoRoom",
        Fate::NoCapacity => "NoCapacity",
        Fate::Surplus => "TooManyAddresses",
    })
}

fn unreadable(policy: &EgressPolicy, part: Part) -> bool {
    policy.unreadable.iter().any(|unreadable| unreadable.part == part)
}

/// Problems of the spec as a whole. An unreadable status is rewritten and needs no message.
fn spec_problems(policy: &EgressPolicy) -> impl Iterator<Item = (Reason, String)> {
    policy.unreadable.iter().filter_map(|Unreadable { part, why, .. }| {
        Some(match part {
            Part::Selectors => {
                (Reason::InvalidSelector, format!("{why}; pods that were selected stay so, no others are"))
            }
            Part::Addresses => (Reason::InvalidSpec, format!("{why}; the addresses that were read last hold")),
            Part::Items => return None,
        })
    })
}

fn cause(entry: &str, fate: &Fate, cluster: &Cluster) -> Option<String> {
    let entry = quoted(entry, MOST_OF_ENTRY);
    Some(match fate {
        Fate::Assigned { .. } => return None,
        Fate::NotServed { node, why } => format!(
            "{entry}: assigned to node {node}, which does not serve it: {why}; packets that would leave with it are dropped"
        ),
        Fate::Moving { from, is_endless: false } => format!("{entry}: node {from} has not released it yet"),
        Fate::Moving { from, is_endless: true } => format!(
            "{entry}: node {from} has not released it yet, and no other node could host it before: start the agent there, or \
             delete Node {from} when the machine is off"
        ),
        Fate::Invalid => format!("{entry:?} is not an IP address"),
        Fate::Conflict { node } => format!("{entry} is an address of node {node}"),
        Fate::Reserved(reason) => format!("{entry} {reason}"),
        Fate::Taken { policy, .. } => format!("{entry} belongs to {policy}"),
        Fate::NoNode => format!("{entry}: {}", cluster.no_network()),
        Fate::NotReady { node, why } => format!("{entry}: node {node}, which could host it, {why}"),
        Fate::Drained { node } => format!("{entry}: node {node}, which could host it, is drained"),
        Fate::NoCapacity => format!("{entry}: nodes for it have as many egress IPs as their cloud allows"),
        Fate::NoRoom => format!("{entry}: every node for it has another address of this object"),
        Fate::Surplus => format!("{entry}: this object has {MAX_SLOTS} others of the family, and may have no more"),
    })
}

/// The events of OVN-Kubernetes with its texts; `eligible` is the number of eligible nodes in the cluster.
pub fn notices(policy: &EgressPolicy, outcome: &Outcome, eligible: usize) -> BTreeSet<Notice> {
    let subject = subject(policy.key());
    let mut notices = entry_notices(policy.key(), outcome);
    notices.extend(spec_problems(policy).map(|(reason, message)| Notice { reason: reason.as_str(), message }));
    let items = &outcome.items;
    // As in OVN-Kubernetes, whatever the cause; only an invalid entry is no request.
    let is_waiting = |fate: &Fate| {
        !matches!(
            fate,
            Fate::Assigned { .. } | Fate::NotServed { .. } | Fate::Moving { .. } | Fate::Invalid | Fate::Surplus
        )
    };
    let waiting = outcome.entries.iter().any(|(_, fate)| is_waiting(fate));
    if items.is_empty() && eligible == 0 {
        let label = keys::ASSIGNABLE;
        let message = format!("no assignable nodes for {subject}, please tag at least one node with label: {label}");
        notices.insert(Notice { reason: "NoMatchingNodeFound", message });
    } else if items.is_empty() && !outcome.entries.is_empty() {
        let entries: Vec<String> =
            policy.listed.iter().map(|entry| quoted(entry, MOST_OF_ENTRY).into_owned()).collect();
        let addresses = listed(&entries, " ", (MOST_NAMED, MOST_OF_ENTRIES));
        let message = format!(
            "No matching nodes found, which can host any of the egress IPs: [{addresses}] for object {subject}"
        );
        notices.insert(Notice { reason: "NoMatchingNodeFound", message });
    } else if waiting {
        let message = format!("Not all egress IPs for {subject} could be assigned, please tag more nodes");
        notices.insert(Notice { reason: "UnassignedRequest", message });
    }
    notices
}

/// A policy as these texts name it.
fn subject(policy: &PolicyKey) -> String {
    format!("{}: {}", policy.kind.as_str(), policy.name)
}

/// One event for each entry with its own problem; if there are many, for the first ones, and one for all others.
fn entry_notices(policy: &PolicyKey, outcome: &Outcome) -> BTreeSet<Notice> {
    let subject = subject(policy);
    let mut by_reason: BTreeMap<&'static str, Vec<Notice>> = BTreeMap::new();
    for notice in outcome.entries.iter().filter_map(|(entry, fate)| entry_notice(policy, entry, fate)) {
        by_reason.entry(notice.reason).or_default().push(notice);
    }
    let mut notices = BTreeSet::new();
    for (reason, mut of_reason) in by_reason {
        let more = of_reason.len().saturating_sub(MOST_EVENTS);
        of_reason.truncate(MOST_EVENTS);
        notices.extend(of_reason);
        if more > 0 {
            let message = format!("{subject} has {more} more entries with the same problem");
            notices.insert(Notice { reason, message });
        }
    }
    let surplus = outcome.entries.iter().filter(|(_, fate)| *fate == Fate::Surplus).count();
    if surplus > 0 {
        let message = format!(
            "{subject} may have {MAX_SLOTS} addresses of a family; {surplus} that it lists beyond are not served, \
             another object could have them"
        );
        notices.insert(Notice { reason: "TooManyAddresses", message });
    }
    notices
}

fn entry_notice(policy: &PolicyKey, entry: &str, fate: &Fate) -> Option<Notice> {
    let (name, subject) = (&policy.name, subject(policy));
    let entry = quoted(entry, MOST_OF_ENTRY);
    let (reason, message) = match fate {
        Fate::Invalid => {
            ("InvalidEgressIP", format!("egress IP: {entry} for object {subject} is not a valid IP address"))
        }
        Fate::Conflict { node } => (
            "EgressIPConflict",
            format!(
                "Egress IP {name} with IP {entry} is conflicting with a host ({node}) IP address and will not be assigned"
            ),
        ),
        Fate::Reserved(reason) => {
            ("ReservedAddress", format!("egress IP: {entry} for object {subject} {reason} and will not be assigned"))
        }
        Fate::Taken { policy: owner, node } => (
            "UnsupportedRequest",
            format!(
                "IP: {entry:?} for {subject} is already allocated for {} on {}",
                self::subject(owner),
                node.as_deref().unwrap_or("no node yet")
            ),
        ),
        Fate::Assigned { .. } | Fate::NotServed { .. } | Fate::Moving { .. } => return None,
        Fate::NoNode | Fate::NotReady { .. } | Fate::Drained { .. } => return None,
        Fate::NoRoom | Fate::NoCapacity | Fate::Surplus => return None,
    };
    Some(Notice { reason, message })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::allocation::samples::policy;
    use crate::model::node::Unserved;
    use crate::model::policy::Item;

    fn outcome(fates: &[(&str, Fate)]) -> Outcome {
        let entries: Vec<(String, Fate)> =
            fates.iter().map(|(entry, fate)| ((*entry).to_owned(), fate.clone())).collect();
        let item = |(entry, fate): &(String, Fate)| match fate {
            Fate::Assigned { node } | Fate::NotServed { node, .. } => {
                Some(Item { node: node.clone(), egress_ip: entry.clone() })
            }
            _ => None,
        };
        let items = entries.iter().filter_map(item).collect();
        Outcome { entries, items }
    }

    fn published(fates: &[(&str, Fate)]) -> Vec<(bool, &'static str)> {
        let (_, policy) = policy("a", 1, &[], &[]);
        conditions(&policy, &outcome(fates), &[], &Cluster::default())
            .into_iter()
            .map(|one| (one.status, one.reason))
            .collect()
    }

    #[test]
    fn an_object_is_whole_degraded_or_without_a_node() {
        let here = Fate::Assigned { node: "n1".into() };
        let taken = Fate::Taken { policy: "b".into(), node: None };
        assert_eq!(published(&[("1", here.clone())]), [(true, "Assigned"), (false, "AllAssigned")]);
        let degraded = published(&[("1", here.clone()), ("2", Fate::NoRoom), ("3", Fate::NoRoom)]);
        assert_eq!(degraded, [(false, "PartiallyAssigned"), (true, "NoRoom")]);
        let several = published(&[("1", here.clone()), ("2", taken.clone()), ("x", Fate::Invalid)]);
        assert_eq!(several, [(false, "PartiallyAssigned"), (true, "SeveralReasons")]);
        assert_eq!(published(&[("2", taken)]), [(false, "UnsupportedRequest"), (false, "NothingAssigned")]);
        assert_eq!(published(&[("2", Fate::NoCapacity)]), [(false, "NoCapacity"), (false, "NothingAssigned")]);
        let drained = Fate::Drained { node: "n1".into() };
        assert_eq!(published(&[("2", drained)]), [(false, "NoReadyNode"), (false, "NothingAssigned")]);
        assert_eq!(published(&[]).first().map(|(status, _)| *status), Some(false), "nothing is listed");

        let (_, a) = policy("a", 1, &[], &[]);
        let messages = conditions(
            &a,
            &outcome(&[("1", here), ("2", Fate::NoRoom), ("x", Fate::Invalid)]),
            &[],
            &Cluster::default(),
        );
        assert_eq!(messages[1].message, "2: NoRoom; x: InvalidEgressIP");
    }

    /// An assigned address that is not served, and what happens to packets that get no address.
    #[test]
    fn messages_state_what_is_not_served_and_what_happens_to_packets() {
        let (v4, v6) = ("172.18.0.100", "fd00::100");
        let published = |listed: &[&str], fates: &[(&str, Fate)], cluster: &Cluster| {
            let (_, policy) = policy("a", 1, listed, &[]);
            let [assigned, degraded] =
                conditions(&policy, &outcome(fates), &[], cluster).try_into().expect("two of them");
            (assigned.reason, assigned.message, degraded.status, degraded.reason, degraded.message)
        };
        let strict = Cluster::default();
        let why = Unserved::InUse("02:00:00:00:00:09".into());
        let in_use = published(&[v4], &[(v4, Fate::NotServed { node: "n1".into(), why })], &strict);
        let message = "172.18.0.100: assigned to node n1, which does not serve it: another host (02:00:00:00:00:09) answers for it; \
                       packets that would leave with it are dropped";
        let in_a_word = "172.18.0.100: AddressInUse on node n1";
        assert_eq!(in_use, ("NotServed", message.into(), true, "AddressInUse", in_a_word.into()));
        let both = published(&[v4, v6], &[(v4, Fate::Assigned { node: "n1".into() }), (v6, Fate::NoRoom)], &strict);
        assert!(both.1.ends_with("; IPv6 packets of pods that no other object serves are dropped"), "{}", both.1);
        assert!(
            published(&["172.18.0.300"], &[("172.18.0.300", Fate::Invalid)], &strict)
                .1
                .ends_with("packets of pods that no other object serves are dropped")
        );
        // No node has the label, no node is in that network, and which option is on.
        let lenient = Cluster { networks: None, node_address_serves: true };
        let label = "172.18.0.100: no node has the label k8s.ovn.org/egress-assignable; packets of pods that no \
                     other object serves leave with their nodes' addresses";
        assert_eq!(published(&[v4], &[(v4, Fate::NoNode)], &lenient).1, label);
        let (_, asks_for_a_drop) = policy("a", 1, &[v4], &[]);
        let asks_for_a_drop = EgressPolicy { drop_unassigned: true, ..(*asks_for_a_drop).clone() };
        let dropped = conditions(&asks_for_a_drop, &outcome(&[(v4, Fate::NoNode)]), &[], &lenient);
        assert!(dropped[0].message.ends_with("packets of pods that no other object serves are dropped"), "{dropped:?}");
        let networks = ["172.19.0.0/16", "fd00::/64"].map(|text| text.parse().expect("a literal"));
        let elsewhere =
            published(&[v4], &[(v4, Fate::NoNode)], &Cluster { networks: Some(networks.into()), ..strict.clone() });
        assert!(
            elsewhere.1.contains(
                "they are in 172.19.0.0/16, fd00::/64; packets of pods that no other object serves are dropped"
            ),
            "{}",
            elsewhere.1
        );
        let half = published(&[v4, "x"], &[(v4, Fate::NoNode), ("x", Fate::Invalid)], &lenient);
        assert!(half.1.ends_with("packets of pods that no other object serves are dropped"), "{}", half.1);
        assert!(
            published(&[], &[], &strict)
                .1
                .ends_with("packets of pods that no other object serves leave with their nodes' addresses")
        );
    }

    #[test]
    fn a_thousand_entries_are_a_few_lines() {
        let (_, a) = policy("a", 1, &[], &[]);
        let mut fates: Vec<(String, Fate)> = (0..500).map(|i| (format!("10.0.0.{i}"), Fate::Invalid)).collect();
        fates.extend((0..500).map(|i| (format!("10.0.1.{i}"), Fate::Surplus)));
        let fates: Vec<(&str, Fate)> = fates.iter().map(|(entry, fate)| (entry.as_str(), fate.clone())).collect();
        let here = [("10.0.2.1", Fate::Assigned { node: "n1".into() })];
        let outcome = outcome(&[&fates[..], &here].concat());
        for statement in conditions(&a, &outcome, &[], &Cluster::default()) {
            assert!(statement.message.len() < 8192 && statement.message.contains("; and 936 more"), "{statement:?}");
        }
        let notices: Vec<String> = notices(&a, &outcome, 1).into_iter().map(|notice| notice.message).collect();
        assert_eq!(notices.len(), MOST_EVENTS + 2, "{notices:?}");
        assert!(notices.contains(&"EgressIP: a has 492 more entries with the same problem".to_owned()));
        assert!(notices.iter().any(|message| message.contains("500 that it lists beyond are not served")));
    }

    #[test]
    fn long_junk_is_quoted_in_part_and_messages_stay_short() {
        let junk: Vec<String> = (0..64).map(|i| format!("{i}{}", "x".repeat(12_000))).collect();
        let texts: Vec<&str> = junk.iter().map(String::as_str).collect();
        let (_, a) = policy("a", 1, &texts, &[]);
        let mut fates: Vec<(&str, Fate)> = texts.iter().map(|entry| (*entry, Fate::Invalid)).collect();
        let taken = Fate::Taken { policy: "o".repeat(253).as_str().into(), node: Some("n".repeat(253)) };
        for outcome in [outcome(&fates), outcome(&[&fates[..], &[("1", Fate::Assigned { node: "n".into() })]].concat())]
        {
            for statement in conditions(&a, &outcome, &[], &Cluster::default()) {
                assert!(statement.message.len() <= MOST_MESSAGE_BYTES + 32, "{} bytes", statement.message.len());
            }
            for notice in notices(&a, &outcome, 1) {
                assert!(notice.message.len() <= 1024, "{} bytes: {notice:?}", notice.message.len());
            }
        }
        let published = conditions(&a, &outcome(&fates), &[], &Cluster::default());
        assert!(
            published[0].message.contains("0xxxxx") && published[0].message.contains("(12001 bytes)"),
            "{published:?}"
        );
        fates.iter_mut().for_each(|(_, fate)| *fate = taken.clone());
        let published = conditions(&a, &outcome(&fates), &[], &Cluster::default());
        assert!(
            published[0].message.len() <= MOST_MESSAGE_BYTES + 32 && published[0].message.contains(" more"),
            "{published:?}"
        );
    }

    #[test]
    fn unreadable_parts_degrade_a_serving_object() {
        let (_, a) = policy("a", 1, &[], &[]);
        let unreadable = Unreadable { part: Part::Selectors, why: "podSelector: x".into(), is_known: true };
        let a = EgressPolicy { unreadable: vec![unreadable], ..(*a).clone() };
        let published =
            conditions(&a, &outcome(&[("1", Fate::Assigned { node: "n1".into() })]), &[], &Cluster::default());
        assert_eq!((published[0].reason, published[1].reason), ("InvalidSelector", "InvalidSelector"));
        assert!(!published[0].status && published[1].status);
    }

    #[test]
    fn events_of_ovn_kubernetes_keep_their_texts() {
        let (_, a) = policy("a", 1, &["1", "2"], &[]);
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

    #[test]
    fn an_agent_that_is_away_is_listed_with_its_pods() {
        let fates = [("1", Fate::Assigned { node: "n1".into() })];
        let alone = [("n3", 2), ("n4", 1)];
        let (_, policy) = policy("a", 1, &["1"], &[]);
        let published = conditions(&policy, &outcome(&fates), &alone, &Cluster::default());
        let [assigned, degraded] = published.try_into().expect("two of them");
        assert!(assigned.status, "{assigned:?}");
        assert_eq!((degraded.status, degraded.reason), (true, "AgentAway"));
        assert!(
            degraded.message.starts_with("node n3: AgentAway, ") && degraded.message.contains("; 2 of the"),
            "{degraded:?}"
        );
        assert!(degraded.message.contains("node n4: ") && degraded.message.contains("; 1 of the"), "{degraded:?}");
    }
}
