//! The shape of the lab as scripts, one per namespace; docs/lab.md has the drawing.
//!
//! A pod's packet to the world goes to the router (.1), which sends it to the node (.2, mp0); the host's stack does the rest.
//! Answers go from mp0 on-link straight to the pod, as in OVN-Kubernetes. Pods and mp0 addresses of other nodes are behind the
//! router, on the overlay. The router sends no redirects, or pods would learn to bypass it. With a bridge CNI (`Cni::Bridge`)
//! there is neither mp0 nor router: the bridge is `cni0` on the node with the first address, pods have those from the second on,
//! and the nodes' network leads to pods of other nodes. With a real OVN (`Cni::Ovn`, [`ovn`]) Open vSwitch and OVN are in the place
//! of router and overlay, and `breth0` is a bridge of Open vSwitch.
//!
//! Each device is made inside a namespace of the lab, its peer inside another: the root namespace sees none of them.

pub mod addresses;
pub mod builder;
pub mod firewall;
pub mod host_config;
pub mod lab;
pub mod ledger;
pub mod netns;
pub mod ovn;
pub mod script;
pub mod second;
pub mod signals;
pub mod teardown;

use anyhow::Result;

use addresses::{self as plan, Dual, NodeNumber};
use host_config::{Cni, HostConfig};
use lab::LabNode;
use netns::Netns;
use script::{CHECKSUMS, SEGMENTATION, Script};

/// The node's interfaces, as its agent's flags name them.
pub const UPLINK: &str = "breth0";
pub const MANAGEMENT: &str = "ovn-k8s-mp0";
const BRIDGE: &str = "cni0";
/// On the second network, of a node that has it.
pub const SECOND_UPLINK: &str = "eth1";
/// The pod's, the server's and the outside router's interfaces.
pub const POD_INTERFACE: &str = "eth0";
pub const EXT_LAN: &str = "lan0";
/// The router's interface towards the server.
const BEHIND: &str = "srv0";

/// A network of nodes and the world behind its router.
pub struct World {
    pub lan: Netns,
    pub ext: Netns,
    pub server: Netns,
    pub on_lan: Dual,
    pub lan_lengths: (u8, u8),
    pub behind: Dual,
    pub address: Dual,
}

fn address(script: &mut Script, interface: &str, own: Dual, lengths: (u8, u8)) {
    script.config(format!("addr add {}/{} dev {interface}", own.v4, lengths.0));
    script.config(format!("addr add {}/{} dev {interface} nodad", own.v6, lengths.1));
}

fn default_route(script: &mut Script, via: Dual) {
    script.config(format!("route add default via {}", via.v4));
    script.config(format!("route add default via {}", via.v6));
}

/// The script of a namespace that is a bridge `br0` with these ports and nothing else.
pub fn bridge(netns: &Netns, ports: &[String]) -> Script {
    let mut script = Script::switch(netns.clone());
    script.link("link add br0 type bridge mcast_snooping 0");
    script.config("link set br0 up");
    for port in ports {
        script.config(format!("link set {port} master br0 up"));
    }
    script
}

/// The outside: the router of the nodes' network, and the server behind it.
pub fn world(world: &World, checksum_offload: bool) -> [Script; 2] {
    let mut ext = Script::new(world.ext.clone());
    ext.forwards();
    ext.link(format!("link add {EXT_LAN} type veth peer name ext netns {}", world.lan.name()));
    ext.config(format!("link set {EXT_LAN} up"));
    address(&mut ext, EXT_LAN, world.on_lan, world.lan_lengths);
    ext.config("link set srv0 up");
    address(&mut ext, "srv0", world.behind, (24, 64));

    let mut server = Script::new(world.server.clone());
    server.link(format!("link add {POD_INTERFACE} type veth peer name srv0 netns {}", world.ext.name()));
    server.config(format!("link set {POD_INTERFACE} up"));
    address(&mut server, POD_INTERFACE, world.address, (24, 64));
    default_route(&mut server, world.behind);
    if !checksum_offload {
        server.switch_off(POD_INTERFACE, CHECKSUMS);
    }
    [ext, server]
}

pub const fn management_port(cni: Cni) -> &'static str {
    match cni {
        Cni::Routed | Cni::Ovn => MANAGEMENT,
        Cni::Bridge => BRIDGE,
    }
}

/// The name of a node's port on a bridge of its own namespace (lan, overlay).
pub fn port_of(number: NodeNumber) -> String {
    number.name()
}

