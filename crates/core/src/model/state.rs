//! The state of the kernel: what is desired, what is observed, and the actions that change it.
//!
//! Plain values with standard address types. `egress_datapath` converts them to and from the ABI of
//! `egress_common::abi`; the model never sees a map.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

pub use egress_common::abi::{BandwidthLimit, Family, HandoverStage, OnUnknownPod, PrefixKind, WhenEmpty};
use ipnet::IpNet;

pub fn family_of(address: IpAddr) -> Family {
    if address.is_ipv4() { Family::V4 } else { Family::V6 }
}

/// Cluster-unique number of an EgressIP object, 1..=`egress_common::abi::MAX_EGRESS_ID`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EgressId(pub u32);

/// The egress IDs of one policy, by the family of the address. A node owns at most one address of an egress ID: a policy
/// whose addresses of both families are on one node has two IDs, and one without an ID of a family selects no pod's
/// address of that family.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct EgressIds {
    v4: Option<EgressId>,
    v6: Option<EgressId>,
}

impl EgressIds {
    pub const NONE: Self = Self { v4: None, v6: None };

    pub const fn new(v4: Option<EgressId>, v6: Option<EgressId>) -> Self {
        Self { v4, v6 }
    }

    /// One ID for both families.
    pub const fn both(id: EgressId) -> Self {
        Self { v4: Some(id), v6: Some(id) }
    }

    pub const fn of(&self, family: Family) -> Option<EgressId> {
        match family {
            Family::V4 => self.v4,
            Family::V6 => self.v6,
        }
    }

    /// Each ID once.
    pub fn all(&self) -> impl Iterator<Item = EgressId> + use<> {
        self.v4.into_iter().chain(self.v6.filter(|id| self.v4 != Some(*id)))
    }

    pub fn contains(&self, id: EgressId) -> bool {
        self.v4 == Some(id) || self.v6 == Some(id)
    }

    /// Those of them that may be kept, asked once for each ID.
    #[must_use]
    pub fn retained(&self, mut may_keep: impl FnMut(EgressId) -> bool) -> Self {
        let kept: BTreeSet<EgressId> = self.all().filter(|id| may_keep(*id)).collect();
        let keep = |id: Option<EgressId>| id.filter(|id| kept.contains(id));
        Self { v4: keep(self.v4), v6: keep(self.v6) }
    }
}

impl fmt::Display for EgressIds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all: Vec<String> = self.all().map(|id| id.0.to_string()).collect();
        f.write_str(&all.join(","))
    }
}

/// The egress ID in the map for "selected by an object that has no egress ID yet". No object has this ID, hence no
/// policy, and a missing policy is a drop.
pub const NOT_NUMBERED: EgressId = EgressId(0);

/// A node's address that other nodes send overlay packets to; it also names the node in the maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TunnelEndpoint(pub IpAddr);

/// State of an address of one of this node's pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PodState {
    Known,
    /// By one policy, for every destination.
    Selected(EgressId),
    /// By policies of which each has its destinations.
    ByDestination(PodClass),
}

impl PodState {
    pub const fn is_selected(self) -> bool {
        match self {
            Self::Known => false,
            Self::Selected(_) | Self::ByDestination(_) => true,
        }
    }
}

/// A number for the pods of this node that the same policies select, where the policy depends on the destination. On one
/// node a number means the same [`ClassPolicies`] as long as it is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodClass(pub u32);

/// The policy of each destination of one family: the longest prefix counts, and `None` is no policy. All destinations are
/// covered.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct ClassPolicies(BTreeMap<IpNet, Option<EgressId>>);

impl ClassPolicies {
    pub const fn new(policies: BTreeMap<IpNet, Option<EgressId>>) -> Self {
        Self(policies)
    }

    pub fn entries(&self) -> impl Iterator<Item = (&IpNet, &Option<EgressId>)> {
        self.0.iter()
    }

    /// Each policy once.
    pub fn ids(&self) -> BTreeSet<EgressId> {
        self.0.values().filter_map(|id| *id).collect()
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// What applies to every destination alike, if that is so.
    pub fn sole(&self) -> Option<Option<EgressId>> {
        let mut all = self.0.values();
        all.next().copied().filter(|_| all.next().is_none())
    }

    /// The entry with the longest prefix that contains these destinations.
    fn longest(&self, to: IpNet) -> Option<Option<EgressId>> {
        let prefix = |length| IpNet::new(to.addr(), length).ok().map(|net| net.trunc());
        (0..=to.prefix_len()).rev().find_map(|length| self.0.get(&prefix(length)?).copied())
    }
}

/// Flows of a pod, by their policies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LostFlows {
    pub of: BTreeSet<EgressId>,
    /// Flows stay whose destinations have the same policy here.
    pub keeps: Option<Arc<ClassPolicies>>,
}

