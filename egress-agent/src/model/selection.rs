//! Which object serves which pod.
//!
//! Of several objects that select one pod the oldest serves, then the first by name: the same answer on every node and
//! after every restart. The others are standby, which their owners are told by an event.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use kube::core::SelectorExt;

use super::state::{EgressId, PodOwner, PodState};
use super::view::{ClusterView, EgressObject, Pod, PodKey};

/// Stands in the map for "selected by an object that has no egress ID yet". No object ever has this ID, hence no policy,
/// and a missing policy is a drop.
pub const NOT_NUMBERED: EgressId = EgressId(0);

/// An object that selects a pod which an older one serves.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Standby {
    pub object: String,
    pub pod: PodKey,
    pub served_by: String,
}

/// The egress ID of every object that has one of its own. Where two carry the same, the older keeps it and the other
/// counts as not numbered.
pub fn egress_ids(objects: &BTreeMap<String, Arc<EgressObject>>) -> BTreeMap<String, EgressId> {
    let mut taken = BTreeSet::new();
    by_rank(objects.values())
        .into_iter()
        .filter_map(|object| object.id.filter(|id| taken.insert(*id)).map(|id| (object.name.clone(), id)))
        .collect()
}

/// Oldest first, then by name.
pub fn by_rank<'a>(objects: impl IntoIterator<Item = &'a Arc<EgressObject>>) -> Vec<&'a Arc<EgressObject>> {
    let mut objects: Vec<_> = objects.into_iter().collect();
    objects.sort_by(|a, b| a.rank().cmp(&b.rank()));
    objects
}

/// The answers to "which objects select this pod", kept between pod events: they hold until an object or a namespace
/// changes.
#[derive(Debug, Default)]
pub struct Selection {
    ids: BTreeMap<String, EgressId>,
    /// The objects that select a namespace, by rank; only namespaces that have pods here.
    by_namespace: BTreeMap<String, Vec<Arc<EgressObject>>>,
}

impl Selection {
    pub fn new(view: &ClusterView) -> Self {
        Self { ids: egress_ids(&view.objects), by_namespace: BTreeMap::new() }
    }

    pub fn id(&self, object: &str) -> Option<EgressId> {
        self.ids.get(object).copied()
    }

    /// Whose the address is.
    pub fn pod_owner(view: &ClusterView, address: IpAddr) -> Option<PodOwner> {
        holder(view, address).map(|(_, pod)| PodOwner::of(&pod.uid))
    }

    /// The entry of a pod address. `None` for an address that is no pod's, or whose pod's namespace is not known yet:
    /// an unknown pod.
    pub fn pod_state(&mut self, view: &ClusterView, address: IpAddr) -> Option<PodState> {
        let (key, pod) = holder(view, address)?;
        let serving = self.selecting(view, key, pod)?.first().map(|object| object.name.clone());
        Some(match serving {
            None => PodState::Known,
            Some(object) => PodState::Selected(self.id(&object).unwrap_or(NOT_NUMBERED)),
        })
    }

    /// Everybody who must be told that another object serves, as far as these pods go.
    pub fn standby<'a>(&mut self, view: &ClusterView, pods: impl IntoIterator<Item = &'a PodKey>) -> BTreeSet<Standby> {
        let mut standby = BTreeSet::new();
        let pods = pods.into_iter().filter_map(|key| view.pods.get_key_value(key));
        for (key, pod) in pods.filter(|(_, pod)| pod.is_endpoint() && !pod.addresses.is_empty()) {
            let selecting = self.selecting(view, key, pod).unwrap_or_default();
            let Some((serving, others)) = selecting.split_first() else { continue };
            standby.extend(others.iter().map(|other| Standby {
                object: other.name.clone(),
                pod: key.clone(),
                served_by: serving.name.clone(),
            }));
        }
        standby
    }

    /// The objects that select a pod, the serving one first. `None` while the namespace is not known.
    fn selecting(&mut self, view: &ClusterView, key: &PodKey, pod: &Pod) -> Option<Vec<Arc<EgressObject>>> {
        let labels = view.namespaces.get(&key.namespace)?;
        let candidates = self.by_namespace.entry(key.namespace.clone()).or_insert_with(|| {
            let selected = |o: &&Arc<EgressObject>| o.selects.as_ref().is_none_or(|s| s.namespaces.matches(labels));
            by_rank(view.objects.values().filter(selected)).into_iter().cloned().collect()
        });
        let remembered = view.remembered.get(&pod.uid);
        let selected = |object: &&Arc<EgressObject>| match &object.selects {
            Some(selects) => selects.pods.matches(&pod.labels),
            // Nobody knows whom it selects: those that it had selected when it could be read.
            None => remembered.is_some_and(|id| self.ids.get(&object.name) == Some(id)),
        };
        Some(candidates.iter().filter(selected).cloned().collect())
    }
}
/// The pod that has the address. While a pod ends and its address is given to another, the newer one has it.
fn holder(view: &ClusterView, address: IpAddr) -> Option<(&PodKey, &Pod)> {
    let holders = view.pods.iter().filter(|(_, pod)| pod.is_endpoint() && pod.addresses.contains(&address));
    holders.max_by_key(|(key, pod)| (pod.created, *key))
}
