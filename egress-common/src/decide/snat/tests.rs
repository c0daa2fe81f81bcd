use std::collections::HashSet;
use std::vec::Vec;

use super::*;
use crate::abi::{ExposedPort, Lease, Owned};
use crate::decide::Rewrite;
use crate::decide::cast::{ID, both};
use crate::decide::memory_maps::{MemoryMaps, addr};
use crate::decide::packets::{FrameFields, packet};
use crate::wire::{PROTO_TCP, PROTO_UDP, sctp, tcp};

/// A type of SCTP chunk.
const DATA: u8 = 0;
const EGRESS: Addr = Addr::v4([172, 18, 0, 100]);
const SOURCE: SnatSource = SnatSource::egress_only(EGRESS);
pub(super) const OWNER: NatOwner = NatOwner { origin: Origin::Here, source_node: Addr::UNSPECIFIED, egress_id: 7 };

const fn of_node(address: Addr, first: u16, last: u16) -> SnatSource {
    SnatSource { address, ports: PortRange { first, last }, is_nodes: true }
}

#[test]
fn the_walk_covers_every_port_once() {
    for (first, last) in [(1024u16, 65535u16), (61000, 65535), (1024, 1024), (1024, 1025), (30000, 62770)] {
        for random in [0, 1, 77_777, u32::MAX] {
            let search = PortSearch::new(PortRange { first, last }, random);
            let seen: HashSet<u16> = (0..search.span).map(|i| search.at(i)).collect();
            assert_eq!(seen.len() as u32, search.span);
            assert!(seen.iter().all(|p| (first..=last).contains(p)));
        }
    }
}

/// The pod's quota, then the policy's; existing entries continue.
#[test]
fn a_holder_at_its_quota_gets_no_more_entries() {
    both(|cast, maps| {
        let pool = SnatSource::egress_only(addr(cast.egress));
        let asked = |pod, port| {
            let headers = packet(pod, cast.world, 4000, port).headers();
            translate(&headers, &Quote::NONE, maps, &pool, &OWNER).map(drop)
        };
        maps.configure(|config| (config.pod_quota, config.policy_quota) = (2, 3));
        assert_eq!(
            [1, 2, 3, 2].map(|port| asked(cast.pod, port)),
            [Ok(()), Ok(()), Err(Verdict::QuotaExceeded), Ok(())]
        );
        assert_eq!([4, 5].map(|port| asked(cast.known_pod, port)), [Ok(()), Err(Verdict::QuotaExceeded)]);
        let headers = packet(cast.known_pod, cast.world, 4000, 5).headers();
        let other = NatOwner { egress_id: 8, ..OWNER };
        assert!(translate(&headers, &Quote::NONE, maps, &pool, &other).is_ok(), "of another policy");
    });
}

/// Neither for a new nor for a running flow, and a refused packet refreshes nothing.
#[test]
fn without_a_lease_only_the_nodes_own_address_is_given() {
    both(|cast, maps| {
        let (headers, pool) =
            (packet(cast.pod, cast.world, 4000, 80).headers(), SnatSource::egress_only(addr(cast.egress)));
        let remote = NatOwner { origin: Origin::Remote, source_node: addr(cast.other_node), egress_id: 7 };
        let asked = |owner: &NatOwner| translate(&headers, &Quote::NONE, maps, &pool, owner).copied();
        maps.lease.set(Lease::bounded(maps.now.get(), maps.now.get(), 0));
        assert_eq!([asked(&OWNER), asked(&remote)], [Err(Verdict::LeaseExpired); 2]);
        assert!(maps.nat.is_empty());
        maps.lease.set(Lease::bounded(maps.now.get() + 1, maps.now.get(), 0));
        let begun = asked(&OWNER).expect("a lease");
        maps.now.set(maps.now.get() + 1);
        assert_eq!(asked(&OWNER), Err(Verdict::LeaseExpired));
        assert_eq!(maps.nat_peek(&headers.tuple).map(|nat_entry| nat_entry.last_seen_ns), Some(begun.last_seen_ns));
        let stack = NatOwner { origin: Origin::Stack, source_node: Addr::UNSPECIFIED, egress_id: 0 };
        assert!(asked(&stack).is_ok(), "mark 1008");
    });
}

