//! `to_netdev`: the uplink and the further egress interfaces, TC egress. Guard of all packets that leave, and SNAT of packets with the mark.
//!
//! Packets that a program of this node redirected are recognised by their priority (`Config::redirected`) before this
//! decision. So a forwarded packet with an egress IP as its source got it from a pod or a rule of the host, and not
//! from NAT.

use super::from_pod::{self, FromPod};
use super::snat::{self, SnatSource};
use super::{NatOwner, Tables, fragments, from_netdev, slots, to_pod};
use crate::abi::{Addr, Class, Config, Family, NatEntry, Origin, OwnedAddr, PrefixKind, Verdict, has_node_mark};
use crate::wire::{Headers, L4, Quote};

/// Metadata of the skb.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Meta {
    pub mark: u32,
    /// The interface that it is about to leave by.
    pub ifindex: u32,
    /// Came in by a device of this node, so it is forwarded. The kernel clears this when a tunnel device encapsulates.
    pub forwarded: bool,
    /// Came in by the device that it is about to leave by.
    pub returning: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToNetdev {
    Done(Verdict),
    /// Clear the mark and leave it alone: the stack has translated it already.
    Unmark,
    /// Give it the node's address ([`translate`]) and clear the mark.
    NodeSnat,
}

/// Whether a packet from this address, of the node itself or of the network, is to be dropped because this node owns the
/// address on another interface. [`decide`] drops a forwarded one with an egress IP, whatever the interface.
///
/// Asked before [`decide`], by a function of its own, because the program has little stack.
#[inline(always)]
pub fn is_misdirected<T: Tables>(source: &Addr, meta: &Meta, tables: &T, config: &Config) -> bool {
    (!meta.forwarded || meta.returning)
        && config.owned.may_contain(source)
        && tables.owned_addr(source).is_some_and(|owned| owned.is_elsewhere(meta.ifindex))
}

/// The rest of the guard, after [`is_misdirected`].
#[inline(always)]
pub fn decide<T: Tables>(headers: &mut Headers, quote: &Quote, meta: &Meta, tables: &T, config: &Config) -> ToNetdev {
    if meta.forwarded && headers.may_be_udp_to(config.tunnel_port) && tables.node(&headers.tuple.daddr).is_some() {
        return ToNetdev::Done(Verdict::ForgedTunnel);
    }
    // To an egress IP that this node does not own: nodes without it would forward the packet in a loop. A locally
    // delivered packet does not reach this hook.
    if meta.returning && is_egress_ip(&headers.tuple.daddr, tables) {
        return ToNetdev::Done(Verdict::NotGateway);
    }
    // Of this node or another one. A packet that came in by the uplink belongs to the network.
    if meta.forwarded && !meta.returning && is_egress_ip(&headers.tuple.saddr, tables) {
        return ToNetdev::Done(Verdict::SpoofedEgressIp);
    }
    if meta.forwarded && matches_a_foreign_nat_entry(headers, meta.ifindex, tables, config) {
        return ToNetdev::Done(Verdict::PortTaken);
    }
    // Most packets are the node's own and match no pod below.
    if !has_node_mark(meta.mark) && !config.may_be_pod(&headers.tuple.saddr) {
        return ToNetdev::Done(Verdict::NotOurs);
    }
    let is_pods = tables.pod(&headers.tuple.saddr).is_some() && may_be_pods(headers, meta.forwarded, tables, config);
    if has_node_mark(meta.mark) {
        if !is_pods {
            // The mark alone does not let a pod's address leave, because any process of the host can set it.
            let verdict = guard_foreign(headers, tables, config);
            return if verdict.class() == Class::Drop { ToNetdev::Done(verdict) } else { ToNetdev::Unmark };
        }
        fragments::resolve(headers, tables);
        return ToNetdev::NodeSnat;
    }
    if is_pods {
        let verdict = guard_own(headers, quote, tables, config);
        // The stack has not translated it, as with some CNIs.
        return if verdict == Verdict::NodeAddress { ToNetdev::NodeSnat } else { ToNetdev::Done(verdict) };
    }
    ToNetdev::Done(guard_foreign(headers, tables, config))
}

