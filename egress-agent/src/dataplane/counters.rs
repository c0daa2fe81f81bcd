//! Reading the counters: per-CPU values summed.

use std::collections::BTreeMap;
use std::io;

use egress_common::abi::{Count, EipCount, Verdict};

use super::Dataplane;
use super::error::map_io;
use crate::model::state::EgressId;

/// Traffic of one egress ID on this node as its gateway.
pub type EgressIpCount = EipCount;

impl Dataplane {
    /// Packets and bytes by verdict since the maps were made; all verdicts, also those at zero.
    pub fn counters(&self) -> io::Result<BTreeMap<Verdict, Count>> {
        let state = self.shared.state();
        Verdict::ALL
            .iter()
            .map(|verdict| {
                let per_cpu = state.tables.counters.get(&verdict.index(), 0).map_err(map_io)?;
                let sum = per_cpu.iter().fold(Count::default(), |sum, count| Count {
                    packets: sum.packets + count.packets,
                    bytes: sum.bytes + count.bytes,
                });
                Ok((*verdict, sum))
            })
            .collect()
    }

    /// Traffic by egress ID since the maps were made.
    pub fn egress_ip_counters(&self) -> io::Result<BTreeMap<EgressId, EgressIpCount>> {
        let state = self.shared.state();
        let entries = state.tables.eip_counters.iter();
        entries
            .map(|entry| {
                let (id, per_cpu) = entry.map_err(map_io)?;
                let sum = per_cpu.iter().fold(EipCount::default(), |sum, count| EipCount {
                    egress_packets: sum.egress_packets + count.egress_packets,
                    egress_bytes: sum.egress_bytes + count.egress_bytes,
                    ingress_packets: sum.ingress_packets + count.ingress_packets,
                    ingress_bytes: sum.ingress_bytes + count.ingress_bytes,
                    mappings: sum.mappings + count.mappings,
                    refusals: sum.refusals + count.refusals,
                });
                Ok((EgressId(id), sum))
            })
            .collect()
    }
}
