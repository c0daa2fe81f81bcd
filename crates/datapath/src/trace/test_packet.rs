//! The test packet: complete, with valid checksums, without payload.

use std::net::IpAddr;

use egress_common::abi::Direction;
use egress_common::wire::{
    ETH_LEN, Headers, IPV4_LEN, IPV6_LEN, PROTO_ICMP, PROTO_ICMPV6, PROTO_SCTP, PROTO_TCP, PROTO_UDP, ethertype, sctp,
    tcp,
};

/// Description of a pod's packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TestPacket {
    pub from: IpAddr,
    /// Of the same family.
    pub to: IpAddr,
    pub protocol: u8,
    /// The identifier of an echo request.
    pub sport: u16,
    pub dport: u16,
    /// Belongs to an established TCP connection or SCTP association; otherwise the packet begins one.
    pub under_way: bool,
    /// TTL or hop limit.
    pub ttl: u8,
    /// Length (bytes, from the IP header on); at least the headers.
    pub length: u16,
}

/// An arbitrary sender: the programs read only the destination.
const SENDER: [u8; 6] = [2, 0, 0, 0, 0, 0];

impl TestPacket {
    /// The frame, for a device with this link address.
    pub fn frame(&self, device: [u8; 6]) -> Vec<u8> {
        let (header, kind) = match self.to {
            IpAddr::V4(_) => (IPV4_LEN, ethertype::IPV4),
            IpAddr::V6(_) => (IPV6_LEN, ethertype::IPV6),
        };
        let mut transport = self.transport();
        transport.resize(transport.len().max(usize::from(self.length).saturating_sub(header)), 0);
        self.sum(&mut transport);
        let mut frame = Vec::with_capacity(ETH_LEN + header + transport.len());
        frame.extend(device);
        frame.extend(SENDER);
        frame.extend(kind.to_be_bytes());
        frame.extend(self.network(transport.len()));
        frame.extend(transport);
        frame
    }

    /// Its parsed headers; `None` if the addresses have different families.
    pub fn headers(&self) -> Option<Headers> {
        if self.from.is_ipv4() != self.to.is_ipv4() {
            return None;
        }
        Headers::parse(self.frame([0; 6]).as_slice(), Direction::Egress)
    }

    /// Whether the protocol has ports or an identifier.
    pub const fn has_ports(protocol: u8) -> bool {
        matches!(protocol, PROTO_TCP | PROTO_UDP | PROTO_SCTP)
    }

    fn network(&self, length: usize) -> Vec<u8> {
        // Maximum length of a packet.
        let whole = |header: usize| u16::try_from(header + length).unwrap_or(u16::MAX).to_be_bytes();
        match (self.from, self.to) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                let [high, low] = whole(IPV4_LEN);
                // DF, as current senders set it.
                let mut bytes = vec![0x45, 0, high, low, 0, 0, 0x40, 0, self.ttl, self.protocol, 0, 0];
                bytes.extend(from.octets());
                bytes.extend(to.octets());
                let sum = checksum(&bytes).to_be_bytes();
                bytes[10..12].copy_from_slice(&sum);
                bytes
            }
            (from, to) => {
                let [high, low] = whole(0);
                let mut bytes = vec![0x60, 0, 0, 0, high, low, self.protocol, self.ttl];
                bytes.extend(sixteen(from));
                bytes.extend(sixteen(to));
                bytes
            }
        }
    }

    /// Without its checksum.
    fn transport(&self) -> Vec<u8> {
        let ports = [self.sport.to_be_bytes(), self.dport.to_be_bytes()].concat();
        let rest: &[u8] = match self.protocol {
            PROTO_TCP if self.under_way => &[0, 0, 0, 1, 0, 0, 0, 1, 0x50, tcp::ACK, 0xff, 0xff, 0, 0, 0, 0],
            PROTO_TCP => &[0, 0, 0, 1, 0, 0, 0, 0, 0x50, tcp::SYN, 0xff, 0xff, 0, 0, 0, 0],
            PROTO_UDP => &[0, 0, 0, 0],
            PROTO_SCTP if self.under_way => &[0, 0, 0, 1, 0, 0, 0, 0, SCTP_HEARTBEAT, 0, 0, 4],
            PROTO_SCTP => &[0, 0, 0, 0, 0, 0, 0, 0, sctp::INIT, 0, 0, 4],
            PROTO_ICMP => return self.echo(8),
            PROTO_ICMPV6 => return self.echo(128),
            // Not read.
            _ => return vec![0; 8],
        };
        [&ports, rest].concat()
    }

    fn echo(&self, kind: u8) -> Vec<u8> {
        let [high, low] = self.sport.to_be_bytes();
        vec![kind, 0, 0, 0, high, low, 0, 1]
    }

    fn sum(&self, transport: &mut [u8]) {
        let at = match self.protocol {
            PROTO_TCP => 16,
            PROTO_UDP => 6,
            PROTO_ICMP | PROTO_ICMPV6 => 2,
            // Zero means no checksum in SCTP (RFC 9653).
            _ => return,
        };
        let length = u16::try_from(transport.len()).unwrap_or(u16::MAX).to_be_bytes();
        if self.protocol == PROTO_UDP
            && let Some(field) = transport.get_mut(4..6)
        {
            field.copy_from_slice(&length);
        }
        let mut covered = Vec::new();
        if self.protocol != PROTO_ICMP {
            match (self.from, self.to) {
                (IpAddr::V4(from), IpAddr::V4(to)) => covered.extend([from.octets(), to.octets()].concat()),
                (from, to) => covered.extend([sixteen(from), sixteen(to)].concat()),
            }
            covered.extend([0, self.protocol]);
            covered.extend(length);
        }
        covered.extend_from_slice(transport);
        let sum = match checksum(&covered) {
            // Zero would mean no checksum.
            0 => u16::MAX,
            sum => sum,
        };
        if let Some(field) = transport.get_mut(at..at + 2) {
            field.copy_from_slice(&sum.to_be_bytes());
        }
    }
}

