//! A node of the cluster as the model knows it, and which addresses it can carry.
//!
//! **What cannot be read stays as it was**, as for objects ([`crate::model::policy`]): taken for unsaid, one bad annotation would
//! take all its addresses from a node at once. Only the judgement that a node can *not* host an address asks for what can be
//! read now (`networks_known`), since pods would leave by their node's address upon it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::model::state::TunnelEndpoint;
use crate::model::view::Reading;

/// A node of the cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Node {
    pub name: String,
    pub uid: String,
    /// Label `k8s.ovn.org/egress-assignable`, whatever its value.
    pub assignable: bool,
    /// To have no egress IPs, where others can take them (annotation `k8s.ovn.org/egress-drain`).
    pub drained: bool,
    /// Condition Ready is True.
    pub ready: bool,
    /// The node's own address with the prefix length of its network, per family.
    pub primary: Vec<IpNet>,
    /// The node has said where its pods are and its networks, those of other interfaces too where egress IPs may be there,
    /// all of it readable.
    pub networks_known: bool,
    /// Every address of the node with its prefix length.
    pub host_cidrs: Vec<IpNet>,
    /// One of these two is what its agent says: no annotation of its Node object does.
    pub networks_by_agent: bool,
    /// `status.addresses`.
    pub internal: Vec<IpAddr>,
    pub external: Vec<IpAddr>,
    /// The node's pod subnets.
    pub pod_subnets: Vec<IpNet>,
    /// What the cloud says about egress IPs of this node, in a cloud that says something.
    pub cloud: Option<CloudConfig>,
    /// The agent there can carry egress IPs on other interfaces than the primary one.
    pub serves_secondary: bool,
    /// What its agent says of its uplink.
    pub uplink: Uplink,
    /// Where its agent says that it answers health checks; `None` where it has not said it.
    pub health: Option<Vec<IpAddr>>,
    /// What its agent has let go of, with the number of the hand-over.
    pub released: BTreeMap<IpAddr, u64>,
    /// The nodes that it has handed these over to, of what it has let go of.
    pub given: Given,
    /// What its agent is ready to take over.
    pub prepared: BTreeMap<IpAddr, Prepared>,
    /// The latest end of a lease without one that its programs obey, by its number in the ledger.
    pub bounded: Option<u64>,
    /// OVN-Kubernetes manages the node: it announces a pod's address before the pod starts.
    pub announces_pods: bool,
    /// It says of itself that pods' traffic does not pass the host.
    pub shared_gateway: bool,
    /// It has put egress IPs of its own on interfaces of the node.
    pub foreign_egress_ips: bool,
    /// Annotations that could not be read, one line each.
    pub problems: Vec<String>,
    /// What these would have said.
    pub unreadable: BTreeSet<NodePart>,
}

/// A link address (EUI-48).
pub type Mac = [u8; 6];

pub fn mac_text(mac: Mac) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

/// What a node says of the network at its uplink, which only it can see.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Uplink {
    /// By which others know its answers; `None` where its agent has not said it.
    pub mac: Option<Mac>,
    /// The gateways of its routes there.
    pub next_hops: BTreeSet<IpAddr>,
}

/// A node's word that it is ready for an address: the number of the hand-over, the node that has the address, and whether
/// every node may send here by now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Prepared(pub u64, pub String, pub bool);

/// The nodes that a node has handed addresses over to.
pub type Given = BTreeMap<IpAddr, String>;

/// What a node says of hand-overs beside what it has let go of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Readiness {
    pub given: Given,
    pub prepared: BTreeMap<IpAddr, Prepared>,
}

/// What a node reports of its assigned addresses, by address.
pub type UnservedAddresses = BTreeMap<IpAddr, Unserved>;

/// Why a node does not serve an address that is assigned to it. The node reports it with its answers to probes, and the
/// leader publishes it in the conditions of the object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Unserved {
    /// Another host answers for it, with this link address.
    InUse(String),
    /// Another node of the cluster does, which has this address.
    HeldByNode(IpAddr),
    /// It can be no egress IP there.
    Reserved,
    /// The kernel does not take the entry.
    Refused,
}

impl Unserved {
    /// The reason of a condition.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::InUse(_) => "AddressInUse",
            Self::HeldByNode(_) => "HeldByNode",
            Self::Reserved => "ReservedAddress",
            Self::Refused => "EntryRefused",
        }
    }
}

impl fmt::Display for Unserved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InUse(mac) => write!(f, "another host ({mac}) answers for it"),
            Self::HeldByNode(node) => write!(f, "node {node} still answers for it"),
            Self::Reserved => f.write_str("it can be no egress IP there"),
            Self::Refused => f.write_str("the node's kernel does not take it"),
        }
    }
}

