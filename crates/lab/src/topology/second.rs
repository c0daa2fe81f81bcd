//! The second network: `eth1` of the nodes that have it, a switch, two routers, and a server behind both. What happens to a NIC of
//! a real node happens to `eth1` by the methods of [`Lab`] below.
//!
//! ```text
//! node: eth1 --- lan2: br0 -+- ext2 (10.10.10.1) ----- server2 (203.0.113.10)
//!                           `- ext2b (10.10.10.254) --/
//! the nodes' network: lan --- ext --- ext2
//! ```
//!
//! Both routers lead to the server, which answers by the one that a connection came by. The routers of both networks know each
//! other, so that a packet on the wrong network arrives, and its source address shows it.

use anyhow::{Context, Result};

use super::addresses::{self as plan, Dual};
use super::host_config::{NicKind, SecondNic};
use super::lab::{Lab, LabNode};
use super::netns::Netns;
use super::script::{self, Script};
use super::{EXT_LAN, POD_INTERFACE, SECOND_UPLINK, World, address, bridge, offloads_again, port_of, set_port, world};

/// The cable of an `eth1` that is not the cable itself.
const CABLE: &str = "nic1";
/// What `eth1` becomes a port of.
pub const SECOND_BRIDGE: &str = "br1";
/// The server's interface towards `ext2b`, and the routing table of its answers.
const SERVER_OTHER: &str = "eth1";
const OTHER_TABLE: &str = "2";

/// The switch, the routers and the server.
pub struct SecondNetwork {
    pub world: World,
    /// `ext2b`.
    pub other_ext: Netns,
}

impl SecondNetwork {
    pub(super) fn new(netns: &dyn Fn(&str) -> Netns) -> Self {
        let world = World {
            lan: netns("lan2"),
            ext: netns("ext2"),
            server: netns("server2"),
            on_lan: plan::EXT2,
            lan_lengths: (24, 64),
            behind: plan::EXT2_BEHIND,
            address: plan::SERVER2,
        };
        Self { world, other_ext: netns("ext2b") }
    }

    /// All but the nodes. `ext` is the script of the other network's router.
    pub(super) fn scripts(&self, ext: &mut Script, checksum_offload: bool) -> Vec<Script> {
        let [mut ext2, mut server] = world(&self.world, checksum_offload);
        ext.link(format!("link add ext2 type veth peer name ext netns {}", ext2.netns.name()));
        join(ext, "ext2", (plan::EXT_TO_EXT2, plan::EXT2_TO_EXT), &TO_SECOND);
        join(&mut ext2, "ext", (plan::EXT2_TO_EXT, plan::EXT_TO_EXT2), &TO_FIRST);
        address(&mut ext2, EXT_LAN, plan::EXT2_RENUMBERED, (24, 64));

        let mut ext2b = Script::new(self.other_ext.clone());
        ext2b.forwards();
        ext2b.link(format!("link add {EXT_LAN} type veth peer name ext2b netns {}", self.world.lan.name()));
        ext2b.link(format!("link add srv0 type veth peer name {SERVER_OTHER} netns {}", server.netns.name()));
        ext2b.config(format!("link set {EXT_LAN} up"));
        address(&mut ext2b, EXT_LAN, plan::EXT2B, (24, 64));
        join(&mut ext2b, "srv0", (plan::EXT2B_BEHIND, plan::SERVER2_TO_EXT2B), &BEHIND);

        server.config(format!("link set {SERVER_OTHER} up"));
        address(&mut server, SERVER_OTHER, plan::SERVER2_TO_EXT2B, (24, 64));
        for via in plan::EXT2B_BEHIND.both() {
            server.config(format!("route add default via {via} table {OTHER_TABLE}"));
        }
        server.rules = answers();
        let switch = bridge(&self.world.lan, &["ext".to_owned(), "ext2b".to_owned()]);
        vec![switch, ext2, server, ext2b]
    }

