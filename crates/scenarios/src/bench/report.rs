//! What was measured, as a table for the terminal, as JSON and as a chart.

use std::collections::BTreeMap;
use std::fs;

use super::chart;
use super::machine::MeasuredOn;
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

/// results.json, and docs/performance.json.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct RecordedResults {
    measured_on: MeasuredOn,
    figures: Vec<Figure>,
}

impl RecordedResults {
    fn read(json: &str) -> Result<Self> {
        serde_json::from_str(json).context("read recorded results")
    }
}

/// Where a row of the results is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ResultsTable {
    /// Beside the other peers.
    Peers,
    Cores,
    Churn,
    Programs,
    /// Of ours alone, compared with one another.
    Load,
}

impl ResultsTable {
    fn of(work: &str, unit: &str) -> Self {
        let begins = |wanted: Work| work.starts_with(wanted.name());
        match () {
            () if unit == "ns" => Self::Programs,
            () if begins(Work::Cores) => Self::Cores,
            () if begins(Work::Churn) => Self::Churn,
            () if begins(Work::Isolation) || begins(Work::Stalls) || begins(Work::NatLog) => Self::Load,
            () => Self::Peers,
        }
    }
}

impl Figure {
    fn is_in(&self, table: ResultsTable) -> bool {
        ResultsTable::of(&self.work, &self.unit) == table
    }
}

pub(super) fn write(results: &Results, measured_on: &MeasuredOn, folder: &Path) -> Result<()> {
    fs::create_dir_all(folder)?;
    let figures: Vec<Figure> = results.cells.iter().map(|cell| Figure::of(results, cell)).collect();
    let shown: Vec<Figure> = figures
        .iter()
        .filter(|one| one.is_in(ResultsTable::Peers) || one.is_in(ResultsTable::Programs))
        .cloned()
        .collect();
    fs::write(folder.join("results.svg"), chart::svg(&shown))?;
    let recorded = RecordedResults { measured_on: measured_on.clone(), figures };
    fs::write(folder.join("results.json"), serde_json::to_string_pretty(&recorded)? + "\n")?;
    Ok(())
}

/// The machine and the commit of recorded results, as a sentence.
pub fn machine_of(json: &str) -> Result<String> {
    Ok(RecordedResults::read(json)?.measured_on.sentence())
}

/// The chart of recorded results, without single programs.
pub fn chart_of(json: &str) -> Result<String> {
    let mut figures = RecordedResults::read(json)?.figures;
    figures.retain(|figure| figure.is_in(ResultsTable::Peers));
    Ok(chart::svg(&figures))
}

/// What is in one cell of a table with a column for each case.
struct PivotCell {
    row: Vec<String>,
    column: String,
    cell: String,
}

/// Rows and columns in the order of their first cells, under the heads of what names a row.
fn pivot(heads: &[&str], items: impl IntoIterator<Item = PivotCell>) -> String {
    let (mut columns, mut rows) = (Vec::new(), Vec::<(Vec<String>, BTreeMap<String, String>)>::new());
    for PivotCell { row, column, cell } in items {
        if !columns.contains(&column) {
            columns.push(column.clone());
        }
        match rows.iter_mut().find(|(known, _)| *known == row) {
            Some((_, cells)) => drop(cells.insert(column, cell)),
            None => rows.push((row, BTreeMap::from([(column, cell)]))),
        }
    }
    if rows.is_empty() {
        return NOTHING.to_owned();
    }
    let heads: Vec<&str> = heads.iter().copied().chain(columns.iter().map(String::as_str)).collect();
    let mut table = format!("| {} |\n|{}\n", heads.join(" | "), "---|".repeat(heads.len()));
    for (row, cells) in &rows {
        let cells = columns.iter().map(|column| cells.get(column).map_or("", String::as_str));
        let cells: Vec<&str> = row.iter().map(String::as_str).chain(cells).collect();
        table += &format!("| {} |\n", cells.join(" | "));
    }
    table
}

/// In the place of a table without rows.
const NOTHING: &str = "No figures are recorded yet.\n";

