//! A node for one test: a network namespace with devices (`devices`), a loaded or reused object (`object_pool`), and
//! maps filled for a cast of addresses per family. `test_run` runs packets.

use std::collections::{BTreeMap, HashSet};

use aya::maps::lpm_trie::Key;
use aya::maps::{Array, HashMap, LpmTrie, Map, MapData, MapInfo, PerCpuArray, PerCpuHashMap, PerCpuValues};
use aya::programs::SchedClassifier;
use aya::util::nr_cpus;
use aya::{EbpfLoader, Pod};
use egress_common::abi::{
    Addr, AnswerKey, AnswerKind, BlockHolder, BlockOwner, Candidates, ClassPolicy, ClusterPrefix, Config, Count,
    Datagram, EipCount, ExposedPort, Exposure, Family, Flow, FragKey, FragPorts, HandoverEntry, HandoverStage,
    HeldBlocks, Holder, Inbound, InterfaceAddresses, Lease, NatEntry, NeighbourEntry, NeighbourKey, NodeEntry,
    NodePlace, Owned, OwnedAddr, Pacing, PodEntry, PolicyDestination, PolicyEntry, PolicyEntryKey, PolicySlot,
    PortBlock, PortRange, PrefixKind, RouteDestination, RouteEntry, Share, Tuple, Usage, Verdict, WhenEmpty,
};
use egress_common::decide::limit;
use egress_common::decide::to_pod::SETTLE_NS;
use nix::sched::{CloneFlags, unshare};

use crate::cast::{FamilyAddresses, V4, V6, addr};
use crate::clean_maps::ClearableMap as _;
use crate::frames::FrameSpec;
use crate::object::bytes;
use crate::object_pool::{self, LoadedObject};
use crate::skips::skipped;

pub(crate) use crate::aging::*;
pub(crate) use crate::devices::*;
pub(crate) use crate::test_run::*;

/// Size of a slot for a fragment.
pub(crate) const HELD: usize = 2048;

/// The loaded object and its maps.
pub(crate) struct Stage {
    pub(crate) object: LoadedObject,
    pub(crate) config: Array<MapData, Config>,
    lease: Array<MapData, Lease>,
    pub(crate) pods: HashMap<MapData, Addr, PodEntry>,
    pub(crate) classes: LpmTrie<MapData, PolicyDestination, ClassPolicy>,
    pub(crate) policy: HashMap<MapData, PolicyEntryKey, PolicyEntry>,
    pub(crate) owned: HashMap<MapData, u32, Owned>,
    pub(crate) owned_addr: HashMap<MapData, Addr, OwnedAddr>,
    pub(crate) interfaces: HashMap<MapData, u32, InterfaceAddresses>,
    pub(crate) destinations: LpmTrie<MapData, PolicyDestination, Candidates>,
    pub(crate) routes: LpmTrie<MapData, RouteDestination, RouteEntry>,
    pub(crate) neighbours: HashMap<MapData, NeighbourKey, NeighbourEntry>,
    pub(crate) handovers: HashMap<MapData, u32, HandoverEntry>,
    pub(crate) cluster: LpmTrie<MapData, Addr, ClusterPrefix>,
    pub(crate) nodes: HashMap<MapData, Addr, NodeEntry>,
    pub(crate) flows: HashMap<MapData, Tuple, Flow>,
    pub(crate) inbound: HashMap<MapData, Tuple, Inbound>,
    pub(crate) exposed: HashMap<MapData, ExposedPort, Exposure>,
    pub(crate) nat: HashMap<MapData, Tuple, NatEntry>,
    pub(crate) frags: HashMap<MapData, FragKey, FragPorts>,
    /// The layout is private to the programs: time, count, slots.
    pub(crate) awaited: HashMap<MapData, FragKey, [u8; 144]>,
    pub(crate) datagrams: HashMap<MapData, Tuple, Datagram>,
    pub(crate) exhausted: HashMap<MapData, Tuple, Datagram>,
    pub(crate) blocks: HashMap<MapData, PortBlock, BlockOwner>,
    pub(crate) pod_blocks: HashMap<MapData, BlockHolder, HeldBlocks>,
    pub(crate) usage: Array<MapData, Usage>,
    pub(crate) candidates: MapData,
    pub(crate) epochs: MapData,
    /// Value of all epochs, as last written by a test.
    pub(crate) epoch: u32,
    pub(crate) shares: HashMap<MapData, Holder, Share>,
    pub(crate) pacing: HashMap<MapData, u32, Pacing>,
    counters: PerCpuArray<MapData, Count>,
    /// Numbers of all maps, by name.
    pub(crate) ids: BTreeMap<String, u32>,
    /// Their sizes, by name.
    pub(crate) sizes: BTreeMap<String, u32>,
    pub(crate) eip_counters: PerCpuHashMap<MapData, u32, EipCount>,
    pub(crate) answers: HashMap<MapData, AnswerKey, u64>,
    answer_totals: PerCpuArray<MapData, u64>,
    pub(crate) held: Array<MapData, [u8; HELD]>,
}

