//! ARP and neighbour discovery on the uplink, byte by byte.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use aya::maps::RingBuf;
use egress_common::abi::{Addr, ConflictEvent, Verdict};

use crate::cast::{V4, V6};
use crate::frames::{checksum, ip, octets};
use crate::stage::{
    FROM_NETDEV, FURTHER, NEXT, OWNED_MAC, REDIRECT, Ran, SHOT, Stage, TestRun, UPLINK, UPLINK_MAC, both, on_stage,
};

const ASKER_MAC: [u8; 6] = [2, 0, 0, 0, 0, 9];
const REQUEST: u8 = 1;
const REPLY: u8 = 2;

impl Stage {
    /// The claims of other hosts that were reported since the last call. The next one is reported at once.
    fn conflicts(&self) -> Vec<(IpAddr, [u8; 6])> {
        let mut ring = RingBuf::try_from(self.again("events")).expect("a ring buffer");
        let mut reported = Vec::new();
        while let Some(item) = ring.next() {
            assert_eq!(item.len(), size_of::<ConflictEvent>(), "nothing is dropped");
            let address = Addr::v6(item[8..24].try_into().expect("an address")).to_ip();
            reported.push((address, item[24..30].try_into().expect("a link address")));
        }
        std::thread::sleep(3 * CONFLICT_STEP);
        reported
    }
}

/// Minimum interval between two reports of a CPU.
const CONFLICT_STEP: Duration = Duration::from_millis(10);

fn arp(dmac: [u8; 6], operation: u8, sender: ([u8; 6], &str), target: ([u8; 6], &str)) -> Vec<u8> {
    let mut frame = [dmac, sender.0].concat();
    frame.extend([0x08, 0x06, 0, 1, 0x08, 0, 6, 4, 0, operation]);
    for (mac, address) in [sender, target] {
        frame.extend(mac);
        frame.extend(octets(ip(address)));
    }
    frame
}

/// Owner of a cast's egress IP, and the verdict of an answer.
pub(crate) fn asks_for(address: &str) -> (Vec<u8>, Verdict) {
    match ip(address) {
        IpAddr::V4(_) => (arp([0xff; 6], REQUEST, (ASKER_MAC, "172.18.0.1"), ([0; 6], address)), Verdict::ArpAnswered),
        IpAddr::V6(_) => {
            let asks = solicitation(address, &[]);
            (discovery([GROUP_MAC, ASKER_MAC], ROUTER, GROUP, 255, &asks), Verdict::NeighbourAnswered)
        }
    }
}

#[test]
fn arp_requests_for_an_owned_address_are_answered() {
    on_stage(|stage| {
        // From a host, and a probe (RFC 5227); broadcast, and unicast as a reachability check.
        for sender in ["172.18.0.1", "0.0.0.0"] {
            for dmac in [[0xff; 6], UPLINK_MAC] {
                let request = arp(dmac, REQUEST, (ASKER_MAC, sender), ([0; 6], V4.egress));
                let answer = arp(ASKER_MAC, REPLY, (OWNED_MAC, V4.egress), (ASKER_MAC, sender));
                let ran = stage.run_frame(&FROM_NETDEV, &request, Verdict::ArpAnswered);
                assert_eq!(ran, Ran::plain(REDIRECT, answer, 0));
            }
        }
    });
}

/// A partial claim, or a handed-over address: replies are accepted, and requests get no answer.
#[test]
fn addresses_that_are_not_owned_get_no_answer() {
    on_stage(|stage| {
        stage.owned.remove(&V4.here).expect("it is owned");
        let request = arp([0xff; 6], REQUEST, (ASKER_MAC, "172.18.0.1"), ([0; 6], V4.egress));
        let ran = stage.run_frame(&FROM_NETDEV, &request, Verdict::NotOurs);
        assert_eq!(ran, Ran::plain(NEXT, request.clone(), 0));
        // Its policy has another address here by now.
        stage.own(V4.here, "172.18.0.177");
        let ran = stage.run_frame(&FROM_NETDEV, &request, Verdict::NotOurs);
        assert_eq!(ran, Ran::plain(NEXT, request, 0));
    });
}

