//! Reads counters and map usage for scrapes, with its own handles, so that scrapes and the locks of the maps do not block
//! each other. Each reading takes a few system calls, whatever the size of the maps.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use aya::Pod;
use aya::maps::{Array, Map, MapData, MapError, MapInfo, PerCpuArray, PerCpuHashMap};
use egress_common::abi::{BlockOwner, Config, Count, EipCount, NatEntry, Owned, PortBlock, Tuple, Usage, Verdict};

use crate::dataplane::Dataplane;
use crate::error::map_io;
use crate::maps::facts::{HookFacts, KernelFacts, PortUse};
use crate::maps::handles::Hash;
use crate::maps::lease;
use crate::maps::port_use;
use crate::names::{BLOCKS_MAP, Hook, Pins};
use crate::node_state::shared::Shared;
use egress_core::model::state::EgressId;
use egress_supervise;

/// The maps whose usage is exported.
const SHOWN: [&str; 12] = [
    "pods",
    "classes",
    "policy",
    "destinations",
    "owned",
    "handovers",
    "cluster",
    "nodes",
    "nat",
    "flows",
    "inbound",
    BLOCKS_MAP,
];

/// Minimum pause between two walks of `nat`, and its ratio to the duration of a walk.
const PAUSE: Duration = Duration::from_secs(10);
const SHARE: u32 = 100;

const STATISTICS: &str = "/proc/sys/kernel/bpf_stats_enabled";

/// Shared by all readers.
#[derive(Clone)]
pub struct Meter(Arc<MeterState>);

struct MeterState {
    shared: Arc<Shared>,
    counters: PerCpuArray<MapData, Count>,
    egress_ips: PerCpuHashMap<MapData, u32, EipCount>,
    usage: Array<MapData, Usage>,
    config: Array<MapData, Config>,
    nat: Hash<Tuple, NatEntry>,
    blocks: Hash<PortBlock, BlockOwner>,
    limits: BTreeMap<&'static str, u32>,
    ports: Mutex<Option<PortUse>>,
}

impl Dataplane {
    /// A second reader for another thread.
    pub fn meter(&self) -> io::Result<Meter> {
        let pins = Pins::new(&self.shared.settings.bpffs);
        let limit = |name| Ok((name, MapInfo::from_pin(pins.map(name)).map_err(map_io)?.max_entries()));
        Ok(Meter(Arc::new(MeterState {
            shared: Arc::clone(&self.shared),
            counters: open(&pins, "counters", Map::PerCpuArray)?,
            egress_ips: open(&pins, "eip_counters", Map::PerCpuHashMap)?,
            usage: open(&pins, "usage", Map::Array)?,
            config: open(&pins, "config", Map::Array)?,
            nat: hash(&pins, "nat")?,
            blocks: hash(&pins, BLOCKS_MAP)?,
            limits: SHOWN.into_iter().map(limit).collect::<io::Result<_>>()?,
            ports: Mutex::new(None),
        })))
    }
}

fn open<T: TryFrom<Map, Error = MapError>>(pins: &Pins, name: &str, kind: fn(MapData) -> Map) -> io::Result<T> {
    T::try_from(kind(MapData::from_pin(pins.map(name)).map_err(map_io)?)).map_err(map_io)
}

fn hash<K: Pod, V: Pod>(pins: &Pins, name: &str) -> io::Result<Hash<K, V>> {
    Hash::new(MapData::from_pin(pins.map(name)).map_err(map_io)?).map_err(map_io)
}

impl Meter {
    /// The kernel's current state for these egress IPs.
    pub fn read(&self, served: impl Iterator<Item = EgressId>) -> io::Result<KernelFacts> {
        let inner = &*self.0;
        let mut facts = KernelFacts { limits: inner.limits.clone(), hooks: self.hooks(), ..KernelFacts::default() };
        for verdict in Verdict::ALL {
            let of_cpus = inner.counters.get(&verdict.index(), 0).map_err(map_io)?;
            facts.verdicts.insert(*verdict, sum(&of_cpus));
        }
        for id in served {
            facts.interfaces.extend(self.interface_of(id)?.map(|name| (id, name)));
            match inner.egress_ips.get(&id.0, 0) {
                Ok(of_cpus) => drop(facts.egress_ips.insert(id, sum_of_egress_ip(&of_cpus))),
                // No packet yet.
                Err(MapError::KeyNotFound) => {}
                Err(error) => return Err(map_io(error)),
            }
        }
        facts.lease_seconds = lease::left(inner.shared.lease.read())?.map_or(f64::INFINITY, |left| left.as_secs_f64());
        let usage = inner.usage.get(&0, 0).map_err(map_io)?;
        let used = [("nat", usage.nat), ("flows", usage.flows), ("inbound", usage.inbound)];
        facts.entries = used.map(|(map, entries)| (map, u32::try_from(entries).unwrap_or_default())).into();
        facts.ports = inner.ports.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let blocks = |ports: &PortUse| ports.egress_ips.values().map(|one| one.blocks).sum();
        facts.entries.extend(facts.ports.as_ref().map(|ports| (BLOCKS_MAP, blocks(ports))));
        Ok(facts)
    }

