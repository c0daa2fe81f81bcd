//! Overlay packets made by hand, as a pod could make them: VXLAN (RFC 7348) with an egress ID as VNI, and inside it a
//! UDP datagram from whatever source one likes. The words here are not the product's: this is the attacker's copy.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use anyhow::{Result, bail};

/// Where the product's overlay listens.
pub(super) const TUNNEL_PORT: u16 = 4794;
/// The overlay device's link address, the same on every node.
const OVERLAY_MAC: [u8; 6] = [0x02, 0xe6, 0x7e, 0x55, 0x00, 0x01];
const UDP: u8 = 17;

/// The UDP payload of an overlay packet.
pub(super) fn packet(egress_id: u32, source: SocketAddr, destination: SocketAddr) -> Result<Vec<u8>> {
    let id = egress_id.to_be_bytes();
    let mut bytes = vec![0x08, 0, 0, 0, id[1], id[2], id[3], 0];
    bytes.extend(OVERLAY_MAC);
    bytes.extend([0x02, 0, 0, 0, 0, 0x66]);
    let udp = datagram(source.port(), destination.port());
    match (source.ip(), destination.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => ipv4(&mut bytes, from, to, &udp),
        (IpAddr::V6(from), IpAddr::V6(to)) => ipv6(&mut bytes, from, to, udp),
        _ => bail!("an inner packet has one family"),
    }
    Ok(bytes)
}

const DATA: &[u8] = b"not what it seems..";

fn datagram(from: u16, to: u16) -> Vec<u8> {
    let mut udp = Vec::new();
    udp.extend(from.to_be_bytes());
    udp.extend(to.to_be_bytes());
    udp.extend([0, 8 + u8::try_from(DATA.len()).unwrap_or(0)]);
    udp.extend([0, 0]);
    udp.extend(DATA);
    udp
}

fn ipv4(bytes: &mut Vec<u8>, from: Ipv4Addr, to: Ipv4Addr, udp: &[u8]) {
    let length = u8::try_from(20 + udp.len()).unwrap_or(u8::MAX);
    let mut header = vec![0x45, 0, 0, length, 0, 1, 0x40, 0, 64, UDP, 0, 0];
    header.extend(from.octets());
    header.extend(to.octets());
    let checksum = !sum(&header);
    header[10..12].copy_from_slice(&checksum.to_be_bytes());
    bytes.extend([0x08, 0x00]);
    bytes.extend(header);
    // IPv4 needs no UDP checksum.
    bytes.extend(udp);
}

fn ipv6(bytes: &mut Vec<u8>, from: Ipv6Addr, to: Ipv6Addr, mut udp: Vec<u8>) {
    let length = u8::try_from(udp.len()).unwrap_or(u8::MAX);
    let mut pseudo = Vec::from(from.octets());
    pseudo.extend(to.octets());
    pseudo.extend([0, 0, 0, length, 0, 0, 0, UDP]);
    pseudo.extend(&udp);
    let checksum = !sum(&pseudo);
    udp[6..8].copy_from_slice(&checksum.to_be_bytes());
    bytes.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, length, UDP, 64]);
    bytes.extend(from.octets());
    bytes.extend(to.octets());
    bytes.extend(udp);
}

/// The Internet's one's complement sum.
fn sum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | pair.get(1).map_or(0, |low| u32::from(*low)));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    // The loop leaves sixteen bits.
    u16::try_from(sum).unwrap_or(u16::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_sums_to_all_ones() {
        let bytes = packet(7, "10.0.0.1:1".parse().expect("from"), "10.0.0.2:2".parse().expect("to")).expect("packet");
        assert_eq!(sum(&bytes[22..42]), 0xffff);
        assert_eq!(bytes[4..8], [0, 0, 7, 0]);
    }
}
