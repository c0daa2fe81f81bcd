//! Which policy serves which pod.
//!
//! Of several policies that select a pod the oldest serves it, then the first by name. The others are standby, and an
//! event reports that. A policy without an assigned address takes no pod from one that has some, unless it already
//! serves the pod: so an older policy with a typing error costs younger ones nothing, and one whose node is away keeps
//! its pods, whose connections continue when the node returns.
//!
//! A pod has addresses of both families, and a policy an egress ID of each, so the question is asked for each family.

pub mod pod_addresses;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use crate::model::policy::{EgressPolicy, Policies, PolicyKey};
use crate::model::state::{EgressId, EgressIds, Family, NOT_NUMBERED, PodState, family_of};
use crate::model::view::{ClusterView, Pod, PodKey, Remembered};
use crate::selection::pod_addresses::PodAddressSpace;

/// The oldest standby policies reported for one pod. Authors of policies decide how many select it.
pub const MOST_STANDBY: usize = 16;

/// A policy that selects a pod which an older one serves.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Standby {
    pub policy: PolicyKey,
    pub pod: PodKey,
    pub served_by: PolicyKey,
}

/// The egress IDs of all policies that have one. If two policies carry the same ID, the older keeps it and the other
/// counts as not numbered.
pub fn egress_ids(policies: &Policies) -> BTreeMap<PolicyKey, EgressIds> {
    let mut taken = BTreeSet::new();
    let mut own = |policy: &EgressPolicy| policy.published.ids.retained(|id| taken.insert(id));
    let all = by_rank(policies.values()).into_iter().map(|policy| (policy.key().clone(), own(policy)));
    all.filter(|(_, ids)| *ids != EgressIds::NONE).collect()
}

/// Oldest first, then by name.
pub fn by_rank<'a>(policies: impl IntoIterator<Item = &'a Arc<EgressPolicy>>) -> Vec<&'a Arc<EgressPolicy>> {
    let mut policies: Vec<_> = policies.into_iter().collect();
    policies.sort_by(|a, b| a.rank().cmp(&b.rank()));
    policies
}

/// Which policies select a pod, cached between pod events: valid until a policy or a namespace changes.
#[derive(Debug, Default)]
pub struct Selection {
    network: PodAddressSpace,
    ids: BTreeMap<PolicyKey, EgressIds>,
    /// The policies that select a namespace, by rank; only namespaces that have pods here.
    by_namespace: BTreeMap<String, Vec<Arc<EgressPolicy>>>,
}

impl Selection {
    pub fn new(view: &ClusterView, network: PodAddressSpace) -> Self {
        Self { network, ids: egress_ids(&view.policies), by_namespace: BTreeMap::new() }
    }

    pub fn network(&self) -> &PodAddressSpace {
        &self.network
    }

    pub fn ids(&self, policy: &PolicyKey) -> EgressIds {
        self.ids.get(policy).copied().unwrap_or_default()
    }

    fn id(&self, policy: &PolicyKey, family: Family) -> Option<EgressId> {
        self.ids(policy).of(family)
    }

    /// The entry of a pod's address of this family. `None` while the pod's namespace is unknown: an unknown pod.
    pub fn pod_state(&mut self, view: &ClusterView, (key, pod): (&PodKey, &Pod), family: Family) -> Option<PodState> {
        let serving = self.selecting(view, (key, pod), family)?.first().map(|policy| policy.key().clone());
        Some(match serving {
            None => PodState::Known,
            Some(policy) => PodState::Selected(self.id(&policy, family).unwrap_or(NOT_NUMBERED)),
        })
    }

