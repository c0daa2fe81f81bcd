//! ARP over Ethernet (RFC 826): the request that asks for an egress IP, and its answer.

use super::{ETH_LEN, Frame};
use crate::abi::Addr;

pub const LEN: usize = 28;
const OPERATION: usize = 6;
const SENDER_MAC: usize = 8;
const SENDER_IP: usize = 14;
const TARGET_IP: usize = 24;
const REQUEST: u16 = 1;
const REPLY: u16 = 2;
/// Hardware type Ethernet, protocol type IPv4, lengths 6 and 4.
const ETHERNET_IPV4: [u8; 6] = [0, 1, 8, 0, 6, 4];

/// An ARP request as far as its answer needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    pub sender_mac: [u8; 6],
    pub sender_ip: [u8; 4],
    pub target_ip: [u8; 4],
}

impl Request {
    /// `None` unless the frame is an ARP request for an IPv4 address.
    #[inline(always)]
    pub fn parse<F: Frame + ?Sized>(frame: &F) -> Option<Self> {
        if frame.load::<6>(ETH_LEN)? != ETHERNET_IPV4 || u16::from_be_bytes(frame.load(ETH_LEN + OPERATION)?) != REQUEST
        {
            return None;
        }
        Some(Self {
            sender_mac: frame.load(ETH_LEN + SENDER_MAC)?,
            sender_ip: frame.load(ETH_LEN + SENDER_IP)?,
            target_ip: frame.load(ETH_LEN + TARGET_IP)?,
        })
    }

    #[inline(always)]
    pub const fn target(&self) -> Addr {
        Addr::v4(self.target_ip)
    }

    /// The whole frame of the answer.
    #[inline(always)]
    pub const fn answer(&self, mac: [u8; 6]) -> [u8; ETH_LEN + LEN] {
        let (s, i, t) = (self.sender_mac, self.sender_ip, self.target_ip);
        let [a, b] = REPLY.to_be_bytes();
        [
            s[0], s[1], s[2], s[3], s[4], s[5], mac[0], mac[1], mac[2], mac[3], mac[4], mac[5], 0x08, 0x06, 0, 1, 8, 0,
            6, 4, a, b, mac[0], mac[1], mac[2], mac[3], mac[4], mac[5], t[0], t[1], t[2], t[3], s[0], s[1], s[2], s[3],
            s[4], s[5], i[0], i[1], i[2], i[3],
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_a_request_and_nothing_else() {
        let mut frame = std::vec![0xffu8; 6];
        frame.extend([2, 0, 0, 0, 0, 9, 8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
        frame.extend([2, 0, 0, 0, 0, 9, 172, 18, 0, 1, 0, 0, 0, 0, 0, 0, 172, 18, 0, 100]);
        let request = Request::parse(frame.as_slice()).expect("a request");
        assert_eq!(request.target(), Addr::v4([172, 18, 0, 100]));
        let answer = request.answer([2, 0, 0, 0, 0, 1]);
        assert_eq!(answer[..6], [2, 0, 0, 0, 0, 9]);
        assert_eq!(answer[28..32], [172, 18, 0, 100]);
        assert_eq!(Request::parse(answer.as_slice()), None, "a reply is not a request");
        assert_eq!(Request::parse(&frame[..40]), None, "cut short");
    }
}
