//! What is read of a packet: addresses, ports, fragment, lengths.

use super::{ETH_LEN, Frame, IPV4_LEN, IPV6_LEN, L3, PROTO_ICMP, PROTO_ICMPV6, PROTO_TCP, PROTO_UDP};
use super::{ethertype, icmp, ipv4, ipv6, l4};
use crate::abi::{Addr, Direction, Family, Tuple};

/// IPv6 extension headers that are walked; a longer chain counts as [`L4::Other`].
pub const MAX_EXTENSION_HEADERS: usize = 6;

/// What follows the network header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum L4 {
    Tcp,
    Udp,
    EchoRequest,
    EchoReply,
    /// An ICMP error, which quotes a packet.
    IcmpError,
    /// Any other protocol, or a later fragment.
    Other,
    /// A protocol that we know, cut short.
    Short,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fragment {
    Whole,
    /// Carries the transport header.
    First,
    Later,
}

/// The heads of a packet as read once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Ports are zero where the packet shows none.
    pub tuple: Tuple,
    pub family: Family,
    pub l4: L4,
    pub fragment: Fragment,
    /// Of the fragment; wire order, zero for whole packets.
    pub fragment_id: [u8; 4],
    /// Offset of the transport header from the start of the frame.
    pub l4_offset: u16,
    pub tcp_flags: u8,
    /// Length of the transport header that a segment repeats.
    pub l4_len: u8,
    pub ttl: u8,
    /// IPv4's DF bit; always for IPv6.
    pub dont_fragment: bool,
}

impl Heads {
    pub const NONE: Self = Self {
        tuple: Tuple::new(Direction::Egress, Addr::UNSPECIFIED, Addr::UNSPECIFIED, 0, 0, 0),
        family: Family::V4,
        l4: L4::Other,
        fragment: Fragment::Whole,
        fragment_id: [0; 4],
        l4_offset: 0,
        tcp_flags: 0,
        l4_len: 0,
        ttl: 0,
        dont_fragment: false,
    };

    /// `None` when the frame is not IP or its network header is cut short.
    pub fn parse<F: Frame + ?Sized>(frame: &F, direction: Direction) -> Option<Self> {
        let mut heads = Self::NONE;
        heads.read(frame, direction)?;
        Some(heads)
    }

    /// As [`parse`](Self::parse), in place: the programs have little stack.
    #[inline(always)]
    pub fn read<F: Frame + ?Sized>(&mut self, frame: &F, direction: Direction) -> Option<()> {
        match u16::from_be_bytes(frame.load(ETH_LEN - 2)?) {
            ethertype::IPV4 => read_v4(frame, direction, self)?,
            ethertype::IPV6 => read_v6(frame, direction, self)?,
            _ => return None,
        }
        read_l4(frame, self);
        Some(())
    }

    /// Length of the headers that every segment of a GSO packet repeats, counted from the network header.
    #[inline(always)]
    pub fn header_len(&self) -> u32 {
        self.l4_offset as u32 - L3 as u32 + self.l4_len as u32
    }

    /// Whether the host may take this for UDP to `port`: it is, or its transport header lies where it was not read (cut
    /// short, or behind more extension headers than are walked), though the host would find it.
    #[inline(always)]
    pub fn may_be_udp_to(&self, port: u32) -> bool {
        let protocol = self.tuple.protocol;
        match self.l4 {
            L4::Udp => self.tuple.dport() as u32 == port,
            _ => self.has_l4() && (protocol == PROTO_UDP || self.family == Family::V6 && is_extension(protocol)),
        }
    }

    /// Whether the transport header, and so a checksum to correct, is in this packet.
    #[inline(always)]
    pub fn has_l4(&self) -> bool {
        !matches!(self.fragment, Fragment::Later)
    }
}

#[inline(always)]
fn read_v4<F: Frame + ?Sized>(frame: &F, direction: Direction, heads: &mut Heads) -> Option<()> {
    let head: [u8; IPV4_LEN] = frame.load(L3)?;
    let ihl = ((head[0] & 0x0f) as u16) << 2;
    if head[0] >> 4 != 4 || ihl < IPV4_LEN as u16 {
        return None;
    }
    let bits = u16::from_be_bytes([head[ipv4::FRAGMENT], head[ipv4::FRAGMENT + 1]]);
    *heads = Heads {
        tuple: Tuple::new(
            direction,
            Addr::v4([head[12], head[13], head[14], head[15]]),
            Addr::v4([head[16], head[17], head[18], head[19]]),
            0,
            0,
            head[ipv4::PROTOCOL],
        ),
        fragment: match (bits & ipv4::OFFSET_MASK, bits & ipv4::MORE_FRAGMENTS) {
            (0, 0) => Fragment::Whole,
            (0, _) => Fragment::First,
            _ => Fragment::Later,
        },
        fragment_id: [0, 0, head[ipv4::ID], head[ipv4::ID + 1]],
        l4_offset: L3 as u16 + ihl,
        ttl: head[ipv4::TTL],
        dont_fragment: bits & ipv4::DONT_FRAGMENT != 0,
        ..Heads::NONE
    };
    Some(())
}

