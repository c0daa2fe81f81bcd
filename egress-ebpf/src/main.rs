//! The TC programs of egress-agent, compiled to one eBPF object.
#![no_std]
#![no_main]

use aya_ebpf::{macros::classifier, programs::TcContext};

/// Leave the packet to whoever is behind us on the hook (TCX_NEXT, TC_ACT_UNSPEC).
const LEAVE_ALONE: i32 = -1;

/// Pod traffic that enters the host.
#[classifier]
pub fn steer(_ctx: TcContext) -> i32 {
    LEAVE_ALONE
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
