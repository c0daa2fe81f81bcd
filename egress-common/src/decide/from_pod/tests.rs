//! The steps of the decision, in order. Classes, fragments, ICMP errors, resets and cached decisions have their own files.

mod classes;
mod errors;
mod fragments;
mod resets;
mod settled;

use super::*;
use crate::abi::{
    Addr, ClusterPrefix, Direction, Family, OnUnknownPod, PodEntry, PolicyEntry, PolicyEntryKey, PrefixKind, WhenEmpty,
};
use crate::decide::cast::{Cast, ID, OTHER_NODE, both};
use crate::decide::memory_maps::{MemoryMaps, addr};
use crate::decide::packets::{FrameFields, packet};
use crate::decide::to_pod;
use crate::wire::{PROTO_AH, PROTO_DCCP, PROTO_MOBILITY, PROTO_SCTP, PROTO_UDP_LITE, sctp};

fn asked<'t>(maps: &'t MemoryMaps, packet: &FrameFields) -> FromPod<'t> {
    decide(&mut packet.headers(), &Quote::NONE, maps, &maps.config.get())
}

fn verdict(maps: &MemoryMaps, packet: &FrameFields) -> Verdict {
    match asked(maps, packet) {
        FromPod::Done(verdict) => verdict,
        other => panic!("{packet:?} is not done: {other:?}"),
    }
}

fn udp(cast: &Cast, to: &str) -> FrameFields {
    packet(cast.pod, to, 4000, 80)
}

/// The packet leaves with the policy's address, served here.
fn assert_sent(cast: &Cast, maps: &MemoryMaps, packet: &FrameFields) {
    let slot = PolicySlot::here(addr(cast.egress));
    assert_eq!(asked(maps, packet), FromPod::Send { egress_id: ID, slot: &slot }, "{packet:?}");
}

fn tunnel_port(maps: &MemoryMaps) -> u16 {
    u16::try_from(maps.config.get().tunnel_port).expect("a port")
}

#[test]
fn step_1_only_pods_of_this_node() {
    both(|cast, maps| {
        for source in [cast.world, cast.node, cast.remote_pod, cast.lost_pod, cast.egress] {
            for to in [cast.world, cast.other_node, cast.foreign_egress] {
                assert_eq!(verdict(maps, &packet(source, to, 4000, 80)), Verdict::NotPod, "{source}");
            }
        }
    });
}

#[test]
fn step_2_addresses_of_this_node() {
    both(|cast, maps| {
        for source in [cast.pod, cast.unknown_pod] {
            for to in [cast.node, cast.mgmt] {
                assert_eq!(verdict(maps, &packet(source, to, 4000, 80)), Verdict::ToOwnNode);
                let answer = packet(source, to, 4000, 80).tcp(tcp::SYN | tcp::ACK);
                assert_eq!(verdict(maps, &answer), Verdict::ToOwnNode, "asked before whether it answers");
            }
        }
    });
}

#[test]
fn step_3_addresses_of_the_cluster() {
    both(|cast, maps| {
        let places = [
            cast.known_pod,
            cast.remote_pod,
            cast.lost_pod,
            cast.service,
            cast.join,
            cast.link_local,
            cast.multicast,
            cast.excluded,
        ];
        for to in places {
            for source in [cast.pod, cast.unknown_pod] {
                assert_eq!(verdict(maps, &packet(source, to, 4000, 80)), Verdict::ToCluster, "{to}");
            }
        }
        assert_eq!(maps.flows_len(), 0, "and no flow began");
    });
}

#[test]
fn a_remote_management_port_counts_as_cluster_before_node() {
    both(|cast, maps| {
        assert_eq!(verdict(maps, &udp(cast, cast.other_mgmt)), Verdict::ToCluster);
        assert_eq!(asked(maps, &udp(cast, cast.other_node)), FromPod::Mark);
    });
}

#[test]
fn step_4_answers_to_inbound_connections() {
    both(|cast, maps| {
        let syn_ack = udp(cast, cast.world).tcp(tcp::SYN | tcp::ACK);
        assert_eq!(verdict(maps, &syn_ack), Verdict::InboundReply, "whatever we remember");
        assert_eq!(verdict(maps, &udp(cast, cast.world).echo_reply(5)), Verdict::InboundReply);
        for flags in [tcp::ACK, tcp::SYN, tcp::RST, tcp::FIN | tcp::ACK] {
            assert_sent(cast, maps, &packet(cast.pod, cast.world, 4001, 80).tcp(flags));
        }
        let syn = packet(cast.world, cast.pod, 80, 4000).tcp(tcp::SYN).arriving();
        assert_eq!(to_pod::decide(&syn, maps, &maps.config.get()), Verdict::InboundRemembered);
        for flags in [tcp::ACK, tcp::FIN | tcp::ACK, tcp::RST] {
            assert_eq!(verdict(maps, &udp(cast, cast.world).tcp(flags)), Verdict::InboundReply);
        }
        assert_sent(cast, maps, &udp(cast, cast.world));
        assert_eq!(maps.inbound_len(), 1);
    });
}

