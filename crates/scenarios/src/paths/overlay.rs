//! Overlay packets made by hand, as a pod could make them: VXLAN (RFC 7348) with an egress ID as VNI, and inside it a
//! UDP datagram from whatever source one likes. The words here are not the product's: this is the attacker's copy.

use std::net::SocketAddr;

use anyhow::Result;

use egress_lab::traffic::packet;

/// Where the product's overlay listens.
pub(super) const TUNNEL_PORT: u16 = 4794;
/// The overlay device's link address, the same on every node.
const OVERLAY_MAC: [u8; 6] = [0x02, 0xe6, 0x7e, 0x55, 0x00, 0x01];

/// The UDP payload of an overlay packet.
pub(super) fn packet(egress_id: u32, source: SocketAddr, destination: SocketAddr) -> Result<Vec<u8>> {
    let id = egress_id.to_be_bytes();
    let mut bytes = vec![0x08, 0, 0, 0, id[1], id[2], id[3], 0];
    bytes.extend(OVERLAY_MAC);
    bytes.extend([0x02, 0, 0, 0, 0, 0x66]);
    let udp = packet::udp(source, destination, DATA)?;
    bytes.extend(packet::ip(source.ip(), destination.ip(), packet::UDP, &udp)?);
    Ok(bytes)
}

const DATA: &[u8] = b"not what it seems..";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_inner_header_is_where_it_should_be() {
        let bytes =
            super::packet(7, "10.0.0.1:1".parse().expect("from"), "10.0.0.2:2".parse().expect("to")).expect("packet");
        assert_eq!(packet::sum(&bytes[22..42]), 0xffff);
        assert_eq!(bytes[4..8], [0, 0, 7, 0]);
    }
}
