//! A glance at packets that are not ours and leave: nearly all that a node sends. It reads a few words of the packet where
//! the road parses its heads into the workspace first.
//!
//! It knows whole TCP and UDP packets with a plain network header only, and says nothing but that the road would leave the
//! packet alone; of anything else it says nothing, and the road looks. A glance at what enters was tried: it halves the time
//! of packets for the node itself, but what is ours pays more for it than it gains on the other hooks.

use egress_common::abi::{Addr, Config, Family, has_node_mark};
use egress_common::decide::from_netdev;
use egress_common::wire::{ETH_LEN, Frame, IPV4_LEN, IPV6_LEN, L3, PROTO_TCP, PROTO_UDP, ethertype, ipv4, ipv6, l4};

use crate::packet::Packet;

/// Version 4 and five words of header: no options.
const PLAIN_IPV4: u8 = 0x45;

/// Source of a plain packet, its protocol and its ports.
#[inline(always)]
fn read(packet: Packet) -> Option<(Addr, u8, u16, u16)> {
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
    // As much as the road asks of a transport header that is not cut short.
    let head: [u8; 8] = packet.load(l4_at)?;
    let port_at = |at: usize| u16::from_be_bytes([head[at], head[at + 1]]);
    matches!(protocol, PROTO_TCP | PROTO_UDP).then_some((from, protocol, port_at(l4::SPORT), port_at(l4::DPORT)))
}

#[inline(always)]
fn may_be_overlay(protocol: u8, port: u16, config: &Config) -> bool {
    protocol == PROTO_UDP && u32::from(port) == config.tunnel_port
}

/// About to leave by the uplink, and no pod's; or redirected there by a program of this node.
#[inline(never)]
pub fn leaves_alone(packet: Packet, config: &Config) -> bool {
    if packet.takes_off_redirected(config) {
        return true;
    }
    if packet.is_waiting(config) {
        return false;
    }
    let Some((from, protocol, from_port, port)) = read(packet) else { return false };
    // What is forwarded may bear an egress IP, but where it has the node's own address; and then a port of NAT's.
    let is_nodes = !packet.is_forwarded()
        || (from == from_netdev::node_address(config, from.family())
            && !from_netdev::is_node_port(from_port, config)
            && !may_be_overlay(protocol, port, config));
    is_nodes && !has_node_mark(packet.mark()) && !packet.is_returning() && !config.may_be_pod(&from)
}
