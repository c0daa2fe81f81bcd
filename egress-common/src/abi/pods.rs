//! Maps `pods`, `classes`, `policy`, `owned` and `owned_addr`: selected pods, the gateways of their flows, and the
//! addresses of this node.

use super::seal::Seal;
use super::{Addr, BandwidthLimit, Family, abi};

/// What this node knows of one of its pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum PodSelection {
    /// Known, selected by no egress policy.
    Known = 1,
    Selected = 2,
    /// The policy depends on the destination: see [`ClassPolicy`].
    ByDestination = 3,
}

/// Value of `pods`; the key is the pod's [`Addr`]. Own pods only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct PodEntry {
    selection: u32,
    /// Meaningful where selected by one policy.
    pub egress_id: u32,
    /// CLOCK_MONOTONIC (ns) when the pod became selected, for display.
    pub selected_since_ns: u64,
    /// A hash of the pod's UID, which distinguishes it from a later pod with the same address; zero until it is known.
    pub owner: u64,
    /// CLOCK_MONOTONIC (ns) until when connections from before the deselection get a reset. Zero if the pod was never
    /// selected, and while it is; the maximum while its policy depends on the destination.
    pub cut_until_ns: u64,
    /// Over the key and the fields that the programs read.
    pub seal: u32,
    /// The pod's class where the policy depends on the destination, otherwise zero.
    class: u32,
}
abi!(PodEntry, 40);

impl PodEntry {
    const fn new(selection: PodSelection, egress_id: u32, selected_since_ns: u64) -> Self {
        let selection = selection as u32;
        Self { selection, egress_id, selected_since_ns, owner: 0, cut_until_ns: 0, seal: 0, class: 0 }
    }

    /// Before it is sealed, as [`Self::selected`] is.
    pub const fn known() -> Self {
        Self::new(PodSelection::Known, 0, 0)
    }

    #[inline(always)]
    pub const fn selected(egress_id: u32, selected_since_ns: u64) -> Self {
        Self::new(PodSelection::Selected, egress_id, selected_since_ns)
    }

    /// The policies of the class apply, each to its destinations. A flow that no policy covers now may be one that had an
    /// egress IP, at any time.
    pub const fn by_destination(class: u32, selected_since_ns: u64) -> Self {
        let entry = Self::new(PodSelection::ByDestination, 0, selected_since_ns);
        Self { class, cut_until_ns: u64::MAX, ..entry }
    }

    /// As it is written at `pod`.
    #[must_use]
    pub const fn sealed(self, pod: &Addr) -> Self {
        Self { seal: self.seal_at(pod), ..self }
    }

    /// Whether this is a complete value of `pod`. Called on a copy; see `abi::seal`.
    #[inline(always)]
    pub const fn is_of(&self, pod: &Addr) -> bool {
        self.seal == self.seal_at(pod)
    }

    /// Out of line, as the sum over a tuple is.
    #[inline(never)]
    const fn seal_at(&self, pod: &Addr) -> u32 {
        Seal::of_number(self.selection)
            .addr(1, pod)
            .word(5, self.egress_id)
            .word(6, self.cut_until_ns as u32)
            .word(7, (self.cut_until_ns >> 32) as u32)
            .word(8, self.class)
            .done()
    }

    #[must_use]
    pub const fn with_owner(self, owner: u64) -> Self {
        Self { owner, ..self }
    }

    #[must_use]
    pub const fn with_cut_until(self, cut_until_ns: u64) -> Self {
        Self { cut_until_ns, ..self }
    }

    #[cfg(test)]
    pub(crate) const fn of_another_version(self) -> Self {
        Self { selection: 99, ..self }
    }

    /// Whether a policy selects the pod, for some destinations at least. An unknown value counts as selected.
    #[inline(always)]
    pub const fn is_selected(&self) -> bool {
        self.selection != PodSelection::Known as u32
    }

