//! What came out of a test run: a table, the reasons, and one line of numbers at the very end.

use std::process::ExitCode;
use std::time::Duration;

/// What came out of one part.
#[derive(Clone, Debug)]
pub(super) struct PartOutcome {
    /// Which part of the tests, or on which kernel.
    part: String,
    pub(super) passed: usize,
    pub(super) failed: usize,
    pub(super) skipped: usize,
    pub(super) elapsed: Duration,
    /// One line for each failure.
    failures: Vec<String>,
    /// Why the whole part did not run.
    hindrance: Option<String>,
}

impl PartOutcome {
    pub(super) fn new(part: impl ToString) -> Self {
        Self {
            part: part.to_string(),
            passed: 0,
            failed: 0,
            skipped: 0,
            elapsed: Duration::ZERO,
            failures: Vec::new(),
            hindrance: None,
        }
    }

    pub(super) fn skipped(part: impl ToString, tests: usize, reason: String) -> Self {
        Self { skipped: tests, hindrance: Some(reason), ..Self::new(part) }
    }

    /// One more failed test.
    pub(super) fn fail(&mut self, line: &str) {
        self.failed += 1;
        self.explain(line);
    }

    /// A line about a failure that is counted already.
    pub(super) fn explain(&mut self, line: &str) {
        self.failures.push(line.to_owned());
    }
}

/// What came out of all parts.
#[derive(Debug, Default)]
pub(super) struct Summary {
    outcomes: Vec<PartOutcome>,
    set_up_failed: bool,
}

impl Summary {
    pub(super) fn add(&mut self, outcome: PartOutcome) {
        self.outcomes.push(outcome);
    }

    /// Something other than a test failed. It counts as one failure.
    pub(super) fn set_up_failed(&mut self) {
        self.set_up_failed = true;
    }

    /// Prints everything and returns the exit code.
    pub(super) fn conclude(&self, filter: &str, allow_skips: bool) -> ExitCode {
        println!("\n{}", self.table());
        for outcome in &self.outcomes {
            for line in &outcome.failures {
                println!("failed: {}: {line}", outcome.part);
            }
        }
        let skips = self.skips();
        for line in &skips {
            println!("skipped: {line}");
        }
        if !skips.is_empty() && !allow_skips {
            println!("A skipped part is a failure; --allow-skips says that it is fine.");
        }
        let nothing = self.total(|outcome| outcome.passed + outcome.failed) == 0 && !filter.is_empty();
        if nothing {
            println!("No test's name contains {filter:?}.");
        }
        println!("{}", self.last_line());
        let bad = self.failed() > 0 || nothing || (!skips.is_empty() && !allow_skips);
        if bad { ExitCode::FAILURE } else { ExitCode::SUCCESS }
    }

    fn table(&self) -> String {
        let mut lines = vec![format!("{:<8} {:>5} {:>7} {:>7} {:>8}", "part", "run", "passed", "failed", "seconds")];
        for outcome in &self.outcomes {
            let run = outcome.passed + outcome.failed;
            let note = match (&outcome.hindrance, run, outcome.skipped) {
                (Some(_), _, _) => "  skipped".to_owned(),
                (None, 0, 0) => "  no tests".to_owned(),
                (None, _, 0) => String::new(),
                (None, _, skipped) => format!("  {skipped} skipped by name"),
            };
            lines.push(format!(
                "{:<8} {run:>5} {:>7} {:>7} {:>8.1}{note}",
                outcome.part,
                outcome.passed,
                outcome.failed,
                outcome.elapsed.as_secs_f64()
            ));
        }
        lines.push(String::new());
        lines.join("\n")
    }

    fn skips(&self) -> Vec<String> {
        let reason = |outcome: &PartOutcome| Some(format!("{}: {}", outcome.part, outcome.hindrance.as_ref()?));
        self.outcomes.iter().filter_map(reason).collect()
    }

    fn total(&self, count: impl Fn(&PartOutcome) -> usize) -> usize {
        self.outcomes.iter().map(count).sum()
    }

    fn failed(&self) -> usize {
        self.total(|outcome| outcome.failed) + usize::from(self.set_up_failed)
    }

    /// For people and for scripts: nothing else on the line, nothing after it.
    fn last_line(&self) -> String {
        let passed = self.total(|outcome| outcome.passed);
        let skipped = self.total(|outcome| outcome.skipped);
        format!("{passed} passed, {} failed, {skipped} skipped", self.failed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::part::Part;

    fn summary() -> Summary {
        let mut pure = PartOutcome::new(Part::Pure);
        pure.passed = 3;
        pure.fail("one");
        let mut summary = Summary::default();
        summary.add(pure);
        summary.add(PartOutcome::skipped(Part::Lab, 2, "it needs root".to_owned()));
        summary
    }

    #[test]
    fn the_last_line_counts_everything() {
        let mut summary = summary();
        assert_eq!(summary.last_line(), "3 passed, 1 failed, 2 skipped");
        summary.set_up_failed();
        assert_eq!(summary.last_line(), "3 passed, 2 failed, 2 skipped");
    }

    #[test]
    fn skipped_parts_are_named_with_their_reason() {
        assert_eq!(summary().skips(), ["lab: it needs root"]);
        assert!(summary().table().contains("lab          0       0       0      0.0  skipped"));
    }
}
