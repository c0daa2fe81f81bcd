//! Checksums that a sender has left to a device: whether one is, where it goes, and how to complete it here.
#![expect(unsafe_code, reason = "packet access is one of the three places for it")]

use core::ffi::c_void;
use core::ptr;

use aya_ebpf::bindings::__sk_buff;
use aya_ebpf::bindings::bpf_adj_room_mode::BPF_ADJ_ROOM_MAC;
use aya_ebpf::helpers::generated::{
    bpf_csum_diff, bpf_l4_csum_replace, bpf_loop, bpf_skb_adjust_room, bpf_skb_change_tail, bpf_skb_load_bytes,
};
use egress_common::wire::{Frame, Headers, L3};

use crate::fragment::Rest;
use crate::hidden::hidden;
use crate::packet::Packet;

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
    let chunk = (hidden(u64::from((walk.length - walk.done).min(SUMMED) - 1)) as u32 & (SUMMED - 1)) + 1;
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

impl Packet {
    /// Sum of the 16-bit words of `length` bytes at `offset`, by way of `space`.
    #[inline(always)]
    pub fn sum(&self, offset: u32, length: u32, space: &mut Rest) -> Option<u32> {
        let mut walk = SumWalk { skb: self.skb(), space, offset, length, done: 0, sum: 0 };
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
        if unsafe { bpf_l4_csum_replace(self.skb(), at as u32, 0, 1, 2) } != 0 {
            return None;
        }
        let is_same = self.load(at)? == before;
        self.store(at, before)?;
        Some(is_same)
    }

    /// Whether a device is to write a checksum in front of the transport's own. A pod's packet socket names the place
    /// (`PACKET_VNET_HDR`), and a device writes behind all hooks: into an address or a port that was judged here.
    ///
    /// No field shows the place, but the kernel refuses to cut a packet in front of its end. Where it does not refuse, the
    /// packet is cut, so the caller drops it. Out of line, since all packets of pods pass here.
    #[inline(never)]
    pub fn is_completed_elsewhere(self, heads: &Headers) -> bool {
        const EINVAL: i64 = -22;
        if self.is_partial(L3) != Some(true) {
            return false;
        }
        // SAFETY: the context is the program's own.
        let refused = unsafe { bpf_skb_change_tail(self.skb(), heads.checksum_end() - 1, 0) };
        refused != EINVAL
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
            if unsafe { bpf_skb_adjust_room(self.skb(), bytes, BPF_ADJ_ROOM_MAC, 0) } != 0 {
                return None;
            }
        }
        self.store_tail(L3 as u32, HEAD, space)
    }
}
