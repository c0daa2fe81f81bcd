use super::*;
use crate::abi::{BloomFilter, Direction, HandoverEntry, InterfaceAddresses, Owned, Tuple};
use crate::decide::cast::{Cast, FURTHER, ID, OTHER_NODE, UPLINK, both};
use crate::decide::memory_maps::{MemoryMaps, addr, with_node_ports};
use crate::decide::packets::{FrameFields, packet};
use crate::decide::snat::{self, SnatSource};
use crate::decide::{NatOwner, from_pod, to_netdev};
use crate::wire::{PROTO_AH, PROTO_SCTP, PROTO_TCP, PROTO_UDP, tcp};

fn asked<'t>(maps: &'t MemoryMaps, packet: &FrameFields) -> FromNetdev<'t> {
    decide(&mut packet.arriving(), &Quote::NONE, UPLINK, maps, &maps.config.get())
}

fn verdict(maps: &MemoryMaps, packet: &FrameFields) -> Verdict {
    match asked(maps, packet) {
        FromNetdev::Done(verdict) => verdict,
        other => panic!("{packet:?} is not done: {other:?}"),
    }
}

/// A flow of the pod to the world, translated.
fn begin(cast: &Cast, maps: &MemoryMaps, origin: Origin, packet: &FrameFields) -> NatEntry {
    let pool = SnatSource::egress_only(addr(cast.egress));
    let owner = NatOwner { origin, source_node: addr(OTHER_NODE), egress_id: ID };
    *snat::translate(&packet.headers(), &Quote::NONE, maps, &pool, &owner).expect("a free port")
}

#[test]
fn replies_follow_the_path_of_their_flow() {
    both(|cast, maps| {
        begin(cast, maps, Origin::Here, &packet(cast.pod, cast.world, 4000, 80));
        begin(cast, maps, Origin::Remote, &packet(cast.remote_pod, cast.world, 4001, 80).tcp(tcp::SYN));
        begin(cast, maps, Origin::Here, &packet(cast.pod, cast.world, 0, 0).echo(4002));
        let FromNetdev::ReplyHere { nat_entry } = asked(maps, &packet(cast.world, cast.egress, 80, 4000)) else {
            panic!("not for a pod here");
        };
        assert_eq!((nat_entry.other.saddr, nat_entry.other.sport()), (addr(cast.pod), 4000));
        let syn_ack = packet(cast.world, cast.egress, 80, 4001).tcp(tcp::SYN | tcp::ACK);
        let FromNetdev::ReplyRemote { nat_entry } = asked(maps, &syn_ack) else { panic!("not for a pod elsewhere") };
        assert_eq!((nat_entry.other.saddr, nat_entry.source_node), (addr(cast.remote_pod), addr(OTHER_NODE)));
        let pong = packet(cast.world, cast.egress, 0, 0).echo_reply(4002);
        assert!(matches!(asked(maps, &pong), FromNetdev::ReplyHere { .. }));
    });
}

#[test]
fn a_reply_keeps_the_flow_of_a_pod_here_alive() {
    both(|cast, maps| {
        let sent = packet(cast.pod, cast.world, 4000, 80);
        from_pod::decide(&mut sent.headers(), &Quote::NONE, maps, &maps.config.get());
        begin(cast, maps, Origin::Here, &sent);
        maps.now.set(maps.now.get() + 20_000_000_000);
        let reply = asked(maps, &packet(cast.world, cast.egress, 80, 4000));
        assert!(matches!(reply, FromNetdev::ReplyHere { .. }));
        let flow = maps.flow_at(&sent.headers().tuple).expect("a flow");
        assert_eq!(flow.last_seen_ns, maps.now.get(), "as its mapping");
    });
}

#[test]
fn unsolicited_packets_are_dropped() {
    both(|cast, maps| {
        begin(cast, maps, Origin::Here, &packet(cast.pod, cast.world, 4000, 80));
        begin(cast, maps, Origin::Here, &packet(cast.pod, cast.world, 0, 0).echo(4002));
        for packet in [
            packet(cast.world, cast.egress, 81, 4000),
            packet(cast.world, cast.egress, 80, 4001),
            packet(cast.world, cast.foreign_egress, 80, 4000).tcp(tcp::SYN),
            packet(cast.multicast, cast.egress, 80, 4000),
            packet(cast.world, cast.egress, 80, 4000).tcp(tcp::SYN),
            packet(cast.world, cast.egress, 0, 0).echo(4002),
        ] {
            let expected =
                if packet.arriving().tuple.daddr == addr(cast.egress) { Verdict::NoNatEntry } else { Verdict::NotOurs };
            assert_eq!(verdict(maps, &packet), expected, "{packet:?}");
        }
        assert_eq!(maps.nat_len(), 4, "only the pod's side makes mappings");
    });
}

