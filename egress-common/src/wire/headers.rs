//! The parsed headers of a packet: addresses, ports, fragment, lengths.

use core::hint::black_box;

use super::{ETH_LEN, Frame, IPV4_LEN, IPV6_LEN, L3, ethertype, icmp, ipv4, ipv6, l4, tcp};
use super::{
    PROTO_AH, PROTO_DCCP, PROTO_ICMP, PROTO_ICMPV6, PROTO_MOBILITY, PROTO_NONE, PROTO_SCTP, PROTO_TCP, PROTO_UDP,
    PROTO_UDP_LITE,
};
use crate::abi::{Addr, Direction, Family, Tuple, Verdict};

/// IPv6 extension headers that are walked; a longer chain is [`L4::Unread`].
pub const MAX_EXTENSION_HEADERS: usize = 6;

/// What follows the network header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum L4 {
    Tcp,
    Udp,
    /// SCTP: has ports, and a checksum that covers them but no address (RFC 9260 section 6.8).
    Sctp,
    /// A query with an identifier: echo, for IPv4 also timestamp (RFC 5508).
    EchoRequest,
    EchoReply,
    /// An ICMP error, which quotes a packet.
    IcmpError,
    /// A protocol without ports, identified by its addresses.
    Other,
    /// A later fragment of a packet that may have ports.
    Later,
    /// Not translatable: other ICMP (a redirect would change the receiver's routes); AH, which authenticates the
    /// addresses; the mobility header, DCCP and UDP-Lite, whose checksums cover them; no next header.
    Refused,
    /// A known protocol with a truncated header.
    Short,
    /// More IPv6 extension headers than are walked.
    Unread,
}

impl L4 {
    /// Whether a flow of this protocol may begin with any packet.
    #[inline(always)]
    pub const fn begins_anywhere(self) -> bool {
        matches!(self, Self::Udp | Self::Sctp | Self::EchoRequest | Self::Other)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fragment {
    Whole,
    /// Carries the transport header.
    First,
    Later,
}

/// The part of a TCP segment that connection tracking needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// From a pod: the acknowledgement number. To a pod: the sequence number, for a FIN plus its data and one.
    pub number: u32,
    /// TCP flags. For other protocols: zero from the pod, ACK to the pod.
    pub flags: u8,
}

impl Segment {
    /// A segment that changes no state.
    pub const NONE: Self = Self { number: 0, flags: 0 };
}

/// The headers of a packet as read once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Headers {
    /// Ports are zero where the packet shows none.
    pub tuple: Tuple,
    pub family: Family,
    pub l4: L4,
    pub fragment: Fragment,
    /// Identification of a fragment; wire order, zero for whole packets.
    pub fragment_id: [u8; 4],
    /// Offset of the transport header from the start of the frame.
    pub l4_offset: u16,
    pub tcp_flags: u8,
    /// Acknowledgement number of TCP.
    pub tcp_ack: u32,
    /// Sequence number of TCP, for a FIN plus its data and one.
    pub tcp_end: u32,
    /// Type of the first chunk of SCTP.
    pub sctp_chunk: u8,
    /// Length of the transport header that a segment repeats.
    pub l4_len: u8,
    pub ttl: u8,
    /// IPv4's DF bit; always for IPv6.
    pub dont_fragment: bool,
    /// Source-routed, or with malformed IPv4 options.
    pub source_routed: bool,
}

impl Headers {
    pub const NONE: Self = Self {
        tuple: Tuple::new(Direction::Egress, Addr::UNSPECIFIED, Addr::UNSPECIFIED, 0, 0, 0),
        family: Family::V4,
        l4: L4::Other,
        fragment: Fragment::Whole,
        fragment_id: [0; 4],
        l4_offset: 0,
        tcp_flags: 0,
        tcp_ack: 0,
        tcp_end: 0,
        sctp_chunk: 0,
        l4_len: 0,
        ttl: 0,
        dont_fragment: false,
        source_routed: false,
    };

    /// `None` when the frame cannot be read.
    pub fn parse<F: Frame + ?Sized>(frame: &F, direction: Direction) -> Option<Self> {
        let mut headers = Self::NONE;
        headers.read(frame, direction)?;
        Some(headers)
    }

    /// As [`parse`](Self::parse), in place, because the programs have little stack. [`why_unread`](Self::why_unread)
    /// tells why it failed.
    #[inline(always)]
    pub fn read<F: Frame + ?Sized>(&mut self, frame: &F, direction: Direction) -> Option<()> {
        match u16::from_be_bytes(frame.load(ETH_LEN - 2)?) {
            ethertype::IPV4 => {
                read_v4(frame, L3, direction, self)?;
                self.source_routed = has_source_route(frame, self.l4_offset);
            }
            ethertype::IPV6 => read_v6(frame, L3, direction, self)?,
            _ => return None,
        }
        if self.l4 == L4::Other {
            read_l4(frame, self);
        }
        Some(())
    }

