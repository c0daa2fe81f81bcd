//! Malformed packets: lengths, versions, checksums, truncated headers.

use super::{ACK, CLIENT, SERVER, SYN};
use crate::packets::{PacketSpec, fix_ipv4_header};
use crate::runner::{Case, MakePacket};

const MAKES: [(&str, MakePacket, MakePacket); 3] = [
    ("TCP", |talk| talk.tcp_out(SYN, CLIENT, 0, 0), |talk| talk.tcp_back(SYN | ACK, SERVER, CLIENT + 1, 0)),
    ("UDP", |talk| talk.udp_out(30), |talk| talk.udp_back(30)),
    ("echo", |talk| talk.echo_out(7777, 30), |talk| talk.echo_back(7777, 30)),
];

pub(super) fn cases(v6: bool) -> Vec<Case> {
    let mut cases = Vec::new();
    for (protocol, out, back) in MAKES {
        let named = |name: &str| Case::new(&format!("malformed: {protocol} {name}"), v6);
        let answered = |name: &str| named(name).pod(out);
        cases.push(
            named("with a wrong checksum from the pod").pod(move |talk| out(talk).with(|packet| packet.spoil = 0x0101)),
        );
        cases.push(
            answered("with a wrong checksum to the pod")
                .world(move |talk| back(talk).with(|packet| packet.spoil = 0x0101)),
        );
        for length in [0, 4, 7, 12] {
            let cut = move |packet: PacketSpec| {
                let header = packet.header_length();
                vec![shortened(packet.bytes(), header + length)]
            };
            cases.push(named(&format!("of {length} bytes from the pod")).pod_bytes(move |talk| cut(out(talk))));
            cases.push(answered(&format!("of {length} bytes to the pod")).world_bytes(move |talk| cut(back(talk))));
        }
        cases.push(named("shorter than its length says").pod_bytes(move |talk| {
            let mut bytes = out(talk).bytes();
            bytes.truncate(bytes.len() - 5);
            vec![bytes]
        }));
        cases.push(answered("to the pod, shorter than its length says").world_bytes(move |talk| {
            let mut bytes = back(talk).bytes();
            bytes.truncate(bytes.len() - 5);
            vec![bytes]
        }));
        cases.push(
            named("longer than its length says")
                .pod_bytes(move |talk| vec![[out(talk).bytes(), vec![0xee; 9]].concat()]),
        );
        cases.push(
            answered("to the pod, longer than its length says")
                .world_bytes(move |talk| vec![[back(talk).bytes(), vec![0xee; 9]].concat()]),
        );
    }
    cases.extend(transport(v6));
    if !v6 {
        cases.extend(ipv4_header());
    }
    cases
}

/// The packet truncated to so many bytes, with that length in its header.
fn shortened(mut bytes: Vec<u8>, length: usize) -> Vec<u8> {
    bytes.truncate(length);
    let total = u16::try_from(bytes.len()).expect("a length");
    if bytes[0] >> 4 == 4 {
        bytes[2..4].copy_from_slice(&total.to_be_bytes());
        fix_ipv4_header(&mut bytes);
    } else {
        bytes[4..6].copy_from_slice(&(total - 40).to_be_bytes());
    }
    bytes
}

fn transport(v6: bool) -> Vec<Case> {
    let changed = |name: &str, make: MakePacket, at: usize, value: u8| {
        Case::new(&format!("malformed: {name}"), v6).pod_bytes(move |talk| {
            let packet = make(talk);
            let mut bytes = packet.bytes();
            bytes[packet.header_length() + at] = value;
            vec![bytes]
        })
    };
    let (tcp, udp): (MakePacket, MakePacket) = (MAKES[0].1, MAKES[1].1);
    vec![
        changed("TCP whose header length is 4", tcp, 12, 0x10),
        changed("TCP whose header is longer than the packet", tcp, 12, 0xf0),
        changed("UDP whose length is 4", udp, 5, 4),
        changed("UDP whose length is longer than the packet", udp, 4, 2),
        changed("UDP whose length is shorter than the packet", udp, 5, 20),
        changed("UDP whose length is 0", udp, 5, 0),
    ]
}

fn ipv4_header() -> Vec<Case> {
    let changed = |name: &str, sums: bool, change: fn(&mut Vec<u8>)| {
        let named = |way: &str| Case::new(&format!("malformed: {name} {way}"), false);
        let make = move |packet: PacketSpec| {
            let mut bytes = packet.bytes();
            change(&mut bytes);
            if sums {
                fix_ipv4_header(&mut bytes);
            }
            vec![bytes]
        };
        [
            named("from the pod").pod_bytes(move |talk| make(talk.udp_out(60))),
            named("to the pod").pod(|talk| talk.udp_out(20)).world_bytes(move |talk| make(talk.udp_back(60))),
        ]
    };
    let cases = [
        changed("wrong header checksum", false, |bytes| bytes[10] ^= 0x55),
        changed("header length 16", true, |bytes| bytes[0] = 0x44),
        changed("header longer than the packet", false, |bytes| {
            bytes[0] = 0x4f;
            bytes.truncate(40);
        }),
        changed("total length below the header's", true, |bytes| bytes[2..4].copy_from_slice(&[0, 19])),
        changed("total length 0", true, |bytes| bytes[2..4].copy_from_slice(&[0, 0])),
        changed("version 5", false, |bytes| bytes[0] = 0x55),
        changed("source 0.0.0.0", true, |bytes| bytes[12..16].fill(0)),
        changed("source of the loopback network", true, |bytes| bytes[12..16].copy_from_slice(&[127, 0, 0, 1])),
        changed("source of a multicast group", true, |bytes| bytes[12..16].copy_from_slice(&[224, 0, 0, 5])),
    ];
    cases.into_iter().flatten().collect()
}
