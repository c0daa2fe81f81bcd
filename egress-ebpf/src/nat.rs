//! SNAT: the NAT entry of a flow, its ports, and the quotas of pods and policies.
//!
//! `egress_common::decide::snat` decides; this file claims keys in the map `nat` and sends the packet. Functions are out of
//! line where their stack frames, one on top of the other, would exceed what Linux 6.1 allows.
#![expect(unsafe_code, reason = "map and packet access; see `maps` and `packet`")]

use core::ffi::c_void;

use aya_ebpf::bindings::{BPF_EXIST, BPF_NOEXIST};
use aya_ebpf::helpers::generated::bpf_loop;
use egress_common::abi::{
    Addr, BlockHolder, ExposedPort, Holder, NatEntry, Origin, PolicySlot, PortBlock, Share, Tuple, Verdict,
};
use egress_common::decide::from_overlay::Outer;
use egress_common::decide::snat::blocks::BlockRequest;
use egress_common::decide::snat::{self, PortSearch, SnatSource};
use egress_common::decide::{self, ClaimOutcome, NatOwner, PortClaim, QuotaKind, Rewrite, Tables};
use egress_common::wire::{Frame, Quote};

use crate::fib::{self, Lookup, Route, RouteChoice};
use crate::flow_cache;
use crate::maps::{self, BLOCKS, EXPOSED, Maps, NAT, SHARES, claimed};
use crate::rewrite::rewrite;
use crate::workspace::{Found, Run, WORKSPACE, found};
use crate::{Outcome, counters, pace};

// The searches for a NAT entry are out of line, so that their frames share the stack with those of later calls. The
// entry and its address are in the workspace.

/// The gateway is this node.
#[inline(never)]
pub fn snat_here(run: &Run<'_>, quote: &Quote, egress_id: u32, slot: &PolicySlot) -> Result<(), Verdict> {
    let owner = NatOwner { origin: Origin::Here, source_node: Addr::UNSPECIFIED, egress_id };
    // The policy may be newer than the ownership; replies to an address that is not owned would be lost.
    let Some(owned) = Maps.owned(egress_id).filter(|owned| owned.address == slot.address) else {
        return Err(Verdict::NotGateway);
    };
    let pool = SnatSource::of(owned, run.config);
    snat::translate(run.headers, quote, &Maps, &pool, &owner).map(drop)
}

/// As [`snat_here`], for a pod of another node.
#[inline(never)]
pub fn snat_for_node(run: &Run<'_>, quote: &Quote, outer: &Outer, source_node: &Addr) -> Result<(), Verdict> {
    let Some(found) = found() else { return Err(Verdict::BadState) };
    let owned = &found.owned;
    decide::from_overlay::translate(run.headers, quote, &Maps, owned, outer.egress_id, source_node, run.config)
        .map(drop)
}

/// As [`snat_here`], on the node's own address.
#[inline(never)]
pub fn snat_node(run: &Run<'_>, quote: &Quote) -> Result<(), Verdict> {
    decide::to_netdev::translate(run.headers, quote, run.packet.ifindex(), &Maps, run.config).map(drop)
}

/// As [`out_by_uplink`], and cached for the next packets.
#[inline(always)]
pub fn out_cached(run: &Run<'_>, quote: &Quote, route: &mut Route) -> Outcome {
    let outcome = out_by_uplink(run, quote, route);
    flow_cache::store_translated(run, outcome, route);
    outcome
}

/// Finds the route, checks the length, rewrites, sends. The pod's node decrements the TTL. Out of line, so that its
/// frame and those of the NAT entry search share the stack.
#[inline(never)]
fn out_by_uplink(run: &Run<'_>, quote: &Quote, route: &mut Route) -> Outcome {
    let Run { packet, headers, .. } = *run;
    let Some(Found { nat_entry, .. }) = found() else { return Outcome::done(Verdict::BadState) };
    let source = Rewrite::snat(nat_entry);
    if let Err(verdict) = route_out(run, route) {
        return Outcome::done(verdict);
    }
    let limit = route.mtu;
    if run.wire_length() > limit {
        return Outcome::too_big(limit);
    }
    let here = nat_entry.origin() == Some(Origin::Here);
    if here && let Err(verdict) = packet.decrement_ttl(headers) {
        return Outcome::done(verdict);
    }
    if let Err(verdict) = rewrite(run, quote, &source) {
        return Outcome::done(verdict);
    }
    let verdict = if here { Verdict::SnatHere } else { Verdict::SnatForNode };
    let result = fib::send(run, route);
    if route.resolve {
        packet.set_waiting(run.config, nat_entry.egress_id);
    }
    if result.is_ok() {
        counters::out(nat_entry.egress_id, packet.len() as u32);
    }
    Outcome::redirected(verdict, result)
}

