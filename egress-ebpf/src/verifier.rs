//! Code that exists only for the verifier.
//!
//! - **[`opaque`]**: the compiler may check one register and use a copy, drop a mask after a comparison, or merge two
//!   null checks.
//! - **Global functions** are verified once, without caller state; static ones again for each path, which would exceed
//!   a million instructions on Linux 6.1. They take only the packet, and look up config and workspace themselves.
//! - **`#[inline(never)]`**: frames of calls in sequence share the 512 bytes of stack, inlined ones add up.
//! - **One register**: larger results go through the caller's frame, and global functions return a number.
//!   `Option<u64>` is larger, so the change of a sum has a reserved value (`rewrite::NOT_WRITTEN`).
//! - **Structs instead of enums** in the workspace: the verifier refuses to copy undefined fields of other variants.
#![expect(unsafe_code, reason = "map and packet access; see `maps` and `packet`")]

use core::arch::asm;

use aya_ebpf::bindings::__sk_buff;
use aya_ebpf::programs::TcContext;
use egress_common::abi::{Config, Verdict};
use egress_common::wire::nd;

use crate::packet::Packet;
use crate::workspace::{Workspace, workspace};
use crate::{Outcome, fragment, maps};

/// Returns its argument; opaque to the compiler.
#[inline(always)]
pub fn opaque(number: u64) -> u64 {
    let mut opaque = number;
    // SAFETY: a register is moved to itself.
    unsafe { asm!("{0} = {0}", inout(reg) opaque, options(pure, nomem, nostack, preserves_flags)) };
    opaque
}

/// For each name: a global function that wraps the inner function, and its caller.
macro_rules! global {
    ($($name:ident => $symbol:ident: $inner:path;)*) => {$(
        #[inline(always)]
        pub fn $name(packet: Packet) -> Option<Outcome> {
            // The compiler knows the range of the return value, the verifier does not.
            Outcome::from_bits(opaque($symbol(packet.skb())))
        }

        // SAFETY: no other function of the object has this name.
        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $symbol(skb: *mut __sk_buff) -> u64 {
            Outcome::to_bits(on_packet(skb, $inner))
        }
    )*};
}

global! {
    from_pod => path_from_pod: crate::from_pod::uncached;
    from_overlay => path_from_overlay: crate::from_overlay::uncached;
    handover_reply => path_handover_reply: crate::from_overlay::handover_reply;
    neighbour => path_neighbour: crate::from_netdev::neighbour_discovery;
    from_netdev => path_from_netdev: crate::from_netdev::uncached;
    hold => fragment_hold: fragment::hold;
    release => fragment_release: fragment::release;
}

#[inline(always)]
fn on_packet<O: Into<Option<Outcome>>>(
    skb: *mut __sk_buff,
    inner: impl Fn(Packet, &Config, &mut Workspace) -> O,
) -> Option<Outcome> {
    // Both exist, because the run would have ended before.
    let (Some(config), Some(workspace)) = (maps::config(), workspace()) else {
        return Some(Outcome::done(Verdict::NotReady));
    };
    inner(Packet::again(&TcContext::new(skb)), config, workspace).into()
}

/// The packet's neighbour discovery message, if it is valid. As a static function it would be verified for each number
/// of options.
#[inline(always)]
pub fn believed(packet: Packet) -> Option<nd::NdMessage> {
    nd::NdMessage::from_word(opaque(neighbour_message(packet.skb())))
}

// SAFETY: no other function of the object has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn neighbour_message(skb: *mut __sk_buff) -> u64 {
    nd::NdMessage::parse(&Packet::again(&TcContext::new(skb))).map_or(0, nd::NdMessage::word)
}
