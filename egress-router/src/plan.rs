//! From a configuration and what is on the node and in the pod to everything that is to be set up. Pure, so that `explain` prints
//! exactly what ADD does.
//!
//! **Routing in the pod.** The interface that had the default route (the *primary* one, of the cluster's network) loses it to the
//! router's, and keeps everything else:
//!
//! | priority | rule | table |
//! |---|---|---|
//! | 28000 | from an address of the router, or marked as one of its connections | [`router_table`]: default route by its gateway |
//! | 28100 | everything, only routes more special than a default one | main |
//! | 28101 | replies of connections that came by the primary interface, by mark or by its addresses | [`PRIMARY_TABLE`]: the former default routes |
//! | 32766 | everything | main: default route by the gateway of the pod's first router |
//!
//! So a client is answered by the way that it came, whether or not its network is among `clusterNetworks`; these only say where
//! the pod's own connections go. A process can choose the address of the primary interface, which is a reply's too, so that the
//! rules of nftables refuse what begins there and has no destination of its own in the main table ([`inside`]).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use egress_cni::{CniError, code};
use egress_core::model::state::{Family, family_of};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use rtnetlink::packet_route::route::RouteMessage;

use crate::config::{Addressing, LinkKind, RouterAddress, RouterConfig};
use crate::ruleset::Ruleset;

/// The table with the default routes of the primary interface; "er" in front, so that no other number is met by chance.
pub const PRIMARY_TABLE: u32 = 0x6572_0000;
/// What the alias of an interface of a router begins with.
pub const ALIAS: &str = "egress-router";
/// Priorities of rules.
const OWN_RULES: u32 = 28000;
const SPECIAL_ROUTES: u32 = 28100;
const REPLIES: u32 = 28101;

/// The table of the router whose interface has this index.
pub fn router_table(index: u32) -> u32 {
    PRIMARY_TABLE + index
}

/// An interface.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LinkFacts {
    pub index: u32,
    pub name: String,
    pub mtu: u32,
    pub alias: String,
    pub is_loopback: bool,
    pub addresses: Vec<IpNet>,
}

/// A default route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    pub family: Family,
    pub gateway: Option<IpAddr>,
    /// The index of the interface; 0 for a route that refuses, and for one by several.
    pub interface: u32,
    pub metric: u32,
    /// As the kernel has it.
    pub message: RouteMessage,
}

/// What is in one network namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NamespaceFacts {
    pub links: Vec<LinkFacts>,
    /// Of the main table, those without a destination.
    pub default_routes: Vec<Route>,
    /// The destinations of the other routes of the main table, with the index of the interface.
    pub networks: Vec<(u32, IpNet)>,
}

impl NamespaceFacts {
    fn link(&self, index: u32) -> Option<&LinkFacts> {
        self.links.iter().find(|link| link.index == index)
    }

    /// The links of default routes of this family, or of any.
    fn default_links(&self, family: Option<Family>) -> BTreeSet<u32> {
        let of_family = |route: &&Route| family.is_none_or(|family| route.family == family);
        self.default_routes.iter().filter(of_family).map(|route| route.interface).filter(|index| *index != 0).collect()
    }
}

/// Which table a route or rule is of; the index of the router's interface is not known before it is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Table {
    Main,
    Router,
    Primary,
}

/// Which interface a route leads by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    Router,
    /// The primary one, by its index.
    Primary(u32),
    /// None: packets are refused.
    Nowhere,
}

/// A route to add.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewRoute {
    pub table: Table,
    pub destination: IpNet,
    pub gateway: Option<IpAddr>,
    pub by: By,
    pub metric: u32,
    pub is_onlink: bool,
}

/// What a rule selects packets by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Selected {
    From(IpAddr),
    /// Of a connection through the router.
    Marked,
    /// Of a reply to a client.
    MarkedReply,
    /// Everything, but no default route is taken.
    SpecialRoutes,
}

impl fmt::Display for Selected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::From(address) => write!(f, "from {address}"),
            Self::Marked => write!(f, "connections through the router"),
            Self::MarkedReply => write!(f, "their replies"),
            Self::SpecialRoutes => write!(f, "everything with a route more special than a default one"),
        }
    }
}

/// A rule to add.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewRule {
    pub family: Family,
    pub priority: u32,
    pub selected: Selected,
    pub table: Table,
    /// Routers of one pod have it in common.
    pub is_shared: bool,
}

/// The interface of the cluster's network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Primary {
    pub index: u32,
    pub name: String,
}