    /// The class of a pod whose policy depends on the destination.
    #[inline(always)]
    pub const fn class(&self) -> Option<u32> {
        if self.selection == PodSelection::ByDestination as u32 { Some(self.class) } else { None }
    }

    /// The egress ID of a pod that one policy selects for all destinations. An unknown value counts as selected without a
    /// policy, which is a drop: fail closed. So does a pod of a class, for callers that did not ask for it.
    #[inline(always)]
    pub const fn egress_id(&self) -> Option<u32> {
        if self.is_selected() { Some(self.egress_id) } else { None }
    }
}

/// Value of `classes`: the policy of a class of pods for a destination. The key is a
/// [`PolicyDestination`](super::PolicyDestination), with the class as its set. Pods with the same policies have the same class.
/// The entries of a class never change, and cover every destination of the family; a missing one is a drop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct ClassPolicy {
    /// [`PodSelection::Known`] or [`PodSelection::Selected`].
    selection: u32,
    egress_id: u32,
}
abi!(ClassPolicy, 8);

impl ClassPolicy {
    /// No policy applies to the destination.
    pub const NONE: Self = Self { selection: PodSelection::Known as u32, egress_id: 0 };

    pub const fn new(egress_id: u32) -> Self {
        Self { selection: PodSelection::Selected as u32, egress_id }
    }

    /// `None` if no policy applies. An unknown value counts as a policy without an ID, which is a drop.
    #[inline(always)]
    pub const fn egress_id(&self) -> Option<u32> {
        if self.selection == PodSelection::Known as u32 { None } else { Some(self.egress_id) }
    }
}

/// Maximum number of addresses per egress policy and family. A node owns at most one of them.
pub const MAX_SLOTS: usize = 64;

/// Key of `policy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct PolicyEntryKey {
    pub egress_id: u32,
    family: u32,
}
abi!(PolicyEntryKey, 8);

impl PolicyEntryKey {
    #[inline(always)]
    pub const fn new(egress_id: u32, family: Family) -> Self {
        Self { egress_id, family: family as u32 }
    }

    pub const fn family(&self) -> Option<Family> {
        match self.family {
            4 => Some(Family::V4),
            6 => Some(Family::V6),
            _ => None,
        }
    }
}

/// The gateway of a slot's address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum SlotPlace {
    Here = 1,
    Remote = 2,
}

/// One assigned address of an egress policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct PolicySlot {
    /// The egress IP.
    pub address: Addr,
    /// Tunnel endpoint of the gateway; unspecified where the gateway is this node.
    pub endpoint: Addr,
    place: u32,
}
abi!(PolicySlot, 36);

impl PolicySlot {
    pub const EMPTY: Self = Self { address: Addr::UNSPECIFIED, endpoint: Addr::UNSPECIFIED, place: 0 };

    pub const fn here(address: Addr) -> Self {
        Self { address, endpoint: Addr::UNSPECIFIED, place: SlotPlace::Here as u32 }
    }

    pub const fn remote(address: Addr, endpoint: Addr) -> Self {
        Self { address, endpoint, place: SlotPlace::Remote as u32 }
    }

    #[inline(always)]
    pub(super) const fn place_number(&self) -> u32 {
        self.place
    }

    #[inline(always)]
    pub const fn place(&self) -> SlotPlace {
        if self.place == SlotPlace::Here as u32 { SlotPlace::Here } else { SlotPlace::Remote }
    }
}

/// What to do with a selected pod's packet without an assigned slot of its family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum WhenEmpty {
    /// Pending, in a hand-over, or never evaluated: drop.
    Drop = 1,
    /// The controller has published that no node can host any address: use the node's own address.
    NodeAddress = 2,
    /// The egress policy lists no address of this family: other traffic.
    NotListed = 3,
}

