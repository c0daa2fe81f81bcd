//! Setup of the overlay tests: nodes of both underlays, and packets with outer headers.

use std::sync::OnceLock;

use egress_common::abi::{NodeEntry, NodePlace, PolicyEntry, PolicyEntryKey, PolicySlot, Verdict, WhenEmpty};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

use crate::cast::{FamilyAddresses, V4, V6, addr};
use crate::frames::{Body, FrameSpec, L3, checksum, ip, packet};
use crate::stage::{FROM_NETDEV, NEXT, Ran, Stage, TestRun, UPLINK_MAC, batch, on_stage};

pub(crate) const SECRET: [u8; 6] = [2, 0xab, 0xcd, 0xef, 1, 2];
const OTHERS_SECRET: [u8; 6] = [2, 0x11, 0x22, 0x33, 4, 5];
pub(crate) const DEVICE_MAC: [u8; 6] = [0x02, 0xe6, 0x7e, 0x55, 0x00, 0x01];
pub(crate) const OTHER_NODE_MAC: [u8; 6] = [2, 0, 0, 0, 1, 3];
pub(crate) const PORT: u16 = 4794;
pub(crate) const ECT0: u8 = 2;
pub(crate) const EXPERIENCED: u8 = 3;

/// Runs a test for both families on both underlays, each underlay on its own stage.
pub(crate) fn everywhere(test: impl Fn(&mut Stage, &FamilyAddresses, &FamilyAddresses) + Send + Copy + 'static) {
    for underlay in [V4, V6] {
        on_stage(move |stage| {
            stay_on_one_cpu();
            batch("neigh replace fd00:172:18::3 lladdr 02:00:00:00:01:03 dev breth0 nud permanent\n");
            settle(stage, &underlay);
            for cast in [V4, V6] {
                test(stage, &cast, &underlay);
            }
        });
    }
}

/// The same for tests of decapsulation. Different inner and outer families need kernel support; without it the packet
/// is left to the device unchanged.
pub(crate) fn everywhere_taken_out(
    test: impl Fn(&mut Stage, &FamilyAddresses, &FamilyAddresses) + Send + Copy + 'static,
) {
    everywhere(move |stage, cast, underlay| {
        if cast.family == underlay.family || takes_out_other_families() {
            return test(stage, cast, underlay);
        }
        configure(stage, underlay);
        let frame = arrived(underlay, cast.here).frame(&from_remote(cast));
        let ran = stage.run_frame(&FROM_NETDEV, &frame, Verdict::NotOurs);
        assert_eq!((ran.action, ran.frame), (NEXT, frame), "left to the device");
    });
}

/// Whether the kernel's BTF has the flag for it (Linux 6.3).
pub(crate) fn takes_out_other_families() -> bool {
    static ANSWER: OnceLock<bool> = OnceLock::new();
    *ANSWER.get_or_init(|| {
        let types = std::fs::read("/sys/kernel/btf/vmlinux").expect("the kernel's types");
        types.split(|byte| *byte == 0).any(|name| name == b"BPF_F_ADJ_ROOM_DECAP_L3_IPV4")
    })
}

pub(crate) fn stay_on_one_cpu() {
    let this = Pid::from_raw(0);
    let allowed = sched_getaffinity(this).expect("which CPUs there are");
    let mut one = CpuSet::new();
    let first = (0..CpuSet::count()).find(|cpu| allowed.is_set(*cpu) == Ok(true)).expect("a CPU");
    one.set(first).expect("a CPU");
    sched_setaffinity(this, &one).expect("stay there");
}

/// Sets the tunnel endpoints of both nodes to the underlay's family.
pub(crate) fn settle(stage: &mut Stage, underlay: &FamilyAddresses) {
    configure(stage, underlay);
    let (own, other) = (addr(underlay.node), addr(underlay.other_node));
    for cast in [V4, V6] {
        for (at, place, of) in [
            (cast.node, NodePlace::Own, own),
            (cast.mgmt, NodePlace::Own, own),
            (cast.other_node, NodePlace::Other, other),
        ] {
            stage.nodes.insert(addr(at), NodeEntry::new(place, of), 0).expect("a node");
        }
        let slot = PolicySlot::remote(addr(cast.away_egress), other);
        let policy = PolicyEntry::with_slots(WhenEmpty::Drop, &[slot]).expect("few slots");
        stage.policy.insert(PolicyEntryKey::new(cast.away, cast.family), policy, 0).expect("a policy");
        stage.move_subnets(&cast, own, other);
    }
}

