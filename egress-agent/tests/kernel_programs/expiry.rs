//! Lifetime of entries, and races between packets and the sweep.

use std::sync::atomic::{AtomicUsize, Ordering};

use egress_common::abi::{Direction, Flow, Holder, PodEntry, SweepMode, SweptMap, Timeouts, Tuple, Verdict};
use egress_common::decide::expiry::{GONE, INBOUND_BRIEF_SECS, PRESSED_OPENING_SECS};
use egress_common::decide::phase::WINDOW;

use crate::aging::{keys, now_ns};
use crate::cast::{FamilyAddresses, V4, V6, addr};
use crate::frames::{ACK, Body, FIN, FrameSpec, RST, SYN, packet};
use crate::races::{has_both_cpus, pin};
use crate::skips::skipped;
use crate::slow_guest;
use crate::stage::{
    FROM_NETDEV, FROM_POD, NEXT, REDIRECT, Ran, SHOT, Stage, TO_POD, TestRun, UPLINK_MAC, both, on_stage_with, test_run,
};

/// Timeouts (seconds) that distinguish the phases; short, because no entry can be older than the machine.
pub(crate) const TIMEOUTS: Timeouts =
    Timeouts { tcp_established: 40, tcp_opening: 30, tcp_closing: 10, udp: 20, icmp: 5, other: 20, unreplied: 12 };
/// Less than the difference of two phases, and more than the delays of a busy machine.
const MARGIN_SECS: u32 = 5;

fn sent(cast: &FamilyAddresses, flags: u8) -> FrameSpec {
    packet(cast.pod, cast.world, 4000, 80).tcp(flags)
}

/// Sends packets of the pod (true) and of the world in turn.
fn talk(stage: &mut Stage, cast: &FamilyAddresses, packets: &[(bool, u8)]) {
    for (from_pod, flags) in packets {
        if *from_pod {
            stage.run_frame(&FROM_POD, &sent(cast, *flags).frame(), Verdict::SnatHere);
        } else {
            let reply = packet(cast.world, cast.egress, 80, 4000).tcp(*flags).with(|p| p.dmac = UPLINK_MAC);
            stage.run_frame(&FROM_NETDEV, &reply.frame(), Verdict::ReplyHere);
        }
    }
}

/// Entries survive until just before the phase's timeout, and not after it.
fn lives(stage: &mut Stage, secs: u32) {
    let before = stage.entries();
    assert_ne!(before[..2], [0, 0], "something to look at");
    stage.age(u64::from(secs - MARGIN_SECS));
    assert_eq!((stage.sweep(false), stage.entries()), (0, before));
    stage.age(u64::from(secs) + 1);
    stage.sweep(false);
    assert_eq!(stage.entries(), [0; 3]);
}

#[test]
fn a_connection_lives_as_long_as_its_phase_says() {
    const OPEN: [(bool, u8); 3] = [(true, SYN), (false, SYN | ACK), (true, ACK)];
    let with = |more: &[(bool, u8)]| [&OPEN[..], more].concat();
    both(move |stage, cast| {
        stage.configure(|config| config.timeouts = TIMEOUTS);
        for (packets, secs) in [
            (OPEN[..1].to_vec(), TIMEOUTS.tcp_opening),
            (OPEN.to_vec(), TIMEOUTS.tcp_established),
            (with(&[(true, FIN | ACK)]), TIMEOUTS.tcp_established),
            (with(&[(true, FIN | ACK), (false, FIN | ACK), (true, ACK)]), TIMEOUTS.tcp_closing),
            (with(&[(false, RST)]), TIMEOUTS.tcp_closing),
            (with(&[(false, RST), (true, ACK)]), TIMEOUTS.tcp_established),
            (with(&[(false, SYN)]), TIMEOUTS.tcp_established),
            (with(&[(true, FIN | ACK), (false, FIN | ACK), (true, SYN)]), TIMEOUTS.tcp_opening),
        ] {
            talk(stage, cast, &packets);
            lives(stage, secs);
        }
        stage.configure(|_| ());
    });
}

