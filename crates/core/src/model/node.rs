//! A node of the cluster, and which addresses it can host.
//!
//! **Unreadable parts keep their last value**, as for objects ([`crate::model::policy`]): if a bad annotation counted
//! as absent, the node would lose all its addresses at once. Only the judgement that a node can *not* host an address
//! requires readable networks (`networks_known`), since pods would then leave with their node's address.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::model::interface::{EgressInterface, InterfaceReason, choose};
use crate::model::state::TunnelEndpoint;
use crate::model::view::{Labels, Reading};

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Node {
    pub name: String,
    pub uid: String,
    /// Without those of EgressServices, which the controller sets. In an agent, only its own node has them.
    pub labels: Arc<Labels>,
    /// Label `k8s.ovn.org/egress-assignable`, whatever its value.
    pub assignable: bool,
    /// Annotation `k8s.ovn.org/egress-drain`: other nodes take its egress IPs where they can.
    pub drained: bool,
    /// Condition Ready is True.
    pub ready: bool,
    /// The node's own address with the prefix length of its network, per family.
    pub primary: Vec<IpNet>,
    /// The node has published its pod subnets and its networks, including those of other interfaces that may carry
    /// egress IPs, and all of them are readable.
    pub networks_known: bool,
    /// Every address of the node with its prefix length.
    pub host_cidrs: Vec<IpNet>,
    /// The agent published one of these two; the Node object has no such annotation.
    pub networks_by_agent: bool,
    /// `status.addresses`.
    pub internal: Vec<IpAddr>,
    pub external: Vec<IpAddr>,
    /// The node's pod subnets.
    pub pod_subnets: Vec<IpNet>,
    /// What the cloud publishes about egress IPs of this node, if it does.
    pub cloud: Option<CloudConfig>,
    /// Annotation `node.antrea.io/max-egress-ips`.
    pub max_egress_ips: Option<usize>,
    /// The interfaces that can host egress IPs, as the agent publishes them; none of an agent without this list.
    pub interfaces: Vec<EgressInterface>,
    /// The uplink, as the agent publishes it.
    pub uplink: Uplink,
    /// Where the agent answers health checks; `None` if it has not published that.
    pub health: Option<Vec<IpAddr>>,
    /// Released addresses, with the numbers of their hand-overs.
    pub released: BTreeMap<IpAddr, u64>,
    /// The nodes that took these over from it.
    pub given: Given,
    /// Addresses that the agent is ready to take over.
    pub prepared: BTreeMap<IpAddr, Prepared>,
    /// The number of the latest ending lease that its programs obey.
    pub bounded: Option<u64>,
    /// OVN-Kubernetes manages the node: it announces a pod's address before the pod starts.
    pub announces_pods: bool,
    /// The node reports a gateway mode in which pod traffic bypasses the host.
    pub shared_gateway: bool,
    /// OVN-Kubernetes has put its own egress IPs on interfaces of the node.
    pub foreign_egress_ips: bool,
    /// Unreadable annotations, one line each.
    pub problems: Vec<String>,
    /// The parts that these annotations define.
    pub unreadable: BTreeSet<NodePart>,
}

/// A link address (EUI-48).
pub type Mac = [u8; 6];

pub fn mac_text(mac: Mac) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

/// The network at the uplink, as only the node can see it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Uplink {
    /// The link address that identifies the node's answers; `None` until the agent publishes it.
    pub mac: Option<Mac>,
    /// The gateways of its routes there.
    pub next_hops: BTreeSet<IpAddr>,
}

/// Acknowledgement that a node is ready for an address: the number of the hand-over, the old node, and whether every
/// node may send to it by now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Prepared(pub u64, pub String, pub bool);

/// The nodes that a node has handed addresses over to.
pub type Given = BTreeMap<IpAddr, String>;

/// Acknowledgements of hand-overs other than releases.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Readiness {
    pub given: Given,
    pub prepared: BTreeMap<IpAddr, Prepared>,
}