#[test]
fn an_exhausted_range_is_searched_once_in_a_while() {
    both(|cast, maps| {
        let ports = PortRange { first: 2000, last: 2001 };
        let pool = SnatSource { ports, ..SnatSource::egress_only(addr(cast.egress)) };
        let asked = |port, to| {
            let headers = packet(cast.pod, cast.world, port, to).headers();
            translate(&headers, &Quote::NONE, maps, &pool, &OWNER).map(|nat_entry| nat_entry.other)
        };
        let first = asked(1, 80).expect("a free port");
        assert!(asked(2, 80).is_ok());
        assert_eq!(asked(3, 80), Err(Verdict::PortsExhausted));
        assert!(asked(3, 81).is_ok(), "another destination");
        let forward = maps.nat_peek(&first).expect("the mapping").other;
        assert!(maps.forget_nat(&first) && maps.forget_nat(&forward));
        assert_eq!(asked(3, 80), Err(Verdict::PortsExhausted), "it has just been searched");
        let begun = maps.now.get();
        maps.now.set(begun + EXHAUSTED_NS + 1);
        assert_eq!(asked(3, 80), Ok(first), "and is again");
        assert_eq!(asked(4, 80), Err(Verdict::PortsExhausted));
        assert!(maps.forget_nat(&first));
        maps.forget_nat(&packet(cast.pod, cast.world, 3, 80).headers().tuple);
        assert_eq!(asked(first.dport(), 80), Ok(first), "a flow's own port needs no search");
    });
}

#[test]
fn a_free_source_port_is_kept() {
    let maps = MemoryMaps::new();
    let one = packet("10.244.1.10", "198.51.100.10", 4000, 80).headers();
    let nat_entry = translate(&one, &Quote::NONE, &maps, &SOURCE, &OWNER).expect("a free port");
    assert_eq!(nat_entry.other.dport(), 4000);
    assert_eq!(maps.mappings_made(), 1);
    let two = packet("10.244.1.11", "198.51.100.10", 4000, 80).headers();
    let other = translate(&two, &Quote::NONE, &maps, &SOURCE, &OWNER).expect("a free port");
    assert_ne!(other.other.dport(), 4000);
    assert_eq!(translate(&one, &Quote::NONE, &maps, &SOURCE, &OWNER).map(|m| m.other), Ok(nat_entry.other));
    assert_eq!(maps.nat_len(), 4);
    let low = packet("10.244.1.10", "198.51.100.10", 53, 53).headers();
    let low = translate(&low, &Quote::NONE, &maps, &SOURCE, &OWNER).expect("a free port");
    assert!(low.other.dport() >= 1024);
}

#[test]
fn random_ports_are_for_flows_that_begin() {
    let maps = MemoryMaps::new();
    maps.configure(|config| config.random_ports = 1);
    let sent = |port| packet("10.244.1.10", "198.51.100.10", port, 80);
    let given = |headers: &Headers| {
        let nat_entry = translate(headers, &Quote::NONE, &maps, &SOURCE, &OWNER).expect("a free port");
        nat_entry.other.dport()
    };
    let id = |sent: &FrameFields| sent.headers().tuple.sport();
    for kind in ["UDP", "TCP", "a query"] {
        let of = |sent: FrameFields| match kind {
            "UDP" => sent,
            "TCP" => sent.tcp(tcp::SYN),
            _ => sent.clone().echo(id(&sent)),
        };
        let flows: Vec<Headers> = (4000..4016).map(|port| of(sent(port)).headers()).collect();
        let ports: Vec<u16> = flows.iter().map(given).collect();
        let kept = flows.iter().zip(&ports).filter(|(flow, port)| flow.tuple.sport() == **port).count();
        assert!(kept <= 1, "{kind}: {kept} of 16 have their own port");
        assert_eq!(flows.iter().map(given).collect::<Vec<_>>(), ports, "{kind}: and keep what they have got");
    }
    let under_way = sent(5000).tcp(tcp::ACK).headers();
    assert_eq!(given(&under_way), 5000);
}

