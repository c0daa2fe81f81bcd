//! Budgets of generated packets, by pod and kind: no flood takes the answers of another pod or kind, and forged sources
//! have no budgets.

use std::collections::HashSet;
use std::time::Instant;

use aya::programs::TcAttachType;
use egress_common::abi::{AnswerKey, AnswerKind, Family, PolicySlot, Verdict};
use egress_common::decide::limit::POD;
use egress_common::decide::phase::Phase;

use crate::cast::{FamilyAddresses, V4, V6, addr};
use crate::frames::{ACK, Body, FrameSpec, RST, packet};
use crate::from_overlay::{FarEnd, arrives, is, on_devices, wrapped};
use crate::resets::{is_reset, open, out, phase_of, piece, put_slots};
use crate::stage::{FROM_NETDEV, FROM_POD, Stage, TestRun, UPLINK_MAC, both, on_stage_with, test_run};

fn oversize(pod: &str, cast: &FamilyAddresses) -> FrameSpec {
    packet(pod, cast.world, 4000, 80).with(|packet| packet.data = 1600)
}

fn hairpin(cast: &FamilyAddresses) -> FrameSpec {
    packet(cast.pod, cast.egress, 4000, 80)
}

/// A packet of this peer to the egress IP, too long for the pod.
fn oversize_reply(cast: &FamilyAddresses, peer: &str, port: u16) -> FrameSpec {
    packet(peer, cast.egress, 80, port).with(|packet| (packet.data, packet.dmac) = (1450, UPLINK_MAC))
}

fn keys<const N: usize>(used: [(&str, AnswerKind); N]) -> HashSet<AnswerKey> {
    used.into_iter().map(|(pod, kind)| AnswerKey::new(addr(pod), kind)).collect()
}

/// Sends 500 packets by each of two threads; they get the answers of one full budget.
fn flood<'a>(
    stage: &mut Stage,
    run: &TestRun,
    packets: impl Iterator<Item = &'a FrameSpec> + Clone,
    answered: Verdict,
) {
    let frames: Vec<_> = packets.map(FrameSpec::frame).collect();
    // Loads the program, which takes long.
    stage.program(run.program);
    let (before, begun, program) = (stage.packets_of(answered), Instant::now(), stage.loaded(run.program));
    let send = || frames.iter().cycle().take(500).for_each(|frame| drop(test_run(program, run, frame)));
    std::thread::scope(|scope| (0..2).for_each(|_| drop(scope.spawn(send))));
    let answers = stage.packets_of(answered) - before;
    // The clock of the programs is late by a tick, of ten milliseconds at most. Both may find no entry at first.
    let filled = u64::try_from(begun.elapsed().as_millis()).expect("a time") + 12;
    let most = POD.burst + filled;
    assert!((POD.burst..=most).contains(&answers), "{answers} answers, not {} to {most}", POD.burst);
}

#[test]
fn a_flood_of_one_pod_takes_no_packet_too_big_from_another() {
    both(|stage, cast| {
        let [flooding, other] = [oversize(cast.pod, cast), oversize(cast.away_pod, cast)];
        flood(stage, &FROM_POD, [&flooding].into_iter(), Verdict::MtuAnswered);
        stage.leave_no_answers(cast.pod, AnswerKind::TooBigToPod);
        stage.drops(&FROM_POD, &flooding, Verdict::MtuExceeded);
        stage.run_frame(&FROM_POD, &other.frame(), Verdict::MtuAnswered);
        let used = keys([(cast.pod, AnswerKind::TooBigToPod), (cast.away_pod, AnswerKind::TooBigToPod)]);
        assert_eq!(stage.answered(), used);
        stage.refill_answers();
    });
}

#[test]
fn a_flood_of_resets_or_refusals_takes_no_packet_too_big() {
    both(|stage, cast| {
        open(stage, cast);
        put_slots(stage, cast, &[]);
        flood(stage, &FROM_POD, [&out(cast, ACK)].into_iter(), Verdict::CutAnswered);
        stage.leave_no_answers(cast.pod, AnswerKind::Reset);
        flood(stage, &FROM_POD, [&hairpin(cast)].into_iter(), Verdict::HairpinAnswered);
        stage.leave_no_answers(cast.pod, AnswerKind::Hairpin);
        put_slots(stage, cast, &[PolicySlot::here(addr(cast.egress))]);
        stage.run_frame(&FROM_POD, &oversize(cast.pod, cast).frame(), Verdict::MtuAnswered);
        stage.refill_answers();
    });
}

#[test]
fn peers_of_a_pod_share_its_budget() {
    both(|stage, cast| {
        let peer = |number: u32| match cast.family {
            Family::V4 => format!("198.51.100.{number}"),
            Family::V6 => format!("2001:db8::{number}"),
        };
        let peers: Vec<_> = (20..30).map(peer).collect();
        stage.select_as(cast.known_pod, cast.pod);
        for peer in &peers {
            stage.run_frame(&FROM_POD, &packet(cast.pod, peer, 4000, 80).frame(), Verdict::SnatHere);
        }
        stage.run_frame(&FROM_POD, &packet(cast.known_pod, &peers[0], 4001, 80).frame(), Verdict::SnatHere);
        let replies: Vec<_> = peers.iter().map(|peer| oversize_reply(cast, peer, 4000)).collect();
        flood(stage, &FROM_NETDEV, replies.iter(), Verdict::MtuAnswered);
        stage.leave_no_answers(cast.pod, AnswerKind::TooBigToWorld);
        stage.drops(&FROM_NETDEV, &replies[9], Verdict::MtuExceeded);
        // Neither the pod's own path MTU discovery nor that of another pod's peer.
        stage.run_frame(&FROM_POD, &oversize(cast.pod, cast).frame(), Verdict::MtuAnswered);
        let other = oversize_reply(cast, &peers[0], 4001);
        stage.run_frame(&FROM_NETDEV, &other.frame(), Verdict::MtuAnswered);
        let world = AnswerKind::TooBigToWorld;
        let used = keys([(cast.pod, world), (cast.pod, AnswerKind::TooBigToPod), (cast.known_pod, world)]);
        assert_eq!(stage.answered(), used);
        stage.refill_answers();
    });
}