#[test]
fn a_query_of_a_pod_is_no_answer_to_a_query_with_its_identifier() {
    both(|cast, maps| {
        let ping = packet(cast.world, cast.pod, 0, 0).echo(9).arriving();
        assert_eq!(to_pod::decide(&ping, maps, &maps.config.get()), Verdict::InboundRemembered);
        assert_sent(cast, maps, &packet(cast.pod, cast.world, 0, 0).echo(9));
        assert_eq!(verdict(maps, &packet(cast.pod, cast.world, 0, 0).echo_reply(9)), Verdict::InboundReply);
    });
}

#[test]
fn fragments_of_a_ping_and_of_a_ping_reply_follow_their_own_flow() {
    both(|cast, maps| {
        let ping = packet(cast.world, cast.pod, 0, 0).echo(9).arriving();
        assert_eq!(to_pod::decide(&ping, maps, &maps.config.get()), Verdict::InboundRemembered);
        let reply = packet(cast.pod, cast.world, 0, 0).echo_reply(9);
        let query = packet(cast.pod, cast.world, 0, 0).echo(9);
        for (offset, more) in [(0, true), (100, true), (150, false)] {
            assert_eq!(verdict(maps, &reply.clone().fragment(offset, more)), Verdict::InboundReply, "at {offset}");
        }
        assert!(maps.flow_peek(&reply.headers().tuple).is_none(), "no flow of the pod");
        for (offset, more) in [(0, true), (100, true), (150, false)] {
            assert_sent(cast, maps, &query.clone().fragment(offset, more));
        }
    });
}

#[test]
fn a_syn_of_the_pod_ends_the_inbound_entry_on_its_tuple() {
    both(|cast, maps| {
        let syn = packet(cast.world, cast.pod, 80, 4000).tcp(tcp::SYN).arriving();
        assert_eq!(to_pod::decide(&syn, maps, &maps.config.get()), Verdict::InboundRemembered);
        // That SYN may be forged: the pod's connection is not an answer to it.
        for flags in [tcp::SYN, tcp::ACK, tcp::FIN | tcp::ACK] {
            assert_sent(cast, maps, &packet(cast.pod, cast.world, 4000, 80).tcp(flags));
        }
        assert_eq!(maps.inbound_len(), 0);
    });
}

#[test]
fn an_init_of_the_pod_ends_the_inbound_entry_on_its_tuple() {
    both(|cast, maps| {
        let init = packet(cast.world, cast.pod, 80, 4000).sctp(sctp::INIT).arriving();
        assert_eq!(to_pod::decide(&init, maps, &maps.config.get()), Verdict::InboundRemembered);
        const COOKIE_ECHO: u8 = 10;
        assert_eq!(verdict(maps, &packet(cast.pod, cast.world, 4000, 80).sctp(COOKIE_ECHO)), Verdict::InboundReply);
        for chunk in [sctp::INIT, COOKIE_ECHO] {
            assert_sent(cast, maps, &packet(cast.pod, cast.world, 4000, 80).sctp(chunk));
        }
        assert_eq!(maps.inbound_len(), 0);
    });
}

#[test]
fn a_simultaneous_open_keeps_the_egress_ip() {
    both(|cast, maps| {
        assert_sent(cast, maps, &udp(cast, cast.world).tcp(tcp::SYN));
        let syn = packet(cast.world, cast.pod, 80, 4000).tcp(tcp::SYN).arriving();
        assert_eq!(to_pod::decide(&syn, maps, &maps.config.get()), Verdict::NotOurs);
        assert_sent(cast, maps, &udp(cast, cast.world).tcp(tcp::SYN | tcp::ACK));
        let odd = packet(cast.pod, cast.world, 4001, 80).tcp(tcp::SYN | tcp::ACK | tcp::RST);
        assert_sent(cast, maps, &odd);
    });
}

#[test]
fn answers_to_nodes_and_egress_ips_are_left_alone_too() {
    both(|cast, maps| {
        for to in [cast.other_node, cast.foreign_egress] {
            let syn_ack = udp(cast, to).tcp(tcp::SYN | tcp::ACK);
            assert_eq!(verdict(maps, &syn_ack), Verdict::InboundReply);
        }
    });
}