/// At an egress IP that is shared with a Service, neither as the flow's own port nor by a search.
#[test]
fn ports_of_a_service_are_not_given() {
    both(|cast, maps| {
        let ports = PortRange { first: 2000, last: 2002 };
        let pool = SnatSource { ports, ..SnatSource::egress_only(addr(cast.egress)) };
        for (protocol, port) in [(PROTO_UDP, 2001), (PROTO_TCP, 2000)] {
            maps.exposed.borrow_mut().insert(ExposedPort::new(pool.address, protocol, port), 0);
        }
        let asked = |packet: FrameFields| {
            translate(&packet.headers(), &Quote::NONE, maps, &pool, &OWNER).map(|nat_entry| nat_entry.other.dport())
        };
        let elsewhere = packet(cast.pod, cast.world, 2001, 81);
        assert_eq!(asked(elsewhere), Ok(2001), "a Service's port at an address that is not shared");
        maps.put_owned(OWNER.egress_id, maps.owned(OWNER.egress_id).expect("it is owned").shared(OWNER.egress_id));
        assert!(maps.owned(OWNER.egress_id).is_some_and(Owned::is_shared));
        let udp = |port| asked(packet(cast.pod, cast.world, port, 80));
        assert_eq!(udp(2002), Ok(2002));
        assert_eq!(udp(2001), Ok(2000), "the only free one");
        assert_eq!(udp(2000), Err(Verdict::PortsExhausted));
        let tcp = |port, flags| asked(packet(cast.pod, cast.world, port, 80).tcp(flags));
        assert_eq!(tcp(2001, tcp::SYN), Ok(2001), "the Service's port is UDP's");
        assert_eq!(tcp(2000, tcp::ACK), Err(Verdict::PortTaken), "a connection under way");
        assert_eq!(asked(packet(cast.pod, cast.world, 0, 0).echo(2001)), Ok(2001), "an identifier is no port");
        maps.assert_paired();
    });
}

#[test]
fn refuses_only_when_no_port_is_free() {
    let maps = MemoryMaps::new();
    let range = PortRange { first: 61000, last: 61009 };
    for pod in 0..10u8 {
        let headers = packet(&std::format!("10.244.1.{}", 10 + pod), "198.51.100.10", 4000, 80).headers();
        assert!(translate(&headers, &Quote::NONE, &maps, &SnatSource { ports: range, ..SOURCE }, &OWNER).is_ok());
    }
    let headers = packet("10.244.1.30", "198.51.100.10", 4000, 80).headers();
    assert_eq!(
        translate(&headers, &Quote::NONE, &maps, &SnatSource { ports: range, ..SOURCE }, &OWNER),
        Err(Verdict::PortsExhausted)
    );
    let elsewhere = packet("10.244.1.30", "198.51.100.11", 4000, 80).headers();
    assert!(
        translate(&elsewhere, &Quote::NONE, &maps, &SnatSource { ports: range, ..SOURCE }, &OWNER).is_ok(),
        "another destination is another range"
    );
    assert_eq!(maps.nat_len(), 22, "a refusal leaves no half mapping");
}

#[test]
fn a_full_map_leaves_no_half_nat_entry() {
    let maps = MemoryMaps::new();
    maps.limit_nat(3);
    let one = packet("10.244.1.10", "198.51.100.10", 4000, 80).headers();
    assert!(translate(&one, &Quote::NONE, &maps, &SOURCE, &OWNER).is_ok());
    let two = packet("10.244.1.11", "198.51.100.10", 4001, 80).headers();
    assert_eq!(translate(&two, &Quote::NONE, &maps, &SOURCE, &OWNER), Err(Verdict::MapFull));
    assert_eq!(maps.nat_len(), 2);
}

#[test]
fn a_moved_flow_keeps_its_source_port_or_is_refused() {
    let maps = MemoryMaps::new();
    let mut headers = packet("10.244.1.10", "198.51.100.10", 4000, 80).tcp(tcp::ACK).headers();
    let nat_entry = translate(&headers, &Quote::NONE, &maps, &SOURCE, &OWNER).expect("its own port is free");
    assert_eq!(nat_entry.other.dport(), 4000);
    headers.tuple.saddr = Addr::v4([10, 244, 1, 11]);
    assert_eq!(translate(&headers, &Quote::NONE, &maps, &SOURCE, &OWNER), Err(Verdict::PortTaken));
}