#[inline(always)]
fn read_v6<F: Frame + ?Sized>(frame: &F, direction: Direction, heads: &mut Heads) -> Option<()> {
    let [version] = frame.load(L3)?;
    let [next_header, hop_limit] = frame.load(L3 + ipv6::NEXT_HEADER)?;
    if version >> 4 != 6 {
        return None;
    }
    *heads = Heads {
        tuple: Tuple::new(direction, Addr::UNSPECIFIED, Addr::UNSPECIFIED, 0, 0, 0),
        family: Family::V6,
        l4_offset: (L3 + IPV6_LEN) as u16,
        ttl: hop_limit,
        dont_fragment: true,
        ..Heads::NONE
    };
    // One at a time, or both lie on the stack at once.
    heads.tuple.saddr = frame.load_addr(L3 + ipv6::SADDR)?;
    heads.tuple.daddr = frame.load_addr(L3 + ipv6::DADDR)?;
    heads.tuple.protocol = walk_extensions(frame, heads, next_header);
    Some(())
}

const FRAGMENT: u8 = 44;

/// Whether it is the number of an extension header that is stepped over.
#[inline(always)]
const fn is_extension(protocol: u8) -> bool {
    const HOP_BY_HOP: u8 = 0;
    const ROUTING: u8 = 43;
    const DESTINATION: u8 = 60;
    matches!(protocol, HOP_BY_HOP | ROUTING | FRAGMENT | DESTINATION)
}

/// Steps over extension headers (RFC 8200 section 4) and returns the protocol behind them.
#[inline(always)]
fn walk_extensions<F: Frame + ?Sized>(frame: &F, heads: &mut Heads, first: u8) -> u8 {
    let mut next = first;
    for _ in 0..MAX_EXTENSION_HEADERS {
        if !is_extension(next) {
            return next;
        }
        // The mask keeps the offset within what six headers of 255 units could reach; a real one is far smaller.
        let Some(ext) = frame.load::<8>((heads.l4_offset & 0x3fff) as usize) else { return next };
        let length = if next == FRAGMENT {
            heads.fragment_id = [ext[4], ext[5], ext[6], ext[7]];
            heads.fragment = match (u16::from_be_bytes([ext[2], ext[3]]) >> 3, ext[3] & 1) {
                // An atomic fragment is a whole packet (RFC 6946).
                (0, 0) => Fragment::Whole,
                (0, _) => Fragment::First,
                _ => Fragment::Later,
            };
            8
        } else {
            (ext[1] as u16 + 1) << 3
        };
        heads.l4_offset += length;
        next = ext[0];
        if heads.fragment == Fragment::Later {
            return next;
        }
    }
    next
}

#[inline(always)]
fn read_l4<F: Frame + ?Sized>(frame: &F, heads: &mut Heads) {
    if heads.fragment == Fragment::Later {
        return;
    }
    let offset = (heads.l4_offset & 0x3fff) as usize;
    let Some(head) = frame.load::<8>(offset) else {
        heads.l4 = L4::Short;
        return;
    };
    let (sport, dport) = (u16::from_be_bytes([head[0], head[1]]), u16::from_be_bytes([head[2], head[3]]));
    match (heads.tuple.protocol, heads.family) {
        (PROTO_UDP, _) => {
            heads.l4 = L4::Udp;
            heads.l4_len = 8;
            set_ports(heads, sport, dport);
        }
        (PROTO_TCP, _) => match frame.load::<2>(offset + l4::TCP_OFFSET_FLAGS) {
            Some([data_offset, flags]) => {
                heads.l4 = L4::Tcp;
                heads.l4_len = (data_offset >> 4) << 2;
                heads.tcp_flags = flags;
                set_ports(heads, sport, dport);
            }
            None => heads.l4 = L4::Short,
        },
        (PROTO_ICMP, Family::V4) | (PROTO_ICMPV6, Family::V6) => {
            heads.l4 = icmp::kind(heads.family, head[0]);
            heads.l4_len = 8;
            if matches!(heads.l4, L4::EchoRequest | L4::EchoReply) {
                let id = u16::from_be_bytes([head[l4::ECHO_ID], head[l4::ECHO_ID + 1]]);
                set_ports(heads, id, id);
            }
        }
        _ => {}
    }
}

#[inline(always)]
fn set_ports(heads: &mut Heads, sport: u16, dport: u16) {
    heads.tuple.set_ports(sport, dport);
}

#[cfg(test)]
mod tests;
