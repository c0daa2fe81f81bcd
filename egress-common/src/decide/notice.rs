//! `notice`: the management port, TC egress. What the host sends to pods of this node.
//!
//! A connection that came in from outside must be answered by the way it came, whatever the policy says now or later, so
//! it is remembered here. TCP shows its first packet. A datagram counts unless it answers one of the pod, which `datagrams`
//! knows, and `flows` where that has forgotten it. Replies that we redirect to this port answer such flows, so they are
//! never taken for connections from outside, also not those that come late, when their flow has been cut.
//!
//! What is remembered lives as its connection does ([`phase`]); packets keep it alive whether the pod is selected or not,
//! so that a selection that comes late finds it. The map never forgets a live connection to take another: when it is full
//! it refuses, and its last quarter is for pods that are selected, so that a busy one that nothing selects cannot take
//! their room.

use super::phase;
use super::{Claim, Tables};
use crate::abi::{Config, NodePlace, Tuple, Verdict};
use crate::wire::{Heads, L4, tcp};

/// For this time after the programs first ran, a datagram may answer one that they have not seen; a ping answers none.
pub const SETTLE_NS: u64 = 30_000_000_000;

#[inline(always)]
pub fn notice<T: Tables>(heads: &Heads, tables: &T, config: &Config) -> Verdict {
    let Some(pod) = tables.pod(&heads.tuple.daddr) else { return Verdict::NotPod };
    let is_selected = pod.egress_id().is_some();
    let answer = heads.tuple.reversed();
    let begins = match heads.l4 {
        L4::Tcp => phase::is_first(heads.tcp_flags),
        // Answers nothing, unlike other datagrams.
        L4::EchoRequest => true,
        l4 if l4.begins_anywhere() => {
            let since_ns = u64::from(config.following_since_secs) * 1_000_000_000;
            tables.now_ns().saturating_sub(since_ns) > SETTLE_NS
        }
        _ => return Verdict::NotOurs,
    };
    if !begins {
        if heads.l4 == L4::Tcp {
            follow_connection(heads.tcp_flags, &answer, tables, is_selected);
        }
        return Verdict::NotOurs;
    }
    // It answers nothing, also where the pod pings its sender by the same identifier.
    let is_ping = heads.l4 == L4::EchoRequest;
    // Asked first, since it is so of most datagrams. Also a SYN: on the tuple of a flow of the pod it begins nothing,
    // whoever sends it.
    if !is_ping && tables.flow_peek(&answer).is_some() {
        return Verdict::NotOurs;
    }
    // Another node's own address counts as outside: the answer must not be marked 1008, which would change its source.
    let from_here = tables.node(&heads.tuple.saddr).is_some_and(|node| node.place() == NodePlace::Own);
    if from_here || tables.prefix(&heads.tuple.saddr).is_some() {
        return Verdict::NotOurs;
    }
    if tables.inbound_heard(&answer, heads.tcp_flags) {
        return Verdict::NotOurs;
    }
    if heads.l4 != L4::Tcp && !is_ping && tables.datagram_seen(&answer) {
        return Verdict::NotOurs;
    }
    // Nothing selects the pod yet: what it is remembered for may never come. So it leaves room for those where it has.
    if !is_selected && tables.inbound_in_use() >= config.inbound_shared {
        return Verdict::InboundRefused;
    }
    match tables.claim_inbound(&answer) {
        Claim::Claimed => Verdict::InboundRemembered,
        Claim::Taken => Verdict::NotOurs,
        Claim::Full => Verdict::InboundRefused,
    }
}

/// A packet of a TCP connection, whoever began it. Where the pod is selected, its own packets tell `steer` nearly all, and
/// only the ends are looked at here: most packets for such a pod answer its own flows, and cost no question.
#[inline(always)]
fn follow_connection<T: Tables>(flags: u8, answer: &Tuple, tables: &T, is_selected: bool) {
    let ends = flags & (tcp::FIN | tcp::RST) != 0;
    if !is_selected || (ends && !tables.flow_answered(answer, flags)) {
        tables.inbound_heard(answer, flags);
    }
}

