use std::cell::Cell;
use std::vec::Vec;

use super::*;
use crate::decide::packets::packet;
use crate::random::Random;

const PAIRS: [(&str, &str); 2] = [("10.244.1.10", "198.51.100.10"), ("fd00:10:244:1::10", "2001:db8::10")];
const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const DESTINATION: u8 = 60;
const NO_NEXT: u8 = 59;

fn parse(frame: &[u8]) -> Option<Headers> {
    Headers::parse(frame, Direction::Egress)
}

/// An IPv6 frame with a chain of extension headers, each given by its number and its length in units of eight bytes
/// beyond the first, before UDP 4000 -> 80.
fn chained(chain: &[(u8, u8)]) -> Vec<u8> {
    let mut frame = packet(PAIRS[1].0, PAIRS[1].1, 4000, 80).frame();
    let mut headers = Vec::new();
    for (index, (number, length)) in chain.iter().enumerate() {
        let next = chain.get(index + 1).map_or(PROTO_UDP, |(number, _)| *number);
        headers.extend([next, if *number == FRAGMENT { 0 } else { *length }]);
        headers.resize(headers.len() + 6 + 8 * usize::from(*length), 0);
    }
    if let Some((first, _)) = chain.first() {
        frame[L3 + ipv6::NEXT_HEADER] = *first;
    }
    frame.splice(L3 + IPV6_LEN..L3 + IPV6_LEN, headers);
    frame
}

#[test]
fn an_ipv4_mapped_address_is_not_read() {
    let mapped = Addr::v4([10, 244, 1, 10]).octets();
    let why = |frame: &[u8]| {
        let mut headers = Headers::NONE;
        headers.read(frame, Direction::Egress).is_none().then(|| headers.why_unread())
    };
    for (at, length, verdict) in [
        (ipv6::SADDR, 82, Some(Verdict::V4Mapped)),
        (ipv6::DADDR, 82, Some(Verdict::V4Mapped)),
        (ipv6::DADDR + 8, 82, None),
        (ipv6::DADDR, L3 + IPV6_LEN - 1, Some(Verdict::NotIp)),
    ] {
        let mut frame = packet(PAIRS[1].0, PAIRS[1].1, 4000, 80).frame();
        frame[L3 + at..L3 + at + 16].copy_from_slice(&mapped);
        frame.truncate(length);
        assert_eq!(why(&frame), verdict, "{at} {length}");
    }
    assert_eq!(why(&[0; 60]), Some(Verdict::NotIp));
}

#[test]
fn fields_of_a_whole_packet() {
    for (from, to) in PAIRS {
        let udp = packet(from, to, 4000, 80).ttl(9).headers();
        assert_eq!((udp.l4, udp.tuple.sport(), udp.tuple.dport(), udp.ttl), (L4::Udp, 4000, 80, 9));
        assert_eq!((udp.fragment, udp.fragment_id, udp.has_l4()), (Fragment::Whole, udp.fragment_id, true));
        let tcp = packet(from, to, 4000, 80).tcp(0x12).headers();
        assert_eq!((tcp.l4, tcp.tcp_flags, tcp.l4_len, tcp.header_len()), (L4::Tcp, 0x12, 20, tcp.header_len()));
        assert_eq!(u32::from(tcp.l4_offset) - L3 as u32 + 20, tcp.header_len());
        let ping = packet(from, to, 1, 2).echo(77).headers();
        assert_eq!((ping.l4, ping.tuple.sport(), ping.tuple.dport()), (L4::EchoRequest, 77, 77));
        assert_eq!(packet(from, to, 1, 2).echo_reply(77).headers().l4, L4::EchoReply);
        assert_eq!(packet(from, to, 1, 2).unreachable().headers().l4, L4::IcmpError);
        let sctp = packet(from, to, 1, 2).protocol(PROTO_SCTP).headers();
        assert_eq!((sctp.l4, sctp.tuple.sport(), sctp.tuple.dport(), sctp.sctp_chunk), (L4::Sctp, 1, 2, 0));
        assert_eq!(packet(from, to, 1, 2).sctp(14).headers().sctp_chunk, 14);
        for protocol in [4, 47, 50, 255] {
            let other = packet(from, to, 1, 2).protocol(protocol).cut(1).headers();
            assert_eq!((other.l4, other.tuple.sport(), other.tuple.dport()), (L4::Other, 0, 0));
        }
        for protocol in [PROTO_AH, PROTO_MOBILITY, PROTO_NONE, PROTO_DCCP, PROTO_UDP_LITE] {
            let refused = packet(from, to, 1, 2).protocol(protocol).headers();
            assert_eq!((refused.l4, refused.may_be_udp_to(2)), (L4::Refused, false));
        }
    }
}

