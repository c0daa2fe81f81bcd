//! The TC programs of egress-agent, compiled to one eBPF object.
//!
//! Each program wraps one decision of `egress_common::decide`. It parses the headers, calls the decision, rewrites and
//! sends the packet accordingly, counts, and returns. One match turns verdicts into TC actions ([`Outcome::finish`]),
//! and its value is what the program returns.
//!
//! A packet takes one of three paths, fastest first:
//!
//! 1. The [`FastCheck`] of each hook but `from_pod` and `from_overlay` leaves packets alone without parsing.
//! 2. The flow cache repeats the outcome of the flow's previous packet ([`flow_cache`]).
//! 3. The decision reads the maps: `uncached` of each hook, a global function ([`verifier`]).
#![no_std]
#![no_main]
// For the compiler barrier in `opaque`, and one store in `packet`.
#![feature(asm_experimental_arch)]
// For compare-and-swap and counting, which this target has as intrinsics only.
#![feature(core_intrinsics)]
#![expect(internal_features, reason = "atomic operations; see `maps`")]
#![expect(clippy::needless_borrows_for_generic_args, reason = "a key by value is one more copy on 512 bytes of stack")]

mod counters;
mod expiry;
mod fib;
mod flow_cache;
mod fragment;
mod from_netdev;
mod from_overlay;
mod from_pod;
mod icmp;
mod lease;
#[cfg(feature = "log")]
mod log;
mod maps;
mod nat;
mod overlay;
mod pace;
mod packet;
mod rewrite;
mod to_netdev;
mod to_pod;
mod verifier;
mod workspace;

use core::num::NonZeroU64;

use aya_ebpf::bindings::{TC_ACT_SHOT, TC_ACT_UNSPEC};
use aya_ebpf::macros::classifier;
use aya_ebpf::programs::TcContext;
use egress_common::abi::{Class, Config, SweepRequest, Verdict};

use crate::packet::Packet;
use crate::workspace::Workspace;

/// Outcome of a packet: the verdict in the upper half; in the lower half the TC action, or the exceeded MTU. Neither is
/// zero, so that an `Option` of it is one register too; see [`verifier`].
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Outcome(NonZeroU64);

impl Outcome {
    /// The bits of a register, as [`to_bits`](Self::to_bits) made them.
    #[inline(always)]
    fn from_bits(bits: u64) -> Option<Self> {
        NonZeroU64::new(bits).map(Self)
    }

    /// Zero for none.
    #[inline(always)]
    fn to_bits(outcome: Option<Self>) -> u64 {
        outcome.map_or(0, |outcome| outcome.0.get())
    }

    #[inline(always)]
    fn new(verdict: Verdict, action: i32) -> Self {
        let bits = u64::from(verdict.index()) << 32 | u64::from(action as u32);
        // No verdict uses TC_ACT_OK, which is zero.
        Self(NonZeroU64::new(bits).unwrap_or(NonZeroU64::MIN))
    }

    #[inline(always)]
    fn done(verdict: Verdict) -> Self {
        Self::new(verdict, TC_ACT_SHOT)
    }

    /// For callers that always have an outcome, which the types do not show.
    #[inline(always)]
    fn unexpected(_: Packet) -> Self {
        Self::done(Verdict::BadState)
    }

    /// Larger than `mtu`; nothing has been written to the packet yet.
    #[inline(always)]
    fn too_big(mtu: u32) -> Self {
        Self::new(Verdict::MtuExceeded, mtu as i32)
    }

    /// The exceeded MTU, if that is the outcome.
    #[inline(always)]
    fn mtu_exceeded(self) -> Option<u32> {
        self.is(Verdict::MtuExceeded).then_some(self.0.get() as u32)
    }

    #[inline(always)]
    fn is(self, verdict: Verdict) -> bool {
        self.index() == verdict.index()
    }

    /// `verdict` if the redirect succeeds, otherwise the drop reason.
    #[inline(always)]
    fn redirected(verdict: Verdict, result: Result<i32, Verdict>) -> Self {
        match result {
            Ok(action) => Self::new(verdict, action),
            Err(reason) => Self::done(reason),
        }
    }

    #[inline(always)]
    fn verdict(self) -> Verdict {
        // Only verdicts are stored.
        Verdict::from_index(self.index()).unwrap_or(Verdict::BadState)
    }

    #[inline(always)]
    fn index(self) -> u32 {
        (self.0.get() >> 32) as u32
    }

