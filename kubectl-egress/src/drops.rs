//! `kubectl egress drops`: the drops that an agent samples, with the names of pods on other nodes.
//!
//! An agent watches the pods of its own node alone, so on a gateway node it knows only the address of a pod elsewhere. The API server
//! knows the pods: the node is that whose pod subnet has the address, and its pods are listed when one of them is met. The pod that
//! has the address now is named: another pod may have had it when the packet was dropped.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::net::IpAddr;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use egress_core::allocation::Nodes;
use egress_core::dropped_packet::DroppedPacket;
use egress_core::model::policy::{Destinations, Policies, PolicyRule};
use egress_core::model::view::Labels;
use serde::Deserialize;

use crate::agents::on_node;
use crate::arguments::{AgentCommandArgs, Format};
use crate::cluster::{ClusterApi, PlacedPod};
use crate::error::PluginError;
use crate::exec::{Exec, printable};

/// An address without a pod is looked up again, and the API server asked again after a failure, but not more often than this.
const LIST_INTERVAL: Duration = Duration::from_secs(5);
/// How long nodes, objects and labels of namespaces count.
const CLUSTER_INTERVAL: Duration = Duration::from_secs(60);

/// In place of samples that the agent has left out.
#[derive(Deserialize)]
struct OmittedSamples {
    left_out: u64,
}

pub(crate) async fn run(
    args: &AgentCommandArgs,
    cluster: &ClusterApi,
    exec: &impl Exec,
) -> Result<ExitCode, PluginError> {
    let node = cluster.node_of(&args.place).await?;
    let agents = cluster.agents().await?;
    let (format, further) = format_of(&args.further)?;
    let line = ["drops", "--output", "json", "--end-with-stdin"].map(str::to_owned);
    let mut names = PodNames::of(cluster);
    let ended = exec
        .lines(on_node(&agents, &node)?, &[line.as_slice(), &further].concat(), async |line| {
            let text = shown(&line, format, &mut names).await?;
            writeln!(io::stdout().lock(), "{text}").map_err(PluginError::Stdout)
        })
        .await;
    match ended {
        // The reader has closed the pipe.
        Err(PluginError::Stdout(error)) if error.kind() == io::ErrorKind::BrokenPipe => Ok(ExitCode::SUCCESS),
        ended => Ok(ended?.into()),
    }
}

/// The format that the arguments ask for, and the other arguments: the agent prints JSON in any case.
fn format_of(further: &[String]) -> Result<(Format, Vec<String>), PluginError> {
    let (mut format, mut others) = (Format::Table, Vec::new());
    let mut arguments = further.iter();
    while let Some(argument) = arguments.next() {
        let value = match argument.as_str() {
            "-o" | "--output" => arguments.next().map_or("", String::as_str),
            other => {
                let given = other.strip_prefix("--output=").or_else(|| other.strip_prefix("-o="));
                match given.or_else(|| other.strip_prefix("-o")) {
                    Some(value) => value,
                    None => {
                        others.push(argument.clone());
                        continue;
                    }
                }
            }
        };
        format = Format::from_str(value, false).map_err(|_| PluginError::NoFormat(value.to_owned()))?;
    }
    Ok((format, others))
}

/// A line of the agent as it is printed. What is no drop, such as the text of `--help`, passes.
async fn shown(line: &str, format: Format, names: &mut PodNames<'_>) -> Result<String, PluginError> {
    if let Ok(mut packet) = serde_json::from_str::<DroppedPacket>(line) {
        names.complete(&mut packet).await;
        return match format {
            Format::Table => Ok(printable(&packet.line())),
            Format::Json => serde_json::to_string(&packet).map_err(PluginError::Unwritten),
        };
    }
    Ok(match (serde_json::from_str::<OmittedSamples>(line), format) {
        (Ok(OmittedSamples { left_out }), Format::Table) => format!("... and {left_out} more"),
        _ => printable(line),
    })
}

