//! What a namespace has, and each single change of it, by netlink on blocking sockets and by `/proc/sys`. Everything acts on the
//! namespace that the calling thread is in.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::thread;

use egress_core::model::node::Mac;
use egress_core::model::state::{Family, family_of};
use egress_datapath::netlink::{self, NETLINK_ROUTE};
use ipnet::IpNet;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rtnetlink::packet_core::{NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL, Parseable};
use rtnetlink::packet_route::address::{AddressAttribute, AddressFlags, AddressMessage};
use rtnetlink::packet_route::link::{
    InfoData, InfoIpVlan, InfoKind, InfoMacVlan, IpVlanMode, LinkAttribute, LinkFlags, LinkInfo, LinkMessage,
    MacVlanMode,
};
use rtnetlink::packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteProtocol, RouteScope, RouteType,
};
use rtnetlink::packet_route::rule::{RuleAction, RuleAttribute, RuleMessage};
use rtnetlink::packet_route::{AddressFamily, RouteNetlinkMessage};
use rtnetlink::sys::{Socket, SocketAddr};

use crate::config::{LinkKind, MacvlanMode};
use crate::plan::{
    By, LinkFacts, NamespaceFacts, NewRoute, NewRule, PRIMARY_TABLE, Route, Selected, Table, router_table,
};

/// Of our routes and rules (`RTPROT_*`; 101 is the agent's).
pub const PROTOCOL: u8 = 102;
/// `RTMGRP_LINK` and `RTM_DELLINK`.
const LINK_GROUP: u32 = 1;
const DELETED_LINK: u16 = 17;
const NEW: u16 = NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL;

pub fn facts() -> io::Result<NamespaceFacts> {
    let mut links: Vec<LinkFacts> = links()?.iter().map(link).collect();
    for (index, net) in addresses()? {
        links.iter_mut().filter(|link| link.index == index).for_each(|link| link.addresses.push(net));
    }
    let main = routes_of(RouteHeader::RT_TABLE_MAIN.into())?;
    let networks = main.iter().flat_map(|(_, message)| networks(message)).collect();
    Ok(NamespaceFacts { links, default_routes: main.into_iter().filter_map(default_route).collect(), networks })
}

fn dump<M: Parseable<[u8]>>(message: RouteNetlinkMessage) -> io::Result<Vec<M>> {
    // What the library cannot decode is of no kind that is looked for.
    Ok(netlink::request(NETLINK_ROUTE, NLM_F_DUMP, message)?
        .iter()
        .filter_map(|content| M::parse(content).ok())
        .collect())
}

fn act(flags: u16, message: RouteNetlinkMessage) -> io::Result<()> {
    netlink::request(NETLINK_ROUTE, flags, message).map(drop)
}

pub fn links() -> io::Result<Vec<LinkMessage>> {
    dump(RouteNetlinkMessage::GetLink(LinkMessage::default()))
}

/// All addresses, each with the index of its link.
fn addresses() -> io::Result<Vec<(u32, IpNet)>> {
    let all: Vec<AddressMessage> = dump(RouteNetlinkMessage::GetAddress(AddressMessage::default()))?;
    Ok(all.iter().filter_map(|message| Some((message.header.index, address(message)?))).collect())
}

fn addresses_of(index: u32) -> io::Result<Vec<IpNet>> {
    Ok(addresses()?.into_iter().filter(|(of, _)| *of == index).map(|(_, net)| net).collect())
}

/// IPv6 has no local address beside the other.
fn address(message: &AddressMessage) -> Option<IpNet> {
    let local = message.attributes.iter().find_map(|attribute| match attribute {
        AddressAttribute::Local(address) => Some(*address),
        _ => None,
    });
    let plain = message.attributes.iter().find_map(|attribute| match attribute {
        AddressAttribute::Address(address) => Some(*address),
        _ => None,
    });
    IpNet::new(local.or(plain)?, message.header.prefix_len).ok()
}