/// Assigned addresses that a node does not serve, by address.
pub type UnservedAddresses = BTreeMap<IpAddr, Unserved>;

/// Why a node does not serve an address that is assigned to it. The node reports it with its answers to probes, or in
/// its EgressNode object, and the leader publishes it in the conditions of the object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Unserved {
    /// Another host answers for it, with this link address.
    InUse(String),
    /// Another node of the cluster, with this address, answers for it.
    HeldByNode(IpAddr),
    /// The address is reserved.
    Reserved,
    /// The kernel refuses the entry.
    Refused,
    /// The interface of the address cannot send, and no other node could take the address.
    Interface { name: String, reason: InterfaceReason },
}

impl Unserved {
    /// The reason of a condition.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::InUse(_) => "AddressInUse",
            Self::HeldByNode(_) => "HeldByNode",
            Self::Reserved => "ReservedAddress",
            Self::Refused => "EntryRefused",
            Self::Interface { .. } => "InterfaceCannotSend",
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
            Self::Interface { name, reason } => {
                write!(f, "its interface {name} cannot send ({}), and no other node can take it", reason.code())
            }
        }
    }
}

/// Addresses of the node as its kernel has them, each with its prefix length.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostNetworks {
    /// The address that the node itself uses on its uplink, one per family.
    pub primary: Vec<IpNet>,
    /// All addresses, including those of the uplink and without those of the management port.
    pub all: BTreeSet<IpNet>,
    /// Addresses of the management port.
    pub management: BTreeSet<IpAddr>,
    /// Empty while there is no uplink.
    pub uplink: Uplink,
    pub interfaces: Vec<EgressInterface>,
}

/// Reads them from the kernel.
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
    MaxEgressIps,
    Interfaces,
}

/// Limits of a cloud for a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CloudConfig {
    /// The networks of egress IPs; they replace the node's own.
    pub networks: Vec<IpNet>,
    pub capacity: Capacity,
}

/// How many egress IPs a node may have: in total, and of each family. `None` is no limit.
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
                NodePart::MaxEgressIps => self.max_egress_ips = known.max_egress_ips,
                NodePart::Interfaces => self.interfaces.clone_from(&known.interfaces),
            }
        }
        self
    }
}

impl Node {
    /// The address that overlay packets are sent to, which also names the node: IPv4 first, so that all nodes agree.
    pub fn endpoint(&self) -> Option<TunnelEndpoint> {
        let primary = self.primary.iter().map(IpNet::addr);
        let candidates: Vec<IpAddr> = if self.primary.is_empty() { self.internal.clone() } else { primary.collect() };
        candidates.iter().find(|a| a.is_ipv4()).or(candidates.first()).copied().map(TunnelEndpoint)
    }

    /// How many egress IPs it may have: the lower of what the cloud and the node's annotation say.
    pub fn capacity(&self) -> Capacity {
        let cloud = self.cloud.as_ref().map(|cloud| cloud.capacity).unwrap_or_default();
        Capacity { total: cloud.total.into_iter().chain(self.max_egress_ips).min(), ..cloud }
    }

    /// Every address of the node itself, including its management port's.
    pub fn addresses(&self) -> BTreeSet<IpAddr> {
        let mut addresses = self.listed_addresses();
        addresses.extend(self.management());
        addresses
    }

    /// The addresses on its interfaces, without those in pod subnets, as management ports have.
    pub fn own_addresses(&self) -> impl Iterator<Item = IpAddr> {
        let all = self.primary.iter().chain(&self.host_cidrs).map(IpNet::addr);
        all.filter(|address| !self.pod_subnets.iter().any(|subnet| subnet.contains(address)))
    }

    /// Whether one of its interfaces has the address.
    pub fn has(&self, address: IpAddr) -> bool {
        self.own_addresses().any(|own| own == address)
    }

    /// Addresses that the Node object lists.
    pub fn listed_addresses(&self) -> BTreeSet<IpAddr> {
        let networks = self.primary.iter().chain(&self.host_cidrs).map(IpNet::addr);
        networks.chain(self.internal.iter().chain(&self.external).copied()).collect()
    }

