//! A node for one test: a network namespace with devices (`devices`), the loaded object, and maps filled for a cast of
//! addresses per family. `runs` is how a packet gets in and out.

use std::collections::BTreeMap;

use aya::maps::lpm_trie::Key;
use aya::maps::{Array, HashMap, LpmTrie, Map, MapData, MapInfo, PerCpuArray, PerCpuHashMap, PerCpuValues};
use aya::programs::SchedClassifier;
use aya::util::nr_cpus;
use aya::{Ebpf, EbpfLoader, Pod};
use egress_common::abi::{
    Addr, ClusterPrefix, Config, Count, Datagram, EipCount, Family, Flow, FragKey, FragPorts, Inbound, Mapping,
    NodeEntry, NodePlace, Owned, OwnedAddr, PodEntry, Policy, PolicyKey, PortRange, PrefixKind, SWEEP_PRESSED, Slot,
    Tuple, Usage, Verdict, WhenEmpty,
};
use egress_common::decide::notice::SETTLE_NS;
use nix::sched::{CloneFlags, unshare};
use nix::time::{ClockId, clock_gettime};

use crate::cast::{Cast, V4, V6, addr};
use crate::frames::Packet;
use crate::object;

pub(crate) use crate::devices::*;
pub(crate) use crate::runs::*;

/// The loaded object and its maps.
pub(crate) struct Stage {
    ebpf: Ebpf,
    pub(crate) config: Array<MapData, Config>,
    pub(crate) pods: HashMap<MapData, Addr, PodEntry>,
    pub(crate) policy: HashMap<MapData, PolicyKey, Policy>,
    pub(crate) owned: HashMap<MapData, u32, Owned>,
    pub(crate) owned_addr: HashMap<MapData, Addr, OwnedAddr>,
    pub(crate) cluster: LpmTrie<MapData, Addr, ClusterPrefix>,
    pub(crate) nodes: HashMap<MapData, Addr, NodeEntry>,
    pub(crate) flows: HashMap<MapData, Tuple, Flow>,
    pub(crate) inbound: HashMap<MapData, Tuple, Inbound>,
    pub(crate) nat: HashMap<MapData, Tuple, Mapping>,
    pub(crate) frags: HashMap<MapData, FragKey, FragPorts>,
    /// The value is the programs' own: when, how many, where.
    pub(crate) awaited: HashMap<MapData, FragKey, [u8; 144]>,
    pub(crate) datagrams: HashMap<MapData, Tuple, Datagram>,
    pub(crate) exhausted: HashMap<MapData, Tuple, Datagram>,
    pub(crate) usage: Array<MapData, Usage>,
    counters: PerCpuArray<MapData, Count>,
    /// Numbers of all maps, by name.
    pub(crate) ids: BTreeMap<String, u32>,
    /// How many entries they take, likewise.
    pub(crate) sizes: BTreeMap<String, u32>,
    pub(crate) eip_counters: PerCpuHashMap<MapData, u32, EipCount>,
    answers: PerCpuArray<MapData, u64>,
}

/// Runs the test on a stage of its own; without root it says so instead.
pub(crate) fn on_stage(test: impl FnOnce(Stage) + Send + 'static) {
    on_stage_with(&[], test);
}

/// Likewise, with maps of other sizes.
pub(crate) fn on_stage_with(sizes: &'static [(&'static str, u32)], test: impl FnOnce(Stage) + Send + 'static) {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: needs root");
        return;
    }
    let thread = std::thread::spawn(move || {
        unshare(CloneFlags::CLONE_NEWNET).expect("make a network namespace");
        make_devices();
        test(Stage::make(sizes));
    });
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

/// Runs a test body for both families on one stage.
pub(crate) fn both(test: impl Fn(&mut Stage, &Cast) + Send + 'static) {
    on_stage(move |mut stage| {
        for cast in [V4, V6] {
            test(&mut stage, &cast);
        }
    });
}

