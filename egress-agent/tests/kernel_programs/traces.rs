//! `egress-agent trace` against the programs: it predicts the verdict of the same packet, its lookups agree, and no map
//! changes.

use std::path::{Path, PathBuf};

use aya::Pod;
use aya::maps::{HashMap, MapData};
use aya::programs::TcAttachType;
use egress_common::abi::{
    ABI_VERSION, BlockHolder, Direction, HandoverStage, HeldBlocks, Holder, Lease, NatEntry, OnUnknownPod, Origin,
    PodEntry, PolicyEntry, PolicyEntryKey, PolicySlot, Share, Tuple, Verdict, WhenEmpty,
};
use egress_common::decide::PortClaim;
use egress_common::decide::from_overlay::Outer;
use egress_core::display_names::Names;
use egress_datapath::names::PINNED_MAPS;
use egress_datapath::trace::arrival::trace_arrival;
use egress_datapath::trace::questions::questions;
use egress_datapath::trace::recorder::RecordedLookup;
use egress_datapath::trace::test_packet::TestPacket;
use egress_datapath::trace::{Traced, Tracer};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};

use crate::cast::{FamilyAddresses, V4, V6, addr};
use crate::clean_maps::ClearableMap;
use crate::frames::{Body, SYN, ip, packet};
use crate::from_overlay::{FarEnd, arrives, is, on_devices, wrapped};
use crate::object::bytes;
use crate::stage::{FROM_POD, MGMT_MAC, Stage, TO_POD, now_ns, on_stage, on_stage_with};

/// The directory of the pins.
const ROOT: &str = "/run/egress";

/// Pins the stage's maps as an agent does, on this thread's own BPF file system.
fn tracer(stage: &Stage) -> Tracer<'static> {
    unshare(CloneFlags::CLONE_NEWNS).expect("make a mount namespace");
    let none: Option<&str> = None;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).expect("make mounts private");
    mount(Some("bpf"), "/run", Some("bpf"), MsFlags::empty(), none).expect("mount a BPF file system");
    let root = PathBuf::from(ROOT);
    let maps = root.join(format!("v{ABI_VERSION}/maps"));
    std::fs::create_dir_all(&maps).expect("folders");
    std::fs::create_dir_all(root.join(format!("v{ABI_VERSION}/links"))).expect("folders");
    for name in PINNED_MAPS {
        MapData::from_id(stage.ids[name]).expect("a map of the stage").pin(maps.join(name)).expect("pin it");
    }
    Tracer::new(&root, bytes()).expect("what an agent has left")
}

/// Contents of all maps, for equality; the counters cover the ring buffer.
fn contents(stage: &Stage) -> Vec<String> {
    fn all<K: Pod, V: Pod>(map: &HashMap<MapData, K, V>) -> Vec<(K, V)> {
        map.iter().map(|entry| entry.expect("an entry")).collect()
    }
    let eip: Vec<_> = stage.eip_counters.iter().map(|entry| entry.expect("a count")).collect();
    let eip: Vec<_> = eip.iter().map(|(id, counts)| (id, counts.iter().collect::<Vec<_>>())).collect();
    let cluster: Vec<_> = stage.cluster.iter().map(|entry| entry.expect("a prefix")).collect();
    let cluster: Vec<_> = cluster.iter().map(|(key, value)| (key.prefix_len(), key.data(), *value)).collect();
    vec![
        format!("{:?}", all(&stage.pods)),
        format!("{:?}", all(&stage.policy)),
        format!("{:?} {:?} {:?}", all(&stage.owned), all(&stage.owned_addr), all(&stage.handovers)),
        format!("{:?} {cluster:?}", all(&stage.nodes)),
        format!("{:?}", stage.config.get(&0, 0).expect("the configuration")),
        format!("{:?}", all(&stage.flows)),
        format!("{:?}", all(&stage.inbound)),
        format!("{:?}", all(&stage.datagrams)),
        format!("{:?}", all(&stage.nat)),
        format!("{:?} {:?}", all(&stage.blocks), all(&stage.pod_blocks)),
        format!("{:?}", all(&stage.frags)),
        format!("{:?}", all(&stage.shares)),
        format!("{:?}", stage.usage.get(&0, 0).expect("the usage")),
        format!("{:?} {eip:?}", stage.counts()),
    ]
}

