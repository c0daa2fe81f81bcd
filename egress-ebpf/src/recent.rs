//! Recent flows: what a road came to for a plain packet of a flow, kept by the CPU that the packet passed, so that the next
//! ones of it need no other map.
//!
//! The road walks `pods`, `flows`, `nat` and `owned`, copies elements out of them, and compares their seals. For a packet
//! that comes right behind another one of its flow all of this comes to the same, unless something has changed. What could
//! change it is told by numbers that are read before the road is walked, and compared before each use:
//!
//! - [`Config::decisions`], which the agent raises behind each of its changes (pods, policies, owned addresses, nodes,
//!   prefixes, connections that are cut);
//! - `Usage::turns`, which the programs raise behind each flow or mapping that they remove, and behind each reset;
//! - [`Config::route_generation`], for the next hop.
//!
//! An entry ends after [`LIFE_NS`]: then the road is walked again, which notes that flow and mapping are alive. What notes
//! more than that (SYN, FIN, RST), is not plain (fragments, options, a last hop, what is too long), or belongs to no flow
//! always walks the road.
//!
//! Entries are the CPU's own: nobody else writes them, and none is removed while it is read. Two flows that fall on one
//! place take turns.
#![expect(unsafe_code, reason = "map access is one of the three places for it")]

use aya_ebpf::btf_maps::PerCpuArray;
use aya_ebpf::macros::btf_map;
use egress_common::abi::{Addr, Config, Mapping, Tuple, Verdict};
use egress_common::decide::accept::Outer;
use egress_common::decide::{End, Rewrite, Tables};
use egress_common::wire::{Fragment, Frame, Heads, L4, tcp};

use crate::Outcome;
use crate::maps::{self, Maps, run_ns};
use crate::overlay;
use crate::packet::Packet;
use crate::roads;
use crate::run::Run;
use crate::way::{self, Way};
use crate::workspace::{self, Found, Workspace};

/// How long an entry serves (ns): with the steps in which `alive` notes, an entry of `nat` or `flows` may look idle for
/// less than half a second more than it is. Timeouts are whole seconds.
const LIFE_NS: u64 = 1 << 27;
/// A power of two.
const PLACES: u32 = 1024;
/// No place: the packet is not one to keep anything of.
const NOWHERE: u32 = u32::MAX;

#[btf_map(name = "recent")]
static RECENT: PerCpuArray<Recent, { PLACES as usize }> = PerCpuArray::new();

/// Value of `recent`. All zero is nobody's: there is no decision of the number zero.
#[repr(C)]
pub struct Recent {
    key: Tuple,
    /// Tunnel endpoint of the other node, of what came from it or goes to it.
    node: Addr,
    /// What is written: the egress IP as the source, or the pod as the destination.
    address: Addr,
    until_ns: u64,
    numbers: Numbers,
    route_generation: u32,
    ifindex: u32,
    mtu: u32,
    egress_id: u32,
    verdict: u32,
    port: u16,
    dmac: [u8; 6],
    smac: [u8; 6],
    reserved: [u8; 2],
}

/// What was in force before the road was walked.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Numbers {
    decisions: u32,
    turns: u32,
}

/// Where to keep what the road of this packet comes to, and under which numbers it is walked.
#[repr(C)]
pub struct Asked {
    place: u32,
    numbers: Numbers,
}

impl Asked {
    const fn nothing(&mut self) {
        self.place = NOWHERE;
    }
}

/// The hook that a packet is at: another one's entry is not for it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum At {
    Steer,
    Accept,
    Enter,
    Notice,
}

