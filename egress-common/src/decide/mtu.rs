//! Lengths: redirects check no MTU, so we do.

use crate::wire::{Heads, L3};

/// Length (bytes, from the IP header on) of the largest packet that this one will be on the wire: itself, or a segment of
/// it where the kernel holds several in one (GSO).
#[inline(always)]
pub fn wire_length(frame_len: u32, gso_size: u32, heads: &Heads) -> u32 {
    if gso_size > 0 { gso_size + heads.header_len() } else { frame_len.saturating_sub(L3 as u32) }
}
