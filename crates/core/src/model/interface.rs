//! The interfaces of a node that can host egress IPs, and which of them hosts an address.
//!
//! An agent reads the records from its kernel and publishes them in its EgressNode object. Agent and controller ask the
//! same function, [`choose`], about the same records, so that no address is assigned to an interface that the agent does
//! not serve.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;

use crate::model::node::Mac;

/// Maximum interfaces of a node: others host nothing.
pub const MOST_INTERFACES: usize = 32;
/// Maximum networks of an interface: addresses in others are not hosted there.
pub const MOST_INTERFACE_NETWORKS: usize = 64;

/// Maximum VLANs that a node makes devices for: each has programs, and takes one of [`MOST_INTERFACES`].
pub const MOST_VLANS: usize = 16;

/// Maximum published destinations of an interface, the shortest prefixes: longer ones count as part of those.
pub const MOST_DESTINATIONS: usize = 64;

/// An Ethernet device of a node with an address of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EgressInterface {
    /// The kernel's number of the device, which a rename does not change.
    pub index: u32,
    pub name: String,
    pub mac: Mac,
    /// In bytes from the IP header on.
    pub mtu: u32,
    /// The interface of the node's default route, by which pod packets without an egress IP leave.
    pub is_uplink: bool,
    /// The number of a VLAN device.
    pub vlan: Option<u16>,
    /// The first address of each family, in the kernel's order. An agent of an older version publishes none.
    pub addresses: Vec<IpAddr>,
    /// The networks of its addresses, without host bits. `Some` is why a network hosts no egress IP.
    pub networks: BTreeMap<IpNet, Option<InterfaceReason>>,
    /// Prefixes beyond its networks that it has routes to, [`MOST_DESTINATIONS`] at most.
    pub destinations: BTreeSet<IpNet>,
    pub state: InterfaceState,
}

/// A network in a VLAN of the uplink's link, as a pool of addresses describes it (`spec.subnetInfo` of an ExternalIPPool).
/// Nodes make a VLAN device for it, which has no address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct VlanNetwork {
    /// 1 to 4094.
    pub vlan: u16,
    /// The router's address, with the length of the network.
    pub gateway: IpNet,
}

impl VlanNetwork {
    /// Whether one node cannot have both: two networks of a family in one VLAN, or one network in two of them.
    pub fn contradicts(&self, other: &Self) -> bool {
        let (own, others) = (self.gateway.trunc(), other.gateway.trunc());
        match self.vlan == other.vlan {
            true => own.addr().is_ipv4() == others.addr().is_ipv4() && self.gateway != other.gateway,
            false => own.contains(&others) || others.contains(&own),
        }
    }
}

/// How far an interface is from sending by its egress IPs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InterfaceState {
    /// It hosts no egress IP.
    Absent(InterfaceReason),
    /// Programs are attached, so its egress IPs stay, but it cannot send.
    Attached(InterfaceReason),
    Usable,
}

/// Why an interface, or one of its networks, hosts no egress IP or cannot send.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum InterfaceReason {
    /// No programs are attached.
    NotAttached,
    /// A macvlan or ipvlan device and its parent: packets of one pass the hooks of the other. The uplink has programs of the two,
    /// otherwise the parent.
    SharesDevice,
    /// It is set down.
    Down,
    /// It is up, and its link is not.
    NoCarrier,
    /// No gateway of its routes of a family answers.
    NextHopLost,
    /// It has more routes than programs choose from, so they use none of them.
    TooManyRoutes,
    /// The node's addresses in the network have a label that ends in `vip`: keepalived moves them between nodes.
    VirtualIp,
    /// The node's addresses in the network are secondary ones.
    Secondary,
    /// The node's addresses in the network are temporary ones (RFC 8981).
    Temporary,
    /// The node's addresses in the network are deprecated (RFC 4862 section 5.5.4).
    Deprecated,
    /// The word of an agent of another version.
    Other(String),
}

impl EgressInterface {
    /// Whether programs are attached, or are to be.
    pub fn is_attached(&self) -> bool {
        !matches!(self.state, InterfaceState::Absent(_))
    }

    /// Why it cannot send, although it has programs.
    pub fn impairment(&self) -> Option<&InterfaceReason> {
        match &self.state {
            InterfaceState::Attached(reason) => Some(reason),
            InterfaceState::Absent(_) | InterfaceState::Usable => None,
        }
    }

    /// Prefixes that its packets have a route to, apart from the uplink's default routes.
    pub fn reached(&self) -> impl Iterator<Item = IpNet> {
        self.networks.keys().chain(&self.destinations).copied()
    }