/// Sends a plain packet of a recent flow the way that the last one went; [`Outcome::NONE`] where the road must be walked,
/// and the packet is as it was.
#[inline(never)]
pub fn go(packet: Packet, config: &Config, workspace: &mut Workspace, at: At) -> Outcome {
    let Workspace { heads, asked, way, outer, .. } = workspace;
    asked.nothing();
    if !is_plain(heads) {
        return Outcome::NONE;
    }
    let numbers = Numbers { decisions: Maps.decisions(), turns: maps::turns() };
    let place = place_of(&heads.tuple);
    let Some(recent) = RECENT.get_ptr_mut(place) else { return Outcome::NONE };
    // SAFETY: the element is this CPU's own, and TC programs do not interrupt one another.
    let recent = unsafe { &*recent };
    let run = &Run { packet, config, heads };
    let is_current = numbers.decisions != 0
        && recent.numbers == numbers
        && recent.route_generation == config.route_generation
        && recent.key == heads.tuple
        && run_ns() < recent.until_ns;
    if !is_current {
        asked.place = place;
        asked.numbers = numbers;
        return Outcome::NONE;
    }
    let is = |verdict: Verdict| recent.verdict == verdict.index();
    let fits = run.wire_length() <= recent.mtu;
    let fits_outer = || fits && overlay::is_short(run, &recent.node) && (heads.l4 == L4::Tcp || packet.gso_size() == 0);
    match at {
        At::Steer if is(Verdict::SnatHere) && fits => out(run, recent, way, Verdict::SnatHere),
        At::Steer if is(Verdict::Steered) && fits_outer() => to_node(run, recent, way, Verdict::Steered),
        At::Accept if is(Verdict::SnatForNode) && fits && is_from(recent, outer) => {
            out(run, recent, way, Verdict::SnatForNode)
        }
        At::Enter if is(Verdict::ReplyHere) && fits => back(run, recent, way),
        At::Enter if is(Verdict::ReplySteered) && fits_outer() => to_node(run, recent, way, Verdict::ReplySteered),
        At::Steer if is(Verdict::NotSelected) => Outcome::done(Verdict::NotSelected),
        At::Steer if is(Verdict::ToCluster) => Outcome::done(Verdict::ToCluster),
        At::Steer if is(Verdict::ToOwnNode) => Outcome::done(Verdict::ToOwnNode),
        At::Steer if is(Verdict::InboundReply) => Outcome::done(Verdict::InboundReply),
        At::Notice if is(Verdict::NotOurs) => Outcome::done(Verdict::NotOurs),
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
fn is_plain(heads: &Heads) -> bool {
    const SAYS_MORE: u8 = tcp::SYN | tcp::FIN | tcp::RST;
    let is_whole = heads.fragment == Fragment::Whole && heads.has_l4() && heads.ttl > 1 && !heads.source_routed;
    is_whole
        && match heads.l4 {
            L4::Tcp => heads.tcp_flags & (SAYS_MORE | tcp::ACK) == tcp::ACK,
            L4::Udp => true,
            _ => false,
        }
}

#[inline(always)]
fn place_of(tuple: &Tuple) -> u32 {
    let ports = u32::from(tuple.sport()) << 16 | u32::from(tuple.dport());
    let mixed = (tuple.saddr.words()[3] ^ tuple.daddr.words()[3].rotate_left(7) ^ ports).wrapping_mul(0x9e37_79b1);
    mixed >> (u32::BITS - PLACES.ilog2())
}

/// The gateway is this node.
#[inline(always)]
fn out(run: &Run<'_>, recent: &Recent, way: &mut Way, verdict: Verdict) -> Outcome {
    let result = one_hop_less(run, verdict == Verdict::SnatHere)
        .and_then(|()| rewrite(run, recent, End::Source))
        .and_then(|()| way::go(run.packet, kept(recent, way)));
    if result.is_ok() {
        roads::count_egress(recent.egress_id, run.packet.len() as u32);
    }
    Outcome::redirected(verdict, result)
}

/// The pod is on this node.
#[inline(always)]
fn back(run: &Run<'_>, recent: &Recent, way: &mut Way) -> Outcome {
    roads::count_ingress(recent.egress_id, run.packet.len() as u32);
    let result = one_hop_less(run, true)
        .and_then(|()| rewrite(run, recent, End::Destination))
        .and_then(|()| way::go(run.packet, kept(recent, way)));
    Outcome::redirected(Verdict::ReplyHere, result)
}

/// The gateway, or the pod, is on another node.
#[inline(always)]
fn to_node(run: &Run<'_>, recent: &Recent, way: &mut Way, verdict: Verdict) -> Outcome {
    let is_reply = verdict == Verdict::ReplySteered;
    if is_reply {
        roads::count_ingress(recent.egress_id, run.packet.len() as u32);
    }
    let result = one_hop_less(run, true)
        .and_then(|()| if is_reply { rewrite(run, recent, End::Destination) } else { Ok(()) })
        .and_then(|()| overlay::encapsulate_by(run, &recent.node, recent.egress_id, kept(recent, way)));
    Outcome::redirected(verdict, result)
}

/// The next hop as it was.
#[inline(always)]
fn kept<'a>(recent: &Recent, way: &'a mut Way) -> &'a mut Way {
    way.resolve = false;
    way.ifindex = recent.ifindex;
    way.dmac = recent.dmac;
    way.smac = recent.smac;
    way
}

