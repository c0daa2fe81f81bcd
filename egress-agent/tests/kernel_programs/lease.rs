//! The lease: without one nothing is emitted or claimed with an egress IP, by any path, and nothing else changes.

use std::time::Duration;

use aya::programs::TcAttachType;
use egress_common::abi::{Family, HandoverStage, Lease, Verdict};
use nix::time::{ClockId, clock_gettime};

use crate::cast::{FamilyAddresses, V4, addr};
use crate::frames::{ACK, FrameSpec, packet};
use crate::from_overlay::{FarEnd, arrives, is, on_devices, wrapped};
use crate::neighbours::asks_for;
use crate::races::{CPUS, pin};
use crate::stage::{
    FROM_NETDEV, FROM_POD, FURTHER, NEXT, REDIRECT, REDIRECTED, Ran, SHOT, Stage, TO_NETDEV, TestRun, UPLINK_MAC,
    WAITING, both, test_run,
};

/// More than a test takes between two steps.
const STALL: Duration = Duration::from_secs(20);
const HOUR: Duration = Duration::from_secs(3600);

/// Both families, each beginning with a lease.
fn each(test: impl Fn(&mut Stage, &FamilyAddresses) + Send + 'static) {
    both(move |stage, cast| {
        stage.set_lease(Lease::ENDLESS);
        test(stage, cast);
    });
}

pub(crate) fn clock_ns(clock: ClockId) -> u64 {
    let now = clock_gettime(clock).expect("the clock");
    u64::try_from(now.tv_sec()).expect("a time") * 1_000_000_000 + u64::try_from(now.tv_nsec()).expect("a time")
}

/// The clock of the lease.
pub(crate) fn boot_ns() -> u64 {
    clock_ns(ClockId::CLOCK_BOOTTIME)
}

fn ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).expect("a time")
}

fn lasts(stage: &mut Stage, time: Duration) {
    let now = boot_ns();
    stage.set_lease(Lease::bounded(now + ns(time), now, ns(HOUR)));
}

/// A lease of an hour on a machine whose latest heartbeat is so old; a gap of [`STALL`] ends it.
fn beat_ago(stage: &mut Stage, time: Duration) -> Lease {
    let now = boot_ns();
    let lease = Lease::bounded(now + ns(HOUR), now - ns(time), ns(STALL));
    stage.set_lease(lease);
    lease
}

fn out(cast: &FamilyAddresses) -> FrameSpec {
    packet(cast.pod, cast.world, 4000, 80)
}

fn back(cast: &FamilyAddresses) -> FrameSpec {
    packet(cast.world, cast.egress, 80, 4000).with(|packet| packet.dmac = UPLINK_MAC)
}

#[test]
fn a_lease_expires() {
    each(|stage, cast| {
        lasts(stage, HOUR);
        stage.run_frame(&FROM_POD, &out(cast).frame(), Verdict::SnatHere);
        for expired in [0, 1, boot_ns() - 1] {
            stage.set_lease(Lease::bounded(expired, boot_ns(), ns(HOUR)));
            stage.drops(&FROM_POD, &out(cast), Verdict::LeaseExpired);
            stage.drops(&FROM_POD, &out(cast).with(|packet| packet.sport = 4001), Verdict::LeaseExpired);
        }
        lasts(stage, Duration::from_millis(50));
        std::thread::sleep(Duration::from_millis(60));
        stage.drops(&FROM_POD, &out(cast), Verdict::LeaseExpired);
        lasts(stage, HOUR);
        stage.run_frame(&FROM_POD, &out(cast).frame(), Verdict::SnatHere);
        let made = if cast.family == Family::V4 { 2 } else { 4 };
        assert_eq!(stage.entries()[0], made, "one mapping for each family: what was dropped has made none");
    });
}

/// After a pause of the machine, the first packet ends the lease, before the agent runs.
#[test]
fn a_gap_in_the_heartbeat_ends_it_for_good() {
    each(|stage, cast| {
        let (asks, answered) = asks_for(cast.egress);
        let expired = |stage: &Stage| assert_eq!(stage.lease().until_ns, Lease::EXPIRED.until_ns);
        beat_ago(stage, STALL / 2);
        stage.run_frame(&FROM_POD, &out(cast).frame(), Verdict::SnatHere);
        beat_ago(stage, STALL + LOOKS);
        stage.drops(&FROM_POD, &out(cast), Verdict::LeaseExpired);
        expired(stage);
        beat_ago(stage, STALL + LOOKS);
        assert_eq!(stage.run_frame(&FROM_NETDEV, &asks, Verdict::NotOurs).action, NEXT);
        expired(stage);
        // Also if the first frame needs no lease.
        beat_ago(stage, STALL + LOOKS);
        let other = packet(cast.world, cast.other_node, 80, 4000).with(|packet| packet.dmac = UPLINK_MAC);
        stage.passes(&FROM_NETDEV, &other, Verdict::NotOurs);
        expired(stage);
        // The next frame is a heartbeat, and does not renew the lease.
        for _ in 0..3 {
            std::thread::sleep(LOOKS);
            assert_eq!(stage.run_frame(&FROM_NETDEV, &asks, Verdict::NotOurs).action, NEXT);
            stage.drops(&FROM_POD, &out(cast), Verdict::LeaseExpired);
        }
        lasts(stage, HOUR);
        assert_eq!(stage.run_frame(&FROM_NETDEV, &asks, answered).action, REDIRECT);
        stage.run_frame(&FROM_POD, &out(cast).frame(), Verdict::SnatHere);
    });
}