fn probe(from: &str, to: &str, dport: u16) -> TestPacket {
    TestPacket { from: ip(from), to: ip(to), protocol: 17, sport: 40_000, dport, under_way: false, ttl: 64, length: 0 }
}

fn policy(stage: &mut Stage, cast: &FamilyAddresses, when: WhenEmpty, slots: &[PolicySlot]) {
    let policy = PolicyEntry::with_slots(when, slots).expect("few slots");
    stage.policy.insert(PolicyEntryKey::new(cast.here, cast.family), policy, 0).expect("a policy");
}

/// Another flow has this port of the egress IP towards the world.
fn occupy(stage: &mut Stage, cast: &FamilyAddresses, protocol: u8, ports: impl IntoIterator<Item = u16>, dport: u16) {
    let (world, egress, other) = (addr(cast.world), addr(cast.egress), addr(cast.remote_pod));
    for port in ports {
        let forward = Tuple::new(Direction::Egress, other, world, port, dport, protocol);
        let reverse = Tuple::new(Direction::Ingress, world, egress, dport, port, protocol);
        let mapping = |other| NatEntry::new(other, Origin::Remote, addr(V4.other_node), cast.here, now_ns());
        stage.nat.insert(reverse, mapping(forward).sealed(&reverse), 0).expect("a mapping");
        stage.nat.insert(forward, mapping(reverse).sealed(&forward), 0).expect("a mapping");
    }
}

/// Verdict, setup and packet.
type TraceCase = (Verdict, fn(&mut Stage, &FamilyAddresses), fn(&FamilyAddresses) -> TestPacket);

fn nothing(_: &mut Stage, _: &FamilyAddresses) {}

/// The flow of the traced packet has begun.
fn begun(stage: &mut Stage, cast: &FamilyAddresses) {
    let first = TestPacket { protocol: 6, ..probe(cast.pod, cast.world, 443) };
    stage.run_frame(&FROM_POD, &first.frame(MGMT_MAC), Verdict::SnatHere);
}