/// Value of `policy`. A missing value is a drop, so that a pod written before its policy leaks nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct PolicyEntry {
    when_empty: u32,
    /// Slots with a gateway; flows go there.
    count: u32,
    /// Slots after those: addresses that no node serves now. Their flows wait.
    pending: u32,
    /// The entries of `destinations` that name candidates; zero if every slot is one for every destination.
    destinations: u32,
    /// Of the policy in both families, on each of its gateways.
    pub limit: BandwidthLimit,
    pub slots: [PolicySlot; MAX_SLOTS],
}
abi!(PolicyEntry, 16 + 8 + 36 * MAX_SLOTS);

impl PolicyEntry {
    pub const fn empty(when_empty: WhenEmpty) -> Self {
        Self {
            when_empty: when_empty as u32,
            count: 0,
            pending: 0,
            destinations: 0,
            limit: BandwidthLimit::NONE,
            slots: [PolicySlot::EMPTY; MAX_SLOTS],
        }
    }

    /// `None` when there are more than [`MAX_SLOTS`].
    pub fn with_slots(when_empty: WhenEmpty, slots: &[PolicySlot]) -> Option<Self> {
        let mut policy = Self::empty(when_empty);
        policy.slots.get_mut(..slots.len())?.copy_from_slice(slots);
        policy.count = u32::try_from(slots.len()).ok()?;
        Some(policy)
    }

    /// Adds addresses that no node serves now. `None` when there are more than [`MAX_SLOTS`] in all.
    pub fn with_pending(mut self, addresses: &[Addr]) -> Option<Self> {
        let first = usize::try_from(self.count).ok()?;
        for (slot, address) in self.slots.get_mut(first..first + addresses.len())?.iter_mut().zip(addresses) {
            *slot = PolicySlot { address: *address, ..PolicySlot::EMPTY };
        }
        self.pending = u32::try_from(addresses.len()).ok()?;
        Some(self)
    }

    /// Restricts new flows to the candidates of this set of `destinations`.
    #[must_use]
    pub const fn with_destinations(self, set: u32) -> Self {
        Self { destinations: set, ..self }
    }

    /// Limits the bandwidth.
    #[must_use]
    pub const fn with_limit(self, limit: BandwidthLimit) -> Self {
        Self { limit, ..self }
    }

    /// The set of `destinations`; `None` if every slot is a candidate for every destination.
    #[inline(always)]
    pub const fn destinations(&self) -> Option<u32> {
        if self.destinations == 0 { None } else { Some(self.destinations) }
    }

    #[cfg(test)]
    pub(crate) const fn of_another_version(self) -> Self {
        Self { when_empty: 99, ..self }
    }

    #[inline(always)]
    pub const fn count(&self) -> u32 {
        self.count
    }

    #[inline(always)]
    pub const fn pending(&self) -> u32 {
        self.pending
    }

    #[inline(always)]
    pub const fn when_empty(&self) -> WhenEmpty {
        match self.when_empty {
            2 => WhenEmpty::NodeAddress,
            3 => WhenEmpty::NotListed,
            // Also a value of another version: fail closed.
            _ => WhenEmpty::Drop,
        }
    }
}

/// Bits of the flags of [`Owned`] and [`OwnedAddr`]: see [`Owned::shared`] and [`Owned::hosts`].
const SHARED: u8 = 1;
const HOSTS: u8 = 2;

/// Value of `owned`; the key is the egress ID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Owned {
    pub address: Addr,
    /// The interface that the address is announced on, and leaves by; zero while the node lacks it, see [`Self::hosts`].
    pub ifindex: u32,
    /// MTU of that interface.
    pub mtu: u32,
    pub mac: [u8; 6],
    pub(super) flags: u8,
    pub reserved: u8,
    /// Over the key and the whole value.
    pub seal: u32,
}
abi!(Owned, 36);

impl Owned {
    /// As it is written at `egress_id`, for an address that this node alone uses.
    #[inline(always)]
    pub const fn new(egress_id: u32, address: Addr, ifindex: u32, mac: [u8; 6], mtu: u32) -> Self {
        Self { address, ifindex, mtu, mac, flags: 0, reserved: 0, seal: 0 }.sealed(egress_id)
    }

