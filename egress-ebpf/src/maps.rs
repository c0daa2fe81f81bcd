//! The maps, and how decisions see them: [`Maps`] implements `decide::Tables`. Every unsafe block here relies on this:
//!
//! - A pointer from a lookup is valid until the program ends (RCU), but its memory may be reused for another key at
//!   once.
//! - Every field is an integer, for which all bytes are a value. A racing write shows old or new words.
//! - Elements of `pods`, `nat`, `flows`, `owned` and `handovers` are copied into the workspace, and used only with a
//!   valid seal (`abi::seal`), until the next lookup in the same map. Other elements are read in place, one value for
//!   each decision.
//! - A write (time, state, next hop, settled decision) may hit reused memory: times and states then extend a flow by
//!   one timeout at most; decisions and next hops have their own seals.
#![expect(unsafe_code, reason = "map and packet access; see `maps` and `packet`")]

use core::arch::asm;
use core::intrinsics::AtomicOrdering::{Relaxed, SeqCst};
use core::{intrinsics, ptr};

use aya_ebpf::bindings::{BPF_F_NO_PREALLOC, BPF_NOEXIST};
use aya_ebpf::btf_maps::lpm_trie::Key;
use aya_ebpf::btf_maps::{Array, HashMap, LpmTrie, LruHashMap, RingBuf};
use aya_ebpf::helpers::generated::{bpf_get_prandom_u32, bpf_ktime_get_coarse_ns};
use aya_ebpf::macros::btf_map;
use egress_common::abi::{
    Addr, BlockHolder, BlockOwner, Candidates, ClassPolicy, ClusterPrefix, Config, Datagram, Direction, DropEvent,
    EPOCHS, ExposedPort, Exposure, Flow, FragKey, FragPorts, HandoverEntry, HeldBlocks, Holder, Inbound,
    InterfaceAddresses, NatEntry, NeighbourEntry, NeighbourKey, NextHop, NodeEntry, Owned, OwnedAddr, PodEntry,
    PolicyDestination, PolicyEntry, PolicyEntryKey, PolicySlot, PortBlock, RouteDestination, RouteEntry, Share, Tuple,
    Usage,
};
use egress_common::decide::expiry::{self, GONE};
use egress_common::decide::snat::blocks::BlockRequest;
use egress_common::decide::snat::{EXHAUSTED_NS, PortSearch};
use egress_common::decide::{ClaimOutcome, NatOwner, PortClaim, QuotaKind, Tables, phase};
use egress_common::wire::{PROTO_TCP, Segment, tcp};

use crate::verifier::opaque;
use crate::workspace::{self, WORKSPACE, found};
use crate::{counters, fragment, lease, nat};

/// Many short-lived elements, and few on most nodes: allocate on demand.
const ON_DEMAND: usize = BPF_F_NO_PREALLOC as usize;

#[btf_map(name = "config")]
pub static CONFIG: Array<Config, 1> = Array::new();

#[btf_map(name = "pods")]
pub static PODS: HashMap<Addr, PodEntry, 4096, ON_DEMAND> = HashMap::new();

#[btf_map(name = "policy")]
pub static POLICY: HashMap<PolicyEntryKey, PolicyEntry, 32768, ON_DEMAND> = HashMap::new();

#[btf_map(name = "classes")]
static CLASSES: LpmTrie<PolicyDestination, ClassPolicy, 131072> = LpmTrie::new();

#[btf_map(name = "destinations")]
static DESTINATIONS: LpmTrie<PolicyDestination, Candidates, 65536> = LpmTrie::new();

#[btf_map(name = "owned")]
pub static OWNED: HashMap<u32, Owned, 16384, ON_DEMAND> = HashMap::new();

#[btf_map(name = "owned_addr")]
pub static OWNED_ADDR: HashMap<Addr, OwnedAddr, 16384, ON_DEMAND> = HashMap::new();

/// As many as the agent attaches programs to (`MOST_INTERFACES`), twice for those that are replaced.
#[btf_map(name = "interfaces")]
pub static INTERFACES: HashMap<u32, InterfaceAddresses, 64, ON_DEMAND> = HashMap::new();

#[btf_map(name = "handovers")]
pub static HANDOVERS: HashMap<u32, HandoverEntry, 16384, ON_DEMAND> = HashMap::new();

#[btf_map(name = "cluster")]
pub static CLUSTER: LpmTrie<Addr, ClusterPrefix, 65536> = LpmTrie::new();

/// Of further egress interfaces: 1,024 of each at most (`MOST_ROUTES` of the agent).
#[btf_map(name = "routes")]
static ROUTES: LpmTrie<RouteDestination, RouteEntry, 32768> = LpmTrie::new();

#[btf_map(name = "neighbours")]
static NEIGHBOURS: HashMap<NeighbourKey, NeighbourEntry, 4096, ON_DEMAND> = HashMap::new();

/// The route of a further egress interface with the longest prefix.
#[inline(always)]
pub fn route(target: RouteDestination) -> Option<&'static RouteEntry> {
    ROUTES.get(&Key::new(160, target))
}

