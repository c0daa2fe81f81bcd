//! Generated packets: ICMP errors and TCP resets to the sender of a packet.
//!
//! The packet itself becomes the answer. For an ICMP error it is truncated to the quote, and new headers are written
//! before the network header. For a reset it is truncated to its headers, the addresses are swapped, and a new TCP
//! header is written. Options and extension headers stay, so that a partial checksum still starts at the transport
//! header.
//!
//! A packet may carry a *partial* checksum, which the sending device completes over the quoted transport header after
//! it was summed here. So the quoted checksum becomes the value that such a completion writes again: x = ~(S + x), with
//! S the sum of the rest, is -S/2 in one's complement. No receiver can verify a quoted checksum, since the quote is
//! truncated.

use core::ptr;

use aya_ebpf::btf_maps::{LruHashMap, PerCpuArray};
use aya_ebpf::macros::btf_map;
use egress_common::abi::{Addr, AnswerKey, AnswerKind, Family, Verdict};
use egress_common::decide::from_overlay::Outer;
use egress_common::decide::{Tables, from_netdev, limit};
use egress_common::wire::icmp::{ERROR_HEADER_V4, ERROR_HEADER_V6, GeneratedError, write_error};
use egress_common::wire::nd::ADVERTISEMENT_LEN;
use egress_common::wire::reset::{AnsweredSegment, LEN, write};
use egress_common::wire::{
    Frame, Headers, IPV4_LEN, IPV6_LEN, L3, L4, PROTO_TCP, PROTO_UDP, Segment, csum, ipv4, ipv6, l4,
    reset as wire_reset, tcp,
};

use crate::fib::{self, Lookup, Route, RouteChoice};
use crate::maps::{Maps, swap};
use crate::packet::{OFFSET_MASK, Packet};
use crate::workspace::{Run, found};
use crate::{Outcome, overlay};

/// Budgets of pods; LRU. An evicted budget is full again, so a flood of keys takes no answer from anybody; the total
/// bounds what it gains.
#[btf_map(name = "answers")]
static ANSWERS: LruHashMap<AnswerKey, u64, 16384> = LruHashMap::new();

/// Total of this CPU, by kind.
#[btf_map(name = "answer_totals")]
static ANSWER_TOTALS: PerCpuArray<u64, { AnswerKind::ALL.len() }> = PerCpuArray::new();

/// Sends an ICMP error to a pod of this node, by the management port and from this node's address.
#[inline(always)]
pub fn error_to_pod(run: &Run<'_>, buffer: &mut Buffer, answer: GeneratedError, otherwise: Verdict) -> Outcome {
    let from = from_netdev::node_address(run.config, run.headers.family);
    let (kind, verdict) = match answer {
        GeneratedError::TooBig(_) => (AnswerKind::TooBigToPod, Verdict::MtuAnswered),
        GeneratedError::Prohibited => (AnswerKind::Hairpin, Verdict::HairpinAnswered),
    };
    if !become_error(run, buffer, answer, &from, kind, &run.headers.tuple.saddr) {
        return Outcome::done(otherwise);
    }
    Outcome::redirected(verdict, fib::send_back(run.packet, run.config))
}

/// Sends an ICMP error to a pod of another node, through the overlay.
#[inline(always)]
pub fn error_to_remote_pod(run: &Run<'_>, buffer: &mut Buffer, outer: &Outer, mtu: u32) -> Outcome {
    let from = from_netdev::node_address(run.config, run.headers.family);
    let pod = &run.headers.tuple.saddr;
    if !become_error(run, buffer, GeneratedError::TooBig(mtu), &from, AnswerKind::TooBigToPod, pod) {
        return Outcome::done(Verdict::MtuExceeded);
    }
    let result = overlay::by_device(run, &outer.source, outer.egress_id).map(|()| fib::TC_ACT_REDIRECT);
    Outcome::redirected(Verdict::MtuAnswered, result)
}