const CASES: &[TraceCase] = &[
    (
        Verdict::NotConfigured,
        |stage, _| stage.configure(|config| config.generation = 0),
        |cast| probe(cast.pod, cast.world, 80),
    ),
    (Verdict::LeaseExpired, |stage, _| stage.set_lease(Lease::EXPIRED), |cast| probe(cast.pod, cast.world, 80)),
    (Verdict::NotPod, nothing, |cast| probe(cast.remote_pod, cast.world, 80)),
    (Verdict::ToOwnNode, nothing, |cast| probe(cast.pod, cast.node, 80)),
    (Verdict::ToCluster, nothing, |cast| probe(cast.pod, cast.service, 80)),
    (
        Verdict::InboundReply,
        |stage, cast| {
            let syn = packet(cast.world, cast.pod, 443, 40_000).tcp(SYN);
            stage.run_frame(&TO_POD, &syn.frame(), Verdict::InboundRemembered);
        },
        |cast| TestPacket { protocol: 6, under_way: true, ..probe(cast.pod, cast.world, 443) },
    ),
    (Verdict::NotSelected, nothing, |cast| probe(cast.known_pod, cast.world, 80)),
    (Verdict::UnknownPod, nothing, |cast| probe(cast.unknown_pod, cast.world, 80)),
    (
        Verdict::UnknownPodPassed,
        |stage, _| stage.configure(|config| *config = config.with_on_unknown_pod(OnUnknownPod::Pass)),
        |cast| probe(cast.unknown_pod, cast.world, 80),
    ),
    (
        Verdict::FamilyNotListed,
        |stage, cast| policy(stage, cast, WhenEmpty::NotListed, &[]),
        |cast| probe(cast.pod, cast.world, 80),
    ),
    (
        Verdict::NodeAddress,
        |stage, cast| policy(stage, cast, WhenEmpty::NodeAddress, &[]),
        |cast| probe(cast.pod, cast.world, 80),
    ),
    (Verdict::TtlExpired, nothing, |cast| TestPacket { ttl: 1, ..probe(cast.pod, cast.world, 80) }),
    (Verdict::MarkedNode, nothing, |cast| probe(cast.pod, cast.other_node, 80)),
    (Verdict::SnatHere, nothing, |cast| TestPacket { protocol: 6, ..probe(cast.pod, cast.world, 80) }),
    (Verdict::SnatHere, nothing, |cast| TestPacket { protocol: 132, ..probe(cast.pod, cast.world, 80) }),
    // An existing flow with another port.
    (
        Verdict::SnatHere,
        |stage, cast| {
            occupy(stage, cast, 6, [40_000], 443);
            begun(stage, cast);
        },
        |cast| TestPacket { protocol: 6, under_way: true, ..probe(cast.pod, cast.world, 443) },
    ),
    (Verdict::ToGateway, nothing, |cast| probe(cast.away_pod, cast.world, 80)),
    (
        Verdict::HandedOver,
        |stage, cast| {
            stage.hand_over(cast, HandoverStage::Leaving);
            stage.owned.remove(&cast.here).expect("it is owned");
        },
        |cast| probe(cast.pod, cast.world, 80),
    ),
    (Verdict::MtuAnswered, nothing, |cast| TestPacket { length: 1501, ..probe(cast.pod, cast.world, 80) }),
    (Verdict::MtuAnswered, nothing, |cast| TestPacket { length: 1451, ..probe(cast.away_pod, cast.world, 80) }),
    (Verdict::HairpinAnswered, nothing, |cast| probe(cast.pod, cast.away_egress, 80)),
    (
        Verdict::CutAnswered,
        |stage, cast| {
            begun(stage, cast);
            policy(stage, cast, WhenEmpty::Drop, &[PolicySlot::remote(addr(cast.away_egress), addr(V4.other_node))]);
        },
        |cast| TestPacket { protocol: 6, under_way: true, ..probe(cast.pod, cast.world, 443) },
    ),
    (
        Verdict::CutAnswered,
        |stage, cast| {
            begun(stage, cast);
            stage.put_pod(cast.pod, PodEntry::known().with_cut_until(now_ns() + 240_000_000_000));
        },
        |cast| TestPacket { protocol: 6, under_way: true, ..probe(cast.pod, cast.world, 443) },
    ),
    (Verdict::ForgedTunnel, nothing, |cast| probe(cast.pod, cast.other_node, 4794)),
    (Verdict::NoPolicy, nothing, |cast| probe(cast.early_pod, cast.world, 80)),
    (Verdict::NoGateway, nothing, |cast| probe(cast.pending_pod, cast.world, 80)),
    (
        Verdict::NotGateway,
        |stage, cast| stage.owned.remove(&cast.here).expect("it is owned"),
        |cast| probe(cast.pod, cast.world, 80),
    ),
    (
        Verdict::PortsExhausted,
        |stage, cast| occupy(stage, cast, 17, 1024..=u16::MAX, 53),
        |cast| probe(cast.pod, cast.world, 53),
    ),
    (
        Verdict::QuotaExceeded,
        |stage, cast| {
            stage.configure(|config| config.pod_quota = 7);
            let share = Share { flows: 7, ..Share::default() };
            stage.shares.insert(Holder::pod(addr(cast.pod)), share, 0).expect("a share");
        },
        |cast| probe(cast.pod, cast.world, 53),
    ),
    (
        Verdict::QuotaExceeded,
        |stage, cast| {
            stage.configure(|config| config.policy_quota = 7);
            let share = Share { nat_entries: 7, ..Share::default() };
            stage.shares.insert(Holder::policy(cast.here), share, 0).expect("a share");
        },
        |cast| probe(cast.pod, cast.world, 53),
    ),
    (Verdict::NoRoute, nothing, |cast| probe(cast.pod, cast.nowhere, 80)),
    (Verdict::UnsupportedProtocol, nothing, |cast| TestPacket { protocol: 51, ..probe(cast.pod, cast.world, 0) }),
    (
        Verdict::PortTaken,
        |stage, cast| occupy(stage, cast, 132, [40_000], 443),
        |cast| TestPacket { protocol: 132, under_way: true, ..probe(cast.pod, cast.world, 443) },
    ),
    (
        Verdict::ProtocolTaken,
        |stage, cast| occupy(stage, cast, 47, [0], 0),
        |cast| TestPacket { protocol: 47, ..probe(cast.pod, cast.world, 0) },
    ),
];

