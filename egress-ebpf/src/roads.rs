//! The roads: for each hook, the decision and what it asks of the packet. One file, so that a road can be read to its end.

use egress_common::abi::{Addr, Config, Direction, NODE_MARK, NatEntry, NextHop, Origin, Slot, SlotPlace, Verdict};
use egress_common::decide::from_netdev::{self, FromNetdev};
use egress_common::decide::from_overlay::{FromOverlay, Outer};
use egress_common::decide::from_pod::FromPod;
use egress_common::decide::mtu::{self, Fit};
use egress_common::decide::snat::{self, Face};
use egress_common::decide::to_netdev::{Meta, ToNetdev};
use egress_common::decide::{self, Owner, Rewrite, Tables};
use egress_common::wire::icmp::Answer;
use egress_common::wire::{ETH_LEN, Frame, Headers, PROTO_ICMPV6, Quote, ethertype};

use crate::fragment::{self, Rest};
use crate::maps::Maps;
use crate::packet::Packet;
use crate::passing::{by_overlay, handed_over, never_passed, pass_on};
use crate::recent::{self, at};
use crate::run::{Run, parse, quoted, restore, rewrite};
use crate::way::{self, Journey, Way};
use crate::workspace::{Found, Workspace, found};
use crate::{Outcome, answer, apart, counters, hold, overlay, ways};

/// A road that has been walked to its end.
#[inline(always)]
pub fn walked(_packet: Packet, outcome: Outcome) -> Outcome {
    outcome
}

pub fn from_pod(packet: Packet, config: &Config, workspace: &mut Workspace) -> Outcome {
    if packet.is_tagged() {
        return Outcome::done(Verdict::NotOurs);
    }
    if packet.is_for_another_host() {
        // The stack will not forward it.
        return Outcome::done(Verdict::NotPod);
    }
    if let Some(why) = parse(packet, &mut workspace.heads, Direction::Egress) {
        return Outcome::done(decide::from_pod::unread(why, &packet));
    }
    if packet.is_completed_elsewhere(&workspace.heads) {
        return Outcome::done(Verdict::Malformed);
    }
    recent::go::<{ at::FROM_POD }>(packet, config, workspace)
}

#[inline(always)]
pub fn from_pod_rest(packet: Packet, outcome: Outcome) -> Outcome {
    if outcome.is_none() { hold::judge(apart::from_pod(packet), packet) } else { outcome }
}

/// A packet of a pod of this node, of no recent flow.
#[inline(always)]
pub fn from_pod_uncached(packet: Packet, config: &Config, workspace: &mut Workspace) -> Outcome {
    let Workspace { heads, quote, way, buffer, .. } = workspace;
    let quote = quoted(packet, heads, quote);
    let decision = decide::from_pod::decide(heads, quote, &Maps, config);
    let run = &Run { packet, config, heads };
    match decision {
        FromPod::Done(verdict) => {
            recent::note_left_alone(run, verdict);
            Outcome::done(verdict)
        }
        FromPod::Hairpin => answer::to_pod(run, buffer, Answer::Prohibited, Verdict::Hairpin),
        FromPod::Reset(verdict) => answer::reset_pod(run, buffer, verdict),
        FromPod::Mark => {
            packet.set_mark(packet.mark() | NODE_MARK);
            Outcome::done(Verdict::MarkedNode)
        }
        FromPod::Send { egress_id, slot } => {
            let outcome = match slot.place() {
                SlotPlace::Here => match snat_here(run, quote, egress_id, slot) {
                    None => out_kept(run, quote, way),
                    Some(Verdict::NotGateway) => handed_over(run, way, egress_id),
                    Some(verdict) => counters::refused(egress_id, verdict),
                },
                SlotPlace::Remote => to_gateway(run, way, egress_id, slot),
            };
            match outcome.mtu_exceeded() {
                Some(mtu) => answer::to_pod(run, buffer, Answer::TooBig(mtu), Verdict::MtuExceeded),
                None if outcome.is(Verdict::PortTaken) => answer::reset_pod(run, buffer, Verdict::PortTaken),
                None => outcome,
            }
        }
    }
}

// The searches for a mapping are out of line, so that their frames lie beside those of what follows. They return why
// there is none; the mapping, and the address that it shows, lie in the workspace.

