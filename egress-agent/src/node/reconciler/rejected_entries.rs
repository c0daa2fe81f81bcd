//! Entries that the kernel has refused: they are left out of its maps, tried again, and told of where it lasts. Pure.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use crate::node::reconciler::{FIRST_RETRY, LONGEST_RETRY};
use egress_core::model::state::{Action, KernelState};
use egress_core::plan::executor::DataplaneError;
use egress_core::plan::refusal::Entry;

/// What is refused for this long is told.
const TELL_AFTER: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(super) struct LeftOut {
    entries: BTreeMap<Entry, Left>,
    /// When all of them are tried again.
    retry_at: Option<Instant>,
    patience: Duration,
}

/// Why, and since when.
#[derive(Debug)]
struct Left {
    action: Action,
    why: String,
    since: Instant,
    is_told: bool,
}

impl Default for LeftOut {
    fn default() -> Self {
        Self { entries: BTreeMap::new(), retry_at: None, patience: FIRST_RETRY }
    }
}

impl LeftOut {
    /// The kernel has refused it. Whether it is the first of its map that is left out.
    pub(super) fn note(&mut self, entry: Entry, action: &Action, error: &DataplaneError, now: Instant) -> bool {
        let is_first = !self.entries.keys().any(|left| left.map() == entry.map());
        let (action, why) = (action.clone(), error.to_string());
        match self.entries.get_mut(&entry) {
            Some(left) => (left.action, left.why) = (action, why),
            None => drop(self.entries.insert(entry, Left { action, why, since: now, is_told: false })),
        }
        is_first
    }

    /// The action has been done: it is in the kernel now, or has made room for others.
    pub(super) fn done(&mut self, action: &Action, now: Instant) {
        if self.entries.is_empty() {
            return;
        }
        match Entry::of(action) {
            Some(entry) => drop(self.entries.remove(&entry)),
            None => self.retry_at = self.retry_at.map(|at| at.min(now + FIRST_RETRY)),
        }
    }

    pub(super) fn actions(&self) -> impl Iterator<Item = &Action> {
        self.entries.values().map(|left| &left.action)
    }

    /// Forgets what is not wanted any more, or is there, and says when the rest is tried again. A round that is no whole one
    /// knows what is wanted of pods and prefixes alone.
    pub(super) fn settle(&mut self, actual: &KernelState, desired: &KernelState, is_whole: bool, now: Instant) {
        let is_judged = |entry: &Entry| is_whole || matches!(entry, Entry::Pod(_) | Entry::Owner(_) | Entry::Prefix(_));
        self.entries.retain(|entry, _| !is_judged(entry) || !entry.is_same(actual, desired));
        if !Entry::UnknownPods.is_same(actual, desired)
            && let Some(on) = desired.on_unknown_pod
        {
            // It waits for a pod that was refused, of which is told.
            let action = Action::SetUnknownPods(on);
            let left = || Left { action, why: String::new(), since: now, is_told: true };
            self.entries.entry(Entry::UnknownPods).or_insert_with(left);
        }
        if self.entries.is_empty() {
            *self = Self::default();
        } else if self.retry_at.is_none_or(|at| at <= now) {
            self.retry_at = Some(now + self.patience);
            self.patience = (self.patience * 2).min(LONGEST_RETRY);
        }
    }

    pub(super) fn retry_at(&self) -> Option<Instant> {
        self.retry_at
    }

    /// Whether all of them are to be tried again now.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.retry_at.is_some_and(|at| at <= now)
    }

    /// What has lasted and has not been told, and why.
    pub(super) fn take_untold(&mut self, now: Instant) -> Vec<(Action, String)> {
        let due = self.entries.values_mut().filter(|left| !left.is_told && now >= left.since + TELL_AFTER);
        due.map(|left| {
            left.is_told = true;
            (left.action.clone(), left.why.clone())
        })
        .collect()
    }

    /// How many of each map.
    pub(super) fn count(&self) -> BTreeMap<&'static str, usize> {
        let mut count = BTreeMap::new();
        for map in self.entries.keys().filter_map(Entry::map) {
            *count.entry(map).or_default() += 1;
        }
        count
    }

    /// One for each map.
    pub(super) fn lines(&self) -> impl Iterator<Item = String> {
        self.count().into_iter().map(|(map, count)| {
            let why =
                self.entries.iter().find(|(entry, _)| entry.map() == Some(map)).map(|(_, left)| left.why.as_str());
            format!("{count} entries of map {map} are left out: {}; see the events", why.unwrap_or_default())
        })
    }
}
