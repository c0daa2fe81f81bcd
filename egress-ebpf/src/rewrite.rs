//! Giving a packet another end, and one hop less.
//!
//! Checksums of the transport go through the helpers only, which know partial and complete checksums and GSO; the IPv4
//! header checksum is ours to write, and so is SCTP's ([`crate::sctp`]).
//!
//! A complete checksum (`CHECKSUM_COMPLETE`) is a device's sum over all that is behind the Ethernet header. A change that
//! nothing in the packet makes up for must be told to it: [`Packet::tell_sum`].
#![expect(unsafe_code, reason = "helper calls on the packet's context")]

use aya_ebpf::bindings::{BPF_F_MARK_MANGLED_0, BPF_F_PSEUDO_HDR};
use aya_ebpf::helpers::generated::{bpf_csum_update, bpf_l4_csum_replace};
use egress_common::abi::{Addr, Family, Verdict};
use egress_common::decide::{End, Rewrite};
use egress_common::wire::{
    Frame, Headers, L3, L4, PROTO_ICMP, PROTO_ICMPV6, PROTO_TCP, PROTO_UDP, csum, ipv4, ipv6, l4,
};

use crate::packet::{OFFSET_MASK, Packet};
use crate::sctp;

impl Packet {
    /// Gives the packet another end. A failure may leave it half written: the caller drops it.
    #[inline(never)]
    pub fn rewrite(self, heads: &Headers, rewrite: &Rewrite) -> Result<(), Verdict> {
        rewrite.check(heads)?;
        self.try_rewrite(heads, rewrite).ok_or(Verdict::RewriteFailed)
    }

    #[inline(always)]
    fn try_rewrite(&self, heads: &Headers, rewrite: &Rewrite) -> Option<()> {
        let old = match rewrite.end {
            End::Source => heads.tuple.saddr,
            End::Destination => heads.tuple.daddr,
        };
        let old_port = rewrite.old_port(heads);
        replace_checksum(*self, heads, &old, &rewrite.addr)?;
        if heads.has_l4() && old_port != rewrite.port {
            match heads.l4 {
                L4::Sctp => sctp::replace_port(*self, heads, rewrite.end, rewrite.port)?,
                _ => self.replace_port(heads, rewrite.end, old_port, rewrite.port)?,
            }
        }
        match heads.family {
            Family::V4 => self.replace_addr_v4(rewrite.end, &old, &rewrite.addr),
            Family::V6 => {
                let at = if rewrite.end == End::Source { ipv6::SADDR } else { ipv6::DADDR };
                self.store(L3 + at, rewrite.addr.octets())
            }
        }
    }

    /// Ports, or the identifier of an echo message.
    #[inline(always)]
    fn replace_port(&self, heads: &Headers, end: End, old: u16, new: u16) -> Option<()> {
        let (sum_at, flags, port_at) = match (heads.tuple.protocol, end) {
            (PROTO_TCP, End::Source) => (l4::TCP_CHECKSUM, 0, l4::SPORT),
            (PROTO_TCP, End::Destination) => (l4::TCP_CHECKSUM, 0, l4::DPORT),
            (PROTO_UDP, End::Source) => (l4::UDP_CHECKSUM, u64::from(BPF_F_MARK_MANGLED_0), l4::SPORT),
            (PROTO_UDP, End::Destination) => (l4::UDP_CHECKSUM, u64::from(BPF_F_MARK_MANGLED_0), l4::DPORT),
            (PROTO_ICMP | PROTO_ICMPV6, _) => (l4::ICMP_CHECKSUM, 0, l4::ECHO_ID),
            _ => return None,
        };
        self.replace_summed_port(usize::from(heads.l4_offset) & OFFSET_MASK, sum_at, port_at, flags, old, new)
    }