    /// The policies that select these pods and do not serve them.
    pub fn standby<'a>(&mut self, view: &ClusterView, pods: impl IntoIterator<Item = &'a PodKey>) -> BTreeSet<Standby> {
        let mut standby = BTreeSet::new();
        let pods = pods.into_iter().filter_map(|key| view.pods.get_key_value(key));
        for (key, pod) in pods {
            let families: BTreeSet<Family> = self.network.claimed_by(pod).map(family_of).collect();
            for family in families {
                let selecting = self.selecting(view, (key, pod), family).unwrap_or_default();
                let Some((serving, others)) = selecting.split_first() else { continue };
                standby.extend(others.iter().take(MOST_STANDBY).map(|other| Standby {
                    policy: other.key().clone(),
                    pod: key.clone(),
                    served_by: serving.key().clone(),
                }));
            }
        }
        standby
    }

    /// Whether a pod is starting here that a policy selects, or could select, so that its packets may come from an
    /// unknown address. A pod whose namespace is unknown counts too, since its entry waits for that.
    pub fn awaits_addresses(&mut self, view: &ClusterView) -> bool {
        let is_alive = |(_, pod): &(&PodKey, &Pod)| pod.is_endpoint() && !pod.terminating;
        let mut awaits = |holder: (&PodKey, &Pod), family| match self.selecting(view, holder, family) {
            None => true,
            Some(_) if !holder.1.starting || !holder.1.attached.is_empty() => false,
            // A policy with unreadable selectors might select it.
            Some(selecting) => !selecting.is_empty() || view.policies.values().any(|policy| policy.selects.is_none()),
        };
        let mut pods = view.pods.iter().filter(is_alive);
        pods.any(|holder| [Family::V4, Family::V6].into_iter().any(|family| awaits(holder, family)))
    }

    /// The policies that select a pod in this family, the serving one first. `None` while the namespace is unknown.
    fn selecting(
        &mut self,
        view: &ClusterView,
        (key, pod): (&PodKey, &Pod),
        family: Family,
    ) -> Option<Vec<Arc<EgressPolicy>>> {
        let labels = view.namespaces.get(&key.namespace)?;
        let candidates = self.by_namespace.entry(key.namespace.clone()).or_insert_with(|| {
            let selected = |o: &&Arc<EgressPolicy>| o.selects.as_ref().is_none_or(|s| s.namespaces.matches(labels));
            by_rank(view.policies.values().filter(selected)).into_iter().cloned().collect()
        });
        let remembered = view.remembered.get(&(pod.uid.clone(), family));
        let is_id = |policy: &EgressPolicy, id| self.ids.get(policy.key()).and_then(|ids| ids.of(family)) == Some(id);
        let selected = |policy: &&Arc<EgressPolicy>| match &policy.selects {
            Some(selects) => selects.pods.matches(&pod.labels),
            // With unreadable selectors, the policy selects the pods that it selected before.
            None => remembered.is_some_and(|known| is_id(policy, known.id)),
        };
        let mut selecting: Vec<_> = candidates.iter().filter(selected).cloned().collect();
        let was_serving =
            |policy: &EgressPolicy| remembered.is_some_and(|known| known.had_address && is_id(policy, known.id));
        let serving = selecting.iter().position(|policy| policy.has_assigned() || was_serving(policy));
        if let Some(serving) = serving {
            selecting[..=serving].rotate_right(1);
        }
        Some(selecting)
    }
}

impl ClusterView {
    /// Records the pods that the kernel had selected. UIDs are kept, since a later pod with the same address is another
    /// pod. Whether their policies had an address then is unknown: one that lists none had none. An address that no pod
    /// has is that of a pod that was deleted earlier, or while no agent ran.
    pub fn recall(&mut self, network: &PodAddressSpace, selected: &BTreeMap<IpAddr, PodState>) {
        let mut departed = Vec::new();
        for (address, state) in selected {
            let PodState::Selected(id) = state else { continue };
            match network.holder(self, *address) {
                Some((_, pod)) => {
                    let uid = pod.uid.clone();
                    let mut policies = self.policies.values().filter(|policy| policy.published.ids.contains(*id));
                    let had_address = policies.any(|policy| !policy.addresses().is_empty());
                    self.remembered.insert((uid, family_of(*address)), Remembered { id: *id, had_address });
                }
                None => departed.push(*address),
            }
        }
        // The caller compiles everything next.
        self.depart(departed, &mut BTreeSet::new());
    }

    /// Records the selected pods of the whole view.
    pub fn remember(&mut self, network: &PodAddressSpace, pods: &BTreeMap<IpAddr, PodState>) {
        let alive: BTreeSet<String> = self.pods.values().map(|pod| pod.uid.clone()).collect();
        self.remembered.retain(|(uid, _), _| alive.contains(uid));
        let policies = self.policies.values().filter(|policy| policy.has_assigned());
        let can_serve: BTreeSet<EgressId> = policies.flat_map(|policy| policy.published.ids.all()).collect();
        for (address, state) in pods {
            self.note_state(network, *address, Some(state), |_, id| can_serve.contains(&id));
        }
    }

    /// Records the current state of one address.
    pub fn remember_one(&mut self, network: &PodAddressSpace, address: IpAddr, state: Option<&PodState>) {
        self.note_state(network, address, state, |view, id| {
            view.policies.values().any(|policy| policy.published.ids.contains(id) && policy.has_assigned())
        });
    }

    fn note_state(
        &mut self,
        network: &PodAddressSpace,
        address: IpAddr,
        state: Option<&PodState>,
        can_serve: impl Fn(&Self, EgressId) -> bool,
    ) {
        let Some((_, pod)) = network.holder(self, address) else { return };
        let pod = (pod.uid.clone(), family_of(address));
        match state {
            // A policy without an ID could not be recognised later.
            Some(PodState::Selected(NOT_NUMBERED)) | None => {}
            Some(PodState::Selected(id)) => {
                let known = self.remembered.get(&pod).is_some_and(|known| known.id == *id && known.had_address);
                let had_address = known || can_serve(self, *id);
                self.remembered.insert(pod, Remembered { id: *id, had_address });
            }
            Some(PodState::Known) => drop(self.remembered.remove(&pod)),
        }
    }
}