    /// The name of the interface that the policy's address is on.
    fn interface_of(&self, id: EgressId) -> io::Result<Option<String>> {
        let state = self.0.shared.state();
        let Some(owned) = state.maps.owned.get(&id.0)? else { return Ok(None) };
        let record = state.facts().interfaces.iter().find(|one| one.index == owned.ifindex);
        Ok(record.map(|record| record.name.clone()))
    }

    /// Attachment and run statistics of each hook's program.
    pub fn hooks(&self) -> BTreeMap<&'static str, HookFacts> {
        let keeps = std::fs::read_to_string(STATISTICS).is_ok_and(|text| text.trim() == "1");
        let mut state = self.0.shared.state();
        Hook::ALL
            .into_iter()
            .map(|hook| (hook.name(), state.hook_facts(&self.0.shared.settings, hook, keeps)))
            .collect()
    }

    /// Walks `nat` once; returns the pause until the next walk, so that walks use at most a hundredth of the time.
    pub fn count_ports(&self) -> io::Result<Duration> {
        let begun = Instant::now();
        let config = self.0.config.get(&0, 0).map_err(map_io)?;
        let mut of_hosts = BTreeSet::new();
        let note = |id: &u32, owned: &Owned| of_hosts.extend(owned.is_hosts().then_some(*id));
        self.0.shared.state().maps.owned.for_each(note)?;
        let mut count = port_use::PortCounter::new(config.node_ports, of_hosts, config.port_block);
        self.0.nat.for_each(|key, mapping| count.see(key, mapping))?;
        self.0.blocks.for_each(|_, owner| count.see_block(owner))?;
        *self.0.ports.lock().unwrap_or_else(PoisonError::into_inner) = Some(count.done());
        Ok(PAUSE.max(begun.elapsed() * SHARE))
    }

    /// Counts ports until dropped.
    pub async fn follow_ports(self) {
        let mut failing = false;
        loop {
            let meter = self.clone();
            let counted = tokio::task::spawn_blocking(move || meter.count_ports()).await;
            let pause = match egress_supervise::joined(counted) {
                Ok(pause) => {
                    failing = false;
                    pause
                }
                Err(error) => {
                    if !std::mem::replace(&mut failing, true) {
                        tracing::warn!(%error, "cannot count the ports in use; trying again");
                    }
                    PAUSE
                }
            };
            tokio::time::sleep(pause).await;
        }
    }
}

pub fn sum(of_cpus: &[Count]) -> Count {
    of_cpus.iter().fold(Count::default(), |sum, count| Count {
        packets: sum.packets + count.packets,
        bytes: sum.bytes + count.bytes,
    })
}

pub fn sum_of_egress_ip(of_cpus: &[EipCount]) -> EipCount {
    of_cpus.iter().fold(EipCount::default(), |sum, count| EipCount {
        egress_packets: sum.egress_packets + count.egress_packets,
        egress_bytes: sum.egress_bytes + count.egress_bytes,
        ingress_packets: sum.ingress_packets + count.ingress_packets,
        ingress_bytes: sum.ingress_bytes + count.ingress_bytes,
        nat_entries: sum.nat_entries + count.nat_entries,
        refusals: sum.refusals + count.refusals,
        limited: sum.limited + count.limited,
    })
}

/// Traffic of one egress ID on this node as its gateway.
pub type EgressIpCount = EipCount;

impl Dataplane {
    /// Packets and bytes of all verdicts since the maps were created, including zeros.
    pub fn counters(&self) -> io::Result<BTreeMap<Verdict, Count>> {
        let maps = self.shared.policy_maps();
        Verdict::ALL
            .iter()
            .map(|verdict| {
                let per_cpu = maps.counters.get(&verdict.index(), 0).map_err(map_io)?;
                Ok((*verdict, sum(&per_cpu)))
            })
            .collect()
    }

    /// Traffic by egress ID since the maps were created.
    pub fn egress_ip_counters(&self) -> io::Result<BTreeMap<EgressId, EgressIpCount>> {
        let maps = self.shared.policy_maps();
        let entries = maps.eip_counters.iter();
        entries
            .map(|entry| {
                let (id, per_cpu) = entry.map_err(map_io)?;
                Ok((EgressId(id), sum_of_egress_ip(&per_cpu)))
            })
            .collect()
    }

    /// A second reader for another thread.
    pub fn reader(&self) -> Reader {
        Reader { shared: Arc::clone(&self.shared) }
    }
}

/// Reads the programs' maps.
#[derive(Clone)]
pub struct Reader {
    shared: Arc<Shared>,
}

impl Reader {
    /// Every element of `nat` once, two for each NAT entry. Blocks only flushes, which walk it too.
    pub fn mappings(&self, visit: impl FnMut(&Tuple, &NatEntry)) -> io::Result<()> {
        self.shared.flow_maps().nat.for_each(visit)
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_page_of_limits_names_the_maps_whose_usage_is_exported() {
        let page = include_str!("../../../docs/limits.md");
        let (before, _) = page.split_once("`egress_agent_map_entries`").expect("the metric");
        let (_, named) = before.rsplit_once("For ").expect("the maps");
        let mut shown = super::SHOWN;
        shown.sort_unstable();
        assert_eq!(named.split('`').skip(1).step_by(2).collect::<Vec<_>>(), shown);
    }
}
