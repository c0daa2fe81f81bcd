//! Facts about the node's devices, by rtnetlink.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use futures::TryStreamExt;
use ipnet::IpNet;
use rtnetlink::Handle;
use rtnetlink::packet_route::address::{AddressAttribute, AddressFlags, AddressMessage, AddressScope};
use rtnetlink::packet_route::link::{InfoBridge, InfoData, InfoKind, LinkAttribute, LinkFlags, LinkInfo, LinkMessage};
use tokio::sync::watch;

use crate::attach::pod_interfaces::PodInterface;
use crate::devices::routes::Routes;
use crate::error::netlink_io;
use crate::names::{AttachPoint, Device, Hook};
use egress_core::model::interface::{EgressInterface, InterfaceState, choose};
use egress_core::model::node::Mac;

/// kube-proxy in IPVS mode keeps the addresses of all services on this device.
pub const SERVICE_DEVICE: &str = "kube-ipvs0";

/// Maximum gateways of an interface that are asked whether they are there.
const MOST_GATEWAYS: usize = 8;

/// A further egress interface and the gateways of its routes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InterfaceGateways {
    pub index: u32,
    pub mac: Mac,
    /// The gateways, each with this node's own address that asks for it.
    pub asked: Vec<(IpAddr, IpAddr)>,
}

/// What is asked about further interfaces, and where the answer goes: those without a next hop.
pub struct FurtherNextHops {
    pub asked: watch::Receiver<Vec<InterfaceGateways>>,
    pub lost: watch::Sender<BTreeSet<u32>>,
}

/// The properties of a device that the programs need.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Interface {
    pub index: u32,
    pub mac: [u8; 6],
    pub mtu: u32,
}

/// Current facts of the node; a missing device is `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeFacts {
    pub uplink: Option<Interface>,
    /// See [`is_paced`](crate::devices::queueing::is_paced).
    pub uplink_is_paced: bool,
    pub mgmt: Option<Interface>,
    /// See [`filters_ports`].
    pub mgmt_filters_ports: bool,
    /// A pod's own interface; only looked for while the management port is missing.
    pub pod_interface: Option<PodInterface>,
    pub overlay: Option<Interface>,
    /// Created down, and brought up when its program is attached.
    pub overlay_up: bool,
    /// Primary addresses of the uplink.
    pub v4: Option<Ipv4Addr>,
    pub v6: Option<Ipv6Addr>,
    /// The same of the further egress interfaces, by index.
    pub further_addresses: BTreeMap<u32, (Option<Ipv4Addr>, Option<Ipv6Addr>)>,
    /// The VLAN devices for pools, with their link-local addresses: they have no others.
    pub pool_vlans: BTreeMap<u32, Option<Ipv6Addr>>,
    /// The routes of the further egress interfaces, and their neighbours with a link address.
    pub routes: Routes,
    pub neighbours: BTreeMap<(u32, IpAddr), Mac>,
    /// The uplink and the other interfaces that can host egress IPs.
    pub interfaces: Vec<EgressInterface>,
    /// The addresses in use on all interfaces.
    pub addresses: BTreeSet<IpAddr>,
}

impl NodeFacts {
    /// The interface that hosts an egress IP: whose neighbours are asked for it, and on which it is answered and announced.
    /// An address in no network of an interface is the uplink's if it is in one of these networks.
    pub fn interface_of(&self, address: IpAddr, primary_networks: &[IpNet]) -> Option<Interface> {
        match choose(&self.interfaces, address) {
            Some(EgressInterface { is_uplink: true, .. }) => self.uplink,
            Some(other) => Some(Interface { index: other.index, mac: other.mac, mtu: other.mtu }),
            None => self.uplink.filter(|_| primary_networks.iter().any(|network| network.contains(&address))),
        }
    }

    /// The gateways of the further interfaces that can send, with the own address that asks for each.
    pub fn gateways(&self) -> Vec<InterfaceGateways> {
        let usable = self.interfaces.iter().filter(|one| !one.is_uplink && one.state == InterfaceState::Usable);
        let of_interface = |one: &EgressInterface| {
            let (v4, v6) = self.further_addresses.get(&one.index).copied().unwrap_or_default();
            // On a VLAN device for a pool, ARP requests have no sender, as probes have (RFC 5227 section 2.1.1).
            let of_pool = self.pool_vlans.get(&one.index);
            let own = |gateway: &IpAddr| match gateway {
                IpAddr::V4(_) => v4.or(of_pool.map(|_| Ipv4Addr::UNSPECIFIED)).map(IpAddr::V4),
                IpAddr::V6(_) => v6.or(of_pool.copied().flatten()).map(IpAddr::V6),
            };
            let routes = self.routes.iter().filter(|((index, _), _)| *index == one.index);
            let all: BTreeSet<IpAddr> = routes.flat_map(|(_, route)| route.hops().map(|hop| hop.to_ip())).collect();
            let asked = all.iter().filter_map(|gateway| Some((*gateway, own(gateway)?))).take(MOST_GATEWAYS);
            InterfaceGateways { index: one.index, mac: one.mac, asked: asked.collect() }
        };
        usable.map(of_interface).filter(|one| !one.asked.is_empty()).collect()
    }

