//! Addresses for the tests of the decisions: one set per family, so that both families share test bodies.

use super::memory_maps::{MemoryMaps, addr};
use crate::abi::*;

/// Egress ID of the policy that selects [`Cast::pod`].
pub(crate) const ID: u32 = 7;

/// The interface of every owned address, and another one.
pub(crate) const UPLINK: u32 = 2;
pub(crate) const FURTHER: u32 = 3;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Cast {
    pub(crate) family: Family,
    /// This node, its management port, and another node likewise.
    pub(crate) node: &'static str,
    pub(crate) mgmt: &'static str,
    pub(crate) other_node: &'static str,
    pub(crate) other_mgmt: &'static str,
    /// Pods of this node: selected, known and unknown.
    pub(crate) pod: &'static str,
    pub(crate) known_pod: &'static str,
    pub(crate) unknown_pod: &'static str,
    /// Pods elsewhere: of the other node, and of none.
    pub(crate) remote_pod: &'static str,
    pub(crate) lost_pod: &'static str,
    pub(crate) service: &'static str,
    pub(crate) join: &'static str,
    pub(crate) link_local: &'static str,
    pub(crate) multicast: &'static str,
    pub(crate) excluded: &'static str,
    pub(crate) world: &'static str,
    /// Egress IPs: of [`ID`], and of another policy.
    pub(crate) egress: &'static str,
    pub(crate) foreign_egress: &'static str,
}

pub(crate) const V4: Cast = Cast {
    family: Family::V4,
    node: "172.18.0.2",
    mgmt: "10.244.1.2",
    other_node: "172.18.0.3",
    other_mgmt: "10.244.2.2",
    pod: "10.244.1.10",
    known_pod: "10.244.1.11",
    unknown_pod: "10.244.1.12",
    remote_pod: "10.244.2.10",
    lost_pod: "10.244.77.10",
    service: "10.96.0.10",
    join: "100.64.0.5",
    link_local: "169.254.169.254",
    multicast: "224.0.0.251",
    excluded: "203.0.113.9",
    world: "198.51.100.10",
    egress: "172.18.0.100",
    foreign_egress: "172.18.0.101",
};

pub(crate) const V6: Cast = Cast {
    family: Family::V6,
    node: "fd00:172:18::2",
    mgmt: "fd00:10:244:1::2",
    other_node: "fd00:172:18::3",
    other_mgmt: "fd00:10:244:2::2",
    pod: "fd00:10:244:1::10",
    known_pod: "fd00:10:244:1::11",
    unknown_pod: "fd00:10:244:1::12",
    remote_pod: "fd00:10:244:2::10",
    lost_pod: "fd00:10:244:77::10",
    service: "fd00:10:96::10",
    join: "fd98::5",
    link_local: "fe80::1",
    multicast: "ff02::fb",
    excluded: "2001:db8:1::9",
    world: "2001:db8::10",
    egress: "fd00:172:18::100",
    foreign_egress: "fd00:172:18::101",
};

/// The name of the node is one for both families.
pub(crate) const NODE: &str = V4.node;
pub(crate) const OTHER_NODE: &str = V4.other_node;

/// Runs a test body for both families, each on maps of its own.
pub(crate) fn both(body: impl Fn(&Cast, &MemoryMaps)) {
    for cast in [V4, V6] {
        body(&cast, &staged(&cast));
    }
}

/// The maps of a node with the endpoints of `cast`: [`Cast::pod`] is selected by [`ID`], whose address is served here.
pub(crate) fn staged(cast: &Cast) -> MemoryMaps {
    let maps = MemoryMaps::new();
    maps.add_pod(cast.pod, PodEntry::selected(ID, 0));
    maps.add_pod(cast.known_pod, PodEntry::known());
    let host = if cast.family == Family::V4 { 32 } else { 128 };
    for address in [cast.egress, cast.foreign_egress] {
        maps.add_prefix(address, host, PrefixKind::EgressIp, None);
    }
    maps.add_prefix(cast.excluded, host, PrefixKind::Excluded, None);
    maps.own(ID, cast.egress);
    maps.set_policy(ID, WhenEmpty::Drop, &[PolicySlot::here(addr(cast.egress))]);
    maps
}

/// Nodes and prefixes of the cluster, for both families.
pub(crate) fn settle(maps: &MemoryMaps) {
    for cast in [V4, V6] {
        for at in [cast.node, cast.mgmt] {
            maps.add_node(at, NodePlace::Own, NODE);
        }
        for at in [cast.other_node, cast.other_mgmt] {
            maps.add_node(at, NodePlace::Other, OTHER_NODE);
        }
        let (wide, narrow) = if cast.family == Family::V4 { (16, 24) } else { (48, 64) };
        maps.add_prefix(cast.pod, wide, PrefixKind::PodNetwork, None);
        maps.add_prefix(cast.pod, narrow, PrefixKind::PodSubnet, Some(NODE));
        maps.add_prefix(cast.remote_pod, narrow, PrefixKind::PodSubnet, Some(OTHER_NODE));
        maps.add_prefix(cast.service, narrow, PrefixKind::Service, None);
        maps.add_prefix(cast.join, narrow, PrefixKind::Join, None);
        maps.add_prefix(cast.link_local, narrow, PrefixKind::LinkLocal, None);
        maps.add_prefix(cast.multicast, narrow, PrefixKind::Multicast, None);
    }
}
