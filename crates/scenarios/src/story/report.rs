//! What was expected and what was seen, step by step, and the table at the end.

use std::fmt;

use egress_lab::columns::aligned;

/// One comparison.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Check {
    step: String,
    what: String,
    expected: String,
    seen: String,
}

impl Check {
    fn holds(&self) -> bool {
        self.expected == self.seen
    }
}

/// The comparisons of a whole story.
#[derive(Debug, Default)]
pub(super) struct StoryReport {
    step: String,
    steps: usize,
    checks: Vec<Check>,
}

impl StoryReport {
    /// Begins a step: its title is printed, and later checks belong to it.
    pub(super) fn begin(&mut self, step: &str) {
        self.steps += 1;
        self.step = step.to_owned();
        println!("\n== {}. {step}", self.steps);
    }

    /// Notes a comparison and prints it if it failed.
    pub(super) fn check(&mut self, what: &str, expected: &impl fmt::Display, seen: &impl fmt::Display) -> bool {
        let (step, what) = (self.step.clone(), what.to_owned());
        let check = Check { step, what, expected: expected.to_string(), seen: seen.to_string() };
        let holds = check.holds();
        if !holds {
            println!("   ! {}: expected {}, seen {}", check.what, check.expected, check.seen);
        }
        self.checks.push(check);
        holds
    }

    pub(super) fn failed(&self) -> usize {
        self.checks.iter().filter(|check| !check.holds()).count()
    }

    pub(super) fn count(&self) -> usize {
        self.checks.len()
    }
}

impl fmt::Display for StoryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let heads = ["WHO", "EXPECTED", "SEEN", ""].map(str::to_owned);
        let cells = |check: &Check| {
            let mark = if check.holds() { "ok" } else { "DIFFERS" };
            [check.what.clone(), check.expected.clone(), check.seen.clone(), mark.to_owned()]
        };
        let rows: Vec<[String; 4]> = std::iter::once(heads).chain(self.checks.iter().map(cells)).collect();
        let mut last = "";
        let steps = std::iter::once("").chain(self.checks.iter().map(|check| check.step.as_str()));
        for (line, step) in aligned(&rows, "  ", |_| false).lines().zip(steps) {
            if step != last {
                writeln!(f, "{step}")?;
                last = step;
            }
            writeln!(f, "  {line}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_names_a_step_once_and_marks_what_differs() {
        let mut report = StoryReport::default();
        report.begin("before");
        report.check("homer", &"172.18.0.2", &"172.18.0.2");
        report.check("marge", &"172.18.0.3", &"timed out");
        assert_eq!(report.failed(), 1);
        let expected = "  WHO    EXPECTED    SEEN\nbefore\n\
                        \x20 homer  172.18.0.2  172.18.0.2  ok\n  marge  172.18.0.3  timed out   DIFFERS\n";
        assert_eq!(report.to_string(), expected);
    }
}
