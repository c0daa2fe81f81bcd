//! SNAT and its reverse in the bytes of a packet: address, port, checksums, TTL.
//!
//! Transport checksums go through the helpers, which know partial and complete checksums and GSO. The IPv4 header
//! checksum and SCTP's CRC32c are written here. A complete checksum (`CHECKSUM_COMPLETE`) is a device's sum over all
//! bytes after the Ethernet header, so each change that no other field of the packet compensates is added to it
//! ([`Packet::update_complete_sum`]).
//!
//! An ICMP error is rewritten together with its quoted packet. For cached flows all deltas are computed once
//! ([`CachedRewrite`]).
#![expect(unsafe_code, reason = "map and packet access; see `maps` and `packet`")]

use aya_ebpf::bindings::{BPF_F_MARK_MANGLED_0, BPF_F_PSEUDO_HDR};
use aya_ebpf::helpers::generated::{bpf_csum_update, bpf_l4_csum_replace};
use egress_common::abi::{Addr, Family, NatEntry, Verdict};
use egress_common::decide::{End, Rewrite};
use egress_common::wire::{
    Frame, Headers, IPV4_LEN, IPV6_LEN, L3, L4, PROTO_ICMP, PROTO_ICMPV6, PROTO_TCP, PROTO_UDP, Quote, crc32c, csum,
    ipv4, ipv6, l4,
};

use crate::packet::{OFFSET_MASK, Packet};
use crate::workspace::Run;

/// Rewrites one end of the packet, and of the quoted packet of an ICMP error.
#[inline(always)]
pub fn rewrite(run: &Run<'_>, quote: &Quote, rewrite: &Rewrite) -> Result<(), Verdict> {
    match run.headers.l4 {
        L4::IcmpError => run.packet.rewrite_error(run.headers, quote, rewrite),
        _ => run.packet.rewrite(run.headers, rewrite),
    }
}

/// Restores the pod's address in a reply, or in an ICMP error about the flow.
#[inline(always)]
pub fn restore(run: &Run<'_>, quote: &Quote, nat_entry: &NatEntry) -> Result<(), Verdict> {
    rewrite(run, quote, &Rewrite::reverse(nat_entry))
}

impl Packet {
    /// Rewrites one end of the packet. A failure may leave it partly written: the caller drops it.
    #[inline(never)]
    pub fn rewrite(self, headers: &Headers, rewrite: &Rewrite) -> Result<(), Verdict> {
        rewrite.check(headers)?;
        self.try_rewrite(headers, rewrite).ok_or(Verdict::RewriteFailed)
    }

    #[inline(always)]
    fn try_rewrite(&self, headers: &Headers, rewrite: &Rewrite) -> Option<()> {
        let old = match rewrite.end {
            End::Source => headers.tuple.saddr,
            End::Destination => headers.tuple.daddr,
        };
        let old_port = rewrite.old_port(headers);
        replace_checksum(*self, headers, &old, &rewrite.addr)?;
        if headers.has_l4() && old_port != rewrite.port {
            match headers.l4 {
                L4::Sctp => replace_port(*self, headers, rewrite.end, rewrite.port)?,
                _ => self.replace_port(headers, rewrite.end, old_port, rewrite.port)?,
            }
        }
        match headers.family {
            Family::V4 => self.replace_addr_v4(rewrite.end, &old, &rewrite.addr),
            Family::V6 => {
                let at = if rewrite.end == End::Source { ipv6::SADDR } else { ipv6::DADDR };
                self.store(L3 + at, rewrite.addr.octets())
            }
        }
    }

    /// Ports, or the identifier of an echo message.
    #[inline(always)]
    fn replace_port(&self, headers: &Headers, end: End, old: u16, new: u16) -> Option<()> {
        let (sum_at, flags, port_at) = match (headers.tuple.protocol, end) {
            (PROTO_TCP, End::Source) => (l4::TCP_CHECKSUM, 0, l4::SPORT),
            (PROTO_TCP, End::Destination) => (l4::TCP_CHECKSUM, 0, l4::DPORT),
            (PROTO_UDP, End::Source) => (l4::UDP_CHECKSUM, u64::from(BPF_F_MARK_MANGLED_0), l4::SPORT),
            (PROTO_UDP, End::Destination) => (l4::UDP_CHECKSUM, u64::from(BPF_F_MARK_MANGLED_0), l4::DPORT),
            (PROTO_ICMP | PROTO_ICMPV6, _) => (l4::ICMP_CHECKSUM, 0, l4::ECHO_ID),
            _ => return None,
        };
        self.replace_summed_port(usize::from(headers.l4_offset) & OFFSET_MASK, sum_at, port_at, flags, old, new)
    }