/// Cases that differ by family.
const CASES_V6: &[TraceCase] = &[
    (Verdict::SnatHere, nothing, |cast| TestPacket { protocol: 58, ..probe(cast.pod, cast.world, 0) }),
    (
        Verdict::OverlayTooNarrow,
        |stage, cast| {
            stage.configure(|config| config.overlay_mtu = 1200);
            let far = PolicySlot::remote(addr(cast.away_egress), addr(cast.other_node));
            policy(stage, cast, WhenEmpty::Drop, &[far]);
        },
        |cast| TestPacket { length: 1280, ..probe(cast.pod, cast.world, 80) },
    ),
];

/// Verdicts that no whole packet of a pod gets at the management port, and why.
const ELSEWHERE: &[(Verdict, &str)] = &[
    (Verdict::MapFull, "a test of its own"),
    (Verdict::RateLimited, "a trace has a whole burst"),
    (Verdict::NotIp, "a probe is IP"),
    (Verdict::Malformed, "a probe is whole"),
    (Verdict::ChainTooLong, "a probe has no extension headers"),
    (Verdict::SourceRouted, "nor options"),
    (Verdict::V4Mapped, "a probe's addresses are what they are read as"),
    (Verdict::FragmentUnknown, "nor pieces"),
    (Verdict::FragmentHeld, "nor pieces"),
    (Verdict::FragmentsReleased, "nor pieces"),
    (Verdict::SctpFragment, "nor pieces"),
    (Verdict::IcmpUnmatched, "it is no error"),
    (Verdict::Hairpin, "where no answer is left, which a trace does not know"),
    (Verdict::AddressGone, "likewise"),
    (Verdict::FlowCut, "likewise"),
    (Verdict::MtuExceeded, "likewise"),
    (Verdict::NoNeighbour, "the kernel refuses a redirect; no test brings it to that here"),
    (Verdict::RewriteFailed, "the kernel refuses to write"),
    (Verdict::EncapFailed, "likewise"),
    (Verdict::ClaimLost, "two CPUs"),
    (Verdict::BadState, "another version"),
    (Verdict::NodeSnat, "the uplink's"),
    (Verdict::NodeSnatDone, "the uplink's"),
    (Verdict::NodeReply, "the uplink's"),
    (Verdict::NotOurs, "the uplink's"),
    (Verdict::NoNodeAddress, "the uplink's"),
    (Verdict::ForeignPod, "the uplink's"),
    (Verdict::ProgramBypassed, "the uplink's"),
    (Verdict::AddressConflict, "the uplink's"),
    (Verdict::WrongInterface, "the uplink's"),
    (Verdict::SpoofedEgressIp, "the uplink's"),
    (Verdict::NoNatEntry, "the uplink's"),
    (Verdict::ReplyHere, "the uplink's"),
    (Verdict::ReplyToNode, "the uplink's"),
    (Verdict::ArpAnswered, "the uplink's"),
    (Verdict::NeighbourAnswered, "the uplink's"),
    (Verdict::InboundRemembered, "the way to the pod"),
    (Verdict::InboundRefused, "the way to the pod"),
    (Verdict::InboundFull, "the way to the pod"),
    (Verdict::SnatForNode, "the overlay's"),
    (Verdict::ReplyDelivered, "the overlay's"),
    (Verdict::ForgedOuter, "the overlay's"),
    (Verdict::ForgedInner, "the overlay's"),
    (Verdict::NotReady, "the overlay's"),
    (Verdict::NotItsPod, "the overlay's"),
];

#[test]
fn every_verdict_of_the_path_is_traced_or_excluded() {
    for verdict in Verdict::ALL {
        let traced = CASES.iter().chain(CASES_V6).any(|(of, ..)| of == verdict);
        let excused = ELSEWHERE.iter().any(|(of, _)| of == verdict);
        assert!(traced != excused, "{verdict:?}: traced {traced}, excused {excused}");
    }
}

fn traced(tracer: &mut Tracer<'_>, probe: &TestPacket) -> Traced {
    let traced = tracer.trace(probe).unwrap_or_else(|error| panic!("{probe:?}: {error}"));
    assert!(traced.agrees(), "{probe:?}: {:?}, predicted {:?}", traced.verdict, traced.predicted);
    traced
}

