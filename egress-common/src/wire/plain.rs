//! A plain packet: whole TCP or UDP, without IPv4 options or IPv6 extension headers.
//!
//! Its fields come from one window of the frame and stay in registers, for checks before [`Headers`](super::Headers)
//! are parsed.

use super::{ETH_LEN, Frame, IPV4_LEN, IPV6_LEN, L3, PROTO_TCP, PROTO_UDP, ethertype, ipv4};
use crate::abi::{Addr, Family};

/// Words of the network header and of the shortest transport header that is read.
const V4_WORDS: usize = IPV4_LEN / 4 + 2;
const V6_WORDS: usize = IPV6_LEN / 4 + 2;

/// Version 4 and five words of header: no options.
const VERSION_AND_LENGTH: u8 = 0x45;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plain {
    pub saddr: Addr,
    pub daddr: Addr,
    pub family: Family,
    pub protocol: u8,
    pub sport: u16,
    pub dport: u16,
}

impl Plain {
    /// `None` for any other packet, also for one with an IPv4-mapped address.
    #[inline(always)]
    pub fn read<F: Frame + ?Sized>(frame: &F) -> Option<Self> {
        match u16::from_be_bytes(frame.load(ETH_LEN - 2)?) {
            ethertype::IPV4 => Self::read_v4(frame.words(L3)?),
            ethertype::IPV6 => Self::read_v6(frame.words(L3)?),
            _ => None,
        }
    }

    #[inline(always)]
    fn read_v4(words: [u32; V4_WORDS]) -> Option<Self> {
        let [first, fragment, third, saddr, daddr, ports, _] = words;
        let is_whole = u32::from_be(fragment) as u16 & (ipv4::OFFSET_MASK | ipv4::MORE_FRAGMENTS) == 0;
        let [_, protocol, ..] = third.to_ne_bytes();
        if first.to_ne_bytes()[0] != VERSION_AND_LENGTH || !is_whole || !has_ports(protocol) {
            return None;
        }
        let (saddr, daddr) = (Addr::v4(saddr.to_ne_bytes()), Addr::v4(daddr.to_ne_bytes()));
        Some(Self::new(saddr, daddr, Family::V4, protocol, ports))
    }

    #[inline(always)]
    fn read_v6(words: [u32; V6_WORDS]) -> Option<Self> {
        let [first, second, s0, s1, s2, s3, d0, d1, d2, d3, ports, _] = words;
        let (saddr, daddr) = (Addr::from_words([s0, s1, s2, s3]), Addr::from_words([d0, d1, d2, d3]));
        let [.., protocol, _] = second.to_ne_bytes();
        let is_mapped = saddr.family() == Family::V4 || daddr.family() == Family::V4;
        if first.to_ne_bytes()[0] >> 4 != 6 || is_mapped || !has_ports(protocol) {
            return None;
        }
        Some(Self::new(saddr, daddr, Family::V6, protocol, ports))
    }

    #[inline(always)]
    const fn new(saddr: Addr, daddr: Addr, family: Family, protocol: u8, ports: u32) -> Self {
        let ports = u32::from_be(ports);
        Self { saddr, daddr, family, protocol, sport: (ports >> 16) as u16, dport: ports as u16 }
    }

    #[inline(always)]
    pub const fn is_udp_to(&self, port: u32) -> bool {
        self.protocol == PROTO_UDP && self.dport as u32 == port
    }
}

#[inline(always)]
const fn has_ports(protocol: u8) -> bool {
    matches!(protocol, PROTO_TCP | PROTO_UDP)
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;
    use crate::abi::Direction;
    use crate::decide::cast::{V4, V6, both};
    use crate::decide::packets::packet;
    use crate::wire::{Fragment, Headers, L4, ipv6};

    fn read(frame: &[u8]) -> Option<Plain> {
        Plain::read(frame)
    }

    #[test]
    fn whole_tcp_and_udp_packets_read_as_their_headers_do() {
        both(|cast, _| {
            let udp = packet(cast.pod, cast.world, 4000, 80);
            let others = [
                udp.clone().protocol(47),
                udp.clone().echo(7),
                udp.clone().sctp(1),
                udp.clone().fragment(0, true),
                udp.clone().fragment(8, true),
                udp.clone().fragment(8, false),
                udp.clone().cut(7),
            ];
            assert!(others.iter().all(|packet| read(&packet.frame()).is_none()));
            for packet in [udp.clone(), udp.clone().cut(8), udp.tcp(0x10)] {
                let (plain, headers) = (read(&packet.frame()).expect("a plain packet"), packet.headers());
                assert_eq!((headers.fragment, plain.family), (Fragment::Whole, headers.family));
                assert!(matches!(headers.l4, L4::Tcp | L4::Udp));
                let Plain { saddr, daddr, protocol, sport, dport, .. } = plain;
                let tuple = crate::abi::Tuple::new(Direction::Egress, saddr, daddr, sport, dport, protocol);
                assert_eq!(tuple, headers.tuple);
                assert_eq!(plain.is_udp_to(80), headers.is_udp_to(80));
                assert!(!plain.is_udp_to(4000));
            }
        });
    }

    #[test]
    fn other_headers_are_not_plain() {
        let v4 = packet(V4.pod, V4.world, 4000, 80).frame();
        let v6 = packet(V6.pod, V6.world, 4000, 80).frame();
        let changed = |frame: &[u8], at: usize, bytes: &[u8]| {
            let mut frame: Vec<u8> = frame.to_vec();
            frame[at..at + bytes.len()].copy_from_slice(bytes);
            read(&frame)
        };
        assert!(changed(&v4, L3, &[0x45]).is_some() && changed(&v6, L3, &[0x6f]).is_some());
        assert_eq!(changed(&v4, L3, &[0x46]), None, "options");
        assert_eq!(changed(&v4, L3, &[0x65]), None);
        assert_eq!(changed(&v6, L3, &[0x45]), None);
        assert_eq!(changed(&v4, ETH_LEN - 2, &[0x81, 0]), None, "a tag");
        assert!(changed(&v4, L3 + ipv4::FRAGMENT, &[0x40, 0]).is_some(), "DF");
        let mapped = Addr::v4([10, 244, 1, 10]).octets();
        for at in [ipv6::SADDR, ipv6::DADDR] {
            assert_eq!(changed(&v6, L3 + at, &mapped), None);
        }
        assert!(Headers::parse(v6.as_slice(), Direction::Egress).is_some());
    }
}
