//! Reproducible random numbers.

/// xorshift64*.
pub(crate) struct Numbers(u64);

impl Numbers {
    pub(crate) fn new(seed: u64) -> Self {
        Self((seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let high = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33;
        usize::try_from(high).expect("31 bits") % bound
    }

    /// The values in random order.
    pub(crate) fn shuffled<T>(&mut self, values: impl IntoIterator<Item = T>) -> Vec<T> {
        let mut values: Vec<T> = values.into_iter().collect();
        for i in (1..values.len()).rev() {
            values.swap(i, self.below(i + 1));
        }
        values
    }
}