/// The link address of a neighbour, if it is known.
#[inline(always)]
pub fn neighbour(key: &NeighbourKey) -> Option<[u8; 6]> {
    let found = NEIGHBOURS.get_ptr_mut(key)?;
    // SAFETY: the element is valid, see above; a copy of a torn one has no valid seal.
    let entry = unsafe { ptr::read(found) };
    entry.is_of(key).then_some(entry.mac)
}

#[btf_map(name = "nodes")]
pub static NODES: HashMap<Addr, NodeEntry, 65536, ON_DEMAND> = HashMap::new();

#[btf_map(name = "flows")]
pub static FLOWS: HashMap<Tuple, Flow, 262144, ON_DEMAND> = HashMap::new();

#[btf_map(name = "inbound")]
pub static INBOUND: HashMap<Tuple, Inbound, 65536, ON_DEMAND> = HashMap::new();

/// Ports by which pods of this node are reached from outside.
#[btf_map(name = "exposed")]
pub static EXPOSED: HashMap<ExposedPort, Exposure, 65536, ON_DEMAND> = HashMap::new();

/// Datagrams that pods sent first; LRU.
#[btf_map(name = "datagrams")]
pub static DATAGRAMS: LruHashMap<Tuple, Datagram, 65536> = LruHashMap::new();

/// Number of entries in `flows` and `nat` of each pod and egress policy. A holder without an entry here has no quota,
/// only the limits of the maps.
#[btf_map(name = "shares")]
pub static SHARES: HashMap<Holder, Share, 65536, ON_DEMAND> = HashMap::new();

/// Entries in use.
#[btf_map(name = "usage")]
static USAGE: Array<Usage, 1> = Array::new();

/// Numbers that invalidate the flow cache, one for each bucket of flows.
#[btf_map(name = "epochs")]
static FLOW_EPOCHS: Array<u32, { EPOCHS as usize }> = Array::new();

/// Two keys for each NAT entry: 262,144 entries.
#[btf_map(name = "nat")]
pub static NAT: HashMap<Tuple, NatEntry, 524288, ON_DEMAND> = HashMap::new();

/// Destinations without a free port, and when a search found that; see `decide::snat`.
#[btf_map(name = "exhausted")]
static EXHAUSTED: LruHashMap<Tuple, Datagram, 1024> = LruHashMap::new();

/// Ports of egress IPs that one pod has for itself; see `decide::snat::blocks`.
#[btf_map(name = "blocks")]
pub static BLOCKS: HashMap<PortBlock, BlockOwner, 65536, ON_DEMAND> = HashMap::new();

/// The blocks of each pod on each egress IP.
#[btf_map(name = "pod_blocks")]
pub static POD_BLOCKS: HashMap<BlockHolder, HeldBlocks, 65536, ON_DEMAND> = HashMap::new();

#[btf_map(name = "frags")]
pub static FRAGS: LruHashMap<FragKey, FragPorts, 16384> = LruHashMap::new();

#[btf_map(name = "events")]
pub static EVENTS: RingBuf<DropEvent, 262144> = RingBuf::new();

/// Error of a full map (besides ENOMEM, which is treated the same).
const EEXIST: i32 = -17;

/// The maps of this object.
#[derive(Clone, Copy)]
pub struct Maps;

/// Lends the value.
#[inline(always)]
fn lent<'a, V>(found: Option<*mut V>) -> Option<&'a V> {
    // The compiler would otherwise fold two null checks into one `or` of pointers, which the verifier refuses.
    let there = opaque(u64::from(found.is_some()));
    // SAFETY: a pointer from a lookup in this program; see the module header.
    found.filter(|_| there != 0).map(|value| unsafe { &*value })
}

#[inline(always)]
pub fn claimed(result: Result<(), i32>) -> ClaimOutcome {
    match result {
        Ok(()) => ClaimOutcome::Claimed,
        Err(EEXIST) => ClaimOutcome::Taken,
        Err(_) => ClaimOutcome::Full,
    }
}

impl Maps {
    /// Writes the next hop into a NAT entry, if it still exists.
    #[inline(always)]
    pub fn set_hop(&self, key: &Tuple, hop: &NextHop) {
        if let Some(nat_entry) = NAT.get_ptr_mut(key) {
            // SAFETY: see the module header.
            unsafe { (*nat_entry).hop = *hop };
        }
    }
}

/// CLOCK_MONOTONIC (ns), a few milliseconds late.
#[inline(always)]
pub fn clock_ns() -> u64 {
    // SAFETY: the helper takes nothing and is always there.
    unsafe { bpf_ktime_get_coarse_ns() }
}

/// The same, read once per run: a helper call costs as much as a lookup in a small map. It needs more stack than the
/// helper, so only the steps of every packet use it.
#[inline(always)]
pub fn run_ns() -> u64 {
    let Some(workspace) = WORKSPACE.get_ptr_mut(0) else { return clock_ns() };
    // SAFETY: the element is this CPU's own, and no reference to this field is alive.
    let now = unsafe { &mut (*workspace).now_ns };
    if *now == 0 {
        *now = clock_ns();
    }
    *now
}

