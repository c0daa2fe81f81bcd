//! IPv4 fragmentation of whole packets that may be fragmented and are too large for the way to a pod: a router would do it, and
//! a redirect does not.
//!
//! The packet is sent in two: its rest is set aside, the cut packet goes out as a clone, then the rest takes its place and
//! goes the usual way. More than two pieces would take a sender with jumbo frames; such a packet is answered instead.
//! A checksum that the sender has left to a device, as whoever sends by a veth or a virtio device does, is completed before
//! the cut: a device that gets the pieces would sum up each for itself.
//!
//! Sending a clone runs the programs of the other hook on this CPU, which use the same workspace: what is needed later is
//! copied before.

use egress_common::abi::Verdict;
use egress_common::wire::{Frame, L3, PROTO_TCP, PROTO_UDP, csum, ipv4, l4};

use crate::packet::{OFFSET_MASK, Packet};
use crate::run::Run;
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
    run.heads.may_be_fragmented()
        && run.packet.gso_size() == 0
        && first > 0
        && rest <= REST as u32
        && rest + header <= mtu
}

/// Sends the packet, already rewritten, in two fragments. The value is what the program returns.
#[inline(always)]
pub fn send_in_two(run: &Run<'_>, way: &Way, rest: &mut Rest) -> Result<i32, Verdict> {
    if !way.known {
        return Err(Verdict::NoNeighbour);
    }
    // Beside the sending and not inside of it: one frame upon the other they are too large for Linux 6.1.
    complete(run, rest)?;
    send_pieces(run, way, rest)
}

#[inline(never)]
fn send_pieces(run: &Run<'_>, way: &Way, rest: &mut Rest) -> Result<i32, Verdict> {
    let (packet, ifindex) = (run.packet, way.ifindex);
    let payload_at = u32::from(run.heads.l4_offset);
    let header = payload_at - L3 as u32;
    let first = (way.mtu - header) & !7;
    packet.strip(run.config);
    cut(packet, payload_at, header, first, way, rest).ok_or(Verdict::RewriteFailed).and_then(|(length, bits)| {
        packet.send_clone(ifindex).ok_or(Verdict::NoNeighbour)?;
        put_rest(packet, payload_at, header, length, bits, rest).ok_or(Verdict::RewriteFailed)?;
        way::redirect(ifindex)
    })
}

/// Completes a partial transport checksum.
#[inline(never)]
fn complete(run: &Run<'_>, space: &mut Rest) -> Result<(), Verdict> {
    try_complete(run, space).ok_or(Verdict::RewriteFailed)
}

/// A partial checksum is the sum of the pseudo header.
#[inline(always)]
fn try_complete(run: &Run<'_>, space: &mut Rest) -> Option<()> {
    let (packet, protocol) = (run.packet, run.heads.tuple.protocol);
    let at = match protocol {
        PROTO_TCP => l4::TCP_CHECKSUM,
        PROTO_UDP => l4::UDP_CHECKSUM,
        _ => return Some(()),
    };
    let payload_at = u32::from(run.heads.l4_offset);
    let at = (payload_at as usize & OFFSET_MASK) + at;
    let total = u32::from(u16::from_be_bytes(packet.load(L3 + ipv4::TOTAL_LEN)?));
    let length = (total + L3 as u32).checked_sub(payload_at)?;
    let addresses: [u8; 8] = packet.load(L3 + ipv4::SADDR)?;
    let pseudo = csum::sum(&addresses) + u64::from(u16::from(protocol).to_be()) + u64::from((length as u16).to_be());
    let field = u16::from_ne_bytes(packet.load(at)?);
    // Anything else is another header's, such as a tunnel's inner one.
    if csum::fold64(pseudo) != field || !packet.is_partial(at)? {
        return Some(());
    }
    let sum = u64::from(packet.sum(payload_at, length, space)?);
    let complete = match (protocol, !csum::fold64(sum)) {
        // In UDP zero means "none".
        (PROTO_UDP, 0) => 0xffff,
        (_, complete) => complete,
    };
    packet.forget_partial_checksum(space)?;
    packet.store(at, complete.to_ne_bytes())
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
    // The offset counts units of eight bytes.
    Some((length, bits | (first >> 3) as u16))
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
