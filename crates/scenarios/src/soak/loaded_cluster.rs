//! The cluster of soak and faults: a [`TestCluster`] whose nodes may all host egress IPs, with objects of one address each (IPv4,
//! IPv6, and on request one of a further interface), and on each node a pod of each object that sends without pause.

use std::net::TcpStream;

use super::echo::{self, EchoServer};
use super::sampler::Sampler;
use super::streams::Streams;
use crate::prelude::*;
use egress_lab::SecondNic;
use egress_lab::api_objects::{EGRESS_NODES, HEALTH_PORT, NODES};
use egress_lab::apiserver::ApiServer;
use egress_lab::capture::CapturedPacket;
use egress_lab::kube_api::ApiChoice;
use egress_lab::machine::StoppedMachine;
use egress_lab::process::last_lines;
use egress_toolchain::Built;

/// How large it is, and what its processes are started with.
pub(crate) struct ClusterShape<'a> {
    pub(crate) nodes: usize,
    /// The first nodes that may host egress IPs, by number: they get the addresses. All others may host them later.
    pub(crate) hosts: &'a [usize],
    /// More arguments of agents and controllers.
    pub(crate) arguments: &'a [&'a str],
    /// Nodes have a second network, and an object has an address of it ([`FAR`]).
    pub(crate) second: bool,
}

impl ClusterShape<'_> {
    /// The soak's: addresses are where the controller puts them.
    pub(crate) const SOAK: Self = Self { nodes: 3, hosts: &[1, 2, 3], arguments: &[], second: true };
}

const NAMESPACE: &str = "soak";
/// The object whose address is of a further interface, after those of the uplink.
pub(crate) const FAR: usize = 2;
const SUBJECTS: [AlternatingPolicy; 3] = [
    AlternatingPolicy { name: "four", addresses: ["172.18.0.110", "172.18.0.111"], turn: 0 },
    AlternatingPolicy { name: "six", addresses: ["fd00:172:18::110", "fd00:172:18::111"], turn: 0 },
    AlternatingPolicy { name: "far", addresses: ["10.10.10.110", "10.10.10.111"], turn: 0 },
];
/// How long the cluster may take until it serves for the first time.
const PATIENCE: Duration = Duration::from_secs(60);

/// An object, and the addresses that it has in turns.
#[derive(Clone)]
pub(crate) struct AlternatingPolicy {
    pub(crate) name: &'static str,
    addresses: [&'static str; 2],
    /// Which of them it has now.
    turn: usize,
}

impl AlternatingPolicy {
    /// The address that the object has.
    pub(crate) fn address(&self) -> Result<IpAddr> {
        Ok(self.addresses[self.turn].parse()?)
    }

    fn object(&self) -> Value {
        let namespaces = labels("kubernetes.io/metadata.name", NAMESPACE);
        egress_ip(self.name, &[self.addresses[self.turn]], &namespaces, &labels("object", self.name))
    }
}

/// A pod that calls without end, at an address of its own.
pub(crate) struct LoadCaller {
    pub(crate) node: NodeNumber,
    pub(crate) subject: usize,
    pub(crate) server_address: IpAddr,
    /// What it may bear while no object selects it.
    pub(crate) own: BTreeSet<IpAddr>,
    pub(crate) sampler: Sampler,
    pub(crate) streams: Streams,
}

/// Fields are dropped in this order: callers first, the lab last.
pub(crate) struct LoadedCluster {
    pub(crate) callers: Vec<LoadCaller>,
    /// Of the nodes' network, and of the second one.
    pub(crate) captures: Vec<Capture>,
    /// The machine that is stopped.
    pub(crate) stopped: Option<StoppedMachine>,
    pub(crate) subjects: Vec<AlternatingPolicy>,
    echoes: Vec<EchoServer>,
    pub(crate) base: TestCluster,
}

fn pods(nodes: usize, subjects: &[AlternatingPolicy]) -> impl Iterator<Item = PodSpec> {
    (1..=nodes).flat_map(move |node| {
        let of = move |one: &AlternatingPolicy| {
            pod(&format!("{}{node}", one.name), NAMESPACE, node, &[("object", one.name)])
        };
        subjects.iter().map(of)
    })
}

impl LoadedCluster {
    pub(crate) fn start(shape: &ClusterShape<'_>, built: &Built, prefix: Option<&str>, logs: PathBuf) -> Result<Self> {
        let subjects = SUBJECTS[..if shape.second { FAR + 1 } else { FAR }].to_vec();
        let mut builder = LabBuilder::default().nodes(shape.nodes).keep_logs(logs);
        if shape.second {
            let second = |index| HostConfig { second: Some(SecondNic::default()), ..HostConfig::mixed(index) };
            builder = builder.host_config(second);
        }
        let specs: Vec<PodSpec> = pods(shape.nodes, &subjects).collect();
        let server_addresses = u8::try_from(specs.len())?;
        let mut builder = specs.into_iter().fold(builder, LabBuilder::pod);
        if let Some(prefix) = prefix {
            builder = builder.readable_prefix(prefix);
        }
        let mut base = TestCluster::bring_up(builder, Some(server_addresses), &ApiChoice::InMemory)?;
        let addresses: Vec<IpAddr> =
            (0..server_addresses).flat_map(|number| plan::server_address(number).both()).collect();
        let mut echoes = vec![EchoServer::start(base.lab.outside(), &addresses)?];
        if shape.second {
            echoes.push(EchoServer::start(&base.lab.second()?.world.server, &plan::SERVER2.both())?);
        }
        // A socket for each sample: flows that are forgotten soon leave ports for those that come.
        let options = AgentOptions::new(&built.agent, &base.api).with(["--udp-timeout=20"]);
        base.start_agents(&options.with(shape.arguments.iter().copied()))?;
        let mut captures = vec![Capture::watching_owners(&base.lab, addresses.into_iter().collect())?];
        if shape.second {
            captures.push(Capture::watching_owners_on_second(&base.lab, plan::SERVER2.both().into())?);
        }
        let (callers, stopped) = (Vec::new(), None);
        let mut cluster = Self { callers, captures, stopped, subjects, echoes, base };
        cluster.serve(shape)?;
        cluster.callers = cluster.call()?;
        Ok(cluster)
    }

