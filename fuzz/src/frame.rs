//! Builder of frames, and full computation of checksums.

use crate::rewrite::crc32c;
use egress_common::abi::{Addr, Direction, Family};
use egress_common::wire::{
    Fragment, Headers, IPV4_LEN, IPV6_LEN, L3, PROTO_ICMP, PROTO_ICMPV6, PROTO_SCTP, PROTO_TCP, PROTO_UDP, Quote, csum,
    ethertype, ipv4, l4,
};

/// Description of a packet.
#[derive(Clone, Copy, Debug)]
pub struct FuzzPacket {
    pub saddr: Addr,
    pub daddr: Addr,
    pub protocol: u8,
    pub sport: u16,
    pub dport: u16,
    /// TCP flags, or the ICMP type.
    pub kind: u8,
    pub ttl: u8,
    /// Offset in units of eight bytes, whether more follow, and the identification; IPv4 only.
    pub fragment: (u16, bool, u16),
    pub data: usize,
    /// UDP over IPv4 without a checksum.
    pub unsummed: bool,
}

impl FuzzPacket {
    #[must_use]
    pub fn frame(&self) -> Vec<u8> {
        let transport = self.transport();
        let mut frame = vec![2, 0, 0, 0, 2, 2, 2, 0, 0, 0, 0, 0x50];
        let length = u16::try_from(transport.len()).expect("a short packet");
        if self.saddr.family() == Family::V4 {
            let (offset, more, id) = self.fragment;
            let bits = offset & ipv4::OFFSET_MASK | if more { ipv4::MORE_FRAGMENTS } else { 0 };
            let mut head = vec![0x45, 0];
            head.extend((length + 20).to_be_bytes());
            head.extend(id.to_be_bytes());
            head.extend(bits.to_be_bytes());
            head.extend([self.ttl, self.protocol, 0, 0]);
            head.extend(self.saddr.v4_octets());
            head.extend(self.daddr.v4_octets());
            let sum = (!csum::fold64(csum::sum(&head))).to_ne_bytes();
            head[ipv4::CHECKSUM..ipv4::CHECKSUM + 2].copy_from_slice(&sum);
            frame.extend(ethertype::IPV4.to_be_bytes());
            frame.extend(head);
        } else {
            frame.extend(ethertype::IPV6.to_be_bytes());
            frame.extend([0x60, 0, 0, 0]);
            frame.extend(length.to_be_bytes());
            frame.extend([self.protocol, self.ttl]);
            frame.extend(self.saddr.octets());
            frame.extend(self.daddr.octets());
        }
        frame.extend(transport);
        frame
    }

    fn transport(&self) -> Vec<u8> {
        let ports = [self.sport.to_be_bytes(), self.dport.to_be_bytes()].concat();
        let (mut bytes, sum_at) = match self.protocol {
            PROTO_TCP => {
                ([ports.as_slice(), &[0, 0, 0, 1, 0, 0, 0, 2, 0x50, self.kind, 0x20, 0, 0, 0, 0, 0]].concat(), 16)
            }
            PROTO_UDP => {
                let length = u16::try_from(8 + self.data).expect("a short packet");
                ([ports.as_slice(), &length.to_be_bytes(), &[0, 0]].concat(), 6)
            }
            PROTO_SCTP => {
                let length = u16::try_from(4 + self.data).expect("a short packet").to_be_bytes();
                ([ports.as_slice(), &[0, 0, 0, 9, 0, 0, 0, 0, self.kind, 0], &length].concat(), 8)
            }
            PROTO_ICMP | PROTO_ICMPV6 => {
                ([&[self.kind, 0, 0, 0], self.sport.to_be_bytes().as_slice(), &[0, 1]].concat(), 2)
            }
            _ => (ports, usize::MAX),
        };
        bytes.extend((0..self.data).map(|index| u8::try_from(index % 251).unwrap_or_default()));
        if self.protocol == PROTO_SCTP && !self.unsummed {
            let sum = crc32c(&bytes);
            bytes[sum_at..sum_at + 4].copy_from_slice(&sum.to_le_bytes());
        } else if sum_at != usize::MAX && !self.unsummed {
            let sum = transport_sum(&self.saddr, &self.daddr, self.protocol, &bytes);
            let sum = if sum == 0 && self.protocol == PROTO_UDP { 0xffff } else { sum };
            bytes[sum_at..sum_at + 2].copy_from_slice(&sum.to_ne_bytes());
        }
        bytes
    }
}

/// The checksum over pseudo header and transport, including its own field; memory order.
fn transport_sum(saddr: &Addr, daddr: &Addr, protocol: u8, bytes: &[u8]) -> u16 {
    let mut covered = Vec::new();
    if protocol != PROTO_ICMP {
        // The sum of an IPv4-mapped address is that of its IPv4 address plus ffff, which is zero in one's complement.
        covered.extend(saddr.octets());
        covered.extend(daddr.octets());
        covered.extend([0, protocol]);
        covered.extend(u16::try_from(bytes.len()).unwrap_or_default().to_be_bytes());
    }
    covered.extend(bytes);
    !csum::fold64(csum::sum(&covered))
}

