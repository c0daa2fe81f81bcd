//! Fragments, in both directions and every order. Netfilter reassembles datagrams first, so the reassembled output is
//! compared (see `outcome`).

use super::{ACK, CLIENT, PSH, SERVER, open};
use crate::runner::{Case, MakePacket, Talk};

/// Length of a datagram of three fragments, and of a first fragment: netfilter refuses IPv6 fragments below 1280 bytes,
/// except the last.
const WHOLE: usize = 2900;
const FIRST: usize = 1240;

const MAKES: [(&str, MakePacket, MakePacket); 3] = [
    ("UDP", |talk| talk.udp_out(WHOLE), |talk| talk.udp_back(WHOLE)),
    ("echo", |talk| talk.echo_out(0x4242, WHOLE), |talk| talk.echo_back(0x4242, WHOLE)),
    (
        "TCP",
        |talk| talk.tcp_out(PSH | ACK, CLIENT + 1, SERVER + 1, WHOLE),
        |talk| talk.tcp_back(PSH | ACK, SERVER + 1, CLIENT + 1, WHOLE),
    ),
];

/// Each fragment has its own step where the order matters.
fn in_order(case: Case, make: MakePacket, outside: bool, order: &[usize]) -> Case {
    order.iter().fold(case, |case, part| {
        let part = *part;
        let one = move |talk: &Talk<'_>| vec![make(talk).fragments(&[FIRST, 2 * FIRST])[part].clone()];
        if outside { case.world_bytes(one) } else { case.pod_bytes(one) }
    })
}

pub(super) fn cases(v6: bool) -> Vec<Case> {
    let mut cases = Vec::new();
    for (protocol, out, back) in MAKES {
        let begun = |name: &str| {
            let case = Case::new(&format!("fragments of {protocol} {name}"), v6);
            match protocol {
                "TCP" => open(case),
                "UDP" => case.pod(|talk| talk.udp_out(20)),
                _ => case.pod(|talk| talk.echo_out(0x4242, 20)),
            }
        };
        for (name, order) in [
            ("in order", &[0, 1, 2][..]),
            ("with the first one late, and sent again", &[1, 0, 2, 0, 1, 2]),
            ("reversed, and sent again", &[2, 1, 0, 2, 1, 0]),
            ("with the last one first, and sent again", &[2, 0, 1, 0, 1, 2]),
        ] {
            cases.push(in_order(begun(&format!("from the pod {name}")), out, false, order));
            cases.push(in_order(begun(&format!("to the pod {name}")), back, true, order));
        }
        for (name, order) in [("without the first", &[1, 2][..]), ("without the last", &[0, 1])] {
            cases.push(in_order(begun(&format!("from the pod {name}")), out, false, order));
            cases.push(in_order(begun(&format!("to the pod {name}")), back, true, order));
        }
        cases.push(in_order(begun("from the pod, the first one twice"), out, false, &[0, 0, 1, 2]));
        cases.push(in_order(begun("to the pod, the second one twice"), back, true, &[0, 1, 1, 2]));
    }
    cases.extend(more(v6));
    cases
}

fn more(v6: bool) -> Vec<Case> {
    let named = |name: &str| Case::new(&format!("fragments: {name}"), v6);
    let mut cases = vec![
        named("a flow begins with fragments").pod_bytes(|talk| talk.udp_out(WHOLE).fragments(&[FIRST, 2 * FIRST])),
        named("of an unknown flow, from outside")
            .world_bytes(|talk| talk.udp_back(WHOLE).fragments(&[FIRST, 2 * FIRST])),
        named("of two datagrams, mixed").pod(|talk| talk.udp_out(20)).pod_bytes(|talk| {
            let one = talk.udp_out(WHOLE).fragments(&[FIRST, 2 * FIRST]);
            let two = talk.udp_out(WHOLE).with(|packet| packet.id = 0x4321).fragments(&[FIRST, 2 * FIRST]);
            one.into_iter().zip(two).flat_map(|(one, two)| [one, two]).collect()
        }),
        named("overlapping").pod(|talk| talk.udp_out(20)).pod_bytes(|talk| {
            let packet = talk.udp_out(WHOLE);
            let [mut parts, others] =
                [packet.fragments(&[FIRST, 2 * FIRST]), packet.fragments(&[FIRST + 8, 2 * FIRST])];
            parts[0].clone_from(&others[0]);
            parts
        }),
        named("of a packet with options or extensions").pod(|talk| talk.udp_out(20)).pod_bytes(move |talk| {
            let packet = talk.udp_out(WHOLE).with(|packet| {
                if v6 {
                    packet.extensions.push((60, vec![0, 1, 4, 0, 0, 0, 0]));
                } else {
                    packet.options = vec![1, 1, 1, 0];
                }
            });
            packet.fragments(&[FIRST, 2 * FIRST])
        }),
        named("the only one, at offset 0").pod(|talk| {
            // An atomic fragment is a whole packet (RFC 6946); IPv4 has none.
            let extension = (44, vec![0, 0, 0, 0, 0, 0x12, 0x34]);
            talk.udp_out(20).with(|packet| {
                if talk.cast.v6 {
                    packet.extensions.push(extension)
                }
            })
        }),
    ];
    if !v6 {
        cases.extend([
            named("with DF set").pod(|talk| talk.udp_out(20)).pod_bytes(|talk| {
                talk.udp_out(WHOLE).with(|packet| packet.dont_fragment = true).fragments(&[FIRST, 2 * FIRST])
            }),
            named("small ones").pod_bytes(|talk| talk.udp_out(200).fragments(&[64, 128])),
            named("whose first has 8 bytes").pod_bytes(|talk| talk.udp_out(200).fragments(&[8, 128])),
        ]);
    }
    cases
}