/// A server that streams to a silent pod refreshes the NAT entry and the flow; redirected packets are no inbound
/// connection, even without a flow.
#[test]
fn an_answer_refreshes_flow_and_nat_entry_and_creates_none() {
    both(|stage, cast| {
        stage.configure(|config| config.timeouts = Timeouts { unreplied: TIMEOUTS.udp, ..TIMEOUTS });
        let asked = packet(cast.pod, cast.world, 4000, 53);
        stage.run_frame(&FROM_POD, &asked.frame(), Verdict::SnatHere);
        let key = *stage.flows.keys().collect::<Result<Vec<_>, _>>().expect("the keys").first().expect("a flow");
        let answer = packet(cast.world, cast.egress, 53, 4000).with(|packet| packet.dmac = UPLINK_MAC);
        let delivered = packet(cast.world, cast.pod, 53, 4000);
        for _ in 0..2 {
            stage.age(u64::from(TIMEOUTS.udp - MARGIN_SECS));
            // Invalidates cached flows of other tests.
            stage.turn();
            let aged = stage.flows.get(&key, 0).expect("a flow").last_seen_ns;
            let ran = stage.run_frame(&FROM_NETDEV, &answer.frame(), Verdict::ReplyHere);
            assert!(stage.flows.get(&key, 0).expect("a flow").last_seen_ns > aged, "kept alive");
            let signed = TestRun { priority: ran.priority, ..TO_POD };
            let left = stage.run_frame(&signed, &delivered.frame(), Verdict::NotOurs);
            assert_eq!(left, Ran::plain(NEXT, delivered.frame(), 0), "without the sign");
        }
        stage.flows.remove(&key).expect("a flow");
        stage.datagrams.remove(&key).expect("noted");
        let ran = stage.run_frame(&FROM_NETDEV, &answer.frame(), Verdict::ReplyHere);
        stage.run_frame(&TestRun { priority: ran.priority, ..TO_POD }, &delivered.frame(), Verdict::NotOurs);
        assert_eq!(stage.entries()[1..], [0, 0]);
        stage.run_frame(&FROM_POD, &asked.frame(), Verdict::SnatHere);
        // The next family begins with empty maps.
        stage.age(u64::from(3 * TIMEOUTS.udp) + 1);
        stage.sweep(false);
        stage.configure(|_| ());
    });
}

/// A pod can create any number of them, so they expire long before answered ones.
#[test]
fn an_unanswered_datagram_expires_soon() {
    both(|stage, cast| {
        stage.configure(|config| config.timeouts = TIMEOUTS);
        let asked = packet(cast.pod, cast.world, 4000, 53).body(Body::Udp).frame();
        let answer = packet(cast.world, cast.egress, 53, 4000).body(Body::Udp).with(|p| p.dmac = UPLINK_MAC).frame();
        for _ in 0..2 {
            stage.run_frame(&FROM_POD, &asked, Verdict::SnatHere);
        }
        lives(stage, TIMEOUTS.unreplied);
        stage.run_frame(&FROM_POD, &asked, Verdict::SnatHere);
        stage.run_frame(&FROM_NETDEV, &answer, Verdict::ReplyHere);
        stage.age(u64::from(TIMEOUTS.udp - MARGIN_SECS));
        assert_eq!((stage.sweep(true), stage.entries()), (0, [2, 1, 0]), "answered");
        stage.age(u64::from(TIMEOUTS.udp) + 1);
        stage.sweep(false);
        assert_eq!(stage.entries(), [0, 1, 0], "the flow outlives its mapping");
        stage.age(u64::from(3 * TIMEOUTS.udp) + 1);
        stage.sweep(false);
        // Under pressure.
        stage.configure(|config| config.timeouts = Timeouts { unreplied: 60, udp: 60, ..TIMEOUTS });
        stage.run_frame(&FROM_POD, &asked, Verdict::SnatHere);
        stage.age(u64::from(PRESSED_OPENING_SECS) + 1);
        assert_eq!((stage.sweep(false), stage.sweep(true)), (0, 3));
        stage.configure(|_| ());
    });
}

