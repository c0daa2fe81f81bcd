//! Seals: checksums that tell whether a copied map element is whole, and of the key that was looked up.
//!
//! A program that has looked up an element holds its address, and no lock. When the element is removed, the kernel may give
//! its memory to another key of the same map at once: `bpf_mem_alloc` waits for running programs only before it returns
//! memory to the system, and a preallocated map not even then. The new key and value are copied in by `memcpy` in any order,
//! then the element is linked. So a program may read the old value, the new one, or words of both.
//!
//! Neither a second comparison of the key nor a sequence number that is read last is enough on every processor. So an
//! element has a checksum of its key and all its constant words. A program copies the words, computes the checksum of
//! the requested key and *the copy*, and only then uses the copy. No order of reads and writes matters: a valid copy
//! was once written for this key as a whole, except for one mix in 2^32, which needs a race of nanoseconds to provoke.

use super::{Addr, Tuple};

/// A sum of words, each multiplied by its own odd number, so that the order of words matters. The upper half is the
/// seal.
#[derive(Clone, Copy)]
pub(super) struct Seal(u64);

/// The factor of a position: SplitMix64.
#[inline(always)]
const fn factor(place: u64) -> u64 {
    let z = (place + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    (z ^ z >> 31) | 1
}

/// The factor of an element's other tuple.
const OTHER: u64 = factor(63);

/// Out of line, because inlined copies would use much stack.
#[inline(never)]
const fn sum_of(tuple: &Tuple) -> u64 {
    let [ports, rest] = tuple.last_words();
    Seal(0).addr(0, &tuple.saddr).addr(4, &tuple.daddr).word(8, ports).word(9, rest).0
}

impl Seal {
    /// Of a key; its words have the positions zero to nine.
    #[inline(always)]
    pub(super) const fn of_tuple(key: &Tuple) -> Self {
        Self(sum_of(key))
    }

    #[inline(always)]
    pub(super) const fn of_number(key: u32) -> Self {
        Self(0).word(0, key)
    }

    #[inline(always)]
    pub(super) const fn word(self, place: u64, word: u32) -> Self {
        Self(self.0.wrapping_add((word as u64).wrapping_mul(factor(place))))
    }

    /// Uses four positions.
    #[inline(always)]
    pub(super) const fn addr(self, place: u64, addr: &Addr) -> Self {
        let [a, b, c, d] = addr.words();
        self.word(place, a).word(place + 1, b).word(place + 2, c).word(place + 3, d)
    }

    /// Uses its own positions.
    #[inline(always)]
    pub(super) const fn other_tuple(self, tuple: &Tuple) -> Self {
        Self(self.0.wrapping_add(sum_of(tuple).wrapping_mul(OTHER)))
    }

    #[inline(always)]
    pub(super) const fn done(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

#[cfg(test)]
mod tests;
