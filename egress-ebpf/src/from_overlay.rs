//! `from_overlay`: overlay device, TC ingress. Packets from other nodes.
//!
//! On a gateway these are packets of pods, which leave by the uplink with the egress IP; on the pod's node, replies
//! from the gateway. `from_netdev` calls this too, for packets that it has decapsulated. The stack would forward such a
//! packet with the pod's address, so none passes.

use egress_common::abi::{Class, Config, Direction, Verdict};
use egress_common::decide::from_overlay::{self, FromOverlay};
use egress_common::decide::{self, from_netdev};

use egress_common::wire::{ETH_LEN, Frame, ethertype};

use crate::fib::{self, Route, lookup_to_pod};
use crate::flow_cache::{self, at};
use crate::fragment::{self, Rest};
use crate::from_netdev::apply;
use crate::maps::Maps;
use crate::nat::{out_cached, snat_for_node};
use crate::overlay::{self, pass_on};
use crate::packet::Packet;
use crate::workspace::{Run, Workspace, parse, quoted};
use crate::{FastCheck, Outcome, counters, icmp, verifier};

pub fn begin(packet: Packet, config: &Config, workspace: &mut Workspace, _: FastCheck) -> Option<Outcome> {
    // A pod's packet that a Service has redirected to this node's own tunnel port.
    if packet.is_of_pod() {
        return Some(Outcome::done(Verdict::ForgedOuter));
    }
    if !overlay::read_outer(packet, config, &mut workspace.outer) {
        return Some(Outcome::done(Verdict::ForgedOuter));
    }
    // Probes of agents; accepted from nodes only.
    if workspace.outer.egress_id == 0 && packet.load(ETH_LEN - 2) == Some(ethertype::ECHO.to_be_bytes()) {
        let is_from_node = decide::from_overlay::sender(&workspace.outer, &Maps).is_some();
        return Some(Outcome::done(if is_from_node { Verdict::NotIp } else { Verdict::ForgedOuter }));
    }
    take_inner(packet, config, workspace)
}

/// The inner packet, after decapsulation by the device or `from_netdev`.
#[inline(never)]
pub fn take_inner(packet: Packet, config: &Config, workspace: &mut Workspace) -> Option<Outcome> {
    if packet.is_tagged() {
        return Some(Outcome::done(Verdict::Malformed));
    }
    if let Err(why) = parse(packet, &mut workspace.headers, Direction::Egress) {
        return Some(Outcome::done(decide::from_overlay::unread(why)));
    }
    flow_cache::serve::<{ at::FROM_OVERLAY }>(packet, config, workspace)
}

/// The inner packet, not in the flow cache. Two calls in sequence, so that their frames share the stack.
#[inline(always)]
pub fn finish(packet: Packet) -> Outcome {
    let outcome = verifier::from_overlay(packet).or_else(|| verifier::handover_reply(packet));
    outcome.unwrap_or_else(|| Outcome::unexpected(packet))
}

/// The decision, for a packet that the flow cache does not serve. `None` if [`handover_reply`] continues.
#[inline(always)]
pub fn uncached(packet: Packet, config: &Config, workspace: &mut Workspace) -> Option<Outcome> {
    let Workspace { headers, quote, route, rest, buffer, outer, .. } = workspace;
    let outer = &*outer;
    let quote = quoted(packet, headers, quote);
    let decision = decide::from_overlay::decide(headers, quote, outer, &Maps, config);
    let run = &Run { packet, config, headers };
    let source_node = match decision {
        FromOverlay::Done(verdict) => return Some(Outcome::done(verdict)),
        FromOverlay::Deliver => {
            let outcome = deliver(run, route, rest);
            flow_cache::store_delivered(run, outcome, outer, route);
            return Some(outcome);
        }
        FromOverlay::PassOn => return Some(pass_on(run, route, outer.egress_id)),
        FromOverlay::Answer => return None,
        // The address is in the workspace.
        FromOverlay::Translate { owned: _, source_node } => source_node,
    };
    let outcome = match snat_for_node(run, quote, outer, source_node) {
        Ok(()) => out_cached(run, quote, route),
        Err(verdict) => counters::refused(outer.egress_id, verdict),
    };
    Some(match outcome.mtu_exceeded() {
        Some(mtu) => icmp::error_to_remote_pod(run, buffer, outer, mtu),
        None if outcome.is(Verdict::PortTaken) => icmp::reset_remote_pod(run, buffer, outer, Verdict::PortTaken),
        None => outcome,
    })
}

/// A reply from a gateway for a pod of this node; the gateway has done everything except the last hop.
#[inline(never)]
fn deliver(run: &Run<'_>, route: &mut Route, rest: &mut Rest) -> Outcome {
    let lookup = lookup_to_pod(run, &run.headers.tuple.daddr, fib::cached_hop(&run.headers.tuple.daddr), None);
    if let Err(verdict) = fib::resolve_route(run, &lookup, route) {
        return Outcome::done(verdict);
    }
    let oversize = run.wire_length() > route.mtu;
    if oversize && !fragment::fits_in_two(run, route.mtu) {
        // The gateway answers packets that must not be fragmented; this one needs more than two fragments.
        return Outcome::done(Verdict::MtuExceeded);
    }
    let result = if oversize { fragment::send_in_two(run, route, rest) } else { fib::send(run, route) };
    Outcome::redirected(Verdict::ReplyDelivered, result)
}

/// A reply for an egress IP, passed on by the other node of a hand-over. It gets no ICMP error, and never reaches the
/// stack.
#[inline(always)]
pub fn handover_reply(packet: Packet, config: &Config, workspace: &mut Workspace) -> Outcome {
    if let Err(why) = parse(packet, &mut workspace.headers, Direction::Ingress) {
        return Outcome::done(from_overlay::unread(why));
    }
    let Workspace { headers, quote, outer, .. } = workspace;
    let quote = quoted(packet, headers, quote);
    let decision = from_netdev::passed(headers, quote, &Maps, outer.egress_id);
    never_passed(apply(packet, config, workspace, decision))
}

/// A packet from the overlay has a pod's address: the stack must not get it.
#[inline(always)]
pub fn never_passed(outcome: Outcome) -> Outcome {
    if outcome.verdict().class() == Class::Pass { Outcome::done(Verdict::BadState) } else { outcome }
}
