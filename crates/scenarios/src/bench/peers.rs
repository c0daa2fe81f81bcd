//! What the other peers' nodes are made of. Pure text, for `ip -batch` and `nft`.
//!
//! Both have a VXLAN device between source node and gateway for the remote path, as any CNI's overlay is made: a route
//! of the pod's own leads its packets there, and a host route leads the answers back. Netfilter also translates: on the
//! pod's node by the masquerade rule that every node has, on the gateway by a rule for that pod. Connection tracking is
//! kept off the tunnel's outer packets, as careful CNIs do.

use std::net::Ipv4Addr;

use super::plan::Peer;
use egress_lab::UPLINK;
use egress_lab::topology::addresses::{self as plan, NodeNumber};

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
    lines.push(format!("route add default via {} dev {DEVICE} table {TABLE}", inner(gateway)));
    lines
}

/// The gateway of the remote path.
pub(super) fn gateway(peer: Peer, own: NodeNumber, source: NodeNumber, remote_pod: Ipv4Addr) -> Vec<String> {
    let mut lines = tunnel(own, source, peer.source_node());
    lines.push(format!("route add {remote_pod}/32 via {} dev {DEVICE}", inner(source)));
    if peer == Peer::Netfilter {
        lines.push(format!("addr add {NETFILTER_REMOTE}/32 dev {UPLINK}"));
    }
    lines
}

/// Beside the masquerade that every node has.
pub(super) fn netfilter_rules(remote_pod: Ipv4Addr) -> String {
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
    oifname \"{UPLINK}\" ip saddr {remote_pod} snat to {NETFILTER_REMOTE}
  }}
}}
"
    )
}

/// What the router outside needs to answer pods without SNAT.
pub(super) fn outside(local: (Ipv4Addr, NodeNumber), remote: (Ipv4Addr, NodeNumber)) -> Vec<String> {
    let via = |(pod, node): (Ipv4Addr, NodeNumber)| format!("route add {pod}/32 via {}", node.address().v4);
    vec![via(local), via(remote)]
}

/// The destination of injected packets: an unused address beyond the router outside.
pub(super) const NOBODY: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 200);
pub(super) const DISCARD: u16 = 9;

/// Rules for the switch: what leaves these nodes for [`NOBODY`] is counted and dropped where it leaves.
pub(super) fn sink(ports: &[String]) -> String {
    let chains = ports.iter().map(|port| {
        format!(
            "  chain {port} {{
    type filter hook ingress device \"{port}\" priority 0; policy accept;
    ip daddr {NOBODY} udp dport {DISCARD} counter drop
  }}
"
        )
    });
    format!("table netdev bench {{\n{}}}\n", chains.collect::<String>())
}

/// Behind which outside NIC the injected packets end.
pub(super) fn exit_of(peer: Peer, path: super::plan::PacketPath) -> usize {
    match path {
        super::plan::PacketPath::Local => peer.source_node(),
        super::plan::PacketPath::Remote => peer.gateway_node(),
    }
}

/// The server outside.
pub(super) const SERVER: Ipv4Addr = plan::SERVER.v4;