/// The node where the pod is takes one, out and back.
#[inline(always)]
fn one_hop_less(run: &Run<'_>, is_pods_node: bool) -> Result<(), Verdict> {
    if is_pods_node { run.packet.decrement_ttl(run.heads) } else { Ok(()) }
}

#[inline(always)]
fn rewrite(run: &Run<'_>, recent: &Recent, end: End) -> Result<(), Verdict> {
    run.packet.rewrite(run.heads, &Rewrite { end, addr: recent.address, port: recent.port })
}

/// Keeps what the road of this packet came to, where there is a place for it.
#[inline(always)]
fn note(run: &Run<'_>, verdict: Verdict, write: impl Fn(&mut Recent)) {
    let Some(asked) = workspace::asked() else { return };
    if asked.place == NOWHERE {
        return;
    }
    let Some(recent) = RECENT.get_ptr_mut(asked.place) else { return };
    // SAFETY: as in `go`.
    let recent = unsafe { &mut *recent };
    recent.key = run.heads.tuple;
    recent.until_ns = run_ns() + LIFE_NS;
    recent.numbers = asked.numbers;
    recent.route_generation = run.config.route_generation;
    recent.verdict = verdict.index();
    write(recent);
}

/// A packet that went by a next hop that is known, with another end where `rewrite` says so. `node` is the tunnel endpoint
/// of the other node, `mtu` what the way takes of packets like this one.
#[inline(always)]
fn note_way(run: &Run<'_>, verdict: Verdict, egress_id: u32, node: &Addr, rewrite: &Rewrite, way: &Way, mtu: u32) {
    if way.resolve {
        return;
    }
    note(run, verdict, |recent| {
        recent.node = *node;
        recent.egress_id = egress_id;
        recent.address = rewrite.addr;
        recent.port = rewrite.port;
        recent.ifindex = way.ifindex;
        recent.mtu = mtu;
        recent.dmac = way.dmac;
        recent.smac = way.smac;
    });
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
    note_way(run, verdict, mapping.egress_id, &mapping.source_node, &rewrite, way, way.mtu);
}

/// A packet of a pod of this node that went to its gateway.
#[inline(never)]
pub fn note_steered(run: &Run<'_>, egress_id: u32, gateway: &Addr, way: &Way) {
    let rewrite = Rewrite { end: End::Source, addr: Addr::UNSPECIFIED, port: 0 };
    let mtu = overlay::inner_mtu(gateway, way.mtu).min(run.config.overlay_mtu);
    note_way(run, Verdict::Steered, egress_id, gateway, &rewrite, way, mtu);
}

/// An answer that went to the node of its pod.
#[inline(never)]
pub fn note_reply_steered(run: &Run<'_>, mapping: &Mapping, way: &Way) {
    let node = &mapping.source_node;
    let mtu = overlay::inner_mtu(node, way.mtu).min(run.config.overlay_mtu).min(run.config.pod_mtu);
    note_way(run, Verdict::ReplySteered, mapping.egress_id, node, &Rewrite::reverse(mapping), way, mtu);
}

/// A packet that was left alone, whatever its length.
#[inline(never)]
pub fn note_left_alone(run: &Run<'_>, verdict: Verdict) {
    if matches!(
        verdict,
        Verdict::NotSelected | Verdict::ToOwnNode | Verdict::ToCluster | Verdict::InboundReply | Verdict::NotOurs
    ) {
        note(run, verdict, |_| {});
    }
}
