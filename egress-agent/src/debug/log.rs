//! The log of a running agent: its level, and its latest warnings.
//!
//! A warning about something that lasts has a field `condition`. A later line at level info with the same value says that it is
//! over, and the warning is shown no more. Others are shown for a day; what lasts longer is a problem of the status itself.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;

/// A warning or an error.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogEntry {
    /// When it was last written.
    pub at: SystemTime,
    pub level: String,
    pub line: String,
    /// How often in a row.
    pub times: u64,
    /// What lasts until a line at level info with the same condition.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub condition: Option<String>,
}

/// The latest warnings and errors.
#[derive(Clone, Debug, Default)]
pub struct RecentWarnings(Arc<Mutex<VecDeque<LogEntry>>>);

impl RecentWarnings {
    const KEPT: usize = 16;
    const SHOWN: Duration = Duration::from_secs(24 * 3600);

    /// Those of a day that are not known to be over.
    pub fn list(&self, now: SystemTime) -> Vec<LogEntry> {
        let kept = self.kept();
        kept.iter().filter(|entry| now.duration_since(entry.at).unwrap_or_default() < Self::SHOWN).cloned().collect()
    }

    fn kept(&self) -> MutexGuard<'_, VecDeque<LogEntry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, at: SystemTime, level: Level, LogLine { text: line, condition }: LogLine) {
        let mut kept = self.kept();
        let level = level.to_string();
        if let Some(last) = kept.back_mut().filter(|last| last.line == line && last.level == level) {
            (last.at, last.times) = (at, last.times + 1);
            return;
        }
        if kept.len() == Self::KEPT {
            kept.pop_front();
        }
        kept.push_back(LogEntry { at, level, line, times: 1, condition });
    }

    fn resolve(&self, condition: &str) {
        self.kept().retain(|entry| entry.condition.as_deref() != Some(condition));
    }
}

impl<S: Subscriber> Layer<S> for RecentWarnings {
    fn on_event(&self, event: &Event<'_>, _context: Context<'_, S>) {
        let level = *event.metadata().level();
        let is_warning = level <= Level::WARN;
        if !is_warning && event.metadata().fields().field(CONDITION).is_none() {
            return;
        }
        let mut line = LogLine::default();
        event.record(&mut line);
        match (is_warning, &line.condition) {
            (true, _) => self.note(SystemTime::now(), level, line),
            (false, Some(condition)) => self.resolve(condition),
            (false, None) => {}
        }
    }
}

/// The field that says what a warning is about, as long as it lasts.
const CONDITION: &str = "condition";

/// The message, then the fields.
#[derive(Default)]
struct LogLine {
    text: String,
    condition: Option<String>,
}

impl Visit for LogLine {
    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            CONDITION => self.condition = Some(value.to_owned()),
            _ => self.record_debug(field, &value),
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        // Writing to a string does not fail.
        let _written = match field.name() {
            "message" => write!(self.text, "{value:?}"),
            name => write!(self.text, " {name}={value:?}"),
        };
    }
}

type Set = dyn Fn(&str) -> Result<(), String> + Send + Sync;

/// The log's filter, which can change at run time.
#[derive(Clone)]
pub struct LogLevel {
    now: Arc<Mutex<String>>,
    set: Arc<Set>,
}

impl LogLevel {
    /// `set` installs another filter, or says why it cannot.
    pub fn new(now: String, set: impl Fn(&str) -> Result<(), String> + Send + Sync + 'static) -> Self {
        Self { now: Arc::new(Mutex::new(now)), set: Arc::new(set) }
    }

    pub fn now(&self) -> String {
        self.now.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn change(&self, filter: &str) -> Result<(), String> {
        let mut now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
        (self.set)(filter)?;
        filter.clone_into(&mut now);
        Ok(())
    }
}

impl std::fmt::Debug for LogLevel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("LogLevel").field(&self.now()).finish()
    }
}

#[cfg(test)]
mod tests {
    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    #[test]
    fn warnings_are_kept_with_their_fields_and_repeats_are_counted() {
        let warnings = RecentWarnings::default();
        tracing::subscriber::with_default(tracing_subscriber::registry().with(warnings.clone()), || {
            tracing::info!("all is well");
            tracing::warn!(address = %"172.18.0.100", "not claimed");
            for _ in 0..3 {
                tracing::error!(number = 7, "worse");
            }
        });
        let list: Vec<_> =
            warnings.list(SystemTime::now()).into_iter().map(|one| (one.level, one.line, one.times)).collect();
        let expected = [("WARN", "not claimed address=172.18.0.100", 1), ("ERROR", "worse number=7", 3)];
        assert_eq!(list, expected.map(|(level, line, times)| (level.to_owned(), line.to_owned(), times)));
        for number in 0..100 {
            let line = LogLine { text: number.to_string(), condition: None };
            warnings.note(SystemTime::now(), Level::WARN, line);
        }
        assert_eq!(warnings.list(SystemTime::now()).len(), RecentWarnings::KEPT);
    }

    #[test]
    fn a_warning_goes_when_its_condition_is_over_or_after_a_day() {
        let warnings = RecentWarnings::default();
        let shown = |now: SystemTime| warnings.list(now).into_iter().map(|one| one.line).collect::<Vec<_>>();
        let now = SystemTime::now();
        tracing::subscriber::with_default(tracing_subscriber::registry().with(warnings.clone()), || {
            tracing::warn!("once");
            tracing::warn!(condition = "api-server", cause = "refused", "it does not answer");
            tracing::warn!(condition = "api-server", cause = "timeout", "it does not answer");
            tracing::warn!(condition = format!("network/{}", 7), "cannot be used");
            tracing::info!("no condition");
            tracing::info!(condition = "lease", "another one is over");
            assert_eq!(shown(now).len(), 4);
            tracing::info!(condition = "api-server", "it answers again");
        });
        assert_eq!(shown(now), ["once", "cannot be used"]);
        assert_eq!(shown(now + RecentWarnings::SHOWN * 2), [""; 0], "of another day");
    }

    #[test]
    fn a_filter_that_is_refused_changes_nothing() {
        let level = LogLevel::new("info".to_owned(), |filter| match filter {
            "bad" => Err("no".to_owned()),
            _ => Ok(()),
        });
        assert_eq!((level.change("bad"), level.now()), (Err("no".to_owned()), "info".to_owned()));
        assert_eq!((level.change("debug"), level.now()), (Ok(()), "debug".to_owned()));
    }
}
