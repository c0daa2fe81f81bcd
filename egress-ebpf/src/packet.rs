//! The packet: reading heads, rewriting ends, lengths. One of the three places where unsafe lives.
//!
//! Every access checks against `data_end` right before it, as the verifier asks; pointers are never kept over a helper
//! that may move the packet. L4 checksums go through the helpers only, which know partial and complete checksums and GSO;
//! the IPv4 header checksum is ours to write.
#![expect(unsafe_code, reason = "packet access is one of the three places for it")]

use core::arch::asm;
use core::ffi::c_void;
use core::mem::offset_of;
use core::ptr;

use aya_ebpf::bindings::bpf_adj_room_mode::BPF_ADJ_ROOM_MAC;
use aya_ebpf::bindings::{__sk_buff, BPF_F_MARK_MANGLED_0, BPF_F_PSEUDO_HDR, BPF_F_RECOMPUTE_CSUM};
use aya_ebpf::helpers::generated::{
    bpf_clone_redirect, bpf_csum_diff, bpf_csum_update, bpf_l4_csum_replace, bpf_loop, bpf_skb_adjust_room,
    bpf_skb_change_tail, bpf_skb_load_bytes, bpf_skb_pull_data, bpf_skb_store_bytes, bpf_skb_vlan_pop,
};
use aya_ebpf::programs::TcContext;
use egress_common::abi::{Addr, Family, Verdict};
use egress_common::decide::{End, Rewrite};
use egress_common::wire::{
    ETH_LEN, Frame, Heads, L3, L4, PROTO_DCCP, PROTO_ICMP, PROTO_ICMPV6, PROTO_TCP, PROTO_UDP, PROTO_UDP_LITE, Quote,
    csum, ethertype, ipv4, ipv6, l4,
};

use crate::fragment::{REST, Rest};
use crate::room::Room;

/// Heads that are read directly must lie in the linear area: Ethernet, IP with options or two extension headers, TCP.
const HEADS: u32 = 14 + 60 + 20;
/// Likewise where there is more to walk: IPv6 extension headers, or a quoted packet with its own.
const LONG_HEADS: u32 = 512;
/// BPF_F_IPV6 (Linux 6.16): the address change of an IPv6 packet leaves a complete checksum as it is.
const BPF_F_IPV6: u64 = 1 << 7;
/// `pkt_type` of a frame whose link address is this host's, and of one whose is somebody else's.
const PACKET_HOST: u32 = 0;
const PACKET_OTHERHOST: u32 = 3;
/// The number of the network in a VLAN tag; the rest is priority.
const VLAN_NUMBER: u32 = 0x0fff;
/// Offsets of transport headers stay below this; the mask shows it to the verifier.
pub const OFFSET_MASK: usize = 0x3fff;

/// A length of 1..=REST, in a form that shows both bounds to the verifier.
#[inline(always)]
fn tail_length(length: u32) -> Option<u32> {
    let mut less_one = u64::from(length.wrapping_sub(1));
    // Does nothing, but hides where the number came from: the compiler would otherwise compare this one and use `length`,
    // of which the verifiers of Linux 6.1 and 6.12 then know nothing.
    // SAFETY: a register is moved to itself.
    unsafe { asm!("{0} = {0}", inout(reg) less_one, options(pure, nomem, nostack, preserves_flags)) };
    (less_one < REST as u64).then_some(less_one as u32 + 1)
}

/// What a sum over an address gains when it becomes another one. For IPv4 the upper words are the same.
#[inline(always)]
fn change_of(old: &Addr, new: &Addr) -> u64 {
    let (old, new) = (old.words(), new.words());
    csum::change_u32(old[0], new[0])
        + csum::change_u32(old[1], new[1])
        + csum::change_u32(old[2], new[2])
        + csum::change_u32(old[3], new[3])
}

/// The same number, but the compiler no longer knows where it came from. It would otherwise compare another register than
/// it uses, of which the verifiers of Linux 6.1 and 6.12 then know nothing, or leave out a mask that shows them a bound.
#[inline(always)]
fn hidden(number: u32) -> u32 {
    let mut hidden = u64::from(number);
    // SAFETY: a register is moved to itself.
    unsafe { asm!("{0} = {0}", inout(reg) hidden, options(pure, nomem, nostack, preserves_flags)) };
    hidden as u32
}

