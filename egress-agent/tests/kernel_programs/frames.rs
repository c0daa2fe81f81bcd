//! Builder of frames of both families, with checksums computed over the whole packet by the simplest method.

use std::net::IpAddr;

pub(crate) const SYN: u8 = 0x02;
pub(crate) const ACK: u8 = 0x10;
pub(crate) const FIN: u8 = 0x01;
pub(crate) const RST: u8 = 0x04;

const PROTO_ICMP: u8 = 1;
const PROTO_TCP: u8 = 6;
const PROTO_UDP: u8 = 17;
const PROTO_ICMPV6: u8 = 58;
const PROTO_SCTP: u8 = 132;
/// Where the IP header starts.
pub(crate) const L3: usize = 14;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Body {
    Udp,
    /// UDP without a checksum.
    UdpUnsummed,
    Tcp(u8),
    EchoRequest,
    EchoReply,
    /// An ICMP error without a useful quote.
    Unreachable,
    /// An ICMP message, by its first two bytes and its last four; the quote is the packet's content.
    Icmp([u8; 2], [u8; 4]),
    /// SCTP whose first chunk has this type.
    Sctp(u8),
    /// The same with a zero checksum.
    SctpUnsummed(u8),
    /// Two ports, and data without a checksum.
    Other(u8),
}

/// Description of a packet; [`FrameSpec::frame`] builds its bytes.
#[derive(Clone, Debug)]
pub(crate) struct FrameSpec {
    pub(crate) dmac: [u8; 6],
    pub(crate) smac: [u8; 6],
    pub(crate) from: IpAddr,
    pub(crate) to: IpAddr,
    /// The identifier of an echo message is the source port.
    pub(crate) sport: u16,
    pub(crate) dport: u16,
    pub(crate) body: Body,
    /// Of a TCP segment.
    pub(crate) sequence: u32,
    pub(crate) acknowledged: u32,
    pub(crate) ttl: u8,
    /// Length of generated data.
    pub(crate) data: usize,
    pub(crate) content: Option<Vec<u8>>,
    pub(crate) dont_fragment: bool,
    /// IPv4 options or an IPv6 destination options header, in units of eight bytes.
    pub(crate) options: u8,
    /// Offset in units of eight bytes, and whether more follow; not together with IPv6 options.
    pub(crate) fragment: (u16, bool),
    /// Identification.
    pub(crate) number: u16,
}

pub(crate) fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

/// UDP with a little data, unless changed.
pub(crate) fn packet(from: &str, to: &str, sport: u16, dport: u16) -> FrameSpec {
    FrameSpec {
        // Of the management port: frames for another host are left alone.
        dmac: [2, 0, 0, 0, 2, 2],
        smac: [2, 0, 0, 0, 0, 0x50],
        from: ip(from),
        to: ip(to),
        sport,
        dport,
        body: Body::Udp,
        sequence: 2,
        acknowledged: 2,
        ttl: 64,
        data: 33,
        content: None,
        dont_fragment: true,
        options: 0,
        fragment: (0, false),
        number: 0x1234,
    }
}

impl FrameSpec {
    pub(crate) fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    pub(crate) fn body(self, body: Body) -> Self {
        self.with(|packet| packet.body = body)
    }

    pub(crate) fn tcp(self, flags: u8) -> Self {
        self.body(Body::Tcp(flags))
    }

    /// The packet with another source, one hop later.
    pub(crate) fn snat(&self, from: &str, sport: u16) -> Self {
        self.clone().with(|packet| {
            packet.from = ip(from);
            packet.sport = sport;
        })
    }

    /// The packet with another destination.
    pub(crate) fn dnat(&self, to: &str, port: u16) -> Self {
        let is_echo = matches!(self.body, Body::EchoRequest | Body::EchoReply);
        self.clone().with(|packet| {
            packet.to = ip(to);
            *(if is_echo { &mut packet.sport } else { &mut packet.dport }) = port;
        })
    }

    /// One hop later.
    pub(crate) fn hop(self) -> Self {
        self.with(|packet| packet.ttl -= 1)
    }

    pub(crate) fn macs(self, dmac: [u8; 6], smac: [u8; 6]) -> Self {
        self.with(|packet| (packet.dmac, packet.smac) = (dmac, smac))
    }

    pub(crate) fn frame(&self) -> Vec<u8> {
        let transport = self.transport();
        let mut frame = [self.dmac, self.smac].concat();
        match self.from {
            IpAddr::V4(_) => frame.extend(self.ipv4(transport.len())),
            IpAddr::V6(_) => frame.extend(self.ipv6(transport.len())),
        }
        frame.extend(transport);
        frame
    }

    fn protocol(&self) -> u8 {
        match self.body {
            Body::Udp | Body::UdpUnsummed => PROTO_UDP,
            Body::Tcp(_) => PROTO_TCP,
            Body::Sctp(_) | Body::SctpUnsummed(_) => PROTO_SCTP,
            Body::Other(protocol) => protocol,
            _ if self.from.is_ipv4() => PROTO_ICMP,
            _ => PROTO_ICMPV6,
        }
    }

    fn ipv4(&self, length: usize) -> Vec<u8> {
        let header = 20 + 8 * usize::from(self.options);
        let total = u16::try_from(header + length).expect("a length");
        let (offset, more) = self.fragment;
        let bits = offset | if more { 0x2000 } else { 0 } | if self.dont_fragment { 0x4000 } else { 0 };
        let mut bytes = vec![0x40 + u8::try_from(header / 4).expect("a header length"), 0];
        bytes.extend(total.to_be_bytes());
        bytes.extend(self.number.to_be_bytes());
        bytes.extend(bits.to_be_bytes());
        bytes.extend([self.ttl, self.protocol(), 0, 0]);
        bytes.extend(octets(self.from));
        bytes.extend(octets(self.to));
        // No-operation options.
        bytes.resize(header, 1);
        let checksum = checksum(&bytes);
        bytes[10..12].copy_from_slice(&checksum.to_be_bytes());
        [vec![0x08, 0x00], bytes].concat()
    }