/// Whether a rule of the host has masqueraded the packet to a port that NAT uses for another pod's flow to the same
/// destination. A masquerade keeps the pod's source port. Answers would go to that other flow.
///
/// Out of line, because few ports need it.
#[inline(never)]
fn matches_a_foreign_nat_entry<T: Tables>(headers: &Headers, ifindex: u32, tables: &T, config: &Config) -> bool {
    let tuple = &headers.tuple;
    let is_translated_to = || {
        tuple.saddr == node_address(ifindex, headers.family, tables, config)
            || tables.owned_addr(&tuple.saddr).is_some_and(OwnedAddr::is_hosts)
    };
    let may_be = from_netdev::is_node_port(tuple.sport(), config) && is_translated_to();
    may_be && tables.nat_peek(&snat::reverse_key(tuple, &tuple.saddr, tuple.sport())).is_some()
}

/// The address that packets marked 1008 get: the node's own on the interface that they leave by. Out of line, because the
/// caller's frame is part of the longest call chain.
#[inline(never)]
fn node_address<T: Tables>(ifindex: u32, family: Family, tables: &T, config: &Config) -> Addr {
    if ifindex == config.uplink_ifindex {
        return from_netdev::node_address(config, family);
    }
    tables.interface(ifindex).map_or(Addr::UNSPECIFIED, |addresses| addresses.of(family))
}

/// The NAT entry of a packet that gets the node's address.
#[inline(always)]
pub fn translate<'t, T: Tables>(
    headers: &Headers,
    quote: &Quote,
    ifindex: u32,
    tables: &'t T,
    config: &Config,
) -> Result<&'t NatEntry, Verdict> {
    let address = node_address(ifindex, headers.family, tables, config);
    if address == Addr::UNSPECIFIED {
        return Err(Verdict::NoNodeAddress);
    }
    let pool = SnatSource::of_node(address, config);
    // An error by the NAT entry of the quoted packet.
    if headers.l4 != L4::IcmpError || headers.source_routed {
        slots::translatable(headers)?;
    }
    let owner = NatOwner { origin: Origin::Stack, source_node: Addr::UNSPECIFIED, egress_id: 0 };
    snat::translate(headers, quote, tables, &pool, &owner)
}

/// Whether an entry of `pods` may decide about the packet. A wrong entry for an address of this node, an egress IP or
/// another node must not cut the node off: the agent could never learn to remove it.
///
/// Out of line, because packets with a pod's address are rare here: the CNI usually translates them.
#[inline(never)]
fn may_be_pods<T: Tables>(headers: &Headers, forwarded: bool, tables: &T, config: &Config) -> bool {
    let is_nodes = tables.node(&headers.tuple.saddr).is_some();
    // On a node without a subnet of the family, pods have unknown addresses.
    let may_be_anywhere = forwarded && !is_nodes;
    let Some(prefix) = tables.prefix(&headers.tuple.saddr) else { return may_be_anywhere };
    match prefix.kind() {
        // The second address of a subnet counts as the node's, but with a bridge CNI a pod may have it.
        Some(PrefixKind::PodSubnet) => prefix.node == config.self_node && (forwarded || !is_nodes),
        Some(PrefixKind::PodNetwork) => may_be_anywhere,
        _ => false,
    }
}

#[inline(always)]
fn is_egress_ip<T: Tables>(address: &Addr, tables: &T) -> bool {
    tables.prefix(address).is_some_and(|prefix| prefix.kind() == Some(PrefixKind::EgressIp))
}

/// A packet with the address of a local pod is about to leave: only packets that `from_pod` would leave alone may.
#[inline(never)]
fn guard_own<T: Tables>(headers: &mut Headers, quote: &Quote, tables: &T, config: &Config) -> Verdict {
    match from_pod::judge(headers, quote, tables, config, false) {
        // After `from_pod` the stack answers it; here the packet would leave.
        FromPod::Done(Verdict::TtlExpired) => Verdict::ProgramBypassed,
        // `from_pod` takes every SYN+ACK or echo reply for an answer, and leaves it to the stack. Here the stack has
        // already restored the source of an answer through a service. A packet that still has the pod's address must
        // answer a known inbound connection to that address.
        FromPod::Done(Verdict::InboundReply)
            if !from_pod::answers_known(headers, quote, tables) || !may_be_called(headers, quote, tables, config) =>
        {
            Verdict::ProgramBypassed
        }
        FromPod::Done(verdict) => verdict,
        FromPod::Hairpin => Verdict::Hairpin,
        FromPod::Reset(verdict) => verdict,
        FromPod::Mark | FromPod::Send { .. } => Verdict::ProgramBypassed,
    }
}

