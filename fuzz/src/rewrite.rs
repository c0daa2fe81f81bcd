//! Model of the programs' packet rewrites (egress-ebpf/src/packet.rs, rewrite.rs, icmp.rs, overlay.rs) on a vector:
//! addresses and ports with incremental checksums, ICMP errors with their quotes, and generated answers. `None` means a
//! truncated packet.

use egress_common::abi::{Addr, Config, Family};
use egress_common::decide::from_overlay::Outer;
use egress_common::decide::{End, Rewrite};
use egress_common::wire::icmp::{ERROR_HEADER_V4, ERROR_HEADER_V6, write_error};
use egress_common::wire::nd::ADVERTISEMENT_LEN;
use egress_common::wire::{
    ETH_LEN, Fragment, Frame as _, Headers, IPV4_LEN, IPV6_LEN, L3, L4, PROTO_ICMP, PROTO_ICMPV6, PROTO_SCTP,
    PROTO_TCP, PROTO_UDP, Quote, csum, ethertype, ipv4, ipv6, l4, tcp,
};

fn field<const N: usize>(frame: &[u8], at: usize) -> Option<[u8; N]> {
    frame.load(at)
}

fn put(frame: &mut [u8], at: usize, bytes: &[u8]) -> Option<()> {
    frame.get_mut(at..at + bytes.len())?.copy_from_slice(bytes);
    Some(())
}

/// Change of a sum when words are replaced.
fn change_of(from: &[u8], to: &[u8]) -> u64 {
    let word = |pair: &[u8]| u16::from_ne_bytes([pair[0], pair[1]]);
    let pairs = from.chunks_exact(2).zip(to.chunks_exact(2));
    pairs.map(|(from, to)| u64::from(!word(from)) + u64::from(word(to))).sum()
}

/// Updates the checksum at `at`. If zero means "none", zero stays, and no other value becomes zero.
fn correct(frame: &mut [u8], at: usize, zero_is_none: bool, change: u64) -> Option<()> {
    let old = u16::from_ne_bytes(field(frame, at)?);
    if zero_is_none && old == 0 {
        return Some(());
    }
    let sum = csum::replace(old, change);
    put(frame, at, &(if zero_is_none && sum == 0 { 0xffff } else { sum }).to_ne_bytes())
}

/// One step of CRC32c (RFC 9260 appendix A).
const fn shifted(rest: u32) -> u32 {
    if rest & 1 == 1 { rest >> 1 ^ 0x82f6_3b78 } else { rest >> 1 }
}

/// The checksum of an SCTP packet whose own field is zero.
#[must_use]
pub fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |rest, byte| (0..8).fold(rest ^ u32::from(*byte), |rest, _| shifted(rest)))
}

/// Writes ports into the SCTP header at `at`, and updates its checksum if it is present, not zero and over a message of
/// known length: by the difference of the ports, shifted through the whole message.
fn put_sctp_ports(frame: &mut [u8], at: usize, ports: [u8; 4], length: Option<u32>) -> Option<()> {
    let old: [u8; 4] = field(frame, at)?;
    put(frame, at, &ports)?;
    let (Some(length), Some(sum)) = (length, field(frame, at + l4::SCTP_CHECKSUM)) else { return Some(()) };
    if sum == [0; 4] {
        return Some(());
    }
    let difference = u32::from_le_bytes(old) ^ u32::from_le_bytes(ports);
    let difference = (0..8 * length).fold(difference, |rest, _| shifted(rest));
    put(frame, at + l4::SCTP_CHECKSUM, &(u32::from_le_bytes(sum) ^ difference).to_le_bytes())
}

fn sctp_ports(end: End, port: u16, other: u16) -> [u8; 4] {
    let ([a, b], [c, d]) = (port.to_be_bytes(), other.to_be_bytes());
    if end == End::Source { [a, b, c, d] } else { [c, d, a, b] }
}

/// Offset of the transport checksum that covers the addresses, and whether zero means "none".
const fn sum_over_addresses(protocol: u8) -> Option<(usize, bool)> {
    match protocol {
        PROTO_TCP => Some((l4::TCP_CHECKSUM, false)),
        PROTO_UDP => Some((l4::UDP_CHECKSUM, true)),
        PROTO_ICMPV6 => Some((l4::ICMP_CHECKSUM, false)),
        _ => None,
    }
}

fn old_end(headers: &Headers, end: End) -> (Addr, u16) {
    match end {
        End::Source => (headers.tuple.saddr, headers.tuple.sport()),
        End::Destination => (headers.tuple.daddr, headers.tuple.dport()),
    }
}

const fn addr_at(family: Family, end: End) -> usize {
    match (family, end) {
        (Family::V4, End::Source) => ipv4::SADDR,
        (Family::V4, End::Destination) => ipv4::DADDR,
        (Family::V6, End::Source) => ipv6::SADDR,
        (Family::V6, End::Destination) => ipv6::DADDR,
    }
}

