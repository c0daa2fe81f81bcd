//! The maps (design section 3), and how decisions see them.
//!
//! Map access is one of the three places where unsafe lives. Two facts carry every block here: a pointer that a lookup
//! returns is valid until the program ends (the element's memory is not given back to the system while a program runs,
//! RCU), and every field is an integer, so a racing write on another CPU can at worst show an old or a new number.
#![expect(unsafe_code, reason = "map access is one of the three places for it")]

use core::arch::asm;
use core::ffi::c_void;
use core::ptr;

use aya_ebpf::bindings::{BPF_EXIST, BPF_F_NO_PREALLOC, BPF_NOEXIST};
use aya_ebpf::btf_maps::lpm_trie::Key;
use aya_ebpf::btf_maps::{Array, HashMap, LpmTrie, LruHashMap, PerCpuArray, PerCpuHashMap, RingBuf};
use aya_ebpf::helpers::generated::{bpf_get_prandom_u32, bpf_ktime_get_coarse_ns, bpf_loop};
use aya_ebpf::macros::btf_map;
use egress_common::abi::{
    Addr, ClusterPrefix, Config, Count, DropEvent, EipCount, Flow, FragKey, FragPorts, Hop, Inbound, Mapping,
    NodeEntry, Owned, OwnedAddr, PodEntry, Policy, PolicyKey, Tuple, Verdict,
};
use egress_common::decide::snat::{self, PortSearch};
use egress_common::decide::{Claim, Owner, PortClaim, Tables};
use egress_common::wire::{Heads, Quote};

use crate::fragment::Rest;
use crate::icmp::Buffer;
use crate::way::Way;

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
#[btf_map(name = "cluster")]
pub static CLUSTER: LpmTrie<Addr, ClusterPrefix, 65536> = LpmTrie::new();
#[btf_map(name = "nodes")]
pub static NODES: HashMap<Addr, NodeEntry, 65536, ON_DEMAND> = HashMap::new();
#[btf_map(name = "flows")]
pub static FLOWS: HashMap<Tuple, Flow, 262144, ON_DEMAND> = HashMap::new();
#[btf_map(name = "inbound")]
pub static INBOUND: HashMap<Tuple, Inbound, 65536, ON_DEMAND> = HashMap::new();
/// Datagrams that pods sent first; what has been silent longest is forgotten first.
#[btf_map(name = "datagrams")]
pub static DATAGRAMS: LruHashMap<Tuple, Inbound, 65536> = LruHashMap::new();
/// Two keys a mapping: 262,144 mappings.
#[btf_map(name = "nat")]
pub static NAT: HashMap<Tuple, Mapping, 524288, ON_DEMAND> = HashMap::new();
#[btf_map(name = "frags")]
pub static FRAGS: LruHashMap<FragKey, FragPorts, 16384> = LruHashMap::new();
#[btf_map(name = "counters")]
pub static COUNTERS: PerCpuArray<Count, { Verdict::SLOTS }> = PerCpuArray::new();
#[btf_map(name = "eip_counters")]
pub static EIP_COUNTERS: PerCpuHashMap<u32, EipCount, 16384, ON_DEMAND> = PerCpuHashMap::new();
#[btf_map(name = "events")]
pub static EVENTS: RingBuf<DropEvent, 262144> = RingBuf::new();
/// This CPU's own.
#[btf_map(name = "workspace")]
static WORKSPACE: PerCpuArray<Workspace, 1> = PerCpuArray::new();

/// What would crowd the 512 bytes of stack, and what one CPU keeps from one run to the next.
#[repr(C)]
pub struct Workspace {
    /// Of the packet of this run; parsed before anything reads it.
    pub heads: Heads,
    /// Of an ICMP error, once read.
    pub quote: Quote,
    /// Of the packet of this run, once settled.
    pub way: Way,
    /// The part of a packet that is sent as its second fragment.
    pub rest: Rest,
    /// Headers under construction.
    pub buffer: Buffer,
    /// A mapping under construction.
    mapping: Mapping,
    /// No drop is reported before this time.
    next_report_ns: u64,
}

/// At most so many drop events: one per CPU and this time.
const REPORT_STEP_NS: u64 = 10_000_000;

/// An entry is noted as alive at most this often, so that CPUs do not fight over its cache line.
const SEEN_STEP_NS: u64 = 1 << 28;
/// What a map that takes no more answers (beside ENOMEM, which we treat alike).
const EEXIST: i32 = -17;

/// The maps of this object.
#[derive(Clone, Copy)]
pub struct Maps;

/// Lends the value.
#[inline(always)]
fn lent<'a, V>(found: Option<*mut V>) -> Option<&'a V> {
    let mut there = u64::from(found.is_some());
    // Does nothing, but hides where the number came from: the compiler would otherwise fold two null checks into one
    // `or` of pointers, which the verifier refuses.
    // SAFETY: a register is moved to itself.
    unsafe { asm!("{0} = {0}", inout(reg) there, options(pure, nomem, nostack, preserves_flags)) };
    // SAFETY: a pointer from a lookup in this program; see the module header.
    found.filter(|_| there != 0).map(|value| unsafe { &*value })
}

