//! The cluster as the agent knows it: plain types, filled by `egress_kube`, read by the model and the controller.
//!
//! Only what decisions depend on is kept. Values that the node's reconciler and the controller share are in an `Arc`,
//! so that the second view costs pointers.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::model::exposed::ContainerPort;
use crate::model::ledger::Ledger;
use crate::model::node::Node;
use crate::model::policy::{EgressPolicy, Policies, PolicyKey};
use crate::model::services::{Service, ServiceKey, Services};
use crate::model::state::{EgressId, Family, family_of};
use crate::selection::classes::ClassNumbers;

pub type Labels = BTreeMap<String, String>;

/// Seconds since the epoch, as in `metadata.creationTimestamp`.
pub type CreationTimestamp = i64;

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PodKey {
    pub namespace: String,
    pub name: String,
}

/// A pod of this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    pub uid: String,
    pub created: CreationTimestamp,
    pub labels: Labels,
    /// `status.podIPs`, one of each family.
    pub reported: BTreeSet<IpAddr>,
    /// Addresses from the CNI's annotation, one of each family. The author of the pod can write it: see
    /// [`crate::selection::pod_addresses`].
    pub announced: BTreeSet<IpAddr>,
    /// How many more addresses the annotation lists.
    pub surplus: usize,
    /// Addresses that the node's CNI plugin chain reported, one of each family. The view fills this in.
    pub attached: BTreeSet<IpAddr>,
    /// The kubelet has not reported an address yet, or reports that the pod has no network, as after a restart of the
    /// node: its next packets may come from an unknown address.
    pub starting: bool,
    /// It is being deleted.
    pub terminating: bool,
    pub host_network: bool,
    /// Succeeded or failed: its address may belong to another pod by now.
    pub completed: bool,
    pub ports: Vec<ContainerPort>,
}

impl Pod {
    /// Whether traffic with the pod's addresses comes from it through the pod network.
    pub fn is_endpoint(&self) -> bool {
        !self.host_network && !self.completed
    }

    /// Every address from any source.
    pub fn listed(&self) -> impl Iterator<Item = IpAddr> {
        self.reported.iter().chain(&self.announced).chain(&self.attached).copied()
    }
}

/// Addresses that the CNI gave a pod of this node, one of each family.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attach {
    pub pod: PodKey,
    pub uid: String,
    pub addresses: BTreeSet<IpAddr>,
}

/// A change of one kind of policies.
#[derive(Clone, Debug)]
pub enum Update<K, V> {
    /// The whole list, at the start and whenever the watch restarts.
    Replaced(BTreeMap<K, V>),
    Changed(K, V),
    Removed(K),
}

/// A change of the cluster.
#[derive(Clone, Debug)]
pub enum Change {
    Policies(Update<PolicyKey, Arc<EgressPolicy>>),
    Namespaces(Update<String, Labels>),
    Pods(Update<PodKey, Pod>),
    Nodes(Update<String, Arc<Node>>),
    Services(Update<ServiceKey, Service>),
    /// What the leader recorded.
    Ledger(Arc<Ledger>),
}

/// What must be recomputed after a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Touched {
    /// The entries of these addresses only.
    Addresses(Addresses),
    Everything,
}

/// The affected addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Addresses {
    pub pods: BTreeSet<IpAddr>,
    pub services: BTreeSet<IpAddr>,
}

impl Touched {
    pub const NOTHING: Self = Self::Addresses(Addresses { pods: BTreeSet::new(), services: BTreeSet::new() });

    #[must_use]
    pub fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Everything, _) | (_, Self::Everything) => Self::Everything,
            (Self::Addresses(mut one), Self::Addresses(other)) => {
                one.pods.extend(other.pods);
                one.services.extend(other.services);
                Self::Addresses(one)
            }
        }
    }
}

impl Default for Touched {
    fn default() -> Self {
        Self::NOTHING
    }
}

/// A policy of which parts may be unreadable.
pub trait Reading: Clone {
    /// Whether all of it is readable.
    fn is_whole(&self) -> bool;

    /// Fills unreadable parts from the last reading. Another policy of the same name contributes nothing.
    #[must_use]
    fn filled_from(self, known: &Self) -> Self;
}

/// Fills the unreadable parts of an update from the last readings.
pub fn filled<K, T: Reading>(update: Update<K, Arc<T>>, known: impl Fn(&K) -> Option<Arc<T>>) -> Update<K, Arc<T>>
where
    K: Ord,
{
    let fill = |(name, one): (K, Arc<T>)| {
        let known = if one.is_whole() { None } else { known(&name) };
        match known {
            Some(known) => (name, Arc::new(Arc::unwrap_or_clone(one).filled_from(&known))),
            None => (name, one),
        }
    };
    match update {
        Update::Replaced(all) => Update::Replaced(all.into_iter().map(fill).collect()),
        Update::Changed(name, policy) => {
            let (name, policy) = fill((name, policy));
            Update::Changed(name, policy)
        }
        Update::Removed(name) => Update::Removed(name),
    }
}

