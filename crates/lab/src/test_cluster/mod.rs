//! The test cluster: a lab with an API server, agents and a server outside. Everything that is played on a lab begins with it.

pub mod placement;

use std::fmt;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::agents::{Agent, AgentOptions, Controller};
use crate::api_objects::{ASSIGNABLE, EGRESS_IPS, EVENTS, LEASE, LEDGER, assigned, path_of};
use crate::kube_api::{ApiChoice, KubeApi};
use crate::pins::AgentPins;
use crate::test::LabContext;
use crate::topology::addresses::{self as plan, Dual, HTTP_PORT, NodeNumber};
use crate::topology::builder::{LabBuilder, PodSpec};
use crate::topology::host_config::HostConfig;
use crate::topology::lab::{Lab, LabPod};
use crate::topology::netns::Netns;
use crate::traffic::access_log::AccessLog;
use crate::traffic::client;
use crate::traffic::server::Server;
use crate::wait::{EFFECT, REPORTED, until, until_equal, until_true};
use egress_toolchain::Paths;

/// A lab with its API server, agents and a server outside. Fields are dropped in this order: traffic first, the lab last.
pub struct TestCluster {
    pub agents: Vec<Agent>,
    /// Outside; the benchmark runs without one.
    pub server: Option<Server>,
    /// Behind the second network, if nodes are on it.
    pub second_server: Option<Server>,
    pub api: KubeApi,
    pub lab: Lab,
}

/// A pod to be, on a node that is counted from 1.
pub fn pod(name: &str, namespace: &str, node: usize, labels: &[(&str, &str)]) -> PodSpec {
    PodSpec {
        name: name.to_owned(),
        namespace: namespace.to_owned(),
        labels: labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect(),
        node: node - 1,
    }
}

/// How the world sees a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Observed {
    Source(IpAddr),
    /// No answer, or an error instead of one.
    Nothing,
}

impl From<Option<IpAddr>> for Observed {
    fn from(address: Option<IpAddr>) -> Self {
        address.map_or(Self::Nothing, Self::Source)
    }
}

impl fmt::Display for Observed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Source(address) => write!(f, "seen as {address}"),
            Self::Nothing => f.write_str("not seen"),
        }
    }
}

/// How long the verifier may take for the programs of three agents: a second on an idle machine, and no promise of anybody.
pub const LOADED: Duration = Duration::from_secs(40);

/// The place of a pod that exists for the API server only.
const MARKER: usize = 90;

/// What a request may take here; dropped ones take all of it.
const PATIENCE: Duration = Duration::from_millis(400);

impl TestCluster {
    /// The lab with an API server that knows the kinds, nodes and pods, and without agents. A server outside has `addresses`
    /// more addresses.
    pub fn bring_up(lab: LabBuilder, server_addresses: Option<u8>, api: &ApiChoice) -> Result<Self> {
        Self::bring_up_with(lab, server_addresses, api, |_| {}, |_| Ok(()))
    }

    fn bring_up_with(
        lab: LabBuilder,
        server_addresses: Option<u8>,
        api: &ApiChoice,
        change_crd: impl FnOnce(&mut Value),
        before_publishing: impl FnOnce(&KubeApi) -> Result<()>,
    ) -> Result<Self> {
        let lab = lab.start().context("bring up the lab")?;
        let server = server_addresses
            .map(|server_addresses| Server::outside_with_addresses(&lab, server_addresses))
            .transpose()?;
        let has_second = server.is_some() && lab.second().is_ok();
        let second_server = has_second.then(|| Server::behind_second(&lab)).transpose()?;
        let api = KubeApi::start(&lab, api)?;
        let text = std::fs::read_to_string(Paths::find()?.root.join("deploy/crd/crd.yaml"))?;
        let mut crd: Value = serde_yaml::from_str(&text)?;
        change_crd(&mut crd);
        let file = lab.folder().join("crd.yaml");
        std::fs::write(&file, serde_yaml::to_string(&crd)?)?;
        api.install_crd(&file)?;
        before_publishing(&api)?;
        api.publish(&lab)?;
        Ok(Self { agents: Vec::new(), server, second_server, api, lab })
    }

