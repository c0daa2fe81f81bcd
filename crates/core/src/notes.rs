//! Lasting problems, for the status of an agent.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Current problems by topic: each entry disappears when its problem is solved.
#[derive(Clone, Debug, Default)]
pub struct Notes(Arc<Mutex<BTreeMap<&'static str, Vec<String>>>>);

impl Notes {
    pub fn set(&self, about: &'static str, lines: Vec<String>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(about, lines);
    }

    pub fn lines(&self) -> Vec<String> {
        let notes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let lines = notes.iter().flat_map(|(about, lines)| lines.iter().map(move |line| format!("{about}: {line}")));
        lines.collect()
    }
}