fn link(message: &LinkMessage) -> LinkFacts {
    let mut facts = LinkFacts { index: message.header.index, ..LinkFacts::default() };
    facts.is_loopback = message.header.flags.contains(LinkFlags::Loopback);
    for attribute in &message.attributes {
        match attribute {
            LinkAttribute::IfName(name) => facts.name.clone_from(name),
            LinkAttribute::Mtu(mtu) => facts.mtu = *mtu,
            LinkAttribute::IfAlias(alias) => facts.alias.clone_from(alias),
            _ => {}
        }
    }
    facts
}

/// The link with this name, with its MAC address.
pub fn link_named(name: &str) -> io::Result<Option<(LinkFacts, Mac, LinkMessage)>> {
    let found = links()?.into_iter().find(|message| link(message).name == name);
    let addresses = match &found {
        Some(found) => addresses_of(found.header.index)?,
        None => Vec::new(),
    };
    Ok(found.map(|message| {
        let mac = message.attributes.iter().find_map(|attribute| match attribute {
            LinkAttribute::Address(bytes) => bytes.as_slice().try_into().ok(),
            _ => None,
        });
        (LinkFacts { addresses, ..link(&message) }, mac.unwrap_or_default(), message)
    }))
}

/// The kind of a link, with the index of its master in the master's namespace.
pub fn kind(message: &LinkMessage) -> (Option<LinkKind>, Option<u32>) {
    let mut found = (None, None);
    for attribute in &message.attributes {
        match attribute {
            LinkAttribute::Link(master) => found.1 = Some(*master),
            LinkAttribute::LinkInfo(infos) => {
                for info in infos {
                    match info {
                        LinkInfo::Kind(InfoKind::IpVlan) => found.0 = Some(LinkKind::Ipvlan),
                        LinkInfo::Data(InfoData::MacVlan(data)) => {
                            found.0 = data.iter().find_map(|one| match one {
                                InfoMacVlan::Mode(mode) => mode_of(*mode).map(LinkKind::Macvlan),
                                _ => None,
                            });
                        }
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    found
}

fn mode_of(mode: MacVlanMode) -> Option<MacvlanMode> {
    Some(match mode {
        MacVlanMode::Bridge => MacvlanMode::Bridge,
        MacVlanMode::Private => MacvlanMode::Private,
        MacVlanMode::Vepa => MacvlanMode::Vepa,
        MacVlanMode::Passthrough => MacvlanMode::Passthru,
        _ => return None,
    })
}

/// Makes a link above `master`, in another namespace at once, so that the node never has it.
pub fn make_link(name: &str, kind: LinkKind, master: u32, mtu: u32, namespace: i32) -> io::Result<()> {
    let mut message = LinkMessage::default();
    let (info, data) = match kind {
        LinkKind::Ipvlan => (InfoKind::IpVlan, InfoData::IpVlan(vec![InfoIpVlan::Mode(IpVlanMode::L2)])),
        LinkKind::Macvlan(mode) => {
            let mode = match mode {
                MacvlanMode::Bridge => MacVlanMode::Bridge,
                MacvlanMode::Private => MacVlanMode::Private,
                MacvlanMode::Vepa => MacVlanMode::Vepa,
                MacvlanMode::Passthru => MacVlanMode::Passthrough,
            };
            (InfoKind::MacVlan, InfoData::MacVlan(vec![InfoMacVlan::Mode(mode)]))
        }
    };
    message.attributes = vec![
        LinkAttribute::IfName(name.to_owned()),
        LinkAttribute::Link(master),
        LinkAttribute::Mtu(mtu),
        LinkAttribute::NetNsFd(namespace),
        LinkAttribute::LinkInfo(vec![LinkInfo::Kind(info), LinkInfo::Data(data)]),
    ];
    act(NEW, RouteNetlinkMessage::NewLink(message))
}

/// Makes any link, in the calling thread's namespace.
pub fn make(message: LinkMessage) -> io::Result<()> {
    act(NEW, RouteNetlinkMessage::NewLink(message))
}

pub fn set_alias(index: u32, alias: &str) -> io::Result<()> {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.attributes.push(LinkAttribute::IfAlias(alias.to_owned()));
    act(NLM_F_ACK, RouteNetlinkMessage::SetLink(message))
}

pub fn set_up(index: u32) -> io::Result<()> {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.header.flags = LinkFlags::Up;
    message.header.change_mask = LinkFlags::Up;
    act(NLM_F_ACK, RouteNetlinkMessage::SetLink(message))
}

pub fn delete_link(index: u32) -> io::Result<()> {
    let mut message = LinkMessage::default();
    message.header.index = index;
    act(NLM_F_ACK, RouteNetlinkMessage::DelLink(message))
}

/// Deletes a link, and calls `after` once no packet passes it any more. The kernel notifies of that after it has flushed the backlogs
/// of all CPUs (`unregister_netdevice_many_notify`), and waits for a grace period then, beside which `after` runs. It is not called
/// if the link stays.
pub fn delete_link_and(index: u32, after: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
    let mut socket = Socket::new(NETLINK_ROUTE)?;
    socket.bind(&SocketAddr::new(0, LINK_GROUP))?;
    thread::scope(|scope| {
        // A thread begins in the namespace of the one that starts it.
        let deletion = scope.spawn(|| delete_link(index));
        let is_notified = is_deleted(&socket, index, || deletion.is_finished());
        let deleted =
            || deletion.join().unwrap_or_else(|_| Err(io::Error::other("the thread that deletes has panicked")));
        match is_notified {
            true => {
                let done = after();
                deleted().and(done)
            }
            // It has failed, or the notification is late.
            false => deleted().and_then(|()| after()),
        }
    })
}

/// Waits for the notification; false if the request has been answered without it.
fn is_deleted(socket: &Socket, index: u32, is_answered: impl Fn() -> bool) -> bool {
    let mut datagram = Vec::with_capacity(64 << 10);
    loop {
        let is_last = is_answered();
        let mut ready = [PollFd::new(socket.as_fd(), PollFlags::POLLIN)];
        let is_ready = poll(&mut ready, PollTimeout::from(2_u8)).is_ok_and(|count| count > 0);
        datagram.clear();
        if is_ready && socket.recv(&mut datagram, libc::MSG_DONTWAIT).is_ok() {
            let mut deleted = netlink::messages(&datagram).flatten().filter(|one| one.message_type() == DELETED_LINK);
            // `struct ifinfomsg`: the family, which is none, and the index at the fifth byte.
            let is_it =
                |content: &[u8]| content.first() == Some(&0) && content.get(4..8) == Some(&index.to_ne_bytes()[..]);
            if deleted.any(|message| is_it(message.payload())) {
                return true;
            }
        } else if is_last {
            return false;
        }
    }
}

/// Without the kernel's own detection of duplicates, which takes a second: that was done before.
pub fn add_address(index: u32, net: IpNet) -> io::Result<()> {
    let mut message = AddressMessage::default();
    message.header.family = address_family(family_of(net.addr()));
    message.header.prefix_len = net.prefix_len();
    message.header.index = index;
    message.attributes = vec![AddressAttribute::Local(net.addr()), AddressAttribute::Address(net.addr())];
    match net {
        IpNet::V4(net) if net.prefix_len() < 31 => {
            message.attributes.push(AddressAttribute::Broadcast(net.broadcast()))
        }
        IpNet::V4(_) => {}
        IpNet::V6(_) => message.attributes.push(AddressAttribute::Flags(AddressFlags::Nodad)),
    }
    act(NEW, RouteNetlinkMessage::NewAddress(message))
}

const fn address_family(family: Family) -> AddressFamily {
    match family {
        Family::V4 => AddressFamily::Inet,
        Family::V6 => AddressFamily::Inet6,
    }
}

/// All routes of a family, of every table.
fn routes(family: Family) -> io::Result<Vec<RouteMessage>> {
    let mut ask = RouteMessage::default();
    ask.header.address_family = address_family(family);
    let all: Vec<RouteMessage> = dump(RouteNetlinkMessage::GetRoute(ask))?;
    Ok(all.into_iter().filter(|route| route.header.address_family == address_family(family)).collect())
}

fn table_of(message: &RouteMessage) -> u32 {
    let full = message.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Table(table) => Some(*table),
        _ => None,
    });
    full.unwrap_or_else(|| message.header.table.into())
}

/// The routes of a table, of both families.
fn routes_of(table: u32) -> io::Result<Vec<(Family, RouteMessage)>> {
    let mut found = Vec::new();
    for family in [Family::V4, Family::V6] {
        let own = routes(family)?.into_iter().filter(|message| table_of(message) == table);
        found.extend(own.map(|message| (family, message)));
    }
    Ok(found)
}

/// The default routes of a table, as far as an administrator or a CNI plugin has made them.
pub fn default_routes(table: u32) -> io::Result<Vec<Route>> {
    Ok(routes_of(table)?.into_iter().filter_map(default_route).collect())
}

fn default_route((family, message): (Family, RouteMessage)) -> Option<Route> {
    // The kernel has one of its own in IPv6 that refuses, on loopback.
    let is_kernels = message.header.protocol == RouteProtocol::Kernel && message.header.kind != RouteType::Unicast;
    let is_default = message.header.destination_prefix_length == 0 && !is_kernels;
    is_default.then(|| route(family, message))
}

/// The destination of a route that is no default one, with the index of each interface that it leads by.
fn networks(message: &RouteMessage) -> Vec<(u32, IpNet)> {
    let destination = message.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Destination(RouteAddress::Inet(address)) => Some(IpAddr::V4(*address)),
        RouteAttribute::Destination(RouteAddress::Inet6(address)) => Some(IpAddr::V6(*address)),
        _ => None,
    });
    let length = message.header.destination_prefix_length;
    let net = destination.and_then(|address| IpNet::new(address, length).ok());
    let net = net.filter(|_| length > 0 && message.header.kind == RouteType::Unicast);
    let interfaces = message.attributes.iter().flat_map(|attribute| match attribute {
        RouteAttribute::Oif(index) => vec![*index],
        RouteAttribute::MultiPath(hops) => hops.iter().map(|hop| hop.interface_index).collect(),
        _ => Vec::new(),
    });
    net.map_or_else(Vec::new, |net| interfaces.map(|index| (index, net)).collect())
}

fn route(family: Family, message: RouteMessage) -> Route {
    let (mut gateway, mut interface, mut metric) = (None, 0, 0);
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Gateway(RouteAddress::Inet(address)) => gateway = Some(IpAddr::V4(*address)),
            RouteAttribute::Gateway(RouteAddress::Inet6(address)) => gateway = Some(IpAddr::V6(*address)),
            RouteAttribute::Oif(index) => interface = *index,
            RouteAttribute::Priority(priority) => metric = *priority,
            _ => {}
        }
    }
    Route { family, gateway, interface, metric, message }
}