/// Addresses of the node, each with the length of its network.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostNetworks {
    /// The one address per family that the node itself uses on its uplink.
    pub primary: Vec<IpNet>,
    /// All, those of the uplink among them, those of the management port not.
    pub all: BTreeSet<IpNet>,
    /// Those of the management port.
    pub management: BTreeSet<IpAddr>,
    /// Nothing while there is no uplink.
    pub uplink: Uplink,
}

/// Asks the kernel for them.
pub trait HostAddresses: Sync {
    fn networks(&self) -> impl Future<Output = io::Result<HostNetworks>> + Send;
}

/// A part of a node that can be unreadable by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum NodePart {
    Primary,
    HostCidrs,
    PodSubnets,
    Cloud,
}

/// What a cloud lets a node carry.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CloudConfig {
    /// The networks of egress IPs; they stand in for the node's own.
    pub networks: Vec<IpNet>,
    pub capacity: Capacity,
}

/// How many egress IPs a node may have: all together, and of each family. `None` is no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capacity {
    pub total: Option<usize>,
    pub v4: Option<usize>,
    pub v6: Option<usize>,
}

impl Reading for Node {
    fn is_whole(&self) -> bool {
        self.unreadable.is_empty()
    }

    fn filled_from(mut self, known: &Self) -> Self {
        if known.uid != self.uid {
            return self;
        }
        for part in &self.unreadable {
            match part {
                NodePart::Primary => {
                    self.primary.clone_from(&known.primary);
                    self.networks_by_agent |= known.networks_by_agent;
                }
                NodePart::HostCidrs => {
                    self.host_cidrs.clone_from(&known.host_cidrs);
                    self.networks_by_agent |= known.networks_by_agent;
                }
                NodePart::PodSubnets => self.pod_subnets.clone_from(&known.pod_subnets),
                NodePart::Cloud => self.cloud.clone_from(&known.cloud),
            }
        }
        self
    }
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
        let mut addresses = self.said_addresses();
        addresses.extend(self.management());
        addresses
    }

    /// Those that its Node object lists.
    pub fn said_addresses(&self) -> BTreeSet<IpAddr> {
        let networks = self.primary.iter().chain(&self.host_cidrs).map(IpNet::addr);
        networks.chain(self.internal.iter().chain(&self.external).copied()).collect()
    }

    /// Where its agent answers health checks: its management port's addresses, or its own. Only addresses that are the node's
    /// to have count, since its kubelet may write any. OVN-Kubernetes' management port has the second address of each pod
    /// subnet, also where the agent, one of a former version, has not said so.
    pub fn health_addresses(&self) -> Vec<IpAddr> {
        let Some(said) = &self.health else { return self.ovn_management() };
        let own = self.said_addresses();
        let is_its = |address: &&IpAddr| {
            own.contains(*address) || self.pod_subnets.iter().any(|subnet| subnet.contains(*address))
        };
        said.iter().filter(is_its).copied().collect()
    }

    /// The addresses of the management port, as far as one knows.
    pub fn management(&self) -> Vec<IpAddr> {
        let own = self.said_addresses();
        self.health_addresses().into_iter().filter(|address| !own.contains(address)).collect()
    }

    fn ovn_management(&self) -> Vec<IpAddr> {
        let subnets = self.pod_subnets.iter().filter(|_| self.announces_pods);
        subnets.filter_map(|subnet| nth_address(subnet, 2)).collect()
    }

    /// Has it said enough to carry anything: its own address, and where its pods are?
    pub fn is_part(&self) -> bool {
        !self.primary.is_empty() && !self.pod_subnets.is_empty()
    }

    /// Can the node carry the address? As far as one knows: one that has not said its networks might.
    pub fn may_host(&self, address: IpAddr) -> bool {
        !self.networks_known || self.hosts(address)
    }

    /// Can the node carry the address, on whichever interface?
    pub fn hosts(&self, address: IpAddr) -> bool {
        let holds = |network: &IpNet| network.contains(&address);
        self.primary_networks().iter().any(holds) || self.secondary_networks().any(|network| holds(&network))
    }

    /// The networks of egress IPs on the primary interface.
    pub fn primary_networks(&self) -> &[IpNet] {
        self.cloud.as_ref().map_or(&self.primary, |cloud| &cloud.networks)
    }

    /// The networks of the other interfaces, where the agent can serve them. A cloud brings nothing there.
    pub fn secondary_networks(&self) -> impl Iterator<Item = IpNet> {
        let serves = self.serves_secondary && self.cloud.is_none();
        let is_other = move |network: &&IpNet| serves && !self.primary.contains(network) && is_global(network.addr());
        self.host_cidrs.iter().filter(is_other).copied()
    }
}

