//! `egress-agent trace`: predicts the verdict for a packet of a pod of this node, with the reason, without sending one.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::PathBuf;
use std::{fmt, io};

use clap::Args;
use egress_common::decide::from_overlay::Outer;
use egress_common::wire::{PROTO_ICMP, PROTO_ICMPV6, PROTO_TCP};
use egress_terminal::page::{Severity, complain};

use serde::Serialize;

use crate::cmd::CliError;
use crate::cmd::page::{Output, PageArgs, names_or_warning};
use crate::cmd::values::{Destination, PodName, Protocol};
use egress_core::display_names::Names;
use egress_datapath::trace::arrival::trace_arrival;
use egress_datapath::trace::report::{ArrivalReport, TraceReport};
use egress_datapath::trace::test_packet::TestPacket;
use egress_datapath::trace::{TraceError, Tracer};
use egress_kube::admin::{self, PodError, PodFacts};
use egress_kube::client::{ClientError, connect_as_user};

#[derive(Args, Debug)]
pub(super) struct TraceArgs {
    /// Pod of this node that sends the packet
    #[arg(long, env = "EGRESS_AGENT_TRACE_POD", value_name = "NAMESPACE/NAME", required_unless_present = "pod_ip")]
    pod: Option<PodName>,
    /// Address of the pod, if neither the agent nor the API server knows it
    #[arg(long, env = "EGRESS_AGENT_TRACE_POD_IP", value_name = "ADDRESS", conflicts_with = "pod")]
    pod_ip: Option<IpAddr>,
    /// Destination of the packet; for IPv6 with a port, [ADDRESS]:PORT
    #[arg(long, env = "EGRESS_AGENT_TRACE_TO", value_name = "ADDRESS[:PORT]")]
    to: Destination,
    /// tcp, udp, icmp, sctp or a protocol's number [default: tcp with a port, else icmp]
    #[arg(long, env = "EGRESS_AGENT_TRACE_PROTO", value_name = "PROTOCOL")]
    proto: Option<Protocol>,
    /// The pod's port, or identifier of a ping, to trace an existing flow
    #[arg(long, env = "EGRESS_AGENT_TRACE_FROM_PORT", value_name = "PORT", default_value_t = 40_000)]
    from_port: u16,
    /// A packet in the middle of a connection, not its first one
    #[arg(long, env = "EGRESS_AGENT_TRACE_UNDER_WAY")]
    under_way: bool,
    /// Length of the packet (bytes, from the IP header on) [default: its headers]
    #[arg(
        long,
        env = "EGRESS_AGENT_TRACE_LENGTH",
        value_name = "BYTES",
        default_value_t = 0,
        hide_default_value = true
    )]
    length: u16,
    /// Follow the packet on this node as the gateway: it comes by the overlay from the node with this tunnel endpoint
    #[arg(
        long,
        env = "EGRESS_AGENT_TRACE_FROM_NODE",
        value_name = "ADDRESS",
        requires = "egress_id",
        conflicts_with_all = ["pod", "length", "ttl"]
    )]
    from_node: Option<IpAddr>,
    /// Egress ID of the object that selects the pod, with --from-node
    #[arg(long, env = "EGRESS_AGENT_TRACE_EGRESS_ID", value_name = "NUMBER", requires = "from_node")]
    egress_id: Option<u32>,
    /// TTL or hop limit of the packet
    #[arg(long, env = "EGRESS_AGENT_TRACE_TTL", value_name = "HOPS", default_value_t = 64)]
    ttl: u8,
    /// Kubeconfig for the API server, if no agent answers [default: kubectl's rules, else that of a pod of the cluster]
    #[arg(long, env = "EGRESS_AGENT_KUBECONFIG", value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    #[command(flatten)]
    page: PageArgs,
}

