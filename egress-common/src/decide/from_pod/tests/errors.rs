//! ICMP errors from pods, and packets that name their own way.

use super::*;

fn told<'t>(world: &'t World, error: &Packet, quoted: &Packet) -> FromPod<'t> {
    let quote = quoted.quoted(Direction::Ingress);
    decide(&mut error.headers(), &quote, world, &world.config.get())
}

#[test]
fn an_error_of_a_pod_follows_the_flow_that_it_quotes() {
    both(|cast, world| {
        let error = udp(cast, cast.world).unreachable();
        let quoted = packet(cast.world, cast.pod, 80, 4000);
        assert_eq!(told(world, &error, &quoted), FromPod::Done(Verdict::IcmpUnmatched));
        assert_eq!(world.flows_len(), 0, "it begins none");
        assert_sent(cast, world, &udp(cast, cast.world));
        let slot = Slot::here(addr(cast.egress));
        assert_eq!(told(world, &error, &quoted), FromPod::Send { egress_id: ID, slot: &slot });
        // Whoever sent the quoted packet is told, and by whom it was sent to.
        for stranger in [packet(cast.world, cast.known_pod, 80, 4000), packet(cast.excluded, cast.pod, 80, 4000)] {
            assert_eq!(told(world, &error, &stranger), FromPod::Done(Verdict::IcmpUnmatched));
        }
        world.set_policy(ID, WhenEmpty::Drop, &[Slot::here(addr(cast.foreign_egress))]);
        assert_eq!(told(world, &error, &quoted), FromPod::Done(Verdict::AddressGone));
    });
}

#[test]
fn an_error_about_what_came_from_outside_leaves_as_it_came() {
    both(|cast, world| {
        let request = packet(cast.world, cast.pod, 80, 4000).tcp(tcp::SYN);
        assert_eq!(to_pod::decide(&request.arriving(), world, &world.config.get()), Verdict::InboundRemembered);
        let error = udp(cast, cast.world).unreachable();
        assert_eq!(told(world, &error, &request), FromPod::Done(Verdict::InboundReply));
    });
}

#[test]
fn an_error_about_a_reply_that_a_pod_got_is_not_about_a_ping_from_outside() {
    both(|cast, world| {
        let ping = packet(cast.world, cast.pod, 0, 0).echo(9);
        assert_eq!(to_pod::decide(&ping.arriving(), world, &world.config.get()), Verdict::InboundRemembered);
        let error = packet(cast.pod, cast.world, 0, 0).unreachable();
        assert_eq!(told(world, &error, &ping), FromPod::Done(Verdict::InboundReply));
        let reply = packet(cast.world, cast.pod, 0, 0).echo_reply(9);
        assert_eq!(told(world, &error, &reply), FromPod::Done(Verdict::IcmpUnmatched));
        assert_sent(cast, world, &packet(cast.pod, cast.world, 0, 0).echo(9));
        let slot = Slot::here(addr(cast.egress));
        assert_eq!(told(world, &error, &reply), FromPod::Send { egress_id: ID, slot: &slot });
    });
}

#[test]
fn an_error_to_another_node_is_marked() {
    both(|cast, world| {
        let error = udp(cast, cast.other_node).unreachable();
        let quoted = packet(cast.other_node, cast.pod, 80, 4000);
        assert_eq!(told(world, &error, &quoted), FromPod::Mark);
        assert!(!world.datagram_seen(&error.headers().tuple), "it answers");
    });
}

#[test]
fn who_lists_where_to_go_by_goes_nowhere() {
    both(|cast, world| {
        for packet in [udp(cast, cast.world), udp(cast, cast.world).unreachable()] {
            let mut headers = packet.headers();
            headers.source_routed = true;
            let sent = decide(&mut headers, &Quote::NONE, world, &world.config.get());
            assert_eq!(sent, FromPod::Done(Verdict::SourceRouted));
        }
    });
}