    /// Counts the verdict and returns the TC action. An untouched packet gets TC_ACT_UNSPEC (TCX_NEXT), never
    /// TC_ACT_OK, which would hide it from later programs.
    #[inline(always)]
    fn finish(self, packet: Packet, length: u32) -> i32 {
        let verdict = self.verdict();
        counters::verdict(verdict, length);
        #[cfg(feature = "log")]
        log::verdict(packet, verdict, length);
        match verdict.class() {
            Class::Pass => TC_ACT_UNSPEC,
            Class::Redirect | Class::Answer => self.0.get() as i32,
            Class::Hold => TC_ACT_SHOT,
            Class::Drop => {
                counters::report(packet, verdict, length);
                TC_ACT_SHOT
            }
        }
    }
}

/// What a few words of a packet show, before its headers are parsed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum FastCheck {
    Undecided,
    /// Counted as [`Verdict::NotOurs`], and left to the stack.
    LeftAlone,
    /// To this node's tunnel endpoint, by its headers.
    Overlay,
}

/// Runs one hook. Without a configuration from the agent every packet gets `unready`. `fast_check` leaves packets alone
/// without parsing. If `begin` has no outcome, `rest` continues without references into the workspace.
#[inline(always)]
fn run(
    ctx: &TcContext,
    unready: Verdict,
    fast_check: impl Fn(Packet, &Config) -> FastCheck,
    begin: impl Fn(Packet, &Config, &mut Workspace, FastCheck) -> Option<Outcome>,
    rest: impl Fn(Packet) -> Outcome,
) -> i32 {
    let length = ctx.len();
    let packet = Packet::new(ctx);
    let (Some(config), Some(workspace)) = (maps::config(), workspace::workspace()) else {
        counters::verdict(unready, length);
        return if unready.class() == Class::Drop { TC_ACT_SHOT } else { TC_ACT_UNSPEC };
    };
    let checked = fast_check(packet, config);
    if checked == FastCheck::LeftAlone {
        #[cfg(feature = "log")]
        log::left_alone(packet, workspace, length);
        counters::verdict(Verdict::NotOurs, length);
        return TC_ACT_UNSPEC;
    }
    workspace.now_ns = 0;
    let outcome = match begin(packet, config, workspace, checked) {
        Some(outcome) => outcome,
        None => rest(packet),
    };
    outcome.finish(packet, length)
}

/// Management port, TC ingress: packets from pods of this node.
#[classifier]
pub fn from_pod(ctx: TcContext) -> i32 {
    let action = run(&ctx, Verdict::NotConfigured, |_, _| FastCheck::Undecided, from_pod::begin, from_pod::finish);
    if action == TC_ACT_UNSPEC {
        let packet = Packet::new(&ctx);
        packet.set_of_pod();
        // For the leak guard in nftables. Without one, zero: no priority of a pod's socket stays, which could be that of
        // redirected packets.
        let seen = maps::seen_priority().unwrap_or(0);
        packet.set_priority(seen);
    }
    action
}

/// Management port, TC egress: packets to pods of this node.
#[classifier]
pub fn to_pod(ctx: TcContext) -> i32 {
    run(
        &ctx,
        Verdict::NotConfigured,
        to_pod::fast_check,
        |packet, config, workspace, _| Some(to_pod::begin(packet, config, workspace)),
        Outcome::unexpected,
    )
}

/// Overlay device, TC ingress: packets from other nodes.
#[classifier]
pub fn from_overlay(ctx: TcContext) -> i32 {
    // The stack would forward such a packet with the pod's address.
    run(&ctx, Verdict::NotReady, |_, _| FastCheck::Undecided, from_overlay::begin, from_overlay::finish)
}

/// Uplink and further egress interfaces, TC ingress: packets from outside.
#[classifier]
pub fn from_netdev(ctx: TcContext) -> i32 {
    let fast_check = |packet, config: &Config| {
        from_netdev::note_heartbeat(packet, config);
        from_netdev::fast_check(packet, config)
    };
    run(&ctx, Verdict::NotConfigured, fast_check, from_netdev::begin, from_netdev::finish)
}

/// Uplink and further egress interfaces, TC egress: packets that leave the node.
#[classifier]
pub fn to_netdev(ctx: TcContext) -> i32 {
    run(
        &ctx,
        Verdict::NotConfigured,
        to_netdev::fast_check,
        |packet, config, workspace, _| Some(to_netdev::begin(packet, config, workspace)),
        Outcome::unexpected,
    )
}

/// Never attached: the agent runs it by BPF_PROG_TEST_RUN to remove entries. The test packet's mark is the request.
/// Returns the number of removed keys.
#[classifier]
pub fn sweep(ctx: TcContext) -> i32 {
    SweepRequest::of_mark(Packet::new(&ctx).mark()).map_or(0, expiry::sweep)
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