impl LostFlows {
    /// All of one policy.
    pub fn of_policy(id: EgressId) -> Self {
        Self { of: [id].into(), keeps: None }
    }

    /// Whether a flow of this policy to this destination is among them.
    pub fn contains(&self, id: EgressId, to: IpAddr) -> bool {
        let stays = || self.keeps.as_ref().is_some_and(|policies| policies.longest(to.into()) == Some(Some(id)));
        self.of.contains(&id) && !stays()
    }
}

/// The policies that apply to a pod's flows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PodPolicies {
    None,
    One(EgressId),
    ByDestination(Arc<ClassPolicies>),
}

impl PodPolicies {
    /// The policy of a destination.
    pub fn of(&self, to: IpAddr) -> Option<EgressId> {
        match self {
            Self::None => None,
            Self::One(id) => Some(*id),
            // Without an entry, the programs drop.
            Self::ByDestination(policies) => policies.longest(to.into()).unwrap_or(Some(NOT_NUMBERED)),
        }
    }

    /// Each policy once; none without an ID.
    pub fn ids(&self) -> BTreeSet<EgressId> {
        let mut ids = match self {
            Self::None => BTreeSet::new(),
            Self::One(id) => [*id].into(),
            Self::ByDestination(policies) => policies.ids(),
        };
        ids.remove(&NOT_NUMBERED);
        ids
    }

    /// The flows that end when the pod gets other policies.
    pub fn lost_with(&self, now: &Self) -> LostFlows {
        let of: BTreeSet<EgressId> = self.ids().into_iter().filter(|id| self.may_lose(*id, now)).collect();
        let keeps = match now {
            Self::ByDestination(policies) if !policies.ids().is_disjoint(&of) => Some(Arc::clone(policies)),
            Self::None | Self::One(_) | Self::ByDestination(_) => None,
        };
        LostFlows { of, keeps }
    }

    /// Whether destinations that have this policy here may have another one, or none, there: exact, but for prefixes that
    /// others cover whole.
    fn may_lose(&self, id: EgressId, there: &Self) -> bool {
        let Self::ByDestination(theirs) = there else { return *there != Self::One(id) };
        let differs = |other: &Option<EgressId>| *other != Some(id);
        match self {
            Self::None => false,
            Self::One(_) => theirs.entries().any(|(_, other)| differs(other)),
            Self::ByDestination(own) => own.entries().filter(|(_, one)| **one == Some(id)).any(|(net, _)| {
                // What is there for the prefix as a whole, and what for parts of it that have this policy here.
                let mut within = theirs.entries().filter(|(part, _)| net.contains(*part));
                theirs.longest(*net).is_none_or(|other| differs(&other))
                    || within.any(|(part, other)| differs(other) && own.longest(*part) == Some(Some(id)))
            }),
        }
    }
}

/// Identifies the pod that has an address, to tell it from another pod with the same address and selection: a hash of
/// the pod's UID, stable across restarts and versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PodOwner(pub u64);

impl PodOwner {
    /// FNV-1a. Zero means "not recorded yet" in the kernel.
    pub fn of(uid: &str) -> Self {
        let hash = uid.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        Self(hash.max(1))
    }
}

/// How many pods of one node each object serves.
pub type SelectedPods = BTreeMap<EgressId, u32>;

/// Egress IPs of one node by the policy that they serve: a node has at most one of a policy.
pub type AddressByPolicy = BTreeMap<EgressId, IpAddr>;

/// A port of a pod, or of a Service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PodPort {
    /// IANA's number: TCP, UDP or SCTP.
    pub protocol: u8,
    pub number: u16,
}

/// A hand-over of an address between this node and another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HandoverState {
    pub stage: HandoverStage,
    pub address: IpAddr,
    /// The other node.
    pub peer: TunnelEndpoint,
    /// As in [`KernelState::shared`].
    pub shared_with: Option<SharedWith>,
}

/// What else an egress IP is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SharedWith {
    /// A Service, whose provider announces it and leads the Service's traffic to the node.
    Service,
    /// The node itself, which has it on an interface: NAT uses the ports that the host leaves to it.
    Host,
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

