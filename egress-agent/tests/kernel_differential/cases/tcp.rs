//! TCP: begin, data and end of a connection, and segments that do not fit.

use super::{ACK, CLIENT, CWR, DPORT, ECE, FIN, PSH, RST, SERVER, SPORT, SYN, URG, open, segment, with_tcp};
use crate::packets::Transport;
use crate::runner::{Case, Talk};

pub(super) fn cases(v6: bool) -> Vec<Case> {
    let named = |name: &str| Case::new(&format!("TCP {name}"), v6);
    [beginning(&named), lasting(&named), ending(&named), astray(&named), contents(&named)]
        .into_iter()
        .flatten()
        .collect()
}

/// A segment of the pod within the connection, and of the server.
fn out(flags: u8, sent: u32, got: u32, length: usize) -> impl Fn(&Talk<'_>) -> crate::packets::PacketSpec {
    move |talk| talk.tcp_out(flags, CLIENT + 1 + sent, SERVER + 1 + got, length)
}

fn back(flags: u8, sent: u32, got: u32, length: usize) -> impl Fn(&Talk<'_>) -> crate::packets::PacketSpec {
    move |talk| talk.tcp_back(flags, SERVER + 1 + sent, CLIENT + 1 + got, length)
}

fn beginning(named: &dyn Fn(&str) -> Case) -> Vec<Case> {
    let syn = |talk: &Talk<'_>| talk.tcp_out(SYN, CLIENT, 0, 0);
    let syn_ack = |talk: &Talk<'_>| talk.tcp_back(SYN | ACK, SERVER, CLIENT + 1, 0);
    vec![
        open(named("handshake")),
        open(named("SYN sent twice").pod(syn)),
        open(named("SYN+ACK sent twice")).world(syn_ack).pod(out(ACK, 0, 0, 0)),
        named("SYN refused by RST").pod(syn).world(|talk| talk.tcp_back(RST | ACK, 0, CLIENT + 1, 0)),
        named("SYN again after it was refused")
            .pod(syn)
            .world(|talk| talk.tcp_back(RST | ACK, 0, CLIENT + 1, 0))
            .pod(|talk| talk.tcp_out(SYN, CLIENT + 5000, 0, 0))
            .world(|talk| talk.tcp_back(SYN | ACK, SERVER, CLIENT + 5001, 0)),
        named("both open at once")
            .pod(syn)
            .world(|talk| talk.tcp_back(SYN, SERVER, 0, 0))
            .pod(|talk| talk.tcp_out(SYN | ACK, CLIENT, SERVER + 1, 0))
            .world(syn_ack)
            .pod(out(PSH | ACK, 0, 0, 30)),
        named("SYN+ACK from another port")
            .pod(syn)
            .world(|talk| with_tcp(talk.tcp_back(SYN | ACK, SERVER, CLIENT + 1, 0), |tcp| tcp.sport = 81)),
        named("SYN+ACK from another host").pod(syn).world(|talk| {
            talk.tcp_back(SYN | ACK, SERVER, CLIENT + 1, 0).with(|packet| packet.from = talk.cast.second_server())
        }),
        named("SYN+ACK to another port")
            .pod(syn)
            .world(|talk| with_tcp(talk.tcp_back(SYN | ACK, SERVER, CLIENT + 1, 0), |tcp| tcp.dport ^= 1)),
        named("SYN with data").pod(|talk| talk.tcp_out(SYN, CLIENT, 0, 40)).world(syn_ack),
        named("SYN with ECN")
            .pod(|talk| talk.tcp_out(SYN | ECE | CWR, CLIENT, 0, 0))
            .world(|talk| talk.tcp_back(SYN | ACK | ECE, SERVER, CLIENT + 1, 0)),
        named("two pods with one port")
            .pod(syn)
            .pod(|talk| talk.tcp_out(SYN, 5000, 0, 0).with(|packet| packet.from = talk.cast.other_pod()))
            .world(syn_ack)
            .world(|talk| with_tcp(talk.tcp_back(SYN | ACK, SERVER, 5001, 0), |tcp| tcp.dport = talk.chosen(1, SPORT))),
        named("one port to two servers")
            .pod(syn)
            .pod(|talk| talk.tcp_out(SYN, 5000, 0, 0).with(|packet| packet.to = talk.cast.second_server()))
            .world(syn_ack)
            .world(|talk| {
                let answer =
                    with_tcp(talk.tcp_back(SYN | ACK, SERVER, 5001, 0), |tcp| tcp.dport = talk.chosen(1, SPORT));
                answer.with(|packet| packet.from = talk.cast.second_server())
            }),
        named("from a system port")
            .pod(|talk| with_tcp(talk.tcp_out(SYN, CLIENT, 0, 0), |tcp| tcp.sport = 513))
            .world(syn_ack),
        named("from the last port")
            .pod(|talk| with_tcp(talk.tcp_out(SYN, CLIENT, 0, 0), |tcp| tcp.sport = 65535))
            .world(syn_ack),
        named("from port 0").pod(|talk| with_tcp(talk.tcp_out(SYN, CLIENT, 0, 0), |tcp| tcp.sport = 0)),
        named("to port 0").pod(|talk| with_tcp(talk.tcp_out(SYN, CLIENT, 0, 0), |tcp| tcp.dport = 0)),
    ]
}