/// So many bytes the helper sums at a time.
const SUMMED: u32 = 512;

struct SumWalk<'a> {
    skb: *mut __sk_buff,
    space: &'a mut Rest,
    offset: u32,
    length: u32,
    done: u32,
    sum: u32,
}

/// One step of a sum: 0 goes on, 1 ends it.
unsafe extern "C" fn add_chunk(_index: u64, walk: *mut SumWalk<'_>) -> u64 {
    // SAFETY: `bpf_loop` hands back the pointer that it was given, to a live frame.
    let walk = unsafe { &mut *walk };
    if walk.done >= walk.length {
        return 1;
    }
    let chunk = (hidden((walk.length - walk.done).min(SUMMED) - 1) & (SUMMED - 1)) + 1;
    // The helper sums whole words of four bytes; what the packet does not fill is zero.
    let last = chunk as usize & !3 & (SUMMED as usize * 2 - 1);
    let space = walk.space.as_mut_ptr();
    // SAFETY: `last` is at most 512, in a buffer of 2048 bytes.
    unsafe { ptr::write_unaligned(space.add(last).cast::<u32>(), 0) };
    // SAFETY: the context is the program's own, and `chunk` bytes fit into the space.
    if unsafe { bpf_skb_load_bytes(walk.skb.cast(), walk.offset + walk.done, space.cast(), chunk) } != 0 {
        return 1;
    }
    // SAFETY: so many bytes of the space have been written, by the two steps above.
    let sum = unsafe { bpf_csum_diff(ptr::null_mut(), 0, space.cast(), (chunk + 3) & !3, walk.sum) };
    walk.sum = sum as u32;
    walk.done += chunk;
    0
}

/// The packet of this run: a pointer, so that out-of-line functions take it in a register.
#[derive(Clone, Copy)]
pub struct Packet {
    skb: *mut __sk_buff,
}

impl Frame for Packet {
    #[inline(always)]
    fn load<const N: usize>(&self, offset: usize) -> Option<[u8; N]> {
        let start = self.data() + offset;
        if start + N > self.data_end() {
            return None;
        }
        // SAFETY: `start..start + N` lies within the linear area, checked on the line above.
        Some(unsafe { ptr::read_unaligned(start as *const [u8; N]) })
    }

    #[inline(always)]
    fn len(&self) -> usize {
        self.field(|skb| skb.len) as usize
    }
}

impl Packet {
    /// The packet with its heads in the linear area, as far as it is that long.
    #[inline(always)]
    pub fn new(ctx: &TcContext) -> Self {
        let packet = Self { skb: ctx.skb.skb };
        packet.pull_heads();
        packet
    }

    /// Brings the heads into the linear area, as far as the packet is that long.
    #[inline(always)]
    pub fn pull_heads(&self) {
        if self.data() + HEADS as usize > self.data_end() && self.len() > self.data_end() - self.data() {
            // Failure shows as heads cut short.
            // SAFETY: the context is the program's own.
            unsafe { bpf_skb_pull_data(self.skb, HEADS.min(self.len() as u32)) };
        }
    }

    /// Brings heads that are longer than usual into the linear area.
    #[inline(always)]
    pub fn pull_long_heads(&self) {
        let next = match self.load(ETH_LEN - 2).map(u16::from_be_bytes) {
            Some(ethertype::IPV4) => self.load(L3 + ipv4::PROTOCOL),
            Some(ethertype::IPV6) => self.load(L3 + ipv6::NEXT_HEADER),
            _ => return,
        };
        let [PROTO_TCP | PROTO_UDP] = next.unwrap_or([0]) else {
            if self.len() > self.data_end() - self.data() {
                // SAFETY: the context is the program's own.
                unsafe { bpf_skb_pull_data(self.skb, LONG_HEADS.min(self.len() as u32)) };
            }
            return;
        };
    }

    #[inline(always)]
    fn data(&self) -> usize {
        // Volatile, or the compiler hands the loaded number to an out-of-line function, where the verifier no longer
        // knows it for a packet pointer.
        // SAFETY: the context is valid for the whole run.
        unsafe { ptr::read_volatile(&raw const (*self.skb).data) as usize }
    }

