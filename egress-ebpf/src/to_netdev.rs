//! `to_netdev`: uplink, TC egress. Packets that leave the node.
//!
//! The guard: no selected pod's packet leaves with the pod's address, and none with an egress IP that this node may not
//! emit. Packets with the mark get the node's address. Most packets are the node's own: [`fast_check`] recognises them
//! from a few words of the packet, without parsing.

use egress_common::abi::{Addr, Config, Direction, HandoverStage, NODE_MARK, Verdict, has_node_mark};
use egress_common::decide::to_netdev::{Meta, ToNetdev};
use egress_common::decide::{self, Rewrite, Tables, from_netdev};
use egress_common::wire::{ETH_LEN, Frame, Headers, L3, Plain, ethertype, ipv4, ipv6};

use crate::maps::Maps;
use crate::nat::snat_node;
use crate::packet::Packet;
use crate::rewrite::rewrite;
use crate::workspace::{Run, Workspace, found, parse, quoted};
use crate::{FastCheck, Outcome, icmp};

/// A program of this node has redirected the packet, or the packet is plain and no pod has its source. Out of line, so
/// that its frame is released.
#[inline(never)]
pub fn fast_check(packet: Packet, config: &Config) -> FastCheck {
    if is_left_alone(packet, config) { FastCheck::LeftAlone } else { FastCheck::Undecided }
}

#[inline(always)]
fn is_left_alone(packet: Packet, config: &Config) -> bool {
    // Programs redirect what a device has received, so a socket that writes that priority passes nothing: neither the
    // host's nor a pod's on a sub-device of the uplink (macvlan, ipvlan). The overlay device clears the input device of
    // its packets, which are the node's own below.
    if packet.takes_off_redirected(config) && packet.is_received() {
        return true;
    }
    if packet.is_waiting(config) || has_node_mark(packet.mark()) || packet.is_returning() {
        return false;
    }
    let Some(plain) = Plain::read(&packet) else { return false };
    // A forwarded packet may have an egress IP as its source, or the node's address with a NAT port.
    let is_nodes = !packet.is_forwarded()
        || (from_netdev::is_node_address(&plain.saddr, config, plain.family)
            && !from_netdev::is_node_port(plain.sport, config)
            && !plain.is_udp_to(config.tunnel_port));
    is_nodes && !config.may_be_pod(&plain.saddr)
}

pub fn begin(packet: Packet, config: &Config, workspace: &mut Workspace) -> Outcome {
    if packet.is_tagged() {
        return Outcome::done(Verdict::NotOurs);
    }
    let Workspace { headers, quote, route, buffer, .. } = workspace;
    if let Some(egress_id) = packet.take_waiting(config) {
        *headers = Headers::NONE;
        return waited(packet, egress_id);
    }
    if let Err(verdict) = parse(packet, headers, Direction::Egress) {
        return Outcome::done(verdict);
    }
    let quote = quoted(packet, headers, quote);
    let meta = meta_of(packet);
    let decision = decide::to_netdev::decide(headers, quote, &meta, &Maps, config);
    let run = &Run { packet, config, headers };
    match decision {
        ToNetdev::Done(verdict) => Outcome::done(verdict),
        ToNetdev::Unmark => {
            packet.set_mark(meta.mark & !NODE_MARK);
            Outcome::done(Verdict::NodeSnatDone)
        }
        ToNetdev::NodeSnat => {
            packet.set_mark(meta.mark & !NODE_MARK);
            let verdict = match (snat_node(run, quote), found()) {
                (Ok(()), Some(found)) => match rewrite(run, quote, &Rewrite::snat(&found.nat_entry)) {
                    Ok(()) => Verdict::NodeSnat,
                    Err(verdict) => verdict,
                },
                (Err(verdict), _) => verdict,
                (Ok(()), None) => Verdict::BadState,
            };
            match verdict {
                Verdict::PortTaken => icmp::reset_pod_from_uplink(run, buffer, route, verdict),
                _ => Outcome::done(verdict),
            }
        }
    }
}

/// [`Meta`] in one register. Out of line, because `to_netdev` has little stack.
#[inline(never)]
fn meta_word(packet: Packet) -> u64 {
    u64::from(packet.mark()) | u64::from(packet.is_forwarded()) << 32 | u64::from(packet.is_returning()) << 33
}

#[inline(always)]
fn meta_of(packet: Packet) -> Meta {
    let word = meta_word(packet);
    Meta { mark: word as u32, forwarded: word >> 32 & 1 != 0, returning: word >> 33 & 1 != 0 }
}

/// A redirected packet with an egress IP that may have waited for its neighbour, for example while the uplink had no
/// carrier. Another node may own the address by now.
#[inline(never)]
pub fn waited(packet: Packet, egress_id: u32) -> Outcome {
    let source = match packet.load(ETH_LEN - 2).map(u16::from_be_bytes) {
        Some(ethertype::IPV4) => packet.load(L3 + ipv4::SADDR).map(Addr::v4),
        Some(ethertype::IPV6) => packet.load_addr(L3 + ipv6::SADDR),
        _ => None,
    };
    let Some(source) = source else { return Outcome::done(Verdict::Malformed) };
    Outcome::done(match (Maps.has_lease(), may_emit(egress_id, &source)) {
        (true, true) => Verdict::NotOurs,
        (true, false) => Verdict::NotGateway,
        (false, _) => Verdict::LeaseExpired,
    })
}

/// Whether this node owns the policy's address, or is its new owner.
#[inline(always)]
fn may_emit(egress_id: u32, address: &Addr) -> bool {
    if Maps.owned(egress_id).is_some_and(|owned| owned.address == *address) {
        return true;
    }
    let handover = Maps.handover(egress_id).filter(|handover| handover.owned.address == *address);
    handover.is_some_and(|handover| matches!(handover.stage(), Some(HandoverStage::Arriving | HandoverStage::Open)))
}
