//! Port blocks in user space: which are given, and taking back those that no NAT entry uses.
//!
//! The programs give blocks. A pass over `nat` finds those in use. A block without entries in two passes in a row is closed:
//! no packet gets a port of it from then on. If the next whole pass finds no entry either, it is removed and may go to
//! another pod. So a block goes back two to three minutes after its last entry, and nothing uses it in between.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;

use egress_common::abi::{Addr, BlockHolder, BlockOwner, Direction, HeldBlocks, PortBlock, Tuple};

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

    /// A key of `nat`; that of the answer has the address and port.
    pub fn see(&mut self, key: &Tuple) {
        if key.direction() != Direction::Ingress {
            return;
        }
        let Some(sizes) = self.sizes.get(&key.daddr) else { return };
        let last = sizes.range(..=key.dport()).next_back();
        if let Some((first, _)) = last.filter(|(first, size)| key.dport() - **first < **size) {
            self.used.insert(PortBlock::new(key.daddr, *first));
        }
    }

    /// After a pass over `nat`: closes and removes what it has found unused. Returns the number of removed blocks.
    pub fn end_pass(&mut self) -> io::Result<u32> {
        let mut gone = Vec::new();
        for (block, known) in &mut self.known {
            known.unused = if self.used.contains(block) { 0 } else { known.unused.saturating_add(1) };
            if known.unused < UNUSED_PASSES {
                continue;
            }
            if known.owner.is_open() {
                let closed = known.owner.closed(block);
                self.blocks.put(block, &closed)?;
                *known = KnownBlock { owner: closed, unused: UNUSED_PASSES - 1 };
            } else if self.blocks.remove(block)? {
                gone.push((*block, known.owner));
            }
        }
        for (block, owner) in &gone {
            self.known.remove(block);
            self.forget_list(BlockHolder { address: block.address, pod: owner.pod })?;
        }
        u32::try_from(gone.len()).map_err(io::Error::other)
    }

    /// Removes the list of a pod without blocks. One that it gets right now is not on a list then, and gives no ports: the pod
    /// gets another one with its next flow.
    fn forget_list(&mut self, holder: BlockHolder) -> io::Result<()> {
        let Some(held) = self.lists.get(&holder)? else { return Ok(()) };
        for first in (0..egress_common::abi::MOST_BLOCKS).filter_map(|place| held.at(place)) {
            let owner = self.blocks.get(&PortBlock::new(holder.address, first))?;
            if owner.is_some_and(|owner| owner.pod == holder.pod) {
                return Ok(());
            }
        }
        self.lists.remove(&holder).map(drop)
    }
}
