//! Neighbour discovery (RFC 4861): the solicitation that asks for an egress IP, and its advertisement.

use super::{ETH_LEN, Frame, IPV6_LEN, L3, PROTO_ICMPV6, csum, icmp, ipv6};
use crate::abi::Addr;

/// Frame length of an advertisement with its target link-layer address option.
pub const ADVERTISEMENT_LEN: usize = ETH_LEN + IPV6_LEN + BODY_LEN;
const BODY_LEN: usize = 32;
const TARGET: usize = 8;
/// Solicited and override (section 4.4).
const FLAG_SOLICITED: u8 = 0x40;
const FLAG_OVERRIDE: u8 = 0x20;
/// Neighbour discovery is refused when it may have come from beyond the link (section 7.1.1).
const HOP_LIMIT: u8 = 255;
const ALL_NODES: [u8; 16] = [0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
const ALL_NODES_MAC: [u8; 6] = [0x33, 0x33, 0, 0, 0, 1];

/// A neighbour solicitation as far as its answer needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Solicitation {
    pub sender_mac: [u8; 6],
    pub sender: Addr,
    pub target: Addr,
}

impl Solicitation {
    /// `None` unless the frame is a neighbour solicitation without extension headers.
    #[inline(always)]
    pub fn parse<F: Frame + ?Sized>(frame: &F) -> Option<Self> {
        let [next_header, hop_limit] = frame.load(L3 + ipv6::NEXT_HEADER)?;
        let body = L3 + IPV6_LEN;
        if next_header != PROTO_ICMPV6
            || hop_limit != HOP_LIMIT
            || frame.load::<2>(body)? != [icmp::v6::NEIGHBOUR_SOLICITATION, 0]
        {
            return None;
        }
        Some(Self {
            sender_mac: frame.load(6)?,
            sender: Addr::v6(frame.load(L3 + ipv6::SADDR)?),
            target: Addr::v6(frame.load(body + TARGET)?),
        })
    }

    /// The whole frame of the answer. A solicitation from the unspecified address (duplicate address detection) is
    /// answered to all nodes and unsolicited, as section 7.2.4 asks.
    #[inline(always)]
    pub fn answer(&self, mac: [u8; 6]) -> [u8; ADVERTISEMENT_LEN] {
        let detecting = self.sender == Addr::UNSPECIFIED;
        let (to_mac, to, flags) = if detecting {
            (ALL_NODES_MAC, ALL_NODES, FLAG_OVERRIDE)
        } else {
            (self.sender_mac, self.sender.octets(), FLAG_SOLICITED | FLAG_OVERRIDE)
        };
        advertisement(to_mac, to, flags, self.target, mac)
    }
}

#[inline(always)]
fn advertisement(to_mac: [u8; 6], to: [u8; 16], flags: u8, target: Addr, mac: [u8; 6]) -> [u8; ADVERTISEMENT_LEN] {
    let mut frame = [0u8; ADVERTISEMENT_LEN];
    let from = target.octets();
    let mut i = 0;
    while i < 6 {
        frame[i] = to_mac[i];
        frame[6 + i] = mac[i];
        frame[L3 + IPV6_LEN + 26 + i] = mac[i];
        i += 1;
    }
    frame[12] = 0x86;
    frame[13] = 0xdd;
    frame[L3] = 0x60;
    frame[L3 + ipv6::PAYLOAD_LEN + 1] = BODY_LEN as u8;
    frame[L3 + ipv6::NEXT_HEADER] = PROTO_ICMPV6;
    frame[L3 + ipv6::HOP_LIMIT] = HOP_LIMIT;
    let mut i = 0;
    while i < 16 {
        frame[L3 + ipv6::SADDR + i] = from[i];
        frame[L3 + ipv6::DADDR + i] = to[i];
        frame[L3 + IPV6_LEN + TARGET + i] = from[i];
        i += 1;
    }
    let body = L3 + IPV6_LEN;
    frame[body] = icmp::v6::NEIGHBOUR_ADVERTISEMENT;
    frame[body + 4] = flags;
    // Option: target link-layer address, one unit of eight bytes.
    frame[body + 24] = 2;
    frame[body + 25] = 1;
    // The pseudo header's addresses lie right before the body; its length and protocol are added by number.
    let mut sum = 0u64;
    let mut i = L3 + ipv6::SADDR;
    while i < ADVERTISEMENT_LEN {
        sum += u16::from_ne_bytes([frame[i], frame[i + 1]]) as u64;
        i += 2;
    }
    sum += (BODY_LEN as u16).to_be() as u64 + (PROTO_ICMPV6 as u16).to_be() as u64;
    let checksum = (!csum::fold64(sum)).to_ne_bytes();
    frame[body + 2] = checksum[0];
    frame[body + 3] = checksum[1];
    frame
}

#[cfg(test)]
mod tests {
    use super::*;

    fn solicitation(sender: [u8; 16]) -> Solicitation {
        let mut target = [0u8; 16];
        target[0] = 0xfd;
        target[15] = 0x64;
        Solicitation { sender_mac: [2, 0, 0, 0, 0, 9], sender: Addr::v6(sender), target: Addr::v6(target) }
    }

    fn verify(frame: &[u8]) {
        let body = L3 + IPV6_LEN;
        let pseudo = csum::sum(&frame[L3 + ipv6::SADDR..body])
            + (BODY_LEN as u16).to_be() as u64
            + (PROTO_ICMPV6 as u16).to_be() as u64;
        assert_eq!(csum::fold64(pseudo + csum::sum(&frame[body..])), 0xffff);
    }

    #[test]
    fn advertisement_is_valid_for_both_askers() {
        let mut sender = [0u8; 16];
        sender[0] = 0xfe;
        sender[15] = 1;
        let frame = solicitation(sender).answer([2, 0, 0, 0, 0, 1]);
        verify(&frame);
        assert_eq!(frame[..6], [2, 0, 0, 0, 0, 9]);
        let frame = solicitation([0; 16]).answer([2, 0, 0, 0, 0, 1]);
        verify(&frame);
        assert_eq!(frame[..6], ALL_NODES_MAC);
        assert_eq!(frame[L3 + IPV6_LEN + 4], FLAG_OVERRIDE);
    }
}
