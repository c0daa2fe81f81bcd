//! The workspace: per-CPU scratch space for data that would exceed the 512 bytes of stack.
//!
//! It holds the packet's headers, its route, copies of map elements, and headers under construction. TC programs of one CPU
//! do not interrupt one another, so a run owns it, except that sending a clone runs other programs in between.
#![expect(unsafe_code, reason = "map and packet access; see `maps` and `packet`")]

use aya_ebpf::btf_maps::PerCpuArray;
use aya_ebpf::macros::btf_map;
use egress_common::abi::{
    BlockOwner, Config, Direction, ExposedPort, Flow, HandoverEntry, NatEntry, Owned, PodEntry, PortBlock, Tuple,
    Verdict,
};
use egress_common::decide::from_overlay::Outer;
use egress_common::decide::mtu;
use egress_common::wire::{Frame, Headers, L4, Quote};

use crate::expiry::ExpiryCheck;
use crate::fib::Route;
use crate::flow_cache::Pending;
use crate::fragment::{self, Rest};
use crate::icmp::Buffer;
use crate::packet::Packet;

/// This CPU's own.
#[btf_map(name = "workspace")]
pub static WORKSPACE: PerCpuArray<Workspace, 1> = PerCpuArray::new();

#[repr(C)]
pub struct Workspace {
    /// Headers of this run's packet; parsed before any read.
    pub headers: Headers,
    /// Quote of an ICMP error, after parsing.
    pub quote: Quote,
    /// Outer headers of a packet from the overlay.
    pub outer: Outer,
    /// Route of this run's packet, after the lookup.
    pub route: Route,
    /// The part of a packet that is sent as its second fragment.
    pub rest: Rest,
    /// Headers under construction.
    pub buffer: Buffer,
    /// A key under construction.
    pub key: Tuple,
    /// Another one, of `exposed`.
    pub exposed_port: ExposedPort,
    /// A NAT entry under construction.
    pub nat_entry: NatEntry,
    /// A port block under construction, and its owner.
    pub block: PortBlock,
    pub block_owner: BlockOwner,
    /// For fragments that arrive before their first one.
    pub hold: fragment::HoldSpace,
    /// Copies of found elements.
    pub found: Found,
    /// The NAT entry whose expiry is checked.
    pub checked: ExpiryCheck,
    /// CLOCK_MONOTONIC (ns) of this run, read on demand; zero before.
    pub now_ns: u64,
    /// Before these times, no drop and no conflict is reported.
    pub next_report_ns: [u64; 2],
    /// Flow cache entry for the outcome of this run.
    pub pending: Pending,
    /// Whether `from_netdev` has decapsulated this run's packet.
    pub is_inner: bool,
}

/// Copies of elements, each valid until the next lookup in its map.
#[repr(C)]
pub struct Found {
    pub nat_entry: NatEntry,
    pub flow: Flow,
    pub owned: Owned,
    pub handover: HandoverEntry,
    pub pod: PodEntry,
    pub block: BlockOwner,
}

/// Buffers for copies of map elements.
#[inline(always)]
pub fn found() -> Option<&'static mut Found> {
    // SAFETY: the element is this CPU's own, as for `workspace`, and no other reference to it is alive.
    WORKSPACE.get_ptr_mut(0).map(|workspace| unsafe { &mut (*workspace).found })
}

/// Scratch space of `expiry`, for packets.
#[inline(always)]
pub fn checked() -> Option<&'static mut ExpiryCheck> {
    // SAFETY: as for `found`; one function at a time uses them.
    WORKSPACE.get_ptr_mut(0).map(|workspace| unsafe { &mut (*workspace).checked })
}

/// Whether `from_netdev` has decapsulated this run's packet.
#[inline(always)]
pub fn is_inner() -> bool {
    // SAFETY: as for `found`; written before it is read.
    WORKSPACE.get_ptr_mut(0).is_some_and(|workspace| unsafe { (*workspace).is_inner })
}

/// Flow cache entry for the outcome of this run.
#[inline(always)]
pub fn pending() -> Option<&'static Pending> {
    // SAFETY: as for `found`; written before it is read.
    WORKSPACE.get_ptr_mut(0).map(|workspace| unsafe { &(*workspace).pending })
}

#[inline(always)]
pub fn workspace() -> Option<&'static mut Workspace> {
    // SAFETY: the element is this CPU's own; TC programs run with bottom halves off and do not interrupt one another, and
    // one run asks once.
    WORKSPACE.get_ptr_mut(0).map(|workspace| unsafe { &mut *workspace })
}

/// The common arguments of all steps of a path.
#[derive(Clone, Copy)]
pub struct Run<'a> {
    pub packet: Packet,
    pub config: &'a Config,
    pub headers: &'a Headers,
}

impl Run<'_> {
    /// Length (bytes, from the IP header on) of the largest packet that this one will be on the wire.
    #[inline(always)]
    pub fn wire_length(&self) -> u32 {
        mtu::wire_length(self.packet.len() as u32, self.packet.gso_size(), self.headers)
    }
}

/// Reads the headers into the workspace. Out of line, so that its frame is released before the decision.
#[inline(never)]
pub fn parse(packet: Packet, headers: &mut Headers, direction: Direction) -> Result<(), Verdict> {
    packet.pull_long_headers();
    if headers.read(&packet, direction).is_none() {
        let why = headers.why_unread();
        *headers = Headers::NONE;
        return Err(why);
    }
    Ok(())
}

/// Reads the quote of an ICMP error into the workspace.
#[inline(always)]
pub fn quoted<'a>(packet: Packet, headers: &Headers, quote: &'a mut Quote) -> &'a Quote {
    if headers.l4 == L4::IcmpError {
        read_quote(packet, headers, quote);
    }
    quote
}

/// Out of line as [`parse`].
#[inline(never)]
fn read_quote(packet: Packet, headers: &Headers, quote: &mut Quote) {
    if quote.read(&packet, headers).is_none() {
        *quote = Quote::NONE;
    }
}