    /// Why [`read`](Self::read) has just failed, into headers that were read before or [`NONE`](Self::NONE): the frame is
    /// not IP, its network header is cut short, or it has an IPv4-mapped address.
    #[inline(always)]
    pub fn why_unread(&self) -> Verdict {
        let is_mapped = self.family == Family::V6 && is_v4_mapped(&self.tuple);
        if is_mapped { Verdict::V4Mapped } else { Verdict::NotIp }
    }

    /// Length of the headers that every segment of a GSO packet repeats, counted from the network header.
    #[inline(always)]
    pub fn header_len(&self) -> u32 {
        self.l4_offset as u32 - L3 as u32 + self.l4_len as u32
    }

    /// Length of the payload after the network headers, from their length field; the frame may be padded, and a quote
    /// truncated. The network header starts at `network_at`. `None` if the field is too small, and for a fragment,
    /// which does not have the length of the whole packet.
    #[inline(always)]
    pub fn message_length<F: Frame + ?Sized>(&self, frame: &F, network_at: usize) -> Option<u32> {
        if self.fragment != Fragment::Whole {
            return None;
        }
        let whole = match self.family {
            Family::V4 => u16::from_be_bytes(frame.load(network_at + ipv4::TOTAL_LEN)?) as u32,
            Family::V6 => u16::from_be_bytes(frame.load(network_at + ipv6::PAYLOAD_LEN)?) as u32 + IPV6_LEN as u32,
        };
        whole.checked_sub((self.l4_offset as u32).checked_sub(network_at as u32)?)
    }

    /// End of the transport checksum, from the start of the frame; without a known checksum, two bytes after the
    /// network headers.
    #[inline(always)]
    pub const fn checksum_end(&self) -> u32 {
        let at = match (self.fragment, self.tuple.protocol) {
            (Fragment::Later, _) => 0,
            (_, PROTO_TCP) => l4::TCP_CHECKSUM,
            (_, PROTO_UDP) => l4::UDP_CHECKSUM,
            (_, PROTO_SCTP) => l4::SCTP_CHECKSUM,
            (_, PROTO_ICMP | PROTO_ICMPV6) => l4::ICMP_CHECKSUM,
            _ => 0,
        };
        self.l4_offset as u32 + at as u32 + 2
    }

    /// The segment of a packet from a pod.
    #[inline(always)]
    pub const fn of_pod(&self) -> Segment {
        Segment { flags: self.tcp_flags, number: self.tcp_ack }
    }

    /// The segment of a packet to a pod.
    #[inline(always)]
    pub const fn for_pod(&self) -> Segment {
        let flags = if self.tuple.protocol == PROTO_TCP { self.tcp_flags } else { tcp::ACK };
        Segment { flags, number: self.tcp_end }
    }

    /// Whether this is UDP to `port`.
    #[inline(always)]
    pub fn is_udp_to(&self, port: u32) -> bool {
        self.l4 == L4::Udp && self.tuple.dport() as u32 == port
    }

    /// Whether a router may fragment the packet. IPv4 without DF, and not a fragment: some datapaths drop the short
    /// middle fragment that fragmentation of a fragment makes.
    #[inline(always)]
    pub fn may_be_fragmented(&self) -> bool {
        !self.dont_fragment && self.fragment == Fragment::Whole
    }

    /// Whether the host may accept this as UDP to `port`: it is, or its transport header was not reached (truncated, or
    /// after more extension headers than are walked).
    #[inline(always)]
    pub fn may_be_udp_to(&self, port: u32) -> bool {
        match self.l4 {
            L4::Udp => self.is_udp_to(port),
            L4::Unread => true,
            _ => self.has_l4() && self.tuple.protocol == PROTO_UDP,
        }
    }

    /// Whether the transport header, and so a checksum to correct, is in this packet.
    #[inline(always)]
    pub fn has_l4(&self) -> bool {
        !matches!(self.fragment, Fragment::Later)
    }

    /// The transport of a fragment, by the protocol of its first one.
    #[inline(always)]
    pub const fn kind_of(protocol: u8) -> L4 {
        match protocol {
            PROTO_TCP => L4::Tcp,
            PROTO_UDP => L4::Udp,
            PROTO_SCTP => L4::Sctp,
            // Or a reply; the caller knows which.
            PROTO_ICMP | PROTO_ICMPV6 => L4::EchoRequest,
            _ => L4::Other,
        }
    }
}