/// Everything that ADD sets up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    pub name: String,
    pub kind: LinkKind,
    pub master: LinkFacts,
    /// Why that one.
    pub why_master: String,
    pub mtu: u32,
    pub addresses: Vec<IpNet>,
    pub gateways: BTreeMap<Family, IpAddr>,
    pub primary: Option<Primary>,
    /// The pod's first router: it has the default route.
    pub is_first: bool,
    /// Default routes that go to [`PRIMARY_TABLE`], and come back with DEL.
    pub replaced: Vec<Route>,
    pub routes: Vec<NewRoute>,
    pub rules: Vec<NewRule>,
    pub ruleset: Ruleset,
    pub duplicate_wait: Duration,
    /// What an administrator should know.
    pub warnings: Vec<String>,
}

/// Plans a router.
///
/// # Errors
/// The node's interface or the gateway cannot be found, or the configuration does not fit the pod.
pub fn plan(
    config: &RouterConfig,
    addressing: &Addressing,
    name: &str,
    (node, pod): (&NamespaceFacts, &NamespaceFacts),
) -> Result<Plan, CniError> {
    let invalid = |message: String| CniError::new(code::INVALID_CONFIGURATION, message);
    if pod.links.iter().any(|link| link.name == name) {
        return Err(CniError::new(100, format!("the pod has an interface {name} already")));
    }
    let (master, why_master) = master(config, addressing, node).map_err(invalid)?;
    let mtu = config.mtu.unwrap_or(master.mtu);
    if mtu > master.mtu {
        return Err(invalid(format!("interfaceArgs.mtu: {mtu} is above {}, that of {}", master.mtu, master.name)));
    }
    let addresses: Vec<IpNet> =
        addressing.addresses.iter().map(|one| with_prefix(one, master)).collect::<Result<_, _>>().map_err(invalid)?;
    let gateways = gateways(addressing, &addresses, master, node).map_err(invalid)?;
    let mut warnings = Vec::new();
    let primary = primary(pod);
    if primary.is_none() {
        warnings.push("the pod has no other interface, so it routes for no client".to_owned());
    }
    let is_inside = |target: &IpAddr| config.cluster_networks.iter().any(|net| net.contains(target));
    if let Some(target) = addressing.redirects.targets().find(is_inside) {
        return Err(invalid(format!("redirect: {target} is in a network of the cluster, where no router leads")));
    }
    let is_ours = |index: u32| pod.link(index).is_some_and(|link| link.alias.starts_with(ALIAS));
    let is_first = !pod.links.iter().any(|link| is_ours(link.index));
    let mut plan = Plan {
        name: name.to_owned(),
        kind: config.kind,
        why_master,
        mtu,
        gateways,
        is_first,
        replaced: Vec::new(),
        routes: Vec::new(),
        rules: Vec::new(),
        ruleset: Ruleset::new(
            name,
            primary.as_ref().map(|primary| (primary.name.as_str(), inside(config, master, pod, primary.index))),
            &addresses,
            addressing,
            config,
        ),
        duplicate_wait: config.duplicate_wait,
        warnings,
        master: master.clone(),
        addresses,
        primary,
    };
    plan.add_routes(config, pod);
    Ok(plan)
}