fn play(stage: &mut Stage, cast: &FamilyAddresses, tracer: &mut Tracer<'_>, (verdict, prepare, make): &TraceCase) {
    stage.flows.empty();
    stage.nat.empty();
    stage.inbound.empty();
    stage.handovers.empty();
    stage.shares.empty();
    stage.begin();
    prepare(stage, cast);
    let probe = make(cast);
    let before = contents(stage);
    let traced = traced(tracer, &probe);
    assert_eq!(contents(stage), before, "{probe:?}: a trace leaves no trace");
    assert_eq!(traced.verdict, *verdict, "{probe:?}");
    stage.turn();
    let tuple = traced.headers.tuple;
    stage.run_frame(&FROM_POD, &probe.frame(MGMT_MAC), *verdict);
    // With the same address and port, except a random port.
    let shown = |mapping: Option<NatEntry>| mapping.map(|mapping| mapping.other);
    assert_eq!(shown(stage.nat.get(&tuple, 0).ok()), shown(traced.mapping), "{probe:?}");
    let flow = stage.flows.get(&tuple, 0).ok().map(|flow| flow.address);
    assert_eq!(flow, traced.flow.map(|flow| flow.address), "{probe:?}");
}

#[test]
fn a_trace_predicts_the_verdict_of_the_packet() {
    on_stage(|stage| {
        let mut tracer = tracer(stage);
        for case in CASES {
            play(stage, &V4, &mut tracer, case);
        }
        let both = [Verdict::SnatHere, Verdict::ToGateway, Verdict::CutAnswered, Verdict::MtuAnswered];
        let of_both = CASES.iter().filter(|(verdict, ..)| both.contains(verdict));
        for case in of_both.chain(CASES_V6) {
            play(stage, &V6, &mut tracer, case);
        }
    });
}

#[test]
fn a_predicted_port_is_free() {
    on_stage(|stage| {
        let mut tracer = tracer(stage);
        occupy(stage, &V4, 17, (1024..=u16::MAX).filter(|port| *port != 5_000), 53);
        let traced = traced(&mut tracer, &probe(V4.pod, V4.world, 53));
        assert_eq!(traced.verdict, Verdict::SnatHere);
        assert_eq!(traced.mapping.map(|mapping| mapping.other.dport()), Some(5_000));
    });
}

#[test]
fn a_trace_names_the_pods_port_blocks() {
    on_stage(|stage| {
        let mut tracer = tracer(stage);
        stage.configure(|config| config.port_block = 64);
        let probe = probe(V4.pod, V4.world, 53);
        let lookups = |traced: &Traced| {
            let is_of_blocks =
                |one: &&RecordedLookup| matches!(one, RecordedLookup::HeldBlocks(..) | RecordedLookup::Block(_));
            traced.predicted.asked.iter().filter(is_of_blocks).cloned().collect::<Vec<_>>()
        };
        let holder = BlockHolder { address: addr(V4.egress), pod: addr(V4.pod) };
        let before = contents(stage);
        let first_time = traced(&mut tracer, &probe);
        assert_eq!(contents(stage), before, "a trace leaves no trace");
        let none = HeldBlocks::default();
        let asked = lookups(&first_time);
        let Some(RecordedLookup::Block(PortClaim::Claimed(first))) = asked.get(1) else { panic!("{asked:?}") };
        let given = none.before(*first);
        assert_eq!(
            [&asked[0], &asked[2]],
            [none, given].map(|held| RecordedLookup::HeldBlocks(holder, held)).each_ref()
        );
        let shown = questions(&asked, &first_time.headers.tuple, &Names::default());
        assert_eq!(shown.len(), 2, "not the list with the packet's own block: {shown:?}");
        stage.run_frame(&FROM_POD, &probe.frame(MGMT_MAC), Verdict::SnatHere);
        assert_eq!(stage.pod_blocks.get(&holder, 0).expect("a list"), given, "the block that was predicted");
        let later = traced(&mut tracer, &TestPacket { sport: 40_001, ..probe });
        assert_eq!(lookups(&later), [RecordedLookup::HeldBlocks(holder, given)]);
    });
}