    /// The same on an API server that may hold objects of an earlier run, which are removed first.
    pub fn bring_up_on(
        lab: LabBuilder,
        api: &ApiChoice,
        clean_up: impl FnOnce(&KubeApi) -> Result<()>,
    ) -> Result<Self> {
        Self::bring_up_with(lab, Some(0), api, |_| {}, clean_up)
    }

    /// What the server outside has seen.
    pub fn access_log(&self) -> Result<&AccessLog> {
        Ok(self.server.as_ref().context("no server runs outside")?.log())
    }

    /// Starts an agent on each node.
    pub fn start_agents(&mut self, options: &AgentOptions) -> Result<()> {
        self.agents = Agent::start_all(&self.lab, options)?;
        Ok(())
    }

    /// Three nodes with these pods, published, and agents that serve.
    pub fn start(context: &LabContext, pods: Vec<PodSpec>) -> Result<Self> {
        Self::start_with(context, pods, &[])
    }

    /// The same with more arguments of the agents.
    pub fn start_with(context: &LabContext, pods: Vec<PodSpec>, extra: &[&str]) -> Result<Self> {
        Self::without_agents(context, pods)?.serving(context, extra)
    }

    /// The same with more addresses of the server, and another definition of EgressIP.
    pub fn with_crd(
        context: &LabContext,
        pods: Vec<PodSpec>,
        server_addresses: u8,
        change_crd: impl FnOnce(&mut Value),
    ) -> Result<Self> {
        let lab = Self::three_nodes(context, pods);
        let cluster = Self::bring_up_with(lab, Some(server_addresses), &ApiChoice::new(None), change_crd, |_| Ok(()))?;
        cluster.serving(context, &[])
    }

    pub fn without_agents(context: &LabContext, pods: Vec<PodSpec>) -> Result<Self> {
        Self::bring_up(Self::three_nodes(context, pods), Some(0), &ApiChoice::new(None))
    }

    fn three_nodes(context: &LabContext, pods: Vec<PodSpec>) -> LabBuilder {
        let cni = context.cni;
        let config = move |index| HostConfig { cni, ..HostConfig::mixed(index) };
        let builder = LabBuilder::default().nodes(3).host_config(config).keep_logs(context.logs.clone());
        pods.into_iter().fold(builder, LabBuilder::pod)
    }

    fn serving(mut self, context: &LabContext, extra: &[&str]) -> Result<Self> {
        self.start_agents(&self.options(context).with(extra.iter().copied()))?;
        self.agents_serve()?;
        Ok(self)
    }

    /// From now on watches are late by up to half a second, each by another time, and lists from the API server's cache are as old:
    /// agents never know the same. A server that is not the lab's own is as it is.
    pub fn lag(&self, seed: u64) {
        println!("watches are late, by seed {seed}");
        self.api.in_memory().into_iter().for_each(|server| server.lag(seed, 0..=500));
    }

    pub fn options(&self, context: &LabContext) -> AgentOptions {
        AgentOptions::new(&context.built.agent, &self.api)
    }

    /// Waits until each agent has brought its kernel to the state of the cluster once: its pods are in its map then.
    pub fn agents_serve(&mut self) -> Result<()> {
        for number in 1..=self.agents.len() {
            self.serves(number)?;
        }
        Ok(())
    }

    /// Waits until this agent, in its present run, has brought its kernel to the state of the cluster: a pod that is
    /// made now is in its map, and out of it when it is deleted.
    pub fn serves(&mut self, number: usize) -> Result<()> {
        self.loaded(number)?;
        let node = self.lab.node(node(number)?);
        let pins = AgentPins::of(node);
        let pod = LabPod {
            name: format!("marker{number}"),
            namespace: "default".to_owned(),
            labels: std::collections::BTreeMap::new(),
            node: node.number,
            addresses: node.number.pod(MARKER, node.config.cni)?,
            cni: node.config.cni,
            netns: node.host.clone(),
        };
        let end = format!("\"0x{:02x}\"]", pod.addresses.v4.octets()[3]);
        let known = || Ok::<_, anyhow::Error>(pins.pods()?.iter().filter(|key| key.ends_with(&end)).count());
        self.api.publish_pod(&pod)?;
        let there = until_true(&format!("the agent of node{number} serves"), EFFECT, || {
            Ok(known().is_ok_and(|count| count > 0))
        });
        self.api.delete(&format!("/api/v1/namespaces/default/pods/{}", pod.name))?;
        there?;
        until_true(&format!("and forgets on node{number}"), EFFECT, || Ok(known()? == 0))
    }

