//! Entries that the kernel has refused: they are left out of its maps, retried, and reported if they stay refused. Pure.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use crate::node::reconciler::{FIRST_RETRY, LONGEST_RETRY};
use egress_core::model::state::{Action, KernelState};
use egress_core::plan::executor::DataplaneError;
use egress_core::plan::refusal::KernelEntry;

/// An entry that stays refused for this long is reported.
const REPORT_AFTER: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(super) struct LeftOut {
    entries: BTreeMap<KernelEntry, RefusedEntry>,
    /// When all of them are retried.
    retry_at: Option<Instant>,
    delay: Duration,
}

/// A refused entry, with the cause.
#[derive(Debug)]
struct RefusedEntry {
    action: Action,
    why: String,
    since: Instant,
    is_reported: bool,
}

impl Default for LeftOut {
    fn default() -> Self {
        Self { entries: BTreeMap::new(), retry_at: None, delay: FIRST_RETRY }
    }
}

impl LeftOut {
    /// Notes a refused entry. Returns whether it is the first of its map.
    pub(super) fn note(&mut self, entry: KernelEntry, action: &Action, error: &DataplaneError, now: Instant) -> bool {
        let is_first = !self.entries.keys().any(|left| left.map() == entry.map());
        let (action, why) = (action.clone(), error.to_string());
        match self.entries.get_mut(&entry) {
            Some(left) => (left.action, left.why) = (action, why),
            None => drop(self.entries.insert(entry, RefusedEntry { action, why, since: now, is_reported: false })),
        }
        is_first
    }

    /// The action succeeded: its entry is in the kernel, or it has freed space for others.
    pub(super) fn done(&mut self, action: &Action, now: Instant) {
        if self.entries.is_empty() {
            return;
        }
        match KernelEntry::of(action) {
            Some(entry) => drop(self.entries.remove(&entry)),
            None => self.retry_at = self.retry_at.map(|at| at.min(now + FIRST_RETRY)),
        }
    }

    pub(super) fn actions(&self) -> impl Iterator<Item = &Action> {
        self.entries.values().map(|left| &left.action)
    }

    /// Forgets entries that are no longer desired or exist by now, and schedules the retry of the rest. A partial plan only
    /// knows the desired state of pods and prefixes.
    pub(super) fn settle(&mut self, actual: &KernelState, desired: &KernelState, is_whole: bool, now: Instant) {
        let is_judged = |entry: &KernelEntry| {
            is_whole || matches!(entry, KernelEntry::Pod(_) | KernelEntry::Owner(_) | KernelEntry::Prefix(_))
        };
        self.entries.retain(|entry, _| !is_judged(entry) || !entry.is_same(actual, desired));
        if !KernelEntry::UnknownPods.is_same(actual, desired)
            && let Some(on) = desired.on_unknown_pod
        {
            // It waits for a refused pod, which is reported.
            let action = Action::SetUnknownPods(on);
            let left = || RefusedEntry { action, why: String::new(), since: now, is_reported: true };
            self.entries.entry(KernelEntry::UnknownPods).or_insert_with(left);
        }
        if self.entries.is_empty() {
            *self = Self::default();
        } else if self.retry_at.is_none_or(|at| at <= now) {
            self.retry_at = Some(now + self.delay);
            self.delay = (self.delay * 2).min(LONGEST_RETRY);
        }
    }

    pub(super) fn retry_at(&self) -> Option<Instant> {
        self.retry_at
    }

    /// Whether the retry is due.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.retry_at.is_some_and(|at| at <= now)
    }

    /// Lasting refusals that are not reported yet, with their causes.
    pub(super) fn take_unreported(&mut self, now: Instant) -> Vec<(Action, String)> {
        let due = self.entries.values_mut().filter(|left| !left.is_reported && now >= left.since + REPORT_AFTER);
        due.map(|left| {
            left.is_reported = true;
            (left.action.clone(), left.why.clone())
        })
        .collect()
    }

    /// The number of entries of each map.
    pub(super) fn count(&self) -> BTreeMap<&'static str, usize> {
        let mut count = BTreeMap::new();
        for map in self.entries.keys().filter_map(KernelEntry::map) {
            *count.entry(map).or_default() += 1;
        }
        count
    }

    /// One line for each map.
    pub(super) fn lines(&self) -> impl Iterator<Item = String> {
        self.count().into_iter().map(|(map, count)| {
            let why =
                self.entries.iter().find(|(entry, _)| entry.map() == Some(map)).map(|(_, left)| left.why.as_str());
            format!("{count} entries of map {map} are left out: {}; see the events", why.unwrap_or_default())
        })
    }
}
