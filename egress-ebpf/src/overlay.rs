//! The overlay: encapsulation and decapsulation, by the program or by the device `egress0`.
//!
//! The device handles any packet. The program is faster, and handles simple packets:
//!
//! - **out**: the next hop to the node is known and the outer packet fits. `BPF_F_ADJ_ROOM_FIXED_GSO` keeps the size of GSO
//!   segments, which the caller has compared with the MTU.
//! - **in**: whole packets between the nodes' tunnel endpoints, without IP options, outer UDP checksum, congestion mark
//!   (RFC 6040 changes the inner packet then) and GSO (the type would stay that of a tunnelled packet). `from_overlay`
//!   checks sender and content afterwards, as for the device's packets.
//!
//! A packet that the program encapsulates came in by another device, like a pod's packet that a rule sends to a node's
//! tunnel port. `to_netdev` distinguishes them by the priority of redirected packets (`Packet::strip`).
#![expect(unsafe_code, reason = "map and packet access; see `maps` and `packet`")]

use core::mem;

use aya_ebpf::bindings::{BPF_F_TUNINFO_IPV6, BPF_F_ZERO_CSUM_TX, bpf_tunnel_key as TunnelKey};
use aya_ebpf::helpers::generated::{bpf_skb_get_tunnel_key, bpf_skb_set_tunnel_key};
use egress_common::abi::{Addr, Config, Family, HandoverStage, Verdict};
use egress_common::decide::Tables;
use egress_common::decide::from_overlay::Outer;
use egress_common::decide::mtu::{self, Fit};
use egress_common::wire::{
    ETH_LEN, Frame, Headers, IPV4_LEN, IPV6_LEN, L3, PROTO_UDP, Plain, csum, ethertype, ipv4, ipv6, l4,
};

use crate::fib::{self, Lookup, Route, RouteChoice};
use crate::maps::Maps;
use crate::packet::{HeadroomChange, Packet};
use crate::workspace::Run;
use crate::{Outcome, counters};

const UDP_LEN: usize = 8;

const VXLAN_LEN: usize = 8;

/// UDP, VXLAN and the inner link header.
const BEHIND_IP: usize = UDP_LEN + VXLAN_LEN + ETH_LEN;

/// Link address of the overlay device, the same on every node.
const DEVICE_MAC: [u8; 6] = [0x02, 0xe6, 0x7e, 0x55, 0x00, 0x01];

/// VXLAN flags: the network identifier is valid (RFC 7348 section 5).
const VXLAN_FLAGS: u32 = 0x0800_0000;

const TTL: u8 = 64;

/// ECN bits, and the value "congestion experienced" (RFC 3168 section 5).
const ECN: u8 = 3;

/// Replaces the uplink's index: the overlay device encapsulates.
const BY_DEVICE: u32 = 0;

/// Sends the packet through the overlay to a node, from this node's tunnel endpoint, the only source that nodes accept.
/// Without `whole` the outer packet exceeds the uplink's MTU, and the device fragments it.
#[inline(always)]
pub fn encapsulate(
    run: &Run<'_>,
    endpoint: &Addr,
    egress_id: u32,
    whole: bool,
    route: &mut Route,
) -> Result<i32, Verdict> {
    run.packet.strip(run.config);
    // The flow cache may repeat this, unless the next hop is new or the packet is too long.
    route.resolve = !whole;
    if whole && run.config.is_overlay_in_program() {
        route.resolve = !is_routed(run, endpoint, route);
        if !route.resolve && make_room(run, endpoint) {
            return put(run, endpoint, egress_id, route).map(|()| fib::TC_ACT_REDIRECT);
        }
    }
    route.ifindex = BY_DEVICE;
    by_device(run, endpoint, egress_id).map(|()| fib::TC_ACT_REDIRECT)
}

