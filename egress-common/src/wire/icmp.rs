//! ICMP and ICMPv6: message types, and the errors that programs generate.

use super::{IPV4_LEN, IPV6_LEN, L4, PROTO_ICMP, PROTO_ICMPV6, csum, ipv4, ipv6, l4};
use crate::abi::{Addr, Family};

/// Destination unreachable / packet too big and administratively prohibited, by family.
pub mod v4 {
    pub const ECHO_REPLY: u8 = 0;
    pub const UNREACHABLE: u8 = 3;
    pub const SOURCE_QUENCH: u8 = 4;
    pub const CODE_FRAGMENTATION_NEEDED: u8 = 4;
    pub const CODE_ADMIN_PROHIBITED: u8 = 13;
    pub const ECHO_REQUEST: u8 = 8;
    pub const TIME_EXCEEDED: u8 = 11;
    pub const PARAMETER_PROBLEM: u8 = 12;
    pub const TIMESTAMP_REQUEST: u8 = 13;
    pub const TIMESTAMP_REPLY: u8 = 14;
}

/// RFC 4443.
pub mod v6 {
    pub const UNREACHABLE: u8 = 1;
    pub const CODE_ADMIN_PROHIBITED: u8 = 1;
    pub const PACKET_TOO_BIG: u8 = 2;
    pub const PARAMETER_PROBLEM: u8 = 4;
    pub const ECHO_REQUEST: u8 = 128;
    pub const ECHO_REPLY: u8 = 129;
    pub const NEIGHBOUR_SOLICITATION: u8 = 135;
    pub const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
}

/// The class of an ICMP type.
#[inline(always)]
pub const fn kind(family: Family, icmp_type: u8) -> L4 {
    match family {
        Family::V4 => match icmp_type {
            v4::ECHO_REQUEST | v4::TIMESTAMP_REQUEST => L4::EchoRequest,
            v4::ECHO_REPLY | v4::TIMESTAMP_REPLY => L4::EchoReply,
            v4::UNREACHABLE | v4::SOURCE_QUENCH | v4::TIME_EXCEEDED | v4::PARAMETER_PROBLEM => L4::IcmpError,
            _ => L4::Refused,
        },
        Family::V6 => match icmp_type {
            v6::ECHO_REQUEST => L4::EchoRequest,
            v6::ECHO_REPLY => L4::EchoReply,
            v6::UNREACHABLE..=v6::PARAMETER_PROBLEM => L4::IcmpError,
            _ => L4::Refused,
        },
    }
}

/// Why a program generates an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GeneratedError {
    /// Too large; the largest packet (bytes, from the IP header on) that fits.
    TooBig(u32),
    /// Not allowed by policy.
    Prohibited,
}

impl GeneratedError {
    /// The eight bytes of its header, checksum zero, as a big-endian number: type, code, and in the last 32 bits the MTU
    /// (RFC 792, RFC 1191, RFC 4443 section 3.2).
    #[inline(always)]
    pub const fn head(self, family: Family) -> u64 {
        let (kind, code, rest) = match (family, self) {
            // The MTU is in the low 16 bits.
            (Family::V4, Self::TooBig(mtu)) => (v4::UNREACHABLE, v4::CODE_FRAGMENTATION_NEEDED, mtu & 0xffff),
            (Family::V4, Self::Prohibited) => (v4::UNREACHABLE, v4::CODE_ADMIN_PROHIBITED, 0),
            (Family::V6, Self::TooBig(mtu)) => (v6::PACKET_TOO_BIG, 0, mtu),
            (Family::V6, Self::Prohibited) => (v6::UNREACHABLE, v6::CODE_ADMIN_PROHIBITED, 0),
        };
        (kind as u64) << 56 | (code as u64) << 48 | rest as u64
    }
}

/// Length of an ICMP header.
pub const LEN: usize = 8;
/// Bytes before the quote.
pub const ERROR_HEADER_V4: usize = IPV4_LEN + LEN;
/// Bytes before the quote.
pub const ERROR_HEADER_V6: usize = IPV6_LEN + LEN;