/// Sends an ICMP error to a sender outside, from the egress IP and with the original packet as the quote. The NAT entry
/// of the packet is in the workspace.
#[inline(always)]
pub fn error_to_world(run: &Run<'_>, buffer: &mut Buffer, mtu: u32) -> Outcome {
    if !Maps.has_lease() {
        return Outcome::done(Verdict::LeaseExpired);
    }
    let Some(found) = found() else { return Outcome::done(Verdict::BadState) };
    let (from, pod) = (&run.headers.tuple.daddr, &found.nat_entry.other.saddr);
    if !become_error(run, buffer, GeneratedError::TooBig(mtu), from, AnswerKind::TooBigToWorld, pod) {
        return Outcome::done(Verdict::MtuExceeded);
    }
    Outcome::redirected(Verdict::MtuAnswered, fib::send_back(run.packet, run.config))
}

/// Sends a reset to the pod of this node that sent the packet by the management port.
#[inline(always)]
pub fn reset_pod(run: &Run<'_>, buffer: &mut Buffer, otherwise: Verdict) -> Outcome {
    if !become_reset(run, buffer) {
        return Outcome::done(otherwise);
    }
    // Records the end of the connection as `to_pod` would, also for deselected pods, so that the agent sends no idle
    // reset.
    Maps.flow_answered(&run.headers.tuple, Segment { flags: tcp::RST, number: run.headers.tcp_ack });
    Outcome::redirected(Verdict::CutAnswered, fib::send_back(run.packet, run.config))
}

/// The same for a packet of a pod of this node that is about to leave by the uplink: by the management port, past the
/// stack.
#[inline(never)]
pub fn reset_pod_from_uplink(run: &Run<'_>, buffer: &mut Buffer, route: &mut Route, otherwise: Verdict) -> Outcome {
    if !become_reset(run, buffer) {
        return Outcome::done(otherwise);
    }
    let (pod, from) = (&run.headers.tuple.saddr, &run.headers.tuple.daddr);
    let lookup = Lookup {
        saddr: from,
        daddr: pod,
        ifindex: run.config.mgmt_ifindex,
        routes: RouteChoice::Through,
        device_mtu: run.config.pod_mtu,
        kept: fib::cached_hop(pod),
        by_nat_entry: false,
        seal: 0,
    };
    let result = fib::resolve_route(run, &lookup, route).and_then(|()| fib::send(run, route));
    Outcome::redirected(Verdict::CutAnswered, result)
}

/// The same for a pod of another node, through the overlay.
#[inline(always)]
pub fn reset_remote_pod(run: &Run<'_>, buffer: &mut Buffer, outer: &Outer, otherwise: Verdict) -> Outcome {
    if !become_reset(run, buffer) {
        return Outcome::done(otherwise);
    }
    let result = overlay::by_device(run, &outer.source, outer.egress_id).map(|()| fib::TC_ACT_REDIRECT);
    Outcome::redirected(Verdict::CutAnswered, result)
}

// The rate limit is checked last, so that packets that get no answer do not use it.

/// Turns the packet into an ICMP error to its sender, if allowed and possible. The budget is that of `pod`.
#[inline(always)]
fn become_error(
    run: &Run<'_>,
    buffer: &mut Buffer,
    answer: GeneratedError,
    from: &Addr,
    kind: AnswerKind,
    pod: &Addr,
) -> bool {
    let head = answer.head(run.headers.family);
    answers(run.headers, from) && may_answer(kind, pod) && error(run, head, from, buffer).is_some()
}

/// Turns the packet into a reset to its sender, if allowed and possible.
#[inline(always)]
fn become_reset(run: &Run<'_>, buffer: &mut Buffer) -> bool {
    let (kind, pod) = (AnswerKind::Reset, &run.headers.tuple.saddr);
    wire_reset::answers(run.headers) && may_answer(kind, pod) && reset(run.packet, run.headers, buffer).is_some()
}

