//! `from_overlay`: overlay device, TC ingress. What other nodes send.
//!
//! On a gateway these are packets of pods, which leave by the uplink with the egress IP; on the pod's node, replies from the
//! gateway. `from_netdev` comes here too, with packets that it has taken out of the overlay itself. The stack would forward
//! such a packet with the pod's address, so none passes.

use egress_common::abi::{Class, Config, Direction, Verdict};
use egress_common::decide::from_overlay::{self, FromOverlay};
use egress_common::decide::{self, from_netdev};

use egress_common::wire::{ETH_LEN, Frame, ethertype};

use crate::fib::{self, Route, lookup_to_pod};
use crate::flow_cache::{self, at};
use crate::fragment::{self, Rest};
use crate::from_netdev::back;
use crate::maps::Maps;
use crate::nat::{out_cached, snat_for_node};
use crate::overlay::{self, pass_on};
use crate::packet::Packet;
use crate::workspace::{Run, Workspace, parse, quoted};
use crate::{Outcome, counters, icmp, verifier};

pub fn begin(packet: Packet, config: &Config, workspace: &mut Workspace) -> Outcome {
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
    take_inner(packet, config, workspace)
}

#[inline(always)]
pub fn finish(packet: Packet, outcome: Outcome) -> Outcome {
    if outcome.is_none() { by_overlay(packet) } else { outcome }
}

/// A packet out of the overlay, whoever has taken its outer headers off.
#[inline(never)]
pub fn take_inner(packet: Packet, config: &Config, workspace: &mut Workspace) -> Outcome {
    if packet.is_tagged() {
        return Outcome::done(Verdict::Malformed);
    }
    if let Some(why) = parse(packet, &mut workspace.headers, Direction::Egress) {
        return Outcome::done(decide::from_overlay::unread(why));
    }
    flow_cache::go::<{ at::FROM_OVERLAY }>(packet, config, workspace)
}

/// A packet out of the overlay, of no recent flow.
#[inline(always)]
pub fn by_overlay(packet: Packet) -> Outcome {
    let outcome = verifier::from_overlay(packet);
    // Here, so that the frames of the two lie beside each other.
    if outcome.is_none() { verifier::handover_reply(packet) } else { outcome }
}

/// Likewise, of no recent flow. [`Outcome::NONE`] where it is for `handover_reply`.
#[inline(always)]
pub fn uncached(packet: Packet, config: &Config, workspace: &mut Workspace) -> Outcome {
    let Workspace { headers, quote, route, rest, buffer, outer, .. } = workspace;
    let outer = &*outer;
    let quote = quoted(packet, headers, quote);
    let decision = decide::from_overlay::decide(headers, outer, &Maps, config);
    let run = &Run { packet, config, headers };
    let source_node = match decision {
        FromOverlay::Done(verdict) => return Outcome::done(verdict),
        FromOverlay::Deliver => {
            let outcome = deliver(run, route, rest);
            flow_cache::store_delivered(run, outcome, outer, route);
            return outcome;
        }
        FromOverlay::PassOn => return pass_on(run, route, outer.egress_id),
        FromOverlay::Answer => return Outcome::NONE,
        // The address lies in the workspace.
        FromOverlay::Translate { owned: _, source_node } => source_node,
    };
    let outcome = match snat_for_node(run, quote, outer, source_node) {
        None => out_cached(run, quote, route),
        Some(verdict) => counters::refused(outer.egress_id, verdict),
    };
    match outcome.mtu_exceeded() {
        Some(mtu) => icmp::error_to_remote_pod(run, buffer, outer, mtu),
        None if outcome.is(Verdict::PortTaken) => icmp::reset_remote_pod(run, buffer, outer, Verdict::PortTaken),
        None => outcome,
    }
}

/// A reply from a gateway, for a pod of this node; the gateway has done everything but the last hop.
#[inline(never)]
fn deliver(run: &Run<'_>, route: &mut Route, rest: &mut Rest) -> Outcome {
    let lookup = lookup_to_pod(run, &run.headers.tuple.daddr, fib::cached_hop(&run.headers.tuple.daddr), None);
    if let Some(verdict) = fib::resolve_route(run, &lookup, route) {
        return Outcome::done(verdict);
    }
    let oversize = run.wire_length() > route.mtu;
    if oversize && !fragment::fits_in_two(run, route.mtu) {
        // The gateway answers what cannot be fragmented; this one is larger than two pieces.
        return Outcome::done(Verdict::MtuExceeded);
    }
    let result = if oversize { fragment::send_in_two(run, route, rest) } else { fib::go(run, route) };
    Outcome::redirected(Verdict::ReplyDelivered, result)
}

/// What came for an egress IP to the other node of its hand-over: nobody is told anything, and the stack sees none of it.
#[inline(always)]
pub fn handover_reply(packet: Packet, config: &Config, workspace: &mut Workspace) -> Outcome {
    if let Some(why) = parse(packet, &mut workspace.headers, Direction::Ingress) {
        return Outcome::done(from_overlay::unread(why));
    }
    let Workspace { headers, quote, outer, .. } = workspace;
    let quote = quoted(packet, headers, quote);
    let decision = from_netdev::passed(headers, quote, &Maps, outer.egress_id);
    never_passed(back(packet, config, workspace, decision))
}

/// What was taken out of the overlay here bears a pod's address: the stack must not see it.
#[inline(always)]
pub fn never_passed(outcome: Outcome) -> Outcome {
    if outcome.verdict().class() == Class::Pass { Outcome::done(Verdict::BadState) } else { outcome }
}
