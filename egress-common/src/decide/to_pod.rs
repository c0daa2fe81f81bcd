//! `to_pod`: the management port, TC egress. Packets from the host to pods of this node.
//!
//! An inbound connection must be answered on the same path, so it is recorded, on evidence:
//! - A SYN, or an INIT of SCTP, counts on any port; its answer leaves the uplink only if the port is exposed
//!   ([`may_be_called`]).
//! - A datagram counts if its port is exposed (`exposed`) and it answers no datagram of the pod (`datagrams`, `flows`).
//! - Every packet of another node's own address counts, unless a local pod sent it ([`is_forged`]), and with
//!   `Config::direct_routing` every packet.
//!
//! The map never evicts a live connection ([`phase`]); its free part is shared by [`has_capacity`]. A packet that a
//! selected pod would answer without an entry is dropped, because the answer would get the egress IP.

use super::phase;
use super::{ClaimOutcome, Tables};
use crate::abi::{Config, ExposedPort, NodePlace, PrefixKind, Tuple, Verdict};
use crate::wire::{Headers, L4, sctp, tcp};

/// Startup period: until then a datagram may answer one that the programs have not seen; a ping answers none.
pub const SETTLE_NS: u64 = 30_000_000_000;

#[inline(always)]
pub fn decide<T: Tables>(headers: &Headers, tables: &T, config: &Config) -> Verdict {
    let Some(pod) = tables.pod(&headers.tuple.daddr) else { return Verdict::NotPod };
    let is_selected = pod.is_selected();
    let answer = headers.tuple.reversed();
    // Whether the packet itself shows that it begins a connection.
    let begins = match headers.l4 {
        L4::Tcp if phase::is_first(headers.tcp_flags) => true,
        L4::Tcp => {
            // For a selected pod, `from_pod` tracks the rest by the pod's own packets, which cannot be forged from
            // outside.
            let ends = headers.tcp_flags & (tcp::FIN | tcp::RST) != 0;
            if ends || !is_selected {
                tables.inbound_seen(&answer, headers.for_pod());
            }
            return Verdict::NotOurs;
        }
        L4::Sctp if headers.sctp_chunk == sctp::INIT => true,
        // Never an answer, unlike other datagrams.
        L4::EchoRequest => false,
        l4 if l4.begins_anywhere() => {
            let since_ns = u64::from(config.following_since_secs) * 1_000_000_000;
            if tables.now_ns().saturating_sub(since_ns) <= SETTLE_NS {
                return Verdict::NotOurs;
            }
            false
        }
        _ => return Verdict::NotOurs,
    };
    // It is no answer, even if the pod pings its sender with the same identifier.
    let is_ping = headers.l4 == L4::EchoRequest;
    // Checked first, because it applies to most datagrams. A SYN on the tuple of a flow of the pod begins nothing
    // either.
    if !is_ping && tables.flow_peek(&answer).is_some() {
        return Verdict::NotOurs;
    }
    // Another node's own address counts as outside: the answer must not be marked 1008, which would change its source.
    // So does an egress IP: another selected pod may connect by an external load balancer that keeps the client's
    // address.
    let place = tables.node(&headers.tuple.saddr).map(|node| node.place());
    let from_cluster =
        tables.prefix(&headers.tuple.saddr).is_some_and(|prefix| prefix.kind() != Some(PrefixKind::EgressIp));
    if place == Some(NodePlace::Own) || from_cluster {
        return Verdict::NotOurs;
    }
    if tables.inbound_seen(&answer, headers.for_pod()) {
        return Verdict::NotOurs;
    }
    let exposure = tables.exposure(&ExposedPort::of(&answer));
    let has_evidence = exposure.is_some() || place.is_some() || config.direct_routing != 0;
    if !begins && !has_evidence {
        return Verdict::NotOurs;
    }
    if headers.l4 != L4::Tcp && !is_ping && tables.datagram_seen(&answer) {
        return Verdict::NotOurs;
    }
    let has_capacity = has_capacity(tables.inbound_in_use(), exposure, is_selected, config.inbound_size);
    let claim = if has_capacity { tables.claim_inbound(&answer) } else { ClaimOutcome::Full };
    match claim {
        ClaimOutcome::Claimed => Verdict::InboundRemembered,
        ClaimOutcome::Taken => Verdict::NotOurs,
        ClaimOutcome::Full if is_selected => Verdict::InboundFull,
        ClaimOutcome::Full => Verdict::InboundRefused,
    }
}