/// Whatever it is, and during a hand-over too.
#[test]
fn an_egress_ip_is_reached_by_its_own_interface_alone() {
    both(|cast, maps| {
        begin(cast, maps, Origin::Here, &packet(cast.pod, cast.world, 4000, 80));
        for stage in [None, Some(HandoverStage::Leaving), Some(HandoverStage::Open)] {
            if let Some(stage) = stage {
                hand_over(cast, maps, stage, 0);
            }
            for (answer, quote) in answers(cast, 4000) {
                let by = |ifindex| decide(&mut answer.arriving(), &quote, ifindex, maps, &maps.config.get());
                assert_eq!(by(FURTHER), FromNetdev::Done(Verdict::WrongInterface), "{stage:?} {answer:?}");
                assert!(matches!(by(UPLINK), FromNetdev::ReplyHere { .. }), "{stage:?} {answer:?}");
            }
        }
        let by_further = |to| {
            let packet = packet(cast.world, to, 80, 4000);
            decide(&mut packet.arriving(), &Quote::NONE, FURTHER, maps, &maps.config.get())
        };
        for to in [cast.node, cast.foreign_egress, cast.pod] {
            assert_eq!(by_further(to), FromNetdev::Done(Verdict::NotOurs), "{to}");
        }
    });
}

#[test]
fn untranslatable_packets_have_a_drop_reason() {
    both(|cast, maps| {
        let arrives = packet(cast.world, cast.egress, 80, 4000);
        for (packet, expected) in [
            (arrives.clone().protocol(PROTO_AH), Verdict::UnsupportedProtocol),
            (arrives.clone().cut(4), Verdict::Malformed),
            (arrives.clone().unreachable(), Verdict::IcmpUnmatched),
            (arrives.clone().fragment(100, false), Verdict::FragmentUnknown),
        ] {
            assert_eq!(verdict(maps, &packet), expected);
        }
    });
}

#[test]
fn an_error_goes_to_the_pod_whose_packet_it_quotes() {
    both(|cast, maps| {
        begin(cast, maps, Origin::Here, &packet(cast.pod, cast.world, 4000, 80));
        begin(cast, maps, Origin::Here, &packet(cast.pod, cast.world, 0, 0).echo(4002));
        let error = packet(cast.world, cast.egress, 0, 0).unreachable();
        let asked = |tuple: Tuple| {
            let quote = Quote::of(Headers { tuple, l4: Headers::kind_of(tuple.protocol), ..Headers::NONE });
            decide(&mut error.arriving(), &quote, UPLINK, maps, &maps.config.get())
        };
        let sent = packet(cast.egress, cast.world, 4000, 80).headers().tuple;
        let FromNetdev::ReplyHere { nat_entry: found } = asked(sent) else { panic!("not for the pod") };
        assert_eq!(found.other, packet(cast.pod, cast.world, 4000, 80).headers().tuple);
        let ping = packet(cast.egress, cast.world, 0, 0).echo(4002).headers().tuple;
        assert!(matches!(asked(ping), FromNetdev::ReplyHere { .. }));
        for foreign in [
            packet(cast.egress, cast.world, 4001, 80).headers().tuple,
            packet(cast.foreign_egress, cast.world, 4000, 80).headers().tuple,
            sent.reversed(),
        ] {
            assert_eq!(asked(foreign), FromNetdev::Done(Verdict::IcmpUnmatched), "{foreign:?}");
        }
    });
}

/// The error must arrive at the address that sent the quoted packet, not at another egress IP.
#[test]
fn an_error_to_another_egress_ip_is_not_believed() {
    both(|cast, maps| {
        begin(cast, maps, Origin::Here, &packet(cast.pod, cast.world, 4000, 80));
        maps.own(ID + 1, cast.foreign_egress);
        let sent = packet(cast.egress, cast.world, 4000, 80).quoted(Direction::Egress);
        for (to, is_believed) in [(cast.egress, true), (cast.foreign_egress, false)] {
            let error = packet(cast.world, to, 0, 0).unreachable();
            let answer = decide(&mut error.arriving(), &sent, UPLINK, maps, &maps.config.get());
            assert_eq!(matches!(answer, FromNetdev::ReplyHere { .. }), is_believed, "{answer:?}");
            assert!(is_believed || answer == FromNetdev::Done(Verdict::IcmpUnmatched));
        }
    });
}

#[test]
fn the_last_hop_is_the_stacks() {
    both(|cast, maps| {
        begin(cast, maps, Origin::Here, &packet(cast.pod, cast.world, 4000, 80));
        assert_eq!(verdict(maps, &packet(cast.world, cast.egress, 80, 4000).ttl(1)), Verdict::TtlExpired);
        assert_eq!(verdict(maps, &packet(cast.world, cast.egress, 80, 9).ttl(1)), Verdict::NoNatEntry);
        let reply = packet(cast.world, cast.egress, 80, 4000).ttl(2);
        assert!(matches!(asked(maps, &reply), FromNetdev::ReplyHere { .. }));
    });
}

#[test]
fn fragments_of_a_reply_follow_the_first_fragment() {
    both(|cast, maps| {
        begin(cast, maps, Origin::Here, &packet(cast.pod, cast.world, 4000, 80));
        begin(cast, maps, Origin::Here, &packet(cast.pod, cast.world, 0, 0).echo(4002));
        for reply in [packet(cast.world, cast.egress, 80, 4000), packet(cast.world, cast.egress, 0, 0).echo_reply(4002)]
        {
            assert!(matches!(asked(maps, &reply.clone().fragment(0, true)), FromNetdev::ReplyHere { .. }));
            assert!(matches!(asked(maps, &reply.clone().fragment(100, false)), FromNetdev::ReplyHere { .. }));
            maps.await_first(&reply.clone().fragment(0, true).arriving());
            assert_eq!(verdict(maps, &reply.clone().fragment(0, true)), Verdict::FragmentsReleased);
            maps.awaited.borrow_mut().clear();
            assert!(matches!(asked(maps, &reply.fragment(100, false)), FromNetdev::ReplyHere { .. }));
        }
    });
}

