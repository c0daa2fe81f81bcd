//! Recent flows: what a road came to for a plain packet of a flow, kept by the CPU that the packet passed, so that the next
//! ones of it need no other map.
//!
//! The road walks `pods`, `flows`, `nat` and `owned`, copies elements out of them, and compares their seals. For a packet
//! that comes right behind another one of its flow all of this comes to the same, unless something has changed. What could
//! change it is told by numbers that are read before the road is walked, and compared before each use:
//!
//! - [`Config::decisions`], which the agent raises behind each of its changes (pods, policies, owned addresses, nodes,
//!   prefixes, connections that are cut);
//! - `Usage::turns`, which the programs raise behind each flow or mapping that they remove, behind each reset, and where a
//!   connection begins anew on a tuple that is known;
//! - [`Config::route_generation`], for the next hop.
//!
//! An entry ends after [`LIFE_NS`], and one that emits an egress IP with the lease at the latest, so that a packet that it
//! serves need not ask. The clock here is the coarse one, some milliseconds late, and stands still while the machine is
//! suspended, which that of the lease does not: such an entry may serve for what was left of its life after a resume.
//! When it has ended the road is walked again, which notes that flow and mapping are alive. What notes
//! more than that (SYN, FIN, RST), is not plain (fragments, source routes, a last hop, what is too long), or is neither TCP
//! nor UDP always walks the road.
//!
//! Entries are the CPU's own: nobody else writes them, and none is removed while it is read. Two flows that fall on one
//! place take turns.
#![expect(unsafe_code, reason = "map access is one of the three places for it")]

use aya_ebpf::btf_maps::PerCpuArray;
use aya_ebpf::macros::btf_map;
use egress_common::abi::{Addr, Config, NatEntry, Tuple, Verdict};
use egress_common::decide::from_overlay::Outer;
use egress_common::decide::{End, Rewrite};
use egress_common::wire::{Fragment, Frame, Headers, L4, PROTO_UDP, tcp};

use crate::Outcome;
use crate::alive::fence;
use crate::counters;
use crate::lease;
use crate::maps::run_ns;
use crate::numbers;
use crate::overlay;
use crate::packet::Packet;
use crate::run::Run;
use crate::stamp::{Macs, Stamp};
use crate::way::{self, Way};
use crate::workspace::{self, Found, Workspace};

/// How long an entry serves (ns): with the steps in which `alive` notes, an entry of `nat` or `flows` may look idle for
/// less than half a second more than it is. Timeouts are whole seconds.
const LIFE_NS: u64 = 1 << 27;
/// A power of two.
const PLACES: u32 = 1024;
/// No place: the packet is not one to keep anything of.
const NOWHERE: u32 = u32::MAX;

#[btf_map(name = "flow_cache")]
static RECENT: PerCpuArray<Recent, { PLACES as usize }> = PerCpuArray::new();

/// Value of `flow_cache`. All zero is nobody's: there is no decision of the number zero. What tells that a packet is of another
/// flow stands first, in one line of the cache.
#[repr(C)]
pub struct Recent {
    key: Tuple,
    verdict: u16,
    /// Of the last packet that found another flow here.
    missed: u16,
    egress_id: u32,
    /// Tunnel endpoint of the other node, of what came from it or goes to it.
    node: Addr,
    /// What is written: the egress IP as the source, or the pod as the destination.
    stamp: Stamp,
    until_ns: u64,
    numbers: Numbers,
    ifindex: u32,
    mtu: u32,
    macs: Macs,
}

/// What was in force before the road was walked.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Numbers {
    decisions: u32,
    turns: u32,
    route_generation: u32,
}

/// Where to keep what the road of this packet comes to, and under which numbers it is walked.
#[repr(C)]
pub struct Asked {
    place: u32,
    numbers: Numbers,
}

impl Numbers {
    #[inline(always)]
    fn read(config: &Config) -> Self {
        Self {
            decisions: numbers::decisions(),
            turns: numbers::turns(),
            route_generation: numbers::route_generation(config),
        }
    }
}

