//! `to_netdev`: uplink, TC egress. Packets that leave the node.
//!
//! The guard: no selected pod's packet leaves with the pod's address, and none with an egress IP that this node may not
//! emit. Packets with the mark get the node's address. Most packets are the node's own: [`is_left_alone`] recognises
//! them from a few words of the packet, without parsing. Measured on other hooks, such a check costs translated packets
//! more than it gains, except at the uplink's ingress, where it halves the time of packets for the node itself.

use egress_common::abi::{Addr, Config, Direction, Family, HandoverStage, NODE_MARK, Verdict, has_node_mark};
use egress_common::decide::to_netdev::{Meta, ToNetdev};
use egress_common::decide::{self, Rewrite, Tables, from_netdev};
use egress_common::wire::{
    ETH_LEN, Frame, Headers, IPV4_LEN, IPV6_LEN, L3, PROTO_TCP, PROTO_UDP, ethertype, ipv4, ipv6, l4,
};

use crate::maps::Maps;
use crate::nat::snat_node;
use crate::packet::Packet;
use crate::rewrite::rewrite;
use crate::workspace::{Run, Workspace, found, parse, quoted};
use crate::{Outcome, icmp};

/// The fast check: no pod has the source of the packet, or a program of this node has redirected it. `false` decides
/// nothing. It recognises only whole TCP and UDP packets with simple network headers.
#[inline(never)]
pub fn is_left_alone(packet: Packet, config: &Config) -> bool {
    if packet.takes_off_redirected(config) {
        return true;
    }
    if packet.is_waiting(config) {
        return false;
    }
    let Some((from, protocol, from_port, port)) = read_plain(packet) else { return false };
    // A forwarded packet may have an egress IP as its source, or the node's address with a NAT port.
    let is_nodes = !packet.is_forwarded()
        || (from == from_netdev::node_address(config, from.family())
            && !from_netdev::is_node_port(from_port, config)
            && !may_be_overlay(protocol, port, config));
    is_nodes && !has_node_mark(packet.mark()) && !packet.is_returning() && !config.may_be_pod(&from)
}

/// Version 4 and five words of header: no options.
const PLAIN_IPV4: u8 = 0x45;

/// Source, protocol and ports of a simple packet.
#[inline(always)]
fn read_plain(packet: Packet) -> Option<(Addr, u8, u16, u16)> {
    let (from, protocol, l4_at) = match u16::from_be_bytes(packet.load(ETH_LEN - 2)?) {
        ethertype::IPV4 => {
            let head: [u8; IPV4_LEN] = packet.load(L3)?;
            let bits = u16::from_be_bytes([head[ipv4::FRAGMENT], head[ipv4::FRAGMENT + 1]]);
            if head[0] != PLAIN_IPV4 || bits & (ipv4::OFFSET_MASK | ipv4::MORE_FRAGMENTS) != 0 {
                return None;
            }
            (Addr::v4([head[12], head[13], head[14], head[15]]), head[ipv4::PROTOCOL], L3 + IPV4_LEN)
        }
        ethertype::IPV6 => {
            let [version, _] = packet.load(L3)?;
            let [protocol, _] = packet.load(L3 + ipv6::NEXT_HEADER)?;
            if version >> 4 != 6 {
                return None;
            }
            let from = packet.load_addr(L3 + ipv6::SADDR)?;
            if from.family() == Family::V4 {
                return None;
            }
            (from, protocol, L3 + IPV6_LEN)
        }
        _ => return None,
    };
    // The shortest transport header that parsing accepts.
    let head: [u8; 8] = packet.load(l4_at)?;
    let port_at = |at: usize| u16::from_be_bytes([head[at], head[at + 1]]);
    matches!(protocol, PROTO_TCP | PROTO_UDP).then_some((from, protocol, port_at(l4::SPORT), port_at(l4::DPORT)))
}

#[inline(always)]
fn may_be_overlay(protocol: u8, port: u16, config: &Config) -> bool {
    protocol == PROTO_UDP && u32::from(port) == config.tunnel_port
}

pub fn begin(packet: Packet, config: &Config, workspace: &mut Workspace) -> Outcome {
    // With the feature `log`, all packets get here.
    if packet.takes_off_redirected(config) || packet.is_tagged() {
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
