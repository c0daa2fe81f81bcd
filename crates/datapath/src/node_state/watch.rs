//! Watches the node by netlink events.
//!
//! - A **device** of ours or another egress interface appears, goes or changes: read the facts and attach where needed,
//!   without delay, since packets bypass the programs until they are attached.
//! - **Routes, rules, addresses, neighbours** change: cached next hops are looked up again, and those of further egress interfaces are
//!   read and written to the maps before. The first change acts at once, further ones every 50 ms. For a neighbour only its link
//!   address counts, not its state.
//! - Events can be lost (socket buffer overrun) and other software can detach our programs: everything is read again every ten
//!   seconds and after a loss.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use futures::channel::mpsc::UnboundedReceiver;
use futures::{FutureExt, StreamExt};
use rtnetlink::packet_core::{NetlinkMessage, NetlinkPayload};
use rtnetlink::packet_route::RouteNetlinkMessage;
use rtnetlink::packet_route::address::AddressScope;
use rtnetlink::packet_route::link::{LinkAttribute, LinkEvent, LinkMessage};
use rtnetlink::packet_route::neighbour::{NeighbourAddress, NeighbourAttribute, NeighbourMessage, NeighbourState};
use rtnetlink::packet_route::route::{RouteAttribute, RouteMessage, RouteType};
use rtnetlink::sys::SocketAddr;
use rtnetlink::{Handle, MulticastGroup};
use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::attach::pod_interfaces;
use crate::devices::interfaces::{self, NodeFacts};
use crate::devices::queueing;
use crate::devices::records;
use crate::devices::routes::{self, Routes};
use crate::devices::vlans;
use crate::error::StartError;
use crate::loader::initial_state::{self, OwnAddresses};
use crate::names::OVERLAY_DEVICE;
use crate::netlink;
use crate::node_state::shared::Shared;
use crate::overlay;
use crate::settings::Settings;
use egress_core::model::interface::{EgressInterface, InterfaceReason, InterfaceState};
use egress_core::model::node::Mac;
use egress_supervise::{self, Task};

const CHECK_INTERVAL: Duration = Duration::from_secs(10);
const ROUTE_PAUSE: Duration = Duration::from_millis(50);

/// Netlink events.
pub type Changes = UnboundedReceiver<(NetlinkMessage<RouteNetlinkMessage>, SocketAddr)>;

/// What to do after one or more events.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Need {
    look: bool,
    routes: bool,
    /// Routes or neighbours of a further egress interface.
    further: bool,
    /// The indices of interfaces whose neighbours must learn again where they are: a bond has another active port.
    announce: BTreeSet<u32>,
}

impl Need {
    fn and(mut self, other: Self) -> Self {
        self.announce.extend(other.announce);
        Self {
            look: self.look | other.look,
            routes: self.routes | other.routes,
            further: self.further | other.further,
            announce: self.announce,
        }
    }
}

/// The indices of egress interfaces.
struct WatchedInterfaces {
    all: BTreeSet<u32>,
    further: BTreeSet<u32>,
}

impl WatchedInterfaces {
    fn of(facts: &NodeFacts) -> Self {
        Self { all: facts.interface_indices(), further: facts.further().map(|one| one.index).collect() }
    }
}

/// Link addresses of neighbours as last seen.
type Neighbours = HashMap<(u32, IpAddr), Vec<u8>>;

/// Subscribes. `ends` is cancelled before the changes are dropped.
pub fn listen(tasks: &mut JoinSet<()>, ends: CancellationToken) -> io::Result<Changes> {
    let (connection, _handle, changes) = rtnetlink::new_multicast_connection(&[
        MulticastGroup::Link,
        MulticastGroup::Neigh,
        MulticastGroup::Ipv4Ifaddr,
        MulticastGroup::Ipv6Ifaddr,
        MulticastGroup::Ipv4Route,
        MulticastGroup::Ipv6Route,
        MulticastGroup::Ipv4Rule,
        MulticastGroup::Ipv6Rule,
    ])?;
    tasks.spawn(egress_supervise::until(ends, Task::Netlink, connection));
    Ok(changes)
}

