//! Problems that last, for whoever asks an agent what is wrong.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// What is wrong for longer than one line of the log: by what it is about, so that it goes when it is mended.
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