/// Flows beyond a pod's quota are refused; other pods are not affected.
#[test]
fn a_pod_at_its_quota_is_refused_and_other_pods_are_not() {
    on_stage_with(&[], |stage| {
        let quota = |stage: &mut Stage, pod, policy| {
            stage.configure(|config| {
                (config.timeouts, config.pod_quota, config.policy_quota) = (TIMEOUTS, pod, policy);
            });
        };
        for cast in [V4, V6] {
            stage.select_as(cast.known_pod, cast.pod);
            let to = |pod, port| packet(pod, cast.world, 4000, port).body(Body::Udp);
            quota(stage, 8, 12);
            for port in 1..=8 {
                stage.run_frame(&FROM_POD, &to(cast.pod, port).frame(), Verdict::SnatHere);
            }
            stage.drops_all(&FROM_POD, (9..20).map(|port| to(cast.pod, port)), Verdict::QuotaExceeded);
            stage.run_frame(&FROM_POD, &to(cast.pod, 8).frame(), Verdict::SnatHere);
            // Another pod of the same policy gets the rest of the policy's quota, and one of another policy its own
            // quota.
            for port in 1..=4 {
                stage.run_frame(&FROM_POD, &to(cast.known_pod, port).frame(), Verdict::SnatHere);
            }
            stage.drops(&FROM_POD, &to(cast.known_pod, 5), Verdict::QuotaExceeded);
            stage.run_frame(&FROM_POD, &to(cast.away_pod, 1).frame(), Verdict::ToGateway);
            // Sweeps count the same.
            stage.sweep(false);
            let held = |stage: &Stage, holder| stage.shares.get(&holder, 0).map(|of| (of.flows, of.nat_entries)).ok();
            let pod = Holder::pod(addr(cast.pod));
            assert_eq!(held(stage, pod), Some((8, 8)));
            assert_eq!(held(stage, Holder::policy(cast.here)), Some((12, 12)));
            assert_eq!(held(stage, Holder::pod(addr(cast.away_pod))), Some((1, 0)), "mapped elsewhere");
            stage.drops(&FROM_POD, &to(cast.pod, 9), Verdict::QuotaExceeded);
            // A pod without entries has its full quota again.
            stage.age(u64::from(TIMEOUTS.unreplied) + 1);
            stage.sweep(false);
            assert_eq!((held(stage, pod), stage.shares.keys().count()), (None, 0));
            stage.run_frame(&FROM_POD, &to(cast.pod, 9).frame(), Verdict::SnatHere);
            stage.age(u64::from(TIMEOUTS.unreplied) + 1);
            stage.sweep(false);
            stage.put_pod(cast.known_pod, PodEntry::known());
        }
    });
}

/// A forged FIN or RST with an unexpected sequence number.
#[test]
fn a_blind_end_shortens_no_connection() {
    both(|stage, cast| {
        stage.configure(|config| config.timeouts = TIMEOUTS);
        for (pods_last, end) in [(ACK, RST), (ACK, RST | ACK), (FIN | ACK, FIN | ACK), (FIN | ACK, RST)] {
            talk(stage, cast, &[(true, SYN), (false, SYN | ACK), (true, ACK), (true, pods_last)]);
            // The pod has acknowledged 2.
            for sequence in [2 + WINDOW, 0x8000_0002, 0x1234_5678, u32::MAX - 100] {
                let blind = |to| packet(cast.world, to, 80, 4000).tcp(end).with(|packet| packet.sequence = sequence);
                let arrives = blind(cast.egress).with(|packet| packet.dmac = UPLINK_MAC);
                stage.run_frame(&FROM_NETDEV, &arrives.frame(), Verdict::ReplyHere);
                stage.passes(&TO_POD, &blind(cast.pod), Verdict::NotOurs);
            }
            stage.age(u64::from(TIMEOUTS.tcp_closing) + 1);
            assert_eq!((stage.sweep(false), stage.entries()), (0, [2, 1, 0]), "{end}");
            // The server's push.
            talk(stage, cast, &[(false, ACK)]);
            lives(stage, TIMEOUTS.tcp_established);
        }
        stage.configure(|_| ());
    });
}