    /// What a batch of `ip` lines cannot do for both families.
    pub(super) fn finish(&self) -> Result<()> {
        ["-4", "-6"].iter().try_for_each(|family| {
            let rule = [family, "rule", "add", "fwmark", OTHER_TABLE, "lookup", OTHER_TABLE];
            self.world.server.exec("ip", &rule).map(drop)
        })
    }
}

const TO_SECOND: [(&str, &str); 3] =
    [(plan::LAN2_V4, plan::LAN2_V6), (plan::RENUMBERED_V4, plan::RENUMBERED_V6), (plan::BEHIND2_V4, plan::BEHIND2_V6)];
const TO_FIRST: [(&str, &str); 2] = [(plan::LAN_V4, plan::LAN_V6), (plan::BEHIND_V4, plan::BEHIND_V6)];
const BEHIND: [(&str, &str); 1] = [(plan::BEHIND2_V4, plan::BEHIND2_V6)];

/// One end of a link between routers, and the networks behind the other end.
fn join(script: &mut Script, interface: &str, (own, other): (Dual, Dual), networks: &[(&str, &str)]) {
    script.config(format!("link set {interface} up"));
    address(script, interface, own, (24, 64));
    for (v4, v6) in networks {
        script.config(format!("route add {v4} via {}", other.v4));
        script.config(format!("route add {v6} via {}", other.v6));
    }
}

/// The server's connections bear a mark by their last packet's interface, and its answers are routed by it.
fn answers() -> String {
    format!(
        "table inet answers {{
  chain arriving {{
    type filter hook prerouting priority mangle; policy accept;
    iifname \"{POD_INTERFACE}\" ct mark set 0
    iifname \"{SERVER_OTHER}\" ct mark set {OTHER_TABLE}
  }}
  chain leaving {{
    type route hook output priority mangle; policy accept;
    meta mark set ct mark
  }}
}}
"
    )
}

impl NicKind {
    /// The device that the cable is.
    fn cable(self) -> &'static str {
        match self {
            Self::Veth => SECOND_UPLINK,
            Self::Macvlan | Self::Bridge => CABLE,
        }
    }
}

/// The `ip` lines that make the node's `eth1`.
fn links(node: &LabNode, nic: &SecondNic, lan2: &Netns) -> Vec<String> {
    let (cable, mtu, port) = (nic.kind.cable(), nic.mtu, port_of(node.number));
    let lan2 = lan2.name();
    let mut lines = vec![format!("link add {cable} mtu {mtu} type veth peer name {port} mtu {mtu} netns {lan2}")];
    match nic.kind {
        NicKind::Veth => {}
        NicKind::Macvlan => {
            lines.push(format!("link add {SECOND_UPLINK} link {CABLE} mtu {mtu} type macvlan mode private"));
        }
        NicKind::Bridge => {
            lines.push(format!("link add {SECOND_UPLINK} mtu {mtu} type bridge"));
            lines.push(format!("link set {CABLE} master {SECOND_UPLINK}"));
        }
    }
    lines
}

/// Those that give a device addresses, and the networks behind the router that it then reaches.
fn addressed(device: &str, own: Dual, router: Dual) -> Vec<String> {
    vec![
        format!("link set {device} up"),
        format!("addr add {}/24 dev {device}", own.v4),
        format!("addr add {}/64 dev {device} nodad", own.v6),
        format!("route replace {} via {} dev {device}", plan::BEHIND2_V4, router.v4),
        format!("route replace {} via {} dev {device}", plan::BEHIND2_V6, router.v6),
    ]
}

/// Those that take addresses away, and all routes by them.
fn unaddressed(device: &str, own: Dual) -> Vec<String> {
    vec![
        format!("route del {} dev {device}", plan::BEHIND2_V4),
        format!("route del {} dev {device}", plan::BEHIND2_V6),
        format!("addr del {}/24 dev {device}", own.v4),
        format!("addr del {}/64 dev {device}", own.v6),
    ]
}