    pub fn interface_indices(&self) -> BTreeSet<u32> {
        self.interfaces.iter().map(|one| one.index).collect()
    }

    /// What decides where an egress IP belongs.
    pub fn hosts(&self) -> (Option<Interface>, &[EgressInterface]) {
        (self.uplink, &self.interfaces)
    }

    /// The indices of the interfaces that can send.
    pub fn usable(&self) -> BTreeSet<u32> {
        let usable = self.interfaces.iter().filter(|one| one.state == InterfaceState::Usable);
        usable.map(|one| one.index).collect()
    }

    /// The places of the programs of these hooks on the present devices, in this order, before
    /// [`set_attached`](egress_core::model::interface::set_attached).
    pub fn places(&self, hooks: [Hook; 5]) -> Vec<AttachPoint> {
        let of_hook = |hook: Hook| {
            let own = self.device(hook.device()).map(|device| (device.index, false));
            let further = self.further().filter(move |one| one.is_attached() && Hook::NETDEV.contains(&hook));
            let further = further.map(|one| (one.index, true));
            own.into_iter().chain(further).map(move |(ifindex, is_further)| AttachPoint { hook, ifindex, is_further })
        };
        hooks.into_iter().flat_map(of_hook).collect()
    }

    /// The egress interfaces besides the uplink.
    pub fn further(&self) -> impl Iterator<Item = &EgressInterface> {
        self.interfaces.iter().filter(|one| !one.is_uplink)
    }

    pub fn device(&self, device: Device) -> Option<Interface> {
        match device {
            Device::Mgmt => self.mgmt,
            Device::Uplink => self.uplink,
            Device::Overlay => self.overlay,
        }
    }
}

/// The link message of a device; `None` if there is none.
pub async fn link(netlink: &Handle, name: &str) -> std::io::Result<Option<LinkMessage>> {
    let mut links = netlink.link().get().match_name(name).execute();
    match links.try_next().await.map_err(netlink_io) {
        Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(None),
        other => other,
    }
}

/// `None` if there is no such device.
pub async fn interface(netlink: &Handle, name: &str) -> std::io::Result<Option<Interface>> {
    Ok(link(netlink, name).await?.as_ref().map(from_message))
}

pub fn is_up(message: &LinkMessage) -> bool {
    message.header.flags.contains(LinkFlags::Up)
}

/// Up, and with a carrier.
pub fn has_carrier(message: &LinkMessage) -> bool {
    message.header.flags.contains(LinkFlags::Up | LinkFlags::LowerUp)
}

/// A bridge whose port traffic passes netfilter before the bridge's own hooks: by its own setting or by the namespace's
/// (br_netfilter, `net.bridge.bridge-nf-call-iptables`, which Kubernetes' installers switch on).
pub fn filters_ports(message: &LinkMessage) -> bool {
    let info = link_info(message);
    if !info.contains(&LinkInfo::Kind(InfoKind::Bridge)) {
        return false;
    }
    let own = info.iter().any(|info| match info {
        LinkInfo::Data(InfoData::Bridge(settings)) => settings
            .iter()
            .any(|setting| matches!(setting, InfoBridge::NfCallIpTables(true) | InfoBridge::NfCallIp6Tables(true))),
        _ => false,
    });
    let is_on = |name| {
        std::fs::read_to_string(format!("/proc/sys/net/bridge/bridge-nf-call-{name}"))
            .is_ok_and(|text| text.trim() != "0")
    };
    own || is_on("iptables") || is_on("ip6tables")
}

/// The device's kind and, for a port, its master's; empty for a physical device without a master.
pub fn link_info(message: &LinkMessage) -> &[LinkInfo] {
    let mut infos = message.attributes.iter().filter_map(|attribute| match attribute {
        LinkAttribute::LinkInfo(info) => Some(info.as_slice()),
        _ => None,
    });
    infos.next().unwrap_or_default()
}

pub fn name(message: &LinkMessage) -> Option<&str> {
    message.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::IfName(name) => Some(name.as_str()),
        _ => None,
    })
}

pub fn from_message(message: &LinkMessage) -> Interface {
    let mut interface = Interface { index: message.header.index, mac: [0; 6], mtu: 0 };
    for attribute in &message.attributes {
        match attribute {
            LinkAttribute::Mtu(mtu) => interface.mtu = *mtu,
            // A device without Ethernet addresses keeps zeros.
            LinkAttribute::Address(mac) => {
                if let Ok(mac) = mac.as_slice().try_into() {
                    interface.mac = mac;
                }
            }
            _ => {}
        }
    }
    interface
}

