//! Frames that claim an address for a link address: answers to ARP requests and neighbour solicitations, and announcements. Pure.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv6Addr};

use anyhow::Result;

use crate::capture::dissect::{CapturedFrame, ICMPV6, dissect};
use crate::traffic::neighbour::{HOP_LIMIT, SOLICITATION, solicited_node};
use crate::traffic::packet;

/// RFC 4861 section 4.4: an advertisement, its flags S and O, and the option of section 4.6.1.
const ADVERTISEMENT: u8 = 136;
const SOLICITED: u8 = 0x40;
const OVERRIDE: u8 = 0x20;
const TARGET_LINK_ADDRESS: [u8; 2] = [2, 1];
/// Where the asker's link address is in a frame, and the target of a neighbour solicitation without extension headers.
const SOURCE: std::ops::Range<usize> = 6..12;
const TARGET: std::ops::Range<usize> = 62..78;

const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);

/// The answer to a frame that asks for one of these addresses. A probe for duplicates, which has no sender, gets none.
pub(super) fn answer(frame: &[u8], mac: [u8; 6], own: &BTreeSet<IpAddr>) -> Result<Option<Vec<u8>>> {
    let (target, asker) = match dissect(frame) {
        CapturedFrame::Arp { request: true, sender, target, .. } if sender != target => (target.into(), sender.into()),
        CapturedFrame::Ip(packet) if packet.protocol == ICMPV6 && packet.source_port == u16::from(SOLICITATION) => {
            let Some(target) = frame.get(TARGET).and_then(|bytes| <[u8; 16]>::try_from(bytes).ok()) else {
                return Ok(None);
            };
            (IpAddr::from(target), packet.source)
        }
        CapturedFrame::Arp { .. } | CapturedFrame::Ip(_) | CapturedFrame::Other => return Ok(None),
    };
    let Some(asker_mac) = frame.get(SOURCE).and_then(|bytes| <[u8; 6]>::try_from(bytes).ok()) else { return Ok(None) };
    if asker.is_unspecified() || !own.contains(&target) {
        return Ok(None);
    }
    claim(mac, target, Some((asker_mac, asker))).map(Some)
}

/// Tells all neighbours who has the address now.
pub(super) fn announcement(mac: [u8; 6], address: IpAddr) -> Result<Vec<u8>> {
    claim(mac, address, None)
}

/// To one neighbour, or to all.
fn claim(mac: [u8; 6], address: IpAddr, to: Option<([u8; 6], IpAddr)>) -> Result<Vec<u8>> {
    match address {
        IpAddr::V4(v4) => {
            // RFC 826: a reply, Ethernet and IPv4. Unasked it names the address twice (RFC 5227 section 3).
            let head = [0x08, 0x06, 0, 1, 0x08, 0, 6, 4, 0, 2];
            let (to_mac, to) = to.unwrap_or(([0xff; 6], address));
            Ok([&to_mac, &mac[..], &head, &mac, &v4.octets(), &to_mac, &packet::octets(to)].concat())
        }
        IpAddr::V6(v6) => {
            let flags = if to.is_some() { SOLICITED | OVERRIDE } else { OVERRIDE };
            let (to_mac, to) = to.unwrap_or(([0x33, 0x33, 0, 0, 0, 1], ALL_NODES.into()));
            let head = [ADVERTISEMENT, 0, 0, 0, flags, 0, 0, 0];
            let body = [&head[..], &v6.octets(), &TARGET_LINK_ADDRESS, &mac].concat();
            let body = packet::summed(address, to, ICMPV6, body, 2);
            let mut packet = packet::ip(address, to, ICMPV6, &body)?;
            packet[HOP_LIMIT.0] = HOP_LIMIT.1;
            Ok([&to_mac, &mac[..], &packet].concat())
        }
    }
}

/// The link address of the group that an IPv6 address is asked for in, as `ip maddr` takes it.
pub(super) fn solicited_group(address: IpAddr) -> Option<String> {
    let IpAddr::V6(v6) = address else { return None };
    let (_, mac) = solicited_node(v6);
    let bytes: Vec<String> = mac.iter().map(|byte| format!("{byte:02x}")).collect();
    Some(bytes.join(":"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capture::dissect::Checksum;
    use crate::topology::addresses::EXT;
    use crate::traffic::neighbour::question;

    const OWN: [u8; 6] = [2, 0, 0, 0, 0, 1];
    const ASKER: [u8; 6] = [2, 0, 0, 0, 0, 9];

    fn addresses() -> [IpAddr; 2] {
        [[172, 18, 0, 200].into(), "fd00:172:18::1:2345".parse().expect("a literal")]
    }

    #[test]
    fn questions_for_own_addresses_are_answered_to_the_asker() {
        let [v4, v6] = addresses();
        let own = BTreeSet::from([v4, v6]);
        let answer_to = |address| answer(&question(ASKER, address).expect("a question"), OWN, &own).expect("a frame");
        let frame = answer_to(v4).expect("an answer");
        assert_eq!((&frame[..6], &frame[6..12]), (&ASKER[..], &OWN[..]));
        let expected =
            CapturedFrame::Arp { request: false, sender: [172, 18, 0, 200].into(), sender_mac: OWN, target: EXT.v4 };
        assert_eq!(dissect(&frame), expected);
        let frame = answer_to(v6).expect("an answer");
        assert_eq!((&frame[..6], &frame[6..12]), (&ASKER[..], &OWN[..]));
        let CapturedFrame::Ip(seen) = dissect(&frame) else { panic!("{frame:02x?}") };
        assert_eq!((seen.source, seen.destination), (v6, EXT.v6.into()));
        assert_eq!((seen.checksum, seen.source_port), (Checksum::Complete, ADVERTISEMENT.into()));
        assert_eq!(frame[58], SOLICITED | OVERRIDE);
    }

    #[test]
    fn other_frames_get_no_answer() {
        let [v4, v6] = addresses();
        for (own, other) in [(v4, v6), (v6, v4)] {
            let frame = question(ASKER, other).expect("a question");
            assert_eq!(answer(&frame, OWN, &BTreeSet::from([own])).expect("no error"), None);
            let frame = announcement(ASKER, own).expect("a frame");
            assert_eq!(answer(&frame, OWN, &BTreeSet::from([own])).expect("no error"), None);
            for length in 0..frame.len() {
                assert_eq!(answer(&frame[..length], OWN, &BTreeSet::from([own])).expect("no error"), None);
            }
        }
    }

    #[test]
    fn announcements_are_to_all() {
        let [v4, v6] = addresses();
        let frame = announcement(OWN, v4).expect("a frame");
        let CapturedFrame::Arp { request: false, sender, target, .. } = dissect(&frame) else { panic!("{frame:02x?}") };
        assert_eq!((&frame[..6], sender), (&[0xff; 6][..], target));
        let frame = announcement(OWN, v6).expect("a frame");
        let CapturedFrame::Ip(seen) = dissect(&frame) else { panic!("{frame:02x?}") };
        assert_eq!((seen.destination, seen.checksum), (ALL_NODES.into(), Checksum::Complete));
        assert_eq!(frame[58], OVERRIDE);
    }

    #[test]
    fn a_group_is_of_ipv6_alone() {
        let groups = addresses().map(solicited_group);
        assert_eq!(groups, [None, Some("33:33:ff:01:23:45".to_owned())]);
    }
}