/// The same route for another table, with what a request may say.
fn in_table(message: &RouteMessage, table: u32) -> RouteMessage {
    let mut copy = message.clone();
    copy.header.table = RouteHeader::RT_TABLE_UNSPEC;
    copy.header.flags = message.header.flags & RouteFlags::Onlink;
    copy.attributes.retain(|attribute| {
        use RouteAttribute as Of;
        matches!(
            attribute,
            Of::Destination(_)
                | Of::Gateway(_)
                | Of::Via(_)
                | Of::Oif(_)
                | Of::Priority(_)
                | Of::PrefSource(_)
                | Of::Metrics(_)
                | Of::Preference(_)
                | Of::MultiPath(_)
        )
    });
    copy.attributes.push(RouteAttribute::Table(table));
    copy
}

/// Puts a route of the main table into that of the primary interface.
pub fn keep_route(route: &Route) -> io::Result<()> {
    act(NEW, RouteNetlinkMessage::NewRoute(in_table(&route.message, PRIMARY_TABLE)))
}

/// Puts it back.
pub fn restore_route(route: &Route) -> io::Result<()> {
    let main = RouteHeader::RT_TABLE_MAIN.into();
    match act(NEW, RouteNetlinkMessage::NewRoute(in_table(&route.message, main))) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other,
    }
}