/// Runs the test on its own stage; without root it is skipped.
pub(crate) fn on_stage(test: impl FnOnce(&mut Stage) + Send + 'static) {
    on_stage_with(&[], test);
}

/// The same with other map sizes, and so with its own object.
pub(crate) fn on_stage_with(sizes: &'static [(&'static str, u32)], test: impl FnOnce(&mut Stage) + Send + 'static) {
    if !nix::unistd::geteuid().is_root() {
        skipped("needs root");
        return;
    }
    // By the test's name.
    let thread = std::thread::Builder::new().name(std::thread::current().name().unwrap_or_default().to_owned());
    let thread = thread.spawn(move || {
        unshare(CloneFlags::CLONE_NEWNET).expect("make a network namespace");
        make_devices();
        let mut stage = Stage::make(sizes);
        test(&mut stage);
        // Not reached by a failing test.
        if sizes.is_empty() {
            stage.empty();
            object_pool::give_back(stage);
        }
    });
    let thread = thread.expect("start a thread");
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

fn array(map: Map) -> MapData {
    let Map::Array(data) = map else { panic!("no array: {map:?}") };
    data
}

/// Runs a test body for both families on one stage.
pub(crate) fn both(test: impl Fn(&mut Stage, &FamilyAddresses) + Send + 'static) {
    on_stage(move |stage| {
        for cast in [V4, V6] {
            test(stage, &cast);
        }
    });
}

