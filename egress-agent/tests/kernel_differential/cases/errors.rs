//! ICMP errors: about outbound packets, from the server or a router on the path; about answers, from the pod; and about
//! unknown packets.

use super::{ACK, CLIENT, PSH, SERVER, SPORT, SYN, open, udp};
use crate::layout::View;
use crate::packets::{PacketSpec, Transport};
use crate::runner::{Case, Talk};

/// Type and code, and the four bytes after the checksum.
type IcmpErrorKind = (u8, u8, [u8; 4]);

const V4: [IcmpErrorKind; 17] = [
    (3, 0, [0; 4]),
    (3, 1, [0; 4]),
    (3, 2, [0; 4]),
    (3, 3, [0; 4]),
    (3, 4, [0, 0, 0x05, 0x14]),
    (3, 5, [0; 4]),
    (3, 9, [0; 4]),
    (3, 10, [0; 4]),
    (3, 13, [0; 4]),
    (4, 0, [0; 4]),
    (5, 0, [172, 18, 0, 9]),
    (5, 1, [172, 18, 0, 9]),
    (11, 0, [0; 4]),
    (11, 1, [0; 4]),
    (12, 0, [20, 0, 0, 0]),
    (12, 1, [0; 4]),
    (12, 2, [0; 4]),
];

const V6: [IcmpErrorKind; 16] = [
    (1, 0, [0; 4]),
    (1, 1, [0; 4]),
    (1, 2, [0; 4]),
    (1, 3, [0; 4]),
    (1, 4, [0; 4]),
    (1, 5, [0; 4]),
    (1, 6, [0; 4]),
    (2, 0, [0, 0, 0x05, 0x14]),
    (3, 0, [0; 4]),
    (3, 1, [0; 4]),
    (4, 0, [0, 0, 0, 6]),
    (4, 1, [0, 0, 0, 6]),
    (4, 2, [0, 0, 0, 40]),
    (4, 3, [0; 4]),
    (5, 0, [0; 4]),
    (100, 0, [0; 4]),
];

pub(super) fn cases(v6: bool) -> Vec<Case> {
    [every_kind(v6), quotes(v6), from_the_pod(v6), about_nothing(v6)].into_iter().flatten().collect()
}

fn error((kind, code, rest): IcmpErrorKind, quote: Vec<u8>) -> Transport {
    Transport::Icmp { kind, code, rest, data: quote }
}

/// Time exceeded from a router, and port unreachable, by family.
fn from_router(v6: bool) -> IcmpErrorKind {
    if v6 { (3, 0, [0; 4]) } else { (11, 0, [0; 4]) }
}

fn no_port(v6: bool) -> IcmpErrorKind {
    if v6 { (1, 4, [0; 4]) } else { (3, 3, [0; 4]) }
}

/// The last packet that left, or the one that would have.
fn last_left(talk: &Talk<'_>) -> Vec<u8> {
    let would = || talk.udp_out(20).with(|packet| packet.from = talk.cast.egress()).bytes();
    talk.left().last().map_or_else(would, <[u8]>::to_vec)
}

/// The network header of a packet and so many bytes after it.
fn cut(packet: &[u8], payload: usize) -> Vec<u8> {
    let header = View::of(packet).expect("a packet").payload_at;
    packet[..(header + payload).min(packet.len())].to_vec()
}

/// A packet of each protocol, by name.
type First = fn(&Talk<'_>) -> PacketSpec;
const FIRSTS: [(&str, First); 3] = [
    ("TCP", |talk| talk.tcp_out(SYN, CLIENT, 0, 0)),
    ("UDP", |talk| talk.udp_out(40)),
    ("echo", |talk| talk.echo_out(0x4242, 40)),
];

fn every_kind(v6: bool) -> Vec<Case> {
    let kinds: &[IcmpErrorKind] = if v6 { &V6 } else { &V4 };
    let mut cases = Vec::new();
    for &kind in kinds {
        for (protocol, first) in FIRSTS {
            let name = format!("error {}/{} about {protocol}", kind.0, kind.1);
            let tell = move |talk: &Talk<'_>| {
                talk.back(error(kind, last_left(talk))).with(|packet| packet.from = talk.cast.router())
            };
            cases.push(Case::new(&name, v6).pod(first).world(tell));
        }
    }
    cases
}

