//! CNIs whose pods do not enter the host by one interface, recognised while the management port is missing.
//!
//! Their management port never comes, so an agent that waits for it would never serve. While the port exists nothing is looked
//! for: other software may have interfaces of the same shape. An interface counts as a pod's by its name (Calico's and Cilium's),
//! or because it is a veth device outside of bridges, without a network of its own, with the route to a single address: what the
//! plugin `ptp` makes of each pod, and kindnet with it.

use std::fmt;

use rtnetlink::Handle;
use rtnetlink::packet_route::address::AddressMessage;
use rtnetlink::packet_route::link::{InfoKind, LinkAttribute, LinkInfo, LinkMessage};
use rtnetlink::packet_route::route::RouteMessage;

use crate::devices::interfaces::{self, Addressed};
use crate::devices::routes;

/// Digits in the names of pods' interfaces, after the prefix: Calico's have 11, Cilium's 12.
const FEWEST_DIGITS: usize = 11;
const OF_CALICO: &str = "cali";
const OF_CILIUM: &str = "lxc";
/// Devices of the CNIs themselves. Traffic of pods may pass them, but not all of it, or after its source was decided on.
const CILIUM_DEVICES: [&str; 4] = [CILIUM_HOST, "cilium_net", "cilium_vxlan", "cilium_geneve"];
const CALICO_DEVICES: [&str; 6] =
    ["vxlan.calico", "vxlan-v6.calico", "wireguard.cali", "wg-v6.cali", "bpfin.cali", "bpfout.cali"];
const CILIUM_HOST: &str = "cilium_host";

/// How a node's pods enter the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnservedCni {
    Cilium,
    /// With netfilter or in its eBPF mode.
    Calico,
    /// By a route to each pod.
    Routed,
}

impl fmt::Display for UnservedCni {
    fn fmt(&self, out: &mut fmt::Formatter) -> fmt::Result {
        out.write_str(match self {
            Self::Cilium => {
                "packets of Cilium's pods do not enter the host by one interface: Cilium must be chained to a CNI whose pods are \
                 on a bridge, or use its own egress gateway (docs/operations/cilium.md)"
            }
            Self::Calico => {
                "each pod of Calico enters the host by an interface of its own, in Calico's eBPF mode as well: egress-agent \
                 serves pods that enter by one interface (docs/install.md#cnis)"
            }
            Self::Routed => {
                "each pod enters the host by an interface of its own, as with kindnet and the plugin ptp: egress-agent serves \
                 pods that enter by one interface (docs/install.md#cnis)"
            }
        })
    }
}

/// A pod's own interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodInterface {
    pub name: String,
    pub cni: UnservedCni,
}

/// The CNI whose own device has this name. It is no management port.
pub fn own_device(name: &str) -> Option<UnservedCni> {
    if CILIUM_DEVICES.contains(&name) {
        return Some(UnservedCni::Cilium);
    }
    (CALICO_DEVICES.contains(&name) || has_digits_after(name, OF_CALICO)).then_some(UnservedCni::Calico)
}

/// Whether Cilium is on the node, chained or alone.
pub fn has_cilium() -> bool {
    nix::net::if_::if_nametoindex(CILIUM_HOST).is_ok()
}

/// A pod's own interface on this node, if there is one.
pub async fn look(
    netlink: &Handle,
    (links, addresses): (&[LinkMessage], &[AddressMessage]),
    uplink: &str,
) -> std::io::Result<Option<PodInterface>> {
    // Most nodes have no such device, and routes may be many.
    if !links.iter().any(|link| is_free(link, uplink)) {
        return Ok(None);
    }
    Ok(find(links, addresses, &routes::dump(netlink).await?, uplink))
}