pub fn delete_route(route: &Route, table: u32) -> io::Result<()> {
    act(NLM_F_ACK, RouteNetlinkMessage::DelRoute(in_table(&route.message, table)))
}

/// Adds a route of the router whose interface has this index. Returns whether it was not there yet.
pub fn add_route(new: &NewRoute, router: u32) -> io::Result<bool> {
    match act(NEW, RouteNetlinkMessage::NewRoute(new_route(new, router))) {
        // The cluster's CNI has it already; of the default one there is none any more.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && new.destination.prefix_len() > 0 => Ok(false),
        other => other.map(|()| true),
    }
}

pub fn delete_new_route(new: &NewRoute, router: u32) -> io::Result<()> {
    absent_is_fine(act(NLM_F_ACK, RouteNetlinkMessage::DelRoute(new_route(new, router))))
}

fn new_route(new: &NewRoute, router: u32) -> RouteMessage {
    let family = family_of(new.destination.addr());
    let mut message = RouteMessage::default();
    message.header.address_family = address_family(family);
    message.header.destination_prefix_length = new.destination.prefix_len();
    message.header.protocol = RouteProtocol::Other(PROTOCOL);
    message.header.kind = RouteType::Unicast;
    message.header.scope =
        if new.gateway.is_none() && family == Family::V4 { RouteScope::Link } else { RouteScope::Universe };
    if new.is_onlink {
        message.header.flags = RouteFlags::Onlink;
    }
    let by = match new.by {
        By::Router => Some(router),
        By::Primary(index) => Some(index),
        By::Nowhere => {
            message.header.kind = RouteType::Unreachable;
            message.header.scope = RouteScope::Universe;
            None
        }
    };
    message.attributes.push(RouteAttribute::Table(number(new.table, router)));
    message.attributes.extend(by.map(RouteAttribute::Oif));
    if new.destination.prefix_len() > 0 {
        message.attributes.push(RouteAttribute::Destination(route_address(new.destination.addr())));
    }
    message.attributes.extend(new.gateway.map(|gateway| RouteAttribute::Gateway(route_address(gateway))));
    if new.metric > 0 {
        message.attributes.push(RouteAttribute::Priority(new.metric));
    }
    message
}