    fn ipv6(&self, length: usize) -> Vec<u8> {
        const DESTINATION_OPTIONS: u8 = 60;
        const FRAGMENT: u8 = 44;
        let mut options = vec![0; 8 * usize::from(self.options)];
        if let [next, extra, pad, pad_length, ..] = options.as_mut_slice() {
            // One PadN option over all of it.
            (*next, *extra, *pad, *pad_length) = (self.protocol(), self.options - 1, 1, 8 * self.options - 4);
        }
        let (offset, more) = self.fragment;
        let mut next = if self.options > 0 { DESTINATION_OPTIONS } else { self.protocol() };
        if (offset, more) != (0, false) {
            options = vec![self.protocol(), 0];
            options.extend((offset << 3 | u16::from(more)).to_be_bytes());
            options.extend(u32::from(self.number).to_be_bytes());
            next = FRAGMENT;
        }
        let mut bytes = vec![0x86, 0xdd, 0x60, 0, 0, 0];
        bytes.extend(u16::try_from(options.len() + length).expect("a length").to_be_bytes());
        bytes.extend([next, self.ttl]);
        bytes.extend(octets(self.from));
        bytes.extend(octets(self.to));
        bytes.extend(options);
        bytes
    }

    fn transport(&self) -> Vec<u8> {
        let (ports, v4) = ([self.sport.to_be_bytes(), self.dport.to_be_bytes()].concat(), self.from.is_ipv4());
        let data = self.content.clone().unwrap_or_else(|| {
            (0..self.data).map(|index| u8::try_from(index % 251).expect("a byte")).collect::<Vec<u8>>()
        });
        let icmp = |v4_head: [u8; 2], v6_head: [u8; 2]| {
            let head = if v4 { v4_head } else { v6_head };
            [head.as_slice(), &[0, 0], &self.sport.to_be_bytes(), &[0, 9]].concat()
        };
        let (mut bytes, sum_at) = match self.body {
            Body::Udp | Body::UdpUnsummed => {
                let length = u16::try_from(8 + data.len()).expect("a length");
                ([ports.as_slice(), &length.to_be_bytes(), &[0, 0]].concat(), 6)
            }
            Body::Tcp(flags) => {
                let numbers = [self.sequence.to_be_bytes(), self.acknowledged.to_be_bytes()].concat();
                ([ports.as_slice(), &numbers, &[0x50, flags, 0x20, 0, 0, 0, 0, 0]].concat(), 16)
            }
            Body::EchoRequest => (icmp([8, 0], [128, 0]), 2),
            Body::EchoReply => (icmp([0, 0], [129, 0]), 2),
            Body::Unreachable => (icmp([3, 1], [1, 3]), 2),
            Body::Icmp(head, rest) => ([head.as_slice(), &[0, 0], &rest].concat(), 2),
            Body::Sctp(chunk) | Body::SctpUnsummed(chunk) => {
                let length = u16::try_from(4 + data.len()).expect("a length").to_be_bytes();
                ([ports.as_slice(), &[0, 0, 0, 9, 0, 0, 0, 0, chunk, 0], &length].concat(), 8)
            }
            Body::Other(_) => return [ports, data].concat(),
        };
        bytes.extend(data);
        match self.body {
            Body::UdpUnsummed | Body::SctpUnsummed(_) => {}
            Body::Sctp(_) => {
                let sum = crc32c(&bytes);
                bytes[sum_at..sum_at + 4].copy_from_slice(&sum.to_le_bytes());
            }
            _ => {
                let sum = self.transport_checksum(&bytes);
                bytes[sum_at..sum_at + 2].copy_from_slice(&sum.to_be_bytes());
            }
        }
        if self.fragment.0 > 0 {
            // A later fragment carries data only.
            bytes.drain(..if matches!(self.body, Body::Tcp(_)) { 20 } else { 8 });
        }
        bytes
    }

    fn transport_checksum(&self, bytes: &[u8]) -> u16 {
        let mut covered = Vec::new();
        if self.protocol() != PROTO_ICMP {
            covered.extend(octets(self.from));
            covered.extend(octets(self.to));
            covered.extend([0, self.protocol()]);
            covered.extend(u16::try_from(bytes.len()).expect("a length").to_be_bytes());
        }
        covered.extend(bytes);
        match (checksum(&covered), self.protocol()) {
            (0, PROTO_UDP) => 0xffff,
            (sum, _) => sum,
        }
    }
}

pub(crate) fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

/// RFC 1071: the complement of the one's complement sum of big-endian words.
pub(crate) fn checksum(bytes: &[u8]) -> u16 {
    let mut sum = 0_u32;
    for pair in bytes.chunks(2) {
        sum += u32::from(pair[0]) << 8 | pair.get(1).map_or(0, |low| u32::from(*low));
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !u16::try_from(sum).expect("folded")
}

/// RFC 9260 appendix A, bit by bit.
pub(crate) fn crc32c(bytes: &[u8]) -> u32 {
    let shift = |crc: u32| crc >> 1 ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 };
    !bytes.iter().fold(u32::MAX, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), |crc, _| shift(crc)))
}
