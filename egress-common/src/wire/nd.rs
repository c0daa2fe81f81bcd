//! Neighbour discovery (RFC 4861): validation, solicitations for an egress IP, and the advertisement.

use super::{ETH_LEN, Frame, IPV6_LEN, L3, PROTO_ICMPV6, csum, icmp, ipv6};
use crate::abi::{Addr, Family};

/// Frame length of an advertisement with its target link-layer address option.
pub const ADVERTISEMENT_LEN: usize = ETH_LEN + IPV6_LEN + BODY_LEN;
const BODY_LEN: usize = 32;
/// Offsets in a message.
const FLAGS: usize = 4;
const TARGET: usize = 8;
const OPTIONS: usize = 24;
/// Options are so many bytes, or a multiple.
const UNIT: usize = 8;
const SOURCE_LINK: u8 = 1;
const TARGET_LINK: u8 = 2;
/// Longest message that is read. The mask bounds offsets for the verifier.
const MOST: usize = 128;
const MESSAGE_MASK: usize = MOST - 1;
/// First byte of a multicast address.
const MULTICAST: u8 = 0xff;
/// Where the message starts in its frame.
const BODY: usize = L3 + IPV6_LEN;
/// Solicited and override (section 4.4).
const FLAG_SOLICITED: u8 = 0x40;
const FLAG_OVERRIDE: u8 = 0x20;
/// Required hop limit: another one may come from beyond the link (section 7.1.1).
const HOP_LIMIT: u8 = 255;
const ALL_NODES: Addr = Addr::v6([0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
const ALL_NODES_MAC: [u8; 6] = [0x33, 0x33, 0, 0, 0, 1];

/// A valid message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NdMessage {
    /// [`icmp::v6::NEIGHBOUR_SOLICITATION`] or [`icmp::v6::NEIGHBOUR_ADVERTISEMENT`].
    pub kind: u8,
    flags: u8,
    /// Offset of the source's or target's link address option in the message; zero without one.
    link_at: usize,
}

/// Type and target of a neighbour discovery message, valid or not. `None` for other packets, and with extension
/// headers.
#[inline(always)]
pub fn about<F: Frame + ?Sized>(frame: &F) -> Option<(u8, Addr)> {
    let [next_header] = frame.load(L3 + ipv6::NEXT_HEADER)?;
    let [kind] = frame.load(BODY)?;
    let is_ours = kind == icmp::v6::NEIGHBOUR_SOLICITATION || kind == icmp::v6::NEIGHBOUR_ADVERTISEMENT;
    if next_header != PROTO_ICMPV6 || !is_ours {
        return None;
    }
    let target = frame.load_addr(BODY + TARGET)?;
    // An IPv4-mapped address; ARP resolves IPv4.
    if target.family() == Family::V4 {
        return None;
    }
    Some((kind, target))
}

impl NdMessage {
    /// The message, if RFC 4861 allows a node to accept it (section 7.1.1 for solicitations, 7.1.2 for advertisements),
    /// of a type that [`about`] has read. A message of more than 128 bytes, which no host sends, is refused too.
    #[inline(always)]
    pub fn parse<F: Frame + ?Sized>(frame: &F) -> Option<Self> {
        let sender = &frame.load_addr(L3 + ipv6::SADDR)?;
        let receiver = &frame.load_addr(L3 + ipv6::DADDR)?;
        let [kind] = frame.load(BODY)?;
        let length = usize::from(u16::from_be_bytes(frame.load(L3 + ipv6::PAYLOAD_LEN)?));
        let [hop_limit] = frame.load(L3 + ipv6::HOP_LIMIT)?;
        let [code] = frame.load(BODY + 1)?;
        let [flags] = frame.load(BODY + FLAGS)?;
        let [target] = frame.load(BODY + TARGET)?;
        let is_sized = (OPTIONS..=MOST).contains(&length) && length.is_multiple_of(UNIT);
        if !is_sized || hop_limit != HOP_LIMIT || code != 0 || target == MULTICAST || first(sender) == MULTICAST {
            return None;
        }
        let solicits = kind == icmp::v6::NEIGHBOUR_SOLICITATION;
        let link_at = link_option(frame, length, if solicits { SOURCE_LINK } else { TARGET_LINK })?;
        let is_allowed = match (solicits, *sender == Addr::UNSPECIFIED) {
            (true, true) => is_solicited_node(receiver) && link_at == 0,
            (true, false) => true,
            (false, unspecified) => !unspecified && (first(receiver) != MULTICAST || flags & FLAG_SOLICITED == 0),
        };
        (is_allowed && is_summed(frame, sender, receiver, length)).then_some(Self { kind, flags, link_at })
    }

    /// Encodes it as a non-zero number; [`from_word`](Self::from_word) decodes it.
    #[inline(always)]
    pub const fn word(self) -> u64 {
        self.kind as u64 | (self.flags as u64) << 8 | (self.link_at as u64) << 16
    }

    /// `None` for zero.
    #[inline(always)]
    pub const fn from_word(word: u64) -> Option<Self> {
        if word == 0 {
            return None;
        }
        Some(Self { kind: word as u8, flags: (word >> 8) as u8, link_at: (word >> 16) as usize & MESSAGE_MASK })
    }

    /// Whether an advertisement overrides neighbour caches. A proxy's does not (section 7.2.8).
    #[inline(always)]
    pub const fn overrides(&self) -> bool {
        self.kind == icmp::v6::NEIGHBOUR_ADVERTISEMENT && self.flags & FLAG_OVERRIDE != 0
    }

    /// The link address in the message, or else of its frame.
    #[inline(always)]
    pub fn link<F: Frame + ?Sized>(&self, frame: &F) -> Option<[u8; 6]> {
        if self.link_at == 0 { frame.load(6) } else { frame.load(BODY + (self.link_at & MESSAGE_MASK) + 2) }
    }
}

/// Offset of the first option of this type, zero without one; `None` if options are malformed.
#[inline(never)]
fn link_option<F: Frame + ?Sized>(frame: &F, length: usize, wanted: u8) -> Option<usize> {
    let (mut at, mut found, mut number) = (OPTIONS, 0, 0);
    while number < (MOST - OPTIONS) / UNIT && at < length {
        let [kind, units] = frame.load(BODY + (at & MESSAGE_MASK))?;
        if units == 0 {
            return None;
        }
        if kind == wanted && found == 0 {
            found = at;
        }
        at += usize::from(units) * UNIT;
        number += 1;
    }
    (at == length).then_some(found)
}

/// Whether the checksum is right (RFC 4443 section 2.3). Hosts do not offload it for neighbour discovery.
#[inline(never)]
fn is_summed<F: Frame + ?Sized>(frame: &F, sender: &Addr, receiver: &Addr, length: usize) -> bool {
    let pseudo = (length as u16).to_be() as u64 + (PROTO_ICMPV6 as u16).to_be() as u64;
    let mut sum = sum_words(sender) + sum_words(receiver) + pseudo;
    let mut at = 0;
    while at < MOST && at < length {
        let Some(word) = frame.load(BODY + at) else { return false };
        sum += u32::from_ne_bytes(word) as u64;
        at += 4;
    }
    csum::fold64(sum) == 0xffff
}

#[inline(always)]
fn first(addr: &Addr) -> u8 {
    addr.words()[0].to_ne_bytes()[0]
}

/// RFC 4291 section 2.7.1.
#[inline(always)]
fn is_solicited_node(addr: &Addr) -> bool {
    let [a, b, c, d] = addr.words();
    a == u32::from_ne_bytes([0xff, 2, 0, 0])
        && b == 0
        && c == u32::from_ne_bytes([0, 0, 0, 1])
        && d.to_ne_bytes()[0] == 0xff
}

/// The fields of a neighbour solicitation that its answer needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Solicitation<'a> {
    pub sender_mac: [u8; 6],
    pub sender: &'a Addr,
    pub target: Addr,
}