    /// Nodes host addresses, objects have them, and agents are ready.
    fn serve(&mut self, shape: &ClusterShape<'_>) -> Result<()> {
        let (hosts, others): (Vec<_>, Vec<_>) =
            self.nodes().into_iter().partition(|node| shape.hosts.contains(&(node.index() + 1)));
        hosts.iter().try_for_each(|node| self.assignable(*node, true))?;
        for subject in 0..self.subjects.len() {
            self.create(subject)?;
        }
        let end = Instant::now() + PATIENCE;
        loop {
            // First: one that has ended is named at once, whatever else is missing for it.
            let agents = self.silent_agent()?;
            let unassigned = self.unassigned()?;
            if agents.is_none() && unassigned.is_none() {
                break;
            }
            let missing: Vec<String> = agents.into_iter().chain(unassigned).collect();
            let seconds = PATIENCE.as_secs();
            ensure!(Instant::now() < end, "the cluster does not serve after {seconds} s: {}", missing.join("; "));
            std::thread::sleep(Duration::from_millis(100));
        }
        others.iter().try_for_each(|node| self.assignable(*node, true))?;
        // Agents learn of pods and addresses within moments; an unselected pod bears its node's address.
        std::thread::sleep(Duration::from_secs(2));
        Ok(())
    }

    fn call(&self) -> Result<Vec<LoadCaller>> {
        let call = |(pod, number): (&egress_lab::LabPod, u8)| {
            let is_of = |subject: &AlternatingPolicy| pod.name.starts_with(subject.name);
            let subject = self.subjects.iter().position(is_of).context("a pod of no object")?;
            // Beyond the second network there is one server for all.
            let server = if subject == FAR { plan::SERVER2 } else { plan::server_address(number) };
            let server_address = server.towards(self.subjects[subject].address()?);
            let own = [pod.node.address(), pod.node.second_address(), pod.addresses].map(|one| one.both());
            let own = own.concat().into_iter().collect();
            Ok(LoadCaller {
                node: pod.node,
                subject,
                server_address,
                own,
                sampler: Sampler::start(&pod.netns, SocketAddr::new(server_address, echo::PORT))?,
                streams: Streams::start(&pod.netns, SocketAddr::new(server_address, ECHO_PORT))?,
            })
        };
        self.base.lab.pods().iter().zip(0..).map(call).collect()
    }

    pub(crate) fn nodes(&self) -> Vec<NodeNumber> {
        self.base.lab.nodes().iter().map(|node| node.number).collect()
    }

    pub(crate) fn agent(&mut self, node: NodeNumber) -> &mut Agent {
        &mut self.base.agents[node.index()]
    }

    pub(crate) fn assignable(&self, node: NodeNumber, on: bool) -> Result<()> {
        let label = if on { json!("") } else { Value::Null };
        let path = format!("{NODES}/{}", node.name());
        self.base.api.merge(&path, &json!({"metadata": {"labels": {ASSIGNABLE: label}}}))
    }

    /// Deletes the Node, and what it owns as the garbage collector does.
    pub(crate) fn delete_node(&self, node: NodeNumber) -> Result<()> {
        for collection in [NODES, EGRESS_NODES] {
            self.base.api.delete(&format!("{collection}/{}", node.name()))?;
        }
        Ok(())
    }