    /// Waits until this agent's programs are at work.
    pub fn loaded(&mut self, number: usize) -> Result<()> {
        until_true(&format!("the agent of node{number} has loaded its programs"), LOADED, || {
            let agent = self.agent(number)?;
            agent.ensure_alive()?;
            agent.has_loaded()
        })
    }

    pub fn agent(&mut self, node: usize) -> Result<&mut Agent> {
        self.agents.get_mut(node - 1).with_context(|| format!("there is no agent of node {node}"))
    }

    pub fn controller(&mut self, node: usize) -> Result<&mut Controller> {
        self.agent(node)?.controller()
    }

    pub fn pod(&self, name: &str) -> Result<&LabPod> {
        self.lab.pod(name)
    }

    pub fn assignable(&self, node: usize, on: bool) -> Result<()> {
        let label = if on { json!("") } else { Value::Null };
        self.label(&format!("/api/v1/nodes/node{node}"), ASSIGNABLE, &label)
    }

    pub fn label(&self, path: &str, key: &str, value: &Value) -> Result<()> {
        self.api.merge(path, &json!({"metadata": {"labels": {key: value}}}))
    }

    pub fn pod_path(&self, name: &str) -> Result<String> {
        let pod = self.pod(name)?;
        Ok(format!("/api/v1/namespaces/{}/pods/{}", pod.namespace, pod.name))
    }

    pub fn label_pod(&self, name: &str, key: &str, value: Option<&str>) -> Result<()> {
        self.label(&self.pod_path(name)?, key, &json!(value))
    }

    pub fn label_namespace(&self, name: &str, key: &str, value: Option<&str>) -> Result<()> {
        self.label(&format!("/api/v1/namespaces/{name}"), key, &json!(value))
    }

    /// Creates or replaces an object and waits until all its addresses are assigned.
    pub fn assign(&self, object: &Value) -> Result<Vec<(String, String)>> {
        self.put(object)?;
        let path = path_of(object);
        let wanted = object.pointer("/spec/egressIPs").and_then(Value::as_array).map_or(0, Vec::len);
        until(&format!("{path} is assigned"), EFFECT, || {
            let pairs = self.api.get(&path)?.as_ref().map(assigned).unwrap_or_default();
            Ok((pairs.len() == wanted).then_some(pairs))
        })
    }

    pub fn put(&self, object: &Value) -> Result<()> {
        let path = path_of(object);
        match self.api.get(&path)? {
            Some(_) => self.api.replace(&path, object),
            None => self.api.create(EGRESS_IPS, object).map(drop),
        }
    }

    pub fn remove(&self, name: &str) -> Result<()> {
        self.api.delete(&format!("{EGRESS_IPS}/{name}"))
    }

    /// The node of an object's first address, by its status; empty without one.
    pub fn holder(&self, object: &str) -> Result<String> {
        let object = self.api.get(&format!("{EGRESS_IPS}/{object}"))?.unwrap_or_default();
        Ok(assigned(&object).first().map(|(_, node)| node.clone()).unwrap_or_default())
    }

    /// Whether the node's programs own an egress IP.
    pub fn owns(&self, number: usize) -> Result<bool> {
        Ok(!AgentPins::of(self.lab.node(node(number)?)).keys("owned_addr")?.is_empty())
    }

    /// The node of the controller that leads, and its last renewal of the Lease.
    pub fn leader(&self) -> Result<Option<(NodeNumber, String)>> {
        let Some(lease) = self.api.get(LEASE)? else { return Ok(None) };
        let holder = lease["spec"]["holderIdentity"].as_str().unwrap_or_default();
        let Some((node, _)) = holder.split_once('_') else { return Ok(None) };
        Ok(Some((NodeNumber::of(node)?, lease["spec"]["renewTime"].to_string())))
    }

