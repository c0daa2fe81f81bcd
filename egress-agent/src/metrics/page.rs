//! Generates the tables of `docs/metrics.md` from the catalogue.

use std::fmt::Write as _;

use crate::metrics::catalogue::{ALL, Metric, Process};

pub fn tables() -> String {
    let mut text = String::new();
    for (title, process) in
        [("Agents and controllers", Process::Both), ("Agents", Process::Agent), ("Controllers", Process::Controller)]
    {
        // Writing to a string does not fail.
        let _written = write!(text, "## {title}\n\n| metric | type | labels | series | meaning | when it is bad |\n");
        text += "|---|---|---|---|---|---|\n";
        ALL.iter().filter(|metric| metric.process == process).for_each(|metric| text += &row(metric));
        text.push('\n');
    }
    text
}

fn row(metric: &Metric) -> String {
    let labels: Vec<String> = metric.labels.names().iter().map(|name| format!("`{name}`")).collect();
    let (series, kind, bound) = (metric.series(), metric.kind.name(), metric.labels.bound());
    format!("| `{series}` | {kind} | {} | {bound} | {}. | {} |\n", labels.join(", "), metric.help, metric.bad)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_metric_has_a_row_with_all_columns() {
        let tables = tables();
        for metric in ALL {
            assert!(tables.contains(&format!("| `{}` | ", metric.series())), "{}", metric.name);
        }
        let rows = tables.lines().filter(|line| line.starts_with('|'));
        assert!(rows.clone().all(|row| row.matches('|').count() == 7), "{tables}");
        assert_eq!(rows.count(), ALL.len() + 6);
    }
}
