//! What the agent knows of the cluster: plain types, filled by `kube`, read by the model and the controller.
//!
//! Only what somebody decides by is kept. Values that are shared between the node's half and the controller are behind
//! `Arc`, so that the second view costs pointers.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use ipnet::IpNet;
use kube::core::Selector;

use super::state::{EgressId, TunnelEndpoint};

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

/// One entry of `status.items`, as written.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Item {
    pub node: String,
    pub egress_ip: String,
}

/// The condition `Assigned` as found in the status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condition {
    pub status: bool,
    pub reason: String,
    pub message: String,
    pub observed_generation: Option<i64>,
    pub last_transition: String,
}

/// Where the condition `Assigned` stands in the status: conditions of others stay where they are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Conditions {
    /// The status has a list of conditions.
    pub listed: bool,
    pub assigned: Option<(usize, Condition)>,
}

/// Whom an object selects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selects {
    pub namespaces: Selector,
    pub pods: Selector,
}

/// An EgressIP object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EgressObject {
    pub name: String,
    pub uid: String,
    pub resource_version: String,
    pub generation: Option<i64>,
    pub created: Created,
    /// `spec.egressIPs` as typed.
    pub listed: Vec<String>,
    /// `Err` says what is wrong with a selector: such an object selects nothing.
    pub selects: Result<Selects, String>,
    /// The egress ID that the object carries.
    pub id: Option<EgressId>,
    /// The addresses for which the controller has published that no node can host any of them.
    pub no_eligible_node: Option<BTreeSet<IpAddr>>,
    /// The object asks for a drop where the node's address would serve.
    pub drop_unassigned: bool,
    pub has_annotations: bool,
    pub has_status: bool,
    /// The status has a list of items, empty or not.
    pub has_items: bool,
    pub items: Vec<Item>,
    pub conditions: Conditions,
}

impl EgressObject {
    /// Age first, then name: the order in which objects win over each other, the same on every node.
    pub fn rank(&self) -> (Created, &str) {
        (self.created, &self.name)
    }

    /// The listed addresses that can be read, canonical and each once.
    pub fn addresses(&self) -> BTreeSet<IpAddr> {
        self.listed.iter().filter_map(|text| parse_egress_ip(text)).collect()
    }
}

/// The only reading of an egress IP: an address without prefix length; `::ffff:a.b.c.d` is IPv4.
pub fn parse_egress_ip(text: &str) -> Option<IpAddr> {
    text.trim().parse::<IpAddr>().ok().map(|address| address.to_canonical())
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
}

/// What must be computed anew after a change.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Touched {
    #[default]
    Nothing,
    /// The entries of these pod addresses.
    Pods(BTreeSet<IpAddr>),
    Everything,
}

impl Touched {
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Everything, _) | (_, Self::Everything) => Self::Everything,
            (Self::Nothing, touched) | (touched, Self::Nothing) => touched,
            (Self::Pods(mut one), Self::Pods(other)) => {
                one.extend(other);
                Self::Pods(one)
            }
        }
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
}

impl ClusterView {
    pub fn apply(&mut self, change: Change) -> Touched {
        let everything_if = |changed| if changed { Touched::Everything } else { Touched::Nothing };
        match change {
            Change::Objects(update) => everything_if(apply(&mut self.objects, update, |_| ())),
            Change::Namespaces(update) => everything_if(apply(&mut self.namespaces, update, |_| ())),
            Change::Nodes(update) => everything_if(apply(&mut self.nodes, update, |_| ())),
            Change::Pods(update) => {
                let mut addresses = BTreeSet::new();
                let changed = apply(&mut self.pods, update, |pod| addresses.extend(&pod.addresses));
                if changed { Touched::Pods(addresses) } else { Touched::Nothing }
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
    fn egress_ips_are_read_strictly_and_made_canonical() {
        let ip = |text: &str| parse_egress_ip(text).map(|a| a.to_string());
        assert_eq!(ip("172.18.0.100").as_deref(), Some("172.18.0.100"));
        assert_eq!(ip("FD00:0172:18::0100").as_deref(), Some("fd00:172:18::100"));
        assert_eq!(ip("::ffff:172.18.0.100").as_deref(), Some("172.18.0.100"));
        for bad in ["172.18.0.100/32", "172.18.0.1000", "172.018.0.100", "", "eip"] {
            assert_eq!(ip(bad), None, "{bad}");
        }
    }

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
        assert_ne!(view.apply(put("10.0.0.1")), Touched::Nothing);
        assert_eq!(view.apply(put("10.0.0.1")), Touched::Nothing);
        let both = ["10.0.0.1", "10.0.0.2"].iter().filter_map(|a| a.parse().ok()).collect();
        assert_eq!(view.apply(put("10.0.0.2")), Touched::Pods(both));
    }
}
