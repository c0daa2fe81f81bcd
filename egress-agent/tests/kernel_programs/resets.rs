//! Connections that must end: the generated reset, byte by byte, and connections that continue.

use egress_common::abi::{Direction, PodEntry, PolicyEntry, PolicyEntryKey, PolicySlot, Tuple, Verdict, WhenEmpty};
use egress_common::decide::phase::{self, Phase};

use crate::cast::{FamilyAddresses, addr};
use crate::expiry::TIMEOUTS;
use crate::frames::{ACK, Body, FIN, FrameSpec, RST, SYN, checksum, octets, packet};
use crate::stage::{FROM_POD, NEXT, REDIRECT, Ran, Stage, TO_NETDEV, TO_POD, TestRun, both, now_ns};

/// Sequence numbers of all segments (`frames`).
const SEQUENCE: u32 = 2;
const ACKNOWLEDGED: u32 = 2;

/// The reset to the sender of the packet.
pub(crate) fn reset_of(packet: &FrameSpec) -> Vec<u8> {
    let Body::Tcp(flags) = packet.body else { panic!("no segment: {packet:?}") };
    let (sequence, acknowledged, kind) = if flags & ACK != 0 {
        (ACKNOWLEDGED, 0, RST)
    } else {
        let ends = u32::from(flags & SYN != 0) + u32::from(flags & FIN != 0);
        (0, SEQUENCE + u32::try_from(packet.data).expect("a length") + ends, RST | ACK)
    };
    let mut segment = [packet.dport.to_be_bytes(), packet.sport.to_be_bytes()].concat();
    segment.extend([sequence.to_be_bytes(), acknowledged.to_be_bytes()].concat());
    segment.extend([0x50, kind, 0, 0, 0, 0, 0, 0]);
    let mut covered = [octets(packet.to), octets(packet.from)].concat();
    covered.extend([0, 6, 0, 20]);
    covered.extend(&segment);
    let sum = checksum(&covered).to_be_bytes();
    segment[16..18].copy_from_slice(&sum);
    // The reversed network header of the packet, with its options.
    let old = packet.frame();
    let headers = old.len() - packet.data - 20;
    let mut frame = [packet.smac, packet.dmac].concat();
    frame.extend(&old[12..headers]);
    if packet.from.is_ipv4() {
        let total = u16::try_from(headers - 14 + 20).expect("a length").to_be_bytes();
        frame[15] = 0;
        frame[16..18].copy_from_slice(&total);
        frame[22] = 64;
        frame[24..26].copy_from_slice(&[0, 0]);
        frame[26..34].copy_from_slice(&[octets(packet.to), octets(packet.from)].concat());
        let sum = checksum(&frame[14..headers]).to_be_bytes();
        frame[24..26].copy_from_slice(&sum);
    } else {
        let length = u16::try_from(headers - 54 + 20).expect("a length").to_be_bytes();
        frame[18..20].copy_from_slice(&length);
        frame[21] = 64;
        frame[22..54].copy_from_slice(&[octets(packet.to), octets(packet.from)].concat());
    }
    frame.extend(segment);
    frame
}

pub(crate) fn out(cast: &FamilyAddresses, flags: u8) -> FrameSpec {
    packet(cast.pod, cast.world, 4000, 80).tcp(flags)
}

/// The pod gets a reset, without other effects.
pub(crate) fn is_reset(stage: &mut Stage, run: &TestRun, packet: &FrameSpec) {
    let ran = stage.run_frame(run, &packet.frame(), Verdict::CutAnswered);
    assert_eq!(ran, Ran::plain(REDIRECT, reset_of(packet), 0), "{packet:?}");
}

pub(crate) fn open(stage: &mut Stage, cast: &FamilyAddresses) {
    for flags in [SYN, ACK] {
        stage.run_frame(&FROM_POD, &out(cast, flags).frame(), Verdict::SnatHere);
    }
}

fn deselect(stage: &mut Stage, cast: &FamilyAddresses) {
    let entry = PodEntry::known().with_cut_until(now_ns() + 60_000_000_000);
    stage.put_pod(cast.pod, entry);
}

pub(crate) fn put_slots(stage: &mut Stage, cast: &FamilyAddresses, slots: &[PolicySlot]) {
    let policy = PolicyEntry::with_slots(WhenEmpty::Drop, slots).expect("few slots");
    stage.policy.insert(PolicyEntryKey::new(cast.here, cast.family), policy, 0).expect("a policy");
}

pub(crate) fn phase_of(stage: &Stage, cast: &FamilyAddresses) -> Phase {
    let key = Tuple::new(Direction::Egress, addr(cast.pod), addr(cast.world), 4000, 80, 6);
    phase::flow(&stage.flows.get(&key, 0).expect("a flow"))
}