    /// The longest network that hosts the address.
    pub fn network_of(&self, address: IpAddr) -> Option<IpNet> {
        let hosting =
            self.networks.iter().filter(|(network, excluded)| excluded.is_none() && network.contains(&address));
        hosting.map(|(network, _)| *network).max_by_key(IpNet::prefix_len)
    }
}

impl InterfaceReason {
    const KNOWN: [Self; 10] = [
        Self::NotAttached,
        Self::SharesDevice,
        Self::Down,
        Self::NoCarrier,
        Self::NextHopLost,
        Self::TooManyRoutes,
        Self::VirtualIp,
        Self::Secondary,
        Self::Temporary,
        Self::Deprecated,
    ];

    /// The word in an EgressNode object.
    pub fn code(&self) -> &str {
        match self {
            Self::NotAttached => "NotAttached",
            Self::SharesDevice => "SharesDevice",
            Self::Down => "Down",
            Self::NoCarrier => "NoCarrier",
            Self::NextHopLost => "NextHopLost",
            Self::TooManyRoutes => "TooManyRoutes",
            Self::VirtualIp => "VirtualIP",
            Self::Secondary => "Secondary",
            Self::Temporary => "Temporary",
            Self::Deprecated => "Deprecated",
            Self::Other(code) => code,
        }
    }
}

impl From<&str> for InterfaceReason {
    fn from(code: &str) -> Self {
        let known = Self::KNOWN.into_iter().find(|known| known.code() == code);
        known.unwrap_or_else(|| Self::Other(code.to_owned()))
    }
}

/// The interface of the node that an egress IP belongs to; `None` if the address is in no network of those that host any.
///
/// It is the uplink if the address is in any of its networks, as in OVN-Kubernetes. Among others the longest prefix
/// decides; of two interfaces in one network it is the first by name, since indices change at a reboot. Whether an
/// attached interface can send is no input: while it cannot, its addresses belong to no other interface of the node.
pub fn choose(interfaces: &[EgressInterface], address: IpAddr) -> Option<&EgressInterface> {
    let attached = interfaces.iter().filter(|one| one.is_attached());
    let holding = attached.filter_map(|one| Some((one, one.network_of(address)?.prefix_len())));
    let best = holding.min_by_key(|(one, prefix_len)| (!one.is_uplink, Reverse(*prefix_len), &one.name));
    best.map(|(one, _)| one)
}

/// Records which of the interfaces have programs. The uplink keeps its state: the agent waits for its programs.
pub fn set_attached(interfaces: &mut [EgressInterface], attached: &BTreeSet<u32>) {
    let lacks_programs =
        |one: &&mut EgressInterface| one.is_attached() && !one.is_uplink && !attached.contains(&one.index);
    for one in interfaces.iter_mut().filter(lacks_programs) {
        one.state = InterfaceState::Absent(InterfaceReason::NotAttached);
    }
}

