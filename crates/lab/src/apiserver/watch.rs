//! Watches: the log of changes from a version on, as a stream of events.
//!
//! - From version N: every change after N. Without a version, or from 0: first everything there is as ADDED.
//! - With `sendInitialEvents` the initial events end with a bookmark that says so.
//! - An object that begins to match the selectors is ADDED, one that ceases to is DELETED (as it was, at the new version).
//! - Each watch may be late by a time of its own ([`super::lag`]); from a future version it waits.
//! - A version that the log has forgotten ends the stream with an ERROR event that holds a 410 `Status`; a real server
//!   answers a watch so too, rather than with an HTTP error.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use super::kind::Kind;
use super::query::Query;
use super::represent::Representation;
use super::select::ListSelector;
use super::status::ApiError;
use super::store::{ObjectChange, Store, StoreState, at_version};

/// A real server sends one about every minute; tests would rather not wait.
const BOOKMARK_PERIOD: Duration = Duration::from_secs(5);
/// Where the client does not limit the watch.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30 * 60);
const INITIAL_EVENTS_END: &str = "k8s.io/initial-events-end";

/// What a watch looks at.
pub(super) struct Scope {
    pub kind: Arc<Kind>,
    pub namespace: Option<String>,
    pub name: Option<String>,
    pub selector: ListSelector,
    pub shape: Representation,
}

pub(super) struct Watch {
    store: Arc<Store>,
    latest: watch::Receiver<u64>,
    scope: Scope,
    cursor: u64,
    bookmarks: bool,
    next_bookmark: Instant,
    deadline: Instant,
    ready: VecDeque<String>,
    sent_any: bool,
    is_over: bool,
    /// By which its lag is drawn.
    number: u64,
    /// When it may tell of the next change, where it is late.
    due: Option<Instant>,
}

impl Watch {
    pub(super) fn start(store: &Arc<Store>, scope: Scope, query: &Query) -> Self {
        let latest = store.subscribe();
        let now = Instant::now();
        let timeout = query.timeout_secs.map_or(DEFAULT_TIMEOUT, Duration::from_secs);
        let mut watch = Self {
            store: store.clone(),
            latest,
            scope,
            cursor: 0,
            bookmarks: query.bookmarks,
            next_bookmark: now + BOOKMARK_PERIOD,
            deadline: now + timeout,
            ready: VecDeque::new(),
            sent_any: false,
            is_over: false,
            number: store.number_of_watch(),
            due: None,
        };
        let from = query.resource_version.unwrap_or_default();
        match query.send_initial_events {
            Some(true) => {
                watch.send_everything();
                watch.send_bookmark(Some(json!({INITIAL_EVENTS_END: "true"})));
            }
            None if from == 0 => watch.send_everything(),
            Some(false) if from == 0 => watch.cursor = watch.visible().0,
            _ => watch.cursor = from,
        }
        watch
    }

    /// The next event as a line, or none when the watch is over.
    pub(super) async fn next(&mut self) -> Option<String> {
        loop {
            if let Some(line) = self.ready.pop_front() {
                return Some(line);
            }
            if self.is_over {
                return None;
            }
            self.latest.borrow_and_update();
            self.catch_up();
            if !self.ready.is_empty() || self.is_over {
                continue;
            }
            tokio::select! {
                changed = self.latest.changed() => self.is_over = changed.is_err(),
                () = sleep_until(self.due.unwrap_or(self.deadline)), if self.due.is_some() => {}
                () = sleep_until(self.deadline) => self.is_over = true,
                () = sleep_until(self.next_bookmark), if self.bookmarks => self.send_bookmark(None),
            }
        }
    }

    /// The version up to which it tells now, and when that is a later one by itself.
    fn visible(&self) -> (u64, Option<Instant>) {
        let state = self.store.lock();
        match &state.lag {
            None => (state.version(), None),
            Some(lag) => state.version_of(lag.of(self.number), Instant::now()),
        }
    }