/// The gateway is this node.
#[inline(never)]
fn snat_here(run: &Run<'_>, quote: &Quote, egress_id: u32, slot: &Slot) -> Option<Verdict> {
    let owner = Owner { origin: Origin::Here, source_node: Addr::UNSPECIFIED, egress_id };
    // The policy may be ahead of the ownership; without it nobody would answer for the address.
    let Some(owned) = Maps.owned(egress_id).filter(|owned| owned.address == slot.address) else {
        return Some(Verdict::NotGateway);
    };
    let face = Face { address: owned.address, ports: snat::EGRESS_PORTS };
    snat::translate(run.heads, quote, &Maps, &face, &owner).err()
}

/// As [`snat_here`], for a pod of another node.
#[inline(never)]
fn snat_for_node(run: &Run<'_>, quote: &Quote, outer: &Outer, source_node: &Addr) -> Option<Verdict> {
    let Some(found) = found() else { return Some(Verdict::BadState) };
    let owned = &found.owned;
    decide::from_overlay::translate(run.heads, quote, &Maps, owned, outer.egress_id, source_node, run.config).err()
}

/// As [`snat_here`], on the node's own address.
#[inline(never)]
fn snat_node(run: &Run<'_>, quote: &Quote) -> Option<Verdict> {
    decide::to_netdev::translate(run.heads, quote, &Maps, run.config).err()
}

/// Settles the way of a packet that has found its mapping. Out of line as that.
#[inline(never)]
fn way_out(run: &Run<'_>, way: &mut Way) -> Option<Verdict> {
    let Some(Found { mapping, owned, .. }) = found() else { return Some(Verdict::BadState) };
    let journey = Journey {
        saddr: &owned.address,
        daddr: &run.heads.tuple.daddr,
        ifindex: owned.ifindex,
        as_routed: false,
        device_mtu: run.config.uplink_mtu,
        kept: &mapping.hop,
        by_mapping: true,
        seal: mapping.seal,
    };
    way::settle(run, &journey, way)
}

/// As [`out_by_uplink`], and kept for the next packets.
#[inline(always)]
fn out_kept(run: &Run<'_>, quote: &Quote, way: &mut Way) -> Outcome {
    let outcome = out_by_uplink(run, quote, way);
    recent::note_mapped(run, outcome, way);
    outcome
}

/// Settles the way, checks the length, rewrites, goes. The TTL is taken down by the node where the pod is. Out of line, so
/// that its frame lies beside those of the search for a mapping.
#[inline(never)]
fn out_by_uplink(run: &Run<'_>, quote: &Quote, way: &mut Way) -> Outcome {
    let Run { packet, heads, .. } = *run;
    let Some(Found { mapping, .. }) = found() else { return Outcome::done(Verdict::BadState) };
    let source = Rewrite::snat(mapping);
    if let Some(verdict) = way_out(run, way) {
        return Outcome::done(verdict);
    }
    let limit = way.mtu;
    if run.wire_length() > limit {
        return Outcome::too_big(limit);
    }
    let here = mapping.origin() == Some(Origin::Here);
    if here && let Err(verdict) = packet.decrement_ttl(heads) {
        return Outcome::done(verdict);
    }
    if let Err(verdict) = rewrite(run, quote, &source) {
        return Outcome::done(verdict);
    }
    let verdict = if here { Verdict::SnatHere } else { Verdict::SnatForNode };
    let result = way::go(run, way);
    if way.resolve {
        packet.set_waiting(run.config, mapping.egress_id);
    }
    if result.is_ok() {
        counters::out(mapping.egress_id, packet.len() as u32);
    }
    Outcome::redirected(verdict, result)
}

/// The gateway is another node.
#[inline(always)]
fn to_gateway(run: &Run<'_>, way: &mut Way, egress_id: u32, slot: &Slot) -> Outcome {
    let Run { packet, config, heads } = *run;
    let whole = match mtu::fit(run.wire_length(), config.overlay_mtu, heads, &slot.endpoint) {
        Fit::Tell(limit) => return Outcome::too_big(limit),
        Fit::Lost => return Outcome::done(Verdict::OverlayTooNarrow),
        // Outside, so that it arrives whole.
        Fit::Cut => false,
        Fit::Whole => true,
    };
    let result =
        packet.decrement_ttl(heads).and_then(|()| overlay::encapsulate(run, &slot.endpoint, egress_id, whole, way));
    if result.is_ok() {
        recent::note_to_gateway(run, egress_id, &slot.endpoint, way);
    }
    Outcome::redirected(Verdict::ToGateway, result)
}

