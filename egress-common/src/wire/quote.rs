//! The quoted packet of an ICMP error (RFC 792, RFC 4443), which identifies the flow.

use super::headers::{read_v4, read_v6};
use super::{Fragment, Frame, Headers, L4, icmp, l4};
use super::{PROTO_ICMP, PROTO_ICMPV6, PROTO_SCTP, PROTO_TCP, PROTO_UDP};
use crate::abi::{Direction, Family, Tuple};

/// The parsed quoted packet. Offsets count from the start of the frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quote {
    /// The quoted packet as it was sent; its direction is the opposite of the error's.
    headers: Headers,
    /// Stored, because the programs have little stack.
    flow: Tuple,
    l3_offset: u16,
}

/// Bound of offsets; the mask shows it to the verifier.
const OFFSET_MASK: u16 = 0x3fff;

impl Quote {
    /// No flow: no packet has such addresses.
    pub const NONE: Self = Self { headers: Headers::NONE, flow: Headers::NONE.tuple, l3_offset: 0 };

    #[cfg(test)]
    pub(crate) const fn of(headers: Headers) -> Self {
        Self { headers, flow: headers.tuple.reversed(), l3_offset: 0 }
    }

    /// The quoted packet as it was sent; its direction is the opposite of the error's.
    #[inline(always)]
    pub const fn tuple(&self) -> &Tuple {
        &self.headers.tuple
    }

    /// The flow's tuple in the direction of the error.
    #[inline(always)]
    pub const fn flow(&self) -> &Tuple {
        &self.flow
    }

    #[inline(always)]
    pub const fn l4(&self) -> L4 {
        self.headers.l4
    }

    /// Reads the quote of an ICMP error, in place. `None` if it identifies no flow: truncated before the ports, a later
    /// fragment, or itself an error.
    #[inline(always)]
    pub fn read<F: Frame + ?Sized>(&mut self, frame: &F, error: &Headers) -> Option<()> {
        self.l3_offset = (error.l4_offset & OFFSET_MASK) + icmp::LEN as u16;
        let at = self.l3_offset as usize;
        let direction = match error.tuple.direction() {
            Direction::Egress => Direction::Ingress,
            Direction::Ingress => Direction::Egress,
        };
        match error.family {
            Family::V4 => read_v4(frame, at, direction, &mut self.headers)?,
            Family::V6 => read_v6(frame, at, direction, &mut self.headers)?,
        }
        if self.headers.l4 != L4::Other || self.headers.fragment == Fragment::Later {
            return None;
        }
        self.read_ports(frame, error.family)?;
        self.flow = self.headers.tuple.reversed();
        Some(())
    }

    /// The quote may have only eight bytes of the transport header (RFC 792).
    #[inline(always)]
    fn read_ports<F: Frame + ?Sized>(&mut self, frame: &F, family: Family) -> Option<()> {
        let at = self.transport_at();
        let headers = &mut self.headers;
        let protocol = headers.tuple.protocol;
        match (protocol, family) {
            (PROTO_TCP | PROTO_UDP | PROTO_SCTP, _) => {
                let sport = u16::from_be_bytes(frame.load(at + l4::SPORT)?);
                let dport = u16::from_be_bytes(frame.load(at + l4::DPORT)?);
                headers.tuple.set_ports(sport, dport);
                headers.l4 = Headers::kind_of(protocol);
            }
            (PROTO_ICMP, Family::V4) | (PROTO_ICMPV6, Family::V6) => {
                let [kind, _] = frame.load(at)?;
                headers.l4 = icmp::kind(family, kind);
                if !matches!(headers.l4, L4::EchoRequest | L4::EchoReply) {
                    return None;
                }
                let id = u16::from_be_bytes(frame.load(at + l4::ECHO_ID)?);
                headers.tuple.set_ports(id, id);
            }
            _ => {}
        }
        Some(())
    }

    /// Payload length of the quoted packet.
    #[inline(always)]
    pub fn message_length<F: Frame + ?Sized>(&self, frame: &F) -> Option<u32> {
        self.headers.message_length(frame, self.network_at())
    }

    /// Start of the quoted transport header.
    #[inline(always)]
    pub const fn transport_at(&self) -> usize {
        (self.headers.l4_offset & OFFSET_MASK) as usize
    }