/// The addresses of one object and family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Served addresses.
    pub slots: Vec<Slot>,
    /// Addresses that no node serves now: their flows wait and are not cut. Sorted.
    pub pending: Vec<IpAddr>,
    pub when_empty: WhenEmpty,
    /// Of the object in both families, where this node is a gateway of it.
    pub limit: BandwidthLimit,
    /// Where the addresses lie in several networks: those with a route to each prefix; none while they are not served
    /// yet. Of a destination the longest prefix counts. Empty if each address serves every destination.
    pub destinations: BTreeMap<IpNet, BTreeSet<IpAddr>>,
}

/// The kind of a prefix of the cluster; only pod subnets have a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefix {
    pub kind: PrefixKind,
    pub node: Option<TunnelEndpoint>,
}

/// The node that has an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeAddress {
    pub own: bool,
    pub node: TunnelEndpoint,
}

/// What the maps of this node should hold (desired) or do hold (actual): one shape for both, so that their difference
/// is the plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelState {
    pub pods: BTreeMap<IpAddr, PodState>,
    /// The pods that have these addresses.
    pub owners: BTreeMap<IpAddr, PodOwner>,
    /// Ports by which pods are reached from outside; no entry for a pod without such ports.
    pub exposed: BTreeMap<IpAddr, BTreeSet<PodPort>>,
    /// The classes of pods whose policy depends on the destination.
    pub classes: BTreeMap<PodClass, Arc<ClassPolicies>>,
    pub policy: BTreeMap<(EgressId, Family), Policy>,
    /// Addresses that this node owns as a gateway: never two of one object.
    pub owned: AddressByPolicy,
    /// Those of `owned` that Services or the node itself have too. The Services' providers announce them, or the host does: the
    /// programs answer for none of them, and leave packets that belong to no flow of a pod to the host's stack.
    pub shared: BTreeMap<EgressId, SharedWith>,
    /// Hand-overs of this node.
    pub handovers: BTreeMap<EgressId, HandoverState>,
    pub cluster: BTreeMap<IpNet, Prefix>,
    pub nodes: BTreeMap<IpAddr, NodeAddress>,
    /// `None` before the first write.
    pub on_unknown_pod: Option<OnUnknownPod>,
}

impl Policy {
    /// Each address serves every destination.
    pub fn new(slots: Vec<Slot>, pending: Vec<IpAddr>, when_empty: WhenEmpty) -> Self {
        Self { slots, pending, when_empty, limit: BandwidthLimit::NONE, destinations: BTreeMap::new() }
    }

    /// All addresses of the object, served or pending.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.slots.iter().map(|slot| slot.address).chain(self.pending.iter().copied())
    }
}

impl HandoverState {
    /// Whether this node translates packets by this entry: the other node's, or all.
    pub fn is_taken(&self) -> bool {
        self.stage != HandoverStage::Leaving
    }
}

impl KernelState {
    /// The policies of the pod with this address. A class that is missing applies to no destination.
    pub fn policies_of(&self, pod: IpAddr) -> PodPolicies {
        match self.pods.get(&pod) {
            None | Some(PodState::Known) => PodPolicies::None,
            Some(PodState::Selected(id)) => PodPolicies::One(*id),
            Some(PodState::ByDestination(class)) => {
                PodPolicies::ByDestination(self.classes.get(class).cloned().unwrap_or_default())
            }
        }
    }

    /// Whether a flow of this object may keep this address. Only the node of a pod knows which object selects it, for the
    /// destination (`None` is a pod of another node). That node may send before this node's own policy is written, or after
    /// it is removed, so owning the address is enough.
    pub fn permits(&self, pod: Option<(IpAddr, IpAddr)>, id: EgressId, address: IpAddr) -> bool {
        let policy = self.policy.get(&(id, family_of(address)));
        let is_listed = policy.is_some_and(|policy| policy.addresses().any(|one| one == address));
        match pod {
            Some((pod, to)) => is_listed && self.policies_of(pod).of(to) == Some(id),
            None => is_listed || self.owned.get(&id) == Some(&address),
        }
    }

    /// Removes classes that no pod has.
    pub fn drop_unused_classes(&mut self) {
        if self.classes.is_empty() {
            return;
        }
        let used = self.used_classes();
        self.classes.retain(|class, _| used.contains(class));
    }

    /// The classes that pods have.
    pub fn used_classes(&self) -> BTreeSet<PodClass> {
        let class = |pod: &PodState| match pod {
            PodState::ByDestination(class) => Some(*class),
            PodState::Known | PodState::Selected(_) => None,
        };
        self.pods.values().filter_map(class).collect()
    }