#[test]
fn a_blind_end_shortens_no_connection_from_outside() {
    both(|stage, cast| {
        stage.configure(|config| config.timeouts = TIMEOUTS);
        let arrives = |flags| packet(cast.world, cast.pod, 5000, 80).tcp(flags);
        stage.passes(&TO_POD, &arrives(SYN), Verdict::InboundRemembered);
        for flags in [SYN | ACK, ACK, FIN | ACK] {
            stage.passes(&FROM_POD, &packet(cast.pod, cast.world, 80, 5000).tcp(flags), Verdict::InboundReply);
        }
        for end in [RST, FIN | ACK] {
            let blind = arrives(end).with(|packet| packet.sequence = 0x1234_5678);
            stage.passes(&TO_POD, &blind, Verdict::NotOurs);
        }
        stage.age(u64::from(TIMEOUTS.tcp_closing) + 1);
        stage.sweep(false);
        assert_eq!(stage.entries(), [0, 0, 1]);
        stage.passes(&TO_POD, &arrives(RST), Verdict::NotOurs);
        stage.age(u64::from(TIMEOUTS.tcp_closing) + 1);
        stage.sweep(false);
        assert_eq!(stage.entries(), [0; 3], "what fits counts");
        stage.configure(|_| ());
    });
}

#[test]
fn a_connection_from_outside_lives_as_long_as_its_phase_says() {
    both(|stage, cast| {
        stage.configure(|config| config.timeouts = TIMEOUTS);
        let arrives = |pod, flags| packet(cast.world, pod, 5000, 80).tcp(flags);
        for (flags, secs) in [
            (vec![SYN], INBOUND_BRIEF_SECS),
            (vec![SYN, ACK], TIMEOUTS.tcp_established),
            (vec![SYN, ACK, FIN | ACK], TIMEOUTS.tcp_closing),
            (vec![SYN, ACK, RST], TIMEOUTS.tcp_closing),
            (vec![SYN, ACK, RST, ACK], TIMEOUTS.tcp_established),
            (vec![SYN, ACK, FIN | ACK, SYN], INBOUND_BRIEF_SECS),
        ] {
            for (index, flags) in flags.iter().enumerate() {
                let verdict = if index == 0 { Verdict::InboundRemembered } else { Verdict::NotOurs };
                stage.passes(&TO_POD, &arrives(cast.known_pod, *flags), verdict);
            }
            for (age, kept) in [(secs - MARGIN_SECS, 1), (secs + 1, 0)] {
                stage.age(u64::from(age));
                stage.sweep(false);
                assert_eq!(stage.entries(), [0, 0, kept], "{flags:?} after {age} s");
            }
        }
        stage.configure(|_| ());
    });
}

#[test]
fn under_pressure_unanswered_entries_expire_first() {
    both(|stage, cast| {
        stage.configure(|config| config.timeouts = TIMEOUTS);
        talk(stage, cast, &[(true, SYN), (false, SYN | ACK), (true, ACK)]);
        for port in 4001..4011 {
            stage.run_frame(&FROM_POD, &packet(cast.pod, cast.world, port, 80).tcp(SYN).frame(), Verdict::SnatHere);
        }
        stage.age(15);
        assert_eq!((stage.sweep(false), stage.entries()), (0, [22, 11, 0]));
        assert_eq!((stage.sweep(true), stage.entries()), (30, [2, 1, 0]));
        assert_eq!(stage.usage.get(&0, 0).map(|usage| [usage.nat, usage.flows, usage.inbound]).ok(), Some([2, 1, 0]));
        talk(stage, cast, &[(true, ACK), (false, ACK)]);
        stage.age(u64::from(TIMEOUTS.tcp_established) + 1);
        stage.sweep(false);
    });
}