/// Finds the route of a packet that has a NAT entry, and counts it towards its bandwidth limit. Out of line for its frame.
#[inline(never)]
fn route_out(run: &Run<'_>, route: &mut Route) -> Result<(), Verdict> {
    let Some(Found { nat_entry, owned, .. }) = found() else { return Err(Verdict::BadState) };
    // An address that is shared with a Service leaves as its pods' packets would without translation, by the host's
    // routes, and by rules about the address.
    let (ifindex, routes) = match owned.is_shared() {
        true => (run.config.mgmt_ifindex, RouteChoice::Hosts),
        false => (owned.ifindex, RouteChoice::Through),
    };
    let lookup = Lookup {
        saddr: &owned.address,
        daddr: &run.headers.tuple.daddr,
        ifindex,
        routes,
        device_mtu: owned.mtu,
        kept: &nat_entry.hop,
        by_nat_entry: true,
        seal: nat_entry.seal,
    };
    if owned.is_shared() || owned.ifindex == run.config.uplink_ifindex {
        fib::resolve_route(run, &lookup, route)
    } else {
        fib::resolve_further_route(run, &lookup, owned.mac, route)
    }?;
    // One that is too long does not leave.
    if run.wire_length() > route.mtu { Ok(()) } else { pace::admit(run, nat_entry.egress_id, route.ifindex) }
}

/// Insert-if-absent of one key of a NAT entry, built in this CPU's workspace.
#[inline(always)]
pub fn claim_nat(now: u64, key: &Tuple, other: &Tuple, owner: &NatOwner) -> ClaimOutcome {
    let Some(workspace) = WORKSPACE.get_ptr_mut(0) else { return ClaimOutcome::Full };
    // SAFETY: the element is this CPU's own, and no other reference to this field is alive.
    let nat_entry = unsafe { &mut (*workspace).nat_entry };
    *nat_entry = NatEntry::new(*other, owner.origin, owner.source_node, owner.egress_id, now);
    nat_entry.seal(key);
    // A reference instead of a copy, to save stack.
    let made: &NatEntry = nat_entry;
    claimed(NAT.insert(key, made, BPF_NOEXIST.into()))
}

/// Whether the address that this run translates to is a Service's too, and this is one of its ports. The key is built in
/// the workspace, because the search for a port is at the end of the longest call chain.
#[inline(always)]
pub fn is_service_port(address: &Addr, protocol: u8, port: u16) -> bool {
    let Some(workspace) = WORKSPACE.get_ptr_mut(0) else { return false };
    // SAFETY: as in `claim_nat`.
    let (owned, key) = unsafe { (&(*workspace).found.owned, &mut (*workspace).exposed_port) };
    if !owned.is_shared() || owned.address != *address {
        return false;
    }
    *key = ExposedPort::new(*address, protocol, port);
    EXPOSED.get_ptr_mut(&*key).is_some()
}

struct PortWalk<'a> {
    forward: &'a Tuple,
    owner: &'a NatOwner,
    search: &'a PortSearch,
    now: u64,
    found: PortClaim,
}

/// Body of the search: 0 continues, 1 ends it.
unsafe extern "C" fn try_port(index: u64, walk: *mut PortWalk<'_>) -> u64 {
    // SAFETY: `bpf_loop` hands back the pointer that it was given, to a live frame.
    let walk = unsafe { &mut *walk };
    let port = walk.search.at(index as u32);
    let Some(workspace) = WORKSPACE.get_ptr_mut(0) else { return 1 };
    // SAFETY: as in `claim_nat`.
    let reverse = unsafe { &mut (*workspace).key };
    snat::set_reverse_port(reverse, walk.forward, port);
    if is_service_port(&reverse.daddr, reverse.protocol, port) {
        return 0;
    }
    match claim_nat(walk.now, reverse, walk.forward, walk.owner) {
        ClaimOutcome::Claimed => {
            walk.found = PortClaim::Claimed(port);
            1
        }
        ClaimOutcome::Taken => 0,
        ClaimOutcome::Full => {
            walk.found = PortClaim::Full;
            1
        }
    }
}

/// Builds the searched key in the workspace, because the loop body is at the end of the longest call chain. Only its
/// port changes.
#[inline(never)]
fn prepare(forward: &Tuple, address: &Addr) {
    if let Some(workspace) = WORKSPACE.get_ptr_mut(0) {
        // SAFETY: as in `claim_nat`.
        unsafe { (*workspace).key = snat::reverse_key(forward, address, 0) };
    }
}

/// Claims the first free port of the search.
#[inline(always)]
pub fn claim_any(now: u64, forward: &Tuple, address: &Addr, owner: &NatOwner, search: &PortSearch) -> PortClaim {
    prepare(forward, address);
    let mut walk = PortWalk { forward, owner, search, now, found: PortClaim::NoneFree };
    // SAFETY: the callback has the signature that the helper asks for, and `walk` lives on this frame until the helper
    // returns.
    unsafe { bpf_loop(search.span, try_port as *mut c_void, (&raw mut walk).cast(), 0) };
    walk.found
}

/// Whether the block that begins with this port is open, of this size, and this pod's. Out of line, for its key.
#[inline(never)]
pub fn is_block_of(holder: &BlockHolder, first: u16, size: u16) -> bool {
    let block = PortBlock::new(holder.address, first);
    let Some(owner) = BLOCKS.get_ptr(&block) else { return false };
    let Some(found) = found() else { return false };
    let owner = maps::copied(owner, &mut found.block);
    owner.pod == holder.pod && owner.size == size && owner.is_open() && owner.is_of(&block)
}