    /// The same for an address that is also an address of a Service. The Service's provider leads its traffic to this
    /// node and announces it; this node answers no ARP or neighbour discovery for it, and leaves a packet without a NAT
    /// entry to the stack, which serves the Service's clients.
    #[must_use]
    pub const fn shared(self, egress_id: u32) -> Self {
        Self { flags: self.flags | SHARED, ..self }.sealed(egress_id)
    }

    /// The same for an address that this node has itself on an interface. It is shared with the host: the host's stack
    /// answers for it, and has the packets without a NAT entry. NAT uses the ports that it uses on the node's own address
    /// for packets with the mark, since the host's sockets use the others. When the node loses the address, nothing is
    /// translated to it any more.
    #[must_use]
    pub const fn hosts(self, egress_id: u32) -> Self {
        Self { flags: self.flags | SHARED | HOSTS, ..self }.sealed(egress_id)
    }

    /// Whether the node may translate to it.
    #[inline(always)]
    pub const fn is_usable(&self) -> bool {
        self.ifindex != 0
    }

    /// Whether it is [`Self::shared`] or [`Self::hosts`].
    #[inline(always)]
    pub const fn is_shared(&self) -> bool {
        self.flags & SHARED != 0
    }

    /// Whether it is [`Self::hosts`].
    #[inline(always)]
    pub const fn is_hosts(&self) -> bool {
        self.flags & HOSTS != 0
    }

    /// Whether the address does not work on this interface. A shared one works on all: the Service's provider and the
    /// host's routes choose.
    #[inline(always)]
    pub const fn is_elsewhere(&self, ifindex: u32) -> bool {
        self.ifindex != ifindex && !self.is_shared()
    }

    /// The value of `owned_addr` that belongs to it.
    pub const fn by_address(&self, egress_id: u32) -> OwnedAddr {
        let Self { ifindex, mac, flags, reserved, .. } = *self;
        OwnedAddr { egress_id, ifindex, mac, flags, reserved }
    }

    #[inline(always)]
    const fn sealed(self, egress_id: u32) -> Self {
        Self { seal: self.seal_at(egress_id), ..self }
    }

    /// Whether this is a complete value of `egress_id`. Called on a copy; see `abi::seal`.
    #[inline(always)]
    pub const fn is_of(&self, egress_id: u32) -> bool {
        self.seal == self.seal_at(egress_id)
    }

    #[inline(always)]
    const fn seal_at(&self, egress_id: u32) -> u32 {
        let m = &self.mac;
        Seal::of_number(egress_id)
            .addr(1, &self.address)
            .word(5, self.ifindex)
            .word(6, u32::from_ne_bytes([m[0], m[1], m[2], m[3]]))
            .word(7, u16::from_ne_bytes([m[4], m[5]]) as u32 | (self.flags as u32) << 16)
            .word(8, self.mtu)
            .done()
    }
}

/// Value of `owned_addr`; the key is the egress IP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct OwnedAddr {
    pub egress_id: u32,
    /// The interface on which the address is answered.
    pub ifindex: u32,
    pub mac: [u8; 6],
    flags: u8,
    pub reserved: u8,
}
abi!(OwnedAddr, 16);

impl OwnedAddr {
    /// As [`Owned::is_elsewhere`].
    #[inline(always)]
    pub const fn is_elsewhere(&self, ifindex: u32) -> bool {
        self.ifindex != ifindex && !self.is_shared()
    }

    /// Whether it is [`Owned::shared`] or [`Owned::hosts`].
    #[inline(always)]
    pub const fn is_shared(&self) -> bool {
        self.flags & SHARED != 0
    }

    /// Whether it is [`Owned::hosts`].
    #[inline(always)]
    pub const fn is_hosts(&self) -> bool {
        self.flags & HOSTS != 0
    }
}
