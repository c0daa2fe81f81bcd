//! `to_netdev`: uplink and further egress interfaces, TC egress. Packets that leave the node.
//!
//! The guard: no selected pod's packet leaves with the pod's address, and none with an egress IP that this node may not
//! emit, or not by this interface. Packets with the mark get the node's address on the interface. Most packets are the
//! node's own: [`fast_check`] recognises them from a few words of the packet, without parsing.

use egress_common::abi::{Addr, Config, Direction, HandoverStage, NODE_MARK, Owned, Verdict, has_node_mark};
use egress_common::decide::to_netdev::{Meta, ToNetdev, is_misdirected};
use egress_common::decide::{self, Rewrite, Tables, from_netdev};
use egress_common::wire::{ETH_LEN, Frame, Headers, L3, Plain, Quote, ethertype, ipv4, ipv6};

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
    is_nodes && !config.may_be_pod(&plain.saddr) && !config.owned.may_contain(&plain.saddr)
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
    let word = meta_word(packet, headers, config);
    if word & MISDIRECTED != 0 {
        return Outcome::done(Verdict::WrongInterface);
    }
    let quote = quoted(packet, headers, quote);
    let meta = meta_of(packet, word);
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
            let verdict = match snat_node(run, quote).and_then(|()| rewrite_found(run, quote)) {
                Ok(()) => Verdict::NodeSnat,
                Err(verdict) => verdict,
            };
            match verdict {
                Verdict::PortTaken => icmp::reset_pod_from_uplink(run, buffer, route, verdict),
                _ => Outcome::done(verdict),
            }
        }
    }
}

/// Writes the node's address by the NAT entry that [`snat_node`] has found. Out of line, because `to_netdev` has little stack.
#[inline(never)]
fn rewrite_found(run: &Run<'_>, quote: &Quote) -> Result<(), Verdict> {
    let found = found().ok_or(Verdict::BadState)?;
    rewrite(run, quote, &Rewrite::snat(&found.nat_entry))
}

const FORWARDED: u64 = 1 << 32;
const RETURNING: u64 = 1 << 33;
const MISDIRECTED: u64 = 1 << 34;

/// [`Meta`] without the interface, and whether the packet [`is_misdirected`], in one register. Out of line, because
/// `to_netdev` has little stack.
#[inline(never)]
fn meta_word(packet: Packet, headers: &Headers, config: &Config) -> u64 {
    let (mark, ifindex) = (packet.mark(), packet.ifindex());
    let meta = Meta { mark, ifindex, forwarded: packet.is_forwarded(), returning: packet.is_returning() };
    let bit = |is_set: bool, bit: u64| if is_set { bit } else { 0 };
    u64::from(mark)
        | bit(meta.forwarded, FORWARDED)
        | bit(meta.returning, RETURNING)
        | bit(is_misdirected(&headers.tuple.saddr, &meta, &Maps, config), MISDIRECTED)
}

#[inline(always)]
fn meta_of(packet: Packet, word: u64) -> Meta {
    let ifindex = packet.ifindex();
    Meta { mark: word as u32, ifindex, forwarded: word & FORWARDED != 0, returning: word & RETURNING != 0 }
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
    Outcome::done(match (Maps.has_lease(), emitted_by(egress_id, &source)) {
        (false, _) => Verdict::LeaseExpired,
        (true, None) => Verdict::NotGateway,
        (true, Some(owned)) if owned.is_elsewhere(packet.ifindex()) => Verdict::WrongInterface,
        (true, Some(_)) => Verdict::NotOurs,
    })
}

/// The policy's address, if this node owns it or is its new owner.
#[inline(always)]
fn emitted_by(egress_id: u32, address: &Addr) -> Option<&'static Owned> {
    if let Some(owned) = Maps.owned(egress_id).filter(|owned| owned.address == *address) {
        return Some(owned);
    }
    let handover = Maps.handover(egress_id).filter(|handover| handover.owned.address == *address)?;
    matches!(handover.stage(), Some(HandoverStage::Arriving | HandoverStage::Open)).then_some(&handover.owned)
}
