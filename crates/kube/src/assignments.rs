//! EgressAssignments, as the controller writes them. Each task of the controller has those of its own kinds of objects.

use std::collections::BTreeMap;

use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams, Preconditions};
use kube::{Client, Error};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::policy::status::WriteError;
use crate::{FIELD_MANAGER, crd, post_params};
use egress_core::model::policy::SourceKind;
use egress_core::model::view::Update;

/// An EgressAssignment as the API server has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredAssignment {
    pub uid: String,
    pub spec: Value,
}

impl StoredAssignment {
    pub(crate) fn of(object: &DynamicObject) -> Self {
        Self { uid: object.metadata.uid.clone().unwrap_or_default(), spec: object.data["spec"].clone() }
    }

    /// The kind of the objects that it was made of; `None` if it names none.
    pub fn kind(&self) -> Option<SourceKind> {
        SourceKind::deserialize(&self.spec["rules"][0]["from"]["kind"]).ok()
    }
}

/// Creates, changes and deletes assignments.
#[derive(Clone)]
pub struct AssignmentWriter {
    assignments: Api<DynamicObject>,
}

impl AssignmentWriter {
    pub fn new(client: &Client) -> Self {
        Self { assignments: Api::all_with(client.clone(), &crd::egress_assignment_resource()) }
    }

    /// Creates an assignment, or gives it this spec.
    pub async fn assign(&self, name: &str, spec: &Value, former: Option<&StoredAssignment>) -> Result<(), WriteError> {
        match former {
            None => {
                let mut object = DynamicObject::new(name, &crd::egress_assignment_resource());
                object.data = json!({"spec": spec});
                ignored(self.assignments.create(&post_params(), &object).await, 409)
            }
            Some(former) => {
                let ops = json!([
                    {"op": "test", "path": "/metadata/uid", "value": former.uid},
                    {"op": "replace", "path": "/spec", "value": spec},
                ]);
                let patch = Patch::Json::<()>(serde_json::from_value(ops)?);
                ignored(self.assignments.patch(name, &patch_params(), &patch).await, 404)
            }
        }
    }

    /// Deletes an assignment.
    pub async fn unassign(&self, name: &str, former: &StoredAssignment) -> Result<(), WriteError> {
        let of_this = Preconditions { uid: Some(former.uid.clone()), resource_version: None };
        let params = DeleteParams { preconditions: Some(of_this), ..DeleteParams::default() };
        ignored(self.assignments.delete(name, &params).await, 404)
    }
}

/// A refusal with this code says that the object is gone, or already there: the watch brings what is.
pub(crate) fn ignored<T>(answer: Result<T, Error>, code: u16) -> Result<(), WriteError> {
    match answer {
        Err(Error::Api(status)) if status.code == code => Ok(()),
        answer => Ok(answer.map(drop)?),
    }
}

pub(crate) fn patch_params() -> PatchParams {
    PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() }
}

/// Takes a change; whether it is a whole list.
pub(crate) fn put<K: Ord, V>(all: &mut BTreeMap<K, V>, update: Update<K, V>) -> bool {
    match update {
        Update::Replaced(new) => {
            *all = new;
            return true;
        }
        Update::Changed(key, value) => drop(all.insert(key, value)),
        Update::Removed(key) => drop(all.remove(&key)),
    }
    false
}
