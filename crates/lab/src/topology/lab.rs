//! A lab that is up: its nodes, pods and networks, and the interfaces that a test cuts or recreates.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};

use super::addresses::{self as plan, Dual, NodeNumber};
use super::builder::Ground;
use super::firewall::LoadBalancerPort;
use super::host_config::{Cni, HostConfig};
use super::ledger::{LabLedger, Resource};
use super::netns::Netns;
use super::ovn::{NodeDaemon, Ovn};
use super::second::SecondNetwork;
use super::{self as topology, MANAGEMENT, UPLINK, World, firewall, script, set_port, teardown};

/// A lab that is up. Dropping it takes it down.
pub struct Lab {
    pub(super) nodes: Vec<LabNode>,
    pub(super) pods: Vec<LabPod>,
    pub(crate) world: World,
    pub(super) second: Option<SecondNetwork>,
    pub(crate) overlay: Netns,
    pub(super) ground: Ground,
    /// With [`Cni::Ovn`], from when it is up.
    pub(super) ovn: Option<Ovn>,
    pub(super) logs: PathBuf,
    pub(super) ledger: Arc<LabLedger>,
}

/// A node: the host's namespace and its pod network's router.
#[derive(Debug, Clone)]
pub struct LabNode {
    pub number: NodeNumber,
    pub host: Netns,
    pub router: Netns,
    pub config: HostConfig,
    /// The folder of the lab's bpffs that this node's agent pins in.
    pub bpffs: PathBuf,
    /// Where this node's agent answers.
    pub socket: PathBuf,
}

impl LabNode {
    /// The node on its pod network.
    pub fn management(&self) -> Dual {
        self.number.management(self.config.cni)
    }

    /// The interface by which pods' packets enter the host.
    pub fn management_port(&self) -> &'static str {
        topology::management_port(self.config.cni)
    }

    /// The namespace that routes for the pods, where there is one.
    pub fn pod_router(&self) -> Option<&Netns> {
        (self.config.cni == Cni::Routed).then_some(&self.router)
    }

    /// Where the pods' ports are.
    pub fn pod_ports(&self) -> &Netns {
        match self.config.cni {
            Cni::Routed => &self.router,
            Cni::Bridge | Cni::Ovn => &self.host,
        }
    }
}

/// A pod: one namespace on its node's pod network.
#[derive(Debug, Clone)]
pub struct LabPod {
    pub name: String,
    pub namespace: String,
    pub labels: BTreeMap<String, String>,
    pub node: NodeNumber,
    pub addresses: Dual,
    pub cni: Cni,
    pub netns: Netns,
}

/// A translation of the service proxy.
#[derive(Debug, Clone, Copy)]
pub struct LabService {
    pub front: SocketAddr,
    pub protocol: &'static str,
    pub backend: SocketAddr,
}

impl Lab {
    pub fn prefix(&self) -> &str {
        self.ledger.prefix()
    }

    /// The folder that goes with the lab (the bpffs is in it).
    pub fn folder(&self) -> PathBuf {
        self.ledger.folder()
    }

    pub fn logs(&self) -> &Path {
        &self.logs
    }

    pub fn nodes(&self) -> &[LabNode] {
        &self.nodes
    }

    pub fn node(&self, number: NodeNumber) -> &LabNode {
        &self.nodes[number.index()]
    }

    pub fn pods(&self) -> &[LabPod] {
        &self.pods
    }

    pub fn pod(&self, name: &str) -> Result<&LabPod> {
        self.pods.iter().find(|pod| pod.name == name).with_context(|| format!("the lab has no pod {name}"))
    }

    pub fn pods_on(&self, node: NodeNumber) -> impl Iterator<Item = &LabPod> {
        self.pods.iter().filter(move |pod| pod.node == node)
    }

    /// The node's end of the pod's cable, in [`LabNode::pod_ports`].
    pub fn port_of_pod(&self, pod: &LabPod) -> Result<String> {
        let place = self.pods_on(pod.node).position(|one| one.name == pod.name);
        place.map(topology::pod_port).with_context(|| format!("the lab has no pod {}", pod.name))
    }

    /// Makes namespaces that go with the lab.
    pub fn add_namespaces(&self, namespaces: &[Netns]) -> Result<()> {
        self.ledger.make_namespaces(namespaces)
    }

    /// Makes a control group that goes with the lab, in each hierarchy, with the lab's name before its own. Returns the whole name.
    pub fn add_cgroup(&self, name: &str) -> Result<String> {
        let name = format!("{}-{name}", self.prefix());
        self.ledger.make(vec![Resource::Cgroup(name.clone())], || teardown::make_cgroup(&name))?;
        Ok(name)
    }

    /// Makes a control group of [`add_cgroup`](Self::add_cgroup), by its whole name, again without the groups in it. It must have no
    /// processes.
    pub fn remake_cgroup(&self, name: &str) -> Result<()> {
        teardown::remove_cgroup(name)?;
        teardown::make_cgroup(name)
    }

    /// The switch of the nodes' network; its port to node i is called like the node.
    pub fn lan(&self) -> &Netns {
        &self.world.lan
    }

    /// The router between the nodes' network and the world.
    pub fn ext(&self) -> &Netns {
        &self.world.ext
    }

    /// Where the outside server runs.
    pub fn outside(&self) -> &Netns {
        &self.world.server
    }

    /// All switches: of the nodes' network, of their pods' overlay, and of the second network.
    pub(crate) fn hubs(&self) -> Vec<&Netns> {
        let second = self.second.as_ref().map(|second| &second.world.lan);
        std::iter::once(&self.world.lan).chain(self.overlay_hub()).chain(second).collect()
    }

