//! Frames with random changes and truncations (seeded): exactly one counter changes, the action is that of its class,
//! and passed packets are unchanged.

use egress_common::abi::{Class, Verdict};
use egress_common::random::Random;

use crate::cast::{V4, V6};
use crate::frames::{Body, SYN, ip, octets, packet};
use crate::slow_guest::rounds;
use crate::stage::{
    FROM_NETDEV, FROM_POD, NEXT, REDIRECT, Ran, SHOT, Stage, TO_NETDEV, TO_POD, TestRun, UPLINK_MAC, on_stage, test_run,
};

const ROUNDS: u32 = 4000;

/// Valid frames of the hooks.
fn seeds() -> Vec<(TestRun, Vec<u8>)> {
    let mut seeds = Vec::new();
    for cast in [V4, V6] {
        for body in [Body::Udp, Body::Tcp(SYN), Body::EchoRequest, Body::Unreachable] {
            let out = packet(cast.pod, cast.world, 4000, 80).body(body);
            for pod in [cast.pod, cast.away_pod, cast.known_pod, cast.unknown_pod] {
                seeds.push((FROM_POD, packet(pod, cast.world, 4000, 80).body(body).frame()));
            }
            seeds.push((FROM_POD, packet(cast.pod, cast.egress, 4000, 80).body(body).frame()));
            seeds.push((FROM_POD, out.clone().with(|packet| packet.data = 1600).frame()));
            seeds.push((FROM_POD, out.clone().with(|packet| packet.options = 2).frame()));
            seeds.push((TO_NETDEV, out.frame()));
            let back = packet(cast.world, cast.egress, 80, 4000).body(body).with(|packet| packet.dmac = UPLINK_MAC);
            seeds.push((FROM_NETDEV, back.clone().with(|packet| packet.data = 1450).frame()));
            seeds.push((FROM_NETDEV, back.frame()));
            seeds.push((TO_POD, packet(cast.world, cast.pod, 80, 4000).body(body).frame()));
        }
    }
    seeds
}

fn action_of(verdict: Verdict) -> i32 {
    match verdict.class() {
        Class::Pass => NEXT,
        Class::Redirect | Class::Answer => REDIRECT,
        Class::Drop | Class::Hold => SHOT,
    }
}

fn check(stage: &mut Stage, run: &TestRun, frame: &[u8]) {
    let before = stage.counts();
    let Ran { action, frame: out, .. } = test_run(stage.program(run.program), run, frame);
    let moved: Vec<_> = stage.moved(&before).into_iter().collect();
    let [(label, (1, _))] = moved.as_slice() else { panic!("{run:?} {frame:02x?}: {moved:?}") };
    let verdict = *Verdict::ALL.iter().find(|verdict| verdict.label() == *label).expect("a verdict");
    assert_eq!(action, action_of(verdict), "{run:?} {frame:02x?}: {verdict:?}");
    if verdict.class() == Class::Pass && !matches!(verdict, Verdict::NodeSnat | Verdict::NodeReply) {
        assert_eq!(out, frame, "{run:?}: {verdict:?}");
    }
    if verdict == Verdict::SnatHere {
        let shown = [out[26..30] == octets(ip(V4.egress)), out[22..38] == octets(ip(V6.egress))];
        assert!(shown.contains(&true), "another source: {frame:02x?} became {out:02x?}");
    }
}

#[test]
fn every_frame_has_one_verdict_and_its_action() {
    on_stage(|stage| {
        let (seeds, mut numbers) = (seeds(), Random::new(0));
        for (run, frame) in &seeds {
            check(stage, run, frame);
        }
        for round in 0..rounds(ROUNDS) {
            let (run, frame) = &seeds[numbers.below(seeds.len())];
            let mut frame = frame.clone();
            for _ in 0..=numbers.below(3) {
                // Headers, mostly.
                let at = 12 + numbers.below(frame.len().min(90) - 12);
                frame[at] = u8::try_from(numbers.below(256)).expect("a byte");
            }
            if round % 4 == 0 {
                // The kernel's test runs require a whole network header.
                frame.truncate(54 + numbers.below(frame.len() - 53).min(60));
            }
            check(stage, run, &frame);
        }
    });
}
