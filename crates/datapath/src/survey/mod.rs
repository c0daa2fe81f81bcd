//! Survey for `egress-agent status`: devices, programs, maps and neighbours, read from the pins and netlink, with or
//! without a running agent. Read only.

mod neighbours;
pub mod report;

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::path::Path;

use aya::Pod;
use aya::maps::lpm_trie::Key;
use aya::maps::{Array, Map, MapData};
use egress_common::abi::{
    Addr, Candidates, ClassPolicy, ClusterPrefix, Config, Flow, HandoverEntry, Inbound, Lease, NatEntry, NodeEntry,
    Owned, OwnedAddr, PodEntry, PolicyDestination, PolicyEntry, PolicyEntryKey, Tuple, Usage,
};
use jiff::Timestamp;
use nix::ifaddrs::getifaddrs;
use nix::net::if_::{InterfaceFlags, if_indextoname};

use crate::attach::listing::{self, AttachedProgram};
use crate::error::map_io;
use crate::maps::handles::{Hash, Trie};
use crate::maps::lease;
use crate::names::Attachment;
use crate::names::{Device, Hook, Pins};
use crate::survey::report::{Fill, InterfaceReport, Kernel, Program};

/// `None` if nothing is pinned. `is_swept`: an agent runs and counts the large maps every ten seconds; otherwise they are
/// walked.
pub fn survey(bpffs: &Path, is_swept: bool) -> io::Result<Option<Kernel>> {
    let pins = Pins::new(bpffs);
    if !pins.map("config").try_exists()? {
        return Ok(None);
    }
    let config: Config = cell(&pins, "config")?;
    let own = Hook::ALL.into_iter().map(|hook| Ok(program(hook, listing::attached(&pins, &config, hook)?)));
    let mut programs = own.collect::<io::Result<Vec<_>>>()?;
    programs.extend(listing::on_further(&pins, &config)?.into_iter().map(|(hook, there)| program(hook, Some(there))));
    // An earlier layout has none.
    let lease = if pins.map("lease").try_exists()? { cell(&pins, "lease")? } else { Lease::EXPIRED };
    // Rounded up, so that zero means expired.
    let lease_seconds = lease::left(lease)?.map(|left| left.as_millis().div_ceil(1000));
    let lease_seconds = lease_seconds.map(|seconds| u64::try_from(seconds).unwrap_or(u64::MAX));
    Ok(Some(Kernel { lease_seconds, interfaces: interfaces(&config)?, programs, maps: maps(&pins, is_swept)? }))
}

/// The names of the interfaces on which this node serves egress IPs, by address. Also of an address in a hand-over, whose
/// replies are still accepted.
pub fn interfaces_of_addresses(bpffs: &Path) -> io::Result<BTreeMap<IpAddr, String>> {
    let pins = Pins::new(bpffs);
    let mut names = BTreeMap::new();
    if pins.map("owned_addr").try_exists()? {
        open::<Addr, OwnedAddr>(&pins, "owned_addr")?.for_each(|address, owned| {
            names.extend(name_of(owned.ifindex).map(|name| (address.to_ip(), name)));
        })?;
    }
    Ok(names)
}

fn cell<V: Pod>(pins: &Pins, name: &str) -> io::Result<V> {
    let data = MapData::from_pin(pins.map(name)).map_err(map_io)?;
    Array::<MapData, V>::try_from(Map::Array(data)).map_err(map_io)?.get(&0, 0).map_err(map_io)
}

/// The library returns an empty name for an invalid index.
pub fn name_of(index: u32) -> Option<String> {
    if_indextoname(index).ok()?.into_string().ok().filter(|name| !name.is_empty())
}

fn interfaces(config: &Config) -> io::Result<Vec<InterfaceReport>> {
    let mut flags: BTreeMap<String, InterfaceFlags> = BTreeMap::new();
    for one in getifaddrs()? {
        flags.insert(one.interface_name, one.flags);
    }
    let devices = [
        (Device::Uplink, config.uplink_ifindex, config.uplink_mtu),
        (Device::Mgmt, config.mgmt_ifindex, config.pod_mtu),
        (Device::Overlay, config.overlay_ifindex, config.overlay_mtu),
    ];
    let interface = |(device, index, mtu): (Device, u32, u32)| {
        let name = name_of(index);
        let flags = name.as_ref().and_then(|name| flags.get(name).copied()).unwrap_or(InterfaceFlags::empty());
        let (up, carrier) = (flags.contains(InterfaceFlags::IFF_UP), flags.contains(InterfaceFlags::IFF_RUNNING));
        InterfaceReport { role: device.to_string(), name, index, mtu, up, carrier }
    };
    Ok(devices.into_iter().map(interface).collect())
}

