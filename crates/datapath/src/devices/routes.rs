//! The routes of further egress interfaces, from the kernel's tables, as the map `routes` has them.
//!
//! - A packet leaves by the interface of its egress IP, so the longest match among the routes of this interface alone counts,
//!   and of equal prefixes the one with the lowest metric.
//! - The table is the main one, or that of the VRF that the interface is a port of. Rules (`ip rule`) do not count.
//! - A default route without a gateway is left out: each destination of the world would be asked for on the network.
//! - A route that refuses its packets (blackhole, unreachable, prohibit) has no interface and counts for each.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;

use egress_common::abi::{Addr, MAX_NEXT_HOPS, RouteEntry, RouteKind};
use egress_core::model::interface::MOST_DESTINATIONS;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use rtnetlink::packet_route::AddressFamily;
use rtnetlink::packet_route::address::AddressMessage;
use rtnetlink::packet_route::link::{InfoData, InfoKind, InfoVrf, LinkAttribute, LinkInfo, LinkMessage};
use rtnetlink::packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteMessage, RouteMetric, RouteNextHop, RouteNextHopFlags, RouteType,
    RouteVia,
};
use rtnetlink::{Handle, RouteMessageBuilder};

use crate::devices::interfaces;
use crate::netlink;

/// Most routes of an interface, so that the map has room for those of all (`MOST_INTERFACES`). Beyond it none is used, since a
/// part of a table would send packets the wrong way.
pub const MOST_ROUTES: usize = 1024;

/// The kernel's main table.
const MAIN: u32 = 254;

/// Routes by interface and prefix.
pub type Routes = BTreeMap<(u32, IpNet), RouteEntry>;

/// All routes of both families.
pub async fn dump(handle: &Handle) -> io::Result<Vec<RouteMessage>> {
    let mut all = Vec::new();
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        let mut ask = RouteMessageBuilder::<IpAddr>::new().build();
        ask.header.address_family = family;
        all.extend(netlink::dump(|| handle.route().get(ask.clone()).execute()).await?);
    }
    Ok(all)
}

/// The table of an interface.
pub fn table(links: &[LinkMessage], ifindex: u32) -> u32 {
    let link = |index| links.iter().find(|link| link.header.index == index);
    let master = link(ifindex).and_then(|link| {
        link.attributes.iter().find_map(|attribute| match attribute {
            LinkAttribute::Controller(master) => Some(*master),
            _ => None,
        })
    });
    master.and_then(link).and_then(vrf_table).unwrap_or(MAIN)
}

fn vrf_table(link: &LinkMessage) -> Option<u32> {
    let info = interfaces::link_info(link);
    if !info.contains(&LinkInfo::Kind(InfoKind::Vrf)) {
        return None;
    }
    info.iter().find_map(|info| match info {
        LinkInfo::Data(InfoData::Vrf(data)) => data.iter().find_map(|data| match data {
            InfoVrf::TableId(table) => Some(*table),
            _ => None,
        }),
        _ => None,
    })
}

/// The routes of one interface; `None` if there are more than [`MOST_ROUTES`].
pub fn of_interface(messages: &[RouteMessage], ifindex: u32, table: u32) -> Option<BTreeMap<IpNet, RouteEntry>> {
    let mut best = BTreeMap::<IpNet, (u32, Vec<RouteHop>, RouteUse, u32)>::new();
    for message in messages.iter().filter(|message| table_of(message) == table) {
        let Some(FoundRoute { net, metric, kind, hops, mtu }) = found(message, ifindex) else { continue };
        match best.get_mut(&net) {
            Some((known, ..)) if *known < metric => {}
            // The kernel lists each next hop of an IPv6 route by itself, if they were added so.
            Some((known, others, RouteUse::Unicast, _)) if *known == metric && kind == RouteUse::Unicast => {
                others.extend(hops)
            }
            Some((known, ..)) if *known == metric => {}
            _ => drop(best.insert(net, (metric, hops, kind, mtu))),
        }
    }
    let entry = |(net, (_, hops, kind, mtu)): (IpNet, (u32, Vec<RouteHop>, RouteUse, u32))| {
        Some((
            net,
            match kind {
                RouteUse::Refused => RouteEntry::new(RouteKind::Refused, 0),
                RouteUse::Unicast => usable(&hops, mtu, net)?,
            },
        ))
    };
    let routes: BTreeMap<_, _> = best.into_iter().filter_map(entry).collect();
    (routes.len() <= MOST_ROUTES).then_some(routes)
}

