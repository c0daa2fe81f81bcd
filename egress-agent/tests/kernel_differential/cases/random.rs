//! Random sequences (seeded) of datagrams and echo messages: two pods, two servers and a few conflicting ports; answers
//! go to the translated port.

use egress_common::random::Random;

use super::{echo, udp};
use crate::layout::View;
use crate::runner::{Case, Shot, Side, Talk, shot};

/// Sequences in each family, and packets in each.
const SEQUENCES: u64 = 40;
const PACKETS: usize = 12;
/// Source ports: a system port, the first other port, and two more.
const PORTS: [u16; 4] = [700, 1024, 40000, 40001];

/// A random packet of a pod.
#[derive(Clone, Copy)]
struct RandomPacket {
    other_pod: bool,
    second_server: bool,
    echo: bool,
    sport: u16,
    dport: u16,
    length: usize,
}

pub(super) fn cases(v6: bool) -> Vec<Case> {
    (1..=SEQUENCES).map(|number| sequence(v6, number)).collect()
}

fn sequence(v6: bool, number: u64) -> Case {
    let mut numbers = Random::new(number << 1 | u64::from(v6));
    let mut case = Case::new(&format!("random sequence {number}"), v6);
    for place in 0..PACKETS {
        let (answer, which, length) = (place > 0 && numbers.one_in(2), numbers.below(64), 8 + numbers.below(200));
        let sent = RandomPacket {
            other_pod: numbers.one_in(2),
            second_server: numbers.one_in(2),
            echo: numbers.one_in(3),
            sport: PORTS[numbers.below(PORTS.len())],
            dport: 80 + u16::from(numbers.one_in(2)),
            length,
        };
        case = case.shots(move |talk| if answer { answered(talk, which, length) } else { vec![send(talk, sent)] });
    }
    case
}

fn send(talk: &Talk<'_>, sent: RandomPacket) -> Shot {
    let data = talk.data(sent.length);
    let body = if sent.echo { echo(talk.cast.v6, true, sent.sport, data) } else { udp(sent.sport, sent.dport, data) };
    let packet = talk.out(body).with(|packet| {
        if sent.other_pod {
            packet.from = talk.cast.other_pod();
        }
        if sent.second_server {
            packet.to = talk.cast.second_server();
        }
    });
    shot(Side::Pods, packet.bytes())
}

/// The answer to a random outbound packet; none before the first.
fn answered(talk: &Talk<'_>, which: usize, length: usize) -> Vec<Shot> {
    let left: Vec<View<'_>> = talk.left().filter_map(View::of).collect();
    let Some(view) = which.checked_rem(left.len()).and_then(|place| left.get(place)) else { return Vec::new() };
    let (sport, dport) = view.ports().expect("only what has ports was sent");
    let data = talk.data(length);
    let is_udp = view.protocol == crate::packets::UDP;
    let body = if is_udp { udp(dport, sport, data) } else { echo(talk.cast.v6, false, sport, data) };
    let packet = talk.back(body).with(|packet| packet.from = view.to);
    vec![shot(Side::World, packet.bytes())]
}
