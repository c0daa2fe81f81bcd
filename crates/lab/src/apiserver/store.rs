//! The object store: every object of every kind, one version counter, and a bounded history of changes.
//!
//! - One lock around everything. A verb reads, decides and writes under it, so a write is atomic and versions are total.
//! - Every change takes the next version and goes to the log with the object before and after; watches read the log from
//!   where they are, lists at an old version undo the log backwards. A request for an older version gets
//!   `Expired` (410), as from a real server after compaction.
//! - Objects are immutable behind `Arc`: readers keep what they saw, and answers are made outside the lock.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::Instant;

use super::kind::Kind;
use super::lag::Lag;
use super::registry::Registry;
use super::status::ApiError;
use super::{kind, meta};

/// Changes that the log remembers.
const HISTORY: usize = 20_000;

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ObjectKey {
    /// Empty for cluster-scoped objects.
    pub namespace: String,
    pub name: String,
}

impl ObjectKey {
    pub(super) fn of(object: &Value) -> Self {
        Self { namespace: meta::namespace(object).to_owned(), name: meta::name(object).to_owned() }
    }
}

pub(super) type ObjectTable = BTreeMap<ObjectKey, Arc<Value>>;

/// One write: the object before (none: it was created) and after (none: it was removed).
pub(super) struct ObjectChange {
    pub version: u64,
    at: Instant,
    storage: Arc<str>,
    key: ObjectKey,
    pub before: Option<Arc<Value>>,
    pub after: Option<Arc<Value>>,
}

/// What was stored at a version.
pub struct Backup {
    version: u64,
    tables: BTreeMap<Arc<str>, ObjectTable>,
}

pub(super) struct Store {
    state: Mutex<StoreState>,
    latest: watch::Sender<u64>,
    /// Watches so far.
    begun: AtomicU64,
}

pub(super) struct StoreState {
    version: u64,
    /// The log holds every change after this version.
    forgotten: u64,
    tables: BTreeMap<Arc<str>, ObjectTable>,
    log: VecDeque<Arc<ObjectChange>>,
    /// How often each table was written to.
    written: BTreeMap<Arc<str>, u64>,
    pub registry: Registry,
    /// How far behind watches and lists from the cache are; none: not at all.
    pub lag: Option<Lag>,
}

impl Store {
    pub(super) fn new() -> Self {
        let state = StoreState {
            version: 1,
            forgotten: 1,
            tables: BTreeMap::new(),
            log: VecDeque::new(),
            written: BTreeMap::new(),
            registry: Registry::new(),
            lag: None,
        };
        Self { state: Mutex::new(state), latest: watch::Sender::new(1), begun: AtomicU64::new(0) }
    }

    /// The state under its lock. Nothing awaits while it is held.
    pub(super) fn lock(&self) -> MutexGuard<'_, StoreState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Run a write under the lock and wake the watches if it changed anything.
    pub(super) fn write<T>(&self, work: impl FnOnce(&mut StoreState) -> T) -> T {
        let mut state = self.lock();
        let outcome = work(&mut state);
        let version = state.version;
        drop(state);
        self.latest.send_if_modified(|latest| std::mem::replace(latest, version) != version);
        outcome
    }

    pub(super) fn subscribe(&self) -> watch::Receiver<u64> {
        self.latest.subscribe()
    }

    /// The number of a watch that begins.
    pub(super) fn number_of_watch(&self) -> u64 {
        self.begun.fetch_add(1, Ordering::Relaxed)
    }

    /// How many watches there are.
    pub(super) fn watches(&self) -> usize {
        self.latest.receiver_count()
    }

    /// All that is stored now.
    pub(super) fn save(&self) -> Backup {
        let state = self.lock();
        Backup { version: state.version, tables: state.tables.clone() }
    }

    /// As a restore of etcd from a backup does it: objects and version are those of then, and history begins there. Kinds stay as
    /// they are. Says how many versions are lost.
    pub(super) fn go_back(&self, backup: &Backup) -> u64 {
        self.write(|state| {
            let lost = state.version - backup.version;
            state.version = backup.version;
            state.tables.clone_from(&backup.tables);
            state.log.clear();
            state.forgotten = state.version;
            lost
        })
    }

    /// Forget all history: every watch and list from an earlier version is now too old.
    pub(super) fn compact(&self) {
        self.write(|state| {
            state.version += 1;
            state.log.clear();
            state.forgotten = state.version;
        });
    }
}

impl StoreState {
    pub(super) fn version(&self) -> u64 {
        self.version
    }

    pub(super) fn get(&self, storage: &str, key: &ObjectKey) -> Option<Arc<Value>> {
        self.tables.get(storage)?.get(key).cloned()
    }

    pub(super) fn find(&self, kind: &Kind, key: &ObjectKey) -> Result<Arc<Value>, ApiError> {
        self.get(&kind.storage, key).ok_or_else(|| ApiError::not_found(kind, &key.name))
    }

    /// Store an object under the next version.
    pub(super) fn put(&mut self, storage: &Arc<str>, mut object: Value) -> Arc<Value> {
        self.version += 1;
        meta::metadata_mut(&mut object).insert("resourceVersion".into(), json!(self.version.to_string()));
        let key = ObjectKey::of(&object);
        let object = Arc::new(object);
        let before = self.tables.entry(storage.clone()).or_default().insert(key.clone(), object.clone());
        self.record(storage, key, before, Some(object.clone()));
        object
    }

    /// Remove an object; what is returned carries the version of its removal.
    pub(super) fn remove(&mut self, storage: &Arc<str>, key: &ObjectKey) -> Option<Arc<Value>> {
        let before = self.tables.get_mut(storage)?.remove(key)?;
        self.version += 1;
        let last = at_version(&before, self.version);
        self.record(storage, key.clone(), Some(before), None);
        Some(last)
    }