impl Asked {
    const fn nothing(&mut self) {
        self.place = NOWHERE;
    }

    /// The road is to be walked under the numbers that were read; none of the maps is read before them.
    #[inline(always)]
    fn ask(&mut self, place: u32, numbers: Numbers) {
        fence();
        self.place = place;
        self.numbers = numbers;
    }
}

/// The hook that a packet is at: another one's entry is not for it. Numbers, so that [`go`] is made for each.
pub mod at {
    pub const FROM_POD: u8 = 0;
    pub const FROM_OVERLAY: u8 = 1;
    pub const FROM_NETDEV: u8 = 2;
    pub const TO_POD: u8 = 3;
}

/// Sends a plain packet of a recent flow the way that the last one went; [`Outcome::NONE`] where the road must be walked,
/// and the packet is as it was.
#[inline(never)]
pub fn go<const AT: u8>(packet: Packet, config: &Config, workspace: &mut Workspace) -> Outcome {
    let Workspace { heads, asked, way, outer, .. } = workspace;
    asked.nothing();
    if !is_plain(heads) {
        return Outcome::NONE;
    }
    let numbers = Numbers::read(config);
    let mixed = mix(&heads.tuple);
    let place = mixed >> (u32::BITS - PLACES.ilog2());
    let Some(recent) = RECENT.get_ptr_mut(place) else { return Outcome::NONE };
    // SAFETY: the element is this CPU's own, and TC programs do not interrupt one another.
    let recent = unsafe { &mut *recent };
    let run = &Run { packet, config, heads };
    if recent.key != heads.tuple {
        // Kept from its second packet on: of flows that send now and then, each would write a whole entry in vain.
        if recent.missed == mixed as u16 {
            asked.ask(place, numbers);
        }
        recent.missed = mixed as u16;
        return Outcome::NONE;
    }
    let is_current = numbers.decisions != 0 && recent.numbers == numbers && run_ns() < recent.until_ns;
    if !is_current {
        asked.ask(place, numbers);
        return Outcome::NONE;
    }
    let is = |verdict: Verdict| u32::from(recent.verdict) == verdict.index();
    let fits = run.wire_length() <= recent.mtu;
    let fits_outer = || fits && overlay::is_short(run, &recent.node) && (heads.l4 == L4::Tcp || packet.gso_size() == 0);
    match AT {
        at::FROM_POD if is(Verdict::SnatHere) && fits => out(run, recent, Verdict::SnatHere),
        at::FROM_POD if is(Verdict::ToGateway) && fits_outer() => to_node(run, recent, way, Verdict::ToGateway),
        at::FROM_OVERLAY if is(Verdict::SnatForNode) && fits && is_from(recent, outer) => {
            out(run, recent, Verdict::SnatForNode)
        }
        at::FROM_OVERLAY if is(Verdict::ReplyDelivered) && fits && is_from(recent, outer) => deliver(run, recent),
        at::FROM_NETDEV if is(Verdict::ReplyHere) && fits => back(run, recent),
        at::FROM_NETDEV if is(Verdict::ReplyToNode) && fits_outer() => to_node(run, recent, way, Verdict::ReplyToNode),
        at::FROM_POD if is(Verdict::NotSelected) => Outcome::done(Verdict::NotSelected),
        at::FROM_POD if is(Verdict::ToCluster) => Outcome::done(Verdict::ToCluster),
        at::FROM_POD if is(Verdict::ToOwnNode) => Outcome::done(Verdict::ToOwnNode),
        at::FROM_POD if is(Verdict::InboundReply) => Outcome::done(Verdict::InboundReply),
        at::TO_POD if is(Verdict::NotOurs) => Outcome::done(Verdict::NotOurs),
        _ => Outcome::NONE,
    }
}

/// Of the node and the object that the last one was of.
#[inline(always)]
fn is_from(recent: &Recent, outer: &Outer) -> bool {
    recent.node == outer.source && recent.egress_id == outer.egress_id
}