/// The addresses that the node itself uses on a device: global, primary, in use, and first in the kernel's order. An
/// address of full prefix length (a virtual IP of some other software) is taken only where there is no other.
pub fn primary_addresses(addresses: &[AddressMessage], index: u32) -> (Option<Ipv4Addr>, Option<Ipv6Addr>) {
    let (mut v4, mut v6) = (None, None);
    for candidate in addresses.iter().filter(|message| message.header.index == index).filter_map(candidate) {
        match candidate {
            (IpAddr::V4(address), whole) => prefer(&mut v4, address, whole),
            (IpAddr::V6(address), whole) => prefer(&mut v6, address, whole),
        }
    }
    (v4.map(|(address, _)| address), v6.map(|(address, _)| address))
}

/// The link-local IPv6 address of a device.
pub fn link_local(addresses: &[AddressMessage], index: u32) -> Option<Ipv6Addr> {
    let of_device = addresses.iter().filter(|message| message.header.index == index);
    of_device.filter_map(|message| in_use(message, AddressScope::Link)).find_map(|one| match one.address {
        IpAddr::V6(address) => Some(address),
        IpAddr::V4(_) => None,
    })
}

fn prefer<A>(best: &mut Option<(A, bool)>, address: A, whole_prefix: bool) {
    match best {
        None => *best = Some((address, whole_prefix)),
        Some((_, true)) if !whole_prefix => *best = Some((address, false)),
        Some(_) => {}
    }
}

/// The address, and whether its prefix is the address alone.
fn candidate(message: &AddressMessage) -> Option<(IpAddr, bool)> {
    let Addressed { address, length, flags } = addressed(message)?;
    if flags.intersects(AddressFlags::Secondary | AddressFlags::Deprecated) {
        return None;
    }
    let whole = if address.is_ipv4() { 32 } else { 128 };
    Some((address, length == whole))
}

/// The content of an address message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Addressed {
    pub address: IpAddr,
    /// Of its network.
    pub length: u8,
    pub flags: AddressFlags,
}

/// A usable address of global scope; `None` for any other, such as a tentative one.
pub fn addressed(message: &AddressMessage) -> Option<Addressed> {
    in_use(message, AddressScope::Universe)
}

fn in_use(message: &AddressMessage, scope: AddressScope) -> Option<Addressed> {
    if message.header.scope != scope {
        return None;
    }
    let (mut address, mut flags) = (None, AddressFlags::empty());
    for attribute in &message.attributes {
        match attribute {
            // On point-to-point devices `Address` is the peer's; `Local`, if present, is the node's.
            AddressAttribute::Local(local) => address = Some(*local),
            AddressAttribute::Address(other) if address.is_none() => address = Some(*other),
            AddressAttribute::Flags(given) => flags = *given,
            _ => {}
        }
    }
    if flags.intersects(AddressFlags::Tentative | AddressFlags::Dadfailed) {
        return None;
    }
    Some(Addressed { address: address?, length: message.header.prefix_len, flags })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(attributes: &[AddressAttribute]) -> AddressMessage {
        let mut message = AddressMessage::default();
        message.header.scope = AddressScope::Universe;
        message.header.prefix_len = 16;
        message.attributes.extend_from_slice(attributes);
        message
    }

    #[test]
    fn the_local_end_is_the_node_address() {
        let (own, peer) = ([172, 18, 0, 2].into(), [172, 18, 0, 9].into());
        for attributes in [
            [AddressAttribute::Local(own), AddressAttribute::Address(peer)],
            [AddressAttribute::Address(peer), AddressAttribute::Local(own)],
        ] {
            let seen = addressed(&message(&attributes)).map(|seen| (seen.address, seen.length));
            assert_eq!(seen, Some((own, 16)));
        }
    }

    #[test]
    fn unusable_addresses_are_ignored() {
        let own = AddressAttribute::Local([172, 18, 0, 2].into());
        let with = |flags| message(&[own.clone(), AddressAttribute::Flags(flags)]);
        for flags in [AddressFlags::Tentative, AddressFlags::Dadfailed] {
            assert_eq!(addressed(&with(flags)), None, "{flags:?}");
        }
        for flags in [AddressFlags::Secondary, AddressFlags::Deprecated] {
            assert!(addressed(&with(flags)).is_some(), "{flags:?}");
            assert_eq!(candidate(&with(flags)), None, "{flags:?}: not the one that the node uses itself");
        }
        let mut link = message(&[own]);
        assert_eq!(candidate(&link), Some(([172, 18, 0, 2].into(), false)));
        link.header.scope = AddressScope::Link;
        assert_eq!(addressed(&link), None);
    }
}
