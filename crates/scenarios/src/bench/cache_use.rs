//! Hits and misses of the flow cache, from the map `flow_cache_use` of the programs that are attached.

use std::ops::{AddAssign, Sub};

use aya::maps::{Map, MapData, PerCpuArray};
use egress_common::abi::FlowCacheUse;

use crate::prelude::*;
use egress_lab::pins::bpftool;

pub(super) const MAP: &str = "flow_cache_use";

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct CacheUse {
    hits: u64,
    misses: u64,
}

impl CacheUse {
    /// The part of packets whose outcome the cache had; `None` without packets that it could serve.
    pub(super) fn hit_rate(self) -> Option<f64> {
        let all = self.hits + self.misses;
        #[expect(clippy::cast_precision_loss, reason = "a rate needs no more digits than a double has")]
        let rate = self.hits as f64 / all as f64;
        (all > 0).then_some(rate)
    }
}

impl AddAssign for CacheUse {
    fn add_assign(&mut self, other: Self) {
        self.hits += other.hits;
        self.misses += other.misses;
    }
}

impl Sub for CacheUse {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        Self { hits: self.hits - before.hits, misses: self.misses - before.misses }
    }
}

/// The open map; `None` for programs without it.
pub(super) struct CacheUseMap(Option<PerCpuArray<MapData, FlowCacheUse>>);

impl CacheUseMap {
    pub(super) fn new(map: Option<Map>) -> Result<Self> {
        Ok(Self(map.map(PerCpuArray::try_from).transpose()?))
    }

    /// Of a node with an agent. The map need not be pinned: the attached program has it.
    pub(super) fn of(node: &LabNode) -> Result<Self> {
        let link = AgentPins::of(node).link("from_netdev")?;
        let program = bpftool(&["prog", "show", "id", &link.program.to_string()])?;
        let ids = program["map_ids"].as_array().context("a program without maps")?;
        for id in ids.iter().filter_map(Value::as_u64) {
            let map = bpftool(&["map", "show", "id", &id.to_string()])?;
            if map["name"].as_str() == Some(MAP) {
                let data = MapData::from_id(u32::try_from(id)?)?;
                return Self::new(Some(Map::PerCpuArray(data)));
            }
        }
        Self::new(None)
    }

    /// Since the programs were loaded, of all CPUs.
    pub(super) fn read(&self) -> Result<CacheUse> {
        let mut sum = CacheUse::default();
        if let Self(Some(map)) = self {
            for of_cpu in map.get(&0, 0)?.iter() {
                sum += CacheUse { hits: of_cpu.hits, misses: of_cpu.misses };
            }
        }
        Ok(sum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_is_that_of_the_packets_in_between() {
        let (before, after) = (CacheUse { hits: 5, misses: 7 }, CacheUse { hits: 35, misses: 17 });
        assert_eq!((after - before).hit_rate(), Some(0.75));
        assert_eq!((after - after).hit_rate(), None);
    }
}