    /// Creates the Node again, as a kubelet does, and gives it its label.
    pub(crate) fn create_node(&self, node: NodeNumber) -> Result<()> {
        self.base.api.publish_node(self.base.lab.node(node))?;
        self.assignable(node, true)
    }

    pub(crate) fn create(&self, subject: usize) -> Result<()> {
        self.base.api.create(EGRESS_IPS, &self.subjects[subject].object()).map(drop)
    }

    pub(crate) fn delete(&self, subject: usize) -> Result<()> {
        self.base.api.delete(&format!("{EGRESS_IPS}/{}", self.subjects[subject].name))
    }

    /// The object gets its other address.
    pub(crate) fn turn(&mut self, subject: usize) -> Result<()> {
        self.subjects[subject].turn = 1 - self.subjects[subject].turn;
        let object = self.subjects[subject].object();
        self.base.api.replace(&format!("{EGRESS_IPS}/{}", self.subjects[subject].name), &object)
    }

    /// The node of each object's address, as its status says.
    pub(crate) fn holders(&self) -> Result<Vec<Option<NodeNumber>>> {
        let holder = |subject: &AlternatingPolicy| {
            let object = self.base.api.get(&format!("{EGRESS_IPS}/{}", subject.name))?.unwrap_or_default();
            let items = object.pointer("/status/items").and_then(Value::as_array).cloned().unwrap_or_default();
            let [item] = items.as_slice() else { return Ok(None) };
            let address: IpAddr = item["egressIP"].as_str().context("an item without an address")?.parse()?;
            if address != subject.address()? {
                return Ok(None);
            }
            NodeNumber::of(item["node"].as_str().unwrap_or_default()).map(Some)
        };
        self.subjects.iter().map(holder).collect()
    }

    /// Whether every agent runs and has brought its kernel in step since it started: then it accepts health checks.
    pub(crate) fn agents_serve(&mut self) -> Result<bool> {
        Ok(self.silent_agent()?.is_none())
    }

    /// One that does not, with the end of its log. One that has ended is an error.
    fn silent_agent(&mut self) -> Result<Option<String>> {
        self.base.agents.iter_mut().try_for_each(Agent::ensure_alive)?;
        for (node, agent) in self.base.lab.nodes().iter().zip(&self.base.agents) {
            let to = SocketAddr::new(node.management().v4.into(), HEALTH_PORT);
            let there = node.host.run(|| Ok(TcpStream::connect_timeout(&to, Duration::from_millis(500)).is_ok()))?;
            if !there {
                let (name, tail) = (node.name(), last_lines(agent.log(), 3));
                return Ok(Some(format!("the agent of {name} takes no health checks; the end of its log:\n{tail}")));
            }
        }
        Ok(None)
    }

    fn unassigned(&self) -> Result<Option<String>> {
        let holders = self.holders()?;
        let mut without = self.subjects.iter().zip(&holders).filter(|(_, holder)| holder.is_none());
        Ok(without.next().map(|(subject, _)| format!("EgressIP {} has no node for its address", subject.name)))
    }

    /// How many watches the API server has.
    pub(crate) fn watches(&self) -> usize {
        self.base.api.in_memory().map_or(0, ApiServer::watches)
    }

    pub(crate) fn wait_for_agents(&mut self) -> Result<()> {
        let end = Instant::now() + PATIENCE;
        while !self.agents_serve()? {
            let silent = self.silent_agent()?.unwrap_or_default();
            ensure!(Instant::now() < end, "an agent does not serve after {} s: {silent}", PATIENCE.as_secs());
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    /// What is right for each object's pods when the cluster is at rest.
    pub(crate) fn egress(&self) -> Result<BTreeMap<usize, IpAddr>> {
        self.subjects.iter().enumerate().map(|(place, subject)| Ok((place, subject.address()?))).collect()
    }

    /// The address that an object has after its next turn.
    pub(crate) fn other_address(&self, subject: usize) -> Result<Option<IpAddr>> {
        let subject = &self.subjects[subject];
        Ok(subject.addresses.get(1 - subject.turn).map(|text| text.parse()).transpose()?)
    }

    /// What nodes have put on the wire since the last call, and how many frames were missed so far.
    pub(crate) fn take_captured(&self) -> (Vec<CapturedPacket>, u32) {
        let (packets, missed): (Vec<_>, Vec<_>) = self.captures.iter().map(Capture::take_captured).unzip();
        (packets.concat(), missed.into_iter().sum())
    }

    /// Ends what calls, and takes the lab down.
    pub(crate) fn finish(self) -> Result<()> {
        let Self { callers, captures, base, echoes, .. } = self;
        for caller in callers {
            caller.sampler.finish()?;
            caller.streams.finish()?;
        }
        captures.into_iter().try_for_each(|capture| capture.finish().map(drop))?;
        echoes.into_iter().try_for_each(EchoServer::finish)?;
        base.tear_down()
    }
}