/// Whether there is a route to the same destination by the same interface and gateway.
pub fn has_route(new: &NewRoute, router: u32) -> io::Result<bool> {
    let family = family_of(new.destination.addr());
    let interface = match new.by {
        By::Router => router,
        By::Primary(index) => index,
        By::Nowhere => 0,
    };
    let is_same = |message: RouteMessage| {
        let destination = message.attributes.iter().find_map(|attribute| match attribute {
            RouteAttribute::Destination(address) => Some(address.clone()),
            _ => None,
        });
        let wanted = (new.destination.prefix_len() > 0).then(|| route_address(new.destination.addr()));
        let (table, length) = (table_of(&message), message.header.destination_prefix_length);
        let is_unreachable = message.header.kind == RouteType::Unreachable;
        let found = route(family, message);
        let by = if is_unreachable { 0 } else { found.interface };
        let is_by = by == interface && found.gateway == new.gateway;
        table == number(new.table, router) && length == new.destination.prefix_len() && destination == wanted && is_by
    };
    Ok(routes(family)?.into_iter().any(is_same))
}

pub fn has_rule(new: &NewRule, router: u32) -> io::Result<bool> {
    let wanted = rule(new, router);
    let is_same = |message: RuleMessage| {
        let same_family = message.header.family == wanted.header.family;
        same_family && wanted.attributes.iter().all(|attribute| message.attributes.contains(attribute))
    };
    Ok(own_rules(None)?.into_iter().any(is_same))
}

fn number(table: Table, router: u32) -> u32 {
    match table {
        Table::Main => RouteHeader::RT_TABLE_MAIN.into(),
        Table::Router => router_table(router),
        Table::Primary => PRIMARY_TABLE,
    }
}