#[test]
fn step_5_unselected_and_unknown_pods() {
    both(|cast, maps| {
        for to in [cast.world, cast.other_node, cast.foreign_egress, cast.service] {
            assert_eq!(verdict(maps, &packet(cast.known_pod, to, 4000, 80)), Verdict::NotSelected);
        }
        let mut config = maps.config.get();
        let now_secs = (maps.now.get() / 1_000_000_000) as u32;
        for (on, until, expected) in [
            (OnUnknownPod::Drop, 0, Verdict::UnknownPod),
            (OnUnknownPod::Pass, 0, Verdict::UnknownPodPassed),
            (OnUnknownPod::PassWhileFollowed, now_secs + 3, Verdict::UnknownPodPassed),
            // No agent has watched the pods for a while.
            (OnUnknownPod::PassWhileFollowed, now_secs, Verdict::UnknownPod),
        ] {
            config.pass_until_secs = until;
            maps.config.set(config.with_on_unknown_pod(on));
            for to in [cast.world, cast.other_node, cast.foreign_egress] {
                assert_eq!(verdict(maps, &packet(cast.unknown_pod, to, 4000, 80)), expected);
            }
            let answer = packet(cast.unknown_pod, cast.world, 4000, 80).tcp(tcp::SYN | tcp::ACK);
            assert_eq!(verdict(maps, &answer), Verdict::InboundReply);
        }
    });
}

#[test]
fn steps_6_and_7_nodes_are_marked_and_egress_ips_refused() {
    both(|cast, maps| {
        assert_eq!(asked(maps, &udp(cast, cast.other_node)), FromPod::Mark);
        for to in [cast.egress, cast.foreign_egress] {
            assert_eq!(asked(maps, &udp(cast, to)), FromPod::Hairpin);
        }
        assert_eq!(maps.flows_len(), 0);
    });
}

#[test]
fn step_8_the_address_of_the_flow() {
    both(|cast, maps| {
        for packet in [udp(cast, cast.world), udp(cast, cast.world).tcp(tcp::SYN), udp(cast, cast.world).echo(9)] {
            assert_sent(cast, maps, &packet);
        }
        assert_eq!(maps.flows_len(), 3);
        let remote = PolicySlot::remote(addr(cast.egress), addr(OTHER_NODE));
        maps.set_policy(ID, WhenEmpty::Drop, &[remote]);
        assert_eq!(asked(maps, &udp(cast, cast.world)), FromPod::Send { egress_id: ID, slot: &remote });
    });
}

#[test]
fn the_last_hop_is_the_stacks() {
    both(|cast, maps| {
        for ttl in [0, 1] {
            assert_eq!(verdict(maps, &udp(cast, cast.world).ttl(ttl)), Verdict::TtlExpired);
        }
        assert_sent(cast, maps, &udp(cast, cast.world).ttl(2));
    });
}

#[test]
fn without_an_address_the_drop_has_a_reason() {
    both(|cast, maps| {
        for (when, expected) in [
            (WhenEmpty::Drop, Verdict::NoGateway),
            (WhenEmpty::NodeAddress, Verdict::NodeAddress),
            (WhenEmpty::NotListed, Verdict::FamilyNotListed),
        ] {
            maps.set_policy(ID, when, &[]);
            assert_eq!(verdict(maps, &udp(cast, cast.world)), expected);
            let expired = udp(cast, cast.world).ttl(1);
            assert_eq!(verdict(maps, &expired), expected, "also for a packet that goes nowhere");
        }
        maps.add_pod(cast.pod, PodEntry::selected(ID + 1, 0));
        assert_eq!(verdict(maps, &udp(cast, cast.world)), Verdict::NoPolicy);
    });
}

#[test]
fn untranslatable_packets_are_dropped_with_their_reason() {
    both(|cast, maps| {
        let to_world = udp(cast, cast.world);
        for (packet, expected) in [
            (to_world.clone().protocol(PROTO_AH), Verdict::UnsupportedProtocol),
            (to_world.clone().protocol(PROTO_DCCP), Verdict::UnsupportedProtocol),
            (to_world.clone().protocol(PROTO_UDP_LITE), Verdict::UnsupportedProtocol),
            (to_world.clone().protocol(PROTO_MOBILITY), Verdict::UnsupportedProtocol),
            (to_world.clone().cut(4), Verdict::Malformed),
            (to_world.clone().tcp(tcp::SYN).cut(13), Verdict::Malformed),
            (to_world.clone().unreachable(), Verdict::IcmpUnmatched),
            (to_world.clone().fragment(100, false), Verdict::FragmentUnknown),
        ] {
            assert_eq!(verdict(maps, &packet), expected, "{packet:?}");
        }
        assert_eq!(maps.flows_len(), 0);
    });
}

