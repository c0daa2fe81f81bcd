//! What the tests stand on: a lab of three nodes with real agents, a server outside, Kubernetes, and one EgressIP object
//! whose addresses are put where a test wants them.
//!
//! Each node has two pods: `chosen<n>` is selected by the object, `plain<n>` is not. Where an address goes is steered
//! as people do it: by the label on nodes, one address at a time, since an assignment that is there stays.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use egress_lab::agents::{Agent, AgentOptions};
use egress_lab::cluster::{ApiChoice, Cluster};
use egress_lab::test::LabContext;
use egress_lab::topology::addresses::{self as plan, NodeNumber};
use egress_lab::traffic::client;
use egress_lab::traffic::server::{HTTP_PORT, Server};
use egress_lab::{Lab, LabBuilder, Netns, Node, Pod, PodSpec, Quirks};
use egress_toolchain::Paths;

const EGRESS_IPS: &str = "/apis/k8s.ovn.org/v1/egressips";
const ASSIGNABLE: &str = "k8s.ovn.org/egress-assignable";
const TUNNEL_ID: &str = "k8s.ovn.org/egressip-tunnel-id";
/// The object that selects the chosen pods.
pub(super) const OBJECT: &str = "roads";
pub(super) const NAMESPACE: &str = "roads";

/// Egress IPs of the tests.
pub(super) const FIRST_V4: IpAddr = IpAddr::V4(Ipv4Addr::new(172, 18, 0, 100));
pub(super) const SECOND_V4: IpAddr = IpAddr::V4(Ipv4Addr::new(172, 18, 0, 101));
pub(super) const FIRST_V6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfd00, 0x172, 0x18, 0, 0, 0, 0, 0x100));

/// How long agents may take for what they do at once.
pub(super) const PATIENCE: Duration = Duration::from_secs(20);

/// Fields are dropped in this order: traffic first, the ground last.
pub(super) struct Ground {
    pub(super) agents: Vec<Agent>,
    pub(super) server: Server,
    pub(super) cluster: Cluster,
    pub(super) lab: Lab,
}

impl Ground {
    pub(super) fn start(context: &LabContext, quirks: impl Fn(usize) -> Quirks + 'static) -> Result<Self> {
        let cni = context.cni;
        Self::build(context, LabBuilder::default().quirks(move |index| Quirks { cni, ..quirks(index) }))
    }

    /// The same with a lab of another shape.
    pub(super) fn build(context: &LabContext, builder: LabBuilder) -> Result<Self> {
        Self::build_with(context, builder, &[])
    }

    /// The same with more arguments for the agents.
    pub(super) fn build_with(context: &LabContext, builder: LabBuilder, arguments: &[&str]) -> Result<Self> {
        Self::make(context, builder, arguments, |_, _| Ok(()))
    }

    /// The same after a last word about the cluster before agents start.
    pub(super) fn build_after(
        context: &LabContext,
        builder: LabBuilder,
        last: impl FnOnce(&Lab, &Cluster) -> Result<()>,
    ) -> Result<Self> {
        Self::make(context, builder, &[], last)
    }

    fn make(
        context: &LabContext,
        builder: LabBuilder,
        arguments: &[&str],
        last: impl FnOnce(&Lab, &Cluster) -> Result<()>,
    ) -> Result<Self> {
        let mut builder = builder.nodes(3).keep_logs(context.logs.clone());
        for node in 0..3 {
            for role in ["chosen", "plain"] {
                let labels = [("role".to_owned(), role.to_owned())].into();
                let name = format!("{role}{}", node + 1);
                builder = builder.pod(PodSpec { name, namespace: NAMESPACE.to_owned(), labels, node });
            }
        }
        let lab = builder.start()?;
        let server = Server::outside(&lab)?;
        let cluster = Cluster::start(&lab, &ApiChoice::new(None))?;
        cluster.install_crd(&Paths::find()?.root.join("deploy/crd/crd.yaml"))?;
        cluster.publish(&lab)?;
        last(&lab, &cluster)?;
        let options = AgentOptions::new(&context.built.agent, &cluster).with(arguments.iter().copied());
        let agents = Agent::start_all(&lab, &options)?;
        Ok(Self { agents, server, cluster, lab })
    }

    pub(super) fn node(&self, number: usize) -> Result<&Node> {
        Ok(self.lab.node(NodeNumber::new(number)?))
    }

    pub(super) fn chosen(&self, node: usize) -> Result<&Pod> {
        self.lab.pod(&format!("chosen{node}"))
    }