#[test]
fn the_answer_to_a_marked_packet_is_known_by_its_port() {
    both(|cast, maps| {
        let request = packet(cast.pod, cast.other_node, 4000, 80).tcp(tcp::SYN);
        let config = maps.config.get();
        let port = to_netdev::translate(&request.headers(), &Quote::NONE, UPLINK, maps, &config)
            .expect("a free port")
            .other
            .dport();
        assert!((61000..=65535).contains(&port));
        let answer = packet(cast.other_node, cast.node, 80, port).tcp(tcp::SYN | tcp::ACK);
        let FromNetdev::NodeReply { nat_entry } = asked(maps, &answer) else { panic!("not undone") };
        assert_eq!((nat_entry.other.saddr, nat_entry.other.sport()), (addr(cast.pod), 4000));
        for other in [
            packet(cast.other_node, cast.node, 81, port).tcp(tcp::ACK),
            packet(cast.world, cast.node, 80, port).tcp(tcp::ACK),
            packet(cast.other_node, cast.mgmt, 80, port).tcp(tcp::ACK),
            packet(cast.other_node, cast.node, 80, 22).tcp(tcp::ACK),
            packet(cast.other_node, cast.node, 80, port),
        ] {
            assert_eq!(verdict(maps, &other), Verdict::NotOurs, "the host's own");
        }
        maps.config.set(with_node_ports(config, 0, 0));
        assert_eq!(verdict(maps, &answer), Verdict::NotOurs, "without a range nothing of ours comes");
    });
}

#[test]
fn the_host_keeps_what_is_not_for_an_egress_ip() {
    both(|cast, maps| {
        for to in [cast.node, cast.mgmt, cast.pod, cast.world, cast.multicast, cast.foreign_egress] {
            assert_eq!(verdict(maps, &packet(cast.world, to, 80, 4000)), Verdict::NotOurs, "{to}");
        }
    });
}

#[test]
fn a_nat_entry_of_another_version_is_a_drop() {
    both(|cast, maps| {
        for origin in [Origin::Here, Origin::Stack] {
            let request = packet(cast.pod, cast.world, 4000 + origin as u16, 80);
            let made = begin(cast, maps, origin, &request);
            if origin == Origin::Here {
                maps.change_nat(&made.other, NatEntry::of_another_version);
            }
            let reply = packet(cast.world, cast.egress, 80, 4000 + origin as u16);
            assert_eq!(verdict(maps, &reply), Verdict::BadState);
        }
    });
}

#[test]
fn replies_of_sctp_and_protocols_without_ports_are_reversed() {
    both(|cast, maps| {
        for protocol in [47, 50, PROTO_SCTP] {
            begin(cast, maps, Origin::Here, &packet(cast.pod, cast.world, 4000, 80).protocol(protocol));
            let reply = packet(cast.world, cast.egress, 80, 4000).protocol(protocol);
            let FromNetdev::ReplyHere { nat_entry } = asked(maps, &reply) else { panic!("{protocol}") };
            assert_eq!(nat_entry.other.saddr, addr(cast.pod));
        }
        assert_eq!(verdict(maps, &packet(cast.world, cast.egress, 80, 4000).protocol(4)), Verdict::NoNatEntry);
    });
}

#[test]
fn fragments_of_an_answer_to_a_marked_packet_follow_the_first_fragment() {
    both(|cast, maps| {
        let config = maps.config.get();
        let request = packet(cast.pod, cast.other_node, 4000, 80);
        let port = to_netdev::translate(&request.headers(), &Quote::NONE, UPLINK, maps, &config)
            .expect("a free port")
            .other
            .dport();
        let later = packet(cast.other_node, cast.node, 0, 0).fragment(100, false);
        assert_eq!(verdict(maps, &later), Verdict::NotOurs);
        let hosts = packet(cast.other_node, cast.node, 80, 22).fragment(0, true);
        assert_eq!(verdict(maps, &hosts), Verdict::NotOurs);
        assert_eq!(verdict(maps, &later), Verdict::NotOurs, "the host's own");
        let first = packet(cast.other_node, cast.node, 80, port).fragment(0, true);
        assert!(matches!(asked(maps, &first), FromNetdev::NodeReply { .. }));
        let FromNetdev::NodeReply { nat_entry } = asked(maps, &later) else { panic!("not undone") };
        assert_eq!((nat_entry.other.saddr, nat_entry.other.sport()), (addr(cast.pod), 4000));
        maps.await_first(&first.arriving());
        assert!(matches!(asked(maps, &first), FromNetdev::NodeReply { .. }), "nothing waits here");
    });
}

