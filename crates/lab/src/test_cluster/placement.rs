//! Egress IPs on the nodes that a test wants: one EgressIP object, and its addresses.
//!
//! Each node has two pods: `chosen<n>` is selected by the object, `plain<n>` is not. Where an address goes is steered
//! as people do it: by the label on nodes, one address at a time, since an assignment that is there stays.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::{TestCluster, pod};
use crate::api_objects::{EGRESS_IPS, TUNNEL_ID, assigned};
use crate::kube_api::ApiChoice;
use crate::test::LabContext;
use crate::topology::addresses::{self as plan, HTTP_PORT, NodeNumber};
use crate::topology::builder::LabBuilder;
use crate::topology::host_config::HostConfig;
use crate::topology::lab::{LabNode, LabPod};
use crate::topology::netns::Netns;
use crate::traffic::client;
use crate::wait::time_until;

/// The object that selects the chosen pods.
pub const OBJECT: &str = "paths";
pub const NAMESPACE: &str = "paths";

/// Egress IPs of the tests.
pub const FIRST_V4: IpAddr = IpAddr::V4(Ipv4Addr::new(172, 18, 0, 100));
pub const SECOND_V4: IpAddr = IpAddr::V4(Ipv4Addr::new(172, 18, 0, 101));
pub const FIRST_V6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfd00, 0x172, 0x18, 0, 0, 0, 0, 0x100));

/// How long agents may take for what they do at once.
pub const PATIENCE: Duration = Duration::from_secs(20);

impl TestCluster {
    /// Three nodes, each with a pod `chosen<n>`, which the object selects, and `plain<n>`.
    pub fn for_placement(context: &LabContext, config: impl Fn(usize) -> HostConfig + 'static) -> Result<Self> {
        let cni = context.cni;
        let lab = LabBuilder::default().host_config(move |index| HostConfig { cni, ..config(index) });
        Self::for_placement_on(context, lab, &[], |_| Ok(()))
    }

    /// The same with a lab of another shape, more arguments for the agents, and changes before these start.
    pub fn for_placement_on(
        context: &LabContext,
        mut lab: LabBuilder,
        arguments: &[&str],
        before_agents: impl FnOnce(&Self) -> Result<()>,
    ) -> Result<Self> {
        lab = lab.nodes(3).keep_logs(context.logs.clone());
        for node in 1..=3 {
            for role in ["chosen", "plain"] {
                lab = lab.pod(pod(&format!("{role}{node}"), NAMESPACE, node, &[("role", role)]));
            }
        }
        let mut cluster = Self::bring_up(lab, Some(0), &ApiChoice::new(None))?;
        before_agents(&cluster)?;
        cluster.start_agents(&cluster.options(context).with(arguments.iter().copied()))?;
        Ok(cluster)
    }

    pub fn node(&self, number: usize) -> Result<&LabNode> {
        Ok(self.lab.node(NodeNumber::new(number)?))
    }

    pub fn chosen(&self, node: usize) -> Result<&LabPod> {
        self.lab.pod(&format!("chosen{node}"))
    }

    pub fn plain(&self, node: usize) -> Result<&LabPod> {
        self.lab.pod(&format!("plain{node}"))
    }

    /// Writes an object that lists these addresses and selects the pods of this role.
    pub fn list(&self, object: &str, role: &str, addresses: &[IpAddr]) -> Result<()> {
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
        self.api.create(EGRESS_IPS, &object).map(drop)
    }

    pub fn forget(&self, object: &str) -> Result<()> {
        self.api.delete(&format!("{EGRESS_IPS}/{object}"))
    }

    /// Gives the object these addresses, each on its node, and waits until the chosen pods are seen with them.
    pub fn place(&self, wanted: &[(IpAddr, usize)]) -> Result<()> {
        let mut listed = Vec::new();
        for (address, node) in wanted {
            self.assignable(*node, true)?;
            listed.push(*address);
            self.list(OBJECT, "chosen", &listed)?;
            self.await_assignment(OBJECT, *address, *node)?;
        }
        self.settle(&listed)
    }

    pub fn await_assignment(&self, object: &str, address: IpAddr, node: usize) -> Result<()> {
        let path = format!("{EGRESS_IPS}/{object}");
        let pair = (address.to_string(), format!("node{node}"));
        let seen = self.api.wait_for(&path, PATIENCE, |value| assigned(value).contains(&pair));
        seen.map(drop).with_context(|| format!("{address} is not assigned to node{node}"))
    }

    /// The object's egress ID.
    pub fn egress_id(&self, object: &str) -> Result<u32> {
        let object = self.api.egress_ip(object)?.context("the object is not there")?;
        let annotations = object.pointer("/metadata/annotations").context("no annotations")?;
        let id = annotations.get(TUNNEL_ID).and_then(Value::as_str).context("no egress ID")?;
        Ok(id.parse()?)
    }

    /// Waits until each chosen pod is seen outside as one of these addresses, family by family.
    pub fn settle(&self, addresses: &[IpAddr]) -> Result<()> {
        for node in 1..=3 {
            let pod = self.chosen(node)?;
            for to in plan::SERVER.both() {
                let expected: Vec<&IpAddr> = addresses.iter().filter(|one| one.is_ipv4() == to.is_ipv4()).collect();
                if !expected.is_empty() {
                    let what = format!("{} is seen as {expected:?}", pod.name);
                    time_until(&what, PATIENCE, || {
                        Ok(seen_as(&pod.netns, to)?.is_some_and(|ip| expected.contains(&&ip)))
                    })?;
                }
            }
        }
        Ok(())
    }

    /// Changes the label that the object selects by.
    pub fn set_role(&self, pod: &LabPod, role: &str) -> Result<()> {
        let path = format!("/api/v1/namespaces/{}/pods/{}", pod.namespace, pod.name);
        self.api.merge(&path, &json!({"metadata": {"labels": {"role": role}}}))
    }
}

/// How the server outside sees a caller; `None` where it gets no answer.
pub fn seen_as(from: &Netns, server: IpAddr) -> Result<Option<IpAddr>> {
    client::get(from, SocketAddr::new(server, HTTP_PORT), "/", "paths")?.ok().map(|reply| reply.seen_as()).transpose()
}