fn program(hook: Hook, there: Option<AttachedProgram>) -> Program {
    let name = hook.name().to_owned();
    let Some(there) = there else {
        return Program { name, interface: None, attached: None, since: None, tag: None };
    };
    let attachment = match there.attachment {
        Attachment::Tcx => "tcx",
        Attachment::Clsact => "clsact",
    };
    let since = there.since.and_then(|since| Timestamp::try_from(since).ok());
    Program {
        name,
        interface: Some(name_of(there.ifindex).unwrap_or_else(|| there.ifindex.to_string())),
        attached: Some(attachment.to_owned()),
        since: since.map(|since| format!("{since:.0}")),
        tag: there.tag.map(|tag| format!("{tag:016x}")),
    }
}

fn maps(pins: &Pins, is_swept: bool) -> io::Result<Vec<Fill>> {
    let mut maps = vec![
        count::<Addr, PodEntry>(pins, "pods")?,
        count::<PolicyEntryKey, PolicyEntry>(pins, "policy")?,
        count::<u32, Owned>(pins, "owned")?,
        count::<u32, HandoverEntry>(pins, "handovers")?,
        count::<Addr, NodeEntry>(pins, "nodes")?,
        trie::<Addr, ClusterPrefix>(pins, "cluster")?,
        trie::<PolicyDestination, ClassPolicy>(pins, "classes")?,
        trie::<PolicyDestination, Candidates>(pins, "destinations")?,
    ];
    if is_swept {
        let usage: Usage = cell(pins, "usage")?;
        maps.push(Fill {
            entries: u64::try_from(usage.flows).unwrap_or_default(),
            ..empty::<Tuple, Flow>(pins, "flows")?
        });
        maps.push(Fill {
            entries: u64::try_from(usage.inbound).unwrap_or_default(),
            ..empty::<Tuple, Inbound>(pins, "inbound")?
        });
        maps.push(Fill {
            entries: u64::try_from(usage.nat).unwrap_or_default(),
            ..empty::<Tuple, NatEntry>(pins, "nat")?
        });
    } else {
        maps.push(count::<Tuple, Flow>(pins, "flows")?);
        maps.push(count::<Tuple, Inbound>(pins, "inbound")?);
        maps.push(count::<Tuple, NatEntry>(pins, "nat")?);
    }
    Ok(maps)
}

fn open<K: Pod, V: Pod>(pins: &Pins, map: &str) -> io::Result<Hash<K, V>> {
    Hash::new(MapData::from_pin(pins.map(map)).map_err(map_io)?).map_err(map_io)
}

fn empty<K: Pod, V: Pod>(pins: &Pins, map: &str) -> io::Result<Fill> {
    Ok(Fill { map: map.to_owned(), entries: 0, limit: open::<K, V>(pins, map)?.limit() })
}

fn count<K: Pod, V: Pod>(pins: &Pins, map: &str) -> io::Result<Fill> {
    let hash = open::<K, V>(pins, map)?;
    let mut entries = 0;
    hash.for_each(|_, _| entries += 1)?;
    Ok(Fill { map: map.to_owned(), entries, limit: hash.limit() })
}

fn trie<K: Pod, V: Pod>(pins: &Pins, map: &str) -> io::Result<Fill> {
    let data = MapData::from_pin(pins.map(map)).map_err(map_io)?;
    let trie = Trie::<K, V>::new(data).map_err(map_io)?;
    let mut entries = 0;
    trie.for_each(|_: &Key<K>, _| entries += 1)?;
    Ok(Fill { map: map.to_owned(), entries, limit: trie.limit() })
}

/// Neighbour states of the kernel, by address.
pub fn known_neighbours() -> io::Result<BTreeMap<IpAddr, &'static str>> {
    neighbours::all()
}