/// Encapsulates as the previous packet of the flow.
#[inline(always)]
pub fn encapsulate_again(run: &Run<'_>, endpoint: &Addr, egress_id: u32, route: &Route) -> Result<i32, Verdict> {
    run.packet.strip(run.config);
    // The kernel adds no headers to a packet that a tunnel of the pod has encapsulated.
    if route.ifindex != BY_DEVICE && make_room(run, endpoint) {
        return put(run, endpoint, egress_id, route).map(|()| fib::TC_ACT_REDIRECT);
    }
    by_device(run, endpoint, egress_id).map(|()| fib::TC_ACT_REDIRECT)
}

/// Largest inner packet that fits the route of [`encapsulate`].
#[inline(always)]
pub fn inner_mtu(config: &Config, endpoint: &Addr, route: &Route) -> u32 {
    if route.ifindex == BY_DEVICE {
        return config.overlay_mtu;
    }
    config.overlay_mtu.min(route.mtu.saturating_sub(overhead(endpoint.family()) as u32))
}

/// Whether the outer length fields can hold the length of the packet before segmentation.
#[inline(always)]
pub fn is_short(run: &Run<'_>, endpoint: &Addr) -> bool {
    run.packet.len() as u32 + overhead(endpoint.family()) as u32 <= 0xffff
}

/// Whether the program may encapsulate towards this node. The device encapsulates if the route is unknown, too narrow,
/// by another device, or new: the stack then resolves the neighbour and refreshes it.
///
/// A path MTU below the uplink's comes from an ICMP error, of a router or forged. Over IPv4 the device's packet is
/// fragmented then. Over IPv6 it cannot be, so the program ignores such an MTU.
#[inline(always)]
fn is_routed(run: &Run<'_>, endpoint: &Addr, route: &mut Route) -> bool {
    let lookup = Lookup {
        saddr: &run.config.self_node,
        daddr: endpoint,
        ifindex: run.config.uplink_ifindex,
        routes: RouteChoice::HostsThrough,
        device_mtu: run.config.uplink_mtu,
        kept: fib::cached_hop(endpoint),
        by_nat_entry: false,
        seal: 0,
    };
    if fib::resolve_route(run, &lookup, route).is_err() || !is_short(run, endpoint) {
        return false;
    }
    let length = run.wire_length() + overhead(endpoint.family()) as u32;
    match length <= route.mtu {
        true => !route.resolve,
        false => route.known && length <= run.config.uplink_mtu && endpoint.family() == Family::V6,
    }
}

#[inline(always)]
const fn overhead(underlay: Family) -> usize {
    BEHIND_IP
        + match underlay {
            Family::V4 => IPV4_LEN,
            Family::V6 => IPV6_LEN,
        }
}

/// Adds space for the headers; false if the kernel refuses, with the packet unchanged.
#[inline(always)]
fn make_room(run: &Run<'_>, endpoint: &Addr) -> bool {
    let underlay = endpoint.family();
    let room = match underlay {
        Family::V4 => HeadroomChange::EncapsulateV4,
        Family::V6 => HeadroomChange::EncapsulateV6,
    };
    run.packet.change_room(overhead(underlay) as i32, room).is_some()
}

/// Writes the headers into that space.
#[inline(never)]
fn put(run: &Run<'_>, endpoint: &Addr, egress_id: u32, route: &Route) -> Result<(), Verdict> {
    let underlay = endpoint.family();
    let Some(ecn) = ecn_of(run.packet, L3 + overhead(underlay), run.headers.family) else {
        return Err(Verdict::EncapFailed);
    };
    let written = write_ip(run, endpoint, ecn, route).and_then(|at| write_vxlan(run, at, egress_id));
    let sent = written.and_then(|()| fib::redirect(route.ifindex).ok());
    sent.map(drop).ok_or(Verdict::EncapFailed)
}

/// Of the IP header at `at`.
#[inline(always)]
fn ecn_of(packet: Packet, at: usize, family: Family) -> Option<u8> {
    let [first, second] = packet.load(at)?;
    Some(ECN & if family == Family::V4 { second } else { (first & 0xf) << 4 | second >> 4 })
}