pub fn from_overlay(packet: Packet, config: &Config, workspace: &mut Workspace) -> Outcome {
    // A service of the host has led it to this node's own tunnel port, whoever it says that it is from.
    if packet.is_of_pod() {
        return Outcome::done(Verdict::ForgedOuter);
    }
    if !overlay::read_outer(packet, config, &mut workspace.outer) {
        return Outcome::done(Verdict::ForgedOuter);
    }
    // Agents ask each other whether the overlay carries anything; only nodes get through to them.
    if workspace.outer.egress_id == 0 && packet.load(ETH_LEN - 2) == Some(ethertype::ECHO.to_be_bytes()) {
        let is_from_node = decide::from_overlay::sender(&workspace.outer, &Maps).is_some();
        return Outcome::done(if is_from_node { Verdict::NotIp } else { Verdict::ForgedOuter });
    }
    begin_from_overlay(packet, config, workspace)
}

#[inline(always)]
pub fn from_overlay_rest(packet: Packet, outcome: Outcome) -> Outcome {
    if outcome.is_none() { by_overlay(packet) } else { outcome }
}

/// A packet out of the overlay, whoever has taken its outer headers off.
#[inline(never)]
fn begin_from_overlay(packet: Packet, config: &Config, workspace: &mut Workspace) -> Outcome {
    if packet.is_tagged() {
        return Outcome::done(Verdict::Malformed);
    }
    if let Some(why) = parse(packet, &mut workspace.heads, Direction::Egress) {
        return Outcome::done(decide::from_overlay::unread(why));
    }
    recent::go::<{ at::FROM_OVERLAY }>(packet, config, workspace)
}

/// Likewise, of no recent flow. [`Outcome::NONE`] where it is for `passing::handover_reply`.
#[inline(always)]
pub fn from_overlay_uncached(packet: Packet, config: &Config, workspace: &mut Workspace) -> Outcome {
    let Workspace { heads, quote, way, rest, buffer, outer, .. } = workspace;
    let outer = &*outer;
    let quote = quoted(packet, heads, quote);
    let decision = decide::from_overlay::decide(heads, outer, &Maps, config);
    let run = &Run { packet, config, heads };
    let source_node = match decision {
        FromOverlay::Done(verdict) => return Outcome::done(verdict),
        FromOverlay::Deliver => {
            let outcome = deliver(run, way, rest);
            recent::note_delivered(run, outcome, outer, way);
            return outcome;
        }
        FromOverlay::PassOn => return pass_on(run, way, outer.egress_id),
        FromOverlay::Answer => return Outcome::NONE,
        // The address lies in the workspace.
        FromOverlay::Translate { owned: _, source_node } => source_node,
    };
    let outcome = match snat_for_node(run, quote, outer, source_node) {
        None => out_kept(run, quote, way),
        Some(verdict) => counters::refused(outer.egress_id, verdict),
    };
    match outcome.mtu_exceeded() {
        Some(mtu) => answer::to_remote_pod(run, buffer, outer, mtu),
        None if outcome.is(Verdict::PortTaken) => answer::reset_remote_pod(run, buffer, outer, Verdict::PortTaken),
        None => outcome,
    }
}

/// A reply from a gateway, for a pod of this node; the gateway has done everything but the last hop.
#[inline(never)]
fn deliver(run: &Run<'_>, way: &mut Way, rest: &mut Rest) -> Outcome {
    let journey = journey_to_pod(run, &run.heads.tuple.daddr, ways::kept_hop(&run.heads.tuple.daddr), None);
    if let Some(verdict) = way::settle(run, &journey, way) {
        return Outcome::done(verdict);
    }
    let oversize = run.wire_length() > way.mtu;
    if oversize && !fragment::fits_in_two(run, way.mtu) {
        // The gateway answers what cannot be fragmented; this one is larger than two pieces.
        return Outcome::done(Verdict::MtuExceeded);
    }
    let result = if oversize { fragment::send_in_two(run, way, rest) } else { way::go(run, way) };
    Outcome::redirected(Verdict::ReplyDelivered, result)
}

#[inline(always)]
fn journey_to_pod<'a>(run: &Run<'a>, pod: &'a Addr, kept: &'a NextHop, mapping: Option<u32>) -> Journey<'a> {
    Journey {
        saddr: &run.heads.tuple.saddr,
        daddr: pod,
        ifindex: run.config.mgmt_ifindex,
        as_routed: false,
        device_mtu: run.config.pod_mtu,
        kept,
        by_mapping: mapping.is_some(),
        seal: mapping.unwrap_or(0),
    }
}