impl Stage {
    fn make(sizes: &'static [(&'static str, u32)]) -> Self {
        // The startup period is over. A freshly booted guest may be younger.
        while now_ns() <= SETTLE_NS + 1_000_000_000 {
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
        let kept = if sizes.is_empty() { object_pool::take() } else { None };
        let mut stage = kept.unwrap_or_else(|| Self::load(sizes));
        assert!(stage.remains().is_empty(), "of another test: {:?}", stage.remains());
        stage.begin();
        stage
    }

    fn load(sizes: &[(&str, u32)]) -> Self {
        let mut loader = EbpfLoader::new();
        for (name, size) in sizes {
            loader.map_max_entries(name, *size);
        }
        let ebpf = loader.load(bytes()).expect("load the object");
        let facts: Vec<_> = ebpf.maps().map(|(name, map)| (name.to_owned(), info(map))).collect();
        Self::of(LoadedObject::Own(ebpf), &facts)
    }

    pub(crate) fn of(mut object: LoadedObject, facts: &[(String, MapInfo)]) -> Self {
        let mut take = |name: &str| object.take_map(name).unwrap_or_else(|| panic!("the object has no map {name}"));
        Self {
            ids: facts.iter().map(|(name, info)| (name.clone(), info.id())).collect(),
            sizes: facts.iter().map(|(name, info)| (name.clone(), info.max_entries())).collect(),
            config: Array::try_from(take("config")).expect("an array"),
            lease: Array::try_from(take("lease")).expect("an array"),
            pods: hash(take("pods")),
            classes: LpmTrie::try_from(take("classes")).expect("a trie"),
            policy: hash(take("policy")),
            owned: hash(take("owned")),
            owned_addr: hash(take("owned_addr")),
            interfaces: hash(take("interfaces")),
            destinations: LpmTrie::try_from(take("destinations")).expect("a trie"),
            routes: LpmTrie::try_from(take("routes")).expect("a trie"),
            neighbours: hash(take("neighbours")),
            handovers: hash(take("handovers")),
            cluster: LpmTrie::try_from(take("cluster")).expect("a trie"),
            nodes: hash(take("nodes")),
            flows: hash(take("flows")),
            inbound: hash(take("inbound")),
            exposed: hash(take("exposed")),
            nat: hash(take("nat")),
            frags: hash(take("frags")),
            awaited: hash(take("awaited")),
            datagrams: hash(take("datagrams")),
            exhausted: hash(take("exhausted")),
            blocks: hash(take("blocks")),
            pod_blocks: hash(take("pod_blocks")),
            usage: Array::try_from(take("usage")).expect("an array"),
            candidates: array(take("candidates")),
            epochs: array(take("epochs")),
            epoch: 0,
            shares: hash(take("shares")),
            pacing: hash(take("pacing")),
            counters: PerCpuArray::try_from(take("counters")).expect("counters"),
            eip_counters: PerCpuHashMap::try_from(take("eip_counters")).expect("counters"),
            answers: hash(take("answers")),
            answer_totals: PerCpuArray::try_from(take("answer_totals")).expect("an array per CPU"),
            held: Array::try_from(take("held")).expect("an array"),
            object,
        }
    }

    /// Fills empty maps.
    pub(crate) fn begin(&mut self) {
        self.configure(|_| ());
        self.set_lease(Lease::ENDLESS);
        for cast in [V4, V6] {
            self.fill(&cast);
        }
    }

    /// Changes the configuration.
    pub(crate) fn configure(&mut self, change: impl FnOnce(&mut Config)) {
        let mut config = Config::EMPTY;
        config.generation = 1;
        config.route_generation = 1;
        (config.uplink_ifindex, config.mgmt_ifindex, config.overlay_ifindex) = (UPLINK, MGMT, OVERLAY);
        config.tunnel_port = 4794;
        (config.uplink_mtu, config.pod_mtu, config.overlay_mtu) = (1500, 1400, 1450);
        config.node_ports = PortRange { first: 61000, last: 65535 };
        config.direct_routing = 1;
        (config.node_v4, config.node_v6) = (addr(V4.node), addr(V6.node));
        config.self_node = addr(V4.node);
        (config.uplink_mac, config.mgmt_mac) = (UPLINK_MAC, MGMT_MAC);
        change(&mut config);
        self.config.set(0, config, 0).expect("write the configuration");
    }

    pub(crate) fn set_lease(&mut self, lease: Lease) {
        self.lease.set(0, lease, 0).expect("write the lease");
    }

    pub(crate) fn lease(&self) -> Lease {
        self.lease.get(&0, 0).expect("read the lease")
    }

    pub(crate) fn put_pod(&mut self, pod: &str, entry: PodEntry) {
        let pod = addr(pod);
        self.pods.insert(pod, entry.sealed(&pod), 0).expect("a pod");
    }

    /// Selects the pod by the policy of the other one.
    pub(crate) fn select_as(&mut self, pod: &str, peer: &str) {
        let entry = self.pods.get(&addr(peer), 0).expect("a pod");
        self.put_pod(pod, entry);
    }

    /// Writes the agent's entries for a cast; existing entries are overwritten.
    pub(crate) fn fill(&mut self, cast: &FamilyAddresses) {
        let (node, other) = (addr(V4.node), addr(V4.other_node));
        for (pod, entry) in [
            (cast.pod, PodEntry::selected(cast.here, 0)),
            (cast.away_pod, PodEntry::selected(cast.away, 0)),
            (cast.pending_pod, PodEntry::selected(cast.pending, 0)),
            (cast.early_pod, PodEntry::selected(99, 0)),
            (cast.known_pod, PodEntry::known()),
        ] {
            self.put_pod(pod, entry);
        }
        for (id, slots) in [
            (cast.here, vec![PolicySlot::here(addr(cast.egress))]),
            (cast.away, vec![PolicySlot::remote(addr(cast.away_egress), other)]),
            (cast.pending, vec![]),
        ] {
            let policy = PolicyEntry::with_slots(WhenEmpty::Drop, &slots).expect("few slots");
            self.policy.insert(PolicyEntryKey::new(id, cast.family), policy, 0).expect("a policy");
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

    /// Adds a node of the underlay with a known neighbour entry.
    pub(crate) fn add_node(&mut self, at: &str) {
        self.nodes.insert(addr(at), NodeEntry::new(NodePlace::Other, addr(at)), 0).expect("a node");
        batch(&format!("neigh replace {at} lladdr 02:00:00:00:01:04 dev breth0 nud permanent\n"));
    }

    /// Exposes this port of the pod.
    pub(crate) fn expose(&mut self, pod: &str, protocol: u8, port: u16) {
        let key = ExposedPort::new(addr(pod), protocol, port);
        self.exposed.insert(key, Exposure::default(), 0).expect("an exposed port");
    }

    /// Rewrites the nodes of the pod subnets.
    pub(crate) fn move_subnets(&mut self, cast: &FamilyAddresses, own: Addr, other: Addr) {
        let length = if cast.family == Family::V4 { 120 } else { 64 };
        for (at, of) in [(cast.pod, own), (cast.remote_pod, other)] {
            let prefix = ClusterPrefix::new(PrefixKind::PodSubnet, of);
            self.cluster.insert(&Key::new(length, addr(at)), prefix, 0).expect("a prefix");
        }
    }

    /// One address per egress ID and family: flows of the ID get the last owned one.
    pub(crate) fn own(&mut self, egress_id: u32, address: &str) {
        self.own_on(UPLINK, egress_id, address);
    }

    /// The same on this interface.
    pub(crate) fn own_on(&mut self, ifindex: u32, egress_id: u32, address: &str) {
        self.put_owned(egress_id, Owned::new(egress_id, addr(address), ifindex, OWNED_MAC, 1500));
    }

    /// Owns the address together with a Service.
    pub(crate) fn share(&mut self, egress_id: u32, address: &str) {
        self.share_on(UPLINK, egress_id, address);
    }

    /// The same on this interface.
    pub(crate) fn share_on(&mut self, ifindex: u32, egress_id: u32, address: &str) {
        let owned = Owned::new(egress_id, addr(address), ifindex, OWNED_MAC, 1500);
        self.put_owned(egress_id, owned.shared(egress_id));
    }

    /// Owns an address that the node has itself.
    pub(crate) fn use_own(&mut self, egress_id: u32, address: &str) {
        self.use_own_on(UPLINK, egress_id, address);
    }

    /// The same on this interface, or zero.
    pub(crate) fn use_own_on(&mut self, ifindex: u32, egress_id: u32, address: &str) {
        let owned = Owned::new(egress_id, addr(address), ifindex, OWNED_MAC, 1500);
        self.put_owned(egress_id, owned.hosts(egress_id));
    }

    /// The node's addresses on a further interface.
    pub(crate) fn put_interface(&mut self, ifindex: u32, v4: &str, v6: &str) {
        let addresses = InterfaceAddresses { v4: addr(v4), v6: addr(v6) };
        self.interfaces.insert(ifindex, addresses, 0).expect("a further interface");
    }

    /// Key of `routes` for a prefix of this length, or of the whole address.
    pub(crate) fn route_key(ifindex: u32, to: &str, length: Option<u32>) -> Key<RouteDestination> {
        let to = addr(to);
        let mapped = if to.family() == Family::V4 { 96 } else { 0 };
        Key::new(32 + length.map_or(128, |length| mapped + length), RouteDestination { ifindex, to })
    }

    pub(crate) fn destination_key(set: u32, to: &str, length: Option<u32>) -> Key<PolicyDestination> {
        let key = Self::route_key(set, to, length);
        Key::new(key.prefix_len(), PolicyDestination { set, to: key.data().to })
    }

    /// The policy of a class for a prefix of this length, or of the whole address, that contains it.
    pub(crate) fn put_class(&mut self, class: u32, to: &str, length: Option<u32>, policy: ClassPolicy) {
        self.classes.insert(&Self::destination_key(class, to, length), policy, 0).expect("a destination");
    }

    fn put_owned(&mut self, egress_id: u32, owned: Owned) {
        self.owned.insert(egress_id, owned, 0).expect("own");
        self.owned_addr.insert(owned.address, owned.by_address(egress_id), 0).expect("own");
    }

    /// MTU of the interface of the policy's owned address.
    pub(crate) fn set_mtu(&mut self, egress_id: u32, mtu: u32) {
        let owned = self.owned.get(&egress_id, 0).expect("owned");
        let owned = Owned::new(egress_id, owned.address, owned.ifindex, owned.mac, mtu);
        self.owned.insert(egress_id, owned, 0).expect("own");
    }

    /// A hand-over of the address of `here` from or to the other node; ownership is unchanged.
    pub(crate) fn hand_over(&mut self, cast: &FamilyAddresses, course: HandoverStage) {
        let owned = self.owned.get(&cast.here, 0).expect("owned");
        // All packets of the stage count as sent since then, even if loading the next program is slow. A guest may have
        // been up for less than a minute.
        let since_ns = now_ns().saturating_sub(60_000_000_000).max(1);
        let moving = HandoverEntry::new(cast.here, course, since_ns, addr(V4.other_node), owned);
        self.handovers.insert(cast.here, moving, 0).expect("a hand-over");
    }

    /// The program, loaded at its first use.
    pub(crate) fn program(&mut self, name: &str) -> &SchedClassifier {
        self.object.get_mut(name)
    }

    pub(crate) fn program_mut(&mut self, name: &str) -> &mut SchedClassifier {
        self.object.get_mut(name)
    }

    /// A program that has been used before, for several threads.
    pub(crate) fn loaded(&self, name: &str) -> &SchedClassifier {
        self.object.get(name)
    }

    /// Runs a frame; exactly one counter, the verdict's, moves by one packet and the frame's length.
    pub(crate) fn run_frame(&mut self, run: &TestRun, frame: &[u8], verdict: Verdict) -> Ran {
        let before = self.counts();
        let test_run = if is_rebuilt(verdict, frame) { test_run } else { test_run_summed };
        let ran = test_run(self.program(run.program), run, frame);
        let moved = self.moved(&before);
        let length = u64::try_from(frame.len()).expect("a length");
        let expected = BTreeMap::from([(verdict.label(), (1, length))]);
        assert!(moved == expected, "{run:?}: {moved:?}, not {expected:?}; {ran:02x?}\n{}", self.state());
        ran
    }

    /// Runs a packet that passes unchanged.
    pub(crate) fn passes(&mut self, run: &TestRun, packet: &FrameSpec, verdict: Verdict) {
        let ran = self.run_frame(run, &packet.frame(), verdict);
        assert_eq!(ran, Ran::plain(NEXT, packet.frame(), run.mark), "{packet:?}");
    }

    /// Runs packets with equal outcome; counters are read once, because that takes most of the time.
    pub(crate) fn drops_all(&mut self, run: &TestRun, packets: impl IntoIterator<Item = FrameSpec>, verdict: Verdict) {
        let (before, mut expected) = (self.counts(), (0, 0));
        for packet in packets {
            let frame = packet.frame();
            assert_eq!(test_run(self.program(run.program), run, &frame).action, SHOT, "{packet:?}");
            expected = (expected.0 + 1, expected.1 + u64::try_from(frame.len()).expect("a length"));
        }
        assert_eq!(self.moved(&before), BTreeMap::from([(verdict.label(), expected)]), "{run:?}");
    }

    pub(crate) fn drops(&mut self, run: &TestRun, packet: &FrameSpec, verdict: Verdict) {
        assert_eq!(self.run_frame(run, &packet.frame(), verdict).action, SHOT, "{packet:?}");
    }

    /// Runs a packet that leaves by another device, as `expected`.
    pub(crate) fn redirects(&mut self, run: &TestRun, packet: &FrameSpec, verdict: Verdict, expected: &FrameSpec) {
        let ran = self.run_frame(run, &packet.frame(), verdict);
        assert_eq!(ran, Ran::plain(REDIRECT, expected.frame(), 0), "{packet:?}");
    }

    /// The same for any link addresses: cached ones are written from the second packet on.
    pub(crate) fn forwards(&mut self, run: &TestRun, packet: &FrameSpec, verdict: Verdict, expected: &FrameSpec) {
        let mut ran = self.run_frame(run, &packet.frame(), verdict);
        ran.frame.splice(..12, [expected.dmac, expected.smac].concat());
        assert_eq!(ran, Ran::plain(REDIRECT, expected.frame(), 0), "{packet:?}");
    }

    /// Packets counted for a verdict.
    pub(crate) fn packets_of(&self, verdict: Verdict) -> u64 {
        self.counters.get(&verdict.index(), 0).expect("a counter").iter().map(|count| count.packets).sum()
    }

    /// Packets counted, by the number of the verdict; zero for unused numbers.
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

    /// State of the programs, for failure messages.
    fn state(&self) -> String {
        let mut lines = vec![format!("counters since the beginning: {:?}", self.moved(&zero(&self.counts())))];
        lines.extend(self.flows.iter().map(|entry| format!("flow {entry:?}")));
        lines.extend(self.inbound.iter().map(|entry| format!("inbound {entry:?}")));
        lines.extend(self.nat.iter().map(|entry| format!("nat {entry:?}")));
        lines.join("\n")
    }

    /// Leaves one answer of this kind to the pod, until the next millisecond.
    pub(crate) fn leave_one_answer(&mut self, pod: &str, kind: AnswerKind) {
        let full_at_ns = now_ns() + (limit::POD.burst - 1) * limit::POD.step_ns;
        self.answers.insert(AnswerKey::new(addr(pod), kind), full_at_ns, 0).expect("a budget");
    }

    /// Leaves no answer of this kind to the pod for a minute.
    pub(crate) fn leave_no_answers(&mut self, pod: &str, kind: AnswerKind) {
        self.answers.insert(AnswerKey::new(addr(pod), kind), empty(limit::POD), 0).expect("a budget");
    }

    /// The same of every CPU's total.
    pub(crate) fn leave_no_answers_in_total(&mut self, kind: AnswerKind) {
        let cpus = nr_cpus().expect("the number of CPUs");
        let values = PerCpuValues::try_from(vec![empty(limit::TOTAL); cpus]).expect("one for each");
        self.answer_totals.set(kind.index(), values, 0).expect("write a total");
    }

    /// Fills all budgets again.
    pub(crate) fn refill_answers(&mut self) {
        self.answers.empty();
        let cpus = nr_cpus().expect("the number of CPUs");
        for kind in AnswerKind::ALL {
            let values = PerCpuValues::try_from(vec![0; cpus]).expect("one for each");
            self.answer_totals.set(kind.index(), values, 0).expect("write a total");
        }
    }

    /// The pods, with kinds, that have used their budgets.
    pub(crate) fn answered(&self) -> HashSet<AnswerKey> {
        self.answers.keys().map(|key| key.expect("a key")).collect()
    }

    /// Number of entries in `nat`, `flows` and `inbound`.
    pub(crate) fn entries(&self) -> [usize; 3] {
        [self.nat.keys().count(), self.flows.keys().count(), self.inbound.keys().count()]
    }

    /// Every key of `nat` with its value; asserts that counterparts refer to each other.
    pub(crate) fn mappings(&self) -> BTreeMap<String, (Tuple, NatEntry)> {
        let all: Vec<(Tuple, NatEntry)> = self.nat.iter().map(|entry| entry.expect("an entry")).collect();
        for (key, mapping) in &all {
            let other = self.nat.get(&mapping.other, 0).unwrap_or_else(|_| panic!("{key:?} has no other key"));
            assert_eq!(other.other, *key, "they name each other");
        }
        all.into_iter().map(|(key, mapping)| (format!("{key:?}"), (key, mapping))).collect()
    }
}

/// State of a budget that is empty for a minute.
fn empty(budget: limit::AnswerBudget) -> u64 {
    now_ns() + 60_000_000_000 + budget.burst * budget.step_ns
}

fn zero(counts: &BTreeMap<&'static str, (u64, u64)>) -> BTreeMap<&'static str, (u64, u64)> {
    counts.keys().map(|label| (*label, (0, 0))).collect()
}

pub(crate) fn info(map: &Map) -> MapInfo {
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

fn hash<K: Pod, V: Pod>(map: Map) -> HashMap<MapData, K, V> {
    HashMap::try_from(map).expect("a hash map of these types")
}

/// Whether the output may have another length, or no checksum (ARP).
fn is_rebuilt(verdict: Verdict, frame: &[u8]) -> bool {
    /// MTU of the stage's devices; longer packets may be fragmented.
    const LONGEST_TO_POD: usize = 14 + 1400;
    const MADE: [Verdict; 5] = [
        Verdict::ArpAnswered,
        Verdict::CutAnswered,
        Verdict::FragmentsReleased,
        Verdict::HairpinAnswered,
        Verdict::MtuAnswered,
    ];
    MADE.contains(&verdict) || frame.len() > LONGEST_TO_POD
}