#[test]
fn a_nat_entry_with_a_broken_seal_expires() {
    both(|stage, cast| {
        stage.configure(|config| config.timeouts = TIMEOUTS);
        talk(stage, cast, &[(true, SYN)]);
        let keys: Vec<_> = stage.nat.keys().map(|key| key.expect("a key")).collect();
        assert_eq!(keys.len(), 2);
        for key in keys {
            // Breaks the seal.
            let mut mapping = stage.nat.get(&key, 0).expect("a mapping");
            mapping.egress_id += 1;
            stage.nat.insert(key, mapping, 0).expect("a mapping");
        }
        stage.run_frame(&FROM_POD, &sent(cast, ACK).frame(), Verdict::CutAnswered);
        stage.sweep(false);
        assert_eq!(stage.entries()[0], 2, "it may be just a moment's");
        stage.age(u64::from(TIMEOUTS.tcp_opening) + 1);
        stage.sweep(false);
        assert_eq!(stage.entries()[0], 0);
        stage.configure(|_| ());
    });
}

/// It still refers to the NAT entry, but packets ignore it: the NAT entry would get no answers.
#[test]
fn a_forward_key_whose_other_key_has_a_broken_seal_expires_soon() {
    both(|stage, cast| {
        stage.configure(|config| config.timeouts = TIMEOUTS);
        stage.run_frame(&FROM_POD, &sent(cast, SYN).frame(), Verdict::SnatHere);
        stage.sweep(false);
        assert_eq!(stage.entries()[0], 2);
        let mut all = stage.nat.iter().map(|entry| entry.expect("an entry"));
        let (reverse, mut mapping) = all.find(|(key, _)| key.saddr == addr(cast.world)).expect("its answer");
        drop(all);
        mapping.seal ^= 1;
        stage.nat.insert(reverse, mapping, 0).expect("a mapping");
        stage.age(u64::from(TIMEOUTS.tcp_closing) + 1);
        assert_eq!(stage.sweep(false), 1, "the shortest of all times");
        assert_eq!(stage.nat.keys().map(|key| key.expect("a key")).collect::<Vec<_>>(), [reverse]);
        stage.nat.remove(&reverse).expect("forget");
        stage.configure(|_| ());
    });
}

#[test]
fn unselected_pods_cannot_fill_the_map_for_selected_pods() {
    on_stage_with(&[("inbound", 8)], |stage| {
        stage.configure(|config| {
            config.timeouts = TIMEOUTS;
            config.inbound_size = 8;
        });
        let syn = |pod, port| packet(V4.world, pod, 80, port).tcp(SYN);
        for (pod, port) in [V4.known_pod, V4.pod].into_iter().flat_map(|pod| (1..=7).map(move |port| (pod, port))) {
            stage.expose(pod, 6, port);
        }
        for port in 1..=6 {
            stage.passes(&TO_POD, &syn(V4.known_pod, port), Verdict::InboundRemembered);
        }
        stage.passes(&TO_POD, &syn(V4.known_pod, 7), Verdict::InboundRefused);
        for port in 1..=2 {
            stage.passes(&TO_POD, &syn(V4.pod, port), Verdict::InboundRemembered);
        }
        stage.drops(&TO_POD, &syn(V4.pod, 3), Verdict::InboundFull);
        stage.age(u64::from(TIMEOUTS.tcp_opening) + 1);
        assert_eq!(stage.sweep(false), 8);
        stage.passes(&TO_POD, &syn(V4.known_pod, 7), Verdict::InboundRemembered);
    });
}

