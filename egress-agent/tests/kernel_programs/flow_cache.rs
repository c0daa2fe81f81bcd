//! The flow cache: it serves packets, and every change of a flow invalidates it at once.
//!
//! An entry lives an eighth of a second. So tests that it serves are retried; tests that it is invalidated cannot fail
//! by timing.

use egress_common::abi::{
    Direction, Owned, PodEntry, PolicyEntry, PolicyEntryKey, PolicySlot, Tuple, Verdict, WhenEmpty,
};
use egress_common::decide::phase;

use crate::cast::{FamilyAddresses, V4, addr};
use crate::devices::{FURTHER, OWNED_MAC, UPLINK};
use crate::frames::{ACK, Body, FIN, FrameSpec, RST, SYN, ip, packet};
use crate::races::{CPUS, pin};
use crate::stage::{FROM_NETDEV, FROM_POD, REDIRECT, Stage, TO_POD, TestRun, UPLINK_MAC, both, test_run};

/// Runs on one CPU, with a decision number.
fn on_one_cpu(test: impl Fn(&mut Stage, &FamilyAddresses) + Send + 'static) {
    both(move |stage, cast| {
        pin(CPUS[0]);
        decide(stage, 1);
        test(stage, cast);
        // Restores the maps for the next family.
        for key in stage.nat.keys().collect::<Vec<_>>() {
            stage.nat.remove(&key.expect("a key")).expect("remove a mapping");
        }
        for key in stage.flows.keys().collect::<Vec<_>>() {
            stage.flows.remove(&key.expect("a key")).expect("remove a flow");
        }
    });
}

fn decide(stage: &mut Stage, decisions: u32) {
    stage.configure(|config| config.decisions = decisions);
}

fn out(cast: &FamilyAddresses) -> FrameSpec {
    packet(cast.pod, cast.world, 4000, 80).tcp(ACK)
}

fn back(cast: &FamilyAddresses) -> FrameSpec {
    packet(cast.world, cast.egress, 80, 4000).tcp(ACK).with(|packet| packet.dmac = UPLINK_MAC)
}

/// Three packets: the first looks up the next hop, the second fills the cache, the third may be served by it.
fn warm(stage: &mut Stage, cast: &FamilyAddresses) {
    for _ in 0..3 {
        stage.forwards(&FROM_POD, &out(cast), Verdict::SnatHere, &out(cast).snat(cast.egress, 4000).hop());
    }
    for _ in 0..3 {
        stage.forwards(&FROM_NETDEV, &back(cast), Verdict::ReplyHere, &back(cast).dnat(cast.pod, 4000).hop());
    }
}

fn forward(cast: &FamilyAddresses) -> Tuple {
    Tuple::new(Direction::Egress, addr(cast.pod), addr(cast.world), 4000, 80, 6)
}

fn reverse(cast: &FamilyAddresses) -> Tuple {
    Tuple::new(Direction::Ingress, addr(cast.world), addr(cast.egress), 80, 4000, 6)
}

/// Changes the map without a new generation.
fn remove_all(stage: &mut Stage, cast: &FamilyAddresses) {
    for key in [forward(cast), reverse(cast)] {
        stage.nat.remove(&key).expect("remove a mapping");
    }
    stage.flows.remove(&forward(cast)).expect("remove a flow");
}

#[test]
fn the_next_packets_need_no_other_map() {
    on_one_cpu(|stage, cast| {
        let is_served = (0..50).any(|attempt| {
            decide(stage, 1 + 2 * attempt);
            warm(stage, cast);
            remove_all(stage, cast);
            stage.forwards(&FROM_POD, &out(cast), Verdict::SnatHere, &out(cast).snat(cast.egress, 4000).hop());
            let is_served = stage.entries() == [0; 3];
            // But not after its lifetime.
            decide(stage, 2 + 2 * attempt);
            stage.forwards(&FROM_POD, &out(cast), Verdict::SnatHere, &out(cast).snat(cast.egress, 4000).hop());
            assert_eq!(stage.entries(), [2, 1, 0], "begun again, in mid-stream");
            is_served
        });
        assert!(is_served, "fifty times too slow, or never");
    });
}

#[test]
fn an_entry_expires() {
    on_one_cpu(|stage, cast| {
        warm(stage, cast);
        remove_all(stage, cast);
        std::thread::sleep(std::time::Duration::from_millis(200));
        stage.forwards(&FROM_POD, &out(cast), Verdict::SnatHere, &out(cast).snat(cast.egress, 4000).hop());
        assert_eq!(stage.entries(), [2, 1, 0]);
    });
}

