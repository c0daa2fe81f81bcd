//! What the verifier goes through apart: global functions, as it calls them, each of them gone through once for a program.
//!
//! A function that is not global is gone through again for each way that leads to it and in everything that its caller may
//! know by then, and Linux 6.1 finds few of these ways to be the same: the rest of a road behind what all its packets have in
//! common would be too much (a million instructions). A global one begins with nothing known, and nothing is known of what
//! it returns.
//!
//! So it takes the packet alone, and looks up what belongs to the run. For that the caller has no reference into the
//! workspace while it calls: see `run` of `main`. Plain packets of recent flows come through none of these.
#![expect(unsafe_code, reason = "functions with names that the kernel sees")]

use aya_ebpf::bindings::__sk_buff;
use aya_ebpf::programs::TcContext;
use egress_common::abi::{Config, Verdict};
use egress_common::wire::nd;

use crate::hidden::hidden;
use crate::packet::Packet;
use crate::workspace::{Workspace, workspace};
use crate::{Outcome, hold, numbers, passing, roads};

/// For each name: a global function that does what the inner function does, and what calls it.
macro_rules! apart {
    ($($name:ident => $symbol:ident: $inner:path;)*) => {$(
        #[inline(always)]
        pub fn $name(packet: Packet) -> Outcome {
            // What the compiler knows of the function, the verifier does not.
            Outcome(hidden($symbol(packet.skb())))
        }

        // SAFETY: no other function of the object has this name.
        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $symbol(skb: *mut __sk_buff) -> u64 {
            walk(skb, $inner).word()
        }
    )*};
}

apart! {
    from_pod => road_from_pod: roads::from_pod_uncached;
    from_overlay => road_from_overlay: roads::from_overlay_uncached;
    handover_reply => road_handover_reply: passing::handover_reply;
    neighbour => road_neighbour: roads::neighbour;
    from_netdev => road_from_netdev: roads::from_netdev_uncached;
    hold => fragment_hold: hold::hold;
    release => fragment_release: hold::release;
}

#[inline(always)]
fn walk(skb: *mut __sk_buff, road: impl Fn(Packet, &Config, &mut Workspace) -> Outcome) -> Outcome {
    // Both are there, or the run would have ended before.
    let (Some(config), Some(workspace)) = (numbers::config(), workspace()) else {
        return Outcome::done(Verdict::NotReady);
    };
    road(Packet::again(&TcContext::new(skb)), config, workspace)
}

/// The message of neighbour discovery that the packet is, where it may be believed. What comes of its options and of its
/// checksum would be gone through again for each number of them.
#[inline(always)]
pub fn believed(packet: Packet) -> Option<nd::Message> {
    nd::Message::from_word(hidden(neighbour_message(packet.skb())))
}

// SAFETY: no other function of the object has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn neighbour_message(skb: *mut __sk_buff) -> u64 {
    nd::Message::parse(&Packet::again(&TcContext::new(skb))).map_or(0, nd::Message::word)
}