#[inline(always)]
fn claimed(result: Result<(), i32>) -> Claim {
    match result {
        Ok(()) => Claim::Claimed,
        Err(EEXIST) => Claim::Taken,
        Err(_) => Claim::Full,
    }
}

/// Notes that an entry is alive.
#[inline(always)]
fn touch(last_seen_ns: &mut u64, now: u64) {
    if now.wrapping_sub(*last_seen_ns) > SEEN_STEP_NS {
        *last_seen_ns = now;
    }
}

impl Maps {
    /// Writes the next hop into a mapping; it may have gone meanwhile.
    #[inline(always)]
    pub fn set_hop(&self, key: &Tuple, hop: &Hop) {
        if let Some(mapping) = NAT.get_ptr_mut(key) {
            // SAFETY: see the module header.
            unsafe { (*mapping).hop = *hop };
        }
    }

    #[inline(always)]
    pub fn count(&self, verdict: Verdict, bytes: u32) {
        if let Some(count) = COUNTERS.get_ptr_mut(verdict.index()) {
            // SAFETY: see the module header; the element is this CPU's own.
            unsafe {
                (*count).packets += 1;
                (*count).bytes += u64::from(bytes);
            }
        }
    }

    /// Changes the counters of an egress IP, which begin with the first packet.
    #[inline(always)]
    pub fn count_egress_ip(&self, egress_id: u32, change: impl Fn(&mut EipCount)) {
        if let Some(count) = EIP_COUNTERS.get_ptr_mut(egress_id) {
            // SAFETY: see the module header; the element is this CPU's own.
            change(unsafe { &mut *count });
            return;
        }
        let mut first = EipCount::default();
        change(&mut first);
        // A full map loses a count, never a packet.
        let _full = EIP_COUNTERS.insert(egress_id, first, BPF_NOEXIST.into());
    }
}

/// The configuration, once the agent has written it.
#[inline(always)]
pub fn config() -> Option<&'static Config> {
    CONFIG.get(0).filter(|config| config.generation != 0)
}

#[inline(always)]
pub fn workspace() -> Option<&'static mut Workspace> {
    // SAFETY: the element is this CPU's own; TC programs run with bottom halves off and do not interrupt one another, and
    // one run asks once.
    WORKSPACE.get_ptr_mut(0).map(|workspace| unsafe { &mut *workspace })
}

impl Tables for Maps {
    #[inline(always)]
    fn now_ns(&self) -> u64 {
        // SAFETY: the helper takes nothing and is always there.
        unsafe { bpf_ktime_get_coarse_ns() }
    }

    #[inline(always)]
    fn random(&self) -> u32 {
        // SAFETY: the helper takes nothing and is always there.
        unsafe { bpf_get_prandom_u32() }
    }

    #[inline(always)]
    fn pod(&self, addr: &Addr) -> Option<&PodEntry> {
        lent(PODS.get_ptr_mut(addr))
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
        lent(OWNED.get_ptr_mut(egress_id))
    }

    #[inline(always)]
    fn owned_addr(&self, addr: &Addr) -> Option<&OwnedAddr> {
        lent(OWNED_ADDR.get_ptr_mut(addr))
    }

    #[inline(always)]
    fn inbound_seen(&self, tuple: &Tuple) -> bool {
        let Some(inbound) = INBOUND.get_ptr_mut(tuple) else { return false };
        // SAFETY: see the module header.
        touch(unsafe { &mut (*inbound).last_seen_ns }, self.now_ns());
        true
    }

    #[inline(always)]
    fn claim_inbound(&self, tuple: &Tuple) -> Claim {
        claimed(INBOUND.insert(tuple, Inbound { last_seen_ns: self.now_ns() }, BPF_NOEXIST.into()))
    }

