//! Bandwidth limits of egress policies on their gateway, and random ports.

use std::collections::BTreeSet;

use egress_common::abi::{BandwidthLimit, Direction, Lease, PolicyEntryKey, Tuple, Verdict};
use egress_common::decide::pace::HORIZON_NS;
use nix::time::ClockId;

use crate::cast::{FamilyAddresses, V4, V6, addr};
use crate::frames::{ACK, Body, FrameSpec, SYN, packet};
use crate::lease::{boot_ns, clock_ns};
use crate::races::{CPUS, has_both_cpus, pin};
use crate::stage::{FROM_POD, REDIRECT, SHOT, Stage, TestRun, both, on_stage, test_run};

const MEGABIT: u64 = 1_000_000;

/// The clock of limits, which has no steps of milliseconds.
fn now_ns() -> u64 {
    clock_ns(ClockId::CLOCK_MONOTONIC)
}

impl Stage {
    /// Limits the policy whose gateway is this node.
    pub(crate) fn limit(&mut self, cast: &FamilyAddresses, limit: BandwidthLimit) {
        let key = PolicyEntryKey::new(cast.here, cast.family);
        let policy = self.policy.get(&key, 0).expect("a policy");
        self.policy.insert(key, policy.with_limit(limit), 0).expect("a policy");
    }

    fn sent_ns(&self, cast: &FamilyAddresses) -> u64 {
        self.pacing.get(&cast.here, 0).expect("a state").sent_ns
    }

    fn limited(&self, cast: &FamilyAddresses) -> u64 {
        self.eip_counters.get(&cast.here, 0).expect("a counter").iter().map(|count| count.limited).sum()
    }
}

fn sent(cast: &FamilyAddresses, bytes: usize) -> FrameSpec {
    let empty = packet(cast.pod, cast.world, 4000, 80).tcp(ACK).with(|packet| packet.data = 0);
    let header = empty.frame().len();
    empty.with(|packet| packet.data = bytes - header)
}

#[test]
fn packets_beyond_a_limit_are_dropped_and_counted() {
    both(|stage, cast| {
        let frame = sent(cast, 1_000);
        // Two packets at once, and one that is judged before it is counted. The next one would pass 24 seconds later.
        stage.limit(cast, BandwidthLimit::new(1_000, 2_000 * 8));
        for _ in 0..3 {
            stage.run_frame(&FROM_POD, &frame.frame(), Verdict::SnatHere);
        }
        let state = stage.sent_ns(cast);
        stage.drops_all(&FROM_POD, (0..10).map(|_| frame.clone()), Verdict::RateLimited);
        assert_eq!((stage.limited(cast), stage.sent_ns(cast)), (10, state), "dropped packets take no time");
        stage.run_frame(&FROM_POD, &packet(cast.known_pod, cast.world, 4000, 80).frame(), Verdict::NotSelected);
        stage.limit(cast, BandwidthLimit::NONE);
        stage.run_frame(&FROM_POD, &frame.frame(), Verdict::SnatHere);
        assert_eq!(stage.sent_ns(cast), state);
    });
}