/// SYN and RST from new ports at any rate: the port fills up to half of the map, and another one gets a quarter of the
/// free part.
#[test]
fn a_flood_at_one_port_leaves_entries_for_other_ports_and_expires_within_seconds() {
    on_stage_with(&[("inbound", 64)], |stage| {
        stage.configure(|config| (config.inbound_size, config.direct_routing) = (64, 0));
        stage.expose(V4.pod, 6, 80);
        stage.expose(V4.pod, 6, 443);
        let from = |port, to, flags| packet(V4.world, V4.pod, port, to).tcp(flags);
        for port in 1..=32 {
            stage.passes(&TO_POD, &from(port, 80, SYN), Verdict::InboundRemembered);
            stage.passes(&TO_POD, &from(port, 80, RST), Verdict::NotOurs);
        }
        stage.drops_all(&TO_POD, (33..100).map(|port| from(port, 80, SYN)), Verdict::InboundFull);
        stage.sweep(false);
        stage.drops(&TO_POD, &from(33, 80, SYN), Verdict::InboundFull);
        for port in 1..=7 {
            stage.passes(&TO_POD, &from(port, 443, SYN), Verdict::InboundRemembered);
        }
        stage.drops(&TO_POD, &from(9, 443, SYN), Verdict::InboundFull);
        // Reset or unanswered.
        stage.age(11);
        assert_eq!(stage.sweep(false), 39);
        stage.passes(&TO_POD, &from(33, 80, SYN), Verdict::InboundRemembered);
    });
}

/// No agent sweeps: a packet that finds an idle entry continues without, and removes it.
#[test]
fn an_idle_entry_is_absent_without_a_sweep() {
    both(|stage, cast| {
        stage.configure(|config| config.timeouts = TIMEOUTS);
        stage.select_as(cast.known_pod, cast.pod);
        let of = |pod| packet(pod, cast.world, 4000, 53).body(Body::Udp);
        let answer = packet(cast.world, cast.egress, 53, 4000).body(Body::Udp).with(|p| p.dmac = UPLINK_MAC);
        let idle = |stage: &mut Stage| {
            stage.run_frame(&FROM_POD, &of(cast.pod).frame(), Verdict::SnatHere);
            let taken = stage.mappings();
            stage.age(u64::from(TIMEOUTS.unreplied) + 1);
            stage.turn();
            taken
        };
        // A late answer.
        idle(stage);
        stage.drops(&FROM_NETDEV, &answer, Verdict::NoNatEntry);
        assert_eq!(stage.entries()[0], 0);
        // The pod itself, to a policy that has lost nothing: a new flow.
        idle(stage);
        stage.run_frame(&FROM_POD, &of(cast.pod).frame(), Verdict::SnatHere);
        let (_, flow) = stage.flows.iter().next().expect("a flow").expect("an entry");
        assert!(now_ns() - flow.last_seen_ns < 1_000_000_000, "begun again");
        assert_eq!(stage.entries()[..2], [2, 1]);
        // Another pod that uses the same port.
        idle(stage);
        let out = of(cast.known_pod);
        stage.forwards(&FROM_POD, &out, Verdict::SnatHere, &out.snat(cast.egress, 4000).hop());
        assert_eq!(stage.entries()[0], 2, "in place of the former");
        let held = |stage: &Stage, pod| stage.shares.get(&Holder::pod(addr(pod)), 0).map(|share| share.nat_entries);
        assert_eq!((held(stage, cast.pod).ok(), held(stage, cast.known_pod).ok()), (Some(0), Some(1)));
        stage.age(u64::from(3 * TIMEOUTS.udp) + 1);
        stage.sweep(false);
        stage.put_pod(cast.known_pod, PodEntry::known());
        stage.configure(|_| ());
    });
}

/// What a pod sends long after a datagram from outside is no answer to it, and leaves with the egress IP.
#[test]
fn an_idle_inbound_connection_is_absent_without_a_sweep() {
    both(|stage, cast| {
        stage.configure(|config| (config.timeouts, config.direct_routing) = (TIMEOUTS, 1));
        let (asked, answer) = (packet(cast.world, cast.pod, 5000, 53), packet(cast.pod, cast.world, 53, 5000));
        stage.passes(&TO_POD, &asked, Verdict::InboundRemembered);
        stage.passes(&FROM_POD, &answer, Verdict::InboundReply);
        stage.age(u64::from(TIMEOUTS.udp) + 1);
        stage.turn();
        stage.run_frame(&FROM_POD, &answer.frame(), Verdict::SnatHere);
        assert_eq!(stage.entries(), [2, 1, 0]);
        assert_eq!(stage.usage.get(&0, 0).map(|usage| [usage.nat, usage.flows, usage.inbound]).ok(), Some([2, 1, 0]));
        stage.age(u64::from(3 * TIMEOUTS.udp) + 1);
        stage.sweep(false);
        stage.configure(|_| ());
    });
}

