//! Frames derived from others: answers, ICMP errors, encapsulated and modified frames.

use egress_common::abi::{Direction, Family};
use egress_common::wire::{Headers, L4, PROTO_ICMP, PROTO_ICMPV6, PROTO_TCP, csum, ipv4, ipv6, l4};

use super::story::{Bent, Step, cast};
use crate::cast::{FamilyAddresses, V4};
use crate::frames::{Body, FrameSpec, L3, ip, packet};
use crate::stage::UPLINK_MAC;

pub(super) const TUNNEL_PORT: u16 = 4794;
pub(super) const SECRET: [u8; 6] = [2, 0xab, 0xcd, 0xef, 1, 2];
const FOREIGN_MAC: [u8; 6] = [2, 9, 9, 9, 9, 9];
const OTHER_NODE_MAC: [u8; 6] = [2, 0, 0, 0, 1, 3];

fn swap(frame: &mut [u8], one: usize, other: usize, length: usize) -> Option<()> {
    if frame.len() < one.max(other) + length {
        return None;
    }
    (0..length).for_each(|index| frame.swap(one + index, other + index));
    Some(())
}

/// Writes a word and updates the checksum at `sum_at`.
fn put_summed(frame: &mut [u8], sum_at: usize, at: usize, word: [u8; 2]) -> Option<()> {
    let old: [u8; 2] = frame.get(at..at + 2)?.try_into().ok()?;
    let sum: [u8; 2] = frame.get(sum_at..sum_at + 2)?.try_into().ok()?;
    let sum = csum::replace_u16(u16::from_ne_bytes(sum), u16::from_ne_bytes(old), u16::from_ne_bytes(word));
    frame[sum_at..sum_at + 2].copy_from_slice(&sum.to_ne_bytes());
    frame[at..at + 2].copy_from_slice(&word);
    Some(())
}

/// The answer to the frame, with these TCP flags; wrong checksums stay wrong.
pub(super) fn mirrored(frame: &[u8], tcp_flags: u8) -> Option<Vec<u8>> {
    let heads = Headers::parse(frame, Direction::Egress)?;
    let (mut out, at) = (frame.to_vec(), usize::from(heads.l4_offset));
    match heads.family {
        Family::V4 => {
            swap(&mut out, L3 + ipv4::SADDR, L3 + ipv4::DADDR, 4)?;
            let protocol = out[L3 + ipv4::PROTOCOL];
            put_summed(&mut out, L3 + ipv4::CHECKSUM, L3 + ipv4::TTL, [60, protocol])?;
        }
        Family::V6 => {
            swap(&mut out, L3 + ipv6::SADDR, L3 + ipv6::DADDR, 16)?;
            out[L3 + ipv6::HOP_LIMIT] = 60;
        }
    }
    if !heads.has_l4() {
        return Some(out);
    }
    match (heads.l4, heads.tuple.protocol) {
        (_, PROTO_ICMP | PROTO_ICMPV6) => {
            let kind = match out.get(at)? {
                8 => 0,
                0 => 8,
                128 => 129,
                129 => 128,
                other => *other,
            };
            let code = *out.get(at + 1)?;
            put_summed(&mut out, at + l4::ICMP_CHECKSUM, at, [kind, code])?;
        }
        (L4::Tcp | L4::Udp | L4::Sctp, protocol) => {
            swap(&mut out, at + l4::SPORT, at + l4::DPORT, 2)?;
            if protocol == PROTO_TCP {
                let offset = *out.get(at + l4::TCP_OFFSET_FLAGS)?;
                put_summed(&mut out, at + l4::TCP_CHECKSUM, at + l4::TCP_OFFSET_FLAGS, [offset, tcp_flags])?;
            }
        }
        _ => {}
    }
    Some(out)
}

/// An ICMP error to the sender of the frame, with as many bytes of it as `quoted`.
pub(super) fn error_about(
    frame: &[u8],
    cast: &FamilyAddresses,
    router: &str,
    kind: [u8; 2],
    quoted: usize,
) -> Option<Vec<u8>> {
    let heads = Headers::parse(frame, Direction::Egress)?;
    let quote = frame.get(L3..)?;
    let error = packet(router, cast.world, 0, 0).body(Body::Icmp(kind, [0, 0, 5, 0]));
    let to = heads.tuple.saddr;
    Some(
        error
            .with(|error| {
                error.to = match to.family() {
                    Family::V4 => to.v4_octets().into(),
                    Family::V6 => to.octets().into(),
                };
                error.content = Some(quote[..quoted.min(quote.len())].to_vec());
            })
            .frame(),
    )
}

