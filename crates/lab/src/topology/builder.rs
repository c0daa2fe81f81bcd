//! Building a lab: what it shall be like, then the order in which it comes up.
//!
//! Claim a prefix, write down and make all namespaces, run the scripts of [`super::topology`], mount the bpffs, add
//! the services. A failure on the way drops the half-built lab, which tears itself down.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use anyhow::{Context, Result, anyhow, ensure};
use nix::mount::{MsFlags, mount};

use super::addresses::{self as plan, HTTP_PORT, NodeNumber};
use super::host_config::{Cni, HostConfig};
use super::lab::{Lab, LabNode, LabPod, LabService};
use super::ledger::{LabLedger, LabPrefix, Resource};
use super::netns::Netns;
use super::ovn::Ovn;
use super::script::{self, CHECKSUMS, Script};
use super::second::SecondNetwork;
use super::signals;
use super::{self as topology, World};

/// A pod to be: where it runs and what Kubernetes will know about it.
#[derive(Debug, Clone)]
pub struct PodSpec {
    pub name: String,
    pub namespace: String,
    pub labels: BTreeMap<String, String>,
    /// Index of the node, from 0.
    pub node: usize,
}

/// What is in the place of OVN-Kubernetes in a lab.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum Ground {
    /// The kernel's own forwarding, in the same layout
    #[default]
    Routed,
    /// Open vSwitch and OVN, with the datapath of Open vSwitch in user space
    Ovn,
    /// The same with the kernel's datapath: modules `openvswitch` and `vport-geneve`
    OvnKernel,
}

/// Names the ground of labs whose builder does not choose one: the tests' runner sets it for each test.
pub const GROUND: &str = "EGRESS_LAB_GROUND";

impl fmt::Display for Ground {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Routed => "routed",
            Self::Ovn => "ovn",
            Self::OvnKernel => "ovn-kernel",
        })
    }
}

impl Ground {
    pub fn is_ovn(self) -> bool {
        match self {
            Self::Ovn | Self::OvnKernel => true,
            Self::Routed => false,
        }
    }

    /// That of [`GROUND`].
    pub fn of_environment() -> Result<Self> {
        let Some(name) = std::env::var_os(GROUND) else { return Ok(Self::default()) };
        let name = name.to_string_lossy();
        clap::ValueEnum::from_str(&name, false).map_err(|error| anyhow!("{GROUND}: {error}"))
    }
}

/// What the lab shall be like.
pub struct LabBuilder {
    prefix: LabPrefix,
    nodes: usize,
    pods: Vec<PodSpec>,
    host_config: Box<dyn Fn(usize) -> HostConfig>,
    server_checksum_offload: bool,
    logs: Option<PathBuf>,
    ground: Option<Ground>,
}

impl Default for LabBuilder {
    /// Three nodes without pods, with mixed host options, named by the process.
    fn default() -> Self {
        Self {
            prefix: LabPrefix::OfProcess,
            nodes: 3,
            pods: Vec::new(),
            host_config: Box::new(HostConfig::mixed),
            server_checksum_offload: true,
            logs: None,
            ground: None,
        }
    }
}

impl LabBuilder {
    /// A prefix that people can type; a number is added while another lab has it.
    pub fn readable_prefix(mut self, prefix: &str) -> Self {
        self.prefix = LabPrefix::Readable(prefix.to_owned());
        self
    }

    pub fn nodes(mut self, nodes: usize) -> Self {
        self.nodes = nodes;
        self
    }

    /// So many pods on each node, in namespace `default`: `pod1-1` is the first pod of node 1.
    pub fn pods_per_node(mut self, pods: usize) -> Self {
        for node in 0..self.nodes {
            self.pods.extend((1..=pods).map(|place| PodSpec {
                name: format!("pod{}-{place}", node + 1),
                namespace: "default".to_owned(),
                labels: BTreeMap::new(),
                node,
            }));
        }
        self
    }

    pub fn pod(mut self, pod: PodSpec) -> Self {
        self.pods.push(pod);
        self
    }

    /// The host options of each node, by its index from 0.
    pub fn host_config(mut self, host_config: impl Fn(usize) -> HostConfig + 'static) -> Self {
        self.host_config = Box::new(host_config);
        self
    }

    /// The outside server computes checksums itself, so that answers are complete on the wire.
    pub fn server_without_checksum_offload(mut self) -> Self {
        self.server_checksum_offload = false;
        self
    }