/// The address in the header that starts at `header`, and for IPv4 the header's checksum.
fn replace_addr(frame: &mut [u8], family: Family, header: usize, end: End, old: &Addr, new: &Addr) -> Option<()> {
    let at = header + addr_at(family, end);
    match family {
        Family::V4 => {
            correct(frame, header + ipv4::CHECKSUM, false, change_of(&old.v4_octets(), &new.v4_octets()))?;
            put(frame, at, &new.v4_octets())
        }
        Family::V6 => put(frame, at, &new.octets()),
    }
}

/// The reset that answers a segment (egress-ebpf/src/icmp.rs); `None` if there is none.
pub fn reset(frame: &[u8], headers: &Headers) -> Option<Vec<u8>> {
    const LEN: usize = 20;
    let answers = headers.l4 == L4::Tcp && headers.tcp_flags & tcp::RST == 0;
    if !answers || headers.fragment != Fragment::Whole || headers.source_routed {
        return None;
    }
    let at = usize::from(headers.l4_offset);
    // Up to its checksum.
    field::<2>(frame, at + l4::TCP_CHECKSUM)?;
    let (sequence, acknowledged) = (u32::from_be_bytes(field(frame, at + 4)?), field::<4>(frame, at + 8)?);
    let data = u32::try_from(frame.len().saturating_sub(L3 + headers.header_len() as usize)).ok()?;
    let mut out = frame[..at].to_vec();
    out.extend([field::<2>(frame, at + l4::DPORT)?, field::<2>(frame, at + l4::SPORT)?].concat());
    if headers.tcp_flags & tcp::ACK != 0 {
        out.extend([acknowledged, [0; 4], [0x50, tcp::RST, 0, 0]].concat());
    } else {
        let ends = u32::from(headers.tcp_flags & tcp::SYN != 0) + u32::from(headers.tcp_flags & tcp::FIN != 0);
        let next = sequence.wrapping_add(data).wrapping_add(ends).to_be_bytes();
        out.extend([[0; 4], next, [0x50, tcp::RST | tcp::ACK, 0, 0]].concat());
    }
    out.extend([0; 4]);
    let (from, to) = (headers.tuple.daddr, headers.tuple.saddr);
    let addresses = match headers.family {
        Family::V4 => [from.v4_octets(), to.v4_octets()].concat(),
        Family::V6 => [from.octets(), to.octets()].concat(),
    };
    let covered = [addresses.as_slice(), &[0, PROTO_TCP, 0, 20], &out[at..]].concat();
    put(&mut out, at + l4::TCP_CHECKSUM, &(!csum::fold64(csum::sum(&covered))).to_ne_bytes())?;
    match headers.family {
        Family::V4 => {
            let total = u16::try_from(at - L3 + LEN).ok()?.to_be_bytes();
            let words = [(0, [out[L3], 0]), (ipv4::TOTAL_LEN, total), (ipv4::TTL, [64, out[L3 + ipv4::PROTOCOL]])];
            let change = words.iter().map(|(word, new)| change_of(&out[L3 + word..L3 + word + 2], new)).sum();
            correct(&mut out, L3 + ipv4::CHECKSUM, false, change)?;
            words.iter().try_for_each(|(word, new)| put(&mut out, L3 + word, new))?;
            put(&mut out, L3 + ipv4::SADDR, &addresses)?;
        }
        Family::V6 => {
            let length = u16::try_from(at - L3 - IPV6_LEN + LEN).ok()?.to_be_bytes();
            let head = [0x60, 0, 0, 0, length[0], length[1], out[L3 + ipv6::NEXT_HEADER], 64];
            put(&mut out, L3, &[head.as_slice(), &addresses].concat())?;
        }
    }
    let (dmac, smac) = (field::<6>(frame, 0)?, field::<6>(frame, 6)?);
    put(&mut out, 0, &[smac, dmac].concat())?;
    Some(out)
}

