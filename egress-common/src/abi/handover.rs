//! Map `handovers`: addresses that are being handed over between this node and another one.
//!
//! 1. The new owner gets an entry. It translates what the old owner passes on.
//! 2. The old owner gets an entry and gives up the address in one step: it is removed from `owned`. From then on it passes
//!    on to the new owner what it receives for the address.
//! 3. Once the old owner has acknowledged that it emits nothing, the new owner translates for every node. Some time later
//!    it answers ARP and neighbour discovery for the address.
//! 4. The entries are removed seconds later.
//!
//! During a hand-over both have NAT entries of the address, and a port may be in both. A reply belongs to the new owner if
//! it has sent packets of the flow since the hand-over began, and to the old owner otherwise.

use super::seal::Seal;
use super::{Addr, Owned, abi};

/// Stage of the hand-over, seen from this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum HandoverStage {
    /// On the old owner: the other node owns the address, or will soon.
    Leaving = 1,
    /// On the new owner: the other node may still own the address.
    Arriving = 2,
    /// On the new owner: the other node no longer emits the address.
    Open = 3,
}

/// Value of `handovers`; the key is the egress ID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct HandoverEntry {
    stage: u32,
    /// Over the key, the stage, the time and the other node; `owned` has its own seal.
    pub seal: u32,
    /// CLOCK_MONOTONIC (ns), slightly before the first flows may begin at the new owner.
    pub since_ns: u64,
    /// Tunnel endpoint of the other node.
    pub peer: Addr,
    /// The address, as this node owned it or is to own it.
    pub owned: Owned,
    pub reserved: u32,
}
abi!(HandoverEntry, 16 + 16 + 36 + 4);

impl HandoverEntry {
    /// As it is written at `egress_id`.
    pub const fn new(egress_id: u32, stage: HandoverStage, since_ns: u64, peer: Addr, owned: Owned) -> Self {
        let handover = Self { stage: stage as u32, seal: 0, since_ns, peer, owned, reserved: 0 };
        Self { seal: handover.seal_at(egress_id), ..handover }
    }

    /// Whether this is a complete value of `egress_id`. Called on a copy; see `abi::seal`.
    #[inline(always)]
    pub const fn is_of(&self, egress_id: u32) -> bool {
        self.seal == self.seal_at(egress_id) && self.owned.is_of(egress_id)
    }

    #[inline(always)]
    const fn seal_at(&self, egress_id: u32) -> u32 {
        Seal::of_number(egress_id)
            .addr(1, &self.peer)
            .word(5, self.stage)
            .word(6, self.since_ns as u32)
            .word(7, (self.since_ns >> 32) as u32)
            .done()
    }

    /// `None` when another version wrote it.
    #[inline(always)]
    pub const fn stage(&self) -> Option<HandoverStage> {
        match self.stage {
            1 => Some(HandoverStage::Leaving),
            2 => Some(HandoverStage::Arriving),
            3 => Some(HandoverStage::Open),
            _ => None,
        }
    }
}
