//! The flow cache: each CPU stores the outcome of a flow's last simple packet, and repeats it for the next ones.
//!
//! An entry is valid while no input of its decision has changed. [`Generations`] are read before the decision and
//! compared before each use:
//!
//! - [`Config::decisions`]: the agent raises it after each change of pods, policies, owned addresses, nodes and prefixes;
//! - the number in `epochs` of the flow's bucket: programs raise it after removing a flow or NAT entry, after a reset, and
//!   for a reused tuple;
//! - [`Config::route_generation`]: next hops.
//!
//! An entry expires after [`LIFE_NS`], so that flow and NAT entry are refreshed, and with the lease if it emits an
//! egress IP. Its clock stops during suspend, the lease's does not: after a resume an entry may serve for its remaining
//! time. SYN, FIN, RST, fragments, source routes, the last hop, oversize packets, and protocols other than TCP and UDP
//! never use the cache. Only its own CPU writes an entry.
#![expect(unsafe_code, reason = "map and packet access; see `maps` and `packet`")]

use aya_ebpf::btf_maps::PerCpuArray;
use aya_ebpf::macros::btf_map;
use egress_common::abi::{Addr, Config, FlowCacheUse, NatEntry, Tuple, Verdict};
use egress_common::decide::from_overlay::Outer;
use egress_common::decide::{End, Rewrite};
use egress_common::wire::{Fragment, Frame, Headers, L4, PROTO_UDP, tcp};

use crate::fib::{self, Route};
use crate::maps::{self, fence, run_ns};
use crate::packet::Packet;
use crate::rewrite::{CachedRewrite, Macs};
use crate::workspace::{self, Found, Run, Workspace};
use crate::{Outcome, counters, lease, overlay, pace};

/// Lifetime of an entry (ns). Together with the granularity of `alive`, an entry of `nat` or `flows` appears idle for
/// less than half a second too long. Timeouts are whole seconds.
const LIFE_NS: u64 = 1 << 27;

const _: () = assert!(size_of::<CacheEntry>() == 128, "two cache lines");
/// A bit beside the verdict of a packet that leaves: a bandwidth limit applies to it, which `pace` knows.
const LIMITED: u16 = 1 << 15;
const _: () = assert!(Verdict::SLOTS <= LIMITED as usize);

/// A power of two.
const PLACES: u32 = 4096;

#[btf_map(name = "flow_cache")]
static FLOW_CACHE: PerCpuArray<CacheEntry, { PLACES as usize }> = PerCpuArray::new();

/// What the cache was good for.
#[btf_map(name = "flow_cache_use")]
static FLOW_CACHE_USE: PerCpuArray<FlowCacheUse, 1> = PerCpuArray::new();

/// Value of `flow_cache`. All zero is no entry, because no decision has the number zero. The key comes first, so that a
/// miss costs one cache line.
#[repr(C)]
pub struct CacheEntry {
    key: Tuple,
    /// And [`LIMITED`].
    verdict: u16,
    /// Hash of the last packet that missed here.
    missed: u16,
    egress_id: u32,
    /// Tunnel endpoint of the other node, for packets from or to it.
    node: Addr,
    /// The written address: the egress IP as the source, or the pod as the destination.
    rewrite: CachedRewrite,
    until_ns: u64,
    generations: Generations,
    ifindex: u32,
    mtu: u16,
    /// The interface that the packet came in by, on which the decision of `from_netdev` depends. Zero, which is none, for
    /// an index that does not fit.
    came_by: u16,
    macs: Macs,
}

/// The generations that were current before the decision.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Generations {
    decisions: u32,
    epoch: u32,
    route_generation: u32,
}

/// Where to store the outcome of this packet, and the generations of its decision.
#[repr(C)]
pub struct Pending {
    is_wanted: bool,
    place: u32,
    generations: Generations,
}

impl Generations {
    #[inline(always)]
    fn read(config: &Config, tuple: &Tuple) -> Self {
        Self {
            decisions: maps::decisions(),
            epoch: maps::epoch(tuple),
            route_generation: maps::route_generation(config),
        }
    }
}

impl Pending {
    const fn nothing(&mut self) {
        self.is_wanted = false;
    }

    /// Reads the generations, before the decision reads any map.
    #[inline(always)]
    fn ask(&mut self, place: u32, generations: Generations) {
        fence();
        (self.is_wanted, self.place) = (true, place);
        self.generations = generations;
    }
}