fn find(
    links: &[LinkMessage],
    addresses: &[AddressMessage],
    all_routes: &[RouteMessage],
    uplink: &str,
) -> Option<PodInterface> {
    let has_cilium = links.iter().any(|link| interfaces::name(link) == Some(CILIUM_HOST));
    let routed = routes::to_single_addresses(all_routes, addresses);
    let has_network = |index: u32| {
        let own = addresses.iter().filter(|message| message.header.index == index);
        own.filter_map(interfaces::addressed)
            .any(|Addressed { address, length, .. }| length < if address.is_ipv4() { 32 } else { 128 })
    };
    let pod = |link: &LinkMessage| {
        let name = interfaces::name(link)?;
        let index = link.header.index;
        let cni = match () {
            () if has_digits_after(name, OF_CALICO) => UnservedCni::Calico,
            () if has_cilium && has_digits_after(name, OF_CILIUM) => UnservedCni::Cilium,
            () if routed.contains(&index) && !has_network(index) => UnservedCni::Routed,
            () => return None,
        };
        Some(PodInterface { name: name.to_owned(), cni })
    };
    let found: Vec<_> = links.iter().filter(|link| is_free(link, uplink)).filter_map(pod).collect();
    // One that is known by its name says more.
    found.iter().find(|one| one.cni != UnservedCni::Routed).or(found.first()).cloned()
}

/// A veth or netkit device that is no port of a bridge, and not the uplink, which is a veth device on nodes of kind.
fn is_free(link: &LinkMessage, uplink: &str) -> bool {
    let is_pair = interfaces::link_info(link)
        .iter()
        .any(|info| matches!(info, LinkInfo::Kind(InfoKind::Veth | InfoKind::Netkit)));
    let has_master = link.attributes.iter().any(|attribute| matches!(attribute, LinkAttribute::Controller(_)));
    is_pair && !has_master && interfaces::name(link) != Some(uplink)
}