/// Whether a pod of this node has forged the source of the packet: another node does not send by the management port.
#[inline(always)]
pub fn is_forged<T: Tables>(headers: &Headers, tables: &T) -> bool {
    tables.node(&headers.tuple.saddr).is_some_and(|node| node.place() == NodePlace::Other)
}

/// Whether a map of `size` may get one more entry; `exposure` is the port's number of entries, if it is exposed.
#[inline(always)]
const fn has_capacity(in_use: u32, exposure: Option<u32>, is_selected: bool, size: u32) -> bool {
    // A share of the free part: with shares of the whole, a flood at a few ports would fill the map.
    let share = size.saturating_sub(in_use).div_ceil(4);
    let has_share = match exposure {
        Some(of_port) => in_use < size / 2 || of_port < share,
        None => in_use < size / 2,
    };
    // An unselected pod may never need its entry.
    has_share && (is_selected || in_use < size - size / 4)
}

/// Whether hosts outside may connect to the address and port that this packet of a pod comes from.
#[inline(always)]
pub fn may_be_called<T: Tables>(answer: &Tuple, tables: &T, config: &Config) -> bool {
    config.direct_routing != 0
        || tables.exposure(&ExposedPort::of(answer)).is_some()
        || tables.node(&answer.daddr).is_some()
}