/// Reads the IPv4 header at `at`. If `l4` is `Other`, the transport header is still to be read.
#[inline(always)]
pub(super) fn read_v4<F: Frame + ?Sized>(
    frame: &F,
    at: usize,
    direction: Direction,
    headers: &mut Headers,
) -> Option<()> {
    let head: [u8; IPV4_LEN] = frame.load(at)?;
    let ihl = ((head[0] & 0x0f) as u16) << 2;
    if head[0] >> 4 != 4 || ihl < IPV4_LEN as u16 {
        return None;
    }
    let bits = u16::from_be_bytes([head[ipv4::FRAGMENT], head[ipv4::FRAGMENT + 1]]);
    let protocol = head[ipv4::PROTOCOL];
    let fragment = match (bits & ipv4::OFFSET_MASK, bits & ipv4::MORE_FRAGMENTS) {
        (0, 0) => Fragment::Whole,
        (0, _) => Fragment::First,
        _ => Fragment::Later,
    };
    *headers = Headers {
        tuple: Tuple::new(
            direction,
            Addr::v4([head[12], head[13], head[14], head[15]]),
            Addr::v4([head[16], head[17], head[18], head[19]]),
            0,
            0,
            protocol,
        ),
        l4: unread_kind(fragment, protocol),
        fragment,
        fragment_id: [0, 0, head[ipv4::ID], head[ipv4::ID + 1]],
        l4_offset: at as u16 + ihl,
        ttl: head[ipv4::TTL],
        dont_fragment: bits & ipv4::DONT_FRAGMENT != 0,
        ..Headers::NONE
    };
    Some(())
}

/// The transport as the network header shows it. A later fragment of a protocol without ports needs no first one.
#[inline(always)]
const fn unread_kind(fragment: Fragment, protocol: u8) -> L4 {
    match (fragment, protocol) {
        (_, PROTO_AH | PROTO_MOBILITY | PROTO_NONE | PROTO_DCCP | PROTO_UDP_LITE) => L4::Refused,
        (Fragment::Later, _) if is_extension(protocol) || !matches!(Headers::kind_of(protocol), L4::Other) => L4::Later,
        _ => L4::Other,
    }
}

/// Reads the IPv6 header at `at` and what extends it. `None` also for an IPv4-mapped address, which the maps would
/// treat as the IPv4 address.
#[inline(always)]
pub(super) fn read_v6<F: Frame + ?Sized>(
    frame: &F,
    at: usize,
    direction: Direction,
    headers: &mut Headers,
) -> Option<()> {
    // Two bytes instead of one, because the verifier does not accept the check of a single byte at an unknown offset.
    let [version, _] = frame.load(at)?;
    let [next_header, hop_limit] = frame.load(at + ipv6::NEXT_HEADER)?;
    if version >> 4 != 6 {
        return None;
    }
    *headers = Headers {
        tuple: Tuple::new(direction, Addr::UNSPECIFIED, Addr::UNSPECIFIED, 0, 0, 0),
        family: Family::V6,
        l4_offset: (at + IPV6_LEN) as u16,
        ttl: hop_limit,
        dont_fragment: true,
        ..Headers::NONE
    };
    // One at a time, so that only one is on the stack.
    headers.tuple.saddr = frame.load_addr(at + ipv6::SADDR)?;
    headers.tuple.daddr = frame.load_addr(at + ipv6::DADDR)?;
    if is_v4_mapped(&headers.tuple) {
        return None;
    }
    let protocol = walk_extensions(frame, headers, next_header);
    headers.tuple.protocol = protocol;
    headers.l4 = match unread_kind(headers.fragment, protocol) {
        L4::Other if is_extension(protocol) => L4::Unread,
        kind => kind,
    };
    Some(())
}

/// Whether one of the addresses, which an IPv6 packet has, is the IPv4-mapped form of an IPv4 address. That form is for
/// programming interfaces and invalid in a packet (RFC 4291 section 2.5.5.2); Linux drops packets with such a source
/// (commit 6af1799aaf3f).
#[inline(always)]
fn is_v4_mapped(tuple: &Tuple) -> bool {
    tuple.saddr.family() == Family::V4 || tuple.daddr.family() == Family::V4
}

const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const DESTINATION: u8 = 60;

/// Whether it is the number of an extension header that is stepped over.
#[inline(always)]
const fn is_extension(protocol: u8) -> bool {
    matches!(protocol, HOP_BY_HOP | ROUTING | FRAGMENT | DESTINATION)
}