/// Rewrites one end of the packet.
pub fn rewrite(frame: &mut [u8], headers: &Headers, rewrite: &Rewrite) -> Option<()> {
    let (old, old_port) = old_end(headers, rewrite.end);
    let (transport, protocol) = (usize::from(headers.l4_offset), headers.tuple.protocol);
    if headers.has_l4() {
        let covers = sum_over_addresses(protocol).filter(|_| headers.l4 != L4::Other);
        if let Some((at, zero_is_none)) = covers {
            correct(frame, transport + at, zero_is_none, change_of(&old.octets(), &rewrite.addr.octets()))?;
        }
        if old_port != rewrite.port && headers.l4 == L4::Sctp {
            let other = if rewrite.end == End::Source { headers.tuple.dport() } else { headers.tuple.sport() };
            // A fragment, which has no message length, is refused before.
            let length = headers.message_length(frame as &[u8], L3)?;
            put_sctp_ports(frame, transport, sctp_ports(rewrite.end, rewrite.port, other), Some(length))?;
        } else if old_port != rewrite.port {
            let port_at = match (protocol, rewrite.end) {
                (PROTO_ICMP | PROTO_ICMPV6, _) => l4::ECHO_ID,
                (_, End::Source) => l4::SPORT,
                (_, End::Destination) => l4::DPORT,
            };
            let sum = if protocol == PROTO_ICMP { Some((l4::ICMP_CHECKSUM, false)) } else { covers };
            let (at, zero_is_none) = sum?;
            let (from, to) = (old_port.to_be_bytes(), rewrite.port.to_be_bytes());
            correct(frame, transport + at, zero_is_none, change_of(&from, &to))?;
            put(frame, transport + port_at, &to)?;
        }
    }
    replace_addr(frame, headers.family, L3, rewrite.end, &old, &rewrite.addr)
}

/// Rewrites one end of an ICMP error, and the opposite end of its quoted packet.
pub fn rewrite_error(frame: &mut [u8], headers: &Headers, quote: &Quote, rewrite: &Rewrite) -> Option<()> {
    let (old, _) = old_end(headers, rewrite.end);
    let inner_end = if rewrite.end == End::Source { End::Destination } else { End::Source };
    let addresses = change_of(&old.octets(), &rewrite.addr.octets());
    // A quoted IPv4 address and its header's checksum cancel out in the error's.
    let mut change = if headers.family == Family::V6 { addresses } else { 0 };
    change += rewrite_quoted_transport(frame, quote, rewrite, inner_end, addresses)?;
    let sum_at = usize::from(headers.l4_offset) + l4::ICMP_CHECKSUM;
    if change != 0 {
        correct(frame, sum_at, false, change)?;
    }
    if headers.family == Family::V6 {
        correct(frame, sum_at, false, addresses)?;
    }
    replace_addr(frame, headers.family, quote.network_at(), inner_end, &old, &rewrite.addr)?;
    replace_addr(frame, headers.family, L3, rewrite.end, &old, &rewrite.addr)
}

/// Change of the sum over the quote.
fn rewrite_quoted_transport(
    frame: &mut [u8],
    quote: &Quote,
    rewrite: &Rewrite,
    inner: End,
    addresses: u64,
) -> Option<u64> {
    if quote.l4() == L4::Other {
        return Some(0);
    }
    let (at, tuple) = (quote.transport_at(), quote.tuple());
    let (old_port, port_at) = match inner {
        _ if matches!(tuple.protocol, PROTO_ICMP | PROTO_ICMPV6) => (tuple.sport(), l4::ECHO_ID),
        End::Source => (tuple.sport(), l4::SPORT),
        End::Destination => (tuple.dport(), l4::DPORT),
    };
    let (from, to) = (old_port.to_be_bytes(), rewrite.port.to_be_bytes());
    if tuple.protocol == PROTO_SCTP {
        if from == to {
            return Some(0);
        }
        let end = (at + l4::SCTP_CHECKSUM + 4).min(frame.len()).max(at + 4);
        let before = frame.get(at..end)?.to_vec();
        let other = if inner == End::Source { tuple.dport() } else { tuple.sport() };
        let length = quote.message_length(frame as &[u8]);
        put_sctp_ports(frame, at, sctp_ports(inner, rewrite.port, other), length)?;
        return Some(change_of(&before, &frame[at..end]));
    }
    let port = change_of(&from, &to);
    let mut change = 0;
    if from != to {
        change = port;
        put(frame, at + port_at, &to)?;
    }
    let (sum_at, covered) = match tuple.protocol {
        PROTO_ICMP => (l4::ICMP_CHECKSUM, port),
        // The checksum of TCP is late in the header, which must be complete up to that word.
        PROTO_TCP if frame.len() < at + l4::TCP_CHECKSUM + 4 => return Some(change),
        protocol => match sum_over_addresses(protocol) {
            Some((sum_at, _)) => (sum_at, addresses + port),
            None => return Some(change),
        },
    };
    let Some(bytes) = field::<2>(frame, at + sum_at) else { return Some(change) };
    let old = u16::from_ne_bytes(bytes);
    let new = match csum::replace(old, covered) {
        _ if tuple.protocol == PROTO_UDP && old == 0 => 0,
        0 if tuple.protocol == PROTO_UDP => 0xffff,
        new => new,
    };
    put(frame, at + sum_at, &new.to_ne_bytes())?;
    Some(change + change_of(&old.to_ne_bytes(), &new.to_ne_bytes()))
}

