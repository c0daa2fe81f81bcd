//! A node for the programs alone: a network namespace with the devices and neighbours that they look for, the product's
//! object with maps filled for so many pods, and the rig that restores packets between runs (egress-ebpf/src/bin/rig.rs).
//!
//! ```text
//!   breth0        172.18.0.2/16   the router 172.18.0.1 and the other node 172.18.0.3 have known link addresses
//!   eth1          10.10.10.2/24   its router's link address is in the map `neighbours`
//!   ovn-k8s-mp0   10.244.1.2/24   own pods 10.128.0.0/15 behind 10.244.1.1, likewise
//!   and the same for IPv6, but that the other node is reached by IPv4
//! ```

use std::net::Ipv6Addr;

use super::cache_use::{self, CacheUse, CacheUseMap};
use super::prog_addresses::{NODE, OTHER_NODE, ProgAddresses, after};
use crate::prelude::*;
use aya::maps::lpm_trie::Key;
use aya::maps::{Array, HashMap, LpmTrie, Map, MapData, PerCpuArray, ProgramArray};
use aya::programs::{SchedClassifier, TestRun as _, TestRunOptions};
use aya::{Ebpf, EbpfLoader, Pod};
use egress_common::abi::{
    Addr, BandwidthLimit, BloomFilter, ClassPolicy, ClusterPrefix, Config, Count, Family, InterfaceAddresses, Lease,
    NeighbourEntry, NeighbourKey, NodeEntry, NodePlace, Owned, PodEntry, PolicyDestination, PolicyEntry,
    PolicyEntryKey, PolicySlot, PortRange, RIG_FRAME, Rig, RouteDestination, RouteEntry, Verdict, WhenEmpty,
};

pub(super) const UPLINK: u32 = 11;
pub(super) const MGMT: u32 = 12;
const OVERLAY: u32 = 13;
pub(super) const FURTHER: u32 = 14;
/// The router's link address on the further interface.
const ROUTER2: [u8; 6] = [2, 0, 0, 0, 3, 1];
pub(super) const TUNNEL_PORT: u16 = 4794;
pub(super) const SECRET: [u8; 6] = [2, 1, 2, 3, 4, 5];

/// The script of the namespace.
pub(super) const DEVICES: &str = "link set lo up
link add breth0 index 11 address 02:00:00:00:01:02 type veth peer name out0 index 21
link add ovn-k8s-mp0 index 12 address 02:00:00:00:02:02 mtu 1400 type veth peer name pods0 index 22
addr add 172.18.0.2/16 dev breth0
addr add 10.244.1.2/24 dev ovn-k8s-mp0
addr add fd00:172:18::2/64 dev breth0 nodad
addr add fd00:10:244:1::2/64 dev ovn-k8s-mp0 nodad
link add egress0 index 13 type vxlan external dstport 4794 nolearning
link add eth1 index 14 address 02:00:00:00:01:02 type veth peer name out1 index 24
addr add 10.10.10.2/24 dev eth1
addr add fd00:10:10::2/64 dev eth1 nodad
link set eth1 up
link set out1 up
link set breth0 up
link set egress0 up
link set out0 up
link set ovn-k8s-mp0 up
link set pods0 up
neigh replace 172.18.0.1 lladdr 02:00:00:00:01:01 dev breth0 nud permanent
neigh replace 172.18.0.3 lladdr 02:00:00:00:01:03 dev breth0 nud permanent
neigh replace 10.244.1.1 lladdr 02:00:00:00:02:01 dev ovn-k8s-mp0 nud permanent
neigh replace fd00:172:18::1 lladdr 02:00:00:00:01:01 dev breth0 nud permanent
neigh replace fd00:10:244:1::1 lladdr 02:00:00:00:02:01 dev ovn-k8s-mp0 nud permanent
route add default via 172.18.0.1
route add 10.128.0.0/15 via 10.244.1.1
route add default via fd00:172:18::1
route add fd00:10:128::/47 via fd00:10:244:1::1
";

/// Both objects, loaded and filled. The rig outlives the programs that it calls.
pub(super) struct Bench {
    rig: Ebpf,
    plan: Array<MapData, Rig>,
    counters: PerCpuArray<MapData, Count>,
    cache_use: CacheUseMap,
    _subjects: ProgramArray<MapData>,
    _product: Ebpf,
}