fn lasting(named: &dyn Fn(&str) -> Case) -> Vec<Case> {
    vec![
        open(named("data both ways"))
            .pod(out(PSH | ACK, 0, 0, 100))
            .world(back(ACK, 0, 100, 0))
            .world(back(PSH | ACK, 0, 100, 1200))
            .pod(out(ACK, 100, 1200, 0)),
        open(named("data out of order"))
            .world(back(ACK, 100, 0, 100))
            .world(back(ACK, 0, 0, 100))
            .pod(out(ACK, 0, 200, 0)),
        open(named("data sent twice"))
            .pod(out(PSH | ACK, 0, 0, 100))
            .pod(out(PSH | ACK, 0, 0, 100))
            .world(back(ACK, 0, 100, 0)),
        open(named("keep-alive")).pod(|talk| talk.tcp_out(ACK, CLIENT, SERVER + 1, 0)).world(back(ACK, 0, 0, 0)),
        open(named("one byte of data")).pod(out(PSH | ACK, 0, 0, 7)).world(back(PSH | ACK, 0, 7, 9)),
        open(named("window of zero"))
            .world(move |talk| with_tcp(back(ACK, 0, 0, 0)(talk), |tcp| tcp.window = 0))
            .pod(out(ACK, 0, 0, 0)),
        open(named("urgent data"))
            .pod(move |talk| with_tcp(out(PSH | ACK | URG, 0, 0, 20)(talk), |tcp| tcp.urgent = 13)),
        named("picked up in mid-stream, from the pod").pod(out(PSH | ACK, 0, 0, 50)).world(back(ACK, 0, 50, 0)),
        named("picked up in mid-stream, from outside").world(back(PSH | ACK, 0, 0, 50)),
        open(named("SYN in the middle of a connection"))
            .pod(|talk| talk.tcp_out(SYN, CLIENT + 90_000, 0, 0))
            .world(back(ACK, 0, 0, 0))
            .pod(out(ACK, 0, 0, 0)),
        open(named("SYN from outside in the middle of a connection"))
            .world(|talk| talk.tcp_back(SYN, SERVER + 90_000, 0, 0))
            .pod(out(PSH | ACK, 0, 0, 30)),
    ]
}