#[test]
fn another_address_makes_another_nat_entry() {
    let maps = MemoryMaps::new();
    let headers = packet("10.244.1.10", "198.51.100.10", 4000, 80).headers();
    translate(&headers, &Quote::NONE, &maps, &SOURCE, &OWNER).expect("a free port");
    let other = Addr::v4([172, 18, 0, 101]);
    let nat_entry =
        translate(&headers, &Quote::NONE, &maps, &SnatSource::egress_only(other), &OWNER).expect("a free port");
    assert_eq!(nat_entry.other.daddr, other);
    assert_eq!(maps.nat_len(), 2, "the old keys are gone together");
}

/// The pod's node has another tunnel endpoint, or a new node has the subnet of a removed one.
#[test]
fn answers_follow_the_node_that_sends() {
    let maps = MemoryMaps::new();
    for protocol_flags in [None, Some(tcp::SYN), Some(tcp::ACK)] {
        let flow = packet("10.244.2.10", "198.51.100.10", 4000, 80);
        let headers = match protocol_flags {
            None => flow.headers(),
            Some(flags) => flow.tcp(flags).headers(),
        };
        for node in [Addr::v4([172, 18, 0, 3]), Addr::v4([172, 18, 0, 9])] {
            let owner = NatOwner { origin: Origin::Remote, source_node: node, egress_id: 7 };
            let nat_entry = translate(&headers, &Quote::NONE, &maps, &SOURCE, &owner).expect("its own port is free");
            assert_eq!((nat_entry.source_node, nat_entry.other.dport()), (node, 4000));
            let answers = maps.nat_peek(&nat_entry.other).expect("the reverse key");
            assert_eq!(answers.source_node, node, "{protocol_flags:?}");
            maps.assert_paired();
        }
    }
    assert_eq!(maps.nat_len(), 4, "one of UDP and one of TCP");
}

#[test]
fn echo_changes_its_identifier_in_both_places() {
    let maps = MemoryMaps::new();
    let one = packet("10.244.1.10", "198.51.100.10", 0, 0).echo(500).headers();
    let nat_entry = translate(&one, &Quote::NONE, &maps, &SOURCE, &OWNER).expect("a free id");
    let reverse = nat_entry.other;
    assert_eq!(reverse.sport(), reverse.dport());
    assert!(reverse.dport() >= 1024);
}

#[test]
fn a_port_search_in_a_full_map_reports_a_full_map() {
    let maps = MemoryMaps::new();
    let one = packet("10.244.1.10", "198.51.100.10", 4000, 80).headers();
    assert!(translate(&one, &Quote::NONE, &maps, &SOURCE, &OWNER).is_ok());
    maps.limit_nat(2);
    let two = packet("10.244.1.11", "198.51.100.10", 4000, 80).headers();
    assert_eq!(
        translate(&two, &Quote::NONE, &maps, &SOURCE, &OWNER),
        Err(Verdict::MapFull),
        "ports are free, the map is not"
    );
    maps.limit_nat(3);
    assert_eq!(translate(&two, &Quote::NONE, &maps, &SOURCE, &OWNER), Err(Verdict::MapFull));
    assert_eq!(maps.nat_len(), 2, "the reverse key was taken back");
    maps.assert_paired();
}

#[test]
fn every_protocol_and_family_has_two_keys_that_name_each_other() {
    both(|cast, maps| {
        let pool = SnatSource::egress_only(addr(cast.egress));
        for pod in [cast.pod, cast.known_pod, cast.unknown_pod] {
            for packet in [
                packet(pod, cast.world, 4000, 80),
                packet(pod, cast.world, 4000, 80).tcp(tcp::SYN),
                packet(pod, cast.world, 0, 0).echo(4000),
            ] {
                let headers = packet.headers();
                let nat_entry = translate(&headers, &Quote::NONE, maps, &pool, &OWNER).expect("a free port");
                let reverse = nat_entry.other;
                assert_eq!((reverse.saddr, reverse.daddr), (addr(cast.world), pool.address));
                assert_eq!(reverse.protocol, headers.tuple.protocol);
            }
        }
        assert_eq!(maps.nat_len(), 18);
        maps.assert_paired();
    });
}

