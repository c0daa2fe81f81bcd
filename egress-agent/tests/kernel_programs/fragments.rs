//! Fragments that arrive before their first one: held, and reinjected at the same hook when it arrives.
//!
//! A test run performs the reinjection, so reinjected frames are received on the device, as the hook would get them,
//! and run through the program again.

use std::collections::BTreeSet;
use std::io::IoSliceMut;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use egress_common::abi::Verdict;
use nix::sys::socket::{
    AddressFamily, LinkAddr, MsgFlags, SockFlag, SockProtocol, SockType, recvmsg, setsockopt, socket, sockopt,
};

use crate::cast::FamilyAddresses;
use crate::frames::{ACK, Body, FrameSpec, ip, octets, packet};
use crate::races::{CPUS, has_both_cpus, pin, rounds};
use crate::skips::skipped;
use crate::stage::{FROM_NETDEV, FROM_POD, REDIRECT, SHOT, Stage, TestRun, UPLINK_MAC, both, test_run};

/// Receives reinjected frames on the devices of the stage.
struct FrameListener {
    socket: OwnedFd,
}

impl FrameListener {
    fn open() -> Self {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let socket = socket(AddressFamily::Packet, SockType::Raw, flags, SockProtocol::EthAll).expect("a socket");
        setsockopt(&socket, sockopt::RcvBufForce, &(64 << 20)).expect("a long queue");
        Self { socket }
    }

    /// New frames on this hook's device from the sender of this packet.
    fn received(&self, run: &TestRun, like: &FrameSpec) -> Vec<Vec<u8>> {
        let mut frames = Vec::new();
        let mut buffer = [0; 4096];
        loop {
            let mut parts = [IoSliceMut::new(&mut buffer)];
            let Ok(message) = recvmsg::<LinkAddr>(self.socket.as_raw_fd(), &mut parts, None, MsgFlags::empty()) else {
                return frames;
            };
            let (length, from) = (message.bytes, message.address.expect("a link"));
            let is_coming = from.pkttype() != libc::PACKET_OUTGOING;
            if is_coming && from.ifindex() == usize::try_from(run.ifindex).expect("an index") {
                let source = if like.from.is_ipv4() { 26..30 } else { 22..38 };
                frames.extend((buffer.get(source) == Some(&octets(like.from))).then(|| buffer[..length].to_vec()));
            }
        }
    }
}

/// A datagram with this identification in three fragments.
fn fragments_of(whole: &FrameSpec, number: u16) -> [FrameSpec; 3] {
    let fragment = |fragment, data| {
        whole.clone().with(|packet| {
            (packet.fragment, packet.data, packet.number, packet.dont_fragment) = (fragment, data, number, false);
        })
    };
    // The first one has eight bytes of a transport header.
    [fragment((0, true), 1000), fragment((126, true), 1000), fragment((251, false), 40)]
}

/// The fragments arrive in the wrong order, and all of them are forwarded, each as `expected`.
fn reversed(
    stage: &mut Stage,
    run: &TestRun,
    fragments: &[FrameSpec; 3],
    on: Verdict,
    expected: impl Fn(&FrameSpec) -> FrameSpec,
) {
    let listener = FrameListener::open();
    let [first, middle, last] = fragments;
    for later in [last, middle] {
        stage.drops(run, later, Verdict::FragmentHeld);
    }
    assert_eq!(listener.received(run, first), Vec::<Vec<u8>>::new(), "nothing passes without ports");
    stage.drops(run, first, Verdict::FragmentsReleased);
    let again = listener.received(run, first);
    assert_eq!(again, [first, last, middle].map(FrameSpec::frame), "the first one first");
    for (frame, fragment) in again.iter().zip([first, last, middle]) {
        let ran = stage.run_frame(run, frame, on);
        assert_eq!((ran.action, &ran.frame[14..]), (REDIRECT, &expected(fragment).frame()[14..]), "{fragment:?}");
    }
    assert_eq!(stage.run_frame(run, &first.frame(), on).action, REDIRECT, "nothing waits any more");
    assert_eq!(listener.received(run, first), Vec::<Vec<u8>>::new());
}

fn to_world(cast: &FamilyAddresses) -> FrameSpec {
    packet(cast.pod, cast.world, 4000, 80)
}

const BODIES: [Body; 3] = [Body::Udp, Body::Tcp(ACK), Body::EchoRequest];