/// The interfaces that the main table leads single addresses to, other than the node's own, and none of whose routes has a gateway.
pub fn to_single_addresses(messages: &[RouteMessage], own: &[AddressMessage]) -> BTreeSet<u32> {
    let own: BTreeSet<IpAddr> = own.iter().filter_map(interfaces::addressed).map(|one| one.address).collect();
    let (mut to_one, mut by_gateway) = (BTreeSet::new(), BTreeSet::new());
    for message in messages.iter().filter(|message| table_of(message) == MAIN) {
        let device = message.attributes.iter().find_map(|attribute| match attribute {
            RouteAttribute::Oif(index) => Some(*index),
            _ => None,
        });
        let Some((index, route)) = device.and_then(|index| Some((index, found(message, index)?))) else { continue };
        let is_single = route.net.prefix_len() == route.net.max_prefix_len() && !own.contains(&route.net.addr());
        match route.hops.iter().any(|hop| hop.gateway.is_some()) {
            true => _ = by_gateway.insert(index),
            false if is_single && route.kind == RouteUse::Unicast => _ = to_one.insert(index),
            false => {}
        }
    }
    &to_one - &by_gateway
}

/// Those of a network whose router is known: the network itself, and everything else by the router.
pub fn of_gateway(gateway: &IpNet) -> [(IpNet, RouteEntry); 2] {
    let everything = match gateway {
        IpNet::V4(_) => IpNet::V4(Ipv4Net::default()),
        IpNet::V6(_) => IpNet::V6(Ipv6Net::default()),
    };
    let by_gateway = RouteEntry::via(&[gateway.addr().into()], 0);
    [(gateway.trunc(), RouteEntry::new(RouteKind::OnLink, 0)), (everything, by_gateway)]
}

/// The prefixes that an interface publishes: those of its routes beyond its networks, the shortest ones.
pub fn destinations<T>(routes: &BTreeMap<IpNet, RouteEntry>, networks: &BTreeMap<IpNet, T>) -> BTreeSet<IpNet> {
    let leads =
        |(net, route): &(&IpNet, &RouteEntry)| route.kind() != Some(RouteKind::Refused) && !networks.contains_key(*net);
    let mut all: Vec<IpNet> = routes.iter().filter(leads).map(|(net, _)| *net).collect();
    all.sort_by_key(IpNet::prefix_len);
    all.into_iter().take(MOST_DESTINATIONS).collect()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RouteUse {
    Unicast,
    Refused,
}

/// A next hop by the interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RouteHop {
    gateway: Option<IpAddr>,
    weight: usize,
}

/// A message about a route that concerns the interface.
struct FoundRoute {
    net: IpNet,
    metric: u32,
    kind: RouteUse,
    hops: Vec<RouteHop>,
    mtu: u32,
}

fn table_of(message: &RouteMessage) -> u32 {
    let table = message.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Table(table) => Some(*table),
        _ => None,
    });
    table.unwrap_or(u32::from(message.header.table))
}

fn found(message: &RouteMessage, ifindex: u32) -> Option<FoundRoute> {
    let header = &message.header;
    let kind = match header.kind {
        RouteType::Unicast => RouteUse::Unicast,
        RouteType::BlackHole | RouteType::Unreachable | RouteType::Prohibit => RouteUse::Refused,
        _ => return None,
    };
    // Routes by source or type of service apply to a part of the packets.
    if header.tos != 0 || header.source_prefix_length != 0 || header.flags.contains(RouteFlags::Cloned) {
        return None;
    }
    let (mut to, mut metric, mut mtu) = (None, 0, 0);
    let (mut gateway, mut device, mut hops) = (None, None, Vec::new());
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Destination(address) => to = Some(ip(address)?),
            RouteAttribute::Priority(priority) => metric = *priority,
            RouteAttribute::Oif(index) => device = Some(*index),
            RouteAttribute::Gateway(address) => gateway = Some(ip(address)?),
            RouteAttribute::Via(via) => gateway = Some(via_ip(via)?),
            RouteAttribute::MultiPath(all) => hops = all.iter().filter_map(|hop| multipath(hop, ifindex)).collect(),
            RouteAttribute::Metrics(metrics) => mtu = route_mtu(metrics),
            _ => {}
        }
    }
    let net = prefix(to, header.address_family, header.destination_prefix_length)?;
    let is_dead = header.flags.intersects(RouteFlags::Dead | RouteFlags::Linkdown);
    if device == Some(ifindex) && hops.is_empty() && !is_dead {
        hops.push(RouteHop { gateway, weight: 1 });
    }
    let concerns = kind == RouteUse::Refused || !hops.is_empty();
    (concerns && !is_link_local(net)).then_some(FoundRoute { net, metric, kind, hops, mtu })
}

