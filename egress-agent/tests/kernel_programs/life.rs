//! How long entries live, and who wins where a packet and a sweep meet.

use std::sync::atomic::{AtomicUsize, Ordering};

use egress_common::abi::{Direction, Flow, Timeouts, Tuple, Verdict};
use egress_common::decide::expiry::GONE;

use crate::cast::{Cast, V4, addr};
use crate::frames::{ACK, Body, FIN, Packet, RST, SYN, packet};
use crate::pace;
use crate::races::{has_both_cpus, pin};
use crate::stage::{ENTER, NOTICE, REDIRECT, SHOT, STEER, Stage, UPLINK_MAC, both, on_stage_with, test_run};

/// Seconds, so that each phase can be told from the others by the age that it survives; no more, since no entry can be older
/// than the machine.
pub(crate) const TIMEOUTS: Timeouts =
    Timeouts { tcp_established: 40, tcp_opening: 30, tcp_closing: 10, udp: 20, icmp: 5, other: 20 };
/// Less than between two phases, and more than a busy machine may lose between two lines.
const MARGIN_SECS: u32 = 5;

fn sent(cast: &Cast, flags: u8) -> Packet {
    packet(cast.pod, cast.world, 4000, 80).tcp(flags)
}

/// Sends what the pod (true) and the world say in turn.
fn talk(stage: &mut Stage, cast: &Cast, packets: &[(bool, u8)]) {
    for (from_pod, flags) in packets {
        if *from_pod {
            stage.run_frame(&STEER, &sent(cast, *flags).frame(), Verdict::SnatHere);
        } else {
            let reply = packet(cast.world, cast.egress, 80, 4000).tcp(*flags).with(|p| p.dmac = UPLINK_MAC);
            stage.run_frame(&ENTER, &reply.frame(), Verdict::ReplyHere);
            // Behind the redirect.
            let delivered = packet(cast.world, cast.pod, 80, 4000).tcp(*flags);
            stage.passes(&NOTICE, &delivered, Verdict::NotOurs);
        }
    }
}

/// The phase's timeout: entries survive nearly that, and not a second more.
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