/// Any chunk that begins no association (RFC 9260 section 3.2).
const SCTP_HEARTBEAT: u8 = 4;

fn sixteen(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    }
}

/// RFC 1071.
fn checksum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|pair| match pair {
        [high, low] => u32::from(u16::from_be_bytes([*high, *low])),
        [high] => u32::from(*high) << 8,
        _ => 0,
    });
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !u16::try_from(sum).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use egress_common::wire::L4;

    use super::*;

    pub(crate) fn packet(from: &str, to: &str, protocol: u8) -> TestPacket {
        let ip = |text: &str| text.parse().expect("a literal");
        let (sport, dport) = (40_000, 443);
        TestPacket { from: ip(from), to: ip(to), protocol, sport, dport, under_way: false, ttl: 64, length: 0 }
    }

    const V4: (&str, &str) = ("10.244.1.10", "198.51.100.10");
    const V6: (&str, &str) = ("fd00:10:244:1::a", "2001:db8:100::10");

    #[test]
    fn a_test_packet_has_the_requested_fields() {
        for (from, to) in [V4, V6] {
            for (protocol, l4, ports) in [
                (6, L4::Tcp, (40_000, 443)),
                (17, L4::Udp, (40_000, 443)),
                (132, L4::Sctp, (40_000, 443)),
                (47, L4::Other, (0, 0)),
            ] {
                let headers = packet(from, to, protocol).headers().expect("a packet");
                assert_eq!(headers.l4, l4, "{protocol}");
                assert_eq!((headers.tuple.sport(), headers.tuple.dport()), ports, "{protocol}");
                assert_eq!((headers.tuple.saddr.to_ip().to_string(), headers.ttl), (from.to_owned(), 64));
            }
        }
        let ping = packet(V4.0, V4.1, 1).headers().expect("a packet");
        assert_eq!((ping.l4, ping.tuple.sport()), (L4::EchoRequest, 40_000));
        let ping = packet(V6.0, V6.1, 58).headers().expect("a packet");
        assert_eq!((ping.l4, ping.tuple.sport()), (L4::EchoRequest, 40_000));
        assert_eq!(packet(V4.0, V6.1, 6).headers(), None, "of two families");
    }

    #[test]
    fn a_connection_under_way_has_no_syn() {
        let begun = packet(V4.0, V4.1, 6);
        assert_eq!(begun.headers().expect("a packet").tcp_flags, tcp::SYN);
        assert_eq!(TestPacket { under_way: true, ..begun }.headers().expect("a packet").tcp_flags, tcp::ACK);
        let association = packet(V4.0, V4.1, 132);
        assert_eq!(association.headers().expect("a packet").sctp_chunk, sctp::INIT);
        assert_ne!(TestPacket { under_way: true, ..association }.headers().expect("a packet").sctp_chunk, sctp::INIT);
    }

    #[test]
    fn checksums_and_lengths_are_right() {
        for (protocol, length) in [(6, 0), (17, 0), (17, 1399), (1, 500)] {
            let frame = TestPacket { length, ..packet(V4.0, V4.1, protocol) }.frame([0; 6]);
            assert_eq!(checksum(&frame[14..34]), 0, "of the header");
            let total = u16::from_be_bytes([frame[16], frame[17]]);
            assert_eq!(usize::from(total), frame.len() - 14);
            assert!(length == 0 || total == length, "{total} {length}");
            let transport = &frame[34..];
            let mut covered = if protocol == 1 { Vec::new() } else { [&frame[26..34], &[0, protocol]].concat() };
            if protocol != 1 {
                covered.extend(u16::try_from(transport.len()).expect("short").to_be_bytes());
            }
            covered.extend(transport);
            assert_eq!(checksum(&covered), 0, "of {protocol}");
        }
    }
}