impl Solicitation<'_> {
    /// Destination link address of the answer.
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
    let body = BODY;
    frame[body] = icmp::v6::NEIGHBOUR_ADVERTISEMENT;
    frame[body + FLAGS] = flags;
    frame[body + OPTIONS] = TARGET_LINK;
    frame[body + OPTIONS + 1] = 1;
    // By words instead of the bytes just written: shorter, since the addresses are available. The pseudo header has
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

// Out of line, to keep the bytes of the addresses off the caller's stack.

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
    fn an_advertisement_names_its_link_address() {
        let (node, all) = (Addr::v6([0xfe; 16]), ALL_NODES);
        let mut frame = [0; ADVERTISEMENT_LEN];
        for (to, flags, is_believed) in
            [(&node, FLAG_SOLICITED | FLAG_OVERRIDE, true), (&all, FLAG_OVERRIDE, true), (&all, FLAG_SOLICITED, false)]
        {
            let target = solicitation(&node).target;
            advertisement(&[2, 0, 0, 0, 0, 9], to, flags, &target, &[2, 0, 0, 0, 0, 1], &mut frame);
            let (_, named) = about(&frame[..]).expect("neighbour discovery");
            let message = NdMessage::parse(&frame[..]);
            assert_eq!((named, message.is_some()), (target, is_believed));
            if let Some(message) = message {
                assert!(message.overrides());
                assert_eq!(NdMessage::from_word(message.word()), Some(message));
                assert_eq!(message.link(&frame[..]), Some([2, 0, 0, 0, 0, 1]));
            }
            for cut in 0..frame.len() {
                assert_eq!(NdMessage::parse(&frame[..cut]), None, "{cut} bytes");
            }
        }
    }

    #[test]
    fn an_advertisement_is_valid_for_unicast_and_multicast() {
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