/// Changes of a node's `eth1`. All but [`Lab::make_second`] need one that is as that leaves it.
impl Lab {
    /// The second network.
    ///
    /// # Errors
    /// No node is on it.
    pub fn second(&self) -> Result<&SecondNetwork> {
        self.second.as_ref().context("the lab has no second network")
    }

    /// Makes the node's `eth1` by the node's options, as when the lab is built.
    pub fn make_second(&self, node: &LabNode) -> Result<()> {
        let (nic, lan2) = (nic(node)?, &self.second()?.world.lan);
        script::ip(&node.host, &links(node, nic, lan2))?;
        lan2.exec("ip", &["link", "set", &port_of(node.number), "master", "br0", "up"])?;
        offloads_again(&node.host, &node.config, &[nic.kind.cable(), SECOND_UPLINK])?;
        let forwarding = u8::from(nic.forwards).to_string();
        let setting = |family: &str| (format!("{family}/conf/{SECOND_UPLINK}/forwarding"), forwarding.clone());
        node.host.sysctl(&[setting("ipv4"), setting("ipv6")])?;
        script::ip(&node.host, &[format!("link set {} up", nic.kind.cable())])?;
        script::ip(&node.host, &addressed(SECOND_UPLINK, node.number.second_address(), plan::EXT2))
    }

    /// Pulls the cable and removes what it was plugged into.
    pub fn remove_second(&self, node: &LabNode) -> Result<()> {
        // Both ends of the cable go, and a macvlan on it.
        self.second()?.world.lan.exec("ip", &["link", "del", &port_of(node.number)])?;
        if nic(node)?.kind == NicKind::Bridge {
            node.host.exec("ip", &["link", "del", SECOND_UPLINK])?;
        }
        Ok(())
    }

    /// Takes the carrier of `eth1`, or gives it back.
    pub fn set_second_carrier(&self, node: &LabNode, on: bool) -> Result<()> {
        let state = if on { "up" } else { "down" };
        self.second()?.world.lan.exec("ip", &["link", "set", &port_of(node.number), state]).map(drop)
    }

    /// Takes the node's port off the switch, or puts it on again: `eth1` keeps its carrier.
    pub fn set_second_port(&self, node: &LabNode, on: bool) -> Result<()> {
        set_port(&self.second()?.world.lan, node.number, on)
    }

    /// Gives `eth1` another name; it stays up, and keeps index, addresses and routes (Linux 6.2 and later).
    pub fn rename_second(&self, node: &LabNode, name: &str) -> Result<()> {
        node.host.exec("ip", &["link", "set", SECOND_UPLINK, "name", name]).map(drop)
    }

    /// Moves the node to the other numbers of the second network ([`plan::RENUMBERED_V4`]).
    pub fn renumber_second(&self, node: &LabNode) -> Result<()> {
        let mut lines = unaddressed(SECOND_UPLINK, node.number.second_address());
        lines.extend(addressed(SECOND_UPLINK, node.number.renumbered_address(), plan::EXT2_RENUMBERED));
        script::ip(&node.host, &lines)
    }

    /// Makes `eth1` the port of a new bridge, [`SECOND_BRIDGE`], which gets its addresses and routes.
    pub fn enslave_second(&self, node: &LabNode) -> Result<()> {
        let own = node.number.second_address();
        let mut lines = unaddressed(SECOND_UPLINK, own);
        lines.push(format!("link add {SECOND_BRIDGE} type bridge"));
        lines.push(format!("link set {SECOND_UPLINK} master {SECOND_BRIDGE}"));
        lines.extend(addressed(SECOND_BRIDGE, own, plan::EXT2));
        script::ip(&node.host, &lines)
    }
}

fn nic(node: &LabNode) -> Result<&SecondNic> {
    node.config.second.as_ref().with_context(|| format!("{} is not on the second network", node.name()))
}
