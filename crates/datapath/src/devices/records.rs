//! The node's egress interfaces ([`EgressInterface`]), from the kernel's links and addresses.
//!
//! - An egress interface is an Ethernet device with an address of global scope in a network of more than that address. A
//!   port of a bridge, a bond or an OVS bridge is none: its master has the addresses. A port of a VRF is one.
//! - The agent's other devices are none, nor those on which other software keeps addresses of services.
//! - A VLAN device of the agent's own is one without an address ([`vlans`]).
//! - A network whose addresses may move to another node, or end, hosts no egress IP, as in OVN-Kubernetes.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;

use ipnet::IpNet;
use rtnetlink::Handle;
use rtnetlink::packet_route::address::{AddressAttribute, AddressFlags, AddressMessage};
use rtnetlink::packet_route::link::{InfoKind, InfoPortKind, LinkAttribute, LinkInfo, LinkLayerType, LinkMessage};

use crate::devices::interfaces::{self, Addressed, Interface, SERVICE_DEVICE};
use crate::devices::vlans;
use crate::names::{OVERLAY_DEVICE, VLAN_DEVICE};
use crate::netlink;
use egress_core::model::interface::{
    EgressInterface, InterfaceReason, InterfaceState, MOST_INTERFACE_NETWORKS, MOST_INTERFACES,
};

/// OVN-Kubernetes' management ports, one of each network of pods.
const OVN_MANAGEMENT_PORT: &str = "ovn-k8s-mp";

/// All links and all addresses.
pub async fn dump(handle: &Handle) -> io::Result<(Vec<LinkMessage>, Vec<AddressMessage>)> {
    Ok((netlink::dump(|| handle.link().get().execute()).await?, addresses(handle).await?))
}

/// All addresses.
pub async fn addresses(handle: &Handle) -> io::Result<Vec<AddressMessage>> {
    netlink::dump(|| handle.address().get().execute()).await
}

/// The records, the uplink's first, then by name. The uplink has one whatever it is.
pub fn records(
    links: &[LinkMessage],
    addresses: &[AddressMessage],
    (uplink, mgmt_port): (&str, &str),
) -> Vec<EgressInterface> {
    let mut networks = BTreeMap::<u32, BTreeMap<IpNet, Option<InterfaceReason>>>::new();
    for (index, network, excluded) in addresses.iter().filter_map(network) {
        // One address that counts is enough.
        let known = networks.entry(index).or_default().entry(network).or_insert_with(|| excluded.clone());
        if excluded.is_none() {
            *known = None;
        }
    }
    for link in links {
        let of_pools = vlans::gateways(link).into_iter().map(|gateway| (gateway.trunc(), None));
        networks.entry(link.header.index).or_default().extend(of_pools);
    }
    let record = |link: &LinkMessage| {
        let name = interfaces::name(link)?;
        let is_uplink = name == uplink;
        let networks = networks.get(&link.header.index).cloned().unwrap_or_default();
        let is_other = || !networks.is_empty() && name != mgmt_port && can_host(link, name);
        if !is_uplink && !is_other() {
            return None;
        }
        let Interface { index, mac, mtu } = interfaces::from_message(link);
        let networks = networks.into_iter().take(MOST_INTERFACE_NETWORKS).collect();
        let destinations = BTreeSet::new();
        let name = name.to_owned();
        let (v4, v6) = interfaces::primary_addresses(addresses, index);
        let addresses = v4.map(IpAddr::V4).into_iter().chain(v6.map(IpAddr::V6)).collect();
        let state = state(link);
        let vlan = vlans::number(link);
        Some(EgressInterface { index, name, mac, mtu, is_uplink, vlan, addresses, networks, destinations, state })
    };
    let mut records: Vec<_> = links.iter().filter_map(record).collect();
    exclude_stacked(&mut records, links);
    // Devices for pools take no place of the node's own.
    let is_of_pools = |one: &EgressInterface| one.name.starts_with(VLAN_DEVICE);
    records.sort_by(|one, other| {
        (!one.is_uplink, is_of_pools(one), &one.name).cmp(&(!other.is_uplink, is_of_pools(other), &other.name))
    });
    records.truncate(MOST_INTERFACES);
    records
}

