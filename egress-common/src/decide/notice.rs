//! `notice`: the management port, TC egress. What the host sends to pods of this node.
//!
//! A connection that came in from outside must be answered by the way it came, whatever the policy says, so it is
//! remembered here. TCP shows its first packet; for datagrams the first one seen counts, unless it answers a flow of the
//! pod. Replies that we redirect to this port answer such flows, so they are never taken for connections from outside.

use super::{Claim, Tables};
use crate::abi::Verdict;
use crate::wire::{Heads, L4, tcp};

/// Datagrams within this time after the pod became selected may answer what it sent before; they are not remembered.
pub const SETTLE_NS: u64 = 30_000_000_000;

#[inline(always)]
pub fn notice<T: Tables>(heads: &Heads, tables: &T) -> Verdict {
    let Some(pod) = tables.pod(&heads.tuple.daddr) else {
        return Verdict::NotPod;
    };
    let begins = match heads.l4 {
        L4::Tcp => heads.tcp_flags & (tcp::SYN | tcp::ACK) == tcp::SYN,
        L4::Udp | L4::EchoRequest => {
            pod.egress_id().is_some() && tables.now_ns().saturating_sub(pod.selected_since_ns) > SETTLE_NS
        }
        _ => false,
    };
    if !begins || tables.node(&heads.tuple.saddr).is_some() || tables.prefix(&heads.tuple.saddr).is_some() {
        return Verdict::NotOurs;
    }
    let answer = heads.tuple.reversed();
    if heads.l4 != L4::Tcp && tables.flow_seen(&answer, 0).is_some() {
        return Verdict::NotOurs;
    }
    match tables.claim_inbound(&answer) {
        Claim::Claimed => Verdict::InboundRemembered,
        Claim::Taken => Verdict::NotOurs,
        Claim::Full => Verdict::InboundRefused,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::PodEntry;
    use crate::decide::cast::{ID, both};
    use crate::decide::packets::packet;
    use crate::decide::steer::steer;
    use crate::decide::world::World;
    use crate::wire::Heads;

    fn select_at(world: &World, pod: &str, ns: u64) {
        world.add_pod(pod, PodEntry::selected(ID, ns));
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
            for from in [cast.node, cast.mgmt, cast.other_node, cast.remote_pod, cast.service, cast.egress] {
                assert_eq!(notice(&syn(from, cast.pod), world), Verdict::NotOurs, "{from}");
            }
            assert_eq!(world.inbound_len(), 0);
        });
    }

    #[test]
    fn datagrams_count_once_the_pod_has_settled() {
        both(|cast, world| {
            let now = world.now.get();
            let datagrams: [Heads; 2] = [
                packet(cast.world, cast.pod, 80, 4000).arriving(),
                packet(cast.world, cast.pod, 0, 0).echo(9).arriving(),
            ];
            for heads in &datagrams {
                for since in [now, now - SETTLE_NS, now + 1] {
                    select_at(world, cast.pod, since);
                    assert_eq!(notice(heads, world), Verdict::NotOurs, "it may answer what the pod sent before");
                }
                select_at(world, cast.pod, now - SETTLE_NS - 1);
                assert_eq!(notice(heads, world), Verdict::InboundRemembered);
            }
            let unselected = packet(cast.world, cast.known_pod, 80, 4000).arriving();
            assert_eq!(notice(&unselected, world), Verdict::NotOurs, "nobody will ask");
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
