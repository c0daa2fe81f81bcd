//! The conditions in the status of a policy and the events that users see. Pure.

use std::collections::{BTreeMap, BTreeSet};

use egress_common::abi::MAX_SLOTS;
use ipnet::IpNet;

use crate::allocation::{EntryStatus, Nodes, ObjectAssignment};
use crate::keys;
use crate::model::policy::{
    EgressPolicy, EligibleNodes, PolicyKey, PolicyPart, Unreadable, listed_family, parse_egress_ip,
};
use crate::model::state::Family;
use crate::model::state::family_of;
use crate::text::{listed, quoted};

/// Reasons of the condition `Assigned`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// Every address has a node.
    Assigned,
    /// Every address has a node, and no pod leaves by the policy: a label that is misspelt is the usual cause.
    NoPodServed,
    PartiallyAssigned,
    /// The nodes of assigned addresses do not serve them.
    NotServed,
    /// The old node has not released an address yet.
    Moving,
    /// No node can host any address: pods leave with their node's address unless that is turned off.
    NoEligibleNode,
    /// A node could host an address, and is not ready, does not answer, has not published its networks, or is drained.
    NoReadyNode,
    /// Nodes that could take an address have as many as their cloud or their annotation allows.
    NoCapacity,
    /// No node has an address for its objects.
    NoGateway,
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
            Self::NoPodServed => "NoPodServed",
            Self::PartiallyAssigned => "PartiallyAssigned",
            Self::NotServed => "NotServed",
            Self::Moving => "Moving",
            Self::NoEligibleNode => "NoEligibleNode",
            Self::NoReadyNode => "NoReadyNode",
            Self::NoCapacity => "NoCapacity",
            Self::NoGateway => "NoGateway",
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
const MAX_CAUSES: usize = 64;
const MAX_MESSAGE_BYTES: usize = 8_192;
/// Bytes of an entry that messages quote: an address has 45 at most.
const MAX_ENTRY_BYTES: usize = 64;
/// Bytes of all entries together in an event, whose note has 1024.
const MAX_ENTRIES_BYTES: usize = 640;
/// Entries of one policy with the same problem that have an event each.
const MAX_EVENTS: usize = 8;

/// The agent's own condition types.
pub const ASSIGNED: &str = "Assigned";
pub const DEGRADED: &str = "Degraded";

/// A desired condition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DesiredCondition {
    pub kind: &'static str,
    pub status: bool,
    pub reason: &'static str,
    pub message: String,
}

impl DesiredCondition {
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
pub struct ObjectEvent {
    pub reason: &'static str,
    pub message: String,
}

/// What conditions say of a policy's pods.
#[derive(Clone, Debug, Default)]
pub struct PolicyPods<'a> {
    /// Nodes whose agent is away, with the number of the policy's pods there.
    pub without_agent: Vec<(&'a str, u32)>,
    /// No pod has been reported for some time.
    pub has_none: bool,
}

/// All own conditions, in the order of the list.
pub fn conditions(
    policy: &EgressPolicy,
    outcome: &ObjectAssignment,
    pods: &PolicyPods<'_>,
    cluster: &ClusterContext,
) -> Vec<DesiredCondition> {
    vec![assigned(policy, outcome, pods, cluster), degraded(policy, outcome, &pods.without_agent)]
}

/// Facts about the cluster for messages.
#[derive(Clone, Debug, Default)]
pub struct ClusterContext {
    /// The networks in which nodes with the label can host addresses; `None` if no node has the label.
    pub networks: Option<BTreeSet<IpNet>>,
    /// The node's address serves if no node can host any address of a policy.
    pub node_address_serves: bool,
}

/// Networks that a message names.
const MAX_NETWORKS: usize = 8;

impl ClusterContext {
    pub fn new(nodes: &Nodes, node_address_serves: bool) -> Self {
        let mut networks = None;
        for node in nodes.values().filter(|node| node.assignable) {
            let all = networks.get_or_insert_with(BTreeSet::new);
            all.extend(node.networks().filter(|network| node.hosts(network.addr())).map(|network| network.trunc()));
        }
        Self { networks, node_address_serves }
    }

