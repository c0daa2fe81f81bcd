//! Giving a packet another end, and one hop less.
//!
//! Checksums of the transport go through the helpers only, which know partial and complete checksums and GSO; the IPv4
//! header checksum is ours to write, and so is SCTP's ([`crate::sctp`]).
#![expect(unsafe_code, reason = "helper calls on the packet's context")]

use aya_ebpf::bindings::{BPF_F_MARK_MANGLED_0, BPF_F_PSEUDO_HDR};
use aya_ebpf::helpers::generated::{bpf_csum_diff, bpf_csum_update, bpf_l4_csum_replace};
use egress_common::abi::{Addr, Family, Verdict};
use egress_common::decide::{End, Rewrite};
use egress_common::wire::{
    Frame, Heads, L3, L4, PROTO_DCCP, PROTO_ICMP, PROTO_ICMPV6, PROTO_TCP, PROTO_UDP, PROTO_UDP_LITE, csum, ipv4, ipv6,
    l4,
};

use crate::packet::{OFFSET_MASK, Packet};
use crate::sctp;

/// BPF_F_IPV6 (Linux 6.16): the address change of an IPv6 packet leaves a complete checksum as it is.
pub const BPF_F_IPV6: u64 = 1 << 7;

impl Packet {
    /// Gives the packet another end. A failure may leave it half written: the caller drops it.
    #[inline(never)]
    pub fn rewrite(self, heads: &Heads, rewrite: &Rewrite) -> Result<(), Verdict> {
        rewrite.check(heads)?;
        self.try_rewrite(heads, rewrite).ok_or(Verdict::RewriteFailed)
    }

    #[inline(always)]
    fn try_rewrite(&self, heads: &Heads, rewrite: &Rewrite) -> Option<()> {
        let old = match rewrite.end {
            End::Source => heads.tuple.saddr,
            End::Destination => heads.tuple.daddr,
        };
        let old_port = rewrite.old_port(heads);
        if heads.has_l4() {
            replace_l4_checksum(*self, heads, &old, &rewrite.addr)?;
            if old_port != rewrite.port {
                match heads.l4 {
                    L4::Sctp => sctp::replace_port(*self, heads, rewrite.end, rewrite.port)?,
                    _ => self.replace_port(heads, rewrite.end, old_port, rewrite.port)?,
                }
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
    fn replace_port(&self, heads: &Heads, end: End, old: u16, new: u16) -> Option<()> {
        let (sum_at, flags, port_at) = match (heads.tuple.protocol, end) {
            (PROTO_TCP, End::Source) => (l4::TCP_CHECKSUM, 0, l4::SPORT),
            (PROTO_TCP, End::Destination) => (l4::TCP_CHECKSUM, 0, l4::DPORT),
            (PROTO_UDP | PROTO_UDP_LITE, End::Source) => (l4::UDP_CHECKSUM, u64::from(BPF_F_MARK_MANGLED_0), l4::SPORT),
            (PROTO_UDP | PROTO_UDP_LITE, End::Destination) => {
                (l4::UDP_CHECKSUM, u64::from(BPF_F_MARK_MANGLED_0), l4::DPORT)
            }
            (PROTO_DCCP, End::Source) => (l4::UDP_CHECKSUM, 0, l4::SPORT),
            (PROTO_DCCP, End::Destination) => (l4::UDP_CHECKSUM, 0, l4::DPORT),
            (PROTO_ICMP | PROTO_ICMPV6, _) => (l4::ICMP_CHECKSUM, 0, l4::ECHO_ID),
            _ => return None,
        };
        let offset = u32::from(heads.l4_offset);
        let (from, to) = (u64::from(old.to_be()), u64::from(new.to_be()));
        // SAFETY: the context is the program's own.
        let result = unsafe { bpf_l4_csum_replace(self.skb(), offset + sum_at as u32, from, to, flags | 2) };
        if result != 0 {
            return None;
        }
        self.store((offset as usize & OFFSET_MASK) + port_at, new.to_be_bytes())
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
    pub fn decrement_ttl(self, heads: &Heads) -> Result<(), Verdict> {
        self.try_decrement(heads).ok_or(Verdict::RewriteFailed)
    }

    #[inline(always)]
    fn try_decrement(&self, heads: &Heads) -> Option<()> {
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
                // Nothing in the packet makes up for this change, so a complete checksum must hear of it; for others
                // the helper refuses, and that is fine.
                // SAFETY: the context is the program's own.
                let _not_complete = unsafe { bpf_csum_update(self.skb(), !u32::from_ne_bytes([0, 1, 0, 0])) };
                Some(())
            }
        }
    }
}

/// The transport checksum after an address has changed.
#[inline(never)]
pub fn replace_l4_checksum(packet: Packet, heads: &Heads, old: &Addr, new: &Addr) -> Option<()> {
    if heads.l4 == L4::Other {
        // Has no checksum that is known, whatever its number means in the other family.
        return Some(());
    }
    let (at, flags) = match heads.tuple.protocol {
        PROTO_TCP => (l4::TCP_CHECKSUM, 0),
        // Zero means "none" and stays zero; a result of zero is written as all ones (RFC 768).
        PROTO_UDP | PROTO_UDP_LITE => (l4::UDP_CHECKSUM, u64::from(BPF_F_MARK_MANGLED_0)),
        PROTO_DCCP => (l4::UDP_CHECKSUM, 0),
        PROTO_ICMPV6 => (l4::ICMP_CHECKSUM, 0),
        // ICMP has no pseudo header, SCTP neither.
        _ => return Some(()),
    };
    let at = u32::from(heads.l4_offset) + at as u32;
    let flags = flags | u64::from(BPF_F_PSEUDO_HDR);
    let (old, new) = (old.words(), new.words());
    // SAFETY (all calls): the context is the program's own, the arrays live on this frame.
    match heads.family {
        Family::V4 => {
            let result = unsafe { bpf_l4_csum_replace(packet.skb(), at, old[3].into(), new[3].into(), flags | 4) };
            (result == 0).then_some(())
        }
        Family::V6 => {
            let (mut old, mut new) = (old, new);
            let diff = unsafe { bpf_csum_diff(old.as_mut_ptr(), 16, new.as_mut_ptr(), 16, 0) };
            let diff = u64::try_from(diff).ok()?;
            let mut result = unsafe { bpf_l4_csum_replace(packet.skb(), at, 0, diff, flags | BPF_F_IPV6) };
            if result != 0 {
                // A kernel before 6.16 refuses the flag.
                result = unsafe { bpf_l4_csum_replace(packet.skb(), at, 0, diff, flags) };
            }
            (result == 0).then_some(())
        }
    }
}
