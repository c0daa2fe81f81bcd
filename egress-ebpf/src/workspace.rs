//! The workspace: what would crowd the 512 bytes of stack, and what one CPU keeps from one run to the next.
#![expect(unsafe_code, reason = "map access is one of the three places for it")]

use aya_ebpf::btf_maps::PerCpuArray;
use aya_ebpf::macros::btf_map;
use egress_common::abi::{Flow, HandoverEntry, NatEntry, Owned, PodEntry, Tuple};
use egress_common::decide::from_overlay::Outer;
use egress_common::wire::{Headers, Quote};

use crate::fragment::Rest;
use crate::hold;
use crate::icmp::Buffer;
use crate::recent::Asked;
use crate::way::Way;

/// This CPU's own.
#[btf_map(name = "workspace")]
pub static WORKSPACE: PerCpuArray<Workspace, 1> = PerCpuArray::new();

/// How many answers this CPU has left; see `decide::limit`.
#[btf_map(name = "answers")]
pub static ANSWERS: PerCpuArray<u64, 1> = PerCpuArray::new();

#[repr(C)]
pub struct Workspace {
    /// Of the packet of this run; parsed before anything reads it.
    pub heads: Headers,
    /// Of an ICMP error, once read.
    pub quote: Quote,
    /// Of a packet out of the overlay.
    pub outer: Outer,
    /// Of the packet of this run, once settled.
    pub way: Way,
    /// The part of a packet that is sent as its second fragment.
    pub rest: Rest,
    /// Headers under construction.
    pub buffer: Buffer,
    /// A key under construction.
    pub key: Tuple,
    /// A mapping under construction.
    pub mapping: NatEntry,
    /// For fragments that come before their first one.
    pub hold: hold::Space,
    /// What was found in the maps.
    pub found: Found,
    /// CLOCK_MONOTONIC (ns) of this run, once asked for; zero before.
    pub now_ns: u64,
    /// Before these times no drop is reported, and no conflict.
    pub next_report_ns: [u64; 2],
    /// What may be kept of this run.
    pub asked: Asked,
}

/// Copies of elements, each good until the next look into its map.
#[repr(C)]
pub struct Found {
    pub mapping: NatEntry,
    pub flow: Flow,
    pub owned: Owned,
    pub handover: HandoverEntry,
    pub pod: PodEntry,
}

/// Space for what is looked up.
#[inline(always)]
pub fn found() -> Option<&'static mut Found> {
    // SAFETY: the element is this CPU's own, as for `workspace`, and roads take none of it from there.
    WORKSPACE.get_ptr_mut(0).map(|workspace| unsafe { &mut (*workspace).found })
}

/// Where to keep what a road comes to.
#[inline(always)]
pub fn asked() -> Option<&'static Asked> {
    // SAFETY: as for `found`; written before roads are walked.
    WORKSPACE.get_ptr_mut(0).map(|workspace| unsafe { &(*workspace).asked })
}

#[inline(always)]
pub fn workspace() -> Option<&'static mut Workspace> {
    // SAFETY: the element is this CPU's own; TC programs run with bottom halves off and do not interrupt one another, and
    // one run asks once.
    WORKSPACE.get_ptr_mut(0).map(|workspace| unsafe { &mut *workspace })
}
