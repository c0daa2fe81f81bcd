//! MTU checks, because redirects do none.

use crate::abi::{Addr, Family};
use crate::wire::{Headers, L3};

/// Replaces a segment size: the GSO packet holds ready segments of different lengths (SCTP).
const GSO_BY_FRAGS: u32 = 0xffff;

/// Length (bytes, from the IP header on) of the largest packet on the wire: the packet itself, or a segment of a GSO
/// packet. Zero if a program cannot see the segment lengths: each fits the pod's own device.
#[inline(always)]
pub fn wire_length(frame_len: u32, gso_size: u32, headers: &Headers) -> u32 {
    match gso_size {
        0 => frame_len.saturating_sub(L3 as u32),
        GSO_BY_FRAGS => 0,
        size => size + headers.header_len(),
    }
}

/// Bytes on the wire of a packet with its link header: of a GSO packet, each segment has the headers. Those of SCTP are not
/// visible.
#[inline(always)]
pub fn wire_bytes(frame_len: u32, gso_size: u32, headers: &Headers) -> u32 {
    match gso_size {
        0 | GSO_BY_FRAGS => frame_len,
        size => {
            let header = L3 as u32 + headers.header_len();
            frame_len + frame_len.saturating_sub(header + 1).checked_div(size).unwrap_or(0) * header
        }
    }
}

/// Minimum MTU of an IPv6 link (RFC 8200 section 5): senders ignore a smaller one.
const IPV6_MINIMUM: u32 = 1280;

/// How a packet passes the overlay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fit {
    Whole,
    /// The outer packet is fragmented.
    Cut,
    /// Refused: its sender gets an ICMP error with this size.
    Tell(u32),
    /// Refused without an error, because no sender uses a smaller size.
    Lost,
}

/// An outer IPv4 packet may be fragmented, by the overlay device. An outer IPv6 packet is never fragmented: routers
/// must not, and the kernel does not for this kind of tunnel.
#[inline(always)]
pub fn fit(length: u32, overlay_mtu: u32, headers: &Headers, endpoint: &Addr) -> Fit {
    if length <= overlay_mtu {
        return Fit::Whole;
    }
    match too_long(length, overlay_mtu, headers, endpoint) {
        CUT => Fit::Cut,
        LOST => Fit::Lost,
        limit => Fit::Tell(limit),
    }
}

const CUT: u32 = 0;
const LOST: u32 = 1;

/// Out of line and in one register, because it is rare and the programs have little stack.
#[inline(never)]
fn too_long(length: u32, overlay_mtu: u32, headers: &Headers, endpoint: &Addr) -> u32 {
    let limit = overlay_limit(overlay_mtu, headers.family);
    match endpoint.family() {
        Family::V4 if length <= limit || !headers.dont_fragment => CUT,
        Family::V6 if length <= limit => LOST,
        Family::V4 | Family::V6 => limit,
    }
}

/// Largest packet for the overlay. A packet larger than `overlay_mtu` but within this limit is fragmented outside, as
/// required of an IPv6 link below the minimum MTU.
#[inline(always)]
fn overlay_limit(overlay_mtu: u32, family: Family) -> u32 {
    match family {
        Family::V6 if overlay_mtu < IPV6_MINIMUM => IPV6_MINIMUM,
        _ => overlay_mtu,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::cast::{V4, V6};
    use crate::decide::memory_maps::addr;
    use crate::decide::packets::packet;
    use crate::wire::{PROTO_SCTP, tcp};

    #[test]
    fn packets_too_big_for_the_overlay_are_fragmented_outside_or_refused() {
        let whole = |cast| packet(cast, V4.world, 4000, 80);
        let (v4, v6) = (whole(V4.pod).headers(), packet(V6.pod, V6.world, 4000, 80).headers());
        let free = Headers { dont_fragment: false, ..v4 };
        let bound = Headers { dont_fragment: true, ..v4 };
        let (over_v4, over_v6) = (&addr(V4.other_node), &addr(V6.other_node));
        for underlay in [over_v4, over_v6] {
            for headers in [&free, &bound, &v6] {
                assert_eq!(fit(1430, 1430, headers, underlay), Fit::Whole);
            }
            assert_eq!(fit(1431, 1430, &bound, underlay), Fit::Tell(1430));
            assert_eq!(fit(1431, 1430, &v6, underlay), Fit::Tell(1430));
            assert_eq!(fit(1281, 1250, &v6, underlay), Fit::Tell(1280), "no sender goes below");
        }
        assert_eq!(fit(1431, 1430, &free, over_v4), Fit::Cut);
        assert_eq!(fit(1280, 1250, &v6, over_v4), Fit::Cut);
        // An outer IPv6 packet is never fragmented.
        assert_eq!(fit(1431, 1430, &free, over_v6), Fit::Tell(1430));
        assert_eq!(fit(1280, 1250, &v6, over_v6), Fit::Lost);
    }

    #[test]
    fn a_segment_has_all_headers_and_its_share_of_the_data() {
        for (cast, network) in [(V4, 20), (V6, 40)] {
            let tcp = packet(cast.pod, cast.world, 4000, 80).tcp(0x10).headers();
            assert_eq!(wire_length(1514, 0, &tcp), 1500, "alone");
            assert_eq!(wire_length(64_000, 1448, &tcp), 1448 + network + 20, "of many");
            let udp = packet(cast.pod, cast.world, 4000, 80).headers();
            assert_eq!(wire_length(64_000, 1400, &udp), 1400 + network + 8);
            assert_eq!(wire_length(3, 0, &udp), 0, "shorter than a link header");
            let sctp = packet(cast.pod, cast.world, 4000, 80).protocol(PROTO_SCTP).headers();
            assert_eq!(wire_length(64_000, GSO_BY_FRAGS, &sctp), 0, "as the sender cut them");
        }
    }

    #[test]
    fn each_segment_has_headers_on_the_wire() {
        let headers = packet(V4.pod, V4.world, 4000, 80).tcp(tcp::ACK).headers();
        let header = 14 + headers.header_len();
        for (payload, segments) in [(1_000, 1), (1_001, 2), (64_000, 64)] {
            let bytes = wire_bytes(header + payload, 1_000, &headers);
            assert_eq!(bytes, payload + segments * header, "{payload}");
        }
        assert_eq!(wire_bytes(1_514, 0, &headers), 1_514);
        assert_eq!(wire_bytes(30_000, 0xffff, &headers), 30_000, "SCTP");
    }
}
