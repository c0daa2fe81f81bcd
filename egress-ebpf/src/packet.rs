//! The packet: reading and writing bytes, lengths, what the kernel says of it. One of the three places where unsafe lives.
//!
//! Every access checks against `data_end` right before it, as the verifier asks; pointers are never kept over a helper
//! that may move the packet. What is done to a packet with these stands in `rewrite`, `quoted`, `partial` and `fragment`.
#![expect(unsafe_code, reason = "packet access is one of the three places for it")]

use core::arch::asm;
use core::mem::offset_of;
use core::ptr;

use aya_ebpf::bindings::bpf_adj_room_mode::BPF_ADJ_ROOM_MAC;
use aya_ebpf::bindings::{__sk_buff, BPF_F_INGRESS, BPF_F_RECOMPUTE_CSUM};
use aya_ebpf::helpers::generated::{
    bpf_clone_redirect, bpf_csum_update, bpf_skb_adjust_room, bpf_skb_change_tail, bpf_skb_load_bytes,
    bpf_skb_pull_data, bpf_skb_store_bytes, bpf_skb_vlan_pop,
};
use aya_ebpf::programs::TcContext;
use egress_common::abi::Config;
use egress_common::wire::{ETH_LEN, Frame, L3, PROTO_TCP, PROTO_UDP, csum, ethertype, ipv4, ipv6};

use crate::hidden::hidden;
use crate::room::Room;

/// Headers that are read directly must lie in the linear area: Ethernet, IP with options or two extension headers, TCP.
const HEADS: u32 = 14 + 60 + 20;
/// Likewise where there is more to walk: IPv6 extension headers, or a quoted packet with its own.
const LONG_HEADS: u32 = 512;
/// `pkt_type` of a frame whose link address is this host's, and of one whose is somebody else's.
const PACKET_HOST: u32 = 0;
const PACKET_OTHERHOST: u32 = 3;
/// `tc_index` of what has come in by the management port and was left to the stack. Nothing but queueing disciplines that
/// the kernel has no more (dsmark) and filters by it (tcindex) reads that field.
const OF_POD: u32 = 0xe67e;
/// The number of the network in a VLAN tag; the rest is priority.
const VLAN_NUMBER: u32 = 0x0fff;
/// Offsets of transport headers stay below this; the mask shows it to the verifier.
pub const OFFSET_MASK: usize = 0x3fff;

/// A length of 1..=MOST, in a form that shows both bounds to the verifier.
#[inline(always)]
fn tail_length<const MOST: usize>(length: u32) -> Option<u32> {
    let less_one = hidden(u64::from(length.wrapping_sub(1)));
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

    /// The packet of this run once more, as it is by now.
    #[inline(always)]
    pub fn again(ctx: &TcContext) -> Self {
        Self { skb: ctx.skb.skb }
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
        self.set_field::<{ offset_of!(__sk_buff, mark) }>(mark);
    }

    #[inline(always)]
    pub fn set_priority(&self, priority: u32) {
        self.set_field::<{ offset_of!(__sk_buff, priority) }>(priority);
    }

    /// Says that the packet came from a pod, wherever the stack sends it. Kept when an IP or link header is changed or taken
    /// off; a pod cannot take it off, since this is written behind everything that it does.
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
        // By hand: the compiler likes to keep the field's address for later, and the verifier wants the context's own
        // address with the field's place in the instruction.
        // SAFETY: the context is valid for the whole run, and the field is one of those above.
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

    /// Came in by a device of this node. Where the kernel cuts an IPv6 packet into fragments it forgets that device
    /// (`ip6_copy_metadata`), but not what says that a pod has sent it.
    #[inline(always)]
    pub fn is_forwarded(&self) -> bool {
        self.field(|skb| skb.ingress_ifindex) != 0 || self.is_of_pod()
    }

    /// Came in by the device that it is about to leave by.
    #[inline(always)]
    pub fn is_returning(&self) -> bool {
        self.field(|skb| skb.ingress_ifindex) == self.ifindex()
    }

    /// Of another network: a VLAN device of the host takes it, or has sent it. A tag without a number says how urgent the
    /// packet is, not whose.
    #[inline(always)]
    pub fn is_tagged(&self) -> bool {
        self.field(|skb| skb.vlan_present) != 0 && self.field(|skb| skb.vlan_tci) & VLAN_NUMBER != 0
    }

    /// By its link address.
    #[inline(always)]
    pub fn is_for_another_host(&self) -> bool {
        self.field(|skb| skb.pkt_type) == PACKET_OTHERHOST
    }

    /// Whether a program of this node has redirected the packet to the device that it is about to leave by. The sign has
    /// served then, and is taken off.
    #[inline(always)]
    pub fn takes_off_redirected(&self, config: &Config) -> bool {
        let is_ours = self.field(|skb| skb.priority) == config.redirected_priority();
        if is_ours {
            self.set_priority(0);
        }
        is_ours
    }

    /// Puts on the sign of a packet that bears an egress IP and goes by the kernel's neighbour entry, which may keep it until the
    /// neighbour is known. The mark says whose egress IP it is: nothing reads it before the device's own egress hook.
    #[inline(always)]
    pub fn set_waiting(&self, config: &Config, egress_id: u32) {
        self.set_priority(config.waiting_priority());
        self.set_mark(egress_id);
    }

    #[inline(always)]
    pub fn is_waiting(&self, config: &Config) -> bool {
        self.field(|skb| skb.priority) == config.waiting_priority()
    }

    /// The egress ID of a packet with that sign, which is taken off.
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

    /// Makes the packet ready to be redirected: takes off what belongs to the device that it came by (the mark, a tag
    /// without a number), and puts on the sign that [`takes_off_redirected`](Self::takes_off_redirected) asks for.
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

    /// The first bytes of the frame, to read and to write, until a helper is called that may move the packet.
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

    /// Sends a copy of the packet as it is now by a device.
    #[inline(always)]
    pub fn send_clone(&self, ifindex: u32) -> Option<()> {
        // SAFETY: the context is the program's own.
        (unsafe { bpf_clone_redirect(self.skb, ifindex, 0) } == 0).then_some(())
    }

    /// Lets a copy of the packet as it is now come in by its device once more, behind what has come in already.
    #[inline(always)]
    pub fn begin_anew(&self) -> Option<()> {
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