    #[inline(always)]
    fn forget_inbound(&self, tuple: &Tuple) {
        // Not there is the usual case.
        let _gone = INBOUND.remove(tuple);
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
            Some(seen) => touch(unsafe { &mut (*seen).last_seen_ns }, now),
            // The map makes room; a failure is a datagram not followed.
            None => drop(DATAGRAMS.insert(tuple, Inbound { last_seen_ns: now }, 0)),
        }
    }

    #[inline(always)]
    fn flow_seen(&self, tuple: &Tuple, tcp_flags: u8) -> Option<&Flow> {
        let flow = FLOWS.get_ptr_mut(tuple)?;
        // SAFETY: see the module header.
        let flow = unsafe { &mut *flow };
        touch(&mut flow.last_seen_ns, self.now_ns());
        if flow.tcp_flags | u32::from(tcp_flags) != flow.tcp_flags {
            flow.tcp_flags |= u32::from(tcp_flags);
        }
        Some(flow)
    }

    #[inline(always)]
    fn claim_flow(&self, tuple: &Tuple, flow: &Flow) -> Claim {
        claimed(FLOWS.insert(tuple, flow, BPF_NOEXIST.into()))
    }

    #[inline(always)]
    fn set_flow_slot(&self, tuple: &Tuple, slot: u32) {
        if let Some(flow) = FLOWS.get_ptr_mut(tuple) {
            // SAFETY: see the module header.
            unsafe { (*flow).slot = slot };
        }
    }

    #[inline(always)]
    fn put_flow(&self, tuple: &Tuple, flow: &Flow) -> bool {
        FLOWS.insert(tuple, flow, BPF_EXIST.into()).is_ok()
    }

    #[inline(always)]
    fn nat_seen(&self, key: &Tuple, tcp_flags: u8) -> Option<&Mapping> {
        let mapping = NAT.get_ptr_mut(key)?;
        // SAFETY: see the module header.
        let mapping = unsafe { &mut *mapping };
        touch(&mut mapping.last_seen_ns, self.now_ns());
        if mapping.tcp_flags | u32::from(tcp_flags) != mapping.tcp_flags {
            mapping.tcp_flags |= u32::from(tcp_flags);
        }
        Some(mapping)
    }

    #[inline(always)]
    fn nat_peek(&self, key: &Tuple) -> Option<&Mapping> {
        lent(NAT.get_ptr_mut(key))
    }

    #[inline(always)]
    fn claim_nat(&self, key: &Tuple, other: &Tuple, owner: &Owner) -> Claim {
        claim_nat(self.now_ns(), key, other, owner)
    }

    #[inline(always)]
    fn count_mapping(&self, egress_id: u32) {
        // Mappings of mark 1008 belong to no object.
        if egress_id != 0 {
            self.count_egress_ip(egress_id, |count| count.mappings += 1);
        }
    }

    #[inline(always)]
    fn claim_any_port(&self, forward: &Tuple, address: &Addr, owner: &Owner, search: &PortSearch) -> PortClaim {
        let found = PortClaim::NoneFree;
        let mut walk = PortWalk { forward, address, owner, search, now: self.now_ns(), found };
        // SAFETY: the callback has the signature that the helper asks for, and `walk` lives on this frame until the
        // helper returns.
        unsafe { bpf_loop(search.span, try_port as *mut c_void, (&raw mut walk).cast(), 0) };
        walk.found
    }

    #[inline(always)]
    fn forget_nat(&self, key: &Tuple) -> bool {
        NAT.remove(key).is_ok()
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
}

/// Insert-if-absent of one key of a mapping, built in this CPU's workspace.
#[inline(always)]
fn claim_nat(now: u64, key: &Tuple, other: &Tuple, owner: &Owner) -> Claim {
    let Some(workspace) = WORKSPACE.get_ptr_mut(0) else { return Claim::Full };
    // SAFETY: the element is this CPU's own, and no other reference to this field is alive.
    let mapping = unsafe { &mut (*workspace).mapping };
    *mapping = Mapping::new(*other, owner.origin, owner.source_node, owner.egress_id, now);
    // Lent, not copied: the stack has no room for it.
    let made: &Mapping = mapping;
    claimed(NAT.insert(key, made, BPF_NOEXIST.into()))
}

struct PortWalk<'a> {
    forward: &'a Tuple,
    address: &'a Addr,
    owner: &'a Owner,
    search: &'a PortSearch,
    now: u64,
    found: PortClaim,
}

/// One step of the search: 0 goes on, 1 ends it.
unsafe extern "C" fn try_port(index: u64, walk: *mut PortWalk<'_>) -> u64 {
    // SAFETY: `bpf_loop` hands back the pointer that it was given, to a live frame.
    let walk = unsafe { &mut *walk };
    let port = walk.search.at(index as u32);
    let reverse = snat::reverse_key(walk.forward, walk.address, port);
    match claim_nat(walk.now, &reverse, walk.forward, walk.owner) {
        Claim::Claimed => {
            walk.found = PortClaim::Claimed(port);
            1
        }
        Claim::Taken => 0,
        Claim::Full => {
            walk.found = PortClaim::Full;
            1
        }
    }
}

/// Whether this CPU may report a drop now; if so, the next one waits.
#[inline(always)]
pub fn may_report(now: u64) -> bool {
    let Some(workspace) = WORKSPACE.get_ptr_mut(0) else { return false };
    // SAFETY: as in `claim_nat`.
    let next = unsafe { &mut (*workspace).next_report_ns };
    if now < *next {
        return false;
    }
    *next = now + REPORT_STEP_NS;
    true
}

/// A full ring buffer loses the event; the counter has it.
#[inline(always)]
pub fn send_event(event: &DropEvent) {
    let _full = EVENTS.output(event, 0);
}
