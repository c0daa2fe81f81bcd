//! EgressAssignments, as the controller writes them. Each task of the controller has those of its own kinds of objects.

use std::collections::{BTreeMap, BTreeSet};

use futures::{Stream, StreamExt};
use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams, Preconditions};
use kube::{Client, Error, ResourceExt};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::api_outage::ApiOutages;
use crate::policy::status::WriteError;
use crate::watches::{config, updates};
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

/// The assignments of one kind of objects: those made of it, and those with a name that one of it may need.
pub(crate) fn watch_kind(
    client: &Client,
    outages: &ApiOutages,
    what: &'static str,
    (kind, prefix): (SourceKind, &'static str),
) -> impl Stream<Item = Update<String, StoredAssignment>> + Send + use<> {
    watch(client, outages, what, move |name, stored| name.starts_with(prefix) || stored.kind() == Some(kind))
}

/// The assignments that a task wants, by name and content. `what` is what they are, for reports of outages.
pub(crate) fn watch<F: Fn(&str, &StoredAssignment) -> bool + Send + 'static>(
    client: &Client,
    outages: &ApiOutages,
    what: &'static str,
    is_wanted: F,
) -> impl Stream<Item = Update<String, StoredAssignment>> + Send + use<F> {
    let assignments = Api::all_with(client.clone(), &crd::egress_assignment_resource());
    let all = updates((what, outages.clone()), assignments, config(), ResourceExt::name_any, StoredAssignment::of);
    let mut wanted = ShownAssignments { is_wanted, names: BTreeSet::new() };
    all.filter_map(move |update| std::future::ready(wanted.of(update)))
}

/// Which assignments a task has been shown.
struct ShownAssignments<F> {
    is_wanted: F,
    names: BTreeSet<String>,
}

impl<F: Fn(&str, &StoredAssignment) -> bool> ShownAssignments<F> {
    /// What the task is shown of an update.
    fn of(&mut self, update: Update<String, StoredAssignment>) -> Option<Update<String, StoredAssignment>> {
        match update {
            Update::Replaced(mut all) => {
                all.retain(|name, stored| (self.is_wanted)(name, stored));
                self.names = all.keys().cloned().collect();
                Some(Update::Replaced(all))
            }
            Update::Changed(name, stored) if (self.is_wanted)(&name, &stored) => {
                self.names.insert(name.clone());
                Some(Update::Changed(name, stored))
            }
            Update::Changed(name, _) | Update::Removed(name) => self.names.take(&name).map(Update::Removed),
        }
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

/// Takes an update of the objects of one kind, and notes the kind when all are known. Returns whether the update says anything new.
pub(crate) fn put<K: Ord, V: PartialEq>(
    all: &mut BTreeMap<K, V>,
    update: Update<K, V>,
    (listed, kind): (&mut BTreeSet<u8>, u8),
) -> bool {
    match update {
        Update::Replaced(new) => {
            let is_first = listed.insert(kind);
            let former = std::mem::replace(all, new);
            is_first || former != *all
        }
        Update::Changed(key, value) => {
            let is_news = all.get(&key) != Some(&value);
            all.insert(key, value);
            is_news
        }
        Update::Removed(key) => all.remove(&key).is_some(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made_of(kind: &str) -> StoredAssignment {
        StoredAssignment { uid: kind.to_owned(), spec: json!({"rules": [{"from": {"kind": kind}}]}) }
    }

    #[test]
    fn a_task_is_shown_its_own_assignments_and_when_they_are_no_more() {
        let is_wanted = |_: &str, stored: &StoredAssignment| stored.kind() == Some(SourceKind::Egress);
        let mut wanted = ShownAssignments { is_wanted, names: BTreeSet::new() };
        let [own, other] = ["Egress", "EgressService"].map(made_of);
        let [a, b] = ["a", "b"].map(str::to_owned);
        let all = BTreeMap::from([(a.clone(), own.clone()), (b.clone(), other.clone())]);
        let Some(Update::Replaced(shown)) = wanted.of(Update::Replaced(all)) else { panic!("a list is always shown") };
        assert_eq!(shown, BTreeMap::from([(a.clone(), own.clone())]));
        assert!(wanted.of(Update::Changed(b.clone(), other.clone())).is_none());
        assert!(wanted.of(Update::Removed(b.clone())).is_none());
        assert!(matches!(wanted.of(Update::Changed(b.clone(), own)), Some(Update::Changed(name, _)) if name == b));
        // It is of another kind from now on.
        assert!(
            matches!(wanted.of(Update::Changed(b.clone(), other.clone())), Some(Update::Removed(name)) if name == b)
        );
        assert!(wanted.of(Update::Changed(b, other)).is_none());
        assert!(matches!(wanted.of(Update::Removed(a.clone())), Some(Update::Removed(name)) if name == a));
    }

    #[test]
    fn an_update_is_news_if_it_changes_what_is_known() {
        let (mut all, mut listed) = (BTreeMap::new(), BTreeSet::new());
        let mut put = |update| put(&mut all, update, (&mut listed, 0));
        assert!(put(Update::Replaced(BTreeMap::new())), "the first list, although it is empty");
        assert!(!put(Update::Replaced(BTreeMap::new())));
        assert!(put(Update::Changed("a", 1)) && !put(Update::Changed("a", 1)) && put(Update::Changed("a", 2)));
        assert!(put(Update::Removed("a")) && !put(Update::Removed("a")));
        assert_eq!(listed, BTreeSet::from([0]));
    }
}