/// Why there is no trace.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NoTrace {
    #[error("protocol {0} has ports: --to ADDRESS:PORT")]
    NeedsPort(u8),
    #[error("{0} has no ports: --to ADDRESS")]
    HasNoPort(&'static str),
    #[error(
        "{pod} has no address of the family of {to} on this node: a pod is traced on its own node, see \
         `kubectl get pod -o wide`"
    )]
    NoAddress { pod: PodName, to: IpAddr },
    #[error("there is no pod {pod}{alike}")]
    NoSuchPod { pod: PodName, alike: Alike },
    #[error("{pod} is on {at}, and this is {node}: a pod is traced on its own node{alike}")]
    Elsewhere { pod: PodName, at: String, node: String, alike: Alike },
    #[error("{pod} is on no node yet")]
    Unscheduled { pod: PodName },
    #[error("{pod} is on this node, {node}, and {why}")]
    NoEndpoint { pod: PodName, node: String, why: &'static str },
    #[error(
        "{pod} is not on this node, {node}{alike}; the API server does not say whether it is elsewhere ({source}), see \
         `kubectl get pod -A -o wide`"
    )]
    NotHere { pod: PodName, node: String, alike: Alike, source: PodError },
    #[error("no agent answers at {}, and the API server does not return {pod}: {source}; give --pod-ip", .socket.display())]
    UnknownPod { pod: PodName, socket: PathBuf, source: PodError },
    #[error("no agent answers at {}, and {source}; give --pod-ip", .socket.display())]
    NoServer { socket: PathBuf, source: Box<ClientError> },
    #[error("{pod} is not on this node, {node}{alike}; whether it is elsewhere cannot be asked: {source}")]
    NotHereWithoutServer { pod: PodName, node: String, alike: Alike, source: Box<ClientError> },
    #[error(transparent)]
    Trace(#[from] TraceError),
}

pub(super) fn run(args: &TraceArgs) -> Result<(), CliError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let names = runtime.block_on(names_or_warning(&args.page.socket));
    let from = runtime.block_on(sender(args, &names))?;
    let probe = args.probe(from)?;
    if let (Some(node), Some(egress_id)) = (args.from_node, args.egress_id) {
        let outer = Outer { source: node.into(), egress_id };
        let arrival = trace_arrival(&args.page.bpffs, &probe, outer).map_err(NoTrace::from)?;
        let report = ArrivalReport::of(&arrival, &names);
        return Ok(print(args.page.output, || report.text(), &report)?);
    }
    let object = egress_datapath::object::embedded().unwrap_or_default();
    let mut tracer = Tracer::new(&args.page.bpffs, object).map_err(NoTrace::from)?;
    let traced = tracer.trace(&probe).map_err(NoTrace::from)?;
    let report = TraceReport::of(&traced, &names);
    print(args.page.output, || report.text(), &report)?;
    if report.agrees { Ok(()) } else { Err(CliError::Disagree) }
}

fn print(output: Output, text: impl FnOnce() -> String, report: &impl Serialize) -> io::Result<()> {
    match output {
        Output::Table => print!("{}", text()),
        Output::Json => println!("{}", serde_json::to_string_pretty(report)?),
    }
    Ok(())
}

/// The pod's address of the destination's family: from the agent, else from the API server.
async fn sender(args: &TraceArgs, names: &Names) -> Result<IpAddr, NoTrace> {
    let pod = match (&args.pod_ip, &args.pod) {
        (Some(address), _) => return Ok(*address),
        (None, Some(pod)) => pod,
        // The command line has one of the two.
        (None, None) => return Ok(args.to.address),
    };
    let to = args.to.address;
    let fits = |address: &IpAddr| address.is_ipv4() == to.is_ipv4();
    let known = names.addresses_of(&pod.to_string());
    if let Some(address) = known.iter().copied().find(fits) {
        return Ok(address);
    }
    if !known.is_empty() {
        return Err(NoTrace::NoAddress { pod: pod.clone(), to });
    }
    let (socket, pod) = (args.page.socket.clone(), pod.clone());
    let alike = Alike::of(&pod, names);
    let client = match (connect_as_user(args.kubeconfig.as_deref()).await.map_err(Box::new), &names.node) {
        (Ok(client), _) => client,
        (Err(source), None) => return Err(NoTrace::NoServer { socket, source }),
        (Err(source), Some(node)) => {
            return Err(NoTrace::NotHereWithoutServer { pod, node: node.clone(), alike, source });
        }
    };
    let asked = admin::pod(client, &pod.namespace, &pod.name).await;
    if let Some(node) = &names.node {
        return Err(absent(pod, node, alike, asked));
    }
    let PodFacts { node, addresses, .. } =
        asked.map_err(|source| NoTrace::UnknownPod { pod: pod.clone(), socket, source })?;
    // Without an agent this node has no name to compare with.
    if let Some(node) = node {
        complain(Severity::Warning, &format!("warning: {pod} is on {node}: it can be traced there alone"));
    }
    addresses.into_iter().find(fits).ok_or(NoTrace::NoAddress { pod, to })
}