/// The link and the network header; returns where they end.
#[inline(always)]
fn write_ip(run: &Run<'_>, endpoint: &Addr, ecn: u8, route: &Route) -> Option<usize> {
    let Run { packet, config, .. } = *run;
    let length = packet.len() - L3;
    packet.set_macs(route.dmac, route.smac)?;
    match endpoint.family() {
        Family::V4 => {
            let (from, to) = (config.self_node.v4_octets(), endpoint.v4_octets());
            let [high, low] = (length as u16).to_be_bytes();
            let mut head = [
                0x45, ecn, high, low, 0, 0, 0x40, 0, TTL, PROTO_UDP, 0, 0, from[0], from[1], from[2], from[3], to[0],
                to[1], to[2], to[3],
            ];
            let [high, low] = csum::header(&head).to_ne_bytes();
            (head[ipv4::CHECKSUM], head[ipv4::CHECKSUM + 1]) = (high, low);
            packet.store(ETH_LEN - 2, ethertype::IPV4.to_be_bytes())?;
            packet.store(L3, head)?;
            Some(L3 + IPV4_LEN)
        }
        Family::V6 => {
            let [high, low] = ((length - IPV6_LEN) as u16).to_be_bytes();
            packet.store(ETH_LEN - 2, ethertype::IPV6.to_be_bytes())?;
            packet.store(L3, [0x60, ecn << 4, 0, 0, high, low, PROTO_UDP, TTL])?;
            packet.store(L3 + ipv6::SADDR, config.self_node.octets())?;
            packet.store(L3 + ipv6::DADDR, endpoint.octets())?;
            Some(L3 + IPV6_LEN)
        }
    }
}

/// UDP, VXLAN and the inner link header, at `at`.
#[inline(always)]
fn write_vxlan(run: &Run<'_>, at: usize, egress_id: u32) -> Option<()> {
    let Run { packet, config, headers } = *run;
    let udp_length = (packet.len() - at) as u16;
    packet.store(at + l4::SPORT, entropy(headers).to_be_bytes())?;
    packet.store(at + l4::DPORT, (config.tunnel_port as u16).to_be_bytes())?;
    // The checksum stays zero, as the added space is.
    packet.store(at + l4::UDP_LENGTH, udp_length.to_be_bytes())?;
    packet.store(at + UDP_LEN, VXLAN_FLAGS.to_be_bytes())?;
    packet.store(at + UDP_LEN + 4, (egress_id << 8).to_be_bytes())?;
    let inner = match headers.family {
        Family::V4 => ethertype::IPV4,
        Family::V6 => ethertype::IPV6,
    };
    let link = at + UDP_LEN + VXLAN_LEN;
    packet.store(link, DEVICE_MAC)?;
    packet.store(link + 6, config.overlay_secret)?;
    packet.store(link + 12, inner.to_be_bytes())?;
    packet.add_to_sum(L3, link + ETH_LEN)
}

/// A source port that differs from flow to flow, so that the underlay can spread them (RFC 7348 section 5).
#[inline(always)]
fn entropy(headers: &Headers) -> u16 {
    let tuple = &headers.tuple;
    let ports = u32::from(tuple.sport()) << 16 | u32::from(tuple.dport());
    let mixed = (tuple.saddr.words()[3] ^ tuple.daddr.words()[3].rotate_left(7) ^ ports).wrapping_mul(0x9e37_79b1);
    0xc000 | (mixed >> 18) as u16
}

/// As [`encapsulate`], by the device. Its outer IPv4 packet may be fragmented: the programs have checked the uplink's
/// MTU, and a smaller path MTU may be forged.
#[inline(never)]
pub fn by_device(run: &Run<'_>, endpoint: &Addr, egress_id: u32) -> Result<(), Verdict> {
    let Run { packet, config, .. } = *run;
    // SAFETY: all fields are integers, for which zero is a value.
    let mut key: TunnelKey = unsafe { mem::zeroed() };
    key.tunnel_id = egress_id;
    key.tunnel_ttl = TTL;
    let (words, local) = (endpoint.words(), config.self_node.words());
    let flags = match endpoint.family() {
        Family::V4 => {
            key.__bindgen_anon_1.remote_ipv4 = u32::from_be(words[3]);
            key.__bindgen_anon_3.local_ipv4 = u32::from_be(local[3]);
            BPF_F_ZERO_CSUM_TX
        }
        // RFC 6935 would allow zero here too, if every receiver agrees; the checksum costs the stack little.
        Family::V6 => {
            key.__bindgen_anon_1.remote_ipv6 = words;
            key.__bindgen_anon_3.local_ipv6 = local;
            BPF_F_TUNINFO_IPV6
        }
    };
    packet.strip(config);
    // SAFETY: the context is the program's own, `key` lives on this frame and its true size is given.
    let result =
        unsafe { bpf_skb_set_tunnel_key(packet.skb(), &raw mut key, size_of::<TunnelKey>() as u32, flags.into()) };
    let is_sent = result == 0 && fib::redirect(config.overlay_ifindex).is_ok();
    if is_sent { Ok(()) } else { Err(Verdict::EncapFailed) }
}