fn ending(named: &dyn Fn(&str) -> Case) -> Vec<Case> {
    let closed =
        |case: Case| open(case).pod(out(FIN | ACK, 0, 0, 0)).world(back(FIN | ACK, 0, 1, 0)).pod(out(ACK, 1, 1, 0));
    vec![
        closed(named("closed by the pod")),
        open(named("closed by the server"))
            .world(back(FIN | ACK, 0, 0, 0))
            .pod(out(ACK, 0, 1, 0))
            .pod(out(FIN | ACK, 0, 1, 0))
            .world(back(ACK, 1, 1, 0)),
        open(named("closed by both at once"))
            .pod(out(FIN | ACK, 0, 0, 0))
            .world(back(FIN | ACK, 0, 0, 0))
            .pod(out(ACK, 1, 1, 0))
            .world(back(ACK, 1, 1, 0)),
        open(named("half closed, data still comes"))
            .pod(out(FIN | ACK, 0, 0, 0))
            .world(back(ACK, 0, 1, 0))
            .world(back(PSH | ACK, 0, 1, 300))
            .pod(out(ACK, 1, 300, 0)),
        open(named("RST from the pod")).pod(out(RST, 0, 0, 0)),
        open(named("RST+ACK from the server")).world(back(RST | ACK, 0, 0, 0)),
        closed(named("answer after both have closed")).world(back(ACK, 1, 1, 0)),
        open(named("data from outside after the pod's RST")).pod(out(RST, 0, 0, 0)).world(back(PSH | ACK, 0, 0, 50)),
        open(named("data from the pod after the server's RST")).world(back(RST | ACK, 0, 0, 0)).pod(out(
            PSH | ACK,
            0,
            0,
            50,
        )),
        closed(named("port used again after closing"))
            .pod(|talk| talk.tcp_out(SYN, CLIENT + 500_000, 0, 0))
            .world(|talk| talk.tcp_back(SYN | ACK, SERVER + 500_000, CLIENT + 500_001, 0))
            .pod(|talk| talk.tcp_out(ACK, CLIENT + 500_001, SERVER + 500_001, 0)),
        open(named("port used again after the pod's RST"))
            .pod(out(RST, 0, 0, 0))
            .pod(|talk| talk.tcp_out(SYN, CLIENT + 500_000, 0, 0))
            .world(|talk| talk.tcp_back(SYN | ACK, SERVER + 500_000, CLIENT + 500_001, 0)),
    ]
}

/// Segments that connection tracking calls invalid.
fn astray(named: &dyn Fn(&str) -> Case) -> Vec<Case> {
    vec![
        open(named("RST from outside, out of the window"))
            .world(|talk| talk.tcp_back(RST, SERVER + 4_000_000, 0, 0))
            .pod(out(ACK, 0, 0, 0)),
        open(named("RST from outside, in the window but not next"))
            .world(|talk| talk.tcp_back(RST, SERVER + 100, 0, 0))
            .pod(out(ACK, 0, 0, 0)),
        open(named("data from outside, out of the window"))
            .world(|talk| talk.tcp_back(PSH | ACK, SERVER + 4_000_000, CLIENT + 1, 20)),
        open(named("data from the pod, out of the window"))
            .pod(|talk| talk.tcp_out(PSH | ACK, CLIENT + 4_000_000, SERVER + 1, 20)),
        open(named("acknowledges what was never sent"))
            .world(|talk| talk.tcp_back(ACK, SERVER + 1, CLIENT + 4_000_000, 0)),
        named("ACK before the SYN was answered")
            .pod(|talk| talk.tcp_out(SYN, CLIENT, 0, 0))
            .pod(|talk| talk.tcp_out(ACK, CLIENT + 1, SERVER + 1, 0)),
        named("FIN before the SYN was answered")
            .pod(|talk| talk.tcp_out(SYN, CLIENT, 0, 0))
            .pod(|talk| talk.tcp_out(FIN | ACK, CLIENT + 1, SERVER + 1, 0)),
        named("begins with RST").pod(|talk| talk.tcp_out(RST, CLIENT, 0, 0)),
        named("begins with FIN").pod(|talk| talk.tcp_out(FIN | ACK, CLIENT, SERVER, 0)),
        named("begins with SYN+ACK").pod(|talk| talk.tcp_out(SYN | ACK, CLIENT, SERVER, 0)),
        named("no flags").pod(|talk| talk.tcp_out(0, CLIENT, 0, 0)),
        named("SYN+FIN").pod(|talk| talk.tcp_out(SYN | FIN, CLIENT, 0, 0)),
        named("SYN+RST").pod(|talk| talk.tcp_out(SYN | RST, CLIENT, 0, 0)),
        named("all flags").pod(|talk| talk.tcp_out(0xff, CLIENT, 0, 0)),
        open(named("no flags within a connection")).world(back(0, 0, 0, 0)),
    ]
}

