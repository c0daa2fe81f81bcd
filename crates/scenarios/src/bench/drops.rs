//! Packets that the programs have dropped, by reason.

use aya::maps::{Map, MapData, PerCpuArray};
use egress_common::abi::{Class as VerdictClass, Count, Verdict};

use crate::prelude::*;

/// By the label of the reason; those without any are absent.
pub(crate) type DropCounts = BTreeMap<&'static str, u64>;

/// On these nodes so far.
pub(crate) fn dropped<'a>(nodes: impl IntoIterator<Item = &'a LabNode>) -> Result<DropCounts> {
    let mut all = DropCounts::new();
    for node in nodes {
        let data = MapData::from_pin(AgentPins::of(node).map("counters")?)?;
        let counters: PerCpuArray<_, Count> = Map::PerCpuArray(data).try_into()?;
        for verdict in Verdict::ALL.iter().filter(|verdict| verdict.class() == VerdictClass::Drop) {
            let packets: u64 = counters.get(&verdict.index(), 0)?.iter().map(|count| count.packets).sum();
            *all.entry(verdict.label()).or_default() += packets;
        }
    }
    all.retain(|_, packets| *packets > 0);
    Ok(all)
}

/// Since `before`.
pub(crate) fn since(before: &DropCounts, now: &DropCounts) -> DropCounts {
    let moved = now.iter().map(|(reason, packets)| (*reason, packets - before.get(reason).copied().unwrap_or(0)));
    moved.filter(|(_, packets)| *packets > 0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_has_moved_is_shown() {
        let before = DropCounts::from([("no_route", 3), ("map_full", 2)]);
        let now = DropCounts::from([("no_route", 3), ("map_full", 7), ("quota_exceeded", 1)]);
        assert_eq!(since(&before, &now), DropCounts::from([("map_full", 5), ("quota_exceeded", 1)]));
    }
}