#[test]
fn icmp_of_the_other_family_is_ignored() {
    for ((from, to), protocol) in PAIRS.into_iter().zip([PROTO_ICMPV6, PROTO_ICMP]) {
        assert_eq!(packet(from, to, 0x0800, 0).protocol(protocol).headers().l4, L4::Other);
    }
}

#[test]
fn truncation_is_detected() {
    for (from, to) in PAIRS {
        let network = if from.contains(':') { IPV6_LEN } else { IPV4_LEN };
        for (whole, transport) in [
            (packet(from, to, 4000, 80), 8),
            (packet(from, to, 4000, 80).tcp(2), 14),
            (packet(from, to, 0, 0).echo(1), 8),
            (packet(from, to, 4000, 80).sctp(1), 16),
        ] {
            let frame = whole.frame();
            for length in 0..frame.len() {
                let l4 = parse(&frame[..length]).map(|headers| headers.l4);
                let expected = match length {
                    _ if length < L3 + network => None,
                    _ if length < L3 + network + transport => Some(L4::Short),
                    _ => Some(whole.headers().l4),
                };
                assert_eq!(l4, expected, "{length} bytes of {whole:?}");
            }
        }
    }
}

#[test]
fn the_version_and_the_header_length_must_be_right() {
    let frame = packet(PAIRS[0].0, PAIRS[0].1, 4000, 80).frame();
    for first in [0x44u8, 0x40, 0x65, 0x05, 0xf5] {
        let mut wrong = frame.clone();
        wrong[L3] = first;
        assert_eq!(parse(&wrong), None, "{first:#x}");
    }
    let mut wrong = packet(PAIRS[1].0, PAIRS[1].1, 4000, 80).frame();
    wrong[L3] = 0x45;
    assert_eq!(parse(&wrong), None);
    for ethertype in [[0x81, 0x00], [0x88, 0xa8], [0x08, 0x06], [0, 48]] {
        let mut other = frame.clone();
        other[12..14].copy_from_slice(&ethertype);
        assert_eq!(parse(&other), None, "{ethertype:?}");
    }
}

#[test]
fn ipv4_options_are_stepped_over() {
    for words in 1..=10u8 {
        let mut frame = packet(PAIRS[0].0, PAIRS[0].1, 4000, 80).frame();
        frame[L3] = 0x45 + words;
        let options = std::vec![1u8; usize::from(words) * 4];
        frame.splice(L3 + IPV4_LEN..L3 + IPV4_LEN, options);
        let headers = parse(&frame).expect("IPv4");
        assert_eq!((headers.l4, headers.tuple.sport(), headers.tuple.dport()), (L4::Udp, 4000, 80));
        assert_eq!(usize::from(headers.l4_offset), L3 + IPV4_LEN + usize::from(words) * 4);
    }
}

#[test]
fn extension_headers_are_stepped_over() {
    for chain in [
        &[(HOP_BY_HOP, 0)][..],
        &[(HOP_BY_HOP, 0), (DESTINATION, 1), (ROUTING, 2), (FRAGMENT, 0), (DESTINATION, 0)],
        &[(DESTINATION, 255)],
        &[(DESTINATION, 0); MAX_EXTENSION_HEADERS],
    ] {
        let headers = parse(&chained(chain)).expect("IPv6");
        assert_eq!(
            (headers.l4, headers.tuple.sport(), headers.tuple.protocol),
            (L4::Udp, 4000, PROTO_UDP),
            "{chain:?}"
        );
        let length: usize = chain.iter().map(|(_, length)| 8 + 8 * usize::from(*length)).sum();
        assert_eq!(usize::from(headers.l4_offset), L3 + IPV6_LEN + length);
        assert_eq!(headers.fragment, Fragment::Whole, "an atomic fragment is whole");
        assert!(headers.may_be_udp_to(80) && !headers.may_be_udp_to(81));
    }
}

