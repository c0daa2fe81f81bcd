//! A node's Open vSwitch and its ovn-controller: `breth0` with the NIC, `br-int` with the management port and the pods.

use std::net::IpAddr;
use std::path::Path;

use anyhow::{Context, Result, bail};
use egress_toolchain::run;

use super::super::addresses::{self as plan, EXT, NodeNumber};
use super::super::host_config::Cni;
use super::super::lab::{LabNode, LabPod};
use super::super::netns::marked;
use super::super::script::{self, CHECKSUMS, Script};
use super::super::{MANAGEMENT, UPLINK, pod_port};
use super::central::common_arguments;
use super::logical::{self, SERVICE_HOP, chassis, link_address, nic_address};
use super::{Daemon, Datapath, NIC, NODE_PORT_V4, NODE_PORT_V6, Ovn, STARTED, flows, listens};
use crate::wait::poll;

/// Dropped in this order.
pub(super) struct NodeDaemons {
    controller: Option<Daemon>,
    vswitchd: Option<Daemon>,
    _database: Daemon,
}

/// A daemon of a node that can be restarted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodeDaemon {
    Vswitchd,
    Controller,
}

/// Fragments that are not the last one and have fewer bytes are dropped; Open vSwitch takes no lower value. The kernel's
/// datapath has no such limit.
const LEAST_FRAGMENT: &str = "400";

impl Ovn {
    /// Open vSwitch of a node, without a bridge. The controller comes after the bridges, of which it would make its own.
    pub(super) fn start_node(&self, node: &LabNode, logs: &Path) -> Result<NodeDaemons> {
        let folder = self.folder_of(node.number);
        std::fs::create_dir_all(&folder)?;
        let (file, socket) = (folder.join("conf.db"), folder.join("db.sock"));
        run(self.programs.command("ovsdb-tool")?.arg("create").arg(&file).arg(self.programs.schema("vswitch")))?;
        let remote = format!("--remote=punix:{}", socket.display());
        let database = self.start_daemon(node, logs, "ovsdb", "ovsdb-server", &[file.display().to_string(), remote])?;
        listens(&socket)?;
        let own = node.number.address();
        let mut settings = vec![
            format!("external_ids:system-id={}", chassis(node.number)),
            format!("external_ids:ovn-remote=unix:{}", self.folder.join("sb.sock").display()),
            "external_ids:ovn-encap-type=geneve".to_owned(),
            format!("external_ids:ovn-encap-ip={}", own.v4),
            format!("external_ids:ovn-bridge-mappings=physnet:{UPLINK}"),
            format!("external_ids:ovn-bridge-datapath-type={}", self.datapath.kind()),
            "external_ids:ovn-monitor-all=true".to_owned(),
        ];
        if self.datapath == (Datapath::UserSpace { offload: true }) {
            settings.push("other_config:userspace-tso-enable=true".to_owned());
        }
        self.vsctl(node.number, &["--no-wait", "init"])?;
        let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
        self.vsctl(node.number, &[&["--no-wait", "set", "open", "."], settings.as_slice()].concat())?;
        let vswitchd = Some(self.start_vswitchd(node, logs)?);
        Ok(NodeDaemons { controller: None, vswitchd, _database: database })
    }

    fn start_daemon(
        &self,
        node: &LabNode,
        logs: &Path,
        name: &str,
        program: &str,
        arguments: &[String],
    ) -> Result<Daemon> {
        let folder = self.folder_of(node.number);
        let line = self.programs.line(program)?;
        let mut command = marked(&self.prefix, &line[0]);
        command.args(&line[1..]).args(arguments);
        command.args(common_arguments(&folder, &logs.join(format!("{name}-{}.log", node.name())), name));
        command.env("OVS_RUNDIR", &folder).env("OVN_RUNDIR", &folder);
        Daemon::start(format!("{program} of {}", node.name()), command, Some(&node.host))
    }

    fn database_of(&self, node: NodeNumber) -> String {
        format!("unix:{}", self.folder_of(node).join("db.sock").display())
    }

    fn start_vswitchd(&self, node: &LabNode, logs: &Path) -> Result<Daemon> {
        self.start_daemon(node, logs, "vswitchd", "ovs-vswitchd", &[self.database_of(node.number)])
    }

    fn start_controller(&self, node: &LabNode, logs: &Path) -> Result<Daemon> {
        self.start_daemon(node, logs, "controller", "ovn-controller", &[self.database_of(node.number)])
    }

