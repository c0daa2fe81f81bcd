//! SCTP's ports, and the checksum over them and all of the message: changed by the ports' difference and the message's
//! length, since nobody reads a whole packet here. See [`egress_common::wire::crc32c`].
#![expect(unsafe_code, reason = "a function with a name that the kernel sees")]

use egress_common::decide::End;
use egress_common::wire::{Frame, Headers, L3, Quote, crc32c, csum, l4};

use crate::packet::{OFFSET_MASK, Packet};
use crate::quoted::NOT_WRITTEN;

/// Writes a port of the packet, and its checksum. By the helper: in the sum of a complete checksum, which is not SCTP's own,
/// they do not cancel out.
#[inline(never)]
pub fn replace_port(packet: Packet, heads: &Headers, end: End, port: u16) -> Option<()> {
    let at = usize::from(heads.l4_offset) & OFFSET_MASK;
    let old = packet.load(at)?;
    let new = with_port(old, end, port);
    let sum = replaced(packet.load(at + l4::SCTP_CHECKSUM)?, old, new, heads.message_length(&packet, L3)?);
    packet.store_summed(at + l4::SCTP_CHECKSUM, &sum)?;
    packet.store_summed(at, &new)
}

/// The same for the packet that an ICMP error quotes, which went the other way than `end` says. A checksum that the quote
/// does not have, or that is a fragment's, is left. Returns what changes in the sum over the quote, or [`NOT_WRITTEN`].
#[inline(never)]
pub fn replace_quoted_port(packet: Packet, quote: &Quote, end: End, port: u16) -> u64 {
    try_replace_quoted_port(packet, quote, end, port).unwrap_or(NOT_WRITTEN)
}

#[inline(always)]
fn try_replace_quoted_port(packet: Packet, quote: &Quote, end: End, port: u16) -> Option<u64> {
    let at = quote.transport_at();
    let old: [u8; 4] = packet.load(at)?;
    let new = match end {
        End::Source => with_port(old, End::Destination, port),
        End::Destination => with_port(old, End::Source, port),
    };
    if old == new {
        return Some(0);
    }
    packet.store(at, new)?;
    let change = csum::change_u32(u32::from_ne_bytes(old), u32::from_ne_bytes(new));
    let Some(length) = quote.message_length(&packet) else { return Some(change) };
    let Some(field) = packet.load(at + l4::SCTP_CHECKSUM) else { return Some(change) };
    let sum = replaced(field, old, new, length);
    packet.store(at + l4::SCTP_CHECKSUM, sum)?;
    Some(change + csum::change_u32(u32::from_ne_bytes(field), u32::from_ne_bytes(sum)))
}

/// The checksum field, once the ports have changed.
#[inline(always)]
fn replaced(field: [u8; 4], old: [u8; 4], new: [u8; 4], length: u32) -> [u8; 4] {
    let difference = u32::from_le_bytes(old) ^ u32::from_le_bytes(new);
    sctp_checksum(u32::from_le_bytes(field), difference, length).to_le_bytes()
}

/// A global function, as the verifier calls it: gone through by itself, once for a program. Of a static one it would take
/// its nine hundred steps again for each way that leads here, and there are a thousand.
// SAFETY: no other function of the object has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn sctp_checksum(field: u32, difference: u32, length: u32) -> u32 {
    crc32c::replace(field, difference, length)
}

/// Both ports, one of them another one.
#[inline(always)]
fn with_port([a, b, c, d]: [u8; 4], end: End, port: u16) -> [u8; 4] {
    let [high, low] = port.to_be_bytes();
    match end {
        End::Source => [high, low, c, d],
        End::Destination => [a, b, high, low],
    }
}