impl Stage {
    fn make(sizes: &'static [(&'static str, u32)]) -> Self {
        // Before that, datagrams from outside may answer what nobody has seen. A guest that has just been booted is younger.
        while now_ns() <= SETTLE_NS + 1_000_000_000 {
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
        let mut loader = EbpfLoader::new();
        for (name, size) in sizes {
            loader.map_max_entries(name, *size);
        }
        let mut ebpf = loader.load(object::bytes()).expect("load the object");
        let mut stage = Self {
            ids: ebpf.maps().map(|(name, map)| (name.to_owned(), info(map).id())).collect(),
            sizes: ebpf.maps().map(|(name, map)| (name.to_owned(), info(map).max_entries())).collect(),
            config: Array::try_from(take(&mut ebpf, "config")).expect("an array"),
            pods: hash(&mut ebpf, "pods"),
            policy: hash(&mut ebpf, "policy"),
            owned: hash(&mut ebpf, "owned"),
            owned_addr: hash(&mut ebpf, "owned_addr"),
            cluster: LpmTrie::try_from(take(&mut ebpf, "cluster")).expect("a trie"),
            nodes: hash(&mut ebpf, "nodes"),
            flows: hash(&mut ebpf, "flows"),
            inbound: hash(&mut ebpf, "inbound"),
            nat: hash(&mut ebpf, "nat"),
            frags: hash(&mut ebpf, "frags"),
            awaited: hash(&mut ebpf, "awaited"),
            datagrams: hash(&mut ebpf, "datagrams"),
            exhausted: hash(&mut ebpf, "exhausted"),
            usage: Array::try_from(take(&mut ebpf, "usage")).expect("an array"),
            counters: PerCpuArray::try_from(take(&mut ebpf, "counters")).expect("counters"),
            eip_counters: PerCpuHashMap::try_from(take(&mut ebpf, "eip_counters")).expect("counters"),
            answers: PerCpuArray::try_from(take(&mut ebpf, "answers")).expect("an array per CPU"),
            ebpf,
        };
        stage.configure(|_| ());
        for cast in [V4, V6] {
            stage.fill(&cast);
        }
        stage
    }

    /// The configuration of the stage, changed.
    pub(crate) fn configure(&mut self, change: impl FnOnce(&mut Config)) {
        let mut config = Config::EMPTY;
        config.generation = 1;
        config.route_generation = 1;
        (config.uplink_ifindex, config.mgmt_ifindex, config.overlay_ifindex) = (UPLINK, MGMT, OVERLAY);
        config.tunnel_port = 4794;
        (config.uplink_mtu, config.pod_mtu, config.overlay_mtu) = (1500, 1400, 1450);
        config.node_ports = PortRange { first: 61000, last: 65535 };
        (config.node_v4, config.node_v6) = (addr(V4.node), addr(V6.node));
        config.self_node = addr(V4.node);
        (config.uplink_mac, config.mgmt_mac) = (UPLINK_MAC, MGMT_MAC);
        change(&mut config);
        self.config.set(0, config, 0).expect("write the configuration");
    }

    /// What the agent writes for a cast; entries that are there are overwritten.
    pub(crate) fn fill(&mut self, cast: &Cast) {
        let (node, other) = (addr(V4.node), addr(V4.other_node));
        for (pod, entry) in [
            (cast.pod, PodEntry::selected(cast.here, 0)),
            (cast.away_pod, PodEntry::selected(cast.away, 0)),
            (cast.pending_pod, PodEntry::selected(cast.pending, 0)),
            (cast.early_pod, PodEntry::selected(99, 0)),
            (cast.known_pod, PodEntry::known()),
        ] {
            self.pods.insert(addr(pod), entry, 0).expect("a pod");
        }
        for (id, slots) in [
            (cast.here, vec![Slot::here(addr(cast.egress))]),
            (cast.away, vec![Slot::remote(addr(cast.away_egress), other)]),
            (cast.pending, vec![]),
        ] {
            let policy = Policy::with_slots(WhenEmpty::Drop, &slots).expect("few slots");
            self.policy.insert(PolicyKey::new(id, cast.family), policy, 0).expect("a policy");
        }
        self.own(cast.here, cast.egress);
        for (at, place, of) in [
            (cast.node, NodePlace::Own, node),
            (cast.mgmt, NodePlace::Own, node),
            (cast.other_node, NodePlace::Other, other),
        ] {
            self.nodes.insert(addr(at), NodeEntry::new(place, of), 0).expect("a node");
        }
        let (narrow, host) = if cast.family == Family::V4 { (120, 128) } else { (64, 128) };
        for (at, length, kind, of) in [
            (cast.pod, narrow, PrefixKind::PodSubnet, node),
            (cast.remote_pod, narrow, PrefixKind::PodSubnet, other),
            (cast.service, narrow, PrefixKind::Service, Addr::UNSPECIFIED),
            (cast.egress, host, PrefixKind::EgressIp, Addr::UNSPECIFIED),
            (cast.away_egress, host, PrefixKind::EgressIp, Addr::UNSPECIFIED),
        ] {
            self.cluster.insert(&Key::new(length, addr(at)), ClusterPrefix::new(kind, of), 0).expect("a prefix");
        }
    }

    /// Names the nodes of the pod subnets anew.
    pub(crate) fn move_subnets(&mut self, cast: &Cast, own: Addr, other: Addr) {
        let length = if cast.family == Family::V4 { 120 } else { 64 };
        for (at, of) in [(cast.pod, own), (cast.remote_pod, other)] {
            let prefix = ClusterPrefix::new(PrefixKind::PodSubnet, of);
            self.cluster.insert(&Key::new(length, addr(at)), prefix, 0).expect("a prefix");
        }
    }

    /// One address per egress ID and family: the last one owned is what flows of the ID get.
    pub(crate) fn own(&mut self, egress_id: u32, address: &str) {
        let owned = Owned::new(egress_id, addr(address), UPLINK, OWNED_MAC);
        self.owned.insert(egress_id, owned, 0).expect("own");
        let entry = OwnedAddr { egress_id, ifindex: UPLINK, mac: OWNED_MAC, reserved: [0; 2] };
        self.owned_addr.insert(addr(address), entry, 0).expect("own");
    }

    /// The program, loaded at its first use.
    pub(crate) fn program(&mut self, name: &str) -> &SchedClassifier {
        self.program_mut(name)
    }

    /// A program that has been used before, for several threads.
    pub(crate) fn loaded(&self, name: &str) -> &SchedClassifier {
        self.ebpf.program(name).and_then(|program| program.try_into().ok()).expect("a classifier")
    }

    pub(crate) fn program_mut(&mut self, name: &str) -> &mut SchedClassifier {
        let program = self.ebpf.program_mut(name).expect("a program");
        let program: &mut SchedClassifier = program.try_into().expect("a classifier");
        if program.fd().is_err() {
            program.load().unwrap_or_else(|error| panic!("{name}: {error}"));
        }
        program
    }

    /// Runs a frame; exactly one counter, the verdict's, moves by one packet and the frame's length.
    pub(crate) fn run_frame(&mut self, run: &Run, frame: &[u8], verdict: Verdict) -> Ran {
        let before = self.counts();
        let ran = test_run(self.program(run.program), run, frame);
        let moved = self.moved(&before);
        let length = u64::try_from(frame.len()).expect("a length");
        let expected = BTreeMap::from([(verdict.label(), (1, length))]);
        assert!(moved == expected, "{run:?}: {moved:?}, not {expected:?}; {ran:02x?}\n{}", self.state());
        ran
    }

    /// Runs a packet that goes on as it is.
    pub(crate) fn passes(&mut self, run: &Run, packet: &Packet, verdict: Verdict) {
        let ran = self.run_frame(run, &packet.frame(), verdict);
        assert_eq!(ran, Ran { action: NEXT, frame: packet.frame(), mark: run.mark }, "{packet:?}");
    }

    pub(crate) fn drops(&mut self, run: &Run, packet: &Packet, verdict: Verdict) {
        assert_eq!(self.run_frame(run, &packet.frame(), verdict).action, SHOT, "{packet:?}");
    }

    /// Runs a packet that leaves by another device, as `expected`.
    pub(crate) fn redirects(&mut self, run: &Run, packet: &Packet, verdict: Verdict, expected: &Packet) {
        let ran = self.run_frame(run, &packet.frame(), verdict);
        assert_eq!(ran, Ran { action: REDIRECT, frame: expected.frame(), mark: 0 }, "{packet:?}");
    }

    /// Likewise, whatever its link addresses are: those that are kept with the flow are written from the second packet on.
    pub(crate) fn forwards(&mut self, run: &Run, packet: &Packet, verdict: Verdict, expected: &Packet) {
        let mut ran = self.run_frame(run, &packet.frame(), verdict);
        ran.frame.splice(..12, [expected.dmac, expected.smac].concat());
        assert_eq!(ran, Ran { action: REDIRECT, frame: expected.frame(), mark: 0 }, "{packet:?}");
    }

    /// Packets counted for a verdict.
    pub(crate) fn packets_of(&self, verdict: Verdict) -> u64 {
        self.counters.get(&verdict.index(), 0).expect("a counter").iter().map(|count| count.packets).sum()
    }

    /// Packets counted, by the number of the verdict; zero for numbers that are none.
    pub(crate) fn packets(&self) -> Vec<u64> {
        let mut packets = vec![0; Verdict::SLOTS];
        for verdict in Verdict::ALL {
            packets[usize::try_from(verdict.index()).expect("a number")] = self.packets_of(*verdict);
        }
        packets
    }

    pub(crate) fn counts(&self) -> BTreeMap<&'static str, (u64, u64)> {
        let mut counts = BTreeMap::new();
        for verdict in Verdict::ALL {
            let values = self.counters.get(&verdict.index(), 0).expect("a counter");
            let sum = values.iter().fold((0, 0), |sum, count| (sum.0 + count.packets, sum.1 + count.bytes));
            counts.insert(verdict.label(), sum);
        }
        counts
    }

    pub(crate) fn moved(&self, before: &BTreeMap<&'static str, (u64, u64)>) -> BTreeMap<&'static str, (u64, u64)> {
        let after = self.counts().into_iter();
        after
            .map(|(label, now)| (label, (now.0 - before[label].0, now.1 - before[label].1)))
            .filter(|(_, moved)| *moved != (0, 0))
            .collect()
    }

    /// All that the programs remember, for people who read a failure.
    fn state(&self) -> String {
        let mut lines = vec![format!("counters since the beginning: {:?}", self.moved(&zero(&self.counts())))];
        lines.extend(self.flows.iter().map(|entry| format!("flow {entry:?}")));
        lines.extend(self.inbound.iter().map(|entry| format!("inbound {entry:?}")));
        lines.extend(self.nat.iter().map(|entry| format!("nat {entry:?}")));
        lines.join("\n")
    }

    /// When each CPU has all its answers again; zero for at once.
    pub(crate) fn set_answers(&mut self, full_at_ns: u64) {
        let cpus = nr_cpus().expect("the number of CPUs");
        let values = PerCpuValues::try_from(vec![full_at_ns; cpus]).expect("one for each");
        self.answers.set(0, values, 0).expect("write the answers");
    }

    /// Zero where no CPU has given an answer since [`set_answers`](Self::set_answers) said zero.
    pub(crate) fn answers_given(&self) -> u64 {
        self.answers.get(&0, 0).expect("the answers").iter().sum()
    }

    /// Removes what is idle; `pressed` as if a map were nearly full. Returns how many entries went.
    pub(crate) fn sweep(&mut self, pressed: bool) -> i32 {
        let mark = if pressed { SWEEP_PRESSED } else { 0 };
        let run = Run { mark, ..SWEEP };
        test_run(self.program(run.program), &run, &[0; 64]).action
    }

    /// As if nothing had been seen of any entry since so many seconds ago.
    pub(crate) fn age(&mut self, seconds: u64) {
        let ago = seconds * 1_000_000_000;
        while now_ns() <= ago {
            // A guest that has just been booted is younger than that.
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
        let then = now_ns() - ago;
        for (key, mut value) in self.nat.iter().map(|entry| entry.expect("an entry")).collect::<Vec<_>>() {
            value.last_seen_ns = then;
            self.nat.insert(key, value, 0).expect("age a mapping");
        }
        for (key, value) in self.flows.iter().map(|entry| entry.expect("an entry")).collect::<Vec<_>>() {
            self.flows.insert(key, Flow { last_seen_ns: then, ..value }, 0).expect("age a flow");
        }
        for (key, value) in self.inbound.iter().map(|entry| entry.expect("an entry")).collect::<Vec<_>>() {
            self.inbound.insert(key, Inbound { last_seen_ns: then, ..value }, 0).expect("age a connection");
        }
    }

    /// As if fragments that wait had come so many seconds ago.
    pub(crate) fn age_held(&mut self, seconds: u64) {
        const PLACE: usize = 2048;
        let then = now_ns().checked_sub(seconds * 1_000_000_000).expect("a machine that runs for longer");
        let held = self.ebpf.map_mut("held").expect("the places");
        let mut held: Array<&mut MapData, [u8; PLACE]> = Array::try_from(held).expect("an array");
        for place in 0..held.len() {
            let mut value = held.get(&place, 0).expect("a place");
            // Free and busy are small numbers.
            if value[..8].try_into().map(u64::from_ne_bytes).expect("eight bytes") > 1 {
                value[..8].copy_from_slice(&then.to_ne_bytes());
                held.set(place, value, 0).expect("age a fragment");
            }
        }
    }

    /// How many entries `nat`, `flows` and `inbound` have.
    pub(crate) fn entries(&self) -> [usize; 3] {
        [self.nat.keys().count(), self.flows.keys().count(), self.inbound.keys().count()]
    }

    /// Every key of `nat`, with its value; each names the other.
    pub(crate) fn mappings(&self) -> BTreeMap<String, (Tuple, Mapping)> {
        let all: Vec<(Tuple, Mapping)> = self.nat.iter().map(|entry| entry.expect("an entry")).collect();
        for (key, mapping) in &all {
            let other = self.nat.get(&mapping.other, 0).unwrap_or_else(|_| panic!("{key:?} has no other key"));
            assert_eq!(other.other, *key, "they name each other");
        }
        all.into_iter().map(|(key, mapping)| (format!("{key:?}"), (key, mapping))).collect()
    }
}

fn zero(counts: &BTreeMap<&'static str, (u64, u64)>) -> BTreeMap<&'static str, (u64, u64)> {
    counts.keys().map(|label| (*label, (0, 0))).collect()
}

/// The programs' clock.
pub(crate) fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC_COARSE).expect("the clock");
    let number = |part: i64| u64::try_from(part).expect("time since the start");
    number(now.tv_sec()) * 1_000_000_000 + number(now.tv_nsec())
}

fn info(map: &Map) -> MapInfo {
    let (Map::Array(data)
    | Map::HashMap(data)
    | Map::LpmTrie(data)
    | Map::LruHashMap(data)
    | Map::PerCpuArray(data)
    | Map::PerCpuHashMap(data)
    | Map::RingBuf(data)) = map
    else {
        panic!("a map of another type: {map:?}");
    };
    data.info().expect("its information")
}

fn take(ebpf: &mut Ebpf, name: &str) -> Map {
    ebpf.take_map(name).unwrap_or_else(|| panic!("the object has no map {name}"))
}

fn hash<K: Pod, V: Pod>(ebpf: &mut Ebpf, name: &str) -> HashMap<MapData, K, V> {
    HashMap::try_from(take(ebpf, name)).expect("a hash map of these types")
}
