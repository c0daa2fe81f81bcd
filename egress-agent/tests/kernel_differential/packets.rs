//! Builder of packets, layer by layer. Every checksum is computed over the whole packet, and can be made wrong on
//! purpose.

use std::net::IpAddr;

pub(crate) const ICMP: u8 = 1;
pub(crate) const TCP: u8 = 6;
pub(crate) const UDP: u8 = 17;
pub(crate) const ROUTING: u8 = 43;
pub(crate) const FRAGMENT: u8 = 44;
pub(crate) const GRE: u8 = 47;
pub(crate) const ESP: u8 = 50;
pub(crate) const AH: u8 = 51;
pub(crate) const ICMPV6: u8 = 58;
pub(crate) const DESTINATION_OPTIONS: u8 = 60;
pub(crate) const SCTP: u8 = 132;

/// A packet from the network header on.
#[derive(Clone, Debug)]
pub(crate) struct PacketSpec {
    pub(crate) from: IpAddr,
    pub(crate) to: IpAddr,
    pub(crate) ttl: u8,
    /// DSCP and ECN.
    pub(crate) tos: u8,
    pub(crate) id: u16,
    pub(crate) dont_fragment: bool,
    pub(crate) flow_label: u32,
    /// IPv4 options, a multiple of four bytes.
    pub(crate) options: Vec<u8>,
    /// IPv6 extension headers: number, and all bytes but the first.
    pub(crate) extensions: Vec<(u8, Vec<u8>)>,
    pub(crate) body: Transport,
    /// Errors added to the valid checksums of the transport header and the IPv4 header.
    pub(crate) spoil: u16,
    pub(crate) spoil_header: u16,
}

/// What the packet carries.
#[derive(Clone, Debug)]
pub(crate) enum Transport {
    Tcp(Tcp),
    Udp {
        sport: u16,
        dport: u16,
        summed: bool,
        data: Vec<u8>,
    },
    Sctp {
        sport: u16,
        dport: u16,
        tag: u32,
        chunks: Vec<u8>,
    },
    Icmp {
        kind: u8,
        code: u8,
        rest: [u8; 4],
        data: Vec<u8>,
    },
    /// Bytes of any protocol.
    Other(u8, Vec<u8>),
}

#[derive(Clone, Debug)]
pub(crate) struct Tcp {
    pub(crate) sport: u16,
    pub(crate) dport: u16,
    pub(crate) seq: u32,
    pub(crate) ack: u32,
    pub(crate) flags: u8,
    pub(crate) window: u16,
    pub(crate) urgent: u16,
    /// A multiple of four bytes.
    pub(crate) options: Vec<u8>,
    pub(crate) data: Vec<u8>,
}

impl PacketSpec {
    pub(crate) fn new(from: IpAddr, to: IpAddr, body: Transport) -> Self {
        Self {
            from,
            to,
            ttl: 64,
            tos: 0,
            id: 0x1234,
            dont_fragment: false,
            flow_label: 0,
            options: Vec::new(),
            extensions: Vec::new(),
            body,
            spoil: 0,
            spoil_header: 0,
        }
    }