    #[inline(always)]
    fn data_end(&self) -> usize {
        // SAFETY: as in `data`.
        unsafe { ptr::read_volatile(&raw const (*self.skb).data_end) as usize }
    }

    #[inline(always)]
    pub fn skb(&self) -> *mut __sk_buff {
        self.skb
    }

    #[inline(always)]
    fn field(&self, read: impl Fn(&__sk_buff) -> u32) -> u32 {
        // SAFETY: the context is valid for the whole run.
        read(unsafe { &*self.skb() })
    }

    #[inline(always)]
    pub fn mark(&self) -> u32 {
        self.field(|skb| skb.mark)
    }

    #[inline(always)]
    pub fn set_mark(&self, mark: u32) {
        // By hand: the compiler likes to keep the field's address for later, and the verifier wants the context's own
        // address with the field's place in the instruction.
        // SAFETY: the context is valid for the whole run, and the field is one that programs may write.
        unsafe {
            asm!(
                "*(u32 *)({skb} + {place}) = {mark}",
                skb = in(reg) self.skb,
                place = const offset_of!(__sk_buff, mark),
                mark = in(reg) u64::from(mark),
                options(nostack, preserves_flags),
            );
        }
    }

    #[inline(always)]
    pub fn ifindex(&self) -> u32 {
        self.field(|skb| skb.ifindex)
    }

    /// Came in by a device of this node.
    #[inline(always)]
    pub fn is_forwarded(&self) -> bool {
        self.field(|skb| skb.ingress_ifindex) != 0
    }

    /// Came in by the device that it is about to leave by.
    #[inline(always)]
    pub fn is_returning(&self) -> bool {
        self.field(|skb| skb.ingress_ifindex) == self.ifindex()
    }

    /// Of another network. A tag without a number says how urgent the packet is, not whose.
    #[inline(always)]
    pub fn is_tagged(&self) -> bool {
        self.field(|skb| skb.vlan_present) != 0 && self.field(|skb| skb.vlan_tci) & VLAN_NUMBER != 0
    }

    /// Of another network, or for another host.
    #[inline(always)]
    pub fn is_foreign(&self) -> bool {
        self.field(|skb| skb.pkt_type) == PACKET_OTHERHOST || self.is_tagged()
    }

    /// Takes off what belongs to the device that the packet came by: the mark, and a tag without a number.
    #[inline(always)]
    pub fn strip(&self) {
        self.set_mark(0);
        if self.field(|skb| skb.vlan_present) != 0 {
            // SAFETY: the context is the program's own.
            let _stays_urgent = unsafe { bpf_skb_vlan_pop(self.skb) };
        }
    }

    /// The link address is this host's.
    #[inline(always)]
    pub fn is_for_this_host(&self) -> bool {
        self.field(|skb| skb.pkt_type) == PACKET_HOST
    }

    #[inline(always)]
    pub fn gso_size(&self) -> u32 {
        self.field(|skb| skb.gso_size)
    }

    /// Writes into the linear area.
    #[inline(always)]
    pub fn store<const N: usize>(&self, offset: usize, bytes: [u8; N]) -> Option<()> {
        let start = self.data() + offset;
        if start + N > self.data_end() {
            return None;
        }
        // SAFETY: as in `load`; the kernel unshares the packet before a program that writes runs.
        unsafe { ptr::write_unaligned(start as *mut [u8; N], bytes) };
        Some(())
    }

    /// Cuts the packet to `length` bytes of frame, or makes it so long.
    #[inline(always)]
    pub fn resize(&self, length: u32) -> Option<()> {
        // SAFETY: the context is the program's own.
        (unsafe { bpf_skb_change_tail(self.skb, length, 0) } == 0).then_some(())
    }

    /// Makes room, zeroed, between the link and the network header.
    #[inline(always)]
    pub fn make_room(&self, bytes: u32) -> Option<()> {
        // SAFETY: the context is the program's own.
        (unsafe { bpf_skb_adjust_room(self.skb, bytes as i32, BPF_ADJ_ROOM_MAC, 0) } == 0).then_some(())
    }

