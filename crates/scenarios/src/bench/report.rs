//! What was measured, as a table for the terminal, as JSON and as a chart.

use std::collections::BTreeMap;
use std::fs;

use super::chart;
use super::plan::{Peer, Work};
use super::samples::{Cell, Results};
use crate::prelude::*;
use egress_lab::columns::aligned;
use serde::{Deserialize, Serialize};

/// One row of the results.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Figure {
    pub(super) work: String,
    pub(super) path: String,
    pub(super) peer: String,
    pub(super) median: f64,
    pub(super) unit: String,
    pub(super) ratio_to_plain: Option<f64>,
    pub(super) ratio_to_netfilter: Option<f64>,
    /// The difference to the work that it is compared with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) over_baseline: Option<f64>,
    /// The part of packets that the flow caches of the path served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) hit_rate: Option<f64>,
    /// From the least to the greatest sample, as a part of the median.
    pub(super) spread: f64,
}

impl Figure {
    fn of(results: &Results, cell: &Cell) -> Self {
        Self {
            work: cell.work.clone(),
            path: cell.path.to_owned(),
            peer: cell.peer.to_owned(),
            median: cell.median(),
            unit: cell.unit.to_owned(),
            ratio_to_plain: results.ratio(cell, Peer::Plain),
            ratio_to_netfilter: results.ratio(cell, Peer::Netfilter),
            over_baseline: results.over_baseline(cell),
            hit_rate: cell.hit_rate(),
            spread: cell.spread(),
        }
    }
}

pub(super) fn write(results: &Results, folder: &Path) -> Result<()> {
    fs::create_dir_all(folder)?;
    let figures: Vec<Figure> = results.cells.iter().map(|cell| Figure::of(results, cell)).collect();
    fs::write(folder.join("results.json"), serde_json::to_string_pretty(&figures)? + "\n")?;
    fs::write(folder.join("results.svg"), chart::svg(&figures))?;
    Ok(())
}

/// The chart of committed results (`results.json`), without single programs.
pub fn chart_of(json: &str) -> Result<String> {
    let mut figures: Vec<Figure> = serde_json::from_str(json)?;
    figures.retain(|figure| figure.ratio_to_plain.is_some());
    Ok(chart::svg(&figures))
}

/// The table of single programs and of the paths that they make: a row for each, a column for each state of the caches and
/// number of pods. The name of a work has the three, separated by commas; the name of a program may have a comma too.
pub fn programs_table_of(json: &str) -> Result<String> {
    let figures: Vec<Figure> = serde_json::from_str(json)?;
    let (mut columns, mut rows) = (Vec::new(), Vec::<((String, String), BTreeMap<String, String>)>::new());
    for Figure { work, path, median, spread, hit_rate, .. } in figures.into_iter().filter(|figure| figure.unit == "ns")
    {
        let mut parts = work.rsplitn(3, ", ");
        let (pods, caches, name) = (parts.next(), parts.next(), parts.next());
        let (pods, caches, name) = pods.zip(caches).zip(name).map(|((a, b), c)| (a, b, c)).context("a work's name")?;
        let column = format!("{caches}, {pods}");
        let row = (name.to_owned(), path);
        if !columns.contains(&column) {
            columns.push(column.clone());
        }
        if !rows.iter().any(|(known, _)| *known == row) {
            rows.push((row.clone(), BTreeMap::new()));
        }
        let cells = rows.iter_mut().filter(|(known, _)| *known == row).map(|(_, cells)| cells);
        cells.for_each(|cells| {
            let hits = hit_rate.map(|part| format!(", {:.0} % hits", part * 100.0)).unwrap_or_default();
            cells.insert(column.clone(), format!("{} ({:.0} %{hits})", number(median), spread * 100.0));
        });
    }
    columns.sort_by_key(|column| !column.starts_with("hot"));
    let mut table =
        format!("| program | path | {} |\n|---|---|{}\n", columns.join(" | "), "---|".repeat(columns.len()));
    for ((name, path), cells) in rows {
        let cells: Vec<&str> = columns.iter().map(|column| cells.get(column).map_or("", String::as_str)).collect();
        table += &format!("| {name} | {path} | {} |\n", cells.join(" | "));
    }
    Ok(table)
}