/// The hook of a packet, part of the key. Constants, so that [`go`] is specialised for each.
pub mod at {
    pub const FROM_POD: u8 = 0;
    pub const FROM_OVERLAY: u8 = 1;
    pub const FROM_NETDEV: u8 = 2;
    pub const TO_POD: u8 = 3;
}

/// Repeats the outcome of the flow's previous packet. `None` if the full decision is needed; the packet is unchanged
/// then.
#[inline(never)]
pub fn serve<const AT: u8>(packet: Packet, config: &Config, workspace: &mut Workspace) -> Option<Outcome> {
    let Workspace { headers, pending, route, outer, .. } = workspace;
    pending.nothing();
    if !is_plain(headers) {
        return None;
    }
    let outcome = repeat::<AT>(packet, config, headers, pending, route, outer);
    if let Some(counts) = FLOW_CACHE_USE.get_ptr_mut(0) {
        // SAFETY: the element is this CPU's own, and TC programs do not interrupt one another.
        let counts = unsafe { &mut *counts };
        if outcome.is_some() {
            counts.hits += 1;
        } else {
            counts.misses += 1;
        }
    }
    outcome
}

/// Looks up the flow's entry, and repeats its outcome if that is valid.
#[inline(always)]
fn repeat<const AT: u8>(
    packet: Packet,
    config: &Config,
    headers: &Headers,
    pending: &mut Pending,
    route: &mut Route,
    outer: &Outer,
) -> Option<Outcome> {
    let generations = Generations::read(config, &headers.tuple);
    let mixed = mix(&headers.tuple);
    let place = mixed >> (u32::BITS - PLACES.ilog2());
    let cached = FLOW_CACHE.get_ptr_mut(place)?;
    // SAFETY: the element is this CPU's own, and TC programs do not interrupt one another.
    let cached = unsafe { &mut *cached };
    let run = &Run { packet, config, headers };
    if cached.key != headers.tuple {
        // Stored from the second packet on, so that flows with rare packets write no entries.
        if cached.missed == mixed as u16 {
            pending.ask(place, generations);
        }
        cached.missed = mixed as u16;
        return None;
    }
    let is_current = generations.decisions != 0 && cached.generations == generations && run_ns() < cached.until_ns;
    if !is_current {
        pending.ask(place, generations);
        return None;
    }
    let is = |verdict: Verdict| u32::from(cached.verdict) == verdict.index();
    let leaves_by = |verdict: Verdict| u32::from(cached.verdict & !LIMITED) == verdict.index();
    let fits = run.wire_length() <= u32::from(cached.mtu);
    let fits_outer =
        || fits && overlay::is_short(run, &cached.node) && (headers.l4 == L4::Tcp || packet.gso_size() == 0);
    let is_expected_here = || packet.ifindex() == u32::from(cached.came_by);
    Some(match AT {
        at::FROM_POD if leaves_by(Verdict::SnatHere) && fits => out(run, cached, Verdict::SnatHere),
        at::FROM_POD if is(Verdict::ToGateway) && fits_outer() => to_node(run, cached, route, Verdict::ToGateway),
        at::FROM_OVERLAY if leaves_by(Verdict::SnatForNode) && fits && is_from(cached, outer) => {
            out(run, cached, Verdict::SnatForNode)
        }
        at::FROM_OVERLAY if is(Verdict::ReplyDelivered) && fits && is_from(cached, outer) => deliver(run, cached),
        at::FROM_NETDEV if is(Verdict::ReplyHere) && fits && is_expected_here() => send_reply(run, cached),
        at::FROM_NETDEV if is(Verdict::ReplyToNode) && fits_outer() && is_expected_here() => {
            to_node(run, cached, route, Verdict::ReplyToNode)
        }
        at::FROM_POD if is(Verdict::NotSelected) => Outcome::done(Verdict::NotSelected),
        at::FROM_POD if is(Verdict::ToCluster) => Outcome::done(Verdict::ToCluster),
        at::FROM_POD if is(Verdict::ToOwnNode) => Outcome::done(Verdict::ToOwnNode),
        at::FROM_POD if is(Verdict::InboundReply) => Outcome::done(Verdict::InboundReply),
        at::TO_POD if is(Verdict::NotOurs) => Outcome::done(Verdict::NotOurs),
        _ => return None,
    })
}

/// From the same node and for the same egress ID as the cached one.
#[inline(always)]
fn is_from(cached: &CacheEntry, outer: &Outer) -> bool {
    cached.node == outer.source && cached.egress_id == outer.egress_id
}

