//! What was measured, as a table for the terminal, as JSON and as a chart.

use std::fs;

use super::chart;
use super::plan::Peer;
use super::samples::{Cell, Results};
use crate::prelude::*;
use egress_lab::columns::aligned;

pub(super) fn write(results: &Results, folder: &Path) -> Result<()> {
    fs::create_dir_all(folder)?;
    let list: Vec<Value> = results.cells.iter().map(|cell| row(results, cell)).collect();
    fs::write(folder.join("results.json"), serde_json::to_string_pretty(&list)? + "\n")?;
    fs::write(folder.join("results.svg"), chart::svg(results))?;
    Ok(())
}

fn row(results: &Results, cell: &Cell) -> Value {
    json!({
        "work": cell.work,
        "path": cell.path,
        "peer": cell.peer,
        "median": cell.median(),
        "unit": cell.unit,
        "ratio_to_plain": results.ratio(cell, Peer::Plain),
        "ratio_to_netfilter": results.ratio(cell, Peer::Netfilter),
        "spread": cell.spread(),
    })
}

/// Spread: from the least to the greatest sample, as a part of the median.
pub(super) fn table(results: &Results) -> String {
    let heads = ["work", "path", "peer", "median", "unit", "/plain", "/netfilter", "spread"];
    let mut rows = vec![heads.map(str::to_owned)];
    for cell in &results.cells {
        let ratio = |to| results.ratio(cell, to).map_or("-".to_owned(), |ratio| format!("{ratio:.2}"));
        rows.push([
            cell.work.clone(),
            cell.path.to_owned(),
            cell.peer.to_owned(),
            figure(cell.median()),
            cell.unit.to_owned(),
            ratio(Peer::Plain),
            ratio(Peer::Netfilter),
            format!("{:.0} %", cell.spread() * 100.0),
        ]);
    }
    aligned(&rows, "  ", |column| matches!(column, 3 | 5 | 6 | 7))
}

/// Three digits that count, or all of a large number.
pub(super) fn figure(value: f64) -> String {
    if value >= 100.0 { format!("{value:.0}") } else { format!("{value:.1}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_has_what_is_promised() {
        let mut results = Results::default();
        results.add("work", "local", "plain", "1/s", 100.0);
        results.add("work", "local", "ours", "1/s", 150.0);
        let row = row(&results, &results.cells[1]);
        let keys: Vec<&String> = row.as_object().expect("an object").keys().collect();
        for key in ["work", "path", "peer", "median", "unit", "ratio_to_plain", "ratio_to_netfilter", "spread"] {
            assert!(keys.contains(&&key.to_owned()), "{key}");
        }
        assert_eq!((&row["ratio_to_plain"], &row["ratio_to_netfilter"]), (&json!(1.5), &Value::Null));
        assert!(table(&results).lines().any(|line| line.starts_with("work") && line.contains("1.50")));
    }
}