fn quotes(v6: bool) -> Vec<Case> {
    let mut cases = Vec::new();
    for (protocol, first) in FIRSTS {
        let named = |name: &str| Case::new(&format!("error about {protocol} {name}"), v6).pod(first);
        for length in [4, 8, 12, 20] {
            cases.push(named(&format!("that quotes {length} bytes")).world(move |talk| {
                talk.back(error(from_router(v6), cut(&last_left(talk), length)))
                    .with(|packet| packet.from = talk.cast.router())
            }));
        }
        cases.push(named("from the server itself").world(move |talk| talk.back(error(no_port(v6), last_left(talk)))));
        cases.push(named("with other bits in the quoted header").world(move |talk| {
            let mut quote = last_left(talk);
            // As the router received it: with a lower TTL, and possibly another traffic class.
            quote[if v6 { 7 } else { 8 }] = 1;
            quote[1] |= 0x20;
            talk.back(error(from_router(v6), quote)).with(|packet| packet.from = talk.cast.router())
        }));
        cases.push(named("with bytes behind the quote").world(move |talk| {
            let quote = [last_left(talk), vec![0xee; 12]].concat();
            talk.back(error(from_router(v6), quote)).with(|packet| packet.from = talk.cast.router())
        }));
        cases.push(named("whose own checksum is wrong").world(move |talk| {
            let answer = talk.back(error(from_router(v6), last_left(talk)));
            answer.with(|packet| (packet.from, packet.spoil) = (talk.cast.router(), 0x1111))
        }));
        cases.push(
            named("of which one more packet follows")
                .world(move |talk| {
                    talk.back(error(from_router(v6), last_left(talk))).with(|packet| packet.from = talk.cast.router())
                })
                .pod(first),
        );
        let other: First = match protocol {
            "TCP" => |talk| talk.tcp_out(SYN, CLIENT, 0, 0).with(|packet| packet.from = talk.cast.other_pod()),
            "UDP" => |talk| talk.udp_out(40).with(|packet| packet.from = talk.cast.other_pod()),
            _ => |talk| talk.echo_out(0x4242, 40).with(|packet| packet.from = talk.cast.other_pod()),
        };
        cases.push(named("whose port another pod had first").pod(other).world(move |talk| {
            talk.back(error(from_router(v6), last_left(talk))).with(|packet| packet.from = talk.cast.router())
        }));
        cases.push(
            named("that carries options or extensions")
                .pod(move |talk| {
                    first(talk).with(|packet| {
                        if v6 {
                            packet.extensions.push((60, vec![0, 1, 4, 0, 0, 0, 0]));
                        } else {
                            packet.options = vec![1, 1, 1, 0];
                        }
                    })
                })
                .world(move |talk| {
                    talk.back(error(from_router(v6), last_left(talk))).with(|packet| packet.from = talk.cast.router())
                }),
        );
    }
    cases.push(
        open(Case::new("error about data within a TCP connection", v6))
            .pod(|talk| talk.tcp_out(PSH | ACK, CLIENT + 1, SERVER + 1, 900))
            .world(move |talk| {
                let too_big = if v6 { (2, 0, [0, 0, 5, 0]) } else { (3, 4, [0, 0, 2, 0x58]) };
                let length = if v6 { 900 } else { 548 };
                talk.back(error(too_big, cut(&last_left(talk), length))).with(|packet| packet.from = talk.cast.router())
            }),
    );
    cases
}