    /// Start of the quoted network header.
    #[inline(always)]
    pub const fn network_at(&self) -> usize {
        (self.l3_offset & OFFSET_MASK) as usize
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;
    use crate::abi::Addr;

    fn error_v4(protocol: u8, l4: [u8; 8]) -> Vec<u8> {
        let mut frame = std::vec![0u8; 12];
        frame.extend([8, 0, 0x45, 0, 0, 56, 0, 0, 0, 0, 64, 1, 0, 0, 172, 18, 0, 1, 172, 18, 0, 100]);
        frame.extend([11, 0, 0, 0, 0, 0, 0, 0]);
        frame.extend([0x45, 0, 0, 60, 0, 0, 0, 0, 1, protocol, 0, 0, 172, 18, 0, 100, 198, 51, 100, 10]);
        frame.extend(l4);
        frame
    }

    /// Packet too big about a packet with these extension headers, of which the last one names the protocol.
    fn error_v6(next: u8, extensions: &[u8], l4: [u8; 8]) -> Vec<u8> {
        let mut frame = std::vec![0u8; 12];
        frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 56, 58, 64]);
        frame.extend([0xfd; 32]);
        frame.extend([2, 0, 0, 0, 0, 0, 5, 0]);
        frame.extend([0x60, 0, 0, 0, 4, 0, next, 1]);
        frame.extend([0xfd; 32]);
        frame.extend(extensions);
        frame.extend(l4);
        frame
    }

    fn read(frame: &[u8]) -> Option<Quote> {
        let headers = Headers::parse(frame, Direction::Ingress)?;
        let mut quote = Quote::NONE;
        quote.read(frame, &headers)?;
        Some(quote)
    }

    const PORTS: [u8; 8] = [0x0f, 0xa0, 0, 53, 0, 0, 0, 0];

    #[test]
    fn the_flow_of_a_quote_is_read() {
        for protocol in [PROTO_UDP, PROTO_TCP, PROTO_SCTP] {
            let quote = read(&error_v4(protocol, PORTS)).expect("a quote");
            assert_eq!((quote.tuple().sport(), quote.tuple().dport()), (4000, 53));
            assert_eq!((quote.tuple().saddr, quote.l4()), (Addr::v4([172, 18, 0, 100]), Headers::kind_of(protocol)));
            assert_eq!((quote.network_at(), quote.transport_at()), (42, 62));
            assert_eq!((quote.tuple().direction(), quote.flow().direction()), (Direction::Egress, Direction::Ingress));
        }
        let quote = read(&error_v4(PROTO_ICMP, [8, 0, 0, 0, 1, 2, 0, 0])).expect("a quote");
        assert_eq!((quote.tuple().sport(), quote.tuple().dport(), quote.transport_at()), (0x102, 0x102, 62));
        assert_eq!(read(&error_v4(PROTO_ICMP, [0, 0, 0, 0, 1, 2, 0, 0])).map(|quote| quote.l4()), Some(L4::EchoReply));
        let gre = read(&error_v4(47, [0; 8])).expect("a quote");
        assert_eq!((gre.l4(), gre.tuple().sport(), gre.tuple().protocol), (L4::Other, 0, 47));
    }

    #[test]
    fn options_and_extension_headers_of_a_quote_are_stepped_over() {
        let mut optional = error_v4(PROTO_UDP, PORTS);
        optional[42] = 0x47;
        optional.splice(62..62, [1; 8]);
        let quote = read(&optional).expect("a quote");
        assert_eq!((quote.tuple().sport(), quote.transport_at()), (4000, 70));
        let plain = read(&error_v6(PROTO_UDP, &[], PORTS)).expect("a quote");
        assert_eq!((plain.tuple().sport(), plain.network_at(), plain.transport_at()), (4000, 62, 102));
        let extended = [60, 0, 1, 4, 0, 0, 0, 0, PROTO_TCP, 0, 1, 4, 0, 0, 0, 0];
        let quote = read(&error_v6(0, &extended, PORTS)).expect("a quote");
        assert_eq!((quote.tuple().protocol, quote.tuple().sport(), quote.transport_at()), (PROTO_TCP, 4000, 118));
        let first = [PROTO_UDP, 0, 0, 1, 0, 0, 0, 7];
        assert_eq!(read(&error_v6(44, &first, PORTS)).map(|quote| quote.tuple().sport()), Some(4000));
    }

    #[test]
    fn a_quote_without_a_flow_is_refused() {
        let whole = error_v4(PROTO_UDP, PORTS);
        for length in 42..whole.len() - 4 {
            assert_eq!(read(&whole[..length]), None, "cut to {length}");
        }
        assert_eq!(read(&error_v4(PROTO_ICMP, [5, 0, 0, 0, 1, 2, 0, 0])), None, "a redirect");
        assert_eq!(read(&error_v4(PROTO_ICMP, [3, 4, 0, 0, 1, 2, 0, 0])), None, "an error");
        assert_eq!(read(&error_v4(51, [0; 8])), None, "authenticated");
        let mut fragment = whole.clone();
        fragment[42 + 7] = 1;
        assert_eq!(read(&fragment), None, "a later fragment");
        for later in [[PROTO_UDP, 0, 0, 9, 0, 0, 0, 7], [47, 0, 0, 8, 0, 0, 0, 7]] {
            assert_eq!(read(&error_v6(44, &later, PORTS)), None, "a later fragment");
        }
        let chain: Vec<u8> = std::iter::repeat_n([60, 0, 1, 4, 0, 0, 0, 0], 7).flatten().collect();
        assert_eq!(read(&error_v6(60, &chain, PORTS)), None, "no end in sight");
        assert_eq!(read(&error_v6(60, &[60, 0, 1, 4], [0; 8])), None, "cut in an extension header");
    }
}