#[test]
fn a_longer_chain_has_no_readable_ports() {
    let headers = parse(&chained(&[(DESTINATION, 0); MAX_EXTENSION_HEADERS + 1])).expect("IPv6");
    assert_eq!((headers.l4, headers.tuple.dport(), headers.tuple.protocol), (L4::Unread, 0, DESTINATION));
    assert!(headers.may_be_udp_to(80) && headers.may_be_udp_to(4794));
    let whole = chained(&[(DESTINATION, 5)]);
    let cut = parse(&whole[..L3 + IPV6_LEN + 20]).expect("IPv6");
    assert!(cut.l4 == L4::Short && cut.may_be_udp_to(4794));
    let mut none = chained(&[(DESTINATION, 0)]);
    none[L3 + IPV6_LEN] = NO_NEXT;
    assert!(!parse(&none).expect("IPv6").may_be_udp_to(80), "no next header is no transport");
}

#[test]
fn a_source_route_is_detected() {
    let routed = |chain: &[(u8, u8)], at: usize, left: u8| {
        let mut frame = chained(chain);
        frame[L3 + IPV6_LEN + at] = left;
        parse(&frame).expect("IPv6").source_routed
    };
    assert!(routed(&[(ROUTING, 2)], 3, 1));
    assert!(routed(&[(DESTINATION, 0), (ROUTING, 2), (FRAGMENT, 0)], 11, 7));
    assert!(!routed(&[(ROUTING, 2)], 3, 0), "it has arrived");
    assert!(!routed(&[(DESTINATION, 2)], 3, 1));
    let with = |options: &[u8]| {
        let mut frame = packet(PAIRS[0].0, PAIRS[0].1, 4000, 80).frame();
        frame[L3] = 0x45 + options.len() as u8 / 4;
        frame.splice(L3 + IPV4_LEN..L3 + IPV4_LEN, options.iter().copied());
        parse(&frame).expect("IPv4").source_routed
    };
    for route in [ipv4::LOOSE_SOURCE_ROUTE, ipv4::STRICT_SOURCE_ROUTE] {
        assert!(with(&[route, 7, 4, 1, 2, 3, 4, 0]));
        assert!(with(&[1, 1, 68, 4, 5, 0, route, 3, 4, 0, 0, 0]), "behind others");
        assert!(with(&[[1; 36].as_slice(), &[route, 3, 4, 0]].concat()), "at the very end");
        assert!(!with(&[0, route, 3, 4]), "behind the end");
        assert!(!with(&[7, 7, 4, route, route, route, route, 0]), "within another one");
    }
    assert!(with(&[7, 0, 0, 0]) && with(&[148, 1, 0, 0]), "not to be read");
    assert!(!with(&[148, 4, 0, 0]) && !with(&[7, 39, 4, 0]), "router alert; one that is longer than all");
}

#[test]
fn fragments_of_both_families() {
    for (from, to) in PAIRS {
        let first = packet(from, to, 4000, 80).fragment(0, true).headers();
        assert_eq!((first.fragment, first.l4, first.tuple.dport()), (Fragment::First, L4::Udp, 80));
        for more in [true, false] {
            let later = packet(from, to, 4000, 80).fragment(185, more).headers();
            assert_eq!((later.fragment, later.l4, later.tuple.dport()), (Fragment::Later, L4::Later, 0));
            assert_eq!((later.fragment_id, later.tuple.protocol), (first.fragment_id, PROTO_UDP));
            assert!(!later.has_l4() && !later.may_be_udp_to(0));
        }
        assert_ne!(first.fragment_id, [0; 4]);
    }
}

/// A frame that records how far it was read.
struct Watched<'a> {
    bytes: &'a [u8],
    read: Cell<usize>,
}