/// Leaves programs on one of two egress interfaces that see the same packets.
fn exclude_stacked(records: &mut [EgressInterface], links: &[LinkMessage]) {
    for (child, parent) in links.iter().filter_map(stacked) {
        let is_uplink = |index| records.iter().find(|one| one.index == index).map(|one| one.is_uplink);
        let excluded = match (is_uplink(child), is_uplink(parent)) {
            (Some(true), Some(_)) => parent,
            (Some(false), Some(_)) => child,
            (None, _) | (_, None) => continue,
        };
        for one in records.iter_mut().filter(|one| one.index == excluded) {
            one.state = InterfaceState::Absent(InterfaceReason::SharesDevice);
        }
    }
}

/// A macvlan or ipvlan device, and its parent in this namespace.
fn stacked(link: &LinkMessage) -> Option<(u32, u32)> {
    const KINDS: [InfoKind; 4] = [InfoKind::MacVlan, InfoKind::MacVtap, InfoKind::IpVlan, InfoKind::IpVtap];
    let is_stacked =
        interfaces::link_info(link).iter().any(|info| matches!(info, LinkInfo::Kind(kind) if KINDS.contains(kind)));
    let is_local = !link.attributes.iter().any(|attribute| matches!(attribute, LinkAttribute::LinkNetNsId(_)));
    let parent = link.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::Link(parent) => Some(*parent),
        _ => None,
    });
    parent.filter(|_| is_stacked && is_local).map(|parent| (link.header.index, parent))
}

fn can_host(link: &LinkMessage, name: &str) -> bool {
    let is_ethernet = link.header.link_layer_type == LinkLayerType::Ether;
    let of_others = [OVERLAY_DEVICE, SERVICE_DEVICE].contains(&name) || name.starts_with(OVN_MANAGEMENT_PORT);
    let has_master = link.attributes.iter().any(|attribute| matches!(attribute, LinkAttribute::Controller(_)));
    let is = |wanted: LinkInfo| interfaces::link_info(link).contains(&wanted);
    let in_vrf = || is(LinkInfo::PortKind(InfoPortKind::Vrf));
    is_ethernet && !of_others && (!has_master || in_vrf()) && !is(LinkInfo::Kind(InfoKind::Vrf))
}

/// Of an interface with programs ([`egress_core::model::interface::set_attached`]).
fn state(link: &LinkMessage) -> InterfaceState {
    match () {
        () if !interfaces::is_up(link) => InterfaceState::Attached(InterfaceReason::Down),
        () if !interfaces::has_carrier(link) => InterfaceState::Attached(InterfaceReason::NoCarrier),
        () => InterfaceState::Usable,
    }
}

/// The interface's index, the network of the address, and why this address does not let it host egress IPs.
fn network(message: &AddressMessage) -> Option<(u32, IpNet, Option<InterfaceReason>)> {
    let Addressed { address, length, flags } = interfaces::addressed(message)?;
    let network = IpNet::new(address, length).ok()?.trunc();
    if network.prefix_len() == network.max_prefix_len() {
        return None;
    }
    let is_vip =
        |attribute: &AddressAttribute| matches!(attribute, AddressAttribute::Label(label) if label.ends_with("vip"));
    // The kernel has one bit for both.
    let secondary = if address.is_ipv4() { InterfaceReason::Secondary } else { InterfaceReason::Temporary };
    let excluded = match () {
        () if message.attributes.iter().any(is_vip) => Some(InterfaceReason::VirtualIp),
        () if flags.contains(AddressFlags::Secondary) => Some(secondary),
        () if flags.contains(AddressFlags::Deprecated) => Some(InterfaceReason::Deprecated),
        () => None,
    };
    Some((message.header.index, network, excluded))
}

