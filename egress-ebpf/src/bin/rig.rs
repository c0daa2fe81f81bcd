//! The benchmark's rig: programs that restore a packet and then run the program under test by a tail call.
//!
//! `BPF_PROG_TEST_RUN` runs a program many times on one packet and restores nothing: the second run would see a
//! translated or encapsulated packet with a lower TTL. So the benchmark repeats `again`, which restores the length,
//! writes the frame of the next flow and ends in a tail call. A run with `nothing` as the subject measures the
//! overhead, which the benchmark subtracts.
#![no_std]
#![no_main]
#![expect(unsafe_code, reason = "packet and map access as in the programs themselves")]

use core::ptr;

use aya_ebpf::bindings::TC_ACT_UNSPEC;
use aya_ebpf::bindings::bpf_adj_room_mode::BPF_ADJ_ROOM_MAC;
use aya_ebpf::btf_maps::{Array, ProgramArray};
use aya_ebpf::helpers::generated::bpf_skb_adjust_room;
use aya_ebpf::macros::{btf_map, classifier};
use aya_ebpf::programs::TcContext;
use egress_common::abi::{RIG_FRAME, Rig};

#[btf_map(name = "rig")]
static RIG: Array<Rig, 1> = Array::new();
#[btf_map(name = "subjects")]
static SUBJECTS: ProgramArray<16> = ProgramArray::new();

/// Overhead of the overlay over IPv4.
const OVERHEAD: i32 = 50;

/// Restores the packet of the next flow, then runs the subject.
#[classifier]
pub fn again(ctx: TcContext) -> i32 {
    let Some(rig) = RIG.get_ptr_mut(0) else { return -2 };
    // SAFETY: the pointer of a lookup is valid until the program ends; one benchmark runs at a time.
    let rig = unsafe { &mut *rig };
    if ctx.len() as usize != RIG_FRAME {
        let change = RIG_FRAME as i32 - ctx.len() as i32;
        if adjust(&ctx, change) != 0 {
            return -3;
        }
    }
    if restore(&ctx, rig).is_none() {
        return -4;
    }
    TcContext::new(ctx.skb.skb).set_mark(rig.mark);
    // SAFETY: the context is the program's own, and the field one that a program may write.
    unsafe { (*ctx.skb.skb).priority = rig.priority };
    // SAFETY: the context is the program's own.
    unsafe { SUBJECTS.tail_call(&ctx, rig.subject) };
    // The call returns if there is no such program.
    -5
}

#[inline(always)]
fn restore(ctx: &TcContext, rig: &mut Rig) -> Option<()> {
    let flow = rig.next;
    rig.next = flow + rig.stride;
    if rig.next >= rig.flows {
        rig.next -= rig.flows;
    }
    let start = ctx.data();
    if start + RIG_FRAME > ctx.data_end() {
        return None;
    }
    // SAFETY: the frame's bytes lie within the linear area, checked above.
    unsafe { ptr::copy_nonoverlapping(rig.frame.as_ptr(), start as *mut u8, RIG_FRAME) };
    // Ports run through 2^15, then the destination changes.
    let port = (rig.first_port + (flow & 0x7fff)) as u16;
    put(ctx, rig.port_at, port.to_be_bytes())?;
    put(ctx, rig.destination_at, (rig.first_destination + (flow >> 15)).to_be_bytes())?;
    let source = flow.checked_rem(rig.sources).unwrap_or(0);
    put(ctx, rig.source_at, (rig.first_source + source).to_be_bytes())
}

/// Writes at an offset that is not zero.
#[inline(always)]
fn put<const N: usize>(ctx: &TcContext, at: u32, bytes: [u8; N]) -> Option<()> {
    if at == 0 {
        return Some(());
    }
    let start = ctx.data() + (at & 0xff) as usize;
    if start + N > ctx.data_end() {
        return None;
    }
    // SAFETY: within the linear area, checked above.
    unsafe { ptr::write_unaligned(start as *mut [u8; N], bytes) };
    Some(())
}

#[inline(always)]
fn adjust(ctx: &TcContext, bytes: i32) -> i64 {
    // SAFETY: the context is the program's own.
    unsafe { bpf_skb_adjust_room(ctx.skb.skb, bytes, BPF_ADJ_ROOM_MAC, 0) }
}

#[classifier]
pub fn nothing(_ctx: TcContext) -> i32 {
    TC_ACT_UNSPEC
}

/// As long as the overlay's headers; `again` removes it.
#[classifier]
pub fn grow(ctx: TcContext) -> i32 {
    adjust(&ctx, OVERHEAD) as i32
}

/// Run by itself on a long packet.
#[classifier]
pub fn shrink(ctx: TcContext) -> i32 {
    adjust(&ctx, -OVERHEAD) as i32
}

/// Never reached: a panicking path is one that the verifier refuses.
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

/// The kernel lends most helpers to GPL-compatible programs only.
#[unsafe(no_mangle)]
#[unsafe(link_section = "license")]
static LICENSE: [u8; 4] = *b"GPL\0";
