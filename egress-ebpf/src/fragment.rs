//! IPv4 fragmentation of packets that may be fragmented and are too large for the way to a pod: a router would do it, and
//! a redirect does not.
//!
//! The packet is sent in two: its rest is set aside, the cut packet goes out as a clone, then the rest takes its place and
//! goes the usual way. More than two pieces would take a sender with jumbo frames; such a packet is answered instead.
//! Sending a clone runs the programs of the other hook on this CPU, which use the same workspace: what is needed later is
//! copied before.

use egress_common::abi::Verdict;
use egress_common::wire::{Frame, L3, csum, ipv4};

use crate::packet::Packet;
use crate::roads::Run;
use crate::way::{self, Way};

/// Largest rest that is set aside.
pub const REST: usize = 2048;
/// Space for the rest of a packet.
pub type Rest = [u8; REST];

/// Whether two pieces will do.
#[inline(always)]
pub fn fits_in_two(run: &Run<'_>, mtu: u32) -> bool {
    let header = u32::from(run.heads.l4_offset) - L3 as u32;
    let first = mtu.saturating_sub(header) & !7;
    let rest = run.wire_length().saturating_sub(header + first);
    !run.heads.dont_fragment && run.packet.gso_size() == 0 && first > 0 && rest <= REST as u32 && rest + header <= mtu
}

/// Sends the packet, already rewritten, in two fragments. The value is what the program returns.
#[inline(never)]
pub fn send_in_two(run: &Run<'_>, way: &Way, rest: &mut Rest) -> Result<i32, Verdict> {
    if !way.known {
        return Err(Verdict::NoNeighbour);
    }
    let (packet, ifindex) = (run.packet, way.ifindex);
    let payload_at = u32::from(run.heads.l4_offset);
    let header = payload_at - L3 as u32;
    let first = (way.mtu - header) & !7;
    packet.strip();
    cut(packet, payload_at, header, first, way, rest).ok_or(Verdict::RewriteFailed).and_then(|(length, bits)| {
        packet.send_clone(ifindex).ok_or(Verdict::NoNeighbour)?;
        put_rest(packet, payload_at, header, length, bits, rest).ok_or(Verdict::RewriteFailed)?;
        way::redirect(ifindex)
    })
}

/// Makes the packet its own first fragment; returns the length of the rest, and the fragment bits of the second one.
#[inline(always)]
fn cut(packet: Packet, payload_at: u32, header: u32, first: u32, way: &Way, rest: &mut Rest) -> Option<(u32, u16)> {
    let total = u32::from(u16::from_be_bytes(packet.load(L3 + ipv4::TOTAL_LEN)?));
    let bits = u16::from_be_bytes(packet.load(L3 + ipv4::FRAGMENT)?);
    let length = total.checked_sub(header + first)?;
    packet.load_tail(payload_at + first, length, rest)?;
    set_lengths(packet, header + first, bits | ipv4::MORE_FRAGMENTS)?;
    packet.set_macs(way.dmac, way.smac)?;
    packet.resize(payload_at + first)?;
    // The offset counts units of eight bytes and keeps what it was, where this is a fragment already.
    Some((length, bits + (first >> 3) as u16))
}

#[inline(always)]
fn put_rest(packet: Packet, payload_at: u32, header: u32, length: u32, bits: u16, rest: &Rest) -> Option<()> {
    packet.store_tail(payload_at, length, rest)?;
    packet.resize(payload_at + length)?;
    set_lengths(packet, header + length, bits)
}

#[inline(always)]
fn set_lengths(packet: Packet, total: u32, bits: u16) -> Option<()> {
    let old_total: [u8; 2] = packet.load(L3 + ipv4::TOTAL_LEN)?;
    let old_bits: [u8; 2] = packet.load(L3 + ipv4::FRAGMENT)?;
    let (total, bits) = ((total as u16).to_be_bytes(), bits.to_be_bytes());
    let sum = u16::from_ne_bytes(packet.load(L3 + ipv4::CHECKSUM)?);
    let sum = csum::replace_u16(sum, u16::from_ne_bytes(old_total), u16::from_ne_bytes(total));
    let sum = csum::replace_u16(sum, u16::from_ne_bytes(old_bits), u16::from_ne_bytes(bits));
    packet.store(L3 + ipv4::TOTAL_LEN, total)?;
    packet.store(L3 + ipv4::FRAGMENT, bits)?;
    packet.store(L3 + ipv4::CHECKSUM, sum.to_ne_bytes())
}