impl Tables for Maps {
    #[inline(always)]
    fn now_ns(&self) -> u64 {
        clock_ns()
    }

    #[inline(always)]
    fn random(&self) -> u32 {
        // SAFETY: the helper takes nothing and is always there.
        unsafe { bpf_get_prandom_u32() }
    }

    #[inline(always)]
    fn pod(&self, addr: &Addr) -> Option<&PodEntry> {
        pod(addr)
    }

    #[inline(always)]
    fn node(&self, addr: &Addr) -> Option<&NodeEntry> {
        lent(NODES.get_ptr_mut(addr))
    }

    #[inline(always)]
    fn prefix(&self, addr: &Addr) -> Option<&ClusterPrefix> {
        lent(CLUSTER.get(&Key::new(128, *addr)).map(|prefix| ptr::from_ref(prefix).cast_mut()))
    }

    #[inline(always)]
    fn class_policy(&self, class: u32, to: &Addr) -> Option<&ClassPolicy> {
        class_policy(class, to)
    }

    #[inline(always)]
    fn policy(&self, key: &PolicyEntryKey) -> Option<&PolicyEntry> {
        lent(POLICY.get_ptr_mut(key))
    }

    #[inline(always)]
    fn candidates(&self, set: u32, to: &Addr) -> Option<&Candidates> {
        DESTINATIONS.get(&Key::new(160, PolicyDestination { set, to: *to }))
    }

    #[inline(always)]
    fn owned(&self, egress_id: u32) -> Option<&Owned> {
        owned(egress_id)
    }

    #[inline(always)]
    fn owned_addr(&self, addr: &Addr) -> Option<&OwnedAddr> {
        lent(OWNED_ADDR.get_ptr_mut(addr))
    }

    #[inline(always)]
    fn interface(&self, ifindex: u32) -> Option<&InterfaceAddresses> {
        lent(INTERFACES.get_ptr_mut(&ifindex))
    }

    #[inline(always)]
    fn has_lease(&self) -> bool {
        lease::left_ns() > 0
    }

    #[inline(always)]
    fn handover(&self, egress_id: u32) -> Option<&HandoverEntry> {
        handover(egress_id)
    }

    #[inline(always)]
    fn inbound_answered(&self, tuple: &Tuple, segment: Segment) -> bool {
        let Some(inbound) = inbound(tuple) else { return false };
        if tuple.protocol != PROTO_TCP {
            return true;
        }
        // SAFETY: see the module header.
        let inbound = unsafe { &mut *inbound };
        if change(&mut inbound.state, |state| phase::replied(state, segment.flags)) && segment.flags & tcp::RST != 0 {
            raise_epoch(tuple);
        }
        change(&mut inbound.acknowledged, |known| phase::number(known, segment, Direction::Egress));
        touch(&raw mut inbound.last_seen_ns, self.now_ns()) != Refresh::Gone
    }

    #[inline(always)]
    fn inbound_seen(&self, tuple: &Tuple, segment: Segment) -> bool {
        let Some(inbound) = inbound(tuple) else { return false };
        // SAFETY: see the module header.
        let inbound = unsafe { &mut *inbound };
        let fits = phase::fits(inbound.acknowledged, inbound.end);
        let has_changed = change(&mut inbound.state, |state| phase::seen_from_outside(state, segment.flags, fits));
        if has_changed && segment.flags & (tcp::SYN | tcp::RST) != 0 {
            raise_epoch(tuple);
        }
        change(&mut inbound.end, |known| phase::number(known, segment, Direction::Ingress));
        touch(&raw mut inbound.last_seen_ns, self.now_ns()) != Refresh::Gone
    }

    #[inline(always)]
    fn inbound_known(&self, tuple: &Tuple) -> bool {
        inbound(tuple).is_some()
    }

    #[inline(always)]
    fn inbound_in_use(&self) -> u32 {
        USAGE.get(0).map_or(0, |usage| usage.inbound.max(0) as u32)
    }

    #[inline(always)]
    fn claim_inbound(&self, tuple: &Tuple) -> ClaimOutcome {
        let claim = claimed(INBOUND.insert(tuple, Inbound::new(self.now_ns()), BPF_NOEXIST.into()));
        if claim != ClaimOutcome::Claimed {
            return claim;
        }
        count_inbound(tuple, 1);
        // Cached packets from outside were strays before, and would not refresh it.
        raise_epoch(tuple);
        claim
    }

    #[inline(always)]
    fn exposure(&self, port: &ExposedPort) -> Option<u32> {
        lent(EXPOSED.get_ptr_mut(port)).map(|exposure| exposure.inbound.max(0) as u32)
    }

    #[inline(always)]
    fn is_service_port(&self, address: &Addr, protocol: u8, port: u16) -> bool {
        nat::is_service_port(address, protocol, port)
    }

    #[inline(always)]
    fn forget_inbound(&self, tuple: &Tuple) {
        // Usually there is none.
        forget_inbound(tuple);
    }

    #[inline(always)]
    fn datagram_seen(&self, tuple: &Tuple) -> bool {
        lent(DATAGRAMS.get_ptr_mut(tuple)).is_some()
    }

