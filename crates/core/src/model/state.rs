//! The state of the kernel as the model speaks of it: what is desired, what an action changes.
//!
//! Plain values with standard address types. The data plane turns them into the ABI of `egress_common::abi` and back;
//! the model never sees a map.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

pub use egress_common::abi::{Family, HandoverStage, OnUnknownPod, PrefixKind};
use ipnet::IpNet;

pub fn family_of(address: IpAddr) -> Family {
    if address.is_ipv4() { Family::V4 } else { Family::V6 }
}

/// Cluster-unique number of an EgressIP object, 1..=`egress_common::abi::MAX_EGRESS_ID`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EgressId(pub u32);

/// Stands in the map for "selected by an object that has no egress ID yet". No object ever has this ID, hence no policy,
/// and a missing policy is a drop.
pub const NOT_NUMBERED: EgressId = EgressId(0);

/// A node's address that other nodes send overlay packets to; it also names the node in the maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TunnelEndpoint(pub IpAddr);

/// What this node knows of one of its pods' addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PodState {
    Known,
    Selected(EgressId),
}

/// Which pod has an address, so that another one with the same address and the same selection can be told from it: a
/// number made of the pod's UID, the same after every restart and in every version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PodOwner(pub u64);

impl PodOwner {
    /// FNV-1a. Zero stands for "not noted yet" in the kernel.
    pub fn of(uid: &str) -> Self {
        let hash = uid.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        Self(hash.max(1))
    }
}

/// How many pods of one node each object serves.
pub type SelectedPods = BTreeMap<EgressId, u32>;

/// A port of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Port {
    /// IANA's number: TCP, UDP or SCTP.
    pub protocol: u8,
    pub number: u16,
}

/// An address that is being handed over between this node and another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HandoverState {
    pub course: HandoverStage,
    pub address: IpAddr,
    /// The other node.
    pub peer: TunnelEndpoint,
}

/// Where an assigned address is served, seen from this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    Here,
    Remote(TunnelEndpoint),
}

/// One assigned address of an object. Slots are sorted by address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Slot {
    pub address: IpAddr,
    pub place: Place,
}

/// See `egress_common::abi::WhenEmpty`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WhenEmpty {
    Drop,
    NodeAddress,
    NotListed,
}

/// The addresses of one object and family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Those that are served.
    pub slots: Vec<Slot>,
    /// Those that no node serves now: their flows wait for them, and are not cut. Sorted.
    pub pending: Vec<IpAddr>,
    pub when_empty: WhenEmpty,
}

/// What a prefix of the cluster is; the node is given for pod subnets only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefix {
    pub kind: PrefixKind,
    pub node: Option<TunnelEndpoint>,
}

/// Whose address it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeAddress {
    pub own: bool,
    pub node: TunnelEndpoint,
}

/// What the maps of this node should hold (desired) or do hold (actual): one shape for both, so that the difference
/// between them is the plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelState {
    pub pods: BTreeMap<IpAddr, PodState>,
    /// Whose these addresses are.
    pub owners: BTreeMap<IpAddr, PodOwner>,
    /// By which ports pods are reached from outside; no entry for a pod that has none.
    pub exposed: BTreeMap<IpAddr, BTreeSet<Port>>,
    pub policy: BTreeMap<(EgressId, Family), Policy>,
    /// Addresses that this node owns as a gateway: never two of one object.
    pub owned: BTreeMap<EgressId, IpAddr>,
    /// Hand-overs that concern this node.
    pub moving: BTreeMap<EgressId, HandoverState>,
    pub cluster: BTreeMap<IpNet, Prefix>,
    pub nodes: BTreeMap<IpAddr, NodeAddress>,
    /// `None` before the first write.
    pub on_unknown_pod: Option<OnUnknownPod>,
}

impl Policy {
    /// What the object has: served, or waited for.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.slots.iter().map(|slot| slot.address).chain(self.pending.iter().copied())
    }
}

impl HandoverState {
    /// Whether this node gives the address to packets by this entry: the other node's, or all.
    pub fn is_taken(&self) -> bool {
        self.course != HandoverStage::Leaving
    }
}

impl KernelState {
    /// Whether a flow of this object may go on with this address. Which object selects a pod of another node (`None`) is
    /// that node's to know; and since it may send before this node's own policy is written, or after that is gone, the claim
    /// is enough.
    pub fn permits(&self, pod: Option<IpAddr>, id: EgressId, address: IpAddr) -> bool {
        let policy = self.policy.get(&(id, family_of(address)));
        let is_listed = policy.is_some_and(|policy| policy.addresses().any(|one| one == address));
        match pod {
            Some(pod) => is_listed && self.pods.get(&pod) == Some(&PodState::Selected(id)),
            None => is_listed || self.owned.get(&id) == Some(&address),
        }
    }

