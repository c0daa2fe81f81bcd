//! Addresses of the stories: a few of each kind, so that flows conflict.

use egress_common::abi::{
    Addr, ClassPolicy, ClusterPrefix, Config, Family, NodeEntry, NodePlace, Owned, PolicyDestination, PolicyEntryKey,
    PortRange, PrefixKind,
};
use egress_common::decide::memory_maps::MemoryMaps;

use crate::decision::IDS;
use crate::node::ModelNode;

pub(crate) const FAMILIES: [Family; 2] = [Family::V4, Family::V6];

/// The same host in either family.
const fn at(family: Family, v4: [u8; 4], net: u16, host: u8) -> Addr {
    match family {
        Family::V4 => Addr::v4(v4),
        Family::V6 => {
            let [high, low] = net.to_be_bytes();
            Addr::v6([0xfd, 0, high, low, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, host])
        }
    }
}

pub(crate) const PODS: usize = 4;

/// Pods of this node.
pub(crate) const fn pod(family: Family, index: u8) -> Addr {
    at(family, [10, 244, 1, 10 + index], 0x2441, 10 + index)
}

/// Pods of the other node.
pub(crate) const fn remote_pod(family: Family, index: u8) -> Addr {
    at(family, [10, 244, 2, 10 + index], 0x2442, 10 + index)
}

/// Inside the pod network, on no node.
pub(crate) const fn lost_pod(family: Family) -> Addr {
    at(family, [10, 244, 77, 10], 0x2477, 10)
}

pub(crate) const fn node(family: Family) -> Addr {
    at(family, [172, 18, 0, 2], 0x1718, 2)
}

pub(crate) const fn other_node(family: Family) -> Addr {
    at(family, [172, 18, 0, 3], 0x1718, 3)
}

/// Egress IPs.
pub(crate) const fn egress(family: Family, index: u8) -> Addr {
    at(family, [172, 18, 0, 100 + index], 0x1718, 100 + index)
}

pub(crate) const fn world(family: Family, index: u8) -> Addr {
    at(family, [198, 51, 100, 10 + index], 0x5110, 10 + index)
}

pub(crate) const fn service(family: Family) -> Addr {
    at(family, [10, 96, 0, 10], 0x9600, 10)
}

/// The name of a node is its IPv4 address.
pub(crate) const SELF: Addr = node(Family::V4);
pub(crate) const OTHER: Addr = other_node(Family::V4);

/// All addresses.
pub(crate) fn any_address(family: Family) -> Vec<Addr> {
    let few = (0..2).flat_map(|index| [egress(family, index), world(family, index), remote_pod(family, index)]);
    let pods = (0..4).map(|index| pod(family, index));
    let others = [lost_pod(family), node(family), other_node(family), service(family)];
    pods.chain(few).chain(others).collect()
}

/// Prefixes: network, length (of 128 bits), index of the kind in the caller's list.
pub(crate) const fn bits(family: Family, v4: u32, v6: u32) -> u32 {
    match family {
        Family::V4 => 96 + v4,
        Family::V6 => v6,
    }
}

/// Few, so that stories exhaust them.
const NODE_PORTS: PortRange = PortRange { first: 61_000, last: 61_003 };

/// Two nodes with their networks; no pod and no policy.
pub(crate) fn node_of_stories() -> ModelNode {
    let mut config = Config::EMPTY;
    config.generation = 1;
    config.tunnel_port = 4794;
    (config.self_node, config.uplink_ifindex) = (SELF, UPLINK);
    (config.node_v4, config.node_v6) = (node(Family::V4), node(Family::V6));
    config.node_ports = NODE_PORTS;
    (config.uplink_mtu, config.pod_mtu, config.overlay_mtu) = (1500, 1400, 1450);
    config.overlay_secret = [2, 1, 2, 3, 4, 5];
    config.decisions = 1;
    config.inbound_size = 64;
    let maps = MemoryMaps::empty(config);
    maps.nat.limit(4096);
    for family in FAMILIES {
        let mut nodes = maps.nodes.borrow_mut();
        nodes.insert(node(family), NodeEntry::new(NodePlace::Own, SELF));
        nodes.insert(other_node(family), NodeEntry::new(NodePlace::Other, OTHER));
        let (wide, narrow, host) = (bits(family, 16, 24), bits(family, 24, 64), 128);
        let none = Addr::UNSPECIFIED;
        maps.prefixes.borrow_mut().extend([
            (pod(family, 0), wide, ClusterPrefix::new(PrefixKind::PodNetwork, none)),
            (pod(family, 0), narrow, ClusterPrefix::new(PrefixKind::PodSubnet, SELF)),
            (remote_pod(family, 0), narrow, ClusterPrefix::new(PrefixKind::PodSubnet, OTHER)),
            (service(family), narrow, ClusterPrefix::new(PrefixKind::Service, none)),
            (egress(family, 0), host, ClusterPrefix::new(PrefixKind::EgressIp, none)),
            (egress(family, 1), host, ClusterPrefix::new(PrefixKind::EgressIp, none)),
        ]);
        // A class for each policy: it applies to one host outside, none to another one, the next policy to all others.
        for id in IDS {
            let key = |to| PolicyDestination { set: id, to };
            maps.classes.borrow_mut().extend([
                (key(world(family, 0)), bits(family, 0, 0), ClassPolicy::new(id % 3 + 1)),
                (key(world(family, 0)), host, ClassPolicy::new(id)),
                (key(world(family, 1)), host, ClassPolicy::NONE),
            ]);
        }
    }
    ModelNode::new(maps)
}

/// The interface of every owned address, and another one.
pub(crate) const UPLINK: u32 = 11;
pub(crate) const FURTHER: u32 = 14;

/// Assigns an owned address to the policy.
pub(crate) fn own(maps: &MemoryMaps, egress_id: u32, address: Addr) {
    maps.put_owned(egress_id, Owned::new(egress_id, address, UPLINK, [2, 0, 0, 0, 1, 0x64], 1500));
}

/// The key of a policy.
pub(crate) const fn policy_key(egress_id: u32, family: Family) -> PolicyEntryKey {
    PolicyEntryKey::new(egress_id, family)
}