/// The programs under test, in the order of the rig's list; the rig's own come after them.
const SUBJECTS: [&str; 5] = ["from_pod", "to_pod", "from_netdev", "to_netdev", "from_overlay"];
const OWN: [&str; 2] = ["nothing", "grow"];

/// Which program, on which device, coming from which.
#[derive(Clone, Copy, Debug)]
pub(super) struct BenchHook {
    pub(super) program: &'static str,
    pub(super) ifindex: u32,
    pub(super) ingress_ifindex: u32,
}

fn addr(ip: impl Into<IpAddr>) -> Addr {
    Addr::from(ip.into())
}

fn take(ebpf: &mut Ebpf, name: &str) -> Result<Map> {
    ebpf.take_map(name).with_context(|| format!("the object has no map {name}"))
}

fn put<K: Pod, V: Pod>(
    ebpf: &mut Ebpf,
    name: &str,
    entries: impl IntoIterator<Item = (K, V)>,
) -> Result<HashMap<MapData, K, V>> {
    let mut map: HashMap<MapData, K, V> = HashMap::try_from(take(ebpf, name)?)?;
    for (key, value) in entries {
        map.insert(key, value, 0).with_context(|| format!("fill map {name}"))?;
    }
    Ok(map)
}

impl Bench {
    /// Called inside the namespace.
    pub(super) fn load(product: &Path, rig: &Path, of: &ProgAddresses, pods: u32) -> Result<Self> {
        let mut product = EbpfLoader::new().map_max_entries("pods", 1 << 17).load_file(product)?;
        let mut rig = Ebpf::load_file(rig)?;
        // First: loaded programs hold the maps that are filled and closed below.
        for name in SUBJECTS {
            classifier(&mut product, name)?;
        }
        for name in OWN.into_iter().chain(["again", "shrink"]) {
            classifier(&mut rig, name)?;
        }
        fill(&mut product, of, pods)?;
        let cache_use = CacheUseMap::new(product.take_map(cache_use::MAP))?;
        let counters = PerCpuArray::try_from(take(&mut product, "counters")?)?;
        let plan = Array::try_from(take(&mut rig, "rig")?)?;
        let mut subjects = ProgramArray::try_from(take(&mut rig, "subjects")?)?;
        let mut place = 0;
        for (ebpf, names) in [(&mut product, SUBJECTS.as_slice()), (&mut rig, OWN.as_slice())] {
            for name in names {
                subjects.set(place, classifier(ebpf, name)?.fd()?, 0)?;
                place += 1;
            }
        }
        Ok(Self { rig, plan, counters, cache_use, _subjects: subjects, _product: product })
    }

    /// Nanoseconds per run, of so many runs, without taking anything off.
    pub(super) fn run(&mut self, hook: &BenchHook, plan: &Rig, times: u32) -> Result<f64> {
        let place = SUBJECTS.iter().chain(&OWN).position(|name| *name == hook.program).context("no such program")?;
        let plan = Rig { subject: u32::try_from(place)?, next: 0, ..*plan };
        self.plan.set(0, plan, 0)?;
        self.repeat("again", hook, &plan.frame, times)
    }

    /// The cost of removing the space of the overlay's headers. A long packet can lose it many times.
    pub(super) fn shrink(&mut self) -> Result<f64> {
        const LONG: usize = 3200;
        const TIMES: u32 = 50;
        let mut frame = vec![0; LONG];
        frame[..RIG_FRAME].copy_from_slice(&super::programs::any_frame());
        let hook = BenchHook { program: "shrink", ifindex: UPLINK, ingress_ifindex: 0 };
        self.repeat("shrink", &hook, &frame, TIMES)
    }

    fn repeat(&mut self, program: &str, hook: &BenchHook, frame: &[u8], times: u32) -> Result<f64> {
        // linux/bpf.h: `struct __sk_buff` has 192 bytes.
        let mut context = [0; 192];
        context[36..40].copy_from_slice(&hook.ingress_ifindex.to_ne_bytes());
        context[40..44].copy_from_slice(&hook.ifindex.to_ne_bytes());
        let mut out = [0; 4096];
        let options = TestRunOptions {
            data_in: Some(frame),
            data_out: Some(&mut out),
            ctx_in: Some(&context),
            repeat: times,
            ..TestRunOptions::default()
        };
        let program = classifier(&mut self.rig, program)?;
        let ran = program.test_run(options).with_context(|| format!("run {}", hook.program))?;
        let code = ran.return_value.cast_signed();
        // The rig's own failures; TC_ACT_UNSPEC is -1.
        ensure!(code >= -1, "{}: the rig could not restore the packet ({code})", hook.program);
        Ok(ran.duration.as_secs_f64() * 1e9)
    }