    /// Why no node can host an address.
    fn no_node(&self, eligible: &EligibleNodes) -> String {
        let label = keys::ASSIGNABLE;
        match eligible {
            EligibleNodes::Labelled => {}
            EligibleNodes::One(_) => return "no node may host it".to_owned(),
            EligibleNodes::Selected(_) => return "no node that is selected for it has a network for it".to_owned(),
            EligibleNodes::Having { .. } => return "no node has it on an interface".to_owned(),
        }
        match &self.networks {
            None => format!("no node has the label {label}"),
            Some(networks) if networks.is_empty() => {
                format!("no node with the label {label} has published its networks: does egress-agent run there?")
            }
            Some(networks) => {
                let networks: Vec<String> = networks.iter().map(ToString::to_string).collect();
                let named = listed(&networks, ", ", (MAX_NETWORKS, MAX_ENTRIES_BYTES));
                format!("no node with the label {label} has a network for it, they are in {named}")
            }
        }
    }

    /// What happens to packets that get no address of the policy; `None` if all its families have one.
    fn consequence(&self, policy: &EgressPolicy, outcome: &ObjectAssignment) -> Option<String> {
        let has = |family: Family| {
            let mut items = outcome.items.iter().filter_map(|item| parse_egress_ip(&item.egress_ip));
            items.any(|address| family_of(address) == family)
        };
        let families: BTreeSet<Family> = policy.listed.iter().map(|text| listed_family(text)).collect();
        let without: Vec<Family> = families.iter().copied().filter(|family| !has(*family)).collect();
        let leaves = "leave with their nodes' addresses";
        if policy.has_no_gateway() {
            return Some("packets of pods that no other object serves are dropped".to_owned());
        }
        if policy.listed.is_empty() {
            return (!policy.is_unknown(PolicyPart::Addresses))
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

fn assigned(
    policy: &EgressPolicy,
    outcome: &ObjectAssignment,
    pods: &PolicyPods<'_>,
    cluster: &ClusterContext,
) -> DesiredCondition {
    let statuses = || outcome.entries.iter().map(|(_, status)| status);
    let assigned = |status: &EntryStatus| matches!(status, EntryStatus::Assigned { .. });
    let reason = match () {
        () if unreadable(policy, PolicyPart::Selectors) => Reason::InvalidSelector,
        () if unreadable(policy, PolicyPart::Addresses) => Reason::InvalidSpec,
        () if statuses().count() > 0 && statuses().all(assigned) => match pods.has_none {
            true => Reason::NoPodServed,
            false => Reason::Assigned,
        },
        () if statuses().any(assigned) => Reason::PartiallyAssigned,
        () if statuses().any(|status| matches!(status, EntryStatus::NotServed { .. })) => Reason::NotServed,
        () if statuses().any(|status| matches!(status, EntryStatus::Moving { .. })) => Reason::Moving,
        () if outcome.no_eligible_node() => Reason::NoEligibleNode,
        () if statuses().any(|status| matches!(status, EntryStatus::NotReady { .. } | EntryStatus::Drained { .. })) => {
            Reason::NoReadyNode
        }
        () if statuses().any(|status| matches!(status, EntryStatus::NoCapacity)) => Reason::NoCapacity,
        () if statuses().any(|status| matches!(status, EntryStatus::Taken { .. })) => Reason::UnsupportedRequest,
        () if statuses().any(|status| matches!(status, EntryStatus::Conflict { .. })) => Reason::EgressIPConflict,
        () if statuses().any(|status| matches!(status, EntryStatus::Reserved(_))) => Reason::ReservedAddress,
        () if policy.has_no_gateway() => Reason::NoGateway,
        () => Reason::InvalidEgressIP,
    };
    let mut causes: Vec<String> = spec_problems(policy).map(|(_, message)| message).collect();
    causes.extend(outcome.entries.iter().filter_map(|(entry, status)| cause(policy, (entry, status), cluster)));
    if policy.has_no_gateway() {
        causes.push("no node has an address for it".to_owned());
    } else if outcome.entries.is_empty() {
        causes.push("spec.egressIPs is empty".to_owned());
    }
    let message = match cluster.consequence(policy, outcome) {
        _ if causes.is_empty() && pods.has_none => NO_POD.to_owned(),
        _ if causes.is_empty() => "every egress IP has a node".to_owned(),
        None => joined(&causes),
        // After the causes, which may be many.
        Some(consequence) => format!("{}; {consequence}", joined(&causes)),
    };
    let status = matches!(reason, Reason::Assigned | Reason::NoPodServed);
    DesiredCondition { kind: ASSIGNED, status, reason: reason.as_str(), message }
}

const NO_POD: &str = "every egress IP has a node, and no running pod leaves by this object: its selectors match none, or \
                      older objects serve those that they match";

/// The agent of a node that has pods of the policy does not answer.
const AGENT_AWAY: &str = "AgentAway";

/// The policy is degraded if it serves with some of its addresses only, or as last read. If it serves with none,
/// `Assigned` reports it.
fn degraded(policy: &EgressPolicy, outcome: &ObjectAssignment, without_agent: &[(&str, u32)]) -> DesiredCondition {
    let condition = |status, reason, message| DesiredCondition { kind: DEGRADED, status, reason, message };
    if outcome.items.is_empty() {
        return condition(false, "NothingAssigned", "no egress IP has a node".to_owned());
    }
    let spec = spec_problems(policy).map(|(reason, _)| ("spec", reason.as_str()));
    let entries = outcome.entries.iter().filter_map(|(entry, status)| Some((entry.as_str(), reason_of(status)?)));
    let not_serving = |entry: &str| {
        outcome.entries.iter().find_map(|(other, status)| match status {
            EntryStatus::NotServed { node, .. } if other == entry => Some(format!(" on node {node}")),
            _ => None,
        })
    };
    let mut causes: Vec<(&str, &'static str)> = spec.chain(entries).collect();
    causes.extend(without_agent.iter().map(|(node, _)| (*node, AGENT_AWAY)));
    let reason = match causes.first() {
        None => return condition(false, "AllAssigned", "every egress IP has a node".to_owned()),
        Some((_, first)) if causes.iter().all(|(_, reason)| reason == first) => *first,
        Some(_) => "SeveralReasons",
    };
    let pods_of = |node: &str| without_agent.iter().find(|(other, _)| *other == node).map_or(0, |(_, pods)| *pods);
    let of_entry = |(what, reason): &(&str, &str)| match *reason {
        AGENT_AWAY => format!(
            "node {what}: {AGENT_AWAY}, its agent does not answer; {} of the object's pods are there, which follow no \
             change: where their egress IP moves their packets are dropped",
            pods_of(what)
        ),
        reason => {
            format!("{}: {reason}{}", quoted(what, MAX_ENTRY_BYTES), not_serving(what).unwrap_or_default())
        }
    };
    let causes: Vec<String> = causes.iter().map(of_entry).collect();
    condition(true, reason, joined(&causes))
}

/// A bounded message, whatever users write and other CRDs accept.
fn joined(causes: &[String]) -> String {
    listed(causes, "; ", (MAX_CAUSES, MAX_MESSAGE_BYTES))
}

/// Why an entry has no node, as a reason.
fn reason_of(status: &EntryStatus) -> Option<&'static str> {
    Some(match status {
        EntryStatus::Assigned { .. } => return None,
        EntryStatus::NotServed { why, .. } => why.reason(),
        EntryStatus::Moving { .. } => "Moving",
        EntryStatus::Invalid => "InvalidEgressIP",
        EntryStatus::Conflict { .. } => "EgressIPConflict",
        EntryStatus::Reserved(_) => "ReservedAddress",
        EntryStatus::Taken { .. } => "UnsupportedRequest",
        EntryStatus::NoNode => "NoEligibleNode",
        EntryStatus::NotReady { .. } | EntryStatus::Drained { .. } => "NoReadyNode",
        EntryStatus::NodesInUse => "NoRoom",
        EntryStatus::NoCapacity => "NoCapacity",
        EntryStatus::Surplus => "TooManyAddresses",
    })
}

fn unreadable(policy: &EgressPolicy, part: PolicyPart) -> bool {
    policy.unreadable.iter().any(|unreadable| unreadable.part == part)
}

/// Problems of the spec as a whole. An unreadable status is rewritten and needs no message.
fn spec_problems(policy: &EgressPolicy) -> impl Iterator<Item = (Reason, String)> {
    policy.unreadable.iter().filter_map(|Unreadable { part, why, .. }| {
        Some(match part {
            PolicyPart::Selectors => {
                (Reason::InvalidSelector, format!("{why}; pods that were selected stay so, no others are"))
            }
            PolicyPart::Addresses => (Reason::InvalidSpec, format!("{why}; the addresses that were read last hold")),
            PolicyPart::Items => return None,
        })
    })
}

fn cause(policy: &EgressPolicy, (entry, status): (&str, &EntryStatus), cluster: &ClusterContext) -> Option<String> {
    let entry = quoted(entry, MAX_ENTRY_BYTES);
    Some(match status {
        EntryStatus::Assigned { .. } => return None,
        EntryStatus::NotServed { node, why } => format!(
            "{entry}: assigned to node {node}, which does not serve it: {why}; packets that would leave with it are dropped"
        ),
        EntryStatus::Moving { from, is_endless: false } => format!("{entry}: node {from} has not released it yet"),
        EntryStatus::Moving { from, is_endless: true } => format!(
            "{entry}: node {from} has not released it yet, and no other node could host it before: start the agent there, or \
             delete Node {from} when the machine is off"
        ),
        EntryStatus::Invalid => format!("{entry:?} is not an IP address"),
        EntryStatus::Conflict { node } => format!("{entry} is an address of node {node}"),
        EntryStatus::Reserved(reason) => format!("{entry} {reason}"),
        EntryStatus::Taken { policy, .. } => format!("{entry} belongs to {policy}"),
        EntryStatus::NoNode => format!("{entry}: {}", cluster.no_node(&policy.eligible_nodes)),
        EntryStatus::NotReady { node, why } => format!("{entry}: node {node}, which could host it, {why}"),
        EntryStatus::Drained { node } => format!("{entry}: node {node}, which could host it, is drained"),
        EntryStatus::NoCapacity => {
            let key = keys::MAX_EGRESS_IPS;
            format!("{entry}: nodes for it have as many egress IPs as their cloud or their annotation {key} allows")
        }
        EntryStatus::NodesInUse => format!("{entry}: every node for it has another address of this object"),
        EntryStatus::Surplus => {
            format!("{entry}: this object has {MAX_SLOTS} others of the family, and may have no more")
        }
    })
}

/// The events of OVN-Kubernetes with its texts; `eligible` is the number of eligible nodes in the cluster.
pub fn events(policy: &EgressPolicy, outcome: &ObjectAssignment, eligible: usize) -> BTreeSet<ObjectEvent> {
    let subject = subject(policy.key());
    let mut events = entry_events(policy.key(), outcome);
    events.extend(spec_problems(policy).map(|(reason, message)| ObjectEvent { reason: reason.as_str(), message }));
    let items = &outcome.items;
    // As in OVN-Kubernetes, whatever the cause; only an invalid entry is no request.
    let is_waiting = |status: &EntryStatus| {
        !matches!(
            status,
            EntryStatus::Assigned { .. }
                | EntryStatus::NotServed { .. }
                | EntryStatus::Moving { .. }
                | EntryStatus::Invalid
                | EntryStatus::Surplus
        )
    };
    let waiting = outcome.entries.iter().any(|(_, status)| is_waiting(status));
    // Other policies need no label.
    let needs_label = policy.eligible_nodes == EligibleNodes::Labelled;
    if items.is_empty() && eligible == 0 && needs_label {
        let label = keys::ASSIGNABLE;
        let message = format!("no assignable nodes for {subject}, please tag at least one node with label: {label}");
        events.insert(ObjectEvent { reason: "NoMatchingNodeFound", message });
    } else if items.is_empty() && !outcome.entries.is_empty() {
        let entries: Vec<String> =
            policy.listed.iter().map(|entry| quoted(entry, MAX_ENTRY_BYTES).into_owned()).collect();
        let addresses = listed(&entries, " ", (MAX_CAUSES, MAX_ENTRIES_BYTES));
        let message = format!(
            "No matching nodes found, which can host any of the egress IPs: [{addresses}] for object {subject}"
        );
        events.insert(ObjectEvent { reason: "NoMatchingNodeFound", message });
    } else if waiting {
        let advice = if needs_label { ", please tag more nodes" } else { "" };
        let message = format!("Not all egress IPs for {subject} could be assigned{advice}");
        events.insert(ObjectEvent { reason: "UnassignedRequest", message });
    }
    events
}

/// A policy as these texts name it.
fn subject(policy: &PolicyKey) -> String {
    format!("{}: {}", policy.kind.as_str(), policy.name)
}

/// One event for each entry with its own problem; if there are many, for the first ones, and one for all others.
fn entry_events(policy: &PolicyKey, outcome: &ObjectAssignment) -> BTreeSet<ObjectEvent> {
    let subject = subject(policy);
    let mut by_reason: BTreeMap<&'static str, Vec<ObjectEvent>> = BTreeMap::new();
    for event in outcome.entries.iter().filter_map(|(entry, status)| entry_event(policy, entry, status)) {
        by_reason.entry(event.reason).or_default().push(event);
    }
    let mut events = BTreeSet::new();
    for (reason, mut of_reason) in by_reason {
        let more = of_reason.len().saturating_sub(MAX_EVENTS);
        of_reason.truncate(MAX_EVENTS);
        events.extend(of_reason);
        if more > 0 {
            let message = format!("{subject} has {more} more entries with the same problem");
            events.insert(ObjectEvent { reason, message });
        }
    }
    let surplus = outcome.entries.iter().filter(|(_, status)| *status == EntryStatus::Surplus).count();
    if surplus > 0 {
        let message = format!(
            "{subject} may have {MAX_SLOTS} addresses of a family; {surplus} that it lists beyond are not served, \
             another object could have them"
        );
        events.insert(ObjectEvent { reason: "TooManyAddresses", message });
    }
    events
}

fn entry_event(policy: &PolicyKey, entry: &str, status: &EntryStatus) -> Option<ObjectEvent> {
    let (name, subject) = (&policy.name, subject(policy));
    let entry = quoted(entry, MAX_ENTRY_BYTES);
    let (reason, message) = match status {
        EntryStatus::Invalid => {
            ("InvalidEgressIP", format!("egress IP: {entry} for object {subject} is not a valid IP address"))
        }
        EntryStatus::Conflict { node } => (
            "EgressIPConflict",
            format!(
                "Egress IP {name} with IP {entry} is conflicting with a host ({node}) IP address and will not be assigned"
            ),
        ),
        EntryStatus::Reserved(reason) => {
            ("ReservedAddress", format!("egress IP: {entry} for object {subject} {reason} and will not be assigned"))
        }
        EntryStatus::Taken { policy: owner, node } => (
            "UnsupportedRequest",
            format!(
                "IP: {entry:?} for {subject} is already allocated for {} on {}",
                self::subject(owner),
                node.as_deref().unwrap_or("no node yet")
            ),
        ),
        EntryStatus::Assigned { .. } | EntryStatus::NotServed { .. } | EntryStatus::Moving { .. } => return None,
        EntryStatus::NoNode | EntryStatus::NotReady { .. } | EntryStatus::Drained { .. } => return None,
        EntryStatus::NodesInUse | EntryStatus::NoCapacity | EntryStatus::Surplus => return None,
    };
    Some(ObjectEvent { reason, message })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::allocation::samples::policy;
    use crate::model::node::Unserved;
    use crate::model::policy::Item;

    fn outcome(statuses: &[(&str, EntryStatus)]) -> ObjectAssignment {
        let entries: Vec<(String, EntryStatus)> =
            statuses.iter().map(|(entry, status)| ((*entry).to_owned(), status.clone())).collect();
        let item = |(entry, status): &(String, EntryStatus)| match status {
            EntryStatus::Assigned { node } | EntryStatus::NotServed { node, .. } => {
                Some(Item { node: node.clone(), egress_ip: entry.clone() })
            }
            _ => None,
        };
        let items = entries.iter().filter_map(item).collect();
        ObjectAssignment { entries, items }
    }

    fn published(statuses: &[(&str, EntryStatus)]) -> Vec<(bool, &'static str)> {
        let (_, policy) = policy("a", 1, &[], &[]);
        conditions(&policy, &outcome(statuses), &PolicyPods::default(), &ClusterContext::default())
            .into_iter()
            .map(|one| (one.status, one.reason))
            .collect()
    }

    #[test]
    fn an_object_is_whole_degraded_or_without_a_node() {
        let here = EntryStatus::Assigned { node: "n1".into() };
        let taken = EntryStatus::Taken { policy: "b".into(), node: None };
        assert_eq!(published(&[("1", here.clone())]), [(true, "Assigned"), (false, "AllAssigned")]);
        let degraded =
            published(&[("1", here.clone()), ("2", EntryStatus::NodesInUse), ("3", EntryStatus::NodesInUse)]);
        assert_eq!(degraded, [(false, "PartiallyAssigned"), (true, "NoRoom")]);
        let several = published(&[("1", here.clone()), ("2", taken.clone()), ("x", EntryStatus::Invalid)]);
        assert_eq!(several, [(false, "PartiallyAssigned"), (true, "SeveralReasons")]);
        assert_eq!(published(&[("2", taken)]), [(false, "UnsupportedRequest"), (false, "NothingAssigned")]);
        assert_eq!(published(&[("2", EntryStatus::NoCapacity)]), [(false, "NoCapacity"), (false, "NothingAssigned")]);
        let drained = EntryStatus::Drained { node: "n1".into() };
        assert_eq!(published(&[("2", drained)]), [(false, "NoReadyNode"), (false, "NothingAssigned")]);
        assert_eq!(published(&[]).first().map(|(status, _)| *status), Some(false), "nothing is listed");

        let (_, a) = policy("a", 1, &[], &[]);
        let messages = conditions(
            &a,
            &outcome(&[("1", here), ("2", EntryStatus::NodesInUse), ("x", EntryStatus::Invalid)]),
            &PolicyPods::default(),
            &ClusterContext::default(),
        );
        assert_eq!(messages[1].message, "2: NoRoom; x: InvalidEgressIP");
    }

    /// An assigned address that is not served, and what happens to packets that get no address.
    #[test]
    fn messages_state_what_is_not_served_and_what_happens_to_packets() {
        let (v4, v6) = ("172.18.0.100", "fd00::100");
        let published = |listed: &[&str], statuses: &[(&str, EntryStatus)], cluster: &ClusterContext| {
            let (_, policy) = policy("a", 1, listed, &[]);
            let [assigned, degraded] = conditions(&policy, &outcome(statuses), &PolicyPods::default(), cluster)
                .try_into()
                .expect("two of them");
            (assigned.reason, assigned.message, degraded.status, degraded.reason, degraded.message)
        };
        let strict = ClusterContext::default();
        let why = Unserved::InUse("02:00:00:00:00:09".into());
        let in_use = published(&[v4], &[(v4, EntryStatus::NotServed { node: "n1".into(), why })], &strict);
        let message = "172.18.0.100: assigned to node n1, which does not serve it: another host (02:00:00:00:00:09) answers for it; \
                       packets that would leave with it are dropped";
        let in_a_word = "172.18.0.100: AddressInUse on node n1";
        assert_eq!(in_use, ("NotServed", message.into(), true, "AddressInUse", in_a_word.into()));
        let both = published(
            &[v4, v6],
            &[(v4, EntryStatus::Assigned { node: "n1".into() }), (v6, EntryStatus::NodesInUse)],
            &strict,
        );
        assert!(both.1.ends_with("; IPv6 packets of pods that no other object serves are dropped"), "{}", both.1);
        assert!(
            published(&["172.18.0.300"], &[("172.18.0.300", EntryStatus::Invalid)], &strict)
                .1
                .ends_with("packets of pods that no other object serves are dropped")
        );
        // No node has the label, no node is in that network, and which option is on.
        let lenient = ClusterContext { networks: None, node_address_serves: true };
        let label = "172.18.0.100: no node has the label k8s.ovn.org/egress-assignable; packets of pods that no \
                     other object serves leave with their nodes' addresses";
        assert_eq!(published(&[v4], &[(v4, EntryStatus::NoNode)], &lenient).1, label);
        let (_, asks_for_a_drop) = policy("a", 1, &[v4], &[]);
        let asks_for_a_drop = EgressPolicy { drop_unassigned: true, ..(*asks_for_a_drop).clone() };
        let dropped =
            conditions(&asks_for_a_drop, &outcome(&[(v4, EntryStatus::NoNode)]), &PolicyPods::default(), &lenient);
        assert!(dropped[0].message.ends_with("packets of pods that no other object serves are dropped"), "{dropped:?}");
        let networks = ["172.19.0.0/16", "fd00::/64"].map(|text| text.parse().expect("a literal"));
        let elsewhere = published(
            &[v4],
            &[(v4, EntryStatus::NoNode)],
            &ClusterContext { networks: Some(networks.into()), ..strict.clone() },
        );
        assert!(
            elsewhere.1.contains(
                "they are in 172.19.0.0/16, fd00::/64; packets of pods that no other object serves are dropped"
            ),
            "{}",
            elsewhere.1
        );
        let half = published(&[v4, "x"], &[(v4, EntryStatus::NoNode), ("x", EntryStatus::Invalid)], &lenient);
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
        let mut statuses: Vec<(String, EntryStatus)> =
            (0..500).map(|i| (format!("10.0.0.{i}"), EntryStatus::Invalid)).collect();
        statuses.extend((0..500).map(|i| (format!("10.0.1.{i}"), EntryStatus::Surplus)));
        let statuses: Vec<(&str, EntryStatus)> =
            statuses.iter().map(|(entry, status)| (entry.as_str(), status.clone())).collect();
        let here = [("10.0.2.1", EntryStatus::Assigned { node: "n1".into() })];
        let outcome = outcome(&[&statuses[..], &here].concat());
        for condition in conditions(&a, &outcome, &PolicyPods::default(), &ClusterContext::default()) {
            assert!(condition.message.len() < 8192 && condition.message.contains("; and 936 more"), "{condition:?}");
        }
        let events: Vec<String> = events(&a, &outcome, 1).into_iter().map(|event| event.message).collect();
        assert_eq!(events.len(), MAX_EVENTS + 2, "{events:?}");
        assert!(events.contains(&"EgressIP: a has 492 more entries with the same problem".to_owned()));
        assert!(events.iter().any(|message| message.contains("500 that it lists beyond are not served")));
    }

    #[test]
    fn long_junk_is_quoted_in_part_and_messages_stay_short() {
        let junk: Vec<String> = (0..64).map(|i| format!("{i}{}", "x".repeat(12_000))).collect();
        let texts: Vec<&str> = junk.iter().map(String::as_str).collect();
        let (_, a) = policy("a", 1, &texts, &[]);
        let mut statuses: Vec<(&str, EntryStatus)> = texts.iter().map(|entry| (*entry, EntryStatus::Invalid)).collect();
        let taken = EntryStatus::Taken { policy: "o".repeat(253).as_str().into(), node: Some("n".repeat(253)) };
        for outcome in [
            outcome(&statuses),
            outcome(&[&statuses[..], &[("1", EntryStatus::Assigned { node: "n".into() })]].concat()),
        ] {
            for condition in conditions(&a, &outcome, &PolicyPods::default(), &ClusterContext::default()) {
                assert!(condition.message.len() <= MAX_MESSAGE_BYTES + 32, "{} bytes", condition.message.len());
            }
            for event in events(&a, &outcome, 1) {
                assert!(event.message.len() <= 1024, "{} bytes: {event:?}", event.message.len());
            }
        }
        let published = conditions(&a, &outcome(&statuses), &PolicyPods::default(), &ClusterContext::default());
        assert!(
            published[0].message.contains("0xxxxx") && published[0].message.contains("(12001 bytes)"),
            "{published:?}"
        );
        statuses.iter_mut().for_each(|(_, status)| *status = taken.clone());
        let published = conditions(&a, &outcome(&statuses), &PolicyPods::default(), &ClusterContext::default());
        assert!(
            published[0].message.len() <= MAX_MESSAGE_BYTES + 32 && published[0].message.contains(" more"),
            "{published:?}"
        );
    }

    #[test]
    fn unreadable_parts_degrade_a_serving_object() {
        let (_, a) = policy("a", 1, &[], &[]);
        let unreadable = Unreadable { part: PolicyPart::Selectors, why: "podSelector: x".into(), is_known: true };
        let a = EgressPolicy { unreadable: vec![unreadable], ..(*a).clone() };
        let published = conditions(
            &a,
            &outcome(&[("1", EntryStatus::Assigned { node: "n1".into() })]),
            &PolicyPods::default(),
            &ClusterContext::default(),
        );
        assert_eq!((published[0].reason, published[1].reason), ("InvalidSelector", "InvalidSelector"));
        assert!(!published[0].status && published[1].status);
    }

    #[test]
    fn events_of_ovn_kubernetes_keep_their_texts() {
        let (_, a) = policy("a", 1, &["1", "2"], &[]);
        let texts = |statuses: &[(&str, EntryStatus)], eligible| -> Vec<String> {
            let events = events(&a, &outcome(statuses), eligible);
            events.into_iter().map(|event| format!("{}: {}", event.reason, event.message)).collect()
        };
        let here = EntryStatus::Assigned { node: "n1".into() };
        assert!(texts(&[("1", here.clone())], 1).is_empty());
        assert_eq!(
            texts(&[("1", here), ("2", EntryStatus::NodesInUse)], 1),
            ["UnassignedRequest: Not all egress IPs for EgressIP: a could be assigned, please tag more nodes"]
        );
        assert_eq!(
            texts(&[("1", EntryStatus::Conflict { node: "n1".into() })], 1),
            [
                "EgressIPConflict: Egress IP a with IP 1 is conflicting with a host (n1) IP address and will not be assigned",
                "NoMatchingNodeFound: No matching nodes found, which can host any of the egress IPs: [1 2] for object EgressIP: a"
            ]
        );
        assert_eq!(
            texts(&[("1", EntryStatus::NoNode)], 0),
            [
                "NoMatchingNodeFound: no assignable nodes for EgressIP: a, please tag at least one node with label: k8s.ovn.org/egress-assignable"
            ]
        );
    }

    #[test]
    fn an_assigned_object_without_pods_says_so_and_is_no_failure() {
        let (here, taken) = (EntryStatus::Assigned { node: "n1".into() }, EntryStatus::NodesInUse);
        let (_, policy) = policy("a", 1, &["1", "2"], &[]);
        let pods = PolicyPods { has_none: true, ..PolicyPods::default() };
        let published = |statuses: &[(&str, EntryStatus)]| {
            let all = conditions(&policy, &outcome(statuses), &pods, &ClusterContext::default());
            all.into_iter().map(|one| (one.status, one.reason, one.message)).collect::<Vec<_>>()
        };
        let whole = published(&[("1", here.clone()), ("2", here.clone())]);
        assert_eq!((whole[0].0, whole[0].1), (true, "NoPodServed"));
        assert!(whole[0].2.contains("its selectors match none"), "{whole:?}");
        assert_eq!((whole[1].0, whole[1].1), (false, "AllAssigned"));
        let in_part = published(&[("1", here), ("2", taken)]);
        assert_eq!((in_part[0].0, in_part[0].1), (false, "PartiallyAssigned"), "the worse comes first");
    }

    #[test]
    fn an_agent_that_is_away_is_listed_with_its_pods() {
        let statuses = [("1", EntryStatus::Assigned { node: "n1".into() })];
        let pods = PolicyPods { without_agent: vec![("n3", 2), ("n4", 1)], has_none: false };
        let (_, policy) = policy("a", 1, &["1"], &[]);
        let published = conditions(&policy, &outcome(&statuses), &pods, &ClusterContext::default());
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
