//! What is written into each plain packet of a recent flow, worked out once: the other end is the same in every one of them,
//! and so is what the checksums that cover it gain.
//!
//! The transport's checksum goes through the helper all the same, which knows partial and complete checksums.
#![expect(unsafe_code, reason = "helper calls on the packet's context")]

use aya_ebpf::bindings::{BPF_F_MARK_MANGLED_0, BPF_F_PSEUDO_HDR};
use aya_ebpf::helpers::generated::bpf_l4_csum_replace;
use egress_common::abi::{Addr, Family, Verdict};
use egress_common::decide::{End, Rewrite};
use egress_common::wire::{Headers, IPV4_LEN, IPV6_LEN, L3, PROTO_TCP, csum, ipv4, ipv6, l4};

use crate::packet::{OFFSET_MASK, Packet};
use crate::rewrite::{ONE_HOP_LESS, change_of};

/// One hop less, in the word of an IPv4 header where it is counted.
const HOP: u16 = u16::from_ne_bytes([1, 0]);

/// A struct of its own, so that it can be kept.
#[repr(C)]
pub struct Stamp {
    address: Addr,
    /// What a sum over the address gains.
    gain: u32,
    /// What the sum of an IPv4 header gains: the address, and the hop where one is counted here.
    header_gain: u16,
    port: u16,
}

/// Link addresses of the next hop, receiver first.
pub type Macs = [u8; 12];

impl Stamp {
    /// For packets with these heads. `counts_hop` where this node takes one. Out of line for its frame.
    #[inline(never)]
    pub fn set(&mut self, heads: &Headers, rewrite: &Rewrite, counts_hop: bool) {
        let old = match rewrite.end {
            End::Source => heads.tuple.saddr,
            End::Destination => heads.tuple.daddr,
        };
        // The words that both families' addresses share gain nothing (modulo 2^16 - 1).
        let gain = csum::fold64(change_of(&old, &rewrite.addr));
        let hop = if counts_hop { !HOP } else { 0 };
        self.header_gain = csum::fold(u32::from(gain) + u32::from(hop));
        self.gain = gain.into();
        self.address = rewrite.addr;
        self.port = rewrite.port;
    }

    /// Gives a whole TCP or UDP packet of the flow its other end, and link addresses where it leaves by a link. A failure may
    /// leave it half written: the caller drops it.
    #[inline(always)]
    pub fn put(
        &self,
        packet: Packet,
        heads: &Headers,
        end: End,
        counts_hop: bool,
        macs: Option<&Macs>,
    ) -> Result<(), Verdict> {
        self.try_put(packet, heads, end, counts_hop, macs).ok_or(Verdict::RewriteFailed)
    }

    #[inline(always)]
    fn try_put(&self, packet: Packet, heads: &Headers, end: End, counts_hop: bool, macs: Option<&Macs>) -> Option<()> {
        self.put_transport(packet, heads, end)?;
        match heads.family {
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
                // As in `rewrite`: the helper takes it that something in the header makes up for the address.
                packet.tell_sum(change);
            }
        }
        Some(())
    }

    /// Port and checksum.
    #[inline(always)]
    fn put_transport(&self, packet: Packet, heads: &Headers, end: End) -> Option<()> {
        let (sum_at, zero_is_none) = match heads.tuple.protocol {
            PROTO_TCP => (l4::TCP_CHECKSUM, 0),
            _ => (l4::UDP_CHECKSUM, u64::from(BPF_F_MARK_MANGLED_0)),
        };
        let offset = u32::from(heads.l4_offset);
        let at = offset + sum_at as u32;
        let flags = zero_is_none | u64::from(BPF_F_PSEUDO_HDR);
        // SAFETY: the context is the program's own.
        if unsafe { bpf_l4_csum_replace(packet.skb(), at, 0, self.gain.into(), flags) } != 0 {
            return None;
        }
        let (old, port_at) = match end {
            End::Source => (heads.tuple.sport(), l4::SPORT),
            End::Destination => (heads.tuple.dport(), l4::DPORT),
        };
        if old == self.port {
            return Some(());
        }
        packet.replace_summed_port(offset as usize & OFFSET_MASK, sum_at, port_at, zero_is_none, old, self.port)
    }
}
