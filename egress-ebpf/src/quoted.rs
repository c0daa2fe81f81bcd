//! Giving an ICMP error another end, and the packet that it quotes.
#![expect(unsafe_code, reason = "helper calls on the packet's context")]

use aya_ebpf::helpers::generated::bpf_l4_csum_replace;
use egress_common::abi::{Family, Verdict};
use egress_common::decide::{End, Rewrite};
use egress_common::wire::{
    Frame, Headers, L3, L4, PROTO_ICMP, PROTO_ICMPV6, PROTO_TCP, PROTO_UDP, Quote, csum, ipv4, ipv6, l4,
};

use crate::packet::Packet;
use crate::rewrite::{change_of, replace_checksum};
use crate::sctp;

impl Packet {
    /// Gives an ICMP error another end, and the packet that it quotes, which went the other way, its opposite end. The
    /// quoted checksums follow where the quote is long enough to have them.
    #[inline(never)]
    pub fn rewrite_error(self, heads: &Headers, quote: &Quote, rewrite: &Rewrite) -> Result<(), Verdict> {
        self.try_rewrite_error(heads, quote, rewrite).ok_or(Verdict::RewriteFailed)
    }

    #[inline(always)]
    fn try_rewrite_error(&self, heads: &Headers, quote: &Quote, rewrite: &Rewrite) -> Option<()> {
        let old = match rewrite.end {
            End::Source => heads.tuple.saddr,
            End::Destination => heads.tuple.daddr,
        };
        let (outer_at, inner_at) = match (heads.family, rewrite.end) {
            (Family::V4, End::Source) => (ipv4::SADDR, ipv4::DADDR),
            (Family::V4, End::Destination) => (ipv4::DADDR, ipv4::SADDR),
            (Family::V6, End::Source) => (ipv6::SADDR, ipv6::DADDR),
            (Family::V6, End::Destination) => (ipv6::DADDR, ipv6::SADDR),
        };
        let addresses = change_of(&old, &rewrite.addr);
        // A quoted IPv4 address and the checksum of its header, which follows it, cancel out in the error's checksum.
        let mut change = if heads.family == Family::V6 { addresses } else { 0 };
        let transport = match quote.l4() {
            L4::Sctp => sctp::replace_quoted_port(*self, quote, rewrite.end, rewrite.port),
            _ => rewrite_quoted_transport(*self, quote, rewrite, addresses),
        };
        if transport == NOT_WRITTEN {
            return None;
        }
        change += transport;
        if change != 0 {
            let sum_at = u32::from(heads.l4_offset) + l4::ICMP_CHECKSUM as u32;
            // SAFETY: the context is the program's own.
            if unsafe { bpf_l4_csum_replace(self.skb(), sum_at, 0, csum::fold64(change).into(), 0) } != 0 {
                return None;
            }
        }
        let at = quote.network_at();
        match heads.family {
            Family::V4 => {
                self.replace_addr_v4_at(at, inner_at, &old, &rewrite.addr)?;
                self.replace_addr_v4_at(L3, outer_at, &old, &rewrite.addr)
            }
            Family::V6 => {
                // The pseudo header.
                replace_checksum(*self, heads, &old, &rewrite.addr)?;
                self.store(at + inner_at, rewrite.addr.octets())?;
                self.store(L3 + outer_at, rewrite.addr.octets())
            }
        }
    }
}

/// What cannot be the change of a sum: the packet could not be written to.
pub const NOT_WRITTEN: u64 = u64::MAX;

/// The quoted packet's port, or identifier, and its checksum; returns what that changes in the sum over the quote, or
/// [`NOT_WRITTEN`]. Out of line as all steps that would crowd the caller's frame.
#[inline(never)]
fn rewrite_quoted_transport(packet: Packet, quote: &Quote, rewrite: &Rewrite, addresses: u64) -> u64 {
    try_rewrite_quoted_transport(packet, quote, rewrite, addresses).unwrap_or(NOT_WRITTEN)
}

#[inline(always)]
fn try_rewrite_quoted_transport(packet: Packet, quote: &Quote, rewrite: &Rewrite, addresses: u64) -> Option<u64> {
    let (at, tuple) = (quote.transport_at(), quote.tuple());
    if quote.l4() == L4::Other {
        return Some(0);
    }
    let is_query = matches!(tuple.protocol, PROTO_ICMP | PROTO_ICMPV6);
    let (old_port, port_at) = match rewrite.end {
        _ if is_query => (tuple.sport(), l4::ECHO_ID),
        End::Source => (tuple.dport(), l4::DPORT),
        End::Destination => (tuple.sport(), l4::SPORT),
    };
    let port = csum::change_u16(old_port.to_be(), rewrite.port.to_be());
    let mut change = 0;
    if old_port != rewrite.port {
        change = port;
        packet.store(at + port_at, rewrite.port.to_be_bytes())?;
    }
    let (sum_at, covered) = match tuple.protocol {
        // Only with the end of its header.
        PROTO_TCP if packet.load::<4>(at + l4::TCP_CHECKSUM).is_some() => (l4::TCP_CHECKSUM, addresses + port),
        PROTO_UDP => (l4::UDP_CHECKSUM, addresses + port),
        PROTO_ICMPV6 => (l4::ICMP_CHECKSUM, addresses + port),
        PROTO_ICMP => (l4::ICMP_CHECKSUM, port),
        _ => return Some(change),
    };
    let Some(bytes) = packet.load(at + sum_at) else { return Some(change) };
    let old = u16::from_ne_bytes(bytes);
    let new = match csum::replace(old, covered) {
        // Zero would mean "none", which stays as it is.
        _ if tuple.protocol == PROTO_UDP && old == 0 => 0,
        0 if tuple.protocol == PROTO_UDP => 0xffff,
        new => new,
    };
    packet.store(at + sum_at, new.to_ne_bytes())?;
    Some(change + csum::change_u16(old, new))
}