fn route_address(address: IpAddr) -> RouteAddress {
    match address {
        IpAddr::V4(address) => RouteAddress::Inet(address),
        IpAddr::V6(address) => RouteAddress::Inet6(address),
    }
}

/// Deletes all routes of ours that are not by the router's interface, which takes its own with it.
pub fn delete_own_routes() -> io::Result<()> {
    for family in [Family::V4, Family::V6] {
        for message in routes(family)? {
            let is_own =
                message.header.protocol == RouteProtocol::Other(PROTOCOL) || table_of(&message) == PRIMARY_TABLE;
            if is_own {
                let table = table_of(&message);
                absent_is_fine(act(NLM_F_ACK, RouteNetlinkMessage::DelRoute(in_table(&message, table))))?;
            }
        }
    }
    Ok(())
}

fn absent_is_fine(outcome: io::Result<()>) -> io::Result<()> {
    match outcome {
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH | libc::ENODEV)) => Ok(()),
        other => other,
    }
}

fn rule(new: &NewRule, router: u32) -> RuleMessage {
    let mut message = RuleMessage::default();
    message.header.family = address_family(new.family);
    message.header.action = RuleAction::ToTable;
    message.attributes = vec![
        RuleAttribute::Priority(new.priority),
        RuleAttribute::Table(number(new.table, router)),
        RuleAttribute::Protocol(RouteProtocol::Other(PROTOCOL)),
    ];
    match new.selected {
        Selected::From(address) => {
            message.header.src_len = if address.is_ipv4() { 32 } else { 128 };
            message.attributes.push(RuleAttribute::Source(address));
        }
        Selected::Marked => message.attributes.extend(mark(router_table(router))),
        Selected::MarkedReply => message.attributes.extend(mark(PRIMARY_TABLE)),
        Selected::SpecialRoutes => message.attributes.push(RuleAttribute::SuppressPrefixLen(0)),
    }
    message
}

fn mark(mark: u32) -> [RuleAttribute; 2] {
    [RuleAttribute::FwMark(mark), RuleAttribute::FwMask(u32::MAX)]
}

pub fn add_rule(new: &NewRule, router: u32) -> io::Result<()> {
    match act(NEW, RouteNetlinkMessage::NewRule(rule(new, router))) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && new.is_shared => Ok(()),
        other => other,
    }
}

pub fn delete_rule(new: &NewRule, router: u32) -> io::Result<()> {
    absent_is_fine(act(NLM_F_ACK, RouteNetlinkMessage::DelRule(rule(new, router))))
}

/// All rules of ours, of every router or of one.
pub fn own_rules(of: Option<u32>) -> io::Result<Vec<RuleMessage>> {
    let mut found = Vec::new();
    for family in [Family::V4, Family::V6] {
        let mut ask = RuleMessage::default();
        ask.header.family = address_family(family);
        let all: Vec<RuleMessage> = dump(RouteNetlinkMessage::GetRule(ask))?;
        found.extend(all.into_iter().filter(|message| {
            let is_own = message.attributes.contains(&RuleAttribute::Protocol(RouteProtocol::Other(PROTOCOL)));
            let is_of =
                of.is_none_or(|router| message.attributes.contains(&RuleAttribute::Table(router_table(router))));
            message.header.family == address_family(family) && is_own && is_of
        }));
    }
    Ok(found)
}

pub fn delete_rules(of: Option<u32>) -> io::Result<()> {
    own_rules(of)?
        .into_iter()
        .try_for_each(|message| absent_is_fine(act(NLM_F_ACK, RouteNetlinkMessage::DelRule(message))))
}

fn setting(path: &str) -> PathBuf {
    PathBuf::from("/proc/sys/net").join(path)
}

/// A setting of the namespace; `None` where the kernel has none, as without IPv6.
pub fn read_setting(path: &str) -> io::Result<Option<String>> {
    match fs::read_to_string(setting(path)) {
        Ok(value) => Ok(Some(value.trim().to_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

pub fn write_setting(path: &str, value: &str) -> io::Result<()> {
    fs::write(setting(path), value)
}
