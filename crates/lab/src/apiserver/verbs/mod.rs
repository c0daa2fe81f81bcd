//! The verbs that write: create, update, patch, delete. One pipeline for every kind.
//!
//! A write reads the live object, makes the proposed one, puts back what only the server may set, prunes and validates, tracks
//! who owns which field, and stores it: all under the store's lock. What differs between kinds is in `Kind::traits` and in
//! two places: `prepare` (what a server fills in) and `check` (what it refuses).

pub(super) mod check;
pub(super) mod create;
pub(super) mod delete;
pub(super) mod patch;
pub(super) mod prepare;
pub(super) mod update;

use std::sync::Arc;

use serde_json::{Value, json};

use super::fields::{Manager, Operation};
use super::kind::{CRDS, Kind};
use super::query::FieldValidation;
use super::status::ApiError;
use super::store::{ObjectKey, StoreState};
use super::{crd, meta};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Subresource {
    Main,
    Status,
    /// Of service accounts: gives a token and keeps nothing.
    Token,
}

impl Subresource {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Main => "",
            Self::Status => "status",
            Self::Token => "token",
        }
    }
}

/// What a write request says besides its body.
pub(super) struct WriteOptions {
    pub dry_run: bool,
    pub validation: FieldValidation,
    pub manager: String,
    pub force: bool,
}

/// One write in progress.
pub(super) struct Write<'a> {
    pub state: &'a mut StoreState,
    pub kind: &'a Kind,
    pub subresource: Subresource,
    pub options: &'a WriteOptions,
    /// Sent to the client in Warning headers.
    pub warnings: Vec<String>,
}

/// What became of it.
pub(super) struct WriteResult {
    pub object: Arc<Value>,
    pub is_new: bool,
}

/// How an unknown field is refused differs between bodies and patches.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum FieldSource {
    Body,
    Patch,
}

impl Write<'_> {
    fn updater(&self) -> Manager {
        Manager::new(&self.options.manager, Operation::Update, self.subresource.as_str(), self.kind)
    }

    /// Store the object, or only show what would be stored.
    fn commit(&mut self, object: Value, is_new: bool) -> WriteResult {
        let object = if self.options.dry_run { Arc::new(object) } else { self.state.put(&self.kind.storage, object) };
        WriteResult { object, is_new }
    }

    /// Prune, default and validate a proposed object.
    fn admit(&mut self, object: &mut Value, before: Option<&Value>, source: FieldSource) -> Result<(), ApiError> {
        let unknown = check::prune_metadata(object);
        self.report_unknown(&unknown, source)?;
        if let Some(schema) = &self.kind.schema {
            let unknown = schema.prune(object);
            self.report_unknown(&unknown, source)?;
            schema.fill_defaults(object);
        }
        if &*self.kind.storage == CRDS {
            self.report_unknown(&crd::unknown_fields(object), source)?;
        }
        let mut causes = check::metadata(self.kind, object);
        if let Some(schema) = &self.kind.schema {
            causes.extend(schema.validate(object, before));
        }
        causes.extend(check::specific(self.kind, object, before));
        if causes.is_empty() { Ok(()) } else { Err(ApiError::invalid(self.kind, meta::name(object), &causes)) }
    }

    fn report_unknown(&mut self, unknown: &[String], source: FieldSource) -> Result<(), ApiError> {
        let listed: Vec<String> = unknown.iter().map(|field| format!("unknown field {field:?}")).collect();
        match self.options.validation {
            _ if unknown.is_empty() => Ok(()),
            FieldValidation::Ignore => Ok(()),
            FieldValidation::Warn => {
                self.warnings.extend(listed);
                Ok(())
            }
            FieldValidation::Strict => {
                let why = format!("strict decoding error: {}", listed.join(", "));
                let kind = &self.kind.kind;
                Err(match source {
                    FieldSource::Body => ApiError::bad_request(format!(
                        "{kind} in version {:?} cannot be handled as a {kind}: {why}",
                        self.kind.version
                    )),
                    FieldSource::Patch => ApiError::strict_patch(&why),
                })
            }
        }
    }
}

/// The body as an object of this kind, in its stored form.
pub(super) fn decode(kind: &Kind, body: &Value) -> Result<Value, ApiError> {
    let mut object = body.clone();
    if !object.is_object() {
        return Err(ApiError::bad_request("the body of the request is not an object"));
    }
    let (api_version, name) = (meta::text(&object, "/apiVersion"), meta::text(&object, "/kind"));
    if !api_version.is_empty() && api_version != kind.api_version() {
        return Err(ApiError::bad_request(format!(
            "the API version in the data ({api_version}) does not match the expected API version ({})",
            kind.api_version()
        )));
    }
    if (!name.is_empty() && name != kind.kind) || (kind.traits.custom && (name.is_empty() || api_version.is_empty())) {
        return Err(ApiError::bad_request(format!(
            "no kind {name:?} is registered for version {api_version:?}; expected {:?} in {:?}",
            kind.kind,
            kind.api_version()
        )));
    }
    super::convert::to_stored(kind, &mut object);
    let map = meta::as_map(&mut object);
    map.insert("apiVersion".into(), json!(kind.api_version()));
    map.insert("kind".into(), json!(kind.kind));
    Ok(object)
}

/// The namespace of the URL and the one of the body must not differ.
pub(super) fn place(kind: &Kind, object: &mut Value, namespace: &str) -> Result<(), ApiError> {
    let own = meta::namespace(object);
    if kind.namespaced && !own.is_empty() && own != namespace {
        return Err(ApiError::bad_request(
            "the namespace of the provided object does not match the namespace sent on the request",
        ));
    }
    let namespace = (kind.namespaced && !namespace.is_empty()).then(|| json!(namespace));
    meta::set_or_remove(meta::metadata_mut(object), "namespace", namespace);
    Ok(())
}

/// The name of the URL and the one of the body must not differ.
pub(super) fn name_it(object: &mut Value, key: &ObjectKey) -> Result<(), ApiError> {
    let own = meta::name(object);
    if !own.is_empty() && own != key.name {
        return Err(ApiError::bad_request(format!(
            "the name of the object ({own}) does not match the name on the URL ({})",
            key.name
        )));
    }
    meta::metadata_mut(object).insert("name".into(), json!(key.name));
    Ok(())
}
