//! Frames: made by hand, summed from scratch, and rewritten as the programs do it, with checksums corrected by difference.

use egress_common::abi::{Addr, Direction, Family};
use egress_common::decide::{End, Rewrite};
use egress_common::wire::{
    Fragment, Heads, IPV4_LEN, IPV6_LEN, L3, PROTO_ICMP, PROTO_ICMPV6, PROTO_TCP, PROTO_UDP, csum, ethertype, ipv4,
    ipv6, l4,
};

/// A packet in words.
#[derive(Clone, Copy, Debug)]
pub struct Packet {
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

impl Packet {
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
            PROTO_ICMP | PROTO_ICMPV6 => {
                ([&[self.kind, 0, 0, 0], self.sport.to_be_bytes().as_slice(), &[0, 1]].concat(), 2)
            }
            _ => (ports, usize::MAX),
        };
        bytes.extend((0..self.data).map(|index| u8::try_from(index % 251).unwrap_or_default()));
        if sum_at != usize::MAX && !self.unsummed {
            let sum = transport_sum(&self.saddr, &self.daddr, self.protocol, &bytes);
            let sum = if sum == 0 && self.protocol == PROTO_UDP { 0xffff } else { sum };
            bytes[sum_at..sum_at + 2].copy_from_slice(&sum.to_ne_bytes());
        }
        bytes
    }
}

/// The checksum over pseudo header and transport, whose own field counts as it stands; memory order.
fn transport_sum(saddr: &Addr, daddr: &Addr, protocol: u8, bytes: &[u8]) -> u16 {
    let mut covered = Vec::new();
    if protocol != PROTO_ICMP {
        // An IPv4-mapped address sums up as its IPv4 address and ffff, which is zero to one's complement.
        covered.extend(saddr.octets());
        covered.extend(daddr.octets());
        covered.extend([0, protocol]);
        covered.extend(u16::try_from(bytes.len()).unwrap_or_default().to_be_bytes());
    }
    covered.extend(bytes);
    !csum::fold64(csum::sum(&covered))
}

/// Whether the checksums are right; `None` where the packet is cut short, a fragment, or has none that we know.
#[must_use]
pub fn is_summed_right(frame: &[u8]) -> Option<bool> {
    let heads = Heads::parse(frame, Direction::Egress)?;
    let end = match heads.family {
        Family::V4 => {
            let header = frame.get(L3..usize::from(heads.l4_offset))?;
            if csum::fold64(csum::sum(header)) != 0xffff {
                return Some(false);
            }
            L3 + usize::from(u16::from_be_bytes(frame.get(L3 + 2..L3 + 4)?.try_into().ok()?))
        }
        Family::V6 => L3 + IPV6_LEN + usize::from(u16::from_be_bytes(frame.get(L3 + 4..L3 + 6)?.try_into().ok()?)),
    };
    let transport = frame.get(usize::from(heads.l4_offset)..end)?;
    let (least, sum_at) = match heads.tuple.protocol {
        PROTO_TCP => (20, l4::TCP_CHECKSUM),
        PROTO_UDP => (8, l4::UDP_CHECKSUM),
        PROTO_ICMP if heads.family == Family::V4 => (8, l4::ICMP_CHECKSUM),
        PROTO_ICMPV6 if heads.family == Family::V6 => (8, l4::ICMP_CHECKSUM),
        _ => return None,
    };
    if transport.len() < least || heads.fragment != Fragment::Whole {
        return None;
    }
    if heads.tuple.protocol == PROTO_UDP && transport[sum_at..sum_at + 2] == [0, 0] {
        return None;
    }
    let sum = transport_sum(&heads.tuple.saddr, &heads.tuple.daddr, heads.tuple.protocol, transport);
    Some(sum == 0)
}

/// Bytes at an offset that the heads have shown to be there.
fn field<const N: usize>(frame: &[u8], at: usize) -> Option<[u8; N]> {
    frame.get(at..at + N)?.try_into().ok()
}