    #[inline(always)]
    fn note_datagram(&self, tuple: &Tuple) {
        let now = self.now_ns();
        match DATAGRAMS.get_ptr_mut(tuple) {
            // SAFETY: see the module header.
            Some(seen) => drop(touch(unsafe { &raw mut (*seen).last_seen_ns }, now)),
            // The LRU map evicts; on failure the datagram is not tracked.
            None => drop(DATAGRAMS.insert(tuple, Datagram { last_seen_ns: now }, 0)),
        }
    }

    #[inline(always)]
    fn flow_seen(&self, tuple: &Tuple, segment: Segment) -> Option<&Flow> {
        flow(tuple, segment)
    }

    #[inline(always)]
    fn flow_peek(&self, tuple: &Tuple) -> Option<&Flow> {
        flow_only(tuple)
    }

    #[inline(always)]
    fn keep_flow(&self, tuple: &Tuple) {
        if let Some(flow) = FLOWS.get_ptr_mut(tuple) {
            // SAFETY: see the module header.
            let _noted = touch(unsafe { &raw mut (*flow).last_seen_ns }, run_ns());
        }
    }

    #[inline(always)]
    fn flow_answered(&self, tuple: &Tuple, segment: Segment) {
        answered(tuple, segment);
    }

    #[inline(always)]
    fn claim_flow(&self, tuple: &Tuple, flow: &Flow) -> ClaimOutcome {
        let claim = claimed(FLOWS.insert(tuple, flow, BPF_NOEXIST.into()));
        if claim == ClaimOutcome::Claimed {
            nat::count(&tuple.saddr, flow.egress_id, QuotaKind::Flows);
            count_in_use(|usage| &mut usage.flows, 1);
        }
        claim
    }

    #[inline(always)]
    fn has_random_ports(&self) -> bool {
        config().is_some_and(|config| config.random_ports != 0)
    }

    #[inline(always)]
    fn has_quota(&self, pod: &Addr, egress_id: u32, held: QuotaKind) -> bool {
        nat::has_quota(pod, egress_id, held)
    }

    #[inline(always)]
    fn decisions(&self) -> u32 {
        let decisions = decisions();
        // No map is read before this number.
        fence();
        decisions
    }

    #[inline(always)]
    fn settle_flow(&self, tuple: &Tuple, egress_id: u32, slot: &PolicySlot, decisions: u32) {
        let Some(flow) = FLOWS.get_ptr_mut(tuple) else { return };
        // One CPU may have decided before a change and another one after it: a mix of their writes has no valid seal,
        // in any order.
        let of = Flow::seal_of(tuple, &slot.address, egress_id);
        // SAFETY: see the module header.
        unsafe { (*flow).settle(of, slot, decisions) };
    }

    #[inline(always)]
    fn set_flow_slot(&self, tuple: &Tuple, slot: u32) {
        if let Some(flow) = FLOWS.get_ptr_mut(tuple) {
            // SAFETY: see the module header.
            unsafe { (*flow).slot = slot };
        }
    }

    #[inline(always)]
    fn forget_flow(&self, tuple: &Tuple) {
        if let Some(check) = workspace::checked() {
            forget_flow(tuple, &mut check.holder);
        }
    }

    #[inline(always)]
    fn put_flow(&self, tuple: &Tuple, flow: &Flow) -> bool {
        // Removed and claimed, so that both policies' counts are right. Another CPU's choice in between stands.
        self.forget_flow(tuple);
        self.claim_flow(tuple, flow) != ClaimOutcome::Full
    }

    #[inline(always)]
    fn nat_seen(&self, key: &Tuple, segment: Segment) -> Option<&NatEntry> {
        nat_entry(key, segment)
    }

    #[inline(always)]
    fn nat_peek(&self, key: &Tuple) -> Option<&NatEntry> {
        nat_entry_only(key)
    }

    #[inline(always)]
    fn claim_nat(&self, key: &Tuple, other: &Tuple, owner: &NatOwner) -> ClaimOutcome {
        nat::claim_nat(self.now_ns(), key, other, owner)
    }

    #[inline(always)]
    fn count_nat_entry(&self, pod: &Addr, egress_id: u32) {
        nat::count(pod, egress_id, QuotaKind::NatEntries);
        count_in_use(|usage| &mut usage.nat, 2);
        // NAT entries of mark 1008 belong to no policy.
        if egress_id != 0 {
            counters::egress_ip(egress_id, |count| count.nat_entries += 1);
        }
    }

    #[inline(always)]
    fn claim_any_port(&self, forward: &Tuple, address: &Addr, owner: &NatOwner, search: &PortSearch) -> PortClaim {
        nat::claim_any(self.now_ns(), forward, address, owner, search)
    }

    #[inline(always)]
    fn port_block(&self) -> u16 {
        config().map_or(0, |config| config.port_block)
    }

    #[inline(always)]
    fn held_blocks(&self, holder: &BlockHolder) -> HeldBlocks {
        // SAFETY: see the module header; one number, which is read whole.
        POD_BLOCKS.get_ptr(holder).map_or(HeldBlocks::default(), |held| unsafe { *held })
    }

