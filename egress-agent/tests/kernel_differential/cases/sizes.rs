//! Packets that are too long for the path: the ICMP error that its sender gets.

use super::{ACK, CLIENT, SERVER, open};
use crate::endpoints::NARROW;
use crate::packets::PacketSpec;
use crate::runner::{Case, Talk};

/// MTU of the management port; packets from outside have up to a hundred bytes more.
const PODS: usize = 1400;

fn headers(v6: bool, transport: usize) -> usize {
    transport + if v6 { 40 } else { 20 }
}

fn dont_fragment(packet: PacketSpec) -> PacketSpec {
    packet.with(|packet| packet.dont_fragment = true)
}

pub(super) fn cases(v6: bool) -> Vec<Case> {
    let mut cases = Vec::new();
    for (name, over) in [("that just fits", 0), ("that is one byte too long", 1), ("that is much too long", 60)] {
        let named = |kind: &str| Case::new(&format!("{kind} {name}"), v6);
        let udp = move |talk: &Talk<'_>| talk.udp_out(NARROW + over - headers(v6, 8));
        let tcp = move |talk: &Talk<'_>| talk.tcp_out(ACK, CLIENT + 1, SERVER + 1, NARROW + over - headers(v6, 20));
        let echo = move |talk: &Talk<'_>| talk.echo_out(7777, NARROW + over - headers(v6, 8));
        cases.push(named("UDP to a narrow path").narrow().pod(move |talk| dont_fragment(udp(talk))));
        cases.push(open(named("TCP to a narrow path").narrow()).pod(move |talk| dont_fragment(tcp(talk))));
        cases.push(named("echo to a narrow path").narrow().pod(move |talk| dont_fragment(echo(talk))));
        if !v6 {
            cases.push(named("UDP that may be fragmented to a narrow path").narrow().pod(udp));
        }
        let udp_back = move |talk: &Talk<'_>| talk.udp_back(PODS + over - headers(v6, 8));
        let echo_back = move |talk: &Talk<'_>| talk.echo_back(7777, PODS + over - headers(v6, 8));
        let tcp_back = move |talk: &Talk<'_>| talk.tcp_back(ACK, SERVER + 1, CLIENT + 1, PODS + over - headers(v6, 20));
        cases.push(
            named("UDP for the pod").pod(|talk| talk.udp_out(20)).world(move |talk| dont_fragment(udp_back(talk))),
        );
        cases.push(open(named("TCP for the pod")).world(move |talk| dont_fragment(tcp_back(talk))));
        cases.push(
            named("echo for the pod")
                .pod(|talk| talk.echo_out(7777, 20))
                .world(move |talk| dont_fragment(echo_back(talk))),
        );
        if !v6 {
            cases.push(named("UDP that may be fragmented for the pod").pod(|talk| talk.udp_out(20)).world(udp_back));
        }
    }
    cases
}