#[test]
fn a_trace_reports_full_maps() {
    on_stage_with(&[("nat", 4), ("flows", 2)], |stage| {
        let mut tracer = tracer(stage);
        let known = |port| TestPacket { sport: port, ..probe(V4.pod, V4.world, 80) };
        let far = |port| TestPacket { sport: port, ..probe(V4.away_pod, V4.world, 80) };
        assert_eq!(traced(&mut tracer, &known(1)).verdict, Verdict::SnatHere);
        for port in [40_000, 40_001] {
            stage.run_frame(&FROM_POD, &known(port).frame(MGMT_MAC), Verdict::SnatHere);
        }
        // No free flow and no free NAT entry; existing ones continue.
        for (probe, verdict) in
            [(known(40_002), Verdict::MapFull), (far(40_003), Verdict::MapFull), (known(40_001), Verdict::SnatHere)]
        {
            assert_eq!(traced(&mut tracer, &probe).verdict, verdict, "{probe:?}");
            stage.run_frame(&FROM_POD, &probe.frame(MGMT_MAC), verdict);
        }
        // An existing flow without a free NAT entry.
        stage.nat.empty();
        occupy(stage, &V4, 17, [1, 2], 81);
        assert_eq!(traced(&mut tracer, &known(40_001)).verdict, Verdict::MapFull);
        stage.turn();
        stage.run_frame(&FROM_POD, &known(40_001).frame(MGMT_MAC), Verdict::MapFull);
    });
}

/// The gateway's part of a trace, against the program on the overlay device and real packets.
#[test]
fn the_gateway_predicts_what_becomes_of_another_nodes_packet() {
    on_devices(&[("from_overlay", "egress0", TcAttachType::Ingress)], |stage, cast| {
        let wire = FarEnd::of("out0");
        // Pins the maps.
        drop(tracer(stage));
        let remote =
            |sport, protocol, dport| TestPacket { sport, protocol, ..probe(cast.remote_pod, cast.world, dport) };
        for (from, id, probe, verdict) in [
            (V4.other_node, cast.here, remote(4000, 17, 80), Verdict::SnatForNode),
            (V4.other_node, cast.here, remote(0, 51, 0), Verdict::UnsupportedProtocol),
            (V4.other_node, cast.away, remote(4000, 17, 80), Verdict::NotGateway),
            (V4.other_node, cast.here, probe(cast.pod, cast.world, 80), Verdict::ForgedInner),
            ("172.18.0.77", cast.here, remote(4000, 17, 80), Verdict::ForgedOuter),
        ] {
            let before = contents(stage);
            let outer = Outer { source: addr(from), egress_id: id };
            let traced = trace_arrival(Path::new(ROOT), &probe, outer).expect("the pins of an agent");
            assert_eq!(contents(stage), before, "{probe:?}: a trace leaves no trace");
            assert_eq!(traced.decided.verdicts.first(), Some(&verdict), "{probe:?}");
            let inner = packet(&probe.from.to_string(), &probe.to.to_string(), probe.sport, probe.dport);
            let inner = if probe.protocol == 17 { inner } else { inner.body(Body::Other(probe.protocol)) };
            assert_eq!(arrives(stage, &wire, &wrapped(from, id, &inner)), is(verdict), "{probe:?}");
            let made = stage.nat.get(&traced.headers.tuple, 0).ok().map(|mapping| mapping.other);
            let foreseen = traced.decided.mapping.map(|mapping| mapping.other);
            assert_eq!(made.filter(|_| verdict == Verdict::SnatForNode), foreseen, "{probe:?}");
        }
        // The flow of the packet that left has a mapping now.
        let outer = || Outer { source: addr(V4.other_node), egress_id: cast.here };
        let traced = trace_arrival(Path::new(ROOT), &remote(4000, 17, 80), outer()).expect("the pins of an agent");
        assert!(traced.is_known);
        stage.set_lease(Lease::EXPIRED);
        let traced = trace_arrival(Path::new(ROOT), &remote(4002, 17, 80), outer()).expect("the pins of an agent");
        assert_eq!(traced.decided.verdicts, [Verdict::LeaseExpired]);
        stage.set_lease(Lease::ENDLESS);
    });
}
