//! Unsolicited packets: from outside without a NAT entry, broadcast, multicast, VLANs.

use std::net::IpAddr;

use super::{ACK, CLIENT, RST, SERVER, SYN, segment, udp};
use crate::packets::Transport;
use crate::runner::{Case, Shot, Side, Talk, shot};

pub(super) fn cases(v6: bool) -> Vec<Case> {
    let named = |name: &str| Case::new(&format!("unsolicited: {name}"), v6);
    let mut cases = vec![
        named("SYN").world(|talk| talk.tcp_back(SYN, SERVER, 0, 0)),
        named("SYN+ACK").world(|talk| talk.tcp_back(SYN | ACK, SERVER, CLIENT, 0)),
        named("ACK").world(|talk| talk.tcp_back(ACK, SERVER, CLIENT, 0)),
        named("RST").world(|talk| talk.tcp_back(RST, SERVER, 0, 0)),
        named("UDP").world(|talk| talk.udp_back(20)),
        named("echo request").world(|talk| talk.back(super::echo(talk.cast.v6, true, 5, talk.data(20)))),
        named("echo reply").world(|talk| talk.echo_back(5, 20)),
        named("to the pod's own address, UDP")
            .world(|talk| talk.udp_back(20).with(|packet| packet.to = talk.cast.pod())),
        named("to the pod's own address, in its flow")
            .pod(|talk| talk.udp_out(20))
            .world(|talk| talk.udp_back(20).with(|packet| packet.to = talk.cast.pod())),
        named("from the egress IP itself")
            .world(|talk| talk.udp_back(20).with(|packet| packet.from = talk.cast.egress())),
        named("with the pod's port to the system port").world(|talk| talk.back(udp(super::DPORT, 53, talk.data(20)))),
    ];
    cases.extend(groups(v6));
    cases.extend(vlans(v6));
    cases
}

/// Broadcast and multicast from a pod, and with such a source from outside.
fn groups(v6: bool) -> Vec<Case> {
    let to = |name: &str, address: &'static str| {
        let address: IpAddr = address.parse().expect("a literal");
        Case::new(&format!("from the pod to {name}"), v6)
            .pod(move |talk| talk.udp_out(20).with(|packet| packet.to = address))
    };
    if v6 {
        return vec![
            to("all nodes of the link", "ff02::1"),
            to("a group of the site", "ff05::1234"),
            to("a group of the world", "ff0e::1234"),
            to("a link-local address", "fe80::1234"),
            to("the unspecified address", "::"),
            to("the loopback address", "::1"),
        ];
    }
    vec![
        to("the broadcast address", "255.255.255.255"),
        to("the uplink's broadcast address", "172.18.255.255"),
        to("a group of the link", "224.0.0.5"),
        to("a group of the world", "239.1.2.3"),
        to("a link-local address", "169.254.7.7"),
        to("address 0.0.0.0", "0.0.0.0"),
        to("the loopback network", "127.0.0.9"),
        to("a reserved address", "240.0.0.1"),
    ]
}

fn vlans(v6: bool) -> Vec<Case> {
    let tag = |side: Side, bytes: Vec<u8>, vlan: u16| Shot { vlan: Some(vlan), ..shot(side, bytes) };
    vec![
        Case::new("VLAN 7: from the pod", v6).shots(move |talk| vec![tag(Side::Pods, talk.udp_out(20).bytes(), 7)]),
        Case::new("VLAN 7: from the pod, in its flow", v6)
            .pod(|talk| talk.udp_out(20))
            .shots(move |talk| vec![tag(Side::Pods, talk.udp_out(21).bytes(), 7)]),
        Case::new("VLAN 7: to the pod", v6)
            .pod(|talk| talk.udp_out(20))
            .shots(move |talk| vec![tag(Side::World, talk.udp_back(20).bytes(), 7)]),
        Case::new("priority tag: from the pod", v6)
            .shots(move |talk| vec![tag(Side::Pods, talk.udp_out(20).bytes(), 0x6000)]),
        Case::new("priority tag: to the pod", v6)
            .pod(|talk| talk.udp_out(20))
            .shots(move |talk| vec![tag(Side::World, talk.udp_back(20).bytes(), 0x6000)]),
        Case::new("for another host: to the pod", v6).pod(|talk| talk.udp_out(20)).shots(|talk: &Talk<'_>| {
            vec![Shot { to: Some([2, 0, 0, 0, 9, 9]), ..shot(Side::World, talk.udp_back(20).bytes()) }]
        }),
        Case::new("for another host: from the pod", v6).shots(|talk: &Talk<'_>| {
            vec![Shot { to: Some([2, 0, 0, 0, 9, 9]), ..shot(Side::Pods, talk.udp_out(20).bytes()) }]
        }),
        Case::new("to the link's broadcast: to the pod", v6).pod(|talk| talk.udp_out(20)).shots(|talk: &Talk<'_>| {
            vec![Shot { to: Some([0xff; 6]), ..shot(Side::World, talk.udp_back(20).bytes()) }]
        }),
        Case::new("to the link's broadcast: from the pod", v6).shots(|talk: &Talk<'_>| {
            let packet = talk.out(Transport::Tcp(segment((super::SPORT, super::DPORT), SYN, (CLIENT, 0), Vec::new())));
            vec![Shot { to: Some([0xff; 6]), ..shot(Side::Pods, packet.bytes()) }]
        }),
    ]
}
