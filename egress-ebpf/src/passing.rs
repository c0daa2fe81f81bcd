//! What is passed on between the two nodes of a hand-over; see `egress_common::abi::HandoverEntry`.

use egress_common::abi::{Class, Config, Direction, HandoverStage, Verdict};
use egress_common::decide::mtu::{self, Fit};
use egress_common::decide::{Tables, from_netdev, from_overlay};

use crate::maps::Maps;
use crate::packet::Packet;
use crate::roads::back;
use crate::run::{Run, parse, quoted};
use crate::way::Way;
use crate::workspace::Workspace;
use crate::{Outcome, apart, counters, overlay};

/// A packet out of the overlay, of no recent flow.
#[inline(always)]
pub fn by_overlay(packet: Packet) -> Outcome {
    let outcome = apart::from_overlay(packet);
    // Here, so that the frames of the two lie beside each other.
    if outcome.is_none() { apart::handover_reply(packet) } else { outcome }
}

/// A packet of a pod of this node, whose policy does not know yet that its gateway is another node now.
#[inline(never)]
pub fn handed_over(run: &Run<'_>, way: &mut Way, egress_id: u32) -> Outcome {
    let is_leaving = Maps.handover(egress_id).is_some_and(|handover| handover.stage() == Some(HandoverStage::Leaving));
    if !is_leaving {
        return counters::refused(egress_id, Verdict::NotGateway);
    }
    pass_on(run, way, egress_id)
}

/// To the other node of a hand-over, as a router would send it: two nodes that each take the other for the old one, since
/// one has heard of a new hand-over and the other has not, send an answer to and fro until its hops are used up.
#[inline(never)]
pub fn pass_on(run: &Run<'_>, way: &mut Way, egress_id: u32) -> Outcome {
    if run.heads.ttl <= 1 {
        return Outcome::done(Verdict::NotGateway);
    }
    if let Err(verdict) = run.packet.decrement_ttl(run.heads) {
        return Outcome::done(verdict);
    }
    let Some(handover) = Maps.handover(egress_id) else { return Outcome::done(Verdict::NotGateway) };
    let to = &handover.peer;
    let whole = match mtu::fit(run.wire_length(), run.config.overlay_mtu, run.heads, to) {
        // What came by the overlay fits; an answer that does not is sent again, and finds the address where it is then.
        Fit::Tell(_) | Fit::Lost => return Outcome::done(Verdict::OverlayTooNarrow),
        Fit::Cut => false,
        Fit::Whole => true,
    };
    Outcome::redirected(Verdict::HandedOver, overlay::encapsulate(run, to, egress_id, whole, way))
}

/// What came for an egress IP to the other node of its hand-over: nobody is told anything, and the stack sees none of it.
#[inline(always)]
pub fn handover_reply(packet: Packet, config: &Config, workspace: &mut Workspace) -> Outcome {
    if let Some(why) = parse(packet, &mut workspace.heads, Direction::Ingress) {
        return Outcome::done(from_overlay::unread(why));
    }
    let Workspace { heads, quote, outer, .. } = workspace;
    let quote = quoted(packet, heads, quote);
    let decision = from_netdev::passed(heads, quote, &Maps, outer.egress_id);
    never_passed(back(packet, config, workspace, decision))
}

/// What was taken out of the overlay here bears a pod's address: the stack must not see it.
#[inline(always)]
pub fn never_passed(outcome: Outcome) -> Outcome {
    if outcome.verdict().class() == Class::Pass { Outcome::done(Verdict::BadState) } else { outcome }
}