    #[inline(always)]
    fn hold_block(&self, holder: &BlockHolder, old: HeldBlocks, new: HeldBlocks) -> bool {
        if old == HeldBlocks::default() {
            match claimed(POD_BLOCKS.insert(holder, new, BPF_NOEXIST.into())) {
                ClaimOutcome::Claimed => return true,
                ClaimOutcome::Full => return false,
                ClaimOutcome::Taken => {}
            }
        }
        // In memory that another pod's list has by now, this may write a block that is not that pod's, which counts as none.
        POD_BLOCKS.get_ptr_mut(holder).is_some_and(|held| swap(held.cast::<u64>(), old.0, new.0) == old.0)
    }

    #[inline(always)]
    fn is_block_of(&self, holder: &BlockHolder, first: u16, size: u16) -> bool {
        nat::is_block_of(holder, first, size)
    }

    #[inline(always)]
    fn claim_any_block(&self, request: &BlockRequest<'_>, walk: &PortSearch) -> PortClaim {
        nat::claim_any_block(request, walk)
    }

    #[inline(always)]
    fn close_block(&self, block: &PortBlock) {
        nat::close_block(block);
    }

    #[inline(always)]
    fn expire_nat(&self, key: &Tuple) -> bool {
        let (Some(config), Some(check)) = (config(), workspace::checked()) else { return false };
        crate::expiry::expire_nat(key, &config.timeouts, check) > 0
    }

    #[inline(always)]
    fn is_exhausted(&self, destination: &Tuple) -> bool {
        let noted = lent(EXHAUSTED.get_ptr_mut(destination));
        noted.is_some_and(|noted| self.now_ns().wrapping_sub(noted.last_seen_ns) <= EXHAUSTED_NS)
    }

    #[inline(always)]
    fn note_exhausted(&self, destination: &Tuple) {
        // The LRU map evicts; on failure there is another search.
        let _failed = EXHAUSTED.insert(destination, Datagram { last_seen_ns: self.now_ns() }, 0);
    }

    #[inline(always)]
    fn forget_nat(&self, key: &Tuple) -> bool {
        workspace::checked().is_some_and(|check| forget_nat(key, &mut check.holder))
    }

    #[inline(always)]
    fn fragment(&self, key: &FragKey) -> Option<&FragPorts> {
        lent(FRAGS.get_ptr_mut(key))
    }

    #[inline(always)]
    fn put_fragment(&self, key: &FragKey, ports: &FragPorts) {
        // The LRU map evicts; on failure the later fragments are dropped with their reason.
        let _failed = FRAGS.insert(key, ports, 0);
    }

    #[inline(always)]
    fn is_awaited(&self, key: &FragKey) -> bool {
        fragment::is_awaited(key)
    }
}

/// Granularity of refreshing the datagrams of a flow, half a minute, because that LRU map is expensive. A power of two.
const DATAGRAM_STEP_NS: u64 = 1 << 35;

/// Copies an element, so that the checked value is the used one.
#[inline(always)]
pub fn copied<V: Copy>(element: *const V, copy: &mut V) -> &V {
    // SAFETY: a pointer from a lookup into a map, which the workspace is not part of; any bytes are a value of these types.
    unsafe { ptr::copy_nonoverlapping(element, copy, 1) };
    changed();
    copy
}

/// Compiler barrier: otherwise the compiler could read the element again instead of its copy.
#[inline(always)]
fn changed() {
    // SAFETY: nothing is done.
    unsafe { asm!("", options(nostack, preserves_flags)) };
}

/// A pod whose entry is being rewritten is looked up twice. Packets of unknown pods may pass, so a second torn read counts
/// as a selected pod without a policy, whose packets are dropped.
#[inline(never)]
pub fn pod(addr: &Addr) -> Option<&'static PodEntry> {
    let space = &mut found()?.pod;
    for _ in 0..2 {
        let pod = PODS.get_ptr_mut(addr)?;
        if copied(pod, space).is_of(addr) {
            return Some(space);
        }
    }
    *space = PodEntry::selected(0, 0);
    Some(space)
}

/// Out of line, for its key.
#[inline(never)]
fn class_policy(class: u32, to: &Addr) -> Option<&'static ClassPolicy> {
    CLASSES.get(&Key::new(160, PolicyDestination { set: class, to: *to }))
}

#[inline(never)]
pub fn owned(egress_id: u32) -> Option<&'static Owned> {
    let owned = OWNED.get_ptr_mut(egress_id)?;
    let copy = copied(owned, &mut found()?.owned);
    (copy.is_of(egress_id) && copy.is_usable()).then_some(copy)
}

/// Copies the owned address to the workspace field of `owned`, which the translation reads.
#[inline(never)]
pub fn handover(egress_id: u32) -> Option<&'static HandoverEntry> {
    let handover = HANDOVERS.get_ptr_mut(egress_id)?;
    let found = found()?;
    let copy = copied(handover, &mut found.handover);
    if !copy.is_of(egress_id) {
        return None;
    }
    found.owned = copy.owned;
    Some(copy)
}

