//! Copies the entries of the pinned maps that concern one packet.

use std::io;

use aya::maps::lpm_trie::Key;
use aya::maps::{Array, Map, MapData};
use egress_common::abi::{
    Addr, BlockHolder, BlockOwner, Candidates, ClassPolicy, ClusterPrefix, Config, ExposedPort, Exposure, Flow,
    HandoverEntry, HeldBlocks, Holder, Inbound, Lease, NatEntry, NodeEntry, Owned, PodEntry, PolicyDestination,
    PolicyEntry, PolicyEntryKey, PortBlock, Share, SlotPlace, Tuple,
};
use egress_common::decide::from_overlay::Outer;
use egress_common::decide::memory_maps::MemoryMaps;
use egress_common::decide::policy_of;
use egress_common::wire::{Headers, PROTO_ICMP, PROTO_ICMPV6};

use crate::clock::{boot_ns, now_ns};
use crate::error::map_io;
use crate::maps::handles::{Hash, Trie};
use crate::names::{BLOCKS_MAP, POD_BLOCKS_MAP, Pins};

/// More free entries than a packet can use.
const MAX_FREE: u32 = 16;

/// Entries of maps, by name.
pub type Sizes = [(&'static str, u32); 4];

/// The entries, and the free entries of `flows` and `nat`.
pub struct CopiedMaps {
    pub maps: MemoryMaps,
    flows_free: u32,
    nat_free: u32,
}

impl CopiedMaps {
    pub fn of(pins: &Pins, headers: &Headers) -> io::Result<Self> {
        let maps = empty(pins)?;
        let egress_id = reads(&maps, pins, headers)?;
        let addresses = addresses(&maps, headers, egress_id);
        Self::with_written(maps, pins, headers, (egress_id, addresses))
    }

    /// Those that concern a packet of another node's pod, which arrives by the overlay.
    pub fn of_arrival(pins: &Pins, headers: &Headers, outer: &Outer) -> io::Result<Self> {
        let maps = empty(pins)?;
        arrival_reads(&maps, pins, headers, outer)?;
        let owned = maps.owned.borrow().get(&outer.egress_id).map(|owned| owned.address);
        let moving = maps.handovers.borrow().get(&outer.egress_id).map(|moving| moving.owned.address);
        let addresses = owned.into_iter().chain(moving).collect();
        Self::with_written(maps, pins, headers, (Some(outer.egress_id), addresses))
    }

    /// Adds the entries of the maps that programs write. The addresses are those that the flow may get here.
    fn with_written(
        maps: MemoryMaps,
        pins: &Pins,
        headers: &Headers,
        (egress_id, addresses): (Option<u32>, Vec<Addr>),
    ) -> io::Result<Self> {
        let tuple = &headers.tuple;
        let inbound = hash::<Tuple, Inbound>(pins, "inbound")?;
        if let Some(entry) = inbound.get(tuple)? {
            maps.inbound.put(*tuple, entry);
        }
        let flows = hash::<Tuple, Flow>(pins, "flows")?;
        if let Some(entry) = flows.get(tuple)? {
            maps.flows.put(*tuple, entry);
        }
        let flows_free = free(&flows, |_, _| ())?;
        let shares = hash::<Holder, Share>(pins, "shares")?;
        for holder in [Some(Holder::pod(tuple.saddr)), egress_id.map(Holder::policy)].into_iter().flatten() {
            maps.shares.borrow_mut().extend(shares.get(&holder)?.map(|share| (holder, share)));
        }
        for address in &addresses {
            let holder = BlockHolder { address: *address, pod: tuple.saddr };
            let held = hash::<BlockHolder, HeldBlocks>(pins, POD_BLOCKS_MAP)?.get(&holder)?;
            maps.pod_blocks.borrow_mut().extend(held.map(|held| (holder, held)));
        }
        // Also others': they tell whether a block is free.
        hash::<PortBlock, BlockOwner>(pins, BLOCKS_MAP)?.for_each(|block, owner| {
            if addresses.contains(&block.address) {
                maps.blocks.borrow_mut().insert(*block, *owner);
            }
        })?;
        let nat = hash::<Tuple, NatEntry>(pins, "nat")?;
        let nat_free = free(&nat, |key, mapping| {
            if key == tuple || mapping.other == *tuple || is_wanted(key, tuple, &addresses) {
                maps.nat.put(*key, *mapping);
            }
        })?;
        let copied = Self { maps, flows_free, nat_free };
        copied.maps.flows.limit(copied.maps.flows.len() + copied.flows_free as usize);
        copied.maps.nat.limit(copied.maps.nat.len() + copied.nat_free as usize);
        Ok(copied)
    }

    /// Sizes of the maps that programs write: as full as the pinned ones, and otherwise minimal. A map has at least one
    /// entry: see [`are_full_of_others`](Self::are_full_of_others).
    pub fn sizes(&self) -> Sizes {
        let size = |entries: usize, free: u32| {
            let size = u32::try_from(entries).unwrap_or(u32::MAX).saturating_add(free);
            // With enough free entries a larger size does not matter, so that most packets share one size.
            if free == MAX_FREE { size.max(4 * MAX_FREE) } else { size.max(1) }
        };
        [
            ("flows", size(self.maps.flows.len(), self.flows_free)),
            ("nat", size(self.maps.nat.len(), self.nat_free)),
            ("inbound", MAX_FREE),
            ("datagrams", 1024),
        ]
    }

    /// Whether `flows` and `nat` are full of unrelated entries.
    pub fn are_full_of_others(&self) -> (bool, bool) {
        let flows = self.flows_free == 0 && self.maps.flows.is_empty();
        (flows, self.nat_free == 0 && self.maps.nat.is_empty())
    }
}

/// A NAT entry that may conflict with the packet's own: same reverse tuple to the same address.
fn is_wanted(key: &Tuple, packet: &Tuple, addresses: &[Addr]) -> bool {
    let is_echo = matches!(packet.protocol, PROTO_ICMP | PROTO_ICMPV6);
    key.protocol == packet.protocol
        && key.saddr == packet.daddr
        && addresses.contains(&key.daddr)
        && (is_echo || key.sport() == packet.dport())
}

/// Copies the maps that programs only read; returns the pod's egress ID.
fn reads(maps: &MemoryMaps, pins: &Pins, headers: &Headers) -> io::Result<Option<u32>> {
    let (from, to) = (headers.tuple.saddr, headers.tuple.daddr);
    let pod = hash::<Addr, PodEntry>(pins, "pods")?.get(&from)?;
    maps.pods.borrow_mut().extend(pod.map(|pod| (from, pod)));
    let node = hash::<Addr, NodeEntry>(pins, "nodes")?.get(&to)?;
    maps.nodes.borrow_mut().extend(node.map(|node| (to, node)));
    prefixes(maps, pins, &[from, to])?;
    let Some(pod) = pod else { return Ok(None) };
    if let Some(class) = pod.class() {
        let classes = MapData::from_pin(pins.map("classes")).map_err(map_io)?;
        let classes = Trie::<PolicyDestination, ClassPolicy>::new(classes).map_err(map_io)?;
        let key = PolicyDestination { set: class, to };
        let found = classes.get(&Key::new(160, key))?;
        maps.classes.borrow_mut().extend(found.map(|found| (key, 128, found)));
    }
    let Some(egress_id) = policy_of(&pod, &to, maps) else { return Ok(None) };
    let key = PolicyEntryKey::new(egress_id, headers.family);
    let policy = hash::<PolicyEntryKey, PolicyEntry>(pins, "policy")?.get(&key)?;
    if let Some(policy) = policy {
        maps.put_policy(key, policy);
        if let Some(set) = policy.destinations() {
            let destinations = MapData::from_pin(pins.map("destinations")).map_err(map_io)?;
            let destinations = Trie::<PolicyDestination, Candidates>::new(destinations).map_err(map_io)?;
            let key = PolicyDestination { set, to };
            // The longest match, which the kernel has found, is all that this packet needs.
            let found = destinations.get(&Key::new(160, key))?;
            maps.destinations.borrow_mut().extend(found.map(|found| (key, 128, found)));
        }
    }
    ownership(maps, pins, egress_id)?;
    Ok(Some(egress_id))
}

/// The same of a packet from another node.
fn arrival_reads(maps: &MemoryMaps, pins: &Pins, headers: &Headers, outer: &Outer) -> io::Result<()> {
    let (from, to) = (headers.tuple.saddr, headers.tuple.daddr);
    let pod = hash::<Addr, PodEntry>(pins, "pods")?.get(&to)?;
    maps.pods.borrow_mut().extend(pod.map(|pod| (to, pod)));
    let nodes = hash::<Addr, NodeEntry>(pins, "nodes")?;
    for address in [outer.source, to] {
        maps.nodes.borrow_mut().extend(nodes.get(&address)?.map(|node| (address, node)));
    }
    prefixes(maps, pins, &[from, to])?;
    ownership(maps, pins, outer.egress_id)
}

/// What this node holds of a policy, and what is being handed over.
fn ownership(maps: &MemoryMaps, pins: &Pins, egress_id: u32) -> io::Result<()> {
    let owned = hash::<u32, Owned>(pins, "owned")?.get(&egress_id)?;
    if let Some(owned) = owned {
        maps.put_owned(egress_id, owned);
        if owned.is_shared() {
            let note = |port: &ExposedPort, _: &Exposure| {
                maps.exposed.borrow_mut().extend((port.address == owned.address).then_some((*port, 0)));
            };
            hash::<ExposedPort, Exposure>(pins, "exposed")?.for_each(note)?;
        }
    }
    let moving = hash::<u32, HandoverEntry>(pins, "handovers")?.get(&egress_id)?;
    maps.handovers.borrow_mut().extend(moving.map(|moving| (egress_id, moving)));
    Ok(())
}

/// With the configuration, the time and the lease.
fn empty(pins: &Pins) -> io::Result<MemoryMaps> {
    let maps = MemoryMaps::empty(config(pins)?);
    maps.now.set(now_ns()?);
    // The maps have one clock.
    let left = lease(pins)?.left_ns(boot_ns()?);
    let now = maps.now.get();
    maps.lease.set(Lease::bounded(now.saturating_add(left), now, 0));
    Ok(maps)
}

/// A lookup returns the value of the longest prefix but not the prefix, which is found by a walk.
fn prefixes(maps: &MemoryMaps, pins: &Pins, addresses: &[Addr]) -> io::Result<()> {
    let cluster = Trie::<Addr, ClusterPrefix>::new(MapData::from_pin(pins.map("cluster")).map_err(map_io)?);
    let cluster = cluster.map_err(map_io)?;
    for address in addresses {
        let Some(value) = cluster.get(&Key::new(128, *address))? else { continue };
        let number = |addr: &Addr| u128::from_be_bytes(addr.octets());
        let mut longest = (*address, 128);
        let mut bits = None;
        cluster.for_each(|key, _| {
            let (net, length) = (key.data(), key.prefix_len());
            let holds = (number(&net) ^ number(address)).leading_zeros() >= length;
            if holds && bits.is_none_or(|bits| length > bits) {
                (longest, bits) = ((net, length), Some(length));
            }
        })?;
        maps.prefixes.borrow_mut().push((longest.0, longest.1, value));
    }
    Ok(())
}

/// The addresses that the flow may get here.
fn addresses(maps: &MemoryMaps, headers: &Headers, egress_id: Option<u32>) -> Vec<Addr> {
    let Some(egress_id) = egress_id else { return Vec::new() };
    let policies = maps.policies.borrow();
    let Some(policy) = policies.get(&PolicyEntryKey::new(egress_id, headers.family)) else { return Vec::new() };
    let slots = policy.slots.iter().take(policy.count() as usize);
    slots.filter(|slot| slot.place() == SlotPlace::Here).map(|slot| slot.address).collect()
}

fn config(pins: &Pins) -> io::Result<Config> {
    let data = MapData::from_pin(pins.map("config")).map_err(map_io)?;
    let config: Array<MapData, Config> = Array::try_from(Map::Array(data)).map_err(map_io)?;
    config.get(&0, 0).map_err(map_io)
}

fn lease(pins: &Pins) -> io::Result<Lease> {
    let data = MapData::from_pin(pins.map("lease")).map_err(map_io)?;
    let lease: Array<MapData, Lease> = Array::try_from(Map::Array(data)).map_err(map_io)?;
    lease.get(&0, 0).map_err(map_io)
}

fn hash<K: aya::Pod, V: aya::Pod>(pins: &Pins, name: &str) -> io::Result<Hash<K, V>> {
    Hash::new(MapData::from_pin(pins.map(name)).map_err(map_io)?).map_err(map_io)
}

/// Free entries of the map, up to the number that matters; visits every entry.
fn free<V: aya::Pod>(map: &Hash<Tuple, V>, mut visit: impl FnMut(&Tuple, &V)) -> io::Result<u32> {
    let mut count = 0_u32;
    map.for_each(|key, value| {
        count = count.saturating_add(1);
        visit(key, value);
    })?;
    Ok(map.limit().saturating_sub(count).min(MAX_FREE))
}
