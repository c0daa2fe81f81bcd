//! Link addresses of pods at the management port, as the kernel resolves them.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::time::Duration;

use egress_common::abi::Tuple;
use futures::TryStreamExt;
use rtnetlink::packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState,
};
use rtnetlink::packet_route::route::{RouteAddress, RouteAttribute};
use rtnetlink::{Handle, RouteMessageBuilder};
use tokio::time::{Instant, sleep};
use tracing::debug;

use crate::conntrack::idle_reset::Batch;
use crate::devices::interfaces::Interface;
use crate::error::netlink_io;
use crate::netlink;
use egress_core::model::node::Mac;

/// How long a neighbour has to answer the kernel.
const RESOLVING: Duration = Duration::from_millis(50);

/// Link addresses of all pods of a round.
pub struct PodLinks {
    pub port: Interface,
    pub until: Instant,
    /// The link address of each pod's next hop; `None` where there is none yet.
    pub to: BTreeMap<IpAddr, Option<Mac>>,
}

impl PodLinks {
    pub fn cover(&self, port: Interface, now: Instant, batch: &Batch) -> bool {
        let has = |connection: &Tuple| self.to.contains_key(&connection.saddr.to_ip());
        self.port == port && now < self.until && batch.iter().all(|(connection, _)| has(connection))
    }
}

/// The next hop's link address for each of these pods at the management port. The kernel resolves unknown neighbours, by
/// the next round at the latest.
pub async fn look(
    netlink: &Handle,
    port: Interface,
    pods: BTreeSet<IpAddr>,
) -> io::Result<BTreeMap<IpAddr, Option<Mac>>> {
    let mut hops = BTreeMap::new();
    for pod in pods {
        hops.insert(pod, next_hop(netlink, port.index, pod).await?);
    }
    let mut known = neighbours(netlink, port.index).await?;
    let unknown: BTreeSet<IpAddr> = hops.values().flatten().filter(|hop| !known.contains_key(*hop)).copied().collect();
    for hop in &unknown {
        let asked = netlink.neighbours().add(port.index, *hop).state(NeighbourState::None).replace();
        if let Err(error) = asked.flags(NeighbourFlags::Use).execute().await {
            debug!(%error, %hop, "cannot ask for a neighbour");
        }
    }
    if !unknown.is_empty() {
        sleep(RESOLVING).await;
        known = neighbours(netlink, port.index).await?;
    }
    Ok(hops.into_iter().map(|(pod, hop)| (pod, hop.and_then(|hop| known.get(&hop).copied()))).collect())
}

/// Next hop for the address; `None` without a route by this port.
async fn next_hop(netlink: &Handle, ifindex: u32, to: IpAddr) -> io::Result<Option<IpAddr>> {
    let whole = if to.is_ipv4() { 32 } else { 128 };
    let message = RouteMessageBuilder::<IpAddr>::new()
        .destination_prefix(to, whole)
        .map_err(io::Error::other)?
        .output_interface(ifindex)
        .build();
    let found = match netlink.route().get(message).execute().try_next().await.map_err(netlink_io) {
        Ok(found) => found,
        // No route.
        Err(error) => {
            debug!(%error, %to, "no path to a pod");
            return Ok(None);
        }
    };
    let Some(route) = found else { return Ok(None) };
    let by_port =
        route.attributes.iter().any(|attribute| matches!(attribute, RouteAttribute::Oif(oif) if *oif == ifindex));
    let gateway = route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Gateway(RouteAddress::Inet(gateway)) => Some(IpAddr::V4(*gateway)),
        RouteAttribute::Gateway(RouteAddress::Inet6(gateway)) => Some(IpAddr::V6(*gateway)),
        _ => None,
    });
    Ok(by_port.then(|| gateway.unwrap_or(to)))
}

/// Neighbours of the port whose link address the kernel has.
async fn neighbours(handle: &Handle, ifindex: u32) -> io::Result<BTreeMap<IpAddr, Mac>> {
    let messages = netlink::dump(|| handle.neighbours().get().execute()).await?;
    let of_port = messages.iter().filter(|message| message.header.ifindex == ifindex);
    Ok(of_port.filter_map(neighbour).collect())
}

fn neighbour(message: &NeighbourMessage) -> Option<(IpAddr, Mac)> {
    if matches!(message.header.state, NeighbourState::Failed | NeighbourState::Incomplete) {
        return None;
    }
    let (mut address, mut mac) = (None, None);
    for attribute in &message.attributes {
        match attribute {
            NeighbourAttribute::Destination(NeighbourAddress::Inet(v4)) => address = Some(IpAddr::V4(*v4)),
            NeighbourAttribute::Destination(NeighbourAddress::Inet6(v6)) => address = Some(IpAddr::V6(*v6)),
            NeighbourAttribute::LinkLayerAddress(bytes) => mac = Mac::try_from(bytes.as_slice()).ok(),
            _ => {}
        }
    }
    address.zip(mac)
}