#[test]
fn a_reverse_key_that_another_cpu_claimed_for_this_flow_is_adopted() {
    both(|cast, maps| {
        let headers = packet(cast.pod, cast.world, 4000, 80).headers();
        let pool = SnatSource::egress_only(addr(cast.egress));
        let reverse = reverse_key(&headers.tuple, &pool.address, 4000);
        assert_eq!(maps.claim_nat(&reverse, &headers.tuple, &OWNER), ClaimOutcome::Claimed);
        let nat_entry = translate(&headers, &Quote::NONE, maps, &pool, &OWNER).expect("adopted");
        assert_eq!(nat_entry.other, reverse);
        assert_eq!(maps.nat_len(), 2);
        maps.assert_paired();
    });
}

/// The map is full for this CPU's forward key, and another CPU gets the last place for the same flow: it has adopted
/// the reverse key.
#[test]
fn a_reverse_key_that_another_cpu_adopted_is_not_taken_back() {
    both(|cast, maps| {
        let headers = packet(cast.pod, cast.world, 4000, 80).headers();
        let pool = SnatSource::egress_only(addr(cast.egress));
        maps.limit_nat(1);
        maps.when_nat_is_full(move |maps| {
            maps.limit_nat(2);
            assert!(translate(&headers, &Quote::NONE, maps, &pool, &OWNER).is_ok(), "the other CPU");
        });
        assert_eq!(translate(&headers, &Quote::NONE, maps, &pool, &OWNER), Err(Verdict::MapFull));
        assert_eq!(maps.nat_len(), 2);
        maps.assert_paired();
        assert!(translate(&headers, &Quote::NONE, maps, &pool, &OWNER).is_ok(), "the next packet");
    });
}

#[test]
fn a_lone_forward_key_waits_for_the_sweep() {
    both(|cast, maps| {
        let headers = packet(cast.pod, cast.world, 4000, 80).headers();
        let old = SnatSource::egress_only(addr(cast.foreign_egress));
        let reverse = translate(&headers, &Quote::NONE, maps, &old, &OWNER).expect("a free port").other;
        assert!(maps.forget_nat(&reverse) && !maps.forget_nat(&reverse));
        let pool = SnatSource::egress_only(addr(cast.egress));
        assert_eq!(translate(&headers, &Quote::NONE, maps, &pool, &OWNER), Err(Verdict::ClaimLost));
        assert_eq!(maps.nat_len(), 1, "the new reverse key was taken back");
    });
}

#[test]
fn an_association_begins_with_any_port_and_continues_with_its_own() {
    both(|cast, maps| {
        let pool = SnatSource::egress_only(addr(cast.egress));
        let shown = |pod, port, chunk| {
            let headers = packet(pod, cast.world, port, 80).sctp(chunk).headers();
            translate(&headers, &Quote::NONE, maps, &pool, &OWNER).map(|nat_entry| nat_entry.other.dport())
        };
        assert_eq!(shown(cast.pod, 4000, sctp::INIT), Ok(4000), "it is free");
        let other = shown(cast.known_pod, 4000, sctp::INIT).expect("a free port");
        assert!(other >= 1024 && other != 4000);
        assert_eq!(shown(cast.known_pod, 4000, DATA), Ok(other), "now it has one");
        assert!(shown(cast.pod, 22, sctp::INIT).expect("a free port") >= 1024);
        // As after a move of the gateway.
        assert_eq!(shown(cast.pod, 4001, DATA), Ok(4001));
        assert_eq!(shown(cast.known_pod, 4001, DATA), Err(Verdict::PortTaken));
        assert_eq!(shown(cast.pod, 23, DATA), Err(Verdict::PortTaken));
        let udp = packet(cast.known_pod, cast.world, 4000, 80).headers();
        assert_eq!(
            translate(&udp, &Quote::NONE, maps, &pool, &OWNER).map(|nat_entry| nat_entry.other.dport()),
            Ok(4000)
        );
        maps.assert_paired();
    });
}

