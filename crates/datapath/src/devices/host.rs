//! Networks of this node, from the kernel, for clusters whose CNI does not publish them (`egress_kube::node_facts`).

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use futures::TryStreamExt;
use ipnet::IpNet;
use rtnetlink::packet_route::address::AddressMessage;
use rtnetlink::packet_route::link::LinkMessage;
use rtnetlink::packet_route::route::{RouteAddress, RouteAttribute};
use rtnetlink::{Handle, RouteMessageBuilder};
use tokio::sync::watch::Receiver;
use tokio::task::JoinSet;

use crate::devices::interfaces::{FurtherNextHops, SERVICE_DEVICE};
use crate::devices::{interfaces, records};
use crate::error::netlink_io;
use egress_core::model::interface::EgressInterface;
use egress_core::model::node::{HostAddresses, HostNetworks};
use egress_supervise::{self, Task};

/// Documentation addresses, in no real network: the route to them is the default one (RFC 5737, RFC 3849).
const NOWHERE: [IpAddr; 2] =
    [IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1))];

/// The netlink connection and the device names.
pub struct Host {
    /// Dropped before the handle.
    _connection: JoinSet<()>,
    pub netlink: Handle,
    pub uplink: String,
    mgmt_port: String,
    /// The data plane's records.
    pub interfaces: Receiver<Vec<EgressInterface>>,
    /// The watch of its further interfaces' gateways.
    pub further: FurtherNextHops,
}

impl Host {
    pub fn new(
        (uplink, mgmt_port): (String, String),
        interfaces: Receiver<Vec<EgressInterface>>,
        further: FurtherNextHops,
    ) -> io::Result<Self> {
        let (connection, netlink, _) = rtnetlink::new_connection()?;
        let mut tasks = JoinSet::new();
        tasks.spawn(egress_supervise::forever(Task::Netlink, connection));
        Ok(Self { netlink, uplink, mgmt_port, interfaces, further, _connection: tasks })
    }
}

impl HostAddresses for Host {
    async fn networks(&self) -> io::Result<HostNetworks> {
        let (links, addresses) = records::dump(&self.netlink).await?;
        let named = |link: &LinkMessage| Some((link.header.index, interfaces::name(link)?.to_owned()));
        let names: BTreeMap<u32, String> = links.iter().filter_map(named).collect();
        let is_ours =
            |index: u32| names.get(&index).is_some_and(|name| *name != self.mgmt_port && name != SERVICE_DEVICE);
        let mut networks = HostNetworks { interfaces: self.interfaces.borrow().clone(), ..HostNetworks::default() };
        for message in &addresses {
            let index = message.header.index;
            let seen = network(message);
            if names.get(&index).is_some_and(|name| *name == self.mgmt_port) {
                networks.management.extend(seen.map(|network| network.addr()));
            }
            networks.all.extend(seen.filter(|_| is_ours(index)));
        }
        let uplink = links.iter().find(|link| interfaces::name(link) == Some(&self.uplink));
        if let Some(interfaces::Interface { index, mac, .. }) = uplink.map(interfaces::from_message) {
            networks.uplink.mac = Some(mac);
            let (v4, v6) = interfaces::primary_addresses(&addresses, index);
            let own = v4.map(IpAddr::V4).into_iter().chain(v6.map(IpAddr::V6));
            for own in own {
                networks.primary.extend(networks.all.iter().find(|network| network.addr() == own));
                networks.uplink.next_hops.extend(next_hop(&self.netlink, index, own).await);
            }
        }
        Ok(networks)
    }
}

fn network(message: &AddressMessage) -> Option<IpNet> {
    let seen = interfaces::addressed(message)?;
    IpNet::new(seen.address, seen.length).ok()
}

/// The gateway of the default route of this family on the uplink.
pub async fn next_hop(netlink: &Handle, index: u32, own: IpAddr) -> Option<IpAddr> {
    let nowhere = NOWHERE.into_iter().find(|nowhere| nowhere.is_ipv4() == own.is_ipv4())?;
    let length = if nowhere.is_ipv4() { 32 } else { 128 };
    let message =
        RouteMessageBuilder::<IpAddr>::new().destination_prefix(nowhere, length).ok()?.output_interface(index).build();
    let route = netlink.route().get(message).execute().try_next().await.map_err(netlink_io);
    route.ok()??.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Gateway(RouteAddress::Inet(address)) => Some(IpAddr::V4(*address)),
        RouteAttribute::Gateway(RouteAddress::Inet6(address)) => Some(IpAddr::V6(*address)),
        _ => None,
    })
}
