//! `from_netdev`: uplink, TC ingress. What the world sends to this node.
//!
//! Replies to an egress IP go to the pod, here or on another node. ARP and neighbour discovery for owned egress IPs are
//! answered, and other hosts that claim one are reported. Plain overlay packets are taken out of their outer headers.

use egress_common::abi::{Addr, Config, ConflictEvent, Direction, NatEntry, OwnedAddr, Verdict};
use egress_common::decide::Tables;
use egress_common::decide::from_netdev::{self, FromNetdev};
use egress_common::decide::mtu::{self, Fit};
use egress_common::wire::icmp::v6 as icmp_v6;
use egress_common::wire::nd::{self, ADVERTISEMENT_LEN, Solicitation};
use egress_common::wire::{ETH_LEN, Frame, Headers, PROTO_ICMPV6, Quote, arp as wire_arp, ethertype};

use crate::counters::{self, may_report};
use crate::fib::{self, Route, lookup_to_pod};
use crate::flow_cache::{self, at};
use crate::fragment::{self, Rest};
use crate::from_overlay::{by_overlay, never_passed, take_inner};
use crate::icmp::{self, Buffer};
use crate::maps::{EVENTS, Maps};
use crate::overlay::{self, pass_on};
use crate::packet::Packet;
use crate::rewrite::restore;
use crate::workspace::{Run, Workspace, parse, quoted};
use crate::{Outcome, verifier};

pub fn begin(packet: Packet, config: &Config, workspace: &mut Workspace) -> Outcome {
    if packet.is_tagged() || packet.is_for_another_host() {
        return Outcome::done(Verdict::NotOurs);
    }
    let Workspace { headers, outer, .. } = workspace;
    if packet.load(12).map(u16::from_be_bytes) == Some(ethertype::ARP) {
        *headers = Headers::NONE;
        return answer_arp(packet, config);
    }
    if let Some(verdict) = parse(packet, headers, Direction::Ingress) {
        return Outcome::done(verdict);
    }
    if overlay::is_for_us(headers, config) && overlay::decapsulate(packet, headers, outer) {
        let outcome = take_inner(packet, config, workspace);
        return if outcome.is_none() { Outcome::BY_OVERLAY } else { never_passed(outcome) };
    }
    if from_netdev::is_left_alone(headers, config) {
        return Outcome::done(Verdict::NotOurs);
    }
    flow_cache::go::<{ at::FROM_NETDEV }>(packet, config, workspace)
}

#[inline(always)]
pub fn finish(packet: Packet, outcome: Outcome) -> Outcome {
    if outcome.is_none() {
        let outcome = verifier::neighbour(packet);
        if outcome.is_none() { fragment::judge(verifier::from_netdev(packet), packet) } else { outcome }
    } else if outcome.is_by_overlay() {
        never_passed(by_overlay(packet))
    } else {
        outcome
    }
}

/// ARP on the uplink: answered where the target is an owned egress IP, and told of where another host says to have one.
#[inline(never)]
pub fn answer_arp(packet: Packet, config: &Config) -> Outcome {
    let Some(message) = wire_arp::Message::parse(&packet) else {
        return Outcome::done(Verdict::NotOurs);
    };
    let contested = is_contested(&message.sender(), &message.sender_mac);
    let otherwise = Outcome::done(if contested { Verdict::AddressConflict } else { Verdict::NotOurs });
    if !message.is_request() {
        return otherwise;
    }
    let Some(owned) = held(&message.target()) else {
        return otherwise;
    };
    if packet.store(0, message.answer(owned.mac)).is_none() {
        return Outcome::done(Verdict::RewriteFailed);
    }
    Outcome::redirected(Verdict::ArpAnswered, fib::send_back(packet, config))
}

/// Neighbour discovery that concerns an owned egress IP; nothing where it is anything else. Apart from the rest of the road,
/// whose frames would leave no room on the stack.
#[inline(always)]
pub fn neighbour_discovery(packet: Packet, config: &Config, workspace: &mut Workspace) -> Outcome {
    let Workspace { headers, buffer, .. } = workspace;
    if headers.tuple.protocol != PROTO_ICMPV6 {
        return Outcome::NONE;
    }
    answer_neighbour(packet, config, headers, buffer).unwrap_or(Outcome::NONE)
}

/// Neighbour discovery on the uplink, likewise; `None` where it is anything else, or may not be believed.
#[inline(never)]
pub fn answer_neighbour(packet: Packet, config: &Config, headers: &Headers, frame: &mut Buffer) -> Option<Outcome> {
    let sender = &headers.tuple.saddr;
    let (kind, target) = nd::about(&packet)?;
    let owned = held(&target)?;
    packet.pull_long_headers();
    let message = verifier::believed(packet)?;
    // A host that detects duplicates is about to have the address.
    let claims = message.overrides() || *sender == Addr::UNSPECIFIED;
    let contested = claims && is_contested(&target, &message.link(&packet)?);
    if kind != icmp_v6::NEIGHBOUR_SOLICITATION {
        return contested.then_some(Outcome::done(Verdict::AddressConflict));
    }
    let solicitation = Solicitation { sender_mac: packet.load(6)?, sender, target };
    solicitation.answer(owned.mac, frame);
    let result = packet
        .resize(ADVERTISEMENT_LEN as u32)
        .and_then(|()| packet.store_summed(ETH_LEN, &frame[ETH_LEN..]))
        .and_then(|()| packet.set_macs(solicitation.answer_mac(), owned.mac));
    if result.is_none() {
        return Some(Outcome::done(Verdict::RewriteFailed));
    }
    Some(Outcome::redirected(Verdict::NeighbourAnswered, fib::send_back(packet, config)))
}