    fn record(&mut self, storage: &Arc<str>, key: ObjectKey, before: Option<Arc<Value>>, after: Option<Arc<Value>>) {
        let change =
            ObjectChange { version: self.version, at: Instant::now(), storage: storage.clone(), key, before, after };
        self.log.push_back(Arc::new(change));
        *self.written.entry(storage.clone()).or_default() += 1;
        if self.log.len() > HISTORY
            && let Some(oldest) = self.log.pop_front()
        {
            self.forgotten = oldest.version;
        }
        if &**storage == kind::CRDS {
            let definitions = self.tables.get(kind::CRDS).map(ObjectTable::values);
            self.registry.rebuild(definitions.into_iter().flatten().map(|object| &**object));
        }
    }

    /// How often a table was written to so far.
    pub(super) fn written(&self, storage: &str) -> u64 {
        self.written.get(storage).copied().unwrap_or_default()
    }

    /// Everything in a table, in the order of its keys.
    pub(super) fn list(&self, storage: &str) -> ObjectTable {
        self.tables.get(storage).cloned().unwrap_or_default()
    }

    /// A table as it was at a version.
    pub(super) fn list_at(&self, storage: &str, version: u64) -> Result<ObjectTable, ApiError> {
        let mut table = self.list(storage);
        for change in self.changes_since(storage, version)?.iter().rev() {
            match &change.before {
                Some(before) => table.insert(change.key.clone(), before.clone()),
                None => table.remove(&change.key),
            };
        }
        Ok(table)
    }

    /// The changes of a table after a version, oldest first.
    pub(super) fn changes_since(&self, storage: &str, version: u64) -> Result<Vec<Arc<ObjectChange>>, ApiError> {
        if version < self.forgotten {
            return Err(ApiError::expired(version, self.forgotten));
        }
        let start = self.log.partition_point(|change| change.version <= version);
        Ok(self.log.range(start..).filter(|change| &*change.storage == storage).cloned().collect())
    }

    /// The version of so long ago, as far as the log remembers; and when the next one becomes that.
    pub(super) fn version_of(&self, age: Duration, now: Instant) -> (u64, Option<Instant>) {
        let first_hidden = self.log.partition_point(|change| change.at + age <= now);
        let before = first_hidden.checked_sub(1).and_then(|last| self.log.get(last));
        match self.log.get(first_hidden) {
            None => (self.version, None),
            Some(hidden) => (before.map_or(self.forgotten, |change| change.version), Some(hidden.at + age)),
        }
    }

    /// Does anything live in this namespace?
    pub(super) fn namespace_is_empty(&self, namespace: &str) -> bool {
        self.in_namespace(namespace).is_empty()
    }

    /// Storage and key of everything in a namespace.
    pub(super) fn in_namespace(&self, namespace: &str) -> Vec<(Arc<str>, ObjectKey)> {
        let all = self.tables.iter().flat_map(|(storage, table)| table.keys().map(move |key| (storage, key)));
        all.filter(|(_, key)| !namespace.is_empty() && key.namespace == namespace)
            .map(|(storage, key)| (storage.clone(), key.clone()))
            .collect()
    }
}

/// The same object with another resource version.
pub(super) fn at_version(object: &Value, version: u64) -> Arc<Value> {
    let mut object = object.clone();
    meta::metadata_mut(&mut object).insert("resourceVersion".into(), json!(version.to_string()));
    Arc::new(object)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(name: &str, value: u32) -> Value {
        json!({"metadata": {"name": name}, "data": value})
    }

    #[test]
    fn an_old_list_undoes_the_log() {
        let store = Store::new();
        let table: Arc<str> = Arc::from("t");
        let middle = store.write(|state| {
            state.put(&table, object("a", 1));
            state.put(&table, object("b", 1));
            state.version()
        });
        store.write(|state| {
            state.put(&table, object("a", 2));
            state.remove(&table, &ObjectKey::of(&object("b", 1)));
            state.put(&table, object("c", 1));
        });
        let state = store.lock();
        let now: Vec<String> = state.list("t").keys().map(|key| key.name.clone()).collect();
        assert_eq!(now, ["a", "c"]);
        let then = state.list_at("t", middle).expect("the log remembers");
        let names: Vec<&str> = then.keys().map(|key| key.name.as_str()).collect();
        assert_eq!(names, ["a", "b"]);
        assert_eq!(then.values().next().map(|a| a["data"].clone()), Some(json!(1)));
    }

    #[test]
    fn a_restored_backup_knows_nothing_of_later() {
        let store = Store::new();
        let table: Arc<str> = Arc::from("t");
        store.write(|state| state.put(&table, object("a", 1)));
        let backup = store.save();
        store.write(|state| {
            state.put(&table, object("a", 2));
            state.put(&table, object("b", 1));
        });
        store.go_back(&backup);
        let state = store.lock();
        assert_eq!(state.version(), backup.version);
        let now = state.list("t");
        assert_eq!(now.len(), 1);
        assert_eq!(now.values().next().map(|a| a["data"].clone()), Some(json!(1)));
    }

    #[test]
    fn what_is_forgotten_is_expired() {
        let store = Store::new();
        let table: Arc<str> = Arc::from("t");
        let old = store.write(|state| {
            state.put(&table, object("a", 1));
            state.version()
        });
        store.compact();
        let refusal = store.lock().changes_since("t", old).map(|_| ()).expect_err("history is gone");
        assert_eq!(refusal.code(), 410);
    }
}