#[test]
fn a_host_datagram_with_a_reused_id_stays_with_the_host() {
    both(|cast, maps| {
        let config = maps.config.get();
        let request = packet(cast.pod, cast.other_node, 4000, 80);
        let port = to_netdev::translate(&request.headers(), &Quote::NONE, UPLINK, maps, &config)
            .expect("a free port")
            .other
            .dport();
        let answer = packet(cast.other_node, cast.node, 80, port).fragment(0, true);
        let later = packet(cast.other_node, cast.node, 0, 0).fragment(100, false);
        for hosts in [22, 61000, 65535] {
            assert!(matches!(asked(maps, &answer), FromNetdev::NodeReply { .. }));
            assert!(matches!(asked(maps, &later), FromNetdev::NodeReply { .. }));
            let first = packet(cast.other_node, cast.node, 81, hosts).fragment(0, true);
            assert_eq!(verdict(maps, &first), Verdict::NotOurs);
            assert_eq!(verdict(maps, &later), Verdict::NotOurs, "of the datagram to {hosts}");
        }
        assert!(matches!(asked(maps, &answer), FromNetdev::NodeReply { .. }));
        maps.config.set(with_node_ports(config, port + 1, 65535));
        assert_eq!(verdict(maps, &later), Verdict::NotOurs, "the port is the host's by now");
    });
}

#[test]
fn an_error_about_a_marked_packet_goes_to_its_pod() {
    both(|cast, maps| {
        let config = maps.config.get();
        let request = packet(cast.pod, cast.other_node, 4000, 80).tcp(tcp::SYN);
        let port = to_netdev::translate(&request.headers(), &Quote::NONE, UPLINK, maps, &config)
            .expect("a free port")
            .other
            .dport();
        let error = packet(cast.world, cast.node, 0, 0).unreachable();
        let on_error = |sent: &FrameFields| {
            let quote = sent.quoted(Direction::Egress);
            decide(&mut error.arriving(), &quote, UPLINK, maps, &maps.config.get())
        };
        let sent = packet(cast.node, cast.other_node, port, 80).tcp(tcp::SYN);
        let FromNetdev::NodeReply { nat_entry } = on_error(&sent) else { panic!("not for the pod") };
        assert_eq!((nat_entry.other.saddr, nat_entry.other.sport()), (addr(cast.pod), 4000));
        for hosts in [
            packet(cast.node, cast.other_node, 22, 80).tcp(tcp::SYN),
            packet(cast.node, cast.other_node, port, 81).tcp(tcp::SYN),
            packet(cast.mgmt, cast.other_node, port, 80).tcp(tcp::SYN),
            packet(cast.node, cast.other_node, port, 80),
        ] {
            assert_eq!(on_error(&hosts), FromNetdev::Done(Verdict::NotOurs), "{hosts:?}");
        }
        assert_eq!(verdict(maps, &error), Verdict::NotOurs, "without a quote");
    });
}

#[test]
fn an_error_is_no_sign_of_life_and_quotes_no_answer() {
    both(|cast, maps| {
        begin(cast, maps, Origin::Here, &packet(cast.pod, cast.world, 0, 0).echo(4009));
        let error = packet(cast.multicast, cast.egress, 0, 0).unreachable();
        let on_error = |sent: FrameFields| {
            let quote = sent.quoted(Direction::Egress);
            decide(&mut error.arriving(), &quote, UPLINK, maps, &maps.config.get())
        };
        let seen = |maps: &MemoryMaps| {
            let key = packet(cast.world, cast.egress, 0, 0).echo_reply(4009).arriving().tuple;
            maps.nat_peek(&key).map(|nat_entry| nat_entry.last_seen_ns)
        };
        let before = seen(maps);
        assert!(before.is_some());
        maps.now.set(maps.now.get() + 1_000_000_000);
        assert!(matches!(on_error(packet(cast.egress, cast.world, 0, 0).echo(4009)), FromNetdev::ReplyHere { .. }));
        assert_eq!(seen(maps), before);
        let answer = on_error(packet(cast.egress, cast.world, 0, 0).echo_reply(4009));
        assert_eq!(answer, FromNetdev::Done(Verdict::IcmpUnmatched), "an egress IP answers no query");
    });
}

/// The header check finds every owned address, despite false positives of the Bloom filter, and the decision leaves
/// alone all packets that the header check leaves alone.
#[test]
fn packets_that_the_header_check_leaves_alone_have_no_flow() {
    both(|cast, maps| {
        let mut config = with_node_ports(maps.config.get(), 61000, 65535);
        config.owned = BloomFilter::NONE.with(&addr(cast.egress));
        maps.config.set(config);
        begin(cast, maps, Origin::Here, &packet(cast.pod, cast.world, 4000, 80));
        let mut left_alone = 0;
        for to in [cast.egress, cast.foreign_egress, cast.node, cast.pod, cast.world, cast.other_node] {
            for port in [22, 4000, config.node_ports.first, config.node_ports.last] {
                let whole = packet(cast.world, to, 80, port);
                for packet in [
                    whole.clone(),
                    whole.clone().tcp(tcp::ACK),
                    whole.clone().fragment(0, true),
                    whole.clone().fragment(100, false),
                    whole.clone().protocol(47),
                    whole.clone().echo(port),
                    whole.cut(4),
                ] {
                    if is_plain_and_left_alone(&packet, &config) {
                        assert_eq!(verdict(maps, &packet), Verdict::NotOurs, "{packet:?}");
                        assert_ne!(to, cast.egress);
                        left_alone += 1;
                    }
                }
            }
        }
        for port in [config.node_ports.first, config.node_ports.last] {
            assert!(!is_plain_and_left_alone(&packet(cast.world, cast.node, 80, port), &config));
        }
        // Whole TCP and UDP packets for five addresses, except those to the node's NAT ports and to addresses that
        // share a bit.
        assert!((20..=40).contains(&left_alone), "{left_alone}");
    });
}

