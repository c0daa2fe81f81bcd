//! The memory of a removed NAT entry may be reused by another flow while a packet of the first flow still reads it.
//!
//! One CPU removes the NAT entry of a flow, creates one of another flow in the same memory (the allocator is LIFO), and
//! restores the first one; the other CPU sends packets of the first flow without a pause. They must always have the
//! port of one of their own NAT entries. The window is a few nanoseconds and is not hit within a minute. With a delay
//! in it (`cargo xtask mutate`, mapping-unsealed), a program without the seal check uses the other flow's port within a
//! second. The same applies to pods, whose entries are replaced on each change.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use aya::maps::{HashMap, Map, MapData};
use aya::programs::SchedClassifier;
use egress_common::abi::{Addr, Direction, Family, NatEntry, Origin, PodEntry, Tuple};

use crate::aging::now_ns;
use crate::cast::{FamilyAddresses, addr};
use crate::frames::{Body, packet};
use crate::races::{has_both_cpus, pin};
use crate::skips::skipped;
use crate::slow_guest;
use crate::stage::{Stage, both};
use crate::test_run::{FROM_POD, REDIRECT, test_run};

/// Duration for each family; longer until both NAT entries occurred.
const TIME: Duration = Duration::from_secs(2);
const OWN_PORT: u16 = 4000;
/// Ports of the restored NAT entry, and of the other flow's.
const GIVEN_PORT: u16 = 40_000;
const OTHERS_PORT: u16 = 50_000;

type Nat = HashMap<MapData, Tuple, NatEntry>;

/// Both keys of a NAT entry with their values.
fn keys(cast: &FamilyAddresses, from: u16, port: u16) -> [(Tuple, NatEntry); 2] {
    let (pod, world, egress) = (addr(cast.pod), addr(cast.world), addr(cast.egress));
    let forward = Tuple::new(Direction::Egress, pod, world, from, 80, 17);
    let reverse = Tuple::new(Direction::Ingress, world, egress, 80, port, 17);
    let made =
        |key: &Tuple, other| NatEntry::new(other, Origin::Here, Addr::UNSPECIFIED, cast.here, now_ns()).sealed(key);
    [(forward, made(&forward, reverse)), (reverse, made(&reverse, forward))]
}

/// Removes and creates NAT entries until it is stopped.
fn change_hands(nat: &mut Nat, cast: &FamilyAddresses, stop: &AtomicBool) {
    let [(forward, given), (reverse, answers)] = keys(cast, OWN_PORT, GIVEN_PORT);
    let [(made_by_a_packet, _), (own_reverse, _)] = keys(cast, OWN_PORT, OWN_PORT);
    let [(other, others), _] = keys(cast, OWN_PORT + 1, OTHERS_PORT);
    assert_eq!(forward, made_by_a_packet);
    // A missing one is normal: the packets create NAT entries too.
    let remove = |nat: &mut Nat, key: &Tuple| drop(nat.remove(key));
    while !stop.load(Ordering::Relaxed) {
        nat.insert(reverse, answers, 0).expect("a reverse key");
        nat.insert(forward, given, 0).expect("a forward key");
        // Time to be met.
        std::thread::yield_now();
        remove(nat, &own_reverse);
        remove(nat, &forward);
        nat.insert(other, others, 0).expect("another flow's key");
        remove(nat, &other);
    }
}

/// Sends packets of the flow; returns how many had the restored port, and how many their own.
fn send(program: &SchedClassifier, cast: &FamilyAddresses, stop: &AtomicBool) -> (u32, u32) {
    let frame = packet(cast.pod, cast.world, OWN_PORT, 80).body(Body::Udp).frame();
    let (source, port) = match cast.family {
        Family::V4 => (26..30, 34..36),
        Family::V6 => (22..38, 54..56),
    };
    let egress = addr(cast.egress);
    let octets = if cast.family == Family::V4 { egress.v4_octets().to_vec() } else { egress.octets().to_vec() };
    let (mut given, mut own) = (0, 0);
    let start = Instant::now();
    while start.elapsed() < if given > 0 && own > 0 { TIME } else { slow_guest::patience(TIME) } {
        let ran = test_run(program, &FROM_POD, &frame);
        if ran.action != REDIRECT {
            continue;
        }
        assert_eq!(ran.frame[source.clone()], octets[..], "another source");
        match u16::from_be_bytes([ran.frame[port.start], ran.frame[port.start + 1]]) {
            GIVEN_PORT => given += 1,
            OWN_PORT => own += 1,
            other => panic!("port {other} belongs to another flow; {given} and {own} packets before"),
        }
    }
    stop.store(true, Ordering::Relaxed);
    (given, own)
}

