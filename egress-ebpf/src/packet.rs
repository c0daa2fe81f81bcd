//! The packet: reading and writing bytes, its length and metadata.
//!
//! Packet access is one of the three places for unsafe. Every access compares with `data_end` right before it, as the
//! verifier demands, and no pointer is kept across a helper that may move the packet. `rewrite`, `fragment`, `icmp` and
//! `overlay` change packets through these methods.
#![expect(unsafe_code, reason = "map and packet access; see `maps` and `packet`")]

use core::arch::asm;
use core::ffi::c_void;
use core::mem::{MaybeUninit, offset_of};
use core::ptr;

use aya_ebpf::bindings::bpf_adj_room_mode::BPF_ADJ_ROOM_MAC;
use aya_ebpf::bindings::{__sk_buff, BPF_F_INGRESS, BPF_F_RECOMPUTE_CSUM};
use aya_ebpf::helpers::generated::{
    bpf_clone_redirect, bpf_csum_diff, bpf_csum_update, bpf_l4_csum_replace, bpf_loop, bpf_probe_read_kernel,
    bpf_skb_adjust_room, bpf_skb_change_tail, bpf_skb_load_bytes, bpf_skb_pull_data, bpf_skb_store_bytes,
    bpf_skb_vlan_pop,
};
use aya_ebpf::programs::TcContext;
use egress_common::abi::{Config, PacketLayout};
use egress_common::wire::{ETH_LEN, Frame, Headers, L3, PROTO_TCP, PROTO_UDP, csum, ethertype, ipv4, ipv6};

use crate::fragment::Rest;
use crate::verifier::opaque;

/// Headers that must be in the linear area for direct reads: Ethernet, IP with options or two extension headers, TCP.
const HEADERS: u32 = 14 + 60 + 20;

/// The same for longer headers: IPv6 extension headers, or a quoted packet.
const LONG_HEADERS: u32 = 512;

/// `pkt_type` of a frame for this host, and for another host.
const PACKET_HOST: u32 = 0;

const PACKET_OTHERHOST: u32 = 3;

/// `tc_index` of packets from the management port that were left to the stack. Only the removed discipline dsmark and
/// the filter tcindex read that field.
const OF_POD: u32 = 0xe67e;

/// VLAN ID of a tag; the rest is priority.
const VLAN_NUMBER: u32 = 0x0fff;

/// Bound of transport header offsets; the mask shows it to the verifier.
pub const OFFSET_MASK: usize = 0x3fff;

/// A length of 1..=MOST; the form shows both bounds to the verifier.
#[inline(always)]
fn tail_length<const MOST: usize>(length: u32) -> Option<u32> {
    let less_one = opaque(u64::from(length.wrapping_sub(1)));
    (less_one < MOST as u64).then_some(less_one as u32 + 1)
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
    fn words<const N: usize>(&self, offset: usize) -> Option<[u32; N]> {
        let start = self.data() + offset;
        if start + 4 * N > self.data_end() {
            return None;
        }
        let mut words = [0; N];
        for (place, word) in words.iter_mut().enumerate() {
            let read: u64;
            // Inline assembly: the compiler would read the bytes of an unaligned word one by one. SAFETY: the word lies
            // within the linear area, checked above.
            unsafe {
                asm!(
                    "{read} = *(u32 *)({at} + 0)",
                    read = out(reg) read,
                    at = in(reg) start + 4 * place,
                    options(pure, readonly, nostack, preserves_flags),
                );
            }
            *word = read as u32;
        }
        Some(words)
    }

    #[inline(always)]
    fn len(&self) -> usize {
        self.field(|skb| skb.len) as usize
    }
}

impl Packet {
    /// The packet, with its headers pulled into the linear area as far as it has them.
    #[inline(always)]
    pub fn new(ctx: &TcContext) -> Self {
        let packet = Self { skb: ctx.skb.skb };
        packet.pull_headers();
        packet
    }

    /// The packet of this run, in a global function.
    #[inline(always)]
    pub fn again(ctx: &TcContext) -> Self {
        Self { skb: ctx.skb.skb }
    }