impl Plan {
    fn add_routes(&mut self, config: &RouterConfig, pod: &NamespaceFacts) {
        for (family, gateway) in self.gateways.clone() {
            let is_onlink = !self.addresses.iter().any(|net| net.contains(&gateway));
            let route = |table| NewRoute {
                table,
                destination: any(family),
                gateway: Some(gateway),
                by: By::Router,
                metric: 0,
                is_onlink,
            };
            let networks = self.addresses.iter().filter(|net| family_of(net.addr()) == family);
            let networks: Vec<IpNet> =
                networks.filter(|net| net.prefix_len() < net.max_prefix_len()).map(IpNet::trunc).collect();
            self.routes.extend(networks.into_iter().map(|network| NewRoute {
                destination: network,
                gateway: None,
                is_onlink: false,
                ..route(Table::Router)
            }));
            self.routes.push(route(Table::Router));
            let own =
                |selected| NewRule { family, priority: OWN_RULES, selected, table: Table::Router, is_shared: false };
            let own_addresses = self.addresses.iter().map(IpNet::addr).filter(|address| family_of(*address) == family);
            self.rules.extend(own_addresses.map(|address| own(Selected::From(address))));
            self.rules.push(own(Selected::Marked));
            if self.is_first {
                self.routes.push(route(Table::Main));
            }
        }
        let Some(primary) = self.primary.clone().filter(|_| self.is_first) else { return };
        let by = By::Primary(primary.index);
        for family in [Family::V4, Family::V6] {
            let former = pod.default_routes.iter().filter(|route| route.family == family);
            let former: Vec<Route> = former.cloned().collect();
            let gateway = former.iter().find(|route| route.interface == primary.index).and_then(|route| route.gateway);
            if former.is_empty() && !self.gateways.contains_key(&family) {
                continue;
            }
            let networks = config.cluster_networks.iter().filter(|net| family_of(net.addr()) == family);
            let of_node = of_node(&self.master).filter(|net| family_of(net.addr()) == family);
            let kept: Vec<IpNet> = networks.copied().chain(of_node).collect();
            self.routes.extend(kept.into_iter().filter(|_| !former.is_empty()).map(|destination| NewRoute {
                table: Table::Main,
                destination,
                gateway,
                by,
                metric: 0,
                is_onlink: false,
            }));
            if !self.gateways.contains_key(&family) {
                // Traffic of this family would leave with the node's address, past the router.
                self.routes.push(NewRoute {
                    table: Table::Main,
                    destination: any(family),
                    gateway: None,
                    by: By::Nowhere,
                    metric: 1024,
                    is_onlink: false,
                });
            }
            let shared = |priority, selected, table| NewRule { family, priority, selected, table, is_shared: true };
            self.rules.push(shared(SPECIAL_ROUTES, Selected::SpecialRoutes, Table::Main));
            self.rules.push(shared(REPLIES, Selected::MarkedReply, Table::Primary));
            let addresses = pod.link(primary.index).into_iter().flat_map(|link| &link.addresses).map(IpNet::addr);
            let addresses = addresses.filter(|address| family_of(*address) == family && is_global(*address));
            self.rules.extend(addresses.map(|address| shared(REPLIES, Selected::From(address), Table::Primary)));
            self.replaced.extend(former);
        }
    }
}

/// The destination of a default route.
pub fn any(family: Family) -> IpNet {
    match family {
        Family::V4 => IpNet::V4(Ipv4Net::default()),
        Family::V6 => IpNet::V6(Ipv6Net::default()),
    }
}

/// Whether it is meant for more than its link or host.
pub(crate) fn is_global(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => !address.is_link_local() && !address.is_loopback(),
        IpAddr::V6(address) => !address.is_unicast_link_local() && !address.is_loopback(),
    }
}

/// The addresses of the node on the router's master, which a bridge of macvlan interfaces does not reach.
fn of_node(master: &LinkFacts) -> impl Iterator<Item = IpNet> {
    master.addresses.iter().map(IpNet::addr).filter(|address| is_global(*address)).map(IpNet::from)
}

/// Where the pod's processes may connect to by the primary interface: the networks that its routes name, before and after ADD, and
/// groups of hosts on its link.
fn inside(config: &RouterConfig, master: &LinkFacts, pod: &NamespaceFacts, primary: u32) -> Vec<IpNet> {
    let of_routes = pod.networks.iter().filter(|(index, _)| *index == primary).map(|(_, net)| *net);
    of_routes.chain(config.cluster_networks.iter().copied()).chain(of_node(master)).chain(on_link()).collect()
}

/// What no router forwards: 224.0.0.0/24 (RFC 5771), the limited broadcast (RFC 919), ff02::/16 (RFC 4291).
fn on_link() -> [IpNet; 3] {
    let v4 = |address, length| IpNet::V4(Ipv4Net::new_assert(address, length));
    let v6 = Ipv6Net::new_assert(Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 0), 16);
    [v4(Ipv4Addr::new(224, 0, 0, 0), 24), v4(Ipv4Addr::BROADCAST, 32), IpNet::V6(v6)]
}

/// The node's interface below that of the router, and why it is that one.
fn master<'a>(
    config: &RouterConfig,
    addressing: &Addressing,
    node: &'a NamespaceFacts,
) -> Result<(&'a LinkFacts, String), String> {
    let names = |links: &[&LinkFacts]| links.iter().map(|link| link.name.as_str()).collect::<Vec<_>>().join(", ");
    if let Some(name) = &config.master {
        let known: Vec<&LinkFacts> = node.links.iter().filter(|link| !link.is_loopback).collect();
        let found = known.iter().find(|link| link.name == *name);
        return found
            .map(|link| (*link, "named by interfaceArgs.master".to_owned()))
            .ok_or_else(|| format!("interfaceArgs.master: the node has no interface {name:?}, but {}", names(&known)));
    }
    let has_network = |link: &&LinkFacts| {
        let contains = |address: IpAddr| link.addresses.iter().any(|net| net.contains(&address));
        !link.is_loopback && addressing.addresses.iter().any(|one| contains(one.address))
    };
    let candidates: Vec<&LinkFacts> = node.links.iter().filter(has_network).collect();
    match candidates[..] {
        [one] => {
            return Ok((one, format!("the only one of the node in the network of {}", list(&addressing.addresses))));
        }
        [] => {}
        _ => {
            return Err(format!(
                "interfaceArgs.master: {} of the node are in the networks of {}: name one",
                names(&candidates),
                list(&addressing.addresses)
            ));
        }
    }
    let of_default: Vec<&LinkFacts> =
        node.default_links(None).into_iter().filter_map(|index| node.link(index)).collect();
    match of_default[..] {
        [one] => Ok((
            one,
            format!(
                "that of the node's default route, as no interface is in the network of {}",
                list(&addressing.addresses)
            ),
        )),
        [] => Err(format!(
            "interfaceArgs.master: no interface of the node is in the network of {}, and the node has no default route: name one",
            list(&addressing.addresses)
        )),
        _ => Err(format!(
            "interfaceArgs.master: no interface of the node is in the network of {}, and the node has default routes by {}: name one",
            list(&addressing.addresses),
            names(&of_default)
        )),
    }
}

