//! `from_pod`: management port, TC ingress. Packets of this node's pods.
//!
//! Packets of selected pods to the world leave by the uplink with the egress IP if this node is the gateway, otherwise
//! through the overlay to the gateway. Packets to other nodes get the mark. All other traffic is untouched.

use egress_common::abi::{Config, Direction, NODE_MARK, PolicySlot, SlotPlace, Verdict};
use egress_common::decide::from_pod::FromPod;
use egress_common::decide::mtu::{self, Fit};
use egress_common::decide::{self};

use egress_common::wire::icmp::GeneratedError;

use crate::fib::Route;
use crate::flow_cache::{self, at};
use crate::maps::Maps;
use crate::nat::{out_cached, snat_here};
use crate::overlay::{self, handed_over};
use crate::packet::Packet;
use crate::workspace::{Run, Workspace, parse, quoted};
use crate::{FastCheck, Outcome, counters, fragment, icmp, verifier};

pub fn begin(packet: Packet, config: &Config, workspace: &mut Workspace, _: FastCheck) -> Option<Outcome> {
    if packet.is_tagged() {
        return Some(Outcome::done(Verdict::NotOurs));
    }
    if packet.is_for_another_host() {
        // The stack does not forward it.
        return Some(Outcome::done(Verdict::NotPod));
    }
    if let Err(why) = parse(packet, &mut workspace.headers, Direction::Egress) {
        return Some(Outcome::done(decide::from_pod::unread(why, &packet)));
    }
    if packet.is_completed_elsewhere(&workspace.headers, config.packet_layout) {
        return Some(Outcome::done(Verdict::Malformed));
    }
    flow_cache::serve::<{ at::FROM_POD }>(packet, config, workspace)
}

#[inline(always)]
pub fn finish(packet: Packet) -> Outcome {
    fragment::judge(verifier::from_pod(packet), packet)
}

/// The decision, for a packet that the flow cache does not serve.
#[inline(always)]
pub fn uncached(packet: Packet, config: &Config, workspace: &mut Workspace) -> Outcome {
    let Workspace { headers, quote, route, buffer, .. } = workspace;
    let quote = quoted(packet, headers, quote);
    let decision = decide::from_pod::decide(headers, quote, &Maps, config);
    let run = &Run { packet, config, headers };
    match decision {
        FromPod::Done(verdict) => {
            flow_cache::store_left_alone(run, verdict);
            Outcome::done(verdict)
        }
        FromPod::Hairpin => icmp::error_to_pod(run, buffer, GeneratedError::Prohibited, Verdict::Hairpin),
        FromPod::Reset(verdict) => icmp::reset_pod(run, buffer, verdict),
        FromPod::Mark => {
            packet.set_mark(packet.mark() | NODE_MARK);
            Outcome::done(Verdict::MarkedNode)
        }
        FromPod::Send { egress_id, slot } => {
            let outcome = match slot.place() {
                SlotPlace::Here => match snat_here(run, quote, egress_id, slot) {
                    Ok(()) => out_cached(run, quote, route),
                    Err(Verdict::NotGateway) => handed_over(run, route, egress_id),
                    Err(verdict) => counters::refused(egress_id, verdict),
                },
                SlotPlace::Remote => to_gateway(run, route, egress_id, slot),
            };
            match outcome.mtu_exceeded() {
                Some(mtu) => icmp::error_to_pod(run, buffer, GeneratedError::TooBig(mtu), Verdict::MtuExceeded),
                None if outcome.is(Verdict::PortTaken) => icmp::reset_pod(run, buffer, Verdict::PortTaken),
                None => outcome,
            }
        }
    }
}

/// The gateway is another node.
#[inline(always)]
fn to_gateway(run: &Run<'_>, route: &mut Route, egress_id: u32, slot: &PolicySlot) -> Outcome {
    let Run { packet, config, headers } = *run;
    let whole = match mtu::fit(run.wire_length(), config.overlay_mtu, headers, &slot.endpoint) {
        Fit::Tell(limit) => return Outcome::too_big(limit),
        Fit::Lost => return Outcome::done(Verdict::OverlayTooNarrow),
        // The outer packet is fragmented, so that the inner one arrives whole.
        Fit::Cut => false,
        Fit::Whole => true,
    };
    let result =
        packet.decrement_ttl(headers).and_then(|()| overlay::encapsulate(run, &slot.endpoint, egress_id, whole, route));
    if result.is_ok() {
        flow_cache::store_to_gateway(run, egress_id, &slot.endpoint, route);
    }
    Outcome::redirected(Verdict::ToGateway, result)
}
