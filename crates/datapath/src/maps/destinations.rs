//! The map `destinations`, in sets: one for each policy whose addresses lie in several networks.
//!
//! A set is written under a new number before the policy's entry names it, and removed after no entry does. So programs see the
//! addresses of a policy together with the destinations that belong to them.

use std::collections::{BTreeMap, BTreeSet};
use std::io;

use aya::Ebpf;
use aya::maps::lpm_trie::Key;
use egress_common::abi::{Candidates, PolicyDestination};
use ipnet::IpNet;

use crate::error::StartError;
use crate::maps::convert;
use crate::maps::handles::Trie;

/// The map, and what is known to be in it.
pub struct DestinationSets {
    map: Trie<PolicyDestination, Candidates>,
    sets: BTreeMap<u32, BTreeSet<IpNet>>,
    /// The last number given. None is given again soon, since an entry of `policy`, or a program's copy of it, may still name
    /// a removed set.
    last: u32,
}

impl DestinationSets {
    pub fn take(ebpf: &mut Ebpf) -> Result<Self, StartError> {
        let mut sets = BTreeMap::<u32, BTreeSet<IpNet>>::new();
        let map = Trie::take(ebpf, "destinations")?;
        // Of an earlier run: their numbers are not free.
        map.for_each(|key: &Key<PolicyDestination>, _: &Candidates| {
            sets.entry(key.data().set).or_default().extend(convert::destination_net(key));
        })
        .map_err(|error| StartError::Object(format!("read map destinations: {error}")))?;
        let last = sets.last_key_value().map_or(0, |(last, _)| *last);
        Ok(Self { map, sets, last })
    }

    pub fn limit(&self) -> u32 {
        self.map.limit()
    }

    /// Reads the map, and removes sets that none of these entries names: the agent has ended in the middle of a change.
    pub fn read(&mut self, used: &BTreeSet<u32>) -> io::Result<BTreeMap<u32, BTreeMap<IpNet, Candidates>>> {
        let mut found = BTreeMap::<u32, BTreeMap<IpNet, Candidates>>::new();
        self.map.for_each(|key, candidates| {
            if let Some(net) = convert::destination_net(key) {
                found.entry(key.data().set).or_default().insert(net, *candidates);
            }
        })?;
        self.sets = found.iter().map(|(set, entries)| (*set, entries.keys().copied().collect())).collect();
        for set in found.keys().filter(|set| !used.contains(set)) {
            self.remove(*set)?;
        }
        found.retain(|set, _| used.contains(set));
        Ok(found)
    }

    /// Writes a new set, and returns its number; zero for no entries. After a failure nothing of it is left.
    pub fn put(&mut self, entries: &BTreeMap<IpNet, Candidates>) -> io::Result<u32> {
        if entries.is_empty() {
            return Ok(0);
        }
        let after = (self.last.wrapping_add(1)..=u32::MAX).chain(1..=u32::MAX);
        let mut free = after.filter(|set| *set != 0 && !self.sets.contains_key(set));
        // The map has fewer entries than there are numbers.
        let set = free.next().ok_or(io::ErrorKind::StorageFull)?;
        self.last = set;
        for (net, candidates) in entries {
            if let Err(error) = self.map.put(&convert::destination_key(set, net), candidates) {
                // The error of the write is the cause; what cannot be removed either is removed at the next start.
                let _left = self.remove(set);
                return Err(error);
            }
            self.sets.entry(set).or_default().insert(*net);
        }
        Ok(set)
    }

    /// A set that is not there counts as removed.
    pub fn remove(&mut self, set: u32) -> io::Result<()> {
        for net in self.sets.get(&set).into_iter().flatten() {
            self.map.remove(&convert::destination_key(set, net))?;
        }
        self.sets.remove(&set);
        Ok(())
    }
}
