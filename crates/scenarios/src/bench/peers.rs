//! What the other peers' nodes are made of. Pure text, for `ip -batch` and `nft`.
//!
//! Both have a VXLAN device between source node and gateway for the remote path, as any CNI's overlay is made: a route
//! of the pod's own leads its packets there, and a host route leads the answers back. Netfilter also translates: on the
//! pod's node by the masquerade rule that every node has, on the gateway by a rule for that pod. Connection tracking is
//! kept off the tunnel's outer packets, as careful CNIs do.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use egress_common::abi::Family;

use super::plan::{PacketPath, Peer, of_family};
use egress_lab::topology::addresses::{self as plan, Dual, NodeNumber};
use egress_lab::{MANAGEMENT, UPLINK};

/// The peers' own VXLAN device.
const DEVICE: &str = "bench0";
const PORT: u16 = 4789;
const TABLE: u32 = 100;

/// The tunnel's addresses of a node.
fn inner(node: NodeNumber) -> Dual {
    let number = 1 + u8::try_from(node.index()).unwrap_or(0);
    Dual { v4: Ipv4Addr::new(192, 0, 2, number), v6: Ipv6Addr::new(0x2001, 0xdb8, 0x192, 0, 0, 0, 0, number.into()) }
}

/// An address of the nodes' network that no node has.
pub(super) const fn on_lan(end: u8) -> Dual {
    Dual { v4: Ipv4Addr::new(172, 18, 0, end), v6: Ipv6Addr::new(0xfd00, 0x172, 0x18, 0, 0, 0, 0x1, end as u16) }
}

/// Whose address the pods of netfilter's remote path show.
pub(super) const NETFILTER_REMOTE: Dual = on_lan(160);

fn tunnel(family: Family, own: NodeNumber, other: NodeNumber, vni: usize) -> Vec<String> {
    match family {
        Family::V4 => vec![
            format!(
                "link add {DEVICE} type vxlan id {vni} local {} remote {} dstport {PORT} dev {UPLINK}",
                own.address().v4,
                other.address().v4
            ),
            format!("addr add {}/24 dev {DEVICE}", inner(own).v4),
            format!("link set {DEVICE} up"),
        ],
        Family::V6 => vec![format!("addr add {}/64 dev {DEVICE} nodad", inner(own).v6)],
    }
}

/// The node where the pods are.
pub(super) fn source(
    peer: Peer,
    family: Family,
    own: NodeNumber,
    gateway: NodeNumber,
    remote_pod: IpAddr,
) -> Vec<String> {
    let mut lines = tunnel(family, own, gateway, peer.source_node());
    lines.push(format!("rule add from {remote_pod} lookup {TABLE}"));
    if family == Family::V4 {
        lines.push(format!("rule add from {} lookup {TABLE}", many_pods_net(own, PacketPath::Remote)));
    }
    let gateway = of_family(inner(gateway), family);
    lines.push(format!("route add default via {gateway} dev {DEVICE} table {TABLE}"));
    lines
}

/// The gateway of the remote path.
pub(super) fn gateway(
    peer: Peer,
    family: Family,
    own: NodeNumber,
    source: NodeNumber,
    remote_pod: IpAddr,
) -> Vec<String> {
    let mut lines = tunnel(family, own, source, peer.source_node());
    let via = of_family(inner(source), family);
    lines.push(format!("route add {remote_pod} via {via} dev {DEVICE}"));
    if family == Family::V4 {
        lines.push(format!("route add {} via {via} dev {DEVICE}", many_pods_net(source, PacketPath::Remote)));
    }
    if peer == Peer::Netfilter {
        lines.push(match family {
            Family::V4 => format!("addr add {}/32 dev {UPLINK}", NETFILTER_REMOTE.v4),
            Family::V6 => format!("addr add {}/128 dev {UPLINK} nodad", NETFILTER_REMOTE.v6),
        });
    }
    lines
}

/// Beside the masquerade that every node has.
pub(super) fn netfilter_rules(family: Family, source: NodeNumber, remote_pod: IpAddr) -> String {
    let (ip, pods) = match family {
        Family::V4 => ("ip", format!("{{ {remote_pod}, {} }}", many_pods_net(source, PacketPath::Remote))),
        Family::V6 => ("ip6", remote_pod.to_string()),
    };
    let address = of_family(NETFILTER_REMOTE, family);
    format!(
        "table {ip} bench {{
  chain untracked {{
    type filter hook prerouting priority raw; policy accept;
    udp dport {PORT} notrack
  }}
  chain untracked_out {{
    type filter hook output priority raw; policy accept;
    udp dport {PORT} notrack
  }}
  chain postrouting {{
    type nat hook postrouting priority srcnat; policy accept;
    oifname \"{UPLINK}\" {ip} saddr {pods} snat to {address}
  }}
}}
"
    )
}

