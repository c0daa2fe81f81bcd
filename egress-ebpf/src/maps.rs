//! The maps (design section 3), and how decisions see them.
//!
//! Map access is one of the three places where unsafe lives. What carries every block here:
//!
//! - A pointer that a lookup returns is valid until the program ends: memory goes back to the system only after every
//!   program that may hold it has ended (RCU). It may *not* be the same element's until then: once removed, it may be another
//!   key's at once. See `abi::seal` for what follows.
//! - Every field is an integer, for which any bytes are a value, so a racing write on another CPU shows old or new words.
//! - `pods`, `nat`, `flows`, `owned` and `handovers` say what a packet becomes. They are copied into this CPU's workspace
//!   first (`found`), and what is lent is the copy, if its seal says that it was written for this key as a whole; otherwise
//!   the element is not there any more. A copy is good until the next look into the same map.
//! - What is written to an element (times, the state of a connection, the next hop, what a flow came to) may hit the next
//!   owner of the memory. A time or a state of another flow lets that one live as long as its protocol's timeouts say at
//!   most; what a flow came to is sealed with its own key; a next hop has a seal of its own.
//! - The others are lent as they lie, read at once, and name at most one value each that decides anything: see `Tables`.
#![expect(unsafe_code, reason = "map access is one of the three places for it")]

use core::ptr;

use aya_ebpf::bindings::{BPF_EXIST, BPF_F_NO_PREALLOC, BPF_NOEXIST};
use aya_ebpf::btf_maps::lpm_trie::Key;
use aya_ebpf::btf_maps::{Array, HashMap, LpmTrie, LruHashMap, RingBuf};
use aya_ebpf::helpers::generated::{bpf_get_prandom_u32, bpf_ktime_get_coarse_ns};
use aya_ebpf::macros::btf_map;
use egress_common::abi::{
    Addr, ClusterPrefix, Config, Datagram, Direction, DropEvent, ExposedPort, Exposure, Flow, FragKey, FragPorts,
    HandoverEntry, Holder, Inbound, NatEntry, NextHop, NodeEntry, Owned, OwnedAddr, PodEntry, Policy, PolicyKey, Share,
    Slot, Tuple, Usage,
};
use egress_common::decide::snat::{EXHAUSTED_NS, PortSearch};
use egress_common::decide::{Claim, Held, Owner, PortClaim, Tables, phase};
use egress_common::wire::{PROTO_TCP, Segment, tcp};

use crate::alive::{Touched, change, count_up, fence, touch};
use crate::hidden::hidden;
use crate::numbers::count_turn;
use crate::workspace::WORKSPACE;
use crate::{counters, found, hold, lease, numbers, ports, shares};

/// Elements come and go by the thousand and most nodes hold few: allocate as needed.
const ON_DEMAND: usize = BPF_F_NO_PREALLOC as usize;