    /// Rewrites a port or identifier of the transport header at `offset`, and the checksum that covers it.
    #[inline(always)]
    pub fn replace_summed_port(
        &self,
        offset: usize,
        sum_at: usize,
        port_at: usize,
        flags: u64,
        old: u16,
        new: u16,
    ) -> Option<()> {
        let (from, to) = (old.to_be(), new.to_be());
        if flags != 0 && self.is_zero(offset + sum_at) {
            // The packet has no checksum that would compensate the port.
            self.update_complete_sum(csum::change_u32(from.into(), to.into()));
        }
        let at = (offset + sum_at) as u32;
        // SAFETY: the context is the program's own.
        if unsafe { bpf_l4_csum_replace(self.skb(), at, from.into(), to.into(), flags | 2) } != 0 {
            return None;
        }
        self.store(offset + port_at, new.to_be_bytes())
    }

    /// Whether two bytes are zero. Out of line: with this read between the helper call and the write of the port, Linux
    /// 6.1 (Debian 6.1.0-56) wrote the port into the other port's field. The same object works on 6.18; the cause is
    /// unknown.
    #[inline(never)]
    fn is_zero(self, at: usize) -> bool {
        self.load(at & OFFSET_MASK) == Some([0; 2])
    }

    /// Adds a change of the covered bytes to a complete checksum. No effect on packets without one.
    #[inline(always)]
    pub fn update_complete_sum(&self, change: u64) {
        // SAFETY: the context is the program's own.
        let _not_complete = unsafe { bpf_csum_update(self.skb(), csum::fold64(change).into()) };
    }

    #[inline(always)]
    fn replace_addr_v4(&self, end: End, old: &Addr, new: &Addr) -> Option<()> {
        let at = if end == End::Source { ipv4::SADDR } else { ipv4::DADDR };
        self.replace_addr_v4_at(L3, at, old, new)
    }

    /// Rewrites an address and the checksum of the IPv4 header that starts at `header`.
    #[inline(always)]
    pub fn replace_addr_v4_at(&self, header: usize, at: usize, old: &Addr, new: &Addr) -> Option<()> {
        let sum = u16::from_ne_bytes(self.load(header + ipv4::CHECKSUM)?);
        let sum = csum::replace_u32(sum, old.words()[3], new.words()[3]);
        self.store(header + ipv4::CHECKSUM, sum.to_ne_bytes())?;
        self.store(header + at, new.v4_octets())
    }

    /// Decrements the TTL. The caller has checked that it is greater than one.
    #[inline(never)]
    pub fn decrement_ttl(self, headers: &Headers) -> Result<(), Verdict> {
        self.try_decrement(headers).ok_or(Verdict::RewriteFailed)
    }

    #[inline(always)]
    fn try_decrement(&self, headers: &Headers) -> Option<()> {
        match headers.family {
            Family::V4 => {
                let [ttl, protocol] = self.load(L3 + ipv4::TTL)?;
                let (from, to) = ([ttl, protocol], [ttl.wrapping_sub(1), protocol]);
                let sum = u16::from_ne_bytes(self.load(L3 + ipv4::CHECKSUM)?);
                let sum = csum::replace_u16(sum, u16::from_ne_bytes(from), u16::from_ne_bytes(to));
                self.store(L3 + ipv4::CHECKSUM, sum.to_ne_bytes())?;
                self.store(L3 + ipv4::TTL, [to[0]])
            }
            Family::V6 => {
                self.store(L3 + ipv6::HOP_LIMIT, [headers.ttl.wrapping_sub(1)])?;
                self.update_complete_sum(ONE_HOP_LESS);
                Some(())
            }
        }
    }
}

/// Change of the sum over an IPv6 header when its hop limit, the upper byte of a word, is decremented.
pub const ONE_HOP_LESS: u64 = !u16::from_ne_bytes([0, 1]) as u64;