/// What the router outside needs to answer pods without SNAT.
pub(super) fn outside(family: Family, local: (IpAddr, NodeNumber), remote: (IpAddr, NodeNumber)) -> Vec<String> {
    let via = |net: String, node: NodeNumber| format!("route add {net} via {}", of_family(node.address(), family));
    let mut lines = vec![via(local.0.to_string(), local.1), via(remote.0.to_string(), remote.1)];
    if family == Family::V4 {
        let source = local.1;
        lines.push(via(many_pods_net(source, PacketPath::Local), source));
        lines.push(via(many_pods_net(source, PacketPath::Remote), remote.1));
    }
    lines
}

/// How many pods a path has beside its own one. They have no namespace: what is sent for them is written by hand, and what
/// is sent to them is counted and dropped before it would reach them.
const MANY_PODS: u8 = 32;

/// Their first address on a node: a multiple of their number, so that one prefix has them all.
fn first_of_many(node: NodeNumber, path: PacketPath) -> Ipv4Addr {
    let [a, b, c, _] = node.router().v4.octets();
    let first = match path {
        PacketPath::Local => MANY_PODS,
        PacketPath::Remote => 2 * MANY_PODS,
    };
    Ipv4Addr::new(a, b, c, first)
}

fn many_pods_net(node: NodeNumber, path: PacketPath) -> String {
    format!("{}/{}", first_of_many(node, path), 32 - MANY_PODS.ilog2())
}

pub(super) fn many_pods(node: NodeNumber, path: PacketPath) -> Vec<Ipv4Addr> {
    let first = first_of_many(node, path).to_bits();
    (0..u32::from(MANY_PODS)).map(|place| Ipv4Addr::from_bits(first + place)).collect()
}

/// No host answers for them on the pod network.
pub(super) fn many_neighbours(node: NodeNumber) -> Vec<String> {
    let pods = PacketPath::ALL.into_iter().flat_map(|path| many_pods(node, path));
    let line = |pod| format!("neigh replace {pod} lladdr 02:00:00:00:00:99 dev {MANAGEMENT} nud permanent");
    pods.map(line).collect()
}

/// The first destination of injected packets: an unused address beyond the router outside. All of them are in [`NOBODIES`].
pub(super) const UNANSWERED: Dual =
    Dual { v4: Ipv4Addr::new(198, 51, 100, 200), v6: Ipv6Addr::new(0x2001, 0xdb8, 0x100, 0, 0, 0, 0xd, 0) };
const NOBODIES: (&str, &str) = ("198.51.100.192/26", "2001:db8:100::d:0/112");
pub(super) const DISCARD: u16 = 9;

/// Rules for the switch: what leaves these nodes for [`NOBODIES`] is counted and dropped where it leaves.
pub(super) fn sink(ports: &[String]) -> String {
    sink_of(ports, "daddr", "dport")
}

/// The same for the pods' end of a management port: what comes from [`NOBODIES`].
pub(super) fn sink_of_answers(device: &str) -> String {
    sink_of(&[device.to_owned()], "saddr", "sport")
}

fn sink_of(devices: &[String], address: &str, port: &str) -> String {
    let (v4, v6) = NOBODIES;
    let chains = devices.iter().map(|device| {
        format!(
            "  chain {device} {{
    type filter hook ingress device \"{device}\" priority 0; policy accept;
    ip {address} {v4} udp {port} {DISCARD} counter drop
    ip6 {address} {v6} udp {port} {DISCARD} counter drop
  }}
"
        )
    });
    format!("table netdev bench {{\n{}}}\n", chains.collect::<String>())
}

/// Behind which outside NIC the injected packets end.
pub(super) fn exit_of(peer: Peer, path: PacketPath) -> usize {
    match path {
        PacketPath::Local => peer.source_node(),
        PacketPath::Remote => peer.gateway_node(),
    }
}

/// The server outside.
pub(super) const SERVER: Dual = plan::SERVER;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_prefix_has_all_pods_of_a_path() {
        let node = NodeNumber::new(3).expect("three is a node");
        assert_eq!(many_pods_net(node, PacketPath::Local), "10.244.3.32/27");
        assert_eq!(many_pods_net(node, PacketPath::Remote), "10.244.3.64/27");
        let pods = many_pods(node, PacketPath::Remote);
        assert_eq!((pods[0], pods[31]), (Ipv4Addr::new(10, 244, 3, 64), Ipv4Addr::new(10, 244, 3, 95)));
    }
}