    /// Logs go here and stay; without this they go with the lab.
    pub fn keep_logs(mut self, folder: PathBuf) -> Self {
        self.logs = Some(folder);
        self
    }

    /// What is in the place of OVN-Kubernetes.
    pub fn ground(mut self, ground: Ground) -> Self {
        self.ground = Some(ground);
        self
    }

    pub fn start(self) -> Result<Lab> {
        signals::tear_down_on_signal()?;
        let mut lab = self.plan()?;
        lab.build(self.server_checksum_offload)?;
        Ok(lab)
    }

    /// The options of each node. Open vSwitch has the uplink as a bridge. In user space it passes unfinished packets on all nodes
    /// or on none.
    fn host_configs(&self, ground: Ground) -> Result<Vec<HostConfig>> {
        let mut configs: Vec<HostConfig> = (0..self.nodes).map(&self.host_config).collect();
        if ground.is_ovn() {
            let routed = configs.iter_mut().filter(|config| config.cni == Cni::Routed);
            routed.for_each(|config| config.cni = Cni::Ovn);
        }
        if configs.iter().any(|config| config.cni == Cni::Ovn) {
            let offload = configs.iter().all(|config| config.checksum_offload && config.segmentation_offload);
            for config in &mut configs {
                config.macvlan_uplink = false;
                if ground == Ground::Ovn {
                    (config.checksum_offload, config.segmentation_offload) = (offload, offload);
                }
            }
        }
        Ok(configs)
    }

    fn plan(&self) -> Result<Lab> {
        ensure!(self.nodes > 0, "a lab needs a node");
        let numbers = (1..=self.nodes).map(NodeNumber::new).collect::<Result<Vec<_>>>()?;
        ensure!(self.pods.iter().all(|pod| pod.node < self.nodes), "a pod names a node that the lab has not");
        let ledger = LabLedger::claim(self.prefix.clone())?;
        let netns = |role: &str| Netns::new(ledger.prefix(), role);
        let ground = self.ground.map_or_else(Ground::of_environment, Ok)?;
        let configs = self.host_configs(ground)?;
        let node = |number: &NodeNumber| {
            let host = netns(&number.name());
            let router = netns(&format!("r{}", number.index() + 1));
            let bpffs = ledger.folder().join("bpf").join(number.name());
            let socket = ledger.folder().join(format!("{}.sock", number.name()));
            LabNode { number: *number, host, router, config: configs[number.index()].clone(), bpffs, socket }
        };
        let nodes: Vec<LabNode> = numbers.iter().map(node).collect();
        let pods = plan_pods(&self.pods, &nodes, &netns)?;
        let world = outside(&netns);
        let second = nodes.iter().any(|node| node.config.second.is_some()).then(|| SecondNetwork::new(&netns));
        let logs = self.logs.clone().unwrap_or_else(|| ledger.folder().join("logs"));
        Ok(Lab { nodes, pods, world, second, overlay: netns("ovl"), ground, ovn: None, logs, ledger })
    }
}

fn plan_pods(specs: &[PodSpec], nodes: &[LabNode], netns: &dyn Fn(&str) -> Netns) -> Result<Vec<LabPod>> {
    let mut used = vec![0; nodes.len()];
    let mut pods = Vec::with_capacity(specs.len());
    for spec in specs {
        let place = used[spec.node];
        used[spec.node] += 1;
        pods.push(LabPod {
            name: spec.name.clone(),
            namespace: spec.namespace.clone(),
            labels: spec.labels.clone(),
            node: nodes[spec.node].number,
            addresses: nodes[spec.node].number.pod(place, nodes[spec.node].config.cni)?,
            cni: nodes[spec.node].config.cni,
            netns: netns(&spec.name),
        });
    }
    Ok(pods)
}

fn outside(netns: &dyn Fn(&str) -> Netns) -> World {
    World {
        lan: netns("lan"),
        ext: netns("ext"),
        server: netns("server"),
        on_lan: plan::EXT,
        lan_lengths: (16, 64),
        behind: plan::EXT_BEHIND,
        address: plan::SERVER,
    }
}

