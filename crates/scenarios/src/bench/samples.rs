//! Samples, their medians, and ratios between peers. Pure.
//!
//! A ratio is formed within each round, between two cells that were measured seconds apart, and the median of those is
//! shown: what slowed the whole machine down for a while slowed both.

use std::collections::BTreeMap;

use super::plan::Peer;

/// All that was measured.
#[derive(Debug, Default)]
pub(super) struct Results {
    pub(super) cells: Vec<Cell>,
    /// From the name of a work to that of the one that it is compared with.
    compared: BTreeMap<String, String>,
}

/// One work on one path by one peer.
#[derive(Debug, Clone)]
pub(super) struct Cell {
    pub(super) work: String,
    pub(super) path: &'static str,
    pub(super) peer: &'static str,
    pub(super) unit: &'static str,
    /// One per round, in order.
    pub(super) samples: Vec<f64>,
    /// Of ours: the part of packets that the flow cache served, one per round.
    pub(super) hit_rates: Vec<f64>,
}

impl Results {
    pub(super) fn add(&mut self, work: &str, path: &'static str, peer: &'static str, unit: &'static str, sample: f64) {
        let found = self.cells.iter_mut().find(|cell| cell.work == work && cell.path == path && cell.peer == peer);
        match found {
            Some(cell) => cell.samples.push(sample),
            None => {
                self.cells.push(Cell {
                    work: work.to_owned(),
                    path,
                    peer,
                    unit,
                    samples: vec![sample],
                    hit_rates: Vec::new(),
                });
            }
        }
    }

    /// Of a cell that is there.
    pub(super) fn add_hit_rate(&mut self, work: &str, path: &str, peer: &str, hit_rate: f64) {
        let found = self.cells.iter_mut().find(|cell| cell.work == work && cell.path == path && cell.peer == peer);
        found.into_iter().for_each(|cell| cell.hit_rates.push(hit_rate));
    }

    /// The one work is shown with its difference to the other.
    pub(super) fn compare(&mut self, work: &str, with: &str) {
        self.compared.insert(work.to_owned(), with.to_owned());
    }

    pub(super) fn over_baseline(&self, cell: &Cell) -> Option<f64> {
        let baseline = self.cell(self.compared.get(&cell.work)?, cell.path, cell.peer)?;
        Some(cell.median() - baseline.median())
    }

    pub(super) fn cell(&self, work: &str, path: &str, peer: &str) -> Option<&Cell> {
        self.cells.iter().find(|cell| cell.work == work && cell.path == path && cell.peer == peer)
    }

    /// How the cell compares with the same work of another peer.
    pub(super) fn ratio(&self, cell: &Cell, to: Peer) -> Option<f64> {
        let base = self.cell(&cell.work, cell.path, to.name())?;
        let pairs = cell.samples.iter().zip(&base.samples);
        let ratios: Vec<f64> = pairs.filter(|(_, base)| **base > 0.0).map(|(own, base)| own / base).collect();
        (!ratios.is_empty()).then(|| median(&ratios))
    }
}

impl Cell {
    pub(super) fn median(&self) -> f64 {
        median(&self.samples)
    }

    pub(super) fn hit_rate(&self) -> Option<f64> {
        (!self.hit_rates.is_empty()).then(|| median(&self.hit_rates))
    }

    /// From the least to the greatest sample, as a part of the median.
    pub(super) fn spread(&self) -> f64 {
        let least = self.samples.iter().copied().fold(f64::INFINITY, f64::min);
        let greatest = self.samples.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let median = self.median();
        if median > 0.0 { (greatest - least) / median } else { 0.0 }
    }
}

/// The smallest sample that so many percent of all do not exceed; zero for nothing.
pub(super) fn percentile(samples: &[f64], percent: f64) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    #[expect(clippy::cast_precision_loss, reason = "numbers of samples are far below 2^52")]
    let rank = (sorted.len() as f64 * percent / 100.0).ceil();
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a rank is at most the number of samples"
    )]
    let at = (rank as usize).clamp(1, sorted.len().max(1)) - 1;
    sorted.get(at).copied().unwrap_or(0.0)
}

/// Zero for nothing.
pub(super) fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match (sorted.get(middle), middle.checked_sub(1).and_then(|below| sorted.get(below))) {
        (Some(above), Some(below)) if sorted.len().is_multiple_of(2) => f64::midpoint(*above, *below),
        (Some(one), _) => *one,
        (None, _) => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median(&[]), 0.0);
    }

    #[test]
    fn a_percentile_is_a_sample() {
        let samples: Vec<f64> = (1..=1_000).rev().map(f64::from).collect();
        assert_eq!(
            [50.0, 99.0, 99.9, 100.0].map(|percent| percentile(&samples, percent)),
            [500.0, 990.0, 999.0, 1000.0]
        );
        assert_eq!((percentile(&[3.0], 50.0), percentile(&[], 50.0)), (3.0, 0.0));
    }

    #[test]
    fn a_work_is_compared_with_another_on_the_same_path() {
        let mut results = Results::default();
        for (work, path, value) in [("alone", "local", 1.0), ("alone", "remote", 2.0), ("beside", "remote", 5.0)] {
            results.add(work, path, "ours", "ms", value);
        }
        results.compare("beside", "alone");
        let [alone, _, beside] = [0, 1, 2].map(|at| results.over_baseline(&results.cells[at]));
        assert_eq!((alone, beside), (None, Some(3.0)));
    }

    #[test]
    fn ratios_are_formed_within_a_round() {
        let mut results = Results::default();
        // The second round met a slow machine, which is no matter.
        for (plain, ours) in [(100.0, 120.0), (10.0, 12.0), (100.0, 90.0)] {
            results.add("work", "local", "plain", "1/s", plain);
            results.add("work", "local", "ours", "1/s", ours);
        }
        let ours = results.cell("work", "local", "ours").expect("measured");
        assert_eq!(results.ratio(ours, Peer::Plain), Some(1.2));
        assert_eq!(results.ratio(ours, Peer::Netfilter), None);
        assert_eq!(ours.median(), 90.0);
        assert_eq!(ours.spread(), 1.2);
    }
}