#[test]
fn a_connection_from_outside_lives_as_long_as_its_phase_says() {
    both(|stage, cast| {
        stage.configure(|config| config.timeouts = TIMEOUTS);
        let arrives = |pod, flags| packet(cast.world, pod, 5000, 80).tcp(flags);
        for (flags, secs) in [
            (vec![SYN], TIMEOUTS.tcp_opening),
            (vec![SYN, ACK], TIMEOUTS.tcp_established),
            (vec![SYN, ACK, FIN | ACK], TIMEOUTS.tcp_closing),
            (vec![SYN, ACK, RST], TIMEOUTS.tcp_closing),
            (vec![SYN, ACK, RST, ACK], TIMEOUTS.tcp_established),
            (vec![SYN, ACK, FIN | ACK, SYN], TIMEOUTS.tcp_opening),
        ] {
            for (index, flags) in flags.iter().enumerate() {
                let verdict = if index == 0 { Verdict::InboundRemembered } else { Verdict::NotOurs };
                stage.passes(&NOTICE, &arrives(cast.known_pod, *flags), verdict);
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
fn in_need_what_nobody_has_answered_goes_first() {
    both(|stage, cast| {
        stage.configure(|config| config.timeouts = TIMEOUTS);
        talk(stage, cast, &[(true, SYN), (false, SYN | ACK), (true, ACK)]);
        for port in 4001..4011 {
            stage.run_frame(&STEER, &packet(cast.pod, cast.world, port, 80).tcp(SYN).frame(), Verdict::SnatHere);
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
fn a_mapping_that_packets_do_not_take_for_one_has_its_time_too() {
    both(|stage, cast| {
        stage.configure(|config| config.timeouts = TIMEOUTS);
        talk(stage, cast, &[(true, SYN)]);
        let keys: Vec<_> = stage.nat.keys().map(|key| key.expect("a key")).collect();
        assert_eq!(keys.len(), 2);
        for key in keys {
            // Something else than what its seal was made of.
            let mut mapping = stage.nat.get(&key, 0).expect("a mapping");
            mapping.egress_id += 1;
            stage.nat.insert(key, mapping, 0).expect("a mapping");
        }
        stage.run_frame(&STEER, &sent(cast, ACK).frame(), Verdict::CutAnswered);
        stage.sweep(false);
        assert_eq!(stage.entries()[0], 2, "it may be just a moment's");
        stage.age(u64::from(TIMEOUTS.tcp_opening) + 1);
        stage.sweep(false);
        assert_eq!(stage.entries()[0], 0);
        stage.configure(|_| ());
    });
}

/// It names the mapping all the same, but packets do not find it: the mapping would have no answers.
#[test]
fn a_mapping_whose_other_key_has_lost_its_seal_goes_at_once() {
    both(|stage, cast| {
        stage.run_frame(&STEER, &sent(cast, SYN).frame(), Verdict::SnatHere);
        stage.sweep(false);
        assert_eq!(stage.entries()[0], 2);
        let mut all = stage.nat.iter().map(|entry| entry.expect("an entry"));
        let (reverse, mut mapping) = all.find(|(key, _)| key.saddr == addr(cast.world)).expect("its answer");
        drop(all);
        mapping.seal ^= 1;
        stage.nat.insert(reverse, mapping, 0).expect("a mapping");
        assert_eq!(stage.sweep(false), 1);
        assert_eq!(stage.nat.keys().map(|key| key.expect("a key")).collect::<Vec<_>>(), [reverse]);
        stage.nat.remove(&reverse).expect("forget");
    });
}

#[test]
fn pods_that_nothing_selects_leave_room_for_those_that_something_does() {
    on_stage_with(&[("inbound", 8)], |stage| {
        stage.configure(|config| {
            config.timeouts = TIMEOUTS;
            config.inbound_shared = 6;
        });
        let syn = |pod, port| packet(V4.world, pod, port, 80).tcp(SYN);
        for port in 1..=6 {
            stage.passes(&NOTICE, &syn(V4.known_pod, port), Verdict::InboundRemembered);
        }
        stage.passes(&NOTICE, &syn(V4.known_pod, 7), Verdict::InboundRefused);
        for port in 1..=2 {
            stage.passes(&NOTICE, &syn(V4.pod, port), Verdict::InboundRemembered);
        }
        stage.passes(&NOTICE, &syn(V4.pod, 3), Verdict::InboundRefused);
        stage.age(u64::from(TIMEOUTS.tcp_opening) + 1);
        assert_eq!(stage.sweep(false), 8);
        stage.passes(&NOTICE, &syn(V4.known_pod, 7), Verdict::InboundRemembered);
    });
}

/// One flow, aged before each round; then its packet and a sweep meet.
#[test]
fn what_a_packet_has_used_is_not_swept() {
    on_stage_with(&[("nat", 64), ("flows", 64), ("inbound", 64)], |stage| {
        if !has_both_cpus() {
            return eprintln!("skipped: needs two CPUs");
        }
        stage.configure(|config| config.timeouts = TIMEOUTS);
        let frame = packet(V4.pod, V4.world, 4000, 80).body(Body::Udp).frame();
        stage.sweep(false);
        let forward = Tuple::new(Direction::Egress, addr(V4.pod), addr(V4.world), 4000, 80, 17);
        let (mut used, mut swept) = (0, 0);
        for round in 0..pace::rounds(4000) {
            assert_eq!(test_run(stage.program(STEER.program), &STEER, &frame).action, REDIRECT);
            stage.age(u64::from(TIMEOUTS.udp) + 1);
            let before = stage.counts();
            let ran = meet(stage, &frame, round);
            let there = stage.nat.get(&forward, 0).is_ok();
            let lost = stage.moved(&before).contains_key(Verdict::ClaimLost.label());
            assert_eq!(ran, if lost { SHOT } else { REDIRECT }, "round {round}");
            assert!(there || lost, "round {round}: the packet went, and its mapping is gone");
            // Both keys or none; an answer finds what the packet used.
            assert_eq!(stage.mappings().len(), if there { 2 } else { 0 }, "round {round}");
            used += usize::from(!lost);
            swept += usize::from(lost);
        }
        println!("{used} packets went, {swept} met what was just being removed");
    });
}

/// Runs the packet on one CPU and a sweep on the other; the packet's action.
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
        // Another offset in each round, so that every order is met.
        (0..delay).for_each(|_| std::hint::spin_loop());
    };
    let (packets, sweeps) = (stage.loaded(STEER.program), stage.loaded("sweep"));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            together(1, (round % 40) * 10);
            test_run(sweeps, &crate::stage::SWEEP, &[0; 64]);
        });
        let packet = scope.spawn(|| {
            together(0, 100);
            test_run(packets, &STEER, frame).action
        });
        packet.join().expect("the packet's side")
    })
}

/// What a sweep has taken and not removed yet is gone for a packet, and not there to be overwritten either: the packet is
/// lost, and the next one begins anew.
#[test]
fn what_is_just_being_removed_is_neither_used_nor_overwritten() {
    both(|stage, cast| {
        let sent = packet(cast.pod, cast.world, 4000, 80);
        stage.run_frame(&STEER, &sent.frame(), Verdict::SnatHere);
        let (key, flow) = stage.flows.iter().next().expect("a flow").expect("an entry");
        let taken = Flow { last_seen_ns: GONE, ..flow };
        stage.flows.insert(key, taken, 0).expect("take it");
        stage.drops(&STEER, &sent, Verdict::ClaimLost);
        assert_eq!(stage.flows.get(&key, 0).expect("still there"), taken);
        stage.flows.insert(key, flow, 0).expect("give it back");

        let mut mapping = stage.nat.get(&key, 0).expect("a mapping");
        mapping.last_seen_ns = GONE;
        stage.nat.insert(key, mapping, 0).expect("take it");
        stage.drops(&STEER, &sent, Verdict::ClaimLost);
        assert_eq!(stage.nat.get(&key, 0).expect("still there").last_seen_ns, GONE);
        for gone in [key, mapping.other] {
            stage.nat.remove(&gone).expect("remove");
        }
        stage.flows.remove(&key).expect("remove");
        stage.run_frame(&STEER, &sent.frame(), Verdict::SnatHere);
        for gone in [key, mapping.other] {
            stage.nat.remove(&gone).expect("remove");
        }
        stage.flows.remove(&key).expect("remove");
    });
}