#[cfg(test)]
mod tests {
    use rtnetlink::packet_route::address::AddressScope;
    use rtnetlink::packet_route::link::LinkFlags;

    use super::*;

    const UPLINK: (u32, &str) = (2, "breth0");

    fn link((index, name): (u32, &str)) -> LinkMessage {
        let mut message = LinkMessage::default();
        message.header.index = index;
        message.header.link_layer_type = LinkLayerType::Ether;
        message.header.flags = LinkFlags::Up | LinkFlags::LowerUp;
        message.attributes = vec![
            LinkAttribute::IfName(name.into()),
            LinkAttribute::Mtu(1500),
            LinkAttribute::Address(vec![2, 0, 0, 0, 0, u8::try_from(index).expect("a small index")]),
        ];
        message
    }

    fn with(mut link: LinkMessage, attributes: impl IntoIterator<Item = LinkAttribute>) -> LinkMessage {
        link.attributes.extend(attributes);
        link
    }

    fn port_of(kind: InfoPortKind) -> [LinkAttribute; 2] {
        [LinkAttribute::Controller(9), LinkAttribute::LinkInfo(vec![LinkInfo::PortKind(kind)])]
    }

    fn address(index: u32, network: &str) -> AddressMessage {
        flagged(index, network, AddressFlags::Permanent)
    }

    fn flagged(index: u32, network: &str, flags: AddressFlags) -> AddressMessage {
        let network: IpNet = network.parse().expect("a literal");
        let own: IpAddr = network.addr();
        let mut message = AddressMessage::default();
        message.header.index = index;
        message.header.scope = AddressScope::Universe;
        message.header.prefix_len = network.prefix_len();
        message.attributes = vec![AddressAttribute::Address(own), AddressAttribute::Flags(flags)];
        message
    }

    fn read(links: &[LinkMessage], addresses: &[AddressMessage]) -> Vec<EgressInterface> {
        records(links, addresses, (UPLINK.1, "cni0"))
    }

    fn names(records: &[EgressInterface]) -> Vec<&str> {
        records.iter().map(|one| one.name.as_str()).collect()
    }

    /// The networks of `eth1` with these addresses.
    fn networks(addresses: &[AddressMessage]) -> Vec<(String, Option<InterfaceReason>)> {
        let records = read(&[link((3, "eth1"))], addresses);
        let networks = records.into_iter().flat_map(|one| one.networks);
        networks.map(|(network, excluded)| (network.to_string(), excluded)).collect()
    }

    #[test]
    fn a_record_has_what_the_kernel_says() {
        let both = [link((3, "eth1")), link(UPLINK)];
        let addresses = [address(2, "172.18.0.2/16"), address(3, "10.10.10.2/24"), address(3, "fd00:10::2/64")];
        let net = |text: &str| text.parse::<IpNet>().expect("a literal");
        let ip = |text: &str| text.parse::<IpAddr>().expect("a literal");
        let uplink = EgressInterface {
            index: 2,
            name: UPLINK.1.into(),
            mac: [2, 0, 0, 0, 0, 2],
            mtu: 1500,
            is_uplink: true,
            vlan: None,
            addresses: vec![ip("172.18.0.2")],
            networks: [(net("172.18.0.0/16"), None)].into(),
            destinations: BTreeSet::new(),
            state: InterfaceState::Usable,
        };
        let eth1 = EgressInterface {
            index: 3,
            name: "eth1".into(),
            mac: [2, 0, 0, 0, 0, 3],
            mtu: 1500,
            is_uplink: false,
            vlan: None,
            addresses: vec![ip("10.10.10.2"), ip("fd00:10::2")],
            networks: [(net("10.10.10.0/24"), None), (net("fd00:10::/64"), None)].into(),
            destinations: BTreeSet::new(),
            state: InterfaceState::Usable,
        };
        assert_eq!(read(&both, &addresses), [uplink, eth1]);
    }

