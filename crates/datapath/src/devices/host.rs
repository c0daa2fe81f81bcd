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
use tokio::task::JoinSet;

use crate::devices::interfaces::SERVICE_DEVICE;
use crate::devices::{interfaces, records};
use crate::error::netlink_io;
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
}

impl Host {
    pub fn new(uplink: String, mgmt_port: String) -> io::Result<Self> {
        let (connection, netlink, _) = rtnetlink::new_connection()?;
        let mut tasks = JoinSet::new();
        tasks.spawn(egress_supervise::forever(Task::Netlink, connection));
        Ok(Self { netlink, uplink, mgmt_port, _connection: tasks })
    }
}

impl HostAddresses for Host {
    async fn networks(&self) -> io::Result<HostNetworks> {
        let (links, addresses) = records::dump(&self.netlink).await?;
        let named = |link: &LinkMessage| Some((link.header.index, interfaces::name(link)?.to_owned()));
        let names: BTreeMap<u32, String> = links.iter().filter_map(named).collect();
        let is_ours =
            |index: u32| names.get(&index).is_some_and(|name| *name != self.mgmt_port && name != SERVICE_DEVICE);
        let interfaces = records::records(&links, &addresses, (&self.uplink, &self.mgmt_port));
        let mut networks = HostNetworks { interfaces, ..HostNetworks::default() };
        for message in &addresses {
            let index = message.header.index;
            let seen = network(message);
            if names.get(&index).is_some_and(|name| *name == self.mgmt_port) {
                networks.management.extend(seen.map(|network| network.addr()));
            }
            networks.all.extend(seen.filter(|_| is_ours(index)));
        }
        let uplink = names.iter().find(|(_, name)| **name == self.uplink);
        if let Some((index, _)) = uplink {
            networks.uplink.mac = interfaces::interface(&self.netlink, &self.uplink).await?.map(|link| link.mac);
            let (v4, v6) = interfaces::primary_addresses(&self.netlink, *index).await?;
            let own = v4.map(IpAddr::V4).into_iter().chain(v6.map(IpAddr::V6));
            for own in own {
                networks.primary.extend(networks.all.iter().find(|network| network.addr() == own));
                networks.uplink.next_hops.extend(next_hop(&self.netlink, *index, own).await);
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
