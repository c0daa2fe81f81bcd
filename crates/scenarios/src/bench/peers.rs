//! What the other peers' nodes are made of. Pure text, for `ip -batch` and `nft`.
//!
//! Both have a VXLAN device between source node and gateway for the remote path, as any CNI's overlay is made: a route
//! of the pod's own leads its packets there, and a host route leads the answers back. Netfilter also translates: on the
//! pod's node by the masquerade rule that every node has, on the gateway by a rule for that pod. Connection tracking is
//! kept off the tunnel's outer packets, as careful CNIs do.

use std::net::Ipv4Addr;

use super::plan::{PacketPath, Peer};
use egress_lab::topology::addresses::{self as plan, NodeNumber};
use egress_lab::{MANAGEMENT, UPLINK};

/// The peers' own VXLAN device.
const DEVICE: &str = "bench0";
const PORT: u16 = 4789;
const TABLE: u32 = 100;

/// The tunnel's address of a node.
fn inner(node: NodeNumber) -> Ipv4Addr {
    Ipv4Addr::new(192, 0, 2, 1 + u8::try_from(node.index()).unwrap_or(0))
}

/// Whose address the pod of netfilter's remote path shows.
pub(super) const NETFILTER_REMOTE: Ipv4Addr = Ipv4Addr::new(172, 18, 0, 160);

fn tunnel(own: NodeNumber, other: NodeNumber, vni: usize) -> Vec<String> {
    vec![
        format!(
            "link add {DEVICE} type vxlan id {vni} local {} remote {} dstport {PORT} dev {UPLINK}",
            own.address().v4,
            other.address().v4
        ),
        format!("addr add {}/24 dev {DEVICE}", inner(own)),
        format!("link set {DEVICE} up"),
    ]
}

/// The node where the pods are.
pub(super) fn source(peer: Peer, own: NodeNumber, gateway: NodeNumber, remote_pod: Ipv4Addr) -> Vec<String> {
    let mut lines = tunnel(own, gateway, peer.source_node());
    lines.push(format!("rule add from {remote_pod} lookup {TABLE}"));
    lines.push(format!("rule add from {} lookup {TABLE}", many_pods_net(own, PacketPath::Remote)));
    lines.push(format!("route add default via {} dev {DEVICE} table {TABLE}", inner(gateway)));
    lines
}

/// The gateway of the remote path.
pub(super) fn gateway(peer: Peer, own: NodeNumber, source: NodeNumber, remote_pod: Ipv4Addr) -> Vec<String> {
    let mut lines = tunnel(own, source, peer.source_node());
    lines.push(format!("route add {remote_pod}/32 via {} dev {DEVICE}", inner(source)));
    lines.push(format!("route add {} via {} dev {DEVICE}", many_pods_net(source, PacketPath::Remote), inner(source)));
    if peer == Peer::Netfilter {
        lines.push(format!("addr add {NETFILTER_REMOTE}/32 dev {UPLINK}"));
    }
    lines
}

/// Beside the masquerade that every node has.
pub(super) fn netfilter_rules(source: NodeNumber, remote_pod: Ipv4Addr) -> String {
    let many = many_pods_net(source, PacketPath::Remote);
    format!(
        "table ip bench {{
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
    oifname \"{UPLINK}\" ip saddr {{ {remote_pod}, {many} }} snat to {NETFILTER_REMOTE}
  }}
}}
"
    )
}

/// What the router outside needs to answer pods without SNAT.
pub(super) fn outside(local: (Ipv4Addr, NodeNumber), remote: (Ipv4Addr, NodeNumber)) -> Vec<String> {
    let via = |net: String, node: NodeNumber| format!("route add {net} via {}", node.address().v4);
    let source = local.1;
    vec![
        via(format!("{}/32", local.0), source),
        via(many_pods_net(source, PacketPath::Local), source),
        via(format!("{}/32", remote.0), remote.1),
        via(many_pods_net(source, PacketPath::Remote), remote.1),
    ]
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

/// Nobody answers for them on the pod network.
pub(super) fn many_neighbours(node: NodeNumber) -> Vec<String> {
    let pods = PacketPath::ALL.into_iter().flat_map(|path| many_pods(node, path));
    let line = |pod| format!("neigh replace {pod} lladdr 02:00:00:00:00:99 dev {MANAGEMENT} nud permanent");
    pods.map(line).collect()
}

/// The first destination of injected packets: an unused address beyond the router outside. All of them are in [`NOBODIES`].
pub(super) const NOBODY: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 200);
const NOBODIES: &str = "198.51.100.192/26";
pub(super) const DISCARD: u16 = 9;

/// Rules for the switch: what leaves these nodes for [`NOBODIES`] is counted and dropped where it leaves.
pub(super) fn sink(ports: &[String]) -> String {
    sink_of(ports, &format!("ip daddr {NOBODIES} udp dport {DISCARD}"))
}

/// The same for the pods' end of a management port: what comes from [`NOBODIES`].
pub(super) fn sink_of_answers(device: &str) -> String {
    sink_of(&[device.to_owned()], &format!("ip saddr {NOBODIES} udp sport {DISCARD}"))
}

fn sink_of(devices: &[String], matching: &str) -> String {
    let chains = devices.iter().map(|device| {
        format!(
            "  chain {device} {{
    type filter hook ingress device \"{device}\" priority 0; policy accept;
    {matching} counter drop
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
pub(super) const SERVER: Ipv4Addr = plan::SERVER.v4;

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
