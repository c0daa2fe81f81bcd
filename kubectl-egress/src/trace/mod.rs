//! `kubectl egress trace`: one answer for the whole path of a packet.
//!
//! The agent of the pod's node runs its programs on the packet. If they send it to a gateway node, the agent there decides about
//! the second half (`egress-agent trace --from-node`): by the decision over its maps, since a test run cannot carry a tunnel
//! header. What was not checked is printed. [`PathAnswer::of`] judges both halves.

use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;

use serde::{Deserialize, Serialize};

use crate::agents::{AgentPod, on_node};
use crate::arguments::{Format, PathArgs};
use crate::cluster::{ClusterApi, PlacedPod, node_at};
use crate::error::PluginError;
use crate::exec::{Exec, printable};

/// Verdicts after which another node decides: the gateway, or the new owner of an address.
const SENT_ON: [&str; 2] = ["to_gateway", "handed_over"];

/// What this plugin reads of `egress-agent trace -o json` on the pod's node.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct SourceHalf {
    packet: String,
    verdict: String,
    class: String,
    meaning: String,
    gateway: Option<ReportedGateway>,
    to_egress_ip: Option<EgressIpTarget>,
    source: Option<SeenSource>,
    advice: Option<String>,
    agrees: bool,
    #[serde(default)]
    warnings: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct ReportedGateway {
    node: String,
    egress_ip: IpAddr,
    egress_id: u32,
    overlay: Option<OverlayPath>,
}

/// The destination of a packet that reaches nothing, because it is an egress IP.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct EgressIpTarget {
    address: IpAddr,
    object: Option<String>,
    fate: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct OverlayPath {
    from: IpAddr,
    to: IpAddr,
    node: Option<String>,
    source: IpAddr,
    source_port: u16,
}

/// The packet's source as the world sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SeenSource {
    address: IpAddr,
    #[serde(skip_serializing_if = "Option::is_none")]
    port: Option<u16>,
    whose: String,
}

/// The same of `egress-agent trace --from-node -o json` on the gateway.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct GatewayHalf {
    object: String,
    verdict: String,
    class: String,
    meaning: String,
    passed_to: Option<String>,
    source: Option<SeenSource>,
    advice: Option<String>,
    #[serde(default)]
    foreseen: Vec<String>,
    #[serde(default)]
    warnings: Vec<String>,
}

/// One half of the path, as it is printed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct NodeVerdict {
    node: String,
    verdict: String,
    class: String,
    meaning: String,
}

/// The answer, and what it follows from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct PathAnswer {
    packet: String,
    pod: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    egress_ip: Option<IpAddr>,
    #[serde(skip_serializing_if = "Option::is_none")]
    object: Option<String>,
    /// The pod's node, then the gateway.
    path: Vec<NodeVerdict>,
    /// Whether the packet leaves with an egress IP; unknown if its last node was not asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    leaves_with_egress_ip: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    source: Option<SeenSource>,
    answer: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    advice: Option<String>,
    warnings: Vec<String>,
    /// Whether programs and decision agree on the pod's node.
    agrees: bool,
}

/// The second half, or why it is unknown.
type Second = Option<(String, Result<GatewayHalf, String>)>;

impl PathAnswer {
    pub(crate) fn of(pod: &PlacedPod, first: SourceHalf, second: Second) -> Self {
        let SourceHalf { packet, verdict, class, meaning, gateway, to_egress_ip, source, advice, agrees, mut warnings } =
            first;
        warnings.iter_mut().for_each(|line| *line = format!("{}: {line}", pod.node));
        let mut answer = Self {
            packet,
            pod: format!("{} on {}", pod.full_name, pod.node),
            egress_ip: gateway.as_ref().map(|gateway| gateway.egress_ip),
            object: None,
            leaves_with_egress_ip: leaves(&verdict, "snat_here"),
            answer: match &to_egress_ip {
                Some(to) => reaches_nothing(to),
                None => at_source(&pod.node, &verdict, &class, source.as_ref(), gateway.as_ref()),
            },
            path: vec![NodeVerdict { node: pod.node.clone(), verdict, class, meaning }],
            source,
            advice,
            warnings,
            agrees,
        };
        match second {
            None => {}
            Some((node, Ok(half))) => answer.add(node, half),
            Some((node, Err(why))) => {
                answer.leaves_with_egress_ip = None;
                answer.source = None;
                answer.answer = format!("the packet goes to {node}, and what becomes of it there is not known: {why}");
                answer.advice = None;
            }
        }
        answer
    }