/// Whether the budgets of this pod and kind have room for another answer; see `decide::limit`. Out of line, so that its
/// frame is released before the packet is written.
#[inline(never)]
#[expect(unsafe_code, reason = "map access is one of the three places for it")]
fn may_answer(kind: AnswerKind, pod: &Addr) -> bool {
    let Some(total) = ANSWER_TOTALS.get_ptr_mut(kind.index()) else { return false };
    let key = AnswerKey::new(*pod, kind);
    let budget = ANSWERS.get_ptr_mut(&key);
    // SAFETY: a pointer from a lookup; see `maps`. Another CPU may write it at the same time.
    let state = budget.map_or(0, |budget| unsafe { ptr::read_volatile(budget) });
    // SAFETY: the element is this CPU's own, and nothing else refers to it.
    let total = unsafe { &mut *total };
    let Some((taken, total_taken)) = limit::take(state, *total, Maps.now_ns()) else { return false };
    match budget {
        // Otherwise another CPU answers the same pod at this moment.
        Some(budget) if swap(budget, state, taken) != state => return false,
        Some(_) => {}
        // On failure the total alone counts.
        None => _ = ANSWERS.insert(&key, &taken, 0),
    }
    *total = total_taken;
    true
}

/// Buffer for headers under construction.
pub type Buffer = [u8; ADVERTISEMENT_LEN];

/// Quoted bytes of the transport header: at most a TCP header.
const QUOTED_L4: u32 = 20;

/// Maximum words of a quote: an IPv4 header with options or an IPv6 header with a few extensions, and a TCP header.
const QUOTE_WORDS: u32 = 32;

/// Bound of offsets into the quote; the mask shows it to the verifier.
const QUOTE_MASK: usize = 0x3ff;

/// Whether the packet may be answered by an ICMP error from an address. Errors are not answered with errors, nor later
/// fragments (RFC 1122 section 3.2.2). A partial checksum of SCTP would be completed over the quote too, and CRC32c has
/// no fixed point.
#[inline(always)]
pub fn answers(headers: &Headers, from: &Addr) -> bool {
    *from != Addr::UNSPECIFIED && !matches!(headers.l4, L4::IcmpError | L4::Sctp) && headers.has_l4()
}

/// Turns the packet into that ICMP error to its own sender, link addresses swapped. `head` is the eight bytes of
/// `Answer::head`. `None` on failure; the packet may be partly written then.
#[inline(never)]
pub fn error(run: &Run<'_>, head: u64, from: &Addr, buffer: &mut Buffer) -> Option<()> {
    let Run { packet, headers, .. } = *run;
    let available = packet.len() as u32 - L3 as u32;
    let wanted = u32::from(headers.l4_offset) - L3 as u32 + QUOTED_L4;
    let quoted = if wanted < available { wanted } else { available } & !3;
    if quoted > QUOTE_WORDS * 4 {
        return None;
    }
    let header = match headers.family {
        Family::V4 => ERROR_HEADER_V4,
        Family::V6 => ERROR_HEADER_V6,
    };
    packet.resize(L3 as u32 + quoted)?;
    packet.make_room(header as u32)?;
    let quote_at = L3 + header;
    settle_quoted_checksum(run, quote_at, quoted)?;
    let sum = sum_words(packet, quote_at, quoted);
    write_error(headers.family, head, from, &headers.tuple.saddr, quoted as u16, sum, buffer);
    match headers.family {
        Family::V4 => packet.store_summed(L3, &buffer[..ERROR_HEADER_V4])?,
        Family::V6 => packet.store_summed(L3, &buffer[..ERROR_HEADER_V6])?,
    }
    let (dmac, smac) = (packet.load::<6>(0)?, packet.load::<6>(6)?);
    packet.set_macs(smac, dmac)
}

