//! What the agent knows of the cluster: plain types, filled by `kube`, read by the model and the controller.
//!
//! Only what somebody decides by is kept. Values that are shared between the node's half and the controller are behind
//! `Arc`, so that the second view costs pointers.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use ipnet::IpNet;

pub use super::object::{Condition, Conditions, EgressObject, Item, Part, Selects, Unreadable, parse_egress_ip};
pub use super::services::{ServiceKey, Services};
use super::state::{EgressId, PodState, TunnelEndpoint};

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

/// A node of the cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Node {
    pub name: String,
    /// Label `k8s.ovn.org/egress-assignable`, whatever its value.
    pub assignable: bool,
    /// Condition Ready is True.
    pub ready: bool,
    /// The node's own address with the prefix length of its network, per family.
    pub primary: Vec<IpNet>,
    /// The node has said its primary networks, all of them readable.
    pub networks_known: bool,
    /// Every address of the node with its prefix length.
    pub host_cidrs: Vec<IpNet>,
    /// `status.addresses`.
    pub internal: Vec<IpAddr>,
    pub external: Vec<IpAddr>,
    /// The node's pod subnets.
    pub pod_subnets: Vec<IpNet>,
    /// OVN-Kubernetes runs here: it announces a pod's address before the pod starts.
    pub announces_pods: bool,
    /// Annotations that could not be read, one line each.
    pub problems: Vec<String>,
}

impl Node {
    /// The address that overlay packets are sent to, which also names the node: IPv4 first, so that every node of the
    /// cluster comes to the same answer.
    pub fn endpoint(&self) -> Option<TunnelEndpoint> {
        let primary = self.primary.iter().map(IpNet::addr);
        let candidates: Vec<IpAddr> = if self.primary.is_empty() { self.internal.clone() } else { primary.collect() };
        candidates.iter().find(|a| a.is_ipv4()).or(candidates.first()).copied().map(TunnelEndpoint)
    }

    /// Every address of the node itself, its management port's included.
    pub fn addresses(&self) -> BTreeSet<IpAddr> {
        let networks = self.primary.iter().chain(&self.host_cidrs).map(IpNet::addr);
        networks.chain(self.internal.iter().chain(&self.external).copied()).chain(self.management()).collect()
    }

    /// The addresses of the management port: the second of each pod subnet.
    pub fn management(&self) -> Vec<IpAddr> {
        self.pod_subnets.iter().filter_map(|subnet| nth_address(subnet, 2)).collect()
    }

    /// As [`Self::hosts`], as far as one knows: a node that has not said its networks might.
    pub fn may_host(&self, address: IpAddr) -> bool {
        !self.networks_known || self.hosts(address)
    }

    /// Can the node's primary network hold the address?
    pub fn hosts(&self, address: IpAddr) -> bool {
        self.primary.iter().any(|network| network.contains(&address))
    }
}

fn nth_address(subnet: &IpNet, n: u8) -> Option<IpAddr> {
    let address = match subnet.network() {
        IpAddr::V4(a) => IpAddr::V4(Ipv4Addr::from_bits(a.to_bits().checked_add(n.into())?)),
        IpAddr::V6(a) => IpAddr::V6(Ipv6Addr::from_bits(a.to_bits().checked_add(n.into())?)),
    };
    subnet.contains(&address).then_some(address)
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

/// The update with objects whose unreadable parts are as they were last read.
pub fn filled(
    update: Update<String, Arc<EgressObject>>,
    known: impl Fn(&String) -> Option<Arc<EgressObject>>,
) -> Update<String, Arc<EgressObject>> {
    let fill = |(name, object): (String, Arc<EgressObject>)| {
        let known = if object.unreadable.is_empty() { None } else { known(&name) };
        match known {
            Some(known) => (name, Arc::new(Arc::unwrap_or_clone(object).filled_from(&known))),
            None => (name, object),
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
            Change::Nodes(update) => everything_if(apply(&mut self.nodes, update, |_| ())),
            Change::Pods(update) => {
                let mut pods = BTreeSet::new();
                apply(&mut self.pods, update, |pod| pods.extend(&pod.addresses));
                Touched::Addresses(Addresses { pods, ..Addresses::default() })
            }
            Change::Services(update) => {
                let services = self.services.apply(update);
                Touched::Addresses(Addresses { services, ..Addresses::default() })
            }
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
    fn the_management_address_is_the_second_of_each_subnet() {
        let subnets = ["10.244.1.0/24", "fd00:10:244:1::/64", "10.9.9.9/32"];
        let node = Node { pod_subnets: subnets.iter().filter_map(|s| s.parse().ok()).collect(), ..Node::default() };
        let management: Vec<String> = node.management().iter().map(IpAddr::to_string).collect();
        assert_eq!(management, ["10.244.1.2", "fd00:10:244:1::2"]);
    }

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