fn multipath(hop: &RouteNextHop, ifindex: u32) -> Option<RouteHop> {
    if hop.interface_index != ifindex || hop.flags.intersects(RouteNextHopFlags::Dead | RouteNextHopFlags::Linkdown) {
        return None;
    }
    let gateway = hop.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Gateway(address) => ip(address),
        RouteAttribute::Via(via) => via_ip(via),
        _ => None,
    });
    Some(RouteHop { gateway, weight: usize::from(hop.hops) + 1 })
}

/// The entry of a route with these next hops; `None` if it is left out.
fn usable(hops: &[RouteHop], mtu: u32, net: IpNet) -> Option<RouteEntry> {
    let gateways: Vec<(Addr, usize)> = hops.iter().filter_map(|hop| Some((hop.gateway?.into(), hop.weight))).collect();
    if gateways.is_empty() {
        return (net.prefix_len() != 0).then(|| RouteEntry::new(RouteKind::OnLink, mtu));
    }
    Some(RouteEntry::via(&by_weight(&gateways), mtu))
}

/// Each next hop at least once, and as often as its weight asks for among [`MAX_NEXT_HOPS`].
fn by_weight(gateways: &[(Addr, usize)]) -> Vec<Addr> {
    let gateways = &gateways[..gateways.len().min(MAX_NEXT_HOPS)];
    let mut places: Vec<usize> = vec![1; gateways.len()];
    let is_even = gateways.iter().all(|(_, weight)| *weight == gateways[0].1);
    if !is_even {
        for _ in gateways.len()..MAX_NEXT_HOPS {
            // The one that has the fewest for its weight.
            let poorest = (0..gateways.len())
                .max_by(|a, b| (gateways[*a].1 * places[*b]).cmp(&(gateways[*b].1 * places[*a])).then(b.cmp(a)));
            places[poorest.unwrap_or_default()] += 1;
        }
    }
    gateways.iter().zip(places).flat_map(|((gateway, _), count)| std::iter::repeat_n(*gateway, count)).collect()
}

fn route_mtu(metrics: &[RouteMetric]) -> u32 {
    let mtu = metrics.iter().find_map(|metric| match metric {
        RouteMetric::Mtu(mtu) => Some(*mtu),
        _ => None,
    });
    mtu.unwrap_or(0)
}

fn ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(address) => Some((*address).into()),
        RouteAddress::Inet6(address) => Some((*address).into()),
        _ => None,
    }
}

fn via_ip(via: &RouteVia) -> Option<IpAddr> {
    match via {
        RouteVia::Inet(address) => Some((*address).into()),
        RouteVia::Inet6(address) => Some((*address).into()),
        _ => None,
    }
}

/// A default route has no destination.
fn prefix(to: Option<IpAddr>, family: AddressFamily, length: u8) -> Option<IpNet> {
    let to = to.or_else(|| match family {
        AddressFamily::Inet => Some(IpAddr::from([0; 4])),
        AddressFamily::Inet6 => Some(IpAddr::from([0; 16])),
        _ => None,
    })?;
    IpNet::new(to, length).ok()
}