/// Reads the current facts of the node.
pub async fn gather(netlink: &Handle, settings: &Settings) -> io::Result<NodeFacts> {
    let (links, addresses) = records::dump(netlink).await?;
    let link = |name: &str| links.iter().find(|link| interfaces::name(link) == Some(name));
    let uplink = link(&settings.uplink).map(interfaces::from_message);
    let (v4, v6) = uplink.map_or((None, None), |uplink| interfaces::primary_addresses(&addresses, uplink.index));
    let (mgmt, overlay) = (link(&settings.mgmt_port), link(OVERLAY_DEVICE));
    let mut interfaces = records::records(&links, &addresses, (&settings.uplink, &settings.mgmt_port));
    let (routes, neighbours) = next_hops(netlink, &links, &mut interfaces).await?;
    let further = interfaces.iter().filter(|one| !one.is_uplink);
    let addresses_of = |one: &EgressInterface| (one.index, interfaces::primary_addresses(&addresses, one.index));
    let of_pools = links.iter().filter(|link| !vlans::gateways(link).is_empty()).map(|link| link.header.index);
    let uplink_is_paced = match link(&settings.uplink) {
        Some(link) => queueing::is_paced(netlink, link).await,
        None => false,
    };
    let pod_interface = match mgmt {
        Some(_) => None,
        None => pod_interfaces::look(netlink, (&links, &addresses), &settings.uplink).await?,
    };
    Ok(NodeFacts {
        uplink,
        uplink_is_paced,
        mgmt: mgmt.map(interfaces::from_message),
        pod_interface,
        mgmt_filters_ports: mgmt.is_some_and(interfaces::filters_ports),
        overlay: overlay.map(interfaces::from_message),
        overlay_up: overlay.is_some_and(interfaces::is_up),
        v4,
        v6,
        further_addresses: further.map(addresses_of).collect(),
        pool_vlans: of_pools.map(|index| (index, interfaces::link_local(&addresses, index))).collect(),
        routes,
        neighbours,
        interfaces,
        addresses: addresses.iter().filter_map(interfaces::addressed).map(|seen| seen.address).collect(),
    })
}

/// The routes and neighbours of the further egress interfaces, and the destinations of all. An interface with too many routes
/// cannot send. A node with the uplink alone reads no routes: others know its networks and that it has default routes.
async fn next_hops(
    handle: &Handle,
    links: &[LinkMessage],
    interfaces: &mut [EgressInterface],
) -> io::Result<(Routes, BTreeMap<(u32, IpAddr), Mac>)> {
    let (mut all, mut further) = (Routes::new(), BTreeSet::new());
    if interfaces.iter().all(|one| one.is_uplink) {
        return Ok((all, BTreeMap::new()));
    }
    let messages = routes::dump(handle).await?;
    for one in interfaces.iter_mut().filter(|one| one.is_attached()) {
        let mut found = routes::of_interface(&messages, one.index, routes::table(links, one.index));
        let link = links.iter().find(|link| link.header.index == one.index);
        // Those of the kernel come first: an administrator may lead a prefix to another router.
        for (net, route) in link.into_iter().flat_map(vlans::gateways).flat_map(|gateway| routes::of_gateway(&gateway))
        {
            if let Some(found) = &mut found {
                found.entry(net).or_insert(route);
            }
        }
        if let Some(found) = &found {
            one.destinations = routes::destinations(found, &one.networks);
        }
        if one.is_uplink {
            continue;
        }
        further.insert(one.index);
        match found {
            Some(found) => all.extend(found.into_iter().map(|(net, entry)| ((one.index, net), entry))),
            None => one.state = InterfaceState::Attached(InterfaceReason::TooManyRoutes),
        }
    }
    let listed = netlink::dump(|| handle.neighbours().get().execute()).await?;
    let known = |message: &NeighbourMessage| {
        let (address, mac) = usable_neighbour(message)?;
        Some(((message.header.ifindex, address), mac?.as_slice().try_into().ok()?))
    };
    let of_them = listed.iter().filter(|message| further.contains(&message.header.ifindex));
    Ok((all, of_them.filter_map(known).collect()))
}