#[test]
fn a_change_of_the_agent_invalidates_the_cache_at_once() {
    on_one_cpu(|stage, cast| {
        warm(stage, cast);
        // The policy gets another address, on another node.
        let elsewhere = PolicySlot::remote(addr(cast.away_egress), addr(V4.other_node));
        let policy = PolicyEntry::with_slots(WhenEmpty::Drop, &[elsewhere]).expect("one slot");
        stage.policy.insert(PolicyEntryKey::new(cast.here, cast.family), policy, 0).expect("a policy");
        decide(stage, 2);
        stage.run_frame(&FROM_POD, &out(cast).frame(), Verdict::CutAnswered);
        stage.fill(cast);
        decide(stage, 3);
        warm(stage, cast);
        stage.put_pod(cast.pod, PodEntry::known());
        decide(stage, 4);
        stage.passes(&FROM_POD, &out(cast), Verdict::NotSelected);
        stage.fill(cast);
        decide(stage, 5);
        warm(stage, cast);
        stage.owned.remove(&cast.here).expect("disown");
        stage.owned_addr.remove(&addr(cast.egress)).expect("disown");
        decide(stage, 6);
        stage.drops(&FROM_POD, &out(cast), Verdict::NotGateway);
        stage.passes(&FROM_NETDEV, &back(cast), Verdict::NotOurs);
    });
}

#[test]
fn a_route_change_invalidates_the_cache_at_once() {
    on_one_cpu(|stage, cast| {
        warm(stage, cast);
        // A former router.
        let former = [2, 0, 0, 0, 9, 9];
        let mut mapping = stage.nat.get(&forward(cast), 0).expect("a mapping");
        mapping.hop.dmac = former;
        mapping.hop.seal(mapping.seal);
        stage.nat.insert(forward(cast), mapping, 0).expect("a mapping");
        decide(stage, 2);
        for _ in 0..3 {
            let ran = stage.run_frame(&FROM_POD, &out(cast).frame(), Verdict::SnatHere);
            assert_eq!(ran.frame[..6], former);
        }
        stage.configure(|config| (config.decisions, config.route_generation) = (2, config.route_generation + 1));
        let ran = stage.run_frame(&FROM_POD, &out(cast).frame(), Verdict::SnatHere);
        assert_ne!(ran.frame[..6], former);
    });
}

#[test]
fn an_entry_without_a_decision_number_is_not_used() {
    on_one_cpu(|stage, cast| {
        decide(stage, 0);
        warm(stage, cast);
        remove_all(stage, cast);
        stage.forwards(&FROM_POD, &out(cast), Verdict::SnatHere, &out(cast).snat(cast.egress, 4000).hop());
        assert_eq!(stage.entries(), [2, 1, 0]);
    });
}

/// Its packets take the full path until it is answered, although those of the former connection were served from the
/// cache.
#[test]
fn a_reopened_connection_is_tracked() {
    on_one_cpu(|stage, cast| {
        warm(stage, cast);
        let state = |stage: &mut Stage, cast| {
            let of = |key: &Tuple| stage.nat.get(key, 0).expect("a mapping").state;
            [of(&forward(cast)), of(&reverse(cast)), stage.flows.get(&forward(cast), 0).expect("a flow").state]
        };
        assert_eq!(state(stage, cast), [phase::SPOKE; 3]);
        let (syn, answer) = (out(cast).tcp(SYN), back(cast).tcp(SYN | ACK));
        stage.forwards(&FROM_POD, &syn, Verdict::SnatHere, &syn.clone().snat(cast.egress, 4000).hop());
        assert_eq!(state(stage, cast), [0; 3]);
        stage.forwards(&FROM_NETDEV, &answer, Verdict::ReplyHere, &answer.clone().dnat(cast.pod, 4000).hop());
        stage.forwards(&FROM_POD, &out(cast), Verdict::SnatHere, &out(cast).snat(cast.egress, 4000).hop());
        assert_eq!(state(stage, cast), [phase::SPOKE; 3]);
    });
}

#[test]
fn a_swept_flow_is_not_served_from_the_cache() {
    on_one_cpu(|stage, cast| {
        warm(stage, cast);
        stage.configure(|config| (config.decisions, config.timeouts.tcp_established) = (1, 10));
        stage.age(11);
        assert_eq!(stage.sweep(false), 3);
        stage.drops(&FROM_NETDEV, &back(cast), Verdict::NoNatEntry);
        stage.forwards(&FROM_POD, &out(cast), Verdict::SnatHere, &out(cast).snat(cast.egress, 4000).hop());
        assert_eq!(stage.entries(), [2, 1, 0]);
    });
}