fn is_link_local(net: IpNet) -> bool {
    match net {
        IpNet::V4(net) => net.addr().is_link_local() || net.addr().is_multicast(),
        IpNet::V6(net) => net.addr().is_unicast_link_local() || net.addr().is_multicast(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ETH1: u32 = 3;

    fn message(to: &str, attributes: Vec<RouteAttribute>) -> RouteMessage {
        let net: IpNet = to.parse().expect("a literal");
        let mut message = RouteMessage::default();
        message.header.address_family = if net.addr().is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
        message.header.destination_prefix_length = net.prefix_len();
        message.header.table = 254;
        message.header.kind = RouteType::Unicast;
        if net.prefix_len() > 0 {
            message.attributes.push(RouteAttribute::Destination(net.addr().into()));
        }
        message.attributes.extend(attributes);
        message
    }

    fn address(text: &str) -> IpAddr {
        text.parse().expect("a literal")
    }

    fn via(gateway: &str, device: u32) -> Vec<RouteAttribute> {
        vec![RouteAttribute::Gateway(address(gateway).into()), RouteAttribute::Oif(device)]
    }

    fn dev(device: u32) -> Vec<RouteAttribute> {
        vec![RouteAttribute::Oif(device)]
    }

    fn with(mut attributes: Vec<RouteAttribute>, more: RouteAttribute) -> Vec<RouteAttribute> {
        attributes.push(more);
        attributes
    }

    /// A line for each route: its prefix, next hops and MTU.
    fn lines(messages: &[RouteMessage]) -> Vec<String> {
        let routes = of_interface(messages, ETH1, MAIN).expect("few routes");
        let line = |(net, entry): (&IpNet, &RouteEntry)| {
            let hops = (0..entry.count()).map(|index| format!(" {}", entry.hop(index).expect("a hop").to_ip()));
            format!("{net} {:?}{}", entry.kind().expect("a kind"), hops.collect::<String>())
        };
        routes.iter().map(line).collect()
    }

    #[test]
    fn only_routes_by_the_interface_count() {
        for (net, gateway, other) in
            [("198.51.100.0/24", "10.10.10.1", "0.0.0.0/0"), ("2001:db8::/64", "fe80::1", "::/0")]
        {
            let messages = [message(net, via(gateway, ETH1)), message(other, via(gateway, 2))];
            assert_eq!(lines(&messages), [format!("{net} Via {gateway}")]);
            let default = [message(other, via(gateway, ETH1))];
            assert_eq!(lines(&default), [format!("{other} Via {gateway}")]);
            assert_eq!(lines(&[message(other, dev(ETH1))]), [""; 0], "no neighbour is asked for the world");
            assert_eq!(lines(&[message(net, dev(ETH1))]), [format!("{net} OnLink")]);
        }
    }

    #[test]
    fn the_lowest_metric_of_a_prefix_wins() {
        let metric = |gateway, metric| with(via(gateway, ETH1), RouteAttribute::Priority(metric));
        let net = "198.51.100.0/24";
        let mut both = [message(net, metric("10.10.10.1", 200)), message(net, metric("10.10.10.2", 100))];
        assert_eq!(lines(&both), ["198.51.100.0/24 Via 10.10.10.2"]);
        both.reverse();
        assert_eq!(lines(&both), ["198.51.100.0/24 Via 10.10.10.2"]);
        let siblings =
            [message("2001:db8::/64", metric("fe80::1", 1024)), message("2001:db8::/64", metric("fe80::2", 1024))];
        assert_eq!(lines(&siblings), ["2001:db8::/64 Via fe80::1 fe80::2"]);
    }

    #[test]
    fn refusing_routes_count_for_each_interface() {
        for kind in [RouteType::BlackHole, RouteType::Unreachable, RouteType::Prohibit] {
            let mut refused = message("198.51.100.0/24", vec![]);
            refused.header.kind = kind;
            assert_eq!(lines(&[refused]), ["198.51.100.0/24 Refused"]);
        }
        let mut local = message("198.51.100.1/32", dev(ETH1));
        local.header.kind = RouteType::Local;
        let mut dead = message("198.51.100.0/24", via("10.10.10.1", ETH1));
        dead.header.flags = RouteFlags::Linkdown;
        let mut elsewhere = message("198.51.100.0/24", via("10.10.10.1", ETH1));
        elsewhere.header.table = 100;
        let link_local = message("fe80::/64", dev(ETH1));
        assert_eq!(lines(&[local, dead, elsewhere, link_local]), [""; 0]);
    }

    #[test]
    fn multipath_routes_keep_the_hops_of_the_interface_by_weight() {
        let hop = |gateway: &str, device, weight: u8| {
            let mut hop = RouteNextHop::default();
            (hop.interface_index, hop.hops) = (device, weight - 1);
            hop.attributes.push(RouteAttribute::Gateway(address(gateway).into()));
            hop
        };
        let route = |hops| [message("0.0.0.0/0", vec![RouteAttribute::MultiPath(hops)])];
        let even = route(vec![hop("10.10.10.1", ETH1, 5), hop("172.18.0.1", 2, 9), hop("10.10.10.2", ETH1, 5)]);
        assert_eq!(lines(&even), ["0.0.0.0/0 Via 10.10.10.1 10.10.10.2"]);
        let uneven = route(vec![hop("10.10.10.1", ETH1, 3), hop("10.10.10.2", ETH1, 1)]);
        let [one, two] = ["10.10.10.1", "10.10.10.2"].map(|gateway| lines(&uneven)[0].matches(gateway).count());
        assert_eq!((one, two), (6, 2));
        let few = route(vec![hop("10.10.10.1", ETH1, 250), hop("10.10.10.2", ETH1, 1)]);
        assert_eq!(lines(&few)[0].matches("10.10.10.2").count(), 1, "none is left out");
    }

    #[test]
    fn a_table_that_is_too_long_is_not_used_in_part() {
        let route = |i: usize| message(&format!("10.{}.{}.0/24", i / 256, i % 256), dev(ETH1));
        let all: Vec<_> = (0..=MOST_ROUTES).map(route).collect();
        assert_eq!(of_interface(&all[1..], ETH1, MAIN).map(|routes| routes.len()), Some(MOST_ROUTES));
        assert_eq!(of_interface(&all, ETH1, MAIN), None);
    }
}
