//! Port blocks in user space: which are given, and taking back those that no NAT entry uses.
//!
//! The programs give blocks. A pass over `nat` finds those in use. A block without entries of its pod in two passes in a row is
//! closed: no packet gets a port of it from then on. If the next whole pass finds no entry either, it is removed and may
//! belong to another pod. So a block is free three passes after its last entry has been removed.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;

use egress_common::abi::{
    Addr, BlockHolder, BlockOwner, Direction, HeldBlocks, MOST_BLOCKS, NatEntry, PortBlock, Tuple,
};

use crate::maps::handles::Hash;

/// Passes without an entry after which a block is closed.
const UNUSED_PASSES: u32 = 2;

/// The blocks of this node.
pub struct PortBlocks {
    blocks: Hash<PortBlock, BlockOwner>,
    lists: Hash<BlockHolder, HeldBlocks>,
    known: HashMap<PortBlock, KnownBlock>,
    /// Sizes of the known blocks, by address and first port.
    sizes: HashMap<Addr, BTreeMap<u16, u16>>,
    /// Those with entries that this pass has found.
    used: HashSet<PortBlock>,
}

/// A block that an earlier pass has seen.
struct KnownBlock {
    owner: BlockOwner,
    /// Passes in a row without an entry.
    unused: u32,
}

impl PortBlocks {
    pub fn new(blocks: Hash<PortBlock, BlockOwner>, lists: Hash<BlockHolder, HeldBlocks>) -> Self {
        Self { blocks, lists, known: HashMap::new(), sizes: HashMap::new(), used: HashSet::new() }
    }

    /// Before a pass over `nat`: a block that is given during the pass is not judged by it.
    pub fn begin_pass(&mut self) -> io::Result<()> {
        let mut seen = HashMap::new();
        self.blocks.for_each(|block, owner| {
            seen.insert(*block, *owner);
        })?;
        let mut before = std::mem::take(&mut self.known);
        self.sizes.clear();
        for (block, owner) in seen {
            let same = before.remove(&block).filter(|known| known.owner == owner);
            self.sizes.entry(block.address).or_default().insert(block.first(), owner.size);
            self.known.insert(block, same.unwrap_or(KnownBlock { owner, unused: 0 }));
        }
        self.used.clear();
        Ok(())
    }

    /// A key of `nat`; that of the answer has the address and port, and its value the pod. Entries from before the blocks may
    /// have ports of other pods' blocks.
    pub fn see(&mut self, key: &Tuple, nat_entry: &NatEntry) {
        if key.direction() != Direction::Ingress {
            return;
        }
        let Some(sizes) = self.sizes.get(&key.daddr) else { return };
        let last = sizes.range(..=key.dport()).next_back();
        if let Some((first, _)) = last.filter(|(first, size)| key.dport() - **first < **size) {
            let block = PortBlock::new(key.daddr, *first);
            if self.known.get(&block).is_some_and(|known| known.owner.pod == nat_entry.other.saddr) {
                self.used.insert(block);
            }
        }
    }

    /// After a pass over `nat`: closes and removes what it has found unused. Returns the number of removed blocks.
    pub fn end_pass(&mut self) -> io::Result<u32> {
        let mut removed = 0;
        for (block, known) in &mut self.known {
            known.unused = if self.used.contains(block) { 0 } else { known.unused.saturating_add(1) };
            if known.unused < UNUSED_PASSES {
                continue;
            }
            if known.owner.is_open() {
                let closed = known.owner.closed(block);
                self.blocks.put(block, &closed)?;
                *known = KnownBlock { owner: closed, unused: UNUSED_PASSES - 1 };
            } else {
                removed += u32::from(self.blocks.remove(block)?);
            }
        }
        self.forget_lists()?;
        Ok(removed)
    }

    /// Removes the lists of pods without blocks. A block that a pod gets right now is on no list then, and gives no ports: the pod
    /// gets another one with its next flow.
    fn forget_lists(&mut self) -> io::Result<()> {
        let (mut all, mut unused) = (Vec::new(), Vec::new());
        self.lists.for_each(|holder, held| all.push((*holder, *held)))?;
        for (holder, held) in all {
            let blocks = (0..MOST_BLOCKS).filter_map(|place| held.at(place));
            let mut owners = blocks.map(|first| self.blocks.get(&PortBlock::new(holder.address, first)));
            let has_one = owners.try_fold(false, |has, owner| {
                owner.map(|owner| has || owner.is_some_and(|owner| owner.pod == holder.pod))
            })?;
            if !has_one {
                unused.push(holder);
            }
        }
        unused.iter().try_for_each(|holder| self.lists.remove(holder).map(drop))
    }

    /// Forgets all blocks of another size: they would overlap with those to come. Flows keep their ports.
    pub fn forget_others(&mut self, size: u16) -> io::Result<()> {
        let mut others = Vec::new();
        self.blocks.for_each(|block, owner| {
            if owner.size != size {
                others.push(*block);
            }
        })?;
        others.iter().try_for_each(|block| self.blocks.remove(block).map(drop))
    }
}
