//! How far behind the store a reader is, as behind the caches of several API servers: a watch tells of a change late, each watch by
//! another time, and a list that asks for any version (`resourceVersion=0`) is of the past. By a seed, so that a run can be had
//! again.

use std::ops::RangeInclusive;
use std::time::Duration;

use crate::random::mixed;

#[derive(Clone, Debug)]
pub(super) struct Lag {
    seed: u64,
    milliseconds: RangeInclusive<u64>,
}

impl Lag {
    pub(super) fn new(seed: u64, milliseconds: RangeInclusive<u64>) -> Self {
        Self { seed, milliseconds }
    }

    /// Of the reader with this number, the same each time.
    pub(super) fn of(&self, reader: u64) -> Duration {
        let (first, last) = (*self.milliseconds.start(), *self.milliseconds.end());
        Duration::from_millis(first + mixed(self.seed ^ mixed(reader)) % (last - first + 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_each_reader_a_lag_of_its_own_within_the_range() {
        let lags = |seed| (0..100).map(|reader| Lag::new(seed, 10..=500).of(reader)).collect::<Vec<_>>();
        assert_eq!(lags(1), lags(1));
        assert_ne!(lags(1), lags(2));
        let range = Duration::from_millis(10)..=Duration::from_millis(500);
        assert!(lags(1).iter().all(|lag| range.contains(lag)));
        let (least, most) = (lags(1).into_iter().min(), lags(1).into_iter().max());
        assert!(
            least < Some(Duration::from_millis(60)) && most > Some(Duration::from_millis(450)),
            "{least:?} {most:?}"
        );
    }
}