/// Updates the transport checksum, and a complete one, after a change of an address.
///
/// The helper relies on the IPv4 header checksum to compensate the address, and adds the change of the transport
/// checksum to a complete checksum. IPv6 has no header checksum, so the address is added here. The flag `BPF_F_IPV6`
/// (Linux 6.16) is not needed; nor would it suffice for packets without a transport checksum, or with it in another
/// fragment.
#[inline(never)]
pub fn replace_checksum(packet: Packet, headers: &Headers, old: &Addr, new: &Addr) -> Option<()> {
    let sum = match headers.tuple.protocol {
        // Without a known checksum in this family, or not in this fragment.
        _ if headers.l4 == L4::Other || !headers.has_l4() => None,
        PROTO_TCP => Some((l4::TCP_CHECKSUM, 0)),
        // Zero means "none" and stays zero; a result of zero is written as all ones (RFC 768).
        PROTO_UDP => Some((l4::UDP_CHECKSUM, u64::from(BPF_F_MARK_MANGLED_0))),
        PROTO_ICMPV6 => Some((l4::ICMP_CHECKSUM, 0)),
        // ICMP has no pseudo header, SCTP neither.
        _ => None,
    };
    let change = match headers.family {
        Family::V4 => csum::change_u32(old.words()[3], new.words()[3]),
        Family::V6 => change_of(old, new),
    };
    let change = csum::fold64(change);
    if let Some((at, flags)) = sum {
        let (at, flags) = (u32::from(headers.l4_offset) + at as u32, flags | u64::from(BPF_F_PSEUDO_HDR));
        // SAFETY: the context is the program's own.
        if unsafe { bpf_l4_csum_replace(packet.skb(), at, 0, change.into(), flags) } != 0 {
            return None;
        }
    }
    if headers.family == Family::V6 {
        packet.update_complete_sum(change.into());
    }
    Some(())
}

/// Change of a sum when an address is replaced. For IPv4 the upper words are equal.
#[inline(always)]
pub fn change_of(old: &Addr, new: &Addr) -> u64 {
    let (old, new) = (old.words(), new.words());
    csum::change_u32(old[0], new[0])
        + csum::change_u32(old[1], new[1])
        + csum::change_u32(old[2], new[2])
        + csum::change_u32(old[3], new[3])
}

impl Packet {
    /// Rewrites one end of an ICMP error, and the opposite end of the quoted packet, which has the opposite direction.
    /// Quoted checksums are updated if the quote contains them.
    #[inline(never)]
    pub fn rewrite_error(self, headers: &Headers, quote: &Quote, rewrite: &Rewrite) -> Result<(), Verdict> {
        self.try_rewrite_error(headers, quote, rewrite).ok_or(Verdict::RewriteFailed)
    }

    #[inline(always)]
    fn try_rewrite_error(&self, headers: &Headers, quote: &Quote, rewrite: &Rewrite) -> Option<()> {
        let old = match rewrite.end {
            End::Source => headers.tuple.saddr,
            End::Destination => headers.tuple.daddr,
        };
        let (outer_at, inner_at) = match (headers.family, rewrite.end) {
            (Family::V4, End::Source) => (ipv4::SADDR, ipv4::DADDR),
            (Family::V4, End::Destination) => (ipv4::DADDR, ipv4::SADDR),
            (Family::V6, End::Source) => (ipv6::SADDR, ipv6::DADDR),
            (Family::V6, End::Destination) => (ipv6::DADDR, ipv6::SADDR),
        };
        let addresses = change_of(&old, &rewrite.addr);
        // A quoted IPv4 address and the checksum of its header, which follows it, cancel out in the error's checksum.
        let mut change = if headers.family == Family::V6 { addresses } else { 0 };
        let transport = match quote.l4() {
            L4::Sctp => replace_quoted_port(*self, quote, rewrite.end, rewrite.port),
            _ => rewrite_quoted_transport(*self, quote, rewrite, addresses),
        };
        if transport == NOT_WRITTEN {
            return None;
        }
        change += transport;
        if change != 0 {
            let sum_at = u32::from(headers.l4_offset) + l4::ICMP_CHECKSUM as u32;
            // SAFETY: the context is the program's own.
            if unsafe { bpf_l4_csum_replace(self.skb(), sum_at, 0, csum::fold64(change).into(), 0) } != 0 {
                return None;
            }
        }
        let at = quote.network_at();
        match headers.family {
            Family::V4 => {
                self.replace_addr_v4_at(at, inner_at, &old, &rewrite.addr)?;
                self.replace_addr_v4_at(L3, outer_at, &old, &rewrite.addr)
            }
            Family::V6 => {
                // The pseudo header.
                replace_checksum(*self, headers, &old, &rewrite.addr)?;
                self.store(at + inner_at, rewrite.addr.octets())?;
                self.store(L3 + outer_at, rewrite.addr.octets())
            }
        }
    }
}

/// Reserved value: the write to the packet failed.
pub const NOT_WRITTEN: u64 = u64::MAX;

