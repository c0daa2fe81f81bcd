//! Generated TCP resets (RFC 9293 section 3.10.7.1): the header that answers a segment of a closed connection.

use super::{Fragment, Headers, L4, PROTO_TCP, csum, l4, tcp};
use crate::abi::{Family, Tuple};

/// A TCP header without options.
pub const LEN: usize = 20;

/// Whether a reset may answer the packet: not a reset, and not a fragment.
#[inline(always)]
#[must_use]
pub fn answers(headers: &Headers) -> bool {
    headers.l4 == L4::Tcp
        && headers.tcp_flags & tcp::RST == 0
        && headers.fragment == Fragment::Whole
        && !headers.source_routed
}

/// The fields of the answered segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnsweredSegment {
    pub sequence: u32,
    pub acknowledged: u32,
    pub flags: u8,
    /// Bytes of data.
    pub data: u32,
}

impl AnsweredSegment {
    /// Sequence number, acknowledgement and flags of the reset. The other end accepts only the exact next sequence
    /// number (RFC 5961 section 3.2).
    #[inline(always)]
    pub const fn answer(&self) -> (u32, u32, u8) {
        if self.flags & tcp::ACK != 0 {
            return (self.acknowledged, 0, tcp::RST);
        }
        // SYN and FIN count as a byte each.
        let ends = (self.flags & tcp::SYN != 0) as u32 + (self.flags & tcp::FIN != 0) as u32;
        (0, self.sequence.wrapping_add(self.data).wrapping_add(ends), tcp::RST | tcp::ACK)
    }
}

/// Writes the header of a reset to the sender of a segment with this tuple. `partial`: a device completes the checksum.
#[inline(always)]
pub fn write(family: Family, tuple: &Tuple, segment: &AnsweredSegment, partial: bool, out: &mut [u8; LEN]) {
    let (sequence, acknowledged, flags) = segment.answer();
    let (s, a) = (sequence.to_be_bytes(), acknowledged.to_be_bytes());
    let (from, to) = (tuple.dport().to_be_bytes(), tuple.sport().to_be_bytes());
    *out =
        [from[0], from[1], to[0], to[1], s[0], s[1], s[2], s[3], a[0], a[1], a[2], a[3], 0x50, flags, 0, 0, 0, 0, 0, 0];
    let pseudo = pseudo_header(family, tuple);
    // A partial checksum begins with the sum of the pseudo header.
    let sum = if partial { csum::fold64(pseudo) } else { !csum::fold64(pseudo + csum::sum(out)) };
    let sum = sum.to_ne_bytes();
    out[l4::TCP_CHECKSUM] = sum[0];
    out[l4::TCP_CHECKSUM + 1] = sum[1];
}

/// Its sum, independent of the order of the addresses.
#[inline(always)]
fn pseudo_header(family: Family, tuple: &Tuple) -> u64 {
    let (s, d) = (tuple.saddr.words(), tuple.daddr.words());
    let mut sum = s[3] as u64 + d[3] as u64;
    // The other words of a v4-mapped address are not in the packet.
    if let Family::V6 = family {
        sum += s[0] as u64 + s[1] as u64 + s[2] as u64 + d[0] as u64 + d[1] as u64 + d[2] as u64;
    }
    sum + (PROTO_TCP as u16).to_be() as u64 + (LEN as u16).to_be() as u64
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;
    use crate::abi::Direction;
    use crate::decide::cast::{V4, V6};
    use crate::decide::memory_maps::addr;

    fn segment(flags: u8, data: u32) -> AnsweredSegment {
        AnsweredSegment { sequence: 0xffff_fffe, acknowledged: 77, flags, data }
    }

    #[test]
    fn a_reset_continues_where_the_segment_left_off() {
        for flags in [tcp::ACK, tcp::ACK | tcp::FIN, tcp::ACK | tcp::SYN] {
            assert_eq!(segment(flags, 1000).answer(), (77, 0, tcp::RST));
        }
        let bare = tcp::RST | tcp::ACK;
        assert_eq!(segment(0, 1000).answer(), (0, 998, bare), "the number wraps");
        assert_eq!(segment(tcp::FIN, 1000).answer(), (0, 999, bare));
        assert_eq!(segment(tcp::SYN, 0).answer(), (0, 0xffff_ffff, bare));
        assert_eq!(segment(tcp::SYN | tcp::FIN, 1).answer(), (0, 1, bare));
    }

    #[test]
    fn a_reset_is_a_header_with_a_valid_checksum() {
        for cast in [V4, V6] {
            let (pod, world) = (addr(cast.pod), addr(cast.world));
            let tuple = Tuple::new(Direction::Egress, pod, world, 4000, 80, PROTO_TCP);
            let mut out = [0xff; LEN];
            write(cast.family, &tuple, &segment(tcp::ACK, 5), false, &mut out);
            let octets = |address: &crate::abi::Addr| match cast.family {
                Family::V4 => address.v4_octets().to_vec(),
                Family::V6 => address.octets().to_vec(),
            };
            let mut covered: Vec<u8> = [octets(&world), octets(&pod)].concat();
            covered.extend([0, PROTO_TCP, 0, 20]);
            let pseudo = csum::fold64(csum::sum(&covered));
            covered.extend(out);
            assert_eq!(csum::fold64(csum::sum(&covered)), 0xffff);
            assert_eq!(out[..16], [0, 80, 0x0f, 0xa0, 0, 0, 0, 77, 0, 0, 0, 0, 0x50, tcp::RST, 0, 0]);
            write(cast.family, &tuple, &segment(tcp::ACK, 5), true, &mut out);
            assert_eq!(out[16..], [pseudo.to_ne_bytes(), [0, 0]].concat(), "left to a device");
        }
    }
}