    fn add(&mut self, node: String, half: GatewayHalf) {
        let GatewayHalf { object, verdict, class, meaning, passed_to, source, advice, foreseen, warnings } = half;
        self.leaves_with_egress_ip = leaves(&verdict, "snat_for_node");
        self.answer = match (&source, passed_to) {
            (Some(source), _) => {
                let others = foreseen.iter().filter(|one| **one != verdict).cloned().collect::<Vec<_>>().join(", ");
                format!("leaves {node} from {}, unless route or next hop fail there ({others})", shown(source))
            }
            (None, Some(to)) => {
                format!("{node} passes it on to {to}, which takes the address over: ask again in a second")
            }
            (None, None) => becomes(&node, &verdict, &class),
        };
        self.object = Some(object);
        (self.source, self.advice) = (source, advice);
        self.warnings.extend(warnings.into_iter().map(|line| format!("{node}: {line}")));
        self.path.push(NodeVerdict { node, verdict, class, meaning });
    }

    fn text(&self) -> String {
        let mut text = String::new();
        // Agents say what is printed. Writing to a string does not fail.
        let mut line = |name: &str, value: &str| {
            let _written = writeln!(text, "{name:<11}{}", printable(value));
        };
        line("packet", &self.packet);
        line("pod", &self.pod);
        if let Some(address) = self.egress_ip {
            let of = self.object.as_ref().map_or_else(String::new, |object| format!(" of {object}"));
            line("egress IP", &format!("{address}{of}"));
        }
        for NodeVerdict { node, verdict, class, meaning } in &self.path {
            line("verdict", &format!("{node}: {verdict} ({class}): {meaning}"));
        }
        line("answer", &self.answer);
        if let Some(advice) = &self.advice {
            line("to do", advice);
        }
        for warning in &self.warnings {
            line("!", warning);
        }
        text
    }
}

/// Whether a packet with this verdict leaves with an egress IP. Another node decides about one that is sent on.
fn leaves(verdict: &str, translated: &str) -> Option<bool> {
    (!SENT_ON.contains(&verdict)).then(|| verdict == translated)
}

fn at_source(
    node: &str,
    verdict: &str,
    class: &str,
    source: Option<&SeenSource>,
    gateway: Option<&ReportedGateway>,
) -> String {
    match (verdict, source, gateway) {
        ("snat_here", Some(source), _) => format!("leaves {node} from {}", shown(source)),
        ("to_gateway", _, Some(gateway)) => format!(
            "goes to {}, and what becomes of it there is not known: the agent on {node} does not say what to ask there; is it of \
             another version than this plugin?",
            gateway.node
        ),
        ("handed_over", ..) => format!("{node} passes it on to the new node of the address: ask again in a second"),
        (_, Some(source), _) => {
            format!("{node} gives it no egress IP ({verdict}): the world sees {}, {}", source.address, source.whose)
        }
        _ => becomes(node, verdict, class),
    }
}

fn reaches_nothing(EgressIpTarget { address, object, fate }: &EgressIpTarget) -> String {
    let object = object.as_deref().unwrap_or("the cluster");
    format!("{address} is an egress IP of {object}: {fate}")
}

/// A class is a participle, such as `dropped`, or a sentence without its subject.
fn becomes(node: &str, verdict: &str, class: &str) -> String {
    let is = if class.starts_with("goes ") { "" } else { "is " };
    format!("{is}{class} on {node} ({verdict})")
}

fn shown(SeenSource { address, port, .. }: &SeenSource) -> String {
    port.map_or_else(|| address.to_string(), |port| SocketAddr::new(*address, port).to_string())
}

