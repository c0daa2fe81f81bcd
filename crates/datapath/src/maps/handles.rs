//! The maps as typed handles.
//!
//! Keys and values are those of `egress_common::abi`; `convert` translates between them and the model.

use std::collections::HashSet;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use aya::maps::lpm_trie::Key;
use aya::maps::{Array, HashMap, LpmTrie, Map, MapData, MapError, PerCpuArray, PerCpuHashMap, RingBuf};
use aya::programs::SchedClassifier;
use aya::{Ebpf, Pod};
use egress_common::abi::{
    Addr, Candidates, ClassPolicy, ClusterPrefix, Config, Count, Datagram, EipCount, ExposedPort, Exposure, Family,
    Flow, HandoverEntry, Holder, Inbound, InterfaceAddresses, NatEntry, NeighbourEntry, NeighbourKey, NodeEntry, Owned,
    OwnedAddr, PodEntry, PolicyEntry, PolicyEntryKey, RouteDestination, RouteEntry, Share, Tuple, Usage,
};

use crate::conntrack::blocks::PortBlocks;
use crate::error::{StartError, map_io};
use crate::maps::access::{self, Batches};
use crate::maps::prefix_sets::PrefixSets;
use crate::maps::sweeper::Sweeper;
use crate::names::{BLOCKS_MAP, POD_BLOCKS_MAP, SHARES_MAP};

/// Small maps of the node's state. Walks of large maps do not block them.
pub struct NodeMaps {
    pub owned: Hash<u32, Owned>,
    pub owned_addr: Hash<Addr, OwnedAddr>,
    pub interfaces: Hash<u32, InterfaceAddresses>,
    pub routes: Trie<RouteDestination, RouteEntry>,
    pub neighbours: Hash<NeighbourKey, NeighbourEntry>,
    pub handovers: Hash<u32, HandoverEntry>,
    pub config: Array<MapData, Config>,
}

impl NodeMaps {
    /// Whether an agent has written the configuration. An unreadable one counts as written, so that it is not overwritten.
    pub fn are_configured(&self) -> bool {
        self.config.get(&0, 0).map_or(true, |config| config.generation != 0)
    }

    pub fn take(ebpf: &mut Ebpf) -> Result<Self, StartError> {
        Ok(Self {
            owned: hash(ebpf, "owned")?,
            owned_addr: hash(ebpf, "owned_addr")?,
            interfaces: hash(ebpf, "interfaces")?,
            routes: Trie::take(ebpf, "routes")?,
            neighbours: hash(ebpf, "neighbours")?,
            handovers: hash(ebpf, "handovers")?,
            config: typed(ebpf, "config")?,
        })
    }
}

/// Large maps of flow state.
pub struct FlowMaps {
    pub flows: Hash<Tuple, Flow>,
    pub inbound: Hash<Tuple, Inbound>,
    pub datagrams: Hash<Tuple, Datagram>,
    pub nat: Hash<Tuple, NatEntry>,
    pub usage: Array<MapData, Usage>,
    pub shares: Hash<Holder, Share>,
    pub blocks: PortBlocks,
    /// Holders that the last pass of `conntrack::gc` has found without entries.
    pub empty_shares: HashSet<Holder>,
    /// Entries of `flows`, `nat` and `inbound` are removed by it alone, because programs count them.
    pub sweeper: Sweeper,
}

impl FlowMaps {
    pub fn take(ebpf: &mut Ebpf, sweep: SchedClassifier) -> Result<Self, StartError> {
        Ok(Self {
            sweeper: Sweeper::new(sweep, array(ebpf, "candidates")?),
            shares: hash(ebpf, SHARES_MAP)?,
            empty_shares: HashSet::new(),
            flows: hash(ebpf, "flows")?,
            inbound: hash(ebpf, "inbound")?,
            datagrams: hash(ebpf, "datagrams")?,
            nat: hash(ebpf, "nat")?,
            blocks: PortBlocks::new(hash(ebpf, BLOCKS_MAP)?, hash(ebpf, POD_BLOCKS_MAP)?),
            usage: typed(ebpf, "usage")?,
        })
    }
}

/// Maps of the plan, and counters. Only the programs use `frags`.
pub struct PolicyMaps {
    pub pods: Hash<Addr, PodEntry>,
    pub policy: Hash<PolicyEntryKey, PolicyEntry>,
    pub classes: PrefixSets<ClassPolicy>,
    pub destinations: PrefixSets<Candidates>,
    pub exposed: Hash<ExposedPort, Exposure>,
    pub cluster: Trie<Addr, ClusterPrefix>,
    pub nodes: Hash<Addr, NodeEntry>,
    pub counters: PerCpuArray<MapData, Count>,
    pub eip_counters: PerCpuHashMap<MapData, u32, EipCount>,
}

impl PolicyMaps {
    pub fn take(ebpf: &mut Ebpf) -> Result<Self, StartError> {
        Ok(Self {
            pods: hash(ebpf, "pods")?,
            policy: hash(ebpf, "policy")?,
            classes: PrefixSets::take(ebpf, "classes")?,
            destinations: PrefixSets::take(ebpf, "destinations")?,
            exposed: hash(ebpf, "exposed")?,
            cluster: Trie::take(ebpf, "cluster")?,
            nodes: hash(ebpf, "nodes")?,
            counters: typed(ebpf, "counters")?,
            eip_counters: typed(ebpf, "eip_counters")?,
        })
    }
}

