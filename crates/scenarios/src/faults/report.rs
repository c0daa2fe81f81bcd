//! The results: a table as Markdown, and everything as JSON.

use std::fmt::Write as _;
use std::fs;
use std::time::SystemTime;

use super::cases::{ExpectedMove, FaultCase};
use super::fault_test::{FaultOutcome, SeenAddress};
use super::judge::{Double, Stretch};
use crate::prelude::*;

/// Shown of each row's violations.
const SHOWN: usize = 5;

/// One fault and its outcome.
pub(super) struct FaultRow {
    pub(super) name: &'static str,
    what: &'static str,
    arguments: String,
    outcome: FaultOutcome,
    /// Why it could not be played to its end.
    error: Option<String>,
    /// Goals that it has broken.
    pub(super) broken: Vec<String>,
}

impl FaultRow {
    pub(super) fn of(case: &FaultCase, played: Result<FaultOutcome>) -> Self {
        let (outcome, error, broken) = match played {
            Ok(outcome) => {
                let broken = broken(case.expected, &outcome);
                (outcome, None, broken)
            }
            Err(error) => (FaultOutcome::none(), Some(format!("{error:#}")), vec![format!("not played: {error:#}")]),
        };
        Self { name: case.name, what: case.what, arguments: case.arguments.join(" "), outcome, error, broken }
    }

    fn doubles(&self) -> impl Iterator<Item = (&SeenAddress, &Double)> {
        self.outcome.addresses.iter().flat_map(|seen| seen.doubles.iter().map(move |double| (seen, double)))
    }

    /// One line, for people who wait.
    pub(super) fn line(&self) -> String {
        let [.., two, without, pod, wrong, note] = self.cells();
        let state = if self.broken.is_empty() { "ok" } else { "BROKEN" };
        format!(
            "{} {state}: two emitters {two} s, none {without} s, a pod {pod} s, wrong source {wrong}; {note}",
            self.name
        )
    }

    fn cells(&self) -> [String; 7] {
        let two: Duration = self.doubles().map(|(_, double)| double.lasts()).sum();
        let strays: usize = self.doubles().map(|(_, double)| double.packets).sum();
        let two = match strays {
            0 => "0".to_owned(),
            _ => format!("{:.3} ({strays} packets)", two.as_secs_f64()),
        };
        let longest = self.outcome.addresses.iter().max_by_key(|seen| seen.gap.lasts);
        let without =
            longest.map_or("-".to_owned(), |seen| format!("{:.2} ({})", seen.gap.lasts.as_secs_f64(), seen.address));
        let of_pods =
            self.outcome.addresses.iter().filter_map(|seen| seen.of_a_pod.map(|(node, gap)| (seen.address, node, gap)));
        let pod = of_pods.max_by_key(|(_, _, gap)| gap.lasts).map_or("-".to_owned(), |(address, node, gap)| {
            format!("{:.2} ({address}, {})", gap.lasts.as_secs_f64(), node.name())
        });
        [
            self.name.to_owned(),
            self.what.to_owned(),
            two,
            without,
            pod,
            self.outcome.wrong.len().to_string(),
            self.note(),
        ]
    }

    fn note(&self) -> String {
        if let Some(error) = &self.error {
            return format!("not played: {}", error.lines().next().unwrap_or_default());
        }
        let mut notes: Vec<String> = self.outcome.addresses.iter().map(|seen| self.course(seen)).collect();
        notes.push(match self.outcome.rest {
            Some(rest) => format!("at rest {:.1} s after the end", rest.as_secs_f64()),
            None => "not at rest after 60 s".to_owned(),
        });
        notes.join("; ")
    }

    /// Where an address was, by what the wire shows.
    fn course(&self, seen: &SeenAddress) -> String {
        let mut turns: Vec<&Stretch> = Vec::new();
        for stretch in &seen.stretches {
            if turns.last().is_none_or(|last| last.node != stretch.node) {
                turns.push(stretch);
            }
        }
        let name = |node: Option<NodeNumber>| node.map_or("no node".to_owned(), NodeNumber::name);
        if turns.len() < 2 && !seen.moved() {
            return format!("{} stays on {}", seen.address, name(seen.after));
        }
        let mut parts: Vec<String> = Vec::new();
        for (place, turn) in turns.iter().enumerate() {
            let at = turn.first.duration_since(self.outcome.begun).unwrap_or_default().as_secs_f64();
            parts.push(if place == 0 { turn.node.name() } else { format!("{} at {at:.1} s", turn.node.name()) });
        }
        let shown = if parts.len() > 6 {
            format!("{} ... {}", parts[..5].join(" -> "), parts[parts.len() - 1])
        } else {
            parts.join(" -> ")
        };
        format!("{} {shown}", seen.address)
    }

