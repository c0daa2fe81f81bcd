//! The map `destinations`: which addresses of a policy have a route to a destination, where its addresses lie in several
//! networks.

use super::{Addr, MAX_SLOTS, abi};

/// Data of the key of `destinations` and `classes`, tries of prefixes: the set as it is, and the destination. The length of a
/// prefix is 32 more than that of `cluster`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct PolicyDestination {
    /// [`PolicyEntry::destinations`](super::PolicyEntry::destinations), or [`PodEntry::class`](super::PodEntry::class). The
    /// entries of a set never change.
    pub set: u32,
    pub to: Addr,
}
abi!(PolicyDestination, 20);

/// Value of `destinations`: the slots whose interface has this prefix as its most specific route to the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Candidates {
    /// Slots with a gateway; new flows go there.
    count: u32,
    /// Slots after those: addresses that no node serves now.
    pending: u32,
    pub slots: [u8; MAX_SLOTS],
}
abi!(Candidates, 8 + MAX_SLOTS);

impl Candidates {
    /// By indices of the policy's slots. `None` when there are more than [`MAX_SLOTS`] in all.
    pub fn new(served: &[u8], pending: &[u8]) -> Option<Self> {
        let mut slots = [0; MAX_SLOTS];
        let all = served.iter().chain(pending);
        slots.get_mut(..served.len() + pending.len())?.iter_mut().zip(all).for_each(|(slot, index)| *slot = *index);
        Some(Self { count: u32::try_from(served.len()).ok()?, pending: u32::try_from(pending.len()).ok()?, slots })
    }

    #[inline(always)]
    pub const fn count(&self) -> u32 {
        self.count
    }

    /// All of them, served and pending.
    pub fn all(&self) -> impl Iterator<Item = u8> {
        self.slots.iter().copied().take(self.count.saturating_add(self.pending) as usize)
    }
}