    /// Whether the leases of all nodes have an end: that of a node that is the only one that could host its addresses has none,
    /// and nothing of it is given away before its agent has heard of another.
    pub fn leases_have_an_end(&self) -> Result<bool> {
        let ledger = self.api.get(LEDGER)?.unwrap_or_default();
        Ok(["endless-leases", "ending-leases"].iter().all(|key| ledger["data"][key].is_null()))
    }

    /// Cuts the API server off, or connects it again.
    pub fn set_outage(&self, is_out: bool) -> Result<()> {
        self.api.in_memory().context("only the lab's own API server can be stopped")?.set_outage(is_out);
        Ok(())
    }

    /// Waits until the world sees the namespace's requests like this.
    pub fn becomes(&self, from: &Netns, to: IpAddr, expected: Observed) -> Result<()> {
        let what = format!("{} -> {}", from.name(), if to.is_ipv4() { "IPv4" } else { "IPv6" });
        until_equal(&what, &expected, || observe(from, to))
    }

    /// The same for a pod of the lab, without and with an egress IP, to both families.
    pub fn is_seen_as(&self, name: &str, v4: Option<&str>, v6: Option<&str>) -> Result<()> {
        self.is_seen_at(plan::SERVER, name, v4, v6)
    }

    /// The same at [`plan::SERVER`] or [`plan::SERVER2`].
    pub fn is_seen_at(&self, server: Dual, name: &str, v4: Option<&str>, v6: Option<&str>) -> Result<()> {
        let pod = self.pod(name)?;
        for (to, egress) in server.both().into_iter().zip([v4, v6]) {
            let expected = match egress {
                Some(address) => address.parse().with_context(|| format!("{address} is no address"))?,
                None => self.lab.node(pod.node).address_towards(server).towards(to),
            };
            self.becomes(&pod.netns, to, Observed::Source(expected))?;
        }
        Ok(())
    }

    /// Waits for an event about an object and returns its message.
    pub fn event(&self, object: &str, reason: &str) -> Result<String> {
        until(&format!("event {reason} about {object}"), REPORTED, || {
            let list = self.api.get(EVENTS)?.unwrap_or_default();
            let events = list["items"].as_array().cloned().unwrap_or_default();
            let ours = |event: &&Value| event["involvedObject"]["name"] == object && event["reason"] == reason;
            Ok(events.iter().find(ours).and_then(|event| event["message"].as_str()).map(str::to_owned))
        })
    }

    /// Ends agents, API server and server, and takes the lab down.
    pub fn tear_down(self) -> Result<()> {
        let Self { agents, server, second_server, api, lab } = self;
        drop((agents, server, second_server, api));
        lab.tear_down()
    }

    /// For a failed test: the end of the logs of agents and controllers.
    pub fn log_tails(&self) -> String {
        self.agents.iter().map(Agent::log_tails).collect()
    }
}

/// One request to the server outside.
pub fn observe(from: &Netns, to: IpAddr) -> Result<Observed> {
    match client::get_within(from, SocketAddr::new(to, HTTP_PORT), "/", "lifecycle", PATIENCE)? {
        Ok(reply) => Ok(Observed::Source(reply.seen_as()?)),
        Err(error) => {
            // These are the network's; anything else is a broken lab.
            let usual = [
                ErrorKind::TimedOut,
                ErrorKind::WouldBlock,
                ErrorKind::ConnectionRefused,
                ErrorKind::ConnectionReset,
                ErrorKind::HostUnreachable,
                ErrorKind::NetworkUnreachable,
                ErrorKind::UnexpectedEof,
                ErrorKind::PermissionDenied,
            ];
            ensure!(usual.contains(&error.kind()), "{}: {error}", from.name());
            Ok(Observed::Nothing)
        }
    }
}

pub fn node(number: usize) -> Result<NodeNumber> {
    NodeNumber::new(number)
}