    /// Makes room between the link and the network header, or takes it away (a negative length). `None` where the kernel
    /// refuses; the packet is as it was then.
    #[inline(always)]
    pub fn change_room(&self, bytes: i32, room: Room) -> Option<()> {
        // SAFETY: the context is the program's own.
        (unsafe { bpf_skb_adjust_room(self.skb, bytes, BPF_ADJ_ROOM_MAC, room.flags()) } == 0).then_some(())
    }

    /// Lets a complete checksum, which knows nothing of direct writes, hear of what was written where there were zeros.
    /// Both offsets are even.
    #[inline(always)]
    pub fn add_to_sum(&self, from: usize, to: usize) -> Option<()> {
        let mut sum = 0u64;
        let mut at = from;
        while at < to {
            sum += u64::from(u16::from_ne_bytes(self.load(at)?));
            at += 2;
        }
        // SAFETY: the context is the program's own.
        let _not_complete = unsafe { bpf_csum_update(self.skb, csum::fold64(sum).into()) };
        Some(())
    }

    /// Writes by the helper, which keeps a complete checksum right. The length is known where this is inlined.
    #[inline(always)]
    pub fn store_summed(&self, offset: usize, bytes: &[u8]) -> Option<()> {
        let (from, length) = (bytes.as_ptr().cast(), bytes.len() as u32);
        // SAFETY: the context is the program's own, `from` and `length` are those of one slice.
        let result = unsafe { bpf_skb_store_bytes(self.skb, offset as u32, from, length, BPF_F_RECOMPUTE_CSUM.into()) };
        (result == 0).then_some(())
    }

    /// Copies `length` bytes at `offset` into `to`.
    #[inline(always)]
    pub fn load_tail(&self, offset: u32, length: u32, to: &mut Rest) -> Option<()> {
        let length = tail_length(length)?;
        // SAFETY: the context is the program's own, and `length` bytes fit into `to`.
        let result = unsafe { bpf_skb_load_bytes(self.skb.cast(), offset, to.as_mut_ptr().cast(), length) };
        (result == 0).then_some(())
    }

    /// Writes the first `length` bytes of `from` at `offset`.
    #[inline(always)]
    pub fn store_tail(&self, offset: u32, length: u32, from: &Rest) -> Option<()> {
        let length = tail_length(length)?;
        let flags = BPF_F_RECOMPUTE_CSUM.into();
        // SAFETY: the context is the program's own, and `from` has `length` bytes.
        let result = unsafe { bpf_skb_store_bytes(self.skb, offset, from.as_ptr().cast(), length, flags) };
        (result == 0).then_some(())
    }

    /// Sum of the 16-bit words of `length` bytes at `offset`, by way of `space`.
    #[inline(always)]
    pub fn sum(&self, offset: u32, length: u32, space: &mut Rest) -> Option<u32> {
        let mut walk = SumWalk { skb: self.skb, space, offset, length, done: 0, sum: 0 };
        // SAFETY: the callback has the signature that the helper asks for, and `walk` lives on this frame until the
        // helper returns.
        unsafe { bpf_loop(u32::from(u16::MAX) / SUMMED + 1, add_chunk as *mut c_void, (&raw mut walk).cast(), 0) };
        (walk.done == length).then_some(walk.sum)
    }

    /// Whether the checksum at `at` is left for a device to complete: the helper changes all others.
    #[inline(always)]
    pub fn is_partial(&self, at: usize) -> Option<bool> {
        let before: [u8; 2] = self.load(at)?;
        // SAFETY: the context is the program's own.
        if unsafe { bpf_l4_csum_replace(self.skb, at as u32, 0, 1, 2) } != 0 {
            return None;
        }
        let is_same = self.load(at)? == before;
        self.store(at, before)?;
        Some(is_same)
    }

    /// Makes the kernel forget that a device was to complete the transport checksum. It does so where the place that the
    /// sum begins at is no longer in the packet: so the head of the packet is taken out and put back.
    #[inline(always)]
    pub fn forget_partial_checksum(&self, space: &mut Rest) -> Option<()> {
        /// More than the longest IPv4 header and the link header before it.
        const HEAD: u32 = 80;
        self.load_tail(L3 as u32, HEAD, space)?;
        for bytes in [-(HEAD as i32), HEAD as i32] {
            // SAFETY: the context is the program's own.
            if unsafe { bpf_skb_adjust_room(self.skb, bytes, BPF_ADJ_ROOM_MAC, 0) } != 0 {
                return None;
            }
        }
        self.store_tail(L3 as u32, HEAD, space)
    }

