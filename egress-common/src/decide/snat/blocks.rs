//! Port blocks: with [`Config::port_block`](crate::abi::Config::port_block), a flow gets a port of a block that its pod has for
//! itself on the egress IP. So one look at the map `blocks` tells whose packet an address and a port were, whatever its
//! destination, and a pod that uses up its ports uses up no other's.
//!
//! A pod gets a block with its first flow, and another one when all ports of its blocks towards one destination are taken,
//! [`MOST_BLOCKS`] at most. The search for a free block begins at a place that depends on the pod, so that it usually gets
//! the same block on another node.

use super::{PortSearch, SnatSource, Tables};
use crate::abi::{BlockHolder, BlockOwner, Direction, HeldBlocks, MOST_BLOCKS, Origin, PortBlock, PortRange, Tuple};
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

    /// The numbers of the pool's whole blocks, in the order in which they are tried.
    #[inline(always)]
    pub fn walk(&self) -> PortSearch {
        let PortRange { first, last } = self.pool.ports;
        let blocks = (last as u32 + 1 - first as u32).checked_div(self.size as u32).unwrap_or(0);
        let [a, b, c, d] = self.forward.saddr.words();
        // Neighbouring addresses differ in few bits, and the upper bits of a product depend on all bits of the factor.
        let product = (a ^ b ^ c ^ d).rotate_left(16).wrapping_mul(0x9e37_79b1);
        let begin = (product ^ product >> 15).wrapping_mul(0x9e37_79b1) >> 16;
        PortSearch::over(HeldBlocks::default(), 0, blocks, begin)
    }

    /// First port of the `index`-th block of the walk.
    #[inline(always)]
    pub const fn block(&self, walk: &PortSearch, index: u32) -> u16 {
        self.pool.ports.first + walk.at(index) * self.size
    }
}

// The steps are out of line, take what a request consists of, and read the list again: the frames of a call chain together
// must fit into the programs' stack.

/// The blocks of the pod's list that are open and the pod's.
#[inline(never)]
pub fn own_blocks<T: Tables>(forward: &Tuple, tables: &T, pool: &SnatSource) -> HeldBlocks {
    let holder = BlockHolder { address: pool.address, pod: forward.saddr };
    own_among(tables.held_blocks(&holder), &holder, tables)
}

#[inline(always)]
fn own_among<T: Tables>(held: HeldBlocks, holder: &BlockHolder, tables: &T) -> HeldBlocks {
    let (mut own, size) = (HeldBlocks::default(), tables.port_block());
    for place in 0..MOST_BLOCKS {
        if let Some(first) = held.at(place)
            && tables.is_block_of(holder, first, size)
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

/// Gives the pod, which has the blocks `own`, another one, whose first port it returns. It is free again if another CPU has
/// given the pod one in between. A failed search holds for a while, as that for a port does, since it has visited every
/// block.
#[inline(always)]
pub fn give_block<T: Tables>(
    forward: &Tuple,
    tables: &T,
    pool: &SnatSource,
    owner: &NatOwner,
    own: HeldBlocks,
) -> PortClaim {
    if own.is_full() || has_failed(forward, tables, pool) {
        return PortClaim::NoneFree;
    }
    let claim = claim_block(forward, tables, pool, owner);
    match claim {
        PortClaim::Claimed(first) => {
            if !list_block(forward, tables, pool, own, first) {
                forget_block(tables, pool, first);
            }
        }
        PortClaim::NoneFree => note_failed(forward, tables, pool),
        PortClaim::Full => {}
    }
    claim
}

#[inline(never)]
fn claim_block<T: Tables>(forward: &Tuple, tables: &T, pool: &SnatSource, owner: &NatOwner) -> PortClaim {
    let request = BlockRequest { forward, pool, owner, size: tables.port_block() };
    tables.claim_any_block(&request, &request.walk())
}

/// Puts the block on the pod's list, and takes others' off. False if the pod has other blocks than `own` by now.
#[inline(never)]
fn list_block<T: Tables>(forward: &Tuple, tables: &T, pool: &SnatSource, own: HeldBlocks, first: u16) -> bool {
    let holder = BlockHolder { address: pool.address, pod: forward.saddr };
    let held = tables.held_blocks(&holder);
    own_among(held, &holder, tables) == own && tables.hold_block(&holder, held, own.before(first))
}

#[inline(never)]
fn forget_block<T: Tables>(tables: &T, pool: &SnatSource, first: u16) {
    tables.forget_block(&PortBlock::new(pool.address, first));
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