    /// The state after the action. Cutting flows changes no map that the model speaks of.
    pub fn apply(&mut self, action: &Action) {
        match action {
            Action::SetUnknownPods(on) => self.on_unknown_pod = Some(*on),
            Action::PutNode(address, node) => {
                self.nodes.insert(*address, *node);
            }
            Action::RemoveNode(address) => {
                self.nodes.remove(address);
            }
            Action::PutPrefix(prefix, value) => {
                self.cluster.insert(*prefix, *value);
            }
            Action::RemovePrefix(prefix) => {
                self.cluster.remove(prefix);
            }
            Action::Own(id, address) => {
                self.owned.insert(*id, *address);
            }
            Action::Disown(id, address) => {
                self.owned.remove(id);
                if self.moving.get(id).is_some_and(|moving| moving.is_taken() && moving.address == *address) {
                    self.moving.remove(id);
                }
            }
            Action::PutMoving(id, moving) => {
                self.moving.insert(*id, *moving);
                if moving.course == HandoverStage::Leaving {
                    self.owned.remove(id);
                }
            }
            Action::EndMoving(id, _) => {
                self.moving.remove(id);
            }
            Action::PutPolicy(id, family, policy) => {
                self.policy.insert((*id, *family), policy.clone());
            }
            Action::RemovePolicy(id, family) => {
                self.policy.remove(&(*id, *family));
            }
            Action::PutPod(address, pod) => {
                self.pods.insert(*address, *pod);
            }
            Action::RemovePod(address) => {
                self.pods.remove(address);
                self.owners.remove(address);
            }
            Action::PutOwner(address, owner) => {
                self.owners.insert(*address, *owner);
            }
            Action::Expose(address, port) => {
                self.exposed.entry(*address).or_default().insert(*port);
            }
            Action::Conceal(address, port) => {
                if let Some(ports) = self.exposed.get_mut(address) {
                    ports.remove(port);
                }
                self.exposed.retain(|_, ports| !ports.is_empty());
            }
            Action::CutFlows(..) | Action::CutPodFlows(..) | Action::CutPod(_) | Action::CutOrphans => {}
        }
    }
}

/// One step of a plan. Every prefix of a plan leaves a state in which no selected flow leaves with a wrong address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    SetUnknownPods(OnUnknownPod),
    PutNode(IpAddr, NodeAddress),
    RemoveNode(IpAddr),
    PutPrefix(IpNet, Prefix),
    RemovePrefix(IpNet),
    /// Claim (probe first), answer for and announce the address; NAT for it.
    Own(EgressId, IpAddr),
    /// Stop answering and translating for the address of this object, also by a hand-over.
    Disown(EgressId, IpAddr),
    /// Be ready to take the address over, or hand it over: from then on what comes for it is passed on. One step, behind
    /// which this node gives the address to nothing any more.
    PutMoving(EgressId, HandoverState),
    /// The hand-over is over: nothing is passed on, and replies for what was handed over are none of ours.
    EndMoving(EgressId, IpAddr),
    PutPolicy(EgressId, Family, Policy),
    RemovePolicy(EgressId, Family),
    PutPod(IpAddr, PodState),
    RemovePod(IpAddr),
    /// Note whose the address is.
    PutOwner(IpAddr, PodOwner),
    /// What comes from outside for this port of the pod is somebody's question.
    Expose(IpAddr, Port),
    /// It is so no more.
    Conceal(IpAddr, Port),
    /// Forget everything of the pod that had this address: it is gone, and the next one inherits nothing.
    CutPod(IpAddr),
    /// Cut the flows and mappings of these addresses of the object: they were taken from it.
    CutFlows(EgressId, BTreeSet<IpAddr>),
    /// Cut the flows of a pod that is no longer selected by this object.
    CutPodFlows(IpAddr, EgressId),
    /// Cut every flow that the state, as it is in the kernel, does not permit: whoever wrote it may have been killed, or
    /// have failed, before it came to the cut.
    CutOrphans,
}

impl Action {
    /// Whether it is one of those that one walk of the maps serves together.
    pub fn is_cut(&self) -> bool {
        match self {
            Self::CutPod(_) | Self::CutFlows(..) | Self::CutPodFlows(..) => true,
            Self::SetUnknownPods(_)
            | Self::PutNode(..)
            | Self::RemoveNode(_)
            | Self::PutPrefix(..)
            | Self::RemovePrefix(_)
            | Self::Own(..)
            | Self::Disown(..)
            | Self::PutMoving(..)
            | Self::EndMoving(..)
            | Self::PutPolicy(..)
            | Self::RemovePolicy(..)
            | Self::PutPod(..)
            | Self::RemovePod(_)
            | Self::PutOwner(..)
            | Self::Expose(..)
            | Self::Conceal(..)
            | Self::CutOrphans => false,
        }
    }
}