#[test]
fn fragments_from_a_pod_wait_for_the_first_fragment() {
    both(|stage, cast| {
        for (number, body) in (1..).zip(BODIES) {
            let fragments = fragments_of(&to_world(cast).body(body), number);
            reversed(stage, &FROM_POD, &fragments, Verdict::SnatHere, |fragment| {
                fragment.snat(cast.egress, 4000).hop()
            });
        }
    });
}

/// The answer to a packet of a pod.
fn answer(stage: &mut Stage, cast: &FamilyAddresses, body: Body) -> FrameSpec {
    stage.run_frame(&FROM_POD, &to_world(cast).body(body).frame(), Verdict::SnatHere);
    let answer = packet(cast.world, cast.egress, 80, 4000).body(body).with(|packet| packet.dmac = UPLINK_MAC);
    match body {
        Body::EchoRequest => answer.body(Body::EchoReply).with(|packet| packet.sport = 4000),
        _ => answer,
    }
}

#[test]
fn fragments_from_outside_wait_for_the_first_fragment() {
    both(|stage, cast| {
        for (number, body) in (1..).zip(BODIES) {
            let fragments = fragments_of(&answer(stage, cast, body), number);
            reversed(stage, &FROM_NETDEV, &fragments, Verdict::ReplyHere, |fragment| {
                fragment.dnat(cast.pod, 4000).hop()
            });
        }
    });
}

#[test]
fn a_first_fragment_without_a_flow_releases_nothing() {
    both(|stage, cast| {
        let answer = answer(stage, cast, Body::Udp);
        let [_, middle, last] = fragments_of(&answer, 1);
        let other = answer.with(|packet| packet.sport = 81);
        let [first, ..] = fragments_of(&other, 1);
        let listener = FrameListener::open();
        stage.drops(&FROM_NETDEV, &last, Verdict::FragmentHeld);
        stage.drops(&FROM_NETDEV, &first, Verdict::NoNatEntry);
        // It stored no ports either.
        stage.drops(&FROM_NETDEV, &middle, Verdict::FragmentHeld);
        assert_eq!(listener.received(&FROM_NETDEV, &first), Vec::<Vec<u8>>::new());
    });
}

#[test]
fn a_first_fragment_of_another_datagram_with_the_same_id_discards_the_old_one() {
    both(|stage, cast| {
        let answer = answer(stage, cast, Body::Udp);
        let [first, middle, _] = fragments_of(&answer, 1);
        for fragment in [&first, &middle] {
            stage.run_frame(&FROM_NETDEV, &fragment.frame(), Verdict::ReplyHere);
        }
        let [other, ..] = fragments_of(&answer.with(|packet| packet.sport = 81), 1);
        stage.drops(&FROM_NETDEV, &other, Verdict::NoNatEntry);
        stage.drops(&FROM_NETDEV, &middle, Verdict::NoNatEntry);
    });
}

#[test]
fn only_fragments_that_need_the_first_fragment_are_kept() {
    both(|stage, cast| {
        let [_, later, _] = fragments_of(&to_world(cast), 1);
        let from = |pod| later.clone().with(|packet| packet.from = ip(pod));
        stage.passes(&FROM_POD, &from(cast.known_pod), Verdict::NotSelected);
        stage.drops(&FROM_POD, &from(cast.pending_pod), Verdict::NoGateway);
        let to_service = later.clone().with(|packet| packet.to = ip(cast.service));
        stage.passes(&FROM_POD, &to_service, Verdict::ToCluster);
        let [_, for_node, _] = fragments_of(&packet(cast.world, cast.node, 80, 61000), 1);
        stage.passes(&FROM_NETDEV, &for_node.with(|packet| packet.dmac = UPLINK_MAC), Verdict::NotOurs);
        // Longer than a slot, or a GSO packet.
        let long = later.clone().with(|packet| packet.data = 1993 - 14 - 20);
        stage.drops(&FROM_POD, &long, Verdict::FragmentUnknown);
        stage.drops(&TestRun { gso_size: 100, ..FROM_POD }, &later, Verdict::FragmentUnknown);
    });
}

#[test]
fn a_datagram_keeps_a_bounded_number_of_fragments() {
    const MOST: u16 = 64;
    both(|stage, cast| {
        let [first, later, _] = fragments_of(&to_world(cast), 1);
        let number =
            |number: u16| later.clone().with(|packet| (packet.fragment, packet.data) = ((126 + number, true), 8));
        for fragment in 0..MOST {
            stage.drops(&FROM_POD, &number(fragment), Verdict::FragmentHeld);
        }
        stage.drops(&FROM_POD, &number(MOST), Verdict::FragmentUnknown);
        let listener = FrameListener::open();
        stage.drops(&FROM_POD, &first, Verdict::FragmentsReleased);
        assert_eq!(listener.received(&FROM_POD, &first).len(), 1 + usize::from(MOST));
    });
}