/// Longer than the interval of heartbeat checks on a kernel with HZ=100.
const LOOKS: Duration = Duration::from_millis(100);

/// A node without its agent, and with traffic on the uplink, serves until its deadline.
#[test]
fn each_frame_of_the_uplink_is_a_heartbeat() {
    each(|stage, cast| {
        let other = packet(cast.world, cast.other_node, 80, 4000).with(|packet| packet.dmac = UPLINK_MAC);
        for _ in 0..3 {
            std::thread::sleep(LOOKS);
            let before = beat_ago(stage, STALL / 2);
            let begin = boot_ns();
            stage.passes(&FROM_NETDEV, &other, Verdict::NotOurs);
            let after = stage.lease();
            assert!(after.heartbeat_ns >= begin && after.until_ns == before.until_ns, "{before:?}, {after:?}");
            // Pods' packets are no heartbeat: the node may be isolated.
            let before = beat_ago(stage, STALL / 2);
            stage.run_frame(&FROM_POD, &out(cast).frame(), Verdict::SnatHere);
            assert_eq!(stage.lease().heartbeat_ns, before.heartbeat_ns);
            // Nor are frames of another network.
            std::thread::sleep(LOOKS);
            stage.passes(&TestRun { ifindex: FURTHER, ..FROM_NETDEV }, &other, Verdict::NotOurs);
            assert_eq!(stage.lease().heartbeat_ns, before.heartbeat_ns);
        }
        stage.set_lease(Lease::ENDLESS);
        std::thread::sleep(LOOKS);
        stage.passes(&FROM_NETDEV, &other, Verdict::NotOurs);
        stage.run_frame(&FROM_POD, &out(cast).frame(), Verdict::SnatHere);
        assert_eq!(stage.lease().until_ns, Lease::ENDLESS.until_ns, "no gap ends it");
    });
}

/// Other functions of the node continue.
#[test]
fn packets_without_an_egress_ip_need_no_lease() {
    each(|stage, cast| {
        stage.run_frame(&FROM_POD, &out(cast).frame(), Verdict::SnatHere);
        stage.set_lease(Lease::EXPIRED);
        // Answers still reach pods.
        stage.run_frame(&FROM_NETDEV, &back(cast).frame(), Verdict::ReplyHere);
        stage.run_frame(&FROM_POD, &packet(cast.away_pod, cast.world, 1, 2).frame(), Verdict::ToGateway);
        stage.run_frame(&FROM_POD, &packet(cast.pod, cast.other_node, 1, 2).frame(), Verdict::MarkedNode);
        let marked = TestRun { mark: egress_common::abi::NODE_MARK, ..TO_NETDEV };
        stage.run_frame(&marked, &packet(cast.pod, cast.other_node, 1, 2).frame(), Verdict::NodeSnat);
        stage.passes(&FROM_POD, &packet(cast.known_pod, cast.world, 1, 2), Verdict::NotSelected);
    });
}

#[test]
fn neighbours_get_no_answer_without_a_lease() {
    each(|stage, cast| {
        let (asks, answered) = asks_for(cast.egress);
        assert_eq!(stage.run_frame(&FROM_NETDEV, &asks, answered).action, REDIRECT);
        stage.set_lease(Lease::EXPIRED);
        assert_eq!(stage.run_frame(&FROM_NETDEV, &asks, Verdict::NotOurs).action, NEXT);
    });
}

#[test]
fn no_error_leaves_from_the_address() {
    each(|stage, cast| {
        stage.run_frame(&FROM_POD, &out(cast).frame(), Verdict::SnatHere);
        let long = back(cast).with(|packet| packet.data = 1472);
        stage.run_frame(&FROM_NETDEV, &long.frame(), Verdict::MtuAnswered);
        stage.set_lease(Lease::EXPIRED);
        stage.drops(&FROM_NETDEV, &long, Verdict::LeaseExpired);
    });
}