/// As a flush does it.
#[test]
fn removed_entries_are_not_counted_whatever_their_age() {
    both(|stage, cast| {
        let before = stage.usage.get(&0, 0).expect("the usage");
        talk(stage, cast, &[(true, SYN)]);
        stage.passes(&TO_POD, &packet(cast.world, cast.known_pod, 5000, 80).tcp(SYN), Verdict::InboundRemembered);
        let reverse: Vec<_> =
            keys(&stage.nat).into_iter().filter(|key| key.direction() == Direction::Ingress).collect();
        for (map, keys, removed) in [
            (SweptMap::Nat, reverse, 2),
            (SweptMap::Flows, keys(&stage.flows), 1),
            (SweptMap::Inbound, keys(&stage.inbound), 1),
        ] {
            let run = stage.sweep_of(map, SweepMode::All, &keys);
            assert_eq!(test_run(stage.program(run.program), &run, &[0; 64]).action, removed);
            assert_eq!(test_run(stage.program(run.program), &run, &[0; 64]).action, 0, "gone");
        }
        assert_eq!((stage.entries(), stage.usage.get(&0, 0).ok()), ([0; 3], Some(before)));
        let share = stage.shares.get(&Holder::pod(addr(cast.pod)), 0).expect("a share");
        assert_eq!((share.flows, share.nat_entries), (0, 0));
    });
}

/// One flow, aged before each round; then its packet races with a sweep.
#[test]
fn an_entry_that_a_packet_just_used_is_not_swept() {
    on_stage_with(&[("nat", 64), ("flows", 64), ("inbound", 64)], |stage| {
        if !has_both_cpus() {
            return skipped("needs two CPUs");
        }
        stage.configure(|config| config.timeouts = TIMEOUTS);
        let frame = packet(V4.pod, V4.world, 4000, 80).body(Body::Udp).frame();
        stage.program("sweep");
        let forward = Tuple::new(Direction::Egress, addr(V4.pod), addr(V4.world), 4000, 80, 17);
        let (mut used, mut swept) = (0, 0);
        for round in 0..slow_guest::rounds(4000) {
            assert_eq!(test_run(stage.program(FROM_POD.program), &FROM_POD, &frame).action, REDIRECT);
            // Idle for the sweep alone, or for the packet too.
            stage.age(u64::from(if round % 4 == 0 { TIMEOUTS.udp } else { PRESSED_OPENING_SECS }) + 1);
            let before = stage.counts();
            let ran = meet(stage, &frame, round);
            let there = stage.nat.get(&forward, 0).is_ok();
            let lost = stage.moved(&before).contains_key(Verdict::ClaimLost.label());
            assert_eq!(ran, if lost { SHOT } else { REDIRECT }, "round {round}");
            assert!(there || lost, "round {round}: the packet went, and its mapping is gone");
            // Both keys or none; an answer finds the used entry.
            assert_eq!(stage.mappings().len(), if there { 2 } else { 0 }, "round {round}");
            used += usize::from(!lost);
            swept += usize::from(lost);
        }
        println!("{used} packets went, {swept} met what was just being removed");
    });
}

