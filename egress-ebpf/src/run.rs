//! What the roads have in common: reading the heads, giving the packet another end.

use egress_common::abi::{Config, Direction, NatEntry, Verdict};
use egress_common::decide::{Rewrite, mtu};
use egress_common::wire::{Frame, Headers, L4, Quote};

use crate::packet::Packet;

/// What every step of a road needs.
#[derive(Clone, Copy)]
pub struct Run<'a> {
    pub packet: Packet,
    pub config: &'a Config,
    pub heads: &'a Headers,
}

impl Run<'_> {
    /// Length (bytes, from the IP header on) of the largest packet that this one will be on the wire.
    #[inline(always)]
    pub fn wire_length(&self) -> u32 {
        mtu::wire_length(self.packet.len() as u32, self.packet.gso_size(), self.heads)
    }
}

/// Reads the heads into the workspace, or says why not; out of line, so that its frame is gone when the decision is taken.
#[inline(never)]
pub fn parse(packet: Packet, heads: &mut Headers, direction: Direction) -> Option<Verdict> {
    packet.pull_long_heads();
    if heads.read(&packet, direction).is_none() {
        let why = heads.why_unread();
        *heads = Headers::NONE;
        return Some(why);
    }
    None
}

/// Reads what an ICMP error quotes into the workspace.
#[inline(always)]
pub fn quoted<'a>(packet: Packet, heads: &Headers, quote: &'a mut Quote) -> &'a Quote {
    if heads.l4 == L4::IcmpError {
        read_quote(packet, heads, quote);
    }
    quote
}

/// Out of line as [`parse`].
#[inline(never)]
fn read_quote(packet: Packet, heads: &Headers, quote: &mut Quote) {
    if quote.read(&packet, heads).is_none() {
        *quote = Quote::NONE;
    }
}

/// Gives the packet another end; an ICMP error, what it quotes too.
#[inline(always)]
pub fn rewrite(run: &Run<'_>, quote: &Quote, rewrite: &Rewrite) -> Result<(), Verdict> {
    match run.heads.l4 {
        L4::IcmpError => run.packet.rewrite_error(run.heads, quote, rewrite),
        _ => run.packet.rewrite(run.heads, rewrite),
    }
}

/// Gives a reply, or an ICMP error about the flow, back the pod's address.
#[inline(always)]
pub fn restore(run: &Run<'_>, quote: &Quote, mapping: &NatEntry) -> Result<(), Verdict> {
    rewrite(run, quote, &Rewrite::reverse(mapping))
}