/// The pods of other nodes, as the API server has them.
struct PodNames<'a> {
    cluster: &'a ClusterApi,
    /// When nodes and policies were read.
    read: Option<Instant>,
    nodes: Nodes,
    policies: Policies,
    by_node: BTreeMap<String, (Instant, Vec<PlacedPod>)>,
    namespaces: BTreeMap<String, Labels>,
    failed: Option<Instant>,
}

impl<'a> PodNames<'a> {
    fn of(cluster: &'a ClusterApi) -> Self {
        Self {
            cluster,
            read: None,
            nodes: Nodes::new(),
            policies: Policies::new(),
            by_node: BTreeMap::new(),
            namespaces: BTreeMap::new(),
            failed: None,
        }
    }

    /// Adds the pods that the agent has not named, and the object that selects such a pod. Without an answer of the API server the
    /// addresses stand alone, which is said once, and the next lines do not wait for it.
    async fn complete(&mut self, packet: &mut DroppedPacket) {
        if self.failed.is_some_and(|at| at.elapsed() < LIST_INTERVAL) {
            return;
        }
        if let Err(error) = self.try_complete(packet).await
            && self.failed.replace(Instant::now()).is_none()
        {
            eprintln!("warning: {}; pods of other nodes may have no names", printable(&error.to_string()));
        }
    }

    async fn try_complete(&mut self, packet: &mut DroppedPacket) -> Result<(), PluginError> {
        let (source, destination) = (packet.source.ip(), packet.destination.ip());
        if packet.source_pod.is_none() {
            packet.source_pod = self.name(packet, source, destination).await?;
        }
        if packet.destination_pod.is_none() {
            packet.destination_pod = self.name(packet, destination, source).await?;
        }
        Ok(())
    }

    /// The pod that has this address, which talks to the other one.
    async fn name(
        &mut self,
        packet: &mut DroppedPacket,
        address: IpAddr,
        other: IpAddr,
    ) -> Result<Option<String>, PluginError> {
        let Some(pod) = self.pod_at(address).await? else { return Ok(None) };
        if packet.object.is_none() && packet.egress_id == 0 {
            packet.object = self.object_of(&pod, other).await?;
        }
        Ok(Some(pod.full_name))
    }

    async fn pod_at(&mut self, address: IpAddr) -> Result<Option<PlacedPod>, PluginError> {
        if self.read.is_none_or(|at| at.elapsed() >= CLUSTER_INTERVAL) {
            self.policies = self.cluster.policies().await?;
            self.nodes = self.cluster.nodes().await?;
            self.namespaces.clear();
            self.read = Some(Instant::now());
        }
        let has = |pod: &&PlacedPod| pod.addresses.contains(&address);
        let node = self.nodes.iter().find(|(_, node)| node.pod_subnets.iter().any(|net| net.contains(&address)));
        let Some(node) = node else { return Ok(None) };
        let known = self.by_node.get(node.0);
        if let Some((at, pods)) = known {
            let found = pods.iter().find(has);
            if found.is_some() || at.elapsed() < LIST_INTERVAL {
                return Ok(found.cloned());
            }
        }
        let pods = self.cluster.pods_on(node.0).await?;
        let found = pods.iter().find(has).cloned();
        self.by_node.insert(node.0.clone(), (Instant::now(), pods));
        Ok(found)
    }

    /// The object that selects a pod for this destination, if there is one alone: which of several serves it, only the pod's own node
    /// decides.
    async fn object_of(&mut self, pod: &PlacedPod, world: IpAddr) -> Result<Option<String>, PluginError> {
        if !self.namespaces.contains_key(&pod.namespace) {
            let labels = self.cluster.namespace_labels(&pod.namespace).await?;
            self.namespaces.insert(pod.namespace.clone(), labels);
        }
        let none = Labels::new();
        let namespace = self.namespaces.get(&pod.namespace).unwrap_or(&none);
        let node = self.nodes.get(&pod.node).map_or(&none, |node| &*node.labels);
        let mut objects = selecting(&self.policies, (namespace, &pod.labels, node), world);
        Ok(objects.pop_first().filter(|_| objects.is_empty()))
    }
}