    /// Pulls the headers into the linear area, as far as the packet has them.
    #[inline(always)]
    pub fn pull_headers(&self) {
        if self.data() + HEADERS as usize > self.data_end() && self.len() > self.data_end() - self.data() {
            // A failure shows as truncated headers. SAFETY: the context is the program's own.
            unsafe { bpf_skb_pull_data(self.skb, HEADERS.min(self.len() as u32)) };
        }
    }

    /// Pulls headers that are longer than usual into the linear area.
    #[inline(always)]
    pub fn pull_long_headers(&self) {
        let next = match self.load(ETH_LEN - 2).map(u16::from_be_bytes) {
            Some(ethertype::IPV4) => self.load(L3 + ipv4::PROTOCOL),
            Some(ethertype::IPV6) => self.load(L3 + ipv6::NEXT_HEADER),
            _ => return,
        };
        let [PROTO_TCP | PROTO_UDP] = next.unwrap_or([0]) else {
            if self.len() > self.data_end() - self.data() {
                // SAFETY: the context is the program's own.
                unsafe { bpf_skb_pull_data(self.skb, LONG_HEADERS.min(self.len() as u32)) };
            }
            return;
        };
    }

    #[inline(always)]
    fn data(&self) -> usize {
        // Volatile: otherwise the compiler passes the loaded number to an out-of-line function, where the verifier no
        // longer knows it as a packet pointer. SAFETY: the context is valid for the whole run.
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
        self.set_field::<{ offset_of!(__sk_buff, mark) }>(mark);
    }

    #[inline(always)]
    pub fn set_priority(&self, priority: u32) {
        self.set_field::<{ offset_of!(__sk_buff, priority) }>(priority);
    }

    /// Marks the packet as sent by a pod. The mark survives changes of IP and link headers, and a pod cannot remove it,
    /// because the program sets it later.
    #[inline(always)]
    pub fn set_of_pod(&self) {
        self.set_field::<{ offset_of!(__sk_buff, tc_index) }>(OF_POD);
    }

    #[inline(always)]
    pub fn is_of_pod(&self) -> bool {
        self.field(|skb| skb.tc_index) == OF_POD
    }

