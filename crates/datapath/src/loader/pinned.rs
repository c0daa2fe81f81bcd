//! Reads the pinned maps, with or without a running agent. Read only.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use aya::Pod;
use aya::maps::MapData;
use egress_common::abi::{self, Addr, ClassPolicy, Owned, PodEntry, PolicyEntryKey};
use ipnet::IpNet;

use crate::error::map_io;
use crate::maps::convert;
use crate::maps::handles::{Hash, Trie};
use crate::names::Pins;
use egress_core::model::state::{EgressId, KernelState};

/// Pods, classes, policies, owned addresses and hand-overs; `None` without programs.
pub fn read(bpffs: &Path) -> io::Result<Option<KernelState>> {
    let pins = Pins::new(bpffs);
    if !pins.map("owned").try_exists()? {
        return Ok(None);
    }
    let mut pinned = KernelState::default();
    map(&pins, "owned", |id: &u32, entry: &Owned| {
        pinned.owned.insert(EgressId(*id), entry.address.to_ip());
    })?;
    map(&pins, "handovers", |id: &u32, entry: &abi::HandoverEntry| {
        pinned.handovers.extend(convert::handover(entry).map(|handover| (EgressId(*id), handover)));
    })?;
    map(&pins, "pods", |address: &Addr, entry: &PodEntry| {
        pinned.pods.insert(address.to_ip(), convert::pod_state(entry));
    })?;
    if pins.map("classes").try_exists()? {
        let mut classes = BTreeMap::<u32, BTreeMap<IpNet, ClassPolicy>>::new();
        let data = MapData::from_pin(pins.map("classes")).map_err(map_io)?;
        Trie::new(data).map_err(map_io)?.for_each(|key, policy| {
            if let Some(net) = convert::destination_net(key) {
                classes.entry(key.data().set).or_default().insert(net, *policy);
            }
        })?;
        pinned.classes = convert::classes(classes);
    }
    map(&pins, "policy", |key: &PolicyEntryKey, entry: &abi::PolicyEntry| {
        let key = key.family().map(|family| (EgressId(key.egress_id), family));
        pinned.policy.extend(key.map(|key| (key, convert::policy(entry))));
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
