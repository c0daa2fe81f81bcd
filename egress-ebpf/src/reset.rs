//! Resets, made from the segment that caused them: it is cut to its headers, its ends are swapped, and a new TCP header is
//! written. IPv4 options and IPv6 extension headers stay as they are, so that a *partial* checksum, which a device
//! completes from where the transport header begins, still begins there.

use egress_common::abi::Family;
use egress_common::wire::reset::{LEN, Segment, write};
use egress_common::wire::{Frame, Headers, IPV4_LEN, IPV6_LEN, L3, csum, ipv4, ipv6, l4};

use crate::icmp::Buffer;
use crate::packet::{OFFSET_MASK, Packet};

const TTL: u8 = 64;

/// Makes the packet, which a reset may answer, that reset to its own sender, link addresses swapped. `None` when it cannot
/// be done; the packet may be half written then.
#[inline(never)]
pub fn reset(packet: Packet, heads: &Headers, buffer: &mut Buffer) -> Option<()> {
    let l4_at = usize::from(heads.l4_offset) & OFFSET_MASK;
    let segment = read(packet, heads, l4_at)?;
    let partial = packet.is_partial(l4_at + l4::TCP_CHECKSUM)?;
    packet.resize((l4_at + LEN) as u32)?;
    let mut header = [0; LEN];
    write(heads.family, &heads.tuple, &segment, partial, &mut header);
    packet.store_summed(l4_at, &header)?;
    match heads.family {
        Family::V4 => turn_v4(packet, l4_at, buffer)?,
        Family::V6 => turn_v6(packet, l4_at, buffer)?,
    }
    let (dmac, smac) = (packet.load::<6>(0)?, packet.load::<6>(6)?);
    packet.set_macs(smac, dmac)
}

#[inline(always)]
fn read(packet: Packet, heads: &Headers, l4_at: usize) -> Option<Segment> {
    const SEQUENCE: usize = 4;
    const ACKNOWLEDGED: usize = 8;
    Some(Segment {
        sequence: u32::from_be_bytes(packet.load(l4_at + SEQUENCE)?),
        acknowledged: u32::from_be_bytes(packet.load(l4_at + ACKNOWLEDGED)?),
        flags: heads.tcp_flags,
        data: (packet.len() as u32).saturating_sub(L3 as u32 + heads.header_len()),
    })
}

#[inline(always)]
fn turn_v4(packet: Packet, l4_at: usize, buffer: &mut Buffer) -> Option<()> {
    let old: [u8; IPV4_LEN] = packet.load(L3)?;
    let [high, low] = ((l4_at - L3 + LEN) as u16).to_be_bytes();
    let word = |at: usize| u16::from_ne_bytes([old[at], old[at + 1]]);
    let kind = [old[0], 0];
    let hops = [TTL, old[ipv4::PROTOCOL]];
    // Swapped addresses leave the sum as it is.
    let change = csum::change_u16(word(0), u16::from_ne_bytes(kind))
        + csum::change_u16(word(ipv4::TOTAL_LEN), u16::from_ne_bytes([high, low]))
        + csum::change_u16(word(ipv4::TTL), u16::from_ne_bytes(hops));
    let sum = csum::replace(word(ipv4::CHECKSUM), change).to_ne_bytes();
    let o = &old;
    let new: [u8; IPV4_LEN] = [
        kind[0], kind[1], high, low, o[4], o[5], o[6], o[7], hops[0], hops[1], sum[0], sum[1], // the addresses
        o[16], o[17], o[18], o[19], o[12], o[13], o[14], o[15],
    ];
    buffer[..IPV4_LEN].copy_from_slice(&new);
    packet.store_summed(L3, &buffer[..IPV4_LEN])
}

#[inline(always)]
fn turn_v6(packet: Packet, l4_at: usize, buffer: &mut Buffer) -> Option<()> {
    let [next]: [u8; 1] = packet.load(L3 + ipv6::NEXT_HEADER)?;
    let [high, low] = ((l4_at - L3 - IPV6_LEN + LEN) as u16).to_be_bytes();
    buffer[..ipv6::SADDR].copy_from_slice(&[0x60, 0, 0, 0, high, low, next, TTL]);
    // By words: sixteen bytes at once would crowd the stack.
    let mut at = 0;
    while at < 16 {
        let (from, to): ([u8; 4], [u8; 4]) = (packet.load(L3 + ipv6::SADDR + at)?, packet.load(L3 + ipv6::DADDR + at)?);
        buffer[ipv6::SADDR + at..ipv6::SADDR + at + 4].copy_from_slice(&to);
        buffer[ipv6::DADDR + at..ipv6::DADDR + at + 4].copy_from_slice(&from);
        at += 4;
    }
    packet.store_summed(L3, &buffer[..IPV6_LEN])
}
