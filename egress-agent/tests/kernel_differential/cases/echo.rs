//! ICMP and ICMPv6 queries: echo with its identifier, and the others.

use super::echo;
use crate::packets::Transport;
use crate::runner::{Case, Talk};

const ID: u16 = 0x4242;

pub(super) fn cases(v6: bool) -> Vec<Case> {
    let named = |name: &str| Case::new(&format!("echo {name}"), v6);
    let request = |talk: &Talk<'_>| talk.echo_out(ID, 56);
    let mut cases = vec![
        named("request and reply").pod(request).world(|talk| talk.echo_back(ID, 56)),
        named("without data").pod(|talk| talk.echo_out(ID, 0)).world(|talk| talk.echo_back(ID, 0)),
        named("of odd length").pod(|talk| talk.echo_out(ID, 33)).world(|talk| talk.echo_back(ID, 33)),
        named("as long as the way takes").pod(|talk| talk.echo_out(ID, 1352)).world(|talk| talk.echo_back(ID, 1352)),
        named("with identifier 0").pod(|talk| talk.echo_out(0, 20)).world(|talk| talk.echo_back(0, 20)),
        named("with a small identifier").pod(|talk| talk.echo_out(5, 20)).world(|talk| talk.echo_back(5, 20)),
        named("with identifier 65535").pod(|talk| talk.echo_out(65535, 20)).world(|talk| talk.echo_back(65535, 20)),
        named("several of one identifier")
            .pod(request)
            .pod(request)
            .world(|talk| talk.echo_back(ID, 56))
            .world(|talk| talk.echo_back(ID, 56)),
        named("from two pods with one identifier")
            .pod(request)
            .pod(|talk| talk.echo_out(ID, 57).with(|packet| packet.from = talk.cast.other_pod()))
            .world(|talk| talk.back(echo(talk.cast.v6, false, talk.chosen(1, ID), talk.data(57))))
            .world(|talk| talk.echo_back(ID, 56)),
        named("to two servers with one identifier")
            .pod(request)
            .pod(|talk| talk.echo_out(ID, 57).with(|packet| packet.to = talk.cast.second_server()))
            .world(|talk| {
                let reply = talk.back(echo(talk.cast.v6, false, talk.chosen(1, ID), talk.data(57)));
                reply.with(|packet| packet.from = talk.cast.second_server())
            })
            .world(|talk| talk.echo_back(ID, 56)),
        named("reply of another identifier")
            .pod(request)
            .world(|talk| talk.back(echo(talk.cast.v6, false, talk.chosen(0, ID) ^ 1, talk.data(56)))),
        named("reply from another host")
            .pod(request)
            .world(|talk| talk.echo_back(ID, 56).with(|packet| packet.from = talk.cast.second_server())),
        named("reply that the pod sends unsolicited")
            .pod(|talk| talk.out(echo(talk.cast.v6, false, ID, talk.data(20)))),
        named("request from outside in the pod's flow")
            .pod(request)
            .world(|talk| talk.back(echo(talk.cast.v6, true, talk.chosen(0, ID), talk.data(56)))),
        named("marked DSCP")
            .pod(move |talk| request(talk).with(|packet| packet.tos = 0xb8))
            .world(|talk| talk.echo_back(ID, 56).with(|packet| packet.tos = 0x20)),
        named("with a code of its own")
            .pod(|talk| talk.out(query(if talk.cast.v6 { 128 } else { 8 }, 3, talk.data(20)))),
    ];
    let queries: &[(&str, u8, u8, usize)] = if v6 {
        // Node information (RFC 4620), and unassigned types.
        &[("node information", 139, 140, 16), ("of an unknown type", 200, 201, 16)]
    } else {
        &[
            ("timestamp", 13, 14, 12),
            ("information", 15, 16, 0),
            ("address mask", 17, 18, 4),
            ("of an unknown type", 42, 43, 16),
        ]
    };
    for &(name, ask, answer, length) in queries {
        cases.push(
            Case::new(&format!("ICMP query: {name}"), v6)
                .pod(move |talk| talk.out(query(ask, 0, talk.some(length))))
                .world(move |talk| talk.back(query(answer, 0, talk.some(length)))),
        );
    }
    cases
}

fn query(kind: u8, code: u8, data: Vec<u8>) -> Transport {
    let [a, b] = ID.to_be_bytes();
    Transport::Icmp { kind, code, rest: [a, b, 0, 7], data }
}
