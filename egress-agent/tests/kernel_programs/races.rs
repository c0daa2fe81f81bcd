//! Two CPUs that see the same new flow at once create one NAT entry, and a sweep does not remove an entry in use.
//!
//! Both threads run the same packet at the same time, thousands of times with new tuples. Afterwards every forward key
//! has its reverse key and they refer to each other (`Stage::mappings`), no key is left over, and both CPUs used the
//! same port.

use std::sync::atomic::{AtomicUsize, Ordering};

use aya::programs::SchedClassifier;
use egress_common::abi::{
    Direction, Flow, PolicyEntry, PolicyEntryKey, PolicySlot, SweepMode, SweptMap, Tuple, Verdict, WhenEmpty,
};
use egress_common::decide::expiry::PRESSED_OPENING_SECS;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

use crate::aging::keys;
use crate::cast::{FamilyAddresses, addr};
use crate::frames::{Body, FrameSpec, SYN, packet};
use crate::skips::skipped;
use crate::slow_guest;
use crate::stage::{FROM_POD, REDIRECT, Ran, SWEEP, Stage, TestRun, both, test_run};

pub(crate) fn rounds() -> u16 {
    u16::try_from(slow_guest::rounds(3000)).expect("no more than there are ports")
}

pub(crate) const CPUS: [usize; 2] = [0, 1];

/// The racing packets.
#[derive(Clone, Copy)]
struct Race<'a> {
    program: &'a SchedClassifier,
    run: &'a TestRun,
    packet: &'a (dyn Fn(usize, u16) -> FrameSpec + Sync),
    arrived: &'a AtomicUsize,
}

impl Race<'_> {
    /// One CPU's side of all rounds.
    fn side(self, cpu: usize) -> Vec<Ran> {
        pin(cpu);
        let round = |round: u16| {
            let frame = (self.packet)(cpu, round).frame();
            self.arrived.fetch_add(1, Ordering::SeqCst);
            let both = CPUS.len() * (usize::from(round) + 1);
            let mut spins = 0_u32;
            while self.arrived.load(Ordering::SeqCst) < both {
                spins += 1;
                if spins.is_multiple_of(10_000) {
                    std::thread::yield_now();
                }
            }
            test_run(self.program, self.run, &frame)
        };
        (0..rounds()).map(round).collect()
    }
}

pub(crate) fn pin(cpu: usize) {
    let mut set = CpuSet::new();
    set.set(cpu).expect("a CPU");
    sched_setaffinity(Pid::from_raw(0), &set).expect("pin the thread");
}

pub(crate) fn has_both_cpus() -> bool {
    let set = sched_getaffinity(Pid::from_raw(0)).expect("the CPUs of this thread");
    CPUS.iter().all(|cpu| set.is_set(*cpu).unwrap_or(false))
}

/// Races the packets of each CPU and round; returns each CPU's results in order.
pub(crate) fn run_both(
    stage: &mut Stage,
    run: &TestRun,
    packet: impl Fn(usize, u16) -> FrameSpec + Sync,
) -> [Vec<Ran>; 2] {
    let arrived = AtomicUsize::new(0);
    let race = Race { program: stage.program(run.program), run, packet: &packet, arrived: &arrived };
    std::thread::scope(|scope| {
        let sides = CPUS.map(|cpu| scope.spawn(move || race.side(cpu)));
        sides.map(|side| side.join().expect("one side"))
    })
}

/// Races the packets and checks the results.
fn race(stage: &mut Stage, run: &TestRun, packet: impl Fn(u16) -> FrameSpec + Sync) {
    let before = stage.counts();
    let [one, other] = run_both(stage, run, |_, round| packet(round));
    for (round, (one, other)) in one.iter().zip(&other).enumerate() {
        assert_eq!((one.action, other.action), (REDIRECT, REDIRECT), "round {round}");
        // The first one uses the kernel's neighbour entry, so link addresses may differ.
        assert_eq!(one.frame[14..], other.frame[14..], "round {round}: two ports for one flow");
    }
    let moved = stage.moved(&before);
    let packets: Vec<_> = moved.iter().map(|(label, (packets, _))| (*label, *packets)).collect();
    assert_eq!(packets, [(Verdict::SnatHere.label(), 2 * u64::from(rounds()))]);
}

