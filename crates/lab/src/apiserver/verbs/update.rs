//! Update: one object replaced by another, made from the live one or brought by the client.
//!
//! - The main resource leaves the status alone where there is a status subresource; the status subresource leaves everything
//!   else alone (built-in kinds let it change labels and annotations too).
//! - `generation` counts changes of anything but metadata, and but the status where it is a subresource.
//! - An update that changes nothing is not a write: the version stays.

use std::sync::Arc;

use serde_json::{Value, json};

use super::super::status::{ApiError, StatusCause};
use super::super::store::ObjectKey;
use super::super::{fields, meta};
use super::{FieldSource, Subresource, Write, WriteResult, create, decode, delete, name_it, place, prepare};

/// PUT.
pub(crate) fn replace(write: &mut Write<'_>, key: &ObjectKey, body: &Value) -> Result<WriteResult, ApiError> {
    let mut object = decode(write.kind, body)?;
    place(write.kind, &mut object, &key.namespace)?;
    name_it(&mut object, key)?;
    let live = match write.state.find(write.kind, key) {
        Ok(live) => live,
        Err(_) if write.kind.traits.create_on_update && write.subresource == Subresource::Main => {
            if !meta::resource_version(&object).is_empty() {
                return Err(ApiError::not_found(write.kind, &key.name));
            }
            return create::create(write, &key.namespace, body);
        }
        Err(refusal) => return Err(refusal),
    };
    if meta::resource_version(&object).is_empty() && !write.kind.traits.unconditional_update {
        let causes = [StatusCause::invalid("metadata.resourceVersion", &json!(0), "must be specified for an update")];
        return Err(ApiError::invalid(write.kind, &key.name, &causes));
    }
    store(write, &live, object, FieldSource::Body)
}

/// Bring a proposed object into the store in place of the live one.
pub(crate) fn store(
    write: &mut Write<'_>,
    live: &Arc<Value>,
    proposed: Value,
    source: FieldSource,
) -> Result<WriteResult, ApiError> {
    let mut object = confined(write, live, proposed)?;
    write.admit(&mut object, Some(live), source)?;
    prepare::for_store(write.kind, &mut object);
    fields::track_update(write.kind, Some(live), &mut object, write.updater());
    finish(write, live, object)
}

/// The same for an object whose managers are already brought up to date (server-side apply).
pub(crate) fn store_applied(
    write: &mut Write<'_>,
    live: &Arc<Value>,
    proposed: Value,
) -> Result<WriteResult, ApiError> {
    let mut object = confined(write, live, proposed)?;
    write.admit(&mut object, Some(live), FieldSource::Patch)?;
    prepare::for_store(write.kind, &mut object);
    finish(write, live, object)
}

/// The proposed object with everything put back that this request may not change.
fn confined(write: &Write<'_>, live: &Value, mut proposed: Value) -> Result<Value, ApiError> {
    let (kind, name) = (write.kind, meta::name(live));
    let (asked, uid) = (meta::resource_version(&proposed), meta::uid(&proposed));
    if !asked.is_empty() && asked != meta::resource_version(live) {
        return Err(ApiError::modified(kind, name));
    }
    if !uid.is_empty() && uid != meta::uid(live) {
        let why = format!("Precondition failed: UID in precondition: {uid}, UID in object meta: {}", meta::uid(live));
        return Err(ApiError::conflict(kind, name, &why));
    }
    for (pointer, own) in [("name", meta::name(&proposed)), ("namespace", meta::namespace(&proposed))] {
        if own != meta::text(live, &format!("/metadata/{pointer}")) {
            let cause = StatusCause::invalid(format!("metadata.{pointer}"), &json!(own), "field is immutable");
            return Err(ApiError::invalid(kind, name, &[cause]));
        }
    }
    let map = meta::as_map(&mut proposed);
    map.insert("apiVersion".into(), live["apiVersion"].clone());
    map.insert("kind".into(), live["kind"].clone());
    let metadata = meta::metadata_mut(&mut proposed);
    for field in
        ["uid", "creationTimestamp", "resourceVersion", "generation", "deletionTimestamp", "deletionGracePeriodSeconds"]
    {
        meta::set_or_remove(metadata, field, live["metadata"].get(field).cloned());
    }
    match write.subresource {
        Subresource::Main if kind.traits.status_subresource => {
            meta::set_or_remove(meta::as_map(&mut proposed), "status", live.get("status").cloned());
            Ok(proposed)
        }
        Subresource::Main | Subresource::Token => Ok(proposed),
        Subresource::Status => Ok(status_of(live, &proposed, kind.traits.custom)),
    }
}

/// The live object with the status of the proposed one.
fn status_of(live: &Value, proposed: &Value, is_custom: bool) -> Value {
    let mut object = live.clone();
    let managers = proposed.pointer("/metadata/managedFields").cloned();
    if !is_custom {
        object["metadata"] = proposed["metadata"].clone();
        for field in ["ownerReferences", "finalizers"] {
            meta::set_or_remove(meta::metadata_mut(&mut object), field, live["metadata"].get(field).cloned());
        }
    }
    meta::set_or_remove(meta::metadata_mut(&mut object), "managedFields", managers);
    meta::set_or_remove(meta::as_map(&mut object), "status", proposed.get("status").cloned());
    object
}

fn finish(write: &mut Write<'_>, live: &Arc<Value>, mut object: Value) -> Result<WriteResult, ApiError> {
    let kind = write.kind;
    if fields::is_same_object(live, &object) {
        return Ok(WriteResult { object: live.clone(), is_new: false });
    }
    if meta::is_terminating(live) {
        let before = meta::finalizers(live);
        if meta::finalizers(&object).iter().any(|finalizer| !before.contains(finalizer)) {
            let why = "no new finalizers can be added if the object is being deleted";
            return Err(ApiError::invalid(
                kind,
                meta::name(live),
                &[StatusCause::forbidden("metadata.finalizers", why)],
            ));
        }
    }
    if kind.traits.tracks_generation
        && counts(live, kind.traits.status_subresource) != counts(&object, kind.traits.status_subresource)
    {
        let generation = live["metadata"]["generation"].as_u64().unwrap_or_default();
        meta::metadata_mut(&mut object).insert("generation".into(), json!(generation + 1));
    }
    let is_last_step = meta::is_terminating(live) && meta::finalizers(&object).is_empty();
    let written = write.commit(object, false);
    if is_last_step && !write.options.dry_run {
        delete::finish_deletion(write.state, kind, &ObjectKey::of(&written.object));
    }
    Ok(written)
}

/// The part of an object whose changes its generation counts.
fn counts(object: &Value, without_status: bool) -> Value {
    let mut part = object.clone();
    let map = meta::as_map(&mut part);
    map.remove("metadata");
    if without_status {
        map.remove("status");
    }
    part
}
