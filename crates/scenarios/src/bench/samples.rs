//! Samples, their medians, and ratios between peers. Pure.
//!
//! A ratio is formed within each round, between two cells that were measured seconds apart, and the median of those is
//! shown: what slowed the whole machine down for a while slowed both.

use super::plan::Peer;

/// All that was measured.
#[derive(Debug, Default)]
pub(super) struct Results {
    pub(super) cells: Vec<Cell>,
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