/// The table of single programs and of the paths that they make: a row for each, a column for each state of the caches and
/// number of pods. The name of a work has the three, separated by commas; the name of a program may have a comma too.
pub fn programs_table_of(json: &str) -> Result<String> {
    let figures = RecordedResults::read(json)?.figures;
    let item = |Figure { work, path, median, spread, hit_rate, .. }: &Figure| {
        let mut parts = work.rsplitn(3, ", ");
        let (pods, caches, name) = (parts.next(), parts.next(), parts.next());
        let (pods, caches, name) = pods.zip(caches).zip(name).map(|((a, b), c)| (a, b, c)).context("a work's name")?;
        let hits = hit_rate.map(|part| format!(", {:.0} % hits", part * 100.0)).unwrap_or_default();
        Ok(PivotCell {
            row: vec![name.to_owned(), path.clone()],
            column: format!("{caches}, {pods}"),
            cell: format!("{} ({:.0} %{hits})", number(*median), spread * 100.0),
        })
    };
    let programs = figures.iter().filter(|figure| figure.is_in(ResultsTable::Programs));
    let mut items = programs.map(item).collect::<Result<Vec<_>>>()?;
    // Columns in this order, rows in theirs.
    let order: Vec<Vec<String>> = items.iter().map(|item| item.row.clone()).collect();
    items.sort_by_key(|item| {
        (!item.column.starts_with("hot"), order.iter().position(|row| *row == item.row).unwrap_or(usize::MAX))
    });
    Ok(pivot(&["program", "path"], items))
}

/// Rates on one core and on two: a row for each path, case and peer.
pub fn cores_table_of(json: &str) -> Result<String> {
    let figures = RecordedResults::read(json)?.figures;
    let items = figures.iter().filter(|figure| figure.is_in(ResultsTable::Cores)).filter_map(|figure| {
        let (case, column) = figure.work.strip_prefix(Work::Cores.name())?.trim_start_matches(", ").split_once(": ")?;
        Some(PivotCell {
            row: vec![case.to_owned(), figure.path.clone(), figure.peer.clone()],
            column: column.to_owned(),
            cell: number(figure.median),
        })
    });
    Ok(pivot(&["flows", "path", "peer"], items))
}

/// Rates of many flows, with and without closes: a row for each path and peer.
pub fn churn_table_of(json: &str) -> Result<String> {
    let figures = RecordedResults::read(json)?.figures;
    let items = figures.iter().filter(|figure| figure.is_in(ResultsTable::Churn)).filter_map(|figure| {
        let column = figure.work.strip_prefix(Work::Churn.name())?.trim_start_matches(", ");
        let hits = figure.hit_rate.map(|part| format!(", {:.0} % hits", part * 100.0)).unwrap_or_default();
        let ratio = figure.ratio_to_plain.unwrap_or_default();
        Some(PivotCell {
            row: vec![figure.path.clone(), figure.peer.clone()],
            column: column.to_owned(),
            cell: format!("{} ({ratio:.2}{hits})", number(figure.median)),
        })
    });
    Ok(pivot(&["path", "peer"], items))
}

