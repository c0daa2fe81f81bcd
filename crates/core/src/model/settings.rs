//! What the operator configures about policies, and the cluster's prefixes that follow from it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use egress_common::abi::PrefixKind;
use ipnet::IpNet;

use crate::model::reserved::{ClusterNetworks, JOIN, LINK_LOCAL, MULTICAST};
use crate::model::state::Prefix;

/// What happens to packets of pods that this node does not know (yet).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnknownPods {
    /// Drop if the CNI announces addresses before the pod starts; otherwise pass while no object could select a pod
    /// here.
    Auto,
    Drop,
    Pass,
}

/// What happens if no node can host any address of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnUnassigned {
    NodeAddress,
    Drop,
}

/// Settings of one node.
#[derive(Clone, Debug)]
pub struct NodeSettings {
    pub node_name: String,
    pub cluster_subnets: Vec<IpNet>,
    pub service_cidrs: Vec<IpNet>,
    pub excluded_cidrs: Vec<IpNet>,
    /// The addresses that the cluster client connects to.
    pub api_servers: BTreeSet<IpAddr>,
    pub unknown_pods: UnknownPods,
    pub on_unassigned: OnUnassigned,
}

impl NodeSettings {
    /// The cluster's own networks.
    pub fn networks(&self) -> ClusterNetworks {
        let (pods, services) = (self.cluster_subnets.clone(), self.service_cidrs.clone());
        ClusterNetworks { pods, services, api_servers: self.api_servers.clone() }
    }

    /// Prefixes that belong to every cluster or are configured, from general to certain.
    pub fn prefixes(&self) -> [(&[IpNet], PrefixKind); 6] {
        [
            (&self.excluded_cidrs, PrefixKind::Excluded),
            (&MULTICAST, PrefixKind::Multicast),
            (&LINK_LOCAL, PrefixKind::LinkLocal),
            (&JOIN, PrefixKind::Join),
            (&self.service_cidrs, PrefixKind::Service),
            (&self.cluster_subnets, PrefixKind::PodNetwork),
        ]
    }

    /// The prefixes that are known before the cluster is observed.
    pub fn foreknown(&self) -> BTreeMap<IpNet, Prefix> {
        let all = self.prefixes().into_iter().flat_map(|(nets, kind)| nets.iter().map(move |net| (net, kind)));
        all.map(|(net, kind)| (net.trunc(), Prefix { kind, node: None })).collect()
    }
}
