//! Map `handovers`: addresses that are being handed over between this node and another one.
//!
//! The old node hands over in one step: it takes the address out of `owned` when its entry stands here, and from then on
//! passes on to the heir what it is sent for it. The heir has its entry before that, and translates what the old node
//! passes on; when it has heard that the old node emits nothing any more it translates for every node, and some time later
//! it answers for the address. The entries go some seconds later.
//!
//! Both have mappings of the address then, and one port may be in both. Answers that come in at either are the heir's where
//! the flow has been sent by it since the hand-over began, and else the old node's.

use super::seal::Seal;
use super::{Addr, Owned, abi};

/// What the hand-over is for this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum HandoverStage {
    /// The other node has it, or will in a moment.
    Leaving = 1,
    /// The other node may have it still.
    Arriving = 2,
    /// The other node emits nothing for it any more.
    Open = 3,
}

/// Value of `handovers`; the key is the egress ID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct HandoverEntry {
    stage: u32,
    /// Of the key, the stage, the time and the other node; `owned` has a seal of its own.
    pub seal: u32,
    /// CLOCK_MONOTONIC (ns) since when flows may have begun at the heir, a moment early.
    pub since_ns: u64,
    /// Tunnel endpoint of the other node.
    pub peer: Addr,
    /// The address, as this node owned it or is to own it.
    pub owned: Owned,
}
abi!(HandoverEntry, 16 + 16 + 32);

impl HandoverEntry {
    /// As it is written at `egress_id`.
    pub const fn new(egress_id: u32, stage: HandoverStage, since_ns: u64, peer: Addr, owned: Owned) -> Self {
        let handover = Self { stage: stage as u32, seal: 0, since_ns, peer, owned };
        Self { seal: handover.seal_at(egress_id), ..handover }
    }

    /// Whether this was written, as a whole, at `egress_id`. Asked of a copy; see `abi::seal`.
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
