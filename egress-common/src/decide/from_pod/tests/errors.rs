//! ICMP errors from pods, and source-routed packets.

use super::*;

fn on_error<'t>(maps: &'t MemoryMaps, error: &FrameFields, quoted: &FrameFields) -> FromPod<'t> {
    let quote = quoted.quoted(Direction::Ingress);
    decide(&mut error.headers(), &quote, maps, &maps.config.get())
}

#[test]
fn an_error_of_a_pod_follows_the_flow_that_it_quotes() {
    both(|cast, maps| {
        let error = udp(cast, cast.world).unreachable();
        let quoted = packet(cast.world, cast.pod, 80, 4000);
        assert_eq!(on_error(maps, &error, &quoted), FromPod::Done(Verdict::IcmpUnmatched));
        assert_eq!(maps.flows_len(), 0, "it begins none");
        assert_sent(cast, maps, &udp(cast, cast.world));
        let slot = PolicySlot::here(addr(cast.egress));
        assert_eq!(on_error(maps, &error, &quoted), FromPod::Send { egress_id: ID, slot: &slot });
        // Sender and destination of the quoted packet must match the error.
        for foreign in [packet(cast.world, cast.known_pod, 80, 4000), packet(cast.excluded, cast.pod, 80, 4000)] {
            assert_eq!(on_error(maps, &error, &foreign), FromPod::Done(Verdict::IcmpUnmatched));
        }
        maps.set_policy(ID, WhenEmpty::Drop, &[PolicySlot::here(addr(cast.foreign_egress))]);
        assert_eq!(on_error(maps, &error, &quoted), FromPod::Done(Verdict::AddressGone));
    });
}

#[test]
fn an_error_about_an_inbound_packet_leaves_unchanged() {
    both(|cast, maps| {
        let request = packet(cast.world, cast.pod, 80, 4000).tcp(tcp::SYN);
        assert_eq!(to_pod::decide(&request.arriving(), maps, &maps.config.get()), Verdict::InboundRemembered);
        let error = udp(cast, cast.world).unreachable();
        assert_eq!(on_error(maps, &error, &request), FromPod::Done(Verdict::InboundReply));
    });
}

#[test]
fn an_error_about_a_reply_that_a_pod_got_is_not_about_a_ping_from_outside() {
    both(|cast, maps| {
        let ping = packet(cast.world, cast.pod, 0, 0).echo(9);
        assert_eq!(to_pod::decide(&ping.arriving(), maps, &maps.config.get()), Verdict::InboundRemembered);
        let error = packet(cast.pod, cast.world, 0, 0).unreachable();
        assert_eq!(on_error(maps, &error, &ping), FromPod::Done(Verdict::InboundReply));
        let reply = packet(cast.world, cast.pod, 0, 0).echo_reply(9);
        assert_eq!(on_error(maps, &error, &reply), FromPod::Done(Verdict::IcmpUnmatched));
        assert_sent(cast, maps, &packet(cast.pod, cast.world, 0, 0).echo(9));
        let slot = PolicySlot::here(addr(cast.egress));
        assert_eq!(on_error(maps, &error, &reply), FromPod::Send { egress_id: ID, slot: &slot });
    });
}

#[test]
fn an_error_to_another_node_is_marked() {
    both(|cast, maps| {
        let error = udp(cast, cast.other_node).unreachable();
        let quoted = packet(cast.other_node, cast.pod, 80, 4000);
        assert_eq!(on_error(maps, &error, &quoted), FromPod::Mark);
        assert!(!maps.datagram_seen(&error.headers().tuple), "it answers");
    });
}

#[test]
fn source_routed_errors_are_dropped() {
    both(|cast, maps| {
        for packet in [udp(cast, cast.world), udp(cast, cast.world).unreachable()] {
            let mut headers = packet.headers();
            headers.source_routed = true;
            let sent = decide(&mut headers, &Quote::NONE, maps, &maps.config.get());
            assert_eq!(sent, FromPod::Done(Verdict::SourceRouted));
        }
    });
}
