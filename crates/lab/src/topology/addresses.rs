//! The lab's address plan: one place for all addresses, regular enough to read a packet capture by heart.
//!
//! | place | IPv4 | IPv6 |
//! |---|---|---|
//! | lan (the nodes' network) | 172.18.0.0/16, node i is .(1+i), `ext` is .1 | fd00:172:18::/64, same ends |
//! | behind `ext` | 198.51.100.0/24, the server is .10 | 2001:db8:100::/64, the server is ::10 |
//! | second network | 10.10.10.0/24, node i is .(1+i), `ext2` is .1, `ext2b` is .254 | fd00:10:10:10::/64, same ends |
//! | the same renumbered | 10.20.20.0/24, node i is .(1+i), `ext2` is .1 | fd00:10:20:20::/64, same ends |
//! | behind `ext2` | 203.0.113.0/24, the server is .10 | 2001:db8:203::/64 |
//! | `ext` and `ext2` | 100.87.0.1 and .2 | fd98::1 and ::2 |
//! | `ext2b` and its link to the server | 100.86.0.1 and .2 | fd99::1 and ::2 |
//! | pods of node i | 10.244.i.0/24: router .1, node (mp0) .2, pods from .10 | fd00:10:244:i::/64, same ends |
//! | between the routers | 100.88.0.i/16 | fd97::i/64 |
//! | services | 10.96.0.0/16 | fd00:10:96::/112 |
//!
//! Everything here is pure arithmetic on the node's number (from 1) and the pod's place on its node (from 0).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anyhow::{Context, Result, ensure};

use super::host_config::Cni;

/// More nodes than this would grow into the range that stories and tests take egress IPs from (172.18.0.100 and up).
pub const MAX_NODES: usize = 90;
pub const MAX_PODS_PER_NODE: usize = 100;

pub const LAN_V4: &str = "172.18.0.0/16";
pub const LAN_V6: &str = "fd00:172:18::/64";
pub const BEHIND_V4: &str = "198.51.100.0/24";
pub const BEHIND_V6: &str = "2001:db8:100::/64";
pub const LAN2_V4: &str = "10.10.10.0/24";
pub const LAN2_V6: &str = "fd00:10:10:10::/64";
pub const RENUMBERED_V4: &str = "10.20.20.0/24";
pub const RENUMBERED_V6: &str = "fd00:10:20:20::/64";
pub const BEHIND2_V4: &str = "203.0.113.0/24";
pub const BEHIND2_V6: &str = "2001:db8:203::/64";
pub const CLUSTER_V4: &str = "10.244.0.0/16";
pub const CLUSTER_V6: &str = "fd00:10:244::/48";
pub const SERVICES_V4: &str = "10.96.0.0/16";
pub const SERVICES_V6: &str = "fd00:10:96::/112";

/// The pods' and mp0's MTU: the lan's 1500 less the overlay's headers.
pub const POD_MTU: u32 = 1400;
/// Where the NodePort of the lab's service listens on every node that has the service proxy.
pub const NODE_PORT: u16 = 30080;
/// HTTP of the lab's servers.
pub const HTTP_PORT: u16 = 8080;
/// Their echo, for TCP and for UDP.
pub const ECHO_PORT: u16 = 8081;

/// An IPv4 and an IPv6 address of one owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Dual {
    pub v4: Ipv4Addr,
    pub v6: Ipv6Addr,
}

impl Dual {
    pub const fn new(v4: [u8; 4], v6: [u16; 8]) -> Self {
        let [a, b, c, d] = v4;
        let [s, t, u, v, w, x, y, z] = v6;
        Self { v4: Ipv4Addr::new(a, b, c, d), v6: Ipv6Addr::new(s, t, u, v, w, x, y, z) }
    }

    pub fn both(self) -> [IpAddr; 2] {
        [IpAddr::V4(self.v4), IpAddr::V6(self.v6)]
    }

    /// The address of the same family as `peer`.
    pub fn towards(self, peer: IpAddr) -> IpAddr {
        match peer {
            IpAddr::V4(_) => IpAddr::V4(self.v4),
            IpAddr::V6(_) => IpAddr::V6(self.v6),
        }
    }

    pub fn is(self, address: IpAddr) -> bool {
        self.towards(address) == address
    }
}