fn is_plain_and_left_alone(packet: &FrameFields, config: &Config) -> bool {
    Plain::read(packet.frame().as_slice()).is_some_and(|plain| is_left_alone(&plain, UPLINK, config))
}

/// [`ID`]'s address is also an address of a Service.
fn share(cast: &Cast, maps: &MemoryMaps) {
    maps.put_owned(ID, Owned::new(ID, addr(cast.egress), UPLINK, [2, 0, 0, 0, 0, 1], 1500).shared(ID));
}

/// The same, and the pod has a flow of datagrams and one of echo requests.
fn share_with_flows(cast: &Cast, maps: &MemoryMaps) {
    share(cast, maps);
    begin(cast, maps, Origin::Here, &packet(cast.pod, cast.world, 4000, 80));
    begin(cast, maps, Origin::Here, &packet(cast.pod, cast.world, 0, 0).echo(4002));
}

/// The flows of the pods come back, and the Service's clients reach it.
#[test]
fn at_a_shared_address_all_but_replies_are_left_alone() {
    both(|cast, maps| {
        share_with_flows(cast, maps);
        let whole = packet(cast.world, cast.egress, 80, 4000);
        let pong = packet(cast.world, cast.egress, 0, 0).echo_reply(4002);
        for reply in [whole.clone(), pong, whole.clone().fragment(0, true), whole.clone().fragment(100, false)] {
            assert!(matches!(asked(maps, &reply), FromNetdev::ReplyHere { .. }), "{reply:?}");
        }
        let error = packet(cast.world, cast.egress, 0, 0).unreachable();
        let on_error = |sent: FrameFields| {
            decide(&mut error.arriving(), &sent.quoted(Direction::Egress), UPLINK, maps, &maps.config.get())
        };
        assert!(matches!(on_error(packet(cast.egress, cast.world, 4000, 80)), FromNetdev::ReplyHere { .. }));
        let left_alone = FromNetdev::Done(Verdict::NotOurs);
        assert_eq!(on_error(packet(cast.egress, cast.world, 443, 4000)), left_alone);
        maps.frags.borrow_mut().clear();
        let client = packet(cast.world, cast.egress, 4000, 443);
        for packet in [
            client.clone().tcp(tcp::SYN),
            client.clone().tcp(tcp::ACK),
            client.clone(),
            whole.clone().tcp(tcp::SYN),
            packet(cast.world, cast.egress, 0, 0).echo(4002),
            packet(cast.world, cast.egress, 0, 0).echo_reply(4003),
            client.clone().fragment(0, true),
            client.clone().fragment(100, false),
            client.clone().cut(4),
            client.clone().protocol(PROTO_AH),
            client.clone().protocol(47),
            error.clone(),
        ] {
            assert_eq!(asked(maps, &packet), left_alone, "{packet:?}");
        }
        assert!(maps.awaited.borrow().is_empty(), "nothing is held");
        assert_eq!(maps.nat_len(), 4, "only the pod's side makes mappings");
        let mut source_routed = whole.arriving();
        source_routed.source_routed = true;
        assert_eq!(decide(&mut source_routed, &Quote::NONE, UPLINK, maps, &maps.config.get()), left_alone);
        assert_eq!(verdict(maps, &whole.clone().ttl(1)), Verdict::TtlExpired);
        let reply = decide(&mut whole.arriving(), &Quote::NONE, FURTHER, maps, &maps.config.get());
        assert!(matches!(reply, FromNetdev::ReplyHere { .. }), "by any interface: {reply:?}");
    });
}

/// A first fragment of the Service releases none, and its later ones do not match a reply with the same identification.
#[test]
fn fragments_of_a_services_client_stay_together() {
    both(|cast, maps| {
        share_with_flows(cast, maps);
        let datagrams = [
            (packet(cast.world, cast.egress, 80, 4000), packet(cast.world, cast.egress, 4000, 443)),
            (packet(cast.world, cast.egress, 0, 0).echo_reply(4002), packet(cast.world, cast.egress, 0, 0).echo(9)),
        ];
        for (reply, client) in datagrams {
            let later = client.clone().fragment(100, false);
            maps.await_first(&reply.clone().fragment(0, true).arriving());
            assert!(matches!(asked(maps, &reply.fragment(0, true)), FromNetdev::ReplyHere { .. }), "none is released");
            assert!(matches!(asked(maps, &later), FromNetdev::ReplyHere { .. }));
            assert_eq!(verdict(maps, &client.fragment(0, true)), Verdict::NotOurs);
            assert_eq!(verdict(maps, &later), Verdict::NotOurs);
        }
    });
}