/// Writes the network and ICMP headers of an error, [`ERROR_HEADER_V4`] or [`ERROR_HEADER_V6`] bytes, before a quote of
/// `quoted` bytes whose words sum up to `quote_sum`.
#[inline(always)]
pub fn write_error<const N: usize>(
    family: Family,
    head: u64,
    from: &Addr,
    to: &Addr,
    quoted: u16,
    quote_sum: u64,
    out: &mut [u8; N],
) {
    const { assert!(N >= ERROR_HEADER_V6) };
    let at = match family {
        Family::V4 => write_ipv4(from, to, quoted, out),
        Family::V6 => write_ipv6(from, to, quoted, out),
    };
    let pseudo = match family {
        Family::V4 => 0,
        Family::V6 => {
            let length = quoted + LEN as u16;
            sum(out, ipv6::SADDR, IPV6_LEN) + length.to_be() as u64 + (PROTO_ICMPV6 as u16).to_be() as u64
        }
    };
    let head = head.to_be_bytes();
    let mut i = 0;
    while i < LEN {
        out[at + i] = head[i];
        i += 1;
    }
    let checksum = (!csum::fold64(pseudo + csum::sum(&head) + quote_sum)).to_ne_bytes();
    out[at + l4::ICMP_CHECKSUM] = checksum[0];
    out[at + l4::ICMP_CHECKSUM + 1] = checksum[1];
}

// Out of line, to keep the caller's stack frame small.

#[inline(never)]
fn write_ipv4<const N: usize>(from: &Addr, to: &Addr, quoted: u16, out: &mut [u8; N]) -> usize {
    let [a, b] = (quoted + ERROR_HEADER_V4 as u16).to_be_bytes();
    let (s, d) = (from.v4_octets(), to.v4_octets());
    // Internetwork control, as RFC 1812 section 4.3.2.5 asks.
    let ip = [0x45, 0xc0, a, b, 0, 0, 0, 0, 64, PROTO_ICMP, 0, 0, s[0], s[1], s[2], s[3], d[0], d[1], d[2], d[3]];
    let mut i = 0;
    while i < IPV4_LEN {
        out[i] = ip[i];
        i += 1;
    }
    let checksum = (!csum::fold64(csum::sum(&ip))).to_ne_bytes();
    out[ipv4::CHECKSUM] = checksum[0];
    out[ipv4::CHECKSUM + 1] = checksum[1];
    IPV4_LEN
}

#[inline(never)]
fn write_ipv6<const N: usize>(from: &Addr, to: &Addr, quoted: u16, out: &mut [u8; N]) -> usize {
    let [a, b] = (quoted + LEN as u16).to_be_bytes();
    let first = [0x60, 0, 0, 0, a, b, PROTO_ICMPV6, 64];
    let (s, d) = (from.octets(), to.octets());
    let mut i = 0;
    while i < ipv6::SADDR {
        out[i] = first[i];
        i += 1;
    }
    let mut i = 0;
    while i < 16 {
        out[ipv6::SADDR + i] = s[i];
        out[ipv6::DADDR + i] = d[i];
        i += 1;
    }
    IPV6_LEN
}

/// Sum of the words of `out[from..to]`.
#[inline(never)]
fn sum<const N: usize>(out: &[u8; N], from: usize, to: usize) -> u64 {
    let mut total = 0u64;
    let mut i = from;
    while i < to {
        total += u16::from_ne_bytes([out[i], out[i + 1]]) as u64;
        i += 2;
    }
    total
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;

    fn addr(text: &str) -> Addr {
        Addr::from(text.parse::<IpAddr>().expect("an address"))
    }

    #[test]
    fn errors_have_valid_checksums() {
        let quote: std::vec::Vec<u8> = (0..40u8).collect();
        let mut out = [0u8; 86];
        let head = GeneratedError::TooBig(1400).head(Family::V4);
        let (from, to) = (addr("172.18.0.100"), addr("198.51.100.10"));
        write_error(Family::V4, head, &from, &to, 40, csum::sum(&quote), &mut out);
        assert_eq!(csum::fold64(csum::sum(&out[..20])), 0xffff);
        assert_eq!(csum::fold64(csum::sum(&out[20..28]) + csum::sum(&quote)), 0xffff);
        assert_eq!(out[20..22], [3, 4]);
        assert_eq!(u16::from_be_bytes([out[26], out[27]]), 1400);

        let head = GeneratedError::TooBig(1400).head(Family::V6);
        let (from, to) = (addr("fd00::100"), addr("2001:db8::10"));
        write_error(Family::V6, head, &from, &to, 40, csum::sum(&quote), &mut out);
        let pseudo = csum::sum(&out[8..40]) + 48u16.to_be() as u64 + 58u16.to_be() as u64;
        assert_eq!(csum::fold64(pseudo + csum::sum(&out[40..48]) + csum::sum(&quote)), 0xffff);
        assert_eq!(out[44..48], 1400u32.to_be_bytes());
    }
}