/// A whole packet, not at its last hop, that only refreshes the flow.
#[inline(always)]
fn is_plain(headers: &Headers) -> bool {
    const SAYS_MORE: u8 = tcp::SYN | tcp::FIN | tcp::RST;
    let is_whole = headers.fragment == Fragment::Whole && headers.has_l4() && headers.ttl > 1 && !headers.source_routed;
    is_whole
        && match headers.l4 {
            L4::Tcp => headers.tcp_flags & (SAYS_MORE | tcp::ACK) == tcp::ACK,
            L4::Udp => headers.tuple.protocol == PROTO_UDP,
            _ => false,
        }
}

/// The upper bits select the index. Two multiplications, because addresses and ports that both count up would meet in
/// the same places after one.
#[inline(always)]
fn mix(tuple: &Tuple) -> u32 {
    const FACTOR: u32 = 0x9e37_79b1;
    let ports = u32::from(tuple.sport()) << 16 | u32::from(tuple.dport());
    let ([_, _, s2, s3], [_, _, d2, d3]) = (tuple.saddr.words(), tuple.daddr.words());
    let addresses = s3 ^ d3.rotate_left(7) ^ s2.rotate_left(13) ^ d2.rotate_left(19);
    (addresses.wrapping_mul(FACTOR).rotate_left(15) ^ ports).wrapping_mul(FACTOR)
}

/// The gateway is this node.
#[inline(always)]
fn out(run: &Run<'_>, cached: &CacheEntry, verdict: Verdict) -> Outcome {
    if cached.verdict & LIMITED != 0
        && let Err(verdict) = pace::admit(run, cached.egress_id, cached.ifindex)
    {
        return Outcome::done(verdict);
    }
    let result = send(run, cached, End::Source, takes_hop(verdict));
    if result.is_ok() {
        counters::out(cached.egress_id, run.packet.len() as u32);
    }
    Outcome::redirected(verdict, result)
}

/// The pod is on this node.
#[inline(always)]
fn send_reply(run: &Run<'_>, cached: &CacheEntry) -> Outcome {
    counters::count_reply(cached.egress_id, run.packet.len() as u32);
    Outcome::redirected(Verdict::ReplyHere, send(run, cached, End::Destination, true))
}

/// The gateway has done everything except the last hop.
#[inline(always)]
fn deliver(run: &Run<'_>, cached: &CacheEntry) -> Outcome {
    run.packet.strip(run.config);
    let (dmac, smac) = split(&cached.macs);
    let result = run.packet.set_macs(dmac, smac).ok_or(Verdict::RewriteFailed);
    Outcome::redirected(Verdict::ReplyDelivered, result.and_then(|()| fib::redirect(cached.ifindex)))
}

#[inline(always)]
fn send(run: &Run<'_>, cached: &CacheEntry, end: End, counts_hop: bool) -> Result<i32, Verdict> {
    run.packet.strip(run.config);
    cached.rewrite.put(run.packet, run.headers, end, counts_hop, Some(&cached.macs))?;
    fib::redirect(cached.ifindex)
}

/// The gateway, or the pod, is on another node.
#[inline(always)]
fn to_node(run: &Run<'_>, cached: &CacheEntry, route: &mut Route, verdict: Verdict) -> Outcome {
    let written = if verdict == Verdict::ReplyToNode {
        counters::count_reply(cached.egress_id, run.packet.len() as u32);
        cached.rewrite.put(run.packet, run.headers, End::Destination, true, None)
    } else {
        run.packet.decrement_ttl(run.headers)
    };
    let result = written.and_then(|()| {
        (route.dmac, route.smac) = split(&cached.macs);
        route.ifindex = cached.ifindex;
        overlay::encapsulate_again(run, &cached.node, cached.egress_id, route)
    });
    Outcome::redirected(verdict, result)
}

#[inline(always)]
fn split(macs: &Macs) -> ([u8; 6], [u8; 6]) {
    let [a, b, c, d, e, f, g, h, i, j, k, l] = *macs;
    ([a, b, c, d, e, f], [g, h, i, j, k, l])
}

/// Whether this node decrements the TTL; the pod's node does, in both directions.
#[inline(always)]
const fn takes_hop(verdict: Verdict) -> bool {
    !matches!(verdict, Verdict::SnatForNode)
}