/// A flow, without a refresh.
#[inline(never)]
pub fn flow_only(tuple: &Tuple) -> Option<&'static Flow> {
    let flow = FLOWS.get_ptr_mut(tuple)?;
    let copy = copied(flow, &mut found()?.flow);
    let is_there = copy.is_of(tuple) && copy.last_seen_ns != GONE && !is_flow_idle(tuple, copy, run_ns());
    is_there.then_some(copy)
}

#[inline(always)]
fn is_flow_idle(tuple: &Tuple, flow: &Flow, now: u64) -> bool {
    now.saturating_sub(flow.last_seen_ns) > SEEN_STEP_NS
        && config()
            .is_some_and(|config| expiry::is_flow_idle(&config.timeouts, flow, flow.last_seen_ns, tuple.protocol, now))
}

/// Removes a flow; false if another CPU does.
#[inline(never)]
pub fn forget_flow(tuple: &Tuple, holder: &mut Holder) -> bool {
    let Some(flow) = FLOWS.get_ptr_mut(tuple) else { return false };
    // SAFETY: see the module header.
    crate::expiry::mark(unsafe { &raw mut (*flow).last_seen_ns }) && remove_marked_flow(tuple, holder)
}

/// Removes the marked flow at this key.
#[inline(always)]
pub fn remove_marked_flow(tuple: &Tuple, holder: &mut Holder) -> bool {
    let egress_id = lent(FLOWS.get_ptr_mut(tuple)).map_or(0, |flow| flow.egress_id);
    let is_gone = FLOWS.remove(tuple).is_ok();
    if is_gone {
        nat::uncount(&tuple.saddr, egress_id, QuotaKind::Flows, holder);
        count_in_use(|usage| &mut usage.flows, -1);
    }
    raise_epoch(tuple);
    is_gone
}

/// Removes a key of a NAT entry; false if another CPU does.
#[inline(never)]
pub fn forget_nat(key: &Tuple, holder: &mut Holder) -> bool {
    let Some(nat_entry) = NAT.get_ptr_mut(key) else { return false };
    // SAFETY: see the module header.
    crate::expiry::mark(unsafe { &raw mut (*nat_entry).last_seen_ns }) && remove_marked_nat(key, holder)
}

/// Removes the marked value at this key of a NAT entry. The entry is counted by its forward key.
#[inline(never)]
pub fn remove_marked_nat(key: &Tuple, holder: &mut Holder) -> bool {
    let Some(nat_entry) = lent(NAT.get_ptr_mut(key)) else { return false };
    let (egress_id, other) = (nat_entry.egress_id, nat_entry.other.bucket());
    let is_gone = NAT.remove(key).is_ok();
    if is_gone && key.direction() == Direction::Egress {
        nat::uncount(&key.saddr, egress_id, QuotaKind::NatEntries, holder);
        count_in_use(|usage| &mut usage.nat, -2);
    }
    // Cached packets of both directions: without this key its tuple may become another flow's.
    raise_epoch(key);
    raise_epoch_of(other);
    is_gone
}

/// An inbound connection. An idle one is removed, and absent, as is one under removal.
#[inline(never)]
fn inbound(tuple: &Tuple) -> Option<*mut Inbound> {
    let inbound = INBOUND.get_ptr_mut(tuple)?;
    let now = run_ns();
    // SAFETY: see the module header.
    let seen = last_seen(unsafe { &raw mut (*inbound).last_seen_ns });
    if seen == GONE {
        return None;
    }
    if now.saturating_sub(seen) <= SEEN_STEP_NS {
        return Some(inbound);
    }
    let config = config()?;
    if crate::expiry::expire_inbound(tuple, &config.timeouts, false, false) > 0 {
        return None;
    }
    // Once more: another CPU may have refreshed it, or may be removing it.
    let inbound = INBOUND.get_ptr_mut(tuple)?;
    // SAFETY: see the module header.
    (last_seen(unsafe { &raw mut (*inbound).last_seen_ns }) != GONE).then_some(inbound)
}

/// Removes an inbound connection; false if there is none, or another CPU removes it.
#[inline(never)]
pub fn forget_inbound(tuple: &Tuple) -> bool {
    let Some(inbound) = INBOUND.get_ptr_mut(tuple) else { return false };
    // SAFETY: see the module header.
    crate::expiry::mark(unsafe { &raw mut (*inbound).last_seen_ns }) && remove_marked_inbound(tuple)
}

/// Removes the marked inbound connection at this key.
#[inline(always)]
pub fn remove_marked_inbound(tuple: &Tuple) -> bool {
    let is_gone = INBOUND.remove(tuple).is_ok();
    if is_gone {
        count_inbound(tuple, -1);
        raise_epoch(tuple);
    }
    is_gone
}

/// Counts entries of `inbound`, in all and at their port.
#[inline(always)]
fn count_inbound(tuple: &Tuple, number: i32) {
    count_in_use(|usage| &mut usage.inbound, number);
    if let Some(exposure) = EXPOSED.get_ptr_mut(&ExposedPort::of(tuple)) {
        // SAFETY: see the module header.
        add(unsafe { &raw mut (*exposure).inbound }, number);
    }
}

