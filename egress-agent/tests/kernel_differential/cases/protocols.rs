//! Protocols other than TCP, UDP and ICMP.

use super::{DPORT, SPORT};
use crate::packets::{AH, ESP, GRE, PacketSpec, Transport};
use crate::runner::{Case, Talk};

pub(super) fn cases(v6: bool) -> Vec<Case> {
    [sctp(v6), by_address(v6)].into_iter().flatten().collect()
}

/// An INIT chunk with its tag, and the answer to it.
const INIT: [u8; 20] = [1, 0, 0, 20, 0, 0, 0, 9, 0, 1, 0, 0, 0, 10, 0, 10, 0, 0, 0, 1];
const INIT_ACK: [u8; 20] = [2, 0, 0, 20, 0, 0, 0, 8, 0, 1, 0, 0, 0, 10, 0, 10, 0, 0, 0, 1];
const COOKIE_ECHO: [u8; 8] = [10, 0, 0, 8, 1, 2, 3, 4];
const COOKIE_ACK: [u8; 4] = [11, 0, 0, 4];
const ABORT: [u8; 4] = [6, 1, 0, 4];
const DATA: [u8; 20] = [0, 3, 0, 20, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4];
/// Not padded to four bytes.
const ODD_DATA: [u8; 21] = [0, 3, 0, 21, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 0, 1, 2, 3, 4, 5];
/// Larger than 256 bytes.
static LONG_DATA: [u8; 616] = long_data();

const fn long_data() -> [u8; 616] {
    let mut chunk = [7; 616];
    let head = [0, 3, 2, 104, 0, 0, 0, 3, 0, 0, 0, 2, 0, 0, 0, 0];
    let mut place = 0;
    while place < head.len() {
        chunk[place] = head[place];
        place += 1;
    }
    chunk
}

fn sctp(v6: bool) -> Vec<Case> {
    let named = |name: &str| Case::new(&format!("SCTP {name}"), v6);
    let out = |tag: u32, chunks: &'static [u8]| {
        move |talk: &Talk<'_>| talk.out(Transport::Sctp { sport: SPORT, dport: DPORT, tag, chunks: chunks.to_vec() })
    };
    let back = |tag: u32, chunks: &'static [u8]| {
        move |talk: &Talk<'_>| {
            talk.back(Transport::Sctp { sport: DPORT, dport: talk.chosen(0, SPORT), tag, chunks: chunks.to_vec() })
        }
    };
    let begun = |case: Case| {
        case.pod(out(0, &INIT)).world(back(9, &INIT_ACK)).pod(out(8, &COOKIE_ECHO)).world(back(9, &COOKIE_ACK))
    };
    // The second pod of two that have one port.
    let second = move |tag: u32, chunks: &'static [u8]| {
        move |talk: &Talk<'_>| out(tag, chunks)(talk).with(|packet| packet.from = talk.cast.other_pod())
    };
    let to_second = move |tag: u32, chunks: &'static [u8]| {
        move |talk: &Talk<'_>| {
            talk.back(Transport::Sctp { sport: DPORT, dport: talk.chosen(1, SPORT), tag, chunks: chunks.to_vec() })
        }
    };
    let both_begun = |name: &str| {
        let case = named(name).pod(out(0, &INIT)).pod(second(0, &INIT)).world(to_second(9, &INIT_ACK));
        case.pod(second(8, &COOKIE_ECHO)).world(to_second(9, &COOKIE_ACK))
    };
    // An error of a router about the last outbound packet, with a quote of so many bytes.
    let icmp_error = move |length: usize| {
        move |talk: &Talk<'_>| {
            let whole = talk.left().last().map_or_else(|| second(0, &INIT)(talk).bytes(), <[u8]>::to_vec);
            let header: usize = if v6 { 40 } else { 20 };
            let data = whole[..whole.len().min(header.saturating_add(length))].to_vec();
            let (kind, code) = if v6 { (3, 0) } else { (11, 0) };
            talk.back(Transport::Icmp { kind, code, rest: [0; 4], data })
                .with(|packet| packet.from = talk.cast.router())
        }
    };
    let zeroed = move |packet: PacketSpec| {
        let mut bytes = packet.bytes();
        let at = if v6 { 40 } else { 20 } + 8;
        bytes[at..at + 4].fill(0);
        vec![bytes]
    };
    vec![
        begun(named("handshake")),
        begun(named("data")).pod(out(8, &DATA)).world(back(9, &DATA)),
        begun(named("abort from the server")).world(back(9, &ABORT)),
        named("from two pods with one port").pod(out(0, &INIT)).pod(second(0, &INIT)),
        both_begun("with another port: data").pod(second(8, &DATA)).world(to_second(9, &DATA)),
        both_begun("with another port: data of any length")
            .pod(second(8, &ODD_DATA))
            .world(to_second(9, &ODD_DATA))
            .pod(second(8, &LONG_DATA))
            .world(to_second(9, &LONG_DATA)),
        both_begun("with another port: error that quotes 8 bytes").world(icmp_error(8)),
        both_begun("with another port: error that quotes all").pod(second(8, &DATA)).world(icmp_error(usize::MAX)),
        begun(named("with a wrong checksum from the pod")).pod(move |talk| out(8, &DATA)(talk).with(|p| p.spoil = 1)),
        begun(named("with a wrong checksum to the pod")).world(move |talk| back(9, &DATA)(talk).with(|p| p.spoil = 1)),
        begun(named("whose checksum is zero")).pod_bytes(move |talk| zeroed(out(8, &DATA)(talk))),
        both_begun("with another port: whose checksum is zero").pod_bytes(move |talk| zeroed(second(8, &DATA)(talk))),
        named("unsolicited, from outside").world(back(9, &INIT)),
        named("picked up in mid-stream").pod(out(8, &DATA)),
        named("from a system port")
            .pod(|talk| talk.out(Transport::Sctp { sport: 700, dport: DPORT, tag: 0, chunks: INIT.to_vec() })),
    ]
}

/// Protocols without ports.
fn by_address(v6: bool) -> Vec<Case> {
    let mut cases = Vec::new();
    for (name, protocol) in
        [("GRE", GRE), ("ESP", ESP), ("AH", AH), ("IPIP", 4), ("IP in IPv6", 41), ("protocol 253", 253)]
    {
        // AH is an extension header in IPv6.
        if v6 && protocol == AH {
            continue;
        }
        // Flags, version and key of GRE; for the others it is data.
        let send = move |talk: &Talk<'_>, length: usize| {
            let head = if protocol == GRE { vec![0x20, 0, 8, 0, 0, 0, 0, 7] } else { Vec::new() };
            Transport::Other(protocol, [head, talk.data(length)].concat())
        };
        let named = |what: &str| Case::new(&format!("{name} {what}"), v6);
        cases.push(
            named("both ways").pod(move |talk| talk.out(send(talk, 60))).world(move |talk| talk.back(send(talk, 80))),
        );
        cases.push(
            named("from two pods to one server")
                .pod(move |talk| talk.out(send(talk, 60)))
                .pod(move |talk| talk.out(send(talk, 61)).with(|packet| packet.from = talk.cast.other_pod())),
        );
        cases.push(named("unsolicited, from outside").world(move |talk| talk.back(send(talk, 60))));
    }
    cases.push(Case::new("protocol 253 without data", v6).pod(|talk| talk.out(Transport::Other(253, Vec::new()))));
    cases
}