    fn json(&self) -> Value {
        let since = |at: SystemTime| at.duration_since(self.outcome.begun).unwrap_or_default().as_secs_f64();
        let addresses: Vec<Value> = self
            .outcome
            .addresses
            .iter()
            .map(|seen| {
                json!({
                    "address": seen.address,
                    "before": seen.before.map(NodeNumber::name),
                    "after": seen.after.map(NodeNumber::name),
                    "two_emitters": seen.doubles.iter().map(|double| json!({
                        "stray": double.stray.name(), "other": double.other.name(), "from_s": since(double.from),
                        "seconds": double.lasts().as_secs_f64(), "packets": double.packets, "claims": double.claims,
                    })).collect::<Vec<_>>(),
                    "without_emitter": {"from_s": since(seen.gap.from), "seconds": seen.gap.lasts.as_secs_f64()},
                    "pod_without": seen.of_a_pod.map(|(node, gap)| json!({
                        "node": node.name(), "from_s": since(gap.from), "seconds": gap.lasts.as_secs_f64(),
                    })),
                    "stretches": seen.stretches.iter().map(|stretch| json!({
                        "node": stretch.node.name(), "from_s": since(stretch.first), "until_s": since(stretch.last),
                        "packets": stretch.packets,
                    })).collect::<Vec<_>>(),
                })
            })
            .collect();
        json!({
            "name": self.name,
            "what": self.what,
            "arguments": self.arguments,
            "addresses": addresses,
            "wrong_sources": self.outcome.wrong.len(),
            "packets": self.outcome.packets,
            "rest_s": self.outcome.rest.map(|rest| rest.as_secs_f64()),
            "seconds": self.outcome.took.as_secs_f64(),
            "longest_time_between_samples_ms": self.outcome.stall.as_secs_f64() * 1000.0,
            "happened": self.outcome.log,
            "broken": self.broken,
        })
    }
}

/// The goals that were missed.
fn broken(expected: ExpectedMove, outcome: &FaultOutcome) -> Vec<String> {
    let mut broken = Vec::new();
    for seen in &outcome.addresses {
        for double in seen.doubles.iter().take(SHOWN) {
            let at = double.from.duration_since(outcome.begun).unwrap_or_default();
            broken.push(format!(
                "two emitters of {}: {} beside {} from +{:.3} s for {:.3} s, {} packets, {} of them ARP",
                seen.address,
                double.stray.name(),
                double.other.name(),
                at.as_secs_f64(),
                double.lasts().as_secs_f64(),
                double.packets,
                double.claims
            ));
        }
    }
    let count = outcome.wrong.len();
    broken.extend(outcome.wrong.iter().take(SHOWN).map(|text| format!("one of {count}: {text}")));
    let moved = |seen: &&SeenAddress| seen.moved();
    match expected {
        ExpectedMove::Stays => {
            broken.extend(outcome.addresses.iter().filter(moved).map(|seen| format!("{} moved", seen.address)))
        }
        // The first is the one that the fault is about.
        ExpectedMove::Moves => broken.extend(
            outcome.addresses.first().filter(|seen| !seen.moved()).map(|seen| format!("{} did not move", seen.address)),
        ),
        ExpectedMove::Either => {}
    }
    if outcome.rest.is_none() {
        broken.push("not at rest after 60 s".to_owned());
    }
    broken
}

/// The table, and what was broken.
pub(super) fn text(rows: &[FaultRow]) -> String {
    let mut text = String::from(
        "| row | fault | two emitters, s | no emitter, s | a pod without, s | wrong source | what happened |\n|---|---|---|---|---|---|---|\n",
    );
    for row in rows {
        let [name, what, two, without, pod, wrong, note] = row.cells();
        // Writing to a String cannot fail.
        let _ = writeln!(text, "| {name} | {what} | {two} | {without} | {pod} | {wrong} | {note} |");
    }
    let stall = rows.iter().map(|row| row.outcome.stall).max().unwrap_or_default();
    let _ = writeln!(
        text,
        "\nMachine load: the longest time between two datagrams of a pod (10 ms are meant) was {} ms.",
        stall.as_millis()
    );
    let flags: Vec<String> = rows
        .iter()
        .filter(|row| !row.arguments.is_empty())
        .map(|row| format!("{} ({})", row.name, row.arguments))
        .collect();
    if !flags.is_empty() {
        let _ = writeln!(text, "\nRows with other flags than the defaults: {}.", flags.join(", "));
    }
    for row in rows {
        let _ = writeln!(
            text,
            "\n## {}\n\n{}. {} packets, {:.0} s.\n",
            row.name,
            row.what,
            row.outcome.packets,
            row.outcome.took.as_secs_f64()
        );
        for line in &row.outcome.log {
            let _ = writeln!(text, "- {line}");
        }
        for line in &row.broken {
            let _ = writeln!(text, "- BROKEN: {line}");
        }
    }
    text
}

pub(super) fn write(rows: &[FaultRow], folder: &Path) -> Result<()> {
    fs::create_dir_all(folder)?;
    fs::write(folder.join("report.md"), format!("# Faults\n\n{}", text(rows)))?;
    let rows: Vec<Value> = rows.iter().map(FaultRow::json).collect();
    fs::write(folder.join("results.json"), serde_json::to_string_pretty(&json!({ "rows": rows }))? + "\n")?;
    Ok(())
}