    /// Where the agent answers health checks: addresses of the management port, or the node's own. Only addresses that
    /// can be the node's count, since the kubelet may publish any. OVN-Kubernetes' management port has the second
    /// address of each pod subnet; this applies also if the agent, of an older version, has not published it.
    pub fn health_addresses(&self) -> Vec<IpAddr> {
        let Some(published) = &self.health else { return self.ovn_management() };
        let own = self.listed_addresses();
        let is_its = |address: &&IpAddr| {
            own.contains(*address) || self.pod_subnets.iter().any(|subnet| subnet.contains(*address))
        };
        published.iter().filter(is_its).copied().collect()
    }

    /// The known addresses of the management port.
    pub fn management(&self) -> Vec<IpAddr> {
        let own = self.listed_addresses();
        self.health_addresses().into_iter().filter(|address| !own.contains(address)).collect()
    }

    fn ovn_management(&self) -> Vec<IpAddr> {
        let subnets = self.pod_subnets.iter().filter(|_| self.announces_pods);
        subnets.filter_map(|subnet| nth_address(subnet, 2)).collect()
    }

    /// Whether it has published enough to host anything: its own address and its pod subnets.
    pub fn has_published_networks(&self) -> bool {
        !self.primary.is_empty() && !self.pod_subnets.is_empty()
    }

    /// Whether the node might host the address: a node with unknown networks might.
    pub fn may_host(&self, address: IpAddr) -> bool {
        !self.networks_known || self.hosts(address)
    }

    /// Whether the node can host the address, on any interface. Clouds support the primary one alone.
    pub fn hosts(&self, address: IpAddr) -> bool {
        match self.other_interface(address) {
            Some(_) => self.cloud.is_none(),
            None => self.primary_networks().iter().any(|network| network.contains(&address)),
        }
    }

    /// The interface that the address belongs to, if it is not the primary one.
    pub fn other_interface(&self, address: IpAddr) -> Option<&EgressInterface> {
        choose(&self.interfaces, address).filter(|chosen| !chosen.is_uplink)
    }

    /// The further interface that the address belongs to, and why it cannot send. A node whose uplink cannot send says so to
    /// health checks.
    pub fn impairment(&self, address: IpAddr) -> Option<(&EgressInterface, &InterfaceReason)> {
        let interface = self.other_interface(address)?;
        interface.impairment().map(|reason| (interface, reason))
    }

    /// Whether a further interface cannot send.
    pub fn is_impaired(&self) -> bool {
        self.interfaces.iter().any(|one| !one.is_uplink && one.impairment().is_some())
    }

    /// The networks of egress IPs on the primary interface.
    pub fn primary_networks(&self) -> &[IpNet] {
        self.cloud.as_ref().map_or(&self.primary, |cloud| &cloud.networks)
    }