/// Skips extension headers (RFC 8200 section 4) and returns the protocol after them, or the number of the first header
/// that was not reached.
#[inline(always)]
fn walk_extensions<F: Frame + ?Sized>(frame: &F, headers: &mut Headers, first: u8) -> u8 {
    let mut next = first;
    for _ in 0..MAX_EXTENSION_HEADERS {
        if !is_extension(next) {
            return next;
        }
        // The mask bounds the offset for the verifier; six headers of 255 units stay below it.
        let Some(ext) = frame.load::<8>((headers.l4_offset & 0x3fff) as usize) else { return next };
        let length = if next == FRAGMENT {
            headers.fragment_id = [ext[4], ext[5], ext[6], ext[7]];
            headers.fragment = match (u16::from_be_bytes([ext[2], ext[3]]) >> 3, ext[3] & 1) {
                // An atomic fragment is a whole packet (RFC 6946).
                (0, 0) => Fragment::Whole,
                (0, _) => Fragment::First,
                _ => Fragment::Later,
            };
            8
        } else {
            if next == ROUTING {
                // With no segments left it has reached its destination (RFC 8200 section 4.4).
                headers.source_routed |= ext[3] != 0;
            }
            (ext[1] as u16 + 1) << 3
        };
        headers.l4_offset += length;
        next = ext[0];
        if headers.fragment == Fragment::Later {
            return next;
        }
    }
    next
}

/// Whether the IPv4 options up to `end` contain a source route or are malformed.
#[inline(always)]
fn has_source_route<F: Frame + ?Sized>(frame: &F, end: u16) -> bool {
    const OPTIONS: u16 = (L3 + IPV4_LEN) as u16;
    const MOST: usize = 40;
    const END: u8 = 0;
    const NO_OPERATION: u8 = 1;
    let mut at = OPTIONS;
    for _ in 0..MOST {
        if at >= end {
            return false;
        }
        // After the comparison the compiler would omit the mask, and the verifier of Linux 6.1 would not know the
        // bound.
        let place = black_box(at) & 0xff;
        let Some([kind, length]) = frame.load(place as usize) else { return false };
        at += match (kind, length) {
            (END, _) => return false,
            (NO_OPERATION, _) => 1,
            (ipv4::LOOSE_SOURCE_ROUTE | ipv4::STRICT_SOURCE_ROUTE, _) | (_, 0 | 1) => return true,
            (_, length) => length as u16,
        };
    }
    false
}

/// The number after the data that a FIN may carry. Out of line, because FINs are rare.
#[inline(never)]
fn end_of_fin<F: Frame + ?Sized>(frame: &F, headers: &mut Headers) {
    let data = headers.message_length(frame, L3).map_or(0, |length| length.saturating_sub(headers.l4_len.into()));
    headers.tcp_end = headers.tcp_end.wrapping_add(data + 1);
}

#[inline(always)]
fn read_l4<F: Frame + ?Sized>(frame: &F, headers: &mut Headers) {
    if headers.fragment == Fragment::Later {
        return;
    }
    let protocol = headers.tuple.protocol;
    match (protocol, headers.family) {
        (PROTO_TCP | PROTO_UDP | PROTO_SCTP, _) => {}
        (PROTO_ICMP, Family::V4) | (PROTO_ICMPV6, Family::V6) => {}
        // Identified by its addresses only.
        _ => return,
    }
    let offset = (headers.l4_offset & 0x3fff) as usize;
    let Some(head) = frame.load::<8>(offset) else {
        headers.l4 = L4::Short;
        return;
    };
    headers.l4_len = 8;
    headers.l4 = match protocol {
        PROTO_ICMP | PROTO_ICMPV6 => icmp::kind(headers.family, head[0]),
        _ => Headers::kind_of(protocol),
    };
    match headers.l4 {
        L4::Tcp => match frame.load::<10>(offset + l4::TCP_SEQUENCE) {
            Some([a, b, c, d, e, f, g, h, data_offset, flags]) => {
                headers.l4_len = (data_offset >> 4) << 2;
                headers.tcp_flags = flags;
                headers.tcp_ack = u32::from_be_bytes([e, f, g, h]);
                headers.tcp_end = u32::from_be_bytes([a, b, c, d]);
                if flags & (tcp::FIN | tcp::RST) == tcp::FIN {
                    end_of_fin(frame, headers);
                }
            }
            None => {
                headers.l4 = L4::Short;
                return;
            }
        },
        L4::EchoRequest | L4::EchoReply => {
            let id = u16::from_be_bytes([head[l4::ECHO_ID], head[l4::ECHO_ID + 1]]);
            headers.tuple.set_ports(id, id);
            return;
        }
        // A packet without a chunk is malformed (RFC 9260 section 3).
        L4::Sctp => match frame.load::<4>(offset + l4::SCTP_CHUNK) {
            Some([chunk, ..]) => headers.sctp_chunk = chunk,
            None => {
                headers.l4 = L4::Short;
                return;
            }
        },
        L4::Udp => {}
        _ => return,
    }
    let (sport, dport) = (u16::from_be_bytes([head[0], head[1]]), u16::from_be_bytes([head[2], head[3]]));
    headers.tuple.set_ports(sport, dport);
}

#[cfg(test)]
mod tests;
