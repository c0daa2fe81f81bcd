//! Which object serves which pod.
//!
//! Of several objects that select one pod the oldest serves, then the first by name. The others are standby, which their
//! owners are told by an event. An object none of whose addresses is assigned takes no pod from one that has some, unless
//! it was serving that pod: an older object with a typing error in its addresses costs younger ones nothing, and one whose
//! node is away keeps its pods, whose connections go on when it comes back.

pub mod pod_addresses;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use crate::model::state::{EgressId, NOT_NUMBERED, PodState};
use crate::model::view::{ClusterView, EgressObject, Pod, PodKey, Remembered};
use crate::selection::pod_addresses::PodNetwork;

/// Objects that are told of one pod that another serves, the oldest. Who writes objects decides how many select it.
pub const MOST_STANDBY: usize = 16;

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
    network: PodNetwork,
    ids: BTreeMap<String, EgressId>,
    /// The objects that select a namespace, by rank; only namespaces that have pods here.
    by_namespace: BTreeMap<String, Vec<Arc<EgressObject>>>,
}

impl Selection {
    pub fn new(view: &ClusterView, network: PodNetwork) -> Self {
        Self { network, ids: egress_ids(&view.objects), by_namespace: BTreeMap::new() }
    }

    pub fn network(&self) -> &PodNetwork {
        &self.network
    }

    pub fn id(&self, object: &str) -> Option<EgressId> {
        self.ids.get(object).copied()
    }

    /// The entry of a pod address. `None` for an address that is no pod's, or whose pod's namespace is not known yet:
    /// an unknown pod.
    pub fn pod_state(&mut self, view: &ClusterView, (key, pod): (&PodKey, &Pod)) -> Option<PodState> {
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
        for (key, pod) in pods {
            if self.network.claimed_by(pod).next().is_none() {
                continue;
            }
            let selecting = self.selecting(view, key, pod).unwrap_or_default();
            let Some((serving, others)) = selecting.split_first() else { continue };
            standby.extend(others.iter().take(MOST_STANDBY).map(|other| Standby {
                object: other.name.clone(),
                pod: key.clone(),
                served_by: serving.name.clone(),
            }));
        }
        standby
    }

    /// Is a pod starting here that an object selects, or could: whose packets may come from an address that is not known yet?
    /// Likewise a pod whose namespace is not known yet, since its entry waits for that.
    pub fn awaits_addresses(&mut self, view: &ClusterView) -> bool {
        let is_alive = |(_, pod): &(&PodKey, &Pod)| pod.is_endpoint() && !pod.terminating;
        view.pods.iter().filter(is_alive).any(|(key, pod)| match self.selecting(view, key, pod) {
            None => true,
            Some(_) if !pod.starting || !pod.attached.is_empty() => false,
            // Nobody can read whom an object selects.
            Some(selecting) => !selecting.is_empty() || view.objects.values().any(|object| object.selects.is_none()),
        })
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
            None => remembered.is_some_and(|known| self.ids.get(&object.name) == Some(&known.id)),
        };
        let mut selecting: Vec<_> = candidates.iter().filter(selected).cloned().collect();
        let was_serving = |object: &EgressObject| {
            remembered.is_some_and(|known| known.had_address && self.ids.get(&object.name) == Some(&known.id))
        };
        let serving = selecting.iter().position(|object| object.has_assigned() || was_serving(object));
        if let Some(serving) = serving {
            selecting[..=serving].rotate_right(1);
        }
        Some(selecting)
    }
}

impl ClusterView {
    /// Takes note of the pods that the kernel had selected before. Their UIDs are kept: a later pod with the address of one of
    /// them is another. Whether their objects had an address then nobody knows: one that lists none has had none.
    pub fn recall(&mut self, network: &PodNetwork, selected: &BTreeMap<IpAddr, PodState>) {
        for (address, state) in selected {
            let PodState::Selected(id) = state else { continue };
            if let Some((_, pod)) = network.holder(self, *address) {
                let uid = pod.uid.clone();
                let mut objects = self.objects.values().filter(|object| object.id == Some(*id));
                let had_address = objects.any(|object| !object.addresses().is_empty());
                self.remembered.insert(uid, Remembered { id: *id, had_address });
            }
        }
    }

    /// The same of those that are selected now, of all pods.
    pub fn remember(&mut self, network: &PodNetwork, pods: &BTreeMap<IpAddr, PodState>) {
        let alive: BTreeSet<String> = self.pods.values().map(|pod| pod.uid.clone()).collect();
        self.remembered.retain(|uid, _| alive.contains(uid));
        let objects = self.objects.values().filter(|object| object.has_assigned());
        let can_serve: BTreeSet<EgressId> = objects.filter_map(|object| object.id).collect();
        for (address, state) in pods {
            self.note_state(network, *address, Some(state), |_, id| can_serve.contains(&id));
        }
    }

    /// And of one address, which has this state now.
    pub fn remember_one(&mut self, network: &PodNetwork, address: IpAddr, state: Option<&PodState>) {
        self.note_state(network, address, state, |view, id| {
            view.objects.values().any(|object| object.id == Some(id) && object.has_assigned())
        });
    }

    fn note_state(
        &mut self,
        network: &PodNetwork,
        address: IpAddr,
        state: Option<&PodState>,
        can_serve: impl Fn(&Self, EgressId) -> bool,
    ) {
        let Some(uid) = network.holder(self, address).map(|(_, pod)| pod.uid.clone()) else { return };
        match state {
            // Of an object without a number of its own nothing could be known again.
            Some(PodState::Selected(NOT_NUMBERED)) | None => {}
            Some(PodState::Selected(id)) => {
                let known = self.remembered.get(&uid).is_some_and(|known| known.id == *id && known.had_address);
                let had_address = known || can_serve(self, *id);
                self.remembered.insert(uid, Remembered { id: *id, had_address });
            }
            Some(PodState::Known) => drop(self.remembered.remove(&uid)),
        }
    }
}