#[btf_map(name = "config")]
pub static CONFIG: Array<Config, 1> = Array::new();
#[btf_map(name = "pods")]
pub static PODS: HashMap<Addr, PodEntry, 4096, ON_DEMAND> = HashMap::new();
#[btf_map(name = "policy")]
pub static POLICY: HashMap<PolicyKey, Policy, 32768, ON_DEMAND> = HashMap::new();
#[btf_map(name = "owned")]
pub static OWNED: HashMap<u32, Owned, 16384, ON_DEMAND> = HashMap::new();
#[btf_map(name = "owned_addr")]
pub static OWNED_ADDR: HashMap<Addr, OwnedAddr, 16384, ON_DEMAND> = HashMap::new();
#[btf_map(name = "handovers")]
pub static HANDOVERS: HashMap<u32, HandoverEntry, 16384, ON_DEMAND> = HashMap::new();
#[btf_map(name = "cluster")]
pub static CLUSTER: LpmTrie<Addr, ClusterPrefix, 65536> = LpmTrie::new();
#[btf_map(name = "nodes")]
pub static NODES: HashMap<Addr, NodeEntry, 65536, ON_DEMAND> = HashMap::new();
#[btf_map(name = "flows")]
pub static FLOWS: HashMap<Tuple, Flow, 262144, ON_DEMAND> = HashMap::new();
#[btf_map(name = "inbound")]
pub static INBOUND: HashMap<Tuple, Inbound, 65536, ON_DEMAND> = HashMap::new();
/// Ports by which pods of this node are reached from outside.
#[btf_map(name = "exposed")]
pub static EXPOSED: HashMap<ExposedPort, Exposure, 65536, ON_DEMAND> = HashMap::new();
/// Datagrams that pods sent first; what has been silent longest is forgotten first.
#[btf_map(name = "datagrams")]
pub static DATAGRAMS: LruHashMap<Tuple, Datagram, 65536> = LruHashMap::new();
/// How much of `flows` and `nat` each pod and each egress policy holds: counted by each sweep, and counted up by claims in
/// between. Who finds no room here is not limited, but by the maps themselves.
#[btf_map(name = "shares")]
pub static SHARES: HashMap<Holder, Share, 65536, ON_DEMAND> = HashMap::new();
/// How full the maps are: counted by each sweep, and counted up by claims in between.
#[btf_map(name = "usage")]
pub static USAGE: Array<Usage, 1> = Array::new();
/// Two keys a mapping: 262,144 mappings.
#[btf_map(name = "nat")]
pub static NAT: HashMap<Tuple, NatEntry, 524288, ON_DEMAND> = HashMap::new();
/// Destinations towards which a search has found every port taken, and when; see `decide::snat`.
#[btf_map(name = "exhausted")]
static EXHAUSTED: LruHashMap<Tuple, Datagram, 1024> = LruHashMap::new();
#[btf_map(name = "frags")]
pub static FRAGS: LruHashMap<FragKey, FragPorts, 16384> = LruHashMap::new();
#[btf_map(name = "events")]
pub static EVENTS: RingBuf<DropEvent, 262144> = RingBuf::new();
/// What a map that takes no more answers (beside ENOMEM, which we treat alike).
const EEXIST: i32 = -17;

/// The maps of this object.
#[derive(Clone, Copy)]
pub struct Maps;

/// Lends the value.
#[inline(always)]
fn lent<'a, V>(found: Option<*mut V>) -> Option<&'a V> {
    // The compiler would otherwise fold two null checks into one `or` of pointers, which the verifier refuses.
    let there = hidden(u64::from(found.is_some()));
    // SAFETY: a pointer from a lookup in this program; see the module header.
    found.filter(|_| there != 0).map(|value| unsafe { &*value })
}

#[inline(always)]
pub fn claimed(result: Result<(), i32>) -> Claim {
    match result {
        Ok(()) => Claim::Claimed,
        Err(EEXIST) => Claim::Taken,
        Err(_) => Claim::Full,
    }
}

impl Maps {
    /// Writes the next hop into a mapping; it may have gone meanwhile.
    #[inline(always)]
    pub fn set_hop(&self, key: &Tuple, hop: &NextHop) {
        if let Some(mapping) = NAT.get_ptr_mut(key) {
            // SAFETY: see the module header.
            unsafe { (*mapping).hop = *hop };
        }
    }
}

/// CLOCK_MONOTONIC (ns), some milliseconds late.
#[inline(always)]
pub fn clock_ns() -> u64 {
    // SAFETY: the helper takes nothing and is always there.
    unsafe { bpf_ktime_get_coarse_ns() }
}

