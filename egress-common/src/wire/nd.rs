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
const ALL_NODES: Addr = Addr::v6([0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
const ALL_NODES_MAC: [u8; 6] = [0x33, 0x33, 0, 0, 0, 1];

/// A neighbour solicitation as far as its answer needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Solicitation<'a> {
    pub sender_mac: [u8; 6],
    pub sender: &'a Addr,
    pub target: Addr,
}

impl<'a> Solicitation<'a> {
    /// `None` unless the frame, whose source address has been read, is a neighbour solicitation without extension
    /// headers.
    #[inline(always)]
    pub fn parse<F: Frame + ?Sized>(frame: &F, sender: &'a Addr) -> Option<Self> {
        let [next_header, hop_limit] = frame.load(L3 + ipv6::NEXT_HEADER)?;
        let body = L3 + IPV6_LEN;
        if next_header != PROTO_ICMPV6
            || hop_limit != HOP_LIMIT
            || frame.load::<2>(body)? != [icmp::v6::NEIGHBOUR_SOLICITATION, 0]
        {
            return None;
        }
        Some(Self { sender_mac: frame.load(6)?, sender, target: frame.load_addr(body + TARGET)? })
    }

    /// Link address that the answer goes to.
    #[inline(always)]
    pub fn answer_mac(&self) -> [u8; 6] {
        if *self.sender == Addr::UNSPECIFIED { ALL_NODES_MAC } else { self.sender_mac }
    }

    /// Writes the whole frame of the answer. A solicitation from the unspecified address (duplicate address detection) is
    /// answered to all nodes and unsolicited, as section 7.2.4 asks.
    #[inline(always)]
    pub fn answer(&self, mac: [u8; 6], frame: &mut [u8; ADVERTISEMENT_LEN]) {
        let detecting = *self.sender == Addr::UNSPECIFIED;
        let (to, flags) =
            if detecting { (&ALL_NODES, FLAG_OVERRIDE) } else { (self.sender, FLAG_SOLICITED | FLAG_OVERRIDE) };
        advertisement(&self.answer_mac(), to, flags, &self.target, &mac, frame);
    }
}

#[inline(always)]
fn advertisement(
    to_mac: &[u8; 6],
    to: &Addr,
    flags: u8,
    target: &Addr,
    mac: &[u8; 6],
    frame: &mut [u8; ADVERTISEMENT_LEN],
) {
    *frame = [0u8; ADVERTISEMENT_LEN];
    put_mac(frame, 0, to_mac);
    put_mac(frame, 6, mac);
    put_mac(frame, L3 + IPV6_LEN + 26, mac);
    frame[12] = 0x86;
    frame[13] = 0xdd;
    frame[L3] = 0x60;
    frame[L3 + ipv6::PAYLOAD_LEN + 1] = BODY_LEN as u8;
    frame[L3 + ipv6::NEXT_HEADER] = PROTO_ICMPV6;
    frame[L3 + ipv6::HOP_LIMIT] = HOP_LIMIT;
    put_addr(frame, L3 + ipv6::SADDR, target);
    put_addr(frame, L3 + ipv6::DADDR, to);
    put_addr(frame, L3 + IPV6_LEN + TARGET, target);
    let body = L3 + IPV6_LEN;
    frame[body] = icmp::v6::NEIGHBOUR_ADVERTISEMENT;
    frame[body + 4] = flags;
    // Option: target link-layer address, one unit of eight bytes.
    frame[body + 24] = 2;
    frame[body + 25] = 1;
    // By words instead of over the bytes just written: shorter, and the addresses are at hand. The pseudo header has
    // source and destination, and the body has the source again as the target.
    let word = |a: u8, b: u8| u16::from_ne_bytes([a, b]) as u64;
    let sum = 2 * sum_words(target)
        + sum_words(to)
        + word(0, BODY_LEN as u8)
        + word(0, PROTO_ICMPV6)
        + word(icmp::v6::NEIGHBOUR_ADVERTISEMENT, 0)
        + word(flags, 0)
        + word(2, 1)
        + word(mac[0], mac[1])
        + word(mac[2], mac[3])
        + word(mac[4], mac[5]);
    let checksum = (!csum::fold64(sum)).to_ne_bytes();
    frame[body + 2] = checksum[0];
    frame[body + 3] = checksum[1];
}

// Out of line, because in the programs the bytes of all addresses at once would crowd the stack.

#[inline(never)]
fn put_addr(frame: &mut [u8; ADVERTISEMENT_LEN], at: usize, addr: &Addr) {
    for (to, from) in frame.iter_mut().skip(at).zip(addr.octets()) {
        *to = from;
    }
}

#[inline(never)]
fn put_mac(frame: &mut [u8; ADVERTISEMENT_LEN], at: usize, mac: &[u8; 6]) {
    for (to, from) in frame.iter_mut().skip(at).zip(mac) {
        *to = *from;
    }
}

#[inline(always)]
fn sum_words(addr: &Addr) -> u64 {
    let [a, b, c, d] = addr.words();
    a as u64 + b as u64 + c as u64 + d as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn solicitation(sender: &Addr) -> Solicitation<'_> {
        let mut target = [0u8; 16];
        target[0] = 0xfd;
        target[15] = 0x64;
        Solicitation { sender_mac: [2, 0, 0, 0, 0, 9], sender, target: Addr::v6(target) }
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
        let mut frame = [0; ADVERTISEMENT_LEN];
        solicitation(&Addr::v6(sender)).answer([2, 0, 0, 0, 0, 1], &mut frame);
        verify(&frame);
        assert_eq!(frame[..6], [2, 0, 0, 0, 0, 9]);
        solicitation(&Addr::UNSPECIFIED).answer([2, 0, 0, 0, 0, 1], &mut frame);
        verify(&frame);
        assert_eq!(frame[..6], ALL_NODES_MAC);
        assert_eq!(frame[L3 + IPV6_LEN + 4], FLAG_OVERRIDE);
    }
}