/// Sends on these CPUs for a while, and returns the bytes that passed and the time (ns).
fn flood(stage: &mut Stage, cpus: &[usize], frames: &[Vec<u8>]) -> (u64, u64) {
    stage.program(FROM_POD.program);
    let stage = &*stage;
    let begun = now_ns();
    let until = begun + 300_000_000;
    let on = |cpu: usize| {
        pin(cpu);
        let mut passed = 0;
        for frame in frames.iter().cycle().take_while(|_| now_ns() < until) {
            if test_run(stage.loaded(FROM_POD.program), &FROM_POD, frame).action == REDIRECT {
                passed += u64::try_from(frame.len()).expect("a length");
            }
        }
        passed
    };
    let passed = std::thread::scope(|scope| {
        let threads: Vec<_> = cpus.iter().map(|cpu| scope.spawn(move || on(*cpu))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a flood")).sum()
    });
    (passed, now_ns() - begun)
}

/// The burst is half a second, so that no pause of the test loses any of the rate.
#[test]
fn the_rate_holds_on_one_cpu_and_on_two() {
    on_stage(|stage| {
        for (cast, cpus) in [(V4, 1), (V6, 1), (V4, 2)] {
            if cpus == 2 && !has_both_cpus() {
                continue;
            }
            for decisions in [0, 1] {
                stage.configure(|config| config.decisions = decisions);
                let rate = 20 * MEGABIT;
                let _state = stage.pacing.remove(&cast.here);
                stage.limit(&cast, BandwidthLimit::new(rate, rate / 2));
                let frames = [sent(&cast, 1_514).body(Body::Udp).frame(), sent(&cast, 700).frame()];
                let (passed, time) = flood(stage, &CPUS[..cpus], &frames);
                let expected = rate / 8 / 2 + rate / 8 * time / 1_000_000_000;
                let slack = expected / 50 + 2 * 1_514;
                assert!(passed.abs_diff(expected) <= slack, "{cpus} CPUs, {decisions}: {passed}, not {expected}");
                println!("{cpus} CPUs: {passed} of {expected} bytes in {time} ns, {} dropped", stage.limited(&cast));
            }
        }
    });
}

/// Sends packets until one is dropped. Returns their departure times, the last departure time that was refused, and when the
/// program refused it at the earliest.
fn departures(stage: &mut Stage, cast: &FamilyAddresses, limit: &BandwidthLimit, frame: &[u8]) -> (Vec<u64>, u64, u64) {
    let mut departures = Vec::new();
    loop {
        let before = now_ns();
        let ran = test_run(stage.program(FROM_POD.program), &FROM_POD, frame);
        if ran.action == SHOT {
            return (departures, stage.sent_ns(cast) - limit.burst_ns(), before);
        }
        assert_eq!(ran.action, REDIRECT);
        assert!(ran.departure_ns <= now_ns() + HORIZON_NS);
        departures.push(ran.departure_ns);
    }
}

#[test]
fn packets_wait_where_the_uplink_keeps_them() {
    both(|stage, cast| {
        stage.configure(|config| config.paced_uplink = 1);
        let frame = sent(cast, 1_000).frame();
        let limit = BandwidthLimit::new(MEGABIT, 1_000 * 8);
        stage.limit(cast, limit);
        let (departures, refused, at) = departures(stage, cast, &limit, &frame);
        assert!(refused > at + HORIZON_NS, "refused {refused} at {at}");
        let later: Vec<u64> = departures.iter().copied().filter(|time| *time != 0).collect();
        assert!(departures[0] == 0 && departures[1] == 0, "the burst: {:?}", &departures[..3]);
        let fit = usize::try_from(HORIZON_NS / limit.time_ns(1_000)).expect("a number");
        assert!(later.len() >= fit, "{}, not {fit}", later.len());
        let steps: BTreeSet<u64> = later.windows(2).map(|two| two[1] - two[0]).collect();
        assert_eq!(steps, BTreeSet::from([limit.time_ns(1_000)]), "one after the other, at the rate");
        stage.limit(cast, BandwidthLimit::NONE);
        assert_eq!(test_run(stage.program(FROM_POD.program), &FROM_POD, &frame).departure_ns, 0);
    });
}

/// No program sees a packet again while it waits.
#[test]
fn packets_do_not_wait_beyond_the_lease() {
    both(|stage, cast| {
        stage.configure(|config| config.paced_uplink = 1);
        let frame = sent(cast, 1_000).frame();
        let limit = BandwidthLimit::new(MEGABIT, 0);
        stage.limit(cast, limit);
        let left = HORIZON_NS / 4 * 3;
        let earliest = now_ns() + left;
        let boot = boot_ns();
        stage.set_lease(Lease::bounded(boot + left, boot, HORIZON_NS));
        let latest = now_ns() + left;
        let (departures, refused, _) = departures(stage, cast, &limit, &frame);
        let last = departures.last().copied().expect("a packet that waits");
        assert!(last <= latest && refused > earliest, "{last} of {latest}, {refused} of {earliest}");
        stage.set_lease(Lease::ENDLESS);
        assert_eq!(test_run(stage.program(FROM_POD.program), &FROM_POD, &frame).departure_ns, refused);
    });
}

#[test]
fn each_segment_counts_with_its_headers() {
    both(|stage, cast| {
        stage.limit(cast, BandwidthLimit::new(MEGABIT, 1_000 * MEGABIT));
        let whole = sent(cast, 3_000);
        let header = 3_000 - u32::try_from(whole.data).expect("a length");
        let segments = (3_000 - header).div_ceil(500);
        let run = TestRun { gso_size: 500, ..FROM_POD };
        stage.run_frame(&run, &whole.frame(), Verdict::SnatHere);
        let before = stage.sent_ns(cast);
        stage.run_frame(&run, &whole.frame(), Verdict::SnatHere);
        let bytes = 3_000 + (segments - 1) * header;
        assert_eq!(stage.sent_ns(cast) - before, BandwidthLimit::new(MEGABIT, 0).time_ns(bytes));
    });
}

#[test]
fn random_ports_are_not_the_pods() {
    both(|stage, cast| {
        stage.configure(|config| config.random_ports = 1);
        let flows = |stage: &mut Stage, body: fn(FrameSpec) -> FrameSpec| {
            for port in 4000..4032 {
                stage.run_frame(&FROM_POD, &body(packet(cast.pod, cast.world, port, 80)).frame(), Verdict::SnatHere);
            }
        };
        flows(stage, |sent| sent);
        flows(stage, |sent| sent.tcp(SYN));
        let mappings = stage.mappings();
        let is_outside = |key: &Tuple| key.direction() == Direction::Ingress && key.daddr == addr(cast.egress);
        let outside = mappings.values().filter(|(key, _)| is_outside(key));
        let (all, kept) = outside
            .fold((0, 0), |(all, kept), (key, entry)| (all + 1, kept + u32::from(key.dport() == entry.other.sport())));
        assert_eq!(all, 64);
        assert!(kept <= 2, "{kept} of 64 have the pod's port");
        stage.run_frame(&FROM_POD, &packet(cast.pod, cast.world, 5000, 80).tcp(ACK).frame(), Verdict::SnatHere);
        let has =
            |port| stage.mappings().values().any(|(key, entry)| key.dport() == port && entry.other.sport() == port);
        assert!(has(5000), "of a connection that is under way");
    });
}