/// Errors of the pod about received packets.
fn from_the_pod(v6: bool) -> Vec<Case> {
    let tell = move |talk: &Talk<'_>, kind: IcmpErrorKind, length: usize| {
        let answer = || talk.udp_back(20).with(|packet| packet.to = talk.cast.pod()).bytes();
        let quote = talk.came().last().map_or_else(answer, <[u8]>::to_vec);
        talk.out(error(kind, cut(&quote, length)))
    };
    let udp_exchange = |name: &str| {
        Case::new(&format!("error from the pod {name}"), v6)
            .pod(|talk| talk.udp_out(20))
            .world(|talk| talk.udp_back(20))
    };
    let too_big = if v6 { (2, 0, [0, 0, 5, 0]) } else { (3, 4, [0, 0, 2, 0x58]) };
    vec![
        udp_exchange("about UDP: no port").pod(move |talk| tell(talk, no_port(v6), 500)),
        udp_exchange("about UDP that quotes 8 bytes").pod(move |talk| tell(talk, no_port(v6), 8)),
        udp_exchange("about UDP: too big").pod(move |talk| tell(talk, too_big, 500)),
        udp_exchange("about UDP: fragments missing")
            .pod(move |talk| tell(talk, if v6 { (3, 1, [0; 4]) } else { (11, 1, [0; 4]) }, 500)),
        open(Case::new("error from the pod about TCP: prohibited", v6))
            .world(|talk| talk.tcp_back(PSH | ACK, SERVER + 1, CLIENT + 1, 200))
            .pod(move |talk| tell(talk, if v6 { (1, 1, [0; 4]) } else { (3, 13, [0; 4]) }, 500)),
        Case::new("error from the pod about an echo reply", v6)
            .pod(|talk| talk.echo_out(0x4242, 20))
            .world(|talk| talk.echo_back(0x4242, 20))
            .pod(move |talk| tell(talk, no_port(v6), 500)),
        udp_exchange("about a port that was changed, from the other pod")
            .pod(|talk| talk.udp_out(20).with(|packet| packet.from = talk.cast.other_pod()))
            .world(|talk| talk.back(udp(super::DPORT, talk.chosen(1, SPORT), talk.data(20))))
            .pod(move |talk| tell(talk, no_port(v6), 500).with(|packet| packet.from = talk.cast.other_pod())),
    ]
}

/// Errors that quote no known packet are dropped.
fn about_nothing(v6: bool) -> Vec<Case> {
    let named = |name: &str| Case::new(&format!("error about {name}"), v6);
    let from_router = move |talk: &Talk<'_>, quote: Vec<u8>| {
        talk.back(error(from_router(v6), quote)).with(|packet| packet.from = talk.cast.router())
    };
    let never_sent = |talk: &Talk<'_>| talk.udp_out(20).with(|packet| packet.from = talk.cast.egress());
    vec![
        named("a packet that was never sent").world(move |talk| from_router(talk, never_sent(talk).bytes())),
        named("another port").pod(|talk| talk.udp_out(20)).world(move |talk| {
            let quote = never_sent(talk).with(|packet| packet.body = udp(SPORT ^ 1, super::DPORT, talk.data(20)));
            from_router(talk, quote.bytes())
        }),
        named("the pod's own address")
            .pod(|talk| talk.udp_out(20))
            .world(move |talk| from_router(talk, talk.udp_out(20).bytes())),
        named("a packet of the server's")
            .pod(|talk| talk.udp_out(20))
            .world(move |talk| from_router(talk, talk.udp_back(20).bytes())),
        named("nothing at all").pod(|talk| talk.udp_out(20)).world(move |talk| from_router(talk, Vec::new())),
        named("an error").pod(|talk| talk.udp_out(20)).world(move |talk| {
            let inner = talk.out(error(no_port(v6), last_left(talk))).with(|packet| packet.from = talk.cast.egress());
            from_router(talk, inner.bytes())
        }),
        named("a header cut short")
            .pod(|talk| talk.udp_out(20))
            .world(move |talk| from_router(talk, last_left(talk)[..16].to_vec())),
        named("a later fragment").pod(|talk| talk.udp_out(20)).world(move |talk| {
            let parts = never_sent(talk).fragments(&[16]);
            from_router(talk, parts[1].clone())
        }),
        named("nothing, from the pod").pod(move |talk| {
            let quote = talk.udp_back(20).with(|packet| packet.to = talk.cast.pod()).bytes();
            talk.out(error(no_port(v6), quote))
        }),
        named("an echo reply of the server's")
            .pod(|talk| talk.echo_out(0x4242, 20))
            .world(move |talk| from_router(talk, talk.echo_back(0x4242, 20).bytes())),
    ]
}
