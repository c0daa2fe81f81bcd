//! The nft rules of a host: the CNI's masquerade, which every node has, and the options that some have. Pure text.
//!
//! The tables bear the names of those who would own them on a real node, so that a person who lists the ruleset
//! sees whose rule counted a packet.

use std::net::{IpAddr, SocketAddr};

use super::addresses::{self as plan, NodeNumber};
use super::host_config::{Cni, HostConfig};
use super::second::SECOND_BRIDGE;
use super::{UPLINK, management_port, ovn};

/// The mark of a selected pod's packet to another node's address (design section 9).
const NODE_MARK: &str = "0x3f0";

pub fn host(number: NodeNumber, config: &HostConfig) -> String {
    let mut rules = masquerade(number, config);
    let management = management_port(config.cni);
    if config.cni == Cni::Ovn {
        rules.push_str(&ovn::management_rules(number));
    } else if config.service_proxy {
        rules.push_str(&service_proxy(management));
    }
    if config.drop_invalid {
        rules.push_str(DROP_INVALID);
    }
    if config.stateful_forward {
        rules.push_str(&stateful_forward(management));
    }
    rules
}

/// Those by which pods' packets leave to the second network: `eth1`, renamed, or as a port of a bridge.
fn second_devices() -> String {
    format!("{{ \"eth*\", {SECOND_BRIDGE:?} }}")
}

fn masquerade(number: NodeNumber, config: &HostConfig) -> String {
    let spares_mark = config.masquerade_spares_mark;
    let mut spare = if spares_mark { format!("    meta mark {NODE_MARK} counter return\n") } else { String::new() };
    // What goes to pods of other nodes leaves by the uplink here.
    if config.cni == Cni::Bridge {
        spare += &format!("    ip daddr {} return\n    ip6 daddr {} return\n", plan::CLUSTER_V4, plan::CLUSTER_V6);
    }
    let mut rules = masquerade_by("cni", &spare, &format!("{UPLINK:?}"), number);
    if config.second.is_some() {
        rules += &masquerade_by("cni2", &spare, &second_devices(), number);
    }
    rules
}

fn masquerade_by(table: &str, spare: &str, devices: &str, number: NodeNumber) -> String {
    format!(
        "table inet {table} {{
  chain postrouting {{
    type nat hook postrouting priority srcnat; policy accept;
{spare}    oifname {devices} ip saddr {v4} counter masquerade
    oifname {devices} ip6 saddr {v6} counter masquerade
  }}
}}
",
        v4 = number.pod_subnet_v4(),
        v6 = number.pod_subnet_v6(),
    )
}

/// Services are map entries, added by [`service`]. What a pod sends to a ClusterIP comes back into the pod network by
/// mp0; it gets the node's address there, or the answer would go past the translation.
fn service_proxy(management: &str) -> String {
    format!(
        "table inet kube-proxy {{
  map services4 {{ type ipv4_addr . inet_proto . inet_service : ipv4_addr . inet_service; }}
  map services6 {{ type ipv6_addr . inet_proto . inet_service : ipv6_addr . inet_service; }}
  chain services {{
    dnat ip to ip daddr . meta l4proto . th dport map @services4
    dnat ip6 to ip6 daddr . meta l4proto . th dport map @services6
  }}
  chain prerouting {{
    type nat hook prerouting priority dstnat; policy accept;
    jump services
  }}
  chain output {{
    type nat hook output priority -100; policy accept;
    jump services
  }}
  chain postrouting {{
    type nat hook postrouting priority srcnat; policy accept;
    oifname \"{management}\" ip saddr {pods4} ct status dnat masquerade
    oifname \"{management}\" ip6 saddr {pods6} ct status dnat masquerade
  }}
}}
",
        pods4 = plan::CLUSTER_V4,
        pods6 = plan::CLUSTER_V6,
    )
}

const DROP_INVALID: &str = "table inet kube-proxy-filter {
  chain forward_invalid {
    type filter hook forward priority filter; policy accept;
    ct state invalid counter drop
  }
}
";

fn stateful_forward(management: &str) -> String {
    format!(
        "table inet host-firewall {{
  chain forward_stateful {{
    type filter hook forward priority filter + 10; policy drop;
    ct state established,related counter accept
    iifname \"{management}\" ct state new counter accept
    ct status dnat counter accept
    counter
  }}
}}
"
    )
}