#[test]
fn the_first_fragment_of_an_association_keeps_its_port_or_is_refused() {
    both(|cast, maps| {
        let pool = SnatSource::egress_only(addr(cast.egress));
        let begin = |pod| {
            let init = packet(pod, cast.world, 4000, 80).sctp(sctp::INIT);
            *translate(&init.headers(), &Quote::NONE, maps, &pool, &OWNER).expect("a free port")
        };
        let (kept, changed) = (begin(cast.pod), begin(cast.known_pod));
        let port = changed.other.dport();
        let whole = |pod| packet(pod, cast.world, 4000, 80).sctp(DATA);
        let reply = |port| packet(cast.world, cast.egress, 80, port).sctp(DATA);
        let refused = Err(Verdict::SctpFragment);
        let back = |nat_entry: &NatEntry| Rewrite::reverse(maps.nat_peek(&nat_entry.other).expect("the reverse key"));
        for (nat_entry, sent, got, first) in
            [(&kept, whole(cast.pod), reply(4000), Ok(())), (&changed, whole(cast.known_pod), reply(port), refused)]
        {
            let (out, back) = (Rewrite::snat(nat_entry), back(nat_entry));
            for (fragment, expected) in [(None, Ok(())), (Some((0, true)), first), (Some((9, false)), Ok(()))] {
                let cut = |whole: &FrameFields| match fragment {
                    Some((offset, more)) => whole.clone().fragment(offset, more),
                    None => whole.clone(),
                };
                assert_eq!(out.check(&cut(&sent).headers()), expected, "{fragment:?}");
                assert_eq!(back.check(&cut(&got).arriving()), expected, "{fragment:?}");
            }
        }
        let udp = packet(cast.known_pod, cast.world, 4000, 80).fragment(0, true).headers();
        assert_eq!(Rewrite::snat(&changed).check(&udp), Ok(()), "corrected by difference alone");
    });
}

#[test]
fn a_protocol_without_ports_serves_one_pod_towards_each_destination() {
    both(|cast, maps| {
        let pool = SnatSource::egress_only(addr(cast.egress));
        for protocol in [4, 47, 50, 255] {
            let sent = |pod, to| packet(pod, to, 0, 0).protocol(protocol).headers();
            let first = sent(cast.pod, cast.world);
            let nat_entry = translate(&first, &Quote::NONE, maps, &pool, &OWNER).expect("a free port");
            assert_eq!((nat_entry.other.saddr, nat_entry.other.daddr), (addr(cast.world), pool.address));
            assert_eq!(nat_entry.other.dport(), 0);
            let second = translate(&sent(cast.known_pod, cast.world), &Quote::NONE, maps, &pool, &OWNER);
            assert_eq!(second, Err(Verdict::ProtocolTaken));
            assert!(translate(&sent(cast.known_pod, cast.excluded), &Quote::NONE, maps, &pool, &OWNER).is_ok());
            assert!(translate(&first, &Quote::NONE, maps, &pool, &OWNER).is_ok());
        }
        maps.assert_paired();
    });
}

#[test]
fn on_the_node_address_no_port_of_the_host_is_taken() {
    both(|cast, maps| {
        let pool = of_node(addr(cast.node), 61000, 65535);
        let owner = NatOwner { origin: Origin::Stack, ..OWNER };
        let sent = |port, protocol| packet(cast.pod, cast.other_node, port, 80).protocol(protocol).headers();
        for (own, kept) in [(4000, false), (61007, true)] {
            let headers = packet(cast.pod, cast.other_node, own, 80).sctp(sctp::INIT).headers();
            let nat_entry = translate(&headers, &Quote::NONE, maps, &pool, &owner).expect("a free port");
            let port = nat_entry.other.dport();
            assert!((61000..=65535).contains(&port) && (port == own) == kept, "{own}: {port}");
        }
        // A tunnel of the node itself may end there.
        assert_eq!(translate(&sent(0, 47), &Quote::NONE, maps, &pool, &owner), Err(Verdict::ProtocolTaken));
    });
}