/// A packet of every round's own flow; all have the destination's port for the round's thousand.
fn of_round(from: &str, cast: &FamilyAddresses, body: Body, round: u16) -> FrameSpec {
    packet(from, cast.world, 10_000 + round, 80).body(body)
}

#[test]
fn one_nat_entry_where_the_source_port_is_free() {
    both(|stage, cast| {
        if !has_both_cpus() {
            return skipped("needs two CPUs");
        }
        let before = stage.mappings().len();
        for body in [Body::Udp, Body::Tcp(SYN)] {
            race(stage, &FROM_POD, |round| of_round(cast.pod, cast, body, round));
        }
        assert_eq!(stage.mappings().len() - before, 2 * 2 * usize::from(rounds()), "two keys each");
        for (key, mapping) in stage.mappings().into_values() {
            assert_eq!(mapping.other.protocol, key.protocol);
        }
    });
}

#[test]
fn one_nat_entry_where_both_search() {
    both(|stage, cast| {
        if !has_both_cpus() {
            return skipped("needs two CPUs");
        }
        let entry = stage.pods.get(&addr(cast.pod), 0).expect("a pod");
        stage.put_pod(cast.known_pod, entry);
        let before = stage.mappings().len();
        begin(stage, cast, cast.known_pod);
        race(stage, &FROM_POD, |round| of_round(cast.pod, cast, Body::Udp, round));
        assert_eq!(stage.mappings().len() - before, 2 * 2 * usize::from(rounds()), "two keys each");
        let kept = stage
            .mappings()
            .into_values()
            .filter(|(key, mapping)| key.saddr == addr(cast.pod) && mapping.other.dport() == key.sport());
        assert_eq!(kept.count(), 0, "their own ports were taken");
    });
}

/// The policy gets another address, served here too, while its flows run.
fn move_address(stage: &mut Stage, cast: &FamilyAddresses) {
    stage.own(cast.here, cast.away_egress);
    let policy =
        PolicyEntry::with_slots(WhenEmpty::Drop, &[PolicySlot::here(addr(cast.away_egress))]).expect("one slot");
    stage.policy.insert(PolicyEntryKey::new(cast.here, cast.family), policy, 0).expect("a policy");
}

/// Begins the flow of every round.
fn begin(stage: &mut Stage, cast: &FamilyAddresses, pod: &str) {
    for round in 0..rounds() {
        let sent = of_round(pod, cast, Body::Udp, round);
        assert_eq!(test_run(stage.program(FROM_POD.program), &FROM_POD, &sent.frame()).action, REDIRECT);
    }
}

/// Races the flows of a pod whose address has changed; a packet may be lost, a key may not.
fn race_moved(stage: &mut Stage, cast: &FamilyAddresses, keys: usize) {
    let before = stage.counts();
    run_both(stage, &FROM_POD, |_, round| of_round(cast.pod, cast, Body::Udp, round));
    let moved = stage.moved(&before);
    let packets = |verdict: Verdict| moved.get(verdict.label()).map_or(0, |(packets, _)| *packets);
    let (done, lost) = (packets(Verdict::SnatHere), packets(Verdict::ClaimLost));
    assert_eq!(done + lost, 2 * u64::from(rounds()), "{moved:?}");
    // The number of actual races depends on the machine; at least one of two packets passes.
    assert!(done >= u64::from(rounds()), "{moved:?}");
    assert_eq!(stage.mappings().len(), keys, "the old keys are gone, both");
}

#[test]
fn one_nat_entry_where_the_address_has_moved() {
    both(|stage, cast| {
        if !has_both_cpus() {
            return skipped("needs two CPUs");
        }
        begin(stage, cast, cast.pod);
        let keys = stage.mappings().len();
        move_address(stage, cast);
        race_moved(stage, cast, keys);
    });
}

#[test]
fn one_nat_entry_where_the_address_has_moved_and_both_search() {
    both(|stage, cast| {
        if !has_both_cpus() {
            return skipped("needs two CPUs");
        }
        begin(stage, cast, cast.pod);
        move_address(stage, cast);
        let entry = stage.pods.get(&addr(cast.pod), 0).expect("a pod");
        stage.put_pod(cast.known_pod, entry);
        begin(stage, cast, cast.known_pod);
        let keys = stage.mappings().len();
        race_moved(stage, cast, keys);
    });
}