/// Reads the tunnel header that the overlay device has removed; false without one, or if it was for another address
/// than this node's tunnel endpoint: the device accepts any address of the node.
#[inline(never)]
pub fn read_outer(packet: Packet, config: &Config, outer: &mut Outer) -> bool {
    // SAFETY: all fields are integers, for which zero is a value.
    let mut key: TunnelKey = unsafe { mem::zeroed() };
    let size = size_of::<TunnelKey>() as u32;
    // SAFETY (both calls): the context is the program's own, `key` lives on this frame and its true size is given.
    if unsafe { bpf_skb_get_tunnel_key(packet.skb(), &raw mut key, size, 0) } == 0 {
        // SAFETY: without the IPv6 flag the helper writes the IPv4 members.
        let (source, to) = unsafe { (key.__bindgen_anon_1.remote_ipv4, key.__bindgen_anon_3.local_ipv4) };
        *outer = Outer { source: Addr::v4(source.to_be_bytes()), egress_id: key.tunnel_id };
        return Addr::v4(to.to_be_bytes()) == config.self_node;
    }
    if unsafe { bpf_skb_get_tunnel_key(packet.skb(), &raw mut key, size, BPF_F_TUNINFO_IPV6.into()) } == 0 {
        // SAFETY: with the IPv6 flag the helper writes the IPv6 members.
        let (source, to) = unsafe { (key.__bindgen_anon_1.remote_ipv6, key.__bindgen_anon_3.local_ipv6) };
        *outer = Outer { source: Addr::from_words(source), egress_id: key.tunnel_id };
        return Addr::from_words(to) == config.self_node;
    }
    false
}

/// Whether a plain packet from the uplink is an overlay packet by its headers.
#[inline(always)]
pub fn is_for_us(plain: &Plain, config: &Config) -> bool {
    plain.is_udp_to(config.tunnel_port) && plain.daddr == config.self_node && config.is_overlay_in_program()
}

/// Removes the outer headers of a simple packet for which [`is_for_us`] holds, and stores their content. False if the
/// packet is unchanged and left to the device.
#[inline(never)]
pub fn decapsulate(packet: Packet, config: &Config, outer: &mut Outer) -> bool {
    try_decapsulate(packet, config, outer).is_some()
}