fn contents(named: &dyn Fn(&str) -> Case) -> Vec<Case> {
    let mss = [2, 4, 5, 0xb4];
    let all = [2, 4, 5, 0xb4, 4, 2, 8, 10, 0, 0, 0, 1, 0, 0, 0, 0, 1, 3, 3, 7];
    let stamps = [1, 1, 8, 10, 0, 0, 0, 2, 0, 0, 0, 1];
    let sack = [1, 1, 5, 10, 0, 0, 0x23, 0x8d, 0, 0, 0x23, 0xf1];
    vec![
        named("all the usual options")
            .pod(move |talk| with_tcp(talk.tcp_out(SYN, CLIENT, 0, 0), |tcp| tcp.options = all.to_vec()))
            .world(move |talk| {
                with_tcp(talk.tcp_back(SYN | ACK, SERVER, CLIENT + 1, 0), |tcp| tcp.options = all.to_vec())
            })
            .pod(move |talk| with_tcp(out(PSH | ACK, 0, 0, 33)(talk), |tcp| tcp.options = stamps.to_vec())),
        named("forty bytes of options").pod(move |talk| {
            with_tcp(talk.tcp_out(SYN, CLIENT, 0, 0), |tcp| tcp.options = [mss.as_slice(), &[1; 36]].concat())
        }),
        open(named("selective acknowledgement"))
            .world(back(ACK, 100, 0, 100))
            .pod(move |talk| with_tcp(out(ACK, 0, 0, 0)(talk), |tcp| tcp.options = sack.to_vec())),
        named("an unknown option").pod(move |talk| {
            with_tcp(talk.tcp_out(SYN, CLIENT, 0, 0), |tcp| tcp.options = vec![253, 8, 1, 2, 3, 4, 5, 6])
        }),
        named("an option that is too long")
            .pod(move |talk| with_tcp(talk.tcp_out(SYN, CLIENT, 0, 0), |tcp| tcp.options = vec![8, 40, 0, 0])),
        open(named("odd length")).pod(out(PSH | ACK, 0, 0, 333)).world(back(PSH | ACK, 0, 333, 1111)),
        open(named("a full segment")).pod(out(ACK, 0, 0, 1300)).world(back(ACK, 0, 1300, 1300)),
        named("marked DSCP and ECN")
            .pod(|talk| talk.tcp_out(SYN, CLIENT, 0, 0).with(|packet| packet.tos = 0xb9))
            .world(|talk| talk.tcp_back(SYN | ACK, SERVER, CLIENT + 1, 0).with(|packet| packet.tos = 0x2a)),
        open(named("congestion experienced"))
            .world(move |talk| back(ACK, 0, 0, 50)(talk).with(|packet| packet.tos = 3))
            .pod(out(ACK | ECE, 0, 50, 0))
            .world(back(ACK | CWR, 50, 0, 50)),
        named("other reserved bits of the header").pod(|talk| {
            let mut tcp = segment((SPORT, DPORT), SYN, (CLIENT, 0), Vec::new());
            tcp.window = 0xffff;
            tcp.urgent = 0xffff;
            talk.out(Transport::Tcp(tcp))
        }),
    ]
}
