//! Reads a captured frame: sender, destination and protocol, and whether its checksums are right. Deliberately a second
//! implementation, apart from the product's: it is the judge of what the product puts on the wire.
//!
//! A checksum is complete (right as it stands), partial (the sum of the pseudo header alone, which the sender leaves
//! for its hardware to finish: RFC 1071 sums, Linux' CHECKSUM_PARTIAL) or wrong. On an interface whose checksum
//! offload is off, only complete is right.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

const ETHERNET: usize = 14;
const ETHERTYPE_IPV4: u16 = 0x0800;
const ETHERTYPE_IPV6: u16 = 0x86dd;
const ETHERTYPE_ARP: u16 = 0x0806;

pub const ICMP: u8 = 1;
pub const TCP: u8 = 6;
pub const UDP: u8 = 17;
pub const ICMPV6: u8 = 58;

const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const DESTINATION_OPTIONS: u8 = 60;

/// What the checksums of a packet are like.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Checksum {
    Complete,
    Partial,
    Wrong,
    /// No checksum that one packet alone could tell: a fragment, another protocol, UDP over IPv4 without one.
    None,
}

/// An IP packet in a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IpPacket {
    pub source: IpAddr,
    pub destination: IpAddr,
    pub protocol: u8,
    /// Ports of TCP and UDP; type and code of ICMP, the type first; else zero.
    pub source_port: u16,
    pub destination_port: u16,
    /// Of a TCP packet whose header is there.
    pub segment: Option<TcpSegment>,
    pub checksum: Checksum,
}

/// What a TCP header says besides its ports: enough to tell an endpoint's SYN from a reset by someone who knows nothing of the
/// connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TcpSegment {
    pub sequence: u32,
    pub acknowledged: u32,
    pub flags: u8,
}

impl fmt::Display for TcpSegment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const FLAGS: [(&str, u8); 6] =
            [("FIN", 0x01), ("SYN", 0x02), ("RST", 0x04), ("PSH", 0x08), ("ACK", 0x10), ("URG", 0x20)];
        for (name, _) in FLAGS.iter().filter(|(_, bit)| self.flags & bit != 0) {
            write!(f, "{name} ")?;
        }
        write!(f, "seq {} ack {}", self.sequence, self.acknowledged)
    }
}

/// What a frame carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CapturedFrame {
    Ip(IpPacket),
    /// An ARP packet that speaks for an IPv4 address: a request asks for `target`, an answer or announcement claims
    /// `sender`.
    Arp {
        request: bool,
        sender: Ipv4Addr,
        sender_mac: [u8; 6],
        target: Ipv4Addr,
    },
    Other,
}

pub fn dissect(frame: &[u8]) -> CapturedFrame {
    let Some(ethertype) = word(frame, 12) else { return CapturedFrame::Other };
    let payload = frame.get(ETHERNET..).unwrap_or_default();
    let packet = match ethertype {
        ETHERTYPE_IPV4 => ipv4(payload),
        ETHERTYPE_IPV6 => ipv6(payload),
        ETHERTYPE_ARP => return arp(payload).unwrap_or(CapturedFrame::Other),
        _ => None,
    };
    packet.map_or(CapturedFrame::Other, CapturedFrame::Ip)
}

fn word(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..at + 2).map(|pair| u16::from_be_bytes([pair[0], pair[1]]))
}

fn long(bytes: &[u8], at: usize) -> Option<u32> {
    array(bytes, at).map(u32::from_be_bytes)
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at + N)?.try_into().ok()
}

fn arp(packet: &[u8]) -> Option<CapturedFrame> {
    Some(CapturedFrame::Arp {
        request: word(packet, 6)? == 1,
        sender_mac: array(packet, 8)?,
        sender: Ipv4Addr::from(array::<4>(packet, 14)?),
        target: Ipv4Addr::from(array::<4>(packet, 24)?),
    })
}

fn ipv4(bytes: &[u8]) -> Option<IpPacket> {
    let header = usize::from(bytes.first()? & 0x0f) * 4;
    let total = usize::from(word(bytes, 2)?);
    // A segment for the hardware to cut may be longer than the field can say; the kernel then leaves zero there.
    let end = if total == 0 { bytes.len() } else { total };
    let payload = bytes.get(header..end)?;
    let fragment = word(bytes, 6)? & 0x3fff != 0;
    let protocol = *bytes.get(9)?;
    let source = Ipv4Addr::from(array::<4>(bytes, 12)?);
    let destination = Ipv4Addr::from(array::<4>(bytes, 16)?);
    let pseudo = Sum::default().add(bytes.get(12..20)?);
    let transport = transport(pseudo, protocol, payload, fragment);
    let header_right = Sum::default().add(bytes.get(..header)?).folded() == 0xffff;
    let checksum = if header_right { transport } else { Checksum::Wrong };
    Some(packet(source.into(), destination.into(), protocol, payload, checksum))
}

fn ipv6(bytes: &[u8]) -> Option<IpPacket> {
    let length = usize::from(word(bytes, 4)?);
    let end = if length == 0 { bytes.len() } else { 40 + length };
    let source = Ipv6Addr::from(array::<16>(bytes, 8)?);
    let destination = Ipv6Addr::from(array::<16>(bytes, 24)?);
    let mut protocol = *bytes.get(6)?;
    let mut at = 40;
    let mut fragment = false;
    while matches!(protocol, HOP_BY_HOP | ROUTING | FRAGMENT | DESTINATION_OPTIONS) {
        let length = if protocol == FRAGMENT { 8 } else { 8 + usize::from(*bytes.get(at + 1)?) * 8 };
        fragment |= protocol == FRAGMENT;
        protocol = *bytes.get(at)?;
        at += length;
    }
    let payload = bytes.get(at..end)?;
    let pseudo = Sum::default().add(bytes.get(8..40)?);
    let checksum = transport(pseudo, protocol, payload, fragment);
    Some(packet(source.into(), destination.into(), protocol, payload, checksum))
}

