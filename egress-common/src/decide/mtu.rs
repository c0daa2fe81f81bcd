//! Lengths: redirects check no MTU, so we do.

use crate::abi::Family;
use crate::wire::{Heads, L3};

/// Length (bytes, from the IP header on) of the largest packet that this one will be on the wire: itself, or a segment of
/// it where the kernel holds several in one (GSO).
#[inline(always)]
pub fn wire_length(frame_len: u32, gso_size: u32, heads: &Heads) -> u32 {
    if gso_size > 0 { gso_size + heads.header_len() } else { frame_len.saturating_sub(L3 as u32) }
}

/// Least MTU of an IPv6 link (RFC 8200 section 5): senders do not believe in less.
const IPV6_MINIMUM: u32 = 1280;

/// Largest packet that is put into the overlay. What is larger than `overlay_mtu` but within this is fragmented outside,
/// as an IPv6 link below the minimum must do by itself.
#[inline(always)]
pub fn overlay_limit(overlay_mtu: u32, family: Family) -> u32 {
    match family {
        Family::V6 if overlay_mtu < IPV6_MINIMUM => IPV6_MINIMUM,
        _ => overlay_mtu,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::cast::{V4, V6};
    use crate::decide::packets::packet;

    #[test]
    fn a_segment_has_all_headers_and_its_share_of_the_data() {
        for (cast, network) in [(V4, 20), (V6, 40)] {
            let tcp = packet(cast.pod, cast.world, 4000, 80).tcp(0x10).heads();
            assert_eq!(wire_length(1514, 0, &tcp), 1500, "alone");
            assert_eq!(wire_length(64_000, 1448, &tcp), 1448 + network + 20, "of many");
            let udp = packet(cast.pod, cast.world, 4000, 80).heads();
            assert_eq!(wire_length(64_000, 1400, &udp), 1400 + network + 8);
            assert_eq!(wire_length(3, 0, &udp), 0, "shorter than a link header");
        }
    }
}
