//! What the rounds have shown, fault by fault. Pure.

use std::collections::BTreeMap;
use std::time::Instant;

use super::sampler::ConnectionSample;

/// Width of a bar of the histogram, in milliseconds.
pub(super) const BAR: f64 = 100.0;

/// What became of one pod's new connections after a fault had begun.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct Interruption {
    pub(super) asked: u64,
    pub(super) lost: u64,
    /// From the beginning of the fault until the first answer after the first loss.
    pub(super) again_ms: Option<f64>,
    /// Losses after that answer.
    pub(super) lost_later: u64,
}

/// Looks through the samples of one pod, in any order.
pub(super) fn interruption(samples: &[ConnectionSample], begun: Instant) -> Interruption {
    let mut samples: Vec<&ConnectionSample> = samples.iter().filter(|sample| sample.sent >= begun).collect();
    samples.sort_by_key(|sample| sample.sent);
    let lost = |sample: &&&ConnectionSample| sample.answered.is_none();
    let mut interruption = Interruption {
        asked: samples.len() as u64,
        lost: samples.iter().filter(lost).count() as u64,
        ..Interruption::default()
    };
    let Some(first) = samples.iter().position(|sample| sample.answered.is_none()) else { return interruption };
    let behind = &samples[first..];
    let again = behind.iter().find_map(|sample| Some((sample.sent, sample.answered?.0)));
    if let Some((sent, answered)) = again {
        interruption.again_ms = Some(answered.duration_since(begun).as_secs_f64() * 1000.0);
        interruption.lost_later =
            behind.iter().filter(|sample| sample.sent > sent && sample.answered.is_none()).count() as u64;
    }
    interruption
}

/// All rounds of one fault.
#[derive(Debug, Clone, Default)]
pub(super) struct SoakRow {
    pub(super) rounds: u64,
    /// Rounds in which an address has changed its node.
    pub(super) moved: u64,
    /// Times until connections succeeded again, of each pod that lost any.
    pub(super) again_ms: Vec<f64>,
    pub(super) asked: u64,
    pub(super) lost: u64,
    /// The most that one pod lost in one round.
    pub(super) most_lost: u64,
    pub(super) lost_later: u64,
    /// Losses of pods that the fault should be no matter to.
    pub(super) others_lost: u64,
    /// From a fault's end until the last loss of each pod on the node that it was on.
    pub(super) back_ms: Vec<f64>,
    /// Established connections, and those that lived on.
    pub(super) streams: u64,
    pub(super) survived: u64,
    /// How long the cluster took until it was at rest, at most.
    pub(super) rest_ms: f64,
}

/// Rows by the name of the fault.
pub(super) type FaultTable = BTreeMap<String, SoakRow>;

impl SoakRow {
    pub(super) fn add(&mut self, interruption: Interruption) {
        self.again_ms.extend(interruption.again_ms);
        self.asked += interruption.asked;
        self.lost += interruption.lost;
        self.lost_later += interruption.lost_later;
        self.most_lost = self.most_lost.max(interruption.lost);
    }

    /// Adds rounds of the same fault.
    pub(super) fn merge(&mut self, other: Self) {
        self.rounds += other.rounds;
        self.moved += other.moved;
        self.again_ms.extend(other.again_ms);
        self.asked += other.asked;
        self.lost += other.lost;
        self.most_lost = self.most_lost.max(other.most_lost);
        self.lost_later += other.lost_later;
        self.others_lost += other.others_lost;
        self.back_ms.extend(other.back_ms);
        self.streams += other.streams;
        self.survived += other.survived;
        self.rest_ms = self.rest_ms.max(other.rest_ms);
    }

    /// The time that this part of all pods did not exceed.
    pub(super) fn quantile(&self, part: f64) -> Option<f64> {
        quantile(&self.again_ms, part)
    }

    /// How many times fell into each bar of the histogram, from 0 up.
    pub(super) fn histogram(&self) -> Vec<usize> {
        let mut bars = Vec::new();
        for time in &self.again_ms {
            let place = (1..).take_while(|bar| f64::from(*bar) * BAR <= *time).count();
            if bars.len() <= place {
                bars.resize(place + 1, 0);
            }
            bars[place] += 1;
        }
        bars
    }

    pub(super) fn survival(&self) -> Option<f64> {
        // Counts of connections are far below where a float would round.
        #[expect(clippy::cast_precision_loss, reason = "counts are small")]
        let share = |part: u64, all: u64| part as f64 / all as f64;
        (self.streams > 0).then(|| share(self.survived, self.streams))
    }
}

/// The least sample that at least this part of all does not exceed.
pub(super) fn quantile(samples: &[f64], part: f64) -> Option<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let index = sorted.iter().zip(1_u32..).position(|(_, count)| {
        let all = u32::try_from(samples.len()).unwrap_or(u32::MAX);
        f64::from(count) >= part * f64::from(all)
    });
    index.map(|index| sorted[index])
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn samples(begun: Instant, answered: &[bool]) -> Vec<ConnectionSample> {
        let one = |(place, answered): (u32, &bool)| {
            let sent = begun + Duration::from_millis(10) * place;
            let address = "172.18.0.110".parse().expect("a literal");
            ConnectionSample { sent, answered: answered.then(|| (sent + Duration::from_millis(1), address)) }
        };
        (0..).zip(answered).map(one).collect()
    }

    #[test]
    fn an_interruption_is_from_the_fault_to_the_first_success_after_a_loss() {
        let begun = Instant::now();
        let seen = interruption(&samples(begun, &[true, false, false, true, true, false, true]), begun);
        assert_eq!(seen, Interruption { asked: 7, lost: 3, again_ms: Some(31.0), lost_later: 1 });
        assert_eq!(interruption(&samples(begun, &[true, true]), begun).again_ms, None);
        assert_eq!(interruption(&samples(begun, &[true, false]), begun).again_ms, None);
    }

    #[test]
    fn quantiles_are_samples() {
        let all: Vec<f64> = (1..=100).map(f64::from).collect();
        assert_eq!(quantile(&all, 0.5), Some(50.0));
        assert_eq!(quantile(&all, 0.99), Some(99.0));
        assert_eq!(quantile(&all, 1.0), Some(100.0));
        assert_eq!(quantile(&[7.0], 0.99), Some(7.0));
        assert_eq!(quantile(&[], 0.5), None);
    }

    #[test]
    fn bars_have_the_documented_width() {
        let row = SoakRow { again_ms: vec![0.0, 99.0, 100.0, 350.0], ..SoakRow::default() };
        assert_eq!(row.histogram(), [2, 1, 0, 1]);
    }
}
