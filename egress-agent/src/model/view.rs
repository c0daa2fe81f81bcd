//! What the agent knows of the cluster: plain types, filled by `kube`, read by the model and the controller.
//!
//! Only what somebody decides by is kept. Values that are shared between the node's half and the controller are behind
//! `Arc`, so that the second view costs pointers.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

pub use super::ledger::Ledger;
pub use super::node::{Capacity, CloudConfig, Node, NodePart};
pub use super::object::{Condition, Conditions, EgressObject, Item, Part, Selects, Unreadable, parse_egress_ip};
pub use super::services::{ServiceKey, Services};
use super::state::{EgressId, PodState};

pub type Labels = BTreeMap<String, String>;

/// Seconds since the epoch, as `metadata.creationTimestamp` counts.
pub type Created = i64;

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PodKey {
    pub namespace: String,
    pub name: String,
}

/// A pod of this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    pub uid: String,
    pub created: Created,
    pub labels: Labels,
    /// From the CNI's annotation when there is one, else from the status.
    pub addresses: BTreeSet<IpAddr>,
    pub host_network: bool,
    /// Succeeded or failed: its address may belong to another pod by now.
    pub completed: bool,
}

impl Pod {
    /// Does traffic with the pod's addresses come from it through the pod network?
    pub fn is_endpoint(&self) -> bool {
        !self.host_network && !self.completed
    }
}

/// A change of one kind of objects.
#[derive(Clone, Debug)]
pub enum Update<K, V> {
    /// The whole list, at the start and whenever the watch began anew.
    Replaced(BTreeMap<K, V>),
    Changed(K, V),
    Removed(K),
}

/// A change of the cluster.
#[derive(Clone, Debug)]
pub enum Change {
    Objects(Update<String, Arc<EgressObject>>),
    Namespaces(Update<String, Labels>),
    Pods(Update<PodKey, Pod>),
    Nodes(Update<String, Arc<Node>>),
    /// The addresses of a Service that the service proxy takes care of and that are not in a service network.
    Services(Update<ServiceKey, BTreeSet<IpAddr>>),
    /// What the leader has recorded.
    Ledger(Arc<Ledger>),
}

/// What must be computed anew after a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Touched {
    /// The entries of these addresses, no more.
    Addresses(Addresses),
    Everything,
}

/// Whose entries are concerned.
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

/// Something of which a part may be unreadable at a time.
pub trait Reading: Clone {
    /// Whether all of it could be read.
    fn is_whole(&self) -> bool;

    /// With the parts that cannot be read as they were when they were last read. Another one of the same name lends
    /// nothing.
    #[must_use]
    fn filled_from(self, known: &Self) -> Self;
}

/// The update with everything that is unreadable as it was last read.
pub fn filled<T: Reading>(
    update: Update<String, Arc<T>>,
    known: impl Fn(&String) -> Option<Arc<T>>,
) -> Update<String, Arc<T>> {
    let fill = |(name, one): (String, Arc<T>)| {
        let known = if one.is_whole() { None } else { known(&name) };
        match known {
            Some(known) => (name, Arc::new(Arc::unwrap_or_clone(one).filled_from(&known))),
            None => (name, one),
        }
    };
    match update {
        Update::Replaced(objects) => Update::Replaced(objects.into_iter().map(fill).collect()),
        Update::Changed(name, object) => {
            let (name, object) = fill((name, object));
            Update::Changed(name, object)
        }
        Update::Removed(name) => Update::Removed(name),
    }
}

/// All that this node knows of the cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterView {
    pub objects: BTreeMap<String, Arc<EgressObject>>,
    pub namespaces: BTreeMap<String, Labels>,
    /// This node's pods only.
    pub pods: BTreeMap<PodKey, Pod>,
    pub nodes: BTreeMap<String, Arc<Node>>,
    pub services: Services,
    /// By pod UID, whom the kernel had selected when the agent started: the last reading of selectors that cannot be
    /// read now.
    pub remembered: BTreeMap<String, EgressId>,
}

impl ClusterView {
    /// Takes note of the pods that an earlier agent had selected. Their UIDs are kept: a later pod with the address of
    /// one of them is another.
    pub fn remember(&mut self, selected: &BTreeMap<IpAddr, PodState>) {
        let of = |pod: &Pod| pod.addresses.iter().find_map(|address| selected.get(address).copied());
        let pods = self.pods.values().filter(|pod| pod.is_endpoint());
        let selected = pods.filter_map(|pod| match of(pod) {
            Some(PodState::Selected(id)) => Some((pod.uid.clone(), id)),
            Some(PodState::Known) | None => None,
        });
        self.remembered = selected.collect();
    }

    pub fn apply(&mut self, change: Change) -> Touched {
        let everything_if = |changed| if changed { Touched::Everything } else { Touched::NOTHING };
        match change {
            Change::Objects(update) => {
                let update = filled(update, |name| self.objects.get(name).cloned());
                everything_if(apply(&mut self.objects, update, |_| ()))
            }
            Change::Namespaces(update) => everything_if(apply(&mut self.namespaces, update, |_| ())),
            Change::Nodes(update) => {
                let update = filled(update, |name| self.nodes.get(name).cloned());
                everything_if(apply(&mut self.nodes, update, |_| ()))
            }
            Change::Pods(update) => {
                let mut pods = BTreeSet::new();
                apply(&mut self.pods, update, |pod| pods.extend(&pod.addresses));
                Touched::Addresses(Addresses { pods, ..Addresses::default() })
            }
            Change::Services(update) => {
                let services = self.services.apply(update);
                Touched::Addresses(Addresses { services, ..Addresses::default() })
            }
            // It says what may be held of what is desired, not what is desired.
            Change::Ledger(_) => Touched::NOTHING,
        }
    }
}

/// Enters an update; `concern` is shown every value that came or went. False when nothing changed.
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
            addresses: ip.parse().into_iter().collect(),
            host_network: false,
            completed: false,
        };
        let mut view = ClusterView::default();
        let put = |ip| Change::Pods(Update::Changed(key.clone(), pod(ip)));
        assert_ne!(view.apply(put("10.0.0.1")), Touched::NOTHING);
        assert_eq!(view.apply(put("10.0.0.1")), Touched::NOTHING);
        let pods = ["10.0.0.1", "10.0.0.2"].iter().filter_map(|a| a.parse().ok()).collect();
        assert_eq!(view.apply(put("10.0.0.2")), Touched::Addresses(Addresses { pods, ..Addresses::default() }));
    }
}