/// Decrements the TTL.
pub fn decrement_ttl(frame: &mut [u8], family: Family) -> Option<()> {
    let at = L3 + if family == Family::V4 { ipv4::TTL } else { ipv6::HOP_LIMIT };
    let ttl: [u8; 1] = field(frame, at)?;
    let less = [ttl[0].wrapping_sub(1)];
    if family == Family::V4 {
        let protocol: [u8; 1] = field(frame, L3 + ipv4::PROTOCOL)?;
        let change = change_of(&[ttl[0], protocol[0]], &[less[0], protocol[0]]);
        correct(frame, L3 + ipv4::CHECKSUM, false, change)?;
    }
    put(frame, at, &less)
}

/// Turns the packet into an ICMP error to its sender; `None` if not allowed.
#[must_use]
pub fn error(frame: &[u8], headers: &Headers, head: u64, from: &Addr) -> Option<Vec<u8>> {
    /// Quoted bytes of the transport header, and the maximum of the whole quote.
    const QUOTED_L4: usize = 20;
    const LONGEST: usize = 128;
    if *from == Addr::UNSPECIFIED || matches!(headers.l4, L4::IcmpError | L4::Sctp) || !headers.has_l4() {
        return None;
    }
    let network = usize::from(headers.l4_offset) - L3;
    let quoted = (network + QUOTED_L4).min(frame.len() - L3) & !3;
    if quoted > LONGEST {
        return None;
    }
    let mut quote = frame[L3..L3 + quoted].to_vec();
    let sum_at = match headers.tuple.protocol {
        PROTO_TCP => Some(network + l4::TCP_CHECKSUM),
        PROTO_UDP => Some(network + l4::UDP_CHECKSUM),
        _ => None,
    };
    if let Some(at) = sum_at {
        // The fixed point of a device's checksum completion.
        let old = u16::from_ne_bytes(field(&quote, at)?);
        let fixed = csum::fixed_point(csum::sum(&quote[network..]), old);
        put(&mut quote, at, &fixed.to_ne_bytes())?;
    }
    let mut buffer = [0; ADVERTISEMENT_LEN];
    let length = u16::try_from(quoted).ok()?;
    write_error(headers.family, head, from, &headers.tuple.saddr, length, csum::sum(&quote), &mut buffer);
    let header = if headers.family == Family::V4 { ERROR_HEADER_V4 } else { ERROR_HEADER_V6 };
    Some([&frame[6..12], &frame[..6], &frame[12..L3], &buffer[..header], &quote].concat())
}

/// UDP, VXLAN and the inner link header.
const BEHIND_IP: usize = 8 + 8 + ETH_LEN;

/// The inner packet and outer headers of an overlay packet that the program decapsulates; `None` if it is left to the
/// device.
#[must_use]
pub fn decapsulated(frame: &[u8], headers: &Headers, config: &Config) -> Option<(Outer, Vec<u8>)> {
    let for_us = headers.is_udp_to(config.tunnel_port)
        && headers.tuple.daddr == config.self_node
        && config.is_overlay_in_program()
        && headers.fragment == Fragment::Whole;
    let (at, ecn, is_whole) = match headers.family {
        Family::V4 => {
            let head: [u8; IPV4_LEN] = field(frame, L3)?;
            let total = usize::from(u16::from_be_bytes([head[ipv4::TOTAL_LEN], head[ipv4::TOTAL_LEN + 1]]));
            (L3 + IPV4_LEN, head[1] & 3, frame.len() == L3 + total && csum::header(&head) == 0)
        }
        Family::V6 => {
            let payload = usize::from(u16::from_be_bytes(field(frame, L3 + ipv6::PAYLOAD_LEN)?));
            (L3 + IPV6_LEN, field::<2>(frame, L3)?[1] >> 4 & 3, frame.len() == L3 + IPV6_LEN + payload)
        }
    };
    if !for_us || usize::from(headers.l4_offset) != at || ecn == 3 || !is_whole {
        return None;
    }
    let udp: [u8; 8] = field(frame, at)?;
    let (flags, vni) = (field::<4>(frame, at + 8)?, u32::from_be_bytes(field(frame, at + 12)?));
    let length = usize::from(u16::from_be_bytes([udp[4], udp[5]]));
    if frame.len() != at + length || udp[6..] != [0; 2] || flags != [8, 0, 0, 0] || vni & 0xff != 0 {
        return None;
    }
    let kind: [u8; 2] = field(frame, at + BEHIND_IP - 2)?;
    if ![ethertype::IPV4, ethertype::IPV6].contains(&u16::from_be_bytes(kind)) {
        return None;
    }
    let inner = [&frame[..12], &kind, &frame[at + BEHIND_IP..]].concat();
    if inner.len() - L3 > config.pod_mtu as usize {
        return None;
    }
    Some((Outer { source: headers.tuple.saddr, egress_id: vni >> 8 }, inner))
}
