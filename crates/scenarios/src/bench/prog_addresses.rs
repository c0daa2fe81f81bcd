//! The addresses of the node for the programs alone, once for each family. Tunnel endpoints are IPv4 in both.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use egress_common::abi::{Cover, Family, PrefixKind};

use super::prog_run::{FURTHER, UPLINK};

pub(super) const NODE: Ipv4Addr = Ipv4Addr::new(172, 18, 0, 2);
pub(super) const OTHER_NODE: Ipv4Addr = Ipv4Addr::new(172, 18, 0, 3);

/// An egress ID and its address.
pub(super) type NumberedEgressIp = (u32, IpAddr);

#[derive(Clone, Copy, Debug)]
pub(super) struct ProgAddresses {
    pub(super) family: Family,
    /// The interface of the addresses that are served here.
    pub(super) interface: u32,
    /// Whether the pods' policies depend on the destination.
    pub(super) by_destination: bool,
    /// Whether the policies have a bandwidth limit, which is far from what the programs can send.
    pub(super) limited: bool,
    /// The node's own address.
    pub(super) node: IpAddr,
    /// Pods of this node: those of the local path first, those of the remote path from the second address on. The numbers of
    /// flows go into the last 32 bits, which are zero in IPv6.
    pub(super) local_pods: IpAddr,
    pub(super) remote_pods: IpAddr,
    /// Pods of the other node.
    pub(super) foreign_pods: IpAddr,
    pub(super) world: IpAddr,
    /// Objects: served here for pods here, served by the other node, served here for the other node's pods.
    pub(super) local: NumberedEgressIp,
    pub(super) away: NumberedEgressIp,
    pub(super) foreign: NumberedEgressIp,
    /// Prefix lengths: of this node's pods, of the other node's, of an address.
    lengths: (u8, u8, u8),
    /// What an agent writes for any cluster.
    prefixes: [(IpAddr, u8, PrefixKind); 5],
}

const fn v4(a: u8, b: u8, c: u8, d: u8) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(a, b, c, d))
}

const fn v6(a: u16, b: u16, c: u16, last: u16) -> IpAddr {
    IpAddr::V6(Ipv6Addr::new(a, b, c, 0, 0, 0, 0, last))
}

pub(super) const V4: ProgAddresses = ProgAddresses {
    family: Family::V4,
    interface: UPLINK,
    by_destination: false,
    limited: false,
    node: IpAddr::V4(NODE),
    local_pods: v4(10, 128, 0, 0),
    remote_pods: v4(10, 129, 0, 0),
    foreign_pods: v4(10, 130, 0, 0),
    world: v4(198, 51, 100, 0),
    local: (7, v4(172, 18, 0, 100)),
    away: (8, v4(172, 18, 0, 101)),
    foreign: (9, v4(172, 18, 0, 102)),
    lengths: (15, 15, 32),
    prefixes: [
        (v4(10, 96, 0, 0), 16, PrefixKind::Service),
        (v4(100, 64, 0, 0), 16, PrefixKind::Join),
        (v4(169, 254, 0, 0), 16, PrefixKind::LinkLocal),
        (v4(224, 0, 0, 0), 4, PrefixKind::Multicast),
        (v4(10, 128, 0, 0), 9, PrefixKind::PodNetwork),
    ],
};

pub(super) const V6: ProgAddresses = ProgAddresses {
    family: Family::V6,
    interface: UPLINK,
    by_destination: false,
    limited: false,
    node: v6(0xfd00, 0x172, 0x18, 2),
    local_pods: v6(0xfd00, 0x10, 0x128, 0),
    remote_pods: v6(0xfd00, 0x10, 0x129, 0),
    foreign_pods: v6(0xfd00, 0x10, 0x130, 0),
    world: v6(0x2001, 0xdb8, 0x100, 0),
    local: (7, v6(0xfd00, 0x172, 0x18, 0x100)),
    away: (8, v6(0xfd00, 0x172, 0x18, 0x101)),
    foreign: (9, v6(0xfd00, 0x172, 0x18, 0x102)),
    lengths: (47, 47, 128),
    prefixes: [
        (v6(0xfd00, 0x10, 0x96, 0), 112, PrefixKind::Service),
        (v6(0xfd98, 0, 0, 0), 64, PrefixKind::Join),
        (v6(0xfe80, 0, 0, 0), 10, PrefixKind::LinkLocal),
        (v6(0xff00, 0, 0, 0), 8, PrefixKind::Multicast),
        (v6(0xfd00, 0x10, 0, 0), 32, PrefixKind::PodNetwork),
    ],
};

impl ProgAddresses {
    /// The same addresses, served on the further interface.
    pub(super) const fn on_further(self) -> Self {
        Self { interface: FURTHER, ..self }
    }

    /// The same pods, each in a class whose policies have destinations.
    pub(super) const fn with_destinations(self) -> Self {
        Self { by_destination: true, ..self }
    }

    /// The same pods, whose policies have a limit.
    pub(super) const fn with_limit(self) -> Self {
        Self { limited: true, ..self }
    }

    /// What an agent writes for a cluster of two nodes: network, length, kind, the node of a pod subnet.
    pub(super) fn prefixes(&self) -> Vec<(IpAddr, u8, PrefixKind, Option<Ipv4Addr>)> {
        let (own, other, address) = self.lengths;
        let mut prefixes = vec![
            (self.local_pods, own, PrefixKind::PodSubnet, Some(NODE)),
            (self.foreign_pods, other, PrefixKind::PodSubnet, Some(OTHER_NODE)),
        ];
        prefixes.extend(self.prefixes.map(|(net, length, kind)| (net, length, kind, None)));
        let egress_ips = [self.local, self.away, self.foreign];
        prefixes.extend(egress_ips.map(|(_, egress_ip)| (egress_ip, address, PrefixKind::EgressIp, None)));
        prefixes
    }

    /// The prefixes that contain all pods of this node.
    pub(super) fn covers(&self) -> (Cover<4>, Cover<8>) {
        let bits = usize::from(self.lengths.0);
        match self.local_pods {
            IpAddr::V4(pods) => (Cover::NONE.widened(pods.octets(), bits), Cover::NONE),
            IpAddr::V6(pods) => {
                let [a, b, c, d, e, f, g, h, ..] = pods.octets();
                (Cover::NONE, Cover::NONE.widened([a, b, c, d, e, f, g, h], bits))
            }
        }
    }
}

/// The address so many places after this one.
pub(super) const fn after(base: IpAddr, place: u32) -> IpAddr {
    match base {
        IpAddr::V4(base) => IpAddr::V4(Ipv4Addr::from_bits(base.to_bits() + place)),
        IpAddr::V6(base) => IpAddr::V6(Ipv6Addr::from_bits(base.to_bits() + place as u128)),
    }
}

/// The last 32 bits.
pub(super) fn last_bits(address: IpAddr) -> u32 {
    match address {
        IpAddr::V4(address) => address.to_bits(),
        IpAddr::V6(address) => {
            let [.., a, b, c, d] = address.octets();
            u32::from_be_bytes([a, b, c, d])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_of_this_node_has_the_pods_of_both_paths() {
        let (v4, v6) = (V4.covers().0, V6.covers().1);
        assert_eq!((v4.net, v4.mask), ([10, 128, 0, 0], [255, 254, 0, 0]));
        // 0x128 and 0x129 differ in the last of 48 bits.
        assert_eq!(v6.net, [0xfd, 0, 0, 0x10, 1, 0x28, 0, 0]);
        assert_eq!(v6.mask, [255, 255, 255, 255, 255, 0xfe, 0, 0]);
    }
}
