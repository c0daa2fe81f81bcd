//! Packets with checksum offload and segmentation offload, as a pod's sockets send them.

use super::{ACK, CLIENT, PSH, SERVER, SYN, open};
use crate::layout::View;
use crate::packets::{PacketSpec, sum};
use crate::runner::{Case, Shot, Side, Talk, shot};
use crate::sockets::{GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, Offload};

const TCP_SUM: u16 = 16;
const UDP_SUM: u16 = 6;

/// The packet with the sum of its pseudo header where its checksum will be.
fn unfinished(side: Side, packet: &PacketSpec, at: u16, segments: Option<(u8, u16)>) -> Vec<Shot> {
    let mut bytes = packet.bytes();
    let (start, pseudo) = {
        let view = View::of(&bytes).expect("a packet");
        let ends = [crate::packets::octets(view.from), crate::packets::octets(view.to)].concat();
        let length = crate::packets::word(view.payload.len());
        (view.payload_at, sum(&[&ends, &[0, view.protocol], &length]))
    };
    let field = start + usize::from(at);
    bytes[field..field + 2].copy_from_slice(&pseudo.to_be_bytes());
    let checksum = Some((u16::try_from(start).expect("an offset"), at));
    vec![Shot { offload: Offload { checksum, segments }, ..shot(side, bytes) }]
}

pub(super) fn cases(v6: bool) -> Vec<Case> {
    let named = |name: &str| Case::new(&format!("offload: {name}"), v6);
    let tcp_kind = if v6 { GSO_TCPV6 } else { GSO_TCPV4 };
    let whole = |packet: PacketSpec| packet.with(|packet| packet.dont_fragment = true);
    let data_out = move |talk: &Talk<'_>, length| whole(talk.tcp_out(PSH | ACK, CLIENT + 1, SERVER + 1, length));
    let data_back = move |talk: &Talk<'_>, length| whole(talk.tcp_back(PSH | ACK, SERVER + 1, CLIENT + 1, length));
    let mut cases = vec![
        named("TCP checksum")
            .shots(|talk| unfinished(Side::Pods, &talk.tcp_out(SYN, CLIENT, 0, 0), TCP_SUM, None))
            .shots(|talk| unfinished(Side::World, &talk.tcp_back(SYN | ACK, SERVER, CLIENT + 1, 0), TCP_SUM, None)),
        named("UDP checksum")
            .shots(|talk| unfinished(Side::Pods, &talk.udp_out(33), UDP_SUM, None))
            .shots(|talk| unfinished(Side::World, &talk.udp_back(33), UDP_SUM, None)),
        named("UDP checksum with another port")
            .pod(|talk| talk.udp_out(33).with(|packet| packet.from = talk.cast.other_pod()))
            .shots(|talk| unfinished(Side::Pods, &talk.udp_out(33), UDP_SUM, None))
            .shots(|talk| {
                let back = talk.back(super::udp(super::DPORT, talk.chosen(1, super::SPORT), talk.data(20)));
                unfinished(Side::World, &back, UDP_SUM, None)
            }),
        open(named("TCP segments from the pod"))
            .shots(move |talk| unfinished(Side::Pods, &data_out(talk, 5000), TCP_SUM, Some((tcp_kind, 1300)))),
        open(named("TCP segments to the pod"))
            .shots(move |talk| unfinished(Side::World, &data_back(talk, 5000), TCP_SUM, Some((tcp_kind, 1300)))),
        named("UDP segments from the pod")
            .shots(|talk| unfinished(Side::Pods, &talk.udp_out(4000), UDP_SUM, Some((GSO_UDP_L4, 1000)))),
        named("UDP segments to the pod")
            .pod(|talk| talk.udp_out(20))
            .shots(|talk| unfinished(Side::World, &talk.udp_back(4000), UDP_SUM, Some((GSO_UDP_L4, 1000)))),
        open(named("TCP segments too long for the path").narrow())
            .shots(move |talk| unfinished(Side::Pods, &data_out(talk, 5000), TCP_SUM, Some((tcp_kind, 1340)))),
        open(named("TCP segments too long for the pod"))
            .shots(move |talk| unfinished(Side::World, &data_back(talk, 5000), TCP_SUM, Some((tcp_kind, 1420)))),
        named("checksum of an oversize datagram").narrow().shots(|talk| {
            let packet = talk.udp_out(1330).with(|packet| packet.dont_fragment = true);
            unfinished(Side::Pods, &packet, UDP_SUM, None)
        }),
    ];
    if !v6 {
        cases.push(
            named("checksum of a datagram that is fragmented for the pod")
                .pod(|talk| talk.udp_out(20))
                .shots(|talk| unfinished(Side::World, &talk.udp_back(1420), UDP_SUM, None)),
        );
        cases.push(
            named("checksum of a datagram that is fragmented for the path")
                .narrow()
                .shots(|talk| unfinished(Side::Pods, &talk.udp_out(1330), UDP_SUM, None)),
        );
    }
    cases
}
