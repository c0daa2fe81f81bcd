//! Maps `blocks` and `pod_blocks`: ports of an egress IP that one pod has for itself (RFC 6888 section 5, bulk allocation).
//!
//! A block is claimed by insert-if-absent, and then listed with its pod, by compare-and-swap. What a list says counts only
//! while the block itself has this pod and is open. So a list may be lost, or name blocks of others, without harm. A block is
//! closed by the agent, or by the program whose list has changed in between. Only the agent removes one, once no NAT entry has a
//! port of it.

use super::seal::Seal;
use super::{Addr, PortRange, abi};

/// Blocks that a pod can have on one egress IP.
pub const MOST_BLOCKS: usize = 4;

/// Key of `blocks`: an egress IP, and the first port of the block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct PortBlock {
    pub address: Addr,
    first: [u8; 2],
    reserved: [u8; 2],
}
abi!(PortBlock, 20);

impl PortBlock {
    #[inline(always)]
    pub const fn new(address: Addr, first: u16) -> Self {
        Self { address, first: first.to_be_bytes(), reserved: [0; 2] }
    }

    #[inline(always)]
    pub const fn first(&self) -> u16 {
        u16::from_be_bytes(self.first)
    }

    #[inline(always)]
    pub const fn set_first(&mut self, first: u16) {
        self.first = first.to_be_bytes();
    }
}

/// Value of `blocks`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct BlockOwner {
    pub pod: Addr,
    /// Tunnel endpoint of the pod's node; unspecified for this node.
    pub source_node: Addr,
    /// CLOCK_MONOTONIC (ns) when it was given.
    pub given_ns: u64,
    /// Of the policy by which the pod had it first.
    pub egress_id: u32,
    /// Number of ports.
    pub size: u16,
    closed: u16,
    /// Over the key and the whole value.
    pub seal: u32,
    pub reserved: u32,
}
abi!(BlockOwner, 56);

impl BlockOwner {
    /// An open block, not sealed yet.
    #[inline(always)]
    pub const fn new(pod: Addr, source_node: Addr, egress_id: u32, size: u16, given_ns: u64) -> Self {
        Self { pod, source_node, given_ns, egress_id, size, closed: 0, seal: 0, reserved: 0 }
    }

    /// The same without new ports.
    #[must_use]
    pub const fn closed(mut self, at: &PortBlock) -> Self {
        self.closed = 1;
        self.seal(at);
        self
    }

    #[inline(always)]
    pub const fn is_open(&self) -> bool {
        self.closed == 0
    }

    /// As it is written at this key.
    #[inline(always)]
    pub const fn seal(&mut self, at: &PortBlock) {
        self.seal = self.seal_at(at);
    }

    /// Whether this is a complete value of the key. Called on a copy; see `abi::seal`.
    #[inline(always)]
    pub const fn is_of(&self, at: &PortBlock) -> bool {
        self.seal == self.seal_at(at)
    }

    #[inline(always)]
    const fn seal_at(&self, at: &PortBlock) -> u32 {
        Seal::of_number(at.first() as u32)
            .addr(1, &at.address)
            .addr(5, &self.pod)
            .addr(9, &self.source_node)
            .word(13, self.given_ns as u32)
            .word(14, (self.given_ns >> 32) as u32)
            .word(15, self.egress_id)
            .word(16, self.size as u32 | (self.closed as u32) << 16)
            .done()
    }

    /// The ports, for a block at this key.
    #[inline(always)]
    pub const fn ports(&self, at: &PortBlock) -> PortRange {
        PortRange { first: at.first(), last: at.first().saturating_add(self.size.saturating_sub(1)) }
    }
}

/// Key of `pod_blocks`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct BlockHolder {
    pub address: Addr,
    pub pod: Addr,
}
abi!(BlockHolder, 32);

/// Value of `pod_blocks`: the first ports of up to [`MOST_BLOCKS`] blocks, each in 16 bits; zero: none. One number, because
/// it changes by compare-and-swap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct HeldBlocks(pub u64);
abi!(HeldBlocks, 8);

impl HeldBlocks {
    /// The first port of the block in this place.
    #[inline(always)]
    pub const fn at(self, place: usize) -> Option<u16> {
        match (self.0 >> (place * 16)) as u16 {
            0 => None,
            first => Some(first),
        }
    }

    /// The same with this block in front. For a list that is not full: it would lose its last block.
    #[inline(always)]
    #[must_use]
    pub const fn before(self, first: u16) -> Self {
        Self(self.0 << 16 | first as u64)
    }

    /// Number of blocks, of a list without gaps.
    #[inline(always)]
    pub const fn count(self) -> u32 {
        (u64::BITS - self.0.leading_zeros()).div_ceil(16)
    }

    #[inline(always)]
    pub const fn is_full(self) -> bool {
        self.at(MOST_BLOCKS - 1).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_has_four_places() {
        let mut held = HeldBlocks::default();
        for (at, first) in [(1, 1024), (2, 65_472), (3, 2048), (4, 4096)] {
            assert!(!held.is_full());
            held = held.before(first);
            assert_eq!(held.count(), at);
        }
        assert!(held.is_full());
        assert_eq!([0, 1, 2, 3].map(|place| held.at(place)), [4096, 2048, 65_472, 1024].map(Some));
        assert_eq!(HeldBlocks::default().count(), 0);
    }

    #[test]
    fn a_seal_covers_key_and_value() {
        let at = PortBlock::new(Addr::v4([172, 18, 0, 100]), 1024);
        let mut owner = BlockOwner::new(Addr::v4([10, 244, 1, 10]), Addr::v4([172, 18, 0, 3]), 7, 64, 1 << 40);
        owner.seal(&at);
        assert!(owner.is_of(&at) && owner.is_open());
        assert_eq!(owner.ports(&at), PortRange { first: 1024, last: 1087 });
        assert!(!owner.is_of(&PortBlock::new(at.address, 1088)) && !owner.is_of(&PortBlock::new(owner.pod, 1024)));
        for changed in [
            BlockOwner { pod: at.address, ..owner },
            BlockOwner { source_node: at.address, ..owner },
            BlockOwner { given_ns: 1, ..owner },
            BlockOwner { egress_id: 8, ..owner },
            BlockOwner { size: 128, ..owner },
            BlockOwner { closed: 1, ..owner },
        ] {
            assert!(!changed.is_of(&at), "{changed:?}");
        }
        let closed = owner.closed(&at);
        assert!(closed.is_of(&at) && !closed.is_open());
    }
}
