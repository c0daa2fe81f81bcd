//! What was measured, as a table for the terminal, as JSON and as a chart.

use std::fmt::Write as _;
use std::fs;

use super::chart;
use super::figures::{FaultTable, SoakRow, quantile};
use super::round::{ReportedViolation, Soak};
use crate::prelude::*;
use egress_lab::columns::aligned;

/// A whole run.
pub(super) struct SoakReport<'a> {
    pub(super) seed: u64,
    pub(super) rounds: usize,
    pub(super) table: &'a FaultTable,
    pub(super) violations: &'a [ReportedViolation],
    pub(super) missed: u32,
    pub(super) stalls_ms: &'a [f64],
    /// The command that plays a round of this run again.
    pub(super) again: &'a dyn Fn(usize) -> String,
}

impl<'a> SoakReport<'a> {
    pub(super) fn of(soak: &'a Soak, seed: u64, rounds: usize, again: &'a dyn Fn(usize) -> String) -> Self {
        let Soak { table, violations, missed, stalls_ms, .. } = soak;
        Self { seed, rounds, table, violations, missed: *missed, stalls_ms, again }
    }

    pub(super) fn write(&self, folder: &Path) -> Result<()> {
        fs::create_dir_all(folder)?;
        fs::write(folder.join("results.json"), serde_json::to_string_pretty(&self.json())? + "\n")?;
        fs::write(folder.join("results.svg"), chart::svg(self.table))?;
        Ok(())
    }

    fn json(&self) -> Value {
        let faults: Vec<Value> = self.table.iter().map(|(name, row)| row_json(name, row)).collect();
        let violations: Vec<Value> = self
            .violations
            .iter()
            .map(|found| {
                json!({
                    "round": found.plan.round,
                    "fault": found.plan.fault.name(),
                    "what": found.message,
                    "extent": found.extent(),
                    "again": (self.again)(found.plan.round),
                })
            })
            .collect();
        json!({
            "seed": self.seed,
            "rounds": self.rounds,
            "faults": faults,
            "violations": violations,
            "frames_missed": self.missed,
            "longest_time_between_samples_ms": {
                "p50": quantile(self.stalls_ms, 0.5), "worst": quantile(self.stalls_ms, 1.0),
            },
        })
    }

    pub(super) fn text(&self) -> String {
        let heads = [
            "fault", "rounds", "moved", "p50 ms", "p99 ms", "worst", "lost", "of", "most", "later", "others",
            "streams", "live", "back ms", "rest ms",
        ];
        let mut rows = vec![heads.map(str::to_owned)];
        rows.extend(self.table.iter().map(|(name, row)| cells(name, row)));
        let mut text = aligned(&rows, "  ", |column| column > 0);
        let worst = quantile(self.stalls_ms, 1.0).unwrap_or(0.0);
        let usual = quantile(self.stalls_ms, 0.5).unwrap_or(0.0);
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "{} rounds, seed {}; the longest time between two samples of a pod (10 ms are meant) was {usual:.0} ms in \
             the median of rounds and {worst:.0} ms in the worst; {} frames missed by the capture",
            self.rounds, self.seed, self.missed
        );
        for found in self.violations {
            let again = (self.again)(found.plan.round);
            let _ = writeln!(
                text,
                "VIOLATION in round {} ({}): {}",
                found.plan.round,
                found.plan.fault.name(),
                found.message
            );
            let _ = writeln!(text, "  {}; again: {again}", found.extent());
        }
        let _ = writeln!(text, "{} violations", self.violations.len());
        text
    }
}

fn row_json(name: &str, row: &SoakRow) -> Value {
    json!({
        "fault": name,
        "rounds": row.rounds,
        "moved": row.moved,
        "again_ms": {
            "p50": row.quantile(0.5), "p99": row.quantile(0.99), "worst": row.quantile(1.0), "all": row.again_ms,
        },
        "samples": row.asked,
        "lost": row.lost,
        "most_lost_by_one_pod": row.most_lost,
        "lost_later": row.lost_later,
        "lost_by_others": row.others_lost,
        "streams": row.streams,
        "streams_survived": row.survived,
        "back_ms": row.back_ms,
        "rest_ms": row.rest_ms,
    })
}

fn cells(name: &str, row: &SoakRow) -> [String; 15] {
    let time = |part: f64| row.quantile(part).map_or("-".to_owned(), |time| format!("{time:.0}"));
    [
        name.to_owned(),
        row.rounds.to_string(),
        row.moved.to_string(),
        time(0.5),
        time(0.99),
        time(1.0),
        row.lost.to_string(),
        row.asked.to_string(),
        row.most_lost.to_string(),
        row.lost_later.to_string(),
        row.others_lost.to_string(),
        row.streams.to_string(),
        row.survival().map_or("-".to_owned(), |share| format!("{:.0} %", share * 100.0)),
        quantile(&row.back_ms, 1.0).map_or("-".to_owned(), |time| format!("{time:.0}")),
        format!("{:.0}", row.rest_ms),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_a_line_for_each_fault() {
        let row = SoakRow { rounds: 3, again_ms: vec![900.0, 1100.0], streams: 4, survived: 3, ..SoakRow::default() };
        let table: FaultTable = [("cut".to_owned(), row)].into();
        let again = |round: usize| format!("cargo xtask soak --seed 7 --round {round}");
        let report = SoakReport {
            seed: 7,
            rounds: 3,
            table: &table,
            violations: &[],
            missed: 0,
            stalls_ms: &[12.0],
            again: &again,
        };
        let text = report.text();
        assert!(text.lines().any(|line| line.starts_with("cut") && line.contains("1100") && line.contains("75 %")));
        assert_eq!(report.json()["faults"][0]["again_ms"]["p50"], json!(900.0));
        assert!(chart::svg(&table).contains("cut"));
    }
}