    fn catch_up(&mut self) {
        let (visible, due) = self.visible();
        self.due = due;
        let store = self.store.clone();
        let state = store.lock();
        let changes = state.changes_since(&self.scope.kind.storage, self.cursor);
        // A version from the future is waited for.
        let is_told = |change: &Arc<ObjectChange>| change.version <= visible;
        self.cursor = self.cursor.max(visible);
        let is_served = self.scope.is_served(&state);
        drop(state);
        match changes {
            Ok(changes) => changes.iter().filter(|change| is_told(change)).for_each(|change| self.send_change(change)),
            Err(refusal) => self.send_error(&refusal),
        }
        self.is_over |= !is_served;
    }

    fn send_everything(&mut self) {
        let (visible, _) = self.visible();
        let store = self.store.clone();
        let table = store.lock().list_at(&self.scope.kind.storage, visible);
        match table {
            Ok(table) => {
                self.cursor = visible;
                for object in table.into_values().filter(|object| self.scope.covers(object)).collect::<Vec<_>>() {
                    self.send("ADDED", &object);
                }
            }
            Err(refusal) => self.send_error(&refusal),
        }
    }

    fn send_change(&mut self, change: &ObjectChange) {
        let seen = |object: &Option<Arc<Value>>| object.clone().filter(|object| self.scope.covers(object));
        match (seen(&change.before), seen(&change.after)) {
            (None, Some(after)) => self.send("ADDED", &after),
            (Some(_), Some(after)) => self.send("MODIFIED", &after),
            (Some(before), None) => self.send("DELETED", &at_version(&before, change.version)),
            (None, None) => {}
        }
    }

    fn send(&mut self, event: &str, object: &Value) {
        let object = self.scope.shape.watched(&self.scope.kind, object, !self.sent_any);
        self.sent_any = true;
        self.ready.push_back(line(event, &object));
    }

    fn send_bookmark(&mut self, annotations: Option<Value>) {
        self.next_bookmark = Instant::now() + BOOKMARK_PERIOD;
        let object = self.scope.shape.bookmark(&self.scope.kind, self.cursor, annotations);
        self.ready.push_back(line("BOOKMARK", &object));
    }

    fn send_error(&mut self, refusal: &ApiError) {
        self.ready.push_back(line("ERROR", &refusal.to_status()));
        self.is_over = true;
    }
}

impl Scope {
    fn covers(&self, object: &Value) -> bool {
        let metadata = &object["metadata"];
        let is =
            |wanted: &Option<String>, field: &str| wanted.as_ref().is_none_or(|wanted| metadata[field] == **wanted);
        is(&self.namespace, "namespace") && is(&self.name, "name") && self.selector.matches(object)
    }

    /// False once the definition of a custom resource is gone.
    fn is_served(&self, state: &StoreState) -> bool {
        let kind = &self.kind;
        state.registry.find(&kind.group, &kind.version, &kind.plural).is_some()
    }
}

fn line(event: &str, object: &Value) -> String {
    let mut text = json!({"type": event, "object": object}).to_string();
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
    use super::super::lag::Lag;
    use super::super::list;
    use super::*;

    #[tokio::test]
    async fn a_watch_is_late_by_its_lag_and_a_list_from_the_cache_is_of_then() {
        const LAG: Duration = Duration::from_millis(300);
        let store = Arc::new(Store::new());
        store.lock().lag = Some(Lag::new(1, 300..=300));
        let kind = store.lock().registry.find("", "v1", "nodes").expect("a kind");
        let selector = || ListSelector::parse(&kind, "", "").expect("a selector");
        let shape = Representation::negotiate("", "").expect("a shape");
        let scope = Scope { kind: kind.clone(), namespace: None, name: None, selector: selector(), shape };
        let mut watch = Watch::start(&store, scope, &Query { resource_version: Some(1), ..Query::default() });
        let begun = Instant::now();
        store.write(|state| state.put(&kind.storage, json!({"metadata": {"name": "n"}})));
        let listed = |resource_version| {
            let query = Query { resource_version, ..Query::default() };
            list::list(&store.lock(), &kind, None, &query, &selector()).expect("a list").items.len()
        };
        assert_eq!((listed(None), listed(Some(0))), (1, 0));
        let event = watch.next().await.expect("an event");
        assert!(event.contains("ADDED") && begun.elapsed() >= LAG, "{event}");
        assert_eq!(listed(Some(0)), 1);
    }
}