/// Notes a datagram of a pod that nothing selects, or that is not known, so that its answer is not taken for a connection from outside should
/// the pod be selected later.
#[inline(always)]
pub fn follow_datagram<T: Tables>(heads: &Heads, tables: &T) {
    let is_datagram = heads.l4.begins_anywhere() && heads.has_l4();
    // What stays in the cluster, name look-ups above all, is never asked about.
    if is_datagram && tables.prefix(&heads.tuple.daddr).is_none() && !tables.inbound_known(&heads.tuple) {
        tables.note_datagram(&heads.tuple);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::{OnUnknownPod, PodEntry, WhenEmpty};
    use crate::decide::cast::{ID, both};
    use crate::decide::packets::packet;
    use crate::decide::steer::{self, Steer};
    use crate::decide::world::World;
    use crate::wire::{Heads, Quote};

    fn steer<'t>(heads: &mut Heads, world: &'t World, config: &Config) -> Steer<'t> {
        steer::steer(heads, &Quote::NONE, world, config)
    }

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
                packet(cast.world, cast.known_pod, 80, 4000).protocol(47).arriving(),
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
    fn a_ping_counts_from_the_first_moment_on() {
        both(|cast, world| {
            let mut config = world.config.get();
            config.following_since_secs = (world.now.get() / 1_000_000_000) as u32;
            for (pod, id) in [(cast.pod, 9), (cast.known_pod, 10)] {
                let ping = packet(cast.world, pod, 0, 0).echo(id).arriving();
                assert_eq!(super::notice(&ping, world, &config), Verdict::InboundRemembered);
            }
        });
    }

    #[test]
    fn a_ping_counts_also_where_the_pod_pings_by_the_same_identifier() {
        both(|cast, world| {
            let config = world.config.get();
            let query = packet(cast.pod, cast.world, 0, 0).echo(9);
            assert!(matches!(steer(&mut query.heads(), world, &config), Steer::Send { .. }));
            let ping = packet(cast.world, cast.pod, 0, 0).echo(9).arriving();
            assert_eq!(notice(&ping, world), Verdict::InboundRemembered);
            assert!(matches!(steer(&mut query.heads(), world, &config), Steer::Send { .. }), "a flow as before");
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

    /// What `inbound` says of the connection whose packets from outside look like this.
    fn phase_of(world: &World, arriving: &Heads) -> phase::Phase {
        phase::of_inbound(world.inbound_at(&arriving.tuple.reversed()).expect("remembered").state)
    }

    #[test]
    fn a_connection_to_a_pod_that_nothing_selects_is_followed() {
        both(|cast, world| {
            let arriving = |flags| packet(cast.world, cast.known_pod, 80, 4000).tcp(flags).arriving();
            let begun = world.now.get();
            let seen = || world.inbound_at(&arriving(0).tuple.reversed()).map(|inbound| inbound.last_seen_ns);
            assert_eq!(notice(&arriving(tcp::SYN), world), Verdict::InboundRemembered);
            assert_eq!(phase_of(world, &arriving(0)), phase::Phase::Opening, "a flood of SYNs does not stay long");
            world.now.set(begun + 7_000_000_000_000);
            assert_eq!(notice(&arriving(tcp::ACK), world), Verdict::NotOurs);
            assert_eq!(seen(), Some(world.now.get()), "a long connection is kept");
            assert_eq!(phase_of(world, &arriving(0)), phase::Phase::Established);
            world.add_pod(cast.known_pod, PodEntry::selected(ID, world.now.get()));
            let answer = packet(cast.known_pod, cast.world, 4000, 80).tcp(tcp::ACK);
            let verdict = steer(&mut answer.heads(), world, &world.config.get());
            assert_eq!(verdict, Steer::Done(Verdict::InboundReply), "and found when the pod is selected");
        });
    }

    #[test]
    fn a_connection_to_a_selected_pod_is_followed_by_its_answers_and_its_ends() {
        both(|cast, world| {
            let arriving = |flags| packet(cast.world, cast.pod, 80, 4000).tcp(flags).arriving();
            let answers = |flags| {
                let answer = packet(cast.pod, cast.world, 4000, 80).tcp(flags);
                let verdict = steer(&mut answer.heads(), world, &world.config.get());
                assert_eq!(verdict, Steer::Done(Verdict::InboundReply));
            };
            notice(&arriving(tcp::SYN), world);
            answers(tcp::SYN | tcp::ACK);
            assert_eq!(phase_of(world, &arriving(0)), phase::Phase::Opening);
            answers(tcp::ACK);
            assert_eq!(phase_of(world, &arriving(0)), phase::Phase::Established);
            assert_eq!(notice(&arriving(tcp::RST), world), Verdict::NotOurs);
            assert_eq!(phase_of(world, &arriving(0)), phase::Phase::Closing);
            answers(tcp::ACK);
            assert_eq!(phase_of(world, &arriving(0)), phase::Phase::Established, "it was a stranger's");
            notice(&arriving(tcp::FIN | tcp::ACK), world);
            answers(tcp::FIN | tcp::ACK);
            assert_eq!(phase_of(world, &arriving(0)), phase::Phase::Closing);
            assert_eq!(notice(&arriving(tcp::SYN), world), Verdict::NotOurs, "the entry is there already");
            assert_eq!(phase_of(world, &arriving(0)), phase::Phase::Opening, "used again");
        });
    }

    #[test]
    fn datagrams_from_outside_keep_their_entry_and_those_of_the_pod_do_not() {
        both(|cast, world| {
            let asked = packet(cast.world, cast.pod, 5000, 8080).arriving();
            let reply = packet(cast.pod, cast.world, 8080, 5000);
            let seen = || world.inbound_at(&asked.tuple.reversed()).map(|inbound| inbound.last_seen_ns);
            let begun = world.now.get();
            assert_eq!(notice(&asked, world), Verdict::InboundRemembered);
            world.now.set(begun + 200_000_000_000);
            let verdict = steer(&mut reply.heads(), world, &world.config.get());
            assert_eq!(verdict, Steer::Done(Verdict::InboundReply));
            assert_eq!(seen(), Some(begun), "who goes on sending unasked answers nobody some day");
            assert_eq!(notice(&asked, world), Verdict::NotOurs);
            assert_eq!(seen(), Some(begun + 200_000_000_000));
        });
    }

    #[test]
    fn the_end_of_a_pods_own_flow_is_noted() {
        both(|cast, world| {
            let own = |flags| packet(cast.pod, cast.world, 4000, 443).tcp(flags);
            let answer = |flags| packet(cast.world, cast.pod, 443, 4000).tcp(flags).arriving();
            let phase = || phase::of_flow(world.flow_at(&own(0).heads().tuple).expect("a flow").state);
            let config = world.config.get();
            for flags in [tcp::SYN, tcp::ACK, tcp::FIN | tcp::ACK] {
                steer(&mut own(flags).heads(), world, &config);
                assert_eq!(notice(&answer(tcp::ACK), world), Verdict::NotOurs);
            }
            assert_eq!(phase(), phase::Phase::Established, "the server may go on");
            assert_eq!(notice(&answer(tcp::FIN | tcp::ACK), world), Verdict::NotOurs);
            assert_eq!(phase(), phase::Phase::Closing);
            steer(&mut own(tcp::SYN).heads(), world, &config);
            assert_eq!(phase(), phase::Phase::Opening, "used again");
        });
    }

    #[test]
    fn pods_that_nothing_selects_cannot_take_the_room_of_those_that_something_does() {
        both(|cast, world| {
            let mut config = world.config.get();
            config.inbound_shared = 3;
            world.limit_inbound(4);
            let syn = |pod, port| packet(cast.world, pod, port, 4000).tcp(tcp::SYN).arriving();
            for port in 1..=3 {
                let verdict = super::notice(&syn(cast.known_pod, port), world, &config);
                assert_eq!(verdict, Verdict::InboundRemembered);
            }
            assert_eq!(super::notice(&syn(cast.known_pod, 4), world, &config), Verdict::InboundRefused);
            assert_eq!(super::notice(&syn(cast.known_pod, 3), world, &config), Verdict::NotOurs, "it is there");
            assert_eq!(super::notice(&syn(cast.pod, 1), world, &config), Verdict::InboundRemembered);
            assert_eq!(super::notice(&syn(cast.pod, 2), world, &config), Verdict::InboundRefused);
        });
    }

    #[test]
    fn datagrams_of_a_pod_that_is_not_known_yet_are_followed() {
        both(|cast, world| {
            let config = world.config.get().with_on_unknown_pod(OnUnknownPod::Pass);
            let own = packet(cast.unknown_pod, cast.world, 4000, 53);
            let verdict = steer(&mut own.heads(), world, &config);
            assert_eq!(verdict, Steer::Done(Verdict::UnknownPodPassed));
            world.add_pod(cast.unknown_pod, PodEntry::selected(ID, world.now.get()));
            let answer = packet(cast.world, cast.unknown_pod, 53, 4000).arriving();
            assert_eq!(super::notice(&answer, world, &config), Verdict::NotOurs, "the pod began it");
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
