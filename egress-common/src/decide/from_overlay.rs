//! `from_overlay`: the overlay device, TC ingress. A flow for an egress IP of this node, or a gateway's reply to a pod
//! of this node.
//!
//! Packets of other nodes are checked, although nodes are trusted:
//!
//! - the outer source is another node's tunnel endpoint, and the outer destination this node's (the edge compares it);
//! - the inner source of a flow is a pod of that very node;
//! - the destination of a reply is a pod that the egress policy selects, and its source no address of the cluster.
//!
//! During a hand-over (`abi::HandoverEntry`) the old owner passes on what it receives for the address. The new owner
//! accepts packets of other nodes' pods from the old owner only, until the old owner no longer emits the address. A
//! pod's packet is passed on once. A reply may come back from the new owner to the old one, with one hop less each
//! time.

use super::snat::{self, SnatSource};
use super::{NatOwner, Tables, fragments, policy_of, slots};
use crate::abi::{
    Addr, Class, Config, HandoverStage, NatEntry, NodeEntry, NodePlace, Origin, Owned, PrefixKind, Verdict,
};
use crate::wire::{Headers, L4, Quote};

/// Source and egress ID, from the tunnel header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outer {
    pub source: Addr,
    pub egress_id: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FromOverlay<'t> {
    Done(Verdict),
    /// A reply from a gateway for a pod of this node that the egress policy selects.
    Deliver,
    /// To be translated here; the reply goes back to this node.
    Translate {
        owned: &'t Owned,
        source_node: &'t Addr,
    },
    /// The address has been handed over to another node ([`HandoverEntry::peer`](crate::abi::HandoverEntry::peer)).
    PassOn,
    /// A reply for the egress IP, passed on by the other node of a hand-over. This node translates it if it has the NAT
    /// entry.
    Answer,
}

/// The verdict of a packet that cannot be parsed: the stack must not get it.
#[inline(always)]
pub const fn unread(why: Verdict) -> Verdict {
    if matches!(why.class(), Class::Pass) { Verdict::Malformed } else { why }
}

/// The sending node. Nodes send from their tunnel endpoint; another address of a node may come from a masqueraded
/// packet of a pod.
#[inline(always)]
pub fn sender<'t, T: Tables>(outer: &Outer, tables: &'t T) -> Option<&'t NodeEntry> {
    tables.node(&outer.source).filter(|node| node.place() == NodePlace::Other && node.node == outer.source)
}

#[inline(always)]
pub fn decide<'t, T: Tables>(
    headers: &mut Headers,
    quote: &Quote,
    outer: &Outer,
    tables: &'t T,
    config: &Config,
) -> FromOverlay<'t> {
    let Some(sender) = sender(outer, tables) else { return FromOverlay::Done(Verdict::ForgedOuter) };
    if let Some(pod) = tables.pod(&headers.tuple.daddr) {
        // A gateway has no pod state: its NAT entries outlive the pod's selection, and the pod. The network identifier
        // names the policy of the reply. An ICMP error may come from any router: it concerns the quoted packet.
        let answered = if headers.l4 == L4::IcmpError { &quote.tuple().daddr } else { &headers.tuple.saddr };
        if policy_of(pod, answered, tables) != Some(outer.egress_id) {
            return FromOverlay::Done(Verdict::NotItsPod);
        }
        if !may_answer(headers, tables) {
            return FromOverlay::Done(Verdict::ForgedInner);
        }
        // A later fragment does not show its flow, and an error refreshes none.
        if headers.has_l4() && headers.l4 != L4::IcmpError {
            tables.flow_answered(&headers.tuple.answered(), headers.for_pod());
        }
        return FromOverlay::Deliver;
    }
    if is_in_own_subnet(headers, tables, config) {
        return FromOverlay::Done(Verdict::NotItsPod);
    }
    let of_sender = tables
        .prefix(&headers.tuple.saddr)
        .is_some_and(|prefix| prefix.kind() == Some(PrefixKind::PodSubnet) && prefix.node == sender.node);
    let owned = match of_sender {
        true => tables.owned(outer.egress_id).filter(|owned| owned.address.family() == headers.family),
        false => None,
    };
    let (owned, source_node) = match owned {
        Some(owned) => (owned, &sender.node),
        None => match of_hand_over(headers, outer, tables, of_sender) {
            HandOverRelation::None if of_sender => return FromOverlay::Done(Verdict::NotGateway),
            HandOverRelation::None => return FromOverlay::Done(Verdict::ForgedInner),
            HandOverRelation::Answer => return FromOverlay::Answer,
            HandOverRelation::PassOn => return FromOverlay::PassOn,
            HandOverRelation::Take => {
                let Some(handover) = tables.handover(outer.egress_id) else {
                    return FromOverlay::Done(Verdict::NotGateway);
                };
                let Some(prefix) = tables.prefix(&headers.tuple.saddr) else {
                    return FromOverlay::Done(Verdict::ForgedInner);
                };
                (&handover.owned, &prefix.node)
            }
        },
    };
    if headers.l4 == L4::IcmpError && !headers.source_routed {
        // By the NAT entry of the quoted packet.
        return FromOverlay::Translate { owned, source_node };
    }
    fragments::resolve(headers, tables);
    match slots::translatable(headers) {
        Ok(()) => FromOverlay::Translate { owned, source_node },
        Err(verdict) => FromOverlay::Done(verdict),
    }
}