    pub(crate) fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let transport = self.transport();
        let mut bytes = self.header(transport.len());
        bytes.extend(transport);
        bytes
    }

    /// Length of the network header with its options or extensions.
    pub(crate) fn header_length(&self) -> usize {
        self.header(0).len()
    }

    fn header(&self, length: usize) -> Vec<u8> {
        if self.from.is_ipv4() { self.ipv4(length) } else { self.ipv6(length) }
    }

    fn protocol(&self) -> u8 {
        match self.body {
            Transport::Tcp(_) => TCP,
            Transport::Udp { .. } => UDP,
            Transport::Sctp { .. } => SCTP,
            Transport::Icmp { .. } if self.from.is_ipv4() => ICMP,
            Transport::Icmp { .. } => ICMPV6,
            Transport::Other(protocol, _) => protocol,
        }
    }

    fn ipv4(&self, length: usize) -> Vec<u8> {
        let header = 20 + self.options.len();
        let mut bytes = vec![0x40 + byte(header / 4), self.tos];
        bytes.extend(word(header + length));
        bytes.extend(self.id.to_be_bytes());
        bytes.extend([if self.dont_fragment { 0x40 } else { 0 }, 0, self.ttl, self.protocol(), 0, 0]);
        bytes.extend(octets(self.from));
        bytes.extend(octets(self.to));
        bytes.extend(&self.options);
        let sum = spoilt(checksum(&[&bytes]), self.spoil_header);
        bytes[10..12].copy_from_slice(&sum.to_be_bytes());
        bytes
    }

    fn ipv6(&self, length: usize) -> Vec<u8> {
        let between: usize = self.extensions.iter().map(|(_, rest)| 1 + rest.len()).sum();
        let first = 6 << 28 | u32::from(self.tos) << 20 | self.flow_label;
        let mut bytes = first.to_be_bytes().to_vec();
        bytes.extend(word(between + length));
        let mut next = self.extensions.iter().map(|(number, _)| *number).chain([self.protocol()]);
        bytes.extend([next.next().expect("at least the protocol"), self.ttl]);
        bytes.extend(octets(self.from));
        bytes.extend(octets(self.to));
        for (_, rest) in &self.extensions {
            bytes.push(next.next().expect("one more than extensions"));
            bytes.extend(rest);
        }
        bytes
    }

    fn transport(&self) -> Vec<u8> {
        let (mut bytes, sum_at) = match &self.body {
            Transport::Tcp(tcp) => (tcp.bytes(), 16),
            Transport::Udp { sport, dport, summed, data } => {
                let bytes = [ports(*sport, *dport).as_slice(), &word(8 + data.len()), &[0, 0], data].concat();
                if !summed {
                    return bytes;
                }
                (bytes, 6)
            }
            Transport::Sctp { sport, dport, tag, chunks } => {
                let mut bytes = [ports(*sport, *dport).as_slice(), &tag.to_be_bytes(), &[0; 4], chunks].concat();
                let crc = crc32c(&bytes).wrapping_add(self.spoil.into());
                bytes[8..12].copy_from_slice(&crc.to_le_bytes());
                return bytes;
            }
            Transport::Icmp { kind, code, rest, data } => ([[*kind, *code, 0, 0].as_slice(), rest, data].concat(), 2),
            Transport::Other(_, bytes) => return bytes.clone(),
        };
        let pseudo = if self.protocol() == ICMP { Vec::new() } else { self.pseudo(bytes.len()) };
        let sum = match (checksum(&[&pseudo, &bytes]), self.protocol()) {
            (0, UDP) => 0xffff,
            (sum, _) => sum,
        };
        bytes[sum_at..sum_at + 2].copy_from_slice(&spoilt(sum, self.spoil).to_be_bytes());
        bytes
    }

    fn pseudo(&self, length: usize) -> Vec<u8> {
        [octets(self.from), octets(self.to), vec![0, self.protocol()], word(length).to_vec()].concat()
    }

    /// The packet in fragments, in order: the payload is split at these offsets, multiples of eight bytes.
    pub(crate) fn fragments(&self, cuts: &[usize]) -> Vec<Vec<u8>> {
        let transport = self.transport();
        let starts = [0].iter().chain(cuts);
        let ends = cuts.iter().copied().chain([transport.len()]);
        starts
            .zip(ends)
            .map(|(start, end)| self.fragment(*start, &transport[*start..end], end < transport.len()))
            .collect()
    }

    fn fragment(&self, start: usize, data: &[u8], more: bool) -> Vec<u8> {
        let offset = u16::try_from(start).expect("an offset");
        if self.from.is_ipv4() {
            let mut bytes = [self.ipv4(data.len()), data.to_vec()].concat();
            let bits = offset >> 3 | if more { 0x2000 } else { 0 } | if self.dont_fragment { 0x4000 } else { 0 };
            bytes[6..8].copy_from_slice(&bits.to_be_bytes());
            fix_ipv4_header(&mut bytes);
            return bytes;
        }
        let mut rest = vec![0];
        rest.extend((offset | u16::from(more)).to_be_bytes());
        rest.extend([0, 0]);
        rest.extend(self.id.to_be_bytes());
        let whole = self.clone().with(|packet| packet.extensions.push((FRAGMENT, rest)));
        [whole.ipv6(data.len()), data.to_vec()].concat()
    }
}

impl Tcp {
    fn bytes(&self) -> Vec<u8> {
        let offset = byte((20 + self.options.len()) / 4 * 16);
        let mut bytes = ports(self.sport, self.dport).to_vec();
        bytes.extend(self.seq.to_be_bytes());
        bytes.extend(self.ack.to_be_bytes());
        bytes.extend([offset, self.flags]);
        bytes.extend(self.window.to_be_bytes());
        bytes.extend([0, 0]);
        bytes.extend(self.urgent.to_be_bytes());
        bytes.extend(&self.options);
        bytes.extend(&self.data);
        bytes
    }
}

/// Writes the checksum into an IPv4 header.
pub(crate) fn fix_ipv4_header(bytes: &mut [u8]) {
    let header = usize::from(bytes[0] & 0x0f) * 4;
    bytes[10..12].fill(0);
    let sum = checksum(&[&bytes[..header]]);
    bytes[10..12].copy_from_slice(&sum.to_be_bytes());
}

fn spoilt(sum: u16, by: u16) -> u16 {
    sum.wrapping_add(by)
}

pub(crate) fn byte(number: usize) -> u8 {
    u8::try_from(number).expect("a byte")
}

pub(crate) fn word(number: usize) -> [u8; 2] {
    u16::try_from(number).expect("sixteen bits").to_be_bytes()
}

fn ports(sport: u16, dport: u16) -> [u8; 4] {
    let ([a, b], [c, d]) = (sport.to_be_bytes(), dport.to_be_bytes());
    [a, b, c, d]
}

pub(crate) fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

/// The one's complement sum of big-endian words (RFC 1071); only the last part may have an odd length.
pub(crate) fn sum(parts: &[&[u8]]) -> u16 {
    let mut total = 0_u32;
    for pair in parts.iter().flat_map(|part| part.chunks(2)) {
        total += u32::from(pair[0]) << 8 | pair.get(1).map_or(0, |low| u32::from(*low));
        total = (total & 0xffff) + (total >> 16);
    }
    u16::try_from(total).expect("folded")
}

pub(crate) fn checksum(parts: &[&[u8]]) -> u16 {
    !sum(parts)
}

/// RFC 9260, appendix A: the reflected Castagnoli polynomial.
pub(crate) fn crc32c(bytes: &[u8]) -> u32 {
    let step = |crc: u32, byte: &u8| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| crc >> 1 ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 })
    };
    !bytes.iter().fold(u32::MAX, step)
}
