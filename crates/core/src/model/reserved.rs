//! Addresses that are never an egress IP, whichever object lists them. Pure.
//!
//! The controller checks before it assigns (`crate::allocation`), and the node before it claims
//! (`egress_agent::node::reconciler`): authors of EgressIP objects must not take an address from a router, a node or
//! the network itself, and a node that took its own next hop or API server would cut itself off.
//!
//! A report by an agent reserves an address only if no other node could host it, or if another agent reports the same:
//! one agent's token takes no address from an object. In the remaining cases the probe before a claim finds the host
//! that has the address.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::model::node::Node;

/// Why an address cannot be an egress IP.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reserved {
    /// RFC 1122 section 3.2.1.3, RFC 4291 section 2.5.2.
    ThisNetwork,
    Loopback,
    /// RFC 3927, RFC 4291 section 2.5.6.
    LinkLocal,
    /// RFC 5771, RFC 4291 section 2.7.
    Multicast,
    /// RFC 1112 section 4, and the limited broadcast address.
    ClassE,
    /// OVN-Kubernetes' join subnets.
    Join,
    PodNetwork(IpNet),
    ServiceNetwork(IpNet),
    /// The network address of a network (RFC 1122 section 3.2.1.3).
    Network(IpNet),
    /// The directed broadcast address of a network (RFC 1122 section 3.2.1.3).
    Broadcast(IpNet),
    /// The subnet-router anycast address (RFC 4291 section 2.6.1).
    Anycast(IpNet),
    /// A node's own address; of several nodes the first by name.
    Node(Arc<str>),
    /// The next hop of a node; without a name that of the node that asks.
    NextHop(Option<Arc<str>>),
    /// The API server of a node.
    ApiServer,
    /// A cluster IP or a load balancer's address of a Service.
    Service,
}

impl fmt::Display for Reserved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ThisNetwork => f.write_str("means this network or no address at all"),
            Self::Loopback => f.write_str("is a loopback address"),
            Self::LinkLocal => f.write_str("is a link-local address"),
            Self::Multicast => f.write_str("is a multicast address"),
            Self::ClassE => f.write_str("is in 240.0.0.0/4, which hosts do not use"),
            Self::Join => f.write_str("is in a join subnet of OVN-Kubernetes"),
            Self::PodNetwork(network) => write!(f, "is in the pod network {network}"),
            Self::ServiceNetwork(network) => write!(f, "is in the service network {network}"),
            Self::Network(network) => write!(f, "is the network address of {network}"),
            Self::Broadcast(network) => write!(f, "is the broadcast address of {network}"),
            Self::Anycast(network) => write!(f, "is the subnet-router anycast address of {network}"),
            Self::Node(name) => write!(f, "is an address of node {name}"),
            Self::NextHop(None) => f.write_str("is this node's next hop"),
            Self::NextHop(Some(name)) => write!(f, "is the next hop of node {name}"),
            Self::ApiServer => f.write_str("is an address of the API server"),
            Self::Service => f.write_str("is an address of a Service"),
        }
    }
}

/// The cluster's networks, by flags and the client's configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterNetworks {
    pub pods: Vec<IpNet>,
    pub services: Vec<IpNet>,
    /// The addresses that the agent's client connects to.
    pub api_servers: BTreeSet<IpAddr>,
}

/// All reserved addresses for one view of the cluster.
#[derive(Debug, Default)]
pub struct Reservations {
    addresses: HashMap<IpAddr, Reserved>,
    prefixes: BTreeMap<IpNet, Reserved>,
    /// The prefix lengths in use, ascending.
    v4: BTreeSet<u8>,
    v6: BTreeSet<u8>,
}