/// Runs until dropped.
pub async fn run(shared: Arc<Shared>, mut changes: Changes) {
    let mut neighbours = Neighbours::new();
    let mut interfaces = WatchedInterfaces::of(shared.state().facts());
    let mut lost = shared.state().lost_next_hops();
    let mut vlans = shared.state().wanted_vlans();
    let mut check = interval(CHECK_INTERVAL);
    check.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // When the routes' generation may be raised again, and whether it must be.
    let (mut routes_from, mut routes_due, mut further_due) = (Instant::now(), false, false);
    loop {
        let mut need = Need::default();
        let mut verify = false;
        tokio::select! {
            change = changes.next() => match change {
                Some((change, _)) => need = judge((&shared.settings, &interfaces), &mut neighbours, &change),
                // The connection has ended, which ends the process.
                None => return,
            },
            _ = check.tick() => verify = true,
            changed = lost.changed() => {
                // Its sender is in the state.
                if changed.is_ok() {
                    shared.state().note_gateways();
                }
                continue;
            }
            // Its sender is in the state.
            changed = vlans.changed() => need.look = changed.is_ok(),
            () = sleep_until(routes_from), if routes_due => {}
        }
        // All pending events count as one change.
        while let Some(Some((change, _))) = changes.next().now_or_never() {
            let more = judge((&shared.settings, &interfaces), &mut neighbours, &change);
            need = need.and(more);
        }
        (routes_due, further_due) = (routes_due | need.routes, further_due | need.further);
        let are_routes_read = routes_due && Instant::now() >= routes_from;
        let begun = Instant::now();
        if need.look || verify || (further_due && are_routes_read) {
            look(&shared, verify).await;
            interfaces = WatchedInterfaces::of(shared.state().facts());
            further_due = false;
        }
        if !need.announce.is_empty() {
            shared.state().claims.announce_on(&need.announce);
        }
        if verify {
            check_netfilter(&shared).await;
        }
        if are_routes_read {
            if let Err(error) = shared.state().raise_route_generation() {
                warn!(%error, "cannot tell the programs that routes have changed");
            }
            routes_due = false;
            // A long table is read for a tenth of the time at most.
            routes_from = Instant::now() + ROUTE_PAUSE.max(begun.elapsed() * 9);
        }
    }
}

/// On a blocking thread: it waits for the lock of the policy maps.
async fn check_netfilter(shared: &Arc<Shared>) {
    let shared = Arc::clone(shared);
    let check = move || {
        shared.leak_guard.check(&shared);
        match shared.networks().repair() {
            Ok(true) => info!("rules and marks for the networks of EgressServices were written again"),
            Ok(false) => {}
            Err(error) => warn!(%error, "cannot look after rules and marks for the networks of EgressServices"),
        }
    };
    if let Err(error) = spawn_blocking(check).await {
        warn!(%error, "cannot look after the nftables tables");
    }
}

/// Reads the facts and applies them. A failure is retried with the next event or check.
async fn look(shared: &Arc<Shared>, verify: bool) {
    ensure_vlans(shared).await;
    let mut facts = gather(&shared.netlink, &shared.settings).await;
    if matches!(&facts, Ok(facts) if facts.overlay.is_none()) {
        match overlay::ensure(&shared.netlink, shared.settings.tunnel_port).await {
            Ok(_) => facts = gather(&shared.netlink, &shared.settings).await,
            Err(error @ StartError::TunnelPortTaken { .. }) => warn!("{error}"),
            Err(error) => warn!(%error, "cannot make the overlay device again"),
        }
    }
    if let Ok(facts) = &facts {
        write_initial_state(shared, facts).await;
    }
    let followed = match facts {
        // Attaching, filters and memberships block on the kernel.
        Ok(facts) => {
            let following = Arc::clone(shared);
            let follow = move || following.state().follow(&following.settings, facts, verify);
            egress_supervise::joined(spawn_blocking(follow).await)
        }
        Err(error) => Err(error),
    };
    if let Err(error) = followed {
        warn!(%error, "cannot follow a change of the node's interfaces; trying again");
    }
    let waits = shared.state().overlay_to_bring_up();
    if let Some(index) = waits
        && let Err(error) = overlay::bring_up(&shared.netlink, index, shared.settings.tunnel_port).await
    {
        warn!(%error, "cannot bring up the overlay device; trying again");
    }
}

/// Before the first plan nothing is known to be wanted, and devices of a former run stay.
async fn ensure_vlans(shared: &Shared) {
    let wanted = shared.state().wanted_vlans().borrow().clone();
    let Some(wanted) = wanted else { return };
    // Most nodes have none, and each look would read all links once more.
    if wanted.is_empty() && shared.state().facts().pool_vlans.is_empty() {
        return;
    }
    let uplink = match interfaces::interface(&shared.netlink, &shared.settings.uplink).await {
        Ok(Some(uplink)) => uplink,
        // They are gone with it.
        Ok(None) => return,
        Err(error) => return warn!(%error, "cannot look for the uplink"),
    };
    let in_use = shared.state().hosting();
    let ensured = match in_use {
        Ok(in_use) => vlans::ensure(&shared.netlink, (uplink.index, &wanted), &in_use).await,
        Err(error) => Err(error),
    };
    match ensured {
        Ok(problems) => shared.state().note_vlan_problems(problems),
        Err(error) => warn!(%error, "cannot look after VLAN devices; trying again"),
    }
}