fn has_digits_after(name: &str, prefix: &str) -> bool {
    let digits = name.strip_prefix(prefix).unwrap_or_default();
    digits.len() >= FEWEST_DIGITS && digits.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use rtnetlink::packet_route::AddressFamily;
    use rtnetlink::packet_route::address::{AddressAttribute, AddressScope};
    use rtnetlink::packet_route::route::{RouteAddress, RouteAttribute, RouteType};

    use super::*;

    const UPLINK: &str = "eth0";

    /// A veth device, a port where it has a master.
    fn veth(index: u32, name: &str, master: Option<u32>) -> LinkMessage {
        let mut link = LinkMessage::default();
        link.header.index = index;
        link.attributes.push(LinkAttribute::IfName(name.to_owned()));
        link.attributes.push(LinkAttribute::LinkInfo(vec![LinkInfo::Kind(InfoKind::Veth)]));
        link.attributes.extend(master.map(LinkAttribute::Controller));
        link
    }

    fn address(index: u32, text: &str) -> AddressMessage {
        let (ip, length) = text.split_once('/').expect("a prefix");
        let mut message = AddressMessage::default();
        message.header.index = index;
        message.header.scope = AddressScope::Universe;
        message.header.prefix_len = length.parse().expect("a length");
        message.attributes.push(AddressAttribute::Address(ip.parse().expect("a literal")));
        message
    }

    /// A route of the main table.
    fn route(index: u32, to: &str, gateway: Option<&str>) -> RouteMessage {
        let wrapped = |ip: &str| match ip.parse().expect("a literal") {
            IpAddr::V4(v4) => RouteAddress::Inet(v4),
            IpAddr::V6(v6) => RouteAddress::Inet6(v6),
        };
        let (ip, length) = to.split_once('/').expect("a prefix");
        let mut message = RouteMessage::default();
        message.header.address_family = if ip.contains(':') { AddressFamily::Inet6 } else { AddressFamily::Inet };
        message.header.table = 254;
        message.header.kind = RouteType::Unicast;
        message.header.destination_prefix_length = length.parse().expect("a length");
        message.attributes.push(RouteAttribute::Destination(wrapped(ip)));
        message.attributes.push(RouteAttribute::Oif(index));
        message.attributes.extend(gateway.map(|ip| RouteAttribute::Gateway(wrapped(ip))));
        message
    }

    fn netkit(index: u32, name: &str) -> LinkMessage {
        let mut link = veth(index, name, None);
        link.attributes.pop();
        link.attributes.push(LinkAttribute::LinkInfo(vec![LinkInfo::Kind(InfoKind::Netkit)]));
        link
    }

    fn found(links: &[LinkMessage], addresses: &[AddressMessage], routes: &[RouteMessage]) -> Option<UnservedCni> {
        find(links, addresses, routes, UPLINK).map(|one| one.cni)
    }

    #[test]
    fn a_route_to_each_pod_is_kindnets() {
        let links = [veth(2, UPLINK, None), veth(7, "veth1f0a22b4", None)];
        // As `ptp` leaves them: the gateway's address on each interface, and the route.
        for (own, pod) in [("10.244.1.1/32", "10.244.1.5/32"), ("fd00:10:244:1::1/128", "fd00:10:244:1::5/128")] {
            let own = [address(2, "172.18.0.3/16"), address(7, own)];
            let pod = [route(2, "0.0.0.0/0", Some("172.18.0.1")), route(7, pod, None)];
            let seen = find(&links, &own, &pod, UPLINK).expect("a pod");
            assert_eq!((seen.name.as_str(), seen.cni), ("veth1f0a22b4", UnservedCni::Routed));
            assert_eq!(found(&links, &own, &pod[..1]), None, "a veth device without a route");
        }
    }

    #[test]
    fn names_of_calico_and_cilium_are_known() {
        let calico = [veth(7, "veth1", None), veth(8, "cali0123456789a", None)];
        let routes = [route(7, "10.244.1.5/32", None)];
        assert_eq!(found(&calico, &[], &[]), Some(UnservedCni::Calico));
        assert_eq!(found(&calico, &[], &routes), Some(UnservedCni::Calico), "the name says more than the route");
        let pod = veth(7, "lxc0123456789ab", None);
        assert_eq!(found(&[veth(3, CILIUM_HOST, None), pod.clone()], &[], &[]), Some(UnservedCni::Cilium));
        assert_eq!(found(&[pod], &[], &[]), None, "no Cilium");
        let of_netkit = [veth(3, CILIUM_HOST, None), netkit(7, "lxc0123456789ab")];
        assert_eq!(found(&of_netkit, &[], &[]), Some(UnservedCni::Cilium), "netkit devices");
        assert_eq!(own_device("cilium_net"), Some(UnservedCni::Cilium));
        assert_eq!(own_device("bpfin.cali"), Some(UnservedCni::Calico));
        for served in ["cni0", "ovn-k8s-mp0", "calibration0", "cbr0", "br-lan"] {
            assert_eq!(own_device(served), None, "{served}");
        }
    }

    /// Nodes that are served, before their management port has come.
    #[test]
    fn what_is_served_is_not_refused() {
        let chained = [veth(3, CILIUM_HOST, None), veth(4, "cilium_net", None), veth(7, "veth1", Some(9))];
        let routes = [route(3, "10.0.0.7/32", None), route(7, "10.244.1.5/32", None)];
        assert_eq!(found(&chained, &[address(3, "10.0.0.7/32")], &routes), None, "Cilium, chained to a bridge CNI");

        // kind's node: the uplink is a veth device, and a cloud's router has a route of its own.
        let routes = [route(2, "172.18.0.1/32", None), route(2, "0.0.0.0/0", Some("172.18.0.1"))];
        assert_eq!(found(&[veth(2, UPLINK, None)], &[address(2, "172.18.0.3/32")], &routes), None, "the uplink");
        assert_eq!(found(&[veth(2, "eth1", None)], &[address(2, "172.18.0.3/32")], &routes), None, "another NIC");

        let pods_of_ovn = [veth(8, "3f0a22b41c88d2e", Some(4)), veth(9, "lxcbr0-port", None)];
        assert_eq!(found(&pods_of_ovn, &[address(9, "10.0.3.1/24")], &[route(9, "10.0.3.7/32", None)]), None);

        // The kernel's own route to an address without a network.
        let own = [address(9, "2001:db8::7/128")];
        assert_eq!(found(&[veth(9, "dummy-peer", None)], &own, &[route(9, "2001:db8::7/128", None)]), None);
    }
}
