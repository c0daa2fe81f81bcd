//! The packet that an ICMP error quotes (RFC 792, RFC 4443): whose flow it is about.

use super::{Frame, Heads, IPV4_LEN, IPV6_LEN, PROTO_ICMP, PROTO_ICMPV6, PROTO_TCP, PROTO_UDP};
use super::{icmp, ipv4, ipv6, l4};
use crate::abi::{Addr, Direction, Family, Tuple};

/// What is read of a quoted packet. Offsets count from the start of the frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quote {
    /// As the quoted packet was sent.
    pub tuple: Tuple,
    pub l3_offset: u16,
    pub l4_offset: u16,
}

/// Offsets stay below this; the mask shows it to the verifier.
const OFFSET_MASK: u16 = 0x3fff;

impl Quote {
    pub const NONE: Self = Self {
        tuple: Tuple::new(Direction::Egress, Addr::UNSPECIFIED, Addr::UNSPECIFIED, 0, 0, 0),
        l3_offset: 0,
        l4_offset: 0,
    };

    // Two bytes where one would do: the verifier sees no use in a check of a single byte at an unknown offset.

    /// Reads the quote of an ICMP error, in place. `None` when it is cut short, a later fragment, or of a protocol that
    /// has no ports.
    #[inline(always)]
    pub fn read<F: Frame + ?Sized>(&mut self, frame: &F, heads: &Heads) -> Option<()> {
        self.l3_offset = (heads.l4_offset & OFFSET_MASK) + icmp::LEN as u16;
        let at = self.l3_offset as usize;
        match heads.family {
            Family::V4 => {
                let [first, _] = frame.load(at)?;
                let bits = u16::from_be_bytes(frame.load(at + ipv4::FRAGMENT)?);
                let ihl = ((first & 0x0f) as u16) << 2;
                if first >> 4 != 4 || ihl < IPV4_LEN as u16 || bits & ipv4::OFFSET_MASK != 0 {
                    return None;
                }
                [self.tuple.protocol] = frame.load(at + ipv4::PROTOCOL)?;
                self.tuple.saddr = Addr::v4(frame.load(at + ipv4::SADDR)?);
                self.tuple.daddr = Addr::v4(frame.load(at + ipv4::DADDR)?);
                self.l4_offset = self.l3_offset + ihl;
            }
            Family::V6 => {
                let [first, _] = frame.load(at)?;
                if first >> 4 != 6 {
                    return None;
                }
                [self.tuple.protocol] = frame.load(at + ipv6::NEXT_HEADER)?;
                self.tuple.saddr = frame.load_addr(at + ipv6::SADDR)?;
                self.tuple.daddr = frame.load_addr(at + ipv6::DADDR)?;
                self.l4_offset = self.l3_offset + IPV6_LEN as u16;
            }
        }
        self.read_ports(frame, heads.family)
    }

    #[inline(always)]
    fn read_ports<F: Frame + ?Sized>(&mut self, frame: &F, family: Family) -> Option<()> {
        let at = (self.l4_offset & OFFSET_MASK) as usize;
        match (self.tuple.protocol, family) {
            (PROTO_TCP | PROTO_UDP, _) => {
                let sport = u16::from_be_bytes(frame.load(at + l4::SPORT)?);
                let dport = u16::from_be_bytes(frame.load(at + l4::DPORT)?);
                self.tuple.set_ports(sport, dport);
            }
            (PROTO_ICMP, Family::V4) | (PROTO_ICMPV6, Family::V6) => {
                let [kind, _] = frame.load(at)?;
                if !matches!(icmp::kind(family, kind), super::L4::EchoRequest) {
                    return None;
                }
                let id = u16::from_be_bytes(frame.load(at + l4::ECHO_ID)?);
                self.tuple.set_ports(id, id);
            }
            _ => return None,
        }
        Some(())
    }

    /// Where the port, or the identifier of an echo message, of the quoted source stands.
    #[inline(always)]
    pub const fn source_port_at(&self) -> usize {
        let within = if matches!(self.tuple.protocol, PROTO_ICMP | PROTO_ICMPV6) { l4::ECHO_ID } else { l4::SPORT };
        (self.l4_offset & OFFSET_MASK) as usize + within
    }

    /// Where the quoted network header starts.
    #[inline(always)]
    pub const fn network_at(&self) -> usize {
        (self.l3_offset & OFFSET_MASK) as usize
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;

    fn error_v4(protocol: u8, l4: [u8; 8]) -> Vec<u8> {
        let mut frame = std::vec![0u8; 12];
        frame.extend([8, 0, 0x45, 0, 0, 56, 0, 0, 0, 0, 64, 1, 0, 0, 172, 18, 0, 1, 172, 18, 0, 100]);
        frame.extend([11, 0, 0, 0, 0, 0, 0, 0]);
        frame.extend([0x45, 0, 0, 60, 0, 0, 0, 0, 1, protocol, 0, 0, 172, 18, 0, 100, 198, 51, 100, 10]);
        frame.extend(l4);
        frame
    }

    fn read(frame: &[u8]) -> Option<Quote> {
        let heads = Heads::parse(frame, Direction::Ingress)?;
        let mut quote = Quote::NONE;
        quote.read(frame, &heads)?;
        Some(quote)
    }

    #[test]
    fn the_flow_of_a_quote_is_read() {
        let quote = read(&error_v4(PROTO_UDP, [0x0f, 0xa0, 0, 53, 0, 0, 0, 0])).expect("a quote");
        assert_eq!((quote.tuple.sport(), quote.tuple.dport()), (4000, 53));
        assert_eq!(quote.tuple.saddr, Addr::v4([172, 18, 0, 100]));
        assert_eq!((quote.network_at(), quote.source_port_at()), (42, 62));
        let quote = read(&error_v4(PROTO_ICMP, [8, 0, 0, 0, 1, 2, 0, 0])).expect("a quote");
        assert_eq!((quote.tuple.sport(), quote.tuple.dport(), quote.source_port_at()), (0x102, 0x102, 66));
    }

    #[test]
    fn what_names_no_flow_is_refused() {
        let whole = error_v4(PROTO_UDP, [0x0f, 0xa0, 0, 53, 0, 0, 0, 0]);
        for length in 42..whole.len() - 4 {
            assert_eq!(read(&whole[..length]), None, "cut to {length}");
        }
        assert_eq!(read(&error_v4(PROTO_ICMP, [0, 0, 0, 0, 1, 2, 0, 0])), None, "an answer");
        assert_eq!(read(&error_v4(47, [0; 8])), None, "no ports");
        let mut fragment = whole.clone();
        fragment[42 + 7] = 1;
        assert_eq!(read(&fragment), None, "a later fragment");
    }
}
