//! Several interfaces: an egress IP is reached, and left by, on its own one alone. ARP and neighbour discovery are in
//! `neighbours`, packets of the flow cache in `flow_cache`.

use egress_common::abi::{Family, HandoverStage, Verdict};

use crate::frames::{Body, SYN, packet};
use crate::stage::{FROM_NETDEV, FROM_POD, FURTHER, NEXT, Ran, SHOT, TO_NETDEV, TestRun, UPLINK_MAC, WAITING, both};

const OWN: TestRun = TestRun { ingress_ifindex: 0, ..TO_NETDEV };

const fn elsewhere(run: TestRun) -> TestRun {
    TestRun { ifindex: FURTHER, ..run }
}

#[test]
fn a_packet_for_an_egress_ip_by_another_interface_is_dropped() {
    both(|stage, cast| {
        let sent = packet(cast.pod, cast.world, 4000, 80);
        stage.redirects(&FROM_POD, &sent, Verdict::SnatHere, &sent.snat(cast.egress, 4000).hop());
        let to = |address| packet(cast.world, address, 80, 4000).with(|packet| packet.dmac = UPLINK_MAC);
        let answer = to(cast.egress);
        for arriving in [
            answer.clone(),
            answer.clone().tcp(SYN),
            answer.clone().body(Body::EchoRequest),
            answer.clone().body(Body::Icmp([3, 1], [0; 4])),
            answer.clone().with(|packet| packet.fragment = (8, false)),
        ] {
            stage.drops(&elsewhere(FROM_NETDEV), &arriving, Verdict::WrongInterface);
        }
        stage.redirects(&FROM_NETDEV, &answer, Verdict::ReplyHere, &answer.dnat(cast.pod, 4000).hop());
        for other in [cast.node, cast.away_egress, cast.pod] {
            stage.passes(&elsewhere(FROM_NETDEV), &to(other), Verdict::NotOurs);
        }
    });
}

/// A forwarded packet with an egress IP that NAT has not written leaves by no interface.
#[test]
fn no_egress_ip_leaves_by_another_interface() {
    both(|stage, cast| {
        let returning = TestRun { ingress_ifindex: FURTHER, ..elsewhere(TO_NETDEV) };
        let sent = packet(cast.egress, cast.world, 1, 2);
        for sent in [sent.clone(), sent.clone().tcp(SYN), sent.body(Body::EchoRequest)] {
            stage.passes(&OWN, &sent, Verdict::NotOurs);
            stage.drops(&elsewhere(OWN), &sent, Verdict::WrongInterface);
            stage.drops(&returning, &sent, Verdict::WrongInterface);
            stage.drops(&elsewhere(TO_NETDEV), &sent, Verdict::SpoofedEgressIp);
        }
        for source in [cast.node, cast.away_egress] {
            stage.passes(&elsewhere(OWN), &packet(source, cast.world, 1, 2), Verdict::NotOurs);
        }
    });
}

/// Not of the uplink, should the address be on another interface.
#[test]
fn a_packet_is_as_long_as_the_interface_of_its_address_takes() {
    both(|stage, cast| {
        let large = |sport| packet(cast.pod, cast.world, sport, 80).with(|packet| packet.data = 1250);
        stage.set_mtu(cast.here, 1200);
        let answer = stage.run_frame(&FROM_POD, &large(4000).frame(), Verdict::MtuAnswered).frame;
        // The last two bytes of the second word of the ICMP header.
        let at = if cast.family == Family::V4 { 14 + 20 + 6 } else { 14 + 40 + 6 };
        assert_eq!(answer[at..at + 2], 1200_u16.to_be_bytes());
        stage.configure(|config| config.uplink_mtu = 1200);
        stage.own(cast.here, cast.egress);
        let sent = large(4001);
        stage.redirects(&FROM_POD, &sent, Verdict::SnatHere, &sent.snat(cast.egress, 4001).hop());
        stage.configure(|_| ());
        stage.refill_answers();
    });
}

/// The address has moved to another interface in the meantime.
#[test]
fn a_packet_that_waited_for_its_neighbour_leaves_by_the_interface_of_its_address() {
    both(|stage, cast| {
        let ran = stage.run_frame(&FROM_POD, &packet(cast.pod, cast.world, 4000, 80).frame(), Verdict::SnatHere);
        assert_eq!(ran.priority, WAITING);
        let waited = TestRun { priority: ran.priority, mark: ran.mark, ..TO_NETDEV };
        assert_eq!(stage.run_frame(&elsewhere(waited), &ran.frame, Verdict::WrongInterface).action, SHOT);
        stage.own_on(FURTHER, cast.here, cast.egress);
        assert_eq!(stage.run_frame(&waited, &ran.frame, Verdict::WrongInterface).action, SHOT);
        let left = stage.run_frame(&elsewhere(waited), &ran.frame, Verdict::NotOurs);
        assert_eq!(left, Ran::plain(NEXT, ran.frame.clone(), 0));
        // The new owner of a hand-over.
        stage.hand_over(cast, HandoverStage::Arriving);
        stage.owned.remove(&cast.here).expect("it is owned");
        stage.run_frame(&elsewhere(waited), &ran.frame, Verdict::NotOurs);
        stage.run_frame(&waited, &ran.frame, Verdict::WrongInterface);
        stage.handovers.remove(&cast.here).expect("it is there");
        stage.own(cast.here, cast.egress);
    });
}