struct BlockWalk<'a> {
    request: &'a BlockRequest<'a>,
    walk: &'a PortSearch,
    found: PortClaim,
}

/// Body of the search: 0 continues, 1 ends it. Key and value are in the workspace.
unsafe extern "C" fn try_block(index: u64, walk: *mut BlockWalk<'_>) -> u64 {
    // SAFETY: `bpf_loop` hands back the pointer that it was given, to a live frame.
    let walk = unsafe { &mut *walk };
    let Some(workspace) = WORKSPACE.get_ptr_mut(0) else { return 1 };
    // SAFETY: as in `claim_nat`.
    let (block, owner) = unsafe { (&mut (*workspace).block, &mut (*workspace).block_owner) };
    block.set_first(walk.request.block(walk.walk, index as u32));
    // Cheaper than to seal a value for a block that is taken.
    if BLOCKS.get_ptr(&*block).is_some() {
        return 0;
    }
    owner.seal(block);
    match claimed(BLOCKS.insert(&*block, &*owner, BPF_NOEXIST.into())) {
        ClaimOutcome::Claimed => {
            walk.found = PortClaim::Claimed(block.first());
            1
        }
        ClaimOutcome::Taken => 0,
        ClaimOutcome::Full => {
            walk.found = PortClaim::Full;
            1
        }
    }
}

/// Builds key and value in the workspace, as [`prepare`].
#[inline(never)]
fn prepare_block(request: &BlockRequest<'_>) {
    if let Some(workspace) = WORKSPACE.get_ptr_mut(0) {
        // SAFETY: as in `claim_nat`.
        unsafe {
            (*workspace).block = PortBlock::new(request.pool.address, 0);
            (*workspace).block_owner = request.new_owner(maps::clock_ns());
        }
    }
}

/// Claims the first free block of the search.
#[inline(always)]
pub fn claim_any_block(request: &BlockRequest<'_>, walk: &PortSearch) -> PortClaim {
    prepare_block(request);
    let mut blocks = BlockWalk { request, walk, found: PortClaim::NoneFree };
    // SAFETY: as in `claim_any`.
    unsafe { bpf_loop(walk.span, try_block as *mut c_void, (&raw mut blocks).cast(), 0) };
    blocks.found
}

/// Closes the block that this run has claimed: its value is in the workspace.
#[inline(always)]
pub fn close_block(block: &PortBlock) {
    let Some(workspace) = WORKSPACE.get_ptr_mut(0) else { return };
    // SAFETY: as in `claim_nat`.
    let owner = unsafe { &mut (*workspace).block_owner };
    *owner = owner.closed(block);
    // It fails if the agent has removed the block.
    let _gone = BLOCKS.insert(block, &*owner, BPF_EXIST.into());
}

/// Whether the pod and its egress policy may have another entry.
#[inline(never)]
pub fn has_quota(pod: &Addr, egress_id: u32, held: QuotaKind) -> bool {
    let Some(config) = maps::config() else { return true };
    if !may_grow(&Holder::pod(*pod), held, config.pod_quota) {
        return false;
    }
    egress_id == 0 || may_grow(&Holder::policy(egress_id), held, config.policy_quota)
}

#[inline(always)]
fn may_grow(holder: &Holder, held: QuotaKind, quota: u32) -> bool {
    // SAFETY: see `maps`.
    SHARES.get_ptr(holder).is_none_or(|share| held.may_grow(unsafe { &*share }, quota))
}

/// Counts an entry of the pod and of the egress policy.
#[inline(never)]
pub fn count(pod: &Addr, egress_id: u32, held: QuotaKind) {
    raise(&Holder::pod(*pod), held);
    if egress_id != 0 {
        raise(&Holder::policy(egress_id), held);
    }
}

#[inline(always)]
fn raise(holder: &Holder, held: QuotaKind) {
    if SHARES.get_ptr(holder).is_none() {
        // Another CPU may have created it first. A full map loses a count, never a packet.
        let _taken = SHARES.insert(holder, Share::default(), BPF_NOEXIST.into());
    }
    add(holder, held, 1);
}

/// The opposite of [`count`], after the removal of an entry. `holder` is space for the key, and it is inlined, because
/// removals are at the end of the longest call chain.
#[inline(always)]
pub fn uncount(pod: &Addr, egress_id: u32, held: QuotaKind, holder: &mut Holder) {
    *holder = Holder::pod(*pod);
    add(holder, held, -1);
    if egress_id != 0 {
        *holder = Holder::policy(egress_id);
        add(holder, held, -1);
    }
}

#[inline(always)]
fn add(holder: &Holder, held: QuotaKind, number: i32) {
    let Some(share) = SHARES.get_ptr_mut(holder) else { return };
    // SAFETY: see `maps`.
    let counter = unsafe {
        match held {
            QuotaKind::Flows => &raw mut (*share).flows,
            QuotaKind::NatEntries => &raw mut (*share).nat_entries,
        }
    };
    maps::add(counter, number);
}