/// Their table, for a document; single programs have one of their own.
pub fn table_of(json: &str) -> Result<String> {
    let mut table = "| work | path | peer | median | unit | to plain | to netfilter | cache hits | spread |\n|---|---|---|---|---|---|---|---|---|\n".to_owned();
    let figures: Vec<Figure> = serde_json::from_str(json)?;
    for figure in figures.iter().filter(|figure| figure.ratio_to_plain.is_some()) {
        let ratio = |ratio: Option<f64>| ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.2}"));
        table += &format!(
            "| {} | {} | {} | {} | {} | {} | {} | {} | {:.0} % |\n",
            figure.work,
            figure.path,
            figure.peer,
            number(figure.median),
            figure.unit,
            ratio(figure.ratio_to_plain),
            ratio(figure.ratio_to_netfilter),
            percent(figure.hit_rate),
            figure.spread * 100.0
        );
    }
    Ok(table)
}

/// Works under load: of ours alone, so that they are compared with no peer but with one another.
fn is_load(work: &str) -> bool {
    [Work::Isolation, Work::Stalls].iter().any(|load| work.starts_with(load.name()))
}

/// The table of works under load, for a document.
pub fn load_table_of(json: &str) -> Result<String> {
    let mut table =
        "| work | path | median | unit | over the baseline | spread |\n|---|---|---|---|---|---|\n".to_owned();
    let figures: Vec<Figure> = serde_json::from_str(json)?;
    for figure in figures.iter().filter(|figure| is_load(&figure.work)) {
        let Figure { work, path, median, unit, over_baseline, spread, .. } = figure;
        let over = over_baseline.map_or("-".to_owned(), |over| number_of(over, unit));
        table += &format!(
            "| {work} | {path} | {} | {unit} | {over} | {:.0} % |\n",
            number_of(*median, unit),
            spread * 100.0
        );
    }
    Ok(table)
}

/// Spread: from the least to the greatest sample, as a part of the median.
pub(super) fn table(results: &Results) -> String {
    let heads = ["work", "path", "peer", "median", "unit", "/plain", "/netfilter", "hits", "spread"];
    let mut rows = vec![heads.map(str::to_owned)];
    let heads = ["work under load", "path", "median", "unit", "over baseline", "spread"];
    let mut load = vec![heads.map(str::to_owned)];
    for cell in &results.cells {
        let (work, path, median) = (cell.work.clone(), cell.path.to_owned(), number_of(cell.median(), cell.unit));
        let (unit, spread) = (cell.unit.to_owned(), format!("{:.0} %", cell.spread() * 100.0));
        if is_load(&cell.work) {
            let over = results.over_baseline(cell).map_or("-".to_owned(), |over| number_of(over, cell.unit));
            load.push([work, path, median, unit, over, spread]);
            continue;
        }
        let ratio = |to| results.ratio(cell, to).map_or("-".to_owned(), |ratio| format!("{ratio:.2}"));
        let (plain, netfilter) = (ratio(Peer::Plain), ratio(Peer::Netfilter));
        let peer = cell.peer.to_owned();
        rows.push([work, path, peer, median, unit, plain, netfilter, percent(cell.hit_rate()), spread]);
    }
    let mut text = String::new();
    if rows.len() > 1 {
        text += &aligned(&rows, "  ", |column| matches!(column, 3 | 5..));
    }
    if load.len() > 1 {
        text += &aligned(&load, "  ", |column| matches!(column, 2 | 4..));
    }
    text
}

fn percent(part: Option<f64>) -> String {
    part.map_or("-".to_owned(), |part| format!("{:.0} %", part * 100.0))
}

/// As [`number`], but for what is counted one by one.
fn number_of(value: f64, unit: &str) -> String {
    match unit {
        "connections" | "flows" | "packets" => format!("{value:.0}"),
        _ => number(value),
    }
}

/// Three digits that count, or all of a large number.
pub(super) fn number(value: f64) -> String {
    let digits = match value.abs() {
        100.0.. => 0,
        10.0.. => 1,
        _ => 2,
    };
    format!("{value:.digits$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_has_what_is_promised() {
        let mut results = Results::default();
        results.add("work", "local", "plain", "1/s", 100.0);
        results.add("work", "local", "ours", "1/s", 150.0);
        results.add_hit_rate("work", "local", "ours", 0.75);
        let figure = Figure::of(&results, &results.cells[1]);
        assert_eq!((figure.ratio_to_plain, figure.ratio_to_netfilter), (Some(1.5), None));
        let json = serde_json::to_string(&[&figure]).expect("numbers and texts");
        assert!(
            table_of(&json)
                .expect("figures")
                .ends_with("| work | local | ours | 150 | 1/s | 1.50 | - | 75 % | 0 % |\n")
        );
        assert!(chart_of(&json).expect("figures").contains("1.50 · 150 1/s"));
        assert!(table(&results).lines().any(|line| line.starts_with("work") && line.contains("1.50")));
    }
}
