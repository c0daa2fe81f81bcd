//! Empties all maps of an object before the next test uses it (`object_pool`), and verifies that they are empty. Only
//! `workspace`, whose layout is private to the programs, is not verified.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::process::Command;
use std::sync::mpsc::channel;

use aya::Pod;
use aya::maps::lpm_trie::Key;
use aya::maps::{Array, HashMap, LpmTrie, Map, MapData, PerCpuArray, PerCpuHashMap, PerCpuValues, RingBuf};
use aya::util::nr_cpus;
use egress_common::abi::{Addr, Config, Count, FlowCacheUse, Lease, NextHop, Tuple, Usage, Verdict};

use crate::cast::V4;
use crate::dumps::use_every_map;
use crate::frames::{Body, packet};
use crate::object_pool;
use crate::stage::{FROM_POD, HELD, Stage, on_stage};

/// Size of a cached next hop with its key.
const WAY: usize = size_of::<Addr>() + size_of::<NextHop>();

/// Size of a flow cache entry.
const RECENT: usize = 128;

/// A map that can be emptied.
pub(crate) trait ClearableMap {
    fn is_empty(&mut self) -> bool;
    fn empty(&mut self);
}

impl<M: ClearableMap> ClearableMap for &mut M {
    fn is_empty(&mut self) -> bool {
        M::is_empty(self)
    }

    fn empty(&mut self) {
        M::empty(self);
    }
}

impl<K: Pod, V: Pod> ClearableMap for HashMap<MapData, K, V> {
    fn is_empty(&mut self) -> bool {
        self.keys().next().is_none()
    }

    fn empty(&mut self) {
        let keys: Vec<K> = self.keys().map(|key| key.expect("a key")).collect();
        keys.iter().for_each(|key| self.remove(key).expect("remove"));
    }
}

impl<K: Pod, V: Pod> ClearableMap for PerCpuHashMap<MapData, K, V> {
    fn is_empty(&mut self) -> bool {
        self.keys().next().is_none()
    }

    fn empty(&mut self) {
        let keys: Vec<K> = self.keys().map(|key| key.expect("a key")).collect();
        keys.iter().for_each(|key| self.remove(key).expect("remove"));
    }
}

impl<K: Pod, V: Pod> ClearableMap for LpmTrie<MapData, K, V> {
    fn is_empty(&mut self) -> bool {
        self.keys().next().is_none()
    }

    fn empty(&mut self) {
        let keys: Vec<Key<K>> = self.keys().map(|key| key.expect("a key")).collect();
        keys.iter().for_each(|key| self.remove(key).expect("remove"));
    }
}

/// An array, which is reset to zeros.
struct Cells<const SIZE: usize>(Array<MapData, [u8; SIZE]>);

impl<const SIZE: usize> Cells<SIZE> {
    fn written(&self) -> Vec<u32> {
        (0..self.0.len()).filter(|place| self.0.get(place, 0).expect("a place") != [0; SIZE]).collect()
    }
}

impl<const SIZE: usize> ClearableMap for Cells<SIZE> {
    fn is_empty(&mut self) -> bool {
        self.written().is_empty()
    }

    fn empty(&mut self) {
        self.written().into_iter().for_each(|place| self.0.set(place, [0; SIZE], 0).expect("write"));
    }
}

/// The same, for each CPU.
struct CellsPerCpu<const SIZE: usize>(PerCpuArray<MapData, [u8; SIZE]>);

impl<const SIZE: usize> CellsPerCpu<SIZE> {
    fn written(&self) -> Vec<u32> {
        let is_written = |place: &u32| self.0.get(place, 0).expect("a place").iter().any(|value| *value != [0; SIZE]);
        (0..self.0.len()).filter(is_written).collect()
    }
}

impl<const SIZE: usize> ClearableMap for CellsPerCpu<SIZE> {
    fn is_empty(&mut self) -> bool {
        self.written().is_empty()
    }

    fn empty(&mut self) {
        let cpus = nr_cpus().expect("the number of CPUs");
        for place in self.written() {
            let values = PerCpuValues::try_from(vec![[0; SIZE]; cpus]).expect("one for each");
            self.0.set(place, values, 0).expect("write");
        }
    }
}

/// Unread events.
struct Unread(RingBuf<MapData>);

impl ClearableMap for Unread {
    fn is_empty(&mut self) -> bool {
        self.0.next().is_none()
    }

    fn empty(&mut self) {
        while self.0.next().is_some() {}
    }
}

impl Stage {
    /// A separate handle to a map.
    pub(crate) fn again(&self, name: &str) -> Map {
        let data = MapData::from_id(self.ids[name]).expect("a map of the stage");
        Map::from_map_data(data).expect("a map of a known type")
    }

    fn cells<const SIZE: usize>(&self, name: &'static str) -> (&'static str, Box<dyn ClearableMap>) {
        (name, Box::new(Cells::<SIZE>(Array::try_from(self.again(name)).expect("an array"))))
    }

    fn cells_per_cpu<const SIZE: usize>(&self, name: &'static str) -> (&'static str, Box<dyn ClearableMap>) {
        (name, Box::new(CellsPerCpu::<SIZE>(PerCpuArray::try_from(self.again(name)).expect("an array per CPU"))))
    }

