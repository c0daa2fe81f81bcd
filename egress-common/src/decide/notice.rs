//! `notice`: the management port, TC egress. What the host sends to pods of this node.
//!
//! A connection that came in from outside must be answered by the way it came, whatever the policy says now or later, so
//! it is remembered here. TCP shows its first packet. A datagram counts unless it answers one of the pod, which `datagrams`
//! knows, and `flows` where that has forgotten it. Replies that we redirect to this port answer such flows, so they are
//! never taken for connections from outside, also not those that come late, when their flow has been cut.

use super::{Claim, Tables};
use crate::abi::{Config, NodePlace, Verdict};
use crate::wire::{Heads, L4, tcp};

/// For this time after the programs first ran, a datagram may answer one that they have not seen.
pub const SETTLE_NS: u64 = 30_000_000_000;

#[inline(always)]
pub fn notice<T: Tables>(heads: &Heads, tables: &T, config: &Config) -> Verdict {
    if tables.pod(&heads.tuple.daddr).is_none() {
        return Verdict::NotPod;
    }
    let begins = match heads.l4 {
        L4::Tcp => heads.tcp_flags & (tcp::SYN | tcp::ACK) == tcp::SYN,
        L4::Udp | L4::EchoRequest => {
            let since_ns = u64::from(config.following_since_secs) * 1_000_000_000;
            tables.now_ns().saturating_sub(since_ns) > SETTLE_NS
        }
        _ => false,
    };
    if !begins {
        return Verdict::NotOurs;
    }
    // Another node's own address counts as outside: the answer must not be marked 1008, which would change its source.
    let from_here = tables.node(&heads.tuple.saddr).is_some_and(|node| node.place() == NodePlace::Own);
    if from_here || tables.prefix(&heads.tuple.saddr).is_some() {
        return Verdict::NotOurs;
    }
    let answer = heads.tuple.reversed();
    // Also a SYN: on the tuple of a flow of the pod it begins nothing, whoever sends it.
    if tables.flow_seen(&answer, 0).is_some() || (heads.l4 != L4::Tcp && tables.datagram_seen(&answer)) {
        return Verdict::NotOurs;
    }
    match tables.claim_inbound(&answer) {
        Claim::Claimed => Verdict::InboundRemembered,
        Claim::Taken => Verdict::NotOurs,
        Claim::Full => Verdict::InboundRefused,
    }
}

