//! Maps `cluster` (prefix -> kind) and `nodes` (address of any node -> node).

use super::{Addr, abi};

/// Key of `cluster`, the layout that `BPF_MAP_TYPE_LPM_TRIE` asks for. IPv4 prefixes lie below `::ffff:0:0/96`, so their
/// length is 96 more than usual.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct ClusterKey {
    /// In host order, as the kernel reads it.
    pub prefix_len: u32,
    pub addr: Addr,
}
abi!(ClusterKey, 20);

/// The kind of a prefix of the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum PrefixKind {
    /// Pod subnet of the node named by [`ClusterPrefix::node`].
    PodSubnet = 1,
    /// Service range, or a service's external or load-balancer address.
    Service = 2,
    /// OVN-Kubernetes' join subnets.
    Join = 3,
    LinkLocal = 4,
    Multicast = 5,
    /// Excluded by configuration.
    Excluded = 6,
    /// An egress IP of any egress policy.
    EgressIp = 7,
    /// The whole pod network where no node's subnet is more specific.
    PodNetwork = 8,
}

/// Value of `cluster`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct ClusterPrefix {
    kind: u32,
    /// Tunnel endpoint of the node whose pod subnet this is; unspecified for other kinds.
    pub node: Addr,
}
abi!(ClusterPrefix, 20);

impl ClusterPrefix {
    pub const fn new(kind: PrefixKind, node: Addr) -> Self {
        Self { kind: kind as u32, node }
    }

    #[cfg(test)]
    pub(crate) const fn of_another_version(self) -> Self {
        Self { kind: 99, ..self }
    }

    /// `None` when another version wrote it.
    #[inline(always)]
    pub const fn kind(&self) -> Option<PrefixKind> {
        Some(match self.kind {
            1 => PrefixKind::PodSubnet,
            2 => PrefixKind::Service,
            3 => PrefixKind::Join,
            4 => PrefixKind::LinkLocal,
            5 => PrefixKind::Multicast,
            6 => PrefixKind::Excluded,
            7 => PrefixKind::EgressIp,
            8 => PrefixKind::PodNetwork,
            _ => return None,
        })
    }
}

/// The node of an address, seen from the node that holds the map.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum NodePlace {
    Own = 1,
    Other = 2,
}

/// Value of `nodes`; the key is an [`Addr`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct NodeEntry {
    place: u32,
    /// Tunnel endpoint of the node that has this address: it names the node.
    pub node: Addr,
}
abi!(NodeEntry, 20);

impl NodeEntry {
    pub const fn new(place: NodePlace, node: Addr) -> Self {
        Self { place: place as u32, node }
    }

    #[cfg(test)]
    pub(crate) const fn of_another_version(self) -> Self {
        Self { place: 99, ..self }
    }

    #[inline(always)]
    pub const fn place(&self) -> NodePlace {
        // Anything but `Own` is treated as another node: its packets are then marked, not trusted.
        if self.place == NodePlace::Own as u32 { NodePlace::Own } else { NodePlace::Other }
    }
}
