//! What the programs go by until the agent has heard of the cluster, where unknown pods are dropped from the first packet on
//! (`--unknown-pods=drop`).
//!
//! A packet is a pod's by its source's prefix, and may pass by its destination's. Both come from the API server, which may not
//! answer for long behind a boot. Until then these entries stand in for what it will say: the networks that flags name, those of
//! the management port, whose other addresses are pods', and this node's own addresses. The first observation of the kernel ends
//! it: the plan that follows replaces them.

use std::io;
use std::net::{IpAddr, Ipv6Addr};

use egress_common::abi::{Addr, PrefixKind};
use futures::TryStreamExt;
use ipnet::IpNet;
use rtnetlink::Handle;

use crate::devices::interfaces::{self, NodeFacts};
use crate::error::netlink_io;
use crate::maps::convert;
use crate::maps::tables::Tables;
use crate::settings::InitialState;
use egress_core::model::state::{NodeAddress, Prefix, TunnelEndpoint};

/// What the kernel knows of this node.
pub struct OwnAddresses {
    /// The name that entries give this node.
    node: TunnelEndpoint,
    all: Vec<IpAddr>,
    /// Of the management port.
    pods: Vec<IpNet>,
}

impl OwnAddresses {
    pub async fn read(netlink: &Handle, facts: &NodeFacts) -> io::Result<Self> {
        let uplink = facts.v4.map(IpAddr::V4).or(facts.v6.map(IpAddr::V6));
        // As long as every entry says the same, any name will do.
        let node = TunnelEndpoint(uplink.unwrap_or(Ipv6Addr::UNSPECIFIED.into()));
        let (mut all, mut pods) = (Vec::new(), Vec::new());
        let mut messages = netlink.address().get().execute();
        while let Some(message) = messages.try_next().await.map_err(netlink_io)? {
            let Some(seen) = interfaces::addressed(&message) else { continue };
            all.push(seen.address);
            let is_mgmt = facts.mgmt.is_some_and(|mgmt| mgmt.index == message.header.index);
            pods.extend(IpNet::new(seen.address, seen.length).ok().filter(|_| is_mgmt).map(|net| net.trunc()));
        }
        Ok(Self { node, all, pods })
    }
}

/// Writes the entries; the networks among them that may hold pods.
pub fn write(tables: &mut Tables, known: &InitialState, own: &OwnAddresses) -> io::Result<Vec<IpNet>> {
    let of_this_node = Prefix { kind: PrefixKind::PodSubnet, node: Some(own.node) };
    // Whose of the cluster's pods a packet is of, if not this node's, is not known: none of another node comes this way.
    let stands_in = |prefix: &Prefix| if prefix.kind == PrefixKind::PodNetwork { of_this_node } else { *prefix };
    let mut cluster: InitialState = known.iter().map(|(net, prefix)| (*net, stands_in(prefix))).collect();
    cluster.extend(own.pods.iter().map(|net| (*net, of_this_node)));
    for (net, prefix) in &cluster {
        tables.cluster.put(&convert::cluster_key(net), &convert::prefix_value(*prefix))?;
    }
    for address in &own.all {
        let entry = convert::node_entry(NodeAddress { own: true, node: own.node });
        tables.nodes.put(&Addr::from(*address), &entry)?;
    }
    Ok(cluster.into_iter().filter(|(_, prefix)| convert::holds_pods(*prefix)).map(|(net, _)| net).collect())
}