/// Runs the packet on one CPU and a sweep on the other; returns the packet's action.
fn meet(stage: &Stage, frame: &[u8], round: u32) -> i32 {
    let arrived = AtomicUsize::new(0);
    let together = |cpu: usize, delay: u32| {
        pin(cpu);
        arrived.fetch_add(1, Ordering::SeqCst);
        let mut spins = 0_usize;
        while arrived.load(Ordering::SeqCst) < 2 {
            spins += 1;
            if spins.is_multiple_of(10_000) {
                std::thread::yield_now();
            }
        }
        // Another offset in each round, so that every order occurs.
        (0..delay).for_each(|_| std::hint::spin_loop());
    };
    let sweep_nat = stage.sweep_of(SweptMap::Nat, SweepMode::Pressed, &keys(&stage.nat));
    let (packets, sweeps) = (stage.loaded(FROM_POD.program), stage.loaded("sweep"));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            together(1, (round % 40) * 10);
            test_run(sweeps, &sweep_nat, &[0; 64]);
        });
        let packet = scope.spawn(|| {
            together(0, 100);
            test_run(packets, &FROM_POD, frame).action
        });
        packet.join().expect("the packet's side")
    })
}

/// An entry that a sweep has marked and not removed yet is neither used nor overwritten: the packet is dropped, and the
/// next one begins again.
#[test]
fn an_entry_under_removal_is_neither_used_nor_overwritten() {
    both(|stage, cast| {
        let sent = packet(cast.pod, cast.world, 4000, 80);
        stage.run_frame(&FROM_POD, &sent.frame(), Verdict::SnatHere);
        let (key, flow) = stage.flows.iter().next().expect("a flow").expect("an entry");
        let taken = Flow { last_seen_ns: GONE, ..flow };
        stage.flows.insert(key, taken, 0).expect("take it");
        stage.drops(&FROM_POD, &sent, Verdict::ClaimLost);
        assert_eq!(stage.flows.get(&key, 0).expect("still there"), taken);
        stage.flows.insert(key, flow, 0).expect("give it back");

        let mut mapping = stage.nat.get(&key, 0).expect("a mapping");
        mapping.last_seen_ns = GONE;
        stage.nat.insert(key, mapping, 0).expect("take it");
        stage.drops(&FROM_POD, &sent, Verdict::ClaimLost);
        assert_eq!(stage.nat.get(&key, 0).expect("still there").last_seen_ns, GONE);
        for gone in [key, mapping.other] {
            stage.nat.remove(&gone).expect("remove");
        }
        stage.flows.remove(&key).expect("remove");
        stage.run_frame(&FROM_POD, &sent.frame(), Verdict::SnatHere);
        for gone in [key, mapping.other] {
            stage.nat.remove(&gone).expect("remove");
        }
        stage.flows.remove(&key).expect("remove");
    });
}

/// A marked entry is being removed, or its remover was refused by the kernel. Only the agent can tell, which has seen the
/// mark before; a sweep of idle entries would remove what a packet has just put in its place.
#[test]
fn a_marked_entry_is_removed_on_demand_alone() {
    both(|stage, cast| {
        stage.program("sweep");
        let sent = packet(cast.pod, cast.world, 4000, 80);
        stage.run_frame(&FROM_POD, &sent.frame(), Verdict::SnatHere);
        let tuple = Tuple::new(Direction::Egress, addr(cast.pod), addr(cast.world), 4000, 80, 17);
        let (mut flow, mut forward) =
            (stage.flows.get(&tuple, 0).expect("a flow"), stage.nat.get(&tuple, 0).expect("one"));
        (flow.last_seen_ns, forward.last_seen_ns) = (GONE, GONE);
        stage.flows.insert(tuple, flow, 0).expect("mark it");
        stage.nat.insert(tuple, forward, 0).expect("mark it");
        for (mode, removed) in
            [(SweepMode::Idle, 0), (SweepMode::Pressed, 0), (SweepMode::Marked, 1), (SweepMode::Marked, 0)]
        {
            for map in [SweptMap::Nat, SweptMap::Flows] {
                let run = stage.sweep_of(map, mode, &[tuple]);
                assert_eq!(test_run(stage.program(run.program), &run, &[0; 64]).action, removed, "{map:?} {mode:?}");
            }
        }
        let reverse = stage.sweep_of(SweptMap::Nat, SweepMode::Marked, &[forward.other]);
        assert_eq!(test_run(stage.program(reverse.program), &reverse, &[0; 64]).action, 0, "it has no mark");
        stage.nat.remove(&forward.other).expect("the other key");
    });
}
