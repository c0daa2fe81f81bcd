//! A real OVN as the lab's pod network, in the layout of OVN-Kubernetes' local gateway mode: `central` has the databases and
//! northd, `node` a node's Open vSwitch with `breth0` and `ovn-k8s-mp0`, `logical` the logical network, `flows` the flows that
//! ovnkube-node writes into `breth0`.
//!
//! By default Open vSwitch runs with its datapath in user space (`datapath_type=netdev`): the running kernel need not have its
//! module. Three facts follow:
//! - `breth0` and `ovn-k8s-mp0` are tap devices, the NIC is read by a packet socket, and an nft rule keeps the host's stack from
//!   the NIC's frames, which it would get a second time.
//! - Checksums and segments are finished before a packet reaches Open vSwitch, unless all nodes have their offloads on: then it
//!   passes unfinished ones (`userspace-tso-enable`), as the kernel's datapath does.
//! - Its connection tracking drops fragments of less than 400 bytes that are not the last one.

mod central;
mod flows;
mod logical;
mod node;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use egress_toolchain::Paths;
use egress_toolchain::ovn::OvnPrograms;

use super::addresses::{Dual, NodeNumber};
use super::builder::Ground;
use super::host_config::Cni;
use super::lab::{LabNode, LabPod, LabService};
use super::netns::{self, Netns};
use crate::wait::poll;
use central::Central;
pub(super) use logical::{link_address, nic_address};
pub use node::NodeDaemon;
use node::NodeDaemons;
pub(super) use node::management_rules;

/// The NIC below `breth0`.
pub const NIC: &str = "eth0";
/// What OVN-Kubernetes has the masquerade subnet for: the client of a NodePort that a pod behind OVN answers to, and the
/// address that a host translates such a NodePort to (`externalTrafficPolicy: Local`).
pub const NODE_PORT_V4: Ipv4Addr = Ipv4Addr::new(169, 254, 0, 3);
pub const NODE_PORT_V6: std::net::Ipv6Addr = std::net::Ipv6Addr::new(0xfd69, 0, 0, 0, 0, 0, 0, 3);

const STARTED: Duration = Duration::from_secs(15);

/// OVN of a lab that is up.
pub struct Ovn {
    programs: OvnPrograms,
    prefix: String,
    folder: PathBuf,
    datapath: Datapath,
    central: Central,
    nodes: Mutex<Vec<NodeDaemons>>,
}

/// Where Open vSwitch forwards packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Datapath {
    Kernel,
    /// Unfinished checksums and segments may pass or not.
    UserSpace {
        offload: bool,
    },
}

impl Datapath {
    /// `datapath_type` of a bridge.
    fn kind(self) -> &'static str {
        match self {
            Self::Kernel => "system",
            Self::UserSpace { .. } => "netdev",
        }
    }

    fn finishes_checksums(self) -> bool {
        self == Self::UserSpace { offload: false }
    }
}

/// A daemon of OVN or Open vSwitch. It carries the lab's mark, by which the teardown finds it too.
struct Daemon {
    name: String,
    child: Child,
}

impl Daemon {
    fn start(name: String, mut command: Command, netns: Option<&Netns>) -> Result<Self> {
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut spawn = || command.spawn().with_context(|| format!("cannot start {name}"));
        let child = match netns {
            Some(netns) => netns.run(spawn)?,
            None => spawn()?,
        };
        Ok(Self { name, child })
    }

    fn kill(&mut self) -> Result<()> {
        self.child.kill().with_context(|| format!("cannot kill {}", self.name))?;
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Err(error) = self.kill() {
            eprintln!("lab: {error:#}");
        }
    }
}

/// Waits until a daemon listens.
fn listens(socket: &Path) -> Result<()> {
    let found = poll(STARTED, || Ok(socket.exists().then_some(())))?;
    ensure!(found.is_some(), "nothing listens at {}", socket.display());
    Ok(())
}