impl Reservations {
    /// `nodes` by name, and `services` the addresses outside the service networks that Services were given. `own` is
    /// the node that asks, if any: it believes its own reports.
    pub fn new<'a>(
        nodes: impl DoubleEndedIterator<Item = (&'a str, &'a Node)> + Clone,
        networks: &ClusterNetworks,
        services: impl IntoIterator<Item = IpAddr>,
        own: Option<&str>,
    ) -> Self {
        let mut table = Self::default();
        // Later entries win: the most certain come last.
        for subnet in networks.pods.iter().chain(nodes.clone().flat_map(|(_, node)| &node.pod_subnets)) {
            table.put(*subnet, Reserved::PodNetwork(subnet.trunc()));
        }
        networks.services.iter().for_each(|net| table.put(*net, Reserved::ServiceNetwork(net.trunc())));
        for (prefixes, reason) in [
            (&JOIN[..], Reserved::Join),
            (&LINK_LOCAL, Reserved::LinkLocal),
            (&MULTICAST, Reserved::Multicast),
            (&THIS_NETWORK, Reserved::ThisNetwork),
            (&LOOPBACK, Reserved::Loopback),
            (&CLASS_E, Reserved::ClassE),
        ] {
            prefixes.iter().for_each(|prefix| table.put(*prefix, reason.clone()));
        }
        let addresses = &mut table.addresses;
        let reports = reports(nodes.clone(), own);
        let of_reports = |rank| reports.iter().filter(move |report| report.rank == rank).map(AddressReport::entry);
        let of_nodes = nodes.clone().flat_map(|(_, node)| {
            let cloud = node.cloud.iter().flat_map(|cloud| &cloud.networks);
            let reported = node.primary.iter().chain(&node.host_cidrs).filter(|_| !node.networks_by_agent);
            reported.chain(cloud)
        });
        addresses.extend(of_reports(Rank::Network));
        for network in of_nodes.map(IpNet::trunc).collect::<BTreeSet<_>>() {
            addresses.extend(of_network(network));
        }
        addresses.extend(services.into_iter().map(|address| (address, Reserved::Service)));
        addresses.extend(networks.api_servers.iter().map(|address| (*address, Reserved::ApiServer)));
        addresses.extend(of_reports(Rank::NextHop));
        addresses.extend(of_reports(Rank::Node));
        for (name, node) in nodes.rev() {
            let name: Arc<str> = name.into();
            let listed = match node.networks_by_agent {
                true => node.internal.iter().chain(&node.external).copied().collect(),
                false => node.addresses(),
            };
            addresses.extend(listed.into_iter().map(|own| (own, Reserved::Node(name.clone()))));
        }
        table
    }

    fn put(&mut self, prefix: IpNet, reason: Reserved) {
        let prefix = prefix.trunc();
        let lengths = if prefix.addr().is_ipv4() { &mut self.v4 } else { &mut self.v6 };
        lengths.insert(prefix.prefix_len());
        self.prefixes.insert(prefix, reason);
    }

    /// Why the address cannot be an egress IP; `None` if it can.
    pub fn of(&self, address: IpAddr) -> Option<&Reserved> {
        let lengths = if address.is_ipv4() { &self.v4 } else { &self.v6 };
        let prefixes = lengths.iter().filter_map(|length| IpNet::new(address, *length).ok());
        let of_prefix = || prefixes.rev().find_map(|prefix| self.prefixes.get(&prefix.trunc()));
        self.addresses.get(&address).or_else(of_prefix)
    }
}

/// What agents alone report about an address.
struct AddressReport {
    rank: Rank,
    address: IpAddr,
    reason: Reserved,
}

impl AddressReport {
    fn entry(&self) -> (IpAddr, Reserved) {
        (self.address, self.reason.clone())
    }
}

/// Ascending certainty.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    Network,
    NextHop,
    Node,
}

/// The reports of agents that count.
fn reports<'a>(
    nodes: impl DoubleEndedIterator<Item = (&'a str, &'a Node)> + Clone,
    own: Option<&str>,
) -> Vec<AddressReport> {
    // The first reporting node by name, and whether there are several.
    let mut reported: BTreeMap<(Rank, IpAddr), (&str, Reserved, bool)> = BTreeMap::new();
    for (name, node) in nodes.clone() {
        let mut note = |rank, address, reason| {
            reported
                .entry((rank, address))
                .and_modify(|(.., is_shared)| *is_shared = true)
                .or_insert((name, reason, false));
        };
        // A node reports only on its own networks.
        for hop in node.uplink.next_hops.iter().filter(|hop| node.may_host(**hop)) {
            note(Rank::NextHop, *hop, Reserved::NextHop(Some(name.into())));
        }
        if node.networks_by_agent {
            let networks: BTreeSet<IpNet> = node.primary.iter().chain(&node.host_cidrs).map(IpNet::trunc).collect();
            for (address, reason) in networks.into_iter().flat_map(of_network) {
                note(Rank::Network, address, reason);
            }
            // Addresses of the management port are in the pod network.
            for address in node.listed_addresses() {
                note(Rank::Node, address, Reserved::Node(name.into()));
            }
        }
    }
    let counts = |address: IpAddr, (name, _, is_shared): &(&str, Reserved, bool)| {
        let of_others = || nodes.clone().any(|(other, node)| other != *name && node.may_host(address));
        *is_shared || own == Some(*name) || !of_others()
    };
    let counting = reported.into_iter().filter(|((_, address), report)| counts(*address, report));
    counting.map(|((rank, address), (_, reason, _))| AddressReport { rank, address, reason }).collect()
}