    /// Of `mark`, `priority` and `tc_index`, which programs may write.
    #[inline(always)]
    fn set_field<const PLACE: usize>(&self, value: u32) {
        // Inline assembly: the compiler would keep the field's address, and the verifier requires the context's address
        // with a constant offset. SAFETY: the context is valid for the whole run, and the field is one of those above.
        unsafe {
            asm!(
                "*(u32 *)({skb} + {place}) = {value}",
                skb = in(reg) self.skb,
                place = const PLACE,
                value = in(reg) u64::from(value),
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
    pub fn is_received(&self) -> bool {
        self.field(|skb| skb.ingress_ifindex) != 0
    }

    /// The same for the packet before the kernel fragmented it: for IPv6 that drops the device (`ip6_copy_metadata`), but
    /// keeps the mark of a pod's packet.
    #[inline(always)]
    pub fn is_forwarded(&self) -> bool {
        self.is_received() || self.is_of_pod()
    }

    /// Came in by the device that it is about to leave by.
    #[inline(always)]
    pub fn is_returning(&self) -> bool {
        self.field(|skb| skb.ingress_ifindex) == self.ifindex()
    }

    /// Tagged for another network: a VLAN device of the host receives it, or has sent it. A priority tag (VLAN ID zero)
    /// names no network.
    #[inline(always)]
    pub fn is_tagged(&self) -> bool {
        self.field(|skb| skb.vlan_present) != 0 && self.field(|skb| skb.vlan_tci) & VLAN_NUMBER != 0
    }

    /// Judged by its link address.
    #[inline(always)]
    pub fn is_for_another_host(&self) -> bool {
        self.field(|skb| skb.pkt_type) == PACKET_OTHERHOST
    }

    /// Whether the packet has the priority of packets that a program of this node has redirected
    /// ([`Config::redirected`]). Resets it.
    #[inline(always)]
    pub fn takes_off_redirected(&self, config: &Config) -> bool {
        let is_ours = self.field(|skb| skb.priority) == config.redirected_priority();
        if is_ours {
            self.set_priority(0);
        }
        is_ours
    }

    /// Sets the priority of a packet with an egress IP that may wait in the kernel's neighbour entry. The mark holds
    /// the egress ID: nothing reads it before the device's egress hook.
    #[inline(always)]
    pub fn set_waiting(&self, config: &Config, egress_id: u32) {
        self.set_priority(config.waiting_priority());
        self.set_mark(egress_id);
    }

    #[inline(always)]
    pub fn is_waiting(&self, config: &Config) -> bool {
        self.field(|skb| skb.priority) == config.waiting_priority()
    }

    /// The egress ID of a packet with that priority; resets both.
    #[inline(always)]
    pub fn take_waiting(&self, config: &Config) -> Option<u32> {
        if !self.is_waiting(config) {
            return None;
        }
        let egress_id = self.mark();
        self.set_priority(0);
        self.set_mark(0);
        Some(egress_id)
    }

    /// Prepares the packet for a redirect: removes the mark and a priority tag of its input device, and sets the
    /// priority that [`takes_off_redirected`](Self::takes_off_redirected) checks.
    #[inline(always)]
    pub fn strip(&self, config: &Config) {
        self.set_mark(0);
        self.set_priority(config.redirected_priority());
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

    /// The first bytes of the frame, readable and writable until a helper call that may move the packet.
    #[inline(always)]
    #[expect(clippy::mut_from_ref, reason = "the packet is a pointer that is copied; see below")]
    pub fn window<const N: usize>(&self) -> Option<&mut [u8; N]> {
        let start = self.data();
        if start + N > self.data_end() {
            return None;
        }
        // SAFETY: `start..start + N` lies within the linear area, checked on the line above; the kernel unshares the packet
        // before a program that writes runs, and who holds this has no other reference into the packet.
        Some(unsafe { &mut *(start as *mut [u8; N]) })
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

    /// Truncates or extends the frame to `length` bytes.
    #[inline(always)]
    pub fn resize(&self, length: u32) -> Option<()> {
        // SAFETY: the context is the program's own.
        (unsafe { bpf_skb_change_tail(self.skb, length, 0) } == 0).then_some(())
    }

    /// Adds zeroed space between the link and the network header.
    #[inline(always)]
    pub fn make_room(&self, bytes: u32) -> Option<()> {
        // SAFETY: the context is the program's own.
        (unsafe { bpf_skb_adjust_room(self.skb, bytes as i32, BPF_ADJ_ROOM_MAC, 0) } == 0).then_some(())
    }

    /// Adds or removes (a negative length) space between the link and the network header. `None` if the kernel refuses,
    /// with the packet unchanged.
    #[inline(always)]
    pub fn change_room(&self, bytes: i32, room: HeadroomChange) -> Option<()> {
        // SAFETY: the context is the program's own.
        (unsafe { bpf_skb_adjust_room(self.skb, bytes, BPF_ADJ_ROOM_MAC, room.flags()) } == 0).then_some(())
    }

    /// Adds directly written bytes, which replace zeros, to a complete checksum. Both offsets are even.
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

    /// Writes by the helper, which updates a complete checksum. The length is constant after inlining.
    #[inline(always)]
    pub fn store_summed(&self, offset: usize, bytes: &[u8]) -> Option<()> {
        let (from, length) = (bytes.as_ptr().cast(), bytes.len() as u32);
        // SAFETY: the context is the program's own, `from` and `length` are those of one slice.
        let result = unsafe { bpf_skb_store_bytes(self.skb, offset as u32, from, length, BPF_F_RECOMPUTE_CSUM.into()) };
        (result == 0).then_some(())
    }

    /// Copies `length` bytes at `offset` into `to`.
    #[inline(always)]
    pub fn load_tail<const N: usize>(&self, offset: u32, length: u32, to: &mut [u8; N]) -> Option<()> {
        let length = tail_length::<N>(length)?;
        // SAFETY: the context is the program's own, and `length` bytes fit into `to`.
        let result = unsafe { bpf_skb_load_bytes(self.skb.cast(), offset, to.as_mut_ptr().cast(), length) };
        (result == 0).then_some(())
    }

    /// Writes the first `length` bytes of `from` at `offset`.
    #[inline(always)]
    pub fn store_tail<const N: usize>(&self, offset: u32, length: u32, from: &[u8; N]) -> Option<()> {
        let length = tail_length::<N>(length)?;
        let flags = BPF_F_RECOMPUTE_CSUM.into();
        // SAFETY: the context is the program's own, and `from` has `length` bytes.
        let result = unsafe { bpf_skb_store_bytes(self.skb, offset, from.as_ptr().cast(), length, flags) };
        (result == 0).then_some(())
    }

    /// Sends a copy of the current packet by a device.
    #[inline(always)]
    pub fn send_clone(&self, ifindex: u32) -> Option<()> {
        // SAFETY: the context is the program's own.
        (unsafe { bpf_clone_redirect(self.skb, ifindex, 0) } == 0).then_some(())
    }

    /// Puts a copy of the packet at the end of its device's input queue.
    #[inline(always)]
    pub fn reinject(&self) -> Option<()> {
        // SAFETY: the context is the program's own.
        (unsafe { bpf_clone_redirect(self.skb, self.ifindex(), BPF_F_INGRESS.into()) } == 0).then_some(())
    }

    /// Link addresses for the next hop.
    #[inline(always)]
    pub fn set_macs(&self, dmac: [u8; 6], smac: [u8; 6]) -> Option<()> {
        self.store(0, dmac)?;
        self.store(6, smac)
    }
}

/// Bytes that the helper sums per call.
const SUMMED: u32 = 512;

struct SumWalk<'a> {
    skb: *mut __sk_buff,
    space: &'a mut Rest,
    offset: u32,
    length: u32,
    done: u32,
    sum: u32,
}

/// Body of the sum: 0 continues, 1 ends it.
unsafe extern "C" fn add_chunk(_index: u64, walk: *mut SumWalk<'_>) -> u64 {
    // SAFETY: `bpf_loop` hands back the pointer that it was given, to a live frame.
    let walk = unsafe { &mut *walk };
    if walk.done >= walk.length {
        return 1;
    }
    let chunk = (opaque(u64::from((walk.length - walk.done).min(SUMMED) - 1)) as u32 & (SUMMED - 1)) + 1;
    // The helper sums words of four bytes, padded with zero.
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

impl Packet {
    /// Sum of the 16-bit words of `length` bytes at `offset`, copied through `space`.
    #[inline(always)]
    pub fn sum(&self, offset: u32, length: u32, space: &mut Rest) -> Option<u32> {
        let mut walk = SumWalk { skb: self.skb(), space, offset, length, done: 0, sum: 0 };
        // SAFETY: the callback has the signature that the helper asks for, and `walk` lives on this frame until the
        // helper returns.
        unsafe { bpf_loop(u32::from(u16::MAX) / SUMMED + 1, add_chunk as *mut c_void, (&raw mut walk).cast(), 0) };
        (walk.done == length).then_some(walk.sum)
    }

    /// Whether the checksum at `at` is partial: the helper changes all others.
    #[inline(always)]
    pub fn is_partial(&self, at: usize) -> Option<bool> {
        let before: [u8; 2] = self.load(at)?;
        // SAFETY: the context is the program's own.
        if unsafe { bpf_l4_csum_replace(self.skb(), at as u32, 0, 1, 2) } != 0 {
            return None;
        }
        let is_same = self.load(at)? == before;
        self.store(at, before)?;
        Some(is_same)
    }

    /// Whether a device will write a checksum before the transport checksum. A pod's packet socket sets the offset
    /// (`PACKET_VNET_HDR`), and the device writes after all hooks, into an address or port that was checked here.
    ///
    /// No field of the context shows the place, so it is read from the kernel's own structure. Out of line, since all packets
    /// of pods pass here.
    #[inline(never)]
    pub fn is_completed_elsewhere(self, headers: &Headers, layout: PacketLayout) -> bool {
        self.is_partial(L3) == Some(true)
            && self.partial_checksum_end(layout).is_none_or(|end| end < headers.checksum_end() as i32)
    }

    /// Where a partial checksum ends, from the start of the frame (`skb_checksum_start_offset` and two bytes after
    /// `csum_offset`).
    #[inline(always)]
    fn partial_checksum_end(self, layout: PacketLayout) -> Option<i32> {
        let [start, offset]: [u16; 2] = self.read_kernel(layout.checksum)?;
        let [head, data]: [u64; 2] = self.read_kernel(layout.head)?;
        let headroom = data.wrapping_sub(head) as i32;
        Some(i32::from(start) - headroom + i32::from(offset) + 2)
    }

    /// Reads the kernel's structure of the packet, to which the context points.
    #[inline(always)]
    fn read_kernel<T>(self, offset: u16) -> Option<T> {
        let mut value = MaybeUninit::<T>::uninit();
        let from = (self.skb() as usize + usize::from(offset)) as *const c_void;
        // SAFETY: the helper writes as many bytes as `value` has, or fails; any address may be read by it.
        let result = unsafe { bpf_probe_read_kernel(value.as_mut_ptr().cast(), size_of::<T>() as u32, from) };
        // SAFETY: it has been written, with integers.
        if result == 0 { Some(unsafe { value.assume_init() }) } else { None }
    }

    /// Clears the kernel's request for a device to complete the transport checksum. The kernel clears it when the start
    /// of the sum leaves the packet, so the head of the packet is removed and restored.
    #[inline(always)]
    pub fn forget_partial_checksum(&self, space: &mut Rest) -> Option<()> {
        /// More than the longest IPv4 header and the link header before it.
        const HEAD: u32 = 80;
        self.load_tail(L3 as u32, HEAD, space)?;
        for bytes in [-(HEAD as i32), HEAD as i32] {
            // SAFETY: the context is the program's own.
            if unsafe { bpf_skb_adjust_room(self.skb(), bytes, BPF_ADJ_ROOM_MAC, 0) } != 0 {
                return None;
            }
        }
        self.store_tail(L3 as u32, HEAD, space)
    }
}

/// Purpose of a change of space.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum HeadroomChange {
    /// Headers of the packet's family.
    Plain,
    /// IP, UDP, VXLAN and Ethernet are added before the packet.
    EncapsulateV4,
    EncapsulateV6,
    /// The inner packet has that family, and the outer one the other (Linux 6.3).
    DecapsulateV4,
    DecapsulateV6,
}

impl HeadroomChange {
    #[inline(always)]
    pub const fn flags(self) -> u64 {
        // linux/bpf.h; the length of the inner link header is in the uppermost byte.
        const FIXED_GSO: u64 = 1;
        const ENCAP_L3_IPV4: u64 = 1 << 1;
        const ENCAP_L3_IPV6: u64 = 1 << 2;
        const ENCAP_L4_UDP: u64 = 1 << 4;
        const ENCAP_L2_ETH: u64 = 1 << 6;
        const DECAP_L3_IPV4: u64 = 1 << 7;
        const DECAP_L3_IPV6: u64 = 1 << 8;
        const TUNNEL: u64 = FIXED_GSO | ENCAP_L4_UDP | ENCAP_L2_ETH | (L3 as u64) << 56;
        match self {
            Self::Plain => 0,
            Self::EncapsulateV4 => TUNNEL | ENCAP_L3_IPV4,
            Self::EncapsulateV6 => TUNNEL | ENCAP_L3_IPV6,
            Self::DecapsulateV4 => DECAP_L3_IPV4,
            Self::DecapsulateV6 => DECAP_L3_IPV6,
        }
    }
}
