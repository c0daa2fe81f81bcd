//! What is reported: a name, a unit and, where there is one, a goal.

use std::fmt::Write as _;

use super::super::samples;
use crate::prelude::*;

/// In the order of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum ControlPlaneFigure {
    Synchronised,
    BytesToSynchronise,
    PeakMemory,
    Memory,
    MemoryAtEnd,
    CpuAtRest,
    CpuAtEvents,
    BytesPerEvent,
    EventMedian,
    EventTail,
    EventWorst,
    Scrape,
    FullCpuAtRest,
    FullScrape,
    FullEventMedian,
    FullEventTail,
    FullEventWorst,
    AllAssigned,
    AllAssignedWrites,
    LossAddresses,
    Loss,
    LossCpu,
    LossWrites,
    LeaderMemory,
}

impl ControlPlaneFigure {
    const fn name(self) -> &'static str {
        match self {
            Self::Synchronised => "one agent: start to synchronised",
            Self::BytesToSynchronise => "one agent: received until synchronised",
            Self::PeakMemory => "one agent: most memory, at its start",
            Self::Memory => "one agent: memory at rest",
            Self::MemoryAtEnd => "one agent: memory behind the events",
            Self::CpuAtRest => "one agent: CPU at rest",
            Self::CpuAtEvents => "one agent: CPU at 100 pod events/s",
            Self::BytesPerEvent => "one agent: received for an event",
            Self::EventMedian => "pod event to map, median",
            Self::EventTail => "pod event to map, 99th percentile",
            Self::EventWorst => "pod event to map, worst",
            Self::Scrape => "one agent: a scrape of /metrics",
            Self::FullCpuAtRest => "a million entries in nat: CPU at rest",
            Self::FullScrape => "a million entries in nat: a scrape of /metrics",
            Self::FullEventMedian => "a million entries in nat: pod event to map, median",
            Self::FullEventTail => "a million entries in nat: pod event to map, 99th percentile",
            Self::FullEventWorst => "a million entries in nat: pod event to map, worst",
            Self::AllAssigned => "leader: start to all objects assigned",
            Self::AllAssignedWrites => "leader: writes of objects for that",
            Self::LossAddresses => "a node's loss: its addresses",
            Self::Loss => "a node's loss: until all have another node",
            Self::LossCpu => "a node's loss: CPU time of the leader",
            Self::LossWrites => "a node's loss: writes of objects",
            Self::LeaderMemory => "leader: memory",
        }
    }

    const fn unit(self) -> &'static str {
        match self {
            Self::Synchronised | Self::AllAssigned | Self::Loss | Self::LossCpu => "s",
            Self::BytesToSynchronise => "MB",
            Self::PeakMemory | Self::Memory | Self::MemoryAtEnd | Self::LeaderMemory => "MiB",
            Self::CpuAtRest | Self::CpuAtEvents | Self::FullCpuAtRest => "% of a core",
            Self::BytesPerEvent => "bytes",
            Self::EventMedian | Self::EventTail | Self::EventWorst => "ms",
            Self::Scrape | Self::FullScrape => "ms",
            Self::FullEventMedian | Self::FullEventTail | Self::FullEventWorst => "ms",
            Self::AllAssignedWrites | Self::LossAddresses | Self::LossWrites => "",
        }
    }

    /// At most this, at the full size.
    const fn goal(self) -> Option<f64> {
        match self {
            Self::Synchronised => Some(5.0),
            Self::Memory => Some(64.0),
            Self::EventTail => Some(10.0),
            Self::CpuAtRest => Some(2.0),
            _ => None,
        }
    }
}

#[derive(Default)]
pub(in super::super) struct Figures(Vec<(ControlPlaneFigure, Vec<f64>)>);

impl Figures {
    pub(super) fn add(&mut self, figure: ControlPlaneFigure, samples: &[f64]) {
        self.0.push((figure, samples.to_vec()));
    }

    /// Of milliseconds from an event to the map: the median, the 99th percentile, the worst.
    pub(super) fn add_percentiles(&mut self, figures: [ControlPlaneFigure; 3], arrivals: &[f64]) {
        let mut sorted = arrivals.to_vec();
        sorted.sort_by(f64::total_cmp);
        let at = |percent: usize| sorted.get((sorted.len() * percent / 100).min(sorted.len().saturating_sub(1)));
        for (figure, percent) in figures.into_iter().zip([50, 99, 100]) {
            self.add(figure, at(percent).map(std::slice::from_ref).unwrap_or_default());
        }
    }

    fn sorted(&self) -> Vec<&(ControlPlaneFigure, Vec<f64>)> {
        let mut figures: Vec<_> = self.0.iter().collect();
        figures.sort_by_key(|(figure, _)| *figure);
        figures
    }
}

pub(in super::super) fn table(figures: &Figures) -> String {
    let mut text = "| what | median | unit | least to greatest | goal |\n|---|---|---|---|---|\n".to_owned();
    for (figure, samples) in figures.sorted() {
        let least = samples.iter().copied().fold(f64::INFINITY, f64::min);
        let greatest = samples.iter().copied().fold(0.0, f64::max);
        let range = if samples.len() > 1 { format!("{least:.2} to {greatest:.2}") } else { String::new() };
        let goal = figure.goal().map(|goal| format!("at most {goal}")).unwrap_or_default();
        let median = samples::median(samples);
        // Writing to a string never fails.
        let _ = writeln!(text, "| {} | {median:.2} | {} | {range} | {goal} |", figure.name(), figure.unit());
    }
    text
}

/// Leaves `control-plane.json` in the folder.
pub(in super::super) fn write(figures: &Figures, folder: &Path) -> Result<()> {
    let rows: Vec<Value> = figures
        .sorted()
        .into_iter()
        .map(|(figure, samples)| {
            json!({
                "what": figure.name(), "unit": figure.unit(), "median": samples::median(samples),
                "samples": samples, "goal": figure.goal(),
            })
        })
        .collect();
    std::fs::create_dir_all(folder)?;
    Ok(std::fs::write(folder.join("control-plane.json"), serde_json::to_string_pretty(&rows)?)?)
}