/// Whether the checksums are valid; `None` for a truncated packet, a fragment, or an unknown checksum.
#[must_use]
pub fn is_summed_right(frame: &[u8]) -> Option<bool> {
    let headers = Headers::parse(frame, Direction::Egress)?;
    let end = match headers.family {
        Family::V4 => {
            let header = frame.get(L3..usize::from(headers.l4_offset))?;
            if csum::fold64(csum::sum(header)) != 0xffff {
                return Some(false);
            }
            L3 + usize::from(u16::from_be_bytes(frame.get(L3 + 2..L3 + 4)?.try_into().ok()?))
        }
        Family::V6 => L3 + IPV6_LEN + usize::from(u16::from_be_bytes(frame.get(L3 + 4..L3 + 6)?.try_into().ok()?)),
    };
    let transport = frame.get(usize::from(headers.l4_offset)..end)?;
    let (least, sum_at) = match headers.tuple.protocol {
        PROTO_TCP => (20, l4::TCP_CHECKSUM),
        PROTO_UDP => (8, l4::UDP_CHECKSUM),
        PROTO_ICMP if headers.family == Family::V4 => (8, l4::ICMP_CHECKSUM),
        PROTO_ICMPV6 if headers.family == Family::V6 => (8, l4::ICMP_CHECKSUM),
        PROTO_SCTP => return is_sctp_summed_right(&headers, transport),
        _ => return None,
    };
    if transport.len() < least || headers.fragment != Fragment::Whole {
        return None;
    }
    // Zero means "none".
    if headers.tuple.protocol == PROTO_UDP && transport[sum_at..sum_at + 2] == [0, 0] {
        return None;
    }
    let sum = transport_sum(&headers.tuple.saddr, &headers.tuple.daddr, headers.tuple.protocol, transport);
    Some(sum == 0)
}

fn is_sctp_summed_right(headers: &Headers, transport: &[u8]) -> Option<bool> {
    let sum: [u8; 4] = transport.get(l4::SCTP_CHECKSUM..l4::SCTP_CHECKSUM + 4)?.try_into().ok()?;
    // Zero means, or may mean, "none".
    if sum == [0; 4] || headers.fragment != Fragment::Whole {
        return None;
    }
    let mut zeroed = transport.to_vec();
    zeroed[l4::SCTP_CHECKSUM..l4::SCTP_CHECKSUM + 4].fill(0);
    Some(crc32c(&zeroed).to_le_bytes() == sum)
}

/// Whether the checksums in the quote of an ICMP error are valid: of its IPv4 header, and of a complete quote; `None`
/// if unknown.
#[must_use]
pub fn is_quote_summed_right(frame: &[u8], quote: &Quote) -> [Option<bool>; 2] {
    let Some(packet) = frame.get(quote.network_at()..) else { return [None; 2] };
    let quoted = [&frame[..L3], packet].concat();
    let header = packet.get(..quote.transport_at() - quote.network_at());
    let is_v4 = quote.tuple().saddr.family() == Family::V4;
    let header = header.filter(|_| is_v4).map(|header| csum::fold64(csum::sum(header)) == 0xffff);
    [header, is_summed_right(&quoted)]
}

/// Kinds of errors, by family.
#[must_use]
pub const fn error_kinds(family: Family) -> [u8; 4] {
    match family {
        Family::V4 => [3, 4, 11, 12],
        Family::V6 => [1, 2, 3, 4],
    }
}

/// An ICMP error from `router` about a frame, with as much of it as fits in `quoted` bytes.
#[must_use]
pub fn error_about(frame: &[u8], router: Addr, to: Addr, kind: u8, quoted: usize) -> Vec<u8> {
    let packet = frame.get(L3..).unwrap_or_default();
    let quote = &packet[..quoted.min(packet.len())];
    let (protocol, header) = match router.family() {
        Family::V4 => (PROTO_ICMP, IPV4_LEN),
        Family::V6 => (PROTO_ICMPV6, IPV6_LEN),
    };
    let shell = FuzzPacket {
        saddr: router,
        daddr: to,
        protocol,
        sport: 0,
        dport: 0,
        kind,
        ttl: 60,
        fragment: (0, false, 0),
        data: quote.len(),
        unsummed: true,
    };
    let mut error = shell.frame();
    let transport = L3 + header;
    error[transport + 8..].copy_from_slice(quote);
    let sum = transport_sum(&router, &to, protocol, &error[transport..]);
    error[transport + 2..transport + 4].copy_from_slice(&sum.to_ne_bytes());
    error
}