#[test]
fn a_shared_address_has_no_nat_entries_of_the_node() {
    both(|cast, maps| {
        share(cast, maps);
        begin(cast, maps, Origin::Stack, &packet(cast.pod, cast.world, 4000, 80));
        assert_eq!(verdict(maps, &packet(cast.world, cast.egress, 80, 4000)), Verdict::BadState);
    });
}

/// [`ID`]'s address is the node's own.
fn use_own(cast: &Cast, maps: &MemoryMaps) -> Owned {
    let owned = Owned::new(ID, addr(cast.node), UPLINK, [2, 0, 0, 0, 0, 1], 1500).hosts(ID);
    maps.put_owned(ID, owned);
    owned
}

/// The egress IP of a pod's flow, and the source of its packets to other nodes, is one address with one range of ports.
#[test]
fn at_an_address_of_the_host_flows_of_both_kinds_come_back_and_all_else_is_the_hosts() {
    both(|cast, maps| {
        let (owned, config) = (use_own(cast, maps), maps.config.get());
        let pool = SnatSource::of(&owned, &config);
        let owner = |origin| NatOwner { origin, source_node: addr(OTHER_NODE), egress_id: ID };
        let sent = |pod: &str, origin| {
            let headers = packet(pod, cast.world, 4000, 80).headers();
            let made = snat::translate(&headers, &Quote::NONE, maps, &pool, &owner(origin)).expect("a free port");
            assert!(is_node_port(made.other.dport(), &config), "{made:?}");
            made.other.dport()
        };
        let (here, remote) = (sent(cast.pod, Origin::Here), sent(cast.remote_pod, Origin::Remote));
        let marked = packet(cast.known_pod, cast.world, 4000, 80).headers();
        let marked = to_netdev::translate(&marked, &Quote::NONE, UPLINK, maps, &config).expect("a free port").other;
        let ports = [here, remote, marked.dport()];
        assert!(ports[0] != ports[1] && ports[1] != ports[2] && ports[0] != ports[2], "{ports:?}");

        let reply = |port| packet(cast.world, cast.node, 80, port);
        for reply in [reply(here), reply(here).fragment(0, true), reply(here).fragment(100, false)] {
            assert!(matches!(asked(maps, &reply), FromNetdev::ReplyHere { .. }), "{reply:?}");
        }
        maps.frags.borrow_mut().clear();
        assert!(matches!(asked(maps, &reply(remote)), FromNetdev::ReplyRemote { .. }));
        let to_node = reply(marked.dport());
        for reply in [to_node.clone().ttl(1), to_node.clone().fragment(0, true), to_node.fragment(100, false)] {
            assert!(matches!(asked(maps, &reply), FromNetdev::NodeReply { .. }), "{reply:?}");
        }
        let on_error = |port| {
            let error = packet(cast.world, cast.node, 0, 0).unreachable();
            let quote = packet(cast.node, cast.world, port, 80).quoted(Direction::Egress);
            decide(&mut error.arriving(), &quote, UPLINK, maps, &config)
        };
        assert!(matches!(on_error(here), FromNetdev::ReplyHere { .. }));
        assert!(matches!(on_error(marked.dport()), FromNetdev::NodeReply { .. }));
        let hosts = FromNetdev::Done(Verdict::NotOurs);
        assert_eq!(on_error(22), hosts);
        maps.frags.borrow_mut().clear();
        for packet in [
            packet(cast.world, cast.node, 4000, 22).tcp(tcp::SYN),
            packet(cast.world, cast.node, 4000, config.node_ports.last).tcp(tcp::SYN),
            packet(cast.world, cast.node, 53, 40_000),
            packet(cast.world, cast.node, 0, 0).echo(4002),
            packet(cast.world, cast.node, 0, 0).echo_reply(4003),
            packet(cast.world, cast.node, 4000, 22).fragment(0, true),
            packet(cast.world, cast.node, 4000, 22).fragment(100, false),
            packet(cast.world, cast.node, 0, 0).protocol(47),
        ] {
            assert_eq!(asked(maps, &packet), hosts, "{packet:?}");
        }
        assert!(maps.awaited.borrow().is_empty(), "nothing is held");
    });
}

/// A hand-over of [`ID`]'s address with the other node.
fn hand_over(cast: &Cast, maps: &MemoryMaps, stage: HandoverStage, since_ns: u64) {
    hand_over_as(maps, stage, since_ns, Owned::new(ID, addr(cast.egress), UPLINK, [2, 0, 0, 0, 0, 1], 1500));
}

fn hand_over_as(maps: &MemoryMaps, stage: HandoverStage, since_ns: u64, owned: Owned) {
    maps.handovers.borrow_mut().insert(ID, HandoverEntry::new(ID, stage, since_ns, addr(OTHER_NODE), owned));
}

/// Packets of the flow with this port: whole, a first and a later fragment, and an error about a sent packet.
fn answers(cast: &Cast, port: u16) -> [(FrameFields, Quote); 4] {
    let whole = packet(cast.world, cast.egress, 80, port);
    let error = packet(cast.world, cast.egress, 0, 0).unreachable();
    let sent = packet(cast.egress, cast.world, port, 80).quoted(Direction::Egress);
    [
        (whole.clone(), Quote::NONE),
        (whole.clone().fragment(0, true), Quote::NONE),
        (whole.fragment(100, false), Quote::NONE),
        (error, sent),
    ]
}

