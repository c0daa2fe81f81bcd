//! Text form of a packet, field by field, for comparison and for failure messages.
//!
//! A checksum is shown as valid, absent, offloaded, or by its error. In the truncated quote of an ICMP error, the
//! translated addresses and ports are subtracted from the checksum, so that two valid translations to different ports
//! agree.

use std::net::IpAddr;

use crate::layout::{View, long, number};
use crate::packets::{ICMP, ICMPV6, SCTP, TCP, UDP, checksum, crc32c, octets, sum};
use crate::sockets::{Offload, ReceivedFrame};

/// Names values that may differ.
pub(crate) trait ValueNames {
    fn address(&self, address: IpAddr) -> String;
    /// A port or identifier of the egress IP, towards this peer.
    fn chosen(&mut self, protocol: u8, peer: (IpAddr, u16), port: u16) -> String;
    fn is_egress(&self, address: IpAddr) -> bool;
    /// Whether an input packet had this identification, flow label or port.
    fn knows_id(&self, id: u32) -> bool;
    fn knows_label(&self, label: u32) -> bool;
    fn knows_port(&self, port: u16) -> bool;
}

/// All fields of a frame, one per line; the first line names the packet.
pub(crate) fn describe(frame: &ReceivedFrame, names: &mut dyn ValueNames) -> Vec<String> {
    let mut lines = Vec::new();
    let frame = &finished(frame);
    let Some(view) = View::of(&frame.packet) else {
        return vec![format!("no IP packet, type {:04x}: {:02x?}", frame.ethertype, frame.packet)];
    };
    if let Some(tag) = frame.vlan {
        lines.push(format!("VLAN tag {tag}"));
    }
    if let Some((kind, size)) = frame.offload.segments {
        lines.push(format!("to be cut, kind {kind}, into segments of {size} bytes"));
    }
    if frame.unfinished_parts {
        lines.push("checksums of fragments left to the hardware".to_owned());
    }
    say_network(&view, "", false, names, &mut lines);
    say_transport(&view, "", frame.offload, names, &mut lines);
    lines.push(format!("bytes behind the packet: {}", frame.packet.len() - end_of(&view)));
    lines.insert(0, headline(&view, names));
    lines
}

/// The frame with an offloaded checksum completed, unless it is to be segmented.
fn finished(frame: &ReceivedFrame) -> ReceivedFrame {
    let mut frame = frame.clone();
    if let (Some((start, at)), None) = (frame.offload.checksum, frame.offload.segments) {
        let start = usize::from(start);
        let rest = frame.packet.get(start..).unwrap_or_default();
        // Zero would mean no checksum.
        let sum = Some(checksum(&[rest])).filter(|sum| *sum != 0).unwrap_or(0xffff);
        let field = start + usize::from(at);
        frame.packet.get_mut(field..field + 2).expect("within the packet").copy_from_slice(&sum.to_be_bytes());
        frame.offload.checksum = None;
    }
    frame
}

fn end_of(view: &View<'_>) -> usize {
    view.payload_at + view.payload.len()
}

fn headline(view: &View<'_>, names: &mut dyn ValueNames) -> String {
    let (from, to) = (names.address(view.from), names.address(view.to));
    let what = match view.protocol {
        TCP => format!("TCP {}", flags(view.payload.get(13).copied().unwrap_or(0))),
        UDP => "UDP".to_owned(),
        SCTP => "SCTP".to_owned(),
        ICMP | ICMPV6 => {
            let byte = |at: usize| view.payload.get(at).copied().unwrap_or(0);
            format!("ICMP {}/{}", byte(0), byte(1))
        }
        other => format!("protocol {other}"),
    };
    let part = view.fragment.map_or_else(String::new, |part| {
        format!(" fragment at {}{}", part.offset, if part.more { ", more follow" } else { "" })
    });
    format!("{what} from {from} to {to}{part}")
}

fn flags(bits: u8) -> String {
    let names = ["FIN", "SYN", "RST", "PSH", "ACK", "URG", "ECE", "CWR"];
    let set: Vec<_> = names.iter().enumerate().filter(|(bit, _)| bits >> bit & 1 == 1).map(|(_, name)| *name).collect();
    if set.is_empty() { "without flags".to_owned() } else { set.join("+") }
}

