//! What follows if the kernel refuses one entry of a plan: its map is full, there is no memory, or the value is
//! invalid. Pure.
//!
//! The entry is skipped and the rest of the plan is done. Every prefix of the plan stays safe:
//!
//! | refused | result |
//! |---|---|
//! | a pod, new or changed | it is unknown, and unknown pods are dropped while a selected one is among them |
//! | a policy, new or changed | its pods are dropped (`no_policy`) |
//! | a class of pods | the packets of its pods are dropped (`no_policy`) |
//! | a claim | its slot is withheld from the policy, and its flows wait ([`crate::ownership::node_ownership::withhold`]) |
//! | a hand-over | the address moves without it: packets in between are dropped |
//! | a port by which a pod is reached from outside | datagrams for it count as the pod's own traffic |
//! | a pod's owner | it is recorded later; until then its cut is due again |
//! | a prefix, a node's address | as before: an address without an entry is judged by the next shorter prefix, in the end as outside |
//!
//! The last row does not fail closed, so entries of tenants must not take the room of nodes and pod subnets
//! ([`crate::plan::capacity`]).

use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;

use crate::model::state::{Action, EgressId, Family, KernelState, OnUnknownPod, PodClass, PodPort};

/// An entry that one action writes and the kernel may refuse.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum KernelEntry {
    Pod(IpAddr),
    Owner(IpAddr),
    Exposed(IpAddr, PodPort),
    Policy(EgressId, Family),
    Class(PodClass),
    Claim(EgressId),
    Moving(EgressId),
    Prefix(IpNet),
    Node(IpAddr),
    /// Never refused by the kernel; not set to pass while a selected pod is unknown.
    UnknownPods,
}

/// The maps that may refuse an entry of a plan.
pub const MAPS: [&str; 8] = ["pods", "exposed", "policy", "classes", "owned", "handovers", "cluster", "nodes"];

impl KernelEntry {
    /// The entry that the action writes. `None` for removals and cuts, which fail only if the kernel fails.
    pub fn of(action: &Action) -> Option<Self> {
        Some(match action {
            Action::SetUnknownPods(_) => Self::UnknownPods,
            Action::PutPod(address, _) => Self::Pod(*address),
            Action::PutOwner(address, _) => Self::Owner(*address),
            Action::Expose(address, port) => Self::Exposed(*address, *port),
            Action::PutPolicy(id, family, _) => Self::Policy(*id, *family),
            Action::PutClass(class, _) => Self::Class(*class),
            Action::Own(id, _) | Action::Share(id, ..) => Self::Claim(*id),
            Action::PutHandover(id, _) => Self::Moving(*id),
            Action::PutPrefix(prefix, _) => Self::Prefix(*prefix),
            Action::PutNode(address, _) => Self::Node(*address),
            Action::RemoveNode(_)
            | Action::RemovePrefix(_)
            | Action::Disown(..)
            | Action::EndHandover(..)
            | Action::RemovePolicy(..)
            | Action::RemoveClass(_)
            | Action::RemovePod(_)
            | Action::Conceal(..)
            | Action::CutPod(_)
            | Action::CutFlows(..)
            | Action::CutPodFlows(..)
            | Action::CutOrphans => return None,
        })
    }

    /// The map of the entry, one of [`MAPS`].
    pub fn map(&self) -> Option<&'static str> {
        Some(match self {
            Self::Pod(_) | Self::Owner(_) => "pods",
            Self::Exposed(..) => "exposed",
            Self::Policy(..) => "policy",
            Self::Class(_) => "classes",
            Self::Claim(_) => "owned",
            Self::Moving(_) => "handovers",
            Self::Prefix(_) => "cluster",
            Self::Node(_) => "nodes",
            Self::UnknownPods => return None,
        })
    }

    /// Whether both states hold the same entry.
    pub fn is_same(&self, one: &KernelState, other: &KernelState) -> bool {
        match self {
            Self::Pod(address) => one.pods.get(address) == other.pods.get(address),
            Self::Owner(address) => one.owners.get(address) == other.owners.get(address),
            Self::Exposed(address, port) => {
                let has = |state: &KernelState| state.exposed.get(address).is_some_and(|ports| ports.contains(port));
                has(one) == has(other)
            }
            Self::Policy(id, family) => one.policy.get(&(*id, *family)) == other.policy.get(&(*id, *family)),
            Self::Class(class) => one.classes.get(class) == other.classes.get(class),
            Self::Claim(id) => {
                !one.owned.contains_key(id) && !other.owned.contains_key(id) || one.has_claim(*id, other)
            }
            Self::Moving(id) => one.handovers.get(id) == other.handovers.get(id),
            Self::Prefix(prefix) => one.cluster.get(prefix) == other.cluster.get(prefix),
            Self::Node(address) => one.nodes.get(address) == other.nodes.get(address),
            Self::UnknownPods => one.on_unknown_pod == other.on_unknown_pod,
        }
    }
}

impl fmt::Display for KernelEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pod(address) => write!(f, "pod address {address}"),
            Self::Owner(address) => write!(f, "the owner of pod address {address}"),
            Self::Exposed(address, port) => {
                write!(f, "port {} of pod address {address} (protocol {})", port.number, port.protocol)
            }
            Self::Policy(id, family) => write!(f, "the addresses of egress ID {} ({family:?})", id.0),
            Self::Class(class) => write!(f, "the destinations of pods of class {}", class.0),
            Self::Claim(id) => write!(f, "the claim of egress ID {}", id.0),
            Self::Moving(id) => write!(f, "the hand-over of egress ID {}", id.0),
            Self::Prefix(prefix) => write!(f, "prefix {prefix}"),
            Self::Node(address) => write!(f, "node address {address}"),
            Self::UnknownPods => f.write_str("what becomes of unknown pods"),
        }
    }
}

/// Actions that replace a refused one in this state. An entry that cannot be changed is removed with its flows: no
/// later plan would know that they have to be cut.
pub fn instead(state: &KernelState, refused: &Action) -> Vec<Action> {
    match refused {
        Action::PutPod(address, pod) => {
            let leaks = pod.is_selected() && state.on_unknown_pod != Some(OnUnknownPod::Drop);
            let drop = leaks.then_some(Action::SetUnknownPods(OnUnknownPod::Drop));
            let goes =
                state.pods.contains_key(address).then_some([Action::RemovePod(*address), Action::CutPod(*address)]);
            drop.into_iter().chain(goes.into_iter().flatten()).collect()
        }
        Action::PutPolicy(id, family, _) => match state.policy.get(&(*id, *family)) {
            Some(policy) => {
                let addresses: BTreeSet<IpAddr> = policy.addresses().collect();
                vec![Action::RemovePolicy(*id, *family), Action::CutFlows(*id, addresses)]
            }
            None => Vec::new(),
        },
        _ => Vec::new(),
    }
}

/// Whether the action must be skipped while these entries are refused.
pub fn waits<'a>(state: &KernelState, mut refused: impl Iterator<Item = &'a Action>, action: &Action) -> bool {
    match action {
        Action::SetUnknownPods(OnUnknownPod::Pass | OnUnknownPod::PassWhileFollowed) => {
            refused.any(|action| matches!(action, Action::PutPod(_, pod) if pod.is_selected()))
        }
        // A missing entry has no owner.
        Action::PutOwner(address, _) => !state.pods.contains_key(address),
        _ => false,
    }
}
