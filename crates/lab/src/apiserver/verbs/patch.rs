//! Patch: the live object as clients of this version see it, patched, then stored like an update.

use serde_json::{Value, json};

use super::super::fields::{Manager, Operation};
use super::super::patch::{PatchType, apply};
use super::super::query::FieldValidation;
use super::super::status::ApiError;
use super::super::store::ObjectKey;
use super::super::{convert, fields, meta};
use super::{FieldSource, Subresource, Write, WriteResult, create, decode, name_it, place, prepare, update};

pub(crate) fn patch(
    write: &mut Write<'_>,
    key: &ObjectKey,
    how: PatchType,
    body: &[u8],
) -> Result<WriteResult, ApiError> {
    if how == PatchType::Apply {
        return apply_patch(write, key, body);
    }
    let live = write.state.find(write.kind, key)?;
    let mut object = (*live).clone();
    convert::to_served(write.kind, &mut object);
    let unreadable = |error: serde_json::Error| ApiError::bad_request(format!("error decoding patch: {error}"));
    match how {
        PatchType::Json => {
            let operations: json_patch::Patch = serde_json::from_slice(body).map_err(unreadable)?;
            json_patch::patch(&mut object, &operations).map_err(|_| ApiError::patch_does_not_apply())?;
        }
        PatchType::Merge | PatchType::Apply => {
            let patch: Value = serde_json::from_slice(body).map_err(unreadable)?;
            if !patch.is_object() {
                return Err(ApiError::bad_request("error decoding patch: it is not an object"));
            }
            json_patch::merge(&mut object, &patch);
        }
    }
    let object = decode(write.kind, &object)?;
    update::store(write, &live, object, FieldSource::Patch)
}

fn apply_patch(write: &mut Write<'_>, key: &ObjectKey, body: &[u8]) -> Result<WriteResult, ApiError> {
    let patch: Value =
        serde_yaml::from_slice(body).map_err(|error| ApiError::bad_request(format!("error decoding YAML: {error}")))?;
    for field in ["apiVersion", "kind"] {
        if meta::text(&patch, &format!("/{field}")).is_empty() {
            return Err(ApiError::bad_request(format!(
                "invalid object type: {field} must be set in an applied object"
            )));
        }
    }
    if patch.pointer("/metadata/managedFields").is_some_and(|managers| !managers.is_null()) {
        return Err(ApiError::bad_request("metadata.managedFields must be nil"));
    }
    let mut patch = decode(write.kind, &patch)?;
    place(write.kind, &mut patch, &key.namespace)?;
    name_it(&mut patch, key)?;
    refuse_unknown(write, &patch)?;
    // What this resource does not write, its patches do not own.
    match write.subresource {
        Subresource::Main if write.kind.traits.status_subresource => drop(meta::as_map(&mut patch).remove("status")),
        Subresource::Main | Subresource::Token => {}
        Subresource::Status => meta::as_map(&mut patch).retain(|field, _| field != "spec"),
    }
    let manager = Manager::new(&write.options.manager, Operation::Apply, write.subresource.as_str(), write.kind);
    let force = write.options.force;
    match write.state.get(&write.kind.storage, key) {
        Some(live) => {
            let asked = meta::resource_version(&patch);
            if !asked.is_empty() && asked != meta::resource_version(&live) {
                return Err(ApiError::modified(write.kind, &key.name));
            }
            let merged = apply::apply(write.kind, &live, &patch, manager, force)?;
            update::store_applied(write, &live, merged)
        }
        None if write.subresource == Subresource::Status => Err(ApiError::not_found(write.kind, &key.name)),
        None => apply_new(write, key, patch, manager),
    }
}

/// An applied object that is not there yet is created.
fn apply_new(write: &mut Write<'_>, key: &ObjectKey, patch: Value, manager: Manager) -> Result<WriteResult, ApiError> {
    create::check_home(write, &key.namespace, &key.name)?;
    if !meta::uid(&patch).is_empty() {
        let why = "uid mismatch: the provided object specified uid, and no existing object was found";
        return Err(ApiError::conflict(write.kind, &key.name, why));
    }
    let mut object = apply::apply(write.kind, &json!({}), &patch, manager, false)?;
    let managers = fields::managers(&object);
    create::stamp(write, &mut object);
    prepare::for_create(write.kind, &mut object);
    write.admit(&mut object, None, FieldSource::Patch)?;
    prepare::for_store(write.kind, &mut object);
    fields::set_managers(&mut object, &managers);
    Ok(write.commit(object, true))
}

/// A real server cannot type an applied object with unknown fields, whatever the field validation is.
fn refuse_unknown(write: &Write<'_>, patch: &Value) -> Result<(), ApiError> {
    let Some(schema) = &write.kind.schema else {
        return Ok(());
    };
    let unknown = schema.prune(&mut patch.clone());
    if unknown.is_empty() || write.options.validation == FieldValidation::Ignore {
        return Ok(());
    }
    let listed: Vec<String> = unknown.iter().map(|field| format!(".{field}: field not declared in schema")).collect();
    let about = format!(
        "{}/{}; {}, Kind={}",
        meta::namespace(patch),
        meta::name(patch),
        write.kind.api_version(),
        write.kind.kind
    );
    Err(ApiError::internal(format!("failed to create typed patch object ({about}): {}", listed.join(", "))))
}
