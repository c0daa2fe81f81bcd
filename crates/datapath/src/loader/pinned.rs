//! Reads the pinned maps, with or without a running agent. Read only.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::path::Path;

use aya::Pod;
use aya::maps::MapData;
use egress_common::abi::{self, Addr, Owned, PodEntry, PolicyEntryKey};

use crate::error::map_io;
use crate::maps::convert;
use crate::maps::handles::Hash;
use crate::names::Pins;
use egress_core::model::state::{EgressId, Family, HandoverState, PodState, Policy};

#[derive(Debug, Default)]
pub struct Pinned {
    pub owned: BTreeMap<EgressId, IpAddr>,
    pub handovers: BTreeMap<EgressId, HandoverState>,
    pub pods: Vec<PodState>,
    pub policies: BTreeMap<(EgressId, Family), Policy>,
}

/// `None` without programs.
pub fn read(bpffs: &Path) -> io::Result<Option<Pinned>> {
    let pins = Pins::new(bpffs);
    if !pins.map("owned").try_exists()? {
        return Ok(None);
    }
    let mut pinned = Pinned::default();
    map(&pins, "owned", |id: &u32, entry: &Owned| {
        pinned.owned.insert(EgressId(*id), entry.address.to_ip());
    })?;
    map(&pins, "handovers", |id: &u32, entry: &abi::HandoverEntry| {
        pinned.handovers.extend(convert::handover(entry).map(|handover| (EgressId(*id), handover)));
    })?;
    map(&pins, "pods", |_: &Addr, entry: &PodEntry| pinned.pods.push(convert::pod_state(entry)))?;
    map(&pins, "policy", |key: &PolicyEntryKey, entry: &abi::PolicyEntry| {
        let key = key.family().map(|family| (EgressId(key.egress_id), family));
        pinned.policies.extend(key.map(|key| (key, convert::policy(entry))));
    })?;
    Ok(Some(pinned))
}

/// A map that an earlier version did not have counts as empty.
fn map<K: Pod, V: Pod>(pins: &Pins, name: &str, visit: impl FnMut(&K, &V)) -> io::Result<()> {
    let path = pins.map(name);
    if !path.try_exists()? {
        return Ok(());
    }
    let data = MapData::from_pin(path).map_err(map_io)?;
    Hash::<K, V>::new(data).map_err(map_io)?.for_each(visit)
}