/// Whether it is an owned egress IP that has another link address here; if so, user space hears of it.
#[inline(never)]
fn is_contested(address: &Addr, mac: &[u8; 6]) -> bool {
    let is_anothers = held(address).is_some_and(|owned| owned.mac != *mac);
    if is_anothers {
        let now = Maps.now_ns();
        if may_report::<{ counters::CONFLICTS }>(now) {
            let event = ConflictEvent { time_ns: now, address: *address, mac: *mac, reserved: [0; 2] };
            // A full ring buffer loses the event; the counter has it.
            let _full = EVENTS.output_untyped::<ConflictEvent>(event, 0);
        }
    }
    is_anothers
}

/// An address that has been handed over is answered for by its new node, though replies for it are still taken here. Its
/// object may have another address on this node by then. Without a lease nothing is answered for: another node may have the
/// address.
#[inline(never)]
fn held(target: &Addr) -> Option<&'static OwnedAddr> {
    // Asked first. Behind the looks `is_contested` is never true on Linux 6.1 (the tests of neighbour discovery notice it there).
    // Why is not known; its verifier, which cuts out branches that it takes for dead, is the suspect.
    if !Maps.has_lease() {
        return None;
    }
    let owned = Maps.owned_addr(target)?;
    let held = Maps.owned(owned.egress_id)?;
    (held.address == *target).then_some(owned)
}

/// A packet of the world, of no recent flow.
#[inline(always)]
pub fn uncached(packet: Packet, config: &Config, workspace: &mut Workspace) -> Outcome {
    let Workspace { headers, quote, .. } = workspace;
    let quote = quoted(packet, headers, quote);
    let decision = from_netdev::decide(headers, quote, &Maps, config);
    let outcome = back(packet, config, workspace, decision);
    match outcome.mtu_exceeded() {
        Some(mtu) => {
            let Workspace { headers, buffer, .. } = workspace;
            icmp::error_to_world(&Run { packet, config, headers }, buffer, mtu)
        }
        None => outcome,
    }
}

/// What becomes of a packet for an address of this node.
#[inline(always)]
pub fn back(packet: Packet, config: &Config, workspace: &mut Workspace, decision: FromNetdev<'_>) -> Outcome {
    let Workspace { headers, quote, route, rest, .. } = workspace;
    let run = &Run { packet, config, headers };
    match decision {
        FromNetdev::Done(verdict) => Outcome::done(verdict),
        FromNetdev::ReplyHere { nat_entry } => reply_here(run, quote, route, rest, nat_entry),
        FromNetdev::ReplyRemote { nat_entry } => reply_remote(run, quote, route, nat_entry),
        FromNetdev::NodeReply { nat_entry } => match restore(run, quote, nat_entry) {
            Ok(()) => Outcome::done(Verdict::NodeReply),
            Err(verdict) => Outcome::done(verdict),
        },
        FromNetdev::PassOn { egress_id } => pass_on(run, route, egress_id),
    }
}

#[inline(always)]
fn reply_here(run: &Run<'_>, quote: &Quote, route: &mut Route, rest: &mut Rest, nat_entry: &NatEntry) -> Outcome {
    let Run { packet, headers, .. } = *run;
    counters::back(nat_entry.egress_id, packet.len() as u32);
    let lookup = lookup_to_pod(run, &nat_entry.other.saddr, &nat_entry.hop, Some(nat_entry.seal));
    if let Some(verdict) = fib::resolve_route(run, &lookup, route) {
        return Outcome::done(verdict);
    }
    let oversize = run.wire_length() > route.mtu;
    if oversize && !fragment::fits_in_two(run, route.mtu) {
        return Outcome::too_big(route.mtu);
    }
    let result = packet
        .decrement_ttl(headers)
        .and_then(|()| restore(run, quote, nat_entry))
        .and_then(|()| if oversize { fragment::send_in_two(run, route, rest) } else { fib::go(run, route) });
    let outcome = Outcome::redirected(Verdict::ReplyHere, result);
    flow_cache::store_translated(run, outcome, route);
    outcome
}

#[inline(always)]
fn reply_remote(run: &Run<'_>, quote: &Quote, route: &mut Route, nat_entry: &NatEntry) -> Outcome {
    let Run { packet, config, headers } = *run;
    counters::back(nat_entry.egress_id, packet.len() as u32);
    let length = run.wire_length();
    // What may be fragmented is: outside on the way through the overlay, and by the pod's node.
    let whole = match mtu::fit(length, config.overlay_mtu, headers, &nat_entry.source_node) {
        Fit::Tell(limit) => return Outcome::too_big(limit.min(config.pod_mtu)),
        Fit::Lost => return Outcome::done(Verdict::OverlayTooNarrow),
        _ if length > config.pod_mtu && !headers.may_be_fragmented() => return Outcome::too_big(config.pod_mtu),
        Fit::Cut => false,
        Fit::Whole => true,
    };
    let result = packet
        .decrement_ttl(headers)
        .and_then(|()| restore(run, quote, nat_entry))
        .and_then(|()| overlay::encapsulate(run, &nat_entry.source_node, nat_entry.egress_id, whole, route));
    if result.is_ok() {
        flow_cache::store_reply_to_node(run, nat_entry, route);
    }
    Outcome::redirected(Verdict::ReplyToNode, result)
}
