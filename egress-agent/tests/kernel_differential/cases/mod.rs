//! The cases, one file for each kind; nearly all of them run in both families.

mod echo;
mod errors;
mod fragments;
mod headers;
mod malformed;
mod offload;
mod protocols;
mod random;
mod sizes;
mod tcp;
mod udp;
mod unsolicited;

use crate::packets::{PacketSpec, Tcp, Transport};
use crate::runner::{Case, Talk, tagged};

pub(crate) const FIN: u8 = 0x01;
pub(crate) const SYN: u8 = 0x02;
pub(crate) const RST: u8 = 0x04;
pub(crate) const PSH: u8 = 0x08;
pub(crate) const ACK: u8 = 0x10;
pub(crate) const URG: u8 = 0x20;
pub(crate) const ECE: u8 = 0x40;
pub(crate) const CWR: u8 = 0x80;

/// Default ports of the pod and of the server.
pub(crate) const SPORT: u16 = 40000;
pub(crate) const DPORT: u16 = 80;
/// First sequence numbers of the pod and of the server.
pub(crate) const CLIENT: u32 = 1000;
pub(crate) const SERVER: u32 = 9000;

/// All cases of both families.
pub(crate) fn all() -> Vec<Case> {
    let kinds = [
        tcp::cases,
        udp::cases,
        echo::cases,
        errors::cases,
        fragments::cases,
        headers::cases,
        protocols::cases,
        sizes::cases,
        malformed::cases,
        unsolicited::cases,
        offload::cases,
        random::cases,
    ];
    kinds.into_iter().flat_map(|cases| [false, true].into_iter().flat_map(cases)).collect()
}

impl Talk<'_> {
    fn data(&self, length: usize) -> Vec<u8> {
        tagged(self.cast.index, length)
    }

    /// From the pod to the server.
    fn out(&self, body: Transport) -> PacketSpec {
        PacketSpec::new(self.cast.pod(), self.cast.server(), body)
    }

    /// From the server to the egress IP.
    fn back(&self, body: Transport) -> PacketSpec {
        PacketSpec::new(self.cast.server(), self.cast.egress(), body)
    }

    fn tcp_out(&self, flags: u8, seq: u32, ack: u32, length: usize) -> PacketSpec {
        self.out(Transport::Tcp(segment((SPORT, DPORT), flags, (seq, ack), self.some(length))))
    }

    fn tcp_back(&self, flags: u8, seq: u32, ack: u32, length: usize) -> PacketSpec {
        let ports = (DPORT, self.chosen(0, SPORT));
        self.back(Transport::Tcp(segment(ports, flags, (seq, ack), self.some(length))))
    }

    fn some(&self, length: usize) -> Vec<u8> {
        if length == 0 { Vec::new() } else { self.data(length) }
    }

    fn udp_out(&self, length: usize) -> PacketSpec {
        self.out(udp(SPORT, DPORT, self.some(length)))
    }

    fn udp_back(&self, length: usize) -> PacketSpec {
        self.back(udp(DPORT, self.chosen(0, SPORT), self.some(length)))
    }

    fn echo_out(&self, id: u16, length: usize) -> PacketSpec {
        self.out(echo(self.cast.v6, true, id, self.some(length)))
    }

    fn echo_back(&self, id: u16, length: usize) -> PacketSpec {
        self.back(echo(self.cast.v6, false, self.chosen(0, id), self.some(length)))
    }
}

pub(crate) fn segment(ports: (u16, u16), flags: u8, (seq, ack): (u32, u32), data: Vec<u8>) -> Tcp {
    Tcp { sport: ports.0, dport: ports.1, seq, ack, flags, window: 0x2000, urgent: 0, options: Vec::new(), data }
}

pub(crate) fn udp(sport: u16, dport: u16, data: Vec<u8>) -> Transport {
    Transport::Udp { sport, dport, summed: true, data }
}

/// An echo message; its sequence number is 7.
pub(crate) fn echo(v6: bool, request: bool, id: u16, data: Vec<u8>) -> Transport {
    let kind = match (v6, request) {
        (false, true) => 8,
        (false, false) => 0,
        (true, true) => 128,
        (true, false) => 129,
    };
    let [a, b] = id.to_be_bytes();
    Transport::Icmp { kind, code: 0, rest: [a, b, 0, 7], data }
}

/// Changes the TCP header of a packet.
pub(crate) fn with_tcp(packet: PacketSpec, change: impl FnOnce(&mut Tcp)) -> PacketSpec {
    packet.with(|packet| match &mut packet.body {
        Transport::Tcp(tcp) => change(tcp),
        other => panic!("no TCP: {other:?}"),
    })
}

/// The three packets that begin a connection.
pub(crate) fn open(case: Case) -> Case {
    case.pod(|talk| talk.tcp_out(SYN, CLIENT, 0, 0))
        .world(|talk| talk.tcp_back(SYN | ACK, SERVER, CLIENT + 1, 0))
        .pod(|talk| talk.tcp_out(ACK, CLIENT + 1, SERVER + 1, 0))
}