/// Writes the initial state before programs are attached to a new device, until the first plan.
async fn write_initial_state(shared: &Shared, facts: &NodeFacts) {
    let Some(known) = shared.settings.initial_state.as_ref().filter(|_| shared.state().in_initial_state()) else {
        return;
    };
    let own = OwnAddresses::read(&shared.netlink, facts).await;
    let written = own.and_then(|own| {
        // The first plan may have observed the maps in between.
        if !shared.state().in_initial_state() {
            return Ok(());
        }
        let nets = initial_state::write(&mut shared.policy_maps(), known, &own)?;
        nets.iter().try_for_each(|net| shared.state().cover(net))
    });
    if let Err(error) = written {
        warn!(%error, "cannot write what is known of this node's pods; trying again");
    }
}

fn judge(
    (settings, interfaces): (&Settings, &WatchedInterfaces),
    neighbours: &mut Neighbours,
    change: &NetlinkMessage<RouteNetlinkMessage>,
) -> Need {
    let everything = Need { look: true, routes: true, further: true, announce: BTreeSet::new() };
    let route = |message: &RouteMessage| Need {
        routes: true,
        further: concerns_further(&interfaces.further, message),
        ..Need::default()
    };
    let mut neighbour = |message: &NeighbourMessage, deleted| {
        let routes = note(neighbours, message, deleted);
        let further = routes && interfaces.further.contains(&message.header.ifindex);
        Need { routes, further, ..Need::default() }
    };
    match &change.payload {
        NetlinkPayload::Overrun(_) => everything,
        NetlinkPayload::InnerMessage(message) => match message {
            RouteNetlinkMessage::NewLink(link) | RouteNetlinkMessage::DelLink(link) => {
                let announce = notifies_peers(link).filter(|index| interfaces.all.contains(index));
                Need {
                    look: concerns_us(settings, &interfaces.all, link),
                    announce: announce.into_iter().collect(),
                    ..Need::default()
                }
            }
            // Each pod's device gets a link-local address.
            RouteNetlinkMessage::NewAddress(address) | RouteNetlinkMessage::DelAddress(address) => {
                let is_further = interfaces.further.contains(&address.header.index);
                let look = address.header.scope == AddressScope::Universe || is_further;
                Need { look, routes: true, ..Need::default() }
            }
            RouteNetlinkMessage::NewRoute(message) | RouteNetlinkMessage::DelRoute(message) => route(message),
            RouteNetlinkMessage::NewRule(_) | RouteNetlinkMessage::DelRule(_) => {
                Need { routes: true, ..Need::default() }
            }
            RouteNetlinkMessage::NewNeighbour(message) => neighbour(message, false),
            RouteNetlinkMessage::DelNeighbour(message) => neighbour(message, true),
            _ => Need::default(),
        },
        _ => Need::default(),
    }
}

/// The device that asks the kernel to announce its addresses (`NETDEV_NOTIFY_PEERS`), which does not know egress IPs: a bond
/// after a failover, or a guest's device after a migration.
fn notifies_peers(link: &LinkMessage) -> Option<u32> {
    let is_event = |attribute: &LinkAttribute| matches!(attribute, LinkAttribute::Event(LinkEvent::NotifyPeers));
    link.attributes.iter().any(is_event).then_some(link.header.index)
}

/// A device becomes an egress interface with its first address, so events of other devices, such as those of pods, are none
/// of ours.
fn concerns_us(settings: &Settings, interfaces: &BTreeSet<u32>, link: &LinkMessage) -> bool {
    let ours = [settings.uplink.as_str(), settings.mgmt_port.as_str(), OVERLAY_DEVICE];
    interfaces.contains(&link.header.index) || interfaces::name(link).is_some_and(|name| ours.contains(&name))
}

/// A route by one of these interfaces, or one that refuses its packets on all.
fn concerns_further(further: &BTreeSet<u32>, message: &RouteMessage) -> bool {
    let by_them = |attribute: &RouteAttribute| match attribute {
        RouteAttribute::Oif(index) => further.contains(index),
        RouteAttribute::MultiPath(hops) => hops.iter().any(|hop| further.contains(&hop.interface_index)),
        _ => false,
    };
    let refused = [RouteType::BlackHole, RouteType::Unreachable, RouteType::Prohibit];
    !further.is_empty() && (refused.contains(&message.header.kind) || message.attributes.iter().any(by_them))
}