    /// Kills a daemon of the node and starts it again: an upgrade of Open vSwitch or of OVN.
    pub fn restart(&self, node: &LabNode, logs: &Path, which: NodeDaemon) -> Result<()> {
        let mut nodes = self.nodes.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let daemons = nodes.get_mut(node.number.index()).context("no such node")?;
        match which {
            NodeDaemon::Vswitchd => {
                daemons.vswitchd = None;
                daemons.vswitchd = Some(self.start_vswitchd(node, logs)?);
            }
            NodeDaemon::Controller => {
                daemons.controller = None;
                daemons.controller = Some(self.start_controller(node, logs)?);
            }
        }
        Ok(())
    }

    /// `breth0` with the NIC, and `br-int` with the management port, with the host's addresses, routes and rules on them.
    pub(super) fn make_bridges(&self, node: &LabNode) -> Result<()> {
        let host = &node.host;
        host.sysctl(&[(format!("ipv6/conf/{NIC}/disable_ipv6"), "1".to_owned())])?;
        script::ip(host, &[format!("link set {NIC} up")])?;
        if self.datapath != Datapath::Kernel {
            Self::keep_from_host(node)?;
        }
        let kind = self.bridge_kind();
        self.vsctl(node.number, &["add-br", "br-int", "--", "set", "bridge", "br-int", &kind, "fail_mode=secure"])?;
        self.add_uplink(node.number)?;
        if self.datapath != Datapath::Kernel {
            self.appctl(node.number, &["dpctl/ipf-set-min-frag", "v4", LEAST_FRAGMENT])?;
            self.appctl(node.number, &["dpctl/ipf-set-min-frag", "v6", LEAST_FRAGMENT])?;
        }
        self.configure_uplink(node)?;
        self.make_management(node)
    }

    /// `breth0` with the NIC.
    fn add_uplink(&self, node: NodeNumber) -> Result<()> {
        let (kind, hwaddr) = (self.bridge_kind(), format!("other-config:hwaddr=\"{}\"", nic_address(node)));
        let bridge = ["add-br", UPLINK, "--", "set", "bridge", UPLINK, &kind, "fail_mode=standalone", &hwaddr];
        self.vsctl(node, &[bridge.as_slice(), &["--", "add-port", UPLINK, NIC]].concat()).map(drop)
    }

    fn bridge_kind(&self) -> String {
        format!("datapath_type={}", self.datapath.kind())
    }

    /// A packet socket copies the NIC's frames: the host's stack must not have them too.
    fn keep_from_host(node: &LabNode) -> Result<()> {
        let rules = format!(
            "table netdev open-vswitch {{ chain nic {{ type filter hook ingress device {NIC} priority 500; policy drop; }}; }}\n"
        );
        node.host.feed("nft", &["-f", "-"], &rules)
    }

    /// Addresses and routes of `breth0`, whose device is new.
    fn configure_uplink(&self, node: &LabNode) -> Result<()> {
        if self.datapath != Datapath::Kernel {
            // A tap device hands Open vSwitch the place of an inner checksum, which it does not complete.
            Self::finish_checksums(node, UPLINK)?;
        }
        let own = node.number.address();
        script::ip(
            &node.host,
            &[
                format!("addr add {}/16 dev {UPLINK}", own.v4),
                format!("addr add {}/64 dev {UPLINK} nodad", own.v6),
                format!("link set {UPLINK} up"),
                format!("route add default via {} dev {UPLINK}", EXT.v4),
                format!("route add default via {} dev {UPLINK}", EXT.v6),
                format!(
                    "neigh replace {} lladdr {} dev {UPLINK} nud permanent",
                    SERVICE_HOP.v4,
                    link_address(SERVICE_HOP.v4)
                ),
                format!(
                    "neigh replace {} lladdr {} dev {UPLINK} nud permanent",
                    SERVICE_HOP.v6,
                    link_address(SERVICE_HOP.v4)
                ),
                format!("route add {} via {} dev {UPLINK} onlink", plan::SERVICES_V4, SERVICE_HOP.v4),
                format!("route add {} via {} dev {UPLINK} onlink", plan::SERVICES_V6, SERVICE_HOP.v6),
            ],
        )
    }

    fn finish_checksums(node: &LabNode, device: &'static str) -> Result<()> {
        let mut script = Script::new(node.host.clone());
        script.switch_off(device, CHECKSUMS);
        script.switch_off_all()
    }

