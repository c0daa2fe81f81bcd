//! ARP and neighbour discovery on the uplink, byte by byte.

use egress_common::abi::Verdict;

use crate::cast::{V4, V6};
use crate::frames::{checksum, ip, octets};
use crate::stage::{ENTER, NEXT, OWNED_MAC, REDIRECT, Ran, UPLINK_MAC, on_stage};

const ASKER_MAC: [u8; 6] = [2, 0, 0, 0, 0, 9];
const REQUEST: u8 = 1;
const REPLY: u8 = 2;

fn arp(dmac: [u8; 6], operation: u8, sender: ([u8; 6], &str), target: ([u8; 6], &str)) -> Vec<u8> {
    let mut frame = [dmac, sender.0].concat();
    frame.extend([0x08, 0x06, 0, 1, 0x08, 0, 6, 4, 0, operation]);
    for (mac, address) in [sender, target] {
        frame.extend(mac);
        frame.extend(octets(ip(address)));
    }
    frame
}

#[test]
fn arp_requests_for_an_owned_address_are_answered() {
    on_stage(|stage| {
        // From somebody, and a probe (RFC 5227); broadcast, and to us alone to see whether we are still there.
        for sender in ["172.18.0.1", "0.0.0.0"] {
            for dmac in [[0xff; 6], UPLINK_MAC] {
                let request = arp(dmac, REQUEST, (ASKER_MAC, sender), ([0; 6], V4.egress));
                let answer = arp(ASKER_MAC, REPLY, (OWNED_MAC, V4.egress), (ASKER_MAC, sender));
                let ran = stage.run_frame(&ENTER, &request, Verdict::ArpAnswered);
                assert_eq!(ran, Ran::plain(REDIRECT, answer, 0));
            }
        }
    });
}

/// A half of a claim, or an address that has been handed over: replies for it are taken, and nobody is told that it is here.
#[test]
fn what_is_not_owned_is_not_answered_for() {
    on_stage(|stage| {
        stage.owned.remove(&V4.here).expect("it is owned");
        let request = arp([0xff; 6], REQUEST, (ASKER_MAC, "172.18.0.1"), ([0; 6], V4.egress));
        let ran = stage.run_frame(&ENTER, &request, Verdict::NotOurs);
        assert_eq!(ran, Ran::plain(NEXT, request.clone(), 0));
        // Its object has another address here by now.
        stage.own(V4.here, "172.18.0.177");
        let ran = stage.run_frame(&ENTER, &request, Verdict::NotOurs);
        assert_eq!(ran, Ran::plain(NEXT, request, 0));
    });
}

#[test]
fn other_arp_is_left_alone() {
    on_stage(|stage| {
        let reply = arp([0xff; 6], REPLY, (ASKER_MAC, "172.18.0.1"), ([0; 6], V4.egress));
        let other = arp([0xff; 6], REQUEST, (ASKER_MAC, "172.18.0.1"), ([0; 6], V4.away_egress));
        let node = arp([0xff; 6], REQUEST, (ASKER_MAC, "172.18.0.1"), ([0; 6], V4.node));
        let mut short = arp([0xff; 6], REQUEST, (ASKER_MAC, "172.18.0.1"), ([0; 6], V4.egress));
        short.truncate(40);
        for frame in [reply, other, node, short] {
            let ran = stage.run_frame(&ENTER, &frame, Verdict::NotOurs);
            assert_eq!(ran, Ran::plain(NEXT, frame, 0));
        }
    });
}

/// A frame of neighbour discovery.
fn discovery(macs: [[u8; 6]; 2], from: &str, to: &str, hop_limit: u8, body: &[u8]) -> Vec<u8> {
    let length = u16::try_from(body.len()).expect("a length").to_be_bytes();
    let addresses = [octets(ip(from)), octets(ip(to))].concat();
    let sum = checksum(&[addresses.as_slice(), &[0, 58], &length, body].concat()).to_be_bytes();
    let mut frame = macs.concat();
    frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, length[0], length[1], 58, hop_limit]);
    frame.extend(addresses);
    frame.extend(&body[..2]);
    frame.extend(sum);
    frame.extend(&body[4..]);
    frame
}

fn solicitation(target: &str, option: &[u8]) -> Vec<u8> {
    [&[135, 0, 0, 0, 0, 0, 0, 0], octets(ip(target)).as_slice(), option].concat()
}

fn advertisement(target: &str, flags: u8) -> Vec<u8> {
    [&[136, 0, 0, 0, flags, 0, 0, 0], octets(ip(target)).as_slice(), &[2, 1], &OWNED_MAC].concat()
}

const GROUP: &str = "ff02::1:ff00:100";
const GROUP_MAC: [u8; 6] = [0x33, 0x33, 0xff, 0, 1, 0];
const ROUTER: &str = "fe80::1";

#[test]
fn solicitations_for_an_owned_address_are_answered() {
    on_stage(|stage| {
        let link = [&[1, 1][..], &ASKER_MAC].concat();
        let nonce = [&[14, 1][..], &[7; 6]].concat();
        let options = [vec![], link.clone(), [link, nonce].concat()];
        for option in options {
            // By multicast, and to the address itself to see whether we are still there.
            for (dmac, to) in [(GROUP_MAC, GROUP), (UPLINK_MAC, V6.egress)] {
                let request = discovery([dmac, ASKER_MAC], ROUTER, to, 255, &solicitation(V6.egress, &option));
                let body = advertisement(V6.egress, 0x60);
                let answer = discovery([ASKER_MAC, OWNED_MAC], V6.egress, ROUTER, 255, &body);
                let ran = stage.run_frame(&ENTER, &request, Verdict::NeighbourAnswered);
                assert_eq!(ran, Ran::plain(REDIRECT, answer, 0));
            }
        }
    });
}

#[test]
fn duplicate_address_detection_is_answered_to_all() {
    on_stage(|stage| {
        let request = discovery([GROUP_MAC, ASKER_MAC], "::", GROUP, 255, &solicitation(V6.egress, &[]));
        let macs = [[0x33, 0x33, 0, 0, 0, 1], OWNED_MAC];
        let answer = discovery(macs, V6.egress, "ff02::1", 255, &advertisement(V6.egress, 0x20));
        let ran = stage.run_frame(&ENTER, &request, Verdict::NeighbourAnswered);
        assert_eq!(ran, Ran::plain(REDIRECT, answer, 0));
    });
}

#[test]
fn other_neighbour_discovery_is_left_alone() {
    on_stage(|stage| {
        let macs = [GROUP_MAC, ASKER_MAC];
        let from_afar = discovery(macs, ROUTER, GROUP, 254, &solicitation(V6.egress, &[]));
        let other = discovery(macs, ROUTER, GROUP, 255, &solicitation(V6.away_egress, &[]));
        let advert = discovery(macs, ROUTER, "ff02::1", 255, &advertisement(V6.egress, 0x20));
        for frame in [from_afar, other, advert] {
            let ran = stage.run_frame(&ENTER, &frame, Verdict::NotOurs);
            assert_eq!(ran, Ran::plain(NEXT, frame, 0));
        }
    });
}