/// Relation of a packet to a hand-over of its address.
#[derive(Clone, Copy, PartialEq, Eq)]
enum HandOverRelation {
    None,
    /// See [`FromOverlay::Answer`].
    Answer,
    /// See [`FromOverlay::PassOn`].
    PassOn,
    /// Translated here, although this node does not own the address yet, or a pod of a third node sent the packet.
    Take,
}

/// For an address that this node does not own, or from a pod that is not on the sending node. Out of line, because it
/// is rare.
#[inline(never)]
fn of_hand_over<T: Tables>(headers: &Headers, outer: &Outer, tables: &T, of_sender: bool) -> HandOverRelation {
    let Some(handover) = tables.handover(outer.egress_id) else { return HandOverRelation::None };
    let is_from_peer = handover.peer == outer.source;
    if is_from_peer && headers.tuple.daddr == handover.owned.address {
        return HandOverRelation::Answer;
    }
    if handover.owned.address.family() != headers.family {
        return HandOverRelation::None;
    }
    match handover.stage() {
        Some(HandoverStage::Leaving) if of_sender => HandOverRelation::PassOn,
        Some(HandoverStage::Open) if of_sender => HandOverRelation::Take,
        Some(HandoverStage::Arriving | HandoverStage::Open) if is_from_peer => {
            match tables.prefix(&headers.tuple.saddr) {
                Some(prefix) if prefix.kind() == Some(PrefixKind::PodSubnet) => HandOverRelation::Take,
                _ => HandOverRelation::None,
            }
        }
        _ => HandOverRelation::None,
    }
}

/// Whether a reply may have this source: [`super::from_pod`] sends no packet for a cluster address to a gateway. An
/// ICMP error may have any source, such as the gateway's own address, and concerns only the flow that it quotes.
#[inline(always)]
fn may_answer<T: Tables>(headers: &Headers, tables: &T) -> bool {
    let source = &headers.tuple.saddr;
    headers.l4 == L4::IcmpError || (tables.node(source).is_none() && tables.prefix(source).is_none())
}

/// For an address without a pod that the agent knows.
#[inline(always)]
fn is_in_own_subnet<T: Tables>(headers: &Headers, tables: &T, config: &Config) -> bool {
    tables
        .prefix(&headers.tuple.daddr)
        .is_some_and(|prefix| prefix.kind() == Some(PrefixKind::PodSubnet) && prefix.node == config.self_node)
}