fn say_network(view: &View<'_>, of: &str, quoted: bool, names: &mut dyn ValueNames, lines: &mut Vec<String>) {
    let bytes = view.bytes;
    lines.push(format!("{of}source: {}", names.address(view.from)));
    lines.push(format!("{of}destination: {}", names.address(view.to)));
    lines.push(format!("{of}protocol: {}", view.protocol));
    let id =
        |names: &mut dyn ValueNames, id: u32| if names.knows_id(id) { format!("{id:x}") } else { "its own".to_owned() };
    if view.v6 {
        let first = long(bytes, 0).unwrap_or(0);
        lines.push(format!("{of}traffic class: {:02x}", first >> 20 & 0xff));
        let label = first & 0xf_ffff;
        let known = names.knows_label(label);
        lines.push(format!("{of}flow label: {}", if known { format!("{label:05x}") } else { "its own".to_owned() }));
        lines.push(format!("{of}payload length: {}", number(bytes, 4).unwrap_or(0)));
        lines.push(format!("{of}hop limit: {}", bytes[7]));
        for (number, content) in &view.extensions {
            lines.push(format!("{of}extension {number}: {content:02x?}"));
        }
    } else {
        lines.push(format!("{of}header length: {}", view.payload_at));
        lines.push(format!("{of}TOS: {:02x}", bytes[1]));
        lines.push(format!("{of}total length: {}", number(bytes, 2).unwrap_or(0)));
        lines.push(format!("{of}identification: {}", id(names, number(bytes, 4).unwrap_or(0).into())));
        lines.push(format!("{of}don't fragment: {}", bytes[6] & 0x40 != 0));
        lines.push(format!("{of}reserved flag: {}", bytes[6] & 0x80 != 0));
        lines.push(format!("{of}TTL: {}", bytes[8]));
        lines.push(format!("{of}options: {}", options(bytes.get(20..view.payload_at).unwrap_or_default())));
        let off = sum(&[bytes.get(..view.payload_at).unwrap_or_default()]);
        lines.push(format!("{of}header checksum: {}", judged(off)));
    }
    if let Some(part) = view.fragment {
        let id = id(names, part.id);
        lines.push(format!("{of}fragment: {id}, at {}, more: {}", part.offset, part.more));
    }
    if quoted {
        lines.push(format!("{of}quoted payload: {} bytes", view.payload.len()));
    }
}

/// The value of a timestamp option is not compared.
fn options(bytes: &[u8]) -> String {
    const TIMESTAMP: u8 = 0x44;
    match bytes {
        [TIMESTAMP, _, pointer, _, times @ ..] => {
            format!("timestamps, next at {pointer}, filled: {}", times.iter().any(|byte| *byte != 0))
        }
        _ => hex(bytes),
    }
}

fn judged(sum: u16) -> String {
    if sum == 0xffff { "right".to_owned() } else { format!("off by {:04x}", !sum) }
}

fn say_transport(view: &View<'_>, of: &str, offload: Offload, names: &mut dyn ValueNames, lines: &mut Vec<String>) {
    let payload = view.payload;
    if view.fragment.is_some_and(|part| part.offset > 0) {
        return lines.push(format!("{of}data: {}", hex(payload)));
    }
    let mut rest = payload.to_vec();
    if let Some((sport, dport)) = view.ports() {
        let is_echo = matches!(view.protocol, ICMP | ICMPV6);
        let beside = [names.is_egress(view.from), names.is_egress(view.to)];
        let mut say = |port: u16, chosen_towards: Option<(IpAddr, u16)>| match chosen_towards {
            Some(peer) => names.chosen(view.protocol, peer, port),
            None if names.knows_port(port) => port.to_string(),
            None => "another one".to_owned(),
        };
        if is_echo {
            let peer = if beside[0] { view.to } else { view.from };
            let towards = (beside[0] || beside[1]).then_some((peer, 0));
            lines.push(format!("{of}identifier: {}", say(sport, towards)));
            rest[4..6].fill(0);
        } else {
            let towards = [(view.to, dport), (view.from, sport)];
            lines.push(format!("{of}source port: {}", say(sport, beside[0].then_some(towards[0]))));
            lines.push(format!("{of}destination port: {}", say(dport, beside[1].then_some(towards[1]))));
            rest[..4].fill(0);
        }
    }
    lines.push(format!("{of}transport checksum: {}", transport_checksum(view, offload)));
    if let Some(at) = checksum_at(view.protocol) {
        let end = (at + if view.protocol == SCTP { 4 } else { 2 }).min(rest.len());
        rest.get_mut(at..end).unwrap_or_default().fill(0);
    }
    match view.quote() {
        Some(quote) => {
            lines.push(format!("{of}error: {}", hex(&rest[..8])));
            let inner = format!("{of}quoted ");
            say_network(&quote, &inner, true, names, lines);
            say_transport(&quote, &inner, Offload::default(), names, lines);
            lines.push(format!("{inner}rest: {}", hex(&quote.bytes[end_of(&quote)..])));
        }
        None if view.protocol == TCP && rest.len() >= 20 => say_tcp(&rest, of, lines),
        None => lines.push(format!("{of}header and data: {}", hex(&rest))),
    }
}