impl Lab {
    fn build(&mut self, server_checksum_offload: bool) -> Result<()> {
        std::fs::create_dir_all(&self.logs)?;
        let scripts = self.scripts(server_checksum_offload)?;
        let namespaces: Vec<Netns> = scripts.iter().map(|script| script.netns.clone()).collect();
        self.ledger.make_namespaces(&namespaces)?;
        script::execute(&scripts)?;
        if self.is_on_ovn() {
            self.ovn = Some(Ovn::start(self.ground, &self.ledger.folder(), &self.logs, &self.nodes, &self.pods)?);
        }
        if let Some(second) = &self.second {
            second.finish()?;
            let on_it = self.nodes.iter().filter(|node| node.config.second.is_some());
            on_it.into_iter().try_for_each(|node| self.make_second(node))?;
        }
        self.mount_bpffs()?;
        self.publish_service()
    }

    fn is_on_ovn(&self) -> bool {
        self.nodes.iter().any(|node| node.config.cni == Cni::Ovn)
    }

    fn scripts(&self, server_checksum_offload: bool) -> Result<Vec<Script>> {
        let numbers: Vec<NodeNumber> = self.nodes.iter().map(|node| node.number).collect();
        let mut ports: Vec<String> = numbers.iter().map(|number| topology::port_of(*number)).collect();
        let is_on_ovn = self.is_on_ovn();
        let mut scripts = Vec::new();
        if !is_on_ovn {
            scripts.push(topology::bridge(&self.overlay, &ports));
        }
        ports.push("ext".to_owned());
        scripts.push(topology::bridge(&self.world.lan, &ports));
        // In user space Open vSwitch reads a veth's packets as they are: unless it passes unfinished ones, nothing may send them.
        let finished = self.ground == Ground::Ovn && self.nodes.iter().any(|node| !node.config.checksum_offload);
        let [mut ext, server] = topology::world(&self.world, server_checksum_offload && !finished);
        if finished {
            ext.switch_off(topology::EXT_LAN, CHECKSUMS);
            ext.switch_off(topology::BEHIND, CHECKSUMS);
        }
        if let Some(second) = &self.second {
            scripts.extend(second.scripts(&mut ext, server_checksum_offload));
        }
        scripts.extend([ext, server]);
        for node in &self.nodes {
            let pods: Vec<&LabPod> = self.pods_on(node.number).collect();
            let others: Vec<NodeNumber> = numbers.iter().copied().filter(|other| *other != node.number).collect();
            scripts.push(topology::host(node, pods.len(), &others, &self.world.lan));
            if !is_on_ovn {
                scripts.push(topology::router(node, pods.len(), &self.overlay, &others));
            }
            let pods = pods.into_iter().enumerate();
            scripts.extend(pods.map(|(place, pod)| topology::pod(node, place, &pod.netns, pod.addresses)));
        }
        Ok(scripts)
    }

    /// One bpffs of the lab's own, with a folder for each node's agent.
    fn mount_bpffs(&self) -> Result<()> {
        let point = self.ledger.folder().join("bpf");
        std::fs::create_dir_all(&point)?;
        self.ledger.make(vec![Resource::Mount(point.clone())], || {
            mount(Some("bpf"), &point, Some("bpf"), MsFlags::empty(), None::<&str>).context("cannot mount a bpffs")
        })?;
        for node in &self.nodes {
            std::fs::create_dir(&node.bpffs)?;
        }
        Ok(())
    }

    /// The lab's service: its ClusterIP leads to the first pod of all, a node's NodePort to the first pod there.
    fn publish_service(&self) -> Result<()> {
        let Some(backend) = self.pods.first() else { return Ok(()) };
        for node in self.nodes.iter().filter(|node| node.config.service_proxy) {
            let mut services = Vec::new();
            for front in plan::SERVICE.both() {
                let backend = SocketAddr::new(backend.addresses.towards(front), HTTP_PORT);
                services.push(LabService { front: SocketAddr::new(front, 80), protocol: "tcp", backend });
            }
            if let Some(local) = self.pods.iter().find(|pod| pod.node == node.number) {
                services.extend(node.number.address().both().map(|front| node_port(front, local)));
            }
            self.add_services(node, &services)?;
        }
        Ok(())
    }
}

fn node_port(front: IpAddr, pod: &LabPod) -> LabService {
    let backend = SocketAddr::new(pod.addresses.towards(front), HTTP_PORT);
    LabService { front: SocketAddr::new(front, plan::NODE_PORT), protocol: "tcp", backend }
}
