//! Builder of packets of both families for the tests of the decisions. Without checksums, which decisions do not read.

use std::vec::Vec;

use super::memory_maps::addr;
use crate::abi::{Addr, Direction, Family};
use crate::wire::{Headers, PROTO_ICMP, PROTO_ICMPV6, PROTO_SCTP, PROTO_TCP, PROTO_UDP, Quote};

const FRAGMENT_HEADER: u8 = 44;

/// The fields of a frame.
#[derive(Clone, Debug)]
pub(crate) struct FrameFields {
    saddr: Addr,
    daddr: Addr,
    protocol: u8,
    ttl: u8,
    /// Offset in units of eight bytes, and whether more follow.
    fragment: Option<(u16, bool)>,
    payload: Vec<u8>,
}

/// UDP by default.
pub(crate) fn packet(saddr: &str, daddr: &str, sport: u16, dport: u16) -> FrameFields {
    let mut payload = [sport.to_be_bytes(), dport.to_be_bytes()].concat();
    payload.resize(28, 0);
    FrameFields { saddr: addr(saddr), daddr: addr(daddr), protocol: PROTO_UDP, ttl: 64, fragment: None, payload }
}

impl FrameFields {
    pub(crate) fn tcp(mut self, flags: u8) -> Self {
        self.protocol = PROTO_TCP;
        self.payload[12..14].copy_from_slice(&[0x50, flags]);
        self
    }

    /// SCTP whose first chunk has this type.
    pub(crate) fn sctp(mut self, chunk: u8) -> Self {
        self.protocol = PROTO_SCTP;
        self.payload[12] = chunk;
        self
    }

    /// An echo request.
    pub(crate) fn echo(self, id: u16) -> Self {
        self.icmp(8, 128, id)
    }

    pub(crate) fn echo_reply(self, id: u16) -> Self {
        self.icmp(0, 129, id)
    }

    pub(crate) fn unreachable(self) -> Self {
        self.icmp(3, 1, 0)
    }

    /// An ICMP message of any type.
    pub(crate) fn message(self, kind: u8) -> Self {
        self.icmp(kind, kind, 0)
    }

    /// As an error quotes it, if it was sent in this direction.
    pub(crate) fn quoted(&self, direction: Direction) -> Quote {
        Quote::of(Headers::parse(self.frame().as_slice(), direction).expect("an IP frame"))
    }

    fn icmp(mut self, v4: u8, v6: u8, id: u16) -> Self {
        let (protocol, kind) = if self.is_v4() { (PROTO_ICMP, v4) } else { (PROTO_ICMPV6, v6) };
        self.protocol = protocol;
        self.payload[..4].copy_from_slice(&[kind, 0, 0, 0]);
        self.payload[4..6].copy_from_slice(&id.to_be_bytes());
        self
    }

    pub(crate) fn protocol(mut self, protocol: u8) -> Self {
        self.protocol = protocol;
        self
    }

    pub(crate) fn ttl(mut self, ttl: u8) -> Self {
        self.ttl = ttl;
        self
    }

    /// Truncates the transport header.
    pub(crate) fn cut(mut self, length: usize) -> Self {
        self.payload.truncate(length);
        self
    }

    /// Offset in units of eight bytes.
    pub(crate) fn fragment(mut self, offset: u16, more: bool) -> Self {
        self.fragment = Some((offset, more));
        self
    }

    /// As a pod's side sends it.
    pub(crate) fn headers(&self) -> Headers {
        Headers::parse(self.frame().as_slice(), Direction::Egress).expect("an IP frame")
    }

    /// As it arrives for a pod or an egress IP.
    pub(crate) fn arriving(&self) -> Headers {
        Headers::parse(self.frame().as_slice(), Direction::Ingress).expect("an IP frame")
    }

    fn is_v4(&self) -> bool {
        self.saddr.family() == Family::V4
    }

    pub(crate) fn frame(&self) -> Vec<u8> {
        let mut frame = std::vec![0u8; 12];
        if self.is_v4() {
            let bits = self.fragment.map_or(0, |(offset, more)| offset | if more { 0x2000 } else { 0 });
            let length = (20 + self.payload.len()) as u16;
            frame.extend([0x08, 0x00, 0x45, 0]);
            frame.extend(length.to_be_bytes());
            frame.extend([0, 7]);
            frame.extend(bits.to_be_bytes());
            frame.extend([self.ttl, self.protocol, 0, 0]);
            frame.extend(self.saddr.v4_octets());
            frame.extend(self.daddr.v4_octets());
        } else {
            let first = if self.fragment.is_some() { FRAGMENT_HEADER } else { self.protocol };
            frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, self.payload.len() as u8, first, self.ttl]);
            frame.extend(self.saddr.octets());
            frame.extend(self.daddr.octets());
            if let Some((offset, more)) = self.fragment {
                frame.extend([self.protocol, 0]);
                frame.extend((offset << 3 | u16::from(more)).to_be_bytes());
                frame.extend([0, 0, 0, 7]);
            }
        }
        frame.extend(&self.payload);
        frame
    }
}