    #[test]
    fn the_uplink_has_a_record_whatever_it_is() {
        let port = with(link(UPLINK), port_of(InfoPortKind::Bridge));
        assert_eq!(names(&read(&[port], &[])), [UPLINK.1]);
    }

    #[test]
    fn the_state_follows_the_link() {
        for (flags, state) in [
            (LinkFlags::empty(), InterfaceState::Attached(InterfaceReason::Down)),
            (LinkFlags::Up, InterfaceState::Attached(InterfaceReason::NoCarrier)),
            (LinkFlags::Up | LinkFlags::LowerUp, InterfaceState::Usable),
        ] {
            let mut links = [link(UPLINK), link((3, "eth1"))];
            links.iter_mut().for_each(|one| one.header.flags = flags);
            let states: Vec<_> =
                read(&links, &[address(3, "10.10.10.2/24")]).into_iter().map(|one| one.state).collect();
            assert_eq!(states, [state.clone(), state]);
        }
    }

    /// Packets of a macvlan pass the hooks of its parent too.
    #[test]
    fn of_a_device_and_its_parent_one_has_programs() {
        const NONE: [u32; 0] = [];
        let on_parent = |name: (u32, &str), kind: InfoKind, parent| {
            with(link(name), [LinkAttribute::Link(parent), LinkAttribute::LinkInfo(vec![LinkInfo::Kind(kind)])])
        };
        let excluded = |links: &[LinkMessage], indices: &[u32]| {
            let addresses: Vec<_> = indices.iter().map(|i| address(*i, &format!("10.10.{i}.2/24"))).collect();
            let records = read(links, &addresses).into_iter();
            let shares = InterfaceState::Absent(InterfaceReason::SharesDevice);
            records.filter(|one| one.state == shares).map(|one| one.index).collect::<Vec<_>>()
        };
        for kind in [InfoKind::MacVlan, InfoKind::IpVlan] {
            let child = on_parent((4, "mac1"), kind.clone(), 3);
            assert_eq!(excluded(&[link((3, "eth1")), child.clone()], &[3, 4]), [4]);
            assert_eq!(excluded(&[link((3, "eth1")), child.clone()], &[4]), NONE, "the parent hosts nothing");
            assert_eq!(
                excluded(&[link((3, "eth1")), on_parent(UPLINK, kind, 3)], &[3]),
                [3],
                "the uplink has programs"
            );
            let elsewhere = with(child, [LinkAttribute::LinkNetNsId(1)]);
            assert_eq!(excluded(&[link((3, "eth1")), elsewhere], &[3, 4]), NONE, "an index of another namespace");
        }
        let tagged = on_parent((4, "eth1.5"), InfoKind::Vlan, 3);
        assert_eq!(
            excluded(&[link((3, "eth1")), tagged], &[3, 4]),
            NONE,
            "the parent's programs leave tagged frames alone"
        );
    }

