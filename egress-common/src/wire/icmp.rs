//! ICMP and ICMPv6: kinds, and the answers that a program gives itself.

use super::L4;
use crate::abi::Family;

/// Destination unreachable / packet too big and administratively prohibited, by family.
pub mod v4 {
    pub const ECHO_REPLY: u8 = 0;
    pub const UNREACHABLE: u8 = 3;
    pub const CODE_FRAGMENTATION_NEEDED: u8 = 4;
    pub const CODE_ADMIN_PROHIBITED: u8 = 13;
    pub const ECHO_REQUEST: u8 = 8;
    pub const TIME_EXCEEDED: u8 = 11;
    pub const PARAMETER_PROBLEM: u8 = 12;
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

/// What an ICMP type means to a decision.
#[inline(always)]
pub const fn kind(family: Family, icmp_type: u8) -> L4 {
    match family {
        Family::V4 => match icmp_type {
            v4::ECHO_REQUEST => L4::EchoRequest,
            v4::ECHO_REPLY => L4::EchoReply,
            v4::UNREACHABLE | v4::TIME_EXCEEDED | v4::PARAMETER_PROBLEM => L4::IcmpError,
            _ => L4::Other,
        },
        Family::V6 => match icmp_type {
            v6::ECHO_REQUEST => L4::EchoRequest,
            v6::ECHO_REPLY => L4::EchoReply,
            v6::UNREACHABLE..=v6::PARAMETER_PROBLEM => L4::IcmpError,
            _ => L4::Other,
        },
    }
}

/// Why a program answers by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Too large; the largest packet (bytes, from the IP header on) that fits.
    TooBig(u32),
    /// Not allowed by policy.
    Prohibited,
}

impl Answer {
    /// Type, code and the 32 bits behind the checksum (RFC 792, RFC 1191, RFC 4443 section 3.2).
    #[inline(always)]
    pub const fn head(self, family: Family) -> (u8, u8, u32) {
        match (family, self) {
            // The MTU stands in the low 16 bits.
            (Family::V4, Self::TooBig(mtu)) => (v4::UNREACHABLE, v4::CODE_FRAGMENTATION_NEEDED, mtu & 0xffff),
            (Family::V4, Self::Prohibited) => (v4::UNREACHABLE, v4::CODE_ADMIN_PROHIBITED, 0),
            (Family::V6, Self::TooBig(mtu)) => (v6::PACKET_TOO_BIG, 0, mtu),
            (Family::V6, Self::Prohibited) => (v6::UNREACHABLE, v6::CODE_ADMIN_PROHIBITED, 0),
        }
    }
}