pub fn from_netdev(packet: Packet, config: &Config, workspace: &mut Workspace) -> Outcome {
    if packet.is_tagged() || packet.is_for_another_host() {
        return Outcome::done(Verdict::NotOurs);
    }
    let Workspace { heads, outer, .. } = workspace;
    if packet.load(12).map(u16::from_be_bytes) == Some(ethertype::ARP) {
        *heads = Headers::NONE;
        return answer::arp(packet, config);
    }
    if let Some(verdict) = parse(packet, heads, Direction::Ingress) {
        return Outcome::done(verdict);
    }
    if overlay::is_for_us(heads, config) && overlay::decapsulate(packet, heads, outer) {
        let outcome = begin_from_overlay(packet, config, workspace);
        return if outcome.is_none() { Outcome::BY_OVERLAY } else { never_passed(outcome) };
    }
    if from_netdev::is_left_alone(heads, config) {
        return Outcome::done(Verdict::NotOurs);
    }
    recent::go::<{ at::FROM_NETDEV }>(packet, config, workspace)
}

#[inline(always)]
pub fn from_netdev_rest(packet: Packet, outcome: Outcome) -> Outcome {
    if outcome.is_none() {
        let outcome = apart::neighbour(packet);
        if outcome.is_none() { hold::judge(apart::from_netdev(packet), packet) } else { outcome }
    } else if outcome.is_by_overlay() {
        never_passed(by_overlay(packet))
    } else {
        outcome
    }
}

/// Neighbour discovery that concerns an owned egress IP; nothing where it is anything else. Apart from the rest of the road,
/// whose frames would leave no room on the stack.
#[inline(always)]
pub fn neighbour(packet: Packet, config: &Config, workspace: &mut Workspace) -> Outcome {
    let Workspace { heads, buffer, .. } = workspace;
    if heads.tuple.protocol != PROTO_ICMPV6 {
        return Outcome::NONE;
    }
    answer::neighbour(packet, config, heads, buffer).unwrap_or(Outcome::NONE)
}

/// A packet of the world, of no recent flow.
#[inline(always)]
pub fn from_netdev_uncached(packet: Packet, config: &Config, workspace: &mut Workspace) -> Outcome {
    let Workspace { heads, quote, .. } = workspace;
    let quote = quoted(packet, heads, quote);
    let decision = from_netdev::decide(heads, quote, &Maps, config);
    let outcome = back(packet, config, workspace, decision);
    match outcome.mtu_exceeded() {
        Some(mtu) => {
            let Workspace { heads, buffer, .. } = workspace;
            answer::to_world(&Run { packet, config, heads }, buffer, mtu)
        }
        None => outcome,
    }
}

/// What becomes of a packet for an address of this node.
#[inline(always)]
pub fn back(packet: Packet, config: &Config, workspace: &mut Workspace, decision: FromNetdev<'_>) -> Outcome {
    let Workspace { heads, quote, way, rest, .. } = workspace;
    let run = &Run { packet, config, heads };
    match decision {
        FromNetdev::Done(verdict) => Outcome::done(verdict),
        FromNetdev::ReplyHere { mapping } => reply_here(run, quote, way, rest, mapping),
        FromNetdev::ReplyRemote { mapping } => reply_remote(run, quote, way, mapping),
        FromNetdev::NodeReply { mapping } => match restore(run, quote, mapping) {
            Ok(()) => Outcome::done(Verdict::NodeReply),
            Err(verdict) => Outcome::done(verdict),
        },
        FromNetdev::PassOn { egress_id } => pass_on(run, way, egress_id),
    }
}

#[inline(always)]
fn reply_here(run: &Run<'_>, quote: &Quote, way: &mut Way, rest: &mut Rest, mapping: &NatEntry) -> Outcome {
    let Run { packet, heads, .. } = *run;
    counters::back(mapping.egress_id, packet.len() as u32);
    let journey = journey_to_pod(run, &mapping.other.saddr, &mapping.hop, Some(mapping.seal));
    if let Some(verdict) = way::settle(run, &journey, way) {
        return Outcome::done(verdict);
    }
    let oversize = run.wire_length() > way.mtu;
    if oversize && !fragment::fits_in_two(run, way.mtu) {
        return Outcome::too_big(way.mtu);
    }
    let result = packet
        .decrement_ttl(heads)
        .and_then(|()| restore(run, quote, mapping))
        .and_then(|()| if oversize { fragment::send_in_two(run, way, rest) } else { way::go(run, way) });
    let outcome = Outcome::redirected(Verdict::ReplyHere, result);
    recent::note_mapped(run, outcome, way);
    outcome
}