fn is_global(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(a) => {
            !(a.is_unspecified() || a.is_loopback() || a.is_link_local() || a.is_multicast() || a.is_broadcast())
        }
        IpAddr::V6(a) => !(a.is_unspecified() || a.is_loopback() || a.is_unicast_link_local() || a.is_multicast()),
    }
}

fn nth_address(subnet: &IpNet, n: u8) -> Option<IpAddr> {
    let address = match subnet.network() {
        IpAddr::V4(a) => IpAddr::V4(Ipv4Addr::from_bits(a.to_bits().checked_add(n.into())?)),
        IpAddr::V6(a) => IpAddr::V6(Ipv6Addr::from_bits(a.to_bits().checked_add(n.into())?)),
    };
    subnet.contains(&address).then_some(address)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nets(texts: &[&str]) -> Vec<IpNet> {
        texts.iter().map(|text| text.parse().expect("a literal")).collect()
    }

    #[test]
    fn health_checks_are_answered_where_the_node_says_so() {
        let pod_subnets = nets(&["10.244.1.0/24", "fd00:10:244:1::/64", "10.9.9.9/32"]);
        let texts = |addresses: Vec<IpAddr>| addresses.iter().map(IpAddr::to_string).collect::<Vec<_>>();
        let node = Node { pod_subnets, primary: nets(&["172.18.0.2/16"]), ..Node::default() };
        assert_eq!(texts(node.health_addresses()), [""; 0], "nobody knows a CNI's order");
        let of_ovn = Node { announces_pods: true, ..node.clone() };
        assert_eq!(texts(of_ovn.health_addresses()), ["10.244.1.2", "fd00:10:244:1::2"]);
        let said = ["10.244.1.1", "172.18.0.2", "172.18.0.3", "10.244.2.1"];
        let said = Some(said.map(|text| text.parse().expect("a literal")).to_vec());
        for node in [Node { health: said.clone(), ..node }, Node { health: said.clone(), ..of_ovn }] {
            assert_eq!(texts(node.health_addresses()), ["10.244.1.1", "172.18.0.2"], "what the node may have");
            assert_eq!(texts(node.management()), ["10.244.1.1"]);
        }
    }

    #[test]
    fn what_cannot_be_read_is_as_it_was_last_read_of_the_same_node() {
        let cloud = |network: &str| Some(CloudConfig { networks: nets(&[network]), ..CloudConfig::default() });
        let known = Node {
            uid: "a".into(),
            networks_known: true,
            primary: nets(&["172.18.0.2/16"]),
            host_cidrs: nets(&["172.18.0.2/16"]),
            pod_subnets: nets(&["10.244.1.0/24"]),
            cloud: cloud("172.18.0.0/16"),
            ..Node::default()
        };
        use NodePart::{Cloud, HostCidrs, PodSubnets, Primary};
        let unreadable = BTreeSet::from([Primary, HostCidrs, PodSubnets, Cloud]);
        let bare = Node { uid: "a".into(), ready: true, unreadable: unreadable.clone(), ..Node::default() };
        let expected = Node { ready: true, networks_known: false, unreadable, ..known.clone() };
        assert_eq!(bare.clone().filled_from(&known), expected, "and nobody says that it can not host an address");
        let other = Node { uid: "b".into(), ..bare };
        assert_eq!(other.clone().filled_from(&known), other);
        let moved = Node { uid: "a".into(), primary: nets(&["172.19.0.2/16"]), ..Node::default() };
        assert_eq!(moved.clone().filled_from(&known), moved, "what can be read counts");
    }

    #[test]
    fn other_interfaces_count_where_the_agent_serves_them_and_a_cloud_has_its_own_networks() {
        let host_cidrs = nets(&["172.18.0.2/16", "10.10.10.2/24", "169.254.3.2/16", "fe80::2/64"]);
        let bare = Node { primary: nets(&["172.18.0.2/16"]), host_cidrs, ..Node::default() };
        let hosts = |node: &Node, text: &str| node.hosts(text.parse().expect("a literal"));
        assert!(hosts(&bare, "172.18.9.9") && !hosts(&bare, "10.10.10.9"));
        let serving = Node { serves_secondary: true, ..bare };
        assert!(hosts(&serving, "10.10.10.9") && !hosts(&serving, "169.254.3.9") && !hosts(&serving, "fe80::9"));
        let cloud = CloudConfig { networks: nets(&["172.19.0.0/16"]), ..CloudConfig::default() };
        let cloudy = Node { cloud: Some(cloud), ..serving };
        assert!(hosts(&cloudy, "172.19.9.9") && !hosts(&cloudy, "172.18.9.9") && !hosts(&cloudy, "10.10.10.9"));
    }
}
