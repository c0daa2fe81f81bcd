//! One line per packet, in an object that is built with the feature `log`.
//!
//! Verdicts are logged by number; docs/datapath.md has the names.

use aya_ebpf::programs::TcContext;
use aya_log_ebpf::trace;
use egress_common::abi::{Direction, Verdict};

use crate::packet::Packet;
use crate::workspace::{Workspace, parse, workspace};

/// A packet that was left alone before its headers were parsed.
#[inline(always)]
pub fn left_alone(packet: Packet, workspace: &mut Workspace, length: u32) {
    // Headers that cannot be read are all zero.
    let _unread = parse(packet, &mut workspace.headers, Direction::Egress);
    verdict(packet, Verdict::NotOurs, length);
}

/// Original addresses of the packet, IPv4 as v4-mapped; all zero if it is not IP.
#[inline(never)]
pub fn verdict(packet: Packet, verdict: Verdict, length: u32) {
    let Some(workspace) = workspace() else { return };
    let ctx = TcContext::new(packet.skb());
    let tuple = &workspace.headers.tuple;
    trace!(
        &ctx,
        "verdict {} on interface {}: {:i} port {} to {:i} port {}, protocol {}, {} bytes",
        verdict.index(),
        packet.ifindex(),
        tuple.saddr.octets(),
        tuple.sport(),
        tuple.daddr.octets(),
        tuple.dport(),
        tuple.protocol,
        length
    );
}