/// Why the agent of `node` knows no address of the pod, by what the API server says of it.
fn absent(pod: PodName, node: &str, alike: Alike, asked: Result<PodFacts, PodError>) -> NoTrace {
    let node = node.to_owned();
    let facts = match asked {
        Ok(facts) => facts,
        Err(PodError::NotFound) => return NoTrace::NoSuchPod { pod, alike },
        Err(source) => return NoTrace::NotHere { pod, node, alike, source },
    };
    let why = match facts {
        PodFacts { node: None, .. } => return NoTrace::Unscheduled { pod },
        PodFacts { node: Some(at), .. } if at != node => return NoTrace::Elsewhere { pod, at, node, alike },
        PodFacts { host_network: true, .. } => "uses the node's network: it has no egress IP",
        PodFacts { completed: true, .. } => "has ended",
        PodFacts { addresses, .. } if addresses.is_empty() => "has no address yet",
        PodFacts { .. } => "its agent does not know its address yet: see `egress-agent status`",
    };
    NoTrace::NoEndpoint { pod, node, why }
}

/// Pods of this node that have the same name in another namespace: the namespace may be a mistake.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Alike(BTreeSet<String>);

impl Alike {
    fn of(pod: &PodName, names: &Names) -> Self {
        let is_alike = |other: &&String| other.split_once('/').is_some_and(|(_, name)| name == pod.name);
        Self(names.pods.values().filter(is_alike).cloned().collect())
    }
}

impl fmt::Display for Alike {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return Ok(());
        }
        let names: Vec<_> = self.0.iter().map(String::as_str).collect();
        write!(f, "; pods of this name on this node: {}", names.join(", "))
    }
}

