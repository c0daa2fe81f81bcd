//! The assignment of each policy: the status of every entry, and the items of its status.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;

use crate::allocation::claimants::Claimants;
use crate::allocation::hosts::Hosts;
use crate::allocation::{AssignmentInputs, Claim, Placement};
use crate::keys;
use crate::model::interface::InterfaceReason;
use crate::model::node::{Node, Unserved};
use crate::model::policy::{Item, PolicyKey};
use crate::model::reserved::Reserved;

/// The result for one entry of `spec.egressIPs`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum EntryStatus {
    Assigned {
        node: String,
    },
    /// Its node does not serve it.
    NotServed {
        node: String,
        why: Unserved,
    },
    /// It has a new node, and the old one has not released it yet.
    Moving {
        from: String,
        /// The old node's lease has no end, so it does not expire without the agent.
        is_endless: bool,
    },
    /// Not an address.
    Invalid,
    /// A node has this address itself.
    Conflict {
        node: String,
    },
    /// The address is reserved.
    Reserved(Reserved),
    /// Another policy has it.
    Taken {
        policy: PolicyKey,
        node: Option<String>,
    },
    /// No node with the label has a network that contains it.
    NoNode,
    /// This node could hold it without this obstacle; possibly others, too.
    NotReady {
        node: String,
        why: HostObstacle,
    },
    /// This node could hold it, and is drained, as are all others that could.
    Drained {
        node: String,
    },
    /// Every node that could take it has another address of the policy.
    NodesInUse,
    /// Nodes that could take it have as many addresses as their cloud or their annotation allows.
    NoCapacity,
    /// The policy already has the maximum of addresses of this family.
    Surplus,
}

/// Why a node with the label that could hold an address takes none.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum HostObstacle {
    /// Its condition Ready is not True.
    NotReady,
    /// It has not published its own address or its pod subnets.
    NetworksUnknown,
    /// Its agent has not published where it answers health checks.
    HealthAddressUnknown,
    /// It does not answer health checks there, or reports that it cannot serve.
    Unhealthy { at: Vec<IpAddr> },
    /// The node answers, and its agent does not.
    AgentAway,
    /// The interface of the address cannot send.
    Interface { name: String, reason: InterfaceReason },
}

impl HostObstacle {
    fn of(inputs: &AssignmentInputs<'_>, name: &str, node: &Node, address: IpAddr) -> Self {
        match () {
            () if !node.ready => Self::NotReady,
            () if !node.has_published_networks() => Self::NetworksUnknown,
            () if inputs.unreachable.contains(name) && node.health_addresses().is_empty() => Self::HealthAddressUnknown,
            () if inputs.unreachable.contains(name) => Self::Unhealthy { at: node.health_addresses() },
            () if inputs.absent.contains(name) => Self::AgentAway,
            () => match node.impairment(address) {
                Some((interface, reason)) => Self::Interface { name: interface.name.clone(), reason: reason.clone() },
                None => Self::NetworksUnknown,
            },
        }
    }
}

impl fmt::Display for HostObstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotReady => f.write_str("is not Ready"),
            Self::NetworksUnknown => write!(
                f,
                "has not published its networks (annotations {} and {}, or its EgressNode object): does its egress-agent run?",
                keys::PRIMARY_IFADDR,
                keys::NODE_SUBNETS
            ),
            Self::HealthAddressUnknown => {
                f.write_str("has not published where its egress-agent answers health checks (its EgressNode object)")
            }
            Self::Unhealthy { at } => {
                let at: Vec<String> = at.iter().map(ToString::to_string).collect();
                write!(f, "does not answer health checks at {}, or says that it cannot serve", at.join(" and "))
            }
            Self::AgentAway => f.write_str("has an egress-agent that does not answer"),
            Self::Interface { name, reason } => write!(f, "cannot send by its interface {name} ({})", reason.code()),
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ObjectAssignment {
    /// Canonical if valid, in the order of the spec, unique.
    pub entries: Vec<(String, EntryStatus)>,
    /// The desired `status.items`: those that stay in their current order, then the new ones.
    pub items: Vec<Item>,
}