fn put(frame: &mut [u8], at: usize, bytes: &[u8]) -> Option<()> {
    frame.get_mut(at..at + bytes.len())?.copy_from_slice(bytes);
    Some(())
}

/// Corrects the checksum at `at` for words that have changed. A UDP checksum of zero stays, and none becomes zero.
fn correct(frame: &mut [u8], at: usize, is_udp: bool, from: &[u8], to: &[u8]) -> Option<()> {
    let old = u16::from_ne_bytes(field(frame, at)?);
    if is_udp && old == 0 {
        return Some(());
    }
    let pairs = from.chunks_exact(2).zip(to.chunks_exact(2));
    let sum = pairs.fold(old, |sum, (from, to)| {
        csum::replace_u16(sum, u16::from_ne_bytes([from[0], from[1]]), u16::from_ne_bytes([to[0], to[1]]))
    });
    put(frame, at, &(if is_udp && sum == 0 { 0xffff } else { sum }).to_ne_bytes())
}

/// The programs' rewrite; `None` where the frame ends too early.
pub fn rewrite(frame: &mut [u8], heads: &Heads, rewrite: &Rewrite) -> Option<()> {
    let is_source = rewrite.end == End::Source;
    let (old, old_port) =
        if is_source { (heads.tuple.saddr, heads.tuple.sport()) } else { (heads.tuple.daddr, heads.tuple.dport()) };
    let transport = usize::from(heads.l4_offset);
    if heads.has_l4() {
        let (sum_at, port_at) = match heads.tuple.protocol {
            PROTO_TCP => (l4::TCP_CHECKSUM, if is_source { l4::SPORT } else { l4::DPORT }),
            PROTO_UDP => (l4::UDP_CHECKSUM, if is_source { l4::SPORT } else { l4::DPORT }),
            PROTO_ICMP | PROTO_ICMPV6 => (l4::ICMP_CHECKSUM, l4::ECHO_ID),
            // Others are rewritten by address; their checksums are not modelled.
            _ => return None,
        };
        let (is_udp, sum_at) = (heads.tuple.protocol == PROTO_UDP, transport + sum_at);
        if heads.tuple.protocol != PROTO_ICMP {
            correct(frame, sum_at, is_udp, &old.octets(), &rewrite.addr.octets())?;
        }
        if old_port != rewrite.port {
            correct(frame, sum_at, is_udp, &old_port.to_be_bytes(), &rewrite.port.to_be_bytes())?;
            put(frame, transport + port_at, &rewrite.port.to_be_bytes())?;
        }
    }
    match heads.family {
        Family::V4 => {
            let at = if is_source { ipv4::SADDR } else { ipv4::DADDR };
            replace_v4(frame, L3, at, &old, &rewrite.addr)
        }
        Family::V6 => {
            let at = if is_source { ipv6::SADDR } else { ipv6::DADDR };
            put(frame, L3 + at, &rewrite.addr.octets())
        }
    }
}

fn replace_v4(frame: &mut [u8], header: usize, at: usize, old: &Addr, new: &Addr) -> Option<()> {
    correct(frame, header + ipv4::CHECKSUM, false, &old.v4_octets(), &new.v4_octets())?;
    put(frame, header + at, &new.v4_octets())
}

/// An ICMP error from `router` about a frame: unreachable, with as much of it as fits in `quoted` bytes.
#[must_use]
pub fn error_about(frame: &[u8], router: Addr, to: Addr, quoted: usize) -> Vec<u8> {
    let packet = frame.get(L3..).unwrap_or_default();
    let quote = &packet[..quoted.min(packet.len())];
    let (protocol, kind, header) = match router.family() {
        Family::V4 => (PROTO_ICMP, 3, IPV4_LEN),
        Family::V6 => (PROTO_ICMPV6, 1, IPV6_LEN),
    };
    let shell = Packet {
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
