//! UDP: lengths, checksums, ports.

use super::{DPORT, SPORT, udp};
use crate::packets::{PacketSpec, Transport};
use crate::runner::{Case, Talk};

pub(super) fn cases(v6: bool) -> Vec<Case> {
    let named = |name: &str| Case::new(&format!("UDP {name}"), v6);
    [contents(&named), ports(&named)].into_iter().flatten().collect()
}

fn unsummed(packet: PacketSpec) -> PacketSpec {
    packet.with(|packet| match &mut packet.body {
        Transport::Udp { summed, .. } => *summed = false,
        other => panic!("no UDP: {other:?}"),
    })
}

fn contents(named: &dyn Fn(&str) -> Case) -> Vec<Case> {
    let exchange = |name: &str, out: usize, back: usize| {
        named(name).pod(move |talk| talk.udp_out(out)).world(move |talk| talk.udp_back(back))
    };
    vec![
        exchange("exchange", 40, 60),
        exchange("without data", 0, 0),
        exchange("of odd length", 41, 61),
        exchange("as long as the way takes", 1350, 1350),
        named("several each way")
            .pod(|talk| talk.udp_out(10))
            .world(|talk| talk.udp_back(10))
            .world(|talk| talk.udp_back(20))
            .pod(|talk| talk.udp_out(30))
            .pod(|talk| talk.udp_out(40))
            .world(|talk| talk.udp_back(50)),
        named("without checksum").pod(|talk| unsummed(talk.udp_out(40))).world(|talk| unsummed(talk.udp_back(60))),
        named("marked DSCP and ECN")
            .pod(|talk| talk.udp_out(40).with(|packet| packet.tos = 0xb9))
            .world(|talk| talk.udp_back(40).with(|packet| packet.tos = 0x03)),
        named("whose checksum comes out as zero").pod_bytes(|talk| zero_sums(&talk.udp_out(40), talk.cast.egress())),
    ]
}

/// The packet with data chosen so that its checksum after the translation is ffff (which replaces zero, because zero
/// means none), fffe and 0001.
fn zero_sums(packet: &PacketSpec, egress: std::net::IpAddr) -> Vec<Vec<u8>> {
    let whole = packet.clone().with(|packet| packet.from = egress).bytes();
    let at = packet.header_length();
    let sum = u16::from_be_bytes([whole[at + 6], whole[at + 7]]);
    let wanted = [0xffff_u16, 0xfffe, 0x0001];
    let choose = |wanted: u16| {
        let mut packet = packet.clone();
        if let Transport::Udp { data, .. } = &mut packet.body {
            let word = u16::from_be_bytes([data[20], data[21]]);
            // One's complement: the word grows as the checksum shrinks.
            let mut grown = u32::from(word) + u32::from(sum) + u32::from(!wanted);
            while grown > 0xffff {
                grown = (grown & 0xffff) + (grown >> 16);
            }
            data[20..22].copy_from_slice(&u16::try_from(grown).expect("folded").to_be_bytes());
        }
        packet.bytes()
    };
    wanted.map(choose).to_vec()
}

fn ports(named: &dyn Fn(&str) -> Case) -> Vec<Case> {
    let from = |port: u16| move |talk: &Talk<'_>| talk.out(udp(port, DPORT, talk.data(20)));
    let answer = |nth: usize| move |talk: &Talk<'_>| talk.back(udp(DPORT, talk.chosen(nth, SPORT), talk.data(30)));
    vec![
        named("from a system port").pod(from(53)).world(answer(0)),
        named("from port 1023").pod(from(1023)).world(answer(0)),
        named("from port 1024").pod(from(1024)).world(answer(0)),
        named("from the last port").pod(from(65535)).world(answer(0)),
        named("from port 0").pod(from(0)).world(answer(0)),
        named("to port 0")
            .pod(|talk| talk.out(udp(SPORT, 0, talk.data(20))))
            .world(|talk| talk.back(udp(0, talk.chosen(0, SPORT), talk.data(20)))),
        named("two pods with one port")
            .pod(|talk| talk.udp_out(20))
            .pod(|talk| talk.udp_out(21).with(|packet| packet.from = talk.cast.other_pod()))
            .world(answer(1))
            .world(answer(0)),
        named("one port to two servers")
            .pod(|talk| talk.udp_out(20))
            .pod(|talk| talk.udp_out(21).with(|packet| packet.to = talk.cast.second_server()))
            .world(answer(0))
            .world(move |talk| answer(1)(talk).with(|packet| packet.from = talk.cast.second_server())),
        named("one port to two ports")
            .pod(|talk| talk.udp_out(20))
            .pod(|talk| talk.out(udp(SPORT, 81, talk.data(21))))
            .world(|talk| talk.back(udp(81, talk.chosen(1, SPORT), talk.data(30))))
            .world(answer(0)),
        named("answer from another port")
            .pod(|talk| talk.udp_out(20))
            .world(|talk| talk.back(udp(81, talk.chosen(0, SPORT), talk.data(20)))),
        named("answer from another host")
            .pod(|talk| talk.udp_out(20))
            .world(move |talk| answer(0)(talk).with(|packet| packet.from = talk.cast.second_server())),
        named("answer to another port")
            .pod(|talk| talk.udp_out(20))
            .world(|talk| talk.back(udp(DPORT, talk.chosen(0, SPORT) ^ 1, talk.data(20)))),
        named("the same port at both ends")
            .pod(|talk| talk.out(udp(5000, 5000, talk.data(20))))
            .world(|talk| talk.back(udp(5000, talk.chosen(0, 5000), talk.data(20)))),
    ]
}