impl PolicyMaps {
    /// Drops the counters of an egress ID without a policy.
    pub fn forget_counts(&mut self, id: u32) -> io::Result<()> {
        for family in [Family::V4, Family::V6] {
            if self.policy.get(&PolicyEntryKey::new(id, family))?.is_some() {
                return Ok(());
            }
        }
        absent_is_none(self.eip_counters.remove(&id)).map(drop)
    }

    /// Egress IDs with counters.
    pub fn counted(&self) -> io::Result<Vec<u32>> {
        self.eip_counters.keys().collect::<Result<_, _>>().map_err(map_io)
    }
}

/// A hash map: absence is `None` or `false`, not an error.
pub struct Hash<K: Pod, V: Pod> {
    map: HashMap<MapData, K, V>,
    /// The same map, for walks.
    fd: OwnedFd,
    limit: u32,
}

impl<K: Pod, V: Pod> Hash<K, V> {
    pub fn new(data: MapData) -> Result<Self, MapError> {
        let limit = data.info()?.max_entries();
        let fd = data.fd().as_fd().try_clone_to_owned()?;
        Ok(Self { map: HashMap::try_from(Map::HashMap(data))?, fd, limit })
    }

    /// Maximum number of entries.
    pub fn limit(&self) -> u32 {
        self.limit
    }

    pub fn get(&self, key: &K) -> io::Result<Option<V>> {
        absent_is_none(self.map.get(key, 0))
    }

    pub fn put(&mut self, key: &K, value: &V) -> io::Result<()> {
        self.map.insert(key, value, 0).map_err(map_io)
    }

    /// Whether it was there.
    pub fn remove(&mut self, key: &K) -> io::Result<bool> {
        Ok(absent_is_none(self.map.remove(key))?.is_some())
    }

    pub fn clear(&mut self) -> io::Result<()> {
        let keys: Vec<K> = self.map.keys().collect::<Result<_, _>>().map_err(map_io)?;
        keys.iter().try_for_each(|key| self.remove(key).map(|_was_there| ()))
    }

    /// A walk of its own.
    pub fn batches(&self) -> io::Result<Batches<K, V>> {
        Batches::of(self.fd.try_clone()?)
    }

    /// Every entry once, in any order.
    pub fn for_each(&self, visit: impl FnMut(&K, &V)) -> io::Result<()> {
        access::for_each(self.fd.as_fd(), visit)
    }
}

/// A map of prefixes.
pub struct Trie<K: Pod, V: Pod> {
    map: LpmTrie<MapData, K, V>,
    limit: u32,
}

impl<K: Pod, V: Pod> Trie<K, V> {
    pub fn take(ebpf: &mut Ebpf, name: &'static str) -> Result<Self, StartError> {
        let Map::LpmTrie(data) = take(ebpf, name)? else {
            return Err(StartError::Object(format!("map {name} is no map of prefixes")));
        };
        Self::new(data).map_err(|error| wrong_type(name, &error))
    }

    pub fn new(data: MapData) -> Result<Self, MapError> {
        let limit = data.info()?.max_entries();
        Ok(Self { map: LpmTrie::try_from(Map::LpmTrie(data))?, limit })
    }

    /// The value of the longest prefix that contains the key's.
    pub fn get(&self, key: &Key<K>) -> io::Result<Option<V>> {
        absent_is_none(self.map.get(key, 0))
    }

    pub fn limit(&self) -> u32 {
        self.limit
    }

    pub fn put(&mut self, key: &Key<K>, value: &V) -> io::Result<()> {
        self.map.insert(key, value, 0).map_err(map_io)
    }

    /// Whether it was there.
    pub fn remove(&mut self, key: &Key<K>) -> io::Result<bool> {
        Ok(absent_is_none(self.map.remove(key))?.is_some())
    }

    pub fn for_each(&self, mut visit: impl FnMut(&Key<K>, &V)) -> io::Result<()> {
        for entry in self.map.iter() {
            let (key, value) = entry.map_err(map_io)?;
            visit(&key, &value);
        }
        Ok(())
    }
}

fn absent_is_none<T>(outcome: Result<T, MapError>) -> io::Result<Option<T>> {
    match outcome.map_err(map_io) {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// The ring buffer, which has its own reader.
pub fn events(ebpf: &mut Ebpf) -> Result<RingBuf<MapData>, StartError> {
    typed(ebpf, "events")
}

pub fn hash<K: Pod, V: Pod>(ebpf: &mut Ebpf, name: &'static str) -> Result<Hash<K, V>, StartError> {
    match take(ebpf, name)? {
        Map::HashMap(data) | Map::LruHashMap(data) => Hash::new(data).map_err(|error| wrong_type(name, &error)),
        other => Err(StartError::Object(format!("map {name} is no hash map: {other:?}"))),
    }
}

pub fn typed<T: TryFrom<Map, Error = MapError>>(ebpf: &mut Ebpf, name: &'static str) -> Result<T, StartError> {
    T::try_from(take(ebpf, name)?).map_err(|error| wrong_type(name, &error))
}

/// An array that is written in batches.
pub fn array(ebpf: &mut Ebpf, name: &'static str) -> Result<MapData, StartError> {
    match take(ebpf, name)? {
        Map::Array(data) => Ok(data),
        other => Err(StartError::Object(format!("map {name} is no array: {other:?}"))),
    }
}

pub fn take(ebpf: &mut Ebpf, name: &'static str) -> Result<Map, StartError> {
    ebpf.take_map(name).ok_or(StartError::NotInObject { what: "map", name })
}

fn wrong_type(name: &str, error: &MapError) -> StartError {
    StartError::Object(format!("map {name}: {error}"))
}
