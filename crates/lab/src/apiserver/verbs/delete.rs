//! Delete: at once, or marked and finished by the last finalizer.
//!
//! Grace periods are not waited for: there is no kubelet here. What a real server's controllers do is done in the same write:
//! a namespace takes its content along, a definition its objects. Owner references are not followed.

use std::sync::Arc;

use serde_json::{Value, json};

use super::super::kind::{CRDS, Kind, NAMESPACES};
use super::super::status::{ApiError, deleted};
use super::super::store::{ObjectKey, StoreState};
use super::super::{clock, meta};

/// The body of a deletion.
#[derive(Clone, Debug, Default)]
pub(crate) struct DeleteOptions {
    uid: Option<String>,
    resource_version: Option<String>,
}

impl DeleteOptions {
    pub(crate) fn parse(body: &[u8]) -> Result<Self, ApiError> {
        if body.iter().all(u8::is_ascii_whitespace) {
            return Ok(Self::default());
        }
        let body: Value = serde_json::from_slice(body)
            .map_err(|error| ApiError::bad_request(format!("error decoding DeleteOptions: {error}")))?;
        let precondition =
            |field: &str| body.pointer(&format!("/preconditions/{field}")).and_then(Value::as_str).map(str::to_owned);
        Ok(Self { uid: precondition("uid"), resource_version: precondition("resourceVersion") })
    }

    fn check(&self, kind: &Kind, object: &Value) -> Result<(), ApiError> {
        let pairs = [
            ("UID", &self.uid, meta::uid(object)),
            ("ResourceVersion", &self.resource_version, meta::resource_version(object)),
        ];
        for (what, wanted, actual) in pairs {
            if let Some(wanted) = wanted.as_deref().filter(|wanted| *wanted != actual) {
                let why =
                    format!("Precondition failed: {what} in precondition: {wanted}, {what} in object meta: {actual}");
                return Err(ApiError::conflict(kind, meta::name(object), &why));
            }
        }
        Ok(())
    }
}

pub(crate) enum Deletion {
    /// The object, as it was or with its deletion mark.
    Object(Arc<Value>),
    Done(Value),
}

pub(crate) fn delete(
    state: &mut StoreState,
    kind: &Kind,
    key: &ObjectKey,
    options: &DeleteOptions,
) -> Result<Deletion, ApiError> {
    let live = state.find(kind, key)?;
    options.check(kind, &live)?;
    let marked = mark(state, kind, &live);
    let is_gone = match &*kind.storage {
        NAMESPACES => {
            for (storage, key) in state.in_namespace(&key.name) {
                remove_or_mark(state, &storage, &key);
            }
            state.get(NAMESPACES, key).is_none()
        }
        CRDS => {
            let storage: Arc<str> = Arc::from(key.name.as_str());
            let keys: Vec<ObjectKey> = state.list(&storage).into_keys().collect();
            keys.iter().for_each(|key| remove_or_mark(state, &storage, key));
            state.get(CRDS, key).is_none()
        }
        _ => false,
    };
    let is_gone = is_gone || finish_deletion(state, kind, key);
    let shown = state.get(&kind.storage, key).unwrap_or(marked);
    Ok(outcome(kind, &live, shown, is_gone))
}

fn outcome(kind: &Kind, live: &Value, shown: Arc<Value>, is_gone: bool) -> Deletion {
    if is_gone && !kind.traits.delete_returns_object {
        return Deletion::Done(deleted(kind, meta::name(live), meta::uid(live)));
    }
    Deletion::Object(shown)
}

/// Is anything left that must go before the object may?
fn is_held(state: &StoreState, kind: &Kind, object: &Value) -> bool {
    let name = meta::name(object);
    !meta::finalizers(object).is_empty()
        || (&*kind.storage == NAMESPACES && !state.namespace_is_empty(name))
        || (&*kind.storage == CRDS && !state.list(name).is_empty())
}

/// Mark what cannot go at once; the mark shows to watches.
fn mark(state: &mut StoreState, kind: &Kind, live: &Arc<Value>) -> Arc<Value> {
    if meta::is_terminating(live) || !is_held(state, kind, live) {
        return live.clone();
    }
    let mut object = (**live).clone();
    let metadata = meta::metadata_mut(&mut object);
    metadata.insert("deletionTimestamp".into(), json!(clock::now()));
    metadata.insert("deletionGracePeriodSeconds".into(), json!(0));
    if let Some(generation) = metadata.get("generation").and_then(Value::as_u64) {
        metadata.insert("generation".into(), json!(generation + 1));
    }
    if &*kind.storage == NAMESPACES {
        object["status"]["phase"] = json!("Terminating");
    }
    state.put(&kind.storage, object)
}

fn remove_or_mark(state: &mut StoreState, storage: &Arc<str>, key: &ObjectKey) {
    let (Some(kind), Some(live)) = (state.registry.of_storage(storage), state.get(storage, key)) else {
        return;
    };
    mark(state, &kind, &live);
    finish_deletion(state, &kind, key);
}

/// Remove an object that nothing holds any more, then whatever waited for it. True when it is gone.
pub(crate) fn finish_deletion(state: &mut StoreState, kind: &Kind, key: &ObjectKey) -> bool {
    let Some(object) = state.get(&kind.storage, key) else {
        return true;
    };
    if is_held(state, kind, &object) {
        return false;
    }
    state.remove(&kind.storage, key);
    for (storage, name) in [(NAMESPACES, &*key.namespace), (CRDS, &*kind.storage)] {
        let waiting = ObjectKey { namespace: String::new(), name: name.to_owned() };
        if let (Some(owner), Some(object)) = (state.registry.of_storage(storage), state.get(storage, &waiting))
            && meta::is_terminating(&object)
        {
            finish_deletion(state, &owner, &waiting);
        }
    }
    true
}