impl Frame for Watched<'_> {
    fn load<const N: usize>(&self, offset: usize) -> Option<[u8; N]> {
        let loaded = self.bytes.load(offset)?;
        self.read.set(self.read.get().max(offset + N));
        Some(loaded)
    }

    fn len(&self) -> usize {
        self.bytes.len()
    }
}

fn seeds() -> Vec<Vec<u8>> {
    let mut seeds = Vec::from([chained(&[(HOP_BY_HOP, 0), (DESTINATION, 1), (FRAGMENT, 0)]), chained(&[(ROUTING, 4)])]);
    for (from, to) in PAIRS {
        seeds.push(packet(from, to, 4000, 80).frame());
        seeds.push(packet(from, to, 4000, 80).tcp(0x10).frame());
        seeds.push(packet(from, to, 4000, 80).echo(5).frame());
        seeds.push(packet(from, to, 4000, 80).fragment(0, true).frame());
        seeds.push(packet(from, to, 4000, 80).fragment(9, false).frame());
    }
    seeds
}

#[test]
fn mutated_frames_are_read_within_their_bounds() {
    let seeds = seeds();
    let mut numbers = Random::new(0);
    for round in 0..200_000 {
        let mut frame = seeds[numbers.below(seeds.len())].clone();
        for _ in 0..numbers.below(5) {
            let at = numbers.below(frame.len());
            frame[at] = numbers.below(256) as u8;
        }
        frame.truncate(frame.len() - if round % 3 == 0 { numbers.below(frame.len()) } else { 0 });
        let watched = Watched { bytes: &frame, read: Cell::new(0) };
        let Some(headers) = Headers::parse(&watched, Direction::Egress) else { continue };
        if headers.l4 == L4::Short {
            continue;
        }
        // Reads stay within the frame, and later bytes do not matter.
        assert_eq!(parse(&frame[..watched.read.get()]), Some(headers), "{frame:02x?}");
        if !matches!(headers.l4, L4::Other | L4::Later | L4::Refused | L4::Unread) {
            assert!(usize::from(headers.l4_offset) + 8 <= frame.len(), "{frame:02x?}");
        }
    }
}

#[test]
fn the_length_of_a_message_is_what_its_headers_say() {
    for (from, to) in PAIRS {
        let whole = packet(from, to, 4000, 80);
        let mut frame = whole.frame();
        assert_eq!(parse(&frame).and_then(|headers| headers.message_length(frame.as_slice(), L3)), Some(28));
        frame.extend([0; 6]);
        assert_eq!(parse(&frame).and_then(|headers| headers.message_length(frame.as_slice(), L3)), Some(28), "padded");
        frame[if from.contains(':') { L3 + ipv6::PAYLOAD_LEN + 1 } else { L3 + ipv4::TOTAL_LEN + 1 }] = 21;
        let expected = if from.contains(':') { 21 } else { 1 };
        assert_eq!(parse(&frame).and_then(|headers| headers.message_length(frame.as_slice(), L3)), Some(expected));
        for fragment in [whole.clone().fragment(0, true), whole.fragment(9, false)] {
            let frame = fragment.frame();
            assert_eq!(parse(&frame).and_then(|headers| headers.message_length(frame.as_slice(), L3)), None);
        }
    }
    let mut options = packet(PAIRS[0].0, PAIRS[0].1, 4000, 80).frame();
    options[L3] = 0x47;
    options.splice(L3 + IPV4_LEN..L3 + IPV4_LEN, [1; 8]);
    options[L3 + ipv4::TOTAL_LEN + 1] += 8;
    assert_eq!(parse(&options).and_then(|headers| headers.message_length(options.as_slice(), L3)), Some(28));
    options[L3 + ipv4::TOTAL_LEN + 1] = 27;
    assert_eq!(parse(&options).and_then(|headers| headers.message_length(options.as_slice(), L3)), None, "no room");
    let mut extended = chained(&[(DESTINATION, 1), (ROUTING, 0)]);
    extended[L3 + ipv6::PAYLOAD_LEN + 1] += 24;
    assert_eq!(parse(&extended).and_then(|headers| headers.message_length(extended.as_slice(), L3)), Some(28));
}