/// All that this node knows of the cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterView {
    pub policies: Policies,
    pub namespaces: BTreeMap<String, Labels>,
    /// This node's pods only.
    pub pods: BTreeMap<PodKey, Pod>,
    pub nodes: BTreeMap<String, Arc<Node>>,
    pub services: Services,
    /// The policies that served each pod (by UID), in each family, at the last compilation; at the start of the agent, as
    /// the kernel has it. It replaces selectors that are unreadable now, and keeps pods with a policy that has lost its addresses.
    pub remembered: BTreeMap<(String, Family), Remembered>,
    /// The numbers of classes that pods had at the last compilation.
    pub classes: ClassNumbers,
    /// Addresses of selected pods that are gone, the latest last. Packets from there are dropped until another pod has
    /// the address, since a pod may be deleted before its processes end.
    pub departed: VecDeque<IpAddr>,
    pub attachments: Attachments,
}

/// The policies that served a pod, each with whether it had an address then, or has lost it while it served the pod.
pub type Remembered = BTreeMap<EgressId, bool>;

/// Addresses that the node's CNI plugin chain reported, by pod UID: the latest report on each address counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Attachments {
    addresses: BTreeMap<String, BTreeSet<IpAddr>>,
    /// UIDs, the latest last.
    order: VecDeque<String>,
}

impl Attachments {
    fn of(&self, uid: &str) -> BTreeSet<IpAddr> {
        self.addresses.get(uid).cloned().unwrap_or_default()
    }

    /// Returns the other pods that had one of the addresses, or are forgotten.
    fn note(&mut self, uid: &str, addresses: &BTreeSet<IpAddr>) -> BTreeSet<String> {
        let mut others = BTreeSet::new();
        for (other, theirs) in &mut self.addresses {
            if other != uid && !theirs.is_disjoint(addresses) {
                theirs.retain(|address| !addresses.contains(address));
                others.insert(other.clone());
            }
        }
        self.order.retain(|known| known != uid);
        self.order.push_back(uid.to_owned());
        self.addresses.insert(uid.to_owned(), addresses.clone());
        while self.order.len() > MOST_ATTACHED
            && let Some(oldest) = self.order.pop_front()
        {
            self.addresses.remove(&oldest);
            others.insert(oldest);
        }
        others
    }

    fn forget(&mut self, uid: &str) {
        if self.addresses.remove(uid).is_some() {
            self.order.retain(|known| known != uid);
        }
    }
}

/// Pods whose attachments are kept. A node has a few hundred at most, and pods whose policies never appear are among the
/// oldest.
const MOST_ATTACHED: usize = 4096;

/// Departed pods whose addresses are kept: a CNI gives an address again late.
const MOST_DEPARTED: usize = 64;

impl ClusterView {
    /// Addresses of selected pods that the update removes, or that have ended: the kernel still sends what waits in the
    /// sockets of an ended container.
    fn leaving(&self, update: &Update<PodKey, Pod>) -> Vec<IpAddr> {
        let is_still = |new: &Pod, pod: &Pod| new.uid == pod.uid && new.is_endpoint();
        let stays = |key: &PodKey, pod: &Pod| match update {
            Update::Replaced(new) => new.get(key).is_some_and(|new| is_still(new, pod)),
            Update::Changed(other, new) => other != key || is_still(new, pod),
            Update::Removed(other) => other != key,
        };
        let gone = self.pods.iter().filter(|(key, pod)| !stays(key, pod) && pod.is_endpoint());
        let was_selected =
            |pod: &Pod, address: &IpAddr| self.remembered.contains_key(&(pod.uid.clone(), family_of(*address)));
        gone.flat_map(|(_, pod)| pod.listed().filter(move |address| was_selected(pod, address))).collect()
    }

    /// Records them, and forgets those that a pod has again.
    pub(crate) fn depart(&mut self, leaving: Vec<IpAddr>, touched: &mut BTreeSet<IpAddr>) {
        let endpoints = self.pods.values().filter(|pod| pod.is_endpoint());
        let taken: BTreeSet<IpAddr> = match leaving.is_empty() && self.departed.is_empty() {
            true => BTreeSet::new(),
            false => endpoints.flat_map(Pod::listed).collect(),
        };
        self.departed.retain(|address| !leaving.contains(address) && !taken.contains(address));
        self.departed.extend(leaving.into_iter().filter(|address| !taken.contains(address)));
        // Their entries are removed.
        let surplus = self.departed.len().saturating_sub(MOST_DEPARTED);
        touched.extend(self.departed.drain(..surplus));
    }