/// The table of all works that the peers share.
pub fn table_of(json: &str) -> Result<String> {
    let mut table = "| work | path | peer | median | unit | to plain | to netfilter | cache hits | spread |\n|---|---|---|---|---|---|---|---|---|\n".to_owned();
    let figures = RecordedResults::read(json)?.figures;
    for figure in figures.iter().filter(|figure| figure.is_in(ResultsTable::Peers)) {
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

/// The table of works under load, for a document.
pub fn load_table_of(json: &str) -> Result<String> {
    let mut table = String::new();
    let figures = RecordedResults::read(json)?.figures;
    for figure in figures.iter().filter(|figure| figure.is_in(ResultsTable::Load)) {
        let Figure { work, path, median, unit, over_baseline, .. } = figure;
        let over = over_baseline.map_or("-".to_owned(), |over| number_of(over, unit));
        table += &format!("| {work} | {path} | {} | {unit} | {over} |\n", number_of(*median, unit));
    }
    if table.is_empty() {
        return Ok(NOTHING.to_owned());
    }
    Ok("| work | path | median | unit | over the baseline |\n|---|---|---|---|---|\n".to_owned() + &table)
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
        if ResultsTable::of(&cell.work, cell.unit) == ResultsTable::Load {
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
        "connections" | "flows" | "packets" | "blocks" => format!("{value:.0}"),
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

    fn recorded(results: &Results) -> String {
        let measured_on = MeasuredOn {
            cpu: "a CPU".to_owned(),
            cores: 2,
            kernel: "6.18".to_owned(),
            memory: None,
            commit: "0123abcd".to_owned(),
        };
        let figures = results.cells.iter().map(|cell| Figure::of(results, cell)).collect();
        serde_json::to_string(&RecordedResults { measured_on, figures }).expect("numbers and texts")
    }

    #[test]
    fn a_row_has_what_is_promised() {
        let mut results = Results::default();
        results.add("work", "local", "plain", "1/s", 100.0);
        results.add("work", "local", "ours", "1/s", 150.0);
        results.add_hit_rate("work", "local", "ours", 0.75);
        let figure = Figure::of(&results, &results.cells[1]);
        assert_eq!((figure.ratio_to_plain, figure.ratio_to_netfilter), (Some(1.5), None));
        let json = recorded(&results);
        let row = "| work | local | ours | 150 | 1/s | 1.50 | - | 75 % | 0 % |\n";
        assert!(table_of(&json).expect("figures").ends_with(row));
        assert!(chart_of(&json).expect("figures").contains("1.50 · 150 1/s"));
        assert!(table(&results).lines().any(|line| line.starts_with("work") && line.contains("1.50")));
        assert_eq!(machine_of(&json).expect("a machine"), "a CPU, 2 CPUs, Linux 6.18; commit 0123abcd.");
        for other in [cores_table_of, churn_table_of, load_table_of] {
            assert_eq!(other(&json).expect("figures"), NOTHING);
        }
    }

    #[test]
    fn cases_of_one_row_are_columns() {
        let mut results = Results::default();
        for (work, unit, value) in [
            ("cores, one pod, out: one core", "packets/s", 100.0),
            ("cores, one pod, out: two cores", "packets/s", 180.0),
            ("cores, one pod, out: two cores to one", "times", 1.8),
            ("churn, 1 k flows", "packets/s", 50.0),
            ("churn, 1 k flows, 1000 closes/s", "packets/s", 40.0),
            ("stalls, a case: longest", "ms", 7.5),
        ] {
            results.add(work, "local", "plain", unit, value);
        }
        let json = recorded(&results);
        let cores = "| flows | path | peer | one core | two cores | two cores to one |\n|---|---|---|---|---|---|\n\
                     | one pod, out | local | plain | 100 | 180 | 1.80 |\n";
        assert_eq!(cores_table_of(&json).expect("figures"), cores);
        let churn = "| path | peer | 1 k flows | 1 k flows, 1000 closes/s |\n|---|---|---|---|\n\
                     | local | plain | 50.0 (1.00) | 40.0 (1.00) |\n";
        assert_eq!(churn_table_of(&json).expect("figures"), churn);
        assert!(
            load_table_of(&json).expect("figures").ends_with("| stalls, a case: longest | local | 7.50 | ms | - |\n")
        );
        assert_eq!(table_of(&json).expect("figures").lines().count(), 2, "none of these");
    }

    #[test]
    fn hot_columns_come_first_and_rows_keep_their_order() {
        let mut results = Results::default();
        for work in ["b, hot, 1 k pods", "a, hot, 1 k pods", "b, cold, 1 k pods", "b, hot, 10 k pods"] {
            results.add(work, "local", "ours", "ns", 12.0);
        }
        let table = programs_table_of(&recorded(&results)).expect("figures");
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(lines[0], "| program | path | hot, 1 k pods | hot, 10 k pods | cold, 1 k pods |");
        assert!(lines[2].starts_with("| b | local | 12.0 (0 %) |") && lines[3].starts_with("| a | local |"), "{table}");
    }
}