#[test]
fn answers_follow_a_flow_to_another_egress_ip() {
    on_one_cpu(|stage, cast| {
        warm(stage, cast);
        // The flow keeps its address, and another flow of the pod is independent.
        let udp = packet(cast.pod, cast.world, 4000, 80).body(Body::Udp);
        for _ in 0..3 {
            stage.forwards(&FROM_POD, &udp, Verdict::SnatHere, &udp.snat(cast.egress, 4000).hop());
        }
        // The existing NAT entry belongs to another policy: the flow gets a new one.
        let mut mapping = stage.nat.get(&forward(cast), 0).expect("a mapping");
        mapping.egress_id = cast.away;
        stage.nat.insert(forward(cast), mapping.sealed(&forward(cast)), 0).expect("a mapping");
        decide(stage, 2);
        stage.forwards(&FROM_POD, &out(cast), Verdict::SnatHere, &out(cast).snat(cast.egress, 4000).hop());
        stage.forwards(&FROM_NETDEV, &back(cast), Verdict::ReplyHere, &back(cast).dnat(cast.pod, 4000).hop());
    });
}

#[test]
fn a_reset_is_tracked_as_on_the_full_path() {
    on_one_cpu(|stage, cast| {
        warm(stage, cast);
        let phase = |stage: &Stage| {
            let mapping = |key| stage.nat.get(&key, 0).expect("a mapping");
            phase::nat_entry(&mapping(forward(cast)), Some(&mapping(reverse(cast))))
        };
        assert_eq!(phase(stage), phase::Phase::Established);
        for flags in [RST, RST | ACK, RST | ACK] {
            stage.run_frame(&FROM_NETDEV, &back(cast).tcp(flags).frame(), Verdict::ReplyHere);
            assert_eq!(phase(stage), phase::Phase::Closing);
            // Forged, so the connection continues.
            stage.run_frame(&FROM_POD, &out(cast).frame(), Verdict::SnatHere);
            assert_eq!(phase(stage), phase::Phase::Established);
            stage.run_frame(&FROM_NETDEV, &back(cast).frame(), Verdict::ReplyHere);
        }
        for (run, packet, verdict) in [
            (&FROM_POD, out(cast).tcp(FIN | ACK), Verdict::SnatHere),
            (&FROM_NETDEV, back(cast).tcp(FIN | ACK), Verdict::ReplyHere),
        ] {
            stage.run_frame(run, &packet.frame(), verdict);
        }
        assert_eq!(phase(stage), phase::Phase::Closing);
        stage.run_frame(&FROM_POD, &out(cast).tcp(SYN).frame(), Verdict::SnatHere);
        assert_eq!(phase(stage), phase::Phase::Opening);
    });
}

#[test]
fn flows_with_the_same_cache_slot_do_not_mix() {
    on_one_cpu(|stage, cast| {
        // Another pod uses each flow's port, so that each flow gets another one, which its packets must keep.
        let entry = stage.pods.get(&addr(cast.pod), 0).expect("a pod");
        stage.put_pod(cast.known_pod, entry);
        let of = |pod, port| packet(pod, cast.world, port, 80).tcp(ACK);
        let mut shown = std::collections::BTreeMap::new();
        // Checked once, because reading counters takes most of the time.
        let before = stage.packets_of(Verdict::SnatHere);
        for round in 0..3 {
            for port in 10_000..13_000 {
                for pod in [cast.pod, cast.known_pod] {
                    let syn = of(pod, port).tcp(if round == 0 { SYN } else { ACK });
                    let ran = test_run(stage.program(FROM_POD.program), &FROM_POD, &syn.frame());
                    assert_eq!(ran.action, REDIRECT);
                    let head = ran.frame[14..][..if cast.pod.contains(':') { 44 } else { 24 }].to_vec();
                    let source = (head[head.len() - 4..][..2].to_vec(), pod);
                    let known = shown.entry((pod, port)).or_insert_with(|| source.clone());
                    assert_eq!(*known, source, "{pod} {port} in round {round}");
                }
            }
        }
        assert_eq!(stage.packets_of(Verdict::SnatHere) - before, 3 * 2 * 3000);
        let ports: std::collections::BTreeSet<_> = shown.values().map(|(port, _)| port.clone()).collect();
        assert_eq!(ports.len(), shown.len(), "each has a port of its own");
        stage.fill(cast);
    });
}

#[test]
fn other_packets_take_the_full_path() {
    on_one_cpu(|stage, cast| {
        warm(stage, cast);
        let last_hop = out(cast).with(|packet| packet.ttl = 1);
        stage.passes(&FROM_POD, &last_hop, Verdict::TtlExpired);
        let long = out(cast).with(|packet| packet.data = 1600);
        stage.run_frame(&FROM_POD, &long.frame(), Verdict::MtuAnswered);
        stage.passes(&FROM_NETDEV, &back(cast).with(|packet| packet.ttl = 1), Verdict::TtlExpired);
        let long = back(cast).with(|packet| packet.data = 1600);
        stage.run_frame(&FROM_NETDEV, &long.frame(), Verdict::MtuAnswered);
        // A ping reply has the tuple of the ping.
        let ping = back(cast).body(Body::EchoRequest);
        stage.drops(&FROM_NETDEV, &ping, Verdict::NoNatEntry);
    });
}