/// The IP address of a neighbour, and its link address if it can be used. Entries of bridges have no IP address.
fn usable_neighbour(message: &NeighbourMessage) -> Option<(IpAddr, Option<&Vec<u8>>)> {
    let mut address = None;
    let mut link_address = None;
    for attribute in &message.attributes {
        match attribute {
            NeighbourAttribute::Destination(NeighbourAddress::Inet(ip)) => address = Some(IpAddr::V4(*ip)),
            NeighbourAttribute::Destination(NeighbourAddress::Inet6(ip)) => address = Some(IpAddr::V6(*ip)),
            NeighbourAttribute::LinkLayerAddress(bytes) => link_address = Some(bytes),
            _ => {}
        }
    }
    let unusable = matches!(message.header.state, NeighbourState::Failed | NeighbourState::Incomplete);
    Some((address?, link_address.filter(|_| !unusable)))
}

/// Whether the neighbour's link address changed.
fn note(neighbours: &mut Neighbours, message: &NeighbourMessage, deleted: bool) -> bool {
    let Some((address, link_address)) = usable_neighbour(message) else { return false };
    let key = (message.header.ifindex, address);
    match link_address.filter(|_| !deleted) {
        Some(link_address) => neighbours.insert(key, link_address.clone()).as_ref() != Some(link_address),
        None => neighbours.remove(&key).is_some(),
    }
}

#[cfg(test)]
mod tests {
    use rtnetlink::packet_core::NetlinkHeader;

    use super::*;

    fn neighbour(state: NeighbourState, mac: Option<[u8; 6]>) -> NeighbourMessage {
        let mut message = NeighbourMessage::default();
        message.header.ifindex = 2;
        message.header.state = state;
        message.attributes.push(NeighbourAttribute::Destination(NeighbourAddress::Inet([172, 18, 0, 1].into())));
        message.attributes.extend(mac.map(|mac| NeighbourAttribute::LinkLayerAddress(mac.to_vec())));
        message
    }

    #[test]
    fn only_a_changed_link_address_matters() {
        let mut seen = Neighbours::new();
        assert!(note(&mut seen, &neighbour(NeighbourState::Reachable, Some([1; 6])), false));
        assert!(!note(&mut seen, &neighbour(NeighbourState::Stale, Some([1; 6])), false));
        assert!(note(&mut seen, &neighbour(NeighbourState::Reachable, Some([2; 6])), false));
        assert!(note(&mut seen, &neighbour(NeighbourState::Failed, None), false));
        assert!(!note(&mut seen, &neighbour(NeighbourState::Incomplete, None), false));
        assert!(note(&mut seen, &neighbour(NeighbourState::Reachable, Some([2; 6])), false));
        assert!(note(&mut seen, &neighbour(NeighbourState::Reachable, Some([2; 6])), true));
    }

    #[test]
    fn a_device_that_notifies_its_peers_is_announced_on() {
        let settings = Settings::new("breth0", "ovn-k8s-mp0");
        let interfaces = WatchedInterfaces { all: [2, 3].into(), further: [3].into() };
        let announce = |index, event| {
            let mut link = LinkMessage::default();
            link.header.index = index;
            link.attributes.push(LinkAttribute::Event(event));
            let message = NetlinkPayload::InnerMessage(RouteNetlinkMessage::NewLink(link));
            let change = NetlinkMessage::new(NetlinkHeader::default(), message);
            judge((&settings, &interfaces), &mut Neighbours::new(), &change).announce
        };
        assert_eq!(announce(3, LinkEvent::NotifyPeers), [3].into());
        assert_eq!(announce(2, LinkEvent::NotifyPeers), [2].into());
        assert_eq!(announce(4, LinkEvent::NotifyPeers), [].into(), "no egress interface");
        assert_eq!(announce(3, LinkEvent::Features), [].into());
    }

    #[test]
    fn other_devices_do_not_concern_us() {
        let settings = Settings::new("breth0", "ovn-k8s-mp0");
        let concerns = |name: &str, index| {
            let mut link = LinkMessage::default();
            link.header.index = index;
            link.attributes.push(LinkAttribute::IfName(name.to_owned()));
            concerns_us(&settings, &[3].into(), &link)
        };
        assert!(concerns("breth0", 2));
        assert!(concerns(OVERLAY_DEVICE, 2));
        assert!(concerns("renamed", 3), "an egress interface, whatever its name");
        assert!(!concerns("veth1234", 2));
    }
}
