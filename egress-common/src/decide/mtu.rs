//! Lengths: redirects check no MTU, so we do.

use crate::abi::Family;
use crate::wire::{Heads, L3};

/// In place of a size: the segments lie ready, each as long as its sender made it (SCTP).
const GSO_BY_FRAGS: u32 = 0xffff;

/// Length (bytes, from the IP header on) of the largest packet that this one will be on the wire: itself, or a segment of
/// it where the kernel holds several in one (GSO). Zero where a program cannot see how long the segments are: each fits
/// the pod's own device.
#[inline(always)]
pub fn wire_length(frame_len: u32, gso_size: u32, heads: &Heads) -> u32 {
    match gso_size {
        0 => frame_len.saturating_sub(L3 as u32),
        GSO_BY_FRAGS => 0,
        size => size + heads.header_len(),
    }
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
    use crate::wire::PROTO_SCTP;

    #[test]
    fn a_segment_has_all_headers_and_its_share_of_the_data() {
        for (cast, network) in [(V4, 20), (V6, 40)] {
            let tcp = packet(cast.pod, cast.world, 4000, 80).tcp(0x10).heads();
            assert_eq!(wire_length(1514, 0, &tcp), 1500, "alone");
            assert_eq!(wire_length(64_000, 1448, &tcp), 1448 + network + 20, "of many");
            let udp = packet(cast.pod, cast.world, 4000, 80).heads();
            assert_eq!(wire_length(64_000, 1400, &udp), 1400 + network + 8);
            assert_eq!(wire_length(3, 0, &udp), 0, "shorter than a link header");
            let sctp = packet(cast.pod, cast.world, 4000, 80).protocol(PROTO_SCTP).heads();
            assert_eq!(wire_length(64_000, GSO_BY_FRAGS, &sctp), 0, "as the sender cut them");
        }
    }
}
