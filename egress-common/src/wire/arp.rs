//! ARP over Ethernet (RFC 826): requests for an egress IP, the reply, and claims of other hosts.

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
/// Hardware type of IEEE 802 networks, which hosts on Ethernet accept too (`arp_process` in Linux).
const IEEE_802_IPV4: [u8; 6] = [0, 6, 8, 0, 6, 4];

/// The fields of an ARP message that its reply needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArpMessage {
    pub operation: u16,
    pub sender_mac: [u8; 6],
    pub sender_ip: [u8; 4],
    pub target_ip: [u8; 4],
}

impl ArpMessage {
    /// `None` unless the frame is ARP for IPv4 over Ethernet.
    #[inline(always)]
    pub fn parse<F: Frame + ?Sized>(frame: &F) -> Option<Self> {
        let kind = frame.load::<6>(ETH_LEN)?;
        if kind != ETHERNET_IPV4 && kind != IEEE_802_IPV4 {
            return None;
        }
        Some(Self {
            operation: u16::from_be_bytes(frame.load(ETH_LEN + OPERATION)?),
            sender_mac: frame.load(ETH_LEN + SENDER_MAC)?,
            sender_ip: frame.load(ETH_LEN + SENDER_IP)?,
            target_ip: frame.load(ETH_LEN + TARGET_IP)?,
        })
    }

    #[inline(always)]
    pub const fn is_request(&self) -> bool {
        self.operation == REQUEST
    }

    /// The address that the sender claims, in a request or reply (RFC 5227 section 2.4). A probe claims none.
    #[inline(always)]
    pub const fn sender(&self) -> Addr {
        Addr::v4(self.sender_ip)
    }

    #[inline(always)]
    pub const fn target(&self) -> Addr {
        Addr::v4(self.target_ip)
    }

    /// The frame of the reply.
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
    fn a_request_and_its_answer_are_read() {
        let mut frame = std::vec![0xffu8; 6];
        frame.extend([2, 0, 0, 0, 0, 9, 8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
        frame.extend([2, 0, 0, 0, 0, 9, 172, 18, 0, 1, 0, 0, 0, 0, 0, 0, 172, 18, 0, 100]);
        let request = ArpMessage::parse(frame.as_slice()).expect("a request");
        assert!(request.is_request());
        assert_eq!(request.sender(), Addr::v4([172, 18, 0, 1]));
        assert_eq!(request.target(), Addr::v4([172, 18, 0, 100]));
        let answer = request.answer([2, 0, 0, 0, 0, 1]);
        assert_eq!(answer[..6], [2, 0, 0, 0, 0, 9]);
        assert_eq!(answer[28..32], [172, 18, 0, 100]);
        let reply = ArpMessage::parse(answer.as_slice()).expect("a reply");
        assert_eq!((reply.is_request(), reply.sender()), (false, Addr::v4([172, 18, 0, 100])));
        assert_eq!(ArpMessage::parse(&frame[..40]), None, "cut short");
        for (hardware, is_read) in [(6, true), (7, false)] {
            let other = [&frame[..15], &[hardware], &frame[16..]].concat();
            assert_eq!(ArpMessage::parse(other.as_slice()).is_some(), is_read, "hardware type {hardware}");
        }
    }
}
