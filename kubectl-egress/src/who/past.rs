//! `kubectl egress who --at`: which pod had a port of an egress IP at a time, by the logs of NAT of all nodes.
//!
//! The address may have been on any node, so every agent is asked for the block. The pod's name is in the log of the pod's node.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};

use futures::{StreamExt as _, stream};
use serde::{Deserialize, Serialize};

use crate::agents::{AgentPod, on_node};
use crate::arguments::WhoArgs;
use crate::cluster::ClusterApi;
use crate::error::PluginError;
use crate::exec::{Exec, printable};

/// Agents that are asked at once.
const AT_ONCE: usize = 8;

/// What this plugin reads of `egress-agent nat log -o json`.
#[derive(Debug, Deserialize)]
struct ReportedLog {
    blocks: Vec<PastUser>,
    #[serde(default)]
    pods: Vec<ReportedPod>,
}

#[derive(Debug, Deserialize)]
struct ReportedPod {
    pod: String,
}

/// A pod that had the port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PastUser {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pod: Option<String>,
    pod_ip: IpAddr,
    /// Of the pod.
    pod_node: String,
    /// The gateway.
    node: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    object: Option<String>,
    first_port: u16,
    last_port: u16,
    from: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    to: Option<String>,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
pub(crate) struct PastAnswer {
    egress_ip: IpAddr,
    port: u16,
    at: String,
    /// Two while the address was moved from one gateway to another.
    pub(crate) users: Vec<PastUser>,
    /// Nodes whose log could not be read, and why.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    silent: BTreeMap<String, String>,
}

impl PastAnswer {
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        // Agents name what is printed. Writing to a string does not fail.
        let mut line = |line: &str| {
            let _written = writeln!(text, "{}", printable(line));
        };
        let seen = SocketAddr::new(self.egress_ip, self.port);
        if self.users.is_empty() {
            line(&format!("no log has a pod for {seen} at {}", self.at));
        }
        for user in &self.users {
            let pod = user.pod.as_deref().unwrap_or("a pod without a name in its node's log");
            let object = user.object.as_ref().map_or_else(String::new, |object| format!(", by {object}"));
            line(&format!("{pod} ({}) on {}{object}", user.pod_ip, user.pod_node));
            let to = user.to.as_ref().map_or_else(String::new, |to| format!(" to {to}"));
            let (first, last) = (user.first_port, user.last_port);
            line(&format!("  ports {first}-{last} on gateway {} from {}{to}", user.node, user.from));
        }
        for (node, why) in &self.silent {
            line(&format!("{node}: {why}"));
        }
        text
    }
}

pub(super) async fn ask(
    args: &WhoArgs,
    (port, at): (u16, &str),
    cluster: &ClusterApi,
    exec: &impl Exec,
) -> Result<PastAnswer, PluginError> {
    let address = args.seen.address;
    let agents = cluster.agents().await?;
    let filters = ["--egress-ip".to_owned(), address.to_string(), "--port".to_owned(), port.to_string()];
    let asked = agents.iter().map(async |agent| (agent.node.clone(), log(exec, agent, &filters, at).await));
    let mut answers = stream::iter(asked).buffer_unordered(AT_ONCE);
    let (mut users, mut silent) = (Vec::new(), BTreeMap::new());
    while let Some((node, answer)) = answers.next().await {
        match answer {
            Ok(log) => users.extend(log.blocks),
            Err(error) => drop(silent.insert(node, error.to_string())),
        }
    }
    users.sort_by(|one, other| one.from.cmp(&other.from));
    for user in users.iter_mut().filter(|user| user.pod.is_none()) {
        let filters = ["--pod-ip".to_owned(), user.pod_ip.to_string()];
        let named = match on_node(&agents, &user.pod_node) {
            Ok(agent) => log(exec, agent, &filters, at).await,
            Err(none) => Err(none.into()),
        };
        match named {
            Ok(log) => user.pod = log.pods.into_iter().next().map(|pod| pod.pod),
            Err(error) => drop(silent.insert(user.pod_node.clone(), error.to_string())),
        }
    }
    Ok(PastAnswer { egress_ip: address, port, at: at.to_owned(), users, silent })
}

async fn log(exec: &impl Exec, agent: &AgentPod, filters: &[String], at: &str) -> Result<ReportedLog, PluginError> {
    let line = ["nat", "log", "--output", "json", "--at", at].map(str::to_owned);
    let finished = exec.collected(agent, &[line.as_slice(), filters].concat()).await?;
    if finished.code != 0 {
        let (node, pod) = (agent.node.clone(), format!("{}/{}", agent.namespace, agent.name));
        return Err(PluginError::Refused { node, pod, why: finished.complaint() });
    }
    let read = serde_json::from_slice(&finished.stdout);
    read.map_err(|source| PluginError::Unreadable { node: agent.node.clone(), source })
}