#[test]
fn a_pod_whose_address_was_removed_gets_a_reset() {
    both(|stage, cast| {
        open(stage, cast);
        put_slots(stage, cast, &[]);
        assert_eq!(phase_of(stage, cast), Phase::Established);
        for options in [0, 1, 2] {
            for (flags, data) in [(ACK, 0), (ACK, 1), (ACK, 1000), (FIN | ACK, 7), (0, 33), (FIN, 33)] {
                let sent = out(cast, flags);
                let sent = sent.with(|packet| (packet.data, packet.options, packet.ttl) = (data, options, 9));
                is_reset(stage, &FROM_POD, &sent);
            }
        }
        assert_eq!(phase_of(stage, cast), Phase::Closing, "as the reset of anybody else");
        // A GSO packet gets one answer.
        let many = out(cast, ACK).with(|packet| packet.data = 3000);
        is_reset(stage, &TestRun { gso_size: 1400, ..FROM_POD }, &many);
        stage.drops(&FROM_POD, &out(cast, RST), Verdict::AddressGone);
        stage.drops(&FROM_POD, &out(cast, RST | ACK), Verdict::AddressGone);
        // It begins again with a new address.
        put_slots(stage, cast, &[PolicySlot::here(addr(cast.egress))]);
        open(stage, cast);
    });
}

#[test]
fn a_deselected_pod_gets_a_reset() {
    both(|stage, cast| {
        open(stage, cast);
        deselect(stage, cast);
        is_reset(stage, &FROM_POD, &out(cast, ACK));
        assert_eq!(phase_of(stage, cast), Phase::Closing, "so that no idle reset follows");
        is_reset(stage, &FROM_POD, &out(cast, FIN | ACK));
        stage.drops(&FROM_POD, &out(cast, RST), Verdict::FlowCut);
        // A packet that bypasses `from_pod` gets no answer and does not leave.
        stage.drops(&TO_NETDEV, &out(cast, ACK), Verdict::FlowCut);
        stage.passes(&FROM_POD, &packet(cast.pod, cast.world, 4001, 80).tcp(ACK), Verdict::NotSelected);
        stage.passes(&FROM_POD, &packet(cast.pod, cast.world, 4000, 80), Verdict::NotSelected);
        for flags in [SYN, ACK, FIN | ACK] {
            stage.passes(&FROM_POD, &out(cast, flags), Verdict::NotSelected);
        }
    });
}

/// A fragment, by its offset and whether more follow.
pub(crate) fn piece(whole: &FrameSpec, fragment: (u16, bool)) -> FrameSpec {
    whole.clone().with(|packet| {
        (packet.fragment, packet.data, packet.dont_fragment) = (fragment, 800, false);
    })
}

#[test]
fn no_packet_of_a_reset_connection_leaves() {
    both(|stage, cast| {
        open(stage, cast);
        let (first, later) = (piece(&out(cast, ACK), (0, true)), piece(&out(cast, ACK), (100, false)));
        stage.drops(&FROM_POD, &later, Verdict::FragmentHeld);
        deselect(stage, cast);
        // Both begin again with the same outcome.
        stage.drops(&FROM_POD, &first, Verdict::FragmentsReleased);
        for piece in [&first, &later] {
            stage.drops(&FROM_POD, piece, Verdict::FlowCut);
            stage.drops(&TO_NETDEV, piece, Verdict::FlowCut);
        }
    });
}

#[test]
fn an_inbound_connection_on_the_tuple_of_a_reset_one_is_new() {
    both(|stage, cast| {
        open(stage, cast);
        deselect(stage, cast);
        stage.passes(&TO_POD, &packet(cast.world, cast.pod, 80, 4000).tcp(SYN), Verdict::NotOurs);
        for flags in [SYN | ACK, ACK, FIN | ACK] {
            stage.passes(&FROM_POD, &out(cast, flags), Verdict::NotSelected);
        }
    });
}

#[test]
fn a_reset_connection_is_remembered_while_the_pod_continues_it() {
    both(|stage, cast| {
        stage.configure(|config| config.timeouts = TIMEOUTS);
        open(stage, cast);
        deselect(stage, cast);
        let kept = u64::from(TIMEOUTS.tcp_closing);
        for _ in 0..3 {
            is_reset(stage, &FROM_POD, &out(cast, ACK));
            stage.age(kept / 2);
            stage.sweep(false);
        }
        is_reset(stage, &FROM_POD, &out(cast, ACK));
        stage.age(kept + 1);
        stage.sweep(false);
        assert_eq!(stage.entries()[1], 0, "reset, and silent");
    });
}

#[test]
fn an_idle_reset_probe_changes_no_state() {
    both(|stage, cast| {
        open(stage, cast);
        for selected in [true, false] {
            if !selected {
                deselect(stage, cast);
            }
            stage.passes(&TO_POD, &packet(cast.world, cast.pod, 80, 4000).tcp(ACK), Verdict::NotOurs);
            assert_eq!((phase_of(stage, cast), stage.entries()[2]), (Phase::Established, 0));
        }
    });
}

#[test]
fn a_flow_to_another_node_keeps_the_node_address() {
    both(|stage, cast| {
        let sent = |flags| packet(cast.pod, cast.other_node, 4000, 80).tcp(flags);
        let marked = |stage: &mut Stage, flags| {
            let ran = stage.run_frame(&FROM_POD, &sent(flags).frame(), Verdict::MarkedNode);
            let left = stage.run_frame(&TestRun { mark: ran.mark, ..TO_NETDEV }, &ran.frame, Verdict::NodeSnat);
            assert_eq!((ran.action, left.action), (NEXT, NEXT));
            left.frame
        };
        marked(stage, SYN);
        let before = marked(stage, ACK);
        deselect(stage, cast);
        assert_eq!(marked(stage, ACK), before, "the same source and port");
        stage.passes(&FROM_POD, &sent(SYN), Verdict::NotSelected);
    });
}
