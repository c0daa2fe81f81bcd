//! `kubectl egress who`: which pods use an egress IP now, from the statuses of all objects and the NAT mappings of the gateway; or
//! the pod that had a port at a time ([`past`]).
//!
//! A mapping names the pod by its address. The pod that has the address now is named: another pod may have had it when the
//! mapping was made.

mod past;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;

use egress_core::model::policy::{Policies, parse_egress_ip};
use serde::{Deserialize, Serialize};

use crate::agents::{AgentPod, on_node};
use crate::arguments::{Format, WhoArgs};
use crate::cluster::{ClusterApi, PlacedPod, node_at};
use crate::error::PluginError;
use crate::exec::{Exec, printable};

/// What this plugin reads of a row of `egress-agent nat list -o json`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct ReportedMapping {
    egress_port: u16,
    object: Option<String>,
    protocol: String,
    pod_ip: IpAddr,
    pod_port: u16,
    pod: Option<String>,
    node: String,
    to: IpAddr,
    to_port: u16,
    age_seconds: u64,
}

/// A user of the address, or of one of its ports.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct AddressUser {
    /// `namespace/name` of the pod that has the address now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pod: Option<String>,
    pod_ip: IpAddr,
    node: String,
    mappings: Vec<UsedMapping>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct UsedMapping {
    protocol: String,
    pod_port: u16,
    egress_port: u16,
    to: IpAddr,
    to_port: u16,
    age_seconds: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct WhoAnswer {
    egress_ip: IpAddr,
    #[serde(skip_serializing_if = "Option::is_none")]
    port: Option<u16>,
    objects: BTreeSet<String>,
    gateway: String,
    users: Vec<AddressUser>,
}

impl WhoAnswer {
    fn text(&self) -> String {
        let mut text = String::new();
        // Agents and objects name what is printed. Writing to a string does not fail.
        let mut line = |line: &str| {
            let _written = writeln!(text, "{}", printable(line));
        };
        let objects = self.objects.iter().cloned().collect::<Vec<_>>().join(", ");
        line(&format!("{} is an egress IP of {objects}, on {}", self.egress_ip, self.gateway));
        if self.users.is_empty() {
            let port = self.port.map_or_else(String::new, |port| format!(" at port {port}"));
            line(&format!("no connection{port} has a mapping there now"));
        }
        for user in &self.users {
            let pod = user.pod.as_deref().unwrap_or("a pod that is gone");
            line(&format!("{pod} ({}) on {}: {}", user.pod_ip, user.node, count(user.mappings.len())));
            if self.port.is_some() {
                for one in &user.mappings {
                    let (from, to) = (SocketAddr::new(user.pod_ip, one.pod_port), SocketAddr::new(one.to, one.to_port));
                    let seen = SocketAddr::new(self.egress_ip, one.egress_port);
                    let (protocol, age) = (&one.protocol, one.age_seconds);
                    line(&format!("  {protocol} {from} -> {to}, seen from {seen}, for {age} s"));
                }
            }
        }
        text
    }
}

fn count(some: usize) -> String {
    if some == 1 { "1 mapping".to_owned() } else { format!("{some} mappings") }
}

/// The node that serves the address, and the objects that have it there.
fn server(policies: &Policies, address: IpAddr) -> Option<(String, BTreeSet<String>)> {
    let mut found: Option<(String, BTreeSet<String>)> = None;
    for policy in policies.values() {
        for item in policy.published.items.iter().filter(|item| parse_egress_ip(&item.egress_ip) == Some(address)) {
            let (_, objects) = found.get_or_insert_with(|| (item.node.clone(), BTreeSet::new()));
            objects.insert(policy.written_as());
        }
    }
    found
}

/// The users by pod address, the one with most mappings first. Without a port every mapping of the address counts.
fn users(rows: Vec<ReportedMapping>, port: Option<u16>) -> (Vec<AddressUser>, BTreeSet<String>) {
    let (mut by_pod, mut objects) = (BTreeMap::<(IpAddr, String), AddressUser>::new(), BTreeSet::new());
    for row in rows.into_iter().filter(|row| port.is_none_or(|port| port == row.egress_port)) {
        let ReportedMapping { egress_port, object, protocol, pod_ip, pod_port, pod, node, to, to_port, age_seconds } =
            row;
        objects.extend(object);
        let new = || AddressUser { pod, pod_ip, node: node.clone(), mappings: Vec::new() };
        let user = by_pod.entry((pod_ip, node.clone())).or_insert_with(new);
        user.mappings.push(UsedMapping { protocol, pod_port, egress_port, to, to_port, age_seconds });
    }
    let mut users: Vec<_> = by_pod.into_values().collect();
    users.sort_by_key(|user| std::cmp::Reverse(user.mappings.len()));
    (users, objects)
}

/// Names the pods of one node by their addresses.
fn name_pods(users: &mut [AddressUser], node: &str, pods: &[PlacedPod]) {
    for user in users.iter_mut().filter(|user| user.node == node && user.pod.is_none()) {
        let owner = pods.iter().find(|pod| pod.addresses.contains(&user.pod_ip));
        user.pod = owner.map(|pod| pod.full_name.clone());
    }
}

pub(crate) async fn run(args: &WhoArgs, cluster: &ClusterApi, exec: &impl Exec) -> Result<ExitCode, PluginError> {
    if let Some(at) = &args.at {
        let port = args.seen.port.ok_or(PluginError::NoPort)?;
        let answer = past::ask(args, (port, at), cluster, exec).await?;
        return printed(args.output, &answer, &answer.text(), answer.users.is_empty());
    }
    let answer = ask(args, cluster, exec).await?;
    printed(args.output, &answer, &answer.text(), answer.users.is_empty())
}

fn printed(format: Format, answer: &impl Serialize, text: &str, is_empty: bool) -> Result<ExitCode, PluginError> {
    match format {
        Format::Table => print!("{text}"),
        Format::Json => println!("{}", serde_json::to_string_pretty(answer).map_err(PluginError::Unwritten)?),
    }
    Ok(if is_empty { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

async fn ask(args: &WhoArgs, cluster: &ClusterApi, exec: &impl Exec) -> Result<WhoAnswer, PluginError> {
    let address = args.seen.address;
    let found = server(&cluster.policies().await?, address);
    let (gateway, mut objects) = found.ok_or(PluginError::NotAssigned(address))?;
    let agents = cluster.agents().await?;
    let rows = mappings(args, exec, on_node(&agents, &gateway)?).await?;
    let (mut users, named) = users(rows, args.seen.port);
    // The mappings name exactly the objects of their flows.
    if !named.is_empty() {
        objects = named;
    }
    // A gateway names other nodes by their addresses while its agent does not run.
    if users.iter().any(|user| user.node.parse::<IpAddr>().is_ok()) {
        let nodes = cluster.nodes().await?;
        for user in &mut users {
            let name = user.node.parse().ok().and_then(|endpoint| node_at(&nodes, endpoint));
            user.node = name.map_or_else(|| user.node.clone(), str::to_owned);
        }
    }
    users.iter_mut().filter(|user| user.node == "here").for_each(|user| user.node.clone_from(&gateway));
    let unnamed = users.iter().filter(|user| user.pod.is_none()).map(|user| user.node.clone());
    for node in unnamed.collect::<BTreeSet<_>>() {
        name_pods(&mut users, &node, &cluster.pods_on(&node).await?);
    }
    Ok(WhoAnswer { egress_ip: address, port: args.seen.port, objects, gateway, users })
}

async fn mappings(args: &WhoArgs, exec: &impl Exec, agent: &AgentPod) -> Result<Vec<ReportedMapping>, PluginError> {
    let mut line: Vec<String> =
        ["nat", "list", "--output", "json", "--egress-ip"].into_iter().map(str::to_owned).collect();
    line.push(args.seen.address.to_string());
    if let Some(to) = &args.to {
        line.extend(["--to".to_owned(), to.to_string()]);
    }
    let finished = exec.collected(agent, &line).await?;
    // A list that ends with an error is incomplete.
    if finished.code != 0 {
        let (node, pod) = (agent.node.clone(), format!("{}/{}", agent.namespace, agent.name));
        return Err(PluginError::Refused { node, pod, why: finished.complaint() });
    }
    let read = serde_json::from_slice(&finished.stdout);
    read.map_err(|source| PluginError::Unreadable { node: agent.node.clone(), source })
}

#[cfg(test)]
mod tests;