    /// OVN's overlay has no switch of its own: it is carried by the nodes' network.
    fn overlay_hub(&self) -> Option<&Netns> {
        self.ovn.is_none().then_some(&self.overlay)
    }

    /// What is in the place of OVN-Kubernetes.
    pub fn ground(&self) -> Ground {
        self.ground
    }

    /// The real OVN of a lab that has it.
    pub fn ovn(&self) -> Result<&Ovn> {
        self.ovn.as_ref().context("this lab has no OVN")
    }

    /// Kills a daemon of Open vSwitch or OVN on a node and starts it again.
    pub fn restart_daemon(&self, node: &LabNode, which: NodeDaemon) -> Result<()> {
        self.ovn()?.restart(node, &self.logs, which)
    }

    /// Those that the node has a port on.
    pub(crate) fn hubs_of(&self, node: &LabNode) -> Vec<&Netns> {
        let mut hubs = self.hubs();
        if self.second.is_some() && node.config.second.is_none() {
            hubs.pop();
        }
        hubs
    }

    /// Cuts the node's cables (its networks and its pods' overlay), or plugs them in again.
    pub fn set_power(&self, node: &LabNode, on: bool) -> Result<()> {
        let state = if on { "up" } else { "down" };
        let port = topology::port_of(node.number);
        self.hubs_of(node).into_iter().try_for_each(|hub| hub.exec("ip", &["link", "set", &port, state]).map(drop))
    }

    /// Takes the node's port off the switch, or puts it on again: nothing from and to the node is forwarded, and its
    /// carrier stays. What it sends is still seen by a capture.
    pub fn set_lan(&self, node: &LabNode, on: bool) -> Result<()> {
        set_port(&self.world.lan, node.number, on)
    }

    /// The same for its pods' overlay.
    pub fn set_overlay(&self, node: &LabNode, on: bool) -> Result<()> {
        if let Some(ovn) = &self.ovn {
            return ovn.set_geneve(&self.world.lan, node.number, on);
        }
        set_port(&self.overlay, node.number, on)
    }

    /// Unplugs the node's pods from their router, or plugs them in again.
    pub fn set_pods(&self, node: &LabNode, on: bool) -> Result<()> {
        let state = if on { "up" } else { "down" };
        for place in 0..self.pods_on(node.number).count() {
            node.pod_ports().exec("ip", &["link", "set", &topology::pod_port(place), state])?;
        }
        Ok(())
    }

    /// Takes the carrier of the node's uplink, or gives it back.
    pub fn set_carrier(&self, node: &LabNode, on: bool) -> Result<()> {
        let state = if on { "up" } else { "down" };
        self.world.lan.exec("ip", &["link", "set", &topology::port_of(node.number), state]).map(drop)
    }

    /// Deletes the node's `breth0` and recreates it, as a restart of the external bridge does.
    pub fn remake_uplink(&self, node: &LabNode) -> Result<()> {
        if let Some(ovn) = &self.ovn {
            return ovn.remake_uplink(node);
        }
        let device = if node.config.macvlan_uplink { topology::LOWER } else { UPLINK };
        node.host.exec("ip", &["link", "del", device])?;
        let (links, config) = topology::uplink_again(node, &self.world.lan);
        script::ip(&node.host, &links)?;
        self.world.lan.exec("ip", &["link", "set", &topology::port_of(node.number), "master", "br0", "up"])?;
        topology::offloads_again(&node.host, &node.config, &[device, UPLINK])?;
        script::ip(&node.host, &config)
    }

    /// Deletes the node's mp0 and recreates it.
    pub fn remake_management(&self, node: &LabNode) -> Result<()> {
        self.remove_management(node)?;
        self.make_management(node)
    }

    /// Of OVN-Kubernetes' kind.
    pub fn remove_management(&self, node: &LabNode) -> Result<()> {
        if let Some(ovn) = &self.ovn {
            return ovn.remove_management(node);
        }
        node.host.exec("ip", &["link", "del", MANAGEMENT]).map(drop)
    }

    pub fn make_management(&self, node: &LabNode) -> Result<()> {
        if let Some(ovn) = &self.ovn {
            return ovn.make_management(node);
        }
        let (links, config) = topology::management_again(node);
        script::ip(&node.host, &links)?;
        node.router.exec("ip", &["link", "set", "mp0", "master", "br0", "up"])?;
        topology::offloads_again(&node.host, &node.config, &[MANAGEMENT])?;
        script::ip(&node.host, &config)
    }

    /// Adds translations to the node's service proxy.
    pub fn add_services(&self, node: &LabNode, services: &[LabService]) -> Result<()> {
        if let Some(ovn) = &self.ovn {
            return ovn.add_services(node, services);
        }
        let lines = services.iter().map(|one| firewall::service(one.front, one.protocol, one.backend) + "\n");
        node.host.feed("nft", &["-f", "-"], &lines.collect::<String>())
    }

    /// Takes the lab down and says what could not be removed; dropping it does the same and only prints that.
    pub fn tear_down(self) -> Result<()> {
        self.ledger.tear_down()
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if let Err(error) = self.ledger.tear_down() {
            eprintln!("lab: {error:#}");
        }
    }
}

impl LabNode {
    pub fn name(&self) -> String {
        self.number.name()
    }

    /// The node's address that a server sees, [`plan::SERVER`] or [`plan::SERVER2`].
    pub fn address_towards(&self, server: Dual) -> Dual {
        let is_by_second = server == plan::SERVER2 && self.config.second.is_some();
        if is_by_second { self.number.second_address() } else { self.number.address() }
    }

    /// Replaces what the node translates for load balancers.
    pub fn set_load_balancer(&self, ports: &[LoadBalancerPort]) -> Result<()> {
        self.host.feed("nft", &["-f", "-"], &firewall::load_balancer(self.management_port(), ports))
    }
}