    /// Sends a copy of the packet as it is now by a device.
    #[inline(always)]
    pub fn send_clone(&self, ifindex: u32) -> Option<()> {
        // SAFETY: the context is the program's own.
        (unsafe { bpf_clone_redirect(self.skb, ifindex, 0) } == 0).then_some(())
    }

    /// Gives the packet another end. A failure may leave it half written: the caller drops it.
    #[inline(never)]
    pub fn rewrite(self, heads: &Heads, rewrite: &Rewrite) -> Result<(), Verdict> {
        self.try_rewrite(heads, rewrite).ok_or(Verdict::RewriteFailed)
    }

    /// Gives an ICMP error another end, and the packet that it quotes, which went the other way, its opposite end. The
    /// quoted checksums follow where the quote is long enough to have them.
    #[inline(never)]
    pub fn rewrite_error(self, heads: &Heads, quote: &Quote, rewrite: &Rewrite) -> Result<(), Verdict> {
        self.try_rewrite_error(heads, quote, rewrite).ok_or(Verdict::RewriteFailed)
    }

    #[inline(always)]
    fn try_rewrite_error(&self, heads: &Heads, quote: &Quote, rewrite: &Rewrite) -> Option<()> {
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
        let transport = rewrite_quoted_transport(*self, quote, rewrite, addresses);
        if transport == NOT_WRITTEN {
            return None;
        }
        change += transport;
        if change != 0 {
            let sum_at = u32::from(heads.l4_offset) + l4::ICMP_CHECKSUM as u32;
            // SAFETY: the context is the program's own.
            if unsafe { bpf_l4_csum_replace(self.skb, sum_at, 0, csum::fold64(change).into(), 0) } != 0 {
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
                replace_l4_checksum(*self, heads, &old, &rewrite.addr)?;
                self.store(at + inner_at, rewrite.addr.octets())?;
                self.store(L3 + outer_at, rewrite.addr.octets())
            }
        }
    }

    #[inline(always)]
    fn try_rewrite(&self, heads: &Heads, rewrite: &Rewrite) -> Option<()> {
        let (old, old_port) = match rewrite.end {
            End::Source => (heads.tuple.saddr, heads.tuple.sport()),
            End::Destination => (heads.tuple.daddr, heads.tuple.dport()),
        };
        if heads.has_l4() {
            replace_l4_checksum(*self, heads, &old, &rewrite.addr)?;
            if old_port != rewrite.port {
                self.replace_port(heads, rewrite.end, old_port, rewrite.port)?;
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
    fn replace_addr_v4_at(&self, header: usize, at: usize, old: &Addr, new: &Addr) -> Option<()> {
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

    /// Link addresses for the next hop.
    #[inline(always)]
    pub fn set_macs(&self, dmac: [u8; 6], smac: [u8; 6]) -> Option<()> {
        self.store(0, dmac)?;
        self.store(6, smac)
    }
}

/// What cannot be the change of a sum: the packet could not be written to.
const NOT_WRITTEN: u64 = u64::MAX;

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
        PROTO_UDP | PROTO_UDP_LITE | PROTO_DCCP => (l4::UDP_CHECKSUM, addresses + port),
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

/// The transport checksum after an address has changed.
#[inline(never)]
fn replace_l4_checksum(packet: Packet, heads: &Heads, old: &Addr, new: &Addr) -> Option<()> {
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
            let result = unsafe { bpf_l4_csum_replace(packet.skb, at, old[3].into(), new[3].into(), flags | 4) };
            (result == 0).then_some(())
        }
        Family::V6 => {
            let (mut old, mut new) = (old, new);
            let diff = unsafe { bpf_csum_diff(old.as_mut_ptr(), 16, new.as_mut_ptr(), 16, 0) };
            let diff = u64::try_from(diff).ok()?;
            let mut result = unsafe { bpf_l4_csum_replace(packet.skb, at, 0, diff, flags | BPF_F_IPV6) };
            if result != 0 {
                // A kernel before 6.16 refuses the flag.
                result = unsafe { bpf_l4_csum_replace(packet.skb, at, 0, diff, flags) };
            }
            (result == 0).then_some(())
        }
    }
}
