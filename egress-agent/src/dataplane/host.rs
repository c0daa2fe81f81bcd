//! Which networks this node is in, asked from the kernel: what the cluster is told of it where no CNI does
//! (`kube::own_node`).

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;

use futures::TryStreamExt;
use ipnet::IpNet;
use rtnetlink::Handle;
use rtnetlink::packet_route::address::AddressMessage;
use rtnetlink::packet_route::link::LinkAttribute;
use tokio::task::JoinSet;

use super::error::netlink_io;
use super::interfaces;

/// kube-proxy in IPVS mode keeps the addresses of all services on this device.
const SERVICE_DEVICE: &str = "kube-ipvs0";

/// Addresses of the node, each with the length of its network.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostNetworks {
    /// The one address per family that the node itself uses on its uplink.
    pub primary: Vec<IpNet>,
    /// All, those of the uplink among them, those of the management port not.
    pub all: BTreeSet<IpNet>,
}

/// Where to ask.
pub struct Host {
    pub(super) netlink: Handle,
    pub(super) uplink: String,
    mgmt_port: String,
    _connection: JoinSet<()>,
}

impl Host {
    pub fn new(uplink: String, mgmt_port: String) -> io::Result<Self> {
        let (connection, netlink, _) = rtnetlink::new_connection()?;
        let mut tasks = JoinSet::new();
        tasks.spawn(connection);
        Ok(Self { netlink, uplink, mgmt_port, _connection: tasks })
    }

    pub async fn networks(&self) -> io::Result<HostNetworks> {
        let names = self.device_names().await?;
        let is_ours =
            |index: u32| names.get(&index).is_some_and(|name| *name != self.mgmt_port && name != SERVICE_DEVICE);
        let mut networks = HostNetworks::default();
        let mut messages = self.netlink.address().get().execute();
        while let Some(message) = messages.try_next().await.map_err(netlink_io)? {
            networks.all.extend(network(&message).filter(|_| is_ours(message.header.index)));
        }
        let uplink = names.iter().find(|(_, name)| **name == self.uplink);
        if let Some((index, _)) = uplink {
            let (v4, v6) = interfaces::primary_addresses(&self.netlink, *index).await?;
            let own = v4.map(IpAddr::V4).into_iter().chain(v6.map(IpAddr::V6));
            let with_length = own.filter_map(|own| networks.all.iter().find(|network| network.addr() == own));
            networks.primary = with_length.copied().collect();
        }
        Ok(networks)
    }

    async fn device_names(&self) -> io::Result<BTreeMap<u32, String>> {
        let mut names = BTreeMap::new();
        let mut links = self.netlink.link().get().execute();
        while let Some(link) = links.try_next().await.map_err(netlink_io)? {
            let name = link.attributes.iter().find_map(|attribute| match attribute {
                LinkAttribute::IfName(name) => Some(name.clone()),
                _ => None,
            });
            names.extend(name.map(|name| (link.header.index, name)));
        }
        Ok(names)
    }
}

fn network(message: &AddressMessage) -> Option<IpNet> {
    let seen = interfaces::addressed(message)?;
    IpNet::new(seen.address, seen.length).ok()
}