#[test]
fn forged_sources_have_no_budgets() {
    both(|stage, cast| {
        // No pods of this node, and a peer without a NAT entry.
        stage.passes(&FROM_POD, &oversize(cast.remote_pod, cast), Verdict::NotPod);
        stage.passes(&FROM_POD, &oversize(cast.world, cast), Verdict::NotPod);
        stage.drops(&FROM_NETDEV, &oversize_reply(cast, cast.world, 4000), Verdict::NoNatEntry);
        assert_eq!(stage.answered(), HashSet::new());
    });
}

#[test]
fn remote_pods_have_their_own_budgets() {
    on_devices(&[("from_overlay", "egress0", TcAttachType::Ingress)], |stage, cast| {
        let wire = FarEnd::of("out0");
        stage.set_mtu(cast.here, 1200);
        let beside = if cast.family == Family::V4 { "10.244.2.11" } else { "fd00:10:244:2::11" };
        let [one, other, forged] = [cast.remote_pod, beside, cast.pod].map(|from| {
            let large = packet(from, cast.world, 4000, 80).with(|packet| packet.data = 1250);
            wrapped(V4.other_node, cast.here, &large)
        });
        stage.leave_no_answers(cast.remote_pod, AnswerKind::TooBigToPod);
        assert_eq!(arrives(stage, &wire, &one), is(Verdict::MtuExceeded));
        assert_eq!(arrives(stage, &wire, &other), is(Verdict::MtuAnswered));
        assert_eq!(arrives(stage, &wire, &forged), is(Verdict::ForgedInner));
        let used = [cast.remote_pod, beside].map(|pod| (pod, AnswerKind::TooBigToPod));
        assert_eq!(stage.answered(), keys(used));
        stage.configure(|_| ());
        stage.refill_answers();
    });
}

/// Evicted budgets are full again.
#[test]
fn a_flood_of_pods_takes_no_answer_from_another() {
    on_stage_with(&[("answers", 8)], |stage| {
        for cast in [V4, V6] {
            for number in 0..1000_u16 {
                let [high, low] = number.to_be_bytes();
                stage.leave_no_answers(&format!("10.1.{high}.{low}"), AnswerKind::TooBigToPod);
                if number % 100 == 99 {
                    for pod in [cast.pod, cast.away_pod] {
                        stage.run_frame(&FROM_POD, &oversize(pod, &cast).frame(), Verdict::MtuAnswered);
                    }
                }
            }
        }
    });
}

#[test]
fn the_total_of_a_kind_is_limited() {
    both(|stage, cast| {
        stage.leave_no_answers_in_total(AnswerKind::TooBigToPod);
        for pod in [cast.pod, cast.away_pod] {
            stage.drops(&FROM_POD, &oversize(pod, cast), Verdict::MtuExceeded);
        }
        assert_eq!(stage.answered(), HashSet::new(), "no pod has used its own budget");
        stage.run_frame(&FROM_POD, &hairpin(cast).frame(), Verdict::HairpinAnswered);
        stage.refill_answers();
    });
}

#[test]
fn unanswered_packets_use_no_budget() {
    both(|stage, cast| {
        open(stage, cast);
        put_slots(stage, cast, &[]);
        let cut = out(cast, ACK);
        for unanswered in [out(cast, RST), piece(&cut, (0, true)), piece(&cut, (100, false))] {
            stage.drops(&FROM_POD, &unanswered, Verdict::AddressGone);
        }
        stage.drops(&FROM_POD, &hairpin(cast).body(Body::Unreachable), Verdict::Hairpin);
        assert_eq!(stage.answered(), HashSet::new());
        is_reset(stage, &FROM_POD, &cut);
        stage.run_frame(&FROM_POD, &hairpin(cast).frame(), Verdict::HairpinAnswered);
        assert_eq!(stage.answered(), keys([(cast.pod, AnswerKind::Reset), (cast.pod, AnswerKind::Hairpin)]));
        stage.refill_answers();
        put_slots(stage, cast, &[PolicySlot::here(addr(cast.egress))]);
    });
}

#[test]
fn packets_beyond_a_budget_end_under_the_name_of_their_cause() {
    both(|stage, cast| {
        open(stage, cast);
        for kind in AnswerKind::ALL {
            stage.leave_no_answers(cast.pod, kind);
        }
        stage.drops(&FROM_POD, &hairpin(cast), Verdict::Hairpin);
        stage.drops(&FROM_POD, &oversize(cast.pod, cast), Verdict::MtuExceeded);
        let reply = oversize_reply(cast, cast.world, 4000).tcp(ACK);
        stage.drops(&FROM_NETDEV, &reply, Verdict::MtuExceeded);
        put_slots(stage, cast, &[]);
        let cut = out(cast, ACK);
        stage.drops(&FROM_POD, &cut, Verdict::AddressGone);
        assert_eq!(phase_of(stage, cast), Phase::Established, "no reset was sent");
        stage.leave_one_answer(cast.pod, AnswerKind::Reset);
        is_reset(stage, &FROM_POD, &cut);
        stage.refill_answers();
        put_slots(stage, cast, &[PolicySlot::here(addr(cast.egress))]);
    });
}