    fn memories(&mut self) -> Vec<(&'static str, Box<dyn ClearableMap + '_>)> {
        vec![
            self.cells::<{ size_of::<Config>() }>("config"),
            self.cells::<{ size_of::<Lease>() }>("lease"),
            self.cells::<{ size_of::<Usage>() }>("usage"),
            self.cells::<HELD>("held"),
            self.cells::<{ size_of::<u32>() }>("epochs"),
            self.cells::<{ size_of::<Tuple>() }>("candidates"),
            self.cells_per_cpu::<{ size_of::<Count>() }>("counters"),
            self.cells_per_cpu::<WAY>("next_hops"),
            self.cells_per_cpu::<RECENT>("flow_cache"),
            self.cells_per_cpu::<{ size_of::<u64>() }>("answer_totals"),
            self.cells_per_cpu::<{ size_of::<FlowCacheUse>() }>("flow_cache_use"),
            ("events", Box::new(Unread(RingBuf::try_from(self.again("events")).expect("a ring buffer")))),
            ("pods", Box::new(&mut self.pods)),
            ("classes", Box::new(&mut self.classes)),
            ("policy", Box::new(&mut self.policy)),
            ("destinations", Box::new(&mut self.destinations)),
            ("owned", Box::new(&mut self.owned)),
            ("owned_addr", Box::new(&mut self.owned_addr)),
            ("interfaces", Box::new(&mut self.interfaces)),
            ("routes", Box::new(&mut self.routes)),
            ("neighbours", Box::new(&mut self.neighbours)),
            ("handovers", Box::new(&mut self.handovers)),
            ("cluster", Box::new(&mut self.cluster)),
            ("nodes", Box::new(&mut self.nodes)),
            ("flows", Box::new(&mut self.flows)),
            ("inbound", Box::new(&mut self.inbound)),
            ("exposed", Box::new(&mut self.exposed)),
            ("nat", Box::new(&mut self.nat)),
            ("frags", Box::new(&mut self.frags)),
            ("awaited", Box::new(&mut self.awaited)),
            ("datagrams", Box::new(&mut self.datagrams)),
            ("exhausted", Box::new(&mut self.exhausted)),
            ("blocks", Box::new(&mut self.blocks)),
            ("pod_blocks", Box::new(&mut self.pod_blocks)),
            ("answers", Box::new(&mut self.answers)),
            ("shares", Box::new(&mut self.shares)),
            ("pacing", Box::new(&mut self.pacing)),
            ("eip_counters", Box::new(&mut self.eip_counters)),
        ]
    }

    pub(crate) fn empty(&mut self) {
        self.memories().into_iter().for_each(|(_, mut memory)| memory.empty());
        let workspace = MapData::from_id(self.ids["workspace"]).expect("the map workspace");
        let info = workspace.info().expect("its information");
        let zeros = vec!["00"; usize::try_from(info.value_size()).expect("a size")];
        let mut command = Command::new("bpftool");
        command.args(["map", "update", "id", &info.id().to_string(), "key", "hex", "00", "00", "00", "00"]);
        assert!(command.args(["value", "hex"]).args(zeros).status().expect("run bpftool").success());
    }

    /// Whether every CPU's workspace is zeros.
    fn is_workspace_empty(&self) -> bool {
        let id = self.ids["workspace"].to_string();
        let output = Command::new("bpftool").args(["-j", "map", "dump", "id", &id]).output().expect("run bpftool");
        let entries: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let values = entries[0]["values"].as_array().expect("a value for each CPU");
        let bytes = values.iter().flat_map(|value| value["value"].as_array().expect("its bytes"));
        assert_ne!(bytes.clone().count(), 0, "{entries}");
        bytes.into_iter().all(|byte| byte == "0x00")
    }

    /// The maps that are not empty.
    pub(crate) fn remains(&mut self) -> BTreeSet<&'static str> {
        let memories = self.memories().into_iter();
        memories.filter_map(|(name, mut memory)| (!memory.is_empty()).then_some(name)).collect()
    }
}

#[test]
fn no_map_keeps_entries_of_a_test() {
    on_stage(|stage| {
        use_every_map(stage);
        let hairpin = packet(V4.pod, V4.egress, 4000, 80).body(Body::Udp);
        stage.run_frame(&FROM_POD, &hairpin.frame(), Verdict::HairpinAnswered);
        // Fills the next hop cache, which encapsulation uses.
        stage.configure(|config| config.overlay_secret = [2; 6]);
        stage.run_frame(&FROM_POD, &packet(V4.away_pod, V4.world, 4000, 80).frame(), Verdict::ToGateway);
        // Fills the flow cache, which needs a decision number.
        stage.configure(|config| config.decisions = 1);
        stage.passes(&FROM_POD, &packet(V4.known_pod, V4.world, 4000, 80), Verdict::NotSelected);
        stage.sweep(false);
        stage.turn();
        let all: BTreeSet<String> = stage
            .ids
            .keys()
            .filter(|name| !name.starts_with('.') && !["workspace", "sweep_scratch"].contains(&name.as_str()))
            .cloned()
            .collect();
        let used: BTreeSet<String> = stage.remains().into_iter().map(str::to_owned).collect();
        assert_eq!(used, all, "a map that was not used is not seen to be emptied");
        assert!(!stage.is_workspace_empty());
        stage.empty();
        assert_eq!((stage.remains(), stage.is_workspace_empty()), (BTreeSet::new(), true));
        stage.begin();
        let sent = packet(V4.pod, V4.world, 4000, 80);
        stage.redirects(&FROM_POD, &sent, Verdict::SnatHere, &sent.snat(V4.egress, 4000).hop());
    });
}

#[test]
fn a_failed_test_discards_its_object() {
    let (sender, receiver) = channel();
    let failing = || {
        on_stage(move |stage| {
            sender.send(stage.ids["nat"]).expect("tell which it was");
            // A panic without a message.
            resume_unwind(Box::new(()));
        });
    };
    let failed = catch_unwind(AssertUnwindSafe(failing));
    let Ok(nat) = receiver.recv() else { return };
    assert!(failed.is_err() && !object_pool::has(nat), "a failed test's object is not reused");
}