/// Networks of two addresses (RFC 3021, RFC 6164), and of one, have only host addresses.
fn of_network(network: IpNet) -> Vec<(IpAddr, Reserved)> {
    match network {
        IpNet::V4(v4) if v4.prefix_len() < 31 => {
            vec![
                (v4.network().into(), Reserved::Network(network)),
                (v4.broadcast().into(), Reserved::Broadcast(network)),
            ]
        }
        IpNet::V6(v6) if v6.prefix_len() < 127 => vec![(v6.network().into(), Reserved::Anycast(network))],
        _ => Vec::new(),
    }
}

const fn v4(a: u8, b: u8, len: u8) -> IpNet {
    IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::new(a, b, 0, 0), len))
}

const fn v6(first: u16, len: u8) -> IpNet {
    IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::new(first, 0, 0, 0, 0, 0, 0, 0), len))
}

/// OVN-Kubernetes' join subnets.
pub const JOIN: [IpNet; 2] = [v4(100, 64, 16), v6(0xfd98, 64)];
/// What no router forwards (RFC 6890): link-local, "this host", loopback and the limited broadcast.
pub const LINK_LOCAL: [IpNet; 6] = [
    v4(169, 254, 16),
    v4(0, 0, 8),
    v4(127, 0, 8),
    IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::BROADCAST, 32)),
    v6(0xfe80, 10),
    IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::LOCALHOST, 128)),
];
pub const MULTICAST: [IpNet; 2] = [v4(224, 0, 4), v6(0xff00, 8)];
const THIS_NETWORK: [IpNet; 2] = [v4(0, 0, 8), IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::UNSPECIFIED, 128))];
const LOOPBACK: [IpNet; 2] = [v4(127, 0, 8), IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::LOCALHOST, 128))];
const CLASS_E: [IpNet; 2] = [v4(240, 0, 4), IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::BROADCAST, 32))];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::node::Uplink;
    use crate::model::samples::{ip, net};

    fn table(services: &[&str]) -> Reservations {
        let networks = ClusterNetworks {
            pods: vec![net("10.244.0.0/16"), net("fd00:10:244::/48")],
            services: vec![net("10.96.0.0/16"), net("fd00:10:96::/112")],
            api_servers: [ip("172.18.0.200")].into(),
        };
        let node = |own: &str, more: &[&str]| Node {
            primary: vec![net(own), net("fd00:172:18::2/64")],
            host_cidrs: more.iter().map(|text| net(text)).collect(),
            pod_subnets: vec![net("10.245.1.0/24")],
            health: Some(vec![ip("10.245.1.2")]),
            uplink: Uplink { mac: None, next_hops: [ip("172.18.0.1"), ip("198.51.100.1")].into() },
            networks_known: true,
            ..Node::default()
        };
        let nodes = [
            ("n1", node("172.18.0.2/16", &["10.10.10.2/24", "192.0.2.4/31", "192.0.2.9/32", "2001:db8::2/127"])),
            ("n2", node("172.18.0.3/16", &["192.0.2.64/30", "2001:db8:1::1/128"])),
        ];
        let nodes = nodes.iter().map(|(name, node)| (*name, node));
        Reservations::new(nodes, &networks, services.iter().map(|text| ip(text)), None)
    }

    /// Each list as the agents of these nodes report it, all in one network.
    fn reported(agents: &[(&str, &str, &[&str])], own: Option<&str>) -> Reservations {
        let node = |all: &[&str], hop: &str| Node {
            primary: vec![net(all[0])],
            host_cidrs: all.iter().map(|text| net(text)).collect(),
            networks_by_agent: true,
            internal: vec![net(all[0]).addr()],
            uplink: Uplink { mac: None, next_hops: [ip(hop)].into() },
            networks_known: true,
            ..Node::default()
        };
        let nodes: Vec<_> = agents.iter().map(|(name, hop, all)| (*name, node(all, hop))).collect();
        let nodes = nodes.iter().map(|(name, node)| (*name, node));
        Reservations::new(nodes, &ClusterNetworks::default(), [], own)
    }

    /// With the token of one agent an attacker reports addresses of objects as its node's own, as its next hop, or as
    /// the network and broadcast addresses of a small network.
    #[test]
    fn one_agents_report_takes_no_address_that_another_node_could_host() {
        let honest = ("n1", "172.18.0.1", ["172.18.0.2/16"].as_slice());
        let forged = ["172.18.0.3/16", "172.18.0.100/16", "172.18.0.105/30", "10.9.9.9/24"].as_slice();
        let table = reported(&[honest, ("n2", "172.18.0.110", forged)], None);
        for text in ["172.18.0.100", "172.18.0.104", "172.18.0.105", "172.18.0.107", "172.18.0.110", "172.18.0.1"] {
            assert_eq!(table.of(ip(text)), None, "{text}");
        }
        let node = |name: &str| Some(Reserved::Node(name.into()));
        assert_eq!(table.of(ip("172.18.0.3")).cloned(), node("n2"), "its Node object lists it");
        assert_eq!(table.of(ip("10.9.9.9")).cloned(), node("n2"), "a network of its own");
        assert_eq!(table.of(ip("10.9.9.255")), Some(&Reserved::Broadcast(net("10.9.9.0/24"))));
        assert_eq!(table.of(ip("172.18.255.255")), Some(&Reserved::Broadcast(net("172.18.0.0/16"))), "both say so");
        // Two nodes that name the same next hop, and each node for itself.
        let both = reported(&[honest, ("n2", "172.18.0.1", forged)], Some("n2"));
        assert_eq!(both.of(ip("172.18.0.1")), Some(&Reserved::NextHop(Some("n1".into()))));
        assert_eq!(both.of(ip("172.18.0.100")).cloned(), node("n2"));
    }

    #[test]
    fn each_reserved_address_has_its_reason() {
        let table = table(&["172.18.0.201"]);
        let node = |name: &str| Reserved::Node(name.into());
        for (text, expected) in [
            ("0.0.0.0", Reserved::ThisNetwork),
            ("0.1.2.3", Reserved::ThisNetwork),
            ("::", Reserved::ThisNetwork),
            ("127.0.0.1", Reserved::Loopback),
            ("::1", Reserved::Loopback),
            ("169.254.7.7", Reserved::LinkLocal),
            ("fe80::7", Reserved::LinkLocal),
            ("224.0.0.1", Reserved::Multicast),
            ("239.255.255.255", Reserved::Multicast),
            ("ff02::1", Reserved::Multicast),
            ("240.0.0.1", Reserved::ClassE),
            ("255.255.255.255", Reserved::ClassE),
            ("100.64.0.9", Reserved::Join),
            ("fd98::9", Reserved::Join),
            ("10.244.7.7", Reserved::PodNetwork(net("10.244.0.0/16"))),
            ("10.245.1.7", Reserved::PodNetwork(net("10.245.1.0/24"))),
            ("fd00:10:244:1::7", Reserved::PodNetwork(net("fd00:10:244::/48"))),
            ("10.96.0.1", Reserved::ServiceNetwork(net("10.96.0.0/16"))),
            ("fd00:10:96::1", Reserved::ServiceNetwork(net("fd00:10:96::/112"))),
            ("172.18.0.0", Reserved::Network(net("172.18.0.0/16"))),
            ("172.18.255.255", Reserved::Broadcast(net("172.18.0.0/16"))),
            ("10.10.10.0", Reserved::Network(net("10.10.10.0/24"))),
            ("10.10.10.255", Reserved::Broadcast(net("10.10.10.0/24"))),
            ("192.0.2.67", Reserved::Broadcast(net("192.0.2.64/30"))),
            ("fd00:172:18::", Reserved::Anycast(net("fd00:172:18::/64"))),
            ("172.18.0.1", Reserved::NextHop(Some("n1".into()))),
            ("172.18.0.200", Reserved::ApiServer),
            ("172.18.0.201", Reserved::Service),
            ("172.18.0.2", node("n1")),
            ("172.18.0.3", node("n2")),
            ("10.245.1.2", node("n1")),
        ] {
            assert_eq!(table.of(ip(text)), Some(&expected), "{text}");
        }
    }

    #[test]
    fn all_others_may_be_egress_ips() {
        let table = table(&[]);
        for text in [
            "172.18.0.100",
            "172.18.1.0",
            "172.18.0.255",
            "172.18.255.254",
            "172.18.0.201",
            "fd00:172:18::1",
            // Networks without a network address: a /31, a /32, a /127, a /128.
            "192.0.2.5",
            "192.0.2.8",
            "192.0.2.10",
            "2001:db8::",
            "2001:db8::3",
            "2001:db8:1::",
            // A node cannot reserve an address outside its networks.
            "198.51.100.1",
            "100.65.0.1",
            "8.8.8.8",
            "126.255.255.255",
        ] {
            assert_eq!(table.of(ip(text)), None, "{text}");
        }
    }
}