    /// The port `ovn-k8s-mp0` of `br-int`, with its addresses, routes and rules.
    pub(in super::super) fn make_management(&self, node: &LabNode) -> Result<()> {
        let (own, router) = (node.number.management(Cni::Ovn), node.number.router());
        let (mac, mtu) = (format!("mac=\"{}\"", link_address(own.v4)), format!("mtu_request={}", plan::POD_MTU));
        let id = format!("external_ids:iface-id=k8s-{}", node.name());
        self.vsctl(
            node.number,
            &["add-port", "br-int", MANAGEMENT, "--", "set", "interface", MANAGEMENT, "type=internal", &mtu, &mac, &id],
        )?;
        if self.datapath.finishes_checksums() {
            Self::finish_checksums(node, MANAGEMENT)?;
        }
        let router_mac = link_address(router.v4);
        let mut lines = vec![
            format!("link property add dev {MANAGEMENT} altname mp0"),
            format!("link set {MANAGEMENT} up"),
            format!("addr add {}/24 dev {MANAGEMENT}", own.v4),
            format!("addr add {}/64 dev {MANAGEMENT} nodad", own.v6),
        ];
        let reached = [
            (plan::CLUSTER_V4.to_owned(), IpAddr::V4(router.v4)),
            (NODE_PORT_V4.to_string(), router.v4.into()),
            (plan::CLUSTER_V6.to_owned(), router.v6.into()),
            (NODE_PORT_V6.to_string(), router.v6.into()),
        ];
        lines.extend(reached.iter().map(|(prefix, via)| format!("route add {prefix} via {via} dev {MANAGEMENT}")));
        let neighbours =
            router.both().map(|via| format!("neigh replace {via} lladdr {router_mac} dev {MANAGEMENT} nud permanent"));
        lines.extend(neighbours);
        script::ip(&node.host, &lines)
    }

    pub(in super::super) fn remove_management(&self, node: &LabNode) -> Result<()> {
        self.vsctl(node.number, &["del-port", "br-int", MANAGEMENT]).map(drop)
    }

    /// Removes `breth0` and makes it again, as a restart of the service that configures the external bridge does.
    pub(in super::super) fn remake_uplink(&self, node: &LabNode) -> Result<()> {
        self.vsctl(node.number, &["del-br", UPLINK])?;
        self.add_uplink(node.number)?;
        self.configure_uplink(node)?;
        self.write_flows(node.number)
    }

    /// Plugs pods into `br-int`.
    pub(super) fn add_pods(&self, node: &LabNode, pods: &[&LabPod]) -> Result<()> {
        for (place, pod) in pods.iter().enumerate() {
            let port = pod_port(place);
            node.host.sysctl(&[(format!("ipv6/conf/{port}/disable_ipv6"), "1".to_owned())])?;
            script::ip(&node.host, &[format!("link set {port} up")])?;
            self.nb(&logical::pod(pod))?;
            let id = format!("external_ids:iface-id={}", logical::port_of(pod));
            self.vsctl(node.number, &["add-port", "br-int", &port, "--", "set", "interface", &port, &id])?;
        }
        Ok(())
    }

    /// Writes the flows of `breth0` as soon as ovn-controller has connected it with `br-int`.
    pub(super) fn write_flows(&self, node: NodeNumber) -> Result<()> {
        let patch_port = format!("patch-breth0_{}-to-br-int", node.name());
        let number = |port: &str| -> Result<Option<String>> {
            let shown = self.vsctl(node, &["--if-exists", "get", "interface", port, "ofport"])?;
            Ok(shown.trim().parse::<u16>().ok().map(|number| number.to_string()))
        };
        let patch = poll(STARTED, || number(&patch_port))?;
        let (Some(patch), Some(phys)) = (patch, number(NIC)?) else {
            bail!("{UPLINK} of {} has no port {patch_port}", node.name());
        };
        let file = self.folder_of(node).join("breth0.flows");
        std::fs::write(&file, flows::breth0(node, &phys, &patch))?;
        let bridge = format!("unix:{}", self.folder_of(node).join(format!("{UPLINK}.mgmt")).display());
        let words = ["-O", "OpenFlow13", "--bundle", "replace-flows", &bridge, &file.display().to_string()];
        self.run("ovs-ofctl", &words.map(str::to_owned)).map(drop)
    }
}

/// What ovnkube-node writes beside the masquerade of pods: what the host sends into OVN has the management port's address, but
/// for clients of NodePorts whose address a pod is to see.
pub(in super::super) fn management_rules(number: NodeNumber) -> String {
    let own = number.management(Cni::Ovn);
    format!(
        "table inet ovn-management {{
  chain postrouting {{
    type nat hook postrouting priority srcnat; policy accept;
    oifname \"{MANAGEMENT}\" ip daddr {NODE_PORT_V4} return
    oifname \"{MANAGEMENT}\" ip6 daddr {NODE_PORT_V6} return
    oifname \"{MANAGEMENT}\" ip saddr != {} snat ip to {}
    oifname \"{MANAGEMENT}\" ip6 saddr != {{ {}, fe80::/10 }} snat ip6 to {}
  }}
}}
",
        own.v4, own.v4, own.v6, own.v6
    )
}