    /// The networks that decide whether the node hosts an address: of egress IPs on the primary interface, and of all
    /// interfaces.
    pub fn networks(&self) -> impl Iterator<Item = IpNet> {
        let of_interfaces = self.interfaces.iter().flat_map(|interface| interface.networks.keys());
        self.primary_networks().iter().chain(of_interfaces).copied()
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
    use crate::model::interface::{InterfaceReason, InterfaceState};
    use crate::model::samples::interface;

    fn nets(texts: &[&str]) -> Vec<IpNet> {
        texts.iter().map(|text| text.parse().expect("a literal")).collect()
    }

    #[test]
    fn health_checks_are_answered_where_the_node_publishes_it() {
        let pod_subnets = nets(&["10.244.1.0/24", "fd00:10:244:1::/64", "10.9.9.9/32"]);
        let texts = |addresses: Vec<IpAddr>| addresses.iter().map(IpAddr::to_string).collect::<Vec<_>>();
        let node = Node { pod_subnets, primary: nets(&["172.18.0.2/16"]), ..Node::default() };
        assert_eq!(texts(node.health_addresses()), [""; 0], "the order of another CNI is unknown");
        let of_ovn = Node { announces_pods: true, ..node.clone() };
        assert_eq!(texts(of_ovn.health_addresses()), ["10.244.1.2", "fd00:10:244:1::2"]);
        let published = ["10.244.1.1", "172.18.0.2", "172.18.0.3", "10.244.2.1"];
        let published = Some(published.map(|text| text.parse().expect("a literal")).to_vec());
        for node in [Node { health: published.clone(), ..node }, Node { health: published.clone(), ..of_ovn }] {
            assert_eq!(texts(node.health_addresses()), ["10.244.1.1", "172.18.0.2"], "what the node may have");
            assert_eq!(texts(node.management()), ["10.244.1.1"]);
        }
    }

    #[test]
    fn unreadable_parts_keep_the_last_value_of_the_same_node() {
        let cloud = |network: &str| Some(CloudConfig { networks: nets(&[network]), ..CloudConfig::default() });
        let known = Node {
            uid: "a".into(),
            networks_known: true,
            primary: nets(&["172.18.0.2/16"]),
            host_cidrs: nets(&["172.18.0.2/16"]),
            pod_subnets: nets(&["10.244.1.0/24"]),
            cloud: cloud("172.18.0.0/16"),
            interfaces: vec![interface("eth1", &["10.10.10.0/24"])],
            ..Node::default()
        };
        use NodePart::{Cloud, HostCidrs, Interfaces, PodSubnets, Primary};
        let unreadable = BTreeSet::from([Primary, HostCidrs, PodSubnets, Cloud, Interfaces]);
        let bare = Node { uid: "a".into(), ready: true, unreadable: unreadable.clone(), ..Node::default() };
        let expected = Node { ready: true, networks_known: false, unreadable, ..known.clone() };
        assert_eq!(bare.clone().filled_from(&known), expected, "and the node might host any address");
        let other = Node { uid: "b".into(), ..bare };
        assert_eq!(other.clone().filled_from(&known), other);
        let moved = Node { uid: "a".into(), primary: nets(&["172.19.0.2/16"]), ..Node::default() };
        assert_eq!(moved.clone().filled_from(&known), moved, "what can be read counts");
    }

    #[test]
    fn an_address_is_hosted_where_it_belongs_if_programs_are_attached_there() {
        let uplink = EgressInterface { is_uplink: true, ..interface("eth0", &["172.18.0.0/16", "10.9.0.0/16"]) };
        let eth1 = |state| EgressInterface { state, ..interface("eth1", &["10.10.10.0/24", "172.19.9.0/24"]) };
        let with = |interfaces: Vec<_>| Node { primary: nets(&["172.18.0.2/16"]), interfaces, ..Node::default() };
        let hosts = |node: &Node, text: &str| node.hosts(text.parse().expect("a literal"));
        let older = with(vec![]);
        assert!(hosts(&older, "172.18.9.9") && !hosts(&older, "10.10.10.9"), "the agent publishes no interfaces");
        for (state, is_attached) in [
            (InterfaceState::Usable, true),
            (InterfaceState::Attached(InterfaceReason::Down), true),
            (InterfaceState::Absent(InterfaceReason::NotAttached), false),
        ] {
            let node = with(vec![uplink.clone(), eth1(state)]);
            assert_eq!(hosts(&node, "10.10.10.9"), is_attached);
            assert!(hosts(&node, "172.18.9.9") && !hosts(&node, "10.11.0.9"));
            assert!(!hosts(&node, "10.9.0.9"), "of the uplink's networks only that of its primary address counts");
            let cloud = CloudConfig { networks: nets(&["172.19.0.0/16"]), ..CloudConfig::default() };
            let cloudy = Node { cloud: Some(cloud), ..node };
            assert!(hosts(&cloudy, "172.19.8.9") && !hosts(&cloudy, "172.18.9.9") && !hosts(&cloudy, "10.10.10.9"));
            assert_eq!(hosts(&cloudy, "172.19.9.9"), !is_attached, "it belongs to eth1");
        }
    }
}