/// The same for the whole run: a helper's call costs as much as a look into a small map. Needs more stack than the helper,
/// so only the steps that every packet takes ask here.
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
        found::pod(addr)
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
    fn policy(&self, key: &PolicyKey) -> Option<&Policy> {
        lent(POLICY.get_ptr_mut(key))
    }

    #[inline(always)]
    fn owned(&self, egress_id: u32) -> Option<&Owned> {
        found::owned(egress_id)
    }

    #[inline(always)]
    fn owned_addr(&self, addr: &Addr) -> Option<&OwnedAddr> {
        lent(OWNED_ADDR.get_ptr_mut(addr))
    }

    #[inline(always)]
    fn has_lease(&self) -> bool {
        lease::left_ns() > 0
    }

    #[inline(always)]
    fn handover(&self, egress_id: u32) -> Option<&HandoverEntry> {
        found::handover(egress_id)
    }

    #[inline(always)]
    fn inbound_answered(&self, tuple: &Tuple, segment: Segment) -> bool {
        let Some(inbound) = INBOUND.get_ptr_mut(tuple) else { return false };
        if tuple.protocol != PROTO_TCP {
            return true;
        }
        // SAFETY: see the module header.
        let inbound = unsafe { &mut *inbound };
        if change(&mut inbound.state, |state| phase::replied(state, segment.flags)) && segment.flags & tcp::RST != 0 {
            count_turn();
        }
        change(&mut inbound.acknowledged, |known| phase::number(known, segment, Direction::Egress));
        touch(&raw mut inbound.last_seen_ns, self.now_ns()) != Touched::Gone
    }

    #[inline(always)]
    fn inbound_heard(&self, tuple: &Tuple, segment: Segment) -> bool {
        let Some(inbound) = INBOUND.get_ptr_mut(tuple) else { return false };
        // SAFETY: see the module header.
        let inbound = unsafe { &mut *inbound };
        let fits = phase::fits(inbound.acknowledged, inbound.end);
        let has_changed = change(&mut inbound.state, |state| phase::heard(state, segment.flags, fits));
        if has_changed && segment.flags & (tcp::SYN | tcp::RST) != 0 {
            count_turn();
        }
        change(&mut inbound.end, |known| phase::number(known, segment, Direction::Ingress));
        touch(&raw mut inbound.last_seen_ns, self.now_ns()) != Touched::Gone
    }

    #[inline(always)]
    fn inbound_known(&self, tuple: &Tuple) -> bool {
        lent(INBOUND.get_ptr_mut(tuple)).is_some()
    }

    #[inline(always)]
    fn inbound_in_use(&self) -> u32 {
        USAGE.get(0).map_or(0, |usage| usage.inbound)
    }

    #[inline(always)]
    fn claim_inbound(&self, tuple: &Tuple) -> Claim {
        let claim = claimed(INBOUND.insert(tuple, Inbound::new(self.now_ns()), BPF_NOEXIST.into()));
        if claim != Claim::Claimed {
            return claim;
        }
        // SAFETY (both): see the module header.
        if let Some(usage) = USAGE.get_ptr_mut(0) {
            count_up(unsafe { &raw mut (*usage).inbound });
        }
        if let Some(exposure) = EXPOSED.get_ptr_mut(&ExposedPort::of(tuple)) {
            count_up(unsafe { &raw mut (*exposure).inbound });
        }
        claim
    }

    #[inline(always)]
    fn exposure(&self, port: &ExposedPort) -> Option<u32> {
        lent(EXPOSED.get_ptr_mut(port)).map(|exposure| exposure.inbound)
    }

    #[inline(always)]
    fn forget_inbound(&self, tuple: &Tuple) {
        // Not there is the usual case.
        if INBOUND.remove(tuple).is_ok() {
            count_turn();
        }
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
            // The map makes room; a failure is a datagram not followed.
            None => drop(DATAGRAMS.insert(tuple, Datagram { last_seen_ns: now }, 0)),
        }
    }

    #[inline(always)]
    fn flow_seen(&self, tuple: &Tuple, segment: Segment) -> Option<&Flow> {
        found::flow(tuple, segment)
    }

    #[inline(always)]
    fn flow_peek(&self, tuple: &Tuple) -> Option<&Flow> {
        found::flow_only(tuple)
    }

    #[inline(always)]
    fn flow_answered(&self, tuple: &Tuple, segment: Segment) {
        found::answered(tuple, segment);
    }

    #[inline(always)]
    fn claim_flow(&self, tuple: &Tuple, flow: &Flow) -> Claim {
        let claim = claimed(FLOWS.insert(tuple, flow, BPF_NOEXIST.into()));
        if claim == Claim::Claimed {
            shares::count(&tuple.saddr, flow.egress_id, Held::Flows);
        }
        claim
    }

    #[inline(always)]
    fn has_quota(&self, pod: &Addr, egress_id: u32, held: Held) -> bool {
        shares::has_quota(pod, egress_id, held)
    }

    #[inline(always)]
    fn decisions(&self) -> u32 {
        let decisions = numbers::decisions();
        // What is asked under this number is not read before it.
        fence();
        decisions
    }

    #[inline(always)]
    fn settle_flow(&self, tuple: &Tuple, egress_id: u32, slot: &Slot, decisions: u32) {
        let Some(flow) = FLOWS.get_ptr_mut(tuple) else { return };
        // Of two CPUs one may have asked before a change and the other behind it: the number of the one beside the slot of
        // the other has no seal, in whatever order their writes arrive.
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
        // Whoever else has removed it has done the same.
        let _gone = FLOWS.remove(tuple);
        count_turn();
    }

    #[inline(always)]
    fn put_flow(&self, tuple: &Tuple, flow: &Flow) -> bool {
        let done = FLOWS.insert(tuple, flow, BPF_EXIST.into()).is_ok();
        // The one that was there is gone.
        count_turn();
        done
    }

    #[inline(always)]
    fn nat_seen(&self, key: &Tuple, segment: Segment) -> Option<&NatEntry> {
        found::mapping(key, segment)
    }

    #[inline(always)]
    fn nat_peek(&self, key: &Tuple) -> Option<&NatEntry> {
        found::mapping_only(key)
    }

    #[inline(always)]
    fn claim_nat(&self, key: &Tuple, other: &Tuple, owner: &Owner) -> Claim {
        ports::claim_nat(self.now_ns(), key, other, owner)
    }

    #[inline(always)]
    fn count_mapping(&self, pod: &Addr, egress_id: u32) {
        shares::count(pod, egress_id, Held::Mappings);
        // Mappings of mark 1008 belong to no object.
        if egress_id != 0 {
            counters::egress_ip(egress_id, |count| count.mappings += 1);
        }
    }

    #[inline(always)]
    fn claim_any_port(&self, forward: &Tuple, address: &Addr, owner: &Owner, search: &PortSearch) -> PortClaim {
        ports::claim_any(self.now_ns(), forward, address, owner, search)
    }

    #[inline(always)]
    fn is_exhausted(&self, destination: &Tuple) -> bool {
        let noted = lent(EXHAUSTED.get_ptr_mut(destination));
        noted.is_some_and(|noted| self.now_ns().wrapping_sub(noted.last_seen_ns) <= EXHAUSTED_NS)
    }

    #[inline(always)]
    fn note_exhausted(&self, destination: &Tuple) {
        // The map makes room; a failure is another search.
        let _failed = EXHAUSTED.insert(destination, Datagram { last_seen_ns: self.now_ns() }, 0);
    }

    #[inline(always)]
    fn forget_nat(&self, key: &Tuple) -> bool {
        let done = NAT.remove(key).is_ok();
        count_turn();
        done
    }

    #[inline(always)]
    fn fragment(&self, key: &FragKey) -> Option<&FragPorts> {
        lent(FRAGS.get_ptr_mut(key))
    }

    #[inline(always)]
    fn put_fragment(&self, key: &FragKey, ports: &FragPorts) {
        // An LRU map makes room; a failure drops the later fragments by name.
        let _failed = FRAGS.insert(key, ports, 0);
    }

    #[inline(always)]
    fn is_awaited(&self, key: &FragKey) -> bool {
        hold::is_awaited(key)
    }
}