/// Notes a datagram of a pod that nothing selects, so that its answer is not taken for a connection from outside should
/// the pod be selected later.
#[inline(always)]
pub fn follow_datagram<T: Tables>(heads: &Heads, tables: &T) {
    let is_datagram = matches!(heads.l4, L4::Udp | L4::EchoRequest) && heads.has_l4();
    // What stays in the cluster, name look-ups above all, is never asked about.
    if is_datagram && tables.prefix(&heads.tuple.daddr).is_none() && !tables.inbound_seen(&heads.tuple) {
        tables.note_datagram(&heads.tuple);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::{PodEntry, WhenEmpty};
    use crate::decide::cast::{ID, both};
    use crate::decide::packets::packet;
    use crate::decide::steer::{Steer, steer};
    use crate::decide::world::World;
    use crate::wire::Heads;

    fn notice(heads: &Heads, world: &World) -> Verdict {
        super::notice(heads, world, &world.config.get())
    }

    #[test]
    fn a_connection_from_outside_is_remembered_once() {
        both(|cast, world| {
            for pod in [cast.pod, cast.known_pod] {
                let syn = packet(cast.world, pod, 80, 4000).tcp(tcp::SYN).arriving();
                assert_eq!(notice(&syn, world), Verdict::InboundRemembered, "also before anything selects the pod");
                assert_eq!(notice(&syn, world), Verdict::NotOurs);
            }
            assert_eq!(world.inbound_len(), 2);
            for flags in [tcp::ACK, tcp::SYN | tcp::ACK, tcp::RST, tcp::FIN | tcp::ACK] {
                let other = packet(cast.world, cast.pod, 81, 4000).tcp(flags).arriving();
                assert_eq!(notice(&other, world), Verdict::NotOurs, "only a first packet begins one");
            }
        });
    }

    #[test]
    fn only_what_comes_from_outside_to_a_pod_here() {
        both(|cast, world| {
            let syn = |from, to| packet(from, to, 80, 4000).tcp(tcp::SYN).arriving();
            assert_eq!(notice(&syn(cast.world, cast.unknown_pod), world), Verdict::NotPod);
            assert_eq!(notice(&syn(cast.world, cast.remote_pod), world), Verdict::NotPod);
            for from in [cast.node, cast.mgmt, cast.remote_pod, cast.service, cast.egress] {
                assert_eq!(notice(&syn(from, cast.pod), world), Verdict::NotOurs, "{from}");
            }
            assert_eq!(world.inbound_len(), 0);
        });
    }

    #[test]
    fn datagrams_count_once_the_programs_have_settled() {
        both(|cast, world| {
            let now = world.now.get();
            let datagrams: [Heads; 2] = [
                packet(cast.world, cast.pod, 80, 4000).arriving(),
                packet(cast.world, cast.known_pod, 0, 0).echo(9).arriving(),
            ];
            let mut config = world.config.get();
            for heads in &datagrams {
                for since_ns in [now, now - SETTLE_NS, now + 1_000_000_000] {
                    config.following_since_secs = (since_ns / 1_000_000_000) as u32;
                    let verdict = super::notice(heads, world, &config);
                    assert_eq!(verdict, Verdict::NotOurs, "it may answer what the pod sent before");
                }
                config.following_since_secs = ((now - SETTLE_NS) / 1_000_000_000) as u32 - 1;
                assert_eq!(super::notice(heads, world, &config), Verdict::InboundRemembered);
            }
        });
    }

    #[test]
    fn selecting_a_pod_takes_neither_its_own_datagrams_nor_those_from_outside_for_the_other() {
        both(|cast, world| {
            let pod = cast.known_pod;
            let own = packet(pod, cast.world, 4000, 53);
            steer(&mut own.heads(), world, &world.config.get());
            let asked = packet(cast.world, pod, 5000, 8080).arriving();
            assert_eq!(notice(&asked, world), Verdict::InboundRemembered);
            world.add_pod(pod, PodEntry::selected(ID, world.now.get()));
            let answer = packet(cast.world, pod, 53, 4000).arriving();
            assert_eq!(notice(&answer, world), Verdict::NotOurs, "the pod began it");
            let reply = packet(pod, cast.world, 8080, 5000);
            let verdict = steer(&mut reply.heads(), world, &world.config.get());
            assert_eq!(verdict, Steer::Done(Verdict::InboundReply));
            assert!(matches!(steer(&mut own.heads(), world, &world.config.get()), Steer::Send { .. }));
        });
    }

    #[test]
    fn another_node_may_call_a_pod_and_be_called_by_it() {
        both(|cast, world| {
            let config = world.config.get();
            let syn = packet(cast.other_node, cast.pod, 50_000, 8443).tcp(tcp::SYN).arriving();
            assert_eq!(notice(&syn, world), Verdict::InboundRemembered);
            let data = packet(cast.pod, cast.other_node, 8443, 50_000).tcp(tcp::ACK);
            assert_eq!(steer(&mut data.heads(), world, &config), Steer::Done(Verdict::InboundReply));
            let asked = packet(cast.pod, cast.other_node, 4000, 53);
            assert_eq!(steer(&mut asked.heads(), world, &config), Steer::Mark);
            let answer = packet(cast.other_node, cast.pod, 53, 4000).arriving();
            assert_eq!(notice(&answer, world), Verdict::NotOurs);
            assert_eq!(steer(&mut asked.heads(), world, &config), Steer::Mark);
        });
    }

    #[test]
    fn answers_to_datagrams_with_the_nodes_address_are_no_connections_from_outside() {
        both(|cast, world| {
            world.set_policy(ID, WhenEmpty::NodeAddress, &[]);
            let asked = packet(cast.pod, cast.world, 4000, 53);
            let given = Steer::Done(Verdict::NodeAddress);
            assert_eq!(steer(&mut asked.heads(), world, &world.config.get()), given);
            let answer = packet(cast.world, cast.pod, 53, 4000).arriving();
            assert_eq!(notice(&answer, world), Verdict::NotOurs);
            assert_eq!(steer(&mut asked.heads(), world, &world.config.get()), given);
        });
    }

    #[test]
    fn a_syn_on_the_tuple_of_a_pods_flow_begins_nothing() {
        both(|cast, world| {
            let own = packet(cast.pod, cast.world, 4000, 443);
            steer(&mut own.clone().tcp(tcp::SYN).heads(), world, &world.config.get());
            let syn = packet(cast.world, cast.pod, 443, 4000).tcp(tcp::SYN).arriving();
            assert_eq!(notice(&syn, world), Verdict::NotOurs, "the server would unmask the node");
            let data = own.tcp(tcp::ACK);
            assert!(matches!(steer(&mut data.heads(), world, &world.config.get()), Steer::Send { .. }));
        });
    }

    #[test]
    fn a_late_answer_to_a_flow_that_was_cut_is_no_connection_from_outside() {
        both(|cast, world| {
            let request = packet(cast.pod, cast.world, 4000, 53);
            steer(&mut request.heads(), world, &world.config.get());
            world.cut_flows();
            assert_eq!(notice(&packet(cast.world, cast.pod, 53, 4000).arriving(), world), Verdict::NotOurs);
        });
    }

    #[test]
    fn the_answer_of_a_pods_own_flow_is_no_connection_from_outside() {
        both(|cast, world| {
            for request in [packet(cast.pod, cast.world, 4000, 53), packet(cast.pod, cast.world, 0, 0).echo(9)] {
                steer(&mut request.heads(), world, &world.config.get());
            }
            assert_eq!(world.flows_len(), 2);
            let answer = packet(cast.world, cast.pod, 53, 4000).arriving();
            assert_eq!(notice(&answer, world), Verdict::NotOurs);
            let pong = packet(cast.world, cast.pod, 0, 0).echo_reply(9).arriving();
            assert_eq!(notice(&pong, world), Verdict::NotOurs);
            assert_eq!(world.inbound_len(), 0);
            let stranger = packet(cast.world, cast.pod, 53, 4001).arriving();
            assert_eq!(notice(&stranger, world), Verdict::InboundRemembered, "no flow of the pod's");
        });
    }

    #[test]
    fn a_full_map_is_named_and_harms_nobody() {
        both(|cast, world| {
            world.limit_inbound(1);
            let syn = |port| packet(cast.world, cast.pod, port, 4000).tcp(tcp::SYN).arriving();
            assert_eq!(notice(&syn(1), world), Verdict::InboundRemembered);
            assert_eq!(notice(&syn(2), world), Verdict::InboundRefused);
            assert_eq!(notice(&syn(1), world), Verdict::NotOurs);
        });
    }
}