/// Records a datagram of an unselected or unknown pod, so that its answer is no inbound connection if the pod is
/// selected later.
#[inline(always)]
pub fn follow_datagram<T: Tables>(headers: &Headers, tables: &T, config: &Config) {
    let is_datagram = headers.l4.begins_anywhere() && headers.has_l4();
    // For most ports no answer would count. Cluster traffic, mostly DNS, is never checked.
    if is_datagram
        && may_be_called(&headers.tuple, tables, config)
        && tables.prefix(&headers.tuple.daddr).is_none()
        && !tables.inbound_known(&headers.tuple)
    {
        tables.note_datagram(&headers.tuple);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::{OnUnknownPod, PodEntry, WhenEmpty};
    use crate::decide::cast::{Cast, ID, UPLINK, both};
    use crate::decide::from_pod::{self, FromPod};
    use crate::decide::memory_maps::{MemoryMaps, addr};
    use crate::decide::packets::packet;
    use crate::decide::to_netdev;
    use crate::wire::{Headers, Quote};

    fn from_pod<'t>(headers: &mut Headers, maps: &'t MemoryMaps, config: &Config) -> FromPod<'t> {
        from_pod::decide(headers, &Quote::NONE, maps, config)
    }

    fn to_pod(headers: &Headers, maps: &MemoryMaps) -> Verdict {
        super::decide(headers, maps, &maps.config.get())
    }

    #[test]
    fn an_inbound_connection_is_remembered_once() {
        both(|cast, maps| {
            for pod in [cast.pod, cast.known_pod] {
                let syn = packet(cast.world, pod, 80, 4000).tcp(tcp::SYN).arriving();
                assert_eq!(to_pod(&syn, maps), Verdict::InboundRemembered, "also before anything selects the pod");
                assert_eq!(to_pod(&syn, maps), Verdict::NotOurs);
            }
            assert_eq!(maps.inbound_len(), 2);
            for flags in [tcp::ACK, tcp::SYN | tcp::ACK, tcp::RST, tcp::FIN | tcp::ACK] {
                let other = packet(cast.world, cast.pod, 81, 4000).tcp(flags).arriving();
                assert_eq!(to_pod(&other, maps), Verdict::NotOurs, "only a first packet begins one");
            }
        });
    }

    #[test]
    fn only_packets_from_outside_to_local_pods() {
        both(|cast, maps| {
            let syn = |from, to| packet(from, to, 80, 4000).tcp(tcp::SYN).arriving();
            assert_eq!(to_pod(&syn(cast.world, cast.unknown_pod), maps), Verdict::NotPod);
            assert_eq!(to_pod(&syn(cast.world, cast.remote_pod), maps), Verdict::NotPod);
            for from in [cast.node, cast.mgmt, cast.remote_pod, cast.service] {
                assert_eq!(to_pod(&syn(from, cast.pod), maps), Verdict::NotOurs, "{from}");
            }
            assert_eq!(maps.inbound_len(), 0);
        });
    }

    #[test]
    fn datagrams_count_after_the_startup_period() {
        both(|cast, maps| {
            let now = maps.now.get();
            let datagrams: [Headers; 2] = [
                packet(cast.world, cast.pod, 80, 4000).arriving(),
                packet(cast.world, cast.known_pod, 80, 4000).protocol(47).arriving(),
            ];
            let mut config = maps.config.get();
            for headers in &datagrams {
                for since_ns in [now, now - SETTLE_NS, now + 1_000_000_000] {
                    config.following_since_secs = (since_ns / 1_000_000_000) as u32;
                    let verdict = super::decide(headers, maps, &config);
                    assert_eq!(verdict, Verdict::NotOurs, "it may answer what the pod sent before");
                }
                config.following_since_secs = ((now - SETTLE_NS) / 1_000_000_000) as u32 - 1;
                assert_eq!(super::decide(headers, maps, &config), Verdict::InboundRemembered);
            }
        });
    }

    #[test]
    fn a_ping_counts_during_the_startup_period() {
        both(|cast, maps| {
            let mut config = maps.config.get();
            config.following_since_secs = (maps.now.get() / 1_000_000_000) as u32;
            for (pod, id) in [(cast.pod, 9), (cast.known_pod, 10)] {
                let ping = packet(cast.world, pod, 0, 0).echo(id).arriving();
                assert_eq!(super::decide(&ping, maps, &config), Verdict::InboundRemembered);
            }
        });
    }

    #[test]
    fn a_ping_counts_despite_a_pod_query_with_the_same_identifier() {
        both(|cast, maps| {
            let config = maps.config.get();
            let query = packet(cast.pod, cast.world, 0, 0).echo(9);
            assert!(matches!(from_pod(&mut query.headers(), maps, &config), FromPod::Send { .. }));
            let ping = packet(cast.world, cast.pod, 0, 0).echo(9).arriving();
            assert_eq!(to_pod(&ping, maps), Verdict::InboundRemembered);
            assert!(matches!(from_pod(&mut query.headers(), maps, &config), FromPod::Send { .. }), "a flow as before");
        });
    }

    #[test]
    fn selection_confuses_no_inbound_with_outbound_datagrams() {
        both(|cast, maps| {
            let pod = cast.known_pod;
            let own = packet(pod, cast.world, 4000, 53);
            from_pod(&mut own.headers(), maps, &maps.config.get());
            let asked = packet(cast.world, pod, 5000, 8080).arriving();
            assert_eq!(to_pod(&asked, maps), Verdict::InboundRemembered);
            maps.add_pod(pod, PodEntry::selected(ID, maps.now.get()));
            let answer = packet(cast.world, pod, 53, 4000).arriving();
            assert_eq!(to_pod(&answer, maps), Verdict::NotOurs, "the pod began it");
            let reply = packet(pod, cast.world, 8080, 5000);
            let verdict = from_pod(&mut reply.headers(), maps, &maps.config.get());
            assert_eq!(verdict, FromPod::Done(Verdict::InboundReply));
            assert!(matches!(from_pod(&mut own.headers(), maps, &maps.config.get()), FromPod::Send { .. }));
        });
    }

    #[test]
    fn another_node_and_a_pod_may_connect_both_ways() {
        both(|cast, maps| {
            let config = maps.config.get();
            let syn = packet(cast.other_node, cast.pod, 50_000, 8443).tcp(tcp::SYN).arriving();
            assert_eq!(to_pod(&syn, maps), Verdict::InboundRemembered);
            let data = packet(cast.pod, cast.other_node, 8443, 50_000).tcp(tcp::ACK);
            assert_eq!(from_pod(&mut data.headers(), maps, &config), FromPod::Done(Verdict::InboundReply));
            let asked = packet(cast.pod, cast.other_node, 4000, 53);
            assert_eq!(from_pod(&mut asked.headers(), maps, &config), FromPod::Mark);
            let answer = packet(cast.other_node, cast.pod, 53, 4000).arriving();
            assert_eq!(to_pod(&answer, maps), Verdict::NotOurs);
            assert_eq!(from_pod(&mut asked.headers(), maps, &config), FromPod::Mark);
        });
    }

    /// An external load balancer that keeps the client's address shows the egress IP of the calling pod.
    #[test]
    fn a_selected_pod_may_reach_another_by_an_external_load_balancer() {
        both(|cast, maps| {
            let config = maps.config.get();
            for client in [cast.egress, cast.foreign_egress] {
                let syn = packet(client, cast.pod, 50_000, 8443).tcp(tcp::SYN).arriving();
                assert_eq!(to_pod(&syn, maps), Verdict::InboundRemembered);
                for flags in [tcp::SYN | tcp::ACK, tcp::ACK, tcp::FIN | tcp::ACK] {
                    let answer = packet(cast.pod, client, 8443, 50_000).tcp(flags);
                    let decided = from_pod(&mut answer.headers(), maps, &config);
                    assert_eq!(decided, FromPod::Done(Verdict::InboundReply), "{client} {flags}");
                }
                let own = packet(cast.pod, client, 8443, 50_001).tcp(tcp::SYN);
                assert_eq!(
                    from_pod(&mut own.headers(), maps, &config),
                    FromPod::Hairpin,
                    "what the pod begins is none"
                );
            }
        });
    }

    #[test]
    fn answers_to_datagrams_with_the_node_address_are_not_inbound() {
        both(|cast, maps| {
            maps.set_policy(ID, WhenEmpty::NodeAddress, &[]);
            let asked = packet(cast.pod, cast.world, 4000, 53);
            let given = FromPod::Done(Verdict::NodeAddress);
            assert_eq!(from_pod(&mut asked.headers(), maps, &maps.config.get()), given);
            let answer = packet(cast.world, cast.pod, 53, 4000).arriving();
            assert_eq!(to_pod(&answer, maps), Verdict::NotOurs);
            assert_eq!(from_pod(&mut asked.headers(), maps, &maps.config.get()), given);
        });
    }

    #[test]
    fn a_syn_on_the_tuple_of_a_pods_flow_begins_nothing() {
        both(|cast, maps| {
            let own = packet(cast.pod, cast.world, 4000, 443);
            from_pod(&mut own.clone().tcp(tcp::SYN).headers(), maps, &maps.config.get());
            let syn = packet(cast.world, cast.pod, 443, 4000).tcp(tcp::SYN).arriving();
            assert_eq!(to_pod(&syn, maps), Verdict::NotOurs, "the server would unmask the node");
            let data = own.tcp(tcp::ACK);
            assert!(matches!(from_pod(&mut data.headers(), maps, &maps.config.get()), FromPod::Send { .. }));
        });
    }

    #[test]
    fn a_late_answer_to_a_reset_flow_is_not_inbound() {
        both(|cast, maps| {
            let request = packet(cast.pod, cast.world, 4000, 53);
            from_pod(&mut request.headers(), maps, &maps.config.get());
            maps.cut_flows();
            assert_eq!(to_pod(&packet(cast.world, cast.pod, 53, 4000).arriving(), maps), Verdict::NotOurs);
        });
    }

    #[test]
    fn an_answer_to_a_pods_flow_is_not_inbound() {
        both(|cast, maps| {
            for request in [packet(cast.pod, cast.world, 4000, 53), packet(cast.pod, cast.world, 0, 0).echo(9)] {
                from_pod(&mut request.headers(), maps, &maps.config.get());
            }
            assert_eq!(maps.flows_len(), 2);
            let answer = packet(cast.world, cast.pod, 53, 4000).arriving();
            assert_eq!(to_pod(&answer, maps), Verdict::NotOurs);
            let pong = packet(cast.world, cast.pod, 0, 0).echo_reply(9).arriving();
            assert_eq!(to_pod(&pong, maps), Verdict::NotOurs);
            assert_eq!(maps.inbound_len(), 0);
            let foreign = packet(cast.world, cast.pod, 53, 4001).arriving();
            assert_eq!(to_pod(&foreign, maps), Verdict::InboundRemembered, "no flow of the pod's");
        });
    }

    /// The `inbound` entry of the connection with this packet from outside.
    fn phase_of(maps: &MemoryMaps, arriving: &Headers) -> phase::Phase {
        let inbound = maps.inbound_at(&arriving.tuple.reversed()).expect("remembered");
        phase::inbound(&inbound)
    }

    #[test]
    fn a_connection_to_an_unselected_pod_is_tracked() {
        both(|cast, maps| {
            let arriving = |flags| packet(cast.world, cast.known_pod, 80, 4000).tcp(flags).arriving();
            let begun = maps.now.get();
            let seen = || maps.inbound_at(&arriving(0).tuple.reversed()).map(|inbound| inbound.last_seen_ns);
            assert_eq!(to_pod(&arriving(tcp::SYN), maps), Verdict::InboundRemembered);
            assert_eq!(phase_of(maps, &arriving(0)), phase::Phase::Opening, "a flood of SYNs does not stay long");
            assert_eq!(to_pod(&arriving(tcp::ACK), maps), Verdict::NotOurs);
            maps.now.set(begun + 7_000_000_000_000);
            assert_eq!(to_pod(&arriving(tcp::ACK), maps), Verdict::NotOurs);
            assert_eq!(seen(), Some(maps.now.get()), "a long connection is kept");
            assert_eq!(phase_of(maps, &arriving(0)), phase::Phase::Established);
            maps.add_pod(cast.known_pod, PodEntry::selected(ID, maps.now.get()));
            let answer = packet(cast.known_pod, cast.world, 4000, 80).tcp(tcp::ACK);
            let verdict = from_pod(&mut answer.headers(), maps, &maps.config.get());
            assert_eq!(verdict, FromPod::Done(Verdict::InboundReply), "and found when the pod is selected");
        });
    }

    #[test]
    fn a_connection_to_a_selected_pod_is_tracked_to_its_end() {
        both(|cast, maps| {
            let arriving = |flags| packet(cast.world, cast.pod, 80, 4000).tcp(flags).arriving();
            let answers = |flags| {
                let answer = packet(cast.pod, cast.world, 4000, 80).tcp(flags);
                let verdict = from_pod(&mut answer.headers(), maps, &maps.config.get());
                assert_eq!(verdict, FromPod::Done(Verdict::InboundReply));
            };
            to_pod(&arriving(tcp::SYN), maps);
            answers(tcp::SYN | tcp::ACK);
            assert_eq!(phase_of(maps, &arriving(0)), phase::Phase::Opening);
            answers(tcp::ACK);
            assert_eq!(phase_of(maps, &arriving(0)), phase::Phase::Established);
            assert_eq!(to_pod(&arriving(tcp::RST), maps), Verdict::NotOurs);
            assert_eq!(phase_of(maps, &arriving(0)), phase::Phase::Closing);
            answers(tcp::ACK);
            assert_eq!(phase_of(maps, &arriving(0)), phase::Phase::Established, "perhaps forged");
            to_pod(&arriving(tcp::FIN | tcp::ACK), maps);
            answers(tcp::FIN | tcp::ACK);
            assert_eq!(phase_of(maps, &arriving(0)), phase::Phase::Closing);
            assert_eq!(to_pod(&arriving(tcp::SYN), maps), Verdict::NotOurs, "the entry is there already");
            assert_eq!(phase_of(maps, &arriving(0)), phase::Phase::Opening, "used again");
        });
    }

    #[test]
    fn inbound_datagrams_refresh_their_entry_and_outbound_ones_do_not() {
        both(|cast, maps| {
            let asked = packet(cast.world, cast.pod, 5000, 8080).arriving();
            let reply = packet(cast.pod, cast.world, 8080, 5000);
            let seen = || maps.inbound_at(&asked.tuple.reversed()).map(|inbound| inbound.last_seen_ns);
            let begun = maps.now.get();
            assert_eq!(to_pod(&asked, maps), Verdict::InboundRemembered);
            maps.now.set(begun + 200_000_000_000);
            let verdict = from_pod(&mut reply.headers(), maps, &maps.config.get());
            assert_eq!(verdict, FromPod::Done(Verdict::InboundReply));
            assert_eq!(seen(), Some(begun), "unanswered datagrams do not refresh the entry");
            assert_eq!(to_pod(&asked, maps), Verdict::NotOurs);
            assert_eq!(seen(), Some(begun + 200_000_000_000));
        });
    }

    /// Exposes ports of a pod, for TCP and UDP.
    fn expose(maps: &MemoryMaps, pod: &str, ports: &[u16]) {
        for (protocol, port) in ports.iter().flat_map(|port| [(6, *port), (17, *port), (132, *port)]) {
            maps.exposed.borrow_mut().insert(ExposedPort::new(addr(pod), protocol, port), 0);
        }
    }

    /// Maps under which no host outside reaches pods by their own addresses.
    fn without_direct_routing(body: impl Fn(&Cast, &MemoryMaps)) {
        both(|cast, maps| {
            maps.configure(|config| config.direct_routing = 0);
            body(cast, maps);
        });
    }

    #[test]
    fn a_datagram_counts_only_at_an_exposed_port() {
        without_direct_routing(|cast, maps| {
            expose(maps, cast.pod, &[5060]);
            let config = maps.config.get();
            let udp = |to, port| packet(cast.world, to, 9999, port).arriving();
            for other in [udp(cast.pod, 5560), udp(cast.known_pod, 5060)] {
                assert_eq!(to_pod(&other, maps), Verdict::NotOurs, "the pod's own traffic");
            }
            for portless in [
                packet(cast.world, cast.pod, 0, 0).echo(9),
                packet(cast.world, cast.pod, 0, 0).protocol(47),
                packet(cast.world, cast.pod, 9999, 5560).sctp(0),
            ] {
                assert_eq!(to_pod(&portless.arriving(), maps), Verdict::NotOurs, "{portless:?}");
            }
            assert_eq!(maps.inbound_len(), 0);
            // Packets that the pod itself sends from that port get the egress IP.
            let own = packet(cast.pod, cast.world, 5560, 9999);
            assert!(matches!(from_pod(&mut own.headers(), maps, &config), FromPod::Send { .. }));
            assert_eq!(to_pod(&udp(cast.pod, 5060), maps), Verdict::InboundRemembered);
            let answer = packet(cast.pod, cast.world, 5060, 9999);
            assert_eq!(from_pod(&mut answer.headers(), maps, &config), FromPod::Done(Verdict::InboundReply));
        });
    }

    #[test]
    fn packets_of_another_node_count_at_every_port() {
        without_direct_routing(|cast, maps| {
            for asked in [packet(cast.other_node, cast.pod, 5000, 53), packet(cast.other_node, cast.pod, 0, 0).echo(9)]
            {
                assert_eq!(to_pod(&asked.arriving(), maps), Verdict::InboundRemembered, "{asked:?}");
            }
        });
    }

    #[test]
    fn a_connection_is_remembered_at_every_port_and_answers_leave_only_at_exposed_ports() {
        without_direct_routing(|cast, maps| {
            expose(maps, cast.pod, &[443]);
            let config = maps.config.get();
            for (port, leaves) in [(443, Verdict::InboundReply), (80, Verdict::ProgramBypassed)] {
                let syn = packet(cast.world, cast.pod, 5000, port).tcp(tcp::SYN).arriving();
                assert_eq!(to_pod(&syn, maps), Verdict::InboundRemembered);
                let answer = packet(cast.pod, cast.world, port, 5000).tcp(tcp::ACK);
                assert_eq!(from_pod(&mut answer.headers(), maps, &config), FromPod::Done(Verdict::InboundReply));
                let meta = to_netdev::Meta { mark: 0, ifindex: UPLINK, forwarded: true, returning: false };
                let left = to_netdev::decide(&mut answer.headers(), &Quote::NONE, &meta, maps, &config);
                assert_eq!(left, to_netdev::ToNetdev::Done(leaves), "{port}");
            }
        });
    }

    #[test]
    fn an_association_begins_with_init() {
        without_direct_routing(|cast, maps| {
            let init = packet(cast.world, cast.pod, 5000, 36412).sctp(sctp::INIT);
            assert_eq!(to_pod(&init.arriving(), maps), Verdict::InboundRemembered, "at every port, as a SYN");
            let data = packet(cast.world, cast.known_pod, 5000, 36412).sctp(0);
            assert_eq!(to_pod(&data.arriving(), maps), Verdict::NotOurs);
            expose(maps, cast.known_pod, &[36412]);
            assert_eq!(to_pod(&data.arriving(), maps), Verdict::InboundRemembered);
        });
    }

    #[test]
    fn unselected_pods_cannot_fill_the_map_for_selected_pods() {
        both(|cast, maps| {
            maps.configure(|config| config.inbound_size = 16);
            maps.limit_inbound(16);
            (1..=16).for_each(|port| {
                expose(maps, cast.known_pod, &[port]);
                expose(maps, cast.pod, &[port]);
            });
            let syn = |pod, port| packet(cast.world, pod, 4000, port).tcp(tcp::SYN).arriving();
            for port in 1..=12 {
                assert_eq!(to_pod(&syn(cast.known_pod, port), maps), Verdict::InboundRemembered);
            }
            assert_eq!(to_pod(&syn(cast.known_pod, 13), maps), Verdict::InboundRefused);
            assert_eq!(to_pod(&syn(cast.known_pod, 3), maps), Verdict::NotOurs, "it is there");
            for port in 1..=4 {
                assert_eq!(to_pod(&syn(cast.pod, port), maps), Verdict::InboundRemembered);
            }
            assert_eq!(to_pod(&syn(cast.pod, 5), maps), Verdict::InboundFull);
        });
    }

    /// For any number of flooded ports.
    #[test]
    fn floods_at_many_ports_leave_entries_for_another_port() {
        const SIZE: u32 = 65_536;
        for ports in [1, 4, 5, 8, 64, 1024] {
            let mut of_ports = std::vec![0; ports];
            let mut in_use = 0;
            let mut goes_on = true;
            while goes_on {
                goes_on = false;
                for of_port in &mut of_ports {
                    if has_capacity(in_use, Some(*of_port), true, SIZE) {
                        *of_port += 1;
                        in_use += 1;
                        goes_on = true;
                    }
                }
            }
            let free = SIZE - in_use;
            assert!(has_capacity(in_use, Some(0), true, SIZE), "{ports} ports leave {free}");
        }
    }

    #[test]
    fn a_flood_at_one_port_leaves_entries_for_other_ports() {
        both(|cast, maps| {
            maps.configure(|config| config.inbound_size = 64);
            maps.limit_inbound(64);
            expose(maps, cast.pod, &[80, 443]);
            let mut flood = (1..=64).map(|from| packet(cast.world, cast.pod, from, 80).tcp(tcp::SYN).arriving());
            assert!(flood.by_ref().take(32).all(|syn| to_pod(&syn, maps) == Verdict::InboundRemembered));
            assert!(flood.all(|syn| to_pod(&syn, maps) == Verdict::InboundFull), "half of the map is in use");
            let syn = |from, port| packet(cast.world, cast.pod, from, port).tcp(tcp::SYN).arriving();
            assert_eq!(to_pod(&syn(1, 81), maps), Verdict::InboundFull, "which nothing exposes");
            for from in 1..=7 {
                assert_eq!(to_pod(&syn(from, 443), maps), Verdict::InboundRemembered);
            }
            assert_eq!(to_pod(&syn(9, 443), maps), Verdict::InboundFull, "a quarter of what is free");
            maps.now.set(maps.now.get() + 11_000_000_000);
            maps.sweep(false);
            assert_eq!(to_pod(&syn(9, 443), maps), Verdict::InboundRemembered, "unanswered");
        });
    }

    #[test]
    fn datagrams_of_an_unknown_pod_are_tracked() {
        both(|cast, maps| {
            let config = maps.config.get().with_on_unknown_pod(OnUnknownPod::Pass);
            let own = packet(cast.unknown_pod, cast.world, 4000, 53);
            let verdict = from_pod(&mut own.headers(), maps, &config);
            assert_eq!(verdict, FromPod::Done(Verdict::UnknownPodPassed));
            maps.add_pod(cast.unknown_pod, PodEntry::selected(ID, maps.now.get()));
            let answer = packet(cast.world, cast.unknown_pod, 53, 4000).arriving();
            assert_eq!(super::decide(&answer, maps, &config), Verdict::NotOurs, "the pod began it");
        });
    }

    #[test]
    fn a_full_map_has_a_reason_and_translates_no_answer() {
        both(|cast, maps| {
            maps.limit_inbound(1);
            let syn = |port| packet(cast.world, cast.pod, port, 4000).tcp(tcp::SYN).arriving();
            assert_eq!(to_pod(&syn(1), maps), Verdict::InboundRemembered);
            assert_eq!(to_pod(&syn(2), maps), Verdict::InboundFull);
            assert_eq!(to_pod(&syn(1), maps), Verdict::NotOurs);
        });
    }
}