pub(crate) fn configure(stage: &mut Stage, underlay: &FamilyAddresses) {
    stage.configure(|config| {
        config.self_node = addr(underlay.node);
        config.overlay_secret = SECRET;
        // The flow cache serves these packets too.
        config.decisions = 1;
        config.overlay_mtu = if underlay.node.contains(':') { 1430 } else { 1450 };
    });
}

/// The outer headers of a packet.
#[derive(Clone, Copy)]
pub(crate) struct Around<'a> {
    pub(crate) from: &'a str,
    pub(crate) to: &'a str,
    pub(crate) sport: u16,
    pub(crate) egress_id: u32,
    pub(crate) ecn: u8,
    pub(crate) link_source: [u8; 6],
}

impl Around<'_> {
    /// The whole frame; identification zero, don't fragment, no UDP checksum.
    pub(crate) fn frame(&self, inner: &FrameSpec) -> Vec<u8> {
        let inner = inner.clone().macs(DEVICE_MAC, self.link_source).frame();
        let data = 8 + inner.len();
        let mut outer = packet(self.from, self.to, self.sport, PORT).body(Body::UdpUnsummed);
        outer = outer.macs(UPLINK_MAC, OTHER_NODE_MAC).with(|packet| packet.data = data);
        let mut frame = outer.frame();
        let at = frame.len() - data;
        let head = [[8, 0, 0, 0], (self.egress_id << 8).to_be_bytes()].concat();
        frame.splice(at.., [head, inner].concat());
        if ip(self.from).is_ipv4() {
            frame[L3 + 1] = self.ecn;
            frame[L3 + 4..L3 + 6].copy_from_slice(&[0, 0]);
            seal(&mut frame);
        } else {
            frame[L3 + 1] = self.ecn << 4;
        }
        frame
    }
}

/// Updates the checksum of an outer IPv4 header.
pub(crate) fn seal(frame: &mut [u8]) {
    frame[L3 + 10..L3 + 12].copy_from_slice(&[0, 0]);
    let sum = checksum(&frame[L3..L3 + 20]);
    frame[L3 + 10..L3 + 12].copy_from_slice(&sum.to_be_bytes());
}

/// From this node to the other, with the source port that the program chose.
pub(crate) fn sent(underlay: &FamilyAddresses, egress_id: u32, inner: &FrameSpec, seen: &[u8]) -> Vec<u8> {
    let at = if ip(underlay.node).is_ipv4() { 34 } else { 54 };
    let sport = u16::from_be_bytes([seen[at], seen[at + 1]]);
    assert!(sport >= 0xc000, "a source port of the range for it: {sport}");
    let (from, to) = (underlay.node, underlay.other_node);
    let mut frame = Around { from, to, sport, egress_id, ecn: 0, link_source: SECRET }.frame(inner);
    frame[..12].copy_from_slice(&[OTHER_NODE_MAC, UPLINK_MAC].concat());
    frame
}

/// Runs it until the program has encapsulated it. A cached next hop expires after a second, and the next packet then
/// goes by the device.
pub(crate) fn put(stage: &mut Stage, run: &TestRun, frame: &[u8], verdict: Verdict) -> Ran {
    for _ in 0..5 {
        let ran = stage.run_frame(run, frame, verdict);
        if ran.frame.len() > frame.len() {
            return ran;
        }
    }
    panic!("it goes by the device every time");
}

pub(crate) fn arrived<'a>(underlay: &FamilyAddresses, egress_id: u32) -> Around<'a> {
    let (from, to) = (underlay.other_node, underlay.node);
    Around { from, to, sport: 50_000, egress_id, ecn: 0, link_source: OTHERS_SECRET }
}

pub(crate) fn from_remote(cast: &FamilyAddresses) -> FrameSpec {
    packet(cast.remote_pod, cast.world, 4000, 80)
}