#[test]
fn a_flood_of_unsolicited_fragments_does_not_evict_a_newer_one() {
    both(|stage, cast| {
        // Each CPU has its own slots, so the thread stays on one.
        pin(CPUS[0]);
        let answer = answer(stage, cast, Body::Udp);
        let listener = FrameListener::open();
        let own = fragments_of(&answer, 1);
        // More unsolicited datagrams than slots.
        let flood = |stage: &mut Stage, numbers: std::ops::Range<u16>| {
            let fragments = numbers.map(|number| fragments_of(&answer, number)[1].clone());
            stage.drops_all(&FROM_NETDEV, fragments, Verdict::FragmentHeld);
        };
        flood(stage, 100..2000);
        stage.drops(&FROM_NETDEV, &own[1], Verdict::FragmentHeld);
        flood(stage, 2000..2500);
        stage.drops(&FROM_NETDEV, &own[0], Verdict::FragmentsReleased);
        assert_eq!(listener.received(&FROM_NETDEV, &own[0]), [&own[0], &own[1]].map(FrameSpec::frame));
    });
}

#[test]
fn a_fragment_that_waits_too_long_is_discarded() {
    both(|stage, cast| {
        let [first, middle, last] = fragments_of(&to_world(cast), 1);
        let listener = FrameListener::open();
        stage.drops(&FROM_POD, &last, Verdict::FragmentHeld);
        stage.age_held(31);
        stage.drops(&FROM_POD, &middle, Verdict::FragmentHeld);
        stage.drops(&FROM_POD, &first, Verdict::FragmentsReleased);
        assert_eq!(listener.received(&FROM_POD, &first), [&first, &middle].map(FrameSpec::frame));
    });
}

#[test]
fn a_fragment_and_its_first_fragment_on_two_cpus_leave_nothing_waiting() {
    both(|stage, cast| {
        if !has_both_cpus() {
            skipped("needs two CPUs");
            return;
        }
        stage.run_frame(&FROM_POD, &to_world(cast).frame(), Verdict::SnatHere);
        let listener = FrameListener::open();
        let small = to_world(cast);
        let rounds = rounds().min(1000);
        let of =
            |round: u16, place: usize| fragments_of(&small, 10 + round)[place].clone().with(|packet| packet.data = 8);
        let (arrived, stage) = (AtomicUsize::new(0), &*stage);
        let side = |cpu: usize| {
            pin(cpu);
            let one = |round: u16| {
                let frame = of(round, cpu).frame();
                arrived.fetch_add(1, Ordering::SeqCst);
                while arrived.load(Ordering::SeqCst) < CPUS.len() * (usize::from(round) + 1) {
                    std::thread::yield_now();
                }
                test_run(stage.loaded(FROM_POD.program), &FROM_POD, &frame).action
            };
            (0..rounds).map(one).collect::<Vec<_>>()
        };
        let before = stage.packets_of(Verdict::FragmentUnknown);
        let actions = std::thread::scope(|scope| {
            let sides = CPUS.map(|cpu| scope.spawn(move || side(cpu)));
            sides.map(|side| side.join().expect("one side"))
        });
        // Dropped with its reason and not held: the map `awaited` may be full of earlier rounds.
        let refused = usize::try_from(stage.packets_of(Verdict::FragmentUnknown) - before).expect("a count");
        let held: Vec<Vec<u8>> = CPUS
            .iter()
            .flat_map(|cpu| {
                (0..rounds)
                    .filter(|round| actions[*cpu][usize::from(*round)] == SHOT)
                    .map(|round| of(round, *cpu).frame())
            })
            .collect();
        let mut received = BTreeSet::new();
        let begun = Instant::now();
        while received.len() + refused < held.len() && begun.elapsed() < Duration::from_secs(2) {
            received.extend(listener.received(&FROM_POD, &small));
        }
        println!("{} of {} were reinjected", received.len(), 2 * usize::from(rounds));
        let missing = held.iter().filter(|frame| !received.contains(*frame)).count();
        assert_eq!(missing, refused, "{} dropped here, {} of them came again", held.len(), received.len());
        assert!(refused * 20 < held.len(), "few are: {refused}");
    });
}
