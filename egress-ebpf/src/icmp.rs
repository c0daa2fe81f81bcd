//! ICMP errors, made from the packet that caused them: the tail is cut to what is quoted, room is made between the link
//! and the network header, and the new headers are written there.
//!
//! One trap: the packet may carry a *partial* checksum, which the sending device completes over the quoted transport
//! header after we have summed it. So the quoted checksum is set to the one value that such a completion would write
//! again: x with x = ~(S + x), where S is the sum of the rest, which in one's complement arithmetic is -S/2. Nobody can
//! verify a quoted checksum, since the quote is cut short.

use egress_common::abi::{Addr, Family};
use egress_common::wire::icmp::{ERROR_HEADER_V4, ERROR_HEADER_V6, write_error};
use egress_common::wire::nd::ADVERTISEMENT_LEN;
use egress_common::wire::{Frame, Headers, L3, L4, PROTO_TCP, PROTO_UDP, csum, l4};

use crate::packet::Packet;
use crate::run::Run;

/// Space for headers under construction.
pub type Buffer = [u8; ADVERTISEMENT_LEN];

/// Bytes of the transport header that are quoted: a TCP header, or what there is.
const QUOTED_L4: u32 = 20;
/// Words of a quote at most: an IPv4 header with options or an IPv6 header with a few extensions, and a TCP header.
const QUOTE_WORDS: u32 = 32;
/// Offsets into the quote stay below this; the mask shows it to the verifier.
const OFFSET_MASK: usize = 0x3ff;

/// Whether the packet may be answered by an ICMP error from an address. Errors are not answered with errors, nor later
/// fragments (RFC 1122 section 3.2.2). A partial checksum of SCTP would be completed over the quote too, and CRC32c knows
/// no value that stays as it is.
#[inline(always)]
pub fn answers(heads: &Headers, from: &Addr) -> bool {
    *from != Addr::UNSPECIFIED && !matches!(heads.l4, L4::IcmpError | L4::Sctp) && heads.has_l4()
}

/// Makes the packet, which an error may answer, that ICMP error to its own sender, link addresses swapped. `head` is the
/// eight bytes of `Answer::head`. `None` when it cannot be done; the packet may be half written then.
#[inline(never)]
pub fn error(run: &Run<'_>, head: u64, from: &Addr, buffer: &mut Buffer) -> Option<()> {
    let Run { packet, heads, .. } = *run;
    let available = packet.len() as u32 - L3 as u32;
    let wanted = u32::from(heads.l4_offset) - L3 as u32 + QUOTED_L4;
    let quoted = if wanted < available { wanted } else { available } & !3;
    if quoted > QUOTE_WORDS * 4 {
        return None;
    }
    let header = match heads.family {
        Family::V4 => ERROR_HEADER_V4,
        Family::V6 => ERROR_HEADER_V6,
    };
    packet.resize(L3 as u32 + quoted)?;
    packet.make_room(header as u32)?;
    let quote_at = L3 + header;
    if settle_quoted_checksum(run, quote_at, quoted) != 0 {
        return None;
    }
    let sum = sum_words(packet, quote_at, quoted);
    write_error(heads.family, head, from, &heads.tuple.saddr, quoted as u16, sum, buffer);
    match heads.family {
        Family::V4 => packet.store_summed(L3, &buffer[..ERROR_HEADER_V4])?,
        Family::V6 => packet.store_summed(L3, &buffer[..ERROR_HEADER_V6])?,
    }
    let (dmac, smac) = (packet.load::<6>(0)?, packet.load::<6>(6)?);
    packet.set_macs(smac, dmac)
}

/// See the module header. Only TCP and UDP carry partial checksums. Zero on success.
#[inline(never)]
fn settle_quoted_checksum(run: &Run<'_>, quote_at: usize, quoted: u32) -> u32 {
    let Run { packet, heads, .. } = *run;
    let field = match heads.tuple.protocol {
        PROTO_TCP => l4::TCP_CHECKSUM,
        PROTO_UDP => l4::UDP_CHECKSUM,
        _ => return 0,
    };
    let ip_len = u32::from(heads.l4_offset) - L3 as u32;
    if quoted < ip_len + field as u32 + 2 {
        return 1;
    }
    let l4_at = (quote_at + ip_len as usize) & OFFSET_MASK;
    let Some(old) = packet.load(l4_at + field) else { return 1 };
    let with = sum_words(packet, l4_at, quoted - ip_len);
    let fixed = csum::fixed_point(with, u16::from_ne_bytes(old));
    packet.store_summed(l4_at + field, &fixed.to_ne_bytes()).map_or(1, |()| 0)
}

/// Sum of `length` bytes at `at`, a multiple of four; what lies outside the packet adds nothing.
#[inline(never)]
fn sum_words(packet: Packet, at: usize, length: u32) -> u64 {
    let mut sum = 0u64;
    let mut word = 0;
    while word < QUOTE_WORDS && word * 4 < length {
        if let Some(bytes) = packet.load((at + (word * 4) as usize) & OFFSET_MASK) {
            sum += u64::from(u32::from_ne_bytes(bytes));
        }
        word += 1;
    }
    sum
}