#[test]
fn a_cached_decision_that_two_cpus_wrote_is_not_used() {
    both(|stage, cast| {
        stage.configure(|config| config.decisions = 5);
        let out = packet(cast.pod, cast.world, 4000, 80).frame();
        stage.run_frame(&FROM_POD, &out, Verdict::SnatHere);
        let entry = |entry: Result<(Tuple, Flow), _>| entry.ok().filter(|(key, _)| key.saddr == addr(cast.pod));
        let (key, begun) = stage.flows.iter().find_map(entry).expect("a flow");
        let slot = PolicySlot::here(addr(cast.egress));
        assert_eq!((begun.decided, begun.settled), (5, slot));
        // The number of a decision after a change, and the slot of one before it.
        let away = PolicySlot::remote(addr(cast.away_egress), addr(cast.other_node));
        for mixed in [Flow { settled: away, ..begun }, Flow { decided: 4, ..begun }] {
            stage.flows.insert(key, mixed, 0).expect("change the flow");
            stage.turn();
            stage.run_frame(&FROM_POD, &out, Verdict::SnatHere);
            let now = stage.flows.get(&key, 0).expect("the flow");
            assert_eq!((now.decided, now.settled), (5, slot), "asked again");
        }
    });
}

/// A sweep races with packets of idle flows. An entry that a packet used still exists afterwards; if the sweep wins,
/// the packet is dropped, or its flow gets a new NAT entry.
#[test]
fn an_entry_in_use_survives_a_concurrent_sweep() {
    const FLOWS: u16 = 8;
    both(|stage, cast| {
        if !has_both_cpus() {
            return skipped("needs two CPUs");
        }
        let frames: Vec<_> = (0..FLOWS).map(|flow| of_round(cast.pod, cast, Body::Udp, flow).frame()).collect();
        // Loads the program.
        stage.program(SWEEP.program);
        let (mut taken, mut kept) = (0, 0);
        for round in 0..slow_guest::rounds(1000) {
            for frame in &frames {
                assert_eq!(test_run(stage.program(FROM_POD.program), &FROM_POD, frame).action, REDIRECT);
            }
            // In every other round the packets find idle entries too.
            stage.age(if round % 2 == 0 { 600 } else { u64::from(PRESSED_OPENING_SECS) + 1 });
            let sweep_nat = stage.sweep_of(SweptMap::Nat, SweepMode::Pressed, &keys(&stage.nat));
            let [sweep, from_pod] = [&SWEEP, &FROM_POD].map(|run| stage.object.get(run.program));
            let arrived = AtomicUsize::new(0);
            let meet = |cpu: usize| {
                pin(cpu);
                arrived.fetch_add(1, Ordering::SeqCst);
                while arrived.load(Ordering::SeqCst) < CPUS.len() {
                    std::thread::yield_now();
                }
            };
            let actions: Vec<i32> = std::thread::scope(|scope| {
                let swept = scope.spawn(|| {
                    meet(CPUS[0]);
                    test_run(sweep, &sweep_nat, &[0; 64]).action
                });
                let sent = scope.spawn(|| {
                    meet(CPUS[1]);
                    frames.iter().map(|frame| test_run(from_pod, &FROM_POD, frame).action).collect()
                });
                taken += swept.join().expect("the sweep");
                sent.join().expect("the packets")
            });
            for (flow, action) in (0..FLOWS).zip(actions) {
                if action != REDIRECT {
                    continue;
                }
                kept += 1;
                let (pod, world) = (addr(cast.pod), addr(cast.world));
                let key = Tuple::new(Direction::Egress, pod, world, 10_000 + flow, 80, 17);
                let forward = stage.nat.get(&key, 0).unwrap_or_else(|_| panic!("round {round}: no mapping of {key:?}"));
                stage.nat.get(&forward.other, 0).unwrap_or_else(|_| panic!("round {round}: no answers to {key:?}"));
                stage.flows.get(&key, 0).unwrap_or_else(|_| panic!("round {round}: no flow {key:?}"));
            }
        }
        assert!(taken > 0 && kept > 0, "they have not met: {taken} taken, {kept} packets");
    });
}