/// Records that these interfaces cannot send for want of a next hop.
pub fn set_next_hops_lost(interfaces: &mut [EgressInterface], lost: &BTreeSet<u32>) {
    let works = |one: &&mut EgressInterface| one.state == InterfaceState::Usable && !one.is_uplink;
    for one in interfaces.iter_mut().filter(works).filter(|one| lost.contains(&one.index)) {
        one.state = InterfaceState::Attached(InterfaceReason::NextHopLost);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::samples::{interface, ip, net};

    const V4: (&str, &str) = ("10.10.10.0/24", "10.10.10.100");
    const V6: (&str, &str) = ("fd00:10::/64", "fd00:10::100");

    fn uplink() -> EgressInterface {
        EgressInterface { is_uplink: true, ..interface("eth0", &["172.18.0.0/16", "fd00:172:18::/64"]) }
    }

    /// The name of the interface, whatever the order of the records.
    fn chosen(records: &[EgressInterface], address: &str) -> Option<String> {
        let name = |records: &[EgressInterface]| choose(records, ip(address)).map(|one| one.name.clone());
        let reversed: Vec<_> = records.iter().rev().cloned().collect();
        assert_eq!(name(records), name(&reversed), "the order of the records decides nothing");
        name(records)
    }

    #[test]
    fn an_address_belongs_to_the_interface_of_its_network_alone() {
        for (network, address) in [V4, V6] {
            let records =
                [uplink(), interface("eth1", &[network]), interface("eth2", &["192.0.2.0/24", "fd00:2::/64"])];
            assert_eq!(chosen(&records, address).as_deref(), Some("eth1"));
            assert_eq!(chosen(&records[..1], address), None, "never to the uplink, where no host asks for it");
        }
        assert_eq!(chosen(&[], V4.1), None);
    }

    #[test]
    fn an_interface_that_cannot_send_keeps_its_addresses_and_one_without_programs_has_none() {
        for (network, address) in [V4, V6] {
            let wider = net(network).supernet().expect("a wider network").to_string();
            for (state, chosen_then) in [
                (InterfaceState::Attached(InterfaceReason::Down), Some("eth2")),
                (InterfaceState::Attached(InterfaceReason::NoCarrier), Some("eth2")),
                (InterfaceState::Usable, Some("eth2")),
                (InterfaceState::Absent(InterfaceReason::NotAttached), None),
            ] {
                let one = EgressInterface { state, ..interface("eth2", &[network]) };
                let records = [uplink(), one, interface("eth1", &[&wider])];
                assert_eq!(chosen(&records[..2], address).as_deref(), chosen_then);
                assert_eq!(chosen(&records, address).as_deref(), chosen_then.or(Some("eth1")));
            }
        }
    }

    #[test]
    fn a_network_of_virtual_secondary_temporary_or_deprecated_addresses_hosts_nothing() {
        for (network, address) in [V4, V6] {
            let wider = net(network).supernet().expect("a wider network").to_string();
            for reason in [
                InterfaceReason::VirtualIp,
                InterfaceReason::Secondary,
                InterfaceReason::Temporary,
                InterfaceReason::Deprecated,
                InterfaceReason::Other("Unheard".into()),
            ] {
                let one = EgressInterface { networks: [(net(network), Some(reason))].into(), ..interface("eth1", &[]) };
                let records = [uplink(), one, interface("eth2", &[&wider])];
                assert_eq!(chosen(&records[..2], address), None);
                assert_eq!(chosen(&records, address).as_deref(), Some("eth2"), "and hides no other network");
            }
        }
    }

    #[test]
    fn of_two_interfaces_in_one_network_the_first_by_name_has_it() {
        for (network, address) in [V4, V6] {
            let (mut one, other) = (interface("eth2", &[network]), interface("eth1", &[network]));
            one.index = other.index - 1;
            assert_eq!(chosen(&[uplink(), one.clone(), other], address).as_deref(), Some("eth1"), "not by index");
            assert_eq!(chosen(&[uplink(), one], address).as_deref(), Some("eth2"));
        }
    }

    #[test]
    fn the_longest_prefix_decides() {
        let records = [uplink(), interface("eth1", &["10.0.0.0/8", "fd00::/16"]), interface("eth2", &[V4.0, V6.0])];
        for (address, name) in [(V4.1, "eth2"), ("10.10.11.1", "eth1"), (V6.1, "eth2"), ("fd00:11::1", "eth1")] {
            assert_eq!(chosen(&records, address).as_deref(), Some(name), "{address}");
        }
    }

    #[test]
    fn every_network_of_the_uplink_is_the_uplinks() {
        let mut second = uplink();
        second.networks.extend([V4, V6].map(|(network, _)| (net(network), None)));
        let narrower = interface("eth1", &["10.10.10.96/28", "fd00:10::/112", "172.18.9.0/24"]);
        for address in [V4.1, V6.1, "172.18.9.9"] {
            assert_eq!(chosen(&[second.clone(), narrower.clone()], address).as_deref(), Some("eth0"), "{address}");
        }
    }

    #[test]
    fn networks_of_vlans_that_one_node_cannot_have_contradict_each_other() {
        let of = |vlan, gateway: &str| VlanNetwork { vlan, gateway: net(gateway) };
        let one = of(7, "10.10.0.1/24");
        for (other, expected) in [
            (one, false),
            (of(7, "10.10.0.2/24"), true),
            (of(7, "10.10.0.1/25"), true),
            (of(7, "10.20.0.1/24"), true),
            (of(7, "fd00:10::1/64"), false),
            (of(8, "10.10.0.1/24"), true),
            (of(8, "10.10.0.130/25"), true),
            (of(8, "10.0.0.1/8"), true),
            (of(8, "10.20.0.1/24"), false),
        ] {
            assert_eq!((one.contradicts(&other), other.contradicts(&one)), (expected, expected), "{other:?}");
        }
    }

    #[test]
    fn reasons_are_read_as_they_are_written() {
        for reason in InterfaceReason::KNOWN.into_iter().chain([InterfaceReason::Other("Unheard".into())]) {
            assert_eq!(InterfaceReason::from(reason.code()), reason);
        }
    }
}