#[test]
fn an_agent_that_stops_during_the_step_still_owns_the_address() {
    both(|cast, maps| {
        begin(cast, maps, Origin::Here, &packet(cast.pod, cast.world, 4000, 80));
        hand_over(cast, maps, HandoverStage::Leaving, 0);
        for (answer, quote) in answers(cast, 4000) {
            let asked = decide(&mut answer.arriving(), &quote, UPLINK, maps, &maps.config.get());
            assert!(matches!(asked, FromNetdev::ReplyHere { .. }), "{answer:?}: {asked:?}");
        }
        maps.owned.borrow_mut().remove(&ID);
        let passed = FromNetdev::PassOn { egress_id: ID };
        assert_eq!(asked(maps, &packet(cast.world, cast.egress, 80, 4000)), passed);
        // The policy may have another address here by then.
        maps.owned.borrow_mut().insert(ID, Owned::new(ID, addr(cast.foreign_egress), UPLINK, [2, 0, 0, 0, 0, 1], 1500));
        assert_eq!(asked(maps, &packet(cast.world, cast.egress, 80, 4000)), passed);
    });
}

#[test]
fn the_old_owner_passes_all_answers_to_the_new_owner() {
    both(|cast, maps| {
        begin(cast, maps, Origin::Here, &packet(cast.pod, cast.world, 4000, 80));
        hand_over(cast, maps, HandoverStage::Leaving, 0);
        maps.owned.borrow_mut().remove(&ID);
        for (answer, quote) in answers(cast, 4000) {
            let asked = decide(&mut answer.arriving(), &quote, UPLINK, maps, &maps.config.get());
            assert_eq!(asked, FromNetdev::PassOn { egress_id: ID }, "{answer:?}");
        }
        // Answers to flows that the new owner has not sent come back.
        for (answer, quote) in answers(cast, 4000) {
            let back = passed(&mut answer.arriving(), &quote, maps, ID);
            assert!(matches!(back, FromNetdev::ReplyHere { .. }), "{answer:?}: {back:?}");
        }
        let [_, (first, _), ..] = answers(cast, 4000);
        maps.await_first(&first.arriving());
        let back = passed(&mut first.arriving(), &Quote::NONE, maps, ID);
        assert!(matches!(back, FromNetdev::ReplyHere { .. }), "no fragment waits on this path: {back:?}");
        maps.frags.borrow_mut().clear();
        let [_, (first, _), (later, _), (error, quote)] = answers(cast, 4001);
        for (answer, quote, verdict) in [
            (&first, &Quote::NONE, Verdict::NoNatEntry),
            (&later, &Quote::NONE, Verdict::FragmentUnknown),
            (&error, &quote, Verdict::IcmpUnmatched),
        ] {
            assert_eq!(
                passed(&mut answer.arriving(), quote, maps, ID),
                FromNetdev::Done(verdict),
                "never passed on twice"
            );
        }
    });
}

#[test]
fn the_new_owner_keeps_answers_to_its_own_flows() {
    both(|cast, maps| {
        begin(cast, maps, Origin::Here, &packet(cast.pod, cast.world, 4000, 80));
        for stage in [HandoverStage::Arriving, HandoverStage::Open] {
            hand_over(cast, maps, stage, maps.now.get());
            for is_passed in [false, true] {
                let asked = |answer: &FrameFields, quote: &Quote| match is_passed {
                    true => passed(&mut answer.arriving(), quote, maps, ID),
                    false => decide(&mut answer.arriving(), quote, UPLINK, maps, &maps.config.get()),
                };
                for (answer, quote) in answers(cast, 4000) {
                    let kept = asked(&answer, &quote);
                    assert!(matches!(kept, FromNetdev::ReplyHere { .. }), "{answer:?}: {kept:?}");
                }
                maps.frags.borrow_mut().clear();
                // Also for a flow that was sent before.
                hand_over(cast, maps, stage, maps.now.get() + 1);
                for port in [4000, 4001] {
                    for (answer, quote) in answers(cast, port) {
                        assert_eq!(asked(&answer, &quote), FromNetdev::PassOn { egress_id: ID }, "{answer:?}");
                    }
                }
                assert!(maps.frags.borrow().is_empty(), "the old node's");
                hand_over(cast, maps, stage, maps.now.get());
            }
        }
    });
}

