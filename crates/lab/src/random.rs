//! Random numbers from a seed, so that a run can be repeated: SplitMix64 (Steele, Lea, Flood 2014, figure 16).

const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

pub struct SplitMix64(u64);

impl SplitMix64 {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A sequence of its own for each round of a seed.
    pub fn of_round(seed: u64, round: usize) -> Self {
        Self(seed.wrapping_mul(STEP).wrapping_add(round as u64))
    }

    fn next(&mut self) -> u64 {
        let value = mixed(self.0);
        self.0 = self.0.wrapping_add(STEP);
        value
    }

    /// From 0, below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end.max(1)
    }

    /// An index of a list of this length.
    pub fn index(&mut self, length: usize) -> usize {
        usize::try_from(self.below(length as u64)).unwrap_or(0)
    }
}

/// The number that belongs to this one.
pub fn mixed(value: u64) -> u64 {
    let z = value.wrapping_add(STEP);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_its_own_sequence_below_the_end() {
        let numbers = |seed| {
            let mut random = SplitMix64::new(seed);
            (0..100).map(|_| random.below(10)).collect::<Vec<_>>()
        };
        assert_eq!(numbers(1), numbers(1));
        assert_ne!(numbers(1), numbers(2));
        assert!((0..10).all(|number| numbers(1).contains(&number)));
        assert!(numbers(1).iter().all(|number| *number < 10));
    }
}
