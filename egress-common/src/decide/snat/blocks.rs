//! Port blocks: with [`Config::port_block`](crate::abi::Config::port_block), a flow gets a port of a block that its pod has for
//! itself on the egress IP. So one look at the map `blocks` tells whose packet an address and a port were, whatever its
//! destination, and a pod that uses up its ports uses up no other's.
//!
//! A pod gets a block with its first flow, and another one when all ports of its blocks towards one destination are taken,
//! [`MOST_BLOCKS`] at most. The search for a free block begins at a place that depends on the pod, so that it usually gets
//! the same block on another node.

use super::{PortSearch, SnatSource, Tables};
use crate::abi::{BlockHolder, BlockOwner, Direction, HeldBlocks, MOST_BLOCKS, Origin, PortBlock, Tuple};
use crate::decide::{NatOwner, PortClaim};

/// Whether a flow's port is one of its pod's blocks. Pods' traffic to other nodes, by the mark 1008, has no blocks.
#[inline(always)]
pub fn are_used<T: Tables>(tables: &T, owner: &NatOwner) -> bool {
    owner.origin != Origin::Stack && tables.port_block() != 0
}

/// A search for a block.
#[derive(Clone, Copy)]
pub struct BlockRequest<'a> {
    pub forward: &'a Tuple,
    pub pool: &'a SnatSource,
    pub owner: &'a NatOwner,
    /// Ports of a block.
    pub size: u16,
}

impl BlockRequest<'_> {
    /// Not sealed yet.
    #[inline(always)]
    pub const fn new_owner(&self, now_ns: u64) -> BlockOwner {
        let Self { forward, owner, size, .. } = *self;
        BlockOwner::new(forward.saddr, owner.source_node, owner.egress_id, size, now_ns)
    }

    /// Numbers of the pool's whole blocks, in the order in which they are tried.
    #[inline(always)]
    pub fn walk(&self) -> PortSearch {
        let end = (self.pool.ports.last as u32 + 1).checked_div(self.size as u32).unwrap_or(0);
        let blocks = end.saturating_sub(self.first_number());
        let [a, b, c, d] = self.forward.saddr.words();
        // Neighbouring addresses differ in few bits, and the upper bits of a product depend on all bits of the factor.
        let product = (a ^ b ^ c ^ d).rotate_left(16).wrapping_mul(0x9e37_79b1);
        let begin = (product ^ (product >> 15)).wrapping_mul(0x9e37_79b1) >> 16;
        PortSearch::over(HeldBlocks::default(), 0, blocks, begin)
    }

    /// First port of the `index`-th block of the walk.
    #[inline(always)]
    pub const fn block(&self, walk: &PortSearch, index: u32) -> u16 {
        (self.first_number() as u16).wrapping_add(walk.at(index)).wrapping_mul(self.size)
    }

    /// Blocks begin at multiples of their size, so that those of another range do not overlap.
    #[inline(always)]
    const fn first_number(&self) -> u32 {
        match self.size {
            0 => 0,
            size => (self.pool.ports.first as u32).div_ceil(size as u32),
        }
    }
}

// The steps are out of line, and take what a request consists of: the frames of a call chain together must fit into the
// programs' stack.

/// The pod's list.
#[inline(never)]
pub fn held_blocks<T: Tables>(forward: &Tuple, tables: &T, pool: &SnatSource) -> HeldBlocks {
    tables.held_blocks(&BlockHolder { address: pool.address, pod: forward.saddr })
}

/// The blocks of this list that are open, the pod's, and in the pool: the host may have taken ports since they were given.
#[inline(never)]
pub fn own_blocks<T: Tables>(forward: &Tuple, tables: &T, pool: &SnatSource, held: HeldBlocks) -> HeldBlocks {
    let holder = BlockHolder { address: pool.address, pod: forward.saddr };
    let (mut own, size) = (HeldBlocks::default(), tables.port_block());
    for place in 0..MOST_BLOCKS {
        if let Some(first) = held.at(place)
            && first >= pool.ports.first
            && first.saturating_add(size - 1) <= pool.ports.last
            && tables.is_block_of(&holder, first, size)
        {
            own = own.before(first);
        }
    }
    own
}

/// Claims the reverse key with a port of these blocks of the pod.
#[inline(never)]
pub fn find_port<T: Tables>(
    forward: &Tuple,
    tables: &T,
    pool: &SnatSource,
    owner: &NatOwner,
    own: HeldBlocks,
) -> PortClaim {
    let search = PortSearch::of_blocks(own, tables.port_block(), tables.random());
    tables.claim_any_port(forward, &pool.address, owner, &search)
}

/// Gives the pod, whose list is `held` and has the blocks `own`, another one, whose first port it returns. If another CPU has
/// changed the list in between, the block is closed, for the agent to take back: that CPU's packet may have found it by an old
/// list and have a port of it. A failed search holds for a while, as that for a port does, since it has visited every block.
#[inline(always)]
pub fn give_block<T: Tables>(
    forward: &Tuple,
    tables: &T,
    pool: &SnatSource,
    owner: &NatOwner,
    (held, own): (HeldBlocks, HeldBlocks),
) -> PortClaim {
    if own.is_full() || has_failed(forward, tables, pool) {
        return PortClaim::NoneFree;
    }
    let claim = claim_block(forward, tables, pool, owner);
    match claim {
        PortClaim::Claimed(first) => {
            if !list_block(forward, tables, pool, held, own.before(first)) {
                close_block(tables, pool, first);
            }
        }
        PortClaim::NoneFree | PortClaim::Full => note_failed(forward, tables, pool),
    }
    claim
}

#[inline(never)]
fn claim_block<T: Tables>(forward: &Tuple, tables: &T, pool: &SnatSource, owner: &NatOwner) -> PortClaim {
    let request = BlockRequest { forward, pool, owner, size: tables.port_block() };
    tables.claim_any_block(&request, &request.walk())
}

#[inline(never)]
fn list_block<T: Tables>(forward: &Tuple, tables: &T, pool: &SnatSource, held: HeldBlocks, with: HeldBlocks) -> bool {
    tables.hold_block(&BlockHolder { address: pool.address, pod: forward.saddr }, held, with)
}

#[inline(never)]
fn close_block<T: Tables>(tables: &T, pool: &SnatSource, first: u16) {
    tables.close_block(&PortBlock::new(pool.address, first));
}

#[inline(always)]
fn failed_key(forward: &Tuple, pool: &SnatSource) -> Tuple {
    Tuple::new(Direction::Ingress, pool.address, forward.saddr, 0, 0, 0)
}

#[inline(never)]
fn has_failed<T: Tables>(forward: &Tuple, tables: &T, pool: &SnatSource) -> bool {
    tables.is_exhausted(&failed_key(forward, pool))
}

#[inline(never)]
fn note_failed<T: Tables>(forward: &Tuple, tables: &T, pool: &SnatSource) {
    tables.note_exhausted(&failed_key(forward, pool));
}

#[cfg(test)]
mod tests;
