//! `to_pod`: management port, TC egress. Packets from the host to pods of this node.
//!
//! It records inbound connections, so that `from_pod` leaves their answers alone. No packet is changed.

use egress_common::abi::{Config, Direction, Verdict};
use egress_common::decide::{self};

use crate::flow_cache::{self, at};
use crate::maps::Maps;
use crate::packet::Packet;
use crate::workspace::{Run, Workspace, parse};
use crate::{FastCheck, Outcome};

/// A program of this node has redirected the packet.
#[inline(always)]
pub fn fast_check(packet: Packet, config: &Config) -> FastCheck {
    if packet.takes_off_redirected(config) { FastCheck::LeftAlone } else { FastCheck::Undecided }
}

pub fn begin(packet: Packet, config: &Config, workspace: &mut Workspace) -> Outcome {
    if packet.is_tagged() {
        return Outcome::done(Verdict::NotOurs);
    }
    if let Err(verdict) = parse(packet, &mut workspace.headers, Direction::Ingress) {
        return Outcome::done(verdict);
    }
    if let Some(outcome) = flow_cache::serve::<{ at::TO_POD }>(packet, config, workspace) {
        return outcome;
    }
    let run = &Run { packet, config, headers: &workspace.headers };
    if packet.is_of_pod() && decide::to_pod::is_forged(run.headers, &Maps) {
        return Outcome::done(Verdict::NotOurs);
    }
    let verdict = decide::to_pod::decide(run.headers, &Maps, config);
    flow_cache::store_left_alone(run, verdict);
    Outcome::done(verdict)
}