impl TraceArgs {
    fn probe(&self, from: IpAddr) -> Result<TestPacket, NoTrace> {
        let Destination { address: to, port } = self.to;
        let ping = if to.is_ipv4() { PROTO_ICMP } else { PROTO_ICMPV6 };
        let protocol = match (self.proto, port) {
            (Some(Protocol(PROTO_ICMP | PROTO_ICMPV6)), Some(_)) => return Err(NoTrace::HasNoPort("icmp")),
            // Of either family.
            (Some(Protocol(PROTO_ICMP | PROTO_ICMPV6)) | None, None) => ping,
            (Some(Protocol(number)), None) if TestPacket::has_ports(number) => return Err(NoTrace::NeedsPort(number)),
            (Some(Protocol(number)), Some(_)) if !TestPacket::has_ports(number) => {
                return Err(NoTrace::HasNoPort("this protocol"));
            }
            (Some(Protocol(number)), _) => number,
            (None, Some(_)) => PROTO_TCP,
        };
        let dport = port.unwrap_or_default();
        let Self { from_port: sport, under_way, length, ttl, .. } = *self;
        Ok(TestPacket { from, to, protocol, sport, dport, under_way, ttl, length })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::parse_flags;

    fn parse(arguments: &str) -> Result<TraceArgs, clap::Error> {
        parse_flags(arguments.split(' '))
    }

    fn protocol(arguments: &str) -> Result<u8, String> {
        let args = parse(&format!("--pod-ip 10.0.0.1 {arguments}")).map_err(|error| error.to_string())?;
        args.probe(IpAddr::from([10, 0, 0, 1])).map(|probe| probe.protocol).map_err(|error| error.to_string())
    }

    #[test]
    fn the_protocol_follows_from_the_arguments() {
        for (arguments, number) in [
            ("--to 198.51.100.10:80", 6),
            ("--to 198.51.100.10", 1),
            ("--to 2001:db8::1", 58),
            ("--to [2001:db8::1]:443", 6),
            ("--to [2001:db8::1] --proto icmp", 58),
            ("--to 198.51.100.10:53 --proto udp", 17),
            ("--to 198.51.100.10:9 --proto 132", 132),
            ("--to 198.51.100.10 --proto 47", 47),
        ] {
            assert_eq!(protocol(arguments), Ok(number), "{arguments}");
        }
        for arguments in
            ["--to 198.51.100.10 --proto tcp", "--to 198.51.100.10:1 --proto icmp", "--to 1.2.3.4:1 --proto 47"]
        {
            assert!(protocol(arguments).expect_err(arguments).contains("--to ADDRESS"), "{arguments}");
        }
    }

    #[test]
    fn a_pod_that_is_not_here_is_told_from_one_that_does_not_exist() {
        let pods = ["red/one", "blue/one", "red/two"].map(str::to_owned).into_iter().zip(1..);
        let pods = pods.map(|(pod, last)| (IpAddr::from([10, 244, 1, last]), pod)).collect();
        let names = Names { pods, ..Names::default() };
        let says = |pod: &str, asked| {
            let pod: PodName = pod.parse().expect("a pod");
            let alike = Alike::of(&pod, &names);
            absent(pod, "node1", alike, asked).to_string()
        };
        let on = |node: &str| PodFacts { node: Some(node.to_owned()), ..PodFacts::default() };
        let address = vec![IpAddr::from([10, 244, 1, 9])];
        for (pod, asked, line) in [
            (
                "green/one",
                Err(PodError::NotFound),
                "there is no pod green/one; pods of this name on this node: blue/one, red/one",
            ),
            ("green/four", Err(PodError::NotFound), "there is no pod green/four"),
            ("red/four", Ok(on("node2")), "red/four is on node2, and this is node1: a pod is traced on its own node"),
            ("red/four", Ok(PodFacts::default()), "red/four is on no node yet"),
            ("red/four", Ok(on("node1")), "red/four is on this node, node1, and has no address yet"),
            (
                "red/four",
                Ok(PodFacts { host_network: true, addresses: address.clone(), ..on("node1") }),
                "red/four is on this node, node1, and uses the node's network: it has no egress IP",
            ),
            (
                "red/four",
                Ok(PodFacts { completed: true, ..on("node1") }),
                "red/four is on this node, node1, and has ended",
            ),
            (
                "red/four",
                Ok(PodFacts { addresses: address, ..on("node1") }),
                "red/four is on this node, node1, and its agent does not know its address yet: see `egress-agent status`",
            ),
            (
                "green/two",
                Err(PodError::Timeout),
                "green/two is not on this node, node1; pods of this name on this node: red/two; the API server does not say \
                 whether it is elsewhere (the API server does not answer within 5 s), see `kubectl get pod -A -o wide`",
            ),
        ] {
            assert_eq!(says(pod, asked), line);
        }
    }

    #[test]
    fn wrong_lines_are_refused() {
        for arguments in [
            "--to 198.51.100.10",
            "--pod-ip 10.0.0.1",
            "--pod one --to 198.51.100.10",
            "--pod a/b/c --to 198.51.100.10",
            "--pod a/b --pod-ip 10.0.0.1 --to 198.51.100.10",
            "--pod-ip 10.0.0.1 --to world",
            "--pod-ip 10.0.0.1 --to 198.51.100.10 --proto 256",
            "--pod-ip 10.0.0.1 --to 198.51.100.10 --from-node 172.18.0.3",
            "--pod-ip 10.0.0.1 --to 198.51.100.10 --egress-id 7",
            "--pod a/b --to 198.51.100.10 --from-node 172.18.0.3 --egress-id 7",
            "--pod-ip 10.0.0.1 --to 198.51.100.10 --from-node 172.18.0.3 --egress-id 7 --ttl 3",
        ] {
            assert!(parse(arguments).is_err(), "{arguments}");
        }
        assert_eq!(parse("--pod a/b --to 1.2.3.4").expect("a line").pod.expect("a pod").to_string(), "a/b");
    }
}