/// Rewrites the quoted packet's port or identifier, and its checksum. Returns the change of the sum over the quote, or
/// [`NOT_WRITTEN`]. Out of line, to keep the caller's frame small.
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
        // Only if the quote contains the end of its header.
        PROTO_TCP if packet.load::<4>(at + l4::TCP_CHECKSUM).is_some() => (l4::TCP_CHECKSUM, addresses + port),
        PROTO_UDP => (l4::UDP_CHECKSUM, addresses + port),
        PROTO_ICMPV6 => (l4::ICMP_CHECKSUM, addresses + port),
        PROTO_ICMP => (l4::ICMP_CHECKSUM, port),
        _ => return Some(change),
    };
    let Some(bytes) = packet.load(at + sum_at) else { return Some(change) };
    let old = u16::from_ne_bytes(bytes);
    let new = match csum::replace(old, covered) {
        // Zero means "no checksum" and stays zero.
        _ if tuple.protocol == PROTO_UDP && old == 0 => 0,
        0 if tuple.protocol == PROTO_UDP => 0xffff,
        new => new,
    };
    packet.store(at + sum_at, new.to_ne_bytes())?;
    Some(change + csum::change_u16(old, new))
}

/// Writes a port and the checksum of SCTP. By the helper, because they do not cancel out in a complete checksum.
#[inline(never)]
pub fn replace_port(packet: Packet, headers: &Headers, end: End, port: u16) -> Option<()> {
    let at = usize::from(headers.l4_offset) & OFFSET_MASK;
    let old = packet.load(at)?;
    let new = with_port(old, end, port);
    let sum = replaced(packet.load(at + l4::SCTP_CHECKSUM)?, old, new, headers.message_length(&packet, L3)?);
    packet.store_summed(at + l4::SCTP_CHECKSUM, &sum)?;
    packet.store_summed(at, &new)
}

/// The same for the quoted packet of an ICMP error, at the end opposite to `end`. A checksum outside the quote, or of a
/// fragment, stays. Returns the change of the sum over the quote, or [`NOT_WRITTEN`].
#[inline(never)]
pub fn replace_quoted_port(packet: Packet, quote: &Quote, end: End, port: u16) -> u64 {
    try_replace_quoted_port(packet, quote, end, port).unwrap_or(NOT_WRITTEN)
}

#[inline(always)]
fn try_replace_quoted_port(packet: Packet, quote: &Quote, end: End, port: u16) -> Option<u64> {
    let at = quote.transport_at();
    let old: [u8; 4] = packet.load(at)?;
    let new = match end {
        End::Source => with_port(old, End::Destination, port),
        End::Destination => with_port(old, End::Source, port),
    };
    if old == new {
        return Some(0);
    }
    packet.store(at, new)?;
    let change = csum::change_u32(u32::from_ne_bytes(old), u32::from_ne_bytes(new));
    let Some(length) = quote.message_length(&packet) else { return Some(change) };
    let Some(field) = packet.load(at + l4::SCTP_CHECKSUM) else { return Some(change) };
    let sum = replaced(field, old, new, length);
    packet.store(at + l4::SCTP_CHECKSUM, sum)?;
    Some(change + csum::change_u32(u32::from_ne_bytes(field), u32::from_ne_bytes(sum)))
}

/// The checksum field after a change of the ports.
#[inline(always)]
fn replaced(field: [u8; 4], old: [u8; 4], new: [u8; 4], length: u32) -> [u8; 4] {
    let difference = u32::from_le_bytes(old) ^ u32::from_le_bytes(new);
    sctp_checksum(u32::from_le_bytes(field), difference, length).to_le_bytes()
}

/// A global function, which the verifier checks once per program. As a static function, its nine hundred steps would be
/// checked for each of a thousand paths.
// SAFETY: no other function of the object has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn sctp_checksum(field: u32, difference: u32, length: u32) -> u32 {
    crc32c::replace(field, difference, length)
}

/// Both ports, with one of them replaced.
#[inline(always)]
fn with_port([a, b, c, d]: [u8; 4], end: End, port: u16) -> [u8; 4] {
    let [high, low] = port.to_be_bytes();
    match end {
        End::Source => [high, low, c, d],
        End::Destination => [a, b, high, low],
    }
}

/// Decrements the TTL in its word of an IPv4 header.
const HOP: u16 = u16::from_ne_bytes([1, 0]);