    pub(super) fn cache_use(&self) -> Result<CacheUse> {
        self.cache_use.read()
    }

    /// How often each verdict was given so far.
    pub(super) fn verdicts(&self) -> Result<Vec<(Verdict, u64)>> {
        let count = |verdict: &Verdict| -> Result<(Verdict, u64)> {
            let values = self.counters.get(&verdict.index(), 0)?;
            Ok((*verdict, values.iter().map(|count| count.packets).sum()))
        };
        Verdict::ALL.iter().map(count).collect()
    }
}

/// The program, loaded at its first use.
fn classifier<'a>(ebpf: &'a mut Ebpf, name: &str) -> Result<&'a mut SchedClassifier> {
    let program = ebpf.program_mut(name).with_context(|| format!("the object has no program {name}"))?;
    let program: &mut SchedClassifier = program.try_into()?;
    if program.fd().is_err() {
        program.load().with_context(|| format!("load {name}"))?;
    }
    Ok(program)
}

/// Bits per second, a hundred times what one core sends.
const LIMIT: u64 = 1_000_000_000_000;

/// Half of the pods on each path.
fn fill(product: &mut Ebpf, of: &ProgAddresses, pods: u32) -> Result<()> {
    let mut map: Array<MapData, Config> = Array::try_from(take(product, "config")?)?;
    map.set(0, config(of), 0)?;
    let mut lease: Array<MapData, Lease> = Array::try_from(take(product, "lease")?)?;
    lease.set(0, Lease::ENDLESS, 0)?;
    // The class of pods with destinations has the number of the object that they leave by.
    let entry = |id| if of.by_destination { PodEntry::by_destination(id, 0) } else { PodEntry::selected(id, 0) };
    let block = |first: IpAddr, id: u32| {
        let pods = (0..pods / 2).map(move |place| addr(after(first, place)));
        pods.map(move |pod| (pod, entry(id).sealed(&pod)))
    };
    put(product, "pods", block(of.local_pods, of.local.0).chain(block(of.remote_pods, of.away.0)))?;
    classes(product, of)?;
    let policy = |id: u32, slot: PolicySlot| -> Result<_> {
        let policy = PolicyEntry::with_slots(WhenEmpty::Drop, &[slot]).context("one slot")?;
        let limit = if of.limited { BandwidthLimit::new(LIMIT, LIMIT) } else { BandwidthLimit::NONE };
        Ok((PolicyEntryKey::new(id, of.family), policy.with_limit(limit)))
    };
    let policies = [
        policy(of.local.0, PolicySlot::here(addr(of.local.1)))?,
        policy(of.away.0, PolicySlot::remote(addr(of.away.1), addr(OTHER_NODE)))?,
        policy(of.foreign.0, PolicySlot::here(addr(of.foreign.1)))?,
    ];
    put(product, "policy", policies)?;
    let mac = [2, 0, 0, 0, 1, 2];
    let own = |(egress_id, address)| Owned::new(egress_id, addr(address), of.interface, mac, 1500);
    put(product, "owned", [of.local, of.foreign].map(|object| (object.0, own(object))))?;
    let named = |object: (u32, _)| own(object).by_address(object.0);
    put(product, "owned_addr", [of.local, of.foreign].map(|object| (addr(object.1), named(object))))?;
    further(product)?;
    let node = |at: IpAddr, place, endpoint: Ipv4Addr| (addr(at), NodeEntry::new(place, addr(endpoint)));
    let mut nodes =
        vec![node(NODE.into(), NodePlace::Own, NODE), node(OTHER_NODE.into(), NodePlace::Other, OTHER_NODE)];
    if of.family == Family::V6 {
        nodes.push(node(of.node, NodePlace::Own, NODE));
    }
    put(product, "nodes", nodes)?;
    let mut api: LpmTrie<MapData, Addr, ClusterPrefix> = LpmTrie::try_from(take(product, "cluster")?)?;
    for (net, length, kind, node) in of.prefixes() {
        let mapped = if net.is_ipv4() { 96 } else { 0 };
        let prefix = ClusterPrefix::new(kind, node.map_or(Addr::UNSPECIFIED, addr));
        api.insert(&Key::new(mapped + u32::from(length), addr(net)), prefix, 0)?;
    }
    Ok(())
}

