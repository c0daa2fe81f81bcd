//! Random numbers from a seed, so that a failed test can be repeated: xorshift64* (Vigna 2016).

use std::vec::Vec;

pub struct Random(u64);

impl Random {
    /// Adjacent seeds begin with different numbers.
    pub fn new(seed: u64) -> Self {
        // The sequence of zero is zeros.
        Self(seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15).max(1))
    }

    /// From 0, below `bound`.
    pub fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % bound
    }

    /// True once in `n` times.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub fn one_of<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.below(items.len())]
    }

    /// The values in random order.
    pub fn shuffled<T>(&mut self, values: impl IntoIterator<Item = T>) -> Vec<T> {
        let mut values: Vec<T> = values.into_iter().collect();
        for at in (1..values.len()).rev() {
            values.swap(at, self.below(at + 1));
        }
        values
    }
}