#[test]
fn an_answer_by_another_interface_takes_the_full_path() {
    on_one_cpu(|stage, cast| {
        warm(stage, cast);
        let elsewhere = TestRun { ifindex: FURTHER, ..FROM_NETDEV };
        stage.drops(&elsewhere, &back(cast), Verdict::WrongInterface);
        stage.forwards(&FROM_NETDEV, &back(cast), Verdict::ReplyHere, &back(cast).dnat(cast.pod, 4000).hop());
    });
}

#[test]
fn another_address_of_the_policy_is_another_decision() {
    on_one_cpu(|stage, cast| {
        warm(stage, cast);
        let owned = Owned::new(cast.here, addr(cast.away_egress), UPLINK, OWNED_MAC, 1500);
        stage.owned.insert(cast.here, owned, 0).expect("own another");
        decide(stage, 2);
        stage.drops(&FROM_POD, &out(cast), Verdict::NotGateway);
        stage.fill(cast);
    });
}

#[test]
fn a_pod_that_reuses_the_tuple_of_an_inbound_connection_gets_its_egress_ip() {
    on_one_cpu(|stage, cast| {
        let syn = packet(cast.world, cast.pod, 80, 4000).tcp(SYN);
        stage.passes(&TO_POD, &syn, Verdict::InboundRemembered);
        for _ in 0..3 {
            stage.passes(&FROM_POD, &out(cast), Verdict::InboundReply);
            stage.passes(&TO_POD, &syn.clone().tcp(ACK), Verdict::NotOurs);
        }
        stage.run_frame(&FROM_POD, &out(cast).tcp(SYN).frame(), Verdict::SnatHere);
        stage.forwards(&FROM_POD, &out(cast), Verdict::SnatHere, &out(cast).snat(cast.egress, 4000).hop());
    });
}

#[test]
fn an_untranslated_flow_is_cached_until_a_decision_changes() {
    on_one_cpu(|stage, cast| {
        for (cast_from, to, verdict) in [
            (cast.known_pod, cast.world, Verdict::NotSelected),
            (cast.pod, cast.service, Verdict::ToCluster),
            (cast.pod, cast.mgmt, Verdict::ToOwnNode),
        ] {
            for body in [Body::Tcp(ACK), Body::Udp] {
                let packet = packet(cast_from, to, 5000, 80).body(body);
                for _ in 0..3 {
                    stage.passes(&FROM_POD, &packet, verdict);
                }
            }
        }
        stage.put_pod(cast.known_pod, PodEntry::selected(cast.here, 0));
        decide(stage, 2);
        let begun = packet(cast.known_pod, cast.world, 5000, 80).body(Body::Udp);
        stage.forwards(&FROM_POD, &begun, Verdict::SnatHere, &begun.snat(cast.egress, 5000).hop());
        stage.fill(cast);
    });
}

#[test]
fn ports_and_checksums_are_as_on_the_full_path() {
    on_one_cpu(|stage, cast| {
        let entry = stage.pods.get(&addr(cast.pod), 0).expect("a pod");
        stage.put_pod(cast.known_pod, entry);
        decide(stage, 2);
        for (place, body) in (0..).zip([Body::Tcp(ACK), Body::Udp, Body::UdpUnsummed]) {
            let of = |pod| packet(pod, cast.world, 6000 + place, 80).body(body);
            let begins = if body == Body::Tcp(ACK) { Body::Tcp(SYN) } else { body };
            for pod in [cast.pod, cast.known_pod] {
                stage.run_frame(&FROM_POD, &of(pod).body(begins).frame(), Verdict::SnatHere);
            }
            // The second one has a port from the search.
            let ran = stage.run_frame(&FROM_POD, &of(cast.known_pod).frame(), Verdict::SnatHere);
            let at = if ip(cast.pod).is_ipv4() { 34 } else { 54 };
            let port = u16::from_be_bytes([ran.frame[at], ran.frame[at + 1]]);
            for (pod, port) in [(cast.pod, 6000 + place), (cast.known_pod, port)] {
                let reply =
                    packet(cast.world, cast.egress, 80, port).body(body).with(|packet| packet.dmac = UPLINK_MAC);
                // Different lengths, so that checksums differ.
                for length in 0..40 {
                    let sized = |packet: FrameSpec| packet.with(|packet| packet.data = length);
                    let out = sized(of(pod));
                    stage.forwards(&FROM_POD, &out, Verdict::SnatHere, &out.snat(cast.egress, port).hop());
                    let back = sized(reply.clone());
                    stage.forwards(&FROM_NETDEV, &back, Verdict::ReplyHere, &back.dnat(pod, 6000 + place).hop());
                }
            }
        }
        stage.fill(cast);
    });
}

mod overlay;