/// The NAT entry of a flow that another node sent.
#[inline(always)]
pub fn translate<'t, T: Tables>(
    headers: &Headers,
    quote: &Quote,
    tables: &'t T,
    owned: &Owned,
    egress_id: u32,
    source_node: &Addr,
    config: &Config,
) -> Result<&'t NatEntry, Verdict> {
    // The old owner of a hand-over may pass on a packet of a pod of this node.
    let owner = match *source_node == config.self_node {
        true => NatOwner { origin: Origin::Here, source_node: Addr::UNSPECIFIED, egress_id },
        false => NatOwner { origin: Origin::Remote, source_node: *source_node, egress_id },
    };
    snat::translate(headers, quote, tables, &SnatSource::of(owned, config), &owner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::{Direction, HandoverEntry, PodEntry};
    use crate::decide::cast::{Cast, ID, NODE, OTHER_NODE, both};
    use crate::decide::from_pod;
    use crate::decide::memory_maps::{MemoryMaps, addr};
    use crate::decide::packets::{FrameFields, packet};
    use crate::decide::phase::{self, Phase};
    use crate::wire::{PROTO_AH, tcp};

    fn asked<'t>(maps: &'t MemoryMaps, from: &str, egress_id: u32, packet: &FrameFields) -> FromOverlay<'t> {
        let outer = Outer { source: addr(from), egress_id };
        decide(&mut packet.headers(), &Quote::NONE, &outer, maps, &maps.config.get())
    }

    fn from_remote(cast: &Cast) -> FrameFields {
        packet(cast.remote_pod, cast.world, 4000, 80)
    }

    #[test]
    fn a_pod_of_the_node_that_sends_gets_the_egress_ip() {
        both(|cast, maps| {
            let FromOverlay::Translate { owned, source_node } = asked(maps, OTHER_NODE, ID, &from_remote(cast)) else {
                panic!("not translated");
            };
            assert_eq!((owned.address, *source_node), (addr(cast.egress), addr(OTHER_NODE)));
            let headers = from_remote(cast).headers();
            let nat_entry = translate(&headers, &Quote::NONE, maps, owned, ID, source_node, &maps.config.get())
                .expect("a free port");
            assert_eq!(nat_entry.origin(), Some(Origin::Remote));
            assert_eq!((nat_entry.source_node, nat_entry.egress_id), (addr(OTHER_NODE), ID));
            // A masqueraded packet of a pod has another address of its node.
            let forged = asked(maps, cast.other_mgmt, ID, &from_remote(cast));
            assert_eq!(forged, FromOverlay::Done(Verdict::ForgedOuter));
            maps.assert_paired();
        });
    }

    #[test]
    fn a_reply_keeps_the_flow_alive_and_notes_its_end() {
        both(|cast, maps| {
            let sent = packet(cast.pod, cast.world, 4000, 80).tcp(tcp::SYN);
            let flow = |maps: &MemoryMaps| maps.flow_at(&sent.headers().tuple).expect("a flow");
            from_pod::decide(&mut sent.headers(), &Quote::NONE, maps, &maps.config.get());
            from_pod::decide(
                &mut sent.clone().tcp(tcp::FIN | tcp::ACK).headers(),
                &Quote::NONE,
                maps,
                &maps.config.get(),
            );
            maps.now.set(maps.now.get() + 200_000_000_000);
            let reply = packet(cast.world, cast.pod, 80, 4000);
            for (flags, phase) in [(tcp::ACK, Phase::Established), (tcp::FIN | tcp::ACK, Phase::Closing)] {
                assert_eq!(asked(maps, OTHER_NODE, ID, &reply.clone().tcp(flags)), FromOverlay::Deliver);
                assert_eq!((flow(maps).last_seen_ns, phase::flow(&flow(maps))), (maps.now.get(), phase));
            }
            let error = packet(cast.other_node, cast.pod, 0, 0).unreachable();
            assert_eq!(asked(maps, OTHER_NODE, ID, &error), FromOverlay::Deliver, "of no flow by its own tuple");
        });
    }

    #[test]
    fn the_outer_source_must_be_another_node() {
        both(|cast, maps| {
            for from in [cast.node, cast.mgmt, cast.world, cast.remote_pod, cast.pod, cast.egress] {
                let verdict = asked(maps, from, ID, &from_remote(cast));
                assert_eq!(verdict, FromOverlay::Done(Verdict::ForgedOuter), "{from}");
                let reply = packet(cast.world, cast.pod, 80, 4000);
                assert_eq!(asked(maps, from, ID, &reply), FromOverlay::Done(Verdict::ForgedOuter), "{from}");
            }
        });
    }

    #[test]
    fn the_inner_source_must_be_a_pod_of_that_node() {
        both(|cast, maps| {
            for source in [cast.pod, cast.lost_pod, cast.world, cast.other_node, cast.service, cast.egress] {
                let forged = packet(source, cast.world, 4000, 80);
                assert_eq!(asked(maps, OTHER_NODE, ID, &forged), FromOverlay::Done(Verdict::ForgedInner), "{source}");
            }
        });
    }

    #[test]
    fn only_an_owned_address_of_the_family_is_given() {
        both(|cast, maps| {
            let verdict = asked(maps, OTHER_NODE, ID + 1, &from_remote(cast));
            assert_eq!(verdict, FromOverlay::Done(Verdict::NotGateway));
            let other_family = if cast.egress.contains(':') { "172.18.0.100" } else { "fd00:172:18::100" };
            maps.own(ID, other_family);
            let verdict = asked(maps, OTHER_NODE, ID, &from_remote(cast));
            assert_eq!(verdict, FromOverlay::Done(Verdict::NotGateway));
        });
    }

    #[test]
    fn replies_are_for_pods_of_this_node() {
        both(|cast, maps| {
            let reply = packet(cast.world, cast.pod, 80, 4000);
            assert_eq!(asked(maps, OTHER_NODE, ID, &reply), FromOverlay::Deliver);
            assert_eq!(asked(maps, OTHER_NODE, ID, &reply.fragment(100, false)), FromOverlay::Deliver);
            let elsewhere = packet(cast.world, cast.remote_pod, 80, 4000);
            assert_eq!(asked(maps, OTHER_NODE, ID, &elsewhere), FromOverlay::Done(Verdict::ForgedInner));
        });
    }

    /// The gateway's NAT entry outlives a pod's selection, and the pod: another pod may have its address by now.
    #[test]
    fn replies_are_for_pods_that_their_object_selects() {
        both(|cast, maps| {
            let reply = |pod| packet(cast.world, pod, 80, 4000).tcp(tcp::ACK);
            for (egress_id, pod) in
                [(ID, cast.known_pod), (ID, cast.unknown_pod), (ID + 1, cast.pod), (0, cast.known_pod)]
            {
                let verdict = asked(maps, OTHER_NODE, egress_id, &reply(pod));
                assert_eq!(verdict, FromOverlay::Done(Verdict::NotItsPod), "{egress_id} {pod}");
            }
            assert_eq!(asked(maps, OTHER_NODE, ID, &reply(cast.pod)), FromOverlay::Deliver);
            maps.add_pod(cast.pod, PodEntry::known().with_cut_until(u64::MAX));
            assert_eq!(asked(maps, OTHER_NODE, ID, &reply(cast.pod)), FromOverlay::Done(Verdict::NotItsPod));
        });
    }

    /// A pod's packet to the cluster has no egress IP, so no answer from the cluster comes through a gateway.
    #[test]
    fn no_reply_comes_from_the_cluster() {
        both(|cast, maps| {
            let sources = [
                cast.node,
                cast.mgmt,
                cast.other_node,
                cast.other_mgmt,
                cast.pod,
                cast.known_pod,
                cast.remote_pod,
                cast.lost_pod,
                cast.service,
                cast.join,
                cast.link_local,
                cast.multicast,
                cast.excluded,
                cast.egress,
                cast.foreign_egress,
            ];
            for source in sources {
                for reply in
                    [packet(source, cast.pod, 80, 4000), packet(source, cast.pod, 80, 4000).fragment(100, false)]
                {
                    assert_eq!(
                        asked(maps, OTHER_NODE, ID, &reply),
                        FromOverlay::Done(Verdict::ForgedInner),
                        "{source}"
                    );
                }
                // A gateway sends errors from its node's address, a router from any.
                let error = packet(source, cast.pod, 0, 0).unreachable();
                assert_eq!(asked(maps, OTHER_NODE, ID, &error), FromOverlay::Deliver, "{source}");
            }
        });
    }

    #[test]
    fn an_error_has_the_address_of_its_own_flow_or_none() {
        both(|cast, maps| {
            let (node, own) = (addr(OTHER_NODE), *maps.owned(ID).expect("owned"));
            let on_error = |from: &str, quoted: &FrameFields, owned: &Owned| {
                let error = packet(from, cast.world, 0, 0).unreachable().headers();
                translate(&error, &quoted.quoted(Direction::Ingress), maps, owned, ID, &node, &maps.config.get())
                    .map(|found| found.other)
            };
            let got = packet(cast.world, cast.remote_pod, 80, 4000);
            assert_eq!(on_error(cast.remote_pod, &got, &own), Err(Verdict::IcmpUnmatched));
            let made = translate(&from_remote(cast).headers(), &Quote::NONE, maps, &own, ID, &node, &maps.config.get())
                .map(|made| made.other);
            assert!(made.is_ok());
            assert_eq!(on_error(cast.remote_pod, &got, &own), made);
            let others = Owned::new(ID, addr(cast.foreign_egress), own.ifindex, own.mac, own.mtu);
            assert_eq!(on_error(cast.remote_pod, &got, &others), Err(Verdict::IcmpUnmatched), "another object's");
            assert_eq!(on_error(cast.lost_pod, &got, &own), Err(Verdict::IcmpUnmatched), "another pod's flow");
            assert_eq!(maps.nat_len(), 2);
        });
    }

    #[test]
    fn untranslatable_packets_have_a_drop_reason() {
        both(|cast, maps| {
            for (packet, verdict) in [
                (from_remote(cast).protocol(PROTO_AH), Verdict::UnsupportedProtocol),
                (from_remote(cast).cut(4), Verdict::Malformed),
                (from_remote(cast).fragment(100, false), Verdict::FragmentUnknown),
            ] {
                assert_eq!(asked(maps, OTHER_NODE, ID, &packet), FromOverlay::Done(verdict));
            }
            let first = asked(maps, OTHER_NODE, ID, &from_remote(cast).fragment(0, true));
            assert!(matches!(first, FromOverlay::Translate { .. }));
            let later = asked(maps, OTHER_NODE, ID, &from_remote(cast).fragment(100, false));
            assert!(matches!(later, FromOverlay::Translate { .. }));
        });
    }

    #[test]
    fn no_fragment_waits_on_this_hook() {
        both(|cast, maps| {
            let first = from_remote(cast).fragment(0, true);
            maps.await_first(&first.headers());
            assert!(matches!(asked(maps, OTHER_NODE, ID, &first), FromOverlay::Translate { .. }));
        });
    }

    #[test]
    fn a_node_of_another_version_is_not_this_node() {
        both(|cast, maps| {
            maps.put_node(cast.other_node, NodeEntry::new(NodePlace::Own, addr(OTHER_NODE)).of_another_version());
            assert!(matches!(asked(maps, OTHER_NODE, ID, &from_remote(cast)), FromOverlay::Translate { .. }));
            assert_eq!(maps.node(&addr(cast.node)).map(|node| node.node), Some(addr(NODE)));
        });
    }

    /// The hand-over of [`ID`]'s address to or from the other node.
    fn hand_over(cast: &Cast, maps: &MemoryMaps, stage: HandoverStage) {
        let owned = *maps.owned(ID).expect("owned");
        maps.handovers.borrow_mut().insert(ID, HandoverEntry::new(ID, stage, 0, addr(OTHER_NODE), owned));
        maps.owned.borrow_mut().remove(&ID);
        assert!(maps.owned_addr(&addr(cast.egress)).is_some(), "answers are still taken");
    }

    #[test]
    fn a_handed_over_packet_is_passed_on_once() {
        both(|cast, maps| {
            const THIRD: &str = "172.18.0.4";
            let (pod, narrow) = if cast.world.contains(':') { ("fd00:10:244:3::10", 64) } else { ("10.244.3.10", 24) };
            maps.add_node(THIRD, NodePlace::Other, THIRD);
            maps.add_prefix(pod, narrow, PrefixKind::PodSubnet, Some(THIRD));
            let late = packet(pod, cast.world, 4000, 80);
            hand_over(cast, maps, HandoverStage::Leaving);
            assert_eq!(asked(maps, THIRD, ID, &late), FromOverlay::PassOn);
            // By an earlier hand-over.
            let passed = asked(maps, OTHER_NODE, ID, &late);
            assert_eq!(passed, FromOverlay::Done(Verdict::ForgedInner), "never passed on twice");
            assert_eq!(asked(maps, THIRD, ID + 1, &late), FromOverlay::Done(Verdict::NotGateway));
            let forged = packet(cast.world, cast.world, 1, 2);
            assert_eq!(asked(maps, THIRD, ID, &forged), FromOverlay::Done(Verdict::ForgedInner));
        });
    }

    #[test]
    fn the_new_owner_accepts_packets_of_any_pod_from_the_old_owner() {
        both(|cast, maps| {
            hand_over(cast, maps, HandoverStage::Arriving);
            for (pod, node, origin) in
                [(cast.remote_pod, addr(OTHER_NODE), Origin::Remote), (cast.pod, addr(NODE), Origin::Here)]
            {
                let passed = packet(pod, cast.world, 4000, 80);
                let FromOverlay::Translate { owned, source_node } = asked(maps, OTHER_NODE, ID, &passed) else {
                    panic!("{pod} is not translated");
                };
                assert_eq!((owned.address, *source_node), (addr(cast.egress), node));
                let config = maps.config.get();
                let made = translate(&passed.headers(), &Quote::NONE, maps, owned, ID, source_node, &config);
                assert_eq!(made.map(|made| made.origin()), Ok(Some(origin)));
            }
            for foreign in [cast.lost_pod, cast.world, cast.service, cast.egress] {
                let forged = asked(maps, OTHER_NODE, ID, &packet(foreign, cast.world, 4000, 80));
                assert_eq!(forged, FromOverlay::Done(Verdict::ForgedInner), "{foreign}");
            }
        });
    }

    /// A node may not know of an earlier hand-over: the other node still owns the address.
    #[test]
    fn before_the_hand_over_the_new_owner_accepts_nothing_from_other_nodes() {
        both(|cast, maps| {
            const THIRD: &str = "172.18.0.4";
            hand_over(cast, maps, HandoverStage::Arriving);
            let handover = maps.handovers.borrow()[&ID];
            maps.handovers
                .borrow_mut()
                .insert(ID, HandoverEntry::new(ID, HandoverStage::Arriving, 0, addr(THIRD), handover.owned));
            assert_eq!(asked(maps, OTHER_NODE, ID, &from_remote(cast)), FromOverlay::Done(Verdict::NotGateway));
            let open = HandoverEntry::new(ID, HandoverStage::Open, 0, addr(THIRD), handover.owned);
            maps.handovers.borrow_mut().insert(ID, open);
            assert!(matches!(asked(maps, OTHER_NODE, ID, &from_remote(cast)), FromOverlay::Translate { .. }));
        });
    }

    #[test]
    fn answers_are_accepted_from_the_peer_of_the_hand_over_only() {
        both(|cast, maps| {
            for stage in [HandoverStage::Leaving, HandoverStage::Arriving, HandoverStage::Open] {
                maps.own(ID, cast.egress);
                hand_over(cast, maps, stage);
                let answer = packet(cast.world, cast.egress, 80, 4000);
                assert_eq!(asked(maps, OTHER_NODE, ID, &answer), FromOverlay::Answer);
                assert_eq!(asked(maps, OTHER_NODE, ID + 1, &answer), FromOverlay::Done(Verdict::ForgedInner));
                let other = packet(cast.world, cast.foreign_egress, 80, 4000);
                assert_eq!(asked(maps, OTHER_NODE, ID, &other), FromOverlay::Done(Verdict::ForgedInner));
                let handover = maps.handovers.borrow()[&ID];
                let third = HandoverEntry::new(ID, stage, 0, addr("172.18.0.4"), handover.owned);
                maps.handovers.borrow_mut().insert(ID, third);
                assert_eq!(asked(maps, OTHER_NODE, ID, &answer), FromOverlay::Done(Verdict::ForgedInner));
            }
        });
    }
}