/// The objects that select a pod with these labels of namespace, pod and node, for this destination.
fn selecting(
    policies: &Policies,
    (namespace, pod, node): (&Labels, &Labels, &Labels),
    world: IpAddr,
) -> BTreeSet<String> {
    let selects = |rule: &PolicyRule| {
        let is_selected = rule
            .selects
            .iter()
            .any(|one| one.namespaces.matches(namespace) && one.pods.matches(pod) && one.nodes.matches(node));
        is_selected && applies(&rule.destinations, world)
    };
    let found = policies.values().filter(|policy| policy.rules.iter().flatten().any(selects));
    found.map(|policy| policy.written_as()).collect()
}

fn applies(destinations: &Destinations, world: IpAddr) -> bool {
    match destinations {
        Destinations::All => true,
        Destinations::Prefixes(prefixes) => {
            let longest =
                prefixes.entries().filter(|(net, _)| net.contains(&world)).max_by_key(|(net, _)| net.prefix_len());
            longest.is_some_and(|(_, applies)| *applies)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use clap::Parser;
    use serde_json::{Value, json};

    use super::*;
    use crate::arguments::{Cli, PluginCommand};
    use crate::cluster::testing::{agent, cluster, egress_ip, pod};
    use crate::exec::Finished;
    use crate::exec::testing::PlayedExec;

    fn lists() -> Vec<(&'static str, Value)> {
        let node = |name: &str, subnet: &str| json!({"metadata": {"name": name}, "spec": {"podCIDRs": [subnet]}});
        let mut finished = pod("old", "n2", "10.244.2.10");
        finished["status"]["phase"] = "Succeeded".into();
        vec![
            ("pods", json!([agent("n1"), agent("n2"), finished, pod("two", "n2", "10.244.2.10")])),
            ("nodes", json!([node("n1", "10.244.1.0/24"), node("n2", "10.244.2.0/24")])),
            ("namespaces", json!([{"metadata": {"name": "red", "labels": {"a": "b"}}}])),
            ("egressips", json!([egress_ip("first", "172.18.0.100", "n1")])),
        ]
    }

    /// As the gateway n1 prints it: the pod is of n2.
    fn packet() -> Value {
        json!({
            "time": "2026-01-01T00:00:00.000Z", "reason": "not_gateway", "protocol": "tcp", "source": "10.244.2.10:4000",
            "destination": "198.51.100.10:80", "bytes": 60, "interface": "egress0",
        })
    }

    async fn line(printed: &Value, format: Format, lists: &[(&'static str, Value)]) -> String {
        let cluster = cluster(lists);
        shown(&printed.to_string(), format, &mut PodNames::of(&cluster)).await.expect("a line")
    }

    #[tokio::test]
    async fn a_gateway_shows_the_names_of_pods_on_other_nodes() {
        let text = line(&packet(), Format::Table, &lists()).await;
        let wanted = "2026-01-01T00:00:00.000Z not_gateway        tcp 10.244.2.10:4000 (red/two) -> 198.51.100.10:80, 60 bytes, \
                      egress0, first";
        assert_eq!(text, wanted);
        let json: Value = serde_json::from_str(&line(&packet(), Format::Json, &lists()).await).expect("JSON");
        assert_eq!((&json["source_pod"], &json["object"]), (&json!("red/two"), &json!("first")));
        // A reply.
        let mut reply = packet();
        reply["source"] = "198.51.100.10:80".into();
        reply["destination"] = "10.244.2.10:4000".into();
        let text = line(&reply, Format::Table, &lists()).await;
        assert!(text.contains("-> 10.244.2.10:4000 (red/two), ") && text.ends_with(", first"), "{text}");
    }

    #[tokio::test]
    async fn what_the_agent_has_named_stays() {
        let mut named = packet();
        named["source_pod"] = "blue/one".into();
        let text = line(&named, Format::Table, &lists()).await;
        assert!(text.contains("(blue/one)") && text.ends_with("egress0"), "{text}");
        named = packet();
        named["egress_id"] = 3.into();
        assert!(
            line(&named, Format::Table, &lists())
                .await
                .ends_with("(red/two) -> 198.51.100.10:80, 60 bytes, egress0, egress ID 3")
        );
    }

    #[tokio::test]
    async fn without_a_pod_or_a_single_object_there_is_no_name() {
        let mut unknown = packet();
        unknown["source"] = "10.244.2.11:4000".into();
        assert!(line(&unknown, Format::Table, &lists()).await.contains(" 10.244.2.11:4000 -> "));
        let mut two = lists();
        two[3].1.as_array_mut().expect("a list").push(egress_ip("second", "172.18.0.101", "n1"));
        assert!(line(&packet(), Format::Table, &two).await.ends_with("egress0"), "only n2 knows which");
        assert_eq!(line(&json!({"left_out": 7}), Format::Table, &[]).await, "... and 7 more");
        assert_eq!(line(&json!({"left_out": 7}), Format::Json, &[]).await, "{\"left_out\":7}");
    }

    /// A follower prints up to 50 lines a second.
    #[tokio::test]
    async fn after_a_failure_lines_do_not_wait_for_the_api_server() {
        let asked = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&asked);
        let service = tower::service_fn(move |_: http::Request<kube::client::Body>| {
            counter.fetch_add(1, Ordering::Relaxed);
            async { Err::<http::Response<kube::client::Body>, _>(io::Error::other("unreachable")) }
        });
        let cluster = ClusterApi::of(kube::Client::new(service, "default"));
        let mut names = PodNames::of(&cluster);
        let mut requests = Vec::new();
        for _ in 0..3 {
            let text = shown(&packet().to_string(), Format::Table, &mut names).await.expect("a line");
            assert!(text.contains(" 10.244.2.10:4000 -> "), "{text}");
            requests.push(asked.load(Ordering::Relaxed));
        }
        assert!(requests[0] > 0 && requests.iter().all(|count| *count == requests[0]), "{requests:?}");
    }

    #[tokio::test]
    async fn names_from_agents_cannot_control_the_terminal() {
        let mut bad = packet();
        bad["source_pod"] = "\u{1b}[2J".into();
        assert!(!line(&bad, Format::Table, &lists()).await.contains('\u{1b}'));
    }

    #[tokio::test]
    async fn the_agent_prints_json_and_ends_with_the_connection() {
        for (line, asked) in [
            ("drops --pod red/two", "n2: drops --output json --end-with-stdin"),
            ("drops --node n1 -- --follow -o json", "n1: drops --output json --end-with-stdin --follow"),
        ] {
            let exec = PlayedExec::new(|_, _| Finished { code: 3, ..Finished::default() });
            let PluginCommand::Drops(args) =
                Cli::parse_from(std::iter::once("kubectl-egress").chain(line.split(' '))).command
            else {
                panic!("another command")
            };
            let code = run(&args, &cluster(&lists()), &exec).await.expect("it ran");
            assert_eq!(*exec.asked.borrow(), [asked], "{line}");
            assert_eq!(format!("{code:?}"), format!("{:?}", ExitCode::from(3)), "{line}");
        }
    }

    #[test]
    fn the_format_is_read_as_the_agent_reads_it() {
        let read = |line: &str| {
            let further: Vec<String> = line.split(' ').map(str::to_owned).collect();
            format_of(&further).map_err(|error| error.to_string())
        };
        for json in ["-o json", "-ojson", "-o=json", "--output json", "--output=json"] {
            let line = format!("--follow {json} --reason map_full");
            let others = ["--follow", "--reason", "map_full"].map(str::to_owned).to_vec();
            assert_eq!(read(&line), Ok((Format::Json, others)), "{json}");
        }
        assert_eq!(read("-o table").map(|(format, _)| format), Ok(Format::Table));
        assert_eq!(read("-o yaml"), Err("\"yaml\" is no format of drops: give -o table or -o json".to_owned()));
    }
}
