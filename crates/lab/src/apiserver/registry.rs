//! Which kinds are served now: the built-in ones, and those of the established custom resource definitions.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde_json::Value;

use super::kind::{self, Kind};
use super::{crd, schema::Schema};

pub(super) struct Registry {
    kinds: Vec<Arc<Kind>>,
}

impl Registry {
    pub(super) fn new() -> Self {
        Self { kinds: kind::builtins() }
    }

    /// Take up a new set of definitions; called by the store when one changes.
    pub(super) fn rebuild<'a>(&mut self, definitions: impl Iterator<Item = &'a Value>) {
        self.kinds = kind::builtins();
        for definition in definitions {
            self.kinds.extend(crd::kinds(definition).into_iter().map(Arc::new));
        }
    }

    pub(super) fn find(&self, group: &str, version: &str, plural: &str) -> Option<Arc<Kind>> {
        let is = |kind: &&Arc<Kind>| kind.group == group && kind.version == version && kind.plural == plural;
        self.kinds.iter().find(is).cloned()
    }

    /// Any kind that stores its objects there.
    pub(super) fn of_storage(&self, storage: &str) -> Option<Arc<Kind>> {
        self.kinds.iter().find(|kind| &*kind.storage == storage).cloned()
    }

    /// Group and version pairs, core first.
    pub(super) fn group_versions(&self) -> BTreeSet<(String, String)> {
        self.kinds.iter().map(|kind| (kind.group.clone(), kind.version.clone())).collect()
    }

    pub(super) fn in_group_version(&self, group: &str, version: &str) -> Vec<Arc<Kind>> {
        let is = |kind: &&Arc<Kind>| kind.group == group && kind.version == version;
        self.kinds.iter().filter(is).cloned().collect()
    }
}

/// Schemas are compiled once, when their definition is taken up.
pub(super) fn compile(schema: &Value) -> Arc<Schema> {
    Arc::new(Schema::new(schema.clone()))
}
