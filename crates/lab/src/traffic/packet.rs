//! Packets made by hand, for what no host's stack would send. The code is not the product's, so that the two can be
//! compared.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Result, bail};

pub use crate::capture::dissect::{ICMP, ICMPV6, TCP, UDP};

/// The flag SYN (RFC 9293, section 3.1).
const TCP_SYN: u8 = 2;

/// The first segment of a TCP connection, with this sequence number.
pub fn syn(from: SocketAddr, to: SocketAddr, number: u32) -> Result<Vec<u8>> {
    let ports = [from.port().to_be_bytes(), to.port().to_be_bytes()].concat();
    let rest = [&number.to_be_bytes()[..], &[0; 4], &[5 << 4, TCP_SYN], &[0xff, 0xff], &[0; 4]].concat();
    let segment = summed(from.ip(), to.ip(), TCP, [ports, rest].concat(), 16);
    ip(from.ip(), to.ip(), TCP, &segment)
}

/// A datagram: what follows the IP header.
pub fn udp(from: SocketAddr, to: SocketAddr, data: &[u8]) -> Result<Vec<u8>> {
    let length = u16::try_from(8 + data.len())?;
    let head = [from.port().to_be_bytes(), to.port().to_be_bytes(), length.to_be_bytes(), [0; 2]];
    Ok(summed(from.ip(), to.ip(), UDP, [&head.concat(), data].concat(), 6))
}

/// What follows an IP header, with its checksum at `sum_at`.
pub fn summed(from: IpAddr, to: IpAddr, protocol: u8, mut bytes: Vec<u8>, sum_at: usize) -> Vec<u8> {
    let mut covered = Vec::new();
    if protocol != ICMP {
        covered.extend(octets(from));
        covered.extend(octets(to));
        covered.extend(u32::try_from(bytes.len()).unwrap_or(0).to_be_bytes());
        covered.extend([0, 0, 0, protocol]);
    }
    covered.extend(&bytes);
    bytes[sum_at..sum_at + 2].copy_from_slice(&(!sum(&covered)).to_be_bytes());
    bytes
}

/// A whole packet with DF set, after its EtherType.
pub fn ip(from: IpAddr, to: IpAddr, protocol: u8, payload: &[u8]) -> Result<Vec<u8>> {
    let length = u16::try_from(payload.len())?;
    let addresses = [octets(from), octets(to)].concat();
    let (ethertype, header) = match (from, to) {
        (IpAddr::V4(_), IpAddr::V4(_)) => {
            let [high, low] = (length + 20).to_be_bytes();
            let mut header = [&[0x45, 0, high, low, 0, 0, 0x40, 0, 64, protocol, 0, 0], addresses.as_slice()].concat();
            let checksum = !sum(&header);
            header[10..12].copy_from_slice(&checksum.to_be_bytes());
            ([0x08, 0x00], header)
        }
        (IpAddr::V6(_), IpAddr::V6(_)) => {
            let [high, low] = length.to_be_bytes();
            ([0x86, 0xdd], [&[0x60, 0, 0, 0, high, low, protocol, 64], addresses.as_slice()].concat())
        }
        _ => bail!("a packet has one family"),
    };
    Ok([&ethertype, header.as_slice(), payload].concat())
}

pub fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

/// RFC 1071: the one's complement sum.
pub fn sum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | pair.get(1).copied().map_or(0, u32::from));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    // The loop leaves sixteen bits.
    u16::try_from(sum).unwrap_or(u16::MAX)
}

/// Where the product's overlay listens.
pub const TUNNEL_PORT: u16 = 4794;
/// The overlay device's link address, the same on every node.
const OVERLAY_MAC: [u8; 6] = [0x02, 0xe6, 0x7e, 0x55, 0x00, 0x01];

/// The UDP payload of an overlay packet, as an attacker could make it: VXLAN (RFC 7348) with an egress ID as VNI, and inside
/// it a UDP datagram from any source.
pub fn overlay(egress_id: u32, source: SocketAddr, destination: SocketAddr) -> Result<Vec<u8>> {
    let id = egress_id.to_be_bytes();
    let mut bytes = vec![0x08, 0, 0, 0, id[1], id[2], id[3], 0];
    bytes.extend(OVERLAY_MAC);
    bytes.extend([0x02, 0, 0, 0, 0, 0x66]);
    let udp = udp(source, destination, DATA)?;
    bytes.extend(ip(source.ip(), destination.ip(), UDP, &udp)?);
    Ok(bytes)
}

const DATA: &[u8] = b"not what it seems..";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capture::dissect::{CapturedFrame, Checksum, dissect};

    #[test]
    fn what_is_made_is_read_as_it_was_meant() {
        for (from, to) in [("10.0.0.1:7", "10.0.0.2:8"), ("[fd00::1]:7", "[fd00::2]:8")] {
            let (from, to): (SocketAddr, SocketAddr) = (from.parse().expect("from"), to.parse().expect("to"));
            for data in [&b"even"[..], b"odd", b""] {
                let packet = ip(from.ip(), to.ip(), UDP, &udp(from, to, data).expect("short")).expect("one family");
                let CapturedFrame::Ip(seen) = dissect(&[&[0; 12], packet.as_slice()].concat()) else {
                    panic!("{packet:02x?}")
                };
                assert_eq!(seen.checksum, Checksum::Complete, "{packet:02x?}");
                assert_eq!((seen.source, seen.source_port), (from.ip(), from.port()));
                assert_eq!((seen.destination, seen.destination_port), (to.ip(), to.port()));
            }
        }
        assert!(ip([10, 0, 0, 1].into(), "fd00::1".parse().expect("a literal"), UDP, &[]).is_err());
    }

    #[test]
    fn the_inner_header_is_where_it_should_be() {
        let bytes = overlay(7, "10.0.0.1:1".parse().expect("from"), "10.0.0.2:2".parse().expect("to")).expect("packet");
        assert_eq!(sum(&bytes[22..42]), 0xffff);
        assert_eq!(bytes[4..8], [0, 0, 7, 0]);
    }
}