/// The rewrite of a cached flow.
#[repr(C)]
pub struct CachedRewrite {
    address: Addr,
    /// Change of a sum over the address.
    gain: u32,
    /// Change of the sum of an IPv4 header: the address, and the TTL if it is decremented here.
    header_gain: u16,
    port: u16,
}

/// Link addresses of the next hop, receiver first.
pub type Macs = [u8; 12];

impl CachedRewrite {
    /// For packets with these headers. `counts_hop` if this node decrements the TTL. Out of line for its frame.
    #[inline(never)]
    pub fn set(&mut self, headers: &Headers, rewrite: &Rewrite, counts_hop: bool) {
        let old = match rewrite.end {
            End::Source => headers.tuple.saddr,
            End::Destination => headers.tuple.daddr,
        };
        // The prefix words of v4-mapped addresses cancel out (modulo 2^16 - 1).
        let gain = csum::fold64(change_of(&old, &rewrite.addr));
        let hop = if counts_hop { !HOP } else { 0 };
        self.header_gain = csum::fold(u32::from(gain) + u32::from(hop));
        self.gain = gain.into();
        self.address = rewrite.addr;
        self.port = rewrite.port;
    }

    /// Rewrites one end of a whole TCP or UDP packet of the flow, and the link addresses if it leaves by a link. A
    /// failure may leave it partly written: the caller drops it.
    #[inline(always)]
    pub fn put(
        &self,
        packet: Packet,
        headers: &Headers,
        end: End,
        counts_hop: bool,
        macs: Option<&Macs>,
    ) -> Result<(), Verdict> {
        self.try_put(packet, headers, end, counts_hop, macs).ok_or(Verdict::RewriteFailed)
    }

    #[inline(always)]
    fn try_put(
        &self,
        packet: Packet,
        headers: &Headers,
        end: End,
        counts_hop: bool,
        macs: Option<&Macs>,
    ) -> Option<()> {
        self.put_transport(packet, headers, end)?;
        match headers.family {
            Family::V4 => {
                let head = packet.window::<{ L3 + IPV4_LEN }>()?;
                if let Some(macs) = macs {
                    head[..12].copy_from_slice(macs);
                }
                let at = L3 + if end == End::Source { ipv4::SADDR } else { ipv4::DADDR };
                head[at..at + 4].copy_from_slice(&self.address.v4_octets());
                head[L3 + ipv4::TTL] -= counts_hop as u8;
                let sum = u16::from_ne_bytes([head[L3 + ipv4::CHECKSUM], head[L3 + ipv4::CHECKSUM + 1]]);
                let sum = csum::replace(sum, self.header_gain.into()).to_ne_bytes();
                head[L3 + ipv4::CHECKSUM..L3 + ipv4::CHECKSUM + 2].copy_from_slice(&sum);
            }
            Family::V6 => {
                let head = packet.window::<{ L3 + IPV6_LEN }>()?;
                if let Some(macs) = macs {
                    head[..12].copy_from_slice(macs);
                }
                let at = L3 + if end == End::Source { ipv6::SADDR } else { ipv6::DADDR };
                head[at..at + 16].copy_from_slice(&self.address.octets());
                let mut change = u64::from(self.gain);
                if counts_hop {
                    head[L3 + ipv6::HOP_LIMIT] -= 1;
                    change += ONE_HOP_LESS;
                }
                // As in `rewrite`: the helper relies on the header to compensate the address.
                packet.update_complete_sum(change);
            }
        }
        Some(())
    }

    /// Port and checksum.
    #[inline(always)]
    fn put_transport(&self, packet: Packet, headers: &Headers, end: End) -> Option<()> {
        let (sum_at, zero_is_none) = match headers.tuple.protocol {
            PROTO_TCP => (l4::TCP_CHECKSUM, 0),
            _ => (l4::UDP_CHECKSUM, u64::from(BPF_F_MARK_MANGLED_0)),
        };
        let offset = u32::from(headers.l4_offset);
        let at = offset + sum_at as u32;
        let flags = zero_is_none | u64::from(BPF_F_PSEUDO_HDR);
        // SAFETY: the context is the program's own.
        if unsafe { bpf_l4_csum_replace(packet.skb(), at, 0, self.gain.into(), flags) } != 0 {
            return None;
        }
        let (old, port_at) = match end {
            End::Source => (headers.tuple.sport(), l4::SPORT),
            End::Destination => (headers.tuple.dport(), l4::DPORT),
        };
        if old == self.port {
            return Some(());
        }
        packet.replace_summed_port(offset as usize & OFFSET_MASK, sum_at, port_at, zero_is_none, old, self.port)
    }
}