#[inline(always)]
fn count_in_use(counter: impl Fn(&mut Usage) -> &mut i32, number: i32) {
    if let Some(usage) = USAGE.get_ptr_mut(0) {
        // SAFETY: see the module header.
        add(counter(unsafe { &mut *usage }), number);
    }
}

/// A flow, refreshed by a packet of the pod.
#[inline(never)]
pub fn flow(tuple: &Tuple, segment: Segment) -> Option<&'static Flow> {
    let flow = FLOWS.get_ptr_mut(tuple)?;
    let copy = copied(flow, &mut found()?.flow);
    if !copy.is_of(tuple) {
        return None;
    }
    // SAFETY: see `maps`.
    let flow = unsafe { &mut *flow };
    let now = run_ns();
    if is_flow_idle(tuple, copy, now)
        && let Some(config) = config()
        && let Some(check) = workspace::checked()
        && crate::expiry::expire_flow(tuple, &config.timeouts, false, check) > 0
    {
        return None;
    }
    match touch(&raw mut flow.last_seen_ns, now) {
        Refresh::Gone => return None,
        // Refreshes the datagrams of a flow, so that they outlive the flow.
        Refresh::Noted if tuple.protocol != PROTO_TCP && (copy.last_seen_ns ^ now) / DATAGRAM_STEP_NS != 0 => {
            Maps.note_datagram(tuple);
        }
        Refresh::Noted | Refresh::Fresh => {}
    }
    if change(&mut flow.state, |state| phase::own(state, segment.flags, Direction::Egress)) {
        began_or_reset(tuple, segment.flags);
    }
    change(&mut flow.acknowledged, |known| phase::number(known, segment, Direction::Egress));
    Some(copy)
}

/// A flow, refreshed by an answer. A flow under removal expires, and its NAT entry soon after.
#[inline(never)]
pub fn answered(tuple: &Tuple, segment: Segment) {
    let Some(flow) = FLOWS.get_ptr_mut(tuple) else { return };
    // SAFETY: see `maps`.
    let flow = unsafe { &mut *flow };
    if is_flow_idle(tuple, flow, run_ns()) {
        return;
    }
    let _noted = touch(&raw mut flow.last_seen_ns, run_ns());
    if change(&mut flow.state, |state| phase::answered(state, segment.flags, tuple.protocol)) {
        raise_epoch(tuple);
    }
    change(&mut flow.end, |known| phase::number(known, segment, Direction::Ingress));
}

/// A NAT entry, without a refresh.
#[inline(never)]
pub fn nat_entry_only(key: &Tuple) -> Option<&'static NatEntry> {
    let nat_entry = NAT.get_ptr_mut(key)?;
    let copy = copied(nat_entry, &mut found()?.nat_entry);
    (copy.is_of(key) && copy.last_seen_ns != GONE).then_some(copy)
}

/// A NAT entry, refreshed by a packet of its direction.
#[inline(never)]
pub fn nat_entry(key: &Tuple, segment: Segment) -> Option<&'static NatEntry> {
    let nat_entry = NAT.get_ptr_mut(key)?;
    let copy = copied(nat_entry, &mut found()?.nat_entry);
    if !copy.is_of(key)
        || crate::expiry::is_nat_gone(key, copy.last_seen_ns, run_ns())
        || !keep(nat_entry, key, segment)
    {
        return None;
    }
    if phase::changes_opposite(copy.state, segment.flags, key.direction()) {
        update_opposite(copy, key, segment.flags);
    }
    Some(copy)
}

/// Refreshes time and TCP state of a NAT entry; false if it is under removal. Out of line, as [`update_opposite`] is,
/// because its frame adds to those of a port search.
#[inline(never)]
fn keep(nat_entry: *mut NatEntry, key: &Tuple, segment: Segment) -> bool {
    let direction = key.direction();
    // SAFETY: see `maps`.
    let nat_entry = unsafe { &mut *nat_entry };
    if touch(&raw mut nat_entry.last_seen_ns, run_ns()) == Refresh::Gone {
        return false;
    }
    if change(&mut nat_entry.state, |state| phase::own(state, segment.flags, direction)) {
        began_or_reset(key, segment.flags);
    }
    change(&mut nat_entry.number, |known| phase::number(known, segment, direction));
    true
}

/// A new connection on a known tuple invalidates the flow cache of the former one. So does a reset: the cached outcome would
/// not note that the sender continues.
#[inline(always)]
fn began_or_reset(tuple: &Tuple, tcp_flags: u8) {
    if tcp_flags & (tcp::SYN | tcp::RST) != 0 {
        raise_epoch(tuple);
    }
}