/// The `nft` line that makes `front` (a ClusterIP, or a node's address with a NodePort) lead to `backend`.
pub fn service(front: SocketAddr, protocol: &str, backend: SocketAddr) -> String {
    let map = match front.ip() {
        IpAddr::V4(_) => "services4",
        IpAddr::V6(_) => "services6",
    };
    format!(
        "add element inet kube-proxy {map} {{ {} . {protocol} . {} : {} . {} }}",
        front.ip(),
        front.port(),
        backend.ip(),
        backend.port()
    )
}

/// A port of a load balancer's address, and where a node leads it to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadBalancerPort {
    pub front: SocketAddr,
    /// In small letters.
    pub protocol: String,
    /// Of the front's family, at least one; each connection gets a random one.
    pub backends: Vec<SocketAddr>,
    /// The backend sees the client's address, not the node's.
    pub keeps_client: bool,
}

/// The `nft` lines that replace what was translated for load balancers.
pub(super) fn load_balancer(management: &str, ports: &[LoadBalancerPort]) -> String {
    let (mut fronts, mut masquerades) = (String::new(), String::new());
    for LoadBalancerPort { front, protocol, backends, keeps_client } in ports {
        let family = if front.is_ipv4() { "ip" } else { "ip6" };
        let (address, port, count) = (front.ip(), front.port(), backends.len());
        let targets =
            backends.iter().enumerate().map(|(place, one)| format!("{place} : {} . {}", one.ip(), one.port()));
        let targets = targets.collect::<Vec<_>>().join(", ");
        fronts += &format!(
            "    {family} daddr {address} {protocol} dport {port} dnat {family} to numgen random mod {count} map {{ {targets} }}\n"
        );
        if !keeps_client {
            masquerades +=
                &format!("    oifname {management:?} ct status dnat ct original {family} daddr {address} masquerade\n");
        }
    }
    format!(
        "add table inet load-balancer
delete table inet load-balancer
table inet load-balancer {{
  chain prerouting {{
    type nat hook prerouting priority dstnat; policy accept;
{fronts}  }}
  chain postrouting {{
    type nat hook postrouting priority srcnat; policy accept;
{masquerades}  }}
}}
"
    )
}

#[cfg(test)]
mod tests {
    use super::super::host_config::SecondNic;
    use super::*;

    fn node() -> NodeNumber {
        NodeNumber::new(2).expect("two is a node")
    }

    #[test]
    fn every_node_masquerades_and_only_some_spare_the_mark() {
        let spares = host(node(), &HostConfig { masquerade_spares_mark: true, ..HostConfig::default() });
        let plain = host(node(), &HostConfig::default());
        assert!(spares.contains("masquerade") && plain.contains("masquerade"));
        assert!(spares.contains(NODE_MARK) && !plain.contains(NODE_MARK));
    }

    #[test]
    fn only_nodes_on_the_second_network_masquerade_there() {
        let second = host(node(), &HostConfig { second: Some(SecondNic::default()), ..HostConfig::default() });
        assert!(second.contains("oifname { \"eth*\", \"br1\" } ip saddr 10.244.2.0/24 counter masquerade"), "{second}");
        assert!(!host(node(), &HostConfig::default()).contains("cni2"));
    }

    #[test]
    fn a_load_balancer_keeps_the_client_or_not() {
        let ends = ["[fd00::1]:8080", "[fd00::2]:8080"].map(|end| end.parse().expect("end"));
        let front = "[fd00:172:18::200]:80".parse().expect("front");
        let mut port =
            LoadBalancerPort { front, protocol: "tcp".to_owned(), backends: ends.to_vec(), keeps_client: true };
        let dnat = "ip6 daddr fd00:172:18::200 tcp dport 80 dnat ip6 to numgen random mod 2 map \
                    { 0 : fd00::1 . 8080, 1 : fd00::2 . 8080 }\n";
        let text = load_balancer("mp0", std::slice::from_ref(&port));
        assert!(text.contains(dnat) && !text.contains("masquerade"), "{text}");
        port.keeps_client = false;
        let masquerade = "oifname \"mp0\" ct status dnat ct original ip6 daddr fd00:172:18::200 masquerade\n";
        assert!(load_balancer("mp0", &[port]).contains(masquerade));
    }

    #[test]
    fn a_service_goes_into_the_map_of_its_family() {
        let line =
            service("[fd00:10:96::80]:80".parse().expect("front"), "tcp", "[fd00::1]:8080".parse().expect("end"));
        assert_eq!(line, "add element inet kube-proxy services6 { fd00:10:96::80 . tcp . 80 : fd00::1 . 8080 }");
    }
}
