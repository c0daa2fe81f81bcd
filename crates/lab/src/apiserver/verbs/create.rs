//! Create: a new object with a uid, a creation time and generation 1.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use super::super::kind::NAMESPACES;
use super::super::status::ApiError;
use super::super::store::ObjectKey;
use super::super::{clock, fields, meta};
use super::{FieldSource, Write, WriteResult, decode, place, prepare};

pub(crate) fn create(write: &mut Write<'_>, namespace: &str, body: &Value) -> Result<WriteResult, ApiError> {
    let mut object = decode(write.kind, body)?;
    place(write.kind, &mut object, namespace)?;
    if !meta::resource_version(&object).is_empty() {
        return Err(ApiError::bad_request("resourceVersion should not be set on objects to be created"));
    }
    stamp(write, &mut object);
    prepare::for_create(write.kind, &mut object);
    write.admit(&mut object, None, FieldSource::Body)?;
    check_home(write, namespace, meta::name(&object))?;
    if write.state.get(&write.kind.storage, &ObjectKey::of(&object)).is_some() {
        return Err(ApiError::already_exists(write.kind, meta::name(&object)));
    }
    prepare::for_store(write.kind, &mut object);
    meta::metadata_mut(&mut object).remove("managedFields");
    fields::track_update(write.kind, None, &mut object, write.updater());
    Ok(write.commit(object, true))
}

/// Fields of a new object that only the server sets.
pub(crate) fn stamp(write: &Write<'_>, object: &mut Value) {
    let metadata = meta::metadata_mut(object);
    for field in ["resourceVersion", "deletionTimestamp", "deletionGracePeriodSeconds", "selfLink", "generation"] {
        metadata.remove(field);
    }
    metadata.insert("uid".into(), json!(new_uid()));
    metadata.insert("creationTimestamp".into(), json!(clock::now()));
    if write.kind.traits.tracks_generation {
        metadata.insert("generation".into(), json!(1));
    }
}

/// Is there a place for a new object: a namespace that is there to stay, a definition that is not being deleted?
pub(crate) fn check_home(write: &Write<'_>, namespace: &str, name: &str) -> Result<(), ApiError> {
    if write.kind.namespaced {
        let key = ObjectKey { namespace: String::new(), name: namespace.to_owned() };
        let Some(kind) = write.state.registry.of_storage(NAMESPACES) else {
            return Err(ApiError::internal("namespaces are not served"));
        };
        let home = write.state.find(&kind, &key)?;
        if meta::is_terminating(&home) {
            let why = format!("unable to create new content in namespace {namespace} because it is being terminated");
            return Err(ApiError::forbidden(write.kind, name, &why));
        }
    }
    let definition = ObjectKey { namespace: String::new(), name: write.kind.storage.to_string() };
    match write.state.get(super::super::kind::CRDS, &definition) {
        Some(definition) if write.kind.traits.custom && meta::is_terminating(&definition) => Err(ApiError::forbidden(
            write.kind,
            name,
            "create not allowed while custom resource definition is terminating",
        )),
        _ => Ok(()),
    }
}

/// Well mixed bits that differ at every call; nothing here has to be secret.
fn mixed() -> u64 {
    static CALLS: AtomicU64 = AtomicU64::new(0);
    let nanos = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().subsec_nanos();
    let mut bits = CALLS.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9e37_79b9_7f4a_7c15)
        ^ (u64::from(nanos) << 32)
        ^ u64::from(std::process::id());
    for (shift, factor) in [(30, 0xbf58_476d_1ce4_e5b9), (27, 0x94d0_49bb_1331_11eb)] {
        bits = (bits ^ (bits >> shift)).wrapping_mul(factor);
    }
    bits ^ (bits >> 31)
}

/// A uid in the form of a version 4 UUID.
fn new_uid() -> String {
    let (high, low) = (mixed(), mixed());
    let high = (high & 0xffff_ffff_ffff_0fff) | 0x4000;
    let low = (low & 0x3fff_ffff_ffff_ffff) | 0x8000_0000_0000_0000;
    let (a, b) = (format!("{high:016x}"), format!("{low:016x}"));
    format!("{}-{}-{}-{}-{}", &a[..8], &a[8..12], &a[12..], &b[..4], &b[4..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uids_differ() {
        let uids: std::collections::BTreeSet<String> = (0..1000).map(|_| new_uid()).collect();
        assert_eq!(uids.len(), 1000);
        assert!(uids.iter().all(|uid| uid.len() == 36 && &uid[14..15] == "4"));
    }
}