impl Ovn {
    /// Starts OVN for these nodes and pods, whose namespaces and veth pairs exist.
    pub(super) fn start(
        ground: Ground,
        folder: &Path,
        logs: &Path,
        nodes: &[LabNode],
        pods: &[LabPod],
    ) -> Result<Self> {
        let programs = OvnPrograms::expected(&Paths::find()?)
            .context("Open vSwitch and OVN are not here; `cargo xtask run --ground ovn` fetches them")?;
        let folder = folder.join("ovn");
        std::fs::create_dir_all(&folder)?;
        let prefix = nodes.first().context("a lab needs a node")?.host.prefix().to_owned();
        let offload = nodes.iter().all(|node| node.config.checksum_offload && node.config.segmentation_offload);
        let datapath = if ground == Ground::OvnKernel { Datapath::Kernel } else { Datapath::UserSpace { offload } };
        let central = Central::start(&programs, &prefix, &folder, logs)?;
        let mut ovn = Self { programs, prefix, folder, datapath, central, nodes: Mutex::default() };
        let daemons = nodes.iter().map(|node| ovn.start_node(node, logs)).collect::<Result<_>>()?;
        ovn.nodes = Mutex::new(daemons);
        ovn.nb(&logical::cluster())?;
        for node in nodes {
            ovn.make_bridges(node)?;
            ovn.restart(node, logs, NodeDaemon::Controller)?;
            ovn.nb(&logical::node(node.number))?;
        }
        for node in nodes {
            let own: Vec<&LabPod> = pods.iter().filter(|pod| pod.node == node.number).collect();
            ovn.add_pods(node, &own)?;
        }
        ovn.settle()?;
        nodes.iter().try_for_each(|node| ovn.write_flows(node.number))?;
        Ok(ovn)
    }

    /// Waits until all nodes have what the logical network says.
    pub fn settle(&self) -> Result<()> {
        self.nb_line(&["--wait=hv", "--timeout=60", "sync"]).map(drop)
    }