impl ObjectAssignment {
    /// Whether no node can host any address of the policy: the only case in which the node's address may serve.
    /// Readiness does not matter here: an address whose node is away returns. An address that could be placed if it
    /// were free does not count, and neither does an invalid entry.
    pub fn no_eligible_node(&self) -> bool {
        !self.entries.is_empty() && self.entries.iter().all(|(_, status)| *status == EntryStatus::NoNode)
    }
}

pub(super) fn object_assignments<'a>(
    inputs: &AssignmentInputs<'a>,
    mut claims: Vec<Claim<'a>>,
    hosts: &mut Hosts<'a>,
    claimants: &Claimants<'a>,
    placements: &[Placement],
) -> BTreeMap<PolicyKey, ObjectAssignment> {
    let entries: Vec<_> = claims.iter_mut().map(|claim| std::mem::take(&mut claim.entries)).collect();
    let mut statuses = EntryStatuses { inputs, claims: &claims, hosts, claimants, placements };
    let outcome =
        |(rank, entries): (usize, _)| (claims[rank].policy.key().clone(), statuses.object_assignment(rank, entries));
    entries.into_iter().enumerate().map(outcome).collect()
}

struct EntryStatuses<'j, 'a> {
    inputs: &'j AssignmentInputs<'a>,
    claims: &'j [Claim<'a>],
    hosts: &'j mut Hosts<'a>,
    claimants: &'j Claimants<'a>,
    placements: &'j [Placement],
}

impl EntryStatuses<'_, '_> {
    fn object_assignment(&mut self, rank: usize, entries: Vec<(String, Option<IpAddr>)>) -> ObjectAssignment {
        let mut status =
            |address: Option<IpAddr>| address.map_or(EntryStatus::Invalid, |address| self.status(rank, address));
        let entries: Vec<_> = entries.into_iter().map(|(entry, address)| (entry, status(address))).collect();
        let items = items(&self.claims[rank].policy.published.items, &entries);
        ObjectAssignment { entries, items }
    }

    fn status(&mut self, rank: usize, address: IpAddr) -> EntryStatus {
        if let Some(node) = self.node(rank, address) {
            return EntryStatus::Assigned { node };
        }
        match self.claimants.reserved(self.claims[rank].policy.address_use, address) {
            Some(Reserved::Node(node)) => return EntryStatus::Conflict { node: node.to_string() },
            Some(reason) => return EntryStatus::Reserved(reason.clone()),
            None => {}
        }
        if let Some(claimant) = self.claimants.policy_of(address).filter(|claimant| *claimant != rank) {
            return EntryStatus::Taken {
                policy: self.claims[claimant].policy.key().clone(),
                node: self.node(claimant, address),
            };
        }
        let policy = self.claims[rank].policy;
        let class = self.hosts.class(policy, address);
        let used: BTreeSet<_> = self.placements[rank].values().collect();
        let candidates = &self.hosts.classes[class].nodes;
        if !candidates.is_empty() && !self.claims[rank].lists(&address) {
            return EntryStatus::Surplus;
        }
        if candidates.iter().any(|node| !used.contains(node)) {
            return EntryStatus::NoCapacity;
        }
        if !candidates.is_empty() {
            return EntryStatus::NodesInUse;
        }
        let waiting = || self.inputs.nodes.iter().filter(|(_, node)| policy.eligible_nodes.might_host(node, address));
        match waiting().find(|(_, node)| !node.drained).or_else(|| waiting().next()) {
            None => EntryStatus::NoNode,
            Some((name, node)) if node.drained => EntryStatus::Drained { node: name.clone() },
            Some((name, node)) => {
                EntryStatus::NotReady { node: name.clone(), why: HostObstacle::of(self.inputs, name, node, address) }
            }
        }
    }

    fn node(&self, rank: usize, address: IpAddr) -> Option<String> {
        self.placements[rank].get(&address).map(|node| self.hosts.nodes[*node].0.to_owned())
    }
}

fn items(before: &[Item], entries: &[(String, EntryStatus)]) -> Vec<Item> {
    let mut assigned: Vec<Item> = Vec::new();
    for (egress_ip, status) in entries {
        if let EntryStatus::Assigned { node } = status {
            assigned.push(Item { node: node.clone(), egress_ip: egress_ip.clone() });
        }
    }
    // The sort is stable: new items come last, in the order of the spec.
    assigned.sort_by_key(|item| before.iter().position(|old| old == item).unwrap_or(before.len()));
    assigned
}