pub(crate) async fn run(args: &PathArgs, cluster: &ClusterApi, exec: &impl Exec) -> Result<ExitCode, PluginError> {
    let answer = follow(args, cluster, exec).await?;
    match args.output {
        Format::Table => print!("{}", answer.text()),
        Format::Json => println!("{}", serde_json::to_string_pretty(&answer).map_err(PluginError::Unwritten)?),
    }
    // As `egress-agent trace`, and if half of the path is unknown.
    let is_whole = answer.agrees && answer.leaves_with_egress_ip.is_some();
    Ok(if is_whole { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn follow(args: &PathArgs, cluster: &ClusterApi, exec: &impl Exec) -> Result<PathAnswer, PluginError> {
    let pod = cluster.pod(&args.pod).await?;
    if pod.uses_host_network {
        return Err(PluginError::HostNetwork(pod.full_name));
    }
    let agents = cluster.agents().await?;
    let asked = ["--pod".to_owned(), pod.full_name.clone()];
    let first: SourceHalf = ask(exec, on_node(&agents, &pod.node)?, &line(args, &asked, args.from_port)).await?;
    let hop = first.gateway.as_ref().and_then(|gateway| Some((gateway.overlay.clone()?, gateway.egress_id)));
    let second = match hop {
        None => None,
        Some((hop, egress_id)) => Some(at_gateway(args, cluster, exec, &agents, (&hop, egress_id)).await),
    };
    Ok(PathAnswer::of(&pod, first, second))
}

/// The gateway and its half, or why that is unknown: the first half is printed all the same.
async fn at_gateway(
    args: &PathArgs,
    cluster: &ClusterApi,
    exec: &impl Exec,
    agents: &[AgentPod],
    (hop, egress_id): (&OverlayPath, u32),
) -> (String, Result<GatewayHalf, String>) {
    let named = match &hop.node {
        Some(node) => Ok(node.clone()),
        // The agent does not know the names while it starts.
        None => name_of(cluster, hop.to).await,
    };
    let node = match named {
        Ok(node) => node,
        Err(error) => return (hop.to.to_string(), Err(error.to_string())),
    };
    let asked = [
        "--pod-ip".to_owned(),
        hop.source.to_string(),
        "--from-node".to_owned(),
        hop.from.to_string(),
        "--egress-id".to_owned(),
        egress_id.to_string(),
    ];
    let agent = match on_node(agents, &node) {
        Ok(agent) => agent,
        Err(error) => return (node, Err(error.to_string())),
    };
    // An identifier of a ping is given as a port too.
    let half = ask(exec, agent, &line(args, &asked, Some(hop.source_port))).await;
    (node, half.map_err(|error| error.to_string()))
}

async fn name_of(cluster: &ClusterApi, endpoint: IpAddr) -> Result<String, PluginError> {
    let nodes = cluster.nodes().await?;
    node_at(&nodes, endpoint).map(str::to_owned).ok_or(PluginError::UnknownEndpoint(endpoint))
}

fn line(args: &PathArgs, asked: &[String], from_port: Option<u16>) -> Vec<String> {
    let mut line = vec!["trace".to_owned(), "--output".to_owned(), "json".to_owned()];
    line.extend(asked.iter().cloned());
    line.extend(["--to".to_owned(), args.to.to_string()]);
    if let Some(protocol) = &args.proto {
        line.extend(["--proto".to_owned(), protocol.clone()]);
    }
    if let Some(port) = from_port {
        line.extend(["--from-port".to_owned(), port.to_string()]);
    }
    line
}

/// A trace that disagrees with the decision prints its report and ends with code 1.
async fn ask<T: for<'a> Deserialize<'a>>(
    exec: &impl Exec,
    agent: &AgentPod,
    arguments: &[String],
) -> Result<T, PluginError> {
    let finished = exec.collected(agent, arguments).await?;
    if finished.stdout.is_empty() {
        let (node, pod) = (agent.node.clone(), format!("{}/{}", agent.namespace, agent.name));
        return Err(PluginError::Refused { node, pod, why: finished.complaint() });
    }
    let read = serde_json::from_slice(&finished.stdout);
    read.map_err(|source| PluginError::Unreadable { node: agent.node.clone(), source })
}

#[cfg(test)]
mod tests;