/// Takes the node's port off a switch, or puts it on again.
fn set_port(hub: &Netns, node: NodeNumber, on: bool) -> Result<()> {
    let master: &[&str] = if on { &["master", "br0"] } else { &["nomaster"] };
    hub.exec("ip", &[&["link", "set", port_of(node).as_str()], master].concat()).map(drop)
}

/// The host: two interfaces, a route to the cluster's pods, the CNI's masquerade, and its options. [`second`] adds `eth1`.
pub fn host(node: &LabNode, pods: usize, others: &[NodeNumber], lan: &Netns) -> Script {
    let mut script = Script::new(node.host.clone());
    script.forwards();
    let filter = node.config.reverse_path.value();
    script.set("ipv4/conf/all/rp_filter", filter);
    script.set("ipv4/conf/default/rp_filter", filter);
    for line in uplink_links(node, lan) {
        script.link(line);
    }
    match node.config.cni {
        Cni::Routed => script.link(management_link(node)),
        // Open vSwitch makes the rest.
        Cni::Ovn => {
            script.rules = firewall::host(node.number, &node.config);
            return script;
        }
        // As the plugin makes it, with its own link address.
        Cni::Bridge => {
            script.link(format!("link add {BRIDGE} mtu {} address {ROUTER_MAC} type bridge", plan::POD_MTU));
        }
    }
    for line in uplink_config(node) {
        script.config(line);
    }
    let lines = match node.config.cni {
        Cni::Routed | Cni::Ovn => management_config(node.number),
        Cni::Bridge => bridge_config(node, pods, others),
    };
    for line in lines {
        script.config(line);
    }
    script.rules = firewall::host(node.number, &node.config);
    offloads(&mut script, &node.config, &[UPLINK, management_port(node.config.cni)]);
    if node.config.macvlan_uplink {
        offloads(&mut script, &node.config, &[LOWER]);
    }
    script
}

/// The macvlan's lower device.
pub const LOWER: &str = "nic0";

fn uplink_links(node: &LabNode, lan: &Netns) -> Vec<String> {
    let port = port_of(node.number);
    if node.config.cni == Cni::Ovn {
        // The bridge has the NIC's link address.
        let (nic, address) = (ovn::NIC, ovn::nic_address(node.number));
        return vec![format!("link add {nic} address {address} type veth peer name {port} netns {}", lan.name())];
    }
    let wire = if node.config.macvlan_uplink { LOWER } else { UPLINK };
    let mut lines = vec![format!("link add {wire} type veth peer name {port} netns {}", lan.name())];
    if node.config.macvlan_uplink {
        lines.push(format!("link add {UPLINK} link {LOWER} type macvlan mode private"));
    }
    lines
}

fn uplink_config(node: &LabNode) -> Vec<String> {
    let own = node.number.address();
    let mut lines = Vec::new();
    if node.config.macvlan_uplink {
        // It answers for no address of the macvlan, as a port of a switch would not.
        lines.push(format!("link set {LOWER} arp off up"));
    }
    lines.extend([
        format!("link set {UPLINK} up"),
        format!("addr add {}/16 dev {UPLINK}", own.v4),
        format!("addr add {}/64 dev {UPLINK} nodad", own.v6),
        format!("route add default via {} dev {UPLINK}", plan::EXT.v4),
        format!("route add default via {} dev {UPLINK}", plan::EXT.v6),
    ]);
    lines
}

fn management_config(number: NodeNumber) -> Vec<String> {
    let (own, router) = (number.management(Cni::Routed), number.router());
    vec![
        format!("link property add dev {MANAGEMENT} altname mp0"),
        format!("link set {MANAGEMENT} up"),
        format!("addr add {}/24 dev {MANAGEMENT}", own.v4),
        format!("addr add {}/64 dev {MANAGEMENT} nodad", own.v6),
        format!("route add {} via {} dev {MANAGEMENT}", plan::CLUSTER_V4, router.v4),
        format!("route add {} via {} dev {MANAGEMENT}", plan::CLUSTER_V6, router.v6),
    ]
}

/// The bridge of the pods, and the routes to those of other nodes.
fn bridge_config(node: &LabNode, pods: usize, others: &[NodeNumber]) -> Vec<String> {
    let own = node.number.management(Cni::Bridge);
    let mut lines = vec![
        format!("addr add {}/24 dev {BRIDGE}", own.v4),
        format!("addr add {}/64 dev {BRIDGE} nodad", own.v6),
        format!("link set {BRIDGE} up"),
    ];
    lines.extend((0..pods).map(|place| format!("link set {} master {BRIDGE} up", pod_port(place))));
    for other in others {
        let via = other.address();
        lines.push(format!("route add {} via {}", other.pod_subnet_v4(), via.v4));
        lines.push(format!("route add {} via {}", other.pod_subnet_v6(), via.v6));
    }
    lines
}