/// Whole, not at its last hop, and nothing that a flow has to note but that it is alive.
#[inline(always)]
fn is_plain(heads: &Headers) -> bool {
    const SAYS_MORE: u8 = tcp::SYN | tcp::FIN | tcp::RST;
    let is_whole = heads.fragment == Fragment::Whole && heads.has_l4() && heads.ttl > 1 && !heads.source_routed;
    is_whole
        && match heads.l4 {
            L4::Tcp => heads.tcp_flags & (SAYS_MORE | tcp::ACK) == tcp::ACK,
            L4::Udp => heads.tuple.protocol == PROTO_UDP,
            _ => false,
        }
}

/// The upper bits are those of the place.
#[inline(always)]
fn mix(tuple: &Tuple) -> u32 {
    let ports = u32::from(tuple.sport()) << 16 | u32::from(tuple.dport());
    (tuple.saddr.words()[3] ^ tuple.daddr.words()[3].rotate_left(7) ^ ports).wrapping_mul(0x9e37_79b1)
}

/// The gateway is this node.
#[inline(always)]
fn out(run: &Run<'_>, recent: &Recent, verdict: Verdict) -> Outcome {
    let result = send(run, recent, End::Source, takes_hop(verdict));
    if result.is_ok() {
        counters::out(recent.egress_id, run.packet.len() as u32);
    }
    Outcome::redirected(verdict, result)
}

/// The pod is on this node.
#[inline(always)]
fn back(run: &Run<'_>, recent: &Recent) -> Outcome {
    counters::back(recent.egress_id, run.packet.len() as u32);
    Outcome::redirected(Verdict::ReplyHere, send(run, recent, End::Destination, true))
}

/// A gateway has done all but the last hop.
#[inline(always)]
fn deliver(run: &Run<'_>, recent: &Recent) -> Outcome {
    run.packet.strip(run.config);
    let (dmac, smac) = split(&recent.macs);
    let result = run.packet.set_macs(dmac, smac).ok_or(Verdict::RewriteFailed);
    Outcome::redirected(Verdict::ReplyDelivered, result.and_then(|()| way::redirect(recent.ifindex)))
}

#[inline(always)]
fn send(run: &Run<'_>, recent: &Recent, end: End, counts_hop: bool) -> Result<i32, Verdict> {
    run.packet.strip(run.config);
    recent.stamp.put(run.packet, run.heads, end, counts_hop, Some(&recent.macs))?;
    way::redirect(recent.ifindex)
}

/// The gateway, or the pod, is on another node.
#[inline(always)]
fn to_node(run: &Run<'_>, recent: &Recent, way: &mut Way, verdict: Verdict) -> Outcome {
    let written = if verdict == Verdict::ReplyToNode {
        counters::back(recent.egress_id, run.packet.len() as u32);
        recent.stamp.put(run.packet, run.heads, End::Destination, true, None)
    } else {
        run.packet.decrement_ttl(run.heads)
    };
    let result = written.and_then(|()| {
        (way.dmac, way.smac) = split(&recent.macs);
        way.ifindex = recent.ifindex;
        overlay::encapsulate_again(run, &recent.node, recent.egress_id, way)
    });
    Outcome::redirected(verdict, result)
}

#[inline(always)]
fn split(macs: &Macs) -> ([u8; 6], [u8; 6]) {
    let [a, b, c, d, e, f, g, h, i, j, k, l] = *macs;
    ([a, b, c, d, e, f], [g, h, i, j, k, l])
}

/// The node where the pod is takes one, out and back.
#[inline(always)]
const fn takes_hop(verdict: Verdict) -> bool {
    !matches!(verdict, Verdict::SnatForNode)
}