    pub(super) fn plain(&self, node: usize) -> Result<&Pod> {
        self.lab.pod(&format!("plain{node}"))
    }

    pub(super) fn assignable(&self, node: usize, on: bool) -> Result<()> {
        self.cluster.label_node(&format!("node{node}"), ASSIGNABLE, on.then_some("")).map(drop)
    }

    /// Writes an object that lists these addresses and selects the pods of this role.
    pub(super) fn list(&self, object: &str, role: &str, addresses: &[IpAddr]) -> Result<()> {
        let object = json!({
            "apiVersion": "k8s.ovn.org/v1",
            "kind": "EgressIP",
            "metadata": {"name": object},
            "spec": {
                "egressIPs": addresses,
                "namespaceSelector": {"matchLabels": {"house": NAMESPACE}},
                "podSelector": {"matchLabels": {"role": role}},
            },
        });
        self.cluster.create(EGRESS_IPS, &object).map(drop)
    }

    pub(super) fn forget(&self, object: &str) -> Result<()> {
        self.cluster.delete(&format!("{EGRESS_IPS}/{object}"))
    }

    /// Gives the object these addresses, each on its node, and waits until the chosen pods are seen with them.
    pub(super) fn place(&self, wanted: &[(IpAddr, usize)]) -> Result<()> {
        let mut listed = Vec::new();
        for (address, node) in wanted {
            self.assignable(*node, true)?;
            listed.push(*address);
            self.list(OBJECT, "chosen", &listed)?;
            self.await_assignment(OBJECT, *address, *node)?;
        }
        self.settle(&listed)
    }

    pub(super) fn await_assignment(&self, object: &str, address: IpAddr, node: usize) -> Result<()> {
        let path = format!("{EGRESS_IPS}/{object}");
        let pair = (format!("node{node}"), address.to_string());
        let seen = self.cluster.wait_for(&path, PATIENCE, |value| assigned(value).contains(&pair));
        seen.map(drop).with_context(|| format!("{address} is not assigned to node{node}"))
    }

    /// The object's egress ID.
    pub(super) fn egress_id(&self, object: &str) -> Result<u32> {
        let object = self.cluster.egress_ip(object)?.context("the object is not there")?;
        let annotations = object.pointer("/metadata/annotations").context("no annotations")?;
        let id = annotations.get(TUNNEL_ID).and_then(Value::as_str).context("no egress ID")?;
        Ok(id.parse()?)
    }

    /// Waits until each chosen pod is seen outside as one of these addresses, family by family.
    pub(super) fn settle(&self, addresses: &[IpAddr]) -> Result<()> {
        for node in 1..=3 {
            let pod = self.chosen(node)?;
            for to in plan::SERVER.both() {
                let expected: Vec<&IpAddr> = addresses.iter().filter(|one| one.is_ipv4() == to.is_ipv4()).collect();
                if !expected.is_empty() {
                    let what = format!("{} is seen as {expected:?}", pod.name);
                    until(&what, PATIENCE, || Ok(seen_as(&pod.netns, to)?.is_some_and(|ip| expected.contains(&&ip))))?;
                }
            }
        }
        Ok(())
    }

    /// Changes the label that the object selects by.
    pub(super) fn set_role(&self, pod: &Pod, role: &str) -> Result<()> {
        let path = format!("/api/v1/namespaces/{}/pods/{}", pod.namespace, pod.name);
        self.cluster.merge(&path, &json!({"metadata": {"labels": {"role": role}}}))
    }
}

/// The (node, address) pairs of an object's status.
fn assigned(object: &Value) -> Vec<(String, String)> {
    let text = |item: &Value, key: &str| item.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
    let items = object.pointer("/status/items").and_then(Value::as_array);
    items.into_iter().flatten().map(|item| (text(item, "node"), text(item, "egressIP"))).collect()
}

/// How the server outside sees a caller; `None` where it gets no answer.
pub(super) fn seen_as(from: &Netns, server: IpAddr) -> Result<Option<IpAddr>> {
    client::get(from, SocketAddr::new(server, HTTP_PORT), "/", "roads")?.ok().map(|reply| reply.seen_as()).transpose()
}

/// Asks until the answer is yes; says how long that took.
pub(super) fn until(what: &str, patience: Duration, mut holds: impl FnMut() -> Result<bool>) -> Result<Duration> {
    let begin = Instant::now();
    loop {
        if holds()? {
            return Ok(begin.elapsed());
        }
        ensure!(begin.elapsed() < patience, "not within {} s: {what}", patience.as_secs_f32());
        thread::sleep(Duration::from_millis(10));
    }
}