fn list(addresses: &[RouterAddress]) -> String {
    addresses.iter().map(RouterAddress::to_string).collect::<Vec<_>>().join(", ")
}

fn with_prefix(one: &RouterAddress, master: &LinkFacts) -> Result<IpNet, String> {
    let networks = master.addresses.iter().filter(|net| net.contains(&one.address));
    let prefix = one.prefix.or_else(|| networks.map(IpNet::prefix_len).max());
    let prefix = prefix.ok_or_else(|| {
        format!(
            "addresses: {} has no prefix length, and {} has no address in a network of it",
            one.address, master.name
        )
    })?;
    if let Some(own) = master.addresses.iter().find(|own| own.addr() == one.address) {
        return Err(format!("addresses: {own} is an address of the node itself, on {}", master.name));
    }
    IpNet::new(one.address, prefix).map_err(|error| format!("addresses: {one}: {error}"))
}

fn gateways(
    addressing: &Addressing,
    addresses: &[IpNet],
    master: &LinkFacts,
    node: &NamespaceFacts,
) -> Result<BTreeMap<Family, IpAddr>, String> {
    let families: BTreeSet<Family> = addresses.iter().map(|net| family_of(net.addr())).collect();
    let mut gateways = BTreeMap::new();
    for family in families {
        let gateway = addressing.gateways.get(&family).copied().or_else(|| {
            let routes = node.default_routes.iter().filter(|route| route.interface == master.index);
            let gateways = routes.filter_map(|route| Some((route.metric, route.gateway?)));
            gateways.filter(|(_, gateway)| family_of(*gateway) == family).min().map(|(_, gateway)| gateway)
        });
        let gateway = gateway.ok_or_else(|| {
            format!("gateway: none is given, and the node has no default route of that family by {}", master.name)
        })?;
        if addresses.iter().any(|net| net.addr() == gateway) {
            return Err(format!("gateway: {gateway} is an address of the router itself"));
        }
        gateways.insert(family, gateway);
    }
    Ok(gateways)
}

/// The interface of the default route with the least metric, else the only other one with an address.
fn primary(pod: &NamespaceFacts) -> Option<Primary> {
    let is_ours = |link: &LinkFacts| link.alias.starts_with(ALIAS);
    let of_route = |family| {
        let routes = pod.default_routes.iter().filter(move |route| route.family == family);
        let by_link = routes.filter_map(|route| Some((route.metric, pod.link(route.interface)?)));
        by_link.filter(|(_, link)| !is_ours(link)).min_by_key(|(metric, _)| *metric).map(|(_, link)| link)
    };
    let others = pod.links.iter().filter(|link| !link.is_loopback && !is_ours(link));
    let addressed: Vec<&LinkFacts> =
        others.filter(|link| link.addresses.iter().any(|net| is_global(net.addr()))).collect();
    let only = match addressed[..] {
        [one] => Some(one),
        _ => None,
    };
    let found = of_route(Family::V4).or_else(|| of_route(Family::V6)).or(only);
    found.map(|link| Primary { index: link.index, name: link.name.clone() })
}

impl fmt::Display for NewRoute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.by {
            By::Nowhere => write!(f, "unreachable {}", self.destination)?,
            By::Router | By::Primary(_) => self.destination.fmt(f)?,
        }
        if let Some(gateway) = self.gateway {
            write!(f, " via {gateway}")?;
        }
        if self.is_onlink {
            write!(f, " onlink")?;
        }
        if self.metric > 0 {
            write!(f, " metric {}", self.metric)?;
        }
        Ok(())
    }
}
