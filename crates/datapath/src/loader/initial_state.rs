//! Initial state of the maps, before the API server answers, where unknown pods are dropped (`--unknown-pods=drop`).
//!
//! A packet belongs to a pod by the prefix of its source, and may pass by the prefix of its destination. Both come from the API
//! server, which may take long to answer after a boot. These entries replace them until then: networks from flags, networks of
//! the management port (its other addresses are pods), and the node's own addresses. The first plan replaces them.

use std::io;
use std::net::{IpAddr, Ipv6Addr};

use egress_common::abi::{Addr, PrefixKind};
use ipnet::IpNet;
use rtnetlink::Handle;

use crate::devices::interfaces::{self, NodeFacts};
use crate::devices::records;
use crate::maps::convert;
use crate::maps::handles::PolicyMaps;
use crate::settings::InitialState;
use egress_core::model::state::{NodeAddress, Prefix, TunnelEndpoint};

/// Addresses of this node, from the kernel.
pub struct OwnAddresses {
    /// Tunnel endpoint in the entries of this node.
    node: TunnelEndpoint,
    all: Vec<IpAddr>,
    /// Addresses of the management port.
    pods: Vec<IpNet>,
}

impl OwnAddresses {
    pub async fn read(netlink: &Handle, facts: &NodeFacts) -> io::Result<Self> {
        let uplink = facts.v4.map(IpAddr::V4).or(facts.v6.map(IpAddr::V6));
        // Any value will do, as long as all entries have the same one.
        let node = TunnelEndpoint(uplink.unwrap_or(Ipv6Addr::UNSPECIFIED.into()));
        let (mut all, mut pods) = (Vec::new(), Vec::new());
        for message in &records::addresses(netlink).await? {
            let Some(seen) = interfaces::addressed(message) else { continue };
            all.push(seen.address);
            let is_mgmt = facts.mgmt.is_some_and(|mgmt| mgmt.index == message.header.index);
            pods.extend(IpNet::new(seen.address, seen.length).ok().filter(|_| is_mgmt).map(|net| net.trunc()));
        }
        Ok(Self { node, all, pods })
    }
}

/// Writes the entries; returns the networks that may hold pods.
pub fn write(maps: &mut PolicyMaps, known: &InitialState, own: &OwnAddresses) -> io::Result<Vec<IpNet>> {
    let of_this_node = Prefix { kind: PrefixKind::PodSubnet, node: Some(own.node) };
    // Pods of other nodes do not send through this node's management port.
    let stands_in = |prefix: &Prefix| if prefix.kind == PrefixKind::PodNetwork { of_this_node } else { *prefix };
    let mut cluster: InitialState = known.iter().map(|(net, prefix)| (*net, stands_in(prefix))).collect();
    cluster.extend(own.pods.iter().map(|net| (*net, of_this_node)));
    for (net, prefix) in &cluster {
        maps.cluster.put(&convert::cluster_key(net), &convert::prefix_value(*prefix))?;
    }
    for address in &own.all {
        let entry = convert::node_entry(NodeAddress { own: true, node: own.node });
        maps.nodes.put(&Addr::from(*address), &entry)?;
    }
    Ok(cluster.into_iter().filter(|(_, prefix)| convert::holds_pods(*prefix)).map(|(net, _)| net).collect())
}