#[test]
fn a_full_map_of_flows_is_a_drop() {
    both(|cast, maps| {
        maps.limit_flows(1);
        assert_sent(cast, maps, &udp(cast, cast.world));
        assert_sent(cast, maps, &udp(cast, cast.world));
        assert_eq!(verdict(maps, &packet(cast.pod, cast.world, 4001, 80)), Verdict::MapFull);
    });
}

#[test]
fn pods_send_nothing_to_a_tunnel_port() {
    both(|cast, maps| {
        let port = tunnel_port(maps);
        for source in [cast.pod, cast.known_pod, cast.unknown_pod] {
            for to in [cast.node, cast.mgmt, cast.other_node, cast.other_mgmt] {
                assert_eq!(verdict(maps, &packet(source, to, 4000, port)), Verdict::ForgedTunnel);
            }
        }
        assert_eq!(verdict(maps, &packet(cast.known_pod, cast.world, 4000, port)), Verdict::NotSelected);
        assert_eq!(verdict(maps, &packet(cast.pod, cast.remote_pod, 4000, port)), Verdict::ToCluster);
        assert_sent(cast, maps, &packet(cast.pod, cast.world, 4000, port));
        let tcp = packet(cast.known_pod, cast.other_node, 4000, port).tcp(tcp::SYN);
        assert_eq!(verdict(maps, &tcp), Verdict::NotSelected, "another protocol's port");
    });
}

#[test]
fn an_unreadable_transport_header_may_be_for_the_tunnel_port() {
    const DESTINATION_OPTIONS: u8 = 60;
    both(|cast, maps| {
        let cut = packet(cast.known_pod, cast.other_node, 4000, 80).cut(4);
        assert_eq!(verdict(maps, &cut), Verdict::ForgedTunnel);
        // A chain of more headers than are walked.
        let endless = packet(cast.known_pod, cast.other_node, u16::from(DESTINATION_OPTIONS) << 8, 80)
            .protocol(DESTINATION_OPTIONS);
        let expected = if cast.family == Family::V6 { Verdict::ForgedTunnel } else { Verdict::NotSelected };
        assert_eq!(verdict(maps, &endless), expected);
    });
}

#[test]
fn entries_of_another_version_let_no_packet_out() {
    both(|cast, maps| {
        maps.add_pod(cast.pod, PodEntry::selected(ID, 0).of_another_version());
        assert_sent(cast, maps, &udp(cast, cast.world));
        maps.add_pod(cast.pod, PodEntry::known().of_another_version());
        assert_eq!(verdict(maps, &udp(cast, cast.world)), Verdict::NoPolicy);
        maps.add_pod(cast.pod, PodEntry::selected(ID, 0));

        let policy = PolicyEntry::empty(WhenEmpty::NodeAddress).of_another_version();
        maps.put_policy(PolicyEntryKey::new(ID, cast.family), policy);
        assert_eq!(verdict(maps, &udp(cast, cast.world)), Verdict::NoGateway);

        maps.config.set(maps.config.get().with_on_unknown_pod(OnUnknownPod::Pass).of_another_version());
        assert_eq!(verdict(maps, &packet(cast.unknown_pod, cast.world, 4000, 80)), Verdict::UnknownPod);

        let host = if cast.family == Family::V4 { 32 } else { 128 };
        let prefix = ClusterPrefix::new(PrefixKind::EgressIp, Addr::UNSPECIFIED).of_another_version();
        maps.put_prefix(cast.world, host, prefix);
        assert_eq!(verdict(maps, &udp(cast, cast.world)), Verdict::ToCluster, "some prefix of the cluster");
    });
}

#[test]
fn protocols_without_ports_and_sctp_have_flows() {
    both(|cast, maps| {
        for protocol in [4, 47, 50, PROTO_SCTP] {
            assert_sent(cast, maps, &udp(cast, cast.world).protocol(protocol));
            assert_eq!(
                to_pod::decide(
                    &packet(cast.world, cast.pod, 80, 4000).protocol(protocol).arriving(),
                    maps,
                    &maps.config.get()
                ),
                Verdict::NotOurs
            );
        }
        assert_eq!(maps.flows_len(), 4);
    });
}

#[test]
fn answers_to_inbound_protocols_without_ports_are_untranslated() {
    both(|cast, maps| {
        for protocol in [47, PROTO_SCTP] {
            let request = packet(cast.world, cast.pod, 80, 4000).protocol(protocol).arriving();
            assert_eq!(to_pod::decide(&request, maps, &maps.config.get()), Verdict::InboundRemembered);
            assert_eq!(verdict(maps, &udp(cast, cast.world).protocol(protocol)), Verdict::InboundReply);
        }
    });
}