/// Each of the two nodes serves the clients that arrive there. All else may be for a pod, whose flow the node may not
/// know yet.
#[test]
fn at_a_shared_address_all_but_the_services_ports_are_passed_on() {
    both(|cast, maps| {
        share(cast, maps);
        begin(cast, maps, Origin::Here, &packet(cast.pod, cast.world, 4000, 80));
        let exposed = [PROTO_TCP, PROTO_UDP].map(|protocol| (ExposedPort::new(addr(cast.egress), protocol, 443), 0));
        maps.exposed.borrow_mut().extend(exposed);
        let shared = *maps.owned(ID).expect("it is owned");
        let (before, after) = (maps.now.get(), maps.now.get() + 1);
        maps.owned.borrow_mut().remove(&ID);
        for (stage, since_ns) in
            [(HandoverStage::Leaving, before), (HandoverStage::Arriving, after), (HandoverStage::Open, after)]
        {
            hand_over_as(maps, stage, since_ns, shared);
            let asked = |answer: &FrameFields, quote: &Quote| {
                decide(&mut answer.arriving(), quote, UPLINK, maps, &maps.config.get())
            };
            let to_pods = [4000, 4001].into_iter().flat_map(|port| answers(cast, port));
            let pong = (packet(cast.world, cast.egress, 0, 0).echo_reply(443), Quote::NONE);
            for (answer, quote) in to_pods.chain([pong]) {
                assert_eq!(asked(&answer, &quote), FromNetdev::PassOn { egress_id: ID }, "{stage:?}: {answer:?}");
            }
            maps.frags.borrow_mut().clear();
            let client = packet(cast.world, cast.egress, 5000, 443);
            let plain = [
                client.clone().tcp(tcp::SYN),
                client.clone().protocol(47),
                packet(cast.world, cast.egress, 0, 0).echo(4000),
                packet(cast.world, cast.egress, 0, 0).unreachable(),
            ];
            let to_service = plain.into_iter().map(|packet| (packet, Quote::NONE)).chain(answers(cast, 443));
            for (packet, quote) in to_service {
                assert_eq!(asked(&packet, &quote), FromNetdev::Done(Verdict::NotOurs), "{stage:?}: {packet:?}");
            }
            assert!(maps.frags.borrow().is_empty(), "clients are not remembered");
        }
    });
}

/// Only a pod's packet is passed on, so the node that gets it does not ask again, and nothing of it is the stack's.
#[test]
fn what_is_passed_on_for_a_shared_address_is_for_a_pod() {
    both(|cast, maps| {
        share(cast, maps);
        begin(cast, maps, Origin::Here, &packet(cast.pod, cast.world, 4000, 80));
        let shared = *maps.owned(ID).expect("it is owned");
        maps.exposed.borrow_mut().insert(ExposedPort::new(addr(cast.egress), PROTO_UDP, 4001), 0);
        maps.owned.borrow_mut().remove(&ID);
        let asked = |port| {
            let [(answer, _), ..] = answers(cast, port);
            passed(&mut answer.arriving(), &Quote::NONE, maps, ID)
        };
        hand_over_as(maps, HandoverStage::Leaving, maps.now.get(), shared);
        assert!(matches!(asked(4000), FromNetdev::ReplyHere { .. }), "the new owner has not sent this flow");
        assert_eq!(asked(4001), FromNetdev::Done(Verdict::NoNatEntry));
        for stage in [HandoverStage::Arriving, HandoverStage::Open] {
            hand_over_as(maps, stage, maps.now.get() + 1, shared);
            for port in [4000, 4001, 4002] {
                assert_eq!(asked(port), FromNetdev::PassOn { egress_id: ID }, "{stage:?}: the old node's flow");
            }
            hand_over_as(maps, stage, maps.now.get(), shared);
            assert!(matches!(asked(4000), FromNetdev::ReplyHere { .. }), "{stage:?}: its own flow");
        }
    });
}

/// The node has another address there, and the answer comes back there.
#[test]
fn a_marked_packet_on_a_further_interface_gets_its_address() {
    both(|cast, maps| {
        maps.configure(|config| config.owned = BloomFilter::NONE);
        let config = maps.config.get();
        let request = packet(cast.pod, cast.other_node, 4000, 80).tcp(tcp::SYN).headers();
        let translated = || to_netdev::translate(&request, &Quote::NONE, FURTHER, maps, &config).copied();
        assert_eq!(translated(), Err(Verdict::NoNodeAddress), "an interface without an address");
        let (v4, v6) = (addr("10.10.10.2"), addr("fd00:10::2"));
        let addresses = InterfaceAddresses { v4, v6 };
        maps.interfaces.borrow_mut().insert(FURTHER, addresses);
        let reverse = translated().expect("a free port").other;
        assert_eq!(reverse.daddr, addresses.of(cast.family));

        let own = if cast.family == Family::V4 { "10.10.10.2" } else { "fd00:10::2" };
        let answer = |port| packet(cast.other_node, own, 80, port).tcp(tcp::SYN | tcp::ACK);
        let on = |ifindex, port| decide(&mut answer(port).arriving(), &Quote::NONE, ifindex, maps, &config);
        assert!(matches!(on(FURTHER, reverse.dport()), FromNetdev::NodeReply { .. }));
        for (ifindex, port) in [(FURTHER, reverse.dport() - 1), (UPLINK, reverse.dport())] {
            assert_eq!(on(ifindex, port), FromNetdev::Done(Verdict::NotOurs), "the host's own");
        }
        let plain = |port| Plain::read(answer(port).frame().as_slice()).expect("a plain packet");
        assert!(!is_left_alone(&plain(reverse.dport()), FURTHER, &config));
        assert!(is_left_alone(&plain(reverse.dport()), UPLINK, &config));
        assert!(is_left_alone(&plain(80), FURTHER, &config));
    });
}