/// For an ICMP error, of the quoted packet.
#[inline(always)]
fn may_be_called<T: Tables>(headers: &Headers, quote: &Quote, tables: &T, config: &Config) -> bool {
    let answer = if headers.l4 == L4::IcmpError { quote.flow() } else { &headers.tuple };
    to_pod::may_be_called(answer, tables, config)
}

/// Any other source: the address of a remote pod must not leave, unless it stays in the cluster (a CNI that routes pods
/// without an overlay).
#[inline(never)]
fn guard_foreign<T: Tables>(headers: &Headers, tables: &T, config: &Config) -> Verdict {
    let Some(prefix) = tables.prefix(&headers.tuple.saddr) else {
        return Verdict::NotOurs;
    };
    match prefix.kind() {
        Some(PrefixKind::PodSubnet | PrefixKind::PodNetwork) => {}
        _ => return Verdict::NotOurs,
    }
    if tables.node(&headers.tuple.saddr).is_some() || tables.node(&headers.tuple.daddr).is_some() {
        return Verdict::NotOurs;
    }
    match tables.prefix(&headers.tuple.daddr) {
        Some(to) if to.kind() != Some(PrefixKind::EgressIp) => Verdict::ToCluster,
        // An address of this node's subnet without a pod: `from_pod` has decided already.
        _ if prefix.node == config.self_node => from_pod::unknown_pod(tables, config),
        _ => Verdict::ForeignPod,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::{Direction, NODE_MARK, OnUnknownPod, Owned, PodEntry, WhenEmpty};
    use crate::decide::cast::{FURTHER, ID, UPLINK, both};
    use crate::decide::memory_maps::{MemoryMaps, addr, with_node_ports};
    use crate::decide::packets::{FrameFields, packet};
    use crate::decide::to_pod;
    use crate::wire::{PROTO_AH, tcp};

    const FORWARDED: Meta = Meta { mark: 0, ifindex: UPLINK, forwarded: true, returning: false };
    const OWN: Meta = Meta { forwarded: false, ..FORWARDED };
    const MARKED: Meta = Meta { mark: NODE_MARK, ..FORWARDED };

    fn asked(maps: &MemoryMaps, meta: &Meta, packet: &FrameFields) -> ToNetdev {
        let (mut headers, config) = (packet.headers(), maps.config.get());
        if is_misdirected(&headers.tuple.saddr, meta, maps, &config) {
            return ToNetdev::Done(Verdict::WrongInterface);
        }
        decide(&mut headers, &Quote::NONE, meta, maps, &config)
    }

    fn verdict(maps: &MemoryMaps, packet: &FrameFields) -> Verdict {
        match asked(maps, &FORWARDED, packet) {
            ToNetdev::Done(verdict) => verdict,
            other => panic!("{packet:?} is not done: {other:?}"),
        }
    }

    #[test]
    fn marked_packets_of_local_pods_get_the_node_address() {
        both(|cast, maps| {
            assert_eq!(asked(maps, &MARKED, &packet(cast.pod, cast.other_node, 4000, 80)), ToNetdev::NodeSnat);
            assert_eq!(asked(maps, &MARKED, &packet(cast.node, cast.other_node, 4000, 80)), ToNetdev::Unmark);
            // The host's rules have added other bits, or set only those.
            for bits in [0x4000, 0x8000, 0x0001_0000, 0xffff_0000] {
                let marked = Meta { mark: bits | NODE_MARK, ..MARKED };
                assert_eq!(asked(maps, &marked, &packet(cast.pod, cast.other_node, 4000, 80)), ToNetdev::NodeSnat);
                let other = Meta { mark: bits | 0x80, ..MARKED };
                let verdict = asked(maps, &other, &packet(cast.pod, cast.other_node, 4000, 80));
                assert_eq!(verdict, ToNetdev::Done(Verdict::ProgramBypassed));
            }
            let config = maps.config.get();
            let headers = packet(cast.pod, cast.other_node, 4000, 80).tcp(tcp::SYN).headers();
            let nat_entry = translate(&headers, &Quote::NONE, UPLINK, maps, &config).expect("a free port");
            assert_eq!(nat_entry.other.daddr, addr(cast.node));
            assert_eq!(nat_entry.origin(), Some(Origin::Stack));
            maps.assert_paired();
        });
    }

    #[test]
    fn a_marked_packet_with_a_pod_address_does_not_leave() {
        both(|cast, maps| {
            for pod in [cast.remote_pod, cast.lost_pod] {
                let marked = packet(pod, cast.world, 4000, 80);
                assert_eq!(asked(maps, &MARKED, &marked), ToNetdev::Done(Verdict::ForeignPod), "{pod}");
            }
            let unknown = packet(cast.unknown_pod, cast.world, 4000, 80);
            assert_eq!(asked(maps, &MARKED, &unknown), ToNetdev::Done(Verdict::UnknownPod));
        });
    }

    #[test]
    fn an_error_about_an_inbound_packet_may_leave() {
        both(|cast, maps| {
            let request = packet(cast.world, cast.pod, 80, 4000).tcp(tcp::SYN);
            let error = packet(cast.pod, cast.world, 0, 0).unreachable();
            let on_error = |request: &FrameFields| {
                let quote = request.quoted(Direction::Ingress);
                decide(&mut error.headers(), &quote, &FORWARDED, maps, &maps.config.get())
            };
            assert_eq!(on_error(&request), ToNetdev::Done(Verdict::IcmpUnmatched));
            to_pod::decide(&request.arriving(), maps, &maps.config.get());
            assert_eq!(on_error(&request), ToNetdev::Done(Verdict::InboundReply));
            // A query from outside has the identifier zero, as an error's tuple has.
            let ping = packet(cast.world, cast.pod, 0, 0).echo(0);
            to_pod::decide(&ping.arriving(), maps, &maps.config.get());
            assert_eq!(on_error(&packet(cast.world, cast.pod, 81, 4000)), ToNetdev::Done(Verdict::IcmpUnmatched));
        });
    }

    #[test]
    fn a_source_routed_error_gets_no_address() {
        both(|cast, maps| {
            let config = maps.config.get();
            let sent = packet(cast.pod, cast.other_node, 4000, 80).headers();
            translate(&sent, &Quote::NONE, UPLINK, maps, &config).expect("a free port");
            let quote = packet(cast.other_node, cast.pod, 80, 4000).quoted(Direction::Ingress);
            let mut error = packet(cast.pod, cast.other_node, 0, 0).unreachable().headers();
            assert!(translate(&error, &quote, UPLINK, maps, &config).is_ok());
            error.source_routed = true;
            assert_eq!(translate(&error, &quote, UPLINK, maps, &config), Err(Verdict::SourceRouted));
        });
    }

    #[test]
    fn the_mark_without_an_address_or_a_port_is_a_drop() {
        both(|cast, maps| {
            let config = maps.config.get();
            let headers = packet(cast.pod, cast.other_node, 4000, 80).tcp(tcp::SYN).headers();
            let mut without_address = config;
            (without_address.node_v4, without_address.node_v6) = (Addr::UNSPECIFIED, Addr::UNSPECIFIED);
            for broken in [without_address, with_node_ports(config, 0, 0)] {
                assert_eq!(translate(&headers, &Quote::NONE, UPLINK, maps, &broken), Err(Verdict::NoNodeAddress));
            }
            let other = packet(cast.pod, cast.other_node, 0, 0).protocol(PROTO_AH).headers();
            assert_eq!(translate(&other, &Quote::NONE, UPLINK, maps, &config), Err(Verdict::UnsupportedProtocol));
            let narrow = with_node_ports(config, 61000, 61000);
            assert!(translate(&headers, &Quote::NONE, UPLINK, maps, &narrow).is_ok());
            let second = packet(cast.known_pod, cast.other_node, 4000, 80).tcp(tcp::SYN).headers();
            assert_eq!(translate(&second, &Quote::NONE, UPLINK, maps, &narrow), Err(Verdict::PortsExhausted));
            let running = packet(cast.known_pod, cast.other_node, 4000, 80).tcp(tcp::ACK).headers();
            assert_eq!(translate(&running, &Quote::NONE, UPLINK, maps, &config), Err(Verdict::PortTaken));
        });
    }

    /// The CNI's masquerade keeps the pod's source port, which may be in the NAT range.
    #[test]
    fn a_masqueraded_packet_does_not_match_another_pods_flow() {
        both(|cast, maps| {
            let config = maps.config.get();
            for sent in [packet(cast.pod, cast.other_node, 4000, 53), packet(cast.pod, cast.other_node, 0, 0).echo(9)] {
                let headers = sent.headers();
                let nat_entry = translate(&headers, &Quote::NONE, UPLINK, maps, &config).expect("a free port");
                let port = nat_entry.other.dport();
                let masqueraded = |port, to_port| match headers.l4 {
                    L4::EchoRequest => packet(cast.node, cast.other_node, 0, 0).echo(port),
                    _ => packet(cast.node, cast.other_node, port, to_port),
                };
                assert_eq!(verdict(maps, &masqueraded(port, 53)), Verdict::PortTaken);
                assert_eq!(
                    asked(maps, &OWN, &masqueraded(port, 53)),
                    ToNetdev::Done(Verdict::NotOurs),
                    "the node's own"
                );
                let next = if port == config.node_ports.last { port - 1 } else { port + 1 };
                assert_eq!(verdict(maps, &masqueraded(next, 53)), Verdict::NotOurs);
            }
        });
    }

    /// A rule of the host may translate to any address that it has.
    #[test]
    fn a_translated_packet_does_not_match_a_flow_of_an_egress_ip_of_the_host() {
        both(|cast, maps| {
            let config = maps.config.get();
            let owned = Owned::new(ID, addr(cast.known_pod), UPLINK, [2, 0, 0, 0, 0, 1], 1500).hosts(ID);
            maps.put_owned(ID, owned);
            let owner = NatOwner { origin: Origin::Here, source_node: Addr::UNSPECIFIED, egress_id: ID };
            let sent = packet(cast.pod, cast.world, 4000, 53).headers();
            let made = snat::translate(&sent, &Quote::NONE, maps, &SnatSource::of(&owned, &config), &owner);
            let port = made.expect("a free port").other.dport();
            let translated = |port| packet(cast.known_pod, cast.world, port, 53);
            assert_eq!(verdict(maps, &translated(port)), Verdict::PortTaken);
            let next = if port == config.node_ports.last { port - 1 } else { port + 1 };
            assert_ne!(verdict(maps, &translated(next)), Verdict::PortTaken);
        });
    }

    #[test]
    fn a_forwarded_packet_to_a_tunnel_port_is_dropped() {
        both(|cast, maps| {
            let port = u16::try_from(maps.config.get().tunnel_port).expect("a port");
            for source in [cast.pod, cast.node, cast.known_pod, cast.world, cast.egress] {
                let forged = packet(source, cast.other_node, 4000, port);
                assert_eq!(verdict(maps, &forged), Verdict::ForgedTunnel, "{source}");
                assert_eq!(asked(maps, &MARKED, &forged), ToNetdev::Done(Verdict::ForgedTunnel));
                assert_eq!(verdict(maps, &forged.cut(4)), Verdict::ForgedTunnel, "its port is out of sight");
            }
            let own = packet(cast.node, cast.other_node, 4000, port);
            assert_eq!(asked(maps, &OWN, &own), ToNetdev::Done(Verdict::NotOurs), "the overlay's own");
            assert_eq!(verdict(maps, &packet(cast.world, cast.excluded, 4000, port)), Verdict::NotOurs);
        });
    }

    #[test]
    fn a_selected_pods_own_address_does_not_leave() {
        both(|cast, maps| {
            for packet in [
                packet(cast.pod, cast.world, 4000, 80),
                packet(cast.pod, cast.world, 4000, 80).tcp(tcp::ACK),
                packet(cast.pod, cast.other_node, 4000, 80),
                packet(cast.pod, cast.world, 4000, 80).ttl(1),
            ] {
                assert_eq!(verdict(maps, &packet), Verdict::ProgramBypassed, "{packet:?}");
            }
            assert_eq!(verdict(maps, &packet(cast.pod, cast.foreign_egress, 4000, 80)), Verdict::Hairpin);
            maps.set_policy(ID, WhenEmpty::Drop, &[]);
            assert_eq!(verdict(maps, &packet(cast.pod, cast.world, 4000, 80)), Verdict::NoGateway);
        });
    }

    #[test]
    fn no_entry_of_a_pod_judges_what_the_node_sends() {
        both(|cast, maps| {
            for wrong in [cast.node, cast.mgmt, cast.other_node, cast.egress, cast.world] {
                maps.add_pod(wrong, PodEntry::selected(ID, 0));
                for to in [cast.world, cast.other_node] {
                    let sent = packet(wrong, to, 4000, 80);
                    assert_eq!(asked(maps, &OWN, &sent), ToNetdev::Done(Verdict::NotOurs), "{wrong} {to}");
                    assert_eq!(asked(maps, &Meta { forwarded: false, ..MARKED }, &sent), ToNetdev::Unmark);
                }
            }
            // A pod's packet with an address that was translated before.
            for wrong in [cast.node, cast.other_node] {
                assert_eq!(verdict(maps, &packet(wrong, cast.world, 4000, 80)), Verdict::NotOurs, "{wrong}");
            }
            // A pod whose node has no subnet of the family, and one that the host forwards for.
            assert_eq!(verdict(maps, &packet(cast.world, cast.world, 4000, 80)), Verdict::ProgramBypassed);
            let sent_for = packet(cast.pod, cast.world, 4000, 80);
            assert_eq!(asked(maps, &OWN, &sent_for), ToNetdev::Done(Verdict::ProgramBypassed));
        });
    }

    #[test]
    fn an_unsolicited_answer_does_not_leave() {
        both(|cast, maps| {
            let syn = packet(cast.world, cast.pod, 4000, 80).tcp(tcp::SYN).arriving();
            let ping = packet(cast.world, cast.pod, 0, 0).echo(9).arriving();
            let answers = [
                (syn, packet(cast.pod, cast.world, 80, 4000).tcp(tcp::SYN | tcp::ACK)),
                (ping, packet(cast.pod, cast.world, 0, 0).echo_reply(9)),
            ];
            for (question, answer) in answers {
                assert_eq!(verdict(maps, &answer), Verdict::ProgramBypassed, "made up");
                assert_eq!(to_pod::decide(&question, maps, &maps.config.get()), Verdict::InboundRemembered);
                assert_eq!(verdict(maps, &answer), Verdict::InboundReply);
                let unselected = packet(cast.known_pod, cast.world, 80, 4000).tcp(tcp::SYN | tcp::ACK);
                assert_eq!(verdict(maps, &unselected), Verdict::NotSelected);
            }
        });
    }

    #[test]
    fn no_fragment_waits_on_this_hook() {
        both(|cast, maps| {
            let firsts = [
                (packet(cast.pod, cast.world, 4000, 80), Verdict::ProgramBypassed),
                (packet(cast.known_pod, cast.world, 4000, 80), Verdict::NotSelected),
                (packet(cast.pod, cast.world, 80, 4000), Verdict::InboundReply),
            ];
            let called = packet(cast.world, cast.pod, 4000, 80).arriving();
            assert_eq!(to_pod::decide(&called, maps, &maps.config.get()), Verdict::InboundRemembered);
            for (first, expected) in firsts {
                let first = first.fragment(0, true);
                maps.await_first(&first.headers());
                assert_eq!(verdict(maps, &first), expected);
            }
            let mut marked = packet(cast.pod, cast.other_node, 4000, 80).fragment(0, true).headers();
            maps.await_first(&marked);
            let config = maps.config.get();
            assert_eq!(decide(&mut marked, &Quote::NONE, &MARKED, maps, &config), ToNetdev::NodeSnat);
            assert!(translate(&marked, &Quote::NONE, UPLINK, maps, &config).is_ok());
        });
    }

    #[test]
    fn packets_that_from_pod_leaves_alone_may_leave() {
        both(|cast, maps| {
            assert_eq!(verdict(maps, &packet(cast.known_pod, cast.world, 4000, 80)), Verdict::NotSelected);
            assert_eq!(verdict(maps, &packet(cast.pod, cast.remote_pod, 4000, 80)), Verdict::ToCluster);
        });
    }

    #[test]
    fn the_node_address_exception_translates_where_the_stack_did_not() {
        both(|cast, maps| {
            maps.set_policy(ID, WhenEmpty::NodeAddress, &[]);
            let untranslated = packet(cast.pod, cast.world, 4000, 80);
            for packet in [untranslated.clone(), untranslated.clone().tcp(tcp::SYN), untranslated.ttl(1)] {
                assert_eq!(asked(maps, &FORWARDED, &packet), ToNetdev::NodeSnat, "{packet:?}");
            }
            assert_eq!(verdict(maps, &packet(cast.node, cast.world, 4000, 80)), Verdict::NotOurs, "the CNI has");
            // A packet without it keeps its address: the policy lists none of this family.
            maps.set_policy(ID, WhenEmpty::NotListed, &[]);
            assert_eq!(verdict(maps, &packet(cast.pod, cast.world, 4000, 80)), Verdict::FamilyNotListed);
        });
    }

    #[test]
    fn addresses_of_remote_pods_do_not_leave() {
        both(|cast, maps| {
            for source in [cast.remote_pod, cast.lost_pod] {
                for to in [cast.world, cast.foreign_egress] {
                    assert_eq!(verdict(maps, &packet(source, to, 4000, 80)), Verdict::ForeignPod, "{source} {to}");
                }
                assert_eq!(verdict(maps, &packet(source, cast.known_pod, 4000, 80)), Verdict::ToCluster);
                assert_eq!(verdict(maps, &packet(source, cast.other_node, 4000, 80)), Verdict::NotOurs);
            }
            for source in [cast.node, cast.mgmt, cast.world, cast.service] {
                assert_eq!(verdict(maps, &packet(source, cast.world, 4000, 80)), Verdict::NotOurs, "{source}");
            }
        });
    }

    /// Packets translated by NAT never reach this check. It does not apply to the node's own packets and those of the
    /// network.
    #[test]
    fn no_egress_ip_leaves_that_nat_has_not_written() {
        both(|cast, maps| {
            for source in [cast.egress, cast.foreign_egress] {
                let spoofed = packet(source, cast.world, 4000, 80);
                for meta in [FORWARDED, MARKED] {
                    assert_eq!(asked(maps, &meta, &spoofed), ToNetdev::Done(Verdict::SpoofedEgressIp), "{source}");
                }
                assert_eq!(asked(maps, &OWN, &spoofed), ToNetdev::Done(Verdict::NotOurs), "{source}");
                let returning = Meta { returning: true, ..FORWARDED };
                assert_eq!(asked(maps, &returning, &spoofed), ToNetdev::Done(Verdict::NotOurs), "{source}");
            }
        });
    }

    #[test]
    fn no_egress_ip_leaves_by_another_interface() {
        both(|cast, maps| {
            let sent = packet(cast.egress, cast.world, 4000, 80);
            let returning = Meta { returning: true, ..FORWARDED };
            for meta in [OWN, returning, Meta { forwarded: false, ..MARKED }] {
                let elsewhere = Meta { ifindex: FURTHER, ..meta };
                assert_eq!(asked(maps, &elsewhere, &sent), ToNetdev::Done(Verdict::WrongInterface), "{meta:?}");
                let anothers = packet(cast.foreign_egress, cast.world, 4000, 80);
                for packet in [anothers, packet(cast.node, cast.world, 4000, 80)] {
                    let verdict = asked(maps, &elsewhere, &packet);
                    assert_ne!(verdict, ToNetdev::Done(Verdict::WrongInterface), "not owned here: {packet:?}");
                }
                assert_ne!(asked(maps, &meta, &sent), ToNetdev::Done(Verdict::WrongInterface), "its own: {meta:?}");
            }
            let forged = Meta { ifindex: FURTHER, ..FORWARDED };
            assert_eq!(asked(maps, &forged, &sent), ToNetdev::Done(Verdict::SpoofedEgressIp), "by no interface");
        });
    }

    #[test]
    fn an_unknown_local_pod_is_treated_as_in_from_pod() {
        both(|cast, maps| {
            let unknown = packet(cast.unknown_pod, cast.world, 4000, 80);
            assert_eq!(verdict(maps, &unknown), Verdict::UnknownPod);
            maps.config.set(maps.config.get().with_on_unknown_pod(OnUnknownPod::Pass));
            assert_eq!(verdict(maps, &unknown), Verdict::UnknownPodPassed);
        });
    }
}