/// The place for what the road of this packet came to, if it is to be kept; where it lay and until when is written.
#[inline(always)]
fn begin(run: &Run<'_>, verdict: Verdict) -> Option<&'static mut Recent> {
    let asked = workspace::asked().filter(|asked| asked.place != NOWHERE)?;
    let recent = RECENT.get_ptr_mut(asked.place)?;
    // SAFETY: as in `go`.
    let recent = unsafe { &mut *recent };
    recent.key = run.heads.tuple;
    recent.until_ns = run_ns() + LIFE_NS;
    recent.numbers = asked.numbers;
    recent.verdict = verdict.index() as u16;
    Some(recent)
}

/// Keeps a packet that went by a next hop that is known. `node` is the tunnel endpoint of the other node, `mtu` what the way
/// takes of packets like this one.
#[inline(always)]
fn begin_way(
    run: &Run<'_>,
    verdict: Verdict,
    egress_id: u32,
    node: &Addr,
    way: &Way,
    mtu: u32,
) -> Option<&'static mut Recent> {
    if way.resolve {
        return None;
    }
    let recent = begin(run, verdict)?;
    recent.node = *node;
    recent.egress_id = egress_id;
    recent.ifindex = way.ifindex;
    recent.mtu = mtu;
    recent.macs[..6].copy_from_slice(&way.dmac);
    recent.macs[6..].copy_from_slice(&way.smac);
    Some(recent)
}

/// A packet of a flow whose gateway is this node, or an answer to a pod of this node: the mapping lies in the workspace.
#[inline(never)]
pub fn note_mapped(run: &Run<'_>, outcome: Outcome, way: &Way) {
    let Some(Found { mapping, .. }) = workspace::found() else { return };
    let (verdict, rewrite) = if outcome.is(Verdict::ReplyHere) {
        (Verdict::ReplyHere, Rewrite::reverse(mapping))
    } else if outcome.is(Verdict::SnatHere) {
        (Verdict::SnatHere, Rewrite::snat(mapping))
    } else if outcome.is(Verdict::SnatForNode) {
        (Verdict::SnatForNode, Rewrite::snat(mapping))
    } else {
        return;
    };
    if let Some(recent) = begin_way(run, verdict, mapping.egress_id, &mapping.source_node, way, way.mtu) {
        recent.stamp.set(run.heads, &rewrite, takes_hop(verdict));
        if verdict != Verdict::ReplyHere {
            recent.until_ns = recent.until_ns.min(run_ns().saturating_add(lease::left_ns()));
        }
    }
}

/// A packet of a pod of this node that went to its gateway.
#[inline(never)]
pub fn note_to_gateway(run: &Run<'_>, egress_id: u32, gateway: &Addr, way: &Way) {
    let mtu = overlay::inner_mtu(run.config, gateway, way);
    begin_way(run, Verdict::ToGateway, egress_id, gateway, way, mtu);
}

/// An answer that went to the node of its pod.
#[inline(never)]
pub fn note_reply_to_node(run: &Run<'_>, mapping: &NatEntry, way: &Way) {
    let node = &mapping.source_node;
    let mtu = overlay::inner_mtu(run.config, node, way).min(run.config.pod_mtu);
    if let Some(recent) = begin_way(run, Verdict::ReplyToNode, mapping.egress_id, node, way, mtu) {
        recent.stamp.set(run.heads, &Rewrite::reverse(mapping), true);
    }
}

/// An answer from a gateway that went to its pod.
#[inline(never)]
pub fn note_delivered(run: &Run<'_>, outcome: Outcome, outer: &Outer, way: &Way) {
    if outcome.is(Verdict::ReplyDelivered) {
        begin_way(run, Verdict::ReplyDelivered, outer.egress_id, &outer.source, way, way.mtu);
    }
}

/// A packet that was left alone, whatever its length.
#[inline(never)]
pub fn note_left_alone(run: &Run<'_>, verdict: Verdict) {
    if matches!(
        verdict,
        Verdict::NotSelected | Verdict::ToOwnNode | Verdict::ToCluster | Verdict::InboundReply | Verdict::NotOurs
    ) {
        begin(run, verdict);
    }
}