#[inline(always)]
fn reply_remote(run: &Run<'_>, quote: &Quote, way: &mut Way, mapping: &NatEntry) -> Outcome {
    let Run { packet, config, heads } = *run;
    counters::back(mapping.egress_id, packet.len() as u32);
    let length = run.wire_length();
    // What may be fragmented is: outside on the way through the overlay, and by the pod's node.
    let whole = match mtu::fit(length, config.overlay_mtu, heads, &mapping.source_node) {
        Fit::Tell(limit) => return Outcome::too_big(limit.min(config.pod_mtu)),
        Fit::Lost => return Outcome::done(Verdict::OverlayTooNarrow),
        _ if length > config.pod_mtu && !heads.may_be_fragmented() => return Outcome::too_big(config.pod_mtu),
        Fit::Cut => false,
        Fit::Whole => true,
    };
    let result = packet
        .decrement_ttl(heads)
        .and_then(|()| restore(run, quote, mapping))
        .and_then(|()| overlay::encapsulate(run, &mapping.source_node, mapping.egress_id, whole, way));
    if result.is_ok() {
        recent::note_reply_to_node(run, mapping, way);
    }
    Outcome::redirected(Verdict::ReplyToNode, result)
}

/// In one word: the mark's bits, and two of ours above them. Out of line, since `to_netdev` has no stack to spare.
#[inline(never)]
fn meta_word(packet: Packet) -> u64 {
    u64::from(packet.mark()) | u64::from(packet.is_forwarded()) << 32 | u64::from(packet.is_returning()) << 33
}

#[inline(always)]
fn meta_of(packet: Packet) -> Meta {
    let word = meta_word(packet);
    Meta { mark: word as u32, forwarded: word >> 32 & 1 != 0, returning: word >> 33 & 1 != 0 }
}

pub fn to_netdev(packet: Packet, config: &Config, workspace: &mut Workspace) -> Outcome {
    // A build that logs comes here with all packets.
    if packet.takes_off_redirected(config) || packet.is_tagged() {
        return Outcome::done(Verdict::NotOurs);
    }
    let Workspace { heads, quote, way, buffer, .. } = workspace;
    if let Some(egress_id) = packet.take_waiting(config) {
        *heads = Headers::NONE;
        return answer::waited(packet, egress_id);
    }
    if let Some(verdict) = parse(packet, heads, Direction::Egress) {
        return Outcome::done(verdict);
    }
    let quote = quoted(packet, heads, quote);
    let meta = meta_of(packet);
    let decision = decide::to_netdev::decide(heads, quote, &meta, &Maps, config);
    let run = &Run { packet, config, heads };
    match decision {
        ToNetdev::Done(verdict) => Outcome::done(verdict),
        ToNetdev::Unmark => {
            packet.set_mark(meta.mark & !NODE_MARK);
            Outcome::done(Verdict::NodeSnatDone)
        }
        ToNetdev::NodeSnat => {
            packet.set_mark(meta.mark & !NODE_MARK);
            let verdict = match (snat_node(run, quote), found()) {
                (None, Some(found)) => match rewrite(run, quote, &Rewrite::snat(&found.mapping)) {
                    Ok(()) => Verdict::NodeSnat,
                    Err(verdict) => verdict,
                },
                (Some(verdict), _) => verdict,
                (None, None) => Verdict::BadState,
            };
            match verdict {
                Verdict::PortTaken => answer::reset_pod_from_uplink(run, buffer, way, verdict),
                _ => Outcome::done(verdict),
            }
        }
    }
}

pub fn to_pod(packet: Packet, config: &Config, workspace: &mut Workspace) -> Outcome {
    // As in `to_netdev`.
    if packet.takes_off_redirected(config) || packet.is_tagged() {
        return Outcome::done(Verdict::NotOurs);
    }
    if let Some(verdict) = parse(packet, &mut workspace.heads, Direction::Ingress) {
        return Outcome::done(verdict);
    }
    let outcome = recent::go::<{ at::TO_POD }>(packet, config, workspace);
    if !outcome.is_none() {
        return outcome;
    }
    let run = &Run { packet, config, heads: &workspace.heads };
    if packet.is_of_pod() && decide::to_pod::is_made_up(run.heads, &Maps) {
        return Outcome::done(Verdict::NotOurs);
    }
    let verdict = decide::to_pod::decide(run.heads, &Maps, config);
    recent::note_left_alone(run, verdict);
    Outcome::done(verdict)
}