/// For every pod: the other ports are the host's.
#[test]
fn an_egress_ip_of_the_host_has_the_ports_of_the_nodes_address() {
    both(|cast, maps| {
        let mut config = maps.config.get();
        let owned = Owned::new(ID, addr(cast.node), 1, [2, 0, 0, 0, 0, 1], 1500).hosts(ID);
        let owner = NatOwner { egress_id: ID, ..OWNER };
        let asked = |headers: &Headers, config: &Config| {
            translate(headers, &Quote::NONE, maps, &SnatSource::of(&owned, config), &owner)
                .map(|entry| entry.other.dport())
        };
        let ports = config.node_ports;
        for own in [4000, ports.first, 40_000] {
            let port = asked(&packet(cast.pod, cast.world, own, 80).headers(), &config).expect("a free port");
            assert!((ports.first..=ports.last).contains(&port), "{own}: {port}");
            assert_eq!(port == own, own == ports.first, "a port of the range is kept");
        }
        let gre = packet(cast.pod, cast.world, 0, 0).protocol(47).headers();
        assert_eq!(asked(&gre, &config), Err(Verdict::ProtocolTaken), "a tunnel of the node may end there");
        config.node_ports = PortRange { first: 0, last: 0 };
        let udp = packet(cast.pod, cast.world, 5000, 80).headers();
        assert_eq!(asked(&udp, &config), Err(Verdict::NoNodeAddress), "the host leaves none to NAT");
    });
}

#[test]
fn a_port_outside_the_nat_range_is_given_up() {
    both(|cast, maps| {
        let owner = NatOwner { origin: Origin::Stack, ..OWNER };
        let pool = |first, last| of_node(addr(cast.node), first, last);
        let udp = packet(cast.pod, cast.other_node, 4000, 80).headers();
        let old = translate(&udp, &Quote::NONE, maps, &pool(61000, 61009), &owner).expect("a free port").other;
        let new = translate(&udp, &Quote::NONE, maps, &pool(62000, 62009), &owner).expect("a free port").other;
        assert!((62000..=62009).contains(&new.dport()));
        assert!(maps.nat_peek(&old).is_none(), "its answers are the host's");
        maps.assert_paired();
    });
}

#[test]
fn an_error_of_a_pod_has_the_egress_ip_of_its_flow() {
    both(|cast, maps| {
        let pool = SnatSource::egress_only(addr(cast.egress));
        let sent = packet(cast.pod, cast.world, 22, 80).headers();
        let nat_entry = *translate(&sent, &Quote::NONE, maps, &pool, &OWNER).expect("a free port");
        let error = packet(cast.pod, cast.world, 0, 0).unreachable().headers();
        let on_error = |quoted: &FrameFields| {
            let quote = quoted.quoted(Direction::Ingress);
            translate(&error, &quote, maps, &pool, &OWNER).map(|nat_entry| nat_entry.other)
        };
        assert_eq!(on_error(&packet(cast.world, cast.pod, 80, 22)), Ok(nat_entry.other));
        for foreign in [
            packet(cast.world, cast.pod, 81, 22),
            packet(cast.world, cast.known_pod, 80, 22),
            packet(cast.excluded, cast.pod, 80, 22),
            packet(cast.pod, cast.world, 22, 80),
            packet(cast.world, cast.pod, 80, 22).tcp(tcp::ACK),
        ] {
            assert_eq!(on_error(&foreign), Err(Verdict::IcmpUnmatched), "{foreign:?}");
        }
        let nothing = translate(&error, &Quote::NONE, maps, &pool, &OWNER);
        assert_eq!(nothing, Err(Verdict::IcmpUnmatched));
        assert_eq!(maps.nat_len(), 2, "it begins no flow");
    });
}

#[test]
fn only_answers_to_queries_count_as_received() {
    both(|cast, maps| {
        let pool = SnatSource::egress_only(addr(cast.egress));
        let ping = packet(cast.pod, cast.world, 0, 0).echo(9).headers();
        translate(&ping, &Quote::NONE, maps, &pool, &OWNER).expect("a free id");
        let error = packet(cast.pod, cast.world, 0, 0).unreachable().headers();
        let on_error =
            |quoted: FrameFields| translate(&error, &quoted.quoted(Direction::Ingress), maps, &pool, &OWNER).is_ok();
        assert!(on_error(packet(cast.world, cast.pod, 0, 0).echo_reply(9)));
        assert!(!on_error(packet(cast.world, cast.pod, 0, 0).echo(9)));
    });
}