#[test]
fn other_arp_is_left_alone() {
    on_stage(|stage| {
        let reply = arp([0xff; 6], REPLY, (ASKER_MAC, "172.18.0.1"), ([0; 6], V4.egress));
        let our_own = arp([0xff; 6], REPLY, (OWNED_MAC, V4.egress), ([0; 6], V4.egress));
        let other = arp([0xff; 6], REQUEST, (ASKER_MAC, "172.18.0.1"), ([0; 6], V4.away_egress));
        let node = arp([0xff; 6], REQUEST, (ASKER_MAC, "172.18.0.1"), ([0; 6], V4.node));
        let mut short = arp([0xff; 6], REQUEST, (ASKER_MAC, "172.18.0.1"), ([0; 6], V4.egress));
        short.truncate(40);
        for frame in [reply, our_own, other, node, short] {
            let ran = stage.run_frame(&FROM_NETDEV, &frame, Verdict::NotOurs);
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
    advertisement_of(target, flags, OWNED_MAC)
}

fn advertisement_of(target: &str, flags: u8, mac: [u8; 6]) -> Vec<u8> {
    [&[136, 0, 0, 0, flags, 0, 0, 0], octets(ip(target)).as_slice(), &[2, 1], &mac].concat()
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
            // By multicast, and by unicast as a reachability check.
            for (dmac, to) in [(GROUP_MAC, GROUP), (UPLINK_MAC, V6.egress)] {
                let request = discovery([dmac, ASKER_MAC], ROUTER, to, 255, &solicitation(V6.egress, &option));
                let body = advertisement(V6.egress, 0x60);
                let answer = discovery([ASKER_MAC, OWNED_MAC], V6.egress, ROUTER, 255, &body);
                let ran = stage.run_frame(&FROM_NETDEV, &request, Verdict::NeighbourAnswered);
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
        let ran = stage.run_frame(&FROM_NETDEV, &request, Verdict::NeighbourAnswered);
        assert_eq!(ran, Ran::plain(REDIRECT, answer, 0));
    });
}

#[test]
fn other_neighbour_discovery_is_left_alone() {
    on_stage(|stage| {
        let macs = [GROUP_MAC, ASKER_MAC];
        let from_afar = discovery(macs, ROUTER, GROUP, 254, &solicitation(V6.egress, &[]));
        let other = discovery(macs, ROUTER, GROUP, 255, &solicitation(V6.away_egress, &[]));
        // A proxy's advertisement overrides nothing (RFC 4861 section 7.2.8); our own may be looped back.
        let proxy = discovery(macs, ROUTER, "ff02::1", 255, &advertisement_of(V6.egress, 0, ASKER_MAC));
        let our_own = discovery(macs, V6.egress, "ff02::1", 255, &advertisement(V6.egress, 0x20));
        // ARP resolves the IPv4 address.
        let mapped = discovery(macs, ROUTER, GROUP, 255, &solicitation(&format!("::ffff:{}", V4.egress), &[]));
        for frame in [from_afar, other, proxy, our_own, mapped] {
            is_left_alone(stage, frame);
        }
    });
}

fn is_left_alone(stage: &mut Stage, frame: Vec<u8>) {
    let ran = stage.run_frame(&FROM_NETDEV, &frame, Verdict::NotOurs);
    assert_eq!(ran, Ran::plain(NEXT, frame, 0));
    assert_eq!(stage.conflicts(), []);
}

/// RFC 4861 sections 7.1.1 and 7.1.2. To the multicast group, so that only neighbour discovery would handle them.
#[test]
fn malformed_neighbour_discovery_is_ignored() {
    on_stage(|stage| {
        let macs = [GROUP_MAC, ASKER_MAC];
        let link = [&[1, 1][..], &ASKER_MAC].concat();
        let solicit = |from: &str, to: &str, body: &[u8]| discovery(macs, from, to, 255, body);
        let plain = solicitation(V6.egress, &link);
        let changed = |body: &[u8], at: usize, byte: u8| {
            let mut body = body.to_vec();
            body[at] = byte;
            body
        };
        let mut summed_wrongly = solicit(ROUTER, GROUP, &plain);
        summed_wrongly[57] ^= 1;
        let long = [&link[..], &[14, 13].iter().copied().chain([7; 102]).collect::<Vec<_>>()].concat();
        for (what, frame) in [
            ("hop limit", discovery(macs, ROUTER, GROUP, 254, &plain)),
            ("checksum", summed_wrongly),
            ("code", solicit(ROUTER, GROUP, &changed(&plain, 1, 1))),
            ("an option without a length", solicit(ROUTER, GROUP, &changed(&plain, 25, 0))),
            ("an option that ends behind the message", solicit(ROUTER, GROUP, &changed(&plain, 25, 2))),
            ("half an option", solicit(ROUTER, GROUP, &plain[..28])),
            ("a multicast sender", solicit("ff02::7", GROUP, &plain)),
            ("DAD with a link address", solicit("::", GROUP, &plain)),
            ("DAD to all nodes", solicit("::", "ff02::1", &solicitation(V6.egress, &[]))),
            ("longer than any", solicit(ROUTER, GROUP, &solicitation(V6.egress, &long))),
        ] {
            println!("{what}");
            is_left_alone(stage, frame);
        }
        // The valid frame is answered: the frames above differ from it in one field.
        stage.run_frame(&FROM_NETDEV, &solicit(ROUTER, GROUP, &plain), Verdict::NeighbourAnswered);
        stage.run_frame(&FROM_NETDEV, &solicit("::", GROUP, &solicitation(V6.egress, &[])), Verdict::NeighbourAnswered);
        stage.conflicts();

        let advert = advertisement_of(V6.egress, 0x20, ASKER_MAC);
        let solicited = advertisement_of(V6.egress, 0x60, ASKER_MAC);
        let advertise = |hop_limit: u8, body: &[u8]| discovery(macs, ROUTER, "ff02::1", hop_limit, body);
        for (what, frame) in [
            ("hop limit", advertise(254, &advert)),
            ("code", advertise(255, &changed(&advert, 1, 1))),
            ("an option without a length", advertise(255, &changed(&advert, 25, 0))),
            ("solicited, and to all", advertise(255, &solicited)),
            ("a multicast sender", discovery(macs, "ff02::7", "ff02::1", 255, &advert)),
            ("without a sender", discovery(macs, "::", "ff02::1", 255, &advert)),
        ] {
            println!("advertisement: {what}");
            is_left_alone(stage, frame);
        }
        stage.run_frame(&FROM_NETDEV, &advertise(255, &advert), Verdict::AddressConflict);
    });
}

/// RFC 5227 section 2.4, and the same for IPv6: claims are reported to user space.
#[test]
fn conflicting_claims_on_an_owned_address_are_reported() {
    on_stage(|stage| {
        stage.conflicts();
        let v4 = |mac| (ip(V4.egress), mac);
        for (operation, target) in [(REPLY, V4.node), (REQUEST, V4.node), (REPLY, V4.egress)] {
            let frame = arp([0xff; 6], operation, (ASKER_MAC, V4.egress), ([0; 6], target));
            let ran = stage.run_frame(&FROM_NETDEV, &frame, Verdict::AddressConflict);
            assert_eq!(ran, Ran::plain(NEXT, frame, 0), "the host's stack sees it too");
            assert_eq!(stage.conflicts(), [v4(ASKER_MAC)]);
        }
        // An announcement is a request for the address too.
        let announced = arp([0xff; 6], REQUEST, (ASKER_MAC, V4.egress), ([0; 6], V4.egress));
        stage.run_frame(&FROM_NETDEV, &announced, Verdict::ArpAnswered);
        assert_eq!(stage.conflicts(), [v4(ASKER_MAC)]);
        // A frame with our own link address is no claim of another host.
        let mut pretended = arp([0xff; 6], REPLY, (ASKER_MAC, V4.egress), ([0; 6], V4.egress));
        pretended[6..12].copy_from_slice(&OWNED_MAC);
        stage.run_frame(&FROM_NETDEV, &pretended, Verdict::AddressConflict);
        assert_eq!(stage.conflicts(), [v4(ASKER_MAC)]);

        let macs = [GROUP_MAC, ASKER_MAC];
        let v6 = |mac| (ip(V6.egress), mac);
        let advert = discovery(macs, V6.egress, "ff02::1", 255, &advertisement_of(V6.egress, 0x20, [7; 6]));
        let ran = stage.run_frame(&FROM_NETDEV, &advert, Verdict::AddressConflict);
        assert_eq!(ran, Ran::plain(NEXT, advert, 0));
        assert_eq!(stage.conflicts(), [v6([7; 6])], "the address that neighbours would take");
        let bare = advertisement_of(V6.egress, 0x20, ASKER_MAC)[..24].to_vec();
        stage.run_frame(&FROM_NETDEV, &discovery(macs, V6.egress, "ff02::1", 255, &bare), Verdict::AddressConflict);
        assert_eq!(stage.conflicts(), [v6(ASKER_MAC)]);
        let detects = discovery(macs, "::", GROUP, 255, &solicitation(V6.egress, &[]));
        stage.run_frame(&FROM_NETDEV, &detects, Verdict::NeighbourAnswered);
        assert_eq!(stage.conflicts(), [v6(ASKER_MAC)]);

        // Claims on addresses that are not owned, or no longer owned, are not reported.
        stage.owned.remove(&V4.here).expect("it is owned");
        stage.run_frame(&FROM_NETDEV, &announced, Verdict::NotOurs);
        assert_eq!(stage.conflicts(), []);
    });
}

/// Other questions about it are dropped, because the stack may answer for another interface.
#[test]
fn an_address_is_answered_on_its_own_interface_alone() {
    both(|stage, cast| {
        let (question, answered) = asks_for(cast.egress);
        for (own, other) in [(UPLINK, FURTHER), (FURTHER, UPLINK)] {
            stage.own_on(own, cast.here, cast.egress);
            let by = |ifindex| TestRun { ifindex, ..FROM_NETDEV };
            assert_eq!(stage.run_frame(&by(own), &question, answered).action, REDIRECT);
            assert_eq!(stage.run_frame(&by(other), &question, Verdict::WrongInterface).action, SHOT);
        }
        stage.own(cast.here, cast.egress);
    });
}

#[test]
fn a_claim_by_another_interface_is_no_conflict() {
    const ELSEWHERE: TestRun = TestRun { ifindex: FURTHER, ..FROM_NETDEV };
    on_stage(|stage| {
        stage.conflicts();
        let macs = [GROUP_MAC, ASKER_MAC];
        let claims = [
            arp([0xff; 6], REPLY, (ASKER_MAC, V4.egress), ([0; 6], V4.node)),
            arp([0xff; 6], REQUEST, (ASKER_MAC, V4.egress), ([0; 6], V4.node)),
            discovery(macs, V6.egress, "ff02::1", 255, &advertisement_of(V6.egress, 0x20, ASKER_MAC)),
        ];
        for frame in &claims {
            let ran = stage.run_frame(&ELSEWHERE, frame, Verdict::NotOurs);
            assert_eq!(ran, Ran::plain(NEXT, frame.clone(), 0));
        }
        assert_eq!(stage.conflicts(), []);
        for frame in &claims {
            stage.run_frame(&FROM_NETDEV, frame, Verdict::AddressConflict);
            assert_eq!(stage.conflicts().len(), 1);
        }
        // An announcement and duplicate address detection are questions too.
        for frame in [
            arp([0xff; 6], REQUEST, (ASKER_MAC, V4.egress), ([0; 6], V4.egress)),
            discovery(macs, "::", GROUP, 255, &solicitation(V6.egress, &[])),
        ] {
            assert_eq!(stage.run_frame(&ELSEWHERE, &frame, Verdict::WrongInterface).action, SHOT);
        }
    });
}

/// The Service's provider answers, from any host.
#[test]
fn shared_addresses_get_no_answer_and_no_report() {
    on_stage(|stage| {
        stage.conflicts();
        stage.share(V4.here, V4.egress);
        stage.share(V6.here, V6.egress);
        for (operation, sender, target) in
            [(REQUEST, "172.18.0.1", V4.egress), (REQUEST, V4.egress, V4.egress), (REPLY, V4.egress, V4.node)]
        {
            is_left_alone(stage, arp([0xff; 6], operation, (ASKER_MAC, sender), ([0; 6], target)));
        }
        let macs = [GROUP_MAC, ASKER_MAC];
        for sender in [ROUTER, "::"] {
            is_left_alone(stage, discovery(macs, sender, GROUP, 255, &solicitation(V6.egress, &[])));
        }
        let advert = advertisement_of(V6.egress, 0x20, ASKER_MAC);
        is_left_alone(stage, discovery(macs, V6.egress, "ff02::1", 255, &advert));
        // As soon as it is this node's alone, it answers.
        stage.own(V4.here, V4.egress);
        stage.own(V6.here, V6.egress);
        for cast in [V4, V6] {
            let (asks, answered) = asks_for(cast.egress);
            stage.run_frame(&FROM_NETDEV, &asks, answered);
        }
    });
}

#[test]
fn reports_of_conflicting_claims_are_limited_per_second() {
    on_stage(|stage| {
        let frame = arp([0xff; 6], REPLY, (ASKER_MAC, V4.egress), ([0; 6], V4.node));
        stage.conflicts();
        let start = Instant::now();
        for _ in 0..1000 {
            stage.run_frame(&FROM_NETDEV, &frame, Verdict::AddressConflict);
        }
        let steps = usize::try_from(start.elapsed().as_millis() / CONFLICT_STEP.as_millis()).expect("few");
        let reported = stage.conflicts().len();
        let cpus = aya::util::nr_cpus().expect("the number of CPUs");
        assert!(reported >= 1 && reported <= (steps + 1) * cpus, "{reported} in {steps} steps");
    });
}