    #[test]
    fn only_devices_that_can_host_have_a_record() {
        let of_kind = |kind: InfoKind| vec![LinkAttribute::LinkInfo(vec![LinkInfo::Kind(kind)])];
        let port = |kind| port_of(kind).to_vec();
        let ovs = || InfoPortKind::Other("openvswitch".into());
        for (name, attributes, expected) in [
            ("eth1", vec![], true),
            ("bond0", of_kind(InfoKind::Bond), true),
            ("br1", of_kind(InfoKind::Bridge), true),
            ("eth0.5", of_kind(InfoKind::Vlan), true),
            ("mac1", of_kind(InfoKind::MacVlan), true),
            ("ipvlan1", of_kind(InfoKind::IpVlan), true),
            ("in_a_vrf", port(InfoPortKind::Vrf), true),
            ("in_a_bridge", port(InfoPortKind::Bridge), false),
            ("in_a_bond", port(InfoPortKind::Bond), false),
            ("in_a_team", port(InfoPortKind::Team), false),
            ("in_ovs", port(ovs()), false),
            ("a_master", vec![LinkAttribute::Controller(9)], false),
            ("vrf1", of_kind(InfoKind::Vrf), false),
            ("cni0", of_kind(InfoKind::Bridge), false),
            (OVERLAY_DEVICE, of_kind(InfoKind::Vxlan), false),
            (SERVICE_DEVICE, of_kind(InfoKind::Dummy), false),
            ("ovn-k8s-mp1", vec![], false),
        ] {
            let records = read(&[with(link((3, name)), attributes)], &[address(3, "10.10.10.2/24")]);
            assert_eq!(!records.is_empty(), expected, "{name}");
        }
        let mut tunnel = link((3, "tun0"));
        tunnel.header.link_layer_type = LinkLayerType::None;
        assert_eq!(read(&[tunnel], &[address(3, "10.10.10.2/24")]), []);
        assert_eq!(read(&[link((3, "veth1"))], &[address(4, "10.10.10.2/24")]), [], "a pod's end has no address");
    }

    #[test]
    fn addresses_that_may_move_or_end_let_their_network_host_nothing() {
        let v4 = |excluded| vec![("10.10.10.0/24".to_owned(), excluded)];
        let v6 = |excluded| vec![("fd00:10::/64".to_owned(), excluded)];
        let mut vip = address(3, "10.10.10.9/24");
        vip.attributes.push(AddressAttribute::Label("eth1:vip".into()));
        let mut labelled = address(3, "10.10.10.9/24");
        labelled.attributes.push(AddressAttribute::Label("eth1".into()));
        let of = |network, flags| flagged(3, network, flags);
        use AddressFlags as Flags;
        for (address, expected) in [
            (vip.clone(), v4(Some(InterfaceReason::VirtualIp))),
            (labelled, v4(None)),
            (of("10.10.10.9/24", Flags::Secondary), v4(Some(InterfaceReason::Secondary))),
            (of("10.10.10.9/24", Flags::Deprecated), v4(Some(InterfaceReason::Deprecated))),
            (of("fd00:10::9/64", Flags::Secondary), v6(Some(InterfaceReason::Temporary))),
            (of("fd00:10::9/64", Flags::Deprecated), v6(Some(InterfaceReason::Deprecated))),
            (of("fd00:10::9/64", Flags::Permanent), v6(None)),
            (of("fd00:10::9/64", Flags::Tentative), vec![]),
            (of("10.10.10.9/32", Flags::Permanent), vec![]),
            (of("fd00:10::9/128", Flags::Permanent), vec![]),
        ] {
            assert_eq!(networks(std::slice::from_ref(&address)), expected, "{address:?}");
        }
        let own = address(3, "10.10.10.2/24");
        for both in [[own.clone(), vip.clone()], [vip, own]] {
            assert_eq!(networks(&both), v4(None), "the node has an address of its own there too");
        }
        let mut local = address(3, "10.10.10.2/24");
        local.header.scope = AddressScope::Link;
        assert_eq!(networks(&[local]), []);
    }

    #[test]
    fn records_are_bounded_and_the_uplink_is_among_them() {
        let links: Vec<_> = (1..=40).map(|i| link((i, &format!("a{i:02}")))).chain([link((50, UPLINK.1))]).collect();
        let own = |i: u32| (0..=70).map(move |j| address(i, &format!("10.{i}.{j}.1/24")));
        let addresses: Vec<_> = (1..=40).flat_map(own).collect();
        let records = read(&links, &addresses);
        let mut expected = vec![UPLINK.1.to_owned()];
        expected.extend((1..MOST_INTERFACES).map(|i| format!("a{i:02}")));
        assert_eq!(names(&records), expected);
        assert_eq!(records[1].networks.len(), MOST_INTERFACE_NETWORKS);
    }
}