fn packet(source: IpAddr, destination: IpAddr, protocol: u8, payload: &[u8], checksum: Checksum) -> IpPacket {
    let (source_port, destination_port) = match protocol {
        TCP | UDP => (word(payload, 0).unwrap_or(0), word(payload, 2).unwrap_or(0)),
        ICMP | ICMPV6 => {
            let byte = |at: usize| payload.get(at).copied().map_or(0, u16::from);
            (byte(0), byte(1))
        }
        _ => (0, 0),
    };
    let segment = if protocol == TCP { segment(payload) } else { None };
    IpPacket { source, destination, protocol, source_port, destination_port, segment, checksum }
}

fn segment(header: &[u8]) -> Option<TcpSegment> {
    Some(TcpSegment { sequence: long(header, 4)?, acknowledged: long(header, 8)?, flags: *header.get(13)? })
}

/// Judges the checksum of a transport header; `addresses` is the sum of both addresses.
fn transport(addresses: Sum, protocol: u8, payload: &[u8], fragment: bool) -> Checksum {
    let field = match protocol {
        _ if fragment => return Checksum::None,
        TCP => 16,
        UDP => 6,
        ICMP | ICMPV6 => 2,
        _ => return Checksum::None,
    };
    let Some(stored) = word(payload, field) else { return Checksum::Wrong };
    if protocol == UDP && stored == 0 {
        return Checksum::None;
    }
    let pseudo = addresses.word(protocol.into()).length(payload.len());
    let start = if protocol == ICMP { Sum::default() } else { pseudo };
    if start.add(payload).folded() == 0xffff {
        Checksum::Complete
    } else if protocol != ICMP && stored == pseudo.folded() {
        Checksum::Partial
    } else {
        Checksum::Wrong
    }
}

/// The Internet's one's complement sum.
#[derive(Debug, Clone, Copy, Default)]
struct Sum(u64);

impl Sum {
    fn add(mut self, bytes: &[u8]) -> Self {
        for pair in bytes.chunks(2) {
            self.0 += u64::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]));
        }
        self
    }

    fn word(mut self, word: u16) -> Self {
        self.0 += u64::from(word);
        self
    }

    fn length(mut self, length: usize) -> Self {
        self.0 += length as u64;
        self
    }

    fn folded(self) -> u16 {
        let mut sum = self.0;
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        // The loop leaves at most sixteen bits.
        u16::try_from(sum).unwrap_or(u16::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// ICMP echo request 10.0.0.1 -> 10.0.0.2 and UDP 10.0.0.1:7 -> 10.0.0.2:8, checksums as a kernel made them.
    fn udp(checksum: u16) -> Vec<u8> {
        let mut frame = vec![0; 12];
        frame.extend([0x08, 0x00]);
        frame.extend([0x45, 0, 0, 32, 0, 1, 0, 0, 64, UDP, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
        let header = !Sum::default().add(&frame[14..34]).folded();
        frame[24..26].copy_from_slice(&header.to_be_bytes());
        frame.extend([0, 7, 0, 8, 0, 12]);
        frame.extend(checksum.to_be_bytes());
        frame.extend([1, 2, 3, 4]);
        frame
    }

    fn checksum_of(frame: &[u8]) -> Checksum {
        match dissect(frame) {
            CapturedFrame::Ip(packet) => packet.checksum,
            other => panic!("not an IP packet: {other:?}"),
        }
    }

    /// Pseudo header: 0a00+0001+0a00+0002+0011+000c = 1420. With 0007+0008+000c+0102+0304: 1841, complement e7be.
    #[test]
    fn complete_partial_wrong_and_none_are_distinguished() {
        assert_eq!(checksum_of(&udp(0xe7be)), Checksum::Complete);
        assert_eq!(checksum_of(&udp(0x1420)), Checksum::Partial);
        assert_eq!(checksum_of(&udp(0xe7bf)), Checksum::Wrong);
        assert_eq!(checksum_of(&udp(0)), Checksum::None);
    }

    #[test]
    fn a_wrong_ipv4_header_is_wrong() {
        let mut frame = udp(0xe7be);
        frame[24] ^= 1;
        assert_eq!(checksum_of(&frame), Checksum::Wrong);
    }

    #[test]
    fn ports_and_addresses_are_read() {
        let CapturedFrame::Ip(packet) = dissect(&udp(0)) else { panic!("not an IP packet") };
        assert_eq!((packet.source_port, packet.destination_port), (7, 8));
        assert_eq!(packet.source.to_string(), "10.0.0.1");
    }

    #[test]
    fn a_segments_flags_and_numbers_are_read() {
        let mut frame = udp(0);
        frame[23] = TCP;
        frame.splice(34.., [0, 7, 0x1f, 0x90, 0, 0, 1, 0, 0, 0, 2, 0, 0x50, 0x14, 0, 0, 0, 0, 0, 0]);
        frame[17] = 40;
        let CapturedFrame::Ip(packet) = dissect(&frame) else { panic!("not an IP packet") };
        assert_eq!(packet.segment.map(|segment| segment.to_string()).as_deref(), Some("RST ACK seq 256 ack 512"));
    }

    #[test]
    fn cut_off_frames_are_no_packets() {
        for length in 0..udp(0).len() {
            assert_eq!(dissect(&udp(0)[..length]), CapturedFrame::Other);
        }
    }
}
