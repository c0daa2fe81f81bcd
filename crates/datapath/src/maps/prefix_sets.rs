//! Maps of prefixes in numbered sets: `destinations`, with a set for each policy whose addresses lie in several networks, and
//! `classes`, with one for each class of pods.
//!
//! A set is written under a new number before another entry names it, and removed after none does. So programs see a set
//! whole, or not at all.

use std::collections::{BTreeMap, BTreeSet};
use std::io;

use aya::{Ebpf, Pod};
use egress_common::abi::PolicyDestination;
use ipnet::IpNet;

use crate::error::StartError;
use crate::maps::convert;
use crate::maps::handles::Trie;

/// The map, and what is known to be in it.
pub struct PrefixSets<V: Pod> {
    map: Trie<PolicyDestination, V>,
    sets: BTreeMap<u32, BTreeSet<IpNet>>,
    /// The last number given. None is given again soon, since another entry, or a program's copy of it, may still name a
    /// removed set.
    last: u32,
}

impl<V: Pod> PrefixSets<V> {
    pub fn take(ebpf: &mut Ebpf, name: &'static str) -> Result<Self, StartError> {
        let mut sets = Self { map: Trie::take(ebpf, name)?, sets: BTreeMap::new(), last: 0 };
        // Of an earlier run: their numbers are not free.
        sets.read().map_err(|error| StartError::Object(format!("read map {name}: {error}")))?;
        sets.last = sets.sets.last_key_value().map_or(0, |(last, _)| *last);
        Ok(sets)
    }

    pub fn limit(&self) -> u32 {
        self.map.limit()
    }

    /// All sets, as they are in the kernel.
    pub fn read(&mut self) -> io::Result<BTreeMap<u32, BTreeMap<IpNet, V>>> {
        let mut found = BTreeMap::<u32, BTreeMap<IpNet, V>>::new();
        self.map.for_each(|key, value| {
            if let Some(net) = convert::destination_net(key) {
                found.entry(key.data().set).or_default().insert(net, *value);
            }
        })?;
        self.sets = found.iter().map(|(set, entries)| (*set, entries.keys().copied().collect())).collect();
        Ok(found)
    }

    /// Removes sets that are not used: the agent has ended in the middle of a change.
    pub fn retain(&mut self, used: &BTreeSet<u32>) -> io::Result<()> {
        let unused: Vec<u32> = self.sets.keys().filter(|set| !used.contains(set)).copied().collect();
        unused.into_iter().try_for_each(|set| self.remove(set))
    }

    /// Writes a new set, and returns its number; zero for no entries. After a failure nothing of it is left.
    pub fn put_new(&mut self, entries: &BTreeMap<IpNet, V>) -> io::Result<u32> {
        if entries.is_empty() {
            return Ok(0);
        }
        let after = (self.last.wrapping_add(1)..=u32::MAX).chain(1..=u32::MAX);
        let mut free = after.filter(|set| *set != 0 && !self.sets.contains_key(set));
        // The map has fewer entries than there are numbers.
        let set = free.next().ok_or(io::ErrorKind::StorageFull)?;
        self.last = set;
        self.put(set, entries)?;
        Ok(set)
    }

    /// Writes the set of this number, which nothing names yet. After a failure nothing of it is left.
    pub fn put(&mut self, set: u32, entries: &BTreeMap<IpNet, V>) -> io::Result<()> {
        if self.sets.contains_key(&set) {
            self.remove(set)?;
        }
        for (net, value) in entries {
            if let Err(error) = self.map.put(&convert::destination_key(set, net), value) {
                // The error of the write is the cause; what cannot be removed either is removed at the next start.
                let _left = self.remove(set);
                return Err(error);
            }
            self.sets.entry(set).or_default().insert(*net);
        }
        Ok(())
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