/// The `ip` lines that recreate a node's uplink after it was deleted: links, then configuration.
pub fn uplink_again(node: &LabNode, lan: &Netns) -> (Vec<String>, Vec<String>) {
    (uplink_links(node, lan), uplink_config(node))
}

/// The same for its management port.
pub fn management_again(node: &LabNode) -> (Vec<String>, Vec<String>) {
    (vec![management_link(node)], management_config(node.number))
}

/// The management port comes back with the link address that it had, as OVN-Kubernetes' does, which makes it from the
/// IPv4 address: the router's neighbour entries stay right, and frames for another host are not accepted.
fn management_link(node: &LabNode) -> String {
    let [a, b, c, d] = node.number.management(Cni::Routed).v4.octets();
    let (mtu, router) = (plan::POD_MTU, node.router.name());
    format!(
        "link add {MANAGEMENT} mtu {mtu} address 0a:58:{a:02x}:{b:02x}:{c:02x}:{d:02x} type veth peer name mp0 mtu {mtu} \
         netns {router}"
    )
}

fn offloads(script: &mut Script, config: &HostConfig, interfaces: &[&'static str]) {
    for interface in interfaces {
        if !config.checksum_offload {
            script.switch_off(interface, CHECKSUMS);
        }
        if !config.segmentation_offload {
            script.switch_off(interface, SEGMENTATION);
        }
    }
}

/// Switches off on devices recreated what was off on the old ones.
pub fn offloads_again(host: &Netns, config: &HostConfig, interfaces: &[&'static str]) -> Result<()> {
    let mut script = Script::new(host.clone());
    offloads(&mut script, config, interfaces);
    script.switch_off_all()
}

/// The routers' link address towards their pods; each has its own network.
const ROUTER_MAC: &str = "02:00:00:00:00:01";

/// The pod network's router of a node. `others` are the nodes whose pods are behind the overlay.
pub fn router(node: &LabNode, pods: usize, overlay: &Netns, others: &[NodeNumber]) -> Script {
    let mut script = Script::new(node.router.clone());
    if node.config.cni == Cni::Bridge {
        // It has no router; its port on the overlay is only there to be cut.
        script.link(format!("link add ovl0 type veth peer name {} netns {}", port_of(node.number), overlay.name()));
        return script;
    }
    script.forwards();
    // A bridge without an address of its own takes that of a port, and another one when that port goes.
    script.link(format!("link add br0 mtu {} address {ROUTER_MAC} type bridge mcast_snooping 0", plan::POD_MTU));
    script.link(format!("link add ovl0 type veth peer name {} netns {}", port_of(node.number), overlay.name()));
    script.config("link set br0 up");
    address(&mut script, "br0", node.number.router(), (24, 64));
    script.config("link set mp0 master br0 up");
    for place in 0..pods {
        script.config(format!("link set {} master br0 up", pod_port(place)));
    }
    script.config("link set ovl0 up");
    address(&mut script, "ovl0", node.number.transit(), (16, 64));
    default_route(&mut script, node.number.management(Cni::Routed));
    for other in others {
        let via = other.transit();
        script.config(format!("route add {} via {}", other.pod_subnet_v4(), via.v4));
        script.config(format!("route add {} via {}", other.pod_subnet_v6(), via.v6));
    }
    script
}

/// The name of a pod's port on its router's bridge.
pub(super) fn pod_port(place: usize) -> String {
    format!("pod{place}")
}

/// One pod: an interface on its router's bridge.
pub fn pod(node: &LabNode, place: usize, netns: &Netns, own: Dual) -> Script {
    let mut script = Script::new(netns.clone());
    let mtu = plan::POD_MTU;
    let ports = node.pod_ports();
    let link_address = match node.config.cni {
        Cni::Ovn => format!("address {} ", ovn::link_address(own.v4)),
        Cni::Routed | Cni::Bridge => String::new(),
    };
    script.link(format!(
        "link add {POD_INTERFACE} mtu {mtu} {link_address}type veth peer name {} mtu {mtu} netns {}",
        pod_port(place),
        ports.name()
    ));
    script.config(format!("link set {POD_INTERFACE} up"));
    address(&mut script, POD_INTERFACE, own, (24, 64));
    default_route(&mut script, node.number.router());
    offloads(&mut script, &node.config, &[POD_INTERFACE]);
    script
}
