//! Fragments, and other packets without ports.

use super::*;

#[test]
fn fragments_follow_the_first_fragment() {
    both(|cast, maps| {
        let later = udp(cast, cast.world).fragment(100, true);
        assert_eq!(verdict(maps, &later), Verdict::FragmentUnknown);
        assert_sent(cast, maps, &udp(cast, cast.world).fragment(0, true));
        let mut headers = later.headers();
        let slot = PolicySlot::here(addr(cast.egress));
        let sent = decide(&mut headers, &Quote::NONE, maps, &maps.config.get());
        assert_eq!(sent, FromPod::Send { egress_id: ID, slot: &slot });
        assert_eq!((headers.tuple.sport(), headers.tuple.dport()), (4000, 80));
        assert_eq!(maps.flows_len(), 1, "one flow");
    });
}

#[test]
fn fragments_of_untranslatable_packets_are_dropped() {
    both(|cast, maps| {
        for (whole, later) in [
            (udp(cast, cast.world).protocol(PROTO_AH), Verdict::UnsupportedProtocol),
            (udp(cast, cast.world).cut(6), Verdict::FragmentUnknown),
            (udp(cast, cast.world).unreachable(), Verdict::FragmentUnknown),
        ] {
            assert_ne!(verdict(maps, &whole.clone().fragment(0, true)), Verdict::FragmentUnknown);
            assert_eq!(verdict(maps, &whole.fragment(1, false)), later);
        }
    });
}

#[test]
fn fragments_of_an_answer_are_left_alone() {
    both(|cast, maps| {
        let request = packet(cast.world, cast.pod, 80, 4000).arriving();
        assert_eq!(to_pod::decide(&request, maps, &maps.config.get()), Verdict::InboundRemembered);
        assert_eq!(verdict(maps, &udp(cast, cast.world).fragment(0, true)), Verdict::InboundReply);
        assert_eq!(verdict(maps, &udp(cast, cast.world).fragment(100, false)), Verdict::InboundReply);
    });
}

#[test]
fn waiting_fragments_are_released_before_any_other_verdict() {
    both(|cast, maps| {
        let connection = |flags| udp(cast, cast.world).tcp(flags);
        assert_sent(cast, maps, &connection(tcp::SYN));
        let asked_from_outside = packet(cast.world, cast.pod, 81, 4000).arriving();
        assert_eq!(to_pod::decide(&asked_from_outside, maps, &maps.config.get()), Verdict::InboundRemembered);
        let firsts = [
            connection(tcp::ACK),
            udp(cast, cast.world),
            packet(cast.pod, cast.world, 4000, 81),
            packet(cast.pod, cast.world, 0, 0).echo_reply(9),
            udp(cast, cast.foreign_egress),
            udp(cast, cast.other_node),
        ];
        for when in [WhenEmpty::Drop, WhenEmpty::NodeAddress, WhenEmpty::NotListed] {
            maps.set_policy(ID, when, &[]);
            for first in firsts.clone().map(|packet| packet.fragment(0, true)) {
                maps.await_first(&first.headers());
                assert_eq!(verdict(maps, &first), Verdict::FragmentsReleased, "{first:?} {when:?}");
                maps.awaited.borrow_mut().clear();
                assert!(asked(maps, &first) != FromPod::Done(Verdict::FragmentsReleased), "when it comes again");
            }
        }
    });
}

#[test]
fn a_packet_without_readable_ports_is_no_answer() {
    both(|cast, maps| {
        // Ports and identifiers of zero, as in packets without readable ports.
        for packet in [packet(cast.world, cast.pod, 0, 0), packet(cast.world, cast.pod, 0, 0).echo(0)] {
            assert_eq!(to_pod::decide(&packet.arriving(), maps, &maps.config.get()), Verdict::InboundRemembered);
        }
        let later = udp(cast, cast.world).fragment(100, false);
        assert_eq!(verdict(maps, &later), Verdict::FragmentUnknown);
        let part_of_ping = packet(cast.pod, cast.world, 0, 0).echo(7).fragment(100, false);
        assert_eq!(verdict(maps, &part_of_ping), Verdict::FragmentUnknown);
        let redirect = if cast.family == Family::V4 { 5 } else { 137 };
        let bent = packet(cast.pod, cast.world, 0, 0).message(redirect);
        assert_eq!(verdict(maps, &bent), Verdict::UnsupportedProtocol);
    });
}