    /// One of the programs, with the lab's mark, run to its end.
    fn run(&self, program: &str, arguments: &[String]) -> Result<String> {
        let line = self.programs.line(program)?;
        let mut command = netns::marked(&self.prefix, &line[0]);
        command.args(&line[1..]).args(arguments).stdin(Stdio::null());
        let output = command.output().with_context(|| format!("cannot start {program}"))?;
        if !output.status.success() {
            bail!("{program} {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Commands for the logical network, in one transaction.
    fn nb(&self, commands: &[Vec<String>]) -> Result<()> {
        let mut arguments = vec!["--no-syslog".to_owned(), self.central.north()];
        for command in commands {
            arguments.push("--".to_owned());
            arguments.extend(command.iter().cloned());
        }
        self.run("ovn-nbctl", &arguments).map(drop)
    }

    /// `ovn-nbctl` with these arguments.
    pub fn nb_line(&self, arguments: &[&str]) -> Result<String> {
        let own = ["--no-syslog".to_owned(), self.central.north()];
        self.run("ovn-nbctl", &own.into_iter().chain(arguments.iter().map(ToString::to_string)).collect::<Vec<_>>())
    }

    /// `ovs-vsctl` on a node.
    pub fn vsctl(&self, node: NodeNumber, arguments: &[&str]) -> Result<String> {
        let database = format!("--db=unix:{}", self.folder_of(node).join("db.sock").display());
        let own = ["--no-syslog".to_owned(), "--timeout=15".to_owned(), database];
        self.run("ovs-vsctl", &own.into_iter().chain(arguments.iter().map(ToString::to_string)).collect::<Vec<_>>())
    }

    /// `ovs-appctl` of a node's ovs-vswitchd.
    pub fn appctl(&self, node: NodeNumber, arguments: &[&str]) -> Result<String> {
        let target = ["-t".to_owned(), self.folder_of(node).join("vswitchd.ctl").display().to_string()];
        self.run("ovs-appctl", &target.into_iter().chain(arguments.iter().map(ToString::to_string)).collect::<Vec<_>>())
    }

    fn folder_of(&self, node: NodeNumber) -> PathBuf {
        self.folder.join(node.name())
    }

    /// Makes a node's services lead to their pods, as OVN-Kubernetes does: a cluster IP by a load balancer of the node's
    /// switch; a port of the node by a translation on the host to an address that a load balancer of the switch has.
    pub(super) fn add_services(&self, node: &LabNode, services: &[LabService]) -> Result<()> {
        for LabService { front, protocol, backend } in services {
            let is_node_port = node.number.address().is(front.ip());
            let behind =
                if is_node_port { SocketAddr::new(node_port_address(front.ip()), front.port()) } else { *front };
            let name = format!("{}-{protocol}-{behind}", node.name());
            let (behind, backend) = (behind.to_string(), backend.to_string());
            self.nb_line(&["--may-exist", "lb-add", &name, &behind, &backend, protocol])?;
            self.nb_line(&["--may-exist", "ls-lb-add", &node.name(), &name])?;
            if is_node_port {
                let to = SocketAddr::new(node_port_address(front.ip()), front.port());
                Self::translate(node, *front, protocol, to)?;
            } else {
                self.nb_line(&["--may-exist", "lr-lb-add", &logical::gateway_of(node.number), &name])?;
            }
        }
        self.settle()
    }

    /// Drops OVN's overlay from and to a node on the switch of the nodes' network, or lets it pass again.
    pub(super) fn set_geneve(&self, lan: &Netns, node: NodeNumber, on: bool) -> Result<()> {
        let (table, port) = (format!("geneve-{}", node.name()), super::port_of(node));
        let rules = if on {
            format!("delete table bridge {table}\n")
        } else {
            let drop = |direction| format!("{direction}name {port:?} udp dport 6081 drop; ");
            format!(
                "table bridge {table} {{ chain forward {{ type filter hook forward priority 0; policy accept; {}{}}}; }}\n",
                drop("iif"),
                drop("oif")
            )
        };
        lan.feed("nft", &["-f", "-"], &rules)
    }

    /// From now on pods of the node leave the cluster by its gateway router, as in OVN-Kubernetes' shared gateway mode.
    pub fn share_gateway(&self, node: NodeNumber) -> Result<()> {
        // One after the other: within a transaction the old route counts as a duplicate of the new one.
        for command in logical::shared_gateway(node) {
            self.nb(&[command])?;
        }
        self.settle()
    }

    /// A policy of the cluster's router that sends what a pod sends out of the cluster to its node's management port.
    pub fn reroute_to_host(&self, pod: &LabPod) -> Result<()> {
        self.nb(&logical::reroute(pod, pod.node.management(Cni::Ovn)))?;
        self.settle()
    }

    /// Removes the policy of [`reroute_to_host`](Self::reroute_to_host).
    pub fn remove_reroute(&self, pod: &LabPod) -> Result<()> {
        self.nb(&logical::remove_reroute(pod))?;
        self.settle()
    }

    /// What OVN-Kubernetes' own EgressIP writes for a pod whose addresses the pod's node has: policies that send it to the gateway
    /// router, and translations there.
    pub fn own_egress_ip(&self, pod: &LabPod, address: Dual) -> Result<()> {
        self.nb(&logical::own_egress_ip(pod, address))?;
        self.settle()
    }

    /// Removes them, as OVN-Kubernetes does with its last EgressIP of the pod.
    pub fn remove_own_egress_ip(&self, pod: &LabPod) -> Result<()> {
        self.nb(&logical::remove_own_egress_ip(pod))?;
        self.settle()
    }

    /// Makes a port of the node lead to a cluster IP, as OVN-Kubernetes does for `externalTrafficPolicy: Cluster`.
    pub fn expose(&self, node: &LabNode, front: SocketAddr, protocol: &str, cluster_ip: SocketAddr) -> Result<()> {
        Self::translate(node, front, protocol, cluster_ip)
    }

    /// On the host.
    fn translate(node: &LabNode, front: SocketAddr, protocol: &str, to: SocketAddr) -> Result<()> {
        let family = if front.is_ipv4() { "ip" } else { "ip6" };
        let rule = format!(
            "table inet ovn-node-ports {{ chain prerouting {{ type nat hook prerouting priority dstnat; policy accept; }}; }}
add rule inet ovn-node-ports prerouting {family} daddr {} {protocol} dport {} dnat {family} to {to}
",
            front.ip(),
            front.port()
        );
        node.host.feed("nft", &["-f", "-"], &rule)
    }
}

/// That of the cluster's router on a node's switch, to which pods send.
pub fn router_link_address(node: NodeNumber) -> String {
    link_address(node.router().v4)
}

fn node_port_address(front: IpAddr) -> IpAddr {
    match front {
        IpAddr::V4(_) => NODE_PORT_V4.into(),
        IpAddr::V6(_) => NODE_PORT_V6.into(),
    }
}