    /// Records what the CNI gave a pod, which may be unknown yet. Returns the affected addresses.
    pub fn attach(&mut self, Attach { uid, addresses, .. }: &Attach) -> BTreeSet<IpAddr> {
        let mut concerned = self.attachments.note(uid, addresses);
        concerned.insert(uid.clone());
        let mut touched = addresses.clone();
        for pod in self.pods.values_mut().filter(|pod| concerned.contains(&pod.uid)) {
            touched.extend(pod.listed());
            pod.attached = self.attachments.of(&pod.uid);
            touched.extend(pod.listed());
        }
        self.depart(Vec::new(), &mut touched);
        touched
    }

    /// Fills the recorded addresses into the pods of an update, and forgets those of removed pods.
    fn fill_attached(&mut self, mut update: Update<PodKey, Pod>) -> Update<PodKey, Pod> {
        let gone: Vec<String> = match &update {
            Update::Replaced(new) => {
                let new: BTreeSet<&String> = new.values().map(|pod| &pod.uid).collect();
                self.pods.values().map(|pod| &pod.uid).filter(|uid| !new.contains(uid)).cloned().collect()
            }
            Update::Changed(key, new) => {
                self.pods.get(key).map(|old| &old.uid).filter(|uid| **uid != new.uid).cloned().into_iter().collect()
            }
            Update::Removed(key) => self.pods.get(key).map(|old| old.uid.clone()).into_iter().collect(),
        };
        gone.iter().for_each(|uid| self.attachments.forget(uid));
        let fill = |pod: &mut Pod| pod.attached = self.attachments.of(&pod.uid);
        match &mut update {
            Update::Replaced(pods) => pods.values_mut().for_each(fill),
            Update::Changed(_, pod) => fill(pod),
            Update::Removed(_) => {}
        }
        update
    }

    pub fn apply(&mut self, change: Change) -> Touched {
        let everything_if = |changed| if changed { Touched::Everything } else { Touched::NOTHING };
        match change {
            Change::Policies(update) => {
                let update = filled(update, |name| self.policies.get(name).cloned());
                everything_if(apply(&mut self.policies, update, |_| ()))
            }
            Change::Namespaces(update) => everything_if(apply(&mut self.namespaces, update, |_| ())),
            Change::Nodes(update) => {
                let update = filled(update, |name| self.nodes.get(name).cloned());
                everything_if(apply(&mut self.nodes, update, |_| ()))
            }
            Change::Pods(update) => {
                let mut pods = BTreeSet::new();
                let update = self.fill_attached(update);
                let leaving = self.leaving(&update);
                apply(&mut self.pods, update, |pod| pods.extend(pod.listed()));
                self.depart(leaving, &mut pods);
                Touched::Addresses(Addresses { pods, ..Addresses::default() })
            }
            Change::Services(update) => {
                let touched = self.services.apply(update);
                let pods = self.pods.iter().filter(|(key, _)| touched.namespaces.contains(&key.namespace));
                let pods = pods.flat_map(|(_, pod)| pod.listed()).collect();
                Touched::Addresses(Addresses { pods, services: touched.addresses })
            }
            // The ledger limits what may be held of the desired state, not the desired state itself.
            Change::Ledger(_) => Touched::NOTHING,
        }
    }
}

/// Applies an update and passes every changed value to `concern`. Returns false without a change.
fn apply<K: Ord, V: PartialEq>(map: &mut BTreeMap<K, V>, update: Update<K, V>, mut concern: impl FnMut(&V)) -> bool {
    match update {
        Update::Replaced(new) => {
            let old = std::mem::replace(map, new);
            if old == *map {
                return false;
            }
            old.values().chain(map.values()).for_each(concern);
            true
        }
        Update::Changed(key, value) => {
            if map.get(&key) == Some(&value) {
                return false;
            }
            concern(&value);
            if let Some(old) = map.insert(key, value) {
                concern(&old);
            }
            true
        }
        Update::Removed(key) => map.remove(&key).inspect(concern).is_some(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repeated_pod_touches_nothing_and_a_changed_one_its_old_and_new_addresses() {
        let key = PodKey { namespace: "a".into(), name: "p".into() };
        let pod = |ip: &str| Pod {
            uid: "u".into(),
            created: 1,
            labels: Labels::new(),
            reported: ip.parse().into_iter().collect(),
            announced: BTreeSet::new(),
            surplus: 0,
            attached: BTreeSet::new(),
            terminating: false,
            host_network: false,
            starting: false,
            completed: false,
            ports: Vec::new(),
        };
        let mut view = ClusterView::default();
        let put = |ip| Change::Pods(Update::Changed(key.clone(), pod(ip)));
        assert_ne!(view.apply(put("10.0.0.1")), Touched::NOTHING);
        assert_eq!(view.apply(put("10.0.0.1")), Touched::NOTHING);
        let pods = ["10.0.0.1", "10.0.0.2"].iter().filter_map(|a| a.parse().ok()).collect();
        assert_eq!(view.apply(put("10.0.0.2")), Touched::Addresses(Addresses { pods, ..Addresses::default() }));
    }
}