/// Of each class: policies for so many networks beside the one of the flows, and none for any other destination.
const CLASS_NETWORKS: u32 = 256;

fn classes(product: &mut Ebpf, of: &ProgAddresses) -> Result<()> {
    let mut map: LpmTrie<MapData, PolicyDestination, ClassPolicy> = LpmTrie::try_from(take(product, "classes")?)?;
    // Lengths: of every destination, of the flows' network, of another one.
    let (any, others, lengths): (IpAddr, IpAddr, _) = match of.family {
        Family::V4 => (Ipv4Addr::UNSPECIFIED.into(), [198, 18, 0, 0].into(), [128, 128 + 12, 128 + 24]),
        Family::V6 => {
            let others = [0x2001, 0xdb8, 0x200, 0, 0, 0, 0, 0];
            (Ipv6Addr::UNSPECIFIED.into(), others.into(), [32, 32 + 96, 32 + 120])
        }
    };
    for class in [of.local.0, of.away.0].into_iter().filter(|_| of.by_destination) {
        let mut put = |to: IpAddr, length, policy| {
            map.insert(&Key::new(length, PolicyDestination { set: class, to: addr(to) }), policy, 0)
        };
        put(any, lengths[0], ClassPolicy::NONE)?;
        put(of.world, lengths[1], ClassPolicy::new(class))?;
        for place in 0..CLASS_NETWORKS {
            put(after(others, place << 8), lengths[2], ClassPolicy::new(class))?;
        }
    }
    Ok(())
}

/// The own addresses, routes and neighbours of the further interface.
fn further(product: &mut Ebpf) -> Result<()> {
    let text = |text: &str| -> Result<Addr> { Ok(addr(text.parse::<IpAddr>()?)) };
    let own = InterfaceAddresses { v4: text("10.10.10.2")?, v6: text("fd00:10:10::2")? };
    put(product, "interfaces", [(FURTHER, own)])?;
    let gateways = [text("10.10.10.1")?, text("fd00:10:10::1")?];
    let neighbours = gateways.map(|address| {
        let key = NeighbourKey { ifindex: FURTHER, address };
        (key, NeighbourEntry::new(&key, ROUTER2))
    });
    put(product, "neighbours", neighbours)?;
    let mut routes: LpmTrie<MapData, RouteDestination, RouteEntry> = LpmTrie::try_from(take(product, "routes")?)?;
    for (to, length, gateway) in [("0.0.0.0", 32 + 96, gateways[0]), ("::", 32, gateways[1])] {
        let key = Key::new(length, RouteDestination { ifindex: FURTHER, to: text(to)? });
        routes.insert(&key, RouteEntry::via(&[gateway], 0), 0)?;
    }
    Ok(())
}

fn config(of: &ProgAddresses) -> Config {
    let mut config = Config::EMPTY;
    config.generation = 1;
    config.route_generation = 1;
    (config.uplink_ifindex, config.mgmt_ifindex, config.overlay_ifindex) = (UPLINK, MGMT, OVERLAY);
    config.tunnel_port = TUNNEL_PORT.into();
    (config.uplink_mtu, config.pod_mtu, config.overlay_mtu) = (1500, 1400, 1450);
    config.node_ports = PortRange { first: 61000, last: 65535 };
    config.node_v4 = addr(NODE);
    if of.family == Family::V6 {
        config.node_v6 = addr(of.node);
    }
    config.self_node = addr(NODE);
    config.overlay_secret = SECRET;
    config.decisions = 1;
    // As the agent writes it.
    let owned = [of.local, of.foreign];
    config.owned = owned.iter().fold(BloomFilter::NONE, |owned, object| owned.with(&addr(object.1)));
    (config.pods_v4, config.pods_v6) = of.covers();
    config
}
