//! Options and extension headers, and fields that must be preserved.

use super::{CLIENT, SYN};
use crate::packets::{AH, DESTINATION_OPTIONS, ROUTING};
use crate::runner::{Case, Talk};

pub(super) fn cases(v6: bool) -> Vec<Case> {
    let mut cases = hops(v6);
    cases.extend(if v6 { extensions() } else { options() });
    cases
}

fn hops(v6: bool) -> Vec<Case> {
    let mut cases = Vec::new();
    for ttl in [0, 1, 2, 64, 255] {
        let named = |name: &str| Case::new(&format!("{ttl} hops left, {name}"), v6);
        cases.push(named("from the pod").pod(move |talk| talk.udp_out(20).with(|packet| packet.ttl = ttl)));
        cases.push(
            named("in the pod's flow")
                .pod(|talk| talk.udp_out(20))
                .pod(move |talk| talk.udp_out(21).with(|packet| packet.ttl = ttl)),
        );
        cases.push(
            named("to the pod")
                .pod(|talk| talk.udp_out(20))
                .world(move |talk| talk.udp_back(20).with(|packet| packet.ttl = ttl)),
        );
    }
    cases
}

/// Sent by the pod, and in the answer.
fn both_ways(
    name: &str,
    v6: bool,
    change: impl Fn(&mut crate::packets::PacketSpec) + Copy + Send + Sync + 'static,
) -> [Case; 3] {
    let named = |kind: &str| Case::new(&format!("{kind} with {name}"), v6);
    [
        named("UDP").pod(move |talk| talk.udp_out(20).with(change)).world(move |talk| talk.udp_back(20).with(change)),
        named("TCP")
            .pod(move |talk| talk.tcp_out(SYN, CLIENT, 0, 0).with(change))
            .world(move |talk| talk.tcp_back(SYN | super::ACK, super::SERVER, CLIENT + 1, 0).with(change)),
        named("echo")
            .pod(move |talk| talk.echo_out(7777, 20).with(change))
            .world(move |talk| talk.echo_back(7777, 20).with(change)),
    ]
}

fn options() -> Vec<Case> {
    // Bytes of each, padded with its end.
    let lists: [(&str, &'static [u8]); 9] = [
        ("no-operation options", &[1, 1, 1, 0]),
        ("a record route option", &[7, 11, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
        ("a full record route option", &[7, 7, 8, 10, 0, 0, 1, 0]),
        ("a timestamp option", &[0x44, 12, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
        ("a router alert option", &[148, 4, 0, 0]),
        ("a loose source route option", &[131, 7, 4, 192, 0, 2, 9, 0]),
        ("a strict source route option", &[137, 7, 4, 192, 0, 2, 9, 0]),
        ("a security option", &[130, 11, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
        ("an option that is too long", &[7, 40, 4, 0]),
    ];
    let mut cases: Vec<Case> = lists
        .into_iter()
        .flat_map(|(name, bytes)| both_ways(name, false, move |packet| packet.options = bytes.to_vec()))
        .collect();
    cases.extend(both_ways("forty bytes of options", false, |packet| packet.options = vec![1; 40]));
    cases.extend(both_ways("DF set", false, |packet| packet.dont_fragment = true));
    cases.extend(both_ways("identification 0", false, |packet| (packet.id, packet.dont_fragment) = (0, true)));
    cases.push(Case::new("UDP with the reserved flag set", false).pod_bytes(|talk| {
        let mut bytes = talk.udp_out(20).bytes();
        bytes[6] |= 0x80;
        crate::packets::fix_ipv4_header(&mut bytes);
        vec![bytes]
    }));
    cases
}

fn extensions() -> Vec<Case> {
    type Chain = &'static [(u8, &'static [u8])];
    const PAD: &[u8] = &[0, 1, 4, 0, 0, 0, 0];
    let chains: [(&str, Chain); 13] = [
        ("a hop-by-hop header", &[(0, PAD)]),
        ("a hop-by-hop router alert", &[(0, &[0, 5, 2, 0, 0, 1, 0])]),
        ("a destination options header", &[(DESTINATION_OPTIONS, PAD)]),
        (
            "a long destination options header",
            &[(DESTINATION_OPTIONS, &[2, 1, 20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0])],
        ),
        ("an unknown destination option", &[(DESTINATION_OPTIONS, &[0, 0x1e, 4, 0, 0, 0, 0])]),
        ("hop-by-hop and destination options", &[(0, PAD), (DESTINATION_OPTIONS, PAD)]),
        ("six extension headers", &[(0, PAD), (60, PAD), (60, PAD), (60, PAD), (60, PAD), (60, PAD)]),
        ("seven extension headers", &[(0, PAD), (60, PAD), (60, PAD), (60, PAD), (60, PAD), (60, PAD), (60, PAD)]),
        ("a routing header without segments left", &[(ROUTING, &[0, 4, 0, 0, 0, 0, 0])]),
        (
            "a routing header with segments left",
            &[(ROUTING, &[2, 0, 1, 0, 0, 0, 0, 0x20, 1, 0xd, 0xb9, 0, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x10])],
        ),
        (
            "an authentication header",
            &[(AH, &[4, 0, 0, 0, 0, 1, 0, 0, 0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13])],
        ),
        ("an unknown hop-by-hop option to be skipped", &[(0, &[0, 0x1e, 4, 0, 0, 0, 0])]),
        ("an unknown hop-by-hop option to be refused", &[(0, &[0, 0x9e, 4, 0, 0, 0, 0])]),
    ];
    let mut cases: Vec<Case> = chains
        .into_iter()
        .flat_map(|(name, chain)| {
            both_ways(name, true, move |packet| {
                packet.extensions = chain.iter().map(|(number, rest)| (*number, rest.to_vec())).collect();
            })
        })
        .collect();
    cases.extend(both_ways("a flow label", true, |packet| packet.flow_label = 0xa_bcde));
    cases.push(Case::new("UDP with an extension header that is cut short", true).pod_bytes(|talk: &Talk<'_>| {
        let mut bytes = talk.udp_out(0).bytes();
        (bytes[6], bytes[40]) = (DESTINATION_OPTIONS, 17);
        bytes[41] = 9;
        vec![bytes]
    }));
    cases.push(Case::new("nothing behind the header", true).pod_bytes(|talk: &Talk<'_>| {
        let mut bytes = talk.udp_out(0).bytes();
        bytes[6] = 59;
        vec![bytes]
    }));
    cases
}