/// The nodes' default gateway.
pub const EXT: Dual = Dual::new([172, 18, 0, 1], [0xfd00, 0x172, 0x18, 0, 0, 0, 0, 1]);
/// `ext` as the server's gateway.
pub const EXT_BEHIND: Dual = Dual::new([198, 51, 100, 1], [0x2001, 0xdb8, 0x100, 0, 0, 0, 0, 1]);
/// The server outside the cluster.
pub const SERVER: Dual = Dual::new([198, 51, 100, 10], [0x2001, 0xdb8, 0x100, 0, 0, 0, 0, 0x10]);
/// The gateway of the second network.
pub const EXT2: Dual = Dual::new([10, 10, 10, 1], [0xfd00, 0x10, 0x10, 0x10, 0, 0, 0, 1]);
/// Its other gateway, for routes with two next hops.
pub const EXT2B: Dual = Dual::new([10, 10, 10, 254], [0xfd00, 0x10, 0x10, 0x10, 0, 0, 0, 0xfe]);
/// `ext2` among the addresses of [`NodeNumber::renumbered_address`].
pub const EXT2_RENUMBERED: Dual = Dual::new([10, 20, 20, 1], [0xfd00, 0x10, 0x20, 0x20, 0, 0, 0, 1]);
pub const EXT2_BEHIND: Dual = Dual::new([203, 0, 113, 1], [0x2001, 0xdb8, 0x203, 0, 0, 0, 0, 1]);
/// The server behind the second network.
pub const SERVER2: Dual = Dual::new([203, 0, 113, 10], [0x2001, 0xdb8, 0x203, 0, 0, 0, 0, 0x10]);
/// The link between the routers of both networks.
pub const EXT_TO_EXT2: Dual = Dual::new([100, 87, 0, 1], [0xfd98, 0, 0, 0, 0, 0, 0, 1]);
pub const EXT2_TO_EXT: Dual = Dual::new([100, 87, 0, 2], [0xfd98, 0, 0, 0, 0, 0, 0, 2]);
/// The link between `ext2b` and the server.
pub const EXT2B_BEHIND: Dual = Dual::new([100, 86, 0, 1], [0xfd99, 0, 0, 0, 0, 0, 0, 1]);
pub const SERVER2_TO_EXT2B: Dual = Dual::new([100, 86, 0, 2], [0xfd99, 0, 0, 0, 0, 0, 0, 2]);

/// Egress IPs of the second network, by number.
pub fn second_egress_ip(number: u8) -> Dual {
    let end = number.saturating_add(100);
    Dual::new([10, 10, 10, end], [0xfd00, 0x10, 0x10, 0x10, 0, 0, 0, 0x100 + u16::from(number)])
}

/// More addresses of the server outside, by number: callers that each use their own are distinguished by the
/// destination of what they send, whatever its source.
pub fn server_address(number: u8) -> Dual {
    let end = number.saturating_add(100);
    Dual::new([198, 51, 100, end], [0x2001, 0xdb8, 0x100, 0, 0, 0, 0, 0x100 + u16::from(end)])
}

/// The ClusterIP of the lab's service, whose backends are the pods that the builder names.
pub const SERVICE: Dual = Dual::new([10, 96, 0, 80], [0xfd00, 0x10, 0x96, 0, 0, 0, 0, 0x80]);

/// Addresses of load balancers on the nodes' network, by number.
pub fn load_balancer_ip(number: u8) -> Dual {
    let end = number.saturating_add(200);
    Dual::new([172, 18, 0, end], [0xfd00, 0x172, 0x18, 0, 0, 0, 0, 0x200 + u16::from(number)])
}

/// The ClusterIP of the same Service.
pub fn load_balancer_cluster_ip(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 96, 1, number)
}

/// The number of a node: 1 and up, as in its addresses and its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeNumber(u8);

impl NodeNumber {
    pub fn new(number: usize) -> Result<Self> {
        ensure!((1..=MAX_NODES).contains(&number), "a lab has nodes 1 to {MAX_NODES}, not {number}");
        Ok(Self(u8::try_from(number)?))
    }

    /// By its name.
    pub fn of(name: &str) -> Result<Self> {
        let number = name.strip_prefix("node").and_then(|number| number.parse().ok());
        Self::new(number.with_context(|| format!("{name:?} is no node of the lab"))?)
    }

    pub fn index(self) -> usize {
        usize::from(self.0) - 1
    }

    pub fn name(self) -> String {
        format!("node{}", self.0)
    }

    /// The node's address on the lan (`breth0`).
    pub fn address(self) -> Dual {
        let end = self.0 + 1;
        Dual::new([172, 18, 0, end], [0xfd00, 0x172, 0x18, 0, 0, 0, 0, u16::from(end)])
    }

    /// The node's address on the second network.
    pub fn second_address(self) -> Dual {
        let end = self.0 + 1;
        Dual::new([10, 10, 10, end], [0xfd00, 0x10, 0x10, 0x10, 0, 0, 0, u16::from(end)])
    }