    /// A port, or an identifier, of the transport header at `offset`, and the checksum that covers it.
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
            // The sender has made no checksum, so that nothing makes up for the port.
            self.tell_sum(csum::change_u32(from.into(), to.into()));
        }
        let at = (offset + sum_at) as u32;
        // SAFETY: the context is the program's own.
        if unsafe { bpf_l4_csum_replace(self.skb(), at, from.into(), to.into(), flags | 2) } != 0 {
            return None;
        }
        self.store(offset + port_at, new.to_be_bytes())
    }

    /// Two bytes, both zero. Out of line: with this look between the helper's call and the write of the port, Linux 6.1 wrote
    /// the port to the other port's place. Seen with Debian's 6.1.0-56, and with the same object not on 6.18; the cause was
    /// not found.
    #[inline(never)]
    fn is_zero(self, at: usize) -> bool {
        self.load(at & OFFSET_MASK) == Some([0; 2])
    }

    /// Lets a complete checksum hear of a change in what it covers. Packets that have none are left as they are.
    #[inline(always)]
    pub fn tell_sum(&self, change: u64) {
        // SAFETY: the context is the program's own.
        let _not_complete = unsafe { bpf_csum_update(self.skb(), csum::fold64(change).into()) };
    }

    #[inline(always)]
    fn replace_addr_v4(&self, end: End, old: &Addr, new: &Addr) -> Option<()> {
        let at = if end == End::Source { ipv4::SADDR } else { ipv4::DADDR };
        self.replace_addr_v4_at(L3, at, old, new)
    }

    /// An address and the checksum of the IPv4 header that starts at `header`.
    #[inline(always)]
    pub fn replace_addr_v4_at(&self, header: usize, at: usize, old: &Addr, new: &Addr) -> Option<()> {
        let sum = u16::from_ne_bytes(self.load(header + ipv4::CHECKSUM)?);
        let sum = csum::replace_u32(sum, old.words()[3], new.words()[3]);
        self.store(header + ipv4::CHECKSUM, sum.to_ne_bytes())?;
        self.store(header + at, new.v4_octets())
    }

    /// One hop less. The caller has seen that there is more than one.
    #[inline(never)]
    pub fn decrement_ttl(self, heads: &Headers) -> Result<(), Verdict> {
        self.try_decrement(heads).ok_or(Verdict::RewriteFailed)
    }

    #[inline(always)]
    fn try_decrement(&self, heads: &Headers) -> Option<()> {
        match heads.family {
            Family::V4 => {
                let [ttl, protocol] = self.load(L3 + ipv4::TTL)?;
                let (from, to) = ([ttl, protocol], [ttl.wrapping_sub(1), protocol]);
                let sum = u16::from_ne_bytes(self.load(L3 + ipv4::CHECKSUM)?);
                let sum = csum::replace_u16(sum, u16::from_ne_bytes(from), u16::from_ne_bytes(to));
                self.store(L3 + ipv4::CHECKSUM, sum.to_ne_bytes())?;
                self.store(L3 + ipv4::TTL, [to[0]])
            }
            Family::V6 => {
                self.store(L3 + ipv6::HOP_LIMIT, [heads.ttl.wrapping_sub(1)])?;
                self.tell_sum(ONE_HOP_LESS);
                Some(())
            }
        }
    }
}

/// What the sum over an IPv6 header gains when its hop limit, the upper half of a word, is counted down.
pub const ONE_HOP_LESS: u64 = !u16::from_ne_bytes([0, 1]) as u64;

/// The transport checksum, and a complete one, after an address has changed.
///
/// The helper takes it that the IPv4 header's checksum makes up for the address, as it does, and tells a complete checksum
/// what it changes in the transport's. For IPv6, whose header has none, the address is told here. So the flag
/// `BPF_F_IPV6` (Linux 6.16), by which the helper says nothing, is not needed; nor would it do for packets whose transport
/// has no checksum, or has it in another fragment.
#[inline(never)]
pub fn replace_checksum(packet: Packet, heads: &Headers, old: &Addr, new: &Addr) -> Option<()> {
    let sum = match heads.tuple.protocol {
        // Has no checksum that is known, whatever its number means in the other family; or not in this fragment.
        _ if heads.l4 == L4::Other || !heads.has_l4() => None,
        PROTO_TCP => Some((l4::TCP_CHECKSUM, 0)),
        // Zero means "none" and stays zero; a result of zero is written as all ones (RFC 768).
        PROTO_UDP => Some((l4::UDP_CHECKSUM, u64::from(BPF_F_MARK_MANGLED_0))),
        PROTO_ICMPV6 => Some((l4::ICMP_CHECKSUM, 0)),
        // ICMP has no pseudo header, SCTP neither.
        _ => None,
    };
    let change = match heads.family {
        Family::V4 => csum::change_u32(old.words()[3], new.words()[3]),
        Family::V6 => change_of(old, new),
    };
    let change = csum::fold64(change);
    if let Some((at, flags)) = sum {
        let (at, flags) = (u32::from(heads.l4_offset) + at as u32, flags | u64::from(BPF_F_PSEUDO_HDR));
        // SAFETY: the context is the program's own.
        if unsafe { bpf_l4_csum_replace(packet.skb(), at, 0, change.into(), flags) } != 0 {
            return None;
        }
    }
    if heads.family == Family::V6 {
        packet.tell_sum(change.into());
    }
    Some(())
}

/// What a sum over an address gains when it becomes another one. For IPv4 the upper words are the same.
#[inline(always)]
pub fn change_of(old: &Addr, new: &Addr) -> u64 {
    let (old, new) = (old.words(), new.words());
    csum::change_u32(old[0], new[0])
        + csum::change_u32(old[1], new[1])
        + csum::change_u32(old[2], new[2])
        + csum::change_u32(old[3], new[3])
}