/// The entry for the outcome of this packet, with key, verdict and validity written; `None` if it is not stored.
#[inline(always)]
fn begin(run: &Run<'_>, verdict: Verdict) -> Option<&'static mut CacheEntry> {
    let pending = workspace::pending().filter(|pending| pending.is_wanted)?;
    let cached = FLOW_CACHE.get_ptr_mut(pending.place)?;
    // SAFETY: as in `go`.
    let cached = unsafe { &mut *cached };
    cached.key = run.headers.tuple;
    cached.until_ns = run_ns() + LIFE_NS;
    cached.generations = pending.generations;
    cached.came_by = u16::try_from(run.packet.ifindex()).unwrap_or(0);
    cached.verdict = verdict.index() as u16;
    Some(cached)
}

/// Stores a packet that left by a known next hop. `node` is the tunnel endpoint of the other node, `mtu` the route's
/// MTU for such packets.
#[inline(always)]
fn begin_route(
    run: &Run<'_>,
    verdict: Verdict,
    egress_id: u32,
    node: &Addr,
    route: &Route,
    mtu: u32,
) -> Option<&'static mut CacheEntry> {
    if route.resolve {
        return None;
    }
    let cached = begin(run, verdict)?;
    cached.node = *node;
    cached.egress_id = egress_id;
    cached.ifindex = route.ifindex;
    // No packet is longer.
    cached.mtu = mtu.min(u32::from(u16::MAX)) as u16;
    cached.macs[..6].copy_from_slice(&route.dmac);
    cached.macs[6..].copy_from_slice(&route.smac);
    Some(cached)
}

/// A packet of a flow whose gateway is this node, or a reply to a pod of this node: the NAT entry lies in the workspace.
#[inline(never)]
pub fn store_translated(run: &Run<'_>, outcome: Outcome, route: &Route) {
    let Some(Found { nat_entry, .. }) = workspace::found() else { return };
    let (verdict, rewrite) = if outcome.is(Verdict::ReplyHere) {
        (Verdict::ReplyHere, Rewrite::reverse(nat_entry))
    } else if outcome.is(Verdict::SnatHere) {
        (Verdict::SnatHere, Rewrite::snat(nat_entry))
    } else if outcome.is(Verdict::SnatForNode) {
        (Verdict::SnatForNode, Rewrite::snat(nat_entry))
    } else {
        return;
    };
    if let Some(cached) = begin_route(run, verdict, nat_entry.egress_id, &nat_entry.source_node, route, route.mtu) {
        cached.rewrite.set(run.headers, &rewrite, takes_hop(verdict));
        if verdict != Verdict::ReplyHere {
            restrict(run, cached);
        }
    }
}

/// Of a packet that leaves: it ends with the lease, and notes a bandwidth limit. Out of line for its frame.
#[inline(never)]
fn restrict(run: &Run<'_>, cached: &mut CacheEntry) {
    cached.until_ns = cached.until_ns.min(run_ns().saturating_add(lease::left_ns()));
    if pace::is_limited(run, cached.egress_id) {
        cached.verdict |= LIMITED;
    }
}

/// A packet of a pod of this node that went to its gateway.
#[inline(never)]
pub fn store_to_gateway(run: &Run<'_>, egress_id: u32, gateway: &Addr, route: &Route) {
    let mtu = overlay::inner_mtu(run.config, gateway, route);
    begin_route(run, Verdict::ToGateway, egress_id, gateway, route, mtu);
}

/// An answer that went to the node of its pod.
#[inline(never)]
pub fn store_reply_to_node(run: &Run<'_>, nat_entry: &NatEntry, route: &Route) {
    let node = &nat_entry.source_node;
    let mtu = overlay::inner_mtu(run.config, node, route).min(run.config.pod_mtu);
    if let Some(cached) = begin_route(run, Verdict::ReplyToNode, nat_entry.egress_id, node, route, mtu) {
        cached.rewrite.set(run.headers, &Rewrite::reverse(nat_entry), true);
    }
}

/// An answer from a gateway that went to its pod.
#[inline(never)]
pub fn store_delivered(run: &Run<'_>, outcome: Outcome, outer: &Outer, route: &Route) {
    if outcome.is(Verdict::ReplyDelivered) {
        begin_route(run, Verdict::ReplyDelivered, outer.egress_id, &outer.source, route, route.mtu);
    }
}

/// An untouched packet of any length.
#[inline(never)]
pub fn store_left_alone(run: &Run<'_>, verdict: Verdict) {
    if matches!(
        verdict,
        Verdict::NotSelected | Verdict::ToOwnNode | Verdict::ToCluster | Verdict::InboundReply | Verdict::NotOurs
    ) {
        begin(run, verdict);
    }
}