    /// The node's address on the second network after that was renumbered.
    pub fn renumbered_address(self) -> Dual {
        let end = self.0 + 1;
        Dual::new([10, 20, 20, end], [0xfd00, 0x10, 0x20, 0x20, 0, 0, 0, u16::from(end)])
    }

    fn in_pod_subnet(self, end: u8) -> Dual {
        Dual::new([10, 244, self.0, end], [0xfd00, 0x10, 0x244, u16::from(self.0), 0, 0, 0, u16::from(end)])
    }

    /// The pod network's router.
    pub fn router(self) -> Dual {
        self.in_pod_subnet(1)
    }

    /// The node on its pod network: `ovn-k8s-mp0`, or the bridge.
    pub fn management(self, cni: Cni) -> Dual {
        match cni {
            Cni::Routed | Cni::Ovn => self.in_pod_subnet(2),
            Cni::Bridge => self.in_pod_subnet(1),
        }
    }

    pub fn pod(self, place: usize, cni: Cni) -> Result<Dual> {
        ensure!(place < MAX_PODS_PER_NODE, "a node of the lab has at most {MAX_PODS_PER_NODE} pods");
        let first = match cni {
            Cni::Routed | Cni::Ovn => 10,
            Cni::Bridge => 2,
        };
        Ok(self.in_pod_subnet(first + u8::try_from(place)?))
    }

    pub fn pod_subnet_v4(self) -> String {
        format!("10.244.{}.0/24", self.0)
    }

    pub fn pod_subnet_v6(self) -> String {
        format!("{}/64", Ipv6Addr::new(0xfd00, 0x10, 0x244, u16::from(self.0), 0, 0, 0, 0))
    }

    /// The router's address towards the other routers.
    pub fn transit(self) -> Dual {
        Dual::new([100, 88, 0, self.0], [0xfd97, 0, 0, 0, 0, 0, 0, u16::from(self.0)])
    }
}

/// Pods, routers and mp0 of any node.
pub fn is_pod_network(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => v4.octets()[..2] == [10, 244],
        IpAddr::V6(v6) => v6.segments()[..3] == [0xfd00, 0x10, 0x244],
    }
}

/// The `ovn-k8s-mp0` of any node.
pub fn is_management_port(address: IpAddr) -> bool {
    is_pod_network(address)
        && match address {
            IpAddr::V4(v4) => v4.octets()[3] == 2,
            IpAddr::V6(v6) => v6.segments()[4..] == [0, 0, 0, 2],
        }
}

/// The nodes' network.
pub fn is_lan(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => v4.octets()[..2] == [172, 18],
        IpAddr::V6(v6) => v6.segments()[..4] == [0xfd00, 0x172, 0x18, 0],
    }
}

/// The second network.
pub fn is_second_lan(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => v4.octets()[..3] == [10, 10, 10],
        IpAddr::V6(v6) => v6.segments()[..4] == [0xfd00, 0x10, 0x10, 0x10],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_plan_reads_as_documented() {
        let node = NodeNumber::new(3).expect("three is a node");
        assert_eq!(node.address().v4.to_string(), "172.18.0.4");
        assert_eq!(node.address().v6.to_string(), "fd00:172:18::4");
        assert_eq!(node.management(Cni::Routed).v4.to_string(), "10.244.3.2");
        assert_eq!(node.pod(0, Cni::Routed).expect("first pod").v6.to_string(), "fd00:10:244:3::a");
        assert_eq!(node.management(Cni::Bridge).v4.to_string(), "10.244.3.1");
        assert_eq!(node.pod(0, Cni::Bridge).expect("first pod").v4.to_string(), "10.244.3.2");
        assert_eq!(node.pod_subnet_v6(), "fd00:10:244:3::/64");
        assert_eq!(node.renumbered_address().v6.to_string(), "fd00:10:20:20::4");
        assert_eq!(second_egress_ip(1).v4.to_string(), "10.10.10.101");
        assert_eq!(second_egress_ip(1).v6.to_string(), "fd00:10:10:10::101");
        assert!(second_egress_ip(1).both().into_iter().all(is_second_lan));
        assert!(!node.renumbered_address().both().into_iter().any(is_second_lan));
    }

    #[test]
    fn numbers_outside_the_plan_are_refused() {
        assert!(NodeNumber::new(0).is_err());
        assert!(NodeNumber::new(MAX_NODES + 1).is_err());
        let node = NodeNumber::new(1).expect("one is a node");
        assert!(node.pod(MAX_PODS_PER_NODE, Cni::Routed).is_err());
    }
}