fn race(stage: &mut Stage, cast: &FamilyAddresses) {
    stage.program(FROM_POD.program);
    let id = stage.ids["nat"];
    let map = Map::HashMap(MapData::from_id(id).expect("the map nat"));
    let mut nat = Nat::try_from(map).expect("a hash map of these types");
    let (program, stop) = (stage.loaded(FROM_POD.program), AtomicBool::new(false));
    let (given, own) = std::thread::scope(|scope| {
        let changing = scope.spawn(|| {
            pin(1);
            change_hands(&mut nat, cast, &stop);
        });
        let sending = scope.spawn(|| {
            pin(0);
            let sent = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| send(program, cast, &stop)));
            stop.store(true, Ordering::Relaxed);
            sent
        });
        changing.join().expect("the one that changes");
        sending.join().expect("the one that sends")
    })
    .unwrap_or_else(|failed| std::panic::resume_unwind(failed));
    // Both occurred, so the NAT entry changed during the lookups.
    assert!(given > 0 && own > 0, "{given} {own}");
}

#[test]
fn a_nat_entry_whose_memory_is_reused_gives_no_flow_a_foreign_port() {
    both(|stage, cast| {
        if !has_both_cpus() {
            return skipped("needs two CPUs");
        }
        race(stage, cast);
    });
}

/// Rewrites the pod's entry, and then writes that of an unselected pod into the memory of the former one.
fn replace_pods(pods: &mut HashMap<MapData, Addr, PodEntry>, cast: &FamilyAddresses, stop: &AtomicBool) -> u64 {
    let (pod, other) = (addr(cast.pod), addr(cast.unknown_pod));
    let mut rounds = 0;
    while !stop.load(Ordering::Relaxed) {
        pods.insert(pod, PodEntry::selected(cast.here, rounds).sealed(&pod), 0).expect("a pod");
        pods.insert(other, PodEntry::known().sealed(&other), 0).expect("another pod");
        // Time to be met.
        std::thread::yield_now();
        drop(pods.remove(&other));
        rounds += 1;
    }
    rounds
}

#[test]
fn a_pod_whose_entry_is_rewritten_is_not_taken_for_another_pod() {
    both(|stage, cast| {
        if !has_both_cpus() {
            return skipped("needs two CPUs");
        }
        stage.program(FROM_POD.program);
        let map = Map::HashMap(MapData::from_id(stage.ids["pods"]).expect("the map pods"));
        let mut pods = HashMap::try_from(map).expect("a hash map of these types");
        let (program, stop) = (stage.loaded(FROM_POD.program), AtomicBool::new(false));
        let (rounds, sent) = std::thread::scope(|scope| {
            let changing = scope.spawn(|| {
                pin(1);
                replace_pods(&mut pods, cast, &stop)
            });
            let sending = scope.spawn(|| {
                pin(0);
                let (start, mut sent) = (Instant::now(), 0u32);
                let mut actions = std::collections::BTreeSet::new();
                while start.elapsed() < TIME {
                    // A new flow each time, so that no step is skipped.
                    let frame = packet(cast.pod, cast.world, 1024 + (sent % 60_000) as u16, 80).body(Body::Udp).frame();
                    actions.insert(test_run(program, &FROM_POD, &frame).action);
                    sent += 1;
                }
                stop.store(true, Ordering::Relaxed);
                assert_eq!(actions.into_iter().collect::<Vec<_>>(), [REDIRECT], "it is selected all the time");
                sent
            });
            let rounds = changing.join().expect("the one that changes");
            sending.join().map(|sent| (rounds, sent)).unwrap_or_else(|failed| std::panic::resume_unwind(failed))
        });
        assert!(rounds > 1000 && sent > 1000, "{rounds} {sent}");
        drop(stage.pods.remove(&addr(cast.unknown_pod)));
    });
}