#[inline(always)]
fn try_decapsulate(packet: Packet, config: &Config, outer: &mut Outer) -> Option<()> {
    if packet.gso_size() != 0 || !packet.is_for_this_host() {
        return None;
    }
    let family = match u16::from_be_bytes(packet.load(ETH_LEN - 2)?) {
        ethertype::IPV4 => Family::V4,
        _ => Family::V6,
    };
    // Too long for a pod. Where nodes are connected by veth devices, the mark of the sender that the packet is encapsulated
    // (`skb->encapsulation`) is still there, which only the device clears. With it, `bpf_skb_change_tail` refuses to make
    // fragments.
    if packet.len() > L3 + overhead(family) + config.pod_mtu as usize {
        return None;
    }
    let (at, source) = match family {
        Family::V4 => (L3 + IPV4_LEN, Addr::v4(packet.load(L3 + ipv4::SADDR)?)),
        Family::V6 => (L3 + IPV6_LEN, packet.load_addr(L3 + ipv6::SADDR)?),
    };
    if !is_plain(packet, family)? {
        return None;
    }
    let udp: [u8; UDP_LEN] = packet.load(at)?;
    let vxlan: [u32; 2] = [packet.load(at + UDP_LEN)?, packet.load(at + UDP_LEN + 4)?].map(u32::from_be_bytes);
    let length = usize::from(u16::from_be_bytes([udp[4], udp[5]]));
    let checksum = [udp[l4::UDP_CHECKSUM], udp[l4::UDP_CHECKSUM + 1]];
    // Other flags are left to the device.
    if packet.len() != at + length || checksum != [0; 2] || vxlan[0] != VXLAN_FLAGS || vxlan[1] & 0xff != 0 {
        return None;
    }
    let inner: [u8; 2] = packet.load(at + UDP_LEN + VXLAN_LEN + 12)?;
    let room = match u16::from_be_bytes(inner) {
        ethertype::IPV4 if family == Family::V4 => HeadroomChange::Plain,
        ethertype::IPV6 if family == Family::V6 => HeadroomChange::Plain,
        ethertype::IPV4 => HeadroomChange::DecapsulateV4,
        ethertype::IPV6 => HeadroomChange::DecapsulateV6,
        _ => return None,
    };
    packet.change_room(-(overhead(family) as i32), room)?;
    *outer = Outer { source, egress_id: vxlan[1] >> 8 };
    // From here on the packet has changed, so this must not fail: `from_overlay` drops a packet without a valid link
    // header as malformed.
    let _unwritten = packet.store(ETH_LEN - 2, inner);
    packet.pull_headers();
    Some(())
}

/// Whether the outer IP header can be removed without further processing.
#[inline(always)]
fn is_plain(packet: Packet, family: Family) -> Option<bool> {
    let experienced = ecn_of(packet, L3, family)? == ECN;
    Some(match family {
        Family::V4 => {
            let head: [u8; IPV4_LEN] = packet.load(L3)?;
            let total = usize::from(u16::from_be_bytes([head[ipv4::TOTAL_LEN], head[ipv4::TOTAL_LEN + 1]]));
            // A header sums to zero with its checksum.
            !experienced && packet.len() == L3 + total && csum::header(&head) == 0
        }
        Family::V6 => {
            let payload = usize::from(u16::from_be_bytes(packet.load(L3 + ipv6::PAYLOAD_LEN)?));
            !experienced && packet.len() == L3 + IPV6_LEN + payload
        }
    })
}

/// A packet of a pod of this node whose policy still names this node, after the hand-over of the address.
#[inline(never)]
pub fn handed_over(run: &Run<'_>, route: &mut Route, egress_id: u32) -> Outcome {
    let is_leaving = Maps.handover(egress_id).is_some_and(|handover| handover.stage() == Some(HandoverStage::Leaving));
    if !is_leaving {
        return counters::refused(egress_id, Verdict::NotGateway);
    }
    pass_on(run, route, egress_id)
}

/// Sends to the other node of a hand-over, with one hop less, as a router does. Otherwise two nodes could pass a reply
/// back and forth forever, if one of them knows of a newer hand-over.
#[inline(never)]
pub fn pass_on(run: &Run<'_>, route: &mut Route, egress_id: u32) -> Outcome {
    if run.headers.ttl <= 1 {
        return Outcome::done(Verdict::NotGateway);
    }
    if let Err(verdict) = run.packet.decrement_ttl(run.headers) {
        return Outcome::done(verdict);
    }
    let Some(handover) = Maps.handover(egress_id) else { return Outcome::done(Verdict::NotGateway) };
    let to = &handover.peer;
    let whole = match mtu::fit(run.wire_length(), run.config.overlay_mtu, run.headers, to) {
        // Packets from the overlay fit. An oversize reply is lost; its retransmission reaches the new owner.
        Fit::Tell(_) | Fit::Lost => return Outcome::done(Verdict::OverlayTooNarrow),
        Fit::Cut => false,
        Fit::Whole => true,
    };
    Outcome::redirected(Verdict::HandedOver, encapsulate(run, to, egress_id, whole, route))
}
