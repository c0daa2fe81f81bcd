//! Reading the counters: per-CPU values summed; and the mappings.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use egress_common::abi::{Count, EipCount, NatEntry, Tuple, Verdict};

use crate::error::map_io;
use crate::maps::meter;
use crate::{Dataplane, Shared};
use egress_core::model::state::EgressId;

/// Traffic of one egress ID on this node as its gateway.
pub type EgressIpCount = EipCount;

impl Shared {
    /// Drops what was counted of an egress ID that has neither a claim nor a policy here any more: the numbers are given out
    /// again, and the map would fill. As long as one of them stands packets count.
    pub fn forget_counts(&self, id: u32) -> io::Result<()> {
        // One of the two locks at a time.
        let is_owned = self.state().tables.owned.get(&id)?.is_some();
        if is_owned { Ok(()) } else { self.tables().forget_counts(id) }
    }

    /// Of all of them: what was under way when an object went, or comes from a node that has yet to hear of it, has counted
    /// anew.
    pub fn forget_all_counts(&self) -> io::Result<()> {
        let counted = self.tables().counted()?;
        counted.into_iter().try_for_each(|id| self.forget_counts(id))
    }
}

impl Dataplane {
    /// Packets and bytes by verdict since the maps were made; all verdicts, also those at zero.
    pub fn counters(&self) -> io::Result<BTreeMap<Verdict, Count>> {
        let tables = self.shared.tables();
        Verdict::ALL
            .iter()
            .map(|verdict| {
                let per_cpu = tables.counters.get(&verdict.index(), 0).map_err(map_io)?;
                Ok((*verdict, meter::sum(&per_cpu)))
            })
            .collect()
    }

    /// Traffic by egress ID since the maps were made.
    pub fn egress_ip_counters(&self) -> io::Result<BTreeMap<EgressId, EgressIpCount>> {
        let tables = self.shared.tables();
        let entries = tables.eip_counters.iter();
        entries
            .map(|entry| {
                let (id, per_cpu) = entry.map_err(map_io)?;
                Ok((EgressId(id), meter::sum_of_egress_ip(&per_cpu)))
            })
            .collect()
    }

    /// For reading beside this one, on another thread.
    pub fn reader(&self) -> Reader {
        Reader { shared: Arc::clone(&self.shared) }
    }
}

/// Reads what the programs keep.
#[derive(Clone)]
pub struct Reader {
    shared: Arc<Shared>,
}

impl Reader {
    /// Every entry of `nat` once: each mapping has two. This keeps nothing waiting but cuts, which walk it too.
    pub fn mappings(&self, visit: impl FnMut(&Tuple, &NatEntry)) -> io::Result<()> {
        self.shared.flow_tables().nat.for_each(visit)
    }
}