/// Packets from the overlay, also during a hand-over to this node.
#[test]
fn pods_of_other_nodes_get_no_egress_ip() {
    on_devices(&[("from_overlay", "egress0", TcAttachType::Ingress)], |stage, cast| {
        let wire = FarEnd::of("out0");
        let sent = packet(cast.remote_pod, cast.world, 4000, 80);
        let frame = wrapped(V4.other_node, cast.here, &sent);
        assert_eq!(arrives(stage, &wire, &frame), is(Verdict::SnatForNode));
        stage.set_lease(Lease::EXPIRED);
        assert_eq!(arrives(stage, &wire, &frame), is(Verdict::LeaseExpired));
        for course in [HandoverStage::Arriving, HandoverStage::Open] {
            stage.own(cast.here, cast.egress);
            stage.hand_over(cast, course);
            stage.owned.remove(&cast.here).expect("it is owned");
            // From a pod of a third node, as the old owner passes it on.
            let passed = packet(cast.pod, cast.world, 4002, 80);
            assert_eq!(arrives(stage, &wire, &wrapped(V4.other_node, cast.here, &passed)), is(Verdict::LeaseExpired));
        }
        stage.set_lease(Lease::ENDLESS);
    });
}

/// Flow cache entries expire with the lease.
#[test]
fn the_flow_cache_ends_with_it() {
    each(|stage, cast| {
        pin(CPUS[0]);
        stage.configure(|config| config.decisions = 1);
        let sent = out(cast).tcp(ACK);
        for _ in 0..20 {
            lasts(stage, Duration::from_millis(40));
            let start = boot_ns();
            // The third is served from the cache, if the machine is fast enough.
            for _ in 0..3 {
                test_run(stage.program("from_pod"), &FROM_POD, &sent.frame());
            }
            // After the end, plus the inaccuracy of the cache's clock.
            std::thread::sleep(Duration::from_millis(60).saturating_sub(Duration::from_nanos(boot_ns() - start)));
            stage.drops(&FROM_POD, &sent, Verdict::LeaseExpired);
        }
        stage.configure(|_| ());
    });
}

/// A packet that has waited for its neighbour is checked again at the uplink.
#[test]
fn a_fragment_that_waited_needs_a_lease_when_it_leaves() {
    each(|stage, cast| {
        let ran = stage.run_frame(&FROM_POD, &out(cast).frame(), Verdict::SnatHere);
        assert_eq!(ran.priority, WAITING);
        assert_eq!(ran.mark, cast.here);
        let waited = TestRun { priority: ran.priority, mark: ran.mark, ..TO_NETDEV };
        assert_eq!(stage.run_frame(&waited, &ran.frame, Verdict::NotOurs), Ran::plain(NEXT, ran.frame.clone(), 0));
        stage.set_lease(Lease::EXPIRED);
        assert_eq!(stage.run_frame(&waited, &ran.frame, Verdict::LeaseExpired).action, SHOT);
        stage.set_lease(Lease::ENDLESS);
        // Another node owns the address by now.
        stage.owned_addr.remove(&addr(cast.egress)).expect("it is owned");
        stage.owned.remove(&cast.here).expect("it is owned");
        assert_eq!(stage.run_frame(&waited, &ran.frame, Verdict::NotGateway).action, SHOT);
        // This node is the new owner, or passes on.
        for (course, verdict) in [
            (HandoverStage::Arriving, Verdict::NotOurs),
            (HandoverStage::Open, Verdict::NotOurs),
            (HandoverStage::Leaving, Verdict::NotGateway),
        ] {
            stage.own(cast.here, cast.egress);
            stage.hand_over(cast, course);
            stage.owned.remove(&cast.here).expect("it is owned");
            stage.run_frame(&waited, &ran.frame, verdict);
        }
        stage.handovers.remove(&cast.here).expect("it is there");
        // The policy has another address here.
        stage.own(cast.here, if cast.family == Family::V4 { "172.18.0.177" } else { "fd00:172:18::177" });
        stage.run_frame(&waited, &ran.frame, Verdict::NotGateway);
        stage.own(cast.here, cast.egress);
        // A packet to another node has this node's address, and is checked there.
        let sent = stage.run_frame(&FROM_POD, &packet(cast.away_pod, cast.world, 1, 2).frame(), Verdict::ToGateway);
        stage.set_lease(Lease::EXPIRED);
        assert_eq!(sent.priority, REDIRECTED);
        let signed = TestRun { priority: sent.priority, ..TO_NETDEV };
        assert_eq!(stage.run_frame(&signed, &sent.frame, Verdict::NotOurs).action, NEXT);
    });
}