/// The frame in the overlay, from the other node to this one.
pub(super) fn enveloped(inner: &[u8], from: &str, egress_id: u32) -> Vec<u8> {
    let content = [&[8, 0, 0, 0], (egress_id << 8).to_be_bytes().as_slice(), inner].concat();
    let outer = packet(from, V4.node, 50_000, TUNNEL_PORT).body(Body::UdpUnsummed).macs(UPLINK_MAC, OTHER_NODE_MAC);
    let outer = FrameSpec { content: Some(content), ..outer };
    assert!(ip(from).is_ipv4(), "the underlay of the stories");
    outer.frame()
}

/// The inner frame of a frame that the programs have encapsulated, after a check of the outer headers; the frame itself
/// if the device encapsulates.
pub(super) fn unwrapped(frame: &[u8]) -> Result<Vec<u8>, String> {
    const BEHIND: usize = L3 + 20;
    let (outer, node) = (Headers::parse(frame, Direction::Egress), crate::cast::addr(V4.node));
    if outer.is_none_or(|heads| heads.tuple.saddr != node || !heads.is_udp_to(TUNNEL_PORT.into())) {
        return Ok(frame.to_vec());
    }
    let length = |at: usize| usize::from(u16::from_be_bytes([frame[at], frame[at + 1]]));
    let checks = [
        ("header checksum", csum::fold64(csum::sum(&frame[L3..BEHIND])) == 0xffff),
        ("total length", length(L3 + ipv4::TOTAL_LEN) + L3 == frame.len()),
        ("length of UDP", length(BEHIND + l4::UDP_LENGTH) + BEHIND == frame.len()),
        ("no checksum of UDP", length(BEHIND + l4::UDP_CHECKSUM) == 0),
        ("flags", frame[BEHIND + 8..BEHIND + 12] == [8, 0, 0, 0] && frame[BEHIND + 15] == 0),
        ("don't fragment", frame[L3 + ipv4::FRAGMENT] == 0x40),
        ("the secret", frame[BEHIND + 22..BEHIND + 28] == SECRET),
    ];
    match checks.iter().find(|(_, right)| !right) {
        Some((what, _)) => Err(format!("outer headers: {what}: {frame:02x?}")),
        None => Ok(frame[BEHIND + 16..].to_vec()),
    }
}

/// The frame of a step.
pub(super) fn frame_of(step: &Step) -> Vec<u8> {
    let Step::Send { v6, from, to, ports, body, ttl, data, options, fragment, dont_fragment, .. } = step else {
        unreachable!("nothing else is made from words");
    };
    let cast = cast(*v6);
    let made = packet(from.of(&cast), to.of(&cast), ports.0, ports.1).body(*body);
    made.with(|packet| {
        (packet.ttl, packet.data, packet.dont_fragment) = (*ttl, *data, *dont_fragment);
        packet.fragment = *fragment;
        // The builder supports one IPv6 extension header.
        packet.options = if *v6 && *fragment != (0, false) { 0 } else { *options };
    })
    .frame()
}

/// Modifies a frame. Only the last byte of a destination changes, so that the model has its route.
pub(super) fn bend(frame: &mut Vec<u8>, bent: &Bent, inside: bool) {
    let v6 = frame[12..14] == [0x86, 0xdd];
    let destination = if v6 { 38..54 } else { 30..34 };
    for (place, value) in &bent.bytes {
        let at = 12 + place % (frame.len() - 12);
        let last = at + 1 == destination.end;
        if !destination.contains(&at) || last && *value != 0 {
            frame[at] = *value;
        }
    }
    if let Some(left) = bent.cut {
        // The kernel's test runs require a whole network header, and so does decapsulation.
        frame.truncate(if v6 || inside { 54 } else { 34 } + left);
    }
    if bent.tagged && !inside {
        frame.splice(12..12, [0x81, 0, 0, 7]);
    }
    if bent.foreign && !inside {
        frame[..6].copy_from_slice(&FOREIGN_MAC);
    }
}