    /// Whether this node owns the address that the policy should have here, in the way that it should.
    pub fn has_claim(&self, id: EgressId, desired: &Self) -> bool {
        let of = |state: &Self| state.owned.get(&id).map(|address| (*address, state.shared.get(&id).copied()));
        of(self).is_some() && of(self) == of(desired)
    }

    /// Removes the claim of the policy.
    pub fn give_up(&mut self, id: EgressId) {
        self.owned.remove(&id);
        self.shared.remove(&id);
    }

    /// The state after the action, as plans are tested against it and as the agent keeps it between observations.
    /// Cutting flows changes no map of the model.
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
                self.shared.remove(id);
            }
            Action::Share(id, address, with) => {
                self.owned.insert(*id, *address);
                self.shared.insert(*id, *with);
            }
            Action::Disown(id, address) => {
                self.give_up(*id);
                if self.handovers.get(id).is_some_and(|handover| handover.is_taken() && handover.address == *address) {
                    self.handovers.remove(id);
                }
            }
            Action::PutHandover(id, handover) => {
                self.handovers.insert(*id, *handover);
                if handover.stage == HandoverStage::Leaving {
                    self.give_up(*id);
                }
            }
            Action::EndHandover(id, _) => {
                self.handovers.remove(id);
            }
            Action::PutClass(class, policies) => {
                self.classes.insert(*class, Arc::clone(policies));
            }
            Action::RemoveClass(class) => {
                self.classes.remove(class);
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

/// One step of a plan. After every prefix of a plan, no selected flow leaves with a wrong address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    SetUnknownPods(OnUnknownPod),
    PutNode(IpAddr, NodeAddress),
    RemoveNode(IpAddr),
    PutPrefix(IpNet, Prefix),
    RemovePrefix(IpNet),
    /// Claim the address (after a probe), answer for it, announce it and translate.
    Own(EgressId, IpAddr),
    /// Claim an address that a Service or the node has too ([`KernelState::shared`]): translate, and nothing else.
    Share(EgressId, IpAddr, SharedWith),
    /// Stop answering and translating for the address of this object, also by a hand-over.
    Disown(EgressId, IpAddr),
    /// Prepare to take the address over, or hand it over and forward later packets to the new node. One step, after
    /// which this node no longer translates to the address.
    PutHandover(EgressId, HandoverState),
    /// End the hand-over: stop forwarding, and drop replies for flows that were handed over.
    EndHandover(EgressId, IpAddr),
    PutPolicy(EgressId, Family, Policy),
    RemovePolicy(EgressId, Family),
    /// Write a class that no pod has yet.
    PutClass(PodClass, Arc<ClassPolicies>),
    /// Remove a class that no pod has any more.
    RemoveClass(PodClass),
    PutPod(IpAddr, PodState),
    RemovePod(IpAddr),
    /// Record which pod has the address.
    PutOwner(IpAddr, PodOwner),
    /// Outside packets to this port of the pod are requests.
    Expose(IpAddr, PodPort),
    /// Reverses [`Action::Expose`].
    Conceal(IpAddr, PodPort),
    /// Remove all state of the pod that had this address, so that the next pod inherits nothing.
    CutPod(IpAddr),
    /// Cut the flows and NAT entries of these addresses, which the object has lost.
    CutFlows(EgressId, BTreeSet<IpAddr>),
    /// Cut flows of a pod that its policies have lost.
    CutPodFlows(IpAddr, LostFlows),
    /// Cut every flow that the kernel's own state does not permit: an earlier agent may have been killed, or have
    /// failed, before it cut them.
    CutOrphans,
}

impl Action {
    /// Whether one walk of the maps serves this action together with others of its kind.
    pub fn is_cut(&self) -> bool {
        match self {
            Self::CutPod(_) | Self::CutFlows(..) | Self::CutPodFlows(..) => true,
            Self::SetUnknownPods(_)
            | Self::PutNode(..)
            | Self::RemoveNode(_)
            | Self::PutPrefix(..)
            | Self::RemovePrefix(_)
            | Self::Own(..)
            | Self::Share(..)
            | Self::Disown(..)
            | Self::PutHandover(..)
            | Self::EndHandover(..)
            | Self::PutPolicy(..)
            | Self::RemovePolicy(..)
            | Self::PutClass(..)
            | Self::RemoveClass(_)
            | Self::PutPod(..)
            | Self::RemovePod(_)
            | Self::PutOwner(..)
            | Self::Expose(..)
            | Self::Conceal(..)
            | Self::CutOrphans => false,
        }
    }
}