/// Writes a reset or an opening to the opposite direction.
#[inline(never)]
fn update_opposite(copy: &NatEntry, key: &Tuple, tcp_flags: u8) {
    let direction = key.direction();
    let Some(other) = NAT.get_ptr_mut(&copy.other) else { return };
    // SAFETY: see `maps`.
    let state = unsafe { &mut (*other).state };
    if change(state, |state| phase::opposite(copy.state, tcp_flags, direction, state).unwrap_or(state)) {
        // The packet's own tuple too: its cached outcome would not refresh the changed state.
        raise_epoch(&copy.other);
        raise_epoch(key);
    }
}

/// Granularity of refreshing an entry, to avoid contention on its cache line.
const SEEN_STEP_NS: u64 = 1 << 28;

/// Outcome of a refresh.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Refresh {
    /// The entry is under removal and counts as missing.
    Gone,
    /// It was refreshed recently.
    Fresh,
    Noted,
}

/// Refreshes an entry, unless a sweep has won; see `decide::expiry`.
#[inline(always)]
pub fn touch(last_seen_ns: *mut u64, now: u64) -> Refresh {
    let seen = last_seen(last_seen_ns);
    if seen == GONE {
        return Refresh::Gone;
    }
    if now.wrapping_sub(seen) <= SEEN_STEP_NS {
        return Refresh::Fresh;
    }
    // A concurrent packet has written the same; a sweep has not.
    if swap(last_seen_ns, seen, now) == GONE { Refresh::Gone } else { Refresh::Noted }
}

/// Reads a time that other CPUs write.
#[inline(always)]
pub fn last_seen(last_seen_ns: *const u64) -> u64 {
    // SAFETY: the caller's pointer is one from a lookup, to an aligned field; see `maps`.
    unsafe { ptr::read_volatile(last_seen_ns) }
}

/// Compare-and-swap of 32 or 64 bits; returns the old value.
#[inline(always)]
pub fn swap<T: Copy>(at: *mut T, old: T, new: T) -> T {
    // SAFETY: the caller's pointer is one from a lookup, to an aligned field; see `maps`.
    unsafe { intrinsics::atomic_cxchg::<T, { SeqCst }, { SeqCst }>(at, old, new).0 }
}

/// Writes only on a change, to avoid contention on the cache line. Returns whether it changed.
#[inline(always)]
pub fn change(state: &mut u32, next: impl Fn(u32) -> u32) -> bool {
    let new = next(*state);
    let differs = *state != new;
    if differs {
        *state = new;
    }
    differs
}

/// Full memory barrier: no later read happens before an earlier write. A value-returning atomic addition orders both,
/// on every processor (LKMM, "value-returning atomics are fully ordered").
#[inline(always)]
pub fn fence() {
    let mut number = 0u32;
    // SAFETY: a number on this frame.
    let _ordered = opaque(unsafe { intrinsics::atomic_xadd::<u32, u32, { SeqCst }>(&raw mut number, 1) }.into());
}

/// Adds to a counter that several CPUs change.
#[inline(always)]
pub fn add(counter: *mut i32, number: i32) {
    // SAFETY: the caller's pointer is one from a lookup, to an aligned field; the old value is not asked for.
    unsafe { intrinsics::atomic_xadd::<i32, i32, { Relaxed }>(counter, number) };
}

/// Invalidates the flow cache for the bucket of this flow, after a flow, NAT entry or inbound connection was removed,
/// reset or reused.
#[inline(always)]
pub fn raise_epoch(tuple: &Tuple) {
    raise_epoch_of(tuple.bucket());
}

#[inline(always)]
fn raise_epoch_of(bucket: u32) {
    if let Some(epoch) = FLOW_EPOCHS.get_ptr_mut(bucket) {
        // After the change that it announces; see `fence`.
        fence();
        // SAFETY: see `maps`; a number that is only ever counted up, and compared for equality.
        unsafe { intrinsics::atomic_xadd::<u32, u32, { Relaxed }>(epoch, 1) };
    }
}

/// [`Config::decisions`].
#[inline(always)]
pub fn decisions() -> u32 {
    // Volatile, so that the compiler does not move or repeat the read. SAFETY: see `maps`.
    CONFIG.get_ptr(0).map_or(0, |config| unsafe { ptr::read_volatile(&raw const (*config).decisions) })
}

/// The number of this bucket in `epochs`.
#[inline(always)]
pub fn epoch(tuple: &Tuple) -> u32 {
    // Volatile, as for `decisions`.
    // SAFETY: see `maps`.
    FLOW_EPOCHS.get_ptr(tuple.bucket()).map_or(0, |epoch| unsafe { ptr::read_volatile(epoch) })
}

/// [`Config::route_generation`], read here and now.
#[inline(always)]
pub fn route_generation(config: &Config) -> u32 {
    // SAFETY: a reference is aligned and valid; the agent may write the number at the same time.
    unsafe { ptr::read_volatile(&raw const config.route_generation) }
}

/// The configuration; `None` before the agent has written it.
#[inline(always)]
pub fn config() -> Option<&'static Config> {
    CONFIG.get(0).filter(|config| config.generation != 0)
}

/// Packets left to the stack carry the seen priority also before the configuration is written, because the leak guard
/// may exist already.
#[inline(always)]
pub fn seen_priority() -> Option<u32> {
    CONFIG.get(0).and_then(Config::seen_priority)
}