fn say_tcp(rest: &[u8], of: &str, lines: &mut Vec<String>) {
    let header = (usize::from(rest[12] >> 4) * 4).clamp(20, rest.len());
    lines.push(format!("{of}sequence number: {}", long(rest, 4).unwrap_or(0)));
    lines.push(format!("{of}acknowledgement: {}", long(rest, 8).unwrap_or(0)));
    lines.push(format!("{of}offset and flags: {:02x?}", &rest[12..14]));
    lines.push(format!("{of}window: {}", number(rest, 14).unwrap_or(0)));
    lines.push(format!("{of}urgent pointer: {}", number(rest, 18).unwrap_or(0)));
    lines.push(format!("{of}TCP options: {}", hex(&rest[20..header])));
    lines.push(format!("{of}data: {}", hex(&rest[header..])));
}

/// All of short data; both ends and a sum of long data.
fn hex(bytes: &[u8]) -> String {
    let text = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    match bytes {
        [first @ .., a, b, c, d] if first.len() > 60 => {
            format!(
                "{} bytes, {}...{}, sum {:04x}",
                bytes.len(),
                text(&first[..16]),
                text(&[*a, *b, *c, *d]),
                sum(&[bytes])
            )
        }
        _ => format!("{} bytes, {}", bytes.len(), text(bytes)),
    }
}

fn checksum_at(protocol: u8) -> Option<usize> {
    match protocol {
        TCP => Some(16),
        UDP => Some(6),
        ICMP | ICMPV6 => Some(2),
        SCTP => Some(8),
        _ => None,
    }
}

fn transport_checksum(view: &View<'_>, offload: Offload) -> String {
    let payload = view.payload;
    let Some(at) = checksum_at(view.protocol) else { return "none".to_owned() };
    let Some(stored) = number(payload, at) else { return "not there".to_owned() };
    let whole = view.whole && view.fragment.is_none_or(|part| !part.more);
    if view.protocol == SCTP {
        return sctp_checksum(payload, whole);
    }
    if view.protocol == UDP && stored == 0 {
        return "none".to_owned();
    }
    if let Some((start, at)) = offload.checksum {
        let expected =
            (u16::try_from(view.payload_at).ok(), checksum_at(view.protocol).and_then(|at| u16::try_from(at).ok()));
        let right = !checksum(&[&view.pseudo(payload.len())]) == stored && (Some(start), Some(at)) == expected;
        return format!("left to the hardware, {}", if right { "right" } else { "wrong" });
    }
    if !whole {
        return format!("cut short, {:04x} without addresses and ports", reduced(view, stored));
    }
    let covered = match number(payload, 4) {
        // Bytes after the UDP length do not belong to the datagram.
        Some(length) if view.protocol == UDP && length >= 8 => usize::from(length).min(payload.len()),
        _ => payload.len(),
    };
    let length = if view.protocol == UDP { covered } else { payload.len() };
    judged(sum(&[&view.pseudo(length), &payload[..covered]]))
}

/// Invariant of all valid translations of one packet: its checksum plus the translated fields.
fn reduced(view: &View<'_>, stored: u16) -> u16 {
    let addresses = if view.protocol == ICMP { Vec::new() } else { [octets(view.from), octets(view.to)].concat() };
    let ports = match view.ports() {
        Some((id, _)) if matches!(view.protocol, ICMP | ICMPV6) => id.to_be_bytes().to_vec(),
        Some((sport, dport)) => [sport.to_be_bytes(), dport.to_be_bytes()].concat(),
        None => Vec::new(),
    };
    sum(&[&addresses, &ports, &stored.to_be_bytes()])
}

fn sctp_checksum(payload: &[u8], whole: bool) -> String {
    if !whole || payload.len() < 12 {
        return "cut short".to_owned();
    }
    let mut zeroed = payload.to_vec();
    zeroed[8..12].fill(0);
    let right = payload[8..12] == crc32c(&zeroed).to_le_bytes();
    if right { "right".to_owned() } else { "wrong".to_owned() }
}