/// See the module header. Only TCP and UDP carry partial checksums.
#[inline(never)]
fn settle_quoted_checksum(run: &Run<'_>, quote_at: usize, quoted: u32) -> Option<()> {
    let Run { packet, headers, .. } = *run;
    let field = match headers.tuple.protocol {
        PROTO_TCP => l4::TCP_CHECKSUM,
        PROTO_UDP => l4::UDP_CHECKSUM,
        _ => return Some(()),
    };
    let ip_len = u32::from(headers.l4_offset) - L3 as u32;
    if quoted < ip_len + field as u32 + 2 {
        return None;
    }
    let l4_at = (quote_at + ip_len as usize) & QUOTE_MASK;
    let old = packet.load(l4_at + field)?;
    let with = sum_words(packet, l4_at, quoted - ip_len);
    let fixed = csum::fixed_point(with, u16::from_ne_bytes(old));
    packet.store_summed(l4_at + field, &fixed.to_ne_bytes())
}

/// Sum of `length` bytes at `at`, a multiple of four; bytes outside the packet count as zero.
#[inline(never)]
fn sum_words(packet: Packet, at: usize, length: u32) -> u64 {
    let mut sum = 0u64;
    let mut word = 0;
    while word < QUOTE_WORDS && word * 4 < length {
        if let Some(bytes) = packet.load((at + (word * 4) as usize) & QUOTE_MASK) {
            sum += u64::from(u32::from_ne_bytes(bytes));
        }
        word += 1;
    }
    sum
}

const TTL: u8 = 64;

/// Turns the packet into that reset to its own sender, link addresses swapped. `None` on failure; the packet may be
/// partly written then.
#[inline(never)]
pub fn reset(packet: Packet, headers: &Headers, buffer: &mut Buffer) -> Option<()> {
    let l4_at = usize::from(headers.l4_offset) & OFFSET_MASK;
    let segment = read_segment(packet, headers, l4_at)?;
    let partial = packet.is_partial(l4_at + l4::TCP_CHECKSUM)?;
    packet.resize((l4_at + LEN) as u32)?;
    let mut header = [0; LEN];
    write(headers.family, &headers.tuple, &segment, partial, &mut header);
    packet.store_summed(l4_at, &header)?;
    match headers.family {
        Family::V4 => turn_v4(packet, l4_at, buffer)?,
        Family::V6 => turn_v6(packet, l4_at, buffer)?,
    }
    let (dmac, smac) = (packet.load::<6>(0)?, packet.load::<6>(6)?);
    packet.set_macs(smac, dmac)
}

#[inline(always)]
fn read_segment(packet: Packet, headers: &Headers, l4_at: usize) -> Option<AnsweredSegment> {
    const SEQUENCE: usize = 4;
    const ACKNOWLEDGED: usize = 8;
    Some(AnsweredSegment {
        sequence: u32::from_be_bytes(packet.load(l4_at + SEQUENCE)?),
        acknowledged: u32::from_be_bytes(packet.load(l4_at + ACKNOWLEDGED)?),
        flags: headers.tcp_flags,
        data: (packet.len() as u32).saturating_sub(L3 as u32 + headers.header_len()),
    })
}

#[inline(always)]
fn turn_v4(packet: Packet, l4_at: usize, buffer: &mut Buffer) -> Option<()> {
    let old: [u8; IPV4_LEN] = packet.load(L3)?;
    let [high, low] = ((l4_at - L3 + LEN) as u16).to_be_bytes();
    let word = |at: usize| u16::from_ne_bytes([old[at], old[at + 1]]);
    let kind = [old[0], 0];
    let hops = [TTL, old[ipv4::PROTOCOL]];
    // Swapping the addresses does not change the sum.
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
    // By words, to save stack.
    let mut at = 0;
    while at < 16 {
        let (from, to): ([u8; 4], [u8; 4]) = (packet.load(L3 + ipv6::SADDR + at)?, packet.load(L3 + ipv6::DADDR + at)?);
        buffer[ipv6::SADDR + at..ipv6::SADDR + at + 4].copy_from_slice(&to);
        buffer[ipv6::DADDR + at..ipv6::DADDR + at + 4].copy_from_slice(&from);
        at += 4;
    }
    packet.store_summed(L3, &buffer[..IPV6_LEN])
}
