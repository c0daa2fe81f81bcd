//! Owned addresses: the maps `owned` and `owned_addr`, and the Bloom filter in `config` that the programs check first.
//!
//! Actions write here, and so do a start and a change of the interfaces. Each change raises the decision number, since flows
//! cache decisions.

use std::io;

use egress_common::abi::{BloomFilter, HandoverEntry, Owned};
use tracing::warn;

use crate::announce;
use crate::clock::now_ns;
use crate::maps::convert;
use crate::maps::handles::NodeMaps;
use crate::node_state::State;
use egress_core::model::state::EgressId;

impl State {
    /// Adopts the entries of a former run, for the current interfaces.
    pub fn adopt_owned(&mut self) -> io::Result<()> {
        let adopted = self.repair_owned().and_then(|()| self.reclaim());
        self.raise_after(adopted)
    }

    /// Rewrites the entries for the current interfaces.
    pub fn move_owned(&mut self) -> io::Result<()> {
        let moved = self.reclaim();
        // A next hop that a program has cached in between has the former MTU.
        let raised = self.raise_route_generation();
        self.raise_after(moved.and(raised))
    }

    /// Whether an owned address is one of the host.
    pub fn uses_hosts_addresses(&self) -> io::Result<bool> {
        let mut uses = false;
        self.maps.owned.for_each(|_, entry| uses |= entry.is_hosts())?;
        Ok(uses)
    }

    /// Applies a change that must hold for every packet at once: no flow caches a decision during the write.
    pub(crate) fn with_decisions_suspended<T>(
        &mut self,
        change: impl FnOnce(&mut NodeMaps) -> io::Result<T>,
    ) -> io::Result<T> {
        let number = self.decisions.next(now_ns()?);
        self.write_decisions(0)?;
        let changed = change(&mut self.maps);
        // Where this fails the number stays zero until the next change raises it.
        self.write_decisions(number)?;
        changed
    }

    fn write_decisions(&mut self, decisions: u32) -> io::Result<()> {
        let mut config = self.config;
        config.decisions = decisions;
        self.write_config(config)
    }

    /// Raises the decision number, also after a change that was applied in part.
    fn raise_after(&mut self, done: io::Result<()>) -> io::Result<()> {
        let raised = self.raise_decisions();
        done.and(raised)
    }

    /// Repairs claims that a killed agent wrote in part: a claim is two entries. An `owned_addr` entry without owner is
    /// removed; an owned address without `owned_addr` entry gets one.
    fn repair_owned(&mut self) -> io::Result<()> {
        let (mut owned, mut answered) = (Vec::new(), Vec::new());
        self.maps.owned.for_each(|id, entry| owned.push((*id, *entry)))?;
        self.maps.owned_addr.for_each(|address, entry| answered.push((*address, *entry)))?;
        for (address, entry) in &answered {
            if owned.iter().any(|(id, owned)| *id == entry.egress_id && owned.address == *address) {
                continue;
            }
            warn!(address = %address.to_ip(), id = entry.egress_id, "half a claim of a former run removed");
            self.maps.owned_addr.remove(address)?;
            if entry.is_shared() {
                continue;
            }
            announce::remove_filter_at(entry.ifindex, address.to_ip());
        }
        for (id, entry) in owned {
            let answer = entry.by_address(id);
            // Also one that is not shared in the same way.
            if !answered.contains(&(entry.address, answer)) {
                self.maps.owned_addr.put(&entry.address, &answer)?;
            }
        }
        Ok(())
    }

    /// Joins multicast groups and, where the interface of an address changed, rewrites it, and announces it if its
    /// neighbours must know. A shared address is only rewritten. An address whose interface is gone keeps its entry, so that it
    /// is served by no other.
    fn reclaim(&mut self) -> io::Result<()> {
        let mut owned = Vec::new();
        self.maps.owned.for_each(|id, entry| owned.push((*id, *entry)))?;
        for (id, entry) in owned {
            let address = entry.address.to_ip();
            let shared_with = convert::shared_with(&entry);
            let Some(interface) = self.interface_of_owned(address, shared_with) else { continue };
            let owned = convert::owned(EgressId(id), address, interface, shared_with);
            if entry.is_shared() {
                if entry != owned {
                    self.write_owned(EgressId(id), owned)?;
                }
                continue;
            }
            self.claims.join(interface, address);
            if entry.ifindex != interface.index {
                announce::remove_filter_at(entry.ifindex, address);
            }
            if entry != owned {
                self.write_owned(EgressId(id), owned)?;
            }
            // Neighbours know no MTU.
            if (entry.ifindex, entry.mac) != (interface.index, interface.mac) {
                self.claims.announce(address);
            }
        }
        self.rewrite_handovers()
    }

    /// Addresses in hand-over use their current interfaces too.
    fn rewrite_handovers(&mut self) -> io::Result<()> {
        let mut all = Vec::new();
        self.maps.handovers.for_each(|id, entry| all.push((*id, *entry)))?;
        for (id, entry) in all {
            // An entry of another version: the next plan ends it.
            let Some(stage) = entry.stage() else { continue };
            let address = entry.owned.address.to_ip();
            let shared_with = convert::shared_with(&entry.owned);
            let Some(interface) = self.interface_of_owned(address, shared_with) else { continue };
            let owned = convert::owned(EgressId(id), address, interface, shared_with);
            if entry.owned != owned {
                let entry = HandoverEntry::new(id, stage, entry.since_ns, entry.peer, owned);
                self.maps.handovers.put(&id, &entry)?;
            }
        }
        Ok(())
    }

    /// Writes both entries or neither: `owned_addr` (replies, ARP) first, `owned` (translation) second.
    pub(crate) fn write_owned(&mut self, id: EgressId, owned: Owned) -> io::Result<()> {
        let key = owned.address;
        let before = self.maps.owned_addr.get(&key)?;
        self.write_owned_filter(self.config.owned.with(&key))?;
        self.maps.owned_addr.put(&key, &owned.by_address(id.0))?;
        let written = self.maps.owned.put(&id.0, &owned);
        if written.is_err() {
            match before {
                Some(before) => self.maps.owned_addr.put(&key, &before)?,
                None => drop(self.maps.owned_addr.remove(&key)?),
            }
        }
        written
    }

    /// Writes the Bloom filter: the programs look up `owned_addr` only for addresses in it.
    fn write_owned_filter(&mut self, owned: BloomFilter) -> io::Result<()> {
        let mut config = self.config;
        config.owned = owned;
        if config == self.config { Ok(()) } else { self.write_config(config) }
    }

    /// Rebuilds the filter after a removal.
    pub(crate) fn rebuild_owned_filter(&mut self) -> io::Result<()> {
        self.write_owned_filter(bloom_filter(&self.maps)?)
    }
}

/// The filter over both maps: a former run may have left either entry of a claim.
pub fn bloom_filter(maps: &NodeMaps) -> io::Result<BloomFilter> {
    let mut filter = BloomFilter::NONE;
    maps.owned_addr.for_each(|address, _| filter = filter.with(address))?;
    maps.owned.for_each(|_, owned| filter = filter.with(&owned.address))?;
    Ok(filter)
}
